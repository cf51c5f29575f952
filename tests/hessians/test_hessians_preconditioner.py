"""Changes of variables against dense algebra: products, adjoints, inverses, and what they do to Hessians."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import (
    CentringScaling,
    DensePreconditioner,
    GroupedPreconditioner,
    HessianOperator,
    Kronecker,
    Preconditioner,
    Scaling,
)
from hesscond.hessians.coordinates.linear import UnitCoordinates, by_group, coordinates_of
from hesscond.operators import Congruence
from tests.truth import layer_truth

ORDER, UNITS = 5, 4


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


numbers = st.floats(-4, 4, allow_nan=False)
positive = st.floats(0.05, 20)


@st.composite
def centrings(draw):
    """A `CentringScaling` of order 5, perhaps with dead features, and its P entry by entry."""
    bias = draw(st.booleans())
    n = ORDER - bias
    mu = draw(st.lists(numbers, min_size=n, max_size=n))
    sigma = draw(st.lists(st.one_of(positive, st.just(0.0)), min_size=n, max_size=n))
    q = draw(positive)
    live = [j for j in range(n) if sigma[j] != 0]
    P = np.zeros((ORDER, len(live) + bias))
    if bias:
        P[0, 0] = 1 / q
    for column, j in enumerate(live):
        P[j + bias, column + bias] = 1 / sigma[j] / q
        if bias:
            P[0, column + bias] = -mu[j] / sigma[j] / q
    return CentringScaling(tensor(mu), tensor(sigma), bias, q), P


@st.composite
def changes(draw, rows=ORDER):
    """A change of variables of ``rows`` parameters and its P."""
    kind = draw(
        st.sampled_from(["dense", "diagonal"])
        if rows != ORDER
        else st.sampled_from(["dense", "diagonal", "bnp", "product"])
    )
    if kind == "bnp":
        return draw(centrings())
    if kind == "diagonal":
        d = draw(st.lists(positive, min_size=rows, max_size=rows))
        return Scaling(tensor(d)), np.diag(d)
    if kind == "dense":
        columns = draw(st.integers(1, 6))
        P = np.array(
            draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
        )
        return DensePreconditioner(torch.from_numpy(P)), P
    first, P = draw(changes())
    second, Q = draw(changes(P.shape[1])) if P.shape[1] else (DensePreconditioner(torch.zeros(0, 0)), np.zeros((0, 0)))
    return first @ second, P @ Q


def close(found, truth):
    return np.allclose(found.numpy(), truth, rtol=1e-11, atol=1e-11 * max(1.0, np.abs(truth).max(initial=0)))


@settings(max_examples=40, deadline=None)
@given(changes(), st.integers(1, 3), st.integers(0, 1000))
def test_products_are_those_of_the_matrix(change, columns, seed):
    P, matrix = change
    generator = np.random.default_rng(seed)
    assert close(P.matrix(ORDER), matrix)
    rows, z, g = (generator.standard_normal(s) for s in ((3, ORDER), (matrix.shape[1], columns), (ORDER, columns)))
    assert close(P.right_multiply(torch.from_numpy(rows)), rows @ matrix)
    assert close(P.multiply(torch.from_numpy(z), ORDER), matrix @ z)
    assert close(P.multiply_adjoint(torch.from_numpy(g)), matrix.T @ g)
    assert close(P.of_unit(2).matrix(ORDER), matrix)
    assert all(close(own, matrix) for own in P.matrices(3, ORDER))


@settings(max_examples=40, deadline=None)
@given(centrings())
def test_kappa_D_is_that_of_the_live_features(change):
    P, _ = change
    live = [s for s in P.sigma.tolist() if s] + [1.0] * P.bias
    assert P.kappa_D == pytest.approx(max(live) / min(live)) if live else math.isnan(P.kappa_D)


def test_centring_comes_before_scaling():
    """Features with a mean 1e8 times their deviation are whitened to the last digits that they have."""
    h = 1e8 + torch.arange(4, dtype=torch.float64)
    rows = torch.stack([torch.ones(4, dtype=torch.float64), h], 1)
    P = CentringScaling(h.mean()[None], h.std(correction=0)[None])
    truth = (np.arange(4) - 1.5) / np.std(np.arange(4))
    assert np.allclose(P.right_multiply(rows)[:, 1].numpy(), truth, rtol=1e-14)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_statistics_that_are_not_finite_are_refused(wrong):
    with pytest.raises(CaptureError, match="NaN or infinite"):
        CentringScaling(tensor([1.0, wrong]), tensor([1.0, 1.0]))


# -- another P for every unit ------------------------------------------------------------------------------------------


def unit_scaling(seed=0):
    return Scaling(torch.from_numpy(np.random.default_rng(seed).uniform(0.2, 5, (UNITS, ORDER))))


def grouped():
    """Two groups, the second of which has a dead feature: a column of zeros at the end."""
    parts = [CentringScaling(tensor([1, 2, 3, 4]), tensor([1, 2, s, 4])) for s in (3, 0)]
    return GroupedPreconditioner(parts, UNITS, ORDER)


def shared():
    return DensePreconditioner(torch.from_numpy(np.random.default_rng(3).standard_normal((ORDER, ORDER))))


#: Another P for every unit, and the dense one of each.
UNITWISE = {
    "diagonals": (unit_scaling, lambda i: np.diag(unit_scaling().d[i].numpy())),
    "groups": (grouped, lambda i: grouped().of_unit(i).matrix(ORDER).numpy()),
    "diagonals, then one for all": (
        lambda: unit_scaling() @ shared(),
        lambda i: np.diag(unit_scaling().d[i].numpy()) @ shared().P.numpy(),
    ),
    "one for all, then diagonals": (
        lambda: shared() @ unit_scaling(),
        lambda i: shared().P.numpy() @ np.diag(unit_scaling().d[i].numpy()),
    ),
    "diagonals twice": (
        lambda: unit_scaling() @ unit_scaling(1),
        lambda i: np.diag((unit_scaling().d * unit_scaling(1).d)[i].numpy()),
    ),
}


def test_a_group_with_dead_features_has_columns_of_zeros():
    first, second = grouped().of_unit(1).matrix(ORDER), grouped().of_unit(2).matrix(ORDER)
    assert first.shape == second.shape == (5, 5)
    assert not second[:, -1].any()
    assert not second[3].any()
    # U D without the dead feature, in front of the zeros
    truth = np.array([[1, -1, -2 / 2, -4 / 4], [0, 1, 0, 0], [0, 0, 1 / 2, 0], [0, 0, 0, 0], [0, 0, 0, 1 / 4]])
    assert np.allclose(second[:, :-1].numpy(), truth)
    one = Scaling(tensor([1.0, 2.0]))
    assert by_group([one], 3, 2) is one


# -- what they do to Hessians ------------------------------------------------------------------------------------------


def problem(bend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, UNITS), bend(), nn.Linear(UNITS, 3)).double()
    x = torch.randn(11, 4, dtype=torch.float64)
    return model, nn.CrossEntropyLoss(), (x, torch.randint(0, 3, (11,)))


ALL = UNITWISE | {
    "bnp": (lambda: grouped().of_unit(0), lambda i: grouped().of_unit(0).matrix(ORDER).numpy()),
    "bnp with a dead feature": (
        lambda: CentringScaling(tensor([1, 2, 3, 4]), tensor([1, 2, 0, 4])),
        lambda i: CentringScaling(tensor([1, 2, 3, 4]), tensor([1, 2, 0, 4])).matrix(ORDER).numpy(),
    ),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("bend", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("kind", ALL)
def test_hessians_of_units_layers_and_networks(kind, bend):
    make, dense = ALL[kind]
    P: Preconditioner = make()
    model, loss, (x, y) = problem(bend)
    H = layer_truth(model, loss, (x, y), "0").numpy()
    stream = [(x[:3], y[:3]), (x[3:], y[3:])]

    def same(found, truth):
        return np.allclose(found.numpy(), truth, rtol=1e-9, atol=1e-11 * np.abs(truth).max())

    whole = np.zeros((UNITS * ORDER, 0))
    for unit in range(UNITS):
        block = np.zeros((UNITS * ORDER, dense(unit).shape[1]))
        block[unit * ORDER : (unit + 1) * ORDER] = dense(unit)
        whole = np.concatenate([whole, block], 1)
    truth = whole.T @ H @ whole
    for data in ((x, y), stream):
        units = hesscond.probe(model, loss, data, ["0"], method=P)["0"]
        for unit in range(UNITS):
            part = slice(unit * ORDER, (unit + 1) * ORDER)
            own = dense(unit).T @ H[part, part] @ dense(unit)
            assert same(units.hessian(unit), own)
            values = np.sort(np.abs(np.linalg.eigvalsh(own)))[::-1]
            rank = units.kappa[unit].rank
            assert rank == (values > 1e-11 * values[0]).sum()
            assert float(units.kappa[unit]) == pytest.approx(values[0] / values[rank - 1], rel=1e-5)
        assert same(hesscond.probe(model, loss, data, ["0"], level="layer", method=P)["0"].hessian(), truth)
    operator = HessianOperator(model, loss, (x, y), layers=["0"])
    change = coordinates_of(operator, {"0": P})
    identity = torch.eye(truth.shape[0], dtype=torch.float64)
    assert same(Congruence(operator, change).multiply(identity), truth)
    assert same(change.multiply(identity), whole)
    assert same(change.multiply_adjoint(torch.eye(len(whole), dtype=torch.float64)), whole.T)


# -- across units ------------------------------------------------------------------------------------------------------


def left(kind):
    generator = np.random.default_rng(7)
    L = {
        "full": generator.standard_normal((UNITS, UNITS)),
        "fewer": generator.standard_normal((UNITS, UNITS - 1)),
        "diagonal": np.diag(generator.uniform(0.5, 2, UNITS)),
    }
    return torch.from_numpy(L[kind])


#: R of L ⊗ R, and of R_1 … R_m'.
RIGHT = {
    "dense": lambda units: shared(),
    "bnp with a dead feature": lambda units: CentringScaling(tensor([1, 2, 3, 4]), tensor([1, 2, 0, 4])),
    "another for each": lambda units: Scaling(unit_scaling().d[:units]),
}


def kronecker(L, R):
    """The matrix (L ⊗ I) diag(R_1 … R_m'); torch.kron(L, R) where all R_i are the same."""
    inner = torch.block_diag(*(R.of_unit(i).matrix(ORDER) for i in range(L.shape[1])))
    return torch.kron(L, torch.eye(ORDER, dtype=torch.float64)) @ inner


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("kind", ["full", "fewer", "diagonal"])
def test_kronecker_products_are_those_of_the_matrix(kind, right):
    L = left(kind)
    R = RIGHT[right](L.shape[1])
    P, truth = Kronecker(L, R), kronecker(L, R)
    if right != "another for each":
        assert torch.allclose(truth, torch.kron(L, R.of_unit(0).matrix(ORDER)), rtol=1e-13)
    rows, z = (torch.randn(s, dtype=torch.float64) for s in ((3, UNITS * ORDER), (truth.shape[1], 2)))
    assert close(P.multiplied(rows, UNITS), (rows @ truth).numpy())
    assert close(P.dense(UNITS, ORDER), truth.numpy())
    assert bool((P.carried(rows.abs(), UNITS) >= (rows.abs() @ truth.abs()) * (1 - 1e-12)).all())
    scales = torch.rand(UNITS * ORDER, dtype=torch.float64)
    assert P.scaled_norm(scales, UNITS) == pytest.approx(float((scales[:, None] * truth).square().sum()))
    change = UnitCoordinates(P, range(UNITS), ORDER)
    assert close(change @ z, (truth @ z).numpy())
    assert close(change.T @ rows.T, (truth.T @ rows.T).numpy())
    Q = DensePreconditioner(torch.randn(R.of_unit(0).matrix(ORDER).shape[1], 2, dtype=torch.float64))
    assert close((P @ Q).dense(UNITS, ORDER), (truth @ torch.kron(torch.eye(L.shape[1]).double(), Q.P)).numpy())


@pytest.mark.share(3)
@pytest.mark.parametrize("bend", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("kind", ["full", "fewer"])
def test_hessians_in_coordinates_that_act_across_units(kind, right, bend):
    L = left(kind)
    R = RIGHT[right](L.shape[1])
    model, loss, (x, y) = problem(bend)
    H, whole = layer_truth(model, loss, (x, y), "0").numpy(), kronecker(L, R).numpy()
    truth = whole.T @ H @ whole
    P = Kronecker(L, R, "mine")
    for data in ((x, y), [(x[:3], y[:3]), (x[3:], y[3:])]):
        found = hesscond.probe(model, loss, data, ["0"], level="layer", method=P)["0"]
        assert np.allclose(found.hessian().numpy(), truth, rtol=1e-9, atol=1e-11 * np.abs(truth).max())
        values = np.sort(np.abs(np.linalg.eigvalsh(truth)))[::-1]
        rank = found.kappa.rank
        assert rank == (values > 1e-11 * values[0]).sum()
        assert float(found.kappa) == pytest.approx(values[0] / values[rank - 1], rel=1e-5)
    network = hesscond.probe(model, loss, (x, y), ["0"], level="network", method=P)["network"]
    assert np.allclose(network.hessian().numpy(), truth, rtol=1e-9, atol=1e-11 * np.abs(truth).max())


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_coordinates_within_coordinates(level):
    model, loss, batch = problem(nn.ReLU)
    P, Q = shared(), CentringScaling(tensor([1, 2, 3, 4]), tensor([1, 2, 0, 4]))
    unit = 2 if level == "unit" else None
    inside = hesscond.probe(model, loss, batch, ["0"], level, P)["0"].block(unit).in_coordinates(Q)
    truth = hesscond.probe(model, loss, batch, ["0"], level, P @ Q)["0"].block(unit)
    assert torch.equal(inside.matrix(), truth.matrix())
    assert inside.condition_number() == truth.condition_number()
    z = torch.ones(len(truth.matrix()), 1, dtype=torch.float64)
    assert torch.equal(inside.product(z), truth.product(z))
    assert torch.allclose(inside.eigenpairs()[0], truth.eigenvalues(), rtol=1e-9)


def test_one_unit_has_no_coordinates_across_units():
    model, loss, batch = problem(nn.ReLU)
    with pytest.raises(ConfigError, match=r"'mine' acts across the units.*level='layer' or level='network'"):
        hesscond.probe(model, loss, batch, ["0"], method=Kronecker(left("full"), shared(), "mine"))
    diagonal = Kronecker(left("diagonal"), shared())
    found = hesscond.probe(model, loss, batch, ["0"], method=diagonal)["0"]
    whole = hesscond.probe(model, loss, batch, ["0"], level="layer", method=diagonal)["0"].hessian()
    for unit in range(UNITS):
        part = slice(unit * ORDER, (unit + 1) * ORDER)
        assert torch.allclose(found.hessian(unit), whole[part, part], rtol=1e-10, atol=1e-14)
    with pytest.raises(ConfigError, match="acts across units"):
        shared() @ diagonal
    with pytest.raises(ConfigError, match="right must be a Preconditioner"):
        Kronecker(left("full"), torch.eye(ORDER))

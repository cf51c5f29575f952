"""Kronecker factors and the inverses made of them, against dense truth."""

import pytest
import torch
from torch import nn

from hesscond.capture import capture
from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.hessians.null_space import kronecker
from hesscond.hessians.null_space.directions import network_null_directions
from hesscond.hessians.null_space.kronecker import KroneckerFactors, KroneckerInverse, Terms, network_inverse
from hesscond.hessians.parameters import covered, layout_of, placements
from hesscond.operators.subspace import KroneckerComplement
from hesscond.spectra.smallest import smallest_nonzero
from tests.hessians.test_hessians_null_directions import ALL, CE, random
from tests.truth import layer_truth

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def wide_problem(samples=400, features=12, units=8, classes=5, seed=0):
    """A layer with a full-rank Hessian of spread eigenvalues."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(features, units), nn.ReLU(), nn.Linear(units, classes)).double()
    x = random(samples, features, seed=seed) * torch.logspace(0, -1.5, features, dtype=torch.float64)
    with torch.no_grad():
        # every unit is active on about half of the samples
        model[0].bias.zero_()
        y = (3 * model(x) + random(samples, classes, seed=seed + 1)).argmax(1)
    return model, (x, y)


# -- the factors and their inverse ------------------------------------------------------------------------------------


def layer_terms(model, loss, batch, layer, weight=1.0):
    captured = capture(model, loss, batch, [layer], whole=True)[layer]
    return Terms(captured.inputs, captured.curvature.B, weight)


def layer_inverse(model, loss, batch, layer):
    """With the exact curvature of the layer."""
    terms = layer_terms(model, loss, batch, layer)
    factors = KroneckerFactors(terms.inputs.geometry, terms.inputs.geometry.n_params)
    factors.add(terms)
    Q_C, Q_A, _ = factors.eigenvectors()
    return KroneckerInverse(Q_C, Q_A, kronecker.eigenbasis_diagonal(terms, Q_C, Q_A))


def test_where_the_hessian_is_a_kronecker_product_the_solution_is_exact():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    batch = random(20, 4), random(20, 3, seed=1)
    H, V = layer_truth(model, nn.MSELoss(), batch, "model"), random(15, 3, seed=2)
    inverse = layer_inverse(model, nn.MSELoss(), batch, "model")
    assert relative(inverse.solve(V), torch.linalg.solve(H, V)) < 1e-13
    # shifted below and within the spectrum
    values, Q = torch.linalg.eigh(H)
    for shift in (-0.1, 0.05 * float(values[0]), float(values[4]), 10.0):
        bounded = torch.maximum(values - shift, 0.1 * values)
        assert relative(inverse.solve(V, shift), Q @ ((Q.T @ V) / bounded[:, None])) < 1e-13


def test_the_inverse_is_bounded():
    Q = torch.eye(2, dtype=torch.float64)[None]
    inverse = KroneckerInverse(Q, Q, torch.tensor([[[1.0, 1e-30], [0.0, 1e-3]]], dtype=torch.float64))
    solved = inverse.solve(torch.eye(4, dtype=torch.float64)).diagonal()
    assert torch.allclose(solved, torch.tensor([1.0, 1e14, 1e14, 1e3], dtype=torch.float64))
    zero = KroneckerInverse(Q, Q, torch.zeros(1, 2, 2, dtype=torch.float64))
    assert torch.isfinite(zero.solve(torch.ones(4, 1, dtype=torch.float64))).all()


def test_groups_of_different_rank():
    """Bases of one group fill their space and those of another do not: neither is taken for the other."""
    full, half = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[:, :1]
    space = KroneckerComplement([full, half], [full, full])
    expected = torch.diag(torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.float64))
    assert torch.equal(space.project(torch.eye(8, dtype=torch.float64)), expected)
    assert space.dimension == 2
    assert torch.equal(space.diagonal(), expected.diagonal())


def test_the_bottom_of_a_layer_takes_few_products():
    model, batch = wide_problem(samples=1200, features=30, units=14)
    operator = HessianOperator(model, CE, batch, layers=["0"])
    values = torch.linalg.eigvalsh(operator.to_dense())
    assert network_null_directions(operator) == []
    assert values[-1] / values[0] > 1e3
    counts = {}
    for name, inverse in {"none": None, "kronecker": layer_inverse(model, CE, batch, "0")}.items():
        found = smallest_nonzero(operator, 1, inverse=inverse, tol=1e-8, max_products=400)
        counts[name] = found.products
    assert abs(float(found.eigenvalues) / float(values[0]) - 1) < 1e-8
    assert found.converged
    assert counts["kronecker"] <= 100
    assert counts["kronecker"] < counts["none"] / 2


# -- networks ---------------------------------------------------------------------------------------------------------

NETWORKS = ["relu-ce", "tanh-ce", "layernorm", "train-batchnorm", "conv2d-two-layers", "transposed2d-groups",
            "attention-by-hand", "embedding", "tuple-output", "unreached-and-frozen", "relu-inplace-ce"]  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_inverse_of_a_network_fits_its_gauss_newton_matrix(name):
    model, loss, batch = ALL[name].make()
    operator = GGNOperator(model, loss, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    inverse = network_inverse(operator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    solved = inverse.solve(torch.eye(operator.order, dtype=torch.float64))
    assert relative(solved, solved.T) < 1e-12
    # the trace of each block, from random terms of it and without those between samples
    share = 0.5 if "batchnorm" in name else 0.25
    M, G = torch.linalg.pinv(solved), operator.to_dense()
    for placement in placements(operator.layout, model):
        own = placement.index.flatten()
        trace = G.diagonal()[own].sum()
        assert abs(M.diagonal()[own].sum() - trace) <= share * trace
    assert torch.equal(inverse.solve(G), network_inverse(operator).solve(G))


def test_places_of_layers_without_some_of_their_parameters():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].bias.requires_grad_(False)
    found = placements(layout_of(model), model)
    assert [(p.name, tuple(p.index.shape), p.first) for p in found] == [("0", (2, 3), 1), ("2", (2, 3), 0)]
    assert found[1].index.tolist() == [[10, 6, 7], [11, 8, 9]]
    assert (~covered(found, 16)).nonzero()[:, 0].tolist() == [12, 13, 14, 15]
    assert placements(layout_of(model, layers=["2"], unit=1), model) == []
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert [p.name for p in placements(layout_of(tied), tied)] == ["0"]


def test_a_frozen_bias_is_left_out_of_the_factors():
    model, batch = wide_problem(samples=60)
    model[0].bias.requires_grad_(False)
    operator = HessianOperator(model, CE, batch, parameters=["0.weight"])
    inverse = network_inverse(operator)
    H = layer_truth(model, CE, batch, "0").view(8, 13, 8, 13)[:, 1:, :, 1:].reshape(96, 96)
    solved = inverse.solve(H)
    # M⁻¹H is near the identity, far more so than H
    values = torch.linalg.eigvals(solved).real
    own = torch.linalg.eigvalsh(H)
    assert values.max() / values.min() < 0.1 * own[-1] / own[0]


def test_a_loss_of_unknown_curvature_still_gives_an_inverse():
    model, batch = wide_problem(samples=40)

    def loss(output, target):
        return (torch.sin(output) * output).mean() + CE(output, target)

    operator = HessianOperator(model, loss, batch)
    solved = network_inverse(operator).solve(torch.eye(operator.order, dtype=torch.float64))
    assert torch.isfinite(solved).all()
    assert torch.linalg.eigvalsh((solved + solved.T) / 2).min() > -1e-12 * solved.norm()

"""Trace, diagonal, norm, log det, damped solves and κ(H + λI) of results, against dense double backward."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hesscond
from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import Dense, diagonal, frobenius_norm, solve
from tests.truth import double_backward, layer_truth, network_truth, unit_truth

CE = nn.CrossEntropyLoss()


def made(*parts, batch, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(*[part() for part in parts]).double()
    return model, batch()


def pictures():
    return torch.randn(12, 2, 4, 4, dtype=torch.float64), torch.arange(12) % 3


def rows(n, width):
    return lambda: (torch.randn(n, width, dtype=torch.float64), torch.arange(n) % 3)


def tanh():
    return made(lambda: nn.Linear(6, 7), nn.Tanh, lambda: nn.Linear(7, 3), batch=rows(40, 6))


def wide():
    """Layers of more parameters than rank-one terms: their dual is decomposed."""
    return made(lambda: nn.Linear(30, 40), nn.ReLU, lambda: nn.Linear(40, 3), batch=rows(9, 30))


def convolution():
    return made(lambda: nn.Conv2d(2, 3, 2), nn.ReLU, nn.Flatten, lambda: nn.Linear(27, 3), batch=pictures)


def tokens():
    """An embedding of which most tokens do not occur, and a layer norm: Hessians by products."""
    return made(
        lambda: nn.Embedding(30, 4),
        lambda: nn.LayerNorm(4),
        lambda: nn.Linear(4, 3),
        batch=lambda: (torch.randint(6, (20,)), torch.randint(3, (20,))),
    )


def wide_tanh():
    return made(lambda: nn.Linear(30, 40), nn.Tanh, lambda: nn.Linear(40, 3), batch=rows(9, 30))


#: Model and batch, layer, level.
CASES = {
    "factor with signs": (tanh, "0", "layer"),
    "factor": (tanh, "2", "layer"),
    "units with signs": (tanh, "0", "unit"),
    "units": (tanh, "2", "unit"),
    "dual": (wide, "0", "layer"),
    "dual with signs": (wide_tanh, "0", "layer"),
    "positions": (convolution, "0", "layer"),
    "embedding": (tokens, "0", "layer"),
    "normalization": (tokens, "1", "layer"),
    "network": (tanh, "network", "network"),
}


def dense(model, batch, layer, level, unit=None):
    """H by double backward; of other modules than dense and convolutional ones tensor after tensor."""
    if level == "network":
        return network_truth(model, CE, batch)
    if level == "unit":
        return unit_truth(model, CE, batch, layer, unit)
    if isinstance(module := model.get_submodule(layer), (nn.Linear, nn.Conv2d)):
        return layer_truth(model, CE, batch, layer)
    names = sorted(name for name, _ in module.named_parameters())
    return double_backward(CE(model(batch[0]), batch[1]), [module.get_parameter(name) for name in names])


@functools.cache
def measured(case):
    make, layer, level = CASES[case]
    model, batch = make()
    names = None if level == "network" else [layer]
    own = hesscond.probe(model, CE, batch, names, level)[layer]
    unit = 1 if level == "unit" else None
    return own, unit, dense(model, batch, layer, level, unit)


@pytest.mark.parametrize("case", CASES)
def test_trace_diagonal_and_norm(case):
    own, unit, H = measured(case)
    for found, truth in ((own.trace(unit), H.trace()), (own.frobenius_norm(unit), H.norm())):
        assert found.value == pytest.approx(float(truth), rel=1e-12)
        assert found.error <= 1e-14
    found = own.diagonal(unit).value
    if case == "network":
        # unit by unit there
        found, H = found.sort().values, H.diagonal().sort().values.diag()
    assert torch.allclose(found, H.diagonal(), rtol=1e-10, atol=1e-14)


@pytest.mark.share(2)
@pytest.mark.parametrize("damping", [1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("case", CASES)
def test_damped(case, damping):
    """κ(H + λI) in its interval, log det, and (H + λI)⁻¹ v."""
    own, unit, H = measured(case)
    values = torch.linalg.eigvalsh(H) + damping
    truth = float(values.abs().max() / values.abs().min())
    kappa = own.condition(unit, damping=damping)
    # the values of a dense decomposition are themselves rounded
    rounding = 1e-13 * float(values.abs().max() / values.abs().min())
    assert kappa.lower * (1 - rounding) <= truth <= kappa.upper * (1 + rounding)
    assert kappa.value == pytest.approx(truth, rel=rounding + 1e-7)
    assert (kappa.rank, kappa.nullity, kappa.negative) == (len(H), 0, int((values < 0).sum()))
    if bool((values > 0).all()):
        found = own.log_determinant(unit, damping=damping)
        off = len(H) * rounding + 1e-12 * float(values.log().abs().sum())
        assert abs(found.value - float(values.log().sum())) <= found.error + off
        assert found.error < 1e-4
    else:
        with pytest.raises(ConfigError, match=f"has {kappa.negative} negative eigenvalues, and so no log det"):
            own.log_determinant(unit, damping=damping)
        found = own.log_determinant(unit, damping=damping, nonzero=True)
        assert found.value == pytest.approx(float(values.abs().log().sum()), rel=1e-6)
    matrix = own.hessian(unit) if case == "network" else H
    v = torch.randn(len(H), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = own.solve(v, unit, damping=damping)
    assert float((matrix @ x + damping * x - v).norm()) <= 1e-7 * float(v.norm())
    assert own.solve(v[:, 0], unit, damping=damping).shape == (len(H),)


def test_in_coordinates_and_over_a_stream():
    model, batch = tanh()
    stream = DataLoader(TensorDataset(*batch), batch_size=15)
    P = torch.randn(7, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    own = hesscond.probe(model, CE, stream, ["0"], method=hesscond.hessians.DensePreconditioner(P))["0"]
    H = P.T @ unit_truth(model, CE, batch, "0", 2) @ P
    values = torch.linalg.eigvalsh(H) + 0.3
    assert own.trace(2).value == pytest.approx(float(H.trace()), rel=1e-10)
    assert own.frobenius_norm(2).value == pytest.approx(float(H.norm()), rel=1e-10)
    truth = float(values.abs().max() / values.abs().min())
    assert own.condition(2, damping=0.3).value == pytest.approx(truth, rel=1e-8)
    v = torch.ones(7, dtype=torch.float64)
    assert torch.allclose(own.solve(v, 2, damping=0.3), torch.linalg.solve(H + 0.3 * torch.eye(7).double(), v))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_only_scales(scale):
    model, batch = wide()
    plain = hesscond.probe(model, CE, batch, ["2"], "layer")["2"]
    own = hesscond.probe(model, lambda o, t: scale * CE(o, t), batch, ["2"], "layer")["2"]
    assert own.frobenius_norm().value == pytest.approx(scale * plain.frobenius_norm().value, rel=1e-12)
    other, same = own.condition(damping=scale * 1e-3), plain.condition(damping=1e-3)
    assert other.value == pytest.approx(same.value, rel=1e-10)
    found = own.log_determinant(damping=scale * 1e-3).value - 123 * math.log(scale)
    assert found == pytest.approx(plain.log_determinant(damping=1e-3).value, rel=1e-10)


def test_a_damping_far_below_the_rounding_of_the_matrix_is_resolved_by_the_factor():
    """H ≥ 0 has zero eigenvalues, which a dense decomposition knows to 1e-16 of the largest."""
    model, batch = wide()
    own = hesscond.probe(model, CE, batch, ["2"], "layer")["2"]
    damping = 1e-22
    top = float(torch.linalg.eigvalsh(layer_truth(model, CE, batch, "2"))[-1])
    kappa = own.condition(damping=damping)
    assert kappa.lower <= top / damping * (1 + 1e-10)
    assert kappa.upper >= top / damping * (1 - 1e-10)
    if kappa.resolved:
        assert kappa.value == pytest.approx(top / damping, rel=1e-6)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return x + self.weight


def test_a_hessian_that_is_zero_has_the_condition_of_the_damping():
    model, batch = made(lambda: nn.Linear(6, 3), Shift, batch=rows(20, 6))
    own = hesscond.probe(model, CE, batch, ["1"], "layer")["1"]
    assert own.kappa.is_zero
    kappa = own.condition(damping=1e-3)
    assert (kappa.value, kappa.rank) == (1.0, 1)
    assert own.log_determinant(damping=1e-3).value == pytest.approx(math.log(1e-3))
    with pytest.raises(ConfigError, match="log det of '1' is not known"):
        own.log_determinant()


def test_what_is_singular_is_refused_in_a_sentence():
    own, _, _ = measured("factor")
    with pytest.raises(
        ConfigError, match="has 8 zero eigenvalues, and so no log det: give a larger damping"
    ) as refusal:
        own.log_determinant()
    assert "\n" not in str(refusal.value)
    values = own.eigenvalues()
    assert own.log_determinant(nonzero=True).value == pytest.approx(float(values.log().sum()))
    with pytest.raises(MatrixError, match="singular, or too ill-conditioned for its precision: give a larger damping"):
        own.solve(torch.ones(24, dtype=torch.float64))
    for wrong in (-1.0, math.inf, math.nan, "1", True):
        with pytest.raises(ConfigError, match="damping must be a number from 0 on"):
            own.condition(damping=wrong)
    with pytest.raises(ConfigError, match=r"has vectors \(24,\) or \(24, k\)"):
        own.solve(torch.ones(5))
    with pytest.raises(ConfigError, match="at least 4 probes"):
        measured("network")[0].trace(probes=2)


def test_a_network_that_is_too_large_to_form_is_estimated():
    """By products alone, with dense_order out of the way."""
    own, _, H = measured.__wrapped__("network")
    block = own.block(None)
    object.__setattr__(block.limits, "dense_order", 10)
    values = torch.linalg.eigvalsh(H) + 2.0
    for number in (1, 7):
        found = own.log_determinant(damping=2.0, probes=20, seed=number)
        assert 0 < found.error < 1
        assert abs(found.value - float(values.log().sum())) <= 5 * found.error
    with pytest.raises(ConfigError, match="not shown to be positive definite"):
        own.log_determinant(damping=1e-3)
    for what, truth in (("trace", H.trace()), ("frobenius_norm", H.norm())):
        found = getattr(own, what)(probes=30, seed=1)
        assert found.products == 30
        assert 0 < abs(found.value - float(truth)) <= 5 * found.error


@pytest.mark.parametrize("steps", [2, 4, 60])
def test_few_steps_of_the_quadrature_count_as_an_error(steps):
    """Eigenvalues over six decades, of which 60 steps see all."""
    values = torch.logspace(-6, 0, 60, dtype=torch.float64)
    found = hesscond.density(Dense(values.diag()), probes=20, steps=steps, method="lanczos").log_determinant(1e-6)
    assert abs(found.value - float(values.log().sum())) <= 3 * found.error
    assert found.error > (100 if steps < 60 else 10)


def test_estimates_of_norms_and_diagonals_are_off_by_what_they_say():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(60, 60, generator=generator, dtype=torch.float64)
    operator = Dense(A + A.T)
    found = [frobenius_norm(operator, 45, seed=seed) for seed in range(200)]
    off = torch.tensor([one.value for one in found], dtype=torch.float64) - operator.A.norm()
    errors = torch.tensor([one.error for one in found])
    assert 0.55 <= float((off.abs() <= errors).double().mean()) <= 0.8
    entries = [diagonal(operator, 40, seed=seed) for seed in range(20)]
    near = torch.stack([(one.value - operator.A.diagonal()).abs() <= one.error for one in entries])
    assert 0.6 <= float(near.double().mean()) <= 0.75


@pytest.mark.parametrize("shift", [0.1, -0.5, torch.tensor(3.0)])
def test_shifted_operators_are_solved_with_a_residual_that_is_checked(shift):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(50, 50, generator=generator, dtype=torch.float64)
    A, v = (A + A.T) / 10, torch.randn(50, 2, generator=generator, dtype=torch.float64)
    for H in (Dense(A) + shift, shift + Dense(A), Dense(A) + float(shift) * torch.eye(50, dtype=torch.float64)):
        x = solve(H, v)
        assert float((A @ x + shift * x - v).norm(dim=0).max() / v.norm(dim=0).min()) < 1e-7
    with pytest.raises(MatrixError, match="not solved"):
        solve(Dense(torch.ones(4, 4, dtype=torch.float64)), F.one_hot(torch.tensor(1), 4).double())

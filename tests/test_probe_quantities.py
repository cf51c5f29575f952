"""Trace, diagonal, norm and κ(H + λI) of results, against dense double backward."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hesscond
from hesscond.errors import ConfigError
from hesscond.operators import Dense, diagonal, frobenius_norm
from tests.catalogue.parts import Net
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


def wide(bend=nn.ReLU):
    """Layers of more parameters than rank-one terms: their dual is decomposed."""
    return made(lambda: nn.Linear(30, 40), bend, lambda: nn.Linear(40, 3), batch=rows(9, 30))


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


#: Model and batch, layer, level.
CASES = {
    "factor with signs": (tanh, "0", "layer"),
    "factor": (tanh, "2", "layer"),
    "units with signs": (tanh, "0", "unit"),
    "units": (tanh, "2", "unit"),
    "dual": (wide, "0", "layer"),
    "dual with signs": (lambda: wide(nn.Tanh), "0", "layer"),
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
    """κ(H + λI) in its interval."""
    own, unit, H = measured(case)
    values = torch.linalg.eigvalsh(H) + damping
    truth = float(values.abs().max() / values.abs().min())
    kappa = own.condition(unit, damping=damping)
    # the values of a dense decomposition are themselves rounded
    rounding = 1e-13 * float(values.abs().max() / values.abs().min())
    assert kappa.lower * (1 - rounding) <= truth <= kappa.upper * (1 + rounding)
    assert kappa.value == pytest.approx(truth, rel=rounding + 1e-7)
    assert (kappa.rank, kappa.nullity, kappa.negative) == (len(H), 0, int((values < 0).sum()))


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


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_only_scales(scale):
    model, batch = wide()
    plain = hesscond.probe(model, CE, batch, ["2"], "layer")["2"]
    own = hesscond.probe(model, lambda o, t: scale * CE(o, t), batch, ["2"], "layer")["2"]
    assert own.frobenius_norm().value == pytest.approx(scale * plain.frobenius_norm().value, rel=1e-12)
    other, same = own.condition(damping=scale * 1e-3), plain.condition(damping=1e-3)
    assert other.value == pytest.approx(same.value, rel=1e-10)


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


def test_a_hessian_that_is_zero_has_the_condition_of_the_damping():
    shift = Net(lambda m, x: x + m.weight, weight=nn.Parameter(torch.zeros(1)))
    model, batch = made(lambda: nn.Linear(6, 3), lambda: shift, batch=rows(20, 6))
    own = hesscond.probe(model, CE, batch, ["1"], "layer")["1"]
    assert own.kappa.is_zero
    kappa = own.condition(damping=1e-3)
    assert (kappa.value, kappa.rank) == (1.0, 1)


def test_wrong_numbers_are_refused_in_a_sentence():
    own, _, _ = measured("factor")
    for wrong in (-1.0, math.inf, math.nan, "1", True):
        with pytest.raises(ConfigError, match="damping must be a number from 0 on"):
            own.condition(damping=wrong)
    with pytest.raises(ConfigError, match="at least 4 probes"):
        measured("network")[0].trace(probes=2)


def test_few_products_give_estimates():
    own, _, H = measured("network")
    for what, truth in (("trace", H.trace()), ("frobenius_norm", H.norm())):
        found = getattr(own, what)(probes=30, seed=1)
        assert found.products == 30
        assert 0 < abs(found.value - float(truth)) <= 5 * found.error


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

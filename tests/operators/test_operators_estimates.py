"""Traces, diagonals and norms from random vectors: right on average, with standard errors that say how far off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hesscond.errors import ConfigError
from hesscond.operators import Dense, Diagonal, SymmetricOperator, diagonal, ritz_range, trace

N = 60


def prescribed(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    A = Q @ torch.diag(values.double()) @ Q.T
    return (A + A.T) / 2


SPECTRA = {
    "flat": torch.linspace(1, 2, N),
    "decaying": torch.logspace(0, -6, N),
    "indefinite": torch.linspace(-1, 1, N),
    "outliers": torch.cat([torch.tensor([100.0, -50.0]), 1e-2 * torch.linspace(-1, 1, N - 2)]),
}


class Counted(SymmetricOperator):
    """Counts products with one vector, and how many at most were asked for at a time."""

    def __init__(self, A: torch.Tensor) -> None:
        super().__init__(len(A), A.dtype, A.device)
        self.A, self.products, self.widest = A, 0, 0

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        self.products += vectors.shape[1]
        self.widest = max(self.widest, vectors.shape[1])
        return self.A @ vectors


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(
    ("estimate", "method"), [(trace, "hutchinson"), (trace, "hutch++"), (diagonal, "bekas"), (diagonal, "diag++")]
)
def test_the_errors_are_as_large_as_they_say(estimate, method, spectrum):
    A = prescribed(SPECTRA[spectrum])
    operator = Dense(A)
    truth = A.diagonal() if estimate is diagonal else A.trace()
    within, deviations = [], []
    for seed in range(300 if estimate is trace else 40):
        found = estimate(operator, 45, seed=seed, method=method)
        off = torch.as_tensor(found.value - truth)
        deviations.append(off)
        within.append((off.abs() <= torch.as_tensor(found.error)).double().mean())
    inside = float(torch.stack(within).mean())
    # 15 or 45 probes: Student's t with 14 or 44 degrees of freedom: 0.666 and 0.677
    assert 0.6 <= inside <= 0.75
    everything = torch.stack(deviations)
    bias = everything.mean(0) / (everything.std(0) / math.sqrt(len(everything)))
    assert float(bias.square().mean()) <= 4.0


@pytest.mark.parametrize(
    ("estimate", "plain", "better"), [(trace, "hutchinson", "hutch++"), (diagonal, "bekas", "diag++")]
)
def test_a_basis_of_the_dominant_part_pays_where_the_spectrum_decays(estimate, plain, better):
    A = prescribed(torch.logspace(0, -18, N, dtype=torch.float64))

    def root_mean_square(method):
        truth = A.trace() if estimate is trace else A.diagonal()
        errors = [estimate(Dense(A), 30, seed=seed, method=method).value - truth for seed in range(30)]
        return float(torch.stack([torch.as_tensor(e) for e in errors]).square().mean().sqrt())

    assert root_mean_square(better) < 0.05 * root_mean_square(plain)


@pytest.mark.parametrize("probes", [4, 5, 17, 40, 59])
@pytest.mark.parametrize(
    ("estimate", "method"), [(trace, "hutchinson"), (trace, "hutch++"), (diagonal, "bekas"), (diagonal, "diag++")]
)
def test_the_products_are_those_it_says(estimate, method, probes):
    operator = Counted(prescribed(SPECTRA["flat"]))
    found = estimate(operator, probes, method=method)
    assert found.products == operator.products == probes
    basis = probes // 3 if method.endswith("++") else 0
    assert found.probes == probes - 2 * basis
    assert operator.widest <= 16


def test_diagonal_matrices_need_no_luck():
    d = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for found in (trace(Diagonal(d), 7, method="hutchinson"), trace(Diagonal(d), 2, method="hutchinson", seed=5)):
        assert found.value == pytest.approx(float(d.sum()), rel=1e-13)
        assert found.error <= 1e-14
    found = diagonal(Diagonal(d), 5, method="bekas")
    assert torch.allclose(found.value, d, rtol=1e-15)
    assert float(found.error.max()) <= 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_scale_only_scales(method, scale, dtype):
    A = prescribed(SPECTRA["outliers"]).to(dtype)
    power = 2.0 ** round(math.log2(scale))  # exact
    unit, scaled = (trace(Dense(A * c), 20, method=method) for c in (1.0, power))
    assert scaled.value == pytest.approx(power * unit.value, rel=1e-4 if dtype == torch.float32 else 1e-12)
    assert scaled.error == pytest.approx(power * unit.error, rel=1e-3 if dtype == torch.float32 else 1e-9)


def test_seeds_decide_and_the_global_generator_is_left_alone():
    operator = Dense(prescribed(SPECTRA["flat"]))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = trace(operator, 20, seed=1)
    assert trace(operator, 20, seed=1) == first
    assert trace(operator, 20, seed=2) != first
    diagonal(operator, 20)
    assert operator.norm_bound > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_zero_matrix():
    zero = Dense(torch.zeros(40, 40))
    assert trace(zero, 9).value == 0.0
    assert trace(zero, 9).error == 0.0
    assert not bool(diagonal(zero, 9).value.any())
    assert zero.extremes == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda A: trace(A, 3), "at least 4"),
        (lambda A: trace(A, 1, method="hutchinson"), "at least 2"),
        (lambda A: diagonal(A, 0), "at least 4"),
        (lambda A: trace(A, 10, method="xtrace"), "hutch\\+\\+, hutchinson"),
        (lambda A: diagonal(A, 100, method="hutch++"), "diag\\+\\+, bekas"),
    ],
)
def test_what_cannot_be_is_refused(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call(Dense(prescribed(SPECTRA["flat"])))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_ritz_values_lie_inside_the_spectrum_and_reach_its_ends(spectrum):
    values = SPECTRA[spectrum].double()
    width = float(values.max() - values.min())
    for seed in range(20):
        low, high = ritz_range(Dense(prescribed(values, seed)), seed=seed)
        assert float(values.min()) - 1e-12 * width <= low
        assert high <= float(values.max()) + 1e-12 * width
        assert max(abs(low), abs(high)) >= 0.75 * float(values.abs().max())


def test_ritz_values_stop_at_an_invariant_subspace():
    assert ritz_range(Diagonal(torch.ones(30))) == pytest.approx((1.0, 1.0), rel=1e-6)
    low, high = ritz_range(Diagonal(torch.tensor([2.0, -1.0] * 10, dtype=torch.float64)))
    assert (low, high) == pytest.approx((-1.0, 2.0), rel=1e-14)
    swap = Dense(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    assert np.allclose(swap.extremes, (-1, 1), atol=1e-14)

"""Traces and norms from random vectors: right on average, with standard errors that say how far off."""

import math

import numpy as np
import pytest
import torch

from hesscond.errors import ConfigError
from hesscond.operators import Dense, Diagonal, ritz_range, trace
from tests.spectra.spectra_cases import Counting, prescribed

N = 60


SPECTRA = {
    "flat": torch.linspace(1, 2, N),
    "decaying": torch.logspace(0, -6, N),
    "indefinite": torch.linspace(-1, 1, N),
    "outliers": torch.cat([torch.tensor([100.0, -50.0]), 1e-2 * torch.linspace(-1, 1, N - 2)]),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_errors_are_as_large_as_they_say(spectrum):
    A = prescribed(SPECTRA[spectrum])[0]
    operator = Dense(A)
    found = [trace(operator, 45, seed=seed) for seed in range(300)]
    off = torch.tensor([one.value for one in found], dtype=torch.float64) - A.trace()
    errors = torch.tensor([one.error for one in found], dtype=torch.float64)
    # 15 probes: Student's t with 14 degrees of freedom: 0.666
    assert 0.6 <= float((off.abs() <= errors).double().mean()) <= 0.75
    assert float((off.mean() / (off.std() / math.sqrt(len(off)))).square()) <= 4.0


def test_a_basis_of_the_dominant_part_pays_where_the_spectrum_decays():
    A = prescribed(torch.logspace(0, -18, N, dtype=torch.float64))[0]
    errors = [trace(Dense(A), 30, seed=seed).value - float(A.trace()) for seed in range(30)]
    # the standard error of Hutchinson's estimator: its variance is twice the sum of squares off the diagonal
    plain = math.sqrt(2 * float((A - torch.diag(A.diagonal())).square().sum()) / 30)
    assert math.sqrt(sum(e**2 for e in errors) / len(errors)) < 0.05 * plain


@pytest.mark.parametrize("probes", [4, 5, 17, 40, 59])
def test_the_products_are_those_it_says(probes):
    operator = Counting(Dense(prescribed(SPECTRA["flat"])[0]))
    found = trace(operator, probes)
    assert found.products == operator.products == probes
    assert found.probes == probes - 2 * (probes // 3)
    assert operator.widest <= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_only_scales(scale, dtype):
    A = prescribed(SPECTRA["outliers"])[0].to(dtype)
    power = 2.0 ** round(math.log2(scale))  # exact
    unit, scaled = (trace(Dense(A * c), 20) for c in (1.0, power))
    assert scaled.value == pytest.approx(power * unit.value, rel=1e-4 if dtype == torch.float32 else 1e-12)
    assert scaled.error == pytest.approx(power * unit.error, rel=1e-3 if dtype == torch.float32 else 1e-9)


def test_seeds_decide_and_the_global_generator_is_left_alone():
    operator = Dense(prescribed(SPECTRA["flat"])[0])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = trace(operator, 20, seed=1)
    assert trace(operator, 20, seed=1) == first
    assert trace(operator, 20, seed=2) != first
    assert operator.norm_bound > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_zero_matrix():
    zero = Dense(torch.zeros(40, 40))
    assert trace(zero, 9).value == 0.0
    assert trace(zero, 9).error == 0.0
    assert zero.extremes == (0.0, 0.0)


def test_too_few_probes_are_refused():
    with pytest.raises(ConfigError, match="at least 4"):
        trace(Dense(prescribed(SPECTRA["flat"])[0]), 3)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_ritz_values_lie_inside_the_spectrum_and_reach_its_ends(spectrum):
    values = SPECTRA[spectrum].double()
    width = float(values.max() - values.min())
    for seed in range(20):
        low, high = ritz_range(Dense(prescribed(values, seed)[0]), seed=seed)
        assert float(values.min()) - 1e-12 * width <= low
        assert high <= float(values.max()) + 1e-12 * width
        assert max(abs(low), abs(high)) >= 0.75 * float(values.abs().max())


def test_ritz_values_stop_at_an_invariant_subspace():
    assert ritz_range(Diagonal(torch.ones(30))) == pytest.approx((1.0, 1.0), rel=1e-6)
    low, high = ritz_range(Diagonal(torch.tensor([2.0, -1.0] * 10, dtype=torch.float64)))
    assert (low, high) == pytest.approx((-1.0, 2.0), rel=1e-14)
    swap = Dense(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    assert np.allclose(swap.extremes, (-1, 1), atol=1e-14)

"""λ_max and κ from below within a number of products, against spectra that were chosen."""

import pytest
import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import Dense, Diagonal
from hesscond.spectra.bounded import LEAST_VECTORS, bounded_condition
from tests.spectra.spectra_cases import Counting, prescribed

N = 400


def spectra(seed):
    """Eigenvalues of several kinds, with and without a null space."""
    generator = torch.Generator().manual_seed(seed)
    graded = 10.0 ** (-4 * torch.rand(N, generator=generator, dtype=torch.float64))
    signs = torch.randint(0, 2, (N,), generator=generator) * 2.0 - 1
    null = torch.where(torch.rand(N, generator=generator) < 0.5, 0.0, 1.0)
    # a Hessian: some outliers and a bulk on both sides of zero
    bulk = 0.1 * torch.randn(N, generator=generator, dtype=torch.float64)
    bulk[:5] = torch.tensor([30.0, 20.0, 10.0, -5.0, 3.0], dtype=torch.float64)
    return {"graded": graded, "signs": graded * signs, "null": graded * signs * null, "bulk": bulk}


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["graded", "signs", "null", "bulk"])
@pytest.mark.parametrize("rows", [None, LEAST_VECTORS, 20])
def test_bounds_hold_whatever_the_spectrum(kind, seed, rows):
    values = spectra(seed)[kind]
    A = Dense(prescribed(values, seed)[0])
    memory = None if rows is None else rows * 8 * N
    found = bounded_condition(A, 45, memory=memory, seed=seed)
    sizes = values.abs()
    kappa = float(sizes.max() / sizes[sizes > 0].min())
    assert 1 <= found.condition.lower <= kappa * (1 + 1e-12)
    assert not found.condition.resolved
    assert found.condition.rank <= int((sizes > 0).sum())
    assert found.condition.negative <= int((values < 0).sum())
    # ‖A‖ ≥ ‖Au‖ is certain, and the other end is where Lanczos has converged
    top = found.top
    assert min(abs(float(top.lower)), abs(float(top.upper))) <= float(sizes.max()) * (1 + 1e-12)
    if kind == "bulk" and rows is None:
        assert float(top.lower) <= float(values.max()) <= float(top.upper)
        assert float(top.upper - top.lower) < 1e-5 * float(values.max())
        assert found.condition.lower > 100
    assert found.condition.solver == "Lanczos, 45 products"
    assert top.products == 45
    assert bool((top.lower <= top.eigenvalues) & (top.eigenvalues <= top.upper))


def test_products_are_counted():
    A = Counting(Dense(prescribed(spectra(0)["bulk"], 0)[0]))
    bounded_condition(A, 30)
    # three more measure rounding where an operator has to
    assert A.products == 27


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scaling_changes_nothing(scale):
    A = prescribed(spectra(1)["null"], 1)[0]
    one, other = (bounded_condition(Dense(c * A), 30).condition.lower for c in (1.0, scale))
    assert other == pytest.approx(one, rel=1e-6)


def test_zero_has_no_condition_number():
    found = bounded_condition(Diagonal(torch.zeros(50, dtype=torch.float64)), 20)
    assert found.condition.lambda_max == 0
    assert found.condition.lower == 1


def test_bounds_of_products_in_float32_include_their_rounding():
    values = spectra(2)["bulk"]
    A = prescribed(values, 2)[0]
    apart = float(torch.linalg.matrix_norm(A - A.float().double(), 2))
    found = bounded_condition(Dense(A.float()), 60, error=apart)
    assert float(found.top.lower) <= float(values.max()) <= float(found.top.upper)
    assert float(found.top.upper - found.top.lower) < 1e-4 * float(values.max())
    assert found.condition.lower <= float(values.abs().max() / values.abs().min())
    assert found.condition.lower > 20


def test_what_does_not_fit_is_refused():
    A = Dense(prescribed(spectra(0)["bulk"], 0)[0])
    with pytest.raises(ConfigError, match=r"products=5 is too few .* give 10 or more"):
        bounded_condition(A, 5)
    with pytest.raises(MatrixError, match="least basis needs"):
        bounded_condition(A, 40, memory=5 * 8 * N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graded", [False, True])
def test_the_largest_of_a_flat_spectrum_is_in_its_interval(graded, dtype):
    """Twenty products are not enough to find it, and the interval says so."""
    scales = torch.ones(N) if not graded else 10.0 ** -torch.arange(10.0).repeat_interleave(N // 10)
    short = 0
    for seed in range(8):
        values = 1 + torch.rand(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A = Diagonal((values * scales).to(dtype))
        found = bounded_condition(A, 20, seed=seed)
        most = float((values * scales).to(dtype).max())
        assert float(found.top.lower) <= most * (1 + 1e-12)
        assert most <= float(found.top.upper) < 4 * most
        short += found.condition.lambda_max < most * (1 - 1e-5)
    assert short

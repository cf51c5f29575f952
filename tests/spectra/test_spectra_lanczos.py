import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import Dense, Diagonal, SymmetricOperator
from hesscond.spectra.eigen import Interval, intervals
from hesscond.spectra.lanczos import lanczos
from tests.spectra.spectra_cases import (
    Counting,
    LiveVectors,
    counted,
    generator,
    orthogonal,
    prescribed,
    random_spectrum,
    truth,
)

EPS = torch.finfo(torch.float64).eps
WHICH = ["top", "bottom", "both", "magnitude"]


def expected(values, k, which):
    """The eigenvalues asked for, descending, of all ``values``."""
    values = values.sort(descending=True).values
    if which == "both":
        return values if 2 * k >= len(values) else torch.cat([values[:k], values[-k:]])
    if which == "magnitude":
        return values[values.abs().argsort(descending=True)[:k]].sort(descending=True).values
    return values[:k] if which == "top" else values[-k:]


def hessian_like(n=400, seed=0):
    """A bulk at zero and outliers, some of them negative: what Hessians of networks look like."""
    bulk = torch.rand(n - 11, generator=generator(seed), dtype=torch.float64) ** 4
    return torch.cat([torch.tensor([20.0, 9, 7, 5, 4, 3, 2, -0.6, -0.9, -1.2, -1.6], dtype=torch.float64), bulk])


def outlier(n=300):
    return torch.cat([torch.linspace(0, 1, n - 1, dtype=torch.float64), torch.tensor([100.0], dtype=torch.float64)])


def assert_right(result, A, k, which, tol):
    """Every interval contains its eigenvalue, and residuals and vectors are what they are said to be."""
    values, norm = truth(A), float(truth(A).abs().max())
    want, own = expected(values, k, which), 4 * len(A) * EPS * norm
    if which == "magnitude":  # λ and −λ are as good as each other
        found = result.eigenvalues.abs().sort(descending=True).values
        assert (found - want.abs().sort(descending=True).values).abs().max() <= 2 * tol * norm + own
        for low, high in zip(result.lower, result.upper, strict=True):
            assert ((values >= low - own) & (values <= high + own)).any()
    else:
        assert (want >= result.lower - own).all()
        assert (want <= result.upper + own).all()
    assert (result.eigenvalues.diff() <= 0).all()
    V, dtype, A = result.eigenvectors.double().cpu(), A.dtype, A.double().cpu()
    scale = max(norm, 1e-300)
    residuals = torch.linalg.vector_norm((A / scale) @ V - V * (result.eigenvalues / scale), dim=0)
    precision = torch.finfo(result.eigenvectors.dtype).eps
    assert (residuals - result.residuals / scale).abs().max() <= 100 * max(precision, torch.finfo(dtype).eps)
    assert (V.T @ V - torch.eye(V.shape[1])).abs().max() <= 1000 * precision


# -- prescribed spectra -----------------------------------------------------------------------------------------------


SPECTRA = {
    "bulk": hessian_like(),
    "multiple": torch.tensor([5.0] * 3 + [3.0] * 2 + [-4.0] * 2 + [0.0] * 53, dtype=torch.float64),
    "cluster": torch.cat([1 + 1e-7 * torch.arange(4, dtype=torch.float64), torch.linspace(-0.5, 0.9, 146).double()]),
    "pairs": torch.cat([torch.linspace(0.1, 1, 40).double() ** 3, -(torch.linspace(0.1, 1, 40).double() ** 3)]),
    "graded": torch.logspace(-12, 0, 60, dtype=torch.float64),
    "outlier": outlier(),
    "near": torch.cat([torch.tensor([1, 0.998, 0.996], dtype=torch.float64), torch.linspace(0, 0.98, 97).double()]),
    "singular": torch.cat([torch.zeros(70, dtype=torch.float64), torch.linspace(0.2, 2, 50).double()]),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", SPECTRA)
def test_prescribed_spectrum(name, which):
    spectrum = SPECTRA[name]
    A, _ = prescribed(spectrum, 1)
    operator = Counting(Dense(A))
    k = 3
    result = lanczos(operator, k, which, basis=50)
    assert result.converged, result.message
    assert result.products == operator.products
    assert_right(result, A, k, which, 1e-8)


@pytest.mark.share(4)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (2, 2), (7, 7), (30, 30), (30, 17)])
@pytest.mark.parametrize("which", WHICH)
def test_tiny_orders_end_exactly(n, k, which):
    A, _ = prescribed(torch.randn(n, generator=generator(n), dtype=torch.float64), n)
    result = lanczos(Dense(A), k, which, tol=1e-12)
    assert result.converged
    assert_right(result, A, k, which, 1e-12)


def test_zero_and_identity():
    zero = lanczos(Diagonal(torch.zeros(50, dtype=torch.float64)), 3)
    assert zero.converged
    assert zero.eigenvalues.tolist() == zero.lower.tolist() == zero.upper.tolist() == [0, 0, 0]
    one = lanczos(Diagonal(torch.ones(50, dtype=torch.float64)), 3, "both")
    assert one.converged
    assert one.eigenvalues.tolist() == pytest.approx([1] * 6, abs=1e-14)


# -- random trials ----------------------------------------------------------------------------------------------------


def trial(number, max_products):
    """One random operator, question and options; whether it converged."""
    rng = np.random.default_rng(number)
    n = int(rng.integers(1, 61))
    A, _ = prescribed(random_spectrum(n, rng), number)
    which, spare = WHICH[rng.integers(4)], 6 * int(rng.integers(1, 4))
    k = int(rng.integers(1, min(n, 6) + 1))
    tol = 10.0 ** rng.uniform(-10, -3)
    basis = min(n, k * (1 + (which == "both"))) + spare + int(rng.integers(0, 25))
    result = lanczos(Dense(A), k, which, basis=basis, tol=tol, missed=1e-6, seed=number, max_products=max_products)
    if result.converged:
        assert_right(result, A, k, which, tol)
    else:
        assert "stopped after" in result.message
    return result.converged


@pytest.mark.slow
@pytest.mark.share(20)
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_trials(part):
    assert sum(trial(number, 600) for number in range(100 + 100 * part, 200 + 100 * part)) >= 75


# -- traps of other tools ---------------------------------------------------------------------------------------------


def test_one_krylov_space_holds_one_copy_of_a_multiple_eigenvalue():
    A, _ = prescribed([5.0, 5.0, *np.linspace(0, 1, 120), 3.0], 9)
    unsearched = lanczos(Dense(A), 2, missed=1.0)
    assert unsearched.eigenvalues.tolist() == pytest.approx([5, 3], abs=1e-10)
    assert "no search" in unsearched.message
    searched = lanczos(Dense(A), 2)
    assert searched.converged
    assert searched.eigenvalues.tolist() == pytest.approx([5, 5], abs=1e-10)


FLAT = {
    "flat": lambda g: 1 + torch.rand(600, generator=g, dtype=torch.float64),
    "cluster": lambda g: torch.cat([2 - 1e-5 * torch.rand(4, generator=g), 1 + torch.rand(200, generator=g)]).double(),
    "pairs": lambda g: torch.linspace(1, 2, 100).double() * torch.randn(100, generator=g).double().sign(),
    "near": lambda g: torch.cat([torch.tensor([2, 2 - 3e-4]), 1.9 * torch.rand(200, generator=g)]).double(),
}


@pytest.mark.share(6)
@pytest.mark.parametrize("which", ["top", "bottom", "magnitude", "both"])
@pytest.mark.parametrize("kind", FLAT)
def test_the_outermost_eigenvalue_is_in_its_interval(kind, which):
    """Where a residual of 1e-3 or 1e-4 is reached by the second or the third largest one."""
    widths = []
    for seed in range(3):
        d = FLAT[kind](generator(seed))
        result = lanczos(Diagonal(d), 1, which, tol=1e-3 if seed % 2 else 1e-4, seed=seed, max_products=1000)
        assert result.converged
        ends = [d.max()] * (which != "bottom") + [d.min()] * (which in ("bottom", "both"))
        lower, upper = result.lower, result.upper
        if which == "magnitude":
            ends, lower, upper = [d.abs().max()], *torch.stack([lower.abs(), upper.abs()]).sort(0).values
        for end, low, high in zip(ends, lower, upper, strict=True):
            assert low - 1e-14 <= end <= high + 1e-14
        widths.append(float((upper - lower).max()))
    assert sorted(widths)[1] < 0.02


def test_as_many_intervals_fail_as_are_allowed_to():
    """With a probability of three tenths on one side, at most that, and some: it is the one that was asked for."""
    outside = 0
    for seed in range(30):
        d = torch.rand(300, generator=generator(seed), dtype=torch.float64)
        result = lanczos(Diagonal(d), tol=1e-2, missed=0.6, seed=seed, max_products=1000)
        outside += not result.lower <= d.max() <= result.upper
    assert 0 < outside <= 10


# -- intervals --------------------------------------------------------------------------------------------------------


def test_quadratic_intervals_are_narrower_and_hold():
    A, _ = prescribed(hessian_like(), 11)
    loose = lanczos(Dense(A), 3, tol=1e-4)
    width = loose.upper - loose.lower
    assert (width < loose.residuals / 10).any()
    assert_right(loose, A, 3, "top", 1e-4)
    assert (width >= 2 * Dense(A).rounding * loose.norm * (1 - 1e-12)).all()


@pytest.mark.share(8)
@pytest.mark.parametrize("seed", range(50))
def test_intervals_of_perturbed_invariant_subspaces(seed):
    """Any orthonormal U near eigenvectors, Rayleigh-Ritz, and exact bounds of the rest: λ_i lies in interval i."""
    rng = np.random.default_rng(seed)
    n, k = 12, 4
    A, Q = prescribed(random_spectrum(n, rng) / 1.0, seed)
    A = A / A.abs().max()
    Q = torch.linalg.eigh(A).eigenvectors.flip(1)
    noise = 10.0 ** rng.uniform(-6, -1)
    full = torch.linalg.qr(Q + noise * torch.randn(n, n, generator=generator(seed), dtype=torch.float64)).Q
    theta, Y = torch.linalg.eigh(full[:, :k].T @ A @ full[:, :k])
    U, P = full[:, :k] @ Y.flip(1), full[:, k:]
    theta = theta.flip(0)
    residuals = torch.linalg.vector_norm(A @ U - U * theta, dim=0)
    rest = torch.linalg.eigvalsh(P.T @ A @ P)
    lower, upper = intervals(theta, residuals, 1e-14, Interval(-math.inf, float(rest.max())))
    assert (truth(A)[:k] >= lower).all()
    assert (truth(A)[:k] <= upper).all()


def test_intervals_where_the_other_values_shift_the_rest():
    """Arrow matrices, whose last diagonal entry is the rest, coupled to every value."""
    rng = np.random.default_rng(0)
    narrowed = 0
    for _ in range(500):
        k = int(rng.integers(2, 6))
        theta = np.sort(rng.choice([-1, 1], k) * 10.0 ** rng.uniform(-3, 0, k))[::-1].copy()
        coupling, corner = (
            10.0 ** rng.uniform(-4, 0, k),
            float(rng.choice([*theta]) + rng.normal() * 10 ** rng.uniform(-3, 0)),
        )
        A = np.zeros((k + 1, k + 1))
        A[:k, :k], A[k, k], A[k, :k], A[:k, k] = np.diag(theta), corner, coupling, coupling
        lower, upper = intervals(torch.from_numpy(theta), torch.from_numpy(coupling), 1e-14, Interval(corner, corner))
        # one eigenvalue belongs to the corner: the others, by their places in the order of values and corner
        place = int((theta > corner).sum())
        found = np.delete(np.linalg.eigvalsh(A)[::-1], place)
        assert (found >= lower.numpy()).all()
        assert (found <= upper.numpy()).all()
        narrowed += bool(((upper - lower).numpy() < coupling).any())
    assert narrowed > 25


# -- precision, devices, memory ---------------------------------------------------------------------------------------


def test_float64_recurrences_for_a_float32_operator(device):
    A, _ = prescribed(hessian_like(200), 12, torch.float32, device)
    single, double = lanczos(Dense(A), 3, tol=4e-6), lanczos(Dense(A), 3, tol=4e-6, dtype=torch.float64)
    assert single.eigenvectors.dtype == torch.float32
    assert double.eigenvectors.dtype == torch.float64
    for result in (single, double):
        assert result.converged
        assert result.eigenvectors.device.type == device.type
        assert_right(result, A, 3, "top", 4e-6)
    V = double.eigenvectors.cpu()
    assert (V.T @ V - torch.eye(3)).abs().max() < 1e-13


def test_tolerance_below_rounding_is_not_converged():
    A, _ = prescribed(hessian_like(200), 13, torch.float32)
    result = lanczos(Dense(A), 2, tol=1e-12)
    assert not result.converged
    assert "rounding" in result.message
    assert result.residuals.max() <= Dense(A).rounding * result.norm
    assert_right(result, A, 2, "top", 1e-5)


class Noisy(SymmetricOperator):
    """Products with noise that no one was told of."""

    def __init__(self, A):
        super().__init__(len(A), A.dtype, A.device)
        self.A, self.random = A, generator(0)

    def multiply(self, vectors):
        product = self.A @ vectors
        return product + 1e-5 * torch.randn(product.shape, generator=self.random, dtype=self.dtype)


def test_noisy_products_are_noticed():
    result = lanczos(Noisy(prescribed(hessian_like(200), 14)[0]), 2)
    assert not result.converged
    assert "noisier" in result.message
    assert result.residuals.max() > 1e-6


class Lossy(Counting):
    """Products that lose digits, and say how many."""

    def __init__(self, A, lost):
        super().__init__(Dense(A))
        self.lost, self.random = lost, generator(0)

    def multiply(self, vectors):
        product = super().multiply(vectors)
        noise = torch.randn(product.shape, generator=self.random, dtype=self.dtype)
        return product + self.lost * product.norm() * noise / noise.norm()

    @property
    def rounding(self):
        return 64 * self.lost


@pytest.mark.share(3)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("lost", [1e-11, 1e-6])
def test_intervals_include_the_rounding_of_products(lost, which):
    A, _ = prescribed(hessian_like(200), 14)
    values, operator = truth(A), Lossy(A, lost)
    result = lanczos(operator, 2, which, tol=1e-4)
    assert result.converged
    assert result.products == operator.products
    want = expected(values, 2, which)
    assert (want >= result.lower).all()
    assert (want <= result.upper).all()
    assert (result.upper - result.lower).min() >= 8 * lost * values[0]
    assert (result.upper - result.lower).max() <= max(1e-3, 1e4 * lost) * values[0]


def test_memory(caplog):
    n, basis = 2000, 20
    operator = Diagonal(torch.linspace(0, 1, n, dtype=torch.float64) ** 200)
    with caplog.at_level(logging.INFO, "hesscond"), LiveVectors(n * 4) as live:
        result = lanczos(operator, 3, basis=basis, tol=1e-5)
    assert result.products > 2 * basis  # it was restarted
    assert live.peak <= (result.vectors + 1) * n * 8  # one is the operator's
    assert live.peak > basis * n * 8
    assert result.vectors <= basis + 5
    assert f"at most {result.vectors} vectors" in caplog.messages[0]


def test_memory_budget():
    n = 1000
    operator = Diagonal(torch.linspace(0, 1, n, dtype=torch.float64) ** 4)
    result = lanczos(operator, 2, memory=15 * n * 8)
    assert result.converged
    assert result.vectors == 15
    assert result.products > lanczos(operator, 2).products
    with pytest.raises(MatrixError, match="the least basis needs 10: give memory=80000"):
        lanczos(operator, 2, memory=9 * n * 8)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 40, 100])
def test_products_are_limited(limit):
    operator = counted(torch.linspace(0, 1, 400, dtype=torch.float64))
    result = lanczos(operator, 3, max_products=limit)
    assert operator.products == result.products <= limit
    assert not result.converged
    assert len(result.eigenvalues) == 3
    assert "allow more" in result.message


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 11}, MatrixError, "no 11 eigenvalues: k is 1 to 10"),
        ({"k": 0}, MatrixError, "k is 1 to 10"),
        ({"k": 2.5}, MatrixError, r"no 2\.5 eigenvalues: k is 1 to 10"),
        ({"which": "smallest"}, ConfigError, "which='smallest' is not known: choose from top"),
        ({"k": 2, "basis": 4}, ConfigError, "at least 5 are needed"),
        ({"max_products": 2}, ConfigError, "at least 3 are needed"),
    ],
)
def test_bad_use(arguments, error, message):
    with pytest.raises(error, match=message):
        lanczos(Diagonal(torch.arange(10.0, dtype=torch.float64)), **arguments)


def test_products_that_are_not_finite():
    operator = Dense(prescribed(hessian_like(50), 21)[0])
    operator.A[3, 4] = math.nan  # behind its back
    with pytest.raises(MatrixError, match="a product of the operator is not finite"):
        lanczos(operator)


# -- invariances ------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spectrum=st.lists(st.floats(-4, 4).filter(lambda x: abs(x) > 1e-6), min_size=5, max_size=40),
    seed=st.integers(0, 10**6),
    shift=st.floats(-3, 3),
    scale=st.floats(-40, 40),
    which=st.sampled_from(["top", "bottom"]),
)
def test_similarity_shift_and_scaling(spectrum, seed, shift, scale, which):
    A, _ = prescribed(spectrum, seed)
    Q = orthogonal(len(spectrum), seed + 1)
    similar = Q @ A @ Q.T
    factor, size = 10.0**scale, max(map(abs, spectrum)) + abs(shift)
    base = lanczos(Dense(A), 2, which).eigenvalues
    for B, back in (
        ((similar + similar.T) / 2, lambda values: values),
        (A + shift * torch.eye(len(A), dtype=A.dtype), lambda values: values - shift),
        (A * factor, lambda values: values / factor),
    ):
        result = lanczos(Dense(B), 2, which)
        assert result.converged
        assert (back(result.eigenvalues) - base).abs().max() <= 1e-7 * size

"""The spectral density of operators whose spectrum is prescribed, against its exact distribution function."""

import math
import re
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import Dense, Diagonal, Span
from hesscond.spectra.density import WORKING, Recurrence, density, recurrences, unit_vectors
from tests.spectra.spectra_cases import Counting, LiveVectors, prescribed

N = 3000


def quantiles(function, n=N):
    """n eigenvalues whose distribution function is nearest to a continuous one, from its inverse on (0, 1)."""
    return torch.from_numpy(np.sort(function((np.arange(n) + 0.5) / n)))


def inverse(cdf, low, high):
    grid = np.linspace(low, high, 200_001)
    return lambda p: np.interp(p, cdf(grid), grid)


def semicircle(x):
    """Distribution function of Wigner's law on [−1, 1]."""
    x = np.clip(x, -1, 1)
    return 0.5 + (x * np.sqrt(1 - x**2) + np.arcsin(x)) / np.pi


RATIO = 0.5
LOW, HIGH = (1 - RATIO**0.5) ** 2, (1 + RATIO**0.5) ** 2


def marchenko_pastur(x):
    """Distribution function of Marchenko and Pastur's law with ratio 1/2, by integration of its density."""
    grid = (LOW + HIGH) / 2 - (HIGH - LOW) / 2 * np.cos(np.linspace(0, np.pi, 20_001))
    with np.errstate(invalid="ignore"):
        pdf = np.sqrt(np.clip((HIGH - grid) * (grid - LOW), 0, None)) / (2 * np.pi * RATIO * grid)
    cdf = np.concatenate([[0], np.cumsum((pdf[1:] + pdf[:-1]) / 2 * np.diff(grid))])
    return np.interp(x, grid, cdf / cdf[-1])


CONTINUOUS = {
    "uniform": (lambda x: np.clip((x + 1) / 2, 0, 1), -1.0, 1.0),
    "semicircle": (semicircle, -1.0, 1.0),
    "marchenko-pastur": (marchenko_pastur, LOW, HIGH),
}


def spectrum(name, n=N):
    if name in CONTINUOUS:
        return quantiles(inverse(*CONTINUOUS[name]), n)
    generator = np.random.default_rng(0)
    bulk = generator.standard_normal(n - 30) * 10 ** generator.uniform(-6, -1, n - 30)
    return torch.from_numpy(np.sort(np.concatenate([bulk, np.geomspace(0.3, 60, 30)])))


#: Also a bulk over five decades with outliers, as Hessians of networks have.
NAMES = [*CONTINUOUS, "hessian"]


def fraction(values, x, side="right"):
    return np.searchsorted(values, x, side) / len(values)


def true_measure(values, found, x, side):
    """The exact distribution functions (p, m) of the probes' spectral measures on diag(values)."""
    vectors = unit_vectors(len(values), found.probes, found.seed, None)
    at = np.searchsorted(values.numpy(), x, side)
    return np.stack([np.concatenate([[0], np.cumsum((v**2).numpy())])[at] for v in vectors])


def bounds_at(found, x):
    """Bounds (m,) of the probes' distribution functions at x, averaged, and the standard error of the average."""
    x = torch.as_tensor(x, dtype=torch.float64).reshape(-1)
    sides = found.below(x)
    null = (x >= 0).double() * found.null_weight
    error = torch.maximum(*map(found.error_of, sides))
    return SimpleNamespace(lower=sides[0].mean(0) + null, upper=sides[1].mean(0) + null, error=error)


# --- against the truth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_distribution_function_is_the_analytic_one(name):
    cdf, low, high = CONTINUOUS[name]
    found = density(Diagonal(spectrum(name)), probes=10, steps=60, method="lanczos")
    x = np.linspace(low, high, 17)
    bounds = bounds_at(found, x)
    estimate, resolution = (bounds.lower + bounds.upper) / 2, (bounds.upper - bounds.lower) / 2
    # half a weight of quadrature, four standard errors of sampling
    assert bool(((estimate - torch.from_numpy(cdf(x))).abs() <= resolution + 4 * bounds.error).all())
    assert float((estimate - torch.from_numpy(cdf(x))).abs().max()) < 0.015
    # the naive weights, first components not squared or squared twice, are far off
    for power in (0.5, 2):
        naive = found.weights**power
        naive = naive / naive.sum(1, keepdim=True)
        wrong = torch.stack([(naive * (found.nodes <= place)).sum(1).mean() for place in torch.from_numpy(x)])
        assert float((wrong - torch.from_numpy(cdf(x))).abs().max()) > (0.015 if name != "uniform" else 0.0)


@pytest.mark.parametrize(
    ("values", "shares"),
    [([-2.0, 0.5, 7.0], [0.6, 0.3, 0.1]), ([-1.0, 1.0], [0.02, 0.98]), ([0.0, 1e-5, 3.0], [0.5, 0.48, 0.02])],
)
def test_point_masses_are_found_with_their_weights(values, shares):
    n = 1000
    eigenvalues = torch.cat(
        [torch.full((round(n * share),), value) for value, share in zip(values, shares, strict=True)]
    )
    found = density(Diagonal(eigenvalues.double()), probes=30, method="lanczos")
    # an invariant subspace after as many steps as there are different eigenvalues, but for rounding
    if min(map(abs, values)) > 0.1:
        assert found.steps == len(values)
    assert found.steps < 10
    off = (found.nodes[..., None] - torch.tensor(values, dtype=torch.float64)).abs().amin(-1)
    assert float(off.max()) < 1e-12
    for value, share in zip(values, shares, strict=True):
        got = found.share(value - 1e-9, value + 1e-9)
        assert got.resolved
        assert abs(got.value - share) <= 4 * got.error
        assert got.error <= math.sqrt(2 * share / n / 30) * 1.5
        assert got.lower == pytest.approx(got.value, abs=1e-12)
        assert got.upper == pytest.approx(got.value, abs=1e-12)


def radau_by_definition(one, x):
    """Weights left of x, and with that of x, of the Gauss–Radau rule with a node at x, in 50 digits."""
    with mpmath.workdps(50):
        k, x = len(one.alphas), mpmath.mpf(x)
        J = mpmath.matrix(k + 1, k + 1)
        for i in range(k):
            J[i, i] = mpmath.mpf(one.alphas[i])
            J[i, i + 1] = J[i + 1, i] = mpmath.mpf(one.betas[i])
        right = mpmath.matrix(k, 1)
        right[k - 1] = J[k, k - 1] ** 2
        J[k, k] = x + mpmath.lu_solve(J[:k, :k] - x * mpmath.eye(k), right)[k - 1]
        nodes, vectors = mpmath.eigsy(J)
        assert min(abs(node - x) for node in nodes) < mpmath.mpf(10) ** -20 * (1 + abs(J[k, k]))
        own = min(range(k + 1), key=lambda i: abs(nodes[i] - x))
        left = sum(vectors[0, i] ** 2 for i in range(k + 1) if i != own and nodes[i] < x)
        return float(left), float(left + vectors[0, own] ** 2)


@pytest.mark.share(2)
@pytest.mark.parametrize("near", [1e-14, 1e-8, 0.1])
def test_radau_weights_are_right_however_near_a_gauss_node(near):
    """There an entry of the matrix grows to 1e14 times the others."""
    generator = np.random.default_rng(round(-math.log10(near)))
    for k in (1, 2, 4, 7):
        alphas = generator.standard_normal(k) * 10 ** generator.uniform(-2, 0)
        one = Recurrence(alphas, np.abs(generator.standard_normal(k)) + 0.01)
        nodes = one.gauss()[0]
        size = float(np.abs(nodes).max())
        for place in nodes + generator.choice([-1, 1], k) * near * size:
            lower, upper = (float(side[0]) for side in one.below(np.array([place])))
            # both sides grow with x: what rounding of x can do lies between the values to its left and right
            before, after = (radau_by_definition(one, place + side * 3e-15 * size) for side in (-1, 1))
            assert before[0] - 1e-13 <= lower <= after[0] + 1e-13
            assert before[1] - 1e-13 <= upper <= after[1] + 1e-13
    exact = Recurrence(np.array([1.0, 1.0]), np.array([1.0, 1.0]))  # nodes 0 and 2
    assert np.allclose(exact.below(np.array([0.0, 2.0])), [[0, 0.5], [0.5, 1]], atol=1e-14)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 7, 30])
def test_the_bounds_contain_each_probes_measure(name, steps):
    values = spectrum(name)
    found = density(Diagonal(values), probes=2, steps=steps, method="lanczos", seed=steps)
    width = float(values[-1] - values[0])
    generator = np.random.default_rng(steps)
    x = np.concatenate(
        [
            generator.uniform(float(values[0]) - 0.1 * width, float(values[-1]) + 0.1 * width, 50),
            values.numpy()[generator.integers(0, len(values), 50)],
            found.nodes.numpy().ravel(),
            (found.nodes.numpy()[..., None] + width * np.geomspace(1e-16, 1e-3, 8) * [[[1], [-1]]]).ravel()
            if steps < 3
            else np.zeros(1),
            found.nodes.numpy().ravel() + width * 10 ** generator.uniform(-16, -2, found.nodes.numel()),
            [0.0, math.inf, -math.inf],
        ]
    )
    lower, upper = (side.numpy() for side in found.below(torch.from_numpy(x)))
    slack = 1e-12
    assert (lower <= true_measure(values, found, x, "left") + slack).all()
    assert (upper >= true_measure(values, found, x, "right") - slack).all()
    # they are not trivial: no wider than the largest weight, nearly
    assert (upper - lower).max() <= max(1.6 * float(found.weights.max()), 0.2 if steps > 2 else 1.0)
    averaged = bounds_at(found, x)
    assert np.allclose(averaged.lower, lower.mean(0), atol=1e-15)
    assert float(averaged.lower[-1]) == float(averaged.upper[-1]) == 0.0
    assert float(averaged.lower[-2]) == float(averaged.upper[-2]) == 1.0


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_hold_in_a_dense_matrix_and_in_float32(name, dtype):
    n = 600
    values = spectrum(name, n)
    A, _ = prescribed(values, dtype=dtype)
    found = density(Dense(A), probes=3, steps=50, method="lanczos")
    exact, vectors = torch.linalg.eigh(A.double())
    x = torch.cat([torch.linspace(float(exact[0]), float(exact[-1]), 101).double(), exact[::20], torch.zeros(1)])
    lower, upper = found.below(x)
    for probe, v in enumerate(unit_vectors(n, 3, 0, None)):
        total = torch.cat([torch.zeros(1).double(), (vectors.T @ v.to(dtype).double()).square().cumsum(0)])
        slack = 1e-5 if dtype == torch.float32 else 1e-12
        assert bool((lower[probe] <= total[torch.searchsorted(exact, x)] + slack).all())
        assert bool((upper[probe] >= total[torch.searchsorted(exact, x, right=True)] - slack).all())


def test_standard_errors_cover_at_the_rate_they_say():
    values = spectrum("hessian", 200)
    operator = Diagonal(values)
    truth = {
        "mean": float(values.mean()),
        "square": float(values.square().mean()),
        "negative": float((values < 0).double().mean()),
        "cumulative": float((values <= 0.2).double().mean()),
    }
    inside = dict.fromkeys(truth, 0)
    trials = 60
    for seed in range(trials):
        found = density(operator, probes=8, steps=30, seed=seed, method="lanczos")
        negative, upto = found.negative, found.share(-math.inf, 0.2)
        trace, squares = found.trace(), (found.weights * found.nodes.square()).sum(1)
        answers = {
            "mean": (trace.value / 200, trace.error / 200),
            "square": (float(squares.mean()), float(found.error_of(squares))),
            "negative": (negative.value, negative.error + (negative.upper - negative.lower) / 2),
            "cumulative": (upto.value, upto.error),
        }
        for name, (value, error_of_it) in answers.items():
            inside[name] += abs(value - truth[name]) <= error_of_it
    # Student's t with 7 degrees of freedom: 0.649; three standard deviations of 60 trials are 0.185
    for name in ("mean", "square", "cumulative"):
        assert 0.47 <= inside[name] / trials <= 0.83, (name, inside)
    assert inside["negative"] / trials >= 0.6


# --- null spaces, definiteness, small operators ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_a_known_null_space_is_exact(method):
    n, d = 400, 130
    values = torch.cat([torch.zeros(d), torch.linspace(-1, 3, n - d)]).double()
    A, Q = prescribed(values, 1)
    space = Span(Q[:, :d])
    found = density(Dense(A), probes=12, steps=60, method=method, null_space=space)
    assert found.null_weight == d / n
    assert torch.allclose(found.weights.sum(1) + found.null_weight, torch.ones(1).double(), atol=1e-15, rtol=0)
    lower, upper = bounds_at(found, [-1e-6, 0.0, 1e-6]).lower, bounds_at(found, [-1e-6, 0.0, 1e-6]).upper
    # the jump at zero is there, and nothing of it is estimated
    assert float(lower[1] - upper[0]) == pytest.approx(d / n, abs=float((upper - lower).max()))
    assert found.negative.value == pytest.approx(float((values < -1e-9).double().mean()), abs=0.03)
    assert found.near_zero(1e-3).value >= d / n
    assert found.trace().value == pytest.approx(float(values.sum()), abs=4 * found.trace().error + 1e-9)
    # no node is a rounded zero
    assert float(found.nodes.abs().min()) > 1e-4 or method == "lanczos"
    vectors = torch.stack(list(unit_vectors(n, 3, 0, space)))
    assert float((vectors @ Q[:, :d]).abs().max()) < 1e-15


def test_everything_null():
    zero, space = Dense(torch.zeros(50, 50).double()), Span(torch.eye(50).double())
    for method in ("auto", "lanczos", "dense"):
        found = density(zero, method=method, null_space=space)
        assert (found.null_weight, found.products, found.bottom, found.top) == (1.0, 0, 0.0, 0.0)
        assert found.trace().value == 0.0
        assert found.negative.value == found.negative.upper == 0.0
        assert (
            bounds_at(found, [-1.0, 0.0]).lower.tolist() == bounds_at(found, [-1.0, 0.0]).upper.tolist() == [0.0, 1.0]
        )
        assert found.near_zero().value == 1.0
        assert float(found.curve().density.max()) == 0.0


def test_a_zero_operator_whose_null_space_is_not_known():
    for method in ("lanczos", "dense"):
        found = density(Dense(torch.zeros(50, 50).double()), method=method, probes=3)
        assert torch.equal(found.nodes.unique(), torch.zeros(1).double())
        assert found.share(0.0, 0.0).value == pytest.approx(1.0)
        assert found.negative.lower == found.negative.value == 0.0
        assert float(found.curve().density.sum()) > 0


def test_unknown_null_directions_are_no_negative_eigenvalues():
    values = torch.cat([torch.zeros(450), torch.linspace(1e-3, 1, 30).repeat(5)]).double()
    plain = density(Dense(torch.diag(values)), probes=5, method="lanczos")
    assert 0.0 <= plain.negative.lower <= plain.negative.value <= plain.negative.upper < 1e-9
    # with fewer steps the sign of so much so near zero is open, but not if the operator is known to be semidefinite
    few = density(Dense(torch.diag(values)), probes=5, method="lanczos", steps=5)
    assert few.negative.upper > 0.5
    assert not few.negative.resolved
    psd = density(Dense(torch.diag(values), psd=True), probes=5, method="lanczos", steps=5)
    assert psd.negative.value == psd.negative.upper == 0.0
    assert float(bounds_at(psd, -1e-3).upper) == 0.0
    indefinite = density(Diagonal(torch.cat([-values[-30:], values])), probes=20, method="lanczos")
    negative = indefinite.negative
    assert abs(negative.value - 30 / 630) <= 4 * negative.error + (negative.upper - negative.lower) / 2


@pytest.mark.share(2)
@pytest.mark.parametrize("n", [1, 2, 5, 79, 80, 81])
@pytest.mark.parametrize("method", ["auto", "lanczos"])
def test_small_operators(n, method):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).sort().values
    found = density(Diagonal(values), probes=3, steps=80, method=method)
    assert found.steps == min(n, 80) if method == "lanczos" else n
    assert torch.allclose(found.weights.sum(1), torch.ones(1).double())
    if n <= 80:
        assert torch.allclose(found.nodes, values.expand_as(found.nodes), atol=1e-12)
        assert all(one.betas[-1] == 0 for one in found.recurrences)
    if method == "auto":
        assert (found.probes, found.seed, found.products) == (0, None, n)
        assert found.trace().error == 0.0
        assert found.trace().value == pytest.approx(float(values.sum()), rel=1e-12, abs=1e-12)
        x = torch.linspace(-2, 2, 31, dtype=torch.float64)
        exact = torch.from_numpy(fraction(values.numpy(), x.numpy()))
        bounds = bounds_at(found, x)
        assert torch.equal(bounds.lower, bounds.upper)
        assert torch.allclose(bounds.lower, exact, atol=1e-15)
        assert not bool(bounds.error.any())


def test_one_probe_has_no_error_bar():
    found = density(Diagonal(spectrum("uniform")), probes=1, steps=20)
    assert found.trace().error == found.negative.error == math.inf
    assert bool(bounds_at(found, 0.0).error.isinf())


# --- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["lanczos", "dense"])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_scale_only_scales(exponent, method, dtype):
    values = spectrum("hessian", 300).to(dtype)
    factor = 2.0**exponent  # about 1e-30 and 1e30
    one, other = (density(Diagonal(values * c), probes=3, steps=30, method=method) for c in (1.0, factor))
    assert torch.allclose(other.nodes / factor, one.nodes, rtol=1e-12, atol=1e-14)
    assert torch.allclose(other.weights, one.weights, rtol=1e-9, atol=1e-15)
    assert other.blur == pytest.approx(factor * one.blur, rel=1e-12)
    assert other.negative.value == pytest.approx(one.negative.value, abs=1e-12)
    x = torch.linspace(-1, 1, 11, dtype=torch.float64)
    assert torch.allclose(bounds_at(other, x * factor).upper, bounds_at(one, x).upper, atol=1e-9)
    assert torch.allclose(one.curve().density, factor * other.curve().density, rtol=1e-6, atol=1e-9)
    reflected = density(Diagonal(-values), probes=3, steps=30, method=method)
    assert torch.allclose(reflected.nodes, -one.nodes.flip(1), rtol=1e-9, atol=1e-9 if dtype is torch.float64 else 1e-3)


def test_blocks_change_nothing_but_the_memory():
    values = spectrum("hessian")
    size = N * 8
    one = 33 * size
    seen = []
    for memory, block in ((None, 5), (5 * one, 5), (2.5 * one, 2), (one, 1)):
        operator = Counting(Diagonal(values))
        found = density(operator, steps=30, probes=5, memory=memory, method="lanczos")
        assert operator.widest == block
        assert operator.products == found.products == 150
        assert operator.calls == -(-5 // block) * 30
        seen.append(found)
    for found in seen[1:]:
        assert torch.allclose(found.nodes, seen[0].nodes, atol=1e-9)
        assert torch.allclose(found.weights, seen[0].weights, atol=1e-9)
    with pytest.raises(ConfigError, match=re.escape("at most 29 steps")):
        density(Counting(Diagonal(values)), probes=5, steps=30, memory=one - 1, method="lanczos")


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("null", [False, True])
def test_the_memory_held_is_what_was_said(null, dtype):
    n = 20_000
    operator = Counting(Diagonal(spectrum("uniform", n).to(dtype)))
    space = Span(torch.eye(n, 1, dtype=torch.float64)) if null else None
    starts = list(unit_vectors(n, 4, 0, space))
    with LiveVectors(4 * n) as live:
        found = recurrences(operator, starts, 4, 20, null_space=space)
    assert len(found) == 4
    # beside the vectors of the operator and of the null space
    assert live.peak <= 4 * (20 + WORKING) * n * dtype.itemsize + 2 * n * 8


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    operator = Diagonal(spectrum("uniform"))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = density(operator, probes=2, steps=5, seed=3)
    assert torch.equal(first.nodes, density(operator, probes=2, steps=5, seed=3).nodes)
    assert not torch.equal(first.nodes, density(operator, probes=2, steps=5, seed=4).nodes)
    assert torch.equal(torch.get_rng_state(), before)


# --- curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_the_curve_integrates_to_one_and_is_the_density(name, method):
    values = spectrum(name, 2000 if method == "lanczos" else 500)
    found = density(Diagonal(values), probes=10, steps=60, method=method)
    curve = found.curve(2000)
    width = curve.width
    assert float(torch.trapezoid(curve.density, curve.x)) == pytest.approx(1.0, abs=1e-5)
    # the same Gaussians over the true eigenvalues
    truth = torch.exp(-0.5 * ((curve.x[:, None] - values) / width) ** 2).mean(1) / (width * math.sqrt(2 * math.pi))
    off = (curve.density - truth).abs()
    if method == "dense":
        assert float(off.max()) <= 1e-9
    elif name != "hessian":
        # ten probes of Lanczos: sampling, and what the nodes leave of their discreteness
        assert bool((off <= 5 * curve.error + 0.12 * truth.max()).all())
        assert float(off.mean()) <= 0.03 * float(truth.max())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"probes": 0}, "at least one probe"),
        ({"steps": 0}, "at least one probe and one step"),
        ({"method": "exact"}, "auto, lanczos, dense"),
        ({"memory": 0}, "positive"),
        ({"memory": math.nan}, "positive"),
    ],
)
def test_bad_arguments_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        density(Diagonal(torch.ones(5)), **options)


def test_bad_questions_are_refused():
    found = density(Diagonal(torch.ones(5)))
    for question in (lambda: found.share(math.nan, 1.0), lambda: found.share(1.0, 0.0), lambda: found.curve(1)):
        with pytest.raises(ConfigError):
            question()


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_products_that_are_not_finite_are_refused(method):
    operator = Diagonal(torch.ones(3))
    operator.d[1] = math.nan  # behind its back
    with pytest.raises(MatrixError, match="not finite"):
        density(operator, method=method)


@pytest.mark.parametrize("null", [0, 150])
def test_null_eigenvalues_of_either_sign_are_zero(null):
    """All eigenvalues are there, those of the null space by round-off on either side of zero."""
    values = torch.cat([torch.linspace(-1, -0.1, 32), torch.zeros(null), torch.linspace(0.05, 3, 355 - null)]).double()
    found = density(prescribed(values)[0], method="dense")
    assert found.negative.value == pytest.approx(float((values < 0).double().mean()), abs=1e-9)
    assert found.share(0.0, 0.0).value == pytest.approx(float((values == 0).double().mean()), abs=1e-9)

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.linalg import hilbert
from scipy.sparse import csr_array

import hesscond
from hesscond.errors import MatrixError
from hesscond.spectra.reductions import factor_condition, factor_eigenvalues, signed_condition
from hesscond.spectra.solvers.jacobi import smallest_singular_value


def mp_singular_values(F, digits=80):
    """Singular values of the given doubles, exactly as they are, from the Gram matrix in `digits` digits."""
    with mpmath.workdps(digits):
        A = mpmath.matrix(np.asarray(F).tolist())
        G = A * A.T if A.rows <= A.cols else A.T * A
        return [mpmath.sqrt(abs(v)) for v in sorted(mpmath.eigsy(G, eigvals_only=True), reverse=True)]


def orthogonal(rng, n):
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


def graded(rng, kind, m, n, spread):
    """A well-conditioned core with rows and columns scaled over 10**spread."""
    core = rng.standard_normal((m, n))
    rows = 10.0 ** rng.uniform(-spread, 0, m) if kind in ("rows", "both") else np.ones(m)
    columns = 10.0 ** rng.uniform(-spread, 0, n) if kind in ("columns", "both") else np.ones(n)
    return core * rows[:, None] * columns


@pytest.mark.parametrize("kind", ["none", "rows", "columns", "both"])
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (6, 6), (12, 8), (1, 5), (5, 1)])
@pytest.mark.parametrize("spread", [2, 10])
def test_graded_factors_are_resolved_to_full_precision(kind, shape, spread):
    rng = np.random.default_rng([*shape, spread, len(kind)])
    F = graded(rng, kind, *shape, spread)
    sigma = mp_singular_values(F)
    kappa = factor_condition(F)
    truth = (sigma[0] / sigma[-1]) ** 2
    assert kappa.resolved
    assert kappa.rank == min(shape)
    assert kappa.nullity == shape[1] - min(shape)
    assert kappa.rank_decision == "structural"
    assert kappa.lower <= truth <= kappa.upper
    assert abs(kappa.value / truth - 1) < 1e-12
    assert abs(kappa.lambda_min / sigma[-1] ** 2 - 1) < 1e-12
    assert kappa.width < 1e-8
    eigenvalues = factor_eigenvalues(F, kappa)
    assert all(abs(v / s**2 - 1) < 1e-9 for v, s in zip(eigenvalues, sigma, strict=True))


def test_row_scales_over_twenty_decades_and_kappa_of_1e40():
    rng = np.random.default_rng(0)
    F = rng.standard_normal((8, 12)) * 10.0 ** np.linspace(0, -20, 8)[:, None]
    sigma = mp_singular_values(F, 160)
    kappa = factor_condition(F)
    truth = (sigma[0] / sigma[-1]) ** 2
    assert truth > 1e38
    assert abs(kappa.value / truth - 1) < 1e-12
    assert kappa.lower <= truth <= kappa.upper


def adversarial(rng, trial):
    """One of several ensembles with the truth known exactly or to many digits: (factor, exact singular values)."""
    m, n = rng.integers(1, 7, 2)
    kind = ("none", "rows", "columns", "both")[trial % 4]
    F = graded(rng, kind, m, n, rng.uniform(0, 12))
    if trial % 5 == 0:
        # a prescribed spectrum, rounded into the entries: the truth is that of the rounded matrix
        k = min(m, n)
        F = orthogonal(rng, m)[:, :k] * 10.0 ** rng.uniform(-9, 0, k) @ orthogonal(rng, n)[:k]
    if trial % 7 == 0 and m > 1:
        F[0] = F[-1]
    if trial % 11 == 0 and n > 1:
        F[:, 0] = 0
    if trial % 13 == 0:
        F = F * 1e-150
    return F


def check_interval(F):
    kappa = factor_condition(F)
    sigma = mp_singular_values(F, 100)
    nonzero = [s for s in sigma if s > sigma[0] * mpmath.mpf(10) ** -40]
    if not nonzero or sigma[0] == 0:
        assert kappa.rank == 0
        assert not kappa.resolved
        return None
    truth = (nonzero[0] / nonzero[-1]) ** 2
    assert kappa.lower <= truth, (F.tolist(), kappa, truth)
    if kappa.resolved:
        assert truth <= kappa.upper, (F.tolist(), kappa, truth)
    return kappa.width


def test_truth_is_inside_the_interval_in_random_trials():
    rng = np.random.default_rng(1)
    widths = [check_interval(adversarial(rng, trial)) for trial in range(300)]
    assert np.median([w for w in widths if w is not None and math.isfinite(w)]) < 1e-8


def test_the_smallest_singular_value_is_certified_for_all_matrices_within_the_errors_of_the_entries():
    rng = np.random.default_rng(3)
    widths = []
    for trial in range(120):
        m, n = sorted(rng.integers(1, 7, 2))[::-1]
        F = graded(rng, ("none", "rows", "columns", "both")[trial % 4], m, n, rng.uniform(0, 12))
        share = (0.0, 1e-9)[trial % 2]
        found = smallest_singular_value(F, share * np.abs(F) if share else None)
        if found is None:
            # rounding, or the errors, may make it singular
            assert share
            continue
        for signs in rng.choice([-1.0, 1.0], (3, m, n)):
            truth = mp_singular_values(F * (1 + share * signs), 100)[n - 1]
            assert found.lower * (1 - 1e-15) <= truth <= found.upper * (1 + 1e-15)
        if not share:
            widths.append((found.upper - found.lower) / found.value)
        assert float(np.linalg.norm(F @ found.v)) < 2 * found.upper + 1e-15 * np.linalg.norm(F, 2)
    assert np.median(widths) < 1e-12
    assert max(widths) < 1e-6


def test_truth_is_inside_the_interval_where_no_vector_of_doubles_comes_near_the_smallest():
    rng = np.random.default_rng(4)
    widths = []
    for _ in range(60):
        F = rng.standard_normal((4, 3))
        F[:, 0] = F[:, 2] + 10.0 ** rng.uniform(-7, -2) * F[:, 0]
        F = F * 10.0 ** rng.uniform(-25, 0, (4, 1))
        kappa, sigma = hesscond.condition_number(factor=F), mp_singular_values(F, 160)
        assert kappa.lower <= (sigma[0] / sigma[-1]) ** 2 <= kappa.upper
        widths.append(kappa.width)
    assert np.median(widths) < 1e-6


@pytest.mark.slow
@pytest.mark.share(20)
@pytest.mark.parametrize("part", range(20))
def test_truth_is_inside_the_interval_in_many_random_trials(part):
    rng = np.random.default_rng([2, part])
    for trial in range(500):
        check_interval(adversarial(rng, trial))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_truth_is_inside_the_interval_for_any_small_matrix(m, n, data):
    entry = st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, 2.0]),
        st.floats(-1e3, 1e3, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-12),
    )
    F = np.array([[data.draw(entry) for _ in range(n)] for _ in range(m)])
    kappa = factor_condition(F)
    sigma = mp_singular_values(F, 120)
    if not F.any():
        assert kappa.rank == 0
        return
    nonzero = [s for s in sigma if s > sigma[0] * mpmath.mpf(10) ** -45]
    # a float64 cannot tell a σ of 1e-16 made by cancellation of its entries from round-off
    meaningful = [s for s in nonzero if s > 1e-10 * sigma[0]]
    if len(meaningful) == len(nonzero) and kappa.resolved:
        truth = (nonzero[0] / nonzero[-1]) ** 2
        assert kappa.lower <= truth <= kappa.upper
        assert kappa.rank == len(nonzero)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.floats(-290, 290), st.sampled_from(["none", "rows", "columns", "both"]))
def test_kappa_does_not_depend_on_scale(seed, exponent, kind):
    rng = np.random.default_rng(seed)
    F = graded(rng, kind, 5, 4, 6)
    scaled = F * 10.0**exponent
    if np.abs(scaled[scaled != 0]).min() < 1e-290:
        return
    a, b = factor_condition(F), factor_condition(scaled)
    assert a.resolved
    assert b.resolved
    assert a.rank == b.rank
    assert b.value == pytest.approx(a.value, rel=1e-9)
    assert factor_condition(2.0**40 * F).value == a.value


def test_dependent_features_are_a_numerical_rank_decision_with_its_gap():
    rng = np.random.default_rng(3)
    F = rng.standard_normal((20, 6))
    F[:, 5] = F[:, 0] + 0.1 * F[:, 1]
    kappa = factor_condition(F)
    assert kappa.rank == 5
    assert kappa.resolved
    assert kappa.rank_decision == "numerical"
    assert kappa.gap > 1e6
    independent = np.linalg.svd(F, compute_uv=False)
    assert kappa.value == pytest.approx((independent[0] / independent[4]) ** 2, rel=1e-9)


def test_rank_visible_in_the_pattern_is_structural():
    rng = np.random.default_rng(4)
    F = rng.standard_normal((10, 6))
    F[:, 3:] = 0
    F[4:, 2] = 0
    F[:6] = F[0]
    kappa = factor_condition(F)
    assert kappa.rank_decision == "structural"
    assert kappa.rank == 3
    assert kappa.nullity == 3
    # three features that only two samples reach, hidden from a count of nonzero columns
    pattern = np.zeros((6, 5))
    pattern[:4, :2] = rng.standard_normal((4, 2))
    pattern[4:, 2:] = rng.standard_normal((2, 3))
    kappa = factor_condition(pattern)
    assert (kappa.rank, kappa.rank_decision) == (4, "structural")


def test_a_spectrum_without_gap_is_unresolved():
    kappa = hesscond.condition_number(hilbert(30))
    assert not kappa.resolved
    assert float(kappa) == math.inf
    assert kappa.upper == math.inf
    assert kappa.rank_decision == "unresolved"
    assert 1e12 < kappa.lower < 1e45
    assert "unresolved" in str(kappa)


def test_the_papers_setting_where_others_print_1e19():
    """A rank deficient mini-batch block: numpy's cond is round-off, ours is the κ of the nonzero spectrum.

    The very matrix that was formed has full rank; that its entries are rounded has to be said.
    """
    rng = np.random.default_rng(5)
    F = rng.standard_normal((60, 101)) * 10.0 ** rng.uniform(-2, 2, 101)
    H = F.T @ F
    assert np.linalg.cond(H) > 1e15
    truth = np.linalg.cond(F) ** 2
    given = hesscond.condition_number(H)
    assert not given.resolved
    assert given.lower > 1e12
    for kappa in (factor_condition(F), hesscond.condition_number(H, error=1e-15 * np.linalg.norm(H))):
        assert kappa.rank == 60
        assert kappa.nullity == 41
        assert kappa.resolved
        assert kappa.value == pytest.approx(truth, rel=1e-6)


def test_error_of_the_factor_widens_the_interval_until_nothing_is_resolved():
    F = np.diag([1.0, 1e-6])
    assert factor_condition(F).resolved
    wide = factor_condition(F, error=1e-8)
    assert wide.lower < 0.99e12
    assert wide.upper > 1.01e12
    assert not factor_condition(F, error=1e-6).resolved
    assert not factor_condition(F, error=1e-4).resolved


def test_errors_of_columns_are_felt_by_the_singular_values_they_reach():
    rng = np.random.default_rng(12)
    scale = np.array([1.0, 1e-8, 1e-16])
    errors = 1e-9 * scale
    for m in (5, 3, 2):
        F = rng.standard_normal((m, 3)) * scale
        exact = factor_condition(F)
        kappa = factor_condition(F, error=errors)
        assert kappa.resolved
        assert kappa.lower < exact.value < kappa.upper
        assert 1e-10 < kappa.width < 1e-6
        for _ in range(20):
            moved = factor_condition(F + errors * rng.standard_normal((m, 3)) / 5)
            assert kappa.lower <= moved.value <= kappa.upper
        if m > 2:
            assert not factor_condition(F, error=float(np.linalg.norm(errors))).resolved


def test_a_small_value_between_round_off_and_the_bound_is_unresolved_not_dropped():
    """σ of some seventy units of round-off: too small to certify, too large to be called zero."""
    rng = np.random.default_rng(13)
    m, n = 60, 101
    sigma = np.ones(m)
    sigma[-1] = 72 * np.finfo(float).eps
    F = orthogonal(rng, m) * sigma @ orthogonal(rng, n)[:m]
    kappa = factor_condition(F)
    assert not kappa.resolved
    assert kappa.rank == m - 1


def symmetric_with(values, rng):
    Q = orthogonal(rng, len(values))
    A = (Q * values) @ Q.T
    return (A + A.T) / 2


@pytest.mark.parametrize(
    "values",
    [[3.0, -2.0, 0.5], [1.0, 1.0, 1.0], [5.0, -5.0, 1.0, -1.0], [-1.0, -2.0, -3.0, -1e-3], [-5.0, -0.1, 0.2, 3.0]],
)
def test_symmetric_matrices_are_measured_by_absolute_value_with_inertia(values):
    A = symmetric_with(np.array(values), np.random.default_rng(7))
    kappa = hesscond.condition_number(A)
    assert kappa.value == pytest.approx(max(map(abs, values)) / min(map(abs, values)), rel=1e-12)
    assert kappa.negative == sum(v < 0 for v in values)
    assert kappa.rank == len(values)


def test_graded_positive_definite_matrix_given_as_it_is():
    rng = np.random.default_rng(8)
    core = symmetric_with(np.array([3.0, 2.0, 1.0, 0.5]), rng)
    scale = np.array([1.0, 1e-5, 1e-9, 1e-14])
    A = core * scale * scale[:, None]
    A = (A + A.T) / 2
    with mpmath.workdps(80):
        values = sorted(mpmath.eigsy(mpmath.matrix(A.tolist()), eigvals_only=True))
        truth = values[-1] / values[0]
    kappa = hesscond.condition_number(A)
    assert kappa.lower <= truth <= kappa.upper
    assert abs(kappa.value / truth - 1) < 1e-12
    assert kappa.negative == 0


def test_paired_eigenvalues_at_every_level_keep_their_signs():
    A = np.zeros((6, 6))
    for i, size in enumerate([1.0, 1e-10, 1e-20]):
        A[2 * i, 2 * i + 1] = A[2 * i + 1, 2 * i] = size
    kappa = hesscond.condition_number(A)
    assert kappa.value == pytest.approx(1e20, rel=1e-12)
    assert kappa.negative == 3


def test_eigenvalues_200_decades_apart():
    A = np.zeros((4, 4))
    A[0, 0], A[1, 2], A[2, 1] = 1.0, 1e-200, 1e-200
    kappa = hesscond.condition_number(A)
    assert kappa.value == pytest.approx(1e200, rel=1e-12)
    assert (kappa.rank, kappa.nullity, kappa.negative) == (3, 1, 1)


def test_general_matrices_are_measured_by_singular_values():
    rng = np.random.default_rng(9)
    A = rng.standard_normal((5, 8)) * 10.0 ** np.linspace(0, -12, 8)
    sigma = mp_singular_values(A)
    kappa = hesscond.condition_number(A)
    assert abs(kappa.value / (sigma[0] / sigma[-1]) - 1) < 1e-12
    assert hesscond.condition_number(csr_array(A)).value == kappa.value
    assert hesscond.condition_number(torch.from_numpy(A)).value == kappa.value


def test_float32_matrix_is_not_measured_by_its_own_rounding():
    """Others report about 1e5 for anything beyond: the cutoff of a float32 eigensolver."""
    A = np.diag(np.array([1.0, 1e-4, 1e-8, 1e-12], dtype=np.float32))
    assert hesscond.condition_number(A).value == pytest.approx(1e12, rel=1e-6)


def test_indefinite_factor_against_the_dense_matrix():
    rng = np.random.default_rng(10)
    for m, n in ((5, 9), (9, 5), (6, 6)):
        F, signs = rng.standard_normal((m, n)), np.where(rng.random(m) < 0.4, -1.0, 1.0)
        with mpmath.workdps(60):
            A = mpmath.matrix(F.tolist())
            values = mpmath.eigsy(A.T * mpmath.diag(signs.tolist()) * A, eigvals_only=True)
            nonzero = [v for v in values if abs(v) > mpmath.mpf(10) ** -40]
            truth = max(map(abs, nonzero)) / min(map(abs, nonzero))
        kappa = signed_condition(F, signs)
        assert kappa.resolved
        assert kappa.rank == len(nonzero) == min(m, n)
        assert kappa.negative == sum(v < 0 for v in nonzero)
        assert kappa.lower <= truth <= kappa.upper


def test_indefinite_cancellation_is_unresolved_not_invented():
    """FᵀJF = 1e-18 in exact arithmetic terms lies below the rounding of ‖F‖² = 1."""
    rng = np.random.default_rng(11)
    row = rng.standard_normal(4)
    F = np.array([row, row * (1 + 1e-15), rng.standard_normal(4)])
    kappa = signed_condition(F, np.array([1.0, -1.0, 1.0]))
    assert kappa.rank <= 2
    assert kappa.lambda_min > 1e-13 or not kappa.resolved


def test_zero_matrix_has_no_kappa():
    for kappa in (hesscond.condition_number(np.zeros((3, 3))), factor_condition(np.zeros((2, 5)))):
        assert not kappa.resolved
        assert kappa.rank == 0
        assert float(kappa) == math.inf


def test_either_matrix_or_factor():
    with pytest.raises(MatrixError, match="not both"):
        hesscond.condition_number()
    with pytest.raises(MatrixError, match="not both"):
        hesscond.condition_number(np.eye(2), factor=np.eye(2))


@pytest.mark.parametrize("ends", [(1e300, 1e-300), (1e200, 1e-120), (1.0, 1e-310), (1e-5, 1e-320)])
@pytest.mark.parametrize("kind", ["factor", "symmetric", "general"])
def test_entries_that_underflow_when_squared_do_not_make_a_rank(ends, kind):
    """The smallest singular value is there, and is not resolved: no κ = 1 of rank one."""
    A = np.array([[ends[0], 0.0], [0.0, ends[1]]])
    if kind == "general":
        A = np.vstack([A, np.zeros(2)])
    kappa = hesscond.condition_number(factor=A) if kind == "factor" else hesscond.condition_number(A)
    truth = mpmath.mpf(ends[0]) / mpmath.mpf(ends[1])
    assert not kappa.resolved or kappa.value >= truth * (1 - 1e-9)
    assert kappa.upper == math.inf or kappa.upper >= truth


@pytest.mark.parametrize(
    ("matrix", "truth"),
    [
        ([[1, 1], [1, 1 + 2**-50]], 4 * 2**50),
        ([[1, 1], [1, 1 + 2**-52]], 4 * 2**52),
        (np.array([[1.0, 2.0], [3.0, 6.0 + 2**-49]]), 50 * 2**49),
    ],
)
def test_a_matrix_that_is_given_is_exact(matrix, truth):
    """All but the last digit of an entry is a multiple of the others: size alone takes the small value for a zero."""
    kappa = hesscond.condition_number(matrix)
    assert kappa.lower <= truth * 1.01
    assert kappa.upper >= truth * 0.99
    assert kappa.lower > truth / 1e3


def test_features_far_from_zero_given_as_a_factor():
    rng = np.random.default_rng(15)
    F = np.column_stack([np.ones(20), 1e15 + rng.standard_normal(20)])
    with mpmath.workdps(150):
        values = mpmath.svd_r(mpmath.matrix(F.tolist()), compute_uv=False)
        truth = (values[0] / values[1]) ** 2
        kappa = hesscond.condition_number(factor=F)
        assert kappa.lower <= truth <= kappa.upper
    assert kappa.lower > 1e50
    # the activations of a forward pass are rounded: there it is a numerical rank, and says so
    rounded = factor_condition(F)
    assert rounded.rank_decision == "numerical"
    assert "numerical rank 1 of 2" in str(rounded)


@pytest.mark.parametrize("kind", ["matrix", "symmetric", "factor"])
def test_exact_ranks_resolve_what_sizes_leave_open(kind):
    """Small integers: the rank is below that of the pattern, and certain."""
    rng = np.random.default_rng(16)
    for n, r in ((4, 2), (9, 5), (40, 30)):
        L = rng.integers(-9, 10, (n, r)).astype(float)
        A = L @ L.T if kind == "symmetric" else L @ rng.integers(-9, 10, (r, n))
        kappa = hesscond.condition_number(**{"factor" if kind == "factor" else "matrix": A})
        values = np.linalg.svd(A, compute_uv=False)
        assert (kappa.rank, kappa.rank_decision, kappa.resolved) == (r, "exact", True)
        assert kappa.value == pytest.approx((values[0] / values[r - 1]) ** (2 if kind == "factor" else 1), rel=1e-8)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.zeros((0, 3)), "non-empty"),
        (np.zeros(3), "two dimensions"),
        (np.array([[1.0, np.nan]]), "NaN"),
        (np.array([[1.0, np.inf]]), "infinite"),
        ("abc", "real numbers"),
        ([[1, "a"]], "real numbers"),
        (np.array([[2**53 + 1, 0], [0, 1]]), "no double"),
        ([[2**70 + 1, 0], [0, 1]], "no double"),
        ([[Fraction(1, 3), 0], [0, 1]], "no double"),
        (np.array([[np.longdouble(1) / 3, 0], [0, 1]]), "no double"),
        (np.ma.masked_array(np.eye(2), [[True, False], [False, False]]), "masked"),
        (np.eye(2) + 0j, "complex"),
        (torch.eye(2, dtype=torch.complex64), "complex"),
        (np.array([["1", "2"], ["3", "4"]]), "real numbers"),
        ([[1, 2], [3]], "real numbers"),
    ],
)
def test_what_is_no_matrix_of_doubles_is_refused(matrix, words):
    for argument in ("matrix", "factor"):
        with pytest.raises(MatrixError, match=words):
            hesscond.condition_number(**{argument: matrix})
    with pytest.raises(MatrixError, match=words):
        hesscond.exact_rank(matrix)


def test_what_is_a_matrix_of_doubles_is_taken_as_it_is():
    entries = [[3.0, 1.0], [1.0, 2.0]]
    truth = hesscond.condition_number(entries).value
    for same in (
        np.array(entries, dtype=np.longdouble),
        np.array(entries, dtype=np.uint8),
        np.array([[Fraction(3), 1], [1, 2]], dtype=object),
        np.ma.masked_array(entries),
        torch.tensor(entries, dtype=torch.bfloat16),
        torch.tensor(entries, dtype=torch.float16, requires_grad=True),
        torch.tensor(entries).to_sparse(),
    ):
        assert hesscond.condition_number(same).value == truth
        assert hesscond.condition_number(factor=same).value == pytest.approx(truth**2)
    large = 2**60
    assert hesscond.condition_number(np.array([[large, 0], [0, 1]])).value == large


@pytest.mark.parametrize(
    "options",
    [{"error": -1}, {"error": math.nan}, {"error": math.inf}, {"rtol": math.nan}, {"rtol": -1}],
)
def test_tolerances_that_are_none_are_refused(options):
    with pytest.raises(MatrixError, match=next(iter(options))):
        hesscond.condition_number(np.eye(2), **options)


def test_an_error_larger_than_the_matrix_leaves_nothing_resolved():
    for kappa in (
        hesscond.condition_number(np.eye(2), error=10),
        hesscond.condition_number(factor=np.eye(2), error=10),
    ):
        assert not kappa.resolved
        assert kappa.rank == 0
        assert kappa.lower == 1
        assert kappa.lambda_max == pytest.approx(1)
        assert "zero matrix" not in kappa.solver


def test_an_eigenvalue_within_the_error_bounds_nothing():
    # the matrix that is meant is diag(1, 0.5, 0), κ = 2; what is known of it has an error of 1e-6
    found = hesscond.condition_number(np.diag([1.0, 0.5, 1e-6])).widened(2e-6)
    assert not found.resolved
    assert found.lower == 1
    certain = hesscond.condition_number(np.diag([1.0, 0.5, 1e-3])).widened(2e-6)
    assert 900 < certain.lower < 1000


@pytest.mark.share(2)
@pytest.mark.parametrize("signs", [1.0, -1.0])
@pytest.mark.parametrize("zeros", [1, 20])
def test_a_small_eigenvalue_well_above_round_off_is_told_from_zeros(zeros, signs):
    """Jacobi's bounds are wider here than those of the eigenvalues, which have decided already."""
    rng = np.random.default_rng(zeros)
    values = np.concatenate([signs * np.linspace(0.1, 1, 299 - zeros), [1e-10], np.zeros(zeros)])
    Q = orthogonal(rng, 300)
    A = (Q * values) @ Q.T
    for scale in (1.0, 2.0**-100):
        found = hesscond.condition_number((A + A.T) / 2 * scale, error=1e-16 * scale)
        assert (found.rank, found.rank_decision) == (300 - zeros, "numerical")
        assert found.lower <= 1e10 <= found.upper
        assert found.value == pytest.approx(1e10, rel=1e-3)

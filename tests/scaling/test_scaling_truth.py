"""The optimum against independent truths: closed forms, published figures, brute force, a semidefinite solver."""

import clarabel
import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize

from hesscond import optimal_diagonal_scaling


def kappa(A, rank=None):
    s = np.linalg.svd(A, compute_uv=False)
    return s[0] / s[(len(s) if rank is None else rank) - 1]


def check(best, A, truth, rtol=2e-6):
    """κ is reached by the scaling that is returned, and both ends enclose the truth."""
    assert kappa(best.row[:, None] * A * best.column, best.rank) == pytest.approx(best.kappa, rel=1e-9)
    assert best.lower <= truth * (1 + 1e-12)
    assert best.upper >= truth * (1 - 1e-12)
    assert best.kappa == pytest.approx(truth, rel=rtol)
    assert best.gap - 1 < rtol


@pytest.mark.parametrize(("seed", "n"), [(0, 2), (1, 3), (2, 7)])
def test_two_rows_are_best_with_equal_norms(seed, n):
    A = np.random.default_rng(seed).standard_normal((2, n)) * np.array([[1e9], [1e-12]])
    a, b = A / np.linalg.norm(A, axis=1)[:, None]
    truth = np.sqrt((1 + abs(a @ b)) / (1 - abs(a @ b)))
    check(optimal_diagonal_scaling(A), A, truth)
    check(optimal_diagonal_scaling(A.T, side="column"), A.T, truth)


@pytest.mark.parametrize("seed", range(4))
def test_both_sides_of_a_two_by_two_matrix(seed):
    A = np.random.default_rng(seed).standard_normal((2, 2))
    # equal sizes on each diagonal can be reached: [[α, β], [±β, α]]
    alpha, beta = np.sqrt(abs(A[0, 0] * A[1, 1])), np.sqrt(abs(A[0, 1] * A[1, 0]))
    truth = (alpha + beta) / abs(alpha - beta) if A.prod() > 0 else 1.0
    check(optimal_diagonal_scaling(A, side="both"), A, truth)


def test_published_distillation_column():
    """γ* = 138.268: Skogestad and Postlethwaite, Multivariable Feedback Control (2nd ed., 2005), section 3.4."""
    A = np.array([[87.8, -86.4], [108.2, -109.6]])
    assert kappa(A) == pytest.approx(141.7, abs=0.05)
    best = optimal_diagonal_scaling(A, side="both")
    assert best.kappa == pytest.approx(138.268, abs=5e-4)
    assert best.lower == pytest.approx(138.268, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_jacobi_is_best_for_a_tridiagonal_matrix(seed):
    """Forsythe and Straus, Proc. AMS 6 (1955): with property A, DHD with unit diagonal has the smallest κ."""
    rng = np.random.default_rng(seed)
    n = 12
    F = np.diag(rng.uniform(0.5, 2, n)) + np.diag(rng.standard_normal(n - 1), 1)
    H = F.T @ F
    d = 1 / np.sqrt(H.diagonal())
    truth = np.sqrt(np.linalg.cond(d[:, None] * H * d))
    check(optimal_diagonal_scaling(F, side="column"), F, truth)


@pytest.mark.share(6)
@pytest.mark.parametrize("side", ["row", "column", "both"])
@pytest.mark.parametrize("shape", [(3, 3), (4, 6)])
def test_brute_force(shape, side):
    rng = np.random.default_rng(sum(shape))
    A = rng.standard_normal(shape)
    m, n = shape
    size = {"row": m, "column": n, "both": m + n}[side]

    def objective(t):
        rows = t[:m] if side != "column" else np.zeros(m)
        columns = t if side == "column" else t[m:] if side == "both" else np.zeros(n)
        return np.log(kappa(np.exp(rows)[:, None] * A * np.exp(columns)))

    found = np.inf
    for _ in range(6):
        t = rng.standard_normal(size)
        for _ in range(4):
            done = minimize(objective, t, method="Nelder-Mead", options={"maxfev": 2500, "xatol": 1e-9, "fatol": 1e-12})
            t = done.x
        found = min(found, float(np.exp(done.fun)))
    best = optimal_diagonal_scaling(A, side=side)
    assert best.lower <= found
    # no search of this kind does better, and in these few dimensions it does as well
    assert best.kappa <= found * (1 + 2e-6)
    assert best.kappa >= found * (1 - 3e-2)


def clarabel_optimum(A):
    """Maximal λ with λI ≼ AᵀWA ≼ I for A of full column rank; κ = λ^−½."""
    m, r = A.shape
    i, j = np.tril_indices(r)
    i, j = j, i  # upper triangle, column by column
    weight = np.where(i == j, 1.0, np.sqrt(2))
    products = (A[:, i] * A[:, j] * weight).T
    identity = np.where(i == j, 1.0, 0.0)
    zeros = np.zeros(len(i))
    constraints = np.vstack(
        [
            np.hstack([-np.eye(m), np.zeros((m, 1))]),
            np.hstack([-products, identity[:, None]]),
            np.hstack([products, zeros[:, None]]),
        ]
    )
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix((m + 1, m + 1)),
        np.r_[np.zeros(m), -1.0],
        sparse.csc_matrix(constraints),
        np.r_[np.zeros(m), zeros, identity],
        [clarabel.NonnegativeConeT(m), clarabel.PSDTriangleConeT(r), clarabel.PSDTriangleConeT(r)],
        settings,
    )
    return 1 / np.sqrt(solver.solve().x[-1])


@pytest.mark.parametrize("shape", [(6, 6), (15, 6), (40, 8)])
@pytest.mark.parametrize("kind", ["Gaussian", "integer", "graded"])
def test_a_semidefinite_solver_agrees(shape, kind):
    rng = np.random.default_rng(3)
    A = rng.standard_normal(shape)
    if kind == "integer":
        A = np.round(3 * A) + 4 * np.eye(*shape)
    if kind == "graded":
        A = A * np.logspace(0, -1, shape[1])
    best = optimal_diagonal_scaling(A)
    A = A / np.linalg.norm(A, axis=1)[:, None]
    # its tolerances are absolute ones of λ = 1/κ²
    assert best.kappa == pytest.approx(clarabel_optimum(A), rel=1e-4 + 1e-8 * best.kappa**2)

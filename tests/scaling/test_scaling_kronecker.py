"""The optimal Kronecker preconditioner: known optima, other searches, and the bound against random pairs."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import hesscond
from hesscond.errors import ConfigError, MatrixError
from hesscond.scaling import optimal_kronecker_scaling
from hesscond.scaling.kronecker import Spectrum, lower_bound, multiplied


def ill(rows, m, n, seed):
    """A random factor whose units and features have scales of their own."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((rows, m, n)) * np.logspace(0, 3, n) * np.logspace(0, 2, m)[:, None]
    return A.reshape(rows, -1)


def kappa(A, L, R):
    s = np.linalg.svd(A @ np.kron(L, R), compute_uv=False)
    return s[0] / s[-1]


def test_a_kronecker_product_is_made_the_identity():
    rng = np.random.default_rng(0)
    A = np.kron(rng.standard_normal((4, 3)), rng.standard_normal((6, 5)) * np.logspace(0, 4, 5))
    best = optimal_kronecker_scaling(A, (3, 5))
    assert best.kappa_given > 1e3
    assert best.kappa == pytest.approx(1, abs=1e-6)
    assert best.lower <= best.kappa <= best.upper


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(3))
def test_the_gap_is_closed_and_the_pair_is_what_it_says(seed):
    A = ill(60, 4, 5, seed)
    best = optimal_kronecker_scaling(A, (4, 5), rtol=1e-3)
    assert best.resolved
    assert best.gap < 1.005
    assert best.lower <= best.upper
    assert kappa(A, best.left, best.right) == pytest.approx(best.kappa, rel=1e-9)
    assert np.linalg.norm(
        multiplied(A / 2.0 ** np.frexp(np.abs(A).max())[1], best.left, best.right), 2
    ) == pytest.approx(1)


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", range(2))
def test_no_other_search_gets_below_the_bound_and_one_arrives_at_it(seed):
    A = ill(12, 2, 2, seed)
    best = optimal_kronecker_scaling(A, (2, 2), rtol=1e-4)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(4):
        # lower triangular with a positive diagonal: every positive definite LLᵀ once, and the scale of R is free
        def objective(x):
            L, R = np.array([[1, 0], [x[0], math.exp(x[1])]]), np.array([[1, 0], [x[2], math.exp(x[3])]])
            return math.log(kappa(A, L, R))

        x = rng.standard_normal(4) * 3
        for _ in range(4):
            x = minimize(
                objective, x, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-10, "fatol": 1e-12}
            ).x
        found.append(math.exp(objective(x)))
    assert min(found) >= best.lower * (1 - 1e-9)
    assert min(found) == pytest.approx(best.kappa, rel=1e-3)


def test_the_bound_holds_for_random_pairs_wherever_it_is_taken():
    """Also far from the optimum, where the partial traces differ and are mended."""
    rng = np.random.default_rng(5)
    m, n, above = 3, 4, []
    for trial in range(10):
        K = ill(20, m, n, 100 + trial) @ np.kron(rng.standard_normal((m, m)), rng.standard_normal((n, n)))
        if trial % 2:
            best = optimal_kronecker_scaling(K, (m, n), rtol=0.3)
            K = K @ np.kron(best.left, best.right)
        _, s, Vh = np.linalg.svd(K, full_matrices=False)
        found, power = Spectrum(s, Vh), int(rng.choice([1, 4, 30]))
        bound = lower_bound(found, (m, n), power)
        above.append(bound > 1.01)
        assert bound <= s[0] / s[-1] * (1 + 1e-9)
        for _ in range(10):
            size = rng.choice([0.1, 1.0, 3.0])
            L, R = np.eye(m) + size * rng.standard_normal((m, m)), np.eye(n) + size * rng.standard_normal((n, n))
            assert kappa(K, L, R) >= bound * (1 - 1e-7)
    assert sum(above) >= 3


def test_a_pair_put_in_front_changes_nothing():
    A, rng = ill(40, 3, 4, 1), np.random.default_rng(1)
    best = optimal_kronecker_scaling(A, (3, 4), rtol=1e-3)
    moved = multiplied(A, rng.standard_normal((3, 3)), rng.standard_normal((4, 4)))
    other = optimal_kronecker_scaling(moved, (3, 4), rtol=1e-3)
    assert max(best.lower, other.lower) <= min(best.upper, other.upper)


def test_it_is_no_worse_than_the_optimal_diagonal_of_kronecker_form():
    A = ill(40, 1, 6, 2)
    # one unit: any R makes the identity, a diagonal does not
    assert optimal_kronecker_scaling(A, (1, 6)).kappa == pytest.approx(1, abs=1e-6)
    assert hesscond.optimal_diagonal_scaling(A, side="column").lower > 1.1


def test_null_vectors_that_all_rows_share_are_taken_out():
    rng = np.random.default_rng(3)
    rows = np.einsum("rij,ik->rkj", rng.standard_normal((80, 4, 5)), np.eye(4) - 0.25)
    rows[:, :, 2] = 0
    A = rows.reshape(80, -1)
    error = 64 * np.finfo(float).eps * np.linalg.norm(A, axis=0)
    best = optimal_kronecker_scaling(A, (4, 5), error=error, rank_bound=lambda: 12)
    assert best.rank == 12
    assert best.resolved
    assert best.lower > 1
    assert best.gap < 1.02
    assert np.linalg.cond(best.left) < 1e6
    assert np.linalg.cond(best.right) < 1e6
    s = np.linalg.svd(A @ np.kron(best.left, best.right), compute_uv=False)
    assert s[0] / s[11] == pytest.approx(best.kappa, rel=1e-6)


def test_where_nothing_is_proved_the_bound_says_nothing():
    A = np.random.default_rng(4).standard_normal((7, 12))
    best = optimal_kronecker_scaling(A, (3, 4))
    assert (best.rank, best.lower, best.solver) == (7, 1.0, "local search")
    assert best.kappa <= best.kappa_given
    assert "times the optimum" in str(best)


def test_large_numbers_and_small_ones():
    A = ill(40, 3, 4, 6)
    found = [optimal_kronecker_scaling(A * scale, (3, 4)).kappa for scale in (1, 2.0**400, 2.0**-400)]
    assert found[0] == found[1] == found[2]
    assert optimal_kronecker_scaling(torch.from_numpy(A), (3, 4)).kappa == found[0]


@pytest.mark.parametrize(
    ("A", "shape", "rtol", "error", "words"),
    [
        (np.ones((3, 6)), (2, 4), 1e-2, ConfigError, "6 columns, not 2 × 4"),
        (np.ones((3, 6)), (0, 4), 1e-2, ConfigError, "does not fit"),
        (np.eye(4), (2, 2), 2.0, ConfigError, "rtol"),
        (np.zeros((3, 6)), (2, 3), 1e-2, MatrixError, "zero"),
        (np.full((3, 6), np.nan), (2, 3), 1e-2, MatrixError, "NaN|finite"),
    ],
)
def test_wrong_arguments_are_one_sentence(A, shape, rtol, error, words):
    with pytest.raises(error, match=words):
        optimal_kronecker_scaling(A, shape, rtol=rtol)

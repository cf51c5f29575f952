"""What must not change the optimum."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hesscond import optimal_diagonal_scaling

SIZES = st.tuples(st.integers(2, 5), st.integers(2, 5), st.integers(0, 10**6))


def overlap(first, second, slack=1e-9):
    """Both enclose the same infimum."""
    assert first.lower <= second.upper * (1 + slack)
    assert second.lower <= first.upper * (1 + slack)
    assert first.kappa == pytest.approx(second.kappa, rel=1e-5)


@settings(max_examples=6, deadline=None)
@given(SIZES, st.sampled_from(["row", "column", "both"]), st.floats(0, 25))
def test_scaling_in_advance_changes_nothing(size, side, decades):
    m, n, seed = size
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((m, n))
    rows = 10.0 ** rng.uniform(-decades, decades, (m, 1)) * rng.choice([-1, 1], (m, 1))
    columns = 10.0 ** rng.uniform(-decades, decades, n)
    other = {"row": rows * A, "column": A * columns, "both": rows * A * columns}[side]
    overlap(optimal_diagonal_scaling(A, side=side), optimal_diagonal_scaling(other, side=side))


@settings(max_examples=4, deadline=None)
@given(SIZES)
def test_rotations_and_permutations_change_nothing(size):
    m, n, seed = size
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((m, n))
    best = optimal_diagonal_scaling(A)
    Q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    overlap(best, optimal_diagonal_scaling(A @ Q))
    overlap(best, optimal_diagonal_scaling(A[rng.permutation(m)][:, rng.permutation(n)]))
    overlap(best, optimal_diagonal_scaling(A.T, side="column"))
    both = optimal_diagonal_scaling(A, side="both")
    assert [list(d) for d in both.scaling] == [list(both.row), list(both.column)]
    overlap(both, optimal_diagonal_scaling(A.T, side="both"))
    assert both.lower <= best.kappa

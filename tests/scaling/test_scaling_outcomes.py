"""Inputs of every kind: what is refused, what is left alone, what could not be resolved, and how large it may be."""

import numpy as np
import pytest
import torch
from scipy import sparse

from hesscond import optimal_diagonal_scaling
from hesscond.errors import ConfigError, MatrixError
from hesscond.scaling import central_path


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("A", "words"),
    [
        (np.zeros((2, 3)), "zero"),
        (np.ones(3), "two dimensions"),
        (np.zeros((0, 2)), "non-empty"),
        ([[np.nan, 1.0]], "NaN"),
        ([[np.inf, 1.0]], "NaN or infinite"),
        ([[1j, 2]], "complex"),
        (torch.ones(2, 2, dtype=torch.complex64), "complex"),
        ("matrix", "real numbers"),
        ([[1e300, 1e-300], [1e-300, 1e300]], "range of double precision"),
    ],
)
def test_refused(A, words):
    with pytest.raises(MatrixError, match=words):
        optimal_diagonal_scaling(A)


def test_no_such_side_or_tolerance():
    with pytest.raises(ConfigError, match="'rows'"):
        optimal_diagonal_scaling(np.eye(2), side="rows")
    with pytest.raises(ConfigError, match="rtol"):
        optimal_diagonal_scaling(np.eye(2), rtol=0)


@pytest.mark.parametrize("side", ["row", "column", "both"])
def test_every_kind_of_array_gives_the_same(side):
    A = rng().integers(-9, 10, (4, 4))
    expected = optimal_diagonal_scaling(A, side=side)
    tensor = torch.tensor(A)
    for same in (A.tolist(), tensor.to(torch.bfloat16), tensor.float().requires_grad_(), sparse.csr_array(A * 1.0)):
        best = optimal_diagonal_scaling(same, side=side)
        assert best.kappa == expected.kappa
        assert np.array_equal(best.row, expected.row)
        assert np.array_equal(best.column, expected.column)


def test_what_is_returned():
    A = rng().standard_normal((5, 4))
    row = optimal_diagonal_scaling(A)
    assert row.side == "row"
    assert row.row.shape == (5,)
    assert np.array_equal(row.column, np.ones(4))
    column = optimal_diagonal_scaling(A, side="column")
    assert np.array_equal(column.row, np.ones(5))
    both = optimal_diagonal_scaling(A, side="both")
    assert (len(both.row), len(both.column)) == (5, 4)
    assert both.kappa < min(row.kappa, column.kappa) < row.kappa_given
    assert row.kappa_given == pytest.approx(np.linalg.cond(A))
    for best in (row, column, both):
        assert (best.row > 0).all()
        assert (best.column > 0).all()
        assert np.linalg.norm(best.row[:, None] * A * best.column, 2) == pytest.approx(1)
        assert best.gap == best.upper / best.lower
        assert "optimal to" in str(best)
        Y = best.certificate.Y_factor @ best.certificate.Y_factor.T
        assert np.linalg.eigvalsh(Y).min() > -1e-9 * np.abs(Y).max()
        assert best.certificate.lower == best.lower


def test_lines_of_zeros_are_left_alone():
    A = rng().standard_normal((4, 3))
    wide = np.zeros((6, 5))
    wide[np.ix_([0, 2, 3, 5], [0, 1, 4])] = A
    for side in ("row", "column", "both"):
        inner, best = optimal_diagonal_scaling(A, side=side), optimal_diagonal_scaling(wide, side=side)
        assert best.kappa == inner.kappa
        assert np.array_equal(best.row, [inner.row[0], 1, inner.row[1], inner.row[2], 1, inner.row[3]])
        assert np.array_equal(best.column, [inner.column[0], inner.column[1], 1, 1, inner.column[2]])


@pytest.mark.parametrize("side", ["row", "column", "both"])
def test_perfect_matrices(side):
    """κ = 1 can be reached, or is already."""
    for A in (np.eye(4), np.diag([1e-150, 1, 1e150]), np.outer([1, -2, 3], [1e-9, 1]), np.ones((1, 5)), [[-3.0]]):
        best = optimal_diagonal_scaling(A, side=side)
        assert best.lower == 1
        assert best.kappa == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("n", [2, 5, 20])
def test_an_infimum_that_is_not_attained(n):
    """A triangular matrix comes as close to a diagonal one as one likes, with scalings that grow without bound."""
    A = np.triu(rng().standard_normal((n, n)))[rng(1).permutation(n)][:, rng(2).permutation(n)]
    best = optimal_diagonal_scaling(A, side="both")
    assert best.lower == 1
    assert 1 <= best.kappa < 1 + 1e-5
    assert best.row.max() / best.row.min() > 1e3


def test_block_triangular_matrices_are_as_good_as_their_worst_block():
    A = np.triu(np.ones((12, 12)))
    blocks = [rng(seed).standard_normal((4, 4)) for seed in range(3)]
    for i, block in enumerate(blocks):
        A[4 * i : 4 * i + 4, 4 * i : 4 * i + 4] = block
    worst = max(optimal_diagonal_scaling(block, side="both").kappa for block in blocks)
    best = optimal_diagonal_scaling(A[::-1], side="both")
    assert best.kappa == pytest.approx(worst, rel=1e-5)
    assert best.gap < 1 + 1e-5


def test_rank_deficient():
    A = rng(4).integers(-3, 4, (8, 3)) @ rng(5).integers(-3, 4, (3, 6))
    for side in ("row", "column"):
        best = optimal_diagonal_scaling(A, side=side)
        assert (best.rank, best.resolved) == (3, True)
        assert best.gap < 1 + 1e-5
    both = optimal_diagonal_scaling(A, side="both")
    assert both.lower == 1
    assert both.certificate is None
    assert both.kappa <= best.kappa * (1 + 1e-5)
    assert both.solver == "local search"


def test_an_unresolved_rank_is_said():
    U, V = (np.linalg.qr(rng(seed).standard_normal((8, 8)))[0] for seed in (0, 1))
    A = U * np.logspace(0, -17, 8) @ V
    for side in ("row", "column", "both"):
        best = optimal_diagonal_scaling(A, side=side)
        assert not best.resolved
        assert best.kappa == best.upper == best.gap == np.inf
        assert best.lower >= (1e8 if side != "both" else 1)
        assert "unresolved" in str(best)


@pytest.mark.parametrize("side", ["row", "both"])
def test_many_rows(side, monkeypatch):
    A = rng(3).standard_normal((400, 4)) * 10.0 ** rng(4).uniform(-2, 2, (400, 1))
    direct = optimal_diagonal_scaling(A, side=side)
    monkeypatch.setattr(central_path, "DIRECT", 20)
    best = optimal_diagonal_scaling(A, side=side)
    assert best.kappa == pytest.approx(direct.kappa, rel=1e-5)
    assert best.gap < 1 + 1e-5
    assert (best.row > 0).all()


def test_a_hundred_thousand_rows():
    A = rng(3).standard_normal((100_000, 3)) @ np.diag([1, 0.1, 0.01])
    best = optimal_diagonal_scaling(A)
    assert best.gap < 1 + 1e-5


def test_the_tolerance_is_used():
    A = rng(6).standard_normal((30, 30))
    loose, tight = (optimal_diagonal_scaling(A, rtol=rtol) for rtol in (1e-2, 1e-9))
    assert loose.iterations < tight.iterations
    assert 1 + 1e-9 < loose.gap < 1.0101
    assert tight.gap < 1 + 1e-7

"""Positive diagonal scalings with the smallest condition number: reduction of the problem, search, proved bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import scipy  # its optimizer is imported when it is called
import torch
from scipy.linalg import lapack
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators.threads import one_thread
from hesscond.scaling import central_path
from hesscond.spectra import matrices
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.forms import FactorForm

EPS = float(np.finfo(float).eps)

#: Largest error of products and squares by underflow, if the largest entry of the product AF is near 1.
TINY = 1e-150

#: Products in extended precision are used up to this many multiplications (a second or so).
EXTENDED_LIMIT = 10**8


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """Pair of positive semidefinite matrices that bounds κ⁺ of every scaled matrix from below.

    With Y = FFᵀ, Z = GGᵀ and a_i the rows of A (its columns if ``transposed``), a_iᵀYa_i ≤ a_iᵀZa_i for every i. Then
    κ⁺(DA)² ≥ tr PYP / tr Z, P the projection on the span of the a_i; and, where they span everything,
    κ(D₁AD₂)² ≥ min_j Y_jj / Z_jj (docs/concepts/bounds.md).

    Attributes
    ----------
    Y_factor, Z_factor : (n, k) arrays
        F and G, as exact numbers; row j belongs to column j of A (row j if ``transposed``).
    transposed
        Whether the bound is derived for Aᵀ.
    lower
        Bound of κ⁺ that follows, reduced by the rounding of its evaluation.
    """

    Y_factor: np.ndarray
    Z_factor: np.ndarray
    transposed: bool
    lower: float


def certify_trace(
    A: np.ndarray, Y_factor: np.ndarray, Z_factor: np.ndarray, combination: np.ndarray | None
) -> Certificate:
    """Make a pair feasible and bound κ⁺(DA) for all D, with A (m, n) without rows of zeros and entries of at most 1."""
    F, G = feasible(A, Y_factor, Z_factor)
    outside = 0.0
    if combination is not None:
        # the combination of the rescaled factor: F and Y_factor differ by one number and by rounding
        C = combination * (np.linalg.norm(F) / np.linalg.norm(Y_factor))
        image, error = product(A.T, C, extended(A, F))
        outside = float(np.linalg.norm(np.abs(image - F) + error + EPS * (np.abs(F) + np.abs(image))))
    slack = (F.size + 16) * EPS
    top = float(np.linalg.norm(F)) * (1 - slack) - outside * (1 + slack)
    return Certificate(F, G, False, max(1.0, top / (float(np.linalg.norm(G)) * (1 + slack)) * (1 - 4 * EPS)))


def certify_ratio(A: np.ndarray, Y_factor: np.ndarray, Z_factor: np.ndarray) -> Certificate:
    """Make a pair feasible and bound κ(D₁AD₂) for all D₁, D₂; A as in `certify_trace`, of rank n."""
    F, G = feasible(A, Y_factor, Z_factor)
    slack = (F.shape[1] + 16) * EPS
    ratios = np.linalg.norm(F, axis=1) * (1 - slack) / (np.linalg.norm(G, axis=1) * (1 + slack))
    return Certificate(F, G, False, max(1.0, float(ratios.min()) * (1 - 4 * EPS)))


def feasible(A: np.ndarray, F: np.ndarray, G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multiples of F and G with ‖a_iᵀF‖ ≤ ‖a_iᵀG‖ for every row a_i of A, proved with the bounds of `row_norms`."""
    F, G = normalized(A, F), normalized(A, G)
    kind: type[np.floating] = np.float64
    low, high = row_norms(A, F, kind)
    if (high > low * (1 + 1e-8)).any():
        kind = extended(A, F)
        high = row_norms(A, F, kind)[1]
    allowed = row_norms(A, G, kind)[0]
    factor = float((allowed / high).min())
    if not factor > 0:
        return np.zeros_like(F), G
    for slack in (1e-15, 1e-14, 1e-13, 1e-12, 1e-10, 1e-8, 1e-6):
        # the rescaled factor is rounded, and that may count: it is the one that is checked
        scaled = F * (factor * (1 - slack))
        if (row_norms(A, scaled, kind)[1] <= allowed).all():
            return scaled, G
    return np.zeros_like(F), G


def normalized(A: np.ndarray, F: np.ndarray) -> np.ndarray:
    """Product of F and a power of two such that the largest entry of AF is near 1 and no square underflows."""
    largest = float(np.abs(A @ F).max())
    if not (np.isfinite(largest) and largest > 0):
        return np.zeros_like(F)
    return np.ldexp(F, -int(np.frexp(largest)[1]))


def row_norms(A: np.ndarray, F: np.ndarray, kind: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the 2-norms of the rows of AF, computed in the precision ``kind``."""
    image, error = product(A, F, kind)
    slack = (F.shape[1] + 16) * EPS
    norm, off = np.linalg.norm(image, axis=1), np.linalg.norm(error, axis=1)
    return norm * (1 - slack) - off * (1 + slack) - TINY, (norm + off) * (1 + slack) + TINY


def extended(A: np.ndarray, F: np.ndarray) -> type[np.floating]:
    """Most precise type of number in which AF takes about a second at most."""
    return np.longdouble if A.size * F.shape[1] <= EXTENDED_LIMIT else np.float64


def product(A: np.ndarray, F: np.ndarray, kind: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    """Product AF and an entrywise bound of its error, γ_n |A||F| for any order of summation.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2nd ed., 2002), section 3.5.
    """
    n = A.shape[1]
    unit = max(float(np.finfo(kind).eps), 2.0**-100)
    gamma = (n + 2) * unit / (1 - (n + 2) * unit)
    image = np.asarray(A.astype(kind) @ F.astype(kind), dtype=float)
    bound = gamma * (np.abs(A) @ np.abs(F)) * (1 + 2 * (n + 4) * EPS)
    if kind is not np.float64:
        bound = bound + EPS * np.abs(image)
    return image, bound


#: Sweeps over rows and columns; each about halves the decades still to go.
SWEEPS = 12


def powers(A: np.ndarray, *, columns: bool) -> tuple[np.ndarray, np.ndarray]:
    """Exponents p (m,), q (n,) with which the largest entries of the rows (and columns) of 2^p A 2^q are near 1."""
    # logarithms: the entries themselves could overflow on the way
    with np.errstate(divide="ignore"):
        size = np.log2(np.abs(A))
    p, q = np.zeros(len(A)), np.zeros(A.shape[1])
    for _ in range(SWEEPS if columns else 0):
        p = p - (size + p[:, None] + q).max(1) / 2
        q = q - (size + p[:, None] + q).max(0) / 2
    q = np.rint(q)
    with np.errstate(over="ignore", under="ignore"):
        exponents = np.frexp(A)[1] + q.astype(int)
    p = -np.where(A == 0, np.iinfo(int).min, exponents).max(1)
    return p.astype(int), q.astype(int)


def rescaled(A: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Exact product 2^p A 2^q."""
    shift = p[:, None] + q
    scaled = np.ldexp(A, shift)
    if not np.array_equal(np.ldexp(scaled, -shift), A):
        raise MatrixError(
            "the entries of a row span more than the range of double precision: no scaling of the rows brings them "
            "together; set the smallest to zero or rescale the columns"
        )
    return scaled


def diagonal_blocks(A: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[int]]:
    """Blocks (rows, columns) of the finest block triangular form of a nonsingular matrix, and a height for each.

    Entries outside the blocks couple the rows of a block only with the columns of lower ones. The blocks are the strong
    components of the columns once a matching has put nonzero entries on the diagonal (Dulmage and Mendelsohn).
    """
    matched = maximum_bipartite_matching(csr_array(A != 0), perm_type="row")
    number, label = connected_components(csr_array(A[matched] != 0), connection="strong")
    edges = np.zeros((number, number), bool)
    i, j = np.nonzero(A[matched])
    edges[label[i], label[j]] = True
    np.fill_diagonal(edges, False)
    height = np.zeros(number, int)
    for _ in range(number):
        higher = np.where(edges, height + 1, 0).max(1)
        if (higher == height).all():
            break
        height = higher
    columns = [np.flatnonzero(label == block) for block in range(number)]
    return [(matched[block], block) for block in columns], [int(h) for h in height]


def thin_factor(A: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors L (m, r) and Q (n, r) with A ≈ LQᵀ and QᵀQ = I, for a matrix of rank r.

    QR of Aᵀ with its rows sorted by size and its columns pivoted, which keeps small columns of A accurate (Cox and
    Higham, in Numerical Analysis 1997, Longman, 57-73).
    """
    m, n = A.shape
    order = np.argsort(-np.abs(A).max(0), kind="stable")
    packed, pivots, tau, _, _ = lapack.dgeqp3(np.asfortranarray(A[:, order].T))
    R = np.triu(packed[:rank])
    L = np.empty((m, rank))
    L[pivots - 1] = R.T
    k = min(m, n)
    thin, _, _ = lapack.dorgqr(np.asfortranarray(packed[:, :k]), tau[:k])
    Q = np.empty((n, rank))
    Q[order] = thin[:, :rank]
    return L, Q


#: Binary orders of magnitude between successive diagonal blocks of a reducible matrix, and in all.
APART, RANGE = 30, 800

Side = Literal["row", "column", "both"]

#: Exponents of the smooth objective of a local search, one after the other.
POWERS = (8, 64, 512, 4096, 32768)


@dataclass(frozen=True, slots=True, eq=False)
class OptimalScaling:
    """Positive diagonal scaling whose κ⁺ is near the infimum over all of them, and bounds of that infimum.

    The infimum need not be attained: with more rows than columns some weights may have to tend to zero. The scaling
    here is always positive, and ``kappa`` is its κ⁺.

    Attributes
    ----------
    side
        Side that was scaled: ``"row"`` (DA), ``"column"`` (AD) or ``"both"`` (D₁AD₂).
    row, column : (m,), (n,) arrays
        Diagonals such that the scaled matrix has norm 1; ones on a side that is not scaled and for rows and columns of
        zeros.
    kappa
        κ⁺ = σ_max / smallest nonzero σ of the scaled matrix; ``inf`` if its rank is unresolved.
    upper
        Certified upper bound of ``kappa``, and so of the infimum.
    lower
        Certified lower bound of κ⁺ over all positive diagonal scalings of that side.
    kappa_given
        κ⁺ of the matrix as it was given; ``inf`` if unresolved.
    rank
        Rank of the matrix; no scaling changes it.
    resolved
        Whether that rank was decided.
    iterations
        Number of Newton steps, or of steps of the local search.
    solver
        Method by which the scaling and the lower bound were found.
    certificate
        Proof of ``lower``; None if that is 1, follows from Van der Sluis' theorem, or is that of a diagonal block
        of a block triangular matrix (both sides).
    """

    side: Side
    row: np.ndarray
    column: np.ndarray
    kappa: float
    upper: float
    lower: float
    kappa_given: float
    rank: int
    resolved: bool
    iterations: int
    solver: str
    certificate: Certificate | None

    @property
    def scaling(self) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Diagonal (m,) or (n,) of the side that was scaled, or (row, column) if both were."""
        if self.side == "both":
            return self.row, self.column
        return self.row if self.side == "row" else self.column

    @property
    def gap(self) -> float:
        """Ratio ``upper / lower`` ≥ 1: κ⁺ of the scaling is at most this many times the infimum."""
        return self.upper / self.lower

    def __str__(self) -> str:
        scaled = {"row": "DA", "column": "AD", "both": "D₁AD₂"}[self.side]
        if not self.resolved:
            return f"κ({scaled}) ≥ {self.lower:.6g} for every scaling (rank unresolved, {self.rank} or more)"
        excess = self.gap - 1
        proved = f"optimal to {excess:.1e}" if excess < 0.1 else f"at most {self.gap:.3g} times the optimum"
        before = f"{self.kappa_given:.6g}" if math.isfinite(self.kappa_given) else "unresolved"
        return f"κ({scaled}) = {self.kappa:.6g} ({proved}; unscaled {before}; rank {self.rank}; {self.solver})"


class Scaled(NamedTuple):
    """Scalings of a core's rows and columns, a lower bound, its certificate, Newton steps and the solver."""

    rows: np.ndarray
    columns: np.ndarray
    lower: float
    certified: Certificate | None
    steps: int
    solver: str


class ScalingProblem(NamedTuple):
    """Scaling problem after all reductions that change no optimum: scale the rows of B.

    ``core`` is the matrix without zero rows and columns, transposed if its columns are scaled or if it is wide and both
    sides are; B = 2^p core 2^q.
    """

    B: np.ndarray
    core: np.ndarray
    p: np.ndarray
    q: np.ndarray
    transposed: bool
    both: bool  # whether the columns are scaled too
    rows: np.ndarray  # mask of the nonzero rows of the matrix
    columns: np.ndarray  # mask of its nonzero columns

    @classmethod
    def of(cls, given: np.ndarray, side: Side) -> ScalingProblem:
        """Problem of a matrix that is not zero."""
        nonzero, both = given != 0, side == "both"
        rows, columns = nonzero.any(1), nonzero.any(0)
        core = given[np.ix_(rows, columns)]
        transposed = side == "column" or (both and core.shape[0] < core.shape[1])
        if transposed:
            core = core.T
        p, q = powers(core, columns=both)
        return cls(rescaled(core, p, q), core, p, q, transposed, both, rows, columns)

    def diagonals(self, solution: Scaled, norm: float) -> tuple[np.ndarray, np.ndarray]:
        """Scalings of the rows and the columns of the original matrix, such that the result has norm 1."""
        rows, columns = np.ldexp(solution.rows / (math.sqrt(norm) if self.both else norm), self.p), solution.columns
        if self.both:
            columns = np.ldexp(columns / math.sqrt(norm), self.q)
        for scaling in (rows, columns):
            if not (np.isfinite(scaling).all() and (scaling >= np.finfo(float).tiny).all()):
                raise MatrixError("the optimal scaling leaves the range of double precision: rescale the matrix")
        if self.transposed:
            rows, columns = columns, rows
        return widened(rows, self.rows, 1.0), widened(columns, self.columns, 1.0)

    def certificate(self, solution: Scaled) -> Certificate | None:
        """Certificate of the lower bound for the original matrix; None: nothing is certified."""
        if solution.certified is None:
            return None
        kept = self.rows if self.transposed else self.columns
        Y, Z = (
            widened(np.ldexp(factor, self.q[:, None]), kept)
            for factor in (solution.certified.Y_factor, solution.certified.Z_factor)
        )
        return Certificate(Y, Z, self.transposed, solution.certified.lower)


def optimal_diagonal_scaling(A: object, side: Side = "row", *, rtol: float = 1e-6) -> OptimalScaling:
    """Positive diagonal scaling with the smallest condition number, and a certified bound of the infimum.

    κ⁺ = σ_max / smallest nonzero σ of DA (``side="row"``), AD (``"column"``) or D₁AD₂ (``"both"``) is minimized. For κ
    of a symmetric positive definite H = FᵀF under H → DHD scale the columns of F: κ(DHD) = κ⁺(FD)².

    One side, any rank: a semidefinite program. Both sides, full rank (of rows or columns): quasiconvex (Braatz and
    Morari, SIAM J. Control Optim. 32 (1994), 1763-1768). Both are solved to the global optimum by `central_path`, and
    the bound is proved from the solver's dual pair, however inexact it is: see `Certificate`. Both sides of a rank
    deficient matrix: a local search, and ``lower`` is 1.

    Parameters
    ----------
    A : (m, n) array, tensor or scipy sparse matrix
        Computed in float64 on the host. Rows and columns of zeros are left alone.
    side
        Side or sides to scale.
    rtol
        Gap at which the search ends.

    Raises
    ------
    ConfigError
        No such side; ``rtol`` not between 1e-12 and 1.
    MatrixError
        Not a finite, non-empty real matrix; zero; entries too far apart for any scaling in double precision.

    Examples
    --------
    A distillation column (Skogestad and Postlethwaite, Multivariable Feedback Control, section 3.4):

    >>> import numpy as np
    >>> best = optimal_diagonal_scaling(np.array([[87.8, -86.4], [108.2, -109.6]]), side="both")
    >>> print(f"{best.kappa_given:.1f} to {best.kappa:.3f}, optimal to 1e-6: {best.gap < 1.000001}")
    141.7 to 138.268, optimal to 1e-6: True
    >>> best.lower <= best.kappa <= best.upper
    True
    """
    if side not in get_args(Side):
        raise ConfigError(f"side must be 'row', 'column' or 'both', got {side!r}")
    if not 1e-12 <= rtol < 1:
        raise ConfigError(f"rtol must lie between 1e-12 and 1, got {rtol!r}")
    problem = ScalingProblem.of(nonzero(A), side)
    with one_thread():
        condition = FactorForm(problem.B).condition()
        solution = searched(problem.B, side, condition, rtol)
        result = solution.rows[:, None] * problem.B * solution.columns
        norm = float(np.linalg.norm(result, 2))
        result = result / norm
        # ten roundings at most between the scaling that is returned and this product
        bound = (lambda: condition.rank) if condition.resolved else None
        after = FactorForm(result, error=10 * EPS * np.abs(result), rank_bound=bound).condition()
        before = FactorForm(problem.core).condition()
    row, column = problem.diagonals(solution, norm)
    resolved = condition.resolved and after.resolved
    return OptimalScaling(
        side=side,
        row=row,
        column=column,
        kappa=math.sqrt(after.value) if resolved else math.inf,
        upper=math.sqrt(after.upper) if resolved else math.inf,
        lower=solution.lower,
        # another rank: entries were lost to underflow
        kappa_given=math.sqrt(before.value) if before.rank == condition.rank else math.inf,
        rank=condition.rank,
        resolved=resolved,
        iterations=solution.steps,
        solver=solution.solver,
        certificate=problem.certificate(solution),
    )


def searched(B: np.ndarray, side: Side, condition: ConditionNumber, rtol: float) -> Scaled:
    """Scaling of the rows of B, or of rows and columns, by the search that suits its rank."""
    rank = condition.rank
    if rank == 1 and condition.resolved:
        return Scaled(1 / np.linalg.norm(B, axis=1), np.ones(B.shape[1]), 1.0, None, 0, "rank one")
    if side != "both":
        return scaled_rows(B, condition, rtol)
    if rank == B.shape[1]:
        return scaled_both(B, rtol)
    return local_optimum(B, rank)


def nonzero(A: object) -> np.ndarray:
    """Real matrix in float64 on the host, which is not zero."""
    if isinstance(A, torch.Tensor) and not A.is_complex():
        # numpy has no bfloat16
        A = A.detach().to("cpu", torch.float64)
    given = matrices.as_matrix(matrices.dense(A))
    if not given.any():
        raise MatrixError("the matrix is zero: it has no nonzero singular value and so no condition number to improve")
    return given


def widened(values: np.ndarray, kept: np.ndarray, fill: float = 0.0) -> np.ndarray:
    """Values at the rows or columns that were kept, ``fill`` at those of zeros."""
    full = np.full((len(kept), *values.shape[1:]), fill)
    full[kept] = values
    return full


def scaled_rows(B: np.ndarray, condition: ConditionNumber, rtol: float) -> Scaled:
    """Optimum over the rows of a matrix of any rank, and the larger of two lower bounds."""
    n, rank = B.shape[1], condition.rank
    whole = rank == n and condition.rank_decision == "structural"
    L, Q = (B, np.eye(n)) if whole else thin_factor(B, rank)
    ones = np.ones(n)
    optimum = central_path.optimum_of_many(L, both=False, rtol=rtol)
    certified = certify_trace(B, Q @ optimum.Y_factor, Q @ optimum.Z_factor, None if whole else optimum.combination)
    if certified.lower * (1 + 1e-2) < optimum.kappa:
        bound = van_der_sluis_bound(B)
        if bound > certified.lower:
            return Scaled(optimum.rows, ones, bound, None, optimum.steps, "central path; Van der Sluis' bound")
    return Scaled(optimum.rows, ones, certified.lower, certified, optimum.steps, "central path")


def scaled_both(B: np.ndarray, rtol: float) -> Scaled:
    """Optimum over rows and columns of a matrix of full column rank."""
    if len(B) == B.shape[1]:
        blocks, heights = diagonal_blocks(B)
        if len(blocks) > 1:
            return scaled_blocks(B, blocks, heights, rtol)
    optimum = central_path.optimum_of_many(B, both=True, rtol=rtol)
    certified = certify_ratio(B, optimum.Y_factor, optimum.Z_factor)
    return Scaled(optimum.rows, optimum.columns, certified.lower, certified, optimum.steps, "central path")


def scaled_blocks(
    B: np.ndarray, blocks: list[tuple[np.ndarray, np.ndarray]], heights: list[int], rtol: float
) -> Scaled:
    """Optimum for a block triangular form: that of the worst diagonal block, with scalings of different sizes.

    A diagonal block of a scaled matrix and of its inverse are a scaled block and its inverse, so that κ is at least
    that of any block. Entries outside the diagonal blocks can be made arbitrarily small, so that the infimum is not
    attained.
    """
    rows, columns = np.ones(len(B)), np.ones(len(B))
    lower, steps = 1.0, 0
    apart = min(APART, RANGE // max(1, *heights))
    for (i, j), height in zip(blocks, heights, strict=True):
        block = B[np.ix_(i, j)]
        size = float(abs(block[0, 0]))
        if len(i) > 1:
            solution = scaled_both(block, rtol)
            rows[i], columns[j] = solution.rows, solution.columns
            lower, steps = max(lower, solution.lower), steps + solution.steps
            s = np.linalg.svd(solution.rows[:, None] * block * solution.columns, compute_uv=False)
            # all blocks around 1: none then widens the range of the worst
            size = float(np.sqrt(s[0] * s[-1]))
        rows[i] = np.ldexp(rows[i] / size, -apart * height)
        columns[j] = np.ldexp(columns[j], apart * height)
    return Scaled(rows, columns, lower, None, steps, "central path for each diagonal block")


def van_der_sluis_bound(B: np.ndarray) -> float:
    """Lower bound 1/σ_min⁺(EB) ≤ κ⁺(DB) for all D, where E makes all rows of norm 1.

    Source: Van der Sluis, Numerische Mathematik 14 (1969), 14-23.
    """
    EB = B / np.linalg.norm(B, axis=1)[:, None]
    condition = FactorForm(EB, error=4 * EPS * np.abs(EB)).condition()
    # σ_min ≤ σ_max / κ, and both ends are known up to their error bounds
    return max(1.0, math.sqrt(condition.lower) / float(np.linalg.norm(EB, 2)) * (1 - 1e-9))


def local_optimum(B: np.ndarray, rank: int) -> Scaled:
    """Scaling of rows and columns with small κ⁺, by L-BFGS over its logarithms from three starts.

    Schatten norms are minimized, which approach log κ as their exponent grows.
    """
    m, n = B.shape

    def objective(t: np.ndarray, power: int) -> tuple[float, np.ndarray]:
        U, s, Vh = np.linalg.svd(np.exp(t[:m])[:, None] * B * np.exp(t[m:]), full_matrices=False)
        logs = np.log(s[:rank])
        up, down = power * (logs - logs[0]), power * (logs[-1] - logs)
        alpha, beta = np.exp(up), np.exp(down)
        value = logs[0] - logs[-1] + (np.log(alpha.sum()) + np.log(beta.sum())) / power
        weights = alpha / alpha.sum() - beta / beta.sum()
        return float(value), np.concatenate([U[:, :rank] ** 2 @ weights, weights @ Vh[:rank] ** 2])

    by_row, by_column = (-np.log(np.linalg.norm(B, axis=axis)) for axis in (1, 0))
    least, best, steps = math.inf, np.zeros(m + n), 0
    for t in (best, np.concatenate([by_row, np.zeros(n)]), np.concatenate([np.zeros(m), by_column])):
        for power in POWERS:
            minimum = scipy.optimize.minimize(objective, t, (power,), jac=True, method="L-BFGS-B")
            t, steps = minimum.x, steps + minimum.nit
        if minimum.fun < least:
            least, best = minimum.fun, t
    return Scaled(np.exp(best[:m]), np.exp(best[m:]), 1.0, None, steps, "local search")

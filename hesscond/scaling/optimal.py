"""`optimal_diagonal_scaling`: checks what is given, takes out what does not matter, searches, and proves the bound."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.scaling.alternation import local_optimum
from hesscond.scaling.certify import EPS, Certified, certify_ratio, certify_trace
from hesscond.scaling.reduction import diagonal_blocks, powers, rescaled, thin_factor
from hesscond.scaling.result import Certificate, OptimalScaling, Side
from hesscond.scaling.row_generation import optimum_of_many
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.forms import FactorForm
from hesscond.spectra.matrices import as_matrix, dense
from hesscond.spectra.threads import one_thread

#: Binary orders of magnitude between successive diagonal blocks of a reducible matrix, and in all.
APART, RANGE = 30, 800


class Scaled(NamedTuple):
    """Scalings of a core's rows and columns, a lower bound, its certificate, Newton steps and who did it."""

    rows: np.ndarray
    columns: np.ndarray
    lower: float
    certified: Certified | None
    steps: int
    solver: str


def optimal_diagonal_scaling(A: object, side: Side = "row", *, rtol: float = 1e-6) -> OptimalScaling:
    """The positive diagonal scaling with the smallest condition number, and a certified bound of what is possible.

    κ⁺ = σ_max / smallest nonzero σ of DA (``side="row"``), AD (``"column"``) or D₁AD₂ (``"both"``) is minimized; for
    κ of a symmetric positive definite H = FᵀF under H → DHD scale the columns of F, κ(DHD) = κ⁺(FD)².

    One side, any rank: a semidefinite program. Both sides, full rank (of rows or columns): quasiconvex (Braatz and
    Morari, SIAM J. Control Optim. 32 (1994), 1763-1768). Both are solved to the global optimum by `central_path`, and
    the bound is proved from the solver's dual pair whatever the solver did: see `Certificate`. Both sides of a rank
    deficient matrix: a local search, and ``lower`` is 1.

    Parameters
    ----------
    A : (m, n) array, tensor or scipy sparse matrix
        Computed in float64 on the host. Rows and columns of zeros are left alone.
    side
        What may be scaled.
    rtol
        Gap at which the search ends.

    Returns
    -------
    OptimalScaling

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
    given = as_matrix(dense(on_host(A)))
    nonzero = given != 0
    keep_rows, keep_columns = nonzero.any(1), nonzero.any(0)
    if not keep_rows.any():
        raise MatrixError("the matrix is zero: it has no nonzero singular value and so no condition number to improve")
    core = given[np.ix_(keep_rows, keep_columns)]
    # what follows scales rows; both sides need full column rank
    transposed = side == "column" or (side == "both" and core.shape[0] < core.shape[1])
    if transposed:
        core = core.T
    p, q = powers(core, columns=side == "both")
    B = rescaled(core, p, q)
    with one_thread():
        condition = FactorForm(B).condition()
        rank = condition.rank
        if rank == 1 and condition.resolved:
            rows, columns = 1 / np.linalg.norm(B, axis=1), np.ones(B.shape[1])
            found = Scaled(rows, columns, 1.0, None, 0, "rank one")
        elif side != "both":
            found = scaled_rows(B, condition, rtol)
        elif rank == B.shape[1]:
            found = scaled_both(B, rtol)
        else:
            rows, columns, steps = local_optimum(B, rank, rtol)
            found = Scaled(rows, columns, 1.0, None, steps, "local search")
        result = found.rows[:, None] * B * found.columns
        norm = float(np.linalg.norm(result, 2))
        result = result / norm
        # ten roundings at most between the scaling that is returned and this product
        bound = (lambda: rank) if condition.resolved else None
        after = FactorForm(result, error=10 * EPS * np.abs(result), rank_bound=bound).condition()
        before = FactorForm(core).condition()
    rows = np.ldexp(found.rows / norm, p) if side != "both" else np.ldexp(found.rows / math.sqrt(norm), p)
    columns = found.columns if side != "both" else np.ldexp(found.columns / math.sqrt(norm), q)
    for scaling in (rows, columns):
        if not (np.isfinite(scaling).all() and (scaling >= np.finfo(float).tiny).all()):
            raise MatrixError("the optimal scaling leaves the range of double precision: rescale the matrix")
    if transposed:
        rows, columns = columns, rows
    certificate = None
    if found.certified is not None:
        kept = keep_rows if transposed else keep_columns
        certificate = Certificate(
            widened(np.ldexp(found.certified.Y_factor, q[:, None]), kept),
            widened(np.ldexp(found.certified.Z_factor, q[:, None]), kept),
            transposed,
            found.certified.lower,
        )
    resolved = condition.resolved and after.resolved
    return OptimalScaling(
        side=side,
        row=widened(rows, keep_rows, 1.0),
        column=widened(columns, keep_columns, 1.0),
        kappa=math.sqrt(after.value) if resolved else math.inf,
        upper=math.sqrt(after.upper) if resolved else math.inf,
        lower=found.lower,
        # another rank: entries were lost to underflow
        kappa_given=math.sqrt(before.value) if before.rank == rank else math.inf,
        rank=rank,
        resolved=resolved,
        iterations=found.steps,
        solver=found.solver,
        certificate=certificate,
    )


def on_host(matrix: Any) -> Any:
    """A real torch tensor in float64 on the host (numpy knows no bfloat16); anything else as it is."""
    if isinstance(matrix, torch.Tensor) and not matrix.is_complex():
        return matrix.detach().to("cpu", torch.float64)
    return matrix


def widened(values: np.ndarray, kept: np.ndarray, fill: float = 0.0) -> np.ndarray:
    """The values at the lines that were kept, ``fill`` at those of zeros."""
    full = np.full((len(kept), *values.shape[1:]), fill)
    full[kept] = values
    return full


def scaled_rows(B: np.ndarray, condition: ConditionNumber, rtol: float) -> Scaled:
    """The optimum over the rows of a matrix of any rank, and the larger of two lower bounds."""
    n, rank = B.shape[1], condition.rank
    whole = rank == n and condition.rank_decision == "structural"
    L, Q = (B, np.eye(n)) if whole else thin_factor(B, rank)
    ones = np.ones(n)
    found = optimum_of_many(L, both=False, rtol=rtol)
    certified = certify_trace(B, Q @ found.Y_factor, Q @ found.Z_factor, None if whole else found.combination)
    if certified.lower * (1 + 1e-2) < found.kappa:
        bound = van_der_sluis_bound(B)
        if bound > certified.lower:
            return Scaled(found.rows, ones, bound, None, found.steps, "central path; Van der Sluis' bound")
    return Scaled(found.rows, ones, certified.lower, certified, found.steps, "central path")


def scaled_both(B: np.ndarray, rtol: float) -> Scaled:
    """The optimum over rows and columns of a matrix of full column rank."""
    if len(B) == B.shape[1]:
        blocks, heights = diagonal_blocks(B)
        if len(blocks) > 1:
            return scaled_blocks(B, blocks, heights, rtol)
    found = optimum_of_many(B, both=True, rtol=rtol)
    certified = certify_ratio(B, found.Y_factor, found.Z_factor)
    return Scaled(found.rows, found.columns, certified.lower, certified, found.steps, "central path")


def scaled_blocks(
    B: np.ndarray, blocks: list[tuple[np.ndarray, np.ndarray]], heights: list[int], rtol: float
) -> Scaled:
    """The optimum for a block triangular form: that of the worst diagonal block, whose scalings differ in size.

    A diagonal block of a scaled matrix and of its inverse are a scaled block and its inverse: κ is at least that of
    any block. What is off the diagonal can be made as small as one likes: the infimum is not attained.
    """
    rows, columns = np.ones(len(B)), np.ones(len(B))
    lower, steps = 1.0, 0
    apart = min(APART, RANGE // max(1, *heights))
    for (i, j), height in zip(blocks, heights, strict=True):
        block = B[np.ix_(i, j)]
        size = float(abs(block[0, 0]))
        if len(i) > 1:
            found = scaled_both(block, rtol)
            rows[i], columns[j] = found.rows, found.columns
            lower, steps = max(lower, found.lower), steps + found.steps
            s = np.linalg.svd(found.rows[:, None] * block * found.columns, compute_uv=False)
            # all blocks around 1: none then widens the range of the worst
            size = float(np.sqrt(s[0] * s[-1]))
        rows[i] = np.ldexp(rows[i] / size, -apart * height)
        columns[j] = np.ldexp(columns[j], apart * height)
    return Scaled(rows, columns, lower, None, steps, "central path for each diagonal block")


def van_der_sluis_bound(B: np.ndarray) -> float:
    """1/σ_min⁺(EB) ≤ κ⁺(DB) for all D, where E makes all rows of norm 1.

    Source: Van der Sluis, Numerische Mathematik 14 (1969), 14-23.
    """
    EB = B / np.linalg.norm(B, axis=1)[:, None]
    condition = FactorForm(EB, error=4 * EPS * np.abs(EB)).condition()
    # σ_min ≤ σ_max / κ, and both ends are known up to their error bounds
    return max(1.0, math.sqrt(condition.lower) / float(np.linalg.norm(EB, 2)) * (1 - 1e-9))

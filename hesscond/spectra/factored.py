"""Spectra of H = FᵀF from the factor F, never from the squared matrix unless a bound says that suffices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from scipy.sparse import issparse

from hesscond.errors import MatrixError
from hesscond.spectra.certificate import EPS, smallest_singular_value
from hesscond.spectra.condition import (
    GAP,
    NOISE,
    ConditionNumber,
    Values,
    conclude,
    is_good_enough,
    resolve,
    unresolved,
    zero_matrix,
)
from hesscond.spectra.structure import rank_bound as structural_rank_bound
from hesscond.spectra.threads import one_thread

#: Sparse matrices are made dense up to this order (a 3.2 GB array).
DENSE_LIMIT = 20_000

#: Gram matrices whose trace lies outside are near overflow or underflow, and are not used.
GRAM_RANGE = (1e-200, 1e200)

#: Steps of the equilibration in `graded_errors`; each halves the decades still to go.
EQUILIBRATION_STEPS = 12

#: Entries that are smaller than this beside the largest may underflow when they are squared.
LEAST = 2.0**-500

#: Exact ranks are found up to this product of the two orders and the smaller of them: order 1,000.
EXACT_WORK = 10**9

#: Below this relative width of κ's interval the Gram form is not tried: it would not be reached.
GRAM_RTOL = 1e-7


def error_factor(m: int, n: int) -> float:
    """The constant c of the bounds c·eps·(norm): √(mn), the probabilistic growth of rounding errors.

    The worst-case constants of backward error analysis grow like m·n and are never seen; with independent
    rounding errors the growth is their square root (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    return max(16.0, math.sqrt(m * n))


def as_array(matrix: object) -> np.ndarray:
    """``matrix`` as a numpy array; a torch tensor is copied to the host if it is elsewhere."""
    if not isinstance(matrix, torch.Tensor):
        return np.asarray(matrix)
    tensor = matrix.detach().cpu()
    # numpy has no bfloat16
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def as_matrix(matrix: object) -> np.ndarray:
    """A finite, non-empty, two-dimensional float64 array of ``matrix`` (a torch tensor is copied to the host).

    Raises
    ------
    MatrixError
        Not two-dimensional, empty, complex or masked, with NaN or infinite entries, or with entries that are no
        doubles, such as integers beyond 2⁵³.
    """
    if np.ma.is_masked(matrix):
        raise MatrixError("the matrix has masked entries: fill them or leave their rows or columns out")
    try:
        given = as_array(matrix)
    except (TypeError, ValueError, RuntimeError):
        raise MatrixError(f"expected a matrix of real numbers, got {type(matrix).__name__}") from None
    if np.iscomplexobj(given):
        raise MatrixError("complex matrices are not supported: give a real matrix")
    if given.dtype.kind not in "biufO":
        raise MatrixError(f"expected a matrix of real numbers, got entries of type {given.dtype}")
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(given, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise MatrixError(f"expected a matrix of real numbers, got {type(matrix).__name__}") from None
    if array.ndim != 2 or 0 in array.shape:
        raise MatrixError(f"expected a non-empty matrix with two dimensions, got shape {array.shape}")
    # a sum is finite only if every entry is (or if huge ones overflow: then look at each)
    if not np.isfinite(array.sum()) and not np.isfinite(array).all():
        raise MatrixError("the matrix has NaN or infinite entries: its condition number is not defined")
    if not are_doubles(given, array):
        raise MatrixError(
            f"the matrix has entries of type {given.dtype} that no double is equal to: their rounding may be all there "
            "is of κ; round them with .astype(float) if that is meant"
        )
    return array


def are_doubles(given: np.ndarray, array: np.ndarray) -> bool:
    """Whether numbers are what they became as doubles."""
    if given.dtype == object:
        return all(a == b for a, b in zip(given.flat, array.ravel().tolist(), strict=True))
    if given.dtype.kind in "iu" and given.dtype.itemsize == 8:
        large = np.abs(array) >= 2.0**53
        return all(int(a) == int(b) for a, b in zip(given[large], array[large], strict=True))
    return given.dtype.kind != "f" or given.dtype.itemsize <= 8 or bool((given == array).all())


def dense(matrix: Any) -> Any:
    """``matrix`` as a dense array if it is sparse, of scipy or torch, else as it is.

    Raises
    ------
    MatrixError
        It would be too large.
    """
    of_torch = isinstance(matrix, torch.Tensor) and matrix.layout != torch.strided
    if not of_torch and not issparse(matrix):
        return matrix
    if max(matrix.shape) > DENSE_LIMIT:
        raise MatrixError(
            f"a sparse matrix of shape {tuple(matrix.shape)} is too large for the dense solvers: "
            f"at most {DENSE_LIMIT} a side"
        )
    return matrix.to_dense() if of_torch else matrix.toarray()


class Core(NamedTuple):
    """A matrix stripped of what changes no nonzero singular value.

    ``matrix`` (m, n), m ≥ n, in Fortran order: the rows and columns that are not zero, divided by 2**``scale`` so
    that the largest entry is near 1 (exactly), transposed if that makes it tall; ``columns``: which columns of the
    original were kept. A zero matrix has an empty core.
    """

    matrix: np.ndarray
    scale: int
    columns: np.ndarray
    transposed: bool


def scaled_core(matrix: np.ndarray) -> Core:
    """The core of a finite matrix."""
    largest = max(matrix.max(), -matrix.min())
    nonzero = matrix != 0
    columns = nonzero.any(0)
    if largest == 0:
        return Core(np.zeros((0, 0)), 0, columns, False)
    scale = int(np.frexp(largest)[1])
    rows = nonzero.any(1)
    if not (rows.all() and columns.all()):
        matrix = matrix[np.ix_(rows, columns)]
    transposed = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if transposed else matrix
    # a product with 2**-scale is exact and four times as fast as ldexp, but 2**1074 is not a double
    scaled = tall * 2.0**-scale if abs(scale) < 1000 else np.ldexp(tall, -scale)
    return Core(np.asfortranarray(scaled), scale, columns, transposed)


def within_range(result: ConditionNumber, matrix: np.ndarray, core: np.ndarray) -> ConditionNumber:
    """``result``, unresolved if a rank below that of the pattern may come from entries that underflow when squared."""
    if not result.resolved or result.rank >= min(core.shape):
        return result
    magnitudes = np.abs(matrix)
    if magnitudes[magnitudes > 0].min() >= LEAST * magnitudes.max():
        return result
    return unresolved(result)


def equilibrated_rank(core: np.ndarray) -> int:
    """How many singular values are told from zero once rows and columns are of one size, which changes no rank.

    0 if they are of one size already.
    """
    rows, columns = (np.abs(core).max(axis) for axis in (1, 0))
    if max(rows.max() / rows.min(), columns.max() / columns.min()) < GAP:
        return 0
    scaled = core
    for _ in range(2):
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(1))[1][:, None])
        scaled = np.ldexp(scaled, -np.frexp(np.abs(scaled).max(0))[1])
    values = svd_values(scaled)
    return int((values.magnitudes > values.errors).sum())


def exact_rank(core: np.ndarray) -> int | None:
    """The rank of a core by exact arithmetic; None if that takes longer than some seconds."""
    from hesscond.spectra.rank import rank

    return rank(core).value if core.size * min(core.shape) <= EXACT_WORK else None


def uniform(magnitudes: np.ndarray, shape: tuple[int, int], unit: float, error: float) -> dict[str, np.ndarray]:
    """The same error bound c·unit + ``error`` and floor for all values, unit being eps times a norm."""
    bound, floor = error_factor(*shape) * unit + error, NOISE * unit
    return {"errors": np.full(len(magnitudes), bound), "floors": np.full(len(magnitudes), floor)}


def gram_values(core: np.ndarray, error: float = 0.0) -> Values:
    """Eigenvalues of coreᵀcore from the formed Gram matrix, with normwise error bounds."""
    return from_gram_eigenvalues(eigenvalues_of(core.T @ core), core.shape, error)


def eigenvalues_of(symmetric: np.ndarray) -> np.ndarray:
    """Ascending eigenvalues of one or a stack of symmetric matrices.

    Through torch, whose LAPACK is the faster one here and shares the threads of the training around it.
    """
    return torch.linalg.eigvalsh(torch.from_numpy(symmetric)).numpy()


def from_gram_eigenvalues(ascending: np.ndarray, shape: tuple[int, int], error: float = 0.0) -> Values:
    """The `Values` of a factor of that ``shape`` from the eigenvalues of its Gram matrix."""
    values = ascending[::-1].clip(min=0.0)
    top = float(values[0])
    carried = error * (2 * top**0.5 + error)
    return Values(values, **uniform(values, shape, EPS * top, carried), power=1, solver="Gram")


def svd_values(core: np.ndarray, error: float = 0.0, *, power: int = 2) -> Values:
    """Singular values of ``core`` with the normwise error bound c·eps·σ_max + ``error``."""
    with one_thread():
        values = torch.linalg.svdvals(torch.from_numpy(core)).numpy()
    return Values(values, **uniform(values, core.shape, EPS * float(values[0]), error), power=power, solver="SVD")


def jacobi_values(
    core: np.ndarray,
    error: float | np.ndarray = 0.0,
    *,
    across_rows: bool = False,
    power: int = 2,
) -> Values:
    """Singular values of ``core`` by one-sided Jacobi, with the bounds of `graded_errors`.

    Parameters
    ----------
    core : (m, n) array
    error
        Bound, in the 2-norm, of the error already in the core; or an array of such bounds for its columns (its rows
        with ``across_rows``), of which σ_k feels what its singular vector weighs them with; or (m, n) of bounds for its
        entries, of whose size a σ_k may then be round-off.
    across_rows
        What an array of errors belongs to.
    power
        As in `Values`.
    """
    values, u, v = jacobi_svd(core)
    below, above = graded_errors(core, values, u, v)
    floors = NOISE * roundoff_of_entries(core, values, u, v)
    carried = error
    if isinstance(error, np.ndarray) and error.ndim == 2:
        carried = weighted(error, u, v)
        floors = floors + carried
    elif isinstance(error, np.ndarray):
        carried = np.abs(u if across_rows else v).T @ error
    return Values(values, below + carried, floors, power, "Jacobi SVD", above=above + carried)


def jacobi_svd(core: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular values (descending) and vectors (columns of u (m, n) and v (n, n)) of a tall core by dgejsv.

    Source: Drmač and Veselić, SIAM J. Matrix Anal. Appl. 29 (2008), 1322-1362; rows pivoted (JOBA = 'F').
    """
    sva, u, v, work, _, info = lapack.dgejsv(core, joba=2, jobu=0, jobv=0, jobr=0, jobt=0, jobp=0)
    if info != 0:
        raise np.linalg.LinAlgError("dgejsv did not converge")
    values = sva * (work[0] / work[1])
    order = np.argsort(-values, kind="stable")
    return values[order], u[:, : core.shape[1]][:, order], v[:, order]


def roundoff_of_entries(core: np.ndarray, values: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""What a relative change eps of each single entry changes every singular value by: eps·\|u_k\|ᵀ\|A\|\|v_k\|, (n,).

    A σ_k of this size is round-off of the entries themselves.
    """
    return EPS * np.maximum(weighted(np.abs(core), u, v), values)


def weighted(entries: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r"""\|u_k\|ᵀ·entries·\|v_k\| for each k, (n,): what errors of its entries change σ_k by, at most."""
    found: np.ndarray = np.einsum("ik,ik->k", np.abs(u), entries @ np.abs(v))
    return found


def graded_errors(
    core: np.ndarray, values: np.ndarray, u: np.ndarray, v: np.ndarray, error: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""Error bounds below and above, (n,) each, of singular values from `jacobi_svd`.

    Below the smallest one the bound is that of `smallest_singular_value`, which holds whatever Jacobi did; where
    there is none, the value is not told from zero. The others: 2000·eps·(\|u_k\|ᵀd₁)(d₂ᵀ\|v_k\|).

    Write A = D₁CD₂ with D = diag(d) such that the largest entry of every row and column of C is about 1: row-pivoted
    QR and Jacobi commit errors of the size eps·d₁ᵢd₂ⱼ in entry (i, j), also where the entry is smaller or zero, and
    σ_k = u_kᵀAv_k feels them as weighted. The constant is measured: the worst of 3·10⁴ graded, sparse and rank
    deficient matrices needed 1233, all but a few less than 32.

    ``error`` (m, n) bounds errors already in the entries of A; σ_k feels them as weighted by its vectors.

    Source of the form: Higham, BIT 40 (2000), 325-339, and Drmač and Veselić, as in `jacobi_svd`.
    """
    C = np.abs(core)
    rows, columns = np.ones(len(C)), np.ones(C.shape[1])
    for _ in range(EQUILIBRATION_STEPS):
        row, column = (np.sqrt(largest).clip(min=1e-300) for largest in (C.max(1), C.max(0)))
        C = C / row[:, None] / column
        rows, columns = rows * row, columns * column
    rows = rows * C.max(1)
    weights = (np.abs(u).T @ rows) * (np.abs(v).T @ columns)
    above = 2000 * EPS * np.maximum(weights, values)
    if error is not None:
        above += weighted(error, u, v)
    below = above.copy()
    smallest = float(values[-1])
    ends = smallest_singular_value(core, v[:, -1], error)
    if ends is None:
        below[-1] = max(below[-1], smallest)
    else:
        below[-1] = max(smallest - ends[0], 0.0)
        # none of the others is smaller than the smallest
        below = np.minimum(below, np.maximum(values - ends[0], 0.0))
        above[-1] = max(min(above[-1], ends[1] - smallest), 0.0)
    return below, above


def factor_condition(
    factor: object,
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: float | np.ndarray = 0.0,
    exact: bool = False,
) -> ConditionNumber:
    """κ of H = FᵀF from the factor F: κ(H) = κ(F)², so float64 resolves κ(H) to 1e30.

    Three routes, cheapest first; the search stops where the error bound of one resolves κ to ``rtol``: the Gram
    matrix (only if ``rtol`` ≥ 1e-7), the singular values of F, and one-sided Jacobi, whose bounds are entry by
    entry and so survive any grading of rows and columns.

    Parameters
    ----------
    factor : (m, n) array or tensor
        F. H has order n.
    rank_bound
        Finds an upper bound of the rank; called only if the smaller side of F is not reached. The pattern of F is
        used too.
    rtol
        Relative width of κ's interval that is good enough.
    error
        Absolute bound, in the 2-norm, of the error already in F (a triangular factor of a longer matrix, say), or
        an array (n,) of such bounds for its columns, or (m, n) of bounds for its entries.
    exact
        Whether κ is wanted of this very F, whose rank is then found by `rank` where sizes do not decide it. Otherwise
        values of the size of round-off are zeros.

    Raises
    ------
    MatrixError
        Not a finite, non-empty matrix.
    """
    matrix = as_matrix(factor)
    core, scale, columns, transposed = scaled_core(matrix)
    if core.size == 0:
        return zero_matrix(matrix.shape[1])
    errors = np.asarray(np.ldexp(error, -scale))
    whole = float(np.linalg.norm(errors))
    by_part: float | np.ndarray = whole
    if errors.ndim == 1:
        by_part = errors[columns]
    elif errors.ndim == 2:
        entries = errors[np.ix_((matrix != 0).any(1), columns)]
        by_part = entries.T if transposed else entries
    routes = [partial(svd_values, core, whole), partial(jacobi_values, core, by_part, across_rows=transposed)]
    if rtol >= GRAM_RTOL:
        routes.insert(0, partial(gram_values, core, whole))

    known = [] if rank_bound is None else [rank_bound]
    found = resolve(
        routes,
        order=matrix.shape[1],
        bounds=[*known, partial(structural_rank_bound, core)],
        scale=2 * scale,
        rtol=rtol,
        exact=partial(exact_rank, core) if exact else None,
    )
    if found.rank_decision == "numerical" and equilibrated_rank(core) > found.rank:
        # rows or columns that are small as a whole are no round-off
        found = unresolved(found)
    return within_range(found, matrix, core)


def factor_conditions(
    factors: Sequence[object],
    *,
    rank_bound: Callable[[], int] | None = None,
    rtol: float = 1e-8,
    error: Sequence[float | np.ndarray] | None = None,
) -> list[ConditionNumber]:
    """κ of FᵀF for several factors with the same number m of rows: one Hessian in several coordinates.

    Where ``rtol`` allows the Gram form and no F has fewer columns than rows, the (m, m) Gram matrices are
    decomposed together; what they do not resolve goes through `factor_condition`, as does everything else.

    Parameters
    ----------
    factors : arrays or tensors (m, n_i)
    rank_bound
        Finds an upper bound of the rank that all share.
    rtol
        Relative width of κ's intervals that is good enough.
    error
        For each factor, as in `factor_condition`.
    """
    errors = [0.0] * len(factors) if error is None else list(error)
    matrices = [as_array(factor) for factor in factors]
    found: list[ConditionNumber | None] = [None] * len(matrices)
    rows = len(matrices[0])
    if rtol >= GRAM_RTOL and all(matrix.ndim == 2 and matrix.shape[1] >= rows > 0 for matrix in matrices):
        grams = np.empty((len(matrices), rows, rows))
        with np.errstate(over="ignore", invalid="ignore"):
            for gram, matrix in zip(grams, matrices, strict=True):
                np.matmul(matrix, matrix.T, out=gram)
        top = grams.diagonal(axis1=1, axis2=2).sum(1)
        # false for NaN too: `factor_condition` will say what is wrong
        if ((top > GRAM_RANGE[0]) & (top < GRAM_RANGE[1])).all():
            for i, ascending in enumerate(eigenvalues_of(grams)):
                whole = float(np.linalg.norm(errors[i])) if np.ndim(errors[i]) else float(errors[i])
                values = from_gram_eigenvalues(ascending, matrices[i].shape, whole)
                result = conclude(values, order=matrices[i].shape[1], limit=rows, scale=0)
                if is_good_enough(result, rtol):
                    found[i] = result
    return [
        factor_condition(matrix, rank_bound=rank_bound, rtol=rtol, error=e) if done is None else done
        for matrix, e, done in zip(matrices, errors, found, strict=True)
    ]


def factor_eigenvalues(factor: object, condition: ConditionNumber) -> np.ndarray:
    """The nonzero eigenvalues of FᵀF, descending: as many as ``condition`` found.

    Parameters
    ----------
    factor : (m, n) array or tensor
    condition
        What `factor_condition` returned for this factor; its rank is taken over, and Jacobi is used if it was.
    """
    core, scale, *_ = scaled_core(as_matrix(factor))
    if condition.rank == 0:
        return np.zeros(0)
    values = (jacobi_values if condition.solver.startswith("Jacobi") else svd_values)(core).magnitudes
    return np.ldexp(values[: condition.rank] ** 2, 2 * scale)

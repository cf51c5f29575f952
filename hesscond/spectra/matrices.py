"""Conversion of given matrices to dense arrays of doubles, without parts that change no nonzero singular value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import issparse

from hesscond.errors import MatrixError

#: Sparse matrices are made dense up to this order (a 3.2 GB array).
DENSE_LIMIT = 20_000


def as_array(matrix: object) -> np.ndarray:
    """``matrix`` as a numpy array; a torch tensor is copied to the host if it is elsewhere."""
    if not isinstance(matrix, torch.Tensor):
        return np.asarray(matrix)
    tensor = matrix.detach().cpu()
    # numpy has no bfloat16
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def as_matrix(matrix: object) -> np.ndarray:
    """Finite, non-empty, two-dimensional float64 array of ``matrix`` (a torch tensor is copied to the host)."""
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
    """Whether numbers are unchanged by the conversion to doubles."""
    if given.dtype == object:
        return all(a == b for a, b in zip(given.flat, array.ravel().tolist(), strict=True))
    if given.dtype.kind in "iu" and given.dtype.itemsize == 8:
        large = np.abs(array) >= 2.0**53
        return all(int(a) == int(b) for a, b in zip(given[large], array[large], strict=True))
    return given.dtype.kind != "f" or given.dtype.itemsize <= 8 or bool((given == array).all())


def dense(matrix: Any) -> Any:
    """``matrix`` as a dense array if it is sparse, of scipy or torch, else as it is."""
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
    """Core of a matrix, without the parts that change no nonzero singular value.

    ``matrix`` (m, n), m ≥ n, in Fortran order: the rows and columns that are not zero, divided by 2**``scale`` so
    that the largest entry is near 1 (exactly), transposed if that makes it tall; ``columns``: which columns of the
    original were kept. A zero matrix has an empty core.
    """

    matrix: np.ndarray
    scale: int
    columns: np.ndarray
    transposed: bool


def scaled_core(matrix: np.ndarray) -> Core:
    """Core of a finite matrix."""
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
    if abs(scale) < 1000:
        return Core(np.multiply(tall, 2.0**-scale, order="F"), scale, columns, transposed)
    return Core(np.ldexp(tall, -scale, order="F"), scale, columns, transposed)

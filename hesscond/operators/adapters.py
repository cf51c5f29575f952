"""Operators from tensors, arrays, and the operators of scipy and other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from scipy.sparse.linalg import LinearOperator as ScipyOperator, aslinearoperator

from hesscond.errors import MatrixError
from hesscond.operators.operator import Dense, LinearOperator, SymmetricOperator

#: Pairs of random vectors that a symmetry check takes.
PAIRS = 4

#: Asymmetry that is attributed to rounding, in units of round-off: products through a deep network lose some digits.
ALLOWED = 1000.0


def as_operator(matrix: object, *, seed: int = 0) -> SymmetricOperator:
    """Operator of a symmetric matrix that is given in any form.

    Parameters
    ----------
    matrix : (n, n)
        A `SymmetricOperator` (returned as it is); a torch tensor or numpy array; a scipy sparse matrix or
        ``LinearOperator``, or an object that scipy converts to one; an operator of another torch library (curvlinops,
        GPyTorch's linear_operator), recognized by its ``shape``, ``dtype``, ``device`` and ``@`` with tensors (n, k).
    seed
        Seed of the random vectors that check operators known by their products only.

    Returns
    -------
    SymmetricOperator
        Operator of the same precision (float64 for integers), on the same device.

    Raises
    ------
    MatrixError
        Not a real square matrix, or not symmetric: exactly for entries, up to rounding for products.

    Examples
    --------
    >>> import numpy as np
    >>> as_operator(np.array([[2, 1], [1, 2]])) @ torch.ones(2, dtype=torch.float64)
    tensor([3., 3.], dtype=torch.float64)
    """
    if isinstance(matrix, SymmetricOperator):
        return matrix
    if isinstance(matrix, LinearOperator):
        raise MatrixError(
            f"{type(matrix).__name__} of shape {matrix.shape} is not known to be symmetric: "
            f"give a SymmetricOperator, as Gram(F) for FᵀF"
        )
    if isinstance(matrix, torch.Tensor):
        return Dense(matrix if matrix.is_floating_point() or matrix.is_complex() else matrix.to(torch.float64))
    if isinstance(matrix, np.ndarray):
        # a copy, as torch shares no memory that may not be written to
        return Dense(torch.from_numpy(np.array(matrix, dtype=real_dtype(matrix.dtype))))
    if issparse(matrix):
        return Sparse(matrix)
    if isinstance(getattr(matrix, "dtype", None), torch.dtype) and hasattr(matrix, "__matmul__"):
        return checked_by_products(TorchProducts(matrix), seed)
    try:
        operator = aslinearoperator(matrix)
    except (TypeError, ValueError):
        raise MatrixError(
            f"expected a matrix or an operator (torch, numpy, scipy, curvlinops), got {type(matrix).__name__}"
        ) from None
    return checked_by_products(HostProducts(operator), seed)


def real_dtype(dtype: np.dtype | None) -> np.dtype:
    """Dtype of the operator: float32 for float32, float64 for any other real type."""
    if dtype is None or dtype.kind not in "biuf":
        raise MatrixError(f"expected a matrix of real numbers, not of {dtype}")
    return np.dtype(np.float32 if dtype == np.float32 else np.float64)


def square(shape: Any) -> int:
    """Order of a square matrix."""
    if len(shape) != 2 or shape[0] != shape[1]:
        raise MatrixError(f"a symmetric operator is square, this one has the shape {tuple(shape)}")
    return int(shape[0])


class HostProducts(SymmetricOperator):
    """Scipy ``LinearOperator``, whose products are numpy arrays on the host."""

    def __init__(self, A: ScipyOperator) -> None:
        self.A, self.host_dtype = A, real_dtype(A.dtype)
        super().__init__(square(A.shape), torch.from_numpy(np.empty(0, self.host_dtype)).dtype, "cpu")

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product A V as a copy, since an identity may return its argument."""
        return torch.from_numpy(np.array(self.A @ vectors.detach().numpy(), dtype=self.host_dtype))


class Sparse(HostProducts):
    """Scipy sparse matrix."""

    def __init__(self, A: Any) -> None:
        rows = A.tocsr().astype(real_dtype(A.dtype))
        square(rows.shape)
        if not np.isfinite(rows.data).all():
            raise MatrixError("the matrix has NaN or infinite entries: its products are not defined")
        if (rows != rows.T).nnz:
            raise MatrixError("the matrix is not symmetric: take (A + Aᵀ)/2 if it should be")
        super().__init__(rows)


class TorchProducts(SymmetricOperator):
    """Operator of another torch library, which multiplies tensors (n, k)."""

    def __init__(self, A: Any) -> None:
        super().__init__(square(A.shape), A.dtype, A.device)
        self.A = A

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product A V as a copy, since an identity may return its argument."""
        product = self.A @ vectors
        return (product.clone() if product.data_ptr() == vectors.data_ptr() else product).detach().to(self.dtype)


def checked_by_products(A: SymmetricOperator, seed: int) -> SymmetricOperator:
    """Return A if its products with random vectors are finite and those of a symmetric matrix."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (A.order, 2 * PAIRS), generator=generator, dtype=torch.int8, device="cpu")
    vectors = signs.to(A.device, A.dtype).mul_(2).sub_(1)
    # in two calls, which differ if the operator is random, as with dropout
    halves = [A.multiply(half) for half in vectors.split(PAIRS, 1)]
    images = torch.cat(halves, 1)
    if images.shape != vectors.shape:
        raise MatrixError(
            f"the operator maps vectors {tuple(vectors.shape)} to {tuple(images.shape)}: expected the same shape"
        )
    if not bool(images.isfinite().all()):
        raise MatrixError("the operator's products have NaN or infinite entries: look at the loss and the parameters")
    # a common factor, or the squares of products near overflow would not be finite
    images = images.to(torch.float64)
    images /= images.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    u, v = vectors.to(torch.float64).split(PAIRS, 1)
    Au, Av = images.split(PAIRS, 1)
    defects = ((u * Av).sum(0) - (v * Au).sum(0)).abs()
    sizes = (Au.norm(dim=0) + Av.norm(dim=0)) * A.order**0.5
    worst = float((defects / sizes.clamp_min(torch.finfo(torch.float64).tiny)).max())
    if worst > ALLOWED * torch.finfo(A.dtype).eps:
        raise MatrixError(
            f"the operator is not symmetric: uᵀAv and vᵀAu differ by {worst:.1e} of their size; a Hessian is "
            f"(is the model in eval mode, or the data in another order each time?)"
        )
    return A

"""Solution of symmetric systems by products, with a residual that is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators.operator import SymmetricOperator

#: Corrections by the residual before a system counts as unsolvable in double precision.
CORRECTIONS = 3


def solve(
    A: SymmetricOperator, vectors: torch.Tensor, *, rtol: float = 1e-8, products: int | None = None
) -> torch.Tensor:
    """Solution x of A x = v with ‖A x − v‖ ≤ rtol ‖v‖, by conjugate gradients where A ≥ 0, else by MINRES.

    Parameters
    ----------
    A
        The operator, of order n: ``H + 0.1`` for H + 0.1 I.
    vectors
        v (n,), or several as columns (n, k).
    rtol
        Largest relative residual of each column.
    products
        Largest number of products for a column and a correction; None: 10 n, at most 100,000.

    Returns
    -------
    torch.Tensor
        x in the shape of ``vectors``, float64.

    Raises
    ------
    MatrixError
        The residual was not reached: A is singular, or too ill-conditioned for its precision or this many products.

    References
    ----------
    Hestenes and Stiefel, J. Res. NBS 49 (1952), 409-436; Paige and Saunders, SIAM J. Numer. Anal. 12 (1975), 617-629.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> solve(Diagonal(torch.tensor([1.0, -3.0], dtype=torch.float64)) + 1, torch.tensor([2.0, 2.0])).round(decimals=6)
    tensor([ 1., -1.], dtype=torch.float64)
    """
    from scipy.sparse.linalg import cg, minres

    limit = min(10 * A.order, 100_000) if products is None else products
    method, operator = (cg if A.psd else minres), A.to_scipy()

    def inverse(given: torch.Tensor) -> torch.Tensor:
        columns = given.to("cpu", torch.float64).numpy().T
        found = [method(operator, own, rtol=rtol / 4, maxiter=limit)[0] for own in columns]
        return torch.from_numpy(np.stack(found, 1)).to(A.device)

    return corrected(lambda V: (A @ V).to(torch.float64), inverse, vectors, A.order, rtol)


def corrected(
    product: Callable[[torch.Tensor], torch.Tensor],
    inverse: Callable[[torch.Tensor], torch.Tensor],
    vectors: torch.Tensor,
    order: int,
    rtol: float,
) -> torch.Tensor:
    """Solution by an approximate inverse, corrected until the residual of each column is small enough."""
    if vectors.ndim not in (1, 2) or len(vectors) != order:
        raise ConfigError(
            f"a system of order {order} has vectors ({order},) or ({order}, k), not {tuple(vectors.shape)}"
        )
    v = vectors.detach().to(torch.float64).reshape(order, -1)
    x, residual, relative = torch.zeros_like(v), v, 1.0
    lengths = torch.linalg.vector_norm(v, dim=0)
    for _ in range(CORRECTIONS):
        x = x + inverse(residual)
        residual = v - product(x)
        off = torch.linalg.vector_norm(residual, dim=0)
        relative = float((off / torch.where(lengths > 0, lengths, 1.0)).max())
        if relative <= rtol:
            return x.reshape(vectors.shape)
        if not relative < float("inf"):
            break
    raise MatrixError(
        f"the system is not solved to rtol={rtol:g}: the residual is {relative:.1e} of the right-hand side, since the "
        "matrix is singular, or too ill-conditioned for its precision: give a larger damping or rtol"
    )

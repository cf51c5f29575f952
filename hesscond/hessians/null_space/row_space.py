"""Row space of a matrix, decided by zeros, or by a gap in its singular values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.streaming import StreamedBlock
from hesscond.spectra.condition import EPS, NOISE, Values, conclude, error_factor

#: Rows that are brought to triangular form at a time, or eight times their length if that is more.
ROWS = 4096


@dataclass(frozen=True)
class RowSpace:
    """Row space of a matrix X (·, n)."""

    Q: torch.Tensor  # (n, r) float64 orthonormal basis; all of Rⁿ's unit vectors if nothing is known to be null
    R: torch.Tensor  # (k, n) float64 triangular factor: RᵀR = XᵀX
    dead: torch.Tensor  # (n,) bool columns of zeros

    @property
    def rank(self) -> int:
        """Dimension of the complement of the known null space."""
        return self.Q.shape[1]

    @property
    def nullity(self) -> int:
        """Dimension of the known null space."""
        return len(self.Q) - self.rank

    def eigenvectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues (r,) of XᵀX, descending, and eigenvectors (n, r), in the row space."""
        _, sigma, Vh = torch.linalg.svd(self.R @ self.Q, full_matrices=False)
        values = sigma.new_zeros(self.rank)
        values[: len(sigma)] = sigma.square()
        if len(sigma) < self.rank:
            Vh = torch.linalg.svd(self.R @ self.Q, full_matrices=True).Vh
        return values, self.Q @ Vh.T


def add_rows(block: StreamedBlock, rows: torch.Tensor, weight: float) -> None:
    """Add rows (·, n) to a triangular factor in pieces, three times as fast as at once."""
    for piece in rows.split(max(ROWS, 8 * rows.shape[1])):
        block.add(FactoredHessian(piece, None, None), weight)


def row_space(block: StreamedBlock, like: torch.Tensor) -> RowSpace:
    """Row space of the rows added to ``block``, on the device of ``like``.

    Where the rank is not certain by the singular values of the factor, its columns scaled to one length, only columns
    of zeros are null.
    """
    hessian = block.hessian()
    R, error = hessian.rows, hessian.row_error  # type: ignore[attr-defined]
    n = R.shape[1]
    lengths = R.square().sum(0).sqrt()
    dead = lengths == 0
    live = (~dead).nonzero()[:, 0]
    if len(live) == 0:
        return RowSpace(R.new_zeros(n, 0), R, dead)
    scaled = R[:, live] / lengths[live]
    _, sigma, Vh = torch.linalg.svd(scaled, full_matrices=False)
    carried = 0.0 if error is None else float((error[live] / lengths[live]).square().sum().sqrt())
    rank = certain_rank(sigma.cpu().numpy(), tuple(scaled.shape), carried)
    Q = R.new_zeros(n, len(live) if rank is None else rank)
    if rank is None or rank == len(live):
        Q[live, torch.arange(len(live), device=R.device)] = 1
    else:
        # the row space of R is that of the scaled one with its entries scaled back
        Q[live] = torch.linalg.qr(Vh[:rank].T * lengths[live, None]).Q
    return RowSpace(Q.to(like), R.to(like), dead.to(like.device))


def certain_rank(sigma: np.ndarray, shape: tuple[int, int], error: float) -> int | None:
    """Rank of a matrix with singular values ``sigma``, or None if it cannot be decided."""
    unit = EPS * float(sigma[0])
    bound = np.full(len(sigma), error_factor(*shape) * unit + error)
    floors = np.full(len(sigma), NOISE * unit)
    found = conclude(Values(sigma, bound, floors, 2, "SVD"), order=shape[1], limit=shape[1], scale=0)
    return found.rank if found.resolved else None

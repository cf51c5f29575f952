"""Orthonormal rows on a device, the storage of a Krylov process, and its size.

The vectors are rows, contiguous, so that a pass of Gram-Schmidt is two matrix products that read the memory in
order. They lie in two pieces, the first as long as the result: it alone outlives the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hesscond.errors import ConfigError, MatrixError

logger = logging.getLogger("hesscond")

#: Vectors besides the basis: a product in two precisions, the next row, and two more.
WORKING = 5


@dataclass(frozen=True)
class Plan:
    """Number of vectors of length n that are held."""

    rows: int
    #: most vectors at a time: the rows, and those in `WORKING`
    vectors: int


def plan(order: int, wanted: int, *, basis: int | None, memory: int | None, dtype: torch.dtype) -> Plan:
    """Plan of a basis of at most ``basis`` + 5 vectors in all that fits into ``memory`` bytes; its size is logged."""
    least = min(order, wanted + 3)
    size = order * dtype.itemsize
    rows = min(order, max(2 * wanted + 7, 32) if basis is None else basis)
    if rows < least:
        raise ConfigError(f"a basis of {basis} is too small for {wanted} eigenvalues: at least {least} are needed")
    if memory is not None:
        rows = min(rows, memory // size - WORKING)
    if rows < least:
        raise MatrixError(
            f"{memory} bytes hold {(memory or 0) // size} vectors of length {order} but the least basis needs "
            f"{least + WORKING}: give memory={(least + WORKING) * size} or ask for fewer eigenvalues"
        )
    logger.info(
        "Lanczos: at most %d vectors of length %d, %.3g MB, %d of them the basis",
        rows + WORKING,
        order,
        (rows + WORKING) * size / 1e6,
        rows,
    )
    return Plan(rows, rows + WORKING)


class Basis:
    """Storage of up to ``plan.rows`` orthonormal rows of length ``order``; ``size`` of them are filled."""

    def __init__(self, plan: Plan, order: int, head: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.order, self.capacity, self.size = order, plan.rows, 0
        head = min(head, plan.rows)
        self._pieces = [
            torch.empty(rows, order, dtype=dtype, device=device) for rows in (head, plan.rows - head) if rows
        ]

    def parts(self, start: int = 0, stop: int | None = None) -> list[torch.Tensor]:
        """Return rows ``start`` to ``stop`` (None: the size) as at most two views."""
        stop = self.size if stop is None else stop
        views, offset = [], 0
        for piece in self._pieces:
            low, high = max(start - offset, 0), min(stop - offset, len(piece))
            if low < high:
                views.append(piece[low:high])
            offset += len(piece)
        return views

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start`` to ``stop`` as a view, or as a copy if they lie in both pieces."""
        parts = self.parts(start, stop)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def append(self, block: torch.Tensor) -> None:
        """Append the rows of ``block``."""
        start, self.size = self.size, self.size + len(block)
        for part in self.parts(start):
            part.copy_(block[: len(part)])
            block = block[len(part) :]

    def project_(self, block: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Subtract the components C (p, rows) in the rows from ``block`` (p, n): one pass of classical Gram-Schmidt."""
        parts = self.parts(start, stop)
        if not parts:
            return block.new_zeros(len(block), 0)
        coefficients = torch.cat([block @ part.T for part in parts], 1)
        for part, share in zip(parts, coefficients.split([len(part) for part in parts], 1), strict=True):
            block.addmm_(share, part, alpha=-1)
        return coefficients

    def rotate_(self, Y: torch.Tensor) -> None:
        """Replace the rows V by YᵀV for Y (size, kept), some columns of V at a time: no second basis is needed."""
        parts = self.parts()
        mixing = Y.T.to(parts[0])
        shares = mixing.split([len(part) for part in parts], 1)
        self.size = Y.shape[1]
        targets = self.parts()
        width = -(-self.order // self.capacity)
        for start in range(0, self.order, width):
            columns = slice(start, start + width)
            rotated = shares[0] @ parts[0][:, columns]
            for share, part in zip(shares[1:], parts[1:], strict=True):
                rotated.addmm_(share, part[:, columns])
            for target, new in zip(targets, rotated.split([len(part) for part in targets]), strict=True):
                target[:, columns] = new

    def release(self, kept: int) -> torch.Tensor:
        """Return the first ``kept`` rows as columns (n, kept), and free all other rows, and the basis with them."""
        if kept <= len(self._pieces[0]):
            first = self._pieces[0][:kept]
            self._pieces = []
            return first.T
        return self.rows(0, kept).T


def orthonormalize_(
    basis: Basis, row: torch.Tensor, floor: float, fresh: torch.Generator, passes: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Orthonormalize ``row`` (1, n) in place against rows of the basis.

    The row becomes C V + s W with W of norm 1; ``passes`` are ranges of rows to project off, once more after
    cancellation. A row that depends on the others, with s up to ``floor``, is replaced by a random direction, with s =
    0. Returned are C (1, size), float64 on the host, s, and W (1, n), or (0, n) if the basis spans the whole space.
    """
    C = row.new_zeros(1, basis.size)
    share = C
    for start, stop in passes:
        share = basis.project_(row, start, stop)
        C[:, start:stop] += share
    size = torch.linalg.vector_norm(row, dim=1)
    # compared with the norm before the last pass, by Pythagoras
    if bool(3 * size**2 < share.square().sum(1)):
        C[:, start:stop] += basis.project_(row, start, stop)
        size = torch.linalg.vector_norm(row, dim=1)
    C, remainder = C.double().cpu(), float(size)
    if basis.size == basis.order:
        return C, 0.0, row[:0]
    if remainder > floor:
        return C, remainder, row.div_(remainder)
    torch.randn(row.shape, generator=fresh, dtype=row.dtype, device=row.device, out=row)
    for _ in range(3):
        row.div_(torch.linalg.vector_norm(row))
        basis.project_(row)
    return C, 0.0, row.div_(torch.linalg.vector_norm(row))

"""Krylov process of a symmetric operator that can be restarted with any of its Ritz vectors.

Between two steps A Vᵀ = Vᵀ T + Wᵀ B + (rounding) with orthonormal rows V (j, n) and W (1, n): a Krylov-Schur
decomposition (Stewart 2001), which for symmetric A is thick-restart Lanczos (Wu and Simon 2000, SIAM J. Matrix Anal.
Appl. 22). T is what Gram-Schmidt measured, VAVᵀ, so that the Ritz values are those of span V even where the rows
are not of one Krylov space: after a restart from the residual of a Ritz vector, or from a random vector.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import SymmetricOperator
from hesscond.operators.operator import ROUNDING
from hesscond.spectra.eigen import Interval

logger = logging.getLogger("hesscond")

#: Vectors besides the basis: a product in two precisions, the next row, and two more; or the result that is copied.
WORKING = 5


def planned_rows(order: int, wanted: int, *, basis: int | None, memory: int | None, dtype: torch.dtype) -> int:
    """Rows of a basis that fits into ``memory`` bytes with the vectors besides it; the size of all is logged."""
    least = min(order, wanted + 3)
    size = order * dtype.itemsize
    rows = min(order, max(2 * wanted + 7, 32) if basis is None else basis)
    if rows < least:
        raise ConfigError(f"a basis of {basis} is too small for {wanted} eigenvalues: at least {least} are needed")
    others = max(WORKING, wanted)
    if memory is not None:
        rows = min(rows, memory // size - others)
    if rows < least:
        raise MatrixError(
            f"{memory} bytes hold {(memory or 0) // size} vectors of length {order} but the least basis needs "
            f"{least + others}: give memory={(least + others) * size} or ask for fewer eigenvalues"
        )
    logger.info(
        "Lanczos: at most %d vectors of length %d, %.3g MB, %d of them the basis",
        rows + others,
        order,
        (rows + others) * size / 1e6,
        rows,
    )
    return rows


class Basis:
    """Storage of up to ``capacity`` orthonormal rows of length ``order``; ``size`` of them are filled."""

    def __init__(self, capacity: int, order: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.order, self.capacity, self.size = order, capacity, 0
        self._storage = torch.empty(capacity, order, dtype=dtype, device=device)

    @property
    def rows(self) -> torch.Tensor:
        """View (size, n) of the rows that are filled."""
        return self._storage[: self.size]

    def append(self, block: torch.Tensor) -> None:
        """Append the rows of ``block``."""
        start, self.size = self.size, self.size + len(block)
        self.rows[start:] = block

    def project_(self, block: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Subtract the components C (p, rows) in the rows from ``block`` (p, n): one pass of classical Gram-Schmidt."""
        rows = self.rows[start:stop]
        # cublas refuses the strides that the transpose of a column has
        block = block[0][None] if len(block) == 1 else block
        coefficients = block @ rows.T
        block.addmm_(coefficients, rows, alpha=-1)
        return coefficients

    def rotate_(self, Y: torch.Tensor) -> None:
        """Replace the rows V by YᵀV for Y (size, kept), some columns of V at a time: no second basis is needed."""
        rows, mixing = self.rows, Y.T.to(self._storage)
        self.size = Y.shape[1]
        width = -(-self.order // self.capacity)
        for target, part in zip(self.rows.split(width, 1), rows.split(width, 1), strict=True):
            target.copy_(mixing @ part)

    def release(self, kept: int) -> torch.Tensor:
        """Return the first ``kept`` rows as columns (n, kept), and free the basis."""
        first = self._storage[:kept].clone()
        self._storage, self.size = self._storage.new_empty(0, self.order), 0
        return first.T


class Krylov:
    """Krylov process on rows V (j, n) and the next row W (1, n).

    All numbers are those of 2^−exponent A, with the exponent of the first nonzero product. With a random unit vector
    v, ‖A‖₂ exceeds ‖Av‖∞ by a factor of about n at most, and no square over- or underflows, not even in float32. The
    rows before ``first`` were there when the process started from v; restarts keep the rows before ``fixed``.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        basis: Basis,
        *,
        dtype: torch.dtype,
        fresh: torch.Generator,
    ) -> None:
        self.operator, self.basis, self.dtype, self.fresh = operator, basis, dtype, fresh
        self.rounding = max(operator.rounding, ROUNDING * torch.finfo(dtype).eps)
        self.T = torch.zeros(0, 0, dtype=torch.float64, device="cpu")  # (j, j) VAVᵀ, float64 on the host
        #: (1, j) WAVᵀ; after `seed` zero but for the row whose residual was given
        self.B = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        #: (1, n) W; no row when V spans the whole space
        self.next = torch.empty(0, operator.order, dtype=dtype, device=operator.device)
        self.fixed, self.invariant, self.norm, self.products = 0, False, 0.0, 0
        self.exponent: int | None = None  # exponent of the scale
        #: for a process from one random vector v: discarded Ritz values, and log ‖p(A)v‖ of the monic polynomial p
        #: whose roots are those and the present Ritz values
        self.roots: torch.Tensor | None = None
        self.log_norm, self.ended, self.first = 0.0, False, 0

    @property
    def size(self) -> int:
        """Number j of rows of V."""
        return self.basis.size

    @property
    def complete(self) -> bool:
        """Whether V spans the whole space, and the Ritz values are the eigenvalues."""
        return self.size == self.operator.order

    @property
    def full(self) -> bool:
        """Whether there is no room for the next row."""
        return self.size + len(self.next) > self.basis.capacity

    def random(self) -> torch.Tensor:
        """Row (1, n) of independent normal entries."""
        shape = (1, self.operator.order)
        return torch.randn(shape, generator=self.fresh, dtype=self.dtype, device=self.operator.device)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products (p, n) of the scaled operator with ``rows`` (p, n)."""
        self.products += len(rows)
        product = (self.operator @ rows.T).T.to(self.dtype).contiguous()
        if self.exponent is None:
            peak = float(torch.linalg.vector_norm(product, ord=math.inf))
            if 0 < peak < math.inf:
                self.exponent = math.frexp(peak)[1]
        if self.exponent:
            # in two steps where 2^−exponent itself may lie outside float32
            half = -self.exponent // 2 if abs(self.exponent) > 100 else 0
            product.mul_(2.0 ** (-self.exponent - half))
            if half:
                product.mul_(2.0**half)
        size = float(torch.linalg.vector_norm(product, dim=1).max())
        if not math.isfinite(size):
            raise MatrixError(
                "a product of the operator is not finite: look for NaN or infinite entries, or use a wider precision"
            )
        self.norm = max(self.norm, size)
        return product

    def start(self) -> None:
        """Continue from one random vector, in which every eigenvector has a component: see `excludes`."""
        self.seed(self.random())
        self.roots, self.log_norm, self.ended, self.first = self.T.diagonal()[:0], 0.0, False, self.size

    def excludes(self, place: float, ritz: torch.Tensor, errors: torch.Tensor, missed: float) -> bool:
        """Whether no eigenvalue is at ``place`` or beyond, except with the probability ``missed`` of a bad start.

        There is none where abs(p) exceeds ‖p(A)v‖/δ (docs/concepts/bounds.md). Components in the Ritz vectors count as
        well, as far as B is known.
        """
        if self.roots is None:
            return False
        least = missed * math.sqrt(math.pi / 2 / (self.operator.order - self.first))
        roots = self.roots if self.ended else torch.cat([self.roots, ritz])
        growth = float((place - roots).abs().log().sum()) - self.log_norm
        if not self.ended:
            growth += 0.5 * float((errors / (place - ritz)).square().sum().log1p())
        return growth > -math.log(least)

    def within(self, limits: Interval, ritz: torch.Tensor, errors: torch.Tensor, missed: float) -> bool:
        """Whether no eigenvalue is beyond the finite ``limits``, except with the probability ``missed``."""
        return all(
            self.excludes(place, ritz, errors, missed / 2)
            for place in (limits.low, limits.high)
            if math.isfinite(place) and not (self.operator.psd and place < 0)
        )

    def seed(self, row: torch.Tensor, index: int | None = None) -> None:
        """Continue from ``row`` (1, n), overwritten, in place of the next row."""
        floor = ROUNDING * torch.finfo(self.dtype).eps * float(torch.linalg.vector_norm(row, dim=1))
        _, remainder = self._orthonormalized(row, floor, [(0, self.size)] * 2)
        self.B = torch.zeros(len(self.next), self.size, dtype=torch.float64, device="cpu")
        if index is not None:
            self.B[:, index] = remainder
        self.fixed, self.roots = self.size, None

    def expand(self) -> None:
        """Append the next row to the rows, and multiply it."""
        start = self.size
        self.basis.append(self.next)
        self.next = self.next[:0].clone()  # the rows hold it now
        product = self.multiply(self.basis.rows[start:])
        # a product has components in its two predecessors, and in others only rounding; after a restart in all
        local = self.size - 2
        passes = [(max(local, 0) if local > self.fixed else 0, self.size), (0, self.size)]
        floor = self.rounding * self.norm
        C, remainder = self._orthonormalized(product, floor, passes)
        T = torch.zeros(self.size, self.size, dtype=torch.float64, device="cpu")
        T[:start, :start] = self.T
        T[start:] = C
        T[:, start:] = C.T
        T[start:, start:] = (C[:, start:] + C[:, start:].T) / 2
        self.T = T
        self.B = torch.zeros(len(self.next), self.size, dtype=torch.float64, device="cpu")
        self.B[:, start] = remainder
        if self.roots is not None and not self.ended:
            # the remainder is known up to rounding
            self.log_norm += math.log(max(remainder, floor) or 1.0)
            if self.invariant or not len(self.next):
                self.ended = True
                self.roots = torch.cat([self.roots, torch.linalg.eigvalsh(self.T[self.first :, self.first :])])

    def _orthonormalized(
        self, row: torch.Tensor, floor: float, passes: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, float]:
        """Orthonormalize ``row`` (1, n) in place against the rows; it is the next row W then.

        The row becomes C V + s W with W of norm 1; ``passes`` are ranges of rows to project off, once more after
        cancellation. A row that depends on the others, with s up to ``floor``, is replaced by a random direction, with
        s = 0. Returned are C (1, j), float64 on the host, and s; W is (0, n) if V spans the whole space.
        """
        basis, C = self.basis, row.new_zeros(1, self.size)
        share = C
        for start, stop in passes:
            share = basis.project_(row, start, stop)
            C[:, start:stop] += share
        size = torch.linalg.vector_norm(row, dim=1)
        # compared with the norm before the last pass, by Pythagoras
        if bool(3 * size**2 < share.square().sum(1)):
            C[:, start:stop] += basis.project_(row, start, stop)
            size = torch.linalg.vector_norm(row, dim=1)
        C, remainder, self.next = C.double().cpu(), float(size), row
        self.invariant = self.complete or not remainder > floor
        if self.complete:
            self.next = row[:0]
        elif self.invariant:
            torch.randn(row.shape, generator=self.fresh, dtype=row.dtype, device=row.device, out=row)
            for _ in range(3):
                row.div_(torch.linalg.vector_norm(row))
                basis.project_(row)
            row.div_(torch.linalg.vector_norm(row))
        else:
            row.div_(remainder)
        return C, 0.0 if self.invariant else remainder

    def estimates(self, Y: torch.Tensor) -> torch.Tensor:
        """Norms ‖B y‖ for the columns of Y (j, c): the residual norms if the rows are of one Krylov space."""
        return torch.linalg.vector_norm(self.B @ Y, dim=0)

    def restart(self, Y: torch.Tensor) -> None:
        """Continue with the rows YᵀV for orthonormal Y (j, kept)."""
        T = Y.T @ self.T @ Y
        if self.roots is not None and not self.ended:
            others = torch.linalg.qr(Y, mode="complete").Q[:, Y.shape[1] :]
            self.roots = torch.cat([self.roots, torch.linalg.eigvalsh(others.T @ self.T @ others)])
        self.basis.rotate_(Y)
        self.T, self.B = (T + T.T) / 2, self.B @ Y
        self.fixed = self.size

    def truncate(self, values: torch.Tensor) -> None:
        """Keep the first rows alone, which are Ritz vectors of Ritz values ``values``."""
        self.basis.size = len(values)
        self.T, self.B = torch.diag(values), self.B[:, : len(values)]

    def measure(self, count: int, target: float) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, int] | None]:
        """Multiply the first ``count`` rows u, and discard the next row: `seed` must follow."""
        values, norms = torch.empty(2, count, dtype=torch.float64, device="cpu")
        self.next = self.next[:0].clone()
        left: tuple[torch.Tensor, int] | None = None
        for index in range(count):
            rows = self.basis.rows[index : index + 1]
            residual = self.multiply(rows)
            u, r = rows[0], residual[0]
            theta = torch.dot(u, r)
            r.sub_(theta * u)
            norm = torch.linalg.vector_norm(r)
            values[index], norms[index] = theta, norm
            if left is None and norm > target:
                left = residual, index
        return values, norms, left


def closest(places: Callable[[float], Interval], unit: float, holds: Callable[[Interval], bool]) -> Interval:
    """Closest of the limits ``places(d)`` that hold, for d a power of √2 times ``unit``."""
    if unit == 0:  # the operator is
        return places(0.0)
    steps = [2.0 ** (n / 2) * unit for n in range(-60, 400)]
    return places(steps[min(bisect_left(steps, True, key=lambda d: holds(places(d))), len(steps) - 1)])

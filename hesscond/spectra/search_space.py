"""Search spaces for eigenvectors of the smallest |λ|: V, its image AV, and approximations from both.

Vectors are rows of length n on the operator's device; the projected problems are small, on the host, in float64.
"""

from __future__ import annotations

import math

import torch

from hesscond.errors import MatrixError
from hesscond.operators import ApproximateInverse, Subspace, SymmetricOperator
from hesscond.spectra.krylov import Basis

#: Approximations with ‖Au‖ up to this multiple of one another may belong to λ and −λ.
SIMILAR = 1.1


class CountedProducts(SymmetricOperator):
    """Operator 2⁻ᵉ A with its products counted and checked; e makes the norm about 1, whatever the precision."""

    def __init__(self, operator: SymmetricOperator) -> None:
        super().__init__(operator.order, operator.dtype, operator.device)
        self.operator, self.psd = operator, operator.psd
        self.count, self.exponent, self.norm = 0, 0, 0.0
        self._rounding = operator.rounding  # may cost products when it is first asked for

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """A V as the operator gives it, counted and checked."""
        self.count += vectors.shape[1]
        product = self.operator.multiply(vectors)
        if not math.isfinite(float(torch.linalg.vector_norm(product, ord=math.inf))):
            raise MatrixError(
                "a product of the operator is not finite: look for NaN or infinite entries, or use a wider precision"
            )
        return product

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply 2⁻ᵉ A to ``rows`` (p, n), in their precision."""
        product = self.multiply(rows.T.to(self.dtype)).T.to(rows.dtype).contiguous()
        # in two steps, as 2⁻ᵉ itself may lie outside float32
        half = -self.exponent // 2
        return product.mul_(2.0**half).mul_(2.0 ** (-self.exponent - half))

    def images(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply 2⁻ᵉ A to unit rows, whose images give lower bounds of the norm."""
        product = self.rows(rows)
        self.norm = max(self.norm, float(torch.linalg.vector_norm(product, dim=1).max()))
        return product

    @property
    def error(self) -> float:
        """Bound of the rounding of the image of a unit vector."""
        return self.rounding * self.norm

    @property
    def rounding(self) -> float:
        return self._rounding


class Excluded:
    """Subspace that a search leaves out: a known null space, and null vectors found during the search."""

    def __init__(self, known: Subspace | None, order: int, device: torch.device) -> None:
        self.known, self.vectors = known, torch.empty(0, order, dtype=torch.float64, device=device)
        self.residuals: list[float] = []  # ‖Av‖ of each row

    @property
    def dimension(self) -> int:
        """Dimension of the excluded subspace."""
        return len(self.vectors) + (0 if self.known is None else self.known.dimension)

    def remove(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` (p, n) without their components in the excluded subspace."""
        if self.known is not None:
            rows = self.known.remove(rows.T).T
        if len(self.vectors):
            rows = rows - (rows @ self.vectors.T) @ self.vectors
        return rows

    def add(self, row: torch.Tensor, residual: float) -> None:
        """Exclude a unit vector (1, n) as well."""
        self.vectors = torch.cat([self.vectors, row])
        self.residuals.append(residual)


class RitzSpace:
    """Space of orthonormal V with W = AV and H = VᵀAV: Ritz values from the smallest |θ| up.

    For A ≥ 0 the j-th smallest Ritz value is an upper bound of the j-th smallest eigenvalue, and falls with every
    vector that joins (Courant, Fischer).
    """

    def __init__(self, capacity: int, order: int, device: torch.device) -> None:
        self.capacity = capacity
        self.V, self.W = (Basis(capacity, order, dtype=torch.float64, device=device) for _ in range(2))
        self.H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")

    @property
    def size(self) -> int:
        """Vectors in V."""
        return self.V.size

    def append(self, v: torch.Tensor, w: torch.Tensor) -> None:
        """Append ``v`` (1, n), a unit vector orthogonal to V, with ``w`` = Av."""
        self.V.append(v)
        self.W.append(w)
        self.H = bordered(self.H, inner(self.V, w), inner(self.V, w)[:-1])

    def pairs(self, noise: float = 0.0) -> torch.Tensor:
        """Return coefficients Y (m, m) in V of the approximate eigenvectors, unit columns, smallest |θ| first."""
        values, Y = torch.linalg.eigh((self.H + self.H.T) / 2)
        Y = Y[:, values.abs().argsort(stable=True)]
        small = int((values.abs() <= noise).sum())
        if small > 1:
            # Ritz values of the size of round-off decide nothing; the singular values of the images do
            R = torch.linalg.qr(combined(Y[:, :small], self.W).T, mode="r").R.double().cpu()
            Y[:, :small] = Y[:, :small] @ torch.linalg.svd(R).Vh.flip(0).T
        return Y

    def vectors(self, Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return U = YᵀV and AU as rows."""
        return combined(Y, self.V), combined(Y, self.W)

    def restart(self, Y: torch.Tensor) -> torch.Tensor:
        """Continue with V C for an orthonormal basis C (m, kept) of the span of the columns of Y, and return C."""
        C = torch.linalg.qr(Y).Q
        self.V.rotate_(C)
        self.W.rotate_(C)
        self.H = C.T @ self.H @ C
        return C


class SingularSpace(RitzSpace):
    """Space of orthonormal V with AV = QR, for an indefinite A: approximations from the smallest ‖Au‖ up.

    The j-th smallest singular value of AV is an upper bound of the j-th smallest |λ|, and falls with every vector that
    joins (Courant and Fischer, for A²). Singular vectors mix λ and −λ, which Rayleigh-Ritz in groups of similar ‖Au‖
    takes apart. Since R is never squared, they are as accurate as the products. W holds Q, and H is QᵀV.
    """

    def __init__(self, capacity: int, order: int, device: torch.device) -> None:
        super().__init__(capacity, order, device)
        self.R = torch.zeros(0, 0, dtype=torch.float64, device="cpu")

    def append(self, v: torch.Tensor, w: torch.Tensor) -> None:
        """Append ``v`` to V, and ``w`` = Av, orthonormalized against Q."""
        self.V.append(v)
        q, size = w.clone(), float(torch.linalg.vector_norm(w))
        column = self.W.project_(q) + self.W.project_(q)
        rest = float(torch.linalg.vector_norm(q))
        if rest <= 4 * torch.finfo(q.dtype).eps * size or rest == 0:
            q, rest = self._another(q), 0.0
        q = q / torch.linalg.vector_norm(q)
        self.W.project_(q)  # what the cancellation brought back
        self.W.append(q / torch.linalg.vector_norm(q))
        last = torch.cat([column[0].double().cpu(), torch.tensor([rest], dtype=torch.float64, device="cpu")])
        self.R = bordered(self.R, last, torch.zeros(len(self.R), dtype=torch.float64, device="cpu"))
        self.H = bordered(self.H, inner(self.W, v), inner(self.V, self.W.rows[-1:])[:-1])

    def _another(self, q: torch.Tensor) -> torch.Tensor:
        """Random direction orthogonal to Q, in place of an image that depends on the others."""
        for i in range(self.W.size + 1):
            q = torch.zeros_like(q)
            q[0, i] = 1
            self.W.project_(q)
            if float(torch.linalg.vector_norm(q)) > 0.5 / math.sqrt(self.W.size + 1):
                break
        return q

    def pairs(self, noise: float = 0.0) -> torch.Tensor:
        _, sizes, right = torch.linalg.svd(self.R)
        sizes, Y = sizes.flip(0), right.flip(0).T
        start = 0
        while start < len(sizes):
            cluster = slice(start, start + int((sizes[start:] <= SIMILAR * sizes[start]).sum()))
            start = max(cluster.stop, start + 1)
            if cluster.stop - cluster.start > 1:
                inside = Y[:, cluster].T @ self.H.T @ (self.R @ Y[:, cluster])
                values, Z = torch.linalg.eigh((inside + inside.T) / 2)
                Y[:, cluster] = Y[:, cluster] @ Z[:, values.abs().argsort(stable=True)]
        return Y

    def vectors(self, Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return U = YᵀV and AU = (RY)ᵀQ as rows."""
        return combined(Y, self.V), combined(self.R @ Y, self.W)

    def restart(self, Y: torch.Tensor) -> torch.Tensor:
        C = torch.linalg.qr(Y).Q
        rotation, self.R = torch.linalg.qr(self.R @ C)
        self.V.rotate_(C)
        self.W.rotate_(rotation)
        self.H = rotation.T @ self.H @ C
        return C


def orthonormal(row: torch.Tensor, excluded: Excluded, basis: Basis) -> torch.Tensor | None:
    """Orthonormalize ``row`` (1, n) against the excluded subspace and a basis; None if nothing is left of it."""
    size = float(torch.linalg.vector_norm(row))
    if not (math.isfinite(size) and size > 0):
        return None
    row, left = row / size, 1.0
    for _ in range(5):
        row = excluded.remove(row)
        basis.project_(row)
        size = float(torch.linalg.vector_norm(row))
        left *= size
        if left <= 100 * torch.finfo(row.dtype).eps:
            return None
        row = row / size
        if size > 0.7:  # twice is enough
            break
    return row


def random_rows(
    count: int, like: torch.Tensor, inverse: ApproximateInverse | None, fresh: torch.Generator, shift: float = 0.0
) -> torch.Tensor:
    """Random vectors (count, n) of the type of ``like`` (j, n), multiplied by (M − shift)⁻¹ if M is given."""
    rows = torch.randn(count, like.shape[1], generator=fresh, dtype=like.dtype, device=like.device)
    if inverse is None:
        return rows
    solved = inverse.solve(rows.T, shift).T.to(rows)
    return solved if bool(torch.isfinite(solved).all()) else rows


def lowest(
    inverse: ApproximateInverse, row: torch.Tensor, excluded: Excluded, steps: int
) -> tuple[torch.Tensor, float]:
    """Approximate eigenvector (1, n) of M's smallest eigenvalue, and an upper bound of it, by Lanczos with M⁻¹."""
    basis = Basis(steps, row.shape[1], dtype=row.dtype, device=row.device)
    T = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
    v = orthonormal(row, excluded, basis)
    while v is not None and basis.size < steps:
        basis.append(v)
        solved = inverse.solve(v.T).T.to(v)
        column = inner(basis, solved)
        T = bordered(T, column, column[:-1])
        v = orthonormal(solved, excluded, basis)
    if not len(T) or not bool(torch.isfinite(T).all()):
        return row, 0.0
    values, Y = torch.linalg.eigh(T)
    largest = float(values[-1])
    return (combined(Y[:, -1:], basis), 1 / largest) if largest > 0 else (row, 0.0)


def inner(basis: Basis, row: torch.Tensor) -> torch.Tensor:
    """Inner products (m,) of ``row`` (1, n) with the rows of a basis, float64 on the host."""
    return (basis.rows @ row[0]).double().cpu()


def combined(Y: torch.Tensor, basis: Basis) -> torch.Tensor:
    """Yᵀ V (p, n) for the rows V of a basis."""
    return Y.T.to(basis.rows) @ basis.rows


def bordered(matrix: torch.Tensor, column: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """``matrix`` (m, m) with another last column (m + 1,) and the rest (m,) of a last row."""
    return torch.cat([torch.cat([matrix, row[None]]), column[:, None]], 1)


def padded(Y: torch.Tensor, rows: int) -> torch.Tensor:
    """Y (m, 1) with zeros below, (rows, 1): the same vector in a space that has grown."""
    return torch.cat([Y, Y.new_zeros(rows - len(Y), Y.shape[1])])


def complement(y: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis of the complement of ``y`` (m, 1) in the span of ``y`` and ``others`` (m, m − 1)."""
    return torch.linalg.qr(torch.cat([y, others], 1)).Q[:, 1:]

"""Matrices known by their products with vectors, and operators composed of others.

They are dense and diagonal matrices, sums, multiples, congruences, and approximate inverses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal

from hesscond.errors import MatrixError, out_of_memory
from hesscond.operators.subspace import Subspace

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

Result = TypeVar("Result")

#: Rounding of one product, in units of round-off of the operator's precision, unless an operator knows better.
ROUNDING = 32.0

#: Factor by which a rounding that was measured from products is enlarged.
MARGIN = 64.0

#: Factor by which norms of parts are enlarged, since estimated norms are lower bounds.
SAFETY = 2.0

#: Products that `ritz_range` makes.
STEPS = 8


class LinearOperator(ABC):
    """Real matrix A (m, n): ``A @ v`` for a vector (n,) or a block of vectors (n, k).

    A subclass calls ``super().__init__`` and defines `multiply`, and `multiply_adjoint` if A has an adjoint. Products
    are computed in ``A.dtype`` on ``A.device``, whatever the precision of ``v``, and have the dtype of ``A``.

    Attributes
    ----------
    shape, dtype, device
        Shape, dtype and device of the matrix.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        if not dtype.is_floating_point:
            raise MatrixError(f"an operator is real and of a floating-point type, not {dtype}: convert it to float64")
        if min(shape) < 1:
            raise MatrixError(f"an operator has at least one row and one column, not the shape {shape}")
        # as a tensor says it: "cuda" alone and "cuda:0" are one device that do not compare equal
        self.shape, self.dtype, self.device = shape, dtype, torch.empty(0, device=device).device

    @abstractmethod
    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product A V for V (n, k), of the dtype and device of A. V is not changed and the result is new."""

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product Aᵀ V for V (m, k).

        Raises
        ------
        MatrixError
            The operator has no adjoint.
        """
        raise MatrixError(f"{type(self).__name__} has no adjoint")

    @property
    def rounding(self) -> float:
        """Bound ε such that a product is within ε ‖A‖ ‖v‖ of the exact one.

        Where terms may cancel, as in a difference, it depends on norms that are estimated from a few products when this
        is first read.
        """
        return ROUNDING * torch.finfo(self.dtype).eps

    @property
    def error(self) -> float:
        """Bound, in the 2-norm, of the error of the matrix itself, if it approximates another; its products have 0."""
        return 0.0

    @property
    def T(self) -> LinearOperator:
        """Adjoint Aᵀ."""
        return Adjoint(self)

    def __matmul__(self, vectors: torch.Tensor) -> torch.Tensor:
        if not isinstance(vectors, torch.Tensor):
            raise MatrixError(
                f"an operator multiplies torch tensors, not {type(vectors).__name__}: use to_scipy() for numpy arrays"
            )
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.shape[1]:
            raise MatrixError(
                f"an operator of shape {self.shape} multiplies vectors ({self.shape[1]},) or ({self.shape[1]}, k), "
                f"not {tuple(vectors.shape)}"
            )
        if vectors.device != self.device:
            raise MatrixError(f"the operator is on device '{self.device}' but the vectors on '{vectors.device}'")
        if vectors.is_complex():
            raise MatrixError("an operator multiplies real vectors: take the real and the imaginary part one by one")
        block = vectors.to(self.dtype)
        if vectors.numel() == 0:
            return block.new_zeros(self.shape[0], 0)
        if vectors.ndim == 1:
            return self.multiply(block[:, None])[:, 0]
        parts = in_halves(lambda part: self.multiply(block[:, part]), block.shape[1])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def to_dense(self) -> torch.Tensor:
        """Matrix (m, n), from products with the columns of the identity."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start, block in identity_blocks(self.shape[1], self.dtype, self.device):
            dense[:, start : start + block.shape[1]] = self @ block
        return dense

    def to_scipy(self) -> ScipyOperator:
        """Operator for scipy, which takes and returns numpy arrays on the host (half precision becomes float32)."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        kept = torch.promote_types(self.dtype, torch.float32)

        def product(A: LinearOperator, array: np.ndarray) -> np.ndarray:
            # a copy: torch shares no memory that may not be written to, and scipy hands out some
            given = torch.from_numpy(np.array(array)).to(self.device)
            return (A @ given).to("cpu", kept).numpy()

        return ScipyOperator(
            self.shape,
            dtype=torch.empty(0, dtype=kept, device="cpu").numpy().dtype,
            matvec=lambda v: product(self, v.reshape(-1)),
            rmatvec=lambda v: product(self.T, v.reshape(-1)),
            matmat=lambda v: product(self, v),
            rmatmat=lambda v: product(self.T, v),
        )


class Adjoint(LinearOperator):
    """Adjoint Aᵀ of an operator A."""

    def __init__(self, A: LinearOperator) -> None:
        super().__init__((A.shape[1], A.shape[0]), A.dtype, A.device)
        self.A = A

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A.multiply_adjoint(vectors)

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A.multiply(vectors)

    @property
    def rounding(self) -> float:
        return self.A.rounding

    @property
    def T(self) -> LinearOperator:
        return self.A


class SymmetricOperator(LinearOperator):
    """Real symmetric matrix (n, n), with properties that are known without products.

    Attributes
    ----------
    psd
        Whether it is known to be positive semidefinite; False: not known.
    """

    psd: bool = False
    # numpy would take the operator for an array of objects; with None, 2.0 * A is evaluated here for numpy numbers too
    __array_ufunc__ = None

    def __init__(self, order: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__((order, order), dtype, device)

    @property
    def order(self) -> int:
        """Order n."""
        return self.shape[0]

    @property
    def null_space(self) -> Subspace | None:
        """Subspace of the null space that is known without a product; None: none is known."""
        return None

    @property
    def T(self) -> SymmetricOperator:
        return self

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.multiply(vectors)

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """Smallest and largest Ritz value of a few Lanczos steps: the spectrum reaches at least that far.

        The products are computed when this is first read (`ritz_range`).
        """
        return ritz_range(self)

    @property
    def norm_bound(self) -> float:
        """Largest |θ| of `extremes`: a lower bound of ‖A‖₂, nearly always within a factor of two."""
        return max(abs(value) for value in self.extremes)

    def shifted(self, shift: float) -> SymmetricOperator:
        """Operator A − shift·I."""
        return Shifted(self, shift)

    def __add__(self, other: object) -> SymmetricOperator:
        return self._plus(1.0, other)

    __radd__ = __add__

    def __sub__(self, other: object) -> SymmetricOperator:
        return self._plus(-1.0, other)

    def __mul__(self, factor: object) -> Sum:
        number = as_number(factor)
        return NotImplemented if number is None else self._times(number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> Sum:
        number = as_number(divisor)
        if number is None:
            return NotImplemented
        if number == 0:
            raise MatrixError("an operator cannot be divided by zero")
        return self._times(1 / number)

    def __neg__(self) -> Sum:
        return self._times(-1.0)

    def _plus(self, factor: float, other: object) -> SymmetricOperator:
        """A ± B, for a number B that multiple of I."""
        if isinstance(other, torch.Tensor) and other.ndim == 2:
            other = Dense(other.to(self.device, self.dtype))
        if isinstance(other, SymmetricOperator):
            return Sum([(1.0, self), (factor, other)])
        number = as_number(other)
        return NotImplemented if number is None else self.shifted(-factor * number)

    def _times(self, factor: float) -> Sum:
        return Sum([(factor, self)])


def as_number(value: object) -> float | None:
    """Real number of Python, numpy or torch as a float; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    return float(value) if isinstance(value, Real) else None


def agreeing(operators: Sequence[LinearOperator], what: str) -> None:
    """Raise a MatrixError without operators, or if they differ in precision or device."""
    if not operators:
        raise MatrixError(f"{what} needs at least one operator")
    first = operators[0]
    for other in operators:
        if (other.dtype, other.device) != (first.dtype, first.device):
            raise MatrixError(
                f"{what} needs operators of one dtype on one device: {first.dtype} on '{first.device}' and "
                f"{other.dtype} on '{other.device}' are not"
            )


def identity_blocks(order: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield up to 64 columns of the identity (order, order) at a time, with the number of the first one."""
    for start in range(0, order, 64):
        block = torch.zeros(order, min(64, order - start), dtype=dtype, device=device)
        block[start : start + 64].fill_diagonal_(1)
        yield start, block


def ritz_range(A: SymmetricOperator, steps: int = STEPS, *, seed: int = 0) -> tuple[float, float]:
    """Smallest and largest Ritz value of a few Lanczos steps from a random vector.

    Both lie within the range of the spectrum. There is no reorthogonalization, for which three vectors suffice: this
    produces copies of eigenvalues, but does not affect the extreme Ritz values (Paige 1980). For k steps on a positive
    semidefinite A the largest falls short of ‖A‖ by 0.103·(ln(n(k−1)⁴)/(k−1))² on average, however close the
    eigenvalues are (Kuczyński and Woźniakowski, SIAM J. Matrix Anal. Appl. 13, 1992, theorem 3.2).

    Parameters
    ----------
    A
        The operator.
    steps
        Largest number of products.
    seed
        Seed of the random start vector.
    """
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(A.order, 1, generator=generator, dtype=torch.float64, device="cpu")
    current = (vector / torch.linalg.vector_norm(vector)).to(A.device, A.dtype)
    previous, beta = torch.zeros_like(current), 0.0
    alphas: list[float] = []
    betas: list[float] = []
    exponent = 0
    for step in range(min(steps, A.order)):
        image = A.multiply(current)
        if step == 0:
            # squares of numbers that are far from 1 overflow or underflow
            exponent = math.frexp(float(image.abs().max()))[1]
        half = -exponent // 2
        image = (image * 2.0**half).mul_(2.0 ** (-exponent - half))
        alphas.append(float((current * image).sum(dtype=torch.float64)))
        image.sub_(current, alpha=alphas[-1]).sub_(previous, alpha=beta)
        beta = float(torch.linalg.vector_norm(image, dtype=torch.float64))
        if beta <= torch.finfo(A.dtype).eps * max(map(abs, [*alphas, *betas])):
            break
        betas.append(beta)
        previous, current = current, image.div_(beta)
    values = eigvalsh_tridiagonal(np.array(alphas), np.array(betas[: len(alphas) - 1]))
    return math.ldexp(float(values[0]), exponent), math.ldexp(float(values[-1]), exponent)


def amplified(rounding: float, magnitude: float, norm: float) -> float:
    """Rounding of an operator of a ``norm`` whose products pass through quantities of a larger ``magnitude``."""
    return rounding * max(1.0, SAFETY * magnitude / norm) if norm > 0 else 1.0


def dot_rounding(terms: int, dtype: torch.dtype) -> float:
    """Rounding of dot products: √n·eps, as errors grow in practice (Higham, Mary 2019), at least ROUNDING·eps."""
    return max(ROUNDING, math.sqrt(terms)) * torch.finfo(dtype).eps


def real_tensor(A: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return A, detached; raise MatrixError unless it is finite, floating-point and has ``dimensions`` dimensions."""
    if A.ndim != dimensions or not A.dtype.is_floating_point:
        raise MatrixError(
            f"expected a real tensor of a floating-point type with {dimensions} dimension{'s'[: dimensions - 1]}, "
            f"not one of shape {tuple(A.shape)} and {A.dtype}"
        )
    if not bool(A.isfinite().all()):
        raise MatrixError("the matrix has NaN or infinite entries: its products are not defined")
    return A.detach()


class Matrix(LinearOperator):
    """Dense matrix A (m, n)."""

    def __init__(self, A: torch.Tensor) -> None:
        self.A = real_tensor(A, 2)
        super().__init__((A.shape[0], A.shape[1]), A.dtype, A.device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A @ vectors

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A.T @ vectors

    @property
    def rounding(self) -> float:
        return dot_rounding(max(self.shape), self.dtype)


class Dense(SymmetricOperator):
    """Dense symmetric matrix A (n, n).

    Raises
    ------
    MatrixError
        A is not exactly symmetric.
    """

    def __init__(self, A: torch.Tensor, *, psd: bool = False) -> None:
        self.A, self.psd = real_tensor(A, 2), psd
        if A.shape[0] != A.shape[1]:
            raise MatrixError(f"a symmetric matrix is square, this one has the shape {tuple(A.shape)}")
        if not torch.equal(self.A, self.A.T):
            raise MatrixError("the matrix is not symmetric: take (A + Aᵀ)/2 if it should be")
        super().__init__(len(A), A.dtype, A.device)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A @ vectors

    @property
    def rounding(self) -> float:
        return dot_rounding(self.order, self.dtype)

    def to_dense(self) -> torch.Tensor:
        return self.A.clone()


class Diagonal(SymmetricOperator):
    """Diagonal matrix diag(d) for d (n,)."""

    def __init__(self, d: torch.Tensor) -> None:
        self.d = real_tensor(d, 1)
        super().__init__(len(d), d.dtype, d.device)
        self.psd = bool((self.d >= 0).all())

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.d[:, None] * vectors

    @property
    def rounding(self) -> float:
        return torch.finfo(self.dtype).eps


class Gram(SymmetricOperator):
    """Positive semidefinite operator FᵀF for F (m, n), which is never formed."""

    psd = True

    def __init__(self, F: LinearOperator) -> None:
        super().__init__(F.shape[1], F.dtype, F.device)
        self.F = F

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.F.multiply_adjoint(self.F.multiply(vectors))

    @property
    def rounding(self) -> float:
        """Rounding of two products: ‖FᵀF‖ = ‖F‖², so nothing cancels."""
        return 2 * self.F.rounding


class Sum(SymmetricOperator):
    """Linear combination Σ c_i A_i of operators of one order. Terms that are sums are expanded."""

    def __init__(self, terms: Sequence[tuple[float, SymmetricOperator]]) -> None:
        agreeing([term for _, term in terms], "a sum")
        first = terms[0][1]
        for factor, term in terms:
            if term.shape != first.shape:
                raise MatrixError(f"operators of the shapes {first.shape} and {term.shape} cannot be added")
            if not math.isfinite(factor):
                raise MatrixError(f"an operator is multiplied by a finite number, not by {factor}")
        super().__init__(first.order, first.dtype, first.device)
        self.terms: list[tuple[float, SymmetricOperator]] = []
        for factor, term in terms:
            self.terms += [(factor * c, A) for c, A in term.terms] if isinstance(term, Sum) else [(factor, term)]
        self.psd = all(term.psd and factor >= 0 for factor, term in self.terms)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        factor, term = self.terms[0]
        total = term.multiply(vectors).mul_(factor)
        for factor, term in self.terms[1:]:
            total.add_(term.multiply(vectors), alpha=factor)
        return total

    @property
    def rounding(self) -> float:
        """Rounding of the terms, larger where they cancel.

        Positive semidefinite terms do not cancel: the sum is no smaller than any of them.
        """
        most = max(term.rounding for _, term in self.terms)
        if len(self.terms) == 1 or self.psd:
            return most * len(self.terms)
        return amplified(most, sum(abs(factor) * term.norm_bound for factor, term in self.terms), self.norm_bound)

    @property
    def null_space(self) -> Subspace | None:
        """Null space of the terms, if all know the same one and no factor is zero; otherwise None."""
        known = self.terms[0][1].null_space
        return known if all(factor != 0 and term.null_space is known for factor, term in self.terms) else None


class Shifted(SymmetricOperator):
    """Operator A − shift·I."""

    def __init__(self, A: SymmetricOperator, shift: float) -> None:
        if not math.isfinite(shift):
            raise MatrixError(f"an operator is shifted by a finite number, not by {shift}")
        super().__init__(A.order, A.dtype, A.device)
        self.A, self.shift = A, float(shift)
        self.psd = A.psd and shift <= 0

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A.multiply(vectors).sub_(vectors, alpha=self.shift)

    def shifted(self, shift: float) -> SymmetricOperator:
        """Operator A shifted by the sum of both shifts."""
        return Shifted(self.A, self.shift + shift)

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """Extremes of A, shifted: no product is needed."""
        low, high = self.A.extremes
        return low - self.shift, high - self.shift

    @property
    def rounding(self) -> float:
        """Rounding of A, larger where the shift cancels large parts of A."""
        if self.psd or self.shift == 0:
            return 2 * self.A.rounding
        return amplified(self.A.rounding, self.A.norm_bound + abs(self.shift), self.norm_bound)


class Congruence(SymmetricOperator):
    """Congruence PᵀAP for P (n, k): the Hessian in the coordinates z of θ = P z."""

    def __init__(self, A: SymmetricOperator, P: LinearOperator) -> None:
        if P.shape[0] != A.order:
            raise MatrixError(f"P of shape {P.shape} does not fit an operator of order {A.order}: PᵀAP is not defined")
        agreeing([A, P], "PᵀAP")
        super().__init__(P.shape[1], A.dtype, A.device)
        self.A, self.P, self.psd = A, P, A.psd

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.P.multiply_adjoint(self.A.multiply(self.P.multiply(vectors)))

    @property
    def error(self) -> float:
        return self.A.error * self.stretch if self.A.error else 0.0

    @property
    def stretch(self) -> float:
        """Bound of ‖P‖²."""
        return Gram(self.P).norm_bound

    @property
    def rounding(self) -> float:
        """Rounding of the three products times ‖P‖²‖A‖/‖PᵀAP‖: the better P conditions A, the more digits are lost."""
        return amplified(self.A.rounding + 2 * self.P.rounding, self.A.norm_bound * self.stretch, self.norm_bound)


class ApproximateInverse(ABC):
    """Symmetric M ≈ A whose shifted systems are solved at a fraction of the cost of a product with A.

    Attributes
    ----------
    order
        Order n.
    """

    order: int

    @abstractmethod
    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Solution (M − shift)⁻¹ V for V (n, k), in its dtype; bounded where M − shift is nearly singular.

        The known null space of A is mapped to zero.
        """


class DiagonalInverse(ApproximateInverse):
    """Inverse of a diagonal M (n,), whose shifted entries are kept at or above 1e-14 times the largest |M_i|."""

    def __init__(self, diagonal: torch.Tensor) -> None:
        self.order, self._diagonal = len(diagonal), diagonal

    def solve(self, vectors: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        denominators = self._diagonal.to(vectors) - shift
        smallest = 1e-14 * float(self._diagonal.abs().max()) or 1.0
        signs = torch.where(denominators < 0, -1.0, 1.0).to(vectors)
        return vectors / (signs * denominators.abs().clamp_min(smallest))[:, None]


def in_halves(task: Callable[[slice], Result], count: int, start: int = 0) -> list[Result]:
    """Results of ``task`` for ``count`` items from ``start`` on: all at once, or halves, quarters, … that fit."""
    try:
        return [task(slice(start, start + count))]
    except (MemoryError, RuntimeError) as error:
        if count < 2 or not out_of_memory(error):
            raise
    # the frames of the exception are gone now, and with them what they held
    half = count // 2
    return in_halves(task, half, start) + in_halves(task, count - half, start + half)

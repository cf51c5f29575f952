"""Bounds of λ_max and lower bounds of κ within a given number of products, for the largest operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hesscond import causes
from hesscond.errors import ConfigError
from hesscond.operators import SymmetricOperator
from hesscond.spectra import eigen, krylov
from hesscond.spectra.condition import ConditionNumber, zero_matrix

#: Number of products that measure the rounding of products, and of products with the two vectors that are found.
MEASURING, FINAL = 3, 2
#: Least number of products.
LEAST_PRODUCTS = 10
#: Least number of vectors of length n: four rows, a product before and after its conversion, the next row, two for the
#: rotation at a restart, and the flattest vector so far.
LEAST_VECTORS = 10
#: Entries that are summed in float64 at a time.
CHUNK = 2**22
#: Residuals up to this share of the norm are called settled.
SETTLED = 1e-4
#: Probability that an eigenvalue lies beyond the interval of the largest one.
MISSED = 1e-4


@dataclass(frozen=True)
class Bounded:
    """Bounds of an operator's condition number and norm.

    Attributes
    ----------
    condition
        Lower bound of κ, which is never resolved.
    top
        Eigenvalue of largest |λ|. Up to rounding, ‖A‖₂ is certainly no smaller than the end of its interval that is
        nearer to zero; it is no larger than the other end except with a probability of 1e-4 over random starts
        (`Krylov.excludes`).
    """

    condition: ConditionNumber
    top: eigen.EigenResult


#: Least quotient ‖Au‖²/|uᵀAu| so far, and its u.
Flattest = tuple[float, torch.Tensor | None]


@dataclass(frozen=True)
class Quotients:
    """Quotients from one product with an operator, in float64: θ = uᵀAu/uᵀu, ‖Au‖/‖u‖, and ‖Au − θu‖/‖u‖."""

    theta: float
    size: float
    residual: float

    def smallest(self, error: float) -> float:
        """Upper bound of the smallest nonzero |λ|, if the product is known up to ``error``; infinite: none."""
        safe = abs(self.theta) - error
        # this order of the operations avoids unnecessary overflow
        return (self.size + error) / safe * (self.size + error) if safe > 0 else math.inf


def bounded_condition(
    operator: SymmetricOperator,
    products: int,
    *,
    error: float = 0.0,
    memory: float | None = None,
    seed: int = 0,
) -> Bounded:
    """Bound λ_max, and κ from below without need of convergence, by Lanczos with a given number of products.

    Any unit vector u gives ‖A‖₂ ≥ ‖Au‖, and the smallest nonzero |λ| is ‖Au‖²/|uᵀAu| at most, whatever the null space
    and the signs (docs/concepts/bounds.md). The vectors of the largest Ritz value and of the least quotient in the
    Krylov space are multiplied once more for it; the bounds include the rounding of a product and ``error``.

    Parameters
    ----------
    operator
        A, of any symmetric kind.
    products
        Products with one vector in all: 3 that measure rounding and 2 with what was found are among them.
    error
        Bound of the distance of A from the exact operator, in the 2-norm, besides the rounding of its products.
    memory
        Bytes for vectors; if they hold fewer vectors than there are products, Lanczos is restarted.
    seed
        Seed of the random start.

    Raises
    ------
    ConfigError
        Fewer than 10 products.
    MatrixError
        ``memory`` is too small; a product is not finite.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> d = torch.cat([torch.zeros(500), torch.linspace(-1, 100, 500)]).double()
    >>> found = bounded_condition(Diagonal(d), 40)
    >>> truth = float(d.abs().max() / d.abs()[d != 0].min())
    >>> 100 < found.condition.lower <= truth, bool(found.top.lower <= 100 <= found.top.upper)
    (True, True)
    """
    refuse_few(products)

    process, flattest = iterated(operator, products - MEASURING - FINAL, memory, seed)
    return conclusion(operator, process, flattest, error)


def refuse_few(products: int) -> None:
    """Raise a ConfigError for a number of products that is too small."""
    if not isinstance(products, int) or products < LEAST_PRODUCTS:
        raise ConfigError(f"products={products} is too few for both ends of a spectrum: give {LEAST_PRODUCTS} or more")


def iterated(A: SymmetricOperator, steps: int, memory: float | None, seed: int) -> tuple[krylov.Krylov, Flattest]:
    """Krylov process after this number of products, and the flattest vector it has seen."""
    room = None if memory is None else int(memory) - A.order * A.dtype.itemsize
    rows = krylov.planned_rows(A.order, 1, basis=max(steps, 4), memory=room, dtype=A.dtype)
    fresh = torch.Generator(A.device).manual_seed(seed)
    storage = krylov.Basis(rows, A.order, dtype=A.dtype, device=A.device)
    process = krylov.Krylov(A, storage, dtype=A.dtype, fresh=fresh)
    process.start()
    flattest: Flattest = math.inf, None
    for _ in range(steps):
        if process.full:
            flattest = flatter(process, flattest)
            values, Y = torch.linalg.eigh(process.T)
            ranked = values.abs().argsort(descending=True, stable=True)
            kept = max(2, process.basis.capacity // 2)
            process.restart(Y[:, torch.cat([ranked[: kept - kept // 2], ranked[len(ranked) - kept // 2 :]])])
        process.expand()
        if process.complete:
            break
    return process, flatter(process, flattest)


def flatter(process: krylov.Krylov, best: Flattest) -> Flattest:
    """Vector of the least quotient in the space of a process, unless an earlier one has a smaller quotient."""
    squares = process.T @ process.T + process.B.T @ process.B
    quotient, y = least_quotient(process.T, squares, process.rounding * process.norm)
    return (quotient, combination(process, y)) if quotient < best[0] else best


def conclusion(A: SymmetricOperator, process: krylov.Krylov, flattest: Flattest, error: float) -> Bounded:
    """Bounds from one more product with the vectors of the largest Ritz value and of the least quotient."""
    taken = process.products + MEASURING
    exponent, unit = process.exponent or 0, process.rounding * process.norm
    norm, held = math.ldexp(process.norm, exponent), process.basis.capacity + 6
    values, Y = torch.linalg.eigh(process.T)
    first = combination(process, Y[:, values.abs().argmax()])
    if norm == 0:
        return Bounded(zero_matrix(A.order), top_result(first, Quotients(0.0, 0.0, 0.0), 0.0, 0.0, norm, taken, held))
    largest, errors = float(values.abs().max()), process.estimates(Y)
    reach = krylov.closest(
        lambda d: eigen.Interval(-largest - d, largest + d),
        unit,
        lambda limits: process.within(limits, values, errors, MISSED),
    )
    outer = math.ldexp(reach.high + unit, exponent)
    # lower bounds of the numbers of positive and negative eigenvalues: those of Ritz values (Cauchy)
    slack = unit * len(values) ** 0.5
    counts = int((values > slack).sum()), int((values < -slack).sum())
    process.basis.release(0)
    measurements = [quotients(A, u) for u in (first, flattest[1]) if u is not None]
    top, flat = measurements[0], measurements[-1]
    taken += len(measurements)
    noise = A.rounding * max(norm, top.size, flat.size) + error
    smallest = min(top.smallest(noise), flat.smallest(noise))
    low, high = max(0.0, top.size - noise), max(outer, top.size) + noise
    condition = ConditionNumber(
        value=math.inf,
        lower=max(1.0, low / smallest * (1 - 8 * torch.finfo(torch.float64).eps)),
        upper=math.inf,
        lambda_max=top.size,
        lambda_min=min(smallest, top.size),
        rank=sum(counts),
        nullity=A.order - sum(counts),
        negative=0 if A.psd else counts[1],
        cutoff=noise,
        gap=smallest / noise if noise > 0 else math.inf,
        resolved=False,
        solver=f"Lanczos, {taken} products",
        rank_decision="unresolved",
        negative_counted=A.psd,
        cause=causes.few_products(taken, A.order),
    )
    return Bounded(condition, top_result(first, top, low, high, norm, taken, held))


def top_result(
    u: torch.Tensor, measurement: Quotients, low: float, high: float, norm: float, products: int, vectors: int
) -> eigen.EigenResult:
    """Result for the eigenvalue of largest |λ|, whose size is in [low, high]."""
    # ‖Au‖ is nearer to the norm than the Rayleigh quotient
    below, theta, above = sorted(math.copysign(size, measurement.theta) for size in (low, measurement.size, high))
    lower, values, upper, residuals = torch.tensor(
        [below, theta, above, measurement.residual], dtype=torch.float64, device="cpu"
    ).split(1)
    settled = measurement.residual <= SETTLED * norm
    return eigen.EigenResult(
        eigenvalues=values,
        eigenvectors=u[:, None],
        residuals=residuals,
        lower=lower,
        upper=upper,
        settled=torch.tensor([settled], device="cpu"),
        converged=settled,
        products=products,
        norm=max(norm, measurement.size),
        null=0,
        vectors=vectors,
        message=f"what {products} products show; no search for missed eigenvalues",
    )


def combination(process: krylov.Krylov, y: torch.Tensor) -> torch.Tensor:
    """Combination Vᵀy (n,) of the rows of a process."""
    rows = process.basis.rows
    return rows.T @ y.to(rows)


def least_quotient(T: torch.Tensor, squares: torch.Tensor, noise: float) -> tuple[float, torch.Tensor]:
    """Least quotient yᵀSy/|yᵀTy| for T and S (j, j) of AV, and its y (j,), over y that exceed the ``noise``."""
    values, Q = torch.linalg.eigh(squares)
    kept = values > max(noise**2, float(values[-1]) * torch.finfo(torch.float64).eps)
    root = Q[:, kept] / values[kept].sqrt()
    _, Z = torch.linalg.eigh(root.T @ T @ root)
    Y = root @ Z
    Y = torch.cat([Y / Y.norm(dim=0), torch.linalg.eigh(T)[1]], 1)
    theta, sizes = ((Y * (T @ Y)).sum(0), (Y * (squares @ Y)).sum(0).clamp_min(0).sqrt())
    bounds = [Quotients(t, s, 0.0).smallest(noise) for t, s in zip(theta.tolist(), sizes.tolist(), strict=True)]
    index = min(range(len(bounds)), key=bounds.__getitem__)
    return bounds[index], Y[:, index]


def quotients(operator: SymmetricOperator, vector: torch.Tensor) -> Quotients:
    """Quotients from one product, computed in float64."""
    u = vector.to(operator.dtype)
    image = operator @ u
    length = math.sqrt(inner(u, u))
    theta = inner(u, image) / length / length
    size = math.sqrt(inner(image, image)) / length
    image.sub_(u, alpha=theta)
    return Quotients(theta, size, math.sqrt(inner(image, image)) / length)


def inner(x: torch.Tensor, y: torch.Tensor) -> float:
    """Inner product xᵀy with float64 sums."""
    parts = zip(x.split(CHUNK), y.split(CHUNK), strict=True)
    return float(sum(torch.dot(a.to(torch.float64), b.to(torch.float64)) for a, b in parts))

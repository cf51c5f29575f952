"""Bounds of λ_max and lower bounds of κ within a given number of products, for the largest operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hesscond.causes import few_products
from hesscond.errors import ConfigError
from hesscond.operators import SymmetricOperator
from hesscond.operators.parallel import led
from hesscond.spectra.basis import Basis, Plan, plan
from hesscond.spectra.condition import ConditionNumber, zero_matrix
from hesscond.spectra.eigen import EigenResult, Interval, quadratic
from hesscond.spectra.krylov import Krylov, closest

#: Number of products that measure the rounding of products, and of products with the two vectors that are found.
MEASURING, FINAL = 3, 2
#: Least number of products.
LEAST_PRODUCTS = 10
#: Least number of vectors of length n: three rows, a product before and after its conversion, the next row, two for the
#: rotation at a restart, and the best vector so far.
LEAST_VECTORS = 10
#: Entries that are summed in float64 at a time.
CHUNK = 2**22
#: Factor by which the assumed rounding is reduced in the choice of vectors, if they are finally measured in float64.
OPTIMISM = 16.0
#: Residuals up to this share of the norm are called settled.
SETTLED = 1e-4
#: The product in a group of entries counts as rounding up to this multiple of the average rounding.
FAINT = 16.0
#: Groups are alike if their smallest scale is no smaller than this share of their root mean square.
ALIKE = 0.1
#: Probability that an eigenvalue lies beyond the interval of the largest one.
MISSED = 1e-4
#: Two Ritz values are separate if their residuals are at most this share of half their distance.
RATIO = 1e-2
#: One in this number of products is used in the search for directions of little curvature.
FLAT = 5


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
        (`Krylov.excludes`). In float32, two eigenvalues that are closer than the rounding of a product count as one.
    """

    condition: ConditionNumber
    top: EigenResult


@dataclass(frozen=True)
class Quotients:
    """Quotients from one product with an operator, in float64: θ = uᵀAu/uᵀu, ‖Au‖/‖u‖, and the residual norm.

    Attributes
    ----------
    theta, size, residual
        θ, ‖Au‖ and ‖Au − θu‖, over ‖u‖.
    """

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
    exact: Callable[[], SymmetricOperator | None] = lambda: None,
    error: Callable[[], float] = lambda: 0.0,
    level: Callable[[torch.Tensor], torch.Tensor] | None = None,
    memory: float | None = None,
    seed: int = 0,
) -> Bounded:
    """Bound λ_max, and κ from below without need of convergence, by Lanczos with a given number of products.

    A product with any unit vector u bounds both ends of the spectrum. ‖A‖₂ ≥ ‖Au‖; and with the weights w_i = (uᵀv_i)²

        ‖Au‖² = Σ w_i λ_i² ≥ m Σ w_i abs(λ_i) ≥ m abs(uᵀAu)

    if no nonzero |λ| is smaller than m, so that the smallest nonzero |λ| is ‖Au‖²/|uᵀAu| at most, whatever the null
    space and the signs. Over a Krylov space V with AVᵀ = VᵀT + wᵀB the least of these quotients are harmonic Ritz
    values, eigenvalues of the pencil (T² + BᵀB, T) (Paige, Parlett and van der Vorst 1995, Numer. Linear Algebra Appl.
    2), the best of which in all that were seen at restarts is taken. The two vectors chosen are multiplied once more:
    their quotients are what counts, and hold whatever became of orthogonality.

    Components of u in the null space do not change its quotient, but components of large eigenvalues do. If entries
    come in groups of different scales (``level``), as those of a network's weights do, a fifth of the products is used
    for Lanczos with DAD, D_i = 1/r_i, where r_i is the root mean square of Az, with a random z, over the group of i:
    the size of the rows of A there. The best u = Dv of that space is the start with A itself. Groups that show only
    rounding are left out of it.

    Parameters
    ----------
    operator
        A, of any symmetric kind.
    products
        Products with one vector in all: 3 that measure rounding and 2 with what was found are among them.
    exact
        Function that makes the same operator in float64, with which the last two products are made; None: there is
        none.
    error
        Function that bounds the distance of A from the exact operator, in the 2-norm; called if there is none in
        float64.
    level
        Replaces entries (n,) by their means over groups of like ones (the rows of a network's weights), in place or
        not; None: there are no such groups, and the start is random.
    memory
        Bytes for vectors; if they hold fewer vectors than there are products, Lanczos is restarted.
    seed
        Seed of the random start.

    Returns
    -------
    Bounded

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

    def compute() -> Bounded:
        return Search(operator, products, level, memory, seed).finish(exact, error)

    return led(operator, compute)


def refuse_few(products: int) -> None:
    """Raise a ConfigError for a number of products that is too small."""
    if not isinstance(products, int) or products < LEAST_PRODUCTS:
        raise ConfigError(f"products={products} is too few for both ends of a spectrum: give {LEAST_PRODUCTS} or more")


class Search:
    """One call of `bounded_condition`: a Krylov process that keeps both ends at restarts, and the best vector so far.

    Until `finish`, numbers are those of the process, which has scaled the operator.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        products: int,
        level: Callable[[torch.Tensor], torch.Tensor] | None,
        memory: float | None,
        seed: int,
    ) -> None:
        A = self.operator = operator
        self.best: tuple[float, torch.Tensor] | None = None
        steps = products - MEASURING - FINAL
        # one more for the best vector
        rows = None if memory is None else int(memory) - A.order * A.dtype.itemsize
        layout = plan(A.order, 1, block=1, basis=max(steps, 4), memory=rows, dtype=A.dtype)
        self.vectors = layout.vectors + 1
        fresh = torch.Generator(A.device).manual_seed(seed)
        # besides its rows and the next one, it holds the scale, and a product before and after scaling
        few = min(max(steps // FLAT, 2), self.vectors - LEAST_VECTORS // 2)
        start, self.taken = (None, 0) if level is None else flat_start(A, level, few, fresh)
        storage = Basis(layout, A.order, 2, dtype=A.dtype, device=A.device)
        self.process = Krylov(A, storage, block=1, dtype=A.dtype, rounding=A.rounding, fresh=fresh)
        self.process.start(start)
        self._steps = steps - self.taken

    def run(self, optimism: float) -> None:
        """Expand as often as there are products."""
        process = self.process
        for _ in range(self._steps):
            if process.full:
                self.keep(optimism)
                process.restart(self.ends())
            process.expand()
            if process.complete:
                return

    def ends(self) -> torch.Tensor:
        """Ritz vectors of the largest and of the smallest |θ|, which a restart keeps."""
        values, Y = torch.linalg.eigh(self.process.T)
        ranked = values.abs().argsort(descending=True, stable=True)
        kept = max(2, self.process.basis.capacity // 2)
        return Y[:, torch.cat([ranked[: kept - kept // 2], ranked[len(ranked) - kept // 2 :]])]

    def harmonic(self, optimism: float) -> tuple[float, torch.Tensor]:
        """Least bound of the smallest nonzero |λ| over the space, and its coefficients (j,)."""
        process = self.process
        squares = process.T @ process.T + process.B.T @ process.B
        return least_quotient(process.T, squares, process.rounding * process.norm / optimism)

    def keep(self, optimism: float) -> None:
        """Remember the best vector of the space, if no earlier one was better."""
        bound, y = self.harmonic(optimism)
        if bound < (math.inf if self.best is None else self.best[0]):
            self.best = None  # one vector at a time
            parts = self.process.basis.parts()
            shares = y.to(parts[0]).split([len(part) for part in parts])
            vector = torch.zeros_like(parts[0][0])
            for part, share in zip(parts, shares, strict=True):
                vector.addmv_(part.T, share)
            self.best = bound, vector

    def finish(self, exact: Callable[[], SymmetricOperator | None], error: Callable[[], float]) -> Bounded:
        """Iterate, measure the two vectors, conclude."""
        operator, process = self.operator, self.process
        precise = operator.dtype == torch.float64
        self.run(1.0 if precise else OPTIMISM)
        values, Y = torch.linalg.eigh(process.T)
        steepest = Y[:, values.abs().argmax()]
        largest = float(values.abs().max())
        unit, errors = process.rounding * process.norm, process.estimates(Y)
        reach = closest(
            lambda d: Interval(-largest - d, largest + d),
            unit,
            lambda limits: process.within(limits, values, errors, MISSED),
        )
        # an eigenvalue alone at its end is known better than the products that found it
        excess, scale = reach.high - largest, process.exponent or 0
        gap = math.ldexp(separation(values, errors) - excess - 2 * unit, scale)
        outer, beyond = math.ldexp(reach.high + unit, scale), math.ldexp(max(excess - unit, 0.0), scale)
        self.keep(1.0 if precise else OPTIMISM)
        counts = told(values, process.rounding * process.norm)
        taken = self.taken + process.products + MEASURING
        norm = math.ldexp(process.norm, process.exponent or 0)
        rounding = operator.rounding
        process.basis.rotate_(steepest[:, None])
        process.next = process.next[:0].clone()
        u = process.basis.release(1).clone()[:, 0]
        if norm == 0:
            none = torch.zeros(1, dtype=torch.float64)
            return Bounded(zero_matrix(operator.order), self.result(u, none, none, none, norm, taken))
        other = None if precise else exact()
        A = operator if other is None else other
        if other is not None:
            # that of a product grows as its precision gets coarser
            rounding *= torch.finfo(other.dtype).eps / torch.finfo(operator.dtype).eps
        apart = 0.0 if other is not None else error()
        found = [quotients(A, u)]
        if self.best is not None:
            found.append(quotients(A, self.best[1]))
        noise = rounding * max(norm, *(own.size for own in found)) + apart
        first = found[0]
        smallest = min(own.smallest(noise) for own in found)
        if not precise and gap > 0:
            outer = abs(first.theta) + quadratic(first.residual + noise, gap) + beyond
        low, high = max(0.0, first.size - noise), max(outer, first.size) + noise
        ends = sorted(math.copysign(end, first.theta) for end in (low, high))
        lower, upper = (torch.tensor([end], dtype=torch.float64) for end in ends)
        # ‖Au‖ is nearer to the norm than the Rayleigh quotient
        theta = torch.tensor([math.copysign(first.size, first.theta)], dtype=torch.float64)
        condition = ConditionNumber(
            value=math.inf,
            lower=max(1.0, low / smallest * (1 - 8 * torch.finfo(torch.float64).eps)),
            upper=math.inf,
            lambda_max=first.size,
            lambda_min=min(smallest, first.size),
            rank=sum(counts),
            nullity=operator.order - sum(counts),
            negative=0 if operator.psd else counts[1],
            cutoff=noise,
            gap=smallest / noise if noise > 0 else math.inf,
            resolved=False,
            solver=f"Lanczos, {taken + len(found)} products",
            rank_decision="unresolved",
            negative_counted=operator.psd,
            cause=few_products(taken + len(found), operator.order),
        )
        return Bounded(condition, self.result(u, theta, lower, upper, norm, taken + len(found), first.residual))

    def result(
        self,
        u: torch.Tensor,
        theta: torch.Tensor,
        lower: torch.Tensor,
        upper: torch.Tensor,
        norm: float,
        products: int,
        residual: float = 0.0,
    ) -> EigenResult:
        """Result for the eigenvalue of largest |λ|."""
        settled = residual <= SETTLED * norm
        return EigenResult(
            eigenvalues=theta,
            eigenvectors=u[:, None],
            residuals=torch.tensor([residual], dtype=torch.float64),
            lower=lower,
            upper=upper,
            settled=torch.tensor([settled]),
            converged=settled,
            products=products,
            norm=max(norm, abs(float(theta))),
            null=0,
            vectors=self.vectors,
            message=f"what {products} products show; no search for missed eigenvalues",
        )


class Rescaled(SymmetricOperator):
    """Operator DAD for a diagonal D (n,), whose products are assumed to be as exact as those of A."""

    def __init__(self, A: SymmetricOperator, d: torch.Tensor) -> None:
        super().__init__(A.order, A.dtype, A.device)
        self.A, self.d, self.operands, self.psd = A, d, (A,), A.psd

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return D(A(DV))."""
        return self.A.multiply(self.d[:, None] * vectors).mul_(self.d[:, None])

    @property
    def rounding(self) -> float:
        return self.A.rounding


def flat_start(
    A: SymmetricOperator, level: Callable[[torch.Tensor], torch.Tensor], steps: int, fresh: torch.Generator
) -> tuple[torch.Tensor | None, int]:
    """Vector (1, n) rich in directions of little curvature, and the number of products used, at most ``steps``.

    The first product, with a random z, tells the groups of entries apart; if they are alike, there is no such vector.
    The others are those of Lanczos with DAD: as DADVᵀ is known on a space, so are the quotients of A in the vectors
    u = DVᵀy, of which the least is chosen.
    """
    z = torch.randn(A.order, generator=fresh, dtype=A.dtype, device=A.device)
    D = (A @ z.div_(torch.linalg.vector_norm(z))).to(A.dtype)
    peak, size = (float(torch.linalg.vector_norm(D, ord=order)) for order in (math.inf, 2))
    if not 0 < peak < math.inf:
        return None, 1
    # in place, as vectors are few
    D = level(D.div_(peak).square_()).sqrt_()
    mean = size / peak / math.sqrt(A.order)
    D.masked_fill_(D.le(FAINT * A.rounding * mean), math.inf)
    if D.min() >= ALIKE * mean:
        return None, 1
    D = D.min().div(D)
    basis = Basis(Plan(steps, steps), A.order, steps, dtype=A.dtype, device=A.device)
    process = Krylov(Rescaled(A, D), basis, block=1, dtype=A.dtype, rounding=A.rounding, fresh=fresh)
    process.seed(z.mul_(D)[None])
    del z
    # the last row is that of the next block
    while process.size < steps - 1 and not process.complete:
        process.expand()
    count = process.size
    basis.append(process.next)
    rows, images = basis.rows(0, basis.size), torch.cat([process.T, process.B])
    squares = images.T @ gram(rows, torch.where(D > 0, 1 / D, 0.0)) @ images
    noise = math.ldexp(A.rounding * size, -(process.exponent or 0))
    _, y = least_quotient(process.T, squares, noise)
    return D.mul_(y.to(rows) @ rows[:count])[None], 1 + process.products


def gram(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Gram matrix V diag(scale²) Vᵀ (j, j) in float64 on the host, for rows V (j, n)."""
    width, found = CHUNK // len(rows), torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part, d in zip(rows.split(width, 1), scale.split(width), strict=True):
        wide = part.to(torch.float64) * d.to(torch.float64)
        found += (wide @ wide.T).cpu()
    return found


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


def separation(ritz: torch.Tensor, errors: torch.Tensor) -> float:
    """Half the distance of the largest |θ| to the next, if the residuals of both are well below it; else 0."""
    sizes, order = ritz.abs().sort(descending=True)
    if len(sizes) < 2:
        return 0.0
    half = float(sizes[0] - sizes[1]) / 2
    return half if float(errors[order[:2]].max()) <= RATIO * half else 0.0


def told(ritz: torch.Tensor, rounding: float) -> tuple[int, int]:
    """Lower bounds of the numbers of positive and of negative eigenvalues: those of Ritz values (Cauchy)."""
    slack = rounding * len(ritz) ** 0.5
    return int((ritz > slack).sum()), int((ritz < -slack).sum())

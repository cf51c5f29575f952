"""Generalized Davidson iteration for the eigenvalues nearest to zero, with a correction equation as its fallback."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hesscond.errors import MatrixError
from hesscond.operators import ApproximateInverse
from hesscond.spectra import search_space

#: The predicted decrease of θ is compared with that over the next DELAY to OBSERVED expansions, while θ falls by less
#: than ASYMPTOTIC of it. The largest ratio so far, divided by MEMORY, counts too: θ may stagnate for a while.
DELAY, OBSERVED, ASYMPTOTIC, MEMORY = 4, 28, 0.1, 8.0


@dataclass
class Ratio:
    """Observed ratio of the decrease of θ to the energy η = rᵀM⁻¹r of its residual in an iteration."""

    value: float = math.inf  # largest recent ratio
    worst: float = 0.0
    history: list[tuple[float, float]] = field(default_factory=list)  # |θ| and η after each expansion for the same pair

    def observe(self, size: float, energy: float, noise: float) -> None:
        """Record |θ| and η of the pair; decreases of θ up to ``noise`` are rounding."""
        self.history.append((size, energy))
        earlier = self.history[-OBSERVED:-DELAY]
        recent = max((ratio(before, predicted, size, noise) for before, predicted in earlier), default=0.0)
        self.worst = max(self.worst, recent)
        self.value = max(recent, self.worst / MEMORY) or math.inf

    def stagnates(self, patience: int) -> bool:
        """Whether neither θ nor η became smaller over the last expansions."""
        if len(self.history) <= patience:
            return False
        older, recent = self.history[-patience : -patience // 2], self.history[-patience // 2 :]
        fell = recent[-1][0] < 0.99 * older[0][0]
        return not fell and min(e for _, e in recent) > 0.5 * min(e for _, e in older)


def ratio(before: float, predicted: float, now: float, noise: float) -> float:
    """Decrease of |θ| over the η before it; 0 if it is not significant."""
    fall = before - now - noise
    return fall / predicted if 0 < fall < ASYMPTOTIC * now and 0 < predicted < math.inf else 0.0


@dataclass(frozen=True)
class Errors:
    """Estimated errors of c approximate eigenvalues, smallest magnitude first."""

    absolute: list[float]  # estimated error of each value
    #: number of values whose group gave the estimate; 0: the value alone, without a gap
    group: list[int]
    below: list[float]  # |θ| minus the error of the value alone, a lower bound of its eigenvalue


def grouped(theta: list[float], energies: list[float], alone: list[float], *, relative: bool, complete: bool) -> Errors:
    """Smaller of the error alone and, over all s, Σ_{j≤s} energy_j · weight_{s+1} / (below_{s+1} − θ_s).

    With energies ‖r‖² and weights of 1 these are |λ − θ| ≤ ‖r‖, and ‖R‖²/gap before a gap (Kato, Temple; for groups:
    Parlett 1998, section 11.7). ``relative``: for A ≥ 0 in the norm of A⁻¹, with energies η ≈ rᵀA⁻¹r and the weights
    ``below`` (docs/concepts/bounds.md).
    """
    below = [value - error for value, error in zip(theta, alone, strict=True)]
    count = len(theta)
    absolute, group = list(alone), [0] * count
    for s in range(count):
        if s + 1 < count:
            gap, weight = below[s + 1] - theta[s], below[s + 1] if relative else 1.0
        elif complete:
            gap, weight = math.inf, 1.0
        else:
            continue
        error = sum(energies[: s + 1]) * weight / gap if gap > 0 else math.inf
        for i in range(s + 1):
            if error < absolute[i]:
                absolute[i], group[i] = error, s + 1
    return Errors(absolute, group, [*below, math.inf] if complete else below)


def smaller(first: Errors, second: Errors) -> Errors:
    """Errors with the smaller of two estimates for each value."""
    better = [a <= b for a, b in zip(first.absolute, second.absolute, strict=True)]
    pairs = zip(first.below, second.below, strict=True)
    return Errors(
        [min(a, b) for a, b in zip(first.absolute, second.absolute, strict=True)],
        [g if is_first else h for g, h, is_first in zip(first.group, second.group, better, strict=True)],
        [max(a, b) for a, b in pairs],
    )


#: Inner iterations reduce the residual by the first factor, then by increasing ones up to the second …
REDUCTION, LEAST = 0.1, 0.02
#: … within this many steps at first, twice as many each time that they do not suffice.
INNER = 12
#: A residual this small relative to |θ| makes θ a better shift than zero.
NEAR = 0.1
#: Expansions by M⁻¹r without progress before it is given up.
PATIENCE = 60

Function = Callable[[torch.Tensor], torch.Tensor]


class Correction:
    r"""Expansion by t with (I − QQᵀ)(A − σ)(I − QQᵀ) t = −r for the vectors Q found so far, by MINRES.

    The correction equation of Jacobi and Davidson (Sleijpen and Van der Vorst 1996, SIAM J. Matrix Anal. Appl. 17).
    σ = θ near an eigenvalue and 0 before, so that it begins as inverse iteration. MINRES is preconditioned by
    M⁻¹ − M⁻¹Q(QᵀM⁻¹Q)⁻¹QᵀM⁻¹, the inverse of M on the complement of Q, where M⁻¹ is given. How exact a solution is
    never enters a result: the outer residual decides.
    """

    patience = 8

    def __init__(
        self,
        products: search_space.CountedProducts,
        excluded: search_space.Excluded,
        inverse: ApproximateInverse | None,
    ) -> None:
        self.products, self.excluded, self.inverse = products, excluded, inverse
        self.name = "correction equation, " + ("MINRES" if inverse is None else "preconditioned MINRES")
        self._steps, self._rtol = INNER, REDUCTION

    def direction(self, pairs: Approximations, i: int, allowance: int) -> torch.Tensor:
        """Return a direction (1, n) that improves the i-th pair, from at most ``allowance`` products.

        It is an approximate solution, or the residual itself if the preconditioner is not positive.
        """
        residual, value = pairs.remainders[i : i + 1], float(pairs.values[i])
        near = float(torch.linalg.vector_norm(residual)) <= NEAR * abs(value)
        shift = value if near else 0.0
        Q = torch.linalg.qr(pairs.vectors[: i + 1].T).Q.T
        solved = None if self.inverse is None else self.inverse.solve(Q.T).T.to(Q)

        def projected(row: torch.Tensor) -> torch.Tensor:
            row = self.excluded.remove(row)
            return row - (row @ Q.T) @ Q

        def multiply(v: torch.Tensor) -> torch.Tensor:
            row = v[None]
            return projected(self.products.rows(row).sub_(row, alpha=shift))[0]

        def precondition(v: torch.Tensor) -> torch.Tensor:
            if self.inverse is None or solved is None:
                return v
            row = self.inverse.solve(v[:, None]).T.to(v)
            weights = torch.linalg.lstsq(Q @ solved.T, Q @ row.T).solution
            return projected(row - weights.T @ solved)[0]

        right = projected(-residual)[0]
        solution, reduction = minres(
            multiply,
            right,
            precondition=precondition,
            rtol=self._rtol,
            steps=max(1, min(self._steps, allowance, 2 * self.products.order)),
        )
        if reduction > self._rtol:
            self._steps *= 2
        self._rtol = max(LEAST, self._rtol / 2)
        return residual if solution is None else solution[None]


def minres(
    multiply: Function, right: torch.Tensor, *, precondition: Function, rtol: float, steps: int
) -> tuple[torch.Tensor | None, float]:
    """Minimize the residual of A x = b over Krylov spaces (Paige and Saunders 1975), preconditioned.

    Returned are x (None: b is zero, or the preconditioner is not positive) and the residual norm over that of b, in the
    norm of the preconditioner, as the recurrence has it.
    """
    solution = torch.zeros_like(right)
    before, current = torch.zeros_like(right), right
    image = precondition(current)
    square = float(current @ image)
    if not square > 0:
        return None, 1.0
    beta = first = rest = math.sqrt(square)
    older, cosine, sine, epsilon, delta_bar = 0.0, -1.0, 0.0, 0.0, 0.0
    direction, previous = torch.zeros_like(right), torch.zeros_like(right)
    definite = True
    for step in range(1, steps + 1):
        v = image / beta
        product = multiply(v)
        if step > 1:
            product = product - (beta / older) * before
        alpha = float(v @ product)
        product = product - (alpha / beta) * current
        before, current = current, product
        image = precondition(current)
        older, square = beta, float(current @ image)
        # rounding of a residual that is done with, or an indefinite preconditioner
        definite = square >= -1e-12 * float(torch.linalg.vector_norm(current) * torch.linalg.vector_norm(image))
        beta = math.sqrt(max(square, 0.0))
        # the QR factorization of the tridiagonal matrix, one more rotation
        epsilon_old, delta = epsilon, cosine * delta_bar + sine * alpha
        gamma_bar = sine * delta_bar - cosine * alpha
        epsilon, delta_bar = sine * beta, -cosine * beta
        gamma = math.hypot(gamma_bar, beta)
        if gamma == 0:
            break
        cosine, sine = gamma_bar / gamma, beta / gamma
        previous, direction = direction, (v - epsilon_old * previous - delta * direction) / gamma
        solution = solution + (cosine * rest) * direction
        rest *= sine
        if not definite or beta == 0 or abs(rest) <= rtol * first:
            break
    return solution if definite else None, abs(rest) / first


#: Factor by which error estimates from the preconditioned residual are enlarged.
SAFETY = 2.0
#: Vectors at the start, all or all but one of them random, and random vectors in the search for missed pairs.
RANDOM, FRESH = 3, 2
#: Lanczos steps to the smallest eigenvalue of M, and the share of it that M is shifted by: with 0.9 small layers took
#: fewer products (41 for 47), but large ones more than without (177 for 132, with this 120).
STEPS, SHARE = 12, 0.5
#: A vector with ‖Av‖ up to this many times the rounding of a product, and vᵀAv up to half of it, is null.
LOCKED = 100
#: Null directions that are found one by one before they are taken for a null space that must be known.
NULL_LIMIT = 200
#: Pairs with a residual this small relative to |θ| count as found.
FOUND = 1e-3
#: A wanted pair has at most this residual relative to |θ|, however small its error is estimated to be.
CLOSE = 0.1

#: Pairs that must be clear where Ritz values are no bounds: a missed eigenvector hides in unresolved pairs, seldom
#: behind four.
PAIRS = 4

#: A clear pair has at most this component in eigenvectors of smaller |λ|.
CLEAR = 0.3


@dataclass(frozen=True, eq=False)
class Approximations:
    """Approximate eigenpairs (θ, u) in a space V, the smallest |θ| first."""

    Y: torch.Tensor  # (m, m') float64 coefficients in V
    indices: list[int]  # the c columns of Y that the other attributes refer to
    values: torch.Tensor  # (c,) float64 θ
    residuals: torch.Tensor
    vectors: torch.Tensor  # (c, n) u
    remainders: torch.Tensor
    #: columns that lie mostly in the directions added since the search for missed pairs began
    new: list[int] = field(default_factory=list)

    def coefficients(self, i: int) -> torch.Tensor:
        """Coefficients (m, 1) of the i-th approximation."""
        return self.Y[:, self.indices[i]][:, None]


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimated errors of approximations."""

    errors: Errors
    #: (c,) float64 estimates of rᵀA⁻¹r, and the rᵀM⁻¹r that they come from; infinite where unknown
    energies: torch.Tensor
    unscaled: torch.Tensor
    solved: torch.Tensor  # (c, n) M⁻¹r; zero where unknown


class Davidson:
    """Search for the k eigenvalues of smallest nonzero |λ| of an operator A that was scaled to norm about 1."""

    pairs: Approximations
    estimates: Estimates
    way: Correction | None  # present method of expansion; None: M⁻¹r (generalized Davidson, Morgan and Scott 1986)
    ways: list[Correction | None]  # those to be tried one after the other as each stagnates

    def __init__(
        self,
        products: search_space.CountedProducts,
        space: search_space.RitzSpace,
        excluded: search_space.Excluded,
        inverse: ApproximateInverse | None,
        fresh: torch.Generator,
        max_products: int,
        *,
        k: int,
        tol: float,
    ) -> None:
        self.products, self.space, self.excluded, self.inverse = products, space, excluded, inverse
        self.fresh, self.max_products, self.k, self.tol = fresh, max_products, k, tol
        self.target = 0  # index of the pair that was improved last
        #: (m, 1) coefficients of the target before the last expansions, in the space at that time
        self.before = self.current = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self.ratio = Ratio()  # observed decrease of the target's value
        self.used: list[str] = []  # names of the methods of expansion that were used
        self.begin()
        self.stopped: str | None = None  # reason why the search ended without an answer, if it did
        self.columns = k + 1  # number of approximations formed
        self.settled = [False] * k  # whether each of the wanted approximations is as accurate as requested
        #: vectors left out because their eigenvalues can be distinguished neither from zero nor from round-off
        self.dubious = 0
        #: (m, m) projector on the directions added since the search for missed pairs began
        self.family: torch.Tensor | None = None
        self.searched = math.inf  # |λ| up to which missed pairs were searched for
        #: half the estimated smallest eigenvalue of M: M − shift is nearer to A − θ; 0 if A may be indefinite
        self.shift = 0.0

    @property
    def complete(self) -> bool:
        """Whether the space spans everything that is not excluded."""
        return self.space.size >= self.products.order - self.excluded.dimension

    # -- the search ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the search to its end, from random vectors."""
        count = max(RANDOM, self.k + 1)
        if self.products.psd and self.inverse is not None:
            row, least = search_space.lowest(self.inverse, self.random(1), self.excluded, STEPS)
            self.shift = SHARE * least
            self.join(row)
            count -= 1
        for row in self.random(count):
            self.join(row[None])
        self.check_symmetry()
        while self.stopped is None:
            self.measure()
            if self.exclude_null():
                continue
            target = self.next_target() if len(self.pairs.values) else None
            if target is None:
                if self.complete or self.reach >= self.searched:
                    return
                self.search()
            elif self.products.count >= self.max_products:
                self.stopped = f"not within {self.max_products} products"
            else:
                self.expand(target)

    @property
    def proofs(self) -> int:
        """Number of pairs of the family that must be clear."""
        return 1 if self.products.psd else PAIRS

    @property
    def reach(self) -> float:
        """Largest |θ| of the wanted approximations."""
        return float(self.pairs.values[: self.k].abs().max())

    @property
    def slack(self) -> float:
        """Relative distance below which two values count as equal."""
        return max(10 * self.tol, 1e-6)

    def check_symmetry(self) -> None:
        """Raise an error if the vectors show that the operator is not symmetric."""
        U, images = self.space.vectors(torch.eye(self.space.size, dtype=torch.float64, device="cpu"))
        inner = U @ images.T
        asymmetry = float((inner - inner.T).abs().max()) if len(inner) else 0.0
        if asymmetry > 100 * self.products.error:
            raise MatrixError(
                f"the operator is not symmetric: uᵀAv and vᵀAu differ by {asymmetry / self.products.norm:.1e}‖A‖"
            )

    def measure(self) -> None:
        """Form the first approximate eigenvectors and their residuals."""
        while self.space.size <= self.k and not self.complete:
            self.join(self.random(1))  # null vectors were left out
        if self.space.size == 0:
            none, vectors = torch.zeros(0, dtype=torch.float64, device="cpu"), self.excluded.vectors[:0]
            self.pairs = Approximations(none, [], none, none, vectors, vectors)
            return
        Y = self.space.pairs(3 * self.products.error)
        new = self.newest(Y)
        count = min(self.columns, self.space.size)
        indices = sorted({*range(count), *new})
        vectors, remainders = self.space.vectors(Y[:, indices])
        theta = (vectors * remainders).sum(1, keepdim=True)
        remainders.sub_(theta * vectors)
        values = theta[:, 0].double().cpu()
        residuals = torch.linalg.vector_norm(remainders, dim=1).double().cpu()
        self.pairs = Approximations(Y, indices, values, residuals, vectors, remainders, new)
        if residuals[count - 1] <= FOUND * abs(values[count - 1]) and self.columns < self.space.capacity // 2:
            self.columns += 1  # what is found says nothing of what is not

    def newest(self, Y: torch.Tensor) -> list[int]:
        """First pairs that lie, for the most part, in the directions added since the search began."""
        if self.family is None:
            return []
        shares = ((self.family @ Y) * Y).sum(0)
        mostly = (shares > 0.5).nonzero()[: self.proofs, 0].tolist()
        return mostly or [int(shares.argmax())]

    def exclude_null(self) -> bool:
        """Exclude a vector that is annihilated, or nearly so; return whether there was one."""
        noise, pairs = self.products.error, self.pairs
        for i, (value, residual) in enumerate(zip(pairs.values.tolist(), pairs.residuals.tolist(), strict=True)):
            if self.products.psd and value < -4 * noise:
                raise MatrixError(
                    f"the operator is said to be positive semidefinite but vᵀAv = {value:.2g}‖A‖ for a unit vector: "
                    "set psd to False"
                )
            null = abs(value) <= noise / 2 and residual <= LOCKED * noise
            if not null and (abs(value) > 3 * noise or residual > 2 * noise):
                continue
            self.dubious += not null
            self.excluded.add(pairs.vectors[i : i + 1], residual)
            others = torch.arange(self.space.size, device="cpu") != pairs.indices[i]
            if len(self.excluded.vectors) > NULL_LIMIT:
                self.stopped = f"more than {NULL_LIMIT} null directions: give their span as null_space"
            self.rotate(search_space.complement(pairs.coefficients(i), pairs.Y[:, others]))
            self.ratio.history.clear()
            return True
        return False

    # -- convergence --------------------------------------------------------------------------------------------------

    def next_target(self) -> int | None:
        """Index of the pair to improve next; None if all wanted pairs are settled and nothing smaller is left."""
        self.target = min(self.target, len(self.pairs.values) - 1)
        self.estimates = self.estimated()
        magnitudes, noise = self.pairs.values.abs().tolist(), self.products.error
        allowed = [max(self.tol * size, noise) for size in magnitudes[: self.k]]
        close = [
            norm <= CLOSE * size and norm + noise <= size / 2
            for norm, size in zip(self.pairs.residuals.tolist(), magnitudes, strict=True)
        ]
        absolute, below = self.estimates.errors.absolute, self.estimates.errors.below
        self.settled = [close[i] and absolute[i] <= allowed[i] for i in range(len(allowed))]
        if not all(self.settled):
            i = self.settled.index(False)
            return self.to_improve(i, allowed[i]) if close[i] else i
        unclear = [i for i in map(self.pairs.indices.index, self.pairs.new) if i >= self.k and not self.clear(i)]
        if unclear and not self.complete:
            return unclear[0]
        if self.beyond >= self.reach * (1 - self.slack):
            return None
        return min(range(self.k, len(magnitudes)), key=lambda i: below[i])

    def clear(self, i: int) -> bool:
        """Whether a pair has almost no component of eigenvalues below the wanted ones, or has the same value as one."""
        size, reach = float(self.pairs.values[i].abs()), self.reach
        return size - self.estimates.errors.below[i] <= max(CLEAR * (size - reach), self.slack * reach)

    @property
    def beyond(self) -> float:
        """Lower bound of the |λ| that are not wanted, as far as the search has seen."""
        return min(self.estimates.errors.below[self.k :], default=math.inf if self.complete else 0.0)

    @property
    def floor(self) -> float:
        """|λ| above which others of the cluster of the largest wanted value may have been missed; ∞: no cluster."""
        return self.reach * (1 - self.slack) if self.beyond <= self.reach * (1 + self.slack) else math.inf

    def to_improve(self, i: int, allowed: float) -> int:
        """Index of the pair that dominates the error of the i-th: itself, one of its group, or the first beyond."""
        errors, last = self.estimates.errors, len(self.pairs.values) - 1
        sizes = self.pairs.values.abs()
        pair_errors = torch.minimum(self.pairs.residuals**2 / sizes, self.estimates.energies)
        j = int(pair_errors[: max(errors.group[i], i + 1)].argmax())
        if self.complete or pair_errors[j] > allowed / 4:
            return j
        # a gap is reliable if the values beyond it are known well enough
        uncertain = [m for m in range(j + 1, last + 1) if sizes[m] - errors.below[m] > (sizes[m] - sizes[j]) / 2]
        return next((m for m in uncertain if pair_errors[m] > allowed / 4), last if last in uncertain else j)

    def estimated(self) -> Estimates:
        """Estimated errors, with M⁻¹r of the target, or of all pairs if they are few or the target may be settled."""
        sizes, residuals, target, noise = (
            self.pairs.values.abs(),
            self.pairs.residuals,
            self.target,
            self.products.error,
        )
        theta, norms, complete = sizes.tolist(), residuals.tolist(), self.complete
        errors = grouped(theta, [norm * norm for norm in norms], norms, relative=False, complete=complete)
        unknown, squared = torch.full_like(residuals, math.inf), float(residuals[target] ** 2)
        if self.inverse is None:
            self.ratio.observe(float(sizes[target]), squared, noise)
            return Estimates(errors, unknown, unknown[:0], self.pairs.remainders.new_zeros(0, 0))
        few = len(sizes) <= 4 or target >= self.k
        solved, energies = self.solve(range(len(sizes)) if few else [target])
        small = float(sizes[target]) <= 3 * noise
        self.ratio.observe(float(sizes[target]), squared if small else float(energies[target]), noise)
        if not self.products.psd:
            return Estimates(errors, unknown, unknown[:0], solved)
        if not few and SAFETY * self.ratio.value * float(energies[target]) <= self.tol * float(sizes[target]):
            del solved
            solved, energies = self.solve(range(len(sizes)))
        scaled = SAFETY * self.ratio.value * energies
        eta = scaled.tolist()
        alone = [math.sqrt(value * energy) for value, energy in zip(theta, eta, strict=True)]
        errors = smaller(errors, grouped(theta, eta, alone, relative=True, complete=complete))
        return Estimates(errors, scaled, energies, solved)

    def solve(self, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return M⁻¹r (c, n) and η = rᵀM⁻¹r of the chosen pairs (other pairs: 0 and ∞); ∞ where M is not positive."""
        rows, solved = list(chosen), torch.zeros_like(self.pairs.remainders)
        solved[rows] = self.solutions(rows)
        energies = (solved * self.pairs.remainders).sum(1).double().cpu()
        known = torch.zeros(len(energies), dtype=torch.bool, device="cpu")
        known[rows] = True
        return solved, torch.where(known & (energies >= 0) & torch.isfinite(energies), energies, math.inf)

    def solutions(self, rows: list[int], shift: float = 0.0) -> torch.Tensor:
        """Return (M − shift)⁻¹r (c, n) of the pairs ``rows``."""
        assert self.inverse is not None
        # along null vectors the residual is rounding, which M⁻¹ would enlarge
        remainders = self.excluded.remove(self.pairs.remainders[rows])
        return self.inverse.solve(remainders.T, shift).T.to(remainders)

    # -- expansion ----------------------------------------------------------------------------------------------------

    def expand(self, target: int) -> None:
        """Expand the space once for a pair, by the next method if the last one stagnates."""
        if target != self.target:
            self.target = target
            self.forget()
        if self.ratio.stagnates(PATIENCE if self.way is None else self.way.patience):
            if not self.ways:
                self.stopped = "stagnated"
                return
            self.next_way()
            self.ratio.history.clear()
        if self.way is not None:
            direction = self.way.direction(self.pairs, target, self.max_products - self.products.count)
        else:
            direction = self.estimates.solved[target : target + 1]
            if self.shift or not bool(direction.any()):
                direction = self.solutions([target], self.shift)
        self.before, self.current = self.current, self.pairs.coefficients(target)
        self.join(direction)

    def search(self) -> None:
        """Add random vectors, and the worst residual as it is, to the space, to see whether a pair was missed.

        The *family* consists of these vectors and all that join during the search (docs/concepts/bounds.md). The
        residual shows directions to which M is blind: where θ falls by more than predicted, the ratio grows.
        """
        pairs = self.pairs
        self.searched = self.reach * (1 - self.slack)
        predicted = list(zip(pairs.values.abs().tolist(), self.estimates.unscaled.tolist(), strict=False))[: self.k]
        worst = int((pairs.residuals / pairs.values.abs())[: self.k].argmax())
        size = self.space.size
        self.family = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        self.begin()
        for row in [*self.random(FRESH + self.proofs - 1), pairs.remainders[worst].clone()]:
            self.join(row[None])
        U, images = self.space.vectors(self.space.pairs(3 * self.products.error)[:, : self.k])
        for (before, energy), now in zip(predicted, (U * images).sum(1).abs().tolist(), strict=False):
            # such a decrease counts permanently
            self.ratio.worst = max(self.ratio.worst, MEMORY * ratio(before, energy, now, self.products.error))
        self.forget()

    def random(self, count: int) -> torch.Tensor:
        """Random vectors (count, n), multiplied by (M − shift)⁻¹ to enlarge components of small eigenvalues."""
        return search_space.random_rows(count, self.excluded.vectors, self.inverse, self.fresh, self.shift)

    def begin(self) -> None:
        """Start again with the first method of expansion."""
        plain = Correction(self.products, self.excluded, None)
        preconditioned = Correction(self.products, self.excluded, self.inverse)
        self.ways = [plain] if self.inverse is None else [None, preconditioned, plain]
        self.next_way()

    def next_way(self) -> None:
        """Replace the present method of expansion by the next."""
        self.way = self.ways.pop(0)
        name = "generalized Davidson" if self.way is None else self.way.name
        self.used = list(dict.fromkeys([*self.used, name]))

    def forget(self) -> None:
        """Forget the history of the target."""
        self.ratio.history.clear()
        self.before = self.current = self.current[:0]

    def join(self, row: torch.Tensor) -> None:
        """Expand the space by the new component of ``row`` (1, n), or by a random direction if there is none."""
        if self.complete:
            return
        v = search_space.orthonormal(row, self.excluded, self.space.V)
        while v is None:
            v = search_space.orthonormal(
                search_space.random_rows(1, row, None, self.fresh), self.excluded, self.space.V
            )
        if self.space.size == self.space.capacity:
            self.restart()
        self.space.append(v, self.products.images(v))
        if self.family is not None:
            self.family = torch.block_diag(self.family, torch.ones(1, 1, dtype=torch.float64, device="cpu"))

    def restart(self) -> None:
        """Keep the best pairs, and the target as it was before the last steps (Stathopoulos 2007, GD+k)."""
        size, capacity = self.space.size, self.space.capacity
        kept = min(max(self.columns + 2, capacity // 4), capacity - 3)
        earlier = [search_space.padded(Y, size) for Y in (self.before, self.current) if len(Y)]
        self.rotate(torch.cat([self.space.pairs()[:, :kept], *earlier], 1))

    def rotate(self, Y: torch.Tensor) -> None:
        """Go on with the span of V Y."""
        size = self.space.size
        C = self.space.restart(Y)
        self.before, self.current = (
            C.T @ search_space.padded(Z, size) if len(Z) else Z for Z in (self.before, self.current)
        )
        self.family = None if self.family is None else C.T @ self.family @ C

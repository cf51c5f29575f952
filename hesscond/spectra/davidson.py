"""Generalized Davidson iteration for the eigenvalues nearest to zero, with a correction equation as its fallback."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hesscond.errors import MatrixError
from hesscond.operators import ApproximateInverse
from hesscond.spectra.eigen import Progress
from hesscond.spectra.error_estimates import Errors, Ratio, preconditioned_errors, residual_errors, smaller
from hesscond.spectra.expansion import Expansion, Pair, PreconditionedResidual, expansions
from hesscond.spectra.search_space import (
    Excluded,
    Products,
    RitzSpace,
    SingularSpace,
    complement,
    orthonormal,
    padded,
    random_rows,
)

#: Estimates of an error from the preconditioned residual are taken so many times.
SAFETY = 2.0
#: Random vectors at the start, and in the search for what was missed.
RANDOM, FRESH = 3, 2
#: A vector with ‖Av‖ up to this many times the rounding of a product, and vᵀAv up to half of it, is null.
LOCKED = 100
#: Null directions that are found one by one before they are taken for a null space that must be known.
NULL_LIMIT = 200
#: A residual this small relative to |θ| makes a pair one that is found, not one that is on its way.
FOUND = 1e-3
#: A wanted pair has at most this residual relative to |θ|, however small its error is estimated to be.
CLOSE = 0.1

#: Random vectors that the search starts from.
BLOCK = 2

#: So many pairs must be clear: a missed eigenvector hides in pairs that are not resolved yet, seldom behind four.
PAIRS = 4

#: A clear pair has at most this component in eigenvectors of smaller |λ|.
CLEAR = 0.3


class Davidson:
    """A search for the k eigenvalues of smallest nonzero |λ| of an operator that was scaled to norm about 1.

    Attributes
    ----------
    values, residuals : (c,)
        Rayleigh quotients θ of the first c approximations, smallest first, and ‖r‖.
    vectors : (c, n)
        The approximate eigenvectors.
    errors
        Of these values, estimated.
    settled : list of bool
        Which of the wanted ones are as exact as asked for.
    dubious
        Vectors left out because their eigenvalues can be told neither from zero nor from round-off.
    stopped
        Why the search ended without an answer; None: it did not.
    used
        The ways of expansion that were used.
    missed_beyond
        What was not found is not below this, as far as `search_beside` has seen.
    """

    def __init__(
        self,
        products: Products,
        space: RitzSpace,
        excluded: Excluded,
        *,
        k: int,
        tol: float,
        inverse: ApproximateInverse | None,
        fresh: torch.Generator,
        max_products: int,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.products, self.space, self.excluded = products, space, excluded
        self.k, self.tol, self.inverse, self.fresh = k, tol, inverse, fresh
        self.max_products, self.callback = max_products, callback
        self.ways: list[Expansion] = []
        self.used: list[str] = []
        self.begin()
        self.columns, self.target, self.dubious = k + 1, 0, 0
        self.indices: list[int] = []
        self.new: list[int] = []
        self.ratio = Ratio()
        self.current = self.before = torch.zeros(0, 0, dtype=torch.float64)
        self.family: torch.Tensor | None = None
        self.searched = self.missed_beyond = math.inf
        self.searching = False
        self.stopped: str | None = None
        self.Y = self.values = self.residuals = torch.zeros(0, dtype=torch.float64)
        self.energies = self.unscaled = self.values
        self.vectors = self.remainders = self.solved = torch.zeros(0, products.order)
        self.errors, self.settled = Errors([], [], []), [False] * k

    # -- the search ---------------------------------------------------------------------------------------------------

    def run(self, start: torch.Tensor | None) -> None:
        """To the end, from ``start`` (j, n) and random vectors."""
        for row in torch.empty(0) if start is None else start:
            self.join(row[None])
        for row in self.random(max(RANDOM, self.k + 1)):
            self.join(row[None])
        self.check_symmetry()
        while self.stopped is None:
            self.measure()
            if self.exclude_null():
                continue
            target = self.next_target() if len(self.values) else None
            if target is None:
                if self.complete or self.reach >= self.searched:
                    return
                (self.search if self.products.psd else self.search_beside)()
            elif self.products.count >= self.max_products:
                self.stopped = f"not within {self.max_products} products"
            elif self.interrupted():
                self.stopped = "stopped by the callback"
            else:
                self.expand(target)

    @property
    def complete(self) -> bool:
        """Whether the space is all that is not excluded."""
        return self.space.size >= self.products.order - self.excluded.dimension

    @property
    def reach(self) -> float:
        """The largest |θ| of those wanted."""
        return float(self.values[: self.k].abs().max())

    @property
    def slack(self) -> float:
        """Two values closer than this, relative to them, are the same."""
        return max(10 * self.tol, 1e-6)

    def begin(self) -> None:
        """Expand in the first way again."""
        self.ways = expansions(self.products, self.excluded, self.inverse)
        self.next_way()

    def next_way(self) -> None:
        """Expand in the next way."""
        self.way = self.ways.pop(0)
        self.used = list(dict.fromkeys([*self.used, self.way.name]))

    def check_symmetry(self) -> None:
        """Refuse what is not symmetric, as far as the vectors show it.

        Raises
        ------
        MatrixError
            It is not.
        """
        U, images = self.space.vectors(torch.eye(self.space.size, dtype=torch.float64))
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
            self.values = self.values[:0]
            return
        self.Y = self.space.pairs(3 * self.products.error)
        self.new = self.newest()
        self.indices = sorted({*range(min(self.columns, self.space.size)), *self.new})
        self.vectors, self.remainders = self.space.vectors(self.Y[:, self.indices])
        theta = (self.vectors * self.remainders).sum(1, keepdim=True)
        self.remainders.sub_(theta * self.vectors)
        self.values = theta[:, 0].double().cpu()
        self.residuals = torch.linalg.vector_norm(self.remainders, dim=1).double().cpu()
        last = min(self.columns, self.space.size) - 1
        if self.residuals[last] <= FOUND * abs(self.values[last]) and self.columns < self.space.capacity // 2:
            self.columns += 1  # what is found says nothing of what is not

    def newest(self) -> list[int]:
        """The first pair that lies, for the most part, in what joined since the search began."""
        if self.family is None:
            return []
        shares = ((self.family @ self.Y) * self.Y).sum(0)
        mostly = (shares > 0.5).nonzero()[:1, 0].tolist()
        return mostly or [int(shares.argmax())]

    def exclude_null(self) -> bool:
        """Leave out a vector that is annihilated, or nearly: whether there was one.

        Raises
        ------
        MatrixError
            An operator that is said to be positive semidefinite is not.
        """
        noise = self.products.error
        for i, (value, residual) in enumerate(zip(self.values.tolist(), self.residuals.tolist(), strict=True)):
            if self.products.psd and value < -4 * noise:
                raise MatrixError(
                    f"the operator is said to be positive semidefinite but vᵀAv = {value:.2g}‖A‖ for a unit vector: "
                    "set psd to False"
                )
            null = abs(value) <= noise / 2 and residual <= LOCKED * noise
            if not null and (abs(value) > 3 * noise or residual > 2 * noise):
                continue
            self.dubious += not null
            self.excluded.add(self.vectors[i : i + 1], residual)
            others = torch.arange(self.space.size) != self.indices[i]
            if len(self.excluded.found) > NULL_LIMIT:
                self.stopped = f"more than {NULL_LIMIT} null directions: give their span as null_space"
            self.rotate(complement(self.Y[:, self.indices[i]][:, None], self.Y[:, others]))
            self.ratio.history.clear()
            return True
        return False

    # -- convergence --------------------------------------------------------------------------------------------------

    def next_target(self) -> int | None:
        """Which pair to improve next; None if all that are wanted are settled and nothing smaller is left."""
        self.target = min(self.target, len(self.values) - 1)
        self.solve_and_estimate()
        magnitudes, noise = self.values.abs().tolist(), self.products.error
        allowed = [max(self.tol * size, noise) for size in magnitudes[: self.k]]
        close = [
            norm <= CLOSE * size and norm + noise <= size / 2
            for norm, size in zip(self.residuals.tolist(), magnitudes, strict=True)
        ]
        self.settled = [close[i] and self.errors.absolute[i] <= allowed[i] for i in range(len(allowed))]
        if not all(self.settled):
            i = self.settled.index(False)
            return self.to_improve(i, allowed[i]) if close[i] else i
        unclear = [i for i in map(self.indices.index, self.new) if i >= self.k and not self.clear(i)]
        if unclear and not self.complete:
            return unclear[0]
        if self.beyond >= self.reach * (1 - self.slack):
            return None
        return min(range(self.k, len(magnitudes)), key=lambda i: self.errors.below[i])

    def clear(self, i: int) -> bool:
        """Whether a pair has next to no component in anything below what is wanted, or is one more of the same value.

        A component c along an eigenvector of λ adds c²(θ − λ)² to ‖r‖², and c²(θ − λ)²/λ to rᵀA⁻¹r.
        """
        size, reach = float(self.values[i].abs()), self.reach
        return size - self.errors.below[i] <= max(CLEAR * (size - reach), self.slack * reach)

    @property
    def beyond(self) -> float:
        """What all eigenvalues that are not wanted cannot be below, as far as the search has seen."""
        return min(self.errors.below[self.k :], default=math.inf if self.complete else 0.0)

    def to_improve(self, i: int, allowed: float) -> int:
        """What keeps the error of the i-th large: itself, another of its group, or the first beyond."""
        last = len(self.values) - 1
        sizes = self.values.abs()
        own = torch.minimum(self.residuals**2 / sizes, self.energies)
        j = int(own[: max(self.errors.group[i], i + 1)].argmax())
        if self.complete or own[j] > allowed / 4:
            return j
        # the gap is what it seems to be if the first beyond is known well enough
        uncertain = float(sizes[last]) - self.errors.below[last]
        return j if uncertain <= float(sizes[last] - sizes[j]) / 2 else last

    def solve_and_estimate(self) -> None:
        """M⁻¹r of the target, and the errors; M⁻¹r of all pairs where few, or where the target may be settled."""
        sizes, target = self.values.abs(), self.target
        self.errors = residual_errors(sizes, self.residuals, complete=self.complete)
        self.energies = torch.full_like(self.residuals, math.inf)
        if self.inverse is None:
            self.ratio.observe(float(sizes[target]), float(self.residuals[target] ** 2), self.products.error)
            return
        few = len(sizes) <= 4 or target >= self.k
        rows = list(range(len(sizes))) if few else [target]
        energies = self.solve(rows)
        small = float(sizes[target]) <= 3 * self.products.error
        energy = float(self.residuals[target] ** 2) if small else float(energies[target])
        self.ratio.observe(float(sizes[target]), energy, self.products.error)
        if not self.products.psd:
            return
        if not few and SAFETY * self.ratio.value * float(energies[target]) <= self.tol * float(sizes[target]):
            energies = self.solve(list(range(len(sizes))))
        self.unscaled = energies
        self.energies = SAFETY * self.ratio.value * energies
        self.errors = smaller(self.errors, preconditioned_errors(sizes, self.energies, complete=self.complete))

    def solve(self, rows: list[int]) -> torch.Tensor:
        """M⁻¹r and η = rᵀM⁻¹r of some pairs; infinite for the others, and where M is not positive."""
        if self.inverse is None:
            return self.energies
        self.solved = torch.zeros_like(self.remainders)
        # along null vectors the residual is rounding, which M⁻¹ would enlarge
        remainders = self.excluded.remove(self.remainders[rows])
        self.solved[rows] = self.inverse.solve(remainders.T).T.to(remainders)
        energies = (self.solved * self.remainders).sum(1).double().cpu()
        known = torch.zeros(len(energies), dtype=torch.bool)
        known[rows] = True
        return torch.where(known & (energies >= 0) & torch.isfinite(energies), energies, math.inf)

    # -- expansion ----------------------------------------------------------------------------------------------------

    def expand(self, target: int) -> None:
        """One expansion for a pair, by another way if the last one makes no more progress."""
        if target != self.target:
            self.target = target
            self.ratio.history.clear()
            self.before = self.current = self.current[:0]
        elif self.ratio.stagnates(self.way.patience):
            if not self.ways:
                self.stopped = "stagnated"
                return
            self.next_way()
            self.ratio.history.clear()
        r = self.remainders[target : target + 1]
        z = None if self.inverse is None else self.solved[target : target + 1]
        if z is not None and not bool(z.any()):
            self.solve([target])
            z = self.solved[target : target + 1]
        pair = Pair(float(self.values[target]), r, z, self.vectors[: target + 1])
        direction = self.way.direction(pair, self.max_products - self.products.count)
        self.before, self.current = self.current, self.Y[:, self.indices[target]][:, None]
        self.join(direction)

    def search(self) -> None:
        """Put random vectors, and the worst residual as it is, into the space, to see whether anything was missed.

        An eigenvector that is missing from the space has a component in each random vector, which M⁻¹ enlarges. It is
        looked for in the *family* of these vectors and of all that join while the search lasts: the first pair that
        lies in it for the most part is improved until it is `clear` of smaller ones, and above what is wanted. The
        residual shows directions to which M is blind: where θ falls by more than was foretold, the ratio grows.
        """
        self.searched = self.reach * (1 - self.slack)
        foretold = list(zip(self.values.abs().tolist(), self.unscaled.tolist(), strict=False))[: self.k]
        worst = int((self.residuals / self.values.abs())[: self.k].argmax())
        size = self.space.size
        self.family = torch.zeros(size, size, dtype=torch.float64)
        self.begin()
        for row in [*self.random(FRESH), self.remainders[worst].clone()]:
            self.join(row[None])
        U, images = self.space.vectors(self.space.pairs(3 * self.products.error)[:, : self.k])
        for (before, energy), now in zip(foretold, (U * images).sum(1).abs().tolist(), strict=False):
            self.ratio.remember(before, energy, now, self.products.error)
        self.ratio.history.clear()
        self.before = self.current = self.current[:0]

    def search_beside(self) -> None:
        """The same for an indefinite operator, on the complement of what is wanted (`Missing`).

        There harmonic Ritz values of a family are no bounds of what is missing from it. What is found joins the space,
        and once that has settled it is searched again.
        """
        missing = Missing(
            self.products,
            self.excluded,
            self.vectors[: self.k],
            reach=self.reach,
            slack=self.slack,
            inverse=self.inverse,
            fresh=self.fresh,
            capacity=self.space.capacity,
            max_products=self.max_products,
        )
        self.searching = True
        missing.run(self.interrupted)
        self.searching = False
        self.stopped, self.missed_beyond = missing.stopped, missing.beyond
        if not len(missing.smaller):
            self.searched = self.reach
        for row in missing.smaller:
            self.join(row[None])
        self.begin()
        self.ratio.history.clear()
        self.before = self.current = self.current[:0]

    def random(self, count: int) -> torch.Tensor:
        """Random vectors (count, n), rich in what M⁻¹ is rich in."""
        return random_rows(count, self.excluded.found, self.inverse, self.fresh)

    def join(self, row: torch.Tensor) -> None:
        """The space grows by what is new in ``row`` (1, n), or by a random direction if nothing is."""
        if self.complete:
            return
        v = orthonormal(row, self.excluded, self.space.V)
        while v is None:
            v = orthonormal(random_rows(1, row, None, self.fresh), self.excluded, self.space.V)
        if self.space.size == self.space.capacity:
            self.restart()
        self.space.append(v, self.products.images(v))
        if self.family is not None:
            self.family = torch.block_diag(self.family, torch.ones(1, 1, dtype=torch.float64))

    def restart(self) -> None:
        """Keep the best pairs, and the target as it was before the last step (Stathopoulos 2007, GD+k)."""
        space = self.space
        keep = min(max(self.columns + 2, space.capacity // 4), space.capacity - 3)
        kept = [space.pairs()[:, :keep], *(padded(Y, space.size) for Y in (self.before, self.current) if len(Y))]
        self.rotate(torch.cat(kept, 1))

    def rotate(self, Y: torch.Tensor) -> None:
        """Go on with the span of V Y."""
        size = self.space.size
        C = self.space.restart(Y)
        self.before, self.current = (C.T @ padded(Z, size) if len(Z) else Z for Z in (self.before, self.current))
        self.family = None if self.family is None else C.T @ self.family @ C

    def interrupted(self) -> bool:
        """Whether the callback stops it."""
        return self.callback is not None and bool(self.callback(self.report()))

    def report(self) -> Progress:
        """For the callback."""
        scale = 2.0**self.products.exponent
        order = self.values[: self.k].argsort(descending=True)
        return Progress(
            self.values[order] * scale,
            self.residuals[order] * scale,
            self.products.norm * scale,
            self.products.count,
            "searching" if self.searching or self.family is not None else "iterating",
        )


class Missing:
    """The smallest |λ| on the complement of what was found, from random vectors alone.

    The approximations are the smallest singular vectors of AV and the Ritz vectors among them. The j-th smallest
    singular value is an upper bound of the j-th smallest |λ| left, and falls with every vector that joins (Courant and
    Fischer, for A²), so that nothing that was gained is lost at a restart, and whatever is missing lowers it. V grows
    by M⁻¹r and M⁻¹AM⁻¹r, which together tell both signs apart, for the first pair that is not clear.

    Attributes
    ----------
    smaller : (s, n)
        Approximate eigenvectors whose |λ| is less than ``reach`` for certain: |θ| + ‖r‖ is.
    beyond
        Once it is through: min |θ| − ‖r‖ over the clear pairs, of what is left.
    stopped
        Why it ended without an answer; None: it did not.
    """

    def __init__(
        self,
        products: Products,
        excluded: Excluded,
        wanted: torch.Tensor,
        *,
        reach: float,
        slack: float,
        inverse: ApproximateInverse | None,
        fresh: torch.Generator,
        capacity: int,
        max_products: int,
    ) -> None:
        """``wanted`` (k, n): what was found, up to |λ| = ``reach``; closer than ``slack`` to it is the same."""
        self.products, self.excluded, self.wanted = products, excluded.beside(wanted), wanted
        self.reach, self.slack, self.inverse, self.fresh = reach, slack, inverse, fresh
        self.max_products = max_products
        self.space = SingularSpace(capacity, products.order, wanted.dtype, products.device)
        self.ways = expansions(products, self.excluded, inverse)
        self.way = self.ways.pop(0)
        self.ratio, self.target = Ratio(), 0
        self.Y = self.values = self.norms = torch.zeros(0, dtype=torch.float64)
        self.vectors = self.remainders = wanted[:0]
        self.current = self.before = torch.zeros(0, 0, dtype=torch.float64)
        self.smaller, self.beyond = wanted[:0], math.inf
        self.stopped: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the space is all that is left."""
        return self.space.size >= self.products.order - self.excluded.dimension

    def run(self, interrupted: Callable[[], object]) -> None:
        """Until nothing smaller is left, or something is found, or ``interrupted`` says so."""
        for row in random_rows(BLOCK, self.wanted, self.inverse, self.fresh):
            self.join(row[None])
        while self.stopped is None:
            target = self.measure()
            if target is None:
                return
            if self.products.count >= self.max_products:
                self.stopped = f"not within {self.max_products} products: anything smaller is not excluded yet"
            elif interrupted():
                self.stopped = "stopped by the callback"
            else:
                self.expand(target)

    def measure(self) -> int | None:
        """Form the first pairs; which one to improve, or None if there is an answer."""
        self.rayleigh_ritz(self.space.pairs()[:, : PAIRS + 1])
        sizes, norms, least = self.values.abs(), self.norms, self.reach * (1 - self.slack)
        below = sizes + norms < least
        if bool(below.any()):
            self.smaller = self.vectors[below.to(self.vectors.device)]
            return None
        clear = (sizes >= least) & (norms <= (CLEAR * (sizes - self.reach)).clamp_min(self.slack * self.reach))
        unclear = (~clear[:PAIRS]).nonzero()[:, 0].tolist()
        if self.complete or (not unclear and len(clear) >= PAIRS):
            self.beyond = float((sizes - norms)[:PAIRS].min()) if len(sizes) else math.inf
            return None
        return unclear[0] if unclear else 0

    def rayleigh_ritz(self, Y: torch.Tensor) -> None:
        """Ritz pairs, smallest |θ| first, from singular vectors V Y: those mix λ and −λ.

        Few small Ritz values are near eigenvalues at first, but what is not resolved yet shows in them: with the
        smallest ‖Au‖ first, fewer products are needed and more is missed.
        """
        U, images = self.space.vectors(Y)
        images = self.excluded.remove(images)
        H = (U @ images.T).double().cpu()
        values, Z = torch.linalg.eigh((H + H.T) / 2)
        ranked = values.abs().argsort(stable=True)
        self.values, Z = values[ranked], Z[:, ranked]
        self.Y, self.vectors = Y @ Z, Z.T.to(U) @ U
        self.remainders = Z.T.to(U) @ images - self.values[:, None].to(U) * self.vectors
        self.norms = torch.linalg.vector_norm(self.remainders, dim=1).double().cpu()

    def expand(self, target: int) -> None:
        """One step for a pair, in another way if the last one makes no more progress."""
        if target != self.target:
            self.target = target
            self.ratio.history.clear()
            self.before = self.current = self.current[:0]
        # all the images together: they fall with each step, as |θ| need not
        size = math.hypot(*self.values.tolist(), *self.norms.tolist())
        self.ratio.observe(size, float(self.norms[target] ** 2), self.products.error)
        if self.ratio.stagnates(self.way.patience):
            if not self.ways:
                self.stopped = "the search stagnated: anything smaller is not excluded"
                return
            self.way = self.ways.pop(0)
            self.ratio.history.clear()
        self.before, self.current = self.current, self.Y[:, target : target + 1]
        r = self.remainders[target : target + 1]
        found = torch.cat([self.wanted, self.vectors[: target + 1]])
        pair = Pair(float(self.values[target]), r, self.solve(r), found)
        self.join(self.way.direction(pair, self.max_products - self.products.count))
        if isinstance(self.way, PreconditionedResidual) and not self.complete:
            last = torch.zeros(self.space.size, 1, dtype=torch.float64)
            last[-1] = 1
            self.join(self.solve(self.excluded.remove(self.space.vectors(last)[1])))

    def solve(self, row: torch.Tensor) -> torch.Tensor:
        """M⁻¹ applied to ``row`` (1, n)."""
        return row if self.inverse is None else self.inverse.solve(row.T).T.to(row)

    def join(self, row: torch.Tensor) -> None:
        """The space grows by what is new in ``row`` (1, n), or by a random direction if nothing is."""
        if self.complete:
            return
        v = orthonormal(row, self.excluded, self.space.V)
        while v is None:
            v = orthonormal(random_rows(1, self.wanted, None, self.fresh), self.excluded, self.space.V)
        if self.space.size == self.space.capacity:
            self.restart()
        self.space.append(v, self.products.images(v))

    def restart(self) -> None:
        """Keep the smallest singular vectors, and the target as it was before the last steps (GD+k)."""
        size = self.space.size
        keep = max(size // 3, PAIRS)
        kept = [self.space.pairs()[:, :keep], *(padded(Y, size) for Y in (self.before, self.current) if len(Y))]
        C = self.space.restart(torch.cat(kept, 1))
        self.before, self.current = (C.T @ padded(Y, size) if len(Y) else Y for Y in (self.before, self.current))

"""Eigenvalues at the ends of a spectrum by thick-restart Lanczos, with true residuals and a search for missed ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from hesscond.errors import ConfigError, bytes_of
from hesscond.operators import SymmetricOperator, as_operator
from hesscond.spectra import eigen, krylov

#: Default probability with which an eigenvalue may be missed.
MISSED = 1e-6

#: Residuals must halve within this many continuations, or the products are noisier than they claim.
ATTEMPTS = 3

#: One eigenvalue whose residual is small is iterated on for this many products more than it took, if that narrows the
#: interval that the largest one is in.
MORE = 20

#: Ritz vectors at the far end with estimates below this, relative to the norm, are kept at a restart.
FAR = 1e-3


def lanczos(
    operator: SymmetricOperator | Any,
    k: int = 1,
    which: str = "top",
    *,
    tol: float = 1e-8,
    basis: int | None = None,
    memory: float | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    max_products: int | None = None,
    missed: float = MISSED,
) -> eigen.EigenResult:
    """Eigenvalues at the ends of the spectrum of a symmetric operator A (n, n) with their eigenvectors.

    Thick-restart Lanczos with full reorthogonalization. Vectors stay on the operator's device; only the projected
    problem, of the size of the basis, is solved on the host, in float64. All thresholds are relative to the largest |θ|
    seen: c·A has c times the eigenvalues of A, whatever c.

    Parameters
    ----------
    operator
        A, or anything `hesscond.operators.as_operator` takes: a matrix, an operator of scipy or curvlinops.
    k
        Number of eigenvalues at each end.
    which
        "top" or "bottom" (the algebraically largest or smallest), "both" (k of each), "magnitude" (largest |λ|).
    tol
        Residual norms asked for, relative to the largest |θ| seen.
    basis
        Number of vectors of length n that may be held, plus 5 more; by default 32, or 2·(wanted) + 7 if that is more.
    memory
        Bytes for all of them; a smaller basis is restarted earlier.
    dtype
        Precision of the vectors, by default that of the operator. With torch.float64 for a float32 operator the
        recurrences are exact and the products alone are rounded.
    seed
        Seed of all random vectors.
    max_products
        Largest number of products with one vector; by default 10 n + 1,000, at most 100,000.
    missed
        Probability with which an eigenvalue further out may be overlooked, by default 1e-6; 1: no search, and no such
        claim.

    Raises
    ------
    ConfigError
        An unknown option, or a basis too small for k.
    MatrixError
        k is larger than n; ``memory`` is too small; a product is not finite.

    Notes
    -----
    *Certain*, up to the rounding of the products (``operator.rounding``): θ ± ‖r‖ contains an eigenvalue of A,
    overlapping intervals contain as many as there are, and the i-th eigenvalue from the top is no smaller than the i-th
    value (from the bottom: no larger).

    *Except with the probability* ``missed`` *over random vectors*, nothing further out was missed, so that the i-th
    interval contains the i-th eigenvalue: the eigenvector of the outermost one has a component of known size in a
    random start. If several are wanted, a second process on the complement of the values found looks for further
    copies of multiple ones (docs/concepts/bounds.md).

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> found = lanczos(Diagonal(torch.arange(1.0, 1001.0, dtype=torch.float64)), k=2, which="both")
    >>> found.converged, [round(value, 6) for value in found.eigenvalues.tolist()]
    (True, [1000.0, 999.0, 2.0, 1.0])
    """
    A = as_operator(operator)
    wanted = eigen.Wanted(which, k, A.order)
    dtype = A.dtype if dtype is None else dtype
    memory = bytes_of(memory)
    if max_products is None:
        max_products = min(10 * A.order + 1000, 100_000)
    if max_products < 2 * wanted.count + 1:
        raise ConfigError(
            f"max_products={max_products} is too few for {wanted.count} eigenvalues: "
            f"at least {2 * wanted.count + 1} are needed"
        )

    room = None if memory is None else int(memory)
    rows = krylov.planned_rows(A.order, wanted.count, basis=basis, memory=room, dtype=dtype)
    fresh = torch.Generator(A.device).manual_seed(seed)
    storage = krylov.Basis(rows, A.order, dtype=dtype, device=A.device)
    process = krylov.Krylov(A, storage, dtype=dtype, fresh=fresh)
    run = Run(process, wanted, tol=tol, missed=missed, max_products=max_products)
    process.start()
    return run.finish()


class Run:
    """One call of `lanczos`: iterate, measure the residuals, search for missed eigenvalues, report.

    Values are those of the process, which has scaled the operator.
    """

    def __init__(
        self,
        process: krylov.Krylov,
        wanted: eigen.Wanted,
        *,
        tol: float,
        missed: float,
        max_products: int,
    ) -> None:
        self.process, self.wanted = process, wanted
        self.tol, self.missed, self.max_products = tol, missed, max_products
        self.norm = 0.0
        self.values = self.residuals = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.patience: int | None = None  # products after which the interval is taken as it is
        self.stopped: str | None = None

    @property
    def rounding(self) -> float:
        """Bound of the rounding errors of values and residuals."""
        return self.process.rounding * self.norm

    @property
    def target(self) -> float:
        """Target of the residuals: as requested, or as small as rounding allows."""
        return max(self.tol * self.norm, self.rounding)

    @property
    def conclusive(self) -> bool:
        """Whether the iteration itself shows that nothing is further out: it seeks one value from a random start."""
        return self.wanted.k == 1 and self.missed < 1 and self.process.roots is not None and self.process.first == 0

    def reached(
        self, values: torch.Tensor, ritz: torch.Tensor, errors: torch.Tensor, extremes: eigen.Interval | None = None
    ) -> eigen.Interval:
        """Closest limits that all other eigenvalues are within, up to a factor of √2."""
        places = partial(self.wanted.limits, values, ritz=extremes)
        return krylov.closest(
            places, self.target, lambda limits: self.process.within(limits, ritz, errors, self.missed)
        )

    def finish(self) -> eigen.EigenResult:
        """Iterate, measure and search until the result is settled, or something stops the run."""
        rest, best, attempts = None, math.inf, 0
        while self.stopped is None:
            self.iterate()
            left = self.measure()
            if self.stopped is not None:
                break
            if left is not None and not self.process.complete:
                # the estimates were optimistic: go on from the true residuals
                worst = float(self.residuals.max())
                attempts = 0 if worst < best / 2 else attempts + 1
                best = min(best, worst)
                if attempts < ATTEMPTS:
                    self.process.seed(*left)
                else:
                    self.stopped = (
                        f"residuals stay at {worst / self.norm:.1e} of the norm, products are noisier than the "
                        f"{self.process.rounding:.1e} they should be: ask for a larger tol or repair the operator"
                    )
                continue
            best, attempts = math.inf, 0
            if self.process.complete:
                rest = self.others()
                break
            if self.missed >= 1 or self.conclusive:
                break
            rest = self.search()
            if rest is not None:
                break
        return self.result(rest)

    # -- iterating ----------------------------------------------------------------------------------------------------

    def iterate(self) -> None:
        """Expand and restart until the estimates settle; the wanted Ritz vectors are the first rows then."""
        process, count = self.process, self.wanted.count
        while True:
            if process.size >= count:
                values, Y = torch.linalg.eigh(process.T)
                self.norm = max(self.norm, float(values.abs().max()))
                chosen = self.wanted.preference(values)
                errors = process.estimates(Y)
                estimates = errors[chosen[:count]]
                settled = process.complete or bool((estimates <= self.target).all())
                if settled and self.conclusive and not process.complete:
                    # as many products again, and the interval is as wide as it is then
                    self.patience = self.patience or 2 * process.products + MORE
                    limits = self.wanted.limits(values[chosen[:count]], self.target)
                    waited = process.ended or process.products >= self.patience
                    settled = waited or process.within(limits, values, errors, self.missed)
                if settled or process.full or self.spent():
                    process.restart(Y[:, self.kept(chosen, errors, count)])
                    if settled or self.stopped is not None:
                        return
            process.expand()

    def kept(self, chosen: torch.Tensor, errors: torch.Tensor, first: int) -> torch.Tensor:
        """Ritz vectors that a restart keeps."""
        process, count = self.process, len(chosen)
        if process.complete:
            return chosen
        room = process.basis.capacity - len(process.next) - (process.size - count)
        kept = min(first + (count - first) // 2, room)
        far = 0
        while far < (kept - first) // 2 and errors[chosen[-1 - far]] <= FAR * self.norm:
            far += 1
        return torch.cat([chosen[: kept - far], chosen[count - far :]])

    def spent(self) -> bool:
        """Whether only the products that measure the residuals are left."""
        needed = 1 + self.wanted.count
        if self.stopped is None and self.process.products + needed > self.max_products:
            self.stopped = f"stopped after {self.process.products} products: allow more"
        return self.stopped is not None

    def measure(self) -> tuple[torch.Tensor, int] | None:
        """Measure the true residuals of the wanted vectors; return the first that is too large, and its index."""
        count = min(self.wanted.count, self.process.size)
        self.values, self.residuals, left = self.process.measure(count, self.target)
        self.norm = max(self.norm, float(self.values.abs().max()))
        return left

    # -- searching ----------------------------------------------------------------------------------------------------

    def search(self) -> eigen.Interval | None:
        """Bound all other eigenvalues, from a random vector; None if a wanted one turned up, or at a stop."""
        process, wanted, locked = self.process, self.wanted, len(self.values)
        process.truncate(self.values)
        process.start()
        while not self.spent():
            process.expand()
            values, Y = torch.linalg.eigh(process.T[locked:, locked:])
            self.norm = max(self.norm, float(values.abs().max()))
            if wanted.displaced(self.values, values, 2 * self.rounding):
                return None
            ritz = eigen.Interval(float(values[0]), float(values[-1]))
            if process.complete:
                return eigen.Interval(ritz.low - self.rounding, ritz.high + self.rounding)
            errors = process.estimates(torch.cat([Y.new_zeros(locked, Y.shape[1]), Y]))
            limits = wanted.limits(self.values, self.target, ritz)
            if process.within(limits, values, errors, self.missed):
                return limits
            if process.ended:
                return self.reached(self.values, values, errors, ritz)
            if process.full:
                chosen = self.kept(wanted.rivals(values), errors, 1)
                process.restart(torch.block_diag(torch.eye(locked, dtype=Y.dtype, device="cpu"), Y[:, chosen]))
        return None

    def others(self) -> eigen.Interval:
        """Interval of the eigenvalues that were not wanted, from a basis of the whole space."""
        rest = self.process.T.diagonal()[len(self.values) :]
        if not len(rest):
            return eigen.Interval(math.inf, -math.inf)
        return eigen.Interval(float(rest.min()) - self.rounding, float(rest.max()) + self.rounding)

    # -- reporting ----------------------------------------------------------------------------------------------------

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Convert numbers of the process to the scale of the operator."""
        exponent = self.process.exponent or 0
        half = exponent // 2  # 2^exponent itself may overflow
        return values * 2.0**half * 2.0 ** (exponent - half)

    def result(self, rest: eigen.Interval | None) -> eigen.EigenResult:
        """Return the result in the scale of the operator; the basis is freed."""
        process = self.process
        order = self.values.argsort(descending=True, stable=True)
        values, residuals = self.values[order], self.residuals[order]
        lower, upper = eigen.intervals(values, residuals, self.rounding, rest)
        alone = rest is None and self.conclusive
        if alone:
            lower, upper = self.outermost(values, lower, upper)
        settled = residuals <= self.tol * self.norm
        searched = alone or rest is not None or self.missed >= 1
        converged = bool(settled.all()) and searched and self.stopped is None
        exponent = process.exponent or 0
        count, products = len(order), process.products
        eigenvectors = process.basis.release(count)
        if not torch.equal(order, torch.arange(count, device="cpu")):
            eigenvectors = eigenvectors[:, order.to(eigenvectors.device)]
        return eigen.EigenResult(
            eigenvalues=self.scaled(values),
            eigenvectors=eigenvectors,
            residuals=self.scaled(residuals),
            lower=self.scaled(lower),
            upper=self.scaled(upper),
            settled=settled,
            converged=converged,
            products=products,
            norm=math.ldexp(self.norm, exponent),
            null=0,
            vectors=process.basis.capacity + max(krylov.WORKING, self.wanted.count),
            message=self.message(rest, bool(settled.all())),
        )

    def outermost(
        self, values: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Extend the intervals ``lower`` to ``upper`` outwards to the limit beyond which there is no eigenvalue."""
        ritz, Y = torch.linalg.eigh(self.process.T)
        limits = self.reached(values, ritz, self.process.estimates(Y))
        low = (
            values < 0
            if self.wanted.ends == ("size",)
            else torch.tensor([end == "low" for end in self.wanted.ends], device="cpu")
        )
        return (
            torch.where(low, lower.clamp_max(limits.low - self.rounding), lower),
            torch.where(low, upper, upper.clamp_min(limits.high + self.rounding)),
        )

    def message(self, rest: eigen.Interval | None, settled: bool) -> str:
        """Message on how the run ended, with advice if it did not converge."""
        if self.stopped is not None:
            return self.stopped
        if not settled:
            return (
                f"residuals are as small as rounding lets them be, {self.process.rounding:.1e} of the norm, "
                f"which is more than tol={self.tol:.1e}: ask for a larger tol or use an operator of higher precision"
            )
        if self.missed >= 1:
            return "all residuals are settled; no search for missed eigenvalues was asked for"
        if rest is None:
            return f"all residuals are settled; nothing is further out, but for a probability of {self.missed:.0e}"
        if self.process.complete:
            return "all residuals are settled; the basis spans the whole space"
        return "all residuals are settled, and a search from a random vector found no eigenvalue that was missed"

"""Eigenvalues from products alone: the choice of wanted eigenvalues, and results with their evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from hesscond.errors import ConfigError, MatrixError, did_you_mean

#: Keys by which eigenvalues are ordered at the ends of a spectrum, the outermost with the largest key.
KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "high": lambda values: values,
    "low": torch.neg,
    "size": torch.abs,
}

#: Ends of the spectrum for each choice; k eigenvalues are computed at each end.
ENDS: dict[str, tuple[str, ...]] = {
    "top": ("high",),
    "bottom": ("low",),
    "both": ("high", "low"),
    "magnitude": ("size",),
}

#: Eigenvalues that differ by up to this multiple of the requested residuals are not distinguished.
TIE = 10


@dataclass(frozen=True)
class Interval:
    """Interval low ≤ λ ≤ high."""

    low: float
    high: float


@dataclass(frozen=True, repr=False)
class EigenResult:
    """Wanted eigenvalues of a symmetric operator with their evidence.

    Attributes
    ----------
    eigenvalues : (k,) float64
        Descending.
    eigenvectors : (n, k)
        Orthonormal, on the operator's device, in the precision of the recurrences.
    residuals : (k,) float64
        True residual norms ‖Av − θv‖, from a product with each vector returned.
    lower, upper : (k,) float64
        An interval for each that contains an eigenvalue: θ ± (‖r‖ + the rounding of a product), and the narrower
        θ ± ‖r‖²/gap where the distance to the rest of the spectrum is known (Kato and Temple). If ``converged``, the
        i-th contains the i-th eigenvalue, but for a probability of 1e-6 (or what was asked for as ``missed``).
    settled : (k,) bool
        Whether each residual is no larger than requested, relative to ``norm``.
    converged
        Whether all are settled and no eigenvalue further out was missed, as far as random vectors show it.
    products
        Products of the operator with one vector that were needed.
    norm
        The largest |θ| seen: a lower bound of ‖A‖₂.
    null
        Number of null directions that `smallest_nonzero` found and left out: eigenvalues that cannot be distinguished
        from zero.
    vectors
        Largest number of vectors of length n that were held at a time.
    message
        Outcome of the iteration, and advice if it did not converge.
    """

    eigenvalues: torch.Tensor
    eigenvectors: torch.Tensor
    residuals: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor
    settled: torch.Tensor
    converged: bool
    products: int
    norm: float
    null: int
    vectors: int
    message: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __str__(self) -> str:
        rows = zip(self.eigenvalues.tolist(), self.lower.tolist(), self.upper.tolist(), strict=True)
        values = ", ".join(f"{value:.10g} ± {max(high - value, value - low):.1g}" for value, low, high in rows)
        return f"λ = {values or 'none'} ({self.products} products; {self.message})"


def intervals(
    values: torch.Tensor, residuals: torch.Tensor, rounding: float, rest: Interval | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Intervals (lower, upper) of the eigenvalues that descending Ritz values θ with residuals ‖Au − θu‖ approximate.

    Without ``rest``, they are θ ± (‖r‖ + rounding), with ‖R‖_F for values whose intervals overlap. With bounds ``rest``
    of the spectrum of A on the complement of U (empty if low > high) the i-th interval contains the eigenvalue of the
    same place in the order of values and rest, and is quadratic in ‖R‖_F (docs/concepts/bounds.md).
    """
    theta, norms = values.tolist(), residuals.tolist()
    lower, upper = [], []
    for group in _groups(theta, norms, rounding):
        spread = math.hypot(*norms[group]) + rounding
        others = [i for i in range(len(theta)) if not group.start <= i < group.stop]
        disturbed = math.hypot(*(norms[i] for i in others)) + rounding
        for value in theta[group]:
            low = high = value
            error = spread
            if rest is not None:
                gap = min((abs(value - theta[i]) - disturbed for i in others), default=math.inf)
                if rest.low <= rest.high:
                    # the other values are coupled to the rest, which shifts it as well
                    gap = min(gap, max(value - rest.high, rest.low - value) - disturbed)
                    low, high = _reached(value, rest)
                error = (quadratic(spread, gap) if gap > 0 else math.hypot(spread, disturbed)) + rounding
            lower.append(low - error)
            upper.append(high + error)
    return torch.tensor(lower, dtype=torch.float64, device="cpu"), torch.tensor(
        upper, dtype=torch.float64, device="cpu"
    )


def quadratic(residual: float, gap: float) -> float:
    """Bound 2ρ² / (g + √(g² + 4ρ²)) of an eigenvalue's error for ρ and g > 0: at most ρ, and at most ρ²/g."""
    ratio = residual / gap
    return 2 * residual * ratio / (1 + math.sqrt(1 + 4 * ratio * ratio))


def _groups(theta: list[float], norms: list[float], rounding: float) -> list[slice]:
    """Runs of descending values whose intervals overlap."""

    def radius(run: slice) -> float:
        return math.hypot(*norms[run]) + rounding

    runs: list[slice] = []
    for i in range(len(theta)):
        runs.append(slice(i, i + 1))
        while len(runs) > 1 and theta[runs[-2].stop - 1] - theta[runs[-1].start] <= radius(runs[-2]) + radius(runs[-1]):
            last = runs.pop()
            runs[-1] = slice(runs[-1].start, last.stop)
    return runs


def _reached(value: float, rest: Interval) -> tuple[float, float]:
    """Interval between ``value`` and the nearer end of ``rest``, if the rest extends beyond the value."""
    if not rest.low <= value <= rest.high:
        return value, value
    return (value, rest.high) if rest.high - value <= value - rest.low else (rest.low, value)


class Wanted:
    """Choice of k eigenvalues at each end of a spectrum of n; ``count`` is their total number."""

    def __init__(self, which: str, k: int, order: int) -> None:
        if which not in ENDS:
            raise ConfigError(f"which='{which}' is not known: {did_you_mean(which, ENDS)}")
        if not isinstance(k, SupportsIndex) or not 1 <= k <= order:
            raise MatrixError(f"an operator of order {order} has no {k!r} eigenvalues: k is 1 to {order}")
        self.k, self.ends = k, ENDS[which]
        self.count = min(k * len(self.ends), order)

    def preference(self, values: torch.Tensor) -> torch.Tensor:
        """Indices of ``values`` in the order in which they are wanted, the ends taking turns."""
        return _outermost(values, self.ends)

    def rivals(self, values: torch.Tensor) -> torch.Tensor:
        """Indices of ``values`` in the order in which they bound others, the sides of the spectrum taking turns."""
        return _outermost(values, [side for side in ("high", "low") if side in self.ends or "size" in self.ends])

    def last(self, end: str, values: torch.Tensor) -> torch.Tensor:
        """Return the k-th of ``values`` from an end."""
        key = KEYS[end](values)
        return key.sort(descending=True).values[min(self.k, len(key)) - 1]

    def displaced(self, values: torch.Tensor, others: torch.Tensor, slack: float) -> bool:
        """Whether one of ``others`` is further out than the wanted ``values``."""
        return any(bool((KEYS[end](others) > self.last(end, values) + slack).any()) for end in self.ends)

    def limits(self, values: torch.Tensor, slack: float, ritz: Interval | None = None) -> Interval:
        """Limits, on each relevant side, beyond which there should be no other eigenvalues; infinite on other sides."""
        places = []
        for side, sign in (("low", -1), ("high", 1)):
            ends = [end for end in self.ends if end in (side, "size")]
            place = float(self.last(ends[0], values)) if ends else math.inf
            if ends and ritz is not None:
                extreme = sign * (ritz.low if sign < 0 else ritz.high)
                place = max((place + extreme) / 2, extreme + TIE * slack)
            places.append(sign * (place + slack if ritz is None else place))
        return Interval(*places)


def _outermost(values: torch.Tensor, ends: Sequence[str]) -> torch.Tensor:
    ranks = [KEYS[end](values).argsort(descending=True, stable=True).argsort() for end in ends]
    return torch.stack(ranks).amin(0).argsort(stable=True)

"""Condition number as a result that includes the evidence for it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from hesscond import causes
from hesscond.sheets import CONDITION, ends, in_coordinates

#: Values are called zero only if the next larger one exceeds their error bound by this factor …
GAP = 1e3
#: … and they are no larger than this many units of round-off: what lies between that and the bound is unresolved.
NOISE = 16.0
EPS = sys.float_info.epsilon

RankDecision = Literal["structural", "exact", "numerical", "iterative", "zero", "unresolved"]


@dataclass(frozen=True, slots=True)
class ConditionNumber:
    """κ = |λ|_max / |λ|_min over the nonzero eigenvalues of a symmetric matrix, with its evidence.

    For a nonsymmetric matrix every λ below reads σ, a singular value. ``float(cn)`` is ``cn.value``.

    Attributes
    ----------
    value
        κ; ``inf`` if unresolved, and of zero, which has none.
    lower, upper
        An interval that contains κ of the matrix or factor that was given (its own rounding not counted); with a
        ``"numerical"`` rank, κ with the values of the size of round-off taken as zeros. ``upper`` is ``inf``
        if unresolved.
    lambda_max, lambda_min
        Largest and smallest nonzero |λ| (unresolved: the smallest that is certain, or an upper bound).
    rank, nullity
        Number of eigenvalues that are certainly nonzero, and of the others.
    negative
        Number of negative eigenvalues among the nonzero ones; a lower bound if they were not all counted.
    cutoff
        Largest |λ| that cannot be distinguished from zero: the error bound of the solver at the rank decision.
    gap
        ``lambda_min`` over the larger of ``cutoff`` and the largest |λ| treated as zero.
    resolved
        Whether the smallest nonzero eigenvalue was separated from zero.
    solver
        How the values were computed.
    rank_decision
        ``"structural"``: as many values are provably nonzero as the zero pattern and repeated rows and columns
        allow. ``"exact"``: as many as the exact rank, see `exact_rank`. ``"numerical"``: the rest are of the size of
        round-off, with a gap of at least 1e3 above their error bounds, and count as zeros: a choice, made where the
        matrix is itself rounded, as activations of a forward pass are. ``"iterative"``: a matrix-free iteration
        converged to the smallest nonzero one; that none is smaller is as certain as its random starts, ``rank`` is an
        upper bound and ``negative`` a lower one. ``"zero"``: H is zero, exactly or to the rounding of the terms that it
        is the difference of: rank 0, and no κ. ``"unresolved"``: none of these.
    negative_counted
        Whether ``negative`` is the exact number.
    cause
        Why κ is unresolved, or what it means that H is zero, and what to do: `reason` and `advice`.
    """

    value: float
    lower: float
    upper: float
    lambda_max: float
    lambda_min: float
    rank: int
    nullity: int
    negative: int
    cutoff: float
    gap: float
    resolved: bool
    solver: str
    rank_decision: RankDecision
    negative_counted: bool = True
    cause: causes.Cause = causes.NOTHING

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"<ConditionNumber: {self._described('')}>"

    def __str__(self) -> str:
        return self._described(f": {self.reason}" if self.reason else "")

    def _described(self, why: str) -> str:
        order = self.rank + self.nullity
        if self.is_zero:
            return f"no κ: {self.reason} (rank 0 of {order})"
        if not self.resolved:
            return f"κ ≥ {self.lower:.3g} (unresolved; {self.rank} of {order} eigenvalues certainly nonzero{why})"
        label = {"numerical": "numerical rank", "iterative": "rank at most"}.get(self.rank_decision, "rank")
        return f"κ = {self.value:.4g} ({label} {self.rank} of {order}, {self.inertia}; {self.solver})"

    def _repr_html_(self) -> str:
        from hesscond.sheets import html_table

        names = ("lower", "upper", "lambda_max", "lambda_min", "rank", "nullity", "negative", "cutoff", "gap")
        numbers = [(name, f"{getattr(self, name):.6g}") for name in names]
        words = [(name, getattr(self, name)) for name in ("rank_decision", "solver", "reason", "advice")]
        return html_table([], [("κ", self._described("")), *numbers, *(pair for pair in words if pair[1])])

    @property
    def reason(self) -> str:
        """Reason why κ is unresolved, or meaning of a zero H, in one sentence; empty if κ is resolved."""
        return self.cause.reason

    @property
    def advice(self) -> str:
        """Advice on an unresolved κ, in one sentence; empty if there is none."""
        return self.cause.advice

    def because(self, cause: causes.Cause) -> ConditionNumber:
        """Return the result with a cause, if it is unresolved and there is one."""
        return self if self.resolved or self.is_zero or not cause else replace(self, cause=cause)

    @property
    def is_zero(self) -> bool:
        """Whether H is zero, so that there is no κ."""
        return self.rank_decision == "zero"

    @property
    def inertia(self) -> str:
        """Number of negative eigenvalues in words, as far as they were counted."""
        if self.negative_counted:
            return f"{self.negative} negative"
        return f"at least {self.negative} negative" if self.negative else "negative ones not counted"

    @property
    def counted_negative(self) -> int | None:
        """Number of negative eigenvalues, or None if only a lower bound is known."""
        return self.negative if self.negative_counted else None

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of κ in tables and logs, by name; negative is None if only a lower bound is known."""
        cells = {name: getattr(self, attribute) for name, (attribute, _) in CONDITION.items()}
        return cells | {"resolved": int(self.resolved)}

    def columns_in(self, coordinates: str) -> dict[str, Any]:
        """Columns of κ in other coordinates next to those of the plain one, such as kappa_own and rank_own."""
        plain, names = self.columns, (*ends("kappa"), "rank", "resolved")
        return {in_coordinates(name, coordinates): plain[name] for name in names}

    def widened(self, error: float, cause: causes.Cause = causes.SUMMED) -> ConditionNumber:
        """Return the result if, for a cause, the matrix is known only up to an error of this 2-norm.

        It is unresolved if the smallest nonzero eigenvalue could be zero, or if one that was taken for zero could be as
        large. An eigenvalue that could be zero bounds nothing: the smallest nonzero one may be any other.
        """
        if self.is_zero:
            return self
        top, bottom = self.lambda_max, self.lambda_min
        lower = 1.0
        if bottom > error:
            lower = max(1.0, (top - error) / (bottom + error) * min(1.0, bottom / top * self.lower))
        needed = error if self.rank_decision == "structural" else GAP * error
        if not self.resolved or bottom <= needed:
            # which of the eigenvalues between the two ends exceed the error is not known here
            certain = (self.rank, self.negative) if bottom > error else (int(top > error), 0)
            return replace(
                self,
                rank=certain[0],
                nullity=self.rank + self.nullity - certain[0],
                negative=certain[1],
                value=math.inf,
                lower=lower,
                upper=math.inf,
                cutoff=max(self.cutoff, error),
                resolved=False,
                rank_decision="unresolved",
                cause=cause if self.resolved else self.cause,
            )
        upper = (top + error) / (bottom - error) * (self.upper / self.value)
        gap = min(self.gap, bottom / error)
        return replace(self, lower=lower, upper=upper, cutoff=max(self.cutoff, error), gap=gap)

    @property
    def width(self) -> float:
        """Relative width of the interval, (upper − lower) / value; ``inf`` if unresolved."""
        return (self.upper - self.lower) / self.value if math.isfinite(self.value) else math.inf


def error_factor(m: int, n: int) -> float:
    """Constant c of the bounds c·eps·(norm): √(mn), the probabilistic growth of rounding errors.

    The worst-case constants of backward error analysis grow like m·n and are never seen; with independent
    rounding errors the growth is their square root (Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    return max(16.0, math.sqrt(m * n))


class Values(NamedTuple):
    """Values that a solver found, with bounds of their errors.

    ``magnitudes`` (k,) descending: singular values σ (``power`` 2, the eigenvalues are σ²) or |λ| (``power`` 1);
    ``errors`` (k,): absolute bounds, which hold; ``floors`` (k,): the size that round-off alone typically has;
    ``negative`` (k,) bool: which belong to negative eigenvalues (None: none do); ``above`` (k,): how far the true
    value can lie above, where ``errors`` only says how far below (None: as far).
    """

    magnitudes: np.ndarray
    errors: np.ndarray
    floors: np.ndarray
    power: int
    solver: str
    negative: np.ndarray | None = None
    above: np.ndarray | None = None

    @classmethod
    def normwise(
        cls, magnitudes: np.ndarray, shape: tuple[int, int], error: float = 0.0, *, power: int, solver: str
    ) -> Values:
        """Values of a matrix of this ``shape``, each known to c·eps times the largest, and ``error``."""
        unit = EPS * float(magnitudes[0])
        bound, floor = error_factor(*shape) * unit + error, NOISE * unit
        errors, floors = np.full(len(magnitudes), bound), np.full(len(magnitudes), floor)
        return cls(magnitudes, errors, floors, power, solver)


def unresolved(result: ConditionNumber, cause: causes.Cause) -> ConditionNumber:
    """Return the result without its upper end, since ``cause`` contradicts the rank that was decided."""
    # for an undecided rank of 0, even the size is unknown
    largest = result.lambda_max if result.rank else math.nan
    kappa = replace(result, value=math.inf, upper=math.inf, lambda_max=largest, resolved=False, cause=cause)
    return replace(kappa, rank_decision="unresolved")


def zero_matrix(order: int) -> ConditionNumber:
    """Result for the zero matrix, which has no nonzero eigenvalue and so no κ."""
    return ConditionNumber(
        math.inf, 1.0, math.inf, 0.0, 0.0, 0, order, 0, 0.0, 0.0, False, "zero matrix", "zero", cause=causes.ZERO
    )


def conclude(values: Values, *, order: int, limit: int, scale: int, exact: bool = False) -> ConditionNumber:
    """Decide the rank from values with error bounds and form κ; ``order`` and ``scale`` are those of `CoreForm`."""
    magnitudes, errors, floors, power, solver, negative, _ = values
    above = errors if values.above is None else values.above
    considered = min(limit, len(magnitudes))
    certain = magnitudes[:considered] > errors[:considered]
    rank = considered if certain.all() else int(np.argmin(certain))
    if rank == 0:
        return replace(
            zero_matrix(order),
            lambda_max=enlarged(float(magnitudes[0]), power, scale),
            cutoff=enlarged(float(errors[0]), power, scale),
            solver=solver,
            rank_decision="unresolved",
            cause=causes.NONE_TOLD,
        )
    top, bottom = float(magnitudes[0]), float(magnitudes[rank - 1])
    e_top, e_bottom = float(errors[0]), float(errors[rank - 1])
    if rank == considered:
        decision: RankDecision = "exact" if exact else "structural"
        noise = cutoff = e_bottom
    else:
        rest = slice(rank, considered)
        cutoff = float(errors[rank])
        noise = max(cutoff, float(magnitudes[rest].max()))
        roundoff = (magnitudes[rest] <= floors[rest]).all()
        decision = "numerical" if roundoff and bottom >= GAP * noise and not exact else "unresolved"
    resolved = decision != "unresolved"
    cause = causes.NOTHING if resolved else causes.TIED if roundoff and not exact else causes.BELOW_BOUND
    rounding, raised = 8 * EPS, partial(enlarged, power=power, scale=0)
    # the smallest value that is certainly not zero, however small it is (none if it underflowed)
    smallest = (magnitudes + above)[considered - 1 if exact else rank - 1] or magnitudes[rank - 1] + above[rank - 1]
    lower = max(1.0, raised((top - e_top) / float(smallest)) * (1 - rounding))
    # beyond the largest double, only a lower bound is known
    lower = min(lower, sys.float_info.max)
    upper = raised((top + float(above[0])) / (bottom - e_bottom)) * (1 + rounding) if resolved else math.inf

    return ConditionNumber(
        value=raised(top / bottom) if resolved else math.inf,
        lower=lower,
        upper=upper,
        lambda_max=enlarged(top, power, scale),
        lambda_min=enlarged(bottom, power, scale),
        rank=rank,
        nullity=order - rank,
        negative=0 if negative is None else int(negative[:rank].sum()),
        cutoff=enlarged(cutoff, power, scale),
        gap=raised(bottom / noise) if noise > 0 else math.inf,
        resolved=resolved,
        solver=solver,
        rank_decision=decision,
        negative_counted=resolved or negative is None,
        cause=cause,
    )


def enlarged(magnitude: float, power: int, scale: int) -> float:
    """Return magnitude**power · 2**scale, infinite beyond the largest double."""
    try:
        return math.ldexp(magnitude**power, scale)
    except OverflowError:
        return math.inf

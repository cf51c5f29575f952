"""Error estimates of approximate eigenvalues from residuals, in the norm of A or of a preconditioner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

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

    def remember(self, before: float, predicted: float, now: float, noise: float) -> None:
        """Record a decrease that is to count permanently."""
        self.worst = max(self.worst, MEMORY * ratio(before, predicted, now, noise))

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


def residual_errors(magnitudes: torch.Tensor, residuals: torch.Tensor, *, complete: bool) -> Errors:
    """Errors |λ − θ| ≤ ‖r‖, and ‖R‖²/gap before a gap (Kato, Temple; for groups: Parlett 1998, section 11.7)."""
    theta, norms = magnitudes.tolist(), residuals.tolist()
    below = [value - norm for value, norm in zip(theta, norms, strict=True)]
    return grouped(theta, [norm * norm for norm in norms], norms, below, [1.0] * len(theta), complete)


def preconditioned_errors(magnitudes: torch.Tensor, energies: torch.Tensor, *, complete: bool) -> Errors:
    r"""Errors for A ≥ 0 in the norm of A⁻¹, from η ≈ rᵀA⁻¹r.

    With u = Σ c_i v_i, r = Σ c_i (λ_i − θ) v_i, some eigenvalue has (λ − θ)²/λ ≤ rᵀA⁻¹r, and the smallest has

    .. math:: θ − λ_1 ≤ rᵀA⁻¹r / (1 − θ/λ_2),

    because λ_i − θ ≥ (1 − θ/λ_2) λ_i for the others. High eigenvalues, which fill ‖r‖ long after θ has converged,
    have the weight here that they have in the error.
    """
    theta, eta = magnitudes.tolist(), energies.tolist()
    alone = [math.sqrt(value * energy) for value, energy in zip(theta, eta, strict=True)]
    below = [value - error for value, error in zip(theta, alone, strict=True)]
    return grouped(theta, eta, alone, below, below, complete)


def grouped(
    theta: list[float],
    energies: list[float],
    alone: list[float],
    below: list[float],
    weights: list[float],
    complete: bool,
) -> Errors:
    """Smaller of the error alone and, over all s, Σ_{j≤s} energy_j · weight_{s+1} / (below_{s+1} − θ_s)."""
    count = len(theta)
    absolute, group = list(alone), [0] * count
    for s in range(count):
        if s + 1 < count:
            gap, weight = below[s + 1] - theta[s], weights[s + 1]
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

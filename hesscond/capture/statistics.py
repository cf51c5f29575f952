"""Mean and variance of every input feature of a layer, over a batch or merged over many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of the n input features of a layer over N samples.

    Attributes
    ----------
    count
        N.
    mu : (n,)
        Means.
    sum_squares : (n,)
        Σ_j (h_j − μ)², so that σ² = sum_squares / N (the biased variance, as in batch normalization).
    low, high : (n,)
        Smallest and largest value: a feature is dead, σ = 0, exactly where they are equal.
    """

    count: int
    mu: torch.Tensor
    sum_squares: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, h: torch.Tensor) -> FeatureStatistics:
        """Statistics of the rows of ``h`` (N, n)."""
        mu = h.mean(0)
        # not aminmax, which wakes every thread for however few numbers
        return cls(len(h), mu, (h - mu).square_().sum(0), h.amin(0), h.amax(0))

    @property
    def dead(self) -> torch.Tensor:
        """(n,) bool: the features that are constant over the samples, decided without rounding."""
        return self.low == self.high

    @cached_property
    def sigma(self) -> torch.Tensor:
        """(n,) standard deviations; exactly 0 where a feature is dead."""
        return (self.sum_squares / self.count).sqrt_().masked_fill_(self.dead, 0.0)

    def merged(self, other: FeatureStatistics) -> FeatureStatistics:
        """Statistics of both sets of samples together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        difference = other.mu - self.mu
        return FeatureStatistics(
            count,
            self.mu + difference * (other.count / count),
            self.sum_squares + other.sum_squares + difference.square() * (self.count * (other.count / count)),
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
        )

"""Mean, variance and covariance of the input features of a layer, over a batch or merged over many."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from hesscond.capture import captured
from hesscond.capture.kinds import Geometry, Layer
from hesscond.errors import CaptureError


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of the n input features of a layer over N samples, or of k layers over N each.

    For a convolution with G groups, the n = G·c·k entries are those of the inputs of the first group, then those of the
    next group, and so on. The variance is biased, σ² = ``sum_squares`` / N, as in batch normalization.
    """

    count: int  # N
    mu: torch.Tensor  # means (n,) or (k, n), as all that follow
    sum_squares: torch.Tensor  # Σ_j (h_j − μ)²
    low: torch.Tensor  # smallest value
    high: torch.Tensor  # largest value: a feature is dead, σ = 0, exactly where both are equal

    @classmethod
    def of(cls, h: torch.Tensor) -> FeatureStatistics:
        """Statistics of the rows of ``h`` (N, n) or (k, N, n)."""
        mu = h.mean(-2)
        # not aminmax, which wakes every thread even for a few numbers
        return cls(h.shape[-2], mu, (h - mu[..., None, :]).square_().sum(-2), h.amin(-2), h.amax(-2))

    def unbind(self) -> list[FeatureStatistics]:
        """Split the statistics of k layers into those of each layer."""
        parts = zip(*(part.unbind() for part in (self.mu, self.sum_squares, self.low, self.high)), strict=True)
        statistics = [FeatureStatistics(self.count, *tensors) for tensors in parts]
        for features, sigma in zip(statistics, self.sigma.unbind(), strict=True):
            vars(features)["sigma"] = sigma
        return statistics

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        return self.mu.device

    @property
    def dead(self) -> torch.Tensor:
        """Boolean mask of the features that are constant over the samples, decided without rounding."""
        return self.low == self.high

    @cached_property
    def sigma(self) -> torch.Tensor:
        """Standard deviations; exactly 0 where a feature is dead."""
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

    def repeated(self, times: int) -> FeatureStatistics:
        """Repeat each feature ``times`` times consecutively, as a channel for each entry of its kernels."""
        parts = (part.repeat_interleave(times) for part in (self.mu, self.sum_squares, self.low, self.high))
        return FeatureStatistics(self.count, *parts)


@dataclass(frozen=True)
class RowFactor:
    """Triangular factors of the centred rows of a layer's inputs, RᵀR = Σ_j (h_j − μ)(h_j − μ)ᵀ, one for each group."""

    features: FeatureStatistics  # means and variances of the features (G n,)
    R: torch.Tensor  # (G, r, n) with r ≤ n, from QR of the rows, never from the squared matrix

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowFactor:
        """Factor of ``rows`` (N, G, n)."""
        features = FeatureStatistics.of(rows.flatten(1))
        return cls(features, triangular(rows.transpose(0, 1) - features.mu.view(rows.shape[1], 1, -1)))

    @property
    def device(self) -> torch.device:
        """Device of the factor."""
        return self.R.device

    def merged(self, other: RowFactor) -> RowFactor:
        """Factor of both sets of rows together: a row for the difference of the means is added to both factors."""
        features, extra = self.features, other.features
        between = (extra.mu - features.mu) * (features.count * (extra.count / (features.count + extra.count))) ** 0.5
        stacked = torch.cat([self.R, other.R, between.view(len(self.R), 1, -1)], 1)
        return RowFactor(features.merged(extra), triangular(stacked))


def triangular(rows: torch.Tensor) -> torch.Tensor:
    """Factors (G, r, n), r ≤ n, with the same products RᵀR as ``rows`` (G, m, n)."""
    return torch.linalg.qr(rows, mode="r").R if rows.shape[1] > rows.shape[2] else rows


def inputs_of(layer: Layer, calls: Sequence[tuple[torch.Tensor, torch.Size]]) -> captured.LayerInputs:
    """Inputs of a layer, from the input and output shape of each call; blocks are samples if possible."""
    refuse_uncalled(layer, calls)
    dimensions = 2 + Geometry.of(layer).dims
    lengths = {len(x) if x.ndim >= dimensions else 1 for x, _ in calls}
    return captured.LayerInputs(layer, tuple(calls), lengths.pop() if len(lengths) == 1 else 1)


def refuse_uncalled(layer: Layer, calls: Sequence[object]) -> None:
    """Raise a CaptureError if there are no calls."""
    if not calls:
        raise CaptureError(f"a {type(layer).__name__} is never called: its weight is used directly, its inputs unseen")


def rows_of(inputs: captured.LayerInputs) -> Iterator[torch.Tensor]:
    """Yield the rows h (·, G, n) of all samples and positions, a part at a time, float64."""
    bias = int(inputs.geometry.bias)
    for start, stop in inputs.steps(captured.KEPT):
        yield inputs.slice(start, stop)[..., bias:].flatten(0, 1)


def row_factor(inputs: captured.LayerInputs) -> RowFactor:
    """Triangular factor of the centred rows h."""
    return reduce(RowFactor.merged, map(RowFactor.of, rows_of(inputs)))


def channel_statistics_of_each(inputs: Sequence[captured.LayerInputs]) -> list[FeatureStatistics]:
    """Channel statistics of several layers; those of dense layers with rows of one shape are computed together."""
    whole = [k for k, layer in enumerate(inputs) if layer.geometry.dims == 0 and len(layer.steps(captured.KEPT)) == 1]
    rows = [next(rows_of(inputs[k])).flatten(1) for k in whole]
    statistics: dict[int, FeatureStatistics] = {}
    for members in by_shape(rows):
        together = FeatureStatistics.of(stacked([rows[k] for k in members]))
        statistics |= zip((whole[k] for k in members), together.unbind(), strict=True)
    return [statistics[k] if k in statistics else channel_statistics(layer) for k, layer in enumerate(inputs)]


def channel_statistics(inputs: captured.LayerInputs) -> FeatureStatistics:
    """Statistics of every input feature; for a convolution, of every input channel, repeated for each kernel entry."""
    geometry = inputs.geometry
    if not geometry.dims:
        return reduce(FeatureStatistics.merged, (FeatureStatistics.of(rows.flatten(1)) for rows in rows_of(inputs)))
    refuse_uncalled(inputs.layer, inputs.calls)
    last = (x.to(torch.float64).movedim(-1 - geometry.dims, -1) for x, _ in inputs.calls)
    rows = (h.reshape(-1, geometry.channels) for h in last)
    return reduce(FeatureStatistics.merged, map(FeatureStatistics.of, rows)).repeated(geometry.per_channel)


#: Largest number of entries stacked at a time: 32 MB.
TOGETHER = 2**22


def by_shape(tensors: Sequence[torch.Tensor], kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Groups of positions of tensors of one shape and kind, in order, with at most `TOGETHER` numbers or one tensor."""
    groups: list[list[int]] = []
    last: dict[Hashable, list[int]] = {}
    for position, tensor in enumerate(tensors):
        key = tensor.shape, kinds and kinds[position]
        members = last.get(key)
        if members is None or (len(members) + 1) * tensor.numel() > TOGETHER:
            last[key] = members = []
            groups.append(members)
        members.append(position)
    return groups


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack (k, …) of k tensors of one shape; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))

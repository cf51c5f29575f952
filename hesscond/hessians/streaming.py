"""Unit Hessians over a whole data set, one chunk of samples at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hesscond.capture import FeatureStatistics, LayerCapture
from hesscond.hessians.unit import UnitHessian
from hesscond.spectra.factored import EPS, error_factor


class StreamedUnit:
    """Accumulates S^½Ĥ of one unit as triangular factors, one for S > 0 and one for S < 0.

    QR of the stacked chunks keeps κ(H) = κ(R)² out of the squared matrix; the rounding committed is bounded
    column by column by c·eps times the column's norm.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.count = 0
        self._factors: dict[int, torch.Tensor] = {}
        self._square_norms: torch.Tensor | None = None

    def add(self, captured: LayerCapture, unit: int, weight: float) -> None:
        """Add a chunk whose loss counts ``weight`` (its share of the samples) in the whole."""
        column = captured.units.index(unit)
        rows = captured.H_hat * (captured.root[:, column] * weight**0.5)[:, None]
        self.count += len(rows)
        square_norms = rows.square().sum(0)
        self._square_norms = square_norms if self._square_norms is None else self._square_norms + square_norms
        if captured.sign is None:
            self._stack(1, rows)
            return
        for sign in (1, -1):
            part = rows[captured.sign[:, column] == sign]
            if len(part):
                self._stack(sign, part)

    def _stack(self, sign: int, rows: torch.Tensor) -> None:
        previous = self._factors.get(sign)
        stacked = rows if previous is None else torch.cat([previous, rows])
        self._factors[sign] = stacked if len(stacked) <= self.order else torch.linalg.qr(stacked, mode="r").R

    def hessian(self) -> UnitHessian:
        """The Hessian of the unit over everything added."""
        positive, negative = self._factors.get(1), self._factors.get(-1)
        parts = [part for part in (positive, negative) if part is not None]
        rows = torch.cat(parts)
        sign = None
        if negative is not None:
            sign = rows.new_ones(len(rows))
            sign[len(rows) - len(negative) :] = -1
        assert self._square_norms is not None
        error = error_factor(self.count, self.order) * EPS * self._square_norms.sqrt()
        return UnitHessian(rows, None, sign, error)


def stream(
    chunks: Iterable[tuple[dict[str, LayerCapture], float]],
) -> tuple[dict[tuple[str, int], UnitHessian], dict[str, FeatureStatistics]]:
    """Unit Hessians and feature statistics over chunks of a data set.

    Parameters
    ----------
    chunks
        Captures, each with the chunk's weight in the loss of the whole (samples / total for a mean loss).

    Returns
    -------
    hessians
        By (layer, unit).
    statistics
        By layer, of all its inputs.
    """
    units: dict[tuple[str, int], StreamedUnit] = {}
    statistics: dict[str, FeatureStatistics] = {}
    for captures, weight in chunks:
        for name, captured in captures.items():
            own = FeatureStatistics.of(captured.h)
            statistics[name] = own if name not in statistics else statistics[name].merged(own)
            for unit in captured.units:
                key = (name, unit)
                if key not in units:
                    units[key] = StreamedUnit(captured.H_hat.shape[1])
                units[key].add(captured, unit, weight)
    return {key: unit.hessian() for key, unit in units.items()}, statistics

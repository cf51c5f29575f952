"""Hessians over a whole data set, one batch of samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hesscond import causes
from hesscond.capture import Geometry, LayerCapture, LayerInputs, channel_statistics
from hesscond.errors import refuse_large
from hesscond.hessians import build
from hesscond.hessians.coordinates.base import BlockHessian
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.formed import FormedHessian
from hesscond.hessians.layer import sums_to_zero
from hesscond.operators.threads import side_by_side, threads_for
from hesscond.spectra import condition


class StreamedBlock:
    """Sum of the Hessians of a block over batches, as triangular factors for S > 0 and for S < 0.

    QR of the stacked factors avoids the squared matrix, κ(H) = κ(R)²; its rounding in a column is at most c·eps times
    the column's norm. Hessians that come as matrices are added up.
    """

    def __init__(self, order: int, units: int = 1) -> None:
        self.order, self.units = order, units
        self.count = 0
        self._factors: dict[int, torch.Tensor] = {}
        self._square_norms: torch.Tensor | None = None
        self._square_errors: torch.Tensor | None = None
        self._formed: FormedHessian | None = None
        self._vanishing, self._decomposed, self._shift = causes.NOTHING, False, True

    def add(self, hessian: BlockHessian, weight: float, *, shift: bool = False) -> None:
        """Add the Hessian of a batch with its weight; ``shift``: whether a common shift of all units is null."""
        self._shift &= shift
        hessian = hessian.dense()
        assert isinstance(hessian, (FactoredHessian, FormedHessian))
        self._vanishing = self._vanishing or hessian.vanishing
        if isinstance(hessian, FormedHessian):
            H, spread, terms = hessian.H * weight, hessian.spread * weight**0.5, hessian.terms
            if (old := self._formed) is not None:
                # d_i d_j of a sum is at most that of the root sums of squares
                H, spread, terms = old.H + H, torch.hypot(old.spread, spread), old.terms + terms
            self._formed = FormedHessian(H, spread, terms, self.units)
            return
        if hessian.spread is not None:
            # its small eigenvalues are round-off that must not become rows
            self.add(
                FormedHessian(hessian.matrix(), hessian.spread, len(hessian.rows), self.units), weight, shift=shift
            )
            return
        rows = hessian.factor() * weight**0.5
        self.count += len(rows)
        square_norms = rows.square().sum(0)
        self._square_norms = square_norms if self._square_norms is None else self._square_norms + square_norms
        if hessian.row_error is not None:
            errors = weight * hessian.column_errors().square()
            self._square_errors = errors if self._square_errors is None else self._square_errors + errors
        if hessian.sign is None:
            self._stack(1, rows)
            return
        for sign in (1, -1):
            part = rows[hessian.sign == sign]
            if len(part):
                self._stack(sign, part)

    def _stack(self, sign: int, rows: torch.Tensor) -> None:
        previous = self._factors.get(sign)
        stacked = rows if previous is None else torch.cat([previous, rows])
        if len(stacked) > self.order:
            stacked, self._decomposed = torch.linalg.qr(stacked, mode="r").R, True
        self._factors[sign] = stacked

    def hessian(self, total: float = 1.0) -> BlockHessian:
        """The Hessian of the block over everything added, divided by ``total``."""
        if self._square_norms is None:
            assert self._formed is not None
            return self._scaled(self._formed, total)
        positive, negative = self._factors.get(1), self._factors.get(-1)
        parts = [part for part in (positive, negative) if part is not None]
        rows = torch.cat(parts) / total**0.5 if parts else self._square_norms.new_zeros(1, self.order)
        sign = None
        if negative is not None:
            sign = rows.new_ones(len(rows))
            sign[len(rows) - len(negative) :] = -1
        lengths = (self._square_norms / total).sqrt()
        constant = condition.error_factor(self.count, self.order)
        error = constant * condition.EPS * lengths if self._decomposed else None
        if self._square_errors is not None:
            given = (self._square_errors / total).sqrt()
            # of an entry, of whose size rows may be
            error = (given if error is None else error + given).expand(rows.shape)
        # each feature that is not dead adds as many directions as there are units but one
        alive = int((self._square_norms.view(self.units, -1) != 0).any(0).sum())
        limit = (self.units - 1) * alive if self._shift and not self._vanishing else None
        factored = FactoredHessian(rows, None, sign, error, self.units, limit, vanishing=self._vanishing)
        if self._formed is None:
            return factored
        formed = self._scaled(self._formed, total)
        spread = torch.hypot(formed.spread, lengths)
        return FormedHessian(
            formed.H + factored.matrix(), spread, formed.terms + self.count, self.units, self._vanishing
        )

    def _scaled(self, formed: FormedHessian, total: float) -> FormedHessian:
        return FormedHessian(formed.H / total, formed.spread / total**0.5, formed.terms, self.units, self._vanishing)


def stream(
    batches: Iterable[tuple[Mapping[str, LayerCapture], float]],
    memory: int,
    total: Callable[[], float] = lambda: 1.0,
    collect: Callable[[str, LayerInputs], Any] = lambda _, inputs: channel_statistics(inputs),
    *,
    whole: bool = False,
) -> tuple[dict[tuple[str, int | None], BlockHessian], dict[str, Any]]:
    """Hessians of units (with ``whole``, of layers) and statistics of the inputs by layer over a data set.

    Each batch has its weight in the loss of the whole; ``total`` is called at the end for a divisor of the weights.
    ``collect`` makes statistics with ``merged(other)`` from a layer's name and inputs.
    """
    blocks: dict[tuple[str, int | None], StreamedBlock] = {}
    statistics: dict[str, Any] = {}
    for captures, weight in batches:
        for name, captured in captures.items():
            if (summary := collect(name, captured.inputs)) is not None:
                statistics[name] = statistics[name].merged(summary) if name in statistics else summary
            geometry = captured.inputs.geometry
            if whole:
                refuse_layer(name, geometry, memory)
                order = geometry.units * geometry.n_params
                layer_block = blocks.setdefault((name, None), StreamedBlock(order, geometry.units))
                layer_block.add(build.layer_hessian(captured, memory), weight, shift=sums_to_zero(captured))
                continue
            for units in build.runs(captured, memory):
                hessians = build.unit_hessians(captured, units, memory)
                parts = [
                    (blocks.setdefault((name, unit), StreamedBlock(geometry.n_params)), hessian, weight)
                    for unit, hessian in zip(units, hessians, strict=True)
                ]
                # tall and narrow: one thread each is faster than many within a decomposition
                side_by_side(lambda part: part[0].add(*part[1:]), parts, threads_for(captured.inputs.device))
    return {key: block.hessian(total()) for key, block in blocks.items()}, statistics


def refuse_layer(name: str, geometry: Geometry, memory: int) -> None:
    """Raise a TooLargeError if the triangular factor of a layer over a data set does not fit into the memory."""
    order = geometry.units * geometry.n_params
    what = f"the triangular factor of the {order} parameters of layer {name!r} over a data set takes"
    fits = f"probe it on one batch, or its units, or at most {int((memory / 16) ** 0.5)} parameters"
    refuse_large(what, 16 * order**2, memory, fits)

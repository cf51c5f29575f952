"""Progress of a capture: derivatives planned and taken, samples of units where all take long, requests to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Reason reported for a layer that was not reached before the probe was stopped.
STOPPED = "stopped before it was measured"

#: Reason why second derivatives take long if only batch normalization in training mode needs them.
TIED = (
    "because BatchNorm in training mode ties all samples together: this is the loss with the statistics of the batch. "
    "After model.eval() it is that with the running statistics, sample by sample, and needs no second derivatives"
)


class Stopped(Exception):
    """Raised in the running computation after a request to stop."""


@dataclass
class LayerProgress:
    """Number of derivatives of one layer, planned and taken, and seconds per derivative before and since."""

    steps: float
    rate: float  # seconds per derivative, from those taken before the layer was begun
    done: float = 0.0
    spent: float = 0.0  # seconds

    @property
    def left(self) -> float:
        """Estimated seconds left."""
        # the first derivatives warm up caches and are not representative
        rate = self.spent / self.done if self.done > 0.05 * self.steps else self.rate
        return max(self.steps - self.done, 0.0) * rate


@dataclass(frozen=True)
class ProbeProgress:
    """Progress of `hesscond.probe` with the second derivatives of the layers.

    Attributes
    ----------
    layer
        Name of the layer that is being differentiated; "" before the first one.
    elapsed, left
        Seconds since the first derivative, and estimated seconds until the last one. κ is computed after them.
    seconds
        Estimated seconds of each layer in total, by layer name; in proportion to the number of units.
    stop
        Function that ends the capture; the layers that are complete are kept.
    reason
        Why the derivatives take long and what would be faster, if known; else "".
    """

    layer: str
    elapsed: float
    left: float
    seconds: dict[str, float]
    stop: Callable[[], None]
    reason: str = ""

    @property
    def share(self) -> float:
        """Share of the time that has passed, between 0 and 1."""
        whole = self.elapsed + self.left
        return self.elapsed / whole if whole else 1.0


@dataclass
class ProgressRecord:
    """Record of the derivatives of each layer; ``callback`` receives the `ProbeProgress` after every step."""

    callback: Callable[[ProbeProgress], None] | None = None
    reason: str = ""  # that of `ProbeProgress`
    least: float = 0.0  # seconds; shorter ones are not reported
    limit: float = math.inf  # seconds; where all units would take longer, a sample is captured
    sample: dict[str, tuple[int, ...]] = field(default_factory=dict)  # units, by layer; none: the layer is left out
    whole: float = 0.0  # seconds that all units would take, if a sample was captured
    _layers: dict[str, LayerProgress] = field(default_factory=dict)
    _began: float = 0.0
    _last: float = 0.0
    _stopped: bool = False

    def plan(self, layer: str, steps: float, rate: float) -> None:
        """Plan ``steps`` derivatives of about ``rate`` seconds each."""
        self._layers[layer] = LayerProgress(steps, rate)

    @property
    def left_out(self) -> str:
        """Why a layer is left out of the sample, in words."""
        return f"one unit and one of each cheaper layer take more than {self.limit:.0f} s: name it with layers="

    @property
    def left(self) -> float:
        """Estimated seconds until the last derivative."""
        return sum(progress.left for progress in self._layers.values())

    def take_sample(self, units: Mapping[str, tuple[int, ...]]) -> None:
        """Choose a power of two of the ``units`` of each layer that fits the limit, or else one unit of some layers."""
        seconds = {name: progress.left / len(units[name]) for name, progress in self._layers.items()}
        count, room, self.whole = 1, self.limit, max(self.whole, self.left)
        while sum(min(2 * count, len(units[name])) * per_unit for name, per_unit in seconds.items()) <= self.limit:
            count *= 2
        for name, per_unit in sorted(seconds.items(), key=lambda pair: pair[1]):
            indices = units[name]
            few = min(count, len(indices))
            room -= few * per_unit
            self.sample[name] = (
                tuple(indices[i * len(indices) // few] for i in range(few)) if room >= 0 or not self.sample else ()
            )

    def begin(self) -> None:
        """Start the clock, once everything is planned."""
        self._began = self._last = time.perf_counter()
        self._report("")

    def advance(self, layer: str, steps: float) -> None:
        """Record that ``steps`` derivatives of a layer were taken; raise `Stopped` after a request to stop."""
        progress = self._layers.get(layer)
        if progress is None:
            return
        now = time.perf_counter()
        progress.done, progress.spent, self._last = progress.done + steps, progress.spent + now - self._last, now
        self._report(layer)

    def finish(self, layer: str) -> None:
        """Record that a layer is complete, perhaps with fewer derivatives than planned."""
        progress = self._layers.get(layer)
        if progress is not None:
            progress.steps = progress.done = max(progress.done, 1.0)
            self.advance(layer, 0)

    def _report(self, layer: str) -> None:
        if self.callback is not None:
            seconds = {name: progress.spent + progress.left for name, progress in self._layers.items()}
            self.callback(ProbeProgress(layer, self._last - self._began, self.left, seconds, self._stop, self.reason))
        if self._stopped:
            raise Stopped

    def _stop(self) -> None:
        self._stopped = True

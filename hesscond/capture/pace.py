"""How far a capture has come: what is planned, what is done, and who may stop it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: What is said of a layer that was not reached before somebody stopped the probe.
STOPPED = "stopped before it was measured"

#: Why second derivatives take long where only batch normalization in training mode needs them.
TIED = (
    "because BatchNorm in training mode ties all samples together: this is the loss with the statistics of the batch. "
    "After model.eval() it is that with the running statistics, sample by sample, and needs no second derivatives"
)


class Stopped(Exception):
    """Raised where the work is, once it was asked to stop."""


@dataclass
class Work:
    """The second derivatives of one layer.

    Attributes
    ----------
    steps, done
        Derivatives planned and taken.
    rate
        Seconds for each, from those taken before the work began.
    spent
        Seconds so far.
    """

    steps: float
    rate: float
    done: float = 0.0
    spent: float = 0.0

    @property
    def seconds(self) -> float:
        """All it takes, as far as one knows."""
        return self.spent + self.left

    @property
    def left(self) -> float:
        """Seconds to go."""
        # the first ones warm up caches and are no measure
        rate = self.spent / self.done if self.done > 0.05 * self.steps else self.rate
        return max(self.steps - self.done, 0.0) * rate


@dataclass(frozen=True)
class Progress:
    """How far `hesscond.probe` has come with the second derivatives of the layers.

    Attributes
    ----------
    layer
        At work; "" while nothing was begun.
    elapsed, left
        Seconds since the first derivative and to the last one. κ comes after them.
    seconds
        By layer, what each takes in all; in proportion to the number of units.
    stop
        To be called to end it: the layers that are complete are kept.
    reason
        Why it takes that long and what would not, if that is known; else "".
    """

    layer: str
    elapsed: float
    left: float
    seconds: dict[str, float]
    stop: Callable[[], None]
    reason: str = ""

    @property
    def share(self) -> float:
        """How much of the time is over, between 0 and 1."""
        whole = self.elapsed + self.left
        return self.elapsed / whole if whole else 1.0


@dataclass
class Pace:
    """What a capture plans and has done, in derivatives of each layer.

    Attributes
    ----------
    tell
        Is told after every step.
    """

    tell: Callable[[Progress], None] | None = None
    reason: str = ""  # that of `Progress`
    _work: dict[str, Work] = field(default_factory=dict)
    _began: float = 0.0
    _last: float = 0.0
    _stopped: bool = False

    def plan(self, layer: str, steps: float, rate: float) -> None:
        """So many derivatives of about ``rate`` seconds each."""
        self._work[layer] = Work(steps, rate)

    def begin(self) -> None:
        """Everything is planned."""
        self._began = self._last = time.perf_counter()
        self._report("")

    def did(self, layer: str, steps: float) -> None:
        """Some of them are done.

        Raises
        ------
        Stopped
            Whoever was told has asked for it.
        """
        own = self._work.get(layer)
        if own is None:
            return
        now = time.perf_counter()
        own.done, own.spent, self._last = own.done + steps, own.spent + now - self._last, now
        self._report(layer)

    def finish(self, layer: str) -> None:
        """All of a layer is done, perhaps with fewer derivatives."""
        own = self._work.get(layer)
        if own is not None:
            own.steps = own.done = max(own.done, 1.0)
            self.did(layer, 0)

    def _report(self, layer: str) -> None:
        if self.tell is not None:
            seconds = {name: own.seconds for name, own in self._work.items()}
            left = sum(own.left for own in self._work.values())
            self.tell(Progress(layer, self._last - self._began, left, seconds, self._stop, self.reason))
        if self._stopped:
            raise Stopped

    def _stop(self) -> None:
        self._stopped = True

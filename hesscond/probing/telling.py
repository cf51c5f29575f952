"""Progress of a probe from Python, on the standard error stream of a terminal or a notebook."""

from __future__ import annotations

import sys

from hesscond.capture import ProbeProgress
from hesscond.sheets import duration

#: Seconds that a probe may take without a word.
SILENT = 5.0


def is_attended() -> bool:
    """Whether somebody sees the standard error stream: it is a terminal, or a notebook runs this."""
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


class ProgressLine:
    """Progress of the second derivatives in one line, which is wiped in the end; nothing if they take seconds."""

    def __init__(self) -> None:
        self._width, self._said = 0, ""

    def __call__(self, progress: ProbeProgress) -> None:
        if not self._width and progress.elapsed + progress.left < SILENT:
            return
        if progress.reason != self._said:
            self._said = progress.reason
            self.show("")
            sys.stderr.write(f"{duration(progress.left)} of second derivatives, {progress.reason}\n")
        layer = progress.layer and f" of {progress.layer}"
        done = progress.share == 1
        self.show("" if done else f"second derivatives{layer}: {progress.share:.0%}, {duration(progress.left)} left")

    def show(self, text: str) -> None:
        """Write the line in place of what it was."""
        end = "" if text else "\r"
        sys.stderr.write(f"\r{text.ljust(self._width)}{end}")
        sys.stderr.flush()
        self._width = len(text)

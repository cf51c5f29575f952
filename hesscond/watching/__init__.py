"""Measurements while a training loop of your own runs: the watch, its measurements and destinations."""

from hesscond.watching.loop import Watch, watch

__all__ = ["Watch", "watch"]

"""Measurements while a training loop of your own runs: the watch, its measurements, destinations and alarms."""

from hesscond.watching.alarms import EVENTS, Alarm
from hesscond.watching.loop import Watch, watch

__all__ = ["EVENTS", "Alarm", "Watch", "watch"]

"""Measuring while somebody else's loop trains: a watch, what it measures, where its rows go, and its alarms."""

from hesscond.watching.alarms import EVENTS, Alarm
from hesscond.watching.loop import Watch, watch

__all__ = ["EVENTS", "Alarm", "Watch", "watch"]

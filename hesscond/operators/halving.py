"""Batches that are halved where a device has no memory for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hesscond.errors import out_of_memory

Result = TypeVar("Result")


def in_halves(task: Callable[[slice], Result], count: int, start: int = 0) -> list[Result]:
    """Results of ``task`` for ``count`` items from ``start`` on: all at once, or halves, quarters, … that fit."""
    try:
        return [task(slice(start, start + count))]
    except (MemoryError, RuntimeError) as error:
        if count < 2 or not out_of_memory(error):
            raise
    # the frames of the exception are gone now, and with them what they held
    half = count // 2
    return in_halves(task, half, start) + in_halves(task, count - half, start + half)

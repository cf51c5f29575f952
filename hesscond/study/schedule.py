"""Learning-rate schedules: a factor for every iteration, which `torch.optim.lr_scheduler.LambdaLR` applies."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hesscond.study.sections import ScheduleConfig


def factors(config: ScheduleConfig, *, per_epoch: int, iterations: int) -> Callable[[int], float]:
    """Function that maps an iteration (0, 1, …) to the factor of the learning rate.

    ``per_epoch``, ``iterations``: number of iterations in an epoch, and in the whole run.
    """
    warmup = config.warmup_iterations or round((config.warmup_epochs or 0) * per_epoch)
    left = max(1, iterations - warmup)

    def factor(iteration: int) -> float:
        if iteration < warmup:
            if config.warmup_start is None:
                return (iteration + 1) / warmup
            grown = iteration / warmup if config.warmup == "linear" else 0.0
            return config.warmup_start + (1 - config.warmup_start) * grown
        epoch, done = iteration / per_epoch, min(1.0, (iteration - warmup) / left)
        if config.kind == "steps":
            passed = sum(epoch >= milestone for milestone in config.milestones or ())
            return (config.factor or 1.0) ** passed
        if config.kind == "exponential":
            return (config.factor or 1.0) ** epoch
        if config.kind == "cosine":
            return config.end + (1 - config.end) * (1 + math.cos(math.pi * done)) / 2
        if config.kind == "linear":
            return config.end + (1 - config.end) * (1 - done)
        return 1.0

    return factor


def scheduler(optimizer: Optimizer, config: ScheduleConfig, *, per_epoch: int, iterations: int) -> LambdaLR | None:
    """Scheduler that sets the rates of ``optimizer`` once after every step; None if they are constant."""
    if config == ScheduleConfig():
        return None
    return LambdaLR(optimizer, factors(config, per_epoch=per_epoch, iterations=iterations))

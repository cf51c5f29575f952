"""The same command in several processes (``torchrun``): which one prints, and which data each reads."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import islice
from typing import Any

import torch
from torch import distributed

from hesscond.commands import printing
from hesscond.commands.target import Target, causes_shown
from hesscond.errors import ConfigError, HesscondError
from hesscond.problem.weighting import BatchWeight


@contextmanager
def processes(device: torch.device) -> Iterator[distributed.ProcessGroup | None]:
    """Group of the processes that ``torchrun`` started, of which only the first prints; None if there is one only."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if distributed.get_rank() == 0:
            yield distributed.group.WORLD
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield distributed.group.WORLD
    finally:
        sys.stdout.flush()
        # what is left of operators holds the group, which must not outlive its threads
        gc.collect()
        distributed.destroy_process_group()


@contextmanager
def of_user(spec: str, show_traceback: bool) -> Iterator[printing.Say]:
    """Code of the user's runs in the block: what it prints is no part of the results."""
    with redirect_stdout(sys.stderr), causes_shown(show_traceback), printing.sign_of_life(f"running {spec}") as say:
        try:
            yield say
        except HesscondError as error:
            raise type(error)(printing.as_options(str(error))) from error.__cause__


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, if torchrun started one for each; else the device as it is."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(own)
        return own
    return device


class Share:
    """Every ``size``-th batch of a stream, from number ``rank``."""

    def __init__(self, source: Any, rank: int, size: int) -> None:
        if isinstance(source, tuple):
            raise ConfigError(
                f"the data are one batch, which {size} processes cannot share: let the function return a stream of "
                "batches, a DataLoader say, or start one process"
            )
        self.source, self.rank, self.size = source, rank, size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.source), self.rank, None, self.size)


def own_share(target: Target, group: distributed.ProcessGroup | None) -> tuple[Any, BatchWeight | None]:
    """Data of this process, and the weights of their batches."""
    if group is None:
        return target.data, target.weight
    rank, size, weight = group.rank(), group.size(), target.weight
    return Share(target.data, rank, size), weight if weight is None or callable(weight) else weight[rank::size]

"""Operators whose products several processes compute together, each from its share of the data."""

from __future__ import annotations

import atexit
import io
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import distributed

from hesscond.errors import CaptureError, HesscondError
from hesscond.operators.operator import SymmetricOperator
from hesscond.operators.subspace import Subspace

Result = TypeVar("Result")
STOP = -1


def leave_the_lock() -> None:
    """Wait for gloo's threads to free the last tensors before the interpreter ends.

    A thread that asks for the interpreter's lock after that aborts the process (torch 2.13), and where
    `torch.distributed.nn` was imported after the group was made, its default arguments keep the threads alive.
    """
    time.sleep(0.1)


class Team:
    """Processes of a `torch.distributed` group, of which one leads a computation and the others compute their products.

    An iteration that every process ran by itself would end in a deadlock as soon as the last digit of a threaded sum
    differed between two of them. Therefore the first process alone decides, and its result is given to all.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        # not held: destroy_process_group() shall end gloo's threads
        self._group = weakref.ref(group)
        atexit.unregister(leave_the_lock)
        atexit.register(leave_the_lock)
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.leading = False  # whether this process leads a computation at the moment
        self._members: weakref.WeakValueDictionary[int, DataParallel] = weakref.WeakValueDictionary()
        self._joined = 0
        self._source = distributed.get_global_rank(group, 0)
        # nccl moves tensors of the GPU only
        on_gpu = distributed.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def group(self) -> distributed.ProcessGroup:
        group = self._group()
        if group is None:
            raise CaptureError("the process group was destroyed: ask for what all processes compute before that")
        return group

    def join(self, member: DataParallel) -> int:
        """Number of a new operator, the same in all processes, which construct their operators in the same order."""
        self._joined += 1
        self._members[self._joined] = member
        return self._joined

    def lead(self, function: Callable[[], Result]) -> Result:
        """Result of ``function()`` in the first process, or its error, on all processes; the others serve meanwhile."""
        if self.rank == 0:
            self.leading = True
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:
                failure = error
            finally:
                self.leading = False
            self.announce(STOP, 0)
            self._share((result, None if failure is None else described(failure)))
            if failure is not None:
                try:
                    raise failure
                finally:
                    # an exception that its own frame holds would keep the group alive to the very end of the process
                    del failure
            return result  # type: ignore[return-value]
        while (header := self.announced())[0] != STOP:
            # a failure reaches the leader with the product and comes back with the result
            with suppress(HesscondError):
                self._members[header[0]].serve(header[1])
        result, failed = self._share(None)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed
        return result

    def announce(self, number: int, columns: int) -> None:
        """Broadcast to the others which operator multiplies next, and how many vectors."""
        header = torch.tensor([number, columns], device=self.device)
        distributed.broadcast(header, self._source, group=self.group)

    def announced(self) -> tuple[int, int]:
        """Number of the operator that multiplies next and number of vectors, as the leader announced them."""
        header = torch.zeros(2, dtype=torch.int64, device=self.device)
        distributed.broadcast(header, self._source, group=self.group)
        number, columns = header.tolist()
        return number, columns

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leader's ``tensor``, in place of one of the same shape."""
        moved = tensor.contiguous().to(self.device)
        distributed.broadcast(moved, self._source, group=self.group)
        return moved.to(tensor.device)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, equal to the last bit on all of them."""
        moved = tensor.contiguous().to(self.device)
        distributed.all_reduce(moved, group=self.group)
        return moved.to(tensor.device)

    def gathered(self, value: Any) -> list[Any]:
        """Values that the processes gave, in the order of their ranks."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def _share(self, value: Any) -> Any:
        """Leader's ``value`` on all processes, with tensors on the host or on their own device."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        length = self.from_leader(torch.tensor([len(data)], device="cpu"))
        data = self.from_leader(data if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8, device="cpu"))
        if self.rank == 0:
            return value
        place = self.device if self.device.type == "cuda" else None
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=place, weights_only=False)


class DataParallel(SymmetricOperator):
    """Sum Σ_r s_r A_r over the processes r of a group, each with the operator A_r of its share of the data.

    Every process constructs one, in the same order, and calls the same functions with it, as always with
    `torch.distributed`. A solver runs on the first process alone (see `Team`). ``local`` is A_r, of the same order,
    precision and known null space in all processes. ``share`` is s_r: the share of the samples, for a mean over them; 1
    in all processes for a plain sum; 0 in a process without data, which has any operator of the right order.
    """

    def __init__(self, local: SymmetricOperator, share: float, team: Team) -> None:
        super().__init__(local.order, local.dtype, local.device)
        self.local, self._share, self._team = local, share, team
        orders, shares, psd = zip(*team.gathered((local.order, share, local.psd or share == 0)), strict=True)
        if len(set(orders)) > 1:
            raise CaptureError(f"the processes have operators of different orders: {', '.join(map(str, orders))}")
        if not any(shares):
            raise CaptureError("no process has data that count in the loss")
        self.psd = all(psd)
        self._number = team.join(self)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        if self._team.leading:
            self._team.announce(self._number, vectors.shape[1])
            vectors = self._team.from_leader(vectors)
        return self._product(vectors)

    def serve(self, columns: int) -> None:
        """Compute this process's share of one product with the leader's vectors."""
        space = torch.zeros(self.order, columns, dtype=self.dtype, device=self.device)
        self._product(self._team.from_leader(space))

    def _product(self, vectors: torch.Tensor) -> torch.Tensor:
        failure: Exception | None = None
        if self._share:
            try:
                own = self.local.multiply(vectors) * self._share
            except Exception as error:
                failure = error
        if not self._share or failure is not None:
            own = torch.zeros_like(vectors)
        if float(self._team.total(torch.tensor([float(failure is not None)], device="cpu"))):
            every = self._team.gathered(None if failure is None else str(failure))
            reasons = "; ".join(f"process {rank}: {reason}" for rank, reason in enumerate(every) if reason is not None)
            try:
                raise CaptureError(f"a share of a product could not be formed ({reasons})") from failure
            finally:
                del failure
        return self._team.total(own)

    @property
    def team(self) -> Team:
        return self._team

    @property
    def rounding(self) -> float:
        return self.local.rounding

    @property
    def null_space(self) -> Subspace | None:
        """None: a null space that one process knows for its share may not be that of the others."""
        return None


def led(operator: SymmetricOperator, function: Callable[[], Result]) -> Result:
    """Result of ``function()``, which multiplies by ``operator``; with several processes, one computes it for all."""
    team = operator.team
    return function() if team is None or team.leading else team.lead(function)


def described(error: BaseException) -> Exception:
    """Error that the other processes raise: a HesscondError itself, for any other a CaptureError that quotes it."""
    if isinstance(error, HesscondError):
        return error
    return CaptureError(f"the leading process failed: {''.join(traceback.format_exception_only(error)).strip()}")


def all_or_none(team: Team, own: Result | None, failure: HesscondError | None) -> list[Result]:
    """Results ``own`` of all processes, in the order of their ranks; raise on all of them if one has a ``failure``."""
    gathered = team.gathered((own, None if failure is None else str(failure)))
    if failure is not None:
        try:
            raise failure
        finally:
            # an exception that its own frame holds would keep the processes' group alive
            del failure
    reasons = [f"process {rank}: {reason}" for rank, (_, reason) in enumerate(gathered) if reason is not None]
    if reasons:
        raise CaptureError(f"the Hessian cannot be formed by all processes ({'; '.join(reasons)})")
    return [made for made, _ in gathered]

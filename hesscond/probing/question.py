"""Call of `hesscond.probe`, with its checked arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from hesscond.capture import ProgressRecord
from hesscond.capture.backward import readable
from hesscond.errors import ConfigError, HesscondError
from hesscond.hessians import BlockHessian, HessianOperator
from hesscond.hessians.blocks import Block, Choice
from hesscond.hessians.network_hessian import BlockSource
from hesscond.methods import Method
from hesscond.operators.parallel import Team
from hesscond.probing.applied import Measured
from hesscond.probing.results import ProbeResult
from hesscond.problem.evaluation import Batch, LossFunction
from hesscond.problem.weighting import BatchWeight


@dataclass
class Measurement(ABC):
    """Checked arguments of `hesscond.probe`, after a method has been applied; a subclass computes the result."""

    model: nn.Module
    loss_fn: LossFunction
    data: Batch | Iterable[Batch]
    choice: Choice
    level: str
    method: Measured  # as returned by `hesscond.probing.applied.applied`
    units: Sequence[int] | None
    dtype: torch.dtype | None
    rtol: float
    memory: int  # bytes for the whole computation
    reduction: str | None
    weight: BatchWeight | None
    check: bool
    team: Team | None  # processes that measure together
    products: int | None  # largest number of products with a whole network; None: no limit
    progress: ProgressRecord = field(default_factory=ProgressRecord)
    #: layers and parameters that are not measured, with the reason
    skipped: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def result(self) -> ProbeResult:
        """Compute the result."""

    def refuse_little(self, orders: Iterable[int]) -> None:
        """Raise a ConfigError for a memory that does not hold a vector of the smallest Hessian."""
        least = min(orders, default=0)
        if self.memory < 8 * least:
            raise ConfigError(
                f"memory={readable(self.memory)} holds no vector of the smallest Hessian, whose {least:,} parameters "
                f"take {readable(8 * least)}: memory= is a number of bytes, or a size such as '2 GB'"
            )

    def moved(self, name: str, block: Block) -> Block:
        """Part of a block that the method's steps move; its other parameters are skipped."""
        still = self.method.unmoved(block.parameters) if isinstance(self.method, Method) else {}
        if not still:
            return block
        if name in self.choice.groups:
            key, why = next(iter(still.items()))
            raise ConfigError(f"block {name!r} cannot be measured so: its parameter {key!r} {why}")
        if len(still) == len(block.parameters):
            raise ConfigError(f"layer {name!r} {next(iter(still.values()))}")
        self.skipped |= {key: f"parameter {key!r} {why}" for key, why in still.items()}
        return replace(block, pieces=tuple(piece for piece in block.pieces if piece.parameter not in still))

    def _named(self, name: str) -> bool:
        """Whether a block was asked for by its name, so that it must not be left out."""
        return self.choice.names is not None and name not in self.choice.optional

    @contextmanager
    def skipping(self, name: str, *kinds: type[HesscondError]) -> Iterator[None]:
        """Context in which an error of these kinds skips a block, unless it was asked for by its name."""
        try:
            yield
        except kinds as error:
            if self._named(name):
                raise
            self.skipped[name] = str(error)

    def source(self, captured: Callable[[str, int | None], BlockHessian] | None = None) -> BlockSource:
        """Source of blocks: products with the Hessian of the loss, and Hessians that were captured."""
        make = partial(
            HessianOperator,
            self.model,
            self.loss_fn,
            self.data,
            dtype=self.dtype,
            reduction=self.reduction,
            weight=self.weight,
        )
        return BlockSource(make, self.memory, captured)

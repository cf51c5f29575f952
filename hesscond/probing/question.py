"""Question that a call of `hesscond.probe` asks, and the record of what is measured to answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from hesscond.capture import ProgressRecord
from hesscond.errors import CaptureError, ConfigError, HesscondError, NoDerivativeError, TooLargeError, readable
from hesscond.hessians import HessianOperator
from hesscond.hessians.blocks import Block
from hesscond.hessians.catalogue import Choice
from hesscond.hessians.coordinates import base
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.hessians.network_hessian import BlockSource
from hesscond.methods import Method
from hesscond.methods.inputs import OfInputs
from hesscond.problem import MEMORY, Batch, LossFunction, weighting
from hesscond.problem.containers import is_batch
from hesscond.problem.precision import Precision, named
from hesscond.spectra.bounded import refuse_few

#: Precisions in which second derivatives have digits that count.
WIDE = (torch.float32, torch.float64)

#: Coordinates to measure the layers of a network in, after a method has been applied to the model.
Measured = Method | base.Coordinates | OfInputs | None
#: Coordinates of a block; those of parameters and of inputs are known once the block, or its inputs, are.
System = base.Coordinates | ParameterMaps | OfInputs | None
LEVELS = ("unit", "layer", "network")


def checked_level(level: object) -> str:
    """Return a level; a ConfigError for a value that is none."""
    if not isinstance(level, str) or level not in LEVELS:
        raise ConfigError(f"unknown level {level!r}: use 'unit', 'layer' or 'network'")
    return level


@dataclass(frozen=True, kw_only=True)
class Question:
    """Checked arguments of `hesscond.probe`, or what `hesscond.probing.applied` made of them."""

    model: nn.Module
    loss_fn: LossFunction
    data: Batch | Iterable[Batch]
    choice: Choice
    level: str
    method: Any = None  # a ``ProbeMethod`` as given, then a ``Measured``
    units: Sequence[int] | None = None
    dtype: torch.dtype | None = torch.float64
    rtol: float = 1e-8
    memory: int = MEMORY  # bytes for the whole computation
    reduction: str | None = None
    weight: weighting.BatchWeight | None = None
    check: bool = True
    products: int | None = None  # largest number of products with a whole network; None: no limit
    progress: ProgressRecord = field(default_factory=ProgressRecord)

    def __post_init__(self) -> None:
        """Raise a ConfigError for arguments that do not go together, or have a wrong type."""
        if isinstance(self.rtol, bool) or not isinstance(self.rtol, Real) or not 0 < self.rtol < 1:
            raise ConfigError(f"rtol must lie between 0 and 1, not {self.rtol!r}")
        if self.dtype not in (None, *WIDE):
            raise ConfigError(f"dtype must be torch.float64, torch.float32 or None, not {self.dtype!r}")
        narrow = {p.dtype for p in self.model.parameters() if p.is_floating_point()}.difference(WIDE)
        if self.dtype is None and narrow:
            raise CaptureError(f"there is no Hessian to speak of in {named(narrow.pop())}: use dtype=torch.float64")
        weighting.check_weighting(self.reduction, self.weight)
        if self.products is not None:
            if self.level != "network":
                raise ConfigError(f"products are those with a whole network: leave them out at level {self.level!r}")
            refuse_few(self.products)

    @property
    def batches(self) -> Iterable[Batch]:
        """Batches of the data."""
        return [self.data] if is_batch(self.data) else self.data

    def named(self, name: str) -> bool:
        """Whether a block was asked for by its name, so that it must not be left out."""
        return self.choice.names is not None and name not in self.choice.optional

    def refuse_little(self, orders: Iterable[int]) -> None:
        """Raise a ConfigError for a memory that does not hold a vector of the smallest Hessian."""
        least = min(orders, default=0)
        if self.memory < 8 * least:
            raise ConfigError(
                f"memory={readable(self.memory)} holds no vector of the smallest Hessian, whose {least:,} parameters "
                f"take {readable(8 * least)}: memory= is a number of bytes, or a size such as '2 GB'"
            )

    @property
    def takes_differences(self) -> bool:
        """Whether the gradient can be differenced: in float64, on data that can be read again."""
        return self.dtype is torch.float64 and not isinstance(self.data, Iterator)

    def source(
        self,
        captured: Callable[[str, int | None], base.BlockHessian] | None = None,
        kind: type[HessianOperator] = HessianOperator,
    ) -> BlockSource:
        """Source of blocks: products with the Hessian of the loss, and Hessians that were captured."""
        make = partial(
            kind,
            self.model,
            self.loss_fn,
            self.data,
            dtype=self.dtype,
            reduction=self.reduction,
            weight=self.weight,
        )
        return BlockSource(make, self.memory, captured, self.products)


@dataclass
class Measurement:
    """Record of the blocks of a question: their coordinates, and the reasons for those that are not measured."""

    question: Question
    blocks: dict[str, Block] = field(default_factory=dict)  # part of each layer that is measured
    systems: dict[str, System] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # layers and parameters, with the reason
    differenced: dict[str, str] = field(default_factory=dict)  # blocks without second derivatives, and why
    multiplied: dict[str, str] = field(default_factory=dict)  # layers too large for all but products, and why
    #: parameters that the loss depends on, and the first batch, once the data were read
    reached: tuple[set[str], Batch | None] | None = None
    precision: Precision | None = None  # precision of the forward pass, once it was observed

    def keep_data(self) -> None:
        """Keep the batches of a stream, for another pass over them."""
        if not is_batch(self.question.data):
            self.question = replace(self.question, data=list(self.question.data))

    @contextmanager
    def skipping(self, name: str, *kinds: type[HesscondError]) -> Iterator[None]:
        """Context in which an error of these kinds skips a block, unless it was asked for by its name."""
        try:
            yield
        except kinds as error:
            if isinstance(error, NoDerivativeError) and self.question.takes_differences:
                self.differenced[name] = str(error)
                return
            again = self.question.level == "layer" and not isinstance(self.question.data, Iterator)
            if isinstance(error, TooLargeError) and again and self.systems.get(name) is None:
                self.multiplied[name] = str(error)
                return
            if self.question.named(name):
                raise
            self.skipped[name] = str(error)

    def moved(self, name: str, block: Block) -> Block:
        """Part of a block that the method's steps move; its other parameters are skipped."""
        method = self.question.method
        still = method.unmoved(block.parameters) if isinstance(method, Method) else {}
        if not still:
            return block
        if name in self.question.choice.groups:
            key, why = next(iter(still.items()))
            raise ConfigError(f"block {name!r} cannot be measured so: its parameter {key!r} {why}")
        if len(still) == len(block.parameters):
            raise ConfigError(f"layer {name!r} {next(iter(still.values()))}")
        self.skipped |= {key: f"parameter {key!r} {why}" for key, why in still.items()}
        return replace(block, pieces=tuple(piece for piece in block.pieces if piece.parameter not in still))

"""Blocks: the parameters, or rows of parameters, that have one Hessian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from hesscond.capture.kinds import Layer
from hesscond.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """Rows of one parameter."""

    parameter: str  # name of the parameter in the model; the first, if it has several
    #: (a, m, b), or (a, m, b, m', c, …): rows are slices along the second dimension, or along every second one together
    shape: tuple[int, ...]
    #: one row for each unit; None: the whole parameter, which belongs to no single unit
    rows: Sequence[int] | None

    @property
    def count(self) -> int:
        """Number of rows that the parameter has."""
        return prod(self.shape[1::2])

    @property
    def width(self) -> int:
        """Entries of a row."""
        return prod(self.shape[::2])

    @property
    def size(self) -> int:
        """Entries of all the rows."""
        return self.width * (self.count if self.rows is None else len(self.rows))

    def index(self) -> torch.Tensor | None:
        """Indices (size,) of the entries in the flattened parameter; None: all of its entries, in order."""
        if self.rows is None or self.rows == range(self.count):
            return None
        axes = range(len(self.shape))
        numbers = torch.arange(prod(self.shape), device="cpu").view(self.shape).permute(*axes[1::2], *axes[::2])
        rows = numbers.reshape(self.count, self.width)[torch.tensor(self.rows, device="cpu")]
        outer = self.shape[0] if len(self.shape) == 3 else 1
        return rows.unflatten(1, (outer, -1)).transpose(0, 1).flatten()

    def where(self) -> torch.Tensor | slice:
        """Index of the entries in the flattened parameter."""
        index = self.index()
        return slice(None) if index is None else index


@dataclass(frozen=True)
class Block:
    """Parameters, or rows of them, that have one Hessian at level "layer", and one for each unit at level "unit"."""

    name: str
    pieces: tuple[Piece, ...]  # in the order of the block's vectors: biases first
    units: Sequence[int] = ()  # their row numbers in the parameters
    table: bool = False  # units are rows of a table; the loss depends on those that are looked up
    #: dense or convolutional layer whose weight and bias form the block, if they are not computed
    layer: Layer | None = None
    undivided: str = ""  # reason why it has no units

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, each once."""
        return list(dict.fromkeys(piece.parameter for piece in self.pieces))

    @property
    def order(self) -> int:
        """Number of its parameters."""
        return sum(piece.size for piece in self.pieces)

    @property
    def width(self) -> int:
        """Number of parameters of a unit."""
        return sum(piece.width for piece in self.pieces if piece.rows is not None)

    def at(self, positions: Sequence[int], name: str | None = None) -> Block:
        """Block of the units at these positions, without parameters that belong to no unit."""
        pieces = tuple(
            replace(piece, rows=taken(piece.rows, positions)) for piece in self.pieces if piece.rows is not None
        )
        return Block(self.name if name is None else name, pieces, taken(self.units, positions), self.table)

    def whole(self, undivided: str) -> Block:
        """Same entries as a block without units, for a reason."""
        return replace(self, units=(), table=False, undivided=undivided)

    def unit(self, unit: int) -> Block:
        """One unit."""
        return self.at([self.units.index(unit)])

    def chosen(self, units: Sequence[int] | None) -> tuple[int, ...]:
        """Units to measure, all by default; a ConfigError if the block has no units, or not these."""
        if not self.units:
            raise ConfigError(self.undivided)
        if units is not None and not units:
            raise ConfigError("no unit was named: leave units= out for all of them")
        for unit in units or ():
            if unit not in self.units:
                raise ConfigError(
                    f"unit {unit} is out of range: layer {self.name!r} has units {self.units[0]} to {self.units[-1]}"
                )
        return tuple(self.units if units is None else units)


def taken(rows: Sequence[int], positions: Sequence[int]) -> Sequence[int]:
    """``rows`` at ``positions``, as a range if both are."""
    if isinstance(rows, range) and isinstance(positions, range):
        return rows[positions.start : positions.stop : positions.step]
    return tuple(rows[position] for position in positions)


class Claims:
    """Entries of parameters that blocks have, none of which two blocks may have."""

    def __init__(self) -> None:
        self._names: list[str] = []
        #: number of the block that has each entry, from 1, by parameter
        self._owners: dict[str, torch.Tensor] = {}

    def claim(self, block: Block) -> tuple[str, str] | None:
        """Claim the entries of a block; if one is taken, none is: the parameter and the block that has it."""
        for piece in block.pieces:
            if piece.parameter in self._owners:
                owned = self._owners[piece.parameter][piece.where()]
                if bool(owned.any()):
                    return piece.parameter, self._names[int(owned[owned > 0][0]) - 1]
        self._names.append(block.name)
        for piece in block.pieces:
            none = torch.zeros(piece.count * piece.width, dtype=torch.int32, device="cpu")
            self._owners.setdefault(piece.parameter, none)[piece.where()] = len(self._names)
        return None

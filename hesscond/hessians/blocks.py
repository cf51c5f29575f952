"""Blocks: parameters of a model that have one Hessian, with their names and the rows of their units."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

import torch
from torch import nn

from hesscond.capture.kinds import Geometry, Layer, is_layer, is_turned, kind_of
from hesscond.capture.layers import chosen_layers, eligible_layers, is_computed
from hesscond.capture.uses import Uses
from hesscond.errors import ConfigError
from hesscond.hessians.parameters import Layout
from hesscond.hessians.roles import KINDS, Role, role_of

#: Name of the model itself as a block.
ROOT = "model"
#: ``base[part]`` with a part: query, key, value (of a head), a gate (of a layer), or a range of rows.
PART = re.compile(r"(.+)\[((?:[qkv](?:\.\d+)?)|(?:l\d+(?:_reverse)?(?:\.[a-z])?)|[ifgorzn]|(?:\d+:\d+))\]")
#: Names of layers whose rows are query, key and value one after another.
PACKED = {"c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj"}
#: Attributes of the surrounding module with the number of heads.
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
#: The gates of recurrent cells, in the order of their rows.
GATES = {nn.LSTM: "ifgo", nn.LSTMCell: "ifgo", nn.GRU: "rzn", nn.GRUCell: "rzn"}
#: Normalizations whose scale and shift have one entry per feature, whatever their shape.
FEATURES = (nn.LayerNorm, nn.RMSNorm)
#: Modules whose rows are units, by torch's documentation.
PACKING = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
#: Reason why rows are not units.
TURNED = "whose rows are no outputs"
#: Largest number of layers that an error lists; for larger models, number of similar names that it suggests.
SHORT, SUGGESTIONS = 8, 4


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
        rows = self._table()[torch.tensor(self.rows)]
        outer = self.shape[0] if len(self.shape) == 3 else 1
        return rows.unflatten(1, (outer, -1)).transpose(0, 1).flatten()

    def places(self) -> torch.Tensor:
        """Indices (units, width) of the entries of each row among those of the piece."""
        if self.index() is None:
            return self._table()
        outer = self.shape[0] if len(self.shape) == 3 else 1
        return torch.arange(self.size).view(outer, -1, self.width // outer).transpose(0, 1).flatten(1)

    def _table(self) -> torch.Tensor:
        """Indices (rows, width) of the entries of each row in the flattened parameter."""
        axes = range(len(self.shape))
        numbers = torch.arange(prod(self.shape)).view(self.shape).permute(*axes[1::2], *axes[::2])
        return numbers.reshape(self.count, self.width)


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


class BlockLayout(Layout):
    """Blocks one after another, each in the order of its pieces; ``whole``: no parameter lacks entries."""

    def __init__(self, blocks: Sequence[Block], tensors: Mapping[str, nn.Parameter]) -> None:
        names = dict.fromkeys(name for block in blocks for name in block.parameters)
        super().__init__([(name, tensors[name]) for name in names], {block.name: block.order for block in blocks})
        place = {name: number for number, name in enumerate(names)}
        device = self.tensors[0].device
        self._pieces: list[tuple[int, slice, torch.Tensor | None]] = []
        self.whole = all(piece.index() is None for block in blocks for piece in block.pieces)
        end = 0
        for piece in (piece for block in blocks for piece in block.pieces):
            index = piece.index()
            span = slice(end, end := end + piece.size)
            self._pieces.append((place[piece.parameter], span, None if index is None else index.to(device)))

    def tensors_of(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Zero where an entry belongs to none of the blocks."""
        found: dict[int, torch.Tensor] = {}
        for number, span, index in self._pieces:
            if index is None:
                found[number] = vector[span]
                continue
            if number not in found:
                found[number] = vector.new_zeros(self.shapes[number].numel())
            found[number].index_copy_(0, index, vector[span])
        return [found[number].view(shape) for number, shape in enumerate(self.shapes)]

    def vector_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = [tensor.reshape(-1) for tensor in tensors]
        return torch.cat([flat[at] if index is None else flat[at][index] for at, _, index in self._pieces])


class Catalogue:
    """Blocks of a model, by their names: modules, parameters, parts of both, and globs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self._owners = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._first = {id(p): name for name, p in reversed(self.parameters.items())}

    # a block by its name

    def block(self, name: str) -> Block:
        """Block of a module, parameter or part of one; a ConfigError names the nearest names."""
        if (own := self._exact(name)) is not None:
            return own
        if (match := PART.fullmatch(name)) and (whole := self._exact(match[1])) is not None:
            return self._part(name, whole, match[1], match[2])
        raise ConfigError(f"no layer {name!r} to probe in the model: {self._nearest(name)}")

    def _exact(self, name: str) -> Block | None:
        """Block of the module or parameter of exactly this name, if there is one."""
        module = self.module(name)
        if module is not None:
            inside = self._inside(name, module)
            if not inside:
                raise ConfigError(f"layer {name!r}, a {type(module).__name__}, has no parameters: it has no Hessian")
            return self._of_module(name, module, inside)
        return self.bare(name) if name in self.parameters else None

    def module(self, name: str) -> nn.Module | None:
        """Module of a block, which "model" may be the whole model."""
        if name == ROOT and ROOT not in self.modules:
            return self.model
        return self.modules.get(name) if name else None

    def kind(self, name: str) -> str:
        """Class of the module that a block belongs to, or "Parameter"; empty for a named group of parameters."""
        base = without_part(name)
        module = self.module(base)
        if module is not None:
            return type(module).__name__
        return "Parameter" if base in self.parameters else ""

    def bare(self, name: str) -> Block:
        """Block of one parameter."""
        name = self._first[id(self.parameters[name])]
        shape = self._shape(name)
        rows = range(shape[1])
        return Block(name, (Piece(name, shape, rows),), rows, isinstance(self.owner(name), TABLES))

    def is_glob(self, name: str) -> bool:
        """Whether a name is a pattern of names."""
        base = without_part(name)
        return base not in self._owners and base not in self.parameters and any(sign in base for sign in "*?[")

    def members(self, group: str, given: Iterable[str] | str) -> tuple[str, ...]:
        """Names of a group's members, globs expanded; frozen parameters are refused."""
        names: dict[str, None] = {}
        for name in [given] if isinstance(given, str) else given:
            names |= dict.fromkeys(self.matching(name) if self.is_glob(name) else [name])
        for name in names:
            for parameter in self.block(name).parameters:
                if not self.parameters[parameter].requires_grad:
                    raise ConfigError(f"block {group!r}: {frozen(parameter)}")
        return tuple(names)

    def refuse_frozen(self, name: str) -> None:
        """Raise a ConfigError for the name of a parameter that requires no gradient."""
        block = self.block(name)
        if without_part(name) in self.parameters and not self.parameters[block.parameters[0]].requires_grad:
            raise ConfigError(frozen(block.parameters[0]))

    def group(self, name: str, members: Iterable[str]) -> Block:
        """Block of a group that the user defined: one Hessian, no units."""
        blocks = [self.block(member) for member in members]
        if not blocks:
            raise ConfigError(f"block {name!r} has no parameters: name some, as in blocks={{{name!r}: ['fc.weight']}}")
        self.refuse_overlap(blocks, f"block {name!r} has {{0}} twice, in {{1!r}} and in {{2!r}}: name it once")
        pieces = tuple(piece for block in blocks for piece in block.pieces)
        return Block(name, pieces, undivided=f"block {name!r} has no units: use level='layer'")

    def refuse_overlap(
        self,
        blocks: Iterable[Block],
        message: str = "{0} is in {1!r} and in {2!r}, which the Hessian would have twice: name one",
    ) -> None:
        """Raise a ConfigError if two blocks share entries of a parameter."""
        owners: dict[str, torch.Tensor] = {}
        known = []
        for number, block in enumerate(blocks, 1):
            known.append(block.name)
            for piece in block.pieces:
                if other := owner_of(piece, owners):
                    raise ConfigError(message.format(repr(piece.parameter), known[other - 1], block.name))
                take(piece, owners, number)

    def _of_module(self, name: str, module: nn.Module, inside: Sequence[str]) -> Block:
        """Block of a module's parameters: units are the rows of the first, and of others with as many rows."""
        if is_layer(module) and not is_computed(module):
            prefix = "" if module is self.model else f"{name}."
            own = {f"{prefix}weight", f"{prefix}bias"} & set(self.parameters)
            pieces = self._pieces(sorted(own), None if is_turned(module) else Geometry.of(module).units)
            return Block(name, pieces, range(Geometry.of(module).units), layer=module)
        undivided, count = "", None
        mine = [key for key in inside if self.owner(key) is module]
        if is_turned(module):
            undivided = (
                f"the weight of layer {name!r}, a {Geometry.of(module).kind}, is computed, and its units are not its "
                "rows: use level='layer'"
            )
        elif is_layer(module):
            count = Geometry.of(module).units
        elif isinstance(module, nn.RNNBase) and len(runs := list(self._runs(module))) > 1:
            undivided = f"layer {name!r} has units in each of {', '.join(f'{name}[{run}]' for run in runs)}: name these"
        elif not mine:
            undivided = (
                f"layer {name!r}, a {type(module).__name__}, has no parameters of its own to split into units: use "
                "level='layer'"
            )
        else:
            # scalars next to arrays belong to all units
            count = self._shape(next((key for key in mine if self.parameters[key].ndim), mine[0]))[1]
        pieces = self._pieces(inside, count)
        if count is not None and all(piece.rows is None for piece in pieces):
            undivided, count = f"no parameter of layer {name!r} belongs to one unit: use level='layer'", None
        return Block(name, pieces, range(count or 0), isinstance(module, TABLES), undivided=undivided)

    def by_use(self, block: Block, uses: Uses) -> list[Block]:
        """Blocks whose units are the outputs of a weight.

        Parameters with other outputs form a separate block, named after its weight. Parameters that the loss does not
        multiply with activations keep their rows.
        """
        found = {piece.parameter: uses.of(piece.parameter) for piece in block.pieces}
        weights = {key: self._by_units(key, use.units) for key, use in found.items() if use.units is not None}
        module = self.module(block.name)
        owner = self.owner(block.parameters[0]) if module is None else module
        if not block.units or isinstance(owner, PACKING) or is_transposed_dense(owner):
            return [block]
        rows = [piece for piece in block.pieces if piece.rows is not None]
        if block.table or any(len(piece.rows or ()) < piece.count for piece in rows):
            for piece in rows:
                odd = weights.get(piece.parameter, piece).shape != piece.shape
                refuse_unclear(block.name, piece, TURNED if odd else found[piece.parameter].reason)
            return [block]
        if is_layer(module):
            # its outputs are known, and rows are those of them where nothing else is seen
            same = {key: piece for key, piece in weights.items() if piece.count == len(block.units)}
            for piece in rows:
                odd = piece.parameter not in same and weights.get(piece.parameter, piece).shape != piece.shape
                refuse_unclear(block.name, piece, TURNED if odd else "")
            same |= {p.parameter: replace(p, rows=None) for p in rows if same and found[p.parameter].reason}
            return [replace(block, pieces=tuple(same.get(piece.parameter, piece) for piece in block.pieces))]
        left = sorted(block.pieces, key=lambda piece: self.owner(piece.parameter) is not owner)
        parts: list[Block] = []
        while first := next((weights[piece.parameter] for piece in left if piece.parameter in weights), None):
            members = self._with_outputs_of(first, left, weights, uses)
            biases = [key for key, own in members.items() if key not in weights and own.width == 1]
            pieces = [members[piece.parameter] for piece in block.pieces if piece.parameter in members]
            pieces.sort(key=lambda piece: piece.parameter not in biases)
            parts.append(Block(first.parameter if parts else block.name, tuple(pieces), range(first.count)))
            left = [piece for piece in left if piece.parameter not in members]
        if not parts:
            if not type(owner).__module__.startswith("torch.") or is_turned(owner):
                for piece in rows:
                    refuse_unclear(block.name, piece, found[piece.parameter].reason)
            return [block]
        return parts + [self.bare(piece.parameter) for piece in left]

    def _with_outputs_of(
        self, first: Piece, left: Sequence[Piece], weights: Mapping[str, Piece], uses: Uses
    ) -> dict[str, Piece]:
        """Parameters with the same outputs as a first weight, by name, with rows in the order of its rows."""
        members = {first.parameter: first}
        for key, own in (queue := [(first.parameter, first)]):
            for name in (piece.parameter for piece in left if piece.parameter not in members):
                if (order := uses.order(key, name)) is not None:
                    every = range(self.parameters[name].ndim)
                    other = weights[name] if name in weights else self._by_units(name, every)
                    members[name] = replace(other, rows=ranged([order[row] for row in own.rows or ()]))
                    queue.append((name, members[name]))
        return members

    def _by_units(self, name: str, units: Sequence[int]) -> Piece:
        """Parameter with a row for each entry of some of its dimensions together."""
        shape = [1]
        for d, size in enumerate(self.parameters[name].shape):
            # those of the rows are every second one
            if (d in units) == (len(shape) % 2 == 0):
                shape[-1] *= size
            else:
                shape.append(size)
        shape += [1] * (2 if len(shape) == 1 else len(shape) % 2 == 0)
        return Piece(name, tuple(shape), range(prod(shape[1::2])))

    def _pieces(self, names: Iterable[str], count: int | None) -> tuple[Piece, ...]:
        """Pieces of parameters, biases first; parameters with ``count`` rows are divided by units."""
        # False sorts first
        ordered = sorted(names, key=lambda name: "bias" not in name.rpartition(".")[2])
        shapes = {self._first[id(self.parameters[name])]: self._shape(name) for name in ordered}
        return tuple(
            Piece(name, shape, range(shape[1]) if shape[1] == count else None) for name, shape in shapes.items()
        )

    def _inside(self, name: str, module: nn.Module) -> list[str]:
        prefix = "" if module is self.model else f"{name}."
        return [f"{prefix}{key}" for key, p in module.named_parameters() if p.is_floating_point() or p.is_complex()]

    def owner(self, parameter: str) -> nn.Module:
        """Module of a parameter; for parameters of a parametrization, the layer."""
        owner = parameter.rpartition(".")[0]
        return self._owners[re.split(r"(?:^|\.)parametrizations(?:\.|$)", owner)[0]]

    def _shape(self, name: str) -> tuple[int, int, int]:
        """Shape (a, m, b) of a parameter with its m natural rows in the middle."""
        parameter, owner = self.parameters[name], self.owner(name)
        shape = tuple(parameter.shape)
        if isinstance(owner, FEATURES):
            return 1, parameter.numel(), 1
        if is_transposed_dense(owner) and len(shape) == 2:
            return shape[0], shape[1], 1
        while len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
        first = shape[0] if shape else 1
        return 1, first, parameter.numel() // max(first, 1)

    # parts

    def _part(self, name: str, whole: Block, base: str, label: str) -> Block:
        """Part of a block."""
        parts = self.parts(base)
        if label in parts:
            return parts[label](name)
        # units of a transposed convolution are no rows of its weight
        count = 0 if is_turned(whole.layer) else len(whole.units)
        if ":" in label and count:
            start, stop = map(int, label.split(":"))
            if start < stop <= count:
                return whole.at(range(start, stop), name)
            raise ConfigError(f"{base!r} has rows 0 to {count}, not {label}: name a range of them")
        known = [f"[{key}]" for key in parts] + [f"ranges of rows, as [0:{count}]"] * bool(count)
        raise ConfigError(f"{base!r} has no part [{label}]: it has {', '.join(known) or 'none'}")

    def parts(self, base: str) -> dict[str, Callable[[str], Block]]:
        """Named parts of a module or a parameter, as makers of blocks."""
        module = self.module(base)
        if isinstance(module, nn.MultiheadAttention):
            return self._attention_parts(base, module)
        if isinstance(module, nn.RNNBase):
            return self._recurrent_parts(base, module)
        whole = self._exact(base) if module is None or self._inside(base, module) else None
        if whole is None or not whole.units:
            return {}
        owner = self.owner(base) if module is None else module
        labels = self._labels(owner, base.rpartition(".")[2] if module is None else "", len(whole.units))

        def make(rows: range) -> Callable[[str], Block]:
            return lambda name: whole.at(rows, name)

        return {label: make(rows) for label, rows in labels.items()}

    def _labels(self, owner: nn.Module, attribute: str, count: int) -> dict[str, range]:
        """Named ranges of the rows of a module (``attribute`` empty) or of one of its parameters."""
        if isinstance(owner, nn.MultiheadAttention):
            if attribute.startswith("in_proj"):
                return thirds(count, owner.num_heads)
            if attribute in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                return heads(attribute[0], range(count), owner.num_heads)
            return {}
        gates = gates_of(owner)
        if gates and (not attribute or attribute.startswith(("weight_ih", "weight_hh", "bias"))):
            size = count // len(gates)
            return {gate: range(k * size, (k + 1) * size) for k, gate in enumerate(gates)}
        path = next((name for name, module in self.modules.items() if module is owner), "")
        around, _, leaf = path.rpartition(".")
        fan_in = None
        if is_layer(owner) and kind_of(owner).role == "dense":
            fan_in = Geometry.of(owner).fan_in
        elif is_transposed_dense(owner):
            fan_in = len(owner.get_parameter("weight"))
        if leaf in PACKED and fan_in is not None and count == 3 * fan_in:
            attention = self.modules[around]
            number = next((n for key in HEADS if isinstance(n := getattr(attention, key, None), int)), 0)
            return thirds(count, number)
        return {}

    def _attention_parts(self, base: str, module: nn.MultiheadAttention) -> dict[str, Callable[[str], Block]]:
        """Query, key and value of `torch.nn.MultiheadAttention`, as rows of its weight and bias."""
        E, prefix = module.embed_dim, "" if module is self.model else f"{base}."

        def make(letter: str, rows: range) -> Callable[[str], Block]:
            def block(name: str) -> Block:
                pieces = []
                if module.in_proj_bias is not None:
                    pieces.append(Piece(f"{prefix}in_proj_bias", (1, 3 * E, 1), rows))
                packed = module.in_proj_weight is not None
                weight = f"{prefix}in_proj_weight" if packed else f"{prefix}{letter}_proj_weight"
                first = 0 if packed else E * "qkv".index(letter)
                own = range(rows.start - first, rows.stop - first)
                pieces.append(Piece(weight, self._shape(weight), own))
                return Block(name, tuple(pieces), rows)

            return block

        return {label: make(label[0], rows) for label, rows in thirds(3 * E, module.num_heads).items()}

    @staticmethod
    def _runs(module: nn.RNNBase) -> Iterator[str]:
        """Suffixes of the parameters of each layer and direction of a recurrent module."""
        for layer in range(module.num_layers):
            yield from (f"l{layer}", f"l{layer}_reverse")[: 1 + module.bidirectional]

    def _recurrent_parts(self, base: str, module: nn.RNNBase) -> dict[str, Callable[[str], Block]]:
        """Layers, directions and gates of a recurrent module; the projection belongs to no unit."""
        prefix = "" if module is self.model else f"{base}."
        gates, runs = gates_of(module), list(self._runs(module))

        def make(run: str, gate: int | None) -> Callable[[str], Block]:
            def block(name: str) -> Block:
                own = [f"{prefix}{key}" for key in module._parameters if key.endswith(f"_{run}")]
                count = self._shape(f"{prefix}weight_ih_{run}")[1]
                pieces = tuple(
                    replace(piece, rows=None) if "weight_hr" in piece.parameter else piece
                    for piece in self._pieces(own, count)
                )
                whole = Block(name, pieces, range(count))
                size = count // max(len(gates), 1)
                return whole if gate is None else whole.at(range(gate * size, (gate + 1) * size))

            return block

        found = {run: make(run, None) for run in runs}
        for run in runs:
            prefixes = ("", f"{run}.") if len(runs) == 1 else (f"{run}.",)
            found |= {f"{start}{gate}": make(run, k) for start in prefixes for k, gate in enumerate(gates)}
        return found

    # several blocks

    @cached_property
    def natural(self) -> dict[str, Block]:
        """Blocks that contain every trained parameter once, in the order of the modules.

        A module without others inside has one block, or a block for query, key and value, or for each layer and
        direction of a recurrence, where torch packs these; parameters outside of such modules have one each.
        """
        found: dict[str, Block] = {}
        seen: set[str] = set()
        for path, module in self.modules.items():
            if "parametrizations" in path.split("."):
                continue
            name = path or ROOT
            inside = self._inside(path, module)
            mine = [self._first[id(self.parameters[key])] for key in inside if self.owner(key) is module]
            fresh = [key for key in mine if key not in seen and self.parameters[key].requires_grad]
            if not fresh:
                continue
            alone = len(mine) == len(inside) and not isinstance(module, (nn.ParameterList, nn.ParameterDict))
            labels: Iterable[str] = ()
            if isinstance(module, nn.RNNBase):
                labels = runs if len(runs := list(self._runs(module))) > 1 else ()
            elif not is_layer(module):
                labels = [label for label in self.parts(name) if label in ("q", "k", "v")]
            blocks: list[Block] = []
            if labels:
                blocks = [self.parts(name)[label](f"{name}[{label}]") for label in labels]
            elif alone or (is_layer(module) and not is_computed(module)):
                blocks = [self._of_module(name, module, mine)]
            for block in blocks:
                own = set(block.parameters)
                # in a layer that is measured as a whole, a frozen weight next to a bias does no harm
                if own & set(fresh) if block.layer is not None else own <= set(fresh):
                    found[block.name] = block
            covered = {key for block in blocks if block.name in found for key in block.parameters}
            found |= {key: self.bare(key) for key in fresh if key not in covered}
            seen.update(mine)
        return found

    def matching(self, pattern: str) -> list[str]:
        """Names of blocks that match a glob, without overlap: natural blocks first, then parameters, then modules.

        Frozen parameters are left out, unless no others match.
        """
        match = PART.fullmatch(pattern)
        if match:
            base, label = match[1], match[2]
            names = [n for n in (*self._module_names(), *self._parameter_names()) if fnmatchcase(n, base)]
            candidates = [f"{n}[{label}]" for n in names if label in self.parts(n) or ":" in label]
        else:
            own = [n for n in self.natural if fnmatchcase(n, pattern) or fnmatchcase(without_part(n), pattern)]
            rest = [n for n in (*self._parameter_names(), *self._module_names()) if fnmatchcase(n, pattern)]
            candidates = [*own, *rest]
        blocks = {name: self.natural.get(name) or self.block(name) for name in candidates}
        trained = {name for name, b in blocks.items() if any(self.parameters[p].requires_grad for p in b.parameters)}
        taken_names: list[str] = []
        owners: dict[str, torch.Tensor] = {}
        for name, block in blocks.items():
            if trained and name not in trained:
                continue
            if not any(owner_of(piece, owners) for piece in block.pieces):
                taken_names.append(name)
                for piece in block.pieces:
                    take(piece, owners, 1)
        if not taken_names:
            raise ConfigError(f"no layer or parameter of the model matches {pattern!r}: {self._nearest(pattern)}")
        return taken_names

    def _module_names(self) -> list[str]:
        return [name for name, module in self.modules.items() if name and self._inside(name, module)]

    def _parameter_names(self) -> list[str]:
        return [name for name, p in self.parameters.items() if p.requires_grad and self._first[id(p)] == name]

    def _nearest(self, name: str) -> str:
        """Most similar names, as the end of an error sentence."""
        layers = list(eligible_layers(self.model))
        if len(layers) <= SHORT and not self.is_glob(name):
            return f"it has {', '.join(layers) or 'none'}"
        known = dict.fromkeys([*layers, *self._module_names(), *self.parameters])
        near = difflib.get_close_matches(name.replace("*", "").strip("."), known, SUGGESTIONS, 0.0)
        return f"the nearest names are {', '.join(near) or 'none'}"


@dataclass(frozen=True)
class Choice:
    """Blocks to measure, by name."""

    names: tuple[str, ...] | None = None  # None: all dense and convolutional layers
    #: names that a glob matched: those that cannot be measured are skipped
    optional: frozenset[str] = frozenset()
    #: members of the blocks that the user defined
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: Iterable[str] | str | None,
        groups: Mapping[str, Iterable[str] | str] | None,
        level: str,
    ) -> Choice:
        """Blocks named by ``layers=`` and ``blocks=`` of a probe."""
        if layers is None and groups is None:
            return cls()
        if isinstance(layers, nn.Module) or not isinstance(layers, Iterable | None):
            raise ConfigError(f"layers must be names, as in layers=['fc1'], not {type(layers).__name__}")
        catalogue = Catalogue(model)
        found: dict[str, None] = {}
        optional: set[str] = set()
        for name in [layers] if isinstance(layers, str) else layers or ():
            if not isinstance(name, str):
                raise ConfigError(f"layers must be names, as in layers=['fc1'], and {name!r} is none")
            if not catalogue.is_glob(name):
                found[name] = None
                optional.discard(name)
                catalogue.refuse_frozen(name)
                continue
            for own in catalogue.matching(name):
                block = catalogue.block(own)
                # at this level, parameters that belong to no unit form separate blocks
                apart = level == "unit" and block.units and block.layer is None
                indivisible = [p.parameter for p in block.pieces if p.rows is None] if apart else []
                optional |= {key for key in (own, *indivisible) if key not in found}
                found |= dict.fromkeys((own, *indivisible))
        own_groups = {} if groups is None else {name: catalogue.members(name, given) for name, given in groups.items()}
        if not found and not own_groups:
            raise ConfigError("no layer was named: leave layers= out for all of them")
        for name in own_groups:
            if name in found:
                raise ConfigError(f"block {name!r} is also the name of a layer: give it another name")
        catalogue.refuse_overlap(
            [catalogue.group(name, members) for name, members in own_groups.items()],
            "{0} is in block {1!r} and in block {2!r}: every parameter can be in one of them",
        )
        return cls(tuple(found), frozenset(optional), own_groups)

    def blocks(self, model: nn.Module) -> dict[str, Block]:
        """Blocks of a model."""
        catalogue = Catalogue(model)
        names = list(chosen_layers(model, None)) if self.names is None else self.names
        found = {name: catalogue.block(name) for name in names}
        return found | {name: catalogue.group(name, members) for name, members in self.groups.items()}

    def placed(self, place_of: Callable[[str], str]) -> Choice:
        """Same blocks under other names."""
        return Choice(
            None if self.names is None else tuple(map(place_of, self.names)),
            frozenset(map(place_of, self.optional)),
            {name: tuple(map(place_of, members)) for name, members in self.groups.items()},
        )


#: Modules whose units are rows that are looked up.
TABLES = (nn.Embedding, nn.EmbeddingBag)


def frozen(parameter: str) -> str:
    """Sentence that refuses a frozen parameter."""
    return f"parameter {parameter!r} requires no gradient, so that it has no Hessian in training: leave it out"


def trained(block: Block, catalogue: Catalogue) -> Block:
    """Trained part of a block."""
    pieces = tuple(piece for piece in block.pieces if catalogue.parameters[piece.parameter].requires_grad)
    if not pieces:
        raise ConfigError(frozen(block.parameters[0]))
    return replace(block, pieces=pieces)


def is_transposed_dense(module: nn.Module) -> bool:
    """Whether a module is the ``Conv1D`` of Hugging Face's transformers: a dense layer with weight (inputs, units)."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__
    )


def thirds(count: int, number: int) -> dict[str, range]:
    """Rows of query, key and value, each a third of ``count``, and of their heads."""
    size = count // 3
    found: dict[str, range] = {}
    for k, letter in enumerate("qkv"):
        found |= heads(letter, range(k * size, (k + 1) * size), number)
    return found


def heads(letter: str, rows: range, number: int) -> dict[str, range]:
    """Rows of a projection and of each of its heads."""
    found = {letter: rows}
    if number and len(rows) % number == 0:
        size = len(rows) // number
        found |= {f"{letter}.{k}": rows[k * size : (k + 1) * size] for k in range(number)}
    return found


def ranged(rows: Sequence[int]) -> Sequence[int]:
    """Row numbers, as a range if they count from 0."""
    return range(len(rows)) if list(rows) == list(range(len(rows))) else tuple(rows)


def refuse_unclear(name: str, piece: Piece, reason: str) -> None:
    """Raise a ConfigError if there is a reason why the rows of a parameter are no units."""
    if reason and piece.rows is not None:
        raise ConfigError(
            f"layer {name!r} is not divided into units, which are outputs: {piece.parameter!r} is a parameter "
            f"{reason}; use level='layer'"
        )


def owner_of(piece: Piece, owners: Mapping[str, torch.Tensor]) -> int:
    """Number of the owner of an entry of a piece; 0 if no entry has one."""
    owner, index = owners.get(piece.parameter), piece.index()
    if owner is None:
        return 0
    owned = owner[slice(None) if index is None else index]
    return int(owned[owned > 0][0]) if bool(owned.any()) else 0


def take(piece: Piece, owners: dict[str, torch.Tensor], number: int) -> None:
    """Give the entries of a piece to an owner."""
    size = piece.count * piece.width
    owner, index = owners.setdefault(piece.parameter, torch.zeros(size, dtype=torch.int32)), piece.index()
    owner[slice(None) if index is None else index] = number


def gates_of(module: nn.Module) -> str:
    """Letters of a recurrent module's gates, in the order of their rows; empty for other modules."""
    return next((gates for kind, gates in GATES.items() if isinstance(module, kind)), "")


def without_part(name: str) -> str:
    """Name of the module or parameter that a name is a part of, or the name itself."""
    part = PART.fullmatch(name)
    return part[1] if part else name


def role(model: nn.Module, name: str) -> Role:
    """Role of a block of a model, from its name and the kind of its module.

    Parameters of a recurrent module, a normalization or a table have its role. For other blocks the name decides by
    convention, and the kind of the module if no convention applies.

    Raises
    ------
    ConfigError
        The model has no such block.

    Examples
    --------
    >>> model = nn.ModuleDict({"0": nn.LayerNorm(4), "h": nn.ModuleList([nn.MultiheadAttention(4, 2)])})
    >>> role(model, "0"), role(model, "h.0[q]")
    (Role(kind='norm', depth=None), Role(kind='query', depth=0))
    """
    catalogue = Catalogue(model)
    catalogue.block(name)
    base = without_part(name)
    module = catalogue.owner(base) if (own := catalogue.module(base)) is None else own
    kind, depth = role_of(name)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        kind = "recurrent"
    elif "norm" in type(module).__name__.lower() and not any(module.children()):
        kind = "norm"
    elif isinstance(module, TABLES):
        kind = "position" if kind == "position" else "embedding"
    elif kind in KINDS:
        pass
    elif isinstance(module, nn.MultiheadAttention):
        kind = "query, key, value"
    elif is_layer(module):
        kind = kind_of(module).role
    else:
        kind = "dense" if is_transposed_dense(module) else "other"
    return Role(kind, depth)

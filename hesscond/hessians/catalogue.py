"""Catalogue of the blocks of a model by their names, and the choice of those that are measured."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from hesscond.capture import kinds
from hesscond.capture.layers import eligible_layers, is_computed
from hesscond.capture.uses import Uses
from hesscond.errors import ConfigError
from hesscond.hessians import roles
from hesscond.hessians.blocks import Block, Claims, Piece

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
#: Modules whose units are rows that are looked up.
TABLES = (nn.Embedding, nn.EmbeddingBag)
#: Reason why rows are not units.
TURNED = "whose rows are no outputs"
#: Largest number of layers that an error lists; for larger models, number of similar names that it suggests.
SHORT, SUGGESTIONS = 8, 4


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
        if (block := self._exact(name)) is not None:
            return block
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
            return class_name(module)
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

    def trained(self, block: Block) -> Block:
        """Trained part of a block."""
        pieces = tuple(piece for piece in block.pieces if self.parameters[piece.parameter].requires_grad)
        if not pieces:
            raise ConfigError(frozen(block.parameters[0]))
        return replace(block, pieces=pieces)

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
        claims = Claims()
        for block in blocks:
            if taken := claims.claim(block):
                raise ConfigError(message.format(repr(taken[0]), taken[1], block.name))

    def _of_module(self, name: str, module: nn.Module, inside: Sequence[str]) -> Block:
        """Block of a module's parameters: units are the rows of the first, and of others with as many rows."""
        if kinds.is_layer(module) and not is_computed(module):
            prefix = "" if module is self.model else f"{name}."
            keys = {f"{prefix}weight", f"{prefix}bias"} & set(self.parameters)
            pieces = self._pieces(sorted(keys), None if kinds.is_turned(module) else kinds.Geometry.of(module).units)
            return Block(name, pieces, range(kinds.Geometry.of(module).units), layer=module)
        undivided, count = "", None
        mine = [key for key in inside if self.owner(key) is module]
        if kinds.is_turned(module):
            undivided = (
                f"the weight of layer {name!r}, a {class_name(module)}, is computed, and its units are not its "
                "rows: use level='layer'"
            )
        elif kinds.is_layer(module):
            count = kinds.Geometry.of(module).units
        elif isinstance(module, nn.RNNBase) and len(runs := runs_of(module)) > 1:
            undivided = f"layer {name!r} has units in each of {', '.join(f'{name}[{run}]' for run in runs)}: name these"
        elif not mine:
            undivided = (
                f"layer {name!r}, a {class_name(module)}, has no parameters of its own to split into units: use "
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
        """Blocks whose units are the outputs of a weight; parameters with other outputs form a separate block."""
        module = self.module(block.name)
        owner = self.home(block.name, block.parameters[0])
        if not block.units or isinstance(owner, PACKING) or is_transposed_dense(owner):
            return [block]
        parameter_uses = {piece.parameter: uses.of(piece.parameter) for piece in block.pieces}
        weights = {key: self._by_units(key, use.units) for key, use in parameter_uses.items() if use.units is not None}
        divided = {piece.parameter: piece for piece in block.pieces if piece.rows is not None}
        reasons = {key: parameter_uses[key].reason for key in divided}
        turned = {key: TURNED for key, piece in divided.items() if weights.get(key, piece).shape != piece.shape}
        if block.table or any(len(piece.rows or ()) < piece.count for piece in divided.values()):
            refuse_unclear(block.name, reasons | turned)
            return [block]
        if kinds.is_layer(module):
            # rows are those of known outputs where nothing else is seen
            same = {key: piece for key, piece in weights.items() if piece.count == len(block.units)}
            refuse_unclear(block.name, {key: reason for key, reason in turned.items() if key not in same})
            if same:
                same |= {p.parameter: replace(p, rows=None) for p in block.pieces if reasons.get(p.parameter)}
            return [replace(block, pieces=tuple(same.get(piece.parameter, piece) for piece in block.pieces))]
        if parts := self._by_outputs(block, owner, weights, uses):
            return parts
        if not type(owner).__module__.startswith("torch.") or kinds.is_turned(owner):
            refuse_unclear(block.name, reasons)
        return [block]

    def _by_outputs(self, block: Block, owner: nn.Module, weights: Mapping[str, Piece], uses: Uses) -> list[Block]:
        """Blocks of the parameters with the outputs of each weight, and of each other parameter; none: no weight."""
        left = sorted(block.pieces, key=lambda piece: self.owner(piece.parameter) is not owner)
        parts: list[Block] = []
        while first := next((weights[piece.parameter] for piece in left if piece.parameter in weights), None):
            members = self._with_outputs_of(first, left, weights, uses)
            biases = [key for key, piece in members.items() if key not in weights and piece.width == 1]
            pieces = [members[piece.parameter] for piece in block.pieces if piece.parameter in members]
            pieces.sort(key=lambda piece: piece.parameter not in biases)
            named = not parts and (block.name != ROOT or len(pieces) == len(block.pieces))
            parts.append(Block(block.name if named else first.parameter, tuple(pieces), range(first.count)))
            left = [piece for piece in left if piece.parameter not in members]
        return parts + [self.bare(piece.parameter) for piece in left] if parts else []

    def _with_outputs_of(
        self, first: Piece, left: Sequence[Piece], weights: Mapping[str, Piece], uses: Uses
    ) -> dict[str, Piece]:
        """Parameters with the same outputs as a first weight, by name, with rows in the order of its rows."""
        members = {first.parameter: first}
        for key, source in (queue := [(first.parameter, first)]):
            for name in (piece.parameter for piece in left if piece.parameter not in members):
                if (order := uses.order(key, name)) is not None:
                    every = range(self.parameters[name].ndim)
                    other = weights[name] if name in weights else self._by_units(name, every)
                    members[name] = replace(other, rows=ranged([order[row] for row in source.rows or ()]))
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

    def home(self, name: str, parameter: str) -> nn.Module:
        """Module of this name, else that of a parameter."""
        return self.owner(parameter) if (module := self.module(name)) is None else module

    def owner(self, parameter: str) -> nn.Module:
        """Module of a parameter; for parameters of a parametrization, the layer."""
        path = parameter.rpartition(".")[0]
        # a name without a module is refused where its copy has no part in the loss
        return self._owners.get(re.split(r"(?:^|\.)parametrizations(?:\.|$)", path)[0], self.model)

    def _shape(self, name: str) -> tuple[int, int, int]:
        """Shape (a, m, b) of a parameter with its m natural rows in the middle."""
        parameter, owner = self.parameters[name], self.owner(name)
        shape = tuple(parameter.shape)
        if isinstance(owner, FEATURES):
            return 1, parameter.numel(), 1
        if is_transposed_dense(owner) and len(shape) == 2:
            return shape[0], shape[1], 1
        # a convolution may have a single output
        while len(shape) > 2 and shape[0] == 1 and (not kinds.is_layer(owner) or kinds.is_turned(owner)):
            shape = shape[1:]
        first = shape[0] if shape else 1
        return 1, first, parameter.numel() // max(first, 1)

    # parts

    def _part(self, name: str, whole: Block, base: str, label: str) -> Block:
        """Part of a block."""
        parts = self.parts(base)
        if label in parts:
            return parts[label]
        # units of a transposed convolution are no rows of its weight
        count = 0 if kinds.is_turned(whole.layer) else len(whole.units)
        if ":" in label and count:
            start, stop = map(int, label.split(":"))
            if start < stop <= count:
                return whole.at(range(start, stop), name)
            raise ConfigError(f"{base!r} has rows 0 to {count}, not {label}: name a range of them")
        known = [f"[{key}]" for key in parts] + [f"ranges of rows, as [0:{count}]"] * bool(count)
        raise ConfigError(f"{base!r} has no part [{label}]: it has {', '.join(known) or 'none'}")

    def parts(self, base: str) -> dict[str, Block]:
        """Named parts of a module or a parameter."""
        module = self.module(base)
        if isinstance(module, nn.MultiheadAttention):
            return self._attention_parts(base, module)
        if isinstance(module, nn.RNNBase):
            return self._recurrent_parts(base, module)
        whole = self._exact(base) if module is None or self._inside(base, module) else None
        if whole is None or not whole.units:
            return {}
        owner = self.home(base, base)
        labels = self._labels(owner, base.rpartition(".")[2] if module is None else "", len(whole.units))
        return {label: whole.at(rows, f"{base}[{label}]") for label, rows in labels.items()}

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
        if kinds.is_layer(owner) and kinds.kind_of(owner).role == "dense":
            fan_in = kinds.Geometry.of(owner).fan_in
        elif is_transposed_dense(owner):
            fan_in = len(owner.get_parameter("weight"))
        if leaf in PACKED and fan_in is not None and count == 3 * fan_in:
            attention = self.modules[around]
            number = next((n for key in HEADS if isinstance(n := getattr(attention, key, None), int)), 0)
            return thirds(count, number)
        return {}

    def _attention_parts(self, base: str, module: nn.MultiheadAttention) -> dict[str, Block]:
        """Query, key and value of `torch.nn.MultiheadAttention`, as rows of its weight and bias."""
        E, prefix = module.embed_dim, "" if module is self.model else f"{base}."
        parts = {}
        for label, rows in thirds(3 * E, module.num_heads).items():
            pieces = []
            if module.in_proj_bias is not None:
                pieces.append(Piece(f"{prefix}in_proj_bias", (1, 3 * E, 1), rows))
            packed = module.in_proj_weight is not None
            weight = f"{prefix}in_proj_weight" if packed else f"{prefix}{label[0]}_proj_weight"
            first = 0 if packed else E * "qkv".index(label[0])
            pieces.append(Piece(weight, self._shape(weight), range(rows.start - first, rows.stop - first)))
            parts[label] = Block(f"{base}[{label}]", tuple(pieces), rows)
        return parts

    def _recurrent_parts(self, base: str, module: nn.RNNBase) -> dict[str, Block]:
        """Layers, directions and gates of a recurrent module; the projection belongs to no unit."""
        prefix = "" if module is self.model else f"{base}."
        gates, runs = gates_of(module), runs_of(module)
        parts = {}
        for run in runs:
            keys = [f"{prefix}{key}" for key in module._parameters if key.endswith(f"_{run}")]
            count = self._shape(f"{prefix}weight_ih_{run}")[1]
            pieces = tuple(
                replace(piece, rows=None) if "weight_hr" in piece.parameter else piece
                for piece in self._pieces(keys, count)
            )
            parts[run] = Block(f"{base}[{run}]", pieces, range(count))
        for run in runs:
            size = len(parts[run].units) // max(len(gates), 1)
            for label in [f"{run}."] if len(runs) > 1 else ["", f"{run}."]:
                parts |= {
                    f"{label}{gate}": parts[run].at(range(k * size, (k + 1) * size), f"{base}[{label}{gate}]")
                    for k, gate in enumerate(gates)
                }
        return parts

    # several blocks

    @cached_property
    def natural(self) -> dict[str, Block]:
        """Blocks that contain every trained parameter once, in the order of the modules."""
        partition: dict[str, Block] = {}
        seen: set[str] = set()
        for path, module in self.modules.items():
            if "parametrizations" in path.split("."):
                continue
            mine = [
                self._first[id(self.parameters[key])] for key in self._inside(path, module) if self.owner(key) is module
            ]
            fresh = [key for key in mine if key not in seen and self.parameters[key].requires_grad]
            # the one parameter of a model is named as in it
            bare = not path and len(mine) == 1 and not kinds.is_layer(module)
            blocks = self._undivided(path or ROOT, module, mine) if fresh and not bare else []
            partition |= {block.name: block for block in blocks if is_trained(block, set(fresh))}
            covered = {key for block in blocks if block.name in partition for key in block.parameters}
            partition |= {key: self.bare(key) for key in fresh if key not in covered}
            seen.update(mine)
        return partition

    def _undivided(self, name: str, module: nn.Module, mine: Sequence[str]) -> list[Block]:
        """Block of a module without others inside, or blocks of what torch packs in it; none: each parameter is one."""
        labels: Iterable[str] = ()
        if isinstance(module, nn.RNNBase):
            labels = runs if len(runs := runs_of(module)) > 1 else ()
        elif not kinds.is_layer(module):
            labels = [label for label in self.parts(name) if label in ("q", "k", "v")]
        if labels:
            parts = self.parts(name)
            return [parts[label] for label in labels]
        listed = isinstance(module, (nn.ParameterList, nn.ParameterDict))
        alone = len(mine) == len(self._inside(name, module)) and not listed
        if alone or (kinds.is_layer(module) and not is_computed(module)):
            return [self._of_module(name, module, mine)]
        return []

    def named(self, names: Iterable[str], level: str) -> dict[str, bool]:
        """Blocks by names and globs, and whether only globs match each, so that it may be skipped."""
        optional: dict[str, bool] = {}
        for name in names:
            if not isinstance(name, str):
                raise ConfigError(f"layers must be names, as in layers=['fc1'], and {name!r} is none")
            if not self.is_glob(name):
                optional[name] = False
                parameter = self.block(name).parameters[0]
                if without_part(name) in self.parameters and not self.parameters[parameter].requires_grad:
                    raise ConfigError(frozen(parameter))
                continue
            for match in self.matching(name):
                block = self.block(match)
                # at this level, parameters that belong to no unit form separate blocks
                apart = level == "unit" and block.units and block.layer is None
                for key in (match, *(piece.parameter for piece in block.pieces if apart and piece.rows is None)):
                    optional.setdefault(key, True)
        return optional

    def matching(self, pattern: str) -> list[str]:
        """Names of blocks that match a glob, without overlap, and without frozen ones unless no others match."""
        if not self.parameters:
            raise ConfigError("the model has no parameters: there is no layer to probe")
        blocks = {name: self.natural.get(name) or self.block(name) for name in self._candidates(pattern)}
        trained = {name for name, b in blocks.items() if any(self.parameters[p].requires_grad for p in b.parameters)}
        claims = Claims()
        chosen = [name for name, b in blocks.items() if (name in trained or not trained) and claims.claim(b) is None]
        if not chosen:
            raise ConfigError(f"no layer or parameter of the model matches {pattern!r}: {self._nearest(pattern)}")
        return chosen

    def _candidates(self, pattern: str) -> list[str]:
        """Names of all blocks that match a glob, those that come first in an overlap before the others."""
        if match := PART.fullmatch(pattern):
            names = [n for n in (*self._module_names(), *self._parameter_names()) if fnmatchcase(n, match[1])]
            return [f"{n}[{match[2]}]" for n in names if match[2] in self.parts(n) or ":" in match[2]]
        matches = [n for n in self.natural if fnmatchcase(n, pattern) or fnmatchcase(without_part(n), pattern)]
        return matches + [n for n in (*self._parameter_names(), *self._module_names()) if fnmatchcase(n, pattern)]

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
        if not isinstance(groups, Mapping | None):
            raise ConfigError(f"blocks must be lists of names by name, as in {{'a': ['fc1']}}, not {groups!r:.50}")
        catalogue = Catalogue(model)
        named = catalogue.named([layers] if isinstance(layers, str) else layers or (), level)
        members = {} if groups is None else {name: catalogue.members(name, given) for name, given in groups.items()}
        if not named and not members:
            raise ConfigError("no layer was named: leave layers= out for all of them")
        for name in members:
            if name in named:
                raise ConfigError(f"block {name!r} is also the name of a layer: give it another name")
        catalogue.refuse_overlap(
            [catalogue.group(name, group_members) for name, group_members in members.items()],
            "{0} is in block {1!r} and in block {2!r}: every parameter can be in one of them",
        )
        return cls(tuple(named), frozenset(name for name, optional in named.items() if optional), members)

    def blocks(self, model: nn.Module) -> dict[str, Block]:
        """Blocks of a model."""
        catalogue = Catalogue(model)
        names = list(eligible_layers(model)) if self.names is None else self.names
        blocks = {name: catalogue.block(name) for name in names}
        return blocks | {name: catalogue.group(name, members) for name, members in self.groups.items()}

    def without(self, names: Container[str]) -> Choice:
        """Same blocks without some of them."""
        return replace(self, names=tuple(name for name in self.names or () if name not in names))

    def placed(self, place_of: Callable[[str], str]) -> Choice:
        """Same blocks under other names."""
        return Choice(
            None if self.names is None else tuple(map(place_of, self.names)),
            frozenset(map(place_of, self.optional)),
            {name: tuple(map(place_of, members)) for name, members in self.groups.items()},
        )


def class_name(module: nn.Module) -> str:
    """Class of a module in words: as torch.nn exports it, and without the class that a parametrization makes."""
    given = type_before_parametrizations(module)
    public = (c for c in given.__mro__ if not c.__module__.startswith("torch.nn.modules") or hasattr(nn, c.__name__))
    return "parametrized " * is_parametrized(module) + next(public, given).__name__


def is_trained(block: Block, parameters: set[str]) -> bool:
    """Whether a block is measured where these parameters are trained."""
    names = set(block.parameters)
    # in a layer that is measured as a whole, a frozen weight next to a bias does no harm
    return names <= parameters if block.layer is None else bool(names & parameters)


def frozen(parameter: str) -> str:
    """Sentence that refuses a frozen parameter."""
    return f"parameter {parameter!r} requires no gradient, so that it has no Hessian in training: leave it out"


def is_transposed_dense(module: nn.Module) -> bool:
    """Whether a module is the ``Conv1D`` of Hugging Face's transformers: a dense layer with weight (inputs, units)."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__
    )


def thirds(count: int, number: int) -> dict[str, range]:
    """Rows of query, key and value, each a third of ``count``, and of their heads."""
    size = count // 3
    ranges: dict[str, range] = {}
    for k, letter in enumerate("qkv"):
        ranges |= heads(letter, range(k * size, (k + 1) * size), number)
    return ranges


def heads(letter: str, rows: range, number: int) -> dict[str, range]:
    """Rows of a projection and of each of its heads."""
    ranges = {letter: rows}
    if number and len(rows) % number == 0:
        size = len(rows) // number
        ranges |= {f"{letter}.{k}": rows[k * size : (k + 1) * size] for k in range(number)}
    return ranges


def ranged(rows: Sequence[int]) -> Sequence[int]:
    """Row numbers, as a range if they count from 0."""
    return range(len(rows)) if list(rows) == list(range(len(rows))) else tuple(rows)


def refuse_unclear(name: str, reasons: Mapping[str, str]) -> None:
    """Raise a ConfigError if there is a reason why the rows of a parameter are no units."""
    for parameter, reason in reasons.items():
        if reason:
            raise ConfigError(
                f"layer {name!r} is not divided into units, which are outputs: {parameter!r} is a parameter {reason}; "
                "use level='layer'"
            )


def gates_of(module: nn.Module) -> str:
    """Letters of a recurrent module's gates, in the order of their rows; empty for other modules."""
    return next((gates for kind, gates in GATES.items() if isinstance(module, kind)), "")


def runs_of(module: nn.RNNBase) -> list[str]:
    """Suffixes of the parameters of each layer and direction of a recurrent module."""
    ends = ("", "_reverse")[: 1 + module.bidirectional]
    return [f"l{layer}{end}" for layer in range(module.num_layers) for end in ends]


def without_part(name: str) -> str:
    """Name of the module or parameter that a name is a part of, or the name itself."""
    part = PART.fullmatch(name)
    return part[1] if part else name


def role(model: nn.Module, name: str) -> roles.Role:
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
    module = catalogue.home(base, base)
    kind, depth = roles.role_of(name)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        kind = "recurrent"
    elif "norm" in type(module).__name__.lower() and not any(module.children()):
        kind = "norm"
    elif isinstance(module, TABLES):
        kind = "position" if kind == "position" else "embedding"
    elif kind in roles.KINDS:
        pass
    elif isinstance(module, nn.MultiheadAttention):
        kind = "query, key, value"
    elif kinds.is_layer(module):
        kind = kinds.kind_of(module).role
    else:
        kind = "dense" if is_transposed_dense(module) else "other"
    return roles.Role(kind, depth)

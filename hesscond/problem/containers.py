"""Tensors in what loaders and models hand over: batches, nested containers, and objects with tensors as attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy as copied, deepcopy
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError

#: Types without tensors.
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
#: Types whose attributes do not belong to a value that holds them.
FOREIGN = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
#: Names of the two tensors of a sparse layout that hold indices, by layout; its values are the third.
INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def attributes(value: Any) -> dict[str, Any]:
    """Attributes of a dataclass, of an object that has ``to``, or of one with tensors; empty for anything else."""
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, *FOREIGN)):
        return {}
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()) if name[:2] != "__")
    data = dict(getattr(value, "__dict__", {})) | {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held = any(isinstance(item, torch.Tensor) for item in data.values())
    return data if held or is_dataclass(value) or callable(getattr(value, "to", None)) else {}


def leaves(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield what nested tuples, lists, mappings and objects hold, each object once."""
    items: Iterable[Any]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif not (fields := attributes(value)):
        yield value
        return
    else:
        seen = set() if seen is None else seen
        items = () if id(value) in seen else fields.values()
        seen.add(id(value))
    for item in items:
        yield from leaves(item, seen)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested tuples, lists, mappings and objects."""
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def mapped(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], whole: Callable[[Any], Any] | None = None
) -> Any:
    """Copy nested tuples, lists, mappings and objects with ``function`` applied to every tensor, and nothing else.

    ``whole`` is applied to objects that have a method ``to``, in place of what ``function`` would do in them.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if whole is not None and callable(getattr(value, "to", None)) and not isinstance(value, FOREIGN):
        return whole(value)
    if isinstance(value, Mapping):
        apply: Any = getattr(value, "apply", None)
        # a tensor dict refuses tensors of another batch size
        if callable(apply) and hasattr(value, "batch_dims"):
            return apply(function, batch_size=()).auto_batch_size_(value.batch_dims)
        # a subclass may have further attributes
        result = copied(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            result[key] = mapped(item, function, whole)
        return result
    if isinstance(value, (tuple, list)):
        items = [mapped(item, function, whole) for item in value]
        # a named tuple takes its fields one by one
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return with_leaves(value, function) if attributes(value) else value


def with_leaves(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy an object as its class copies itself, with other tensors, and the same objects without tensors."""
    parts = list(leaves(value))
    places = {id(leaf): function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in parts}
    try:
        return deepcopy(value, places)
    except Exception as error:  # a class may refuse in any way
        raise ConfigError(
            f"{kind(value)} in the batch cannot be copied ({type(error).__name__}: {error}): give its tensors, in a "
            "tuple or a dict"
        ) from error


def moved(value: Any, device: torch.device | None) -> Any:
    """Move every tensor in a value to a device (None: nowhere); a tensor that occurs twice stays a single one."""
    if device is None:
        return value
    done: dict[int, tuple[Any, Any]] = {}

    def move(part: Any) -> Any:
        if getattr(part, "is_meta", False):
            raise ConfigError("the data are on the meta device, so they have no values")
        if id(part) not in done:
            # the value itself is kept too, so that its id is not reused; some objects move themselves
            done[id(part)] = (part if isinstance(part, torch.Tensor) else copied(part)).to(device), part
        return done[id(part)][0]

    return mapped(value, move, move)


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Strided tensors that hold the indices and the values of a sparse tensor; of a strided one, itself."""
    if tensor.layout in INDICES:
        return [getattr(tensor, name)() for name in INDICES[tensor.layout]] + [tensor.values()]
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor with the same entries that is not sparse."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def kind(value: Any) -> str:
    """Description of a value, for an error message."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_batch(data: Any) -> bool:
    """Whether ``data`` is one batch, not a stream: a mapping, a record, an object, a pair that holds no two batches."""
    if isinstance(data, list):
        # a loader yields each batch as a list [inputs, targets]
        return len(data) == 2 and not all(isinstance(x, (tuple, list, Mapping)) or attributes(x) for x in data)
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        if len(data) != 2:
            raise ConfigError(
                f"a tuple of {len(data)} is no batch (inputs, targets): give a stream of batches as a list"
                if data
                else "the data are an empty tuple: give a pair (inputs, targets), or a list of such pairs"
            )
        if all(isinstance(item, (tuple, list)) and len(item) == 2 for item in data) and form(data[0]) == form(data[1]):
            raise ConfigError(
                "the data ((a, b), (c, d)) may be two batches or one with two inputs and two targets: write "
                "[(a, b), (c, d)] for two batches, or [((a, b), (c, d))] for one"
            )
        return True
    if isinstance(data, (Mapping, tuple)):
        return True
    # a loader may keep tensors, a graph may yield its attributes, and a frame its columns
    iterable = isinstance(data, Iterable) and not (isinstance(data, (str, bytes)) or hasattr(data, "__array__"))
    if attributes(data) and (not iterable or callable(getattr(data, "to", None))):
        return True
    if not iterable:
        raise ConfigError(
            f"the data must be a pair (inputs, targets) of tensors or a stream of such pairs, not {kind(data)}"
        )
    return False


def form(value: Any) -> Any:
    """Structure of a batch, without sizes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [form(item) for item in value]
    return type(value)

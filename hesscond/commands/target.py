"""Torch models from Python files, ``FILE.py:FUNCTION``, where FUNCTION() returns (model, loss_fn, data)."""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hesscond.commands import printing
from hesscond.errors import ConfigError, HesscondError, counted, did_you_mean, one_line, out_of_memory
from hesscond.lazy import OURS, PASSED, is_ours, is_users, user_failure
from hesscond.problem import evaluation, weighting
from hesscond.problem.containers import is_batch, kind, moved

FORM = "FILE.py:FUNCTION, where FUNCTION() returns (model, loss_fn, data)"
#: Name of a virtual package with the loaded file and its siblings as modules: ``from .sibling import x``
PACKAGE = "_hesscond_target"


class Stream:
    """Batches that can be read again, on one device; ``samples`` and ``are``: those of the last pass (`counted_in`)."""

    def __init__(self, source: Iterable[Any], model: nn.Module, device: torch.device | None = None) -> None:
        self.samples, self.are = 0, ""
        self._source, self._model, self._device = source, model, device

    def __iter__(self) -> Iterator[evaluation.Batch]:
        self.samples = 0
        for number, batch in enumerate(self._source):
            try:
                pair = evaluation.checked_batch(batch)
            except ConfigError as error:
                raise ConfigError(f"batch {number} of the data: {error}") from None
            samples, self.are = evaluation.counted_in(self._model, pair[0])
            self.samples += samples
            yield moved(batch, self._device)

    def on(self, device: torch.device) -> Stream:
        """The same batches on a device, moved one by one."""
        return Stream(self._source, self._model, device)


@dataclass(frozen=True)
class Target:
    """Model, loss ``loss_fn(output, target)``, data, and weight of each batch of a `Stream`, if it has to be given."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    data: tuple[Any, Any] | Stream
    weight: weighting.BatchWeight | None = None

    @property
    def samples(self) -> str:
        """Number of samples, of a stream those of its latest pass, in words, and what they are if not rows."""
        data = self.data
        count, are = (
            (data.samples, data.are) if isinstance(data, Stream) else evaluation.counted_in(self.model, data[0])
        )
        return counted(count, "sample") + (f" ({are})" if are else "")

    def to(self, device: torch.device) -> Target:
        """The target on a device; the model itself is moved, and the loss if it is a module."""
        for module in (self.model, self.loss_fn):
            if isinstance(module, nn.Module):
                if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
                    raise ConfigError("the model or the loss is on the meta device, so its parameters have no values")
                module.to(device)
        data = self.data.on(device) if isinstance(self.data, Stream) else moved(self.data, device)
        return replace(self, data=data)


def load_target(spec: str, *, seed: int | None = None) -> Target:
    """Target that FUNCTION() of ``"FILE.py:FUNCTION"`` returns; with a ``seed``, all random generators are seeded."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name.isidentifier():
        given = f": which function of {spec}?" if not colon and spec.endswith(".py") else ""
        raise ConfigError(f"{spec!r} is not of the form {FORM}{given}")
    path = Path(file)
    source = read(path)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the user's code may draw from it
        torch.manual_seed(seed)
    with importable(path.resolve().parent):
        try:
            # not by the import system, whose cache may be a second out of date
            module = ModuleType(f"{PACKAGE}.{path.stem}")
            module.__file__, module.__package__ = str(path.resolve()), PACKAGE
            sys.modules[module.__name__] = module
            exec(compile(source, module.__file__, "exec"), module.__dict__)
            return as_target(named(module, name, path)(), spec)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(user_failure(error, path) or one_line(error)) from error


def read(path: Path) -> bytes:
    """Contents of a file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no file {path}{suggestion(path.name, near)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules in ``folder`` be imported, and forget them afterwards: another folder may have the same names."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    search, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules[PACKAGE] = package
    try:
        yield
    finally:
        sys.path[:] = search
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.split(".")[0] == PACKAGE or (file and is_users(file, folder)):
                del sys.modules[name]


def named(module: ModuleType, name: str, path: Path) -> Callable[[], Any]:
    """Function called ``name`` of a module, which can be called without arguments."""
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if isinstance(v, FunctionType) and v.__module__ == module.__name__]
        raise ConfigError(f"{path} has no function {name!r}{suggestion(name, names)}")
    function = getattr(module, name)
    if not callable(function) or isinstance(function, nn.Module):
        raise ConfigError(f"{name!r} in {path} is not a function but {described(function)}")
    try:
        inspect.signature(function).bind()
    except TypeError:
        signature = inspect.signature(function)
        raise ConfigError(f"{path}:{name} must be callable without arguments, but it is {name}{signature}") from None
    except ValueError:  # written in C: no signature to look at
        pass
    return function


def suggestion(name: str, names: list[str]) -> str:
    """Suggestion of a similar name, or else a list of the existing names."""
    listed = f"there is {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
    return f": {did_you_mean(name, names, otherwise=listed)}" if names else ""


def as_target(returned: Any, spec: str) -> Target:
    """`Target` of what FUNCTION returned."""
    if not isinstance(returned, (tuple, list)) or len(returned) not in (3, 4):
        raise ConfigError(
            f"{spec} must return (model, loss_fn, data) or (model, loss_fn, data, weight), but it returned "
            f"{described(returned)}"
        )
    model, loss_fn, data, weight = (*returned, None)[:4]
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{spec}: the model must be a torch.nn.Module, not {described(model)}")
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise ConfigError(f"{spec}: the loss must be a callable (output, target), not {described(loss_fn)}")
    if isinstance(data, Dataset):
        raise ConfigError(f"{spec}: the data are single samples ({described(data)}): wrap them in a DataLoader")
    try:
        weighting.check_weighting(None, weight)
        if is_batch(data):
            return Target(model, loss_fn, evaluation.checked_batch(data), weight)
    except ConfigError as error:
        raise ConfigError(f"{spec}: {error}") from None
    if isinstance(data, Iterator):  # can be read only once
        data = list(data)
    return Target(model, loss_fn, Stream(data, model), weight)


def described(value: Any) -> str:
    """Description of a value, for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__} (write {value.__name__}() to make one)"
    return kind(value)


def explained(error: BaseException, spec: str) -> str:
    """Sentence for an exception during a probe."""
    if out_of_memory(error):
        return f"out of memory: take fewer samples, --layers or --units, or set --memory ({one_line(error)})"
    if (where := user_failure(error, Path(spec.rpartition(":")[0]))) is not None:
        return where
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name not in PASSED]
    if is_ours(frames[-1]):
        place = f"{Path(frames[-1].filename).relative_to(OURS.parent)}:{frames[-1].lineno}"
        return f"{spec} cannot be measured, by a fault of hesscond ({place}; --traceback shows all): {one_line(error)}"
    return f"the model, loss or data of {spec} raised {one_line(error)} (--traceback shows where)"


@contextmanager
def of_user(spec: str, show_traceback: bool) -> Iterator[printing.Say]:
    """Code of the user's runs in the block: what it prints is no part of the results."""
    try:
        with redirect_stdout(sys.stderr), printing.sign_of_life(f"running {spec}") as say:
            yield say
    except HesscondError as error:
        if show_traceback and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise type(error)(printing.as_options(str(error))) from error.__cause__

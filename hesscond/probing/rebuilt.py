"""Copies of a model that methods rebuild, with the statistics and the first step that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.methods import Spec
from hesscond.methods.base import Method
from hesscond.probing.question import Question
from hesscond.problem.containers import is_batch, tensors_of
from hesscond.problem.devices import accelerators_of
from hesscond.problem.evaluation import Batch, call_of, checked_batch, converted, in_precision, scalar
from hesscond.problem.untouched import untouched_randomness

#: Code that applies a method to a model itself.
BY_HAND = "method=hesscond.methods.parse({!r}).create(model)"


def rebuilt(question: Question, spec: Spec) -> tuple[Method, Batch | Iterable[Batch]]:
    """Method at work on a copy of a model, as a study builds it, and the data, read if a method reads them all."""
    model, data = question.model, question.data
    try:
        copy = deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"{spec.text} is applied to a copy of the model, which cannot be copied ({error}): apply it to the model "
            f"itself and give it, {BY_HAND.format(spec.text)}"
        ) from None
    if (shared := shared_function(copy, model)) is not None:
        raise ConfigError(
            f"{spec.text} is applied to a copy of the model, in which the function {shared} would still use the "
            f"parameters of the model itself: apply it to that and give it, {BY_HAND.format(spec.text)}"
        )
    old_modules = set(copy.modules())
    # a method may draw its first parameters
    with untouched_randomness(accelerators_of(copy.parameters())):
        method = spec.create(copy)
    added = [m for m in copy.modules() if m not in old_modules and getattr(m, "running_mean", None) is not None]
    if not all(module.training for module in added):
        raise ConfigError(
            f"{spec.text} normalizes by running statistics in eval mode, and those of a network just built are of no "
            "data: call model.train(), or train it with the method and give that model"
        )
    if method.reads_all_inputs:
        if not is_batch(data):
            data = list(data)
        method.fit(first_arguments(spec.text, [data] if is_batch(data) else data))
    if added and (is_batch(data) or isinstance(data, Sequence)):
        for batch in [data] if is_batch(data) else data:
            method.check_batch(len(next(tensors_of(batch))))
    return method, data


def take_first_step(question: Question, text: str) -> None:
    """Show the data to a method at work on a copy of the model, as the mini-batch of its first step.

    The copy is cast to ``question.dtype``, unless that is None. The copy itself is run, not a `Snapshot` of it: a
    method may differentiate the loss in the parameters that it holds.
    """
    method, data, dtype = question.method, question.data, question.dtype
    if not is_batch(data):
        raise ConfigError(f"the coordinates of {text} are those of a first step on one batch: give (inputs, targets)")
    inputs, target = converted(checked_batch(data), dtype)
    model = method.model if dtype is None else method.model.to(dtype)
    args, kwargs = call_of(model, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"the coordinates of {text} are those of a first step, and no parameter of the model requires a gradient"
        )
    with untouched_randomness(accelerators_of(parameters)), torch.enable_grad():
        try:
            loss = scalar(in_precision(question.loss_fn, dtype, model)(model(*args, **kwargs), target))
        except RuntimeError as error:
            if dtype is None:
                raise
            raise ConfigError(
                f"{text} is applied to a copy of the model in {dtype}, which does not run ({error}): give dtype=None"
            ) from error
        method.observe(loss)
        penalty = method.penalty(loss)
        # not backward: the loss may have parameters, or the model's
        gradients = torch.autograd.grad(loss if penalty is None else loss + penalty, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    method.transform_gradients()


def first_arguments(method: str, batches: Iterable[Batch]) -> torch.Tensor:
    """First arguments of the model, concatenated over all batches."""
    arguments = []
    for batch in batches:
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        first = inputs[0] if isinstance(inputs, tuple) and inputs else inputs
        if not isinstance(first, torch.Tensor):
            raise ConfigError(f"{method} needs inputs that are tensors, or tuples that begin with one")
        arguments.append(first)
    if not arguments:
        raise ConfigError("the data are an empty stream: they need at least one batch")
    try:
        return torch.cat(arguments)
    except RuntimeError as error:
        raise ConfigError(
            f"{method} needs the inputs of all batches as one tensor, and they do not fit: {error}"
        ) from None


def shared_function(copied: nn.Module, model: nn.Module) -> str | None:
    """Function in a copy of a model that uses modules or parameters of the model itself: copies share functions."""
    ids = {id(item) for item in (*model.modules(), *model.parameters(), *model.buffers())}
    seen: set[int] = set()
    waiting: list[tuple[Any, str | None]] = [(copied, None)]
    while waiting:
        value, function = waiting.pop()
        if id(value) in ids:
            return function
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            function = value.__qualname__
            parts = [*getclosurevars(value).nonlocals.values(), *getclosurevars(value).globals.values()]
            parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        elif isinstance(value, MethodType):
            parts = [value.__self__, value.__func__]
        elif isinstance(value, partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        elif isinstance(value, nn.Module) or (function is not None and not isinstance(value, (type, ModuleType))):
            parts = list(getattr(value, "__dict__", {}).values())
        else:
            continue
        waiting += [(part, function) for part in parts]
    return None

"""Model at one moment, to be evaluated again later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hesscond.errors import CaptureError, ConfigError
from hesscond.problem import devices, evaluation
from hesscond.problem.containers import tensors_of
from hesscond.problem.graph import refuse_originals
from hesscond.problem.precision import Operations

# glibc keeps up to twice the largest block that was ever freed, at most 64 MB, and returns the rest: to touch fresh
# memory takes longer than most operations of a check. This block is never touched, and freed at once.
torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")


#: Numbers of a parameter that are compared at a time.
PART = 2**20


class Hooks(Protocol):
    """Hooks that are attached to a model while it is evaluated."""

    def weights(self, copies: Mapping[int, torch.Tensor]) -> Mapping[int, str]:
        """Layer of each tensor, by its id, whose uses outside the layer are noted; ``copies`` of the model's by id."""

    def attached(self, watch: evaluation.WeightWatch) -> AbstractContextManager[None]:
        """Context in which the hooks are attached, without what they have recorded before."""


class Snapshot:
    """Snapshot of a model: copies of its parameters and buffers, and its mode; the model is run, never changed.

    ``leaves`` are differentiable copies of ``parameters``, in their order and in ``dtype`` (None: that of the model).
    Equal copies of other parameters are taken from ``like``, which saves their memory.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype | None,
        like: Snapshot | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        tensors = evaluation.tensors_by_module(model)
        devices.check_float64(tensors.values())
        known = {} if like is None else like.constants
        copies: dict[int, torch.Tensor] = {}
        for t in tensors.values():
            old = known.get(id(t))
            if old is None or not is_copy(old, t.detach(), dtype):
                old = evaluation.converted(t.detach(), dtype, copy=True)
            copies[id(t)] = old
        self.leaves: list[torch.Tensor] = [copies[id(p)].requires_grad_() for p in parameters]
        self.devices = devices.accelerators_of(tensors.values())
        #: copies by the ids of the originals
        self.copies = copies
        self._state = {key: copies[id(t)] for key, t in tensors.items()}
        # an evaluation may write to the buffers, so that each gets copies
        self._buffers = {id(copies[id(t)]) for t in tensors.values() if not isinstance(t, nn.Parameter)}
        self._trained = [copies[id(t)] for t in tensors.values() if isinstance(t, nn.Parameter) and t.requires_grad]
        self._training = [module.training for module in model.modules()]
        self._owners = {id(t): key for key, t in tensors.items() if isinstance(t, nn.Parameter)}
        self._homes = {t.device for t in tensors.values()}

    def at(self, values: Mapping[int, torch.Tensor]) -> Snapshot:
        """Copy of the snapshot with some leaves, given by number, replaced by other tensors."""
        moved = copy(self)
        moved.leaves = [values.get(number, leaf) for number, leaf in enumerate(self.leaves)]
        places = {id(leaf): replacement for leaf, replacement in zip(self.leaves, moved.leaves, strict=True)}
        moved._state = {key: places.get(id(tensor), tensor) for key, tensor in self._state.items()}
        return moved

    @torch.enable_grad()
    def evaluate(
        self,
        loss_fn: evaluation.LossFunction,
        batch: evaluation.Batch,
        *,
        counted: Operations | None = None,
        hooks: Hooks | None = None,
        flattening: bool = False,
    ) -> evaluation.Evaluation:
        """Evaluate the loss of a batch on the graph of the leaves; random numbers come from the present state.

        Without ``flattening``, `Evaluation.flattened` is not looked for.
        """
        inputs, target = evaluation.checked_batch(batch)
        # lengths and constants may be elsewhere
        tensor = next((tensor for tensor in tensors_of(inputs) if tensor.ndim), None)
        if tensor is not None and tensor.device not in self._homes:
            home = next(iter(self._homes))
            raise ConfigError(f"the model is on device '{home}' but the batch on '{tensor.device}': move one of them")
        evaluated = partial(self._evaluated, loss_fn, (inputs, target), counted, hooks, flattening)
        try:
            result = evaluated()
        except CaptureError as error:
            if "does not require grad" not in str(error.__cause__):
                raise
            # the model differentiates in its constant copies
            for tensor in self._trained:
                tensor.requires_grad_()
            result = evaluated()
        loss = evaluation.scalar(result.loss)
        refuse_originals(loss, self.model, self._state)
        return replace(result, loss=loss)

    def _evaluated(
        self,
        loss_fn: evaluation.LossFunction,
        batch: tuple[Any, Any],
        counted: Operations | None,
        hooks: Hooks | None,
        flattening: bool,
    ) -> evaluation.Evaluation:
        """Evaluation of the loss, whose value is not checked."""
        fresh = {number: tensor.clone() for tensor in self._state.values() if (number := id(tensor)) in self._buffers}
        state = {key: fresh.get(id(tensor), tensor) for key, tensor in self._state.items()}
        copies = {number: state[key] for number, key in self._owners.items()}
        for owner in self.model.modules():
            # its slices make parameters of tensors that are none
            for parameter in owner.parameters(recurse=False) if isinstance(owner, nn.ParameterList) else ():
                copies[id(parameter)]._is_param = True
        watch = evaluation.WeightWatch(self._owners if hooks is None else hooks.weights(self.copies), flattening)
        attached = nullcontext() if hooks is None else hooks.attached(watch)
        with in_modes(self.model, self._training), attached:
            result = evaluation.evaluate(
                self.model, loss_fn, batch, state, copies=copies, dtype=self.dtype, watch=watch, counted=counted
            )
        for number in watch.used_outside & self._owners.keys():
            raise CaptureError(
                f"the model or the loss uses the parameter {self._owners[number]!r} by a reference of its own, where "
                "it is not differentiated: take it from its module, and leave terms as weight decay out"
            )
        return result

    @property
    def constants(self) -> dict[int, torch.Tensor]:
        """Copies of trained parameters that are no leaves, by the ids of the originals."""
        trained = {id(t) for t in self._trained if type(t) is torch.Tensor and not (t.requires_grad or t.is_sparse)}
        return {number: t for number, t in self.copies.items() if id(t) in trained}

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of the model, as used in its evaluations."""
        return [self._state[key] for key in self._owners.values()]


def is_copy(old: torch.Tensor, of: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor is still the copy of another one in ``dtype``; compared in parts, which takes no memory."""
    if (old.shape, old.device, old.dtype) != (of.shape, of.device, dtype or of.dtype):
        return False
    parts = zip(old.reshape(-1).split(PART), of.reshape(-1).split(PART), strict=True)
    return all(torch.equal(old_part, part.to(old.dtype)) for old_part, part in parts)


@contextmanager
def in_modes(model: nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """Context in which each module is in a training mode (True) or in evaluation mode; `train` may be overridden."""
    before = {module: module.training for module in model.modules()}
    for module, training in zip(before, modes, strict=True):
        module.training = training
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training

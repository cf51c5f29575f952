"""Wrappers of a model or its parts that do not change its values: compilers, replicas, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from hesscond.errors import CaptureError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """Model inside `torch.compile`, ``DataParallel`` or ``DistributedDataParallel``."""
    while True:
        if isinstance(model, PARALLEL):
            model = model.module
        # torch's compiler takes seconds to import
        elif "torch._dynamo" in sys.modules and isinstance(model, sys.modules["torch._dynamo"].OptimizedModule):
            model = model._orig_mod
        else:
            return model


def checked_loss(model: object, loss_fn: Any) -> Callable[[Any, Any], Any]:
    """Loss function; None is the model's own. Raise a ConfigError if it is no function, or ``model`` no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise ConfigError(f"the loss must be a function, and {name} is a class: give one made of it, as {name}()")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"the loss must be a function of (output, target), not {type(loss_fn).__name__}, or None for a model that "
            "returns its own"
        )
    return own_loss if loss_fn is None else loss_fn


def own_loss(output: Any, target: Any) -> Any:
    """Loss that a model returns: its output, or the ``loss`` of that."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            "the loss is None, and the model returns none for this batch: give it labels, or a function of (output, "
            "target)"
        )
    return loss


def check_group(group: object) -> None:
    """Raise a ConfigError if ``group`` is no process group of torch."""
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(f"group must be a process group of torch.distributed, not {group!r}")


def group_of(model: nn.Module, group: ProcessGroup | None) -> ProcessGroup | None:
    """Processes that measure together: those of ``group``, or of a ``DistributedDataParallel`` model; None: one."""
    check_group(group)
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    return None if group is None or group.size() == 1 else group


def measurable(model: nn.Module) -> nn.Module:
    """Model inside its wrappers; raise an error if its parameters have no values to replace, or have them in parts."""
    model = unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "the model is compiled by torch.jit, which lets nobody differentiate in copies of its parameters: "
            "give the model as it was before torch.jit.script or torch.jit.trace"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} has no values yet (a lazy module): call the model on one batch before it is probed"
            )
        if tensor.is_meta:
            raise CaptureError(
                f"{name!r} has no values, as it is on the device 'meta': load the parameters before the model is probed"
            )
        # compared by name, since importing DTensor takes a second
        if "DTensor" in (type(tensor).__name__, type(tensor.data).__name__):
            raise ConfigError(
                f"parameter {name!r} is sharded over processes (FSDP2): give every process a plain model with the "
                "whole parameters (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True), its share of the data, and group="
            )
    return model


@contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Context without compiled code, replicas and checkpoints in the model, and without its backward hooks.

    None of them changes a value, but compilers do not see hooks, replicas hold separate parameters, and a checkpoint
    computes its part again in the backward pass, from the parameters that the model has by then. Backward hooks are
    meant for the user's passes.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
            if isinstance(module, PARALLEL):
                vars(module)["forward"] = module.module
                stack.callback(vars(module).pop, "forward", None)
        # both kinds of checkpoint, by the names under which torch looks them up when they are called
        for name, replacement in (
            ("CheckpointFunction", CalledOnce),
            ("_checkpoint_without_reentrant_generator", kept_graph),
        ):
            if hasattr(checkpoint, name):
                stack.callback(setattr, checkpoint, name, getattr(checkpoint, name))
                setattr(checkpoint, name, replacement)
        yield


class CalledOnce:
    """Replacement of torch's ``CheckpointFunction`` that calls the function once and keeps its graph."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Result of the function, with its graph."""
        return function(*args)


def kept_graph(
    function: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """Run a function in its forward context, in place of torch's ``_checkpoint_without_reentrant_generator``."""
    if context_fn is None:
        yield
        return
    with context_fn()[0]:
        yield

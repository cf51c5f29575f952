"""Forward pass of a model, without side effects, that adds zero perturbations to the outputs of chosen layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hesscond.capture import kinds
from hesscond.capture.layers import is_computed, own_parameters
from hesscond.errors import CaptureError, NotFiniteError
from hesscond.problem import evaluation, graph
from hesscond.problem.containers import strided
from hesscond.problem.problem import Call
from hesscond.problem.snapshot import Snapshot

#: Why a layer cannot be probed.
UNREACHED = "not reached by this batch"
COMPLEX = "its parameters are complex, and a Hessian is one in real numbers"
WITHOUT_GRADIENT = "it runs under torch.no_grad, so that its parameters get no gradient"


#: Weight and bias (None: no bias) by layer name.
Parameters = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class ForwardPass(evaluation.Evaluation):
    """Value of a loss with its graph down to the perturbations of every layer."""

    calls: dict[str, list[Call]]  # of each layer in their order
    # weight and bias (None: no bias) of the layers that are differentiated in them
    parameters: Parameters
    bypassed: dict[str, str]  # layers that were not used, and why
    # layers with parameters used outside, or an input that depends on an earlier call: to be differentiated in their
    # parameters
    entangled: set[str]
    differentiated: set[str]  # those of them that are entangled only since the model takes a derivative through them
    overwritten: bool  # whether an input was changed in place after the call: the pass must be repeated with copies
    repeating: set[str]  # layers with inputs that rounding may have made equal


def run_forward(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batch: evaluation.Batch,
    layers: Mapping[str, kinds.Layer],
    *,
    dtype: torch.dtype | None,
    optional: bool,
    in_parameters: Set[str] = frozenset(),
    keep_inputs: bool = False,
) -> ForwardPass:
    """Run the model on copies of its tensors, adding a zero perturbation to every output of ``layers``."""
    hooks = Perturbations(layers, in_parameters, keep_inputs)
    originals = {name: own_parameters(layer) for name, layer in layers.items() if name in hooks.in_parameters}
    for name in originals:
        if is_computed(layers[name]):
            raise CaptureError(
                f"layer {name!r} is used in more than one way and its weight is computed from other parameters: "
                "its Hessian cannot be captured"
            )
    snapshot = Snapshot(model, [p for parts in originals.values() for p in parts], dtype)
    evaluated = snapshot.evaluate(loss_fn, batch, hooks=hooks, flattening=True)
    leaves = iter(snapshot.leaves)
    parameters = {name: (next(leaves), next(leaves) if len(parts) > 1 else None) for name, parts in originals.items()}
    hooks.look_outside()
    loss = evaluated.loss
    variables = variables_of(loss)
    bypassed = hooks.bypassed({name for name, own in parameters.items() if any(id(leaf) in variables for leaf in own)})
    if bypassed and not optional:
        name, reason = next(iter(bypassed.items()))
        raise CaptureError(f"layer {name!r} cannot be probed: {reason}")
    reached = {name: calls for name, calls in hooks.calls.items() if name not in bypassed}
    for name, layer_calls in reached.items():
        if not all(evaluation.is_finite(call.inputs) for call in layer_calls):
            raise NotFiniteError(f"the input of layer {name!r} has NaN or infinite entries")
    if reached and not variables and not hooks.entangled:
        raise CaptureError(f"the loss does not depend differentiably on layer {next(iter(reached))!r}")
    flattened = math.inf if evaluated.flattened is None else evaluated.flattened
    return ForwardPass(
        **vars(evaluated),
        calls=reached,
        parameters=parameters,
        bypassed=bypassed,
        entangled=hooks.entangled,
        differentiated=hooks.differentiated,
        overwritten=hooks.overwritten,
        repeating={name for name, count in hooks.functions.items() if flattened < count},
    )


class Perturbations:
    """Forward hooks that add a zero to every output of some layers and record their calls, as in `ForwardPass`."""

    def __init__(self, layers: Mapping[str, kinds.Layer], in_parameters: Set[str], keep_inputs: bool) -> None:
        self.layers, self.keep_inputs = layers, keep_inputs
        self.complex = {name for name, layer in layers.items() if any(p.is_complex() for p in layer.parameters())}
        self.in_parameters = in_parameters - self.complex

    def weights(self, copies: Mapping[int, torch.Tensor]) -> dict[int, str]:
        """Layer of each weight and bias, by the ids of the originals and of the copies."""
        owners = {id(p): name for name, layer in self.layers.items() for p in own_parameters(layer)}
        return owners | {id(copies[number]): name for number, name in owners.items()}

    @contextmanager
    def attached(self, watch: evaluation.WeightWatch) -> Iterator[None]:
        """Context in which the hooks are attached to the layers, with nothing recorded yet."""
        self.watch = watch
        self.unfit = dict.fromkeys(self.complex, COMPLEX)
        self.calls: dict[str, list[Call]] = {name: [] for name in self.layers}
        self.entangled: set[str] = set()
        self.differentiated: set[str] = set()
        self.functions: dict[str, int] = {}
        self._entered: set[str] = set()
        self._versions: list[tuple[torch.Tensor, int]] = []
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                if name not in self.unfit:
                    stack.callback(layer.register_forward_pre_hook(partial(self._enter, name)).remove)
                    leave = partial(self._leave, name)
                    stack.callback(layer.register_forward_hook(leave, with_kwargs=True, prepend=True).remove)
            yield

    def _enter(self, name: str, *_: Any) -> None:
        self.watch.inside.append(name)
        self._entered.add(name)
        self.functions[name] = len(self.watch.flat)

    def _leave(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor | None:
        h: Any = args[0] if args else kwargs.get("input")
        if name in self.in_parameters:
            # a layer that is differentiated in its parameters may have any inputs and outputs
            if not graph.is_transformed(h) and gives_what_torch_would(module, h, output):
                self.calls[name].append(Call(strided(h.detach()).clone(), torch.zeros_like(output), None))
            self.watch.inside.remove(name)
            return None
        self.watch.inside.remove(name)
        if not torch.is_grad_enabled():
            self.unfit[name] = WITHOUT_GRADIENT
            return None
        if graph.is_transformed(h) or graph.is_transformed(output):
            # tensors inside torch.vmap or torch.func do not exist outside
            self.entangled.add(name)
            return None
        inputs = strided(h.detach().clone() if self.keep_inputs else h.detach())
        self._versions.append((inputs, inputs._version))
        earlier = {get_gradient_edge(call.delta).node for call in self.calls[name]}
        if earlier and h.grad_fn in graph.dependent([h.grad_fn], earlier):
            self.entangled.add(name)
        delta = torch.zeros_like(output, requires_grad=True)
        perturbed = output + delta
        self.calls[name].append(Call(inputs, delta, perturbed.grad_fn))
        return perturbed

    @property
    def overwritten(self) -> bool:
        """Whether an input was changed in place after its call."""
        return any(inputs._version != version for inputs, version in self._versions)

    def look_outside(self) -> None:
        """Note the layers whose parameters were used outside of them, or in a derivative that the model takes."""
        self.entangled |= {self.watch.weights[number] for number in self.watch.used_outside}
        for outputs, inputs in self.watch.derivatives:
            within = graph.dependent([o.grad_fn for o in outputs], {get_gradient_edge(i).node for i in inputs})
            self.differentiated |= {name for name, uses in self.calls.items() if within & {call.node for call in uses}}
        self.differentiated -= self.entangled
        self.entangled |= self.differentiated
        self.entangled -= self.in_parameters | self.complex

    def bypassed(self, depended_on: Set[str]) -> dict[str, str]:
        """Layers that were not used, with the reason; the loss depends on the parameters of ``depended_on``."""
        kept = self.entangled | depended_on
        return {
            name: self.unfit.get(name, UNREACHED)
            for name, calls in self.calls.items()
            if not calls and (name not in self._entered or name in self.unfit) and name not in kept
        }


def variables_of(loss: torch.Tensor) -> set[int]:
    """Ids of the leaves that a loss depends on differentiably."""
    leaves = (getattr(node, "variable", None) for node in graph.nodes([loss.grad_fn]))
    return {id(leaf) for leaf in leaves if leaf is not None}


@torch.no_grad()
def gives_what_torch_would(layer: nn.Module, h: Any, output: Any) -> bool:
    """Whether a layer with a custom forward pass has inputs and outputs of the shapes that torch's class has."""
    layer_class: Any = kinds.class_of(layer)
    if not isinstance(h, torch.Tensor) or not isinstance(output, torch.Tensor):
        return False
    try:
        return bool(layer_class.forward(layer, h).shape == output.shape)
    except RuntimeError:
        return False

"""One pass over the stacked weights of several networks alike, and whether it gives what separate passes give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call, stack_module_state, vmap

from hesscond.data import Dataset
from hesscond.methods import Method, parse
from hesscond.methods.composed import Composed
from hesscond.study.runner import LOSSES, RunPlan, build_model

Tensors = dict[str, torch.Tensor]
#: (parameters, buffers, inputs, targets), all stacked, to (n,) losses and the gradients in the parameters.
JointPass = Callable[
    [Tensors, Tensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]
]

#: What a method may do in a step that is not known to be the same for stacked weights.
STEP = ("follow", "penalty", "transform_gradients", "after_step")
#: Their step of one weight depends on no other weight.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Samples on which a network is tried: in float64, twice over.
TRIED = 32
#: Largest difference between one pass over stacked weights and separate ones, in roundings of the largest entry.
ROUNDINGS = 2**12
#: In a recorded pass they do nothing where the shape stays as it is: rests of the rules for batches.
RESHAPING = (
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.detach.default,
)


def obstacle(plan: RunPlan, data: Dataset) -> str | None:
    """Why seeds of a plan cannot be trained together; None: they can.

    The method must be nothing but its network and an optimizer that treats every weight by itself, and the network must
    give the same under `torch.func.vmap`: it is tried on some samples of a mini-batch.
    """
    model = build_model(plan, data)
    method = parse(plan.method).create(model)
    for part in method.parts if isinstance(method, Composed) else [method]:
        for name in STEP:
            if getattr(type(part), name) is not getattr(Method, name):
                return f"{part.name} takes part in every step ({name})"
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"something watches what passes through {name or 'the network'} ({type(module).__name__}: a hook)"
    training = plan.study.training
    kind = type(method.optimizer(plan.learning_rate, **training.optimizer_options))
    if kind not in ELEMENTWISE:
        return f"its optimizer {kind.__name__} is not known to treat every weight by itself"
    some = slice(min(training.batch_size, TRIED))
    inputs, targets = data.train_inputs[some], data.train_targets[some]
    if plan.study.model.architecture.kind == "vector":
        inputs = inputs.flatten(1)
    return difference(model, LOSSES[training.loss](), inputs, targets)


def difference(model: nn.Module, loss_fn: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> str | None:
    """Where a pass of a network and one of two stacked copies of it do not agree in float64; None: nowhere.

    Parameters
    ----------
    model
        It is not changed.
    loss_fn
        The mean loss, of a kind that has ``reduction``.
    inputs, targets
        A mini-batch (N, …), (N, …).
    """
    inputs, targets = inputs.double(), targets.double() if targets.is_floating_point() else targets
    alone = deepcopy(model).double()
    copies = [deepcopy(alone), deepcopy(alone)]
    parameters, buffers = stacked_state(copies)
    both = torch.stack([inputs, inputs]), torch.stack([targets, targets])
    before = own_attributes(copies[0])
    try:
        joint = recorded_pass(copies[0], loss_fn, parameters, buffers, *both)
        with torch.no_grad():
            losses, gradients = joint(parameters, buffers, *both)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "random operation" in reason:
            return "its network draws random numbers in training (dropout, sampling)"
        return f"its network does not run on stacked weights ({reason})"
    for place, value in own_attributes(copies[0]).items():
        if place not in before or before[place] is not value:
            # what was recorded would have the value of the first pass for ever
            return f"a module of its network keeps what is no buffer between passes ({' '.join(place)})"
    loss = loss_fn(alone(inputs), targets)
    trained = [p for p in alone.parameters() if p.requires_grad]
    own = torch.autograd.grad(loss, trained, allow_unused=True)
    used = [(found, wanted) for found, wanted in zip(gradients, own, strict=True) if found is not None]
    if any((found is None) != (wanted is None) for found, wanted in zip(gradients, own, strict=True)):
        return "another part of its network is used in a pass over stacked weights"
    # all at once: single gradients can be nothing but rounding
    flat = torch.cat([found.flatten(1) for found, _ in used], 1), torch.cat([wanted.flatten() for _, wanted in used])
    pairs = [("the loss", losses, loss), ("the gradient", *flat)]
    pairs += [(f"the buffer {name}", buffers[name], buffer) for name, buffer in alone.named_buffers()]
    for what, found, wanted in pairs:
        if not close(found, wanted):
            return f"{what} is another in a pass over stacked weights"
    return None


def own_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules have in attributes, by module and name."""
    return {(place, name): value for place, module in model.named_modules() for name, value in vars(module).items()}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all of a stack (n, …) are the same (…) up to rounding."""
    if not wanted.is_floating_point():
        return bool((found == wanted).all())
    room = ROUNDINGS * torch.finfo(wanted.dtype).eps * wanted.detach().abs().amax() if wanted.numel() else 0.0
    return bool(((found - wanted).abs() <= room).all())


def stacked_state(models: Sequence[nn.Module]) -> tuple[Tensors, Tensors]:
    """Parameters and buffers of networks alike, stacked; those of each network become views into them."""
    parameters, buffers = stack_module_state(list(models))
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            parameter.data = parameters[name].detach()[number]
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name][number]
    return parameters, buffers


def recorded_pass(
    model: nn.Module,
    loss_fn: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> JointPass:
    """The pass of stacked networks and its gradients as a list of operations: to go through `vmap` once is enough.

    Buffers are changed in place. Going through `vmap` and autograd in every iteration takes about half as long again.

    Parameters
    ----------
    model
        The network; its own weights are not used.
    loss_fn
        The mean loss of one mini-batch: of a kind that has ``reduction``.
    parameters, buffers, inputs, targets
        Stacked (n, …); only shapes matter here, and nothing is changed.
    """
    # slow to import: sympy
    from torch.fx.experimental.proxy_tensor import make_fx

    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]

    loss_of_each = type(loss_fn)(reduction="none")

    def network(p: Tensors, b: Tensors, x: torch.Tensor) -> torch.Tensor:
        state = {**p, **b}
        output: torch.Tensor = functional_call(model, state, (x,))
        # `functional_call` gives back what a module put in the place of a buffer, which would be lost
        if any(state[name] is not b[name] for name in b):
            raise RuntimeError("a module replaces a buffer instead of changing it")
        return output

    def joint(p: Tensors, b: Tensors, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        outputs = vmap(network, randomness="error")(p, b, x)
        # outside of vmap, whose rules for the cross-entropy take a third of the operations of a small network
        losses = loss_of_each(outputs.flatten(0, 1), y.flatten(0, 1)).view(len(x), -1).mean(1)
        # no seed's loss depends on another seed's weights
        gradients = torch.autograd.grad(losses.sum(), [p[name] for name in trained], allow_unused=True)
        return losses.detach(), gradients

    trial = {name: buffer.clone() for name, buffer in buffers.items()}
    with warnings.catch_warnings():
        # operations that vmap does one by one are slower here, not wrong
        warnings.filterwarnings("ignore", "There is a performance drop")
        recorded = make_fx(joint)(dict(parameters), trial, inputs, targets)
    simplify(recorded.graph)
    # the operations alone: taking nested arguments apart in every iteration costs as much as some of them
    recorded.graph.set_codegen(fx.graph.CodeGen())
    recorded.recompile()

    def replayed(p: Tensors, b: Tensors, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        losses, *gradients = recorded.forward(*p.values(), *b.values(), x, y)
        return losses, tuple(gradients)

    return replayed


def simplify(graph: fx.Graph) -> None:
    """Take the rests of the rules for batches out of a recorded pass: a quarter of the time of a small network.

    Reshaping to the same shape and factors 1 go; A + B C becomes one operation; (B C)ᵀ becomes Cᵀ Bᵀ, so that the
    gradients of weights lie in memory as the weights do.
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        arguments = node.args
        source = arguments[0] if arguments else None
        if not isinstance(source, fx.Node) or "val" not in node.meta or "val" not in source.meta:
            continue
        found: Any = None
        idle = node.target in RESHAPING and same_shape(source, node)
        if idle or (node.target is aten.mul.Scalar and arguments[1] == 1):
            found = source
        elif node.target is aten.transpose.int and source.target is aten.transpose.int:
            found = source.args[0] if arguments[1:] == source.args[1:] else None
        elif node.target is aten.transpose.int and product_used_once(source) and arguments[1:] == (1, 2):
            with graph.inserting_before(node):
                swapped = [transposed(graph, factor) for factor in reversed(source.args)]
                found = graph.call_function(aten.bmm.default, tuple(swapped))
        elif node.target is aten.add.Tensor and len(arguments) == 2 and not node.kwargs:
            product = arguments[1]
            if product_used_once(product) and same_shape(product, node):
                with graph.inserting_before(node):
                    found = graph.call_function(aten.baddbmm.default, (source, *product.args))
        if found is not None:
            found.meta.setdefault("val", node.meta["val"])
            node.replace_all_uses_with(found)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def product_used_once(node: Any) -> bool:
    """Whether a node is a product of stacked matrices that one other node takes."""
    return isinstance(node, fx.Node) and node.target is torch.ops.aten.bmm.default and len(node.users) == 1


def same_shape(one: fx.Node, other: fx.Node) -> bool:
    """Whether what two nodes give has the same shape."""
    return bool(one.meta["val"].shape == other.meta["val"].shape)


def transposed(graph: fx.Graph, factor: Any) -> fx.Node:
    """The transpose of a factor (n, a, b), without transposing twice."""
    transpose = torch.ops.aten.transpose.int
    if factor.target is transpose and factor.args[1:] == (1, 2):
        found: fx.Node = factor.args[0]
        return found
    node = graph.call_function(transpose, (factor, 1, 2))
    node.meta["val"] = factor.meta["val"].transpose(1, 2)
    return node

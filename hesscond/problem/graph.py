"""Proofs on the autograd graph: a piecewise linear tail, samples that do not influence each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch

from hesscond.errors import CaptureError, NoDerivativeError


def backward(operations: str, *numbers: int) -> set[str]:
    """Names of the nodes of some operations: ``AddBackward0`` for ``Add``, or those with other ``numbers``."""
    return {f"{operation}Backward{number}" for operation in operations.split() for number in numbers or (0,)}


#: Nodes that are linear in all their differentiable inputs together, or piecewise linear.
LINEAR = (
    backward(
        "Add Sub Neg T Transpose Permute View UnsafeView ReshapeAlias Alias Unsqueeze Expand Repeat Flip Roll Clone"
    )
    | backward("ToCopy Cat Stack Unbind Split SplitWithSizes Slice Select Index IndexSelect Gather MaskedFill Where")
    | backward("Cumsum AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D")
    | backward("MkldnnAdaptiveAvgPool2D MaxPool2DWithIndices MaxPool3DWithIndices ConstantPadNd PixelShuffle")
    | backward("ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D")
    | backward("PixelUnshuffle UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleBilinear2D Im2Col Col2Im")
    | backward("Unfold Tril Triu Diagonal Relu LeakyRelu Hardtanh Hardshrink Softshrink Hardsigmoid Threshold Abs")
    | backward("RreluWithNoise Maximum Minimum Amax Amin ClampMin ClampMax")
    | backward("Sum Mean Max Min Clamp Squeeze", 0, 1)
    | {"torch::autograd::AccumulateGrad", "CopyBackwards", "SqueezeBackward2"}
)
#: Nodes that are linear in each input: piecewise linear if only one of the inputs is differentiable.
BILINEAR = backward("Mul Mm Bmm Mv Dot NativeDropout PreluKernel")
#: Nodes whose first input is divided, or normalized by constants.
BATCH_NORM = {"NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"}
#: Derivatives whose second derivative is wrong in torch 2.13; they occur in the graph of a loss that differentiates.
WRONG_THRICE = {
    "NativeLayerNormBackwardBackward0": "layer",
    "NativeBatchNormBackwardBackward0": "batch",
    "CudnnBatchNormBackwardBackward0": "batch",
    "MiopenBatchNormBackwardBackward0": "batch",
}


Inputs = list[tuple[Any, int]]


def nodes(start: Iterable[Any]) -> Iterator[Any]:
    """Yield every node reached from ``start`` once."""
    seen: set[Any] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


@contextmanager
def differentiable(failure: str = "the model or the loss has no second derivatives in torch") -> Iterator[None]:
    """Record graphs, and turn torch's errors about missing derivatives into a NoDerivativeError."""
    try:
        with torch.enable_grad():
            yield
    except RuntimeError as error:
        if not re.search(r"derivative|differentiat|double backward|autograd formula", str(error), re.IGNORECASE):
            raise
        raise NoDerivativeError(f"{failure}: {str(error).splitlines()[0].rstrip('.')}") from error


def is_transformed(value: Any) -> bool:
    """Whether a value is a tensor that only exists within a transformation of `torch.func`, as `torch.vmap`."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def refuse_dead_ends(start: Iterable[Any]) -> None:
    """Raise a NoDerivativeError for a function whose backward is marked `once_differentiable`.

    Torch's error node for it is not on the path to any leaf and would never be run: the derivative would silently lack
    the contribution through the function.
    """
    if any(node.name() == "torch::autograd::Error" for node in nodes(start)):
        raise NoDerivativeError(
            "the model or the loss has no second derivatives in torch: it uses an autograd.Function whose backward is "
            "marked once_differentiable"
        )


def refuse_wrong_derivatives(start: Iterable[Any]) -> None:
    """Raise a CaptureError if the second derivatives of a graph would be silently wrong."""
    for node in nodes(start):
        # with fixed statistics, batch normalization is linear
        if node.name() in WRONG_THRICE and getattr(node, "_saved_train", True):
            kind = WRONG_THRICE[node.name()]
            raise CaptureError(
                f"the model or the loss takes a derivative through {kind} normalization, whose third derivatives are "
                "wrong in torch: normalize in plain operations, (x - x.mean()) / x.var().sqrt(), or by group norm"
            )


def refuse_originals(loss: torch.Tensor, model: torch.nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Raise a CaptureError if the graph of a loss reaches a parameter of the model, or one made anew from a copy."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    leaves = [node.variable for node in nodes([loss.grad_fn]) if hasattr(node, "variable")]
    parameters = [leaf for leaf in leaves if id(leaf) in names or type(leaf) is torch.nn.Parameter]
    places = {copy.data_ptr(): name for name, copy in copies.items() if parameters and copy.layout == torch.strided}
    for parameter in parameters:
        name = names.get(id(parameter)) or places.get(parameter.data_ptr())
        if name is not None and parameter is not copies.get(name):
            raise CaptureError(
                f"the model or the loss uses its parameter {name!r} through a reference or a view kept from before, or "
                "makes a parameter of it, where it is not differentiated: take it from its module in the forward pass"
            )


def dependent(start: Iterable[Any], leaves: Set[Any]) -> set[Any]:
    """Nodes between ``start`` and the leaves whose value depends on a leaf, and the leaves."""
    dependents = set(leaves)
    stack = [(node, False) for node in start]
    seen: set[Any] = set()
    while stack:
        node, children_done = stack.pop()
        if children_done:
            if any(parent in dependents for parent, _ in node.next_functions):
                dependents.add(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.next_functions)
    return dependents


def dominators(root: Any, within: Set[Any]) -> dict[Any, Any]:
    """Nearest dominator of each node ``within`` except the root: all paths from the root to the node go through it."""
    order: list[Any] = []
    stack = [(root, False)]
    seen: set[Any] = set()
    above: dict[Any, list[Any]] = {}
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for parent, _ in node.next_functions:
                if parent in within:
                    above.setdefault(parent, []).append(node)
                    stack.append((parent, False))
    dominator: dict[Any, Any] = {}
    depth = {root: 0}
    for node in reversed(order[:-1]):
        nearest, *others = above[node]
        for other in others:
            while other is not nearest:
                if depth[other] > depth[nearest]:
                    other = dominator[other]
                else:
                    nearest = dominator[nearest]
        dominator[node], depth[node] = nearest, depth[nearest] + 1
    return dominator


def inputs_of(node: Any, within: Set[Any] | None) -> Inputs:
    """Inputs of a node, with (None, 0) for those that are not differentiable or not ``within``."""
    return [(p, i) if p is not None and (within is None or p in within) else (None, 0) for p, i in node.next_functions]


def is_piecewise_linear(start: Iterable[Any], within: Set[Any] | None = None, known: Set[Any] = frozenset()) -> bool:
    """Whether the results of the nodes ``start`` are piecewise linear in all their differentiable leaves together.

    Only the nodes ``within`` are taken to be variable (see `dependent`; None: all), and the nodes ``known`` to be
    linear; an unknown node means no.
    """
    return all(
        node in known or is_linear_node(node.name(), node, inputs_of(node, within))
        for node in nodes(start)
        if within is None or node in within
    )


def is_linear_node(name: str, node: Any, inputs: Inputs) -> bool:
    """Whether a node is known to be piecewise linear in all its differentiable inputs together."""
    if name == "AbsBackward0" and node._saved_self.is_complex():
        return False
    if name in LINEAR:
        return True
    variable = [parent is not None for parent, _ in inputs]
    if name == "DivBackward0":
        return not variable[1]
    if name in {"AddmmBackward0", "AddmvBackward0", "BaddbmmBackward0", "AddbmmBackward0"}:
        # bias + A B: only A and B multiply
        return not (variable[1] and variable[2])
    if name in {"ConvolutionBackward0", "LinearBackward0"}:
        # the bias in the third place is added
        return not (variable[0] and variable[1])
    if name in BATCH_NORM:
        return not node._saved_training and not any(variable[1:])
    return name in BILINEAR and sum(variable) <= 1


def consumers(start: Iterable[Any]) -> dict[Any, int]:
    """Number of inputs, of nodes reached from ``start``, that each node feeds."""
    count: dict[Any, int] = {}
    for node in nodes(start):
        for parent, _ in node.next_functions:
            if parent is not None:
                count[parent] = count.get(parent, 0) + 1
    return count


def users(start: Iterable[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """Nodes that take a result, and the position of the input, by node and index of the result."""
    uses: dict[Any, list[tuple[Any, int]]] = {}
    for node in nodes(start):
        for number, edge in enumerate(node.next_functions):
            uses.setdefault(edge, []).append((node, number))
    return uses


def shape_of(node: Any, number: int = 0) -> torch.Size:
    """Shape of a node's output; of a leaf, of the tensor itself."""
    variable = getattr(node, "variable", None)
    return torch.Size(node._input_metadata[number].shape) if variable is None else variable.shape


def dtype_of(node: Any, number: int = 0) -> torch.dtype:
    """Dtype of a node's output; of a leaf, of the tensor itself."""
    variable = getattr(node, "variable", None)
    dtype: torch.dtype = (node._input_metadata[number] if variable is None else variable).dtype
    return dtype


def dimension(value: int, ndim: int) -> int:
    """Saved dimension, counted from the front; negative ones are saved modulo 2**64."""
    return (value - 2**64 if value >= 2**63 else value) % max(ndim, 1)


def same_ndim(node: Any, inputs: Inputs) -> bool:
    """Whether no input is broadcast along rows."""
    ndim = len(shape_of(node))
    return all(parent is None or len(shape_of(parent, number)) == ndim for parent, number in inputs)


def first_operand(node: Any, inputs: Inputs) -> bool:
    """Whether only the left factor, whose rows are those of the result, is differentiable."""
    return all(parent is None for parent, _ in inputs[1:])


def not_over(*attributes: str, added: int = 0) -> Callable[[Any, Inputs], bool]:
    """Condition that no saved dimension is the input's first (the output has ``added`` more dimensions)."""

    def holds(node: Any, inputs: Inputs) -> bool:
        ndim = len(next(shape_of(parent, number) for parent, number in inputs if parent is not None)) + added
        for attribute in attributes:
            saved = getattr(node, attribute)
            saved = (saved,) if isinstance(saved, int) else saved
            # no saved dimensions mean all of them
            if not saved or any(dimension(d, ndim) == 0 for d in saved):
                return False
        return True

    return holds


ELEMENTWISE = (
    backward("Neg Clone ToCopy Alias Relu LeakyRelu Elu Tanh Sigmoid Gelu Silu Softplus Hardtanh Hardsigmoid", 0, 1)
    | backward("Hardswish Hardshrink Softshrink Threshold Abs Exp Log Log1P Expm1 Pow Sqrt Rsqrt Reciprocal", 0, 1)
    | backward("Sin Cos Erf Erfc Mish LogSigmoid Clamp ClampMin ClampMax NativeDropout MaskedFill", 0, 1)
)
PER_SAMPLE = (
    backward("View UnsafeView ReshapeAlias Expand MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D", 0, 1)
    | backward("AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D MkldnnAdaptiveAvgPool2D ConstantPadNd", 0, 1)
    | backward("ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D UpsampleNearest2D", 0, 1)
    | backward("UpsampleBilinear2D PixelShuffle", 0, 1)
)
#: Conditions under which a node keeps samples apart, if its output and inputs have a row for each sample.
KEEPS_ROWS: dict[str, Callable[[Any, Inputs], bool]] = {
    **dict.fromkeys({"torch::autograd::AccumulateGrad"} | ELEMENTWISE | PER_SAMPLE, lambda node, inputs: True),
    **dict.fromkeys(backward("Add Sub Mul Div Maximum Minimum"), same_ndim),
    **dict.fromkeys(backward("Mm Convolution Linear NativeLayerNorm NativeGroupNorm"), first_operand),
    "BmmBackward0": lambda node, inputs: True,
    # in bias + A B, only A may be differentiable
    "AddmmBackward0": lambda node, inputs: inputs[0][0] is None and inputs[2][0] is None,
    "TransposeBackward0": not_over("_saved_dim0", "_saved_dim1"),
    "PermuteBackward0": lambda node, inputs: dimension(node._saved_dims[0], len(node._saved_dims)) == 0,
    "UnsqueezeBackward0": not_over("_saved_dim", added=1),
    **dict.fromkeys(backward("Amax Slice Select Softmax LogSoftmax Cat"), not_over("_saved_dim")),
    **dict.fromkeys(backward("Squeeze Sum Mean", 1), not_over("_saved_dim")),
    **dict.fromkeys(BATCH_NORM, lambda node, inputs: not node._saved_training and first_operand(node, inputs)),
}


def keeps_rows(start: Iterable[Any], samples: int, within: Set[Any] | None = None) -> bool:
    """Whether the graph proves that sample j of the results of ``start`` depends only on sample j of the leaves."""
    for node in nodes(start):
        if within is not None and node not in within:
            continue
        known = KEEPS_ROWS.get(node.name())
        if known is None:
            return False
        shape = shape_of(node)
        if not shape or shape[0] % samples or not known(node, inputs_of(node, within)):
            return False
    return True

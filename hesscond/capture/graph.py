"""Proofs on the autograd graph: a piecewise linear tail, samples that do not influence each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch

from hesscond.errors import CaptureError

#: Nodes that are linear in all their differentiable inputs together, or piecewise linear.
LINEAR = {
    "torch::autograd::AccumulateGrad",
    "AddBackward0",
    "SubBackward0",
    "NegBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "AliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "UnsqueezeBackward0",
    "ExpandBackward0",
    "RepeatBackward0",
    "FlipBackward0",
    "RollBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "CatBackward0",
    "StackBackward0",
    "UnbindBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SliceBackward0",
    "SelectBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "GatherBackward0",
    "MaskedFillBackward0",
    "WhereBackward0",
    "CopyBackwards",
    "SumBackward0",
    "SumBackward1",
    "MeanBackward0",
    "MeanBackward1",
    "CumsumBackward0",
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "AdaptiveAvgPool2DBackward0",
    "AdaptiveAvgPool3DBackward0",
    "AdaptiveMaxPool2DBackward0",
    "AdaptiveMaxPool3DBackward0",
    "MkldnnAdaptiveAvgPool2DBackward0",
    "ConstantPadNdBackward0",
    "ReflectionPad1DBackward0",
    "ReflectionPad2DBackward0",
    "ReflectionPad3DBackward0",
    "ReplicationPad1DBackward0",
    "ReplicationPad2DBackward0",
    "ReplicationPad3DBackward0",
    "PixelShuffleBackward0",
    "PixelUnshuffleBackward0",
    "UpsampleNearest1DBackward0",
    "UpsampleNearest2DBackward0",
    "UpsampleNearest3DBackward0",
    "UpsampleBilinear2DBackward0",
    "Im2ColBackward0",
    "Col2ImBackward0",
    "UnfoldBackward0",
    "TrilBackward0",
    "TriuBackward0",
    "DiagonalBackward0",
    "ReluBackward0",
    "LeakyReluBackward0",
    "HardtanhBackward0",
    "HardshrinkBackward0",
    "SoftshrinkBackward0",
    "HardsigmoidBackward0",
    "ThresholdBackward0",
    "RreluWithNoiseBackward0",
    "AbsBackward0",
    "MaximumBackward0",
    "MinimumBackward0",
    "MaxBackward0",
    "MaxBackward1",
    "MinBackward0",
    "MinBackward1",
    "AmaxBackward0",
    "AminBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
    "ClampBackward0",
    "ClampBackward1",
    "ClampMinBackward0",
    "ClampMaxBackward0",
}
#: Nodes that are linear in each input: piecewise linear if only one of the inputs is differentiable.
BILINEAR = {
    "MulBackward0",
    "MmBackward0",
    "BmmBackward0",
    "MvBackward0",
    "DotBackward0",
    "NativeDropoutBackward0",
    "PreluKernelBackward0",
}
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


def is_transformed(value: Any) -> bool:
    """Whether a value is a tensor that only exists within a transformation of `torch.func`, as `torch.vmap`."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def refuse_dead_ends(start: Iterable[Any]) -> None:
    """Raise a CaptureError for a function whose backward is marked `once_differentiable`.

    Torch's error node for it is not on the path to any leaf and would never be run: the derivative would silently lack
    the contribution through the function.
    """
    if any(node.name() == "torch::autograd::Error" for node in nodes(start)):
        raise CaptureError(
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


def refuse_originals(loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Raise a CaptureError if the graph of a loss reaches a parameter of the model itself.

    The model was run on copies of its parameters, and only these are differentiated in.
    """
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for node in nodes([loss.grad_fn]):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in own:
            raise CaptureError(
                f"the model or the loss uses its parameter {own[id(variable)]!r} through a reference or a view kept "
                "from before, where it is not differentiated: take the parameter from its module in the forward pass"
            )


def dependent(start: Iterable[Any], leaves: Set[Any]) -> set[Any]:
    """Nodes between ``start`` and the leaves whose value depends on a leaf, and the leaves."""
    found = set(leaves)
    stack = [(node, False) for node in start]
    seen: set[Any] = set()
    while stack:
        node, children_done = stack.pop()
        if children_done:
            if any(parent in found for parent, _ in node.next_functions):
                found.add(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.next_functions)
    return found


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
    found: dict[Any, Any] = {}
    depth = {root: 0}
    for node in reversed(order[:-1]):
        nearest, *others = above[node]
        for other in others:
            while other is not nearest:
                if depth[other] > depth[nearest]:
                    other = found[other]
                else:
                    nearest = found[nearest]
        found[node], depth[node] = nearest, depth[nearest] + 1
    return found


def inputs_of(node: Any, within: Set[Any] | None) -> Inputs:
    """Inputs of a node, with (None, 0) for those that are not differentiable or not ``within``."""
    return [(p, i) if p is not None and (within is None or p in within) else (None, 0) for p, i in node.next_functions]


def is_piecewise_linear(start: Iterable[Any], within: Set[Any] | None = None, known: Set[Any] = frozenset()) -> bool:
    """Whether the results of the nodes ``start`` are piecewise linear in all their differentiable leaves together.

    Every node of the autograd graph must be of a known piecewise linear kind, and a product may have only one
    differentiable side. An unknown node means no. Only the nodes ``within`` are taken to be variable (see `dependent`;
    None: all), and the nodes ``known`` to be linear.
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


def keeps_all(node: Any, inputs: Inputs) -> bool:
    """Return True: the node keeps rows apart whatever its options are."""
    return True


def same_ndim(node: Any, inputs: Inputs) -> bool:
    """Whether no input is broadcast along rows."""
    own = len(shape_of(node))
    return all(parent is None or len(shape_of(parent, number)) == own for parent, number in inputs)


def first_operand(node: Any, inputs: Inputs) -> bool:
    """Whether only the left factor, whose rows are those of the result, is differentiable."""
    return all(parent is None for parent, _ in inputs[1:])


def second_operand(node: Any, inputs: Inputs) -> bool:
    """Whether, in bias + A B, only A is differentiable."""
    return inputs[0][0] is None and inputs[2][0] is None


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


def permutes_no_rows(node: Any, inputs: Inputs) -> bool:
    """Whether the first dimension stays first."""
    return dimension(node._saved_dims[0], len(node._saved_dims)) == 0


def normalizes_by_constants(node: Any, inputs: Inputs) -> bool:
    """Whether a node is batch normalization in evaluation mode, by constants."""
    return not node._saved_training and first_operand(node, inputs)


ELEMENTWISE = [
    "Neg",
    "Clone",
    "ToCopy",
    "Alias",
    "Relu",
    "LeakyRelu",
    "Elu",
    "Tanh",
    "Sigmoid",
    "Gelu",
    "Silu",
    "Softplus",
    "Hardtanh",
    "Hardsigmoid",
    "Hardswish",
    "Hardshrink",
    "Softshrink",
    "Threshold",
    "Abs",
    "Exp",
    "Log",
    "Log1P",
    "Expm1",
    "Pow",
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Sin",
    "Cos",
    "Erf",
    "Erfc",
    "Mish",
    "LogSigmoid",
    "Clamp",
    "ClampMin",
    "ClampMax",
    "NativeDropout",
    "MaskedFill",
]
PER_SAMPLE = [
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "MaxPool2DWithIndices",
    "MaxPool3DWithIndices",
    "AvgPool2D",
    "AvgPool3D",
    "AdaptiveAvgPool2D",
    "AdaptiveAvgPool3D",
    "AdaptiveMaxPool2D",
    "MkldnnAdaptiveAvgPool2D",
    "ConstantPadNd",
    "ReflectionPad1D",
    "ReflectionPad2D",
    "ReplicationPad1D",
    "ReplicationPad2D",
    "UpsampleNearest2D",
    "UpsampleBilinear2D",
    "PixelShuffle",
]
#: Conditions under which a node keeps samples apart, if its output and inputs have a row for each sample.
KEEPS_ROWS: dict[str, Callable[[Any, Inputs], bool]] = {
    "torch::autograd::AccumulateGrad": keeps_all,
    **{f"{name}Backward{i}": keeps_all for name in (*ELEMENTWISE, *PER_SAMPLE) for i in (0, 1)},
    **{f"{name}Backward0": same_ndim for name in ("Add", "Sub", "Mul", "Div", "Maximum", "Minimum")},
    **{f"{name}Backward0": first_operand for name in ("Mm", "Convolution", "NativeLayerNorm", "NativeGroupNorm")},
    "LinearBackward0": first_operand,
    "BmmBackward0": keeps_all,
    "AddmmBackward0": second_operand,
    "TransposeBackward0": not_over("_saved_dim0", "_saved_dim1"),
    "PermuteBackward0": permutes_no_rows,
    "UnsqueezeBackward0": not_over("_saved_dim", added=1),
    "SqueezeBackward1": not_over("_saved_dim"),
    "SumBackward1": not_over("_saved_dim"),
    "MeanBackward1": not_over("_saved_dim"),
    "AmaxBackward0": not_over("_saved_dim"),
    "SliceBackward0": not_over("_saved_dim"),
    "SelectBackward0": not_over("_saved_dim"),
    "SoftmaxBackward0": not_over("_saved_dim"),
    "LogSoftmaxBackward0": not_over("_saved_dim"),
    "CatBackward0": not_over("_saved_dim"),
    **dict.fromkeys(BATCH_NORM, normalizes_by_constants),
}


def keeps_rows(start: Iterable[Any], samples: int, within: Set[Any] | None = None) -> bool:
    """Whether the graph proves that sample j of the results of ``start`` depends only on sample j of the leaves.

    Every node must have equally many consecutive rows for each sample, and be known to keep rows apart. False does not
    prove the contrary. ``within`` is as in `is_piecewise_linear`.
    """
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

"""Whether what follows a layer is piecewise linear, proved on the autograd graph."""

from __future__ import annotations

import torch

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
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "ExpandBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "CatBackward0",
    "StackBackward0",
    "SliceBackward0",
    "SelectBackward0",
    "IndexBackward0",
    "SumBackward0",
    "SumBackward1",
    "MeanBackward0",
    "MeanBackward1",
    "AvgPool2DBackward0",
    "ReluBackward0",
    "LeakyReluBackward0",
    "HardtanhBackward0",
    "ThresholdBackward0",
    "AbsBackward0",
    "MaxPool2DWithIndicesBackward0",
    "ClampBackward1",
    "ClampMinBackward0",
    "ConstantPadNdBackward0",
}
#: Nodes that are linear in each input: piecewise linear if only one of the inputs is differentiable.
BILINEAR = {
    "MulBackward0",
    "MmBackward0",
    "AddmmBackward0",
    "BmmBackward0",
    "MvBackward0",
    "LinearBackward0",
    "ConvolutionBackward0",
    "NativeDropoutBackward0",
}


def is_piecewise_linear(output: torch.Tensor) -> bool:
    """Whether ``output`` is a piecewise linear function of all its differentiable leaves together.

    Every node of the autograd graph must be of a known piecewise linear kind, and a product may have one
    differentiable side only. An unknown node means no.
    """
    seen = set()
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = [parent for parent, _ in node.next_functions]
        name = node.name()
        if name == "DivBackward0":
            if inputs[1] is not None:
                return False
        elif name == "AddmmBackward0":
            # bias + A B: only A and B multiply
            if inputs[1] is not None and inputs[2] is not None:
                return False
        elif name in BILINEAR:
            if sum(parent is not None for parent in inputs) > 1:
                return False
        elif name not in LINEAR:
            return False
        stack.extend(inputs)
    return True

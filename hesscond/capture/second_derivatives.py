"""Second derivatives of the functions that losses apply to every entry of a tensor, without subtraction.

The module also finds where nonzero derivatives of a function vanish or lose all digits in double precision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hesscond import causes
from hesscond.problem.graph import backward, dimension, is_linear_node
from hesscond.problem.precision import HIDDEN, MASKED, SHIFTED


def saved(node: Any, name: str) -> torch.Tensor:
    """Tensor that a node keeps for its derivative, in float64; the real part of a complex one, which has no formula."""
    tensor: torch.Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach().real.to(torch.float64)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Signed root sign(x) √|x|: the signed root of a product is the product of the signed roots."""
    return x.sign() * x.abs().sqrt()


def logistic_root(x: torch.Tensor) -> torch.Tensor:
    """Root √(σ(x) σ(−x)) = e^{−|x|/2} / (1 + e^{−|x|})."""
    return (-0.5 * x.abs()).exp() / (1 + (-x.abs()).exp())


def distance(node: Any) -> torch.Tensor:
    """Distance |z − t| in the precision of the loss: only compared with the border of a quadratic part."""
    return (node._saved_self.detach() - node._saved_target.detach()).abs()


def squared_error(node: Any) -> torch.Tensor:
    """Signed root √2 for f = (z − t)², if no side is broadcast."""
    return torch.full_like(distance(node), math.sqrt(2.0), dtype=torch.float64)


def huber(node: Any) -> torch.Tensor:
    """Signed root for the Huber loss: 1 where f = (z − t)²/2, for |z − t| < δ, else 0."""
    return (distance(node) < node._saved_delta).to(torch.float64)


def smooth_l1(node: Any) -> torch.Tensor:
    """Signed root for the smooth L1 loss: 1/√β where f = (z − t)²/(2β), for |z − t| < β, else 0."""
    beta = node._saved_beta
    return (distance(node) < beta).to(torch.float64) / math.sqrt(beta or 1.0)


def power(node: Any) -> torch.Tensor:
    """Signed root of n (n − 1) z^{n−2} for f = z^n."""
    z, n = saved(node, "self"), float(node._saved_exponent)
    coefficient = math.copysign(math.sqrt(abs(n * (n - 1))), n * (n - 1))
    if coefficient == 0 or n == 2:
        return torch.full_like(z, coefficient)
    root = coefficient * z.abs().pow(0.5 * (n - 2))
    return torch.where(z < 0, -root, root) if n % 2 == 1 else root


def logistic_with_target(node: Any) -> torch.Tensor:
    """Signed root of v ((1 − t) + q t) σ(z) σ(−z) for f = BCE of σ(z) and t, weight v and weight q of positives."""
    z, target = saved(node, "self"), saved(node, "target")
    q = 1.0 if node._saved_pos_weight is None else saved(node, "pos_weight")
    v = 1.0 if node._saved_weight is None else saved(node, "weight")
    return square_root(v * ((1 - target) + q * target)) * logistic_root(z)


def binary_cross_entropy(node: Any) -> torch.Tensor:
    """Signed root of v (t/p² + (1 − t)/(1 − p)²) for f = −v (t log p + (1 − t) log(1 − p))."""
    p, target = saved(node, "self"), saved(node, "target")
    v = 1.0 if node._saved_weight is None else saved(node, "weight")
    # a term that the target switches off must not be 0/0
    positive = torch.where(target == 0, 0.0, target / p.square())
    negative = torch.where(target == 1, 0.0, (1 - target) / (1 - p).square())
    return square_root(v * (positive + negative))


def softplus(node: Any) -> torch.Tensor:
    """Signed root √(β σ(βz) σ(−βz)) for f = log(1 + e^{βz})/β; 0 from torch's threshold on, where f is linear."""
    beta = node._saved_beta
    x = beta * saved(node, "self")
    return torch.where(x < node._saved_threshold, square_root(x.new_tensor(beta)) * logistic_root(x), 0.0)


def soft_margin(node: Any) -> torch.Tensor:
    """Signed root |y| √(σ(yz) σ(−yz)) for f = log(1 + e^{−yz})."""
    y = saved(node, "target")
    return y.abs() * logistic_root(y * saved(node, "self"))


def exponential(node: Any) -> torch.Tensor:
    """Signed root √e^z for f = e^z; only e^z is saved, so that the curvature for z below −745 counts as zero."""
    return saved(node, "result").sqrt()


def logarithm(node: Any) -> torch.Tensor:
    """Signed root −1/|z| for f = log z."""
    return -1 / saved(node, "self").abs()


#: Nodes that are curved in either input, whichever is differentiable.
SYMMETRIC = {"MseLossBackward0", "HuberLossBackward0", "SmoothL1LossBackward0"}
#: sign(f'') √|f''| (float64, in the shape of z) of the nodes that apply a function f to every entry of z.
SECOND_DERIVATIVES: dict[str, Callable[[Any], torch.Tensor]] = {
    "MseLossBackward0": squared_error,
    "HuberLossBackward0": huber,
    "SmoothL1LossBackward0": smooth_l1,
    "PowBackward0": power,
    "BinaryCrossEntropyWithLogitsBackward0": logistic_with_target,
    "BinaryCrossEntropyBackward0": binary_cross_entropy,
    "SoftplusBackward0": softplus,
    "LogSigmoidBackward0": lambda node: -logistic_root(saved(node, "self")),
    "SoftMarginLossBackward0": soft_margin,
    "ExpBackward0": exponential,
    "LogBackward0": logarithm,
}

#: The root of e^−1400 underflows or has lost digits.
UNDERFLOW = 1400.0
#: Limits of x beyond which 1 − σ(x) and the like have no digits left, and e^−x and e^{−x²/2} vanish.
SATURATED, EXPONENT, GAUSSIAN = 36.0, 745.0, 38.0


def beyond(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Boolean mask of the entries below ``low`` or above ``high`` that do not stand for infinity."""
    return ((x < low) | (x > high)) & (x.abs() < MASKED)


def underflows(nodes: Iterable[Any]) -> bool:
    """Whether the curvature of a loss, formed from logarithms, underflows in one of these nodes."""
    for node in nodes:
        name = node.name()
        if name == "LogSoftmaxBackward0" and beyond(saved(node, "result"), -UNDERFLOW, 1.0).any():
            return True
        if name == "LogsumexpBackward0":
            logits = saved(node, "self")
            dims = [d % logits.ndim for d in node._saved_dim]
            if beyond(logits - logits.amax(dims, keepdim=True), -UNDERFLOW, 1.0).any():
                return True
        if name in LOGISTIC and beyond(saved(node, "self"), -UNDERFLOW, UNDERFLOW).any():
            return True
    return False


def saturates(nodes: Iterable[Any]) -> causes.Cause:
    """Cause that lists the nodes whose derivatives by autograd are zero, or differences without digits."""
    values: Counter[str] = Counter()
    units: Counter[str] = Counter()
    totals: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.name() in SATURATION:
            lost, name = SATURATION[node.name()](node), NAMES.get(node.name(), node.name().removesuffix("Backward0"))
            count = int(lost.sum())
            values[name] += count
            totals[name, "values"] += lost.numel()
            totals[name, "units"] += lost.shape[-1] if lost.ndim == 2 else 0
            units[name] += int(lost.any(0).sum()) if count and lost.ndim == 2 else 0
    clauses = []
    for name in +values:
        suffix = f", {units[name]:,} of {totals[name, 'units']:,} units" if units[name] else ""
        clauses.append(f"{name} at {values[name]:,} of {totals[name, 'values']:,} values{suffix}")
    return causes.saturated(", ".join(clauses)) if clauses else causes.NOTHING


def may_cancel(nodes: Iterable[Any]) -> bool:
    """Whether second derivatives through these nodes may be differences of larger numbers.

    For exponentials alone they are the values; with a logarithm or a quotient behind them they are p − p². Weights of
    volume rendering, T (1 − exp(−x)), are products of such values, and −1 of its `expm1` is exact at the depths it has.
    """
    curved = {
        node.name()
        for node in nodes
        if node.name() not in STEADY
        and not is_linear(node)
        and (node.name() not in BENT or float(BENT[node.name()](node).mean(0).amin()) < STRAIGHT)
    }
    return bool(curved) and curved not in ({"ExpBackward0"}, {"ExpBackward0", "Expm1Backward0"})


def is_linear(node: Any) -> bool:
    """Whether a node is piecewise linear whatever its inputs depend on."""
    return is_linear_node(node.name(), node, [(None, 0)] * 3)


def softmax_saturates(node: Any) -> torch.Tensor:
    """Boolean mask of the probabilities that are 0 or 1 by rounding."""
    p = saved(node, "result")
    visible = ~hidden(node).expand_as(p)
    alone = visible.sum(dimension(node._saved_dim, p.ndim), keepdim=True) == 1
    return ((p == 0) & visible) | ((p == 1) & ~alone)


def hidden(softmax: Any) -> torch.Tensor:
    """Boolean mask, broadcastable to the scores, of hidden scores: −∞, or filled or shifted by a mask."""
    mask = softmax.metadata.get(HIDDEN, torch.zeros((), dtype=torch.bool, device=softmax._saved_result.device))
    nodes = [softmax.next_functions[0][0]]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        name, before = node.name(), [edge for edge, _ in node.next_functions]
        mask = mask | node.metadata.get(HIDDEN, False)
        if name == "MaskedFillBackward0":
            mask = mask | node._saved_mask
        elif name == "WhereBackward0" and None in before[:2]:
            mask = mask | (node._saved_condition if before[0] is None else ~node._saved_condition)
        # these keep the place of an entry
        nodes += before if name in {"AddBackward0", "ToCopyBackward0"} else before[:1] if name == "SubBackward0" else []
    return mask


#: Curved nodes whose derivatives subtract nothing that is not a number of the graph.
ARITHMETIC = SYMMETRIC | backward("Add Sub Rsub Mul Div", 1)
ARITHMETIC |= backward("Rsub Div Pow Exp Log Sqrt Rsqrt Reciprocal Mul Mm Bmm Dot Addmm Convolution Linear Baddbmm")
ARITHMETIC |= backward("NativeLayerNorm NativeGroupNorm")
#: Curved nodes whose curvature is no difference, or whose cancellation is found from the loss.
STEADY = SYMMETRIC | backward("Add Sub Rsub Mul Div", 1)
STEADY |= backward("Pow Mul Mm Bmm Dot Addmm Convolution Linear Baddbmm Rsub NllLoss NllLoss2D LogSoftmax Logsumexp")
STEADY |= {"BinaryCrossEntropyWithLogitsBackward0"}
SOFTMAXES = {"SoftmaxBackward0", "SafeSoftmaxBackward0"}
#: Curvature of a function in each entry, at most about 1. A unit whose mean over the samples is below `STRAIGHT` is
#: saturated for nearly all of them, so that its second derivatives may be differences throughout.
BENT: dict[str, Callable[[Any], torch.Tensor]] = {
    "TanhBackward0": lambda node: 1 - saved(node, "result").square(),
    "SigmoidBackward0": lambda node: 4 * saved(node, "result") * (1 - saved(node, "result")),
    "SiluBackward0": lambda node: 2 * logistic_root(saved(node, "self")).square(),
    # the node of GELU as it is evaluated here
    "ErfcBackward0": lambda node: (-saved(node, "self").square()).exp(),
    "SoftplusBackward0": lambda node: 4 * logistic_root(saved(node, "self")).square(),
    **dict.fromkeys(SOFTMAXES, lambda node: 4 * saved(node, "result") * (1 - saved(node, "result"))),
}
STRAIGHT = 0.03
LOGISTIC = {"BinaryCrossEntropyWithLogitsBackward0", "LogSigmoidBackward0", "SoftMarginLossBackward0"}
#: Losses of a probability p, whose second derivative p − p² autograd forms from p rounded.
SATURATING = LOGISTIC | {"SoftplusBackward0"}
SATURATION: dict[str, Callable[[Any], torch.Tensor]] = {
    "TanhBackward0": lambda node: (
        beyond(torch.atanh(saved(node, "result").clamp(-1, 1)), -SATURATED / 2, SATURATED / 2)
        | (saved(node, "result").abs() == 1)
    ),
    "SigmoidBackward0": lambda node: (saved(node, "result") == 0) | (saved(node, "result") == 1),
    "SiluBackward0": lambda node: beyond(saved(node, "self"), -EXPONENT, SATURATED),
    "MishBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    # 1 + erf has no digits left below; the derivative of erf, e^{−x²}, has none beyond the other bound
    "ErfcBackward0": lambda node: beyond(saved(node, "self"), -GAUSSIAN / 2**0.5, GAUSSIAN / 2**0.5),
    "ErfBackward0": lambda node: beyond(saved(node, "self"), -GAUSSIAN / 2**0.5, GAUSSIAN / 2**0.5),
    "GeluBackward0": lambda node: beyond(saved(node, "self"), -6.0, GAUSSIAN),
    "EluBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, math.inf),
    "SoftplusBackward0": lambda node: beyond(saved(node, "self"), -EXPONENT, SATURATED),
    "LogSigmoidBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    **dict.fromkeys(SOFTMAXES, softmax_saturates),
    # log-probabilities further down belong to hidden classes
    "LogSoftmaxBackward0": lambda node: ((p := saved(node, "result")) == 0) | ((p < -EXPONENT) & (p > SHIFTED)),
    "ExpBackward0": lambda node: saved(node, "result") == 0,
}
#: Readable names of nodes.
NAMES = {"ErfcBackward0": "GELU"}

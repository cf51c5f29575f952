"""Second derivatives of the functions that losses apply to every entry of a tensor, without subtraction.

And where double precision holds nothing of the derivatives of a function any more, though they are not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hesscond.capture.graph import dimension


def saved(node: Any, name: str) -> torch.Tensor:
    """A tensor that a node keeps for its derivative, in float64."""
    tensor: torch.Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach().to(torch.float64)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """sign(x) √|x|, so that the signed root of a product is the product of the signed roots."""
    return x.sign() * x.abs().sqrt()


def logistic_root(x: torch.Tensor) -> torch.Tensor:
    """√(σ(x) σ(−x)) = e^{−|x|/2} / (1 + e^{−|x|})."""
    return (-0.5 * x.abs()).exp() / (1 + (-x.abs()).exp())


def distance(node: Any) -> torch.Tensor:
    """|z − t| as the loss saw it, in its own precision: only compared with the border of a quadratic part."""
    return (node._saved_self.detach() - node._saved_target.detach()).abs()


def squared_error(node: Any) -> torch.Tensor:
    """√2, if no side is broadcast: f = (z − t)²."""
    return torch.full_like(distance(node), math.sqrt(2.0), dtype=torch.float64)


def huber(node: Any) -> torch.Tensor:
    """1 where f is quadratic: f = (z − t)²/2 where |z − t| < δ."""
    return (distance(node) < node._saved_delta).to(torch.float64)


def smooth_l1(node: Any) -> torch.Tensor:
    """1/√β where f is quadratic: f = (z − t)²/(2β) where |z − t| < β."""
    beta = node._saved_beta
    return (distance(node) < beta).to(torch.float64) / math.sqrt(beta or 1.0)


def power(node: Any) -> torch.Tensor:
    """Signed root of n (n − 1) z^{n−2}: f = z^n."""
    z, n = saved(node, "self"), float(node._saved_exponent)
    coefficient = math.copysign(math.sqrt(abs(n * (n - 1))), n * (n - 1))
    if coefficient == 0 or n == 2:
        return torch.full_like(z, coefficient)
    root = coefficient * z.abs().pow(0.5 * (n - 2))
    return torch.where(z < 0, -root, root) if n % 2 == 1 else root


def logistic_with_target(node: Any) -> torch.Tensor:
    """Signed root of v ((1 − t) + q t) σ(z) σ(−z) with weight v and weight q of positives: f = BCE of σ(z) and t."""
    z, target = saved(node, "self"), saved(node, "target")
    q = 1.0 if node._saved_pos_weight is None else saved(node, "pos_weight")
    v = 1.0 if node._saved_weight is None else saved(node, "weight")
    return square_root(v * ((1 - target) + q * target)) * logistic_root(z)


def binary_cross_entropy(node: Any) -> torch.Tensor:
    """Signed root of v (t/p² + (1 − t)/(1 − p)²): f = −v (t log p + (1 − t) log(1 − p))."""
    p, target = saved(node, "self"), saved(node, "target")
    v = 1.0 if node._saved_weight is None else saved(node, "weight")
    # a term that the target switches off must not be 0/0
    positive = torch.where(target == 0, 0.0, target / p.square())
    negative = torch.where(target == 1, 0.0, (1 - target) / (1 - p).square())
    return square_root(v * (positive + negative))


def softplus(node: Any) -> torch.Tensor:
    """√(β σ(βz) σ(−βz)), and 0 from the threshold on, where torch's softplus is linear: f = log(1 + e^{βz})/β."""
    beta = node._saved_beta
    x = beta * saved(node, "self")
    return torch.where(x < node._saved_threshold, square_root(x.new_tensor(beta)) * logistic_root(x), 0.0)


def log_sigmoid(node: Any) -> torch.Tensor:
    """−√(σ(z) σ(−z)): f = log σ(z)."""
    return -logistic_root(saved(node, "self"))


def soft_margin(node: Any) -> torch.Tensor:
    """|y| √(σ(yz) σ(−yz)): f = log(1 + e^{−yz})."""
    y = saved(node, "target")
    return y.abs() * logistic_root(y * saved(node, "self"))


def exponential(node: Any) -> torch.Tensor:
    """√e^z: f = e^z. Only e^z is kept, so that z below −745 counts as none."""
    return saved(node, "result").sqrt()


def logarithm(node: Any) -> torch.Tensor:
    """−1/|z|: f = log z."""
    return -1 / saved(node, "self").abs()


#: Curved in either input, whichever is differentiable.
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
    "LogSigmoidBackward0": log_sigmoid,
    "SoftMarginLossBackward0": soft_margin,
    "ExpBackward0": exponential,
    "LogBackward0": logarithm,
}

#: Beyond e^−1400 the root of a number underflows or has lost digits; a logit beyond the second one stands for −inf.
UNDERFLOW, MASKED = 1400.0, 1e30
#: 1 − σ(x) and the like have no digits left for x beyond it, e^−x and e^{−x²/2} none for x beyond the others.
SATURATED, EXPONENT, GAUSSIAN = 36.0, 745.0, 38.0


def beyond(x: torch.Tensor, low: float, high: float) -> bool:
    """Whether an entry is below ``low`` or above ``high``, and not so far that it stands for infinity."""
    return bool((((x < low) | (x > high)) & (x.abs() < MASKED)).any())


def underflows(nodes: Iterable[Any]) -> bool:
    """Whether the curvature of a loss, formed from logarithms, underflows in one of these nodes."""
    for node in nodes:
        name = node.name()
        if name == "LogSoftmaxBackward0" and beyond(saved(node, "result"), -UNDERFLOW, 1.0):
            return True
        if name == "LogsumexpBackward0":
            logits = saved(node, "self")
            dims = [d % logits.ndim for d in node._saved_dim]
            if beyond(logits - logits.amax(dims, keepdim=True), -UNDERFLOW, 1.0):
                return True
        if name in LOGISTIC and beyond(saved(node, "self"), -UNDERFLOW, UNDERFLOW):
            return True
    return False


def saturates(nodes: Iterable[Any]) -> bool:
    """Whether a derivative of one of these nodes, as autograd computes it, is zero or a difference without digits."""
    return any(node.name() in SATURATION and SATURATION[node.name()](node) for node in nodes)


def softmax_saturates(node: Any) -> bool:
    """Whether a probability is 0 or 1 by rounding: not one that `torch.where` or ``masked_fill`` masked, nor one alone.

    Those are exact, and so are the zeros that their derivatives are.
    """
    p = saved(node, "result")
    (before, _), *_ = node.next_functions
    seen = torch.ones_like(p, dtype=torch.bool)
    if before.name() == "MaskedFillBackward0":
        seen = ~before._saved_mask.expand_as(p)
    elif before.name() == "WhereBackward0":
        (kept, _), (other, _) = before.next_functions
        condition = before._saved_condition.expand_as(p)
        seen = condition if other is None else ~condition if kept is None else seen
    alone = seen.sum(dimension(node._saved_dim, p.ndim), keepdim=True) == 1
    return bool((((p == 0) & seen) | ((p == 1) & ~alone)).any())


LOGISTIC = {"BinaryCrossEntropyWithLogitsBackward0", "LogSigmoidBackward0", "SoftMarginLossBackward0"}
SATURATION: dict[str, Callable[[Any], bool]] = {
    "TanhBackward0": lambda node: (
        beyond(torch.atanh(saved(node, "result").clamp(-1, 1)), -SATURATED / 2, SATURATED / 2)
        or bool((saved(node, "result").abs() == 1).any())
    ),
    "SigmoidBackward0": lambda node: bool(((saved(node, "result") == 0) | (saved(node, "result") == 1)).any()),
    "SiluBackward0": lambda node: beyond(saved(node, "self"), -EXPONENT, SATURATED),
    "MishBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    # 1 + erf has no digits left there; nor has the derivative of erf, e^{−x²}, beyond the other bound
    "ErfcBackward0": lambda node: beyond(saved(node, "self"), -GAUSSIAN / 2**0.5, GAUSSIAN / 2**0.5),
    "GeluBackward0": lambda node: beyond(saved(node, "self"), -6.0, GAUSSIAN),
    "EluBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, math.inf),
    "SoftplusBackward0": lambda node: beyond(saved(node, "self"), -EXPONENT, SATURATED),
    "LogSigmoidBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: beyond(saved(node, "self"), -SATURATED, SATURATED),
    "SoftmaxBackward0": softmax_saturates,
    "LogSoftmaxBackward0": lambda node: (
        bool((saved(node, "result") == 0).any()) or beyond(saved(node, "result"), -EXPONENT, 1.0)
    ),
    "ExpBackward0": lambda node: bool((saved(node, "result") == 0).any()),
}

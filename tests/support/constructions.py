"""Constructions of the kinds for which a wrong number was once printed as resolved, and controls beside them.

`KINDS` lists them. Each has a truth of its own: plain operations with a right double backward, exact arithmetic in
mpmath, or reasoning (a block of the Hessian that is exactly zero). ``support/judging.py`` compares.
"""

import dataclasses
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from tests.support.judging import LEVELS, Construction, FormulaTruth, Spectrum, TwinTruth, Verdict, verdict_of
from tests.support.kinds import CE, MSE, Applied, classes, double, values

GROUPS = {
    "A1": "Second derivatives that are not those of the gradient",
    "A1k": "Kinks, steps and stops that the check must not refuse",
    "A2": "Hessians that are zero",
    "A2c": "Hessians that are small and not zero",
    "A3": "Losses whose curvature is a difference",
    "A4": "Features rounded to constants",
    "A5": "Optimizers that hold some layers",
    "A6": "Iterations",
    "A7": "Units of weights stored (in, out)",
}
KINDS: list[Construction] = []


def register_one(one):
    """Put a construction on the list; a wrong backward and a layer that no optimizer holds are to be refused."""
    KINDS.append(dataclasses.replace(one, refusal=one.refusal or (one.trust in ("A1", "A5") and not one.control)))


def construction(trust, title, layer="0", **facts):
    """Register a function that makes (model, loss_fn, batch)."""

    def register(make):
        register_one(Construction(trust, title, make, layer, **facts))
        return make

    return register


def add(trust, name, title, make, layer="0", **facts):
    """Register a construction of a family by a name."""
    make = functools.partial(make)
    make.__name__ = name
    register_one(Construction(trust, title, make, layer, **facts))


def twin_truth(make_twin=double, **facts):
    """The truth by double backward on ``make_twin(model)``."""
    return lambda model, loss_fn, batch: TwinTruth(make_twin(model), loss_fn, batch, **facts)


def with_functions(replacements, loss=None, **facts):
    """The truth of a model in which functions at `Applied` modules are replaced, and so may be the loss."""

    def truth(model, loss_fn, batch):
        twin = double(model)
        for name, function in replacements.items():
            twin.get_submodule(name).function = function
        return TwinTruth(twin, loss or loss_fn, batch, **facts)

    return truth


# ------------------------------------------------------------- A1: a backward that is cut, or keeps an intermediate


def pointwise(name, forward, kept, backward):
    """An autograd.Function whose backward takes what ``kept(x, y)`` made in the forward pass, without a graph."""

    def go(ctx, x):
        y = forward(x)
        ctx.kept = kept(x, y)
        return y

    def back(ctx, gradient):
        return backward(gradient, ctx.kept)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(go), "backward": staticmethod(back)})


#: name: (title, forward, kept, backward(gradient, kept), the same function by operations of torch).
STALE = {
    "stale_square": (
        "x², the input kept as it was",
        torch.square,
        lambda x, y: x.detach(),
        lambda g, k: 2 * k * g,
        torch.square,
    ),
    "stale_tanh": (
        "tanh, its output kept",
        torch.tanh,
        lambda x, y: y.detach(),
        lambda g, k: g * (1 - k * k),
        torch.tanh,
    ),
    "stale_exp": ("exp, its output kept", torch.exp, lambda x, y: y.detach(), lambda g, k: g * k, torch.exp),
    "stale_silu": (
        "SiLU, its sigmoid kept",
        F.silu,
        lambda x, y: torch.sigmoid(x.detach()) * (1 + x.detach() * (1 - torch.sigmoid(x.detach()))),
        lambda g, k: g * k,
        F.silu,
    ),
    "stale_numpy": (
        "sine, its cosine by numpy",
        torch.sin,
        lambda x, y: x.detach().cpu().numpy(),
        lambda g, k: g * torch.from_numpy(np.cos(k)),
        torch.sin,
    ),
    "stale_part": (
        "x + x²/1000, of which the square is stale",
        lambda x: x + 1e-3 * x**2,
        lambda x, y: x.detach(),
        lambda g, k: g * (1 + 2e-3 * k),
        lambda x: x + 1e-3 * x**2,
    ),
    "no_grad_backward": (
        "sine, its backward under no_grad",
        torch.sin,
        lambda x, y: x.detach(),
        torch.no_grad()(lambda g, k: g * k.cos()),
        torch.sin,
    ),
    "detached_gradient": (
        "softplus, its gradient detached",
        F.softplus,
        lambda x, y: x.detach(),
        lambda g, k: (g * k.sigmoid()).detach(),
        F.softplus,
    ),
    "stale_softmax": (
        "softmax, its output kept",
        lambda x: torch.softmax(x, -1),
        lambda x, y: y.detach(),
        lambda g, k: k * (g - (g * k).sum(-1, keepdim=True)),
        lambda x: torch.softmax(x, -1),
    ),
    "stale_one_sample": (
        "sine, stale at one sample",
        torch.sin,
        lambda x, y: x.detach(),
        lambda g, k: g * k.cos(),
        torch.sin,
    ),
}


def normalized(x):
    """Layer normalization without parameters."""
    return F.layer_norm(x, x.shape[-1:])


def fused_layer_norm(x):
    """The normalized rows and 1/σ are kept, as fused kernels do."""
    return FusedLayerNorm.apply(x)


class FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        ctx.rows, ctx.scale = (x - x.mean(-1, keepdim=True)) * scale, scale
        return ctx.rows

    @staticmethod
    def backward(ctx, g):
        rows = ctx.rows.detach()
        return ctx.scale.detach() * (g - g.mean(-1, keepdim=True) - rows * (g * rows).mean(-1, keepdim=True))


def root_mean_square(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class FusedRMSNorm(torch.autograd.Function):
    """Only 1/rms is kept; the input is saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()
        return x * ctx.scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return ctx.scale * g - ctx.scale**3 * x * (g * x).mean(-1, keepdim=True)


class FusedCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx, logits, target):
        p = logits.softmax(1)
        ctx.gradient = (p - F.one_hot(target, logits.shape[1])).detach() / len(logits)
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.gradient, None


class FusedSquares(torch.autograd.Function):
    """Mean square of a difference, its residual kept."""

    @staticmethod
    def forward(ctx, output, target):
        ctx.residual = (output - target).detach()
        return ctx.residual.square().mean()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.residual / ctx.residual.numel(), None


class DetachedProduct(torch.autograd.Function):
    """a·b, both factors kept without a graph: right in each alone, wrong in both together."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.factors = a.detach(), b.detach()
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.factors
        return g * b, g * a


class FusedLinearTanh(torch.autograd.Function):
    """tanh(xWᵀ): x and W are saved, the activation's output is kept."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.y = torch.tanh(x @ weight.T).detach()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        inner = g * (1 - ctx.y**2)
        return inner @ weight, inner.T @ x


class AdjointODE(torch.autograd.Function):
    """z' = tanh(zWᵀ) by Euler steps; backward runs the adjoint steps on detached states."""

    @staticmethod
    def forward(ctx, z, weight):
        states = [z]
        for _ in range(6):
            z = z + 0.2 * torch.tanh(z @ weight.T)
            states.append(z)
        ctx.states, ctx.weight = [s.detach() for s in states], weight.detach()
        return z

    @staticmethod
    def backward(ctx, g):
        own, total = g, 0
        for z in reversed(ctx.states[:-1]):
            slope = 0.2 * own * (1 - torch.tanh(z @ ctx.weight.T) ** 2)
            total = total + slope.T @ z
            own = own + slope @ ctx.weight
        return own, total


class Recomputed(torch.autograd.Function):
    """A hand-made checkpoint: the block is run again on a detached input, its gradient taken without a graph."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.x = block, x.detach()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            y = ctx.block(x)
        return None, torch.autograd.grad(y, x, g.detach())[0]


class FixedPoint(torch.autograd.Function):
    """z = tanh(zAᵀ/2 + x) by iteration; backward solves with the Jacobian at the detached solution."""

    @staticmethod
    def forward(ctx, x, A):
        z = torch.zeros_like(x)
        for _ in range(60):
            z = torch.tanh(0.3 * z @ A.T + x)
        ctx.z, ctx.A = z.detach(), A.detach()
        return z

    @staticmethod
    def backward(ctx, g):
        slope = 1 - ctx.z**2
        J = torch.eye(g.shape[1], dtype=g.dtype) - 0.3 * slope[:, :, None] * ctx.A
        inner = torch.linalg.solve(J.transpose(1, 2), g) * slope
        return inner, None


def fixed_point(x, A):
    """The same with steps of Newton's method, through which torch differentiates."""
    with torch.no_grad():
        z = FixedPoint.apply(x, A)
    for _ in range(2):
        f = torch.tanh(0.3 * z @ A.T + x)
        J = torch.eye(x.shape[1], dtype=x.dtype) - 0.3 * (1 - f**2)[:, :, None] * A
        z = z - torch.linalg.solve(J, z - f)
    return z


def middle(function, width=3):
    """A dense layer, a function of its outputs, another dense layer."""
    return nn.Sequential(nn.Linear(4, width), Applied(function), nn.Linear(width, 3))


for key, (title, forward, kept, backward, plain) in STALE.items():
    stale = pointwise(key, forward, kept, backward)
    if key == "stale_one_sample":

        def stale_once(x, stale=stale):
            return torch.cat([stale.apply(x[:1]), x[1:].sin()])
    else:
        stale_once = stale.apply
    add("A1", key, title, lambda f=stale_once: (middle(f), CE, classes()), truth=with_functions({"1": plain}))

for key, title, function, plain in [
    ("fused_layer_norm", "fused layer normalization", fused_layer_norm, normalized),
    ("fused_rms_norm", "fused RMS normalization, 1/rms kept", FusedRMSNorm.apply, root_mean_square),
]:
    add("A1", key, title, lambda f=function: (middle(f), CE, classes()), truth=with_functions({"1": plain}))


def fused_entropy(output, target):
    return FusedCrossEntropy.apply(output, target)


def fused_squares(output, target):
    return FusedSquares.apply(output, target)


@construction("A1", "fused cross-entropy", truth=with_functions({}, CE))
def fused_cross_entropy():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_entropy, classes()


@construction("A1", "fused cross-entropy, float64, one layer", truth=with_functions({}, CE))
def fused_cross_entropy_alone():
    x, y = classes()
    return nn.Sequential(nn.Linear(4, 3)).double(), fused_entropy, (x.double(), y)


@construction("A1", "fused squared error behind tanh", truth=with_functions({}, MSE))
def fused_squared_error():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_squares, values()


class TwoFactors(nn.Module):
    """The product of two layers."""

    def __init__(self, multiply):
        super().__init__()
        self.a, self.b, self.multiply = nn.Linear(4, 3), nn.Linear(4, 3), multiply

    def forward(self, x):
        return self.multiply(self.a(x), self.b(x))


def plain_product(model):
    twin = double(model)
    twin.multiply = torch.mul
    return twin


@construction(
    "A1", "a·b with both factors kept: wrong in both layers together only", "a", truth=twin_truth(plain_product)
)
def detached_product():
    return TwoFactors(DetachedProduct.apply), CE, classes()


class Weighted(nn.Module):
    """A function of inputs and a weight of its own, between two layers."""

    def __init__(self, function, square=True):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.first(x), self.weight))


def replaced(function):
    """Twin with another function."""

    def make(model):
        twin = double(model)
        twin.function = function
        return twin

    return make


def euler(z, weight):
    for _ in range(6):
        z = z + 0.2 * torch.tanh(z @ weight.T)
    return z


@construction(
    "A1", "fused linear layer and tanh", "first", truth=twin_truth(replaced(lambda x, w: torch.tanh(x @ w.T)))
)
def fused_linear_tanh():
    return Weighted(FusedLinearTanh.apply), CE, classes()


@construction("A1", "adjoint ODE solver, float64", "first", truth=twin_truth(replaced(euler)))
def adjoint_ode():
    x, y = classes()
    return Weighted(AdjointODE.apply).double(), CE, (x.double(), y)


def by_fixed_point(function):
    return lambda x, w: function(x, w.detach() / w.detach().norm())


@construction(
    "A1", "fixed point with an implicit backward", "first", truth=twin_truth(replaced(by_fixed_point(fixed_point)))
)
def implicit_backward():
    model = Weighted(by_fixed_point(FixedPoint.apply))
    model.weight.requires_grad_(False)
    return model, CE, classes()


BLOCK = nn.Sequential(nn.Softplus(), nn.Softmax(-1)).double()


@construction("A1", "checkpoint by hand that recomputes without a graph", truth=with_functions({"1": BLOCK}))
def recomputed_block():
    return middle(lambda x: Recomputed.apply(BLOCK, x)), CE, classes()


@construction("A1", "stale tanh deep in a network", "0", truth=with_functions({"3": torch.tanh}))
def stale_deep():
    stale = pointwise("stale", torch.tanh, lambda x, y: y.detach(), lambda g, k: g * (1 - k * k))
    layers = [
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        Applied(stale.apply),
        nn.Linear(4, 4),
        nn.SiLU(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers), CE, classes()


@construction("A1", "stale square in a convolutional network", "0", truth=with_functions({"1": torch.square}))
def stale_convolution():
    stale = pointwise("stale", torch.square, lambda x, y: x.detach(), lambda g, k: 2 * k * g)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), Applied(stale.apply), nn.Flatten(), nn.Linear(8, 3))
    return model, CE, (torch.randn(12, 1, 4, 4), torch.randint(0, 3, (12,)))


def scaled_loss(factor, loss):
    return lambda output, target: factor * loss(output, target)


for exponent in (-30, 30):
    stale = pointwise("stale", torch.square, lambda x, y: x.detach(), lambda g, k: 2 * k * g)
    add(
        "A1",
        f"stale_scaled_{exponent}",
        f"stale square, loss × 1e{exponent}",
        lambda f=stale.apply, e=exponent: (middle(f), scaled_loss(10.0**e, MSE), values()),
        truth=with_functions({"1": torch.square}),
    )


class Reversed(torch.autograd.Function):
    """Gradient reversal: the gradient itself is not that of the loss."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Clipped(Reversed):
    """The gradient is clipped on its way back: the Jacobian of the clipped gradient is not symmetric."""

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.02, 0.02)


class Tripled(Reversed):
    """A gradient that is wrong by a factor."""

    @staticmethod
    def backward(ctx, g):
        return 3 * g


# the derivative of −∇L is −H, and its κ is right; double backward turns the sign once more in one of two terms
for key, title, function in [
    ("gradient_reversal", "gradient reversal", Reversed.apply),
    ("gradient_tripled", "gradient × 3 inside", Tripled.apply),
]:
    add(
        "A1",
        key,
        title,
        lambda f=function: (middle(lambda x: f(torch.tanh(x))), CE, classes()),
        truth=with_functions({"1": torch.tanh}),
        signed=False,
    )


@construction("A1", "gradients clipped inside", truth=with_functions({"1": torch.tanh}), signed=False)
def gradient_clipped():
    return middle(lambda x: Clipped.apply(torch.tanh(x))), CE, classes()


class RoundedStraight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return (8 * w).round() / 8

    @staticmethod
    def backward(ctx, g):
        return g


class Quantized(nn.Linear):
    """Rounded weights, gradients straight through, by a Function."""

    straight = True

    def forward(self, x):
        w = self.weight
        rounded = RoundedStraight.apply(w) if self.straight else w + ((8 * w).round() / 8 - w).detach()
        return F.linear(x, rounded, self.bias)


def straight_by_detach(model):
    twin = double(model)
    twin[0].straight = False
    return twin


@construction("A1", "straight-through rounding by a Function", truth=twin_truth(straight_by_detach))
def straight_function():
    return nn.Sequential(Quantized(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


# --------------------------------------------------------------------------- A1k: what must not be refused

Q = 0.8


def quantile_loss(output, target):
    error = target - output
    return torch.maximum(Q * error, (Q - 1) * error).mean()


def hinge(output, target):
    sign = 2.0 * F.one_hot(target, output.shape[1]) - 1
    return (1 - sign * output).clamp(min=0).mean()


def squared_hinge(output, target):
    sign = 2.0 * F.one_hot(target, output.shape[1]) - 1
    return (1 - sign * output).clamp(min=0).square().mean()


def against_itself(output, target):
    """A target that is the model's own output, held fixed."""
    return (output - 0.9 * output.detach() - 0.1 * target).square().mean()


class GoodCube(torch.autograd.Function):
    """x³ with a right double backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def wide_relu():
    layers = []
    for _ in range(4):
        layers += [nn.Linear(12, 12), nn.ReLU()]
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), *layers, nn.Linear(12, 3))


def maxout(x):
    return x.view(len(x), 3, 2).amax(2)


def best_two(x):
    return torch.zeros_like(x).scatter(1, x.topk(2, 1).indices, x.topk(2, 1).values)


def medians(x):
    return torch.cat([x.median(1, keepdim=True).values, x[:, :1].sin(), x[:, 1:2]], 1)


#: (name, title, function, loss, data); the layer before is of width 6 for maxout.
KINKED = [
    ("relu", "ReLU", torch.relu, CE, classes),
    ("leaky_relu", "LeakyReLU", F.leaky_relu, CE, classes),
    ("absolute", "|x|", torch.abs, CE, classes),
    ("clamp", "clamp", lambda x: x.clamp(-0.4, 0.5), CE, classes),
    ("hardtanh", "hardtanh", F.hardtanh, CE, classes),
    ("relu6", "ReLU6", F.relu6, CE, classes),
    ("hardswish", "hardswish", F.hardswish, CE, classes),
    ("elu", "ELU (its second derivative jumps)", F.elu, CE, classes),
    ("sorted_features", "sort", lambda x: x.sort(1).values, CE, classes),
    ("top_k", "top-k", best_two, CE, classes),
    ("median", "median", medians, CE, classes),
    ("softshrink", "softshrink", lambda x: F.softshrink(x, 0.2), CE, classes),
    ("rounded_part", "x + round(4x)/4 held fixed", lambda x: x.tanh() + ((4 * x).round() / 4).detach(), CE, classes),
    ("sign_gate", "sign(x)·x²", lambda x: x.sign() * x**2, MSE, values),
    ("high_frequency", "sin(40x)", lambda x: (40 * x).sin(), MSE, values),
    ("steep", "exp(3x)", lambda x: (3 * x).exp(), MSE, values),
    ("good_function", "autograd.Function with a right double backward", GoodCube.apply, MSE, values),
    ("dropped", "dropout", lambda x: F.dropout(x.tanh(), 0.4), CE, classes),
    ("noise", "noise in the forward pass", lambda x: x.tanh() + 0.3 * torch.randn_like(x), CE, classes),
    ("stopped", "stop-gradient", lambda x: x.tanh() * x.detach().sigmoid(), CE, classes),
    ("normalized_stop", "division by a detached norm", lambda x: x / x.detach().norm(dim=1, keepdim=True), CE, classes),
    ("huber", "Huber loss", torch.tanh, nn.HuberLoss(delta=0.5), values),
    ("l1", "L1 loss", torch.tanh, nn.L1Loss(), values),
    ("smooth_l1", "smooth L1 loss", torch.tanh, nn.SmoothL1Loss(), values),
    ("quantile", "quantile loss", torch.sigmoid, quantile_loss, values),
    ("hinge", "hinge loss", torch.tanh, hinge, classes),
    ("squared_hinge", "squared hinge loss", torch.tanh, squared_hinge, classes),
    ("own_target", "target that is the output held fixed", torch.tanh, against_itself, values),
]


for key, title, function, loss, data in KINKED:
    add(
        "A1k",
        f"kink_{key}",
        title,
        lambda f=function, loss=loss, data=data: (middle(f), loss, data()),
        truth=twin_truth(),
        control=True,
    )


@construction("A1k", "maxout", truth=twin_truth(), control=True)
def kink_maxout():
    return nn.Sequential(nn.Linear(4, 6), Applied(maxout), nn.Linear(3, 3)), CE, classes()


@construction("A1k", "max pooling", truth=twin_truth(), control=True)
def kink_max_pooling():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    return model, CE, (torch.randn(14, 1, 5, 5), torch.randint(0, 3, (14,)))


@construction("A1k", "ReLU at exact zeros: integers in float32", truth=twin_truth(), control=True)
def kink_exact_zeros():
    model = middle(torch.relu)
    with torch.no_grad():
        for p in model[0].parameters():
            p.copy_(p.mul(4).round())
    return model, CE, (torch.randint(-2, 3, (20, 4)).float(), torch.randint(0, 3, (20,)))


@construction("A1k", "deep ReLU network, 200 samples", truth=twin_truth(), levels=("unit", "network"), control=True)
def kink_deep_relu():
    return wide_relu(), CE, classes(200, 6)


@construction("A1k", "bias of zeros and dead inputs behind ReLU", truth=twin_truth(), control=True)
def kink_dead_inputs():
    model = middle(torch.relu)
    nn.init.zeros_(model[0].bias)
    x, y = classes()
    x[::3] = 0
    return model, CE, (x, y)


@construction("A1k", "weights × 1e-6 behind ReLU", truth=twin_truth(), control=True)
def kink_small_weights():
    model = middle(torch.relu)
    with torch.no_grad():
        for p in model[0].parameters():
            p.mul_(1e-6)
    return model, CE, classes()


@construction("A1k", "inputs × 1e4 behind ReLU, squared error × 1e-30", truth=twin_truth(), control=True)
def kink_large_inputs():
    x, y = values()
    return middle(torch.relu), scaled_loss(1e-30, MSE), (1e4 * x, y)


@construction("A1k", "layer normalization and ReLU", "0", truth=twin_truth(), control=True)
def kink_norm_relu():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)), CE, classes()


@construction("A1k", "batch normalization, training mode, and |x|", "0", truth=twin_truth(), control=True)
def kink_batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Applied(torch.abs), nn.Linear(5, 3)), CE, classes()


NAMED = {"layers": ["rnn", "head"]}


@construction(
    "A1k", "recurrent network with ReLU", "rnn", truth=twin_truth(), levels=LEVELS[1:], options=NAMED, control=True
)
def kink_recurrent():
    from tests.support.kinds import Recurrent, tokens

    return Recurrent(functools.partial(nn.RNN, nonlinearity="relu")), CE, tokens(d=3)


# --------------------------------------------------------------------------------------------- A2: H = 0


class Net(nn.Module):
    """Parts by name, and a forward pass as a function of them and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def zero(name, title, net, loss, data, *, layers, others=(), **facts):
    """Register a construction in which the rows of these layers, and these parameters, are exactly zero."""
    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")] + list(others)

    def truth(model, loss_fn, batch):
        there = dict(model.named_parameters())
        return TwinTruth(double(model), loss_fn, batch, zero=[one for one in names if one in there])

    facts.setdefault("layer", layers[0] if layers else "0")
    add("A2", name, title, lambda: (net(), loss, data()), truth=truth, **facts)


def small_classes():
    return classes(14, 4, 3)


def shift(m, x):
    return m.net(x) + m.shift(x)


zero(
    "softmax_shift",
    "a layer that shifts all logits alike",
    lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    CE,
    small_classes,
    layers=["shift"],
)
zero(
    "softmax_shift_deep",
    "a hidden and an output layer that shift all logits alike",
    lambda: Net(
        lambda m, x: m.net(x) + m.out(m.hidden(x).tanh()),
        net=nn.Linear(4, 3),
        hidden=nn.Linear(4, 3),
        out=nn.Linear(3, 1),
    ),
    CE,
    small_classes,
    layers=["hidden", "out"],
)
zero(
    "softmax_shift_only",
    "nothing but a shift of all logits: a network whose Hessian is zero",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(4, 1)),
    CE,
    small_classes,
    layers=["shift"],
)
for exponent in (-30, 30):
    zero(
        f"softmax_shift_{exponent}",
        f"a layer that shifts all logits alike, loss × 1e{exponent}",
        lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
        scaled_loss(10.0**exponent, CE),
        small_classes,
        layers=["shift"],
    )
zero(
    "single_class",
    "cross-entropy of one class",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)),
    CE,
    lambda: classes(12, 4, 1),
    layers=["0", "2"],
)


def scale_free(m, x):
    return m.out(F.normalize(m.features(x).tanh() * m.scale(x.new_ones(1, 1)).exp(), dim=1))


zero(
    "normalized_scale",
    "scale before a normalization",
    lambda: Net(scale_free, features=nn.Linear(4, 3), scale=nn.Linear(1, 1), out=nn.Linear(3, 3)),
    CE,
    small_classes,
    layers=["scale"],
)
zero(
    "cosine_scale",
    "scale of one side of a cosine similarity",
    lambda: Net(
        lambda m, x: (
            3 * F.cosine_similarity(m.a(x)[:, None] * m.scale(x[:, :2]).exp()[:, :, None], m.b.weight[None], dim=2)
        ),
        a=nn.Linear(4, 3),
        b=nn.Linear(3, 3),
        scale=nn.Linear(2, 1),
    ),
    CE,
    small_classes,
    layers=["scale"],
)


def equal_values(m, x):
    tokens = m.value(x)[:, None].expand(-1, 4, -1)
    q, k = (
        m.query(x)[:, None] + torch.arange(4.0).to(x)[:, None],
        m.key(x)[:, None] * torch.linspace(1, 2, 4).to(x)[:, None],
    )
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ tokens).mean(1)


zero(
    "equal_values",
    "queries and keys over equal values",
    lambda: Net(equal_values, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3), out=nn.Linear(3, 3)),
    CE,
    small_classes,
    layers=["query", "key"],
)


def keys(m, x):
    q, k, v = m.query(x), m.key(x), m.value(x)
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ v).mean(1)


zero(
    "key_bias",
    "bias of the keys of an attention",
    lambda: Net(keys, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3), out=nn.Linear(3, 3)),
    CE,
    lambda: (torch.randn(10, 3, 4), torch.randint(0, 3, (10,))),
    layers=[],
    others=["key.bias"],
    layer="key bias",
    levels=("layer",),
    options={"blocks": {"key bias": ["key.bias"]}},
)
zero(
    "bias_before_batch_norm",
    "bias before batch normalization in training mode",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)),
    CE,
    small_classes,
    layers=[],
    others=["0.bias"],
    layer="bias",
    levels=("layer",),
    options={"blocks": {"bias": ["0.bias"]}},
)
zero(
    "constant_into_batch_norm",
    "layer on constants before batch normalization in training mode",
    lambda: Net(
        lambda m, x: m.out(m.norm(m.constant(torch.ones_like(x)) + m.own(x))),
        constant=nn.Linear(4, 3),
        own=nn.Linear(4, 3),
        norm=nn.BatchNorm1d(3),
        out=nn.Linear(3, 3),
    ),
    CE,
    small_classes,
    layers=["constant"],
)
zero(
    "shift_before_layer_norm",
    "a shift of all features before layer normalization",
    lambda: Net(
        lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))),
        own=nn.Linear(4, 3),
        shift=nn.Linear(4, 1),
        norm=nn.LayerNorm(3),
        out=nn.Linear(3, 3),
    ),
    CE,
    small_classes,
    layers=["shift"],
)
zero(
    "dueling_one_action",
    "dueling head with one action: its advantage",
    lambda: Net(
        lambda m, x: m.value(x) + m.advantage(x) - m.advantage(x).mean(1, keepdim=True),
        value=nn.Linear(4, 1),
        advantage=nn.Linear(4, 1),
    ),
    MSE,
    lambda: values(14, 4, 1),
    layers=["advantage"],
)


def dueling(m, x):
    h = m.trunk(x).tanh()
    advantage = m.advantage(h)
    return m.value(h) + advantage - advantage.mean(1, keepdim=True)


zero(
    "dueling_policy",
    "dueling head, its value behind a softmax policy",
    lambda: Net(dueling, trunk=nn.Linear(4, 3), advantage=nn.Linear(3, 3), value=nn.Linear(3, 1)),
    CE,
    small_classes,
    layers=["value"],
)
zero(
    "softmax_sum",
    "sum of a softmax",
    lambda: nn.Sequential(nn.Linear(4, 3)),
    lambda o, t: (o.softmax(1).sum(1) - 1.5).square().mean(),
    small_classes,
    layers=["0"],
)
zero(
    "sine_and_cosine",
    "sin² + cos²",
    lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.sin() ** 2 + o.cos() ** 2).mean(),
    small_classes,
    layers=["0"],
)
zero(
    "logarithm_of_exponential",
    "log(exp(z)) − 2z",
    lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.exp().log() - 2 * o).mean(),
    small_classes,
    layers=["0"],
)
zero(
    "softplus_difference",
    "softplus(z) − softplus(−z), which is z",
    lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (F.softplus(o) - F.softplus(-o)).mean(),
    small_classes,
    layers=["0"],
)
zero(
    "odd_pairs",
    "tanh(z) + tanh(−z) behind a hidden layer",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 2)),
    lambda o, t: (o.tanh() + (-o).tanh() + 0.1).mean(),
    small_classes,
    layers=["0", "2"],
)
zero(
    "ratio",
    "a ratio of equal quantities",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
    lambda o, t: (o / o.sum(1, keepdim=True)).sum(1).mean(),
    small_classes,
    layers=["0"],
)
zero(
    "linear_loss",
    "loss linear in the outputs",
    lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: o.mean(),
    small_classes,
    layers=["0"],
)
zero(
    "l1_output",
    "L1 loss of a linear model",
    lambda: nn.Sequential(nn.Linear(4, 3)),
    nn.L1Loss(),
    lambda: values(14, 4, 3),
    layers=["0"],
)


def opposed():
    """Every sample twice."""
    x, y = small_classes()
    return torch.cat([x, x]), torch.cat([y, y])


def opposed_loss(output, target):
    sign = torch.ones(len(output), dtype=output.dtype)
    sign[len(output) // 2 :] = -1
    return (sign * F.cross_entropy(output, target, reduction="none")).sum()


zero(
    "opposed_samples",
    "every sample twice, with weights +1 and −1",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
    opposed_loss,
    opposed,
    layers=["0", "2"],
)


def two_sources(output, target):
    """The same sum in two orders of operations."""
    p = output.log_softmax(1)
    return (output.logsumexp(1) - output[:, 0] + p[:, 0]).mean()


zero(
    "two_formulas",
    "a loss minus itself by another formula",
    lambda: nn.Sequential(nn.Linear(4, 3)),
    two_sources,
    small_classes,
    layers=["0"],
)
zero(
    "shift_float64_wide",
    "a layer that shifts 40 logits alike, features over six decades, float64",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x), net=nn.Linear(4, 40), shift=nn.Linear(4, 1)).double(),
    CE,
    lambda: (torch.randn(30, 4).double() * torch.tensor([1e-3, 1, 1e3, 1]).double(), torch.randint(0, 40, (30,))),
    layers=["shift"],
    levels=("unit", "layer"),
    options={"layers": ["shift"]},
)


class Stream(TwinTruth):
    """The truth of a stream: all of its batches at once."""

    def __init__(self, model, loss_fn, batches, **facts):
        inputs, targets = zip(*batches, strict=True)
        super().__init__(double(model), loss_fn, (torch.cat(inputs), torch.cat(targets)), **facts)


@construction(
    "A2",
    "a layer that shifts all logits alike, ragged stream",
    "shift",
    truth=lambda m, f, b: Stream(m, f, b, zero=["shift.weight", "shift.bias"]),
)
def softmax_shift_stream():
    x, y = classes(17)
    model = Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1))
    return model, CE, [(x[:6], y[:6]), (x[6:12], y[6:12]), (x[12:], y[12:])]


# --------------------------------------------------- A2, exactly: samples without curvature; small and nonzero


def formula_truth(formula, *, difference=False, terms=0.0):
    """The truth by ``formula(mp, parameters, rows)``, a difference of terms of this size, or of the size of x²."""

    def truth(model, loss_fn, batch):
        from mpmath import mp

        size = float(1 + batch[0].square().sum(1).mean()) if difference else terms
        return FormulaTruth(model, functools.partial(formula, mp), batch[0], size)

    return truth


def elementwise(title, name, trust, loss, exact, inputs, *, outputs=1, weight=None, **facts):
    """The construction of a linear model and a loss: the mean of ``loss(z)``, in mpmath of ``exact(mp, z)``."""

    def make():
        x = inputs().double()
        model = nn.Sequential(nn.Linear(x.shape[1], outputs)).double()
        if weight is not None:
            with torch.no_grad():
                model[0].weight.copy_(torch.tensor([weight] * outputs))
                model[0].bias.fill_(0.0)
        return model, lambda o, t: loss(o).mean(), (x, torch.zeros(len(x), outputs).double())

    def formula(mp, own, rows):
        z = rows @ own["0.weight"].T + own["0.bias"]
        return sum(exact(mp, one) for one in z.flat) / z.size

    make.__name__ = name
    return Construction(trust, title, make, "0", formula_truth(formula, difference=trust == "A3"), **facts)


def samples_without_curvature(curved):
    """The loss z²/2 of the first samples, and a function of no curvature, by a difference, of the others."""

    def loss(o):
        moved = o[curved:] + torch.tensor([0.0, 1.0, 2.5]).to(o)
        return torch.cat([o[:curved].square() / 2, moved.logsumexp(1, keepdim=True) - o[curved:]])

    return loss


def masked_formula(curved, small=0.0):
    def formula(mp, own, rows):
        z = (rows @ own["0.weight"].T + own["0.bias"])[:, 0]
        factors = [mp.mpf(1) if number < curved else mp.mpf(small) for number in range(len(z))]
        return sum(f * one**2 / 2 for f, one in zip(factors, z, strict=True)) / len(z)

    return formula


for curved, scale in [(3, 3), (3, 0), (2, 3), (1, 1), (0, 2)]:

    def curved_make(curved=curved, scale=scale):
        x = (torch.randn(14, 4) * torch.logspace(-scale, scale, 4)).double()
        loss = samples_without_curvature(curved)
        return nn.Sequential(nn.Linear(4, 1)).double(), lambda o, t: loss(o).mean(), (x, torch.zeros(14, 1).double())

    add(
        "A2",
        f"curved_{curved}_scale_{scale}",
        f"{14 - curved} of 14 samples without curvature, features over {2 * scale} decades"
        + ("" if curved else ", and an empty part of the loss"),
        curved_make,
        truth=formula_truth(masked_formula(curved)),
    )
for key, title, small in [
    ("small_e6", "curvature × 1e-6 at 11 of 14 samples", 1e-6),
    ("small_e12", "curvature × 1e-12 at 11 of 14 samples", 1e-12),
]:

    def small_make(small=small):
        x = torch.randn(14, 4).double()

        def loss(o, t):
            factors = torch.full_like(o, small)
            factors[:3] = 1
            return (factors * o.square() / 2).mean()

        return nn.Sequential(nn.Linear(4, 1)).double(), loss, (x, torch.zeros(14, 1).double())

    add("A2c", f"curvature_{key}", title, small_make, truth=formula_truth(masked_formula(3, small)), control=True)
for exponent in (-200, -30, 30):
    add(
        "A2c",
        f"scaled_{exponent}",
        f"loss × 1e{exponent}",
        lambda e=exponent: (
            nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
            scaled_loss(10.0**e, CE),
            classes(),
        ),
        truth=lambda m, f, b: ScaledTwin(m, b),
        control=True,
    )


class ScaledTwin(TwinTruth):
    """Of a loss times a number: κ is that of the loss."""

    def __init__(self, model, batch):
        super().__init__(double(model), CE, batch)


def nearly_shift(m, x):
    return m.net(x) + m.shift(x) * (1 + 1e-3 * torch.arange(3.0).to(x))


add(
    "A2c",
    "nearly_shift",
    "logits shifted alike to a thousandth",
    lambda: (
        Net(nearly_shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)).double(),
        CE,
        (torch.randn(14, 4).double(), torch.randint(0, 3, (14,))),
    ),
    layer="shift",
    truth=twin_truth(),
    control=True,
)


def batch_norm_formula(mp, own, rows):
    """One output, batch normalization with ε = 1e-3, sine."""
    z = (rows @ own["0.weight"].T)[:, 0]
    mean = sum(z) / len(z)
    variance = sum((one - mean) ** 2 for one in z) / len(z)
    scale = 1 / mp.sqrt(variance + mp.mpf(1e-3))
    return sum(mp.sin((one - mean) * scale + number) for number, one in enumerate(z)) / len(z)


def sine_loss(output, target):
    return (output + torch.arange(len(output)).to(output)[:, None]).sin().mean()


for inputs, title in [(1, "one weight before batch normalization with ε = 1e-3"), (3, "three weights before it")]:

    def norm_make(inputs=inputs):
        model = nn.Sequential(nn.Linear(inputs, 1, bias=False), nn.BatchNorm1d(1, eps=1e-3, affine=False)).double()
        return model, sine_loss, (torch.randn(9, inputs).double(), torch.zeros(9, 1).double())

    add("A2c", f"norm_epsilon_{inputs}", title, norm_make, truth=formula_truth(batch_norm_formula), control=True)
KINDS += [
    elementwise(
        "cross-entropy of one logit between 10 and 30",
        "confident",
        "A2c",
        F.softplus,
        lambda mp, z: mp.log1p(mp.exp(z)),
        lambda: -10 - 20 * torch.rand(12, 1),
        weight=[1.0],
        control=True,
    ),
    elementwise(
        "features × 1e-8",
        "tiny_features",
        "A2c",
        torch.square,
        lambda mp, z: z * z,
        lambda: 1e-8 * torch.randn(12, 3),
        control=True,
    ),
]


# ----------------------------------------------------------------- A3: losses whose curvature is a difference


def between(low, high, n=10, signs=False):
    """Inputs (n, 2) for which z = x₁ + x₂/1000 lies between these, of both signs if asked."""

    def inputs():
        x = torch.stack([torch.linspace(low, high, n), torch.randn(n)], 1)
        return torch.where(torch.arange(n)[:, None] % 2 == 0, x, -x) if signs else x

    return inputs


def mish(mp, z):
    return z * mp.tanh(mp.log1p(mp.exp(z)))


def linear_softplus(mp, z):
    """torch's softplus, which is linear above 20."""
    return mp.log1p(mp.exp(z)) if z <= 20 else z


#: name: (title, loss, the same in mpmath, its inputs).
DIFFERENCES = {
    "log_cosh": (
        "log(cosh z), |z| of 2 to 12",
        lambda z: z.cosh().log(),
        lambda mp, z: mp.log(mp.cosh(z)),
        (2, 12, 10, True),
    ),
    "log_cosh_far": (
        "log(cosh z), |z| of 20 to 35",
        lambda z: z.cosh().log(),
        lambda mp, z: mp.log(mp.cosh(z)),
        (20, 35, 10, True),
    ),
    "log_cosh_softplus": (
        "z + softplus(−2z) − log 2, z of 5 to 35",
        lambda z: z + F.softplus(-2 * z) - 0.6931471805599453,
        lambda mp, z: mp.log(mp.cosh(z)),
        (5, 35),
    ),
    "log_exp": (
        "log(1 + exp z), z of 5 to 34",
        lambda z: (1 + z.exp()).log(),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (5, 34),
    ),
    "log1p_exp": (
        "log1p(exp z), z of 20 to 35",
        lambda z: z.exp().log1p(),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (20, 35),
    ),
    "log1p_exp_left": (
        "log1p(exp z), z of −35 to −20",
        lambda z: z.exp().log1p(),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (-35, -20),
    ),
    "softplus": ("softplus, z of 8 to 20", F.softplus, linear_softplus, (8, 20)),
    "softplus_linear": (
        "softplus, z of 15 to 36: torch's is linear above 20",
        F.softplus,
        linear_softplus,
        (15, 36),
    ),
    "logsumexp": (
        "logsumexp(0, z), z of 15 to 36",
        lambda z: torch.stack([z, torch.zeros_like(z)]).logsumexp(0),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (15, 36),
    ),
    "logaddexp": (
        "logaddexp(0, z), z of 15 to 36",
        lambda z: torch.logaddexp(z, torch.zeros_like(z)),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (15, 36),
    ),
    "minus_log_sigmoid": (
        "−log σ(z), z of 15 to 36",
        lambda z: -z.sigmoid().log(),
        lambda mp, z: mp.log1p(mp.exp(-z)),
        (15, 36),
    ),
    "linex": ("exp z − 1 − z, z of −36 to −10", lambda z: z.exp() - 1 - z, lambda mp, z: mp.exp(z) - 1 - z, (-36, -10)),
    "mish_right": ("Mish as a loss, z of 8 to 25", F.mish, mish, (8, 25)),
    "mish_far": ("Mish as a loss, z of 20 to 35", F.mish, mish, (20, 35)),
    "silu_right": ("SiLU as a loss, z of 8 to 25", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (8, 25)),
    "silu_far": ("SiLU as a loss, z of 25 to 38", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (25, 38)),
    "silu_left": ("SiLU as a loss, z of −38 to −20", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (-38, -20)),
    "gelu_right": ("GELU as a loss, z of 3 to 9", F.gelu, lambda mp, z: z * mp.ncdf(z), (3, 9)),
    "pseudo_huber": (
        "√(1 + z²) − 1, |z| of 1e3 to 1e6",
        lambda z: (1 + z.square()).sqrt() - 1,
        lambda mp, z: mp.sqrt(1 + z * z) - 1,
        (1e3, 1e6, 10, True),
    ),
    "charbonnier": (
        "√(1e-12 + z²), |z| of 1e-3 to 10",
        lambda z: (1e-12 + z.square()).sqrt(),
        lambda mp, z: mp.sqrt(mp.mpf(1e-12) + z * z),
        (1e-3, 10, 10, True),
    ),
    "cauchy": (
        "log(1 + z²), |z| of 10 to 1e4",
        lambda z: z.square().log1p(),
        lambda mp, z: mp.log1p(z * z),
        (10, 1e4, 10, True),
    ),
    "tanh_loss": ("tanh as a loss, z of 8 to 18", torch.tanh, lambda mp, z: mp.tanh(z), (8, 18)),
    "tanh_far": ("tanh as a loss, z of 17 to 24", torch.tanh, lambda mp, z: mp.tanh(z), (17, 24)),
    "sigmoid_far": ("sigmoid as a loss, z of 30 to 45", torch.sigmoid, lambda mp, z: 1 / (1 + mp.exp(-z)), (30, 45)),
    "arctan": ("arctan, z of 1e3 to 1e6", torch.atan, lambda mp, z: mp.atan(z), (1e3, 1e6)),
    "arctan_error": (
        "z·arctan z − log(1 + z²)/2, |z| of 10 to 1e4",
        lambda z: z * z.atan() - z.square().log1p() / 2,
        lambda mp, z: z * mp.atan(z) - mp.log1p(z * z) / 2,
        (10, 1e4, 10, True),
    ),
    "softsign": (
        "|z| − log(1 + |z|), z of 1e3 to 1e7",
        lambda z: z.abs() - z.abs().log1p(),
        lambda mp, z: abs(z) - mp.log1p(abs(z)),
        (1e3, 1e7),
    ),
    "erf_loss": ("erf as a loss, z of 3 to 7", torch.erf, lambda mp, z: mp.erf(z), (3, 7)),
    "small_cosine": ("1 − cos z, z of 1e-9 to 1e-7", lambda z: 1 - z.cos(), lambda mp, z: 1 - mp.cos(z), (1e-9, 1e-7)),
    "quartic": (
        "exp(z²/2) − 1 − z²/2, z of 1e-4 to 1e-2",
        lambda z: (z.square() / 2).exp() - 1 - z.square() / 2,
        lambda mp, z: mp.exp(z * z / 2) - 1 - z * z / 2,
        (1e-4, 1e-2),
    ),
    "sinh_difference": (
        "sinh z − z, z of 1e-6 to 1e-3",
        lambda z: z.sinh() - z,
        lambda mp, z: mp.sinh(z) - z,
        (1e-6, 1e-3),
    ),
    "cosh_difference": (
        "cosh z − z²/2, z of 1e-6 to 1e-3",
        lambda z: z.cosh() - z.square() / 2,
        lambda mp, z: mp.cosh(z) - z * z / 2,
        (1e-6, 1e-3),
    ),
    "itakura_saito": (
        "exp(−z) + z − 1, z of 10 to 36",
        lambda z: (-z).exp() + z - 1,
        lambda mp, z: mp.exp(-z) + z - 1,
        (10, 36),
    ),
    "elu_left": ("ELU as a loss, z of −36 to −10", F.elu, lambda mp, z: mp.expm1(z), (-36, -10)),
    "squared_tanh": ("tanh², z of 5 to 18", lambda z: z.tanh().square(), lambda mp, z: mp.tanh(z) ** 2, (5, 18)),
    "one_minus_sigmoid": (
        "−log(1 − σ(z)), z of 5 to 30",
        lambda z: -(1 - z.sigmoid()).log(),
        lambda mp, z: mp.log1p(mp.exp(z)),
        (5, 30),
    ),
    "focal": (
        "focal loss (1 − p)² log p, z of 8 to 18",
        lambda z: -(1 - z.sigmoid()).square() * F.logsigmoid(z),
        lambda mp, z: mp.log1p(mp.exp(-z)) / (1 + mp.exp(z)) ** 2,
        (8, 18),
    ),
    "welsch": (
        "1 − exp(−z²/2), z of 0.999 to 1.001",
        lambda z: 1 - (-z.square() / 2).exp(),
        lambda mp, z: 1 - mp.exp(-z * z / 2),
        (0.999, 1.001),
    ),
    "inflection": (
        "sin z near its inflection, z of π − 1e-9 to π + 2e-9",
        torch.sin,
        lambda mp, z: mp.sin(z),
        (3.141592652589793, 3.141592655589793),
    ),
    "softplus_squared": (
        "z²/2 − z·softplus(z), z of 5 to 20",
        lambda z: z.square() / 2 - z * F.softplus(z) / 2,
        lambda mp, z: z * z / 2 - z * linear_softplus(mp, z) / 2,
        (5, 20),
    ),
}


def elementwise_of(key, where):
    """The construction of one of these losses with z in another range: (low, high, samples, both signs)."""
    title, loss, exact, _ = DIFFERENCES[key]
    return elementwise(title, f"loss_{key}", "A3", loss, exact, between(*where), weight=[1.0, 1e-3])


KINDS += [elementwise_of(key, where) for key, (_, _, _, where) in DIFFERENCES.items()]


# ----------------------------------------------------------------- A4: features rounded to constants


def rounded_features(name, title, function, exact, inputs, *, trust="A4", outputs=1, **facts):
    """Squared error of a linear model on frozen features ``function(x)``."""

    def make():
        x = inputs().double()
        model = nn.Sequential(Applied(function), nn.Linear(x.shape[1], outputs)).double()
        return model, MSE, (x, torch.zeros(len(x), outputs).double())

    def formula(mp, own, rows):

        features = np.vectorize(lambda value: exact(mp, value), otypes=[object])(rows)
        z = features @ own["1.weight"].T + own["1.bias"]
        return sum(one * one for one in z.flat) / z.size

    add(trust, name, title, make, "1", truth=formula_truth(formula), **facts)


def columns(*ranges, n=9):
    """Features of uniform random numbers in these ranges."""
    return lambda: torch.stack([low + (high - low) * torch.rand(n) for low, high in ranges], 1)


def sigmoid(mp, x):
    return 1 / (1 + mp.exp(-x))


FEATURES = {
    "tanh_one": ("tanh = 1 in one column", torch.tanh, lambda mp, x: mp.tanh(x), columns((-1, 1), (20, 50))),
    "tanh_two": (
        "tanh = ±1 in two columns",
        torch.tanh,
        lambda mp, x: mp.tanh(x),
        columns((20, 30), (-30, -20), (-1, 1)),
    ),
    "tanh_edge": ("tanh of 18 to 20", torch.tanh, lambda mp, x: mp.tanh(x), columns((18, 20), (-1, 1))),
    "tanh_near": ("tanh of 10 to 14", torch.tanh, lambda mp, x: mp.tanh(x), columns((10, 14), (-1, 1))),
    "sigmoid_one": ("sigmoid = 1 in two columns", torch.sigmoid, sigmoid, columns((38, 60), (40, 50), (-1, 1))),
    "sigmoid_zero": ("sigmoid of −60 to −40 (tiny and exact)", torch.sigmoid, sigmoid, columns((-60, -40), (-1, 1))),
    "erf_one": ("erf = 1 in one column", torch.erf, lambda mp, x: mp.erf(x), columns((6, 9), (-1, 1))),
    "cosine_one": ("cos of 1e-10 to 1e-9", torch.cos, lambda mp, x: mp.cos(x), columns((1e-10, 1e-9), (-1, 1))),
    "exponential_one": ("exp of 1e-19 to 1e-17", torch.exp, lambda mp, x: mp.exp(x), columns((1e-19, 1e-17), (-1, 1))),
    "repeated": (
        "two columns equal by rounding",
        lambda x: 1e9 + x * torch.tensor([1e-9, 2e-9, 1e9]).to(x),
        None,
        columns((-1, 1), (-1, 1), (-1, 1)),
    ),
    "sine_and_identity": (
        "sin x and x, x of 1e-9",
        lambda x: torch.cat([x[:, :1].sin(), x[:, :1], x[:, 2:]], 1),
        None,
        columns((1e-9, 2e-9), (0, 1), (-1, 1)),
    ),
    "logarithm": (
        "log(1 + x), x of 1e-18 to 1e-17, beside a column",
        lambda x: (1 + x).log(),
        lambda mp, x: mp.log(1 + x),
        columns((1e-18, 1e-17), (0, 1)),
    ),
    "softplus_zero": (
        "softplus of −800 to −750",
        F.softplus,
        lambda mp, x: mp.log1p(mp.exp(x)),
        columns((-800, -750), (-1, 1)),
    ),
}


def repeated_exactly(mp, rows):
    factors = [mp.mpf(1e-9), mp.mpf(2e-9), mp.mpf(1e9)]
    return np.array([[mp.mpf(10) ** 9 + factor * x for factor, x in zip(factors, row, strict=True)] for row in rows])


def sine_exactly(mp, rows):
    return np.array([[mp.sin(row[0]), row[0], row[2]] for row in rows])


def of_rows(name, title, function, exact, inputs):
    """The same, with features that are a function of a whole row."""

    def formula(mp, own, rows):
        z = exact(mp, rows) @ own["1.weight"].T + own["1.bias"]
        return sum(one * one for one in z.flat) / z.size

    def make():
        x = inputs().double()
        return nn.Sequential(Applied(function), nn.Linear(3, 1)).double(), MSE, (x, torch.zeros(len(x), 1).double())

    add("A4", name, title, make, "1", truth=formula_truth(formula))


for key, (title, function, exact, inputs) in FEATURES.items():
    if exact is None:
        whole = {"repeated": repeated_exactly, "sine_and_identity": sine_exactly}[key]
        of_rows(f"features_{key}", title, function, whole, inputs)
    else:
        rounded_features(f"features_{key}", title, function, exact, inputs)
rounded_features(
    "features_clamped",
    "clamp: columns that are constant exactly",
    lambda x: x.clamp(-1, 1),
    lambda mp, x: max(mp.mpf(-1), min(mp.mpf(1), x)),
    columns((2, 3), (-3, -2), (-1, 1)),
    control=True,
)
rounded_features(
    "features_layer",
    "tanh = 1 in one column, two outputs",
    torch.tanh,
    lambda mp, x: mp.tanh(x),
    columns((20, 50), (-1, 1)),
    outputs=2,
)


# ----------------------------------------------------------------- A5: optimizers that hold some layers

ROOTS = {
    "Adam": lambda state, group: (
        (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
    ),
    "RMSprop": lambda state, group: state["square_avg"].sqrt() + group["eps"],
    "Adagrad": lambda state, group: state["sum"].sqrt() + group["eps"],
    "SGD": lambda state, group: torch.ones(()),
}
ROOTS["AdamW"] = ROOTS["NAdam"] = ROOTS["Adam"]


def stepped(kind, names, several=False, **settings):
    """Options with an optimizer of these parameters (globs) after three steps; ``several``: one for each glob."""
    from fnmatch import fnmatch

    def options(model, loss_fn, batch):
        groups = [[p for name, p in model.named_parameters() if fnmatch(name, glob)] for glob in names]
        groups = groups if several else [[p for own in groups for p in own]]
        optimizers = [getattr(torch.optim, kind)(own, lr=0.01, **settings) for own in groups]
        for _ in range(3):
            for one in optimizers:
                one.zero_grad()
            loss_fn(model(batch[0]), batch[1]).backward()
            for one in optimizers:
                one.step()
        model.zero_grad()
        return {"method": optimizers if several else optimizers[0]}

    return options


def held_truth(model, loss_fn, batch, options):
    """The truth in coordinates √M of what the optimizer holds, from its state."""
    names, scales = {id(p): name for name, p in model.named_parameters()}, {}
    method = options["method"]
    for one in method if isinstance(method, list) else [method]:
        for group in one.param_groups:
            for p in group["params"]:
                root = ROOTS[type(one).__name__](one.state[p], group).double()
                scales[names[id(p)]] = root.rsqrt().expand(p.shape)
    return TwinTruth(double(model), loss_fn, batch, scales=scales)


def tanh_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


def norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), CE, classes()


def named(options, **more):
    """Options with more arguments."""
    return lambda *problem: options(*problem) | more


for key, title, options, make, facts in [
    ("adam_last", "Adam of the last layer", stepped("Adam", ["4.*"]), tanh_net, {"layer": "4"}),
    ("adam_first", "Adam of the first layer", stepped("Adam", ["0.*"]), tanh_net, {}),
    ("adam_two", "Adam of two of three layers", stepped("Adam", ["0.*", "2.*"]), tanh_net, {"layer": "2"}),
    ("adam_no_bias", "Adam of weights only", stepped("Adam", ["*.weight"]), tanh_net, {}),
    ("adam_bias_only", "Adam of biases only", stepped("Adam", ["*.bias"]), tanh_net, {}),
    (
        "adam_one_bias_missing",
        "Adam of all but one bias",
        stepped("Adam", ["0.*", "2.weight", "4.*"]),
        tanh_net,
        {"layer": "2"},
    ),
    ("adam_without_norm", "Adam of all but a normalization", stepped("Adam", ["0.*", "3.*"]), norm_net, {}),
    ("adam_norm_only", "Adam of a normalization only", stepped("Adam", ["1.*"]), norm_net, {"layer": "1"}),
    (
        "adam_named",
        "Adam of the last layer, the first one named",
        named(stepped("Adam", ["4.*"]), layers=["0"]),
        tanh_net,
        {},
    ),
    (
        "adam_both_named",
        "Adam of the last layer, two named",
        named(stepped("Adam", ["4.*"]), layers=["0", "4"]),
        tanh_net,
        {"layer": "4"},
    ),
    ("adamw_last", "AdamW of the last layer", stepped("AdamW", ["4.*"]), tanh_net, {"layer": "4"}),
    ("rmsprop_last", "RMSprop of the last layer", stepped("RMSprop", ["4.*"]), tanh_net, {"layer": "4"}),
    ("adagrad_last", "Adagrad of the last layer", stepped("Adagrad", ["4.*"]), tanh_net, {"layer": "4"}),
    ("sgd_last", "SGD of the last layer", stepped("SGD", ["4.*"]), tanh_net, {"layer": "4"}),
    ("two_adams", "two Adams of two of three layers", stepped("Adam", ["0.*", "4.*"], several=True), tanh_net, {}),
    ("all_held", "Adam of all layers", stepped("Adam", ["*"]), tanh_net, {"control": True}),
]:
    add("A5", key, title, make, truth=held_truth, options=options, **{"layer": "0"} | facts)


@construction(
    "A5",
    "Adam of the last layer, named in a block with the first",
    "both",
    truth=held_truth,
    levels=("layer",),
    options=named(stepped("Adam", ["4.*"]), blocks={"both": ["0.weight", "4.weight"]}),
)
def adam_in_a_block():
    return tanh_net()


# ----------------------------------------------------------------- A6: iterations


def diagonal(values):
    """An operator of scipy with these eigenvalues, in the basis of a fixed rotation by reflections."""
    from scipy.sparse.linalg import LinearOperator

    n = len(values)
    mirrors = np.random.default_rng(0).standard_normal((2, n))
    mirrors /= np.linalg.norm(mirrors, axis=1, keepdims=True)

    def multiply(V):
        V = V.reshape(n, -1)
        for w in mirrors:
            V = V - 2 * np.outer(w, w @ V)
        V = values[:, None] * V
        for w in mirrors[::-1]:
            V = V - 2 * np.outer(w, w @ V)
        return V

    return LinearOperator((n, n), matvec=lambda v: multiply(v).ravel(), matmat=multiply, dtype=float)


def top_by_seed(spectrum, which="top", seeds=72, tol=1e-4):
    """A judge: λ_max of `hesscond.lanczos` for each seed, which also draws the spectrum."""

    def judge(one, level, first=0):
        found = []
        for seed in range(first, first + seeds):
            values = spectrum(np.random.default_rng(seed))
            true = max(abs(values)) if which == "magnitude" else max(values)
            result = hesscond.lanczos(diagonal(values), 1, which, tol=tol, seed=seed)
            low, high = sorted([float(result.lower[0]), float(result.upper[0])])
            low, high = (-high, -low) if high < 0 else (low, high)
            inside = low - 1e-12 * abs(true) <= true <= high + 1e-12 * abs(true)
            word = "right" if inside else "wrong"
            found.append((f"seed {seed}", Verdict(word, f"λ_max in [{low:.6f}, {high:.6f}], truly {true:.6f}")))
        return found

    return judge


def uniform(rng):
    return 1 + rng.random(600)


TOPS = {
    "uniform": ("600 eigenvalues between 1 and 2", uniform, "top"),
    "uniform_300": ("300 eigenvalues between 1 and 2", lambda rng: 1 + rng.random(300), "top"),
    "two_at_the_top": ("400 below 1, two at 2 and 2.0005", lambda rng: np.append(rng.random(400), [2, 2.0005]), "top"),
    "cluster": (
        "a cluster of ten within 1e-3 at the top",
        lambda rng: np.append(rng.random(500), 2 + 1e-3 * rng.random(10)),
        "top",
    ),
    "both_signs": ("400 between −2 and 2", lambda rng: 4 * rng.random(400) - 2, "magnitude"),
    "opposite": ("2 and −2.0003 at the ends", lambda rng: np.append(rng.random(400), [2, -2.0003]), "magnitude"),
    "semicircle": ("a semicircle of 500", lambda rng: 2 + np.cos(3.14159 * rng.random(500)), "top"),
}
for key, (title, spectrum, which) in TOPS.items():
    add(
        "A6",
        f"top_{key}",
        f"λ_max: {title}, 72 seeds",
        lambda: None,
        "network",
        truth=None,
        levels=("network",),
        judge=top_by_seed(spectrum, which),
    )


def iterated(spectrum, seeds=3):
    """A judge: κ by iterations, of matrices that are not formed."""

    def judge(one, level, first=0):
        from hesscond.operators import as_operator
        from hesscond.spectra.matrix_free import SolverLimits, operator_condition

        found = []
        for seed in range(first, first + seeds):
            values = spectrum(np.random.default_rng(seed))
            limits = SolverLimits(dense_order=50, quick_order=50, seed=seed)
            kappa = operator_condition(as_operator(diagonal(values)), limits=limits)
            true = Spectrum(sorted(values.tolist(), key=abs, reverse=True))
            verdict = verdict_of(kappa, true)
            told = kappa.rank + kappa.nullity
            nonzero = sum(value != 0 for value in true.values)
            if kappa.rank > nonzero:
                verdict = Verdict("wrong", f"{kappa}: {kappa.rank} of {told} told from zero, where {nonzero} are")
            found.append((f"seed {seed}", verdict))
        return found

    return judge


def padded(nonzero, zeros):
    return lambda rng: np.append(nonzero(rng), np.zeros(zeros))


ITERATED = {
    "uniform": ("600 between 1 and 2", uniform),
    "thirty": ("30 nonzero of 1200", padded(lambda rng: 1 + rng.random(30), 1170)),
    "half": ("half of 400 zero", padded(lambda rng: 1 + rng.random(200), 200)),
    "geometric": ("300 over six decades", lambda rng: 10 ** (6 * rng.random(300))),
    "signs": ("300 of both signs, none below 0.1", lambda rng: (0.1 + rng.random(300)) * rng.choice([-1, 1], 300)),
    "small_one": ("one of 1e-6 beside 400 of 1 to 2", lambda rng: np.append(1 + rng.random(400), 1e-6)),
}
for key, (title, spectrum) in ITERATED.items():
    add(
        "A6",
        f"iterated_{key}",
        f"κ by iterations: {title}",
        lambda: None,
        "network",
        truth=None,
        levels=("network",),
        judge=iterated(spectrum),
    )


# ----------------------------------------------------------------- A7: units of weights stored (in, out)


class Stored(nn.Module):
    """A layer whose weight is stored in some order, and a bias."""

    def __init__(self, apply, shape, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.5)
        self.bias = nn.Parameter(torch.randn(bias) * 0.3) if bias else None
        self.apply_to = apply

    def forward(self, x):
        return self.apply_to(self, x)


class UnitTruth(TwinTruth):
    """Units: rows (``axis`` 0) or columns (1) of the weight, each with an entry of the bias; None: there are none."""

    def __init__(self, twin, loss_fn, batch, *, axis, layer="0", own_bias=True):
        super().__init__(twin, loss_fn, batch)
        self.axis, self.layer, self.own_bias = axis, layer, own_bias

    def spectrum(self, own, unit):
        if own.level != "unit" or own.name != self.layer:
            return super().spectrum(own, unit)
        if self.axis is None:
            return f"{len(own.units)} units where no weight belongs to one output"
        weight = self.index[f"{self.layer}.weight"]
        # all dimensions but that of the inputs
        weight = weight.flatten(1) if self.axis == 0 else weight.flatten(1).T
        if len(own.units) != len(weight):
            true = f"{len(weight)} outputs have {weight.shape[1]} weights"
            return f"{len(own.units)} units of order {own.n_params} where {true}"
        where = weight[unit]
        bias = self.index.get(f"{self.layer}.bias") if self.own_bias else None
        if bias is not None and not (self.own_bias == "either" and len(own.parameters) == 1):
            where = torch.cat([bias[unit : unit + 1], where])
        if own.n_params != len(where):
            return f"{', '.join(own.parameters)}: order {own.n_params} where a unit has {len(where)} parameters"
        return Spectrum.of(self.at(where))


def stored(name, title, apply, shape, bias, *, axis, outputs, inputs=4, data=None, own_bias=True, **facts):
    """Register a construction with a stored weight; its level unit may be refused."""

    def make():
        model = nn.Sequential(Stored(apply, shape, bias), nn.Tanh(), nn.Linear(outputs, 3))
        return model, CE, (data or functools.partial(classes, 24, inputs))()

    def truth(model, loss_fn, batch):
        return UnitTruth(double(model), loss_fn, batch, axis=axis, own_bias=own_bias)

    facts.setdefault("options", {"layers": ["0", "2"]})
    facts.setdefault("refusal", axis is None)
    add("A7", name, title, make, truth=truth, **facts)


ADJACENCY = (torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) > 0.8).float() + torch.eye(24)

for key, title, apply, shape, bias, axis, facts in [
    ("in_out", "x @ W + b, 5 → 4", lambda m, x: x @ m.weight + m.bias, (5, 4), 4, 1, {"outputs": 4, "inputs": 5}),
    ("in_out_square", "x @ W + b, 4 → 4", lambda m, x: x @ m.weight + m.bias, (4, 4), 4, 1, {"outputs": 4}),
    ("in_out_no_bias", "x @ W, 5 → 4", lambda m, x: x @ m.weight, (5, 4), 0, 1, {"outputs": 4, "inputs": 5}),
    ("in_out_no_bias_square", "x @ W, 4 → 4", lambda m, x: x @ m.weight, (4, 4), 0, 1, {"outputs": 4}),
    ("addmm", "addmm, 4 → 4", lambda m, x: torch.addmm(m.bias, x, m.weight), (4, 4), 4, 1, {"outputs": 4}),
    (
        "einsum_in_out",
        "einsum ni,io",
        lambda m, x: torch.einsum("ni,io->no", x, m.weight) + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
    (
        "einsum_out_in",
        "einsum ni,oi (out, in)",
        lambda m, x: torch.einsum("ni,oi->no", x, m.weight) + m.bias,
        (4, 4),
        4,
        0,
        {"outputs": 4},
    ),
    (
        "linear_of_transposed",
        "F.linear with Wᵀ",
        lambda m, x: F.linear(x, m.weight.T, m.bias),
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
    ("transposed_product", "(Wᵀ xᵀ)ᵀ + b", lambda m, x: (m.weight.T @ x.T).T + m.bias, (4, 4), 4, 1, {"outputs": 4}),
    (
        "graph_layer",
        "A (x W) + b of a graph",
        lambda m, x: ADJACENCY.to(x) @ (x @ m.weight) + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
    (
        "graph_layer_wide",
        "A (x W) + b of a graph, 5 → 3",
        lambda m, x: ADJACENCY.to(x) @ (x @ m.weight) + m.bias,
        (5, 3),
        3,
        1,
        {"outputs": 3, "inputs": 5},
    ),
    (
        "heads",
        "einsum of heads (in, head, out)",
        lambda m, x: torch.einsum("ni,iho->nho", x, m.weight).flatten(1),
        (5, 2, 2),
        0,
        1,
        {"outputs": 4, "inputs": 5},
    ),
    (
        "plain_order",
        "x @ Wᵀ + b (out, in)",
        lambda m, x: x @ m.weight.T + m.bias,
        (4, 5),
        4,
        0,
        {"outputs": 4, "inputs": 5, "control": True},
    ),
    (
        "plain_linear",
        "F.linear in a module of one's own",
        lambda m, x: F.linear(x, m.weight, m.bias),
        (4, 4),
        4,
        0,
        {"outputs": 4, "control": True},
    ),
    ("scaled_in_out", "x @ (0.5 W) + b", lambda m, x: x @ (0.5 * m.weight) + m.bias, (4, 4), 4, 1, {"outputs": 4}),
    ("squared_in_out", "x @ W² + b", lambda m, x: x @ m.weight.square() + m.bias, (4, 4), 4, 1, {"outputs": 4}),
    (
        "sequence_in_out",
        "x @ W + b of sequences",
        lambda m, x: (x @ m.weight + m.bias).mean(1),
        (4, 4),
        4,
        1,
        {"outputs": 4, "data": lambda: (torch.randn(12, 3, 4), torch.randint(0, 3, (12,)))},
    ),
    (
        "batched_product",
        "bmm with an expanded W",
        lambda m, x: torch.bmm(x[:, None], m.weight.expand(len(x), 4, 4))[:, 0] + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
    (
        "outer_sum",
        "(x[:, :, None] · W).sum(1) + b",
        lambda m, x: (x[:, :, None] * m.weight).sum(1) + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
]:
    stored(f"unit_{key}", title, apply, shape, bias, axis=axis, **facts)


@construction(
    "A7",
    "a Linear whose forward applies its weight transposed",
    truth=lambda m, f, b: UnitTruth(double(m), f, b, axis=1),
)
def unit_transposed_linear():
    class Transposed(nn.Linear):
        def forward(self, x):
            return x @ self.weight + self.bias

    return nn.Sequential(Transposed(4, 4), nn.Tanh(), nn.Linear(4, 3)), CE, classes(24)


@construction("A6", "1,200 weights and 30 samples", truth=lambda m, f, b: FewSamples(b), levels=("network",))
def few_samples():
    return nn.Sequential(nn.Linear(1200, 1, bias=False)), MSE, values(30, 1200, 1)


class FewSamples:
    """The eigenvalues of 2XᵀX/N of a linear model with squared error, from XXᵀ."""

    def __init__(self, batch):
        self.rows = batch[0].double()

    def spectrum(self, own, unit):
        found = torch.linalg.eigvalsh(2 / len(self.rows) * self.rows @ self.rows.T).flip(0).tolist()
        return Spectrum(found + [0.0] * (own.n_params - len(found)))


for key, title, apply, shape, bias, axis, facts in [
    (
        "then_matrix",
        "(x @ W) C + b: the bias is of another map",
        lambda m, x: (x @ m.weight) @ torch.linspace(-1, 1, 16).view(4, 4).to(x).cos() + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4, "own_bias": False},
    ),
    (
        "input_bias",
        "(x + b) @ W: the bias is of the inputs",
        lambda m, x: (x + m.bias) @ m.weight,
        (4, 4),
        4,
        1,
        {"outputs": 4, "own_bias": False},
    ),
    (
        "symmetric",
        "x @ (W + Wᵀ): no weight belongs to one output",
        lambda m, x: x @ (m.weight + m.weight.T),
        (4, 4),
        0,
        None,
        {"outputs": 4},
    ),
    (
        "both_ways",
        "x @ W + x @ Wᵀ behind a nonlinearity: rows and columns",
        lambda m, x: (x @ m.weight).tanh() + x.sin() @ m.weight.T,
        (4, 4),
        0,
        None,
        {"outputs": 4},
    ),
    (
        "permuted",
        "x @ W with its outputs in another order",
        lambda m, x: (x @ m.weight)[:, [2, 0, 3, 1]] + m.bias[[2, 0, 3, 1]],
        (4, 4),
        4,
        1,
        {"outputs": 4, "own_bias": "either"},
    ),
    (
        "matmul_vector",
        "a loop over samples: W.T @ x_n",
        lambda m, x: torch.stack([m.weight.T @ row for row in x]) + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
    (
        "two_times",
        "x @ W, then another tanh and @ W again",
        lambda m, x: ((x @ m.weight).tanh() @ m.weight) + m.bias,
        (4, 4),
        4,
        1,
        {"outputs": 4},
    ),
]:
    stored(f"unit_{key}", title, apply, shape, bias, axis=axis, **facts)


# ----------------------------------------------------------------- meaner neighbours of A1


class MaskedRelu(torch.autograd.Function):
    """ReLU that keeps its mask: its second derivative is zero, and right."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = (x > 0).to(x)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask


class SavedOutput(torch.autograd.Function):
    """tanh that saves its output as torch wants it: differentiable again."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Doubled(torch.autograd.Function):
    """2x."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def stale_square():
    return pointwise("stale", torch.square, lambda x, y: x.detach(), lambda g, k: 2 * k * g).apply


for key, title, function in [
    ("masked_relu", "autograd.Function of ReLU that keeps its mask", MaskedRelu.apply),
    ("saved_output", "autograd.Function of tanh that saves its output", SavedOutput.apply),
    ("doubled", "autograd.Function 2x", lambda x: Doubled.apply(x).tanh()),
    ("sharp_softplus", "softplus with β = 1e5", lambda x: F.softplus(x, beta=1e5)),
    (
        "sharp_max",
        "logsumexp(1e4 x)/1e4",
        lambda x: torch.cat([torch.logsumexp(1e4 * x, 1, keepdim=True) / 1e4, x[:, 1:].sin()], 1),
    ),
    ("very_high_frequency", "sin(1000x)/1000", lambda x: (1000 * x).sin() / 1000),
    ("cold_softmax", "softmax(50x)", lambda x: (50 * x).softmax(1)),
    ("hard_gumbel", "hard softmax, straight through by detach", lambda x: hard_softmax(x)),
    ("rounded_through", "rounding, straight through by detach", lambda x: x + ((4 * x).round() / 4 - x).detach()),
    ("cube_root", "sign(x)|x|^1.5", lambda x: x.sign() * x.abs().pow(1.5)),
    ("random_leaks", "RReLU in training mode", lambda x: F.rrelu(x, training=True)),
    ("floor_division", "x − floor(x)", lambda x: x - x.floor()),
    (
        "where_branch",
        "torch.where of two formulas that meet",
        lambda x: torch.where(x > 0.1, x.exp() - 0.005, 1 + x.sin() + x**2),
    ),
    (
        "argmax_branch",
        "Python branch on the argmax of a sample",
        lambda x: torch.stack([r.sin() if int(r.argmax()) else r.tanh() for r in x]),
    ),
    ("normalized_rows", "rows of norm 1", lambda x: F.normalize(x, dim=1)),
    ("checkerboard", "product of kinks |x|·relu(y)", lambda x: x.abs() * torch.relu(x.roll(1, 1))),
]:
    add("A1k", f"kink_{key}", title, lambda f=function: (middle(f), CE, classes()), truth=twin_truth(), control=True)


def hard_softmax(x):
    soft = x.softmax(1)
    return F.one_hot(soft.argmax(1), x.shape[1]).to(x) - soft.detach() + soft


@construction("A1k", "a stale function of the inputs, which reaches no parameter", truth=twin_truth(), control=True)
def kink_stale_inputs():
    return nn.Sequential(Applied(stale_square()), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


@construction("A1k", "a hidden layer of zeros before LeakyReLU", "2", truth=twin_truth(), control=True)
def kink_zero_layer():
    model = middle(F.leaky_relu)
    for p in model[0].parameters():
        nn.init.zeros_(p)
    return model, CE, classes()


@construction(
    "A1k", "wide ReLU network, 600 samples", "0", truth=twin_truth(), control=True, options={"layers": ["0", "2"]}
)
def kink_many_samples():
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)), CE, classes(600, 5)


@construction("A1k", "weights of sizes 1e-4 and 1e3 behind ReLU, squared error", truth=twin_truth(), control=True)
def kink_mixed_scales():
    model = middle(torch.relu)
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[2].weight.mul_(1e-4)
    return model, MSE, values()


@construction(
    "A1",
    "stale square in one of two branches, the other one 1e3 times as large",
    "b",
    truth=twin_truth(lambda model: replaced_part(model, torch.square)),
)
def stale_masked():
    stale = stale_square()
    net = Net(lambda m, x: m.a(1e3 * x) + m.square(m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    net.square = stale
    return net, MSE, values()


def replaced_part(model, function):
    twin = double(model)
    twin.square = function
    return twin


class StaleLate(nn.Module):
    """A function that is stale where an input is large: at one batch of a stream."""

    def __init__(self, function):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(4, 3), nn.Linear(3, 3), function

    def forward(self, x):
        h = self.first(x)
        return self.head(self.function(h) if float(x.detach().max()) > 5 else h.square())


@construction(
    "A1",
    "stale square in the last batch of a stream",
    "first",
    truth=lambda m, f, b: Stream(replaced(torch.square)(m), f, b),
)
def stale_last_batch():
    x, y = classes(18)
    x[-1, 0] = 6.0
    return StaleLate(stale_square()), MSE_OF_CLASSES, [(x[:8], y[:8]), (x[8:14], y[8:14]), (x[14:], y[14:])]


def MSE_OF_CLASSES(output, target):
    return (output - F.one_hot(target, 3)).square().mean()


@construction("A1", "x + 1e-5 x², of which the square is stale", truth=with_functions({"1": lambda x: x + 1e-5 * x**2}))
def stale_small():
    stale = pointwise("stale", lambda x: x + 1e-5 * x**2, lambda x, y: x.detach(), lambda g, k: g * (1 + 2e-5 * k))
    return middle(stale.apply), MSE, values()


@construction(
    "A1",
    "stale square of one unit of six, all others ReLU",
    truth=with_functions({"1": lambda x: torch.cat([x[:, :1].square(), x[:, 1:].relu()], 1)}),
)
def stale_one_unit():
    stale = stale_square()
    return middle(lambda x: torch.cat([stale(x[:, :1]), x[:, 1:].relu()], 1), 6), CE, classes(30)


@construction("A1", "stale square behind a frozen layer", "0", truth=with_functions({"3": torch.square}))
def stale_behind_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), Applied(stale_square()), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    return model, CE, classes()


@construction(
    "A1", "softmax attention, its weights kept", "0", truth=with_functions({"1": lambda x: attend(x, torch.softmax)})
)
def stale_attention():
    soft = pointwise(
        "soft",
        lambda x: torch.softmax(x, -1),
        lambda x, y: y.detach(),
        lambda g, k: k * (g - (g * k).sum(-1, keepdim=True)),
    ).apply
    model = nn.Sequential(nn.Linear(3, 3), Applied(lambda x: attend(x, lambda a, dim: soft(a))), nn.Linear(3, 3))
    return model, CE, (torch.randn(10, 4, 3), torch.randint(0, 3, (10,)))


def attend(x, softmax):
    return (softmax(x @ x.transpose(1, 2), -1) @ x).mean(1)


@construction("A1", "gradient halved by a hook on a tensor", truth=with_functions({"1": torch.tanh}), signed=False)
def tensor_hook():
    def halved(x):
        y = x.tanh()
        if y.requires_grad:
            y.register_hook(lambda g: 0.5 * g)
        return y

    return middle(halved), CE, classes()


# ----------------------------------------------------------------- meaner neighbours of A2


def net_shift():
    return Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1))


zero(
    "softmax_shift_float32",
    "a layer that shifts all logits alike, in float32",
    net_shift,
    CE,
    small_classes,
    layers=["shift"],
    options={"dtype": None, "layers": ["shift"]},
    levels=("unit", "layer"),
)
zero(
    "softmax_shift_adam",
    "a layer that shifts all logits alike, in coordinates of Adam",
    net_shift,
    CE,
    small_classes,
    layers=["shift"],
    options=named(stepped("Adam", ["*"]), layers=["shift"]),
)
KINDS[-1] = dataclasses.replace(
    KINDS[-1], truth=lambda m, f, b, o: TwinTruth(double(m), f, b, zero=["shift.weight", "shift.bias"])
)
zero(
    "softmax_shift_products",
    "nothing but a shift of 50 logits, 12 products",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(30, 1)),
    CE,
    lambda: classes(14, 30, 3),
    layers=["shift"],
    levels=("network",),
    options={"products": 12},
)
zero(
    "softmax_shift_large",
    "a shift of logits between ±300",
    lambda: Net(lambda m, x: 300 * m.net(x) + 30 * m.shift(x), net=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    CE,
    small_classes,
    layers=["shift"],
    options={"layers": ["shift"]},
)
zero(
    "thousand_classes",
    "a shift of 300 logits",
    lambda: Net(lambda m, x: torch.linspace(-1, 1, 300).to(x) + m.shift(x), shift=nn.Linear(4, 1)),
    CE,
    lambda: classes(20, 4, 300),
    layers=["shift"],
)
zero(
    "pairwise_ranking",
    "a shift of all scores in a pairwise ranking loss",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x.mean(0, keepdim=True)), net=nn.Linear(4, 1), shift=nn.Linear(4, 1)),
    lambda o, t: F.softplus(o - o.T).mean(),
    lambda: values(8, 4, 1),
    layers=["shift"],
)
zero(
    "contrastive_shift",
    "InfoNCE: a shift of all similarities of a row",
    lambda: Net(
        lambda m, x: F.normalize(m.a(x), dim=1) @ F.normalize(m.b(x), dim=1).T + m.shift(x),
        a=nn.Linear(4, 3),
        b=nn.Linear(4, 3),
        shift=nn.Linear(4, 1),
    ),
    lambda o, t: F.cross_entropy(o, torch.arange(len(o))),
    lambda: values(8, 4, 1),
    layers=["shift"],
)
zero(
    "instance_norm",
    "a bias of channels before instance normalization",
    lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2), nn.Flatten(), nn.Linear(18, 3)),
    CE,
    lambda: (torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))),
    layers=[],
    others=["0.bias"],
    layer="bias",
    levels=("layer",),
    options={"blocks": {"bias": ["0.bias"]}},
)
zero(
    "group_norm_shift",
    "a shift of all channels before group normalization",
    lambda: Net(
        lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))),
        own=nn.Linear(4, 4),
        shift=nn.Linear(4, 1),
        norm=nn.GroupNorm(1, 4),
        out=nn.Linear(4, 3),
    ),
    CE,
    small_classes,
    layers=["shift"],
)
zero(
    "difference_of_twins",
    "a layer times zero: f(z) − f(z) by two orders of a sum",
    lambda: Net(lambda m, x: m.net(x) + twin_sum(m.part(x)), net=nn.Linear(4, 3), part=nn.Linear(4, 3)),
    CE,
    small_classes,
    layers=["part"],
)
zero(
    "average_of_logits",
    "logits minus their mean: a shift again",
    lambda: Net(
        lambda m, x: (m.net(x) + m.shift(x)) - (m.net(x) + m.shift(x)).mean(1, keepdim=True),
        net=nn.Linear(4, 3),
        shift=nn.Linear(4, 1),
    ),
    CE,
    small_classes,
    layers=["shift"],
)
zero(
    "zero_part_of_units",
    "softmax shift by one of two output units",
    lambda: Net(lambda m, x: x[:, :3] + m.two(x)[:, :1] + 0 * m.two(x)[:, 1:], two=nn.Linear(4, 2)),
    CE,
    small_classes,
    layers=["two"],
)


def twin_sum(z):
    f = z.exp()
    return (f[:, :1] + f[:, 1:2] + f[:, 2:]) - (f[:, 2:] + (f[:, 1:2] + f[:, :1]))


for power in (1, 3, 5):

    def far_make(power=power):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-3, affine=False)).double()
        return model, sine_loss, (10.0**power * torch.randn(9, 1).double(), torch.zeros(9, 1).double())

    add(
        "A2",
        f"norm_epsilon_e{power}",
        f"one weight on inputs of 1e{power} before batch normalization with ε = 1e-3",
        far_make,
        truth=formula_truth(batch_norm_formula, terms=20.0),
    )


# ----------------------------------------------------------------- meaner neighbours of A3 and A4

for key, low, high in [
    ("log_cosh", 1, 17),
    ("log_exp", 1, 33),
    ("silu_right", 2, 36),
    ("mish_right", 1, 19),
    ("tanh_loss", 1, 18),
    ("sigmoid_far", 1, 36),
    ("linex", -36, -1),
    ("gelu_right", 1, 8),
    ("erf_loss", 1, 5.8),
    ("squared_tanh", 1, 17),
    ("charbonnier", 1e-6, 1),
    ("cauchy", 1.01, 1e7),
    ("log_cosh_softplus", 1, 18),
    ("softplus_squared", 1, 19),
]:
    three = elementwise_of(key, (low, high, 3))
    three = dataclasses.replace(
        three, title=f"three samples: {three.title.split(', z')[0].split(', |z')[0]}, z of {low} to {high}"
    )
    three.make.__name__ += "_three"
    KINDS.append(three)


def hidden_formula(mp, own, rows):
    h = np.vectorize(mp.tanh, otypes=[object])(rows @ own["0.weight"].T + own["0.bias"])
    z = h @ own["2.weight"].T + own["2.bias"]
    return sum(mp.log(mp.cosh(one)) for one in z.flat) / z.size


@construction("A3", "log(cosh z) behind a hidden layer, z of 15 to 25", truth=formula_truth(hidden_formula, terms=1e3))
def hidden_log_cosh():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[2].bias.fill_(20.0)
        model[2].weight.mul_(6)
    return model, lambda o, t: o.cosh().log().mean(), (torch.randn(6, 2).double(), torch.zeros(6, 1).double())


def softmax_rows(mp, rows):
    powers = [[mp.exp(x) for x in row] for row in rows]
    return np.array([[p / sum(row) for p in row] for row in powers])


def centred_rows(mp, rows):
    return np.array([[x - sum(row) / len(row) for x in row] for row in rows])


def plus_minus(mp, rows):
    return np.array([[row[0], 1 - row[0], row[2]] for row in rows])


def summed(mp, rows):
    return np.array([[row[0], row[1], row[0] + row[1]] for row in rows])


def squares(mp, rows):
    return np.array([[mp.sin(row[0]) ** 2, mp.cos(row[0]) ** 2, row[2]] for row in rows])


def twice(mp, rows):
    return np.array([[row[0], row[0], row[2]] for row in rows])


for key, title, function, exact in [
    ("softmax", "softmax, whose columns add up to 1", lambda x: x.softmax(1), softmax_rows),
    ("centred", "centred features, which add up to 0", lambda x: x - x.mean(1, keepdim=True), centred_rows),
    ("complement", "x and 1 − x", lambda x: torch.cat([x[:, :1], 1 - x[:, :1], x[:, 2:]], 1), plus_minus),
    ("sum", "x, y and x + y", lambda x: torch.cat([x[:, :2], x[:, :1] + x[:, 1:2]], 1), summed),
    (
        "sine_cosine",
        "sin² and cos²",
        lambda x: torch.cat([x[:, :1].sin() ** 2, x[:, :1].cos() ** 2, x[:, 2:]], 1),
        squares,
    ),
    ("twice", "a column twice", lambda x: torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1), twice),
]:
    of_rows(
        f"features_{key}", f"features that depend exactly: {title}", function, exact, columns((-1, 1), (-1, 1), (-1, 1))
    )


# ----------------------------------------------------------------- derivatives inside, of losses of any size


class InnerGradient(nn.Module):
    """An output and its gradient in the inputs, which is not of the size of the loss."""

    def __init__(self, function):
        super().__init__()
        self.first, self.out, self.function = nn.Linear(4, 3), nn.Linear(3, 1), function

    def forward(self, x):
        x = x.detach().requires_grad_()
        h = self.out(self.function(self.first(x)))
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + 0.3 * g.square().sum(1, keepdim=True)


for exponent in (-30, -16, -8, 30):
    for key, function in [("sine", torch.sin), ("hardtanh", F.hardtanh)]:
        add(
            "A1k",
            f"inner_gradient_{key}_{exponent}",
            f"{key}, the gradient in the inputs in the output, loss × 1e{exponent}",
            lambda f=function, e=exponent: (InnerGradient(f), scaled_loss(10.0**e, MSE), values(20, 4, 1)),
            "first",
            truth=twin_truth(),
            control=True,
        )


# by group, as on the page
KINDS.sort(key=lambda one: list(GROUPS).index(one.trust))

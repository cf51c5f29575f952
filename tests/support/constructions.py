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
from tests.cases import Net
from tests.support.judging import LEVELS, Construction, FormulaTruth, Spectrum, TwinTruth, Verdict, verdict_of
from tests.support.kinds import CE, MSE, Applied, Cube, classes, double, images, recurrent, tokens, values

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


def construction(trust, title, layer="0", **facts):
    """Register a function that makes (model, loss_fn, batch)."""

    def register(make):
        KINDS.append(Construction(trust, title, make, layer, **facts))
        return make

    return register


def add(trust, name, title, make, layer="0", **facts):
    """Register a construction of a family by a name."""
    make = functools.partial(make)
    make.__name__ = name
    KINDS.append(Construction(trust, title, make, layer, **facts))


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


def nothing(*_):
    return ()


def function(forward, backward, kept=nothing, saved=nothing):
    """A function of torch with a backward of its own: ``backward(gradient, kept, *saved)``.

    ``kept(*inputs, output)`` is held as it is, ``saved(*inputs, output)`` as torch wants it for a second derivative.
    """

    def go(ctx, *inputs):
        output = forward(*inputs)
        ctx.kept = kept(*inputs, output)
        ctx.save_for_backward(*saved(*inputs, output))
        return output

    def back(ctx, gradient):
        return backward(gradient, ctx.kept, *ctx.saved_tensors)

    return type("Own", (torch.autograd.Function,), {"forward": staticmethod(go), "backward": staticmethod(back)}).apply


def own_input(x, y):
    return x.detach()


def own_output(x, y):
    return y.detach()


def softmax(x):
    return torch.softmax(x, -1)


stale_square = function(torch.square, lambda g, k: 2 * k * g, own_input)
stale_tanh = function(torch.tanh, lambda g, k: g * (1 - k * k), own_output)
stale_sine = function(torch.sin, lambda g, k: g * k.cos(), own_input)
stale_softmax = function(softmax, lambda g, k: k * (g - (g * k).sum(-1, keepdim=True)), own_output)


def silu_slope(x, y):
    s = torch.sigmoid(x.detach())
    return s * (1 + x.detach() * (1 - s))


def normalized(x):
    """Layer normalization without parameters."""
    return F.layer_norm(x, x.shape[-1:])


def normalized_by_hand(x):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)


def rows_and_scale(x, y):
    return y.detach(), torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5).detach()


def layer_norm_backward(g, kept):
    rows, scale = kept
    return scale * (g - g.mean(-1, keepdim=True) - rows * (g * rows).mean(-1, keepdim=True))


def inverse_rms(x, y=None):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def root_mean_square(x):
    return x * inverse_rms(x)


#: (name, title, function, the same by operations of torch).
STALE = [
    ("stale_square", "x², the input kept as it was", stale_square, torch.square),
    ("stale_tanh", "tanh, its output kept", stale_tanh, torch.tanh),
    ("stale_exp", "exp, its output kept", function(torch.exp, lambda g, k: g * k, own_output), torch.exp),
    ("stale_silu", "SiLU, its sigmoid kept", function(F.silu, lambda g, k: g * k, silu_slope), F.silu),
    ("stale_numpy", "sine, its cosine by numpy",
        function(torch.sin, lambda g, k: g * torch.from_numpy(np.cos(k)), lambda x, y: x.detach().numpy()), torch.sin),
    ("stale_part", "x + x²/1000, of which the square is stale",
        function(lambda x: x + 1e-3 * x**2, lambda g, k: g * (1 + 2e-3 * k), own_input), lambda x: x + 1e-3 * x**2),
    ("no_grad_backward", "sine, its backward under no_grad",
        function(torch.sin, torch.no_grad()(lambda g, k: g * k.cos()), own_input), torch.sin),
    ("detached_gradient", "softplus, its gradient detached",
        function(F.softplus, lambda g, k: (g * k.sigmoid()).detach(), own_input), F.softplus),
    ("stale_softmax", "softmax, its output kept", stale_softmax, softmax),
    ("stale_one_sample", "sine, stale at one sample", lambda x: torch.cat([stale_sine(x[:1]), x[1:].sin()]), torch.sin),
    ("fused_layer_norm", "fused layer normalization",
        function(normalized_by_hand, layer_norm_backward, rows_and_scale), normalized),
    ("fused_rms_norm", "fused RMS normalization, 1/rms kept",
        function(root_mean_square, lambda g, k, x: k * g - k**3 * x * (g * x).mean(-1, keepdim=True),
            lambda x, y: inverse_rms(x).detach(), lambda x, y: (x,)), root_mean_square),
]  # fmt: skip


def middle(function, width=3):
    """A dense layer, a function of its outputs, another dense layer."""
    return nn.Sequential(nn.Linear(4, width), Applied(function), nn.Linear(width, 3))


for key, title, stale, plain in STALE:
    add("A1", key, title, lambda f=stale: (middle(f), CE, classes()), truth=with_functions({"1": plain}))

fused_entropy = function(
    F.cross_entropy,
    lambda g, k: (g * k, None),
    lambda z, t, y: (z.softmax(1) - F.one_hot(t, z.shape[1])).detach() / len(z),
)
fused_squares = function(
    lambda z, t: (z - t).square().mean(), lambda g, k: (2 * g * k / k.numel(), None), lambda z, t, y: (z - t).detach()
)


add("A1", "fused_cross_entropy", "fused cross-entropy",
    lambda: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_entropy, classes()),
    truth=with_functions({}, CE))  # fmt: skip


@construction("A1", "fused cross-entropy, float64, one layer", truth=with_functions({}, CE))
def fused_cross_entropy_alone():
    x, y = classes()
    return nn.Sequential(nn.Linear(4, 3)).double(), fused_entropy, (x.double(), y)


add("A1", "fused_squared_error", "fused squared error behind tanh",
    lambda: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_squares, values()),
    truth=with_functions({}, MSE))  # fmt: skip


def two_factors(multiply):
    """The product of two layers."""
    return Net(lambda m, x: m.multiply(m.a(x), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3), multiply=multiply)


def weighted(own):
    """A function of inputs and a weight of its own, between two layers."""
    return Net(lambda m, x: m.head(m.own(m.first(x), m.weight)), first=nn.Linear(4, 3), head=nn.Linear(3, 3),
               weight=nn.Parameter(torch.randn(3, 3)), own=own)  # fmt: skip


def replaced(**parts):
    """Twin with other parts."""

    def make(model):
        twin = double(model)
        for name, part in parts.items():
            setattr(twin, name, part)
        return twin

    return make


detached_product = function(torch.mul, lambda g, k: (g * k[1], g * k[0]), lambda a, b, y: (a.detach(), b.detach()))
add("A1", "detached_product", "a·b with both factors kept: wrong in both layers together only",
    lambda: (two_factors(detached_product), CE, classes()), "a",
    truth=twin_truth(replaced(multiply=torch.mul)))  # fmt: skip


def tanh_of_product(x, weight):
    return torch.tanh(x @ weight.T)


def fused_linear_tanh_backward(g, y, x, weight):
    inner = g * (1 - y**2)
    return inner @ weight, inner.T @ x


fused_linear_tanh = function(
    tanh_of_product, fused_linear_tanh_backward, lambda x, w, y: y.detach(), lambda x, w, y: (x, w)
)
add("A1", "fused_linear_tanh", "fused linear layer and tanh", lambda: (weighted(fused_linear_tanh), CE, classes()),
    "first", truth=twin_truth(replaced(own=tanh_of_product)))  # fmt: skip


def euler(z, weight, states=None):
    """z' = tanh(zWᵀ) by Euler steps, the states before each put into a list."""
    for _ in range(6):
        if states is not None:
            states.append(z.detach())
        z = z + 0.2 * torch.tanh(z @ weight.T)
    return z


def euler_states(z, weight, end):
    states = []
    euler(z, weight, states)
    return states, weight.detach()


def adjoint_steps(g, kept):
    """Gradients by the adjoint steps on detached states."""
    states, weight = kept
    own, total = g, 0
    for z in reversed(states):
        slope = 0.2 * own * (1 - torch.tanh(z @ weight.T) ** 2)
        total = total + slope.T @ z
        own = own + slope @ weight
    return own, total


@construction("A1", "adjoint ODE solver, float64", "first", truth=twin_truth(replaced(own=euler)))
def adjoint_ode():
    x, y = classes()
    return weighted(function(euler, adjoint_steps, euler_states)).double(), CE, (x.double(), y)


def recompute(block, x):
    """A hand-made checkpoint: the block is run again on a detached input, its gradient taken without a graph."""

    def backward(g, kept):
        with torch.enable_grad():
            again = kept.requires_grad_()
            y = block(again)
        return torch.autograd.grad(y, again, g.detach())[0]

    return function(torch.no_grad()(block), backward, own_input)(x)


def solved(x, A):
    """z = tanh(0.3 zAᵀ + x) by iteration."""
    z = torch.zeros_like(x)
    for _ in range(60):
        z = torch.tanh(0.3 * z @ A.T + x)
    return z


def implicit_backward(g, kept):
    """The gradient by the Jacobian at the detached solution."""
    z, A = kept
    slope = 1 - z**2
    J = torch.eye(g.shape[1], dtype=g.dtype) - 0.3 * slope[:, :, None] * A
    return torch.linalg.solve(J.transpose(1, 2), g) * slope, None


def fixed_point(x, A):
    """The same with steps of Newton's method, through which torch differentiates."""
    with torch.no_grad():
        z = solved(x, A)
    for _ in range(2):
        f = torch.tanh(0.3 * z @ A.T + x)
        J = torch.eye(x.shape[1], dtype=x.dtype) - 0.3 * (1 - f**2)[:, :, None] * A
        z = z - torch.linalg.solve(J, z - f)
    return z


def by_fixed_point(function):
    return lambda x, w: function(x, w.detach() / w.detach().norm())


def implicit_net():
    stale = function(solved, implicit_backward, lambda x, A, z: (z.detach(), A.detach()))
    model = weighted(by_fixed_point(stale))
    model.weight.requires_grad_(False)
    return model, CE, classes()


add("A1", "implicit_backward", "fixed point with an implicit backward", implicit_net, "first",
    truth=twin_truth(replaced(own=by_fixed_point(fixed_point))))  # fmt: skip

BLOCK = nn.Sequential(nn.Softplus(), nn.Softmax(-1)).double()
add("A1", "recomputed_block", "checkpoint by hand that recomputes without a graph",
    lambda: (middle(lambda x: recompute(BLOCK, x)), CE, classes()), truth=with_functions({"1": BLOCK}))  # fmt: skip
add("A1", "stale_deep", "stale tanh deep in a network",
    lambda: (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Applied(stale_tanh), nn.Linear(4, 4), nn.SiLU(),
                           nn.Linear(4, 3)), CE, classes()), truth=with_functions({"3": torch.tanh}))  # fmt: skip
add("A1", "stale_convolution", "stale square in a convolutional network",
    lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), Applied(stale_square), nn.Flatten(), nn.Linear(8, 3)), CE,
             images(12, 1)), truth=with_functions({"1": torch.square}))  # fmt: skip


def scaled_loss(factor, loss):
    return lambda output, target: factor * loss(output, target)


for exponent in (-30, 30):
    add("A1", f"stale_scaled_{exponent}", f"stale square, loss × 1e{exponent}",
        lambda e=exponent: (middle(stale_square), scaled_loss(10.0**e, MSE), values()),
        truth=with_functions({"1": torch.square}))  # fmt: skip


def changed_gradient(change):
    """tanh whose gradient is changed on its way back: not that of the loss."""
    own = function(lambda x: x.view_as(x), lambda g, k: change(g))
    return lambda: (middle(lambda x: own(torch.tanh(x))), CE, classes())


def halved(x):
    y = x.tanh()
    if y.requires_grad:
        y.register_hook(lambda g: 0.5 * g)
    return y


# the derivative of −∇L is −H, and its κ is right; double backward turns the sign once more in one of two terms
for key, title, make in [
    ("gradient_reversal", "gradient reversal", changed_gradient(torch.neg)),
    ("gradient_tripled", "gradient × 3 inside", changed_gradient(lambda g: 3 * g)),
    ("gradient_clipped", "gradients clipped inside", changed_gradient(lambda g: g.clamp(-0.02, 0.02))),
]:
    add("A1", key, title, make, truth=with_functions({"1": torch.tanh}), signed=False)

round_straight = function(lambda w: (8 * w).round() / 8, lambda g, k: g)


class Quantized(nn.Linear):
    """Rounded weights, gradients straight through, by a Function."""

    straight = True

    def forward(self, x):
        w = self.weight
        rounded = round_straight(w) if self.straight else w + ((8 * w).round() / 8 - w).detach()
        return F.linear(x, rounded, self.bias)


def straight_by_detach(model):
    twin = double(model)
    twin[0].straight = False
    return twin


add("A1", "straight_function", "straight-through rounding by a Function",
    lambda: (nn.Sequential(Quantized(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()),
    truth=twin_truth(straight_by_detach))  # fmt: skip


def stale_masked():
    net = Net(lambda m, x: m.a(1e3 * x) + m.square(m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3), square=stale_square)
    return net, MSE, values()


def stale_late(m, x):
    """A function that is stale where an input is large: at one batch of a stream."""
    h = m.first(x)
    return m.head(m.own(h) if float(x.detach().max()) > 5 else h.square())


def error_of_classes(output, target):
    return (output - F.one_hot(target, 3)).square().mean()


def stale_last_batch():
    x, y = classes(18)
    x[-1, 0] = 6.0
    model = Net(stale_late, first=nn.Linear(4, 3), head=nn.Linear(3, 3), own=stale_square)
    return model, error_of_classes, [(x[:8], y[:8]), (x[8:14], y[8:14]), (x[14:], y[14:])]


def one_unit(square):
    """The square of one unit, ReLU of the others."""
    return lambda x: torch.cat([square(x[:, :1]), x[:, 1:].relu()], 1)


def stale_behind_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), Applied(stale_square), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    return model, CE, classes()


def attend(soft):
    return lambda x: (soft(x @ x.transpose(1, 2)) @ x).mean(1)


class Stream(TwinTruth):
    """The truth of a stream: all of its batches at once."""

    def __init__(self, model, loss_fn, batches, **facts):
        inputs, targets = zip(*batches, strict=True)
        super().__init__(double(model), loss_fn, (torch.cat(inputs), torch.cat(targets)), **facts)


small_square = function(lambda x: x + 1e-5 * x**2, lambda g, k: g * (1 + 2e-5 * k), own_input)
add("A1", "stale_masked", "stale square in one of two branches, the other one 1e3 times as large", stale_masked, "b",
    truth=twin_truth(replaced(square=torch.square)))  # fmt: skip
add("A1", "stale_last_batch", "stale square in the last batch of a stream", stale_last_batch, "first",
    truth=lambda m, f, b: Stream(replaced(own=torch.square)(m), f, b))  # fmt: skip
add("A1", "stale_small", "x + 1e-5 x², of which the square is stale", lambda: (middle(small_square), MSE, values()),
    truth=with_functions({"1": lambda x: x + 1e-5 * x**2}))  # fmt: skip
add("A1", "stale_one_unit", "stale square of one unit of six, all others ReLU",
    lambda: (middle(one_unit(stale_square), 6), CE, classes(30)),
    truth=with_functions({"1": one_unit(torch.square)}))  # fmt: skip
add("A1", "stale_behind_frozen", "stale square behind a frozen layer", stale_behind_frozen,
    truth=with_functions({"3": torch.square}))  # fmt: skip
add("A1", "stale_attention", "softmax attention, its weights kept",
    lambda: (nn.Sequential(nn.Linear(3, 3), Applied(attend(stale_softmax)), nn.Linear(3, 3)), CE, tokens(10, 4, 3)),
    truth=with_functions({"1": attend(softmax)}))  # fmt: skip
add("A1", "tensor_hook", "gradient halved by a hook on a tensor", lambda: (middle(halved), CE, classes()),
    truth=with_functions({"1": torch.tanh}), signed=False)  # fmt: skip


# --------------------------------------------------------------------------- A1k: what must not be refused

Q = 0.8


def quantile_loss(output, target):
    error = target - output
    return torch.maximum(Q * error, (Q - 1) * error).mean()


def margins(output, target):
    return (1 - (2.0 * F.one_hot(target, output.shape[1]) - 1) * output).clamp(min=0)


def against_itself(output, target):
    """A target that is the model's own output, held fixed."""
    return (output - 0.9 * output.detach() - 0.1 * target).square().mean()


def maxout(x):
    return x.view(len(x), 3, 2).amax(2)


def best_two(x):
    return torch.zeros_like(x).scatter(1, x.topk(2, 1).indices, x.topk(2, 1).values)


def medians(x):
    return torch.cat([x.median(1, keepdim=True).values, x[:, :1].sin(), x[:, 1:2]], 1)


def hard_softmax(x):
    soft = x.softmax(1)
    return F.one_hot(soft.argmax(1), x.shape[1]).to(x) - soft.detach() + soft


def positive(x, y=None):
    return (x > 0).to(x)


masked_relu = function(lambda x: x * positive(x), lambda g, k: g * k, positive)
saved_output = function(torch.tanh, lambda g, k, y: g * (1 - y * y), saved=lambda x, y: (y,))
doubled = function(lambda x: 2 * x, lambda g, k: 2 * g)


def sharp_max(x):
    return torch.cat([torch.logsumexp(1e4 * x, 1, keepdim=True) / 1e4, x[:, 1:].sin()], 1)


def kink(name, title, make, layer="0", **facts):
    """Register a control: what `make` makes must be answered, as double backward does."""
    add("A1k", f"kink_{name}", title, make, layer, **{"truth": twin_truth(), "control": True, **facts})


#: (name, title, function, loss, data).
KINKED = [
    ("relu", "ReLU", torch.relu),
    ("leaky_relu", "LeakyReLU", F.leaky_relu),
    ("absolute", "|x|", torch.abs),
    ("clamp", "clamp", lambda x: x.clamp(-0.4, 0.5)),
    ("hardtanh", "hardtanh", F.hardtanh),
    ("relu6", "ReLU6", F.relu6),
    ("hardswish", "hardswish", F.hardswish),
    ("elu", "ELU (its second derivative jumps)", F.elu),
    ("sorted_features", "sort", lambda x: x.sort(1).values),
    ("top_k", "top-k", best_two),
    ("median", "median", medians),
    ("softshrink", "softshrink", lambda x: F.softshrink(x, 0.2)),
    ("rounded_part", "x + round(4x)/4 held fixed", lambda x: x.tanh() + ((4 * x).round() / 4).detach()),
    ("sign_gate", "sign(x)·x²", lambda x: x.sign() * x**2, MSE, values),
    ("high_frequency", "sin(40x)", lambda x: (40 * x).sin(), MSE, values),
    ("steep", "exp(3x)", lambda x: (3 * x).exp(), MSE, values),
    ("good_function", "autograd.Function with a right double backward", Cube.apply, MSE, values),
    ("dropped", "dropout", lambda x: F.dropout(x.tanh(), 0.4)),
    ("noise", "noise in the forward pass", lambda x: x.tanh() + 0.3 * torch.randn_like(x)),
    ("stopped", "stop-gradient", lambda x: x.tanh() * x.detach().sigmoid()),
    ("normalized_stop", "division by a detached norm", lambda x: x / x.detach().norm(dim=1, keepdim=True)),
    ("huber", "Huber loss", torch.tanh, nn.HuberLoss(delta=0.5), values),
    ("l1", "L1 loss", torch.tanh, nn.L1Loss(), values),
    ("smooth_l1", "smooth L1 loss", torch.tanh, nn.SmoothL1Loss(), values),
    ("quantile", "quantile loss", torch.sigmoid, quantile_loss, values),
    ("hinge", "hinge loss", torch.tanh, lambda o, t: margins(o, t).mean(), classes),
    ("squared_hinge", "squared hinge loss", torch.tanh, lambda o, t: margins(o, t).square().mean(), classes),
    ("own_target", "target that is the output held fixed", torch.tanh, against_itself, values),
]  # fmt: skip
#: Functions after which nothing else is unusual.
NEIGHBOURS = [
    ("masked_relu", "autograd.Function of ReLU that keeps its mask", masked_relu),
    ("saved_output", "autograd.Function of tanh that saves its output", saved_output),
    ("doubled", "autograd.Function 2x", lambda x: doubled(x).tanh()),
    ("sharp_softplus", "softplus with β = 1e5", lambda x: F.softplus(x, beta=1e5)),
    ("sharp_max", "logsumexp(1e4 x)/1e4", sharp_max),
    ("very_high_frequency", "sin(1000x)/1000", lambda x: (1000 * x).sin() / 1000),
    ("cold_softmax", "softmax(50x)", lambda x: (50 * x).softmax(1)),
    ("hard_gumbel", "hard softmax, straight through by detach", hard_softmax),
    ("rounded_through", "rounding, straight through by detach", lambda x: x + ((4 * x).round() / 4 - x).detach()),
    ("cube_root", "sign(x)|x|^1.5", lambda x: x.sign() * x.abs().pow(1.5)),
    ("random_leaks", "RReLU in training mode", lambda x: F.rrelu(x, training=True)),
    ("floor_division", "x − floor(x)", lambda x: x - x.floor()),
    ("where_branch", "torch.where of two formulas that meet",
        lambda x: torch.where(x > 0.1, x.exp() - 0.005, 1 + x.sin() + x**2)),
    ("argmax_branch", "Python branch on the argmax of a sample",
        lambda x: torch.stack([r.sin() if int(r.argmax()) else r.tanh() for r in x])),
    ("normalized_rows", "rows of norm 1", lambda x: F.normalize(x, dim=1)),
    ("checkerboard", "product of kinks |x|·relu(y)", lambda x: x.abs() * torch.relu(x.roll(1, 1))),
]  # fmt: skip


def add_kinks(rows):
    for name, title, own, *rest in rows:
        loss, data = rest or (CE, classes)
        kink(name, title, lambda own=own, loss=loss, data=data: (middle(own), loss, data()))


def relu_with(change):
    """A dense layer with changed parameters before ReLU and another layer."""
    model = middle(torch.relu)
    with torch.no_grad():
        change(model)
    return model


def rounded_weights(model):
    for p in model[0].parameters():
        p.copy_(p.mul(4).round())


def small_weights(model):
    for p in model[0].parameters():
        p.mul_(1e-6)


def mixed_scales(model):
    model[0].weight.mul_(1e3)
    model[2].weight.mul_(1e-4)


def dead_inputs():
    model = relu_with(lambda model: model[0].bias.zero_())
    x, y = classes()
    x[::3] = 0
    return model, CE, (x, y)


def large_inputs():
    x, y = values()
    return middle(torch.relu), scaled_loss(1e-30, MSE), (1e4 * x, y)


def wide_relu():
    layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), *layers, nn.Linear(12, 3))


def zero_layer():
    model = middle(F.leaky_relu)
    for p in model[0].parameters():
        nn.init.zeros_(p)
    return model, CE, classes()


add_kinks(KINKED)
kink("maxout", "maxout", lambda: (nn.Sequential(nn.Linear(4, 6), Applied(maxout), nn.Linear(3, 3)), CE, classes()))
kink("max_pooling", "max pooling",
    lambda: (nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)), CE,
             images(14, 1, 5)))  # fmt: skip
kink("exact_zeros", "ReLU at exact zeros: integers in float32",
    lambda: (relu_with(rounded_weights), CE,
             (torch.randint(-2, 3, (20, 4)).float(), torch.randint(0, 3, (20,)))))  # fmt: skip
kink("deep_relu", "deep ReLU network, 200 samples", lambda: (wide_relu(), CE, classes(200, 6)),
    levels=("unit", "network"))  # fmt: skip
kink("dead_inputs", "bias of zeros and dead inputs behind ReLU", dead_inputs)
kink("small_weights", "weights × 1e-6 behind ReLU", lambda: (relu_with(small_weights), CE, classes()))
kink("large_inputs", "inputs × 1e4 behind ReLU, squared error × 1e-30", large_inputs)
kink("norm_relu", "layer normalization and ReLU",
    lambda: (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)), CE, classes()))  # fmt: skip
kink("batch_norm", "batch normalization, training mode, and |x|",
    lambda: (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Applied(torch.abs), nn.Linear(5, 3)), CE,
             classes()))  # fmt: skip
kink("recurrent", "recurrent network with ReLU",
    lambda: (recurrent(functools.partial(nn.RNN, nonlinearity="relu")), CE, tokens(d=3)), "rnn", levels=LEVELS[1:],
    options={"layers": ["rnn", "head"]})  # fmt: skip
add_kinks(NEIGHBOURS)
kink("stale_inputs", "a stale function of the inputs, which reaches no parameter",
    lambda: (nn.Sequential(Applied(stale_square), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE,
             classes()))  # fmt: skip
kink("zero_layer", "a hidden layer of zeros before LeakyReLU", zero_layer, "2")
kink("many_samples", "wide ReLU network, 600 samples",
    lambda: (nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)), CE,
             classes(600, 5)), options={"layers": ["0", "2"]})  # fmt: skip
kink("mixed_scales", "weights of sizes 1e-4 and 1e3 behind ReLU, squared error",
    lambda: (relu_with(mixed_scales), MSE, values()))  # fmt: skip


def inner_gradient(own):
    """An output and its gradient in the inputs, which is not of the size of the loss."""

    def forward(m, x):
        x = x.detach().requires_grad_()
        h = m.out(own(m.first(x)))
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + 0.3 * g.square().sum(1, keepdim=True)

    return Net(forward, first=nn.Linear(4, 3), out=nn.Linear(3, 1))


for exponent in (-30, -16, -8, 30):
    for key, own in [("sine", torch.sin), ("hardtanh", F.hardtanh)]:
        add("A1k", f"inner_gradient_{key}_{exponent}",
            f"{key}, the gradient in the inputs in the output, loss × 1e{exponent}",
            lambda f=own, e=exponent: (inner_gradient(f), scaled_loss(10.0**e, MSE), values(20, 4, 1)),
            "first", truth=twin_truth(), control=True)  # fmt: skip


# --------------------------------------------------------------------------------------------- A2: H = 0


def small_classes():
    return classes(14, 4, 3)


def zero(name, title, net, loss=CE, data=small_classes, *, layers=("shift",), others=(), **facts):
    """Register a construction in which the rows of these layers, and these parameters, are exactly zero."""
    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")] + list(others)

    def truth(model, loss_fn, batch):
        there = dict(model.named_parameters())
        return TwinTruth(double(model), loss_fn, batch, zero=[one for one in names if one in there])

    facts.setdefault("layer", layers[0] if layers else "0")
    add("A2", name, title, lambda: (net(), loss, data()), truth=truth, **facts)


def shift(m, x):
    return m.net(x) + m.shift(x)


zero("softmax_shift", "a layer that shifts all logits alike",
    lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)))  # fmt: skip
zero("softmax_shift_deep", "a hidden and an output layer that shift all logits alike",
    lambda: Net(lambda m, x: m.net(x) + m.out(m.hidden(x).tanh()), net=nn.Linear(4, 3),
        hidden=nn.Linear(4, 3), out=nn.Linear(3, 1)), layers=["hidden", "out"])  # fmt: skip
zero("softmax_shift_only", "nothing but a shift of all logits: a network whose Hessian is zero",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(4, 1)))  # fmt: skip
for exponent in (-30, 30):
    zero(f"softmax_shift_{exponent}", f"a layer that shifts all logits alike, loss × 1e{exponent}",
        lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)), scaled_loss(10.0**exponent, CE))  # fmt: skip
zero("single_class", "cross-entropy of one class",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), data=lambda: classes(12, 4, 1),
    layers=["0", "2"])  # fmt: skip


def scale_free(m, x):
    return m.out(F.normalize(m.features(x).tanh() * m.scale(x.new_ones(1, 1)).exp(), dim=1))


zero("normalized_scale", "scale before a normalization",
    lambda: Net(scale_free, features=nn.Linear(4, 3), scale=nn.Linear(1, 1), out=nn.Linear(3, 3)),
    layers=["scale"])  # fmt: skip
zero("cosine_scale", "scale of one side of a cosine similarity",
    lambda: Net(lambda m, x: (3 * F.cosine_similarity(m.a(x)[:, None] * m.scale(x[:, :2]).exp()[:, :, None],
                m.b.weight[None], dim=2)), a=nn.Linear(4, 3), b=nn.Linear(3, 3), scale=nn.Linear(2, 1)),
    layers=["scale"])  # fmt: skip


def equal_values(m, x):
    tokens = m.value(x)[:, None].expand(-1, 4, -1)
    q, k = (
        m.query(x)[:, None] + torch.arange(4.0).to(x)[:, None],
        m.key(x)[:, None] * torch.linspace(1, 2, 4).to(x)[:, None],
    )
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ tokens).mean(1)


zero("equal_values", "queries and keys over equal values",
    lambda: Net(equal_values, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3),
        out=nn.Linear(3, 3)), layers=["query", "key"])  # fmt: skip


def keys(m, x):
    q, k, v = m.query(x), m.key(x), m.value(x)
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ v).mean(1)


zero("key_bias", "bias of the keys of an attention",
    lambda: Net(keys, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3),
        out=nn.Linear(3, 3)), data=lambda: (torch.randn(10, 3, 4), torch.randint(0, 3, (10,))), layers=[],
    others=["key.bias"], layer="key bias", levels=("layer",),
    options={"blocks": {"key bias": ["key.bias"]}})  # fmt: skip
zero("bias_before_batch_norm", "bias before batch normalization in training mode",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)), layers=[],
    others=["0.bias"], layer="bias", levels=("layer",), options={"blocks": {"bias": ["0.bias"]}})  # fmt: skip
zero("constant_into_batch_norm", "layer on constants before batch normalization in training mode",
    lambda: Net(lambda m, x: m.out(m.norm(m.constant(torch.ones_like(x)) + m.own(x))),
        constant=nn.Linear(4, 3), own=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 3)),
    layers=["constant"])  # fmt: skip
zero("shift_before_layer_norm", "a shift of all features before layer normalization",
    lambda: Net(lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))), own=nn.Linear(4, 3),
        shift=nn.Linear(4, 1), norm=nn.LayerNorm(3), out=nn.Linear(3, 3)))  # fmt: skip
zero("dueling_one_action", "dueling head with one action: its advantage",
    lambda: Net(lambda m, x: m.value(x) + m.advantage(x) - m.advantage(x).mean(1, keepdim=True),
        value=nn.Linear(4, 1), advantage=nn.Linear(4, 1)), MSE, lambda: values(14, 4, 1),
    layers=["advantage"])  # fmt: skip


def dueling(m, x):
    h = m.trunk(x).tanh()
    advantage = m.advantage(h)
    return m.value(h) + advantage - advantage.mean(1, keepdim=True)


zero("dueling_policy", "dueling head, its value behind a softmax policy",
    lambda: Net(dueling, trunk=nn.Linear(4, 3), advantage=nn.Linear(3, 3), value=nn.Linear(3, 1)),
    layers=["value"])  # fmt: skip
zero("softmax_sum", "sum of a softmax", lambda: nn.Sequential(nn.Linear(4, 3)),
    lambda o, t: (o.softmax(1).sum(1) - 1.5).square().mean(), layers=["0"])  # fmt: skip
zero("sine_and_cosine", "sin² + cos²", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.sin() ** 2 + o.cos() ** 2).mean(), layers=["0"])  # fmt: skip
zero("logarithm_of_exponential", "log(exp(z)) − 2z", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.exp().log() - 2 * o).mean(), layers=["0"])  # fmt: skip
zero("softplus_difference", "softplus(z) − softplus(−z), which is z",
    lambda: nn.Sequential(nn.Linear(4, 2)), lambda o, t: (F.softplus(o) - F.softplus(-o)).mean(),
    layers=["0"])  # fmt: skip
zero("odd_pairs", "tanh(z) + tanh(−z) behind a hidden layer",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 2)),
    lambda o, t: (o.tanh() + (-o).tanh() + 0.1).mean(), layers=["0", "2"])  # fmt: skip
zero("ratio", "a ratio of equal quantities", lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
    lambda o, t: (o / o.sum(1, keepdim=True)).sum(1).mean(), layers=["0"])  # fmt: skip
zero("linear_loss", "loss linear in the outputs", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: o.mean(), layers=["0"])  # fmt: skip
zero("l1_output", "L1 loss of a linear model", lambda: nn.Sequential(nn.Linear(4, 3)), nn.L1Loss(),
    lambda: values(14, 4, 3), layers=["0"])  # fmt: skip


def opposed():
    """Every sample twice."""
    x, y = small_classes()
    return torch.cat([x, x]), torch.cat([y, y])


def opposed_loss(output, target):
    sign = torch.ones(len(output), dtype=output.dtype)
    sign[len(output) // 2 :] = -1
    return (sign * F.cross_entropy(output, target, reduction="none")).sum()


zero("opposed_samples", "every sample twice, with weights +1 and −1",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), opposed_loss, opposed,
    layers=["0", "2"])  # fmt: skip


def two_sources(output, target):
    """The same sum in two orders of operations."""
    p = output.log_softmax(1)
    return (output.logsumexp(1) - output[:, 0] + p[:, 0]).mean()


zero("two_formulas", "a loss minus itself by another formula", lambda: nn.Sequential(nn.Linear(4, 3)),
    two_sources, layers=["0"])  # fmt: skip
zero("shift_float64_wide", "a layer that shifts 40 logits alike, features over six decades, float64",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x), net=nn.Linear(4, 40), shift=nn.Linear(4, 1)).double(),
    data=lambda: (torch.randn(30, 4).double() * torch.tensor([1e-3, 1, 1e3, 1]).double(),
        torch.randint(0, 40, (30,))), levels=("unit", "layer"), options={"layers": ["shift"]})  # fmt: skip


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

    add("A2", f"curved_{curved}_scale_{scale}",
        f"{14 - curved} of 14 samples without curvature, features over {2 * scale} decades"
        + ("" if curved else ", and an empty part of the loss"),
        curved_make, truth=formula_truth(masked_formula(curved)))  # fmt: skip
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
    add("A2c", f"scaled_{exponent}", f"loss × 1e{exponent}",
        lambda e=exponent: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
            scaled_loss(10.0**e, CE), classes()), truth=lambda m, f, b: ScaledTwin(m, b), control=True)  # fmt: skip


class ScaledTwin(TwinTruth):
    """Of a loss times a number: κ is that of the loss."""

    def __init__(self, model, batch):
        super().__init__(double(model), CE, batch)


def nearly_shift(m, x):
    return m.net(x) + m.shift(x) * (1 + 1e-3 * torch.arange(3.0).to(x))


add("A2c", "nearly_shift", "logits shifted alike to a thousandth",
    lambda: (Net(nearly_shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)).double(), CE,
        (torch.randn(14, 4).double(), torch.randint(0, 3, (14,)))), layer="shift", truth=twin_truth(),
    control=True)  # fmt: skip


def batch_norm_formula(mp, own, rows):
    """One output, batch normalization with ε = 1e-3, sine."""
    z = (rows @ own["0.weight"].T)[:, 0]
    mean = sum(z) / len(z)
    variance = sum((one - mean) ** 2 for one in z) / len(z)
    scale = 1 / mp.sqrt(variance + mp.mpf(1e-3))
    return sum(mp.sin((one - mean) * scale + number) for number, one in enumerate(z)) / len(z)


def sine_loss(output, target):
    return (output + torch.arange(len(output)).to(output)[:, None]).sin().mean()


def one_output(inputs, factor=1.0):
    model = nn.Sequential(nn.Linear(inputs, 1, bias=False), nn.BatchNorm1d(1, eps=1e-3, affine=False)).double()
    return model, sine_loss, (factor * torch.randn(9, inputs).double(), torch.zeros(9, 1).double())


for inputs, title in [(1, "one weight before batch normalization with ε = 1e-3"), (3, "three weights before it")]:
    add("A2c", f"norm_epsilon_{inputs}", title, functools.partial(one_output, inputs),
        truth=formula_truth(batch_norm_formula), control=True)  # fmt: skip
KINDS += [
    elementwise("cross-entropy of one logit between 10 and 30", "confident", "A2c", F.softplus,
        lambda mp, z: mp.log1p(mp.exp(z)), lambda: -10 - 20 * torch.rand(12, 1), weight=[1.0], control=True),
    elementwise("features × 1e-8", "tiny_features", "A2c", torch.square, lambda mp, z: z * z,
        lambda: 1e-8 * torch.randn(12, 3), control=True),
]  # fmt: skip


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
    "log_cosh": ("log(cosh z), |z| of 2 to 12", lambda z: z.cosh().log(), lambda mp, z: mp.log(mp.cosh(z)),
        (2, 12, 10, True)),
    "log_cosh_far": ("log(cosh z), |z| of 20 to 35", lambda z: z.cosh().log(),
        lambda mp, z: mp.log(mp.cosh(z)), (20, 35, 10, True)),
    "log_cosh_softplus": ("z + softplus(−2z) − log 2, z of 5 to 35",
        lambda z: z + F.softplus(-2 * z) - 0.6931471805599453, lambda mp, z: mp.log(mp.cosh(z)), (5, 35)),
    "log_exp": ("log(1 + exp z), z of 5 to 34", lambda z: (1 + z.exp()).log(),
        lambda mp, z: mp.log1p(mp.exp(z)), (5, 34)),
    "log1p_exp": ("log1p(exp z), z of 20 to 35", lambda z: z.exp().log1p(),
        lambda mp, z: mp.log1p(mp.exp(z)), (20, 35)),
    "log1p_exp_left": ("log1p(exp z), z of −35 to −20", lambda z: z.exp().log1p(),
        lambda mp, z: mp.log1p(mp.exp(z)), (-35, -20)),
    "softplus": ("softplus, z of 8 to 20", F.softplus, linear_softplus, (8, 20)),
    "softplus_linear": ("softplus, z of 15 to 36: torch's is linear above 20", F.softplus, linear_softplus,
        (15, 36)),
    "logsumexp": ("logsumexp(0, z), z of 15 to 36",
        lambda z: torch.stack([z, torch.zeros_like(z)]).logsumexp(0), lambda mp, z: mp.log1p(mp.exp(z)),
        (15, 36)),
    "logaddexp": ("logaddexp(0, z), z of 15 to 36", lambda z: torch.logaddexp(z, torch.zeros_like(z)),
        lambda mp, z: mp.log1p(mp.exp(z)), (15, 36)),
    "minus_log_sigmoid": ("−log σ(z), z of 15 to 36", lambda z: -z.sigmoid().log(),
        lambda mp, z: mp.log1p(mp.exp(-z)), (15, 36)),
    "linex": ("exp z − 1 − z, z of −36 to −10", lambda z: z.exp() - 1 - z, lambda mp, z: mp.exp(z) - 1 - z,
        (-36, -10)),
    "mish_right": ("Mish as a loss, z of 8 to 25", F.mish, mish, (8, 25)),
    "mish_far": ("Mish as a loss, z of 20 to 35", F.mish, mish, (20, 35)),
    "silu_right": ("SiLU as a loss, z of 8 to 25", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (8, 25)),
    "silu_far": ("SiLU as a loss, z of 25 to 38", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (25, 38)),
    "silu_left": ("SiLU as a loss, z of −38 to −20", F.silu, lambda mp, z: z / (1 + mp.exp(-z)), (-38, -20)),
    "gelu_right": ("GELU as a loss, z of 3 to 9", F.gelu, lambda mp, z: z * mp.ncdf(z), (3, 9)),
    "pseudo_huber": ("√(1 + z²) − 1, |z| of 1e3 to 1e6", lambda z: (1 + z.square()).sqrt() - 1,
        lambda mp, z: mp.sqrt(1 + z * z) - 1, (1e3, 1e6, 10, True)),
    "charbonnier": ("√(1e-12 + z²), |z| of 1e-3 to 10", lambda z: (1e-12 + z.square()).sqrt(),
        lambda mp, z: mp.sqrt(mp.mpf(1e-12) + z * z), (1e-3, 10, 10, True)),
    "cauchy": ("log(1 + z²), |z| of 10 to 1e4", lambda z: z.square().log1p(), lambda mp, z: mp.log1p(z * z),
        (10, 1e4, 10, True)),
    "tanh_loss": ("tanh as a loss, z of 8 to 18", torch.tanh, lambda mp, z: mp.tanh(z), (8, 18)),
    "tanh_far": ("tanh as a loss, z of 17 to 24", torch.tanh, lambda mp, z: mp.tanh(z), (17, 24)),
    "sigmoid_far": ("sigmoid as a loss, z of 30 to 45", torch.sigmoid, lambda mp, z: 1 / (1 + mp.exp(-z)),
        (30, 45)),
    "arctan": ("arctan, z of 1e3 to 1e6", torch.atan, lambda mp, z: mp.atan(z), (1e3, 1e6)),
    "arctan_error": ("z·arctan z − log(1 + z²)/2, |z| of 10 to 1e4",
        lambda z: z * z.atan() - z.square().log1p() / 2, lambda mp, z: z * mp.atan(z) - mp.log1p(z * z) / 2,
        (10, 1e4, 10, True)),
    "softsign": ("|z| − log(1 + |z|), z of 1e3 to 1e7", lambda z: z.abs() - z.abs().log1p(),
        lambda mp, z: abs(z) - mp.log1p(abs(z)), (1e3, 1e7)),
    "erf_loss": ("erf as a loss, z of 3 to 7", torch.erf, lambda mp, z: mp.erf(z), (3, 7)),
    "small_cosine": ("1 − cos z, z of 1e-9 to 1e-7", lambda z: 1 - z.cos(), lambda mp, z: 1 - mp.cos(z),
        (1e-9, 1e-7)),
    "quartic": ("exp(z²/2) − 1 − z²/2, z of 1e-4 to 1e-2",
        lambda z: (z.square() / 2).exp() - 1 - z.square() / 2,
        lambda mp, z: mp.exp(z * z / 2) - 1 - z * z / 2, (1e-4, 1e-2)),
    "sinh_difference": ("sinh z − z, z of 1e-6 to 1e-3", lambda z: z.sinh() - z,
        lambda mp, z: mp.sinh(z) - z, (1e-6, 1e-3)),
    "cosh_difference": ("cosh z − z²/2, z of 1e-6 to 1e-3", lambda z: z.cosh() - z.square() / 2,
        lambda mp, z: mp.cosh(z) - z * z / 2, (1e-6, 1e-3)),
    "itakura_saito": ("exp(−z) + z − 1, z of 10 to 36", lambda z: (-z).exp() + z - 1,
        lambda mp, z: mp.exp(-z) + z - 1, (10, 36)),
    "elu_left": ("ELU as a loss, z of −36 to −10", F.elu, lambda mp, z: mp.expm1(z), (-36, -10)),
    "squared_tanh": ("tanh², z of 5 to 18", lambda z: z.tanh().square(), lambda mp, z: mp.tanh(z) ** 2,
        (5, 18)),
    "one_minus_sigmoid": ("−log(1 − σ(z)), z of 5 to 30", lambda z: -(1 - z.sigmoid()).log(),
        lambda mp, z: mp.log1p(mp.exp(z)), (5, 30)),
    "focal": ("focal loss (1 − p)² log p, z of 8 to 18",
        lambda z: -(1 - z.sigmoid()).square() * F.logsigmoid(z),
        lambda mp, z: mp.log1p(mp.exp(-z)) / (1 + mp.exp(z)) ** 2, (8, 18)),
    "welsch": ("1 − exp(−z²/2), z of 0.999 to 1.001", lambda z: 1 - (-z.square() / 2).exp(),
        lambda mp, z: 1 - mp.exp(-z * z / 2), (0.999, 1.001)),
    "inflection": ("sin z near its inflection, z of π − 1e-9 to π + 2e-9", torch.sin,
        lambda mp, z: mp.sin(z), (3.141592652589793, 3.141592655589793)),
    "softplus_squared": ("z²/2 − z·softplus(z), z of 5 to 20",
        lambda z: z.square() / 2 - z * F.softplus(z) / 2,
        lambda mp, z: z * z / 2 - z * linear_softplus(mp, z) / 2, (5, 20)),
}  # fmt: skip


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
    "tanh_two": ("tanh = ±1 in two columns", torch.tanh, lambda mp, x: mp.tanh(x),
        columns((20, 30), (-30, -20), (-1, 1))),
    "tanh_edge": ("tanh of 18 to 20", torch.tanh, lambda mp, x: mp.tanh(x), columns((18, 20), (-1, 1))),
    "tanh_near": ("tanh of 10 to 14", torch.tanh, lambda mp, x: mp.tanh(x), columns((10, 14), (-1, 1))),
    "sigmoid_one": ("sigmoid = 1 in two columns", torch.sigmoid, sigmoid,
        columns((38, 60), (40, 50), (-1, 1))),
    "sigmoid_zero": ("sigmoid of −60 to −40 (tiny and exact)", torch.sigmoid, sigmoid,
        columns((-60, -40), (-1, 1))),
    "erf_one": ("erf = 1 in one column", torch.erf, lambda mp, x: mp.erf(x), columns((6, 9), (-1, 1))),
    "cosine_one": ("cos of 1e-10 to 1e-9", torch.cos, lambda mp, x: mp.cos(x),
        columns((1e-10, 1e-9), (-1, 1))),
    "exponential_one": ("exp of 1e-19 to 1e-17", torch.exp, lambda mp, x: mp.exp(x),
        columns((1e-19, 1e-17), (-1, 1))),
    "repeated": ("two columns equal by rounding", lambda x: 1e9 + x * torch.tensor([1e-9, 2e-9, 1e9]).to(x),
        None, columns((-1, 1), (-1, 1), (-1, 1))),
    "sine_and_identity": ("sin x and x, x of 1e-9",
        lambda x: torch.cat([x[:, :1].sin(), x[:, :1], x[:, 2:]], 1), None,
        columns((1e-9, 2e-9), (0, 1), (-1, 1))),
    "logarithm": ("log(1 + x), x of 1e-18 to 1e-17, beside a column", lambda x: (1 + x).log(),
        lambda mp, x: mp.log(1 + x), columns((1e-18, 1e-17), (0, 1))),
    "softplus_zero": ("softplus of −800 to −750", F.softplus, lambda mp, x: mp.log1p(mp.exp(x)),
        columns((-800, -750), (-1, 1))),
}  # fmt: skip


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


for key, (title, own, exact, inputs) in FEATURES.items():
    if exact is None:
        whole = {"repeated": repeated_exactly, "sine_and_identity": sine_exactly}[key]
        of_rows(f"features_{key}", title, own, whole, inputs)
    else:
        rounded_features(f"features_{key}", title, own, exact, inputs)
rounded_features("features_clamped", "clamp: columns that are constant exactly", lambda x: x.clamp(-1, 1),
    lambda mp, x: max(mp.mpf(-1), min(mp.mpf(1), x)), columns((2, 3), (-3, -2), (-1, 1)), control=True)  # fmt: skip
rounded_features("features_layer", "tanh = 1 in one column, two outputs", torch.tanh,
    lambda mp, x: mp.tanh(x), columns((20, 50), (-1, 1)), outputs=2)  # fmt: skip


# ----------------------------------------------------------------- A5: optimizers that hold some layers


def adam_root(state, group):
    return (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]


#: √M of each optimizer from its state.
ROOTS = {
    "Adam": adam_root,
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


def held(name, title, options, layer="0", make=tanh_net, **facts):
    """Register a construction whose optimizer holds some of its layers."""
    add("A5", name, title, make, layer, truth=held_truth, options=options, **facts)


held("adam_last", "Adam of the last layer", stepped("Adam", ["4.*"]), "4")
held("adam_first", "Adam of the first layer", stepped("Adam", ["0.*"]))
held("adam_two", "Adam of two of three layers", stepped("Adam", ["0.*", "2.*"]), "2")
held("adam_no_bias", "Adam of weights only", stepped("Adam", ["*.weight"]))
held("adam_bias_only", "Adam of biases only", stepped("Adam", ["*.bias"]))
held("adam_one_bias_missing", "Adam of all but one bias", stepped("Adam", ["0.*", "2.weight", "4.*"]), "2")
held("adam_without_norm", "Adam of all but a normalization", stepped("Adam", ["0.*", "3.*"]), make=norm_net)
held("adam_norm_only", "Adam of a normalization only", stepped("Adam", ["1.*"]), "1", norm_net)
held("adam_named", "Adam of the last layer, the first one named", named(stepped("Adam", ["4.*"]), layers=["0"]))
held("adam_both_named", "Adam of the last layer, two named", named(stepped("Adam", ["4.*"]), layers=["0", "4"]), "4")
for kind in ("AdamW", "RMSprop", "Adagrad", "SGD"):
    held(f"{kind.lower()}_last", f"{kind} of the last layer", stepped(kind, ["4.*"]), "4")
held("two_adams", "two Adams of two of three layers", stepped("Adam", ["0.*", "4.*"], several=True))
held("all_held", "Adam of all layers", stepped("Adam", ["*"]), control=True)
held("adam_in_a_block", "Adam of the last layer, named in a block with the first",
    named(stepped("Adam", ["4.*"]), blocks={"both": ["0.weight", "4.weight"]}), "both", levels=("layer",))  # fmt: skip


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
    "two_at_the_top": ("400 below 1, two at 2 and 2.0005",
        lambda rng: np.append(rng.random(400), [2, 2.0005]), "top"),
    "cluster": ("a cluster of ten within 1e-3 at the top",
        lambda rng: np.append(rng.random(500), 2 + 1e-3 * rng.random(10)), "top"),
    "both_signs": ("400 between −2 and 2", lambda rng: 4 * rng.random(400) - 2, "magnitude"),
    "opposite": ("2 and −2.0003 at the ends", lambda rng: np.append(rng.random(400), [2, -2.0003]),
        "magnitude"),
    "semicircle": ("a semicircle of 500", lambda rng: 2 + np.cos(3.14159 * rng.random(500)), "top"),
}  # fmt: skip
for key, (title, spectrum, which) in TOPS.items():
    add("A6", f"top_{key}", f"λ_max: {title}, 72 seeds", lambda: None, "network", truth=None,
        levels=("network",), judge=top_by_seed(spectrum, which))  # fmt: skip


def iterated(spectrum, seeds=3):
    """A judge: κ by iterations, of matrices that are not formed."""

    def judge(one, level, first=0):
        from hesscond.operators import as_operator
        from hesscond.spectra.forms import SolverLimits, operator_condition

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
    add("A6", f"iterated_{key}", f"κ by iterations: {title}", lambda: None, "network", truth=None,
        levels=("network",), judge=iterated(spectrum))  # fmt: skip


class FewSamples:
    """The eigenvalues of 2XᵀX/N of a linear model with squared error, from XXᵀ."""

    def __init__(self, batch):
        self.rows = batch[0].double()

    def spectrum(self, own, unit):
        found = torch.linalg.eigvalsh(2 / len(self.rows) * self.rows @ self.rows.T).flip(0).tolist()
        return Spectrum(found + [0.0] * (own.n_params - len(found)))


add("A6", "few_samples", "1,200 weights and 30 samples",
    lambda: (nn.Sequential(nn.Linear(1200, 1, bias=False)), MSE, values(30, 1200, 1)),
    truth=lambda m, f, b: FewSamples(b), levels=("network",))  # fmt: skip


# ----------------------------------------------------------------- A7: units of weights stored (in, out)


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


def stored(name, title, apply, shape=(4, 4), bias=4, axis=1, *, data=None, own_bias=True, **facts):
    """Register a construction with a weight stored in some order; its level unit may be refused."""
    inputs = shape[1] if axis == 0 else shape[0]

    def make():
        layer = Net(apply, weight=nn.Parameter(torch.randn(shape) * 0.5),
                    bias=nn.Parameter(torch.randn(bias) * 0.3) if bias else None)  # fmt: skip
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(bias or 4, 3))
        return model, CE, (data or functools.partial(classes, 24, inputs))()

    def truth(model, loss_fn, batch):
        return UnitTruth(double(model), loss_fn, batch, axis=axis, own_bias=own_bias)

    add("A7", f"unit_{name}", title, make, truth=truth, options={"layers": ["0", "2"]}, **facts)


class Transposed(nn.Linear):
    def forward(self, x):
        return x @ self.weight + self.bias


ADJACENCY = (torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) > 0.8).float() + torch.eye(24)


def in_out(m, x):
    return x @ m.weight + m.bias


def in_out_alone(m, x):
    return x @ m.weight


def neighbours_sum(m, x):
    return ADJACENCY.to(x) @ (x @ m.weight) + m.bias


def bmm(m, x):
    return torch.bmm(x[:, None], m.weight.expand(len(x), 4, 4))[:, 0] + m.bias


def other_map(m, x):
    return (x @ m.weight) @ torch.linspace(-1, 1, 16).view(4, 4).to(x).cos() + m.bias


def permuted(m, x):
    return (x @ m.weight)[:, [2, 0, 3, 1]] + m.bias[[2, 0, 3, 1]]


stored("in_out", "x @ W + b, 5 → 4", in_out, (5, 4))
stored("in_out_square", "x @ W + b, 4 → 4", in_out)
stored("in_out_no_bias", "x @ W, 5 → 4", in_out_alone, (5, 4), 0)
stored("in_out_no_bias_square", "x @ W, 4 → 4", in_out_alone, bias=0)
stored("addmm", "addmm, 4 → 4", lambda m, x: torch.addmm(m.bias, x, m.weight))
stored("einsum_in_out", "einsum ni,io", lambda m, x: torch.einsum("ni,io->no", x, m.weight) + m.bias)
stored("einsum_out_in", "einsum ni,oi (out, in)", lambda m, x: torch.einsum("ni,oi->no", x, m.weight) + m.bias, axis=0)
stored("linear_of_transposed", "F.linear with Wᵀ", lambda m, x: F.linear(x, m.weight.T, m.bias))
stored("transposed_product", "(Wᵀ xᵀ)ᵀ + b", lambda m, x: (m.weight.T @ x.T).T + m.bias)
stored("graph_layer", "A (x W) + b of a graph", neighbours_sum)
stored("graph_layer_wide", "A (x W) + b of a graph, 5 → 3", neighbours_sum, (5, 3), 3)
stored("heads", "einsum of heads (in, head, out)",
    lambda m, x: torch.einsum("ni,iho->nho", x, m.weight).flatten(1), (5, 2, 2), 0)  # fmt: skip
stored("plain_order", "x @ Wᵀ + b (out, in)", lambda m, x: x @ m.weight.T + m.bias, (4, 5), axis=0, control=True)
stored("plain_linear", "F.linear in a module of one's own", lambda m, x: F.linear(x, m.weight, m.bias), axis=0,
    control=True)  # fmt: skip
stored("scaled_in_out", "x @ (0.5 W) + b", lambda m, x: x @ (0.5 * m.weight) + m.bias)
stored("squared_in_out", "x @ W² + b", lambda m, x: x @ m.weight.square() + m.bias)
stored("sequence_in_out", "x @ W + b of sequences", lambda m, x: in_out(m, x).mean(1), data=lambda: tokens(12, 3))
stored("batched_product", "bmm with an expanded W", bmm)
stored("outer_sum", "(x[:, :, None] · W).sum(1) + b", lambda m, x: (x[:, :, None] * m.weight).sum(1) + m.bias)
add("A7", "unit_transposed_linear", "a Linear whose forward applies its weight transposed",
    lambda: (nn.Sequential(Transposed(4, 4), nn.Tanh(), nn.Linear(4, 3)), CE, classes(24)),
    truth=lambda m, f, b: UnitTruth(double(m), f, b, axis=1))  # fmt: skip
stored("then_matrix", "(x @ W) C + b: the bias is of another map", other_map, own_bias=False)
stored("input_bias", "(x + b) @ W: the bias is of the inputs", lambda m, x: (x + m.bias) @ m.weight, own_bias=False)
stored("symmetric", "x @ (W + Wᵀ): no weight belongs to one output", lambda m, x: x @ (m.weight + m.weight.T), bias=0,
    axis=None)  # fmt: skip
stored("both_ways", "x @ W + x @ Wᵀ behind a nonlinearity: rows and columns",
    lambda m, x: (x @ m.weight).tanh() + x.sin() @ m.weight.T, bias=0, axis=None)  # fmt: skip
stored("permuted", "x @ W with its outputs in another order", permuted, own_bias="either")
stored("matmul_vector", "a loop over samples: W.T @ x_n",
    lambda m, x: torch.stack([m.weight.T @ row for row in x]) + m.bias)  # fmt: skip
stored("two_times", "x @ W, then another tanh and @ W again",
    lambda m, x: ((x @ m.weight).tanh() @ m.weight) + m.bias)  # fmt: skip


# ----------------------------------------------------------------- meaner neighbours of A2


def net_shift():
    return Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1))


zero("softmax_shift_float32", "a layer that shifts all logits alike, in float32", net_shift,
    options={"dtype": None, "layers": ["shift"]}, levels=("unit", "layer"))  # fmt: skip
zero("softmax_shift_adam", "a layer that shifts all logits alike, in coordinates of Adam", net_shift,
    options=named(stepped("Adam", ["*"]), layers=["shift"]))  # fmt: skip
KINDS[-1] = dataclasses.replace(
    KINDS[-1], truth=lambda m, f, b, o: TwinTruth(double(m), f, b, zero=["shift.weight", "shift.bias"])
)
zero("softmax_shift_products", "nothing but a shift of 50 logits, 12 products",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(30, 1)),
    data=lambda: classes(14, 30, 3), levels=("network",), options={"products": 12})  # fmt: skip
zero("softmax_shift_large", "a shift of logits between ±300",
    lambda: Net(lambda m, x: 300 * m.net(x) + 30 * m.shift(x), net=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    options={"layers": ["shift"]})  # fmt: skip
zero("thousand_classes", "a shift of 300 logits",
    lambda: Net(lambda m, x: torch.linspace(-1, 1, 300).to(x) + m.shift(x), shift=nn.Linear(4, 1)),
    data=lambda: classes(20, 4, 300))  # fmt: skip
zero("pairwise_ranking", "a shift of all scores in a pairwise ranking loss",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x.mean(0, keepdim=True)), net=nn.Linear(4, 1),
        shift=nn.Linear(4, 1)), lambda o, t: F.softplus(o - o.T).mean(), lambda: values(8, 4, 1))  # fmt: skip
zero("contrastive_shift", "InfoNCE: a shift of all similarities of a row",
    lambda: Net(lambda m, x: F.normalize(m.a(x), dim=1) @ F.normalize(m.b(x), dim=1).T + m.shift(x),
        a=nn.Linear(4, 3), b=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    lambda o, t: F.cross_entropy(o, torch.arange(len(o))), lambda: values(8, 4, 1))  # fmt: skip
zero("instance_norm", "a bias of channels before instance normalization",
    lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2), nn.Flatten(), nn.Linear(18, 3)),
    data=lambda: (torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))), layers=[], others=["0.bias"],
    layer="bias", levels=("layer",), options={"blocks": {"bias": ["0.bias"]}})  # fmt: skip
zero("group_norm_shift", "a shift of all channels before group normalization",
    lambda: Net(lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))), own=nn.Linear(4, 4),
        shift=nn.Linear(4, 1), norm=nn.GroupNorm(1, 4), out=nn.Linear(4, 3)))  # fmt: skip
zero("difference_of_twins", "a layer times zero: f(z) − f(z) by two orders of a sum",
    lambda: Net(lambda m, x: m.net(x) + twin_sum(m.part(x)), net=nn.Linear(4, 3), part=nn.Linear(4, 3)),
    layers=["part"])  # fmt: skip
zero("average_of_logits", "logits minus their mean: a shift again",
    lambda: Net(lambda m, x: (m.net(x) + m.shift(x)) - (m.net(x) + m.shift(x)).mean(1, keepdim=True),
        net=nn.Linear(4, 3), shift=nn.Linear(4, 1)))  # fmt: skip
zero("zero_part_of_units", "softmax shift by one of two output units",
    lambda: Net(lambda m, x: x[:, :3] + m.two(x)[:, :1] + 0 * m.two(x)[:, 1:], two=nn.Linear(4, 2)),
    layers=["two"])  # fmt: skip


def twin_sum(z):
    f = z.exp()
    return (f[:, :1] + f[:, 1:2] + f[:, 2:]) - (f[:, 2:] + (f[:, 1:2] + f[:, :1]))


for power in (1, 3, 5):
    add("A2", f"norm_epsilon_e{power}",
        f"one weight on inputs of 1e{power} before batch normalization with ε = 1e-3",
        functools.partial(one_output, 1, 10.0**power),
        truth=formula_truth(batch_norm_formula, terms=20.0))  # fmt: skip


# ----------------------------------------------------------------- meaner neighbours of A3 and A4

#: Ranges of three samples.
THREE = {
    "log_cosh": (1, 17), "log_exp": (1, 33), "silu_right": (2, 36), "mish_right": (1, 19), "tanh_loss": (1, 18),
    "sigmoid_far": (1, 36), "linex": (-36, -1), "gelu_right": (1, 8), "erf_loss": (1, 5.8), "squared_tanh": (1, 17),
    "charbonnier": (1e-6, 1), "cauchy": (1.01, 1e7), "log_cosh_softplus": (1, 18), "softplus_squared": (1, 19),
}  # fmt: skip
for key, (low, high) in THREE.items():
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


for key, title, own, exact in [
    ("softmax", "softmax, whose columns add up to 1", lambda x: x.softmax(1), softmax_rows),
    ("centred", "centred features, which add up to 0", lambda x: x - x.mean(1, keepdim=True), centred_rows),
    ("complement", "x and 1 − x", lambda x: torch.cat([x[:, :1], 1 - x[:, :1], x[:, 2:]], 1), plus_minus),
    ("sum", "x, y and x + y", lambda x: torch.cat([x[:, :2], x[:, :1] + x[:, 1:2]], 1), summed),
    ("sine_cosine", "sin² and cos²", lambda x: torch.cat([x[:, :1].sin() ** 2, x[:, :1].cos() ** 2,
                x[:, 2:]], 1), squares),
    ("twice", "a column twice", lambda x: torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1), twice),
]:  # fmt: skip
    of_rows(f"features_{key}", f"features that depend exactly: {title}", own, exact,
        columns((-1, 1), (-1, 1), (-1, 1)))  # fmt: skip


# by group, as on the page
KINDS.sort(key=lambda one: list(GROUPS).index(one.trust))

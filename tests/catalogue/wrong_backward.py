"""Second derivatives that are not those of the gradient: a backward that is cut, or keeps an intermediate."""

import functools

import numpy as np
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

from tests.catalogue.cases import add, double
from tests.catalogue.parts import (
    CE,
    MSE,
    Applied,
    Net,
    changed,
    classes,
    images,
    middle,
    replaced,
    scaled_loss,
    tokens,
    values,
    with_functions,
)
from tests.catalogue.truths import Truth, stream_truth

GROUP = "Second derivatives that are not those of the gradient"
row = functools.partial(add, GROUP, close=None)


def with_loss(loss):
    """The truth of another loss, that says the same by operations of torch."""
    return lambda model, loss_fn, batch, options: Truth(double(model), loss, batch)


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


def looped(x):
    """Sine of sine of sine, of which torch has another second derivative."""
    return while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z.sin()), (torch.tensor(0), x))[1]


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
    ("while_loop", "torch's while_loop", looped, lambda x: x.sin().sin().sin()),
    ("stale_one_sample", "sine, stale at one sample", lambda x: torch.cat([stale_sine(x[:1]), x[1:].sin()]), torch.sin),
    ("fused_layer_norm", "fused layer normalization",
        function(normalized_by_hand, layer_norm_backward, rows_and_scale), normalized),
    ("fused_rms_norm", "fused RMS normalization, 1/rms kept",
        function(root_mean_square, lambda g, k, x: k * g - k**3 * x * (g * x).mean(-1, keepdim=True),
            lambda x, y: inverse_rms(x).detach(), lambda x, y: (x,)), root_mean_square),
]  # fmt: skip


for key, title, stale, plain in STALE:
    twin, borderline = with_functions({"1": plain}), key == "fused_layer_norm"
    row(key, title, lambda f=stale: (middle(f), CE, classes()), twin=twin, borderline=borderline)

fused_entropy = function(
    F.cross_entropy,
    lambda g, k: (g * k, None),
    lambda z, t, y: (z.softmax(1) - F.one_hot(t, z.shape[1])).detach() / len(z),
)
fused_squares = function(
    lambda z, t: (z - t).square().mean(), lambda g, k: (2 * g * k / k.numel(), None), lambda z, t, y: (z - t).detach()
)


row("fused_cross_entropy", "fused cross-entropy",
    lambda: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_entropy, classes()),
    truth=with_loss(CE))  # fmt: skip


def fused_cross_entropy_alone():
    x, y = classes()
    return nn.Sequential(nn.Linear(4, 3)).double(), fused_entropy, (x.double(), y)


row("fused_cross_entropy_alone", "fused cross-entropy, float64, one layer", fused_cross_entropy_alone,
    truth=with_loss(CE))  # fmt: skip


row("fused_squared_error", "fused squared error behind tanh",
    lambda: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), fused_squares, values()),
    truth=with_loss(MSE))  # fmt: skip


def two_factors(multiply):
    """The product of two layers."""
    return Net(lambda m, x: m.multiply(m.a(x), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3), multiply=multiply)


def weighted(own):
    """A function of inputs and a weight of its own, between two layers."""
    return Net(lambda m, x: m.head(m.own(m.first(x), m.weight)), first=nn.Linear(4, 3), head=nn.Linear(3, 3),
               weight=nn.Parameter(torch.randn(3, 3)), own=own)  # fmt: skip


detached_product = function(torch.mul, lambda g, k: (g * k[1], g * k[0]), lambda a, b, y: (a.detach(), b.detach()))
row("detached_product", "a·b with both factors kept: wrong in both layers together only",
    lambda: (two_factors(detached_product), CE, classes()), "a",
    twin=replaced(multiply=torch.mul))  # fmt: skip


def tanh_of_product(x, weight):
    return torch.tanh(x @ weight.T)


def fused_linear_tanh_backward(g, y, x, weight):
    inner = g * (1 - y**2)
    return inner @ weight, inner.T @ x


fused_linear_tanh = function(
    tanh_of_product, fused_linear_tanh_backward, lambda x, w, y: y.detach(), lambda x, w, y: (x, w)
)
row("fused_linear_tanh", "fused linear layer and tanh", lambda: (weighted(fused_linear_tanh), CE, classes()),
    "first", twin=replaced(own=tanh_of_product))  # fmt: skip


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


def adjoint_ode():
    x, y = classes()
    return weighted(function(euler, adjoint_steps, euler_states)).double(), CE, (x.double(), y)


row("adjoint_ode", "adjoint ODE solver, float64", adjoint_ode, "first", twin=replaced(own=euler))


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


row("implicit_backward", "fixed point with an implicit backward", implicit_net, "first",
    twin=replaced(own=by_fixed_point(fixed_point)))  # fmt: skip

BLOCK = nn.Sequential(nn.Softplus(), nn.Softmax(-1)).double()
row("recomputed_block", "checkpoint by hand that recomputes without a graph",
    lambda: (middle(lambda x: recompute(BLOCK, x)), CE, classes()), twin=with_functions({"1": BLOCK}))  # fmt: skip
row("stale_deep", "stale tanh deep in a network",
    lambda: (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Applied(stale_tanh), nn.Linear(4, 4), nn.SiLU(),
                           nn.Linear(4, 3)), CE, classes()), twin=with_functions({"3": torch.tanh}))  # fmt: skip
row("stale_convolution", "stale square in a convolutional network",
    lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), Applied(stale_square), nn.Flatten(), nn.Linear(8, 3)), CE,
             images(12, 1)), twin=with_functions({"1": torch.square}))  # fmt: skip


for exponent in (-30, 30):
    row(f"stale_scaled_{exponent}", f"stale square, loss × 1e{exponent}",
        lambda e=exponent: (middle(stale_square), scaled_loss(10.0**e, MSE), values()),
        twin=with_functions({"1": torch.square}))  # fmt: skip


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
    row(key, title, make, twin=with_functions({"1": torch.tanh}), signed=False)

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


row("straight_function", "straight-through rounding by a Function",
    lambda: (nn.Sequential(Quantized(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()),
    twin=straight_by_detach)  # fmt: skip


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


def equilibrium(m, x):
    """A fixed point z = tanh(W z + U x), found without a graph; a hook solves for the gradient."""
    step = lambda z: torch.tanh(m.w(z) + m.u(x))  # noqa: E731
    if m.unrolled:
        z = x.new_zeros(len(x), 4)
        for _ in range(m.unrolled):
            z = step(z)
        return m.head(z)
    with torch.no_grad():
        z = x.new_zeros(len(x), 4)
        for _ in range(60):
            z = step(z)
    z, start = step(z), z.clone().requires_grad_()
    end = step(start)

    def solve(gradient):
        total = gradient
        for _ in range(60):
            total = torch.autograd.grad(end, start, total, retain_graph=True)[0] + gradient
        return total

    if z.requires_grad:
        z.register_hook(solve)
    return m.head(z)


def equilibrium_model():
    model = Net(equilibrium, u=nn.Linear(3, 4), w=nn.Linear(4, 4, bias=False), head=nn.Linear(4, 2), unrolled=0)
    model.w.weight.data.mul_(0.3)
    return model, MSE, values(8, 3, 2)


small_square = function(lambda x: x + 1e-5 * x**2, lambda g, k: g * (1 + 2e-5 * k), own_input)
row("stale_masked", "stale square in one of two branches, the other one 1e3 times as large", stale_masked, "b",
    twin=replaced(square=torch.square))  # fmt: skip
row("stale_last_batch", "stale square in the last batch of a stream", stale_last_batch, "first",
    truth=stream_truth(replaced(own=torch.square)))  # fmt: skip
row("stale_small", "x + 1e-5 x², of which the square is stale", lambda: (middle(small_square), MSE, values()),
    twin=with_functions({"1": lambda x: x + 1e-5 * x**2}))  # fmt: skip
row("stale_one_unit", "stale square of one unit of six, all others ReLU",
    lambda: (middle(one_unit(stale_square), 6), CE, classes(30)),
    twin=with_functions({"1": one_unit(torch.square)}))  # fmt: skip
row("stale_behind_frozen", "stale square behind a frozen layer", stale_behind_frozen,
    twin=with_functions({"3": torch.square}))  # fmt: skip
row("stale_attention", "softmax attention, its weights kept",
    lambda: (nn.Sequential(nn.Linear(3, 3), Applied(attend(stale_softmax)), nn.Linear(3, 3)), CE, tokens(10, 4, 3)),
    twin=with_functions({"1": attend(softmax)}))  # fmt: skip
row("tensor_hook", "gradient halved by a hook on a tensor", lambda: (middle(halved), CE, classes()),
    twin=with_functions({"1": torch.tanh}), signed=False)  # fmt: skip
row("equilibrium_hook", "deep equilibrium model, its gradient by a hook", equilibrium_model, "u",
    twin=changed(lambda twin: setattr(twin, "unrolled", 80)))  # fmt: skip

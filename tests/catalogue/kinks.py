"""Kinks, steps and stops that the check must not refuse."""

import functools
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import LEVELS, add
from tests.catalogue.parts import (
    CE,
    MSE,
    Applied,
    Cube,
    Net,
    classes,
    images,
    middle,
    recurrent,
    scaled_loss,
    tokens,
    values,
)
from tests.catalogue.wrong_backward import function, stale_square

row = functools.partial(add, "Kinks, steps and stops that the check must not refuse", close=None, control=True)


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


def hard_softmax(x):
    soft = x.softmax(1)
    return F.one_hot(soft.argmax(1), x.shape[1]).to(x) - soft.detach() + soft


def remade(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice
        return torch.tensor(x)


def positive(x, y=None):
    return (x > 0).to(x)


masked_relu = function(lambda x: x * positive(x), lambda g, k: g * k, positive)
saved_output = function(torch.tanh, lambda g, k, y: g * (1 - y * y), saved=lambda x, y: (y,))
doubled = function(lambda x: 2 * x, lambda g, k: 2 * g)


def sharp_max(x):
    return torch.cat([torch.logsumexp(1e4 * x, 1, keepdim=True) / 1e4, x[:, 1:].sin()], 1)


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
    ("top_k", "top-k", lambda x: torch.zeros_like(x).scatter(1, x.topk(2, 1).indices, x.topk(2, 1).values)),
    ("median", "median", lambda x: torch.cat([x.median(1, keepdim=True).values, x[:, :1].sin(), x[:, 1:2]], 1)),
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
    ("float_stop", "a number read by float()", lambda x: x.tanh() * float(x.abs().amax())),
    ("text_stop", "a number read as text", lambda x: x.tanh() * float(f"{x.abs().amax():.30g}")),
    ("tensor_stop", "torch.tensor of a result", lambda x: x.tanh() * remade(x.abs().amax(0))),
    ("in_place_stop", "detach_()", lambda x: x.tanh() * x.abs().amax(0).clone().detach_()),
    ("array_stop", "an array of a result", lambda x: x.tanh() * torch.from_numpy(x.abs().amax(0).numpy(force=True))),
    ("gumbel", "F.gumbel_softmax(hard=True)", lambda x: F.gumbel_softmax(x, hard=True)),
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
        row(f"kink_{name}", title, lambda own=own, loss=loss, data=data: (middle(own), loss, data()))


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
row("kink_maxout", "maxout", lambda: (nn.Sequential(nn.Linear(4, 6), Applied(maxout), nn.Linear(3, 3)), CE, classes()))
row("kink_max_pooling", "max pooling",
    lambda: (nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)), CE,
             images(14, 1, 5)))  # fmt: skip
row("kink_exact_zeros", "ReLU at exact zeros: integers in float32",
    lambda: (relu_with(rounded_weights), CE,
             (torch.randint(-2, 3, (20, 4)).float(), torch.randint(0, 3, (20,)))))  # fmt: skip
row("kink_deep_relu", "deep ReLU network, 200 samples", lambda: (wide_relu(), CE, classes(200, 6)),
    levels=("unit", "network"))  # fmt: skip
row("kink_dead_inputs", "bias of zeros and dead inputs behind ReLU", dead_inputs)
row("kink_small_weights", "weights × 1e-6 behind ReLU", lambda: (relu_with(small_weights), CE, classes()))
row("kink_large_inputs", "inputs × 1e4 behind ReLU, squared error × 1e-30", large_inputs)
row("kink_norm_relu", "layer normalization and ReLU",
    lambda: (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)), CE, classes()))  # fmt: skip
row("kink_batch_norm", "batch normalization, training mode, and |x|",
    lambda: (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Applied(torch.abs), nn.Linear(5, 3)), CE,
             classes()))  # fmt: skip
row("kink_recurrent", "recurrent network with ReLU",
    lambda: (recurrent(functools.partial(nn.RNN, nonlinearity="relu")), CE, tokens(d=3)), "rnn",
    levels=LEVELS[1:], options={"layers": ["rnn", "head"]})  # fmt: skip
add_kinks(NEIGHBOURS)
row("kink_stale_inputs", "a stale function of the inputs, which reaches no parameter",
    lambda: (nn.Sequential(Applied(stale_square), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), CE,
             classes()), "1")  # fmt: skip
row("kink_zero_layer", "a hidden layer of zeros before LeakyReLU", zero_layer, "2")
row("kink_many_samples", "wide ReLU network, 600 samples",
    lambda: (nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)), CE,
             classes(600, 5)), options={"layers": ["0", "2"]})  # fmt: skip
row("kink_mixed_scales", "weights of sizes 1e-4 and 1e3 behind ReLU, squared error",
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
        row(f"inner_gradient_{key}_{exponent}",
            f"{key}, the gradient in the inputs in the output, loss × 1e{exponent}",
            lambda f=own, e=exponent: (inner_gradient(f), scaled_loss(10.0**e, MSE), values(20, 4, 1)),
            "first")  # fmt: skip

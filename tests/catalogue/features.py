"""Features rounded to constants, and features that depend on each other exactly."""

import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add
from tests.catalogue.parts import MSE, Applied
from tests.catalogue.truths import formula_truth

row = functools.partial(add, "Features rounded to constants", close=None)


def frozen(name, title, function, exact, inputs, *, outputs=1, **facts):
    """Add the row of squared error of a linear model on frozen features, exactly ``exact(mp, inputs of a sample)``."""

    def make():
        x = inputs().double()
        model = nn.Sequential(Applied(function), nn.Linear(x.shape[1], outputs)).double()
        return model, MSE, (x, torch.zeros(len(x), outputs).double())

    def formula(mp, own, rows):
        z = np.array([exact(mp, row) for row in rows]) @ own["1.weight"].T + own["1.bias"]
        return sum(one * one for one in z.flat) / z.size

    row(f"features_{name}", title, make, "1", truth=formula_truth(formula), **facts)


def columns(*ranges, n=9):
    """Features of uniform random numbers in these ranges."""
    return lambda: torch.stack([low + (high - low) * torch.rand(n) for low, high in ranges], 1)


def each(exact):
    """The features of a sample, one of each input."""
    return lambda mp, row: [exact(mp, x) for x in row]


def softmax(mp, row):
    powers = [mp.exp(x) for x in row]
    return [p / sum(powers) for p in powers]


tanh = each(lambda mp, x: mp.tanh(x))
sigmoid = each(lambda mp, x: 1 / (1 + mp.exp(-x)))
frozen("tanh_one", "tanh = 1 in one column", torch.tanh, tanh, columns((-1, 1), (20, 50)))
frozen("tanh_two", "tanh = ±1 in two columns", torch.tanh, tanh, columns((20, 30), (-30, -20), (-1, 1)))
frozen("tanh_edge", "tanh of 18 to 20", torch.tanh, tanh, columns((18, 20), (-1, 1)))
frozen("tanh_near", "tanh of 10 to 14", torch.tanh, tanh, columns((10, 14), (-1, 1)))
frozen("sigmoid_one", "sigmoid = 1 in two columns", torch.sigmoid, sigmoid, columns((38, 60), (40, 50), (-1, 1)))
frozen("sigmoid_zero", "sigmoid of −60 to −40 (tiny and exact)", torch.sigmoid, sigmoid, columns((-60, -40), (-1, 1)))
frozen("erf_one", "erf = 1 in one column", torch.erf, each(lambda mp, x: mp.erf(x)), columns((6, 9), (-1, 1)))
frozen("cosine_one", "cos of 1e-10 to 1e-9", torch.cos, each(lambda mp, x: mp.cos(x)), columns((1e-10, 1e-9), (-1, 1)))
frozen("exponential_one", "exp of 1e-19 to 1e-17", torch.exp, each(lambda mp, x: mp.exp(x)),
    columns((1e-19, 1e-17), (-1, 1)))  # fmt: skip
frozen("repeated", "two columns equal by rounding", lambda x: 1e9 + x * torch.tensor([1e-9, 2e-9, 1e9]).to(x),
    lambda mp, row: [10**9 + mp.mpf(factor) * x for factor, x in zip((1e-9, 2e-9, 1e9), row, strict=True)],
    columns((-1, 1), (-1, 1), (-1, 1)))  # fmt: skip
frozen("sine_and_identity", "sin x and x, x of 1e-9", lambda x: torch.cat([x[:, :1].sin(), x[:, :1], x[:, 2:]], 1),
    lambda mp, row: [mp.sin(row[0]), row[0], row[2]], columns((1e-9, 2e-9), (0, 1), (-1, 1)))  # fmt: skip
frozen("logarithm", "log(1 + x), x of 1e-18 to 1e-17, beside a column", lambda x: (1 + x).log(),
    each(lambda mp, x: mp.log(1 + x)), columns((1e-18, 1e-17), (0, 1)))  # fmt: skip
frozen("softplus_zero", "softplus of −800 to −750", F.softplus, each(lambda mp, x: mp.log1p(mp.exp(x))),
    columns((-800, -750), (-1, 1)))  # fmt: skip
frozen("clamped", "clamp: columns that are constant exactly", lambda x: x.clamp(-1, 1),
    each(lambda mp, x: max(mp.mpf(-1), min(mp.mpf(1), x))), columns((2, 3), (-3, -2), (-1, 1)),
    control=True)  # fmt: skip
frozen("layer", "tanh = 1 in one column, two outputs", torch.tanh, tanh, columns((20, 50), (-1, 1)), outputs=2)
for key, title, own, exact in [
    ("softmax", "softmax, whose columns add up to 1", lambda x: x.softmax(1), softmax),
    ("centred", "centred features, which add up to 0", lambda x: x - x.mean(1, keepdim=True),
        lambda mp, row: [x - sum(row) / len(row) for x in row]),
    ("complement", "x and 1 − x", lambda x: torch.cat([x[:, :1], 1 - x[:, :1], x[:, 2:]], 1),
        lambda mp, row: [row[0], 1 - row[0], row[2]]),
    ("sum", "x, y and x + y", lambda x: torch.cat([x[:, :2], x[:, :1] + x[:, 1:2]], 1),
        lambda mp, row: [row[0], row[1], row[0] + row[1]]),
    ("sine_cosine", "sin² and cos²", lambda x: torch.cat([x[:, :1].sin() ** 2, x[:, :1].cos() ** 2, x[:, 2:]], 1),
        lambda mp, row: [mp.sin(row[0]) ** 2, mp.cos(row[0]) ** 2, row[2]]),
    ("twice", "a column twice", lambda x: torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1),
        lambda mp, row: [row[0], row[0], row[2]]),
]:  # fmt: skip
    frozen(key, f"features that depend exactly: {title}", own, exact, columns((-1, 1), (-1, 1), (-1, 1)))
# the rank is that of three rows: only features that are equal exactly decide it
for key, title, own, exact in [
    ("ones", "times torch.ones_like", lambda x: x * torch.ones_like(x), lambda mp, row: list(row)),
    ("full", "plus x.new_full", lambda x: x + x.new_full(x.shape, 0.5), each(lambda mp, x: x + 0.5)),
    ("even", "times cos of −1, 0, 1", lambda x: x * torch.arange(-1.0, 2).to(x).cos(),
        lambda mp, row: [x * mp.cos(j - 1) for j, x in enumerate(row)]),
    ("turned", "plus the rows of a transposed square with zeros",
        lambda x: x + (x.relu()[:, :, None] * torch.arange(1.0, 4).to(x)).transpose(1, 2).cumsum(2)[:, :, 2],
        lambda mp, row: [x + (j + 1) * sum(max(x, 0) for x in row) for j, x in enumerate(row)]),
    ("reordered", "softmax, equal up to the rounding of the scores",
        lambda x: torch.cat([x[:3], x[:3] * (1 / 3) * 3, x[:3]]).softmax(1), softmax),
]:  # fmt: skip
    frozen(key, f"three rows three times, {title}", own, exact, lambda: columns(*3 * [(-1, 1)], n=3)().repeat(3, 1),
        control=True)  # fmt: skip

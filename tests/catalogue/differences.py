"""Losses whose curvature is a difference."""

import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add
from tests.catalogue.parts import elementwise
from tests.catalogue.truths import formula_truth

row = functools.partial(add, "Losses whose curvature is a difference", close=None)
by_difference = functools.partial(elementwise, row, weight=[1.0, 1e-3], difference=True)


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
    "log_cosh_overflow": ("log(cosh z), |z| of 2 to 500: cosh² overflows", lambda z: z.cosh().log(),
        lambda mp, z: mp.log(mp.cosh(z)), (2, 500, 10, True)),
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


for key, (title, loss, exact, where) in DIFFERENCES.items():
    by_difference(f"loss_{key}", title, loss, exact, between(*where))

#: Ranges of three samples.
THREE = {
    "log_cosh": (1, 17), "log_exp": (1, 33), "silu_right": (2, 36), "mish_right": (1, 19), "tanh_loss": (1, 18),
    "sigmoid_far": (1, 36), "linex": (-36, -1), "gelu_right": (1, 8), "erf_loss": (1, 5.8), "squared_tanh": (1, 17),
    "charbonnier": (1e-6, 1), "cauchy": (1.01, 1e7), "log_cosh_softplus": (1, 18), "softplus_squared": (1, 19),
}  # fmt: skip
for key, (low, high) in THREE.items():
    title, loss, exact, _ = DIFFERENCES[key]
    title = f"three samples: {title.split(', z')[0].split(', |z')[0]}, z of {low} to {high}"
    by_difference(f"loss_{key}_three", title, loss, exact, between(low, high, 3))


def hidden_formula(mp, own, rows):
    h = np.vectorize(mp.tanh, otypes=[object])(rows @ own["0.weight"].T + own["0.bias"])
    z = h @ own["2.weight"].T + own["2.bias"]
    return sum(mp.log(mp.cosh(one)) for one in z.flat) / z.size


def hidden_log_cosh():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[2].bias.fill_(20.0)
        model[2].weight.mul_(6)
    return model, lambda o, t: o.cosh().log().mean(), (torch.randn(6, 2).double(), torch.zeros(6, 1).double())


row("hidden_log_cosh", "log(cosh z) behind a hidden layer, z of 15 to 25", hidden_log_cosh,
    truth=formula_truth(hidden_formula, terms=1e3))  # fmt: skip

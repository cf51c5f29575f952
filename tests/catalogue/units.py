"""Units of weights stored (in, out)."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add, double
from tests.catalogue.parts import CE, Net, classes, tokens
from tests.catalogue.truths import Spectrum, Truth

GROUP = "Units of weights stored (in, out)"
row = functools.partial(add, GROUP, close=None)


class UnitTruth(Truth):
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


def stored(name, title, apply, shape=(4, 4), bias=4, axis=1, *, data=None, own_bias=True):
    """Add the row of a weight stored in some order; only where it has no units (``axis`` None) are they refused."""
    inputs = shape[1] if axis == 0 else shape[0]

    def make():
        layer = Net(apply, weight=nn.Parameter(torch.randn(shape) * 0.5),
                    bias=nn.Parameter(torch.randn(bias) * 0.3) if bias else None)  # fmt: skip
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(bias or 4, 3))
        return model, CE, (data or functools.partial(classes, 24, inputs))()

    def truth(model, loss_fn, batch, options):
        return UnitTruth(double(model), loss_fn, batch, axis=axis, own_bias=own_bias)

    row(f"unit_{name}", title, make, truth=truth, options={"layers": ["0", "2"]}, control=axis is not None)


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
    return (x @ m.weight) @ torch.linspace(-1, 1, 16, dtype=x.dtype).view(4, 4).cos() + m.bias


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
stored("plain_order", "x @ Wᵀ + b (out, in)", lambda m, x: x @ m.weight.T + m.bias, (4, 5), axis=0)
stored("plain_linear", "F.linear in a module of one's own", lambda m, x: F.linear(x, m.weight, m.bias), axis=0)
stored("scaled_in_out", "x @ (0.5 W) + b", lambda m, x: x @ (0.5 * m.weight) + m.bias)
stored("squared_in_out", "x @ W² + b", lambda m, x: x @ m.weight.square() + m.bias)
stored("sequence_in_out", "x @ W + b of sequences", lambda m, x: in_out(m, x).mean(1), data=lambda: tokens(12, 3))
stored("batched_product", "bmm with an expanded W", bmm)
stored("outer_sum", "(x[:, :, None] · W).sum(1) + b", lambda m, x: (x[:, :, None] * m.weight).sum(1) + m.bias)
row("unit_transposed_linear", "a Linear whose forward applies its weight transposed",
    lambda: (nn.Sequential(Transposed(4, 4), nn.Tanh(), nn.Linear(4, 3)), CE, classes(24)),
    truth=lambda m, f, b, o: UnitTruth(double(m), f, b, axis=1), control=True)  # fmt: skip
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

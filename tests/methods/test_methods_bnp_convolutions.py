"""BNP of dense layers and convolutions, against Algorithms 2 and 3 written out in loops; groups, strides, patches."""

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.hessians import GroupedPreconditioner
from hesscond.methods import BNP, parse
from hesscond.probing.results import NETWORK
from tests.methods.contract import MethodContract, stacked_gradient


class TestVariants(MethodContract):
    specs = ("bnp:statistics=batch", "bnp:statistics=data,refresh=50", "groupnorm+bnp")


#: Channels in, channels out, and how: the kernel is k long in each dimension.
SHAPES = [
    (nn.Conv2d, 3, 4, {"kernel_size": 3, "padding": 1}),
    (nn.Conv2d, 4, 6, {"kernel_size": (3, 2), "stride": 2, "groups": 2}),
    (nn.Conv2d, 3, 3, {"kernel_size": 2, "dilation": 2, "groups": 3, "padding": (1, 0)}),
    (nn.Conv2d, 2, 3, {"kernel_size": 1, "bias": False}),
    (nn.Conv1d, 4, 4, {"kernel_size": 3, "groups": 2, "padding": 2, "padding_mode": "circular"}),
    (nn.Conv3d, 2, 3, {"kernel_size": 2, "padding": 1}),
    (nn.Linear, 6, 5, {}),
]
NAMES = [f"{kind.__name__}-{number}" for number, (kind, *_) in enumerate(SHAPES)]
SIZES = {nn.Linear: (), nn.Conv1d: (7,), nn.Conv2d: (6, 5), nn.Conv3d: (3, 4, 3)}


def problem(kind, channels, units, options, seed=0):
    """A convolution with a nonlinear tail, and what makes batches of N samples with features of unlike means."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Identity(), kind(channels, units, **options), nn.Tanh(), nn.Flatten()).double()
    size = (channels, *SIZES[kind])

    def batch(samples, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, *size, generator=g, dtype=torch.float64)
        return x * torch.arange(1, channels + 1).view(-1, *[1] * (len(size) - 1)) + 0.5

    return model, batch


def backward(model, x):
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()


class Algorithm3:
    """The paper's Algorithm 3, entry by entry in numpy, on each group by itself.

    Of a dense layer it is Algorithm 2: one position, and a single sample's deviation is that from the running mean.
    """

    def __init__(self, layer, rho=0.99):
        self.layer, self.rho = layer, rho
        self.groups = getattr(layer, "groups", 1)
        self.c, self.k = layer.weight.shape[1], layer.weight[0, 0].numel()
        self.mu, self.var = np.zeros((self.groups, self.c, 1)), np.ones((self.groups, self.c, 1))

    def step(self, x, G_w, G_b):
        N, groups = len(x), self.groups
        positions = int(np.prod(self.layer(torch.from_numpy(x)).shape[2:]))
        seen = np.moveaxis(x, 1, -1).reshape(-1, groups, self.c, 1)
        mean = sum(seen) / len(seen)
        centre = self.mu if len(seen) == 1 else mean
        var = sum((row - centre) ** 2 for row in seen) / len(seen)
        self.mu = self.rho * self.mu + (1 - self.rho) * mean
        self.var = self.rho * self.var + (1 - self.rho) * var
        q2 = max(self.c * self.k / N, positions**0.5)
        G_w = G_w.reshape(groups, -1, self.c, self.k)
        new_w, new_b = np.empty_like(G_w), None if G_b is None else np.empty((groups, G_w.shape[1]))
        for g in range(groups):
            tilde = self.var[g] + 1e-2 * self.var[g].max() + 1e-4
            for i in range(G_w.shape[1]):
                b = 0.0 if G_b is None else G_b.reshape(groups, -1)[g, i]
                new_w[g, i] = (G_w[g, i] - self.mu[g] * b) / tilde / q2
                if G_b is not None:
                    new_b[g, i] = b / q2 - (new_w[g, i] * self.mu[g]).sum()
        return new_w, new_b


@pytest.mark.parametrize(("kind", "channels", "units", "options"), SHAPES, ids=NAMES)
def test_gradients_are_those_of_algorithm_3_over_many_steps(kind, channels, units, options):
    """And P Pᵀ times what they were."""
    model, batch = problem(kind, channels, units, options)
    method, layer = BNP(model), model[1]
    truth = Algorithm3(layer)
    for step, samples in enumerate((1, 2, 9, 3)):
        x = batch(samples, step)
        backward(model, x)
        raw = layer.weight.grad.numpy().copy(), None if layer.bias is None else layer.bias.grad.numpy().copy()
        given = stacked_gradient(layer)
        method.transform_gradients()
        w, b = truth.step(x.numpy(), *raw)
        np.testing.assert_allclose(layer.weight.grad.numpy().reshape(w.shape), w, rtol=1e-11, atol=1e-12)
        if b is not None:
            np.testing.assert_allclose(layer.bias.grad.numpy(), b.reshape(-1), rtol=1e-11, atol=1e-11)
    P = method.coordinates("1")
    assert isinstance(P, GroupedPreconditioner) == (truth.groups > 1)
    for unit, (g, found) in enumerate(zip(given, stacked_gradient(layer), strict=True)):
        matrix = P.of_unit(unit).matrix(len(g))
        assert torch.allclose(found, matrix @ (matrix.T @ g), rtol=1e-11, atol=1e-12)


def test_channels_last_and_unbatched_inputs_and_several_calls():
    x = problem(*SHAPES[0])[1](6, 0).contiguous(memory_format=torch.channels_last)
    layer = nn.Conv2d(3, 4, 3).double()
    method = BNP(nn.Sequential(layer))
    # called unbatched, and with a smaller input: their samples and positions count together
    (layer(x[0]).square().sum() + layer(x[1:, :, :4]).square().sum()).backward()
    method.transform_gradients()
    seen = torch.cat([x[0].flatten(1), x[1:, :, :4].movedim(1, 0).flatten(1)], 1)
    state = method.states["0"]
    assert torch.allclose(state.mu, 0.01 * seen.mean(1), rtol=1e-12)
    assert torch.allclose(state.variance, 0.99 + 0.01 * seen.var(1, correction=0), rtol=1e-12)
    # 12 positions once, 6 five times: the paper's √(rs) of the mean number of positions
    assert state.q_squared == pytest.approx(max(27 / 6, ((12 + 5 * 6) / 6) ** 0.5))


def test_transposed_convolutions_are_refused_or_left_out():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(2, 1, 3))
    with pytest.raises(ConfigError, match=r"not defined for transposed convolutions .* layer '1'"):
        BNP(model)
    method = parse("bnp:layers=0").create(model)
    model(torch.randn(2, 1, 5, 5)).square().sum().backward()
    raw = model[1].weight.grad.clone()
    method.transform_gradients()
    assert torch.equal(model[1].weight.grad, raw)
    assert method.coordinates("1") is None
    assert method.coordinates("0") is not None
    assert method.diagnostics("1") == {}
    with pytest.raises(ConfigError, match="no layer '2'"):
        method.coordinates("2")
    x, loss = torch.randn(3, 1, 5, 5), nn.MSELoss()
    with pytest.raises(ConfigError, match="not defined for transposed convolutions"):
        hesscond.probe(model, loss, (x, x), method="bnp")
    found = hesscond.probe(model, loss, (x, x), ["1"], units=[0], method="bnp:layers=0")["1"]
    plain = hesscond.probe(model, loss, (x, x), ["1"], units=[0])["1"]
    assert torch.equal(found.hessian(0), plain.hessian(0))


def test_weights_that_are_shared_or_computed_are_refused():
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    with pytest.raises(ConfigError, match="'0' and '1': they share a weight"):
        BNP(shared)
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ConfigError, match="computed from other parameters"):
        BNP(computed)


def classifier(options, seed=0):
    """A small network with a convolution of 4 channels, one of which is dead, and its data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(14, 4, 5, 5, generator=g, dtype=torch.float64) * torch.tensor([1.0, 5, 0, 2]).view(-1, 1, 1) + 2
    model(x)
    return model, nn.CrossEntropyLoss(), (x, torch.randint(0, 3, (14,), generator=g))


def raw_P(layer, x, unit):
    """P of a unit of a convolution, dense, from the raw statistics of x."""
    group = unit * layer.groups // layer.out_channels
    channels = np.moveaxis(x.numpy(), 1, -1).reshape(-1, layer.groups, x.shape[1] // layer.groups)[:, group]
    rows = np.repeat(channels, layer.weight[0, 0].numel(), 1)
    mu, sigma = rows.mean(0), rows.std(0)
    live = np.flatnonzero(rows.min(0) != rows.max(0))
    P = np.zeros((len(mu) + 1, len(live) + 1))
    P[0, 0] = 1
    P[0, 1:] = -mu[live] / sigma[live]
    P[1 + live, 1 + np.arange(len(live))] = 1 / sigma[live]
    return torch.from_numpy(P)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "options", [{}, {"padding": 1}, {"groups": 2, "padding": 1}], ids=["plain", "padded", "groups"]
)
def test_probe_by_name_measures_convolutions_in_the_coordinates_of_the_data(options):
    model, loss, (x, y) = classifier(options)
    plain = hesscond.probe(model, loss, (x, y), ["0"])["0"]
    stream = [(x[:5], y[:5]), (x[5:9], y[5:9]), (x[9:], y[9:])]
    results = [hesscond.probe(model, loss, data, ["0"], method="bnp")["0"] for data in ((x, y), stream)]
    for unit in (0, 3):
        P = raw_P(model[0], x, unit)
        truth = P.T @ plain.hessian(unit) @ P
        for found in results:
            H = found.hessian(unit)[: len(truth), : len(truth)]
            assert torch.allclose(H, truth, rtol=1e-9, atol=1e-11 * float(truth.norm()))
            # columns of zeros may stand in for the dead channels of a group
            assert not found.hessian(unit)[len(truth) :].any()
            values = np.linalg.eigvalsh(truth.numpy())
            nonzero = values[values > 1e-11 * values[-1]]
            assert found.kappa[unit].rank == len(nonzero)
            assert float(found.kappa[unit]) == pytest.approx(nonzero[-1] / nonzero[0], rel=1e-4)
    # whole layer, batch and stream; and the network
    layers = [hesscond.probe(model, loss, data, ["0"], level="layer", method="bnp")["0"] for data in ((x, y), stream)]
    dense = [
        torch.nn.functional.pad(P, (0, results[0].hessian(0).shape[0] - P.shape[1]))
        for P in (raw_P(model[0], x, u) for u in range(4))
    ]
    P = torch.block_diag(*dense)
    whole = hesscond.probe(model, loss, (x, y), ["0"], level="layer")["0"].hessian()
    truth = P.T @ whole @ P
    for found in layers:
        assert torch.allclose(found.hessian(), truth, rtol=1e-9, atol=1e-11 * float(truth.norm()))
    network = hesscond.probe(model, loss, (x, y), ["0"], level="network", method="bnp")[NETWORK].hessian()
    assert torch.allclose(network, truth, rtol=1e-9, atol=1e-11 * float(truth.norm()))

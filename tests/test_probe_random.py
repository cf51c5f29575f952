"""Random networks, losses and batches against the dense truth: the combinations nobody thought of."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from tests.truth import layer_truth, unit_truth


def activation(rng):
    linear = nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.2), nn.Hardtanh(), nn.Identity()
    return rng.choice([*linear, nn.Tanh(), nn.GELU(), nn.SiLU(), nn.Softplus(), nn.ELU()])


def image_module(rng, width):
    kind = rng.choice(["convolution"] * 4 + ["transposed", "norm", "norm", "pool", "group norm", "dropout"])
    if kind == "convolution":
        groups = rng.choice([1, 1, width])
        out = rng.choice([2, 4]) if groups == 1 else width * rng.choice([1, 2])
        options = {
            "padding": rng.choice([0, 1, 2]),
            "stride": rng.choice([1, 1, 2]),
            "dilation": rng.choice([1, 1, 2]),
            "padding_mode": rng.choice(["zeros", "zeros", "circular", "replicate"]),
            "bias": rng.random() < 0.7,
        }
        return nn.Conv2d(width, out, rng.choice([1, 2, 3]), groups=groups, **options), out
    if kind == "transposed":
        return nn.ConvTranspose2d(width, 3, 2, stride=rng.choice([1, 2])), 3
    modules = {"norm": nn.BatchNorm2d(width), "pool": nn.MaxPool2d(2, 1), "dropout": nn.Dropout(0.3)}
    return modules.get(kind) or nn.GroupNorm(1, width), width


def dense_module(rng, width, flat):
    kind = rng.choice(["dense"] * 6 + ["layer norm", "batch norm", "dropout", "square"])
    if kind in ("dense", "square"):
        out = width if kind == "square" else rng.choice([2, 3, 5])
        return nn.Linear(width, out, bias=rng.random() < 0.8), out
    if kind == "batch norm" and flat:
        return nn.BatchNorm1d(width), width
    return nn.LayerNorm(width) if kind == "layer norm" else nn.Dropout(0.3), width


class RandomNet(nn.Module):
    """A few layers, some of them used twice, perhaps with skip connections, in any mode, on any kind of input."""

    def __init__(self, rng):
        super().__init__()
        self.kind, self.width = rng.choice(["flat", "sequence", "image"]), rng.choice([2, 3, 4])
        self.layers, width = nn.ModuleList(), self.width
        for _ in range(rng.randint(1, 4)):
            if self.kind == "image":
                module, out = image_module(rng, width)
            else:
                module, out = dense_module(rng, width, self.kind == "flat")
            self.layers.append(module)
            if out == width and rng.random() < 0.3:
                self.layers.extend([nn.ReLU(), module])
            width = out
            if rng.random() < 0.6:
                self.layers.append(activation(rng))
        self.head, self.skip = nn.Linear(width, rng.choice([2, 3])), rng.random() < 0.3
        self.pool = rng.choice([torch.mean, torch.amax, torch.sum])
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = y + x if self.skip and y.shape == x.shape else y
        if self.kind != "flat":
            x = self.pool(x.flatten(2), 2) if self.kind == "image" else self.pool(x, 1)
        return self.head(x)


WEIGHTS = torch.tensor([0.3, 2.0, 0.0, 1.0, 0.7, 0.1, 1.5, 1.0], dtype=torch.float64)
LOSSES = {
    "class": [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"),
        lambda o, t: (WEIGHTS[: len(t)] * F.cross_entropy(o, t, reduction="none")).sum() / 3,
        lambda o, t: F.nll_loss(F.log_softmax(o, -1), t),
        lambda o, t: F.cross_entropy(o, t) + 0.1 * (o - o.roll(1, 0)).square().mean(),
    ],
    "value": [
        nn.MSELoss(),
        nn.HuberLoss(delta=0.7),
        lambda o, t: F.binary_cross_entropy_with_logits(o, (t > 0).to(o)),
        lambda o, t: (o.tanh() - t).square().mean(),
    ],
}


def random_problem(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomNet(rng).double().train(rng.random() < 0.5)
    samples = rng.choice([2, 3, 5, 8] if model.training else [1, 2, 3, 5, 8])
    shapes = {"flat": (), "sequence": (rng.choice([1, 2, 4]),), "image": (rng.choice([4, 5]), 5)}
    extra = shapes[model.kind]
    shape = (samples, model.width, *extra) if model.kind == "image" else (samples, *extra, model.width)
    kind = rng.choice(list(LOSSES))
    outputs = model.head.out_features
    target = torch.randint(0, outputs, (samples,)) if kind == "class" else torch.randn(samples, outputs).double()
    return model, rng.choice(LOSSES[kind]), (torch.randn(*shape).double(), target)


def check(seed):
    model, loss_fn, batch = random_problem(seed)
    try:
        with torch.random.fork_rng():
            output = model(batch[0])
    except (RuntimeError, ValueError):
        return  # the images became smaller than the next kernel, or batch normalization got one value a channel
    if output.abs().max() > 8:
        return  # saturated: the dense truth has lost its digits (test_probe.py has mpmath for that)
    parameters = [id(p) for p in model.parameters()]
    for level in ("unit", "layer"):
        state, values = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
        result = hesscond.probe(model, loss_fn, batch, level=level)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
        assert [id(p) for p in model.parameters()] == parameters
        for name, layer in result.items():
            unit = None if level == "layer" else layer.units[seed % len(layer.units)]
            if unit is None:
                truth = layer_truth(model, loss_fn, batch, name)
            else:
                truth = unit_truth(model, loss_fn, batch, name, unit)
            assert (layer.hessian(unit) - truth).norm() <= 1e-10 * truth.norm() + 1e-300, (name, layer.route)
            kappa = layer.kappa if unit is None else layer.kappa[layer.units.index(unit)]
            sizes = torch.linalg.eigvalsh(truth).abs()
            top = float(sizes.max())
            if kappa.resolved and kappa.value < 1e11:
                nonzero = sizes[sizes > 0.5 * top / kappa.value]
                assert len(nonzero) == kappa.rank, (name, str(kappa))
                assert top / float(nonzero.min()) == pytest.approx(kappa.value, rel=1e-6 + 1e-13 * kappa.value)
            assert kappa.rank >= int((sizes > 1e-9 * top).sum()) or not kappa.resolved


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(25))
def test_a_random_network_is_measured_exactly(seed):
    check(seed)


@pytest.mark.share(15)
@pytest.mark.slow
@pytest.mark.parametrize("decade", range(30))
def test_many_random_networks_are_measured_exactly(decade):
    for seed in range(100 + 10 * decade, 110 + 10 * decade):
        check(seed)

"""S by two backward passes: which blocks it falls into, what that costs, and the dense truth of what comes out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hesscond
from hesscond.capture.backward import Derivatives
from hesscond.capture.double_backward import SecondDerivatives
from tests.catalogue.parts import Applied, Net, by_token
from tests.truth import block, layer_truth

TOKENS, WIDTH, CLASSES = 5, 6, 7


def positionwise():
    """Tokens that do not see each other, with a gated MLP in a residual branch."""

    def forward(m, x):
        h = m.norm(x)
        return m.head(x + m.down(F.silu(m.gate(h)) * m.up(h)))

    parts = {"gate": nn.Linear(WIDTH, 8), "up": nn.Linear(WIDTH, 8), "down": nn.Linear(8, WIDTH)}
    return Net(forward, norm=nn.LayerNorm(WIDTH), **parts, head=nn.Linear(WIDTH, CLASSES))


def by_sample(output, target):
    """It couples the positions of a sample."""
    return F.cross_entropy(output.mean(1), target[:, 0])


def problem(model, samples=3, tokens=TOKENS):
    torch.manual_seed(0)
    return model.double(), (torch.randn(samples, tokens, WIDTH).double(), torch.randint(0, CLASSES, (samples, tokens)))


def assert_true(result, model, loss, batch):
    """Every Hessian of the result is the one of the model as it is written."""
    for name, layer in result.items():
        truth = layer_truth(model, loss, batch, name)
        for unit in layer.units if layer.level == "unit" else [None]:
            own = truth if unit is None else block(truth, layer.n_params, unit)
            assert (layer.hessian(unit) - own).norm() <= 1e-10 * own.norm()
        assert layer.check is None or layer.check.difference <= layer.check.bound


@pytest.fixture
def directions(monkeypatch):
    """How many directions derivatives were taken along, by layer."""
    counted = {}
    original = SecondDerivatives.derivatives

    def counting(self, request, seeds):
        counted[request.name] = counted.get(request.name, 0) + len(seeds[0])
        return original(self, request, seeds)

    monkeypatch.setattr(SecondDerivatives, "derivatives", counting)
    return counted


def test_positions_that_do_not_see_each_other_take_one_direction_a_unit(directions):
    torch.manual_seed(1)
    model, batch = problem(positionwise())
    result = hesscond.probe(model, by_token, batch, ["gate"], "unit")
    assert result["gate"].route == "double backward"
    # one more for the size of S, and two for each bit of the 15 positions' numbers at most
    assert 8 < directions["gate"] <= 8 + 1 + 2 * 4
    assert_true(result, model, by_token, batch)


def test_a_loss_that_couples_the_positions_is_differentiated_in_samples(directions):
    torch.manual_seed(1)
    model, batch = problem(positionwise())
    result = hesscond.probe(model, by_sample, batch, ["gate"], "unit")
    assert directions["gate"] >= 8 * TOKENS
    assert_true(result, model, by_sample, batch)


@pytest.mark.share(2)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("loss", [by_token, by_sample])
def test_every_layer_is_the_truth(level, loss, samples):
    torch.manual_seed(1)
    model, batch = problem(positionwise(), samples)
    assert_true(hesscond.probe(model, loss, batch, level=level), model, loss, batch)


def test_streams_of_ragged_batches_of_positions_are_the_mean_over_all():
    torch.manual_seed(1)
    model, (x, y) = problem(positionwise(), 5)
    result = hesscond.probe(model, by_token, [(x[:2], y[:2]), (x[2:], y[2:])], level="unit")
    assert_true(result, model, by_token, (x, y))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), (5, 2, 6, 7)),
        (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), (4, 2, 6, 6)),
        (lambda: nn.Conv1d(3, 2, 4, stride=3, bias=False), (4, 3, 12)),
        (lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 3)), (3, 1, 4, 4, 5)),
        (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), (3, 2, 3, 4)),
    ],
    ids=["strided in groups", "dilated", "1d", "3d", "transposed"],
)
def test_products_through_convolutions_are_those_of_double_backward_without_needless_derivatives(make, shape):
    torch.manual_seed(0)
    model = nn.Sequential(scaled(shape[1]), nn.Tanh(), make(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    batch = torch.randn(shape, dtype=torch.float64), torch.randint(0, 3, shape[:1])
    model(batch[0])
    first = model[0].scale
    (plain,) = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), first, create_graph=True)
    truth = torch.stack([torch.autograd.grad(p, first, retain_graph=True)[0] for p in plain])
    H = hesscond.HessianOperator(model, nn.CrossEntropyLoss(), batch, parameters=["0.scale"])
    torch.testing.assert_close(H.to_dense(), truth, rtol=1e-12, atol=1e-15)
    v = torch.ones(len(truth), dtype=torch.float64)
    with FlopCounterMode(display=False) as ours:
        H @ v
    with FlopCounterMode(display=False) as torchs:
        torch.autograd.grad(plain, first, v, retain_graph=True)
    assert ours.get_total_flops() < torchs.get_total_flops()


def scaled(channels):
    scale = nn.Parameter(torch.linspace(0.5, 1.5, channels))
    return Net(lambda m, x: x * m.scale.view(-1, *[1] * (x.ndim - 2)), scale=scale)


def dropped_again(x):
    """Dropout whose mask is drawn again in each backward pass."""
    return checkpoint(lambda h: F.dropout(torch.tanh(h), 0.4), x, use_reentrant=False)


@pytest.mark.parametrize("module", [nn.GroupNorm(2, 4), nn.Tanh(), Applied(dropped_again)])
def test_directions_behind_these_modules_are_taken_together(monkeypatch, module):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(module.double()(x).pow(3).sum(), x, create_graph=True)
    seeds = torch.randn(5, 3, 4, 2, dtype=torch.float64)
    expected = torch.stack([torch.autograd.grad(slope, x, seed, retain_graph=True)[0] for seed in seeds])
    passes, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **options: passes.append(1) or grad(*args, **options))
    (found,) = Derivatives([slope], [x])([seeds])
    # one is compared with the batch
    assert len(passes) == 2
    torch.testing.assert_close(found, expected)

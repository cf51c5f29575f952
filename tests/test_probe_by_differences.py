"""Hessians by differences of gradients where torch has no second derivatives, or wrong ones: against plain twins."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError
from hesscond.hessians.differenced import extrapolated
from tests.catalogue.parts import Applied, Net
from tests.catalogue.wrong_backward import STALE, function, fused_entropy
from tests.truth import block, layer_truth, network_truth

LEVELS = ["unit", "layer", "network"]
torch.manual_seed(0)
BATCH = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))


def once(forward, slope, noise=0.0):
    """A function of each entry with one derivative, to which a part of its size may be added at random."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            x = ctx.saved_tensors[0]
            return g * slope(x) * (1 + noise * (torch.remainder(1e13 * x, 2) - 1))

    return Once.apply


def network(own, first=None):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4) if first is None else first, Applied(own), nn.Linear(4, 3)).double()


SINE = once(torch.sin, torch.cos)
FUNCTIONS = {
    "once": (SINE, torch.sin),
    "a cube": (once(lambda x: x**3, lambda x: 3 * x * x), lambda x: x**3),
    "behind ReLU": (lambda x: SINE(torch.relu(x)), lambda x: torch.sin(torch.relu(x))),
    "times a constant": (lambda x: SINE(x) * x.detach(), lambda x: torch.sin(x) * x.detach()),
    **{row[0]: row[2:] for row in STALE if row[0] in ("stale_tanh", "stale_numpy", "fused_layer_norm")},
}


def judged(result, twin, level, batch=BATCH, loss=F.cross_entropy):
    """Every Hessian is within its error of the truth, which is small, and every interval has the true κ."""
    own = result["network" if level == "network" else "0"]
    assert own.route == "differences of the gradient"
    assert "differences of the loss" in str(own.check)
    # by double backward of plain operations
    whole = network_truth(twin, loss, batch) if level == "network" else layer_truth(twin, loss, batch, "0")
    for unit, kappa in zip(own.blocks, own.conditions, strict=True):
        true, error = whole if unit is None else block(whole, own.n_params, unit), own.block(unit).operator.error
        apart = float(torch.linalg.matrix_norm(own.hessian(unit) - true, 2))
        assert apart <= error < 1e-7 * float(true.norm())
        values = torch.linalg.eigvalsh(true).abs()
        values = values[values > 1e-13 * values.max()]
        assert kappa.lower <= float(values.max() / values.min()) <= kappa.upper
        assert not kappa.resolved or (kappa.rank == len(values) and "differences of gradients" in kappa.solver)
    return own


@pytest.mark.share(6)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessians_are_within_their_errors_of_the_truth(name, level):
    own, plain = FUNCTIONS[name]
    result = hesscond.probe(network(own), F.cross_entropy, BATCH, level=level)
    found = judged(result, network(plain), level)
    # a normalization leaves directions without effect, in which the error may hide anything
    assert name == "fused_layer_norm" or all(kappa.resolved for kappa in found.conditions)
    if level != "network":
        assert "own double backward" in str(result["2"].check)
        assert not result.skipped


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "network"])
def test_a_fused_loss(level):
    """What it keeps makes its second derivatives wrong."""
    result = hesscond.probe(network(torch.tanh), fused_entropy, BATCH, level=level)
    judged(result, network(torch.tanh), level)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_streams_convolutions_and_tables(level):
    halves = [(BATCH[0][:5], BATCH[1][:5]), (BATCH[0][5:], BATCH[1][5:])]
    judged(hesscond.probe(network(SINE), F.cross_entropy, halves, level=level), network(torch.sin), level)
    images = BATCH[0].view(12, 1, 2, 2), BATCH[1]

    def convolution(own):
        return Net(lambda m, x: getattr(m, "2")(own(getattr(m, "0")(x)).flatten(1)),
                   **{"0": nn.Conv2d(1, 2, 2, padding=1), "2": nn.Linear(18, 3)}).double()  # fmt: skip

    model, twin = convolution(SINE), convolution(torch.sin)
    twin.load_state_dict(model.state_dict())
    judged(hesscond.probe(model, F.cross_entropy, images, level=level, layers=["0"]), twin, level, images)
    words = torch.tensor([0, 2, 2, 3, 2, 0, 2, 3, 0, 0, 3, 2]), BATCH[1]
    model = network(SINE, nn.Embedding(4, 4))
    twin = nn.Sequential(model[0], Applied(torch.sin), model[2])
    result = hesscond.probe(model, F.cross_entropy, words, level=level, layers="*")
    whole = network_truth(twin, F.cross_entropy, words)[:16, :16]
    for unit in result["0"].blocks:
        true = whole if unit is None else whole[4 * unit : 4 * unit + 4, 4 * unit : 4 * unit + 4]
        assert torch.allclose(result["0"].hessian(unit), true, rtol=0, atol=1e-10)
    assert result["0"].units == (() if level == "layer" else (0, 2, 3))


@pytest.mark.share(3)
@pytest.mark.parametrize("noise", [1e-12, 1e-9, 1e-6])
def test_noise_in_the_gradient_widens_the_interval(noise):
    model = network(once(torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, noise))
    result = hesscond.probe(model, F.cross_entropy, BATCH, level="layer", layers=["0"])["0"]
    true = layer_truth(network(torch.tanh), F.cross_entropy, BATCH, "0")
    values = torch.linalg.eigvalsh(true).abs()
    assert float(torch.linalg.matrix_norm(result.hessian() - true, 2)) <= result.block(None).operator.error
    assert result.kappa.lower <= float(values.max() / values.min()) <= result.kappa.upper
    assert result.kappa.upper - result.kappa.lower > noise * result.kappa.lower


def test_what_the_error_may_hide_is_unresolved():
    """Columns of the inputs that are equal up to 1e-7."""
    x, y = BATCH
    x = torch.cat([x[:, :3], x[:, 2:3] + 1e-7 * x[:, 3:]], 1)
    kappa = hesscond.probe(network(SINE), F.cross_entropy, (x, y), level="layer", layers=["0"])["0"].kappa
    values = torch.linalg.eigvalsh(layer_truth(network(torch.sin), F.cross_entropy, (x, y), "0")).abs()
    assert not kappa.resolved
    assert kappa.lower <= float(values.max() / values.min())
    assert "differences of gradients" in kappa.reason


REFUSED = {
    "a kink at the weights": (
        lambda: network(lambda x: SINE((x - x.detach()).abs()) + SINE(x)),
        "there is a kink, a jump or noise",
    ),
    "a kink within every step": (
        lambda: network(lambda x: SINE((x - x.detach() - 1e-9).relu()) + SINE(x)),
        "there is a kink, a jump or noise",
    ),
    "the gradient of another function": (
        lambda: network(once(torch.sin, lambda x: -x.cos())),
        "is not that of the loss",
    ),
    "too many": (lambda: network(SINE, nn.Sequential(nn.Linear(4, 4))), "1,000 are formed"),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stops_no_other_layer(name, monkeypatch):
    if name == "too many":
        monkeypatch.setattr("hesscond.probing.products.COLUMNS", 15)
        REFUSED[name] = REFUSED[name][0], "up to 15 are formed: name fewer units"
    make, words = REFUSED[name]
    result = hesscond.probe(make(), F.cross_entropy, BATCH)
    assert list(result) == ["2"]
    ((layer, why),) = result.skipped.items()
    assert words in why
    assert "by differences of its gradient" in why
    with pytest.raises(CaptureError, match=f"layer '{layer}' cannot be probed: .*{words}"):
        hesscond.probe(make(), F.cross_entropy, BATCH, layers=[layer])


def test_units_that_are_named_are_formed_alone(monkeypatch):
    monkeypatch.setattr("hesscond.probing.products.COLUMNS", 10)
    result = hesscond.probe(network(SINE), F.cross_entropy, BATCH, layers=["0"], units=[1, 3])
    judged(result, network(torch.sin), "unit")
    with pytest.raises(CaptureError, match=r"35 columns, of 8 gradients each"):
        hesscond.probe(network(SINE), F.cross_entropy, BATCH, level="network")


def test_with_the_same_dropout_in_every_pass():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Applied(SINE), nn.Dropout(0.4), nn.Linear(4, 3)).double()
    twin = nn.Sequential(model[0], Applied(torch.sin), model[2], model[3])
    state = torch.get_rng_state()
    result = hesscond.probe(model, F.cross_entropy, BATCH, level="network")
    torch.set_rng_state(state)
    judged(result, twin, "network")


def test_the_limit_of_differences_and_its_error():
    """Differences of functions with known derivatives at 0, with and without a kink."""

    def of(f):
        def sample(h):
            plus, minus, centre = (torch.tensor([f(t)], dtype=torch.float64) for t in (h, -h, 0.0))
            return (plus - minus) / (2 * h), (plus + minus - 2 * centre) / (2 * h), 1e-16 / h

        return extrapolated(sample)

    for f, slope in ((math.sin, 1.0), (lambda t: math.exp(3 * t), 3.0), (lambda t: math.atan(50 * t), 50.0)):
        found, error, rounding = of(f)
        assert abs(float(found) - slope) <= 4 * error < 1e-9 * slope
        assert rounding <= error
    for f in (lambda t: abs(t) + t, lambda t: max(t - 1e-8, 0.0), lambda t: 1.0 * (t > 0)):
        assert of(f)[1] > 0.1


def test_wrong_double_backwards_are_noticed_in_any_batch_of_a_stream():
    parts = {
        "first": network(torch.tanh),
        "second": network(function(torch.sin, lambda g, k: g * k, lambda x, y: x.cos().detach())),
    }
    model = Net(lambda m, x: (m.first if x[0, 0] < 0 else m.second)(x), **parts)
    x, y = BATCH
    order = x[:, 0].argsort()
    result = hesscond.probe(model, F.cross_entropy, [(x[order[:4]], y[:4]), (x[order[8:]], y[8:])])
    assert {name for name, own in result.items() if own.route == "differences of the gradient"} == {"second.0"}
    assert sorted(result) == ["first.0", "first.2", "second.0", "second.2"]

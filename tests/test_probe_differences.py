"""The second check: double backward against central differences of the gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError
from tests.catalogue.kinks import KINKED
from tests.catalogue.parts import Applied, Net
from tests.catalogue.wrong_backward import STALE, function, stale_square
from tests.truth import layer_truth, reverse_over_reverse

LEVELS = ["unit", "layer", "network"]
torch.manual_seed(0)
BATCH = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,))


#: Functions of torch whose second derivatives are wrong.
WRONG = {row[0]: row[2] for row in STALE if row[0] in ("stale_square", "stale_tanh", "fused_layer_norm")}
WRONG["gradient_reversal"] = function(lambda x: x.view_as(x), lambda g, k: -g)


#: x², whose double backward is half of its second derivative.
half_square = function(lambda x: x * x, lambda g, k, x: g * (x + x.detach()), saved=lambda x, y: (x,))


def network(own):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), Applied(own), nn.Linear(4, 3)).double()


def probe(model, level="unit", loss=F.cross_entropy, batch=BATCH, **options):
    return hesscond.probe(model, loss, batch, level=level, **options)


def test_a_fault_of_a_part_in_100_000_is_found_whatever_the_weights():
    """The rounding of the shortest step would explain it for a quarter of them."""
    small = function(lambda x: x + 1e-5 * x**2, lambda g, k: g * (1 + 2e-5 * k), lambda x, y: x.detach())
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 4), Applied(small), nn.Linear(4, 3)).double()
        assert probe(model, "layer", layers=["0"])["0"].route == "differences of the gradient", seed


@pytest.mark.share(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_double_backward_is_not_taken_and_its_module_named(name, level):
    """Differences of the gradient take its place, if the gradient is that of the loss."""
    model = network(WRONG[name])
    words = r"of its gradient: .* module '1', a Applied \(Own"
    if name != "gradient_reversal":
        assert "differences of the gradient" in {own.route for own in probe(model, level).values()}
        with pytest.raises(CaptureError, match=words):
            probe(model, level, dtype=None, layers=None if level == "network" else ["0"])
    elif level == "network":
        with pytest.raises(CaptureError, match=words):
            probe(model, level)
    else:
        result = probe(model, level)
        assert list(result) == ["2"]
        assert result["2"].check.central.agrees
        assert "module '1', a Applied (Own)" in result.skipped["0"]
    assert level == "network" or len(probe(model, level, check=False)) == 2


TAKEN = ("relu", "leaky_relu", "absolute", "hardtanh", "sorted_features", "top_k", "dropped", "good_function")
KINKS = {name: own for name, _, own, *_ in KINKED if name in TAKEN} | {
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "at its kink": lambda x: torch.relu(x - x.detach()) + x,
}


@pytest.mark.share(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", KINKS)
def test_kinks_make_no_false_alarm(name, level):
    result = probe(network(KINKS[name]), level)
    for layer in result.values():
        assert layer.check.central.agrees is not False
        if name != "at its kink":
            assert layer.check.central.agrees
            assert layer.check.central.relative < 1e-5
    assert level == "network" or len(result) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_one_step_decides_where_everything_is_smooth_and_curved(level):
    for layer in probe(network(torch.tanh), level).values():
        assert layer.check.central.forward
    for layer in probe(network(torch.relu), level, batch=(BATCH[0].sign(), BATCH[1])).values():
        assert layer.check.central.agrees


def test_a_fault_in_one_row_of_a_large_layer_is_found():
    """Its random numbers have eight bits, its entries come in pieces."""
    torch.manual_seed(0)
    last = Net(lambda m, x: torch.cat([x[:, :-1].square(), m.own(x[:, -1:])], 1), own=torch.square)
    model = nn.Sequential(nn.Linear(700, 60), last, nn.Linear(60, 3)).double()
    batch = torch.randn(30, 700, dtype=torch.float64), BATCH[1]
    assert probe(model, "layer", batch=batch, layers=["0"])["0"].check.central.forward
    last.own = half_square
    with pytest.raises(CaptureError, match="not those of its gradient"):
        probe(model, "layer", batch=batch, layers=["0"])


@pytest.mark.parametrize("loss", [F.l1_loss, F.huber_loss, lambda o, t: (o - o.median()).abs().mean()])
def test_kinks_of_losses_make_none(loss):
    x, y = BATCH
    result = probe(network(torch.tanh), "layer", loss, (x, F.one_hot(y, 3).double()))
    assert all(layer.check.central.agrees is not False for layer in result.values())


def no_grad(x):
    with torch.no_grad():
        size = x.square().mean().sqrt()
    return torch.tanh(x / size)


HELD = {
    "detached": lambda x: x * x.detach(),
    "no_grad": no_grad,
    "a number": lambda x: torch.tanh(x / x.abs().max().item()),
    "straight through": lambda x: torch.tanh(x + (x.round() - x).detach()),
    "data": lambda x: torch.tanh(x) * x.data.abs(),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_model_detaches_is_a_constant(name):
    model = network(HELD[name])
    result = probe(model, "layer")
    for layer in result.values():
        assert layer.check.central.agrees
    H = layer_truth(model, F.cross_entropy, BATCH, "0", derivative=reverse_over_reverse)
    assert torch.allclose(result["0"].hessian(), H, rtol=1e-8, atol=1e-8 * float(H.abs().max()))


def test_a_padding_row_is_a_constant():
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].weight[0] = 0.3
    batch = torch.randint(0, 6, (30, 2)), BATCH[1]
    for layer in probe(model, "layer", layers="*", batch=batch).values():
        assert layer.check.central.agrees


def test_a_padding_row_that_the_output_uses_is_named():
    """Tied to the output, the row has derivatives, but none through its lookups: they are no gradient of the loss."""
    table = nn.Embedding(6, 4, padding_idx=0)
    model = Net(lambda net, i: F.linear(net.table(i).cumsum(1), net.table.weight).mT, table=table)
    batch = torch.arange(20).reshape(5, 4) % 6, torch.arange(20).reshape(5, 4) % 5
    with pytest.raises(CaptureError, match="whose embedding 'table' gives the row of padding_idx no gradient"):
        hesscond.probe(model, nn.CrossEntropyLoss(), batch, layers=["table"], level="layer")


def test_a_float32_model_is_compared_in_float64():
    model = network(torch.tanh).float()
    x, y = BATCH
    result = probe(model, "layer", batch=(x.float(), y), dtype=None)
    for layer in result.values():
        assert layer.check.central.agrees
        assert layer.check.central.relative < 1e-6


#: x², whose gradient has jumps of 1e-6 everywhere.
noisy = function(
    lambda x: x * x,
    lambda g, k, x: g * (2 * x + 1e-6 * torch.remainder(1e12 * x.detach(), 1.0)),
    saved=lambda x, y: (x,),
)


def test_a_gradient_that_is_noise_tells_nothing_and_is_said():
    """Jumps closer than any step."""
    result = probe(network(noisy), "layer", layers=["0"])
    assert result["0"].check.central.agrees is None
    assert "tell nothing" in str(result["0"].check)


@pytest.mark.share(3)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_the_loss_does_not_matter(scale):
    def loss(o, t):
        return scale * F.cross_entropy(o, t)

    assert "0" in probe(network(torch.tanh), "layer", loss)
    assert probe(network(stale_square), "layer", loss)["0"].route == "differences of the gradient"


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_the_scale_of_the_features_does_not_matter(size):
    x, y = BATCH
    batch = x * size, y

    def rescaled(own):
        model = network(own)
        with torch.no_grad():
            model[0].weight.div_(size)
        return model

    assert probe(rescaled(torch.tanh), "layer", batch=batch)["0"].check.central.agrees
    assert probe(rescaled(stale_square), "layer", batch=batch)["0"].route == "differences of the gradient"


@pytest.mark.parametrize("constant", [1e3, 1e5])
def test_curvature_far_below_the_loss_is_compared_at_longer_steps(constant):
    """At the first step both derivatives are round-off of a loss that is a large constant."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 1)).double(), BATCH[0][:, :3].double()
    loss = lambda o, t: 1e-3 * half_square(o).mean() + constant  # noqa: E731
    result = hesscond.probe(model, loss, (x, torch.zeros(len(x), 1)), level="layer")["0"]
    assert result.route == "differences of the gradient"
    rows = torch.cat([torch.ones(len(x), 1), x], 1)
    torch.testing.assert_close(result.hessian(), 2e-3 * rows.T @ rows / len(x), rtol=1e-2, atol=1e-2 * 2e-3)


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_a_hessian_that_differences_see_is_not_called_zero(level):
    """A Householder product, whose own terms are large."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="householder")
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)).double()
    result = probe(model, level, batch=(BATCH[0][:, :4], BATCH[1]), layers=["0"])["0"]
    for unit, kappa in zip(result.units if level == "unit" else [None], result.conditions, strict=True):
        values = torch.linalg.eigvalsh(result.hessian(unit)).abs()
        assert not kappa.is_zero
        assert kappa.lower <= float(values.max() / values[values > 1e-12 * values.max()].min()) * (1 + 1e-6)

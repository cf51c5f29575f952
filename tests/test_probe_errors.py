"""What cannot be measured is refused, in one sentence that names the layer."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError, ConfigError, HesscondError
from tests.catalogue import case
from tests.catalogue.dense import mlp
from tests.catalogue.parts import Applied, Cube, Net, OnceOnly, middle

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 5, generator=GENERATOR), torch.tensor([0, 1, 2, 0, 1, 2])


#: One layer used, others spare; two layers, none used.
PARTLY = Net(lambda m, x: m.head(x), head=nn.Linear(5, 3), spare=nn.Linear(5, 3), filter=nn.Conv2d(1, 1, 1))
UNREACHED = {"a": nn.Linear(5, 3), "b": nn.Conv1d(2, 2, 2), "scale": nn.Parameter(torch.ones(3))}
UNREACHED = Net(lambda m, x: x[:, :3] * m.scale, **UNREACHED)


def nan_behind_a_layer():
    log = Applied(lambda x: (x.abs().neg() - 1).log())
    return nn.Sequential(nn.Linear(5, 6), log, nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


class Failing(Cube):
    """Backward that refuses, as that of a reversible network outside training mode does."""

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("only in training mode.\nUse model.train()")


def without(name):
    """A network with NaN or infinity in a tensor of this name."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).eval()
    model.state_dict()[name].view(-1)[0] = math.inf if name == "3.bias" else math.nan
    return model


def wrapped(output, target):
    return F.cross_entropy(output, target)


MLP = mlp(nn.ReLU())


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": [X, Y, Y]}, "pair"),
        ({"data": ()}, "empty tuple"),
        ({"data": ((X, Y), (X[:2], Y[:2]))}, r"two batches.*write \[\(a, b\), \(c, d\)\]"),
        ({"data": ([X, Y], [X, Y])}, "two batches"),
        ({"data": ((X, Y), (X, Y), (X, Y))}, "tuple of 3.*as a list"),
        ({"data": (None, Y)}, "inputs.*not None"),
        ({"data": (X, None)}, "no target"),
        ({"data": {"input": X}}, "no target .its labels, label, y.*the loss does not take None"),
        ({"data": {}}, "must be tensors, or contain some, not a dict"),
        ({"data": {"x": X, "labels": Y}}, "does not take the inputs.*'input'"),
        ({"data": [(X, Y), (X,)]}, "tuple of 1"),
        ({"data": [(X, Y), ((X, X), Y)]}, "does not take the inputs"),
        ({"data": (X, torch.full_like(Y, -100))}, "no target of the batch counts"),
        ({"data": 2 * [(X, torch.full_like(Y, -100))]}, "no target in the stream counts"),
        ({"data": (X, torch.full_like(Y, -100)), "loss_fn": wrapped}, "no target of the batch counts"),
        ({"layers": []}, "no layer was named|no parameter"),
        ({"loss_fn": None}, "the loss is None, and the model returns none"),
        ({"loss_fn": "mse"}, "the loss must be a function"),
    ],
)
def test_data_that_are_none_are_refused_at_every_level(arguments, words, level):
    refused(MLP, arguments, ConfigError, words, level)


@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize(
    ("model", "arguments", "error", "words"),
    [
        (MLP, {"layers": ["nope"]}, ConfigError, "nope"),
        (MLP, {"layers": ["1"]}, ConfigError, "'1'"),
        (MLP, {"method": "nope"}, ConfigError, "unknown method"),
        (MLP, {"method": 3}, ConfigError, "Preconditioner"),
        (F.relu, {}, ConfigError, "the model must be a torch.nn.Module, not function"),
        (nn.Sequential(nn.ReLU()), {}, ConfigError, "no .*layer"),
        (MLP, {"data": (X[:0], Y[:0])}, ConfigError, "empty"),
        (MLP, {"data": []}, ConfigError, "empty"),
        (MLP, {"data": 3}, ConfigError, "pair"),
        (MLP, {"data": (X * float("nan"), Y)}, CaptureError, "NaN.*'0'|'0'.*NaN"),
        (nan_behind_a_layer(), {}, CaptureError, "NaN.*'2'|'2'.*NaN"),
        (nan_behind_a_layer(), {"layers": ["4"]}, CaptureError, "NaN.*'[24]'|'[24]'.*NaN"),
        (without("0.weight"), {}, CaptureError, r"NaN or infinite entries in 0\.weight$"),
        (without("3.bias"), {"level": "layer"}, CaptureError, r"NaN or infinite entries in 3\.bias$"),
        (without("1.running_var"), {"level": "network"}, CaptureError, r"entries in 1\.running_var$"),
        (MLP, {"loss_fn": nn.CrossEntropyLoss(reduction="none")}, CaptureError, "scalar"),
        # the second derivative of a logarithm is finite where the logarithm is not
        (MLP, {"loss_fn": lambda o, t: -(o.sum() - 1e3).log()}, CaptureError, "the loss of a batch is nan"),
        (MLP, {"loss_fn": lambda o, t: 1.0}, CaptureError, "scalar|differentiab"),
        (MLP, {"loss_fn": lambda o, t: torch.tensor(1.0)}, CaptureError, "differentiab"),
        (MLP, {"loss_fn": lambda o, t: (o.argmax(1) == t).double().mean()}, CaptureError, "differentiab"),
        (PARTLY, {"layers": ["spare"]}, CaptureError, "'spare'.*not reached"),
        (PARTLY, {"layers": ["head", "filter"]}, CaptureError, "'filter'.*not reached"),
        (UNREACHED, {"layers": ["a"]}, CaptureError, "reach"),
        (middle(Failing.apply), {"data": (X[:, :4], Y)}, CaptureError, r"raises AssertionError.*_errors\.py:\d"),
        (MLP, {"data": (X.to("meta"), Y.to("meta"))}, HesscondError, "device"),
        (mlp(nn.ReLU()).to("meta"), {}, HesscondError, "device"),
        (MLP, {"memory": 1}, HesscondError, r"memory.*\d"),
        (MLP, {"memory": -5}, HesscondError, "memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(model, arguments, error, words, level):
    refused(model, arguments, error, words, level)


def refused(model, arguments, error, words, level):
    arguments = {"loss_fn": nn.CrossEntropyLoss(), "data": (X, Y), "level": level, **arguments}
    with pytest.raises(error, match=words) as caught:
        hesscond.probe(model, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": ["4"], "units": [3]}, "unit 3"),
        ({"layers": ["4"], "units": [-1]}, "unit -1"),
        ({"units": [0]}, "layers"),
        ({"level": "galaxy"}, "unknown level"),
    ],
)
def test_wrong_levels_and_units(arguments, words):
    with pytest.raises(ConfigError, match=words) as caught:
        hesscond.probe(MLP, nn.CrossEntropyLoss(), (X, Y), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [(X[:, :4], Y), (X.to("meta"), Y), (X * float("nan"), Y)])
def test_a_bad_batch_late_in_a_stream(bad):
    """An exception, not the Hessian of what came before."""
    with pytest.raises((HesscondError, RuntimeError)):
        hesscond.probe(MLP, nn.CrossEntropyLoss(), [(X, Y), bad])


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_a_function_without_a_second_derivative(level):
    model = nn.Sequential(nn.Linear(5, 4), Applied(OnceOnly.apply), nn.Linear(4, 3))
    with pytest.raises(HesscondError, match="once_differentiable"):
        hesscond.probe(model, nn.CrossEntropyLoss(), (X, Y), ["0"], level, dtype=None)


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_a_budget_that_is_too_small_says_what_would_fit(level):
    model, loss_fn, batch = case("conv2d-two-layers").make()
    with pytest.raises(HesscondError, match=r"memory.*\d+(\.\d+)? ?([kKMG]i?)?B|memory.*\d+ bytes") as caught:
        hesscond.probe(model, loss_fn, batch, level=level, memory=100)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_model_and_batch_on_different_devices():
    with pytest.raises(HesscondError, match="device"):
        hesscond.probe(MLP, nn.CrossEntropyLoss(), (X.cuda(), Y.cuda()))

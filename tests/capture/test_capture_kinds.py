"""Kinds of models that need something of their own: a number that automatic differentiation confirms, or a sentence."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.capture.kinds import KINDS, Geometry, LayerKind, has_bias
from hesscond.errors import CaptureError, ConfigError, HesscondError
from tests.catalogue.parts import Net
from tests.catalogue.truths import Truth
from tests.truth import layer_truth, network_truth, reverse_over_reverse

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 5, generator=GENERATOR), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()
LEVELS = ["unit", "layer", "network"]


def inner():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


#: A network inside a transformation of `torch.func`.
TRANSFORMED = {
    "vmap": lambda net, x: torch.vmap(net)(x),
    "jacrev": lambda net, x: net(x) + torch.vmap(torch.func.jacrev(net))(x).sum(2),
    "jacfwd": lambda net, x: net(x) + torch.vmap(torch.func.jacfwd(net))(x).sum(2),
    "grad": lambda net, x: torch.vmap(torch.func.grad(lambda z: net(z).square().sum()))(x)[:, :3],
}


def true_network(model):
    return network_truth(copy.deepcopy(model).double(), LOSS, (X.double(), Y))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_layers_and_networks_inside_transformations(name, level):
    model = Net(lambda m, x: TRANSFORMED[name](m.net, x), net=inner())
    result = hesscond.probe(model, LOSS, (X, Y), level=level)
    if level == "network":
        torch.testing.assert_close(result["network"].hessian(), true_network(model))
        return
    assert set(result) == {"net.0", "net.2"}
    for layer, found in result.items():
        expected = layer_truth(model, LOSS, (X, Y), layer, derivative=reverse_over_reverse)
        if level == "unit":
            n = found.n_params
            blocks = [found.hessian(unit=i) for i in found.units]
            torch.testing.assert_close(
                torch.block_diag(*blocks), expected * torch.block_diag(*[torch.ones(n, n)] * len(blocks))
            )
        else:
            torch.testing.assert_close(found.hessian(), expected)


def squared():
    """A complex layer, and what its absolute values become."""
    parts = {"first": nn.Linear(5, 4, dtype=torch.complex64), "second": nn.Linear(4, 3)}
    return Net(lambda m, x: m.second(m.first(x.to(m.first.weight.dtype)).abs()), **parts)


def lazy():
    return Net(lambda m, x: m.second(m.first(x)), first=nn.LazyLinear(4), second=nn.Linear(4, 3))


def quantized():
    return torch.ao.quantization.quantize_dynamic(inner(), {nn.Linear}, dtype=torch.qint8)


def learning_quantization():
    model = inner().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)


SENTENCES = {
    "scripted": (lambda: torch.jit.script(inner()), {}, "torch.jit"),
    "traced": (lambda: torch.jit.trace(inner(), X), {}, "torch.jit"),
    "meta": (lambda: inner().to("meta"), {}, "meta"),
    "lazy": (lazy, {}, "'first.weight'.*lazy"),
    "complex layer": (squared, {"layers": ["first"]}, "complex"),
    "quantized": (quantized, {}, "no layer|no parameter"),
    "needs float32": (learning_quantization, {}, "float64.*dtype=None"),
    "half precision": (lambda: inner().half(), {"dtype": None}, r"no Hessian .* in float16: use dtype=torch\.float64"),
    "in half precision": (inner, {"dtype": torch.bfloat16}, r"float64, torch\.float32 or None, not torch\.bfloat16"),
    "complex loss": (lambda: Net(lambda m, x: (1 + 1j) * m.net(x), net=inner()), {"loss": torch.mean}, "real part"),
    "no units": (lambda: nn.Sequential(nn.Linear(5, 0), nn.Linear(0, 3)), {"layers": ["0"]}, "has no"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", SENTENCES)
def test_what_cannot_be_measured_is_refused_in_one_sentence(kind, level):
    make, options, words = SENTENCES[kind]
    loss = (lambda output, target: options["loss"](output)) if "loss" in options else LOSS
    others = {name: value for name, value in options.items() if name != "loss"}
    with pytest.raises(HesscondError, match=words) as caught:
        hesscond.probe(make(), loss, (X, Y), level=level, **others)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_is_measured_with_the_network():
    model = inner()
    model[0] = torch.jit.script(model[0])
    found = hesscond.HessianOperator(model, LOSS, (X, Y)).to_dense()
    torch.testing.assert_close(found, true_network(inner()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_measured_in_float64(dtype):
    model, batch = inner().to(dtype), (X.to(dtype), Y)
    with pytest.raises(CaptureError, match=r"float16.*dtype=torch\.float64"):
        hesscond.HessianOperator(model, LOSS, batch, dtype=None)
    found = hesscond.probe(model, LOSS, batch, level="network")["network"].hessian()
    torch.testing.assert_close(found, network_truth(inner().to(dtype).double(), LOSS, (batch[0].double(), Y)))


@pytest.mark.parametrize("level", LEVELS)
def test_inference_mode_outside_changes_nothing(level):
    model = inner()
    with torch.inference_mode():
        result = hesscond.probe(model, LOSS, (X, Y), level=level)
    expected = hesscond.probe(model, LOSS, (X, Y), level=level)
    assert [result[name].kappa for name in result] == [expected[name].kappa for name in expected]


@pytest.mark.parametrize("loss", [LOSS, lambda output, target: output.sum() / 10])
def test_the_modulus_of_complex_numbers_is_curved(loss):
    """|W a| with a complex W: every node of its graph is a linear one or an absolute value."""
    torch.manual_seed(3)
    parts = {"first": nn.Linear(5, 4), "mixing": nn.Buffer(torch.randn(4, 3, dtype=torch.complex128))}
    model = Net(lambda m, x: (m.first(x).to(torch.complex128) @ m.mixing).abs(), **parts)
    found = hesscond.probe(model, loss, (X, Y), level="layer")["first"].hessian()
    torch.testing.assert_close(found, layer_truth(model, loss, (X, Y), "first", derivative=reverse_over_reverse))


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_a_complex_parameter_of_no_layer_is_left_out_with_its_reason(level):
    parts = {"turn": nn.Parameter(torch.ones(4, dtype=torch.complex64)), "fc": nn.Linear(5, 4)}
    rotated = Net(lambda m, x: (m.turn * m.fc(x)).real[:, :3], **parts)
    result = hesscond.probe(rotated, LOSS, (X, Y), "*", level)
    assert list(result) == ["fc"]
    assert "complex" in result.skipped["turn"]


class Strict(nn.Module):
    """Runs in its own precision only, or not at all."""

    def __init__(self, wrong):
        super().__init__()
        self.layer, self.wrong = nn.Linear(5, 3), wrong

    def forward(self, x):
        if self.wrong or x.dtype is not torch.float32:
            raise ValueError("this\nis wrong")
        return self.layer(x)


@pytest.mark.parametrize("level", LEVELS)
def test_errors_of_the_model_are_its_own_and_those_of_another_precision_are_explained(level):
    with pytest.raises(
        CaptureError, match=r"float64 \(ValueError: this; in the model's own forward\).*dtype=None"
    ) as caught:
        hesscond.probe(Strict(False), LOSS, (X, Y), level=level)
    assert isinstance(caught.value.__cause__, ValueError)
    hesscond.probe(Strict(False), LOSS, (X, Y), level=level, dtype=None)
    with pytest.raises(ValueError, match="this\nis wrong"):
        hesscond.probe(Strict(True), LOSS, (X, Y), level=level)
    with pytest.raises(RuntimeError, match="shapes"):
        hesscond.probe(inner(), F.mse_loss, (X[:, :3], Y), level=level)


class Scaled(nn.Module):
    """A dense layer of a class that torch does not have: its weight is stored as (inputs, outputs) and scaled."""

    def __init__(self, inputs, outputs, scale=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, generator=GENERATOR))
        self.bias = nn.Parameter(torch.randn(outputs, generator=GENERATOR))
        self.scale, self.sizes = scale, (inputs, outputs)

    def forward(self, x):
        return (self.scale * x) @ self.weight + self.bias


@pytest.fixture
def scaled():
    """A kind of layer that one class adds, for the time of a test."""

    class ScaledKind(LayerKind):
        classes = (Scaled,)
        rows_are_units = False
        arguments = ("scale", "sizes")

        def geometry(self, layer):
            n, units = layer.sizes
            return Geometry("Scaled", units, 1, n, has_bias(layer), channels=n)

        def weight_shape(self, layer):
            return torch.Size(layer.sizes)

        def windows(self, layer, x, output_shape):
            return layer.scale * x.reshape(len(x), -1, 1, x.shape[-1])

        def unit_weights(self, layer, weights):
            return weights.mT

        def from_unit_weights(self, layer, rows):
            return rows.mT

    yield
    del KINDS[Scaled]


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
def test_one_class_adds_a_kind_of_layer(activation):
    model = nn.Sequential(Scaled(5, 4), activation, Scaled(4, 4), activation, Scaled(4, 3))
    result, truth = hesscond.probe(model, LOSS, (X, Y)), Truth(copy.deepcopy(model).double(), LOSS, (X.double(), Y))
    assert list(result) == ["0", "2", "4"]
    for name, own in result.items():
        assert own.check.difference < own.check.bound
        # a row of [b, W] for each input, and a column for each unit
        columns = torch.cat([truth.index[f"{name}.bias"][None], truth.index[f"{name}.weight"]])
        for unit in own.units:
            torch.testing.assert_close(own.hessian(unit=unit), truth.at(columns[:, unit]))
    streamed = hesscond.probe(model, LOSS, [(X[:5], Y[:5]), (X[5:], Y[5:])])
    assert [own.kind for own in streamed.values()] == ["Scaled"] * 3
    assert float(streamed["0"].kappa[1]) == pytest.approx(float(result["0"].kappa[1]), rel=1e-9)
    with pytest.raises(ConfigError, match="layer '0' is a Scaled"):
        hesscond.probe(model, LOSS, (X, Y), method="bnp")

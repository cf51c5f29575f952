"""Methods by name in a probe: what is measured is the network that the method builds, in its coordinates."""

import copy

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.hessians import Preconditioner, Reparametrized
from hesscond.methods import BNP, Adam, parse, registered
from hesscond.methods.regularization import Penalized
from hesscond.methods.sphere import SphereChart
from tests.methods.contract import dense_truth
from tests.truth import double_backward, eligible_layers, layer_truth, unit_truth

SPECS = [
    *(method.name for method in registered()),
    "batchnorm:position=post",
    "sphere:constraint=sphere,affine=false",
    "equilibration:frozen=true",
    "l2:space=z,strength=0.1",
    "four-things-batchnorm:weight_decay=0",
    "bnp+groupnorm:groups=2",
    "bnp:layers=3+layernorm",
    "whitening+standardize",
    "sphere+batchnorm",
    "weightnorm+minmax",
    "layernorm+l2:strength=0.01",
    "adam+l2",
    "bnp+l2",
    "sphere+bnp",
    "ekfac+layernorm",
]
#: What is refused, and the words that say what to give instead.
REFUSED = {
    **dict.fromkeys(("adam", "adamw", "adagrad", "rmsprop", "adam+l2"), r"call method.attach\(optimizer\)"),
    **dict.fromkeys(("shampoo", "soap", "muon", "psgd"), r"call method.attach\(optimizer\)"),
    **dict.fromkeys(("sophia", "adahessian"), r"call method.attach\(optimizer\)"),
    "gradient-regularization": "give strength=0, or leave gradient-regularization out",
    "bnp+l2": r"give both at work, method=hesscond.methods.parse\('bnp\+l2'\)",
    "sphere+bnp": "name one of them",
    "four-things-batchnorm": "weight_decay=0, or name layers to measure",
}


def make():
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4), nn.Softplus(), nn.Linear(4, 3))
    for p in model.parameters():
        nn.init.normal_(p, std=0.4, generator=generator)
    x = torch.randn(12, 1, 4, 4, generator=generator) * torch.linspace(0.5, 3, 4) + 1
    return model.double(), nn.CrossEntropyLoss(), (x.double(), torch.arange(12) % 3)


LAYERS = ("0", "3", "5")


def refused(spec, level):
    """Whether, and with what words."""
    if spec == "four-things-batchnorm" and level != "network":
        return None
    # a P of layers has no room for what belongs to none
    without = ("bnp+groupnorm:groups=2", "bnp:layers=3+layernorm", "ekfac+layernorm")
    if level == "network" and spec in without:
        return "name the layers to measure with layers="
    return REFUSED.get(spec)


def by_hand(spec, model, data):
    """The network that a study would train, and the method at work on it."""
    built = copy.deepcopy(model)
    method = parse(spec).create(built)
    method.fit(data[0])
    return built, method


def rebuilding(spec):
    """What of a combination builds the network, and the one part whose coordinates the data define."""
    parts = list(zip(spec.split("+"), parse(spec).parts, strict=True))
    build = "+".join(text for text, (method, _) in parts if not method.needs_statistics)
    data = [text for text, (method, _) in parts if method.needs_statistics]
    return build, data[0] if data else None


def parameter_truth(model, loss_fn, data, layer):
    """The Hessian in the parameters of a layer, bias first."""
    module = model.get_submodule(layer)
    names = sorted((name for name, _ in module.named_parameters()), key=lambda name: not name.endswith("bias"))
    own = dict(module.named_parameters())
    parameters = [own[name] for name in names]
    return double_backward(loss_fn(model(data[0]), data[1]), parameters)


def same(found, truth):
    return torch.allclose(found, truth.to(found), rtol=1e-9, atol=1e-10 * float(truth.abs().max()))


def input_statistics(model, data, place):
    """Mean and deviation of what a dense layer is given."""
    seen = []
    handle = model.get_submodule(place).register_forward_hook(lambda module, args, output: seen.append(args[0]))
    with torch.no_grad():
        model(data[0])
    handle.remove()
    return seen[0].mean(0), seen[0].std(0, correction=0)


def probed_by_hand(spec, model, loss_fn, data, level):
    """The result for the method put to work by hand, the network that it built, and the method."""
    build, statistics = rebuilding(spec)
    built, method = by_hand(build or "vanilla", model, data)
    if any(part.of_first_step for part, _ in parse(spec).parts):
        loss = loss_fn(built(data[0]), data[1])
        method.observe(loss)
        loss.backward()
        method.transform_gradients()
    if statistics == "bnp:layers=3":
        statistics = f"bnp:layers={method.layer('3')}"
    expected = hesscond.probe(built, loss_fn, data, level=level, method=statistics or method)
    return expected, built, method


def check_conditions(found, expected):
    found, expected = (kappa if isinstance(kappa, tuple) else (kappa,) for kappa in (found.kappa, expected.kappa))
    for own, truth in zip(found, expected, strict=True):
        assert own.value == truth.value
        if truth.resolved:
            assert (own.rank, own.nullity) == (truth.rank, truth.nullity)


@pytest.mark.share(6)
@pytest.mark.parametrize("spec", SPECS)
def test_units_are_those_of_the_network_that_the_method_builds(spec):
    """κ as with the method put to work by hand, H as double backward finds it; the model stays as it is."""
    model, loss_fn, data = make()
    before = copy.deepcopy(model.state_dict())
    if (sentence := refused(spec, "unit")) is not None:
        with pytest.raises(ConfigError, match=sentence):
            hesscond.probe(model, loss_fn, data, method=spec)
        return
    result = hesscond.probe(model, loss_fn, data, method=spec)
    assert tuple(result) == LAYERS
    assert list(result.to_frame()["layer"].unique()) == list(LAYERS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    expected, built, method = probed_by_hand(spec, model, loss_fn, data, "unit")
    for layer in LAYERS:
        place = method.layer(layer)
        check_conditions(result[layer], expected[place])
        if rebuilding(spec)[1] is None:
            truth = dense_truth(built, method, place, 1, *data)
            assert same(result[layer].hessian(1), truth), layer
    if "bnp" in spec:
        place = method.layer("3")
        mu, sigma = input_statistics(built, data, place)
        P = torch.diag(torch.cat([torch.ones(1), 1 / sigma]))
        P[0, 1:] = -mu / sigma
        H = unit_truth(built, loss_fn, data, place, 2)
        assert same(result["3"].hessian(2), P.T @ H @ P)


@pytest.mark.share(6)
@pytest.mark.parametrize("spec", SPECS)
def test_layers_are_those_of_the_network_that_the_method_builds(spec):
    model, loss_fn, data = make()
    if (sentence := refused(spec, "layer")) is not None:
        with pytest.raises(ConfigError, match=sentence):
            hesscond.probe(model, loss_fn, data, ["3"], level="layer", method=spec)
        return
    result = hesscond.probe(model, loss_fn, data, ["3"], level="layer", method=spec)
    assert tuple(result) == ("3",)
    expected, built, method = probed_by_hand(spec, model, loss_fn, data, "layer")
    place = method.layer("3")
    check_conditions(result["3"], expected[place])
    own = method.probed(place)
    # P of the data has tests of its own, and so has the tangent space
    if rebuilding(spec)[1] is not None or isinstance(own, SphereChart):
        return
    if isinstance(own, Reparametrized):
        truth = parameter_truth(built, loss_fn, data, place)
    else:
        truth = layer_truth(built, loss_fn, data, place)
        if isinstance(own, Preconditioner):
            P = own.dense(built.get_submodule(place).out_features, 17)
            truth = P.T @ truth @ P
        if isinstance(own, Penalized):
            truth = truth + 2 * own.strength * torch.eye(len(truth)).to(truth)
    assert same(result["3"].hessian(), truth)


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_the_network_is_the_one_that_the_method_builds(spec):
    """All parameters that it has then, by the names that the modules had or have."""
    model, loss_fn, data = make()
    if (sentence := refused(spec, "network")) is not None:
        with pytest.raises(ConfigError, match=sentence):
            hesscond.probe(model, loss_fn, data, level="network", method=spec)
        return
    found = hesscond.probe(model, loss_fn, data, level="network", method=spec)["network"]
    expected, built, method = probed_by_hand(spec, model, loss_fn, data, "network")
    check_conditions(found, expected["network"])
    assert not any(".layer" in part for part in found.parts if "sphere+" not in spec)
    own = {name: method.probed(name) for name in eligible_layers(built)}
    if rebuilding(spec)[1] is not None or any(isinstance(c, SphereChart) for c in own.values()):
        return
    if any(isinstance(c, Preconditioner) for c in own.values()):
        return  # as at the layers, and in the tests of the methods
    trained = [p for p in built.parameters() if p.requires_grad]
    truth = double_backward(loss_fn(built(data[0]), data[1]), trained)
    penalized = [c.strength for c in own.values() if isinstance(c, Penalized)]
    if penalized:
        truth = truth + 2 * penalized[0] * torch.eye(len(truth)).to(truth)
    ends = torch.linalg.eigvalsh(truth)
    eigenvalues = found.eigenvalues()
    assert found.n_params == len(truth)
    for value, end in ((eigenvalues.max(), ends[-1]), (eigenvalues.min(), ends[0])):
        assert abs(value - end) <= 1e-8 * abs(ends).max() or (value > 0 and abs(end) <= 1e-12 * ends[-1])


def test_a_stream_is_measured_as_its_batches_together():
    """The inputs of all batches are read where a method needs them, once: a generator will do."""
    model, loss_fn, (x, y) = make()
    whole = hesscond.probe(model, loss_fn, (x, y), ["0"], method="standardize")["0"].hessian(1)
    parts = ((x[k : k + 5], y[k : k + 5]) for k in range(0, 12, 5))
    streamed = hesscond.probe(model, loss_fn, parts, ["0"], method="standardize")["0"].hessian(1)
    assert same(streamed, whole)


def test_a_fresh_batch_normalization_is_refused_in_eval_mode():
    """Its running statistics are of no data: κ would be the plain one under another name."""
    model, loss_fn, data = make()
    for spec in ("batchnorm", "batchrenorm", "four-things-batchnorm", "bnp+batchnorm"):
        with pytest.raises(ConfigError, match=r"call model\.train\(\)"):
            hesscond.probe(model.eval(), loss_fn, data, method=spec)
    assert hesscond.probe(model, loss_fn, data, ["3"], method="layernorm")["3"].kappa[0].resolved


def test_methods_at_work_are_measured_after_a_step_only():
    """Before it κ would be the plain one under their name."""
    for build in (BNP, Adam):
        model, loss_fn, (x, y) = make()
        method = build(model)
        optimizer = method.optimizer(0.01)
        with pytest.raises(ConfigError, match="it has taken none"):
            hesscond.probe(model, loss_fn, (x, y), ["3"], method=method)
        loss_fn(model(x), y).backward()
        method.transform_gradients()
        optimizer.step()
        method.after_step()
        H = unit_truth(model, loss_fn, (x, y), "3", 1)
        P = method.preconditioner("3").of_unit(1).matrix(17)
        assert same(hesscond.probe(model, loss_fn, (x, y), ["3"], method=method)["3"].hessian(1), P.T @ H @ P)


@pytest.mark.parametrize("at_work", [False, True])
def test_layers_that_a_method_leaves_alone_are_named_as_plain(at_work):
    model, loss_fn, (x, y) = make()
    method = "bnp:layers=3"
    if at_work:
        method = BNP(model, layers=("3",))
        loss_fn(model(x), y).backward()
        method.transform_gradients()
    found = hesscond.probe(model, loss_fn, (x, y), level="layer", method=method)
    plain = hesscond.probe(model, loss_fn, (x, y), level="layer")
    assert [same(found[name].hessian(), plain[name].hessian()) for name in ("0", "5")] == [True, True]
    words = ", and plain ones in 0, 5" if at_work else "coordinates of bnp in 3, and plain ones in other layers"
    assert words in found.coordinates


def test_a_method_at_work_on_another_model_is_refused():
    model, loss_fn, data = make()
    other, _, _ = make()
    method = parse("sphere").create(other)
    with pytest.raises(ConfigError, match="at work on another model"):
        hesscond.probe(model, loss_fn, data, method=method)


def test_what_a_copy_would_share_with_the_model_is_refused():
    """A function on a copy still uses what it used on the model: its parameters would have no Hessian."""
    model, loss_fn, data = make()
    layer = model[3]
    layer.forward = lambda h: nn.functional.linear(h, 2 * layer.weight, layer.bias)
    with pytest.raises(
        ConfigError, match=r"the function .*<lambda> would still use the parameters of the model itself"
    ):
        hesscond.probe(model, loss_fn, data, method="layernorm")
    del layer.forward
    counted = []
    layer.register_forward_hook(lambda module, args, output: counted.append(len(output)))
    assert hesscond.probe(model, loss_fn, data, ["3"], method="layernorm")["3"].kappa[0].resolved


def test_a_model_that_cannot_be_copied_is_refused():
    model, loss_fn, data = make()
    model.scale = 2 * model[0].weight  # no leaf
    with pytest.raises(ConfigError, match="which cannot be copied"):
        hesscond.probe(model, loss_fn, data, method="layernorm")


def test_inputs_that_no_statistics_can_be_made_of_are_refused():
    model, loss_fn, (x, y) = make()
    with pytest.raises(ConfigError, match="inputs that are tensors"):
        hesscond.probe(model, loss_fn, ({"input": x}, y), method="standardize")
    with pytest.raises(ConfigError, match="as one tensor"):
        hesscond.probe(model, loss_fn, [(x, y), (x[:, :, :, :3], y)], method="minmax")

"""Constrained weights: the step against a constrained solver, the chart against dense Hessians, the rate measured."""

import copy

import numpy as np
import pytest
import scipy
import torch
from torch import nn

from hesscond import HessianOperator, probe
from hesscond.errors import ConfigError
from hesscond.hessians import SphereTangentOperator
from hesscond.methods import parse
from hesscond.methods.sphere import Affine, Noise, SphereChart
from hesscond.models import MODELS as NETWORKS, build
from tests.methods.contract import MethodContract, digits, network
from tests.truth import double_backward, unit_truth

CONSTRAINTS = ("sphere", "centred", "both")
LOSS = nn.CrossEntropyLoss()


class TestVariants(MethodContract):
    specs = (
        "sphere:constraint=sphere,output=true,noise=linear,noise_scale=0.3",
        "sphere:constraint=centred,noise=constant",
        "sphere:constraint=none",
    )


# --------------------------------------------------------------------------------------------------------------- models


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, (torch.randn(80, 6).double() + 0.5, torch.randint(0, 3, (80,)))


def cnn():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    return model, (torch.randn(80, 2, 4, 4).double() + 0.5, torch.randint(0, 3, (80,)))


def upsampling():
    torch.manual_seed(2)
    model = nn.Sequential(nn.ConvTranspose1d(3, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(10, 3)).double()
    return model, (torch.randn(80, 3, 4).double() + 0.5, torch.randint(0, 3, (80,)))


MODELS = {"mlp": (mlp, "2"), "cnn": (cnn, "0"), "upsampling": (upsampling, "0")}


def rows_of(layer, weight):
    """(m, n): the weights of each unit; written out, as torch documents the layout."""
    return (weight.transpose(0, 1) if isinstance(layer, nn.ConvTranspose1d) else weight).flatten(1)


def stepped(model, method, batch, steps=3, lr=0.2):
    """After some steps, so that γ and β are not what they were."""
    optimizer = method.optimizer(lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(batch[0]), batch[1]).backward()
        method.transform_gradients()
        optimizer.step()
        method.after_step()


def on_the_set(weights, constraint, c, tolerance=1e-12):
    norms = (weights.square().sum(1) - c).abs().max() / c
    sums = weights.sum(1).abs().max() / weights.norm(dim=1).max()
    return (constraint == "centred" or norms <= tolerance) and (constraint == "sphere" or sums <= tolerance)


# ------------------------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_weights_stay_on_the_set_with_any_optimizer_and_schedule(kind, constraint):
    model, (x, y) = MODELS[kind][0]()
    method = parse(f"sphere:constraint={constraint},c=3,output=true").create(model)
    layers = {name: layer for name, layer in model.named_modules() if name.endswith("layer")}
    assert layers
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.Adam(model.parameters(), lr=0.05),
    ):
        method.attach(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        before = LOSS(model(x), y).item()
        for _ in range(6):
            assert all(on_the_set(rows_of(m, m.weight.detach()), constraint, 3) for m in layers.values())
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
            schedule.step()
        assert LOSS(model(x), y).item() < before


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("constraint", ["none", *CONSTRAINTS])
def test_steps_are_those_of_algorithm_1(constraint, decay):
    """v ← μ v + Pg, w ← Π(w − α v), Pg the centred g + λw; the output's weights decay, γ, β and biases do not."""
    model, (x, y) = mlp()
    method = parse(f"sphere:c=2,constraint={constraint}").create(model)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
    optimizer = method.optimizer(0.1, momentum=0.9, weight_decay=decay)
    hidden = ("0.layer.weight", "2.layer.weight")
    assert set(parameters) == {*hidden, "4.weight", "4.bias"} | {
        f"{i}.after.affine.{p}" for i in (0, 2) for p in ("weight", "bias")
    }
    for _ in range(3):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        method.after_step()
        for name, p in parameters.items():
            g = gradients[name] + (decay * p if name in (*hidden, "4.weight") else 0.0)
            if name in hidden and constraint in ("centred", "both"):
                g = g - g.mean(1, keepdim=True)
            velocity[name] = 0.9 * velocity[name] + g
            p -= 0.1 * velocity[name]
            if name in hidden and constraint in ("sphere", "both"):
                p *= 2**0.5 / p.norm(dim=1, keepdim=True)
    for name, p in model.named_parameters():
        assert torch.allclose(p, parameters[name], rtol=1e-12, atol=1e-14), name


# ---------------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_scale_and_bias_follow_each_constrained_layer(kind):
    model, (x, _) = MODELS[kind][0]()
    plain = copy.deepcopy(model)
    method = parse("sphere").create(model)
    for name in ("0", "2"):
        layer, own = model.get_submodule(method.layer(name)), plain.get_submodule(name)
        own.weight.data = layer.weight.detach().clone()
        own.bias = None
        assert layer.bias is None  # β is the only one
        affine = model.get_submodule(f"{name}.after.affine")
        assert torch.equal(affine.weight, torch.ones(len(own.weight)))
        assert torch.equal(affine.bias, torch.zeros(len(own.weight)))
    assert torch.allclose(model(x), plain(x), rtol=1e-13, atol=1e-14)
    assert method.layer("4" if kind == "mlp" else "5") in ("4", "5")  # the output is free


#: Smaller than published, where that is large.
SMALL = {
    "cnn9": {"widths": (8,) * 9, "pooled": (3, 6)},
    "resnet18": {"widths": (8, 8, 12, 16)},
    "preact-resnet20": {"blocks": (1, 2, 1)},
    "wrn-28-10": {"blocks": (2, 1, 1), "stem": 8, "widths": (12, 16, 24)},
    "densenet": {"blocks": (2, 2)},
    "inception": {},
    "dgcnn": {"widths": (8, 8), "embedding": 16, "hidden": (12, 10), "k": 4},
}


def normalized(name):
    """A network with batch normalizations, in float64, and inputs."""
    shape = {"image": (3, 32, 32), "points": (12, 3)}[NETWORKS[name].kind]
    generator = torch.Generator().manual_seed(0)
    model = build(name, input_shape=shape, outputs=5, generator=generator, norm="batch", **SMALL[name]).double()
    return model, torch.randn(4, *shape, generator=generator).double()


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))}


@pytest.mark.parametrize("name", SMALL)
def test_scale_and_bias_take_the_place_of_each_batch_normalization(name):
    """The function is that of batch normalizations with mean 0, variance 1, γ and β, over the same weights."""
    model, x = normalized(name)
    twin = copy.deepcopy(model)
    parse("sphere:noise=linear").create(model)
    assert not batch_norms(model)
    generator = torch.Generator().manual_seed(1)
    for at, norm in batch_norms(twin).items():
        affine = model.get_submodule(f"{at}.affine")
        assert torch.equal(affine.weight, torch.ones_like(norm.weight))
        assert torch.equal(affine.bias, torch.zeros_like(norm.bias))
        norm.weight.data.uniform_(0.5, 1.5, generator=generator)
        norm.bias.data.normal_(generator=generator)
        norm.eps = 0.0
        affine.load_state_dict(norm.state_dict(), strict=False)
    names = {at for at, m in twin.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert names == {at for at, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    for at in names:
        twin.get_submodule(at).load_state_dict(model.get_submodule(at).state_dict(), strict=False)
        if model.get_submodule(at).bias is None:
            twin.get_submodule(at).bias = None
    assert torch.allclose(model.eval()(x), twin.eval()(x), rtol=1e-11, atol=1e-12)
    # the output has the only bias beside β; dgcnn's fc2 had one
    last = list(twin.children())[-1]
    assert [m for m in model.modules() if getattr(m, "bias", None) is not None and not isinstance(m, Affine)] == [
        list(model.children())[-1]
    ]
    assert last.bias is not None


def test_the_noise_is_that_of_the_run():
    """Without a seed of its own, the noise follows torch's, from which a study's run begins; nothing is drawn of it."""
    found = []
    for seed, options in ((1, ""), (2, ""), (1, ""), (1, ",seed=5"), (2, ",seed=5")):
        model, x = normalized("cnn9")
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        parse(f"sphere:noise=linear{options}").create(model)
        found.append(model(x))
        assert torch.equal(torch.get_rng_state(), state)
    one, other, again, *own = found
    assert torch.equal(one, again)
    assert torch.equal(*own)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", SMALL)
def test_places_are_counted_in_the_order_of_execution(name):
    model, x = normalized(name)
    method = parse("sphere:noise=linear,noise_scale=0.8").create(model)
    called = []
    for noise in method.noises:
        noise.register_forward_hook(lambda module, *_: called.append(module))
    model(x)
    assert called == method.noises
    assert [noise.deviation for noise in called] == pytest.approx(
        [0.8 * (1 + i) / len(called) for i in range(len(called))]
    )


class Tutorial(nn.Module):
    """As people write them: biases before normalizations, and one that is none of theirs."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6, affine=False)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc1 = nn.Linear(6, 7)
        self.bn2 = nn.BatchNorm1d(7)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x):
        x = self.conv2(self.relu(self.bn1(self.conv1(x))))
        return self.fc2(self.relu(self.bn2(self.fc1(self.relu(x).mean((2, 3))))))


def test_biases_go_where_a_beta_follows():
    model = Tutorial()
    parse("sphere").create(model)
    assert [name for name in ("conv1", "conv2", "fc1", "fc2") if model.get_submodule(name).bias is None] == [
        "conv1",
        "fc1",
    ]
    model = Tutorial()
    parse("sphere:affine=false").create(model)
    assert all(model.get_submodule(name).bias is not None for name in ("conv1", "conv2", "fc1", "fc2"))
    assert model(torch.randn(2, 3, 4, 4)).shape == (2, 3)
    assert not batch_norms(model)


def test_without_a_constraint_weights_are_free():
    """Of Table 3: no constraint, with noise."""
    model, _ = normalized("wrn-28-10")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    method = parse("sphere:constraint=none,noise=linear").create(model)
    assert len(method.noises) == len([name for name in before if "norm" in name and name.endswith("weight")])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if "affine" not in name)
    assert method.coordinates("conv1") is None
    assert method.readings("conv1") == {}


def test_noise_has_its_deviation_and_leaves_the_random_states_alone():
    noises = [Noise(0.1 * i, (5, i), 1) for i in range(1, 5)]
    a = torch.ones(1, 5000, 2, dtype=torch.float64)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    drawn = [noise(a) - a for noise in noises]
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002
    for number, found in enumerate(drawn, 1):
        # one number for each channel
        assert torch.equal(found, found[:1, :, :1].expand_as(found))
        # 5,000 numbers: the deviation is known to 1 % (one sigma), the mean to 1.4 % of it
        assert abs(found[0, :, 0].std() / (0.1 * number) - 1) < 0.05
        assert abs(found.mean()) < 0.07 * 0.1 * number
    correlation = torch.corrcoef(torch.stack([found[0, :, 0] for found in drawn]))
    assert (correlation - torch.eye(4)).abs().max() < 0.07
    # the same until the next step, in every precision; another one after it; none in evaluation
    assert torch.equal(noises[0](a) - a, drawn[0])
    assert torch.allclose(noises[0](a.float()) - 1, drawn[0].float(), rtol=1e-3, atol=1e-6)
    noises[0].step += 1
    assert abs(torch.corrcoef(torch.stack([(noises[0](a) - a)[0, :, 0], drawn[0][0, :, 0]]))[0, 1]) < 0.07
    assert torch.equal(noises[0].eval()(a), a)


@pytest.mark.parametrize(("noise", "deviations"), [("linear", [0.5, 1.0]), ("constant", [0.4, 0.4])])
def test_the_deviation_of_the_paper_is_that_of_the_schedule(noise, deviations):
    assert [own.deviation for own in parse(f"sphere:noise={noise}").create(mlp()[0]).noises] == deviations


def test_a_probe_sees_the_noise_of_the_step():
    model, (x, y) = mlp()
    method = parse("sphere:noise=constant,noise_scale=0.5").create(model)
    stepped(model, method, (x, y))
    with_noise = unit_truth(model, LOSS, (x, y), "4", 1)
    found = probe(model, LOSS, (x, y), ["4"], units=[1], method=method)["4"].hessian(1)
    assert torch.allclose(found, with_noise, rtol=1e-10, atol=1e-12)
    # an operator is that of the step at which it was made, whatever becomes of the model
    H = HessianOperator(model, LOSS, [(x[:40], y[:40]), (x[40:], y[40:])], layers="4", memory=1.0)
    assert H.retained[0] < 2
    v = torch.ones(H.order, dtype=torch.float64)
    before = H @ v
    method.after_step()
    assert torch.equal(H @ v, before)
    model.eval()
    assert not torch.allclose(unit_truth(model, LOSS, (x, y), "4", 1), with_noise, rtol=1e-3)


# ------------------------------------------------------------------------------------------------------------ the chart


class Truth:
    """The dense Hessian and gradient of a network in all its parameters, and tangent spaces written out."""

    def __init__(self, model, method, batch):
        named = dict(model.named_parameters())
        shapes = {name: p.shape for name, p in named.items()}
        self.point = torch.cat([p.detach().flatten() for p in named.values()])

        loss = LOSS(model(batch[0]), batch[1])
        self.g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, named.values(), retain_graph=True)])
        self.H = double_backward(loss, named.values())
        numbers = torch.arange(len(self.point)).split([shape.numel() for shape in shapes.values()])
        self.where = {name: n.view(shapes[name]) for name, n in zip(shapes, numbers, strict=True)}
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d, nn.ConvTranspose1d))
        }
        self.constrained = {name for name in self.layers if name.endswith(".layer")}

    def unit(self, layer, unit):
        """Where [b_i, w_i] are in the parameters of the model."""
        weights = rows_of(self.layers[layer], self.where[f"{layer}.weight"])[unit]
        bias = self.where.get(f"{layer}.bias")
        return weights if bias is None else torch.cat([bias[unit : unit + 1], weights])

    def riemannian(self, index, constraint, c):
        """T and Tᵀ(H − Λ)T, Λ = ⟨w_i, g_i⟩/c at weights, for an orthonormal basis T of the tangent space."""
        multipliers, normals = torch.zeros_like(self.point), []
        for name in self.constrained:
            for row in rows_of(self.layers[name], self.where[f"{name}.weight"]):
                w, one = torch.zeros_like(self.point), torch.zeros_like(self.point)
                w[row], one[row] = self.point[row], 1.0
                normals += [w] if constraint == "sphere" else [one] if constraint == "centred" else [w, one]
                if constraint != "centred":
                    multipliers[row] = self.point[row] @ self.g[row] / c
        normals = torch.stack(normals)[:, index].numpy()
        T = torch.from_numpy(scipy.linalg.null_space(normals[np.abs(normals).max(1) > 0]))
        R = T.T @ (self.H[index][:, index] - torch.diag(multipliers[index])) @ T
        return T, (R + R.T) / 2


@pytest.mark.share(8)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_the_hessian_in_the_chart_is_the_dense_one_on_the_tangent_space(kind, level, constraint):
    c = 1.7
    build, chosen = MODELS[kind]
    model, batch = build()
    method = parse(f"sphere:constraint={constraint},c={c}").create(model)
    stepped(model, method, batch)
    truth, name = Truth(model, method, batch), method.layer(chosen)
    units = len(rows_of(truth.layers[name], truth.layers[name].weight))
    if level == "unit":
        index = truth.unit(name, 1)
    elif level == "layer":
        index = torch.cat([truth.unit(name, unit) for unit in range(units)])
    else:
        index = torch.arange(len(truth.point))
    T, R = truth.riemannian(index, constraint, c)
    result = probe(model, LOSS, batch, None if level == "network" else [name], level, method)
    found = result["network" if level == "network" else name]
    unit = 1 if level == "unit" else None
    matrix = found.hessian(unit)
    assert (matrix - T @ R @ T.T).norm() <= 1e-11 * R.norm()
    # the normals count as nullity and not as eigenvalues
    values = np.linalg.eigvalsh(R.numpy())
    values = values[np.abs(values).argsort()[::-1]]
    # cross-entropy does not see what is added to all rows of the output layer alike
    output = list(truth.layers.values())[-1]
    invariant = output.in_features + 1 if level == "network" else 0
    rank = len(values) - invariant
    assert abs(values[rank - 1]) > 1e-9 * abs(values[0])
    kappa = found.kappa[1] if level == "unit" else found.kappa
    assert kappa.resolved
    assert (kappa.rank, kappa.nullity) == (rank, len(index) - rank)
    assert kappa.negative == int((values[:rank] < 0).sum())
    assert float(kappa) == pytest.approx(abs(values[0] / values[rank - 1]), rel=1e-9)
    eigenvalues = found.eigenvalues(unit).numpy()
    assert np.allclose(eigenvalues, np.sort(values[:rank])[::-1], rtol=1e-9, atol=1e-12 * abs(values[0]))


def test_ambient_coordinates_are_read_beside():
    model, batch = mlp()
    method = parse("sphere").create(model)
    assert method.readings("0.layer") == {"ambient": None, "projected": method.flat_chart}
    assert method.coordinates("0.layer").name == "tangent space, centred sphere"
    # a free layer is measured in the plain coordinates anyway
    assert method.coordinates("4") is None
    assert method.readings("4") == {}
    with pytest.raises(ConfigError, match=r"no layer '7' to probe in the model: it has 0\.layer"):
        method.coordinates("7")
    both = probe(model, LOSS, batch, method=method)
    plain = probe(model, LOSS, batch)
    assert torch.allclose(both["4"].hessian(2), plain["4"].hessian(2))
    chart = probe(model, LOSS, batch, ["4"], method=method.chart)["4"]
    assert torch.allclose(chart.hessian(2), plain["4"].hessian(2), rtol=1e-10, atol=1e-14)


@pytest.mark.share(2)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("level", ["layer", "network"])
def test_the_projected_hessian_is_read_beside(level, constraint):
    """T Tᵀ H T Tᵀ: the chart without the term that shifts all directions, which is there until training has ended."""
    model, batch = mlp()
    method = parse(f"sphere:constraint={constraint}").create(model)
    stepped(model, method, batch)
    truth = Truth(model, method, batch)
    index = torch.arange(len(truth.point))
    if level == "layer":
        index = torch.cat([truth.unit("2.layer", unit) for unit in range(4)])
    H = truth.H[index][:, index]
    T, R = truth.riemannian(index, constraint, 2.0)
    layers = ["2.layer"] if level == "layer" else None
    found = probe(model, LOSS, batch, layers, level, method.flat_chart)[layers[0] if layers else "network"].hessian()
    assert (found - T @ (T.T @ H @ T) @ T.T).norm() <= 1e-11 * H.norm()
    assert ("projected" in method.readings("2.layer")) is (constraint != "centred")
    assert bool((found - T @ R @ T.T).norm() <= 1e-11 * H.norm()) is (constraint == "centred")


# ------------------------------------------------------------------------------------------------------------- refusals


def test_weights_that_nothing_can_be_projected_of_are_refused():
    """The model is left as it was."""

    def create(constraint, value, words=None):
        model, _ = mlp()
        with torch.no_grad():
            model[2].weight[1] = value
        before = copy.deepcopy(model.state_dict())
        if words is None:
            parse(f"sphere:constraint={constraint}").create(model)
            return
        with pytest.raises(ConfigError, match=words):
            parse(f"sphere:constraint={constraint}").create(model)
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    create("both", 0.1, "unit 1 of layer '2' has weights that are all equal, and zero once they are")
    create("sphere", 0.0, "unit 1 of layer '2' has weights that are zero, and cannot be scaled")
    create("sphere", 0.1)
    create("centred", 0.1)
    model, _ = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ConfigError, match="the weight of layer '0' is computed from other parameters"):
        parse("sphere").create(model)


def test_the_chart_of_any_layers():
    """Without the method: weights on spheres by any other means."""
    model, batch = cnn()
    chart = SphereChart(model, [model[2]])
    found = probe(model, LOSS, batch, level="network", method=chart)["network"]
    truth = SphereTangentOperator(
        HessianOperator(model, LOSS, batch), positions={"2": torch.arange(27, 27 + 24).view(2, 12)}
    )
    assert torch.equal(found.operator.to_dense(), truth.to_dense())
    assert found.kappa.nullity >= 2


def test_float32_digits():
    """Weights on the set up to the rounding of float32 are measured as if they were on it."""
    x, y = digits(torch.float32)
    model = network("mlp", torch.float32)
    method = parse("sphere").create(model)
    stepped(model, method, (x[:100], y[:100]), steps=10, lr=0.05)
    weight = model.get_submodule("fc2.layer").weight.detach()
    assert on_the_set(weight, "both", 2.0, 1e-5)
    kappa = probe(model, LOSS, (x[:100], y[:100]), ["fc2.layer"], units=[3], method=method)["fc2.layer"].kappa[0]
    assert kappa.nullity >= 2

"""What every method must do. `test_methods_contract.py` runs it for all that are registered, others for variants.

A subclass of `MethodContract` names its variants, as ``--method`` does, in ``specs``.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

from hesscond.capture import eligible_layers
from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.hessians import Preconditioner, Reparametrized
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.methods import parse
from hesscond.methods.by_parameter import Learned
from hesscond.methods.regularization import Penalized
from hesscond.methods.sphere import SphereChart
from hesscond.models import MLP
from hesscond.probing.entry import probe

NETWORKS = ("mlp", "cnn")
DTYPES = (torch.float32, torch.float64)
BATCHES = (1, 2, 60)
#: The best of these is a method's learning rate.
RATES = (0.1, 0.02, 0.5, 0.004, 0.0005)


def network(kind, dtype=torch.float64, activation="relu"):
    """On digits as (N, 1, 8, 8): hidden layers of 20, or two convolutions."""
    generator = torch.Generator().manual_seed(0)
    if kind == "mlp":
        return MLP(64, [20, 20], 10, activation=activation, generator=generator).to(dtype)
    bend = nn.ReLU if activation == "relu" else nn.Tanh
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            bend(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            bend(),
            nn.Flatten(),
            nn.Linear(128, 10),
        ).to(dtype)


_DIGITS = []


def digits(dtype=torch.float64):
    """Images (N, 1, 8, 8) and labels."""
    if not _DIGITS:
        _DIGITS.append(load("digits"))
    data = _DIGITS[0]
    return data.train_inputs.reshape(-1, 1, 8, 8).to(dtype), data.train_targets


def created(spec, kind, model):
    """The method at work on the model; a skipped test if it is defined for the other network only."""
    try:
        return parse(spec).create(model)
    except ConfigError as refusal:
        for other in NETWORKS:
            if other != kind:
                parse(spec).create(network(other))
        pytest.skip(f"{spec} is not defined for the {kind}: {refusal}")


def build(spec, kind, dtype=torch.float64, activation="relu"):
    """A model, and the method at work on it."""
    model = network(kind, dtype, activation)
    method = created(spec, kind, model)
    method.fit(digits(dtype)[0])
    return model, method


def backward(model, method, x, y):
    """As the runner does it, up to the gradients."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    method.observe(loss)
    penalty = method.penalty(loss)
    (loss if penalty is None else loss + penalty).backward()


def trained(spec, kind, *, batch, dtype=torch.float64, steps, lr=0.02, optimizer="sgd", probing=False):
    """Model and method after some steps, and the loss of a fixed batch before and after."""
    model, method = build(spec, kind, dtype)
    method.check_batch(batch)
    x, y = digits(dtype)
    optimizer = method.optimizer(lr, kind=optimizer)
    generator = torch.Generator().manual_seed(1)

    def loss():
        model.eval()
        with torch.no_grad():
            found = nn.functional.cross_entropy(model(x[:300]), y[:300]).item()
        model.train()
        return found

    before = loss()
    for _ in range(steps):
        part = torch.randint(0, len(y), (batch,), generator=generator)
        backward(model, method, x[part], y[part])
        method.transform_gradients()
        if probing:
            name = method.layer("fc2" if kind == "mlp" else "3")
            own = None if "gradient-regularization" in spec else method
            result = probe(model, nn.CrossEntropyLoss(), (x[part], y[part]), [name], units=[0], method=own)
            float(result[name].kappa[0])
        optimizer.step()
        method.after_step()
    return model, method, before, loss()


def unit_parameters(layer, unit):
    """[b_i, w_i] of the weight that the layer multiplies with."""
    row = layer.weight.detach()[unit].reshape(-1)
    return row if layer.bias is None else torch.cat([layer.bias.detach()[unit : unit + 1], row])


def dense_unit_hessian(model, layer_name, unit, x, y):
    """torch.func.hessian of the loss in [b_i, w_i] of the weights that the layer multiplies with, all else fixed."""
    layer = model.get_submodule(layer_name)
    point, bias = unit_parameters(layer, unit), layer.bias is not None
    weight, offset = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    chosen = torch.arange(len(weight), device=weight.device) == unit

    def loss(v):
        row = v[1:] if bias else v
        new = torch.where(chosen.view(-1, *[1] * (weight.ndim - 1)), row.reshape(weight[unit].shape), weight)
        b = torch.where(chosen, v[0], offset) if bias else None

        def forward(input):
            if isinstance(layer, nn.Linear):
                return nn.functional.linear(input, new, b)
            return layer._conv_forward(input, new, b)

        original = layer.forward
        layer.forward = forward
        try:
            return nn.functional.cross_entropy(model(x), y)
        finally:
            layer.forward = original

    return torch.func.hessian(loss)(point).detach()


def dense_parameter_hessian(model, layer_name, unit, x, y):
    """torch.func.hessian in the parameters behind a layer: its bias, then its rows of the others, of one unit."""
    layer = model.get_submodule(layer_name)
    prefix = f"{layer_name}."
    own = {f"{prefix}{name}": p.detach() for name, p in layer.named_parameters()}
    names = sorted(own, key=lambda name: not name.endswith("bias"))
    names = [name for name in names if own[name].ndim and len(own[name]) == layer.weight.shape[0]]
    sizes = [own[name][unit].numel() for name in names]
    point = torch.cat([own[name][unit].reshape(-1) for name in names])

    def loss(v):
        changed = {}
        for name, part in zip(names, v.split(sizes), strict=True):
            here = (torch.arange(len(own[name])) == unit).view(-1, *[1] * (own[name].ndim - 1))
            changed[name] = torch.where(here, part.reshape(own[name][unit].shape), own[name])
        return nn.functional.cross_entropy(torch.func.functional_call(model, changed, (x,)), y)

    return torch.func.hessian(loss)(point).detach()


@contextlib.contextmanager
def untracked(model):
    """Leave running statistics alone, which a functional transform cannot write."""
    before = {
        module: module.track_running_stats for module in model.modules() if hasattr(module, "track_running_stats")
    }
    for module in before:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module, tracks in before.items():
            module.track_running_stats = tracks


def on_tangent_space(H, layer, unit, loss, *, sphere, centred):
    """Dense Riemannian Hessian of a unit on {‖w‖² = c}, {1ᵀw = 0} or both, extended by zero, from ∇²L and ∇L."""
    w, bias = layer.weight[unit].detach().flatten(), layer.bias is not None
    n, slope = len(w), torch.autograd.grad(loss, layer.weight)[0][unit].flatten()
    normals = torch.stack([w] * sphere + [torch.ones_like(w)] * centred, 1)
    project = torch.eye(n + bias, dtype=w.dtype)
    project[bias:, bias:] -= normals @ torch.linalg.pinv(normals)
    curved = torch.zeros_like(project)
    curved[bias:, bias:] = sphere * torch.eye(n, dtype=w.dtype) * (w @ slope / (w @ w))
    return project @ (H - curved) @ project


def dense_truth(model, method, name, unit, x, y):
    """The dense Hessian of a unit in the coordinates of a probe."""
    own = method.probed(name)
    with untracked(model):
        if isinstance(own, Reparametrized):
            return dense_parameter_hessian(model, name, unit, x, y)
        H = dense_unit_hessian(model, name, unit, x, y)
        if isinstance(own, SphereChart):
            loss = nn.functional.cross_entropy(model(x), y)
            sets = {"sphere": "sphere" in own.name, "centred": "centred" in own.name}
            return on_tangent_space(H, model.get_submodule(name), unit, loss, **sets)
    if isinstance(own, Penalized):
        P = torch.eye(len(H)).to(H) if own.P is None else own.P.of_unit(unit).matrix(len(H))
        return P.T @ H @ P + 2 * own.strength * (torch.eye(P.shape[1]).to(H) if own.in_z else P.T @ P)
    if isinstance(own, Preconditioner):
        P = own.of_unit(unit).matrix(len(H))
        return P.T @ H @ P
    assert own is None
    return H


def is_defined(spec, kind, batch):
    """Whether a method works at a batch size; that it does not must be said, and may be so at a single sample only."""
    method = created(spec, kind, network(kind))
    if batch > 1:
        method.check_batch(batch)
        return True
    try:
        method.check_batch(batch)
    except ConfigError as refusal:
        return "batch" not in str(refusal)
    return True


class MethodContract:
    """Inherited by the tests of methods; ``specs`` are the variants."""

    specs: tuple[str, ...] = ()
    #: Steps of training at batch sizes 1, 2 and 60.
    steps = {1: 400, 2: 300, 60: 120}  # noqa: RUF012

    def pytest_generate_tests(self, metafunc):
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)
        if "training" in metafunc.fixturenames:
            metafunc.parametrize(
                "training", [self.training(*case) for case in itertools.product(NETWORKS, DTYPES, BATCHES)]
            )

    def training(self, kind, dtype, batch):
        """A case of training; those that say most are fast."""
        quick = batch == 60 and dtype == torch.float32
        name = f"{kind}-{str(dtype).removeprefix('torch.')}-{batch}"
        marks = [pytest.mark.share(12)] if quick else [pytest.mark.slow, pytest.mark.share(18)]
        return pytest.param((kind, dtype, batch), id=name, marks=marks)

    def test_it_trains_or_says_why_not(self, spec, training):
        kind, dtype, batch = training
        if not is_defined(spec, kind, batch):
            return
        # noisy statistics of pairs take their time
        for longer, lr in itertools.product((1, 4), RATES):
            steps = longer * self.steps[batch]
            _, _, before, after = trained(spec, kind, batch=batch, dtype=dtype, steps=steps, lr=lr)
            if after < 0.9 * before:
                return
        pytest.fail(f"{spec} does not train: {before} → {after}")

    @pytest.mark.share(6)
    @pytest.mark.parametrize("kind", NETWORKS)
    def test_the_gradient_is_transformed_by_its_P(self, spec, kind):
        model, method, _, _ = trained(spec, kind, batch=30, steps=4)
        # what an optimizer does in its step is tested against that optimizer
        if not any(part.preconditions and not part.preconditions_in_step for part, _ in parse(spec).parts):
            return
        # M is multiplied with an average of gradients
        if isinstance(method, Learned) and (getattr(method, "momentum", 0) or getattr(method, "beta_1", 0)):
            return
        x, y = digits()
        backward(model, method, x[:40], y[:40])
        layers = eligible_layers(model)
        raw = {name: stacked_gradient(layer) for name, layer in layers.items()}
        method.transform_gradients()
        tested = 0
        for name, layer in layers.items():
            P = method.coordinates(name)
            if P is None:
                continue
            own = UnitCoordinates(P, range(len(raw[name])), raw[name].shape[1])
            truth = own.multiply(own.multiply_adjoint(raw[name].view(-1, 1))).view_as(raw[name])
            found = stacked_gradient(layer)
            # M may be huge where the gradients are rounding
            huge = P.unstructured
            rounding = 1e-13 * float(own.to_dense().square().sum(1).max() * raw[name].norm()) if huge else 0.0
            for unit in range(len(truth)):
                assert torch.allclose(
                    found[unit], truth[unit], rtol=1e-11, atol=1e-12 * float(truth[unit].abs().max()) + rounding
                ), name
            tested += 1
        assert tested

    @pytest.mark.share(6)
    @pytest.mark.parametrize("kind", NETWORKS)
    @pytest.mark.parametrize("activation", ["relu", "tanh"])
    def test_its_hessian_is_the_dense_one_in_its_coordinates(self, spec, kind, activation):
        model, method = build(spec, kind, activation=activation)
        x, y = digits()
        optimizer = method.optimizer(0.02)
        for start in (0, 30):
            backward(model, method, x[start : start + 30], y[start : start + 30])
            method.transform_gradients()
            optimizer.step()
            method.after_step()
        x, y = x[60:72], y[60:72]
        for layer, unit in {"mlp": [("fc2", 2), ("fc3", 3)], "cnn": [("0", 1), ("3", 2), ("6", 3)]}[kind]:
            name = method.layer(layer)
            if "gradient-regularization" in spec:
                with pytest.raises(ConfigError, match="third derivatives"):
                    probe(model, nn.CrossEntropyLoss(), (x, y), [name], units=[unit], method=method)
                continue
            truth = dense_truth(model, method, name, unit, x, y)
            found = probe(model, nn.CrossEntropyLoss(), (x, y), [name], units=[unit], method=method)[name]
            assert torch.allclose(found.hessian(unit), truth, rtol=1e-10, atol=1e-11 * float(truth.norm())), name

    @pytest.mark.share(6)
    @pytest.mark.parametrize("kind", NETWORKS)
    def test_probing_leaves_training_bit_identical(self, spec, kind):
        with_probe = trained(spec, kind, batch=16, dtype=torch.float32, steps=4, probing=True)[0]
        without = trained(spec, kind, batch=16, dtype=torch.float32, steps=4)[0]
        pairs = zip(with_probe.state_dict().items(), without.state_dict().items(), strict=True)
        assert all(a == b and torch.equal(s, t) for (a, s), (b, t) in pairs)

    @pytest.mark.share(6)
    @pytest.mark.parametrize("kind", NETWORKS)
    def test_its_state_saves_and_loads(self, spec, kind):
        """A twin that takes over all states goes on in the same way, bit for bit."""
        x, y = digits()
        model, method, _, _ = trained(spec, kind, batch=8, steps=3)
        twin, other = build(spec, kind)
        optimizers = [method.optimizer(0.02), other.optimizer(0.02)]
        backward(model, method, x[:20], y[:20])
        method.transform_gradients()
        optimizers[0].step()
        method.after_step()
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(method.state_dict())
        # torch keeps the very tensors that it is given
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for own, how, optimizer in zip((model, twin), (method, other), optimizers, strict=True):
            backward(own, how, x[20:40], y[20:40])
            how.transform_gradients()
            optimizer.step()
            how.after_step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    @pytest.mark.share(6)
    @pytest.mark.parametrize("kind", NETWORKS)
    def test_its_hooks_come_off(self, spec, kind):
        model, method = build(spec, kind)
        method.detach()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_it_says_what_it_is(self, spec):
        for method, _ in parse(spec).parts:
            assert method.summary
            assert method.source


def stacked_gradient(layer):
    """(m, n̂) gradients [b_i, w_i] of the units of a layer."""
    g = layer.weight.grad.flatten(1)
    return g.clone() if layer.bias is None else torch.cat([layer.bias.grad[:, None], g], 1)

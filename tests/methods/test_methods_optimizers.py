"""M = P Pᵀ that is read from the state of torch's optimizers, against their own steps; other libraries': support."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers import AtWork, known_optimizers, reads
from hesscond.operators import Dense, Matrix
from hesscond.probing.entry import probe
from tests.methods.stepping import (
    columns_of_M,
    data,
    dense_hessian,
    kappa,
    largest_difference,
    matrices,
    network,
    stepped,
)

WITHOUT = {"betas": (0.0, 0.9)}
LINEAR = {
    "SGD": {},
    "Adam": WITHOUT,
    "Adam, amsgrad": WITHOUT | {"amsgrad": True},
    "AdamW": WITHOUT | {"weight_decay": 0.0},
    "NAdam": WITHOUT,
    "RAdam": WITHOUT,
    "Adamax": WITHOUT,
    "RMSprop": {"alpha": 0.9},
    "RMSprop, centred": {"centered": True},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.01},
    "Rprop": {},
}


def made(name, parameters, **options):
    return getattr(torch.optim, name.partition(",")[0])(parameters, lr=0.01, **LINEAR.get(name, {}) | options)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", LINEAR)
def test_a_step_is_M_times_the_gradient(name, steps):
    """At t = 1 RAdam is not yet rectified, at t = 7 it is."""
    model = network()
    optimizer = made(name, model.parameters())
    assert largest_difference(model, optimizer, *stepped(model, optimizer, steps)) < 1e-12


#: Options, and those with which the state stands still.
STANDING = {
    "Adadelta": ({"eps": 1e-3}, {"rho": 1.0}),
    "ASGD": ({"lambd": 3.0}, {"lambd": 0.0}),
    "Adafactor": ({"d": 1e9}, {"beta2_decay": -np.inf}),
    "RMSprop": ({}, {"alpha": 1.0}),
}


@pytest.mark.parametrize("name", STANDING)
def test_M_is_that_of_steps_from_a_state_that_stands_still(name):
    """Column by column, along unit gradients; weights of (3, 2, 2), so that Adafactor has several pairs of averages."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(3, 2, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)])
    options, frozen = STANDING[name]
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    given, _ = stepped(model, optimizer, 5)
    M = columns_of_M(model, optimizer, freeze=lambda other: other.param_groups[0].update(frozen))
    own = AtWork(model, [optimizer]).preconditioned(given)
    truth = M @ torch.cat([g.flatten() for g in given.values()])
    assert torch.allclose(torch.cat([g.flatten() for g in own.values()]), truth, rtol=1e-9)


def test_adafactor_s_shortening_is_read_from_the_gradient():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-6)
    optimizer.param_groups[0]["d"] = 0.9
    given, moved = stepped(model, optimizer)
    assert largest_difference(model, optimizer, given, moved) < 1e-5
    optimizer.zero_grad()
    assert largest_difference(model, optimizer, given, moved) > 0.05


def spd(order):
    A = torch.randn(order, order, generator=torch.Generator().manual_seed(order), dtype=torch.float64)
    return (A + A.T) / order + 4 * torch.eye(order, dtype=torch.float64)


def by_axis(p):
    return [spd(size) if axis != 1 else None for axis, size in enumerate(p.shape)]


def kronecker(p):
    found = torch.ones(1, 1, dtype=torch.float64)
    for size, F in zip(p.shape, by_axis(p), strict=True):
        found = torch.kron(found, torch.eye(size, dtype=torch.float64) if F is None else F)
    return found


#: What a function of a parameter may return, and its dense M.
FORMS = {
    "number": (lambda p: 0.1 + p.ndim, lambda p: (0.1 + p.ndim) * torch.eye(p.numel(), dtype=torch.float64)),
    "diagonal": (lambda p: p.detach().abs() + 0.1, lambda p: (p.detach().abs() + 0.1).flatten().diag()),
    "matrix": (lambda p: spd(p.numel()), lambda p: spd(p.numel())),
    "operator M": (lambda p: Dense(spd(p.numel())), lambda p: spd(p.numel())),
    "operator P": (lambda p: Matrix(torch.linalg.cholesky(spd(p.numel()))), lambda p: spd(p.numel())),
    "factors": (by_axis, kronecker),
    "map": (lambda p: ParameterMap(p.detach().abs() + 1), lambda p: (p.detach().abs() + 1).flatten().square().diag()),
}


def transposed():
    """A transposed convolution, whose units are the second dimension of its weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(98, 4)).double()


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("form", "made"), [*((form, network) for form in FORMS), ("matrix", transposed), ("factors", transposed)]
)
def test_M_may_be_a_function_of_a_parameter(form, made):
    """Also where it acts across the units of a layer; κ(M^½ H M^½) of units, of layers and of the network."""
    model, (x, y) = made(), data()
    function, dense = FORMS[form]
    last = len(model) - 1
    model[last].weight.requires_grad_(made is network)  # 392 of them would be the whole time
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    places = np.split(
        np.arange(sum(map(torch.numel, map(model.get_parameter, names)))),
        np.cumsum([model.get_parameter(name).numel() for name in names])[:-1],
    )
    rows = dict(zip(names, places, strict=True))
    M = torch.block_diag(*(dense(model.get_parameter(name)) for name in names))
    H = dense_hessian(model, x, y, names)

    def agrees(found, index):
        assert found.value == pytest.approx(kappa(M[index][:, index], H[index][:, index], found.rank), rel=1e-5)

    loss = nn.CrossEntropyLoss()
    agrees(probe(model, loss, (x, y), level="network", method=function)["network"].kappa, np.arange(len(M)))
    bias, weight = rows["0.bias"], rows["0.weight"]
    own = probe(model, loss, (x, y), ["0"], level="layer", method=function)["0"].kappa
    agrees(own, np.concatenate([bias, weight]))
    by_unit = weight.reshape(model[0].weight.shape)
    by_unit = by_unit.swapaxes(0, 1) if made is transposed else by_unit
    for unit, own in enumerate(probe(model, loss, (x, y), ["0"], method=function)["0"].kappa):
        agrees(own, np.concatenate([bias[[unit]], by_unit[unit].flatten()]))


WRONG_M = {
    "of shape (7,), which is no M of a parameter of shape (3, 1, 3, 3)": lambda p: torch.ones(7),
    "is 'x', which is no M": lambda p: "x",
    "has negative, infinite or undefined entries": lambda p: -torch.ones_like(p),
    "is not symmetric": lambda p: torch.ones(p.numel(), p.numel()).triu(),
    "has negative eigenvalues": lambda p: -torch.eye(p.numel()),
    "has a factor that is no matrix (3, 3)": lambda p: [torch.ones(2, 2)] * p.ndim,
    "returns None for each": lambda p: None,
}


@pytest.mark.parametrize("message", WRONG_M)
def test_what_is_no_M_is_refused_in_a_sentence(message):
    with pytest.raises(ConfigError) as refusal:
        probe(network(), nn.CrossEntropyLoss(), data(), ["0"], level="layer", method=WRONG_M[message])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_reader_of_one_s_own_optimizer_is_one_line():
    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    v = self.state[p].setdefault("v", torch.ones_like(p))
                    p.sub_(group["lr"] * p.grad / v.add_(p.grad.square()).sqrt())

    reads(Mine)(lambda state: state.tensor("v").rsqrt())
    model = network()
    optimizer = Mine(model.parameters(), lr=0.1)
    assert largest_difference(model, optimizer, *stepped(model, optimizer)) < 1e-12
    wrapped = Wrapper(optimizer)
    result = probe(model, nn.CrossEntropyLoss(), data(), ["0"], level="layer", method=wrapped)
    assert result.coordinates == "coordinates: Mine in Wrapper, M^1/2"


class Wrapper:
    """What takes the steps of another optimizer, as wrappers of SAM do."""

    def __init__(self, base_optimizer):
        self.base_optimizer = base_optimizer

    def step(self):
        self.base_optimizer.step()


class Foreign:
    """What takes steps, and is no optimizer of torch."""

    def step(self):
        pass


@pytest.mark.parametrize("unknown", [lambda p: torch.optim.LBFGS(p), lambda p: Foreign(), lambda p: Wrapper(None)])
def test_a_watch_goes_on_without_coordinates_that_are_not_known(unknown, caplog):
    model = network()
    optimizer = unknown(model.parameters())
    watching = hesscond.watch(model, nn.CrossEntropyLoss(), data(), optimizer, every=1)
    plain = probe(model, nn.CrossEntropyLoss(), data(), level="layer")
    for _ in range(2):
        row = watching.step()
        assert row["hesscond/0/kappa"] == pytest.approx(plain["0"].kappa.value, rel=1e-3)
        assert not any("kappa_own" in key or "error" in key for key in row)
    assert caplog.text.count(f"the coordinates of {type(optimizer).__name__} are not known") == 1
    with pytest.raises(ConfigError, match="are not known"):
        probe(model, nn.CrossEntropyLoss(), data(), method=optimizer)


def test_a_watch_takes_M_as_a_function():
    """Sharpness is that of the step −M g."""
    model, (x, y) = network(), data()
    watching = hesscond.watch(model, nn.CrossEntropyLoss(), (x, y), lambda p: 0.3, every=1)
    row = watching.step()
    largest = max(
        float(torch.linalg.eigvalsh(dense_hessian(model, x, y, [f"{k}.weight", f"{k}.bias"]))[-1]) for k in (0, 3, 5)
    )
    assert row["hesscond/sharpness_times_rate"] == pytest.approx(0.3 * largest, rel=1e-3)
    assert row["hesscond/0/kappa_own"] == pytest.approx(row["hesscond/0/kappa"], rel=1e-3)


def test_rates_of_groups_belong_to_M():
    model = network()
    groups = [{"params": matrices(model.parameters())}, {"params": [p for p in model.parameters() if p.ndim == 1]}]
    groups[1] |= {"lr": torch.tensor(0.002, dtype=torch.float64)}
    optimizer = made("Adam", groups)
    given, moved = stepped(model, optimizer)
    assert largest_difference(model, optimizer, given, moved) < 1e-12
    assert AtWork(model, [optimizer]).rate == 0.01


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.9, 0.1)])
def test_momentum_and_weight_decay_are_left_out(momentum, decay):
    """M is that of the same optimizer without them, whose v is of the same gradients (AdamW's decay is decoupled)."""
    model, twin = network(), network()
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, betas=(b, 0.9), weight_decay=w)
        for m, b, w in ((model, momentum, decay), (twin, 0.0, 0.0))
    ]
    (given, _), _ = (stepped(m, o) for m, o in zip((model, twin), optimizers, strict=True))
    own, other = (AtWork(m, [o]).preconditioned(given) for m, o in zip((model, twin), optimizers, strict=True))
    for name, direction in own.items():
        assert torch.allclose(direction, other[name], rtol=1e-12)


def newton_schulz(B, coefficients, steps):
    """(L, X): the product of the polynomials, and what torch computes, of a wide matrix in numpy."""
    X = B / np.linalg.norm(B)
    L = np.eye(len(B)) / np.linalg.norm(B)
    a, b, c = coefficients
    for _ in range(steps):
        S = X @ X.T
        factor = a * np.eye(len(B)) + b * S + c * S @ S
        X, L = factor @ X, factor @ L
    return L, X


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(5, 48), (48, 5), (6, 6)])
def test_muon_multiplies_with_its_polynomial(shape, adjust):
    """Exactly in exact arithmetic; the step itself is rounded to bfloat16."""
    m, n = shape
    model = nn.Linear(n, m, bias=False, dtype=torch.float64)
    optimizer = torch.optim.Muon(
        model.parameters(), lr=0.01, momentum=0.7, nesterov=False, weight_decay=0.0, adjust_lr_fn=adjust
    )
    given, moved = stepped(model, optimizer)
    B = optimizer.state[model.weight]["momentum_buffer"]
    method = AtWork(model, [optimizer])
    L, X = newton_schulz(B.numpy() if m <= n else B.numpy().T, (3.4445, -4.7750, 2.0315), 5)
    scale = 0.2 * max(m, n) ** 0.5 if adjust == "match_rms_adamw" else max(1, m / n) ** 0.5
    step = method.preconditioned({"weight": B})["weight"]
    assert np.allclose(step, scale * (X if m <= n else X.T), rtol=1e-10, atol=1e-12)
    assert float((moved["weight"] + 0.01 * step).norm() / moved["weight"].norm()) < 0.05
    G = given["weight"].numpy()
    truth = scale * (L @ G if m <= n else G @ L)
    assert np.allclose(method.preconditioned(given)["weight"], truth, rtol=1e-9, atol=1e-11)


def test_muon_whose_polynomial_is_negative_is_refused():
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), ns_coefficients=(1.0, -40.0, 0.0))
    stepped(model, optimizer)
    with pytest.raises(ConfigError, match="change the sign"):
        probe(model, nn.MSELoss(), (torch.randn(9, 4), torch.randn(9, 3)), level="layer", method=optimizer)


def pair(model):
    """Muon for matrices and AdamW for the rest, as they are used."""
    linear = [m.weight for m in model if isinstance(m, nn.Linear)]
    rest = [p for p in model.parameters() if not any(p is w for w in linear)]
    return [torch.optim.Muon(linear, lr=0.02), torch.optim.AdamW(rest, lr=0.003)]


@pytest.mark.parametrize("layers", [None, ["2"]])
def test_a_layer_beside_one_whose_weight_is_computed_is_measured(layers):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    nn.utils.parametrizations.weight_norm(model[0])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    stepped(model, optimizer)
    M = columns_of_M(model, optimizer, freeze=lambda other: other.param_groups[0].update(alpha=1.0))
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3
    result = probe(model, nn.CrossEntropyLoss(), (x, y), layers, level="layer", method=optimizer)
    assert list(result) == ["2"]
    if layers is None:
        assert "the weight of layer '0' is computed from" in result.skipped["0"]
    rows = np.concatenate([np.full(p.numel(), name.startswith("2.")) for name, p in model.named_parameters()])
    found = result["2"].kappa
    H = dense_hessian(model, x, y)[rows][:, rows]
    assert found.value == pytest.approx(kappa(M[rows][:, rows], H, found.rank), rel=1e-6)
    with pytest.raises(ConfigError, match="the weight of layer '0' is computed from"):
        probe(model, nn.CrossEntropyLoss(), (x, y), ["0"], level="layer", method=optimizer)


def standing(model):
    """A group with the learning rate 0."""
    return [torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[-1].parameters()}])]


PARTS = {
    "all": pair,
    "the last layer": lambda model: [torch.optim.Adam(model[-1].parameters(), lr=0.01)],
    "the first layer, as it is": lambda model: [torch.optim.SGD(model[0].parameters(), lr=0.01)],
    "no bias": lambda model: [torch.optim.Adam([p for p in model.parameters() if p.ndim > 1], lr=0.01)],
    "biases": lambda model: [torch.optim.RMSprop([p for p in model.parameters() if p.ndim == 1], lr=0.01)],
    "a bias of another": lambda model: [
        torch.optim.SGD([model[0].bias], lr=0.1),
        torch.optim.Adam([model[0].weight, model[-1].weight]),
    ],
    "matrices": lambda model: [torch.optim.Muon([m.weight for m in model if isinstance(m, nn.Linear)], lr=0.02)],
    "a rate of 0": standing,
}


@pytest.mark.share(8)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_what_no_optimizer_moves_has_no_part_in_the_hessian(part, norm):
    """Each block names the parameters that move; the constructions of the support tests have its truth."""
    model = network(norm=norm)
    optimizers = PARTS[part](model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepped(model, optimizers)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    layers = {name.partition(".")[0] for name in sizes}
    result = probe(model, nn.CrossEntropyLoss(), data(), "*", level="layer", method=optimizers)
    whole = probe(model, nn.CrossEntropyLoss(), data(), level="network", method=optimizers)
    still = [name for name in sizes if name not in moved and model.get_parameter(name).requires_grad]
    assert set(result) == {name.partition(".")[0] for name in moved}
    assert result.coordinates.startswith(
        f"coordinates: {' and '.join(type(one).__name__ for one in optimizers)}, M^1/2"
    )
    for found in (*result.values(), *whole.values()):
        own = [name for name in moved if found.name == "network" or name.startswith(f"{found.name}.")]
        assert sorted(found.parameters) == sorted(own)
        assert found.n_params == found.kappa.rank + found.kappa.nullity == sum(sizes[name] for name in own)
    for name in layers - set(result):
        assert ("not trained by" in whole.skipped.get(name, "")) == any(n.startswith(f"{name}.") for n in still)
        with pytest.raises(ConfigError, match=f"layer '{name}' (is not trained by|requires no gradient)"):
            probe(model, nn.CrossEntropyLoss(), data(), [name], method=optimizers)
    for name in still:
        if name.partition(".")[0] in result:
            assert f"parameter '{name}' is not trained by" in result.skipped[name]
    assert ("moved by" in result.coordinates) == ("moved by" in whole.coordinates) == bool(still)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_frozen_parameters_are_not_moved(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3
    H = np.asarray(dense_hessian(model, x, y))[12:16, 12:16]
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    options = {"betas": (0.0, 0.9)} if kind == "Adam" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-12, **options)
    for _ in range(2):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    d = np.ones(4)
    if kind == "Adam":
        d = (optimizer.state[model[0].bias]["exp_avg_sq"] / (1 - 0.9**2)).sqrt().add(1e-8).rsqrt().numpy()
    result = probe(model, nn.CrossEntropyLoss(), (x, y), level="layer", method=optimizer)
    whole = probe(model, nn.CrossEntropyLoss(), (x, y), level="network", method=optimizer)
    for found in (result["0"], whole["network"]):
        assert found.parameters == ("0.bias",)
        assert found.hessian().numpy() == pytest.approx(d[:, None] * H * d, rel=1e-6)
    assert f"layer '2' requires no gradient, so that {kind} does not move it" in result.skipped["2"]


def test_a_probe_leaves_the_optimizer_as_it_was():
    model = network()
    optimizers = pair(model)
    stepped(model, optimizers)
    states = copy.deepcopy([one.state_dict() for one in optimizers])
    probe(model, nn.CrossEntropyLoss(), data(), level="layer", method=optimizers)
    for one, state in zip(optimizers, states, strict=True):
        assert repr(one.state_dict()) == repr(state)


class Own(torch.optim.Adam):
    """A subclass with a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


class Plain(torch.optim.Adam):
    """One without."""


def test_a_subclass_is_read_if_the_step_is_its_parent_s():
    for kind in (Plain, torch.optim.Adam, Plain):
        model = network()
        optimizer = kind(model.parameters(), betas=(0.0, 0.9))
        assert largest_difference(model, optimizer, *stepped(model, optimizer)) < 1e-12


def sparse(model):
    optimizer = torch.optim.Adagrad(model.parameters())
    stepped(model, optimizer)
    optimizer.state[model[0].weight]["sum"] = optimizer.state[model[0].weight]["sum"].to_sparse()
    return optimizer


def elsewhere(model):
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    optimizer.state[model[0].weight]["exp_avg_sq"] = torch.zeros_like(model[0].weight, device="meta")
    return optimizer


def changed(model, **options):
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    for group in optimizer.param_groups:
        group |= options
    return optimizer


BAD = {
    "taken no step with these parameters": lambda model: torch.optim.Adam(model.parameters()),
    "another model than the one to probe": lambda model: changed(network()),
    "coordinates of Own are not known .*: give M of its step": lambda model: Own(model.parameters()),
    "coordinates of LBFGS are not known": lambda model: torch.optim.LBFGS(model.parameters()),
    "sparse state": sparse,
    "is on meta, and its parameter on cpu": elsewhere,
    "maximizes": lambda model: changed(model, maximize=True),
    "is <function": lambda model: changed(model, lr=lambda step: 0.1),
    "are all 0": lambda model: changed(model, lr=0.0),
    "not a list with str": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), "adam"],
    "not the class Adam": lambda model: torch.optim.Adam,
}


@pytest.mark.parametrize("message", BAD)
def test_bad_optimizers_are_refused_in_a_sentence(message):
    model = network()
    with pytest.raises(ConfigError, match=message) as refusal:
        probe(model, nn.CrossEntropyLoss(), data(), level="layer", method=BAD[message](model))
    assert "\n" not in str(refusal.value)


def test_all_optimizers_of_torch_that_are_known_are_tested():
    own = {name.removeprefix("torch.optim.") for name in known_optimizers() if name.startswith("torch.optim.")}
    assert own == {name.partition(",")[0] for name in LINEAR} | {"Muon", *STANDING}

"""Steps with L2 and gradient regularization against the formulas with dense M and H."""

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import HessianOperator
from hesscond.methods import BNP, parse
from hesscond.probing.entry import probe
from tests.catalogue.parts import drawn
from tests.methods.contract import MethodContract, backward, digits, network
from tests.truth import double_backward

STRENGTH, LR = 0.03, 0.1
#: ρ so close to 1 that the running statistics stay.
FROZEN = f"rho={1 - 2**-53}"


class TestVariants(MethodContract):
    specs = ("l2:space=z", "bnp+gradient-regularization:space=z", "adam+l2:space=z")
    steps = {1: 150, 2: 100, 60: 40}  # noqa: RUF012


def small(norm=False, seed=0):
    """4 → 3 → 2, with or without a layer normalization, whose parameters belong to no dense layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        between = [nn.LayerNorm(3)] if norm else []
        return nn.Sequential(nn.Linear(4, 3), *between, nn.Tanh(), nn.Linear(3, 2)).double()


def batch(seed=0):
    return drawn(6, 4, classes=2, seed=seed, dtype=torch.float64)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def derivatives(model, x, y):
    """p, ∇L, H of all parameters in the order of the model."""
    loss = nn.functional.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    H = double_backward(loss, model.parameters())
    return flat(model), torch.cat([g.flatten() for g in gradient]).numpy(), H.numpy()


def frozen_bnp(spec, model):
    """BNP whose running statistics stay what they are (ρ = 1 − ε), and the dense M of them, built by hand."""
    method = parse(spec).create(model)
    rng = np.random.default_rng(0)
    bnp = next(part for part in getattr(method, "parts", [method]) if isinstance(part, BNP))
    state = bnp.state_dict()
    M, start = np.eye(len(flat(model))), 0
    for name, module in model.named_children():
        size = sum(p.numel() for p in module.parameters())
        if isinstance(module, nn.Linear):
            m, n = module.weight.shape
            mu, variance = rng.standard_normal(n), rng.uniform(0.1, 3, n)
            state["layers"][name] |= {"mu": torch.from_numpy(mu), "variance": torch.from_numpy(variance)}
            sigma = np.sqrt(variance + 1e-2 * variance.max() + 1e-4)
            P = np.block([[np.ones((1, 1)), -mu[None] / sigma], [np.zeros((n, 1)), np.diag(1 / sigma)]])
            for unit in range(m):
                # the weights come before the biases in the model, [b_i, w_i] in P
                own = [start + m * n + unit, *range(start + unit * n, start + unit * n + n)]
                M[np.ix_(own, own)] = P @ P.T
        start += size
    bnp.load_state_dict(state)
    return method, M


def step(model, method, optimizer, x, y):
    """One step as a study takes it."""
    backward(model, method, x, y)
    method.transform_gradients()
    optimizer.step()
    method.after_step()


def expected(kind, p, g, H, M, lr=LR):
    """The four formulas."""
    if kind == "l2:space=p":
        return p - lr * M @ (g + 2 * STRENGTH * p)
    if kind == "l2:space=z":
        return p - lr * M @ g - 2 * lr * STRENGTH * p
    if kind == "gradient-regularization:space=p":
        return p - lr * M @ (g + 2 * STRENGTH * H @ g)
    return p - lr * M @ (g + 2 * STRENGTH * H @ M @ g)


KINDS = ["l2:space=p", "l2:space=z", "gradient-regularization:space=p", "gradient-regularization:space=z"]


@pytest.mark.share(4)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_steps_with_bnp_are_the_formulas(kind, norm, first):
    """In both orders of the two methods; the parameters outside of BNP's layers have M = I."""
    part = f"{kind},strength={STRENGTH}"
    model = small(norm)
    method, M = frozen_bnp(f"bnp:{FROZEN}+{part}" if first else f"{part}+bnp:{FROZEN}", model)
    optimizer = method.optimizer(LR)
    for seed in range(3):
        x, y = batch(seed=seed)
        truth = expected(kind, *derivatives(model, x, y), M)
        step(model, method, optimizer, x, y)
        np.testing.assert_allclose(flat(model), truth, rtol=1e-12, atol=1e-13)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_adam_are_the_formulas(kind):
    """M of the step has the whole gradient in it; gradient regularization in z takes M of the step before."""
    model = small(norm=True)
    method = parse(f"adam:epsilon=1e-3+{kind},strength={STRENGTH}").create(model)
    optimizer = method.optimizer(LR)
    m = v = 0.0
    before = 1.0
    for t in range(1, 6):
        x, y = batch(seed=t)
        p, g, H = derivatives(model, x, y)
        added = {
            "l2:space=p": 2 * STRENGTH * p,
            "l2:space=z": 0 * p,
            "gradient-regularization:space=p": 2 * STRENGTH * H @ g,
            "gradient-regularization:space=z": 2 * STRENGTH * H @ (before * g),
        }[kind]
        m, v = 0.9 * m + 0.1 * (g + added), 0.999 * v + 0.001 * (g + added) ** 2
        before = 1 / (np.sqrt(v / (1 - 0.999**t)) + 1e-3)
        truth = p - LR * before * m / (1 - 0.9**t) - (2 * LR * STRENGTH * p if kind == "l2:space=z" else 0)
        step(model, method, optimizer, x, y)
        np.testing.assert_allclose(flat(model), truth, rtol=1e-11, atol=1e-12)


def test_adam_with_l2_in_z_is_torch_s_adamw():
    """Bit for bit, over 30 steps with a falling learning rate; weight decay is 2λ."""
    models = [small(norm=True), small(norm=True)]
    method = parse(f"adam+l2:space=z,strength={STRENGTH}").create(models[0])
    optimizers = [method.optimizer(0.01), torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=2 * STRENGTH)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for seed in range(30):
        x, y = batch(seed=seed)
        for model in models:
            backward(model, method, x, y)
        method.transform_gradients()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        method.after_step()
    assert np.array_equal(flat(models[0]), flat(models[1]))


def test_a_penalty_does_not_count_the_batch_twice_in_bnp():
    """The gradient is taken twice in one step, but there are as many samples as before: q² = n/N, not n/2N."""
    x, y = digits()
    model = network("mlp")
    method = parse("bnp+gradient-regularization").create(model)
    backward(model, method, x[:10], y[:10])
    method.transform_gradients()
    assert method.parts[0].states["fc1"].q_squared == 6.4


def test_parameters_without_a_gradient_are_left_alone():
    """Frozen, or not reached by the loss."""
    model = nn.ModuleDict({"used": small(), "unused": nn.Linear(2, 2).double()})
    model["used"][0].bias.requires_grad_(False)
    model.forward = model["used"].forward
    for spec in ("gradient-regularization:space=z", "l2:space=z", "bnp+gradient-regularization:space=z"):
        method = parse(spec).create(model)
        optimizer = method.optimizer(LR)
        still = [p.detach().clone() for p in (*model["unused"].parameters(), model["used"][0].bias)]
        step(model, method, optimizer, *batch())
        method.detach()
        after = [*model["unused"].parameters(), model["used"][0].bias]
        assert all(torch.equal(a, b) for a, b in zip(still, after, strict=True)), spec


def penalized_hessian(model, method, space, unit, x, y):
    """By torch, of the loss with the penalty in the z of a unit: [b_i, w_i] = P z."""
    layer = model[2]
    point = torch.cat([layer.bias[unit : unit + 1], layer.weight[unit]]).detach()
    own = method.coordinates("2")
    P = torch.eye(len(point)).double() if own is None else own.of_unit(unit).matrix(len(point))

    def loss(z):
        v = P @ z
        bias = torch.cat([layer.bias[:unit], v[:1], layer.bias[unit + 1 :]])
        weight = torch.cat([layer.weight[:unit], v[None, 1:], layer.weight[unit + 1 :]])
        output = nn.functional.linear(model[:2](x), weight, bias)
        return nn.functional.cross_entropy(output, y) + STRENGTH * (z if space == "z" else v).square().sum()

    return torch.func.hessian(loss)(torch.linalg.solve(P, point)).detach()


@pytest.mark.parametrize("space", ["p", "z"])
@pytest.mark.parametrize("with_", ["", "bnp+", "adam+"])
def test_the_hessian_with_the_penalty_is_read_beside_the_other(space, with_):
    model = small()
    method = parse(f"{with_}l2:space={space},strength={STRENGTH}").create(model)
    step(model, method, method.optimizer(LR), *batch())
    x, y = batch(seed=1)
    (chart,) = [chart for name, chart in method.readings("2").items() if f"with L2 in {space}" in name]
    found = probe(model, nn.CrossEntropyLoss(), (x, y), ["2"], method=chart, units=[1])["2"]
    truth = penalized_hessian(model, method, space, 1, x, y)
    assert torch.allclose(found.hessian(1), truth, rtol=1e-9, atol=1e-10 * float(truth.norm()))
    assert float(found.kappa[0]) == pytest.approx(float(torch.linalg.cond(truth)), rel=1e-6)
    if not with_:
        whole = chart.network(lambda: HessianOperator(model, nn.CrossEntropyLoss(), (x, y)))[0].to_dense()
        H = derivatives(model, x, y)[2]
        np.testing.assert_allclose(whole, H + 2 * STRENGTH * np.eye(len(H)), rtol=1e-9, atol=1e-12)
    else:
        with pytest.raises(ConfigError, match="is that of one layer"):
            chart.network(lambda: None)


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_the_hessian_of_the_penalty_alone_is_not_zero(level):
    """Of units that no sample reaches."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.constant_(model[0].bias, -100.0)
    batch = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    for strength, rank in ((0.5, 1), (0.0, 0)):
        found = probe(model, nn.MSELoss(), batch, ["0"], level, method=f"l2:strength={strength}")["0"]
        for kappa, order in zip(found.conditions, [4 if level == "unit" else 16] * len(found.conditions), strict=True):
            assert (kappa.rank, kappa.is_zero) == (rank * order, not rank)
            assert not rank or kappa.value == 1


def test_frozen_parameters_have_no_penalty():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    model[0].bias.requires_grad_(False)
    x = torch.randn(10, 3).double()
    batch, rows = (x, torch.randn(10, 2).double()), torch.cat([torch.ones(10, 1).double(), x], 1)
    truth = rows.T @ rows / 10 + torch.diag(torch.tensor([0.0, 1, 1, 1]).double())
    for level, expected in (("unit", truth), ("layer", torch.block_diag(truth, truth))):
        found = probe(model, nn.MSELoss(), batch, ["0"], level, method="l2:strength=0.5")["0"]
        assert torch.allclose(found.hessian(0 if level == "unit" else None), expected, rtol=1e-12)
    method = parse("bnp+l2").create(model)
    step(model, method, method.optimizer(LR), x, torch.arange(10) % 2)
    with pytest.raises(CaptureError, match="some of '0' are not"):
        probe(model, nn.MSELoss(), batch, ["0"], method=method)


def test_in_a_chart_the_penalty_is_not_read():
    method = parse("sphere+l2").create(network("mlp"))
    assert not any("L2" in name for name in method.readings(method.layer("fc2")))
    assert any("L2" in name for name in method.readings("fc3"))


def test_coordinates_without_M_are_refused():
    model = network("mlp")
    method = parse("sphere+gradient-regularization:space=z").create(model)
    with pytest.raises(ConfigError, match="have no M = P P"):
        backward(model, method, *(part[:20] for part in digits()))

"""Statements on a layer of a network in training, against automatic differentiation of the whole network."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian

from hesscond.capture import capture
from hesscond.hessians.build import unit_hessian
from hesscond.problem import MEMORY
from hesscond.spectra import condition_number
from hesscond.theorems import LayerNetwork, LayerStatement, Observation, statement, statements
from hesscond.theorems.bnp_identities import same_unit
from tests.theorems.verdicts import kappa, observed_inputs


def regression(*, bias=True, samples=40, activation=nn.Tanh, seed=0):
    """Least squares behind two layers: a Hessian of the first that has full rank."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2, bias=bias), activation(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x, y = (torch.randn(samples, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return model, nn.functional.mse_loss, (x + 0.5, y)


def seen_in(model, loss_fn, batch, layer, unit=0, dtype=torch.float64):
    captured = capture(model, loss_fn, batch, [layer], units={layer: (unit,)})[layer]
    H, block = captured.h.double().numpy(), unit_hessian(captured, unit, MEMORY)
    weight = model.get_submodule(layer).weight.detach().double().flatten(1).numpy()
    found = block.condition_number()
    network = LayerNetwork(model, loss_fn, batch, layer, dtype)
    return Observation(
        *observed_inputs(H), len(H), weight, found, found, means=H.mean(0), unit=unit, hessian=block, network=network
    )


def outcomes(id, *arguments, **named):
    one = statement(id) if isinstance(id, str) else id
    found = one.observe(seen_in(*arguments, **named))
    return {claim.name: outcome for claim, outcome in zip(one.claims, found, strict=True)}


def layer_hessian(model, loss_fn, batch, layer, change=lambda W: W):
    """In W, then b, of the network that multiplies with change(W)."""
    own = model.get_submodule(layer)
    W, b = own.weight.detach(), own.bias

    def loss(theta):
        parts = {f"{layer}.weight": change(theta[: W.numel()].view_as(W))}
        if b is not None:
            parts[f"{layer}.bias"] = theta[W.numel() :]
        return loss_fn(functional_call(model, parts, (batch[0],)), batch[1])

    return hessian(loss)(torch.cat([W.flatten(), *([] if b is None else [b.detach()])])).detach().numpy()


def by_input(W):
    return W / W.norm(dim=0, keepdim=True)


def by_unit(W):
    return W / W.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_three_readings_of_a_layer(bias, seed):
    problem = regression(bias=bias, seed=seed)
    found = outcomes("wc-theorem-2", *problem, "0")
    model, W = problem[0], problem[0][0].weight.detach().clone()
    before = kappa(layer_hessian(*problem, "0"))
    equilibrations = {"{} through E(W)W": by_input, "{} row-column": lambda V: by_unit(by_input(V))}
    for name, equilibrate in equilibrations.items():
        through = kappa(layer_hessian(*problem, "0", change=equilibrate))
        with torch.no_grad():
            model[0].weight.copy_(equilibrate(W))
        H = layer_hessian(*problem, "0")
        with torch.no_grad():
            model[0].weight.copy_(W)
        scale = np.concatenate([(equilibrate(W) / W).flatten().numpy(), np.ones(2 if bias else 0)])
        truth = {"(a)": through, "(b)": kappa(H), "(c)": kappa(scale[:, None] * H * scale)}
        names = {"(b)": "(b) at the point EW", "(c)": "(c) E frozen"} if "through" in name else {}
        for reading, after in truth.items():
            outcome = found[names.get(reading, name.format(reading))]
            assert outcome.used == pytest.approx(after / before, rel=1e-6)
            assert outcome.status == ("holds" if after < before else "violated")
    assert found["scale identity"].status == "holds"
    assert found["nullity"].status == "not-applicable"


def test_why_a_layer_has_no_full_rank():
    model, _, (x, _) = regression()
    labels = torch.arange(len(x)) % 2

    def reasons(*problem, layer="0"):
        found = outcomes("wc-theorem-2", *problem, layer)
        assert found["scale identity"].status == "holds"
        return {(o.status, o.reason) for name, o in found.items() if name.startswith("(")}

    (softmax,) = reasons(model, nn.functional.cross_entropy, (x, labels), layer="2")
    assert softmax == ("not-applicable", "H is singular: no loss sees what changes all units alike")
    # and it is: one null vector for each weight of a unit
    H = layer_hessian(model, nn.functional.cross_entropy, (x, labels), "2")
    assert condition_number((H + H.T) / 2, error=1e-13).nullity == 3
    (few,) = reasons(*regression(samples=3))
    assert few == ("not-applicable", "H is singular: fewer samples than weights of a unit")
    model, loss_fn, (x, y) = regression()
    x[:, 1] = 2.0
    (constant,) = reasons(model, loss_fn, (x, y))
    assert constant == ("not-applicable", "H is singular: some inputs of the layer are constant")


def test_a_hessian_that_is_too_large_to_form(monkeypatch):
    monkeypatch.setattr("hesscond.theorems.weight_conditioning.FORMED", 7)
    found = outcomes("wc-theorem-2", *regression(), "0")["(c) E frozen"]
    assert found.status == "unresolved"
    assert "8 weights, 40 samples" in found.reason


def test_a_weight_that_is_computed_is_not_trained_itself():
    model, loss_fn, batch = regression()
    nn.utils.parametrizations.weight_norm(model[0])
    found = outcomes("wc-theorem-2", model, loss_fn, batch, "0")
    assert {outcome.status for outcome in found.values()} == {"not-applicable"}


def test_the_network_is_left_as_it_is():
    model, loss_fn, batch = regression()
    model[1] = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(2).double())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    for one in statements():
        if isinstance(one, LayerStatement) and "Linear" in one.layers:
            one.observe(seen_in(model, loss_fn, batch, "2"))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_the_hessian_of_a_unit(activation):
    problem = regression(activation=activation)
    found = outcomes("bnp-proposition-2", *problem, "0", unit=1)
    assert found["Hessian"].status == "holds"
    other = seen_in(*problem, "0", unit=0)
    wrong = Observation(*[getattr(other, name) for name in list(other.__dict__)[:8]], 1, other.hessian, other.network)
    assert same_unit(wrong).status == "violated"


def test_the_hessian_of_a_channel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    batch = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.arange(6) % 2
    captured = capture(model, nn.functional.cross_entropy, batch, ["0"], units={"0": (2,)})["0"]
    block, weight = unit_hessian(captured, 2, MEMORY), model[0].weight.detach().flatten(1).numpy()
    network, nothing = LayerNetwork(model, nn.functional.cross_entropy, batch, "0"), np.empty((0, 1))
    seen = Observation(nothing, nothing, nothing, 6, weight, None, None, unit=2, hessian=block, network=network)
    assert [outcome.status for outcome in statement("bnp-proposition-9").observe(seen)] == ["holds", "not-applicable"]


def test_single_precision_is_no_violation():
    model, loss_fn, (x, y) = regression()
    single = (model.float(), loss_fn, (x.float(), y.float()))
    assert outcomes("bnp-proposition-2", *single, "0", dtype=None)["Hessian"].status == "holds"


def test_proposition_11_of_a_unit():
    model, _, (x, y) = regression(activation=nn.ReLU)
    definite = outcomes("bnp-proposition-11", model, nn.functional.cross_entropy, (x, y.argmax(1)), "2")
    assert definite["S > 0"].status == "holds"
    # all entries of S alike: both sides are equal
    assert outcomes("bnp-proposition-11", model, nn.functional.mse_loss, (x, y), "2")["S > 0"].status == "unresolved"
    hidden = outcomes("bnp-proposition-11", model, nn.functional.cross_entropy, (x, y.argmax(1)), "0")
    assert hidden["S > 0"].reason == "S is singular"
    assert hidden["S ≥ 0, active rows"].status == "holds"
    curved = outcomes("bnp-proposition-11", *regression(), "0")
    assert curved["S > 0"].reason == "S is indefinite"


@pytest.mark.parametrize("bias", [True, False])
def test_the_row_blocks_of_a_softmax_layer(bias):
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=bias)).double()
    x, labels = torch.randn(30, 4, generator=generator, dtype=torch.float64), torch.arange(30) % 3
    problem = (model, nn.functional.cross_entropy, (x, labels))
    found = outcomes("softmax-row-blocks", *problem, "2")
    assert found["sum"].status == "holds"
    assert found["(3.6)"].status == "not-applicable"
    H = layer_hessian(*problem, "2")
    rows = np.arange(15).reshape(3, 5)
    if bias:
        rows = np.hstack([rows, 15 + np.arange(3)[:, None]])
    squares = np.array([[(H[np.ix_(a, b)] ** 2).sum() for b in rows] for a in rows])
    own = np.diagonal(squares)
    pairs = (squares - np.diag(own)).max(1) / own
    assert found["any weights"].used == pytest.approx(pairs.max() ** 0.5 * 3 / 2, rel=1e-6)
    for other in (outcomes("softmax-row-blocks", *problem, "0"), outcomes("softmax-row-blocks", *regression(), "2")):
        assert {outcome.status for outcome in other.values()} == {"not-applicable"}

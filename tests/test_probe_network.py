"""Level "network": one block of all parameters, against dense second derivatives."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator, network_null_directions
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.null_space import combined
from hesscond.hessians.null_space.reduced import remaining
from hesscond.methods import parse
from hesscond.probing.results import NETWORK
from hesscond.spectra.forms import SolverLimits
from tests.catalogue import CASES, case
from tests.catalogue.cases import split
from tests.catalogue.parts import drawn
from tests.hessians.test_hessians_network import network_truth
from tests.methods.stepping import dense_hessian, kappa

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

#: Of each kind one; the others are slow tests.
KINDS = {
    "leaky-ce-sum", "relu-ce-weighted-ignored", "gelu-mse", "dict-output", "attention-sdpa", "conv2d-groups",
    "transposed2d-groups", "train-dropout-tanh", "train-batchnorm-tanh-mse", "unreached-and-frozen", "siamese-tanh",
}  # fmt: skip

SLOW = [pytest.mark.slow, pytest.mark.share(4)]


def mlp(*widths, seed=0):
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@pytest.mark.share(2)
@pytest.mark.parametrize("example", [pytest.param(c, id=c.name, marks=[] if c.name in KINDS else SLOW) for c in CASES])
def test_kappa_of_the_whole_network_is_that_of_the_dense_matrix(example):
    H, _, _ = network_truth(example)
    result = hesscond.probe(*example.make(), level="network")[NETWORK]
    kappa = result.kappa
    magnitudes = torch.linalg.eigvalsh(H).abs().sort(descending=True).values
    top = float(magnitudes[0])
    assert kappa.rank + kappa.nullity == len(H) == result.n_params
    assert kappa.lambda_max == pytest.approx(top, rel=1e-9)
    known = sum(directions.dimension for directions in result.null_directions)
    assert kappa.nullity >= known or not kappa.resolved
    # what is claimed to be null is so
    assert float(magnitudes[len(H) - known :].sum()) <= 1e-9 * top
    if kappa.resolved:
        assert kappa.lambda_min == pytest.approx(float(magnitudes[kappa.rank - 1]), abs=1e-11 * top, rel=1e-6)
        assert bool((magnitudes[kappa.rank :] <= 1e-11 * top).all())
        assert kappa.lower <= kappa.value <= kappa.upper


@pytest.mark.parametrize("name", ["relu-ce-weighted-ignored", "conv2d-groups", "gelu-mse", "train-batchnorm-tanh-mse"])
def test_remaining_coordinates_lose_nothing(name):
    """The columns of Z are orthonormal, and H has nothing outside their span."""
    model, loss_fn, batch = case(name).make()
    H = HessianOperator(model, loss_fn, batch)
    found = network_null_directions(H)
    Z, left = remaining(found, H.order, dtype=H.dtype, device=H.device)
    dense, truth = Z.to_dense(), H.to_dense()
    torch.testing.assert_close(dense.T @ dense, torch.eye(Z.shape[1], dtype=H.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(Z.T.to_dense(), dense.T, rtol=0, atol=1e-12)
    inside = dense @ dense.T
    assert (inside @ truth @ inside - truth).norm() <= 1e-10 * truth.norm()
    null = combined(found)
    assert H.order - Z.shape[1] + (0 if left is None else left.dimension) == (0 if null is None else null.dimension)


FROZEN = ("0.weight", "0.bias", "0.weight 0.bias", "2.bias")


def steps_along_unit_gradients(method, parameters):
    """M (n, n) of a method that preconditions layers: what it makes of each unit gradient."""
    sizes, columns = [p.numel() for p in parameters], []
    for unit in torch.eye(sum(sizes), dtype=torch.float64):
        for p, g in zip(parameters, unit.split(sizes), strict=True):
            p.grad = g.view(p.shape).clone()
        for state in method.states.values():
            if state.module.weight.grad is not None:
                state.precondition()
        columns.append(torch.cat([p.grad.flatten() for p in parameters]))
    return torch.stack(columns, 1)


@pytest.mark.share(3)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("spec", ["bnp", "whitening", "kfac", "gauss-newton"])
def test_what_is_frozen_has_no_part_in_a_network_in_coordinates_either(spec, frozen):
    """As in the plain Hessian, which is of the trained parameters; M from the method's own steps."""
    model, (x, y) = mlp(4, 4, 3).double(), drawn(40, 4)
    x = x.double()
    for name in frozen.split():
        model.get_parameter(name).requires_grad_(False)
    method = parse(spec).create(model)
    loss = nn.functional.cross_entropy(model(x), y)
    method.observe(loss)
    loss.backward()
    method.transform_gradients()
    if spec in ("kfac", "gauss-newton") and frozen in ("0.bias", "2.bias"):
        # a unit's weights and its bias have a root of M together
        with pytest.raises(ConfigError, match=rf"layer '{frozen[0]}' has frozen parameters, and {spec}, M\^1/2 acts"):
            hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level="network", method=method)
        return
    found = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level="network", method=method)["network"].kappa
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    H = dense_hessian(model, x, y, names=set(trained))
    M = steps_along_unit_gradients(method, list(trained.values()))
    plain = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level="network")["network"].kappa
    assert found.resolved
    assert found.rank == plain.rank < len(H)
    assert found.value == pytest.approx(kappa(M, H, found.rank), rel=1e-7)


def test_a_layer_without_a_trained_weight_takes_plain_steps():
    """In its bias: a method that learns from inputs has none of this layer, and its P would be that of nothing."""
    model, (x, y) = mlp(4, 4, 3).double(), drawn(40, 4)
    x = x.double()
    model[0].weight.requires_grad_(False)
    plain = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), ["0"], level="layer")["0"].kappa
    for spec in ("kfac", "ekfac", "bnp", "whitening", "gauss-newton"):
        method = parse(spec).create(model)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        method.observe(loss)
        loss.backward()
        before = model[0].bias.grad.clone()
        method.transform_gradients()
        assert torch.equal(model[0].bias.grad, before)
        assert method.probed("0") is None
        found = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), ["0"], level="layer", method=method)["0"].kappa
        assert found.value == pytest.approx(plain.value, rel=1e-12)
        method.detach()


def test_shares_of_the_extreme_eigenvectors():
    example = case("conv2d-two-layers")
    result = hesscond.probe(*example.make(), level="network")[NETWORK]
    H, _, _ = network_truth(example)
    vectors = torch.linalg.eigh(H).eigenvectors[:, [-1, 0]].square()
    frame = result.by_layer().set_index("layer")
    assert frame["n_params"].sum() == len(H)
    np.testing.assert_allclose(frame[["share_top", "share_bottom"]].sum(), 1, rtol=1e-10)
    operator = result.operator
    for layer in frame.index:
        rows = [where for name, where in operator.parts.items() if name.rpartition(".")[0] == layer]
        expected = sum(vectors[where].sum(0) for where in rows)
        np.testing.assert_allclose(frame.loc[layer, ["share_top", "share_bottom"]], expected, rtol=1e-5, atol=1e-7)


def convex(samples=300, features=11):
    """One layer under a convex loss: the Hessian of the whole network is positive semidefinite."""
    inputs, _ = drawn(samples, features)
    inputs = inputs * torch.logspace(0, -1.5, features)
    torch.manual_seed(0)
    targets = torch.randn(samples, 4)
    return nn.Linear(features, 4), nn.MSELoss(), (inputs, targets)


@pytest.mark.parametrize("make", [convex, lambda: (mlp(9, 7, 4), nn.CrossEntropyLoss(), drawn(80, 9, classes=4))])
def test_iterations_agree_with_the_dense_route(make):
    """Or say that they cannot: an indefinite Hessian may need more products than they are given."""
    result = hesscond.probe(*make(), level="network")[NETWORK]
    block = result.block(None)
    known = block.known
    iterative = NetworkHessian(block.operator, SolverLimits(dense_order=0, quick_order=0), lambda: known)
    kappa, truth = iterative.condition_number(), result.kappa
    assert kappa.lambda_max == pytest.approx(truth.lambda_max, rel=1e-6)
    assert kappa.lower <= truth.value * (1 + 1e-9)
    if kappa.resolved:
        assert kappa.value == pytest.approx(truth.value, rel=1e-6)
        assert kappa.lower <= truth.value <= kappa.upper
        assert kappa.rank_decision == "iterative"
        assert kappa.nullity == truth.nullity
    assert kappa.resolved or make is not convex


def test_too_few_products_are_unresolved():
    block = hesscond.probe(*convex(features=200), level="network")[NETWORK].block(None)
    # without an inverse a few products do not reach the bottom
    poor = NetworkHessian(block.operator, SolverLimits(products=6, dense_order=0, quick_order=0))
    kappa = poor.condition_number()
    assert not kappa.resolved
    assert kappa.upper == float("inf")
    assert 1 <= kappa.lower <= block.condition_number().value


def test_bad_requests():
    model, loss_fn, batch = mlp(4, 3, 2), nn.CrossEntropyLoss(), drawn(12, 4, classes=2)
    with pytest.raises(ConfigError, match="level 'network'"):
        hesscond.probe(model, loss_fn, batch, ["0"], level="network", units=[1])
    with pytest.raises(ConfigError, match="has no unit 1"):
        hesscond.probe(model, loss_fn, batch, level="network")[NETWORK].hessian(unit=1)
    normalized = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"'1\.weight' belongs to none"):
        hesscond.probe(normalized, loss_fn, batch, level="network", method="bnp")
    assert hesscond.probe(normalized, loss_fn, batch, ["0", "2"], level="network", method="bnp")[NETWORK].n_params > 0


def one_of_two(rank, store, level, found):
    """A process of two that measure together."""
    store = torch.distributed.FileStore(store, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        group, (x, y) = torch.distributed.group.WORLD, drawn(47, 6)
        share = [(x[:20], y[:20]), (x[20:30], y[20:30])] if rank else (x[30:], y[30:])
        weight = [2.0, 1.0] if rank else [1.7]
        result = hesscond.probe(mlp(6, 5, 3), nn.CrossEntropyLoss(), share, level=level, weight=weight, group=group)
        result.to_frame().to_pickle(f"{found}-{rank}")
        with pytest.raises(ConfigError, match="the processes have different parameters"):
            hesscond.probe(mlp(6, 5, 3, seed=rank), nn.CrossEntropyLoss(), share, group=group)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_each_of_two_processes_measures_the_data_of_both(tmp_path, level):
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path / "store"), level, str(tmp_path / "found")), nprocs=2)
    x, y = drawn(47, 6)
    one = hesscond.probe(mlp(6, 5, 3), nn.CrossEntropyLoss(), [(x, y)], level=level).to_frame()
    for rank in range(2):
        two = pd.read_pickle(tmp_path / f"found-{rank}")
        assert one[["layer", "unit", "n_params", "rank"]].equals(two[["layer", "unit", "n_params", "rank"]])
        for name in ("lambda_max", "lambda_min", "kappa"):
            np.testing.assert_allclose(two[name], one[name], rtol=1e-9 if name == "lambda_max" else 1e-7)


def test_the_command_is_one_process(call_cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = call_cli("probe", "mine.py:make")
    assert done.code == 2
    assert "start hesscond probe without torchrun" in done.err


@pytest.mark.share(3)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.Tanh(), nn.ReLU()])
@pytest.mark.parametrize("scales", [[1e-6, 3e3], [1e-9, 1.0], [1.0, 1.0]])
def test_small_features_are_no_zeros_of_a_network(activation, scales):
    """The rank is that of the same network on features of size one, whose weights take the scales: a congruence."""
    torch.manual_seed(3)
    x, y = torch.randn(20, 2).double(), torch.randn(20, 1).double()
    model = nn.Sequential(nn.Linear(2, 2), activation, nn.Linear(2, 1)).double()
    plain = hesscond.probe(model, nn.MSELoss(), (x, y), level="network")["network"].kappa
    with torch.no_grad():
        model[0].weight /= torch.tensor(scales)
    scaled = (x * torch.tensor(scales), y)
    kappa = hesscond.probe(model, nn.MSELoss(), scaled, level="network")["network"].kappa
    assert plain.resolved
    assert not kappa.resolved or kappa.rank == plain.rank
    if scales == [1.0, 1.0]:
        assert kappa.resolved


def passes(model):
    """A function that says how often the model has run."""
    # an attribute of a hook would be put back as the probe found it
    count = 0

    def hook(*_):
        nonlocal count
        count += 1

    model.register_forward_pre_hook(hook)
    return lambda: count


@pytest.mark.share(2)
@pytest.mark.parametrize("method", [None, "bnp"])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), lambda o, t: nn.functional.cross_entropy(o, t)])
@pytest.mark.parametrize("check", [False, True])
def test_every_batch_runs_once_and_once_more_for_the_check(method, loss_fn, check):
    model, data = mlp(6, 8, 3), split(drawn(80, 6), [20, 20, 20, 20])
    count = passes(model)
    result = hesscond.probe(model, loss_fn, data, level="network", method=method, check=check)[NETWORK]
    assert result.kappa.resolved
    assert method is not None or result.null_directions
    # the first batch runs once more for a difference of gradients
    assert count() == (9 if check else 4)


def test_what_rounding_does_to_the_products_takes_one_run_more():
    model, data = mlp(6, 8, 3).float(), [(x.float(), y) for x, y in split(drawn(80, 6), [20, 20, 20, 20])]
    count = passes(model)
    result = hesscond.probe(model, nn.CrossEntropyLoss(), data, level="network", dtype=None)[NETWORK]
    assert result.check.passed
    assert result.uncertainty > 0
    # and two in float64 for a difference of gradients
    assert count() == 11


def test_data_that_can_be_read_once_are_enough():
    model, data = mlp(6, 8, 3), split(drawn(80, 6), [30, 40, 10])
    plain, once = (
        hesscond.probe(model, nn.CrossEntropyLoss(), source, level="network")[NETWORK] for source in (data, iter(data))
    )
    assert once.kappa == plain.kappa
    assert [str(own) for own in once.null_directions] == [str(own) for own in plain.null_directions]


def test_coordinates_of_a_method():
    model, loss_fn, batch = mlp(6, 5, 3), nn.CrossEntropyLoss(), drawn(200, 6)
    plain = hesscond.probe(model, loss_fn, batch, level="network")[NETWORK]
    found = hesscond.probe(model, loss_fn, batch, level="network", method="bnp")[NETWORK]
    blocks = []
    for name, units in (("0", 5), ("2", 3)):
        with torch.no_grad():
            h = (batch[0] if name == "0" else model[:2](batch[0])).double()
        sigma = h.std(0, correction=0)
        live = sigma > 0
        centre = torch.eye(1 + h.shape[1], dtype=torch.float64)
        centre[0, 1:] = -h.mean(0)
        D = torch.diag(torch.cat([torch.ones(1, dtype=torch.float64), 1 / sigma.where(live, 1.0)]))
        P = (centre @ D)[:, torch.cat([torch.tensor([True]), live])]
        blocks += [P] * units
    P = torch.block_diag(*blocks)
    by_unit = hesscond.probe(model, loss_fn, batch, ["0", "2"], level="network")[NETWORK].hessian()
    truth = P.T @ by_unit @ P
    scale = float(truth.norm() / found.hessian().norm())
    torch.testing.assert_close(found.hessian() * scale, truth, rtol=1e-6, atol=1e-6 * float(truth.norm()))
    assert found.kappa.value != pytest.approx(plain.kappa.value, rel=1e-3)
    assert found.by_layer()["n_params"].sum() == len(P.T)

"""Known null spaces against the dense Hessian: never too much, and all of it where theory says so."""

import pytest
import torch
from torch import nn

from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.hessians.null_space.directions import combined, holds, network_null_directions
from hesscond.hessians.null_space.kronecker import add_rows, row_space
from hesscond.hessians.streaming import StreamedBlock
from hesscond.operators import Dense, Span
from hesscond.operators.subspace import CoordinateSpan
from tests.catalogue import CASES
from tests.catalogue.cases import split
from tests.catalogue.parts import Net
from tests.truth import case_truth

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CE = nn.CrossEntropyLoss()
ALL = {case.name: case for case in CASES if case.dtype == torch.float64}
SOME = [
    "relu-ce", "relu-mse", "relu-nonconvex", "tanh-ce", "many-samples", "one-sample", "two-samples-tanh", "gated",
    "integer-and-real-inputs", "gaussian-heads", "train-dropout", "layernorm", "unreached-and-frozen", "siamese-relu",
    "repeated-relu", "train-batchnorm", "train-batchnorm-conv", "info-nce", "tokens-mean", "attention-by-hand",
    "conv2d-two-layers", "conv2d-groups", "conv3d-circular-stride", "transposed3d-groups",
]  # fmt: skip
EVERY = [
    *(pytest.param(name, marks=pytest.mark.share(2)) for name in SOME),
    *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.share(4)]) for name in sorted(set(ALL) - set(SOME))),
]
#: Networks whose null space is known in full.
COMPLETE = {
    "relu-ce", "relu-mse", "relu-nonconvex", "tanh-ce", "many-samples", "gated", "gaussian-heads", "train-dropout",
    "layernorm", "unreached-and-frozen", "siamese-relu", "train-batchnorm", "train-batchnorm-conv", "info-nce",
    "tokens-mean", "conv2d-two-layers", "conv2d-groups",
}  # fmt: skip


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nullity(H):
    values = torch.linalg.eigvalsh((H + H.T) / 2).abs()
    return int((values <= 1e-13 * values.max()).sum())


def check(H, directions):
    """Each claim is in the null space of H, they are orthogonal, and their dimensions are what they say."""
    total, size = torch.zeros_like(H), torch.linalg.matrix_norm(H, 2)
    for own in directions:
        P = own.subspace.project(torch.eye(len(H), dtype=H.dtype))
        assert (P - P.T).norm() < 1e-11
        assert (P @ P - P).norm() < 1e-11
        assert abs(float(P.trace()) - own.dimension) < 1e-9
        assert (H @ P).norm(dim=0).max() <= 1e-12 * size
        assert (total @ P).norm() < 1e-11
        assert own.name
        assert own.reason
        assert str(own.dimension) in str(own)
        total += P
    space = combined(directions)
    if space is None:
        assert not directions
        return 0
    V = random(len(H), 2)
    assert torch.allclose(space.project(V), total @ V, atol=1e-12)
    assert torch.allclose(space.remove(V), V - total @ V, atol=1e-12)
    return space.dimension


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("name", EVERY)
def test_layers_claim_nothing_that_is_not_null(name):
    model, loss, batch = ALL[name].make()
    for layer, H in case_truth(ALL[name])[0].items():
        if layer not in ALL[name].flat:
            operator = HessianOperator(model, loss, batch, layers=[layer])
            assert check(H, network_null_directions(operator)) <= nullity(H)


def planted(samples=300, seed=3):
    """9 features of which one is dead, one constant, one a copy, one a sum of two; a dead hidden unit; 3 classes."""
    torch.manual_seed(seed)
    x = random(samples, 9, seed=seed)
    x[:, 1], x[:, 2], x[:, 3], x[:, 4] = 0, 0.7, x[:, 5], x[:, 6] - 2 * x[:, 7]
    model = nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias[2] = -100
    return model, (x, torch.arange(samples) % 3)


def test_all_of_what_was_planted_is_found_over_ragged_batches():
    model, batch = planted()
    ragged = split(batch, [37, 200, 1, 62])
    for layer, expected in (("0", 6 * 10 - 5 * 6), ("2", 3 * 7 - 2 * 6)):
        operator = HessianOperator(model, CE, ragged, layers=[layer])
        H = operator.to_dense()
        directions = network_null_directions(operator)
        # the Hessian is full on what is left
        assert nullity(H) == expected
        assert check(H, directions) == expected
    assert "inputs" in directions[0].reason


def test_a_unit_that_is_rarely_active():
    model, (x, y) = planted()
    with torch.no_grad():
        pre = model[0](x)[:, 4]
        model[0].bias[4] -= pre.sort().values[-4] + 1e-3
    assert int((model[0](x)[:, 4] > 0).sum()) == 3
    operator = HessianOperator(model, CE, (x, y), layers=["0"])
    H = operator.to_dense()
    # of the rank of the inputs, 6, three directions are seen
    assert nullity(H) == 30 + 3
    assert check(H, network_null_directions(operator)) == 33
    network = HessianOperator(model, CE, (x, y))
    H = network.to_dense()
    # … and the outgoing weights of the dead unit, and the shift of the 7 others
    assert check(H, network_null_directions(network)) == nullity(H) == 33 + 3 + 6


def test_a_feature_that_a_unit_never_sees():
    model, (x, y) = planted()
    model[0].weight.data[4, 8] = 0
    with torch.no_grad():
        off = model[0](x)[:, 4] <= 0
    x[:, 8] = torch.where(off, x[:, 8], 0.0)
    operator = HessianOperator(model, CE, (x, y), layers=["0"])
    assert check(operator.to_dense(), network_null_directions(operator)) == nullity(operator.to_dense()) == 31


@pytest.mark.parametrize("size", [1e-4, 1e-9, 1e-12])
def test_what_is_small_is_not_null(size):
    """A copy of a feature but for a small part: κ(H) is up to 1e24, and the direction is not claimed."""
    model, (x, y) = planted()
    x[:, 3] = x[:, 5] + size * random(len(x), seed=9)
    operator = HessianOperator(model, CE, (x, y), layers=["0"])
    exactly = 6 * 10 - 5 * 7
    claimed = sum(own.dimension for own in network_null_directions(operator))
    # at 1e-12 the round-off of the others is too near: nothing is claimed but zeros
    assert claimed == (exactly if size > 1e-11 else 6 * 10 - 5 * 9)


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_grades_and_scales_of_features_do_not_matter(scale):
    rows = random(200, 4) * torch.logspace(0, -12, 4, dtype=torch.float64)
    X = torch.cat([rows, rows[:, 3:] * 3, torch.zeros(200, 1)], 1) * scale
    block = StreamedBlock(6)
    for part in X.split(33):
        add_rows(block, part, 1.0)
    found = row_space(block, X)
    assert found.nullity == 2
    direction = torch.tensor([0.0, 0, 0, 3.0, -1.0, 0], dtype=torch.float64)
    assert (found.Q.T @ direction).norm() < 1e-9
    assert torch.allclose(found.Q.T @ found.Q, torch.eye(4, dtype=torch.float64), atol=1e-14)
    assert found.dead.tolist() == [False] * 5 + [True]


# -- networks ---------------------------------------------------------------------------------------------------------


def check_network(case, Operator):
    model, loss, batch = case.make()
    operator = Operator(model, loss, batch)
    H = operator.to_dense()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    directions = network_null_directions(operator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    return check(H, directions), H, directions


@pytest.mark.parametrize("name", EVERY)
def test_networks_claim_nothing_that_is_not_null(name):
    found, H, _ = check_network(ALL[name], HessianOperator)
    assert found <= nullity(H)
    assert name not in COMPLETE or found == nullity(H)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["relu-ce", "leaky-ce-sum", "tanh-ce", "conv2d-two-layers", "eval-batchnorm",
                                  "transposed2d-groups", "relu-nonconvex"])  # fmt: skip
def test_so_for_the_gauss_newton_matrix(name):
    found, G, _ = check_network(ALL[name], GGNOperator)
    assert found <= nullity(G)
    hessian, _, _ = check_network(ALL[name], HessianOperator)
    assert found == hessian


def test_both_layouts_and_parts_of_a_network():
    model, batch = planted()
    flat, by_unit = HessianOperator(model, CE, batch), HessianOperator(model, CE, batch, layers=["0", "2"])
    dimensions = [check(A.to_dense(), network_null_directions(A)) for A in (flat, by_unit)]
    assert dimensions == [nullity(flat.to_dense())] * 2
    # with the first layer fixed the inputs of the second are given, and its null space is that of the layer
    last = HessianOperator(model, CE, batch, layers=["2"])
    assert check(last.to_dense(), network_null_directions(last)) == 3 * 7 - 2 * 6
    weights = HessianOperator(model, CE, batch, parameters=["2.weight"])
    assert check(weights.to_dense(), network_null_directions(weights)) == 3 * 6 - 2 * 5
    unit = HessianOperator(model, CE, batch, layers=["0"], unit=2)
    assert network_null_directions(unit)[0].dimension == 10 or not unit.to_dense().any()


def test_batches_that_do_not_count_are_not_seen():
    model, (x, y) = planted(samples=8)
    ignored = torch.full((20,), -100)
    stream = [(x, y), (random(20, 9), ignored)]
    operator = HessianOperator(model, CE, stream)
    alone = HessianOperator(model, CE, (x, y))
    found = check(operator.to_dense(), network_null_directions(operator))
    assert found == check(alone.to_dense(), network_null_directions(alone))
    assert found >= 6 * 3 + 10


def two_layers(*sizes):
    torch.manual_seed(0)
    parts = {"first": nn.Linear(*sizes[:2]), "last": nn.Linear(*sizes[1:])}
    return Net(lambda m, x: m.last(torch.tanh(m.first(x))), **parts).double()


def test_a_zero_gradient_is_no_null_direction():
    """Outgoing weights of zero: the gradient in the incoming ones is zero, and the Hessian is not."""
    model = two_layers(4, 3, 2)
    nn.init.zeros_(model.last.weight)
    batch = random(30, 4), torch.arange(30) % 2
    operator = HessianOperator(model, CE, batch)
    assert not operator.gradient[operator.parts["first.weight"]].any()
    H = operator.to_dense()
    directions = network_null_directions(operator)
    assert check(H, directions) <= nullity(H)
    assert all(not own.name.startswith("layer 'first'") for own in directions)


def test_a_tied_weight_is_not_taken_for_a_first_layer():
    model = two_layers(4, 4, 4)
    model.last.weight = model.first.weight
    x = random(20, 4)
    x[:, 2] = x[:, 3]
    batch = x, torch.arange(20) % 4
    operator = HessianOperator(model, CE, batch)
    H = operator.to_dense()
    assert check(H, network_null_directions(operator)) <= nullity(H)


def test_a_first_layer_behind_a_learned_normalization_is_none():
    torch.manual_seed(0)
    x = random(20, 4)
    x[:, 2] = x[:, 3]
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = x, torch.arange(20) % 2
    operator = HessianOperator(model, CE, batch)
    H = operator.to_dense()
    found = check(H, network_null_directions(operator))
    # the shift of the outputs alone
    assert found == 4 < nullity(H)
    inner = [name for name in operator.names if not name.startswith("0.")]
    fixed = HessianOperator(model, CE, batch, parameters=inner)
    assert check(fixed.to_dense(), network_null_directions(fixed)) == 4 + 3


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_a_claim_that_fails_is_seen():
    H = torch.diag(torch.tensor([0.0, 0.0, 1e-10, 1.0], dtype=torch.float64))
    A = Dense(H)
    assert holds(A, CoordinateSpan(4, torch.tensor([0, 1])))
    assert not holds(A, CoordinateSpan(4, torch.tensor([0, 2])))
    assert not holds(A, Span(torch.eye(4, dtype=torch.float64)[:, :0]))
    tilted = torch.tensor([[1.0], [0.0], [0.0], [1e-9]], dtype=torch.float64)
    assert not holds(A, Span.of(tilted))
    assert holds(Dense(torch.zeros(4, 4, dtype=torch.float64)), CoordinateSpan(4, torch.tensor([3])))
    for c in (1e-100, 1e100):
        assert holds(Dense(c * H), CoordinateSpan(4, torch.tensor([0])))
        assert not holds(Dense(c * H), CoordinateSpan(4, torch.tensor([2])))

"""Operators of whole networks against dense second derivatives, probes of their layers, and curvlinops."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from tests.catalogue import CASES, case
from tests.catalogue.cases import split
from tests.catalogue.dense import mlp
from tests.catalogue.parts import Applied, Net
from tests.operators.operator_contract import OperatorCase, OperatorContract
from tests.truth import block, case_truth, double_backward, eligible_layers, in_double, same_random_numbers

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

OPERATORS = [HessianOperator, GGNOperator]
#: One of each kind for what is too slow to do with all of them.
KINDS = [
    "leaky-ce-sum", "relu-ce-weighted-ignored", "gelu-mse", "dict-output", "float32-tanh", "bfloat16",
    "integer-and-real-inputs", "recurrent-tanh", "attention-sdpa", "conv2d-groups", "transposed2d-groups",
    "train-dropout-tanh", "train-batchnorm-tanh-mse", "unreached-and-frozen", "siamese-tanh", "gaussian-heads",
]  # fmt: skip


def every(names=None, fast=None):
    chosen = CASES if names is None else [case(name) for name in names]
    slow = [] if fast is None else [c for c in chosen if c.name not in fast]
    return pytest.mark.parametrize(
        "example", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c in slow else []) for c in chosen]
    )


def direction(order, seed=7):
    return torch.randn(order, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(inputs):
    return ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})


def in_float64(example):
    """The model, the loss and the batch of a case on copies in float64, and the parameters that are trained."""
    model, loss_fn, batch = example.make()
    model = copy.deepcopy(model).double()
    loss_fn = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
    return model, loss_fn, tree_map_only(torch.Tensor, in_double, batch), [
        p for p in model.parameters() if p.requires_grad
    ]  # fmt: skip


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


@functools.cache
def network_truth(example):
    """(n, n) Hessian and (n,) gradient in all parameters that are trained, row by row, and the loss."""
    model, loss_fn, (inputs, targets), variables = in_float64(example)
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, arguments(inputs))
    with sdpa_kernel(SDPBackend.MATH), same_random_numbers(torch.device("cpu")):
        loss = loss_fn(model(*args, **kwargs), targets)
    gradient = torch.autograd.grad(loss, variables, retain_graph=True, materialize_grads=True)
    return double_backward(loss, variables), flat(gradient), float(loss.detach())


def is_close(found, truth, tolerance=1e-10):
    assert found.dtype == truth.dtype
    assert (found - truth).norm() <= tolerance * truth.norm()


# ------------------------------------------------------------------------------------------------ against the truth


@pytest.mark.share(8)
@every()
def test_a_product_with_the_hessian_of_the_network(example):
    truth, gradient, loss = network_truth(example)
    H = HessianOperator(*example.make())
    assert H.shape == truth.shape
    assert H.dtype == torch.float64
    v = direction(H.order)
    is_close(H @ v, truth @ v)
    is_close(H.gradient, gradient)
    assert H.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "name",
    ["relu-ce", "tanh-ce", "gelu-mse", "relu-nonconvex", "relu-ce-weighted-ignored", "conv2d-tanh-mse",
     "attention-sdpa", "tuple-output", "dict-output", "gaussian-heads", "train-batchnorm-tanh-mse",
     "per-token-classes-second"],
)  # fmt: skip
def test_the_gauss_newton_matrix_is_that_of_the_linearized_model(name):
    """JᵀH_LJ with J by torch.func.jacrev, H_L by torch.func.hessian, over all outputs flattened together."""
    model, loss_fn, (inputs, targets), _ = in_float64(case(name))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) and module.training:
            module.running_mean = module.running_var = module.num_batches_tracked = None
            module.track_running_stats = False
    args, kwargs = arguments(inputs)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    start = flat(parameters.values())

    def outputs(theta):
        parts = theta.split([p.numel() for p in parameters.values()])
        state = {name: part.view_as(p) for part, (name, p) in zip(parts, parameters.items(), strict=True)}
        return functional_call(model, state, args, kwargs)

    with sdpa_kernel(SDPBackend.MATH):
        output = outputs(start)
        leaves, spec = torch.utils._pytree.tree_flatten(output)
        J = jacrev(lambda theta: flat(torch.utils._pytree.tree_leaves(outputs(theta))))(start)

    def loss_of(o):
        parts = o.split([leaf.numel() for leaf in leaves])
        found = [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return loss_fn(torch.utils._pytree.tree_unflatten(found, spec), targets)

    H_L = torch.func.hessian(loss_of)(flat(leaves).detach())
    truth = J.T @ H_L @ J
    G = GGNOperator(*case(name).make())
    is_close(G.to_dense(), truth)
    negative = torch.linalg.eigvalsh(H_L)[0] < -1e-12
    assert not (G.psd and negative)


def test_what_is_known_to_be_positive_semidefinite_is_so():
    for name in KINDS:
        assert GGNOperator(*case(name).make()).psd == (name != "gaussian-heads")
    linear = HessianOperator(*case("one-layer").make())
    assert linear.psd
    eigenvalues = torch.linalg.eigvalsh(linear.to_dense())
    assert eigenvalues[0] >= -1e-12 * eigenvalues[-1]
    assert not GGNOperator(*case("relu-nonconvex").make()).psd
    assert not HessianOperator(*case("relu-ce").make()).psd
    assert HessianOperator(*case("relu-ce").make(), layers="2").psd
    assert HessianOperator(*case("conv2d").make(), layers="0").psd
    assert not HessianOperator(*case("tanh-ce").make(), layers="2").psd


# ------------------------------------------------------------------------------------------- layers, units, parameters


def test_several_layers_in_any_order():
    model, loss_fn, batch = case("conv2d-two-layers-tanh").make()
    names = list(reversed(eligible_layers(model)))
    H = HessianOperator(model, loss_fn, batch, layers=names)
    dense = H.to_dense()
    assert list(H.parts) == names
    for name, where in H.parts.items():
        is_close(dense[where, where], hesscond.probe(model, loss_fn, batch, [name], level="layer")[name].hessian())
    # the same entries as in the order of the parameters
    plain = HessianOperator(model, loss_fn, batch)
    place = H.flatten(plain.unflatten(torch.arange(plain.order)))
    is_close(dense, plain.to_dense()[place][:, place])


def test_parameters_by_name():
    model, loss_fn, batch = case("tanh-ce").make()
    names = ["4.bias", "0.weight"]
    H = HessianOperator(model, loss_fn, batch, parameters=names)
    whole = HessianOperator(model, loss_fn, batch)
    rows = torch.cat([torch.arange(whole.order)[whole.parts[name]] for name in names])
    is_close(H.to_dense(), whole.to_dense()[rows][:, rows])
    assert H.names == names
    assert HessianOperator(model, loss_fn, batch, parameters="4.bias").order == 3


@pytest.mark.parametrize("options", [{}, {"layers": ["2", "0"]}, {"parameters": ["4.weight", "0.bias"]}])
def test_flatten_and_unflatten(options):
    model, loss_fn, batch = case("relu-ce").make()
    H = HessianOperator(model, loss_fn, batch, **options)
    v = direction(H.order)
    tensors = H.unflatten(v)
    own = dict(model.named_parameters())
    assert {name: t.shape for name, t in tensors.items()} == {name: own[name].shape for name in H.names}
    assert torch.equal(H.flatten(tensors), v)
    assert torch.equal(H.flatten({name: own[name].detach() for name in H.names}), H.point)
    assert [where.start for where in H.parts.values()] == [0, *[w.stop for w in H.parts.values()][:-1]]
    with pytest.raises(ConfigError, match="a vector of this operator is made of"):
        H.flatten(dict(list(tensors.items())[1:]))


def test_a_tied_parameter_is_there_once_and_moves_at_both_places():
    torch.manual_seed(0)
    parts = {"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)}
    model = Net(lambda m, x: m.decoder(torch.tanh(m.encoder(x))), **parts).double()
    model.decoder.weight = model.encoder.weight
    x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    H = HessianOperator(model, nn.MSELoss(), (x, y))
    assert H.names == ["encoder.weight", "encoder.bias", "decoder.bias"]
    is_close(H.to_dense(), double_backward(F.mse_loss(model(x), y), model.parameters()))
    layer = HessianOperator(model, nn.MSELoss(), (x, y), layers="decoder")
    is_close(layer.to_dense(), hesscond.probe(model, nn.MSELoss(), (x, y), ["decoder"], "layer")["decoder"].hessian())
    with pytest.raises(ConfigError, match=r"'encoder\.weight' and 'decoder\.weight' are one parameter"):
        HessianOperator(model, nn.MSELoss(), (x, y), layers=["encoder", "decoder"])


# --------------------------------------------------------------------------------------------------- numbers, errors


@pytest.mark.parametrize("kind", OPERATORS)
def test_two_products_are_equal_bit_by_bit_and_leave_the_vector(kind):
    for name in ("tanh-ce", "train-dropout-tanh", "train-batchnorm-conv"):
        A = kind(*case(name).make())
        v = direction(A.order)
        kept = v.clone()
        assert torch.equal(A @ v, A @ v)
        assert torch.equal(v, kept)


def test_single_precision_on_request():
    model, loss_fn, batch = case("float32-tanh").make()
    double, single = HessianOperator(model, loss_fn, batch), HessianOperator(model, loss_fn, batch, dtype=None)
    assert single.dtype == torch.float32
    v = direction(double.order)
    error = ((single @ v).double() - double @ v).norm()
    assert 0 < error <= single.rounding * torch.linalg.matrix_norm(double.to_dense(), 2) * v.norm()
    assert double.rounding < 1e-12
    # half of a model in another precision
    model[0].double()
    with pytest.raises(RuntimeError):
        HessianOperator(model, loss_fn, batch, dtype=None)


def test_rounding_grows_where_the_products_lose_digits():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32)]
    for _ in range(24):
        layers += [nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32)]
    model = nn.Sequential(*layers)
    batch = torch.randn(128, 32), torch.randint(0, 10, (128,))
    single = HessianOperator(model, nn.CrossEntropyLoss(), batch, dtype=torch.float32)
    double = HessianOperator(model, nn.CrossEntropyLoss(), batch)
    eps = torch.finfo(torch.float32).eps
    u, errors = direction(double.order), []
    for _ in range(8):
        w = double @ u
        norm = float(w.norm() / u.norm())
        errors.append(float(((single @ u).double() - w).norm() / u.norm()))
        u = w / w.norm()
    assert 32 * eps < single.rounding < 1000 * eps
    assert max(errors) <= single.rounding * norm


BATCH = torch.linspace(-1, 1, 30).view(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])


def call(kind=HessianOperator, model=None, loss=None, data=BATCH, **options):
    torch.manual_seed(0)
    return kind(mlp(nn.Tanh()) if model is None else model, loss or nn.CrossEntropyLoss(), data, **options)


WRONG = [
    (ConfigError, "no layer 'x' to probe", {"layers": ["x"]}),
    (ConfigError, "no parameter 'x' in the model: it has 0.weight", {"parameters": ["x"]}),
    (ConfigError, "'0.bias' and '0.bias' are one parameter", {"parameters": ["0.bias", "0.bias"]}),
    (ConfigError, "unit 9 is out of range", {"layers": "0", "unit": 9}),
    (ConfigError, "was given without its layer", {"unit": 0}),
    (ConfigError, "is of one layer, but 2 were named", {"layers": ["0", "2"], "unit": 0}),
    (ConfigError, "both given", {"layers": "0", "parameters": "0.bias"}),
    (ConfigError, "no parameter to differentiate in", {"model": mlp(nn.ReLU()).requires_grad_(False)}),
    (ConfigError, "no layer was named", {"layers": []}),
    (ConfigError, "memory must be a positive number", {"memory": 0}),
    (ConfigError, "reduction must be", {"reduction": "max"}),
    (ConfigError, "at least one sample", {"data": (torch.zeros(0, 5), torch.zeros(0).long())}),
    (CaptureError, "must be a scalar tensor", {"loss": nn.CrossEntropyLoss(reduction="none")}),
    (CaptureError, "does not depend differentiably", {"loss": lambda o, t: o.detach().sum()}),
    (CaptureError, "the loss of a batch is nan", {"data": (BATCH[0] / 0, BATCH[1])}),
]  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.parametrize(("error", "match", "options"), WRONG, ids=[match for _, match, _ in WRONG])
def test_bad_input_is_refused_in_a_sentence(error, match, options):
    with pytest.raises(error, match=match) as raised:
        call(**options)
    assert "\n" not in str(raised.value)


def test_weight_decay_in_the_loss_is_in_the_hessian_and_has_no_gauss_newton_matrix():
    model = mlp(nn.ReLU())

    def decayed(o, t):
        return F.cross_entropy(o, t) + 0.3 * model[0].weight.square().sum()

    difference = (
        HessianOperator(model, decayed, BATCH).to_dense() - HessianOperator(model, F.cross_entropy, BATCH).to_dense()
    )
    expected = torch.zeros(len(difference), dtype=torch.float64)
    expected[: model[0].weight.numel()] = 0.6
    assert (difference - torch.diag(expected)).norm() <= 1e-14
    with pytest.raises(CaptureError, match="no Gauss-Newton matrix"):
        GGNOperator(model, decayed, BATCH)


def test_the_gauss_newton_matrix_of_outputs_in_an_object():
    torch.manual_seed(0)
    model, wrapped = mlp(nn.Tanh()), Applied(lambda x: SimpleNamespace(value=x))
    found = call(GGNOperator, nn.Sequential(model, wrapped), lambda o, t: F.cross_entropy(o.value, t))
    assert torch.equal(found.to_dense(), call(GGNOperator, model, F.cross_entropy).to_dense())


def test_an_infinite_second_derivative_is_refused():
    # |z|^1.5 has the slope 0 at 0 and no second derivative
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    data = torch.ones(3, 2).double(), torch.zeros(3)
    with pytest.raises(CaptureError, match="NaN or infinite"):
        HessianOperator(model, lambda o, t: (o.square() ** 0.75).mean(), data)
    with pytest.raises(CaptureError, match="NaN or infinite"):
        HessianOperator(model, lambda o, t: o.abs().sqrt().mean(), data)


# ----------------------------------------------------------------------------------- third derivatives of normalization


def layer_norm_by_hand(h):
    return (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()


NORMALIZATIONS = {
    "layer": (lambda h: F.layer_norm(h, (4,)), layer_norm_by_hand),
    "batch": (lambda h: F.batch_norm(h, None, None, training=True), lambda h: layer_norm_by_hand(h.T).T),
}


def penalized(m, x):
    """The size of the derivative of a network's own output in its inputs."""
    x = x.detach().requires_grad_()
    output = m.last(m.normalize(m.first(x)).tanh())
    return torch.autograd.grad(output.sum(), x, create_graph=True)[0].square()


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_hessians_through_derivatives_of_torchs_normalization_are_refused(name):
    torch.manual_seed(0)
    parts = {"first": nn.Linear(5, 4), "last": nn.Linear(4, 2)}
    fused, by_hand = (Net(penalized, normalize=own, **parts).double() for own in NORMALIZATIONS[name])
    data = torch.randn(6, 5, dtype=torch.float64), torch.zeros(6)
    with pytest.raises(CaptureError, match=f"derivative through {name} normalization"):
        HessianOperator(fused, lambda o, t: o.sum(), data)
    assert HessianOperator(by_hand, lambda o, t: o.sum(), data).order == 34


# ----------------------------------------------------------------------------------------- torch's weight normalization


def test_units_in_front_of_it_are_measured_too():
    rows = Applied(lambda z: torch._weight_norm(z, z.new_ones(len(z), 1), 0))
    model = nn.Sequential(nn.Linear(5, 4), rows, nn.Linear(4, 3)).double()
    plain = nn.Sequential(model[0], Applied(lambda z: z / z.norm(dim=1, keepdim=True)), model[2])
    own, truth = (hesscond.probe(m, F.cross_entropy, BATCH, ["0"])["0"] for m in (model, plain))
    is_close(own.hessian(1), truth.hessian(1), 1e-12)


# -------------------------------------------------------------------------------------------------- many in one pass


def test_a_matrix_is_formed_many_columns_in_a_pass(monkeypatch):
    model, loss_fn, batch = case("attention-causal").make()
    H = HessianOperator(model, loss_fn, split(batch, (1, 3)))
    passes = []
    original = torch.autograd.grad

    def counted(*args, **kwargs):
        passes.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    dense = H.to_dense()
    # of each batch, one that is compared with, and one for every 64 columns
    assert len(passes) == 2 * (1 + -(-H.order // 64))
    monkeypatch.undo()
    columns = torch.stack([H @ e for e in torch.eye(H.order, dtype=torch.float64)], 1)
    assert (dense - columns).norm() <= 1e-14 * columns.norm()


# -------------------------------------------------------------------------------------------------- what operators do


def of_layer(name, layer, unit=None):
    def make(dtype, device):
        model, loss_fn, batch = case(name).make(device=device)
        return HessianOperator(model, loss_fn, batch, layers=[layer], unit=unit)

    def exact(dtype):
        truth = case_truth(case(name))[0][layer]
        return (truth if unit is None else block(truth, make(dtype, "cpu").order, unit)).numpy()

    return OperatorCase(make, exact, (torch.float64,))


class TestContract(OperatorContract):
    CASES = {  # noqa: RUF012
        f"{name}-{unit}": of_layer(name, layer, unit)
        for name, layer, unit in [
            ("relu-ce", "0", None),
            ("relu-nonconvex", "2", 1),
            ("conv2d-groups", "0", None),
            ("transposed2d-groups", "0", 1),
            ("repeated-tanh", "layer", None),
            ("tokens-mean", "first", 0),
        ]
    }

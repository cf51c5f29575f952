"""A first call, with nothing named: what is measured of models that have no dense or convolutional layer, or one that
cannot be measured, and the advice about the rest."""

import ast
import re

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.problem.references import References
from tests.catalogue.parts import Net, OnceOnly
from tests.catalogue.truths import ADVICE, Truth
from tests.catalogue.wrong_backward import stale_tanh
from tests.truth import double_backward

CE = nn.CrossEntropyLoss()


def random(*shape):
    return nn.Parameter(torch.randn(shape) / 2)


def double(model, loss_fn, batch):
    return Truth(model.double(), loss_fn, batch)


def test_a_block_that_units_do_not_divide_is_measured_whole_and_the_table_says_so():
    def forward(m, x):
        W, V = m.theta.split([20, 15])
        return (x @ W.view(4, 5)).tanh() @ V.view(5, 3) * m.scale

    torch.manual_seed(0)
    model, batch = Net(forward, theta=random(35), scale=random(3)), (torch.randn(12, 4), torch.randint(3, (12,)))
    result = hesscond.probe(model, CE, batch)
    assert {name: (own.level, own.n_params) for name, own in result.items()} == {"model": ("layer", 38)}
    assert re.search(r"not divided into units.*'theta'.*: measured as a whole", str(result).replace("\n", " "))
    assert "no dense or convolutional layer to measure" in result.scope in str(result)
    assert re.search(r"model +Net +38", str(result))
    truth = double(model, CE, batch)
    torch.testing.assert_close(
        result["model"].hessian(), truth.at(truth.flat(result["model"].parameters)), rtol=0, atol=1e-12
    )
    with pytest.raises(ConfigError, match="not divided into units"):
        hesscond.probe(model, CE, batch, ["model"])


@torch.library.custom_op("hesscond_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("hesscond_tests::sine_backward", mutates_args=())
def sine_backward(slope: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return slope * x.cos()


sine.register_autograd(
    lambda ctx, slope: sine_backward(slope, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def through(function):
    return lambda m, x: m.last((function(m.first(x) * m.scale) @ m.middle).tanh())


def norms(m, x):
    h = m.first(x) * m.scale
    return m.last(torch.cat([h, h.norm(dim=1, keepdim=True)], 1))


def dense(m, x):
    return m.last(m.rnn(m.first(x)[:, None])[0][:, 0] @ torch.matrix_exp(m.turn))


def fused():
    return {"first": nn.Linear(4, 3), "scale": random(3), "middle": random(3, 4), "last": nn.Linear(4, 3)}


MIXED = {
    "once differentiable": (through(OnceOnly.apply), fused, None),
    "no graph in backward": (through(stale_tanh), fused, None),
    "kernel without a backward": (through(sine), fused, None),
    "norm at zero": (
        norms,
        lambda: {"first": nn.Linear(4, 5, bias=False), "scale": random(5), "last": nn.Linear(6, 3)},
        "vector_norm.*sample 2",
    ),
    "other blocks": (
        dense,
        lambda: (
            {"first": nn.Linear(4, 3), "rnn": nn.LSTM(3, 1, 2, bidirectional=True), "turn": random(2, 2)}
            | {"last": nn.Linear(2, 3)}
        ),
        None,
    ),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("kind", MIXED)
def test_a_layer_that_cannot_be_measured_stops_no_other_and_the_advice_holds(kind, level):
    torch.manual_seed(0)
    forward, parts, obstacle = MIXED[kind]
    model, batch = Net(forward, **parts()), (torch.randn(12, 4), torch.randint(3, (12,)))
    batch[0][2] = 0
    result = hesscond.probe(model, CE, batch, level=level)
    assert result.scope == ""
    assert "last" in result
    assert ("first" in result) == (obstacle is None)
    for own in result.values():
        assert own.check.passed
    if obstacle is not None:
        assert all(re.search(obstacle, why) for why in result.skipped.values())
    elif kind == "other blocks":
        assert ("level='layer'" in result.skipped["turn"]) == (level == "unit")
    else:
        assert ["differences" in own.route for own in result.values()] == [True, False]
    for layers, other in {advice for why in result.skipped.values() for advice in ADVICE.findall(why)}:
        assert list(hesscond.probe(model, CE, batch, ast.literal_eval(layers), other or level))


def test_units_without_layers_are_asked_for_with_a_name():
    with pytest.raises(ConfigError, match=r"layers=\['1'\]"):
        hesscond.probe(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), CE, (torch.ones(2, 4), None), units=[0])


@pytest.mark.parametrize("product", [torch.matmul, torch.sparse.mm])
def test_units_of_graph_layers_behind_a_sparse_adjacency(product):
    """Both weights (in, out) are divided into their columns; the loss is that with the dense adjacency."""
    torch.manual_seed(0)
    A, batch = (torch.rand(9, 9) > 0.6) * torch.rand(9, 9), (torch.randn(9, 4), torch.randint(3, (9,)))

    def forward(m, x):
        return product(m.A, product(m.A, x @ m.v).tanh() @ m.w)

    weights = {"v": random(4, 5), "w": random(5, 3)}
    model, plain = Net(forward, **weights), Net(lambda m, x: m.A @ ((m.A @ (x @ m.v)).tanh() @ m.w), **weights)
    model.A, plain.A = A.to_sparse(), A.double()
    result = hesscond.probe(model, CE, batch)
    truth = double(plain, CE, batch)
    blocks = [(block, unit) for block in result.values() for unit in range(len(block.units))]
    assert len(blocks) == 8
    for block, unit in blocks:
        (name,) = block.parameters
        column = torch.zeros(tuple(weights[name].shape), dtype=torch.bool)
        column[:, unit] = True
        exact = truth.at(truth.flat([name]))[column.flatten()][:, column.flatten()]
        torch.testing.assert_close(block.hessian(unit=unit), exact, rtol=0, atol=1e-12)


def listed(m):
    m.kept = [m.W, {"b": (m.b, m.V)}]
    return m


def viewed(m):
    m.kept = [m.W.view(4, 5), {"b": (m.b.view(5), m.V.T)}]
    return m


def in_list(m, x):
    (W, others) = m.kept
    b, V = others["b"]
    return (x @ W + b).tanh() @ (V if V.shape == (5, 3) else V.T)


def sliced(m, x):
    for W in m.layers[:-1]:
        x = (x @ W).sin()
    return x @ m.layers[-1]


def dense_parts():
    return {"W": random(4, 5), "b": random(5), "V": random(5, 3)}


REFERENCES = {
    "lists": lambda: listed(Net(in_list, **dense_parts())),
    "views": lambda: viewed(Net(in_list, **dense_parts()).double()),
    "a slice of a ParameterList": lambda: Net(sliced, layers=nn.ParameterList([random(4, 5), random(5, 3)])),
}


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_parameters_are_replaced_where_the_model_keeps_them_besides(kind, level):
    torch.manual_seed(0)
    model = REFERENCES[kind]()
    batch = torch.randn(12, 4).to(next(model.parameters()).dtype), torch.randint(3, (12,))
    result = hesscond.probe(model, CE, batch, level=level)
    again = listed if kind == "lists" else viewed if kind == "views" else lambda m: m
    truth = double(again(model), CE, batch)
    assert {key for own in result.values() for key in own.parameters} == set(truth.index)
    assert result.skipped == {}
    for name, own in result.items():
        where = truth.flat(own.parameters)
        if level == "network":
            found = own.operator.to_dense()
        elif own.level == "layer":
            found = own.hessian()
        else:
            # the units of a weight in (inputs, outputs) are its columns, each with its bias
            columns = [truth.index[key].view(-1, truth.index[key].shape[-1]) for key in own.parameters]
            where = torch.cat(columns)[:, 1]
            found = own.hessian(1)
        torch.testing.assert_close(found, truth.at(where), rtol=0, atol=1e-12, msg=name)


def test_a_parameter_in_the_closure_of_a_loss_is_replaced():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 3)).double(), (torch.randn(12, 4).double(), torch.randint(3, (12,)))
    weight = model[0].weight

    def loss_fn(output, target):
        return CE(output, target) + weight.pow(4).sum()

    result = hesscond.probe(model, loss_fn, batch, level="layer")["0"]
    truth = Truth(model, loss_fn, batch)
    torch.testing.assert_close(result.hessian(), truth.at(truth.units("0", ("0.bias", "0.weight")).flatten()))


def outside(kind):
    """A model, its loss, the names of parameters that no module of the model has, and these."""
    loss = Net(lambda m, o, t: CE((o @ m.W.T).tanh() * m.log_t.exp(), t), log_t=random(), W=random(3, 3))
    if kind == "loss":
        return nn.Sequential(nn.Linear(4, 3)), loss, {"loss[log_t]": loss.log_t, "loss[W]": loss.W}
    if kind == "closure":
        model, t = nn.Sequential(nn.Linear(4, 3)), random()
        return model, lambda o, y: CE(o * t.exp(), y), {"loss/t": t}
    model = Net(lambda m, x: m.fc(x).tanh() @ m.weights["a"][0], fc=nn.Linear(4, 5), weights={"a": [random(5, 3)]})
    return model, CE, {"weights[a][0]": model.weights["a"][0]}


@pytest.mark.parametrize("kind", ["loss", "closure", "list"])
def test_parameters_outside_of_the_model_are_skipped_with_a_name_that_measures_them(kind):
    """At every level, in streams and in the coordinates of an optimizer."""
    torch.manual_seed(0)
    model, loss_fn, others = outside(kind)
    for tensor in (*model.parameters(), *others.values()):
        tensor.data = tensor.data.double()
    x, y = batch = torch.randn(12, 4).double(), torch.randint(3, (12,))
    optimizer = torch.optim.Adam([*model.parameters(), *others.values()], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    streamed = {"data": [(x[:6], y[:6]), (x[6:], y[6:])], "reduction": "mean"}
    for options in (*({"level": level} for level in ("unit", "layer", "network")), streamed, {"method": optimizer}):
        result = hesscond.probe(model, loss_fn, **{"data": batch} | options)
        assert set(result.skipped) == set(others)
        assert all(f"layers=['{name}']" in why for name, why in result.skipped.items())
        assert not {key for own in result.values() for key in own.parameters} & set(others)
    for name, tensor in others.items():
        H = double_backward(loss_fn(model(x), y), [tensor])
        for options in ({"data": batch}, streamed):
            found = hesscond.probe(model, loss_fn, layers=[name], level="layer", **options)[name]
            torch.testing.assert_close(found.hessian(), H, rtol=0, atol=1e-12)
        root = ((optimizer.state[tensor]["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8).rsqrt().flatten()
        values = torch.linalg.eigvalsh(root[:, None] * H * root).abs()
        kappa = hesscond.probe(model, loss_fn, batch, [name], "layer", method=optimizer)[name].kappa
        assert float(values.max() / values[values > 1e-9 * values.max()].min()) == pytest.approx(kappa.value, rel=1e-6)
        assert tensor.grad is None
    together = hesscond.probe(model, loss_fn, batch, [*others, *dict(model.named_children())], "network")
    assert together["network"].n_params == sum(p.numel() for p in (*model.parameters(), *others.values()))


def test_a_teacher_in_the_closure_of_a_loss_is_no_parameter():
    teacher, batch = nn.Linear(4, 3), (torch.randn(12, 4), torch.randint(3, (12,)))

    def loss_fn(output, target):
        with torch.no_grad():
            aim = teacher(batch[0]).softmax(1)
        return CE(output, aim.to(output))

    assert hesscond.probe(nn.Sequential(nn.Linear(4, 3)), loss_fn, batch).skipped == {}


def test_a_loss_that_holds_all_the_data_is_searched_nearby_only():
    """The weights that a trainer's loss refers to are found, and not every sample of its data is looked at."""

    class Trainer:
        def __init__(self):
            self.data = [[{"x": [0.0], "tag": object()} for _ in range(500)] for _ in range(100)]
            self.weights = [random(3)]

        def loss(self, output, target):
            return CE(output * self.weights[0], target)

    torch.manual_seed(0)
    trainer, model = Trainer(), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    found = References(model, trainer.loss)
    assert trainer.weights[0] in found.parameters().values()
    assert len(found._seen) < 20_000
    result = hesscond.probe(model, trainer.loss, (torch.randn(9, 4), torch.randint(3, (9,))))
    assert list(result) == ["0", "2"]
    assert any("weights[0]" in name for name in result.skipped)


class Odd(tuple):
    """Tuple of a class without a length, as the representations of an equivariant network."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


class Density(nn.Module):
    """Normal density with parameters of its own, of no inputs; its loss is in what it returns."""

    def __init__(self):
        super().__init__()
        self.mean, self.kinds = nn.Parameter(torch.tensor([0.3, -0.2])), Odd("ab")

    def forward(self, inputs=None, target=None):
        return {"loss": (self.mean.exp() - 1).square().sum()}


def test_a_model_without_inputs_and_its_own_loss_is_measured_under_the_name_of_its_parameter():
    result = hesscond.probe(Density(), None, (None, torch.randn(4, 2)), level="layer")
    e = torch.tensor([0.3, -0.2]).double().exp()
    torch.testing.assert_close(result["mean"].hessian(), torch.diag(4 * e**2 - 2 * e), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_skipped_parameters_have_their_own_names_and_parametrized_modules_theirs(level):
    torch.manual_seed(0)
    parts = {"table": nn.utils.parametrizations.weight_norm(nn.Embedding(5, 4)), "scale": random(4), "shift": random(4)}
    parts |= {"conv": nn.Conv1d(1, 2, 3, padding=1), "last": nn.Linear(8, 3)}
    nn.utils.parametrize.register_parametrization(parts["conv"], "weight", Net(lambda m, w: w * m.gain, gain=random(1)))
    model = Net(lambda m, x: m.last(m.conv((m.table(x) * m.scale + m.shift)[:, None]).tanh().flatten(1)), **parts)
    result = hesscond.probe(model, CE, (torch.randint(5, (12,)), torch.randint(3, (12,))), level=level)
    shared = {"conv.parametrizations.weight.0.gain"} if level == "unit" else set()
    assert result.skipped.keys() == {"table", "scale", "shift"} | shared
    assert result.skipped["table"].startswith("parametrized Embedding with weight, no dense")
    assert result.skipped["scale"] == "parameter of Net, no dense or convolutional layer: name it, layers=['scale']"
    assert all("layer 'conv', a parametrized Conv1d" in result.skipped[name] for name in shared)
    for name, why in result.skipped.items():
        (names,) = (ast.literal_eval(layers) for layers, _ in ADVICE.findall(why))
        assert list(hesscond.probe(model, CE, (torch.randint(5, (12,)), torch.randint(3, (12,))), names)) == [name]

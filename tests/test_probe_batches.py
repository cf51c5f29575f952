"""Batches as loaders yield them: objects, records, packed and sparse tensors, lists; against plain double backward.

A case is a model, a loss, the data as a user has them, and the loss in float64 as a user would compute it by hand.
"""

import collections
import copy
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import hesscond
from hesscond.errors import CaptureError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")
CE = nn.CrossEntropyLoss()
CASES = {}
Pair = collections.namedtuple("Pair", "x scale")
Triple = collections.namedtuple("Triple", "x scale y")


def case(make):
    """Register a case by the name of its function."""
    CASES[make.__name__] = make
    return make


@dataclasses.dataclass(frozen=True)
class Record:
    """Frozen dataclass with a field that is no tensor."""

    x: torch.Tensor
    scale: torch.Tensor
    note: str = "n"


class Slots:
    """Object without a dict."""

    __slots__ = ("scale", "x")

    def __init__(self, x, scale):
        self.x, self.scale = x, scale

    def to(self, device):
        return Slots(self.x.to(device), self.scale.to(device))


class Graph:
    """Graph with a store that knows its owner, and that moves in place, as a graph library's."""

    def __init__(self, **store):
        self.__dict__["store"] = {"owner": self, **store}

    def __getattr__(self, name):
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self):
        return iter(self.store.items())

    def to(self, device):
        self.store.update({k: v.to(device) for k, v in self.store.items() if isinstance(v, torch.Tensor)})
        return self


class Two(nn.Module):
    """Two dense layers around a function of the hidden features and the inputs."""

    def __init__(self, forward):
        super().__init__()
        self.l, self.o = nn.Linear(3, 4), nn.Linear(4, 2)
        self.forward = types.MethodType(forward, self)

    def out(self, h):
        return self.o(torch.tanh(h))


def scaled(self, batch):
    return self.out(self.l(batch.x) * batch.scale)


def by_keys(self, batch):
    return self.out(self.l(batch["x"]) * batch["scale"])


def convolved(self, data):
    A = data.x.new_zeros(2 * (len(data.x),)).index_put(tuple(data.edge_index), data.weight)
    return self.out(A @ self.l(data.x))


def pooled(self, data):
    nodes = convolved(self, data)
    return nodes.new_zeros(data.graphs, 2).index_add(0, data.batch, nodes)


def by_name(self, x, edge_index, weight=None):
    return convolved(self, types.SimpleNamespace(x=x, edge_index=edge_index, weight=weight))


def of_sets(self, sets):
    return torch.stack([self.out(self.l(s)).mean(0) for s in sets])


def of_annotated_sets(self, sets: list[torch.Tensor], lengths=None):
    return of_sets(self, sets)


def at_temperature(self, x, t):
    return self.out(self.l(x)) / t


def adjacent(self, x, A):
    return self.out(A @ self.l(x))


def log_likelihood(output, y):
    return -output.log_softmax(-1)[range(len(y)), y].mean()


def features(n=9):
    return torch.randn(n, 3), torch.rand(n, 1), torch.randint(0, 2, (n,))


def graph(n=8, graphs=None):
    batch = torch.arange(n) * (graphs or 0) // n
    own = {"x": torch.randn(n, 3), "edge_index": torch.randint(0, n, (2, 14)), "weight": torch.rand(14)}
    return Graph(**own, y=torch.randint(0, 2, (graphs or n,)), batch=batch, graphs=graphs, name="g")


def doubled(data):
    """Stand-in for a graph, in float64."""
    own = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in data.store.items()}
    return types.SimpleNamespace(**own)


def one_value(make, forward=scaled):
    """Case of features and scales in one value."""
    x, s, y = features()
    return Two(forward), CE, (make(x, s), y), lambda m: CE(m.out(m.l(x.double()) * s.double()), y)


for name, make in {
    "namedtuple": Pair,
    "dataclass": Record,
    "namespace": lambda x, s: types.SimpleNamespace(x=x, scale=s),
    "slots": Slots,
}.items():
    CASES[name] = lambda make=make: one_value(make)
CASES["mapping_as_one"] = lambda: one_value(lambda x, s: {"x": x, "scale": s}, by_keys)


@case
def namedtuple_with_target():
    x, s, y = features()
    return Two(scaled), CE, Triple(x, s, y), lambda m: CE(m(Pair(x.double(), s.double())), y)


@case
def graph_and_target():
    g = graph()
    return Two(convolved), CE, (g, g.y), lambda m: CE(m(doubled(g)), g.y)


@case
def graph_alone():
    g = graph()
    return Two(convolved), CE, g, lambda m: CE(m(doubled(g)), g.y)


@case
def graph_by_names():
    g = graph()
    return Two(by_name), CE, g, lambda m: CE(convolved(m, doubled(g)), g.y)


@case
def graph_masked_in_the_loss():
    g = graph()
    loss = lambda output, data: CE(output[:5], data.y[:5])  # noqa: E731
    return Two(convolved), loss, (g, g), lambda m: loss(m(doubled(g)), g)


@case
def stream_of_graphs():
    data = [graph(9, 3), graph(6, 2), graph(10, 4)]
    whole = lambda m: sum(CE(m(doubled(g)), g.y) * g.graphs for g in data) / 9  # noqa: E731
    return Two(pooled), CE, data, whole


@case
def stream_of_graphs_with_own_loss():
    data = [graph(9, 3), graph(6, 2), graph(10, 4)]
    whole = lambda m: sum(CE(m(doubled(g)), g.y) * g.graphs for g in data) / 9  # noqa: E731
    return Two(pooled), log_likelihood, data, whole


@case
def packed():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.o = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, packed):
            return self.o(torch.tanh(self.r(packed)[1][-1]))

    sequences, y = [torch.randn(n, 3) for n in (2, 5, 3)], torch.tensor([0, 1, 1])
    truth = lambda m: CE(m(pack_sequence([s.double() for s in sequences], False)), y)  # noqa: E731
    return Recurrent(), CE, (pack_sequence(sequences, enforce_sorted=False), y), truth


def sets(forward, loss, *sizes):
    """Case of a stream of lists of tensors; of one list if there is one size."""
    data = [([torch.randn(2 + i % 3, 3) for i in range(n)], torch.arange(n) % 2) for n in sizes]
    everything, labels = [s for own, _ in data for s in own], torch.cat([y for _, y in data])
    truth = lambda m: CE(of_sets(m, [s.double() for s in everything]), labels)  # noqa: E731
    return Two(forward), loss, data[0] if len(data) == 1 else data, truth


CASES["list"] = lambda: sets(of_sets, CE, 4)
CASES["list_of_two_by_annotation"] = lambda: sets(of_annotated_sets, CE, 2)
CASES["stream_of_lists"] = lambda: sets(of_sets, CE, 3, 5)
CASES["stream_of_lists_with_own_loss"] = lambda: sets(of_sets, log_likelihood, 3, 5)


@case
def list_of_records():
    def losses(self, records):
        return {
            "loss": torch.stack([(self.out(self.l(r["at"].x)).sum(1) - r["label"]).square().mean() for r in records])
        }

    data = [{"at": Slots(torch.rand(n, 3), torch.rand(n)), "label": torch.tensor(float(n))} for n in (2, 3, 4)]
    double = [{"at": Slots(d["at"].x.double(), None), "label": d["label"].double()} for d in data]
    loss = lambda output, _: output["loss"].mean()  # noqa: E731
    return Two(losses), loss, (data, None), lambda m: loss(m(double), None)


@case
def temperature():
    x, _, y = features()
    t = torch.tensor(0.7)
    return Two(at_temperature), CE, ((x, t), y), lambda m: CE(m(x.double(), t.double()), y)


@case
def temperature_in_a_stream():
    x, _, y = features()
    t = torch.tensor(0.7)
    data = [((x[:5], t), y[:5]), ((x[5:], t), y[5:])]
    return Two(at_temperature), log_likelihood, data, lambda m: CE(m(x.double(), t.double()), y)


@case
def only_a_number():
    t = torch.tensor(0.3)
    loss = lambda output, y: (output - y).square().mean()  # noqa: E731
    model = Two(lambda self, t: self.out(self.l(torch.stack([t, t * t, t.exp()]))))
    return model, loss, (t, torch.tensor(1.0)), lambda m: loss(m(t.double()), 1.0)


@case
def items_with_target():
    x, _, y = features()
    t = torch.tensor(0.7)
    return Two(at_temperature), CE, {"x": x, "t": t, "y": y}, lambda m: CE(m(x.double(), t.double()), y)


@case
def loss_of_the_model_without_labels():
    def contrastive(self, text=None, image=None, return_loss=None):
        logits = F.normalize(self.l(text), dim=-1) @ F.normalize(self.l(image), dim=-1).T / self.o.weight.exp().mean()
        k = torch.arange(len(text))
        return {"loss": (CE(logits, k) + CE(logits.T, k)) / 2} if return_loss else {}

    a, b = torch.randn(6, 3), torch.randn(6, 3)
    data = {"text": a, "image": b, "return_loss": True}
    loss = lambda output, _: output["loss"]  # noqa: E731
    return Two(contrastive), loss, data, lambda m: m(a.double(), b.double(), True)["loss"]


def adjacency(n=8):
    return (torch.rand(n, n) > 0.6) * torch.rand(n, n)


def sparse_input(layout):
    """Case of a sparse tensor among the inputs."""
    (x, _, y), A = features(8), adjacency()
    return Two(adjacent), CE, ((x, getattr(A, layout)()), y), lambda m: CE(m(x.double(), A.double()), y)


def sparse_features(layout):
    """Case of sparse features in front of a dense layer."""
    (_, _, y), x = features(8), adjacency()[:, :3]
    model = Two(lambda self, x: self.out(self.l(x)))
    return model, CE, (getattr(x, layout)(), y), lambda m: CE(m(x.double()), y)


def sparse_inside(layout, place, product):
    """Case of a sparse buffer or attribute of the model."""
    (x, _, y), A = features(8), adjacency()
    model = Two(lambda self, x: self.out(product(self.A, self.l(x))))
    if place == "buffer":
        model.register_buffer("A", getattr(A, layout)())
    else:
        model.A = getattr(A, layout)()
    return model, CE, (x, y), lambda m: CE(m.out(A.double() @ m.l(x.double())), y)


for layout in ("to_sparse", "to_sparse_csr", "to_sparse_csc"):
    CASES[f"input_{layout}"] = lambda layout=layout: sparse_input(layout)
    for place, product in (("buffer", torch.sparse.mm), ("attribute", torch.matmul)):
        CASES[f"{place}_{layout}"] = lambda a=(layout, place, product): sparse_inside(*a)
for layout in ("to_sparse", "to_sparse_csr"):
    CASES[f"features_{layout}"] = lambda layout=layout: sparse_features(layout)


@case
def stream_with_sparse_tensors():
    parts = [(*features(n), adjacency(n)) for n in (8, 5)]
    data = [((x, A.to_sparse()), y) for x, _, y, A in parts]
    whole = lambda m: sum(len(y) * CE(m(x.double(), A.double()), y) for x, _, y, A in parts) / 13  # noqa: E731
    return Two(adjacent), CE, data, whole


def double_backward(loss, parameters):
    """Dense Hessian, parameters one after another."""
    first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    rows = torch.cat([g.flatten() for g in first])
    second = [
        torch.autograd.grad(row, parameters, retain_graph=True, materialize_grads=True)
        if row.requires_grad
        else map(torch.zeros_like, parameters)
        for row in rows
    ]
    return torch.stack([torch.cat([h.flatten() for h in own]) for own in second])


def holdings(value, seen):
    """Everything that some data hold, each with the version of its values."""
    if id(value) in seen:
        return
    seen[id(value)] = value, getattr(value, "_version", None)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    slots = [getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)]
    for item in (*items, *slots, *getattr(value, "__dict__", {}).values()):
        holdings(item, seen)


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("name", CASES)
def test_hessians_are_those_of_plain_double_backward(name, level):
    torch.manual_seed(0)
    model, loss, data, truth = CASES[name]()
    kept = getattr(model, "A", None)
    # torch does not copy compressed sparse tensors
    twin = copy.deepcopy(model, {id(kept): kept}).double()
    before, after = {}, {}
    holdings(data, before)
    result = hesscond.probe(model, loss, data, level=level)
    holdings(data, after)
    assert before.keys() == after.keys()
    assert [version for _, version in before.values()] == [version for _, version in after.values()]
    own, value = dict(twin.named_parameters()), truth(twin)
    assert len(result) == 1 if level == "network" else "o" in result
    for block in result.values():
        found = block.hessian(unit=0 if level == "unit" else None)
        names = sorted(block.parameters, key=lambda name: not name.endswith("bias"))
        exact = double_backward(value, [own[name] for name in names])
        if level == "unit":
            outputs = len(own[names[0]])
            rows = [0, *range(outputs, outputs + len(found) - 1)]
            assert (found - exact[rows][:, rows]).norm() <= 1e-12 * exact.norm()
        else:
            values = torch.linalg.eigvalsh(exact)
            assert (torch.linalg.eigvalsh(found) - values).abs().max() <= 1e-12 * values.abs().max()


class Locked(Slots):
    """Object that nobody copies."""

    __slots__ = ()

    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


X, Y = torch.randn(4, 3), torch.zeros(4).long()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.nested.nested_tensor([X[:2], X], layout=torch.jagged), Y), "nested tensor.*PackedSequence"),
        (([torch.randn(0, 3), torch.randn(0, 3)], torch.zeros(0).long()), "the batch is empty"),
        (Locked(X, X), "cannot be copied .*: give its tensors"),
        ((types.SimpleNamespace(x=3), torch.zeros(3)), "must be tensors, or contain some, not a SimpleNamespace"),
        ((Pair(X, X[:, :1]), None), "has no target .*does not take None .*: give a pair"),
    ],
)
def test_batches_that_cannot_be_measured_are_refused_in_a_sentence(data, words):
    with pytest.raises(ConfigError, match=words) as caught:
        hesscond.probe(Two(scaled), CE, data)
    assert "\n" not in str(caught.value)


class Adjoint(torch.autograd.Function):
    """Function that runs a module again in its backward pass, as adjoint methods do."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx, slope):
        x, *parameters = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            value = ctx.module(x)
        own = torch.autograd.grad(value, [x, *parameters], slope, allow_unused=True)
        return None, *own


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_that_a_backward_pass_runs_again_is_refused(dtype, level):
    model = Two(lambda self, x: self.o(torch.tanh(Adjoint.apply(self.l, x, *self.l.parameters())))).to(dtype)
    with pytest.raises(CaptureError, match=r"module 'l' is run again in a backward pass.*use a method that"):
        hesscond.probe(model, CE, (X.to(dtype), Y), level=level)


def test_errors_of_the_model_say_where_they_come_from():
    inner = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(5, 2)))
    with pytest.raises(RuntimeError, match="shapes") as caught:
        hesscond.probe(inner, CE, (X, Y))
    assert caught.value.__notes__ == ["(in module '1.1')"]

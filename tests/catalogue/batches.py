"""Batches as loaders yield them: objects, records, packed and sparse tensors, lists.

The function of a kind gives the model, the loss, the data as a user has them, and the loss in float64 of a twin of the
model, as a user would compute it by hand.
"""

import collections
import copy
import dataclasses
import functools
import types

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from tests.catalogue.cases import add
from tests.catalogue.parts import CE, Net

BATCHES = "Batches as loaders yield them"
Pair = collections.namedtuple("Pair", "x scale")
Triple = collections.namedtuple("Triple", "x scale y")


def twin_of(model):
    """Model in float64; compressed sparse tensors, which torch does not copy, are shared."""
    kept = getattr(model, "A", None)
    return copy.deepcopy(model, {id(kept): kept}).double()


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


def namedtuple_with_target():
    x, s, y = features()
    return Two(scaled), CE, Triple(x, s, y), lambda m: CE(m(Pair(x.double(), s.double())), y)


def graph_and_target():
    g = graph()
    return Two(convolved), CE, (g, g.y), lambda m: CE(m(doubled(g)), g.y)


def graph_alone():
    g = graph()
    return Two(convolved), CE, g, lambda m: CE(m(doubled(g)), g.y)


def graph_by_names():
    g = graph()
    return Two(by_name), CE, g, lambda m: CE(convolved(m, doubled(g)), g.y)


def graph_masked_in_the_loss():
    g = graph()
    loss = lambda output, data: CE(output[:5], data.y[:5])  # noqa: E731
    return Two(convolved), loss, (g, g), lambda m: loss(m(doubled(g)), g)


def stream_of_graphs(loss):
    data = [graph(9, 3), graph(6, 2), graph(10, 4)]
    whole = lambda m: sum(CE(m(doubled(g)), g.y) * g.graphs for g in data) / 9  # noqa: E731
    return Two(pooled), loss, data, whole


def packed():
    sequences, y = [torch.randn(n, 3) for n in (2, 5, 3)], torch.tensor([0, 1, 1])
    model = Net(lambda m, packed: m.o(torch.tanh(m.r(packed)[1][-1])), r=nn.GRU(3, 4), o=nn.Linear(4, 2))
    truth = lambda m: CE(m(pack_sequence([s.double() for s in sequences], False)), y)  # noqa: E731
    return model, CE, (pack_sequence(sequences, enforce_sorted=False), y), truth


def sets(forward, loss, *sizes):
    """Case of a stream of lists of tensors; of one list if there is one size."""
    data = [([torch.randn(2 + i % 3, 3) for i in range(n)], torch.arange(n) % 2) for n in sizes]
    everything, labels = [s for own, _ in data for s in own], torch.cat([y for _, y in data])
    truth = lambda m: CE(of_sets(m, [s.double() for s in everything]), labels)  # noqa: E731
    return Two(forward), loss, data[0] if len(data) == 1 else data, truth


def list_of_records():
    def losses(self, records):
        return {
            "loss": torch.stack([(self.out(self.l(r["at"].x)).sum(1) - r["label"]).square().mean() for r in records])
        }

    data = [{"at": Slots(torch.rand(n, 3), torch.rand(n)), "label": torch.tensor(float(n))} for n in (2, 3, 4)]
    double = [{"at": Slots(d["at"].x.double(), None), "label": d["label"].double()} for d in data]
    loss = lambda output, _: output["loss"].mean()  # noqa: E731
    return Two(losses), loss, (data, None), lambda m: loss(m(double), None)


def temperature():
    x, _, y = features()
    t = torch.tensor(0.7)
    return Two(at_temperature), CE, ((x, t), y), lambda m: CE(m(x.double(), t.double()), y)


def temperature_in_a_stream():
    x, _, y = features()
    t = torch.tensor(0.7)
    data = [((x[:5], t), y[:5]), ((x[5:], t), y[5:])]
    return Two(at_temperature), log_likelihood, data, lambda m: CE(m(x.double(), t.double()), y)


def only_a_number():
    t = torch.tensor(0.3)
    loss = lambda output, y: (output - y).square().mean()  # noqa: E731
    model = Two(lambda self, t: self.out(self.l(torch.stack([t, t * t, t.exp()]))))
    return model, loss, (t, torch.tensor(1.0)), lambda m: loss(m(t.double()), 1.0)


def items_with_target():
    x, _, y = features()
    t = torch.tensor(0.7)
    return Two(at_temperature), CE, {"x": x, "t": t, "y": y}, lambda m: CE(m(x.double(), t.double()), y)


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


def stream_with_sparse_tensors():
    parts = [(*features(n), adjacency(n)) for n in (8, 5)]
    data = [((x, A.to_sparse()), y) for x, _, y, A in parts]
    whole = lambda m: sum(len(y) * CE(m(x.double(), A.double()), y) for x, _, y, A in parts) / 13  # noqa: E731
    return Two(adjacent), CE, data, whole


def graphs(*sizes, each=False):
    """Random graphs of torch_geometric with as many nodes, and a label for each node or each graph."""
    from torch_geometric.data import Data

    edges = [torch.randint(0, n, (2, 3 * n)) for n in sizes]
    labels = [torch.randint(0, 2, (1 if each else n,)) for n in sizes]
    return [Data(x=torch.randn(n, 3), edge_index=e, y=y) for n, e, y in zip(sizes, edges, labels, strict=True)]


class Sage(nn.Module):
    """Graph convolution of torch_geometric, pooled for every graph if there are several."""

    def __init__(self):
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.c, self.o = GCNConv(3, 4), nn.Linear(4, 2)

    def forward(self, data):
        from torch_geometric.nn import global_mean_pool

        h = torch.tanh(self.c(data.x, data.edge_index))
        return self.o(h if data.batch is None else global_mean_pool(h, data.batch))


def in_double(graph):
    """Copy of a graph of torch_geometric in float64."""
    graph = graph.clone()
    graph.x = graph.x.double()
    return graph


def geometric():
    (data,) = graphs(8)
    return Sage(), CE, data, lambda m: CE(m(in_double(data)), data.y)


def geometric_loader():
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader

    data = graphs(4, 6, 5, 7, 3, each=True)
    whole = Batch.from_data_list(data)
    return Sage(), log_likelihood, DataLoader(data, batch_size=2), lambda m: CE(m(in_double(whole)), whole.y)


def tensor_dict():
    from tensordict import TensorDict

    x, s, y = features()
    data = TensorDict({"x": x, "scale": s, "labels": y}, batch_size=[9]).lock_()
    return Two(by_keys), CE, data, lambda m: CE(m({"x": x.double(), "scale": s.double()}), y)


batch = functools.partial(add, BATCHES, layer="o", twin=twin_of)
for kind, make in {
    "namedtuple": Pair,
    "dataclass": Record,
    "namespace": lambda x, s: types.SimpleNamespace(x=x, scale=s),
    "slotted object": Slots,
}.items():
    batch(kind, f"a {kind} as the input", functools.partial(one_value, make))
batch("mapping_as_one", "a dict as the input", lambda: one_value(lambda x, s: {"x": x, "scale": s}, by_keys))
batch("namedtuple_with_target", "a named tuple with inputs and target", namedtuple_with_target)
batch("graph_and_target", "a graph object (`Data`) as the input", graph_and_target)
batch("graph_alone", "a graph object as the batch", graph_alone)
batch("graph_by_names", "a graph object, its attributes by name", graph_by_names)
batch("graph_masked_in_the_loss", "a graph object as input and target", graph_masked_in_the_loss)
batch("stream_of_graphs", "stream of batched graphs", lambda: stream_of_graphs(CE))
batch("stream_of_graphs_own", "stream of batched graphs, a loss of one's own", lambda: stream_of_graphs(log_likelihood))
batch("packed", "a PackedSequence", packed)
batch("list_of_sets", "a list of tensors", lambda: sets(of_sets, CE, 4))
batch("list_by_annotation", "a list of two, by annotation", lambda: sets(of_annotated_sets, CE, 2))
batch("stream_of_lists", "stream of lists of tensors", lambda: sets(of_sets, CE, 3, 5))
batch("stream_of_lists_own", "stream of lists, a loss of one's own", lambda: sets(of_sets, log_likelihood, 3, 5))
batch("list_of_records", "a list of dicts with objects", list_of_records)
batch("temperature", "a temperature without dimensions", temperature)
batch("temperature_in_a_stream", "a temperature without dimensions, stream", temperature_in_a_stream)
batch("only_a_number", "a number as the only input", only_a_number)
batch("items_with_target", "a dict with inputs and `y`", items_with_target)
batch("loss_of_the_model", "the loss of a model without labels (CLIP)", loss_of_the_model_without_labels)
for layout in ("to_sparse", "to_sparse_csr", "to_sparse_csc"):
    form = layout.removeprefix("to_").replace("_", " ").replace("sparse cs", "CS").replace("sparse", "COO").upper()
    batch(f"input_{layout}", f"an adjacency among the inputs, {form}", functools.partial(sparse_input, layout))
    for place, product in (("buffer", torch.sparse.mm), ("attribute", torch.matmul)):
        make = functools.partial(sparse_inside, layout, place, product)
        batch(f"{place}_{layout}", f"an adjacency as {place}, {form}", make)
batch("features_coo", "sparse features of a dense layer, COO", lambda: sparse_features("to_sparse"))
batch("features_csr", "sparse features of a dense layer, CSR", lambda: sparse_features("to_sparse_csr"))
batch("stream_with_sparse_tensors", "stream with sparse tensors", stream_with_sparse_tensors)
batch("geometric", "Data of torch_geometric as the batch", geometric, library="torch_geometric")
batch("geometric_loader", "loader of torch_geometric, a loss of one's own", geometric_loader, library="torch_geometric")
batch("tensor_dict", "a locked TensorDict as the batch", tensor_dict, library="tensordict")

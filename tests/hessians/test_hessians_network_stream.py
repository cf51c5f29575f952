"""Operators over streams of batches: ragged, shuffled, too large to keep; and the model that is left untouched."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians.network_operator import HessianOperator
from tests.catalogue import CASES
from tests.catalogue.cases import samples, split
from tests.catalogue.parts import Net, drawn
from tests.fuzzing import state_of
from tests.hessians.test_hessians_network import OPERATORS, direction, is_close
from tests.test_probe_stream import ragged

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

#: One of each kind is fast enough to do always.
KINDS = [
    "leaky-ce-sum", "relu-ce-weighted", "relu-ce-weighted-ignored", "gelu-mse", "dict-output", "recurrent-tanh",
    "integer-and-real-inputs", "attention-sdpa", "conv2d-groups", "many-samples", "per-token-lambda", "eval-batchnorm",
]  # fmt: skip
STREAMS = [
    pytest.param(c, id=c.name, marks=[] if c.name in KINDS else [pytest.mark.slow, pytest.mark.share(4)])
    for c in CASES if c.streams
]  # fmt: skip


def data_set():
    return drawn(23, 5, dtype=torch.float64)


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), *between, nn.Tanh(), nn.Linear(4, 3)).double()


def room_for(operator, graphs):
    """The memory in which so many of the graphs of an operator can be retained, from a list of batches."""
    sizes = [linearization.bytes() for linearization in operator._retained.values()]
    return 8 * operator.order + sum(sizes[:graphs]) + max(sizes)


# ------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("example", STREAMS)
def test_ragged_batches_are_the_whole(example, kind):
    model, loss_fn, batch = example.make()
    whole, parts = kind(model, loss_fn, batch), kind(model, loss_fn, split(batch, ragged(samples(batch))))
    v = direction(whole.order)
    is_close(parts @ v, whole @ v)
    is_close(parts.gradient, whole.gradient)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)


# -------------------------------------------------------------------------------------------- loaders and the memory


class Counted(Dataset):
    """A data set that counts how often it is read, and may change."""

    def __init__(self, batch):
        self.x, self.y = batch
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index], self.y[index]


LOADERS = {
    "in-order": lambda data: DataLoader(data, batch_size=5),
    "shuffled": lambda data: DataLoader(data, batch_size=5, shuffle=True),
    "own-generator": lambda data: DataLoader(
        data, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_loader_that_is_kept_is_read_once(kind, loader):
    data = Counted(data_set())
    model, loss_fn = network(), nn.CrossEntropyLoss()
    A = kind(model, loss_fn, LOADERS[loader](data))
    assert data.reads == 23
    assert A.retained == (5, 5)
    v = direction(A.order)
    assert torch.equal(A @ v, A @ v)
    is_close(A @ v, kind(model, loss_fn, (data.x, data.y)) @ v)
    assert data.reads == 23


@pytest.mark.share(2)
@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("between", [(), (nn.Dropout(0.5), nn.BatchNorm1d(4))], ids=["plain", "dropout-batchnorm"])
def test_a_loader_that_does_not_fit_is_read_again_in_the_same_order(kind, loader, between):
    data = Counted(data_set())
    model, loss_fn = network(*between), nn.CrossEntropyLoss()
    source = LOADERS[loader](data)
    state = torch.get_rng_state()
    own = None if source.generator is None else source.generator.get_state()
    large = kind(model, loss_fn, source, reduction="mean")
    if own is not None:
        source.generator.set_state(own)
    small = kind(model, loss_fn, source, memory=1, reduction="mean")
    assert large.retained == (5, 5)
    # one graph is needed in any case
    assert small.retained == (1, 5)
    before = data.reads
    v = direction(small.order)
    torch.manual_seed(99)
    first = small @ v
    assert data.reads == before + 23
    assert torch.equal(first, small @ v)
    # whatever is drawn by others in between, and from the generator
    torch.rand(3)
    list(source)
    assert torch.equal(first, small @ v)
    # the same batches with the same dropout as those that were kept
    is_close(first, large @ v, 1e-12)
    torch.set_rng_state(state)


def test_a_memory_for_some_of_the_graphs():
    model, loss_fn, batch = network(), nn.CrossEntropyLoss(), data_set()
    parts = split(batch, [6, 6, 6, 5])
    full = HessianOperator(model, loss_fn, parts)
    v = direction(full.order)
    for graphs in (1, 2, 3):
        H = HessianOperator(model, loss_fn, parts, memory=room_for(full, graphs))
        assert H.retained == (graphs, 4)
        assert torch.equal(H @ v, full @ v)
    assert full.retained == (4, 4)


def test_data_that_change_are_refused():
    data = Counted(data_set())
    H = HessianOperator(network(), nn.CrossEntropyLoss(), DataLoader(data, batch_size=5), memory=1)
    v = direction(H.order)
    H @ v
    # two samples of a batch change places
    data.x[[6, 7]] = data.x[[7, 6]]
    with pytest.raises(CaptureError, match="batch 1 of the data is not what it was"):
        H @ v
    data.x[[6, 7]] = data.x[[7, 6]]
    H @ v
    data.x, data.y = data.x[:20], data.y[:20]
    with pytest.raises(CaptureError, match="batch 4 of the data is not what it was"):
        H @ v


def test_a_generator_is_read_once():
    batch = data_set()
    parts = split(batch, [9, 8, 6])
    H = HessianOperator(network(), nn.CrossEntropyLoss(), (part for part in parts))
    v = direction(H.order)
    is_close(H @ v, HessianOperator(network(), nn.CrossEntropyLoss(), batch) @ v)
    with pytest.raises(CaptureError, match=r"can be read only once \(generator\)"):
        HessianOperator(network(), nn.CrossEntropyLoss(), (part for part in parts), memory=1)


# ------------------------------------------------------------------------------------------------------ what is left


def spy(m, x):
    """Draws, counts its calls, and works on its input in place."""
    m.calls += 1
    return x.mul_(1 + 0.1 * torch.rand_like(x)) + m.calls


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
def test_the_model_and_the_data_are_left_untouched(kind, stream):
    torch.manual_seed(0)
    between = nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3)
    first = Net(spy, calls=nn.Buffer(torch.zeros(()))), nn.Linear(5, 6)
    model = nn.Sequential(*first, *between, nn.Linear(6, 3)).double()
    model[2].eval()
    model[1].weight.grad = torch.ones_like(model[1].weight)
    batch = data_set()
    before = state_of([model, *batch, torch.get_rng_state().tolist()])
    data = split(batch, [12, 11]) if stream else batch
    A = kind(model, nn.CrossEntropyLoss(), data, reduction="mean", memory=1 if stream else None)
    v = direction(A.order)
    first = A @ v
    assert state_of([model, *batch, torch.get_rng_state().tolist()]) == before
    # nor does the operator change with the model afterwards
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    model.eval()
    assert torch.equal(A @ v, first)
    assert not model.training


def test_batches_that_do_not_count_and_hidden_weights():
    loss_fn = nn.CrossEntropyLoss(ignore_index=2)
    model, (x, y) = network(), data_set()
    y[4:7] = 2
    for sizes in ([4, 3, 16], [3, 1, 19]):
        H = HessianOperator(model, loss_fn, split((x, y), sizes))
        is_close(H.to_dense(), HessianOperator(model, loss_fn, (x, y)).to_dense())
    assert H.retained == (3, 3)
    with pytest.raises(ConfigError, match="no target in the stream counts"):
        HessianOperator(model, loss_fn, [(x[4:6], y[4:6]), (x[6:7], y[6:7])])
    with pytest.raises(ConfigError, match="neither the mean nor the sum"):
        HessianOperator(model, lambda o, t: nn.functional.cross_entropy(o, t) ** 2, split((x, y), [11, 12]))

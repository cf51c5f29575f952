"""A stream of ragged batches gives the Hessian of the whole data set."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hesscond
from tests.catalogue import CASES, case
from tests.catalogue.cases import Case, rows, samples, split
from tests.catalogue.dense import mlp
from tests.catalogue.parts import labelled
from tests.truth import block, case_truth, eligible_layers, layer_truth

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

STREAMS = [c for c in CASES if c.streams]
#: One of each kind for what is too slow to do with all of them.
KINDS = [
    "leaky-ce-sum", "relu-ce-weighted", "relu-ce-weighted-ignored", "relu-ce-sum-ignored", "gelu-mse", "dict-output",
    "integer-and-real-inputs", "recurrent-tanh", "attention-sdpa", "conv2d-groups", "transposed1d", "many-samples",
    "relu-ce-probabilities-weighted", "per-token-lambda", "eval-batchnorm", "float32-ce-weighted",
]  # fmt: skip


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def ragged(n):
    """Batch sizes that add up to n: half, one, and the rest."""
    half = max(n // 2, 1)
    return [size for size in (half, min(1, n - half), n - half - 1) if size > 0]


def is_the_hessian(result, truth, size, level, tolerance=1e-10):
    assert list(result) == list(truth)
    for name, layer in result.items():
        whole = truth[name]
        if level == "layer":
            assert (layer.hessian().cpu() - whole).norm() <= tolerance * whole.norm()
            continue
        for unit in layer.units:
            own = block(whole, size[name], unit)
            assert (layer.hessian(unit=unit).cpu() - own).norm() <= tolerance * own.norm()


def agree(one, other, rtol=1e-8):
    """Two tables of the same blocks say the same, where both are resolved."""
    assert len(one) == len(other)
    for a, b in zip(one.itertuples(), other.itertuples(), strict=True):
        assert (a.layer, a.n_params) == (b.layer, b.n_params)
        if a.resolved and b.resolved:
            assert (a.rank, a.negative) == (b.rank, b.negative)
            # a stream adds up Hessians: eps·κ is lost where the whole batch works on factors
            assert b.kappa == pytest.approx(a.kappa, rel=rtol + 1e-13 * a.kappa)


@pytest.mark.share(12)
@pytest.mark.parametrize(
    ("example", "level"),
    [
        pytest.param(c, level, id=f"{c.name}-{level}",
                     marks=[] if level == "unit" or c.name in KINDS else [pytest.mark.slow, pytest.mark.share(4)])
        for c in STREAMS for level in ("unit", "layer")
    ],
)  # fmt: skip
def test_ragged_batches_are_the_whole(example, level):
    model, loss_fn, batch = example.make()
    parts = split(batch, ragged(samples(batch)))
    result = hesscond.probe(model, loss_fn, parts, level=level)
    is_the_hessian(result, *case_truth(example), level)
    assert set(result.skipped) & set(eligible_layers(model)) == set(example.unreached)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("name", ["relu-ce", "tanh-ce", "gelu-mse", "conv2d-tanh-mse", "relu-ce-weighted-ignored"])
def test_numbers_of_a_stream_are_those_of_the_whole(name, level):
    model, loss_fn, batch = case(name).make()
    whole = hesscond.probe(model, loss_fn, batch, level=level)
    parts = hesscond.probe(model, loss_fn, split(batch, ragged(samples(batch))), level=level)
    agree(whole.to_frame(), parts.to_frame())
    for layer in parts.values():
        for which in [{}] if level == "layer" else [{"unit": u} for u in layer.units]:
            H, values, vectors = layer.hessian(**which), layer.eigenvalues(**which), layer.eigenvectors(**which)
            assert (H @ vectors - vectors * values).norm() <= 1e-10 * H.norm()
            assert (vectors.T @ vectors - torch.eye(len(values), dtype=torch.float64)).norm() <= 1e-10


def test_a_batch_without_a_target_that_counts_counts_nothing():
    loss_fn = nn.CrossEntropyLoss(ignore_index=2)
    model, _, (x, y) = Case("", "", None, lambda: (mlp(nn.ReLU()), loss_fn, labelled(5, n=12))).make()
    y[4:7] = 2
    for parts in (split((x, y), [4, 3, 5]), split((x[4:], y[4:]), [3, 5])):
        result = hesscond.probe(model, loss_fn, parts, level="layer")
        for name, layer in result.items():
            truth = layer_truth(model, loss_fn, (x, y) if len(parts) == 3 else (x[4:], y[4:]), name)
            assert (layer.hessian() - truth).norm() <= 1e-10 * truth.norm()


@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_data_loader(level, shuffle):
    example = case("many-samples")
    model, loss_fn, (x, y) = example.make()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=shuffle)
    random_state = torch.get_rng_state()
    result = hesscond.probe(model, loss_fn, loader, level=level)
    # a loader draws a seed whenever it is iterated
    assert torch.equal(torch.get_rng_state(), random_state)
    is_the_hessian(result, *case_truth(example), level)


class Named(Dataset):
    """The samples of a batch of any structure."""

    def __init__(self, batch, size):
        self.batch, self.size = batch, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return rows(self.batch, index)


@pytest.mark.parametrize("name", ["two-inputs", "positional-inputs", "dict-output", "tuple-output"])
def test_data_loader_with_structured_samples(name):
    model, loss_fn, batch = case(name).make()
    loader = DataLoader(Named(batch, 7), batch_size=3)
    if name in ("positional-inputs", "tuple-output"):
        # the default collation makes lists of tuples
        loader = [tuple(tuple(part) if isinstance(part, list) else part for part in pair) for pair in loader]
    is_the_hessian(hesscond.probe(model, loss_fn, loader), *case_truth(case(name)), "unit")


def test_a_generator_is_read_once():
    model, loss_fn, batch = case("many-samples").make()
    given_out = []

    def batches():
        for number, part in enumerate(split(batch, [20, 30, 10])):
            given_out.append(number)
            yield part

    result = hesscond.probe(model, loss_fn, batches(), level="layer")
    assert given_out == [0, 1, 2]
    is_the_hessian(result, *case_truth(case("many-samples")), "layer")


def test_sequences_of_different_lengths_in_a_stream():
    """Positions count within their sample, samples count alike."""
    model, loss_fn, _ = case("tokens-mean").make()
    generator = torch.Generator().manual_seed(3)
    parts = [
        (torch.randn(n, length, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3)
        for n, length in ((4, 3), (1, 5), (6, 2))
    ]
    result = hesscond.probe(model, loss_fn, parts, level="layer")
    for name, layer in result.items():
        truth = sum(len(y) / 11 * layer_truth(model, loss_fn, (x, y), name) for x, y in parts)
        assert (layer.hessian() - truth).norm() <= 1e-10 * truth.norm()


def test_a_laplacian_inside_the_model_has_the_hessian_of_all_batches():
    """Forward over reverse mode leaves tensors of zeros without memory in the graphs that a stream keeps."""
    model, loss_fn, (x, y) = case("hessian_inside").make()
    model, x, y = model.double(), x.double(), y.double()
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss_fn(model(x), y), parameters, create_graph=True, materialize_grads=True)
    each = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in flat(gradient)]
    expected = torch.stack([flat(row) for row in each])
    result = hesscond.probe(model, loss_fn, [(x[:3], y[:3]), (x[3:], y[3:])], level="network")
    found = result["network"].operator.to_dense()
    assert torch.allclose(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))

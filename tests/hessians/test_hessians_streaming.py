from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import hesscond
from hesscond.capture import DiagonalS, FeatureStatistics, LayerCapture, LayerInputs, capture
from hesscond.hessians import CentringScaling
from hesscond.hessians.build import unit_hessian
from hesscond.hessians.streaming import stream
from hesscond.methods.bnp import from_statistics
from hesscond.problem import MEMORY
from tests.catalogue.cases import Case
from tests.catalogue.dense import mean_of_squares_with_tanh, mlp
from tests.catalogue.parts import CE, MSE, labelled, valued

#: Networks of which there are many samples: activation, loss, data.
SMALL = {
    "relu-ce": (nn.ReLU(), CE, labelled),
    "tanh-ce": (nn.Tanh(), CE, labelled),
    "relu-mse": (nn.ReLU(), MSE, valued),
    "relu-nonconvex": (nn.ReLU(), mean_of_squares_with_tanh, valued),
}


def whole_and_streamed(case, cuts, layer, seed=0):
    model, loss_fn, (x, y) = case.make(seed)
    n = len(y)
    captured = capture(model, loss_fn, (x, y), [layer])[layer]
    edges = [0, *sorted(cuts), n]

    def chunks():
        for start, stop in pairwise(edges):
            if stop > start:
                part = capture(model, loss_fn, (x[start:stop], y[start:stop]), [layer])
                yield part, (stop - start) / n

    hessians, statistics = stream(chunks(), MEMORY)
    return captured, hessians, statistics[layer]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 60), max_size=6), st.sampled_from(list(SMALL)))
def test_kappa_does_not_depend_on_how_the_data_are_split(cuts, name):
    """Ragged batches, chunks of one sample and chunks smaller than the layer included."""
    activation, loss, data = SMALL[name]
    case = Case("", name, None, lambda: (mlp(activation), loss, data(5, n=60)))
    captured, hessians, statistics = whole_and_streamed(case, cuts, "2")
    P = from_statistics(FeatureStatistics.of(captured.h))
    streamed_P = from_statistics(statistics)
    for unit in captured.units:
        whole, streamed = unit_hessian(captured, unit, MEMORY), hessians["2", unit]
        assert torch.allclose(streamed.matrix(), whole.matrix(), rtol=1e-11, atol=1e-13 * float(whole.matrix().norm()))
        for a, b in ((None, None), (P, streamed_P)):
            one = whole.in_coordinates(a).condition_number()
            other = streamed.in_coordinates(b).condition_number()
            if one.resolved and other.resolved:
                assert other.rank == one.rank
                assert other.negative == one.negative
                assert float(other) == pytest.approx(float(one), rel=1e-8)
                assert other.lower <= float(one) <= other.upper


def test_long_streams_keep_small_eigenvalues():
    """Features spread over ten decades, 20,000 samples: a summed (n+1)×(n+1) Hessian has lost the bottom."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** -np.linspace(0, 10, 9)
    H = torch.from_numpy(rng.standard_normal((20_000, 9)) * scale)
    root = torch.from_numpy(rng.random(20_000))
    truth = np.linalg.cond((H * root[:, None] / torch.from_numpy(scale)).numpy())

    def captured(h, root):
        inputs = LayerInputs(nn.Linear(9, 1, bias=False), ((h, torch.Size([len(h), 1])),), len(h))
        return LayerCapture("a", inputs, (0,), DiagonalS(root, None), "")

    def chunks():
        for start in range(0, 20_000, 1536):
            part = slice(start, start + 1536)
            yield ({"a": captured(H[part], root[part, None] / len(H[part]) ** 0.5)}, len(H[part]) / 20_000)

    hessians, _ = stream(chunks(), MEMORY)
    kappa = hessians["a", 0].condition_number()
    assert kappa.resolved
    assert kappa.rank == 9
    # λ_min belongs to the smallest feature alone
    expected = float((H[:, 0] * root).square().sum() / (H[:, 8] * root).square().sum())
    assert float(kappa) == pytest.approx(expected, rel=0.1)
    scaled = (
        hessians["a", 0]
        .in_coordinates(CentringScaling(torch.zeros(9).double(), torch.from_numpy(scale), bias=False))
        .condition_number()
    )
    assert float(scaled) == pytest.approx(truth**2, rel=1e-8)


def test_dead_features_are_exactly_dead_in_a_stream():
    model, loss_fn, (x, y) = Case("", "", None, lambda: (mlp(nn.ReLU()), CE, labelled(5, n=40))).make()
    with torch.no_grad():
        # constant, but not zero: its computed variance is round-off
        model[0].weight[1] = 0
        model[0].bias[1] = 0.1
    parts = (capture(model, loss_fn, (x[i : i + 7], y[i : i + 7]), ["2"]) for i in range(0, 40, 7))
    hessians, statistics = stream(((p, len(p["2"].h) / 40) for p in parts), MEMORY)
    assert statistics["2"].sigma[1] == 0
    P = from_statistics(statistics["2"])
    dead = int((P.sigma == 0).sum())
    assert dead >= 1
    assert np.isfinite(P.kappa_D)
    kappa = hessians["2", 0].in_coordinates(P).condition_number()
    assert kappa.rank + kappa.nullity == 7 - dead
    assert kappa.resolved


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_merged_statistics_are_those_of_all_samples(first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(first + second, 4, generator=generator, dtype=torch.float64) * 3 + 100
    merged = FeatureStatistics.of(h[:first]).merged(FeatureStatistics.of(h[first:]))
    assert merged.count == first + second
    assert torch.allclose(merged.mu, h.mean(0), rtol=1e-13)
    if first + second > 1:
        assert torch.allclose(merged.sigma, h.std(0, unbiased=False), rtol=1e-9)
    assert torch.equal(merged.low, h.min(0).values)


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_the_shift_of_all_logits_is_known_to_be_null_in_streams_of_whole_layers(classes, dead):
    """The output layer of a classifier: its factor has n̂ columns more than its rank, which round-off does not show."""
    torch.manual_seed(classes)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes)).double()
    with torch.no_grad():
        model[0].bias.fill_(1.0)
        model[0].bias[:dead] = -100.0
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randint(0, classes, (60,))
    batches = [(x[:7], y[:7]), (x[7:40], y[7:40]), (x[40:], y[40:])]
    whole = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), ["2"], "layer")["2"]
    values, rank = torch.linalg.eigvalsh(whole.hessian()), (classes - 1) * (6 - dead)
    for order in (batches, batches[::-1]):
        streamed = hesscond.probe(model, nn.CrossEntropyLoss(), order, ["2"], "layer")["2"]
        assert (streamed.kappa.resolved, streamed.kappa.rank) == (True, rank)
        assert streamed.kappa.rank_decision == "structural"
        assert streamed.kappa.value == pytest.approx(float(values[-1] / values[-rank]), rel=1e-8)


def test_a_loss_that_knows_of_a_shift_has_no_such_null_space():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)
    kappa = hesscond.probe(model, nn.MSELoss(), [(x[:30], y[:30]), (x[30:], y[30:])], ["2"], "layer")["2"].kappa
    assert (kappa.resolved, kappa.rank) == (True, 18)

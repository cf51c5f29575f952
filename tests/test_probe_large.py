"""Large networks: λ_max and a lower bound of κ within a number of products, and what does not fit."""

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.methods import Adam
from tests.catalogue.parts import Applied, Net
from tests.truth import double_backward


def network(kind, seed):
    """A float32 model of some hundred parameters; with batch normalization products lose digits in depth."""
    torch.manual_seed(seed)
    layers = []
    width = 12
    for _ in range(5 if kind == "batchnorm" else 2):
        layers += [nn.Linear(width, 12), *([nn.BatchNorm1d(12)] if kind == "batchnorm" else [])]
        layers.append(nn.ReLU() if seed % 2 else nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(12, 4))
    return model, nn.CrossEntropyLoss(), (torch.randn(30, 12), torch.randint(0, 4, (30,)))


@functools.cache
def truth(kind, seed):
    """The eigenvalues (n,) of the Hessian of a network in float64, by double backward."""
    model, loss_fn, (inputs, targets) = network(kind, seed)
    H = double_backward(loss_fn(model.double()(inputs.double()), targets), model.parameters())
    return torch.linalg.eigvalsh((H + H.T) / 2)


SLOW = [pytest.mark.slow, pytest.mark.share(3)]
NETWORKS = [
    pytest.param(kind, seed, marks=SLOW if seed else []) for kind in ("plain", "batchnorm") for seed in range(4)
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("kind", "seed"), NETWORKS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_intervals_hold_the_truth(kind, seed, dtype):
    model, loss_fn, batch = network(kind, seed)
    values = truth(kind, seed)
    sizes = values.abs().sort(descending=True).values
    kappa = float(sizes[0] / sizes[sizes > 1e-11 * sizes[0]].min())
    found = hesscond.probe(model, loss_fn, batch, level="network", dtype=dtype, products=60)["network"]
    outermost = float(values[values.abs().argmax()])
    assert float(found.top.lower) <= outermost <= float(found.top.upper)
    # in float32 by the rounding of products
    assert float(found.top.upper - found.top.lower) < (1e-5 if dtype else 3e-4) * abs(outermost)
    assert 2 < found.kappa.lower <= kappa
    assert found.kappa.solver == "Lanczos, 60 products"
    assert found.kappa.lambda_max == pytest.approx(abs(outermost), rel=1e-5)
    assert not found.kappa.resolved


@pytest.mark.share(8)
@pytest.mark.parametrize("method", ["bnp", "equilibration", "sphere", "adam"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_intervals_in_a_method_s_coordinates_hold_the_truth(method, dtype):
    model, loss_fn, batch = network("plain", 0)
    if method == "adam":
        method = Adam(model)
        optimizer = method.optimizer(1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss_fn(model(batch[0]), batch[1]).backward()
            optimizer.step()
    # of which other tests show that it is the Hessian in these coordinates
    H = hesscond.probe(model, loss_fn, batch, level="network", method=method)["network"].operator.to_dense()
    values = torch.linalg.eigvalsh((H + H.T) / 2)
    sizes = values.abs()
    outermost, largest = float(values[sizes.argmax()]), float(sizes.max())
    found = hesscond.probe(model, loss_fn, batch, level="network", method=method, dtype=dtype, products=60)["network"]
    assert float(found.top.lower) <= outermost <= float(found.top.upper)
    assert float(found.top.upper - found.top.lower) < (1e-8 if dtype else 1.0) * largest
    assert (20 if dtype else 1) <= found.kappa.lower <= largest / float(sizes[sizes > 1e-11 * largest].min())


def test_as_many_products_as_parameters_decide_it():
    model, loss_fn, batch = network("plain", 0)
    n = sum(p.numel() for p in model.parameters())
    exact = hesscond.probe(model, loss_fn, batch, level="network")["network"].kappa
    found = hesscond.probe(model, loss_fn, batch, level="network", products=n)["network"]
    assert found.bounded is None
    assert found.kappa.resolved
    assert float(found.kappa) == pytest.approx(float(exact), rel=1e-6)
    assert float(found.top.lower) <= exact.lambda_max <= float(found.top.upper)


def test_a_layer_by_products_that_is_too_large_to_be_formed_is_bounded():
    """A matrix that no dense layer holds, used twice, so that κ takes products in its entries."""
    torch.manual_seed(0)
    twice = Net(lambda m, x: torch.tanh(torch.tanh(x @ m.W) @ m.W), W=nn.Parameter(torch.randn(12, 12) / 3))
    model = nn.Sequential(twice, nn.Linear(12, 4)).double()
    loss_fn, batch = nn.CrossEntropyLoss(), (torch.randn(200, 12).double(), torch.randint(0, 4, (200,)))
    options = {"layers": ["0"], "level": "layer"}
    exact = hesscond.probe(model, loss_fn, batch, **options)["0"].kappa
    H = double_backward(loss_fn(model(batch[0]), batch[1]), [model[0].W])
    sizes = torch.linalg.eigvalsh(H).abs()
    assert float(exact) == pytest.approx(float(sizes.max() / sizes.min()), rel=1e-6)
    # three matrices of order 144 take 0.5 MB
    found = hesscond.probe(model, loss_fn, batch, memory=400_000, **options)["0"].kappa
    assert not found.resolved
    assert 2 < found.lower <= float(exact)
    assert "24 products bound κ of 144 parameters from below only" in found.reason
    assert "level='network'" in found.advice
    bound = hesscond.probe(model, loss_fn, batch, layers=["0"], level="network", products=24)["network"]
    assert float(bound.top.lower) <= float(sizes.max()) <= float(bound.top.upper)


def test_a_layer_whose_curvature_does_not_fit_is_bounded_by_products():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 40, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.Sequential(encoder, nn.Linear(16, 5), nn.Flatten(0, 1)).double()
    loss_fn, batch = nn.CrossEntropyLoss(), (torch.randn(6, 8, 16).double(), torch.randint(0, 5, (48,)))
    options = {"level": "layer", "memory": 1_000_000}
    found = hesscond.probe(model, loss_fn, batch, **options)
    for name, layer in (("0.linear1", encoder.linear1), ("0.linear2", encoder.linear2)):
        H = double_backward(loss_fn(model(batch[0]), batch[1]), [layer.weight, layer.bias])
        sizes = torch.linalg.eigvalsh(H).abs()
        own = found[name]
        assert own.check.passed
        assert own.kappa.lambda_max == pytest.approx(float(sizes.max()), rel=1e-3)
        assert 5 < own.kappa.lower <= float(sizes.max() / sizes[sizes > 1e-12 * sizes.max()].min())
        assert re.search(f"by products alone: the (curvature|factor) of layer '{name}'", str(found))
    assert found["1"].kappa.resolved
    # over a stream the limit is the order of the triangular factor
    stream = [(batch[0][:3], batch[1][:24]), (batch[0][3:], batch[1][24:])]
    summed = hesscond.probe(model, loss_fn, stream, **options)
    assert summed["0.linear2"].kappa.lambda_max == pytest.approx(found["0.linear2"].kappa.lambda_max, rel=1e-3)
    assert "over a data set takes" in str(summed)
    drained = hesscond.probe(model, loss_fn, iter(stream), **options)
    assert "triangular factor" in drained.skipped["0.linear2"]
    # P of BNP is that of the layer's inputs, which products alone do not have
    with pytest.raises(CaptureError, match="or raise memory"):
        hesscond.probe(model, loss_fn, batch, layers=["0.linear1"], method="bnp", **options)


def test_a_layer_whose_dual_does_not_fit_is_bounded_by_products():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 10)).double()
    loss_fn, batch = nn.CrossEntropyLoss(), (torch.randn(40, 20).double(), torch.randint(0, 10, (40,)))
    H = double_backward(loss_fn(model(batch[0]), batch[1]), [model[2].weight, model[2].bias])
    sizes = torch.linalg.eigvalsh(H).abs()
    largest, kappa = float(sizes.max()), float(sizes.max() / sizes[sizes > 1e-12 * sizes.max()].min())
    options = {"layers": ["2"], "level": "layer"}
    assert float(hesscond.probe(model, loss_fn, batch, **options)["2"].kappa) == pytest.approx(kappa, rel=1e-6)
    # its curvature takes 32 kB, three matrices of the order of its dual, 400 or 360, 3 MB
    for check in (True, False):
        own = hesscond.probe(model, loss_fn, batch, memory=2_000_000, check=check, **options)["2"]
        assert own.kappa.lambda_max == pytest.approx(largest, rel=1e-3)
        assert 5 < own.kappa.lower <= kappa
        assert "by products alone: the decomposition of the dual of layer '2', of order" in own.remark


def test_a_stream_and_some_layers_have_bounds_too():
    model, loss_fn, (inputs, targets) = network("plain", 1)
    stream = [(inputs[:20], targets[:20]), (inputs[20:], targets[20:])]
    options = {"level": "network", "dtype": None, "products": 40, "layers": ["0", "2"]}
    one = hesscond.probe(model, loss_fn, (inputs, targets), **options)["network"]
    cut = hesscond.probe(model, loss_fn, stream, **options)["network"]
    H = hesscond.HessianOperator(model, loss_fn, (inputs, targets), layers=["0", "2"]).to_dense()
    outermost = float(torch.linalg.eigvalsh((H + H.T) / 2).abs().max())
    for found in (one, cut):
        assert found.kappa.lambda_max == pytest.approx(outermost, rel=1e-6)
        assert float(found.top.upper - found.top.lower) < 1e-4 * outermost
    assert cut.kappa.lower == pytest.approx(one.kappa.lower, rel=0.2)


def test_noise_is_not_measured_in_another_network():
    # where float64 has other random numbers rounding is estimated
    model, loss_fn, batch = network("plain", 0)
    noise = Applied(lambda x: x + torch.randn_like(x))
    model = nn.Sequential(model[0], nn.Tanh(), noise, nn.Linear(12, 4))
    torch.manual_seed(7)
    found = hesscond.probe(model, loss_fn, batch, level="network", dtype=None, products=60)["network"]
    torch.manual_seed(7)
    H = hesscond.HessianOperator(model, loss_fn, batch, dtype=None).to_dense().double()
    values = torch.linalg.eigvalsh((H + H.T) / 2)
    assert float(found.top.lower) <= float(values[values.abs().argmax()]) <= float(found.top.upper)
    assert float(found.top.upper - found.top.lower) < 1e-3 * float(values.abs().max())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"products": 60, "level": "layer"}, "products are those with a whole network.*level 'layer'"),
        ({"products": 3, "level": "network"}, "products=3 is too few .*give 10 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(options, sentence):
    model, loss_fn, batch = network("plain", 0)
    with pytest.raises(ConfigError, match=sentence):
        hesscond.probe(model, loss_fn, batch, **options)


def test_vectors_that_do_not_fit_are_refused_before_the_model_runs():
    model = Net(lambda m, x: pytest.fail("it was run"), inner=nn.Linear(1000, 1000))
    batch = torch.randn(2, 1000), torch.randn(2, 1000)
    with pytest.raises(CaptureError) as error:
        hesscond.probe(model, nn.MSELoss(), batch, level="network", dtype=None, products=60, memory=3e7)
    sentence = str(error.value)
    assert "60 products with the Hessian of 1,001,000 parameters" in sentence
    assert "more than memory=30 MB: raise it" in sentence


def test_both_ends_that_do_not_fit_are_refused_with_a_way_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 150), nn.Tanh(), nn.Linear(150, 10))
    batch = torch.randn(8, 100), torch.randint(0, 10, (8,))
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, level="network", memory=4e6)["network"]
    with pytest.raises(CaptureError, match=r"do not fit into the memory.*products=60 asks for"):
        _ = found.kappa


def peak_bytes(code):
    """What a fresh process takes at most beyond what it held before the last line of a script."""
    *before, last = code.strip().splitlines()
    script = "\n".join(
        [
            "import torch, hesscond",
            "from torch import nn",
            "torch.set_num_threads(1)",
            "def status(kind):",
            "    lines = open('/proc/self/status').read().splitlines()",
            "    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])",
            *before,
            "open('/proc/self/clear_refs', 'w').write('5')",
            "held = status('VmRSS')",
            last,
            "print(status('VmHWM') - held)",
        ]
    )
    # what is given back leaves the process
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    return int(done.stdout)


VOCABULARY = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 50_000))
batch = torch.randn(32, 16), torch.randint(0, 50_000, (32,))
loss_fn = nn.CrossEntropyLoss()
nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
model.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from Linux's /proc")
def test_a_vocabulary_of_50_000_is_not_materialized():
    # (diag(p) − ppᵀ) of one word takes 20 GB, and its factor for 32 of them as much as 640
    arguments = "['0']", "['0'], 'layer'", "level='network', products=12"
    kappas = (
        f"[own.kappa for own in hesscond.probe(model, loss_fn, batch, {own}, dtype=None).values()]" for own in arguments
    )
    peak = peak_bytes(VOCABULARY + f"found = [{', '.join(kappas)}]")
    assert peak < 1.5e9


TABLE = """
torch.manual_seed(0)
wide = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU()
model = nn.Sequential(nn.Embedding(100_000, 64), *wide, nn.Linear(64, 10))
batch = torch.randint(0, 100_000, (128,)), torch.randint(0, 10, (128,))
memory = 20e6
# what is imported when it is first used, by a small network
small = nn.Sequential(*wide, nn.Linear(64, 10)), nn.CrossEntropyLoss(), (torch.randn(128, 64), batch[1])
found = hesscond.probe(*small, ["0"], "layer", memory=memory)["0"].kappa
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from Linux's /proc")
def test_memory_is_kept_beyond_one_copy_of_the_model():
    memory, copy = 20e6, 8 * 6_433_738
    last = "found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, ['1'], 'layer', memory=memory)['1'].kappa"
    assert peak_bytes(TABLE + last) < 1.2 * memory + copy

"""The memory budget: another route where only that fits, an error that says what would, and what is really used."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import CaptureError
from hesscond.methods import WeightNormalization


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).double()
    return model, nn.CrossEntropyLoss(), (torch.randn(12, 4, 4, 4).double(), torch.randint(0, 5, (12,)))


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_little_memory_changes_the_route_and_not_the_hessian(level):
    model, loss_fn, batch = convolutions()
    plenty = hesscond.probe(model, loss_fn, batch, ["0"], level)["0"]
    little = hesscond.probe(model, loss_fn, batch, ["0"], level, memory=2e5 if level == "unit" else 1e6)["0"]
    assert plenty.route == "double backward"
    assert little.route == "double backward in the parameters"
    unit = {"unit": 2} if level == "unit" else {}
    truth = plenty.hessian(**unit)
    assert (little.hessian(**unit) - truth).norm() <= 1e-12 * truth.norm()


def test_vectorized_passes_in_small_chunks_give_the_same():
    model, loss_fn, (x, y) = convolutions()
    whole = hesscond.probe(model, loss_fn, (x, y), ["5"], "layer", memory=1e9)["5"]
    chunked = hesscond.probe(model, loss_fn, (x, y), ["5"], "layer", memory=5e5)["5"]
    assert float(chunked.kappa) == pytest.approx(float(whole.kappa), rel=1e-10)


def test_what_would_fit_fits():
    model, loss_fn, (x, y) = convolutions()
    with pytest.raises(CaptureError, match=r"'0' takes .* at most (\d+) of the 12 samples") as caught:
        hesscond.probe(model, loss_fn, (x, y), ["0"], memory=6e4)
    words = str(caught.value).split()
    fitting = int(words[words.index("most") + 1])
    assert 0 < fitting < 12
    result = hesscond.probe(model, loss_fn, (x[:fitting], y[:fitting]), ["0"], memory=6e4)
    assert all(kappa.resolved for kappa in result["0"].kappa)


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_a_matrix_that_does_not_fit_is_not_formed_in_any_coordinates(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    method = WeightNormalization(model)
    batch = torch.randn(30, 60).double(), torch.randint(0, 3, (30,))
    # of the layer: 20 biases, 20 norms and 1200 weights
    memory = {"unit": 20_000, "layer": 8_000_000, "network": 8_000_000}[level]
    layers, units = (None, None) if level == "network" else (["0"], [1] if level == "unit" else None)
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, layers, level, method, units=units, memory=memory)
    own = next(iter(found.values()))
    assert 8 * own.n_params**2 > memory
    with pytest.raises(CaptureError, match="GB allowed: use products with the operator, or raise memory"):
        own.hessian(*(units or ()))


MEASURED = """
import resource, torch, hesscond
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 256, 10)
)
batch = torch.randn(32, 64, 32, 32), torch.randint(0, 10, (32,))
nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kappa = hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["0"], memory=2e9)["0"].kappa
print(all(k.resolved for k in kappa), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_large_convolution_stays_within_two_gigabytes():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    resolved, kilobytes = done.stdout.split()
    assert resolved == "True"
    assert int(kilobytes) * 1024 < 2e9

"""What the script on κ and speed measures is what `hesscond.probe` measures; its statistics are scipy's."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from hesscond import probe
from tests.test_figures import kappa_and_speed as speed

SETUP = speed.Setup("fc-digits", "paper", (4, 3), 200, 60, 5, (0.1,))
LAYERS = ("fc1", "fc2", "fc3")


@pytest.mark.share(2)
@pytest.mark.slow
@pytest.mark.parametrize("text", ["bnp", "adam", "batchnorm:position=post", "weightnorm", "sphere"])
def test_layers_and_network_are_those_of_the_probe(text):
    step = next(step for step in speed.steps(SETUP, text, 0, 0.03) if step.iteration == 4)
    _, _, inputs, targets, loss_fn = speed.task(SETUP)
    rows = [row for row in speed.measure(SETUP, step, LAYERS) if row["data"] == "train"]
    places = [step.method.layer(layer) for layer in LAYERS]
    compared = 0
    for coordinates, method in (("plain", None), ("own", step.method), ("raw", "bnp")):
        for level in ("network", "layer"):
            own = [row for row in rows if (row["coordinates"], row["level"]) == (coordinates, level)]
            if any(row.get("note") for row in own) or not own:
                continue
            named = places if level == "layer" or coordinates == "raw" else None
            found = probe(step.model, loss_fn, (inputs, targets), named, level, method, check=False)
            for row, layer in zip(own, found.values(), strict=True):
                compared += 1
                assert row["lambda_max"] == pytest.approx(layer.kappa.lambda_max, rel=1e-6)
                assert row["trace"] == pytest.approx(float(layer.hessian().trace()), rel=1e-6, abs=1e-9)
                if row["resolved"] and layer.kappa.resolved:
                    assert row["kappa"] == pytest.approx(layer.kappa.value, rel=1e-3)
    assert compared >= 8


@pytest.mark.share(3)
@pytest.mark.parametrize("text", ["bnp", "batchnorm", "adam"])
def test_what_is_measured_does_not_change_the_training(text):
    ends = []
    for looks in (False, True):
        for step in speed.steps(SETUP, text, 0, 0.03):
            if step.iteration == 4:
                ends.append(torch.cat([p.detach().flatten() for p in step.model.parameters()]))
                break
            if looks and step.iteration == 2:
                speed.full_loss(SETUP, step.model)
                assert 0 < speed.decrease(SETUP, step, 1.0) < math.inf
    assert torch.equal(*ends)


def test_the_target_is_crossed_between_evaluations():
    iterations, losses = np.array([0, 10, 20]), np.array([1.0, 0.1, 0.2])
    assert speed.crossing(iterations, losses, 10**-0.5) == pytest.approx(5)
    assert speed.crossing(iterations, losses, 2.0) == 0
    assert math.isinf(speed.crossing(iterations, losses, 0.05))


def test_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    x, y, z = rng.integers(0, 9, (3, 20)).astype(float)
    assert speed.ranked(x) @ speed.ranked(y) == pytest.approx(spearmanr(x, y).statistic)
    # the correlation of what is left of both ranks when a line in the third is taken off
    left = []
    for part in (x, y):
        ranks, given = speed.ranked(part), speed.ranked(z)
        left.append(ranks - (ranks @ given) * given)
    expected = left[0] @ left[1] / math.sqrt((left[0] @ left[0]) * (left[1] @ left[1]))
    assert speed.partial_correlation(x, y, z) == pytest.approx(expected)


def test_a_rate_that_is_not_always_there_is_not_the_best():
    columns = ["method", "seed", "rate", "target", "iterations", "lowest"]
    counts = {0.1: (50.0, 60.0), 1.0: (20.0, math.inf)}
    rows = [("a", seed, rate, 0, n, 0.1) for rate, own in counts.items() for seed, n in enumerate(own)]
    # one that gets nowhere is taken at its lowest loss
    rows += [("b", seed, rate, 0, math.inf, 1 / rate) for rate in counts for seed in (0, 1)]
    found = speed.pd.DataFrame(rows, columns=columns)
    assert speed.best_rates(found, 0, 1000) == {"a": 0.1, "b": 1.0}


def test_gradient_descent_has_the_rate_of_kappa():
    torch.manual_seed(0)
    inputs, targets = torch.rand(150, 64, dtype=torch.float64), torch.randint(0, 10, (150,))
    loss_fn = torch.nn.CrossEntropyLoss()
    kappa, predicted, seen, *counts = speed.one_known("l2:strength=0.05", inputs, targets, loss_fn, (0.5, 0.01))
    assert predicted == pytest.approx(2 * math.atanh(1 / kappa))
    assert seen == pytest.approx(predicted, rel=0.05)
    assert counts == sorted(counts)

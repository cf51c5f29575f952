"""Tables of `hesscond sweep`: the best rate, κ by level, shares of the possible gain, and the time."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from hesscond.methods import parse
from hesscond.report.sweeps import possible
from hesscond.study import RunPlan, load_data, load_study, open_run
from hesscond.study.runner import build_model, chosen
from hesscond.study.sweep import relative_cost
from tests.cli_targets import STUDY
from tests.truth import network_truth

pytestmark = pytest.mark.slow

#: Whole layers and the network on a fixed batch, at the steps of the run.
WHOLE = """
name = "whole"
description = "for the tests"
[data]
name = "digits"
train_samples = 200
[model]
hidden = [3]
[training]
batch_size = 50
iterations = 6
[schedule]
kind = "linear"
end = 0.5
[probe]
layers = ["fc2"]
levels = ["layer", "network"]
units = [0]
every = 0
train_every_epochs = 0
at = [1, 5]
train_samples = 60
optima = 100
precision = "float64"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    text = STUDY.replace("iterations = 3", "iterations = 12")
    head, probe = text[: text.index("[[learning_rates]]")], text[text.index("[probe]") :]
    (tmp_path / "tiny.toml").write_text(f"{head}{probe}every = 4\ntrain_every_epochs = 0\n")
    (tmp_path / "whole.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_best_rate_around_the_default_is_shown_with_its_kappa_and_time(folder, call_cli):
    result = call_cli(
        "sweep", "tiny.toml", "-m", "vanilla", "-m", "bnp", "--lr", "around", "--seed", "0,3", "--time", "--out", "out",
    )  # fmt: skip
    assert result.code == 0, result.err
    runs, cells = pd.read_csv("out/runs.csv"), pd.read_csv("out/cells.csv")
    for row in pd.read_csv("out/best.csv").to_dict("records"):
        default = parse(row["method"]).rate
        of_method = runs[runs["method"] == row["method"]]
        rates = sorted(of_method["learning_rate"].unique())
        assert rates == pytest.approx([factor * default for factor in (0.1, 0.3, 1, 3, 10)])
        losses = of_method.groupby("learning_rate")["loss"].mean()
        assert row["learning_rate"] == losses.idxmin()
        chosen = of_method[of_method["learning_rate"] == losses.idxmin()]
        probe = pd.concat([open_run(f"out/{name}").table("probe") for name in chosen["run"]])
        assert list(probe["iteration"]) == [0, 4, 8] * 2
        assert sorted(cells.loc[cells["run"].isin(chosen["run"]), "kappa"]) == sorted(probe["kappa"])
        for name in ("kappa", "kappa_own"):
            # the lower of the two in the middle: a median is one of the values
            assert row[f"unit_{name}"] == pytest.approx(sorted(probe[name])[2], rel=1e-12)
        assert (row["unit_kappa_own"] == row["unit_kappa"]) == (row["method"] == "vanilla")
        assert (row["unit_cells"], row["unit_resolved"], row["seeds"], row["diverged"]) == (12, 12, 2, 0)
        assert 0.2 < row["time"] < 20


def trained(study, spec, rate, iteration):
    """The network and the optimizer as they are when a step is about to be taken, by a loop of our own."""
    data = load_data(study.data)
    plan = RunPlan(study, spec, 0, rate, None, torch.device("cpu"))
    model, inputs, targets = build_model(plan, data), data.train_inputs.flatten(1), data.train_targets
    method = parse(spec).create(model)
    method.fit(inputs)
    order = torch.Generator().manual_seed(1)
    optimizer = method.optimizer(rate)
    size = study.training.batch_size
    for k in range(iteration + 1):
        if k % (len(targets) // size) == 0:
            permutation = torch.randperm(len(targets), generator=order)
        part = permutation[k % (len(targets) // size) * size :][:size]
        # the linear schedule, from 1 down to a half over the run
        lr = rate * (1 - 0.5 * k / study.training.iterations)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        method.transform_gradients()
        if k < iteration:
            optimizer.step()
            method.after_step()
    rows = chosen(targets, study.probe.train_samples)
    return model, optimizer, (inputs[rows].double(), targets[rows]), lr


@pytest.mark.parametrize("method", ["vanilla", "rmsprop"])
def test_layers_and_the_network_at_a_step_are_those_of_double_backward(folder, call_cli, method):
    """κ, λ_max and λη/2 with P of the step about to be taken; the optimizer's own state says what P is."""
    result = call_cli("sweep", "whole.toml", "-m", method, "--lr", "0.02", "--out", "out")
    assert result.code == 0, result.err
    cells = pd.read_csv("out/cells.csv")
    assert list(cells["iteration"]) == [1, 1, 5, 5]
    study = load_study("whole.toml")
    for iteration, own in cells.groupby("iteration"):
        model, optimizer, batch, lr = trained(study, method, 0.02, iteration)
        assert own["lr"].tolist() == pytest.approx([lr, lr], rel=1e-6)
        if method == "rmsprop":
            # torch's own state before the step, with the gradient of the step: v ← 0.99 v + 0.01 g²
            squares = []
            for p in model.parameters():
                seen = optimizer.state[p]["square_avg"] if iteration else torch.zeros_like(p)
                squares.append(1 / ((0.99 * seen + 0.01 * p.grad.square()).double().sqrt() + 1e-8).flatten())
            P = torch.cat(squares).sqrt()
        else:
            P = torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        H = network_truth(model.double(), nn.functional.cross_entropy, batch)
        # its weight and bias are the last parameters
        fc2 = torch.arange(len(P))[-sum(p.numel() for p in model.fc2.parameters()) :]
        for row, index in zip(own.to_dict("records"), [fc2, torch.arange(len(P))], strict=True):
            part = H[index][:, index].numpy()
            scaled = P[index].numpy()[:, None] * part * P[index].numpy()
            for name, matrix in (("lambda_max", part), ("lambda_max_own", scaled)):
                assert row[name] == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-5)
            assert row["sharpness"] == pytest.approx(np.linalg.norm(scaled, 2) * lr / 2, rel=1e-5)
            for name, matrix in (("kappa", part), ("kappa_own", scaled)):
                values = np.sort(np.abs(np.linalg.eigvalsh(matrix)))[::-1]
                rank = row["rank"] if name == "kappa" else row["rank_own"]
                assert row[f"{name}_lower"] <= values[0] / values[int(rank) - 1] * (1 + 1e-4)
                if math.isfinite(row[name]):
                    assert row[name] == pytest.approx(values[0] / values[int(rank) - 1], rel=1e-3)
        assert own["resolved"].iloc[0]
        if method == "vanilla":
            probe = (
                open_run(f"out/{own['run'].iloc[0]}")
                .table("probe")
                .query(f"iteration == {iteration} and layer == 'fc2'")
            )
            check_optima(probe.iloc[0], H[fc2][:, fc2].numpy())


def kappa_of(H, rank):
    """λ_max over the smallest of so many eigenvalues."""
    values = np.linalg.eigvalsh(H)[::-1]
    return values[0] / values[rank - 1]


def check_optima(row, H):
    """No diagonal and no Kronecker scaling beats the lower bounds, and good ones of our own are near what was found.

    Parameters come as the weight (10, 3) by rows, then the bias (10,).
    """
    rank, generator = int(row["rank"]), np.random.default_rng(0)
    scaled = [kappa_of(H, rank)]
    d = np.diag(H) ** -0.5
    for _ in range(300):
        trial = d * np.exp(0.05 * generator.standard_normal(len(d)))
        found = kappa_of(trial[:, None] * H * trial, rank)
        if found < min(scaled):
            d = trial
        scaled.append(found)
    assert row["kappa_diagonal_lower"] <= min(scaled)
    assert row["kappa_diagonal_upper"] <= min(scaled) * (1 + 1e-6)
    by_unit = np.concatenate([np.arange(30).reshape(10, 3), 30 + np.arange(10)[:, None]], axis=1)
    K = H[np.ix_(by_unit.ravel(), by_unit.ravel())].reshape(10, 4, 10, 4)
    # K-FAC's factors of the Hessian itself: its partial traces; the units' sum is null, so that L is a pseudo-inverse
    left, right = np.einsum("iaja->ij", K), np.einsum("iaib->ab", K)
    values, Q = np.linalg.eigh(left)
    L = Q * np.where(values > 1e-9 * values[-1], np.abs(values) ** -0.5, 0.0)
    R = np.linalg.inv(np.linalg.cholesky(right)).T
    P = np.kron(L, R)
    kron = kappa_of(P.T @ K.reshape(40, 40) @ P, rank)
    assert 1 <= row["kappa_kronecker_lower"] <= row["kappa_kronecker_upper"] * (1 + 1e-9)
    assert row["kappa_kronecker_lower"] <= kron
    assert row["kappa_kronecker_upper"] <= kron * (1 + 1e-6)
    # a diagonal of each side is a pair too
    assert row["kappa_kronecker_upper"] <= row["kappa"]


def test_the_share_of_the_possible_gain_lies_where_the_bounds_say():
    """log κ falls by 4 decades of the 6 that are possible at least, and of 8 at most."""
    row = {"kappa": 1e9, "kappa_own": 1e5, "kappa_diagonal_lower": 1e1, "kappa_diagonal_upper": 1e3}
    assert possible(row, "diagonal") == pytest.approx((4 / 8, 4 / 6))
    worse = row | {"kappa_own": 1e11}
    assert possible(worse, "diagonal") == pytest.approx((-2 / 6, -2 / 8))
    assert possible(row | {"kappa_diagonal_upper": 1e10}, "diagonal") == (pytest.approx(0.5), math.inf)
    for unknown in (
        {"rank": 3, "rank_own": 4},
        {"kappa": math.inf},
        {"kappa_own": math.inf},
        {"kappa_diagonal_upper": math.inf},
    ):
        assert all(math.isnan(end) for end in possible(row | unknown, "diagonal"))


@pytest.mark.share(2)
@pytest.mark.parametrize("method", ["bnp", "kfac", "muon", "batchnorm", "adahessian"])
def test_measuring_at_a_step_changes_nothing(folder, call_cli, method):
    """The probed run comes to the losses of the same run without probes, bit for bit."""
    for out, options in (("probed", ()), ("plain", ("--probe-every", "0"))):
        result = call_cli("sweep", "whole.toml", "-m", method, "--lr", "0.01", "--out", out, *options)
        assert result.code == 0, result.err
    probed, plain = (open_run(f"{out}/{method}-b50-lr0.01-seed0") for out in ("probed", "plain"))
    assert probed.table("training")["loss"].tolist() == plain.table("training")["loss"].tolist()
    assert probed.table("evaluation").equals(plain.table("evaluation"))
    assert len(probed.table("probe")) == 4
    assert plain.table("probe").empty


def test_what_diverges_while_it_is_timed_has_no_time(folder):
    """With the batches in their order, and not those of the run that did not diverge at that rate."""
    study = load_study(str(folder / "tiny.toml"))
    data = load_data(study.data)
    far, near = (RunPlan(study, "vanilla", 0, rate, folder / "out", torch.device("cpu")) for rate in (1e30, 0.1))
    assert math.isnan(relative_cost(far, data))
    assert 0.1 < relative_cost(near, data) < 10


def test_no_time_is_that_of_coming_second(folder, monkeypatch):
    """What comes second finds the data in the cache; the first round counts for nothing."""
    calls = []

    def block_time(training, first, ahead):
        calls.append((id(training), first, ahead))
        return 1e6 if len(calls) <= 2 else 1.0 + len(calls) % 2

    monkeypatch.setattr("hesscond.study.sweep.block_time", block_time)
    study = load_study(str(folder / "tiny.toml"))
    plan = RunPlan(study, "bnp", 0, 0.1, folder / "out", torch.device("cpu"))
    assert relative_cost(plan, load_data(study.data)) == 1.0
    assert len({(which, ahead) for which, _, ahead in calls}) == 2


def test_a_method_that_diverges_everywhere_says_so(folder, call_cli):
    result = call_cli("sweep", "tiny.toml", "-m", "vanilla", "--lr", "1e30", "--out", "out")
    assert result.code == 1
    assert "diverged: the loss" in result.err
    assert " none  1 (1 diverged) " in result.out
    assert " · 1 run\n" in result.out
    assert pd.read_csv("out/best.csv")["learning_rate"].isna().all()

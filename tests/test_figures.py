"""The counts in tables of figures/, counted by hand; tables of pages are those of their files."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from hesscond.errors import ConfigError
from hesscond.hessians import HessianOperator
from hesscond.models import build

FOLDER = Path(__file__).parents[1] / "figures"


def script(file, name=None):
    """A module of figures/, which is no package, known as ``name``."""
    name = name or file
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


preconditioners, results, gain = map(script, ("preconditioners", "results", "gain"))
# not in the place of the library
transformers = script("transformers", "figures_transformers")
kappa_and_speed, forecast = script("kappa_and_speed"), script("forecast")
# the second imports the first
script("small_comparisons")
side_by_side = script("side_by_side")


def cell(method, seed, level, kappa, top, own=None):
    """A row of the table of cells; ``own`` NaN: unresolved above 7."""
    own = kappa if own is None else own
    known = not math.isnan(own)
    return {
        **{"network": "net", "method": method, "seed": seed, "iteration": 100, "level": level, "layer": level},
        **{"kappa": kappa, "kappa_lower": kappa, "kappa_upper": kappa, "resolved": True, "rank": 3},
        **{"kappa_own": own if known else math.inf, "kappa_own_lower": own if known else 7.0},
        **{"kappa_own_upper": own if known else math.inf, "resolved_own": known, "rank_own": 3 if seed else 2},
        **{"lambda_max": top, "lambda_max_own": 2 * top, "sharpness": top / 10},
    }


LOSSES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0, "kfac:update_every=100": 6.0}


@pytest.fixture
def compared():
    """Six methods, whose κ grows with the loss but for one that is unresolved, and whose sharpness falls."""
    rows = []
    for rank, method in enumerate(LOSSES, 1):
        for seed in (0, 1, 2):
            own = math.nan if method == "e" and seed else 100.0 * rank + seed
            rows += [cell(method, seed, "layer", 10.0**rank, 70.0 - 10 * rank, own)]
            rows += [cell(method, seed, "network", 20.0**rank, 3 * (70.0 - 10 * rank))]
    table = pd.DataFrame({"network": "net", "method": list(LOSSES), "loss": list(LOSSES.values())})
    return table, pd.DataFrame(rows)


def test_what_ranks_methods_is_a_median_that_is_known(compared):
    own = preconditioners.predicted("net", "κ own, layers", *compared)
    # of e two of three κ are unresolved, and so is the median
    assert own["value"].to_dict() == {m: 100.0 * k + 1 for k, m in enumerate(LOSSES, 1) if m != "e"}
    assert own["loss"].to_dict() == {m: loss for m, loss in LOSSES.items() if m != "e"}
    sharp = preconditioners.predicted("net", "λη/2, network", *compared)
    assert sharp["value"].to_dict() == pytest.approx({m: 0.3 * (70 - 10 * k) for k, m in enumerate(LOSSES, 1)})
    found = preconditioners.rankings(*compared).set_index("quantity")
    assert found["methods"].tolist() == [5, 6, 6, 6]
    assert found["rho"].tolist() == pytest.approx([1, 1, 1, -1])
    assert found["low"].iloc[0] == pytest.approx(1)


def test_coupling_and_what_is_resolved_are_counted(compared):
    cells = compared[1].assign(network="cnn-digits")
    assert preconditioners.coupling(cells).values[:, 1:].tolist() == [["plain", 3, 3, 3], ["own", 3, 3, 3]]
    plain, own, whole, _ = preconditioners.resolved(cells).values[:, 2:].tolist()
    assert (plain, own, whole) == ([18, 18, 6, 6], [18, 16, 6, 5], [18, 18, 6, 6])


def test_the_file_of_preconditioners_has_what_is_known_of_a_method(compared):
    row = {"network": "net", "method": "e", "refusal": math.nan, "learning_rate": 0.1, "at_edge": True, "time": 2.0}
    row |= {"loss": 5, "loss_min": 4, "loss_max": 6, "diverged": 1, "share_diagonal_lower": 0.1}
    found = preconditioners.row_of(row | {"share_diagonal_upper": 0.2}, compared[1])
    assert (found["kappa_layers_half"], found["kappa_layers_half_own"]) == ("1.0e+05", "≥ 7.0e+00")
    assert (found["kappa_layers_end"], found["sharpness_half"], found["sharpness_end"]) == ("", "6", "nan")
    assert (found["share_diagonal"], found["share_kronecker"]) == ("0.10 … 0.20", "")


@pytest.mark.slow
def test_every_table_of_a_page_is_that_of_its_file():
    pages = {path: path.read_text(encoding="utf-8") for path in results.DOCS.rglob("*.md")}
    marks = [mark[2] for page in pages.values() for mark in results.MARK.finditer(page)]
    assert sorted(marks) == sorted(results.TABLES)
    for path, page in pages.items():
        assert results.filled(page) == page, f"python figures/results.py writes other numbers into {path}"
    assert {path.stem for path in results.RESULTS.glob("*.csv")} == {"machines", *results.read("machines")["file"]}


@pytest.mark.parametrize("study", results.STUDIES)
def test_tables_at_a_small_size_are_those_of_the_papers_studies(study):
    layout, frame = results.small(study), results.all_runs()
    for panel in layout.panels:
        names = results.methods_of(layout, panel)
        claims = [claim for claim in layout.claims if panel.name in claim.of_panels]
        assert {name for claim in claims for one in claim.comparisons for name in one.names} <= set(names)
        rows = frame[(frame["study"] == study) & (frame["panel"] == panel.name)]
        assert set(rows["method"]) == set(names)
        assert not rows.duplicated(["method", "seed"]).any()
        whole = rows[rows["status"] == "finished"]
        assert whole["batch_size"].nunique() == whole["iterations"].nunique() == 1
    assert results.paper_of("cwo-table-1", "cnn9-cifar10", "GN") == "6.45"
    assert results.paper_of("wc-table-2", "cifar10", "BN+E") == "79.96"


class Run:
    """A run of two probes on mini-batches, one with an unresolved κ, and of 40 iterations."""

    config: ClassVar = {"data": {"standardize": True}}
    legend, seed = "BNP", 3

    def table(self, name):
        rows = {
            "probe": {
                "data": ["batch"] * 4,
                "kappa": [800.0, 50.0, 600.0, math.inf],
                "kappa_preconditioned": [8.0, 10.0, 3.0, 2.0],
                "kappa_D": [100.0, 10.0, 20.0, 2e5],
            },
            "evaluation": {"epoch": [0, 1, 2], "test_accuracy": [0.1, 0.3, 0.5]},
            "training": {"loss": [float(k) for k in range(40)]},
        }
        return pd.DataFrame(rows[name])


def test_the_gain_of_a_run_is_counted_by_hand():
    (row,) = gain.rows_of(Run(), pd.Series({"BNP": 0.5}))
    assert (row["inputs"], row["method"], row["seed"], row["data"]) == ("standardized", "BNP", 3, "batch")
    assert (row["probes"], row["resolved"], row["below"], row["inside"], row["above"]) == (4, 3, 50.0, 25.0, 25.0)
    assert (row["kappa_D"], row["kappa_D_least"], row["kappa_D_most"]) == (60.0, 10.0, 2e5)
    # gains 100, 5, 200 and κ(D)² 10⁴, 100, 400: short by 100, 20, 2
    assert (row["gain"], row["short"], row["short_least"], row["short_most"]) == (100.0, 20.0, 2.0, 100.0)
    # an epoch has twenty iterations
    columns = ["correlation", "mean_accuracy", "accuracy", "loss", "loss_at_equal_time"]
    assert [row[name] for name in columns] == [0.5, 40.0, 50.0, 29.5, 9.5]


@pytest.mark.parametrize("steps", [1, 7])
def test_the_forecast_is_what_gradient_descent_does_on_a_quadratic(steps):
    rate, values, g = 0.9, np.array([3.0, 0.5, 1e-3, -0.2]), np.array([0.3, -1.0, 0.7, 2.0])
    before = after = g / values
    for _ in range(steps):
        after = after - rate * values * after
    drop = float(values @ (before**2 - after**2)) / 2
    assert forecast.decrease(values, g**2, rate, steps) == pytest.approx(drop, rel=1e-9)
    # of a linear function, and without overshooting and negative curvature
    assert forecast.decrease(np.zeros(1), np.ones(1), rate, steps) == pytest.approx(rate * steps)
    stable = [forecast.decrease(values[k : k + 1], np.ones(1), rate, steps, stable=True) for k in (0, 3)]
    assert stable == pytest.approx([0.0, rate * steps])


def test_rank_correlations_are_scipys():
    pairs = np.random.default_rng(0).integers(4, size=(5, 2, 9))
    truth = [spearmanr(*pair).statistic for pair in pairs]
    assert results.rank_correlations(pairs[:, 0], pairs[:, 1]) == pytest.approx(truth)


def test_the_share_of_a_hessian_on_the_diagonal_of_its_blocks_is_that_of_the_matrix():
    """The parts of a GPT that the page names, a head without a bias among them."""
    torch.manual_seed(0)
    sizes = {"input_shape": (5,), "outputs": 7, "width": 8, "depth": 1, "heads": 2}
    model = build("gpt", generator=torch.Generator().manual_seed(0), **sizes)
    batch = torch.randint(0, 7, (2, 5)), torch.randint(0, 7, (2, 5))
    loss_fn = transformers.LOSSES["cross_entropy"]()
    found = transformers.structure(model, batch, loss_fn).set_index("of")
    for name, parts in {"fc": ["weight"], "block1.fc1": ["weight", "bias"]}.items():
        operator = HessianOperator(model, loss_fn, batch, layers=[name])
        H, places = operator.to_dense(), operator.unflatten(torch.arange(operator.order))
        count = len(model.get_submodule(name).weight)
        rows = torch.cat([places[f"{name}.{part}"].reshape(count, -1) for part in parts], 1)
        share = float(sum(H[row][:, row].square().sum() for row in rows) / H.square().sum())
        assert abs(found.loc[name, "share"] - share) <= 5 * found.loc[name, "error"] + 1e-9


def some_images(cifar10):
    """A hundred images of the training set and a hundred of the test set."""
    parts = ("train_inputs", "test_inputs", "train_targets", "test_targets")
    return replace(cifar10, **{name: getattr(cifar10, name)[:100] for name in parts})


TWO, ONE = "bnp-figure-5/batch-2", "bnp-figure-4/fc-batch-1-standardized"


@pytest.mark.parametrize(
    ("panel", "method"),
    [(TWO, method) for method in ("vanilla", "BN", "BRN", "4 Things", "BNP")]
    + [(ONE, method) for method in ("vanilla", "LN", "BNP")],
)
def test_seeds_side_by_side_take_the_steps_of_their_runs(panel, method, cifar10, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    data, before = some_images(cifar10), torch.get_default_dtype()
    data = replace(data, train_inputs=data.train_inputs.double(), test_inputs=data.test_inputs.double())
    # normalization over two samples amplifies rounding a hundredfold with every iteration
    iterations, bound = (2, 1e-8) if method in ("BN", "BRN") else (12, 1e-12)
    torch.set_default_dtype(torch.float64)
    try:
        joint = side_by_side.SideBySide(side_by_side.plans_of(panel, method, [1, 3]), data)
        found = side_by_side.differences(joint, iterations)
    finally:
        torch.set_default_dtype(before)
    for losses, test_loss in found:
        assert max(*losses, test_loss) < bound


def test_seeds_side_by_side_go_on_where_they_were_broken_off(cifar10, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    data, plans = some_images(cifar10), side_by_side.plans_of(TWO, "BRN", [1, 3])
    whole, first, rest = (side_by_side.SideBySide(plans, data) for _ in range(3))
    for joint in (whole, first):
        for _ in range(60):
            joint.step()
    first.save(tmp_path / "kept")
    rest.load(tmp_path / "kept")
    for joint in (whole, rest):
        # into the next epoch
        for _ in range(45):
            joint.step()
    assert torch.equal(whole.losses, rest.losses)
    with pytest.raises(ConfigError, match="holds BRN seed 1, BRN seed 3"):
        side_by_side.SideBySide(plans[:1], data).load(tmp_path / "kept")

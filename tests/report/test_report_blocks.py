"""Blocks by type and depth: every number of figures and tables is that of the exported probes, recomputed here."""

import csv
import math
import re

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from typer.testing import CliRunner

from hesscond.cli import app
from hesscond.errors import ConfigError
from hesscond.hessians.roles import role_of
from hesscond.report import FIGURES
from hesscond.report.layers import heat_cells
from hesscond.report.registry import QUANTITIES
from hesscond.runs import open_run
from hesscond.study import load_data, load_study, run
from hesscond.study.grid import Overrides, plan_runs
from tests import report_page

LAYERS = ["patches", *(f"block{i}.{part}" for i in (1, 2) for part in ("attention.q", "attention.out", "fc1")), "fc"]
KIND = {"patches": "embedding", "attention.q": "query", "attention.out": "attention output", "fc1": "mlp in"}


#: Names in models of ours, of Hugging Face, torch, torchvision and timm, by what they are; a block has a number.
NAMES = {
    "embedding": "patches transformer.wte model.embed_tokens vit.embeddings.patch_embeddings.projection "
    "patch_embed.proj",
    "position": "positions transformer.wpe.weight bert.embeddings.position_embeddings",
    "class token": "class_token vit.embeddings.cls_token",
    "query": "transformer.h.0.attn.c_attn[q.0] layers.1.self_attn.q_proj.lora_A.default.weight",
    "key": "block3.attention.k transformer.h.0.attn.c_attn.weight[k]",
    "value": "model.layers.2.self_attn.v_proj vit.encoder.layer.1.attention.attention.value attn[v] "
    "layers.4.self_attn.in_proj_weight[v.1]",
    "query, key, value": "transformer.h.0.attn.c_attn layers.4.self_attn.in_proj_weight",
    "attention output": "transformer.h.0.attn.c_proj bert.encoder.layer.5.attention.output.dense",
    "mlp in": "transformer.h.7.mlp.c_fc bert.encoder.layer.5.intermediate.dense encoder.layers.encoder_layer_3.mlp.0",
    "mlp gate": "model.layers.2.mlp.gate_proj",
    "mlp out": "blocks.1.mlp.2 bert.encoder.layer.5.output.dense",
    "norm": "block3.norm2 norm blocks.11.norm1.weight transformer.h.0.ln_1 model.layers.2.input_layernorm",
    "head": "fc classifier",
    "bias": "h.0.mlp.2.bias",
    "recurrent": "lstm[f] lstm.bias_ih_l0",
    "fc3": "fc3",
    "model": "model",
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_say_the_kind_and_the_depth(kind):
    for name in NAMES[kind].split():
        number = re.search(r"\d+", name) if kind not in ("fc3", "recurrent") else None
        assert role_of(name) == (kind, number and int(number[0])), name


# --- runs of a small vision transformer -------------------------------------------------------------------------------

STUDY = f"""
name = "vit-small"
description = "a small vision transformer on digits"
[data]
name = "digits"
train_samples = 100
test_samples = 20
[model]
name = "vit-s16"
patch = 4
width = 6
depth = 2
heads = 2
hidden = 8
[training]
batch_size = 16
iterations = 11
[[learning_rates]]
batch_size = 16
rate = {{ vanilla = 0.3 }}
[probe]
layers = {str(LAYERS).replace("'", '"')}
units = [0, 3]
every = 5
precision = "float64"
train_every_epochs = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds, trained and probed."""
    folder = tmp_path_factory.mktemp("vit")
    (folder / "vit.toml").write_text(STUDY, encoding="utf-8")
    study = load_study(folder / "vit.toml")
    data = load_data(study.data)
    for plan in plan_runs(study, ["vanilla"], [0, 1], folder / "runs", torch.device("cpu"), Overrides()):
        run(plan, data)
    return folder / "runs"


@pytest.fixture(scope="module")
def runs(folder):
    return [open_run(folder / f"vanilla-seed{seed}") for seed in (0, 1)]


def exported(folder):
    """The probes of both seeds as the command exports them, with kind and depth by rules of our own."""
    found = []
    for seed in (0, 1):
        out = CliRunner().invoke(
            app, ["export", str(folder / f"vanilla-seed{seed}"), "--table", "probe", "--format", "csv"]
        )
        for row in csv.DictReader(out.stdout.splitlines()):
            layer = row["layer"]
            depth = int(layer[5]) if layer.startswith("block") else None
            kind = KIND.get(layer.partition(".")[2] if depth else layer, "head")
            found.append(row | {"seed": seed, "kind": kind, "depth": depth})
    return found


def ends_of(row, quantity):
    """Between what a quantity of an exported row lies."""
    rank, order, resolved = int(row["rank"]), int(row["n_params"]), row["resolved"] == "True"
    rest = 0 if resolved else order - rank
    if quantity == "rank":
        return rank / order, (rank + rest) / order
    if quantity == "negative":
        if row["negative"] == "":
            return 0.0, (rank + rest) / order
        return int(row["negative"]) / order, (int(row["negative"]) + rest) / order
    if rank == 0:
        return None
    if quantity == "trace":
        return (float(row["trace"]) / order,) * 2
    if quantity == "lambda_max":
        return float(row["lambda_max"]), float(row["lambda_max"])
    if quantity == "lambda_min":
        return (float(row["lambda_min"]) if resolved else 0.0), float(row["lambda_min"])
    return (float(row["kappa"]),) * 2 if resolved else (max(1.0, float(row["kappa_lower"])), math.inf)


def quantile_of(rows, quantity, q):
    """The ends of a quantile, which is one of the values."""
    ends = [found for row in rows if (found := ends_of(row, quantity)) is not None]
    place = math.ceil(q * len(ends)) - 1
    return sorted(low for low, _ in ends)[place], sorted(high for _, high in ends)[place]


@pytest.mark.share(3)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_cells_are_the_medians_of_the_exported_probes(folder, runs, quantity):
    rows = exported(folder)
    pictures, names, iterations = heat_cells(runs, by="kind", quantity=quantity)
    kinds = [("embedding", None), *((k, d) for k in ("query", "attention output", "mlp in") for d in (1, 2))]
    assert names == [*kinds, ("head", None)]
    assert iterations.tolist() == [0, 5, 10]
    figure = FIGURES["blocks"].draw(runs, quantity=quantity)
    (mesh,) = [a for a in figure.findobj() if a.get_gid() == "vanilla-cells"]
    colours = mesh.get_array().filled(np.nan).reshape(len(names), len(iterations))
    hatched = 0
    for place, (kind, depth) in enumerate(names):
        for column, iteration in enumerate(iterations):
            own = [row for row in rows if (row["kind"], row["depth"]) == (kind, depth)]
            own = [row for row in own if int(row["iteration"]) == iteration]
            assert len(own) == 4
            low, high = quantile_of(own, quantity, 0.5)
            assert (pictures["vanilla"][0][place, column], pictures["vanilla"][1][place, column]) == (low, high)
            shown = high if quantity == "lambda_min" else low
            expected = shown if quantity in ("rank", "negative") else np.log10(abs(shown)) if shown else np.nan
            assert colours[place, column] == pytest.approx(expected, rel=1e-12, nan_ok=True)
            hatched += low < high
    boxes = [a for a in figure.findobj() if a.get_gid() == "vanilla-unresolved"]
    assert sum(len(box.get_paths()) for box in boxes) == hatched
    said = [text.get_text() for text in figure.findobj(Text)]
    assert any("unresolved" in text for text in said) == (hatched > 0)


@pytest.mark.share(3)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_bands_are_the_quartiles_of_the_exported_probes(folder, runs, quantity):
    rows = exported(folder)
    figure = FIGURES["block-bands"].draw(runs, quantity=quantity)
    found = report_page.artists(figure)
    for kind in {row["kind"] for row in rows}:
        at = [[row for row in rows if row["kind"] == kind and int(row["iteration"]) == k] for k in (0, 5, 10)]
        medians = [quantile_of(own, quantity, 0.5) for own in at]
        line = found[f"vanilla-{kind}-median"].get_ydata()
        np.testing.assert_array_equal(line, [low if low == high else np.nan for low, high in medians])
        bounds = [high if quantity == "lambda_min" else low for low, high in medians if low < high]
        np.testing.assert_array_equal(found[f"vanilla-{kind}-unresolved"].get_ydata(), bounds)
        heights = found[f"vanilla-{kind}-band"].get_paths()[0].vertices[:, 1]
        bottom, top = figure.axes[0].get_ylim()
        for own in at:
            (low, _), (_, high) = (quantile_of(own, quantity, q) for q in (0.25, 0.75))
            assert min(high, top) in heights if math.isinf(high) else high in heights
            assert (low if low > 0 or quantity in ("rank", "negative") else bottom) in heights
            # a negative trace is below the axis
            assert bottom <= max(low, bottom) <= min(high, top) <= top or high <= 0


# --- made-up runs -----------------------------------------------------------------------------------------------------


def logged(folder, rows):
    """A run with these probes."""
    return report_page.logged(folder, "vanilla", probes=rows)


def row(layer, kappa=100.0, **facts):
    """A row of the probe table; unresolved where κ is infinite."""
    known = {"iteration": 0, "epoch": 0, "data": "batch", "unit": 0, "n_params": 10, "rank": 10, "nullity": 0}
    known |= {"negative": 0, "lambda_max": 1.0, "lambda_min": 1 / min(kappa, 1e6), "resolved": int(kappa < math.inf)}
    return known | {"layer": layer, "kappa": kappa, "kappa_lower": min(kappa, 1e6), "kappa_upper": kappa} | facts


def test_an_unresolved_majority_is_a_bound_and_never_a_number(tmp_path):
    lost = {"rank": 4, "nullity": 6, "lambda_min": 1e-5, "negative": 3}
    units = [row("h.0.mlp.c_fc", math.inf, unit=unit, **lost) for unit in (0, 1)]
    run = logged(tmp_path / "run", [*units, row("h.0.mlp.c_fc", 50.0, unit=2), row("h.0.ln_1", 7.0)])
    figure = FIGURES["block-bands"].draw([run])
    found = report_page.artists(figure)
    assert np.isnan(found["vanilla-mlp in-median"].get_ydata()).all()
    assert found["vanilla-mlp in-unresolved"].get_ydata().tolist() == [1e6]
    assert found["vanilla-mlp in-unresolved"].get_marker() == "^"
    down = FIGURES["block-bands"].draw([run], quantity="lambda_min")
    assert {a.get_marker() for a in down.findobj() if a.get_gid() == "vanilla-mlp in-unresolved"} == {"v"}


def test_zero_blocks_and_uncounted_negatives(tmp_path):
    zero = {"rank": 0, "nullity": 10, "lambda_max": 0.0, "lambda_min": 0.0, "kappa_lower": 1.0}
    rows = [row("h.0.ln_1", math.inf, **zero), row("h.1.ln_1", 9.0, negative=None), row("lm_head", 4.0, unit=None)]
    run = logged(tmp_path / "run", rows)
    pictures, names, _ = heat_cells([run], by="kind", quantity="kappa")
    assert names == [("norm", 0), ("norm", 1), ("head", None)]
    assert np.isnan(pictures["vanilla"][0][0, 0])
    assert pictures["vanilla"][0][1:, 0].tolist() == [9.0, 4.0]
    pictures, _, _ = heat_cells([run], by="kind", quantity="negative")
    assert pictures["vanilla"][0][:, 0].tolist() == [0.0, 0.0, 0.0]
    assert pictures["vanilla"][1][:, 0].tolist() == [0.0, 1.0, 0.0]
    for kind in ("blocks", "block-bands"):
        assert FIGURES[kind].draw([run]).axes


def test_a_row_measured_again_after_a_resume_counts_once(tmp_path):
    rows = [row("fc1", 2.0), row("fc1", 8.0, unit=1), row("fc2", 5.0)]
    once, twice = (logged(tmp_path / name, rows * count) for name, count in (("once", 1), ("twice", 2)))
    cells = [heat_cells([run], by="kind", quantity="kappa")[0]["vanilla"][0] for run in (once, twice)]
    np.testing.assert_array_equal(*cells)


def test_one_layer_alone_is_no_comparison(tmp_path):
    run = logged(tmp_path / "run", [row("fc3"), row("fc3", unit=1)])
    for kind in (FIGURES["blocks"], FIGURES["block-bands"]):
        with pytest.raises(ConfigError, match="only one layer was probed"):
            kind.draw([run])

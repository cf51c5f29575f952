"""Studies that probe blocks of any parameters, by unit and as a whole, against double backward through the model."""

import sqlite3
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
import torch

from hesscond.data import load
from hesscond.data.preparation import chosen
from hesscond.errors import ConfigError
from hesscond.hessians.catalogue import Catalogue
from hesscond.report.layers import heat_cells
from hesscond.report.selection import select
from hesscond.study import RunPlan, StudyConfig, load_data, open_run, run
from hesscond.study.runner import build_model
from hesscond.study.structure import check_structure, probed_blocks
from tests.catalogue.parts import by_token
from tests.runs.run_logs import broken_off
from tests.truth import double_backward

pytestmark = pytest.mark.slow

GPT = {
    "name": "blocks",
    "description": "of a small transformer",
    "data": {"name": "text", "context": 4},
    "model": {"name": "gpt", "width": 4, "depth": 1, "heads": 2},
    "training": {"batch_size": 4, "iterations": 3, "checkpoint_seconds": 0.0},
    "probe": {
        "layers": ["block1.attention.q", "block1.norm1", "embedding", "block1.fc1.bias"],
        "units": "all",
        "levels": ["unit", "layer"],
        "every": 1,
        "train_every_epochs": 1,
        "train_samples": 3,
        "precision": "float64",
    },
}


def plan_for(folder, method="vanilla", **probe):
    study = StudyConfig.model_validate(GPT | {"probe": GPT["probe"] | probe})
    return RunPlan(study, method, 0, 0.01, folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def text():
    return load_data(plan_for(None).study.data)


@pytest.fixture(scope="module")
def logged(tmp_path_factory, text):
    plan = plan_for(tmp_path_factory.mktemp("blocks") / "run", "adam")
    run(plan, text)
    return plan, open_run(plan.folder)


def test_rows_equal_the_hessian_by_double_backward(logged, text):
    plan, stored = logged
    probe = stored.table("probe").query("iteration == 0 and data == 'train'")
    assert list(probe["layer"].unique()) == plan.study.probe.layers
    samples = chosen(text.train_targets, 3)
    batch = text.train_inputs[samples], text.train_targets[samples]
    seen = set()
    for layer, rows in probe.groupby("layer", sort=False):
        model, block = build_model(plan, text).double(), Catalogue(build_model(plan, text)).block(layer)
        parameters = [model.get_parameter(name) for name in block.parameters]
        H = double_backward(by_token(model(batch[0]), batch[1]), parameters)
        index, start = {}, 0
        for piece in block.pieces:
            count = piece.shape[1] * piece.width
            index[piece.parameter] = torch.arange(start, start := start + count).view(piece.shape[1], -1)
        for row in rows.itertuples():
            whole = pd.isna(row.unit)
            at = torch.cat([own.flatten() if whole else own[row.unit] for own in index.values()])
            own = H[at[:, None], at]
            values = torch.linalg.eigvalsh(own)
            assert row.n_params == len(own) == row.rank + row.nullity or not row.resolved
            assert row.trace == pytest.approx(float(own.trace()), rel=1e-9, abs=1e-14)
            if row.rank:
                assert row.lambda_max == pytest.approx(float(values.abs().max()), rel=1e-6)
            if row.resolved:
                told = values[values.abs() > 0.5 * row.lambda_min]
                assert len(told) == row.rank
                assert int((told < 0).sum()) == row.negative
                assert row.lambda_min == pytest.approx(float(told.abs().min()), rel=1e-4)
                assert row.kappa_lower <= float(told.abs().max() / told.abs().min()) * (1 + 1e-4)
            seen.add((layer, whole))
    assert len(seen) == 8


def test_the_trace_of_a_block_is_that_of_its_units(logged):
    probe = logged[1].table("probe")
    for _, rows in probe.groupby(["iteration", "data", "layer"]):
        whole = rows["unit"].isna()
        assert whole.sum() == 1
        assert rows.loc[~whole, "trace"].sum() == pytest.approx(rows.loc[whole, "trace"].iloc[0], rel=1e-9, abs=1e-14)


def test_own_coordinates_are_said(logged):
    probe = logged[1].table("probe")
    assert set(probe.query("iteration > 0 and layer != 'block1.attention.q'")["coordinates"]) == {"adam, M^1/2"}


def test_methods_of_weights_measure_other_blocks_in_plain_coordinates(tmp_path):
    digits = load("digits")
    study = StudyConfig.model_validate(
        GPT
        | {
            "data": {"name": "digits"},
            "model": {"hidden": [4]},
            "training": {"batch_size": 20, "iterations": 1},
            "probe": {"layers": ["fc2", "fc2.bias"], "units": [0, 2], "train_every_epochs": 0},
        }
    )
    run(RunPlan(study, "bnp", 0, 0.1, tmp_path / "run", torch.device("cpu")), digits)
    probe = open_run(tmp_path / "run").table("probe")
    assert list(zip(probe["layer"], probe["unit"], strict=True)) == [
        (n, u) for n in ("fc2", "fc2.bias") for u in (0, 2)
    ]
    assert probe["coordinates"].eq("plain").tolist() == [False, False, True, True]
    assert np.allclose(probe["kappa_own"][2:], probe["kappa"][2:])


@pytest.mark.slow
def test_a_resumed_run_has_the_same_rows_once(logged, text, tmp_path):
    plan = plan_for(tmp_path / "run", "adam")
    broken_off(plan, text, 2, how=ZeroDivisionError)
    run(plan, text, resume=True)
    with closing(sqlite3.connect(plan.folder / "run.sqlite")) as one:
        found = sorted(map(repr, one.execute("SELECT * FROM probe")))
    with closing(sqlite3.connect(logged[0].folder / "run.sqlite")) as other:
        assert found == sorted(map(repr, other.execute("SELECT * FROM probe")))


def test_reports_of_blocks_are_of_units_and_know_the_whole(logged, text, tmp_path):
    stored = logged[1]
    _, rows, _ = heat_cells([stored], by="kind", quantity="kappa")
    assert {"query", "norm", "embedding"} <= {kind for kind, _ in rows}
    assert select([stored]).unit == 0
    plan = plan_for(tmp_path / "run", levels=["layer"], every=0)
    run(plan, text)
    whole = select([open_run(plan.folder)])
    assert whole.unit is None
    assert whole.title == "blocks · layer block1.attention.q · batch size 4"
    assert len(whole.probes[0]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": ["embeding"]}, "no layer 'embeding'"),
        ({"layers": ["nothing*"]}, "matches 'nothing\\*'"),
        ({"layers": ["block1"]}, "level"),
        ({"layers": ["block1.norm1"], "units": [4]}, "unit 4 is out of range: layer 'block1.norm1' has units 0 to 3"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        check_structure(plan_for(None, **changes).study)


def test_statements_of_dense_layers_are_not_checked_elsewhere():
    study = StudyConfig.model_validate(
        GPT | {"probe": {"layers": ["embedding"], "units": [0]}, "statements": [{"id": "bnp-theorem-4"}]}
    )
    with pytest.raises(ConfigError, match="layer 'embedding' is none of these"):
        check_structure(study)


def test_a_star_is_every_parameter_once():
    study = plan_for(None, layers=["*"]).study
    names = list(probed_blocks(study))
    assert names[:3] == ["embedding", "positions", "block1.norm1"]
    assert len(names) == len(set(names)) == 12

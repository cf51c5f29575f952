"""Tables of runs in files: what is read back is the log."""

import csv
import json
import math

import pandas as pd
import pytest

from hesscond.runs import TABLES, RunLog
from hesscond.study import open_run
from tests.runs.run_logs import CONFIG, row, written_run

ODD = [1 / 3, math.inf, None, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1e22, 4.0]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs with odd numbers, of two seeds, the working directory being their parent's."""
    monkeypatch.chdir(tmp_path)
    for seed in (4, 5):
        log = RunLog(tmp_path / "runs" / f"bnp-seed{seed}", CONFIG | {"run": CONFIG["run"] | {"seed": seed}})
        for k, value in enumerate(ODD):
            log.training(k, 0, seed / (k + 3))
            rank = None if k == 2 else 2**53 + 1
            log.commit(
                probe=[row(k, kappa=value, resolved=None if k == 2 else value != math.inf, rank=rank, solver='κ, "x"')]
            )
        log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 2.5}])
        log.close("finished")
    return tmp_path / "runs"


def test_parquet_is_the_log_to_the_last_bit(runs, call_cli):
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow (extra 'parquet')")
    for name in TABLES:
        folder = runs / "bnp-seed4"
        result = call_cli("export", folder, "--table", name, "-o", "table.parquet")
        assert (result.code, result.out, result.err) == (0, "", "")
        pd.testing.assert_frame_equal(pd.read_parquet("table.parquet"), open_run(folder).table(name), check_exact=True)
    call_cli("export", "runs", "--format", "parquet", "-o", "joint.parquet")
    joint = pd.read_parquet("joint.parquet")
    assert joint["rank"].tolist()[:2] == [2**53 + 1] * 2
    for seed in (4, 5):
        own = joint[joint["seed"] == seed].reset_index(drop=True)[list(TABLES["probe"])]
        pd.testing.assert_frame_equal(own, open_run(runs / f"bnp-seed{seed}").table("probe"), check_exact=True)


def test_csv_and_json_of_several_runs(runs, call_cli):
    """One table, with what says whose a row is; whether one folder holds the runs or each is named."""
    names = ["runs/bnp-seed4", "runs/bnp-seed5"]
    whose = ["run", "study", "method", "seed", "learning_rate"]
    printed = call_cli("export", "runs", "--table", "training").out
    assert printed == call_cli("export", *names, "--table", "training").out
    rows = list(csv.DictReader(printed.splitlines()))
    assert list(rows[0]) == [*whose, *TABLES["training"]]
    assert [(r["run"], r["seed"]) for r in rows] == [(name, name[-1]) for name in names for _ in ODD]
    logged = [loss for name in names for loss in open_run(name).table("training")["loss"]]
    assert [float(r["loss"]) for r in rows] == logged
    rows = json.loads(call_cli("export", "runs", "--format", "json").out)
    assert [r["kappa"] for r in rows] == 2 * [None if v == math.inf else v for v in ODD]
    assert [r["rank"] for r in rows] == 2 * [None if k == 2 else 2**53 + 1 for k in range(len(ODD))]
    # a table that is empty in one of them, and an accuracy that regression does not have
    log = RunLog(runs / "new", CONFIG)
    log.close("finished")
    rows = list(csv.DictReader(call_cli("export", "runs", "--table", "evaluation").out.splitlines()))
    assert [(r["seed"], r["test_loss"], r["test_accuracy"]) for r in rows] == [("4", "2.5", ""), ("5", "2.5", "")]
    assert call_cli("export", "runs/new", "--table", "readings").out == ",".join(TABLES["readings"]) + "\n"
    # one run as a folder of runs: the columns depend on what was asked for, not on what was found
    assert call_cli("export", "runs/new").out.startswith("iteration,")
    (runs / "one").mkdir()
    written_run(runs / "one" / "run")
    assert call_cli("export", "runs/one").out.startswith("run,")

import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.report import summary_frame, summary_table
from hesscond.report.registry import TABLES
from hesscond.report.series import FLOAT32_LIMIT, rounding_note
from hesscond.report.sweeps import best_frame, cells_frame, sweep_frame
from hesscond.study import open_run
from tests.report_page import printed


def query(run, sql):
    connection = sqlite3.connect(run.folder / "run.sqlite")
    rows = connection.execute(sql).fetchall()
    connection.close()
    return np.array(rows, dtype=float)


def test_numbers_are_those_of_the_log(make_run):
    runs = [make_run("vanilla", unresolved=0.2), make_run("bnp", 1, unresolved=0.2)]
    frame = summary_frame(runs)
    assert list(frame["method"]) == ["vanilla", "bnp"]
    assert list(frame["seed"]) == [0, 1]
    for run, (_, row) in zip(runs, frame.iterrows(), strict=True):
        loss = query(run, "SELECT loss FROM training ORDER BY iteration")[:, 0]
        assert row["iterations"] == 300
        assert row["tail_iterations"] == 30
        assert row["training_loss_tail_mean"] == pytest.approx(loss[-30:].mean())
        accuracy = query(run, "SELECT test_accuracy FROM evaluation ORDER BY iteration DESC LIMIT 1")
        assert row["test_accuracy"] == accuracy[0, 0]
        assert row["learning_rate"] == 0.1
        assert row["status"] == "finished"
        for data in ("batch", "train"):
            table = query(
                run,
                "SELECT kappa, kappa_lower, resolved, kappa_preconditioned, kappa_preconditioned_lower, "
                "resolved_preconditioned, kappa_own, kappa_own_lower, resolved_own, kappa_D, dead "
                f"FROM probe WHERE data = '{data}' AND layer = 'fc3' "
                "AND unit = 3 ORDER BY iteration",
            )
            if data == "train":
                table = table[-1:]
            kappa, lower, ok, other, other_lower, other_ok, own, own_lower, own_ok, kappa_d, dead = table.T
            ok, other_ok, own_ok = ok == 1, other_ok == 1, own_ok == 1

            def median(values):
                return np.quantile(values, 0.5, method="inverted_cdf") if len(values) else np.nan

            def ends(values, least, resolved):
                low, high = median(np.where(resolved, values, least)), median(np.where(resolved, values, np.inf))
                return {"": low if low == high else np.nan, "_lower": low, "_upper": high}

            expected = {
                "probes": len(kappa),
                "kappa_unresolved": (~ok).sum(),
                "kappa_preconditioned_unresolved": (~other_ok).sum(),
                "kappa_own_unresolved": (~own_ok).sum(),
                **{f"kappa{end}": value for end, value in ends(kappa, lower, ok).items()},
                **{f"kappa_preconditioned{e}": value for e, value in ends(other, other_lower, other_ok).items()},
                **{f"kappa_own{end}": value for end, value in ends(own, own_lower, own_ok).items()},
                "gain": median(kappa[ok & other_ok] / other[ok & other_ok]),
                "kappa_D_squared": median(kappa_d**2),
                "dead": dead.max(),
            }
            for name, value in expected.items():
                assert row[f"{data}_{name}"] == pytest.approx(value, nan_ok=True), (data, name)


def test_what_was_never_resolved_is_a_lower_bound(make_run):
    run = make_run("bnp", unresolved=3.0)
    row = summary_frame([run]).iloc[0]
    assert np.isnan(row["batch_kappa"])
    assert np.isnan(row["train_kappa"])
    assert np.isnan(row["batch_gain"])
    text = printed(summary_table([run]))
    for name in ("kappa", "kappa_own"):
        assert f"≥ {row[f'batch_{name}_lower']:.2e}" in text


def test_runs_without_probes_or_evaluations(make_run):
    run = make_run(probed=False, evaluated=False)
    assert "nan" not in printed(summary_table([run]))
    assert "nothing was probed" in " ".join(printed(summary_table([run])).split())


def test_no_two_rows_have_the_same_name(make_run):
    runs = [make_run("vanilla", learning_rate=rate, iterations=20) for rate in (0.1, 0.01, 0.01)] + [make_run("bnp")]
    names = ["vanilla · lr 0.1", *(f"vanilla · lr 0.01 · {run.folder}" for run in runs[1:3]), "bnp"]
    assert sorted(summary_frame(runs)["label"]) == sorted(names)
    shown = printed(summary_table(runs[:2]))
    assert all(name in shown for name in ("vanilla · lr 0.1 ", "vanilla · lr 0.01 "))


@pytest.mark.parametrize("unresolved", [0.0, 0.2, 0.7, 3.0])
def test_every_table_has_the_same_median(make_run, unresolved):
    run = make_run("bnp", iterations=60, unresolved=unresolved)
    summary, seeds = (TABLES[name].frame([run], layer="fc1", unit=5).iloc[0] for name in ("summary", "seeds"))
    cells = cells_frame([run]).query("layer == 'fc1' and unit == 5")
    sweep = best_frame(sweep_frame([run], {}), cells).iloc[0]
    assert seeds["kappa_own_mean"] == pytest.approx(summary["batch_kappa_own_lower"])
    assert seeds["kappa_own_open"] == np.isnan(summary["batch_kappa_own"]) == (unresolved > 0)
    assert (
        seeds["kappa_own_open"]
        == ("≥" in printed(TABLES["seeds"].print([run])))
        == ("unres." in printed(summary_table([run])))
    )
    for name in ("kappa", "kappa_own"):
        for end in ("", "_lower"):
            assert sweep[f"unit_{name}{end}"] == pytest.approx(summary[f"batch_{name}{end}"], nan_ok=True)


def test_another_unit_and_runs_of_different_studies(make_run):
    run = make_run()
    kappa = query(run, "SELECT kappa FROM probe WHERE data = 'batch' AND layer = 'fc1' AND unit = 5")
    assert summary_frame([run], layer="fc1", unit=5)["batch_kappa"][0] == sorted(kappa[:, 0])[149]
    with pytest.raises(ConfigError, match="unit 9 was not probed"):
        summary_table([run], unit=9)
    with pytest.raises(ConfigError, match="different studies"):
        summary_frame([run, make_run(study="other")])


@pytest.fixture
def normalized():
    """An output layer behind layer normalization, whose features add up to zero, and its data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12, elementwise_affine=False), nn.Linear(12, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(200, 6), torch.randint(0, 3, (200,)))


def test_the_limit_tells_round_off_from_rank(normalized):
    exact = hesscond.probe(*normalized, layers=["2"], method="bnp")["2"].kappa
    # as a study takes them: the float32 activations as they are
    rounded = hesscond.probe(*normalized, layers=["2"], method="bnp", dtype=None, check=False)["2"].kappa
    for true, seen in zip(exact, rounded, strict=True):
        assert true.nullity > seen.nullity
        assert float(true) < FLOAT32_LIMIT < float(seen) < math.inf


def test_probes_above_it_are_counted_where_there_are_more_samples_than_parameters(make_run):
    run = make_run("bnp")

    def change(*statements):
        with closing(sqlite3.connect(run.folder / "run.sqlite")) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    change(
        "UPDATE probe SET samples = 60, n_params = 101",
        "UPDATE probe SET kappa_preconditioned = 5e15 WHERE iteration = 10",
    )
    assert rounding_note([run]) == ""
    change("UPDATE probe SET samples = 600", "UPDATE probe SET kappa_preconditioned = 9e999 WHERE iteration = 11")
    probe = run.table("probe")
    number = int((probe["kappa_preconditioned"] == 5e15).sum())
    assert number > 0
    assert f"{number} of {len(probe)} " in rounding_note([run])
    change("UPDATE probe SET kappa_preconditioned = 1e14")
    assert rounding_note([run]) == ""
    change("UPDATE probe SET kappa_preconditioned = 5e15")
    own = run.folder / "config.toml"
    own.write_text(own.read_text("utf-8").replace("[probe]", '[probe]\nprecision = "float64"'), encoding="utf-8")
    assert rounding_note([open_run(run.folder)]) == ""

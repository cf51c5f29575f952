"""The verdict on methods: ratios of κ at equal loss that are known beforehand, and where it cannot tell."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hesscond.report import equal_loss_figure, summary_table, verdict_frame, verdict_sentences
from hesscond.runs import RunLog, StoredRun, open_run
from tests.report_page import printed

SAMPLES = 400


@pytest.fixture
def make(tmp_path: Path):
    """Runs with κ(H) = factor·loss^power and κ own = κ(H)/gain, loss falling from ``start`` to ``end``."""
    count = iter(range(100))

    def run(
        method: str,
        factor: float = 1.0,
        *,
        gain: float = 1.0,
        start: float = 2.0,
        end: float = 0.02,
        power: float = -4.0,
        unresolved: float = 0.0,
        status: str = "finished",
        rank: int = 40,
        seed: int = 0,
    ) -> StoredRun:
        folder = tmp_path / f"run{next(count)}"
        config = {
            "name": "made-up",
            "description": "made up",
            "data": {"name": "digits"},
            "model": {"hidden": [9], "activation": "relu"},
            "training": {"batch_size": 60, "iterations": SAMPLES},
            "probe": {"layers": ["fc1"], "units": [0], "every": 1},
            "run": {"method": method, "seed": seed, "learning_rate": 0.1},
        }
        log = RunLog(folder, config)
        rng = np.random.default_rng(seed)
        for iteration, loss in enumerate(np.geomspace(start, end, SAMPLES)):
            log.training(iteration, 0, float(loss))
            plain = 1e3 * factor * loss**power
            known = rng.random() >= unresolved
            row = {"iteration": iteration, "epoch": 0, "data": "batch", "layer": "fc1", "unit": 0, "n_params": 65}
            for name, value in (("", plain), ("_preconditioned", plain / 7), ("_own", plain / gain)):
                row |= {f"kappa{name}": value if known else np.inf, f"kappa{name}_lower": 0.9 * value}
                row |= {f"kappa{name}_upper": value if known else np.inf}
                row |= {f"resolved{name}": int(known), f"rank{name}": rank}
            log.commit(probe=[row | {"coordinates": "plain" if gain == 1 else method}])
        log.close(status)
        return open_run(folder)

    return run


def test_the_ratio_at_equal_loss_is_that_of_the_laws_of_both(make):
    """κ grows as the loss falls, and bnp ends lower: medians over the runs say that it is worse."""
    runs = [make("vanilla", end=0.05), make("bnp", 1.0, gain=20.0, end=0.001)]
    medians = [run.table("probe")["kappa_own"].median() for run in runs]
    assert medians[1] > 10 * medians[0]
    row = verdict_frame(runs).iloc[1]
    # probes in one interval of loss, a tenth of a decade, differ by up to 10^0.4 in κ
    assert row["ratio"] == pytest.approx(20.0, rel=0.1)
    assert 20 / 10**0.4 < row["ratio_q25"] < row["ratio"] < row["ratio_q75"] < 20 * 10**0.4
    assert (row["loss_low"], row["loss_high"]) == pytest.approx((0.05, 2.0), rel=0.1)
    assert row["gain_own"] == pytest.approx(20.0)
    assert row["gain_P"] == pytest.approx(7.0)
    equal, same, theory = verdict_sentences(runs)
    number = float(re.search(r"is ([\d.]+) times smaller than vanilla's", equal)[1])
    assert number == pytest.approx(20.0, rel=0.1)
    assert "bnp's own coordinates make κ(H) 20 times smaller in bnp's run" in same
    assert "BNP's P makes it 7 times smaller in vanilla's run" in same
    assert "same weights" in theory


@pytest.mark.parametrize(
    ("vanilla", "bnp", "sentence", "number"),
    [
        ({}, {"factor": 50.0}, r"is ([\d.]+) times larger than vanilla's", 50.0),
        ({}, {"factor": 1.1}, "not clearly different()", None),
        ({"power": 0.0}, {"power": 0.0}, "equals vanilla's to 1 %() [(]", None),
        # one unit: the quartiles are ratios too
        (
            {"power": 0.0},
            {"power": 0.0, "gain": 1.02},
            r"is ([\d.]+) times smaller .* [(]quartiles 1.02 to 1.02;",
            1.02,
        ),
        # all κ of vanilla are unresolved, their lower bounds of 0.9 κ above those of bnp
        ({"unresolved": 1.0}, {"gain": 1000.0}, r"is at least ([\d,]+) times smaller", 900.0),
    ],
)
def test_the_verdict_is_a_sentence(make, vanilla, bnp, sentence, number):
    equal, *_ = verdict_sentences([make("vanilla", **vanilla), make("bnp", **bnp)])
    found = re.search(sentence, equal)[1].replace(",", "")
    assert number is None or float(found) == pytest.approx(number, rel=0.2 if number == 900 else 0.1)


def test_methods_that_share_no_loss_are_not_compared(make):
    runs = [make("vanilla", start=2.0, end=0.5), make("bnp", start=0.4, end=0.01)]
    assert "never probed at the same training loss" in verdict_sentences(runs)[0]
    assert np.isnan(verdict_frame(runs).iloc[1]["ratio"])


def test_a_few_unresolved_leave_the_median_and_many_do_not(make):
    few = verdict_frame([make("vanilla", unresolved=0.1), make("bnp", gain=20.0, unresolved=0.1)]).iloc[1]
    assert few["ratio_lower"] <= 20 * 10**0.4
    assert few["ratio_upper"] >= 20 / 10**0.4
    assert few["unresolved"] > 0
    many = verdict_sentences([make("vanilla", unresolved=0.7), make("bnp", gain=20.0, unresolved=0.7)])[0]
    assert "too many κ are unresolved" in many


def test_several_seeds_count_together(make):
    runs = [make("vanilla", seed=0), make("vanilla", seed=1), make("bnp", gain=20.0)]
    assert verdict_frame(runs).iloc[1]["base_probes"] == 2 * verdict_frame(runs[1:]).iloc[1]["base_probes"]


def test_runs_that_diverged_or_collapsed_are_named_and_not_compared(make):
    runs = [
        make("vanilla"),
        make("adam", status="diverged", rank=1, power=0.0, start=2.3, end=2.3),
        make("sphere", rank=1, power=0.0, factor=1e-3, start=2.3, end=2.3),
    ]
    frame = verdict_frame(runs)
    assert list(frame["method"]) == ["vanilla"]
    assert verdict_sentences(runs)[-2:] == (
        "adam diverged: its κ is not compared.",
        "sphere collapsed to constant outputs: its κ is not compared.",
    )
    figure = equal_loss_figure(runs[1:])
    left, right = figure.axes
    assert {line.get_gid() for line in left.lines} >= {"adam-loss-diverged-0", "sphere-loss-mean"}
    assert [text.get_text() for text in right.texts] == ["κ is not compared: see below"]
    assert figure.get_supxlabel().split() == " ".join(verdict_sentences(runs)[-2:]).split()
    shown = printed(summary_table(runs), 100)
    assert "sphere (collapsed)" in shown
    assert "adam (diverged)" in shown


def test_a_network_of_rank_one_that_learns_has_not_collapsed(make):
    runs = [make("vanilla"), make("sphere", rank=1)]
    assert list(verdict_frame(runs)["method"]) == ["vanilla", "sphere"]


def test_the_figure_shows_the_medians_of_each_interval_of_loss(make):
    runs = [make("vanilla", end=0.05), make("bnp", gain=20.0, end=0.001)]
    figure = equal_loss_figure(runs)
    right = figure.axes[1]
    lines = {line.get_gid(): line for line in right.lines if line.get_gid()}
    for name, gain in (("vanilla-kappa_own", 1.0), ("bnp-kappa_own", 20.0)):
        loss, kappa = (np.asarray(values, dtype=float) for values in lines[name].get_data())
        assert np.abs(np.log10(kappa / (1e3 * loss**-4.0 / gain))).max() < 0.3
    assert "bnp-kappa" in lines
    assert "vanilla-kappa" not in lines
    assert "times smaller than vanilla's" in " ".join(figure.get_supxlabel().split())


def test_one_method_alone_has_no_verdict_but_its_gain(make):
    assert verdict_sentences([make("vanilla")]) == ()
    (only,) = verdict_sentences([make("bnp", gain=20.0)])
    assert only.startswith("At the same weights, bnp's own coordinates make κ(H) 20 times smaller")

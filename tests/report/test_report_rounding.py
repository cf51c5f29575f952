"""κ's that may be the round-off of float32 activations are named, and no others."""

import math
import sqlite3
from contextlib import closing

import pytest
import torch
from torch import nn

import hesscond
from hesscond.report.series import FLOAT32_LIMIT, rounded_probes, rounding_note
from hesscond.study import open_run


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
    assert rounded_probes([run]) == (0, 0)
    change("UPDATE probe SET samples = 600", "UPDATE probe SET kappa_preconditioned = 9e999 WHERE iteration = 11")
    probe = run.table("probe")
    number = int((probe["kappa_preconditioned"] == 5e15).sum())
    assert number > 0
    assert rounded_probes([run]) == (number, len(probe))
    assert f"{number} of {len(probe)} " in rounding_note([run])
    change("UPDATE probe SET kappa_preconditioned = 1e14")
    assert rounding_note([run]) == ""
    change("UPDATE probe SET kappa_preconditioned = 5e15")
    own = run.folder / "config.toml"
    own.write_text(own.read_text("utf-8").replace("[probe]", '[probe]\nprecision = "float64"'), encoding="utf-8")
    assert rounding_note([open_run(run.folder)]) == ""

"""Tables in every format: numbers go there and back, and nothing in a run can break a format."""

import io
import math
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from hesscond.errors import ConfigError
from hesscond.report import TABLES
from hesscond.report.tables import LAST, LOSS, Column, bounded, in_powers, latex_escaped, number, numbers, write_table
from tests.report_page import printed

WRITTEN = ("md", "latex", "csv")
DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def read_back(cell):
    """The number of a cell of any format."""
    plain = re.sub(r"\$\^\{(.*?)\}\$", lambda found: f"e{found[1]}", cell.replace(r"$\times$10", ""))
    plain = re.sub(r"×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda found: f"e{found[1].translate(DIGITS)}", plain)
    return float(plain)


@given(st.floats(min_value=-1e300, max_value=1e300, allow_subnormal=False))
def test_numbers_are_the_same_in_every_format(value):
    text = number(value)
    for shown in (text, in_powers(text), latex_escaped(in_powers(text))):
        assert read_back(shown) == pytest.approx(float(f"{value:.2e}"), rel=1e-12)


def test_what_a_number_looks_like():
    assert in_powers("≥ 1.20e+05 … 3.00e-12") == "≥ 1.20×10⁵ … 3.00×10⁻¹²"
    assert latex_escaped("≥ 3.00×10⁻¹²") == r"$\geq$ 3.00$\times$10$^{-12}$"
    assert number(1e20, ".3f") == "1.00e+20"
    assert [number(loss, LOSS) for loss in (6.34e-4, 0.5, 123.4, 5e24)] == ["0.000634", "0.500", "123", "5.00e+24"]


def test_a_bound_is_never_shown_as_a_number():
    cell = bounded("κ", "k").cell
    assert cell({"k": math.nan, "k_lower": 5.0}) == "≥ 5.00e+00"
    assert cell({"k": 5.0, "k_lower": math.nan}) == "5.00e+00"
    assert cell({"k": math.nan, "k_lower": math.nan}) == "–"


@settings(deadline=None, max_examples=40)
@given(st.text())
def test_no_text_breaks_a_format(text):
    frame = pd.DataFrame({"name": [text], "number": [1.0]})
    columns = [Column(text, lambda row: row["name"], left=True), numbers("n", "number", ".1f")]
    lines = write_table(frame, columns, text, "latex").splitlines()
    inside = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert len(inside) == 1
    bare = re.sub(r"\\[&%$#_{}]|\\text[a-z]+\{\}|\\ldots\{\}", "", inside[0])
    assert bare.count("&") == 1
    assert bare.count("$") % 2 == 0
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"[%#~]", bare)
    assert latex_escaped(text).isprintable()
    rows = write_table(frame, columns, "", "md").splitlines()
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3 for row in rows)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["summary", "seeds"])
def test_every_table_in_every_format(four_runs, name):
    kind = TABLES[name]
    frame = kind.frame(four_runs)
    columns = kind.columns(frame)
    assert LAST in kind.explained(frame)
    for format in WRITTEN:
        text = kind.write(four_runs, format)
        assert all(run.method in text for run in four_runs)
    read = pd.read_csv(io.StringIO(kind.write(four_runs, "csv")))
    for column in frame.select_dtypes("number"):
        np.testing.assert_array_equal(read[column].astype(float), frame[column].astype(float))
    latex = kind.write(four_runs, "latex").splitlines()
    body = latex[latex.index(r"\midrule") + 1 : latex.index(r"\bottomrule")]
    assert len(body) == len(frame)
    assert all(len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1 and line.endswith(r"\\") for line in body)
    assert "bnp" in printed(kind.print(four_runs), 200)


def test_seeds_are_mean_and_range_of_those_that_finished(make_run):
    runs = [make_run("bnp", seed, iterations=20) for seed in range(3)]
    runs.append(make_run("bnp", 3, iterations=20, status="diverged"))
    assert "unfinished" not in TABLES["seeds"].write(runs, "md")
    runs.append(make_run("bnp", 4, iterations=20, status="interrupted"))
    row = TABLES["seeds"].frame(runs).iloc[0]
    losses = [run.table("training")["loss"].tail(2).mean() for run in runs[:3]]
    assert row["loss_mean"] == pytest.approx(np.mean(losses))
    assert (row["loss_min"], row["loss_max"]) == pytest.approx((min(losses), max(losses)))
    assert (row["seeds"], row["diverged"], row["unfinished"]) == (5, 1, 1)
    assert "unfinished" in TABLES["seeds"].write(runs, "md")
    medians = []
    for run in runs[:3]:
        kappa = run.table("probe").query("layer == 'fc3' and unit == 3 and data == 'batch'")["kappa_own"]
        medians.append(np.quantile(kappa, 0.5, method="inverted_cdf"))
    assert row["kappa_own_mean"] == pytest.approx(np.exp(np.mean(np.log(medians))))
    assert not row["kappa_own_open"]


def test_a_method_none_of_whose_seeds_finished_has_no_mean(make_run):
    runs = [make_run("bnp", 0, iterations=20), make_run("vanilla", 0, iterations=20, status="interrupted")]
    frame = TABLES["seeds"].frame(runs).set_index("method")
    assert frame.loc["vanilla", ["loss_mean", "loss_min", "accuracy_mean", "kappa_own_mean"]].isna().all()
    assert frame.loc["bnp", ["loss_mean", "kappa_own_mean"]].notna().all()


def test_bad_uses_are_one_sentence(four_runs):
    for kind in TABLES.values():
        with pytest.raises(ConfigError, match="run"):
            kind.frame([])
    with pytest.raises(ConfigError, match="choose from text, md, latex, csv"):
        TABLES["seeds"].write(four_runs, "docx")
    with pytest.raises(ConfigError, match="statement"):
        TABLES["statements"].frame(four_runs)


def test_claims_with_the_same_reason_share_it():
    frame = pd.DataFrame({"claim": list("abca"), "reason": ["x", "x", "", "x"], "violated": 0, "known": True})
    assert TABLES["statements"].explained(frame).startswith("a, b: not decided, x; held")

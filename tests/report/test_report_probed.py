"""Table and figure of a probe: every number is one of the frame's, nothing unresolved is shown as a value."""

import itertools
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

import numpy as np
import pandas as pd
import pytest
from rich.cells import cell_len

from hesscond.probing.tables import compact, layer_frame, layer_table, notes, unit_table
from hesscond.report import plotting, probe_figure
from tests import report_page


def made_up(names, units=20, *, unresolved=0.0, negative=0.0, zero=0, whole=False, scale=1e5):
    """A frame as of ``ProbeResult.to_frame()``; the first ``zero`` units of each layer are zero."""
    rng = np.random.default_rng(0)
    rows = []
    for name, unit in itertools.product(names, [pd.NA] if whole else range(units)):
        kappa = scale * 10 ** rng.standard_normal()
        nothing = not whole and unit < zero
        lost = bool(nothing or rng.random() < unresolved)
        rank = 0 if nothing else int(rng.integers(1000, 1100))
        rows.append(
            {
                "layer": name,
                "unit": unit,
                "n_params": 1152,
                "rank": rank,
                "nullity": 1152 - rank,
                "negative": int(not nothing and rng.random() < negative),
                "lambda_max": 1.0,
                "lambda_min": 1 / kappa,
                "kappa": math.inf if lost else kappa,
                "kappa_lower": 1.0 if nothing else kappa * (0.5 if lost else 1 - 1e-9),
                "kappa_upper": math.inf if lost else kappa * (1 + 1e-9),
                "resolved": not lost,
                "solver": "zero matrix" if nothing else "SVD",
                "reason": "the Hessian is zero" if nothing else "too small to tell" if lost else "",
                "advice": "standardize" if lost and not nothing else "",
            }
        )
    return pd.DataFrame(rows)


def printed(table, width):
    text = report_page.printed(table, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert "nan" not in text
    assert "inf" not in text
    return text


def test_layer_frame_is_the_frame_summed_up():
    frame = made_up(["b", "a"], unresolved=0.3, negative=0.4, zero=2)
    rows = layer_frame(frame)
    assert list(rows["layer"]) == ["b", "a"]
    for row in rows.to_dict("records"):
        blocks = [b for b in frame.to_dict("records") if b["layer"] == row["layer"]]
        kappa = [b["kappa"] for b in blocks if b["resolved"]]
        lower = [b["kappa_lower"] for b in blocks if not b["resolved"] and b["rank"] > 0]
        assert lower
        for name, values in (("kappa", kappa), ("lower", lower)):
            for how, function in (("min", min), ("median", np.median), ("max", max)):
                assert row[f"{name}_{how}"] == function(values)
        assert (row["units"], row["n_params"], row["zero"]) == (20, 1152, 2)
        assert row["unresolved"] == 20 - len(kappa)
        assert row["negative"] == sum(b["negative"] > 0 for b in blocks)
        assert (row["rank_min"], row["nullity_max"]) == (0, 1152)
        assert row["solvers"] == {"SVD": 18}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_of_units(width):
    frame = made_up(["encoder.layers.11.self_attn.out_proj", "fc"], 100, unresolved=0.1, negative=0.5, scale=1e13)
    text = printed(unit_table(frame, {"fc": "ConvTranspose2d"}), width)
    # names are broken at dots only
    assert all(part in text for part in ("encoder.", ".11.", "self_attn", "out_proj"))
    for row in layer_frame(frame).to_dict("records"):
        assert {compact(row["kappa_min"]), compact(row["kappa_median"])} <= {*text.split()}
        largest = max(row["kappa_max"], row["lower_max"])
        assert f"≥ {compact(largest, rounding=ROUND_FLOOR)}" in text
        assert {f"{row[f'{name}_min']}–{row[f'{name}_max']}" for name in ("rank", "nullity")} <= {*text.split()}


def test_units_never_resolved_are_bounds():
    frame = made_up(["fc"], unresolved=2.0)
    (row,) = layer_frame(frame).to_dict("records")
    text = printed(unit_table(frame, {}), 80)
    for how in ("min", "median", "max"):
        assert f"≥ {compact(row[f'lower_{how}'], rounding=ROUND_FLOOR)}" in text
    assert "– " in printed(unit_table(made_up(["fc"], 3, zero=3), {}), 80)


@pytest.mark.parametrize("width", [80, 120])
def test_table_of_layers(width):
    names = ["encoder.layers.11.self_attn.out_proj", "fc", "head"]
    frame = made_up(names, whole=True)
    frame.loc[1, ["resolved", "kappa", "kappa_upper"]] = [False, math.inf, math.inf]
    frame.loc[2, ["resolved", "kappa", "kappa_upper", "rank"]] = [False, math.inf, math.inf, 0]
    text = printed(layer_table(frame, dict.fromkeys(names, "Conv2d")), width)
    lower, upper = frame["kappa_lower"][0], frame["kappa_upper"][0]
    assert f"[{compact(lower, 6, ROUND_FLOOR)}, {compact(upper, 6, ROUND_CEILING)}]" in text
    lower = frame["kappa_lower"][1]
    assert f"≥ {compact(lower, rounding=ROUND_FLOOR)} " in text
    assert f" [{compact(lower, 6, ROUND_FLOOR)}, ∞)" in text
    assert "zero" in text


def test_numbers_round_outwards():
    rng = np.random.default_rng(1)
    for value in 10 ** rng.uniform(0, 18, 500):
        low, high = compact(value, 6, ROUND_FLOOR), compact(value, 6, ROUND_CEILING)
        assert Decimal(low) <= Decimal(value) <= Decimal(high)
        assert float(high) / float(low) - 1 <= 1.1e-5
        assert float(compact(value)) == pytest.approx(value, rel=5.1e-3)
        assert len(compact(value)) <= 7
    assert [compact(x) for x in (999.6, 99.96, 0.0123, 1e5)] == ["1.00e3", "100", "0.0123", "1.00e5"]


def test_notes():
    frame = made_up(["a", "b", "c"], 3, zero=1)
    frame.loc[[4, 5, 7], ["resolved", "reason", "advice"]] = [False, "too small to tell", "standardize"]
    assert notes(frame, {"a": "by hand", "b": "by hand", "c": ""}) == [
        "S of a, b: by hand",
        "κ of a, b, c: SVD",
        "zero, 3 of 9 κ (a, b, c): the Hessian is zero",
        "unresolved, 3 of 9 κ (b, c): too small to tell; standardize",
    ]


# --- figure ----------------------------------------------------------------------------------------------------------

NAMES = ["fc1", "fc2", "fc3"]


def test_a_rank_of_zero_of_which_nothing_is_told_is_unresolved():
    """Where functions are saturated no eigenvalue is distinguished from zero either: λ_max is not known there."""
    frame = made_up(("a",), units=6, zero=4, unresolved=0.0)
    frame.loc[frame["unit"] == 0, "lambda_max"] = math.nan
    (row,) = layer_frame(frame).to_dict("records")
    assert (row["unresolved"], row["zero"]) == (4, 3)
    assert row["lower_min"] == 1.0
    frame.loc[frame["unit"] == 0, "reason"] = "nothing is told"
    assert notes(frame, {})[-2:] == [
        "unresolved, 1 of 6 κ (a): nothing is told",
        "zero, 3 of 6 κ (a): the Hessian is zero",
    ]


def by_gid(figure, gid):
    return [a for a in figure.axes[0].get_children() if a.get_gid() == gid]


def test_long_names_stay_apart():
    names = [f"text_encoder.layers.{depth}.{part}.out_proj" for depth in (0, 11) for part in ("self_attn", "mlp")]
    assert plotting.shortened(names[:2]) == ["self_attn.out_proj", "mlp.out_proj"]
    short = ["l.0.s.out_proj", "l.0.mlp.out_proj", "l.11.s.out_proj", "l.11.mlp.out_proj", "head"]
    assert plotting.shortened([*names, "text_encoder.head"]) == short
    assert plotting.shortened(["a.fc1", "a.fc2"]) == ["a.fc1", "a.fc2"]
    assert plotting.shortened([30 * "a"]) == ["aaaaaa…aaaaaaaaaaaaa"]


def test_figure_shows_the_frame():
    frame = made_up(NAMES, 50, unresolved=0.2, negative=0.3, zero=2)
    figure = probe_figure(frame)
    plain, indefinite = (
        frame[frame["resolved"] & (frame["negative"] == 0)],
        frame[frame["resolved"] & frame["negative"]],
    )
    for gid, blocks in (("blocks", plain), ("indefinite", indefinite)):
        (dots,) = by_gid(figure, gid)
        assert np.array_equal(dots.get_xdata(), blocks["kappa"])
        rows = [NAMES.index(name) for name in blocks["layer"]]
        assert np.array_equal(np.rint(dots.get_ydata()), rows)
    triangles = np.concatenate([line.get_xdata() for line in by_gid(figure, "unresolved")])
    assert sorted(triangles) == sorted(frame["kappa_lower"][~frame["resolved"] & (frame["rank"] > 0)])
    (bars,) = by_gid(figure, "medians")
    assert [s[0, 0] for s in bars.get_segments()] == layer_frame(frame)["kappa_median"].tolist()
    left, right = figure.axes
    assert [t.get_text() for t in left.get_yticklabels()] == NAMES
    assert left.get_ylim()[0] > left.get_ylim()[1]
    assert right.get_yticklabels()[0].get_text().startswith("0–")
    low, high = left.get_xlim()
    assert low < frame["kappa_lower"].where(frame["rank"] > 0).min() < high


def test_whole_layers_have_intervals():
    frame = made_up(NAMES, whole=True)
    frame["kappa_upper"] *= 3
    figure = probe_figure(frame)
    (bars,) = by_gid(figure, "blocks-range")
    assert [tuple(s[:, 0]) for s in bars.get_segments()] == list(
        zip(frame["kappa_lower"], frame["kappa_upper"], strict=True)
    )
    assert by_gid(figure, "medians") == []

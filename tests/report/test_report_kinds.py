"""Every figure of the registry: what is drawn is what the logs say, on every page, into every file."""

import re
import zlib
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from hesscond.errors import ConfigError
from hesscond.lazy import Registry, imported
from hesscond.methods import registered
from hesscond.report import COLUMN, FIGURES, TABLES, FigureKind, TableKind, method_colors, save_figure, venue_page
from hesscond.report.curves import training_figure
from hesscond.report.html_report import render_report
from hesscond.report.palette import method_look, method_looks
from hesscond.report.selection import groups_of
from hesscond.report.series import quantile
from hesscond.report.tables import numbers, words
from tests.report_page import artists

DRAWN = [name for name in FIGURES if name != "spectra"]


def unit_rows(run, data="batch"):
    return run.table("probe").query("layer == 'fc3' and unit == 3 and data == @data")


@pytest.mark.share(4)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("venue", [None, "icml2024"])
def test_a_figure_fills_its_page_and_keeps_its_text_on_it(four_runs, name, venue):
    page = COLUMN if venue is None else venue_page(venue)
    kind = FIGURES[name]
    figure = kind.draw(four_runs, page=page)
    FigureCanvasAgg(figure).draw()
    assert figure.get_size_inches()[0] == pytest.approx(page.width)
    room = figure.bbox.padded(2)
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible() and text.get_in_layout():
            box = text.get_window_extent()
            on_page = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            # ticks outside the limits are not drawn
            assert on_page or text in [label for ax in figure.axes for label in tick_labels(ax)], text.get_text()
            assert text.get_fontsize() >= min(6.0, page.style["legend.fontsize"])
    for legend in figure.findobj(Legend):
        assert not any(legend.get_window_extent().overlaps(ax.bbox) for ax in figure.axes if ax.get_visible())
    boxes = [legend.get_window_extent() for legend in figure.findobj(Legend)]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def tick_labels(ax):
    return [*ax.get_xticklabels(which="both"), *ax.get_yticklabels(which="both")]


def test_every_kind_of_the_package_is_found_without_importing_it():
    modules = imported("hesscond.report")
    for kind, registry in ((FigureKind, FIGURES), (TableKind, TABLES)):
        there = {one for module in modules for one in vars(module).values() if isinstance(one, kind)}
        assert set(registry.values()) == there
        orders = [one.order for one in registry.values()]
        assert orders == sorted(set(orders))


def test_a_figure_and_a_table_from_elsewhere_are_those_of_the_commands_and_the_report(
    four_runs, tmp_path, call_cli, monkeypatch
):
    def draw(runs, *, page=COLUMN):
        figure = page.figure(1.0)
        figure.add_subplot().plot([run.last_loss for run in runs])
        return figure

    with pytest.raises(ConfigError, match="'spectra' is registered already"):
        FIGURES.register(FIGURES["spectra"])
    for registry in (FIGURES, TABLES):
        # none of the package's own, which take long to draw
        monkeypatch.setattr(registry, "_places", {})
        monkeypatch.setattr(registry, "_registered", Registry("figure", "hesscond.figures", registry._checked))
    FIGURES.register(FigureKind("losses", 5, "the last losses", "runs", draw))
    columns = [words("run", "run"), numbers("loss", "loss")]
    TABLES.register(TableKind("losses", 5, "the last losses", "runs", loss_frame, lambda frame: columns, "last losses"))
    folders = [str(run.folder) for run in four_runs]
    assert call_cli("figure", "losses", *folders, "-o", tmp_path / "losses.png").code == 0
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert f"| {four_runs[0].label} |" in call_cli("table", "losses", *folders, "--format", "md").out
    assert "the last losses" in render_report(four_runs)


def loss_frame(runs):
    return pd.DataFrame({"run": [run.label for run in runs], "loss": [run.last_loss for run in runs]})


@pytest.mark.share(4)
@pytest.mark.parametrize("name", DRAWN)
def test_one_run_alone_and_twelve_methods_are_drawn(twelve_runs, name):
    for chosen in (twelve_runs[-1:], twelve_runs):
        figure = FIGURES[name].draw(chosen)
        assert any(ax.has_data() for ax in figure.axes)
        labels = {text.get_text() for text in figure.findobj(Text)}
        if name not in ("heatmap", "blocks"):
            assert {run.method for run in chosen} <= labels


def test_no_run_and_no_probe_are_one_sentence(make_run):
    bare = make_run(probed=False, evaluated=False, iterations=5, epochs=1)
    for kind in FIGURES.values():
        with pytest.raises(ConfigError, match="no run"):
            kind.draw([])
    for name in ("spectra", "layers", "blocks", "heatmap", "block-bands"):
        with pytest.raises(ConfigError, match=r"^[^\n]*probed?[^\n]*$"):
            FIGURES[name].draw([bare])


def test_training_is_the_mean_over_the_seeds_in_its_range(make_run):
    runs = [make_run("bnp", seed, iterations=40) for seed in range(3)]
    found = artists(training_figure(runs))
    losses = np.stack([run.table("training")["loss"] for run in runs])
    np.testing.assert_allclose(found["bnp-train-loss-mean"].get_ydata(), losses.mean(0))
    vertices = found["bnp-train-loss-band"].get_paths()[0].vertices[:, 1]
    assert (vertices.min(), vertices.max()) == pytest.approx((losses.min(), losses.max()))
    accuracies = 100 * np.stack([run.table("evaluation")["test_accuracy"] for run in runs])
    np.testing.assert_allclose(found["bnp-accuracy-mean"].get_ydata(), accuracies.mean(0))
    assert found["bnp-train-loss-mean"].get_linestyle() == "--"
    assert found["bnp-test-loss-mean"].get_linestyle() == "-"


def test_a_diverged_run_is_a_line_of_its_own_and_no_part_of_the_mean(make_run):
    good, bad = make_run("bnp", 0, iterations=40), make_run("bnp", 1, iterations=20, status="diverged")
    figure = training_figure([good, bad])
    found = artists(figure)
    np.testing.assert_allclose(found["bnp-train-loss-mean"].get_ydata(), good.table("training")["loss"])
    np.testing.assert_allclose(found["bnp-train-loss-diverged-0"].get_ydata(), bad.table("training")["loss"])
    assert found["bnp-train-loss-end-0"].get_xdata()[0] == 19
    assert "bnp (1 of 2 diverged)" in [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def test_a_loss_that_blows_up_does_not_stretch_the_axis_and_is_said(make_run):
    import sqlite3

    run = make_run(iterations=300)
    with sqlite3.connect(run.folder / "run.sqlite") as connection:
        connection.execute("UPDATE training SET loss = 3e20 WHERE iteration = 299")
    figure = FIGURES["conditioning"].draw([run])
    assert figure.axes[0].get_ylim()[1] < 1e10
    assert r"loss (nats): values up to $10^{21}$ beyond the axis" in " ".join(figure.get_supxlabel().split())
    assert "beyond" not in FIGURES["conditioning"].draw([make_run("vanilla")]).get_supxlabel()


def test_quantiles_of_intervals_hold_those_of_every_choice_within_them():
    rng = np.random.default_rng(0)
    for _ in range(200):
        lower = 10 ** rng.uniform(0, 6, rng.integers(1, 12))
        upper = np.where(rng.random(len(lower)) < 0.3, np.inf, lower)
        q = rng.uniform(0.01, 0.99)
        low, high = quantile(lower, upper, q)
        true = np.where(np.isinf(upper), lower * 10 ** rng.uniform(0, 8, len(lower)), lower)
        assert low <= np.quantile(true, q, method="inverted_cdf") <= high


def test_an_unprobed_twin_of_a_comparison_gives_way(make_run):
    probed, bare = make_run(iterations=10), make_run(iterations=10, every=0, probed=False)
    bare.config["probe"]["train_every_epochs"] = 0
    assert [group.runs for group in groups_of([bare, probed])] == [(probed,)]


# --- looks -----------------------------------------------------------------------------------------------------------


def test_every_method_has_a_look_of_its_own_that_does_not_depend_on_the_others():
    names = [method.name for method in registered()] + ["bnp+groupnorm", "groupnorm+bnp", "bnp:rho=0.9", "adam+l2"]
    looks = method_looks(names)
    assert len({look.color for look in looks.values()}) == len(names)
    for name in names:
        assert method_look(name) == looks[name]
    assert method_colors(["vanilla", "bnp"]) == {"vanilla": "#D55E00", "bnp": "#0072B2"}


# --- pages and files -------------------------------------------------------------------------------------------------


def test_a_venues_fonts_are_embedded(four_runs, tmp_path):
    save_figure(FIGURES["training"].draw(four_runs, page=venue_page("neurips2024")), tmp_path / "figure.pdf")
    content = (tmp_path / "figure.pdf").read_bytes()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", content, re.S):
        try:
            content += zlib.decompress(stream)
        except zlib.error:
            continue
    assert b"STIXGeneral" in content
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    assert b"/CreationDate" not in content


def test_rates_are_those_of_the_trials_of_the_statement():
    from hesscond.report.margins import rate_figure, rate_trials

    found = rate_trials("prec-theorem-1", trials=2, seed=2)
    attained = found[found["claim"] == "attained"]
    assert len(attained)
    np.testing.assert_allclose(attained["measured"], attained["predicted"], rtol=1e-3)
    drawn = artists(rate_figure(found, "prec-theorem-1"))
    np.testing.assert_array_equal(drawn["attained"].get_xdata(), attained["predicted"])
    np.testing.assert_array_equal(drawn["attained"].get_ydata(), attained["measured"])
    with pytest.raises(ConfigError, match="no trial of 'van-der-sluis' compares rates: choose from"):
        rate_trials("van-der-sluis", trials=1)


def test_panels_go_into_axes_of_ones_own(four_runs):
    from hesscond.report import accuracy_axes, layer_axes, loss_axes, method_legend

    figure = Figure()
    axes = figure.subplots(3, 1)
    loss_axes(axes[0], four_runs)
    accuracy_axes(axes[1], four_runs)
    layer_axes(axes[2], four_runs, "fc1")
    legend = method_legend(axes[0], four_runs, loc="upper right")
    assert [text.get_text() for text in legend.get_texts()] == ["vanilla", "bnp"]
    assert all(ax.has_data() and ax.get_xlabel() and ax.get_ylabel() for ax in axes)
    own = artists(training_figure(four_runs))["bnp-train-loss-mean"].get_ydata()
    np.testing.assert_array_equal(artists(figure)["bnp-train-loss-mean"].get_ydata(), own)

import numpy as np
import pytest

from hesscond.errors import ConfigError
from hesscond.report import conditioning_figure
from tests.report_page import artists


def panels(figure):
    """Panels (a), (b), (c) and the right axis of (a)."""
    top, middle, bottom, right = figure.axes
    return top, middle, bottom, right


def data_of(figure, gid):
    line = artists(figure)[gid]
    return np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)


def legend_texts(ax):
    from matplotlib.legend import Legend

    return [text.get_text() for legend in ax.findobj(Legend) for text in legend.get_texts()]


def probe_rows(run, data, layer="fc3", unit=3):
    rows = run.table("probe")
    return rows[(rows["data"] == data) & (rows["layer"] == layer) & (rows["unit"] == unit)]


def test_a_short_run_shows_every_value_of_the_log(make_run):
    run = make_run("bnp")
    figure = conditioning_figure([run])
    batch, train = probe_rows(run, "batch"), probe_rows(run, "train")
    for column in ("kappa", "kappa_preconditioned"):
        x, y = data_of(figure, f"bnp-{column}-batch-raw")
        np.testing.assert_array_equal(x, batch["iteration"])
        np.testing.assert_array_equal(y, batch[column])
        x, y = data_of(figure, f"bnp-{column}-train-points")
        np.testing.assert_array_equal(x, train["iteration"])
        np.testing.assert_array_equal(y, train[column])
    x, y = data_of(figure, "bnp-expected-train-points")
    np.testing.assert_allclose(y, train["kappa"] / train["kappa_D"] ** 2)
    np.testing.assert_array_equal(data_of(figure, "bnp-kappa_D-batch-raw")[1], batch["kappa_D"])
    np.testing.assert_array_equal(data_of(figure, "bnp-kappa_D-train-points")[1], train["kappa_D"])
    np.testing.assert_array_equal(data_of(figure, "bnp-loss-raw")[1], run.table("training")["loss"])
    accuracy = data_of(figure, "bnp-accuracy-points")[1]
    np.testing.assert_allclose(accuracy, 100 * run.table("evaluation")["test_accuracy"])
    running = data_of(figure, "bnp-kappa_D_running_eps-batch-median")[1]
    assert running[0] < running[-1]


def test_running_median(make_run):
    run = make_run("bnp")  # 300 iterations: a window of 7
    kappa = probe_rows(run, "batch")["kappa"].to_numpy()
    median = data_of(conditioning_figure([run]), "bnp-kappa-batch-median")[1]
    assert "running median of 7 iterations" in conditioning_figure([run]).get_supxlabel()
    np.testing.assert_allclose(median[3:-3], [np.median(kappa[i - 3 : i + 4]) for i in range(3, len(kappa) - 3)])


def test_unresolved_are_open_triangles_at_the_lower_bound_and_in_no_line(make_run):
    run = make_run("bnp", unresolved=0.3, epochs=30)
    figure = conditioning_figure([run])
    for data in ("batch", "train"):
        rows = probe_rows(run, data)
        for column, flag in (("kappa", "resolved"), ("kappa_preconditioned", "resolved_preconditioned")):
            lost = rows[~rows[flag].astype(bool)]
            assert len(lost)
            x, y = data_of(figure, f"bnp-{column}-{data}-unresolved")
            np.testing.assert_array_equal(x, lost["iteration"])
            np.testing.assert_array_equal(y, lost[f"{column}_lower"])
            marker = artists(figure)[f"bnp-{column}-{data}-unresolved"]
            assert marker.get_markerfacecolor() == "none"
            assert marker.get_linestyle() == "None"
            line = "raw" if data == "batch" else "points"
            x, y = data_of(figure, f"bnp-{column}-{data}-{line}")
            assert not set(x[np.isfinite(y)]) & set(lost["iteration"])
    texts = legend_texts(panels(figure)[1])
    assert sum("unresolved (lower bound)" in text for text in texts) == 2


def test_seeds_are_a_median_in_a_band(make_run):
    runs = [make_run("bnp", seed) for seed in range(3)]
    figure = conditioning_figure(runs)
    kappa = np.stack([probe_rows(run, "train")["kappa_preconditioned"] for run in runs])
    _, y = data_of(figure, "bnp-kappa_preconditioned-train-points")
    np.testing.assert_allclose(y, np.median(kappa, axis=0))
    ranges = artists(figure)["bnp-kappa_preconditioned-train-range"].get_segments()
    np.testing.assert_allclose([s[:, 1] for s in ranges], np.stack([kappa.min(0), kappa.max(0)], axis=1))
    alone = [data_of(conditioning_figure([run]), "bnp-kappa-batch-median")[1] for run in runs]
    np.testing.assert_allclose(data_of(figure, "bnp-kappa-batch-median")[1], np.median(alone, axis=0))
    vertices = artists(figure)["bnp-kappa-batch-band"].get_paths()[0].vertices
    assert vertices[:, 1].min() == pytest.approx(np.min(alone))
    assert vertices[:, 1].max() == pytest.approx(np.max(alone))
    assert "3 seeds" in " ".join(figure.get_supxlabel().split())


def test_another_layer_and_unit(make_run):
    run = make_run("bnp")
    figure = conditioning_figure([run], layer="fc1", unit=5)
    rows = probe_rows(run, "batch", "fc1", 5)
    np.testing.assert_array_equal(data_of(figure, "bnp-kappa-batch-raw")[1], rows["kappa"])
    assert "layer fc1, unit 5" in figure.get_suptitle()
    with pytest.raises(ConfigError, match=r"layer 'fc2' was not probed .* choose from fc3, fc1"):
        conditioning_figure([run], layer="fc2")
    with pytest.raises(ConfigError, match=r"unit 4 was not probed .* choose from 3, 5"):
        conditioning_figure([run], unit=4)


def test_runs_that_do_not_belong_together(make_run):
    with pytest.raises(ConfigError, match="no runs"):
        conditioning_figure([])
    with pytest.raises(ConfigError, match="different studies"):
        conditioning_figure([make_run(), make_run(study="other")])
    apart = legend_texts(conditioning_figure([make_run(), make_run(seed=1, learning_rate=0.2)]).axes[0])
    assert apart[:2] == ["bnp · lr 0.1", "bnp · lr 0.2"]
    with pytest.raises(ConfigError, match="both bnp-seed0"):
        conditioning_figure([make_run(), make_run()])

"""The scatter of the gain against κ(D)²: its points are those of the log."""

import numpy as np
import pytest

from hesscond.errors import ConfigError
from hesscond.report import gain_figure, save_figure


def points(figure):
    """(number of points) by line, and all of them."""
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    return lines, np.concatenate([np.array(line.get_xydata(), dtype=float) for line in lines])


def test_every_resolved_probe_is_a_point(make_run, tmp_path):
    runs = [make_run("vanilla"), make_run("bnp")]
    figure = gain_figure(runs)
    lines, found = points(figure)
    assert len(lines) == 4
    expected = []
    for run in runs:
        probe = run.table("probe").query("layer == 'fc3' and unit == 3")
        expected.append(np.stack([probe["kappa_D"] ** 2, probe["kappa"] / probe["kappa_preconditioned"]], 1))
    expected = np.concatenate(expected)
    assert len(found) == len(expected)
    assert np.allclose(np.sort(found[:, 1]), np.sort(expected[:, 1]))
    assert np.allclose(np.sort(found[:, 0]), np.sort(expected[:, 0]))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"vanilla", "bnp", "mini-batch", "training set", r"gain $=\kappa(D)^2$"}
    save_figure(figure, tmp_path / "gain.png")
    assert (tmp_path / "gain.png").stat().st_size > 10_000


def test_unresolved_ones_are_counted_and_left_out(make_run):
    run = make_run("bnp", unresolved=0.3)
    figure = gain_figure([run])
    probe = run.table("probe").query("layer == 'fc3' and unit == 3")
    lost = int((np.isinf(probe["kappa"]) | np.isinf(probe["kappa_preconditioned"]) | probe["kappa"].isna()).sum())
    assert lost > 10
    assert len(points(figure)[1]) == len(probe) - lost
    assert f"{lost} unresolved" in {text.get_text() for text in figure.axes[0].texts}


def test_a_unit_that_was_not_probed_is_refused(make_run):
    with pytest.raises(ConfigError, match="fc9"):
        gain_figure([make_run("bnp")], layer="fc9")

"""The figure of a spectral density: what it shows is what was found, and no text touches another."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from hesscond.operators import Diagonal, Subspace
from hesscond.report import save_figure
from hesscond.report.density import density_figure, scientific
from hesscond.spectra.density import Share, density

N = 600


class Last(Subspace):
    """The last coordinates."""

    def __init__(self, order: int, dimension: int) -> None:
        self.order, self.dimension = order, dimension

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(vectors)
        result[-self.dimension :] = vectors[-self.dimension :]
        return result


class Known(Diagonal):
    """A diagonal matrix that knows that its last entries are zero."""

    null_space = Last(N, 200)


def bulk(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** -(1 + 4 * torch.rand(n - 10, generator=generator, dtype=torch.float64))
    values = torch.randn(n - 10, generator=generator, dtype=torch.float64) * scales
    return torch.cat([values, torch.logspace(0, 2, 10, dtype=torch.float64)])


def null_after(values: torch.Tensor) -> Known:
    return Known(torch.cat([values, torch.zeros(200, dtype=torch.float64)]))


CASES = {
    "hessian": lambda: density(Diagonal(bulk(N)), method="lanczos", steps=40),
    "hessian-null": lambda: density(null_after(bulk(N - 200)), method="lanczos", steps=40),
    "null-computed": lambda: density(null_after(bulk(N - 200))),
    "negative": lambda: density(null_after(-torch.linspace(1, 2, N - 200).double()), method="lanczos"),
    "positive": lambda: density(Diagonal(torch.linspace(1, 2, N).double()), method="lanczos", steps=30),
    "one-probe": lambda: density(Diagonal(torch.linspace(-1, 2, N).double()), method="lanczos", probes=1),
    "tiny": lambda: density(Diagonal(1e-30 * bulk(N)), method="lanczos", steps=40),
    "huge": lambda: density(Diagonal(1e30 * torch.linspace(-1, 2, N).double()), method="lanczos", steps=40),
    "five": lambda: density(Diagonal(torch.tensor([-1.0, 0.0, 2.0, 2.0, 5.0]))),
    "one": lambda: density(Diagonal(torch.tensor([3.0]))),
    "zero": lambda: density(Diagonal(torch.zeros(7))),
    "everything-null": lambda: density(Nothing(torch.zeros(N))),
}


class Nothing(Diagonal):
    null_space = Last(N, N)


def by_gid(figure: Figure, gid: str) -> list[Any]:
    return [artist for artist in figure.axes[0].get_children() if artist.get_gid() == gid]


def legend_texts(ax: Axes) -> list[Any]:
    return [text for legend in ax.get_children() if isinstance(legend, Legend) for text in legend.get_texts()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that touch each other, and texts outside the figure."""
    figure.draw_without_rendering()
    (ax,) = figure.axes
    texts = [ax.xaxis.label, ax.yaxis.label, ax.xaxis.get_offset_text(), *figure.texts]
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        places = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        texts += [label for place, label in places if min(limits) <= place <= max(limits)]
    texts += legend_texts(ax)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]
    page = figure.bbox.padded(1)
    outside = [(name, "") for name, b in boxes if not (page.contains(b.x0, b.y0) and page.contains(b.x1, b.y1))]
    return outside + [(n, m) for (n, a), (m, b) in itertools.combinations(boxes, 2) if a.padded(-0.5).overlaps(b)]


@pytest.mark.share(3)
@pytest.mark.parametrize("title", [None, "Hessian of the whole network, fc-cifar10, after 20 epochs with bnp, seed 0"])
@pytest.mark.parametrize("name", CASES)
def test_no_text_touches_another(name, title):
    figure = density_figure(CASES[name](), title)
    assert overlaps(figure) == []
    # the legend does not push the axes aside
    assert figure.axes[0].get_position().width > 0.75


@pytest.mark.share(3)
@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_it_can_be_saved(tmp_path, suffix):
    figure = density_figure(CASES["hessian-null"]())
    save_figure(figure, tmp_path / f"density{suffix}")
    assert (tmp_path / f"density{suffix}").stat().st_size > 5000


def test_it_shows_what_was_found():
    found = CASES["hessian-null"]()
    figure = density_figure(found)
    (ax,) = figure.axes
    curve = found.curve(1500)
    (negative,), (positive,) = by_gid(figure, "negative"), by_gid(figure, "positive")
    below = curve.x.numpy() <= 0
    assert np.array_equal(negative.get_xdata(), curve.x.numpy()[below])
    assert np.array_equal(positive.get_xdata(), curve.x.numpy()[~below | (curve.x.numpy() == 0)])
    shown = positive.get_ydata() > ax.get_ylim()[0]
    assert np.allclose(positive.get_ydata()[shown], curve.density.numpy()[curve.x.numpy() >= 0][shown])
    # the band is one standard error
    (band,) = by_gid(figure, "positive-band")
    extent = band.get_paths()[0].vertices[:, 1].max()
    assert extent == pytest.approx(float((curve.density + curve.error)[curve.x >= 0].max()), rel=1e-12)
    # the stem is the null space, with its share
    (stem,) = by_gid(figure, "null")
    assert [tuple(point) for point in stem.get_segments()[0][:, :1]] == [(0.0,), (0.0,)]
    labels = [
        text.get_text()
        for legend in ax.get_children()
        if type(legend).__name__ == "Legend"
        for text in legend.get_texts()
    ]
    assert "known null space: 33.3 %" in labels
    assert any(str(found.negative) in label for label in labels)
    # ticks at the ends
    (nodes,) = by_gid(figure, "nodes")
    marked = np.array([segment[0, 0] for segment in nodes.get_segments()])
    assert marked.min() == found.bottom
    assert marked.max() == found.top
    assert len(marked) == 10 * 16
    caption = figure.texts[-1].get_text() if figure.texts else figure._supxlabel.get_text()
    assert "n = 600; 10 probes × 40 Lanczos steps" in caption.replace("\n", " ")
    assert "Gaussians of width" in caption.replace("\n", " ")


def test_a_single_outlier_is_seen():
    n = 100_000
    values = torch.cat([torch.linspace(-0.01, 0.02, n - 1), torch.tensor([7.0])]).double()
    figure = density_figure(density(Diagonal(values), probes=3, steps=30))
    (ax,) = figure.axes
    (line,) = by_gid(figure, "positive")
    x, y = line.get_data()
    assert y[(x > 6) & (x < 8)].max() > 2 * ax.get_ylim()[0]
    assert y[(x > 1) & (x < 6)].max() < ax.get_ylim()[0]


def test_positive_spectra_have_no_negative_part():
    figure = density_figure(CASES["positive"]())
    assert not by_gid(figure, "negative")
    assert by_gid(figure, "positive")
    assert figure.axes[0].get_xscale() == "linear"
    figure = density_figure(CASES["negative"]())
    assert not by_gid(figure, "positive")


def test_numbers():
    assert str(Share(0.12345, 0.0123, 0.12, 0.13, 10)) == "12.3 ± 1.2 %"
    assert str(Share(0.5, 0.0, 0.5, 0.5, 10)) == "50 %"
    assert str(Share(0.5, 1e-16, 0.5, 0.5, 10)) == "50 %"
    assert str(Share(0.5, math.inf, 0.4, 0.6, 10)) == "50 %"
    assert str(Share(0.4, 0.3, 0.3, 0.5, 10)) == "40 ± 30 %"
    assert str(Share(0.5, 0.001, 0.3, 0.7, 10)) == "30–70 %"
    assert str(Share(0.5, 0.2, 0.0, 1.0, 10)) == "0–100 %"
    assert str(Share(0.5, 1e-6, 0.4999, 0.5001, 10)) == "49.990–50.010 %"
    assert scientific(0.123) == "0.12"
    assert scientific(1.26e-9) == r"$1.3\times10^{-9}$"

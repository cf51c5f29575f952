"""The page as a whole: it loads nothing, escapes what a run says, and holds figures, tables and configurations."""

import tomllib
from dataclasses import replace

import pytest

from hesscond.errors import ConfigError
from hesscond.report import registry, write_report
from hesscond.report.html_report import render_report
from tests.report_page import Page, logged, probe


@pytest.fixture(scope="module", autouse=True)
def two_figures():
    """Every figure has its own tests; this one stands for all, and save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FIGURES", {"training": registry.FIGURES["training"]})
        yield


@pytest.fixture(scope="module")
def text(four_runs, two_figures):
    return render_report(four_runs)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_nothing_is_loaded_from_anywhere(text, page):
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "input", "script"}
        for name, value in attributes.items():
            assert name not in {"srcset", "style", "action", "ping"}
            assert not name.startswith("on")
            if name in {"src", "href", "data"}:
                assert value.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in text
    assert "url(" not in text


def test_the_same_runs_give_the_same_bytes_and_the_file_is_replaced(four_runs, text, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(four_runs, path)
    assert path.read_bytes() == text.encode()
    assert len(text) < 2_000_000


def test_each_configuration_repeats_its_run(four_runs, page):
    assert [tomllib.loads(content) for content in page.inside("pre")] == [run.config for run in four_runs]


def test_runs_of_several_learning_rates_have_a_row_each(tmp_path):
    grid = [logged(tmp_path / str(rate), "bnp", learning_rate=rate, probes=[probe()]) for rate in (0.1, 0.3)]
    cells = Page(render_report(grid)).inside("td")
    assert {"0.1", "0.3"} <= set(cells)


def test_what_a_run_says_stays_text(four_runs, page):
    trick = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}$\\frac{$^_%\udcff"
    hostile = [
        replace(
            run,
            config=run.config | {"description": trick, "source": trick, "name": trick},
            facts=run.facts | {"message": trick, "started": trick},
        )
        for run in four_runs
    ]
    found = Page(render_report(hostile, title=trick))
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in page.elements} | {"img"}
    assert all(picture["src"].startswith("data:") for picture in found.all("img"))
    assert found.inside("h1") == [trick]


def test_refusals(four_runs, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        write_report(four_runs, tmp_path / "report.pdf")
    with pytest.raises(ConfigError, match="no runs given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="was not probed"):
        write_report(four_runs, tmp_path / "report.html", layer="fc9")
    assert not any(tmp_path.iterdir())

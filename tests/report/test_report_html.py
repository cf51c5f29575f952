"""The page as a whole: it loads nothing, is the same every time, and says what a reader who cannot see needs."""

import base64
import hashlib
import re
import tomllib
from itertools import pairwise

import pytest

from hesscond.errors import ConfigError
from hesscond.report import html_report, write_report
from hesscond.report.html_report import named_runs, render_report, stylesheet
from tests.report_page import Page, study


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return study(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module", autouse=True)
def two_figures():
    """Every figure has its own tests; these two stand for all, and save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_report, "FIGURES", {name: html_report.FIGURES[name] for name in ("conditioning", "margins")})
        yield


@pytest.fixture(scope="module")
def text(runs, two_figures):
    return render_report(runs)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_nothing_is_loaded_from_anywhere(text, page):
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "input"}
        for name, value in attributes.items():
            assert name not in {"srcset", "style", "action", "ping"}
            assert not name.startswith("on")
            if name in {"src", "href", "data"}:
                assert value.startswith(
                    ("#", "data:image/svg+xml;base64,", "data:image/png;base64,", "data:application/toml")
                )
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_the_style_of_the_page_and_no_script(page):
    (policy,) = (a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (style,) = page.inside("style")
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not page.all("script")


def test_the_same_runs_give_the_same_bytes_and_the_file_is_replaced(runs, text, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(runs, path)
    assert path.read_bytes() == text.encode()


def test_a_usual_report_is_small(text):
    assert len(text.encode()) < 2_000_000


def test_every_picture_has_words_and_a_size(page):
    pictures = page.all("img")
    assert pictures
    for picture in pictures:
        assert "κ(H)" in picture["alt"]
        assert re.search(r"bnp, seed 1: loss \d", picture["alt"])
        assert int(picture["width"]) > 100 < int(picture["height"])


def test_tables_have_captions_or_headings_and_their_headers_a_scope(page):
    assert all(header.get("scope") in ("col", "row") for header in page.all("th"))
    regions = [a for a in page.all("div") if a.get("class") == "scroll"]
    assert len(regions) == len(page.all("table")) > 4
    assert all(a["tabindex"] == "0" and a["role"] == "region" for a in regions)


def test_identifiers_are_unique_and_references_lead_somewhere(page):
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(set(identifiers)) == len(identifiers)
    for _, attributes in page.elements:
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in identifiers
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in identifiers
    assert page.all("html")[0]["lang"] == "en"
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in page.elements}
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))


def test_each_link_holds_the_configuration_that_repeats_the_run(runs, page):
    links = [a for a in page.all("a") if "download" in a]
    assert len(links) == len(runs)
    for run, link in zip(runs, links, strict=True):
        content = base64.b64decode(link["href"].removeprefix("data:application/toml;base64,")).decode()
        assert tomllib.loads(content) == run.config
        assert f"hesscond study {link['download']} --out" in page.words


def test_runs_have_different_names_and_files(make):
    runs = [
        make.run("bnp"),
        make.run("bnp", 1),
        make.run("bnp", learning_rate=0.5),
        make.run("bnp"),
        make.run("bnp:rho=0.9"),
    ]
    named = named_runs(runs)
    assert [one.name for one in named] == [
        "bnp, seed 0, lr 0.1, batch 60 #1",
        "bnp, seed 1",
        "bnp, seed 0, lr 0.5, batch 60",
        "bnp, seed 0, lr 0.1, batch 60 #2",
        "bnp:rho=0.9, seed 0",
    ]
    assert len({one.file for one in named}) == len(named)
    assert {one.file for one in named} > {"bnp-seed1", "bnp-rho-0.9-seed0"}


def test_runs_of_several_learning_rates_have_their_table(make):
    probes = [make.probe()]
    grid = [make.run("bnp", learning_rate=rate, probes=probes) for rate in (0.1, 0.3)]
    words = Page(render_report(grid)).words
    assert "a row for each method, a column for each learning rate" in words


def test_results_come_first_and_nothing_is_said_of_what_is_not_there(page):
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections == ["results", "figures", "runs"]
    links = [a["href"] for a in page.all("a") if a.get("href", "").startswith("#")]
    assert [f"#{id}" for id in sections] == [link for link in links if link != "#content"]
    for word in ("No table", "No figure", "was checked", "held:"):
        assert word not in page.words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme):
    css = str(stylesheet())
    colors = dict(
        re.findall(r"--(\w+): (#\w+)", css.split("@media (prefers-color-scheme: dark)")[scheme == "dark"][:700])
    )

    def luminance(color):
        digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
        parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ink in ("ink", "quiet", "link"):
        for paper in ("paper", "wash"):
            high, low = sorted((luminance(colors[ink]), luminance(colors[paper])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)


def test_refusals(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        write_report(runs, tmp_path / "report.pdf")
    with pytest.raises(ConfigError, match="no runs given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="was not probed"):
        write_report(runs, tmp_path / "report.html", layer="fc9")
    assert not any(tmp_path.iterdir())

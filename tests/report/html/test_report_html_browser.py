"""The page in a real browser: nothing is asked for or complained about, and the curves can be read and zoomed.

Runs where the package playwright is installed and a Chromium is found: $HESSCOND_BROWSER, playwright's own, or one on
the path.
"""

import os
import shutil
from pathlib import Path

import pytest
from report_page import logged, probe, study

from hesscond.report import write_report

pytestmark = pytest.mark.slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as tool:
        named = os.environ.get("HESSCOND_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
        executable = named or tool.chromium.executable_path
        if not Path(executable).exists():
            pytest.skip("no Chromium: run `playwright install chromium`, or name one in HESSCOND_BROWSER")
        opened = tool.chromium.launch(executable_path=executable, args=["--no-sandbox", "--no-zygote", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(study(folder), folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def visit(browser):
    """Open a file at a width, in a colour scheme; every request and complaint must be none at the end."""
    contexts, trouble = [], []

    def call(path, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.on("request", lambda r: None if r.url.startswith(("data:", path.as_uri())) else trouble.append(r.url))
        page.goto(path.as_uri())
        page.wait_for_selector("figure.chart svg .curve")
        return page

    yield call
    for context in contexts:
        context.close()
    assert not trouble


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_never_scrolls_sideways_and_all_pictures_are_there(visit, report, width, scheme):
    page = visit(report, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_value_is_read_by_pointing_and_by_keys(visit, report):
    page = visit(report)
    chart = page.locator("#chart-loss")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 66, box["y"] + 14)
    assert chart.locator(".readout").inner_text().endswith("training loss · iteration 0: 2")
    chart.locator(".plot > svg").focus()
    page.keyboard.press("ArrowRight")
    assert chart.locator(".readout").inner_text().endswith("training loss · iteration 1: 1")
    page.keyboard.press("ArrowDown")
    assert "iteration 60" in chart.locator(".readout").inner_text()


def test_a_box_cuts_the_axis_of_values_too(visit, report):
    page = visit(report)
    chart = page.locator("#chart-kappa-batch")
    chart.scroll_into_view_if_needed()

    def labels():
        return [float(text) for text in chart.locator("svg text[text-anchor=end]").all_text_contents()]

    whole, box = labels(), chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 140, steps=4)
    page.mouse.up()
    assert max(labels()) / min(labels()) < max(whole) / min(whole) / 3
    page.mouse.dblclick(box["x"] + 300, box["y"] + 100)
    assert labels() == whole


def test_a_stretch_is_zoomed_into_and_out_of(visit, report):
    page = visit(report)
    chart = page.locator("#chart-kappa-batch")
    chart.scroll_into_view_if_needed()

    def ticks():
        texts = chart.locator("svg text[text-anchor=middle]").all_text_contents()
        return [float(text) for text in texts if text[0].isdigit()]

    assert (min(ticks()), max(ticks())) == (0, 50)
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 110, steps=4)
    page.mouse.up()
    inside = ticks()
    assert min(inside) >= 5
    assert max(inside) <= 20
    chart.get_by_role("button", name="Later").click()
    assert min(ticks()) > min(inside)
    chart.get_by_role("button", name="Show all").click()
    assert (min(ticks()), max(ticks())) == (0, 50)
    chart.locator(".plot > svg").focus()
    page.keyboard.press("+")
    assert max(ticks()) - min(ticks()) < 30
    page.keyboard.press("0")
    assert max(ticks()) == 50


def test_curves_are_hidden_one_by_one(visit, report):
    page = visit(report)
    chart = page.locator("#chart-kappa-batch")
    lines = chart.locator(".plot .curve:not(.faint)")
    assert lines.count() == 8
    button = chart.get_by_role("button", name="bnp, seed 1")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 6
    assert chart.locator(".plot .hollow").count() == 3


def test_tables_are_sorted_by_number(visit, report):
    page = visit(report)
    table = page.locator("#runs table")
    header = table.get_by_role("button", name="seed")
    for order in ("ascending", "descending"):
        header.press("Enter")
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == order
        seeds = [int(text) for text in table.locator("tbody td:nth-child(3)").all_inner_texts()]
        assert seeds == sorted(seeds, reverse=order == "descending")


def test_a_hostile_run_stays_text(visit, tmp_path):
    text = "</script><img src=x onerror=alert(1)><script>alert(2)</script>\"'&"
    rows = [{"statement": text, "claim": text, "known": 1, "status": "violated", "reason": text}]
    probes = [probe(kappa=k, kappa_preconditioned=k / 3, kappa_own=k / 3) for k in (1e4, 2e4, 5e4)]
    run = logged(tmp_path / "run", text, message=text, data_source=text, statements=rows, probes=probes)
    write_report([run], tmp_path / "report.html", title=text)
    page = visit(tmp_path / "report.html", 360)
    assert page.title() == text
    assert page.evaluate("[...document.images].every(image => image.src.startsWith('data:'))")
    assert page.evaluate("[...document.scripts].filter(script => script.type !== 'application/json').length") == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_without_scripts_the_page_says_so_and_shows_the_figures(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert "The curves need JavaScript" in page.inner_text("#curves")
    assert page.locator("#figures img").count() > 1
    context.close()

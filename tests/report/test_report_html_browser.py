"""The page in a real browser: nothing is asked for or complained about, and it fits every width.

Runs where the package playwright is installed and a Chromium is found: $HESSCOND_BROWSER, playwright's own, or one on
the path.
"""

import os
import shutil
from pathlib import Path

import pytest

from hesscond.report import write_report
from tests.report_page import study

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

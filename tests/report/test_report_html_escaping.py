"""Whatever a run says of itself stays text: the page has the elements of the template and no other."""

import os
import unicodedata
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hesscond.report import html_report
from hesscond.report.html_report import LONGEST, render_report, visible
from hesscond.study import StoredRun, open_run
from tests.report_page import Page, logged, probe

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "<!--",
    "--><svg onload=alert(1)>",
    "<![CDATA[",
    "]]>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&#0;&notit;",
    "javascript:alert(1)",
    "\u202egnp.exe\u2066",
    "\x00\x08\x1b[31m\x7f\x85",
    "\uffff\u2028\ufeff\u00ad",
    "a\nb\r\nc\td",
    "<plaintext>",
    "<template><table><td>",
    "$\\frac{$^_%",
    "a" * 100_000,
]


class Renamed(StoredRun):
    """A run with a text attached to everything that it says; its log is read once."""

    read = staticmethod(cache(lambda folder, name: open_run(folder).table(name)))

    def table(self, name):
        frame = self.read(self.folder, name).copy()
        for column in set(frame.columns) & {"layer", "solver", "coordinates", "statement", "claim", "reason"}:
            frame[column] = [value + self.facts["text"] for value in frame[column]]
        return frame


def attached(value, text):
    if isinstance(value, dict):
        return {key: attached(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [attached(item, text) for item in value]
    return value + text if isinstance(value, str) else value


def renamed(run, text):
    config = attached(run.config, text) | {"source": text, f"key{text}": {f"key{text}": text}, "list": [{text: text}]}
    config["run"] |= {"versions": {f"torch{text}": text}}
    facts = run.facts | {"status": f"odd{text}", "message": text, "started": text, "text": text}
    return Renamed(run.folder, config, facts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    row = {
        "statement": "bnp-theorem-4",
        "claim": "scaling",
        "known": 1,
        "status": "violated",
        "used": 2.0,
        "reason": "r",
    }
    folder = tmp_path_factory.mktemp("runs")
    probes = [probe(), probe(resolved=0, kappa=float("inf"))]
    return [logged(folder / str(seed), "bnp", seed, statements=[row], probes=probes) for seed in (0, 1)]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """The property is about the page; pictures are inside of images, and slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_report, "FIGURES", {})
        yield


@pytest.fixture(scope="module")
def harmless(runs, no_pictures):
    return page_of(runs, "harmless")


def page_of(runs, text):
    return Page(render_report([renamed(run, text) for run in runs], title=text))


@settings(max_examples=6, deadline=None)
@given(text=st.text(min_size=1) | st.lists(st.sampled_from(HOSTILE[:-1]), min_size=1).map("".join))
def test_no_element_or_attribute_comes_from_a_run(runs, harmless, text):
    assert_template_only(page_of(runs, text), harmless, text)


@pytest.mark.share(3)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:30]))
def test_known_tricks(runs, harmless, text):
    assert_template_only(page_of(runs, text), harmless, text)


def assert_template_only(hostile, harmless, text):
    assert hostile.shape == harmless.shape
    for (tag, mine), (_, theirs) in zip(hostile.elements, harmless.elements, strict=True):
        for name in set(mine) - {"alt", "aria-label", "href", "download"}:
            assert mine[name] == theirs[name], (tag, name)
        if "href" in mine and not mine["href"].startswith("data:application/toml;base64,"):
            assert mine["href"] == theirs["href"]
        assert mine.get("download", "a.toml").replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert hostile.inside("style") == harmless.inside("style")
    assert not hostile.all("script")
    assert visible(text).split() == [] or " ".join(visible(text).split()) in hostile.words


@given(st.text())
@example("\u202e\u2066\x00\x1b\ud800")
def test_visible_text_has_nothing_that_is_invisible_and_can_be_written(text):
    shown = visible(text)
    shown.encode()
    assert all(c.isprintable() or unicodedata.category(c) == "Zs" for c in shown)
    assert len(shown) <= 10 * LONGEST + 100


def test_a_folder_whose_name_is_no_text_is_shown(tmp_path):
    run = logged(tmp_path / os.fsdecode(b"run\xff<b>"), "bnp", probes=[probe()])
    page = render_report([run])
    page.encode()
    assert "run⟨U+DCFF⟩<b>" in Page(page).words

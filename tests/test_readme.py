"""The README is one page, and its files and targets exist; what it prints is in test_docs_code and test_docs_truth."""

import re
import subprocess
from pathlib import Path

import pytest

import hesscond

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_one_page_that_begins_with_a_picture():
    assert len(README.split()) <= 700
    assert README.index("![") < README.index("## ")


def test_its_links_exist():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_its_make_targets_exist(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_version_is_this_one():
    assert f"version = {{{hesscond.__version__}}}" in README


def test_its_verdict_is_that_of_the_run_of_the_quick_start():
    """The commands of the quick start are run, and what they print is compared with the page."""
    (said,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "hesscond study fc-digits --method vanilla --method bnp --out" in page
    assert said in page

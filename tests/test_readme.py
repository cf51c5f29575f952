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

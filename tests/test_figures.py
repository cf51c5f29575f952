"""The gallery has a picture of every kind of figure, and its script draws them from small runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hesscond.report import FIGURES

FOLDER = Path(__file__).parents[1] / "figures"
SPEC = importlib.util.spec_from_file_location("gallery", FOLDER / "gallery.py")
assert SPEC is not None
gallery = importlib.util.module_from_spec(SPEC)
sys.modules["gallery"] = gallery
assert SPEC.loader is not None
SPEC.loader.exec_module(gallery)


def test_the_gallery_shows_every_kind_of_figure() -> None:
    assert set(gallery.ENTRIES) == {*FIGURES, "rate"}
    page = gallery.page()
    assert (FOLDER / "gallery" / "README.md").read_text(encoding="utf-8") == page
    shown = {path.stem for path in (FOLDER / "gallery").glob("*.png")}
    assert shown == set(re.findall(r"\]\((\S+)\.png\)", page))
    assert shown >= set(gallery.ENTRIES)


@pytest.mark.slow
def test_the_gallery_is_drawn_from_small_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "GALLERY", tmp_path)
    gallery.main([])
    assert {path.stem for path in tmp_path.glob("*.png")} == {*FIGURES, "rate"} - {"conditioning"}

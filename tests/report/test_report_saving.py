from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import hesscond
from hesscond.errors import ConfigError
from hesscond.report import conditioning_figure, save_figure
from hesscond.runs import StoredRun

MakeRun = Callable[..., StoredRun]


@pytest.fixture
def run(make_run: MakeRun) -> StoredRun:
    return make_run("bnp", unresolved=0.1)


@pytest.mark.slow
def test_pdf_embeds_truetype_and_is_small(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(method, iterations=4200, epochs=6, unresolved=0.1) for method in ("vanilla", "bnp")]
    save_figure(conditioning_figure(runs), tmp_path / "figure.pdf")
    content = (tmp_path / "figure.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(content) < 500_000
    streams = re.findall(rb"stream\r?\n(.*?)endstream", content, re.S)
    everything = content
    for stream in streams:
        try:
            everything += zlib.decompress(stream)
        except zlib.error:
            continue
    assert b"/FontFile2" in everything
    assert b"/Type3" not in everything
    assert b"/CreationDate" not in everything


def test_svg_keeps_text_as_text(run: StoredRun, tmp_path: Path) -> None:
    save_figure(conditioning_figure([run]), tmp_path / "figure.svg")
    content = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "test accuracy (%)</text>" in content
    assert "bnp-kappa-batch-median" in content


def test_png_has_print_resolution(run: StoredRun, tmp_path: Path) -> None:
    save_figure(conditioning_figure([run]), tmp_path / "figure.PNG")
    content = (tmp_path / "figure.PNG").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") >= 3.3 * 200


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png"])
def test_the_same_bytes_every_time(run: StoredRun, tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        save_figure(conditioning_figure([run]), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.tex"])
def test_other_file_types(run: StoredRun, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.pdf, \.png, \.svg"):
        save_figure(conditioning_figure([run]), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_folder_that_is_not_there(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(conditioning_figure([run]), tmp_path / "nowhere" / "figure.pdf")


def test_rc_parameters_stay_as_they_are(run: StoredRun, tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    save_figure(conditioning_figure([run]), tmp_path / "figure.pdf")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_the_report_never_imports_pyplot_and_the_engine_no_matplotlib() -> None:
    for module, unwanted in (("hesscond.report", "matplotlib.pyplot"), ("hesscond", "matplotlib")):
        code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, module


def test_figures_and_tables_need_no_torch_and_tables_no_matplotlib() -> None:
    code = """
import importlib, pathlib, pkgutil, sys, types
package = types.ModuleType("hesscond")
package.__path__ = [sys.argv[1]]
sys.modules["hesscond"] = package
import hesscond.report
for name in ("registry", "tables", "selection", "series", "palette", "summary", "statements", "sweeps", "page"):
    importlib.import_module(f"hesscond.report.{name}")
assert "matplotlib" not in sys.modules
for module in pkgutil.iter_modules(hesscond.report.__path__):
    importlib.import_module(f"hesscond.report.{module.name}")
assert "torch" not in sys.modules
assert "pandas" not in sys.modules
"""
    package = Path(hesscond.__file__).parent
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

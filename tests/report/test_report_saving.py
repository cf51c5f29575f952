import errno
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

import hesscond
from hesscond.errors import ConfigError
from hesscond.report import conditioning_figure, save_figure


@pytest.fixture
def run(make_run):
    return make_run("bnp", iterations=60, unresolved=0.1)


def test_svg_keeps_text_png_has_print_resolution_and_rc_parameters_stay(run, tmp_path):
    before = dict(matplotlib.rcParams)
    for name in ("figure.svg", "figure.PNG"):
        save_figure(conditioning_figure([run]), tmp_path / name)
    assert dict(matplotlib.rcParams) == before
    content = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "test accuracy (%)</text>" in content
    assert "bnp-kappa-batch-median" in content
    content = (tmp_path / "figure.PNG").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") >= 3.3 * 200


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.tex", "nowhere/figure.pdf"])
def test_files_that_cannot_be_written(run, tmp_path, name):
    words = "cannot be written" if "/" in name else r"must end in \.pdf, \.png, \.svg"
    with pytest.raises(ConfigError, match=words):
        save_figure(conditioning_figure([run]), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_full_disk_leaves_the_earlier_figure(run, tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    save_figure(conditioning_figure([run]), path)
    before = path.read_bytes()

    def full(self, name, **options):
        Path(name).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(ConfigError, match=r"figure\.png cannot be written: No space left on device"):
        save_figure(conditioning_figure([run]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.glob(".*")) == []


def test_sizes_are_those_of_the_options_then_of_the_user_then_of_the_page(run, tmp_path, call_cli):
    def sizes(figure):
        return {text.get_fontsize() for ax in figure.axes for text in (ax.xaxis.label, *ax.get_xticklabels())}

    assert sizes(conditioning_figure([run])) == {7.0, 6.5}
    with matplotlib.rc_context({"font.size": 14.0, "axes.linewidth": 2.0, "ytick.labelsize": 5}):
        figure = conditioning_figure([run])
        assert sizes(figure) == {14.0, 13.0}
        assert {spine.get_linewidth() for ax in figure.axes for spine in ax.spines.values()} == {2.0}
        assert {text.get_fontsize() for ax in figure.axes for text in ax.get_yticklabels()} == {5.0}
        done = call_cli("figure", "conditioning", run.folder, "-o", tmp_path / "a.svg", "--font-size", 8)
    assert done.code == 0, done.err
    text = (tmp_path / "a.svg").read_text()
    assert set(re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", text)) & {"8", "14"} == {"8"}
    assert call_cli("figure", "conditioning", run.folder, "-o", tmp_path / "a.png", "--size", "4x3").code == 0
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (1200, 900)
    for option, value in (("--size", "4by3"), ("--size", "0"), ("--size", "2x1"), ("--font-size", "0")):
        done = call_cli("figure", "conditioning", run.folder, "-o", tmp_path / "b.png", option, value)
        assert (done.code, option in done.err) == (2, True)


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png"])
def test_the_same_bytes_every_time(run, tmp_path, suffix):
    for name in ("one", "two"):
        save_figure(conditioning_figure([run]), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_figures_and_tables_need_no_torch_and_tables_no_matplotlib():
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

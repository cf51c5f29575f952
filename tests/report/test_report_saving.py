import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

import hesscond
from hesscond.errors import ConfigError
from hesscond.report import conditioning_figure, save_figure


@pytest.fixture
def run(make_run):
    return make_run("bnp", unresolved=0.1)


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


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png"])
def test_the_same_bytes_every_time(run, tmp_path, suffix):
    for name in ("one", "two"):
        save_figure(conditioning_figure([run]), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.slow
def test_the_report_never_imports_pyplot_and_the_engine_no_matplotlib():
    for module, unwanted in (("hesscond.report", "matplotlib.pyplot"), ("hesscond", "matplotlib")):
        code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, module


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

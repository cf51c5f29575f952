"""``hesscond report``: what it writes, and how it refuses."""

import pytest

from hesscond.report import registry
from tests.report_page import Page, logged, probe


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "FIGURES", {})
    return logged(tmp_path / "runs" / "bnp-seed0", probes=[probe(), probe()])


@pytest.mark.slow
def test_a_page_is_written_and_replaced(call_cli, run, tmp_path):
    result = call_cli("report", "runs")
    assert (result.code, result.out, result.err) == (0, "report.html\n", "")
    assert "<h1>fc-test: bnp</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    result = call_cli("report", run.folder, "-o", "other.htm", "--title", "For <you>")
    assert result.code == 0
    assert Page((tmp_path / "other.htm").read_text(encoding="utf-8")).inside("h1") == ["For <you>"]
    assert call_cli("report", "runs", "--title", "Again").code == 0
    assert "<h1>Again</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_of_two_studies_do_not_go_on_one_page(call_cli, run, tmp_path):
    other = logged(tmp_path / "runs" / "other", "vanilla")
    config = other.folder / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("fc-test", "fc-other"), encoding="utf-8")
    result = call_cli("report", "runs")
    assert result.code == 2
    assert "different studies" in result.err

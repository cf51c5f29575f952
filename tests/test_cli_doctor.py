"""The doctor: all well on a sound machine, and every fault that can be imitated is found and named."""

import json
import sqlite3
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from hesscond.cli import app
from hesscond.doctor import arithmetic, devices, examine, precision, storage, threads, versions
from hesscond.doctor.check import ok, run
from hesscond.errors import CorruptDataError


def test_all_is_well_here(tmp_path, monkeypatch):
    """In an own folder, on which nothing is left; global settings and random numbers stay as they were."""
    monkeypatch.chdir(tmp_path)
    state, seed = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    checks = list(examine(tmp_path / "runs"))
    assert [c for c in checks if c.status == "failed"] == []
    assert {c.group for c in checks} == {"versions", "threads", "devices", "arithmetic", "self-test", "data", "storage"}
    assert all(c.found and c.seconds >= 0 for c in checks)
    assert all(c.advice for c in checks if c.status != "ok")
    assert sum(c.seconds for c in checks) < 60
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == seed).all()  # noqa: NPY002


def invoked(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def quick(monkeypatch, *checks):
    """The command with these checks instead of the real ones."""
    monkeypatch.setattr("hesscond.commands.doctor.examine", lambda *_, **__: iter(checks))


def test_it_shows_groups_and_advice_and_counts(monkeypatch):
    found = list(
        run("threads", [("many", lambda: arithmetic.warning("8 of them", "take fewer")), ("few", lambda: ok("1"))])
    )
    quick(monkeypatch, *found)
    done = invoked()
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "threads"
    assert lines[1].split() == ["warning", "many", "8", "of", "them"]
    assert lines[2].strip() == "→ take fewer"
    assert lines[-1].startswith("1 ok, 1 warnings, 0 failed, in ")


def test_a_failed_check_is_exit_code_1(monkeypatch):
    def broken():
        raise RuntimeError("no\nluck")

    quick(monkeypatch, *run("group", [("name", broken), ("other", lambda: ok("there"))]))
    done = invoked("--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)
    assert (first["status"], first["found"]) == ("failed", "RuntimeError: no luck")
    assert (second["status"], second["name"], second["group"]) == ("ok", "other", "group")


# -- versions -----------------------------------------------------------------------------


def test_missing_and_old_packages():
    stated = [Requirement(text) for text in ("torch>=2", "numpy>=99", "no-such-package>=1", "scipy")]
    check = versions.required(stated)
    assert check.status == "failed"
    assert "numpy" in check.found
    assert "is not >=99" in check.found
    assert "no-such-package is missing" in check.found
    assert "torch" not in check.found
    assert (
        versions.required([r for r in stated if r.name in ("torch", "scipy")] + [Requirement("numpy")]).status == "ok"
    )


def test_extras_are_found_by_their_markers():
    texts = ['pyarrow>=14; extra == "parquet"', 'ruff>=0.6; extra == "dev"', "torch>=2", 'no-such>=1; extra == "more"']
    stated = [Requirement(text) for text in texts]
    assert versions.extras(stated) == ["more", "parquet"]
    assert [r.name for r in versions.wanted(stated, "more")] == ["no-such"]
    missing = versions.optional("more", versions.wanted(stated, "more"))
    assert (missing.status, missing.found) == ("ok", "no-such is missing")
    assert "hesscond[more]" in missing.advice


# -- threads and devices -----------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed", "status"), [(1, "warning"), (2, "ok"), (64, "ok")])
def test_more_threads_than_processors(allowed, status, monkeypatch):
    monkeypatch.setattr(threads, "processors", lambda: allowed)
    monkeypatch.setattr(threads, "threadpool_info", lambda: [{"num_threads": 1}])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    check = threads.oversubscription()
    assert check.status == status
    assert (f"OMP_NUM_THREADS={allowed}" in check.advice) == (status == "warning")


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1), ("?", 8)])
def test_the_quota_of_a_container_counts(text, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads.processors() == expected


def test_two_kinds_of_openmp(monkeypatch):
    both = [{"user_api": "openmp", "prefix": prefix} for prefix in ("libiomp", "libgomp")]
    monkeypatch.setattr(threads, "threadpool_info", lambda: both)
    assert threads.runtimes().status == "warning"
    monkeypatch.setattr(threads, "threadpool_info", lambda: both[1:])
    assert threads.runtimes().status == "ok"


def test_a_driver_without_a_torch_that_knows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    assert devices.no_gpu().status == "warning"
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    assert devices.no_gpu().status == "ok"


# -- arithmetic and the self-test -----------------------------------------------------------------------------


def test_flushed_denormals_are_noticed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert arithmetic.denormals().status == "warning"
    finally:
        torch.set_flush_denormal(False)
    assert arithmetic.denormals().status == "ok"


def test_fast_products_are_noticed():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert arithmetic.products().status == "warning"
    finally:
        torch.set_float32_matmul_precision(before)
    assert arithmetic.products().status == "ok"


@pytest.mark.parametrize("test", [precision.graded, precision.deficient, precision.indefinite])
@pytest.mark.parametrize("fault", ["value", "rank"])
def test_a_wrong_condition_number_is_noticed(test, fault, monkeypatch):
    right = precision.condition_number

    def wrong(*given, **named):
        found = right(*given, **named)
        # with bounds around it that still hold, or another rank
        facts = {name: getattr(found, name) for name in ("lower", "upper", "rank", "nullity", "negative", "resolved")}
        changed = {"value": found.value * (1 + 1e-8)} if fault == "value" else {"value": found.value, "rank": 6}
        return SimpleNamespace(**facts | changed)

    assert test().status == "ok"
    monkeypatch.setattr(precision, "condition_number", wrong)
    assert test().status == "failed"


def test_the_truths_of_the_self_test_are_true():
    """In exact rational arithmetic: HᵀH = 8 I, and all entries are dyadic, so that nothing was rounded."""
    sympy = pytest.importorskip("sympy")
    from scipy.linalg import hadamard

    H = sympy.Matrix(hadamard(8).tolist())
    assert sympy.eye(8) * 8 == H.T * H
    scaled = H * sympy.diag(*[sympy.Rational(1, 2**i) for i in range(8)])
    F = scaled.row_join(3 * scaled[:, 0])
    values = sorted((F.T * F).eigenvals())
    assert values[0] == 0
    assert values[-1] / values[1] == 10 * 4**7
    symmetric = H * sympy.diag(*[2**i for i in range(6)], -64, 0) * H.T / 8
    assert set(symmetric.eigenvals()) == {*(2**i for i in range(6)), -64, 0}


def test_a_wrong_hessian_and_an_unrepeatable_run_are_noticed(monkeypatch):
    right = precision.samples
    calls = iter(range(100))

    def shaken(count, dtype):
        x, y = right(count, dtype)
        return x + next(calls) * 1e-6, y

    assert precision.repeated().status == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(precision, "samples", shaken)
        assert precision.repeated().status == "failed"
    assert precision.unit_hessian().status == "ok"
    monkeypatch.setattr(precision, "probe", lambda model, loss, data, layers: {"0": wrong_hessians(model, loss, data)})
    assert precision.unit_hessian().status == "failed"


def wrong_hessians(model, loss, data):
    from hesscond import probe

    found = probe(model, loss, data, ["0"])["0"]
    return SimpleNamespace(hessian=lambda unit: found.hessian(unit) * (1 + 1e-9))


# -- data and storage -----------------------------------------------------------------------------


def test_a_data_folder_that_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "none"))
    assert storage.data_folder(None).status == "warning"
    assert storage.data_folder(tmp_path).status == "ok"
    monkeypatch.delenv(storage.ENVIRONMENT)
    assert storage.data_folder(None).status == "ok"


def test_data_sets_are_found_and_checked(tmp_path, monkeypatch):
    assert storage.data_set("mnist", tmp_path, True).found == "not here"

    class Found:
        def __init__(self, error):
            self.error = error

        def find(self, directory):
            return directory / "there"

        def verified_files(self, place):
            if self.error:
                raise self.error

    for error, status in ((None, "ok"), (CorruptDataError("not the published one"), "failed")):
        monkeypatch.setitem(storage.SOURCES, "mnist", Found(error))
        assert storage.data_set("mnist", tmp_path, True).status == status
        assert storage.data_set("mnist", tmp_path, False).status == "ok"


def test_a_folder_that_cannot_be_written_and_one_without_write_ahead_logs(tmp_path, monkeypatch):
    assert storage.sqlite_log(tmp_path / "not" / "yet").status == "ok"
    assert list(tmp_path.iterdir()) == []
    plain = sqlite3.connect

    class WithoutLog(sqlite3.Connection):
        def execute(self, statement, *given):
            return super().execute("PRAGMA journal_mode=DELETE" if "WAL" in statement else statement, *given)

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda file: plain(file, factory=WithoutLog))
        found = storage.sqlite_log(tmp_path)
        assert (found.status, "mode delete" in found.found) == ("failed", True)

    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryDirectory", refused)
    found = storage.sqlite_log(tmp_path)
    assert found.status == "failed"
    assert "Permission denied" in found.found
    assert "--out" in found.advice


@pytest.mark.parametrize(("free", "status"), [(2**20, "failed"), (2**29, "warning"), (2**33, "ok")])
def test_the_room_on_the_disk(free, status, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage(2**40, 0, free))
    assert storage.disk(tmp_path / "runs").status == status


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hesscond", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 failed" in done.stdout

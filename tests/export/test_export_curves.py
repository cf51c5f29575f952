"""Curves in TensorBoard files and in MLflow, read back with their own readers: the log, number by number."""

import math
import sqlite3
import threading
import warnings
from contextlib import closing

import pytest
import tomli_w

from hesscond.export import ScalarReader, TensorBoardFiles, transfer
from hesscond.runs import RunLog
from hesscond.study import open_run
from tests.runs.run_logs import CONFIG, row, written_run

# packages of others warn about each other
pytestmark = pytest.mark.filterwarnings("ignore")

KAPPA = [1 / 3 + 1, math.inf, None, 1.7976931348623157e308, 1e22 / 3]


@pytest.fixture
def log(tmp_path):
    """A run in which every table has rows, still written."""
    log = RunLog(tmp_path / "runs" / "one", CONFIG)
    for k in range(len(KAPPA)):
        add(log, k)
    log.commit(evaluation=[{"iteration": 0, "epoch": 0, "test_loss": 0.1 + 0.2, "test_accuracy": None}])
    yield log
    log._connection.close()


def add(log, k):
    log.training(k, 0, 1 / (k + 3))
    kappa = KAPPA[k % len(KAPPA)]
    log.commit(
        probe=[row(k, kappa=kappa, resolved=kappa != math.inf), row(k, data="train", unit=0, kappa_D=2.5 + k)],
        readings=[row(k, coordinates="projected", kappa=1 / (k + 7))],
        statements=[row(k, statement="s-1", claim="bound", known=1, status="holds", used=k / 7)],
    )


def logged(folder):
    """What is to be found, by name: (iteration, value), straight from the log."""
    found = {}
    with closing(sqlite3.connect(f"{folder.as_uri()}/run.sqlite?mode=ro", uri=True)) as connection:
        for name, query in {
            "loss/train": "SELECT iteration, loss FROM training",
            "loss/test": "SELECT iteration, test_loss FROM evaluation",
            "kappa/batch/fc2.3": "SELECT iteration, kappa FROM probe WHERE data = 'batch'",
            "resolved/batch/fc2.3": "SELECT iteration, resolved FROM probe WHERE data = 'batch'",
            "kappa_D/train/fc2.0": "SELECT iteration, kappa_D FROM probe WHERE data = 'train'",
            "kappa in projected/batch/fc2.3": "SELECT iteration, kappa FROM readings",
            "used by s-1 bound/batch/fc2.3": "SELECT iteration, used FROM statements",
        }.items():
            found[name] = [(k, v) for k, v in connection.execute(query) if v is not None]
    return found


def test_all_numbers_have_a_name_and_a_time(log):
    points = ScalarReader(open_run(log.folder)).new()
    curves = {}
    for point in points:
        curves.setdefault(point.name, []).append((point.iteration, point.value))
    assert curves == logged(log.folder)
    times = [point.time for point in points]
    assert times == sorted(times)
    assert 0 <= times[-1] - times[0] < 600


def test_a_reader_goes_on_where_it_was(log):
    reader = ScalarReader(open_run(log.folder))
    first = reader.new()
    assert reader.new() == []
    add(log, len(KAPPA))
    later = reader.new()
    assert {point.iteration for point in later} == {len(KAPPA)}
    again = ScalarReader(open_run(log.folder)).new()
    assert sorted(map(repr, ((p.name, p.iteration, p.value) for p in again))) == sorted(
        map(repr, ((p.name, p.iteration, p.value) for p in first + later))
    )


def event_accumulator(folder):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard (extra 'tensorboard')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def curves_in(folder):
    """Curves of event files: (step, value) by tag."""
    accumulator = event_accumulator(folder)
    from tensorboard.util.tensor_util import make_ndarray

    tags = [tag for tag in accumulator.Tags()["tensors"] if "text_summary" not in tag]
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in accumulator.Tensors(tag)]
        for tag in tags
    }


def test_tensorboard_files_hold_the_log(log, tmp_path, call_cli):
    event_accumulator(tmp_path)
    log.close("finished")
    result = call_cli("export", log.folder, "--format", "tensorboard", "-o", tmp_path / "tb")
    assert (result.code, result.err) == (0, "")
    assert curves_in(tmp_path / "tb") == logged(log.folder)
    accumulator = event_accumulator(tmp_path / "tb")
    (text,) = accumulator.Tensors("config/text_summary")
    assert tomli_w.dumps(CONFIG) in text.tensor_proto.string_val[0].decode()
    again = call_cli("export", log.folder, "--format", "tensorboard", "-o", tmp_path / "tb")
    assert again.code == 2
    assert "holds TensorBoard files already" in again.err


def test_tensorboard_folders_of_several_runs(log, tmp_path, call_cli):
    event_accumulator(tmp_path)
    log.close("finished")
    written_run(tmp_path / "runs" / "other", iterations=6)
    result = call_cli("export", tmp_path / "runs", "--format", "tensorboard", "-o", tmp_path / "tb")
    assert (result.code, result.err) == (0, "")
    assert curves_in(tmp_path / "tb" / "one") == logged(log.folder)
    assert curves_in(tmp_path / "tb" / "other")["kappa/batch/fc2.3"] == [(k, 10.0**k) for k in range(6)]


def test_a_run_is_followed_to_its_end(log, tmp_path):
    """Each look takes what came since the one before; the end is taken too."""
    event_accumulator(tmp_path)
    steps = iter(range(len(KAPPA), len(KAPPA) + 3))
    seen = []

    def wait(seconds):
        seen.append(len(curves_in(tmp_path / "tb")["loss/train"]))
        k = next(steps, None)
        add(log, k) if k is not None else log.close("finished")

    transfer([open_run(log.folder)], lambda run: TensorBoardFiles(tmp_path / "tb", run), follow=True, wait=wait)
    assert seen == [5, 6, 7, 8]
    assert curves_in(tmp_path / "tb") == logged(log.folder)


@pytest.fixture(params=["folder", "sqlite", "file"])
def mlflow_store(request, tmp_path, monkeypatch):
    """A store, and a client that reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow (extra 'mlflow')")
    monkeypatch.chdir(tmp_path)
    # MLflow's own file store, which it no longer develops
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store, tracking = {
        "folder": ("mine", f"sqlite:///{tmp_path}/mine/mlflow.db"),
        "sqlite": (f"sqlite:///{tmp_path}/ml.db",) * 2,
        "file": (f"file://{tmp_path}/mlruns",) * 2,
    }[request.param]
    return store, lambda: mlflow.MlflowClient(tracking, registry_uri=tracking)


def runs_in(client):
    (experiment,) = [e for e in client.search_experiments() if e.name == CONFIG["name"]]
    return client.search_runs([experiment.experiment_id])


def histories(client, run, names):
    return {
        name: sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))
        for name in names
    }


def test_mlflow_holds_the_log(log, call_cli, mlflow_store):
    store, client_of = mlflow_store
    (log.folder / "picture.png").write_bytes(b"\x89PNG")
    log.close("diverged")
    result = call_cli("export", log.folder, "--format", "mlflow", "-o", store)
    assert (result.code, result.err) == (0, "")
    client = client_of()
    (run,) = runs_in(client)
    finite = {name: [(k, v) for k, v in curve if v != math.inf] for name, curve in logged(log.folder).items()}
    assert histories(client, run, finite) == finite
    assert set(run.data.metrics) == set(finite)
    assert run.data.params["training.batch_size"] == "60"
    assert run.data.params["probe.layers"] == '["fc2"]'
    assert (run.info.status, run.info.run_name) == ("FAILED", "bnp-seed4")
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id)) == [
        "config.toml",
        "picture.png",
        "run.sqlite",
    ]
    fetched = client.download_artifacts(run.info.run_id, "run.sqlite")
    with closing(sqlite3.connect(fetched)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM training").fetchone() == (len(KAPPA),)


def test_mlflow_that_cannot_be_reached(log, call_cli, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow (extra 'mlflow')")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    for store in ("http://127.0.0.1:9", "nonsense://x"):
        result = call_cli("export", log.folder, "--format", "mlflow", "-o", store)
        assert (result.code, result.out) == (2, ""), result.err
        assert f"error: MLflow at {store}: " in result.err.splitlines()[-1]


def test_several_processes_of_readers_do_not_disturb_the_writer(log):
    """The log is written while it is read by others, row by row."""
    stop, problems = threading.Event(), []

    def read():
        try:
            reader, names = ScalarReader(open_run(log.folder)), []
            while not stop.is_set():
                names += [(p.name, p.iteration) for p in reader.new()]
            assert len(set(names)) == len(names)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for k in range(len(KAPPA), 120):
        add(log, k)
    stop.set()
    for thread in threads:
        thread.join()
    log.close("finished")
    assert problems == []
    assert open_run(log.folder).iterations == 120

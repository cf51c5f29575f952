"""Runs in MLflow: parameters, metrics with their histories, and files."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from hesscond.errors import ConfigError
from hesscond.export.curves import Scalar, flat
from hesscond.runs import LOG, StoredRun, moment, reading

#: Most entries that MLflow takes in one request, and most characters of a parameter's value.
LARGEST_BATCH, LONGEST_VALUE = 1000, 500
#: Endings of the files next to the log that are added.
PICTURES = (".png", ".pdf", ".svg", ".html")
#: Characters that MLflow does not allow in names.
FORBIDDEN = re.compile(r"[^\w/. :-]")
#: Tags that identify a run, and that say up to where it was taken.
IDENTITY, CURSOR = "hesscond.run", "hesscond.cursor."
#: MLflow's names of the statuses of a run.
STATUS = {"finished": "FINISHED", "diverged": "FAILED", "failed": "FAILED", "running": "RUNNING"}


class MLflowStore:
    """Sink that brings a run to MLflow.

    The experiment is the study, the run METHOD-seedS. A run that MLflow has already is continued: nothing is written
    twice. An unresolved κ has no point, as MLflow's databases turn infinity into the largest number there is; its
    ``kappa_lower`` and ``resolved`` have points. At the end config.toml, the log and the pictures next to it are added.

    Parameters
    ----------
    store
        A tracking URI (``sqlite:///mlflow.db``, ``http://…``), or a folder, in which mlflow.db and the files then lie.
    run
        The run.

    Raises
    ------
    ConfigError
        The package mlflow is not installed, or the store refuses.
    """

    def __init__(self, store: str, run: StoredRun) -> None:
        # a converter sends nothing to anybody else
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
        except ImportError:
            raise ConfigError("MLflow is not installed: pip install mlflow (extra 'mlflow')") from None
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._mlflow = mlflow
        self._store = store
        with self._refusals():
            tracking, artifacts = addresses(store)
            self._client = mlflow.MlflowClient(tracking, registry_uri=tracking)
            self._id, tags = self._run(run, artifacts)
        self._cursors = {k.removeprefix(CURSOR): int(v) for k, v in tags.items() if k.startswith(CURSOR)}

    def _run(self, run: StoredRun, artifacts: str | None) -> tuple[str, Mapping[str, str]]:
        """Identifier and tags of the run in MLflow, which is created if it is not there."""
        name = str(run.config["name"])
        experiment = self._client.get_experiment_by_name(name)
        number = (
            self._client.create_experiment(name, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        identity = hashlib.sha256(
            (run.folder / "config.toml").read_bytes() + run.facts.get("started", "").encode()
        ).hexdigest()
        found = self._client.search_runs([number], filter_string=f"tags.`{IDENTITY}` = '{identity}'")
        if found:
            return found[0].info.run_id, found[0].data.tags
        started = moment(run.facts.get("started", ""))
        tags = {IDENTITY: identity, "hesscond.folder": str(run.folder.absolute())}
        made = self._client.create_run(
            number, start_time=None if started is None else int(1000 * started), tags=tags, run_name=run.label
        )
        parameters = [
            self._mlflow.entities.Param(allowed(key), shown)
            for key, value in flat(run.config).items()
            if (shown := str(value)[:LONGEST_VALUE])
        ]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + 100])
        return made.info.run_id, {}

    def cursors(self) -> Mapping[str, int]:
        """Positions up to which the run has been taken before."""
        return self._cursors

    def write(self, points: Sequence[Scalar], cursors: Mapping[str, int]) -> None:
        """Log points as metrics."""
        entities = self._mlflow.entities
        metrics = [
            entities.Metric(allowed(point.name), point.value, int(1000 * point.time), point.iteration)
            for point in points
            if math.isfinite(point.value)
        ]
        tags = [entities.RunTag(CURSOR + table, str(number)) for table, number in cursors.items()]
        with self._refusals():
            for start in range(0, len(metrics), LARGEST_BATCH):
                self._client.log_batch(self._id, metrics=metrics[start : start + LARGEST_BATCH])
            if points:
                self._client.log_batch(self._id, tags=tags)

    def close(self, run: StoredRun) -> None:
        """Add the files, and set the status with which the run ended."""
        with self._refusals(), tempfile.TemporaryDirectory(prefix="hesscond-") as folder:
            log = Path(folder) / LOG
            with closing(sqlite3.connect(log)) as copy, reading(run.folder) as connection:
                connection.backup(copy)
            drawn = sorted(path for path in run.folder.iterdir() if path.suffix in PICTURES and path.is_file())
            for path in (run.folder / "config.toml", log, *drawn):
                self._client.log_artifact(self._id, str(path))
            ended = moment(run.facts.get("ended", ""))
            self._client.set_terminated(
                self._id, STATUS.get(run.status, "KILLED"), None if ended is None else int(1000 * ended)
            )

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors of MLflow into a ConfigError of one sentence."""
        try:
            yield
        except (self._mlflow.exceptions.MlflowException, OSError, sqlite3.Error) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(f"MLflow at {self._store}: {reason}") from None


def addresses(store: str) -> tuple[str, str | None]:
    """Tracking URI, and the place for files where MLflow's own choice is not taken.

    Examples
    --------
    >>> addresses("http://localhost:5000")
    ('http://localhost:5000', None)
    """
    if "://" in store or store == "databricks":
        return store, None
    folder = Path(store).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def allowed(name: str) -> str:
    """A name that MLflow takes.

    Examples
    --------
    >>> allowed("kappa in P = U D/batch/fc3.3")
    'kappa in P - U D/batch/fc3.3'
    """
    return FORBIDDEN.sub("-", name)

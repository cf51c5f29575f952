"""Runs in MLflow: parameters, metrics with their histories, and files."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hesscond.errors import ConfigError
from hesscond.export.curves import Scalar
from hesscond.runs import LOG, StoredRun

#: Most metrics and parameters that MLflow takes in one request, and most characters of a parameter's value.
METRICS, PARAMETERS, LONGEST_VALUE = 1000, 100, 500
#: Endings of the files next to the log that are added.
PICTURES = (".png", ".pdf", ".svg", ".html")
#: Characters that MLflow does not allow in names.
FORBIDDEN = re.compile(r"[^\w/. :-]")
#: MLflow's names of the statuses of a run.
STATUS = {"finished": "FINISHED", "diverged": "FAILED", "failed": "FAILED", "running": "RUNNING"}


class MLflowRun:
    """Writer of a run into a new run METHOD-seedS of MLflow, in the experiment called like the study.

    ``store`` is a tracking URI (``sqlite:///mlflow.db``, ``http://…``), or a folder, in which mlflow.db and the files
    then lie. An unresolved κ has no point, as MLflow's databases turn infinity into the largest number there is; its
    ``kappa_lower`` and ``resolved`` have points. At the end config.toml, the log and the pictures next to it are added.
    """

    def __init__(self, store: str, run: StoredRun) -> None:
        # a converter sends nothing to anybody else
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
        except ImportError:
            raise ConfigError("MLflow is not installed: pip install mlflow (extra 'mlflow')") from None
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._mlflow, self._store = mlflow, store
        with self._refusals():
            tracking, artifacts = addresses(store)
            self._client = mlflow.MlflowClient(tracking, registry_uri=tracking)
            name = str(run.config["name"])
            there = self._client.get_experiment_by_name(name)
            experiment = there.experiment_id if there else self._client.create_experiment(name, artifacts)
            tags = {"hesscond.folder": str(run.folder.absolute())}
            self._id = self._client.create_run(experiment, run_name=run.label, tags=tags).info.run_id
            parameters = [mlflow.entities.Param(allowed(key), value) for key, value in flat(run.config).items()]
            for start in range(0, len(parameters), PARAMETERS):
                self._client.log_batch(self._id, params=parameters[start : start + PARAMETERS])

    def write(self, points: Sequence[Scalar]) -> None:
        """Write points as metrics."""
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(allowed(point.name), point.value, int(1000 * point.time), point.iteration)
            for point in points
            if math.isfinite(point.value)
        ]
        with self._refusals():
            for start in range(0, len(metrics), METRICS):
                self._client.log_batch(self._id, metrics=metrics[start : start + METRICS])

    def close(self, run: StoredRun) -> None:
        """Add the files, and set the status with which the run ended."""
        drawn = sorted(path for path in run.folder.iterdir() if path.suffix in PICTURES and path.is_file())
        with self._refusals():
            for path in (run.folder / "config.toml", run.folder / LOG, *drawn):
                self._client.log_artifact(self._id, str(path))
            self._client.set_terminated(self._id, STATUS.get(run.status, "KILLED"))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors of MLflow into a ConfigError of one sentence."""
        try:
            yield
        except (self._mlflow.exceptions.MlflowException, OSError) as error:
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


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted names with values as MLflow takes them; values that are no numbers or texts as JSON.

    Examples
    --------
    >>> flat({"name": "mine", "model": {"hidden": [8, 8]}})
    {'name': 'mine', 'model.hidden': '[8, 8]'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": own for name, own in flat(value).items()}
        else:
            text = str(value) if isinstance(value, (str, int, float)) else json.dumps(value, default=str)
            found |= {key: text[:LONGEST_VALUE]} if text else {}
    return found


def allowed(name: str) -> str:
    """A name that MLflow takes.

    Examples
    --------
    >>> allowed("kappa in P = U D/batch/fc3.3")
    'kappa in P - U D/batch/fc3.3'
    """
    return FORBIDDEN.sub("-", name)

"""Runs where people look for them: tables as CSV, JSON and Parquet; curves in TensorBoard and MLflow.

Each sink takes what `scalars` reads of a run, once or as it comes. Their packages are imported when they are used.
"""

from hesscond.export.mlflow_store import MLflowStore
from hesscond.export.scalars import Scalar, ScalarReader
from hesscond.export.sink import Sink, transfer
from hesscond.export.tables import FORMATS, joint_table, json_rows, write_table
from hesscond.export.tensorboard import TensorBoardFiles

__all__ = [
    "FORMATS",
    "MLflowStore",
    "Scalar",
    "ScalarReader",
    "Sink",
    "TensorBoardFiles",
    "joint_table",
    "json_rows",
    "transfer",
    "write_table",
]

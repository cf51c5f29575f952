"""Runs where people look for them: tables as CSV, JSON and Parquet; curves in TensorBoard and MLflow.

A sink takes what `curves` reads of a run, once or as it comes. Their packages are imported when they are used.
"""

from hesscond.export.curves import Scalar, ScalarReader, Sink, transfer
from hesscond.export.mlflow import MLflowStore
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

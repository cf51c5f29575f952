"""Export of runs: tables as CSV, JSON and Parquet; curves to TensorBoard and MLflow.

A sink receives what `curves` reads of a run, once or as it is logged. Optional packages are imported when used.
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

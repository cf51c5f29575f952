"""Export of runs: tables as CSV, JSON and Parquet; curves to TensorBoard and MLflow.

A writer receives what `curves` reads of a run, once or as it is logged. Optional packages are imported when used.
"""

from hesscond.export.curves import CurveWriter, Scalar, ScalarReader, transfer
from hesscond.export.mlflow import MLflowRun
from hesscond.export.tables import FORMATS, joint_table, json_rows, write_table
from hesscond.export.tensorboard import TensorBoardFiles

__all__ = [
    "FORMATS",
    "CurveWriter",
    "MLflowRun",
    "Scalar",
    "ScalarReader",
    "TensorBoardFiles",
    "joint_table",
    "json_rows",
    "transfer",
    "write_table",
]

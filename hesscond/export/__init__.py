"""Export of runs: tables as CSV, JSON and Parquet. Optional packages are imported when used."""

from hesscond.export.tables import FORMATS, joint_table, json_rows, write_table

__all__ = ["FORMATS", "joint_table", "json_rows", "write_table"]

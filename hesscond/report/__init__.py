"""Figures and tables from stored runs only: nothing here trains, probes or writes into a run folder.

`selection` picks the rows, `series` turns them into curves, the rest draws or prints; a new figure or table
is a new module. This is the only place that imports matplotlib, and it never imports pyplot.
"""

from hesscond.report.conditioning import conditioning_figure
from hesscond.report.palette import method_colors
from hesscond.report.saving import save_figure
from hesscond.report.summary import summary_frame, summary_table

__all__ = ["conditioning_figure", "method_colors", "save_figure", "summary_frame", "summary_table"]

"""Figures and tables from stored runs and from what a probe found: nothing here trains, probes or writes into a
run folder.

`selection` picks the rows of stored runs, `series` turns them into curves, `probed_table` sums up a probe; the rest
draws or prints; a new figure or table is a new module. This is the only place that imports matplotlib, and it never
imports pyplot.
"""

from hesscond.report.comparison import comparison_frame, comparison_table
from hesscond.report.conditioning import conditioning_figure
from hesscond.report.density import density_figure
from hesscond.report.gain import gain_figure
from hesscond.report.html import write_report
from hesscond.report.margins import margin_figure
from hesscond.report.page import COLUMN, Page, venue_page, venues
from hesscond.report.palette import method_colors
from hesscond.report.probed import probe_figure
from hesscond.report.probed_table import layer_frame, layer_table, network_table, notes, unit_table
from hesscond.report.registry import FIGURES, TABLES
from hesscond.report.rounding import rounded_probes, rounding_note
from hesscond.report.saving import save_figure
from hesscond.report.statements import statement_frame, statement_table
from hesscond.report.summary import summary_frame, summary_table

__all__ = [
    "COLUMN",
    "FIGURES",
    "TABLES",
    "Page",
    "comparison_frame",
    "comparison_table",
    "conditioning_figure",
    "density_figure",
    "gain_figure",
    "layer_frame",
    "layer_table",
    "margin_figure",
    "method_colors",
    "network_table",
    "notes",
    "probe_figure",
    "rounded_probes",
    "rounding_note",
    "save_figure",
    "statement_frame",
    "statement_table",
    "summary_frame",
    "summary_table",
    "unit_table",
    "venue_page",
    "venues",
    "write_report",
]

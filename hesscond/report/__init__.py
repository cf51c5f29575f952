"""Figures and tables from stored runs and from what a probe found: nothing here trains, probes or writes into a
run folder.

`registry` lists the figures and tables, which is all that the commands and the HTML report know of them; `selection`
and `groups` pick the rows of stored runs, `series` turns them into curves, `page` and `palette` say how they look,
`writing` how tables are written. A new figure or table is a new module, and an entry in `registry`. This is the only
place that imports matplotlib, and it never imports pyplot.
"""

from hesscond.report.comparison import comparison_frame, comparison_table
from hesscond.report.conditioning import conditioning_figure
from hesscond.report.density import density_figure
from hesscond.report.eigenvalues import eigenvalue_figure
from hesscond.report.gain import gain_figure
from hesscond.report.heatmap import heatmap_figure
from hesscond.report.html import write_report
from hesscond.report.layers import layers_figure
from hesscond.report.margins import margin_figure, stored_margin_figure
from hesscond.report.page import COLUMN, Page, venue_page, venues
from hesscond.report.palette import method_colors, method_looks
from hesscond.report.panels import accuracy_axes, gain_axes, layer_axes, loss_axes, method_legend
from hesscond.report.probed import probe_figure
from hesscond.report.probed_table import layer_frame, layer_table, network_table, notes, unit_table
from hesscond.report.rates import rate_figure, rate_trials
from hesscond.report.registry import FIGURES, TABLES
from hesscond.report.rounding import rounded_probes, rounding_note
from hesscond.report.saving import save_figure
from hesscond.report.side_by_side import comparison_figure
from hesscond.report.statements import statement_frame, statement_table
from hesscond.report.summary import summary_frame, summary_table
from hesscond.report.timing import timing_figure
from hesscond.report.training import training_figure

__all__ = [
    "COLUMN",
    "FIGURES",
    "TABLES",
    "Page",
    "accuracy_axes",
    "comparison_figure",
    "comparison_frame",
    "comparison_table",
    "conditioning_figure",
    "density_figure",
    "eigenvalue_figure",
    "gain_axes",
    "gain_figure",
    "heatmap_figure",
    "layer_axes",
    "layer_frame",
    "layer_table",
    "layers_figure",
    "loss_axes",
    "margin_figure",
    "method_colors",
    "method_legend",
    "method_looks",
    "network_table",
    "notes",
    "probe_figure",
    "rate_figure",
    "rate_trials",
    "rounded_probes",
    "rounding_note",
    "save_figure",
    "statement_frame",
    "statement_table",
    "stored_margin_figure",
    "summary_frame",
    "summary_table",
    "timing_figure",
    "training_figure",
    "unit_table",
    "venue_page",
    "venues",
    "write_report",
]

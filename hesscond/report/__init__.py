"""Figures and tables from stored runs and from what a probe found: nothing here trains, probes or writes into a run
folder.

`registry` lists the figures and tables, and says how to add one; the commands and the HTML report use this list only.
Names are imported from their modules when they are used: drawing needs matplotlib, tables do not, and only figures of
other things than stored runs need torch.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.report.curves import (
        accuracy_axes,
        conditioning_figure,
        eigenvalue_figure,
        loss_axes,
        training_figure,
    )
    from hesscond.report.equal_loss import equal_loss_figure
    from hesscond.report.html_report import write_report
    from hesscond.report.layers import bands_figure, heatmap_figure, layer_axes
    from hesscond.report.margins import (
        margin_figure,
        rate_figure,
        rate_trials,
    )
    from hesscond.report.page import COLUMN, Page, save_figure, venue_page, venues
    from hesscond.report.palette import method_colors, method_looks
    from hesscond.report.plotting import method_legend
    from hesscond.report.probed import probe_figure
    from hesscond.report.registry import FIGURES, TABLES, FigureKind, TableKind
    from hesscond.report.series import rounding_note
    from hesscond.report.statements import statement_frame
    from hesscond.report.summary import summary_frame, summary_table
    from hesscond.report.verdict import verdict_frame, verdict_sentences
else:
    __getattr__, __dir__ = attach(__name__)

__all__ = [
    "COLUMN",
    "FIGURES",
    "TABLES",
    "FigureKind",
    "Page",
    "TableKind",
    "accuracy_axes",
    "bands_figure",
    "conditioning_figure",
    "eigenvalue_figure",
    "equal_loss_figure",
    "heatmap_figure",
    "layer_axes",
    "loss_axes",
    "margin_figure",
    "method_colors",
    "method_legend",
    "method_looks",
    "probe_figure",
    "rate_figure",
    "rate_trials",
    "rounding_note",
    "save_figure",
    "statement_frame",
    "summary_frame",
    "summary_table",
    "training_figure",
    "venue_page",
    "venues",
    "verdict_frame",
    "verdict_sentences",
    "write_report",
]

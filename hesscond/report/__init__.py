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
        accuracy_axes as accuracy_axes,
        conditioning_figure as conditioning_figure,
        eigenvalue_figure as eigenvalue_figure,
        loss_axes as loss_axes,
        training_figure as training_figure,
    )
    from hesscond.report.equal_loss import equal_loss_figure as equal_loss_figure
    from hesscond.report.html_report import write_report as write_report
    from hesscond.report.layers import (
        bands_figure as bands_figure,
        heatmap_figure as heatmap_figure,
        layer_axes as layer_axes,
    )
    from hesscond.report.margins import (
        margin_figure as margin_figure,
        rate_figure as rate_figure,
        rate_trials as rate_trials,
    )
    from hesscond.report.page import (
        COLUMN as COLUMN,
        Page as Page,
        save_figure as save_figure,
        venue_page as venue_page,
        venues as venues,
    )
    from hesscond.report.palette import method_colors as method_colors, method_looks as method_looks
    from hesscond.report.plotting import method_legend as method_legend
    from hesscond.report.probed import probe_figure as probe_figure
    from hesscond.report.registry import (
        FIGURES as FIGURES,
        TABLES as TABLES,
        FigureKind as FigureKind,
        TableKind as TableKind,
    )
    from hesscond.report.series import rounding_note as rounding_note
    from hesscond.report.statements import statement_frame as statement_frame
    from hesscond.report.summary import summary_frame as summary_frame, summary_table as summary_table
    from hesscond.report.verdict import verdict_frame as verdict_frame, verdict_sentences as verdict_sentences
else:
    __getattr__, __dir__, __all__ = attach(__name__)

"""The figures and tables that there are. A new one is a module of its own, and an entry here."""

from __future__ import annotations

from hesscond.report import learning_rates, seeds, statements, summary
from hesscond.report.conditioning import conditioning_figure
from hesscond.report.eigenvalues import eigenvalue_figure, eigenvalues_logged
from hesscond.report.gain import gain_figure
from hesscond.report.heatmap import cells_of, heatmap_figure
from hesscond.report.kinds import FigureKind, TableKind
from hesscond.report.layer_kappas import CAPTION as LAYERS
from hesscond.report.layer_kappas import layer_kappa_columns, layer_kappa_frame
from hesscond.report.layers import layers_figure, probed_layers
from hesscond.report.margins import stored_margin_figure, stored_tallies
from hesscond.report.selection import by_method, select
from hesscond.report.side_by_side import comparison_figure, comparison_points
from hesscond.report.timing import iteration_times, timing_figure
from hesscond.report.training import trained_groups, training_figure

UNIT = ("layer", "unit")
STUDY = "runs of one study"
PROBED = "runs of one study that were probed"

FIGURES: dict[str, FigureKind] = {
    kind.name: kind
    for kind in (
        FigureKind(
            "conditioning",
            "training loss, κ(H) against κ(PᵀHP), and κ(D) of one unit along training",
            "runs of one study with one learning rate a method",
            conditioning_figure,
            by_method,
            UNIT,
        ),
        FigureKind(
            "training",
            "training and test loss, and test accuracy, the mean over seeds in a band from the lowest to the highest",
            STUDY,
            training_figure,
            trained_groups,
        ),
        FigureKind(
            "layers",
            "violins of κ over the units of each layer, in each method's coordinates, along training",
            PROBED,
            layers_figure,
            probed_layers,
            ("layer",),
        ),
        FigureKind(
            "heatmap",
            "log10 κ of every probed unit at every iteration, a panel a method",
            "runs of one study that were probed at two units or more",
            heatmap_figure,
            cells_of,
        ),
        FigureKind(
            "gain",
            "the gain κ(H)/κ(PᵀHP) of preconditioning against κ(D)², which it is expected to be about",
            PROBED,
            gain_figure,
            select,
            UNIT,
        ),
        FigureKind(
            "spectra",
            "largest and smallest nonzero eigenvalue of a unit's Hessian, and its rank, along training",
            PROBED,
            eigenvalue_figure,
            eigenvalues_logged,
            UNIT,
        ),
        FigureKind(
            "comparison",
            "final loss and accuracy of each method against the median κ in its coordinates",
            PROBED,
            comparison_figure,
            comparison_points,
            UNIT,
        ),
        FigureKind(
            "timing",
            "what an iteration of each method costs",
            "runs of one study; those of hesscond compare have times relative to vanilla",
            timing_figure,
            iteration_times,
        ),
        FigureKind(
            "margins",
            "how much of what each claim of the checked statements allows was used along the runs",
            "runs with --statement",
            stored_margin_figure,
            stored_tallies,
        ),
    )
}

TABLES: dict[str, TableKind] = {
    kind.name: kind
    for kind in (
        TableKind(
            "summary",
            "a row for each run: loss, accuracy, κ, time, statements held",
            STUDY,
            summary.summary_frame,
            summary.summary_columns,
            summary.SUMMARY_CAPTION,
            UNIT,
            terminal=summary.summary_table,
        ),
        TableKind(
            "seeds",
            "a row for each method: mean and range over its seeds",
            STUDY,
            seeds.seed_frame,
            seeds.seed_columns,
            seeds.CAPTION,
            UNIT,
        ),
        TableKind(
            "learning-rates",
            "a row for each method, a column for each learning rate: the final loss, the best marked",
            "runs of one study at several learning rates",
            learning_rates.rate_grid_frame,
            learning_rates.rate_grid_columns,
            learning_rates.CAPTION,
            rows=learning_rates.rate_grid_rows,
        ),
        TableKind(
            "layers",
            "a row for each method and layer: quantiles of κ in the method's coordinates",
            PROBED,
            layer_kappa_frame,
            layer_kappa_columns,
            LAYERS,
        ),
        TableKind(
            "statements",
            "a row for each claim that was checked along a run: how often it held, by what margin",
            "runs with --statement",
            statements.checked_statements,
            statements.statement_columns,
            statements.CAPTION,
        ),
    )
}

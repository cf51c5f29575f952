"""Figures and tables from stored runs and from what a probe found: nothing here trains, probes or writes into a run
folder.

`registry` lists the figures and tables, and says how to add one; the commands and the HTML report use this list only.
Names are imported from their modules when they are used: drawing needs matplotlib, tables do not, and only figures of
other things than stored runs need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hesscond.errors import GONE

_HOMES = {
    # results need them as well
    ".result_tables": ("layer_frame", "layer_table", "network_table", "notes", "unit_table"),
    "axes": ("method_legend",),
    "blocks": ("bands_figure", "block_frame", "blocks_figure"),
    "conditioning": ("conditioning_figure",),
    "density": ("density_figure",),
    "eigenvalues": ("eigenvalue_figure",),
    "equal_loss": ("equal_loss_figure",),
    "gain": ("gain_axes", "gain_figure"),
    "html_report": ("write_report",),
    "layers": ("heatmap_figure", "layer_axes", "layers_figure"),
    "margins": ("margin_figure", "rate_figure", "rate_trials", "stored_margin_figure"),
    "page": ("COLUMN", "Page", "save_figure", "venue_page", "venues"),
    "palette": ("method_colors", "method_looks"),
    "probed": ("probe_figure",),
    "registry": ("FIGURES", "TABLES"),
    "series": ("rounded_probes", "rounding_note"),
    "statements": ("statement_frame", "statement_table"),
    "summary": ("summary_frame", "summary_table", "whole_summary_table"),
    "sweeps": ("best_frame", "best_table", "cells_frame", "comparison_frame", "comparison_table", "sweep_frame"),
    "verdict": ("verdict_frame", "verdict_sentences"),
    "training": ("accuracy_axes", "loss_axes", "training_figure"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        gone = f": it is gone, {GONE[name]}" if name in GONE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{gone}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)

"""Methods side by side, one row each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from hesscond.report.summary import kappa_cell, number, summary_frame

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.study.comparison import Compared

#: What is taken over from the summary of a run, and what it is called in the comparison.
COLUMNS = {
    "training_loss_tail_mean": "loss",
    "test_accuracy": "test_accuracy",
    "batch_probes": "probes",
    "batch_kappa_own": "kappa_own",
    "batch_kappa_own_unresolved": "kappa_own_unresolved",
    "batch_kappa_own_lower": "kappa_own_lower",
    "batch_kappa": "kappa",
    "batch_kappa_unresolved": "kappa_unresolved",
    "batch_kappa_lower": "kappa_lower",
}


def comparison_frame(compared: Sequence[Compared]) -> pd.DataFrame:
    """One row per method, in the order given.

    Parameters
    ----------
    compared
        Of one study.

    Returns
    -------
    pandas.DataFrame
        method, learning_rate (NaN if none worked), at_edge of the grid; loss: training, mean of the last iterations;
        test_accuracy; kappa_own: median over the probed iterations of κ in the method's own coordinates, kappa: in the
        plain ones of the network as it is built, each of the resolved ones only, with how many were not and their
        median lower bound; coordinates: the own ones' name; time: of an iteration, relative to vanilla; refusal: why
        there is nothing else.
    """
    import pandas as pd

    rows = []
    for one in compared:
        row = {"method": one.method, "learning_rate": one.rate, "at_edge": one.edge}
        row |= dict.fromkeys(COLUMNS.values(), math.nan) | {"coordinates": "", "time": one.cost, "refusal": one.refusal}
        if one.run is not None:
            summary = summary_frame([one.run]).iloc[0]
            row |= {name: summary[column] for column, name in COLUMNS.items()}
            row["coordinates"] = own_coordinates(one)
        rows.append(row)
    return pd.DataFrame(rows)


def own_coordinates(one: Compared) -> str:
    """The name of the method's coordinates at the last probe."""
    assert one.run is not None
    probe = one.run.table("probe")
    return str(probe["coordinates"].iloc[-1]) if len(probe) else ""


def comparison_table(frame: pd.DataFrame, title: str) -> Table:
    """`comparison_frame` for the terminal.

    Parameters
    ----------
    frame
        What `comparison_frame` gave.
    title
        Above the table.
    """
    table = Table(
        title=Text(title),
        caption=Text(
            "κ own: in the method's own coordinates, κ(H): in the plain ones; medians of the resolved ones over the "
            "probed mini-batches, unres.: how many were not (own + plain); rate *: at the edge of the grid; time: of "
            "an iteration, vanilla = 1"
        ),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    for name in ("method", "rate", "loss", "acc.%", "κ own", "κ(H)", "unres.", "time"):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in frame.to_dict("records"):
        if row["refusal"]:
            table.add_row(Text(row["method"]), *["–"] * 7)
            continue
        table.add_row(
            Text(row["method"]),
            f"{row['learning_rate']:g}{'*' if row['at_edge'] else ''}",
            number(row["loss"], ".3f"),
            number(100 * row["test_accuracy"], ".1f"),
            kappa_cell(row["kappa_own"], row["kappa_own_lower"]),
            kappa_cell(row["kappa"], row["kappa_lower"]),
            f"{row['kappa_own_unresolved']:.0f}+{row['kappa_unresolved']:.0f} / {row['probes']:.0f}",
            number(row["time"], ".2f"),
        )
    return table

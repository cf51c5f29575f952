"""What a probe found: its rows, one row for each layer, tables for the terminal, and the figure of κ per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from hesscond.errors import ConfigError
from hesscond.report.axes import add_heading, logarithmic_x, say_empty, shortened
from hesscond.report.page import COLUMN, Page
from hesscond.report.palette import METHOD_COLORS
from hesscond.report.tables import TextTable

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.results import ProbeResult

#: What the figure of a probe needs, and of what type.
COLUMNS = {
    "layer": str,
    "rank": int,
    "nullity": int,
    "negative": "Int64",
    "n_params": int,
    "solver": str,
    "resolved": bool,
    "kappa": float,
    "kappa_lower": float,
    "kappa_upper": float,
    "unit": float,
}


def read_rows(path: Path | str) -> pd.DataFrame:
    """A file of ``hesscond probe -o FILE``, as `ProbeResult.to_frame` would have it.

    Parameters
    ----------
    path
        A .json or .csv file.
    """
    import pandas as pd

    path = Path(path)
    wrong = f"{path} is not what hesscond probe writes with -o rows.json or -o rows.csv"
    if path.suffix.lower() not in (".json", ".csv"):
        raise ConfigError(wrong)
    try:
        frame = pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_json(path, orient="records")
        missing = [name for name in COLUMNS if name not in frame]
        if missing or frame.empty:
            raise ConfigError(f"{wrong}: it has no {', '.join(missing) or 'rows'}")
        # JSON has no infinity: an unresolved κ is null in it
        frame = frame.fillna({"kappa": float("inf"), "kappa_upper": float("inf")})
        return frame.astype(COLUMNS)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{wrong}: {' '.join(str(error).split())}") from None


#: How the words begin that stand in place of the solver of a Hessian that is zero.
ZERO = "the Hessian is zero"
#: Significant digits of the ends of κ's interval at layer level.
DIGITS = 6

UNIT_REMARK = (
    "κ over the resolved units; ≥: at least one unit is unresolved, and the number is a lower bound; params: of one "
    "unit, bias included; unres.: unresolved units, zero Hessians apart; neg.: units with negative eigenvalues (κ is "
    "of |λ|)"
)
NETWORK_REMARK = (
    "κ of each layer's own Hessian and of the network's; ≥: unresolved, the number is a lower bound; neg.: negative "
    "eigenvalues (κ is of |λ|); top, bottom: a layer's share in the network's eigenvectors of largest and smallest λ"
)
LAYER_REMARK = (
    "κ and an interval that contains it, rounded outwards; ≥: unresolved, the number is a lower bound; neg.: negative "
    "eigenvalues (κ is of |λ|)"
)


def layer_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per layer of what a probe found.

    Parameters
    ----------
    frame
        ``ProbeResult.to_frame()``, one row per block.

    Returns
    -------
    pandas.DataFrame
        In the order of the frame: layer; units, how many blocks; n_params of a block; kappa_min, kappa_median and
        kappa_max over the resolved blocks, NaN if there are none; unresolved, how many blocks, of which zero are
        the zero matrix, which has no κ; lower_min, lower_median, lower_max: lower bounds of κ of the unresolved
        blocks that are not zero; rank_min, rank_max, nullity_min, nullity_max; negative: how many blocks have
        negative eigenvalues; solvers: how many blocks each solver did, by name.
    """
    import pandas as pd

    rows = []
    for layer, blocks in frame.groupby("layer", sort=False):
        resolved = blocks["resolved"].astype(bool)
        zero = is_zero(blocks)
        kappa, lower = blocks["kappa"][resolved], blocks["kappa_lower"][~resolved & ~zero]
        rows.append(
            {
                "layer": layer,
                "units": len(blocks),
                "n_params": int(blocks["n_params"].iloc[0]),
                **{f"kappa_{how}": float(kappa.agg(how)) for how in ("min", "median", "max")},
                "unresolved": int((~resolved).sum()),
                "zero": int(zero.sum()),
                **{f"lower_{how}": float(lower.agg(how)) for how in ("min", "median", "max")},
                **{
                    f"{what}_{how}": int(blocks[what].agg(how))
                    for what in ("rank", "nullity")
                    for how in ("min", "max")
                },
                "negative": int((blocks["negative"].fillna(0) > 0).sum()),
                "solvers": blocks["solver"][~blocks["solver"].str.startswith(ZERO)].value_counts().to_dict(),
            }
        )
    return pd.DataFrame(rows)


def unit_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """The condition numbers of every layer's units: least, median and largest, with ranks and nullities.

    Parameters
    ----------
    frame
        ``ProbeResult.to_frame()`` at level ``"unit"``.
    kinds
        Of layers by name, as "Linear".
    """
    titles = (
        "layer",
        "kind",
        ">units",
        ">params",
        ">κ min",
        ">median",
        ">κ max",
        ">unres.",
        ">rank",
        ">nullity",
        ">neg.",
    )
    table = TextTable(titles, caption=UNIT_REMARK)
    for row in layer_frame(frame).to_dict("records"):
        table.add_row(
            row["layer"],
            kinds.get(row["layer"], ""),
            str(row["units"]),
            str(row["n_params"]),
            *kappa_cells(row),
            str(row["unresolved"] - row["zero"]),
            span(row["rank_min"], row["rank_max"]),
            span(row["nullity_min"], row["nullity_max"]),
            str(row["negative"]),
        )
    return table


def layer_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """The condition number of every whole layer, with its interval.

    Parameters
    ----------
    frame
        ``ProbeResult.to_frame()`` at level ``"layer"``.
    kinds
        As for `unit_table`.
    """
    titles = ("layer", "kind", ">params", ">κ", ">[lower, upper]", ">rank", ">nullity", ">neg.")
    table = TextTable(titles, caption=LAYER_REMARK)
    for row in frame.to_dict("records"):
        upper = compact(row["kappa_upper"], DIGITS, ROUND_CEILING)
        interval = f"[{compact(row['kappa_lower'], DIGITS, ROUND_FLOOR)}, {upper}{')' if upper == '∞' else ']'}"
        cells = [kappa_cell(row), "–" if is_zero(row) else interval]
        counts = [count(row[name]) for name in ("rank", "nullity", "negative")]
        table.add_row(row["layer"], kinds.get(row["layer"], ""), str(int(row["n_params"])), *cells, *counts)
    return table


def count(number: Any) -> str:
    """A number of eigenvalues; a dash where they were not counted."""
    import pandas as pd

    return "–" if pd.isna(number) else str(int(number))


def network_table(frame: pd.DataFrame, kinds: Mapping[str, str]) -> TextTable:
    """Every layer by itself, and the whole network with what each layer has of its extreme eigenvectors.

    Parameters
    ----------
    frame
        ``ProbeResult.to_frame()`` of layers and of the network, with share_top and share_bottom of each layer.
    kinds
        As for `unit_table`.
    """
    titles = ("layer", "kind", ">params", ">λ max", ">κ", ">rank", ">nullity", ">neg.", ">top", ">bottom")
    table = TextTable(titles, caption=NETWORK_REMARK)
    records = frame.to_dict("records")
    for number, row in enumerate(records, 1):
        last = number == len(records)
        shares = ["" if last else share(row[name]) for name in ("share_top", "share_bottom")]
        counts = [count(row[name]) for name in ("rank", "nullity", "negative")]
        table.add_row(
            row["layer"],
            kinds.get(row["layer"], "all together" if last else ""),
            str(int(row["n_params"])),
            compact(row["lambda_max"]),
            kappa_cell(row),
            *counts,
            *shares,
            end_section=number == len(records) - 1,
        )
    return table


def share(part: float) -> str:
    """A share of 1 in per cent.

    Examples
    --------
    >>> share(0.123), share(0.004), share(0.99999)
    ('12 %', '<1 %', '100 %')
    """
    if math.isnan(part):
        return "–"
    return "<1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"


def is_zero(rows: Any) -> Any:
    """Whether the Hessian of a row, or of each row of a frame, is zero; one of which nothing is told has no λ_max."""
    largest = rows.get("lambda_max", 0.0)
    return (rows["rank"] == 0) & (largest == largest)


def kappa_cell(row: Mapping[str, Any]) -> str:
    """The κ of one block, or what is known of it."""
    if is_zero(row):
        return "zero"
    return compact(row["kappa"], 4) if row["resolved"] else at_least(row["kappa_lower"])


def kappa_cells(row: Mapping[str, Any]) -> list[str]:
    """Least, median and largest κ of a row of `layer_frame`: of the resolved units, or bounds if there are none."""
    if row["unresolved"] == row["units"]:
        if row["zero"] == row["units"]:
            return ["–", "–", "–"]
        return [at_least(row[f"lower_{how}"]) for how in ("min", "median", "max")]
    bounded = row["unresolved"] > row["zero"]
    largest = at_least(max(row["kappa_max"], row["lower_max"])) if bounded else compact(row["kappa_max"])
    return [compact(row["kappa_min"]), compact(row["kappa_median"]), largest]


def at_least(value: float) -> str:
    """A lower bound, rounded down."""
    return f"≥ {compact(value, rounding=ROUND_FLOOR)}"


def compact(value: float, digits: int = 3, rounding: str = ROUND_HALF_EVEN) -> str:
    """A positive number to so many significant digits: plain below 1000, else as 1.23e5.

    Examples
    --------
    >>> compact(1.0), compact(188.34), compact(123456.0), compact(123456.0, 4, ROUND_FLOOR), compact(math.inf)
    ('1.00', '188', '1.23e5', '1.234e5', '∞')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(value)
    exponent = rounded.adjusted()
    if 0 <= exponent < 3:
        return f"{rounded:.{max(digits - 1 - exponent, 0)}f}"
    return f"{rounded.scaleb(-exponent):.{digits - 1}f}e{exponent}"


def span(low: int, high: int) -> str:
    """A range of whole numbers."""
    return str(low) if low == high else f"{low}–{high}"


def notes(frame: pd.DataFrame, routes: Mapping[str, str]) -> list[str]:
    """What else there is to say of the layers, one line each: how S and κ were computed, zero Hessians.

    Parameters
    ----------
    frame
        ``ProbeResult.to_frame()``.
    routes
        How S was computed, by layer name.

    Returns
    -------
    list of str
        Layers of which the same is true share a line.
    """
    rows = layer_frame(frame).to_dict("records")
    by_route: dict[str, list[str]] = {}
    by_solvers: dict[str, list[str]] = {}
    for row in rows:
        by_route.setdefault(routes.get(row["layer"], ""), []).append(row["layer"])
        counts = row["solvers"]
        solvers = ", ".join(f"{name} ({n})" if len(counts) > 1 else str(name) for name, n in counts.items())
        by_solvers.setdefault(solvers, []).append(row["layer"])
    lines = [f"S of {', '.join(layers)}: {route}" for route, layers in by_route.items() if route]
    lines += [f"κ of {', '.join(layers)}: {solvers}" for solvers, layers in by_solvers.items() if solvers]
    for row in rows:
        if row["zero"]:
            whole = row["units"] == 1
            which, them = ("", "it") if whole else (f"{row['zero']} of {row['units']} units: ", "them")
            lines.append(f"{row['layer']}: {which}{ZERO}: the loss does not depend on {them} to second order")
    return lines


#: Positive semidefinite blocks, and blocks with negative eigenvalues.
PLAIN, INDEFINITE, MEDIAN = METHOD_COLORS["bnp"], METHOD_COLORS["vanilla"], "0.1"

#: Share of a row's height that its dots are spread over.
SPREAD = 0.66
#: Longest layer name that is not shortened.
LONGEST = 18
#: With more dots than this they become an image inside a PDF or SVG.
MANY_DOTS = 3000
GOLDEN = (5**0.5 - 1) / 2


def probe_figure(found: ProbeResult | pd.DataFrame, title: str = "", *, page: Page = COLUMN) -> Figure:
    """κ of every layer on a logarithmic axis, layers from the top in network order.

    At level ``"unit"`` a layer's row holds a dot for every output unit, spread over the height of the row, and a
    bar at their median; at level ``"layer"`` one dot with its interval. Blocks with negative eigenvalues are
    diamonds of another colour. An unresolved κ is an open triangle at its lower bound, which points to where κ is,
    and no part of the median; a Hessian that is exactly zero has no κ and shows only as the rank 0.

    Parameters
    ----------
    found
        A `ProbeResult`, or its ``to_frame()``.
    title
        Above it.
    page
        What it is drawn for.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with `save_figure`.
    """
    import pandas as pd

    frame: pd.DataFrame = found if isinstance(found, pd.DataFrame) else found.to_frame()
    layers = layer_frame(frame)
    whole = bool(frame["unit"].isna().all())
    count = len(layers)
    with page.styled():
        height = 0.95 + count * row_height(count)
        figure = page.figure(max(height, 1.5))
        ax = figure.add_subplot()
        ax.set_xscale("log", nonpositive="mask")
        ax.set_ylim(count - 0.5, -0.5)
        ax.set_yticks(range(count), [shortened(name) for name in layers["layer"]])
        for row in range(1, count, 2):
            ax.axhspan(row - 0.5, row + 0.5, color="0.95", lw=0, zorder=0)
        handles = draw_blocks(ax, frame, layers, whole)
        if handles:
            logarithmic_x(ax)
        else:
            say_empty_row(ax, count)
        add_heading(figure, page, title, handles)
        ax.set_xlabel(r"$\kappa$ of the whole layer" if whole else r"$\kappa$ of the output units")
        label_ranks(ax, layers)
        ax.tick_params(axis="y", length=0)
    return figure


def row_height(count: int) -> float:
    """Inches of a row."""
    return next(height for most, height in ((4, 0.45), (12, 0.28), (25, 0.19), (10**9, 0.14)) if count <= most)


def draw_blocks(ax: Axes, frame: pd.DataFrame, layers: pd.DataFrame, whole: bool) -> list[Line2D]:
    """Dots, medians, intervals and triangles; returns the legend entries of what was drawn."""
    place = {name: row for row, name in enumerate(layers["layer"])}
    rows = frame["layer"].map(place).to_numpy(dtype=float)
    kappa, lower, upper = (frame[n].to_numpy(dtype=float) for n in ("kappa", "kappa_lower", "kappa_upper"))
    resolved = frame["resolved"].to_numpy(dtype=bool)
    indefinite = frame["negative"].fillna(0).to_numpy(dtype=int) > 0
    unresolved = ~resolved & ~is_zero(frame).to_numpy(dtype=bool)
    heights = rows if whole else rows + spread(frame)
    size = 4.5 if whole else max(1.3, 3.6 - 0.12 * frame.groupby("layer").size().max() ** 0.5 - 0.02 * len(layers))
    common: dict[str, Any] = {"ls": "none", "zorder": 3, "rasterized": len(frame) > MANY_DOTS}
    alpha = 1.0 if whole else 0.55
    noun = "layer" if whole else "unit"
    handles = []
    for chosen, color, marker, label, name in (
        (resolved & ~indefinite, PLAIN, "o", noun, "blocks"),
        (resolved & indefinite, INDEFINITE, "D", rf"{noun} with $\lambda<0$", "indefinite"),
    ):
        if not chosen.any():
            continue
        style: dict[str, Any] = {"marker": marker, "color": color, "markeredgewidth": 0}
        scale = 0.85 if marker == "D" else 1.0
        if whole:
            ax.hlines(heights[chosen], lower[chosen], upper[chosen], color=color, lw=1.4, zorder=2, gid=f"{name}-range")
        ax.plot(kappa[chosen], heights[chosen], **common, **style, ms=scale * size, alpha=alpha, gid=name)
        handles.append(Line2D([], [], ls="none", **style, ms=4 * scale, label=label))
    if not whole and resolved.any():
        medians = layers["kappa_median"].to_numpy(dtype=float)
        at = np.flatnonzero(np.isfinite(medians))
        length = 0.42
        ax.vlines(medians[at], at - length, at + length, color=MEDIAN, lw=1.3, zorder=5, gid="medians")
        handles.append(
            Line2D([], [], ls="none", marker="|", ms=6, markeredgewidth=1.3, color=MEDIAN, label="median of resolved")
        )
    if unresolved.any():
        for chosen, color in ((unresolved & ~indefinite, PLAIN), (unresolved & indefinite, INDEFINITE)):
            style = {"marker": ">", "markerfacecolor": "none", "markeredgewidth": 0.6, "color": color}
            ax.plot(
                lower[chosen], heights[chosen], **(common | {"zorder": 4}), **style, ms=size + 0.8, gid="unresolved"
            )
        handles.append(
            Line2D(
                [],
                [],
                ls="none",
                marker=">",
                mfc="none",
                mew=0.7,
                ms=4.5,
                color="0.25",
                label="unresolved (lower bound)",
            )
        )
    return handles


def spread(frame: pd.DataFrame) -> np.ndarray:
    """How far each block's dot is moved from the middle of its row: the same every time, and evenly spread."""
    number = frame.groupby("layer", sort=False).cumcount().to_numpy()
    total = frame.groupby("layer", sort=False)["layer"].transform("size").to_numpy()
    return np.where(total == 1, 0.0, SPREAD * ((0.5 + number * GOLDEN) % 1 - 0.5))


def label_ranks(ax: Axes, layers: pd.DataFrame) -> None:
    """Ranks and nullities to the right of the rows, as "57–60 / 41–44"."""
    right = ax.twinx()
    right.set_ylim(ax.get_ylim())
    labels = [
        f"{span(row['rank_min'], row['rank_max'])} / {span(row['nullity_min'], row['nullity_max'])}"
        for row in layers.to_dict("records")
    ]
    right.set_yticks(range(len(layers)), labels)
    right.tick_params(axis="y", length=0)
    ax.annotate("rank / nullity", (1, 0), (2, -15), xycoords="axes fraction", textcoords="offset points", va="top")


def say_empty_row(ax: Axes, count: int) -> None:
    """Say that there is nothing to draw, and keep the names of the layers."""
    ticks, labels = ax.get_yticks(), ax.get_yticklabels()
    say_empty(ax, "every Hessian is zero" if count else "nothing was probed")
    ax.set_yticks(ticks, [label.get_text() for label in labels])
    ax.xaxis.set_major_locator(NullLocator())
    ax.xaxis.set_minor_locator(NullLocator())

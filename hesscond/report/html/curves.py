"""The curves that a reader can zoom into: loss, accuracy, and κ of one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hesscond.report.html.naming import NamedRun
from hesscond.report.palette import method_colors
from hesscond.report.selection import select
from hesscond.report.series import (
    SHOWN,
    STRETCHES,
    finite,
    lower_bounds,
    resolved_values,
    running_median,
    thinned,
    window_of,
)

if TYPE_CHECKING:
    import pandas as pd

    #: Name, shape and values of what a chart shows of a run.
    Quantities = Iterator[tuple[str, str, pd.Series]]

#: Points in all curves of a page together: about a megabyte.
POINTS = 40_000
#: A curve has at least so many stretches, however many curves there are.
FEWEST_STRETCHES = 40
#: Digits of a value on the page.
DIGITS = 5


@dataclass(frozen=True)
class Curve:
    """A quantity of a run.

    Attributes
    ----------
    run
        Its name.
    quantity
        What it is.
    color
        Of the method.
    shape
        "line", "dashed", "dotted", "point", "square", "diamond" or "bound": an open triangle where κ is unresolved, at
        what it is known to exceed.
    values
        By iteration.
    measured
        How many there were before thinning.
    median
        Running median of a line of noisy values; None if it needs none.
    """

    run: str
    quantity: str
    color: str
    shape: str
    values: pd.Series
    measured: int
    median: pd.Series | None = None

    @property
    def points(self) -> dict[str, Any]:
        """For the page's script."""
        facts = {"run": self.run, "quantity": self.quantity, "color": self.color, "shape": self.shape}
        own = facts | places(self.values)
        return own if self.median is None else own | {"median": places(self.median)}

    @property
    def words(self) -> str:
        """What the curve does, in numbers."""
        there = self.values.dropna()
        first, last = there.index[0], there.index[-1]
        if self.shape == "bound":
            return f"{self.run}, {self.quantity}: {self.measured} times, known to exceed {there.min():.3g} or more"
        return (
            f"{self.run}, {self.quantity}: {there.iloc[0]:.3g} at iteration {first}, {there.iloc[-1]:.3g} at iteration "
            f"{last}; lowest {there.min():.3g}, highest {there.max():.3g}"
        )


def places(values: pd.Series) -> dict[str, list[Any]]:
    """Where the values are that there are."""
    there = values.dropna()
    return {"x": [int(k) for k in there.index], "y": [float(f"{v:.{DIGITS}g}") for v in there.astype(float)]}


@dataclass(frozen=True)
class Chart:
    """Curves over the iterations.

    Attributes
    ----------
    id
        In the page.
    title
        Above it.
    unit
        Of the vertical axis.
    window
        Of the running medians, in iterations; 1: there are none.
    logarithmic
        Whether that is.
    curves
        At least one value in each.
    """

    id: str
    title: str
    unit: str
    logarithmic: bool
    window: int
    curves: tuple[Curve, ...]

    @property
    def data(self) -> dict[str, Any]:
        """For the page's script."""
        facts = {"title": self.title, "unit": self.unit, "logarithmic": self.logarithmic}
        return {**facts, "curves": [curve.points for curve in self.curves]}

    @property
    def smoothed(self) -> bool:
        """Whether a curve has a running median."""
        return any(curve.median is not None for curve in self.curves)

    @property
    def thinned(self) -> bool:
        """Whether a curve has fewer points than were measured."""
        return any(curve.values.notna().sum() < curve.measured for curve in self.curves)


def charts(runs: Sequence[NamedRun], layer: str | None, unit: int | None) -> list[Chart]:
    """Those that have anything to show.

    Raises
    ------
    ConfigError
        The runs are of different studies, or the unit was not probed.
    """
    selection = select([one.run for one in runs], layer, unit)
    colors = method_colors(one.run.method for one in runs)
    probes = {data: [selection.probe(one.run, data) for one in runs] for data in ("batch", "train")}

    window = window_of(max(one.run.iterations for one in runs))

    def chart(id: str, title: str, unit: str, make: Callable[[int, NamedRun], Quantities]) -> Chart:
        curves = [
            Curve(one.name, quantity, colors[one.run.method], shape, values, int(values.notna().sum()))
            for place, one in enumerate(runs)
            for quantity, shape, values in make(place, one)
            if values.notna().any()
        ]
        return Chart(id, title, unit, unit != "%", window, tuple(curves))

    found = [
        chart("loss", "Loss", "loss", lambda place, one: losses(one)),
        chart("accuracy", "Test accuracy", "%", lambda place, one: accuracy(one)),
        *(
            chart(
                f"kappa-{data}",
                f"Condition numbers on {shown} (layer {selection.layer}, unit {selection.unit})",
                "κ",
                lambda place, one, data=data, shapes=shapes: kappas(probes[data][place], shapes),  # type: ignore[misc]
            )
            for data, shown, shapes in (
                ("batch", "mini-batches", ("line", "dashed", "dotted")),
                ("train", "the training set", ("point", "square", "diamond")),
            )
        ),
    ]
    return affordable([one for one in found if one.curves])


def losses(one: NamedRun) -> Quantities:
    """Mini-batch and test loss; a loss of zero has no place on a logarithmic axis."""
    for quantity, table, column, shape in (
        ("training loss", "training", "loss", "line"),
        ("test loss", "evaluation", "test_loss", "point"),
    ):
        values = finite(one.run.table(table).set_index("iteration")[column])
        yield quantity, shape, values.where(values > 0)


def accuracy(one: NamedRun) -> Quantities:
    """In percent."""
    yield "test accuracy", "point", 100 * finite(one.run.table("evaluation").set_index("iteration")["test_accuracy"])


def kappas(probe: pd.DataFrame, shapes: tuple[str, str, str]) -> Quantities:
    """κ(H), κ(PᵀHP) and κ in the method's own coordinates if they are not plain; bounds of those unresolved."""
    for (quantity, shown), shape in zip(SHOWN.items(), shapes, strict=True):
        if quantity == "kappa_own":
            probe = probe[probe["coordinates"] != "plain"]
        yield shown, shape, resolved_values(probe, quantity)
        yield f"{shown} unresolved, lower bound", "bound", lower_bounds(probe, quantity).clip(lower=1.0)


def affordable(found: list[Chart]) -> list[Chart]:
    """The charts with running medians, and with curves thinned so far that the page stays small."""
    number = sum(1 + smooth(chart, curve) for chart in found for curve in chart.curves)
    stretches = max(FEWEST_STRETCHES, min(STRETCHES, POINTS // (2 * max(number, 1))))
    return [replace(chart, curves=tuple(drawn(chart, curve, stretches) for curve in chart.curves)) for chart in found]


def smooth(chart: Chart, curve: Curve) -> bool:
    """Whether a curve has a running median."""
    return chart.window > 1 and curve.shape in ("line", "dashed", "dotted")


def drawn(chart: Chart, curve: Curve, stretches: int) -> Curve:
    """The curve as it is drawn."""
    median = thinned(running_median(curve.values, chart.window), stretches) if smooth(chart, curve) else None
    return replace(curve, values=thinned(curve.values, stretches), median=median)

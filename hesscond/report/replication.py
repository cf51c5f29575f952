"""Results of the runs next to those of a figure or table of a paper: curves, numbers and claims, with verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hesscond.errors import ConfigError
from hesscond.report import curves, plotting, selection, series, tables
from hesscond.report.page import COLUMN, Page, save_both
from hesscond.report.palette import DASHED

if TYPE_CHECKING:
    import pandas as pd

    from hesscond.runs import StoredRun
    from hesscond.study import files
    from hesscond.study.replication import Panel, Replication

REPLICATED, NOT_REPLICATED, UNDECIDED = "replicated", "not replicated", "undecided"
SMALLER, NOT_COMPARABLE = "smaller run", "not comparable"
#: Confidence of the intervals that decide.
CONFIDENCE = 0.95
#: Panels in a row of the figure, and its width in inches: that of a page.
COLUMNS, WIDTH = 4, 6.9


@dataclass(frozen=True)
class Quantity:
    """Quantity of a claim: its name and unit, its values by epoch, and whether larger (1) or smaller (−1) is better."""

    words: str
    of: Callable[[StoredRun], pd.Series]
    better: int = 1


def evaluated(column: str, factor: float = 1.0, offset: float = 0.0) -> Callable[[StoredRun], pd.Series]:
    """``offset + factor · column`` of the evaluation table, by epoch."""

    def values(run: StoredRun) -> pd.Series:
        table = run.table("evaluation")
        curve: pd.Series = offset + factor * table.set_index("epoch")[column].dropna().astype(float)
        return curve

    return values


def training_loss(run: StoredRun) -> pd.Series:
    """The training loss of each epoch, the mean over its last tenth, by the number of epochs then done."""
    table = run.table("training")
    parts = table.groupby("epoch")["loss"]
    losses: pd.Series = parts.apply(lambda loss: float(loss.tail(max(1, len(loss) // 10)).mean()))
    losses.index = losses.index + 1
    return losses


def seconds_per_epoch(run: StoredRun) -> pd.Series:
    """Seconds per epoch: the time that the run worked divided by its epochs; empty before the first is over."""
    import pandas as pd

    epochs = int(run.table("evaluation")["epoch"].max())
    return pd.Series({epochs: run.seconds / epochs} if epochs else {}, dtype=float)


def seconds(run: StoredRun) -> pd.Series:
    """Seconds worked until the end of each epoch; the log is accurate to a second."""
    import pandas as pd

    worked, each = run.worked, iterations_per_epoch(run)
    epochs = np.arange(int(run.iterations / each) + 1)
    times = np.interp(epochs * each, list(worked), list(worked.values())) if worked else np.full(len(epochs), np.nan)
    return pd.Series(times, index=epochs)


def probed(name: str) -> Callable[[StoredRun], pd.Series]:
    """The median over the mini-batch probes of the first probed unit, at the last epoch."""

    def values(run: StoredRun) -> pd.Series:
        import pandas as pd

        probe = run.table("probe")
        layer, unit = selection.first_place(run, probe)
        column = series.values_of(
            probe[(probe["data"] == "batch") & selection.at_place(probe, layer, unit)], name
        ).dropna()
        return pd.Series({int(probe["epoch"].max()): float(column.median())}) if len(column) else pd.Series(dtype=float)

    return values


QUANTITIES = {
    "test_accuracy": Quantity("test accuracy (%)", evaluated("test_accuracy", 100.0)),
    "test_error": Quantity("test error (%)", evaluated("test_accuracy", -100.0, 100.0), -1),
    "test_top5": Quantity("top-5 accuracy (%)", evaluated("test_top5", 100.0)),
    "test_class_accuracy": Quantity("mean-class accuracy (%)", evaluated("test_class_accuracy", 100.0)),
    "test_psnr": Quantity("test PSNR (dB)", evaluated("test_psnr")),
    "test_bits_per_character": Quantity("bits per character", evaluated("test_bits_per_character"), -1),
    "test_loss": Quantity("test loss", evaluated("test_loss"), -1),
    "train_loss": Quantity("training loss", training_loss, -1),
    "seconds": Quantity("training time (s)", seconds, -1),
    "seconds_per_epoch": Quantity("seconds per epoch", seconds_per_epoch, -1),
    "kappa": Quantity("median κ(H)", probed("kappa"), -1),
    "kappa_own": Quantity("median κ in own coordinates", probed("kappa_own"), -1),
    "kappa_D": Quantity("median κ(D)", probed("kappa_D"), -1),
    "gain": Quantity("median κ(H)/κ(PᵀHP)", probed("gain")),
    "relative_gain": Quantity("median of κ(H)/κ(PᵀHP) over κ(D)²", probed("relative_gain")),
}


def quantity(name: str) -> Quantity:
    """The quantity of a name."""
    if name not in QUANTITIES:
        raise ConfigError(f"unknown quantity {name!r}: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]


def measured(run: StoredRun, of: str, at: str) -> float:
    """A quantity of a run; infinitely bad if the run diverged, NaN if it is not there."""
    chosen = quantity(of)
    if run.status == "diverged":
        return -chosen.better * math.inf
    values = chosen.of(run)
    if at == "first":
        values = values[values.index == 1]
    elif at == "mean":
        values = values[values.index >= 1]
    if not len(values):
        return math.nan
    if at == "best":
        return float(values.max() if chosen.better > 0 else values.min())
    return float(values.mean() if at == "mean" else values.iloc[-1])


@dataclass(frozen=True)
class Seeds:
    """A quantity of one method by seed."""

    name: str
    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean; infinite if a run diverged."""
        return fmean(self.values.values()) if self.values else math.nan

    def __str__(self) -> str:
        """Name, mean and standard deviation."""
        if not self.values:
            return f"{self.name} –"
        if not math.isfinite(self.mean):
            bad = sum(not math.isfinite(value) for value in self.values.values())
            return f"{self.name} diverged ({bad} of {len(self.values)})"
        if len(self.values) == 1:
            return f"{self.name} {self.mean:.4g}"
        # to two digits of the standard deviation
        mean, spread = self.mean, float(np.std(list(self.values.values()), ddof=1))
        exponent = math.floor(math.log10(abs(mean))) if mean else 0
        scale = 1.0 if -3 <= exponent < 6 else 10.0**exponent
        decimals = max(0, 1 - math.floor(math.log10(spread / scale))) if spread else 3
        both = f"{mean / scale:.{decimals}f} ± {spread / scale:.{decimals}f}"
        return f"{self.name} {both}" if scale == 1.0 else f"{self.name} ({both})e{exponent:+03d}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval (95 %, Student's t) of the mean of a distribution, from draws; one draw gives itself twice."""
    from scipy import stats

    mean = fmean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return mean, mean
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return mean - half, mean + half


def judged(comparison: files.Comparison, of: Mapping[str, Seeds], margin: float) -> str:
    """The verdict on a comparison: seeds are paired, and the interval of the mean difference decides."""
    one = of[comparison.one]
    if comparison.sign == "in":
        if not one.values:
            return UNDECIDED
        low, high = interval(list(one.values.values()))
        return inside(low, high, comparison.low, comparison.high)
    other = of[comparison.other]
    seeds = sorted(one.values.keys() & other.values.keys())
    if not seeds:
        return UNDECIDED
    differences = [one.values[seed] - other.values[seed] for seed in seeds]
    if any(map(math.isnan, differences)):
        # both diverged
        return UNDECIDED
    if not all(map(math.isfinite, differences)):
        # some diverged: only a clear sign counts
        low, high = min(differences), max(differences)
    else:
        low, high = interval(differences)
    if comparison.sign == "~":
        return inside(low, high, -margin, margin)
    return REPLICATED if low > 0 else NOT_REPLICATED if high < 0 else UNDECIDED


def inside(low: float, high: float, at_least: float, at_most: float) -> str:
    """Verdict on whether an interval lies in another, outside of it, or across its ends."""
    if at_least <= low and high <= at_most:
        return REPLICATED
    return NOT_REPLICATED if high < at_least or low > at_most else UNDECIDED


def verdict_of(verdicts: Sequence[str]) -> str:
    """The verdict on a claim of several comparisons."""
    if NOT_REPLICATED in verdicts:
        return NOT_REPLICATED
    return UNDECIDED if UNDECIDED in verdicts else REPLICATED


def of_seeds(verdict: str, seeds: int) -> str:
    """The verdict of a number of seeds; that of one says so."""
    if seeds == 1 and verdict not in (SMALLER, NOT_COMPARABLE):
        return f"{verdict} (one seed)"
    return verdict if seeds else "not measured"


def seeds_of(runs: Sequence[StoredRun], name: str, of: str, at: str) -> Seeds:
    """Values of a quantity of the runs of one method that finished or diverged, by seed; none of runs too short."""
    over = [run for run in runs if run.legend == name and run.status in ("finished", "diverged")]
    values = {run.seed: measured(run, of, at) for run in over}
    return Seeds(name, {seed: value for seed, value in values.items() if not math.isnan(value)})


AT = {"end": "", "best": ", best epoch", "first": " after the first epoch", "mean": ", mean over epochs"}


def replication_frame(paper: Replication, runs: Mapping[str, Sequence[StoredRun]]) -> pd.DataFrame:
    """Published numbers and claims of a paper, a row each: panel, what (the quantity), paper, here, seeds, verdict."""
    import pandas as pd

    rows = []
    for panel in paper.panels:
        panel_runs = runs.get(panel.name, ())
        for published in panel.published:
            rows += [number_row(panel, published, name, panel_runs) for name in published.values]
        rows += [claim_row(panel, claim, panel_runs) for claim in paper.claims if panel.name in claim.of_panels]
    return pd.DataFrame(rows, columns=["panel", "what", "paper", "here", "seeds", "verdict"])


def number_row(panel: Panel, published: files.Published, name: str, runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Row of a published number and the result of the runs."""
    seeds = seeds_of(runs, name, published.of, published.at)
    paper = published.values[name]
    verdict = SMALLER if panel.study.scale == "small" else UNDECIDED
    if published.tolerance is None:
        verdict = NOT_COMPARABLE
    elif verdict == UNDECIDED and seeds.values:
        low, high = interval(list(seeds.values.values()))
        verdict = inside(low, high, paper - published.tolerance, paper + published.tolerance)
    return {
        "panel": panel.title,
        "what": quantity(published.of).words + AT[published.at],
        "paper": f"{name} {paper:g}",
        "here": str(seeds),
        "seeds": len(seeds.values),
        "verdict": of_seeds(verdict, len(seeds.values)),
    }


def claim_row(panel: Panel, claim: files.Claim, runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Row of a claim of the paper and the results that decide it."""
    names = dict.fromkeys(name for comparison in claim.comparisons for name in comparison.names)
    seeds = {name: seeds_of(runs, name, claim.of, claim.at) for name in names}
    verdict = verdict_of([judged(comparison, seeds, claim.margin) for comparison in claim.comparisons])
    fewest = min(len(results.values) for results in seeds.values())
    return {
        "panel": panel.title,
        "what": quantity(claim.of).words + AT[claim.at],
        "paper": claim.says,
        "here": "; ".join(map(str, seeds.values())),
        "seeds": fewest,
        "verdict": of_seeds(verdict, fewest),
    }


def caption(paper: Replication, frame: pd.DataFrame) -> str:
    """Caption: what the table shows, and how the verdicts were found."""
    small = paper.panels[0].study.scale == "small"
    scale = " at the study's small size, which the paper does not have" if small else ""
    seeds = int(frame["seeds"].max()) if len(frame) else 0
    values = "one seed" if seeds == 1 else f"mean ± standard deviation of {seeds} seeds"
    return (
        f"{paper.source}; here: {values}{scale}; verdicts: "
        f"95 % intervals of the mean (paired by seed for comparisons, Student's t), one seed alone by its value"
    )


def write_replication(
    paper: Replication, runs: Mapping[str, Sequence[StoredRun]], folder: Path
) -> tuple[tables.TextTable, Path, list[Path]]:
    """The table for the terminal, and the paths without endings of the table and the figures written to a folder."""
    frame = replication_frame(paper, runs)
    # the panel where there are several
    titles = ("panel",) if frame["panel"].nunique() > 1 else ()
    columns = [tables.words(title, title) for title in (*titles, "what", "paper", "here", "verdict")]
    text = caption(paper, frame)
    stem = folder / paper.name.replace("/", "-")
    stem.with_name(f"{stem.name}.md").write_text(tables.write_table(frame, columns, text, "md"), encoding="utf-8")
    frame.to_csv(stem.with_name(f"{stem.name}.csv"), index=False, lineterminator="\n")
    drawn = {stem: replication_figure(paper, runs, page=Page(WIDTH))}
    if paper.cost.figure == "conditioning":
        for panel, panel_runs in runs.items():
            name = "-".join(filter(None, (stem.name, panel, "conditioning")))
            drawn[folder / name] = curves.conditioning_figure(panel_runs, page=Page(WIDTH))
    for path, figure in drawn.items():
        save_both(figure, path)
    return tables.text_table(frame, columns, text), stem, list(drawn)


def replication_figure(paper: Replication, runs: Mapping[str, Sequence[StoredRun]], *, page: Page = COLUMN) -> Figure:
    """Training loss (dashed) and test accuracy (solid) of every panel by epoch, mean and range over the seeds."""
    drawn = [(panel, selection.groups_of(panel_runs)) for panel in paper.panels if (panel_runs := runs.get(panel.name))]
    if not drawn:
        raise ConfigError(f"no run of {paper.name} has trained yet")
    all_groups = [group for _, groups in drawn for group in groups]
    looks = selection.looks_of(all_groups)
    names = dict.fromkeys(group.method for group in all_groups)
    timing = paper.cost.figure == "timing"
    kinds = {"training loss": DASHED, "training time" if timing else "test": "-"}
    columns = min(COLUMNS if page.wide else 2, len(drawn))
    bands = -(-len(drawn) // columns)
    with page.styled():
        figure = page.figure(0.4 + 2.6 * bands + plotting.heading_height([*names, *kinds], page))
        axes = figure.subplots(2 * bands, columns, squeeze=False)
        pairs = [(axes[2 * row][k], axes[2 * row + 1][k]) for row in range(bands) for k in range(columns)]
        for place, (pair, (panel, groups)) in enumerate(zip(pairs, drawn, strict=False)):
            draw_panel(pair, panel, groups, looks, "seconds" if timing else shown_of(groups))
            for ax in pair if place % columns else ():
                ax.set_ylabel("")
        for ax in chain.from_iterable(pairs[len(drawn) :]):
            ax.set_visible(False)
        handles = [plotting.method_handle(name, looks[name]) for name in names if name in looks]
        plotting.add_heading(figure, page, paper.name, [*handles, *plotting.dash_handles(kinds)])
        most = max(len(group.runs) for group in all_groups)
        remark = f"lines: mean over {most} seeds; bands: lowest to highest" if most > 1 else "one seed"
        plotting.label_figure(figure, page, remark)
    return figure


def shown_of(groups: Sequence[selection.Group]) -> str:
    """Quantity to show of runs: the test accuracy, else the PSNR, else the test loss."""
    if any(len(curve) for group in groups for curve in curves.accuracies_of(group)):
        return "test_accuracy"
    psnr = any("test_psnr" in run.table("evaluation") for group in groups for run in group.runs)
    return "test_psnr" if psnr else "test_loss"


def draw_panel(
    axes: tuple[Axes, Axes], panel: Panel, groups: Sequence[selection.Group], looks: Mapping[str, Any], what: str
) -> None:
    """Draw a quantity above the training loss, by epoch."""
    above, below = axes
    window = curves.window_of(groups)
    for group in groups:
        look = looks[group.label]
        # before the first epoch all are at chance, and the axis would show little else
        tests = [curve[curve.index >= min(1, curve.index.max())] for curve in map(quantity(what).of, group.runs)]
        plotting.draw_seeds(above, group, tests, look, "-", f"{panel.name}-{group.label}-test")
        trained = []
        for run in group.runs:
            # means over a hundredth of the run: the losses of single samples are skewed
            loss, each = series.loss_of(run), max(window, run.iterations // 100)
            means = loss.groupby(loss.index // each).mean()
            means.index = (means.index + 0.5) * each / iterations_per_epoch(run)
            trained.append(means)
        plotting.draw_seeds(below, group, trained, look, DASHED, f"{panel.name}-{group.label}-loss")
    above.set_title(panel.title.replace(", ", ",\n"), loc="left", pad=2.0)
    above.set_ylabel(quantity(what).words)
    below.set_yscale("log", nonpositive="mask")
    plotting.fit_logarithmic(below)
    below.set_ylabel("training loss")
    below.set_xlabel("epoch")
    for ax in (above, below):
        plotting.along_iterations(ax)


def iterations_per_epoch(run: StoredRun) -> float:
    """Iterations per epoch by the last evaluation, or all iterations if it was before the first epoch."""
    table = run.table("evaluation")
    last = table.iloc[-1] if len(table) else None
    if last is not None and last["epoch"] >= 1:
        return float(last["iteration"] / last["epoch"])
    return float(max(1, run.iterations))

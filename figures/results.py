"""The tables of docs/ that come from files in docs/results: ``python figures/results.py`` writes them into the pages.

A page says ``<!-- results: NAME -->`` where the table of this name begins and ``<!-- end -->`` where it ends. A test
compares what stands between with what the files give, so that no number of such a table is typed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata, ttest_1samp, ttest_rel

from hesscond.report.replication import NOT_REPLICATED, REPLICATED, UNDECIDED, Seeds, judged, of_seeds, verdict_of
from hesscond.study.files import Claim, Comparison, FileTable, PanelTable, Published, StudyFile
from hesscond.study.replication import replication

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
SMALL = Path(__file__).parent / "small"
#: Studies of tables at a small size.
STUDIES = sorted(path.stem for path in SMALL.glob("*.toml") if "[[panels]]" in path.read_text(encoding="utf-8"))
MARK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Tables by name.
TABLES: dict[str, Callable[[], list[str]]] = {}


def table(name: str, make: Callable[[], list[str]]) -> None:
    """Make a table known by its name."""
    TABLES[name] = make


def read(name: str) -> pd.DataFrame:
    """File of results."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]


def by_seed(frame: pd.DataFrame, name: str, column: str, better: int = 1) -> Seeds:
    """Values of a method by seed; runs that diverged are worse than all others."""
    runs = frame[frame["method"] == name].set_index("seed")
    values = runs[column].astype(float)
    if "status" in runs:
        values = values.where(runs["status"] != "diverged", -better * math.inf)
    return Seeds(name, values.to_dict())


def number(seeds: Seeds) -> str:
    """Mean ± standard deviation, without the name."""
    return str(seeds).removeprefix(seeds.name).strip()


# Figure 8 of BNP

METHODS = ("vanilla", "BNP")


def figure_8(inputs: str, data: str = "batch") -> pd.DataFrame:
    """Rows of the runs with inputs of a scale."""
    frame = read("bnp-figure-8")
    return frame[(frame["inputs"] == inputs) & (frame["data"] == data)]


def of_both(frame: pd.DataFrame, column: str) -> tuple[dict[str, Seeds], str]:
    """Values of both methods by seed, and in words."""
    seeds = {name: by_seed(frame, name, column) for name in METHODS}
    return seeds, ", ".join(map(str, seeds.values()))


def within(seeds: Mapping[str, Seeds], low: float, high: float) -> str:
    """Verdict on whether both methods lie in a range."""
    return verdict_of([judged(Comparison.of(f"{name} in [{low}, {high}]"), seeds, 1.0) for name in METHODS])


def brief(values: pd.Series) -> str:
    """Range of values, to two digits."""
    return " … ".join(re.sub(r"e\+0?", "e", f"{value:.2g}") for value in (values.min(), values.max()))


def span(frame: pd.DataFrame) -> str:
    """Range of κ(D) over all iterations and seeds, for each method."""
    parts = []
    for name in METHODS:
        runs = frame[frame["method"] == name]
        parts.append(f"{name} {brief(pd.concat([runs['kappa_D_least'], runs['kappa_D_most']]))}")
    return ", ".join(parts)


def figure_8_claims() -> list[str]:
    """The claims of the figure, at both scales of the inputs."""
    rows = []
    for inputs in ("[0, 1]", "standardized"):
        frame = figure_8(inputs)
        gain, scaling, share = of_both(frame, "gain"), of_both(frame, "kappa_D"), of_both(frame, "inside")
        relative, along = of_both(frame, "relative_gain"), of_both(frame, "correlation")
        mean, end, loss = (of_both(frame, column) for column in ("mean_accuracy", "loss", "loss_at_equal_time"))
        always, lies, roughly = (
            f"{frame['gains'].min():g} % of the probes",
            "κ(D) lies between 1e2 and 1e5",
            "the gain is",
        )
        about = f"{roughly} roughly κ(D)² (here: within a factor of 10)"
        faster, lower = judged(Comparison.of("BNP > vanilla"), mean[0], 1.0), Comparison.of("vanilla > BNP")
        claims = (
            (
                "κ(H) is larger than κ(PᵀHP)",
                f"in {always}; median of their ratio: {gain[1]}",
                within(gain[0], 1, 1e300),
            ),
            (lies, f"medians: {scaling[1]}", within(scaling[0], 1e2, 1e5)),
            ("in 95 % of the iterations (ours)", f"{share[1]} %; all: {span(frame)}", within(share[0], 95, 100)),
            (about, f"gain over κ(D)², median: {relative[1]}", within(relative[0], 0.1, 10)),
            (
                f"{roughly} the larger, the larger κ(D)² (ours)",
                f"rank correlation along a run: {along[1]}",
                within(along[0], 0, 1),
            ),
            ("BNP trains faster", f"mean accuracy over the epochs (%): {mean[1]}", faster),
            ("", f"training loss after as many iterations: {end[1]}", judged(lower, end[0], 1.0)),
            ("", f"training loss at equal time: {loss[1]}", judged(lower, loss[0], 1.0)),
        )
        rows += [["" if place else inputs, *row] for place, row in enumerate(claims)]
    seeds = figure_8("[0, 1]")["seed"].nunique()
    return markdown(["inputs", "the paper", f"here, {seeds} seeds", "verdict"], rows)


def figure_8_gains() -> list[str]:
    """How far the gain falls short of κ(D)², by the data that the Hessian is taken over."""
    rows = []
    for inputs in ("[0, 1]", "standardized"):
        for data, words in (("batch", "mini-batches"), ("train", "training set")):
            frame = figure_8(inputs, data)
            for name in METHODS:
                runs = frame[frame["method"] == name]
                along = number(by_seed(frame, name, "correlation"))
                rows.append([inputs, words, name, along, brief(runs["short"])])
    return markdown(["inputs", "Hessian over", "", "rank correlation", "short by: medians of the runs"], rows)


table("figure-8", figure_8_claims)
table("figure-8-gains", figure_8_gains)


def block_norms() -> list[str]:
    """Largest over smallest λ_max of the layers' blocks: plain, with P, and with P/q."""
    rows, frame = [], read("bnp-block-norms")
    for (inputs, method), group in frame.groupby(["inputs", "method"], sort=False):
        apart = {}
        for name in ("H", "P", "Pq"):
            logs = np.log(group.pivot(index=["seed", "iteration"], columns="layer", values=name))
            by_run = np.exp((logs.max(axis=1) - logs.min(axis=1)).groupby("seed").mean())
            apart[name] = Seeds(name, by_run.to_dict())
        rows.append([inputs, method, *map(number, apart.values()), judged(Comparison.of("Pq in [1, 10]"), apart, 1.0)])
    titles = ["H", "with P", "with P/q"]
    return markdown(["inputs", "trained by", *titles, f"verdict, {frame['seed'].nunique()} seeds"], rows)


table("block-norms", block_norms)


def one_sample() -> list[str]:
    """Gains of units at batch 1, by layer."""
    rows = []
    for layer, units in read("one-sample").groupby("layer", sort=False):
        known = units[units["resolved"] & np.isfinite(units["kappa_own"])]
        gain = known["kappa"] / known["kappa_own"]
        medians = (known["kappa"].median(), known["kappa_own"].median(), gain.median())
        # a row has κ = 1 up to rounding
        share = f"{(gain > 1 + 1e-6).mean():.0%}".replace("%", " %")
        counts = (f"{len(known)} of {len(units)}", f"{known['rank'].max():.0f}")
        ends = f"{gain.min():.2g} … {gain.max():.2g}"
        rows.append([layer, *counts, *(f"{value:.2g}" for value in medians), ends, share])
    titles = ["κ(H), median", "κ own, median", "gain, median", "all gains", "share with a gain"]
    return markdown(["layer", "units with a resolved κ", "largest rank", *titles], rows)


table("one-sample", one_sample)

#: Readings of WC's Proposition 1 and Theorem 2: statement and claim, and the words for them.
READINGS = {
    ("wc-proposition-1", "improves"): ("Proposition 1: equilibrated weights have a smaller κ", "κ(EW) ≤ κ(W), rows"),
    ("wc-proposition-1", "columns"): ("", "columns"),
    ("wc-proposition-1", "row-column"): ("", "rows, then columns"),
    ("wc-theorem-2", "(a) through E(W)W"): ("Theorem 2: so has the Hessian", "(a) in W through E(W)W, rows"),
    ("wc-theorem-2", "(a) row-column"): ("", "(a), rows, then columns"),
    ("wc-theorem-2", "(b) at the point EW"): ("", "(b) at the point EW, rows"),
    ("wc-theorem-2", "(b) row-column"): ("", "(b), rows, then columns"),
    ("wc-theorem-2", "(c) E frozen"): ("", "(c) in W, E held fixed, rows"),
    ("wc-theorem-2", "(c) row-column"): ("", "(c), rows, then columns"),
}


def wc_statements() -> list[str]:
    """How often WC's statements hold along training, by iteration."""
    frame, rows = read("wc-statements"), []
    for (statement, claim), (paper, reading) in READINGS.items():
        checks = frame[(frame["statement"] == statement) & (frame["claim"] == claim)]
        holds = checks["status"] == "holds"
        by_iteration = ", ".join(str(count) for count in holds.groupby(checks["iteration"]).sum())
        rows.append(
            [
                paper,
                reading,
                f"{holds.sum()} of {len(checks)}",
                by_iteration,
                REPLICATED if holds.all() else NOT_REPLICATED,
            ]
        )
    points = ", ".join(map(str, sorted(set(frame["iteration"]))))
    seeds = frame["seed"].nunique()
    return markdown(["the paper", "reading", "holds", f"of {seeds} seeds, at iteration {points}", "verdict"], rows)


table("wc-statements", wc_statements)

# Tables of CWO and WC at a small size


#: Panels of the tables with several, those of batches with the paper's.
CWO_NETWORKS = ("cnn9-cifar10", "resnet110-cifar10", "wrn-28-10-cifar10")
CWO_BATCHES = {"cifar10-batch-4": "cifar10-batch-4", "cifar10-batch-16": "cifar10-batch-16"}
CWO_BATCHES |= {"cifar10-batch-64": "cifar10-batch-128"}
WC_NETWORKS = ("googlenet", "resnet18", "resnet50")


def small(study: str) -> FileTable:
    """Panels, methods and claims of a table at a small size; its data are not looked for."""
    return StudyFile.read(SMALL / f"{study}.toml").layout


def built_in(study: str, *panels: str) -> FileTable:
    """Panels, or those named, methods and claims of a built-in study; one without panels has one without a name."""
    layout = StudyFile.read(DOCS.parent / "studies" / f"{study}.toml").layout
    chosen = [panel for panel in layout.panels if not panels or panel.name in panels] or [WHOLE]
    return layout.model_copy(update={"panels": chosen})


def methods_of(study: FileTable, panel: PanelTable) -> list[str]:
    """Names of the methods of a panel."""
    return [method if isinstance(method, str) else method.name for method in panel.methods or study.methods]


def title_of(panel: PanelTable) -> str:
    """Title of a panel."""
    return str((panel.model_extra or {})["title"])


#: The panel of a study that has none.
WHOLE = PanelTable.model_construct(name="", methods=[])


@cache
def published(study: str) -> dict[str, Sequence[Published]]:
    """The paper's numbers by panel."""
    return {panel.name: panel.published for panel in replication(study).panels}


def paper_of(study: str, panel: str, method: str) -> str:
    """The paper's number for a method of a panel; – if there is none."""
    for row in published(study).get(panel, ()):
        if method in row.values and row.of in ("test_error", "test_accuracy"):
            return f"{row.values[method]:g}"
    return "–"


@cache
def all_runs() -> pd.DataFrame:
    """Rows of all runs of these studies."""
    names = ("small-comparisons", "bnp-comparisons", "prec", "cwo-branches")
    built_in = (
        "bnp-figure-3",
        "bnp-figure-4-cnn",
        "bnp-figure-4-fc-batch-1",
        "bnp-figure-4-fc-batch-6",
        "bnp-figure-5-batch-128",
        "bnp-figure-5-batch-2",
        "bnp-table-1",
        "transformers",
    )
    return pd.concat(map(read, names + built_in), ignore_index=True).fillna({"panel": ""})


def runs_of(study: str, panel: str) -> pd.DataFrame:
    """Rows of the runs of a panel, with the error."""
    frame = all_runs()
    runs = frame[(frame["study"] == study) & (frame["panel"] == panel)].copy()
    runs["error"] = 100 - runs["accuracy"].astype(float)
    return runs


def small_numbers(study: str, column: str, panels: Mapping[str, str]) -> list[str]:
    """The paper's table beside ours; ``panels``: names of the panels at small size, and of those of the paper."""
    layout = small(study)
    by_name = {panel.name: panel for panel in layout.panels}
    names = list(dict.fromkeys(name for panel in panels for name in methods_of(layout, by_name[panel])))
    titles = ["", *(words for panel in panels for words in ("the paper", f"here: {title_of(by_name[panel])}"))]
    rows = []
    for name in names:
        row = [name]
        for panel, of_paper in panels.items():
            seeds = by_seed(runs_of(study, panel), name, column, 1 if column == "accuracy" else -1)
            row += [paper_of(study, of_paper, name), f"{number(seeds)} ({len(seeds.values)})"]
        rows.append(row)
    return markdown(titles, rows)


#: Columns of the file of runs by what a claim is of, with the words for them.
OF = {
    ("test_error", "end"): ("error", -1, "error (%)"),
    ("test_accuracy", "end"): ("accuracy", 1, "accuracy (%)"),
    ("test_accuracy", "mean"): ("mean_accuracy", 1, "accuracy, mean over the epochs (%)"),
    ("test_accuracy", "first"): ("first_accuracy", 1, "accuracy after an epoch (%)"),
    ("train_loss", "end"): ("train_loss", -1, "training loss"),
    ("test_bits_per_character", "end"): ("bits_per_character", -1, "bits per character"),
    ("seconds_per_epoch", "end"): ("seconds_per_epoch", -1, "seconds per epoch"),
}


def learns_nothing(seeds: Seeds) -> bool:
    """Whether the runs with all seeds end at the accuracy of one class for all samples of CIFAR-10."""
    return set(seeds.values.values()) == {10.0}


def judgement(study: str, panel: PanelTable, claim: Claim) -> tuple[str, int, str]:
    """Verdict on a claim in a panel, the fewest seeds of a method, and the numbers behind it."""
    column, better, words = OF[claim.of, claim.at]
    names = dict.fromkeys(name for comparison in claim.comparisons for name in comparison.names)
    seeds = {name: by_seed(runs_of(study, panel.name), name, column, better) for name in names}
    verdict = verdict_of([judged(comparison, seeds, claim.margin) for comparison in claim.comparisons])
    if any(learns_nothing(seeds[comparison.other]) for comparison in claim.comparisons if comparison.sign == ">"):
        verdict = "cannot be compared"
    fewest = min(len(sample.values) for sample in seeds.values())
    return of_seeds(verdict, fewest), fewest, f"{words}: {', '.join(map(str, seeds.values()))}"


def verdict_on(study: str, panel: PanelTable, claim: Claim) -> str:
    """Verdict on a claim in a panel, with the numbers behind it that the tables above do not have."""
    verdict, fewest, numbers = judgement(study, panel, claim)
    numbers = "" if OF[claim.of, claim.at][0] in ("error", "accuracy") else f"; {numbers}"
    words = "one seed" if fewest == 1 else f"{fewest} seeds"
    return f"{title_of(panel).partition(',')[0]}: {verdict.removesuffix(' (one seed)')} ({words}{numbers})"


def claims_with_numbers(study: FileTable) -> list[str]:
    """The claims of a study, a row for each panel (by its title where there are several), with the numbers."""
    rows = []
    for claim in study.claims:
        for panel in (candidate for candidate in study.panels if candidate.name in claim.of_panels):
            verdict, fewest, numbers = judgement(study.name, panel, claim)
            where = f"{title_of(panel)}: " if len(study.panels) > 1 else ""
            rows.append([claim.says, f"{where}{numbers}", str(fewest), verdict])
    says = [row[0] for row in rows]
    for place, row in enumerate(rows[1:], 1):
        row[0] = "" if says[place] == says[place - 1] else row[0]
    return markdown(["the paper", "here", "seeds", "verdict"], rows)


def branches() -> list[str]:
    """Training losses of residual networks by the initial γ of their branches, and whether they train."""
    layout, rows = small("cwo-branches"), []
    for panel in layout.panels:
        frame, entries = runs_of("cwo-branches", panel.name), []
        for claim in (candidate for candidate in layout.claims if panel.name in candidate.of_panels):
            name = claim.comparisons[0].one
            seeds = by_seed(frame, name, "train_loss", -1)
            verdict = of_seeds(judged(claim.comparisons[0], {name: seeds}, claim.margin), len(seeds.values))
            entries.append([name, number(seeds), str(len(seeds.values)), verdict])
        rows += [["" if place else title_of(panel), *entry] for place, entry in enumerate(entries)]
    return markdown(["network", "", "here", "seeds", "it trains"], rows)


def small_claims(*studies: str) -> list[str]:
    """The claims of tables at a small size."""
    rows = []
    for study in studies:
        layout = small(study)
        for claim in layout.claims:
            panels = [panel for panel in layout.panels if panel.name in claim.of_panels]
            rows.append([claim.says, "; ".join(verdict_on(study, panel, claim) for panel in panels)])
    return markdown(["the paper", "verdicts"], rows)


def lead_of(study: str, name: str, points: float) -> str:
    """Whether a method leads each other one by so many points, in the first panel of a table."""
    panel = small(study).panels[0]
    of = {method: by_seed(runs_of(study, panel.name), method, "accuracy") for method in methods_of(small(study), panel)}
    ahead = {
        other: Seeds(other, {seed: of[name].values[seed] - value for seed, value in sample.values.items()})
        for other, sample in of.items()
        if other != name
    }
    verdict = verdict_of([judged(Comparison.of(f"{other} in [{points}, 100]"), ahead, 1.0) for other in ahead])
    seeds = min(len(lead.values) for lead in ahead.values())
    against = ", ".join(f"{number(lead)} over {other}" for other, lead in ahead.items())
    return f"{title_of(panel).partition(',')[0]}: {verdict} ({seeds} seeds; {name}: {against})"


def wc_claims() -> list[str]:
    """The claims of WC's tables, with the size of the lead in Figure 1."""
    *rows, last = small_claims("wc-table-1", "wc-table-2", "wc-figure-1")
    return [*rows, f"| by nearly 15 points (here: by at least 10) | {lead_of('wc-figure-1', 'BN+WC', 10)} |", last]


#: What the papers say of times: which method takes longer than which other, in words, and the verdict if it does.
LONGER = {
    "cwo": ("Ours", "no normalization", "as efficient as SGD", NOT_REPLICATED),
    "wc": ("BN+E", "BN", "iterations take longer", REPLICATED),
}


def iteration_times() -> list[str]:
    """Time of an iteration by method, over that with BN, at the papers' sizes; blocks that overlap decide nothing."""
    frame = read("iteration-times")
    rows = []
    for (paper, network), times in frame.groupby(["paper", "network"], sort=False):
        times = times.set_index("method")
        median = times["median_ms"]
        others = ", ".join(f"{name} {value / median['BN']:.2f}" for name, value in median.items() if name != "BN")
        method, other, words, longer = LONGER[paper]
        apart = times["least_ms"][method] > times["most_ms"][other]
        rows.append([f"`{network}`", f"{median['BN']:.3g}", others, words, longer if apart else UNDECIDED])
    return markdown(["network", "BN, ms", "the others, BN = 1", "the paper", "verdict"], rows)


#: Predictors of the gain, with their words and the sign that the argument for them gives the correlation.
PREDICTORS = {
    "kappa": ("κ of the network", -1),
    "kappa_layer": ("κ of the layers", -1),
    "kappa_unit": ("κ of the units", -1),
    "sharpness": ("λ_max · rate", -1),
    "effective_rank": ("effective rank, Σ abs(λ)/λ_max", 1),
    "first_order": ("first order, η‖g‖²/L", 1),
    "best_step": ("‖g‖²/(2 λ_max L)", 1),
    "forecast": ("the quadratic model's forecast", 1),
    "stable": ("the forecast without overshooting and negative curvature", 1),
}
AHEAD, DRAWS = (1, 10, 100), 1000
#: Files of the tasks of figures/forecast.py.
TASKS = {
    "forecast": "digits",
    "forecast-tanh": "digits, tanh",
    "forecast-cnn": "digits, CNN",
    "forecast-cancer": "cancer",
    "forecast-diabetes": "diabetes",
    "forecast-photograph": "photograph",
}


def rank_correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's correlations along the last dimension."""
    x, y = (ranks - ranks.mean(-1, keepdims=True) for ranks in (rankdata(x, axis=-1), rankdata(y, axis=-1)))
    return np.asarray((x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1)))


def forecasts(name: str, s: int, file: str = "forecast") -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """A predictor, signed, and the gain of s iterations, by seed, point and method; and the seeds with their points."""
    frame = read(file)
    # a method that a seed lacks, or whose forecast overflows, is left out
    by_run = frame.dropna().groupby("method").size()
    methods = sorted(by_run[by_run == by_run.max()].index)
    seeds, points = sorted(set(frame["seed"])), sorted(set(frame["iteration"]))
    runs = frame.set_index(["seed", "iteration", "method"]).sort_index()
    column = f"{name}_{s}" if name in ("forecast", "stable") else name
    x, y = (
        np.array([[runs.loc[seed, point][of].reindex(methods) for point in points] for seed in seeds])
        for of in (column, f"gain_{s}")
    )
    return PREDICTORS[name][1] * x, y, [(seed, point) for seed in seeds for point in points]


def forecast(file: str = "forecast") -> list[str]:
    """Rank correlation of each predictor with the gain over the methods: the mean over seeds and points of the runs.

    Intervals: methods and seeds are drawn anew.
    """
    rows, known = [], read(file).columns
    # the file of the CNN has no κ of layers and units
    for name in (name for name in PREDICTORS if name in known or f"{name}_1" in known):
        row = [PREDICTORS[name][0]]
        for s in AHEAD:
            x, y, _ = forecasts(name, s, file)
            seeds, _, methods = x.shape
            of_methods, of_seeds = (
                np.random.default_rng(k).integers(n, size=(DRAWS, n)) for k, n in enumerate((methods, seeds))
            )
            drawn = rank_correlations(x[..., of_methods], y[..., of_methods]).mean(1)
            low, high = np.quantile(drawn[of_seeds, np.arange(DRAWS)[:, None]].mean(1), (0.025, 0.975))
            row.append(f"{rank_correlations(x, y).mean():+.2f} ({low:+.2f} … {high:+.2f})")
        rows.append(row)
    return markdown(["", *(f"next {s} iteration{'s' if s > 1 else ''}" for s in AHEAD)], rows)


def forecast_tasks() -> list[str]:
    """Rank correlations of each predictor over the tasks: their mean, with Student's 95 % interval."""
    rows = []
    for name, (title, _) in PREDICTORS.items():
        row = [title]
        for s in AHEAD:
            rhos = [rank_correlations(*forecasts(name, s, file)[:2]).mean() for file in tasks_of(name)]
            row.append(over_tasks(rhos))
        rows.append(row)
    return markdown(["", *(f"next {s} iteration{'s' if s > 1 else ''}" for s in AHEAD)], rows)


def forecast_paired(s: int = 10) -> list[str]:
    """The best single step against the other predictors, paired over the tasks, in a sentence."""
    rhos = {
        name: [rank_correlations(*forecasts(name, s, file)[:2]).mean() for file in TASKS]
        for name in ("best_step", "effective_rank", "first_order", "forecast", "stable")
    }
    against = [
        f"{PREDICTORS[name][0]} (p = {ttest_rel(rhos['best_step'], other).pvalue:.3f})"
        for name, other in rhos.items()
        if name != "best_step"
    ]
    return [f"‖g‖²/(2 λ_max L) for the next {s} iterations, paired over the tasks, against {'; '.join(against)}."]


def over_tasks(rhos: Sequence[float]) -> str:
    """Mean of one number a task, with Student's 95 % interval."""
    low, high = ttest_1samp(rhos, 0).confidence_interval()
    return f"{np.mean(rhos):+.2f} ({low:+.2f} … {high:+.2f})"


def tasks_of(name: str) -> list[str]:
    """Files of the tasks that have a predictor: in the CNN κ of layers and units was not measured."""
    return [file for file in TASKS if name in (known := read(file).columns) or f"{name}_1" in known]


def forecast_by_task(s: int = 10) -> list[str]:
    """Rank correlations of each predictor with the gain of some iterations, by task."""
    rows = []
    for name, (title, _) in PREDICTORS.items():
        known = tasks_of(name)
        rhos = {file: f"{rank_correlations(*forecasts(name, s, file)[:2]).mean():+.2f}" for file in known}
        rows.append([title, *(rhos.get(file, "–") for file in TASKS)])
    sizes = [forecasts("kappa", s, file)[0].shape for file in TASKS]
    titles = [
        f"{title}: {methods} methods, seeds {seeds}"
        for title, (seeds, _, methods) in zip(TASKS.values(), sizes, strict=True)
    ]
    return markdown(["", *titles], rows)


def forecast_by_run() -> list[str]:
    """Rank correlations with the gain of the most iterations, for each point and seed."""
    rows = []
    for name in ("kappa", "sharpness", "forecast"):
        x, y, pairs = forecasts(name, AHEAD[-1])
        rhos = rank_correlations(x, y)
        rows.append([PREDICTORS[name][0], *(", ".join(f"{rho:+.2f}" for rho in at) for at in rhos.T)])
    points, seeds = sorted({point for _, point in pairs}), len({seed for seed, _ in pairs})
    return markdown(["", *(f"iteration {point}, {seeds} seeds" for point in points)], rows)


def scientific(value: float) -> str:
    """A number as 1.2e+05, or –."""
    return "–" if pd.isna(value) else f"{value:.1e}"


def methods_compared() -> list[str]:
    """The methods with the smallest losses, and vanilla."""
    frame = read("methods-compared").sort_values("loss")
    rows = [
        [
            *(f"`{row.method}`", f"{row.rate:g}", f"{row.loss:.3f}", f"{row.accuracy:.1f}"),
            *(scientific(row.kappa_own), scientific(row.kappa), f"{row.time:.2f}"),
        ]
        for row in pd.concat([frame.head(6), frame[frame["method"] == "vanilla"]]).itertuples()
    ]
    return markdown(["method", "rate", "loss", "accuracy (%)", "κ own", "κ(H)", "time"], rows)


def known_case() -> list[str]:
    """Decay of gradient descent near a minimum, predicted from κ and measured, and steps by the share of the gap."""
    frame = read("known-case")
    counts = {name: name.partition("_")[2] for name in ("steps_0.01", "steps_0.0001", "steps_1e-06")}
    rows = [
        [
            *(f"`{row['method']}`", *(f"{row[name]:.4g}" for name in ("kappa", "predicted", "measured"))),
            *(f"{row[name]:g}" for name in counts),
        ]
        for _, row in frame.iterrows()
    ]
    rhos = (frame["kappa"].corr(frame[name], method="spearman") for name in counts)
    rows.append(["Spearman's ρ with κ", "", "", "", *(f"{rho:+.2f}" for rho in rhos)])
    return markdown(
        ["method", "κ", "−ln r predicted", "measured", *(f"steps to {share}" for share in counts.values())], rows
    )


def correlated(**at: str) -> pd.DataFrame:
    """Rank correlations of iterations to the loss with numbers of the Hessian: by default those at half of the way."""
    frame = read("kappa-and-speed-correlations")
    for column, value in ({"layer": "all", "coordinates": "own", "data": "train", "point": "half"} | at).items():
        frame = frame[frame[column] == value]
    return frame


LEVELS = ("network", "layer", "unit")
#: Levels and numbers of the table; λ_max alone, and times the rate of a layer, are in the file.
SHOWN = [("network", name) for name in ("κ", "λ_max / ‖H‖_*", "λ_max", "λ_max · rate", "‖Pᵀ∇L‖² / (2 λ_max L)")]
SHOWN += [(level, name) for level in ("layer", "unit") for name in ("κ", "λ_max / ‖H‖_*")]


def kappa_and_speed() -> list[str]:
    """Rank correlations of iterations with numbers of the Hessian."""
    frame = correlated().set_index(["level", "number"])
    rows = [
        [
            *at,
            *(
                f"{row.spearman:+.2f} ({row.low:+.2f} … {row.high:+.2f})",
                f"{row.family_low:+.2f} … {row.family_high:+.2f}",
            ),
            f"{'< 0.001' if row.p < 0.0005 else f'{row.p:.3f}'} ({row.p_adjusted:.2f})",
        ]
        for at, row in zip(SHOWN, frame.loc[SHOWN].itertuples(), strict=True)
    ]
    return markdown(["Hessian of", "number", "ρ at ½ (95 %)", "families drawn whole", "p (adjusted)"], rows)


def kappa_and_speed_choices() -> list[str]:
    """Rank correlations with κ of other coordinates, data or losses, and of resolved κ alone."""
    own, losses = correlated(number="κ").set_index("level"), read("kappa-and-speed").iloc[0]
    others = {
        "plain coordinates": {"number": "κ", "coordinates": "plain"},
        "over mini-batches": {"number": "κ", "data": "batch"},
        "resolved κ alone": {"number": "κ where it is resolved"},
    }
    choices = {"own coordinates, training set": own["spearman"]}
    choices |= {words: correlated(**at).set_index("level")["spearman"] for words, at in others.items()}
    choices |= {f"to a loss of {losses[f'target_{k}']:.3f}": own[f"spearman_{k}"] for k in (0, 2)}
    rows = [[words, *(f"{rhos[level]:+.2f}" for level in LEVELS)] for words, rhos in choices.items()]
    rows.append(["share of unresolved κ", *(f"{100 * (1 - own['resolved'][level]):.0f} %" for level in LEVELS)])
    return markdown(["ρ of κ at ½", *LEVELS], rows)


def kappa_and_speed_raw() -> list[str]:
    """Rank correlations with κ of units in the coordinates of BNP's P from raw statistics, by layer, along the way."""
    points = {"start": "start", "quarter": "¼", "half": "½", "target": "target"}
    rows = []
    for layer in ("fc1", "fc2", "fc3"):
        way = [correlated(number="κ", level="unit", layer=layer, coordinates="raw", point=at).iloc[0] for at in points]
        rows.append(
            [layer, *(f"{at['spearman']:+.2f} ({at['p_adjusted']:.3f})" for at in way), f"{way[2]['methods']:.0f}"]
        )
    return markdown(["κ of the units of", *points.values(), "methods"], rows)


def kappa_and_speed_examples() -> list[str]:
    """κ of the network at ½ and iterations of some methods, and λ_max · rate of most."""
    frame = read("kappa-and-speed").set_index("method")
    names = ["l2", "vanilla", "kfac", "groupnorm", "muon"]
    rows = [
        ["κ of the network at ½", *(scientific(value) for value in frame.loc[names, "kappa_network"])],
        ["iterations to the loss", *(f"{value:,.0f}" for value in frame.loc[names, "iterations"])],
    ]
    return markdown(["", *(f"`{name}`" for name in names)], rows)


def kappa_and_speed_sharpness() -> list[str]:
    """Range of λ_max · rate at the methods' best rates, in a sentence."""
    low, high = read("kappa-and-speed")["sharpness"].quantile([0.1, 0.9])
    return [f"At its best rate λ_max · rate is between {low:.1f} and {high:.1f} for four fifths of the methods."]


table("methods-compared", methods_compared)
table("known-case", known_case)
table("kappa-and-speed", kappa_and_speed)
table("kappa-and-speed-choices", kappa_and_speed_choices)
table("kappa-and-speed-raw", kappa_and_speed_raw)
table("kappa-and-speed-examples", kappa_and_speed_examples)
table("kappa-and-speed-sharpness", kappa_and_speed_sharpness)


def forecast_by_products() -> list[str]:
    """How well a few products give the forecast of the whole spectrum."""
    frame = read("forecast").dropna()
    ten, hundred = ((frame[f"lanczos_{s}"] / frame[f"stable_{s}"] - 1).abs().max() for s in AHEAD[1:])
    worst = f"to {100 * ten:.0f} % after ten steps and {100 * hundred:.0f} % after 100, at worst."
    share = 100 * (frame["sharpness"] <= 1).mean()
    bounds = (
        f"Gauss and Gauss–Radau quadrature bound it only where no step overshoots, λ_max · rate ≤ 1: {share:.0f} %."
    )
    return [f"Thirty products, by Lanczos from the gradient, give the last of these forecasts {worst} {bounds}"]


table("forecast-by-products", forecast_by_products)


def of_seeds_and_edge(row: pd.Series) -> str:
    """Median loss of a method, with a star if its rate is at the edge of those tried."""
    return "–" if math.isnan(row["loss"]) else f"{row['loss']:.3f}{'*' if row['at_edge'] is True else ''}"


def resolved_alone(file: str) -> tuple[float, list[float]]:
    """Share of unresolved κ of the network (%), and the rank correlations of resolved ones alone."""
    frame = read(file).dropna(subset=["kappa"])
    known = frame[frame["resolved"] == 1]
    moments = [runs for _, runs in known.groupby(["seed", "iteration"])]
    rhos = [np.mean([-runs["kappa"].corr(runs[f"gain_{s}"], method="spearman") for runs in moments]) for s in AHEAD]
    return 100 * (1 - len(known) / len(frame)), rhos


def forecast_resolved(file: str) -> list[str]:
    """Share of unresolved κ, and the rank correlations of resolved ones alone, in a sentence."""
    share, rhos = resolved_alone(file)
    alone = ", ".join(f"{rho:+.2f}" for rho in rhos)
    start = f"{share:.0f} % of these κ of the network are unresolved, and enter as lower bounds"
    return [f"{start}; resolved ones alone have {alone}."]


def forecast_tasks_resolved() -> list[str]:
    """The same over the tasks, with the share of each."""
    found = {title: resolved_alone(file) for file, title in TASKS.items()}
    alone = ", ".join(over_tasks(rhos) for rhos in zip(*(rhos for _, rhos in found.values()), strict=True))
    shares = ", ".join(f"{title} {share:.0f} %" for title, (share, _) in found.items())
    return [f"Unresolved κ of the network, which enter as lower bounds: {shares}; resolved ones alone have {alone}."]


table("forecast-tasks-resolved", forecast_tasks_resolved)
table("forecast-resolved", lambda: forecast_resolved("forecast"))
table("forecast-cnn-resolved", lambda: forecast_resolved("forecast-cnn"))


def preconditioned_losses() -> list[str]:
    """Losses of all methods on the four networks."""
    frame = read("preconditioners")
    # decomposed seldom on CIFAR-10: the same method
    frame["method"] = frame["method"].str.partition(":update")[0]
    frame["text"] = frame.apply(of_seeds_and_edge, axis=1)
    networks, methods = frame["network"].unique(), frame["method"].unique()
    texts = frame.pivot(index="method", columns="network", values="text").fillna("–")
    rows = [[f"`{method}`", *texts.loc[method, networks]] for method in methods]
    return markdown(["method", *(f"`{name}`" for name in networks)], rows)


def preconditioned_correlations() -> list[str]:
    """Rank correlations of the loss with what was measured half-way."""
    frame = read("preconditioners-correlations")
    frame["text"] = [
        "–" if math.isnan(row.rho) else f"{row.rho:.2f} ({row.low:.2f} … {row.high:.2f}; {row.methods} methods)"
        for row in frame.itertuples()
    ]
    # exact, and so known of enough methods, on one network only
    names = [name for name in frame["quantity"].unique() if name != "κ own, network"]
    networks = frame["network"].unique()
    texts = frame.pivot(index="network", columns="quantity", values="text")
    return markdown(["network", *names], [[f"`{network}`", *texts.loc[network, names]] for network in networks])


def preconditioned_coupling() -> list[str]:
    """λ_max of the network over that of its layers: median and quartiles."""
    frame = read("preconditioners-coupling")
    rows = []
    for network, group in frame.groupby("network", sort=False):
        quartiles = group.set_index("coordinates")
        texts = (f"{at['median']:g} ({at['quarter']:g} … {at['three_quarters']:g})" for _, at in quartiles.iterrows())
        rows.append([f"`{network}`", *texts])
    return markdown(["network", "plain coordinates", "own coordinates"], rows)


def preconditioned_resolved() -> list[str]:
    """How many κ are resolved, in a sentence."""
    frame = read("preconditioners-resolved").set_index(["level", "coordinates"])
    layers, networks = (frame.loc[(level, ("plain", "own")), :] for level in ("layer", "network"))
    parts = [
        f"of {counts['measured'].iloc[0]:,} κ of {words} {counts['resolved'].iloc[0]:,} are resolved in plain and "
        f"{counts['resolved'].iloc[1]:,} in own coordinates"
        for words, counts in (("layers", layers), ("networks, on `cnn-digits`,", networks))
    ]
    text = "; ".join(parts) + "."
    return [text[0].upper() + text[1:]]


table("preconditioners-losses", preconditioned_losses)
table("preconditioners-correlations", preconditioned_correlations)
table("preconditioners-coupling", preconditioned_coupling)
table("preconditioners-resolved", preconditioned_resolved)


MOMENTS = ("start", "10 %", "50 %", "end")
#: Kinds of blocks in the order of Wang et al.
BLOCKS = ("embedding", "query, key", "feed-forward", "value, output", "norm")


def sharpness_order() -> list[str]:
    """In how many seeds the average sharpness of a kind of block is below that of the next."""
    sharpness = read("transformers-sharpness").pivot(index=["moment", "seed"], columns="family", values="sharpness")
    rows = []
    for smaller, larger in pairwise(BLOCKS):
        holds = (sharpness[smaller] < sharpness[larger]).groupby("moment").sum()
        rows.append([f"{smaller} < {larger}", *(str(holds[moment]) for moment in MOMENTS)])
    return markdown(["seeds of three in which it holds", *MOMENTS], rows)


def heterogeneity() -> list[str]:
    """The largest λ_max of a weight matrix over the smallest: median and range over the seeds."""
    frame = read("transformers-heterogeneity").set_index(["network", "moment"])
    places = [("GPT", moment) for moment in MOMENTS]
    places += [(name, "start") for name in dict.fromkeys(frame.index.get_level_values("network")) if name != "GPT"]
    rows = []
    for network, moment in places:
        ratios = frame.loc[[(network, moment)]]
        values = (ratios[name].sort_values() for name in ("all", "without_head", "without_head_query_key"))
        texts = (f"{rounded(x.median())} ({rounded(x.min())} … {rounded(x.max())})" for x in values)
        rows.append([f"{network}, {moment}", *texts])
    titles = ["all weight matrices", "without the head", "without head, query, key"]
    return markdown(["λ_max, largest block over smallest", *titles], rows)


def rounded(value: float) -> str:
    """A number to two digits, without an exponent."""
    return f"{float(f'{value:.1e}'):,g}"


def rows_of_weights() -> list[str]:
    """Share of ‖H‖²_F on the diagonal of blocks: mean and range over the seeds."""
    words = {
        "network": "whole network, by layers",
        "fc": "head, by its 103 rows",
        "block1.fc1": "first feed-forward matrix, by its 256 rows",
        "block1.attention.q": "query of block 1, by its 64 rows",
        "block1.attention.v": "value of block 1, by its 64 rows",
    }
    shares = read("transformers-rows").groupby(["of", "moment"])["share"]
    texts = shares.agg(lambda x: f"{x.mean():.2g} ({x.min():.2g} … {x.max():.2g})").unstack()
    rows = [[text, *texts.loc[of, list(MOMENTS)]] for of, text in words.items()]
    return markdown(["share of ‖H‖²", *MOMENTS], rows)


def unit_conditions() -> list[str]:
    """Median κ of units by kind of block, with the share that is negative."""
    frame = read("transformers-kappa").set_index(["family", "moment"])
    rows = []
    for block in BLOCKS:
        units = frame.loc[block]
        texts = (f"{units.loc[moment, 'kappa']:.1e}, {100 * units.loc[moment, 'negative']:.0f} %" for moment in MOMENTS)
        known = units["resolved"].sum() / units["units"].sum()
        rows.append([block, *texts, f"{100 * units['rank'].min():.0f} %", f"{100 * (1 - known):.1f} %"])
    return markdown(["median κ, negative eigenvalues", *MOMENTS, "rank, least median", "units unresolved"], rows)


def units_measured() -> list[str]:
    """How many units were measured, and how exactly, in a sentence."""
    frame = read("transformers-kappa")
    unresolved = 1 - frame["resolved"].sum() / frame["units"].sum()
    return [
        f"All {frame['units'].sum():,} unit Hessians were formed exactly and compared with the model's own double "
        f"backward (largest relative difference {frame['difference'].max():.0e}); κ of {100 * unresolved:.0f} % "
        "of them is unresolved."
    ]


def trained_transformers() -> list[str]:
    """What the small transformers reach, by method."""
    columns = {
        "`chargpt`: bits per character": ("chargpt", "bits_per_character", -1),
        "accuracy (%)": ("chargpt", "accuracy", 1),
        "`vit-digits`: accuracy (%)": ("vit-digits", "accuracy", 1),
    }
    rows = []
    for name in methods_of(built_in("chargpt"), WHOLE):
        of_method = (number(by_seed(runs_of(study, ""), name, *of)) for study, *of in columns.values())
        rows.append([name.replace("+", ", ") if "+" in name else f"{name}, AdamW", *of_method])
    return markdown(["", *columns], rows)


def transformers_claims() -> list[str]:
    """The claims of both studies of transformers, with the numbers."""
    studies, rows = ("chargpt", "vit-digits"), []
    for claims in zip(*(built_in(study).claims for study in studies), strict=True):
        for says, study, claim in zip((claims[0].says, ""), studies, claims, strict=True):
            verdict, fewest, numbers = judgement(study, WHOLE, claim)
            rows.append([says, f"`{study}`: {numbers}", str(fewest), verdict])
    return markdown(["the paper", "here", "seeds", "verdict"], rows)


table("transformers-trained", trained_transformers)
table("transformers-claims", transformers_claims)
table("transformers-sharpness", sharpness_order)
table("transformers-heterogeneity", heterogeneity)
table("transformers-rows", rows_of_weights)
table("transformers-kappa", unit_conditions)
table("transformers-units", units_measured)


def machines() -> list[str]:
    """Machine of each file, and the commit whose code wrote it; files of one origin in a row."""
    frame = read("machines")
    rows = []
    for (commit, *machine), group in frame.groupby(["commit", "cores", "gpu", "torch"], sort=False):
        rows.append([", ".join(f"`{name}`" for name in group["file"]), f"`{commit}`", *map(str, machine)])
    return markdown(["file in docs/results", "commit", "cores", "GPU", "torch"], rows)


table("cwo-table-1", lambda: small_numbers("cwo-table-1", "error", {name: name for name in CWO_NETWORKS}))
table("cwo-table-2", lambda: small_numbers("cwo-table-2", "error", CWO_BATCHES))
table("cwo-table-3", lambda: small_numbers("cwo-table-3", "error", {"cifar10": "cifar10"}))
table("cwo-table-4", lambda: small_numbers("cwo-table-4", "error", {"cifar10": "cifar10"}))
table("cwo-claims", lambda: small_claims("cwo-table-1", "cwo-table-2", "cwo-table-3", "cwo-table-4"))
table("wc-table-1", lambda: small_numbers("wc-table-1", "accuracy", {"cifar10": "cifar10"}))
table("wc-table-2", lambda: small_numbers("wc-table-2", "accuracy", {"cifar10": "cifar10"}))
table("wc-figure-1", lambda: small_numbers("wc-figure-1", "accuracy", {name: name for name in WC_NETWORKS}))
table("wc-claims", wc_claims)
table("iteration-times", iteration_times)
table("forecast", forecast)
table("forecast-cnn", lambda: forecast("forecast-cnn"))
table("forecast-by-run", forecast_by_run)
table("forecast-tasks", forecast_tasks)
table("forecast-by-task", forecast_by_task)
table("forecast-paired", forecast_paired)
table("machines", machines)
table("bnp-figure-3", lambda: claims_with_numbers(built_in("bnp-figure-3")))
table(
    "bnp-figure-4-fc-batch-6",
    lambda: claims_with_numbers(built_in("bnp-figure-4", "fc-batch-6", "fc-batch-6-standardized")),
)
table(
    "bnp-figure-4-fc-batch-1",
    lambda: claims_with_numbers(built_in("bnp-figure-4", "fc-batch-1", "fc-batch-1-standardized")),
)
table("bnp-figure-4-cnn", lambda: claims_with_numbers(built_in("bnp-figure-4", "cnn5-batch-1")))
table("bnp-table-1", lambda: claims_with_numbers(built_in("bnp-table-1")))
table("bnp-figure-5-batch-128", lambda: claims_with_numbers(built_in("bnp-figure-5", "batch-128")))
table("bnp-figure-5-batch-2", lambda: claims_with_numbers(built_in("bnp-figure-5", "batch-2")))
table("bnp-small-batches", lambda: claims_with_numbers(small("bnp-figure-5")))
table("cwo-branches", branches)
table("prec", lambda: claims_with_numbers(small("prec")))
table("bnp-statistics", lambda: claims_with_numbers(small("bnp-statistics")))


def filled(page: str) -> str:
    """A page with the tables that its marks name."""
    return MARK.sub(lambda mark: mark[1] + "\n".join(["", *TABLES[mark[2]](), "", mark[3]]), page)


def main() -> None:
    """Write the tables into the pages."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (now := filled(text)) != text:
            path.write_text(now, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()

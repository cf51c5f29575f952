"""Preconditioners under one instrument: ``python figures/preconditioners.py --out FOLDER [--seeds N] [-j JOBS]``.

Every method on four small networks at its best of five rates: loss, time, κ of layers in plain and own coordinates at
the start, half-way and at the end, λ_max of the network times half the rate, and the share of the gain that the best
diagonal and the best Kronecker scaling would bring. A method on a network is two sweeps of a study that the folder
keeps, first of rates, then with probes at the best one; what is there is not repeated, so that the command goes on
where it was stopped. The main methods at one seed come first, then all of them, then further seeds.
``--results docs/results`` writes what is there into the files of the page, draws its figure, and measures nothing.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
from matplotlib.ticker import LogLocator, NullFormatter
from scipy.stats import rankdata, spearmanr

from hesscond.errors import ConfigError
from hesscond.methods import parse
from hesscond.report import Page, method_colors, save_figure
from hesscond.report.series import intervals, quantile
from hesscond.study import load_study
from hesscond.study.config import merged

ITERATIONS = 200
#: Before which steps is measured: the first of them when averages over ten steps are there.
MOMENTS = {"start": 10, "half": 100, "end": 199}
#: Moments of the file.
SHOWN = ("half", "end")
#: Factors of a method's default rate: those from 0.1 to 10 are tried, and further ones while the best is at an end.
AROUND = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: Of every network.
PROBE: dict[str, Any] = {
    "levels": ["layer", "network"],
    "units": [0],
    "every": 0,
    "train_every_epochs": 0,
    "at": list(MOMENTS.values()),
    "optima": 350,
    "precision": "float64",
}
#: So many products with the whole Hessian bound κ of a network from below, and give λ_max; without them κ is exact.
BOUNDED = {"products": 60}
#: The networks: a study and its scale, what is changed of it so that whole layers can be decomposed, and what of it is
#: measured. Behind root mean square normalization no sums are zero, as they are behind layer normalization.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn-digits": ("paper", {"probe": {"layers": ["conv1", "conv2", "fc1"], "train_samples": 64}}),
    "vit-digits": (
        "small",
        {
            "model": {"width": 16, "depth": 2, "heads": 2, "hidden": 32, "norm": "rms"},
            "probe": BOUNDED
            | {
                "layers": ["patches", "block1.attention.v", "block1.fc1", "block2.attention.out", "fc"],
                "train_samples": 16,
            },
        },
    ),
    "chargpt": (
        "small",
        {
            "data": {"context": 16},
            "model": {"width": 16, "depth": 2, "heads": 2, "norm": "rms:eps=1e-5"},
            "probe": BOUNDED
            | {
                "layers": ["block1.attention.v", "block1.attention.out", "block2.attention.v", "fc"],
                "train_samples": 4,
            },
        },
    ),
    "fc-cifar10": ("small", {"probe": BOUNDED | {"layers": ["fc2", "fc3"], "train_samples": 32}}),
}
MAIN = ("vanilla", "bnp", "adam", "kfac", "shampoo", "soap", "muon", "gauss-newton")
FURTHER = (
    *(
        "shampoo:power=half",
        "ekfac",
        "psgd",
        "sophia",
        "adahessian",
        "whitening",
        "equilibration",
        "adagrad",
        "rmsprop",
        "adamw",
    ),
    *("batchnorm", "layernorm", "sphere", "weightnorm"),
)
#: What may rank methods, by level and column of the table of cells, and which of these are drawn.
QUANTITIES = {
    "κ own, layers": ("layer", "kappa_own"),
    "κ(H), layers": ("layer", "kappa"),
    "κ own, network": ("network", "kappa_own"),
    "λη/2, network": ("network", "sharpness"),
}
DRAWN = {"κ own, layers": "κ of layers, own coordinates", "λη/2, network": "λη/2 of the network"}
#: Decompositions of 3,072 × 3,072 matrices take eight seconds: on CIFAR-10 they are made at most three times in a run,
#: but for Shampoo, which needs them in its first steps.
SELDOM = {name: f"{name}:update_every=100" for name in ("kfac", "ekfac", "soap", "whitening")}
#: What takes too long, by network and method.
IN_CHART = "left out: whole layers in its coordinates take 10,100 products and a decomposition of that order"
LEFT_OUT = {
    ("chargpt", "gauss-newton"): "left out: a backward pass for each of 16 × 63 curved outputs is a minute a step",
    ("fc-cifar10", "equilibration"): IN_CHART,
    ("fc-cifar10", "sphere"): IN_CHART,
    ("fc-cifar10", "weightnorm"): IN_CHART,
}


def of_network(network: str, methods: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The methods as they are run on a network, and the reasons why others are not."""
    known, missing = [], {}
    for name in methods:
        text = SELDOM.get(name, name) if network == "fc-cifar10" else name
        if (network, name) in LEFT_OUT:
            missing[name] = LEFT_OUT[network, name]
            continue
        try:
            parse(text)
        except ConfigError:
            missing[name] = "not in this version"
        else:
            known.append(text)
    return known, missing


def described(network: str) -> dict[str, Any]:
    """The study that is compared on a network."""
    scale, changes = NETWORKS[network]
    study = load_study(network, scale).model_dump(mode="json", exclude_none=True)
    kept = {key: study[key] for key in ("data", "model", "training")}
    kept["training"] = {key: kept["training"][key] for key in ("batch_size", "loss")} | {"iterations": ITERATIONS}
    config = merged(kept | {"probe": PROBE}, changes)
    return {"name": network, "description": f"{study['description']}: for the comparison of preconditioners"} | config


def measure(folder: Path, network: str, methods: Sequence[str], seeds: int, jobs: int) -> None:
    """Try the rates of each method on a network, then probe it at the best with every seed."""
    path = folder / f"{network}.toml"
    path.write_text(tomli_w.dumps(described(network)), encoding="utf-8")
    study = load_study(str(path))
    for method in of_network(network, methods)[0]:
        out = folder / network / parse(method).folder
        out.mkdir(parents=True, exist_ok=True)
        default = study.learning_rate(method, study.training.batch_size)
        rates = [float(f"{factor * default:.3g}") for factor in AROUND]
        reach = [AROUND.index(0.1), AROUND.index(10.0)]
        if (out / "rates" / "sweep.toml").exists():
            tried = tomllib.loads((out / "rates" / "sweep.toml").read_text(encoding="utf-8"))["rates"]
            reach = [rates.index(tried[0]), rates.index(tried[-1])]

        def swept(place: str, rates: Sequence[float], *options: str, method: str = method, out: Path = out) -> str:
            command = [sys.executable, "-m", "hesscond", "sweep", str(path), "-m", method, "-j", str(jobs)]
            command += ["--lr", ",".join(map(str, rates)), "--out", str(out / place), *options]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            sys.stderr.write(done.stderr)
            if done.returncode not in (0, 1, 2):  # all is well, something diverged, it was refused
                raise SystemExit(done.returncode)
            return done.stderr.strip().rpartition("\n")[2].removeprefix("error: ") if done.returncode == 2 else ""

        while True:
            refusal = swept("rates", rates[reach[0] : reach[1] + 1], "--probe-every", "0")
            best = {} if refusal else pd.read_csv(out / "rates" / "best.csv").iloc[0]
            if not refusal and math.isnan(best["learning_rate"]):
                refusal = "diverged or failed at every learning rate"
            if not refusal and best["edge"] == "lowest" and reach[0] > 0:
                reach[0] -= 1
            elif not refusal and best["edge"] == "highest" and reach[1] < len(AROUND) - 1:
                reach[1] += 1
            else:
                break
        if not refusal:
            there = out / "best" / "sweep.toml"
            done = tomllib.loads(there.read_text(encoding="utf-8"))["seeds"] if there.exists() else []
            refusal = swept("best", [best["learning_rate"]], "--seed", f"0:{max(seeds, len(done))}", "--time")
        (out / "refusal.txt").write_text(refusal, encoding="utf-8")


def read(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Results of every method on all networks that are there, and every κ."""
    compared, cells = [], []
    for network in NETWORKS:
        for method in of_network(network, MAIN + FURTHER)[0]:
            out = folder / network / parse(method).folder
            if not (out / "refusal.txt").exists():
                continue
            row: dict[str, Any] = {"network": network, "method": method}
            row["refusal"] = (out / "refusal.txt").read_text(encoding="utf-8") or math.nan
            if (out / "best" / "best.csv").exists():
                row |= pd.read_csv(out / "best" / "best.csv").iloc[0].to_dict()
                runs = pd.read_csv(out / "best" / "runs.csv")
                losses = runs.loc[runs["status"] == "finished", "loss"]
                row |= {"at_edge": isinstance(pd.read_csv(out / "rates" / "best.csv").iloc[0]["edge"], str)}
                row |= {"loss": losses.median(), "loss_min": losses.min(), "loss_max": losses.max()}
                row |= {"seeds": len(losses), "diverged": len(runs) - len(losses)}
                cells.append(pd.read_csv(out / "best" / "cells.csv").assign(network=network, method=method))
            compared.append(row)
    return pd.DataFrame(compared), pd.concat(cells, ignore_index=True)


def shown(low: float, high: float) -> str:
    """A median κ, or the bound that it is known to exceed; empty: not computed."""
    if math.isnan(low):
        return ""
    return f"{low:.1e}" if low == high else f"≥ {low:.1e}"


def median(cells: pd.DataFrame, name: str) -> tuple[float, float]:
    """Between which the median of κ lies, over layers and seeds."""
    return quantile(*intervals(cells.astype({"resolved": "boolean", "resolved_own": "boolean"}), name), 0.5)


def gains(cells: pd.DataFrame, moment: int, level: str) -> tuple[str, str]:
    """κ in the plain and in the own coordinates at a moment."""
    selected = cells[(cells["iteration"] == moment) & (cells["level"] == level)]
    return (shown(*median(selected, "kappa")), shown(*median(selected, "kappa_own"))) if len(selected) else ("", "")


def share(row: dict[str, Any], kind: str) -> str:
    """The share of the possible gain, between its bounds."""
    low, high = (row.get(f"share_{kind}_{end}", math.nan) for end in ("lower", "upper"))
    if math.isnan(low):
        return ""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} … {high:.2f}"


def row_of(row: dict[str, Any], cells: pd.DataFrame) -> dict[str, Any]:
    """Row of a method on a network in the file of the page."""
    selected = cells[(cells["network"] == row["network"]) & (cells["method"] == row["method"])]
    record = {"network": row["network"], "method": row["method"]}
    if isinstance(row["refusal"], str):
        return record | {"refusal": row["refusal"].removeprefix(f"{row['method']}: ")}
    record |= {"rate": f"{row['learning_rate']:g}", "at_edge": row["at_edge"]}
    record |= {name: f"{row[name]:.3f}" for name in ("loss", "loss_min", "loss_max")}
    record |= {"diverged": row["diverged"], "time": f"{row['time']:.2f}"}
    for level, name in (("layer", "half"), ("layer", "end"), ("network", "end")):
        plain, of_method = gains(selected, MOMENTS[name], level)
        places = f"kappa_{level}{'s' if level == 'layer' else ''}_{name}"
        record |= {places: plain, f"{places}_own": of_method}
    whole = selected[selected["level"] == "network"].groupby("iteration")["sharpness"].median()
    record |= {f"sharpness_{name}": f"{whole.get(MOMENTS[name], math.nan):.2g}" for name in SHOWN}
    return record | {f"share_{kind}": share(row, kind) for kind in ("diagonal", "kronecker")}


def methods_of(compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """All methods on all networks, and why some are missing."""
    rows = [row_of(row, cells) for row in compared.to_dict("records")]
    for network in compared["network"].unique():
        missing = of_network(network, MAIN + FURTHER)[1]
        rows += [{"network": network, "method": name, "refusal": reason} for name, reason in missing.items()]
    return pd.DataFrame(rows)


def resolved(cells: pd.DataFrame) -> pd.DataFrame:
    """How many κ were resolved, and how many cells of methods × networks × moments have a median that is."""
    layers = cells[cells["level"] == "layer"]
    exact = [name for name, (_, changes) in NETWORKS.items() if "products" not in changes["probe"]]
    networks = cells[(cells["level"] == "network") & cells["network"].isin(exact)]
    rows = []
    for of, part in (("layer", layers), ("network", networks)):
        for name, words in (("kappa", "plain"), ("kappa_own", "own")):
            low, high = intervals(part.astype({"resolved": "boolean", "resolved_own": "boolean"}), name)
            groups = [median(group, name) for _, group in part.groupby(["network", "method", "iteration"])]
            there = [pair for pair in groups if not math.isnan(pair[0])]
            known = sum(a == b for a, b in there)
            rows.append((of, words, int((~np.isnan(low)).sum()), int(np.isfinite(high).sum()), len(there), known))
    return pd.DataFrame(rows, columns=["level", "coordinates", "measured", "resolved", "medians", "medians_resolved"])


def predicted(network: str, name: str, compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """The loss at the end and the median of a quantity half-way, of the methods where both are known."""
    level, column = QUANTITIES[name]
    losses = compared[(compared["network"] == network) & compared["loss"].notna()].set_index("method")["loss"]
    half = cells[(cells["network"] == network) & (cells["level"] == level) & (cells["iteration"] == MOMENTS["half"])]
    medians = {}
    for method, rows in half.groupby("method"):
        low, high = (rows[column].median(),) * 2 if column == "sharpness" else median(rows, column)
        if low == high:
            medians[method] = low
    return pd.concat([losses, pd.Series(medians, dtype=float, name="value")], axis=1, join="inner").dropna()


def rankings(compared: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over methods of the final loss with what was measured half-way."""
    rows = [
        {"network": network, "quantity": name, **correlation(predicted(network, name, compared, cells))}
        for network in compared["network"].unique()
        for name in QUANTITIES
    ]
    return pd.DataFrame(rows)


def correlation(columns: pd.DataFrame) -> dict[str, float]:
    """Spearman's ρ of two columns with its 95 % interval over resampled rows; of five at least."""
    both = columns.to_numpy(dtype=float)
    if len(both) < 5:
        return {"methods": len(both)}
    generator = np.random.default_rng(0)
    samples = np.array([both[generator.integers(len(both), size=len(both))] for _ in range(2000)])
    ranks = rankdata(samples, axis=1)
    x, y = np.moveaxis(ranks - ranks.mean(1, keepdims=True), 2, 0)
    norms = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    spread = (x * y).sum(1)[norms > 0] / norms[norms > 0]
    low, high = np.nanquantile(spread, [0.025, 0.975])
    return {"methods": len(both), "rho": spearmanr(*both.T).statistic, "low": low, "high": high}


def draw(compared: pd.DataFrame, cells: pd.DataFrame, path: Path) -> None:
    """The loss at the end against κ in own coordinates and λη/2 half-way: a panel for each network and quantity."""
    networks = list(compared["network"].unique())
    colors = method_colors([method.partition(":update")[0] for method in compared["method"].unique()])
    page = Page(7.2)
    with page.styled():
        figure = page.figure(3.8)
        axes = figure.subplots(2, len(networks), sharey="col", squeeze=False)
        for row, (name, label) in enumerate(DRAWN.items()):
            for ax, network in zip(axes[row], networks, strict=True):
                points = predicted(network, name, compared, cells)
                for method, loss, value in points.itertuples():
                    method = method.partition(":update")[0]
                    ax.plot(value, loss, "o", ms=4, color=colors[method], mec="white", mew=0.3)
                    ax.annotate(method, (value, loss), fontsize=3.5, xytext=(2, 2), textcoords="offset points")
                ax.set_xscale("log")
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter("{x:g}")
                ax.yaxis.set_minor_formatter(NullFormatter())
                ax.xaxis.set_minor_formatter(NullFormatter())
                ax.spines[["top", "right"]].set_visible(False)
                of = correlation(points)
                ax.set_xlabel(f"{label}\nρ = {of['rho']:.2f} ({of['low']:.2f} … {of['high']:.2f})")
                if row == 0:
                    ax.set_title(network, loc="left")
            axes[row][0].set_ylabel("loss at the end")
    save_figure(figure, path)


def coupling(cells: pd.DataFrame) -> pd.DataFrame:
    """Quartiles of λ_max of the network over the largest of the layers measured: 1 where no layer acts on another."""
    cells = cells.rename(columns={"lambda_max": "plain", "lambda_max_own": "own"})
    at = ["network", "method", "seed", "iteration"]
    whole, parts = (
        part.groupby(at)[["plain", "own"]].max() for part in (cells[cells["level"] == n] for n in ("network", "layer"))
    )
    rows = []
    for network, ratios in (whole / parts).groupby("network"):
        for name in ("plain", "own"):
            low, middle, high = ratios[name].dropna().quantile([0.25, 0.5, 0.75])
            rows.append((network, name, middle, low, high))
    return pd.DataFrame(rows, columns=["network", "coordinates", "median", "quarter", "three_quarters"])


def write(folder: Path, results: Path) -> None:
    """Write the files of the page, and draw its figure."""
    compared, cells = read(folder)
    tables = {"": methods_of(compared, cells), "-coupling": coupling(cells), "-resolved": resolved(cells)}
    tables["-correlations"] = rankings(compared, cells)
    for name, frame in tables.items():
        path = results / f"preconditioners{name}.csv"
        frame.to_csv(path, index=False, lineterminator="\n", float_format="%.3g")
    draw(compared, cells, results.parent / "images" / "preconditioners.png")


def main() -> None:
    """Measure, or write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if arguments.results is not None:
        write(arguments.out, arguments.results)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    passes = [(MAIN, 1), *((MAIN + FURTHER, seeds) for seeds in range(1, arguments.seeds + 1))]
    for methods, seeds in passes:
        for network in NETWORKS:
            measure(arguments.out, network, methods, seeds, arguments.jobs)


if __name__ == "__main__":
    main()

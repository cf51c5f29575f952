"""Does κ explain the speed? ``python figures/kappa_and_speed.py --out FOLDER [--study fc-digits] [--hidden 16,16]``.

Every method is trained at every rate of a grid; its speed is the number of iterations to a training loss, at the rate
that takes fewest. At that rate it is trained again, and κ and other numbers of the Hessian are measured at fixed points
of the way. The rank correlation of the two over the methods, with its uncertainty, is the answer.

The folder keeps all that was measured (speed.sqlite), so that the command goes on where it was stopped; the two files
of docs/results and the figure (speed.pdf, speed.png). ``--known-case`` does it for regressions trained with the whole
training set at once, where theory gives the rate, and prints a CSV file.
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from scipy.optimize import isotonic_regression
from scipy.stats import kendalltau, rankdata
from torch import nn
from torch.func import functional_call

from hesscond import ConditionNumber, lanczos, probe
from hesscond.capture import eligible_layers
from hesscond.data import Dataset
from hesscond.errors import HesscondError
from hesscond.hessians import HessianOperator, Reparametrized
from hesscond.methods import Method, parse, registered
from hesscond.models import build
from hesscond.operators import Congruence, SymmetricOperator, trace
from hesscond.probing.applied import ProbeMethod
from hesscond.probing.results import NetworkResult
from hesscond.problem.untouched import untouched
from hesscond.report import Page, method_colors, save_figure
from hesscond.spectra.condition import NOISE, conclude
from hesscond.spectra.solvers.base import eigenvalue_values
from hesscond.study import StudyConfig, load_data, load_study
from hesscond.study.runner import make_loss

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
#: Shares of the budget after which vanilla's loss is a target; the second is the one of the tables.
TARGETS, MAIN = (0.3, 0.6, 1.0), 1
#: A rate is given up at this multiple of the iterations that the best one before it took to all targets.
PATIENCE = 1.5
#: What never reaches the target counts as this many budgets.
MISSED = 3
#: Where a run is measured, as shares of its iterations to the target.
POINTS = {"start": 0.0, "quarter": 0.25, "half": 0.5, "target": 1.0}
#: The units of each layer that are measured.
UNITS = (0, 1, 2, 3)
#: Matrices up to this order are formed; of larger ones the largest eigenvalue and the trace are estimated.
FORMED, PROBES = 3000, 60
#: Steps of gradient descent in the case with a known answer.
MOST = 80_000
STATISTICS = {
    "kappa": "κ",
    "resolved kappa": "κ where it is resolved",
    "spread": "λ_max · rank / ‖H‖_*",
    "concentration": "λ_max / ‖H‖_*",
    "lambda_max": "λ_max",
    "sharpness": "λ_max · rate",
    "decrease": "‖Pᵀ∇L‖² / (2 λ_max L)",
}
#: Methods of one kind; what is near to each other is no independent evidence.
FAMILIES = {
    "no normalization": ("vanilla", "l2", "gradient-regularization"),
    "inputs": ("standardize", "minmax"),
    "batch": ("batchnorm", "batchrenorm", "four-things-batchnorm"),
    "sample": ("layernorm", "groupnorm"),
    "preconditioned inputs": ("bnp", "whitening"),
    "adaptive": ("adagrad", "rmsprop", "adam", "adamw", "adahessian", "sophia"),
    "preconditioned layers": ("kfac", "ekfac", "gauss-newton", "shampoo", "soap", "psgd", "muon"),
    "weights": ("weightnorm", "centred-weightnorm", "weightstandardization", "equilibration", "sphere"),
}
TABLES = """
create table if not exists setup (text);
create table if not exists run (method, seed, rate, status, seconds, primary key (method, seed, rate));
create table if not exists curve (method, seed, rate, iteration, loss, primary key (method, seed, rate, iteration));
create table if not exists point (method, seed, point, iteration, loss, rate, decrease, seconds,
    primary key (method, seed, point));
create table if not exists measured (method, seed, point, data, level, layer, unit, coordinates, kappa, lower, upper,
    resolved, lambda_max, trace, nuclear, size, rank, negative, note);
"""


@dataclass(frozen=True)
class Setup:
    """What is trained and measured; results of two different ones do not go into one folder."""

    study: str
    scale: str
    hidden: tuple[int, ...]
    samples: int
    iterations: int
    every: int
    rates: tuple[float, ...]

    @property
    def config(self) -> StudyConfig:
        """The study with the changes."""
        study = load_study(self.study, scale=self.scale)
        changes: dict[str, Any] = {}
        if self.hidden:
            changes["model"] = {**study.model.model_dump(), "hidden": list(self.hidden)}
        if self.samples:
            changes["data"] = {**study.data.model_dump(exclude_none=True), "train_samples": self.samples}
        return StudyConfig.model_validate({**study.model_dump(mode="json", exclude_none=True), **changes})


class Task(NamedTuple):
    """A network's data, and how it is trained."""

    study: StudyConfig
    data: Dataset
    inputs: torch.Tensor
    targets: torch.Tensor
    loss_fn: nn.Module


class Step(NamedTuple):
    """A run between the gradient and the step: the weights, and the P of the step about to be taken."""

    iteration: int
    model: nn.Module
    method: Method
    batch: tuple[torch.Tensor, torch.Tensor]


@cache
def task(setup: Setup) -> Task:
    """The data of a setup, once a process."""
    study = setup.config
    data = load_data(study.data)
    inputs = data.train_inputs
    assert isinstance(inputs, torch.Tensor)
    if study.model.architecture.kind == "vector":
        inputs = inputs.flatten(1)
    return Task(study, data, inputs, data.train_targets, make_loss(study))


def steps(setup: Setup, text: str, seed: int, rate: float) -> Iterator[Step]:
    """Train; initial weights and batches are those of a study's run with this seed."""
    study, data, inputs, targets, loss_fn = task(setup)
    torch.manual_seed(seed)
    model = build(
        study.model.name,
        input_shape=data.form.input_shape,
        outputs=data.form.outputs,
        generator=torch.Generator().manual_seed(seed),
        **study.model.options,
    )
    method = parse(text).create(model)
    method.fit(inputs)
    optimizer = method.optimizer(rate, **study.training.optimizer_options)
    order, size = torch.Generator().manual_seed(seed + 1), study.training.batch_size
    method.check_batch(size)
    for iteration in range(setup.iterations + 1):
        position = iteration % (len(targets) // size)
        if position == 0:
            permutation = torch.randperm(len(targets), generator=order)
        chosen = permutation[position * size : (position + 1) * size]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs[chosen]), targets[chosen])
        method.observe(loss)
        penalty = method.penalty(loss)
        (loss if penalty is None else loss + penalty).backward()
        method.transform_gradients()
        yield Step(iteration, model, method, (inputs[chosen], targets[chosen]))
        optimizer.step()
        method.after_step()


@torch.no_grad()
def full_loss(setup: Setup, model: nn.Module) -> float:
    """The loss over the training set as one batch, in training mode: what κ over the training set is the Hessian of."""
    _, _, inputs, targets, loss_fn = task(setup)
    with untouched(model):
        return float(loss_fn(model(inputs), targets))


# -- the speed --------------------------------------------------------------------------------------------------------


class Store:
    """All that was measured; several processes may write."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.connection = folder, sqlite3.connect(folder / "speed.sqlite", timeout=600)
        text = json.dumps(asdict(setup))
        with self.connection:
            self.connection.executescript(TABLES)
            there = self.connection.execute("select text from setup").fetchone()
            if there is None:
                self.connection.execute("insert into setup values (?)", (text,))
            elif there[0] != text:
                raise SystemExit(f"{folder} holds results of {there[0]}, not of {text}: choose another --out")

    def read(self, table: str) -> pd.DataFrame:
        """A whole table."""
        return pd.read_sql(f"select * from {table}", self.connection)

    def write(self, **tables: Sequence[Sequence[Any]]) -> None:
        """Rows of several tables at once."""
        with self.connection:
            for table, rows in tables.items():
                for row in rows:
                    self.connection.execute(f"insert into {table} values ({','.join('?' * len(row))})", tuple(row))

    def has(self, table: str, **at: Any) -> bool:
        """Whether there is a row with these values."""
        where = " and ".join(f"{name} = ?" for name in at)
        cursor = self.connection.execute(f"select 1 from {table} where {where} limit 1", tuple(at.values()))
        return cursor.fetchone() is not None


def crossing(iterations: np.ndarray, losses: np.ndarray, target: float) -> float:
    """The iteration at which a loss is reached, ln(loss) interpolated; infinite: it is not."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return math.inf
    k = below[0]
    if k == 0:
        return float(iterations[0])
    before, after = np.log(losses[k - 1 : k + 1])
    return float(np.interp(math.log(target), [after, before], [iterations[k], iterations[k - 1]]))


def run_rates(folder: Path, setup: Setup, text: str, seed: int, targets: Sequence[float]) -> None:
    """The curves of a method and seed at every rate, those near the study's first; without targets to the end."""
    store = Store(folder, setup)
    try:
        usual = task(setup).study.learning_rate(text, task(setup).study.training.batch_size)
    except HesscondError:
        usual = float(np.median(setup.rates))
    best = math.inf
    for rate in sorted(setup.rates, key=lambda rate: abs(math.log(rate / usual))):
        if store.has("run", method=text, seed=seed, rate=rate):
            continue
        done = store.read("curve").query("method == @text and seed == @seed")
        for _, curve in done.groupby("rate"):
            if targets:
                best = min(best, crossing(curve["iteration"].to_numpy(), curve["loss"].to_numpy(), min(targets)))
        start, status, curve = time.monotonic(), "budget", []
        for step in steps(setup, text, seed, rate):
            if step.iteration % setup.every:
                continue
            loss = full_loss(setup, step.model)
            if not math.isfinite(loss):
                status = "diverged"
                break
            curve.append((text, seed, rate, step.iteration, loss))
            if targets and loss <= min(targets):
                status = "reached"
                break
            if step.iteration > PATIENCE * best:
                status = "given up"
                break
        store.write(curve=curve, run=[(text, seed, rate, status, time.monotonic() - start)])


def targets_of(store: Store, setup: Setup) -> list[float]:
    """The losses that vanilla at its best rate has after shares of the budget, geometric mean over the seeds."""
    curves = store.read("curve").query("method == 'vanilla'")
    targets = []
    for share in TARGETS:
        early = curves[curves["iteration"] <= share * setup.iterations]
        lowest = early.groupby(["rate", "seed"])["loss"].min().map(math.log).groupby("rate").mean()
        targets.append(math.exp(lowest.min()))
    return targets


def speeds(store: Store, setup: Setup, targets: Sequence[float]) -> pd.DataFrame:
    """Iterations to every target by method, seed and rate."""
    rows = []
    for (method, seed, rate), curve in store.read("curve").groupby(["method", "seed", "rate"]):
        at, losses = curve["iteration"].to_numpy(), curve["loss"].to_numpy()
        lowest = losses.min() if len(losses) else math.inf
        rows += [(method, seed, rate, k, crossing(at, losses, target), lowest) for k, target in enumerate(targets)]
    return pd.DataFrame(rows, columns=["method", "seed", "rate", "target", "iterations", "lowest"])


def best_rates(crossings: pd.DataFrame, target: int, limit: int) -> dict[str, float]:
    """The rate of each method whose iterations to a target have the smallest geometric mean over the seeds.

    A seed that does not get there counts as `MISSED` budgets, one that diverged from the first as more; where no rate
    gets there, that of the lowest loss.
    """
    runs = crossings[crossings["target"] == target].copy()
    runs["log"] = runs["iterations"].clip(1, MISSED * limit).map(math.log)
    seeds, worst = runs["seed"].nunique(), math.log(2 * MISSED * limit)
    by_rate = runs.groupby(["method", "rate"])
    means = (by_rate["log"].sum() + (seeds - by_rate["log"].count()) * worst) / seeds
    table = pd.DataFrame({"log": means.round(9), "lowest": by_rate["lowest"].mean()}).sort_values(["log", "lowest"])
    return {method: rows.index[0][1] for method, rows in table.groupby("method")}


# -- what is measured -------------------------------------------------------------------------------------------------


class Formed(SymmetricOperator):
    """A matrix of products, not symmetric to the last bit."""

    def __init__(self, A: torch.Tensor) -> None:
        super().__init__(len(A), A.dtype, A.device)
        self.A = A

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.A @ vectors


class Part(SymmetricOperator):
    """The rows and columns of an operator that belong to a layer."""

    def __init__(self, whole: SymmetricOperator, rows: torch.Tensor) -> None:
        super().__init__(len(rows), whole.dtype, whole.device)
        self.whole, self.rows, self.operands = whole, rows, (whole,)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        full = vectors.new_zeros(self.whole.shape[0], vectors.shape[1])
        full[self.rows] = vectors
        return self.whole.multiply(full)[self.rows]


def of_spectrum(H: SymmetricOperator) -> dict[str, Any]:
    """κ, the largest |λ|, the trace and Σ|λ| of a matrix; of a large one what can be estimated."""
    size = H.shape[0]
    if size > FORMED:
        ends = lanczos(H, 1, "both", tol=1e-3, missed=1.0).eigenvalues
        return {"lambda_max": float(ends.abs().max()), "trace": trace(H, PROBES).value, "size": size}
    A = H.to_dense().to(torch.float64)
    # as `hesscond.probe` decides it for a network; rounding shows as asymmetry
    size_of_A = float(torch.linalg.matrix_norm(A))
    error = max(float(torch.linalg.matrix_norm(A - A.T)), NOISE * torch.finfo(A.dtype).eps * size_of_A)
    values = eigenvalue_values(((A + A.T) / 2).numpy(), error, error)
    assert values.negative is not None
    signed = np.where(values.negative, -values.magnitudes, values.magnitudes)
    return numbers_of_values(torch.from_numpy(signed), conclude(values, order=size, limit=size, scale=0))


def numbers_of_values(values: torch.Tensor, kappa: ConditionNumber) -> dict[str, Any]:
    """What is kept of all eigenvalues and of κ."""
    return {
        "kappa": kappa.value if kappa.resolved else None,
        "lower": kappa.lower,
        "upper": kappa.upper if kappa.resolved else None,
        "resolved": int(kappa.resolved),
        "lambda_max": float(values.abs().max()),
        "trace": float(values.sum()),
        "nuclear": float(values.abs().sum()),
        "size": len(values),
        "rank": kappa.rank,
        "negative": kappa.negative,
    }


class Plain(NamedTuple):
    """The Hessian in the parameters themselves, formed once; other coordinates are products with it.

    ``H`` has tensor after tensor, as `parts` says; operators of layers have unit after unit.
    """

    H: SymmetricOperator
    names: tuple[str, ...]
    shapes: dict[str, torch.Size]

    @property
    def parts(self) -> dict[str, list[slice]]:
        """The rows of every parameter."""
        sizes = [self.shapes[name].numel() for name in self.names]
        return {n: [slice(end - k, end)] for n, k, end in zip(self.names, sizes, accumulate(sizes), strict=True)}

    def like(self, other: HessianOperator) -> SymmetricOperator:
        """The Hessian in the order of that of some layers."""
        layout, parts = other.unit_layout, self.parts
        rows = {name: torch.arange(s[0].start, s[0].stop).view(self.shapes[name]) for name, s in parts.items()}
        numbered = layout.vector_of([rows[name].to(torch.float64) for name in layout.names])
        return Part(self.H, numbered.long())


def measure(setup: Setup, step: Step, layers: Sequence[str]) -> list[dict[str, Any]]:
    """All numbers of all levels and coordinates, over the training set and over the mini-batch."""
    _, _, inputs, targets, loss_fn = task(setup)
    places = {step.method.layer(layer): layer for layer in layers}
    rows = []
    for data, pairs in (("train", (inputs, targets)), ("batch", step.batch)):
        whole = of_all(step.model, loss_fn, pairs, None, None)
        H: SymmetricOperator = whole.operator
        if whole.n_params <= FORMED:
            H = Formed(H.to_dense())
        shapes = {name: p.shape for name, p in step.model.named_parameters()}
        plain = Plain(H, whole.parameters, shapes)
        in_plain: list[dict[str, Any]] = []
        for coordinates, method in (("plain", None), ("own", step.method), ("raw", "bnp")):
            if coordinates == "own" and is_plain(step.method, layers):
                rows += [row | {"coordinates": "own"} for row in in_plain]
                continue
            for level, numbers_of in (("unit", of_units), ("network", of_network)):
                try:
                    records = numbers_of(step.model, loss_fn, pairs, places, method, plain)
                except HesscondError as refusal:
                    records = [{"note": str(refusal)}]
                records = [{"data": data, "level": level, "coordinates": coordinates} | row for row in records]
                in_plain += records if coordinates == "plain" else []
                rows += records
    return rows


def of_all(
    model: nn.Module, loss_fn: nn.Module, pairs: Any, layers: Sequence[str] | None, method: ProbeMethod
) -> NetworkResult:
    """The Hessian of all parameters, or of those of some layers together."""
    result = probe(model, loss_fn, pairs, layers, "network", method, check=False)["network"]
    assert isinstance(result, NetworkResult)
    return result


def is_plain(method: Method, layers: Sequence[str]) -> bool:
    """Whether a method is measured in the parameters that are trained, as they are."""
    try:
        probed = [method.probed(method.layer(layer)) for layer in layers]
    except HesscondError:
        return False
    return all(coordinates is None or isinstance(coordinates, Reparametrized) for coordinates in probed)


def of_units(
    model: nn.Module, loss_fn: nn.Module, pairs: Any, places: Mapping[str, str], method: ProbeMethod, plain: Plain
) -> list[dict[str, Any]]:
    """Some units of every layer; dead ones have no Hessian."""
    blocks = probe(model, loss_fn, pairs, list(places), method=method, units=UNITS, check=False, rtol=1e-3)
    rows = []
    for place, layer in places.items():
        for unit, kappa in zip(UNITS, blocks[place].conditions, strict=True):
            values = torch.linalg.eigvalsh(blocks[place].hessian(unit))
            if values.abs().max() > 0:
                rows.append({"layer": layer, "unit": unit} | numbers_of_values(values, kappa))
    return rows


def of_network(
    model: nn.Module, loss_fn: nn.Module, pairs: Any, places: Mapping[str, str], method: ProbeMethod, plain: Plain
) -> list[dict[str, Any]]:
    """The network, and the blocks of its Hessian that belong to the layers."""
    parts: Mapping[str, Sequence[slice]]
    if method is None:
        H, parts = plain.H, plain.parts
    else:
        # the raw statistics give a P for layers only, which may not be all that the network has
        only = list(places) if isinstance(method, str) else None
        whole = of_all(model, loss_fn, pairs, only, method)
        H, parts = whole.operator, whole.parts
        if isinstance(H, Congruence) and isinstance(H.A, HessianOperator):
            H = Congruence(plain.like(H.A), H.P)
        if H.shape[0] <= FORMED:
            H = Formed(H.to_dense())
    rows = [{"level": "network"} | of_spectrum(H)]
    for place, layer in places.items():
        ranges = [where for name, where in parts.items() if name == place or name.startswith(f"{place}.")]
        index = torch.cat([torch.arange(s.start, s.stop) for slices in ranges for s in slices])
        rows.append({"level": "layer", "layer": layer} | of_spectrum(Part(H, index)))
    return rows


def decrease(setup: Setup, step: Step, lambda_max: float | None) -> float | None:
    """‖Pᵀ∇L‖²/(2 λ_max L): the share of the loss that the best short step down the gradient takes, as H has it."""
    _, _, inputs, targets, loss_fn = task(setup)
    if not lambda_max:
        return None
    # copies: a gradient of the parameters themselves would be one of the training to the method's hooks
    named = {n: p.detach().clone().requires_grad_() for n, p in step.model.named_parameters() if p.requires_grad}
    with untouched(step.model):
        loss = loss_fn(functional_call(step.model, named, (inputs,)), targets)
        parts = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    g = {n: torch.zeros_like(p) if part is None else part for (n, p), part in zip(named.items(), parts, strict=True)}
    try:
        Mg = step.method.preconditioned(g)
    except HesscondError:
        return None
    return sum(float((g[name] * Mg[name]).sum()) for name in g) / (2 * lambda_max * loss.item())


def measure_run(folder: Path, setup: Setup, text: str, seed: int, rate: float, length: int) -> None:
    """Train once more and measure at the points that are not in the store."""
    store = Store(folder, setup)
    columns = list(store.read("measured").columns)
    where: dict[int, list[str]] = {}
    for name, share in POINTS.items():
        if not store.has("point", method=text, seed=seed, point=name):
            where.setdefault(round(share * length), []).append(name)
    for step in steps(setup, text, seed, rate) if where else ():
        if step.iteration not in where:
            continue
        start, loss = time.monotonic(), full_loss(setup, step.model)
        layers = list(eligible_layers(build_plain(setup)))
        rows = measure(setup, step, layers)
        top = next((r.get("lambda_max") for r in rows if is_whole(r)), None)
        promised = decrease(setup, step, top)
        seconds = time.monotonic() - start
        for name in where.pop(step.iteration):
            at = {"method": text, "seed": seed, "point": name}
            store.write(
                measured=[[(at | row).get(column) for column in columns] for row in rows],
                point=[(text, seed, name, step.iteration, loss, rate, promised, seconds)],
            )
        if not where:
            break


def is_whole(row: dict[str, Any]) -> bool:
    """Whether it is the network over the training set in the method's coordinates."""
    return (row["level"], row["data"], row["coordinates"]) == ("network", "train", "own")


def build_plain(setup: Setup) -> nn.Module:
    """The network as it is before a method changes it."""
    study, data, *_ = task(setup)
    shape, outputs = data.form.input_shape, data.form.outputs
    return build(study.model.name, input_shape=shape, outputs=outputs, **study.model.options)


# -- the answer -------------------------------------------------------------------------------------------------------


def predictors(store: Store) -> pd.DataFrame:
    """Logarithms of all numbers: one row a method and seed, one column a level, layer, coordinates, ….

    Units of a layer: their median; layer "all": the mean of the logarithms over the layers. An unresolved κ is its
    lower bound in "kappa", and missing in "resolved kappa".
    """
    table = store.read("measured")
    table = table[table["lambda_max"] > 0].copy()
    rates = store.read("point").set_index(["method", "seed", "point"])["rate"]
    at = pd.MultiIndex.from_frame(table[["method", "seed", "point"]])
    table["rate"] = rates.reindex(at).to_numpy()
    total = table["nuclear"].fillna(table["trace"])
    rank = table["rank"].fillna(table["size"])
    values = pd.DataFrame(
        {
            "kappa": table["kappa"].fillna(table["lower"]),
            "resolved kappa": table["kappa"],
            "spread": table["lambda_max"] * rank / total,
            "concentration": table["lambda_max"] / total,
            "lambda_max": table["lambda_max"],
            "sharpness": table["lambda_max"] * table["rate"],
        }
    )
    keys = ["method", "seed", "level", "layer", "coordinates", "data", "point"]
    logs = values.where(values > 0).map(math.log10, na_action="ignore")
    table = pd.concat([table[keys].fillna({"layer": "all"}), logs], axis=1)
    by_layer = table.groupby(keys).median().reset_index()
    keys.remove("layer")
    parts = by_layer[by_layer["level"] != "network"].drop(columns="layer")
    everywhere = parts.groupby(keys).mean().reset_index().assign(layer="all")
    together = pd.concat([by_layer, everywhere])
    long = together.melt(["method", "seed", "level", "layer", "coordinates", "data", "point"], var_name="statistic")
    names = ["level", "layer", "coordinates", "data", "statistic", "point"]
    shares = store.read("point").dropna(subset=["decrease"])
    shares = shares[shares["decrease"] > 0].assign(value=lambda frame: frame["decrease"].map(math.log10))
    where = {"level": "network", "layer": "all", "coordinates": "own", "data": "train", "statistic": "decrease"}
    long = pd.concat([long, shares[["method", "seed", "point", "value"]].assign(**where)])
    return long.pivot_table(index=["method", "seed"], columns=names, values="value")


def ranked(values: np.ndarray) -> np.ndarray:
    """Ranks, centred and of norm 1, so that products are rank correlations."""
    ranks = rankdata(values, axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    norm = np.linalg.norm(ranks, axis=-1, keepdims=True)
    return np.divide(ranks, norm, out=np.zeros_like(ranks), where=norm > 0)


def partial_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """Spearman's correlation of x and y, given a third."""
    rx, ry, rz = ranked(x), ranked(y), ranked(given)
    xy, xz, yz = rx @ ry, rx @ rz, ry @ rz
    rest = (1 - xz**2) * (1 - yz**2)
    return float((xy - xz * yz) / math.sqrt(rest)) if rest > 0 else math.nan


class Sample(NamedTuple):
    """A predictor and ln(iterations), methods × seeds; NaN: not measured."""

    x: np.ndarray
    y: np.ndarray


def resampled(sample: Sample, families: np.ndarray, draws: int, *, by_family: bool) -> np.ndarray:
    """Spearman's correlation of bootstrap samples: methods (or families of them), then seeds of each."""
    rng = np.random.default_rng(0)
    methods, seeds = sample.x.shape
    # a seed without it counts as the mean of the others
    sample = Sample(*(np.where(np.isnan(v), np.nanmean(v, 1, keepdims=True), v) for v in sample))
    kinds = families if by_family else np.arange(methods)
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    rhos = np.empty(draws)
    for k in range(draws):
        drawn = rng.integers(len(groups), size=len(groups))
        chosen = np.concatenate([groups[i] for i in drawn])
        of_seeds = rng.integers(seeds, size=(len(chosen), seeds))
        x, y = (part[chosen[:, None], of_seeds].mean(1) for part in sample)
        rhos[k] = ranked(x) @ ranked(y)
    return rhos


def correlations(
    store: Store, setup: Setup, targets: Sequence[float], draws: int
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One row for every predictor; the predictors; and ln(iterations) by method and seed, a column for each target."""
    crossings = speeds(store, setup, targets)
    logs = {}
    for target in range(len(targets)):
        rates = best_rates(crossings, target, setup.iterations)
        own = crossings[(crossings["target"] == target) & (crossings["rate"] == crossings["method"].map(rates))]
        logs[target] = own.set_index(["method", "seed"])["iterations"].clip(1, MISSED * setup.iterations).map(math.log)
    speed = pd.DataFrame(logs)
    columns = predictors(store)
    # every (method, seed) that was measured
    speed = speed.reindex(columns.index)
    rows, statistics = [], []
    rng = np.random.default_rng(0)
    methods = list(columns.index.unique("method"))
    shuffles = np.array([rng.permutation(len(methods)) for _ in range(draws)])
    sharp = columns.get(("network", "all", "own", "train", "sharpness", "half"))
    resolved = resolved_share(store)
    for name in columns.columns:
        x, ys = columns[name].unstack("seed").reindex(methods), speed.unstack("seed").reindex(methods)
        kept = x.notna().any(axis=1).to_numpy()
        if kept.sum() < 6:
            continue
        X, Y = x.mean(axis=1).to_numpy(), {t: ys[t].mean(axis=1).to_numpy() for t in range(len(targets))}
        y = Y[MAIN]
        families = np.array([family(method) for method in methods])[kept]
        sample = Sample(x.to_numpy()[kept], ys[MAIN].to_numpy()[kept])
        rho = float(ranked(X[kept]) @ ranked(y[kept]))
        # iterations change hands among the methods that were measured
        null = ranked(np.array([y[s[kept[s]]] for s in shuffles])) @ ranked(X[kept])
        statistics.append(np.arctanh(np.clip(np.abs(null), 0, 0.999999)) * math.sqrt(kept.sum() - 3))
        row = dict(zip(columns.columns.names, name, strict=True)) | {
            "methods": int(kept.sum()),
            "resolved": resolved.get((*name[:4], name[5])),
            "spearman": rho,
            "kendall": float(kendalltau(X[kept], y[kept]).statistic),
            "p": float((np.abs(null) >= abs(rho) - 1e-12).mean()),
        }
        for label, by_family in (("", False), ("family_", True)):
            spread = resampled(sample, families, max(draws // 5, 20), by_family=by_family)
            row[f"{label}low"], row[f"{label}high"] = np.nanquantile(spread, [0.025, 0.975])
        if sharp is not None:
            z = sharp.groupby("method").mean().reindex(methods).to_numpy()
            both = kept & np.isfinite(z)
            row["partial"] = partial_correlation(X[both], y[both], z[both]) if both.sum() > 4 else math.nan
        for target, values in Y.items():
            row[f"spearman_{target}"] = float(ranked(X[kept]) @ ranked(values[kept]))
        rows.append(row)
    table = pd.DataFrame(rows)
    own = np.arctanh(table["spearman"].abs().clip(upper=0.999999)) * np.sqrt(table["methods"] - 3)
    largest = np.max(statistics, axis=0)
    # of the largest of all correlations that were looked at: Westfall and Young (1993)
    table["p_adjusted"] = [(largest >= value - 1e-9).mean() for value in own]
    return table, columns, speed


def resolved_share(store: Store) -> dict[Any, float]:
    """The share of κ that was resolved, by level, layer, coordinates, data and point."""
    table = store.read("measured").dropna(subset=["resolved"]).fillna({"layer": "all"})
    keys = ["level", "layer", "coordinates", "data", "point"]
    shares = dict(table.groupby(keys)["resolved"].mean().items())
    together = table[table["level"] != "network"].assign(layer="all")
    return shares | dict(together.groupby(keys)["resolved"].mean().items())


def family(method: str) -> str:
    """The kind of a method as ``--method`` says it; of an unknown one itself."""
    names = parse(method).plain.split("+")
    return next((kind for kind, members in FAMILIES.items() if names[-1] in members), method)


def published(table: pd.DataFrame) -> pd.DataFrame:
    """All correlations, with the number's name and ρ instead of the columns' names."""
    named = table.assign(number=table["statistic"].map(STATISTICS))
    columns = ["level", "layer", "coordinates", "data", "number", "point", "methods", "resolved", "spearman"]
    columns += ["low", "high", "family_low", "family_high", "p", "p_adjusted", "partial"]
    return named[columns + [f"spearman_{k}" for k in range(len(TARGETS)) if k != MAIN]]


def of_methods(store: Store, setup: Setup, targets: Sequence[float]) -> pd.DataFrame:
    """Rate, iterations (geometric mean of the seeds, fewest, most) and κ at half of the way of each method."""
    crossings = speeds(store, setup, targets)
    rates = best_rates(crossings, MAIN, setup.iterations)
    measured = store.read("measured").query("data == 'train' and coordinates == 'own' and point == 'half'")
    best = crossings[(crossings["target"] == MAIN) & (crossings["rate"] == crossings["method"].map(rates))]
    rows = []
    for method, runs in best.groupby("method"):
        reached = runs["iterations"][runs["iterations"] < math.inf]
        at = measured[measured["method"] == method]
        whole, layers = at[at["level"] == "network"], at[at["level"] == "layer"]
        row = {"method": method, "rate": rates[method], "seeds_there": len(reached)}
        row |= {f"target_{number}": target for number, target in enumerate(targets)}
        row["iterations"] = math.exp(runs["iterations"].clip(1, MISSED * setup.iterations).map(math.log).mean())
        row |= {"fewest": reached.min(), "most": reached.max(), "kappa_network": geometric_mean(whole)}
        row |= {f"kappa_{layer}": geometric_mean(part) for layer, part in layers.groupby("layer")}
        rows.append(row | {"sharpness": whole["lambda_max"].mean() * rates[method]})
    return pd.DataFrame(rows).sort_values("iterations")


def geometric_mean(rows: pd.DataFrame) -> float:
    """Geometric mean of κ over the seeds, an unresolved one by its lower bound; NaN if none was measured."""
    return math.exp(rows["kappa"].fillna(rows["lower"]).map(math.log).mean())


def draw(columns: pd.DataFrame, speed: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Iterations to the target against κ of the network, the layers and the units, and against what λ_max tells."""
    panels = [
        ("network", "own", "kappa", "half"),
        ("layer", "own", "kappa", "half"),
        ("unit", "own", "kappa", "half"),
        ("network", "own", "concentration", "half"),
        ("network", "own", "sharpness", "half"),
    ]
    methods = list(columns.index.unique("method"))
    colors = method_colors(methods)
    page = Page(7.2)
    with page.styled():
        figure = page.figure(3.4)
        axes = figure.subplots(1, len(panels), sharey=True)
        y = speed[MAIN].groupby("method").mean().map(math.exp)
        for ax, (level, coordinates, statistic, point) in zip(axes, panels, strict=True):
            name = (level, "all", coordinates, "train", statistic, point)
            ax.set_title(f"{level},\n{STATISTICS[statistic]}", loc="left")
            if name not in columns:
                continue
            x = columns[name].groupby("method").mean()
            for method in methods:
                seeds = columns[name].xs(method, level="method"), speed[MAIN].xs(method, level="method")
                ax.plot(10 ** seeds[0], np.exp(seeds[1]), ".", ms=2, color=colors[method], alpha=0.5)
                ax.plot(10 ** x[method], y[method], "o", ms=4, color=colors[method], mec="white", mew=0.3)
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.xaxis.set_minor_formatter(NullFormatter())
            row = table.set_index(["level", "layer", "coordinates", "data", "statistic", "point"]).loc[name]
            ax.set_xlabel(f"ρ = {row['spearman']:+.2f}\n({row['low']:+.2f} … {row['high']:+.2f})")
            ax.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("iterations to the target loss")
        # the last panel has all methods that were measured
        name_methods(axes[-1], y[x.dropna().index].sort_values(), colors)
    save_figure(figure, path)


def name_methods(ax: Axes, ends: pd.Series, colors: Mapping[str, str]) -> None:
    """Names of the methods to the right of a panel, at their ascending ``ends`` or as near as they do not overlap."""
    low, high = np.log(ax.get_ylim())
    heights = (np.log(ends.to_numpy()) - low) / (high - low)
    steps = np.arange(len(heights)) / len(heights)
    moved = isotonic_regression(heights - steps).x + steps
    for method, height, beside in zip(ends.index, heights, moved - max(moved[-1] - 1, 0), strict=True):
        color = colors[str(method)]
        ax.plot([1, 1.1], [height, beside], color=color, lw=0.5, transform=ax.transAxes, clip_on=False)
        ax.text(1.12, beside, str(method), color=color, fontsize=5, va="center", transform=ax.transAxes)


# -- a case with a known answer ---------------------------------------------------------------------------------------


#: Shares of the first gap after which the steps are counted.
GAPS = (0.5, 0.1, 0.01, 1e-4, 1e-6)


def known_case() -> pd.DataFrame:
    """Softmax regression with L2 on digits in several coordinates, gradient descent with all data at once, in float64.

    Near the minimum the decay of the gradient is that of (κ − 1)/(κ + 1) at α = 2/(λ_max + λ_min), κ in the method's
    coordinates there; further away nothing is promised.
    """
    data = load_data(load_study("fc-digits").data)
    assert isinstance(data.train_inputs, torch.Tensor)
    inputs, targets = data.train_inputs.flatten(1).to(torch.float64), data.train_targets
    loss_fn = nn.CrossEntropyLoss()
    rows: list[tuple[Any, ...]] = []
    for strength in (1e-3, 1e-2):
        for text in ("l2", "standardize+l2", "minmax+l2", "bnp:statistics=data+l2"):
            spec = f"{text}:strength={strength}"
            try:
                rows.append((spec, *one_known(spec, inputs, targets, loss_fn, GAPS)))
            except HesscondError as refusal:
                print(f"{spec}: {refusal}", file=sys.stderr)
    return pd.DataFrame(rows, columns=["method", "kappa", "predicted", "measured", *(f"steps_{gap:g}" for gap in GAPS)])


def one_known(
    spec: str, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: nn.Module, gaps: Sequence[float]
) -> tuple[float, ...]:
    """κ at the minimum, the predicted and the measured decay, and the steps to shares of the first gap."""
    model = build("mlp", input_shape=(64,), outputs=10, hidden=(), generator=torch.Generator().manual_seed(0))
    model = model.to(torch.float64)
    method = parse(spec).create(model)
    method.fit(inputs)

    def objective() -> torch.Tensor:
        loss = loss_fn(model(inputs), targets)
        penalty = method.penalty(loss)
        return loss if penalty is None else loss + penalty

    start = [p.detach().clone() for p in model.parameters()]
    minimize(model, objective)
    least = objective().item()
    functional_step(model, method, objective)
    kappa = probe(model, loss_fn, (inputs, targets), level="layer", method=method)["fc1"].kappa
    if not kappa.resolved or kappa.negative:
        raise HesscondError(f"no minimum, or unresolved: {kappa}")
    alpha = 2 / (kappa.lambda_max + kappa.lambda_min)
    with torch.no_grad():
        for p, q in zip(model.parameters(), start, strict=True):
            p.copy_(q)
    optimizer = method.optimizer(alpha)
    first = objective().item() - least
    counts: list[float] = []
    sizes: list[float] = []
    for step in range(MOST):
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        gap = loss.item() - least
        while len(counts) < len(gaps) and gap <= gaps[len(counts)] * first:
            counts.append(step)
        sizes.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
        if sizes[-1] < 1e-7 * sizes[0] or not math.isfinite(sizes[-1]):
            break
        method.transform_gradients()
        optimizer.step()
        method.after_step()
    end = len(sizes) - 1
    # the last tenth of the way: by then the slowest direction is left
    near = max(end - max(end // 10, 10), 0)
    measured = -math.log(sizes[end] / sizes[near]) / (end - near)
    predicted = -math.log((kappa.value - 1) / (kappa.value + 1))
    return (kappa.value, predicted, measured, *counts, *[math.inf] * (len(gaps) - len(counts)))


def minimize(model: nn.Module, objective: Any) -> None:
    """To round-off, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=20_000,
        max_eval=30_000,
        tolerance_grad=1e-13,
        tolerance_change=0,
        history_size=100,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def functional_step(model: nn.Module, method: Method, objective: Any) -> None:
    """Show the method the data and take no step, so that its coordinates are those of here."""
    model.zero_grad()
    objective().backward()
    method.transform_gradients()
    model.zero_grad()


def numbers(kind: type) -> Any:
    """A list of numbers with commas."""
    return lambda text: tuple(kind(part) for part in text.split(",")) if text else ()


def everything() -> list[str]:
    """All methods, and the paper's batch normalization."""
    return [*(method.name for method in registered()), "batchnorm:position=post"]


def main() -> None:
    """Measure what is missing, then write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="fc-digits")
    parser.add_argument("--scale", default="paper", choices=["paper", "small"])
    parser.add_argument("--hidden", type=numbers(int), default=(), help="widths instead of the study's, as 16,16")
    parser.add_argument("--samples", type=int, default=0, help="training samples (0: those of the study)")
    parser.add_argument("--iterations", type=int, default=1000, help="the budget")
    parser.add_argument("--every", type=int, default=5, help="iterations from one evaluation to the next")
    parser.add_argument("--methods", type=lambda text: text.split(), default=everything(), help="separated by spaces")
    parser.add_argument("--seeds", type=numbers(int), default=(0, 1, 2))
    parser.add_argument("--rates", type=numbers(float), default=RATES)
    parser.add_argument("--draws", type=int, default=5000, help="permutations; a fifth as many bootstrap samples")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--known-case", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("speed"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.known_case:
        known_case().to_csv(sys.stdout, index=False, float_format="%.4g")
        return
    setup = Setup(given.study, given.scale, given.hidden, given.samples, given.iterations, given.every, given.rates)
    store = Store(given.out, setup)
    runnable = [text for text in given.methods if trains(setup, text)]
    with ProcessPoolExecutor(given.jobs) as pool:
        list(pool.map(work, [(run_rates, given.out, setup, "vanilla", seed, []) for seed in given.seeds]))
        targets = targets_of(store, setup)
        print("targets:", ", ".join(f"{target:.4g}" for target in targets), flush=True)
        others = [text for text in runnable if text != "vanilla"]
        every = [(run_rates, given.out, setup, text, seed, targets) for text in others for seed in given.seeds]
        list(pool.map(work, every))
        crossings = speeds(store, setup, targets)
        rates = best_rates(crossings, MAIN, setup.iterations)
        todo = []
        for row in crossings[crossings["target"] == MAIN].itertuples():
            if row.method in runnable and row.seed in given.seeds and row.rate == rates[row.method]:
                length = min(setup.iterations, row.iterations)
                todo.append((measure_run, given.out, setup, row.method, row.seed, row.rate, round(length)))
        list(pool.map(work, todo))
    table, columns, speed = correlations(store, setup, targets, given.draws)
    published(table).to_csv(given.out / "kappa-and-speed-correlations.csv", index=False, float_format="%.3f")
    methods = of_methods(store, setup, targets)
    methods.to_csv(given.out / "kappa-and-speed.csv", index=False, float_format="%.4g")
    for kind in ("pdf", "png"):
        draw(columns, speed, table, given.out / f"speed.{kind}")
    print(methods.to_string(index=False))


def trains(setup: Setup, text: str) -> bool:
    """Whether a method takes a step on this network."""
    try:
        next(steps(setup, text, 0, min(setup.rates)))
    except HesscondError as refusal:
        print(f"{text} is left out: {refusal}", flush=True)
        return False
    return True


def work(job: tuple[Any, ...]) -> None:
    """One job of a pool, with a line of what it was."""
    torch.set_num_threads(1)
    start = time.monotonic()
    function, _, _, *rest = job
    function(*job[1:])
    print(f"{function.__name__} {rest[0]}, seed {rest[1]}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

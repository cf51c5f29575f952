"""Which number tells how much a method will gain? ``python figures/forecast.py --out FILE.csv [--seconds 600]``.

Networks are trained with every method on scikit-learn's digits or another task, each at its best rate of a grid; a
second call goes on with the methods and seeds that the file lacks, at the rates that it has. At some iterations κ,
λ_max · rate and others are measured over the training set in the method's coordinates, and the forecast of the
quadratic model: with eigenvalues λ of the Hessian and the parts c of the gradient along them, s steps of size η lower
the loss by Σ c² (1 − (1 − ηλ)^2s) / 2λ. Then by how much the loss falls in the next 1, 10 and 100 iterations.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kappa_and_speed import UNITS, Formed, Setup, Step, full_loss, is_plain, of_all, of_spectrum, steps, task
from torch.func import functional_call

from hesscond.capture import eligible_layers
from hesscond.errors import HesscondError
from hesscond.methods import registered
from hesscond.models import build
from hesscond.problem.untouched import untouched
from hesscond.spectra.density import recurrences

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: Iterations where a run is measured, and after which its gain is read off.
POINTS, AHEAD = (30, 120), (1, 10, 100)
#: Iterations of the runs that choose a rate.
TRIAL = 100
#: Products with the Hessian in the forecast that needs no matrix.
PRODUCTS = 30
PREDICTORS = ("kappa", "kappa_layer", "kappa_unit", "sharpness", "effective_rank", "first_order", "best_step")
COLUMNS = ("method", "seed", "iteration", "rate", "loss", "resolved", *PREDICTORS)
COLUMNS += tuple(f"{kind}_{s}" for kind in ("forecast", "stable", "lanczos", "gain") for s in AHEAD)


def gradient(setup: Setup, step: Step) -> dict[str, torch.Tensor]:
    """Gradient of the loss over the training set, by parameter."""
    _, _, inputs, targets, loss_fn = task(setup)
    named = {n: p.detach().clone().requires_grad_() for n, p in step.model.named_parameters() if p.requires_grad}
    with untouched(step.model):
        loss = loss_fn(functional_call(step.model, named, (inputs,)), targets)
        parts = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if part is None else part for (n, p), part in zip(named.items(), parts, strict=True)}


def root_of_step(step: Step, g: dict[str, torch.Tensor], layers: list[str]) -> torch.Tensor:
    """M^½ of the step about to be taken, −ηMg, in the parameters that are trained."""
    sizes = [tensor.numel() for tensor in g.values()]
    if is_plain(step.method, layers):
        return torch.eye(sum(sizes), dtype=torch.float64)
    columns = []
    for unit in torch.eye(sum(sizes), dtype=next(iter(g.values())).dtype):
        parts = {n: part.view_as(g[n]) for n, part in zip(g, unit.split(sizes), strict=True)}
        moved = step.method.preconditioned(parts)
        columns.append(torch.cat([moved[n].reshape(-1) for n in g]).double())
    M = torch.stack(columns, 1)
    values, vectors = torch.linalg.eigh((M + M.T) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def decrease(values: np.ndarray, squares: np.ndarray, rate: float, s: int, *, stable: bool = False) -> float:
    """Σ c² (1 − (1 − ηλ)^2s) / 2λ; ``stable``: a direction in which steps overshoot gains nothing, and one of negative
    curvature as much as a flat one.
    """
    if stable:
        values = values.clip(min=0)
    factor = np.abs(1 - rate * values)
    if stable:
        factor = factor.clip(max=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        each = np.where(np.abs(values) * rate * s < 1e-8, rate * s, (1 - factor ** (2 * s)) / (2 * values))
    return float((squares * each).sum())


def block_kappas(A: torch.Tensor, step: Step, g: dict[str, torch.Tensor], layers: list[str]) -> dict[str, float]:
    """κ of the diagonal blocks of A: geometric means over the layers, and over the medians of some of their units.

    An unresolved κ is its lower bound; a block of zeros has none.
    """
    places = torch.arange(len(A)).split([tensor.numel() for tensor in g.values()])
    numbered = {name: part.view_as(tensor) for part, (name, tensor) in zip(places, g.items(), strict=True)}
    of_layers, of_units = [], []
    for layer in map(step.method.layer, layers):
        parts = [part for name, part in numbered.items() if name == layer or name.startswith(f"{layer}.")]
        most = max(map(len, parts))
        rows = torch.cat([part.reshape(most, -1) for part in parts if len(part) == most], 1)
        of_layers += logarithms(A, [torch.cat([part.flatten() for part in parts])])
        if units := logarithms(A, [rows[unit] for unit in UNITS if unit < most]):
            of_units.append(float(np.median(units)))
    return {"kappa_layer": math.exp(np.mean(of_layers)), "kappa_unit": math.exp(np.mean(of_units))}


def logarithms(A: torch.Tensor, blocks: list[torch.Tensor]) -> list[float]:
    """Logarithms of κ of diagonal blocks of A, those of zeros left out."""
    spectra = [of_spectrum(Formed(A[block][:, block])) for block in blocks]
    return [math.log(spectrum["kappa"] or spectrum["lower"]) for spectrum in spectra if spectrum["lambda_max"]]


def measured(setup: Setup, step: Step, rate: float, layers: list[str]) -> dict[str, Any]:
    """Predictors at an iteration."""
    _, _, inputs, targets, loss_fn = task(setup)
    loss = full_loss(setup, step.model)
    g = gradient(setup, step)
    root = root_of_step(step, g, layers)
    whole = of_all(step.model, loss_fn, (inputs, targets), None, None)
    assert list(whole.parameters) == list(g)
    A = root @ whole.operator.to_dense().double() @ root
    A = (A + A.T) / 2
    start = root @ torch.cat([tensor.reshape(-1) for tensor in g.values()]).double()
    spectrum = of_spectrum(Formed(A))
    values, vectors = np.linalg.eigh(A.numpy())
    squares = (vectors.T @ start.numpy()) ** 2
    top, length = spectrum["lambda_max"], float(start @ start)
    (recurrence,) = recurrences(Formed(A), [start / length**0.5], 1, PRODUCTS, null_space=None)
    nodes, weights, _ = recurrence.gauss()
    row = {
        "loss": loss,
        "resolved": spectrum["resolved"],
        "kappa": spectrum["kappa"] or spectrum["lower"],
        **block_kappas(A, step, g, layers),
        "sharpness": top * rate,
        "effective_rank": spectrum["nuclear"] / top,
        "first_order": rate * length / loss,
        "best_step": length / (2 * top * loss),
    }
    for s in AHEAD:
        row[f"forecast_{s}"] = decrease(values, squares, rate, s) / loss
        row[f"stable_{s}"] = decrease(values, squares, rate, s, stable=True) / loss
        row[f"lanczos_{s}"] = decrease(nodes, weights * length, rate, s, stable=True) / loss
    return row


def best_rate(setup: Setup, method: str) -> float:
    """Rate of the smallest loss after some iterations."""
    losses = {}
    for rate in setup.rates:
        for step in steps(setup, method, 0, rate):
            if step.iteration == TRIAL:
                loss = full_loss(setup, step.model)
                losses[rate] = loss if math.isfinite(loss) else math.inf
                break
    return min(losses, key=lambda rate: losses[rate])


def rows_of(setup: Setup, method: str, seed: int, rate: float, layers: list[str]) -> list[dict[str, Any]]:
    """Rows of a run: what was measured, and the share of the loss that the next iterations took."""
    wanted = {point + ahead for point in POINTS for ahead in AHEAD}
    losses, rows = {}, {}
    for step in steps(setup, method, seed, rate):
        if step.iteration in POINTS:
            rows[step.iteration] = measured(setup, step, rate, layers)
        if step.iteration in wanted:
            losses[step.iteration] = full_loss(setup, step.model)
        if step.iteration == max(wanted):
            break
    for point, row in rows.items():
        row |= {"method": method, "seed": seed, "iteration": point, "rate": rate}
        row |= {f"gain_{s}": 1 - losses[point + s] / row["loss"] for s in AHEAD}
    return list(rows.values())


def main() -> None:
    """Train, measure and write, the first seed of all methods first, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument(
        "--study",
        default="fc-digits",
        help="fc-digits, with two hidden layers of 8; others as they are, as figures/forecast.toml/PANEL",
    )
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), default=RATES)
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    hidden = (8, 8) if given.study == "fc-digits" else ()
    setup = Setup(given.study, "paper", hidden, 0, max(POINTS) + max(AHEAD), 1, given.rates)
    study, data, *_ = task(setup)
    shape, outputs = data.form.input_shape, data.form.outputs
    layers = list(eligible_layers(build(study.model.name, input_shape=shape, outputs=outputs, **study.model.options)))
    with given.out.open("a+", newline="", encoding="utf-8") as stream:
        stream.seek(0)
        over = list(csv.DictReader(stream))
        rates: dict[str, float | None] = {row["method"]: float(row["rate"]) for row in over}
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        if not over:
            writer.writeheader()
        for seed in given.seeds:
            left = given.methods or [method_type.name for method_type in registered()]
            for method in (name for name in left if (name, str(seed)) not in {(r["method"], r["seed"]) for r in over}):
                if time.monotonic() > until:
                    return
                try:
                    rate = rates[method] if method in rates else best_rate(setup, method)
                    rows = [] if rate is None else rows_of(setup, method, seed, rate, layers)
                    rates[method] = rate
                except (HesscondError, RuntimeError, AssertionError) as refusal:
                    print(f"{method}: {refusal}", flush=True)
                    rates[method] = None
                    continue
                for row in rows:
                    numbers = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
                    writer.writerow(numbers)
                stream.flush()


if __name__ == "__main__":
    main()

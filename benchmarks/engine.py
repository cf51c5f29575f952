"""What exact Hessians and products cost, in SGD steps or gradients of the same network and next to other tools.

All rows of a table are interleaved in one process, so that a noisy machine disturbs them alike; medians are printed.
"SGD steps" and "gradients" are of the same network on the same batch, "widest" is the relative width of the widest
interval of a κ. Run: ``make bench``, or ``python benchmarks/engine.py --only SECTION``; with HESSCOND_DATA_DIR naming a
folder with CIFAR-10, the stream is that data set. ``--only large`` measures one large network, and its peak of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cases
import measuring
import numpy as np
import torch
from cases import CPU, FULL, QUICK, Problem, Row, characters, dense, residual_network
from measuring import Outcome, milliseconds, processor, seconds_of, show
from peers import BLOCKS, compare, compare_blocks
from products import direction, jvp_of_gradient, product_rows
from torch import nn

import hesscond
from hesscond.data import load
from hesscond.hessians import GGNOperator, HessianOperator

#: Seconds for the repetitions of a row, for a row in all, and for one question to another tool.
SECONDS, LIMIT, PATIENCE = 4.0, 120.0, 45.0


def timed(rows: list[Row], quick: bool) -> list[Outcome]:
    """Rows in turns."""
    return measuring.interleaved(rows, CPU, seconds=0.2 if quick else SECONDS, rounds=3 if quick else 60, limit=LIMIT)


def exact(section: str, given: argparse.Namespace) -> None:
    """Table of exact Hessians."""
    title, make = cases.sections(QUICK if given.quick else FULL, CPU)[section]
    print(f"\n{title}\n\n{measuring.timing_table(timed(make(), given.quick))}", flush=True)


def products(given: argparse.Namespace) -> None:
    """Table of products with Hessians of whole networks, in both precisions, in gradients over the same data."""
    size = QUICK if given.quick else FULL
    for name, make in {
        "MLP": partial(dense, dtype=torch.float32, init="he", spread=0.0),
        "CNN": cases.convolutional_network,
        "transformer": cases.transformer,
    }.items():
        columns = []
        for dtype in (torch.float32, torch.float64):
            problem = make(size).to(dtype)
            vector = direction(problem)
            ours = HessianOperator(problem.model, problem.loss_fn, problem.batch, dtype=dtype) @ vector
            theirs = jvp_of_gradient(problem, vector)()
            off = float((ours - theirs).norm() / theirs.norm())
            if off > 1e3 * torch.finfo(dtype).eps:
                raise RuntimeError(f"{name}: our product and torch.func's differ by {off:.0e} of the norm")
            outcomes, ratios = timed(product_rows(problem), given.quick), []
            unit = outcomes[0]
            for outcome in outcomes:
                unit = outcome if outcome.what == "gradient" else unit
                ratio = measuring.in_units(outcome, unit)
                ratios.append(measuring.why_not(outcome.error) if outcome.error or ratio is None else f"{ratio:.2f}")
            columns += [[outcome.what for outcome in outcomes], ratios]
        lines = list(zip(columns[0], columns[1], columns[3], strict=True))
        show(("product", "float32", "float64"), lines, title=f"Products, in gradients: {name}, {problem}")


def tools(section: str, given: argparse.Namespace) -> None:
    """Other tools on blocks of the MLP or on blocks of a GPT: times and answers."""
    size, patience = (QUICK, 30.0) if given.quick else (FULL, PATIENCE)
    if section == "peers":
        title, comparison = "Other tools on the same Hessians", compare(dense(size, torch.float64), patience)
    else:
        title = "Blocks of a GPT by every tool"
        comparison = compare_blocks(patience, list(BLOCKS)[:1] if given.quick else list(BLOCKS))
    gradient = min(processor(comparison.problem.gradients)[0] for _ in range(20))
    lines = []
    for a in comparison.answers:
        wall = "–" if a.seconds is None else milliseconds(a.seconds)
        lines.append([a.block, a.tool, wall, "–" if a.processor is None else f"{a.processor / gradient:,.0f}", a.says])
    title += f" (float64; quick calls repeated); a gradient: {1e3 * gradient:.2f} ms of the processor"
    show(("block", "tool", "ms", "gradients", "says"), lines, (0, 1, 4), title)
    for label, truth in comparison.truths.items():
        print(f"{label}: {truth}", flush=True)


def gpt(given: argparse.Namespace) -> None:
    """All units of all blocks of a GPT: embeddings row by row, normalizations, dense layers."""
    problem = characters(2, 4, 8, 2, 12) if given.quick else characters(8, 32, 64, 4, 80)
    probe = partial(hesscond.probe, problem.model, problem.loss_fn, problem.batch, "*")
    spent, (wall, layers) = processor(partial(seconds_of, probe, CPU))
    kappas = cases.conditions(layers)
    worst = max(layer.check.difference for layer in layers.values())
    print(
        f"\nGPT: {len(kappas)} units, {sum(kappa.resolved for kappa in kappas)} resolved, {worst:.1e} from the "
        f"model's own products; {wall:.1f} s, {spent:.1f} s of the processor"
    )


#: Large networks in training mode: without the statistics of a batch nothing keeps ResNet-50's activations small.
NETWORKS: dict[str, Callable[[], Problem]] = {
    name: partial(characters, 4, 64, width, width // 64, vocabulary, depth)
    for name, vocabulary, width, depth in (
        ("words-tiny", 500, 64, 1),
        ("words-12M", 5_000, 320, 7),
        ("words-30M", 16_000, 512, 4),
        ("words-76M", 50_000, 512, 8),
        ("words-101M", 50_000, 512, 16),
    )
} | {"resnet50": partial(residual_network, 64, 8, 1000, "resnet50")}


def large(given: argparse.Namespace) -> None:
    """λ_max and κ from below of a large network in products and gradients, and the peak of the memory beyond before."""
    problem = NETWORKS["words-tiny" if given.quick else given.network]()
    problem.model.train()
    problem.gradients()
    gradients = [processor(problem.gradients)[0] for _ in range(3)]
    Path("/proc/self/clear_refs").write_text("5")
    held = resident("VmRSS")
    options = {"level": "network", "products": given.products, "memory": given.memory, "check": False}
    if given.double:
        options["dtype"] = torch.float64
    seconds, results = processor(partial(hesscond.probe, problem.model, problem.loss_fn, problem.batch, **options))
    used, result = resident("VmHWM") - held, results["network"]
    one = sorted(gradients + [processor(problem.gradients)[0] for _ in range(3)])[2]
    product, top = processor(lambda: result.operator @ result.operator.point)[0], result.top
    print(
        f"\n{problem}: {top.products} products ({product / one:.1f} gradients each), {seconds / one:.0f} gradients of "
        f"{one:.2f} s in all\nλ_max {float(top.lower):.8g} … {float(top.upper):.8g}, κ at least "
        f"{result.kappa.lower:,.0f}; {used / 1e9:.2f} GB beyond before, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def resident(kind: str) -> int:
    """Bytes of this process in memory: now (``"VmRSS"``) or at most so far (``"VmHWM"``)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024


def layer_factor(k: int, damping: float) -> np.ndarray:
    """F with FᵀF the Gauss–Newton matrix of the layer in the middle of 64-k-k-10, plus γI of so many mean eigenvalues.

    300 steps of 60 digits; tanh, so that no unit is dead.
    """
    torch.manual_seed(0)
    data, generator = load("digits"), torch.Generator().manual_seed(0)
    x, y = data.train_inputs.double().flatten(1), data.train_targets
    middle = nn.Linear(k, k, bias=False)
    model = nn.Sequential(nn.Linear(64, k), nn.Tanh(), middle, nn.Tanh(), nn.Linear(k, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(300):
        part = torch.randint(0, len(y), (60,), generator=generator)
        cases.step(model, nn.CrossEntropyLoss(), optimizer, x[part], y[part])
    G = GGNOperator(model, nn.CrossEntropyLoss(), (x, y), layers=["2"]).to_dense()
    values, vectors = torch.linalg.eigh(G + damping * G.trace() / len(G) * torch.eye(len(G)).to(G))
    return (vectors * values.clamp(min=0).sqrt()).T.numpy()


def kronecker(given: argparse.Namespace) -> None:
    """Optimal Kronecker scalings of layers of k units with k inputs, κ to 10 %."""
    lines = []
    for k in [4] if given.quick else given.sizes:
        scales = (np.logspace(0, 1, k)[:, None] * np.logspace(0, 2, k)).ravel()
        draw = np.random.default_rng(0).standard_normal
        for name, make in {
            "trained, damped": partial(layer_factor, k, 1e-3),
            "trained": partial(layer_factor, k, 0.0),
            "random": lambda k=k, draw=draw, scales=scales: draw((2 * k * k, k * k)) * scales,
        }.items():
            solve = partial(hesscond.optimal_kronecker_scaling, make(), (k, k), rtol=1.1**0.5 - 1)
            seconds, best = processor(solve)
            cells = f"{best.kappa_given**2:.4g}", f"{best.kappa**2:.4g}", f"{best.gap**2 - 1:.1%}"
            lines.append([f"{k} × {k}, {name}", *cells, str(best.evaluations), f"{seconds:.1f}"])
            print(lines[-1], file=sys.stderr, flush=True)
    heading = ("layer", "κ(H)", "κ((L ⊗ R)ᵀH(L ⊗ R))", "certified gap − 1", "decompositions", "processor seconds")
    show(heading, lines)


#: Sections by name; the last one only if it is named.
SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    **{name: partial(exact, name) for name in cases.sections(QUICK, CPU)},
    "peers": partial(tools, "peers"),
    "products": products,
    "blocks": partial(tools, "blocks"),
    "gpt": gpt,
    "kronecker": kronecker,
    "large": large,
}


#: What the last sections are told.
OPTIONS: dict[str, dict[str, object]] = {
    "sizes": {"type": int, "nargs": "+", "default": [16, 32], "help": "kronecker: units and inputs of a layer"},
    "network": {"choices": NETWORKS, "default": "words-12M", "help": "large"},
    "products": {"type": int, "default": 60, "help": "large: of Lanczos"},
    "memory": {"type": float, "default": 10e9, "help": "large: bytes"},
    "double": {"action": "store_true", "help": "large: products in float64"},
}


if __name__ == "__main__":
    measuring.run_sections(__doc__, SECTIONS, {"large"}, **OPTIONS)

"""What exact Hessians and products cost, in SGD steps or gradients of the same network and next to other tools.

All rows of a table are interleaved in one process, so that a noisy machine disturbs them alike; medians are printed.
"SGD steps" and "gradients" are of the same network on the same batch, "widest" is the relative width of the widest
interval of a κ. Run: ``make bench``, or ``python benchmarks/engine.py --only SECTION``; with HESSCOND_DATA_DIR naming a
folder with CIFAR-10, the stream is that data set.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import (
    FULL,
    QUICK,
    Row,
    characters,
    conditions,
    convolutional_network,
    dense,
    perceptron,
    sections,
    stream_rows,
    training_set,
    transformer,
)
from measuring import (
    Outcome,
    after_forward,
    environment,
    in_units,
    interleaved,
    milliseconds,
    table,
    timing_table,
    why_not,
)
from peers import BLOCKS, Comparison, compare, compare_blocks
from products import direction, jvp_of_gradient, product_rows

import hesscond
from hesscond.hessians import HessianOperator

CPU = torch.device("cpu")


class Bench:
    """Runs sections, prints their tables, and keeps what they measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.quick = arguments, arguments.quick
        self.size = QUICK if arguments.quick else FULL
        self.measured: dict[str, Any] = {"environment": environment(CPU)}
        self.failed = False

    def timed(self, rows: list[Row]) -> list[Outcome]:
        """Rows in turns, as the command line asks."""
        rounds, seconds = (3, 0.2) if self.quick else (60, self.arguments.seconds)
        return interleaved(rows, CPU, seconds=seconds, rounds=rounds, limit=self.arguments.limit)

    def exact(self, section: str) -> None:
        """Table of exact Hessians."""
        if section == "stream":
            samples = training_set(self.size, CPU)
            title = f"Output layer over a stream: {samples.source}, batches of {samples.batch:,}"
            outcomes = self.timed(stream_rows(self.size, samples))
        else:
            title, make = sections(self.size, CPU)[section]
            outcomes = self.timed(make())
        print(f"\n{title}\n\n{timing_table(outcomes)}\n{after_forward(outcomes)}", flush=True)
        self.measured[section] = [outcome.as_dict() for outcome in outcomes]
        self.failed |= any(outcome.error for outcome in outcomes)

    def products(self) -> None:
        """Products in gradients, float32 and float64, of three networks."""
        self.measured["products"] = {}
        for name, make in {"MLP": perceptron, "CNN": convolutional_network, "transformer": transformer}.items():
            outcomes = {}
            for dtype in (torch.float32, torch.float64):
                problem = make(self.size, dtype, CPU)
                vector = direction(problem)
                H, expected = HessianOperator(*vars(problem).values(), dtype=dtype), jvp_of_gradient(problem, vector)()
                if (off := float((H @ vector - expected).norm() / expected.norm())) > 1e3 * torch.finfo(dtype).eps:
                    raise RuntimeError(f"{name}: our product and torch.func's differ by {off:.0e} of the norm")
                outcomes[dtype] = self.timed(product_rows(problem))
            lines = []
            for pair in zip(*outcomes.values(), strict=True):
                cells = [pair[0].what]
                for outcome, rows in zip(pair, outcomes.values(), strict=True):
                    key = "gradient-stream" if "stream" in outcome.key else "gradient"
                    ratio = in_units(outcome, next(row for row in rows if row.key == key))
                    failed = outcome.error is not None or ratio is None
                    cells.append(why_not(outcome.error) if failed else f"{ratio:.2f}")
                lines.append(cells)
            print(f"\nProducts, in gradients: {name}, {problem}\n")
            print(table(("product", "float32", "float64"), lines, left=(0,)), flush=True)
            self.measured["products"][name] = {
                str(dtype): [outcome.as_dict() for outcome in rows] for dtype, rows in outcomes.items()
            }

    def peers(self) -> None:
        """Other tools on the same blocks of the MLP."""
        comparison = compare(dense(self.size, torch.float64, CPU), self.patience)
        self.answers("peers", "Other tools on the same Hessians (float64; quick calls repeated)", comparison)

    def top(self) -> None:
        """Other tools on λ_max of the MLP."""
        comparison = Comparison(perceptron(self.size, torch.float64, CPU), self.patience)
        comparison.whole_network("the network")
        self.answers("top", "λ_max of the network by every tool (float64)", comparison)

    def blocks(self) -> None:
        """Other tools on blocks of a GPT."""
        comparison = compare_blocks(self.patience, list(BLOCKS)[:1] if self.quick else list(BLOCKS))
        self.answers("blocks", "Blocks of a GPT by every tool (float64)", comparison)

    @property
    def patience(self) -> float:
        """Seconds for one question to a tool."""
        return 30.0 if self.quick else self.arguments.peer_seconds

    def answers(self, section: str, title: str, comparison: Comparison) -> None:
        """Tools, blocks, times and answers, times also in gradients of the processor."""
        problem = comparison.problem
        problem.gradients()
        begin = time.process_time()
        for _ in range(20):
            problem.gradients()
        one, lines = (time.process_time() - begin) / 20, []
        for a in comparison.answers:
            wall, gradients = "–" if a.seconds is None else milliseconds(a.seconds), "–"
            if a.processor is not None:
                gradients = f"{a.processor / one:,.0f}"
            passes = "–" if a.passes is None else str(a.passes)
            lines.append([a.block, a.tool, wall, passes, gradients, a.says])
        print(f"\n{title}; a gradient: {1e3 * one:.2f} ms of the processor\n")
        print(table(("block", "tool", "ms", "passes", "gradients", "says"), lines, left=(0, 1, 5)))
        for label, truth in comparison.truths.items():
            print(f"{label}: {truth}", flush=True)
        self.measured[section] = [vars(answer) for answer in comparison.answers]

    def gpt(self) -> None:
        """All units of all blocks of a GPT: embeddings row by row, normalizations, dense layers."""
        problem = characters(2, 4, 8, 2, 12) if self.quick else characters(8, 32, 64, 4, 80)
        wall, processor = time.perf_counter(), time.process_time()
        found = hesscond.probe(problem.model, problem.loss_fn, problem.batch, "*")
        kappas = conditions(found)
        worst = max(layer.check.difference for layer in found.values())
        print(
            f"\nGPT: {len(kappas)} units, {sum(kappa.resolved for kappa in kappas)} resolved, {worst:.1e} from the "
            f"model's own products; {time.perf_counter() - wall:.1f} s, {time.process_time() - processor:.1f} s of the "
            "processor"
        )


#: Sections by name.
SECTIONS: dict[str, Callable[[Bench], None]] = {
    name: lambda bench, name=name: bench.exact(name)  # type: ignore[misc]
    for name in ("float64", "float32", "saturated", "indefinite", "convolution", "stream")
} | {name: getattr(Bench, name) for name in ("peers", "products", "top", "blocks", "gpt")}


def main() -> int:
    """Measure and print; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, seconds in all: whether everything runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4, help="for the repetitions of a row (default 4)")
    parser.add_argument("--limit", type=float, default=120, help="for one row in all (default 120)")
    parser.add_argument("--peer-seconds", type=float, default=60, help="for one question to a tool (default 60)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments)
    about = bench.measured["environment"]
    print(textwrap.fill(", ".join(f"{key} {value}" for key, value in about.items()), 100))
    for name in arguments.only or SECTIONS:
        SECTIONS[name](bench)
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())

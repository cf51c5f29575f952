"""What the exact Hessians of a network cost, in SGD steps of the same network and next to other tools.

All rows of a table are interleaved in one process, so that a noisy machine disturbs them alike; medians are printed.
"steps" are SGD steps of the same network on the same batch, "widest" the relative width of the widest interval of a κ.
Run: ``make bench``; with HESSCOND_DATA_DIR naming a folder with CIFAR-10, the stream is that data set.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from cases import (
    FULL,
    QUICK,
    Row,
    convolution_rows,
    convolutional,
    dense,
    dense_rows,
    indefinite_rows,
    saturated_rows,
    smooth,
    stream_rows,
    training_set,
)
from measuring import Outcome, after_forward, environment, interleaved, milliseconds, table, timing_table
from peers import Comparison, compare

CPU = torch.device("cpu")
SECTIONS = ("float64", "float32", "saturated", "indefinite", "convolution", "stream", "peers")


class Bench:
    """Runs sections, prints their tables, and keeps what they measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.size = QUICK if arguments.quick else FULL
        self.measured: dict[str, Any] = {"environment": environment(CPU)}

    def chosen(self, rows: list[Row]) -> list[Row]:
        """Those rows of a section that were asked for, and its SGD step."""
        only = self.arguments.only
        return [row for row in rows if not only or row.key == "step" or row.key.startswith(tuple(only))]

    def timed(self, section: str, title: str, rows: list[Row]) -> list[Outcome]:
        """Time rows and print their table; nothing if none was asked for."""
        rows = rows if section in (self.arguments.only or ()) else self.chosen(rows)
        if {row.key for row in rows} <= {"step"}:
            return []
        print(f"\n{title}\n", flush=True)
        rounds, seconds = (3, 0.2) if self.arguments.quick else (60, self.arguments.seconds)
        outcomes = interleaved(rows, CPU, seconds=seconds, rounds=rounds, limit=self.arguments.limit)
        print(timing_table(outcomes), flush=True)
        self.measured[section] = [outcome.as_dict() for outcome in outcomes]
        return outcomes

    def run(self) -> None:
        """All sections."""
        size, network = self.size, f"{self.size.inputs}-{self.size.hidden}-{self.size.hidden}-{self.size.classes}"
        for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            note = "" if dtype == torch.float64 else ", computed in float64"
            title = f"MLP {network}, batch {size.batch}, {name}{note}"
            self.timed(name, title, dense_rows(dense(size, dtype, CPU)))
        title = f"The same with Glorot's weights: a saturated softmax, κ beyond 1e40 (float64, batch {size.batch})"
        self.timed("saturated", title, saturated_rows(dense(size, torch.float64, CPU, "glorot")))
        title = f"The same with tanh, on uniform inputs (float32, computed in float64, batch {size.batch})"
        self.timed("indefinite", title, indefinite_rows(smooth(size, torch.float32, CPU)))
        title = (
            f"Convolution 3×3, {size.channels} → {size.channels} channels on {size.image}×{size.image}, batch "
            f"{size.images}, all units, float32 computed in float64"
        )
        self.timed("convolution", title, convolution_rows(convolutional(size, torch.float32, CPU)))
        self.stream()
        if not self.arguments.only or "peers" in self.arguments.only:
            self.peers()

    def stream(self) -> None:
        """The output layer over a training set."""
        if self.arguments.only and not any("stream".startswith(only) for only in self.arguments.only):
            return
        samples = training_set(self.size, CPU)
        title = f"Output layer over a stream: {samples.source}, batches of {samples.batch:,}"
        outcomes = self.timed("stream", title, stream_rows(self.size, samples))
        print(after_forward(outcomes))

    def peers(self) -> None:
        """Other tools on the same blocks."""
        print("\nOther tools on the same Hessians (float64; quick calls repeated)\n", flush=True)
        problem = dense(self.size, torch.float64, CPU)
        comparison = compare(problem, 5.0 if self.arguments.quick else self.arguments.peer_seconds)
        print(peers_table(comparison), flush=True)
        print("\nThe truth, from the output's Jacobian:")
        for label, truth in comparison.truths.items():
            print(f"{label}: {truth}")
        self.measured["peers"] = [answer.as_dict() for answer in comparison.answers]
        self.measured["truth"] = comparison.truths


def peers_table(comparison: Comparison) -> str:
    """Tools, blocks, times and answers."""
    rows = [
        [answer.block, answer.tool, "–" if answer.seconds is None else milliseconds(answer.seconds), answer.says]
        for answer in comparison.answers
    ]
    return table(("block", "tool", "ms", "says"), rows, left=(0, 1, 3))


def main() -> int:
    """Measure and print; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, seconds in all: whether everything runs")
    parser.add_argument("--only", action="append", metavar="ROW", help=f"a section ({', '.join(SECTIONS)}) or a row")
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
    bench.run()
    if len(bench.measured) == 1:
        parser.error(f"no such row: {', '.join(arguments.only)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    rows = [row for name in SECTIONS if name != "peers" for row in bench.measured.get(name, ())]
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

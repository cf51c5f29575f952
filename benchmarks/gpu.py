"""The engine on a GPU: checked against dense truth, timed, and reported in one file.

Run from a checkout: ``python benchmarks/gpu.py [--out FILE] [--record]``, with the checkout's folder in PYTHONPATH or
the package installed; ``--record`` also writes the tables into RESULTS.md. Needs torch, numpy and scipy only; with the
rest, ``pytest tests -k cuda`` runs further tests, and ``everyday.py --only study`` times iterations of studies.
Without a GPU it says so and does the same on the CPU at a small size, in less than a minute. Nothing stops it: failures
are in the report with their tracebacks, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import measuring
import torch
from cases import FULL, QUICK, Row, dense, probe_rows
from measuring import Outcome, milliseconds, why_not
from products import product_rows, whole_network_rows

from tests import agreement

#: Seconds for comparisons and in all, on a GPU and without one.
TIMES, TIMES_SMALL = (150.0, 440.0), (20.0, 50.0)
#: Beginning of the title of a section that repeats one of the device.
ON_CPU = "On the CPU: "
#: Every n-th case is tried at the small size.
SMALL_STRIDE = 4


@dataclass
class Report:
    """All that was found; written even if everything failed."""

    device: torch.device
    about: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    checks: int = 0
    timings: dict[str, list[Outcome]] = field(default_factory=dict)
    #: Tracebacks by where something went wrong.
    failures: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def attempt(self, where: str, action: Callable[[], Any]) -> Any:
        """The result of ``action``; a failure, or that a minute was over, is kept and None returned."""
        result, error = measuring.attempt(action, 60)
        if error is not None:
            self.failures[where] = error
        return result

    def markdown(self, level: str) -> str:
        """A summary, the tables of all timings, and the failures."""
        about = ", ".join(f"{key} {value}" for key, value in self.about.items() if key not in ("device", "platform"))
        failed = sum(where.startswith("case ") for where in self.failures)
        parts = [
            f"`python benchmarks/gpu.py --record` on one {self.about['device']} ({about}): {self.checks - failed} of "
            f"{self.checks} comparisons with dense truth passed, {len(self.failures)} failures.",
            *self.notes,
        ]
        for title, outcomes in self.timings.items():
            parts += [f"{level} {title}", measuring.timing_table(outcomes)]
            peaks = [f"{o.what}: {o.peak_bytes / 1e9:.2f} GB" for o in outcomes if o.peak_bytes and any(o.found)]
            parts += ["Peak memory on the device: " + "; ".join(peaks)] if peaks else []
        lines = [
            [cpu.what, milliseconds(gpu.median), milliseconds(cpu.median), f"{cpu.median / gpu.median:.2g}"]
            for title in self.timings
            for gpu, cpu in zip(self.timings[title], self.timings.get(ON_CPU + title, ()), strict=False)
            if gpu.median and cpu.median
        ]
        if lines:
            heading = ("", "device, ms", "CPU, ms", "CPU / device")
            parts += [f"{level} Device and CPU", measuring.table(heading, lines, left=(0,))]
        parts += [f"{level} FAILED: {where}\n\n```\n{text.strip()}\n```" for where, text in self.failures.items()]
        return "\n\n".join(parts) + "\n"

    def record(self) -> None:
        """Put the tables in place of the section on GPUs in RESULTS.md."""
        page = Path(__file__).parent / "RESULTS.md"
        before, heading, _ = page.read_text(encoding="utf-8").partition("\n## A GPU\n")
        page.write_text(f"{before}{heading}\n{self.markdown('###')}", encoding="utf-8")


def compare_cases(report: Report, seconds: float, stride: int) -> None:
    """Every case of the tests on the device, at both levels, against dense automatic differentiation."""
    end, left_out = time.monotonic() + seconds, 0
    for case in agreement.CASES[::stride]:
        for level in ("unit", "layer"):
            if time.monotonic() > end:
                left_out += 1
                continue
            report.checks += 1
            agrees = partial(agreement.every_block_agrees, case, 0, level, report.device)
            report.attempt(f"case {case.name}, level {level}", agrees)
    if left_out:
        report.notes.append(f"{left_out} comparisons left out: {seconds:.0f} s were over.")


def time_rows(report: Report, total: float, small: bool) -> None:
    """All rows of the engine's benchmark on the device."""
    size, device = QUICK if small else FULL, report.device
    tables: dict[str, Callable[[], list[Row]]] = {}
    resnet = (8, 4, size.classes) if small else (32, 128, size.classes)
    network = report.attempt("ResNet-18", lambda: cases.residual_network(*resnet).to(device))
    if network is not None:
        tables[f"ResNet-18, products: {network}, float32"] = lambda: whole_network_rows(network)
        tables["ResNet-18, one product of each tool"] = lambda: product_rows(network)
    exact = dict(cases.sections(size, device).values())
    title = next(iter(exact))
    tables |= {title: exact.pop(title), ON_CPU + title: lambda: cases.dense_rows(dense(size, torch.float64)), **exact}
    probe = {"whole network": {"level": "network"}}
    whole = size if small else replace(size, inputs=64, hidden=40)
    title = f"Network {whole.inputs}-{whole.hidden}-{whole.hidden}-{whole.classes}, level network, float64"
    tables[title] = lambda: probe_rows(dense(whole, torch.float64, device), probe)
    tables[ON_CPU + title] = lambda: probe_rows(dense(whole, torch.float64), probe)
    for title, make in tables.items():
        left = total - report.elapsed
        if left < 5:
            report.notes.append(f"{title}: left out, the time was over.")
            continue
        seconds, rounds = (0.1, 3) if small else (2.0, 30)
        # for what hangs: not for what a busy machine holds up
        limits = {"seconds": min(seconds, left / 40), "limit": min(max(left / 3, 30), 60)}
        outcomes = measuring.interleaved(report.attempt(title, make) or [], device, rounds=rounds, **limits)
        report.timings |= {title: outcomes} if outcomes else {}
        failed = {f"{title}: {o.what}": o.error for o in outcomes if o.error is not None}
        report.failures |= {row: error for row, error in failed.items() if why_not(error) != "not installed"}


def main() -> int:
    """Check, time, write the report; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="default: gpu-report.md")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--record", action="store_true", help="write the tables into RESULTS.md")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    small = device.type != "cuda"
    report = Report(device, measuring.environment(device))
    if small:
        report.notes.append("No GPU on this machine: the same on the CPU, at a small size.")
        print(report.notes[0], flush=True)
    comparing, total = TIMES_SMALL if small else TIMES
    try:
        compare_cases(report, comparing, SMALL_STRIDE if small else 1)
        time_rows(report, total, small)
        if arguments.record:
            report.record()
    except BaseException:
        report.failures["the benchmark itself"] = traceback.format_exc()
        raise
    finally:
        arguments.out.write_text(report.markdown("##"), encoding="utf-8")
        print(f"{report.checks} comparisons, {len(report.failures)} failures in all", end="; ")
        print(f"{report.elapsed:.0f} s; report in {arguments.out}")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())

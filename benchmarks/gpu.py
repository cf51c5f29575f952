"""The engine on a GPU: checked against dense truth and against the CPU, timed, and reported in one file.

Run from a checkout: ``python benchmarks/gpu.py [--out FILE] [--record]``, with the checkout's folder in PYTHONPATH or
the package installed; ``--record`` also writes the tables into RESULTS.md. Needs torch, numpy and scipy only; where
pytest is there, it also runs the tests that take a device, and with the package's dependencies an iteration of a study.
Without a GPU it says so and does the same on the CPU at a small size, in less than a minute. Nothing stops it: failures
are in the report with their tracebacks, and make the exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# a plain checkout: nothing is installed
sys.path[:0] = [str(ROOT)]

from cases import (  # noqa: E402
    FULL,
    QUICK,
    Problem,
    Row,
    dense,
    dense_rows,
    probe_row,
    resnet18,
    sections,
    step_row,
    stream_rows,
    training_set,
)
from measuring import (  # noqa: E402
    Outcome,
    TimeUp,
    after_forward,
    environment,
    finish,
    interleaved,
    milliseconds,
    table,
    time_limit,
    timing_table,
)
from products import product_rows, products_a_second, whole_network_rows  # noqa: E402

import hesscond  # noqa: E402

CPU = torch.device("cpu")
LEVELS = ("unit", "layer")
#: Seconds in all on a GPU, and of these for the comparisons and for pytest.
TOTAL, COMPARING, TESTING = 440.0, 150.0, 110.0
#: The same without one.
TOTAL_SMALL, COMPARING_SMALL = 50.0, 20.0
#: Error of a Hessian, relative to its norm.
HESSIAN_ERROR = 1e-10
#: Beginning of the title of a section that repeats one of the device.
ON_CPU = "On the CPU: "
#: Every n-th case is tried at the small size.
SMALL_STRIDE = 4


@dataclass
class Failure:
    """Something that went wrong, and where."""

    where: str
    traceback: str


@dataclass
class Report:
    """All that was found; written even if everything failed."""

    device: torch.device
    about: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, list[Outcome]] = field(default_factory=dict)
    training: str = ""
    tests: str = ""
    failures: list[Failure] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def attempt(self, where: str, action: Callable[[], Any], limit: float) -> Any:
        """The result of ``action``; a failure, or that the time was up, is kept and None returned."""
        try:
            with time_limit(limit):
                return action()
        except TimeUp:
            self.failures.append(Failure(where, f"broken off after {limit:.0f} s"))
        except Exception:
            self.failures.append(Failure(where, traceback.format_exc()))
        return None

    def markdown(self) -> str:
        """The report: a summary, the tables, the failures, and all numbers as JSON."""
        passed = sum(check["passed"] for check in self.checks)
        parts = [
            f"# hesscond on {self.about['device']}",
            "\n".join(f"- {key}: {value}" for key, value in self.about.items()),
            *self.notes,
            f"{passed} of {len(self.checks)} comparisons passed, {len(self.failures)} failures, {self.elapsed:.0f} s.",
        ]
        if self.checks:
            worst = sorted(self.checks, key=lambda check: -(check["hessian_error"] or 0))[:5]
            lines = [
                [c["case"], c["level"], str(c["blocks"]), shown(c["hessian_error"]), shown(c["kappa_difference"])]
                for c in worst
            ]
            heading = ("case", "level", "Hessians", "Hessian error", "κ, device and CPU")
            parts += ["## Comparisons", "The largest errors, relative:", table(heading, lines, left=(0, 1))]
        if self.tests:
            parts += ["## Tests", f"```\n{self.tests}\n```"]
        parts += self.tables("##")
        parts.append("## Failures" if self.failures else "## No failures")
        parts += [f"### {failure.where}\n\n```\n{failure.traceback.strip()}\n```" for failure in self.failures]
        parts += ["## All numbers", f"```json\n{json.dumps(finite(self.as_dict()), indent=1, ensure_ascii=False)}\n```"]
        return "\n\n".join(parts) + "\n"

    def tables(self, level: str) -> list[str]:
        """Headings and tables of all timings."""
        parts = []
        for title, outcomes in self.timings.items():
            parts += [f"{level} {title}", timing_table(outcomes)]
            parts += [more for more in (after_forward(outcomes), products_a_second(outcomes)) if more]
            peaks = [f"{o.what}: {o.peak_bytes / 1e9:.2f} GB" for o in outcomes if o.peak_bytes and o.found]
            parts += ["Peak memory on the device: " + "; ".join(peaks)] if peaks else []
        pairs = [(title, ON_CPU + title) for title in self.timings if ON_CPU + title in self.timings]
        lines = [
            [here.what, milliseconds(there.median), milliseconds(here.median), f"{here.median / there.median:.2g}"]
            for title, other in pairs
            for there, here in zip(self.timings[title], self.timings[other], strict=True)
            if there.median and here.median
        ]
        if lines:
            heading = ("", "device, ms", "CPU, ms", "CPU / device")
            parts += [f"{level} Device and CPU", table(heading, lines, left=(0,))]
        return [*parts, f"{level} An iteration of a study, ms", self.training] if self.training else parts

    def record(self) -> None:
        """Put the tables in place of the section on GPUs in RESULTS.md."""
        page = Path(__file__).parent / "RESULTS.md"
        before, heading, _ = page.read_text(encoding="utf-8").partition("\n## A GPU\n")
        about = ", ".join(f"{key} {value}" for key, value in self.about.items() if key not in ("device", "platform"))
        passed = sum(check["passed"] for check in self.checks)
        words = (
            f"`python benchmarks/gpu.py --record` on one {self.about['device']} ({about}): {passed} of "
            f"{len(self.checks)} comparisons with dense truth and the CPU passed, {len(self.failures)} failures."
        )
        page.write_text("\n\n".join([before + heading.rstrip(), words, *self.tables("###")]) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """Every number, for JSON."""
        return {
            "environment": self.about,
            "checks": self.checks,
            "timings": {title: [o.as_dict() for o in outcomes] for title, outcomes in self.timings.items()},
            "failures": [vars(failure) for failure in self.failures],
            "seconds": self.elapsed,
        }


def shown(error: float | None) -> str:
    """An error in a table."""
    return "–" if error is None else f"{error:.0e}"


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------- comparisons


def compare_cases(report: Report, seconds: float, stride: int) -> None:
    """Every case on the device at both levels; each failure is kept."""
    modules = report.attempt("import of tests/cases.py and tests/truth.py", load_cases, 60)
    if modules is None:
        return
    cases, truth = modules
    end, left_out = time.monotonic() + seconds, 0
    for case in cases.CASES[::stride]:
        for level in LEVELS:
            if time.monotonic() > end:
                left_out += 1
                continue
            before = len(report.failures)
            where = f"case {case.name}, level {level}"
            found = report.attempt(where, lambda c=case, at=level: compared(c, at, truth, report.device), 60)
            check = {"case": case.name, "level": level, "blocks": 0, "hessian_error": None, "kappa_difference": None}
            if found is not None:
                problems = found.pop("problems")
                check |= found
                if problems:
                    report.failures.append(Failure(where, "\n".join(problems)))
            report.checks.append({**check, "passed": len(report.failures) == before})
    if left_out:
        report.notes.append(f"{left_out} comparisons left out: {seconds:.0f} s were over.")


def load_cases() -> tuple[ModuleType, ModuleType]:
    """The modules with the cases and with their dense truth."""
    from tests import cases, truth

    return cases, truth


def compared(case: Any, level: str, truth: ModuleType, device: torch.device) -> dict[str, Any]:
    """One case at one level: the device against dense automatic differentiation and against the engine on the CPU.

    Returns
    -------
    dict
        The number of blocks, the largest errors, and ``problems``: what is wrong, in words.
    """
    dense_truth, size = truth.case_truth(case, 0, str(device))
    there, here = (probed(case, level, where) for where in (device, CPU))
    # random numbers differ between devices, the model drawn on the CPU does not
    comparable = not draws(case)
    problems, hessian_error, difference, blocks = [], 0.0, 0.0, 0
    if set(there) != set(dense_truth):
        problems.append(f"layers {sorted(there)} instead of {sorted(dense_truth)}")
    for name in dense_truth.keys() & set(there):
        layer = there[name]
        units = [None] if level == "layer" else list(layer.units)
        for unit, kappa, other in zip(units, layer.conditions, here[name].conditions, strict=True):
            which = {} if unit is None else {"unit": unit}
            expected = dense_truth[name] if unit is None else truth.block(dense_truth[name], size[name], unit)
            where = name if unit is None else f"{name}, unit {unit}"
            blocks += 1
            ours, norm = layer.hessian(**which), float(expected.norm())
            if ours.device.type != device.type:
                problems.append(f"{where}: the Hessian is on {ours.device}")
            error = float((ours.cpu() - expected).norm()) / norm if norm else float(ours.norm())
            hessian_error = max(hessian_error, error)
            if not error <= HESSIAN_ERROR:
                problems.append(f"{where}: Hessian off by {error:.1e} of its norm")
            problems += [f"{where}: {text}" for text in disagreements(kappa, expected)]
            if comparable:
                problems += [f"{where}: {text}" for text in differences(kappa, other)]
                if kappa.resolved and other.resolved:
                    difference = max(difference, abs(kappa.value - other.value) / other.value)
    return {"blocks": blocks, "hessian_error": hessian_error, "kappa_difference": difference, "problems": problems}


def probed(case: Any, level: str, device: torch.device) -> hesscond.ProbeResult:
    """The case probed on a device."""
    model, loss_fn, batch = case.make(0, str(device))
    result = hesscond.probe(model, loss_fn, batch, level=level)
    for layer in result.values():
        assert layer.conditions
    finish(device)
    return result


def draws(case: Any) -> bool:
    """Whether the model draws random numbers when it runs."""
    model, _, (inputs, _) = case.make(0, "cpu")
    before = torch.get_rng_state()
    with torch.no_grad():
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return not torch.equal(before, torch.get_rng_state())


def disagreements(kappa: hesscond.ConditionNumber, expected: torch.Tensor) -> Iterator[str]:
    """In what κ and its evidence contradict the dense Hessian, its eigenvalues good to about 1e-14 of the norm."""
    order, norm = len(expected), float(expected.norm())
    eigenvalues = torch.linalg.eigvalsh(expected)
    sizes = eigenvalues.abs()
    clear = sizes > 1e-11 * norm
    doubtful = ((sizes > 1e-14 * norm) & ~clear).any()
    if kappa.rank + kappa.nullity != order:
        yield f"rank {kappa.rank} + nullity {kappa.nullity} are not {order}"
    if not clear.any():
        if kappa.rank and norm == 0:
            yield f"rank {kappa.rank} of a zero Hessian"
        return
    true_kappa = float(sizes.max() / sizes[clear].min())
    slack = 1e-10 + 1e-14 * order * true_kappa
    if not kappa.resolved:
        if kappa.lower > true_kappa * (1 + slack) and not doubtful:
            yield f"unresolved, with lower bound {kappa.lower:.16g} above the true {true_kappa:.16g}"
        return
    if doubtful or kappa.rank > int(clear.sum()):
        if kappa.rank < int(clear.sum()):
            yield f"rank {kappa.rank}, and {int(clear.sum())} eigenvalues are clearly nonzero"
        return
    negative = int((eigenvalues[clear] < 0).sum())
    if (kappa.rank, kappa.negative) != (int(clear.sum()), negative):
        yield f"rank {kappa.rank} with {kappa.negative} negative, not {int(clear.sum())} with {negative}"
    if not abs(kappa.value - true_kappa) <= slack * true_kappa:
        yield f"κ {kappa.value:.16g}, not {true_kappa:.16g}"
    if not kappa.lower * (1 - slack) <= true_kappa <= kappa.upper * (1 + slack):
        yield f"κ {true_kappa:.16g} outside [{kappa.lower:.16g}, {kappa.upper:.16g}]"


def differences(there: hesscond.ConditionNumber, here: hesscond.ConditionNumber) -> Iterator[str]:
    """In what κ on the device contradicts κ on the CPU."""
    if there.resolved and here.resolved:
        if (there.rank, there.negative) != (here.rank, here.negative):
            yield f"rank {there.rank}, {there.negative} negative; on the CPU {here.rank}, {here.negative} negative"
            return
        # each interval holds for its own factor; the factors differ by the rounding of the forward pass
        slack = 1e-9 + 1e-14 * here.value
        if not (there.lower <= here.upper * (1 + slack) and here.lower <= there.upper * (1 + slack)):
            yield f"κ in [{there.lower:.16g}, {there.upper:.16g}], on the CPU in [{here.lower:.16g}, {here.upper:.16g}]"
    elif there.resolved != here.resolved and min(there.rank, here.rank) > 0:
        yield f"resolved on the device: {there.resolved}, on the CPU: {here.resolved}"


# ------------------------------------------------------------------------------------------------------------- tests


def run_tests(report: Report, seconds: float) -> None:
    """The tests that take a device, by pytest where it and what they import are there; their outcome is a note."""
    if importlib.util.find_spec("pytest") is None:
        report.notes.append("pytest is not installed: the comparisons below are the only checks.")
        return
    # not the project's own settings, which need plugins
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-c", "/dev/null", f"--rootdir={ROOT}", "-k", "cuda"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"]
    command += ["-o", "markers=slow share", "-W", "ignore"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        report.tests = f"{text[-4000:]}\nbroken off after {seconds:.0f} s"
        return
    report.tests = (done.stdout + done.stderr)[-8000:].strip()
    if done.returncode == 1:
        report.failures.append(Failure("pytest -k cuda", report.tests))
    elif done.returncode != 0:
        report.notes.append(f"pytest could not run (exit code {done.returncode}); its output is below.")


# ------------------------------------------------------------------------------------------------------------ timing


def time_rows(report: Report, small: bool) -> None:
    """All rows of the engine's benchmark on the device."""
    size, device = QUICK if small else FULL, report.device
    tables: dict[str, Callable[[], list[Row]]] = {}
    network = report.attempt("ResNet-18", lambda: resnet18(size, device), 60)
    if network is not None:
        tables[f"ResNet-18, products: {network}, float32"] = lambda: whole_network_rows(network)
        tables["ResNet-18, one product of each tool"] = lambda: rows_of_tools(network)
    exact = dict(sections(size, device).values())
    title = next(iter(exact))
    tables |= {title: exact.pop(title), ON_CPU + title: lambda: dense_rows(dense(size, torch.float64, CPU)), **exact}
    whole = replace(size, inputs=64, hidden=40) if not small else size
    title = f"Network {whole.inputs}-{whole.hidden}-{whole.hidden}-{whole.classes}, level network, float64"
    tables[title] = lambda: network_rows(dense(whole, torch.float64, device))
    samples = report.attempt("data of the stream", lambda: training_set(size, device), 60)
    if samples is not None:
        stream = f"Output layer over a stream: {samples.source}, batches of {samples.batch:,}"
        tables[stream] = lambda: stream_rows(size, samples)
    tables[ON_CPU + title] = lambda: network_rows(dense(whole, torch.float64, CPU))
    total = TOTAL_SMALL if small else TOTAL
    for title, make in tables.items():
        left = total - report.elapsed
        if left < 5:
            report.notes.append(f"{title}: left out, the time was over.")
            continue
        rows = report.attempt(title, make, 60)
        if rows is None:
            continue
        seconds, rounds = (0.1, 3) if small else (2.0, 30)
        # for what hangs: not for what a busy machine holds up
        limit = min(max(left / 3, 30), 60)
        outcomes = interleaved(rows, device, seconds=min(seconds, left / 40), rounds=rounds, limit=limit)
        report.timings[title] = outcomes
        report.failures += [Failure(f"{title}: {o.what}", o.error) for o in outcomes if o.error is not None]


def rows_of_tools(problem: Problem) -> list[Row]:
    """Products of hesscond, torch.func and, where it is installed, curvlinops."""
    has_peer = importlib.util.find_spec("curvlinops") is not None
    return [row for row in product_rows(problem) if has_peer or not row.key.startswith("curvlinops")]


def network_rows(problem: Problem) -> list[Row]:
    """An SGD step and a probe of the whole network."""
    return [step_row(problem), probe_row("network", "whole network", problem, level="network")]


def time_training(report: Report, small: bool) -> None:
    """An iteration of a study with and without a probe; a note where what studies need is not installed."""
    try:
        from training import study_times

        from hesscond.data import load
        from hesscond.study import load_study
    except ImportError as error:
        report.notes.append(f"No iteration of a study was timed: {error}.")
        return
    study = load_study("fc-digits")
    data = load(study.data.name).to(report.device)
    lines = [
        [method, *(f"{x:.3g}" for x in study_times(study, method, data, report.device, 1 if small else 8))]
        for method in ("vanilla", "bnp")
    ]
    headings = ("", "loop by hand", "runner", "probed", "runner / hand", "probed / runner")
    report.training = table(headings, lines, left=(0,))


def main() -> int:
    """Check, test, time, write the report; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="default: gpu-report.md")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--record", action="store_true", help="write the tables into RESULTS.md")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    small = device.type != "cuda"
    report = Report(device, environment(device))
    if small:
        report.notes.append("No GPU on this machine: the same on the CPU, at a small size.")
        print(report.notes[0], flush=True)
    try:
        compare_cases(report, COMPARING_SMALL if small else COMPARING, SMALL_STRIDE if small else 1)
        if not small:
            run_tests(report, TESTING)
        time_rows(report, small)
        report.attempt("an iteration of a study", lambda: time_training(report, small), 60)
        if arguments.record:
            report.record()
    except BaseException:
        report.failures.append(Failure("the benchmark itself", traceback.format_exc()))
        raise
    finally:
        arguments.out.write_text(report.markdown(), encoding="utf-8")
        failed = sum(not check["passed"] for check in report.checks)
        print(f"{len(report.checks)} comparisons, {failed} failed; {len(report.failures)} failures in all", end="; ")
        print(f"{report.elapsed:.0f} s; report in {arguments.out}")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())

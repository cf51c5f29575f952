"""The papers' tables and claims at a small size: ``python figures/small_comparisons.py run --out FOLDER``, at the root.

The studies in figures/small are those of the papers' tables with CIFAR-10 at 16 × 16, smaller networks and fewer
iterations. ``run`` trains those of CWO and WC, or those named by ``--studies``, all methods with seed 0, then with
seed 1, and so on, until seeds or seconds are used up; a second call goes on. It leaves a row for each run that is over
in FOLDER/small-comparisons.csv, or ``--table``. ``time`` measures an iteration of each method in the networks of the
papers at their full size, on random images. ``wc-statements`` and ``one-sample`` train the study of this name, and
leave what it measured in FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from hesscond.methods import parse
from hesscond.models import build
from hesscond.report.replication import measured
from hesscond.runs import open_run
from hesscond.study import RunPlan, load_data, load_study, run
from hesscond.study.files import SCALES
from hesscond.study.grid import Overrides
from hesscond.study.replication import plan_replication, replication
from hesscond.study.sweep import Outcome, WorkerProcesses, data_key, prepare, shared_files, sweep

FOLDER = Path(__file__).parent / "small"
#: Studies by where their runs are fastest: networks of a few wide operations on cores, deep ones on a GPU.
ON_CORES = ("cwo-table-3", "cwo-table-4", "cwo-table-2", "cwo-table-1/wrn-28-10-cifar10")
ON_GPU = ("cwo-table-1/cnn9-cifar10", "cwo-table-1/resnet110-cifar10", "wc-table-1", "wc-table-2", "wc-figure-1")
#: Columns of the file of runs: what was run, and what came out.
QUANTITIES = {
    "accuracy": ("test_accuracy", "end"),
    "best_accuracy": ("test_accuracy", "best"),
    "mean_accuracy": ("test_accuracy", "mean"),
    "first_accuracy": ("test_accuracy", "first"),
    "train_loss": ("train_loss", "end"),
    "bits_per_character": ("test_bits_per_character", "end"),
    "seconds": ("seconds", "end"),
    "seconds_per_epoch": ("seconds_per_epoch", "end"),
}
COLUMNS = ("study", "panel", "method", "seed", "rate", "batch_size", "iterations", "device", "status", *QUANTITIES)


def plans_of(
    names: Sequence[str], seeds: int, out: Path, device: str, iterations: int | None, scale: str | None
) -> list[RunPlan]:
    """Plans of the studies, those of the first seed first."""
    all_plans: list[RunPlan] = []
    for name in names:
        study, _, panel = name.partition("/")
        comparison = replication(study, scale) if scale else replication(str(FOLDER / f"{study}.toml"))
        if panel:
            comparison = replace(comparison, panels=tuple(part for part in comparison.panels if part.name == panel))
        changes = Overrides(iterations, None, None, None, 0)
        plans = plan_replication(comparison, seeds, out, torch.device(device), changes)
        all_plans += [replace(plan, folder=out / f"{study}-{plan.folder.name}") for plan in plans]
    return sorted(all_plans, key=lambda plan: plan.seed)


def key_of(plan: RunPlan) -> str:
    """What decides the numbers of a run: plans of two tables with the same one are run once."""
    study = plan.study.model_dump_json(include={"data", "model", "training", "schedule"})
    return f"{study} {plan.method} {plan.seed} {plan.learning_rate} {plan.device}"


def row_of(plan: RunPlan, folder: Path) -> dict[str, Any]:
    """Row of a run that is over, from the folder of a run with the same numbers."""
    stored = open_run(folder)
    values = {name: measured(stored, *of) for name, of in QUANTITIES.items()}
    return {
        "study": plan.study.name,
        "panel": plan.study.panel,
        "method": plan.label,
        "seed": plan.seed,
        "rate": plan.learning_rate,
        "batch_size": plan.study.training.batch_size,
        "iterations": stored.iterations,
        "device": plan.device.type,
        "status": stored.status,
        **{name: f"{value:.5g}" for name, value in values.items()},
    }


class Rows:
    """Table of runs, which grows by a row whenever one is over."""

    def __init__(self, file: Path) -> None:
        self.file, self.lock = file, threading.Lock()

    def write(self, plans: Sequence[RunPlan]) -> None:
        """Append the rows of plans with the same numbers."""
        rows = [row_of(plan, plans[0].folder) for plan in plans]
        with self.lock, self.file.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            if not stream.tell():
                writer.writeheader()
            writer.writerows(rows)


class Pool:
    """Runs on one kind of device until the time is up; what `hesscond.study.sweep.sweep` calls for them."""

    def __init__(self, plans: Sequence[RunPlan], rows: Rows, until: float) -> None:
        same: dict[str, list[RunPlan]] = {}
        for plan in plans:
            same.setdefault(key_of(plan), []).append(plan)
        self.once = [group[0] for group in same.values()]
        self.plans = {group[0].folder.name: group for group in same.values()}
        self.rows, self.until = rows, until

    def perform(self, left: Sequence[RunPlan], workers: int, files: Any, scratch: Path) -> None:
        """Perform the runs that are left, ``workers`` at a time."""
        try:
            executor = WorkerProcesses([left[0].device] * workers, scratch)
            sweep(left, executor, self.ended, threads=1, files=files, tick=self.tick)
        except TimeoutError:
            print("the time is up", flush=True)
        except Exception:
            traceback.print_exc()

    def ended(self, outcome: Outcome) -> None:
        """Write the row of a run."""
        if outcome.status in ("finished", "diverged"):
            self.rows.write(self.plans[outcome.name])
        else:
            print(outcome, flush=True)

    def tick(self) -> None:
        """Stop when the time is up."""
        if time.monotonic() > self.until:
            raise TimeoutError


def train(given: argparse.Namespace) -> None:
    """Train the studies; a second call goes on."""
    until = time.monotonic() + given.seconds
    runs = given.runs or given.out / "runs"
    pools = {"cpu": (given.studies or [*ON_CORES, *([] if given.gpu_jobs else ON_GPU)], given.jobs)}
    if given.gpu_jobs and not given.studies:
        pools["cuda"] = (list(ON_GPU), given.gpu_jobs)
    plans = {
        device: plans_of(names, given.seeds, runs, device, given.iterations, given.scale)
        for device, (names, _) in pools.items()
    }
    if given.without:
        with given.without.open(encoding="utf-8") as stream:
            over = {(row["study"], row["panel"], row["method"], row["seed"]) for row in csv.DictReader(stream)}
        plans = {
            device: [p for p in queue if (p.study.name, p.study.panel, p.label, str(p.seed)) not in over]
            for device, queue in plans.items()
        }
    every = [plan for queue in plans.values() for plan in queue]
    data = {data_key(plan): plan.study.data for plan in every}
    loaded = {key: load_data(config) for key, config in data.items()}
    given.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(given.out / f"{given.table}.csv")
    rows.file.unlink(missing_ok=True)
    threads = []
    with shared_files(loaded) as (scratch, files):
        for device, queue in plans.items():
            pool = Pool(queue, rows, until)
            prepared = prepare(pool.once, loaded, runs)
            for outcome in prepared.done.values():
                pool.ended(outcome)
            if prepared.left:
                order = (prepared.left, pools[device][1], files, scratch)
                threads.append(threading.Thread(target=pool.perform, args=order))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


#: Networks whose iterations are timed, at the papers' size, with the methods of their tables: name, method, and the
#: normalization of the network.
NETWORKS = {
    "cwo": ("cnn9", "resnet110", "wrn-28-10"),
    "wc": ("inception", "densenet", "googlenet"),
}
TIMED = {
    "cwo": (
        ("no normalization", "vanilla", "none"),
        ("BN", "vanilla", "batch"),
        ("Ours", "sphere:noise=linear,noise_scale=1.0", "batch"),
        ("GN", "vanilla", "group:groups=16"),
        ("WS+BN", "weightstandardization", "batch"),
        ("WS+GN", "weightstandardization", "group:groups=16"),
    ),
    "wc": (
        ("BN", "vanilla", "batch"),
        ("BN+E", "equilibration:layers=ends", "batch"),
        ("BN+WS", "weightstandardization", "batch"),
        ("BN+W", "weightnorm", "batch"),
    ),
}
BATCH, WARM, BLOCKS, BLOCK = 128, 3, 8, 5


def steps(network: str, spec: str, norm: str, device: torch.device) -> Iterator[None]:
    """Training of a network of a paper, with momentum, on random images of 32 × 32; an iteration for each `next`."""
    torch.manual_seed(0)
    model = build(network, input_shape=(3, 32, 32), outputs=10, generator=torch.Generator().manual_seed(0), norm=norm)
    model.to(device)
    method = parse(spec).create(model)
    optimizer = method.optimizer(0.001, momentum=0.9)
    inputs = torch.randn(BATCH, 3, 32, 32, device=device)
    targets = torch.randint(10, (BATCH,), device=device)
    loss_fn = nn.CrossEntropyLoss()
    while True:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), targets)
        method.observe(loss)
        loss.backward()
        method.transform_gradients()
        optimizer.step()
        method.after_step()
        loss.item()
        yield


def measure_times(given: argparse.Namespace) -> None:
    """Milliseconds of an iteration: medians over blocks, those of the methods of a network in turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    until = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "iteration-times.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("paper", "network", "method", "blocks", "median_ms", "least_ms", "most_ms"))
        for paper, networks in NETWORKS.items():
            for network in networks:
                if time.monotonic() > until:
                    return
                running = {name: steps(network, spec, norm, device) for name, spec, norm in TIMED[paper]}
                times: dict[str, list[float]] = {name: [] for name in running}
                for block in range(BLOCKS + 1):
                    for name, training in running.items():
                        started = time.perf_counter()
                        for _ in range(BLOCK if block else WARM):
                            next(training)
                        times[name].append(1000 * (time.perf_counter() - started) / BLOCK)
                    if time.monotonic() > until:
                        break
                for name, milliseconds in times.items():
                    kept = milliseconds[1:] or milliseconds
                    row = (statistics.median(kept), min(kept), max(kept))
                    writer.writerow((paper, network, name, len(kept), *(f"{value:.4g}" for value in row)))
                stream.flush()
                del running


#: What is recorded of a study's runs: method, table and columns.
RECORDED = {
    "wc-statements": ("vanilla", "statements", ("statement", "claim", "seed", "iteration", "status")),
    "one-sample": (
        "bnp",
        "probe",
        ("layer", "unit", "seed", "iteration", "rank", "resolved", "kappa", "kappa_own"),
    ),
}


def record(given: argparse.Namespace) -> None:
    """A table of the runs of a study in figures/small, a row for each seed and what the study measures."""
    method, table, columns = RECORDED[given.what]
    study = load_study(FOLDER / f"{given.what}.toml")
    data, rate = load_data(study.data), study.learning_rate(method, study.training.batch_size)
    frames = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            plan = RunPlan(study, method, seed, rate, Path(folder) / str(seed), torch.device("cpu"))
            run(plan, data)
            frames.append(open_run(plan.folder).table(table).assign(seed=seed))
    frame = pd.concat(frames)[list(columns)]
    frame.to_csv(given.out / f"{given.what}.csv", index=False, lineterminator="\n", float_format="%.4g")


def describe_machine(out: Path) -> None:
    """Write down what the numbers were made with."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    words = [f"cpu: {cpu.partition(':')[2].strip()}", f"cores: {os.cpu_count()}", f"gpu: {gpu}"]
    words += [f"torch: {torch.__version__}", f"python: {platform.python_version()}"]
    (out / "machine.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "time", *RECORDED))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: runs, in --out")
    parser.add_argument("--studies", nargs="+", help="names in figures/small, or NAME/PANEL, for those of CWO and WC")
    parser.add_argument("--scale", choices=SCALES, help="--studies: built-in ones, as bnp-figure-5/batch-128")
    parser.add_argument("--table", default="small-comparisons", help="name of the file of rows")
    parser.add_argument("--without", type=Path, help="file of rows of runs that are left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time on cores")
    parser.add_argument("--gpu-jobs", type=int, default=0, help="runs at a time on a GPU")
    parser.add_argument("--iterations", type=int, help="of every run, to try it out")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    describe_machine(given.out)
    {"run": train, "time": measure_times}.get(given.what, record)(given)


if __name__ == "__main__":
    main()

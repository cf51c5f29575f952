"""Seeds trained together against seeds apart: one run, eight together, eight one after another, as a user runs them.

All three are done in turns, so that a busy machine disturbs them alike; each time is CPU seconds of this process with
one thread, everything in it: folders, logs, evaluations, the check that the seeds can be trained together. "Step" is
one iteration without all that. The arithmetic of eight seeds is eight times that of one, and what is saved is the cost
of calling it: a network whose step is arithmetic already (GFLOP/s of one run near those of a large product of
matrices) gains little. Run: ``python benchmarks/together.py``, with HESSCOND_DATA_DIR naming a folder with CIFAR-10.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from hesscond.data import Dataset
from hesscond.errors import DataNotFoundError
from hesscond.study import RunPlan, StudyConfig, load_data, load_study, open_run, run, run_together
from hesscond.study.batch import Overrides
from hesscond.study.runner import Training
from hesscond.study.store import RunLog
from hesscond.study.together import Seed, Together

CPU = torch.device("cpu")
#: Iterations whose time is taken as one.
REPEATED = 20


def plans_of(study: StudyConfig, folder: Path, seeds: int) -> list[RunPlan]:
    """Runs of the vanilla method."""
    rate = study.learning_rate("vanilla", study.training.batch_size)
    return [RunPlan(study, "vanilla", seed, rate, folder / f"seed{seed}", CPU) for seed in range(seeds)]


def apart(plans: list[RunPlan], data: Dataset) -> None:
    """One after another."""
    for plan in plans:
        run(plan, data)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def whole_runs(study: StudyConfig, data: Dataset, seeds: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """CPU seconds of each way, and the largest relative difference of a training loss."""
    times: dict[str, list[float]] = {"one": [], "together": [], "apart": []}
    difference = 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            joint, alone = plans_of(study, folder / "together", seeds), plans_of(study, folder / "apart", seeds)
            times["one"].append(cpu_seconds(partial(apart, plans_of(study, folder / "one", 1), data)))
            times["together"].append(cpu_seconds(partial(run_together, joint, data)))
            times["apart"].append(cpu_seconds(partial(apart, alone, data)))
            for a, b in zip(joint, alone, strict=True):
                one, other = (open_run(plan.folder).table("training")["loss"].to_numpy() for plan in (a, b))
                difference = max(difference, float((abs(one - other) / abs(other)).max()))
    return times, difference


def steps(study: StudyConfig, data: Dataset, seeds: int, rounds: int) -> tuple[float, float]:
    """Seconds of an unprobed iteration of one run, and of all together: medians."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        plans = plans_of(study, folder / "together", seeds)
        together = Together([Seed.begun(plan, data, stack.enter_context(ExitStack())) for plan in plans], None)
        (plan,) = plans_of(study, folder / "one", 1)
        log = RunLog(plan.folder, plan.config(data))
        one = Training(plan, data, log, None)
        stack.callback(log.close, "finished")
        order = torch.stack([seed.training.shuffled() for seed in together.seeds])[:, : one.batch_size]

        def alone() -> None:
            for _ in range(REPEATED):
                one.step(1, one.inputs[order[0]], one.targets[order[0]])

        def joint() -> None:
            for _ in range(REPEATED):
                together.step(1, together.augmented(order), one.targets[order])

        alone(), joint()
        pairs = [(cpu_seconds(alone) / REPEATED, cpu_seconds(joint) / REPEATED) for _ in range(20 * rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def large_product() -> float:
    """FLOP/s of a product of 1024 × 1024 matrices in float32."""
    matrix = torch.ones(1024, 1024)
    return 2 * 1024**3 / min(cpu_seconds(lambda: matrix @ matrix) for _ in range(20))


def flops(study: StudyConfig, data: Dataset) -> int:
    """Of an iteration of one run: two products a layer forward, and two backward but in the first layer one."""
    sizes = [data.train_inputs[0].numel(), *study.model.options["hidden"], data.form.outputs]
    products = [before * after for before, after in pairwise(sizes)]
    return 2 * study.training.batch_size * (3 * sum(products) - products[0])


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", nargs="+", default=["fc-digits", "fc-cifar10"])
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--probe-every", type=int, nargs="+", default=[0, 100])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, seeds = arguments.rounds, arguments.seeds
    with threadpool_limits(1):
        peak = large_product()
        print(
            f"{seeds} seeds, vanilla, {arguments.iterations} iterations, 1 thread of {platform.processor() or 'CPU'}, "
            f"large product {peak / 1e9:.0f} GFLOP/s; torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
        )
        for name in arguments.studies:
            try:
                data = load_data(load_study(name).data)
            except DataNotFoundError as error:
                print(f"{name} is left out: {error}")
                continue
            for every in arguments.probe_every:
                study = Overrides(iterations=arguments.iterations, probe_every=every).apply(load_study(name))
                times, difference = whole_runs(study, data, seeds, rounds)
                one, together, separate = (statistics.median(own) for own in times.values())
                ratios = [b / a for a, b in zip(times["one"], times["together"], strict=True)]
                print(
                    f"{name}, {f'probed every {every}' if every else 'unprobed'}: one {one:.2f} s, together "
                    f"{together:.2f} s, apart {separate:.2f} s: together {statistics.median(ratios):.2f} × one "
                    f"({min(ratios):.2f} to {max(ratios):.2f}), apart {separate / together:.2f} × together; "
                    f"losses differ by {difference:.0e} at most",
                    flush=True,
                )
            unprobed = Overrides(iterations=arguments.iterations, probe_every=0).apply(load_study(name))
            alone, joint = steps(unprobed, data, seeds, rounds)
            work = flops(unprobed, data)
            print(
                f"{name}, step: one {1e3 * alone:.2f} ms ({work / alone / 1e9:.0f} GFLOP/s), together "
                f"{1e3 * joint:.2f} ms ({seeds * work / joint / 1e9:.0f} GFLOP/s): {joint / alone:.2f} × one; "
                f"at the rate of a large product {seeds * work / peak / alone:.2f} × one",
                flush=True,
            )


if __name__ == "__main__":
    main()

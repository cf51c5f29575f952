"""What training costs: an iteration of a study, and of a loop that is watched.

    python benchmarks/training.py study [--study fc-digits]
    python benchmarks/training.py watch [--rounds N] [LOOP …]

What is compared alternates in one process on the same batches, so that a noisy machine disturbs all of it alike;
medians are printed, and medians of ratios. Studies on CIFAR-10 take HESSCOND_DATA_DIR.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hesscond
from hesscond.data import Dataset, load
from hesscond.models import build
from hesscond.runs import RunLog
from hesscond.study import RunPlan, StudyConfig, load_study, resolve_device
from hesscond.study.datasets import load_data
from hesscond.study.runner import Training, build_model, make_loss

# a study: hand-written torch loop, the runner without probing, the runner with probing

#: Iterations in a block: a study makes the rows of 32 probes together.
BLOCK = 64


class Hand:
    """A loop as one writes it, with the study's network, batches and rate."""

    def __init__(self, plan: RunPlan, data: Dataset, inputs: torch.Tensor) -> None:
        self.model, self.inputs, self.targets = build_model(plan, data), inputs, data.train_targets
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=plan.learning_rate)
        self.loss_fn = nn.CrossEntropyLoss()

    def block(self, first: int, batches: list[torch.Tensor]) -> None:
        """The iterations of some batches."""
        for batch in batches:
            x, y = self.inputs[batch], self.targets[batch]
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            loss.item()


class Runner:
    """The runner's training, its log in a folder."""

    def __init__(self, plan: RunPlan, data: Dataset) -> None:
        self.training = Training(plan, data, RunLog(plan.folder, plan.config(data)), None)

    def block(self, first: int, batches: list[torch.Tensor]) -> None:
        """The iterations of some batches."""
        run = self.training
        for iteration, batch in enumerate(batches, first):
            loss, probes = run.step(iteration, run.inputs[batch], run.targets[batch])
            run.record(iteration, 0, loss, probes, run.plan.learning_rate)
        run.settle()


def study_times(study: StudyConfig, method: str, data: Dataset, device: torch.device, blocks: int) -> list[float]:
    """Milliseconds of an iteration by hand, by the runner, and probed; the ratios of the second and the third."""
    never = study.model_copy(update={"probe": study.probe.model_copy(update={"every": 0})})
    size = study.training.batch_size
    rate = study.learning_rate(method, size)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("plain", "probed")]
        plans = [RunPlan(s, method, 0, rate, f, device) for s, f in zip((never, study), folders, strict=True)]
        plain, probed = (Runner(plan, data) for plan in plans)
        every = [Hand(plans[0], data, plain.training.inputs), plain, probed]
        times: list[list[float]] = [[] for _ in every]
        order = torch.Generator().manual_seed(0)
        # the first block warms up; the first iteration of an epoch is compared with the model, and left out
        for block in range(blocks + 1):
            batches = [
                torch.randint(len(data.train_targets), (size,), generator=order).to(device) for _ in range(BLOCK)
            ]
            for k in range(len(every)) if block % 2 else reversed(range(len(every))):
                start = time.perf_counter()
                every[k].block(1 + block * BLOCK, batches)
                times[k].append(1e3 * (time.perf_counter() - start) / BLOCK)
        for runner in (plain, probed):
            runner.training.log.close("finished")
    hand, own, with_probe = (part[1:] for part in times)
    ratios = [[b / a for a, b in zip(*pair, strict=True)] for pair in ((hand, own), (own, with_probe))]
    return [statistics.median(part) for part in (hand, own, with_probe, *ratios)]


def study(given: argparse.Namespace) -> None:
    """Time and print."""
    device, study = resolve_device(given.device), load_study(given.study)
    data = load(study.data.name).to(device)
    print(
        f"{study.name}, batch {study.training.batch_size}, {device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}; medians of {given.blocks} blocks, ms"
    )
    print(f"{'method':10}{'hand loop':>11}{'runner':>9}{'+ probe':>9}{'runner/hand':>13}{'probe/runner':>14}")
    for method in ("vanilla", "bnp"):
        hand, plain, probed, own, probing = study_times(study, method, data, device, given.blocks)
        print(f"{method:10}{hand:11.2f}{plain:9.2f}{probed:9.2f}{own:13.2f}{probing:14.2f}")


# a watched loop: the cost of a probe in steps, in processor time of one thread

#: Steps between two probes.
EVERY = 200
#: A loop: a study and its scale, the network, what is watched, and samples in a probe.
LOOPS: dict[str, tuple[str, str, str, dict[str, Any], int]] = {
    "fc-cifar10": ("fc-cifar10", "paper", "mlp", {}, 60),
    "fc-cifar10, 16 images": ("fc-cifar10", "paper", "mlp", {}, 16),
    # batch normalization couples the samples behind every other layer: minutes for each
    "ResNet-20, last layer": ("cnn5-cifar10", "paper", "resnet20", {"layers": ["fc"]}, 128),
    "chargpt, 4 units of each fc1, 4 windows": (
        *("chargpt", "small", "gpt"),
        {"level": "unit", "layers": "*.fc1", "units": range(4)},
        4,
    ),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.03),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def watched_times(loop: str, optimizer: str | None, rounds: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of a step, and of each probe."""
    name, scale, network, options, samples = LOOPS[loop]
    study = load_study(name, scale)
    data = load_data(study.data)
    shape = study.model.options if study.model.name == network else {}
    generator = torch.Generator().manual_seed(0)
    form = data.form
    model = build(network, input_shape=form.input_shape, outputs=form.outputs, generator=generator, **shape)
    loss_fn, batch = make_loss(study), study.training.batch_size or 128
    inputs, targets = data.train_inputs, data.train_targets
    own = OPTIMIZERS[optimizer or "SGD"](model.parameters())
    probed: Any = (inputs[:samples], targets[:samples])
    watched = None if optimizer is None else own
    watch = hesscond.watch(model, loss_fn, probed, watched, every=1, strict=True, **options)
    taken, probes = [], []
    for _ in range(rounds):
        for _ in range(steps):
            chosen = torch.randint(len(targets), (batch,), generator=generator)
            x, y = inputs[chosen], targets[chosen]
            start = time.process_time()
            own.zero_grad()
            loss_fn(model(x), y).backward()
            own.step()
            taken.append(time.process_time() - start)
        start = time.process_time()
        watch.step()
        probes.append(time.process_time() - start)
    return statistics.median(taken), probes


def watch(given: argparse.Namespace) -> None:
    """Time and print."""
    logging.getLogger("hesscond").setLevel(logging.ERROR)
    print("| loop | optimizer | a step, ms | a probe, s | in steps | share of the time, every 200 | 5 % every |")
    print("|---|---|---|---|---|---|---|")
    for loop in given.loops or LOOPS:
        for optimizer in (None, *OPTIMIZERS):
            step, probes = watched_times(loop, optimizer, given.rounds, given.steps)
            probe = statistics.median(probes)
            spread = f"{probe:.3g} ({min(probes):.2g} … {max(probes):.2g})"
            row = [loop, optimizer or "not given", f"{1e3 * step:.3g}", spread, f"{probe / step:.3g}"]
            row += [f"{probe / (probe + EVERY * step):.1%}", f"{19 * probe / step:.3g} steps"]
            print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Time what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_study, of_watch = (kinds.add_parser(kind) for kind in ("study", "watch"))
    of_study.add_argument("--study", default="fc-cifar10")
    of_study.add_argument("--blocks", type=int, default=12)
    of_study.add_argument("--device", default="auto")
    of_watch.add_argument("loops", nargs="*", choices=[[], *LOOPS], metavar="LOOP")
    of_watch.add_argument("--rounds", type=int, default=3)
    of_watch.add_argument("--steps", type=int, default=20, help="between two probes, here")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    {"study": study, "watch": watch}[given.kind](given)


if __name__ == "__main__":
    main()

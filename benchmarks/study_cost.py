"""What a study's iteration costs: hand-written torch loop, the runner without probing, the runner with probing.

The three are interleaved in one process, block by block of iterations, so that a noisy machine disturbs all of them
alike; medians and medians of the ratios within a block are printed. Run: ``make bench`` with HESSCOND_DATA_DIR naming a
folder with CIFAR-10 (or pass --study fc-digits).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from hesscond.data import Dataset, load
from hesscond.runs import RunLog
from hesscond.study import RunPlan, StudyConfig, load_study, resolve_device
from hesscond.study.runner import Training, build_model

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


def measured(study: StudyConfig, method: str, data: Dataset, device: torch.device, blocks: int) -> list[float]:
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


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", default="fc-cifar10")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    study = load_study(arguments.study)
    data = load(study.data.name).to(device)
    print(
        f"{study.name}, batch {study.training.batch_size}, {device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, ",
        end="",
    )
    print(f"Python {platform.python_version()}; medians of {arguments.blocks} interleaved blocks, ms")
    print(f"{'method':10}{'hand loop':>11}{'runner':>9}{'+ probe':>9}{'runner/hand':>13}{'probe/runner':>14}")
    for method in ("vanilla", "bnp"):
        hand, plain, probed, own, probing = measured(study, method, data, device, arguments.blocks)
        print(f"{method:10}{hand:11.2f}{plain:9.2f}{probed:9.2f}{own:13.2f}{probing:14.2f}")


if __name__ == "__main__":
    main()

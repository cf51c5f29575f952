"""What `hesscond.watch` adds to a training: the cost of a probe in steps, and the share of the time.

Steps and probes alternate in one process with one thread, and processor time is counted, so that other work on the
machine changes the ratios little. Run: ``HESSCOND_DATA_DIR=… python benchmarks/watch.py [--rounds N] [LOOP …]``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hesscond
from hesscond.models import build
from hesscond.study import load_study
from hesscond.study.datasets import load_data
from hesscond.study.runner import make_loss

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


def measured(loop: str, optimizer: str | None, rounds: int, steps: int) -> tuple[float, list[float]]:
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


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", choices=[[], *LOOPS], metavar="LOOP")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="between two probes, here")
    arguments = parser.parse_args()
    logging.getLogger("hesscond").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| loop | optimizer | a step, ms | a probe, s | in steps | share of the time, every 200 | 5 % every |")
    print("|---|---|---|---|---|---|---|")
    for loop in arguments.loops or LOOPS:
        for optimizer in (None, *OPTIMIZERS):
            step, probes = measured(loop, optimizer, arguments.rounds, arguments.steps)
            probe = statistics.median(probes)
            spread = f"{probe:.3g} ({min(probes):.2g} … {max(probes):.2g})"
            row = [loop, optimizer or "not given", f"{1e3 * step:.3g}", spread, f"{probe / step:.3g}"]
            row += [f"{probe / (probe + EVERY * step):.1%}", f"{19 * probe / step:.3g} steps"]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

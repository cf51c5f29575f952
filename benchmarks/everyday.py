"""What a user waits for: everyday tasks in seconds and in gradients, and how they grow.

Run: ``python benchmarks/everyday.py [--only tasks|waits|growth|check] [--quick] [--threads N]``, with HESSCOND_DATA_DIR
naming a folder with CIFAR-10 for the tasks that take it. A gradient is a forward and a backward pass of the same
network on the same samples in float32, timed by turns with the task. Commands are fresh processes, from the shell to
the last file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cases import (
    FULL,
    QUICK,
    RESNET18,
    Problem,
    Row,
    Size,
    characters,
    convolutional,
    dense,
    images,
    probe_row,
    residual_network,
    training_set,
)
from measuring import environment, in_units, interleaved, seconds_of, table
from products import gradient_row
from torch import nn

from hesscond.models import build
from hesscond.probing.check import ReferenceProducts

CPU = torch.device("cpu")
#: Commands, and the data set that one needs.
COMMANDS = (
    ("study fc-digits -m vanilla -m bnp", None),
    ("study fc-cifar10 -m bnp", "cifar-10-batches-py"),
    ("verify van-der-sluis", None),
)
#: Options of a probe of a whole network.
NETWORK = {"level": "network", "products": 30}
#: Times that each task is done, and each point of a growth curve.
ROUNDS = 3


#: A probe that is waited for, and the network and samples whose gradient it is measured in.
Task = tuple[Problem, Row]


def probed(name: str, problem: Problem, **options: Any) -> Task:
    """Every κ of a probe, checked against the model as it is by default."""
    return problem, probe_row("task", name, problem, **options)


def tasks(size: Size) -> Iterator[Task]:
    """The probes."""
    quick = size is QUICK
    perceptron = dense(size, torch.float32, CPU)
    yield probed("MLP: κ of all units", perceptron)
    yield probed("MLP: κ of the three whole layers", perceptron, level="layer")
    yield probed("MLP: both ends of the network, 30 products", perceptron, **NETWORK)
    samples = training_set(size, CPU)
    every = Problem(perceptron.model, perceptron.loss_fn, (samples.inputs.float(), samples.targets))
    loader = list(zip(*(part.split(samples.batch) for part in every.batch), strict=True))
    stream = Problem(perceptron.model, perceptron.loss_fn, loader)
    name = f"MLP: output units over {len(samples.targets):,} samples"
    yield every, probe_row("task", name, stream, layers=["4"])
    convolution = convolutional(size, torch.float32, CPU)
    yield probed("convolution 3×3, all channels", convolution, layers=["0"])
    count, shape = (2, (3, 8, 8)) if quick else (16, (3, 32, 32))
    resnet20 = build("resnet20", input_shape=shape, outputs=10, generator=torch.Generator().manual_seed(0))
    residual = images(resnet20, shape, count, 10, torch.float32, CPU)
    yield probed("ResNet-20, evaluation mode: a unit of every layer", residual, layers="*", units=[0])
    text = characters(2, 8, 16, 4, 75) if quick else characters(4, 32, 64, 4, 75)
    yield probed("GPT: 4 units of each fc1", text, layers="*.fc1", units=range(4))


class PINN(nn.Module):
    """Residual u_xx + u_yy + u of a network 2-40-40-40-40-1 with tanh."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Sequential(nn.Linear(a, 40), nn.Tanh()) for a in (2, 40, 40, 40)]
        self.net = nn.Sequential(*hidden, nn.Linear(40, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        points = points.clone().requires_grad_()
        u = self.net(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        second = [torch.autograd.grad(s.sum(), points, create_graph=True)[0][:, i] for i, s in enumerate(slope.T)]
        return second[0] + second[1] + u[:, 0]


class Splines(nn.Module):
    """Layer of a KAN: cubic B-splines on [−1, 1] and SiLU of every input, summed with weights."""

    def __init__(self, inputs: int, outputs: int, cells: int = 5) -> None:
        super().__init__()
        self.register_buffer("knots", torch.arange(-3, cells + 4) * (2 / cells) - 1)
        self.base = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.spline = nn.Parameter(0.1 * torch.randn(outputs, inputs, cells + 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t, y = self.knots, x[:, :, None]
        b = ((y >= t[:-1]) & (y < t[1:])).to(x.dtype)
        for k in (1, 2, 3):
            rising = (y - t[: -k - 1]) / (t[k:-1] - t[: -k - 1]) * b[:, :, :-1]
            b = rising + (t[k + 1 :] - y) / (t[k + 1 :] - t[1:-k]) * b[:, :, 1:]
        return nn.functional.silu(x) @ self.base.T + torch.einsum("nik,oik->no", b, self.spline)


def waits(quick: bool) -> Iterator[Task]:
    """Probes that take second derivatives, or are large: what people used to wait for."""
    torch.manual_seed(0)
    pinn = Problem(PINN(), nn.MSELoss(), (2 * torch.rand(64, 2) - 1, torch.randn(64)))
    yield probed("PINN 2-40-40-40-40-1, 64 points: all 161 units", pinn)
    model = nn.Sequential(Splines(8, 16), Splines(16, 5))
    kan = Problem(model, nn.CrossEntropyLoss(), (2 * torch.rand(128, 8) - 1, torch.randint(5, (128,))))
    yield probed("KAN 8-16-5, 128 samples: a unit", kan, layers=["1"], units=[0])
    small = residual_network((4,) if quick else (16,) * 4, 4 if quick else 16, 32, 10)
    small.model.train()
    yield probed("residual network, training mode: a unit", small, layers=["3.body.0"], units=[0])
    yield probed("the same: default call", small)
    width = 8 if quick else 120
    layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 84), nn.Tanh(), nn.Linear(84, 2)
    net = Problem(nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(128, 4), torch.randint(2, (128,))))
    yield probed(f"network 4-{width}-84-2, 128 samples: κ of all parameters", net, level="network")
    for count in (2,) if quick else (16, 128):
        widths = (8, 16) if quick else RESNET18
        large = residual_network(widths, 8 if quick else 32, count, 10)
        name = f"ResNet-18, evaluation mode, {count} images: the last convolution, whole"
        yield probed(name, large, layers=[f"{2 + len(widths)}.body.3"], level="layer")


def timed(task: Task, rounds: int, seconds: float = 60.0) -> tuple[float, float]:
    """Medians of the task in seconds and in gradients, which it alternates with."""
    one, took = interleaved([gradient_row(task[0]), task[1]], CPU, seconds=seconds, rounds=rounds, limit=3600.0)
    if took.error:
        raise RuntimeError(took.error)
    return took.median or 0.0, in_units(took, one) or 0.0


def print_tasks(found: Iterator[Task], commands: list[list[str]], rounds: int, seconds: float) -> None:
    """The table of tasks, after that of the commands."""
    rows = commands
    for task in found:
        took, gradients = timed(task, rounds, seconds)
        rows.append([task[1].what, f"{took:.3g}", f"{gradients:,.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(("task", "s", "gradients"), rows, left=(0,)) + "\n", flush=True)


def everyday(quick: bool) -> None:
    """Commands, and the probes of `tasks`."""
    rows = []
    data = os.environ.get("HESSCOND_DATA_DIR", "")
    for command, needed in COMMANDS:
        if needed and not (Path(data) / needed).is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = command.split()
            if words[0] == "study":
                words += ["--out", f"{folder}/run", *(["--iterations", "5"] if quick else [])]
            call = [sys.executable, "-c", "from hesscond.cli import main; main()", *words]
            took, _ = seconds_of(partial(subprocess.run, call, check=True, capture_output=True), CPU)
        rows.append([f"`hesscond {command}`", f"{took:.1f}", ""])
    print_tasks(tasks(QUICK if quick else FULL), rows, 1 if quick else ROUNDS, 60.0)


def waited(quick: bool) -> None:
    """The tasks of `waits`, once each, in gradients of before."""
    print_tasks(waits(quick), [], 7, 0.1)


def grown(kind: str, value: int) -> Problem:
    """An MLP 256-64-64-10 with ReLU on 32 samples, or a convolution to 8 channels on 8 images, with another size."""
    torch.manual_seed(0)
    if kind == "positions":
        pooled = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(10))
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *pooled)
        inputs, samples = (3, value, value), 8
    else:
        width, hidden, classes = (value if kind == k else n for k, n in (("width", 64), ("depth", 2), ("classes", 10)))
        samples, widths = value if kind == "batch" else 32, [256, *[width] * hidden]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        model, inputs = nn.Sequential(*layers, nn.Linear(width, classes)), (256,)
    x, y = torch.randn(samples, *inputs), torch.randint(classes if kind != "positions" else 10, (samples,))
    model(x)
    return Problem(model, nn.CrossEntropyLoss(), (x, y))


def growth(quick: bool) -> None:
    """Exponents of what all units and all whole layers take, seconds ~ size^exponent: least squares of logarithms."""
    ranges = {
        "width": (64, 128, 256, 512),
        "batch": (16, 32, 64, 128),
        "depth": (2, 4, 8, 16),
        "classes": (5, 10, 20, 40),
        "positions": (8, 12, 16, 24, 32),
    }
    rows = []
    for kind, values in ranges.items():
        chosen = values[:2] if quick else values
        # positions are counted, not the length of a side
        sizes = np.log([value**2 if kind == "positions" else value for value in chosen])
        cells = [f"{kind} {chosen[0]} … {chosen[-1]}{' squared' if kind == 'positions' else ''}"]
        for options in ({}, {"level": "layer", "rtol": 1e-6}):
            problems = [grown(kind, value) for value in chosen]
            found = [timed(probed("", one, **options), 1 if quick else ROUNDS) for one in problems]
            seconds = np.array([took for took, _ in found])
            gradients = seconds / [ratio for _, ratio in found]
            slope, theirs = (np.polyfit(sizes, np.log(part), 1)[0] for part in (seconds, gradients))
            cells += [f"{1e3 * seconds[0]:.3g} … {1e3 * seconds[-1]:.3g}", f"{slope:.1f} ({theirs:.1f})"]
        rows.append(cells)
    titles = ("", "units, ms", "exponent (gradient's)", "layers, ms", "exponent (gradient's)")
    print(table(titles, rows, left=(0,)) + "\n", flush=True)


def second_check(quick: bool) -> None:
    """What the comparison with differences of gradients adds to a probe, in float64 gradients and per cent."""
    rows, size, generator = [], QUICK if quick else FULL, torch.Generator().manual_seed(0)
    features, width, samples = (20, 8, 16) if quick else (784, 256, 256)
    wide = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 10))
    batch = torch.rand(samples, features, generator=generator), torch.randint(10, (samples,), generator=generator)
    for name, problem in (
        (f"MLP, {size.batch} samples", dense(size, torch.float32, CPU)),
        (f"{features}-{width}-10, {samples} samples", Problem(wide, nn.CrossEntropyLoss(), batch)),
    ):
        inputs, targets = problem.batch
        double = gradient_row(Problem(deepcopy(problem.model).double(), problem.loss_fn, (inputs.double(), targets)))
        for level, options in (("unit", {}), ("layer", {"level": "layer"}), ("network", NETWORK)):
            checked = probe_row("checked", level, problem, **options)

            def without(run: Callable[[], Any] = checked.run) -> None:
                with patch.object(ReferenceProducts, "_not_compared", lambda *_: []):
                    run()

            alternating = [double, checked, Row("off", level, without)]
            found = interleaved(alternating, CPU, seconds=1.0 if quick else 20.0, rounds=1 if quick else 40)
            one, on, off = (took.median or 0.0 for took in found)
            rows.append([name, level, f"{1e3 * on:.0f}", f"{(on - off) / one:.1f}", f"{100 * (on - off) / on:.0f} %"])
    print(table(("", "level", "ms", "second check, gradients", "of the call"), rows, left=(0, 1)) + "\n", flush=True)


SECTIONS: dict[str, Callable[[bool], None]] = {
    "tasks": everyday,
    "waits": waited,
    "growth": growth,
    "check": second_check,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it works")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(", ".join(f"{key} {value}" for key, value in environment(CPU).items()) + "\n", flush=True)
    for name in [arguments.only] if arguments.only else SECTIONS:
        SECTIONS[name](arguments.quick)


if __name__ == "__main__":
    main()

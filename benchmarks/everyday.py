"""What a user waits for: everyday tasks in seconds and in gradients, and how they grow.

Run: ``python benchmarks/everyday.py [--only tasks|waits|growth] [--quick] [--threads N]``, with HESSCOND_DATA_DIR
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
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import FULL, QUICK, Problem, Size, convolutional, dense, training_set
from measuring import environment, table
from torch import nn

import hesscond
from hesscond.models import build

CPU = torch.device("cpu")
#: Commands, and the data set that one needs.
COMMANDS = (
    ("study fc-digits -m vanilla -m bnp", None),
    ("study fc-cifar10 -m bnp", "cifar-10-batches-py"),
    ("verify van-der-sluis", None),
)
#: Times that each task is done, and each point of a growth curve.
ROUNDS = 3


class Task(NamedTuple):
    """Something that is waited for, and the network and samples whose gradient it is measured in."""

    name: str
    problem: Problem
    run: Callable[[], Any]


def probed(problem: Problem, **options: Any) -> Callable[[], Any]:
    """Every κ of a probe, checked against the model as it is by default."""

    def run() -> Any:
        found = hesscond.probe(problem.model, problem.loss_fn, problem.batch, **options)
        return [own.conditions for own in found.values()]

    return run


def images(name: str, count: int, size: int) -> Problem:
    """One of hesscond's networks on random images, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    model = build(name, input_shape=(3, size, size), outputs=10, generator=generator).eval()
    x = torch.randn(count, 3, size, size, generator=generator)
    return Problem(model, nn.CrossEntropyLoss(), (x, torch.randint(10, (count,), generator=generator)))


class NextToken(nn.Module):
    """Cross-entropy of every token."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def sentences(windows: int, context: int, width: int) -> Problem:
    """A small GPT on random tokens."""
    generator = torch.Generator().manual_seed(0)
    options = {"width": width, "depth": 2, "heads": 4}
    model = build("gpt", input_shape=(context,), outputs=75, generator=generator, **options)
    tokens = torch.randint(75, (windows, context + 1), generator=generator)
    return Problem(model, NextToken(), (tokens[:, :-1], tokens[:, 1:]))


def tasks(size: Size) -> Iterator[Task]:
    """The probes."""
    quick = size is QUICK
    perceptron = dense(size, torch.float32, CPU)
    yield Task("MLP: κ of all units", perceptron, probed(perceptron))
    yield Task("MLP: κ of the three whole layers", perceptron, probed(perceptron, level="layer"))
    network = {"level": "network", "products": 30}
    yield Task("MLP: both ends of the network, 30 products", perceptron, probed(perceptron, **network))
    samples = training_set(size, CPU)
    every = Problem(perceptron.model, perceptron.loss_fn, (samples.inputs.float(), samples.targets))
    loader = list(zip(*(part.split(samples.batch) for part in every.batch), strict=True))
    stream = Problem(perceptron.model, perceptron.loss_fn, loader)
    yield Task(f"MLP: output units over {len(samples.targets):,} samples", every, probed(stream, layers=["4"]))
    convolution = convolutional(size, torch.float32, CPU)
    yield Task("convolution 3×3, all channels", convolution, probed(convolution, layers=["0"]))
    residual = images("resnet20", 2 if quick else 16, 8 if quick else 32)
    one = probed(residual, layers="*", units=[0])
    yield Task("ResNet-20, evaluation mode: a unit of every layer", residual, one)
    text = sentences(2, 8, 16) if quick else sentences(4, 32, 64)
    yield Task("GPT: 4 units of each fc1", text, probed(text, layers="*.fc1", units=range(4)))


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


class Residual(nn.Module):
    """Two convolutions with batch normalization, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        first, second = (nn.Conv2d(a, width, 3, s, 1, bias=False) for a, s in ((inputs, stride), (width, 1)))
        norms = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.inner = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1])
        other = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if inputs == width else other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def residual_network(widths: tuple[int, ...], images: int, size: int) -> Problem:
    """Network of blocks with these widths on random images, in training mode."""
    stem = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairwise((widths[0], *widths))]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    batch = torch.randn(images, 3, size, size), torch.randint(10, (images,))
    model(batch[0])
    return Problem(model, nn.CrossEntropyLoss(), batch)


def waits(quick: bool) -> Iterator[Task]:
    """Probes that take second derivatives, or are large: what people used to wait for."""
    torch.manual_seed(0)
    pinn = Problem(PINN(), nn.MSELoss(), (2 * torch.rand(64, 2) - 1, torch.randn(64)))
    yield Task("PINN 2-40-40-40-40-1, 64 points: all 161 units", pinn, probed(pinn))
    model = nn.Sequential(Splines(8, 16), Splines(16, 5))
    kan = Problem(model, nn.CrossEntropyLoss(), (2 * torch.rand(128, 8) - 1, torch.randint(5, (128,))))
    yield Task("KAN 8-16-5, 128 samples: a unit", kan, probed(kan, layers=["1"], units=[0]))
    small = residual_network((4,) if quick else (16,) * 4, 32, 4 if quick else 16)
    yield Task("residual network, training mode: a unit", small, probed(small, layers=["3.inner.0"], units=[0]))
    yield Task("the same: default call", small, probed(small))
    width = 8 if quick else 120
    layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 84), nn.Tanh(), nn.Linear(84, 2)
    net = Problem(nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(128, 4), torch.randint(2, (128,))))
    yield Task(f"network 4-{width}-84-2, 128 samples: κ of all parameters", net, probed(net, level="network"))
    for images in (2,) if quick else (16, 128):
        widths = (8, 16) if quick else (64, 64, 128, 128, 256, 256, 512, 512)
        large = residual_network(widths, images, 8 if quick else 32)
        large.model.eval()
        last = f"{2 + len(widths)}.inner.3"
        what = f"ResNet-18, evaluation mode, {images} images: the last convolution, whole"
        yield Task(what, large, probed(large, layers=[last], level="layer"))


def waited(quick: bool) -> None:
    """The table of `waits`, each done once after a first call of its gradient."""
    rows = []
    for task in waits(quick):
        gradient(task.problem)
        one = float(np.median([seconds(lambda own=task: gradient(own.problem)) for _ in range(7)]))  # type: ignore[misc]
        took = seconds(task.run)
        rows.append([task.name, f"{took:.3g}", f"{took / one:,.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(("task", "s", "gradients"), rows, left=(0,)) + "\n", flush=True)


def gradient(problem: Problem) -> None:
    """A forward and a backward pass."""
    inputs, targets = problem.batch
    problem.model.zero_grad()
    problem.loss_fn(problem.model(inputs), targets).backward()


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed(task: Task, rounds: int) -> tuple[float, float]:
    """Medians of the task and of its gradient, by turns, after a first call of both."""
    gradient(task.problem)
    task.run()
    found = [(seconds(task.run), np.median([seconds(lambda: gradient(task.problem)) for _ in range(5)]))]
    while len(found) < rounds:
        found.append((seconds(task.run), seconds(lambda: gradient(task.problem))))
    return tuple(float(np.median(part)) for part in zip(*found, strict=True))  # type: ignore[return-value]


def everyday(size: Size, rounds: int) -> None:
    """The table of tasks."""
    rows = []
    data = os.environ.get("HESSCOND_DATA_DIR", "")
    for command, needed in COMMANDS:
        if needed and not (Path(data) / needed).is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = command.split()
            if words[0] == "study":
                words += ["--out", f"{folder}/run", *(["--iterations", "5"] if size is QUICK else [])]
            call = [sys.executable, "-c", "from hesscond.cli import main; main()", *words]
            took = seconds(partial(subprocess.run, call, check=True, capture_output=True))
        rows.append([f"`hesscond {command}`", f"{took:.1f}", ""])
    for task in tasks(size):
        took, one = timed(task, rounds)
        rows.append([task.name, f"{took:.3g}", f"{took / one:,.0f}"])
    print(table(("task", "s", "gradients"), rows, left=(0,)) + "\n", flush=True)


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


def growth(quick: bool, rounds: int) -> None:
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
            found = []
            for value in chosen:
                problem = grown(kind, value)
                found.append(timed(Task("", problem, probed(problem, **options)), rounds))
            slope, own = (np.polyfit(sizes, np.log(part), 1)[0] for part in zip(*found, strict=True))
            ends = " … ".join(f"{1e3 * took:.3g}" for took in (found[0][0], found[-1][0]))
            cells += [ends, f"{slope:.1f} ({own:.1f})"]
        rows.append(cells)
    titles = ("", "units, ms", "exponent (gradient's)", "layers, ms", "exponent (gradient's)")
    print(table(titles, rows, left=(0,)) + "\n", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tasks", "waits", "growth"])
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it works")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size, rounds = (QUICK, 1) if arguments.quick else (FULL, ROUNDS)
    print(", ".join(f"{key} {value}" for key, value in environment(CPU).items()) + "\n", flush=True)
    if arguments.only in (None, "tasks"):
        everyday(size, rounds)
    if arguments.only in (None, "waits"):
        waited(arguments.quick)
    if arguments.only in (None, "growth"):
        growth(arguments.quick, rounds)


if __name__ == "__main__":
    main()

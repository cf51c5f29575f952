"""What a user waits for: everyday tasks in seconds and in gradients, and how they grow.

Run: ``python benchmarks/everyday.py [--only SECTION] [--quick] [--threads N]``, with HESSCOND_DATA_DIR naming a folder
with CIFAR-10 for what takes it. A gradient is a forward and a backward pass of the same network on the same samples in
float32, timed by turns with the task. Commands are fresh processes, from the shell to the last file. ``beside``: other
tools. ``study`` and ``watch``: an iteration of a study, and of a loop that is watched.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import islice, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import cases
import numpy as np
import torch
from cases import CPU, FULL, QUICK, Problem, Row, Size, dense, probe_row, residual_network
from measuring import in_units, interleaved, processor, run_sections, seconds_of, show
from peers import Comparison
from products import gradient_row
from torch import nn

import hesscond
from hesscond.data import Dataset, load
from hesscond.models import build
from hesscond.probing.check import ReferenceProducts
from hesscond.runs import RunLog
from hesscond.study import RunPlan, StudyConfig, load_study
from hesscond.study.datasets import load_data
from hesscond.study.runner import Training, build_model, make_loss
from tests.truth import reverse_over_reverse

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


#: Values of memory= whose peaks are measured, in bytes.
MEMORY = (1e9, 4e9)


class Task(NamedTuple):
    """Probe that is waited for, with the network and samples whose gradient it is measured in, and its options."""

    problem: Problem
    row: Row
    options: dict[str, Any]


def probed(name: str, problem: Problem, device: torch.device = CPU, **options: Any) -> Task:
    """Every κ of a probe, checked against the model as it is by default."""
    moved = problem.to(device)
    return Task(moved, probe_row(name, moved, **options), options)


def tasks(size: Size) -> Iterator[Task]:
    """The probes."""
    perceptron = dense(size, torch.float32)
    yield probed("MLP: κ of all units", perceptron)
    yield probed("MLP: κ of the three whole layers", perceptron, level="layer")
    yield probed("MLP: both ends of the network, 30 products", perceptron, **NETWORK)
    samples, _ = cases.training_set(size)
    every = Problem(perceptron.model, perceptron.loss_fn, tuple(map(torch.cat, zip(*samples, strict=True))))
    stream = Problem(perceptron.model, perceptron.loss_fn, samples)
    yield Task(every, probe_row(f"MLP: output units over {size.samples:,} samples", stream, layers=["4"]), {})
    yield probed("convolution 3×3, all channels", cases.convolutional(size), layers=["0"])
    residual = residual_network(8, 2, name="resnet20") if size is QUICK else residual_network(32, 16, name="resnet20")
    yield probed("ResNet-20, evaluation mode: a unit of every layer", residual, layers="*", units=[0])
    text = cases.characters(*((2, 8, 16) if size is QUICK else (4, 32, 64)), 4, 75)
    yield probed("GPT: 4 units of each fc1", text, layers="*.fc1", units=range(4))


def residual(m: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """u_xx + u_yy + u of a network."""
    points = points.clone().requires_grad_()
    u = m.net(points)
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


def waits(quick: bool, device: torch.device, **options: Any) -> Iterator[Task]:
    """Probes that take second derivatives, or are large: what people used to wait for."""
    torch.manual_seed(0)
    on = partial(probed, device=device, **options)
    hidden = [nn.Sequential(nn.Linear(a, 40), nn.Tanh()) for a in (2, 40, 40, 40)]
    model = cases.Net(residual, net=nn.Sequential(*hidden, nn.Linear(40, 1)))
    pinn = Problem(model, nn.MSELoss(), (2 * torch.rand(64, 2) - 1, torch.randn(64)))
    yield on("PINN 2-40-40-40-40-1, 64 points: all 161 units", pinn)
    model = nn.Sequential(Splines(8, 16), Splines(16, 5))
    kan = Problem(model, nn.CrossEntropyLoss(), (2 * torch.rand(128, 8) - 1, torch.randint(5, (128,))))
    yield on("KAN 8-16-5, 128 samples: a unit", kan, layers=["1"], units=[0])
    stage = {"blocks": (1,), "widths": (4,)} if quick else {"blocks": (4,), "widths": (16,)}
    small = residual_network(4 if quick else 16, 32, name="resnet20", **stage)
    small.model.train()
    yield on("residual network, training mode: a unit", small, layers=["stage1.block1.conv1"], units=[0])
    yield on("the same: default call", small)
    width = 8 if quick else 120
    layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 84), nn.Tanh(), nn.Linear(84, 2)
    net = Problem(nn.Sequential(*layers), nn.CrossEntropyLoss(), (torch.randn(128, 4), torch.randint(2, (128,))))
    yield on(f"network 4-{width}-84-2, 128 samples: κ of all parameters", net, level="network")
    for count in (2,) if quick else (16, 128):
        name = f"ResNet-18, evaluation mode, {count} images: the last convolution, whole"
        large = residual_network(8 if quick else 32, count)
        yield on(name, large, layers=["stage4.block2.conv2"], level="layer")
    size = (2, 8, 16, 4, 75, 2) if quick else (2, 16, 768, 12, 50_257, 12)
    wide, last = cases.characters(*size), f"0.block{size[-1]}.fc1"
    yield on("GPT of GPT-2's size, 2 × 16 tokens: the last fc1, whole", wide, layers=[last], level="layer")


def timed(task: Task, rounds: int, seconds: float = 60.0) -> tuple[float, float]:
    """Medians of the task in seconds and in gradients, which it alternates with."""
    device = task.problem.batch[0].device
    gradient, took = interleaved(
        [gradient_row(task.problem), task.row], device, seconds=seconds, rounds=rounds, limit=3600.0
    )
    if took.error:
        raise RuntimeError(took.error)
    return took.median or 0.0, in_units(took, gradient) or 0.0


def peak(number: int, memory: float, quick: bool) -> tuple[str, int, str]:
    """A task of `waits`, bytes of this process's peak over that of its gradient, and what it found or why not."""
    problem, row, _ = next(islice(waits(quick, CPU, memory=memory), number, None))
    problem.gradients()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        kappas = row.run()
        answer = f"{sum(kappa.resolved for kappa in kappas)} of {len(kappas)} κ resolved"
    except hesscond.HesscondError as error:
        answer = f"refused: {type(error).__name__}"
    return row.what, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), answer


def peaks(given: Namespace) -> None:
    """Peak memory of the tasks of `waits` beside what was asked, each in a process of its own."""
    rows = []
    for number, memory in product(range(2 if given.quick else 8), MEMORY):
        with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            what, size, answer = pool.submit(peak, number, memory, given.quick).result()
        rows.append([what, f"{memory / 1e9:g}", f"{size / 1e9:.2f}", f"{size / memory:.2f}", answer])
        print(rows[-1], file=sys.stderr, flush=True)
    show(("task", "memory=, GB", "peak, GB", "ratio", "found"), rows, (0, 4))


def print_tasks(queue: Iterator[Task], commands: list[list[str]], rounds: int, seconds: float) -> None:
    """The table of tasks, after that of the commands."""
    rows = commands
    for task in queue:
        took, gradients = timed(task, rounds, seconds)
        rows.append([task.row.what, f"{took:.3g}", f"{gradients:,.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    show(("task", "s", "gradients"), rows)


def beside(given: Namespace) -> None:
    """The tasks of `waits`, and what other tools say of the same blocks, in float64."""
    rows = []
    # quick: those of seconds
    for task in islice(waits(given.quick, CPU), *((1, 6) if given.quick else (None,))):
        began, kappas = processor(task.row.run)
        gradient = statistics.median(processor(task.problem.gradients)[0] for _ in range(5))
        sizes = [max(abs(kappa.lambda_max), abs(kappa.lambda_min)) for kappa in kappas]
        says = f"{sum(kappa.resolved for kappa in kappas)} of {len(kappas)} κ resolved"
        rows.append([task.row.what, "hesscond", f"{began:.3g}", f"{began / gradient:,.0f}", says])
        comparison = Comparison(deepcopy(task.problem).to(torch.float64), 60.0 if given.quick else 900.0)
        ask_others(comparison, task, sizes)
        for answer in comparison.answers:
            took = ["–", "–"] if answer.processor is None else [answer.processor, answer.processor / gradient]
            cells = [value if isinstance(value, str) else f"{value:,.3g}" for value in took]
            rows.append(["", answer.tool, *cells, answer.says])
        for row in rows[-1 - len(comparison.answers) :]:
            print(row, file=sys.stderr, flush=True)
    show(("task", "tool", "s", "gradients", "answer"), rows, (0, 1, 4))


def ask_others(comparison: Comparison, task: Task, sizes: list[float]) -> None:
    """Ask for dense blocks where they can be formed, and for the largest eigenvalue of others."""
    problem, options = comparison.problem, task.options
    level, names = options.get("level", "unit"), options.get("layers")
    if level == "layer":
        comparison.tops(names[0], task.row.what, sizes[0])
        return
    for module in problem.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            # torch.func refuses what is written in place, and does not read them
            module.running_mean = module.running_var = module.num_batches_tracked = None
            module.track_running_stats = False
    units = options.get("units")
    if level == "network":
        asked: list[tuple[str, int | None]] = [("", None)]
    elif names is None:
        layers = {name: part for name, part in problem.model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
        asked = [(name, unit) for name, layer in layers.items() for unit in range(len(layer.weight))]
    else:
        asked = [(names[0], unit) for unit in units]
    if len(asked) > 1 and any(isinstance(layer, nn.Conv2d) for layer in problem.model.modules()):
        return  # a unit of it was asked for before
    for tool, derivative in (("torch.func.hessian", in_parts), ("double backward", reverse_over_reverse)):

        def spectra(derivative: Callable[..., torch.Tensor] = derivative) -> list[torch.Tensor]:
            return [torch.linalg.eigvalsh(derivative(*rows_of(problem, *block))) for block in asked]

        def says(eigenvalues: list[torch.Tensor]) -> str:
            largest = [float(values.abs().max()) for values in eigenvalues]
            worst = max(abs(a - b) / b for a, b in zip(largest, sizes, strict=True) if b)
            ratio = statistics.median(float(v.abs().max() / v.abs().min()) for v in eigenvalues)
            return f"largest {worst:.0e} off; max/min of |λ| {ratio:.0e} (median)"

        comparison.ask(tool, task.row.what, spectra, says)
    if level == "network":
        comparison.tops("", task.row.what, sizes[0])


def in_parts(function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Hessian by forward over reverse, as `torch.func.hessian`, 64 columns at a time."""

    def column(direction: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.func.grad(function), (start,), (direction,))[1]

    return torch.vmap(column, chunk_size=64)(torch.eye(len(start), dtype=start.dtype))


def rows_of(problem: Problem, layer: str, unit: int | None) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """Loss as a function of a row of each parameter of a module (``unit`` None: of all of them), and these rows."""
    given = {
        f"{layer}.{name}" if layer else name: p for name, p in problem.model.get_submodule(layer).named_parameters()
    }
    parts = [p.detach() if unit is None else p.detach()[unit] for p in given.values()]

    def loss(theta: torch.Tensor) -> torch.Tensor:
        values = {}
        pieces = theta.split([part.numel() for part in parts])
        for (name, p), part, original in zip(given.items(), pieces, parts, strict=True):
            row = part.view_as(original)
            fixed = p.detach()
            values[name] = row if unit is None else torch.cat([fixed[:unit], row[None], fixed[unit + 1 :]])
        return problem.loss_fn(torch.func.functional_call(problem.model, values, problem.batch[0]), problem.batch[1])

    return loss, torch.cat([part.flatten() for part in parts])


def everyday(given: Namespace) -> None:
    """Commands, and the probes of `tasks`."""
    rows = []
    data = os.environ.get("HESSCOND_DATA_DIR", "")
    for command, needed in COMMANDS:
        if needed and not (Path(data) / needed).is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = command.split()
            if words[0] == "study":
                words += ["--out", f"{folder}/run", *(["--iterations", "5"] if given.quick else [])]
            call = [sys.executable, "-c", "from hesscond.cli import main; main()", *words]
            took, _ = seconds_of(partial(subprocess.run, call, check=True, capture_output=True), CPU)
        rows.append([f"`hesscond {command}`", f"{took:.1f}", ""])
    print_tasks(tasks(QUICK if given.quick else FULL), rows, 1 if given.quick else ROUNDS, 60.0)


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


def growth(given: Namespace) -> None:
    """Exponents of what all units and all whole layers take, seconds ~ size^exponent: least squares of logarithms."""
    ranges = {
        "width": (64, 128, 256, 512),
        "batch": (16, 32, 64, 128),
        "depth": (2, 4, 8, 16),
        "classes": (5, 10, 20, 40),
        "positions": (8, 12, 16, 24, 32),
    }
    rows, rounds = [], 1 if given.quick else ROUNDS
    for kind, values in ranges.items():
        chosen = values[:2] if given.quick else values
        # positions are counted, not the length of a side
        sizes = np.log([value**2 if kind == "positions" else value for value in chosen])
        cells = [f"{kind} {chosen[0]} … {chosen[-1]}{' squared' if kind == 'positions' else ''}"]
        for options in ({}, {"level": "layer", "rtol": 1e-6}):
            timings = [timed(probed("", grown(kind, value), **options), rounds) for value in chosen]
            seconds, ratios = np.array(timings).T
            gradients = seconds / ratios
            slope, theirs = (np.polyfit(sizes, np.log(part), 1)[0] for part in (seconds, gradients))
            cells += [f"{1e3 * seconds[0]:.3g} … {1e3 * seconds[-1]:.3g}", f"{slope:.1f} ({theirs:.1f})"]
        rows.append(cells)
    show(("", "units, ms", "exponent (gradient's)", "layers, ms", "exponent (gradient's)"), rows)


def second_check(given: Namespace) -> None:
    """What the comparison with differences of gradients adds to a probe, in float64 gradients and per cent."""
    rows, generator = [], torch.Generator().manual_seed(0)
    size, features, width, samples = (QUICK, 20, 8, 16) if given.quick else (FULL, 784, 256, 256)
    timing: dict[str, Any] = {"seconds": 1.0, "rounds": 1} if given.quick else {"seconds": 20.0, "rounds": 40}
    wide = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 10))
    batch = torch.rand(samples, features, generator=generator), torch.randint(10, (samples,), generator=generator)
    for name, problem in (
        (f"MLP, {size.batch} samples", dense(size, torch.float32)),
        (f"{features}-{width}-10, {samples} samples", Problem(wide, nn.CrossEntropyLoss(), batch)),
    ):
        inputs, targets = problem.batch
        double = gradient_row(Problem(deepcopy(problem.model).double(), problem.loss_fn, (inputs.double(), targets)))
        for level, options in (("unit", {}), ("layer", {"level": "layer"}), ("network", NETWORK)):
            checked = probe_row(level, problem, **options)

            def without(run: Callable[[], Any] = checked.run) -> None:
                with patch.object(ReferenceProducts, "_not_compared", lambda *_: []):
                    run()

            alternating = [double, checked, Row(level, without)]
            outcomes = interleaved(alternating, CPU, **timing)
            unit, on, off = (took.median or 0.0 for took in outcomes)
            rows.append([name, level, f"{1e3 * on:.0f}", f"{(on - off) / unit:.1f}", f"{100 * (on - off) / on:.0f} %"])
    show(("", "level", "ms", "second check, gradients", "of the call"), rows, (0, 1))


#: Iterations in a block: a study makes the rows of 32 probes together.
BLOCK = 64


def by_hand(plan: RunPlan, data: Dataset, inputs: torch.Tensor) -> Callable[..., None]:
    """A loop as one writes it, with the study's network, batches and rate: the iterations of some batches."""
    model, loss_fn = build_model(plan, data), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)

    def block(_: int, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            cases.step(model, loss_fn, optimizer, inputs[batch], data.train_targets[batch]).item()

    return block


def by_runner(run: Training, first: int, batches: list[torch.Tensor]) -> None:
    """The iterations of some batches by the runner, its log in a folder."""
    for iteration, batch in enumerate(batches, first):
        loss, probes = run.step(iteration, run.inputs[batch], run.targets[batch])
        run.record(iteration, 0, loss, probes, run.plan.learning_rate)
    run.flush_probes()


def study_times(study: StudyConfig, method: str, data: Dataset, device: torch.device, blocks: int) -> list[float]:
    """Milliseconds of an iteration by hand, by the runner, and probed; the ratios of the second and the third."""
    never = study.model_copy(update={"probe": study.probe.model_copy(update={"every": 0})})
    size = study.training.batch_size
    rate = study.learning_rate(method, size)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("plain", "probed")]
        plans = [RunPlan(s, method, 0, rate, f, device) for s, f in zip((never, study), folders, strict=True)]
        runs = [Training(plan, data, RunLog(plan.folder, plan.config(data)), None) for plan in plans]
        every = [by_hand(plans[0], data, runs[0].inputs), *(partial(by_runner, run) for run in runs)]
        times: list[list[float]] = [[] for _ in every]
        order = torch.Generator().manual_seed(0)
        # the first block warms up; the first iteration of an epoch is compared with the model, and left out
        for block in range(blocks + 1):
            batches = list(torch.randint(len(data.train_targets), (BLOCK, size), generator=order).to(device))
            for k in range(len(every)) if block % 2 else reversed(range(len(every))):
                seconds, _ = seconds_of(partial(every[k], 1 + block * BLOCK, batches), device)
                times[k].append(1e3 * seconds / BLOCK)
        for run in runs:
            run.log.close("finished")
    hand, runner, with_probe = (part[1:] for part in times)
    ratios = [[b / a for a, b in zip(*pair, strict=True)] for pair in ((hand, runner), (runner, with_probe))]
    return [statistics.median(part) for part in (hand, runner, with_probe, *ratios)]


def study(given: Namespace) -> None:
    """An iteration of the study on CIFAR-10, on a GPU of that on digits: by hand, by the runner, and probed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_study("fc-digits" if given.quick or device.type == "cuda" else "fc-cifar10")
    data = load(config.data.name).to(device)
    rows = []
    for method in ("vanilla", "bnp"):
        taken = study_times(config, method, data, device, 1 if given.quick else 12)
        rows.append([method, *(f"{number:.2f}" for number in taken)])
    title = f"{config.name}, batch {config.training.batch_size}; {device}; medians of blocks of {BLOCK} iterations, ms"
    show(("method", "loop by hand", "runner", "probed", "runner / hand", "probed / runner"), rows, title=title)


#: Steps between two probes.
EVERY = 200
#: A loop: a study and its scale, the network, what is watched, and samples in a probe.
LOOPS: dict[str, tuple[str, str, str, dict[str, Any], int]] = {
    "fc-digits": ("fc-digits", "paper", "mlp", {}, 60),
    "fc-cifar10": ("fc-cifar10", "paper", "mlp", {}, 60),
    "fc-cifar10, 16 images": ("fc-cifar10", "paper", "mlp", {}, 16),
    # batch normalization couples the samples behind every other layer: minutes for each
    "ResNet-20, last layer": ("cnn5-cifar10", "paper", "resnet20", {"layers": ["fc"]}, 128),
    "chargpt, 4 units of each fc1, 4 windows": ("chargpt", "small", "gpt", {"layers": "*.fc1", "units": range(4)}, 4),
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
    generator, form = torch.Generator().manual_seed(0), data.form
    model = build(network, input_shape=form.input_shape, outputs=form.outputs, generator=generator, **shape)
    loss_fn, batch = make_loss(study), study.training.batch_size or 128
    inputs, targets = data.train_inputs, data.train_targets
    algorithm = OPTIMIZERS[optimizer or "SGD"](model.parameters())
    probed: Any = (inputs[:samples], targets[:samples])
    watch = hesscond.watch(model, loss_fn, probed, algorithm if optimizer else None, every=1, strict=True, **options)
    taken, probes = [], []
    for _ in range(rounds):
        for chosen in torch.randint(len(targets), (steps, batch), generator=generator):
            step = partial(cases.step, model, loss_fn, algorithm, inputs[chosen], targets[chosen])
            taken.append(processor(step)[0])
        probes.append(processor(watch.step)[0])
    return statistics.median(taken), probes


def watched(given: Namespace) -> None:
    """The cost of a probe of a watched loop in steps, in processor time."""
    logging.getLogger("hesscond").setLevel(logging.ERROR)
    rows = []
    for loop in list(LOOPS)[:1] if given.quick else list(LOOPS)[1:]:
        for optimizer in (None, *OPTIMIZERS):
            step, probes = watched_times(loop, optimizer, 1 if given.quick else 3, 20)
            probe = statistics.median(probes)
            spread = f"{probe:.3g} ({min(probes):.2g} … {max(probes):.2g})"
            rows.append([loop, optimizer or "not given", f"{1e3 * step:.3g}", spread, f"{probe / step:.3g}"])
            rows[-1] += [f"{probe / (probe + EVERY * step):.1%}", f"{19 * probe / step:.3g} steps"]
            print(rows[-1], file=sys.stderr, flush=True)
    share = f"share of the time, every {EVERY}"
    show(("loop", "optimizer", "a step, ms", "a probe, s", "in steps", share, "5 % every"), rows, (0, 1))


SECTIONS: dict[str, Callable[[Namespace], None]] = {
    "tasks": everyday,
    "waits": lambda given: print_tasks(waits(given.quick, torch.device(given.device)), [], 7, 0.1),
    "beside": beside,
    "peaks": peaks,
    "growth": growth,
    "check": second_check,
    "study": study,
    "watch": watched,
}

if __name__ == "__main__":
    run_sections(__doc__, SECTIONS, device={"default": "cpu", "help": "of the section waits"})

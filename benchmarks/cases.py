"""What the engine's benchmarks run: networks, batches, and the rows of the tables. Shared by CPU and GPU.

The network is the fully connected 3072-100-100-10 with ReLU, cross-entropy and a batch of 60, its input features scaled
log-uniformly over 1e-2…1e2. Needs torch and the engine only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import hesscond
from hesscond import ConditionNumber
from hesscond.capture import capture

#: The widths of κ's interval that are asked for: the fast one, and `hesscond.probe`'s own.
PRECISIONS: tuple[tuple[str, dict[str, float]], ...] = (("1e-6", {"rtol": 1e-6}), ("default", {}))
#: The dense layers of the network, as `nn.Sequential` names them.
LAYERS = ("0", "2", "4")
#: Bytes that the convolution's probe may take.
CONVOLUTION_MEMORY = 2e9


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    inputs: int
    hidden: int
    classes: int
    batch: int
    channels: int
    image: int
    images: int
    samples: int
    stream_batch: int


FULL = Size(3072, 100, 10, 60, channels=64, image=32, images=32, samples=50_000, stream_batch=1_000)
QUICK = Size(48, 12, 4, 20, channels=4, image=8, images=4, samples=600, stream_batch=100)


@dataclass(frozen=True)
class Problem:
    """A model with a loss and one batch."""

    model: nn.Sequential
    loss_fn: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """Something to time; ``run`` returns the condition numbers it found, if it is a probe."""

    key: str
    what: str
    run: Callable[[], Sequence[ConditionNumber]]


def network(size: Size, dtype: torch.dtype, *, glorot: bool = False) -> nn.Sequential:
    """The fully connected network: torch's own initial weights, or Glorot's, whose softmax saturates on these data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(size.inputs, size.hidden),
        nn.ReLU(),
        nn.Linear(size.hidden, size.hidden),
        nn.ReLU(),
        nn.Linear(size.hidden, size.classes),
    )
    if glorot:
        for name in LAYERS:
            nn.init.xavier_uniform_(model.get_submodule(name).weight)
    return model.to(dtype)


def dense(size: Size, dtype: torch.dtype, device: torch.device, *, glorot: bool = False) -> Problem:
    """The fully connected network with its batch."""
    model = network(size, dtype, glorot=glorot)
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** (4 * torch.rand(size.inputs, generator=generator, dtype=torch.float64) - 2)
    inputs = scales * torch.randn(size.batch, size.inputs, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator)
    return Problem(model.to(device), nn.CrossEntropyLoss(), (inputs.to(dtype).to(device), targets.to(device)))


def convolutional(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """A 3×3 convolution that keeps the number of channels, ReLU, max pooling over 4×4, and a linear head."""
    torch.manual_seed(0)
    pooled = size.channels * (size.image // 4) ** 2
    model = nn.Sequential(
        nn.Conv2d(size.channels, size.channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(pooled, size.classes),
    )
    generator = torch.Generator().manual_seed(1)
    shape = (size.images, size.channels, size.image, size.image)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
    targets = torch.randint(0, size.classes, (size.images,), generator=generator).to(device)
    return Problem(model.to(dtype).to(device), nn.CrossEntropyLoss(), (inputs, targets))


@dataclass(frozen=True)
class Samples:
    """A data set in batches, and where it comes from."""

    inputs: torch.Tensor
    targets: torch.Tensor
    batch: int
    source: str

    def __iter__(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.inputs.split(self.batch), self.targets.split(self.batch), strict=True)


def training_set(size: Size, device: torch.device) -> Samples:
    """CIFAR-10's training images where they are on disk (HESSCOND_DATA_DIR); else random data of the same size."""
    data, lacking = None, "not at full size"
    if size.samples == FULL.samples:
        try:
            from hesscond.data import load

            data = load("cifar10", download=False)
        except Exception as error:
            lacking = f"CIFAR-10 not at hand: {type(error).__name__}"
    if data is None:
        generator = torch.Generator().manual_seed(2)
        inputs = torch.rand(size.samples, size.inputs, generator=generator)
        targets = torch.randint(0, size.classes, (size.samples,), generator=generator)
        source = f"random data ({lacking})"
    else:
        inputs, targets, source = data.train_inputs.flatten(1), data.train_targets, "CIFAR-10"
    return Samples(inputs.to(device), targets.to(device), size.stream_batch, source)


def step_row(problem: Problem) -> Row:
    """One SGD step of a copy of the network."""
    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    inputs, targets = problem.batch

    def step() -> tuple[()]:
        optimizer.zero_grad()
        problem.loss_fn(model(inputs), targets).backward()
        optimizer.step()
        return ()

    return Row("step", "SGD step", step)


def probe_row(key: str, what: str, problem: Problem, **options: object) -> Row:
    """A probe with the condition number of every Hessian in it."""
    return Row(key, what, lambda: conditions(hesscond.probe(problem.model, problem.loss_fn, problem.batch, **options)))


def conditions(result: hesscond.ProbeResult) -> list[ConditionNumber]:
    """Every κ of a result, in order."""
    return [kappa for layer in result.values() for kappa in layer.conditions]


def dense_rows(problem: Problem) -> list[Row]:
    """The rows of the fully connected network; the first is the SGD step that all are compared with."""

    def captured() -> tuple[()]:
        capture(problem.model, problem.loss_fn, problem.batch)
        return ()

    widths = {name: problem.model.get_submodule(name).out_features for name in LAYERS}
    rows = [step_row(problem), Row("capture", "forward pass, all curvatures", captured)]
    for label, options in PRECISIONS:
        ending = "" if label == "1e-6" else f"-{label}"
        total = sum(widths.values())
        rows.append(probe_row(f"units{ending}", f"all {total} units, {label}", problem, **options))
        for number, (name, units) in reversed(list(enumerate(widths.items(), 1))):
            what = f"{units} units of layer {number}, {label}"
            rows.append(probe_row(f"units-{number}{ending}", what, problem, layers=[name], **options))
        for number, name in enumerate(LAYERS, 1):
            what = f"whole layer {number}, {label}"
            rows.append(probe_row(f"layer-{number}{ending}", what, problem, layers=[name], level="layer", **options))
    return rows


def check_rows(problem: Problem) -> list[Row]:
    """Probes with and without the comparison with the model itself, beside one gradient in float64."""
    model = copy.deepcopy(problem.model).double()
    inputs, targets = problem.batch[0].double(), problem.batch[1]
    parameters = list(model.parameters())

    def gradient() -> tuple[()]:
        torch.autograd.grad(problem.loss_fn(model(inputs), targets), parameters)
        return ()

    def made(**options: object) -> Callable[[], tuple[()]]:
        def make() -> tuple[()]:
            hesscond.probe(problem.model, problem.loss_fn, problem.batch, level="network", **options)
            return ()

        return make

    rows = [step_row(problem), Row("gradient", "one gradient, float64", gradient)]
    for label, check in (("with", True), ("without", False)):
        rows += [
            probe_row(f"check-units-{label}", f"all units, 1e-6, {label} check", problem, rtol=1e-6, check=check),
            probe_row(
                f"check-layers-{label}", f"all layers, 1e-6, {label}", problem, level="layer", rtol=1e-6, check=check
            ),
            Row(f"check-network-{label}", f"operator of the network, {label}", made(check=check)),
        ]
    return rows


def saturated_rows(problem: Problem) -> list[Row]:
    """The rows of the network with Glorot's weights, whose κ go beyond 1e40."""
    return [
        step_row(problem),
        probe_row("saturated-units", "all units, saturated, 1e-6", problem, rtol=1e-6),
        probe_row("saturated-layers", "all layers, saturated, 1e-6", problem, level="layer", rtol=1e-6),
    ]


def convolution_rows(problem: Problem) -> list[Row]:
    """All units of the convolution."""
    channels = problem.model[0].out_channels
    return [
        step_row(problem),
        *(
            probe_row(
                "convolution" if label == "1e-6" else f"convolution-{label}",
                f"{channels} channels, {label}",
                problem,
                layers=["0"],
                memory=CONVOLUTION_MEMORY,
                **options,
            )
            for label, options in PRECISIONS
        ),
    ]


def stream_rows(size: Size, samples: Samples) -> list[Row]:
    """The output layer's units over a whole training set, and the forward passes alone."""
    model = network(size, torch.float32).to(samples.inputs.device)
    double, loss_fn = copy.deepcopy(model).double(), nn.CrossEntropyLoss()

    @torch.no_grad()
    def forward() -> tuple[()]:
        for inputs, _ in samples:
            double(inputs.double())
        return ()

    def probe() -> list[ConditionNumber]:
        return conditions(hesscond.probe(model, loss_fn, samples, layers=[LAYERS[-1]]))

    count = len(samples.inputs)
    return [
        Row("stream-forward", f"forward passes, {count:,} samples", forward),
        Row("stream", f"{size.classes} output units, the same", probe),
    ]

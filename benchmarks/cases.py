"""What the benchmarks run: networks with a batch each, and the rows of the tables. Shared by CPU and GPU.

The network is the fully connected 3072-100-100-10 with ReLU, cross-entropy and a batch of 60, its input features scaled
log-uniformly over 1e-2…1e2. Needs torch and the engine only.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

# a plain checkout: nothing need be installed
sys.path.insert(0, str(Path(__file__).parents[1]))

import hesscond
from hesscond import ConditionNumber
from hesscond.capture import capture
from hesscond.models import build
from tests.catalogue.parts import Net

CPU = torch.device("cpu")
#: Pairs of inputs and targets.
Data = list[tuple[torch.Tensor, torch.Tensor]]
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

    model: nn.Module
    loss_fn: nn.Module
    batch: Any

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{parameters:,} parameters, batch of {' × '.join(map(str, self.batch[0].shape))}"

    def to(self, *where: torch.dtype | torch.device) -> Problem:
        """The model, which is moved, and its batch in another precision or on another device."""
        inputs, targets = self.batch
        for setting in where:
            inputs = inputs.to(setting) if inputs.is_floating_point() or isinstance(setting, torch.device) else inputs
            targets = targets.to(setting) if isinstance(setting, torch.device) else targets
            self.model.to(setting)
        return replace(self, batch=(inputs, targets))

    def gradients(self, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        """Gradients of the loss by parameter, by a forward and a backward pass."""
        loss = self.loss_fn(self.model(self.batch[0]), self.batch[1])
        return torch.autograd.grad(loss, list(self.model.parameters()), create_graph=create_graph)


@dataclass(frozen=True)
class Row:
    """Something to time; ``run`` returns a list of the condition numbers it found, if it is a probe."""

    what: str
    run: Callable[[], Any]


def dense(
    size: Size,
    dtype: torch.dtype,
    device: torch.device = CPU,
    init: str = "torch",
    activation: type[nn.Module] = nn.ReLU,
    spread: float = 4.0,
) -> Problem:
    """The fully connected network with torch's initial weights, Glorot's, which saturate softmax here, or He's.

    Its features are normal and scaled over ``spread`` decades, or uniform if that is 0.
    """
    torch.manual_seed(0)
    widths = (size.inputs, size.hidden, size.hidden, size.classes)
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), activation())]
    model = nn.Sequential(*layers[:-1])
    for name in LAYERS:
        layer = model.get_submodule(name)
        if init == "glorot":
            nn.init.xavier_uniform_(layer.weight)
        elif init == "he":
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** (spread * (torch.rand(size.inputs, generator=generator, dtype=torch.float64) - 0.5))
    draw = torch.randn if spread else torch.rand
    inputs = scales * draw(size.batch, size.inputs, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator)
    return Problem(model, nn.CrossEntropyLoss(), (inputs, targets)).to(dtype, device)


def images(model: nn.Module, shape: tuple[int, ...], samples: int, classes: int) -> Problem:
    """A model in evaluation mode with normally distributed inputs, in float32."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn((samples, *shape), generator=generator, dtype=torch.float64).float()
    targets = torch.randint(0, classes, (samples,), generator=generator)
    return Problem(model.eval(), nn.CrossEntropyLoss(), (inputs, targets))


def convolutional(size: Size) -> Problem:
    """A 3×3 convolution that keeps the number of channels, ReLU, max pooling over 4×4, and a linear head."""
    torch.manual_seed(0)
    channels, pooled = size.channels, size.channels * (size.image // 4) ** 2
    layers = nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(pooled, size.classes))
    return images(model, (channels, size.image, size.image), size.images, size.classes)


def convolutional_network(size: Size) -> Problem:
    """Three 3×3 convolutions with ReLU, two of them with stride 2, and a linear head."""
    torch.manual_seed(0)
    width, image, samples = (16, 32, 60) if size is FULL else (4, 8, 8)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for before in (width, 2 * width):
        layers += [nn.Conv2d(before, 2 * width, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (image // 4) ** 2, size.classes))
    return images(model, (3, image, image), samples, size.classes)


def transformer(size: Size) -> Problem:
    """Two encoder layers with 4 heads, GELU and layer normalization."""
    torch.manual_seed(0)
    features, width, length, samples = (16, 64, 24, 32) if size is FULL else (4, 8, 5, 6)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ends = nn.Linear(features, width), nn.Linear(width, size.classes)
    model = nn.Sequential(ends[0], encoder, Net(lambda _, tokens: tokens.mean(1)), ends[1])
    problem = images(model, (length, features), samples, size.classes)
    # no dropout, so that the modes agree; that of evaluation has a fused path without forward-mode derivatives
    problem.model.train()
    return problem


def characters(samples: int, length: int, width: int, heads: int, vocabulary: int, depth: int = 2) -> Problem:
    """A GPT on random tokens, in float32; its scores are (N, V, T), as torch's own cross-entropy takes them."""
    generator = torch.Generator().manual_seed(0)
    options = {"width": width, "depth": depth, "heads": heads}
    gpt = build("gpt", input_shape=(length,), outputs=vocabulary, generator=generator, **options)
    inputs, targets = torch.randint(0, vocabulary, (2, samples, length), generator=generator)
    return Problem(nn.Sequential(gpt, Net(lambda _, scores: scores.mT)), nn.CrossEntropyLoss(), (inputs, targets))


def residual_network(image: int, samples: int, classes: int = 10, name: str = "resnet18", **options: Any) -> Problem:
    """A residual network in evaluation mode on square images; ResNet-18 with a 3×3 stem, narrow if these are small."""
    if name == "resnet18" and not options:
        widths = (64, 128, 256, 512) if image == 32 else (4, 8, 16, 32)
        options = {"stem": "3x3", "widths": widths}
    generator = torch.Generator().manual_seed(0)
    model = build(name, input_shape=(3, image, image), outputs=classes, generator=generator, **options)
    return images(model, (3, image, image), samples, classes)


def training_set(size: Size, device: torch.device = CPU) -> tuple[Data, str]:
    """Batches of CIFAR-10 where it is on disk (HESSCOND_DATA_DIR), else random data of that size; where it is from."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(size.samples, size.inputs, generator=generator)
    targets = torch.randint(0, size.classes, (size.samples,), generator=generator)
    source = "random data"
    if size is FULL:
        try:
            from hesscond.data import load

            data = load("cifar10", download=False)
            inputs, targets, source = data.train_inputs.flatten(1), data.train_targets, "CIFAR-10"
        except Exception as error:
            source = f"random data (CIFAR-10 not at hand: {type(error).__name__})"
    parts = (part.to(device).split(size.stream_batch) for part in (inputs, targets))
    return list(zip(*parts, strict=True)), source


def step(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> Any:
    """The loss of a batch, after a step of the optimizer."""
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def step_row(problem: Problem) -> Row:
    """One SGD step of a copy of the network."""
    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return Row("SGD step", partial(step, model, problem.loss_fn, optimizer, *problem.batch))


def probe_row(what: str, problem: Problem, **options: object) -> Row:
    """A probe with the condition number of every Hessian in it."""
    return Row(what, lambda: conditions(hesscond.probe(problem.model, problem.loss_fn, problem.batch, **options)))


def conditions(result: hesscond.ProbeResult) -> list[ConditionNumber]:
    """Every κ of a result, in order."""
    return [kappa for layer in result.values() for kappa in layer.conditions]


def probe_rows(problem: Problem, probes: dict[str, dict[str, Any]]) -> list[Row]:
    """An SGD step, which the others are compared with, and probes with their options."""
    return [step_row(problem), *(probe_row(what, problem, **options) for what, options in probes.items())]


def dense_rows(problem: Problem) -> list[Row]:
    """The rows of the fully connected network."""
    units = [problem.model.get_submodule(name).out_features for name in LAYERS]
    probes: dict[str, dict[str, Any]] = {}
    for label, options in PRECISIONS:
        probes[f"all {sum(units)} units, {label}"] = options
        for k in (2, 1, 0):
            probes[f"{units[k]} units of layer {k + 1}, {label}"] = {"layers": [LAYERS[k]], **options}
        for k in range(3):
            probes[f"whole layer {k + 1}, {label}"] = {"layers": [LAYERS[k]], "level": "layer", **options}
    step, *rows = probe_rows(problem, probes)
    given = problem.model, problem.loss_fn, problem.batch
    return [step, Row("forward pass, all curvatures", lambda: capture(*given)), *rows]


def stream_rows(size: Size, device: torch.device) -> list[Row]:
    """The output layer's units over a whole training set, and the forward passes alone."""
    samples, source = training_set(size, device)
    problem = replace(dense(size, torch.float32, device), batch=samples)
    double = copy.deepcopy(problem.model).double()

    @torch.no_grad()
    def forward() -> None:
        for inputs, _ in samples:
            double(inputs.double())

    return [
        Row(f"forward passes, {sum(len(inputs) for inputs, _ in samples):,} samples of {source}", forward),
        probe_row(f"{size.classes} output units, the same", problem, layers=[LAYERS[-1]]),
    ]


def sections(size: Size, device: torch.device) -> dict[str, tuple[str, Callable[[], list[Row]]]]:
    """Titles of the tables of exact Hessians, and their rows, which are compared with an SGD step of their network."""
    mlp = f"MLP {size.inputs}-{size.hidden}-{size.hidden}-{size.classes}, batch {size.batch}"
    image = f"{size.channels} channels, {size.image}×{size.image}, batch {size.images}"
    layers = {"all layers, saturated, 1e-6": {"level": "layer", "rtol": 1e-6}}
    saturated = {"all units, saturated, 1e-6": {"rtol": 1e-6}} | layers
    indefinite = {"all units, tanh": {}, "units of layer 1, tanh": {"layers": [LAYERS[0]]}}
    channels = {
        f"{size.channels} channels, {label}": {"layers": ["0"], "memory": CONVOLUTION_MEMORY, **options}
        for label, options in PRECISIONS
    }
    make = partial(dense, size, device=device)
    glorot, tanh = (
        partial(make, torch.float64, init="glorot"),
        partial(make, torch.float32, activation=nn.Tanh, spread=0.0),
    )
    return {
        "float64": (f"{mlp}, float64", lambda: dense_rows(make(torch.float64))),
        "float32": (f"{mlp}, float32", lambda: dense_rows(make(torch.float32))),
        "saturated": ("Saturated softmax, float64", lambda: probe_rows(glorot(), saturated)),
        "indefinite": (f"{mlp}, tanh on uniform inputs, float32", lambda: probe_rows(tanh(), indefinite)),
        "convolution": (f"Convolution 3×3, {image}", lambda: probe_rows(convolutional(size).to(device), channels)),
        "stream": (f"Output layer over batches of {size.stream_batch:,}", lambda: stream_rows(size, device)),
    }

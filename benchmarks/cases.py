"""What the benchmarks run: networks with a batch each, and the rows of the tables. Shared by CPU and GPU.

The network is the fully connected 3072-100-100-10 with ReLU, cross-entropy and a batch of 60, its input features scaled
log-uniformly over 1e-2…1e2. Needs torch and the engine only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hesscond
from hesscond import ConditionNumber
from hesscond.capture import capture

#: The widths of κ's interval that are asked for: the fast one, and `hesscond.probe`'s own.
PRECISIONS: tuple[tuple[str, dict[str, float]], ...] = (("1e-6", {"rtol": 1e-6}), ("default", {}))
#: The dense layers of the network, as `nn.Sequential` names them.
LAYERS = ("0", "2", "4")
#: Samples of the convolutional network's and the transformer's batch.
BATCH, SEQUENCES = 60, 32
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
    batch: tuple[torch.Tensor, torch.Tensor]

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{parameters:,} parameters, batch of {' × '.join(map(str, self.batch[0].shape))}"

    def gradients(self, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        """Gradients of the loss by parameter, by a forward and a backward pass."""
        loss = self.loss_fn(self.model(self.batch[0]), self.batch[1])
        return torch.autograd.grad(loss, list(self.model.parameters()), create_graph=create_graph)


@dataclass(frozen=True)
class Row:
    """Something to time; ``run`` returns a list of the condition numbers it found, if it is a probe."""

    key: str
    what: str
    run: Callable[[], Any]


def network(size: Size, dtype: torch.dtype, init: str = "torch") -> nn.Sequential:
    """The fully connected ReLU network with torch's initial weights, Glorot's, which saturate softmax here, or He's."""
    torch.manual_seed(0)
    widths = (size.inputs, size.hidden, size.hidden, size.classes)
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    for name in LAYERS:
        layer = model.get_submodule(name)
        if init == "glorot":
            nn.init.xavier_uniform_(layer.weight)
        elif init == "he":
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model.to(dtype)


def dense(size: Size, dtype: torch.dtype, device: torch.device, init: str = "torch") -> Problem:
    """The fully connected network with its batch."""
    model = network(size, dtype, init)
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** (4 * torch.rand(size.inputs, generator=generator, dtype=torch.float64) - 2)
    inputs = scales * torch.randn(size.batch, size.inputs, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator)
    return Problem(model.to(device), nn.CrossEntropyLoss(), (inputs.to(dtype).to(device), targets.to(device)))


def smooth(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """The fully connected network with tanh for ReLU, on uniform inputs: hidden units have indefinite Hessians."""
    layers = (nn.Tanh() if isinstance(part, nn.ReLU) else part for part in network(size, dtype))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(size.batch, size.inputs, generator=generator, dtype=torch.float64).to(dtype).to(device)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator).to(device)
    return Problem(nn.Sequential(*layers).to(device), nn.CrossEntropyLoss(), (inputs, targets))


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


def perceptron(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """fc-cifar10's network, with He's initial weights, on a batch of random numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(size.batch, size.inputs, generator=generator).to(device, dtype)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator).to(device)
    return Problem(network(size, dtype, "he").to(device), nn.CrossEntropyLoss(), (inputs, targets))


def convolutional_network(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """Three 3×3 convolutions with ReLU, two of them with stride 2, and a linear head."""
    torch.manual_seed(0)
    width, image = (16, 32) if size is FULL else (4, 8)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (image // 4) ** 2, size.classes),
    )
    return images(model, (3, image, image), BATCH if size is FULL else 8, size.classes, dtype, device)


class Transformer(nn.Module):
    """Sequences of features through a `torch.nn.TransformerEncoder`, averaged and classified."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Logits (N, classes) of sequences (N, T, features)."""
        return self.head(self.encoder(self.embedding(sequences)).mean(1))


def transformer(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """Two encoder layers with 4 heads, GELU and layer normalization."""
    torch.manual_seed(0)
    features, width, length = (16, 64, 24) if size is FULL else (4, 8, 5)
    model = Transformer(features, width, size.classes)
    problem = images(model, (length, features), SEQUENCES if size is FULL else 6, size.classes, dtype, device)
    # no dropout, so that the modes agree; that of evaluation has a fused path without forward-mode derivatives
    problem.model.train()
    return problem


class Scores(nn.Module):
    """A GPT whose scores are (N, V, T), as torch's own cross-entropy takes them."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, V, T) of the tokens (N, T)."""
        return self.gpt(tokens).transpose(1, 2)


def characters(samples: int, length: int, width: int, heads: int, vocabulary: int) -> Problem:
    """A character GPT of 2 blocks on random characters."""
    from hesscond.models import build

    generator = torch.Generator().manual_seed(0)
    options = {"width": width, "depth": 2, "heads": heads}
    gpt = build("gpt", input_shape=(length,), outputs=vocabulary, generator=generator, **options)
    inputs, targets = torch.randint(0, vocabulary, (2, samples, length), generator=generator)
    return Problem(Scores(gpt), nn.CrossEntropyLoss(), (inputs, targets))


class Words(nn.Module):
    """A decoder of words: embeddings, `torch.nn.TransformerEncoder` with a causal mask, and a head of its own."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits (N, V, T) of the words (N, T) that follow."""
        hidden = self.words(words) + self.positions.weight
        return self.head(self.encoder(hidden, self.mask)).transpose(1, 2)


def language_model(vocabulary: int, width: int, depth: int) -> Problem:
    """Four sequences of 64 words through a model as nanoGPT begins it (N(0, 0.02²)), in float32."""
    torch.manual_seed(0)
    model = Words(vocabulary, width, depth, 64)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    words = torch.randint(0, vocabulary, (4, 65))
    return Problem(model, nn.CrossEntropyLoss(), (words[:, :-1], words[:, 1:]))


class Residual(nn.Module):
    """Two 3×3 convolutions with batch normalization beside a shortcut (He et al. 2016, Fig. 2)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        self.shortcut = nn.Sequential() if same else nn.Sequential(
            nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """ReLU of the sum of both branches."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def residual_network(widths: Sequence[int], image: int, samples: int, classes: int) -> Problem:
    """Residual blocks of these widths behind a 3×3 stem, in evaluation mode, on square images."""
    torch.manual_seed(0)
    stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairwise((widths[0], *widths))]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
    model = nn.Sequential(*stem, *blocks, *head)
    return images(model, (3, image, image), samples, classes, torch.float32, torch.device("cpu"))


#: Widths of the blocks of ResNet-18.
RESNET18 = (64, 64, 128, 128, 256, 256, 512, 512)


def resnet18(size: Size, device: torch.device) -> Problem:
    """ResNet-18 for 32×32 images (11.2 million parameters) in float32; narrow if small."""
    if size is FULL:
        problem = residual_network(RESNET18, 32, 128, size.classes)
    else:
        problem = residual_network([width // 16 for width in RESNET18], 8, 4, size.classes)
    inputs, targets = problem.batch
    return Problem(problem.model.to(device), problem.loss_fn, (inputs.to(device), targets.to(device)))


def resnet50() -> Problem:
    """ResNet-50 with its 1,000 classes (25.6 million parameters) in training mode, on eight images of 64×64."""
    from hesscond.models import build

    generator = torch.Generator().manual_seed(0)
    model = build("resnet50", input_shape=(3, 64, 64), outputs=1000, generator=generator)
    problem = images(model, (3, 64, 64), 8, 1000, torch.float32, torch.device("cpu"))
    # without the statistics of a batch nothing keeps the activations small
    problem.model.train()
    return problem


def images(
    model: nn.Module, shape: tuple[int, ...], samples: int, classes: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    """A model in evaluation mode with normally distributed inputs."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn((samples, *shape), generator=generator).to(device, dtype)
    targets = torch.randint(0, classes, (samples,), generator=generator).to(device)
    return Problem(model.to(device, dtype).eval(), nn.CrossEntropyLoss(), (inputs, targets))


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

    def step() -> None:
        optimizer.zero_grad()
        problem.loss_fn(model(inputs), targets).backward()
        optimizer.step()

    return Row("step", "SGD step", step)


def probe_row(key: str, what: str, problem: Problem, **options: object) -> Row:
    """A probe with the condition number of every Hessian in it."""
    return Row(key, what, lambda: conditions(hesscond.probe(problem.model, problem.loss_fn, problem.batch, **options)))


def conditions(result: hesscond.ProbeResult) -> list[ConditionNumber]:
    """Every κ of a result, in order."""
    return [kappa for layer in result.values() for kappa in layer.conditions]


def dense_rows(problem: Problem) -> list[Row]:
    """The rows of the fully connected network; the first is the SGD step that all are compared with."""

    def captured() -> None:
        capture(problem.model, problem.loss_fn, problem.batch)

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


def convolution_rows(problem: Problem) -> list[Row]:
    """All units of the convolution."""
    rows, options = [step_row(problem)], {"layers": ["0"], "memory": CONVOLUTION_MEMORY}
    for label, precision in PRECISIONS:
        key = "convolution" if label == "1e-6" else f"convolution-{label}"
        what = f"{problem.model[0].out_channels} channels, {label}"
        rows.append(probe_row(key, what, problem, **options, **precision))
    return rows


def stream_rows(size: Size, samples: Samples) -> list[Row]:
    """The output layer's units over a whole training set, and the forward passes alone."""
    model = network(size, torch.float32).to(samples.inputs.device)
    double, loss_fn = copy.deepcopy(model).double(), nn.CrossEntropyLoss()

    @torch.no_grad()
    def forward() -> None:
        for inputs, _ in samples:
            double(inputs.double())

    def probe() -> list[ConditionNumber]:
        return conditions(hesscond.probe(model, loss_fn, samples, layers=[LAYERS[-1]]))

    count = len(samples.inputs)
    return [
        Row("stream-forward", f"forward passes, {count:,} samples", forward),
        Row("stream", f"{size.classes} output units, the same", probe),
    ]


def sections(size: Size, device: torch.device) -> dict[str, tuple[str, Callable[[], list[Row]]]]:
    """Titles of the tables of exact Hessians, and their rows, which are compared with an SGD step of their network."""
    mlp = f"MLP {size.inputs}-{size.hidden}-{size.hidden}-{size.classes}, batch {size.batch}"
    image = f"{size.channels} channels, {size.image}×{size.image}, batch {size.images}"

    def saturated() -> list[Row]:
        problem = dense(size, torch.float64, device, "glorot")
        return [
            step_row(problem),
            probe_row("saturated-units", "all units, saturated, 1e-6", problem, rtol=1e-6),
            probe_row("saturated-layers", "all layers, saturated, 1e-6", problem, level="layer", rtol=1e-6),
        ]

    def indefinite() -> list[Row]:
        problem = smooth(size, torch.float32, device)
        return [
            step_row(problem),
            probe_row("indefinite-units", "all units, tanh", problem),
            probe_row("indefinite-units-1", "units of layer 1, tanh", problem, layers=[LAYERS[0]]),
        ]

    return {
        "float64": (f"{mlp}, float64", lambda: dense_rows(dense(size, torch.float64, device))),
        "float32": (f"{mlp}, float32", lambda: dense_rows(dense(size, torch.float32, device))),
        "saturated": ("Saturated softmax, float64", saturated),
        "indefinite": (f"{mlp}, tanh on uniform inputs, float32", indefinite),
        "convolution": (
            f"Convolution 3×3, {image}",
            lambda: convolution_rows(convolutional(size, torch.float32, device)),
        ),
    }

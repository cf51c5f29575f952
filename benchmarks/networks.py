"""The networks of the matrix-free benchmarks, each with a batch. Needs torch only."""

from __future__ import annotations

import torch
from torch import nn
from workloads import FULL, Problem, Size

#: Samples of the convolutional network's and the transformer's batch.
BATCH, SEQUENCES = 60, 32


def he_network(size: Size, dtype: torch.dtype) -> nn.Sequential:
    """The fully connected ReLU network of fc-cifar10 with He's initial weights and zero biases."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(size.inputs, size.hidden),
        nn.ReLU(),
        nn.Linear(size.hidden, size.hidden),
        nn.ReLU(),
        nn.Linear(size.hidden, size.classes),
    )
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model.to(dtype)


def perceptron(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """fc-cifar10's network on a batch of random numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(size.batch, size.inputs, generator=generator).to(device, dtype)
    targets = torch.randint(0, size.classes, (size.batch,), generator=generator).to(device)
    return Problem(he_network(size, dtype).to(device), nn.CrossEntropyLoss(), (inputs, targets))


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


def resnet18(size: Size, dtype: torch.dtype, device: torch.device) -> Problem:
    """ResNet-18 for 32×32 images (11.2 million parameters), batch normalization in evaluation mode; narrow if small."""
    torch.manual_seed(0)
    first, image, batch = (64, 32, 128) if size is FULL else (4, 8, 4)
    stages, before = [], first
    for stage in range(4):
        width = first * 2**stage
        stages += [Residual(before, width, 1 if stage == 0 else 2), Residual(width, width, 1)]
        before = width
    model = nn.Sequential(
        nn.Conv2d(3, first, 3, 1, 1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, size.classes),
    )
    return images(model, (3, image, image), batch, size.classes, dtype, device)


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

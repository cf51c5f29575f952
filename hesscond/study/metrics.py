"""Metrics of a network on the test set, and sizes of its forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hesscond.capture.kinds import is_layer, kind_of
from hesscond.models.layers import Mean
from hesscond.problem.devices import accelerators_of
from hesscond.problem.snapshot import in_modes
from hesscond.problem.untouched import untouched_randomness

#: The columns of the evaluation table other than iteration, epoch and loss.
METRICS = ("test_accuracy", "test_top5", "test_class_accuracy", "test_psnr", "test_bits_per_character")
#: Classes from which on the five likeliest are worth counting, and how many these are.
TOP_CLASSES, TOP = 10, 5
#: Modules whose outputs are views or smaller than their inputs: they are not counted as activations.
SMALL = (nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, Mean)


def hits(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether samples are classified correctly by outputs (n, classes): by the first, and by one of the five first."""
    first = output.argmax(1) == targets
    if output.shape[1] < TOP_CLASSES:
        return torch.stack([first, first], 1)
    return torch.stack([first, (output.topk(TOP).indices == targets[:, None]).any(1)], 1)


def of_classes(right: torch.Tensor, targets: torch.Tensor, classes: int) -> dict[str, float | None]:
    """The `METRICS` of a classification with the `hits` of all samples."""
    right, targets = right.cpu(), targets.cpu()
    first, five = right.sum(0).tolist()
    numbers = torch.bincount(targets, minlength=classes)
    mask = numbers > 0
    by_class = torch.bincount(targets[right[:, 0]], minlength=classes)[mask] / numbers[mask].double()
    return dict.fromkeys(METRICS) | {
        "test_accuracy": first / len(targets),
        "test_top5": five / len(targets) if classes >= TOP_CLASSES else None,
        "test_class_accuracy": by_class.mean().item(),
    }


def of_values(mean_squared_error: float, targets: torch.Tensor) -> dict[str, float | None]:
    """The `METRICS` of a regression: test_psnr = −10 log₁₀ MSE in dB for values in [0, 1], None for others."""
    metrics: dict[str, float | None] = dict.fromkeys(METRICS)
    if bool(((targets >= 0) & (targets <= 1)).all()):
        metrics["test_psnr"] = -10 * math.log10(mean_squared_error) if mean_squared_error else math.inf
    return metrics


def of_characters(cross_entropy: float) -> dict[str, float | None]:
    """Metrics of a text: test_bits_per_character, the mean cross-entropy in nats divided by ln 2."""
    return {"test_bits_per_character": cross_entropy / math.log(2)}


def activations(model: nn.Module, inputs: torch.Tensor) -> int:
    """Number of values that the modules of a model output for ``inputs``; nested modules are not counted twice."""
    return inputs.numel() + summed(model, inputs, lambda m, output: 0 if isinstance(m, SMALL) else output.numel())


def multiplications(model: nn.Module, inputs: torch.Tensor) -> int:
    """Number of multiplications of a forward pass in the dense and convolutional layers of a model."""

    def products(module: nn.Module, output: torch.Tensor) -> int:
        return output.numel() * kind_of(module).weight_shape(module)[1:].numel() if is_layer(module) else 0

    return summed(model, inputs, products)


@torch.no_grad()
def summed(model: nn.Module, inputs: torch.Tensor, count: Callable[[nn.Module, torch.Tensor], int]) -> int:
    """Sum over the innermost modules of a model of ``count`` applied to their outputs."""
    counts = [0]

    def add(module: nn.Module, args: Any, output: Any) -> None:
        counts.append(count(module, output) if isinstance(output, torch.Tensor) else 0)

    with ExitStack() as stack:
        for module in model.modules():
            if not any(module.children()):
                stack.enter_context(module.register_forward_hook(add))
        stack.enter_context(in_modes(model, [False for _ in model.modules()]))
        stack.enter_context(untouched_randomness(accelerators_of([inputs])))
        model(inputs)
    return sum(counts)

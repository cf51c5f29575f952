"""Metrics of a network on the test set."""

from __future__ import annotations

import math

import torch

#: The columns of the evaluation table other than iteration, epoch and loss.
METRICS = ("test_accuracy", "test_top5", "test_class_accuracy", "test_psnr", "test_bits_per_character")
#: Classes from which on the five likeliest are worth counting, and how many these are.
TOP_CLASSES, TOP = 10, 5


def hits(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether samples are classified correctly by outputs (n, classes): by the largest, and by one of the five largest.

    The second column of the (n, 2) truths is the first where there are fewer than ten classes.
    """
    first = output.argmax(1) == targets
    if output.shape[1] < TOP_CLASSES:
        return torch.stack([first, first], 1)
    return torch.stack([first, (output.topk(TOP).indices == targets[:, None]).any(1)], 1)


def of_classes(right: torch.Tensor, targets: torch.Tensor, classes: int) -> dict[str, float | None]:
    """The `METRICS` of a classification with the `hits` of all samples.

    test_accuracy: share of the samples that are right; test_top5: that have their class among the five largest
    outputs, None with fewer than ten classes; test_class_accuracy: mean over the classes in the test set of the share
    of theirs that is right.
    """
    right, targets = right.cpu(), targets.cpu()
    first, five = right.sum(0).tolist()
    numbers = torch.bincount(targets, minlength=classes)
    there = numbers > 0
    by_class = torch.bincount(targets[right[:, 0]], minlength=classes)[there] / numbers[there].double()
    return dict.fromkeys(METRICS) | {
        "test_accuracy": first / len(targets),
        "test_top5": five / len(targets) if classes >= TOP_CLASSES else None,
        "test_class_accuracy": by_class.mean().item(),
    }


def of_values(mean_squared_error: float, targets: torch.Tensor) -> dict[str, float | None]:
    """The `METRICS` of a regression: test_psnr = −10 log₁₀ MSE in dB for values in [0, 1], None for others.

    The ratio is that of the mean over all samples, not a mean over pictures.
    """
    metrics: dict[str, float | None] = dict.fromkeys(METRICS)
    if bool(((targets >= 0) & (targets <= 1)).all()):
        metrics["test_psnr"] = -10 * math.log10(mean_squared_error) if mean_squared_error else math.inf
    return metrics


def of_characters(cross_entropy: float) -> dict[str, float | None]:
    """Metrics of a text: test_bits_per_character, the mean cross-entropy in nats divided by ln 2."""
    return {"test_bits_per_character": cross_entropy / math.log(2)}

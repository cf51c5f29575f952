"""CIFAR-10 at 16 × 16: ``name = "figures/small/cifar16.py:cifar16"`` in [data], from the root of the repository.

Each pixel is the mean of 2 × 2 of the published ones, rounded to 8 bits. Made of CIFAR-10 where that is at hand;
``python figures/small/cifar16.py FOLDER`` writes it as a file of 23 MB, which a machine without CIFAR-10 reads from
$HESSCOND_DATA_DIR.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

from hesscond.data import load
from hesscond.data.preparation import chosen

FILE = "cifar10-16x16.npz"
#: Training images: the first 2,000 of each class.
SAMPLES = 20_000
SHA256 = "f3a39f8118e4a1dc68d7c238508ae6132c1edd5d4c4a645563ec35fad3bd617d"


def averaged(images: torch.Tensor) -> np.ndarray:
    """8-bit means of 2 × 2 pixels, (N, 3, 16, 16), of images in [0, 1]; of integers, to be the same everywhere."""
    pixels = (images * 255).round().to(torch.int16).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return np.asarray((pixels.sum((3, 5)) + 2).div(4, rounding_mode="floor").to(torch.uint8))


def made() -> dict[str, np.ndarray]:
    """The four arrays, from CIFAR-10."""
    data = load("cifar10")
    assert isinstance(data.train_inputs, torch.Tensor)
    assert isinstance(data.test_inputs, torch.Tensor)
    rows = chosen(data.train_targets, SAMPLES)
    return {
        "train_inputs": averaged(data.train_inputs[rows]),
        "train_targets": data.train_targets[rows].numpy().astype(np.uint8),
        "test_inputs": averaged(data.test_inputs),
        "test_targets": data.test_targets.numpy().astype(np.uint8),
    }


def arrays() -> dict[str, np.ndarray]:
    """The four arrays, from the file in the data folder if it is there, with the checksum that all runs had."""
    file = Path(os.environ.get("HESSCOND_DATA_DIR", ".")) / FILE
    found = dict(np.load(file)) if file.exists() else made()
    digest = hashlib.sha256(b"".join(found[name].tobytes() for name in sorted(found))).hexdigest()
    if digest != SHA256:
        raise ValueError(f"the images at 16 x 16 have the checksum {digest}, not {SHA256}")
    return found


def cifar16() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (20,000, 3, 16, 16) in [0, 1], their classes, the test images and theirs."""
    found = arrays()
    images = {name: torch.from_numpy(array) for name, array in found.items()}
    return (
        images["train_inputs"].float() / 255,
        images["train_targets"].long(),
        images["test_inputs"].float() / 255,
        images["test_targets"].long(),
    )


if __name__ == "__main__":
    np.savez(Path(sys.argv[1]) / FILE, **arrays())  # type: ignore[arg-type]

"""Folders of pictures with known pixels."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hesscond.data import Dataset
from hesscond.data.dataset import images_from_bytes

#: Height and width of pictures whose shorter side is 12: decoded with resize = 12 they stay as they are.
SIDES = ((12, 12), (12, 17), (19, 12), (13, 12), (12, 30), (24, 12))


def noise(rng, height, width):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def centre(pixels, size):
    """The middle of (H, W, 3), as (3, size, size)."""
    top, left = (round((side - size) / 2) for side in pixels.shape[:2])
    return pixels[top : top + size, left : left + size].transpose(2, 0, 1)


def write(folder: Path, classes=("cat", "Dog", "ant"), train=6, val=4, size=10, seed=0):
    """Pictures (PNG); returns pixels uint8 (N, 3, size, size) and class numbers of ``train`` and ``val``."""
    rng = np.random.default_rng(seed)
    found = {}
    for split, number in (("train", train), ("val", val)):
        pixels, targets = [], []
        for label, name in enumerate(sorted(classes)):
            place = folder / split / name
            place.mkdir(parents=True)
            for k in range(number):
                own = noise(rng, *SIDES[k % len(SIDES)])
                Image.fromarray(own).save(place / f"{k:03d}.png")
                pixels.append(centre(own, size))
                targets.append(label)
        found[split] = np.stack(pixels), np.array(targets)
    return found


def in_memory(written):
    """The data set of what was written, as tensors."""
    (train, train_targets), (test, test_targets) = (written[split] for split in ("train", "val"))
    train, test = (images_from_bytes([pixels], pixels.shape[1:]) for pixels in (train, test))
    return Dataset("image-folder", train, torch.from_numpy(train_targets), test, torch.from_numpy(test_targets), 3, "")

"""Data sets that come with scikit-learn: digits and photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hesscond.data.dataset import Dataset, Form, images_from_bytes
from hesscond.data.sources import Generated, register
from hesscond.errors import ConfigError

DIGITS, IMAGE_REGRESSION = "digits", "image-regression"
#: Number of test images among the 1,797 digits.
DIGITS_TEST = 360
PHOTOGRAPHS = ("china", "flower")


def load_digits() -> Dataset:
    """Digits of scikit-learn (N, 1, 8, 8), the 17 grey levels 0 … 16 divided by 16, in a fixed split.

    The set has no published split. This one is stratified and fixed, with 1,437 training and 360 test images:
    ``train_test_split(range(1797), test_size=360, random_state=0, stratify=targets)``.
    """
    from sklearn.datasets import load_digits as load_from_sklearn
    from sklearn.model_selection import train_test_split

    bunch = load_from_sklearn()
    inputs = torch.from_numpy((bunch.images / 16).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = (
        torch.from_numpy(indices)
        for indices in train_test_split(
            np.arange(len(targets)), test_size=DIGITS_TEST, random_state=0, stratify=bunch.target
        )
    )
    return Dataset(DIGITS, inputs[train], targets[train], inputs[test], targets[test], 10, "scikit-learn")


def digits_folder() -> Path:
    """Folder in which scikit-learn keeps the digits."""
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data"


def load_image_regression(*, photograph: str = "china", every: int = 4) -> Dataset:
    """Pixels of a photograph, ``"china"`` or ``"flower"`` (427 × 640): coordinates, and colours to predict.

    The pixels of every n-th row and column (``every``) are split like the fields of a chessboard into training and test
    samples. Inputs are the pixels' centres (row, column) in (0, 1), targets red, green and blue in [0, 1].
    """
    from sklearn.datasets import load_sample_image

    if photograph not in PHOTOGRAPHS:
        raise ConfigError(f"there is no photograph {photograph!r}: choose one of {', '.join(PHOTOGRAPHS)}.")
    if not 1 <= every <= 100:
        raise ConfigError(f"every must be a number of pixels from 1 to 100, not {every}.")
    pixels = load_sample_image(f"{photograph}.jpg")[::every, ::every]
    rows, columns, _ = pixels.shape
    colours = images_from_bytes([pixels[None]], (rows, columns, 3)).flatten(0, 2)
    row, column = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    centres = torch.stack([(row + 0.5) / rows, (column + 0.5) / columns], -1).flatten(0, 1)
    train = ((row + column) % 2 == 0).flatten()
    source = f"scikit-learn ({photograph}.jpg)"
    return Dataset(IMAGE_REGRESSION, centres[train], colours[train], centres[~train], colours[~train], 0, source)


register(Generated(DIGITS, load_digits, lambda options: Form((1, 8, 8), 10, 10), digits_folder))
register(Generated(IMAGE_REGRESSION, load_image_regression, lambda options: Form((2,), 3, 0)))

"""scikit-learn's handwritten digits: 1,797 images of 8 × 8 that come with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hesscond.data.dataset import Dataset
from hesscond.data.form import Form

NAME = "digits"
TEST_SIZE = 360
FORM = Form((1, 8, 8), 10, 10)


def load_digits() -> Dataset:
    """Return scikit-learn's digits in a fixed split.

    The set has no published split. Ours is stratified and fixed, with 1,437 training and 360 test images:
    ``train_test_split(range(1797), test_size=360, random_state=0, stratify=targets)``.

    Returns
    -------
    Dataset
        Images (N, 1, 8, 8), the 17 grey levels 0 … 16 divided by 16.
    """
    from sklearn.datasets import load_digits as load_from_sklearn
    from sklearn.model_selection import train_test_split

    bunch = load_from_sklearn()
    inputs = torch.from_numpy((bunch.images / 16).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = (
        torch.from_numpy(indices)
        for indices in train_test_split(
            np.arange(len(targets)), test_size=TEST_SIZE, random_state=0, stratify=bunch.target
        )
    )
    return Dataset(NAME, inputs[train], targets[train], inputs[test], targets[test], 10, "scikit-learn")


def digits_folder() -> Path:
    """Return the folder in which scikit-learn keeps the digits."""
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data"

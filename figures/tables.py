"""Tables that come with scikit-learn: ``name = "figures/tables.py:cancer"`` in [data]."""

from __future__ import annotations

import numpy as np
from sklearn import datasets
from sklearn.utils import Bunch

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
#: Every so many rows, one is a test sample.
EVERY = 5


def standardized(table: Bunch) -> Arrays:
    """Training inputs with mean 0 and deviation 1, targets, test inputs and theirs."""
    x, y = np.asarray(table.data), np.asarray(table.target)
    test = np.arange(len(x)) % EVERY == 0
    x = (x - x[~test].mean(0)) / x[~test].std(0)
    return x[~test], y[~test], x[test], y[test]


def cancer() -> Arrays:
    """Wisconsin's breast cancer: 30 features, 2 classes, 455 training samples."""
    return standardized(datasets.load_breast_cancer())


def diabetes() -> Arrays:
    """Diabetes: 10 features, one value with mean 0 and deviation 1, 353 training samples."""
    x, y, x_test, y_test = standardized(datasets.load_diabetes())
    return x, (y - y.mean()) / y.std(), x_test, (y_test - y.mean()) / y.std()

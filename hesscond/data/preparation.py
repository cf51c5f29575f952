"""What a study may do to a data set before training: take a part of it, standardize its inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from hesscond.data.dataset import Dataset
from hesscond.data.mapped import MappedImages, selected
from hesscond.errors import ConfigError


def chosen(targets: torch.Tensor, samples: int) -> torch.Tensor:
    """Indices of a fixed part of the samples, in their order.

    Of labelled samples the first ones of each class: as many of every class, or one more of the first classes, as long
    as there are enough of all. Of samples with values every N/samples-th one. No seed decides it.

    Parameters
    ----------
    targets : torch.Tensor
        Class numbers int64 (N,), or values (N, …).
    samples : int
        How many, 1 to N.

    Returns
    -------
    torch.Tensor
        int64, shape (samples,), ascending.

    Examples
    --------
    >>> chosen(torch.tensor([0, 0, 0, 1, 0, 1]), 4)
    tensor([0, 1, 3, 5])
    >>> chosen(torch.zeros(6, 2), 3)
    tensor([0, 2, 4])
    """
    total = len(targets)
    if targets.is_floating_point():
        return torch.arange(samples, device=targets.device) * total // samples
    # a sample's number within its class decides, then its class, then its place
    number = torch.empty_like(targets)
    for label in targets.unique():
        own = targets == label
        number[own] = torch.arange(int(own.sum()), device=targets.device)
    by_class = torch.argsort(targets, stable=True)
    order = by_class[torch.argsort(number[by_class], stable=True)]
    return order[:samples].sort().values


def rows_of(name: str, split: str, targets: torch.Tensor, samples: int) -> torch.Tensor:
    """`chosen` of the samples of a data set's split, ``"train"`` or ``"test"``.

    Raises
    ------
    ConfigError
        If there are not so many.
    """
    if samples > len(targets):
        raise ConfigError(
            f"{split}_samples = {samples} exceeds the {len(targets)} {split} samples of {name}: take fewer"
        )
    return chosen(targets, samples)


def part(data: Dataset, *, train: int | None = None, test: int | None = None) -> Dataset:
    """The data set with so many training and test samples, see `chosen`.

    Parameters
    ----------
    data : Dataset
        Any.
    train, test : int, optional
        How many; by default all.

    Returns
    -------
    Dataset
        Copies of the samples taken; of images on disk those very ones.

    Raises
    ------
    ConfigError
        If there are not so many.
    """
    if train is not None:
        rows = rows_of(data.name, "train", data.train_targets, train)
        data = replace(data, train_inputs=selected(data.train_inputs, rows), train_targets=data.train_targets[rows])
    if test is not None:
        rows = rows_of(data.name, "test", data.test_targets, test)
        data = replace(data, test_inputs=selected(data.test_inputs, rows), test_targets=data.test_targets[rows])
    return data


def standardized(data: Dataset) -> Dataset:
    """Inputs minus the mean over the training set, divided by its standard deviation.

    Each channel of images has one of both, over all pixels; of points and coordinates each coordinate has. One that is
    constant is only centred.

    Parameters
    ----------
    data : Dataset
        Any.

    Returns
    -------
    Dataset
        With inputs in memory of their own, those on disk whenever they are read; the targets are shared.
    """
    train, test = data.train_inputs, data.test_inputs
    if isinstance(train, MappedImages) and isinstance(test, MappedImages):
        mean, variance = (moment[:, None, None] for moment in train.moments())
        own = shift_and_scale(mean, variance)
        return replace(data, train_inputs=train.standardized(*own), test_inputs=test.standardized(*own))
    assert isinstance(train, torch.Tensor)
    assert isinstance(test, torch.Tensor)
    channel = 1 if train.ndim == 4 else train.ndim - 1
    others = tuple(d for d in range(train.ndim) if d != channel)
    variance, mean = torch.var_mean(train.to(torch.float64), others, correction=0, keepdim=True)
    mean, scale = shift_and_scale(mean, variance, train.dtype)
    return replace(data, train_inputs=(train - mean) / scale, test_inputs=(test - mean) / scale)


def shift_and_scale(
    mean: torch.Tensor, variance: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is subtracted, and what it is then divided by: 1 where nothing varies."""
    deviation = variance.sqrt()
    return mean.to(dtype), torch.where(deviation > 0, deviation, 1.0).to(dtype)

"""What a study may do to a data set before training: take a part of it, standardize its inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from hesscond.data.dataset import Dataset
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
        Copies of the samples taken.

    Raises
    ------
    ConfigError
        If there are not so many.
    """
    for name, wanted, targets in (("train", train, data.train_targets), ("test", test, data.test_targets)):
        if wanted is None:
            continue
        if wanted > len(targets):
            raise ConfigError(
                f"{name}_samples = {wanted} exceeds the {len(targets)} {name} samples of {data.name}: take fewer"
            )
        rows = chosen(targets, wanted)
        inputs = getattr(data, f"{name}_inputs")
        data = replace(data, **{f"{name}_inputs": inputs[rows], f"{name}_targets": targets[rows]})
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
        With inputs in memory of their own; the targets are shared.
    """
    channel = 1 if data.train_inputs.ndim == 4 else data.train_inputs.ndim - 1
    others = tuple(d for d in range(data.train_inputs.ndim) if d != channel)
    variance, mean = torch.var_mean(data.train_inputs.to(torch.float64), others, correction=0, keepdim=True)
    deviation = variance.sqrt()
    scale = torch.where(deviation > 0, deviation, 1.0).to(data.train_inputs.dtype)
    mean = mean.to(data.train_inputs.dtype)
    return replace(data, train_inputs=(data.train_inputs - mean) / scale, test_inputs=(data.test_inputs - mean) / scale)

"""Preparation of samples in a study: subsets, standardization, augmentation of mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.nn import functional

from hesscond.data import pictures
from hesscond.data.dataset import Dataset, selected
from hesscond.errors import ConfigError

#: Pixels of zeros that are put around an image before it is cropped to its size again.
PADDING = 4
#: Random crops that are resized: share of the image, width over height, and number of draws for a crop that fits into
#: the image.
AREA, ASPECT, DRAWS = (0.08, 1.0), (3 / 4, 4 / 3), 10

#: Standard deviation of the noise of points.
JITTER = 0.01


def chosen(targets: torch.Tensor, samples: int) -> torch.Tensor:
    """Indices int64 (samples,) of a fixed part of the samples, ascending, whatever the seed.

    Of labelled samples, the first ones of each class, equally many of every class or one more of the first classes, as
    long as all classes have enough. Of samples with values, or with several classes, every N/samples-th one.
    """
    total = len(targets)
    if targets.is_floating_point() or targets.ndim > 1:
        return torch.arange(samples, device=targets.device) * total // samples
    # a sample's number within its class decides, then its class, then its place
    number = torch.empty_like(targets)
    for label in targets.unique():
        mask = targets == label
        number[mask] = torch.arange(int(mask.sum()), device=targets.device)
    by_class = torch.argsort(targets, stable=True)
    order = by_class[torch.argsort(number[by_class], stable=True)]
    return order[:samples].sort().values


def rows_of(name: str, split: str, targets: torch.Tensor, samples: int) -> torch.Tensor:
    """Indices that `chosen` selects from a split of a data set, ``"train"`` or ``"test"``."""
    if samples > len(targets):
        raise ConfigError(
            f"{split}_samples = {samples} exceeds the {len(targets)} {split} samples of {name}: take fewer"
        )
    return chosen(targets, samples)


def part(data: Dataset, *, train: int | None = None, test: int | None = None) -> Dataset:
    """Subset of a data set with the given numbers of training and test samples (None: all), chosen by `chosen`.

    It has copies of the samples in memory; images on disk are not copied. A `ConfigError` if there are fewer samples.
    """
    if train is not None:
        rows = rows_of(data.name, "train", data.train_targets, train)
        data = replace(data, train_inputs=selected(data.train_inputs, rows), train_targets=data.train_targets[rows])
    if test is not None:
        rows = rows_of(data.name, "test", data.test_targets, test)
        data = replace(data, test_inputs=selected(data.test_inputs, rows), test_targets=data.test_targets[rows])
    return data


def standardized(data: Dataset, on_decoded: pictures.OnDecoded | None = None) -> Dataset:
    """Data set whose inputs have mean 0 and standard deviation 1 over the training set.

    Images have one mean and one deviation for each channel, over all pixels; points and coordinates have one of each
    for every coordinate. Constant channels or coordinates are only centred. Images on disk are standardized whenever
    they are read; ``on_decoded`` receives the number of training pictures decoded, and of all. A `ConfigError` for
    tokens, which have no mean.
    """
    if data.form.tokens:
        raise ConfigError(f"the inputs of {data.name} are tokens, which cannot be standardized: leave them as they are")
    train, test = data.train_inputs, data.test_inputs
    if isinstance(train, pictures.Pictures) and isinstance(test, pictures.Pictures):
        mean, variance = (moment[:, None, None] for moment in train.moments(on_decoded))
        statistics = shift_and_scale(mean, variance)
        return replace(data, train_inputs=train.standardized(*statistics), test_inputs=test.standardized(*statistics))
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
    """Shift that is subtracted and scale that divides the result: the mean, and the deviation or 1 where it is 0."""
    deviation = variance.sqrt()
    return mean.to(dtype), torch.where(deviation > 0, deviation, 1.0).to(dtype)


def crop(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Images (N, C, H, W) shifted by up to 4 pixels in both directions, with zeros in the rest.

    The zeros are in units of the network's input: of standardized images they are the mean.
    """
    return windows(functional.pad(images, (PADDING,) * 4), 2 * PADDING, generator)


def windows(images: torch.Tensor, spare: int, generator: torch.Generator) -> torch.Tensor:
    """Random parts (N, C, H − spare, W − spare) of images (N, C, H, W)."""
    samples, channels, height, width = images.shape
    shifts = torch.randint(spare + 1, (2, samples), generator=generator, device="cpu").to(images.device)
    rows = shifts[0, :, None] + torch.arange(height - spare, device=images.device)
    columns = shifts[1, :, None] + torch.arange(width - spare, device=images.device)
    sample = torch.arange(samples, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Images (N, C, H, W), each mirrored left to right with probability 1/2."""
    mirrored = torch.randint(2, (len(images),), generator=generator, device="cpu").bool().to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def resized_crop(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random parts of images (N, C, H, W) resized to the images' size.

    A part has 0.08 to 1 of the area and is 3/4 to 4/3 as wide as high. Szegedy et al., Going Deeper with Convolutions
    (CVPR 2015), section 6; bilinear, as nothing is made smaller.
    """
    samples, _, height, width = images.shape
    heights, widths = (torch.full((samples,), side, device="cpu") for side in (height, width))
    top, left, high, wide = (side[:, None].to(images.device) for side in boxes(heights, widths, generator))
    rows, columns = (
        # centres of the new pixels among those of the crop, at its edge no further than its outermost ones
        first + ((torch.arange(new, device=images.device) + 0.5) * size / new - 0.5).clamp(min=0).minimum(size - 1)
        for first, size, new in ((top, high, height), (left, wide, width))
    )
    # -1 and 1 are the edges of the image
    y, x = ((2 * place + 1) / size - 1 for place, size in ((rows, height), (columns, width)))
    grid = torch.stack([x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
    return functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


def boxes(height: torch.Tensor, width: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """First row and column, height and width of random crops, each int64 (samples,), drawn as torchvision does.

    ``height`` and ``width`` of the images: int64 (samples,). The area and the logarithm of the aspect are uniform. If
    none of the draws fits, the crop is the largest one about the middle with an aspect in the range.
    """
    samples = len(height)
    area = torch.empty(DRAWS, samples, device="cpu").uniform_(*AREA, generator=generator) * (height * width)
    aspect = torch.empty(DRAWS, samples, device="cpu").uniform_(*map(math.log, ASPECT), generator=generator).exp()
    high, wide = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (high >= 1) & (high <= height) & (wide >= 1) & (wide <= width)
    first = fits.int().argmax(0, keepdim=True)
    accepted = fits.any(0)
    high = high.gather(0, first)[0].where(accepted, height.minimum((width.double() / ASPECT[0]).round().long()))
    wide = wide.gather(0, first)[0].where(accepted, width.minimum((height.double() * ASPECT[1]).round().long()))
    spare = torch.stack([height - high, width - wide])
    # in float64, where numbers below 1 are not rounded to 1
    drawn = (torch.rand(2, samples, generator=generator, dtype=torch.float64, device="cpu") * (spare + 1)).long()
    top, left = drawn.where(accepted, spare // 2)
    return top, left, high, wide


def window_of_pictures(images: pictures.Pictures, index: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random size × size of the central resize × resize of pictures with indices (n,)."""
    return windows(replace(images, size=images.resize, flat=False)[index], images.resize - images.size, generator)


def part_of_pictures(images: pictures.Pictures, index: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random parts, as of `resized_crop`, of whole pictures with indices (n,), resized to size × size."""
    return images.resized(index, lambda heights, widths: boxes(heights, widths, generator))


def cutout(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Images (N, C, H, W) with zeros in a rectangle of half their height and width, centred at a random pixel.

    DeVries, Taylor, Improved Regularization of Convolutional Neural Networks with Cutout (2017), section 3.2: of CIFAR
    16 × 16, cut off at the border. The zeros are as those of `crop`.
    """
    samples, _, height, width = images.shape
    inside = []
    for side in (height, width):
        middle = torch.randint(side, (samples, 1), generator=generator, device="cpu").to(images.device)
        place = torch.arange(side, device=images.device)
        start = middle - side // 4
        inside.append((place >= start) & (place < start + side // 2))
    rows, columns = inside
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def rotation(clouds: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Clouds (N, P, 3) rotated about their third axis, which points up, by a uniform angle."""
    angle = (2 * math.pi * torch.rand(len(clouds), generator=generator, device="cpu")).to(clouds)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turns = torch.stack([cos, sin, zero, -sin, cos, zero, zero, zero, one], 1).view(-1, 3, 3)
    return clouds @ turns


def jitter(clouds: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Clouds (N, P, d) with noise N(0, 0.01²), cut off at ±0.05, in each coordinate.

    Qi, Su, Mo, Guibas, PointNet (CVPR 2017), section 5.1; the bounds are those of the published code.
    """
    noise = JITTER * torch.randn(clouds.shape, generator=generator, device="cpu")
    return clouds + noise.clamp(-5 * JITTER, 5 * JITTER).to(clouds)


#: Random change of images, points, … (N, …) of a mini-batch.
Change: TypeAlias = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
#: By kind of input, in the order of application. Random numbers are drawn on the CPU: the same on every device.
AUGMENTATIONS: dict[str, dict[str, Change]] = {
    "image": {"crop": crop, "resized-crop": resized_crop, "flip": flip, "cutout": cutout},
    "points": {"rotation": rotation, "jitter": jitter},
    "coordinates": {},
    "tokens": {},
}
#: Crops of pictures on disk, which are cut where they are decoded, by those of images in memory.
OF_PICTURES: dict[Change, Callable[[pictures.Pictures, torch.Tensor, torch.Generator], torch.Tensor]] = {
    crop: window_of_pictures,
    resized_crop: part_of_pictures,
}

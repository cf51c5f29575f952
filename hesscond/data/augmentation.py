"""Random crops and flips of mini-batches of images."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

#: Pixels of zeros that are put around an image before it is cropped to its size again.
PADDING = 4
#: Of a random crop that is resized: its share of the image, its width over its height, and how often it is drawn again
#: where it does not fit into the image.
AREA, ASPECT, DRAWS = (0.08, 1.0), (3 / 4, 4 / 3), 10


def crop(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image (N, C, H, W) moved by up to 4 pixels in both directions, zeros where it is left.

    The zeros are those of what the network sees: of standardized images they are the mean.
    """
    samples, channels, height, width = images.shape
    moved = torch.randint(2 * PADDING + 1, (2, samples), generator=generator).to(images.device)
    rows = moved[0, :, None] + torch.arange(height, device=images.device)
    columns = moved[1, :, None] + torch.arange(width, device=images.device)
    padded = functional.pad(images, (PADDING,) * 4)
    sample = torch.arange(samples, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image (N, C, H, W) as it is or mirrored left to right, one as likely as the other."""
    mirrored = torch.randint(2, (len(images),), generator=generator).bool().to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def resized_crop(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random part of each image (N, C, H, W), 0.08 to 1 of its area and 3/4 to 4/3 as wide as high, back at its size.

    Szegedy et al., Going Deeper with Convolutions (CVPR 2015), section 6; bilinear, as nothing is made smaller.
    """
    samples, _, height, width = images.shape
    top, left, high, wide = (side[:, None].to(images.device) for side in boxes(samples, height, width, generator))
    rows, columns = (
        # centres of the new pixels among those of the crop, at its edge no further than its outermost ones
        first + ((torch.arange(new, device=images.device) + 0.5) * size / new - 0.5).clamp(min=0).minimum(size - 1)
        for first, size, new in ((top, high, height), (left, wide, width))
    )
    # -1 and 1 are the edges of the image
    y, x = ((2 * place + 1) / size - 1 for place, size in ((rows, height), (columns, width)))
    grid = torch.stack([x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
    return functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


def boxes(samples: int, height: int, width: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """First row and column, height and width of random crops, each int64 (samples,), drawn as torchvision does.

    The logarithm of the aspect is uniform, as is the area. Where none of the draws fits, it is the largest crop about
    the middle with an aspect in the range.
    """
    area = torch.empty(DRAWS, samples).uniform_(*AREA, generator=generator) * (height * width)
    aspect = torch.empty(DRAWS, samples).uniform_(*map(math.log, ASPECT), generator=generator).exp()
    high, wide = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (high >= 1) & (high <= height) & (wide >= 1) & (wide <= width)
    first = fits.int().argmax(0, keepdim=True)
    found = fits.any(0)
    high = high.gather(0, first)[0].where(found, min(height, round(width / ASPECT[0])))
    wide = wide.gather(0, first)[0].where(found, min(width, round(height * ASPECT[1])))
    spare = torch.stack([height - high, width - wide])
    # in float64, where what is below 1 does not become spare + 1
    drawn = (torch.rand(2, samples, generator=generator, dtype=torch.float64) * (spare + 1)).long()
    top, left = drawn.where(found, spare // 2)
    return top, left, high, wide


#: In the order in which they are done. What is drawn is drawn on the CPU: the same on every device.
AUGMENTATIONS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "crop": crop,
    "resized-crop": resized_crop,
    "flip": flip,
}

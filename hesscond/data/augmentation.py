"""Random crops and flips of mini-batches of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

#: Pixels of zeros that are put around an image before it is cropped to its size again.
PADDING = 4


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


#: In the order in which they are done. What is drawn is drawn on the CPU: the same on every device.
AUGMENTATIONS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {"crop": crop, "flip": flip}

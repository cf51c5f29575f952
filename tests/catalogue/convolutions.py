"""Convolutions, at all levels."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import grid
from tests.catalogue.parts import CE, MSE, Net, labelled, used, valued

conv = functools.partial(grid, "Convolutions")


def cnn(layer, positions, *, activation=None, after=()):
    """A convolution, ``after``, the activation, and a dense head on the flattened ``positions`` numbers."""
    return nn.Sequential(layer, *after, activation or nn.ReLU(), nn.Flatten(), nn.Linear(positions, 3))


def few_positions(m, h):
    """Three positions of a map, the first among them."""
    return h.flatten(2)[..., [0, 37, 80]]


def upsampled():
    """A transposed convolution told its output size when it is called."""
    parts = {"up": nn.ConvTranspose1d(2, 2, 3, stride=2), "out": nn.Conv1d(2, 1, 1)}
    return Net(lambda m, x: m.out(torch.relu(m.up(x, output_size=[8]))), **parts)


def unet():
    """Down, up, and a skip connection by concatenation."""

    def forward(m, x):
        return m.out(torch.cat([x, F.interpolate(m.up(F.silu(m.down(x))), scale_factor=1.0)], 1))

    return Net(
        forward,
        down=nn.Conv2d(1, 2, 3, stride=2, padding=1),
        up=nn.ConvTranspose2d(2, 1, 2, stride=2),
        out=nn.Conv2d(2, 1, 1),
    )


def channels_last():
    x, y = labelled(2, 4, 4)
    return x.contiguous(memory_format=torch.channels_last), y


conv("conv1d", lambda: (cnn(nn.Conv1d(2, 3, 3), 12), CE, labelled(2, 6)), psd=True)
conv("conv1d-stride-dilation",
    lambda: (cnn(nn.Conv1d(2, 2, 2, stride=2, dilation=3, padding=1), 6), CE, labelled(2, 7)), psd=True)  # fmt: skip
conv("conv1d-same-even-tanh",
    lambda: (cnn(nn.Conv1d(2, 2, 4, padding="same"), 10, activation=nn.Tanh()), CE, labelled(2, 5)))  # fmt: skip
conv("conv1d-circular-same",
    lambda: (cnn(nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular"), 8), CE, labelled(2, 4)),
    psd=True)  # fmt: skip
conv("conv1d-per-position",
    lambda: (nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 3, 1)), CE,
             labelled(2, 6, to=(4,))), psd=True)  # fmt: skip
conv("conv2d-one-sample", lambda: (cnn(nn.Conv2d(2, 3, 3), 12), CE, labelled(2, 4, 4, n=1)), psd=True)
conv("conv2d-tanh-mse", lambda: (cnn(nn.Conv2d(2, 2, 3), 8, activation=nn.Tanh()), MSE, valued(2, 4, 4)))
conv("conv2d-gelu", lambda: (cnn(nn.Conv2d(2, 2, (2, 3)), 12, activation=nn.GELU()), CE, labelled(2, 4, 4)))
conv("conv2d-stride-padding",
    lambda: (cnn(nn.Conv2d(2, 2, 3, stride=(2, 1), padding=(1, 0)), 8), CE, labelled(2, 4, 4)), psd=True)  # fmt: skip
conv("conv2d-same", lambda: (cnn(nn.Conv2d(2, 2, (2, 3), padding="same"), 32), CE, labelled(2, 4, 4)), psd=True)
conv("conv2d-same-dilated",
    lambda: (cnn(nn.Conv2d(2, 1, 2, padding="same", dilation=2), 16), CE, labelled(2, 4, 4)), psd=True)  # fmt: skip
conv("conv2d-reflect",
    lambda: (cnn(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 32), CE, labelled(2, 4, 4)),
    psd=True)  # fmt: skip
conv("conv2d-replicate",
    lambda: (cnn(nn.Conv2d(2, 2, 3, padding=(2, 1), padding_mode="replicate"), 48), CE, labelled(2, 4, 4)),
    psd=True)  # fmt: skip
conv("conv2d-circular-stride",
    lambda: (cnn(nn.Conv2d(2, 2, 3, padding=1, stride=2, padding_mode="circular"), 8,
             activation=nn.Softplus()), CE, labelled(2, 4, 4)))  # fmt: skip
conv("conv2d-dilation", lambda: (cnn(nn.Conv2d(2, 2, 2, dilation=(1, 2)), 12), CE, labelled(2, 4, 4)), psd=True)
conv("conv2d-groups", lambda: (cnn(nn.Conv2d(4, 6, 2, groups=2), 24), CE, labelled(4, 3, 3)), psd=True)
conv("conv2d-depthwise",
    lambda: (cnn(nn.Conv2d(3, 6, 2, groups=3, bias=False), 24, activation=nn.Tanh()), CE,
             labelled(3, 3, 3)))  # fmt: skip
conv("conv2d-no-bias", lambda: (cnn(nn.Conv2d(2, 3, 3, bias=False), 12), CE, labelled(2, 4, 4)), psd=True)
conv("conv2d-pointwise",
    lambda: (nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
             nn.Linear(3, 3)), CE, labelled(2, 4, 4)), psd=True)  # fmt: skip
conv("conv2d-eval-batchnorm",
    lambda: (cnn(nn.Conv2d(2, 2, 3), 8, after=(used(nn.BatchNorm2d(2)),)).eval(), CE, labelled(2, 4, 4)),
    psd=True)  # fmt: skip
conv("conv2d-groupnorm", lambda: (cnn(nn.Conv2d(2, 4, 3), 16, after=(nn.GroupNorm(2, 4),)), CE, labelled(2, 4, 4)))
conv("conv2d-maxpool",
    lambda: (cnn(nn.Conv2d(2, 2, 3, padding=1), 8, after=(nn.MaxPool2d(2),)), CE, labelled(2, 4, 4)),
    psd=True)  # fmt: skip
conv("conv2d-avgpool",
    lambda: (cnn(nn.Conv2d(2, 2, 3, padding=1), 8, after=(nn.AvgPool2d(2),), activation=nn.Tanh()), CE,
             labelled(2, 4, 4)))  # fmt: skip
conv("conv2d-adaptive-max",
    lambda: (cnn(nn.Conv2d(2, 2, 2), 8, after=(nn.AdaptiveMaxPool2d(2),)), CE, labelled(2, 4, 4)),
    psd=True)  # fmt: skip
conv("conv2d-few-positions",
    lambda: (cnn(nn.Conv2d(1, 2, 3), 6, after=(Net(few_positions),)), CE, labelled(1, 14, 14)), psd=True)  # fmt: skip
conv("conv2d-two-layers",
    lambda: (nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU(inplace=True), nn.Dropout2d(0.3),
             *cnn(nn.Conv2d(2, 3, 2), 12)).eval(), CE, labelled(2, 4, 4)), psd=True)  # fmt: skip
conv("conv2d-two-layers-tanh",
    lambda: (nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), *cnn(nn.Conv2d(2, 3, 2), 12)), CE,
             labelled(2, 4, 4)))  # fmt: skip
conv("conv2d-train-dropout2d",
    lambda: (cnn(nn.Conv2d(2, 3, 3), 12, after=(nn.Dropout2d(0.5),)), CE, labelled(2, 4, 4)), psd=True,
    streams=False)  # fmt: skip
conv("conv2d-channels-last", lambda: (cnn(nn.Conv2d(2, 2, 3), 8), CE, channels_last()), psd=True)
conv("conv2d-float32",
    lambda: (cnn(nn.Conv2d(2, 3, 3), 12, activation=nn.Tanh()), CE, labelled(2, 4, 4)),
    dtype=torch.float32)  # fmt: skip
conv("conv3d", lambda: (cnn(nn.Conv3d(1, 2, 2, padding=(0, 1, 0)), 12), CE, labelled(1, 3, 2, 2, n=5)), psd=True)
conv("conv3d-circular-stride",
    lambda: (cnn(nn.Conv3d(1, 2, 2, padding=1, padding_mode="circular", stride=2), 16,
             activation=nn.Tanh()), CE, labelled(1, 2, 2, 2, n=5)))  # fmt: skip
conv("transposed1d-dilation-tanh",
    lambda: (cnn(nn.ConvTranspose1d(2, 2, 2, padding=1, dilation=2), 6, activation=nn.Tanh()), CE,
             labelled(2, 3)))  # fmt: skip
conv("transposed1d-output-size", lambda: (upsampled(), MSE, valued(2, 3, to=(1, 8))), psd=True)
conv("transposed2d-output-padding",
    lambda: (cnn(nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=(1, 0)), 24), CE,
             labelled(1, 2, 2)), psd=True)  # fmt: skip
conv("transposed2d-groups", lambda: (cnn(nn.ConvTranspose2d(4, 6, 2, groups=2), 54), CE, labelled(4, 2, 2)), psd=True)
conv("transposed2d-depthwise-no-bias",
    lambda: (cnn(nn.ConvTranspose2d(2, 4, 2, groups=2, stride=2, bias=False), 64, activation=nn.Tanh()),
             CE, labelled(2, 2, 2)))  # fmt: skip
conv("transposed3d", lambda: (cnn(nn.ConvTranspose3d(1, 2, 2), 36), CE, labelled(1, 2, 1, 2)), psd=True)
conv("transposed3d-groups",
    lambda: (cnn(nn.ConvTranspose3d(2, 2, (1, 2, 2), groups=2, stride=2), 32), CE,
             labelled(2, 1, 2, 2, n=4)), psd=True)  # fmt: skip

"""Networks whose first layer is dense, convolutional or grouped, with data, for methods that read its inputs."""

import torch
from torch import nn


def dense(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)).double()


def convolutional(groups=1, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 2, padding=1, groups=groups, bias=bias), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    ).double()
    model(images(2)[0])
    return model


def vectors(samples, seed=0, decades=0):
    """Correlated features with means; the scales that are mixed spread over ``decades``."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-decades / 2, decades / 2, 5, dtype=torch.float64)
    mixing = torch.randn(5, 5, generator=g, dtype=torch.float64) * scales
    x = torch.randn(samples, 5, generator=g, dtype=torch.float64) @ mixing + torch.arange(5)
    return x, torch.randint(0, 3, (samples,), generator=g)


def images(samples, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, 3, 3, generator=g, dtype=torch.float64) + torch.arange(4).view(-1, 1, 1)
    return x, torch.randint(0, 3, (samples,), generator=g)


def rows_of(layer, x):
    """(rows, groups, n) inputs of the first layer, by torch's unfold."""
    if isinstance(layer, nn.Linear):
        return x[:, None]
    patches = nn.functional.unfold(x, layer.kernel_size, padding=layer.padding).movedim(1, 2)
    return patches.reshape(-1, layer.groups, layer.weight[0].numel())


CASES = {
    "dense": (dense, vectors),
    "dense, no bias": (lambda: dense(bias=False), vectors),
    "convolution": (convolutional, images),
    "groups": (lambda: convolutional(groups=2), images),
    "groups, no bias": (lambda: convolutional(groups=2, bias=False), images),
}

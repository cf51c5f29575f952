"""Two backward passes against forward over reverse: Hessian-vector products in the output of a first layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn.functional import cross_entropy


def compare(name: str, first: nn.Module, tail: nn.Module, x: torch.Tensor, count: int, repeats: int = 9) -> None:
    """Time ``count`` directions at once both ways, interleaved, and check that they agree."""
    first, tail, x = first.double(), tail.double(), x.double()
    targets = torch.randint(0, 10, (len(x),))
    activations = first(x).detach()
    directions = torch.randn(count, *activations.shape, dtype=torch.float64)

    def loss(perturbation: torch.Tensor) -> torch.Tensor:
        return cross_entropy(tail(activations + perturbation), targets)

    def backward_twice() -> torch.Tensor:
        zero = torch.zeros_like(activations, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(zero), zero, create_graph=True)
        return torch.autograd.grad(gradient, zero, directions, is_grads_batched=True)[0]

    def forward_over_reverse() -> torch.Tensor:
        zero = torch.zeros_like(activations)
        return vmap(lambda v: jvp(grad(loss), (zero,), (v,))[1])(directions)

    ways: list[Callable[[], torch.Tensor]] = [backward_twice, forward_over_reverse]
    assert torch.allclose(*(way() for way in ways))
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for way, own in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            own.append(1e3 * (time.perf_counter() - start))
    backward, forward = map(statistics.median, times)
    print(f"{name}: two backward passes {backward:.1f} ms, forward over reverse {forward:.1f} ms")


if __name__ == "__main__":
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 10))
    compare("MLP, tanh, 100 directions", nn.Linear(3072, 100), mlp, torch.randn(60, 3072), 100)
    cnn = nn.Sequential(nn.GELU(), nn.Conv2d(16, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 144, 10))
    compare("CNN, GELU, 64 directions", nn.Conv2d(3, 16, 3), cnn, torch.randn(16, 3, 16, 16), 64)

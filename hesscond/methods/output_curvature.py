"""The second derivatives of the loss in the network's outputs: what Gauss–Newton and Fisher matrices are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.methods.inputs import LayerState

#: Units of round-off in the curvature of a saturated softmax.
SATURATED = 64


class OutputWatch:
    """Recorder of a network's output in its latest training pass, and of the curvature of the loss in it."""

    def __init__(self, method: str, model: nn.Module) -> None:
        self.method, self.model = method, model
        self._output: Any = None
        self.handle = model.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        # a probe calls the model with other tensors in place of its parameters: not this training
        own = next(module.parameters(), None)
        if isinstance(own, nn.Parameter) and torch.is_grad_enabled():
            self._output = output

    def curvature(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output z, and ∂²loss/∂z² as a block (C, C) for each of its B samples, in its precision."""
        z, self._output = self._output, None
        if not isinstance(z, torch.Tensor):
            what = "no training pass of the model was seen" if z is None else f"its output is a {type(z).__name__}"
            raise ConfigError(f"{self.method} needs the model's output as a tensor, and {what}")
        first = torch.autograd.grad(loss, z, create_graph=True, allow_unused=True)[0] if z.requires_grad else None
        if first is None:
            raise ConfigError(f"{self.method}: the loss does not depend on the output of the model's latest pass")
        g = first.reshape(-1, 1) if z.ndim < 2 else first.flatten(1)
        if not g.requires_grad:
            return z, z.new_zeros(*g.shape, g.shape[1])

        def product(v: torch.Tensor) -> torch.Tensor:
            (found,) = torch.autograd.grad(g, z, v, retain_graph=True, materialize_grads=True)
            return found.reshape(g.shape)

        columns = torch.eye(g.shape[1], dtype=g.dtype, device=g.device)
        S = torch.stack([product(column.expand_as(g)) for column in columns], 2)
        # half of the parts alone: nothing may reach the others
        some = torch.zeros_like(g)
        some[
            torch.randperm(len(g), generator=torch.Generator().manual_seed(0), device="cpu")[: len(g) // 2].to(g.device)
        ] = 1.0
        if reaches(product(some)[some[:, 0] == 0]):
            raise ConfigError(f"{self.method} is not defined for a loss in which the samples are coupled")
        return z, S

    def back(self, z: torch.Tensor, V: torch.Tensor, states: Iterable[LayerState]) -> None:
        """Carry V (r, B, C), gradients of r numbers in the output z, back through the network: ``states`` keep them."""
        chosen = [state for state in states if state.module.weight.requires_grad]
        weights = [state.module.weight for state in chosen]
        for number, v in enumerate(V, 1):
            for state in chosen:
                state.wanted = number
            torch.autograd.grad(z, weights, v.reshape(z.shape).to(z), retain_graph=True, allow_unused=True)
        for state in chosen:
            state.wanted = 0


def reaches(gradients: torch.Tensor) -> bool:
    """Whether there are gradients that are neither zero nor those of a run that diverges."""
    return bool(((gradients != 0) & gradients.isfinite()).any())


def root(S: torch.Tensor, method: str) -> torch.Tensor:
    """b_1 … b_r (r, B, C) with Σ b bᵀ = S for each block of S (B, C, C), r ≥ 1; zeros if S is not finite."""
    eps = torch.finfo(S.dtype).eps
    S = S.to(torch.float64)
    S = S.where(torch.isfinite(S).all(), 0.0)
    values, Q = torch.linalg.eigh((S + S.mT) / 2)
    if bool((values < -max(eps**0.5 * float(values.abs().amax()), SATURATED * eps)).any()):
        raise ConfigError(f"{method}: the loss is not convex in the outputs, and its curvature in them indefinite")
    # what is below is the rounding of zero
    kept = max(int((values > 16 * S.shape[1] * eps * values[:, -1:]).sum(1).max()), 1)
    return (Q * values.clamp_min(0).sqrt()[:, None])[..., S.shape[1] - kept :].permute(2, 0, 1)

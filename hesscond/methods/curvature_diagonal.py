"""Sophia and AdaHessian: M is diagonal, of random estimates of the diagonal of the Hessian."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hesscond.hessians import ParameterMap
from hesscond.methods import base, by_parameter


class CurvatureDiagonal(by_parameter.Learned):
    """Base of both methods: ĥ = z ∘ Hz with random signs z (Hutchinson's estimate of diag H), every few steps."""

    sided = False

    beta_1: float = base.option(0.9, "β₁.", least=0, below=1)
    beta_2: float = base.option(0.999, "β₂.", least=0, below=1)
    epsilon: float = base.option(1e-4, "ε.", above=0)
    update_every: int = base.option(1, "Steps after which diag H is estimated again; the last one counts on.", least=1)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.steps = 0
        self._estimates: dict[str, torch.Tensor] = {}

    def observe(self, loss: torch.Tensor) -> None:
        if self.steps % self.update_every:
            return
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        parameters = list(named.values())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        z = [(torch.randint(0, 2, p.shape, generator=self.generator, device="cpu") * 2 - 1).to(p) for p in parameters]
        curved = [(g, s) for g, s in zip(gradients, z, strict=True) if g is not None and g.requires_grad]
        products: Any = [None] * len(parameters)
        if curved:
            products = torch.autograd.grad(
                [g for g, _ in curved], parameters, [s for _, s in curved], retain_graph=True, allow_unused=True
            )
        self._estimates = {
            name: (torch.zeros_like(p) if Hz is None else Hz * s).detach()
            for (name, p), Hz, s in zip(named.items(), products, z, strict=True)
        }

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Take in the estimates, then the gradients."""
        if not self.steps % self.update_every and not self._estimates:
            raise base.not_shown(self.name)
        for name, h in self._estimates.items():
            g = by_parameter.as_matrix(h).to(torch.float64)
            state = self.state_at(name, g)
            if bool(torch.isfinite(g).all()):
                self.curve(state, g)
        self._estimates = {}
        super().transform_gradients()
        self.steps += 1

    def begun(self, g: torch.Tensor) -> by_parameter.State:
        return {"m": torch.zeros_like(g), "h": torch.zeros_like(g)}

    def curve(self, state: by_parameter.State, h: torch.Tensor) -> None:
        """Move the average of diag H towards an estimate."""
        state["h"] = torch.lerp(state["h"], h, 1 - self.beta_2)

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        """Move the average m towards the gradient, and return it."""
        by_parameter.counted(state)
        state["m"] = torch.lerp(state["m"], g, 1 - self.beta_1)
        return state["m"]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state[""]["steps"] = torch.tensor(self.steps, device="cpu")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = int(state[""]["steps"])


@base.register
class Sophia(CurvatureDiagonal):
    """Sophia-H: the step is clip(m/max(γh, ε), ±1), m = β₁m + (1 − β₁)g and h an average of estimates of diag H.

    h ← β₂h + (1 − β₂) z ∘ Hz every ``update_every`` steps; negative h count as ε does. Clipped entries move by ±1, so
    the step is no fixed linear map of m: measured is M = diag(1/max(γh, ε, |m|)), which is what was done to this m.
    """

    name = "sophia"
    summary = "Sophia-H: clipped steps along the averaged gradient over an estimate of the diagonal of the Hessian"
    source = "Liu et al., ICLR 2024, Algorithms 1, 3"
    rate = 0.001

    beta_1: float = base.option(0.96)
    beta_2: float = base.option(0.99)
    gamma: float = base.option(0.01, "γ.", above=0)
    epsilon: float = base.option(1e-12)
    update_every: int = base.option(10)

    def read(self, state: by_parameter.State) -> ParameterMap | None:
        if not state["step"]:
            return None
        d = torch.maximum((self.gamma * state["h"]).clamp(min=self.epsilon), state["m"].abs())
        return ParameterMap(d.rsqrt())


@base.register
class AdaHessian(CurvatureDiagonal):
    """AdaHessian: Adam with estimates ĥ of diag H in the place of gradients, M = 1/(v̂^(k/2) + ε).

    v ← β₂v + (1 − β₂) ĥ², corrected as Adam's; the paper averages ĥ over the entries of a filter too, which is left
    out.
    """

    name = "adahessian"
    summary = "AdaHessian: Adam with estimates of the diagonal of the Hessian in the place of gradients"
    source = "Yao et al., AAAI 2021, Algorithm 1"
    rate = 0.1

    power: float = base.option(1.0, "k.", above=0, most=1)

    def curve(self, state: by_parameter.State, h: torch.Tensor) -> None:
        """Move the average v of squares towards the square of an estimate."""
        state["h"] = torch.lerp(state["h"], h.square(), 1 - self.beta_2)

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        """The corrected average."""
        m = super().learn(state, g)
        return m / (1 - self.beta_1 ** int(state["step"]))

    def read(self, state: by_parameter.State) -> ParameterMap | None:
        step = int(state["step"])
        if not step:
            return None
        estimates = 1 + (step - 1) // self.update_every
        v = state["h"] / (1 - self.beta_2**estimates)
        return ParameterMap((v.pow(self.power / 2) + self.epsilon).rsqrt())

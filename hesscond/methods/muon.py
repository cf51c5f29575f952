"""Muon: the averaged gradient of every weight, orthogonalized by Newton–Schulz steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import Learned, State, counted
from hesscond.methods.optimizers.reading import newton_schulz
from hesscond.methods.options import option
from hesscond.methods.registry import register

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@register
class Muon(Learned):
    """Muon: W moves along X_k ≈ (UUᵀ)^−½ U with U the averaged gradient, times 0.2 √max(m, n); vectors as in Adam.

    B ← μB + (1 − μ)G, U = (1 − μ)G + μB (Nesterov) or B, X_0 = U/‖U‖, X ← (aI + bXXᵀ + c(XXᵀ)²) X for as many steps as
    said, with (a, b, c) = (3.4445, −4.7750, 2.0315), on the shorter side. The factor gives a weight's step the root
    mean square that Adam's has. For vectors M = 1/(√v̂ + ε), with β₂ = 0.95, ε = 1e-8.

    The step is no fixed linear map of the gradient. Measured is the matrix that the steps multiply U with: X_k = L U
    (or U R, where the weight is taller than wide), M = L ⊗ I, L a polynomial of UUᵀ that is positive definite with
    these coefficients. It is one of many that explain this step: any M with M vec U = vec X_k does.

    Source: Jordan et al., 2024; the factor: Liu et al., 2025.
    """

    name = "muon"
    summary = "Muon: the averaged gradient of every weight, orthogonalized"
    source = "Jordan et al., 2024"
    rate = 0.003

    momentum: float = option(0.95, "μ; a momentum of the training would act in addition.", least=0, below=1)
    nesterov: bool = option(True, "Whether U is the average of Nesterov's step.")
    steps: int = option(5, "Newton–Schulz steps.", least=1)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.averages = self.momentum > 0

    def begun(self, g: torch.Tensor) -> State:
        return {"step": torch.zeros((), device="cpu"), "B": torch.zeros_like(g), "v": torch.zeros_like(g)}

    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        step = counted(state)
        state["B"] = torch.lerp(state["B"], g, 1 - self.momentum)
        if g.ndim == 1:
            state["v"] = torch.lerp(state["v"], g.square(), 0.05)
            return state["B"] / (1 - self.momentum**step)
        state["U"] = torch.lerp(g, state["B"], self.momentum) if self.nesterov else state["B"].clone()
        return state["U"]

    def read(self, state: State) -> ParameterMap | None:
        if "U" not in state:
            return ParameterMap(((state["v"] / (1 - 0.95 ** int(state["step"]))).sqrt() + 1e-8).rsqrt())
        scale = 0.2 * math.sqrt(max(state["U"].shape))
        return newton_schulz(state["U"], [COEFFICIENTS] * self.steps, 1e-7, scale=scale)

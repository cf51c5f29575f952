"""PSGD with Kronecker factors: a preconditioner that is fitted until gradients come out white."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import Learned, State, counted
from hesscond.methods.options import option
from hesscond.methods.registry import register


@register
class PSGD(Learned):
    """PSGD-Kron: M = QᵀQ with Q = Q_L ⊗ Q_R of triangular factors, fitted so that Qû has unit covariance.

    Each step takes one relative gradient step of the criterion E[ûᵀMû + vᵀM⁻¹v], v normal: with A = Q_L Û Q_Rᵀ and
    B = Q_L⁻ᵀ V Q_R⁻¹, Q_L ← Q_L − μ triu(AAᵀ − BBᵀ) Q_L/‖AAᵀ + BBᵀ‖₂, and Q_R with AᵀA and BᵀB. A vector has a
    diagonal Q. û is the averaged gradient, corrected as Adam's. A direction whose root mean square exceeds 1.1 is
    shortened to it, which is part of M.
    """

    name = "psgd"
    summary = "PSGD-Kron: Kronecker factors fitted until the gradients come out white"
    source = "Li, IEEE TNNLS 29 (2018)"
    rate = 0.003

    momentum: float = option(0.9, "Momentum of û; a momentum of the training would act in addition.", least=0, below=1)
    fitting_rate: float = option(0.1, "μ.", above=0, below=1)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.averages = self.momentum > 0

    def begun(self, g: torch.Tensor) -> State:
        Q = (
            [torch.eye(size, dtype=g.dtype, device=g.device) for size in g.shape]
            if g.ndim == 2
            else [torch.ones_like(g)]
        )
        kept = {f"Q_{k}": own for k, own in enumerate(Q)}
        return {
            "step": torch.zeros((), device="cpu"),
            "m": torch.zeros_like(g),
            "shortened": torch.ones((), dtype=g.dtype, device="cpu"),
        } | kept

    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        step = counted(state)
        state["m"] = torch.lerp(state["m"], g, 1 - self.momentum)
        u = state["m"] / (1 - self.momentum**step)
        v = torch.randn(g.shape, generator=self.generator, dtype=g.dtype, device="cpu").to(g)
        if g.ndim == 1:
            q = state["Q_0"]
            a, b = (q * u).square(), (v / q).square()
            state["Q_0"] = q - self.fitting_rate * (a - b) * q / (a + b).max().clamp_min(1e-300)
        else:
            L, R = state["Q_0"], state["Q_1"]
            A = L @ u @ R.T
            B = torch.linalg.solve_triangular(
                L.T, torch.linalg.solve_triangular(R, v, upper=True, left=False), upper=False
            )
            for key, Q, a, b in (("Q_0", L, A, B), ("Q_1", R, A.T, B.T)):
                size = squared_norm(torch.cat([a, b], 1)).clamp_min(1e-300)
                state[key] = Q - self.fitting_rate * torch.triu(a @ a.T - b @ b.T) @ Q / size
        state["shortened"] = torch.ones_like(state["shortened"])
        direction = self.read(state).applied(u)
        state["shortened"] = (1.1 / (direction.square().mean().sqrt() + 1e-6)).clamp(max=1.0)
        return u

    def read(self, state: State) -> ParameterMap:
        Q = [state[key] for key in ("Q_0", "Q_1") if key in state]
        factors = [own.T if own.ndim == 2 else own for own in Q]
        return ParameterMap.kronecker([len(own) for own in Q], factors, scale=float(state["shortened"]))


def squared_norm(C: torch.Tensor) -> torch.Tensor:
    """‖CCᵀ‖₂ (), from the smaller Gram matrix."""
    return torch.linalg.eigvalsh(C @ C.T if len(C) <= C.shape[1] else C.T @ C)[-1]

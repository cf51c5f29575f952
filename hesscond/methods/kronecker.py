"""Shampoo, SOAP, PSGD and Muon: M of every weight as a Kronecker product, from its gradients."""

from __future__ import annotations

import math
from typing import Literal

import torch

from hesscond.hessians import ParameterMap
from hesscond.methods import by_parameter
from hesscond.methods.base import option, register
from hesscond.methods.optimizers import reading


@register
class Shampoo(by_parameter.Learned):
    """Shampoo: G ← L^−p G R^−p with L = εI + Σ GGᵀ, R = εI + Σ GᵀG, for a vector g ← (εI + Σ ggᵀ)^−2p g.

    The roots P of M = L^−p ⊗ R^−p are L^−p/2 ⊗ R^−p/2. At the unit level, where M mixes units, the block of M of a
    unit's own parameters counts.

    Source: Gupta, Koren, Singer, ICML 2018, Algorithm 1 (p = 1/4); Morwani et al., ICLR 2025 (p = 1/2).
    """

    name = "shampoo"
    summary = "Shampoo: Kronecker factors of the second moments of gradients, to the power −1/4 or −1/2"
    source = "Gupta, Koren, Singer, ICML 2018, Algorithm 1"
    rate = 0.03

    power: Literal["quarter", "half"] = option(
        "quarter",
        "``quarter``: p = 1/4. ``half``: p = 1/2, of the average with weights of sum 1 and with the factor √tr L, so "
        "that M² is the inverse of L ⊗ R/tr L, an approximation of E[vec G vec Gᵀ].",
    )
    epsilon: float = option(1e-3, "ε.", above=0)
    beta: float = option(1.0, "Average L ← βL + (1 − β) GGᵀ; 1: the sum.", least=0, most=1)
    update_every: int = option(
        10, "Steps after which roots are computed again; each of as many first steps computes them.", least=1
    )

    def begun(self, g: torch.Tensor) -> by_parameter.State:
        kept = {f"sum_{k}": torch.zeros_like(S) for k, S in enumerate(by_parameter.sides(g))}
        return {"mass": torch.zeros((), dtype=g.dtype, device="cpu")} | kept

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        new = 1.0 if self.beta == 1 else 1 - self.beta
        state["mass"] = self.beta * state["mass"] + new
        for k, S in enumerate(by_parameter.sides(g)):
            state[f"sum_{k}"] = self.beta * state[f"sum_{k}"] + new * S
        step = by_parameter.counted(state)
        # a root of few gradients does not fit the next one
        if step <= self.update_every or step % self.update_every == 0:
            for k in range(g.ndim):
                state[f"root_{k}"] = self._root(state, k, g.ndim)
        return g

    def _root(self, state: by_parameter.State, k: int, ndim: int) -> torch.Tensor:
        """L^−p/2."""
        A = state[f"sum_{k}"]
        scale = 1.0
        if self.power == "half":
            A = A / state["mass"]
            # of the two factors one takes √tr L
            scale = float(A.trace() + self.epsilon * len(A)) ** 0.5 if k == 0 and ndim == 2 else 1.0
        p = {"quarter": 0.25, "half": 0.5}[self.power] * (2 if ndim == 1 else 1)
        values, Q = torch.linalg.eigh(A)
        inverse = (values.clamp_min(0) + self.epsilon).pow(-p)
        return (Q * (scale * inverse).sqrt()) @ Q.T

    def read(self, state: by_parameter.State) -> ParameterMap | None:
        roots = [state[key] for key in ("root_0", "root_1") if key in state]
        return ParameterMap.kronecker([len(root) for root in roots], roots) if roots else None


@register
class SOAP(by_parameter.Learned):
    """SOAP: Adam in the eigenvectors of Shampoo's factors, M = Q diag(1/(√v̂ + ε)) Qᵀ with Q = Q_L ⊗ Q_R.

    G′ = Q_LᵀG Q_R, v ← β₂v + (1 − β₂) G′², v̂ = v/(1 − β₂ᵗ); L ← βL + (1 − β) GGᵀ, R as well. Every ``update_every``
    steps Q is turned by one power iteration, Q ← qr(L Q), columns sorted by their Rayleigh quotients, v along with
    them, for the next step. The first gradient begins L, R and Q (and moves nothing in the published program). A
    vector has Q = I.

    The method has no momentum: a momentum of the training averages M G. At the unit level, where M mixes units, the
    block of M of a unit's own parameters counts.
    """

    name = "soap"
    summary = "SOAP: Adam in the eigenvectors of Shampoo's factors"
    source = "Vyas et al., ICLR 2025, Algorithm 3"
    rate = 0.003

    beta: float = option(0.95, "β of the factors.", least=0, below=1)
    beta_2: float = option(0.95, "β₂.", least=0, below=1)
    epsilon: float = option(1e-8, "ε.", above=0)
    update_every: int = option(10, "Steps after which Q is turned.", least=1)

    def begun(self, g: torch.Tensor) -> by_parameter.State:
        """Q of the first gradient."""
        both = by_parameter.sides(g) if g.ndim == 2 else []
        kept = {f"sum_{k}": torch.zeros_like(S) for k, S in enumerate(both)}
        bases = {f"Q_{k}": torch.linalg.eigh(S).eigenvectors.flip(1) for k, S in enumerate(both)}
        return {"v": torch.zeros_like(g)} | kept | bases

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        """Turn Q where it is due, then v in its eigenvectors; the sums count for the next step."""
        step = by_parameter.counted(state)
        if step > 1 and (step - 1) % self.update_every == 0 and g.ndim == 2:
            self._turn(state)
        turned = state["Q_0"].T @ g @ state["Q_1"] if g.ndim == 2 else g
        state["v"] = torch.lerp(state["v"], turned.square(), 1 - self.beta_2)
        if g.ndim == 2:
            for k, S in enumerate(by_parameter.sides(g)):
                state[f"sum_{k}"] = torch.lerp(state[f"sum_{k}"], S, 1 - self.beta)
        return g

    @staticmethod
    def _turn(state: by_parameter.State) -> None:
        for k in range(2):
            Q = state[f"Q_{k}"]
            product = state[f"sum_{k}"] @ Q
            order = (Q * product).sum(0).argsort(descending=True)
            state["v"] = state["v"].index_select(k, order)
            state[f"Q_{k}"] = torch.linalg.qr(product[:, order]).Q

    def read(self, state: by_parameter.State) -> ParameterMap | None:
        root = (state["v"] / (1 - self.beta_2 ** int(state["step"]))).sqrt() + self.epsilon
        return ParameterMap(root.rsqrt(), (state["Q_0"], state["Q_1"]) if "Q_0" in state else ())


@register
class PSGD(by_parameter.Learned):
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

    def begun(self, g: torch.Tensor) -> by_parameter.State:
        Q = [torch.ones_like(g)]
        if g.ndim == 2:
            Q = [torch.eye(size, dtype=g.dtype, device=g.device) for size in g.shape]
        kept = {f"Q_{k}": factor for k, factor in enumerate(Q)}
        return {"m": torch.zeros_like(g), "shortened": torch.ones((), dtype=g.dtype, device="cpu")} | kept

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        step = by_parameter.counted(state)
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
                both = torch.cat([a, b], 1)
                # the 2-norm of its product with its transpose, from the smaller Gram matrix
                gram = both @ both.T if len(both) <= both.shape[1] else both.T @ both
                size = torch.linalg.eigvalsh(gram)[-1].clamp_min(1e-300)
                state[key] = Q - self.fitting_rate * torch.triu(a @ a.T - b @ b.T) @ Q / size
        state["shortened"] = torch.ones_like(state["shortened"])
        direction = self.read(state).applied(u)
        state["shortened"] = (1.1 / (direction.square().mean().sqrt() + 1e-6)).clamp(max=1.0)
        return u

    def read(self, state: by_parameter.State) -> ParameterMap:
        Q = [state[key] for key in ("Q_0", "Q_1") if key in state]
        factors = [factor.T if factor.ndim == 2 else factor for factor in Q]
        return ParameterMap.kronecker([len(factor) for factor in Q], factors, scale=float(state["shortened"]))


@register
class Muon(by_parameter.Learned):
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

    def begun(self, g: torch.Tensor) -> by_parameter.State:
        return {"B": torch.zeros_like(g), "v": torch.zeros_like(g)}

    def learn(self, state: by_parameter.State, g: torch.Tensor) -> torch.Tensor:
        step = by_parameter.counted(state)
        state["B"] = torch.lerp(state["B"], g, 1 - self.momentum)
        if g.ndim == 1:
            state["v"] = torch.lerp(state["v"], g.square(), 0.05)
            return state["B"] / (1 - self.momentum**step)
        state["U"] = torch.lerp(g, state["B"], self.momentum) if self.nesterov else state["B"].clone()
        return state["U"]

    def read(self, state: by_parameter.State) -> ParameterMap | None:
        if "U" not in state:
            return ParameterMap(((state["v"] / (1 - 0.95 ** int(state["step"]))).sqrt() + 1e-8).rsqrt())
        scale = 0.2 * math.sqrt(max(state["U"].shape))
        return reading.newton_schulz(state["U"], [(3.4445, -4.7750, 2.0315)] * self.steps, 1e-7, scale=scale)

"""Shampoo and SOAP: Kronecker factors of the gradients' second moments, and Adam in their eigenvectors.

Sources: Gupta, Koren and Singer, *Shampoo: Preconditioned Stochastic Tensor Optimization*, ICML 2018; Morwani et al.,
*A New Perspective on Shampoo's Preconditioner*, ICLR 2025; Vyas et al., *SOAP: Improving and Stabilizing Shampoo using
Adam*, ICLR 2025.
"""

from __future__ import annotations

from typing import Literal

import torch

from hesscond.hessians import ParameterMap
from hesscond.methods.by_parameter import Learned, State, counted, sides
from hesscond.methods.options import option
from hesscond.methods.registry import register


@register
class Shampoo(Learned):
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

    def begun(self, g: torch.Tensor) -> State:
        kept = {f"sum_{k}": torch.zeros_like(S) for k, S in enumerate(sides(g))}
        return {"step": torch.zeros((), device="cpu"), "mass": torch.zeros((), dtype=g.dtype, device="cpu")} | kept

    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        new = 1.0 if self.beta == 1 else 1 - self.beta
        state["mass"] = self.beta * state["mass"] + new
        for k, S in enumerate(sides(g)):
            state[f"sum_{k}"] = self.beta * state[f"sum_{k}"] + new * S
        step = counted(state)
        # a root of few gradients does not fit the next one
        if step <= self.update_every or step % self.update_every == 0:
            for k in range(g.ndim):
                state[f"root_{k}"] = self._root(state, k, g.ndim)
        return g

    def _root(self, state: State, k: int, ndim: int) -> torch.Tensor:
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

    def read(self, state: State) -> ParameterMap | None:
        roots = [state[key] for key in ("root_0", "root_1") if key in state]
        return ParameterMap.kronecker([len(root) for root in roots], roots) if roots else None


@register
class SOAP(Learned):
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

    def begun(self, g: torch.Tensor) -> State:
        """Q of the first gradient."""
        both = sides(g) if g.ndim == 2 else []
        kept = {f"sum_{k}": torch.zeros_like(S) for k, S in enumerate(both)}
        bases = {f"Q_{k}": torch.linalg.eigh(S).eigenvectors.flip(1) for k, S in enumerate(both)}
        return {"step": torch.zeros((), device="cpu"), "v": torch.zeros_like(g)} | kept | bases

    def learn(self, state: State, g: torch.Tensor) -> torch.Tensor:
        """Turn Q where it is due, then v in its eigenvectors; the sums count for the next step."""
        step = counted(state)
        if step > 1 and (step - 1) % self.update_every == 0 and g.ndim == 2:
            self._turn(state)
        turned = state["Q_0"].T @ g @ state["Q_1"] if g.ndim == 2 else g
        state["v"] = torch.lerp(state["v"], turned.square(), 1 - self.beta_2)
        if g.ndim == 2:
            for k, S in enumerate(sides(g)):
                state[f"sum_{k}"] = torch.lerp(state[f"sum_{k}"], S, 1 - self.beta)
        return g

    @staticmethod
    def _turn(state: State) -> None:
        for k in range(2):
            Q = state[f"Q_{k}"]
            moved = state[f"sum_{k}"] @ Q
            order = (Q * moved).sum(0).argsort(descending=True)
            state["v"] = state["v"].index_select(k, order)
            state[f"Q_{k}"] = torch.linalg.qr(moved[:, order]).Q

    def read(self, state: State) -> ParameterMap | None:
        root = (state["v"] / (1 - self.beta_2 ** int(state["step"]))).sqrt() + self.epsilon
        return ParameterMap(root.rsqrt(), (state["Q_0"], state["Q_1"]) if "Q_0" in state else ())

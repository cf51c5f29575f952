"""K-FAC and E-KFAC: a layer's Fisher matrix as a Kronecker product, of inputs and of the gradients of outputs."""

from __future__ import annotations

import math

import torch

from hesscond.capture import Layer
from hesscond.hessians import ParameterMap, Preconditioner
from hesscond.hessians.coordinates.parameter_maps import Mapped
from hesscond.methods import base, inputs
from hesscond.methods.optimizers import reading


class FisherState(inputs.WholeState):
    """Running second moments of a layer, and their factors, float64.

    A (n̂, n̂) is E Σ_t ĥĥᵀ over samples, t the positions, and G (m, m) the mean of δδᵀ over samples and positions, δ a
    gradient in the outputs; ``mass`` is the sum of the weights. ``right`` and ``left`` are roots of M's factors (K-FAC)
    or eigenvectors of A and G (E-KFAC); in these, s (m, n̂) are averaged squares of gradients, and v is 1/√(s + γ).
    """

    wanted: int = 1

    def __init__(self, module: Layer) -> None:
        super().__init__(module)
        like = torch.zeros((), dtype=torch.float64, device=self.module.weight.device)
        m, n = self.geometry.units, self.geometry.n_params
        self.A, self.G, self.mass = like.new_zeros(n, n), like.new_zeros(m, m), like.new_zeros(())
        self.right, self.left = like.new_zeros(n, n), like.new_zeros(m, m)
        self.v, self.s = like.new_ones(m, n), like.new_zeros(m, n)

    def samples(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Extended inputs Ĥ (N, T, n̂) and gradients δ (N, T, m) of each sample's loss for each call, float64."""
        # the loss is the mean over the samples
        total = sum(len(gradients[0]) for gradients in self.gradients)
        return [
            (self.extended(call, len(first)), total * self.by_position(first))
            for call, (first, *_) in zip(self.inputs, self.gradients, strict=True)
        ]

    def take(self, rho: float) -> bool:
        """Move the averages towards the samples seen; not where their products overflow, and False then."""
        calls = self.samples()
        H, delta = (torch.cat([call[k].flatten(0, 1) for call in calls]) for k in (0, 1))
        A, G = H.T @ H / sum(len(call[0]) for call in calls), delta.T @ delta / len(delta)
        if not bool(torch.isfinite(A).all() and torch.isfinite(G).all()):
            return False
        self.A, self.G = torch.lerp(self.A, A, 1 - rho), torch.lerp(self.G, G, 1 - rho)
        self.mass = rho * self.mass + (1 - rho)
        return True

    def eigenbasis_squares(self, rho: float) -> None:
        """Move s towards the squares of the samples' gradients in the eigenvectors."""
        calls = self.samples()
        gradients = torch.cat([(delta @ self.left).mT @ (H @ self.right) for H, delta in calls])
        squares = gradients.square().mean(0)
        self.s = torch.lerp(self.s, squares, 1 - rho)

    @property
    def map(self) -> ParameterMap:
        """P of [b, W] (m, n̂)."""
        return ParameterMap(self.v, (self.left, self.right))

    def moved(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.map.applied(gradient)


@base.register
class KFAC(inputs.LayerMethod[FisherState]):
    """K-FAC: M = (G + √γ/π I)⁻¹ ⊗ (A + π√γ I)⁻¹ for [b, W] of every layer, π = √((tr A/n̂)/(tr G/m)).

    A is the running second moment of a layer's extended inputs, G that of the gradients of the samples' losses in its
    outputs, for the targets of the data: the *empirical* Fisher matrix, which every loss has; the paper draws targets
    from the model (`GaussNewton` has the matrix that is then the mean, exactly). Over several positions, as in
    convolutions, A is summed and G averaged; the loss is assumed to be the mean over samples. At the unit level, where
    M mixes units, the block of M of a unit's own parameters counts. In the coordinates of the data,
    ``probe(method="kfac")``, M is that of a first step on them. Parameters outside of dense and ungrouped convolutional
    layers step along their gradients.

    Source: Martens, Grosse, ICML 2015, sections 4.2, 5 and 6.3; Grosse, Martens, ICML 2016, for convolutions.
    """

    name = "kfac"
    summary = "K-FAC: the inverse of a layer's empirical Fisher matrix as a Kronecker product"
    source = "Martens, Grosse, ICML 2015, sections 4.2, 6.3"
    rate = 0.01
    of_first_step = True
    state_class = FisherState
    kept = ("A", "G", "mass", "right", "left", "v", "s")

    rho: float = base.option(0.95, "Decay of the averages.", least=0, below=1)
    damping: float = base.option(1e-2, "γ.", above=0)
    update_every: int = base.option(10, "Steps after which factors are decomposed again.", least=1)

    def update(self, states: list[FisherState]) -> None:
        for state in states:
            assert state.module.weight.grad is not None
            if not bool(torch.isfinite(state.module.weight.grad).all()):
                continue  # a run that diverges says so by its loss
            if not state.take(self.rho):
                continue
            if self.steps % self.update_every == 0:
                self.decompose(state)
            self.finish(state)

    def decompose(self, state: FisherState) -> None:
        """Compute (A + π√γ I)^−½ and (G + √γ/π I)^−½."""
        A, G = state.A / state.mass, state.G / state.mass
        traces = [float(S.trace()) / len(S) for S in (A, G)]
        pi = math.sqrt(traces[0] / traces[1]) if min(traces) > 0 else 1.0
        for S, ridge, name in ((A, pi, "right"), (G, 1 / pi, "left")):
            eye = torch.eye(len(S), dtype=S.dtype, device=S.device)
            setattr(state, name, reading.power(S + ridge * math.sqrt(self.damping) * eye, -0.5).contiguous())

    def finish(self, state: FisherState) -> None:
        """Compute what changes at every step; here nothing does."""

    def of_state(self, state: FisherState) -> Preconditioner:
        places = ((state.map, torch.arange(state.v.numel(), device=state.v.device)),)
        return Mapped(places, (state.geometry.units, state.geometry.n_params), f"{self.name}, M^1/2")


@base.register
class EKFAC(KFAC):
    """E-KFAC: M = Q diag(1/(s + γ)) Qᵀ for [b, W] of every layer, Q the eigenvectors of K-FAC's G ⊗ A.

    s is the running mean of the squares of the single samples' gradients in these eigenvectors, updated at every step:
    the best diagonal in this basis. When Q is computed again, s restarts with that step's squares. The rest is as in
    `KFAC`.
    """

    name = "ekfac"
    summary = "E-KFAC: the best diagonal in the eigenvectors of K-FAC's empirical Fisher matrix"
    source = "George et al., NeurIPS 2018, Algorithm 1"
    rate = 0.01

    def decompose(self, state: FisherState) -> None:
        # the layout in memory decides the last digit, and a state that is loaded has this one
        state.right, state.left = (torch.linalg.eigh(S).eigenvectors.contiguous() for S in (state.A, state.G))
        state.eigenbasis_squares(0.0)

    def finish(self, state: FisherState) -> None:
        """Update s, and with it M."""
        if self.steps % self.update_every:
            state.eigenbasis_squares(self.rho)
        state.v = (state.s + self.damping).rsqrt()

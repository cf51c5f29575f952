"""Batch normalization preconditioning (BNP) of dense layers.

Source: Lange, Helfrich and Ye, *Batch Normalization Preconditioning for Neural Network Training*, JMLR 23
(2022), Algorithm 2 and eqs. (13)-(15).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hesscond.capture import FeatureStatistics, dense_layers
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import CentringScaling
from hesscond.methods.base import Method, register

EPSILON_1 = 1e-2
EPSILON_2 = 1e-4
RHO = 0.99


def regularized(variance: torch.Tensor, epsilon_1: float = EPSILON_1, epsilon_2: float = EPSILON_2) -> torch.Tensor:
    """σ̃² = σ² + ε₁ max σ² + ε₂ (Algorithm 2, step 3)."""
    return variance + (epsilon_1 * variance.max() + epsilon_2)


def from_statistics(statistics: FeatureStatistics, *, bias: bool = True) -> CentringScaling:
    """P = U D from raw statistics, no ε: dead features (σ = 0) are left out."""
    return CentringScaling(statistics.mu, statistics.sigma, bias, name="BNP, raw statistics of the data")


@dataclass
class LayerState:
    """Running statistics of a layer, and the inputs seen since the last step."""

    module: nn.Linear
    mu: torch.Tensor
    variance: torch.Tensor
    q_squared: float = 1.0
    inputs: list[torch.Tensor] = field(default_factory=list)


@register
class BNP(Method):
    """Batch normalization preconditioning: G ← P Pᵀ G for every dense layer, P = (1/q) U D from running statistics.

    Works beside any optimizer: call `transform_gradients` between ``loss.backward()`` and ``optimizer.step()``,
    or `attach` it to the optimizer once. The network itself is not changed. Only inputs that a backward pass
    came back from count, so evaluating or probing the model does not touch the statistics; over several backward
    passes before one step (gradient accumulation) their samples count together.

    Parameters
    ----------
    model
        Holds at least one `torch.nn.Linear`; all of them are preconditioned. Further leading dimensions of an
        input count as samples.
    epsilon_1, epsilon_2, rho
        ε₁, ε₂ of σ̃² = σ² + ε₁ max σ² + ε₂ and the decay ρ of the running statistics.

    Raises
    ------
    ConfigError
        The model has no dense layer.

    Notes
    -----
    One step on a layer with G_w (m, n), G_b (m,) and inputs H (N, n)::

        1  μ_B, σ_B² of H over the N samples (N = 1: σ_B² = (h − μ)² with the running mean μ)
        2  μ ← ρ μ + (1 − ρ) μ_B,   σ² ← ρ σ² + (1 − ρ) σ_B²        (from μ = 0, σ² = 1)
        3  σ̃² = σ² + ε₁ max σ² + ε₂,   q² = max(n/N, 1)
        4  G_w ← (G_w − G_b μᵀ) / (q² σ̃²)
        5  G_b ← G_b / q² − G_w μ                                    (with the new G_w)

    Without bias there is nothing to centre with, and step 4 is G_w ← G_w / (q² σ̃²).

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> BNP(model).attach(optimizer)
    """

    name = "bnp"
    needs_statistics = True
    summary = "batch normalization preconditioning of every dense layer (running statistics)"
    source = "Lange, Helfrich, Ye, JMLR 2022, Algorithm 2"

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon_1: float = EPSILON_1,
        epsilon_2: float = EPSILON_2,
        rho: float = RHO,
    ) -> None:
        super().__init__(model)
        self.epsilon_1, self.epsilon_2, self.rho = epsilon_1, epsilon_2, rho
        modules = dense_layers(model)
        if not modules:
            raise ConfigError("method 'bnp' needs a model with at least one torch.nn.Linear layer")
        self.layers: dict[str, LayerState] = {}
        self._handles = []
        for name, module in modules.items():
            width, like = module.in_features, module.weight.detach()
            state = LayerState(module, like.new_zeros(width), like.new_ones(width))
            self.layers[name] = state
            self._handles.append(module.register_forward_hook(self._watch(state)))

    @staticmethod
    def _watch(state: LayerState) -> Any:
        def hook(module: nn.Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            # a probe calls the module with other tensors in place of its parameters: not this training
            if output.requires_grad and module.weight.is_leaf and module.weight.requires_grad:
                h = args[0].detach()
                output.register_hook(lambda gradient: state.inputs.append(h))

        return hook

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Update the running statistics and replace every dense layer's gradient (Algorithm 2).

        Raises
        ------
        CaptureError
            A layer has a gradient but its input was not seen (its forward hooks did not run).
        """
        for name, state in self.layers.items():
            if state.module.weight.grad is None:
                continue
            if not state.inputs:
                raise CaptureError(f"bnp: layer {name!r} has a gradient, but no forward pass of it was seen")
            self._update_statistics(state)
            self._transform(state)

    def _update_statistics(self, state: LayerState) -> None:
        inputs = [h.reshape(-1, h.shape[-1]) for h in state.inputs]
        H = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        state.inputs.clear()
        samples, width = H.shape
        if samples == 1:
            mean, variance = H[0], (H[0] - state.mu).square_()
        else:
            mean = H.mean(0)
            variance = (H - mean).square_().mean(0)
        state.mu.lerp_(mean.to(state.mu.dtype), 1 - self.rho)
        state.variance.lerp_(variance.to(state.variance.dtype), 1 - self.rho)
        state.q_squared = max(width / samples, 1.0)

    def _transform(self, state: LayerState) -> None:
        scale = regularized(state.variance, self.epsilon_1, self.epsilon_2) * state.q_squared
        G_w = state.module.weight.grad
        G_b = None if state.module.bias is None else state.module.bias.grad
        assert G_w is not None
        if G_b is None:
            G_w.div_(scale)
            return
        G_w.addr_(G_b, state.mu, alpha=-1).div_(scale)
        G_b.div_(state.q_squared).addmv_(G_w, state.mu, alpha=-1)

    def preconditioner(self, layer: str) -> CentringScaling:
        """P = (1/q) U D with the running μ and σ̃, as the last step used them.

        Raises
        ------
        ConfigError
            No such dense layer.
        """
        return self._coordinates(layer, with_epsilons=True)

    def diagnostics(self, layer: str) -> dict[str, float]:
        """κ(D) of the running statistics: raw σ, and with ε₁, ε₂ as the step used it."""
        return {
            "kappa_D_running": self._coordinates(layer, with_epsilons=False).kappa_D,
            "kappa_D_running_eps": self._coordinates(layer, with_epsilons=True).kappa_D,
        }

    def _coordinates(self, layer: str, *, with_epsilons: bool) -> CentringScaling:
        if layer not in self.layers:
            raise ConfigError(f"no dense layer {layer!r} in the model: it has {', '.join(self.layers)}")
        state = self.layers[layer]
        variance = state.variance.to(torch.float64)
        name = "BNP, raw running statistics"
        if with_epsilons:
            variance = regularized(variance, self.epsilon_1, self.epsilon_2)
            name = "BNP, running statistics"
        return CentringScaling(
            state.mu.to(torch.float64),
            variance.sqrt(),
            state.module.bias is not None,
            state.q_squared**0.5,
            name,
        )

    @classmethod
    def data_preconditioner(cls, statistics: FeatureStatistics, *, bias: bool) -> CentringScaling:
        """P = U D from the raw statistics (no ε, q = 1)."""
        return from_statistics(statistics, bias=bias)

    def detach(self) -> None:
        """Take the forward hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Running statistics of every layer."""
        return {
            name: {"mu": s.mu.clone(), "variance": s.variance.clone(), "q_squared": s.q_squared}
            for name, s in self.layers.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over running statistics."""
        if set(state) != set(self.layers):
            raise ConfigError(f"bnp: the state has layers {', '.join(state)}, the model {', '.join(self.layers)}")
        for name, own in self.layers.items():
            own.mu.copy_(state[name]["mu"])
            own.variance.copy_(state[name]["variance"])
            own.q_squared = state[name]["q_squared"]

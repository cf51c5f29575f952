"""Batch normalization preconditioning (BNP) of dense and convolutional layers: eqs. (13)-(15), (23) of its paper."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, Literal

import torch

from hesscond import capture
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import CentringScaling, Coordinates
from hesscond.hessians.coordinates import linear
from hesscond.methods import base
from hesscond.methods.inputs import InputMethod, LayerState, refuse_transposed
from hesscond.problem.snapshot import in_modes

EPSILON_1 = 1e-2
EPSILON_2 = 1e-4
#: Training inputs in one forward pass over all of them.
CHUNK = 2000

#: Name of the coordinates that the data alone define.
RAW = "BNP, raw statistics of the data"
NAMES = {"running": "running statistics", "batch": "statistics of the batch", "data": "statistics of the training data"}


def regularized(variance: torch.Tensor, epsilon_1: float = EPSILON_1, epsilon_2: float = EPSILON_2) -> torch.Tensor:
    """σ̃² = σ² + ε₁ max σ² + ε₂ (Algorithm 2, step 3); the maximum is taken over each row."""
    return variance + (variance.amax(-1, keepdim=True) * epsilon_1 + epsilon_2)


class BNPState(LayerState):
    """Running statistics mu and variance (G w,) of a layer's G groups, and the inputs seen since the last step."""

    def __init__(self, module: capture.Layer) -> None:
        super().__init__(module)
        layer, groups = self.module, self.geometry.groups
        #: How many entries of a kernel share their statistics: all those of a channel.
        self.dense, self.repeat = not self.geometry.dims, self.geometry.per_channel
        channels = self.geometry.fan_in // self.repeat
        self.mu = layer.weight.detach().new_zeros(groups * channels)
        self.variance = torch.ones_like(self.mu)
        #: Shapes of the weights (group, unit, channel, kernel entry) and of the statistics that broadcast to them.
        self.grouped, self.beside = (groups, -1, channels, self.repeat), (groups, 1, channels, 1)

    def taken(self) -> tuple[torch.Tensor, float]:
        """Copy (2, G w) of the statistics, and q."""
        return torch.stack([self.mu, self.variance]), self.q_squared**0.5

    def batch_statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """μ_B and σ_B² of the inputs seen; of a single row σ_B² = (h − μ)² with the running mean μ."""
        h = self.rows() if self.dense else self.channels()
        if h.numel() == len(self.mu):
            h = h.view(-1)
            return h, (h - self.mu).square_()
        if h.ndim == 2:
            # mean and biased variance in two passes, as batch normalization takes them, without a temporary
            return torch.batch_norm_update_stats(h, None, None, 0.0)
        # averages of averages over equally many positions: faster than over both dimensions at once
        mean = h.mean(2).mean(0)
        return mean, (h - mean[:, None]).square_().mean(2).mean(0)

    def channels(self) -> torch.Tensor:
        """Inputs of a convolution by sample, channel and position, (N, C, p); of several calls, rows (N, C)."""
        dims, channels = self.geometry.dims, self.geometry.channels
        if len(self.inputs) == 1:
            h = self.inputs[0][0]
            return h.reshape(-1, channels, prod(h.shape[-dims:]))
        return torch.cat([h.movedim(-1 - dims, -1).reshape(-1, channels) for h, _ in self.inputs])

    def invert(self, epsilon_1: float, epsilon_2: float) -> None:
        """1/(q² σ̃²), and 0 where σ̃ = 0: P leaves these features out."""
        tilde = regularized(self.variance.view(self.geometry.groups, -1), epsilon_1, epsilon_2).view(-1)
        self.inverse = torch.full_like(tilde, 1 / self.q_squared).div_(tilde)
        if not epsilon_2:
            self.inverse.nan_to_num_(posinf=0.0)

    def precondition(self) -> None:
        """Apply steps 4 and 5 of the algorithm in place."""
        G_w, bias = self.module.weight.grad, self.module.bias
        assert G_w is not None
        G_b = None if bias is None else bias.grad
        if self.dense:
            if G_b is None:
                G_w.mul_(self.inverse)
                return
            G_w.addr_(G_b, self.mu, alpha=-1).mul_(self.inverse)
            G_b.addmv_(G_w, self.mu, beta=1 / self.q_squared, alpha=-1)
            return
        kernels, inverse = G_w.view(self.grouped), self.inverse.view(self.beside)
        if G_b is None:
            kernels.mul_(inverse)
            return
        groups, units = kernels.shape[:2]
        kernels.addcmul_(G_b.view(groups, units, 1, 1), self.mu.view(self.beside), value=-1).mul_(inverse)
        # the entries of a kernel, which share μ, are summed up first
        mu = self.mu.view(groups, -1, 1)
        G_b.view(groups, units, 1).baddbmm_(kernels.sum(3), mu, beta=1 / self.q_squared, alpha=-1)


def from_statistics(statistics: capture.FeatureStatistics, *, bias: bool = True) -> CentringScaling:
    """P = U D from raw statistics, no ε: dead features (σ = 0) are left out."""
    return CentringScaling(statistics.mu, statistics.sigma, bias, name=RAW)


@base.register
class BNP(InputMethod[BNPState]):
    """Batch normalization preconditioning: G ← P Pᵀ G for every layer, P = (1/q) U D from statistics of its inputs.

    Works with any optimizer: call `transform_gradients` between ``loss.backward()`` and ``optimizer.step()``,
    or `attach` it to the optimizer once. The network itself is not changed. The statistics are those of
    forward passes that a backward pass followed: evaluating or probing the model does not change them, and the samples
    of several backward passes before one step (gradient accumulation) are taken together. Further leading dimensions of
    a dense layer's input are samples, too.

    Notes
    -----
    One step on a dense layer with G_w (m, n), G_b (m,) and inputs H (N, n), Algorithm 2::

        1  μ_B, σ_B² of H over the N samples (N = 1: σ_B² = (h − μ)² with the running mean μ)
        2  μ ← ρ μ + (1 − ρ) μ_B,   σ² ← ρ σ² + (1 − ρ) σ_B²        (from μ = 0, σ² = 1)
        3  σ̃² = σ² + ε₁ max σ² + ε₂,   q² = max(n/N, 1)
        4  G_w ← (G_w − G_b μᵀ) / (q² σ̃²)
        5  G_b ← G_b / q² − G_w μ                                    (with the new G_w)

    Without bias there is nothing to centre with, and step 4 is G_w ← G_w / (q² σ̃²). On a convolution (Algorithm 3) μ
    and σ² are those of the c input channels, over all samples and positions, and stand for all k entries of a
    channel's kernel; with r × s output positions q² = max(c k/N, √(rs)). Each group of a grouped convolution is
    treated as a separate convolution. The measured Hessian is the one in z, ŵ = P z.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> BNP(model).attach(optimizer)
    """

    name = "bnp"
    summary = "batch normalization preconditioning of every dense and convolutional layer"
    source = "Lange, Helfrich, Ye, JMLR 2022, Algorithms 2 and 3"
    state_class = BNPState
    kept = ("mu", "variance")

    epsilon_1: float = base.option(EPSILON_1, "ε₁ of σ̃² = σ² + ε₁ max σ² + ε₂.", least=0)
    epsilon_2: float = base.option(EPSILON_2, "ε₂.", least=0)
    rho: float = base.option(0.99, "Decay ρ of the running statistics.", least=0, below=1)
    statistics: Literal["running", "batch", "data"] = base.option(
        "running",
        '``"running"``: as in the paper; ``"batch"``: those of the mini-batch alone (ρ = 0); ``"data"``: those of all '
        "training inputs that `fit` was given, by a forward pass in evaluation mode, and again after every ``refresh`` "
        "steps.",
    )
    refresh: int = base.option(
        1000, 'Steps between two forward passes over the training inputs for ``statistics="data"``.', least=1
    )

    _inputs: torch.Tensor | None = None

    def fit(self, inputs: torch.Tensor) -> None:
        """Keep the training inputs, for ``statistics="data"``."""
        if self.statistics == "data":
            self._inputs = inputs
            self._survey()

    @property
    def reads_all_inputs(self) -> bool:
        return self.statistics == "data"

    @property
    def known(self) -> bool:
        """Whether the statistics come from any inputs: from steps, or from the inputs that `fit` was given."""
        return super().known or self._inputs is not None

    def check_batch(self, samples: int) -> None:
        """Refuse batches of one sample where statistics come from the batch alone."""
        if self.statistics == "batch" and samples < 2:
            raise ConfigError("bnp:statistics=batch has no variance of a batch of 1 sample: use 2 samples or more")

    @torch.no_grad()
    def _survey(self) -> None:
        """Set μ and σ² to those of all training inputs, as the model is now, in evaluation mode."""
        if self._inputs is None:
            raise ConfigError("bnp:statistics=data needs the training inputs: call fit(inputs) before the first step")
        calls: dict[str, list[tuple[torch.Tensor, torch.Size]]] = {name: [] for name in self.states}
        totals: dict[str, capture.FeatureStatistics] = {}

        def keep(name: str) -> Any:
            return lambda module, args, output: calls[name].append((args[0], output.shape))

        with ExitStack() as stack:
            for name, state in self.states.items():
                stack.enter_context(state.module.register_forward_hook(keep(name)))
            stack.enter_context(in_modes(self.model, [False for _ in self.model.modules()]))
            for part in self._inputs.split(CHUNK):
                self.model(part)
                for name, state in self.states.items():
                    if calls[name]:
                        partial = capture.channel_statistics(capture.inputs_of(state.module, calls[name]))
                        totals[name] = totals[name].merged(partial) if name in totals else partial
                    calls[name].clear()
        for name, statistics in totals.items():
            state = self.states[name]
            # a channel's are there for each entry of its kernel
            state.mu.copy_(statistics.mu[:: state.repeat])
            state.variance.copy_(statistics.sigma[:: state.repeat].square())

    def update(self, states: list[BNPState]) -> None:
        """Apply steps 1 to 3 of the algorithm."""
        if self.statistics != "data":
            running, new = [], []
            for state in states:
                mean, variance = state.batch_statistics()
                running += [state.mu, state.variance]
                new += [mean, variance] if mean.dtype == state.mu.dtype else [mean.to(state.mu), variance.to(state.mu)]
            torch._foreach_lerp_(running, new, 1.0 if self.statistics == "batch" else 1 - self.rho)
        elif self.steps % self.refresh == 0 and (self.steps or self._inputs is None):
            self._survey()
        for state in states:
            state.invert(self.epsilon_1, self.epsilon_2)

    def of_groups(self, state: BNPState) -> list[CentringScaling]:
        """P = (1/q) U D with the μ and σ̃ that the last step used."""
        return self._at(state, [state.taken()])[0][0]

    def diagnostics(self, layer: str) -> dict[str, float]:
        """κ(D) of the statistics (the largest of the groups): raw σ, and with ε₁, ε₂ as the step used it."""
        state = self.find(layer)
        return {} if state is None else self._at(state, [state.taken()])[0][1]

    def snapshot(self, layer: str) -> tuple[torch.Tensor, float] | None:
        state = self.find(layer)
        # a subclass may have other coordinates
        return state.taken() if state is not None and type(self) is BNP else None

    def from_snapshots(self, layer: str, snapshots: Sequence[Any]) -> list[tuple[Coordinates | None, dict[str, float]]]:
        state = self.find(layer)
        assert state is not None
        return [(self._by_group(state, parts), diagnostics) for parts, diagnostics in self._at(state, snapshots)]

    def _at(
        self, state: BNPState, copies: Sequence[tuple[torch.Tensor, float]]
    ) -> list[tuple[list[CentringScaling], dict[str, float]]]:
        """P of each group of a layer, and its diagnostics, at several times."""
        groups, bias, name = state.geometry.groups, state.geometry.bias, f"BNP, {NAMES[self.statistics]}"
        # (k, G, w)
        mu, raw = torch.stack([moments for moments, _ in copies]).to(torch.float64).unflatten(2, (groups, -1)).unbind(1)
        sigmas = raw.sqrt(), regularized(raw, self.epsilon_1, self.epsilon_2).sqrt()
        kappas = [linear.scaling_conditions(sigma.flatten(0, 1), bias=bias) for sigma in sigmas]
        mu, sigma = (part.repeat_interleave(state.repeat, 2) for part in (mu, sigmas[1]))
        pairs = []
        for k, (_, q) in enumerate(copies):
            parts = [CentringScaling(m, s, bias, q, name) for m, s in zip(mu[k], sigma[k], strict=True)]
            largest = (max(conditions[k * groups : (k + 1) * groups]) for conditions in kappas)
            pairs.append((parts, dict(zip(("kappa_D_running", "kappa_D_running_eps"), largest, strict=True))))
        return pairs

    @classmethod
    def data_statistics(cls, layer: str, inputs: capture.LayerInputs, **options: Any) -> capture.FeatureStatistics:
        """Statistics of the input features; of a convolution by channel."""
        refuse_transposed(cls.name, layer, inputs.layer)
        return capture.channel_statistics(inputs)

    @classmethod
    def of_data(cls, statistics: capture.FeatureStatistics, geometry: capture.Geometry) -> list[CentringScaling]:
        """P = U D from the raw statistics (no ε); a CaptureError if no column is left."""
        if not geometry.bias and not statistics.sigma.any():
            raise CaptureError(
                "a layer without bias has no BNP coordinates where all its inputs are constant over the samples: give "
                "more samples, or name other layers"
            )
        mu, sigma = (part.view(geometry.groups, -1) for part in (statistics.mu, statistics.sigma))
        return [CentringScaling(m, s, geometry.bias, name=RAW) for m, s in zip(mu, sigma, strict=True)]

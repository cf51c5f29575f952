"""Adam and AdamW as torch implements them, with three ways to start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond.errors import ConfigError
from hesscond.methods.adaptive import Adaptive, averaged, check_decay
from hesscond.methods.registry import register


@register
class Adam(Adaptive):
    """`torch.optim.Adam`: m_t = β₁m_{t−1} + (1−β₁)g_t, v_t = β₂v_{t−1} + (1−β₂)g_t², step −α m̂_t/(√v̂_t + ε).

    Source: Kingma, Ba, ICLR 2015, Algorithm 1.

    Parameters
    ----------
    model
        Any.
    beta_1, beta_2, epsilon
        β₁, β₂, ε.
    start
        ``"corrected"``: from m_0 = v_0 = 0 with m̂_t = m_t/(1−β₁ᵗ), v̂_t = v_t/(1−β₂ᵗ). ``"zero"``: the same without the
        corrections, m̂ = m and v̂ = v. ``"first-gradient"``: from m_1 = g_1, v_1 = g_1², which needs none.

    Raises
    ------
    ConfigError
        An option out of its range.

    Notes
    -----
    torch has the first of the three. Its corrections are 1 at step t = ∞, so the second is torch's optimizer with a
    state of zeros and that step. The third takes the same first step as the first; thereafter its state is m_1/(1−β₁),
    v_1/(1−β₂) at t = ∞.
    """

    name = "adam"
    summary = "Adam (torch), measured in M^1/2 of its averaged squared gradients"
    source = "Kingma, Ba, ICLR 2015, Algorithm 1"
    rate = 0.001
    kind: ClassVar[type[Optimizer]] = torch.optim.Adam

    def __init__(
        self,
        model: nn.Module,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        start: Literal["corrected", "zero", "first-gradient"] = "corrected",
    ) -> None:
        super().__init__(model, epsilon=epsilon)
        check_decay(self.name, "beta_1", beta_1)
        check_decay(self.name, "beta_2", beta_2)
        self.beta_1, self.beta_2, self.start = beta_1, beta_2, start

    def arguments(self) -> dict[str, Any]:
        """β and ε."""
        return {"betas": (self.beta_1, self.beta_2), "eps": self.epsilon}

    def follow(self, optimizer: Optimizer) -> None:
        """Read the state of this optimizer from now on, and give it the start.

        Raises
        ------
        ConfigError
            It is of another kind.
        """
        known = optimizer is self._optimizer
        super().follow(optimizer)
        if known:
            return
        if self.start == "zero":
            optimizer.register_step_pre_hook(start_uncorrected)
        elif self.start == "first-gradient":
            optimizer.register_step_post_hook(undo_correction)

    def second_moment(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """v̂."""
        beta = group["betas"][1]
        step = float(state.get("step", math.inf if self.start == "zero" else 0)) + (gradient is not None)
        v = averaged(state.get("exp_avg_sq"), None if gradient is None else gradient.square(), beta)
        return v / (1 - beta**step)


@register
class AdamW(Adam):
    """`torch.optim.AdamW`: p ← (1 − αω) p, then the step of Adam with the gradient of the loss alone.

    It is Adam with L2 regularization in z, ω = 2λ: ``--method adam+l2:space=z,strength=λ`` takes the same steps.

    Source: Loshchilov, Hutter, ICLR 2019, Algorithm 2.

    Parameters
    ----------
    model
        Any.
    beta_1, beta_2, epsilon, start
        See `Adam`.
    weight_decay
        ω.

    Raises
    ------
    ConfigError
        An option out of its range.
    """

    name = "adamw"
    summary = "AdamW (torch): Adam with decoupled weight decay, which is L2 regularization in z"
    source = "Loshchilov, Hutter, ICLR 2019, Algorithm 2"
    kind = torch.optim.AdamW

    def __init__(
        self,
        model: nn.Module,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        start: Literal["corrected", "zero", "first-gradient"] = "corrected",
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(model, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, start=start)
        if not 0 <= weight_decay < math.inf:
            raise ConfigError(f"method 'adamw': weight_decay must be 0 or more, not {weight_decay}")
        self.weight_decay = weight_decay

    def arguments(self) -> dict[str, Any]:
        """β, ε and ω."""
        return super().arguments() | {"weight_decay": self.weight_decay}


def start_uncorrected(optimizer: Optimizer, *_: Any) -> None:
    """Give every parameter that steps for the first time a state of zeros at step ∞, where the corrections are 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter] |= {
                    "step": torch.tensor(math.inf),
                    "exp_avg": zeros,
                    "exp_avg_sq": zeros.clone(),
                }


@torch.no_grad()
def undo_correction(optimizer: Optimizer, *_: Any) -> None:
    """After the first, corrected step of a parameter: m = g and v = g² at step ∞, where the corrections are 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and float(state["step"]) == 1:
                state["exp_avg"] /= 1 - group["betas"][0]
                state["exp_avg_sq"] /= 1 - group["betas"][1]
                state["step"].fill_(math.inf)

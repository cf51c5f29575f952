"""AdaGrad, RMSProp, Adam and AdamW as diagonal preconditioners: torch's own optimizers, with M read from their state.

All of them step by p ← p − α M m with m the gradient or an average of gradients and M = diag(1/(√v̂ + ε)) for a sum or
an average v̂ of squared gradients. This is descent in z, p = M^½ z, so the Hessian that decides is M^½ H M^½. Rows of H
that M equilibrates bound κ(MH), which is not the rate; the diagonal scaling with a guarantee is Jacobi's,
D = diag(H)^−½: κ(DHD) ≤ n · min over all diagonal D (Van der Sluis 1969); studies log it too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond import hessians
from hesscond.errors import ConfigError
from hesscond.methods import base
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.optimizers import reading

JACOBI = hessians.Jacobi()


class Adaptive(ByParameter):
    """An optimizer of torch whose step is −α M m, M = diag(1/(√v̂ + ε)), read from its state.

    P = M^½ is that of the step about to be taken once `transform_gradients` was called (v̂ with the gradient in
    ``.grad``), and that of the last step otherwise; None (plain) before the first. Parameters that take no steps have
    M = 0. Subclasses name the optimizer and its arguments, and may change how it starts.
    """

    preconditions_in_step = True
    #: The optimizer.
    kind: ClassVar[type[Optimizer]]

    #: M would be infinite where no gradient was.
    epsilon: float = base.option(1e-8, "ε.", above=0)

    _optimizer: Optimizer | None = None
    _about_to_step = False

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer other than the learning rate; with ``momentum`` if it may have one."""

    def start_on(self, optimizer: Optimizer) -> None:
        """Register the hooks on an optimizer that make it start as the method's options say."""
        return

    def optimizer(
        self,
        lr: float,
        *,
        kind: base.OptimizerName = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """Optimizer of torch for this method, whatever ``kind`` is; weight decay is torch's or the method's option."""
        arguments = self.arguments()
        if "momentum" in arguments:
            arguments["momentum"], momentum = momentum, 0.0
        base.refuse_momentum(f"method {self.name!r}", momentum, nesterov)
        if weight_decay and "weight_decay" in arguments:
            raise ConfigError(
                f"method {self.name!r} has a weight decay of its own: give --method "
                f"{self.name}:weight_decay={weight_decay:g}, and leave that of the training at 0"
            )
        parameters: Any = self.parameter_groups(weight_decay) if weight_decay else self.model.parameters()
        optimizer = self.kind(parameters, lr=lr, **arguments)  # type: ignore[call-arg]
        self.follow(optimizer)
        return optimizer

    def follow(self, optimizer: Optimizer) -> None:
        """Read the state of this optimizer from now on, and make it start as the options say."""
        if optimizer is self._optimizer:
            return
        if not isinstance(optimizer, self.kind):
            raise ConfigError(
                f"method {self.name!r} reads the state of torch.optim.{self.kind.__name__}, "
                f"not that of {type(optimizer).__name__}"
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ConfigError(f"method {self.name!r} does not know M of AMSGrad: make the optimizer with amsgrad=False")
        self._optimizer = optimizer
        self.start_on(optimizer)

    def transform_gradients(self) -> None:
        """Leave the gradients as they are; from here on M is that of the next step."""
        self._about_to_step = True

    def after_step(self) -> None:
        """Leave the parameters as they are; from here on M is that of the step just taken."""
        self._about_to_step = False

    def map_of(self, parameter: nn.Parameter) -> hessians.ParameterMap | None:
        optimizer = self._optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        group = next((group for group in groups if any(p is parameter for p in group["params"])), None)
        if optimizer is None or group is None:
            return None
        if self._about_to_step and parameter.grad is not None:
            optimizer = self.stepped(parameter, group, optimizer.state.get(parameter, {}))
            (parameter,) = optimizer.param_groups[0]["params"]
        state = optimizer.state.get(parameter, {})
        if not float(state.get("step", 0)) > 0:
            return None
        return reading.reader_of(optimizer).map(reading.ParameterState(optimizer, group, parameter, state))

    def stepped(self, parameter: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> Optimizer:
        """The optimizer after the next step, of a copy of one parameter in float64."""
        copy = nn.Parameter(parameter.detach().to(torch.float64, copy=True))
        copy.grad = None if parameter.grad is None else parameter.grad.detach().to(copy)
        optimizer = self.kind([copy], lr=1.0)  # type: ignore[call-arg]
        optimizer.param_groups[0] |= {key: value for key, value in group.items() if key != "params"}
        for key, value in state.items():
            optimizer.state[copy][key] = value.detach().clone() if key == "step" else value.detach().to(copy, copy=True)
        self.start_on(optimizer)
        optimizer.step()
        return optimizer

    def readings(self, layer: str) -> Mapping[str, hessians.Coordinates | None]:
        """Jacobi's D = diag(H)^−½, for comparison."""
        return {JACOBI.name: JACOBI}


@base.register
class AdaGrad(Adaptive):
    """`torch.optim.Adagrad`: v_t = v_{t−1} + g_t², M = diag(1/(√v_t + ε)), step −α M g_t."""

    name = "adagrad"
    summary = "AdaGrad (torch), measured in M^1/2 of its accumulated squared gradients"
    source = "Duchi, Hazan, Singer, JMLR 2011, Figure 1"
    rate = 0.01
    kind = torch.optim.Adagrad

    epsilon: float = base.option(1e-10)

    def arguments(self) -> dict[str, Any]:
        return {"eps": self.epsilon}


@base.register
class RMSProp(Adaptive):
    """`torch.optim.RMSprop`: v_t = a v_{t−1} + (1−a) g_t², M = diag(1/(√v_t + ε)), step −α M g_t.

    A momentum averages the M g of all steps, each with its own M; the last of them is measured.

    Source: Tieleman, Hinton, *Neural Networks for Machine Learning*, lecture 6.5 (2012), ε outside the root.

    Notes
    -----
    torch has the first of the starts; for the other its state is g_1² before the first step. An average that begins at
    0 and is divided by 1−aᵗ is Adam's: ``adam:beta_1=0,beta_2=a``.
    """

    name = "rmsprop"
    summary = "RMSProp (torch), measured in M^1/2 of its averaged squared gradients"
    source = "Tieleman, Hinton, lecture 6.5, 2012"
    rate = 0.001
    kind = torch.optim.RMSprop

    alpha: float = base.option(0.99, "a.", least=0, below=1)
    start: Literal["zero", "first-gradient"] = base.option(
        "zero",
        '``"zero"``: from v_0 = 0. ``"first-gradient"``: from v_1 = g_1², so that v_t = a^{t−1} g_1² + (1−a) Σ_{i≥2} '
        "a^{t−i} g_i² is an average.",
    )

    def arguments(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "eps": self.epsilon, "momentum": 0.0}

    def start_on(self, optimizer: Optimizer) -> None:
        if self.start == "first-gradient":
            optimizer.register_step_pre_hook(start_from_square)


@base.register
class Adam(Adaptive):
    """`torch.optim.Adam`: m_t = β₁m_{t−1} + (1−β₁)g_t, v_t = β₂v_{t−1} + (1−β₂)g_t², step −α m̂_t/(√v̂_t + ε).

    Notes
    -----
    torch has the first of the starts. The other takes the same first step; thereafter its state is m_1/(1−β₁),
    v_1/(1−β₂) at step t = ∞, where the corrections are 1.
    """

    name = "adam"
    summary = "Adam (torch), measured in M^1/2 of its averaged squared gradients"
    source = "Kingma, Ba, ICLR 2015, Algorithm 1"
    rate = 0.001
    kind: ClassVar[type[Optimizer]] = torch.optim.Adam

    beta_1: float = base.option(0.9, "β₁.", least=0, below=1)
    beta_2: float = base.option(0.999, "β₂.", least=0, below=1)
    start: Literal["corrected", "first-gradient"] = base.option(
        "corrected",
        '``"corrected"``: from m_0 = v_0 = 0 with m̂_t = m_t/(1−β₁ᵗ), v̂_t = v_t/(1−β₂ᵗ). ``"first-gradient"``: from '
        "m_1 = g_1, v_1 = g_1², which needs no corrections.",
    )

    def arguments(self) -> dict[str, Any]:
        return {"betas": (self.beta_1, self.beta_2), "eps": self.epsilon}

    def start_on(self, optimizer: Optimizer) -> None:
        if self.start == "first-gradient":
            optimizer.register_step_post_hook(undo_correction)


@base.register
class AdamW(Adam):
    """`torch.optim.AdamW`: p ← (1 − αω) p, then the step of Adam with the gradient of the loss alone.

    It is Adam with L2 regularization in z, ω = 2λ: ``--method adam+l2:space=z,strength=λ`` takes the same steps.
    """

    name = "adamw"
    summary = "AdamW (torch): Adam with decoupled weight decay, which is L2 regularization in z"
    source = "Loshchilov, Hutter, ICLR 2019, Algorithm 2"
    kind = torch.optim.AdamW

    weight_decay: float = base.option(1e-2, "ω.", least=0)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"weight_decay": self.weight_decay}


@torch.no_grad()
def start_from_square(optimizer: Optimizer, *_: Any) -> None:
    """Give every parameter that steps for the first time v_0 = g_1², of which a v_0 + (1−a) g_1² is v_1 = g_1²."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                squares = (parameter.grad + group["weight_decay"] * parameter).square()
                optimizer.state[parameter] |= {"step": torch.tensor(0.0, device="cpu"), "square_avg": squares}
                if group["momentum"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(squares)


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

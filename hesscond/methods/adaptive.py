"""Adaptive methods as diagonal preconditioners: AdaGrad and RMSProp, torch's own optimizers; `adam` has the others.

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

from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, Jacobi, ParameterMap
from hesscond.methods.base import OptimizerName, refuse_momentum
from hesscond.methods.by_parameter import ByParameter
from hesscond.methods.registry import register

JACOBI = Jacobi()


class Adaptive(ByParameter):
    """An optimizer of torch whose step is −α M m, M = diag(1/(√v̂ + ε)), read from its state.

    P = M^½ is that of the step about to be taken once `transform_gradients` was called (v̂ with the gradient in
    ``.grad``), and that of the last step otherwise; None (plain) before the first. Parameters that take no steps have
    M = 0. Subclasses name the optimizer, its arguments and v̂.

    Parameters
    ----------
    model
        Any model; the optimizer steps all its parameters.
    epsilon
        ε > 0.
    """

    preconditions_in_step = True
    #: The optimizer.
    kind: ClassVar[type[Optimizer]]

    def __init__(self, model: nn.Module, *, epsilon: float) -> None:
        super().__init__(model)
        if not 0 < epsilon < math.inf:
            raise ConfigError(
                f"method {self.name!r}: epsilon must be positive, not {epsilon}: M is infinite where no gradient was"
            )
        self.epsilon = epsilon
        self._optimizer: Optimizer | None = None
        self._about_to_step = False

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer other than the learning rate."""

    @abstractmethod
    def second_moment(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """v̂ of a parameter, float64.

        Parameters
        ----------
        state
            The optimizer's state of the parameter; empty before the first step.
        group
            The optimizer's options for the parameter.
        gradient
            The gradient of the next step, which v̂ then includes; None: v̂ of the last step.
        """

    def optimizer(
        self,
        lr: float,
        *,
        kind: OptimizerName = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """Optimizer of torch for this method, whatever ``kind`` is; weight decay is torch's or the method's option."""
        refuse_momentum(f"method {self.name!r}", momentum, nesterov)
        own = self.arguments()
        if weight_decay and "weight_decay" in own:
            raise ConfigError(
                f"method {self.name!r} has a weight decay of its own: give --method "
                f"{self.name}:weight_decay={weight_decay:g}, and leave that of the training at 0"
            )
        parameters: Any = self.parameter_groups(weight_decay) if weight_decay else self.model.parameters()
        found = self.kind(parameters, lr=lr, **own)  # type: ignore[call-arg]
        self.follow(found)
        return found

    def follow(self, optimizer: Optimizer) -> None:
        """Read the state of this optimizer from now on."""
        if not isinstance(optimizer, self.kind):
            raise ConfigError(
                f"method {self.name!r} reads the state of torch.optim.{self.kind.__name__}, "
                f"not that of {type(optimizer).__name__}"
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ConfigError(f"method {self.name!r} does not know M of AMSGrad: make the optimizer with amsgrad=False")
        self._optimizer = optimizer

    def transform_gradients(self) -> None:
        """Leave the gradients as they are; from here on M is that of the next step."""
        self._about_to_step = True

    def after_step(self) -> None:
        """Leave the parameters as they are; from here on M is that of the step just taken."""
        self._about_to_step = False

    def diagonal(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """M of a parameter in its shape, float64; None: it takes no step, or has not yet."""
        group = self._groups.get(id(parameter))
        if self._optimizer is None or group is None:
            return None
        state = self._optimizer.state.get(parameter, {})
        gradient = None
        if self._about_to_step and parameter.grad is not None:
            gradient = self._gradient(parameter, group, torch.float64)
        elif not float(state.get("step", 0)) > 0:
            return None
        return 1 / (self.second_moment(state, group, gradient).sqrt() + group["eps"])

    @staticmethod
    def _gradient(parameter: nn.Parameter, group: Mapping[str, Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The gradient of the next step, with that of the weight decay."""
        assert parameter.grad is not None
        gradient = parameter.grad.detach().to(dtype)
        return (
            gradient if group.get("decoupled_weight_decay") else gradient + group["weight_decay"] * parameter.detach()
        )

    @property
    def _groups(self) -> dict[int, Mapping[str, Any]]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {id(parameter): group for group in groups for parameter in group["params"]}

    def map_of(self, parameter: nn.Parameter) -> ParameterMap | None:
        """P = M^½ of a parameter; None: it takes no step, or has not yet."""
        M = self.diagonal(parameter)
        return None if M is None else ParameterMap(M.sqrt().detach())

    def readings(self, layer: str) -> Mapping[str, Coordinates | None]:
        """Jacobi's D = diag(H)^−½, for comparison."""
        return {JACOBI.name: JACOBI}


@register
class AdaGrad(Adaptive):
    """`torch.optim.Adagrad`: v_t = v_{t−1} + g_t², M = diag(1/(√v_t + ε)), step −α M g_t.

    Source: Duchi, Hazan, Singer, JMLR 12 (2011), Figure 1 (diagonal).

    Parameters
    ----------
    model
        Any.
    initial_accumulator
        v_0 ≥ 0.
    epsilon
        ε.

    Raises
    ------
    ConfigError
        An option out of its range.
    """

    name = "adagrad"
    summary = "AdaGrad (torch), measured in M^1/2 of its accumulated squared gradients"
    source = "Duchi, Hazan, Singer, JMLR 2011, Figure 1"
    rate = 0.01
    kind = torch.optim.Adagrad

    def __init__(self, model: nn.Module, *, initial_accumulator: float = 0.0, epsilon: float = 1e-10) -> None:
        super().__init__(model, epsilon=epsilon)
        if not 0 <= initial_accumulator < math.inf:
            raise ConfigError(f"method 'adagrad': initial_accumulator must be 0 or more, not {initial_accumulator}")
        self.initial_accumulator = initial_accumulator

    def arguments(self) -> dict[str, Any]:
        """v_0 and ε."""
        return {"initial_accumulator_value": self.initial_accumulator, "eps": self.epsilon}

    def second_moment(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """V."""
        v = state["sum"].to(torch.float64)
        return v if gradient is None else v + gradient.square()


@register
class RMSProp(Adaptive):
    """`torch.optim.RMSprop`: v_t = a v_{t−1} + (1−a) g_t², M = diag(1/(√v_t + ε)), step −α M g_t.

    Centred, v_t − ḡ_t² takes the place of v_t, with ḡ_t = a ḡ_{t−1} + (1−a) g_t. A momentum averages the M g of all
    steps, each with its own M; the last of them is measured.

    Source: Tieleman, Hinton, *Neural Networks for Machine Learning*, lecture 6.5 (2012), ε outside the root.

    Parameters
    ----------
    model
        Any.
    alpha
        a.
    epsilon
        ε.
    centered
        Whether v_t − ḡ_t² is taken.
    start
        ``"zero"``: from v_0 = 0. ``"first-gradient"``: from v_1 = g_1², so that v_t = a^{t−1} g_1² + (1−a) Σ_{i≥2}
        a^{t−i} g_i² is an average. ``"corrected"``: v_0 = 0, and v_t/(1−aᵗ), the average with the weights a^{t−i},
        in place of v_t.

    Raises
    ------
    ConfigError
        An option out of its range; ``centered`` with another start than from zero, of which v_1 − ḡ_1² would be 0.

    Notes
    -----
    torch has the first of the three starts. For the others its state is changed before the step, such that its update
    a v + (1−a) g² makes the v_t wanted of it. The third is Adam's: ``adam:beta_1=0,beta_2=a`` takes the same steps.
    """

    name = "rmsprop"
    summary = "RMSProp (torch), measured in M^1/2 of its averaged squared gradients"
    source = "Tieleman, Hinton, lecture 6.5, 2012"
    rate = 0.001
    kind = torch.optim.RMSprop

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: float = 0.99,
        epsilon: float = 1e-8,
        centered: bool = False,
        start: Literal["zero", "first-gradient", "corrected"] = "zero",
    ) -> None:
        super().__init__(model, epsilon=epsilon)
        check_decay(self.name, "alpha", alpha)
        if centered and start != "zero":
            raise ConfigError(
                f"method 'rmsprop': of start={start} a single gradient has the variance 0: set centered to false, or "
                "start to zero"
            )
        self.alpha, self.centered, self.start, self._momentum = alpha, centered, start, 0.0

    def arguments(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "eps": self.epsilon, "centered": self.centered, "momentum": self._momentum}

    def optimizer(
        self,
        lr: float,
        *,
        kind: OptimizerName = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """Optimizer of torch, which accepts a momentum."""
        self._momentum = momentum
        return super().optimizer(lr, nesterov=nesterov, weight_decay=weight_decay)

    def second_moment(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """v, or v − ḡ²."""
        if self.start != "zero" and gradient is not None:
            share = self.share(float(state.get("step", 0)) + 1, group["alpha"])
            v = state.get("square_avg", gradient.square()).to(torch.float64)
            return torch.lerp(v, gradient.square(), share)
        v = averaged(state.get("square_avg"), None if gradient is None else gradient.square(), group["alpha"])
        if not group["centered"]:
            return v
        return v - averaged(state.get("grad_avg"), gradient, group["alpha"]).square()

    def follow(self, optimizer: Optimizer) -> None:
        """Read the state of this optimizer from now on, and give it the start.

        Raises
        ------
        ConfigError
            It is of another kind.
        """
        known = optimizer is self._optimizer
        super().follow(optimizer)
        if not known and self.start != "zero":
            optimizer.register_step_pre_hook(self._give_start)

    def share(self, t: float, a: float) -> float:
        """Weight of g_t² in v_t, from the first gradient on."""
        return (1 - a) / (1 - a**t) if self.start == "corrected" else 1 - a

    @torch.no_grad()
    def _give_start(self, optimizer: Optimizer, *_: Any) -> None:
        """Change v such that torch's a v + (1−a) g² is the v_t of the start."""
        for group in optimizer.param_groups:
            a = group["alpha"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, squares = optimizer.state[parameter], self._gradient(parameter, group).square()
                if not state:
                    state |= {"step": torch.tensor(0.0), "square_avg": squares}
                    if group["momentum"]:
                        state["momentum_buffer"] = torch.zeros_like(squares)
                elif a:
                    share, v = self.share(float(state["step"]) + 1, a), state["square_avg"]
                    v.mul_((1 - share) / a).add_(squares, alpha=(share - (1 - a)) / a)


def check_decay(method: str, option: str, value: float) -> None:
    """Refuse a factor of an average that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"method {method!r}: {option} must be at least 0 and less than 1, not {value}")


def averaged(before: torch.Tensor | None, new: torch.Tensor | None, factor: float) -> torch.Tensor:
    """factor·before + (1 − factor)·new, float64, from zero if there is nothing before; ``before`` without ``new``."""
    if new is None:
        assert before is not None
        return before.to(torch.float64)
    return (1 - factor) * new if before is None else factor * before.to(torch.float64) + (1 - factor) * new

"""Inputs standardized or scaled to [0, 1], and what that does to the Hessian of the first layer.

With x' = (x − s)/c a first dense layer computes a = w'ᵀx' + b' = wᵀx + b for

    [b; w] = P [b'; w'],   P = [[1, −(s/c)ᵀ], [0, diag(1/c)]],   so  H' = PᵀHP

is the Hessian of the network that is trained, if H is that of the network on raw inputs with the same function. P is
that of BNP with the statistics of the inputs: standardizing does for the first layer what BNP does for all, and once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.methods import base

#: Number of samples in the parts in which inputs are read in float64.
CHUNK = 4096
#: Names of the model's buffers.
SHIFT, SCALE = "input_shift", "input_scale"


class Preprocessing(base.Method):
    """Replacement of the model's first argument x by (x − s)/c, with s and c from all training inputs.

    s and c become buffers of the model (``input_shift``, ``input_scale``), so that its ``state_dict`` has them. What is
    constant over the training inputs is divided by 1. The Hessian is measured in the parameters that are trained, of
    the transformed inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        owners = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        if any(isinstance(owner, Preprocessing) for owner in owners):
            raise ConfigError(f"method {self.name!r}: the inputs of this model are transformed already: do it once")
        self.hooks.append(model.register_forward_pre_hook(self._transform))

    @abstractmethod
    def statistics(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """S and c (1, …) of inputs (N, …), float64."""

    def fit(self, inputs: torch.Tensor) -> None:
        if inputs.ndim < 2 or not len(inputs) or not inputs.dtype.is_floating_point:
            raise ConfigError(f"method {self.name!r} is fitted to inputs (N, …) of a floating-point type, N > 0")
        low, high = inputs.amin(0), inputs.amax(0)
        if not math.isfinite(float(low.min())) or not math.isfinite(float(high.max())):
            raise ConfigError(f"method {self.name!r}: the inputs have NaN or infinite entries")
        like = next(self.model.parameters(), inputs)
        shift, scale = (statistic[0].to(like) for statistic in self.statistics(inputs))
        constant = (low == high) | (scale == 0)
        self.model.register_buffer(SHIFT, shift)
        self.model.register_buffer(SCALE, scale.where(~constant, 1.0))

    def _transform(self, model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        shift, scale = getattr(model, SHIFT, None), getattr(model, SCALE, None)
        if shift is None or scale is None:
            raise ConfigError(f"method {self.name!r} does not know the training inputs yet: call fit first")
        if not args or not isinstance(args[0], torch.Tensor):
            raise ConfigError(f"method {self.name!r} transforms the first positional argument, which is no tensor here")
        return ((args[0] - shift) / scale, *args[1:])


@base.register
class Standardization(Preprocessing):
    """x' = (x − μ)/σ with the mean and the deviation of the training inputs (1/N)."""

    name = "standardize"
    summary = "inputs of mean 0 and deviation 1 over the training set"
    source = "LeCun, Bottou, Orr, Müller, Efficient BackProp, 1998, sec. 4.3"

    def statistics(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """μ and σ, in two passes."""
        parts = inputs.split(CHUNK)
        sums = [part.to(torch.float64).sum(0, keepdim=True) for part in parts]
        mean = torch.cat(sums).sum(0, keepdim=True) / len(inputs)
        squares = [(part.to(torch.float64) - mean).square().sum(0, keepdim=True) for part in parts]
        return mean, (torch.cat(squares).sum(0, keepdim=True) / len(inputs)).sqrt()


@base.register
class MinMax(Preprocessing):
    """x' = (x − min)/(max − min) over the training inputs: in [0, 1] there, and not bounded elsewhere."""

    name = "minmax"
    summary = "inputs scaled to [0, 1] over the training set"
    source = "-"

    def statistics(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = inputs.amin(0, keepdim=True).to(torch.float64)
        return low, inputs.amax(0, keepdim=True).to(torch.float64) - low

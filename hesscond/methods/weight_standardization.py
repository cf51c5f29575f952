"""Weight standardization: every unit's weights with mean 0 and variance 1 in the forward pass.

Source: Qiao, Wang, Liu, Shen and Yuille, *Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization* (2019), eqs. (4)-(6).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hesscond.capture import Layer
from hesscond.errors import ConfigError
from hesscond.methods.options import option
from hesscond.methods.registry import register
from hesscond.methods.reparametrization import Reparametrization, WeightParametrization, refuse_units

EPSILON = 1e-5


class Standardized(WeightParametrization):
    """W ↦ (W − mean)/√(variance + ε), unit by unit."""

    def __init__(self, layer: Layer, epsilon: float) -> None:
        super().__init__(layer)
        self.epsilon = epsilon

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Standardize each unit's weights: a layer normalization over the fan-in."""
        rows = self.rows(weight)
        return self.from_rows(functional.layer_norm(rows, rows.shape[2:], eps=self.epsilon), weight.shape)


@register
class WeightStandardization(Reparametrization):
    """Weight standardization: a layer multiplies with ŵ_i = (w_i − mean(w_i))/√(var(w_i) + ε), and W is trained.

    Mean and variance are over the fan-in of output unit i, the variance without Bessel's correction, and the gradient
    goes through both. The loss does not change if all weights of a unit are shifted, and, but for ε, if they are
    scaled: with ε = 0, H w_i = −∇_i L.

    The paper standardizes convolutions, each followed by a normalization of its outputs: the output layer is left as it
    is unless it is named. Without such a normalization (combine with one) a layer multiplies its inputs by
    about √n for n weights a unit, and needs a small learning rate.
    """

    name = "weightstandardization"
    summary = "weights of every unit standardized in the forward pass: (w - mean)/std"
    source = "Qiao, Wang, Liu, Shen, Yuille, 2019, eqs. (4)-(6)"
    rate = 0.01
    coordinates_name = "through W -> (W - mean)/std"
    with_output = False

    epsilon: float = option(EPSILON, "ε.", least=0)
    layers: tuple[str, ...] | None = option(
        None, "Layers to standardize; ``ends``: the first and the last; None: all but the last."
    )

    def parametrization(self, name: str, layer: Layer) -> Standardized:
        own = Standardized(layer, self.epsilon)
        if own.geometry.fan_in == 1:
            raise ConfigError(
                f"weightstandardization: the units of layer {name!r} have one weight each, of which the mean leaves "
                "nothing: leave it out, naming the others with layers="
            )
        rows = own.rows(layer.weight.detach())
        if self.epsilon == 0:
            equal = (rows == rows[:, :, :1]).all(2)
            refuse_units(self.name, name, equal.flatten(), "weights that are all equal, which epsilon=0 divides by 0")
        return own

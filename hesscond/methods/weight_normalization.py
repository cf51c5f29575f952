"""Weight normalization w_i = g_i d(v_i), centred or not, and weight standardization: weights normalized by unit."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from hesscond.capture import Layer
from hesscond.errors import ConfigError
from hesscond.methods import base
from hesscond.methods.reparametrization import Reparametrization, WeightParametrization, refuse_units


class Normalized(WeightParametrization):
    """(g, v) ↦ g v/‖v‖, unit by unit, or ``centred`` g ṽ/‖ṽ‖ with ṽ = v − mean(v).

    The names and shapes of the parameters are those of torch's ``parametrizations.weight_norm``.
    """

    def __init__(self, layer: Layer, *, centred: bool) -> None:
        super().__init__(layer)
        self.centred = centred

    def forward(self, g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The weight."""
        rows = self.shifted(self.rows(v))
        # g/‖v‖ is 1 in every row at first, which would look like features that rounding made equal
        directions = rows / torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        return self.from_rows(g.reshape(rows.shape[0], -1, 1) * directions, v.shape)

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """G and v of a weight: its norms and itself."""
        norms = torch.linalg.vector_norm(self.shifted(self.rows(weight)), dim=2)
        return norms.reshape(-1, *[1] * (weight.ndim - 1)), weight

    def shifted(self, rows: torch.Tensor) -> torch.Tensor:
        """Part of each row that is normalized: the row, or the row less its mean."""
        return rows - rows.mean(2, keepdim=True) if self.centred else rows


@base.register
class WeightNormalization(Reparametrization):
    r"""Weight normalization: w_i = g_i v_i/‖v_i‖ for every unit, g_i and v_i trained; it starts from the weights given.

    The Hessian is measured in [b_i, g_i, v_i]. The loss does not change along v_i, so that H v_i = −∇L in v_i: it is
    singular at critical points. With u = v/‖v‖, Q = I − uuᵀ and q = ∇_w L, its block in v_i is::

        H_v = (g/‖v‖)² Q ∇²_w L Q − (g/‖v‖²) (u (Qq)ᵀ + (Qq) uᵀ + (uᵀq) Q)

    At a point that is critical in v_i (Qq = 0) it is (g/‖v‖)² times Q ∇²_w L Q − (wᵀq/‖w‖²) Q, the Riemannian Hessian
    on the sphere ‖w_i‖ = |g_i|: so the nonzero spectrum of the block in v_i is that of the tangent space, up to this
    factor. That of all of [g_i, v_i] is not: where q = 0 and |g| = ‖v‖ it is the one of ∇²_w L itself.
    """

    name = "weightnorm"
    summary = "weight normalization w = g v/‖v‖ of every unit, g and v trained"
    source = "Salimans, Kingma, NeurIPS 2016, eq. (2)"
    coordinates_name = "g and v of w = g v/|v|"
    centred: ClassVar[bool] = False
    refusal: ClassVar[str] = "only zero weights, which have no direction"

    def parametrization(self, name: str, layer: Layer) -> Normalized:
        parametrization = Normalized(layer, centred=self.centred)
        rows = parametrization.rows(layer.weight.detach())
        # of equal weights the centred ones may be rounding
        none = parametrization.shifted(rows).abs().amax(2) <= 4 * torch.finfo(rows.dtype).eps * rows.abs().amax(2)
        refuse_units(self.name, name, none.flatten(), self.refusal)
        return parametrization


@base.register
class CentredWeightNormalization(WeightNormalization):
    """Centred weight normalization: w_i = g_i ṽ_i/‖ṽ_i‖ with ṽ_i = v_i − mean(v_i), g_i and v_i trained.

    It starts from the weights given, less each unit's mean. Measured in [b_i, g_i, v_i]; the loss changes neither
    along v_i nor along (1, …, 1), so that the Hessian in v_i has a null space of dimension 2 at a critical point, and
    its nonzero spectrum there is (g/‖ṽ‖)² times the one on the tangent space of {‖w_i‖ = |g_i|, 1ᵀw_i = 0}.
    """

    name = "centred-weightnorm"
    summary = "weights of every unit centred, then normalized: w = g ṽ/‖ṽ‖, g and v trained"
    source = "Huang, Liu, Liu, Lang, Tao, ICCV 2017, sec. 3.2-3.3"
    coordinates_name = "g and v of w = g (v - mean v)/|v - mean v|"
    centred = True
    refusal = "weights that are all equal, of which nothing is left when they are centred"


class Standardized(WeightParametrization):
    """W ↦ (W − mean)/√(variance + ε), unit by unit."""

    def __init__(self, layer: Layer, epsilon: float) -> None:
        super().__init__(layer)
        self.epsilon = epsilon

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Standardize each unit's weights: a layer normalization over the fan-in."""
        rows = self.rows(weight)
        return self.from_rows(functional.layer_norm(rows, rows.shape[2:], eps=self.epsilon), weight.shape)


@base.register
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

    epsilon: float = base.option(1e-5, "ε.", least=0)
    layers: tuple[str, ...] | None = base.option(
        None, "Layers to standardize; ``ends``: the first and the last; None: all but the last."
    )

    def parametrization(self, name: str, layer: Layer) -> Standardized:
        parametrization = Standardized(layer, self.epsilon)
        if parametrization.geometry.fan_in == 1:
            raise ConfigError(
                f"weightstandardization: the units of layer {name!r} have one weight each, of which the mean leaves "
                "nothing: leave it out, naming the others with layers="
            )
        rows = parametrization.rows(layer.weight.detach())
        if self.epsilon == 0:
            equal = (rows == rows[:, :, :1]).all(2)
            refuse_units(self.name, name, equal.flatten(), "weights that are all equal, which epsilon=0 divides by 0")
        return parametrization

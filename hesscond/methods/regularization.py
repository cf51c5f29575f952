"""L2 and gradient regularization, in the parameters p or in the coordinates z, p = P z, of a preconditioning method.

With M = P Pᵀ, held fixed, descent in z on the regularized loss is, in p,

    L2 in p:         λ‖p‖²                  p ← p − αM(∇L + 2λp)
    L2 in z:         λ‖z‖² = λ‖P⁻¹p‖²       p ← p − αM∇L − 2αλp
    gradient in p:   λ‖∇_p L‖²              p ← p − αM(∇L + 2λH∇L)
    gradient in z:   λ‖∇_z L‖² = λ∇LᵀM∇L    p ← p − αM(∇L + 2λHM∇L)

Both are combined with the method that has the P: ``--method bnp+l2:space=z,strength=1e-4``. Alone, P = I, and p and z
are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hesscond import hessians, operators
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians.coordinates.base import HessianMaker
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.methods import base

STRENGTH = 1e-4


class Penalized(hessians.Chart):
    """The Hessian in z, p = P z, of L + λ‖p‖² or of L + λ‖z‖²: PᵀHP + 2λPᵀP or PᵀHP + 2λI, H that of L."""

    def __init__(self, P: hessians.Preconditioner | None, strength: float, *, in_z: bool, name: str) -> None:
        self.P, self.strength, self.in_z, self.name = P, strength, in_z, name
        self.keeps_zeros = strength == 0

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> operators.SymmetricOperator:
        """Hessian with the penalty for a unit of the layer, or for the whole layer."""
        H = hessian(layers=[layer], unit=unit)
        layout = H.unit_layout
        trained = layout.vector_of([torch.full_like(p, p.requires_grad, dtype=H.dtype) for p in layout.tensors])
        if not trained.all():
            if self.P is not None:
                raise CaptureError(
                    f"{self.name} is that of parameters that are all trained, and some of {layer!r} are not"
                )
            return operators.Sum([(1.0, H), (2 * self.strength, operators.Diagonal(trained))])
        if self.P is None:
            return operators.Shifted(H, -2 * self.strength)
        n_params = layout.geometries[layer].n_params
        P = UnitCoordinates(self.P, layout.units[layer], n_params, dtype=H.dtype, device=H.device)
        inner = operators.Congruence(H, P)
        if self.in_z:
            return operators.Shifted(inner, -2 * self.strength)
        return operators.Sum([(1.0, inner), (2 * self.strength, operators.Gram(P))])

    def network(self, hessian: HessianMaker) -> tuple[operators.SymmetricOperator, Mapping[str, slice]]:
        """Hessian with the penalty for all parameters, in plain coordinates, and the slice of each of them."""
        if self.P is not None:
            raise ConfigError(f"{self.name}: P is that of one layer: measure by layer or by unit")
        H = hessian()
        return operators.Shifted(H, -2 * self.strength), H.parts


class Regularization(base.Method):
    """A term λ·(…) added to the loss, in p or in z; all parameters that require a gradient count."""

    source = "Ye, Preconditioning for Accelerated Gradient Descent, 2024, with the sign of L2 in p corrected to plus"

    space: Literal["p", "z"] = base.option("p", '``"p"`` or ``"z"``.')
    strength: float = base.option(STRENGTH, "λ.", least=0)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


@base.register
class L2(Regularization):
    """L2 regularization: λ‖p‖² as a part of the loss, or λ‖z‖² as decoupled weight decay.

    In z, every parameter with a gradient is multiplied by 1 − 2αλ before the optimizer's step, α being its learning
    rate at that step; neither P nor a momentum or an adaptive M acts on this. ``adam+l2:space=z,strength=λ`` is AdamW
    with weight decay 2λ.

    A probe measures the Hessian of the loss with the penalty, in the coordinates z of the whole method. A study also
    logs, among the `readings`, the Hessian without it.
    """

    name = "l2"
    summary = "L2 regularization in p (preconditioned) or in z (decoupled weight decay)"

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._optimizer: Optimizer | None = None

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        """λ‖p‖² in p; its gradient 2λp is preconditioned with that of the loss."""
        if self.space == "z":
            return None
        squares = [p.square().sum().to(loss) for p in self._parameters().values()]
        return self.strength * torch.stack(squares).sum() if squares else None

    def follow(self, optimizer: Optimizer) -> None:
        """In z, decay the weights before each of its steps."""
        if self.space == "z" and optimizer is not self._optimizer:
            self._optimizer = optimizer
            self.hooks.append(optimizer.register_step_pre_hook(self._decay))

    def probed(self, layer: str) -> hessians.Coordinates | None:
        coordinates = self._penalized(layer)
        if isinstance(coordinates, Penalized):
            return coordinates
        raise ConfigError(
            f"layer {layer!r} is measured in {coordinates.name}, which {self.name} has no Hessian in: leave it out"
        )

    def readings(self, layer: str) -> Mapping[str, hessians.Coordinates | None]:
        """The Hessian with the penalty, where the coordinates of the whole method are linear."""
        coordinates = self._penalized(layer)
        return {coordinates.name: coordinates} if isinstance(coordinates, Penalized) else {}

    def _penalized(self, layer: str) -> hessians.Coordinates:
        """The Hessian with the penalty in the coordinates z of the whole method; these, if they are not linear."""
        coordinates = self.whole.coordinates(layer)
        if coordinates is not None and not isinstance(coordinates, hessians.Preconditioner):
            return coordinates
        name = f"{'plain' if coordinates is None else coordinates.name}, with L2 in {self.space}"
        return Penalized(coordinates, self.strength, in_z=self.space == "z", name=name)

    @torch.no_grad()
    def _decay(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * 2 * self.strength)


@base.register
class GradientRegularization(Regularization):
    """Gradient regularization: λ‖∇_p L‖², or λ‖∇_z L‖² = λ∇LᵀM∇L with M held fixed, as a part of the loss.

    It takes a second backward pass through the first. In z, M is that of the last step, since the loss is formed before
    the method that it belongs to has seen its gradient; P = I before the first step of an adaptive method.
    """

    name = "gradient-regularization"
    summary = "the squared norm of the gradient, in p or in z, added to the loss"

    def probed(self, layer: str) -> hessians.Coordinates | None:
        """Coordinates of the whole method, if λ = 0."""
        if self.strength > 0:
            raise ConfigError(
                f"{self.name} adds λ‖∇L‖² to the loss, whose Hessian takes third derivatives and is not measured: give "
                f"strength=0, or leave {self.name} out, for the Hessian of the loss alone"
            )
        return self.coordinates(layer)

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        parameters = self._parameters()
        derivatives = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        gradients = {name: g for name, g in zip(parameters, derivatives, strict=True) if g is not None}
        fixed = {name: g.detach() for name, g in gradients.items()}
        if self.space == "z":
            with torch.no_grad():
                fixed = self.whole.preconditioned(fixed)
        # 2gᵀv − (value of gᵀv): the value gᵀMg, and the gradient 2HMg of v = Mg held fixed
        products = [(g * fixed[name]).sum().to(loss) for name, g in gradients.items()]
        if not products:
            return None
        total = torch.stack(products).sum()
        return self.strength * (2 * total - total.detach())

"""Charts: tangent spaces of weights with a fixed norm, a fixed sum, or both, and parameters behind a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians import parameters
from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.coordinates import base
from hesscond.hessians.network_operator import NetworkOperator
from hesscond.operators import DirectSum, Subspace, SymmetricOperator
from hesscond.operators.operator import amplified

#: Largest sum of centred weights in a float32 model, relative to √n times their norm.
CENTRED = 1e-5


class UnitNormals(Subspace):
    """Normals of {‖w_i‖² = c_i}, {1ᵀw_i = 0} or both at the weights (m, n) of the units of a layer."""

    def __init__(self, weights: torch.Tensor, *, sphere: bool, centred: bool) -> None:
        self.shape = weights.shape
        normals = [weights] * sphere + [torch.ones_like(weights)] * centred
        # (m, n, 1 or 2): orthonormal, also where the sum of the weights is zero up to rounding only
        self.normals = torch.linalg.qr(torch.stack(normals, 2)).Q
        self.order = weights.numel()
        self.dimension = len(weights) * self.normals.shape[2]

    def project(self, vectors: torch.Tensor) -> torch.Tensor:
        """Project each unit onto its one or two normals."""
        normals = self.normals.to(vectors)
        return (normals @ (normals.mT @ vectors.unflatten(0, self.shape))).flatten(0, 1)


class SphereTangentOperator(SymmetricOperator):
    """The Riemannian Hessian of a loss on {‖w_i‖² = c_i}, {1ᵀw_i = 0} or both, extended by zero on the normals.

    For ξ in the tangent space, Hess L [ξ] = Proj(∇²L ξ) − (⟨w_i, ∇_i L⟩ / c_i) ξ_i for each unit i; biases and other
    parameters are free. The constants c_i are the squared norms of the weights as they are. Where only the sums are
    constrained the set is flat and the second term is absent.

    Source: Absil, Mahony and Sepulchre, Optimization Algorithms on Matrix Manifolds (2008), sec. 5.3-5.4; the curvature
    term by Absil, Mahony and Trumpf, An extrinsic look at the Riemannian Hessian (2013), eq. (10).

    Parameters
    ----------
    operator
        ∇²L (or its Gauss-Newton matrix), made with ``layers=`` unless ``positions`` are given.
    layers
        Layers that are constrained; None: all.
    sphere
        Whether ‖w_i‖² = c_i is a constraint.
    centred
        Whether 1ᵀw_i = 0 is one.
    curved
        Whether the second term counts. Without it the operator is Proj ∇²L Proj, which is the same where the gradient
        is tangent; elsewhere the term shifts all tangent directions of a unit alike, those of the null space too.
    positions
        Indices (m, n) of the units' weights in the vectors of any operator, by layer name; instead of ``layers``.

    Attributes
    ----------
    curvature : (n, 1)
        ⟨w_i, ∇_i L⟩ / c_i at the weights of unit i, 0 at free parameters and where the term does not count.

    Raises
    ------
    ConfigError
        No constraint; the operator is not one of layers; a unit without weights, or with weights that are not centred.
    """

    def __init__(
        self,
        operator: NetworkOperator,
        *,
        layers: Iterable[str] | None = None,
        sphere: bool = True,
        centred: bool = False,
        curved: bool = True,
        positions: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if not (sphere or centred):
            raise ConfigError("nothing is constrained: use sphere=True, centred=True or the operator itself")
        super().__init__(operator.order, operator.dtype, operator.device)
        self.operator = operator
        self.curvature = torch.zeros(operator.order, 1, dtype=operator.dtype, device=operator.device)
        parts: list[tuple[slice | torch.Tensor, Subspace]] = []
        for name, where in (positions_of(operator, layers) if positions is None else positions).items():
            w, g = operator.point[where], operator.gradient[where]
            refuse_off_manifold(name, w, sphere=sphere, centred=centred)
            if sphere and curved:
                # the component along the normal that curves: without the other one, were they not quite orthogonal
                along = w - w.mean(1, keepdim=True) if centred else w
                self.curvature[where, 0] = (along * g).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)
            parts.append((where.flatten(), UnitNormals(w, sphere=sphere, centred=centred)))
        self._normals = DirectSum(operator.order, parts)

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        tangent = self._normals.remove(vectors)
        return self._normals.remove(self.operator.multiply(tangent)).addcmul_(self.curvature, tangent, value=-1)

    @cached_property
    def rounding(self) -> float:
        """Relative rounding of a product: that of ∇²L, enlarged if the two terms cancel."""
        terms = self.operator.norm_bound + float(self.curvature.abs().max())
        return amplified(self.operator.rounding, terms, self.norm_bound)

    @property
    def null_space(self) -> Subspace:
        return self._normals


def positions_of(operator: NetworkOperator, layers: Iterable[str] | None) -> dict[str, torch.Tensor]:
    """Indices (m, n) of the units' weights in the vectors of an operator of layers (None: all)."""
    layout = operator.unit_layout
    rows = torch.arange(operator.order, device=operator.device)
    positions = {}
    for name in layout.parts if layers is None else layers:
        if name not in layout.parts:
            raise ConfigError(f"the operator has no layer {name!r} to constrain: it has {', '.join(layout.parts)}")
        positions[name] = layout.rows(name, rows)[:, int(layout.geometries[name].bias) :]
    return positions


def refuse_off_manifold(layer: str, weights: torch.Tensor, *, sphere: bool, centred: bool) -> None:
    """Raise a ConfigError where the weights (m, n) of a unit are zero, or not centred as they should be."""
    norms = weights.norm(dim=1)
    if sphere and (weights.shape[1] == 0 or bool((norms == 0).any())):
        raise ConfigError(f"a unit of layer {layer!r} has zero weights: it is on no sphere")
    if not centred:
        return
    sums = weights.sum(1).abs()
    off = sums > CENTRED * norms * math.sqrt(weights.shape[1])
    if bool(off.any()):
        unit = int(sums.where(off, 0.0).argmax())
        raise ConfigError(
            f"the weights of unit {unit} of layer {layer!r} sum to {float(weights[unit].sum()):.3g}, not to zero: "
            "subtract their mean, or leave out centred=True"
        )


class Reparametrized(base.Chart):
    """Parameters θ of a module of any kind, such as those behind a weight W(θ), and its bias.

    Those of a unit are its rows of every parameter whose first dimension is the number of units; H includes the
    dependence of other units' weights on them. The bias comes first, then the parameters as the module lists them.

    Parameters
    ----------
    model
        The model.
    name
        Name of the coordinates in the log.
    within
        Context in which the Hessians of the model are defined.
    """

    def __init__(
        self, model: nn.Module, name: str, within: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.model, self.name, self._within = model, name, within

    def chosen_units(self, model: nn.Module, layer: str, units: Sequence[int] | None) -> tuple[int, ...]:
        """Units to measure (None: all); a ConfigError if the rows of θ are no units."""
        return Catalogue(self.model).block(layer).chosen(units)

    def operator(self, hessian: base.HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """∇²L in the parameters of the layer, or in those of one unit."""
        catalogue = Catalogue(self.model)
        block = catalogue.block(layer)
        with self._within():
            H = hessian(parameters=block.parameters)
        if unit is None:
            return H
        block.chosen([unit])
        return H.restricted(parameters.BlockLayout([block.unit(unit)], catalogue.parameters))

    def network(self, hessian: base.HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """∇²L in all parameters."""
        with self._within():
            H = hessian()
        return H, H.parts

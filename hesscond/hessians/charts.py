"""Coordinates that are not ŵ = P z with a fixed P: the parameters behind a weight, and tangent spaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn

from hesscond.capture.layers import TRANSPOSED, Geometry, checked_units, chosen_layers
from hesscond.errors import ConfigError
from hesscond.hessians.block import BlockHessian
from hesscond.hessians.network import HessianOperator
from hesscond.hessians.preconditioner import Preconditioner
from hesscond.operators import Congruence, LinearOperator, SymmetricOperator

#: Makes the Hessian of the loss at hand from ``layers=``, ``unit=`` or ``parameters=``, as `HessianOperator` does.
HessianMaker = Callable[..., HessianOperator]


class Chart(ABC):
    """Coordinates of a layer in which a Hessian is known by its products.

    Attributes
    ----------
    name
        What the log calls them.
    """

    name: str
    #: Whether the Hessian itself tells the coordinates: then they are a P, see `at`.
    local: ClassVar[bool] = False

    def at(self, hessian: BlockHessian) -> Preconditioner | None:
        """The P that local coordinates are for the Hessian of a unit or layer at hand; None: they are not local."""
        return None

    @abstractmethod
    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """The Hessian in these coordinates of a unit of a layer, or of all of it (``unit`` None).

        Raises
        ------
        ConfigError
            The layer has no such coordinates.
        """

    @abstractmethod
    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """The Hessian in all parameters of the model, and which rows belong to which parameter or layer."""


class Selection(LinearOperator):
    """The columns of the identity (n, k) that ``index`` (k,) names: AᵀHA is a principal submatrix of H."""

    def __init__(self, order: int, index: torch.Tensor, *, dtype: torch.dtype) -> None:
        super().__init__((order, len(index)), dtype, index.device)
        self.index = index

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Zeros between the entries."""
        return vectors.new_zeros(self.shape[0], vectors.shape[1]).index_copy_(0, self.index, vectors)

    def multiply_adjoint(self, vectors: torch.Tensor) -> torch.Tensor:
        """The entries."""
        return vectors.index_select(0, self.index)


class Reparametrized(Chart):
    """The parameters θ behind a layer's weight W(θ), as `torch.nn.utils.parametrize` keeps them, and its bias.

    A unit's are its bias and its rows of every parameter of the layer whose first dimension is that of the units; H in
    them has all of the dependence of the other units' weights on them. The order is bias first, then the parameters as
    the module lists them, unit by unit for a unit and one after another for the layer.

    Parameters
    ----------
    model
        The model.
    name
        What the log calls them.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """∇²L in the parameters of the layer, or its rows and columns of one unit.

        Raises
        ------
        ConfigError
            No such layer or unit; a transposed convolution, whose rows are not units; no parameter of the unit alone.
        """
        module = chosen_layers(self.model, [layer])[layer]
        prefix = "" if module is self.model else f"{layer}."
        parameters = {f"{prefix}{name}": p for name, p in module.named_parameters()}
        # False sorts first: the bias leads
        names = sorted(parameters, key=lambda name: not name.endswith("bias"))
        H = hessian(parameters=names)
        if unit is None:
            return H
        if isinstance(module, TRANSPOSED):
            raise ConfigError(f"layer {layer!r} is a transposed convolution: its units are not rows of its parameters")
        checked_units(layer, module, [unit])
        units, chosen = Geometry.of(module).units, []
        for name in names:
            where = torch.arange(H.parts[name].start, H.parts[name].stop, device=H.device)
            if parameters[name].ndim and len(parameters[name]) == units:
                chosen.append(where.view(units, -1)[unit])
        if not chosen:
            raise ConfigError(f"no parameter of layer {layer!r} belongs to one unit: use level='layer'")
        return Congruence(H, Selection(H.order, torch.cat(chosen), dtype=H.dtype))

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """∇²L in all parameters."""
        H = hessian()
        return H, H.parts

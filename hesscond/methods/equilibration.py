"""Weight equilibration (weight conditioning): the layer multiplies with E(W) W, E diagonal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from hesscond import hessians
from hesscond.capture import Layer, chosen_layers
from hesscond.methods import base
from hesscond.methods.reparametrization import Reparametrization, WeightParametrization

Axis = Literal["row", "column", "row-column"]


def inverse_norms(A: torch.Tensor, dim: int) -> torch.Tensor:
    """1/‖·‖ of ``A`` along a dimension, which is kept; 1 where all entries are zero."""
    zero = (A == 0).all(dim, keepdim=True)
    # the norm has no derivative at zero, and NaN must not come from where it is not used
    norms = torch.linalg.vector_norm(torch.where(zero, torch.ones_like(A), A), dim=dim, keepdim=True)
    return torch.where(zero, torch.ones_like(norms), norms.reciprocal())


class Equilibrated(WeightParametrization):
    """W ↦ E(W) W; arguments as for `Equilibration`."""

    differentiated: torch.Tensor

    def __init__(self, layer: Layer, *, axis: Axis, frozen: bool) -> None:
        super().__init__(layer)
        self.axis, self.frozen = axis, frozen
        # a buffer: an operator keeps the buffers that the model had when the operator was created
        self.register_buffer("differentiated", torch.tensor(not frozen, device=layer.weight.device), persistent=False)

    def factors(self, A: torch.Tensor) -> torch.Tensor:
        """Entries of E, in a shape that broadcasts to A (G, m/G, n), whose rows are the units.

        The paper's matrices are the transposes: its rows are the columns here.
        """
        if self.axis == "column":
            return inverse_norms(A, 2)
        by_row = inverse_norms(A, 1)
        return by_row if self.axis == "row" else by_row * inverse_norms(by_row * A, 2)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """E(W) W."""
        A = self.rows(weight)
        constant = self.frozen and not bool(self.differentiated)
        return self.from_rows(self.factors(A.detach() if constant else A) * A, weight.shape)


@contextmanager
def differentiated(model: nn.Module) -> Iterator[None]:
    """Context in which E of the equilibrated layers is differentiated, also where training takes it for a constant."""
    parametrizations = [module for module in model.modules() if isinstance(module, Equilibrated)]
    for module in parametrizations:
        module.differentiated.fill_(True)
    try:
        yield
    finally:
        for module in parametrizations:
            module.differentiated.fill_(not module.frozen)


@base.register
class Equilibration(Reparametrization):
    """Weight equilibration: every layer multiplies with E(W) W, and W is trained.

    E is computed anew in every forward pass. The paper's matrix W is inputs × outputs, the transpose of torch's; for a
    convolution it is the (k²c) × c' matrix of its filters, one matrix for each group. In the paper's terms::

        row          E = diag(1/‖W_j‖) over its rows j: each input's weights to all units get norm 1
        column       each unit's weights get norm 1
        row-column   rows first, then the columns of what that gives

    A row or column of zeros stays as it is: its entry of E is 1 (of one that is next to zero it is huge).

    The Hessian has been read in three ways, all of which are logged as ``readings``:

    ``through W -> E(W) W``
        in W, with E differentiated: the coordinates of the method, unless ``frozen``. With ``row`` and ``row-column``
        the loss does not change if a row r of the paper's W is scaled, with ``column`` if the weights of a
        unit are: by L(c w_r) = L(w_r), H w_r = −∇_r L in the Hessian of the layer (for ``column`` that of the unit
        too). Since w_rᵀ∇_r L = 0, H is indefinite where that gradient is not zero, and singular where it is.
    ``at the point EW``
        in the weight that the layer multiplies with, as if it were the parameter;
    ``E frozen``
        in W, with E a constant: P_i = diag(1, e_i) for unit i. The coordinates of the method if ``frozen``.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> _ = Equilibration(model)
    >>> bool(torch.allclose(model[0].weight.norm(dim=0), torch.ones(4)))
    True
    """

    name = "equilibration"
    summary = "weight matrices are equilibrated in the forward pass (weight conditioning): E(W) W"
    source = "Saratchandran, Wang, Lucey, ECCV 2024, sec. 4, 5.1"
    coordinates_name = "through W -> E(W) W"

    axis: Axis = base.option("row", "Kind of E, see above.")
    frozen: bool = base.option(False, "Whether the gradient takes E for a constant.")
    layers: tuple[str, ...] | None = base.option(
        None,
        "Layers to equilibrate; ``ends``: the first and the last, as in the paper's convolutional networks; None: all "
        "layers.",
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.chart = hessians.Reparametrized(model, self.coordinates_name, partial(differentiated, model))

    def parametrization(self, name: str, layer: Layer) -> Equilibrated:
        return Equilibrated(layer, axis=self.axis, frozen=self.frozen)

    def coordinates(self, layer: str) -> hessians.Coordinates | None:
        """W of a layer that is equilibrated, or diag(1, e) with E frozen; None of another."""
        return self.frozen_coordinates(layer) if self.frozen else super().coordinates(layer)

    def probed(self, layer: str) -> hessians.Coordinates | None:
        """`coordinates`; with E frozen, by products in W itself, in which training takes E for a constant, too."""
        P = self.coordinates(layer)
        return hessians.Reparametrized(self.model, P.name) if isinstance(P, hessians.Preconditioner) else P

    def readings(self, layer: str) -> Mapping[str, hessians.Coordinates | None]:
        if self.parametrization_of(layer) is None:
            return {}
        return {
            self.coordinates_name: self.chart,
            "at the point EW": None,
            "E frozen": self.frozen_coordinates(layer),
        }

    def frozen_coordinates(self, layer: str) -> hessians.Preconditioner | None:
        """P_i = diag(1, e_i) of the units of a layer (no 1 without bias), e_i (n,); None: it is not equilibrated."""
        parametrization = self.parametrization_of(layer)
        if parametrization is None:
            return None
        assert isinstance(parametrization, Equilibrated)
        module = chosen_layers(self.model, [layer])[layer]
        A = parametrization.rows(module.get_parameter("parametrizations.weight.original").detach().to(torch.float64))
        E = parametrization.factors(A).expand_as(A).flatten(0, 1)
        if parametrization.geometry.bias:
            E = torch.cat([E.new_ones(len(E), 1), E], 1)
        alike = self.axis == "row" and parametrization.geometry.groups == 1
        return hessians.Scaling(E[0] if alike else E, "E frozen")

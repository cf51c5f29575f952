"""Diagonal scaling of each layer's inputs with the smallest condition number, certified: measured, not trained with.

Source of the problem: Boyd, El Ghaoui, Feron and Balakrishnan, *Linear Matrix Inequalities in System and Control
Theory*, SIAM 1994, section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hesscond.capture import Geometry, LayerInputs, RowFactor, row_factor
from hesscond.errors import ConfigError
from hesscond.hessians import LinearCoordinates, Scaling
from hesscond.hessians.coordinates.statistics import by_group
from hesscond.methods.base import Method
from hesscond.methods.options import option
from hesscond.methods.registry import register
from hesscond.methods.whitening import CUTOFF
from hesscond.scaling import optimal_diagonal_scaling

#: Parameters of a unit up to which the scaling is searched for without being asked: some seconds each time.
WIDEST = 300


@register
class OptimalDiagonal(Method):
    """Coordinates ŵ = D z with the diagonal D of smallest κ(ĤD), for the extended inputs Ĥ = [e, H] of each layer.

    A lower limit for every method that only rescales features (equilibration, standardization without the mean, the
    scaling half of BNP). The search is Newton's on the central path, and its result is certified: see
    `hesscond.optimal_diagonal_scaling`. It costs n̂³ a Newton step, some 30 to 200 of them. No network is trained with
    it: ``probe(method="optimal-diagonal")`` measures in D. Each group of a grouped convolution has its own D.

    For a rank deficient Ĥ the smallest nonzero singular value counts; then the infimum need not be attained, and some
    entries of D are tiny, which switches redundant features off. Dead features (columns of zeros) do not change κ:
    their entry of D is the largest of the others.

    """

    name = "optimal-diagonal"
    summary = "the diagonal scaling of every layer's inputs with the smallest κ, certified (measured only)"
    source = "Boyd et al., LMIs in System and Control Theory, SIAM 1994, sec. 3.1 (the problem)"
    trained = False
    needs_statistics = True

    widest: int = option(
        WIDEST,
        "A layer with more parameters a unit is refused: a search takes a quarter of a second at 100, ten seconds at "
        "300.",
    )
    only: tuple[str, ...] | None = option(None, "The layers to scale; None: all.", name="layers")

    def __init__(self, model: nn.Module, **options: Any) -> None:
        raise ConfigError(
            "optimal-diagonal is measured, not trained with: give probe(method='optimal-diagonal'), or train with bnp"
        )

    @classmethod
    def data_statistics(
        cls,
        layer: str,
        inputs: LayerInputs,
        *,
        widest: int = WIDEST,
        layers: tuple[str, ...] | None = None,
        **options: Any,
    ) -> RowFactor | None:
        """Triangular factor of the centred inputs, with the means; None: the layer is not one of ``layers``."""
        if layers is not None and layer not in layers:
            return None
        order = inputs.geometry.n_params
        if order > widest:
            raise ConfigError(
                f"optimal-diagonal: layer {layer!r} has {order} parameters a unit, more than widest={widest}, and each "
                "search takes time of order n³: name narrower layers (argument layers), or set the option widest"
            )
        return row_factor(inputs)

    @classmethod
    def data_preconditioner(cls, statistics: RowFactor, geometry: Geometry, **options: Any) -> LinearCoordinates:
        """P = D of each group of the layer."""
        factors = extended_factors(statistics, bias=geometry.bias)
        parts = [Scaling(optimum(F), "optimal diagonal, raw second moments of the data") for F in factors]
        return by_group(parts, geometry.units, geometry.n_params, device=statistics.device)


def extended_factors(statistics: RowFactor, *, bias: bool) -> torch.Tensor:
    """(G, r + 1, n̂) F with FᵀF = ĤᵀĤ/N: the centred factor, bordered by the means."""
    features, R = statistics.features, statistics.R
    mu, dead = features.mu.view(len(R), 1, -1), features.dead.view(len(R), 1, -1)
    # of a feature that is constant the centred column is rounding
    F = torch.cat([mu, R.masked_fill(dead, 0.0) / features.count**0.5], 1)
    if not bias:
        return F
    e = torch.zeros_like(F[:, :, :1])
    e[:, 0] = 1.0
    return torch.cat([e, F], 2)


def optimum(F: torch.Tensor) -> torch.Tensor:
    """The d (n̂,) with the smallest κ⁺(FD), with columns of FD that have norm 1 on average; ones if F = 0.

    F was rounded: directions in which its columns, normalized, have no more than that are taken out first.
    """
    norms = F.norm(dim=0)
    live = norms > 0
    if not live.any():
        return torch.ones_like(norms)
    _, lengths, Vt = torch.linalg.svd(F[:, live] / norms[live], full_matrices=False)
    kept = lengths > CUTOFF * lengths[0]
    exact = lengths[kept, None] * Vt[kept] * norms[live]
    found = torch.from_numpy(optimal_diagonal_scaling(exact, side="column").column).to(norms)
    found *= (len(found) / (exact * found).square().sum()).sqrt()
    d = found.max() * torch.ones_like(norms)
    d[live] = found
    return d

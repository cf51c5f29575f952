"""The Kronecker pair of smallest condition number for every layer's Gauss–Newton matrix, certified: a yardstick."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from hesscond.capture import Layer
from hesscond.capture.statistics import triangular
from hesscond.errors import ConfigError
from hesscond.hessians import LinearCoordinates, ParameterMap
from hesscond.hessians.parameter_maps import LayerMap
from hesscond.methods.gauss_newton import CurvedMethod, CurvedState
from hesscond.methods.learned import refuse_unless
from hesscond.methods.registry import register
from hesscond.scaling import optimal_kronecker_scaling

#: Parameters of a layer up to which the pair is searched for without being asked: a few seconds each time.
WIDEST = 1200


@dataclass
class OptimalKroneckerState(CurvedState):
    """A layer, and the pair that the last search found for it.

    Attributes
    ----------
    left, right : (m, m), (n̂, n̂) float64
        L and R.
    gap : () float64
        κ⁺ reached over the certified lower bound for all pairs, of that search.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        like = torch.zeros((), dtype=torch.float64, device=self.module.weight.device)
        self.left, self.right = (torch.eye(k).to(like) for k in (self.geometry.units, self.geometry.n_params))
        self.gap = torch.ones_like(like)

    def search(self, damping: float, rtol: float) -> None:
        """The optimal pair of FᵀF + γI, with λ_max(PᵀGP) = 1."""
        m, n = self.geometry.units, self.geometry.n_params
        F = damping**0.5 * torch.eye(m * n).to(self.left)
        for rows in self.products():
            for part in rows.parts():
                F = triangular(torch.cat([F, part.flatten(1)])[None])[0]
        best = optimal_kronecker_scaling(F, (m, n), rtol=rtol)
        self.left.copy_(torch.from_numpy(best.left))
        self.right.copy_(torch.from_numpy(best.right))
        self.left /= torch.linalg.matrix_norm(self.map.multiply_adjoint(F), 2)
        self.gap.fill_(best.gap)

    @property
    def map(self) -> ParameterMap:
        """P of [b, W] (m, n̂)."""
        return ParameterMap.kronecker((len(self.left), len(self.right)), (self.left, self.right))

    def moved(self, gradient: torch.Tensor) -> torch.Tensor:
        """M times the gradient of [b, W]."""
        return self.map.applied(gradient)


@register
class OptimalKronecker(CurvedMethod[OptimalKroneckerState]):
    """The best Kronecker pair: M = LLᵀ ⊗ RRᵀ for [b, W], with the L, R of smallest κ((L ⊗ R)ᵀ(G + γI)(L ⊗ R)).

    G is the layer's Gauss–Newton matrix on the mini-batch of the step at which the pair is searched for: no other
    Kronecker product, such as that of K-FAC, has a smaller κ there. The search is global, and its result certified: see
    `hesscond.optimal_kronecker_scaling`. The pair is scaled to λ_max = 1, so that on that matrix rates up to 2 are
    stable. A custom training loop calls ``method.observe(loss)`` before the backward pass. At the unit level the block
    of M of a unit's own parameters counts. In the coordinates of the data, ``probe(method="optimal-kronecker")``, G is
    that of all of them, damped too.

    Source: geodesic convexity of the problem, Wiesel, IEEE Trans. Signal Process. 60 (2012).

    Parameters
    ----------
    model
        See `GaussNewton`.
    damping
        γ.
    update_every
        Steps after which the pair is searched for again; the first time after a tenth of them.
    rtol
        How near to the optimum κ⁺, the root of κ, must come, relatively.
    widest
        A layer with more parameters is refused: a search takes a second at 550, ten at 1,000; each
        evaluation is a decomposition of that order.
    layers
        The layers to precondition; None: all.

    Raises
    ------
    ConfigError
        The model has no such layer; one is too wide; a grouped or transposed convolution; an option out of its range.
    """

    name = "optimal-kronecker"
    summary = "the Kronecker pair of smallest κ for every layer's Gauss–Newton matrix, certified"
    source = "Wiesel, IEEE Trans. Signal Process. 60 (2012) (convexity)"
    rate = 0.1
    of_first_step = True
    kept = ("left", "right", "gap")

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float = 1e-2,
        update_every: int = 100,
        rtol: float = 0.1,
        widest: int = WIDEST,
        layers: tuple[str, ...] | None = None,
    ) -> None:
        allowed = 0 < damping < math.inf and update_every >= 1 and 1e-9 <= rtol < 1 and widest >= 1
        needs = "damping > 0, update_every ≥ 1, 1e-9 ≤ rtol < 1 and widest ≥ 1"
        refuse_unless(allowed, self.name, needs, damping, update_every, rtol, widest)
        self.damping, self.update_every, self.rtol = damping, update_every, rtol
        super().__init__(model, layers)
        for name, state in self.layers.items():
            order = state.geometry.units * state.geometry.n_params
            if order > widest:
                raise ConfigError(
                    f"{self.name}: layer {name!r} has {order} parameters, more than widest={widest}, and each search "
                    "takes time of order n³: name smaller layers (option layers), or set the option widest"
                )

    def state_of(self, layer: Layer) -> OptimalKroneckerState:
        """L = I, R = I."""
        return OptimalKroneckerState(layer)

    @property
    def due(self) -> bool:
        """Whether the pair is searched for at the next step."""
        return self.steps % self.update_every == 0 or self.steps == self.update_every // 10

    def take(self, state: OptimalKroneckerState) -> None:
        """The pair for this mini-batch."""
        state.search(self.damping, self.rtol)

    def certified_gap(self, layer: str) -> float | None:
        """How far κ⁺ was from the optimum at most when the pair was found; None: the layer is not preconditioned.

        Raises
        ------
        ConfigError
            No such layer.
        """
        state = self.find(layer)
        return None if state is None else float(state.gap)

    def preconditioner(self, layer: str) -> LinearCoordinates | None:
        """P as the last step used it; None: the layer is not preconditioned.

        Raises
        ------
        ConfigError
            No such layer.
        """
        state = self.find(layer)
        return None if state is None else LayerMap(state.map, None, f"{self.name}, L ⊗ R")

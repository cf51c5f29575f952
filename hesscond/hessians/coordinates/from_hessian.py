"""Preconditioners computed from the Hessian that is measured: Jacobi scaling, and the optimal ones of their kind."""

from __future__ import annotations

import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.hessians.coordinates import base, linear
from hesscond.hessians.factored import FactoredHessian
from hesscond.scaling import OptimalKronecker as Optimum, optimal_diagonal_scaling, optimal_kronecker_scaling
from hesscond.spectra.condition import EPS, NOISE


def Jacobi() -> base.HessianScaling:
    """Coordinates ŵ = D z with D = diag(|H|)^−½, and 1 where H has a zero on its diagonal, as it has for dead features.

    For positive definite H (n, n), κ(DHD) ≤ n · min over all diagonal D: Van der Sluis, Numer. Math. 14 (1969),
    Theorem 4.1. The diagonal is taken from the Hessian that is measured, of a unit, of a layer or of the network.
    """
    return base.HessianScaling(jacobi_scaling, "Jacobi, diag(H)^-1/2")


def OptimalDiagonal() -> base.HessianScaling:
    """Coordinates ŵ = D z with the diagonal D > 0 for which κ(DHD) is smallest, to a certified gap.

    D is found from the factor of H = FᵀF, whose columns it scales: κ(DHD) = κ(FD)². H must be positive semidefinite, as
    behind piecewise linear layers and a convex loss; `hesscond.optimal_diagonal_scaling` gives the bounds.
    """
    return base.HessianScaling(best_diagonal, "optimal diagonal")


def OptimalKronecker() -> base.HessianScaling:
    """Coordinates W = L Z Rᵀ with the pair L, R for which κ((L ⊗ R)ᵀ H (L ⊗ R)) is smallest.

    The Hessian of the layer must be positive semidefinite; `hesscond.optimal_kronecker_scaling` gives the bounds, and
    says when the optimum is proved.
    """
    return base.HessianScaling(best_pair, "optimal Kronecker")


def jacobi_scaling(hessian: base.BlockHessian) -> linear.Scaling:
    """Jacobi's scaling diag(|H|)^−½, and 1 where H has a zero on its diagonal, or one up to rounding."""
    size, spread = hessian.diagonal().abs(), getattr(hessian, "spread", None)
    if spread is not None:
        size = size.where(size > NOISE * EPS * spread.square(), 0.0)
    return diagonal(size.where(size != 0, 1.0).rsqrt(), hessian.units, "Jacobi, diag(H)^-1/2")


def best_diagonal(hessian: base.BlockHessian) -> linear.Scaling:
    """Optimal D of a semidefinite Hessian with a known factor, else a ConfigError; 1 where the Hessian is zero."""
    factored = semidefinite(hessian, "diagonal")
    factor = factored.factor()
    d = torch.ones_like(factor[0])
    if factor.any():
        d = torch.from_numpy(optimal_diagonal_scaling(factor, side="column").column).to(factored.rows.device)
    return diagonal(d, factored.units, "optimal diagonal")


def best_pair(hessian: base.BlockHessian) -> linear.Kronecker:
    """Optimal L and R of a layer's semidefinite Hessian with a known factor; a ConfigError for other and zero ones."""
    if hessian.units == 1 and hessian.order > 1:
        raise ConfigError(
            "the optimal Kronecker preconditioner acts across the units of a layer: measure at level='layer'"
        )
    factored = semidefinite(hessian, "Kronecker")
    factor = factored.factor()
    if not factor.any():
        raise ConfigError("the Hessian is zero: every pair of Kronecker factors is optimal")
    best = best_kronecker(factored, factor)
    left, right = (torch.from_numpy(part).to(factored.rows.device) for part in (best.left, best.right))
    return linear.Kronecker(left, linear.DensePreconditioner(right), "optimal Kronecker")


def semidefinite(hessian: base.BlockHessian, kind: str) -> FactoredHessian:
    """Factor of a positive semidefinite Hessian."""
    factored = hessian.dense()
    if not isinstance(factored, FactoredHessian) or factored.sign is not None:
        raise ConfigError(
            f"the optimal {kind} scaling is defined for positive semidefinite Hessians of units and layers that come "
            "as a factor: behind this layer there is something smooth, or the loss is not convex"
        )
    return factored


def best_kronecker(hessian: FactoredHessian, factor: torch.Tensor) -> Optimum:
    """The best L and R for a Hessian with this factor."""
    return optimal_kronecker_scaling(
        factor,
        (hessian.units, hessian.order // hessian.units),
        error=hessian.factor_error(),
        rank_bound=hessian.rank_bound,
    )


def diagonal(d: torch.Tensor, units: int, name: str) -> linear.Scaling:
    """diag(d) for the Hessian of one unit, or of several together."""
    return linear.Scaling(d if units == 1 else d.view(units, -1), name)


def optima(hessian: base.BlockHessian) -> dict[str, float]:
    """Columns with bounds of the smallest κ in any diagonal and any Kronecker coordinates, of a layer's Hessian.

    Empty where it has negative eigenvalues, or no factor is known: it is then defined, but no method is known for it.
    """
    try:
        factored = semidefinite(hessian, "diagonal")
        factor = factored.factor()
        diagonal = optimal_diagonal_scaling(factor, side="column")
        kronecker = best_kronecker(factored, factor)
    except (ConfigError, MatrixError):
        return {}
    return {
        "kappa_diagonal_lower": diagonal.lower**2,
        "kappa_diagonal_upper": diagonal.upper**2,
        "kappa_kronecker_lower": kronecker.lower**2,
        "kappa_kronecker_upper": kronecker.upper**2,
    }

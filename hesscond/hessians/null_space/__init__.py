"""Null space of a network's Hessian, and a preconditioner on its complement: what an iterative solver starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hesscond.hessians.network_operator import NetworkOperator
from hesscond.hessians.null_space.directions import NullDirections, combined, network_null_directions
from hesscond.hessians.null_space.kronecker import network_inverse
from hesscond.hessians.null_space.reduced import PulledInverse, remaining
from hesscond.spectra.forms import SolverHints

__all__ = ["NullDirections", "NullSpaceAndPreconditioner", "combined", "network_inverse", "network_null_directions"]


@dataclass(frozen=True)
class NullSpaceAndPreconditioner:
    """Known null directions of a Hessian and an approximate inverse on their complement; by default nothing."""

    directions: Sequence[NullDirections] = ()
    hints: SolverHints = field(default_factory=SolverHints)

    @classmethod
    def of(cls, H: NetworkOperator) -> NullSpaceAndPreconditioner:
        """Null directions and preconditioner of a network; no preconditioner where everything is null."""
        directions = network_null_directions(H)
        null_space = combined(directions)
        if null_space is not None and null_space.dimension == H.order:
            return cls(directions, SolverHints(null_space))
        inverse = network_inverse(H, null_space=null_space)
        Z, left = remaining(directions, H.order, dtype=H.dtype, device=H.device)
        return cls(directions, SolverHints(left, PulledInverse(inverse, Z), Z))

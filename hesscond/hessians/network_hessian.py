"""The Hessian of a whole network, known by its products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from hesscond.errors import CaptureError
from hesscond.hessians.coordinates import BlockHessian, LinearCoordinates
from hesscond.hessians.null_directions import NullDirections
from hesscond.operators import SymmetricOperator
from hesscond.spectra import ConditionNumber, ProductForm
from hesscond.spectra.lanczos import lanczos
from hesscond.spectra.matrix_free import Effort, Known, formed

if TYPE_CHECKING:
    from collections.abc import Callable

#: Matrices up to this order are decomposed in less time than an iteration takes.
SMALL = 1000


class NetworkHessian(BlockHessian):
    """H (n, n) of all parameters, in coordinates that are already part of the operator.

    Parameters
    ----------
    operator
        H, or PᵀHP.
    known
        Makes what is known of it beforehand, when it is first needed: null directions with their reasons, and the same
        as a solver wants it.
    effort
        Limits of what is computed.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        known: Callable[[], tuple[Sequence[NullDirections], Known]],
        effort: Effort,
    ) -> None:
        self.operator, self._known, self.effort = operator, known, effort

    @property
    def order(self) -> int:
        return self.operator.order

    @cached_property
    def known(self) -> tuple[Sequence[NullDirections], Known]:
        """What is known of it beforehand."""
        return self._known()

    def matrix(self, P: LinearCoordinates | None = None) -> torch.Tensor:
        """The dense Hessian (n, n), float64.

        Raises
        ------
        CaptureError
            It does not fit into the memory allowed.
        """
        refuse_coordinates(P)
        return self._formed

    def product(self, vectors: torch.Tensor, P: LinearCoordinates | None = None) -> torch.Tensor:
        """H V (n, c)."""
        refuse_coordinates(P)
        return (self.operator @ vectors.to(self.operator.dtype)).to(torch.float64)

    def scales(self) -> torch.Tensor:
        """(n,) all one: nothing is known beforehand."""
        return torch.ones(self.order, dtype=torch.float64, device=self.operator.device)

    @cached_property
    def _formed(self) -> torch.Tensor:
        needed = 8 * self.order**2
        if self.effort.memory is not None and needed > self.effort.memory:
            raise CaptureError(
                f"the dense Hessian of {self.order:,} parameters takes {needed / 1e9:.3g} GB, more than the "
                f"{self.effort.memory / 1e9:.3g} GB allowed: use products with the operator, or raise memory"
            )
        H = formed(self.operator).to(torch.float64)
        return (H + H.T) / 2

    def condition_numbers(
        self, coordinates: Sequence[LinearCoordinates | None], *, rtol: float = 1e-8
    ) -> list[ConditionNumber]:
        """κ in the operator's own coordinates."""
        for P in coordinates:
            refuse_coordinates(P)
        kappa = ProductForm(self.operator, lambda: self.known[1], self.effort).condition(rtol=rtol)
        return [kappa] * len(coordinates)

    def eigenpairs(self, P: LinearCoordinates | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """All nonzero eigenvalues, descending, and their eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrix(P))
        largest = values.abs().argsort(descending=True)[: self.condition_number().rank]
        kept = largest[values[largest].argsort(descending=True)]
        return values[kept], vectors[:, kept]

    def eigenvalues(self, P: LinearCoordinates | None = None) -> torch.Tensor:
        return self.eigenpairs(P)[0]

    @cached_property
    def extremes(self) -> torch.Tensor:
        """(n, 2) eigenvectors of the largest and the smallest (algebraic) eigenvalue, to about 1e-4."""
        if self.order <= SMALL:
            return torch.linalg.eigh(self.matrix()).eigenvectors[:, [-1, 0]]
        found = lanczos(
            self.operator, 1, "both", tol=1e-4, missed=1.0, memory=self.effort.memory, seed=self.effort.seed
        )
        return found.eigenvectors[:, [0, -1]]


def refuse_coordinates(P: LinearCoordinates | None) -> None:
    """Raise an error for a P of one layer's units: that of a network belongs into its operator."""
    if P is not None:
        raise CaptureError("a network's Hessian is measured in the coordinates of its operator: use Congruence(H, P)")

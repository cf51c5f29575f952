"""What every block of the Hessian can be asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hesscond.hessians.preconditioner import Preconditioner
from hesscond.spectra import ConditionNumber

#: The smallest scales that products are compared in: this share of the sizes whose squares H has round-off of, and so
#: many times the error of a factor's column. What rounding does to H is then far below 1e-8 of what is compared.
LOST_IN_SQUARE, LOST_IN_FACTOR = 1e-2, 1e10


class BlockHessian(ABC):
    """The Hessian H of the loss in the parameters of one unit or layer, in plain or preconditioned coordinates.

    With a `Preconditioner` P every method speaks of PᵀHP; for a whole layer P acts on each unit.
    """

    @property
    def units(self) -> int:
        """On how many units a P acts."""
        return 1

    @property
    @abstractmethod
    def order(self) -> int:
        """Number of parameters."""

    @abstractmethod
    def matrix(self, P: Preconditioner | None = None) -> torch.Tensor:
        """The dense Hessian (k, k), float64; parameters in the order [bias, weight row], unit by unit."""

    def diagonal(self) -> torch.Tensor:
        """(k,) the diagonal of H, float64."""
        return self.matrix().diagonal()

    def product(self, vectors: torch.Tensor, P: Preconditioner | None = None) -> torch.Tensor:
        """H V or PᵀHP V (k, c) for V (k, c), float64."""
        return self.matrix(P) @ vectors

    def scales(self) -> torch.Tensor:
        """(k,) the sizes d of the parameters' shares in H, whose entry (i, j) is of the size d_i d_j at most.

        They are no smaller than what keeps the round-off of H far below that.
        """
        return self.diagonal().abs().sqrt()

    @abstractmethod
    def condition_numbers(
        self, coordinates: Sequence[Preconditioner | None], *, rtol: float = 1e-8
    ) -> list[ConditionNumber]:
        """κ in several coordinate systems at once (None: the plain ones), cheaper than one by one."""

    def condition_number(self, P: Preconditioner | None = None, *, rtol: float = 1e-8) -> ConditionNumber:
        """κ(H), or κ(PᵀHP)."""
        return self.condition_numbers([P], rtol=rtol)[0]

    @abstractmethod
    def eigenpairs(self, P: Preconditioner | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """All nonzero eigenvalues (r,), descending, and orthonormal eigenvectors (k, r), float64."""

    @abstractmethod
    def eigenvalues(self, P: Preconditioner | None = None) -> torch.Tensor:
        """All nonzero eigenvalues (r,), descending, float64."""

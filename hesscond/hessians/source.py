"""Source of Hessians in all coordinates: the one place where blocks of a loss over data are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hesscond.hessians.coordinates.base import BlockHessian, Coordinates, HessianMaker
from hesscond.hessians.network_hessian import NetworkHessian
from hesscond.hessians.network_operator import HessianOperator
from hesscond.hessians.null_space.directions import NullDirections
from hesscond.operators import SymmetricOperator
from hesscond.spectra.solvers.matrix_free import SolverHints, SolverLimits

#: Makes the null directions of a Hessian and `SolverHints`, when they are first needed.
Facts = Callable[[], tuple[Sequence[NullDirections], SolverHints]]


def nothing_known() -> tuple[Sequence[NullDirections], SolverHints]:
    """Facts of a Hessian in coordinates other than the plain ones."""
    return (), SolverHints()


class BlockSource:
    """Hessians of a loss over data in any coordinates.

    Half of ``memory`` is for the graphs of an operator, the rest for solvers. ``captured`` gives captured Hessians.
    """

    latest: HessianOperator  # the operator that was asked for last

    def __init__(
        self,
        evaluate: HessianMaker,
        memory: int,
        captured: Callable[[str, int | None], BlockHessian] | None = None,
    ) -> None:
        self.memory, self._evaluate, self._captured = memory, evaluate, captured
        self._operators: dict[str, HessianOperator] = {}

    def block(self, coordinates: Coordinates | None, layer: str, unit: int | None) -> BlockHessian:
        """Hessian of a unit, or of the layer (``unit`` None), in coordinates (None: the plain ones)."""
        return self.plain(layer, unit) if coordinates is None else coordinates.block(self, layer, unit)

    def plain(self, layer: str, unit: int | None) -> BlockHessian:
        """Captured H of a unit or of a layer."""
        assert self._captured is not None
        return self._captured(layer, unit)

    def operator(self, **wanted: Any) -> HessianOperator:
        """Operator of ``layers=``, ``unit=`` or ``parameters=``, shared by all blocks that ask for the same."""
        key = repr(wanted)
        if key not in self._operators:
            self._operators[key] = self._evaluate(**wanted, memory=self.memory / 2)
        self.latest = self._operators[key]
        return self.latest

    def products(self, operator: SymmetricOperator, known: Facts = nothing_known, error: float = 0.0) -> NetworkHessian:
        """Block of an operator that is derived from the `latest` one; ``error``: bound of its rounding, if known."""
        left = max(self.memory - self.latest.held, self.memory // 2)
        H = self.latest
        return NetworkHessian(operator, known, SolverLimits(memory=left), error, lambda: H.saturated)

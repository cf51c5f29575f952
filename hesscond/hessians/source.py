"""What Hessians in all coordinates are made from: the one place where blocks of a loss over data are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hesscond.hessians.coordinates import BlockHessian, Coordinates, HessianMaker
from hesscond.hessians.network import HessianOperator
from hesscond.hessians.whole import NetworkHessian
from hesscond.operators import SymmetricOperator
from hesscond.spectra import Effort, Known


class BlockSource:
    """The Hessians of a loss over data, at the parameters as they are: `block` gives one in any coordinates.

    Parameters
    ----------
    evaluate
        Makes H from ``layers=``, ``unit=`` or ``parameters=``, by its products.
    memory
        Bytes that a Hessian and the work on it may take.
    captured
        Gives H of a unit or of a layer in plain coordinates, if they were captured.

    Attributes
    ----------
    latest
        The operator that was asked for last.
    """

    latest: HessianOperator

    def __init__(
        self,
        evaluate: HessianMaker,
        memory: int,
        captured: Callable[[str, int | None], BlockHessian] | None = None,
    ) -> None:
        self.memory, self._evaluate, self._captured = memory, evaluate, captured
        self._operators: dict[str, HessianOperator] = {}

    def block(self, coordinates: Coordinates | None, layer: str, unit: int | None) -> BlockHessian:
        """The Hessian of a unit of a layer, or of all of it (``unit`` None), in coordinates (None: the plain ones).

        Raises
        ------
        ConfigError
            The layer or the unit has no such coordinates.
        """
        return self.plain(layer, unit) if coordinates is None else coordinates.block(self, layer, unit)

    def plain(self, layer: str, unit: int | None) -> BlockHessian:
        """H of a unit or of a layer, as it was captured."""
        assert self._captured is not None
        return self._captured(layer, unit)

    def operator(self, **wanted: Any) -> HessianOperator:
        """H of ``layers=``, ``unit=`` or ``parameters=``; one for all units, where they are parts of the same."""
        key = repr(wanted)
        if key not in self._operators:
            self._operators[key] = self._evaluate(**wanted)
        self.latest = self._operators[key]
        return self.latest

    def products(self, operator: SymmetricOperator) -> NetworkHessian:
        """The block of an operator of which nothing is known beforehand, within the memory."""
        return NetworkHessian(operator, lambda: ((), Known()), Effort(memory=self.memory))

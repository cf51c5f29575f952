"""Solvers for κ of a form, as siblings: their protocol, their registry, and the search that tries the cheapest first.

A solver is a class with `register` in a module of this package, which is found by being there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar, get_args

import numpy as np
import torch

from hesscond import causes
from hesscond.operators.threads import one_thread
from hesscond.spectra.condition import ConditionNumber, Values, conclude, unresolved, zero_matrix

RankBound = Callable[[], int]
#: A matrix is zero if its eigenvalues are this many times below the bound of its rounding; unresolved if nearer.
SURE = 4.0
#: Jacobi is tried on a matrix known up to rounding if that of one diagonal entry is this much larger than another's.
GRADED = 100.0
#: Order from which symmetric matrices are decomposed by torch.
LARGE = 2000
#: Gram matrices whose trace lies outside are near overflow or underflow, and are not used.
GRAM_RANGE = (1e-200, 1e200)


@dataclass(frozen=True, eq=False, kw_only=True)
class Form:
    """Symmetric matrix H as far as it is known."""

    #: returns the rank that H has unless entries were lost to underflow: with a smaller rank, κ is unresolved; None: no
    #: entries can have been lost
    least_rank: RankBound | None = None
    lost: causes.Cause = causes.NOTHING  # cause of lost entries

    def measured(self, rtol: float) -> ConditionNumber:
        """κ(H) with no entry lost, by the cheapest solver that resolves it."""
        best: ConditionNumber | None = None
        for solver in fitting(self, rtol):
            result = solver.values(self, rtol)
            if isinstance(result, ConditionNumber) and (best is None or result.resolved):
                best = result
            if best is not None and best.resolved:
                break
        assert best is not None
        return best

    def condition(self, *, rtol: float = 1e-8) -> ConditionNumber:
        """Return κ(H), with an interval no wider than ``rtol`` if a more expensive solver can achieve it."""
        return conditions([self], rtol=rtol)[0]

    def doubted(self, kappa: ConditionNumber) -> ConditionNumber:
        """Return ``kappa``; unresolved if zeros may be underflow, zero if all values are of the size of rounding."""
        decided = kappa.resolved or kappa.rank == 0
        lost = self.least_rank is not None and decided and kappa.rank < self.least_rank()
        if lost:
            return unresolved(kappa, self.lost)
        return zero_if_rounding(kappa.because(kappa.cause.joined(self.lost)))


def zero_if_rounding(kappa: ConditionNumber) -> ConditionNumber:
    """Return ``kappa``, or zero if no eigenvalue exceeds the rounding of the terms that were summed up."""
    if kappa.rank or SURE * kappa.lambda_max > kappa.cutoff > 0:
        return kappa
    return replace(zero_matrix(kappa.nullity), cutoff=kappa.cutoff)


@dataclass(frozen=True, eq=False)
class CoreForm(Form):
    """Form of a matrix that is reduced to a core of entries of size about 1, whose nonzero values are wanted."""

    core: np.ndarray
    order: int  # number of values, zeros included
    scale: int  # the values are those of the core times 2**scale
    bounds: Sequence[RankBound]  # functions that return upper bounds of the rank, cheapest first
    exact: Callable[[], int | None] | None  # returns the rank; None: values of the size of round-off are zeros

    def measured(self, rtol: float) -> ConditionNumber:
        """κ from the values of the first solver whose error bounds resolve it to ``rtol``, else from those of all."""
        limit, waiting, solvers = self.order, list(self.bounds), fitting(self, rtol)
        best: ConditionNumber | None = None
        tries: list[Values] = []
        for number, solver in enumerate(solvers, 1):
            values = solver.values(self, rtol)
            assert isinstance(values, Values)
            if tries:
                values = sharpened(values, tries[-1])
            tries.append(values)
            result = conclude(values, order=self.order, limit=limit, scale=self.scale)
            kept = 0 if number >= len(solvers) - 1 else 1
            while result.rank_decision != "structural" and len(waiting) > kept:
                limit = min(limit, waiting.pop(0)())
                result = conclude(values, order=self.order, limit=limit, scale=self.scale)
            if is_good_enough(result, rtol):
                return result
            certain = result.rank_decision == "structural"
            if best is None or best.rank_decision != "structural" or (certain and result.width < best.width):
                best = result
        assert best is not None
        if self.exact is None or best.rank_decision == "structural":
            return best
        rank = self.exact()
        if rank is None:
            # sizes do not tell a small value from a zero
            return unresolved(best, causes.TOO_LARGE)
        settled = [
            conclude(values, order=self.order, limit=min(limit, rank), scale=self.scale, exact=True) for values in tries
        ]
        return min(reversed(settled), key=lambda result: (not result.resolved, result.width, -result.lower))


@dataclass(frozen=True, eq=False)
class SingularForm(CoreForm):
    """Singular values of a tall core (m, n), or with ``power`` 2 their squares.

    ``error`` is a bound, in the 2-norm, of the error in the core, or bounds for its columns (its rows with
    ``across_rows``), which weigh on σ_k as its singular vector does, or for its entries (m, n), below which σ_k may be
    round-off; ``whole`` bounds all of it.
    """

    error: float | np.ndarray
    whole: float
    across_rows: bool = False
    power: int = 2
    jacobi_order: float = math.inf  # largest order that is worth Jacobi's method

    @cached_property
    def normwise(self) -> Values:
        """Singular values with normwise bounds."""
        return svd_values(self.core, self.whole, power=self.power)


@dataclass(frozen=True, eq=False)
class EigenvalueForm(CoreForm):
    """Eigenvalues by size of a symmetric core (n, n).

    ``error`` and ``floor``: bound and typical size, in the 2-norm, of the error already in the core; ``graded``:
    whether Jacobi's method can be better; ``entries``: bounds (n, n) of the errors of the entries and their typical
    sizes, if these are known.
    """

    error: float
    floor: float
    graded: bool
    entries: tuple[np.ndarray, np.ndarray] | None = None


def eigenvalues_of(symmetric: np.ndarray) -> np.ndarray:
    """Ascending eigenvalues of one or a stack of symmetric matrices."""
    return torch.linalg.eigvalsh(torch.from_numpy(symmetric)).numpy()


def svd_values(core: np.ndarray, error: float = 0.0, *, power: int = 2) -> Values:
    """Singular values of ``core`` with the normwise error bound c·eps·σ_max + ``error``."""
    with one_thread():
        values = torch.linalg.svdvals(torch.from_numpy(core)).numpy()
    return Values.normwise(values, core.shape, error, power=power, solver="SVD")


def eigenvalue_values(core: np.ndarray, error: float, floor: float = 0.0) -> Values:
    """Eigenvalues of a symmetric matrix by size, with the normwise error bound."""
    # of large ones torch's LAPACK takes half as long, if it is MKL; scipy's takes too little workspace for blocks
    eigenvalues = np.linalg.eigvalsh(core) if len(core) < LARGE else eigenvalues_of(core)
    eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues), kind="stable")]
    magnitudes = np.abs(eigenvalues)
    values = Values.normwise(magnitudes, core.shape, error, power=1, solver="eigenvalues")
    return values._replace(floors=values.floors + floor, negative=eigenvalues < 0)


Known = TypeVar("Known", bound=Form)


class Solver(ABC, Generic[Known]):
    """Way to find the nonzero values of one kind of form, which a subclass names as the parameter of this class."""

    kind: type[Form]

    def __init_subclass__(cls) -> None:
        (cls.kind,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]

    def fits(self, form: Known, rtol: float) -> bool:
        """Whether the solver can be used on ``form`` for κ with an interval no wider than ``rtol``."""
        return True

    @abstractmethod
    def cost(self, form: Known) -> float:
        """Floating-point operations, about."""

    @abstractmethod
    def values(self, form: Known, rtol: float) -> Values | ConditionNumber | None:
        """Values with bounds of their errors, or κ from a simpler form; None: κ is not resolved."""


class StackSolver(ABC):
    """Way to decompose several forms together."""

    @abstractmethod
    def conditions(self, forms: Sequence[Form], rtol: float) -> dict[int, ConditionNumber]:
        """κ of the forms that it resolves, by index, as by `Form.condition`."""


Registered = TypeVar("Registered", bound=type[Solver] | type[StackSolver])
SOLVERS: list[Solver] = []
STACK_SOLVERS: list[StackSolver] = []


def register(solver: Registered) -> Registered:
    """Add a solver to those that are tried."""
    made = solver()
    if isinstance(made, Solver):
        SOLVERS.append(made)
    else:
        STACK_SOLVERS.append(made)
    return solver


@cache
def discover() -> None:
    """Import the modules of this package, which register their solvers."""
    for module in iter_modules(import_module(__package__).__path__):
        import_module(f"{__package__}.{module.name}")


def fitting(form: Form, rtol: float) -> list[Solver]:
    """Solvers that fit a form, the cheapest first."""
    discover()
    solvers = [solver for solver in SOLVERS if isinstance(form, solver.kind) and solver.fits(form, rtol)]
    return sorted(solvers, key=lambda solver: solver.cost(form))


def sharpened(values: Values, earlier: Values) -> Values:
    """Return ``values`` with the smaller of the error bounds in ``values`` and ``earlier`` for the k-th largest."""
    if (values.power, len(values.magnitudes)) != (earlier.power, len(earlier.magnitudes)):
        return values
    apart = np.abs(values.magnitudes - earlier.magnitudes)
    above = values.errors if values.above is None else values.above
    higher = earlier.errors if earlier.above is None else earlier.above
    return values._replace(
        errors=np.minimum(values.errors, apart + earlier.errors),
        above=np.minimum(above, apart + higher),
    )


def is_good_enough(result: ConditionNumber, rtol: float) -> bool:
    """Whether no more expensive solver is needed: a structural rank, and an interval no wider than ``rtol``."""
    return result.rank_decision == "structural" and result.width <= rtol


def conditions(forms: Sequence[Form], *, rtol: float = 1e-8) -> list[ConditionNumber]:
    """κ of several forms, as by `Form.condition`; factors of one shape without signs are decomposed together."""
    discover()
    kappas: dict[int, ConditionNumber] = {}
    for solver in STACK_SOLVERS:
        kappas |= solver.conditions(forms, rtol)
    for i in range(len(forms)):
        if i not in kappas:
            kappas[i] = forms[i].doubted(forms[i].measured(rtol))
    return [kappas[i] for i in range(len(forms))]

"""Hessians known by their products, such as that of a whole network, and the source that makes blocks of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from hesscond import causes
from hesscond.errors import CaptureError, ConfigError, readable, refuse_large
from hesscond.hessians.coordinates import base
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.hessians.network_operator import HessianOperator
from hesscond.hessians.null_space import NullSpaceAndPreconditioner
from hesscond.operators import Congruence, SymmetricOperator, estimates
from hesscond.spectra import bounded, condition, forms, lanczos, smallest
from hesscond.spectra.solvers import matrix_free

#: Matrices up to this order are decomposed in less time than an iteration takes.
SMALL = 1000
#: Traces and norms are exact up to this order, from as many products, and beyond it from this number of them.
EXACT, PROBES = 4096, 30


class NetworkHessian(base.BlockHessian):
    """H (n, n) of an operator; with a cause by ``saturated``, only known null directions are zeros."""

    def __init__(
        self,
        operator: SymmetricOperator,
        limits: forms.SolverLimits,
        known: Callable[[], NullSpaceAndPreconditioner] = NullSpaceAndPreconditioner,
        error: float = 0.0,
        saturated: Callable[[], causes.Cause] = lambda: causes.NOTHING,
    ) -> None:
        self.operator, self._known, self.limits = operator, known, limits
        #: bound of the rounding in H in the 2-norm
        self.error = error
        self._saturated = saturated
        self._plain: NetworkHessian | None = None
        self._bounds: dict[float, bounded.Bounded] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = {
            name: vars(self)[name]
            for name in ("limits", "error", "_bounds", "extremes", "P", "_plain")
            if name in vars(self)
        }
        gone = {"operator": LeftBehind(self.operator), "_known": refuse_products, "_saturated": refuse_products}
        return kept | gone

    def __deepcopy__(self, memo: dict[int, Any]) -> NetworkHessian:
        return self

    @property
    def order(self) -> int:
        return self.operator.order

    @cached_property
    def known(self) -> NullSpaceAndPreconditioner:
        """Null directions and preconditioner."""
        return self._known()

    def matrix(self) -> torch.Tensor:
        return self._formed

    def product(self, vectors: torch.Tensor) -> torch.Tensor:
        return (self.operator @ vectors.to(self.operator.dtype)).to(torch.float64)

    def _probes(self, probes: int | None) -> int:
        return probes if probes is not None else self.order if self.order <= EXACT else PROBES

    def diagonal(self) -> torch.Tensor:
        few = "_formed" in vars(self) or self.order <= SMALL  # formed, or decomposed sooner than iterated with
        return super().diagonal() if few else estimates.exact_diagonal(self.operator)

    def estimated_diagonal(self, probes: int | None, seed: int) -> estimates.Estimate[torch.Tensor]:
        return estimates.diagonal(self.operator, self._probes(probes), seed=seed)

    def trace(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        return estimates.trace(self.operator, self._probes(probes), seed=seed)

    def frobenius_norm(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        return estimates.frobenius_norm(self.operator, self._probes(probes), seed=seed)

    def damped_condition(self, damping: float, *, rtol: float) -> condition.ConditionNumber:
        damped = NetworkHessian(self.operator.shifted(-damping), self.limits, error=self.error)
        return damped.condition_number(rtol=rtol)

    def scales(self) -> torch.Tensor:
        """Ones (n,), as a view of one number: no scales are known beforehand."""
        return torch.ones(1, dtype=torch.float64, device=self.operator.device).expand(self.order)

    @cached_property
    def _formed(self) -> torch.Tensor:
        refuse_dense(self.order, self.limits.memory)
        H = self.operator.to_dense().to(torch.float64)
        for rows, columns in zip(H.split(matrix_free.ROWS), H.split(matrix_free.ROWS, 1), strict=True):
            mean = (rows + columns.T) / 2
            rows.copy_(mean)
            columns.copy_(mean.T)
        return H

    def bounded(self, uncertainty: float = 0.0) -> bounded.Bounded | None:
        few, error = self.limits.bounding, self.operator.error + self.error + uncertainty
        if few is None or self.order <= few:
            return None
        if error not in self._bounds:
            self._bounds[error] = bounded.bounded_condition(self.operator, few, error=error, memory=self.limits.memory)
        return self._bounds[error]

    def condition_number(self, *, rtol: float = 1e-8) -> condition.ConditionNumber:
        if (bounds := self.bounded()) is not None:
            return bounds.condition
        memory, iterated = self.limits.memory, smallest.least_bytes(self.order, psd=self.operator.psd)
        if memory is not None and iterated > memory and not self.limits.forms(self.order):
            dense = self.order <= self.limits.dense_order
            least = min(iterated, 8 * forms.MATRICES * self.order**2) if dense else iterated
            raise CaptureError(
                f"both ends of the spectrum of {self.order:,} parameters do not fit into the memory: κ takes "
                f"{readable(least)}, and {readable(memory)} are left for it: raise memory to {readable(2 * least)}; at "
                "level='network' products=60 asks for λ_max and a lower bound of κ"
            )
        kappa = forms.ProductForm(self.operator, lambda: self.known.hints, self.limits).condition(rtol=rtol)
        if kappa.resolved and kappa.nullity > sum(V.dimension for V in self.known.directions) and self._saturated():
            kappa = condition.unresolved(kappa, self._saturated())
        kappa = kappa.because(kappa.cause.joined(self._saturated()))
        if self.operator.error:
            kappa = replace(kappa, solver=f"{kappa.solver}, by differences of gradients")
        return kappa.widened(self.error) if self.error else kappa

    @property
    def plain(self) -> NetworkHessian:
        return self._plain or self

    def in_coordinates(self, P: base.Preconditioner | None) -> NetworkHessian:
        if P is None:
            return self
        change = UnitCoordinates(P, range(1), self.order, dtype=self.operator.dtype, device=self.operator.device)
        error = self.error * P.scaled_norm(self.scales(), 1) if self.error else 0.0
        changed = Congruence(self.operator, change)
        hessian = NetworkHessian(changed, self.limits, error=error, saturated=self._saturated)
        hessian._plain, hessian.P = self.plain, P if self.P is None else self.P @ P
        return hessian

    def eigenpairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_dense(self.order, self.limits.memory, matrix_free.EIGENVECTORS, "eigenvectors")
        return super().eigenpairs()

    @cached_property
    def extremes(self) -> torch.Tensor:
        """(n, 2) eigenvectors of the largest and the smallest (algebraic) eigenvalue, to about 1e-4."""
        if self.order <= SMALL:
            return torch.linalg.eigh(self.matrix()).eigenvectors[:, [-1, 0]]
        pairs = lanczos(
            self.operator, 1, "both", tol=1e-4, missed=1.0, memory=self.limits.memory, seed=self.limits.seed
        )
        return pairs.eigenvectors[:, [0, -1]]


def refuse_products(*_: Any, **__: Any) -> NoReturn:
    """Raise the ConfigError of a result that was saved, and is asked for products with its Hessian."""
    raise ConfigError(
        "this result was saved without the model and the data, which products with its Hessian take: it has "
        "κ, to_frame(), checks and the eigenvalues that were asked for before; probe again for anything else"
    )


class LeftBehind(SymmetricOperator):
    """Operator that was saved without its model."""

    def __init__(self, operator: SymmetricOperator) -> None:
        super().__init__(operator.order, operator.dtype, operator.device)
        self.psd = operator.psd

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        refuse_products()


class ZeroPaddedHessian(base.BlockHessian):
    """Hessian with zero rows and columns, those of tokens that do not occur, outside of ``inner`` at ``index``."""

    def __init__(self, inner: base.BlockHessian, order: int, index: torch.Tensor, memory: int) -> None:
        self.inner, self._order, self._index, self._memory = inner, order, index, memory
        self.P = inner.P

    @property
    def plain(self) -> base.BlockHessian:
        return self.inner.plain

    def in_coordinates(self, P: base.Preconditioner | None) -> base.BlockHessian:
        return ZeroPaddedHessian(self.inner.in_coordinates(P), self.order, self._index, self._memory)

    @property
    def order(self) -> int:
        return self._order

    def matrix(self) -> torch.Tensor:
        refuse_dense(self.order, self._memory)
        block = self.inner.matrix()
        matrix = block.new_zeros(self.order, self.order)
        matrix[self._index[:, None], self._index] = block
        return matrix

    def diagonal(self) -> torch.Tensor:
        return self._padded(self.inner.diagonal()[:, None])[:, 0]

    def estimated_diagonal(self, probes: int | None, seed: int) -> estimates.Estimate[torch.Tensor]:
        estimate = self.inner.estimated_diagonal(probes, seed)
        value, error = (self._padded(vector[:, None])[:, 0] for vector in (estimate.value, estimate.error))
        return replace(estimate, value=value, error=error)

    def trace(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        return self.inner.trace(probes, seed)

    def frobenius_norm(self, probes: int | None, seed: int) -> estimates.Estimate[float]:
        return self.inner.frobenius_norm(probes, seed)

    def damped_condition(self, damping: float, *, rtol: float) -> condition.ConditionNumber:
        kappa = self.inner.damped_condition(damping, rtol=rtol)
        return base.with_eigenvalue(kappa, damping, self.order - len(self._index))

    def product(self, vectors: torch.Tensor) -> torch.Tensor:
        return self._padded(self.inner.product(vectors[self._index]))

    def scales(self) -> torch.Tensor:
        return self._padded(self.inner.scales()[:, None])[:, 0]

    def condition_number(self, *, rtol: float = 1e-8) -> condition.ConditionNumber:
        """κ of the nonzero part, with the nullity of the whole Hessian."""
        kappa = self.inner.condition_number(rtol=rtol)
        return replace(kappa, nullity=kappa.nullity + self.order - len(self._index))

    def eigenpairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = self.inner.eigenpairs()
        return values, self._padded(vectors)

    def eigenvalues(self) -> torch.Tensor:
        return self.inner.eigenvalues()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(self.order, rows.shape[1]).index_copy_(0, self._index, rows)


def refuse_dense(order: int, memory: int | None, matrices: int = 1, what: str = "dense Hessian") -> None:
    """Raise a CaptureError if this number of dense matrices does not fit into the memory."""
    advice = "use products with the operator, or raise memory"
    refuse_large(f"the {what} of {order:,} parameters takes", 8 * matrices * order**2, memory, advice, CaptureError)


class BlockSource:
    """Hessians of a loss over data in any coordinates; half of ``memory`` is for graphs, the rest for solvers."""

    latest: HessianOperator  # the operator that was asked for last

    def __init__(
        self,
        evaluate: base.HessianMaker,
        memory: int,
        captured: Callable[[str, int | None], base.BlockHessian] | None = None,
        bounding: int | None = None,  # that of `SolverLimits`
    ) -> None:
        self.memory, self._evaluate, self._captured, self._bounding = memory, evaluate, captured, bounding
        self._operators: dict[str, HessianOperator] = {}

    def block(self, coordinates: base.Coordinates | None, layer: str, unit: int | None) -> base.BlockHessian:
        """Hessian of a unit, or of the layer (``unit`` None), in coordinates (None: the plain ones)."""
        return self.plain(layer, unit) if coordinates is None else coordinates.block(self, layer, unit)

    def plain(self, layer: str, unit: int | None) -> base.BlockHessian:
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

    def products(
        self,
        operator: SymmetricOperator,
        known: Callable[[], NullSpaceAndPreconditioner] = NullSpaceAndPreconditioner,
        error: float = 0.0,
        *,
        unformed: int | None = None,
    ) -> NetworkHessian:
        """Block of an operator that is derived from the `latest` one.

        ``error``: bound of its rounding, if known; ``unformed``: products that bound κ where the matrix is not formed.
        """
        H = self.latest
        limits = forms.SolverLimits(memory=max(self.memory - H.held, self.memory // 2), bounding=self._bounding)
        fits = limits.memory is None or 8 * bounded.LEAST_VECTORS * operator.order <= limits.memory
        if limits.bounding is None and fits and not limits.forms(operator.order):
            limits = replace(limits, bounding=unformed)
        return NetworkHessian(operator, limits, known, error, lambda: H.saturated)

"""A Hessian kept as its factor, ∇²L = Fᵀ diag(±1) F."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from hesscond.capture import EntryBounds
from hesscond.hessians.coordinates import LOST_IN_FACTOR, LOST_IN_SQUARE, BlockHessian, LinearCoordinates
from hesscond.spectra import ConditionNumber, FactorForm, conditions
from hesscond.spectra.factored import EPS, error_factor
from hesscond.spectra.rank import distinct_rows


@dataclass(frozen=True)
class FactoredHessian(BlockHessian):
    """Ĥᵀ S Ĥ of one unit with ŵ = [b, w] (or w alone), or of u units together, from rows and signs.

    Attributes
    ----------
    rows : (m, u n̂) float64
        Ĥ with ``root``; or F itself: one row for each rank-one term of S, or after streaming a triangular factor.
    root : (m,) float64 or None
        √|S_jj|; None: all 1.
    sign : (m,) or None
        Signs of S_jj or of the rank-one terms; None: S ≥ 0.
    row_error : (u n̂,) or (m, u n̂) tensor, EntryBounds or None
        Bounds of the error in each column of ``rows``, in the 2-norm, or in each entry; None: they are what was asked
        for.
    units
        u, on each of which a preconditioner acts.
    rank_limit
        An upper bound of the rank that is known from elsewhere.
    spread : (u n̂,) or None
        d such that round-off in S changes entry (k, l) of H by eps·d_k·d_l; None: S has none.
    vanishing
        Whether zeros of S may be numbers that double precision does not hold, so that they bound no rank.
    """

    rows: torch.Tensor
    root: torch.Tensor | None
    sign: torch.Tensor | None
    row_error: torch.Tensor | EntryBounds | None = None
    units: int = 1
    rank_limit: int | None = None
    spread: torch.Tensor | None = None
    vanishing: bool = False

    @property
    def order(self) -> int:
        """Number of parameters u n̂."""
        return self.rows.shape[1]

    def factor(self, P: LinearCoordinates | None = None) -> torch.Tensor:
        """|S|^½ Ĥ P (m, k): H = FᵀF where S ≥ 0, and Fᵀ diag(sign) F otherwise."""
        rows = self.rows if P is None else P.multiplied(self.rows, self.units)
        return rows if self.root is None else rows * self.root[:, None]

    def matrix(self, P: LinearCoordinates | None = None) -> torch.Tensor:
        """The dense Hessian (k, k)."""
        F = self.factor(P)
        return F.T @ (F if self.sign is None else F * self.sign[:, None])

    def diagonal(self) -> torch.Tensor:
        """(k,) the diagonal of H: H is not formed."""
        squares = self.factor().square()
        return (squares if self.sign is None else squares * self.sign[:, None]).sum(0)

    def product(self, vectors: torch.Tensor, P: LinearCoordinates | None = None) -> torch.Tensor:
        """H V or PᵀHP V (k, c), from the factor."""
        F = self.factor(P)
        images = F @ vectors
        return F.T @ (images if self.sign is None else images * self.sign[:, None])

    def scales(self) -> torch.Tensor:
        """(k,) the norms of the factor's columns, as far as they are known."""
        found = torch.linalg.vector_norm(self.factor(), dim=0)
        if self.spread is not None:
            found = torch.maximum(found, LOST_IN_SQUARE * self.spread)
        if self.row_error is not None:
            error = self.row_error.entries() if isinstance(self.row_error, EntryBounds) else self.row_error
            found = torch.maximum(found, LOST_IN_FACTOR * (error if error.ndim == 1 else error.norm(dim=0)))
        return found

    def condition_numbers(
        self, coordinates: Sequence[LinearCoordinates | None], *, rtol: float = 1e-8
    ) -> list[ConditionNumber]:
        """κ in several coordinate systems at once."""
        return conditions_of([self.forms(coordinates)], rtol=rtol)[0]

    def forms(self, coordinates: Sequence[LinearCoordinates | None]) -> FactorForms:
        """What is known of H in several coordinates, which are not looked at again."""
        cancels = tuple(P is not None and P.cancels for P in coordinates)
        return FactorForms(self.form, [self.form(P) for P in coordinates], cancels)

    def form(self, P: LinearCoordinates | None = None) -> FactorForm:
        """What is known of H or PᵀHP."""
        indefinite = self.sign is not None or self.spread is not None
        return FactorForm(
            self.factor(P),
            signs=self._signs if indefinite else None,
            error=self.factor_error(P),
            rank_bound=self.rank_bound,
            spread=spread_in(self.spread, P, self.units),
            least_rank=partial(self._span, P) if self.vanishing else None,
        )

    def _span(self, P: LinearCoordinates | None) -> int:
        """The rank that H has if no entry of S is zero; a bound of it where Ĥ is not at hand."""
        if self.root is None:
            return self.rank_bound()
        return FactorForm(self.rows if P is None else P.multiplied(self.rows, self.units)).condition().rank

    @property
    def _signs(self) -> torch.Tensor:
        return self.rows.new_ones(len(self.rows)) if self.sign is None else self.sign

    def eigenvalues(self, P: LinearCoordinates | None = None) -> torch.Tensor:
        form = self.form(P)
        return torch.from_numpy(np.ascontiguousarray(form.eigenvalues(form.condition()))).to(self.rows.device)

    def eigenpairs(self, P: LinearCoordinates | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """All nonzero eigenvalues, descending, and their eigenvectors."""
        form = self.form(P)
        pairs = form.eigenpairs(form.condition())
        values, vectors = (torch.from_numpy(np.ascontiguousarray(part)).to(self.rows.device) for part in pairs)
        return values, vectors

    def rank_bound(self) -> int:
        """Distinct active samples, or features: one for each that varies over them and one for all constant ones.

        It holds in all coordinates, since P is linear; a transformed dead feature no longer looks dead.
        """
        known = self.order if self.rank_limit is None else self.rank_limit
        if self.root is None:
            if self.vanishing:
                return min(known, *self.rows.shape)
            return min(known, int((self.rows != 0).any(1).sum()), int((self.rows != 0).any(0).sum()))
        active = distinct_rows((self.rows if self.vanishing else self.rows[self.root != 0]).cpu().numpy())
        if len(active) == 0:
            return 0
        low, high = active.min(0), active.max(0)
        varying = low != high
        return min(known, len(active), int(varying.sum()) + int((low[~varying] != 0).any()))

    def error_norm(self, P: LinearCoordinates | None) -> float:
        """A bound, in the 2-norm, of the error in the factor."""
        if P is None and isinstance(self.row_error, EntryBounds):
            return float(self.row_error.squared_rows().sum().sqrt())
        return float(np.linalg.norm(self.factor_error(P)))

    def factor_error(self, P: LinearCoordinates | None) -> float | np.ndarray:
        """Bounds of the error in each column of the factor, or in each entry."""
        if self.row_error is None:
            if P is None or not P.cancels:
                return 0.0
            return P.carried(error_factor(*self.rows.shape) * EPS * self.scales()[None], self.units)[0].cpu().numpy()
        error = self.row_error.entries() if isinstance(self.row_error, EntryBounds) else self.row_error
        if P is None:
            return error.cpu().numpy()
        if error.ndim == 2:
            # the entries' errors, and those of the product rows·P, carried through |P|
            each = error + 16 * EPS * self.rows.abs()
            return P.carried(each, self.units).cpu().numpy()
        norms = torch.linalg.vector_norm(self.rows, dim=0)
        per_column = error + error_factor(*self.rows.shape) * EPS * norms
        return P.carried(per_column[None], self.units)[0].cpu().numpy()


class FactorForms(NamedTuple):
    """H in several coordinates.

    Attributes
    ----------
    plain
        Makes the form in the plain coordinates.
    forms
        Those asked for.
    cancels
        Whether the rounding of P may hide what is zero in the plain coordinates.
    """

    plain: Callable[[], FactorForm]
    forms: list[FactorForm]
    cancels: tuple[bool, ...]

    def settled(self, found: list[ConditionNumber], rtol: float) -> list[ConditionNumber]:
        """κ of the forms, with the rank in the plain coordinates where that decides: P does not make it larger."""
        open_ones = [k for k, cancels in enumerate(self.cancels) if cancels and not found[k].resolved]
        if open_ones:
            plain = self.plain().condition(rtol=rtol)
            for k in open_ones:
                if plain.resolved and found[k].rank == plain.rank:
                    found[k] = replace(self.forms[k], rank_bound=lambda: plain.rank).condition(rtol=rtol)
        return found


def conditions_of(parts: Sequence[FactorForms], *, rtol: float = 1e-8) -> list[list[ConditionNumber]]:
    """κ of several Hessians, each in its coordinates; what has one shape is decomposed together."""
    found = iter(conditions([form for part in parts for form in part.forms], rtol=rtol))
    return [part.settled(list(islice(found, len(part.forms))), rtol) for part in parts]


def spread_in(spread: torch.Tensor | None, P: LinearCoordinates | None, units: int) -> np.ndarray | None:
    """|P|ᵀd, which is for PᵀHP what d is for H."""
    if spread is None:
        return None
    if P is not None:
        spread = P.carried(spread[None], units)[0]
    return spread.cpu().numpy()


def noise_of(spread: torch.Tensor | None, P: LinearCoordinates | None, units: int) -> float:
    """‖|P|ᵀd‖², the round-off in PᵀHP that d stands for in units of eps."""
    found = spread_in(spread, P, units)
    return 0.0 if found is None else float(found @ found)

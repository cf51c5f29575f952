"""Van der Sluis, Condition numbers and equilibration of matrices, Numerische Mathematik 14 (1969)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from hesscond.scaling import optimal_diagonal_scaling
from hesscond.theorems.base import Claim, LayerStatement, Observation, Outcome, decided, not_applicable, register
from hesscond.theorems.matrices import Kappa, equilibrated, kappa, random_matrix, random_size


@register
class VanDerSluis(LayerStatement):
    """Row and column equilibration is within the square root of their number of the best diagonal scaling."""

    id = "van-der-sluis"
    aliases: ClassVar[Mapping[str, str]] = {"prec-theorem-2": "rows", "bnp-lemma-a1": "columns"}
    title = "equilibration is nearly optimal"
    source = "Van der Sluis 1969; BNP Lemma A1; PREC Theorem 2"
    text = (
        "κ⁺(EA) ≤ √m · min over diagonal D of κ⁺(DA) for a matrix A with m rows, where E makes all rows of norm 1; the "
        "same for columns. True for any rank, rows of zeros left out: with y = argmin ‖EAy‖ / ‖y‖ on the row space, "
        "‖DA‖ ≥ max d_i‖a_i‖ and ‖DAy‖ ≤ max (d_i‖a_i‖) ‖EAy‖, so κ⁺(DA) ≥ 1/σ_min(EA), and ‖EA‖₂ ≤ ‖EA‖_F = √m."
    )
    hypotheses = ("no row (column) of zeros, or these are left out",)
    claims = (
        Claim("rows", "κ⁺(EA) ≤ √m · min_D κ⁺(DA)", True),
        Claim("columns", "κ⁺(AE) ≤ √n · min_D κ⁺(AD)", True),
    )
    trials = 60

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        A = random_matrix(rng, random_size(rng), random_size(rng))
        return [self.side(A), self.side(A.T)]

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """The centred inputs of a layer, samples × features; their columns are what BNP equilibrates."""
        if len(seen.centred) < seen.samples:
            rows = not_applicable("a triangular factor of the inputs has other rows")
        else:
            rows = self.side(seen.centred)
        return [rows, self.side(seen.centred.T)]

    def side(self, A: np.ndarray) -> Outcome:
        """The claim for the rows of A."""
        return nearly_optimal(kappa(equilibrated(A)), A)


def nearly_optimal(found: Kappa, A: np.ndarray, rows: int | None = None) -> Outcome:
    """κ⁺ ≤ √m · min_D κ⁺(DA), against certified bounds of the minimum on both sides."""
    optimum = optimal_diagonal_scaling(A, side="row")
    allowed = np.sqrt(len(A) if rows is None else rows)
    return decided(found.lower / optimum.kappa, found.upper / optimum.lower, float(allowed))

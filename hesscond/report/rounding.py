"""Where a study's κ may be the round-off of the activations that it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hesscond.study.store import StoredRun

#: κ(PᵀHP) from which the smallest singular value of the normalized features is of the size of their own rounding: u⁻²
#: with float32's unit round-off u = 2⁻²⁴.
FLOAT32_LIMIT = float(2**48)


def rounded_probes(runs: Sequence[StoredRun]) -> tuple[int, int]:
    """How many probes cannot tell their smallest eigenvalue from the rounding of float32 activations, and of how many.

    The bounds of κ hold for the activations as they are. Of those that a float32 network computed
    (``precision = "as-trained"``) each is rounded, so that features which depend on each other in exact arithmetic, as
    behind layer normalization, are independent by round-off only: then κ(PᵀHP) with centred and normalized features
    exceeds `FLOAT32_LIMIT`. That shows where there are more samples than parameters; with fewer, such a κ is that of a
    softmax that saturates.
    """
    rounded = probes = 0
    for run in runs:
        if run.config["probe"].get("precision", "as-trained") != "as-trained":
            continue
        rows = run.table("probe").query("samples > n_params")
        kappas = rows["kappa_preconditioned"].to_numpy(dtype=float)
        probes += len(kappas)
        rounded += int(np.sum(np.isfinite(kappas) & (kappas > FLOAT32_LIMIT)))
    return rounded, probes


def rounding_note(runs: Sequence[StoredRun]) -> str:
    """A sentence about them; empty if there are none."""
    rounded, probes = rounded_probes(runs)
    if not rounded:
        return ""
    return (
        f"{rounded} of {probes} probes found κ(PᵀHP) above {FLOAT32_LIMIT:.1e}, which with float32 activations "
        '(precision = "as-trained") may be round-off; set precision = "float64" in [probe] to know.'
    )

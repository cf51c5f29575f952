"""κ of H = FᵀF with many columns, from what is small: the Gram matrix FFᵀ, or a triangular factor of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hesscond.spectra.condition import ConditionNumber, Values, conclude, is_good_enough, zero_matrix
from hesscond.spectra.factored import EPS, GRAM_RANGE, GRAM_RTOL, as_array, factor_condition, uniform
from hesscond.spectra.signed import signed_condition
from hesscond.spectra.threads import one_thread


def dual_condition(
    gram: Callable[[], tuple[torch.Tensor, float]],
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]],
    *,
    order: int,
    rank_bound: Callable[[], int],
    rtol: float = 1e-8,
) -> ConditionNumber:
    """κ of FᵀF for F (m, n), m ≤ n, whose n columns are too many to keep.

    Parameters
    ----------
    gram
        Forms FFᵀ (m, m), with a bound, in the 2-norm, of its error.
    triangular
        Forms R (m, m) with RᵀR = FFᵀ, and bounds, in the 2-norm, of the error in each of its columns. It is called
        only if the Gram matrix does not resolve κ to ``rtol``.
    order
        n.
    rank_bound
        Finds an upper bound of the rank.
    rtol
        Relative width of κ's interval that is good enough.
    """
    limit: int | None = None
    if rtol >= GRAM_RTOL:
        K, error = gram()
        top = float(K.diagonal().sum())
        if top == 0:
            return zero_matrix(order)
        if GRAM_RANGE[0] < top < GRAM_RANGE[1]:
            with one_thread():
                values = as_array(torch.linalg.eigvalsh(K)).astype(float)[::-1].clip(min=0.0)
            spread = uniform(values, (len(K), len(K)), EPS * float(values[0]), error)
            limit = rank_bound()
            found = conclude(Values(values, **spread, power=1, solver="dual Gram"), order=order, limit=limit, scale=0)
            if is_good_enough(found, rtol):
                return found
    R, errors = triangular()
    # a Gram matrix once more would be no better
    finer = min(rtol, GRAM_RTOL / 2)
    found = factor_condition(R, rank_bound=lambda: rank_bound() if limit is None else limit, rtol=finer, error=errors)
    return replace(found, nullity=order - found.rank, solver=f"dual {found.solver}")


def dual_signed_condition(
    triangular: Callable[[], tuple[torch.Tensor, np.ndarray]],
    signs: torch.Tensor,
    *,
    order: int,
    rank_bound: Callable[[], int],
    rtol: float = 1e-8,
    noise: float = 0.0,
) -> ConditionNumber:
    """κ of Fᵀ diag(signs) F for F (m, n), m ≤ n, from R with RᵀR = FFᵀ.

    ``noise`` as in `signed_condition`; otherwise as `dual_condition`.
    """
    R, error = triangular()
    found = signed_condition(
        R.T, signs, rank_bound=rank_bound, rtol=rtol, error=float(np.linalg.norm(error)), noise=noise
    )
    return replace(found, nullity=order - found.rank, solver=f"dual {found.solver}")

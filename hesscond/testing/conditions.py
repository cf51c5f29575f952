"""Assertions about condition numbers: below or above a limit, and improved by a preconditioner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from hesscond.capture import Batch, LossFunction
from hesscond.errors import ConfigError
from hesscond.expectations.intervals import Interval, Truth, less, less_equal, shown
from hesscond.testing.decisions import Assertion, Finding, checked_share, conclude, policy_of
from hesscond.testing.measured import (
    Measure,
    cells_of,
    evidence,
    interval,
    measured,
    name_of,
    said_of,
    told,
    where,
)


def assert_condition_number(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch | Iterable[Batch],
    *,
    layer: str | Sequence[str] | None = None,
    below: float | None = None,
    above: float | None = None,
    unit: int | Sequence[int] | None = None,
    level: str = "unit",
    method: Measure = None,
    share: float = 1.0,
    unresolved: str | None = None,
    **options: Any,
) -> Assertion:
    """Assert κ < below, κ > above, or both, of every Hessian named.

    It passes only if the bounds of κ decide for it, and fails only if they decide against it.

    Parameters
    ----------
    model, loss_fn, batch, level, method
        As for `hesscond.probe`; ``method`` may be a dense (n, n) tensor P, too.
    layer
        One or several; None: all.
    below, above
        Limits of κ, at least one.
    unit
        One or several; None: all. It takes ``layer``.
    share
        Of how many of the Hessians it must be true at least, as a share of them.
    unresolved
        If the bounds do not decide: ``"fail"``, ``"warn"``, ``"skip"`` or ``"pass"``. None: what pytest was told, or
        fail. A Hessian that is zero has no κ and decides nothing.
    **options
        Further ones of `hesscond.probe`: dtype, rtol, memory, reduction.

    Returns
    -------
    Assertion
        With what was found of every Hessian.

    Raises
    ------
    ConditionNumberError
        The bounds decide against it.
    UnresolvedError
        They do not decide, and the policy is to fail. Both are an ``AssertionError``.
    ConfigError
        Bad use.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, batch = nn.Linear(4, 3), (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    >>> assert_condition_number(model, nn.CrossEntropyLoss(), batch, below=100).outcome
    'passed'
    """
    __tracebackhide__ = True
    limits = [(sign, limit) for sign, limit in (("<", below), (">", above)) if limit is not None]
    if not limits:
        raise ConfigError("give a limit of κ: below=…, above=… or both")
    for _, limit in limits:
        if not 0 < limit < math.inf:
            raise ConfigError(f"a limit of κ is a positive finite number, not {limit}")
    checked_share(share)
    policy = policy_of(unresolved)
    found = measured(model, loss_fn, batch, layer, unit, level, method, options)
    findings = []
    for place, kappa in found.items():
        known = interval(kappa)
        truths = [
            less(known, Interval.point(limit)) if sign == "<" else less(Interval.point(limit), known)
            for sign, limit in limits
        ]
        margin = min(limit / kappa.upper if sign == "<" else kappa.lower / limit for sign, limit in limits)
        cells = {**cells_of(place), "κ": told(kappa), **evidence(kappa)}
        findings.append(Finding(decided(truths, kappa.rank), margin, cells, where(place), f"κ = {told(kappa)}"))
    claim = " and ".join(f"κ {sign} {limit:g}" for sign, limit in limits)
    return conclude(Assertion(claim, tuple(findings), share, said_of(level, name_of(method))), policy)


def assert_preconditioner_improves(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch | Iterable[Batch],
    method: Measure,
    *,
    factor: float = 1.0,
    layer: str | Sequence[str] | None = None,
    unit: int | Sequence[int] | None = None,
    level: str = "unit",
    share: float = 1.0,
    unresolved: str | None = None,
    **options: Any,
) -> Assertion:
    """Assert κ(H) / κ(PᵀHP) ≥ factor, for every Hessian named.

    The ratio is known to lie between the lower bound of κ(H) over the upper bound of κ(PᵀHP) and the other way
    round; it passes only if all of that decides for it, and fails only if all of it decides against it.

    Parameters
    ----------
    model, loss_fn, batch, level
        As for `hesscond.probe`.
    method
        Whose coordinates, as for `hesscond.probe`, or a dense (n, n) tensor P of one unit's parameters
        [bias, weights].
    factor
        By how much κ gets smaller at least; 1: it gets no larger.
    layer, unit, share, unresolved, **options
        As for `assert_condition_number`.

    Returns
    -------
    Assertion
        With what was found of every Hessian.

    Raises
    ------
    ConditionNumberError
        The bounds decide against it.
    UnresolvedError
        They do not decide, and the policy is to fail. Both are an ``AssertionError``.
    ConfigError
        Bad use.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> inputs = torch.randn(50, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0]) + 5
    >>> model, batch = nn.Linear(4, 1), (inputs, torch.randn(50, 1))
    >>> assert_preconditioner_improves(model, nn.MSELoss(), batch, "bnp", factor=1e4).outcome
    'passed'
    """
    __tracebackhide__ = True
    if method is None:
        raise ConfigError("say which preconditioner: a method's name, a Preconditioner or a matrix P")
    if not 0 < factor < math.inf:
        raise ConfigError(f"factor must be positive and finite, not {factor}")
    checked_share(share)
    policy = policy_of(unresolved)
    plain = measured(model, loss_fn, batch, layer, unit, level, None, options)
    own = measured(model, loss_fn, batch, layer, unit, level, method, options)
    findings = []
    for place, kappa in plain.items():
        other = own[place]
        ratio = interval(kappa) / interval(other)
        gain = shown(float(ratio.lower), float(ratio.upper))
        truth = less_equal(Interval.point(factor), ratio)
        cells = {
            **cells_of(place),
            "κ(H)": told(kappa),
            "κ(PᵀHP)": told(other),
            "κ(H)/κ(PᵀHP)": gain,
            "width": width_of(ratio),
            "rank": f"{kappa.rank} → {other.rank} of {kappa.rank + kappa.nullity}",
            "cutoff of PᵀHP": f"{other.cutoff:.2g}",
            "gap": f"{other.gap:.2g}",
            "solver": other.solver,
        }
        holds = decided([truth], min(kappa.rank, other.rank))
        said = f"κ {told(kappa)} → {told(other)}, by {gain}"
        findings.append(Finding(holds, float(ratio.lower) / factor, cells, where(place), said))
    name = name_of(method)
    claim = f"κ(H)/κ(PᵀHP) ≥ {factor:g} with {name}"
    return conclude(Assertion(claim, tuple(findings), share, said_of(level, "plain")), policy)


def width_of(ratio: Interval) -> str:
    """The relative width of a ratio's interval; empty if it has no end."""
    found = float((ratio.upper - ratio.lower) / ratio.upper) if math.isfinite(float(ratio.upper)) else math.nan
    return "" if math.isnan(found) else f"{1.05 * found:.1e}"


def decided(truths: Sequence[Truth], rank: int) -> bool | None:
    """Whether all are true; None: not decided, as for a Hessian that is zero."""
    if rank == 0:
        return None
    if all(bool(np.all(truth.certain)) for truth in truths):
        return True
    return None if all(bool(np.all(truth.possible)) for truth in truths) else False

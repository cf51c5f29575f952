"""The assertion that a published statement holds, on random cases or on a layer of a given model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hesscond.capture import MEMORY, Batch, LossFunction, capture
from hesscond.errors import ConfigError
from hesscond.hessians.build import unit_hessian
from hesscond.probing import probe
from hesscond.testing.assertions import Assertion, Finding, conclude, policy_of
from hesscond.theorems import LayerNetwork, LayerStatement, Observation, Tally, observed_inputs, statement, verify

STATUSES = ("holds", "violated")


def assert_statement(
    id: str,
    *,
    trials: int | None = None,
    seed: int = 0,
    model: nn.Module | None = None,
    loss_fn: LossFunction | None = None,
    batch: Batch | None = None,
    layer: str | None = None,
    unit: int | Sequence[int] | None = None,
    status: str = "holds",
    decided: float = 1.0,
    unresolved: str | None = None,
) -> Assertion:
    """Assert that a published statement holds in every case tried, or that it is violated in one.

    Without a model the cases are random, as in ``hesscond verify``. With a model they are the units of a dense layer,
    on the inputs and curvature that it has there; that requires a statement about a layer.

    Parameters
    ----------
    id
        Id of a statement, as ``hesscond statements`` lists it.
    trials, seed
        Number of random cases (by default that of the statement), and their seed.
    model, loss_fn, batch
        All three or none; the batch is (inputs, targets).
    layer
        A ``torch.nn.Linear`` of the model.
    unit
        One or several units; None: all.
    status
        ``"holds"``, or ``"violated"`` for a statement that is to be refuted: by one case in which bounds decide
        against a claim.
    decided
        Smallest share of the cases to which a claim applies in which bounds must decide; with fewer it is unresolved,
        and so is a claim that never applies.
    unresolved
        As for `assert_condition_number`.

    Returns
    -------
    Assertion
        Assertion with the finding for every published claim.

    Raises
    ------
    ConditionNumberError
        The opposite was found.
    UnresolvedError
        Too few cases are decided, and the policy is to fail. Both are an ``AssertionError``.
    ConfigError
        Bad use: no such statement, or one that does not speak of a layer.

    Examples
    --------
    >>> assert_statement("bnp-theorem-4", trials=5).outcome
    'passed'
    >>> assert_statement("wc-theorem-1", trials=5, status="violated").outcome
    'passed'
    """
    __tracebackhide__ = True
    if status not in STATUSES:
        raise ConfigError(f"status is one of {', '.join(STATUSES)}, not {status!r}")
    if not 0 < decided <= 1:
        raise ConfigError(f"decided must lie above 0 and be at most 1, not {decided}")
    policy = policy_of(unresolved)
    refuted: set[str] = set()
    if model is None and loss_fn is None and batch is None and layer is None and unit is None:
        verdict = verify(id, trials=trials, seed=seed, counterexamples=status == "violated")
        tallies: Sequence[Tally] = verdict.tallies
        refuted = {example.claim for example in verdict.counterexamples}
        cases = "trials"
    elif model is None or loss_fn is None or batch is None or layer is None:
        raise ConfigError("a statement on a model takes model, loss_fn, batch and layer: give all of them")
    elif trials is not None:
        raise ConfigError("trials are random cases, and with a model there are none: leave them out")
    else:
        tallies, cases = on_layer(id, model, loss_fn, batch, layer, unit), "units"
    published = [tally for tally in tallies if tally.claim.published]
    findings = tuple(finding(tally, tally.claim.name in refuted, decided, cases) for tally in published)
    if status == "violated":
        # one claim that is refuted is enough
        found = tuple(turned(one) for one in findings)
        return conclude(Assertion(f"{id} to be violated", found, 1 / len(found), "published claims"), policy)
    return conclude(Assertion(f"{id} to hold", findings, what="published claims"), policy)


def on_layer(
    id: str,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    layer: str,
    unit: int | Sequence[int] | None,
) -> list[Tally]:
    """Outcomes for the units of a layer, tallied by claim."""
    one = statement(id)
    if not isinstance(one, LayerStatement):
        raise ConfigError(f"{id} does not speak of a layer: it can be checked on random cases only")
    units = [unit] if isinstance(unit, int) else unit
    plain = probe(model, loss_fn, batch, [layer], units=units)
    bnp = probe(model, loss_fn, batch, [layer], units=units, method="bnp")
    module = model.get_submodule(layer)
    if not isinstance(module, nn.Linear):
        raise ConfigError(f"layer {layer!r} is a {type(module).__name__}: only a Linear one is looked at here")
    if "Linear" not in one.layers:
        raise ConfigError(f"{id} speaks of {' and '.join(one.layers)} layers: follow it along a study (hesscond study)")
    captured = capture(model, loss_fn, batch, [layer], units={layer: plain[layer].units})[layer]
    H = captured.h.to(torch.float64).cpu().numpy()
    network = LayerNetwork(model, loss_fn, batch, layer)
    weight = module.weight.detach().to(torch.float64).cpu().numpy()
    tallies = [Tally(claim) for claim in one.claims]
    found = zip(plain[layer].units, plain[layer].conditions, bnp[layer].conditions, strict=True)
    for number, kappa, kappa_preconditioned in found:
        block = unit_hessian(captured, number, MEMORY)
        seen = Observation(
            *observed_inputs(H),
            len(H),
            weight,
            kappa,
            kappa_preconditioned,
            means=H.mean(0),
            unit=number,
            hessian=block,
            network=network,
        )
        for tally, outcome in zip(tallies, one.observe(seen), strict=True):
            tally.add(outcome, number)
    return tallies


def finding(tally: Tally, refuted: bool, decided: float, cases: str) -> Finding:
    """Finding for a claim; ``refuted``: whether a counterexample was found by search."""
    applicable = tally.holds + tally.violated + tally.unresolved
    holds: bool | None = None
    if tally.violated or refuted:
        holds = False
    elif applicable and tally.holds >= decided * applicable * (1 - 1e-12):
        holds = True
    reasons = sorted(tally.reasons, key=lambda reason: -tally.reasons[reason])
    counted = f"{tally.violated} of {applicable} {cases} violate it" if tally.violated else ""
    if not tally.violated:
        counted = "a certified counterexample" if refuted else f"{tally.holds} of {applicable} {cases} decided for it"
    worst = "" if tally.worst == -math.inf else f"{tally.worst:.3g}"
    cells = {
        "claim": tally.claim.name,
        "holds": str(tally.holds),
        "violated": str(tally.violated),
        "unresolved": str(tally.unresolved),
        "n/a": str(tally.not_applicable),
        "first": "" if tally.first_violation is None else f"{cases[:-1]} {tally.first_violation}",
        "used": worst,
        "reason": reasons[0][:60] if reasons else "",
    }
    margin = math.inf if tally.worst <= 0 else 1 / tally.worst
    return Finding(holds, margin, cells, f"claim {tally.claim.name!r}", counted)


def turned(one: Finding) -> Finding:
    """The same finding for the opposite assertion, that the claim is violated."""
    margin = 0.0 if one.margin == math.inf else 1 / one.margin
    return Finding(None if one.holds is None else not one.holds, margin, one.cells, one.place, one.told)

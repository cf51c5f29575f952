"""``hesscond check``: whether stored runs meet what is expected of them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Annotated, Any

import typer
from rich.text import Text

from hesscond.commands import options, printing
from hesscond.errors import ConfigError
from hesscond.expectations import Decision, Expectation, decisions

POLICIES = ("fail", "pass")
STYLES = {"met": "green", "failed": "red", "unresolved": "yellow"}

#: Shared with ``hesscond study``.
Expect = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        metavar="EXPR",
        help='What must hold in all rows of the log, as "kappa_preconditioned < kappa / 10"; repeatable.',
    ),
]
Unresolved = Annotated[
    str, typer.Option(help="How to count an expectation that the bounds of κ cannot decide: fail | pass.")
]


def check(
    runs: options.Runs,
    expect: Expect = None,
    unresolved: Unresolved = "fail",
    github: Annotated[
        bool | None,
        typer.Option("--github/--no-github", help="Annotate the pull request. Default: if GITHUB_ACTIONS is true."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Check expectations of stored runs, as far as the bounds of κ decide them; exit code 1 if one is not met.

    A column is one of the tables probe (kappa, kappa_preconditioned, kappa_D, rank, …), evaluation (test_loss,
    test_accuracy) and training (loss). A comparison must hold in all rows: for each iteration, layer, unit and kind of
    data. A filter selects rows: kappa[data = train, layer = fc3, iteration > 100]. median, mean, min, max and
    quantile(kappa, 0.9) reduce them to one value, last and first to one per layer, unit and kind of data;
    share(…) >= 0.9 and any(…) require less than all rows. METHOD.column compares runs of the same seed. Also allowed:
    + - * /, < <= > >= == !=, and, or, not, parentheses.

    An expectation is met only if it holds for every value within the bounds, failed only if it holds for none,
    else unresolved. A run that diverged fails; one that is not finished is unresolved.

    In a shell, put quotation marks around each expression.

    Example: hesscond check runs/mine --expect "median(kappa_preconditioned) < median(kappa) / 10"

    Example: hesscond check runs/mine --expect "last(bnp.test_accuracy) > last(vanilla.test_accuracy)"
    """
    if not expect:
        raise ConfigError('say what is expected: --expect "kappa_preconditioned < kappa / 10", for example')
    options.choice("--unresolved", unresolved, POLICIES)
    expectations = [Expectation.of(text) for text in expect]
    decided = decisions(expectations, options.collect(runs))
    if as_json:
        typer.echo(json.dumps([as_dict(decision, unresolved) for decision in decided], indent=1))
    else:
        show(decided)
    refuse(decided, unresolved, github=github, quiet=as_json)


def passes(decision: Decision, unresolved: str) -> bool:
    """Whether a decision counts as passed."""
    return decision.status == "met" or (decision.status == "unresolved" and unresolved == "pass")


def refuse(decided: Sequence[Decision], unresolved: str, *, github: bool | None, quiet: bool) -> None:
    """Annotate and leave with exit code 1 if something is not met."""
    refused = [decision for decision in decided if not passes(decision, unresolved)]
    if os.environ.get("GITHUB_ACTIONS") == "true" if github is None else github:
        annotate(decided, refused, sys.stderr if quiet else sys.stdout)
    if refused:
        raise typer.Exit(printing.UNMET)


def annotate(decided: Sequence[Decision], refused: Sequence[Decision], stream: IO[str]) -> None:
    """Write a line for each decision not met, which GitHub shows: an error if it is refused, else a warning."""
    for decision in decided:
        if decision.status != "met":
            command = "error" if decision in refused else "warning"
            title = f"{decision.status}: {decision.expectation} ({decision.runs})"
            stream.write(f"::{command} title={escaped_property(title)}::{escaped(decision.reason)}\n")


def escaped(text: str) -> str:
    """Escape a text for the message of a GitHub annotation."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    """Escape a text for a property of a GitHub annotation, which ends at a comma and at a colon."""
    return escaped(text).replace(":", "%3A").replace(",", "%2C")


def show(decided: Sequence[Decision]) -> None:
    """Print each decision with what was found below it, and how many there are."""
    for decision in decided:
        status, rest = decision.status, f": {decision.expectation} ({decision.runs})\n  {decision.reason}"
        text = Text(printing.at_words(f"{status}{rest}", printing.stdout))
        text.stylize(STYLES[status], 0, len(status))
        printing.stdout.print(text, soft_wrap=True)
    counts = {status: sum(decision.status == status for decision in decided) for status in STYLES}
    printing.stdout.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))


def as_dict(decision: Decision, unresolved: str) -> dict[str, Any]:
    """JSON object of a decision; an end of an interval that is not known is null."""
    values = {name: [end if math.isfinite(end) else None for end in ends] for name, ends in decision.values.items()}
    return asdict(decision) | {"ok": passes(decision, unresolved), "values": values}

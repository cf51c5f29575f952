"""``hesscond verify`` and ``hesscond statements``: what the papers say, and what is true of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hesscond.commands import options, printing
from hesscond.errors import ConfigError
from hesscond.lazy import own_code
from hesscond.report import page
from hesscond.theorems import base


def verify_statements(
    ids: Annotated[list[str] | None, typer.Argument(help="Statements (hesscond statements).")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All statements.")] = False,
    trials: Annotated[
        int | None, typer.Option(help="Random cases of each statement. Default: the statement's own number.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random cases.")] = 0,
    as_json: printing.AsJson = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw the ratio of value to bound in each trial of one statement to a .pdf, .png or .svg file."
        ),
    ] = None,
) -> None:
    """Check published statements on random cases; false ones get a counterexample, certified in exact arithmetic.

    Exit code 1 if a claim that is known to be true was violated.

    Example: hesscond verify bnp-theorem-4 wc-theorem-1
    """
    if bool(ids) == all_of_them:
        raise ConfigError("give either statements (hesscond statements lists them) or --all")
    options.check_seed(seed)
    if trials is not None and trials < 1:
        raise ConfigError(f"--trials must be at least 1, got {trials}")
    options.check_file("--figure", figure, page.METADATA)
    # one that is named by several of its ids is checked once
    named = {s.id: s for s in map(base.statement, ids or ())}.values()
    chosen = list(base.statements() if all_of_them else named)
    if figure is not None and len(chosen) != 1:
        raise ConfigError("--figure draws one statement: name that one only")
    with printing.sign_of_life("starting") as say, own_code(*ids or ()):

        def run(number: int, statement: base.Statement) -> base.Verdict:
            label, total = f"{statement.id} ({number} of {len(chosen)})", trials or statement.trials
            return base.verify(statement, trials=trials, seed=seed, on_trial=lambda done: say(label, done / total))

        verdicts = [run(number, statement) for number, statement in enumerate(chosen, 1)]
    if as_json:
        typer.echo(json.dumps([as_dict(verdict) for verdict in verdicts], indent=1))
    else:
        printing.print_table(base.verdict_table(verdicts))
        for verdict in verdicts:
            for line in verdict.remarks():
                printing.print_line(line)
    if figure is not None:
        from hesscond.report.margins import margin_figure

        page.save_figure(margin_figure(verdicts[0]), figure)
        if not as_json:
            printing.stdout.print(f"figure: {figure}", soft_wrap=True)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(printing.UNMET)


def list_statements(
    name: Annotated[str | None, typer.Argument(help="Show this statement in full.")] = None,
    as_json: printing.AsJson = False,
) -> None:
    """List the statements that can be verified, with what is known of them, or show one.

    Example: hesscond statements prec-theorem-2
    """
    chosen = list(base.statements()) if name is None else [base.statement(name)]
    if as_json:
        typer.echo(json.dumps([described(s) for s in chosen], indent=1))
        return
    if name is not None:
        show(chosen[0])
        return
    rows = []
    for statement in chosen:
        rows.append({"id": statement.id, "known": expectation(statement), "title": statement.title})
        rows += [{"id": alias, "known": "", "title": f"another name of {statement.id}"} for alias in statement.aliases]
    printing.listing(rows, as_json=False)


def show(statement: base.Statement) -> None:
    """Print all about a statement."""
    printing.print_line(f"{statement.id}: {statement.title}", style="bold")
    printing.print_source(statement.source)
    for alias, part in statement.aliases.items():
        printing.print_prose(f"{alias}, {part}", "also:    ", " " * 9)
    printing.stdout.print()
    printing.print_prose(statement.text)
    if statement.hypotheses:
        printing.print_prose(f"If {'; '.join(statement.hypotheses)}.")
    printing.stdout.print()
    for claim in statement.claims:
        printing.print_prose(f"{claim.name}: {claim.text}", f"{known(claim)}:  ", "  ")
    printing.stdout.print()


def expectation(statement: base.Statement) -> str:
    """Whether the published claims of a statement are known to be true: all, in part, or none."""
    true = [claim.true for claim in statement.claims if claim.published]
    return "true" if all(true) else "in part" if any(true) else "false"


def known(claim: base.Claim) -> str:
    """Words for whether a claim is true, and whether it was published."""
    return f"{'true' if claim.true else 'false'}{'' if claim.published else ', not claimed'}"


def described(statement: base.Statement) -> dict[str, Any]:
    """JSON object of a statement."""
    record = {name: getattr(statement, name) for name in ("id", "title", "source", "text")}
    record |= {"aliases": dict(statement.aliases), "hypotheses": list(statement.hypotheses)}
    return record | {"claims": [claim_dict(claim) for claim in statement.claims]}


def as_dict(verdict: base.Verdict) -> dict[str, Any]:
    """JSON object of a verdict; JSON has no NaN and no infinity."""
    names = ("id", "aliases", "status", "expected", "ok", "trials", "seed", "violations", "seconds")
    record = {name: getattr(verdict, name) for name in names} | {"worst": finite(verdict.worst)}
    counts = ("holds", "violated", "not_applicable", "unresolved", "first_violation", "reasons")
    claims = [
        {**claim_dict(tally.claim), "status": verdict.status_of(tally), "worst": finite(tally.worst)}
        | {name: getattr(tally, name) for name in counts}
        for tally in verdict.tallies
    ]
    return record | {"claims": claims, "counterexamples": [asdict(example) for example in verdict.counterexamples]}


def claim_dict(claim: base.Claim) -> dict[str, Any]:
    """JSON object of a claim."""
    return {"name": claim.name, "text": claim.text, "known_to_hold": claim.true, "published": claim.published}


def finite(value: float) -> float | None:
    """The number if it is finite, else None."""
    return value if math.isfinite(value) else None

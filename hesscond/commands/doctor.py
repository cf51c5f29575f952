"""``hesscond doctor``: whether all is well on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hesscond.commands.exits import UNMET
from hesscond.commands.printing import sign_of_life, stdout
from hesscond.doctor import Check, examine

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    runs: Annotated[Path, typer.Option(help="Where runs will be kept; need not exist.")] = Path("runs"),
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets (else $HESSCOND_DATA_DIR, the cache).")
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read every file of the data sets and compare its md5.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False,
) -> None:
    """Check versions, threads, devices, arithmetic, data and storage on this machine, in seconds.

    The self-test compares condition numbers, a Hessian and a training run with what is known to be true. Exit code 1
    if a check failed; warnings do not count.

    Example: hesscond doctor

    Example: hesscond doctor --checksums --json
    """
    start = time.perf_counter()
    checks = []
    with sign_of_life("looking") as say:
        for check in examine(runs, data_dir, checksums=checksums):
            say(f"{check.group}: {check.name}")
            checks.append(check)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        show(checks, time.perf_counter() - start)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(UNMET)


def show(checks: list[Check], seconds: float) -> None:
    """By groups, one line each; advice below."""
    widest = max(len(check.name) for check in checks)
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            stdout.print(Text(group, style="bold"))
        line = Text("  ").append(f"{check.status:8}", STYLES[check.status]).append(f"{check.name:{widest}}  ")
        line.append(check.found)
        if check.advice and check.status == "ok":
            line.append(f" · {check.advice}", "dim")
        stdout.print(line, soft_wrap=True)
        if check.advice and check.status != "ok":
            stdout.print(f"{'':10}{'':{widest}}  → {check.advice}", soft_wrap=True)
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    text = f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed, in {seconds:.1f} s"
    stdout.print(Text(text, style="bold"))

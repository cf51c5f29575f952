"""Options that several commands have, and the checks of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hesscond.errors import LARGEST, ConfigError
from hesscond.lazy import optional
from hesscond.runs import StoredRun, find_runs

Study = Annotated[str, typer.Argument(help="A built-in study (hesscond studies) or a .toml file.")]
Scale = Annotated[
    str | None,
    typer.Option(help="paper, or small: with the changes of the study's table [small], for minutes on a CPU."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", "-m", help="NAME, NAME:option=value or NAME+NAME (hesscond methods); repeat for several."),
]
Iterations = Annotated[int | None, typer.Option(help="Optimizer steps of every run.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training set.")]
BatchSize = Annotated[int | None, typer.Option(help="Samples in a mini-batch.")]
ProbeEvery = Annotated[
    int | None, typer.Option(help="Iterations between two probes of the mini-batch; 0: no probing at all.")
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", help="Runs at a time. Default: one for each core, or for each GPU.")
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of each run; they change last digits. Default: the cores divided by --jobs."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Devices = Annotated[str, typer.Option(help="auto, cpu, cuda, or several GPUs: cuda:0,cuda:1.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that holds the data set. Default: $HESSCOND_DATA_DIR, else the cache."),
]
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold run folders.")]
TargetSpec = Annotated[str, typer.Argument(help="FILE.py:FUNCTION; FUNCTION() returns (model, loss_fn, data).")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback if the file's own code fails.")]


#: Largest number of integers in one range.
MANY = 100_000


class Once(TyperCommand):
    """Command that refuses an option of one value that is given twice, of which the parser would drop the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        rest = super().parse_args(ctx, args)  # shows the help first
        for option in given:
            if given.count(option) > 1 and not (option.multiple or option.is_flag or ctx.resilient_parsing):
                raise typer.BadParameter("it is given twice: give it once", ctx, option)
        return rest


def check_file(option: str, path: Path | None, suffixes: Any) -> None:
    """Refuse a file that could not be written after all the work: its folder, or the end of its name."""
    if path is None:
        return
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path}: its name must end in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if suffixes is not None and ".pdf" in suffixes:
        with optional(option):
            import matplotlib  # noqa: F401  (before the work that is drawn)


def check_seed(seed: int) -> int:
    """Return the seed; a ConfigError if random generators do not take it."""
    if not 0 <= seed <= LARGEST:
        raise ConfigError(f"--seed must be from 0 to {LARGEST}, got {seed}")
    return seed


def choice(option: str, given: str, known: Any) -> str:
    """Return the given value; a ConfigError if it is not known."""
    if given not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {given!r}")
    return given


def names_of(texts: Sequence[str] | None) -> list[str] | None:
    """Names from options that may each hold several, separated by commas; None if there are none."""
    return [name.strip() for text in texts for name in text.split(",")] if texts else None


def integers(option: str, text: str, least: int = 0) -> list[int]:
    """Integers from ``60,6`` and ranges of them: ``0:5`` (without 5) and ``5-9``."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,20})\s*(?:([:-])\s*(\d{1,20})\s*)?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{option} takes integers and ranges of them, as 0,1,5-9 or 0:5, not {text!r}")
        first = int(match[1])
        last = int(match[3] or first) - (match[2] == ":")
        if not least <= first <= LARGEST:
            raise ConfigError(f"{option} must be from {least} to {LARGEST}, got {first}")
        if not first <= last < first + MANY:
            raise ConfigError(f"{option} {part.strip()} is a range of no number, or of more than {MANY:,}")
        numbers += range(first, last + 1)
    return numbers


def parse_rates(option: str, text: str, words: tuple[str, ...]) -> list[float] | str:
    """Learning rates from ``0.01,0.1``, or one of the words."""
    from hesscond.study.sections import LARGEST_RATE

    if text.strip() in words:
        return text.strip()
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes numbers separated by commas, {' or '.join(words)}, not {text!r}") from None
    for rate in rates:
        if not 0 < rate <= LARGEST_RATE:
            raise ConfigError(f"{option}: rates must be positive and at most {LARGEST_RATE:.3g}, got {rate:g}")
    return rates


def collect(folders: list[Path]) -> list[StoredRun]:
    """Runs that the folders are or hold."""
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        raise ConfigError(f"no run in {', '.join(str(f) for f in folders)}")
    return runs

"""What the commands that take FILE.py:FUNCTION share: options, and one sentence for what goes wrong in that file."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hesscond
from hesscond.errors import ConfigError, HesscondError
from hesscond.study import StoredRun, find_runs, open_run
from hesscond.target import one_line, user_failure

#: Precision of the forward pass.
DTYPES = {"float64": torch.float64, "as-is": None}
#: Which version of a study is run.
Scale = Annotated[
    str | None,
    typer.Option(help="paper, or small: with the changes of the study's table [small], for minutes on a CPU."),
]
BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@contextmanager
def one_sentence(spec: str) -> Iterator[None]:
    """Turn what the user's code raises into a ConfigError."""
    try:
        yield
    except HesscondError:
        raise
    except Exception as error:
        sentence = explained(error, spec)
        if sentence is None:
            raise
        raise ConfigError(sentence) from error


@contextmanager
def causes_shown(wanted: bool) -> Iterator[None]:
    """If wanted, show where the exception behind a ConfigError came from."""
    try:
        yield
    except ConfigError as error:
        if wanted and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise


def explained(error: Exception, spec: str) -> str | None:
    """The sentence for an exception during a probe; None for a fault of hesscond."""
    # hesscond watches the operations of the model: those frames are on the way to the operation that failed
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.name not in ("__torch_function__", "in_float64")
    ]
    where = user_failure(error, Path(spec.rpartition(":")[0]))
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return f"out of memory: take fewer samples, --layers or --units, or set --memory ({one_line(error)})"
    if where is None and not Path(frames[-1].filename).is_relative_to(Path(hesscond.__file__).parent):
        return f"the model, loss or data of {spec} raised {one_line(error)} (--traceback shows where)"
    return where


def check_file(option: str, path: Path | None, suffixes: Any) -> None:
    """Refuse a file that could not be written after all the work: its folder, or the end of its name."""
    if path is None:
        return
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path}: its name must end in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")


def choice(option: str, given: str, known: Any) -> str:
    """The given value if it is known."""
    if given not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {given!r}")
    return given


def names_of(texts: Sequence[str] | None) -> list[str] | None:
    """Names from options that may each hold several, separated by commas; None if there are none."""
    return [name.strip() for text in texts for name in text.split(",")] if texts else None


def parse_size(text: str) -> int:
    """Bytes from ``2GB``, ``512 MiB`` or a plain number of them.

    Raises
    ------
    ConfigError
        Anything else.

    Examples
    --------
    >>> parse_size("2GB"), parse_size("1.5 KiB")
    (2000000000, 1536)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]I?)?B?\s*", text.upper(), re.ASCII)
    size = int(float(match[1]) * BYTES[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(f"--memory takes a size as 500MB or 2GB, not {text!r}")
    return size


def collect(folders: list[Path]) -> list[StoredRun]:
    """The runs that the folders are or hold."""
    runs = [
        run
        for folder in folders
        for run in ([open_run(folder)] if (folder / "run.sqlite").exists() else find_runs(folder))
    ]
    if not runs:
        raise ConfigError(f"no run in {', '.join(str(f) for f in folders)}")
    return runs

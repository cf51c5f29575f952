"""The command line: parses, calls, prints."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import hesscond
from hesscond.commands.compare import compare_methods
from hesscond.commands.density import density
from hesscond.commands.drawing import figure, table
from hesscond.commands.exits import BAD_USE, INTERRUPTED
from hesscond.commands.listings import methods, studies
from hesscond.commands.printing import complain, stderr, stdout
from hesscond.commands.probe import probe
from hesscond.commands.runs import export, runs
from hesscond.commands.study import study
from hesscond.commands.verify import list_statements, verify_statements
from hesscond.data import fetch
from hesscond.errors import HesscondError

app = typer.Typer(
    name="hesscond",
    help="Exact per-layer Hessian condition numbers of neural networks, and studies of the methods that claim to "
    "improve them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.command()(study)
app.command()(probe)
app.command()(density)
app.command("compare")(compare_methods)
app.command("verify")(verify_statements)
app.command()(figure)
app.command()(table)
app.command()(runs)
app.command()(export)
app.command()(studies)
app.command()(methods)
app.command("statements")(list_statements)

#: Base of the errors that the option parser raises (typer brings its own copy of click, or imports it).
ParserError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Entry point: one sentence on stderr and exit code 2 for bad use, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except HesscondError as error:
        fail(str(error))
    except ParserError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if message.startswith("Usage:"):  # a command without arguments: the message is its help
            typer.echo(message, err=True)
            sys.exit(BAD_USE)
        fail(message)
    except (KeyboardInterrupt, typer.Abort):
        stderr.print("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output has gone: nothing left to say, also not at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    sys.exit(code if isinstance(code, int) else 0)


def fail(sentence: str) -> None:
    """Print an error sentence and exit with the code for bad use."""
    complain(sentence)
    sys.exit(BAD_USE)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"hesscond {hesscond.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does.")] = False,
) -> None:
    """Options before the command."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100")],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it; the cache if absent.")] = None,
) -> None:
    """Download a data set and check it.

    Example: hesscond data fetch cifar10
    """
    stdout.print(str(fetch(name, data_dir)), soft_wrap=True)


if __name__ == "__main__":
    main()

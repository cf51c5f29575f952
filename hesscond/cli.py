"""The command line: parses, calls, prints."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import hesscond
from hesscond.commands import completion
from hesscond.commands.check import check
from hesscond.commands.compare import compare_methods
from hesscond.commands.density import density
from hesscond.commands.doctor import doctor
from hesscond.commands.drawing import figure, table
from hesscond.commands.exits import BAD_USE, INTERRUPTED
from hesscond.commands.export import export
from hesscond.commands.follow import follow
from hesscond.commands.listings import methods, studies
from hesscond.commands.printing import complain, stderr, stdout
from hesscond.commands.probe import probe
from hesscond.commands.report import report
from hesscond.commands.runs import runs
from hesscond.commands.sections import LIST, MACHINE, MEASURE, SHOW, TRAIN, SectionedGroup
from hesscond.commands.study import study
from hesscond.commands.sweep import sweep
from hesscond.commands.verify import list_statements, verify_statements
from hesscond.data import fetch, names
from hesscond.errors import HesscondError

HELP = """Exact per-layer Hessian condition numbers of neural networks, and studies of the methods that claim to improve
them.

Every command explains itself with examples: hesscond COMMAND --help. The shell completes commands, options, studies,
methods, statements and run folders after hesscond --install-completion.

Example: hesscond probe mymodel.py:make

Example: hesscond study fc-digits --method vanilla --method bnp
"""

app = typer.Typer(
    name="hesscond",
    cls=SectionedGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    help="Get data sets.\n\nExample: hesscond data fetch mnist", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data", rich_help_panel=MACHINE)
app.command(rich_help_panel=MEASURE)(probe)
app.command(rich_help_panel=MEASURE)(density)
app.command("verify", rich_help_panel=MEASURE)(verify_statements)
app.command(rich_help_panel=TRAIN)(study)
app.command(rich_help_panel=TRAIN)(sweep)
app.command("compare", rich_help_panel=TRAIN)(compare_methods)
app.command(rich_help_panel=SHOW)(check)
app.command(rich_help_panel=SHOW)(figure)
app.command(rich_help_panel=SHOW)(table)
app.command(rich_help_panel=SHOW)(report)
app.command(rich_help_panel=SHOW)(runs)
app.command(rich_help_panel=SHOW)(follow)
app.command(rich_help_panel=SHOW)(export)
app.command(rich_help_panel=LIST)(studies)
app.command(rich_help_panel=LIST)(methods)
app.command("statements", rich_help_panel=LIST)(list_statements)
app.command(rich_help_panel=MACHINE)(doctor)

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
    name: Annotated[
        str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100", autocompletion=completion.among(names()))
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it; the cache if absent.")] = None,
) -> None:
    """Download a data set and check it.

    Example: hesscond data fetch cifar10
    """
    stdout.print(str(fetch(name, data_dir)), soft_wrap=True)


if __name__ == "__main__":
    main()

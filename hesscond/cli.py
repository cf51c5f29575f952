"""Command line with commands grouped by purpose, each imported when it is called."""

from __future__ import annotations

import ast
import inspect
import io
import logging
import os
import re
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import hesscond
from hesscond.commands import options, printing
from hesscond.errors import HesscondError, one_line, out_of_memory
from hesscond.lazy import optional

HELP = """Exact per-layer Hessian condition numbers of neural networks, and studies of the methods that claim to improve
them.

Every command explains itself with examples: hesscond COMMAND --help. The shell completes commands and options after
hesscond --install-completion.

Example: hesscond probe mymodel.py:make

Example: hesscond study fc-digits --method vanilla --method bnp
"""

#: Sections of ``hesscond --help`` with their commands: the module in `hesscond.commands`, and the function in it.
SECTIONS = {
    "Measure and prove": {
        "probe": "probe:probe",
        "diff": "diff:compare_two",
        "verify": "verify:verify_statements",
    },
    "Train and compare methods": {
        "study": "study:study",
        "sweep": "sweep:sweep",
        "replicate": "replicate:replicate",
    },
    "Look at runs": {
        "check": "check:check",
        "figure": "drawing:figure",
        "table": "drawing:table",
        "report": "drawing:report",
        "runs": "runs:runs",
        "export": "runs:export",
    },
    "What there is": {
        "studies": "listings:studies",
        "methods": "listings:methods",
        "statements": "verify:list_statements",
    },
    "This machine": {"doctor": "doctor:doctor", "data": "listings:data"},
}
#: Characters of a summary in a list of commands; it may take two lines.
LONGEST = 160


class Imported(TyperCommand):
    """Command ``MODULE:FUNCTION`` of `hesscond.commands`, imported when called; its docstring is read from the file."""

    def __init__(self, name: str, place: str) -> None:
        self.module, _, self.function = place.partition(":")
        tree = ast.parse((Path(__file__).parent / "commands" / f"{self.module}.py").read_text(encoding="utf-8"))
        (definition,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == self.function)
        super().__init__(name=name, help=inspect.cleandoc(ast.get_docstring(definition) or ""))
        del self.params  # so that `__getattr__` gives those of the command

    def __getattr__(self, name: str) -> Any:
        return getattr(self.imported(), name)

    def imported(self) -> Any:
        """Import the command, or group of commands."""
        module = import_module(f"hesscond.commands.{self.module}")
        app = getattr(module, f"{self.function}_app", None)
        if app is None:
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(self.name, cls=options.Once)(getattr(module, self.function))
        return typer.main.get_command(app)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Return the context of the command, which is imported now."""
        return self.imported().make_context(*args, **settings)


class SectionedGroup(TyperGroup):
    """Group that lists the commands below the headline of their section."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: Imported(name, place) for places in SECTIONS.values() for name, place in places.items()}

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer alone would end an interrupted command without a message."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            printing.stderr.print("interrupted")
            raise typer.Exit(printing.INTERRUPTED) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write all sections."""
        longest = max(map(len, self.commands))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(longest), self.commands[name].get_short_help_str(LONGEST)) for name in commands]
                )


app = typer.Typer(
    name="hesscond",
    cls=SectionedGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Base of the errors that the option parser raises (typer brings its own copy of click, or imports it).
ParserError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Entry point: one sentence on stderr and exit code 2 for bad use, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # whatever the locale's encoding; others stand in for the streams in tests and notebooks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        with optional("this command"):
            code = app(standalone_mode=False)
    except HesscondError as error:
        fail(str(error))
    except ParserError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if message.startswith("Usage:"):  # a command without arguments: the message is its help
            typer.echo(message, err=True)
            sys.exit(printing.BAD_USE)
        names = re.findall(r"(?<=')[\w-]+(?=')|--[\w-]+", message)
        if message.startswith("Missing"):
            message = f"{message.rstrip('.')}: {error.ctx.command_path} --help has examples"  # type: ignore[attr-defined]
        fail(number_expected(message, names) or message)
    except (KeyboardInterrupt, typer.Abort):  # before a command runs, or at the end of input
        printing.stderr.print("interrupted")
        sys.exit(printing.INTERRUPTED)
    except SystemExit as end:  # typer and rich make one with code 1 of a closed pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # the reader of our output has gone: nothing left to say, also not at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fail(f"memory ended ({one_line(error)}); what a run has logged is kept: --resume goes on from there")
    sys.exit(code if isinstance(code, int) else 0)


def fail(sentence: str) -> None:
    """Print an error sentence and exit with the code for bad use."""
    printing.complain(sentence)
    sys.exit(printing.BAD_USE)


def number_expected(message: str, names: list[str]) -> str:
    """Sentence about an option with a value that is no number, which the parser's own message does not show; or ''."""
    match = re.search(r"Input should be a valid (number|integer)", message)
    given = [f"{word}={then}" if not word.count("=") else word for word, then in pairwise([*sys.argv, ""])]
    value = next((v for name, _, v in (word.partition("=") for word in given) if name in names), None)
    if match is None or value is None:
        return ""
    return f"{names[0]} takes a {'whole number' if match[1] == 'integer' else 'number'}, not {value!r}"


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


if __name__ == "__main__":
    main()

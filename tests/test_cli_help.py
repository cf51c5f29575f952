"""The command line as a manual: examples that parse, listings as JSON."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from hesscond.cli import app
from hesscond.commands.printing import citations
from hesscond.methods import method_class, registered

ROOT = typer.main.get_command(app)


def commands(group=ROOT, path=()):
    """All commands and groups below, by what is typed for them."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


EVERY = dict(commands())


def examples(command):
    """The command lines of a help, as the terminal shows them unfolded."""
    return re.findall(r"^\s*Example: (hesscond .*)$", command.help, re.MULTILINE)


def parsed(line):
    """The command that a line reaches, with its arguments parsed; raises what a user would be told."""
    words = shlex.split(line)
    assert words[0] == "hesscond"
    command, context, rest = ROOT, None, words[1:]
    while True:
        context = command.make_context(command.name, list(rest), parent=context)
        if not hasattr(command, "commands"):
            return context
        # what a group leaves over is the name of a command and its arguments
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None, name


@pytest.mark.parametrize("path", [(), *EVERY], ids=" ".join)
def test_every_help_has_examples_that_parse(path):
    lines = examples(EVERY[path] if path else ROOT)
    assert lines, f"no line 'Example: hesscond …' in the help of {' '.join(path)}"
    for line in lines:
        assert line.split()[1 : 1 + len(path)] == list(path)
        assert parsed(line).command is not None


def test_a_stream_in_another_encoding_gets_utf_8():
    done = subprocess.run(
        [sys.executable, "-m", "hesscond", "--help"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "κ" in done.stdout.decode("utf-8")


def test_an_option_given_twice_hides_neither_help_nor_completion():
    given = "hesscond sweep tiny.toml --seed 0 --seed 1"
    completion = {"_HESSCOND_COMPLETE": "complete_bash", "COMP_WORDS": f"{given} --ba", "COMP_CWORD": "7"}
    script = "import sys; from hesscond.cli import main; sys.argv[0] = 'hesscond'; main()"
    for words, more, wanted in (([*given.split()[1:], "--help"], {}, "Usage: "), ([], completion, "--batch-size")):
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True,
            text=True,
            env=os.environ | more,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(wanted)


@pytest.mark.share(5)
@pytest.mark.parametrize("method", [m.name for m in registered()])
def test_methods_are_told_without_markup_and_with_their_papers(method, call_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call_cli("methods", method).out
    assert "``" not in text
    assert "---" not in text
    source = method_class(method).source
    for _, paper in citations(source):
        assert " ".join(str(paper).split()) in " ".join(text.split())

"""The documentation is executed: its code runs and prints what it says, its commands and options exist.

Pages without commands are fast; those that start processes are slow.
"""

import tomllib
from pathlib import Path

import pytest
import typer.main

from hesscond.cli import app
from hesscond.study.files import StudyFile
from tests import documented

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in DOCS.rglob("*.md") if p.relative_to(DOCS).parts[0] not in ("methods", "statements", "_build")),
]
SHELL = [path for path in PAGES if any(b.language == "console" for b in documented.blocks(path.read_text("utf-8")))]


def name(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


@pytest.mark.share(2)
@pytest.mark.parametrize("page", [p for p in PAGES if p not in SHELL], ids=name)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path):
    documented.run(page, tmp_path)


@pytest.mark.share(2)
@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL, ids=name)
def test_the_commands_of_a_page_print_what_it_says(page, tmp_path):
    documented.run(page, tmp_path)


@pytest.mark.share(3)
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_of_a_page_exists(page):
    group = typer.main.get_command(app)
    for block in documented.blocks(page.read_text(encoding="utf-8")):
        for line in documented.commands(block) if block.language in ("console", "sh", "yaml") else []:
            given = documented.arguments(line)
            if given is not None:
                parse(group, given)


def parse(command, given):
    """Follow the names of commands down, and let the last one parse its own arguments without running."""
    while hasattr(command, "commands") and given and not given[0].startswith("-"):
        assert given[0] in command.commands, f"hesscond has no command {given[0]}"
        command, given = command.commands[given[0]], given[1:]
    if not hasattr(command, "commands"):
        command.make_context("hesscond", list(given))


def test_every_language_of_a_block_is_one_that_is_checked():
    known = {"python", "output", "console", "sh", "toml", "yaml", "text", "bibtex"}
    for page in PAGES:
        for block in documented.blocks(page.read_text(encoding="utf-8")):
            assert block.language in known, f"{name(page)}, line {block.line}: {block.language}"


def test_every_study_on_the_pages_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("letters.txt").write_text("characters of a text\n" * 50, encoding="utf-8")
    count = 0
    for page in PAGES:
        blocks = documented.blocks(page.read_text(encoding="utf-8"))
        for block in (b for b in blocks if b.language == "python" and b.file and "/" not in b.file):
            Path(block.file).write_text(block.text, encoding="utf-8")
        for block in (b for b in blocks if b.language == "toml" and "[training]" in b.text):
            file = StudyFile(Path(block.file or "docs.toml"), tomllib.loads(block.text))
            for panel in file.panels or [""]:
                assert file.study(panel, None).name, name(page)
                count += 1
    assert count > 2


def test_every_page_is_in_a_table_of_contents():
    contents = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {p.relative_to(DOCS).with_suffix("").as_posix() for p in PAGES[1:] if p.parent.name != "python"}
    assert listed - {"index"} <= set(contents.split())

"""Write the pages of methods, statements and papers from what the program knows: ``python docs/generate.py [FOLDER]``.

With ``--gallery`` it draws the pictures of gallery.md, by the commands on that page.

`conf.py` does it where they are missing or older than the program.

One page for each method (its docstring), one for each statement (its text, claims, verdicts and counterexamples with a
figure of the margins), the two lists, and the papers, a page that is kept with the sources. Everything comes from seed
0, so that the same version writes the same pages up to the last digits of a figure.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from hesscond.commands.papers import Paper, citations, papers
from hesscond.commands.printing import FOR_PROGRAMS, SECTION
from hesscond.commands.verify import known
from hesscond.methods import Method, registered
from hesscond.methods.spec import shown_options
from hesscond.report import margin_figure, save_figure
from hesscond.theorems import Statement, Verdict, statements, verify

HERE = Path(__file__).parent
#: What the pages are made of.
SOURCES = [
    HERE / "generate.py",
    HERE / "gallery.md",
    *(HERE.parent / "hesscond").rglob("*.py"),
    HERE.parent / "hesscond" / "commands" / "papers.toml",
]
#: A fenced block, and a name on a line of its own, with an indented text below.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^(\S[^\n]*)\n((?:    [^\n]*\n|\n(?=    ))+)", re.MULTILINE)


def method_page(method: type[Method]) -> str:
    """Source, options and docstring of a method."""
    text = inspect.getdoc(method) or ""
    head, *rest = SECTION.split(text)
    parts = [f"# {method.name}\n\n{method.summary}.\n\n**Source:** {linked(method.source)}\n"]
    parts.append(f"**Options:** `{shown_options(method) or 'none'}`\n")
    parts.append(f"**Learning rate** where none is given: {method.rate:g}\n")
    parts.append(prose(head))
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        if title not in FOR_PROGRAMS:
            parts.append(f"## {title}\n\n{entries(body) if title in ('Parameters', 'Attributes') else prose(body)}")
    return "\n".join(parts).rstrip() + "\n"


def linked(source: str) -> str:
    """A source whose papers are links to papers.md."""
    for words, paper in citations(source):
        link = f"[{words}](../papers.md#{slug(paper.title)})"
        source = re.sub(rf"\b{re.escape(words)}(?!\w|\])", link, source, count=1)
    return source


def slug(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def papers_page() -> str:
    """Every paper in full, and the methods and statements that cite it."""
    lines = ["# The papers\n", "Methods, statements and solvers cite them by the words in `code`."]
    for group, those in groupby(papers(), key=lambda paper: paper.group):
        lines.append(f"\n## {group}")
        for paper in those:
            lines.append(f"\n### {paper.title}\n")
            lines.append(f"{paper.authors}. {paper.venue}" + (f", <{paper.url}>." if paper.url else "."))
            uses = [f"[`{one.name}`](methods/{one.name}.md)" for one in registered() if cites(one.source, paper)]
            uses += [f"[`{one.id}`](statements/{one.id}.md)" for one in statements() if cites(one.source, paper)]
            said = f" {paper.about}" if paper.about else ""
            behind = f" Behind {', '.join(uses)}." if uses else ""
            lines.append(f"Cited as {' or '.join(f'`{words}`' for words in paper.cited)}.{said}{behind}")
    return "\n".join(lines) + "\n"


def cites(source: str, paper: Paper) -> bool:
    """Whether a source names a paper."""
    return any(named == paper for _, named in citations(source))


def prose(text: str) -> str:
    """Paragraphs; reStructuredText's double backticks become single ones, its ``::`` blocks fenced ones."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text.strip("\n"))
    text = re.sub(r"\.\. math::\s*([^\n]+)", r"\1", text)
    text = re.sub(r":\n\n((?:    [^\n]*\n?|\n)+)", lambda m: f":\n\n{m[1].rstrip()}\n", text.replace("::\n", ":\n"))
    return text + "\n"


def entries(text: str) -> str:
    """Parameters as a list."""
    found = []
    for name, body in ENTRY.findall(text.strip("\n") + "\n"):
        meaning = " ".join(inspect.cleandoc(body).split())
        found.append(f"- **{name}** {prose(meaning).strip()}")
    return "\n".join(found) + "\n"


def statement_page(one: Statement, verdict: Verdict) -> str:
    """Text, claims, verdicts and counterexamples of a statement."""
    lines = [f"# {one.id}: {one.title}\n", f"**Source:** {linked(one.source)}\n"]
    if one.aliases:
        lines.append(f"**Also:** {'; '.join(f'`{alias}` ({part})' for alias, part in one.aliases.items())}\n")
    lines.append(f"{one.text}\n")
    lines.append(f"**If** {'; '.join(one.hypotheses) or 'always'}.\n")
    lines.append(f"`hesscond verify {one.id} --trials {verdict.trials}`:\n")
    lines.append("| claim | | known to be | status | violated | n/a | unresolved | used at most |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for tally in verdict.tallies:
        formula = tally.claim.text.replace("|", "\\|")
        decided = tally.holds + tally.violated
        used = f"{tally.worst:.3g}" if tally.used else "–"
        lines.append(
            f"| {tally.claim.name} | {formula} | {known(tally.claim)} | {verdict.status_of(tally)} | "
            f"{tally.violated} of {decided} | {tally.not_applicable} | {tally.unresolved} | {used} |"
        )
    lines.append(f"\n![how much of what each claim allows the trials used]({one.id}.png)\n")
    for example in verdict.counterexamples:
        lines.append(f"**Certified counterexample of “{example.claim}”**, factor {example.factor:.4f}:\n")
        lines.append(f"```\n{example.matrix}\n{example.text}\n```\n")
    return "\n".join(lines).rstrip() + "\n"


def index(title: str, rows: list[tuple[str, str, str]]) -> str:
    """A list of pages."""
    lines = [f"# {title}\n", "| | | source |", "|---|---|---|"]
    return "\n".join(lines + [f"| [{name}]({name}.md) | {text} | {source} |" for name, text, source in rows]) + "\n"


def draw_gallery(folder: Path, trials: int | None = None) -> None:
    """Do what gallery.md says in an empty folder: write its files, run its commands; keep the pictures and the report."""
    from hesscond.cli import app

    for one in statements() if trials else ():
        type(one).trials = trials
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "site").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        for language, text in BLOCK.findall((HERE / "gallery.md").read_text(encoding="utf-8")):
            if named := re.match(r"# ([\w.-]+)\n", text):
                Path(named[1]).write_text(text, encoding="utf-8")
            elif language == "sh":
                for line in text.splitlines():
                    with contextlib.redirect_stdout(io.StringIO()):
                        app(shlex.split(line)[1:], standalone_mode=False)
        for picture in Path().glob("*.png"):
            shutil.move(picture, folder / picture.name)
        shutil.move("report.html", folder / "site" / "report.html")


def outdated() -> bool:
    """Whether the pages beside this file are missing, or older than what they are made of."""
    index = HERE / "statements" / "index.md"
    return not index.is_file() or index.stat().st_mtime < max(path.stat().st_mtime for path in SOURCES)


def write(folder: Path, trials: int | None = None) -> None:
    """All pages and pictures, in place of those that are there; the gallery is drawn meanwhile."""
    command = [sys.executable, __file__, "--gallery", folder / "gallery"]
    if trials:
        command += ["--trials", str(trials)]
    with subprocess.Popen(command) as drawing:
        write_pages(folder, trials)
        if drawing.wait():
            raise RuntimeError("the gallery could not be drawn")


def write_pages(folder: Path, trials: int | None = None) -> None:
    """All pages, in place of those that are there."""
    (folder / "papers.md").write_text(papers_page(), encoding="utf-8")
    for name in ("methods", "statements"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for page in (folder / name).glob("*.*"):
            page.unlink()
    methods = list(registered())
    for method in methods:
        (folder / "methods" / f"{method.name}.md").write_text(method_page(method), encoding="utf-8")
    rows = [(m.name, m.summary, linked(m.source)) for m in methods]
    (folder / "methods" / "index.md").write_text(index("Methods", rows), encoding="utf-8")
    listed = []
    for one in statements():
        verdict = verify(one, trials=trials)
        (folder / "statements" / f"{one.id}.md").write_text(statement_page(one, verdict), encoding="utf-8")
        save_figure(margin_figure(verdict), folder / "statements" / f"{one.id}.png")
        also = f" ({', '.join(f'`{alias}`' for alias in one.aliases)})" if one.aliases else ""
        listed.append((one.id, f"{one.title}{also}: **{verdict.status}**", linked(one.source)))
    (folder / "statements" / "index.md").write_text(index("Statements", listed), encoding="utf-8")


def main() -> None:
    """Write the pages beside this file, or elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument("--trials", type=int, help="of each statement; what it says itself if not given")
    parser.add_argument("--gallery", action="store_true", help="draw the gallery into the folder, and no more")
    arguments = parser.parse_args()
    if arguments.gallery:
        draw_gallery(arguments.folder, arguments.trials)
    else:
        write(arguments.folder, arguments.trials)


if __name__ == "__main__":
    main()

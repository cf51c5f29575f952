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
import tomllib
from itertools import groupby
from pathlib import Path

from hesscond.commands.printing import FOR_PROGRAMS, SECTION, Paper, citations, papers
from hesscond.commands.verify import known
from hesscond.errors import HesscondError
from hesscond.methods import Method, registered
from hesscond.methods.spec import shown_options
from hesscond.report import margin_figure, save_figure
from hesscond.theorems import Statement, Verdict, statements, verify

HERE = Path(__file__).parent
#: Formulas of methods, and the symbols of statements.
NOTATION = tomllib.loads((HERE / "notation.toml").read_text(encoding="utf-8"))
#: A probe in plain coordinates and in those of a method.
EXAMPLE = """\
import torch
from torch import nn

import hesscond

torch.manual_seed(0)
model, loss_fn = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3)), nn.CrossEntropyLoss()
batch = 1 + torch.randn(64, 20) * torch.logspace(-1, 1, 20), torch.randint(0, 3, (64,))
print(hesscond.probe(model, loss_fn, batch, layers=["0"])["0"].kappa[0])
print(hesscond.probe(model, loss_fn, batch, layers=["0"], method="{name}")["0"].kappa[0])
"""
AFTER_METHODS = (
    "After this page you know which methods a study can train with (`--method NAME`) and a probe can measure in the "
    "coordinates of. [What coordinates are](../concepts/coordinates.md), "
    "[a method of your own](../howto/own-method.md)."
)
AFTER_STATEMENTS = (
    "After this page you know which published statements hold in all trials, and which have a counterexample: "
    "`hesscond verify ID` tries one. [What they say about networks](../concepts/theorems.md)."
)
#: What the pages are made of.
SOURCES = [
    HERE / "generate.py",
    HERE / "gallery.md",
    HERE / "notation.toml",
    *(HERE.parent / "hesscond").rglob("*.py"),
    HERE.parent / "hesscond" / "commands" / "papers.toml",
]
#: A fenced block, and a name on a line of its own, with an indented text below.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^(\S[^\n]*)\n((?:    [^\n]*\n|\n(?=    ))+)", re.MULTILINE)


def method_page(method: type[Method]) -> str:
    """Formula, source, options, example, statements and docstring of a method."""
    text = inspect.getdoc(method) or ""
    head, *rest = SECTION.split(text)
    parts = [f"# {method.name}\n\n{method.summary[0].upper()}{method.summary[1:]}.\n"]
    if method.name in NOTATION["formulas"]:
        parts.append(f"$$\n{NOTATION['formulas'][method.name]}\n$$\n")
    parts.append(prose(head))
    parts.append(f"**Source:** {linked(method.source)}\n")
    parts.append(f"**Options:** `{shown_options(method) or 'none'}`\n")
    parts.append(f"**Learning rate** where none is given: {method.rate:g}\n")
    parts.append(f"## Example\n\n{example(method)}")
    about = [one for one in statements() if concerns(one, method)]
    if about:
        listed = "\n".join(f"- [{one.id}](../statements/{one.id}.md): {one.title}" for one in about)
        parts.append(f"## Statements\n\n{listed}\n")
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        if title == "Parameters":
            parts.append(f"## Options\n\n{entries(body)}")
        elif title not in FOR_PROGRAMS:
            parts.append(f"## {title}\n\n{prose(body)}")
    return "\n".join(parts).rstrip() + "\n"


def example(method: type[Method]) -> str:
    """A study with the method, and a probe in its coordinates with what it prints, unless these need a step first."""
    others = "" if method.name == "vanilla" else "--method vanilla "
    parts = [f"```sh\nhesscond study fc-digits {others}--method {method.name}\n```\n"]
    code, printed = EXAMPLE.format(name=method.name), io.StringIO()
    with contextlib.suppress(HesscondError), contextlib.redirect_stdout(printed):
        exec(code, {})
        parts.append(f"```python\n{code}```\n\n```output\n{printed.getvalue()}```\n")
    return "\n".join(parts)


def concerns(one: Statement, method: type[Method]) -> bool:
    """Whether a statement is of a paper that the method cites, or has the method's name in its own or its title."""
    about = " ".join([one.id, *one.aliases, one.title, one.source])
    named = re.search(rf"\b{re.escape(method.name)}\b", about, re.IGNORECASE)
    papers = {str(paper) for _, paper in citations(method.source)}
    return bool(named or papers & {str(paper) for _, paper in citations(one.source)})


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
    """Paragraphs; reStructuredText's double backticks become single ones, indented blocks fenced ones."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text.strip("\n"))
    text = re.sub(r"\.\. math::\s*([^\n]+)", r"\1", text).replace("::\n", ":\n") + "\n"
    text = re.sub(r"(?<=\n\n)((?:    [^\n]*\n|\n(?=    ))+)\n*", fenced, text)
    return ENTRY.sub(lambda entry: f"- {entry[1]}: {' '.join(entry[2].split())}\n", text)


def fenced(block: re.Match[str]) -> str:
    """An indented block between fences."""
    return f"```text\n{inspect.cleandoc(block[1])}\n```\n\n"


def entries(text: str) -> str:
    """Parameters as a list, without the model that every method takes."""
    found = {name: " ".join(inspect.cleandoc(body).split()) for name, body in ENTRY.findall(text.strip("\n") + "\n")}
    listed = (f"- **{name}** {prose(meaning).strip()}\n" for name, meaning in found.items() if name != "model")
    return "".join(listed) or "None.\n"


def statement_page(one: Statement, verdict: Verdict) -> str:
    """Text, claims, verdicts and counterexamples of a statement."""
    lines = [f"# {one.id}: {one.title}\n", f"**Source:** {linked(one.source)}\n"]
    if one.aliases:
        lines.append(f"**Also:** {'; '.join(f'`{alias}` ({part})' for alias, part in one.aliases.items())}\n")
    lines.append(f"{one.text}\n")
    lines.append(f"**If** {'; '.join(one.hypotheses) or 'always'}.\n")
    if defined := symbols(one):
        lines.append(f"**Symbols:**\n\n{defined}\n")
    if about := [method.name for method in registered() if concerns(one, method)]:
        lines.append(f"**Methods:** {', '.join(f'[{name}](../methods/{name}.md)' for name in about)}\n")
    lines.append(f"`hesscond verify {one.id} --trials {verdict.trials}`:\n")
    lines.append("| claim | | known to be | status | violated | n/a | unresolved | used at most |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for tally in verdict.tallies:
        formula = tally.claim.text.replace("|", "\\|")
        decided = tally.holds + tally.violated
        used = f"{tally.worst:.3g}" if tally.used else "–"
        status = verdict.status_of(tally)
        status += " (by the counterexample below)" if status == "violated" and not tally.violated else ""
        lines.append(
            f"| {tally.claim.name} | {formula} | {known(tally.claim)} | {status} | "
            f"{tally.violated} of {decided} | {tally.not_applicable} | {tally.unresolved} | {used} |"
        )
    lines.append(f"\n![how much of what each claim allows the trials used]({one.id}.png)\n")
    for example in verdict.counterexamples:
        lines.append(f"**Certified counterexample of “{example.claim}”**, factor {example.factor:.4f}:\n")
        lines.append(f"```\n{example.matrix}\n{example.text}\n```\n")
    return "\n".join(lines).rstrip() + "\n"


def symbols(one: Statement) -> str:
    """The symbols that the text of a statement does not define."""
    keys = NOTATION["statements"].get(one.id, [])
    return "\n".join(f"- {key.partition(' [')[0]}: {NOTATION['symbols'][key]}" for key in keys)


def index(title: str, after: str, rows: list[tuple[str, str, str]]) -> str:
    """A list of pages."""
    lines = [f"# {title}\n", f"{after}\n", "| | | source |", "|---|---|---|"]
    return "\n".join(lines + [f"| [{name}]({name}.md) | {text} | {source} |" for name, text, source in rows]) + "\n"


def draw_gallery(folder: Path, trials: int | None = None) -> None:
    """Do what gallery.md says in an empty folder, files and commands, and keep the pictures and the report."""
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
    (folder / "methods" / "index.md").write_text(index("Methods", AFTER_METHODS, rows), encoding="utf-8")
    listed = []
    for one in statements():
        verdict = verify(one, trials=trials)
        (folder / "statements" / f"{one.id}.md").write_text(statement_page(one, verdict), encoding="utf-8")
        save_figure(margin_figure(verdict), folder / "statements" / f"{one.id}.png")
        also = f" ({', '.join(f'`{alias}`' for alias in one.aliases)})" if one.aliases else ""
        listed.append((one.id, f"{one.title}{also}: **{verdict.status}**", linked(one.source)))
    (folder / "statements" / "index.md").write_text(index("Statements", AFTER_STATEMENTS, listed), encoding="utf-8")


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

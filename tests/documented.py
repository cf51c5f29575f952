"""What a page of the documentation promises: its blocks of code, in order, run in a folder of their own.

`docs/contributing.md` says what the language of a block means, and how far what is printed may differ.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```([a-z]+)(?: rtol=([\d.]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|ya?ml|cfg|ini))\n")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
#: How far numbers may be from those on the page, relatively, unless the block says otherwise.
RTOL = 0.02
#: What is smaller is rounding, and differs from machine to machine.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins at, and how far numbers may be off."""

    language: str
    text: str
    line: int
    rtol: float = RTOL

    @property
    def file(self):
        """The name of the file that it is."""
        named = FILE.match(self.text)
        return named[1] if named else None


def blocks(page):
    """The blocks of a page in order."""
    return [Block(m[1], m[3], page[: m.start()].count("\n") + 1, float(m[2] or RTOL)) for m in FENCE.finditer(page)]


def commands(block):
    """The command lines of a block, continued lines joined, comments left out."""
    if block.language == "console":
        return [command for command, _ in sessions(block)]
    if block.language == "yaml":
        steps = re.findall(r"^ *- run: ([^>|\n].*)$|^ +run: (?!>)(.+)$|^ +run: >\n((?: {10}.*\n)+)", block.text, re.M)
        return [" ".join("".join(step).split()) for step in steps]
    joined = block.text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def sessions(block):
    """The commands of a ``console`` block, each with what it is said to print."""
    parts = re.split(r"^\$ (.*(?:\\\n.*)*)\n", block.text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"line {block.line}: a console block begins with a command"
    return [(command.replace("\\\n", " "), said) for command, said in zip(parts[1::2], parts[2::2], strict=True)]


def run(page, folder):
    """Do what a page says in an empty folder.

    Raises
    ------
    AssertionError
        Something fails, or prints something else.
    """
    namespace = {"__name__": page.stem}
    printed = ""
    with importing_from(folder):
        for block in blocks(page.read_text(encoding="utf-8")):
            printed = do(block, page.name, folder, namespace, printed)


@contextlib.contextmanager
def importing_from(folder):
    """Modules in the folder can be imported, and are forgotten afterwards."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def do(block, page, folder, namespace, printed):
    """Do what a block says; returns what its Python printed, or what was printed before."""
    where = f"{page}, line {block.line}"
    if block.file:
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text, encoding="utf-8")
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "python" and not block.file:
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.chdir(folder):
            exec(compile(block.text, where, "exec", dont_inherit=True), namespace)
        return stream.getvalue()
    elif block.language == "output":
        compare(block.text, printed, where, block.rtol)
    elif block.language == "console":
        for command, said in sessions(block):
            compare(said, shell(command, folder, where), f"{where}: {command}", block.rtol)
    return printed


def shell(command, folder, where):
    """What a command prints on both streams; one that fails must say so itself, as in ``… || echo "exit code $?"``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    packages = folder / "site-packages"
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "PATH": path,
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        # pip installs beside the page's files, from what is there
        "PIP_TARGET": str(packages),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    environment.pop("HESSCOND_DATA_DIR", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
    return done.stdout


def compare(said, printed, where, rtol):
    """Every line that is said to be printed is, in order and with nothing between but where ``…`` allows it."""
    wanted, there = lines(said), lines(printed)
    if not wanted:
        return
    at, skipping = 0, False
    for line in wanted:
        if line == ["…"]:
            skipping = True
            continue
        while skipping and at < len(there) and not same(line, there[at], rtol):
            at += 1
        found = at < len(there) and same(line, there[at], rtol)
        assert found, f"{where}: expected “{' '.join(line)}”\nprinted:\n{printed}"
        at, skipping = at + 1, False
    assert skipping or at == len(there), f"{where}: more is printed, from “{' '.join(there[at])}”\n{printed}"


def lines(text):
    """Lines as words; empty ones and rules are left out."""
    return [line.split() for line in text.splitlines() if line.strip(" ─━-")]


def same(said, printed, rtol):
    """Whether the words agree, numbers within the tolerance."""
    if said and said[-1] == "…":
        said, printed = said[:-1], printed[: len(said) - 1]
    return len(said) == len(printed) and all(same_word(*pair, rtol) for pair in zip(said, printed, strict=True))


def same_word(said, printed, rtol):
    """Equal but for the numbers in it, which are close."""
    if said == printed:
        return True
    numbers = NUMBER.findall(said), NUMBER.findall(printed)
    return (
        NUMBER.sub("#", said) == NUMBER.sub("#", printed)
        and len(numbers[0]) == len(numbers[1])
        and all(math.isclose(float(a), float(b), rel_tol=rtol, abs_tol=ROUNDING) for a, b in zip(*numbers, strict=True))
    )


def arguments(command):
    """What follows ``hesscond`` on a command line, up to a pipe or redirection; None: it calls something else."""
    parts = [[]]
    for word in shlex.split(command, comments=True):
        if word in ("|", "||", "&&", ">", ";", "&"):
            parts.append([])
        elif parts[-1] or not re.fullmatch(r"\w+=.*", word):
            parts[-1].append(word)
    for part in parts:
        if part and (part[0] == "hesscond" or "-m hesscond" in " ".join(part)):
            return part[part.index("hesscond") + 1 :]
    return None

"""Tables in LaTeX documents: they compile with the packages that are named."""

import re
import shutil
import subprocess

import pytest

from hesscond.report import TABLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here (TeX Live: latex-base, pictures)"),
]

#: What is wrong with a document though it compiles; sizes of type that a font lacks are not.
WRONG = re.compile(r"Missing character|Overfull|Float too large|undefined|LaTeX Warning", re.I)


def compiled(folder, packages, body):
    """The log of a document, which must be without complaint."""
    lines = [r"\documentclass{article}", rf"\usepackage{{{packages}}}", r"\begin{document}", *body, r"\end{document}"]
    (folder / "document.tex").write_text("\n".join(lines), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (folder / "document.log").read_text(encoding="utf-8", errors="replace")
    assert [line for line in log.splitlines() if WRONG.search(line)] == []
    return log


def test_every_table_is_set_and_no_wider_than_the_text(four_runs, twelve_runs, tmp_path):
    body = []
    for name, kind in TABLES.items():
        for number, runs in enumerate((four_runs, twelve_runs)):
            if kind.fits(runs) is None:
                (tmp_path / f"{name}{number}.tex").write_text(kind.write(runs, "latex"), encoding="utf-8")
                body.append(rf"\input{{{name}{number}.tex}}\clearpage")
    assert len(body) >= 6
    (packages,) = {
        found[1]
        for path in tmp_path.glob("*.tex")
        if (found := re.match(r"% \\usepackage\{(.*)\}\n", path.read_text(encoding="utf-8")))
    }
    compiled(tmp_path, packages, body)

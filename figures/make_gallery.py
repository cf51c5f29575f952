"""Draw the gallery, figures/gallery/, with small runs on scikit-learn's digits: ``python figures/make_gallery.py``.

fc-cifar10.png in it is drawn from the real run of docs/experiments.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
GALLERY = HERE / "gallery"
#: In the order of the page.
SCRIPTS = (
    "training",
    "layers",
    "heatmap",
    "gain_scatter",
    "spectra",
    "rate",
    "margins",
    "comparison",
    "timing",
)
HEAD = """# Gallery

Every figure is drawn by one script of [figures/](..), here from runs of seconds on scikit-learn's digits; give the
script your run folders to draw yours. The first is the real run of docs/experiments.md. `make gallery` draws all others
again.

## conditioning

Loss, κ(H), κ(PᵀHP) and κ(D) over training: Figure 8 of Lange, Helfrich and Ye (JMLR 2022), on CIFAR-10.
`python figures/conditioning.py RUN… -o conditioning.pdf`

![three panels: loss and accuracy, condition numbers, κ(D)](fc-cifar10.png)
"""


def entry(name: str) -> str:
    """The section of a script: what its docstring says, the command, the picture."""
    doc = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    first, _, rest = doc.partition("\n\n")
    commands = rest.partition("::")[2].strip().splitlines()
    shown = "\n".join(line.strip() for line in commands)
    sentence = " ".join(first.split())
    return f"\n## {name}\n\n{sentence}\n\n```sh\n{shown}\n```\n\n![{sentence}]({name}.png)\n"


def main() -> int:
    """Draw all, write the page."""
    GALLERY.mkdir(exist_ok=True)
    for name in SCRIPTS:
        subprocess.run([sys.executable, HERE / f"{name}.py", "-o", GALLERY / f"{name}.png"], check=True)
        print(GALLERY / f"{name}.png")
    page = HEAD + "".join(entry(name) for name in SCRIPTS)
    (GALLERY / "README.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

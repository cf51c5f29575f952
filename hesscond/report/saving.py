"""Figures to files: the same bytes every time, fonts embedded."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from hesscond.errors import ConfigError

#: Supported file types, with the metadata that keeps the time of writing out of the file.
METADATA: dict[str, dict[str, None]] = {
    ".pdf": {"CreationDate": None},
    ".png": {},
    ".svg": {"Date": None},
    ".pgf": {},
}

DOTS_PER_INCH = 300


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a figure, at its own size.

    As PDF (fonts embedded as Type 42), SVG (text as text), PGF (text set by the LaTeX document that reads it; LaTeX is
    not needed to write it) or PNG (300 dpi).

    Raises
    ------
    ConfigError
        Another file type, or the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in METADATA:
        raise ConfigError(f"cannot write a figure to {path}: its name must end in {', '.join(METADATA)}")
    options = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "hesscond", "savefig.bbox": None}
    try:
        with matplotlib.rc_context(options):
            if suffix == ".pgf":
                # half a second of imports, which no command should pay for its --help
                from hesscond.report.pgf import write_pgf

                write_pgf(figure, path, DOTS_PER_INCH)
            else:
                figure.savefig(path, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=METADATA[suffix])
    except OSError as error:
        raise ConfigError(f"the figure {path} cannot be written: {error.strerror or error}") from None

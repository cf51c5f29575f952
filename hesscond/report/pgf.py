"""Figures as PGF without a LaTeX installation: matplotlib's own writer runs one to measure text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_mixed import MixedModeRenderer
from matplotlib.backends.backend_pgf import RendererPgf
from matplotlib.figure import Figure

from hesscond.report.writing import latex_escaped

HEAD = r"""%% \usepackage{pgf} in the preamble, then \input this file; text is set in the fonts of the document.
%% A picture inside the figure lies beside this file: \usepackage{import} and \import{folder/}{file} find it.
\begingroup%%
\makeatletter%%
\providecommand{\mathdefault}[1]{#1}%%
\begin{pgfpicture}
\pgfpathrectangle{\pgfpointorigin}{\pgfqpoint{%fin}{%fin}}
\pgfusepath{use as bounding box, clip}
"""
TAIL = r"""\end{pgfpicture}%
\makeatother%
\endgroup%
"""
ALIGNED = {"left": "left", "right": "right", "center": ""}
RAISED = {"top": "top", "bottom": "bottom", "baseline": "base", "center": ""}


def write_pgf(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure as PGF; pictures inside it go beside the file, with ``dpi`` dots an inch.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    # the panels are laid out by matplotlib's fonts, and another renderer must not move them again
    figure.draw_without_rendering()
    engine, before = figure.get_layout_engine(), figure.dpi
    try:
        with matplotlib.rc_context({"pgf.rcfonts": False}), path.open("w", encoding="utf-8", newline="\n") as file:
            figure.set_layout_engine("none")
            width, height = (float(inches) for inches in figure.get_size_inches())
            file.write(HEAD % (width, height))
            figure.draw(MixedModeRenderer(figure, width, height, dpi, Renderer(figure, file, dpi)))
            file.write(TAIL)
    finally:
        figure.dpi = before
        figure.set_layout_engine(engine)


class Renderer(RendererPgf):
    """Measures with matplotlib's fonts what the document will set, and writes it so that any LaTeX sets it."""

    def __init__(self, figure: Figure, file: Any, dots: int) -> None:
        super().__init__(figure, file)
        self.dots = dots

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> Any:
        """By matplotlib's own fonts."""
        return RendererBase.get_text_width_height_descent(self, s, prop, ismath)

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        """Set a text where it is anchored: the document's fonts are wider or narrower."""
        place = [f"x={x / self.dpi:f}in", f"y={y / self.dpi:f}in", "left", "base"]
        if mtext and (angle == 0 or mtext.get_rotation_mode() == "anchor"):
            raised = RAISED.get(mtext.get_verticalalignment())
            if raised is not None:
                x, y = mtext.get_transform().transform(mtext.get_unitless_position())
                aligned = ALIGNED[mtext.get_horizontalalignment()]
                place = [f"x={x / self.dpi:f}in", f"y={y / self.dpi:f}in", aligned, raised]
        if angle:
            place.append(f"rotate={angle:f}")
        size = prop.get_size_in_points()
        color = ",".join(f"{channel:f}" for channel in gc.get_rgb()[:3])
        weight = r"\bfseries" if prop.get_weight() in ("bold", "heavy", "black") else ""
        text = set_by_latex(s) if ismath else latex_escaped(s)
        style = rf"\color[rgb]{{{color}}}\fontsize{{{size:f}}}{{{1.2 * size:f}}}{weight}\selectfont "
        self.fh.write("\\begin{pgfscope}\n")
        self._print_pgf_clip(gc)
        self.fh.write(f"\\pgftext[{','.join(filter(None, place))}]{{{style}{text}}}%\n\\end{{pgfscope}}\n")

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        """A picture, as a file beside the figure."""
        from PIL import Image

        path = Path(self.fh.name)
        name = f"{path.stem}-img{self.image_counter}.png"
        self.image_counter += 1
        Image.fromarray(im[::-1]).save(path.parent / name)
        height, width = im.shape[0] / self.dots, im.shape[1] / self.dots
        self.fh.write("\\begin{pgfscope}\n")
        self._print_pgf_clip(gc)
        where = f"left,bottom,x={x / self.dpi:f}in,y={y / self.dpi:f}in"
        picture = rf"\includegraphics[width={width:f}in,height={height:f}in]{{{name}}}"
        self.fh.write(f"\\pgftext[{where}]{{{picture}}}%\n\\end{{pgfscope}}\n")


def set_by_latex(text: str) -> str:
    r"""Text with formulas between dollars, as matplotlib has it, for LaTeX.

    Examples
    --------
    >>> print(set_by_latex(r"50 % of $\kappa$, a_b"))
    50 \% of $\kappa$, a\_b
    """
    parts = re.split(r"(\$[^$]*\$)", text)
    # a blank at an end of a part separates it from the formula beside it
    return "".join(
        part if part.startswith("$") else re.sub(r"\S(.*\S)?", lambda found: latex_escaped(found[0]), part, count=1)
        for part in parts
    )

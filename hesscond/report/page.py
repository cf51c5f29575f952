"""The page a figure is for, of a journal's column or a venue's template, and the file it is written to."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hesscond.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Width = Literal["column", "full"]

#: Width of a journal column, in inches.
COLUMN_WIDTH = 3.3
#: Largest height of a figure, in inches: what a page leaves for it next to its caption.
TALLEST = 9.0
#: Width in inches from which a page has panels side by side.
WIDE = 5.0

#: rcParams while a figure is made; 6.5 pt is the smallest type.
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",
    "font.size": 7.0,
    "axes.labelsize": 7.0,
    "axes.titlesize": 7.0,
    "axes.linewidth": 0.6,
    "axes.labelpad": 2.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.direction": "out",
    "ytick.direction": "out",
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.4,
    "ytick.minor.size": 1.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.pad": 2.0,
    "ytick.major.pad": 2.0,
    "hatch.linewidth": 0.4,
    "legend.fontsize": 6.5,
}

#: Sizes taken from a venue; its fonts are replaced by ones that matplotlib has, the same on every machine.
SIZES = ("font.size", "axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
FONTS = {
    "serif": {"font.family": "STIXGeneral", "mathtext.fontset": "stix"},
    "sans-serif": {"font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"},
}
#: Bundles of tueplots that are for slides, or for one university.
NO_VENUES = ("beamer", "tue_ai")


@dataclass(frozen=True)
class Page:
    """Page that figures are drawn for: its width and its style.

    Attributes
    ----------
    width
        Width of the figure, in inches.
    template
        rcParams of the page.
    height
        Height of the figure, in inches; None: what its contents take.
    fixed_sizes
        Whether the sizes of the type are those of the template, whatever the user's rcParams say.
    """

    width: float = COLUMN_WIDTH
    template: Mapping[str, Any] = field(default_factory=lambda: STYLE)
    height: float | None = None
    fixed_sizes: bool = False

    @property
    def style(self) -> Mapping[str, Any]:
        """Parameters while the figure is made: those of the user that are not matplotlib's defaults come first."""
        import matplotlib

        current, default = matplotlib.rcParams, matplotlib.rcParamsDefault
        names = [name for name in self.template if not (self.fixed_sizes and name in SIZES)]
        given = {name: current[name] for name in names if current[name] != default[name]}
        style = self.template
        if isinstance(size := given.get("font.size"), float):
            style = resized(style, size)
        # a size of type may be a word as "large"
        return {
            **style,
            **{name: value for name, value in given.items() if name not in SIZES or isinstance(value, (int, float))},
        }

    @property
    def scale(self) -> float:
        """Size of the type, relative to that of `STYLE`."""
        return float(self.style["font.size"]) / float(STYLE["font.size"])

    @property
    def wide(self) -> bool:
        """Whether panels go side by side."""
        return self.width >= WIDE

    def styled(self) -> Any:
        """Context manager that sets the rcParams of the page."""
        import matplotlib

        return matplotlib.rc_context(dict(self.style))

    def figure(self, height: float, *, h_pad: float = 0.03, hspace: float = 0.02) -> Figure:
        """An empty figure, its height in inches for the type of `STYLE`; pads of constrained layout, likewise."""
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        layout = ConstrainedLayoutEngine(h_pad=h_pad, w_pad=0.02, hspace=hspace)
        tall = min(height * self.scale, TALLEST) if self.height is None else self.height
        return Figure(figsize=(self.width, tall), layout=layout)

    def wrapped(self, text: str, size: float | None = None) -> str:
        """The text in lines that fit the width, at a type size in points (that of the legend if not given)."""
        return textwrap.fill(text, max(20, self.letters(self.width, size)), break_on_hyphens=False)

    def letters(self, inches: float, size: float | None = None) -> int:
        """Number of letters that fit a width, at a type size in points (that of the legend if not given)."""
        return int(1.72 * 72 * inches / (float(self.style["legend.fontsize"]) if size is None else size))


def resized(style: Mapping[str, Any], size: float) -> dict[str, Any]:
    """Style with another size of type in points, and the other sizes in proportion."""
    factor = size / float(style["font.size"])
    return {**style, **{name: factor * float(style[name]) for name in SIZES}}


#: One column of a two-column journal.
COLUMN = Page()


def venues() -> dict[str, Any]:
    """Functions of tueplots that make the style of a venue, by the name of the venue."""
    from tueplots import bundles

    functions = inspect.getmembers(bundles, inspect.isfunction)
    return {name: make for name, make in functions if not name.startswith(("_", *NO_VENUES))}


def venue_page(venue: str, width: Width = "column") -> Page:
    """The page of a venue's template.

    Parameters
    ----------
    venue
        A name as tueplots has it: ``"neurips2024"``, ``"icml2024"``, ``"jmlr2001"``, …
    width
        ``"column"``, or ``"full"``: across both columns. They are the same where the template has one column.

    Returns
    -------
    Page
        Page with the venue's width and type sizes. Fonts: STIX for serif, DejaVu for sans-serif templates; both come
        with matplotlib and are embedded, so that a figure is the same on every machine.

    Examples
    --------
    >>> venue_page("icml2024").width, venue_page("icml2024", "full").width
    (3.25, 6.75)
    """
    known = venues()
    if venue not in known:
        raise ConfigError(f"unknown venue {venue!r}: choose from {', '.join(known)}")
    if width not in ("column", "full"):
        raise ConfigError(f"unknown width {width!r}: choose from column, full")
    make = known[venue]
    accepted = inspect.signature(make).parameters
    options: dict[str, Any] = {"usetex": False} if "usetex" in accepted else {}
    if "column" in accepted:
        options["column"] = "half" if width == "column" else "full"
    bundle = make(**options)
    style = STYLE | {name: float(bundle[name]) for name in SIZES} | FONTS[bundle["font.family"]]
    return Page(float(bundle["figure.figsize"][0]), style)


#: Supported file types, with the metadata that keeps the time of writing out of the file.
METADATA: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".png": {}, ".svg": {"Date": None}}

DOTS_PER_INCH = 300


def save_figure(figure: Figure, path: Path | str) -> None:
    """Write a figure to a file, at its own size.

    The file is PDF (fonts embedded as Type 42), SVG (text as text) or PNG (300 dpi), by the ending of its name.
    """
    import matplotlib

    path = Path(path)
    suffix, partial = path.suffix.lower(), path.with_name(f".{path.name}.part")
    if suffix not in METADATA:
        raise ConfigError(f"cannot write a figure to {path}: its name must end in {', '.join(METADATA)}")
    options = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "hesscond", "savefig.bbox": None}
    try:
        with matplotlib.rc_context(options), warnings.catch_warnings():
            warnings.filterwarnings("error", "constrained_layout not applied")
            figure.savefig(partial, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=METADATA[suffix])
        partial.replace(path)
    except (OSError, UserWarning) as error:
        # a full disk leaves nothing, and an earlier figure as it was
        partial.unlink(missing_ok=True)
        if isinstance(error, UserWarning):
            size = " × ".join(f"{inches:g}" for inches in figure.get_size_inches())
            sentence = f"{size} inches have no room for the labels: give a larger --size or a smaller --font-size"
            raise ConfigError(sentence) from None
        raise ConfigError(f"the figure {path} cannot be written: {error.strerror or error}") from None


def save_both(figure: Figure, path: Path) -> None:
    """Write a figure as PDF and as PNG; the path has no ending."""
    for suffix in (".pdf", ".png"):
        save_figure(figure, path.with_name(path.name + suffix))

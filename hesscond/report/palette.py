"""Looks of methods: one colour, marker and dash each, the same in every figure.

Colours tell families of methods apart, for every common type of colour vision; markers and dashes tell methods apart
within a family, and in black and white.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Dash = Any

SOLID: Dash = "-"
DASHED: Dash = (0, (4, 1.5))
DOTTED: Dash = (0, (1, 1.3))
DASH_DOT: Dash = (0, (4, 1.3, 1, 1.3))
DASHES: tuple[Dash, ...] = (SOLID, DASHED, DASH_DOT, DOTTED)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


@dataclass(frozen=True)
class MethodLook:
    """Colour as #RRGGBB, marker, and line style of a method."""

    color: str
    marker: str
    dash: Dash = SOLID


#: Every method that comes with hesscond. The first of a family has the colour of Okabe and Ito (2008).
METHOD_LOOKS = {
    "vanilla": MethodLook("#D55E00", "o"),
    "l2": MethodLook("#8C2D04", "s", DASHED),
    "gradient-regularization": MethodLook("#CC6677", "^", DASH_DOT),
    "bnp": MethodLook("#0072B2", "s"),
    "whitening": MethodLook("#332288", "D", DASHED),
    "batchnorm": MethodLook("#009E73", "^"),
    "batchrenorm": MethodLook("#117733", "v", DASHED),
    "four-things-batchnorm": MethodLook("#7A8B22", "D", DASH_DOT),
    "layernorm": MethodLook("#56B4E9", "D"),
    "groupnorm": MethodLook("#44AA99", "P", DASHED),
    "equilibration": MethodLook("#E69F00", "v"),
    "weightnorm": MethodLook("#997700", "<", DASHED),
    "centred-weightnorm": MethodLook("#664400", ">", DASH_DOT),
    "weightstandardization": MethodLook("#AA7744", "p", DOTTED),
    "gauss-newton": MethodLook("#0B3C5D", "*"),
    "sphere": MethodLook("#CC79A7", "P"),
    "adam": MethodLook("#AA4499", "X"),
    "adamw": MethodLook("#882255", "h", DASHED),
    "rmsprop": MethodLook("#6A3D9A", "<", DASH_DOT),
    "adagrad": MethodLook("#9970AB", ">", DOTTED),
    "adahessian": MethodLook("#DDAACC", "v", DASHED),
    "sophia": MethodLook("#771155", "D", DASH_DOT),
    "kfac": MethodLook("#1B6CA8", "^"),
    "ekfac": MethodLook("#4FA3D1", "v", DASHED),
    "shampoo": MethodLook("#B8860B", "o"),
    "soap": MethodLook("#8B5A2B", "s", DASHED),
    "muon": MethodLook("#C2185B", "X"),
    "psgd": MethodLook("#5D4037", "P", DASH_DOT),
    "standardize": MethodLook("#444444", "p"),
    "minmax": MethodLook("#888888", "h", DASHED),
}

#: Names of methods in the figures of the papers.
LEGENDS = {
    "BN": "batchnorm",
    "BRN": "batchrenorm",
    "4 Things": "four-things-batchnorm",
    "LN": "layernorm",
    "GN": "groupnorm",
    "BNP": "bnp",
    "Ours": "sphere",
    "WS": "weightstandardization",
    "WC": "equilibration",
    "E": "equilibration",
    "W": "weightnorm",
}

METHOD_COLORS = {name: look.color for name, look in METHOD_LOOKS.items()}

#: For methods without an entry above: Tol's "muted" colours and darker ones, all different from those.
OTHER_COLORS = ("#004488", "#BB5566", "#999933", "#99462F", "#3B7D5B", "#5D4E8C", "#A0522D", "#2F6F8F")

#: Shares of white (above 0) or black mixed into a method's colour for its variants, the method with options.
SHADES = (-0.5, 0.45, -0.35, 0.6, -0.65, 0.3)


def method_look(method: str) -> MethodLook:
    """Look of a method, fixed by its name: options, methods joined to it, and rates give a shade of its colour."""
    start, *_ = re.split(r"[:+]| · ", method, maxsplit=1)
    rest, name = method[len(start) + 1 :], LEGENDS.get(start, start)
    number = zlib.crc32(name.encode())
    look = METHOD_LOOKS.get(name) or MethodLook(
        OTHER_COLORS[number % len(OTHER_COLORS)], MARKERS[number // 8 % len(MARKERS)], DASHES[number // 128 % 4]
    )
    return varied(look, zlib.crc32(rest.encode())) if rest else look


def varied(look: MethodLook, number: int) -> MethodLook:
    """Look with another shade, marker and dash."""
    from matplotlib.colors import to_hex, to_rgb

    marker = MARKERS[(MARKERS.index(look.marker) + 1 + number // 8 % (len(MARKERS) - 1)) % len(MARKERS)]
    dash = DASHES[(DASHES.index(look.dash) + 1 + number // 128 % 3) % len(DASHES)]
    # mixed with white (above 0) or black
    amount = SHADES[number % len(SHADES)]
    color = (1 - abs(amount)) * np.array(to_rgb(look.color)) + abs(amount) * (amount > 0)
    return MethodLook(to_hex(color).upper(), marker, dash)


def method_looks(methods: Iterable[str]) -> dict[str, MethodLook]:
    """The look of each method; only if two of one call share a colour does the later in the alphabet get another."""
    chosen: dict[str, MethodLook] = {}
    for method in sorted(set(methods), key=lambda name: (name not in METHOD_LOOKS, name)):
        look, colors = method_look(method), {other.color for other in chosen.values()}
        free = [look, *(MethodLook(color, look.marker, look.dash) for color in OTHER_COLORS)]
        free += [varied(look, number) for number in range(len(SHADES))]
        chosen[method] = next((candidate for candidate in free if candidate.color not in colors), look)
    return chosen


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """The colour of each method.

    Examples
    --------
    >>> method_colors(["bnp", "vanilla"])
    {'vanilla': '#D55E00', 'bnp': '#0072B2'}
    """
    chosen = method_looks(methods)
    return {method: chosen[method].color for method in sorted(chosen, key=lambda name: (name != "vanilla", name))}

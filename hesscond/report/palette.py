"""One colour per method, the same in every figure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

#: Colours of Okabe and Ito (2008), told apart with every common colour vision.
METHOD_COLORS = {
    "vanilla": "#D55E00",
    "bnp": "#0072B2",
    "batchnorm": "#009E73",
    "equilibration": "#E69F00",
    "sphere": "#CC79A7",
    "layernorm": "#56B4E9",
}

#: For methods without an entry above: Tol's "muted" colours, all different from those.
OTHER_COLORS = ("#332288", "#117733", "#882255", "#999933", "#44AA99", "#CC6677", "#AA4499", "#88CCEE")


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """The colour of each method.

    A method of `METHOD_COLORS` always has the same one. Another has one fixed by its name; only if two such
    methods of one call share it does the later in the alphabet take the next free one.

    Examples
    --------
    >>> method_colors(["bnp", "vanilla"])
    {'bnp': '#0072B2', 'vanilla': '#D55E00'}
    """
    chosen: dict[str, str] = {}
    for method in sorted(set(methods)):
        if method in METHOD_COLORS:
            chosen[method] = METHOD_COLORS[method]
            continue
        start = zlib.crc32(method.encode()) % len(OTHER_COLORS)
        order = OTHER_COLORS[start:] + OTHER_COLORS[:start]
        chosen[method] = next((color for color in order if color not in chosen.values()), order[0])
    return chosen

"""No method: the plain gradient in plain coordinates."""

from __future__ import annotations

from hesscond.methods import base


@base.register
class Vanilla(base.Method):
    """The plain gradient, with which every other method is compared."""

    name = "vanilla"
    summary = "plain gradient, nothing transformed"
    source = "-"

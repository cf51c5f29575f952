"""No method: the plain gradient in plain coordinates."""

from __future__ import annotations

from hesscond.methods.base import Method, register


@register
class Vanilla(Method):
    """The plain gradient, with which every other method is compared."""

    name = "vanilla"
    summary = "plain gradient, nothing transformed"
    source = "-"

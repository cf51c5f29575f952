"""No method: the plain gradient in plain coordinates."""

from __future__ import annotations

from hesscond.methods.base import Method
from hesscond.methods.registry import register


@register
class Vanilla(Method):
    """The gradient as it is; the yardstick for every other method."""

    name = "vanilla"
    summary = "plain gradient, nothing transformed"
    source = "-"

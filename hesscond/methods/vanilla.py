"""No method: the plain gradient in plain coordinates."""

from __future__ import annotations

from hesscond.hessians import Preconditioner
from hesscond.methods.base import Method, register


@register
class Vanilla(Method):
    """The gradient as it is; the yardstick for every other method."""

    name = "vanilla"
    summary = "plain gradient, nothing transformed"
    source = "-"

    def transform_gradients(self) -> None:
        """Leave the gradients as they are."""
        return

    def preconditioner(self, layer: str) -> Preconditioner | None:
        """None: plain coordinates."""
        return None

"""One file per method: how the network is built, how the gradient is transformed, which coordinates decide.

A method's module registers it when it is imported, as all modules of this package are. `parse` reads what ``--method``
says.
"""

from hesscond.lazy import imported
from hesscond.methods.base import Method, classes, method_class, option, register, registered
from hesscond.methods.spec import Composed, Spec, options, parse

__all__ = ["Composed", "Method", "Spec", "method_class", "option", "options", "parse", "register", "registered"]

imported(__name__)
__all__ += sorted(classes())


def __getattr__(name: str) -> type[Method]:
    """Registered method whose class has this name."""
    try:
        return classes()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

"""One file per method: how the gradient is transformed, and the coordinates its Hessian is measured in.

Importing a method's module registers it; add yours to the list below.
"""

from hesscond.methods.base import Method, method_class, register, registered
from hesscond.methods.bnp import BNP
from hesscond.methods.vanilla import Vanilla

__all__ = ["BNP", "Method", "Vanilla", "method_class", "register", "registered"]

"""Matrices known by their products with vectors: one protocol, and operators composed of others.

Nothing here knows of networks or of spectra. A new operator is one class with one product.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.operators.adapters import as_operator
    from hesscond.operators.estimates import Estimate, diagonal, frobenius_norm, trace
    from hesscond.operators.operator import (
        ApproximateInverse,
        Congruence,
        Dense,
        Diagonal,
        DiagonalInverse,
        Gram,
        LinearOperator,
        Matrix,
        Shifted,
        Sum,
        SymmetricOperator,
        ritz_range,
    )
    from hesscond.operators.subspace import DirectSum, Span, Subspace
    from hesscond.operators.systems import solve
else:
    __getattr__, __dir__ = attach(__name__)

__all__ = [
    "ApproximateInverse",
    "Congruence",
    "Dense",
    "Diagonal",
    "DiagonalInverse",
    "DirectSum",
    "Estimate",
    "Gram",
    "LinearOperator",
    "Matrix",
    "Shifted",
    "Span",
    "Subspace",
    "Sum",
    "SymmetricOperator",
    "as_operator",
    "diagonal",
    "frobenius_norm",
    "ritz_range",
    "solve",
    "trace",
]

"""Matrices known by their products with vectors: one protocol, and operators composed of others.

Nothing here knows of networks or of spectra. A new operator is one class with one product.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.operators.adapters import as_operator as as_operator
    from hesscond.operators.estimates import (
        Estimate as Estimate,
        diagonal as diagonal,
        frobenius_norm as frobenius_norm,
        trace as trace,
    )
    from hesscond.operators.operator import (
        ApproximateInverse as ApproximateInverse,
        Congruence as Congruence,
        Dense as Dense,
        Diagonal as Diagonal,
        DiagonalInverse as DiagonalInverse,
        Gram as Gram,
        LinearOperator as LinearOperator,
        Matrix as Matrix,
        Shifted as Shifted,
        Sum as Sum,
        SymmetricOperator as SymmetricOperator,
        ritz_range as ritz_range,
    )
    from hesscond.operators.subspace import DirectSum as DirectSum, Span as Span, Subspace as Subspace
else:
    __getattr__, __dir__, __all__ = attach(__name__)

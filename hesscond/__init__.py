"""Exact per-layer Hessian condition numbers of neural networks.

Reading order: `problem` (model, loss and data) → `operators` (matrices known by their products) → `capture` (what a
layer sees) → `spectra` (κ and how it is decided) → `hessians` (built from these) → `methods` → `probing` → the rest.
Each package imports only from those before it. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.errors import (
        CaptureError,
        ConfigError,
        CorruptDataError,
        DataNotFoundError,
        DivergedError,
        HesscondError,
        MatrixError,
        NoDerivativeError,
        NotFiniteError,
        RunError,
    )
    from hesscond.hessians import GGNOperator, HessianOperator, Preconditioner, SphereTangentOperator
    from hesscond.methods import Method, register
    from hesscond.probing.diff import Diff, diff
    from hesscond.probing.entry import probe
    from hesscond.probing.results import LayerResult, NetworkResult, ProbeResult
    from hesscond.scaling import (
        OptimalKronecker,
        OptimalScaling,
        optimal_diagonal_scaling,
        optimal_kronecker_scaling,
    )
    from hesscond.spectra import (
        ConditionNumber,
        Density,
        EigenResult,
        ExactRank,
        Rank,
        condition_number,
        density,
        exact_rank,
        lanczos,
        rank,
        smallest_nonzero,
    )
    from hesscond.theorems import Verdict, verify
    from hesscond.watching import Alarm, Watch, watch
else:
    __getattr__, __dir__ = attach(__name__)

__version__ = "0.1.0"

__all__ = [
    "Alarm",
    "CaptureError",
    "ConditionNumber",
    "ConfigError",
    "CorruptDataError",
    "DataNotFoundError",
    "Density",
    "Diff",
    "DivergedError",
    "EigenResult",
    "ExactRank",
    "GGNOperator",
    "HesscondError",
    "HessianOperator",
    "LayerResult",
    "MatrixError",
    "Method",
    "NetworkResult",
    "NoDerivativeError",
    "NotFiniteError",
    "OptimalKronecker",
    "OptimalScaling",
    "Preconditioner",
    "ProbeResult",
    "Rank",
    "RunError",
    "SphereTangentOperator",
    "Verdict",
    "Watch",
    "condition_number",
    "density",
    "diff",
    "exact_rank",
    "lanczos",
    "optimal_diagonal_scaling",
    "optimal_kronecker_scaling",
    "probe",
    "rank",
    "register",
    "smallest_nonzero",
    "verify",
    "watch",
]

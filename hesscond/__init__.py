"""Exact per-layer Hessian condition numbers of neural networks.

Reading order: `problem` (model, loss and data) → `operators` (matrices known by their products) → `capture` (what a
layer sees) → `spectra` (κ and how it is decided) → `hessians` (built from these) → `methods` → `probing` → the rest.
Each package imports only from those before it. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.errors import (
        CaptureError as CaptureError,
        ConfigError as ConfigError,
        CorruptDataError as CorruptDataError,
        DataNotFoundError as DataNotFoundError,
        DivergedError as DivergedError,
        HesscondError as HesscondError,
        MatrixError as MatrixError,
        NoDerivativeError as NoDerivativeError,
        NotFiniteError as NotFiniteError,
        RunError as RunError,
        TooLargeError as TooLargeError,
    )
    from hesscond.hessians import (
        GGNOperator as GGNOperator,
        HessianOperator as HessianOperator,
        Preconditioner as Preconditioner,
        SphereTangentOperator as SphereTangentOperator,
    )
    from hesscond.methods import Method as Method, register as register
    from hesscond.probing.diff import Diff as Diff, diff as diff
    from hesscond.probing.entry import probe as probe
    from hesscond.probing.results import (
        LayerResult as LayerResult,
        NetworkResult as NetworkResult,
        ProbeResult as ProbeResult,
    )
    from hesscond.scaling import (
        OptimalKronecker as OptimalKronecker,
        OptimalScaling as OptimalScaling,
        optimal_diagonal_scaling as optimal_diagonal_scaling,
        optimal_kronecker_scaling as optimal_kronecker_scaling,
    )
    from hesscond.spectra import (
        ConditionNumber as ConditionNumber,
        Density as Density,
        EigenResult as EigenResult,
        ExactRank as ExactRank,
        Rank as Rank,
        condition_number as condition_number,
        exact_rank as exact_rank,
        smallest_nonzero as smallest_nonzero,
    )
    from hesscond.spectra.density import density as density
    from hesscond.spectra.lanczos import lanczos as lanczos
    from hesscond.spectra.rank import rank as rank
    from hesscond.theorems import Verdict as Verdict, verify as verify
    from hesscond.watching import Watch as Watch, watch as watch
else:
    __getattr__, __dir__, __all__ = attach(__name__)

__version__ = "0.1.0"

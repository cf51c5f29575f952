"""Exact per-layer Hessian condition numbers of neural networks.

Reading order: `capture` (what a layer sees) → `hessians` (the operators built from it) → `spectra` (κ and how
it was decided) → `methods` → `probe` → the rest. Each room imports only from those before it.
"""

from hesscond.hessians import Preconditioner
from hesscond.methods import Method, register
from hesscond.probe import ProbeResult, probe
from hesscond.spectra import ConditionNumber, condition_number

__version__ = "0.1.0"

__all__ = [
    "ConditionNumber",
    "Method",
    "Preconditioner",
    "ProbeResult",
    "condition_number",
    "probe",
    "register",
]

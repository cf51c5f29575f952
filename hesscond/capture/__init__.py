"""What a layer sees: extended activations Ĥ, curvature S and feature statistics, without side effects.

The first room: it imports nothing else of hesscond but the errors.
"""

from hesscond.capture.forward import (
    Batch,
    LayerCapture,
    Recorder,
    capture,
    checked_units,
    chosen_layers,
    dense_layers,
)
from hesscond.capture.losses import LossFunction
from hesscond.capture.statistics import FeatureStatistics

__all__ = [
    "Batch",
    "FeatureStatistics",
    "LayerCapture",
    "LossFunction",
    "Recorder",
    "capture",
    "checked_units",
    "chosen_layers",
    "dense_layers",
]

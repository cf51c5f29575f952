"""Capture of the inputs of layers: extended activations Ĥ, curvature S and feature statistics, without side effects.

`forward` runs the model of a `problem`, `curved` reads the curved nodes of its graph, `curvature` chooses the route to
S, `kinds` has a file for each kind of layer.
"""

from hesscond.capture.captured import DiagonalS, EntryBounds, FactoredS, FormedH, LayerCapture, LayerInputs
from hesscond.capture.capturing import Captures, capture
from hesscond.capture.kinds import Geometry, Layer, is_layer
from hesscond.capture.layers import checked_units, chosen_layers, dense_layers, eligible_layers
from hesscond.capture.progress import STOPPED, ProbeProgress, ProgressRecord
from hesscond.capture.recorder import Recorded, Recorder
from hesscond.capture.statistics import (
    FeatureStatistics,
    RowFactor,
    channel_statistics,
    channel_statistics_of_each,
    entry_statistics,
    inputs_of,
    row_factor,
)

__all__ = [
    "STOPPED",
    "Captures",
    "DiagonalS",
    "EntryBounds",
    "FactoredS",
    "FeatureStatistics",
    "FormedH",
    "Geometry",
    "Layer",
    "LayerCapture",
    "LayerInputs",
    "ProbeProgress",
    "ProgressRecord",
    "Recorded",
    "Recorder",
    "RowFactor",
    "capture",
    "channel_statistics",
    "channel_statistics_of_each",
    "checked_units",
    "chosen_layers",
    "dense_layers",
    "eligible_layers",
    "entry_statistics",
    "inputs_of",
    "is_layer",
    "row_factor",
]

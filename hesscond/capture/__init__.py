"""Capture of the inputs of layers: extended activations Ĥ, curvature S and feature statistics, without side effects.

`forward` runs the model of a `problem`, `curved` reads the curved nodes of its graph, `curvature` chooses the route to
S, `kinds` has a file for each kind of layer.
"""

from hesscond.capture.captured import (
    DiagonalS as DiagonalS,
    EntryBounds as EntryBounds,
    FactoredS as FactoredS,
    FormedH as FormedH,
    LayerCapture as LayerCapture,
    LayerInputs as LayerInputs,
)
from hesscond.capture.capturing import capture as capture
from hesscond.capture.kinds import Geometry as Geometry, Layer as Layer, is_layer as is_layer
from hesscond.capture.layers import (
    chosen_layers as chosen_layers,
    dense_layers as dense_layers,
    eligible_layers as eligible_layers,
)
from hesscond.capture.progress import (
    STOPPED as STOPPED,
    ProbeProgress as ProbeProgress,
    ProgressRecord as ProgressRecord,
)
from hesscond.capture.recorder import Recorder as Recorder
from hesscond.capture.statistics import (
    FeatureStatistics as FeatureStatistics,
    RowFactor as RowFactor,
    channel_statistics as channel_statistics,
    inputs_of as inputs_of,
    row_factor as row_factor,
)

"""Kinds of layers, one a file: what a unit is, how its weights are stored, and which inputs they multiply.

Every module of this package is imported, and its subclasses of `LayerKind` are known from then on: a kind takes one new
file.
"""

import importlib
import pkgutil

from hesscond.capture.kinds.base import (
    KINDS,
    Geometry,
    Layer,
    LayerKind,
    class_of,
    has_bias,
    is_layer,
    is_turned,
    kind_of,
)

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["KINDS", "Geometry", "Layer", "LayerKind", "class_of", "has_bias", "is_layer", "is_turned", "kind_of"]

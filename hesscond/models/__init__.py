"""The networks of the studies: plain torch modules with the papers' initialization.

One file for each family, which registers its networks by name; all take ``(input_shape, outputs, *, options,
generator)`` and draw their weights from the generator only. `layers.py` is what they have in common.
"""

from hesscond.lazy import imported
from hesscond.models.layers import ACTIVATIONS, NORMALIZATIONS, OptionError
from hesscond.models.mlp import MLP
from hesscond.models.registry import MODELS, Architecture, build, checked_option

__all__ = ["ACTIVATIONS", "MLP", "MODELS", "NORMALIZATIONS", "Architecture", "OptionError", "build", "checked_option"]

imported(__name__)

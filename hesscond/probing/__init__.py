"""Measurement of the layers of a model, or of the whole network: from a loss over data to condition numbers.

`entry` is `hesscond.probe`, `question` what it asks; `applied` builds the network of a method. `layers` measures each
block where it is cheapest: `captured` (dense layers, convolutions: Ĥᵀ S Ĥ from one pass), `products` (the rest: H v).
`network` is one block of all parameters. `check` and `differences` compare every answer with the model itself,
`results` are what is returned. `training` measures within a step of training, from the passes that the step makes.
"""

from typing import TYPE_CHECKING

from hesscond.lazy import attach

if TYPE_CHECKING:
    from hesscond.probing.entry import probe as probe
    from hesscond.probing.results import (
        LayerResult as LayerResult,
        NetworkResult as NetworkResult,
        ProbeResult as ProbeResult,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)

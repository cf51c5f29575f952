"""Measurement of the layers of a model, or of the whole network: from a loss over data to condition numbers.

`entry` is `hesscond.probe`; `applied` builds the network of a method, `layers` and `network` measure, `check` compares
every answer with the model itself, `results` are what is returned.
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

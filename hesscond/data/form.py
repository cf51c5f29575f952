"""What the samples of a data set are, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: By the number of dimensions of one input.
KINDS: dict[int, Literal["coordinates", "points", "image"]] = {1: "coordinates", 2: "points", 3: "image"}


@dataclass(frozen=True)
class Form:
    """Shapes of inputs and targets.

    Attributes
    ----------
    input_shape : tuple of int
        Of one input: (channels, height, width), (points, d) or (d,).
    outputs : int
        Classes, or values to predict.
    classes : int
        The number of classes; 0: the targets are values.
    """

    input_shape: tuple[int, ...]
    outputs: int
    classes: int

    @property
    def kind(self) -> Literal["coordinates", "points", "image"]:
        """What the inputs are."""
        return KINDS[len(self.input_shape)]

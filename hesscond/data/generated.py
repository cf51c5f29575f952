"""The table of the data sets that are computed or taken from one photograph: points, coordinates, point clouds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hesscond.data.dataset import Dataset
from hesscond.data.form import Form
from hesscond.data.image_regression import NAME as IMAGE_REGRESSION
from hesscond.data.image_regression import load_image_regression
from hesscond.data.occupancy import NAME as OCCUPANCY
from hesscond.data.occupancy import load_occupancy
from hesscond.data.options import checked
from hesscond.data.shapes import NAME as SHAPES
from hesscond.data.shapes import SURFACES, load_shapes


@dataclass(frozen=True)
class Generated:
    """A data set that is nowhere on disk; calling it makes one.

    Attributes
    ----------
    make
        The loader; its keyword arguments are the options.
    form
        What the samples are, from the values of all options.
    """

    make: Callable[..., Dataset]
    form: Callable[[Mapping[str, Any]], Form]

    @property
    def options(self) -> dict[str, Any]:
        """The options with their defaults."""
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}

    def __call__(self, **options: Any) -> Dataset:
        """The data set.

        Raises
        ------
        ConfigError
            An option that is not there, or a value that does not fit.
        """
        return self.make(**self.checked(options))

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options, see `hesscond.data.options.checked`."""
        return checked(given, self.options)


GENERATED: dict[str, Generated] = {
    IMAGE_REGRESSION: Generated(load_image_regression, lambda options: Form((2,), 3, 0)),
    OCCUPANCY: Generated(load_occupancy, lambda options: Form((3,), 2, 2)),
    SHAPES: Generated(load_shapes, lambda options: Form((options["points"], 3), len(SURFACES), len(SURFACES))),
}

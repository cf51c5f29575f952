"""Tables of a study file other than the study's own: panels with their changes, and what a paper says of them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hesscond.errors import ConfigError
from hesscond.study.sections import Section

At = Literal["end", "best", "first", "mean"]
COMPARISON = re.compile(r"(?P<one>.+?)\s+(?P<sign>[>~])\s+(?P<other>.+)")
RANGE = re.compile(r"(?P<one>.+?)\s+in\s+\[(?P<low>[^,]+),(?P<high>[^,]+)\]")


class Comparison(Section):
    """One comparison of a claim: ``A > B``, ``A ~ B`` (equal within the claim's margin) or ``A in [low, high]``."""

    one: str
    sign: Literal[">", "~", "in"]
    other: str = ""
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, text: str) -> Comparison:
        """The comparison that a text means.

        Examples
        --------
        >>> Comparison.of("4 Things > BN").other
        'BN'
        """
        if found := RANGE.fullmatch(text.strip()):
            try:
                return cls(one=found["one"], sign="in", low=float(found["low"]), high=float(found["high"]))
            except ValueError:
                pass
        elif found := COMPARISON.fullmatch(text.strip()):
            return cls.model_validate(found.groupdict())
        raise ConfigError(
            f"{text!r} is no comparison: use 'A > B', 'A ~ B' or 'A in [low, high]' with names of methods"
        )

    @property
    def names(self) -> list[str]:
        """The methods that are compared."""
        return [self.one, *([self.other] if self.other else [])]


class Claim(Section):
    """``[[claims]]``: what a paper says of some panels of a figure, and which quantity of the runs decides it.

    ``of``: a quantity of `hesscond.report.replication.QUANTITIES`; ``at``: its value at the end, the best of all
    epochs, after the first epoch, or the mean over all. ``margin``: largest difference of methods that count as equal.
    """

    panels: list[str] = Field(default_factory=list)
    says: str
    of: str = "test_accuracy"
    at: At = "end"
    holds: Annotated[list[str], Field(min_length=1)]
    margin: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("holds")
    @classmethod
    def are_comparisons(cls, value: list[str]) -> list[str]:
        """Refuse a text that is not a comparison."""
        try:
            for text in value:
                Comparison.of(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def of_panels(self) -> list[str]:
        """Names of the panels; ``""`` for a figure that is one panel."""
        return self.panels or [""]

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of the claim, all of which must hold."""
        return [Comparison.of(text) for text in self.holds]


class Published(Section):
    """A row of a published table: the value of a quantity for each method; ``tolerance``: what counts as the same."""

    of: str
    at: At = "end"
    values: dict[str, float]
    tolerance: Annotated[float, Field(gt=0)]


class Cost(Section):
    """``[replicate]``: how the figure is drawn, and how long its runs take.

    ``core_hours``: time of all runs at full size with five seeds, on one core of the machine in README.md; ``how``
    it was found. ``probe``: whether condition numbers are measured; only figures that show some need it.
    """

    figure: Literal["training", "conditioning", "timing"] = "training"
    probe: bool = False
    core_hours: Annotated[float, Field(gt=0)] | None = None
    how: Literal["measured", "extrapolated"] = "extrapolated"
    needs: str = ""


class Table(BaseModel):
    """A table whose other keys are those of a study, which are checked when the study is put together."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Named(Table):
    """An entry of ``[[methods]]``, or what a panel changes of one."""

    name: Annotated[str, Field(min_length=1)]


class Rated(Table):
    """An entry of ``[[learning_rates]]``."""

    rate: dict[str, Any] = Field(default_factory=dict)


class Changes(Table):
    """``[small]``: changes of the study."""

    learning_rates: list[Rated] = Field(default_factory=list)


class PanelTable(Changes):
    """An entry of ``[[panels]]``; ``methods``: those of the file by name, or with changes."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    methods: list[str | Named] | None = None
    small: Changes | None = None
    paper: list[Published] = Field(default_factory=list)


class FileTable(Changes):
    """A whole file."""

    methods: list[Named] = Field(default_factory=list)
    small: Changes | None = None
    aliases: dict[str, str] = Field(default_factory=dict)
    panels: list[PanelTable] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)
    replicate: Cost = Cost()
    paper: list[Published] = Field(default_factory=list)

"""Annotations of GitHub Actions: lines that the runner shows at the pull request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO

from hesscond.expectations import Outcome


def on_github(wanted: bool | None) -> bool:
    """Whether to annotate: as asked for, else where GitHub Actions is what runs this."""
    return os.environ.get("GITHUB_ACTIONS") == "true" if wanted is None else wanted


def annotate(outcomes: Sequence[Outcome], refused: Sequence[Outcome], stream: IO[str]) -> None:
    """A line for every expectation that is not met: an error if it is one of those refused, else a warning.

    Parameters
    ----------
    outcomes
        What came of all.
    refused
        Those of them that fail the job.
    stream
        Where the runner reads.
    """
    for one in outcomes:
        if one.status != "met":
            command = "error" if one in refused else "warning"
            title = f"{one.status}: {one.expectation} ({one.runs})"
            stream.write(f"::{command} title={escaped_property(title)}::{escaped(one.reason)}\n")


def escaped(text: str) -> str:
    """As GitHub asks for in a message.

    Examples
    --------
    >>> escaped("50 % of 2")
    '50 %25 of 2'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    """As GitHub asks for in a property, which ends at a comma and at a colon."""
    return escaped(text).replace(":", "%3A").replace(",", "%2C")

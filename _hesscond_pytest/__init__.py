"""Where `hesscond.testing` and its pytest plugin meet: what the assertions of the test that is running need to know.

A package by itself, beside hesscond, because pytest imports the plugin at every start in an environment that has
hesscond: that must not import torch. And the assertions must not need pytest: only `plugin` imports it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

#: What an assertion can do that the bounds do not decide.
POLICIES = ("fail", "warn", "skip", "pass")
#: Name of the properties that carry records from the test to the summary, through xdist and into JUnit reports.
PROPERTY = "hesscond"


@dataclass
class Running:
    """The test that is running.

    Attributes
    ----------
    unresolved
        The policy for assertions that do not say.
    properties
        Of the test; records are added here.
    """

    unresolved: str
    properties: list[tuple[str, object]]

    def record(self, entry: dict[str, str]) -> None:
        """Keep what an assertion came to."""
        self.properties.append((PROPERTY, json.dumps(entry)))


#: None outside of pytest.
running: Running | None = None

"""Papers that methods and statements cite, in full (``papers.toml``)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Paper:
    """A paper, a book or a lecture; ``cited``: words with which sources cite it, ``venue`` includes the year."""

    group: str
    cited: tuple[str, ...]
    authors: str
    title: str
    venue: str
    url: str = ""
    about: str = ""

    def __str__(self) -> str:
        """Return the reference in one line."""
        end = f", {self.url}" if self.url else ""
        return f"{self.authors}: {self.title}. {self.venue}{end}"


@cache
def papers() -> tuple[Paper, ...]:
    """All papers, in the order of the file."""
    text = files("hesscond.commands").joinpath("papers.toml").read_text(encoding="utf-8")
    return tuple(Paper(**(entry | {"cited": tuple(entry["cited"])})) for entry in tomllib.loads(text)["paper"])


@cache
def citations(source: str) -> tuple[tuple[str, Paper], ...]:
    """Papers that a source names, each with the words that name it, in their order."""
    known = {words: paper for paper in papers() for words in paper.cited}
    # the longest first: the name of one paper may be part of that of another
    names = "|".join(re.escape(words) for words in sorted(known, key=len, reverse=True))
    found = dict.fromkeys(re.findall(rf"\b(?:{names})(?!\w)", source))
    return tuple((words, known[words]) for words in found)

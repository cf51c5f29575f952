"""JUnit reports, as CI systems read them: one test case for each thing that was checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hesscond.errors import ConfigError

#: Characters that XML 1.0 cannot hold, not even escaped.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """Test case: one thing that was checked.

    Attributes
    ----------
    group
        Name of the statement or of the run.
    name
        Name of the case in the group.
    failure, kind, details
        If it failed: a sentence, a word for the kind of failure, and further text.
    skipped
        A sentence, if it was left out or not decided.
    """

    group: str
    name: str
    seconds: float = 0.0
    failure: str | None = None
    kind: str = "failed"
    details: str = ""
    skipped: str | None = None


def junit_report(suite: str, cases: Sequence[Case]) -> ElementTree.ElementTree:
    """JUnit report: a suite with its cases, and the numbers of those that failed or were skipped."""
    failures, skipped = (sum(getattr(case, kind) is not None for case in cases) for kind in ("failure", "skipped"))
    counts = {"tests": len(cases), "failures": failures, "errors": 0, "skipped": skipped}
    root = new(None, "testsuite", name=suite, time=f"{sum(case.seconds for case in cases):.3f}", **counts)
    for case in cases:
        element = new(root, "testcase", classname=case.group, name=case.name, time=f"{case.seconds:.3f}")
        if case.failure is not None:
            new(element, "failure", message=case.failure, type=case.kind).text = clean(case.details or case.failure)
        elif case.skipped is not None:
            new(element, "skipped", message=case.skipped)
    return ElementTree.ElementTree(root)


def new(parent: ElementTree.Element | None, tag: str, **attributes: object) -> ElementTree.Element:
    """XML element, below another if one is given."""
    texts = {name: clean(str(value)) for name, value in attributes.items()}
    return ElementTree.Element(tag, texts) if parent is None else ElementTree.SubElement(parent, tag, texts)


def write_junit(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write the report to a file."""
    try:
        junit_report(suite, cases).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path} cannot be written: {error.strerror}") from None


def clean(text: str) -> str:
    """The text with � in place of characters that XML cannot hold."""
    return FORBIDDEN.sub("�", text)

"""JUnit reports, as CI systems read them: one test case for each thing that was checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hesscond.errors import ConfigError

#: What XML 1.0 cannot hold, not even escaped.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One thing that was checked.

    Attributes
    ----------
    group
        Of cases: a statement, a run.
    name
        In the group.
    seconds
        It took.
    failure
        A sentence, if it failed.
    kind
        Of failure, in a word.
    details
        What else there is to say of a failure.
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
    """The report: a suite with its cases, and how many failed or were skipped.

    Parameters
    ----------
    suite
        Its name.
    cases
        In their order.
    """
    failures = sum(case.failure is not None for case in cases)
    skipped = sum(case.skipped is not None for case in cases)
    counts = {"tests": len(cases), "failures": failures, "errors": 0, "skipped": skipped}
    attributes = {name: str(count) for name, count in counts.items()}
    seconds = f"{sum(case.seconds for case in cases):.3f}"
    root = ElementTree.Element("testsuite", name=clean(suite), time=seconds, **attributes)  # type: ignore[arg-type]
    for case in cases:
        element = ElementTree.SubElement(
            root, "testcase", classname=clean(case.group), name=clean(case.name), time=f"{case.seconds:.3f}"
        )
        if case.failure is not None:
            found = ElementTree.SubElement(element, "failure", message=clean(case.failure), type=case.kind)
            found.text = clean(case.details or case.failure)
        elif case.skipped is not None:
            ElementTree.SubElement(element, "skipped", message=clean(case.skipped))
    return ElementTree.ElementTree(root)


def write_junit(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write the report to a file.

    Raises
    ------
    ConfigError
        It cannot be written.
    """
    try:
        junit_report(suite, cases).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path} cannot be written: {error.strerror}") from None


def clean(text: str) -> str:
    """The text with � for what XML cannot hold."""
    return FORBIDDEN.sub("�", text)

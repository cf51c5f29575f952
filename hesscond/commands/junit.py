"""JUnit reports, as CI systems read them: one test case for each thing that was checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from hesscond.errors import ConfigError

#: Characters that XML 1.0 cannot hold, not even escaped.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Case(NamedTuple):
    """Test case: ``result`` is ``passed``, ``skipped``, or a word for the kind of failure; ``message`` a sentence."""

    group: str
    name: str
    result: str = "passed"
    message: str = ""


def junit_report(suite: str, cases: Sequence[Case]) -> ElementTree.ElementTree:
    """JUnit report: a suite with its cases, and the numbers of those that failed or were skipped."""
    skipped = sum(case.result == "skipped" for case in cases)
    failures = len(cases) - skipped - sum(case.result == "passed" for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
    root = ElementTree.Element("testsuite", {"name": clean(suite)} | counts)
    for case in cases:
        element = ElementTree.SubElement(root, "testcase", classname=clean(case.group), name=clean(case.name))
        if case.result == "skipped":
            ElementTree.SubElement(element, "skipped", message=clean(case.message))
        elif case.result != "passed":
            ElementTree.SubElement(element, "failure", type=case.result, message=clean(case.message))
    return ElementTree.ElementTree(root)


def write_junit(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write the report to a file."""
    try:
        junit_report(suite, cases).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path} cannot be written: {error.strerror}") from None


def clean(text: str) -> str:
    """The text with � in place of characters that XML cannot hold."""
    return FORBIDDEN.sub("�", text)

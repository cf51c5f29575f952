"""The pytest plugin of `hesscond.testing`: options, the policy for what is unresolved, a summary of what was asserted.

Nothing here decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any

import pytest

import _hesscond_pytest
from _hesscond_pytest import POLICIES, PROPERTY, Running

#: Lines of the summary without -v.
LINES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the command line and of the ini file."""
    group = parser.getgroup("hesscond", "condition numbers of Hessians")
    group.addoption(
        "--hesscond-unresolved",
        choices=POLICIES,
        help="what an assertion does that the bounds of κ do not decide (default: the ini option, or fail)",
    )
    parser.addini("hesscond_unresolved", "fail | warn | skip | pass: what an undecided assertion does", default="fail")


def pytest_configure(config: pytest.Config) -> None:
    """Check the ini option, register the marker and the summary."""
    config.addinivalue_line(
        "markers", "hesscond(unresolved): the policy of this test for assertions that the bounds of κ do not decide"
    )
    known(config.getini("hesscond_unresolved"), "the ini option hesscond_unresolved")
    config.pluginmanager.register(Summary(config), "hesscond-summary")


def known(policy: str, where: str) -> str:
    """The policy, if there is such a one."""
    if policy not in POLICIES:
        raise pytest.UsageError(f"{where} is one of {', '.join(POLICIES)}, not {policy!r}")
    return policy


def policy_of(item: pytest.Item) -> str:
    """The policy of a test: its marker's, else that of the command line, else that of the ini file."""
    marker = item.get_closest_marker("hesscond")
    if marker is not None:
        unknown = [*marker.args, *(name for name in marker.kwargs if name != "unresolved")]
        if unknown or not marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: write the marker as @pytest.mark.hesscond(unresolved='skip')")
        return known(marker.kwargs["unresolved"], f"unresolved of the marker of {item.nodeid}")
    return item.config.getoption("--hesscond-unresolved") or item.config.getini("hesscond_unresolved")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a bad marker before anything runs."""
    for item in items:
        policy_of(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let the assertions of a test know its policy."""
    before = _hesscond_pytest.running
    _hesscond_pytest.running = Running(policy_of(item), item.user_properties)
    try:
        return (yield)
    finally:
        _hesscond_pytest.running = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Record the assertion that ends a test; one whose error the test catches, or expects, is not a failure."""
    error = None if call.excinfo is None else call.excinfo.value
    record = getattr(getattr(error, "assertion", None), "record", None)
    report = yield
    if record is not None and not hasattr(report, "wasxfail"):
        entry = (PROPERTY, json.dumps(record))
        item.user_properties.append(entry)
        report.user_properties.append(entry)
    return report


class Summary:
    """Says at the end which assertions did not pass: those that ended a test or were let go."""

    def __init__(self, config: pytest.Config) -> None:
        self.verbosity = config.get_verbosity()
        self.found: list[tuple[str, dict[str, str]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Read the records off the last report of a test; with xdist this is where they come together."""
        if report.when == "teardown":
            entries = [json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY]
            self.found += [(report.nodeid, entry) for entry in entries if entry["outcome"] != "passed"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each assertion, failed ones first; nothing where all passed."""
        if not self.found or self.verbosity < -1:
            return
        order = {"failed": "red", "unresolved": "yellow"}
        ranked = sorted(self.found, key=lambda one: list(order).index(one[1]["outcome"]))
        terminalreporter.section("condition numbers", sep="-")
        shown = ranked if self.verbosity > 0 else ranked[:LINES]
        for nodeid, entry in shown:
            terminalreporter.write(f"{entry['outcome']:<10} ", **{order[entry["outcome"]]: True})
            terminalreporter.line(f"{nodeid}: {entry['claim']}: {entry['summary']}")
        if len(shown) < len(ranked):
            terminalreporter.line(f"… and {len(ranked) - len(shown)} more (-v shows all)")
        outcomes = [entry["outcome"] for _, entry in ranked]
        said = ", ".join(f"{outcomes.count(one)} {one}" for one in order if one in outcomes)
        terminalreporter.line(f"assertions about condition numbers: {said}")

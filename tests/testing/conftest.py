import pytest

import _hesscond_pytest


@pytest.fixture(autouse=True)
def assertions_are_what_is_tested(monkeypatch):
    """Keep what they are made to find out of the summary of the plugin."""
    monkeypatch.setattr(_hesscond_pytest, "running", None)

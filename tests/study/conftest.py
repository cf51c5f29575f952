import pytest

from hesscond.data import load
from hesscond.study.files import built_in


@pytest.fixture(scope="session")
def digits():
    return load("digits")


@pytest.fixture(scope="session")
def studies():
    """Those that come with the package."""
    return list(built_in())

import pytest

from hesscond.data import load


@pytest.fixture(scope="session")
def digits():
    return load("digits")

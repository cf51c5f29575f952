from types import SimpleNamespace

import pytest
from report_page import logged, probe


@pytest.fixture
def make(tmp_path):
    """Made-up runs in fresh folders, and rows for them."""
    count = iter(range(1000))
    return SimpleNamespace(
        run=lambda *args, **facts: logged(tmp_path / f"run{next(count)}", *args, **facts), probe=probe
    )

"""The progress bar on a terminal, and silence elsewhere."""

import io
import re

from rich.console import Console

from hesscond.commands.performing import progress_bar
from hesscond.study import Progress

ROW = {"kappa": 1.5e5, "resolved": 1, "kappa_own": 2.5e3, "resolved_own": 1, "kappa_D": 77.0}


def drawn(label, *steps):
    written = io.StringIO()
    console = Console(force_terminal=True, file=written, width=200, color_system=None, _environ={})
    with progress_bar(console, label) as show:
        for step in steps:
            show(step)
    return written.getvalue()


def test_it_shows_where_the_run_is():
    text = drawn("fc-digits bnp seed 0", Progress(3, 10, 0.12345, ROW))
    last = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", text).rstrip().splitlines()[-1]
    for word in ("fc-digits bnp seed 0", "3/10", "loss 0.123", "κ(H) 2e+05", "κ own 2e+03", "κ(D) 8e+01"):
        assert word in last
    assert len(last) <= 80
    assert re.search(r"--:--|\d:\d\d", last)


def test_silence_where_nobody_watches():
    written = io.StringIO()
    with progress_bar(Console(file=written, force_terminal=False), "x") as show:
        assert show is None
    assert written.getvalue() == ""

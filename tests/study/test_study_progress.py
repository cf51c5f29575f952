"""What a study says of a run in training."""

from hesscond.commands.performing import shown_by
from hesscond.study import Progress

ROW = {"kappa": 1.5e5, "resolved": 1, "kappa_own": 2.5e3, "resolved_own": 0, "kappa_D": 77.0}


def test_it_says_where_the_run_is():
    said = []
    show = shown_by(lambda *words: said.append(words), "bnp seed 0")
    show(Progress(3, 10, 0.12345, ROW))
    show(Progress(4, 10, 0.1, None))
    assert said == [
        ("bnp seed 0 3/10 loss 0.123 κ own unresolved", 0.3),
        ("bnp seed 0 4/10 loss 0.100 κ own –", 0.4),
    ]

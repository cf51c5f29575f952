"""Write ``docs/support.md``, what `hesscond.probe` says of each kind of model: ``python tests/support/page.py [NAME]``

Given names of cases, only their rows are measured anew, and those that are not on the page.
"""

import itertools
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

from tests.catalogue import PAGE as CASES  # noqa: E402
from tests.catalogue.judging import LEVELS, measured  # noqa: E402

PAGE = TESTS.parent / "docs" / "support.md"
INTRODUCTION = """\
# What can be measured

One tiny model of each kind, through `hesscond.probe` at its three levels: κ of the layer that is named (at level
`"unit"` of its first unit) and how close it comes to the model's own double-backward product, or the sentence with
which it refuses. The page is written by `make support-page` and compared by `make support`, where every
Hessian behind a number, of all layers and units and not only of the one that is shown, is also compared with two
calls of `torch.autograd.grad` on a copy of the model in float64. The last groups are constructions for which a wrong
number was once printed, and controls: their truth is exact arithmetic, plain operations or reasoning.
"""


class WrongError(Exception):
    """Something is wrong with what a case gives, and has no place on the page."""


def row(case):
    """The line of a case."""
    title = case.title.replace("|", "\\|")
    if case.missing:
        return f"| {title} | `{case.layer}` | not shown: {case.missing} | | |"
    cells = measured(case)
    if faults := [f"{level}: {fault}" for level in LEVELS for fault in cells[level].faults]:
        raise WrongError(f"{case.name} ({case.title}): {'; '.join(faults)}")
    texts = [cells[level].text.replace("|", "\\|").replace("<", "&lt;") for level in LEVELS]
    return f"| {title} | `{case.layer}` | {' | '.join(texts)} |"


def page(rows):
    """The page from the lines of all cases, in their order."""
    parts = [INTRODUCTION]
    for group, own in itertools.groupby(zip(CASES, rows, strict=True), lambda pair: pair[0].group):
        lines = [f"## {group}\n", "| | layer | unit | layer | network |", "|---|---|---|---|---|"]
        parts.append("\n".join([*lines, *(line for _, line in own)]) + "\n")
    return "\n".join(parts)


def rows_of(text):
    """{title: line} of a written page."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| | ")]
    return {line.split(" | ")[0].removeprefix("| ").replace("\\|", "|"): line for line in lines}


def main(names):
    """Write the page."""
    there = rows_of(PAGE.read_text(encoding="utf-8")) if names else {}
    rows, wrong = [], []
    for case in CASES:
        try:
            measure = case.name in names or case.title not in there
            rows.append(row(case) if measure else there[case.title])
        except WrongError as error:
            wrong.append(str(error))
    if wrong:
        raise SystemExit("\n".join([*wrong, "the page is as it was"]))
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The picture that the README begins with: the figure that ``make study`` draws, with fewer colours."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from gallery import hesscond, shrink

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "study.png"


def main() -> None:
    """Make the run, and take its figure: a minute."""
    with tempfile.TemporaryDirectory() as folder:
        hesscond("study", "fc-digits", "--method", "vanilla", "--method", "bnp", "--out", folder)
        shutil.copy(Path(folder) / "equal-loss.png", PICTURE)
    shrink(PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()

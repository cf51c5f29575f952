"""The picture that the README begins with: the figure that ``make study`` draws, with fewer colours."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "study.png"


def main() -> None:
    """Make the run, and take its figure: a minute."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["study", "fc-digits", "--method", "vanilla", "--method", "bnp", "--out", folder]
        subprocess.run([sys.executable, "-m", "hesscond", *command], check=True, stdout=subprocess.DEVNULL)
        # 128 colours: a third of the size
        drawn = Image.open(Path(folder) / "equal-loss.png").convert("RGB").quantize(128, dither=Image.Dither.NONE)
        drawn.save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()

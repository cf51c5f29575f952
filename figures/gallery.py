"""Draw the gallery, figures/gallery/, with small runs on scikit-learn's digits: ``python figures/gallery.py [KIND…]``.

All kinds of `hesscond figure`, but conditioning.png, which is of a long run on CIFAR-10.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

GALLERY = Path(__file__).parent / "gallery"

#: A study of seconds: three units of every layer at every second iteration, and over the training set.
STUDY = """
name = "small"
description = "scikit-learn's digits, two hidden layers of 30"

[data]
name = "digits"

[model]
hidden = [30, 30]
activation = "relu"

[training]
batch_size = 60
iterations = 120

[[learning_rates]]
batch_size = 60
rate = { vanilla = 0.1, bnp = 0.5, batchnorm = 0.5, layernorm = 0.3, sphere = 0.3, equilibration = 0.3 }

[probe]
layers = ["fc3", "fc2", "fc1"]
units = [0, 3, 7]
every = 2
train_every_epochs = 2
"""
#: A small vision transformer: two units of every dense layer, every twelve iterations.
TRANSFORMER = """
name = "vit-small"
description = "scikit-learn's digits, a vision transformer of two blocks"

[data]
name = "digits"

[model]
name = "vit-s16"
patch = 4
width = 12
depth = 2
heads = 3
hidden = 24

[training]
batch_size = 32
iterations = 121
momentum = 0.9

[[learning_rates]]
batch_size = 32
rate = { vanilla = 0.05 }

[probe]
layers = [
  "patches",
  "block1.attention.q", "block1.attention.k", "block1.attention.v", "block1.attention.out", "block1.fc1", "block1.fc2",
  "block2.attention.q", "block2.attention.k", "block2.attention.v", "block2.attention.out", "block2.fc1", "block2.fc2",
  "fc",
]
units = [0, 3]
every = 12
precision = "float64"
train_every_epochs = 0
"""
TWO = ("--method", "vanilla", "--method", "bnp")


@dataclass(frozen=True)
class Entry:
    """A picture: what it shows, the command that makes runs for it, and the one that makes the small runs shown."""

    sentence: str
    command: str = "hesscond study fc-digits --method vanilla --method bnp --out runs"
    small: tuple[str, ...] = ("study", *TWO)
    study: str = STUDY


ENTRIES = {
    "equal-loss": Entry("Training loss, and κ of each method against the training loss at which it was measured."),
    "conditioning": Entry(
        "Loss, κ(H), κ(PᵀHP) and κ(D) over training: Figure 8 of Lange, Helfrich and Ye (JMLR 2022), on CIFAR-10.",
        "hesscond replicate bnp-figure-8 --out runs",
    ),
    "training": Entry(
        "Training and test curves, mean and range over seeds: train dashed, test solid, as the papers show them.",
        "hesscond study fc-digits --method vanilla --method bnp --method batchnorm --seed 0,1,2 --out runs",
        ("study", *TWO, "--method", "batchnorm", "--seed", "0,1,2"),
    ),
    "layers": Entry(
        "κ of every layer along training, method by method: the median over its units in a band of the quartiles.",
        small=("study", *TWO, "--method", "batchnorm", "--seed", "0,1,2"),
    ),
    "heatmap": Entry("log10 κ of every probed unit at every iteration, method by method."),
    "blocks": Entry(
        "κ of the blocks of a transformer by type and depth at every probed iteration; `--quantity` takes λ_max, "
        "λ_min⁺, rank or the share of negative eigenvalues.",
        "hesscond study vit-small.toml --method vanilla --seed 0,1 --out runs",
        ("study", "--method", "vanilla", "--seed", "0,1"),
        TRANSFORMER,
    ),
    "block-bands": Entry(
        "The same along training, type by type: the median in a band of the quartiles.",
        "hesscond study vit-small.toml --method vanilla --seed 0,1 --out runs",
        ("study", "--method", "vanilla", "--seed", "0,1"),
        TRANSFORMER,
    ),
    "gain": Entry(
        "The gain κ(H)/κ(PᵀHP) against κ(D)², which section 3.3 of Lange, Helfrich and Ye (JMLR 2022) expects it to be "
        "about.",
    ),
    "spectra": Entry(
        "Both ends of the spectrum of an output unit's Hessian along training, and its rank.",
        small=("study", *TWO, "--method", "batchnorm", "--seed", "0,1,2"),
    ),
    "rate": Entry(
        "Measured rates of convergence against the predicted (κ − 1)/(κ + 1), on the steps of gradient descent near "
        "random minima.",
        "",
        (),
    ),
    "margins": Entry(
        "How much of what BNP's Theorem 4 allows is used on the activations of a network in training.",
        "hesscond study fc-digits --method vanilla --method bnp --statement bnp-theorem-4 --out runs",
        ("study", *TWO, "--statement", "bnp-theorem-4"),
    ),
}
HEAD = """# Gallery

Every figure that `hesscond figure` draws from stored runs, here of seconds on scikit-learn's digits; the first is
of a long run. `make gallery` draws all others again.
"""


#: Pictures of a browser, which no command draws.
REPORT = """
## The report

One HTML file for a desktop and a phone, that loads nothing from anywhere.

```sh
hesscond study fc-digits --method vanilla --method bnp --method batchnorm --out runs
hesscond report runs -o report.html
```

![the report on a desktop: results first](report.png)

![the same on a phone](report-phone.png)
"""


def hesscond(*command: str | Path) -> None:
    """Run a command line of hesscond."""
    subprocess.run([sys.executable, "-m", "hesscond", *map(str, command)], check=True, stdout=subprocess.DEVNULL)


def shrink(path: Path) -> None:
    """Give a PNG that the repository keeps no more than 128 colours: a third of the size."""
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def small_runs(folder: Path, entry: Entry) -> Path:
    """The folder of runs that its command makes of its small study; made once."""
    words = entry.small
    runs = folder / f"runs{abs(hash((words, entry.study)))}"
    if not runs.exists():
        (folder / "small.toml").write_text(entry.study, encoding="utf-8")
        hesscond(words[0], folder / "small.toml", *words[1:], "--out", runs)
    return runs


def section(name: str, entry: Entry) -> str:
    """What it shows, the commands, the picture."""
    commands = [entry.command] * bool(entry.command) + [
        f"hesscond figure {name} {'runs ' * bool(entry.command)}-o {name}.pdf"
    ]
    shown = "\n".join(commands)
    return f"\n## {name}\n\n{entry.sentence}\n\n```sh\n{shown}\n```\n\n![{entry.sentence}]({name}.png)\n"


def page() -> str:
    """What the gallery shows."""
    return HEAD + "".join(section(name, entry) for name, entry in ENTRIES.items()) + REPORT


def main(names: list[str]) -> None:
    """Draw the kinds that are named, or all; write the page."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or [name for name in ENTRIES if name != "conditioning"]:
            entry, path = ENTRIES[name], GALLERY / f"{name}.png"
            hesscond("figure", name, *([small_runs(Path(folder), entry)] if entry.small else []), "-o", path)
            shrink(path)
            print(path)
    (GALLERY / "README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Whether a change keeps the numbers: 60 probes and 6 short studies, recorded before and compared after.

    python benchmarks/same_numbers.py --record before.json
    python benchmarks/same_numbers.py --against before.json [--only stream]

Printed is the largest relative difference of every probe and study that is not the same to the last bit, and what is
missing, or decided otherwise. One thread, so that sums are in one order. Exit code 1 if something moved by more than
1e-12, or is resolved on one side only.
"""

import argparse
import csv
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hesscond
from hesscond.hessians import Jacobi

SAME = 1e-12
#: Columns of the log that are times, not numbers of the run.
TIMES = ("seconds", "time", "timestamp", "created", "run", "solver", "route")
STUDIES = {
    "digits": "fc-digits --method vanilla --method bnp --iterations 60",
    "weights": "fc-digits --method sphere --method equilibration --iterations 30",
    "adaptive": "fc-digits --method adam --method weightnorm --iterations 30",
    "convolutions": "cnn5-mnist --scale small --lr 0.01 --method bnp+groupnorm --iterations 6",
    "points": "dgcnn-shapes --scale=small --lr=0.01 --method batchnorm --iterations 4",
    "cifar": "fc-cifar10 --lr=0.01 --method whitening --method batchnorm --iterations 20",
}


class Attention(nn.Module):
    """One head over 5 tokens, with embeddings and layer normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.mix = nn.MultiheadAttention(4, 1, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, 3) scores of (n, 5) tokens."""
        x = self.embedding(tokens)
        x = x + self.mix(self.norm(x), x, x, need_weights=False)[0]
        return self.out(x.mean(1))


def normed() -> nn.Module:
    """A network with a parametrization in front of its first layer's weight."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (6,)),
    "tanh": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "silu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3, bias=False)), (6,)),
    "batchnorm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(16, 3)),
        ),
        (2, 6, 6),
    ),
    "attention": (Attention, ()),
    "normed": (normed, (6,)),
}
SOURCES = ("batch", "stream")
METHODS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "tanh": (("unit", "layer"), ("bnp", "whitening", "weightnorm", "sphere", Jacobi())),
    "relu": (("unit", "network"), ("bnp", "batchnorm", "equilibration")),
    "convolutions": (("unit",), ("bnp", "whitening")),
    "silu": (("layer",), ("bnp", "whitening")),
}


def problems(shape: tuple[int, ...], source: str) -> Any:
    """A batch of 24 samples, or the same as a stream of four."""
    generator = torch.Generator().manual_seed(1)
    inputs = (
        torch.randn(24, *shape, generator=generator) if shape else torch.randint(0, 7, (24, 5), generator=generator)
    )
    targets = torch.randint(0, 3, (24,), generator=generator)
    batch = (inputs, targets)
    return batch if source == "batch" else [(x, y) for x, y in zip(inputs.split(7), targets.split(7), strict=True)]


def probes() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls."""
    for name, (build, shape) in MODELS.items():
        for level, source in product(("unit", "layer", "network"), SOURCES):
            if source == "stream" and name in ("batchnorm", "normed"):
                continue
            yield f"{name}, {level}, {source}", lambda n=name, b=build, s=shape, v=level, d=source: probe(b, s, v, d)
    for name, (levels, methods) in METHODS.items():
        build, shape = MODELS[name]
        for level, method in product(levels, methods):
            said = method if isinstance(method, str) else method.name.split(",")[0]
            yield (
                f"{name}, {level}, batch, {said}",
                lambda b=build, s=shape, v=level, m=method: probe(b, s, v, "batch", m),
            )
    build, shape = MODELS["tanh"]
    yield "tanh, unit, stream, bnp", lambda: probe(build, shape, "unit", "stream", "bnp")
    yield "tanh, network, stream, bnp", lambda: probe(build, shape, "network", "stream", "bnp")


def probe(build: Callable[[], nn.Module], shape: tuple[int, ...], level: str, source: str, method: Any = None) -> Any:
    """What a probe answers: numbers by layer and unit, or the kind of error that refuses it."""
    torch.manual_seed(0)
    model = build()
    try:
        found = hesscond.probe(model, nn.CrossEntropyLoss(), problems(shape, source), level=level, method=method)
    except hesscond.errors.HesscondError as error:
        return {"refused": type(error).__name__}
    answer: dict[str, Any] = {"skipped": sorted(found.skipped)}
    for name, layer in found.items():
        units = list(layer.units) if level == "unit" else [None]
        kappas = list(layer.kappa) if level == "unit" else [layer.kappa]
        for unit, kappa in zip(units, kappas, strict=True):
            ends = [kappa.value, kappa.lower, kappa.upper, kappa.lambda_max, kappa.lambda_min]
            counts = [kappa.rank, kappa.nullity, kappa.negative, int(kappa.resolved)]
            answer[f"{name}[{unit}]"] = [None if x is None else float(x) for x in (*ends, *counts)]
    return answer


def study(arguments: str) -> dict[str, Any]:
    """The columns of every table of a study's log."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hesscond"]
        out = ["--out", f"{folder}/run"]
        done = subprocess.run(
            [*command, "study", *arguments.split(), *out], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return {"refused": done.stderr[-400:]}
        answer: dict[str, Any] = {}
        for table in ("training", "evaluation", "probe"):
            text = subprocess.run(
                [*command, "export", f"{folder}/run", "--table", table], capture_output=True, text=True, check=True
            ).stdout
            rows = list(csv.DictReader(io.StringIO(text)))
            for column in rows[0] if rows else ():
                if not any(part in column for part in TIMES):
                    answer[f"{table}.{column}"] = [row[column] for row in rows]
        return answer


def difference(before: Any, after: Any) -> float:
    """The largest relative difference of two answers; infinite where they are not of one kind."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = math.inf if before.keys() != after.keys() else 0.0
        return max([missing, *(difference(before[key], after[key]) for key in before.keys() & after.keys())])
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return math.inf
        return max((difference(*pair) for pair in zip(before, after, strict=True)), default=0.0)
    if before == after:
        return 0.0
    try:
        a, b = float(before), float(after)
    except (TypeError, ValueError):
        return math.inf
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write the answers here")
    parser.add_argument("--against", type=Path, help="compare with these")
    parser.add_argument("--only", default="", help="those with this word in their name")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    work = dict(probes()) | {f"study {name}": lambda a=a: study(a) for name, a in STUDIES.items()}
    answers = {name: json.loads(json.dumps(make())) for name, make in work.items() if chosen.only in name}
    if chosen.record:
        chosen.record.write_text(json.dumps(answers, indent=1))
    if not chosen.against:
        refused = sum("refused" in answer for answer in answers.values())
        print(f"{len(answers)} answers, {refused} of them refusals")
        return 0
    before = {name: own for name, own in json.loads(chosen.against.read_text()).items() if chosen.only in name}
    apart = {name: difference(before.get(name), answers.get(name)) for name in before | answers}
    for name, relative in apart.items():
        if relative:
            print(f"{name}: {'decided otherwise' if relative == math.inf else f'{relative:.1e}'}")
            if relative == math.inf:
                for key in before.get(name, {}).keys() | answers.get(name, {}).keys():
                    a, b = before.get(name, {}).get(key), answers.get(name, {}).get(key)
                    if difference(a, b) > SAME:
                        print(f"    {key}: {str(a)[:110]} → {str(b)[:110]}")
    same = sum(relative == 0 for relative in apart.values())
    print(f"{same} of {len(apart)} the same to the last bit; largest difference {max(apart.values()):.1e}")
    return int(max(apart.values()) > SAME)


if __name__ == "__main__":
    sys.exit(main())

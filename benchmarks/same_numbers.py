"""Whether a change keeps the numbers: 73 probes and 6 short studies, recorded before and compared after.

    python benchmarks/same_numbers.py --record before.json
    python benchmarks/same_numbers.py --against before.json [--only stream]

Printed is the largest relative difference of every probe and study that is not the same to the last bit, and what is
missing, or decided otherwise. One thread, so that sums are in one order. Exit code 1 if something moved by more than
1e-12, or is resolved on one side only.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import hesscond
from hesscond.hessians import Jacobi
from tests.catalogue import case
from tests.catalogue.cases import samples, split

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
LEVELS = ("unit", "layer", "network")
#: Cases of the tests, and the levels and methods that each is measured with, beside all levels without one.
CASES: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "many-samples": (("unit", "network"), ("bnp", "batchnorm", "equilibration")),
    "many-samples-tanh": (("unit", "layer"), ("bnp", "whitening", "weightnorm", "sphere", Jacobi())),
    "float32-tanh": (("layer",), ("bnp", "whitening")),
    "conv2d-two-layers-tanh": (("unit",), ("bnp", "whitening")),
    "conv2d-groups": ((), ()),
    "train-batchnorm": ((), ()),
    "attention-sdpa": ((), ()),
    "embedding": ((), ()),
    "layernorm": ((), ()),
}


def probes() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls."""
    for name, (levels, methods) in CASES.items():
        for level, stream in product(LEVELS, (False, True) if case(name).streams else (False,)):
            yield f"{name}, {level}, {'stream' if stream else 'batch'}", partial(probe, name, level, stream)
        for level, method in product(levels, methods):
            label = method if isinstance(method, str) else method.name.split(",")[0]
            yield f"{name}, {level}, batch, {label}", partial(probe, name, level, False, method)
    for level in ("unit", "network"):
        yield f"many-samples-tanh, {level}, stream, bnp", partial(probe, "many-samples-tanh", level, True, "bnp")


def probe(name: str, level: str, stream: bool, method: Any = None) -> Any:
    """What a probe answers: numbers by layer and unit, or the kind of error that refuses it."""
    model, loss_fn, batch = case(name).make()
    data = split(batch, (3, samples(batch) - 3)) if stream else batch
    try:
        results = hesscond.probe(model, loss_fn, data, level=level, method=method)
    except hesscond.errors.HesscondError as error:
        return {"refused": type(error).__name__}
    answer: dict[str, Any] = {"skipped": sorted(results.skipped)}
    for block, layer in results.items():
        units = layer.units if level == "unit" else [None]
        for unit, kappa in zip(units, layer.conditions, strict=True):
            ends = [kappa.value, kappa.lower, kappa.upper, kappa.lambda_max, kappa.lambda_min]
            counts = [kappa.rank, kappa.nullity, kappa.negative, int(kappa.resolved)]
            answer[f"{block}[{unit}]"] = [None if x is None else float(x) for x in (*ends, *counts)]
    return answer


def study(arguments: str) -> dict[str, Any]:
    """The columns of every table of a study's log."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        call = partial(subprocess.run, capture_output=True, text=True, check=False)
        command = [sys.executable, "-m", "hesscond"]
        done = call([*command, "study", *arguments.split(), "--out", run])
        if done.returncode:
            return {"refused": done.stderr[-400:]}
        answer: dict[str, Any] = {}
        for table in ("training", "evaluation", "probe"):
            text = call([*command, "export", run, "--table", table], check=True).stdout
            rows = list(csv.DictReader(text.splitlines()))
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
    work = dict(probes()) | {f"study {name}": partial(study, arguments) for name, arguments in STUDIES.items()}
    answers = {name: json.loads(json.dumps(make())) for name, make in work.items() if chosen.only in name}
    if chosen.record:
        chosen.record.write_text(json.dumps(answers, indent=1))
    if not chosen.against:
        refused = sum("refused" in answer for answer in answers.values())
        print(f"{len(answers)} answers, {refused} of them refusals")
        return 0
    before = {name: answer for name, answer in json.loads(chosen.against.read_text()).items() if chosen.only in name}
    apart = {name: difference(before.get(name), answers.get(name)) for name in before | answers}
    for name, relative in apart.items():
        if relative:
            print(f"{name}: {'decided otherwise' if relative == math.inf else f'{relative:.1e}'}")
        recorded, other = before.get(name, {}), answers.get(name, {})
        for key in recorded.keys() | other.keys() if relative == math.inf else ():
            if difference(recorded.get(key), other.get(key)) > SAME:
                print(f"    {key}: {str(recorded.get(key))[:110]} → {str(other.get(key))[:110]}")
    same = sum(relative == 0 for relative in apart.values())
    print(f"{same} of {len(apart)} the same to the last bit; largest difference {max(apart.values()):.1e}")
    return int(max(apart.values()) > SAME)


if __name__ == "__main__":
    sys.exit(main())

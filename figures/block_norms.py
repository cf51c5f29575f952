"""λ_max of each layer's block of the Hessian with and without BNP's P and q: ``python figures/block_norms.py``.

The network of BNP's Figure 8, along training by gradient descent and by BNP, on mini-batches of the size of training.
P = U D is from the raw statistics of the same mini-batch; 1/q scales a whole block, and λ_max by 1/q²,
q² = max(n/N, 1). A row for each run, iteration and layer: geometric means over mini-batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import hesscond
from hesscond.study import RunPlan, load_data, load_study
from hesscond.study.runner import Training, rehearsal

FILE = Path(__file__).parents[1] / "docs" / "results" / "bnp-block-norms.csv"
#: Iterations before which λ_max is taken, and mini-batches that each is a mean over.
POINTS, BATCHES = (0, 100, 1000), 3
LAYERS = ("fc1", "fc2", "fc3")


def norms(run: Training, batch: torch.Tensor) -> np.ndarray:
    """λ_max by coordinates (plain, P, P/q) and layer."""
    data = run.inputs[batch], run.targets[batch]
    probes = [hesscond.probe(run.model, run.loss_fn, data, LAYERS, "layer", method=method) for method in (None, "bnp")]
    plain, bnp = ([blocks[name].kappa.lambda_max for name in LAYERS] for blocks in probes)
    sizes = [run.model.get_submodule(name).in_features for name in LAYERS]
    return np.array([plain, bnp, [top / max(n / len(batch), 1) for top, n in zip(bnp, sizes, strict=True)]])


def rows_of(standardize: bool, name: str, seed: int) -> list[dict[str, Any]]:
    """Rows of a run."""
    study = load_study("bnp-figure-8")
    data = study.data.model_copy(update={"standardize": standardize})
    study = study.model_copy(update={"data": data, "probe": study.probe.model_copy(update={"every": 0})})
    size, rows = study.training.batch_size, []
    plan = RunPlan(study, name.lower(), seed, study.learning_rate(name, size), Path(), torch.device("cpu"), name)
    with rehearsal(plan, load_data(data)) as run:
        order = torch.cat([run.shuffled(), run.shuffled()])
        for iteration, batch in enumerate(order[: (POINTS[-1] + 1) * size].view(-1, size)):
            if iteration in POINTS:
                drawn = torch.randint(len(run.targets), (BATCHES, size), generator=torch.Generator().manual_seed(seed))
                means = np.exp(np.log([norms(run, part) for part in drawn]).mean(0))
                about = {"inputs": "standardized" if standardize else "[0, 1]", "method": name, "seed": seed}
                for layer, (plain, bnp, scaled) in zip(LAYERS, means.T, strict=True):
                    rows.append(about | {"iteration": iteration, "layer": layer, "H": plain, "P": bnp, "Pq": scaled})
            run.step(iteration, run.inputs[batch], run.targets[batch])
    return rows


def main() -> None:
    """Train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = [(s, name, seed) for s in (False, True) for name in ("vanilla", "BNP") for seed in range(given.seeds)]
    frame = pd.DataFrame([row for run in runs for row in rows_of(*run)])
    frame.to_csv(given.out, index=False, float_format="%.5g", lineterminator="\n")


if __name__ == "__main__":
    main()

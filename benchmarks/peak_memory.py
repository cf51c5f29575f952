"""Peak memory of a probe of a whole network beyond what the process held before it, as JSON.

Run: ``python benchmarks/peak_memory.py words-12M|…|words-101M|resnet18|resnet50 --products 60 [--double]``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import FULL, Problem, language_model, resnet18, resnet50
from measuring import resident

import hesscond

CPU = torch.device("cpu")
#: Whole networks; of words with their vocabulary, width and depth.
NETWORKS: dict[str, Callable[[], Problem]] = {
    "words-tiny": lambda: language_model(500, 64, 1),
    "words-12M": lambda: language_model(5_000, 320, 7),
    "words-30M": lambda: language_model(16_000, 512, 4),
    "words-76M": lambda: language_model(50_000, 512, 8),
    "words-101M": lambda: language_model(50_000, 512, 16),
    "resnet18": lambda: resnet18(FULL, CPU),
    "resnet50": resnet50,
}


def whole_network(problem: Problem, products: int, dtype: torch.dtype | None, memory: float) -> dict[str, Any]:
    """λ_max and κ from below, in products and gradients: processor seconds, best with one thread where others work."""

    def spent(run: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.process_time()
        found = run()
        return time.process_time() - begin, found

    problem.gradients()
    before = [spent(problem.gradients)[0] for _ in range(3)]
    peak, held = Path("/proc/self/clear_refs"), resident("VmRSS")
    peak.write_text("5")
    seconds, result = spent(
        lambda: hesscond.probe(
            problem.model,
            problem.loss_fn,
            problem.batch,
            level="network",
            dtype=dtype,
            products=products,
            memory=memory,
            check=False,
        )["network"]
    )
    used = resident("VmHWM") - held
    one = sorted(before + [spent(problem.gradients)[0] for _ in range(3)])[2]
    product, _ = spent(lambda: result.operator @ result.operator.point)
    top = result.top
    return {
        "parameters": result.n_params,
        "products": top.products,
        "gradients": seconds / one,
        "gradients a product": product / one,
        "gradient_seconds": one,
        "lambda_max": [float(top.lower), float(top.eigenvalues), float(top.upper)],
        "kappa_lower": result.kappa.lower,
        "peak_bytes": used,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Build, probe once, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=NETWORKS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--products", type=int, default=60)
    parser.add_argument("--double", action="store_true", help="products in float64")
    parser.add_argument("--memory", type=float, default=10e9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.float64 if arguments.double else None
    print(json.dumps(whole_network(NETWORKS[arguments.row](), arguments.products, dtype, arguments.memory)))


if __name__ == "__main__":
    main()

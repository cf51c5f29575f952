"""Peak memory of a probe beyond what the process held before it: one probe in a fresh process, as JSON.

Run: ``python benchmarks/peak_memory.py convolution|convolution-default [--quick]``, or for a whole network by a number
of products ``python benchmarks/peak_memory.py words-12M|…|words-101M|resnet18|resnet50 --products 60 [--double]``.
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
from measuring import resident, seconds_of
from networks import language_model, resnet18, resnet50
from workloads import FULL, QUICK, Problem, convolution_rows, convolutional

import hesscond

CPU = torch.device("cpu")
#: Whole networks; of words with their vocabulary, width and depth.
NETWORKS: dict[str, Callable[[], Problem]] = {
    "words-tiny": lambda: language_model(500, 64, 1),
    "words-12M": lambda: language_model(5_000, 320, 7),
    "words-30M": lambda: language_model(16_000, 512, 4),
    "words-76M": lambda: language_model(50_000, 512, 8),
    "words-101M": lambda: language_model(50_000, 512, 16),
    "resnet18": lambda: resnet18(FULL, torch.float32, CPU),
    "resnet50": resnet50,
}


def whole_network(problem: Problem, products: int, dtype: torch.dtype | None, memory: float) -> dict[str, Any]:
    """λ_max and κ from below, in products and gradients: processor seconds, best with one thread where others work."""

    def gradient() -> None:
        problem.loss_fn(problem.model(problem.batch[0]), problem.batch[1]).backward()
        problem.model.zero_grad()

    def spent(run: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.process_time()
        found = run()
        return time.process_time() - begin, found

    gradient()
    before = [spent(gradient)[0] for _ in range(3)]
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
    one = sorted(before + [spent(gradient)[0] for _ in range(3)])[2]
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
    """Build, train one step, probe once, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--products", type=int, default=60)
    parser.add_argument("--double", action="store_true", help="products in float64")
    parser.add_argument("--memory", type=float, default=10e9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.row in NETWORKS:
        dtype = torch.float64 if arguments.double else None
        print(json.dumps(whole_network(NETWORKS[arguments.row](), arguments.products, dtype, arguments.memory)))
        return
    rows = convolution_rows(convolutional(QUICK if arguments.quick else FULL, torch.float32, CPU))
    by_key = {row.key: row for row in rows}
    if arguments.row not in by_key:
        parser.error(f"unknown row {arguments.row!r}: one of {', '.join([*by_key, *NETWORKS])}")
    by_key["step"].run()
    after_step, before = resident("VmHWM"), resident("VmRSS")
    seconds, _ = seconds_of(by_key[arguments.row].run, CPU)
    peak = resident("VmHWM")
    # a peak of the step that was not exceeded says only that the probe took no more
    print(json.dumps({"seconds": seconds, "peak_bytes": peak - before, "exceeds_step": peak > after_step}))


if __name__ == "__main__":
    main()

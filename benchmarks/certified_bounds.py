"""How well the error bounds of `hesscond.spectra` hold: small difficult matrices against 90-digit arithmetic.

Run: ``python benchmarks/certified_bounds.py [--seconds 60] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import time

import mpmath
import numpy as np

from hesscond.spectra.matrices import scaled_core
from hesscond.spectra.solvers.factored import jacobi_values, smallest_singular_value

KINDS = ("dense", "integer", "half of the entries zero", "few values from 1e-5 to 963", "entries over 8 decades")


def difficult(rng: np.random.Generator, kind: str) -> np.ndarray:
    """A matrix of order up to 6 of that kind, rows and columns scaled over up to ten decades half of the time."""
    m, n = rng.integers(1, 7, 2)
    matrix = rng.standard_normal((m, n))
    if kind == "integer":
        matrix = np.round(matrix * rng.choice([1, 3, 1000]))
    elif kind == "half of the entries zero":
        matrix = matrix * (rng.random((m, n)) < 0.5)
    elif kind == "few values from 1e-5 to 963":
        matrix = rng.choice([0, 1, -1, 2, 128, 820, 963, 1e-5], size=(m, n))
    elif kind == "entries over 8 decades":
        matrix = matrix * 10.0 ** rng.uniform(-8, 0, (m, n))
    if rng.random() < 0.5:
        matrix = matrix * 10.0 ** rng.uniform(-10, 0, (m, 1))
    if rng.random() < 0.5:
        matrix = matrix * 10.0 ** rng.uniform(-10, 0, (1, n))
    return matrix


def main() -> None:
    """Try matrices until the time is up, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    mpmath.mp.dps = 90
    tried = uncertified = outside = 0
    worst = 0.0
    widths = []
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        matrix = difficult(rng, KINDS[tried % len(KINDS)])
        tried += 1
        if not matrix.any():
            continue
        core = scaled_core(matrix).matrix
        exact = mpmath.matrix(core.tolist())
        truth = [mpmath.sqrt(abs(v)) for v in sorted(mpmath.eigsy(exact.T * exact, eigvals_only=True), reverse=True)]
        found = jacobi_values(core)
        for value, bound, true in zip(found.magnitudes[:-1], found.errors[:-1], truth[:-1], strict=True):
            worst = max(worst, float(abs(float(value) - true) / bound))
        ends = smallest_singular_value(core)
        if ends is None:
            uncertified += 1
            continue
        outside += not ends.lower <= truth[-1] <= ends.upper
        widths.append((ends.upper - ends.lower) / ends.lower)
    half, most = np.quantile(widths, [0.5, 0.99])
    print(f"{tried} matrices; smallest singular value: {outside} outside its certified interval, {uncertified} not")
    print(f"certified, relative width {half:.1e} (median), {most:.1e} (99 %)")
    print(f"the others: largest error as a fraction of the bound {worst:.2f}")


if __name__ == "__main__":
    main()

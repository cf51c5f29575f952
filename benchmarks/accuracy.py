"""How well bounds and ranks hold: singular values against 90-digit arithmetic, ranks against planted ones.

    python benchmarks/accuracy.py bounds [--seconds 60] [--seed 0]
    python benchmarks/accuracy.py ranks [--count 10000]

A rank that is wrong and not unresolved, or a value outside its certified interval, exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import mpmath
import numpy as np

import hesscond
from hesscond.spectra.matrices import scaled_core
from hesscond.spectra.solvers.jacobi import jacobi_values, smallest_singular_value

MATRICES = ("dense", "integer", "half of the entries zero", "few values from 1e-5 to 963", "entries over 8 decades")


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


def bounds(seconds: float, seed: int) -> int:
    """Try matrices until the time is up, and print how their bounds held; the number of values outside."""
    rng = np.random.default_rng(seed)
    mpmath.mp.dps = 90
    tried = uncertified = outside = 0
    worst = 0.0
    widths = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        matrix = difficult(rng, MATRICES[tried % len(MATRICES)])
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
    return outside


CUTOFFS = {
    "σ > 1e-15": lambda A, s: 1e-15,
    "σ > numel·eps": lambda A, s: A.size * np.finfo(A.dtype).eps,
    "σ > max(m, n)·eps·σ_max": lambda A, s: max(A.shape) * np.finfo(A.dtype).eps * s[0],
}
#: The largest κ of each kind as a power of ten, 0.02 / eps of the type, and the type.
KINDS = {"products UΣVᵀ": (14, float), "sums GGᵀ": (14, float), "sums GGᵀ, float32": (5.27, np.float32)}


def orthonormal(rng: np.random.Generator, m: int, r: int) -> np.ndarray:
    """Columns (m, r)."""
    return np.linalg.qr(rng.standard_normal((m, r)))[0]


def planted(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, int]:
    """A matrix and its rank: κ to 1e14 (float32: 2e5), any scale from 1e-8 to 1e8, of order 3 to 40."""
    m, n = rng.integers(3, 41, 2)
    r = int(rng.integers(1, min(m, n) + 1))
    decades, dtype = KINDS[kind]
    # the singular values of G are the roots of those of GGᵀ
    s = 10.0 ** -rng.uniform(0, rng.uniform(0, decades / (1 + kind.startswith("sums"))), r)
    s[0] = 1.0
    s *= 10.0 ** rng.uniform(-8, 8) if kind == "products UΣVᵀ" else 10.0 ** rng.uniform(-4, 4)
    if kind == "products UΣVᵀ":
        return (orthonormal(rng, m, r) * s) @ orthonormal(rng, n, r).T, r
    # a gradient of rank r: what an optimizer sums up is GGᵀ
    G = ((orthonormal(rng, n, r) * s) @ orthonormal(rng, 2 * n, r).T).astype(dtype)
    return G @ G.T, r


def decisions(kind: str, count: int, seed: int = 0) -> Counter[str]:
    """How many of ``count`` matrices each rule gets wrong; of `hesscond.rank`, how many it leaves unresolved too."""
    rng, wrong = np.random.default_rng(seed), Counter()
    for _ in range(count):
        A, r = planted(rng, kind)
        found = hesscond.rank(A)
        if not found.resolved:
            wrong["unresolved"] += 1
            wrong["interval"] += not found.lower <= r <= found.upper
        else:
            wrong["hesscond.rank"] += int(found) != r
        s = np.linalg.svd(A, compute_uv=False)
        for name, cutoff in CUTOFFS.items():
            wrong[name] += int((s > cutoff(A, s)).sum()) != r
    return wrong


def ranks(count: int) -> int:
    """Print how often each rule is wrong; the number of ranks that `hesscond.rank` decides wrongly."""
    print(f"| of {count:,} matrices | wrong: " + " | wrong: ".join(CUTOFFS) + " | wrong: hesscond.rank | unresolved |")
    print("|---|" + "---:|" * (len(CUTOFFS) + 2))
    failed = 0
    for kind in KINDS:
        wrong = decisions(kind, count)
        failed += wrong["hesscond.rank"] + wrong["interval"]
        shares = [f"{wrong[name] / count:.1%}" for name in (*CUTOFFS, "hesscond.rank", "unresolved")]
        print(f"| {kind} | " + " | ".join(shares) + " |")
    return failed


def main() -> int:
    """Measure and print; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["bounds", "ranks"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    given = parser.parse_args()
    return int(bool(bounds(given.seconds, given.seed) if given.kind == "bounds" else ranks(given.count)))


if __name__ == "__main__":
    sys.exit(main())

"""How well ranks hold: planted ones against the usual cutoffs and `hesscond.rank`.

Run: ``python benchmarks/accuracy.py [--count 10000]``. A rank that is wrong and not unresolved exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np

import hesscond

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
    power = 1 + kind.startswith("sums")
    s = 10.0 ** -rng.uniform(0, rng.uniform(0, decades / power), r)
    s[0] = 1.0
    s *= 10.0 ** rng.uniform(-8 / power, 8 / power)
    if power == 1:
        return (orthonormal(rng, m, r) * s) @ orthonormal(rng, n, r).T, r
    # a gradient of rank r: what an optimizer sums up is GGᵀ
    G = ((orthonormal(rng, n, r) * s) @ orthonormal(rng, 2 * n, r).T).astype(dtype)
    return G @ G.T, r


def decisions(kind: str, count: int, seed: int = 0) -> Counter[str]:
    """How many of ``count`` matrices each rule gets wrong; of `hesscond.rank`, how many it leaves unresolved too."""
    rng, wrong = np.random.default_rng(seed), Counter()
    for _ in range(count):
        A, r = planted(rng, kind)
        rank = hesscond.rank(A)
        if not rank.resolved:
            wrong["unresolved"] += 1
            wrong["interval"] += not rank.lower <= r <= rank.upper
        else:
            wrong["hesscond.rank"] += int(rank) != r
        s = np.linalg.svd(A, compute_uv=False)
        for name, cutoff in CUTOFFS.items():
            wrong[name] += int((s > cutoff(A, s)).sum()) != r
    return wrong


if __name__ == "__main__":
    from measuring import show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    count = parser.parse_args().count
    errors = {kind: decisions(kind, count) for kind in KINDS}
    rules = (*CUTOFFS, "hesscond.rank", "unresolved")
    rows = [[kind, *(f"{wrong[rule] / count:.1%}" for rule in rules)] for kind, wrong in errors.items()]
    show((f"of {count:,} matrices", *(f"wrong: {rule}" for rule in rules[:-1]), rules[-1]), rows)
    sys.exit(any(wrong["hesscond.rank"] + wrong["interval"] for wrong in errors.values()))

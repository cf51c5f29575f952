"""How often a rank is decided wrongly: `hesscond.rank` beside the cutoffs in use, on matrices with planted ranks.

    python benchmarks/rank_decisions.py [COUNT]

Prints a table, of 10,000 matrices each kind by default; `hesscond.rank` that is wrong and not unresolved exits with 1.
"""

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


def orthonormal(rng, m, r):
    """Columns (m, r)."""
    return np.linalg.qr(rng.standard_normal((m, r)))[0]


def planted(rng, kind):
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


def decisions(kind, count, seed=0):
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


def main(count):
    """Print the table; 1 if a decision was wrong."""
    print(f"| of {count:,} matrices | wrong: " + " | wrong: ".join(CUTOFFS) + " | wrong: hesscond.rank | unresolved |")
    print("|---|" + "---:|" * (len(CUTOFFS) + 2))
    failed = False
    for kind in KINDS:
        wrong = decisions(kind, count)
        failed |= bool(wrong["hesscond.rank"] or wrong["interval"])
        shares = [f"{wrong[name] / count:.1%}" for name in (*CUTOFFS, "hesscond.rank", "unresolved")]
        print(f"| {kind} | " + " | ".join(shares) + " |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))

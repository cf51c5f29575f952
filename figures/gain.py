"""Print the table of the gain κ(H)/κ(PᵀHP) against κ(D)²: ``python figures/gain.py RUN…``.

P = U D from the raw statistics of the same samples, whatever the method; unresolved κ are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hesscond.study import open_run


def main() -> None:
    """Read the runs and print one line for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    for folder in parser.parse_args().runs:
        run = open_run(folder)
        probe = run.table("probe")
        probe = probe[probe["kappa"].lt(float("inf")) & probe["kappa_preconditioned"].lt(float("inf"))]
        for data, rows in probe.groupby("data"):
            gain, expected = rows["kappa"] / rows["kappa_preconditioned"], rows["kappa_D"] ** 2
            print(f"{run.label}, {data}, {len(rows)} probes: median (smallest … largest)")
            for name, values in (("gain", gain), ("κ(D)²", expected), ("short by", expected / gain)):
                print(f"  {name:9}{values.median():9.3g} ({values.min():.3g} … {values.max():.3g})")


if __name__ == "__main__":
    main()

"""Runs that exist in memory only."""

from dataclasses import dataclass, field

import pandas as pd

from hesscond.runs import TABLES


@dataclass
class MadeUpRun:
    """What expectations ask of a stored run."""

    probe: list = field(default_factory=list)
    training: list = field(default_factory=list)
    evaluation: list = field(default_factory=list)
    method: str = "bnp"
    seed: int = 0
    status: str = "finished"
    facts: dict = field(default_factory=dict)

    @property
    def label(self):
        return f"{self.method}-seed{self.seed}"

    @property
    def folder(self):
        return f"runs/{self.label}"

    def table(self, name):
        frame = pd.DataFrame(getattr(self, name), columns=list(TABLES[name]))
        for column, kind in TABLES[name].items():
            if kind == "REAL":
                frame[column] = frame[column].astype(float)
        return frame


def probe_row(iteration=0, data="batch", layer="fc3", unit=3, *, kappa=(100.0, 100.0), pre=(10.0, 10.0), **more):
    """A row with the bounds of both κ."""
    return {
        "iteration": iteration,
        "epoch": 0,
        "data": data,
        "layer": layer,
        "unit": unit,
        "kappa": kappa[1],
        "kappa_lower": kappa[0],
        "kappa_upper": kappa[1],
        "kappa_preconditioned": pre[1],
        "kappa_preconditioned_lower": pre[0],
        "kappa_preconditioned_upper": pre[1],
        "resolved": int(kappa[1] != float("inf")),
    } | more

"""Spectral densities by stochastic Lanczos quadrature: what a probe costs, and how near a known spectrum it comes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from matrix_free_products import row, why_not
from measuring import Outcome, interleaved, milliseconds, table
from peers import double_by_default
from scipy.stats import wasserstein_distance
from torch import nn
from workloads import Problem

from hesscond.hessians.network_operator import HessianOperator
from hesscond.spectra.density import density

CPU = torch.device("cpu")
#: Nodes and their weights, averaged over the probes: the estimate of each tool before any smoothing.
Measure = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Effort:
    """Probes and Lanczos steps from each."""

    probes: int
    steps: int


@dataclass
class Tool:
    """A tool and what it finds: ``call()`` returns nodes and weights."""

    name: str
    call: Callable[[], Measure]
    found: list[Measure] = field(default_factory=list)

    def run(self) -> None:
        """Once; what it found is kept."""
        self.found[:] = [self.call()]


def known_spectrum(order: int) -> tuple[Problem, np.ndarray]:
    """Least squares with a Hessian of prescribed eigenvalues: half a bulk, some outliers, the rest null.

    The Hessian of ½‖Xw‖² is XᵀX, whose eigenvalues are the squares of the singular values of X.
    """
    generator = torch.Generator().manual_seed(0)
    bulk = torch.rand(order // 2, generator=generator, dtype=torch.float64)
    outliers = torch.tensor([3.0, 4.0, 7.0, 10.0], dtype=torch.float64)
    eigenvalues = torch.cat([torch.zeros(order - len(bulk) - len(outliers), dtype=torch.float64), bulk, outliers])
    Q = torch.linalg.qr(torch.randn(order, order, generator=generator, dtype=torch.float64)).Q
    model = nn.Linear(order, 1, bias=False).double()
    inputs = eigenvalues.sqrt()[:, None] * Q.T
    targets = torch.zeros(order, 1, dtype=torch.float64)
    return Problem(model, HalfSquares(), (inputs, targets)), eigenvalues.numpy()


class HalfSquares(nn.Module):
    """½ Σ (output − target)²."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (output - target).square().sum() / 2


def tools(problem: Problem, effort: Effort) -> list[Tool]:
    """Ours, PyHessian's and hessian-eigenthings'."""
    return [
        Tool("hesscond", lambda: ours(problem, effort)),
        Tool("PyHessian", lambda: pyhessian(problem, effort)),
        Tool("hessian-eigenthings", lambda: eigenthings(problem, effort)),
    ]


def ours(problem: Problem, effort: Effort) -> Measure:
    """`density` by quadrature, never from the formed matrix."""
    operator = HessianOperator(problem.model, problem.loss_fn, problem.batch)
    found = density(operator, probes=effort.probes, steps=effort.steps, method="lanczos")
    nodes, weights = found.nodes.flatten().numpy(), found.weights.flatten().numpy() / found.probes
    return np.append(nodes, 0.0), np.append(weights, found.null_weight)


def pyhessian(problem: Problem, effort: Effort) -> Measure:
    """PyHessian's density, with a replacement of the torch.eig that it calls and torch no longer has."""
    from pyhessian import hessian

    torch.manual_seed(0)
    model = copy.deepcopy(problem.model)
    try:
        with double_by_default(), removed_eig():
            found = hessian(model, problem.loss_fn, data=problem.batch, cuda=False)
            nodes, weights = found.density(iter=effort.steps, n_v=effort.probes)
    finally:
        model.zero_grad()
    return flat(nodes), flat(weights) / effort.probes


@contextlib.contextmanager
def removed_eig() -> Iterator[None]:
    """torch.eig as it was until torch 1.13, for symmetric matrices."""

    def eig(matrix: torch.Tensor, eigenvectors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        return torch.stack([values, torch.zeros_like(values)], 1), vectors

    with mock.patch.object(torch, "eig", eig, create=True):
        yield


def eigenthings(problem: Problem, effort: Effort) -> Measure:
    """hessian-eigenthings' density."""
    import hessian_eigenthings as he

    operator = he.HessianOperator(problem.model, [problem.batch], he.supervised_loss(problem.loss_fn))
    found = he.spectral_density(operator, num_runs=effort.probes, lanczos_steps=effort.steps, seed=0, num_grid_points=2)
    known = ~torch.isnan(found.raw_eigenvalues)
    return found.raw_eigenvalues[known].numpy(), found.raw_weights[known].numpy() / effort.probes


def flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """All entries of rows."""
    return np.concatenate([np.asarray(one, dtype=np.float64) for one in rows])


def distance(found: Measure, eigenvalues: np.ndarray) -> float:
    """Wasserstein distance between an estimate and the spectrum, relative to the largest |eigenvalue|."""
    nodes, weights = found
    return float(wasserstein_distance(nodes, eigenvalues, weights)) / float(np.abs(eigenvalues).max())


@dataclass
class Densities:
    """Times per probe, and distances where the spectrum is known."""

    effort: Effort
    outcomes: list[Outcome]
    distances: dict[str, float]

    def table(self) -> str:
        """Times next to ours, and distances."""
        first = self.outcomes[0].median
        lines = []
        for outcome in self.outcomes:
            away = self.distances.get(outcome.key)
            off = "" if away is None else f"{away:.1e}"
            if outcome.error is not None or outcome.median is None:
                lines.append([outcome.what, "–", "–", why_not(outcome)])
                continue
            each = milliseconds(outcome.median / self.effort.probes)
            lines.append([outcome.what, each, f"{outcome.median / first:.2f}" if first else "–", off])
        return table(("tool", "ms a probe", "× hesscond", "distance from the truth"), lines, left=(0,))

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **vars(self.effort),
            "distances": self.distances,
            "rows": [outcome.as_dict() for outcome in self.outcomes],
        }


def compare_densities(
    problem: Problem, eigenvalues: np.ndarray | None, effort: Effort, *, seconds: float, rounds: int, limit: float
) -> Densities:
    """All tools on a problem, by turns."""
    asked = tools(problem, effort)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row(tool.name, tool.name, tool.run) for tool in asked]
        outcomes = interleaved(rows, CPU, seconds=seconds, rounds=rounds, limit=limit)
    distances = {}
    if eigenvalues is not None:
        distances = {tool.name: distance(tool.found[0], eigenvalues) for tool in asked if tool.found}
    return Densities(effort, outcomes, distances)

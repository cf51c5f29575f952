"""The same Hessians by other tools, and what those answer next to the truth. Each tool is optional.

The truth comes from no Hessian code: the singular values of the factor C^½ J ⊗ ĥ of the output's Jacobian.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from cases import CPU, LAYERS, Problem, characters, conditions
from measuring import attempt, processor, seconds_of, why_not
from scipy.sparse.linalg import eigsh
from torch.func import jacrev, vmap

import hesscond
from tests.truth import double_backward, forward_over_reverse, unit_truth

#: Seconds; calls that take less are repeated, the first one not counted.
QUICK_CALL = 1.0
#: The largest rank that is told to a solver that then looks for all nonzero eigenvalues.
MOST_TOLD = 600


@dataclass(frozen=True)
class Truth:
    """Nonzero eigenvalues, by descending size, of one Hessian of order ``order``."""

    eigenvalues: np.ndarray
    order: int

    @property
    def rank(self) -> int:
        """Number of nonzero eigenvalues."""
        return len(self.eigenvalues)

    @property
    def kappa(self) -> float:
        """The true condition number."""
        return abs(float(self.eigenvalues[0] / self.eigenvalues[-1]))

    def __str__(self) -> str:
        largest, smallest = self.eigenvalues[0], self.eigenvalues[-1]
        return f"{self.rank} of {self.order:,} eigenvalues nonzero, {largest:.5g} … {smallest:.5g}, κ {self.kappa:.5g}"


@dataclass
class Answer:
    """What a tool said of a block, and how long it took."""

    tool: str
    block: str
    says: str
    seconds: float | None = None
    processor: float | None = None


def features_and_factors(problem: Problem, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ĥ (N, n̂) of a layer and B (N, units, classes), the second derivatives of sample j in its outputs B_j B_jᵀ."""
    position = int(layer)
    before, after = problem.model[:position], problem.model[position + 1 :]
    inputs, _ = problem.batch
    h = before(inputs)
    a = problem.model[position](h)
    z = after(a)
    p = torch.softmax(z, 1)
    # L Lᵀ = diag(p) − p pᵀ
    L = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
    J = vmap(jacrev(after))(a) if len(after) else torch.eye(z.shape[1], dtype=z.dtype).expand(len(z), -1, -1)
    H_hat = torch.cat([torch.ones_like(h[:, :1]), h], 1)
    return H_hat.detach(), (J.mT @ L).detach() / len(z) ** 0.5


def eigenvalues_of(factor: torch.Tensor) -> Truth:
    """The nonzero eigenvalues of FᵀF."""
    sigma = np.linalg.svd(factor.numpy(), compute_uv=False)
    return Truth(sigma[sigma > 1e-12 * sigma[0]] ** 2, factor.shape[1])


def dense_truth(problem: Problem, layer: str) -> Truth:
    """The nonzero eigenvalues by double backward, one row at a time; zero is what is below 1e-12 of the largest."""
    loss = problem.loss_fn(problem.model(problem.batch[0]), problem.batch[1])
    H = double_backward(loss, problem.model.get_submodule(layer).parameters())
    values = torch.linalg.eigvalsh((H + H.T) / 2).numpy()
    values = values[np.argsort(-np.abs(values), kind="stable")]
    return Truth(values[np.abs(values) > 1e-12 * abs(values[0])], len(values))


def off(computed: float, true: float) -> str:
    """A relative error of the size of a number."""
    return f"{abs(abs(computed) - abs(true)) / abs(true):.0e} off"


@dataclass
class Comparison:
    """Runs tools on blocks of one problem, each at most ``seconds`` long, and collects the answers."""

    problem: Problem
    seconds: float
    answers: list[Answer] = field(default_factory=list)
    truths: dict[str, str] = field(default_factory=dict)

    def ask(self, tool: str, block: str, call: Callable[[], Any], says: Callable[[Any], str]) -> None:
        """Time ``call`` and keep what it says; a failure is an answer too. Quick calls: the median of three others."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            timed, error = attempt(partial(processor, partial(seconds_of, call, CPU)), self.seconds)
        if error is not None:
            self.answers.append(Answer(tool, block, why_not(error)))
            return
        spent, (seconds, answer) = timed
        if seconds < QUICK_CALL:
            seconds = statistics.median(seconds_of(call, CPU)[0] for _ in range(3))
        self.answers.append(Answer(tool, block, says(answer), seconds, spent))

    def every_unit(self, layer: str, units: int, label: str) -> None:
        """κ of the first units of a layer: the engine, and dense automatic differentiation."""
        H_hat, B = features_and_factors(self.problem, layer)
        truths = [eigenvalues_of(B[:, unit].norm(dim=1)[:, None] * H_hat) for unit in range(units)]
        self.truths[f"{label}, the first" if units > 1 else label] = str(truths[0])
        model, loss_fn, batch = self.problem.model, self.problem.loss_fn, self.problem.batch
        self.ask("hesscond", label, partial(self.ours, layer, units=range(units)), lambda kappa: inside(kappa, truths))

        def dense() -> list[torch.Tensor]:
            return [
                torch.linalg.eigvalsh(unit_truth(model, loss_fn, batch, layer, unit, derivative=forward_over_reverse))
                for unit in range(units)
            ]

        def says(spectra: list[torch.Tensor]) -> str:
            errors = [abs(float(s[-1] / s[-t.rank]) - t.kappa) / t.kappa for s, t in zip(spectra, truths, strict=True)]
            first = spectra[0]
            return f"κ {float(first[-1] / first[0]):.0e}; told the rank: {max(errors):.0e} off"

        self.ask("torch.func.hessian", label, dense, says)

    def ends(self, layer: str, label: str, truth: Truth) -> None:
        """Ends of the spectrum of the parameters of one module, by every tool."""
        self.truths[label] = str(truth)
        bottom = truth.eigenvalues[-1]
        lowest = min(*truth.eigenvalues, 0.0) if truth.rank < truth.order else min(truth.eigenvalues)
        self.ask("hesscond", label, partial(self.ours, layer, level="layer"), lambda kappas: inside(kappas, [truth]))
        self.tops(layer, label, truth.eigenvalues[0])
        # restarts are limited, since a product that is cut off in the middle leaves torch.func's levels behind
        smallest = partial(self.curvlinops, layer, k=1, which="SM", maxiter=30)
        self.ask("curvlinops, eigsh SM", label, smallest, lambda e: f"smallest {e[0]:.1e}")
        if truth.rank < min(truth.order, MOST_TOLD):
            nonzero = partial(self.curvlinops, layer, k=truth.rank, which="LM")
            tool = f"curvlinops, eigsh k={truth.rank}"
            self.ask(tool, label, nonzero, lambda e: f"told the rank: {off(min(e, key=abs), bottom)}")

        def bottom_says(answer: Any) -> str:
            # of an indefinite matrix the lowest end is another question than the smallest nonzero size
            return f"lowest {float(answer.eigenvalues[0]):.1e} for {lowest:.1e}, converged={bool(answer.converged[0])}"

        steps = min(50, truth.order)
        lower = partial(self.eigenthings, layer, max_iter=steps, which="SA")
        self.ask("hessian-eigenthings, 50 steps, SA", label, lower, bottom_says)

    def tops(self, layer: str, label: str, top: float) -> None:
        """Eigenvalue of the largest size of one module, by every other tool."""

        def found(answer: Any) -> str:
            return f"top {off(float(answer.eigenvalues[0]), top)}, converged={bool(answer.converged[0])}"

        steps = min(50, sum(parameter.numel() for parameter in self.parameters(layer)))
        largest = partial(self.curvlinops, layer, k=1, which="LM")
        self.ask("curvlinops, eigsh LM", label, largest, lambda e: f"top {off(e[-1], top)}")
        for tool, options in (("PyHessian", {}), ("PyHessian, tol 1e-10", {"maxIter": 1000, "tol": 1e-10})):
            ask = partial(self.pyhessian, layer, **options)
            self.ask(tool, label, ask, lambda value: f"top {off(value, top)}; no bottom")
        self.ask("hessian-eigenthings", label, partial(self.eigenthings, layer), found)
        self.ask("hessian-eigenthings, 50 steps", label, partial(self.eigenthings, layer, max_iter=steps), found)

    def parameters(self, layer: str) -> Sequence[torch.nn.Parameter]:
        """Parameters of a module."""
        return list(self.problem.model.get_submodule(layer).parameters())

    def ours(self, layer: str, **options: Any) -> list[hesscond.ConditionNumber]:
        """κ by hesscond."""
        p = self.problem
        return conditions(hesscond.probe(p.model, p.loss_fn, p.batch, [layer], rtol=1e-6, **options))

    def curvlinops(self, layer: str, **options: Any) -> np.ndarray:
        """Eigenvalues by scipy on the operator of curvlinops."""
        from curvlinops import HessianLinearOperator

        given = self.problem.model, self.problem.loss_fn, self.parameters(layer), [self.problem.batch]
        # the check takes several products
        operator = HessianLinearOperator(*given, check_deterministic=False)
        return eigsh(operator.to_scipy(), return_eigenvectors=False, **options)

    def pyhessian(self, layer: str, **options: Any) -> float:
        """Eigenvalue by PyHessian, of a model in which all other layers are frozen: the whole is all it offers."""
        from pyhessian import hessian as pyhessian_hessian

        alone, before = copy.deepcopy(self.problem.model).requires_grad_(False), torch.get_default_dtype()
        alone.get_submodule(layer).requires_grad_(True)
        # its vectors are drawn in torch's default precision
        torch.set_default_dtype(torch.float64)
        try:
            asked = pyhessian_hessian(alone, self.problem.loss_fn, data=self.problem.batch, cuda=False)
            return asked.eigenvalues(**options)[0][0]
        finally:
            torch.set_default_dtype(before)
            # its gradients hold a graph
            alone.zero_grad()

    def eigenthings(self, layer: str, **options: Any) -> Any:
        """Lanczos of hessian-eigenthings."""
        from hessian_eigenthings import HessianOperator, lanczos, match_names, supervised_loss

        given = self.problem.model, [self.problem.batch], supervised_loss(self.problem.loss_fn)
        return lanczos(
            HessianOperator(*given, param_filter=match_names(f"{layer}.*" if layer else "*")), k=1, seed=0, **options
        )


def inside(kappas: Any, truths: list[Truth]) -> str:
    """How far κ are off, and how many intervals contain the truth (which is itself good to about 1e-11)."""
    pairs = list(zip(kappas, truths, strict=True))
    worst = max(abs(kappa.value - truth.kappa) / truth.kappa for kappa, truth in pairs)
    slack = 1e-11
    held = sum(k.lower * (1 - slack) <= t.kappa <= k.upper * (1 + slack) for k, t in pairs)
    ranks = sum(kappa.rank == truth.rank for kappa, truth in pairs)
    right = "ranks and bounds right" if ranks == held == len(pairs) else f"{ranks} ranks, {held} bounds of {len(pairs)}"
    return f"κ {worst:.0e} off; {right}"


def compare(problem: Problem, seconds: float) -> Comparison:
    """All tools on output units, units of the layers before, and the whole middle layer."""
    comparison = Comparison(problem, seconds)
    classes, hidden = problem.model[-1].out_features, problem.model[0].out_features
    comparison.every_unit(LAYERS[2], classes, f"{classes} output units")
    comparison.every_unit(LAYERS[1], hidden, f"{hidden} units of layer 2")
    comparison.every_unit(LAYERS[0], 1, "1 unit of layer 1")
    H_hat, B = features_and_factors(problem, LAYERS[1])
    whole = eigenvalues_of(torch.einsum("jur,jn->jrun", B, H_hat).flatten(0, 1).flatten(1))
    comparison.ends(LAYERS[1], "whole layer 2", whole)
    return comparison


#: Blocks of a GPT that all tools are asked about.
BLOCKS = {
    "0.block1.norm1": "layer normalization",
    "0.block1.attention.q": "queries of attention",
    "0.block1.fc1": "first matrix of the MLP",
    "0.embedding": "embedding of tokens",
}


def compare_blocks(seconds: float, blocks: Sequence[str]) -> Comparison:
    """All tools on blocks of a GPT 16 wide, on 4 × 8 tokens, in float64, with weights large enough to attend."""
    problem = characters(4, 8, 16, 2, 30)
    problem.model.double()
    for parameter in problem.model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8
    comparison = Comparison(problem, seconds)
    for layer in blocks:
        comparison.ends(layer, BLOCKS[layer], dense_truth(problem, layer))
    return comparison

"""Numbers whose truth is known: condition numbers, a Hessian against torch.func, a training run against itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import nn

from hesscond.doctor.check import Check, failed, ok
from hesscond.probing import probe
from hesscond.spectra import condition_number

#: κ(FᵀF) = 4^k of the graded matrices, up to 4^48 = 8e28.
GRADES = (0, 10, 26, 48)
#: Relative error that is passed.
TOLERANCE = 1e-10
WRONG = "numbers on this machine cannot be trusted: install torch, numpy and scipy again, and report it"


def tests() -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and test of each."""
    yield "κ, graded", graded
    yield "κ, rank deficient", deficient
    yield "κ, indefinite", indefinite
    yield "unit Hessian", unit_hessian
    yield "same run twice", repeated


def graded() -> Check:
    """F = H diag(2^-i…) with a Hadamard matrix H: all entries and all singular values are known exactly."""
    worst = 0.0
    for grade in GRADES:
        F = hadamard(8) * 2.0 ** -np.rint(np.linspace(0, grade, 8))
        found, truth = condition_number(factor=F), 4.0**grade
        if not (found.resolved and found.rank == 8 and found.lower <= truth <= found.upper):
            return failed(f"κ(FᵀF) = {truth:.3g} came out as {found}", WRONG)
        worst = max(worst, abs(found.value / truth - 1))
    return judged(worst, f"κ from 1 to {4.0 ** GRADES[-1]:.0e}")


def deficient() -> Check:
    """The same with a column that is three times the first: the largest eigenvalue is tenfold, one more is zero."""
    F = hadamard(8) * 2.0 ** -np.arange(8)
    found, truth = condition_number(factor=np.column_stack([F, 3 * F[:, 0]])), 10 * 4.0**7
    if not (found.resolved and (found.rank, found.nullity) == (8, 1) and found.lower <= truth <= found.upper):
        return failed(f"κ = {truth:.6g} of rank 8 and nullity 1 came out as {found}", WRONG)
    return judged(abs(found.value / truth - 1), "rank 8 of 9 found")


def indefinite() -> Check:
    """H Λ Hᵀ / 8 with eigenvalues 2^i of both signs and a zero: exact in double precision."""
    eigenvalues = np.array([2.0**i for i in range(6)] + [-(2.0**6), 0.0])
    H = hadamard(8)
    found, truth = condition_number(H * eigenvalues @ H.T / 8), 64.0
    facts = (found.rank, found.nullity, found.negative)
    if not (found.resolved and facts == (7, 1, 1) and found.lower <= truth <= found.upper):
        return failed(f"κ = 64 with one negative and one zero eigenvalue came out as {found}", WRONG)
    return judged(abs(found.value / truth - 1), "signs and rank found")


def network(width: int, dtype: torch.dtype) -> nn.Sequential:
    """Weights that no random number generator has a part in, which would be left in another state."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_((torch.arange(p.numel(), dtype=torch.float64) * (number + 1)).sin().reshape(p.shape) / 2)
    return model


def samples(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (count, 5) and labels."""
    x = (torch.arange(count * 5, dtype=torch.float64) * 1.7).cos().reshape(count, 5).to(dtype)
    return x, torch.arange(count) % 3


def unit_hessian() -> Check:
    """Every unit of a small tanh network against `torch.func.hessian`."""
    model, (x, y) = network(4, torch.float64), samples(12, torch.float64)
    layer, worst = model[0], 0.0
    assert isinstance(layer, nn.Linear)
    found = probe(model, nn.CrossEntropyLoss(), (x, y), ["0"])["0"]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    for unit in range(4):
        here = torch.arange(4) == unit

        def loss(v: torch.Tensor, here: torch.Tensor = here) -> torch.Tensor:
            changed = {"0.weight": torch.where(here[:, None], v[1:], weight), "0.bias": torch.where(here, v[0], bias)}
            return nn.functional.cross_entropy(torch.func.functional_call(model, changed, (x,)), y)

        truth = torch.func.hessian(loss)(torch.cat([bias[unit : unit + 1], weight[unit]])).detach()
        worst = max(worst, float((found.hessian(unit) - truth).norm() / truth.norm()))
    return judged(worst, "as torch.func.hessian's")


def repeated() -> Check:
    """A few steps wide enough that threads share them, twice: the same weights bit for bit."""
    ends = []
    for _ in range(2):
        model, (x, y) = network(512, torch.float32), samples(512, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    if all(torch.equal(a, b) for a, b in zip(*ends, strict=True)):
        return ok(f"bit for bit, threads: {torch.get_num_threads()}")
    return failed("10 steps of training gave two results", "set OMP_NUM_THREADS=1, or no run can be resumed exactly")


def judged(error: float, found: str) -> Check:
    """By a relative error."""
    if error > TOLERANCE:
        return failed(f"{found}, but off by {error:.1e}", WRONG)
    return ok(f"{found}, relative error {error:.0e}")

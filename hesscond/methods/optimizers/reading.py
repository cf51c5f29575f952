"""The registry of readers, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, cast

import torch
from torch.optim import Optimizer

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap


@dataclass(frozen=True)
class Look:
    """One parameter of an optimizer at work.

    Attributes
    ----------
    parameter
        In the group ``group`` of ``optimizer``.
    state
        What the optimizer keeps of it; empty before its first step.
    """

    optimizer: Optimizer
    group: Mapping[str, Any]
    parameter: torch.Tensor
    state: Mapping[str, Any]

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor of the state, float64."""
        return double(self.state[key])

    def diagonal(self, M: torch.Tensor) -> ParameterMap:
        """P of M = diag(M) in the shape of the parameter."""
        return ParameterMap(M.sqrt().reshape(self.parameter.shape))


#: Reads P of a parameter that has taken a step: M = P Pᵀ without momentum, weight decay and learning rate.
Reader = Callable[[Look], ParameterMap | None]


@dataclass(frozen=True)
class Known:
    """An optimizer that has a reader. ``stateless``: M is known before the first step."""

    name: str
    read: Reader
    stateless: bool = False


_READERS: dict[str, Known] = {}


def reads(*classes: str, stateless: bool = False) -> Callable[[Reader], Reader]:
    """Register the reader of optimizers, by the qualified names of their classes."""

    def registered(read: Reader) -> Reader:
        for path in classes:
            package, _, name = path.rpartition(".")
            package = "torch.optim" if package.startswith("torch.optim") else package.split(".")[0]
            _READERS[path] = Known(f"{package}.{name}", read, stateless)
        return read

    return registered


def known_optimizers() -> list[str]:
    """Names of all optimizers that have a reader."""
    return sorted(known.name for known in _READERS.values())


#: Classes that hold an optimizer and step as it does; others, such as Lookahead, do something else with its steps.
WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer",
    *(f"{package}.core.optimizer.LightningOptimizer" for package in ("lightning.pytorch", "pytorch_lightning")),
    *(f"{package}.wrappers._FabricOptimizer" for package in ("lightning.fabric", "lightning_fabric")),
}


def held(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of the wrappers of trainers."""
    while any(f"{kind.__module__}.{kind.__qualname__}" in WRAPPERS for kind in type(optimizer).__mro__):
        optimizer = cast(Any, optimizer).optimizer
    return optimizer


def reader_of(optimizer: Optimizer) -> Known:
    """The reader of an optimizer."""
    for kind in type(optimizer).__mro__:
        known = _READERS.get(f"{kind.__module__}.{kind.__qualname__}")
        # torch wraps the step of every class that an object is made of
        if known is not None and unwrap(type(optimizer).step) is unwrap(getattr(kind, "step")):  # noqa: B009
            return known
    raise ConfigError(
        f"the coordinates of {type(optimizer).__name__} are not known: M can be read from the state of "
        f"{', '.join(known_optimizers())}"
    )


def double(tensor: Any) -> torch.Tensor:
    """A tensor of a state, float64."""
    if tensor.layout != torch.strided:
        raise ConfigError("an optimizer with a sparse state has no M that can be read: use dense gradients")
    if not tensor.is_floating_point():
        raise ConfigError(f"a state of {tensor.dtype} is compressed, and M cannot be read from it")
    return tensor.detach().to(torch.float64)


def power(A: torch.Tensor, exponent: float) -> torch.Tensor:
    """A^exponent of a symmetric positive semidefinite matrix, rounded negative eigenvalues as zeros."""
    values, Q = torch.linalg.eigh((A + A.mT) / 2)
    return (Q * values.clamp_min(0).pow(exponent)) @ Q.mT


def newton_schulz(
    u: torch.Tensor, coefficients: Sequence[Sequence[float]], eps: float, *, scale: float = 1.0
) -> ParameterMap:
    """P of the matrix that Newton–Schulz steps multiply ``u`` (m, …) with, times ``scale``.

    X ← (a I + b XXᵀ + c (XXᵀ)²) X from X = u/max(‖u‖, ε), with u as (m, n): the product of these polynomials is L with
    L u = X at the end, for m ≤ n; for m > n the steps are taken with uᵀ, and X = u R.
    """
    matrix = u.flatten(1)
    wide = matrix.shape[0] <= matrix.shape[1]
    norm = max(float(matrix.norm()), eps)
    # Vᵀ, which could be huge, only as far as it goes with U
    Q, sigma, _ = torch.linalg.svd((matrix if wide else matrix.mT) / norm, full_matrices=False)
    found = torch.full_like(sigma, scale / norm)
    for a, b, c in coefficients:
        factor = a + b * sigma.square() + c * sigma.pow(4)
        found, sigma = found * factor, sigma * factor
    if not bool((found > 0).all()):
        raise ConfigError(
            "the Newton–Schulz steps change the sign of some directions at this gradient: there M is no P Pᵀ"
        )
    root = (Q * found.sqrt()) @ Q.mT
    return ParameterMap.kronecker(matrix.shape, (root, None) if wide else (None, root))

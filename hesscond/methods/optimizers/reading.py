"""Registry of readers, what they may return, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.operators import LinearOperator, SymmetricOperator

#: Largest order of an M that is decomposed: a minute; and how far a rounded one may be from symmetric and semidefinite.
DENSE, ROUNDED = 8192, 1e-6


class UnknownOptimizerError(ConfigError):
    """An optimizer whose M nobody reads, so that there are no coordinates of its steps."""


@dataclass(frozen=True)
class ParameterState:
    """One parameter of an optimizer at work, in the group ``group``; ``values`` are empty before its first step."""

    optimizer: Optimizer
    group: Mapping[str, Any]
    parameter: torch.Tensor
    values: Mapping[str, Any]

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor of the state, float64."""
        return double(self.values[key])


#: Reads M, or P, of a parameter that has taken a step, as `as_map` takes them: without momentum, weight decay and rate.
Reader = Callable[[ParameterState], Any]


@dataclass(frozen=True)
class RegisteredReader:
    """An optimizer that has a reader. ``stateless``: M is known before the first step."""

    name: str
    read: Reader
    stateless: bool = False

    def map(self, state: ParameterState) -> ParameterMap | None:
        """P of a parameter; None: it has not moved yet."""
        return as_map(self.read(state), state.parameter, f"M of {self.name}")


_READERS: dict[str, RegisteredReader] = {}


def reads(*classes: str | type, stateless: bool = False) -> Callable[[Reader], Reader]:
    """Decorator that registers the reader of optimizers, given by their classes or names (``"torch.optim.adam.Adam"``).

    It reads M or P of the parameter of a `ParameterState`, see `as_map`, for a step −η M g with the learning rate η of
    its group; None: it has not moved yet. ``stateless``: M is known before the first step.

    Examples
    --------
    >>> class Mine(torch.optim.Optimizer):
    ...     "Steps by p ← p − η g/√v."
    >>> _ = reads(Mine)(lambda state: 1 / state.tensor("v").sqrt())
    """

    def registered(read: Reader) -> Reader:
        for kind in classes:
            path = kind if isinstance(kind, str) else qualified(kind)
            package, _, name = path.rpartition(".")
            package = "torch.optim" if package.startswith("torch.optim") else package.split(".")[0]
            _READERS[path] = RegisteredReader(f"{package}.{name}", read, stateless)
        return read

    return registered


def qualified(kind: type) -> str:
    """Name of a class with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def known_optimizers() -> list[str]:
    """Names of all optimizers that have a reader."""
    return sorted(reader.name for reader in _READERS.values())


def held(optimizer: Any) -> Any:
    """Innermost optimizer of wrappers: what they hold as ``base_optimizer``, ``optimizer`` or ``base``."""
    while not registered_reader(optimizer):
        inside = (getattr(optimizer, name, None) for name in ("base_optimizer", "optimizer", "base"))
        inner = next((attribute for attribute in inside if isinstance(attribute, Optimizer)), None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def registered_reader(optimizer: Any) -> RegisteredReader | None:
    """Reader of an optimizer; None: there is none."""
    for kind in type(optimizer).__mro__:
        reader = _READERS.get(qualified(kind))
        # torch wraps the step of every class that an object is made of
        if reader is not None and unwrap(type(optimizer).step) is unwrap(getattr(kind, "step")):  # noqa: B009
            return reader
    return None


def reader_of(optimizer: Any) -> RegisteredReader:
    """Reader of an optimizer; an `UnknownOptimizerError` if there is none."""
    reader = registered_reader(optimizer)
    if reader is None:
        raise UnknownOptimizerError(
            f"the coordinates of {type(optimizer).__name__} are not known (hesscond.methods.optimizers has "
            "known_optimizers()): give M of its step −M g instead, as a function of a parameter, or register a reader "
            "of its state with hesscond.methods.optimizers.reads"
        )
    return reader


def as_map(M: Any, parameter: torch.Tensor, whose: str) -> ParameterMap | None:
    """P of a parameter of n entries, with M = P Pᵀ, from M or P; else a ConfigError that says ``whose`` M it is.

    M is a number, a tensor of the parameter's shape (its diagonal), a symmetric positive semidefinite matrix (n, n) or
    `SymmetricOperator`, or a list of matrices, one for each axis (None: the identity), whose Kronecker product it is;
    P is a `ParameterMap` or a `LinearOperator` (n, k). None: the parameter does not move.
    """
    n, shape = parameter.numel(), parameter.shape
    if M is None or (isinstance(M, ParameterMap) and M.v.numel() == n):
        return M
    if isinstance(M, LinearOperator) and M.shape[0] == n <= DENSE:
        dense = M.to_dense().to(torch.float64)
        M = dense if isinstance(M, SymmetricOperator) else dense @ dense.T
    if isinstance(M, (list, tuple)) and len(M) == len(shape):
        pairs = zip(M, shape, strict=True)
        return ParameterMap.kronecker(shape, [None if A is None else rooted(A, s, whose) for A, s in pairs])
    if isinstance(M, Real):
        M = torch.full(shape, float(M), dtype=torch.float64, device=parameter.device)
    if isinstance(M, torch.Tensor) and M.shape == shape:
        diagonal = double(M).to(parameter.device)
        if not bool((diagonal >= 0).all() & diagonal.isfinite().all()):
            raise ConfigError(f"{whose} has negative, infinite or undefined entries, and so no P with M = P Pᵀ")
        return ParameterMap(diagonal.sqrt())
    if isinstance(M, torch.Tensor) and M.shape == (n, n) and n <= DENSE:
        root = rooted(M, n, whose).to(parameter.device)
        return ParameterMap(torch.ones_like(root[0]), (root,))
    text = f"a tensor of shape {tuple(M.shape)}" if isinstance(M, (torch.Tensor, LinearOperator)) else repr(M)
    raise ConfigError(
        f"{whose} is {text}, which is no M of a parameter of shape {tuple(shape)}: give a number, a tensor of that "
        f"shape (the diagonal), a matrix or an operator ({n}, {n}) with n ≤ {DENSE}, or a matrix for each axis"
    )


def rooted(M: Any, order: int, whose: str) -> torch.Tensor:
    """Root of M (n, n); a ConfigError unless it is symmetric and positive semidefinite to rounding."""
    if not isinstance(M, torch.Tensor) or M.shape != (order, order):
        raise ConfigError(f"{whose} has a factor that is no matrix ({order}, {order}), the size of its axis")
    M = double(M)
    size = float(M.abs().max())
    if not size < float("inf") or float((M - M.T).abs().max()) > ROUNDED * size:
        raise ConfigError(f"{whose} is not symmetric and finite, and so has no P with M = P Pᵀ")
    if float(torch.linalg.eigvalsh(M)[0]) < -ROUNDED * size:
        raise ConfigError(f"{whose} has negative eigenvalues, and so no P with M = P Pᵀ")
    return power(M, 0.5)


def double(tensor: Any) -> torch.Tensor:
    """A tensor of a state, float64."""
    if tensor.layout != torch.strided:
        raise ConfigError("an optimizer with a sparse state has no M that can be read: use dense gradients")
    if not tensor.is_floating_point():
        raise ConfigError(f"a state of {tensor.dtype} is compressed, and M cannot be read from it")
    return tensor.detach().to(torch.float64)


def rms(tensor: torch.Tensor) -> float:
    """Root mean square of the entries, computed in float64."""
    return float(tensor.detach().to(torch.float64).square().mean().sqrt())


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
    eigenvalues = torch.full_like(sigma, scale / norm)
    for a, b, c in coefficients:
        factor = a + b * sigma.square() + c * sigma.pow(4)
        eigenvalues, sigma = eigenvalues * factor, sigma * factor
    if not bool((eigenvalues > 0).all()):
        raise ConfigError(
            "the Newton–Schulz steps change the sign of some directions at this gradient: there M is no P Pᵀ"
        )
    root = (Q * eigenvalues.sqrt()) @ Q.mT
    return ParameterMap.kronecker(matrix.shape, (root, None) if wide else (None, root))

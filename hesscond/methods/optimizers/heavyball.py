"""M of optimizers of the package heavyball (3.2), which keeps its states as chains of functions leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers.pytorch_optimizer import rotated
from hesscond.methods.optimizers.reading import Look, Reader, as_map, double, newton_schulz, reads

#: What its Newton–Schulz steps are.
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def steps_of(name: str) -> Callable[[Reader], Reader]:
    """Register the reader of one of its optimizers, whose rate does not show the warm-up that shortens its steps."""

    def registered(read: Reader) -> Reader:
        @reads(f"heavyball.{name}")
        def warmed(look: Look) -> ParameterMap | None:
            if look.group["caution"]:
                raise ConfigError(
                    f"heavyball.{name} with caution=True leaves out entries by their signs and those of the gradient"
                )
            found = as_map(read(look), look.parameter, f"M of heavyball.{name}")
            step = float(look.group.get("step_count") or 1)
            return None if found is None else found.scaled(step / max(step, look.group["warmup_steps"] + 1))

        return warmed

    return registered


def entry(look: Look, name: str) -> Any:
    """State ``name`` of a parameter, from the first link of the chain that has one; None: no link has."""
    views = [view for view in look.state.values() if isinstance(view, dict)]
    if len(views) > 1:
        raise ConfigError("heavyball keeps this parameter in several pieces (split=True): make the optimizer without")
    for key, value in views[0].items() if views else ():
        if key.rpartition("_")[0].endswith(name):
            return value
    return None


def unstacked(tensor: torch.Tensor) -> torch.Tensor:
    """A state without the axis of parameters that are worked on together, float64."""
    if tensor.ndim and len(tensor) != 1:
        raise ConfigError("heavyball keeps several parameters in one state here: make the optimizer without buckets")
    return double(tensor[0])


@steps_of("AdamW")
def adamw(look: Look) -> torch.Tensor | None:
    """M = 1/max(√v, ε), v an average with corrected weights."""
    v = entry(look, "exp_avg_sq")
    return None if v is None else 1 / double(v).sqrt().clamp(min=look.group["eps"]).view(look.parameter.shape)


@steps_of("SOAP")
def soap(look: Look) -> ParameterMap | None:
    """M = Q diag(1/max(√v, ε)) Qᵀ; where Q was turned after the step, that of the next one."""
    v, Q = entry(look, "exp_avg_sq"), entry(look, "_Q")
    if v is None or Q is None or not bool(v.any()):
        return None
    bases = [None if one is None else unstacked(one) for one in Q]
    v = unstacked(v)
    return rotated(v, bases, v.sqrt().clamp(min=look.group["eps"]))


@steps_of("PSGDKron")
def psgd(look: Look) -> ParameterMap | None:
    """M = ⊗ Q_iᵀQ_i. The clipping of the update, entry by entry, is left out: with it the map is not symmetric."""
    Q = entry(look, "_Q")
    if Q is None:
        return None
    factors = [triangular(one) for one in Q]
    return ParameterMap.kronecker([len(F) for F in factors], [F.mT if F.ndim == 2 else F for F in factors])


def triangular(stored: Any) -> torch.Tensor:
    """Q (s, s), or (s,) of a diagonal one, from a tensor or from the entries of its upper triangle."""
    if isinstance(stored, torch.Tensor):
        return unstacked(stored)
    shape, entries = stored
    if shape is None:
        return unstacked(entries)
    found = torch.zeros(shape[-2:], dtype=torch.float64, device=entries.device)
    rows, columns = torch.triu_indices(*shape[-2:], device=entries.device)
    found[rows, columns] = unstacked(entries)
    return found


@steps_of("Muon")
def muon(look: Look) -> ParameterMap | float | None:
    """P of Muon as in `torch_optim`, with other polynomials; vectors step along their averaged gradient."""
    u = entry(look, "momentum")
    u = entry(look, "exp_avg") if u is None else u
    if u is None:
        return None
    if look.parameter.ndim < 2:
        # Nesterov's average there is g + m, of which only the direction counts for a matrix
        doubled = entry(look, "nesterov_ema_momentum") is not None
        return 1.0 + doubled
    m, n = len(u), u[0].numel()
    return newton_schulz(double(u), STEPS, 1e-7, scale=max(1.0, m / n) ** 0.5)

"""M of torch's own optimizers, as their documentation gives the steps.

Muon: Jordan et al., *Muon: An optimizer for hidden layers in neural networks* (2024); RAdam: Liu et al., ICLR 2020; the
others in `hesscond.methods`.
"""

from __future__ import annotations

import math

import torch

from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers.reading import Look, newton_schulz, reads


@reads("torch.optim.sgd.SGD", stateless=True)
def sgd(look: Look) -> ParameterMap:
    """M = I."""
    return look.diagonal(torch.ones_like(look.parameter, dtype=torch.float64))


def root_of_average(look: Look, key: str, beta: float) -> torch.Tensor:
    """√(v/(1 − βᵗ)) + ε."""
    step = float(look.state["step"])
    return (look.tensor(key) / (1 - beta**step)).sqrt() + float(look.group["eps"])


@reads("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.nadam.NAdam")
def adam(look: Look) -> ParameterMap:
    """M = 1/(√v̂ + ε); with ``amsgrad`` of the largest v so far."""
    key = "max_exp_avg_sq" if look.group.get("amsgrad") else "exp_avg_sq"
    return look.diagonal(1 / root_of_average(look, key, look.group["betas"][1]))


@reads("torch.optim.radam.RAdam")
def radam(look: Look) -> ParameterMap:
    """M = r_t √(1 − β₂ᵗ)/(√v + ε), and I as long as r_t is not defined."""
    step, beta = float(look.state["step"]), float(look.group["betas"][1])
    infinite = 2 / (1 - beta) - 1
    rho = infinite - 2 * step * beta**step / (1 - beta**step)
    if rho <= 5:
        return look.diagonal(torch.ones_like(look.parameter, dtype=torch.float64))
    r = math.sqrt((rho - 4) * (rho - 2) * infinite / ((infinite - 4) * (infinite - 2) * rho))
    root = look.tensor("exp_avg_sq").sqrt() + float(look.group["eps"])
    return look.diagonal(r * math.sqrt(1 - beta**step) / root)


@reads("torch.optim.adamax.Adamax")
def adamax(look: Look) -> ParameterMap:
    """M = 1/u."""
    return look.diagonal(1 / look.tensor("exp_inf"))


@reads("torch.optim.adagrad.Adagrad")
def adagrad(look: Look) -> ParameterMap | None:
    """M = 1/(√V + ε), over 1 + (t − 1)·``lr_decay``; V_0 is there before the first step."""
    step = float(look.state["step"])
    if step == 0:
        return None
    root = look.tensor("sum").sqrt() + float(look.group["eps"])
    return look.diagonal(1 / (root * (1 + (step - 1) * float(look.group["lr_decay"]))))


@reads("torch.optim.rmsprop.RMSprop")
def rmsprop(look: Look) -> ParameterMap:
    """M = 1/(√v + ε); centred, of v − ḡ²."""
    v = look.tensor("square_avg")
    if look.group["centered"]:
        v = v - look.tensor("grad_avg").square()
    return look.diagonal(1 / (v.sqrt() + float(look.group["eps"])))


@reads("torch.optim.Muon")
def muon(look: Look) -> ParameterMap:
    """The matrix that the Newton–Schulz steps multiply the momentum buffer with, exactly: torch rounds to bfloat16.

    It is of one side, the shorter; any other L′, R′ with L′ B R′ = L B would explain the step of B as well. With
    Nesterov's step torch orthogonalizes (1 − μ) g + μ B, and g is not kept.
    """
    m, n = look.parameter.shape
    adjusted = {"match_rms_adamw": 0.2 * math.sqrt(max(m, n))}.get(
        look.group["adjust_lr_fn"] or "original", math.sqrt(max(1, m / n))
    )
    steps = [look.group["ns_coefficients"]] * look.group["ns_steps"]
    return newton_schulz(look.tensor("momentum_buffer"), steps, look.group["eps"], scale=adjusted)

"""M of torch's own optimizers, as their documentation gives the steps; `hesscond.methods` has the sources."""

from __future__ import annotations

import math

import torch

from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers import reading


@reading.reads("torch.optim.sgd.SGD", stateless=True)
def sgd(look: reading.Look) -> float:
    """M = I."""
    return 1.0


@reading.reads("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.nadam.NAdam")
def adam(look: reading.Look) -> torch.Tensor:
    """M = 1/(√v̂ + ε); with ``amsgrad`` of the largest v so far."""
    key = "max_exp_avg_sq" if look.group.get("amsgrad") else "exp_avg_sq"
    v = look.tensor(key) / (1 - look.group["betas"][1] ** float(look.state["step"]))
    return 1 / (v.sqrt() + float(look.group["eps"]))


@reading.reads("torch.optim.radam.RAdam")
def radam(look: reading.Look) -> torch.Tensor | float:
    """M = r_t √(1 − β₂ᵗ)/(√v + ε), and I as long as r_t is not defined (Liu et al., ICLR 2020)."""
    step, beta = float(look.state["step"]), float(look.group["betas"][1])
    infinite = 2 / (1 - beta) - 1
    rho = infinite - 2 * step * beta**step / (1 - beta**step)
    if rho <= 5:
        return 1.0
    r = math.sqrt((rho - 4) * (rho - 2) * infinite / ((infinite - 4) * (infinite - 2) * rho))
    root = look.tensor("exp_avg_sq").sqrt() + float(look.group["eps"])
    return r * math.sqrt(1 - beta**step) / root


@reading.reads("torch.optim.adamax.Adamax")
def adamax(look: reading.Look) -> torch.Tensor:
    """M = 1/u."""
    return 1 / look.tensor("exp_inf")


@reading.reads("torch.optim.adagrad.Adagrad")
def adagrad(look: reading.Look) -> torch.Tensor | None:
    """M = 1/(√V + ε), over 1 + (t − 1)·``lr_decay``; V_0 is there before the first step."""
    step = float(look.state["step"])
    if step == 0:
        return None
    root = look.tensor("sum").sqrt() + float(look.group["eps"])
    return 1 / (root * (1 + (step - 1) * float(look.group["lr_decay"])))


@reading.reads("torch.optim.rmsprop.RMSprop")
def rmsprop(look: reading.Look) -> torch.Tensor:
    """M = 1/(√v + ε); centred, of v − ḡ²."""
    v = look.tensor("square_avg")
    if look.group["centered"]:
        v = v - look.tensor("grad_avg").square()
    return 1 / (v.sqrt() + float(look.group["eps"]))


@reading.reads("torch.optim.Adafactor")
def adafactor(look: reading.Look) -> torch.Tensor:
    """M = c/√v with c η = max(ε₂, rms(p))·min(η, 1/√t), and v = r cᵀ/mean(r) of averaged rows r and columns c.

    The gradient in ``.grad``, if there is one, says how far the update was shortened to the root mean square d.
    """
    group, step = look.group, float(look.state["step"])
    eps = torch.finfo(look.parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
    if "variance" in look.state:
        v = look.tensor("variance")
    else:
        rows = look.tensor("row_var")
        v = rows @ look.tensor("col_var") / rows.mean(-2, keepdim=True).clamp(min=eps)
    M = v.clamp(min=eps**2).rsqrt()
    if look.parameter.grad is not None:
        M = M / max(1.0, reading.rms(M * reading.double(look.parameter.grad)) / group["d"])
    return M * max(group["eps"][1], reading.rms(look.parameter)) * min(1.0, 1 / (step**0.5 * float(group["lr"])))


@reading.reads("torch.optim.adadelta.Adadelta")
def adadelta(look: reading.Look) -> torch.Tensor:
    """M = √(u + ε)/√(v + ε), u the average of squared steps: after a step that of the next one, but for its v."""
    eps = look.group["eps"]
    return (look.tensor("acc_delta") + eps).sqrt() / (look.tensor("square_avg") + eps).sqrt()


@reading.reads("torch.optim.rprop.Rprop")
def rprop(look: reading.Look) -> torch.Tensor:
    """M = Δ/|g| of the last step, which has the sizes Δ whatever η is; 0 in entries that a change of sign stopped."""
    g = look.tensor("prev").abs()
    return torch.where(g > 0, look.tensor("step_size") / (g * float(look.group["lr"])), 0.0)


@reading.reads("torch.optim.asgd.ASGD")
def asgd(look: reading.Look) -> float:
    """M = η_t/η I with the decaying rate η_t of the next step; the average of the points has no part in it."""
    return float(look.state["eta"]) / float(look.group["lr"])


@reading.reads("torch.optim.Muon")
def muon(look: reading.Look) -> ParameterMap:
    """The matrix that the Newton–Schulz steps multiply the momentum buffer with, exactly: torch rounds to bfloat16."""
    m, n = look.parameter.shape
    adjusted = {"match_rms_adamw": 0.2 * math.sqrt(max(m, n))}.get(
        look.group["adjust_lr_fn"] or "original", math.sqrt(max(1, m / n))
    )
    steps = [look.group["ns_coefficients"]] * look.group["ns_steps"]
    return reading.newton_schulz(look.tensor("momentum_buffer"), steps, look.group["eps"], scale=adjusted)

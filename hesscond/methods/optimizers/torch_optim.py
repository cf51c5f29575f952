"""M of torch's own optimizers, as their documentation gives the steps; `hesscond.methods` has the sources."""

from __future__ import annotations

import math

import torch

from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers import reading


@reading.reads("torch.optim.sgd.SGD", stateless=True)
def sgd(state: reading.ParameterState) -> float:
    """M = I."""
    return 1.0


@reading.reads("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.nadam.NAdam")
def adam(state: reading.ParameterState) -> torch.Tensor:
    """M = 1/(√v̂ + ε); with ``amsgrad`` of the largest v so far."""
    key = "max_exp_avg_sq" if state.group.get("amsgrad") else "exp_avg_sq"
    v = state.tensor(key) / (1 - state.group["betas"][1] ** float(state.values["step"]))
    return 1 / (v.sqrt() + float(state.group["eps"]))


@reading.reads("torch.optim.radam.RAdam")
def radam(state: reading.ParameterState) -> torch.Tensor | float:
    """M = r_t √(1 − β₂ᵗ)/(√v + ε), and I as long as r_t is not defined (Liu et al., ICLR 2020)."""
    step, beta = float(state.values["step"]), float(state.group["betas"][1])
    infinite = 2 / (1 - beta) - 1
    rho = infinite - 2 * step * beta**step / (1 - beta**step)
    if rho <= 5:
        return 1.0
    r = math.sqrt((rho - 4) * (rho - 2) * infinite / ((infinite - 4) * (infinite - 2) * rho))
    root = state.tensor("exp_avg_sq").sqrt() + float(state.group["eps"])
    return r * math.sqrt(1 - beta**step) / root


@reading.reads("torch.optim.adamax.Adamax")
def adamax(state: reading.ParameterState) -> torch.Tensor:
    """M = 1/u."""
    return 1 / state.tensor("exp_inf")


@reading.reads("torch.optim.adagrad.Adagrad")
def adagrad(state: reading.ParameterState) -> torch.Tensor | None:
    """M = 1/(√V + ε), over 1 + (t − 1)·``lr_decay``; V_0 is there before the first step."""
    step = float(state.values["step"])
    if step == 0:
        return None
    root = state.tensor("sum").sqrt() + float(state.group["eps"])
    return 1 / (root * (1 + (step - 1) * float(state.group["lr_decay"])))


@reading.reads("torch.optim.rmsprop.RMSprop")
def rmsprop(state: reading.ParameterState) -> torch.Tensor:
    """M = 1/(√v + ε); centred, of v − ḡ²."""
    v = state.tensor("square_avg")
    if state.group["centered"]:
        v = v - state.tensor("grad_avg").square()
    return 1 / (v.sqrt() + float(state.group["eps"]))


@reading.reads("torch.optim.Adafactor")
def adafactor(state: reading.ParameterState) -> torch.Tensor:
    """M = c/√v with c η = max(ε₂, rms(p))·min(η, 1/√t), and v = r cᵀ/mean(r) of averaged rows r and columns c.

    The gradient in ``.grad``, if there is one, says how far the update was shortened to the root mean square d.
    """
    group, step = state.group, float(state.values["step"])
    eps = torch.finfo(state.parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
    if "variance" in state.values:
        v = state.tensor("variance")
    else:
        rows = state.tensor("row_var")
        v = rows @ state.tensor("col_var") / rows.mean(-2, keepdim=True).clamp(min=eps)
    M = v.clamp(min=eps**2).rsqrt()
    if state.parameter.grad is not None:
        M = M / max(1.0, reading.rms(M * reading.double(state.parameter.grad)) / group["d"])
    return M * max(group["eps"][1], reading.rms(state.parameter)) * min(1.0, 1 / (step**0.5 * float(group["lr"])))


@reading.reads("torch.optim.adadelta.Adadelta")
def adadelta(state: reading.ParameterState) -> torch.Tensor:
    """M = √(u + ε)/√(v + ε), u the average of squared steps: after a step that of the next one, but for its v."""
    eps = state.group["eps"]
    return (state.tensor("acc_delta") + eps).sqrt() / (state.tensor("square_avg") + eps).sqrt()


@reading.reads("torch.optim.rprop.Rprop")
def rprop(state: reading.ParameterState) -> torch.Tensor:
    """M = Δ/|g| of the last step, which has the sizes Δ whatever η is; 0 in entries that a change of sign stopped."""
    g = state.tensor("prev").abs()
    return torch.where(g > 0, state.tensor("step_size") / (g * float(state.group["lr"])), 0.0)


@reading.reads("torch.optim.asgd.ASGD")
def asgd(state: reading.ParameterState) -> float:
    """M = η_t/η I with the decaying rate η_t of the next step; the average of the points has no part in it."""
    return float(state.values["eta"]) / float(state.group["lr"])


@reading.reads("torch.optim.Muon")
def muon(state: reading.ParameterState) -> ParameterMap:
    """The matrix that the Newton–Schulz steps multiply the momentum buffer with, exactly: torch rounds to bfloat16."""
    m, n = state.parameter.shape
    adjusted = {"match_rms_adamw": 0.2 * math.sqrt(max(m, n))}.get(
        state.group["adjust_lr_fn"] or "original", math.sqrt(max(1, m / n))
    )
    steps = [state.group["ns_coefficients"]] * state.group["ns_steps"]
    return reading.newton_schulz(state.tensor("momentum_buffer"), steps, state.group["eps"], scale=adjusted)

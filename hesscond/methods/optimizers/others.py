"""M of optimizers of the packages pytorch-optimizer (4.1) and schedulefree (1.4); sources: `hesscond.methods`."""

from __future__ import annotations

import math

import torch

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers import reading


@reading.reads("pytorch_optimizer.optimizer.shampoo.Shampoo")
def shampoo(state: reading.ParameterState) -> ParameterMap:
    """M = ⊗ (ε I + Σ G_i G_iᵀ)^(−1/2k) over the k axes of a parameter, as last computed."""
    axes = range(state.parameter.ndim)
    roots = [reading.power(state.tensor(f"inv_pre_cond_{axis}"), 0.5) for axis in axes]
    return ParameterMap.kronecker(state.parameter.shape, roots)


@reading.reads("pytorch_optimizer.optimizer.soap.SOAP")
def soap(state: reading.ParameterState) -> ParameterMap | None:
    """M = Q diag(√(1 − β₂ᵗ)/(√v + ε)) Qᵀ; where Q was turned after the step, that of the next one."""
    if state.group["merge_dims"]:
        raise ConfigError("SOAP with merge_dims=True reshapes weights, and its M cannot be read: use merge_dims=False")
    step = int(state.group["step"]) - 1
    if step < 1:
        return None
    v = state.tensor("exp_avg_sq")
    bases = tuple(None if len(Q) == 0 else reading.double(Q) for Q in state.values["Q"])
    P = ParameterMap((v.sqrt() + state.group["eps"]).rsqrt(), bases)
    if state.group["normalize_gradient"]:
        P = P.scaled(1 / (reading.rms(P.applied(state.tensor("exp_avg"))) + state.group["eps"]))
    return P.scaled(math.sqrt(1 - state.group["betas"][1] ** step) if state.group["correct_bias"] else 1.0)


@reading.reads("pytorch_optimizer.optimizer.psgd.Kron")
def kron(state: reading.ParameterState) -> ParameterMap:
    """M = c ⊗ Q_iᵀQ_i, c ≤ 1 what the last direction was shortened by to a root mean square of 1.1."""
    P = ParameterMap.kronecker(
        state.parameter.shape, [reading.double(Q).mT if Q.ndim == 2 else reading.double(Q) for Q in state.values["Q"]]
    )
    averaged = state.tensor("momentum_buffer") / (1 - state.group["momentum"] ** state.group["step"])
    return P.scaled(min(1.0, 1.1 / (reading.rms(P.applied(averaged)) + 1e-6)))


@reading.reads("pytorch_optimizer.optimizer.sophia.SophiaH")
def sophia(state: reading.ParameterState) -> torch.Tensor:
    """M = 1/max(h, ε, |m|/p): what clipping m/max(h, ε) at ±p did to the averaged gradient m of the last step."""
    h = state.tensor("hessian_moment").clamp(min=state.group["eps"])
    return 1 / torch.maximum(h, state.tensor("momentum").abs() / state.group["p"])


@reading.reads("pytorch_optimizer.optimizer.adahessian.AdaHessian")
def adahessian(state: reading.ParameterState) -> torch.Tensor:
    """M = 1/(v̂^(k/2) + ε), v the average of squared diagonals of H, k ``hessian_power``."""
    v = state.tensor("exp_hessian_diag_sq") / (1 - state.group["betas"][1] ** state.group["step"])
    return 1 / (v.pow(state.group["hessian_power"] / 2) + state.group["eps"])


@reading.reads("pytorch_optimizer.optimizer.muon.muon.Muon")
def muon(state: reading.ParameterState) -> ParameterMap | torch.Tensor:
    """P of Muon as in `torch_optim`; in groups without ``use_muon``, M = 1/(√v̂ + ε)."""
    group = state.group
    if not group["use_muon"]:
        v = state.tensor("exp_avg_sq").sqrt() / math.sqrt(1 - group["betas"][1] ** group["step"])
        return 1 / (v + group["eps"])
    u = state.tensor("momentum_buffer")
    m, n = len(u), u[0].numel()
    adjusted = 0.2 * math.sqrt(max(m, n)) if group["use_adjusted_lr"] else math.sqrt(max(1.0, m / n))
    steps = list(group["ns_coeffs"])
    steps = [steps[min(k, len(steps) - 1)] for k in range(group["ns_steps"])]
    return reading.newton_schulz(u, steps, 1e-7, scale=adjusted)


@reading.reads("schedulefree.adamw_schedulefree.AdamWScheduleFree")
def adamw(state: reading.ParameterState) -> torch.Tensor:
    """M = s/(√v̂ + ε) of the steps of z, which the weights average (Defazio et al. 2024); s: the warm-up's share."""
    group = state.group
    v = state.tensor("exp_avg_sq") / (1 - group["betas"][1] ** group["k"])
    return float(group["scheduled_lr"]) / float(group["lr"]) / (v.sqrt() + group["eps"])

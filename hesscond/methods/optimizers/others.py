"""M of optimizers of the packages pytorch-optimizer (4.1) and schedulefree (1.4); sources: `hesscond.methods`."""

from __future__ import annotations

import math

import torch

from hesscond.errors import ConfigError
from hesscond.hessians import ParameterMap
from hesscond.methods.optimizers import reading


@reading.reads("pytorch_optimizer.optimizer.shampoo.Shampoo")
def shampoo(look: reading.Look) -> ParameterMap:
    """M = ⊗ (ε I + Σ G_i G_iᵀ)^(−1/2k) over the k axes of a parameter, as last computed."""
    axes = range(look.parameter.ndim)
    roots = [reading.power(look.tensor(f"inv_pre_cond_{axis}"), 0.5) for axis in axes]
    return ParameterMap.kronecker(look.parameter.shape, roots)


@reading.reads("pytorch_optimizer.optimizer.soap.SOAP")
def soap(look: reading.Look) -> ParameterMap | None:
    """M = Q diag(√(1 − β₂ᵗ)/(√v + ε)) Qᵀ; where Q was turned after the step, that of the next one."""
    if look.group["merge_dims"]:
        raise ConfigError("SOAP with merge_dims=True reshapes weights, and its M cannot be read: use merge_dims=False")
    step = int(look.group["step"]) - 1
    if step < 1:
        return None
    v = look.tensor("exp_avg_sq")
    bases = tuple(None if len(Q) == 0 else reading.double(Q) for Q in look.state["Q"])
    found = ParameterMap((v.sqrt() + look.group["eps"]).rsqrt(), bases)
    if look.group["normalize_gradient"]:
        found = found.scaled(1 / (reading.rms(found.applied(look.tensor("exp_avg"))) + look.group["eps"]))
    return found.scaled(math.sqrt(1 - look.group["betas"][1] ** step) if look.group["correct_bias"] else 1.0)


@reading.reads("pytorch_optimizer.optimizer.psgd.Kron")
def kron(look: reading.Look) -> ParameterMap:
    """M = c ⊗ Q_iᵀQ_i, c ≤ 1 what the last direction was shortened by to a root mean square of 1.1."""
    found = ParameterMap.kronecker(
        look.parameter.shape, [reading.double(Q).mT if Q.ndim == 2 else reading.double(Q) for Q in look.state["Q"]]
    )
    averaged = look.tensor("momentum_buffer") / (1 - look.group["momentum"] ** look.group["step"])
    return found.scaled(min(1.0, 1.1 / (reading.rms(found.applied(averaged)) + 1e-6)))


@reading.reads("pytorch_optimizer.optimizer.sophia.SophiaH")
def sophia(look: reading.Look) -> torch.Tensor:
    """M = 1/max(h, ε, |m|/p): what clipping m/max(h, ε) at ±p did to the averaged gradient m of the last step."""
    h = look.tensor("hessian_moment").clamp(min=look.group["eps"])
    return 1 / torch.maximum(h, look.tensor("momentum").abs() / look.group["p"])


@reading.reads("pytorch_optimizer.optimizer.adahessian.AdaHessian")
def adahessian(look: reading.Look) -> torch.Tensor:
    """M = 1/(v̂^(k/2) + ε), v the average of squared diagonals of H, k ``hessian_power``."""
    v = look.tensor("exp_hessian_diag_sq") / (1 - look.group["betas"][1] ** look.group["step"])
    return 1 / (v.pow(look.group["hessian_power"] / 2) + look.group["eps"])


@reading.reads("pytorch_optimizer.optimizer.muon.muon.Muon")
def muon(look: reading.Look) -> ParameterMap | torch.Tensor:
    """P of Muon as in `torch_optim`; in groups without ``use_muon``, M = 1/(√v̂ + ε)."""
    group = look.group
    if not group["use_muon"]:
        v = look.tensor("exp_avg_sq").sqrt() / math.sqrt(1 - group["betas"][1] ** group["step"])
        return 1 / (v + group["eps"])
    u = look.tensor("momentum_buffer")
    m, n = len(u), u[0].numel()
    adjusted = 0.2 * math.sqrt(max(m, n)) if group["use_adjusted_lr"] else math.sqrt(max(1.0, m / n))
    steps = list(group["ns_coeffs"])
    steps = [steps[min(k, len(steps) - 1)] for k in range(group["ns_steps"])]
    return reading.newton_schulz(u, steps, 1e-7, scale=adjusted)


@reading.reads("schedulefree.adamw_schedulefree.AdamWScheduleFree")
def adamw(look: reading.Look) -> torch.Tensor:
    """M = s/(√v̂ + ε) of the steps of z, which the weights average (Defazio et al. 2024); s: the warm-up's share."""
    group = look.group
    v = look.tensor("exp_avg_sq") / (1 - group["betas"][1] ** group["k"])
    return float(group["scheduled_lr"]) / float(group["lr"]) / (v.sqrt() + group["eps"])

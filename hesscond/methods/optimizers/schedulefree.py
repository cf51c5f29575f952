"""M of optimizers of the package schedulefree (1.4): Defazio et al., *The Road Less Scheduled* (NeurIPS 2024)."""

from __future__ import annotations

import torch

from hesscond.methods.optimizers.reading import Look, reads


@reads("schedulefree.adamw_schedulefree.AdamWScheduleFree")
def adamw(look: Look) -> torch.Tensor:
    """M = s/(√v̂ + ε) of the steps of z, which the weights average; s: share of the rate that the warm-up allows."""
    group = look.group
    v = look.tensor("exp_avg_sq") / (1 - group["betas"][1] ** group["k"])
    return float(group["scheduled_lr"]) / float(group["lr"]) / (v.sqrt() + group["eps"])

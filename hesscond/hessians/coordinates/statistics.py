"""Preconditioners from statistics of a layer's inputs: centred and scaled features, group by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from hesscond.capture.statistics import stacked
from hesscond.errors import NotFiniteError
from hesscond.hessians.coordinates.base import Preconditioner, Product
from hesscond.hessians.coordinates.linear import DensePreconditioner


@dataclass(frozen=True)
class CentringScaling(Preconditioner):
    r"""P = (1/q) U D with U = [[1, −μᵀ], [0, I]] and D = diag(1, 1/σ): ĤP is Ĥ, centred and scaled.

    Features with σ_j = 0 are left out (their centred column is zero on the samples that gave σ): P then has fewer
    columns than rows. A layer without bias has nothing to centre with: P = D/q.

    Source: Lange, Helfrich and Ye, JMLR 23 (2022), eqs. (13)-(15).

    Attributes
    ----------
    mu, sigma : (n,) float64
    bias
        Whether the layer has one.
    q
        Scalar factor; κ does not depend on it.
    name
        Which statistics these are.

    Raises
    ------
    NotFiniteError
        μ or σ is NaN or infinite.
    """

    mu: torch.Tensor
    sigma: torch.Tensor
    bias: bool = True
    q: float = 1.0
    name: str = "BNP"

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu.sum() + self.sigma.sum()):
            raise NotFiniteError(f"{self.name}: the mean or deviation of a feature is NaN or infinite")

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n + 1) times P, the features centred before they are scaled."""
        return self.multiplied_each(rows[None], [self], 1)[0]

    @classmethod
    def multiplied_each(
        cls, rows: torch.Tensor, systems: Sequence[Self], units: int, root: torch.Tensor | None = None
    ) -> Sequence[torch.Tensor]:
        if units > 1:
            return super().multiplied_each(rows, systems, units, root)
        mu, sigma = (stacked([getattr(P, name) for P in systems]) for name in ("mu", "sigma"))
        # the first column is left alone: minus 0, over 1
        if systems[0].bias:
            mu, sigma = (functional.pad(part, (1, 0), value=first) for part, first in ((mu, 0.0), (sigma, 1.0)))
        live = sigma != 0
        scale = sigma.where(live, 1.0) * sigma.new_tensor([P.q for P in systems])[:, None]
        if systems[0].bias:
            rows = torch.addcmul(rows, rows[..., :1], mu[:, None], value=-1)
        product = rows / scale[:, None]
        if root is not None:
            product = product * root
        kept = live.sum(1).tolist()
        columns = live.nonzero()[:, 1].split(kept)
        return [
            own if own.shape[1] == count else own.gather(1, at.expand(len(own), -1))
            for own, count, at in zip(product, kept, columns, strict=True)
        ]

    @property
    def kappa_D(self) -> float:
        """κ(D) = max(1, σ) / min(1, σ) over the features with σ > 0 (without bias: max σ / min σ)."""
        return scaling_conditions(self.sigma[None], bias=self.bias)[0]


def scaling_conditions(sigmas: torch.Tensor, *, bias: bool) -> list[float]:
    """κ of D = diag(1, 1/σ), or diag(1/σ) without bias, over the features with σ > 0, for every row of σ (k, n)."""
    values = sigmas.cpu().numpy()
    live = values != 0
    least = values.min(1, where=live, initial=1.0 if bias else math.inf)
    most = values.max(1, where=live, initial=1.0 if bias else -math.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        found: list[float] = (most / least).tolist()
    return found


def by_group(
    parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
) -> Preconditioner:
    """P of a layer with one P_g for each of its groups: a `GroupedPreconditioner`, unless there is only one."""
    return parts[0] if len(parts) == 1 else GroupedPreconditioner(parts, units, order, device=device)


class GroupedPreconditioner(Preconditioner):
    """P_g for the units of group g of a grouped convolution.

    Parameters
    ----------
    parts
        P_1 … P_G, padded with columns of zeros to the same width.
    units
        Number of units of the layer, a multiple of G.
    order
        n̂.
    device
        Where the parts are.
    """

    same_for_units = False

    def __init__(
        self, parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
    ) -> None:
        row = torch.zeros(1, order, dtype=torch.float64, device=device)
        widths = [P.right_multiply(row).shape[1] for P in parts]
        # columns of zeros behind those of a P that has fewer
        self.parts = [
            P
            if k == max(widths)
            else Product(P, DensePreconditioner(torch.eye(k, max(widths), device="cpu"), cancels=False))
            for P, k in zip(parts, widths, strict=True)
        ]
        self.units, self.name = units, parts[0].name

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiplied(rows, self.units)

    def of_unit(self, unit: int) -> Preconditioner:
        return self.parts[unit * len(self.parts) // self.units]

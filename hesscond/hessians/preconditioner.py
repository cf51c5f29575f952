"""Changes of variables that statistics of a layer's inputs define: centred and scaled features, group by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from hesscond.errors import NotFiniteError
from hesscond.hessians.coordinates import LinearCoordinates, Preconditioner, UnitPreconditioner


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
        live = self._live
        if not self.bias:
            features = rows if live is None else rows.index_select(1, live)
            return features / ((self.sigma if live is None else self.sigma[live]) * self.q)
        # the first column is left alone: minus 0, over 1
        product = torch.addcmul(rows, rows[:, :1], self._shift, value=-1).div_(self._scale)
        return product if live is None else product.index_select(1, torch.cat([live.new_zeros(1), live + 1]))

    @cached_property
    def _shift(self) -> torch.Tensor:
        """(n + 1,) [0, μ]."""
        return torch.cat([self.mu.new_zeros(1), self.mu])

    @cached_property
    def _scale(self) -> torch.Tensor:
        """(n + 1,) q [1, σ], with 1 where σ = 0."""
        sigma = self.sigma if self._live is None else self.sigma.where(self.sigma != 0, 1.0)
        return torch.cat([sigma.new_ones(1), sigma]) * self.q

    @cached_property
    def _live(self) -> torch.Tensor | None:
        """Indices of the features with σ > 0; None: all of them."""
        live = self.sigma.nonzero()[:, 0]
        return None if len(live) == len(self.sigma) else live

    @property
    def dead(self) -> int:
        """Number of features left out because σ = 0."""
        return 0 if self._live is None else len(self.sigma) - len(self._live)

    @property
    def kappa_D(self) -> float:
        """κ(D) = max(1, σ) / min(1, σ) over the features with σ > 0 (without bias: max σ / min σ)."""
        return scaling_condition(self.sigma, bias=self.bias)


def scaling_condition(sigma: torch.Tensor, *, bias: bool) -> float:
    """κ of D = diag(1, 1/σ) over the features with σ > 0; without bias, of diag(1/σ)."""
    values = sigma.cpu().numpy()
    values = values[values != 0]
    ends = [float(values.min()), float(values.max())] if len(values) else []
    if bias:
        ends.append(1.0)
    return max(ends) / min(ends) if ends else math.nan


def by_group(
    parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
) -> LinearCoordinates:
    """P of a layer with one P_g for each of its groups: a `GroupedPreconditioner`, unless there is only one."""
    return parts[0] if len(parts) == 1 else GroupedPreconditioner(parts, units, order, device=device)


class GroupedPreconditioner(UnitPreconditioner):
    """P_g for the units of group g, which see the inputs of their group only.

    Parameters
    ----------
    parts
        P_1 … P_G. One that leaves out more parameters than another has columns of zeros in their place, at the end.
    units
        Number of units of the layer, a multiple of G.
    order
        n̂.
    device
        Where the parts are.
    """

    def __init__(
        self, parts: Sequence[Preconditioner], units: int, order: int, *, device: torch.device | None = None
    ) -> None:
        row = torch.zeros(1, order, dtype=torch.float64, device=device)
        widths = [P.right_multiply(row).shape[1] for P in parts]
        self.parts = [P if k == max(widths) else Padded(P, max(widths)) for P, k in zip(parts, widths, strict=True)]
        self.units, self.name = units, parts[0].name

    def of_unit(self, unit: int) -> Preconditioner:
        """P_g of its group."""
        return self.parts[unit * len(self.parts) // self.units]


class Padded(Preconditioner):
    """[P, 0] (n̂, k): columns of zeros behind those of P."""

    def __init__(self, P: Preconditioner, columns: int) -> None:
        self.P, self.columns, self.name = P, columns, P.name

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (m, n̂) times [P, 0]."""
        product = self.P.right_multiply(rows)
        return functional.pad(product, (0, self.columns - product.shape[1]))

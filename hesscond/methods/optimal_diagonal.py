"""The diagonal scaling of each layer's inputs with the smallest condition number, certified.

Source of the problem: Boyd, El Ghaoui, Feron and Balakrishnan, *Linear Matrix Inequalities in System and Control
Theory*, SIAM 1994, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hesscond.capture import Geometry, Layer, LayerInputs, RowFactor, row_factor
from hesscond.capture.statistics import triangular
from hesscond.errors import ConfigError
from hesscond.hessians import Scaling
from hesscond.methods.inputs import InputMethod, LayerState
from hesscond.methods.registry import register
from hesscond.methods.whitening import CUTOFF
from hesscond.scaling import optimal_diagonal_scaling

#: Parameters of a unit up to which the scaling is searched for without being asked: some seconds each time.
WIDEST = 300


@dataclass
class OptimalDiagonalState(LayerState):
    """For each of the G groups of a layer, a forgetting triangular factor of the extended inputs, and its scaling.

    Attributes
    ----------
    R : (G, n̂, n̂) float64
        RᵀR = Σ ρ^age ĥ ĥᵀ over all rows seen; by QR of the rows, never from the squared matrix.
    mass : () float64
        Σ ρ^age: RᵀR / mass is the matrix C of second moments.
    d : (G, n̂) float64
        The scaling, as of the last search.
    gap : (G,) float64
        κ reached over the certified lower bound for all diagonals, of that search.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, order = self.geometry.groups, self.geometry.n_params
        like = torch.zeros((), dtype=torch.float64, device=self.module.weight.device)
        self.R, self.mass = like.new_zeros(groups, order, order), like
        self.d, self.gap = like.new_ones(groups, order), like.new_ones(groups)

    def take(self, rho: float) -> None:
        """Multiply the weights of all earlier rows by ρ, and add the rows of this step."""
        rows = self.rows()
        H = rows.view(len(rows), self.geometry.groups, -1).transpose(0, 1).to(self.R.dtype)
        if self.geometry.bias:
            H = torch.cat([H.new_ones(*H.shape[:2], 1), H], 2)
        self.R.copy_(triangular(torch.cat([self.R * rho**0.5, H], 1)))
        self.mass.mul_(rho).add_(len(rows))

    def search(self, epsilon: float, rtol: float) -> None:
        """The optimal scaling of C̃ = C + ε (tr C / n̂) I, with tr DC̃D = n̂."""
        for group, R in enumerate(self.R):
            F = R / self.mass.sqrt()
            mean = F.square().sum() / len(F)
            if not mean > 0:
                continue  # nothing but zeros so far: every scaling is as good
            damped = torch.cat([F, torch.eye(len(F), dtype=F.dtype, device=F.device) * (epsilon * mean).sqrt()])
            # the damped factor has 2n̂ rows: those of an equally good triangular one are half as many
            best = optimal_diagonal_scaling(triangular(damped[None])[0], side="column", rtol=rtol)
            d = torch.from_numpy(best.column).to(F.device)
            size = (damped * d).square().sum()
            self.d[group], self.gap[group] = d * (len(d) / size).sqrt(), best.gap

    def precondition(self) -> None:
        """G ← G P Pᵀ, in place."""
        G_w, bias = self.module.weight.grad, self.module.bias
        assert G_w is not None
        groups = self.geometry.groups
        squares = (self.d.square() / self.q_squared).to(G_w.dtype)
        if bias is not None and bias.grad is not None:
            bias.grad.view(groups, -1).mul_(squares[:, :1])
        G_w.view(groups, -1, self.geometry.fan_in).mul_(squares[:, None, int(self.geometry.bias) :])


@register
class OptimalDiagonal(InputMethod[OptimalDiagonalState]):
    """The best diagonal: G ← G P Pᵀ, P = D/q with the D of smallest κ(DC̃D), C̃ the second moments of a layer's inputs.

    C = ĤᵀĤ/N for the extended inputs Ĥ = [e, H], so that κ(DCD) = κ(ĤD)²: what any method that only rescales features
    (equilibration, standardization without the mean, the scaling half of BNP) could reach at best. The search is
    Newton's on the central path, and its result is certified: see `hesscond.optimal_diagonal_scaling`. It costs n̂³ a
    Newton step, some 30 to 200 of them.

    In the coordinates of the data themselves, ``probe(method="optimal-diagonal")``, there is no damping. For a rank
    deficient Ĥ the smallest nonzero singular value counts; then the infimum need not be attained, and some entries of
    D are tiny, which switches redundant features off. Dead features (columns of zeros) do not change κ: their entry of
    D is the largest of the others. Such entries must not decide a step, and therefore training is damped.

    Parameters
    ----------
    model
        Holds at least one `torch.nn.Linear` or convolution; of a convolution the inputs are the entries of its
        patches. Each group of a grouped convolution has its own D.
    rho
        Factor by which the weight of earlier rows is multiplied at each step.
    epsilon
        Damping, relative to the mean of the second moments.
    update_every
        Steps after which D is searched for again; the first time after a tenth of them.
    rtol
        How near to the optimum κ(ĤD) must come, relatively.
    widest
        A layer with more parameters a unit is refused: a search takes a quarter of a second at 100, ten seconds at 300.
    layers
        The layers to precondition; None: all.

    Raises
    ------
    ConfigError
        The model has no such layer; one is too wide; a transposed convolution; an option out of its range.

    Notes
    -----
    One step on a layer with G_w (m, n), G_b (m,) and rows H (N, n)::

        1  R ← R of a QR decomposition of [√ρ R; Ĥ],   mass ← ρ mass + N    (from R = 0, mass = 0)
        2  C̃ = RᵀR/mass + ε (tr C / n̂) I,   q² as for BNP
        3  D minimizes κ(DC̃D), with tr DC̃D = n̂ as it is for normalized inputs
        4  G_w ← G_w diag(d₁²…d_n²) / q²,   G_b ← G_b d₀² / q²

    The log's ``kappa_D_running_eps`` is max d / min d; `certified_gap` is how far from the optimum the search ended.
    """

    name = "optimal-diagonal"
    summary = "the diagonal scaling of every layer's inputs with the smallest κ, certified"
    source = "Boyd et al., LMIs in System and Control Theory, SIAM 1994, sec. 3.1 (the problem)"
    rate = 0.03
    kept = ("R", "mass", "d", "gap")

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float = 0.99,
        epsilon: float = 1e-2,
        update_every: int = 100,
        rtol: float = 1e-2,
        widest: int = WIDEST,
        layers: tuple[str, ...] | None = None,
    ) -> None:
        if not (0 <= rho < 1 and epsilon > 0 and update_every >= 1 and 1e-12 <= rtol < 1 and widest >= 1):
            raise ConfigError(
                "optimal-diagonal needs 0 ≤ rho < 1, epsilon > 0, update_every ≥ 1, 1e-12 ≤ rtol < 1 and widest ≥ 1, "
                f"not {rho}, {epsilon}, {update_every}, {rtol} and {widest}"
            )
        self.rho, self.epsilon, self.update_every, self.rtol, self.widest = rho, epsilon, update_every, rtol, widest
        super().__init__(model, layers)
        for name, state in self.layers.items():
            refuse_wide(name, state.geometry.n_params, widest)

    def state_of(self, layer: Layer) -> OptimalDiagonalState:
        """State without any inputs: D = I."""
        return OptimalDiagonalState(layer)

    def update(self, states: list[OptimalDiagonalState]) -> None:
        """Apply steps 1 to 3 of the algorithm."""
        due = self.steps % self.update_every == 0 or self.steps == self.update_every // 10
        for state in states:
            state.take(self.rho)
            if due:
                state.search(self.epsilon, self.rtol)

    def of_groups(self, state: OptimalDiagonalState) -> list[Scaling]:
        """P = D/q with the D that the last step used."""
        d = state.d / state.q_squared**0.5
        return [Scaling(own, "optimal diagonal, running second moments") for own in d]

    def certified_gap(self, layer: str) -> float | None:
        """How far κ(ĤD) was from the optimum at most when D was found: κ over a lower bound, the largest of the groups.

        None: the layer is not preconditioned.

        Raises
        ------
        ConfigError
            No such layer.
        """
        state = self.find(layer)
        return None if state is None else float(state.gap.max())

    def diagnostics(self, layer: str) -> dict[str, float]:
        """κ(D), the largest of the groups."""
        state = self.find(layer)
        return {} if state is None else {"kappa_D_running_eps": float((state.d.amax(1) / state.d.amin(1)).max())}

    @classmethod
    def collect(cls, layer: str, inputs: LayerInputs, *, widest: int = WIDEST, **options: Any) -> RowFactor:
        """The triangular factor of the centred rows, with the means.

        Raises
        ------
        ConfigError
            The layer is too wide.
        """
        refuse_wide(layer, inputs.geometry.n_params, widest)
        return row_factor(inputs)

    @classmethod
    def of_data(cls, statistics: RowFactor, geometry: Geometry) -> list[Scaling]:
        """P = D of the raw second moments."""
        factors = extended_factors(statistics, bias=geometry.bias)
        return [Scaling(optimum(F), "optimal diagonal, raw second moments of the data") for F in factors]


def refuse_wide(layer: str, order: int, widest: int) -> None:
    """Raise a ConfigError for a layer whose scaling would take too long."""
    if order > widest:
        raise ConfigError(
            f"optimal-diagonal: layer {layer!r} has {order} parameters a unit, more than widest={widest}, and each "
            "search takes time of order n³: name narrower layers (option or argument layers), or set the option widest"
        )


def extended_factors(statistics: RowFactor, *, bias: bool) -> torch.Tensor:
    """(G, r + 1, n̂) F with FᵀF = ĤᵀĤ/N: the centred factor, bordered by the means."""
    features, R = statistics.features, statistics.R
    mu, dead = features.mu.view(len(R), 1, -1), features.dead.view(len(R), 1, -1)
    # of a feature that is constant the centred column is rounding
    F = torch.cat([mu, R.masked_fill(dead, 0.0) / features.count**0.5], 1)
    if not bias:
        return F
    e = torch.zeros_like(F[:, :, :1])
    e[:, 0] = 1.0
    return torch.cat([e, F], 2)


def optimum(F: torch.Tensor) -> torch.Tensor:
    """The d (n̂,) with the smallest κ⁺(FD), with columns of FD that have norm 1 on average; ones if F = 0.

    F was rounded: directions in which its columns, normalized, have no more than that are taken out first.
    """
    norms = F.norm(dim=0)
    live = norms > 0
    if not live.any():
        return torch.ones_like(norms)
    _, lengths, Vt = torch.linalg.svd(F[:, live] / norms[live], full_matrices=False)
    kept = lengths > CUTOFF * lengths[0]
    exact = lengths[kept, None] * Vt[kept] * norms[live]
    found = torch.from_numpy(optimal_diagonal_scaling(exact, side="column").column).to(norms)
    found *= (len(found) / (exact * found).square().sum()).sqrt()
    d = found.max() * torch.ones_like(norms)
    d[live] = found
    return d

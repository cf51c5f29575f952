"""Full whitening of each layer's inputs: the best that any linear change of variables of the inputs can reach."""

from __future__ import annotations

from typing import Any

import torch

from hesscond import capture, hessians
from hesscond.hessians.coordinates.base import Product
from hesscond.methods.base import option, register
from hesscond.methods.inputs import InputMethod, LayerState

#: Directions of the scaled features shorter than this, relative to the longest, are left out: to working precision the
#: features are collinear along them. What is kept is orthonormal up to about eps / CUTOFF.
CUTOFF = 1e-8


class WhiteningState(LayerState):
    """Running mean mu (G, n) and covariance C (G, n, n) of the inputs of a layer, for each of its G groups.

    Without bias the mean is zero, and C the second moments. W = ``root`` has W Wᵀ = C̃⁻¹ = ``inverse``, both (G, n, n).
    """

    def __init__(self, module: capture.Layer) -> None:
        super().__init__(module)
        groups, width = self.geometry.groups, self.geometry.fan_in
        weight = self.module.weight.detach()
        self.mu = weight.new_zeros(groups, width)
        self.C = torch.eye(width, dtype=weight.dtype, device=weight.device).repeat(groups, 1, 1)

    def take(self, weight: float) -> None:
        """Move mean and covariance towards those of the inputs seen, which get ``weight``."""
        rows = self.rows()
        H = rows.view(len(rows), *self.mu.shape).transpose(0, 1).to(self.mu.dtype)
        if self.geometry.bias:
            mean = H.mean(1)
            H = H - (self.mu if len(rows) == 1 else mean)[:, None]
            self.mu.lerp_(mean, weight)
        self.C.lerp_(H.mT @ H / len(rows), weight)

    def decompose(self, epsilon: float) -> None:
        """C̃⁻¹ for C̃ = C + ε (tr C / n) I, by Cholesky decomposition in float64."""
        C = self.C.to(torch.float64)
        mean = C.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(self.C.dtype).eps)
        eye = torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
        L, info = torch.linalg.cholesky_ex(C + (epsilon * mean)[:, None, None] * eye)
        if info.any():
            return  # the statistics have diverged, which the loss shows
        # any W with W Wᵀ = C̃⁻¹ gives the same step and the same κ: a triangular one is the cheapest
        self.root = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False).mT.contiguous()
        self.inverse = (self.root @ self.root.mT).to(self.C.dtype)

    def precondition(self) -> None:
        G_w, bias = self.module.weight.grad, self.module.bias
        assert G_w is not None
        G_b = None if bias is None else bias.grad
        groups, width = self.mu.shape
        rows = G_w.flatten(1).view(groups, -1, width)
        if G_b is None:
            G_w.copy_((rows @ self.inverse).div_(self.q_squared).view_as(G_w))
            return
        b = G_b.view(groups, -1, 1)
        rows = torch.baddbmm(rows, b, self.mu[:, None], alpha=-1) @ self.inverse
        rows.div_(self.q_squared)
        G_w.copy_(rows.view_as(G_w))
        b.baddbmm_(rows, self.mu[:, :, None], beta=1 / self.q_squared, alpha=-1)


@register
class Whitening(InputMethod[WhiteningState]):
    """Whitened inputs: G ← G P Pᵀ for every layer, P = (1/q) U diag(1, C̃^{-½}) with the covariance C of its inputs.

    What BNP is with the variances alone, this is with the whole covariance. In the coordinates of the data themselves,
    ``probe(method="whitening")``, the columns of ĤP are orthogonal and of length √N, so that
    κ(PᵀHP) ≤ κ(S) where S > 0. It costs n³ for a layer with n inputs; of a convolution these are the entries of its
    patches. Each group of a grouped convolution has its own P.

    Notes
    -----
    One step on a layer with G_w (m, n), G_b (m,) and rows H (N, n)::

        1  μ_B = Hᵀe/N,  C_B = (H − e μ_Bᵀ)ᵀ(H − e μ_Bᵀ)/N             (one row: (h − μ)(h − μ)ᵀ)
        2  μ ← ρ μ + (1 − ρ) μ_B,   C ← ρ C + (1 − ρ) C_B               (from μ = 0, C = I)
        3  C̃ = C + ε (tr C / n) I,   q² as for BNP
        4  G_w ← (G_w − G_b μᵀ) C̃⁻¹ / q²
        5  G_b ← G_b / q² − G_w μ                                       (with the new G_w)

    Without bias C_B = HᵀH/N and G_w ← G_w C̃⁻¹/q².
    """

    name = "whitening"
    summary = "full whitening of every layer's inputs, the input factor of K-FAC"
    source = "Desjardins et al., NIPS 2015; Martens, Grosse, ICML 2015 (input factor)"
    state_class = WhiteningState
    kept = ("mu", "C", "root", "inverse")

    rho: float = option(0.99, "Decay of the running mean and covariance.", least=0, below=1)
    epsilon: float = option(1e-2, "Damping, relative to the mean variance.", above=0)
    update_every: int = option(20, "Steps after which C̃ is decomposed again; the mean is that of every step.", least=1)

    def state_of(self, layer: capture.Layer) -> WhiteningState:
        state = super().state_of(layer)
        state.decompose(self.epsilon)
        return state

    def update(self, states: list[WhiteningState]) -> None:
        for state in states:
            state.take(1 - self.rho)
            if self.steps % self.update_every == 0:
                state.decompose(self.epsilon)

    def of_groups(self, state: WhiteningState) -> list[hessians.Preconditioner]:
        """P with the mean and the decomposition that the last step used."""
        bias, q, name = state.geometry.bias, state.q_squared**0.5, "whitening, running covariance"
        return [
            composed(hessians.CentringScaling(mu, torch.ones_like(mu), bias, q, name), W)
            for mu, W in zip(state.mu.to(torch.float64), state.root, strict=True)
        ]

    @classmethod
    def data_statistics(cls, layer: str, inputs: capture.LayerInputs, **options: Any) -> capture.RowFactor:
        """The triangular factor of the centred rows."""
        return capture.row_factor(inputs)

    @classmethod
    def of_data(cls, statistics: capture.RowFactor, geometry: capture.Geometry) -> list[hessians.Preconditioner]:
        r"""P = U C^{-½} from the centred rows, such that (ĤP)ᵀ(ĤP) = N·I.

        U = [[1, −μᵀ], [0, I]] centres, C^{-½} = diag(1, D⁻¹ V Σ⁻¹ √N) with D the standard deviations of the features
        and R D⁻¹ = Q Σ Vᵀ: a singular value decomposition, not one of the squared matrix. Without bias there is nothing
        to centre with: then N C = Σ_j h_j h_jᵀ and D are root mean squares. Dead features, and directions with
        Σ_ii ≤ CUTOFF · Σ_11, are left out.
        """
        parts: list[hessians.Preconditioner] = []
        features = statistics.features
        split = (part.view(geometry.groups, -1) for part in (features.mu, features.sigma, features.dead))
        for R, mu, sigma, dead in zip(statistics.R, *split, strict=True):
            scale = sigma
            if not geometry.bias:
                R = torch.cat([R, mu[None] * features.count**0.5])
                scale = (sigma.square() + mu.square()).sqrt().masked_fill(dead & (mu == 0), 0.0)
            live = scale != 0
            _, lengths, Vt = torch.linalg.svd(R[:, live] / scale[live], full_matrices=False)
            kept = lengths > CUTOFF * lengths.amax() if len(lengths) else lengths > 0
            W = Vt[kept].T * (features.count**0.5 / lengths[kept])
            name = "whitening, raw covariance of the data"
            parts.append(composed(hessians.CentringScaling(mu, scale, geometry.bias, name=name), W))
        return parts


def composed(first: hessians.CentringScaling, W: torch.Tensor) -> hessians.Preconditioner:
    """The P of ``first``, then diag(1, W), or W of a layer without bias; it has the name of ``first``."""
    P = Product(first, hessians.DensePreconditioner(torch.block_diag(W.new_ones(1, 1), W) if first.bias else W))
    P.name = first.name
    return P

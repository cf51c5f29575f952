"""Shampoo, SOAP, K-FAC and Muon: which matrices their steps multiply gradients with, and what that does to κ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import hessian, jacrev, vmap

from hesscond.spectra import ConditionNumber, condition_number
from hesscond.theorems import base, networks

#: Eigenvalues of a Gram matrix below this share of the largest are zeros.
RANGE = 1e-10
#: Relative round-off of a distance between matrices.
ROUNDED = 1e-13


def power(S: np.ndarray, exponent: float) -> np.ndarray:
    """S^exponent of a positive semidefinite matrix on its range, zero on its null space."""
    values, V = np.linalg.eigh(S)
    kept = values > RANGE * values[-1]
    found: np.ndarray = V[:, kept] * values[kept] ** exponent @ V[:, kept].T
    return found


def spread(S: np.ndarray) -> float:
    """λ_max/λ_min of a positive definite matrix."""
    values = np.linalg.eigvalsh(S)
    return float(values[-1] / max(values[0], np.finfo(float).tiny))


def polar(G: np.ndarray) -> np.ndarray:
    """UVᵀ of the reduced singular value decomposition G = UΣVᵀ."""
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    found: np.ndarray = U @ Vt
    return found


def interval(found: ConditionNumber) -> tuple[float, float]:
    """Bounds of κ; NaN if it is unresolved."""
    return (found.lower, found.upper) if found.resolved else (np.nan, np.nan)


def random_gradients(rng: np.random.Generator, *, samples: int | None = None) -> np.ndarray:
    """Gradients (N, m, n) of a weight: of any rank, of rank one as a dense layer has them, integers, single entries."""
    m, n = (int(size) for size in rng.integers(2, 9, 2))
    N = int(rng.integers(1, 20)) if samples is None else samples * max(m, n)
    scales = 10.0 ** rng.uniform(-0.7, 0.7, (m, 1)), 10.0 ** rng.uniform(-0.7, 0.7, (1, n))
    G = scales[0] * rng.standard_normal((N, m, n)) * scales[1]
    kind = rng.integers(4) if samples is None else rng.integers(2)
    if kind == 1:
        G = scales[0] * rng.standard_normal((N, m, 1)) @ (rng.standard_normal((N, 1, n)) * scales[1])
    if kind == 2:
        G = rng.integers(-2, 3, (N, m, n)).astype(float)
        G[0, 0, 0] += 3
    if kind == 3:
        G = G * (rng.random((N, m, n)) < 2 / (m * n))
        G[0, 0, 0] += 1
    return G


def covariance(G: np.ndarray) -> np.ndarray:
    """H = E[vec G vec Gᵀ], rows of G one after another."""
    flat = G.reshape(len(G), -1)
    return flat.T @ flat / len(G)


def kronecker_factors(G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[GGᵀ] and E[GᵀG]."""
    return np.einsum("kia,kja->ij", G, G) / len(G), np.einsum("kia,kib->ab", G, G) / len(G)


def rearranged(H: np.ndarray, m: int, n: int) -> np.ndarray:
    """The matrix (m², n²) for which A ⊗ B is vec A vec Bᵀ."""
    return H.reshape(m, n, m, n).transpose(0, 2, 1, 3).reshape(m * m, n * n)


def farther(own: float, other: float, size: float) -> base.Outcome:
    """Whether one distance is at most another; round-off is relative to the size of what lies apart."""
    error = ROUNDED * size
    if other <= 1e3 * error:
        return base.not_applicable("both sides are exact")
    return base.decided((own - error) / (other + error), (own + error) / (other - error))


@base.register
class ShampooPowerStep(base.Statement):
    """The square of Shampoo's approximation is one power step towards the nearest Kronecker product."""

    id = "shampoo-power-step"
    title = "Shampoo squared is one power step towards the nearest Kronecker product"
    source = "Morwani et al., ICLR 2025"
    text = (
        "H = E[vec G vec Gᵀ], rearranged so that A ⊗ B becomes vec A vec Bᵀ, is a matrix whose top singular vectors "
        "are the nearest Kronecker product in Frobenius norm (Van Loan, Pitsianis). One step of the power iteration "
        "for both, from identities, gives L = E[GGᵀ] and R = E[GᵀG]: L ⊗ R is the square of L^½ ⊗ R^½, which Shampoo "
        "takes for H (its step divides by the root of that, L^¼ ⊗ R^¼). True: row (i, j) of the rearranged H times "
        "vec I is E[Σ_a G_ia G_ja]. The abstract was at hand; it reports that the step is close to the nearest product "
        "for networks, with no bound: that is not checked."
    )
    hypotheses = ("L and R are over the gradients that H is over",)
    claims = (base.Claim("power step", "L = ℛ(H) vec I, R = ℛ(H)ᵀ vec I", True),)
    trials = 200
    elsewhere = "speaks of gradients of single batches"

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        G = random_gradients(rng)
        H, (L, R) = covariance(G), kronecker_factors(G)
        m, n = G.shape[1:]
        M = rearranged(H, m, n)
        step = np.concatenate([M @ np.eye(n).ravel(), M.T @ np.eye(m).ravel()])
        return [base.equal(np.concatenate([L.ravel(), R.ravel()]), step)]


@base.register
class SoapAdafactor(base.Statement):
    """Shampoo with the power ½ is Adafactor in the eigenbasis of its factors."""

    id = "soap-adafactor"
    title = "Shampoo is Adafactor in its own eigenbasis"
    source = "Vyas et al., ICLR 2025, Claim 1"
    text = (
        "L^−½ G R^−½ √tr L, with L = E[GGᵀ] and R = E[GᵀG] over the data, is Q_L (G'/√V̂) Q_Rᵀ: Q_L, Q_R the "
        "eigenvectors of L and R, G' = Q_LᵀGQ_R, V̂ = ACᵀ/ΣA with A and C the sums of E[G'∘G'] along rows and "
        "columns. True with ε = 0, for A are the eigenvalues of L and C those of R; for running averages, or where L "
        "and R are older than A and C, it is not claimed. SOAP itself has V = E[G'∘G'] in place of V̂, and so another "
        "step."
    )
    hypotheses = ("L and R are positive definite", "ε = 0")
    claims = (base.Claim("Claim 1", "L^−½ G R^−½ √tr L = Q_L (G'/√V̂) Q_Rᵀ", True),)
    trials = 200
    elsewhere = "speaks of gradients of single batches"

    def shampoo(self, G: np.ndarray, L: np.ndarray, R: np.ndarray) -> np.ndarray:
        """L^−½ G R^−½ √tr L."""
        found: np.ndarray = power(L, -0.5) @ G @ power(R, -0.5) * np.trace(L) ** 0.5
        return found

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """The step of one gradient more than the expectations are over."""
        G = random_gradients(rng, samples=int(rng.integers(2, 5)))
        g, (L, R) = rng.standard_normal(G.shape[1:]), kronecker_factors(G)
        allowed = base.ALLOWED * (spread(L) + spread(R))
        return [base.equal(self.adafactor(G, g, L, R), self.shampoo(g, L, R), allowed=allowed)]

    def adafactor(self, G: np.ndarray, g: np.ndarray, L: np.ndarray, R: np.ndarray) -> np.ndarray:
        """Q_L (g'/√V̂) Q_Rᵀ for one more gradient g."""
        Q_L, Q_R = (np.linalg.eigh(factor)[1] for factor in (L, R))
        moments = ((Q_L.T @ G @ Q_R) ** 2).mean(0)
        A, C = moments.sum(1), moments.sum(0)
        found: np.ndarray = Q_L @ (Q_L.T @ g @ Q_R / (np.multiply.outer(A, C) / A.sum()) ** 0.5) @ Q_R.T
        return found


@base.register
class KfacLinear(base.Statement):
    """K-FAC is the Gauss–Newton matrix of a layer of a deep linear network with the square loss."""

    id = "kfac-linear"
    title = "K-FAC is exact for deep linear networks"
    source = "Dangel et al., 2025, after Bernacchia, Lengyel, Hennequin, NeurIPS 2018"
    text = (
        "The block of a layer's weights in the Gauss–Newton matrix is E[JᵀCJ ⊗ ĥĥᵀ], J the output's derivatives in "
        "the pre-activations of a sample, C the Hessian of its loss in the output. K-FAC is E[JᵀCJ] ⊗ E[ĥĥᵀ]. Both "
        "are equal if one of the factors is the same for all samples: for a single sample, and for deep linear "
        "networks with the square loss, where J is a product of weights and C = I. True. A summary of the first and "
        "the abstract of the second were at hand."
    )
    hypotheses = ("no weight is used twice",)
    claims = (
        base.Claim("deep linear", "E[JᵀCJ ⊗ ĥĥᵀ] = E[JᵀCJ] ⊗ E[ĥĥᵀ], square loss", True),
        base.Claim("one sample", "the same for one sample, any activation, any loss", True),
    )
    trials = 60
    elsewhere = "speaks of linear networks"

    def product(self, curvatures: Tensor, features: Tensor) -> Tensor:
        """K-FAC: E[curvature] ⊗ E[ĥĥᵀ]."""
        return torch.kron(curvatures.mean(0), features.T @ features / len(features))

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """One layer of each of some networks with two to four layers."""
        sizes = rng.integers(1, 5, int(rng.integers(3, 6))).tolist()
        drawn, layer = networks.random_network(rng, sizes, int(rng.integers(2, 12))), int(rng.integers(len(sizes) - 1))
        targets = torch.from_numpy(rng.standard_normal(drawn.targets.shape))
        linear = replace(drawn, targets=targets, activation=networks.LINEAR, criterion="squared error")
        one = replace(drawn, inputs=drawn.inputs[:1], targets=drawn.targets[:1])
        return [self.gauss_newton(linear, layer), self.gauss_newton(one, layer)]

    def gauss_newton(self, network: networks.Network, layer: int) -> base.Outcome:
        """The block from derivatives of the output in the weights, against K-FAC."""
        own, criterion = network.weights[layer], networks.CRITERIA[network.criterion]

        def output(weight: Tensor) -> Tensor:
            weights = (*network.weights[:layer], weight, *network.weights[layer + 1 :])
            return replace(network, weights=weights).output()

        J = jacrev(output)(own).flatten(2)
        C = vmap(hessian(criterion))(network.output(), network.targets)
        block = torch.einsum("kop,koq,kqr->pr", J, C, J) / len(J)
        features = network.features(layer)
        inner = vmap(jacrev(lambda a: network.from_preactivation(layer, a)))(features @ own.T)
        found = self.product(torch.einsum("koi,koq,kqj->kij", inner, C, inner), features)
        return base.equal(found.numpy(), block.numpy())


def random_weights_gradients(rng: np.random.Generator) -> list[np.ndarray]:
    """One to three matrices of full rank, or of less."""
    found = []
    for _ in range(int(rng.integers(1, 4))):
        m, n = (int(size) for size in rng.integers(1, 9, 2))
        G = 10.0 ** rng.uniform(-1, 1) * rng.standard_normal((m, n))
        rank = int(rng.integers(1, min(m, n) + 1)) if rng.random() < 0.5 else min(m, n)
        if rank < min(m, n):
            G = rng.integers(-3, 4, (m, rank)) @ rng.integers(-3, 4, (rank, n)).astype(float)
            G[0] += not G.any()
        found.append(G)
    return found


@base.register
class MuonSpectralDescent(base.LayerStatement):
    """Muon's step is steepest descent under the spectral norm."""

    id = "muon-spectral-descent"
    title = "the orthogonalized gradient is steepest descent under the spectral norm"
    source = "Bernstein, Newhouse, 2024, Propositions 4 to 6, eqs. (15), (16)"
    text = (
        "Σ⟨G_l, Δ_l⟩ + ½λ max‖Δ_l‖₂² over steps Δ_l of all weights has the minimum at Δ_l = −η U_lV_lᵀ, η = Σ tr "
        "Σ_l/λ, where G_l = U_lΣ_lV_lᵀ. True: ⟨G, Δ⟩ ≥ −tr Σ ‖Δ‖₂ bounds it by −(Σ tr Σ_l)²/2λ from below, which is "
        "attained. It is unique if G_l has full rank: tr Σ − ⟨G, T⟩ ≥ ½σ_min ‖T − UVᵀ‖² for ‖T‖₂ ≤ 1 (our own bound); "
        "and only then, unless all gradients are zero, where Δ = 0 is. (The rows of a softmax layer's gradient add up "
        "to zero.) UVᵀ is the semi-orthogonal matrix nearest to G, and the step of Shampoo with nothing but the last "
        "gradient, (GGᵀ)^−¼G(GᵀG)^−¼ (U and V with the columns of nonzero singular values only). For a linear "
        "predictor with the square loss, inputs of length √d_in, the sharpness is d_in/d_out: a bound of the loss "
        "after any step. True."
    )
    hypotheses = ("not all gradients are zero", "G has full rank (second and fifth claim)", "G has not (third claim)")
    claims = (
        base.Claim("Proposition 5", "min of Σ⟨G_l, Δ_l⟩ + ½λ max‖Δ_l‖₂² at Δ_l = −η U_lV_lᵀ", True),
        base.Claim("unique", "½σ_min ‖T − UVᵀ‖² ≤ tr Σ − ⟨G, T⟩ for ‖T‖₂ ≤ 1", True),
        base.Claim("only then", "another minimum if G has not full rank", True),
        base.Claim("Shampoo", "(GGᵀ)^−¼ G (GᵀG)^−¼ = UVᵀ", True),
        base.Claim("Proposition 4", "‖UVᵀ − G‖ ≤ ‖A − G‖ for semi-orthogonal A", True),
        base.Claim("Proposition 6", "L(W + Δ) ≤ L(W) + ⟨∇L, Δ⟩ + ½ d_in/d_out ‖Δ‖₂²", True),
    )
    trials = 200
    inputs = False

    def direction(self, G: np.ndarray) -> np.ndarray:
        """UVᵀ."""
        return polar(G)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Random gradients of some weights, and random other steps."""
        gradients = random_weights_gradients(rng)
        found = self.check(rng, gradients[0])
        return [self.minimum(gradients, 10.0 ** rng.uniform(-2, 2)), *found, self.square_loss(rng)]

    def observe(self, seen: base.Observation) -> Sequence[base.Outcome]:
        """The gradient of the layer's weight, and random other steps."""
        network = seen.network
        assert network is not None
        if network.weight is None:
            return [base.not_applicable("the layer's weight is computed from other parameters")] * len(self.claims)
        weight = network.weight
        gradient = network.reweighted(weight).gradient[: weight.numel()].view_as(weight).flatten(1)
        G = gradient.double().cpu().numpy()
        if not G.any():
            return [base.not_applicable("the gradient is zero")] * len(self.claims)
        found = self.check(np.random.default_rng(0), G)
        nothing = base.not_applicable("no linear predictor with the square loss")
        return [self.minimum([G], 1.0), *found, nothing]

    def minimum(self, gradients: Sequence[np.ndarray], sharpness: float) -> base.Outcome:
        """The value at the step against the bound from below."""
        total = sum(float(np.linalg.norm(G, "nuc")) for G in gradients)
        steps = [-total / sharpness * self.direction(G) for G in gradients]
        slope = sum(float(np.vdot(G, step)) for G, step in zip(gradients, steps, strict=True))
        value = slope + sharpness / 2 * max(float(np.linalg.norm(step, 2)) for step in steps) ** 2
        return base.equal(np.array(value), np.array(-(total**2) / (2 * sharpness)), total**2 / sharpness)

    def check(self, rng: np.random.Generator, G: np.ndarray) -> list[base.Outcome]:
        """Outcomes for one gradient: unique, only then, Shampoo, Proposition 4."""
        U, sigma, Vt = np.linalg.svd(G, full_matrices=False)
        kept = sigma > RANGE * sigma[0]
        total, step = float(sigma.sum()), self.direction(G)
        away = polar(G) + 10.0 ** rng.uniform(-2, 2) * rng.standard_normal(G.shape)
        T = away / np.linalg.norm(away, 2)
        if kept.all():
            error = ROUNDED * total * len(sigma)
            gap, needed = total - float(np.vdot(G, T)), float(sigma[-1] * np.linalg.norm(T - step) ** 2 / 2)
            unique = base.decided(needed / (gap + error), needed / max(gap - error, 1e-300))
            other = base.not_applicable("G has full rank")
        else:
            unique = base.not_applicable("G has not full rank")
            # the sign of a direction that G does not see
            turned = step - 2 * np.multiply.outer(U[:, -1], Vt[-1])
            value = float(np.vdot(G, turned)) / max(1.0, float(np.linalg.norm(turned, 2)))
            other = base.equal(np.array(value), np.array(total), total * len(sigma))
        shampoo = power(G @ G.T, -0.25) @ G @ power(G.T @ G, -0.25)
        allowed = base.ALLOWED * float(sigma[0] / sigma[kept][-1]) ** 2
        apart = [float(np.linalg.norm(A - G)) for A in (step, polar(away))]
        return [
            unique,
            other,
            base.equal(shampoo, U[:, kept] @ Vt[kept] if not kept.all() else step, allowed=allowed),
            farther(apart[0], apart[1], float(np.linalg.norm(G)) + len(sigma) ** 0.5),
        ]

    def square_loss(self, rng: np.random.Generator) -> base.Outcome:
        """The change of the loss that is left over: ½ mean ‖Δx‖²/d_out."""
        N, m, n = (int(size) for size in rng.integers(1, 9, 3))
        x = rng.standard_normal((N, n))
        x *= n**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
        W, step, y = rng.standard_normal((m, n)), rng.standard_normal((m, n)), rng.standard_normal((N, m))

        def loss(A: np.ndarray) -> float:
            return float(((y - x @ A.T) ** 2).sum() / (2 * N * m))

        slope = float(np.vdot((x @ W.T - y).T @ x / (N * m), step))
        change, bound = loss(W + step) - loss(W) - slope, n / m * float(np.linalg.norm(step, 2)) ** 2 / 2
        error = ROUNDED * (loss(W + step) + loss(W) + abs(slope) + bound) * N * n
        return base.decided((change - error) / bound, (change + error) / bound)


@base.register
class MuonRowBlocks(base.Statement):
    """Muon's step is that of a preconditioner with one block for each row of the weight."""

    id = "muon-row-blocks"
    title = "Muon preconditions by rows"
    source = "Zhang, On the Principles Behind Neural Network Optimizers, 2026, eqs. (3.12), (3.13)"
    text = (
        "M(MᵀM)^−½ is P vec M with P = I ⊗ (MᵀM)^−½: a preconditioner with the same block for each row of W, as is "
        "the Hessian of a dense layer with the square loss, I ⊗ Σ. True for M of full column rank. What the rows do to "
        "κ, our own: for a dense layer with the square loss, at W = W* + E and with the gradient M = EΣ, κ(P^½HP^½) ≤ "
        "κ(E), whatever κ(H) is. For a² ≤ EᵀE ≤ b² gives a²Σ² ≤ MᵀM ≤ b²Σ², and since the root of matrices is monotone "
        "aΣ ≤ (MᵀM)^½ ≤ bΣ; an isotropic error makes Muon Newton's method."
    )
    hypotheses = ("M has full column rank", "the square loss of a dense layer, M = EΣ (second claim)")
    claims = (
        base.Claim("rows", "(I ⊗ (MᵀM)^−½) vec M = vec UVᵀ", True),
        base.Claim("κ(E)", "κ(P^½HP^½) ≤ κ(E), P = I ⊗ (MᵀM)^−½", True, published=False),
    )
    trials = 150
    elsewhere = "speaks of the square loss"

    def exponent(self) -> float:
        """Exponent of MᵀM in P."""
        return -0.5

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A layer with up to eight inputs of different scales, at a random error."""
        n = int(rng.integers(2, 9))
        m = n + int(rng.integers(0, 3)) * int(rng.integers(2))
        X = rng.standard_normal((n + int(rng.integers(1, 20)), n)) * 10.0 ** rng.uniform(-1, 1, n)
        E = rng.standard_normal((m, n)) @ np.diag(10.0 ** rng.uniform(-0.5, 0.5, n))
        M = E @ (X.T @ X) / len(X)
        _, sigma, Vt = np.linalg.svd(M, full_matrices=False)
        if sigma[0] > 1e6 * sigma[-1]:
            return [base.not_applicable("M is not certainly of full column rank")] * len(self.claims)
        block = Vt.T * sigma ** (2 * self.exponent()) @ Vt
        rows = np.kron(np.eye(m), block) @ M.ravel()
        # P^½ has half of the exponent; its smallest singular values are off by so much
        half = Vt.T * sigma ** self.exponent() @ Vt
        error, F = base.ALLOWED * float(sigma[0] / sigma[-1]), X @ half
        own = interval(condition_number(factor=F, error=error * float(np.linalg.norm(F, 2))))
        bound = interval(condition_number(factor=E))
        return [
            base.equal(rows, polar(M).ravel(), allowed=base.ALLOWED * float(sigma[0] / sigma[-1]) ** 2),
            base.decided(own[0] / bound[1] ** 0.5, own[1] / bound[0] ** 0.5),
        ]

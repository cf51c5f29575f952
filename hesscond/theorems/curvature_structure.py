"""Effects of blocks, depth and classes on κ of quadratic functions, Gauss–Newton matrices and Hessians."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.func import hessian

from hesscond.theorems import base, matrices, networks, weight_conditioning

#: Draws of a start, and the standard errors that a share of them may be off.
DRAWS, ERRORS = 2000, 7.0
#: What inequalities that are attained allow for round-off.
SLACK = 1 + 1e-9


@base.register
class AdamDiagonal(base.Statement):
    """Adam's preconditioner on a quadratic function: min(d, κ) if its Hessian is diagonal, no help if it is dense."""

    id = "adam-diagonal"
    title = "Adam's preconditioner on quadratic functions"
    source = "Das, Agarwal, Sanghavi, Dhillon, 2024, abstract, as we read it"
    text = (
        "For quadratic functions of d variables with a diagonal Hessian, what stands for κ in the number of steps of "
        "Adam without momentum is O(min(d, κ)); for a sufficiently dense Hessian Adam can be worse than gradient "
        "descent. The abstract was at hand. As we read it, with our own proofs, Adam is gradient descent with M = "
        "diag(1/(|g_i| + ε)), g = Hx the first gradient. For ε = 0 and a diagonal H, M^½HM^½ is diag(1/|x_i|): κ is "
        "max|x_i|/min|x_i|, whatever H is. From a Gaussian start it is at most b = (2d/δ) √(2/π) √(2 ln(2d/δ)) with "
        "probability 1 − δ, for P(|x_i| < t) ≤ t√(2/π) and P(|x_i| > s) ≤ exp(−s²/2). For ε → ∞ it is κ(H). And no "
        "diagonal M helps where H has eigenvectors y, z of λ_max and λ_min with |y_i| = |z_i|: yᵀM⁻¹y = zᵀM⁻¹z, so "
        "κ(M^½HM^½) ≥ κ(H). Such H there are for every even d and every κ."
    )
    hypotheses = ("H is diagonal (first two claims)", "x is Gaussian and isotropic (second claim)")
    claims = (
        base.Claim("start", "κ(M^½HM^½) = max|x_i|/min|x_i|, M = diag(1/|g_i|)", True, published=False),
        base.Claim("min(d, κ)", "min over ε of κ(M^½HM^½) ≤ min(b, κ(H)) with probability 1 − δ", True),
        base.Claim("dense", "κ(M^½HM^½) ≥ κ(H) for all diagonal M if |y_i| = |z_i|", True),
    )
    trials = 100
    elsewhere = "speaks of quadratic functions"

    def preconditioner(self, g: np.ndarray) -> np.ndarray:
        """The diagonal of M."""
        return 1 / np.abs(g)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A diagonal Hessian of up to eight decades, and a dense one."""
        d, decades = matrices.random_size(rng, 60), rng.choice([0.2, 4.0])
        h, x = 10.0 ** rng.uniform(-decades, decades, d), rng.standard_normal(d)
        values = h * self.preconditioner(h * x)
        found = base.equal(values.max() / values.min(), np.abs(x).max() / np.abs(x).min())
        return [found, self.from_gaussian(rng, h), self.dense(rng)]

    def from_gaussian(self, rng: np.random.Generator, h: np.ndarray) -> base.Outcome:
        """The share of starts for which the better of ε = 0 and ε → ∞ is above the bound, over δ."""
        d, delta = len(h), float(rng.uniform(0.02, 0.5))
        bound = 2 * d / delta * (2 / np.pi) ** 0.5 * (2 * np.log(2 * d / delta)) ** 0.5
        allowed = min(bound, float(h.max() / h.min())) * SLACK
        scaled = h * self.preconditioner(h * rng.standard_normal((DRAWS, d)))
        found = np.minimum(scaled.max(1) / scaled.min(1), h.max() / h.min())
        share = float((found > allowed).mean())
        return base.decided(share, share, delta + ERRORS * (delta / DRAWS) ** 0.5)

    def dense(self, rng: np.random.Generator) -> base.Outcome:
        """Signs for y and z, all other eigenvalues between theirs, and the gradient of a random point."""
        d, most = 2 * int(rng.integers(1, 15)), 10.0 ** rng.uniform(0.1, 4)
        y = rng.choice([-1.0, 1.0], d)
        signs = np.stack([y, y * rng.permutation(np.repeat([-1.0, 1.0], d // 2))])
        V = np.linalg.qr(np.vstack([signs, rng.standard_normal((d - 2, d))]).T)[0]
        values = np.concatenate([[most, 1.0], most ** rng.uniform(0, 1, d - 2)])
        F = values[:, None] ** 0.5 * V.T
        M = self.preconditioner(F.T @ (F @ rng.standard_normal(d)))
        found = matrices.kappa(F) / matrices.kappa(F * M**0.5)
        return base.decided(found[0] ** 2, found[1] ** 2, SLACK)


@base.register
class AdamBlocks(base.Statement):
    """Adam's first gradient as a preconditioner on a block diagonal quadratic, against gradient descent."""

    id = "adam-blocks"
    title = "Adam on block diagonal quadratic functions"
    source = (
        "Zhang et al., NeurIPS 2024, as Theorem 3.2 of Zhang, On the Principles Behind Neural Network Optimizers, 2026"
    )
    text = (
        "On ½θᵀHθ − hᵀθ, H positive definite with blocks H_l, Adam with β₁ = 0, β₂ = 1 and v₀ from the first gradient "
        "g has ℓ_(k+1) − ℓ* ≤ (1 − 1/(r max κ_l))(ℓ_k − ℓ*), r a constant of the start. True with our r = max C_l/min "
        "c_l, c_l and C_l the least and the largest |g_i| of block l over λ_max(H_l), and the step size min c_l: D = "
        "diag(1/|g|) has D^½HD^½ ≤ 1/min c_l and ≥ min 1/(C_l κ_l), so κ(D^½HD^½) ≤ r max κ_l. For gradient descent "
        "there are H and a start with ℓ_(k+1) − ℓ* ≥ (1 − 2/(κ + 1))²(ℓ_k − ℓ*) for every step size and k: true for H "
        "with components along both ends of which λ_max's has the share 1/(κ + 1) of the loss. The first ratio is "
        "then at least that, with equality at the best step size, and ratios of a sum of geometric sequences do not "
        "fall."
    )
    hypotheses = ("H is positive definite", "no entry of the first gradient is zero")
    claims = (
        base.Claim("Adam", "ℓ_(k+1) − ℓ* ≤ (1 − 1/(r max κ_l))(ℓ_k − ℓ*)", True),
        base.Claim("gradient descent", "ℓ_(k+1) − ℓ* ≥ (1 − 2/(κ + 1))²(ℓ_k − ℓ*), some H and start, every η", True),
    )
    trials = 100
    elsewhere = "speaks of quadratic functions"

    def constant(self, least: Sequence[float], most: Sequence[float]) -> float:
        """The constant r from c_l and C_l."""
        return max(most) / min(least)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Two to five blocks of very different scales."""
        factors = []
        for size in rng.integers(1, 6, int(rng.integers(2, 6))):
            spread = 10.0 ** rng.uniform(0, rng.choice([0.05, 1.5]), size)
            factors.append(10.0 ** rng.uniform(-2, 2) * spread[:, None] * matrices.random_orthogonal(rng, size))
        least, most, worst, g = [], [], 1.0, []
        theta = [rng.standard_normal(len(F)) for F in factors]
        for F, own in zip(factors, theta, strict=True):
            sigma = np.linalg.svd(F, compute_uv=False)
            g.append(F.T @ (F @ own))
            least.append(float(np.abs(g[-1]).min() / sigma[0] ** 2))
            most.append(float(np.abs(g[-1]).max() / sigma[0] ** 2))
            worst = max(worst, float((sigma[0] / sigma[-1]) ** 2))
        F, D = np.zeros([sum(map(len, factors))] * 2), 1 / np.abs(np.concatenate(g))
        start = 0
        for own in factors:
            F[start : start + len(own), start : start + len(own)] = own
            start += len(own)
        allowed = 1 - 1 / (self.constant(least, most) * worst)
        return [self.descent(F, D, np.concatenate(theta), min(least), allowed), self.gradient_descent(rng)]

    def descent(self, F: np.ndarray, D: np.ndarray, theta: np.ndarray, eta: float, allowed: float) -> base.Outcome:
        """The largest ratio of ‖Fθ‖² in some steps."""
        losses = []
        for _ in range(20):
            losses.append(float(np.linalg.norm(F @ theta) ** 2))
            theta = theta - eta * D * (F.T @ (F @ theta))
        ratios = [after / before for before, after in pairwise(losses)]
        # a gradient is off by round-off of the largest block, which losses that small do not show
        if min(losses) < 1e-14 * losses[0]:
            return base.Outcome("unresolved", reason="round-off is reached")
        return base.decided(max(ratios), max(ratios), allowed * SLACK)

    def gradient_descent(self, rng: np.random.Generator) -> base.Outcome:
        """λ_max and λ_min, any step size, some steps."""
        most, steps = 10.0 ** rng.uniform(0, 6), int(rng.integers(1, 30))
        values, shares = np.array([most, 1.0]), np.array([1.0, most]) / (1 + most)
        eta = float(rng.choice([1.0, 10.0 ** rng.uniform(-3, 0.5)])) * 2 / (most + 1)
        factors = (1 - eta * values) ** 2
        losses = [float(shares @ factors**k) for k in (steps - 1, steps)]
        bound = (1 - 2 / (most + 1)) ** 2
        if losses[0] == 0 or losses[1] < np.finfo(float).tiny:
            return base.not_applicable("the loss is zero")
        return base.decided(bound * losses[0] / losses[1], bound * losses[0] / losses[1], SLACK)


@base.register
class SoftmaxRowBlocks(base.LayerStatement):
    """The row blocks of a softmax layer's Hessian: those off the diagonal add up to the one on it."""

    id = "softmax-row-blocks"
    title = "how block diagonal a softmax layer's Hessian is"
    source = (
        "Dong, Zhang, Yao, Sun, 2025, as section 3 of Zhang, On the Principles Behind Neural Network Optimizers, 2026"
    )
    text = (
        "The Hessian of a softmax layer in its weights has the blocks H_ii = E[p_i(1 − p_i) ĥĥᵀ] (eq. (3.6)) and H_ij "
        "= −E[p_ip_j ĥĥᵀ], one for each pair of rows; at random weights it becomes block diagonal as the number C of "
        "classes grows. True of each pair there; the theorem is about limits, and not checked here. What holds at all "
        "weights, our own: the blocks off the diagonal are negative semidefinite and add up to −H_ii, for the p_j do "
        "to 1, and the layer's Hessian is singular however large its blocks are: no block diagonal preconditioner "
        "changes that. That single blocks are small for large C is false where two classes compete."
    )
    hypotheses = ("cross-entropy of the softmax of the layer's outputs",)
    claims = (
        base.Claim("(3.6)", "H_ii = E[p_i(1 − p_i) ĥĥᵀ]", True),
        base.Claim("sum", "Σ_(j≠i) H_ij = −H_ii", True, published=False),
        base.Claim("any weights", "‖H_ij‖ ≤ 2‖H_ii‖/C, j ≠ i", False, published=False),
    )
    trials = 100
    inputs = False

    def on_diagonal(self, p: Tensor) -> Tensor:
        """p_i(1 − p_i)."""
        return p * (1 - p)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Up to ten classes, logits of any size."""
        C, n, N = (int(size) for size in rng.integers(2, [11, 6, 20]))
        h = torch.from_numpy(np.hstack([np.ones((N, 1)), rng.standard_normal((N, n - 1))]))
        W = torch.from_numpy(10.0 ** rng.uniform(-1, 0.7) * rng.standard_normal((C, n)))
        target = torch.from_numpy(rng.dirichlet(np.ones(C), N))
        H = hessian(lambda flat: networks.cross_entropy(h @ flat.view_as(W).T, target).mean())(W.flatten())
        blocks = H.reshape(C, n, C, n).permute(0, 2, 1, 3).numpy()
        expected = torch.einsum("kc,ka,kb->cab", self.on_diagonal(torch.softmax(h @ W.T, -1)), h, h) / N
        found = base.equal(np.stack([blocks[i, i] for i in range(C)]), expected.numpy())
        return [found, *self.check(blocks, networks.ROUND_OFF)]

    def observe(self, seen: base.Observation) -> Sequence[base.Outcome]:
        """All blocks of the layer's Hessian, by products."""
        network = seen.network
        assert network is not None
        if network.weight is None:
            return [base.not_applicable("the layer's weight is computed from other parameters")] * len(self.claims)
        H = network.reweighted(network.weight)
        if weight_conditioning.sees_common_change(H, seen.weight.shape):
            reason = "no softmax of the layer's outputs: a change of all rows alike is seen"
            return [base.not_applicable(reason)] * len(self.claims)
        if (undecided := weight_conditioning.too_large(H, seen.samples)) is not None:
            return [undecided] * len(self.claims)
        C, n = seen.weight.shape
        rows = np.arange(C * n).reshape(C, n)
        if H.order > C * n:
            rows = np.hstack([rows, C * n + np.arange(C)[:, None]])
        dense = H.to_dense().cpu().numpy()
        blocks = dense[rows[:, None, :, None], rows[None, :, None, :]]
        nothing = base.not_applicable("the probabilities are not looked at in training")
        return [nothing, *self.check(blocks, max(networks.ROUND_OFF, H.rounding))]

    def check(self, blocks: np.ndarray, rounding: float) -> list[base.Outcome]:
        """Outcomes of the claims about blocks (C, C, n, n) with entries off by ``rounding`` of the largest block."""
        C = len(blocks)
        norms = np.linalg.norm(blocks, axis=(2, 3))
        own, error = np.diagonal(norms), rounding * float(norms.max()) * C
        kept = own > 1e4 * error
        if not kept.any():
            return [base.not_applicable("the curvature is round-off")] * 2
        rest = np.stack([blocks[i, np.arange(C) != i].sum(0) for i in range(C)])
        diagonal = np.stack([blocks[i, i] for i in range(C)])
        share = np.where(np.eye(C, dtype=bool), 0, norms)[kept].max(1) / own[kept] * C / 2
        slack = 4 * error / own[kept]
        return [
            base.equal(rest, -diagonal, allowed=max(base.ALLOWED, rounding * C)),
            base.decided(float((share * (1 - slack)).max()), float((share * (1 + slack)).max())),
        ]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """One sample, one input: two classes that are t times as likely as each of the others."""
        rng = np.random.default_rng(seed)
        C, t = int(rng.integers(6, 12)), int(rng.integers(10, 50))
        p = Fraction(t, 2 * t + C - 2)
        ratio = p / (1 - p)
        text = f"|H_12|/|H_11| = {ratio} > 2/{C} for one input: p in proportion"
        yield base.Counterexample("any weights", [[t, t] + [1] * (C - 2)], text, float(ratio * C / 2))

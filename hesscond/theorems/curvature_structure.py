"""Muon and softmax: the rows that Muon preconditions, and the blocks of a softmax layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.func import hessian

from hesscond.spectra import ConditionNumber, condition_number
from hesscond.theorems import base, networks, weight_conditioning


def interval(kappa: ConditionNumber) -> tuple[float, float]:
    """Bounds of κ; NaN if it is unresolved."""
    return (kappa.lower, kappa.upper) if kappa.resolved else (np.nan, np.nan)


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
        U, sigma, Vt = np.linalg.svd(M, full_matrices=False)
        if sigma[0] > 1e6 * sigma[-1]:
            return [base.not_applicable("M is not certainly of full column rank")] * len(self.claims)
        block = Vt.T * sigma ** (2 * self.exponent()) @ Vt
        rows = np.kron(np.eye(m), block) @ M.ravel()
        # P^½ has half of the exponent; its smallest singular values are off by so much
        half = Vt.T * sigma ** self.exponent() @ Vt
        error, F = base.ALLOWED * float(sigma[0] / sigma[-1]), X @ half
        preconditioned = interval(condition_number(factor=F, error=error * float(np.linalg.norm(F, 2))))
        bound = interval(condition_number(factor=E))
        return [
            base.equal(rows, (U @ Vt).ravel(), allowed=base.ALLOWED * float(sigma[0] / sigma[-1]) ** 2),
            base.decided(preconditioned[0] / bound[1] ** 0.5, preconditioned[1] / bound[0] ** 0.5),
        ]


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
        outcome = base.equal(np.stack([blocks[i, i] for i in range(C)]), expected.numpy())
        return [outcome, *self.check(blocks, networks.ROUND_OFF)]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """All blocks of the layer's Hessian, by products."""
        network = layer.network
        assert network is not None
        if network.weight is None:
            return [base.not_applicable("the layer's weight is computed from other parameters")] * len(self.claims)
        H = network.reweighted(network.weight)
        if weight_conditioning.sees_common_change(H, layer.weight.shape):
            reason = "no softmax of the layer's outputs: the loss sees a common change of all rows"
            return [base.not_applicable(reason)] * len(self.claims)
        if (undecided := weight_conditioning.too_large(H, layer.samples)) is not None:
            return [undecided] * len(self.claims)
        C, n = layer.weight.shape
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
        diagonal_norms, error = np.diagonal(norms), rounding * float(norms.max()) * C
        kept = diagonal_norms > 1e4 * error
        if not kept.any():
            return [base.not_applicable("the curvature is round-off")] * 2
        rest = np.stack([blocks[i, np.arange(C) != i].sum(0) for i in range(C)])
        diagonal = np.stack([blocks[i, i] for i in range(C)])
        share = np.where(np.eye(C, dtype=bool), 0, norms)[kept].max(1) / diagonal_norms[kept] * C / 2
        slack = 4 * error / diagonal_norms[kept]
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

"""BNP: the size of normalized inputs, channels for entries, Algorithms 2 and 3, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hesscond.theorems import base, matrices
from hesscond.theorems.bnp_condition_numbers import normalized

#: C of E‖Ĝ/q‖ ≤ C √N for laws with bounded fourth moments; for Gaussian matrices it tends to 2 at N = n.
BOUND = 3.0
#: Draws of which the mean stands for the expectation, and the standard errors that it may be off.
DRAWS, ERRORS = 6, 5.0

#: Relative, of a norm.
ROUND_OFF = 1e-12
SMALL = base.not_applicable("min(n, N) ≤ C²: it holds for any matrix")
#: Laws of the features of N samples whose fourth moments, over their variances squared, are at most about six.
BOUNDED: tuple[Callable[[np.random.Generator, tuple[int, int]], np.ndarray], ...] = (
    lambda rng, shape: rng.standard_normal(shape),
    lambda rng, shape: rng.random(shape),
    lambda rng, shape: np.maximum(rng.standard_normal(shape) + rng.uniform(-0.5, 1.0, shape[1]), 0.0),
    lambda rng, shape: 10.0 ** rng.uniform(-3, 3, shape[1]) * (rng.standard_normal(shape) + 10.0),
)


def with_outliers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Independent Gaussian features, each sample times a number without moments: a few samples are all there is."""
    return rng.standard_normal(shape) * np.abs(rng.standard_cauchy((shape[0], 1))) ** 3


@base.register
class BNPProposition5(base.LayerStatement):
    """The normalized inputs, divided by q, are no larger than √N."""

    id = "bnp-proposition-5"
    title = "‖Ĝ/q‖ is of the order √N"
    source = "BNP, Proposition 5"
    text = (
        "E‖Ĝ/q‖₂ ≤ C √N, q² = max(n/N, 1), for the normalized inputs of N samples of n random features: q keeps the "
        "step size independent of the width. As printed, the entries are independent with one law of mean 0 and "
        "variance 1, n ≥ 3, and C does not depend on n. If C may depend on N this is trivial: C of the order √N does, "
        "by the Frobenius norm. If C is one constant for all n, N and laws it is false: with heavy tails, or fourth "
        "moments that grow with the size, the ratio grows like √min(n, N), the most that it can. The proof, from Lemma "
        "A2 (Seginer), sets E max ‖g_i‖² = n for the rows g_i of Ĝ because all have one law; the maximum is larger. "
        "With bounded fourth moments C = 3 suffices (Gaussian, uniform, rectified; the limit for N = n is 2). For "
        "convolutions of c channels on r × s positions the paper has a heuristic, ‖ĤP‖ about max(√(k²c), √N (rs)^¼), "
        "with q² = max(k²c/N, √(rs)), without a bound and not checked. Since Ĥ has a column of Nrs ones, ‖ĤUD‖ is "
        "√(Nrs) at least, and ‖ĤUD/q‖ of the order √N (rs)^¼ only where q² = √(rs)."
    )
    hypotheses = ("features are independent with bounded fourth moments", "min(n, N) > C², or it holds for any matrix")
    claims = (
        base.Claim("bounded fourth moments", "E‖Ĝ/q‖ ≤ 3 √N", True),
        base.Claim("any law", "E‖Ĝ/q‖ ≤ 3 √N whatever the law, as printed if C is one constant", False),
    )
    trials = 150

    def q(self, n: int, N: int) -> float:
        """√max(n/N, 1)."""
        return max(n / N, 1.0) ** 0.5

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Several batches of one size."""
        n, N = matrices.random_size(rng), matrices.random_size(rng)
        law = BOUNDED[rng.integers(len(BOUNDED))]
        if min(n, N) <= BOUND**2:
            return [SMALL] * 2
        return [self.mean_ratio(rng, drawn, n, N) for drawn in (law, with_outliers)]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The inputs of a layer, whose law is not known."""
        n, N = len(layer.sigma), layer.samples
        unknown = base.not_applicable("the law of a layer's inputs is not known")
        if min(n, N) <= BOUND**2:
            return [unknown, SMALL]
        ratio = self.ratio(layer.normalized, n, N)
        return [unknown, base.decided(ratio * (1 - ROUND_OFF), ratio * (1 + ROUND_OFF), BOUND)]

    def ratio(self, G_hat: np.ndarray, n: int, N: int) -> float:
        """‖Ĝ/q‖/√N."""
        return float(np.linalg.norm(G_hat, 2)) / (self.q(n, N) * N**0.5)

    def mean_ratio(self, rng: np.random.Generator, law: Callable[..., np.ndarray], n: int, N: int) -> base.Outcome:
        """The mean of ‖Ĝ/q‖/√N over some draws, give or take some standard errors."""
        ratios = []
        for _ in range(DRAWS):
            H = law(rng, (N, n))
            G_hat = normalized(H[:, H.min(0) != H.max(0)])
            ratios.append(self.ratio(G_hat, n, N))
        mean = float(np.mean(ratios))
        error = ERRORS * float(np.std(ratios, ddof=1)) / DRAWS**0.5 + ROUND_OFF * mean
        return base.decided(mean - error, mean + error, BOUND)

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Independent entries ±1/√p with probability p = 1/(nN), else 0: mean 0, variance 1, fourth moment nN.

        ‖G‖ ≥ 1/√p unless all are zero, so E‖G‖ ≥ (1 − (1 − p)^(nN)) √(nN), which no C √N bounds for all n = N.
        """
        root = int(np.random.default_rng(seed).integers(8, 14))
        size = root**2
        # n = N = root², q = 1: E‖G‖/√N ≥ (1 − (1 − p)^(1/p)) root, and (1 − p)^(1/p) < 1/e < 37/100
        ratio = Fraction(63, 100) * root
        law = f"independent entries ±{size} with probability 1/{size**2}, else 0 (mean 0, variance 1)"
        text = f"E‖Ĝ/q‖ ≥ {float(ratio)} √N > 3 √N for {law}: [n, N]"
        yield base.Counterexample(self.claims[1].name, [[size, size]], text, float(ratio / Fraction(BOUND)))


def entry_means(h: np.ndarray, kernel: int) -> np.ndarray:
    """Means over samples and positions of what each entry of the kernel sees of one channel (N, r, s): (k, k)."""
    half = (kernel - 1) // 2
    r, s = h.shape[1:]
    padded = np.pad(h, ((0, 0), (half, half), (half, half)))
    return np.array(
        [[padded[:, u : u + r, v : v + s].sum() / h.size for v in range(kernel)] for u in range(kernel)], dtype=h.dtype
    )


@base.register
class BNPProposition10(base.Statement):
    """The mean of a channel stands for the means of all entries of the kernel that see it."""

    id = "bnp-proposition-10"
    title = "the channel mean is close to the means of the patches"
    source = "BNP, Proposition 10"
    text = (
        "As we read it: for a convolution of r × s images with a k × k kernel and a border of p = (k − 1)/2 zeros, the "
        "mean of what an entry of the kernel sees, over samples and positions, differs from the mean of its channel "
        "by at most (p/r + p/s − p²/(rs)) max|h|: the entry u rows and v columns from the middle misses |u|s + |v|r − "
        "|uv| of the rs pixels. True if p ≤ min(r, s), and attained by a constant channel, at the corners of the "
        "kernel; if p exceeds both r and s, the entry sees nothing, and nothing is claimed."
    )
    hypotheses = ("(k − 1)/2 ≤ min(r, s)", "the border is padded with 0, stride 1")
    claims = (
        base.Claim("bound", "|μ_uv − μ| ≤ (p/r + p/s − p²/(rs)) max|h|", True),
        base.Claim("attained", "= for h constant at a corner of the kernel", True),
    )

    def bound(self, p: int, r: int, s: int) -> Fraction:
        """The share of pixels that a corner of the kernel misses."""
        return Fraction(p, r) + Fraction(p, s) - Fraction(p**2, r * s)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """One channel of random images."""
        N, r, s = (matrices.random_size(rng, most) for most in (20, 40, 40))
        p = int(rng.integers(1, min(r, s) + 1))
        h = matrices.random_matrix(rng, N, r * s).reshape(N, r, s) + 10.0 ** rng.uniform(-2, 2) * rng.standard_normal()
        return [self.within(h, p), self.attained(np.full((N, r, s), rng.standard_normal()), p)]

    def within(self, h: np.ndarray, p: int) -> base.Outcome:
        """The bound for images (N, r, s), give or take round-off."""
        size = np.abs(h).max()
        error = float(np.abs(entry_means(h, 2 * p + 1) - h.mean()).max() / size)
        slack = h.size * float(np.finfo(float).eps)
        return base.decided(error - slack, error + slack, float(self.bound(p, *h.shape[1:])))

    def attained(self, h: np.ndarray, p: int) -> base.Outcome:
        """Equality for constant images."""
        error = np.abs(entry_means(h, 2 * p + 1) - h.mean())[0, 0]
        return base.equal(error, np.asarray(float(self.bound(p, *h.shape[1:])) * np.abs(h).max()))


#: Relative to the terms that are summed.
ALLOWED = 100 * float(np.finfo(float).eps)


def expected_step(G_w: np.ndarray, G_b: np.ndarray, mu: np.ndarray, variance: np.ndarray, q2: float) -> np.ndarray:
    """P Pᵀ [G_b, G_w] unit by unit: (m, n + 1), P = (1/q) U D, U = [[1, −μᵀ], [0, I]], D = diag(1, 1/σ)."""
    U = np.eye(len(mu) + 1)
    U[0, 1:] = -mu
    return np.column_stack([G_b, G_w]) @ U * (np.concatenate([np.ones(1), 1 / variance]) / q2) @ U.T


class WrittenOut(base.Statement):
    """Steps 4 and 5 of an algorithm of BNP against −α P Pᵀ ∇."""

    hypotheses = ("q² ≥ 1 and σ̃ > 0",)
    claims = (base.Claim("with the updated G_w", "step 5 with the G_w of step 4, 1/q² on G_b alone = P Pᵀ ∇", True),)

    def step_4(self, G_w: np.ndarray, G_b: np.ndarray, mu: np.ndarray, variance: np.ndarray, q2: float) -> np.ndarray:
        """G_w ← (G_w − G_b μᵀ) / (q² σ̃²), G_w (m, n), or (m, c, k, k) with μ and σ̃ of each channel."""
        mu, variance = (values.reshape(-1, *[1] * (G_w.ndim - 2)) for values in (mu, variance))
        return (G_w - np.multiply.outer(G_b, mu)) / (q2 * variance)

    def step_5(self, new: np.ndarray, G_b: np.ndarray, mu: np.ndarray, q2: float) -> np.ndarray:
        """G_b ← G_b / q² − G_w μ, G_w summed over the entries of a kernel."""
        return G_b / q2 - new.sum(tuple(range(2, new.ndim))) @ mu

    def compare(
        self, G_w: np.ndarray, G_b: np.ndarray, mu: np.ndarray, variance: np.ndarray, q2: float
    ) -> Sequence[base.Outcome]:
        """The claim for gradients G_w (m, n, …), G_b (m,); what follows n are the offsets of a kernel."""
        m, width = len(G_b), G_w[0].size // len(mu)
        case = G_w.reshape(m, -1), G_b, np.repeat(mu, width), np.repeat(variance, width), q2
        expected = expected_step(*case)
        scale = expected_step(np.abs(case[0]), np.abs(G_b), -np.abs(case[2]), case[3], q2)
        new = self.step_4(G_w, G_b, mu, variance, q2)
        step = np.column_stack([self.step_5(new, G_b, mu, q2), new.reshape(m, -1)])
        return [base.equal(step, expected, scale, allowed=ALLOWED)]


def random_statistics(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """μ, σ̃² of n features of many scales, and q²: 1 in a third of the cases."""
    scale = 10.0 ** rng.uniform(-2, 2, n)
    mu = scale * rng.standard_normal(n) * 10.0 ** rng.uniform(-1, 1)
    return mu, scale**2 * rng.uniform(0.5, 2.0, n), max(1.0, rng.uniform(-3.0, 6.0))


@base.register
class BNPAlgorithm2(WrittenOut):
    """The step for dense layers."""

    id = "bnp-algorithm-2"
    title = "Algorithm 2 is preconditioning with P Pᵀ"
    source = "BNP, Algorithm 2 and eq. (15)"
    text = (
        "Steps 4 and 5, G_w ← (G_w − G_b μᵀ)/(q² σ̃²) and G_b ← G_b/q² − G_w μ, make the step −α P Pᵀ ∇ with P = "
        "(1/q) U D. True only if step 5 uses the G_w that step 4 has updated, which holds 1/q² already, and 1/q² "
        "multiplies G_b alone."
    )

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        m, n = matrices.random_size(rng), matrices.random_size(rng)
        return self.compare(matrices.random_matrix(rng, m, n), rng.standard_normal(m), *random_statistics(rng, n))


@base.register
class BNPAlgorithm3(WrittenOut):
    """The step for convolutions, with statistics of channels."""

    id = "bnp-algorithm-3"
    title = "Algorithm 3 is preconditioning with P Pᵀ"
    source = "BNP, Algorithm 3 and eq. (23)"
    text = (
        "The step −α P Pᵀ ∇ with P = (1/q) U D for convolutions: μ and σ̃² of an input channel, over samples and "
        "positions, stand for all k² entries of the kernel that see the channel, and step 5 sums over channels and "
        "entries. True under the same two conditions as Algorithm 2."
    )

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        m, channels, k = matrices.random_size(rng, 20), matrices.random_size(rng, 30), int(rng.choice([1, 3, 5]))
        G_w = matrices.random_matrix(rng, m, channels * k**2).reshape(m, channels, k, k)
        return self.compare(G_w, rng.standard_normal(m), *random_statistics(rng, channels))


class Counted(np.ndarray):
    """Array that adds the operations on its entries (+ − × ÷ √, comparisons) to ``tally``, shared by a computation."""

    tally: list[int]

    def __array_finalize__(self, other: object) -> None:
        self.tally = getattr(other, "tally", [0])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: object = None, **options: Any) -> Any:
        output = getattr(ufunc, method)(*map(np.asarray, inputs), **options)
        each = 2 * inputs[0].shape[-1] - 1 if ufunc is np.matmul else 1
        self.tally[0] += inputs[0].size - output.size if method == "reduce" else each * np.size(output)
        return counted(output, self.tally)


def counted(values: object, tally: list[int]) -> Counted:
    """Array whose operations are counted in ``tally``."""
    array = np.asarray(values, dtype=float).view(Counted)
    array.tally = tally
    return array


#: What a computation takes: arrays of numbers, all of one tally.
Arrays = dict[str, np.ndarray]


def random_layer(rng: np.random.Generator, n: int, N: int, m: int) -> Arrays:
    """Inputs H (N, n), gradients of a dense layer and of B, statistics, γ and β."""
    shapes = {"H": (N, n), "G_w": (m, n), "G_b": (m,), "G": (N, n), "mu": (n,), "gamma": (n,), "beta": (n,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"variance": 0.5 + rng.random(n)}


def flops(compute: Callable[[Arrays], object], arrays: Arrays) -> int:
    """How many operations on single numbers ``compute`` makes."""
    tally = [0]
    compute({name: counted(values, tally) for name, values in arrays.items()})
    return tally[0]


#: Decay of the averages, ε₁ and ε₂ of Algorithm 2, and ε of batch normalization.
DECAY, EPSILONS, EPSILON = 0.99, (1e-2, 1e-4), 1e-3


def averaged(a: Arrays) -> Arrays:
    """Step 1 and 2: means and variances of the batch, and running averages."""
    mean = a["H"].mean(0)
    centred = a["H"] - mean
    variance = (centred * centred).mean(0)
    running = [DECAY * old + (1 - DECAY) * new for old, new in ((a["mu"], mean), (a["variance"], variance))]
    return {"mean": mean, "centred": centred, "batch variance": variance, "mu": running[0], "variance": running[1]}


def bnp_step(a: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """All of Algorithm 2: G_w (m, n), G_b (m,)."""
    N, n = a["H"].shape
    averages, algorithm = averaged(a), BNPAlgorithm2()
    variance = averages["variance"] + EPSILONS[0] * averages["variance"].max() + EPSILONS[1]
    q2 = max(n / N, 1.0)
    new = algorithm.step_4(a["G_w"], a["G_b"], averages["mu"], variance, q2)
    return new, algorithm.step_5(new, a["G_b"], averages["mu"], q2)


def bn_as_written(a: Arrays) -> dict[str, np.ndarray]:
    """Batch normalization: statistics, forward pass, and the derivatives as Ioffe and Szegedy write them.

    Source: Ioffe and Szegedy, ICML 2015, section 3.
    """
    averages, H, G, N = averaged(a), a["H"], a["G"], len(a["H"])
    mu, root = averages["mean"], np.sqrt(averages["batch variance"] + EPSILON)
    x_hat = (H - mu) / root
    output = a["gamma"] * x_hat + a["beta"]
    in_x = G * a["gamma"]
    in_variance = (in_x * (H - mu) * -0.5 * (1.0 / (root * root * root))).sum(0)
    in_mu = (in_x * (-1.0 / root)).sum(0) + in_variance * (-2.0 * (H - mu)).sum(0) / N
    in_h = in_x * (1.0 / root) + in_variance * (2.0 * (H - mu)) / N + in_mu / N
    return {"output": output, "H": in_h, "gamma": (G * x_hat).sum(0), "beta": G.sum(0)}


def bn_shared(a: Arrays) -> dict[str, np.ndarray]:
    """Batch normalization with shared sums, and with the derivative in closed form."""
    averages, G, N = averaged(a), a["G"], len(a["H"])
    root = np.sqrt(averages["batch variance"] + EPSILON)
    x_hat = averages["centred"] / root
    output = a["gamma"] * x_hat + a["beta"]
    in_gamma, in_beta = (G * x_hat).sum(0), G.sum(0)
    in_h = (a["gamma"] / root) * (G - (in_beta / N + x_hat * (in_gamma / N)))
    return {"output": output, "H": in_h, "gamma": in_gamma, "beta": in_beta}


@base.register
class BNPProposition6(base.Statement):
    """Operation counts of BNP and of batch normalization in a dense layer."""

    id = "bnp-proposition-6"
    title = "what a step of BNP and of batch normalization costs"
    source = "BNP, Proposition 6 and section 3.4"
    text = (
        "A step of Algorithm 2 costs 4nN + 6nm + 2m + 8n operations for a dense layer with n inputs, m outputs and N "
        "samples, batch normalization 32nN + 4n (statistics and averages 4nN + 7n, forward 4nN, backward 24nN − 3n), "
        "so that batch normalization is cheaper only if 28N < 6m (exactly: only if 28N < 6m + 2m/n + 4). Counted "
        "one by one on the steps: 4nN + 5nm + m + 10n for Algorithm 2, and 29nN + 12n for batch normalization with "
        "the derivatives as they were first written: less than printed. But batch normalization need not cost so much: "
        "with sums shared and its derivative in closed form it takes 14nN + 9n, fewer than BNP if N < m/2, about."
    )
    hypotheses = ("m ≥ 2 (BNP)", "N ≥ 3 (BN)", "n ≥ 3, 28N ≥ 6m (comparisons)")
    claims = (
        base.Claim("BNP", "Algorithm 2 takes at most 4nN + 6nm + 2m + 8n operations", True),
        base.Claim("BN", "batch normalization, derivatives as first written, takes at most 32nN + 4n", True),
        base.Claim("comparison", "batch normalization, as first written, takes fewer only if 28N < 6m", True),
        base.Claim("comparison, sums shared", "the same, derivative in closed form", False, published=False),
    )
    trials = 60

    def printed(self, n: int, N: int, m: int) -> tuple[int, int]:
        """Printed operation counts of BNP and of batch normalization."""
        return 4 * n * N + 6 * n * m + 2 * m + 8 * n, 32 * n * N + 4 * n

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        n, N, m = 1 + matrices.random_size(rng, 15), 1 + matrices.random_size(rng, 15), matrices.random_size(rng, 40)
        arrays = random_layer(rng, n, N, m)
        bnp, written, shared = (flops(way, arrays) for way in (bnp_step, bn_as_written, bn_shared))
        for_bnp, for_bn = self.printed(n, N, m)
        outcomes = [base.decided(bnp, bnp, for_bnp), base.decided(written, written, for_bn)]
        if 6 * m > 28 * N:
            return [*outcomes, *[base.not_applicable("28N < 6m")] * 2]
        return [*outcomes, *(base.decided(bnp / other, bnp / other) for other in (written, shared))]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """A layer in which batch normalization takes fewer operations although 28N ≥ 6m."""
        rng = np.random.default_rng(seed)
        while True:
            n, N = (int(i) for i in rng.integers(3, 7, 2))
            m = 28 * N // 6
            arrays = random_layer(rng, n, N, m)
            bnp, shared = flops(bnp_step, arrays), flops(bn_shared, arrays)
            if bnp > matrices.CLEAR * shared:
                text = f"{shared} operations of batch normalization, {bnp} of BNP, 28N ≥ 6m: [n, N, m]"
                yield base.Counterexample(self.claims[3].name, [[n, N, m]], text, bnp / shared)
                return

"""CWO: descent on spheres of weights, its projection and its rate; variances, means, and standardized weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import permutations, product

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev

from hesscond.hessians import HessianOperator, SphereTangentOperator
from hesscond.methods import sphere
from hesscond.theorems import base, rates
from hesscond.theorems.matrices import random_matrix, random_size
from hesscond.theorems.networks import hessian_kappa, random_network

#: Feasible points that must not be nearer.
RIVALS = 20


def projected_step(w: np.ndarray, gradient: np.ndarray, alpha: float, c: float) -> np.ndarray:
    """Eq. (11): √c (w − α Pg)/‖w − α Pg‖, Pg = g − mean(g) 1."""
    iterate = w - alpha * (gradient - gradient.mean())
    return c**0.5 * iterate / np.linalg.norm(iterate)


def decayed(w: np.ndarray, gradient: np.ndarray, alpha: float, radius: float) -> np.ndarray:
    """Eq. (12): (1 − β) w − α' Pg, β = 1 − radius/‖w̃‖ and α' = radius · α/‖w̃‖."""
    centred = gradient - gradient.mean()
    share = radius / np.linalg.norm(w - alpha * centred)
    beta = 1 - share
    return (1 - beta) * w - share * alpha * centred


@base.register
class ProjectedStep(base.Statement):
    """The projected gradient step is the feasible point next to the plain one."""

    id = "cwo-projection"
    title = "eq. (11) is the nearest feasible point"
    source = "CWO, eqs. (9), (11)-(14), and Algorithm 1"
    text = (
        "√c (w − α Pg)/‖w − α Pg‖ with the centred gradient Pg = g − mean(g) 1 is the point of {‖w‖² = c, 1ᵀw = 0} "
        "nearest to w − αg. True if 1ᵀw = 0, so initial weights must be centred, and w ≠ α Pg, where every feasible "
        "point is as near. It is a step with weight decay, (1 − β) w − α' Pg with β = 1 − √c/‖w̃‖ and α' = √c α/‖w̃‖, "
        "w̃ = w − α Pg. Eqs. (12), (13) and (14) lack the factor √c, which Algorithm 1 has: their point is not "
        "feasible unless c = 1. Checked by the conditions that make a feasible point the nearest one (w − αg = μ1 + ν "
        "w⁺, ν ≥ 0), and against random feasible points."
    )
    hypotheses = ("1ᵀw = 0 at the start", "w − α Pg ≠ 0", "c ≠ 1 (both claims without √c)")
    claims = (
        base.Claim("nearest", "w⁺ solves (9)", True),
        base.Claim("decay", "w⁺ = (1 − β) w − α' Pg, β = 1 − √c/‖w̃‖, α' = √c α/‖w̃‖", True),
        base.Claim("decay without √c", "the same with β = 1 − 1/‖w̃‖, α' = α/‖w̃‖, as printed", False),
        base.Claim("without √c", "(w − α Pg)/‖w − α Pg‖ solves (9), as printed", False),
    )

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A random feasible point and gradient."""
        n, c, alpha = 1 + random_size(rng), float(10.0 ** rng.uniform(-1, 1)), float(10.0 ** rng.uniform(-2, 1))
        anywhere = rng.standard_normal(n)
        w = feasible(anywhere, c)
        gradient = random_matrix(rng, 1, n)[0]
        point = projected_step(w, gradient, alpha, c)
        return [
            nearest(rng, point, w - alpha * gradient, c),
            *(base.equal(decayed(w, gradient, alpha, radius), point) for radius in (c**0.5, 1.0)),
            nearest(rng, point / c**0.5, w - alpha * gradient, c),
        ]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Two weights, all integers: the feasible set is two points."""
        size, alpha = (int(i) for i in np.random.default_rng(seed).integers(2, 7, 2))
        # c = 2 size², and the gradient leads outwards: w⁺ = w
        w, gradient = [size, -size], [-1, 1]
        text = f"‖w⁺‖² = 1, not c = {2 * size**2}, for α = {alpha}: [w, g]"
        for name in ("decay without √c", "without √c"):
            yield base.Counterexample(name, [w, gradient], text, float(base.discrepancy([1], [2 * size**2])))


def feasible(w: np.ndarray, c: float) -> np.ndarray:
    """The point of {‖w‖² = c, 1ᵀw = 0} next to w."""
    w = w - w.mean()
    return c**0.5 * w / np.linalg.norm(w)


def nearest(rng: np.random.Generator, point: np.ndarray, target: np.ndarray, c: float) -> base.Outcome:
    """Whether ``point`` is the nearest feasible point: ‖w‖² = c, 1ᵀw = 0, target = μ1 + ν w with ν ≥ 0.

    These suffice: for feasible w, ‖target − w‖² = ‖target‖² + c − 2 targetᵀw, and targetᵀw = ν pointᵀw ≤ ν c.
    """
    centred = target - target.mean()
    if np.linalg.norm(centred) <= 1e-8 * np.abs(target).max():
        return base.not_applicable("the step goes to zero, from where all feasible points are as near")
    nu = centred @ point / c
    left = np.array([point @ point / c, point.sum() / c**0.5, *(nu * point / np.linalg.norm(centred))])
    right = np.array([1.0, 0.0, *(centred / np.linalg.norm(centred))])
    outcome = base.equal(left, right, float(np.abs(target).max() / np.linalg.norm(centred)) * len(target) ** 0.5 + 1.0)
    if outcome.status != "holds":
        return outcome
    rivals = [feasible(rng.standard_normal(len(point)), c) for _ in range(RIVALS)]
    nearer = min(float(np.linalg.norm(target - rival)) for rival in rivals) < np.linalg.norm(target - point)
    if nu < 0 or nearer:
        return base.Outcome("violated", 2.0, "another feasible point is nearer")
    return outcome


@dataclass(frozen=True)
class Law:
    """A random vector with finitely many values."""

    values: np.ndarray  # (k, n)
    shares: np.ndarray  # (k,); their probabilities

    def independent(self, count: int) -> Law:
        """``count`` independent ones side by side (k^count, count n)."""
        choices = np.indices([len(self.shares)] * count).reshape(count, -1).T
        return Law(self.values[choices].reshape(len(choices), -1), self.shares[choices].prod(1))

    def through(self, weights: Law, outputs: int) -> Law:
        """W x for independent W (outputs × n), given by its rows one after the other, and x."""
        W = weights.values.reshape(len(weights.shares), outputs, -1)
        products = np.einsum("aon,bn->abo", W, self.values)
        return Law(products.reshape(-1, outputs), np.multiply.outer(weights.shares, self.shares).ravel())

    def rectified(self) -> Law:
        """Law of the ReLU of the vector."""
        return replace(self, values=np.maximum(self.values, 0))

    def variance(self) -> float:
        """Variance E x² − (E x)² of an entry, averaged over all entries."""
        mean = self.shares @ self.values
        return float((self.shares @ (self.values - mean) ** 2).mean())


def symmetric_law(rng: np.random.Generator, sizes: int) -> Law:
    """Law of a number with ``sizes`` absolute values, both signs of each equally likely, and sometimes with 0."""
    values, shares = 10.0 ** rng.uniform(-0.5, 0.5, sizes), rng.dirichlet(np.ones(sizes)) / 2
    values, shares = np.concatenate([values, -values]), np.concatenate([shares, shares])
    if rng.random() < 0.5:
        values, shares = np.append(values, 0.0), np.append(0.8 * shares, 0.2)
    return Law(values[:, None], shares)


def permuted(w: np.ndarray, *, signs: bool) -> Law:
    """Law of all permutations of w, with all signs of each entry, or both signs of w: they satisfy w's constraints."""
    orders = np.array(list(permutations(w)))
    turns = np.array(list(product((1.0, -1.0), repeat=len(w)))) if signs else np.array([[1.0], [-1.0]])
    values = (orders[:, None] * turns).reshape(-1, len(w))
    return Law(values, np.full(len(values), 1 / len(values)))


@base.register
class KeptVariance(base.Statement):
    """Weights of squared norm 2 keep the variance of the pre-activations from layer to layer."""

    id = "cwo-variance"
    title = "‖w‖² = 2 keeps the variance under ReLU"
    source = "CWO, eqs. (3), (4)"
    text = (
        "Var(y_l) = (n/2) Var(w) Var(y_{l−1}) for y_l = w_lᵀ relu(y_{l−1}) with n inputs, which Var(w) = c/n keeps for "
        "c = 2. True for independent weights of mean zero, if y_{l−1} is symmetric: then E relu(y)² = Var(y)/2. It is, "
        "if the law of the weights of the layer before is: through as many layers as there are. True as well on the "
        "sphere ‖w‖² = 2, where E wwᵀ = (2/n) I. False on the paper's own set, the sphere with 1ᵀw = 0, which takes "
        "out what inputs have in common, and rectified ones have a mean: there Var(y_l) = 2 Var(relu(y_{l−1})) for "
        "independent y_{l−1}, which for Gaussian ones is (1 − 1/π) Var(y_{l−1}), a third less in every layer; c = "
        "2π/(π − 1) = 2.93 would keep it. Without an activation Var(wᵀx) = ‖w‖² for every w if x is whitened. All "
        "moments are computed by enumeration of laws with finitely many values."
    )
    hypotheses = (
        "w is independent of y_{l−1}, uncorrelated and of mean zero",
        "the law of y_{l−1} is symmetric, as that of weights before it makes it",
        "biases are zero, the activation is ReLU",
        "w fixed, no activation (claim: whitened inputs)",
    )
    claims = (
        base.Claim("independent weights", "Var(y_l) = (n/2) Var(w) Var(y_{l−1}), all symmetric", True),
        base.Claim("several layers", "Var(y_3) = Var(y_2) = Var(y_1) for Var(w) = 2/n, the law of w symmetric", True),
        base.Claim("on the sphere", "Var(y_l) = Var(y_{l−1}) for uncorrelated w with ‖w‖² = 2", True),
        base.Claim("whitened inputs", "Var(wᵀx) = ‖w‖² for x of mean zero and covariance I", True),
        base.Claim("centred, on the sphere", "the same with 1ᵀw = 0", False, published=False),
        base.Claim("centred, what holds", "Var(y_l) = 2 Var(relu(y_{l−1})), 1ᵀw = 0", True, published=False),
    )
    trials = 60

    def kept(self, before: Law, n: int, variance: float) -> float:
        """(n/2) Var(w) Var(y_{l−1})."""
        return n / 2 * variance * before.variance()

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Laws of two to four inputs, and three layers two units wide."""
        n, weight = int(rng.integers(2, 4)), symmetric_law(rng, 2)
        y = symmetric_law(rng, 2).independent(n)
        variance = y.rectified().through(weight.independent(n), 1).variance()
        independent = base.equal(np.array(variance), np.array(self.kept(y, n, weight.variance())))
        n = int(rng.integers(3, 5))
        y, w = symmetric_law(rng, 1).independent(n), rng.standard_normal(n)
        free, centred = permuted(2**0.5 * w / np.linalg.norm(w), signs=True), permuted(feasible(w, 2.0), signs=False)
        on_sphere, on_both = (y.rectified().through(law, 1).variance() for law in (free, centred))
        allowed = np.array(self.kept(y, n, 2 / n))
        drawn = rng.standard_normal((20, n))
        white = Law(20**0.5 * np.linalg.qr(drawn - drawn.mean(0))[0], np.full(20, 1 / 20))
        return [
            independent,
            self.layers(rng, symmetric_law(rng, 1)),
            base.equal(np.array(on_sphere), allowed),
            base.equal(np.array(white.through(Law(w[None], np.ones(1)), 1).variance()), np.array(w @ w)),
            base.equal(np.array(on_both), allowed),
            base.equal(np.array(on_both), np.array(2 * y.rectified().variance())),
        ]

    def layers(self, rng: np.random.Generator, law: Law) -> base.Outcome:
        """The second and third layer of a network of two units against the layer before."""
        x, weights = rng.standard_normal((1, 2)), law.independent(4)
        first = Law(x, np.ones(1)).through(weights, 2)
        second = first.rectified().through(weights, 2)
        third = second.rectified().through(weights, 2)
        allowed = [self.kept(before, 2, law.variance()) for before in (first, second)]
        return base.equal(np.array([second.variance(), third.variance()]), np.array(allowed))

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """For w = ±(1, −1) and y = (±a, ±a), all signs."""
        a = min(int(i) for i in np.random.default_rng(seed).choice(np.arange(1, 8), 2, replace=False))
        pairs = [(s * a, t * a) for s in (1, -1) for t in (1, -1)]
        after = Fraction(sum((max(s, 0) - max(t, 0)) ** 2 for s, t in pairs), len(pairs))
        text = f"Var(y_l) = {after}, Var(y_(l−1)) = {a * a} for w = ±(1, −1): values of y_(l−1)"
        yield base.Counterexample("centred, on the sphere", [list(pair) for pair in pairs], text, float(a * a / after))


@base.register
class IgnoredMean(base.LayerStatement):
    """A unit whose weights sum to zero does not see the mean of its inputs."""

    id = "cwo-mean"
    title = "centred weights ignore the mean of the inputs"
    source = "CWO, eq. (5)"
    text = (
        "1ᵀw = 0 gives wᵀ(x − x̄1) = wᵀx. True for x̄ the mean over the inputs of the unit, for each sample its own: "
        "what all inputs are shifted by is ignored. It is not what batch normalization takes out, the mean μ_j of each "
        "input over the batch: wᵀ(x − μ) = wᵀx needs wᵀμ = 0, as where all inputs have one mean."
    )
    hypotheses = ("1ᵀw = 0",)
    claims = (base.Claim("inputs of a sample", "wᵀ(x − x̄1) = wᵀx, x̄ the mean of x", True),)
    trials = 100
    inputs = False

    def centre(self, w: np.ndarray) -> np.ndarray:
        """Rows of weights that sum to zero."""
        return w - w.mean(1, keepdims=True)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A layer of centred units, and a batch of inputs with means."""
        n = 1 + random_size(rng)
        x = random_matrix(rng, random_size(rng), n) + 10.0 ** rng.uniform(-1, 1) * rng.standard_normal(n)
        return [self.check(self.centre(random_matrix(rng, random_size(rng, 20), n)), x)]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The weights of a layer, and the mean of its inputs for x."""
        W = layer.weight
        assert layer.means is not None
        if (np.abs(W.sum(1)) > CENTRED * np.abs(W).sum(1)).any():
            return [base.not_applicable("1ᵀw ≠ 0: the layer is not constrained")]
        # what training has rounded is no part of the claim
        return [self.check(self.centre(W), layer.means[None])]

    def check(self, W: np.ndarray, x: np.ndarray) -> base.Outcome:
        """The claim for units W (m, n) and inputs x (N, n)."""
        mean = x.mean(1, keepdims=True)
        return base.equal(W @ (x - mean).T, W @ x.T, float((np.abs(W) @ (np.abs(x) + np.abs(mean)).T).max()))


#: Sums of weights of up to this share of the sum of their sizes are round-off of single precision.
CENTRED = 1e-5


def standardized(w: Tensor) -> Tensor:
    """ŵ = (w − mean)/σ_w for rows of weights (m, n)."""
    centred = w - w.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt()


@base.register
class StandardizedGradient(base.Statement):
    """The gradient through standardized weights is that of what is standardized, over their standard deviation."""

    id = "cwo-standardized-gradient"
    title = "the gradient through weight standardization grows as 1/σ_w"
    source = "CWO, eqs. (15)-(19) and section 3.5"
    text = (
        "With weight standardization, ŵ = (w − mean(w) 1)/σ_w, the gradient in w is (1/σ_w) P(g − ⟨ŵ, g⟩ ŵ/n), g that "
        "in ŵ and P centring: it grows as 1/σ_w, and so may explode. True, with the hats as here; as printed ŵ and w "
        "have changed places. Steps on the sphere, from w to w⁺, are not divided by σ_w: to first order they are "
        "−α P(g − ⟨ŵ, g⟩ ŵ/n), g that in w."
    )
    hypotheses = ("σ_w > 0, and nothing is added to it", "L is differentiable at ŵ")
    claims = (
        base.Claim("gradient", "∇_w = (1/σ_w) P(g − ⟨ŵ, g⟩ ŵ/n)", True),
        base.Claim("grows", "∇_w at t w is ∇_w/t, σ_w t times as large", True),
        base.Claim("hats exchanged", "∇_w = (1/σ_w) P(g − ⟨w, g⟩ w/n), as printed", False),
        base.Claim("steps on the sphere", "∂w⁺/∂α = −P(g − ⟨ŵ, g⟩ ŵ/n) at α = 0, for every σ_w", True),
    )
    trials = 100

    def formula(self, w: Tensor, g: Tensor, along: Tensor) -> Tensor:
        """(1/σ_w) P(g − ⟨a, g⟩ a/n) for rows; a is ŵ, or w where the hats are exchanged."""
        inner = g - (along * g).sum(1, keepdim=True) * along / w.shape[1]
        return (inner - inner.mean(1, keepdim=True)) / w.std(1, correction=0, keepdim=True)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """The first layer of a small network of random weights."""
        sizes = [int(rng.integers(3, 40)), int(rng.integers(2, 6)), int(rng.integers(2, 5))]
        network = random_network(rng, sizes, int(rng.integers(5, 40)), activation=str(rng.choice(("tanh", "sigmoid"))))
        bias, w = network.weights[0][:, :1], network.weights[0][:, 1:]
        w = w + 10.0 ** rng.uniform(-1, 1) * w.std()

        def loss(weight: Tensor) -> Tensor:
            return network.loss([torch.cat([bias, weight], 1), *network.weights[1:]])

        def through(weight: Tensor) -> Tensor:
            return loss(standardized(weight))

        w_hat, gradient = standardized(w), grad(through)(w)
        g, t = grad(loss)(w_hat), float(10.0 ** rng.uniform(-3, 0))
        if not bool(g.any()):
            return [base.not_applicable("the gradient is zero")] * len(self.claims)
        # of deviation σ_w = t, and so on the sphere ‖w‖² = n t²
        at, slope, c = t * w_hat, grad(loss)(t * w_hat), w.shape[1] * t**2
        step = jacfwd(lambda alpha: sphere.projected(at - alpha * slope, "both", c))(w.new_zeros(()))
        # the gradient, times σ_w, is a difference of terms of this size: rounded before, w has digits less
        sigma = w.std(1, correction=0)
        terms = (g.norm(dim=1) * w.shape[1] ** 0.5 * (1 + w.abs().amax(1) / sigma) / sigma).max().item()
        return [
            base.equal(self.formula(w, g, w_hat).numpy(), gradient.numpy(), terms),
            base.equal(t * grad(through)(t * w).numpy(), gradient.numpy(), terms),
            base.equal(self.formula(w, g, w).numpy(), gradient.numpy(), terms),
            base.equal((-t * self.formula(at, slope, w_hat)).numpy(), step.numpy()),
        ]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """L = gᵀŵ for w = (s, −s, s, −s): ŵ = (1, −1, 1, −1) and σ_w = s, all integers."""
        rng = np.random.default_rng(seed)
        s, g = int(rng.integers(2, 6)), [int(i) for i in rng.integers(1, 9, 4)]
        g[0] += 9
        signs = [1, -1, 1, -1]
        right, wrong = (pulled_back([factor * sign for sign in signs], g, s) for factor in (1, s))
        text = f"∇_w = ({', '.join(map(str, right))}), with the hats exchanged ({', '.join(map(str, wrong))}): [w, g]"
        w = [s * sign for sign in signs]
        yield base.Counterexample("hats exchanged", [w, g], text, float(base.discrepancy(wrong, right)))


def pulled_back(along: list[int], g: list[int], sigma: int) -> list[Fraction]:
    """(1/σ) P(g − ⟨a, g⟩ a/n), exactly."""
    share = Fraction(sum(a * b for a, b in zip(along, g, strict=True)), len(g))
    inner = [b - share * a for a, b in zip(along, g, strict=True)]
    return [(value - sum(inner, Fraction(0)) / len(g)) / sigma for value in inner]


#: Samples, and noise in the targets.
SAMPLES, NOISE = 60, 0.1
#: Round-off of the Jacobian of a step, and of what is predicted for it from the Riemannian Hessian.
JACOBIAN = 1e-10
#: Step sizes are searched up to this many times 1/λ_max.
LONGEST = 1e3


@dataclass(frozen=True)
class ConstrainedLoss:
    """The loss of a network whose first layer is constrained, as a function of all its parameters that may change."""

    method: sphere.Sphere  # method at work on the network, whose first module is a dense layer
    inputs: Tensor  # (N, n)
    targets: Tensor  # (N, c)

    def split(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The constrained weights (m, n), which are the first of the parameters (d,), and the others."""
        weight = self.method.constrained[0].weight
        return point[: weight.numel()].view_as(weight), point[weight.numel() :]

    def value(self, point: Tensor) -> Tensor:
        """Mean squared error with the parameters ``point`` (d,)."""
        weight, bias = self.split(point)
        changed = {"0.weight": weight, **({"0.bias": bias} if self.free else {})}
        return nn.functional.mse_loss(functional_call(self.method.model, changed, (self.inputs,)), self.targets)

    @property
    def free(self) -> bool:
        """Whether there are parameters without a constraint."""
        return self.method.constrained[0].bias is not None

    def retract(self, point: Tensor) -> Tensor:
        """The weights brought back onto the constraints."""
        weight, rest = self.split(point)
        return torch.cat([sphere.projected(weight, self.method.constraint, self.method.c).flatten(), rest])

    @property
    def point(self) -> Tensor:
        """The parameters of the model."""
        layer = self.method.constrained[0]
        return nn.utils.parameters_to_vector(layer.parameters()).detach()

    def tangent(self, point: Tensor) -> SphereTangentOperator:
        """The Riemannian Hessian at ``point``, to which the parameters of the model are set."""
        nn.utils.vector_to_parameters(point, self.method.constrained[0].parameters())
        hessian, _ = self.method.chart.network(
            lambda **given: HessianOperator(
                self.method.model, nn.functional.mse_loss, (self.inputs, self.targets), **given
            )
        )
        assert isinstance(hessian, SphereTangentOperator)
        return hessian

    def minimum(self) -> rates.Minimum | None:
        """Minimum near the parameters of the model, by Newton's method on the manifold."""

        def derivatives(point: Tensor) -> tuple[Tensor, Tensor]:
            hessian = self.tangent(point)
            return hessian.null_space.remove(hessian.operator.gradient[:, None])[:, 0], hessian.to_dense()

        return rates.newton(self.value, derivatives, self.point, self.retract)


def random_problem(rng: np.random.Generator) -> ConstrainedLoss:
    """Least squares in the units of a dense layer, or behind tanh and a fixed layer; the targets are of other norms."""
    width, units = int(rng.integers(4, 7)), 1 if rng.random() < 0.5 else int(rng.integers(2, 4))
    # without torch's own random numbers, which are not ours to draw
    linear = partial(nn.utils.skip_init, nn.Linear, dtype=torch.float64)
    layer = linear(width, units, bias=rng.random() < 0.3)
    model = nn.Sequential(layer)
    if rng.random() < 0.5:
        model.extend([nn.Tanh(), linear(units, 2).requires_grad_(False)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rates.normal(rng, *parameter.shape))
    c = float(2 * 10.0 ** rng.uniform(-0.3, 0.3))
    constraint: sphere.Constraint = "sphere" if rng.random() < 0.5 else "both"
    method = sphere.Sphere(model, constraint=constraint, c=c, affine=False, output=True, layers=("0",))
    inputs = rates.normal(rng, SAMPLES, width) * torch.from_numpy(10.0 ** rng.uniform(-0.4, 0.4, width)) + 0.3
    scaled = {"0.weight": layer.weight.detach() * torch.from_numpy(rng.uniform(0.6, 1.6, (units, 1)))}
    output = functional_call(model, scaled, (inputs,)).detach()
    return ConstrainedLoss(method, inputs, output + NOISE * rates.normal(rng, *output.shape))


@dataclass(frozen=True)
class Linearization:
    """x ↦ retract(x − α∇L) at a minimum, in the tangent space."""

    basis: Tensor  # (d, k); orthonormal basis of the tangent space
    Hess: Tensor  # (d, d); matrix that is assumed to be the Riemannian Hessian
    multipliers: Tensor  # (d,); λ_i = ⟨w_i, ∇_i L⟩/c at the weights of unit i, 0 at free parameters

    def root(self, alpha: float) -> Tensor:
        """(1 − αλ_i)^−½ (d,)."""
        return (1 - alpha * self.multipliers).rsqrt()

    def symmetric(self, alpha: float) -> Tensor:
        """Symmetric (k, k) matrix similar to (1 − αλ_i)⁻¹ Hess; the factor is constant on each unit's tangent space."""
        scaled = self.root(alpha)[:, None] * self.Hess * self.root(alpha)
        return self.basis.T @ scaled @ self.basis

    def best_step(self) -> float | None:
        """The α at which α μ_max + α μ_min = 2 for the eigenvalues μ(α) of (1 − αλ_i)⁻¹ Hess; None if there is none.

        α/(1 − αλ_i) increases with α, and so do both ends.
        """
        most = float(self.multipliers.max())
        longest = LONGEST / float(torch.linalg.matrix_norm(self.Hess, 2))
        longest = min(longest, (1 - 1e-6) / most) if most > 0 else longest

        def excess(alpha: float) -> float:
            values = torch.linalg.eigvalsh(self.symmetric(alpha))
            return alpha * float(values[0] + values[-1]) - 2

        return float(brentq(excess, 0.0, longest, xtol=1e-14 * longest, rtol=1e-14)) if excess(longest) > 0 else None


@base.register
class ProjectedRate(base.Statement):
    """Projected gradient descent converges at the rate of the Riemannian Hessian on the tangent spaces."""

    id = "cwo-rate"
    title = "the rate of projected gradient descent"
    source = "CWO, Algorithm 1, with Absil, Mahony and Sepulchre (2008), sec. 5.3-5.4"
    text = (
        "The step w ↦ projection of w − α∇L on spheres ‖w_i‖² = c (and 1ᵀw_i = 0) has at a stationary point the "
        "Jacobian I − α (1 − αλ_i)⁻¹ Hess_R on the product of the tangent spaces, λ_i = ⟨w_i, ∇_i L⟩/c and Hess_R = "
        "Proj ∇²L − λ_i the Riemannian Hessian. At the best α it converges at the rate (κ − 1)/(κ + 1), κ that of "
        "(1 − αλ_i)⁻¹ Hess_R, which is κ(Hess_R) where all λ_i are equal, as with one unit. True. Neither the ambient "
        "∇²L nor its projection without the curvature term −λ_i gives the rate, nor does Hess_R alone where the λ_i "
        "differ. Checked on the steps from a minimum found to machine precision, moved along a random tangent, and "
        "along the bottom eigenvector. Rates count as equal if −ln(rate) agrees to 3 digits."
    )
    hypotheses = (
        "a minimum, with Hess_R positive definite on the tangent space",
        "αλ_i < 1, α the best step size",
        "one unit, all parameters constrained (claim: one unit)",
    )
    claims = (
        base.Claim("Jacobian", "it is I − α (1 − αλ_i)⁻¹ Hess_R", True),
        base.Claim("bound", "rate ≤ (κ − 1)/(κ + 1), κ of (1 − αλ_i)⁻¹ Hess_R", True),
        base.Claim("attained", "rate = (κ − 1)/(κ + 1) from the bottom eigenvector", True),
        base.Claim("one unit", "rate = (κ − 1)/(κ + 1), κ = κ(Hess_R)", True),
        base.Claim("ambient", "rate = (κ − 1)/(κ + 1), κ = κ(∇²L)", False, published=False),
    )
    trials = 30

    def riemannian(self, hessian: SphereTangentOperator) -> Tensor:
        """Hess_R (d, d), zero on the normals."""
        return hessian.to_dense()

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A small network at a minimum on spheres."""
        problem = random_problem(rng)
        minimum = problem.minimum()
        if minimum is None:
            return [base.not_applicable("no minimum was found")] * len(self.claims)
        at = problem.tangent(minimum.point)
        ambient, Hess = at.operator.to_dense(), self.riemannian(at)
        Hess = (Hess + Hess.T) / 2
        normals = at.null_space.dimension
        tangent = at.null_space.remove(torch.eye(at.order, dtype=at.dtype, device="cpu"))
        basis = torch.linalg.eigh(tangent).eigenvectors[:, normals:]
        linear = Linearization(basis, Hess, at.curvature[:, 0])
        alpha = linear.best_step()
        if alpha is None:
            return [base.not_applicable("no step size is the best one")] * len(self.claims)
        values, vectors = torch.linalg.eigh(linear.symmetric(alpha))
        kappa = hessian_kappa(linear.symmetric(alpha))
        if kappa.nullity or kappa.negative:
            return [base.not_applicable("the Riemannian Hessian is not positive definite")] * len(self.claims)

        def step(point: Tensor) -> Tensor:
            return problem.retract(point - alpha * rates.gradient(problem.value, point))

        root, point = linear.root(alpha), minimum.point
        iteration = rates.Iteration(step, point, basis.T / root, rates.FAR * float((point / root).norm()))
        bottom = root * (basis @ vectors[:, 0])
        radius = iteration.radius(bottom)
        random = root * (basis @ rates.normal(rng, len(values)))
        slow = rates.measured(iteration, bottom, radius)
        single_unit = len(problem.method.constrained[0].weight) == 1 and not problem.free
        alone = hessian_kappa(basis.T @ Hess @ basis) if single_unit else None
        plain = hessian_kappa(ambient)
        missed = rates.attained(slow, plain)
        signs = "indefinite" if 0 < plain.negative < plain.rank else "semidefinite"
        return [
            self.jacobian(problem, point, alpha, linear, tangent),
            rates.bounded(rates.measured(iteration, random, radius), kappa),
            rates.attained(slow, kappa),
            base.not_applicable("λ_i differ") if alone is None else rates.attained(slow, alone),
            replace(missed, reason=f"{missed.reason or missed.status}: ∇²L {signs}"),
        ]

    def jacobian(
        self, problem: ConstrainedLoss, point: Tensor, alpha: float, linear: Linearization, tangent: Tensor
    ) -> base.Outcome:
        """Compare the Jacobian of a step, by automatic differentiation, with the formula, on the tangent space."""
        jacobian = jacrev(lambda x: problem.retract(x - alpha * grad(problem.value)(x)))(point)
        expected = tangent - alpha * linear.root(alpha)[:, None] ** 2 * linear.Hess
        return base.equal((jacobian @ tangent).detach().numpy(), expected.numpy(), allowed=JACOBIAN)

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """½ wᵀAw + βᵀw with diagonal A on the unit sphere, at e_3 with λ = −depth: J_ii = (1 − αa_i)/(1 − αλ)."""
        first, last, along, depth = (int(i) for i in np.random.default_rng(seed).integers(1, 7, 4))
        last += first
        # at the best step α = 2/(first + last) the ends of the spectrum of J are ±
        rate = Fraction(last - first, last + first + 2 * depth)
        sizes = sorted((first, last, along))
        right, wrong = (1 + rate) / (1 - rate), Fraction(sizes[-1], sizes[0])
        text = (
            f"the rate is {rate} = (κ − 1)/(κ + 1) with κ = {right}, not {wrong}; w = e_3 of the unit sphere: diagonal "
            "of A, β = (0, 0, ·)"
        )
        factor = float(max(right / wrong, wrong / right))
        yield base.Counterexample("ambient", [[first, last, along], [-depth - along]], text, factor)

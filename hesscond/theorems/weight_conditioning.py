"""WC: equilibrated matrices (Theorem 1, Proposition 1), and the Hessian of an equilibrated network (Theorem 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian

from hesscond.scaling import optimal_diagonal_scaling
from hesscond.spectra import ConditionNumber
from hesscond.theorems import exact
from hesscond.theorems.base import (
    Claim,
    Counterexample,
    Extreme,
    LayerStatement,
    Observation,
    Outcome,
    Statement,
    decided,
    equal,
    register,
)
from hesscond.theorems.matrices import (
    CLEAR,
    STEPS,
    ascend,
    equilibrated,
    integer_matrices,
    kappa,
    random_matrix,
    random_size,
    row_norms,
)
from hesscond.theorems.networks import LINKS, Network, flat_loss, hessian_kappa, random_network


@register
class WeightConditioningTheorem1(LayerStatement):
    """Equilibration is optimal among diagonal scalings."""

    id = "wc-theorem-1"
    title = "equilibration is the optimal diagonal scaling"
    source = "WC, Theorem 1"
    text = (
        "κ(EA) ≤ κ(PA) for every diagonal P, without the factor √m of Van der Sluis. False from three rows on, where "
        "equilibration of a Gaussian matrix is almost always strictly worse than the optimal scaling; true for two "
        "rows: the eigenvalues of their Gram matrix have the smallest ratio if both have the same norm."
    )
    hypotheses = ("A has full rank",)
    claims = (
        Claim("two rows", "κ(EA) ≤ κ(PA), A with 2 rows", True),
        Claim("three rows or more", "κ(EA) ≤ κ(PA)", False),
    )
    trials = 60

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """Two rows against random scalings, more against the best one."""
        two = random_matrix(rng, 2, random_size(rng))
        other = two / row_norms(two)[:, None] * 10.0 ** rng.uniform(-2, 2, (2, 1))
        more = random_matrix(rng, max(3, random_size(rng, 40)), random_size(rng, 40))
        best = optimal_diagonal_scaling(more, side="row").row[:, None] * more
        return [self.compare(two, other), self.compare(more, best)]

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """The paper's W, inputs × outputs, against its best scaling."""
        W = seen.weight.T
        found = self.compare(W, optimal_diagonal_scaling(W, side="row").row[:, None] * W)
        nothing = Outcome("not-applicable", reason="W has other than two rows" if len(W) > 2 else "W has two rows only")
        return [nothing, found] if len(W) > 2 else [found, nothing]

    def compare(self, A: np.ndarray, scaled: np.ndarray) -> Outcome:
        """κ(EA) over κ(PA)."""
        return decided(*(kappa(equilibrated(A)) / kappa(scaled)))

    def worst(self, size: int, rng: np.random.Generator) -> Extreme:
        """Square matrices, from Gaussian starts."""

        def factor(A: np.ndarray) -> float:
            return float(np.linalg.cond(equilibrated(A)) / optimal_diagonal_scaling(A, side="row").kappa)

        _, A = ascend(factor, (size, size), rng, STEPS // 40)
        best = optimal_diagonal_scaling(A, side="row").row[:, None] * A
        return Extreme("three rows or more", (kappa(equilibrated(A)) / kappa(best))[0], size**0.5, A)

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """A 3×3 matrix of small integers and integer weights p_i² that beat 1/‖a_i‖²."""
        for A in integer_matrices(seed, 3, 3):
            best = optimal_diagonal_scaling(A.astype(float), side="row").row
            # of integers up to 100, so that both sides are rational
            weights = np.maximum(1, np.round(100 * best**2 / (best**2).max())).astype(int)
            own, other = kappa(equilibrated(A)), kappa(np.sqrt(weights)[:, None] * A)
            if not own.lower > CLEAR * other.upper:
                continue
            squares = [Fraction(1, int(n)) for n in (A**2).sum(1)]
            rows = A.tolist()
            low = exact.kappa_squared(exact.gram(rows, squares))[0]
            high = exact.kappa_squared(exact.gram(rows, [Fraction(int(w)) for w in weights]))[1]
            if low > high:
                factor = float(low / high) ** 0.5
                text = (
                    f"κ(EA) ≥ {float(low) ** 0.5:.6f} > {float(high) ** 0.5:.6f} ≥ κ(PA) for "
                    f"P = diag({', '.join(f'√{w}' for w in weights)})"
                )
                yield Counterexample("three rows or more", rows, text, factor)
                return


@register
class WeightConditioningProposition1(LayerStatement):
    """Equilibration never makes a weight matrix worse."""

    id = "wc-proposition-1"
    title = "equilibration improves every matrix"
    source = "WC, Proposition 1"
    text = (
        "κ(EW) ≤ κ(W). False for about 5 % of square Gaussian matrices and 13 to 25 % of tall ones; by Van der Sluis "
        "the factor is at most √m, and it can approach √(m − 1)."
    )
    hypotheses = ("W has full rank",)
    claims = (
        Claim("improves", "κ(EW) ≤ κ(W)", False),
        Claim("within √m", "κ(EW) ≤ √m κ(W)", True),
    )

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """A matrix of any shape."""
        return self.check(random_matrix(rng, random_size(rng), random_size(rng)))

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """The paper's W, inputs × outputs."""
        return self.check(seen.weight.T)

    def check(self, W: np.ndarray) -> Sequence[Outcome]:
        """The outcomes of both claims for W."""
        bounds = kappa(equilibrated(W)) / kappa(W)
        return [decided(*bounds), decided(*bounds, len(W) ** 0.5)]

    def worst(self, size: int, rng: np.random.Generator) -> Extreme:
        """Square matrices, from Gaussian starts."""

        def factor(W: np.ndarray) -> float:
            return float(np.linalg.cond(equilibrated(W)) / np.linalg.cond(W))

        _, W = ascend(factor, (size, size), rng, STEPS)
        return Extreme("improves", (kappa(equilibrated(W)) / kappa(W))[0], size**0.5, W)

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """The first 3×2 or 3×3 matrix of small integers."""
        for A in integer_matrices(seed, 3, 3):
            if not kappa(equilibrated(A)).lower > CLEAR * kappa(A.astype(float)).upper:
                continue
            rows = A.tolist()
            low = exact.kappa_squared(exact.gram(rows, [Fraction(1, int(n)) for n in (A**2).sum(1)]))[0]
            high = exact.kappa_squared(exact.gram(rows))[1]
            if low > high:
                text = f"κ(EW) ≥ {float(low) ** 0.5:.6f} > {float(high) ** 0.5:.6f} ≥ κ(W)"
                yield Counterexample("improves", rows, text, float(low / high) ** 0.5)
                return


#: Rows of two integers of integer norm, up to order and signs.
ROWS = ((3, 4), (5, 12), (8, 15), (6, 8), (7, 24))
#: Networks that are tried, and their samples.
TRIES, SAMPLES = 300, 4


def rational(A: list[list[int]]) -> np.ndarray:
    """An array of `fractions.Fraction`."""
    return np.array([[Fraction(entry) for entry in row] for row in A], dtype=object)


def norms(A: np.ndarray) -> list[Fraction]:
    """Of rows whose norms are integers."""
    return [Fraction(isqrt(int(row @ row))) for row in A]


@dataclass(frozen=True)
class LinearNetwork:
    """½ ‖XWV − Y‖² with integer W (inputs × units) and V (units × outputs), whose rows have integer norms.

    Hessians are in the rows of W, then those of V, as arrays of fractions.
    """

    W: list[list[int]]
    V: list[list[int]]
    X: list[list[int]]
    Y: list[list[int]]

    @property
    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """W and V as arrays of fractions, for exact arithmetic."""
        return rational(self.W), rational(self.V)

    @property
    def equilibrated(self) -> tuple[np.ndarray, np.ndarray]:
        """W and V with rows of norm 1."""
        W, V = (A / np.array(norms(A), dtype=object)[:, None] for A in self.weights)
        return W, V

    def derivatives(self, W: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradient and Hessian of the loss at W, V."""
        X, residuals = rational(self.X), rational(self.X) @ W @ V - rational(self.Y)
        units, outputs = V.shape
        split = W.size
        H = np.full((split + V.size, split + V.size), Fraction(0), dtype=object)
        for x, residual in zip(X, residuals, strict=True):
            for o in range(outputs):
                slope = np.full(len(H), Fraction(0), dtype=object)
                slope[:split] = np.multiply.outer(x, V[:, o]).ravel()
                slope[split + o :: outputs] = x @ W
                H += np.multiply.outer(slope, slope)
                for i in range(units):
                    # ∂²/∂W_ki ∂V_io of the output o is x_k
                    H[i:split:units, split + i * outputs + o] += residual[o] * x
                    H[split + i * outputs + o, i:split:units] += residual[o] * x
        gradient = np.concatenate([(X.T @ residuals @ V.T).ravel(), ((X @ W).T @ residuals).ravel()])
        return gradient, H

    def hessian(self) -> np.ndarray:
        """The exact Hessian of the loss at W, V."""
        return self.derivatives(*self.weights)[1]

    def hessian_at_equilibrated(self) -> np.ndarray:
        """At the point E(W) W, E(V) V."""
        return self.derivatives(*self.equilibrated)[1]

    def hessian_through(self) -> np.ndarray:
        """In W, V of the loss at E(W) W, E(V) V: JᵀHJ, and ∇²(uᵀg) for each row u = w/‖w‖ with the gradient g in u.

        J = (I − uuᵀ)/‖w‖ and ∇²(uᵀg) = −(g⊥uᵀ + u g⊥ᵀ + uᵀg (I − uuᵀ))/‖w‖², g⊥ = g − (uᵀg) u.
        """
        gradient, H = self.derivatives(*self.equilibrated)
        J, curvature = np.full((2, *H.shape), Fraction(0), dtype=object)
        start = 0
        for A, U in zip(self.weights, self.equilibrated, strict=True):
            for length, u in zip(norms(A), U, strict=True):
                own = slice(start, start + len(u))
                along = u @ gradient[own]
                across = gradient[own] - along * u
                projection = np.eye(len(u), dtype=int) - np.multiply.outer(u, u)
                mixed = np.multiply.outer(across, u)
                J[own, own] = projection / length
                curvature[own, own] = -(mixed + mixed.T + along * projection) / length**2
                start += len(u)
        return J.T @ H @ J + curvature


def random_linear_networks(seed: int) -> Iterator[LinearNetwork]:
    """Two inputs, two hidden units and two outputs, all small integers."""
    rng = np.random.default_rng(seed)

    def layer() -> list[list[int]]:
        rows = np.array([rng.permutation(ROWS[k]) for k in rng.choice(len(ROWS), 2)])
        return (rows * rng.choice([-1, 1], (2, 2))).tolist()

    for _ in range(TRIES):
        X, Y = rng.integers(-3, 4, (SAMPLES, 2)), rng.integers(-9, 10, (SAMPLES, 2))
        yield LinearNetwork(layer(), layer(), X.tolist(), Y.tolist())


#: Eigenvalues below this share of the largest are not worth exact arithmetic.
EXACT = 1e-6


def norms_along(weight: Tensor, dim: int) -> Tensor:
    """Norms of W in [b, W] along a dimension, which is kept."""
    return weight[:, 1:].norm(dim=dim, keepdim=True)


def scaled(weight: Tensor, norms: Tensor) -> Tensor:
    """[b, W/norms]: biases stay as they are."""
    return torch.cat([weight[:, :1], weight[:, 1:] / norms], 1)


@register
class WeightConditioningTheorem2(Statement):
    """Equilibrating the weights of a network improves κ of its Hessian."""

    id = "wc-theorem-2"
    title = "the equilibrated network's Hessian is better conditioned"
    source = "WC, Theorem 2"
    text = (
        "κ(H of the equilibrated network) ≤ κ(H) wherever both have full rank; κ by |λ|. False in every reading: (a) "
        "H in W through W → E(W)W, (b) H at the point EW, (c) H in W with E held fixed. In (a) H is never positive "
        "definite: the loss does not change with the length of a row w_r, which gives H w_r = −∇_r L, so H is "
        "indefinite or singular off critical points, and singular at them, with a null vector for each row. Rows are "
        "those of the paper's W (inputs × units), or of its transpose."
    )
    hypotheses = ("both Hessians have full rank", "no row is zero", "a critical point (last claim)")
    claims = (
        Claim("(a) through E(W)W", "κ(∇²_W L(E(W)W)) ≤ κ(∇²L(W))", False),
        Claim("(b) at the point EW", "κ(∇²L(EW)) ≤ κ(∇²L(W))", False),
        Claim("(c) E frozen", "κ(E ∇²L(EW) E) ≤ κ(∇²L(W))", False),
        Claim("scale identity", "H w_r = −∇_r L in reading (a)", True),
        Claim("nullity", "nullity of H ≥ number of rows at critical points in reading (a)", True),
    )
    trials = 60

    def weights(self, weight: Tensor, dim: int) -> Tensor:
        """[b, E(W) W] of a layer."""
        return scaled(weight, norms_along(weight, dim))

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """A network of one or two layers, equilibrated along one of two dimensions."""
        sizes = rng.integers(2, 5, rng.integers(2, 4)).tolist()
        network = random_network(rng, sizes, int(rng.integers(20, 60)))
        dim = int(rng.integers(2))
        norms = [norms_along(weight, dim) for weight in network.weights]
        at = replace(network, weights=tuple(map(scaled, network.weights, norms)))
        through = hessian(self.equilibrated_loss(network, dim))(network.parameters)

        def frozen(theta: Tensor) -> Tensor:
            return network.loss(list(map(scaled, network.split(theta), norms)))

        before = hessian_kappa(hessian(flat_loss(network))(network.parameters))
        readings = [through, hessian(flat_loss(at))(at.parameters), hessian(frozen)(network.parameters)]
        return [
            *(compared(hessian_kappa(reading), before) for reading in readings),
            self.identity(network, dim, through),
            self.nullity(network, dim),
        ]

    def equilibrated_loss(self, network: Network, dim: int) -> Callable[[Tensor], Tensor]:
        """The loss in W through E(W) W in all layers, of all weights in one vector."""
        return lambda theta: network.loss([self.weights(weight, dim) for weight in network.split(theta)])

    def identity(self, network: Network, dim: int, H: Tensor) -> Outcome:
        """H w_r = −∇_r L for all rows at once, one column for each."""
        rows = scale_directions(network, dim).T
        gradient = grad(self.equilibrated_loss(network, dim))(network.parameters)
        expected = -gradient[:, None] * (rows != 0)
        return equal((H @ rows).numpy(), expected.numpy(), (H.abs() @ rows.abs()).max().item())

    def nullity(self, network: Network, dim: int) -> Outcome:
        """At a critical point: the targets are those of what the network puts out."""
        output = replace(network, weights=tuple(self.weights(weight, dim) for weight in network.weights)).output()
        taught = replace(network, targets=LINKS[network.criterion](output))
        found = hessian_kappa(hessian(self.equilibrated_loss(taught, dim))(taught.parameters))
        rows = len(scale_directions(network, dim))
        if not found.resolved:
            return Outcome("unresolved", reason="the rank of a Hessian is unresolved")
        return Outcome("holds" if found.nullity >= rows else "violated", rows / max(found.nullity, 0.5))

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """Linear networks with small integer weights whose rows have integer norms, so that all is rational."""
        wanted = {
            self.claims[0].name: LinearNetwork.hessian_through,
            self.claims[1].name: LinearNetwork.hessian_at_equilibrated,
        }
        for network in random_linear_networks(seed):
            for name, reading in list(wanted.items()):
                found = certified(name, network, reading(network))
                if found is not None:
                    del wanted[name]
                    yield found
            if not wanted:
                break
        yield frozen_counterexample(self.claims[2].name, seed)


def scale_directions(network: Network, dim: int) -> Tensor:
    """w_r in the place of its row, zero elsewhere, for all rows of all layers: (rows, parameters)."""
    directions = []
    for layer, weight in enumerate(network.weights):
        for row in range(weight.shape[1 - dim]):
            if dim == 0 and row == 0:  # the biases
                continue
            only = [torch.zeros_like(other) for other in network.weights]
            place = (slice(None), row) if dim == 0 else (row, slice(1, None))
            only[layer][place] = weight[place]
            directions.append(torch.cat([part.flatten() for part in only]))
    return torch.stack(directions)


def compared(after: ConditionNumber, before: ConditionNumber) -> Outcome:
    """κ of one over κ of the other, with the inertia of both as the reason."""
    for found in (before, after):
        if not found.resolved:
            return Outcome("unresolved", reason="the rank of a Hessian is unresolved")
        if found.nullity:
            return Outcome("not-applicable", reason="a Hessian has not full rank")
    outcome = decided(after.lower / before.upper, after.upper / before.lower)
    signs = ["indefinite" if 0 < found.negative < found.rank else "definite" for found in (before, after)]
    return replace(outcome, reason=f"{outcome.status}: H {signs[0]}, {signs[1]} once equilibrated")


def certified(name: str, network: LinearNetwork, after: np.ndarray) -> Counterexample | None:
    """κ of two Hessians in exact arithmetic, if floating-point numbers say that it is worth the time."""
    before = network.hessian()
    values = [np.abs(np.linalg.eigvalsh(H.astype(float))) for H in (before, after)]
    first, second = (found.max() / max(found.min(), found.max() * EXACT) for found in values)
    # at the most that is told from infinity, either is as good as singular
    if max(first, second) >= 1 / EXACT or second < CLEAR * first:
        return None
    low, high = exact.kappa_absolute(after.tolist())[0], exact.kappa_absolute(before.tolist())[1]
    if low <= high:
        return None
    negative = [exact.below(H.tolist(), Fraction(0)) for H in (before, after)]
    text = (
        f"κ ≥ {float(low):.6f} equilibrated, ≤ {float(high):.6f} before ({negative[1]} and {negative[0]} of "
        f"{len(before)} eigenvalues negative), for ½ ‖XWV − Y‖²: rows of W, V, X, Y"
    )
    return Counterexample(name, [*network.W, *network.V, *network.X, *network.Y], text, float(low / high))


def frozen_counterexample(name: str, seed: int) -> Counterexample:
    """A linear layer with ½ ‖Wᵀx − y‖²: H has XᵀX for each unit, and E XᵀX E with E frozen."""
    rng = np.random.default_rng(seed)
    while True:
        W, X = rng.integers(-3, 4, (2, 2)), rng.integers(-3, 4, (4, 2))
        if np.linalg.matrix_rank(X) < 2 or not W.any(1).all():
            continue
        # κ(E XᵀX E) is that of the pencil (XᵀX, E⁻²)
        G, squares = exact.gram(X.tolist()), [Fraction(int(square)) for square in (W**2).sum(1)]
        low, high = exact.kappa_squared(G, metric=squares)[0], exact.kappa_squared(G)[1]
        if low > Fraction(CLEAR) * high:
            text = f"κ ≥ {float(low):.6f} with E frozen, ≤ {float(high):.6f} before, for ½ ‖Wᵀx − y‖²: rows of W, of X"
            return Counterexample(name, [*W.tolist(), *X.tolist()], text, float(low / high))

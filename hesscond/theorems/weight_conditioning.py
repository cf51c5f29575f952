"""WC: equilibrated matrices (Theorem 1, Proposition 1), an equilibrated network's Hessian (Theorem 2), descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian

from hesscond.hessians import HessianOperator
from hesscond.scaling import optimal
from hesscond.spectra import ConditionNumber
from hesscond.theorems import base, exact, matrices, networks

#: Equilibration of the sides that `optimal_diagonal_scaling` scales.
EQUILIBRATED: dict[optimal.Side, Callable[[np.ndarray], np.ndarray]] = {
    "row": matrices.equilibrated,
    "column": lambda A: matrices.equilibrated(A.T).T,
    # rows first, then the columns of what that gives
    "both": lambda A: matrices.equilibrated(matrices.equilibrated(A).T).T,
}


def row_weights(A: np.ndarray) -> list[Fraction]:
    """E² of an integer matrix whose rows are not zero."""
    return [Fraction(1, int(row @ row)) for row in A]


def column_squares(A: np.ndarray) -> list[Fraction]:
    """Squared norms of the columns of EA, for an integer A whose rows are not zero."""
    weights = row_weights(A)
    return [sum((int(a) ** 2 * w for a, w in zip(column, weights, strict=True)), Fraction(0)) for column in A.T]


def beaten(
    claim: str, A: np.ndarray, side: optimal.Side, P: np.ndarray, Q: np.ndarray, left: str, right: str
) -> base.Counterexample | None:
    """Counterexample if κ(EA), or κ(EAF), exceeds κ(P^½AQ^½) for diagonals P, Q of integers."""
    rows = A.tolist()
    return matrices.larger(
        claim,
        A,
        (EQUILIBRATED[side](A), exact.gram(rows, row_weights(A)), column_squares(A) if side == "both" else None),
        (
            np.sqrt(P)[:, None] * A * np.sqrt(Q),
            exact.gram(rows, [Fraction(int(p)) for p in P]),
            [Fraction(1, int(q)) for q in Q],
        ),
        left,
        right,
    )


def transposed(example: base.Counterexample, claim: str, *words: tuple[str, str]) -> base.Counterexample:
    """The same counterexample for columns, with other words for the scalings."""
    text = example.text
    for before, after in words:
        text = text.replace(before, after)
    return replace(example, claim=claim, matrix=np.transpose(example.matrix).tolist(), text=text)


def whole(scaling: np.ndarray) -> np.ndarray:
    """Integers up to 100 next to multiples of the squares of a scaling: their roots scale rationally."""
    return np.maximum(1, np.round(100 * scaling**2 / (scaling**2).max())).astype(int)


def diagonal(weights: np.ndarray) -> str:
    """Text of the diagonal matrix of the roots of ``weights``."""
    return f"diag({', '.join(f'√{weight}' for weight in weights)})"


@base.register
class WeightConditioningTheorem1(base.LayerStatement):
    """Equilibration is optimal among diagonal scalings."""

    id = "wc-theorem-1"
    title = "equilibration is the optimal diagonal scaling"
    source = "WC, Theorem 1"
    text = (
        "κ(EA) ≤ κ(PA) for every diagonal P, without the factor √m of Van der Sluis. False from three rows on, where "
        "equilibration of a Gaussian matrix is almost always strictly worse than the optimal scaling; true for two "
        "rows: the eigenvalues of their Gram matrix have the smallest ratio if both have the same norm. Said to hold "
        "for columns and for rows, then columns, too: the same is true of columns, and of both it is false from 2×2 "
        "on, where the rows are not of norm 1 any more once the columns are. True for κ_∞ and rows of equal 1-norm, as "
        "‖PA‖_∞ = max |p_i|‖a_i‖₁ and ‖(E₁A)⁻¹‖_∞ ≤ max |p_i|‖a_i‖₁ · ‖(PA)⁻¹‖_∞."
    )
    hypotheses = ("A has full rank", "A is square (κ_∞)")
    claims = (
        base.Claim("two rows", "κ(EA) ≤ κ(PA), A with 2 rows", True),
        base.Claim("three rows or more", "κ(EA) ≤ κ(PA)", False),
        base.Claim("two columns", "κ(AF) ≤ κ(AQ), A with 2 columns", True),
        base.Claim("three columns or more", "κ(AF) ≤ κ(AQ)", False),
        base.Claim("row-column", "κ(EAF) ≤ κ(PAQ), F for the columns of EA", False),
        base.Claim("κ_∞", "κ_∞(E₁A) ≤ κ_∞(PA), rows of E₁A of 1-norm 1", True, published=False),
    )
    trials = 60
    inputs = False

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Two rows against random scalings, more against the best one; so for columns, and for both."""
        outcomes = []
        sides: tuple[optimal.Side, ...] = ("row", "column")
        for side in sides:
            two = matrices.random_matrix(rng, 2, matrices.random_size(rng))
            other = two / matrices.row_norms(two)[:, None] * 10.0 ** rng.uniform(-2, 2, (2, 1))
            matrix = matrices.random_matrix(rng, max(3, matrices.random_size(rng, 40)), matrices.random_size(rng, 40))
            if side == "column":
                two, other, matrix = two.T, other.T, matrix.T
            outcomes += [self.compare(side, two, other), self.compare(side, matrix)]
        n = matrices.random_size(rng, BOTH)
        A = matrices.random_matrix(rng, n, n)
        near = 10.0 ** (rng.uniform(0, 1) * rng.uniform(-1, 1, (n, 1))) * rng.choice([-1, 1], (n, 1))
        return [*outcomes, self.compare("both", A), self.in_max_norm(A, near * self.equal_sums(A))]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The paper's W, inputs × outputs, against its best scalings."""
        W = layer.weight.T
        outcomes, (rows, columns, both) = [], (self.compare(side, W) for side in EQUILIBRATED)
        for outcome, count, what in zip((rows, columns), W.shape, ("rows", "columns"), strict=True):
            nothing = base.not_applicable(f"W has {'more than' if count > 2 else 'no more than'} two {what}")
            outcomes += [nothing, outcome] if count > 2 else [outcome, nothing]
        return [*outcomes, both, self.in_max_norm(W, W)]

    def equal_sums(self, A: np.ndarray) -> np.ndarray:
        """E₁A: rows of 1-norm 1, where they are not zero."""
        return A / np.maximum(np.abs(A).sum(1, keepdims=True), np.finfo(float).tiny)

    def in_max_norm(self, A: np.ndarray, other: np.ndarray) -> base.Outcome:
        """κ_∞(E₁A) over that of another scaling."""
        if len(A) != A.shape[1]:
            return base.not_applicable("A is not square")
        least, kappa = (float(np.linalg.cond(scaled, np.inf)) for scaled in (self.equal_sums(A), other))
        rounding = A.size * base.ALLOWED * kappa
        return base.decided(least / kappa, least / kappa, 1 + rounding) if rounding < base.SHARE else base.UNRESOLVED

    def compare(self, side: optimal.Side, A: np.ndarray, scaled: np.ndarray | None = None) -> base.Outcome:
        """κ of the equilibrated A over κ of another scaling, by default the best."""
        if scaled is None:
            best = optimal.optimal_diagonal_scaling(A, side=side)
            scaled = best.row[:, None] * A * best.column
        return base.decided(*(matrices.kappa(EQUILIBRATED[side](A)) / matrices.kappa(scaled)))

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """3×3 matrices of small integers, and integer weights p_i², q_j² that beat equilibration."""
        rows = matrices.first(self.beaten_by_row(A) for A in matrices.integer_matrices(seed, 3, 3))
        yield rows
        yield transposed(rows, self.claims[3].name, ("EA", "AF"), ("PA", "AQ"), ("P =", "Q ="))
        yield matrices.first(self.beaten_in_both(A) for A in matrices.integer_matrices(seed, 3, 3))

    def beaten_by_row(self, A: np.ndarray) -> base.Counterexample | None:
        """Counterexample for row equilibration."""
        P = whole(optimal.optimal_diagonal_scaling(A, side="row").row)
        return beaten(self.claims[1].name, A, "row", P, np.ones(3), "κ(EA)", f"κ(PA) for P = {diagonal(P)}")

    def beaten_in_both(self, A: np.ndarray) -> base.Counterexample | None:
        """Counterexample for equilibration of rows, then columns."""
        best = optimal.optimal_diagonal_scaling(A, side="both")
        P, Q = whole(best.row), whole(best.column)
        other = f"κ(PAQ) for P = {diagonal(P)}, Q = {diagonal(Q)}"
        return beaten(self.claims[4].name, A, "both", P, Q, "κ(EAF)", other)


@base.register
class WeightConditioningProposition1(base.LayerStatement):
    """Equilibration never makes a weight matrix worse."""

    id = "wc-proposition-1"
    title = "equilibration improves every matrix"
    source = "WC, Proposition 1"
    text = (
        "κ(EW) ≤ κ(W). True for two rows; false for 5 to 8 % of square Gaussian matrices from 3 × 3 on, and for 8 % "
        "(40 × 20) to 27 % (two columns) of tall ones. The factor is at most √m (Van der Sluis), and can approach √(m "
        "− 1). Said to hold for columns and for rows, then columns, too: also false; the factor is at most √(mn)."
    )
    hypotheses = ("W has full rank",)
    claims = (
        base.Claim("improves", "κ(EW) ≤ κ(W)", False),
        base.Claim("within √m", "κ(EW) ≤ √m κ(W)", True),
        base.Claim("columns", "κ(WF) ≤ κ(W)", False),
        base.Claim("row-column", "κ(EWF) ≤ κ(W), F for the columns of EW", False),
        base.Claim("row-column within √(mn)", "κ(EWF) ≤ √(mn) κ(W)", True),
    )
    inputs = False

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        return self.check(matrices.random_matrix(rng, matrices.random_size(rng), matrices.random_size(rng)))

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The paper's W, inputs × outputs."""
        return self.check(layer.weight.T)

    def check(self, W: np.ndarray) -> Sequence[base.Outcome]:
        """The outcomes of all claims for W."""
        before = matrices.kappa(W)
        rows, columns, both = (matrices.kappa(scaled(W)) / before for scaled in EQUILIBRATED.values())
        return [
            base.decided(*rows),
            base.decided(*rows, len(W) ** 0.5),
            base.decided(*columns),
            base.decided(*both),
            base.decided(*both, W.size**0.5),
        ]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """The first 3×3 matrices of small integers, and for columns its transpose."""

        def search(claim: str, side: optimal.Side, name: str) -> base.Counterexample:
            candidates, ones = matrices.integer_matrices(seed, 3, 3), np.ones(3)
            return matrices.first(beaten(claim, A, side, ones, ones, name, "κ(W)") for A in candidates)

        rows = search("improves", "row", "κ(EW)")
        yield rows
        yield transposed(rows, "columns", ("EW", "WF"))
        yield search("row-column", "both", "κ(EWF)")


#: Rows of two integers of integer norm, up to order and signs.
ROWS = ((3, 4), (5, 12), (8, 15), (6, 8), (7, 24))
#: Largest order of matrices that are scaled from both sides.
BOTH = 12
#: Samples of the exact counterexamples.
SAMPLES = 6


def rational(A: np.ndarray) -> np.ndarray:
    """An array of `fractions.Fraction`."""
    return np.array([[Fraction(entry) for entry in row] for row in A.tolist()], dtype=object)


def layer_hessians(W: np.ndarray, X: np.ndarray, Y: np.ndarray, *, columns: bool) -> tuple[np.ndarray, np.ndarray]:
    """Hessians of ½ ‖XW − Y‖² in W, biases first, and through E(W)W, or E(W)WF(W) where F = 1, of the other rows."""
    norms = [math.isqrt(int(row @ row)) for row in W[1:]]
    U = W[1:] / np.array(norms)[:, None]
    H = np.kron(X.T @ X, np.eye(W.shape[1], dtype=int))
    derivatives = (X.T @ (X @ np.vstack([W[:1], U]) - Y)).ravel(), H
    indices = np.arange(W.size).reshape(W.shape)[1:]
    if columns:
        derivatives = through_norms(derivatives, list(zip(indices.T, U.T, [1] * len(U.T), strict=True)))
    return H, through_norms(derivatives, list(zip(indices, U, norms, strict=True)))[1]


def through_norms(
    derivatives: tuple[np.ndarray, np.ndarray], parts: list[tuple[np.ndarray, np.ndarray, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian in w of a loss at u = w/‖w‖ in some parts, each with its indices, u and ‖w‖.

    JᵀHJ and ∇²(uᵀg) for each with the gradient g in u: J = (I − uuᵀ)/‖w‖ and ∇²(uᵀg) = −(g⊥uᵀ + u g⊥ᵀ +
    uᵀg (I − uuᵀ))/‖w‖², g⊥ = g − (uᵀg) u.
    """
    gradient, H = derivatives
    J, curvature = np.eye(len(H), dtype=int).astype(gradient.dtype), np.zeros_like(H, dtype=gradient.dtype)
    for indices, u, length in parts:
        block = np.ix_(indices, indices)
        along = u @ gradient[indices]
        across = gradient[indices] - along * u
        projection = np.eye(len(u), dtype=int) - np.multiply.outer(u, u)
        mixed = np.multiply.outer(across, u)
        J[block] = projection / length
        curvature[block] = -(mixed + mixed.T + along * projection) / length**2
    return J.T @ gradient, J.T @ H @ J + curvature


def rectified_hessians(*parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hessians of ½ Σ (v relu(wx + b) + c − y)² in b, w, c and v at [b; w], [c; v], and at [b; ±1], [c; ±1]."""
    hessians, (x, y) = [], parts[2:]
    for (b, w), (c, v) in (parts[:2], [np.vstack([part[:1], np.sign(part[1:])]) for part in parts[:2]]):
        active = (w * x + b > 0).astype(int)
        h = active * (w * x + b)
        J, bent = np.hstack([v * active, v * active * x, x**0, h]), active * (v * h + c - y)
        H = J.T @ J
        H[:2, 3] += np.hstack([bent, bent * x]).sum(0)
        H[3, :2] = H[:2, 3]
        hessians.append(H)
    return hessians[0], hessians[1]


def random_layers(seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Small integers W, X and Y of a layer of two inputs and units with biases; the columns of EW have norm 1, too."""
    rng = np.random.default_rng(seed)
    while True:
        row = rng.permutation(ROWS[rng.integers(len(ROWS))])
        rows = np.vstack([row, rng.integers(1, 4) * row[::-1]]) * rng.choice([-1, 1], (2, 2))
        X = np.hstack([np.ones((SAMPLES, 1), dtype=int), rng.integers(-3, 4, (SAMPLES, 2))])
        yield np.vstack([rng.integers(-3, 4, 2), rows]), X, rng.integers(-9, 10, (SAMPLES, 2))


def random_units(seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """[b; w], [c; v], x and y of a rectified unit, small integers; the pre-activations are not zero, for w = ±1 too."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.integers(-3, 4, (SAMPLES, 1))
        (b, w, c), v = rng.integers((-3, 2, -3), (4, 4, 4)), rng.choice([-1, 1])
        if (w * x + b).all() and (x + b).all():
            y = v * np.maximum(w * x + b, 0) + c + rng.integers(-2, 3, (SAMPLES, 1))
            yield np.array([[b], [w]]), np.array([[c], [v]]), x, y


#: Eigenvalues below this share of the largest are not worth exact arithmetic.
EXACT = 1e-6
#: Dimensions along which norms are taken: each input's weights, then each unit's.
ROW_COLUMN = (0, 1)
#: Largest order of a layer's Hessian that is formed along a study, and of order times samples: some seconds each.
FORMED, PRODUCTS = 2000, 2_000_000
#: Products that the size of the largest eigenvalue is taken from.
POWER = 4


def frozen_factors(W: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Factors of the entries of W that E, or E and F, are once they are held fixed."""
    factors = torch.ones_like(W, dtype=torch.float64)
    for dim in dims:
        factors = factors / own_norms(W * factors, dim)
    return factors


@base.register
class WeightConditioningTheorem2(base.LayerStatement):
    """Equilibrating the weights of a network improves κ of its Hessian."""

    id = "wc-theorem-2"
    title = "the equilibrated network's Hessian is better conditioned"
    source = "WC, Theorem 2"
    text = (
        "κ(H of the equilibrated network) ≤ κ(H) wherever both have full rank; κ by |λ|. False in every reading: (a) H "
        "in W through W → E(W)W, (b) H at the point EW, (c) H in W with E held fixed. In (a) H is never positive "
        "definite: the loss does not change with the length of a row w_r, which gives H w_r = −∇_r L, so H is "
        "indefinite or singular off critical points, and singular at them, with a null vector for each row. Rows are "
        "those of the paper's W (inputs × units), or of its transpose. The same with rows, then columns, of which it "
        "is said to hold too: the loss does not change with the length of a row. There are biases, as in the paper, in "
        "the trials and in the exact counterexamples of (a) and (b), whose H is positive definite, in (b) after the "
        "equilibration, too. The factor P_k of W_k, on the left, is printed with W_k's own size, n_(k−1) × n_k. Of a "
        "network in training one layer is followed."
    )
    hypotheses = ("both Hessians have full rank", "no row is zero", "a critical point (nullity)")
    claims = (
        base.Claim("(a) through E(W)W", "κ(∇²_W L(E(W)W)) ≤ κ(∇²L(W))", False),
        base.Claim("(b) at the point EW", "κ(∇²L(EW)) ≤ κ(∇²L(W))", False),
        base.Claim("(c) E frozen", "κ(E ∇²L(EW) E) ≤ κ(∇²L(W))", False),
        base.Claim("scale identity", "H w_r = −∇_r L in reading (a)", True),
        base.Claim("nullity", "nullity of H ≥ number of rows at critical points in reading (a)", True),
        base.Claim("(a) row-column", "κ(∇²_W L(E(W)WF(W))) ≤ κ(∇²L(W))", False),
        base.Claim("(b) row-column", "κ(∇²L(EWF)) ≤ κ(∇²L(W))", False),
        base.Claim("(c) row-column", "κ of ∇²_W L(EWF), E and F frozen, ≤ κ(∇²L(W))", False),
        base.Claim("size of P_k", "P_k W_k is defined for P_k of n_(k−1) × n_k, as printed", False),
    )
    trials = 60
    inputs = False

    def equilibrated(self, W: Tensor, dims: tuple[int, ...]) -> Tensor:
        """E(W) W, or E(W) W F(W)."""
        for dim in dims:
            W = W / own_norms(W, dim)
        return W

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A network of one or two layers, equilibrated along one of two dimensions, and along both."""
        sizes = rng.integers(2, 5, rng.integers(2, 4)).tolist()
        network = networks.random_network(rng, sizes, int(rng.integers(20, 60)))
        dims = (int(rng.integers(2)),)
        before = networks.hessian_kappa(hessian(networks.flat_loss(network))(network.parameters))
        through = [hessian(self.equilibrated_loss(network, axes))(network.parameters) for axes in (dims, ROW_COLUMN)]
        single, both = (
            [compared(networks.hessian_kappa(H), before) for H in (first, *self.at_equilibrated(network, axes))]
            for first, axes in zip(through, (dims, ROW_COLUMN), strict=True)
        )
        # what is invariant in the one, or in both
        number = int(rng.integers(2))
        chosen = (dims, ROW_COLUMN)[number]
        critical = [self.identity(network, chosen, through[number]), self.nullity(network, chosen)]
        return [*single, *critical, *both, base.Outcome("holds" if sizes[0] == sizes[1] else "violated")]

    def at_equilibrated(self, network: networks.Network, dims: tuple[int, ...]) -> list[Tensor]:
        """The Hessians at the point EW, and in W with E held fixed."""
        factors = [networks.extended(frozen_factors(weight[:, 1:], dims)) for weight in network.weights]
        at = [weight * factor for weight, factor in zip(network.weights, factors, strict=True)]
        new_network = replace(network, weights=tuple(at))

        def frozen(theta: Tensor) -> Tensor:
            return network.loss([weight * factor for weight, factor in zip(network.split(theta), factors, strict=True)])

        return [hessian(networks.flat_loss(new_network))(new_network.parameters), hessian(frozen)(network.parameters)]

    def moved(self, network: networks.Network, theta: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        """[b, E(W) W], or [b, E(W) W F(W)], of all layers, from all weights in one vector."""
        return tuple(
            torch.cat([weight[:, :1], self.equilibrated(weight[:, 1:], dims)], 1) for weight in network.split(theta)
        )

    def equilibrated_loss(self, network: networks.Network, dims: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """The loss in W through E(W) W in all layers, of all weights in one vector."""
        return lambda theta: network.loss(self.moved(network, theta, dims))

    def identity(self, network: networks.Network, dims: tuple[int, ...], H: Tensor) -> base.Outcome:
        """H w_r = −∇_r L for all rows at once, one column for each; of both sides the first is invariant."""
        rows = scale_directions(network, dims[0]).T
        gradient = grad(self.equilibrated_loss(network, dims))(network.parameters)
        expected = -gradient[:, None] * (rows != 0)
        return base.equal((H @ rows).numpy(), expected.numpy(), (H.abs() @ rows.abs()).max().item())

    def nullity(self, network: networks.Network, dims: tuple[int, ...]) -> base.Outcome:
        """Nullity of the Hessian at a critical point, at which the targets are the outputs of the network."""
        output = replace(network, weights=self.moved(network, network.parameters, dims)).output()
        taught = replace(network, targets=networks.LINKS[network.criterion](output))
        kappa = networks.hessian_kappa(hessian(self.equilibrated_loss(taught, dims))(taught.parameters))
        rows = len(scale_directions(network, dims[0]))
        if not kappa.resolved:
            return base.Outcome("unresolved", reason="the rank of a Hessian is unresolved")
        return base.Outcome("holds" if kappa.nullity >= rows else "violated", rows / max(kappa.nullity, 0.5))

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """Check the claims on the Hessian of one layer, with its trained weight W alone equilibrated."""
        network = layer.network
        assert network is not None
        if network.weight is None:
            reason = "the layer's weight is computed from other parameters: follow a method that trains it itself"
            return [base.not_applicable(reason)] * len(self.claims)
        nothing = base.not_applicable("no critical point is known here")
        before, (units, inputs) = network.reweighted(network.weight), network.weight.shape
        defined = base.Outcome("holds" if units == inputs else "violated")
        identity = self.observed_identity(network, network.weight)
        if (undecided := singular(layer, before)) is not None:
            return [*[undecided] * 3, identity, nothing, *[undecided] * 3, defined]
        plain = observed_kappa(before)
        rows, both = (
            [compared(reading, plain) for reading in self.readings(network, network.weight, dims)]
            for dims in (ROW_COLUMN[:1], ROW_COLUMN)
        )
        return [*rows, identity, nothing, *both, defined]

    def readings(self, network: networks.LayerNetwork, weight: Tensor, dims: tuple[int, ...]) -> list[ConditionNumber]:
        """κ in the three readings of a layer with weight W."""
        factors = frozen_factors(weight, dims)
        at = network.reweighted(weight * factors)
        scales = torch.cat([factors.flatten(), factors.new_ones(at.order - factors.numel())]).cpu()
        H, through = at.to_dense().cpu(), network.reweighted(weight, lambda W: self.equilibrated(W, dims))
        error = max(networks.ROUND_OFF, at.rounding) * float(H.norm())
        return [
            observed_kappa(through),
            networks.hessian_kappa(H, error),
            networks.hessian_kappa(scales[:, None] * H * scales, error * float(scales.max()) ** 2),
        ]

    def observed_identity(self, network: networks.LayerNetwork, weight: Tensor) -> base.Outcome:
        """H w = −∇ on the rows, for random multiples of them at once: one product."""
        H = network.reweighted(weight, lambda W: self.equilibrated(W, ROW_COLUMN[:1]))
        multiples = torch.randn(
            weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
        )
        rows, rest = weight.double() * multiples.to(weight.device), H.point.new_zeros(H.order - weight.numel())
        slopes = H.gradient[: weight.numel()].view_as(weight) * multiples.to(weight.device)
        v, expected = (torch.cat([part.flatten(), rest]) for part in (rows, -slopes))
        allowed = max(base.ALLOWED, H.rounding)
        return base.equal((H @ v).cpu().numpy(), expected.cpu().numpy(), largest(H) * float(v.norm()), allowed=allowed)

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Small integers for which all is rational: a dense layer, a rectified unit, for (c) a layer without biases."""
        layer, unit = "½ ‖XW − Y‖², biases in row 1: W, X, Y", "½ Σ (v relu(wx + b) + c − y)²: b, w, c, v, x, y"
        for columns, (through, at, frozen) in enumerate((self.claims[:3], self.claims[5:8])):
            hessians = partial(layer_hessians, columns=bool(columns))
            yield matrices.first(certified(through.name, hessians, parts, 1, layer) for parts in random_layers(seed))
            # E makes w and v ±1, and so F is 1
            units = random_units(seed)
            yield matrices.first(certified(at.name, rectified_hessians, parts, 2, unit) for parts in units)
            yield frozen_counterexample(frozen.name, seed, columns=bool(columns))
        text = "P_k of 1 × 2 has 2 columns, W_k 1 row: n_(k−1), n_k"
        yield base.Counterexample(self.claims[8].name, [[1, 2]], text, 2.0)


def own_norms(weight: Tensor, dim: int) -> Tensor:
    """Norms along a dimension, which is kept; 1 for what is zero."""
    zero = (weight == 0).all(dim, keepdim=True)
    # the norm has no derivative at zero
    norms = torch.where(zero, torch.ones_like(weight), weight).norm(dim=dim, keepdim=True)
    return torch.where(zero, torch.ones_like(norms), norms)


def largest(H: HessianOperator) -> float:
    """The size of the largest eigenvalue, from below."""
    v = torch.randn(H.order, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu").to(H.device)
    size = 0.0
    for _ in range(POWER):
        v = H @ (v / v.norm())
        size = max(size, float(v.norm()))
        if size == 0:
            break
    return size


def singular(observation: base.Observation, H: HessianOperator) -> base.Outcome | None:
    """Why a layer's Hessian has not full rank, or is not formed; None: it may have."""
    constant = observation.weight.shape[1] - len(observation.mu)
    if constant and H.order > observation.weight.size:
        which = "some inputs" if len(observation.mu) else "all inputs"
        return base.not_applicable(f"H is singular: {which} of the layer are constant")
    if observation.samples * len(observation.weight) < H.order:
        return base.not_applicable("H is singular: fewer samples than weights of a unit")
    if not sees_common_change(H, observation.weight.shape):
        return base.not_applicable("H is singular: no loss sees what changes all units alike")
    return too_large(H, observation.samples)


def too_large(H: HessianOperator, samples: int) -> base.Outcome | None:
    """Outcome where a layer's Hessian is not formed, which takes too long; None: it is formed."""
    if H.order <= FORMED and H.order * samples <= PRODUCTS:
        return None
    limits = f"H is formed up to {FORMED} and {PRODUCTS} of both together"
    return base.Outcome("unresolved", reason=f"{H.order} weights, {samples} samples: {limits}")


def sees_common_change(H: HessianOperator, shape: tuple[int, ...]) -> bool:
    """Whether the loss sees the same change of all units, (units, inputs) and biases: behind a softmax it does not."""
    change = torch.randn(shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64, device="cpu")
    rest = torch.ones(H.order - shape[0] * shape[1], dtype=torch.float64, device="cpu")
    v = torch.cat([change.expand(shape).flatten(), rest]).to(H.device)
    return float((H @ v).norm()) > max(base.ALLOWED, H.rounding) * largest(H) * float(v.norm())


def observed_kappa(H: HessianOperator) -> ConditionNumber:
    """κ of an operator, from its products with all columns of the identity."""
    dense = H.to_dense().cpu()
    return networks.hessian_kappa(dense, max(networks.ROUND_OFF, H.rounding) * float(dense.norm()))


def scale_directions(network: networks.Network, dim: int) -> Tensor:
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


def compared(after: ConditionNumber, before: ConditionNumber) -> base.Outcome:
    """κ of one over κ of the other, with the inertia of both as the reason."""
    for kappa in (before, after):
        if not kappa.resolved:
            return base.Outcome("unresolved", reason="the rank of a Hessian is unresolved")
        if kappa.nullity:
            return base.not_applicable("a Hessian has not full rank")
    outcome = base.decided(after.lower / before.upper, after.upper / before.lower)
    signs = ["indefinite" if 0 < condition.negative < condition.rank else "definite" for condition in (before, after)]
    return replace(outcome, reason=f"{outcome.status}: H {signs[0]}, {signs[1]} once equilibrated")


def certified(
    name: str, hessians: Callable[..., Sequence[np.ndarray]], parts: Sequence[np.ndarray], definite: int, loss: str
) -> base.Counterexample | None:
    """κ of two Hessians, the first ``definite`` of them definite; exactly, if floating-point numbers promise it."""
    values = [np.linalg.eigvalsh(H) for H in hessians(*parts)]
    first, second = (abs(spectrum).max() / max(abs(spectrum).min(), abs(spectrum).max() * EXACT) for spectrum in values)
    # above this κ, which cannot be distinguished from infinity, the matrix counts as singular
    if max(first, second) >= 1 / EXACT or second < matrices.CLEAR * first or min(map(min, values[:definite])) <= 0:
        return None
    before, after = (rational(H).tolist() for H in hessians(*map(rational, parts)))
    low, high = exact.kappa(after)[0], exact.kappa(before)[1]
    negative = [exact.below(H, Fraction(0)) for H in (before, after)]
    if low <= high or any(negative[:definite]):
        return None
    text = (
        f"κ ≥ {float(low):.6f} equilibrated, ≤ {float(high):.6f} before ({negative[1]} and {negative[0]} of "
        f"{len(before)} eigenvalues negative), for {loss}"
    )
    return base.Counterexample(name, [row for part in parts for row in part.tolist()], text, float(low / high))


def frozen_counterexample(name: str, seed: int, *, columns: bool) -> base.Counterexample:
    """A linear layer with ½ ‖Wᵀx − y‖²: H has XᵀX for each unit, and f² E XᵀX E with E, and f of its column, frozen."""
    rng = np.random.default_rng(seed)
    while True:
        W, X = rng.integers(-3, 4, (2, 2)), rng.integers(-3, 4, (4, 2))
        if np.linalg.matrix_rank(X) < 2 or not W.any(1).all() or not W.any(0).all():
            continue
        # κ(E XᵀX E) is that of the pencil (XᵀX, E⁻²)
        G, squares = exact.gram(X.tolist()), [Fraction(int(square)) for square in (W**2).sum(1)]
        low, high = exact.kappa(G, metric=squares)[0], exact.kappa(G)[1]
        if columns:
            low *= max(column_squares(W)) / min(column_squares(W))
        if low > Fraction(matrices.CLEAR) * high:
            what = "E, F" if columns else "E"
            bounds = f"κ ≥ {float(low):.6f} with {what} frozen, ≤ {float(high):.6f} before"
            text = f"{bounds}, for ½ ‖Wᵀx − y‖²: rows of W, of X"
            return base.Counterexample(name, [*W.tolist(), *X.tolist()], text, float(low / high))


#: Steps of a descent that converges, and growth up to which one is followed that does not.
FEW, GROWTH = 100, 1e6


@base.register
class QuadraticDescent(base.Statement):
    """Gradient descent on a quadratic function, direction by direction, and on one that is preconditioned."""

    id = "wc-quadratic"
    title = "descent on a quadratic function, direction by direction"
    source = "WC, eqs. (4)-(10) and (13)"
    text = (
        "θ ← θ − ηAθ on ½θᵀAθ, A positive definite, shrinks the component along the eigenvector of σ_i by 1 − ησ_i in "
        "each step, and converges if and only if η < 2/σ₁, unless it starts at no distance from zero along that of σ₁. "
        "True. So does θ ← θ − ηPAθ, with the eigenvalues of P^½AP^½: it is the descent on ½zᵀP^½AP^½z in θ = P^½z. "
        "Their ratio is at most κ(PA): if κ(PA) < κ(A), it is faster at the best η, as the paper says. False as "
        "printed: (7) for any symmetric A of full rank with the singular values σ_i, since the component of an "
        "eigenvalue −σ_i grows by 1 + ησ_i; (8), whose exponent is k + 1; and (13), that PAθ is the gradient of θᵀPAθ: "
        "this is (PA + AP)θ, that of ½θᵀPAθ half of it, and neither is PAθ unless P and A commute."
    )
    hypotheses = ("A is positive definite (ours; not for (7)), P diagonal and positive", "u₁ᵀθ_0 ≠ 0 (step size)")
    claims = (
        base.Claim("per direction", "u_iᵀθ_k = (1 − ησ_i)ᵏ u_iᵀθ_0", True),
        base.Claim("step size", "θ_k → 0 if and only if η < 2/σ₁", True),
        base.Claim("preconditioned", "the same for θ ← θ − ηPAθ, σ_i those of P^½AP^½", True),
        base.Claim("(13) as printed", "∇ θᵀPAθ = PAθ", False),
        base.Claim("(7) as printed", "“per direction” for symmetric A of full rank, σ_i its singular values", False),
        base.Claim("(8) as printed", "u_iᵀθ_k = (1 − ησ_i)ᵏ⁺¹ u_iᵀθ_0", False),
        base.Claim("faster", "κ(P^½AP^½) ≤ κ(PA): if κ(PA) ≤ κ(A), the rate at the best η is no higher", True),
    )
    trials = 100

    def factors(self, eta: float, sigma: np.ndarray) -> np.ndarray:
        """1 − ησ_i."""
        return 1 - eta * sigma

    def longest(self, sigma: np.ndarray) -> float:
        """2/σ₁."""
        return float(2 / sigma.max())

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A matrix of up to thirty rows and a random start, at a step size on either side of the bound."""
        n = matrices.random_size(rng, 30)
        U, sigma = np.linalg.qr(rng.standard_normal((n, n)))[0], 10.0 ** rng.uniform(-3, 3, n)
        A, P, theta = U * sigma @ U.T, 10.0 ** rng.uniform(-1, 1, n), rng.standard_normal(n)
        root, PA = P**0.5, P[:, None] * A
        values, V = np.linalg.eigh(root[:, None] * A * root)
        share = 1 + rng.choice([-1.0, 1.0]) * rng.uniform(0.05, 0.9)
        # PA = P^½ (P^½AP^½) P^−½: its left eigenvectors are P^−½ v
        slope = grad(lambda x: x @ torch.from_numpy(PA) @ x)(torch.from_numpy(theta)).numpy()
        indefinite = U * np.where(sigma == sigma.max(), -sigma, sigma) @ U.T
        factor, other = matrices.kappa(U * sigma**0.5 @ U.T * root), matrices.kappa(PA)
        plain, late = self.directions(rng, A, U, sigma, theta)
        return [
            plain,
            self.converges(A, U, sigma, theta, share),
            self.directions(rng, PA, V / root[:, None], values, theta)[0],
            base.equal(slope, PA @ theta),
            self.directions(rng, indefinite, U, sigma, theta)[0],
            late,
            base.decided(factor.lower**2 / other.upper, factor.upper**2 / other.lower),
        ]

    def directions(
        self, rng: np.random.Generator, A: np.ndarray, left: np.ndarray, sigma: np.ndarray, theta: np.ndarray
    ) -> list[base.Outcome]:
        """Components along the left eigenvectors (columns) of A after k steps, with the exponents k and k + 1."""
        eta, steps, iterate = float(rng.uniform(0.1, 1.2)) * 2 / sigma.max(), int(rng.integers(1, 12)), theta
        size = np.abs(theta)
        for _ in range(steps):
            iterate = iterate - eta * (A @ iterate)
            size = size + eta * (np.abs(A) @ size)
        start, size = left.T @ theta, np.abs(left).T @ size
        return [base.equal(left.T @ iterate, self.factors(eta, sigma) ** k * start, size) for k in (steps, steps + 1)]

    def converges(
        self, A: np.ndarray, U: np.ndarray, sigma: np.ndarray, theta: np.ndarray, share: float
    ) -> base.Outcome:
        """‖θ_k‖ against the slowest rate below the bound, and against its growth above."""
        eta, iterate = share * self.longest(sigma), theta
        along = abs(float(U[:, sigma.argmax()] @ theta)) / float(np.linalg.norm(theta))
        slowest = float(np.abs(1 - eta * sigma).max())
        steps = FEW if share < 1 else int(np.ceil(np.log(GROWTH / along) / np.log(2 * share - 1)))
        for _ in range(steps):
            iterate = iterate - eta * (A @ iterate)
        size = float(np.linalg.norm(iterate) / np.linalg.norm(theta))
        if share > 1:
            return base.decided(1 / size, 1 / size, 2 / GROWTH)
        # no component is left of which more than this could be, and what is rounded
        return base.decided(size, size, min(slowest, 1.0) ** steps * (1 + base.ALLOWED * steps))

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Two variables, all integers, and P twice the identity in its second entry."""
        a, b, c = sorted(int(i) for i in np.random.default_rng(seed).choice(np.arange(1, 9), 3, replace=False))
        # positive definite, since b² < bc < (a + c)(b + c) …
        A, P, theta = [[a + b, b], [b, b + c]], [1, 2], [1, 1]
        step = [P[i] * sum(A[i]) for i in range(2)]
        other = [sum(A[i][j] * P[j] for j in range(2)) for i in range(2)]
        gradient = [s + o for s, o in zip(step, other, strict=True)]
        text = f"the gradient is {tuple(gradient)}, PAθ = {tuple(step)}: rows of A, diagonal of P, θ"
        yield base.Counterexample("(13) as printed", [*A, P, theta], text, float(base.discrepancy(gradient, step)))
        text = "θ_1 = (1/2, 3/2), not (1/2, 1/2), for η = 1/2: rows of A, θ_0"
        yield base.Counterexample("(7) as printed", [[1, 0], [0, -1], [1, 1]], text, 3.0)
        yield base.Counterexample("(8) as printed", [[1], [1]], "θ_1 = 1/2, not 1/4, for η = 1/2: A, θ_0", 2.0)

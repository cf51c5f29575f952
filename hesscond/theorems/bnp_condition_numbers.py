"""κ under equilibration (Van der Sluis), normalized inputs (BNP and PREC, Theorem 4), and of ĤᵀSĤ (Proposition 11)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar

import numpy as np

from hesscond.hessians.factored import FactoredHessian
from hesscond.scaling import optimal_diagonal_scaling
from hesscond.spectra import ConditionNumber
from hesscond.theorems import base, exact, matrices


@base.register
class VanDerSluis(base.LayerStatement):
    """Row and column equilibration is within the square root of their number of the best diagonal scaling."""

    id = "van-der-sluis"
    aliases: ClassVar[Mapping[str, str]] = {"prec-theorem-2": "rows", "bnp-lemma-a1": "columns"}
    title = "equilibration is nearly optimal"
    source = "Van der Sluis 1969; BNP Lemma A1; PREC Theorem 2"
    text = (
        "κ⁺(EA) ≤ √m · min over diagonal D of κ⁺(DA) for a matrix A with m rows, where E makes all rows of norm 1; the "
        "same for columns. True for any rank, rows of zeros left out: with y = argmin ‖EAy‖ / ‖y‖ on the row space, "
        "‖DA‖ ≥ max d_i‖a_i‖ and ‖DAy‖ ≤ max (d_i‖a_i‖) ‖EAy‖, so κ⁺(DA) ≥ 1/σ_min(EA), and ‖EA‖₂ ≤ ‖EA‖_F = √m."
    )
    hypotheses = ("no row (column) of zeros, or these are left out",)
    claims = (
        base.Claim("rows", "κ⁺(EA) ≤ √m · min_D κ⁺(DA)", True),
        base.Claim("columns", "κ⁺(AE) ≤ √n · min_D κ⁺(AD)", True),
    )
    trials = 60

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        A = matrices.random_matrix(rng, matrices.random_size(rng), matrices.random_size(rng))
        return [self.side(A), self.side(A.T)]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The centred inputs of a layer, samples × features; their columns are what BNP equilibrates."""
        if len(layer.centred) < layer.samples:
            rows = base.not_applicable("a triangular factor of the inputs has other rows")
        else:
            rows = self.side(layer.centred)
        return [rows, self.side(layer.centred.T)]

    def side(self, A: np.ndarray) -> base.Outcome:
        """The claim for the rows of A."""
        return nearly_optimal(matrices.kappa(matrices.equilibrated(A)), A)


def nearly_optimal(kappa: matrices.Kappa, A: np.ndarray) -> base.Outcome:
    """κ⁺ ≤ √m · min_D κ⁺(DA), against certified bounds of the minimum on both sides."""
    optimum = optimal_diagonal_scaling(A, side="row")
    return base.decided(kappa.lower / optimum.kappa, kappa.upper / optimum.lower, len(A) ** 0.5)


#: Relative, of the share by which κ must fall.
ROUND_OFF = 1e-12
#: Correlations of up to this are round-off.
UNCORRELATED = 1e-12
#: What is claimed to be equal may exceed its bound by this much.
ATTAINED = 1e-9


def extended(H: np.ndarray) -> np.ndarray:
    """Ĥ = [e, H]."""
    return np.hstack([np.ones((len(H), 1)), H])


def centred(H: np.ndarray) -> np.ndarray:
    """ĤU: the features less their means."""
    return extended(H - H.mean(0))


def normalized(H: np.ndarray) -> np.ndarray:
    """Ĝ = ĤUD: centred, and divided by their standard deviations."""
    return extended((H - H.mean(0)) / H.std(0))


def features(rng: np.random.Generator, samples: int, width: int) -> np.ndarray:
    """Inputs (samples, width) of a layer: any matrix, with means that may be large; no constant feature."""
    H = matrices.random_matrix(rng, samples, width)
    if rng.random() < 0.5:
        H = H + 10.0 ** rng.uniform(-2, 3, width) * rng.standard_normal(width)
    if rng.random() < 0.3:
        H = np.maximum(H, 0.0)
    constant = H.min(0) == H.max(0)
    H[0, constant] += 1.0
    return H


def random_inputs(rng: np.random.Generator, most: int = 60) -> np.ndarray:
    """Inputs (N, n) of up to ``most`` features: more samples than features three times out of four."""
    width = matrices.random_size(rng, most)
    samples = width + 1 + matrices.random_size(rng, 60) if rng.random() < 0.75 else int(rng.integers(2, width + 2))
    return features(rng, samples, width)


def centring(before: matrices.Kappa, after: matrices.Kappa, columns: int) -> tuple[base.Outcome, base.Outcome]:
    """κ⁺(ĤU) over κ⁺(Ĥ): the outcome for full column rank, and that for a smaller rank."""
    ratio = base.decided(*(after / before))
    if before.rank < columns:
        return base.not_applicable("Ĥ has no full column rank"), ratio
    return ratio, base.not_applicable("Ĥ has full column rank")


@base.register
class BNPTheorem4(base.LayerStatement):
    """Centring improves κ, and normalization is nearly optimal among diagonal scalings after it."""

    id = "bnp-theorem-4"
    title = "centring never raises κ (full column rank), and scaling is within √(n+1) of the best"
    source = "BNP, Theorem 4"
    text = (
        "κ(ĤU) ≤ κ(Ĥ), and κ(Ĝ) ≤ √(n+1) min over diagonal D of κ(ĤUD). The first part is true for full column rank, "
        "where σ_max falls and σ_min rises, and fails with N ≤ n samples, the usual mini-batch; the second is "
        "true for any rank if no feature is constant. The first is strict if the mean μ has a part s along the top "
        "eigenvector of the sample covariance, by the factor √(1 + s²/max(1, λ₁)) at least. Not claimed, and false: "
        "κ(Ĝ) ≤ κ(Ĥ)."
    )
    hypotheses = (
        "Ĥ = [e, H] has full column rank (first part, strictness)",
        "no feature is constant",
        "μ is not orthogonal to the top eigenvector of the sample covariance (strictness)",
    )
    claims = (
        base.Claim("centring", "κ(ĤU) ≤ κ(Ĥ), full column rank", True),
        base.Claim("scaling", "κ(Ĝ) ≤ √(n+1) min_D κ(ĤUD)", True),
        base.Claim("both together", "κ(Ĝ) ≤ κ(Ĥ) (not claimed)", False, published=False),
        base.Claim("strict", "κ(ĤU) √(1 + s²/max(1, λ₁)) ≤ κ(Ĥ), s = v₁ᵀμ ≠ 0: κ(ĤU) < κ(Ĥ)", True),
    )
    trials = 60

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        H = random_inputs(rng)
        return self.check(extended(H), centred(H), normalized(H), H.mean(0))

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        return self.check(layer.plain, layer.centred, layer.normalized, layer.mu)

    def check(
        self, before: np.ndarray, centred_inputs: np.ndarray, scaled: np.ndarray, mu: np.ndarray
    ) -> Sequence[base.Outcome]:
        """All claims for Ĥ, ĤU and ĤUD, or their triangular factors, and the means."""
        plain, centred_only, both = matrices.kappa(before), matrices.kappa(centred_inputs), matrices.kappa(scaled)
        full, _ = centring(plain, centred_only, before.shape[1])
        strict = self.strictness(full, centred_only / plain, centred_inputs, mu)
        return [full, nearly_optimal(both, centred_inputs.T), base.decided(*(both / plain)), strict]

    def strictness(
        self, full: base.Outcome, ratio: tuple[float, float], centred_inputs: np.ndarray, mu: np.ndarray
    ) -> base.Outcome:
        """By what centring must lower κ, with the part of μ along v₁; ``ratio`` is κ(ĤU)/κ(Ĥ)."""
        if full.status == "not-applicable":
            return full
        # λ_max(ĤᵀĤ/N) ≥ v₁ᵀ(Σ + μμᵀ)v₁, while that of UᵀĤᵀĤU/N = diag(1, Σ) is max(1, λ₁)
        _, sigma, Vt = np.linalg.svd(centred_inputs[:, 1:] / np.linalg.norm(centred_inputs[:, 0]), full_matrices=False)
        gain = float(Vt[0] @ mu) ** 2 / max(1.0, float(sigma[0]) ** 2)
        if gain <= ROUND_OFF:
            return base.not_applicable("μ is zero or orthogonal to the top eigenvector, to round-off")
        factor = (1 + gain) ** 0.5
        return base.decided(ratio[0] * factor * (1 - ROUND_OFF), ratio[1] * factor * (1 + ROUND_OFF))

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Inputs of mean zero in small integers, so that Ĥ = ĤU; three features: of two, Ĝ is the best scaling."""
        halves = matrices.integer_matrices(seed, 3, 3)
        yield matrices.first(self.refuted(np.vstack([half, -half])) for half in halves)

    def refuted(self, H: np.ndarray) -> base.Counterexample | None:
        """Counterexample to both parts together; κ(Ĝ)² is that of the pencil (ĤᵀĤ, D⁻²), rational where D is not."""
        G, variances = exact.gram(rational(H, 0)), [Fraction(int(v), len(H)) for v in (H**2).sum(0)]
        after, other = (normalized(H), G, [Fraction(1), *variances]), (extended(H), G, None)
        return matrices.larger(self.claims[2].name, H, after, other, "κ(Ĝ)", "κ(Ĥ) = κ(ĤU)")


@base.register
class PRECTheorem4(base.LayerStatement):
    """The first part of BNP's Theorem 4 as PREC has it, and what becomes of it without the assumption on the rank."""

    id = "prec-theorem-4"
    title = "centring the inputs never raises κ (full row rank)"
    source = "PREC, Theorem 4"
    text = (
        "κ([eᵀ; X − μeᵀ]) ≤ κ([eᵀ; X]) for inputs X with one column a sample, μ = Xe/N. The theorem itself has no "
        "assumption on the rank, but the paper assumes throughout that the Hessian at the minimum is positive "
        "definite, which takes full row rank of [eᵀ; X], as BNP's Theorem 4 says. Then it is true. Without full row "
        "rank, with N ≤ n samples, centring may raise κ⁺, also where all columns are independent."
    )
    hypotheses = ("[eᵀ; X] has full row rank, so N > n (first claim)", "any rank (second claim)")
    claims = (
        base.Claim("N > n, full rank", "κ([eᵀ; X − μeᵀ]) ≤ κ([eᵀ; X])", True),
        base.Claim("smaller rank, as N ≤ n", "κ⁺([eᵀ; X − μeᵀ]) ≤ κ⁺([eᵀ; X])", False, published=False),
    )
    trials = 60

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        H = random_inputs(rng)
        before = extended(H)
        return centring(matrices.kappa(before), matrices.kappa(centred(H)), before.shape[1])

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        return centring(matrices.kappa(layer.plain), matrices.kappa(layer.centred), layer.plain.shape[1])

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Three samples of three features; κ⁺² is that of the Gram matrix of the rows."""
        yield matrices.first(self.refuted(H) for H in matrices.integer_matrices(seed, 3, 3))

    def refuted(self, H: np.ndarray) -> base.Counterexample | None:
        """Counterexample for a smaller rank, of independent rows."""
        gram, other = (exact.gram(list(zip(*rational(H, centre), strict=True))) for centre in (1, 0))
        claim = self.claims[1].name
        return matrices.larger(claim, H, (centred(H), gram, None), (extended(H), other, None), "κ⁺(ĤU)", "κ⁺(Ĥ)")


@base.register
class PRECInputScaling(base.Statement):
    """Effect of standardization and min-max scaling on the extended inputs."""

    id = "prec-input-scaling"
    title = "standardized and min-max scaled inputs"
    source = "PREC, input normalization"
    text = (
        "For inputs X with one column a sample and X_e = [eᵀ; X]: standardization makes the first row orthogonal to "
        "the others and all rows of norm √N, min-max scaling to [0, 1] makes all rows of norm √N at most, with "
        "variances of ¼ at most (Popoviciu) instead of 1. True. That min-max scaling therefore improves κ(X_e) does "
        "not follow and is false: norms of at most √N may be very different, means stay in, and a small κ may grow."
    )
    hypotheses = ("no feature is constant", "[eᵀ; X] has full row rank (κ)")
    claims = (
        base.Claim("standardization", "X_e X_eᵀ has zeros beside N in its first row, and N on its diagonal", True),
        base.Claim("min-max", "‖x_i‖ ≤ √N for every row of X_e", True),
        base.Claim("min-max improves κ", "κ([eᵀ; X']) ≤ κ([eᵀ; X]) for X' = (X − min)/(max − min)", False),
        base.Claim("min-max variance", "Var(x'_i) ≤ ¼ for every row x'_i of X'", True, published=False),
    )
    trials = 100

    def standardize(self, H: np.ndarray) -> np.ndarray:
        """Inputs (N, n), one row a sample, as standardization leaves them."""
        return (H - H.mean(0)) / H.std(0)

    def minmax(self, H: np.ndarray) -> np.ndarray:
        """Inputs (N, n) as min-max scaling leaves them."""
        return (H - H.min(0)) / (H.max(0) - H.min(0))

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Any inputs with more samples than features."""
        width = matrices.random_size(rng, 40)
        H = features(rng, width + 1 + matrices.random_size(rng, 60), width)
        N = len(H)
        standardized, scaled = extended(self.standardize(H)), extended(self.minmax(H))
        products = np.column_stack([standardized[:, 0] @ standardized, (standardized**2).sum(0)])
        expected = np.full_like(products, float(N))
        expected[1:, 0] = 0.0
        # a mean is as exact as the features are large
        size = 1 + np.abs(H).max(0) / H.std(0)
        scale = N * np.concatenate([[1.0], size])[:, None]
        norm = float(np.linalg.norm(scaled, axis=0).max()) / N**0.5
        before = matrices.kappa(extended(H))
        if before.rank <= width:
            improves = base.not_applicable("[eᵀ; X] has no full row rank")
        else:
            improves = base.decided(*(matrices.kappa(scaled) / before))
        rows, variances = (base.decided(v, v, 1 + ROUND_OFF) for v in (norm, 4 * float(scaled.var(0).max())))
        return [base.equal(products, expected, scale), rows, improves, variances]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Six samples of two features in small integers, scaled in rational numbers."""
        yield matrices.first(self.refuted(H) for H in matrices.integer_matrices(seed, 6, 2))

    def refuted(self, H: np.ndarray) -> base.Counterexample | None:
        """Counterexample for min-max scaling."""
        least, spans = H.min(0).tolist(), (H.max(0) - H.min(0)).tolist()
        if not all(spans) or np.linalg.matrix_rank(extended(H)) < 3:
            return None
        scaled = [
            [Fraction(1), *(Fraction(h - low, span) for h, low, span in zip(row, least, spans, strict=True))]
            for row in H.tolist()
        ]
        after = extended(self.minmax(H)), exact.gram(scaled), None
        other = extended(H), exact.gram(rational(H, 0)), None
        return matrices.larger(self.claims[2].name, H, after, other, "κ([eᵀ; X'])", "κ([eᵀ; X]) for Xᵀ")


@base.register
class BNPPropertyA(base.LayerStatement):
    """Normalization is the best diagonal scaling after centring, if the features are of two kinds."""

    id = "bnp-property-a"
    title = "with Property A scaling is optimal"
    source = "BNP, section 3.3, after Theorem 4"
    text = (
        "If UᵀĤᵀĤU has Property A, so is 2×2 block with diagonal (1, 1) and (2, 2) blocks after a permutation, the "
        "factor √(n+1) of Theorem 4 drops, and D = diag(1, 1/σ) is optimal: κ(Ĝ) = min over diagonal D of κ(ĤUD). "
        "True. The features are then of two kinds, and those of one kind uncorrelated; two features always are, three "
        "of a network hardly ever."
    )
    hypotheses = ("UᵀĤᵀĤU has Property A", "Ĥ = [e, H] has full column rank", "no feature is constant")
    claims = (base.Claim("D optimal", "κ(Ĝ) = min_D κ(ĤUD)", True),)
    trials = 100

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        scaled = normalized(with_property_a(rng))
        return [optimal_scaling(scaled, matrices.kappa(scaled))]

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        return [optimal_scaling(layer.normalized, matrices.kappa(layer.normalized))]


def with_property_a(rng: np.random.Generator) -> np.ndarray:
    """Inputs (N, n) of two kinds of features, uncorrelated within each kind, with means and scales of any size.

    The correlations between the kinds are a matrix C: the second kind is Q₁C + Q₂L, LᵀL = I − CᵀC, of orthonormal
    columns [Q₁, Q₂] with mean zero.
    """
    first, second = matrices.random_size(rng, 15), matrices.random_size(rng, 15)
    N = 1 + first + second + matrices.random_size(rng, 40)
    raw = rng.standard_normal((N, first + second))
    Q = np.linalg.qr(raw - raw.mean(0))[0]
    C = rng.standard_normal((first, second))
    C *= rng.uniform(0.1, 0.999) / np.linalg.norm(C, 2)
    L = np.linalg.cholesky(np.eye(second) - C.T @ C).T
    H = np.hstack([Q[:, :first], Q[:, :first] @ C + Q[:, first:] @ L])[:, rng.permutation(first + second)]
    return 10.0 ** rng.uniform(-1, 1, H.shape[1]) * (H + rng.standard_normal(H.shape[1]) / N**0.5)


def two_kinds(centred: np.ndarray) -> np.ndarray | None:
    """1 or −1 for each feature (N, n), different where two are correlated; None where that is impossible."""
    gram, norms = centred.T @ centred, np.linalg.norm(centred, axis=0)
    linked = np.abs(gram) > UNCORRELATED * np.multiply.outer(norms, norms)
    np.fill_diagonal(linked, False)
    signs = np.zeros(len(linked))
    for start in range(len(linked)):
        stack = [start] if signs[start] == 0 else []
        signs[stack] = 1.0
        while stack:
            at = stack.pop()
            new = linked[at] & (signs == 0)
            signs[new] = -signs[at]
            stack += np.flatnonzero(new).tolist()
    return None if (linked & np.equal.outer(signs, signs)).any() else signs


def optimal_scaling(scaled: np.ndarray, kappa: matrices.Kappa) -> base.Outcome:
    """κ(Ĝ) = min_D κ(ĤUD) if Ĝ = ``scaled`` has Property A.

    For any y and z with |y| = |z|, entry by entry, κ(ĜD) ≥ ‖Ĝy‖/‖Ĝz‖ for every diagonal D: take D⁻¹y and D⁻¹z, which
    are of one length. Source: Forsythe and Straus, Proc. AMS 6 (1955), for y the top eigenvector and z = ±y.
    """
    signs = two_kinds(scaled[:, 1:])
    if signs is None:
        return base.not_applicable("no Property A")
    if kappa.rank < scaled.shape[1]:
        return base.not_applicable("Ĥ has no full column rank")
    y = np.linalg.svd(scaled[:, 1:], full_matrices=False)[2][0]
    least = float(np.linalg.norm(scaled[:, 1:] @ y) / np.linalg.norm(scaled[:, 1:] @ (signs * y)))
    return base.decided(kappa.lower / least, kappa.upper / least, 1 + ATTAINED)


def rational(H: np.ndarray, centre: int) -> list[list[Fraction]]:
    """Ĥ (``centre`` 0) or ĤU (1) of integer inputs."""
    means = [centre * Fraction(int(total), len(H)) for total in H.sum(0)]
    return [[Fraction(1), *(Fraction(int(h)) - m for h, m in zip(row, means, strict=True))] for row in H]


EPSILON = float(np.finfo(float).eps)
#: A gain of less than κ(D)² over this is not about κ(D)².
ABOUT = 40.0
#: Scale of the features of a counterexample that hide how nearly they depend on each other.
LARGE = 100


def spread(values: np.ndarray) -> float:
    """Ratio of the largest to the smallest number."""
    return float(values.max() / values.min())


@base.register
class BNPProposition11(base.LayerStatement):
    """κ of a Hessian is at most that of its inputs, squared, times that of its curvature."""

    id = "bnp-proposition-11"
    title = "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ(S)"
    source = "BNP, Proposition 11"
    text = (
        "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ(S), κ by the smallest nonzero singular value. True for positive definite S, diagonal or "
        "not, and Ĥ of any rank: S^½Ĥ has the null space of Ĥ, and ‖S^½Ĥx‖ lies between σ_min(S^½)‖Ĥx‖ and "
        "σ_max(S^½)‖Ĥx‖. False for singular S, as samples behind inactive units have, where the rows of Ĥ with "
        "S_jj > 0 count only; and for indefinite S."
    )
    hypotheses = ("S is positive definite", "or Ĥ and S are restricted to the rows with S_jj > 0")
    claims = (
        base.Claim("S > 0", "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ(S)", True),
        base.Claim("S ≥ 0, active rows", "κ(ĤᵀSĤ) ≤ κ(Ĥ₊)² κ(S₊), + the rows with S_jj > 0", True),
    )
    trials = 120
    by_unit = True
    inputs = False

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """One unit, on a mini-batch, where its S is known sample by sample."""
        block = layer.hessian
        if not isinstance(block, FactoredHessian) or block.root is None:
            return [base.not_applicable("S is not kept apart from Ĥ")] * 2
        if block.sign is not None:
            return [base.not_applicable("S is indefinite")] * 2
        H, root = block.rows.cpu().numpy(), block.root.cpu().numpy()
        active = root > 0
        if not active.any():
            return [base.not_applicable("the unit is dead: S = 0")] * 2
        outcome = self.bounded(layer.kappa, H[active], root[active])
        return [outcome if active.all() else base.not_applicable("S is singular"), outcome]

    def bounded(self, kappa: ConditionNumber, H: np.ndarray, root: np.ndarray) -> base.Outcome:
        """κ(ĤᵀSĤ) over κ(Ĥ)², against κ(S) of S = ±diag(root²)."""
        if not kappa.resolved:
            return base.UNRESOLVED
        inputs = matrices.kappa(H)
        return base.decided(kappa.lower / inputs.upper**2, kappa.upper / inputs.lower**2, spread(root) ** 2)

    def factor(self, B: np.ndarray, H: np.ndarray) -> np.ndarray:
        """BᵀĤ for S = BBᵀ."""
        return B.T @ H

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """Inputs of any shape, of low rank now and then; S diagonal or full."""
        N, n = 1 + matrices.random_size(rng, 60), matrices.random_size(rng, 40)
        H = extended(features(rng, N, n))
        if rng.random() < 0.2:
            H = np.repeat(H, 2, 0)
        diagonal = 10.0 ** rng.uniform(-2, 2, len(H))
        B = np.diag(diagonal)
        if rng.random() < 0.5:
            B = B + 0.3 * diagonal[:, None] * rng.standard_normal(B.shape) / len(B) ** 0.5
        active = rng.random(len(H)) < 0.5
        active[:2], active[-1] = True, False
        singular = self.factor(np.diag(diagonal * active), H)
        return [self.product(self.factor(B, H), H, B), self.product(singular, H[active], np.diag(diagonal[active]))]

    def product(self, factor: np.ndarray, H: np.ndarray, B: np.ndarray) -> base.Outcome:
        """√κ(ĤᵀSĤ) = κ(BᵀĤ) over κ(Ĥ) κ(B)."""
        lower, upper = matrices.kappa(factor) / matrices.kappa(H)
        root = matrices.kappa(B)
        # the product is rounded before it is measured
        rounding = len(B) * EPSILON * matrices.kappa(H).upper * root.upper
        return base.decided(lower * (1 - rounding), upper * (1 + rounding), root.upper)


@base.register
class BNPGain(base.LayerStatement):
    """Gain of normalization in κ, against the spread of the standard deviations."""

    id = "bnp-gain"
    title = "the gain of scaling is at most κ(D)²"
    source = "BNP, section 3.3 and Fig. 8"
    text = (
        "The paper says that κ may improve by as much as about κ(D)². What is proved for S > 0: κ(ĜᵀSĜ) ≤ (n+1) min "
        "over diagonal D of κ(ĤUD)² times κ(S), from Theorem 4 and Proposition 11; and scaling after centring gains no "
        "more than κ(D)², for any S ≥ 0 if S^½Ĥ has full column rank, and as much for S = I and uncorrelated features. "
        "The paper calls each inequality of κ(ĤU) ≤ κ(D) κ(Ĝ) ≤ κ(D) √(n+1) min κ(ĤUD₀) tight. The second is never "
        "an equality: e is orthogonal to centred features, so ‖Ĝ‖² ≤ nN, and √n may replace √(n+1). √n is attained by "
        "n features that differ in mean and scale only, where Ĥ has no full column rank. "
        "That the gain is at least some fixed share of κ(D)² (here 1/40) is false: with N ≤ n it is smaller by orders "
        "of magnitude, and with many samples, too, where features depend on each other and their large scale hides it."
    )
    hypotheses = ("S > 0, no feature is constant (κ afterwards)", "S^½Ĥ has full column rank (gain of scaling)")
    claims = (
        base.Claim("κ afterwards", "κ(ĜᵀSĜ) ≤ (n+1) min_D κ(ĤUD)² κ(S)", True),
        base.Claim("gain of scaling", "κ(UᵀĤᵀSĤU)/κ(ĜᵀSĜ) ≤ κ(D)²", True),
        base.Claim("tight", "κ(ĤU) = κ(ĤUD) κ(D) for uncorrelated features", True),
        base.Claim("second inequality", "κ(Ĝ) ≤ √n min over diagonal D₀ of κ(ĤUD₀)", True, published=False),
        base.Claim("√n attained", "κ(Ĝ) = √n min κ(ĤUD₀) for n equal features", True, published=False),
        base.Claim("gain", "κ(ĤᵀSĤ)/κ(ĜᵀSĜ) ≥ κ(D)²/40", False, published=False),
    )
    trials = 60
    by_unit = True
    inputs = False

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        H = random_inputs(rng, 40)
        N, n = H.shape
        root = 10.0 ** rng.uniform(-1, 1, N)
        before, after = matrices.kappa(root[:, None] * centred(H)), matrices.kappa(root[:, None] * normalized(H))
        optimum = optimal_diagonal_scaling(centred(H), side="column")
        allowed = (n + 1) ** 0.5 * spread(root)
        sigma = np.concatenate([np.ones(1), H.std(0)])
        if before.rank < n + 1:
            scaling = base.not_applicable("S^½Ĥ has no full column rank")
        else:
            scaling = base.decided(*(before / after), spread(sigma))
        free = np.linalg.qr(centred(rng.standard_normal((N + n, n))))[0][:, 1:] * 10.0 ** rng.uniform(-2, 2, n)
        tight = matrices.kappa(normalized(free)) / matrices.kappa(centred(free))
        scaled, equal = matrices.kappa(normalized(H)), free[:, :1] * 10.0 ** rng.uniform(-2, 2, n)
        equal = equal + equal.std(0) * rng.standard_normal(n)
        best = matrices.kappa(centred(equal) / np.concatenate([np.ones(1), n**0.5 * equal.std(0)]))
        attained = best / matrices.kappa(normalized(equal))
        return [
            base.decided(after.lower / optimum.upper, after.upper / optimum.lower, allowed),
            scaling,
            base.decided(*tight, (1 + ATTAINED) / spread(np.concatenate([np.ones(1), free.std(0)]))),
            base.decided(scaled.lower / optimum.upper, scaled.upper / optimum.lower, n**0.5 * (1 + ATTAINED)),
            base.decided(*attained, (1 + ATTAINED) / n**0.5),
            self.about(matrices.kappa(root[:, None] * extended(H)) / after, spread(sigma)),
        ]

    def about(self, root: tuple[float, float], kappa_D: float) -> base.Outcome:
        """κ(D)²/40 over the gain, from bounds of its root."""
        return base.decided(kappa_D**2 / root[1] ** 2, kappa_D**2 / root[0] ** 2, ABOUT)

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """The gain of one unit; its curvature S is not observed."""
        nothing = base.not_applicable("S of a layer is not observed")
        if not (layer.kappa.resolved and layer.kappa_preconditioned.resolved):
            return [*[nothing] * 5, base.UNRESOLVED]
        before, after = layer.kappa, layer.kappa_preconditioned
        root = (before.lower / after.upper) ** 0.5, (before.upper / after.lower) ** 0.5
        return [*[nothing] * 5, self.about(root, layer.kappa_D)]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Two large features that differ by little, a small one, and S = I: Ĥ hides what Ĝ shows."""
        for A in matrices.integer_matrices(seed, 6, 3):
            H = np.column_stack([LARGE * A[:, 0], LARGE * A[:, 0] + A[:, 1], A[:, 2]])
            if (H.min(0) == H.max(0)).any() or np.linalg.matrix_rank(extended(H)) < 4:
                continue
            rows = rational(H, 1)
            squares = [Fraction(1), *(sum((row[j] ** 2 for row in rows), Fraction(0)) / len(H) for j in (1, 2, 3))]
            after = exact.kappa(exact.gram(rows), metric=squares)[0]
            before = exact.kappa(exact.gram(extended(H).astype(int).tolist()))[1]
            factor = max(squares) / min(squares) * after / (before * Fraction(ABOUT))
            if factor > matrices.CLEAR:
                D = float(max(squares) / min(squares))
                text = f"gain ≤ {float(before / after):.6f} < κ(D)²/40 = {D / ABOUT:.6f}, S = I"
                yield base.Counterexample(self.claims[-1].name, H.tolist(), text, float(factor))
                return

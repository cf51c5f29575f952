"""BNP: κ under normalization (Theorem 4), of ĤᵀSĤ against its factors (Proposition 11), and what is gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from hesscond.hessians import FactoredHessian
from hesscond.scaling import optimal_diagonal_scaling
from hesscond.spectra import ConditionNumber, condition_number
from hesscond.theorems import exact
from hesscond.theorems.base import (
    Claim,
    Counterexample,
    Extreme,
    LayerStatement,
    Observation,
    Outcome,
    decided,
    register,
)
from hesscond.theorems.matrices import CLEAR, STEPS, ascend, integer_matrices, kappa, random_matrix, random_size
from hesscond.theorems.van_der_sluis import nearly_optimal


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
    H = random_matrix(rng, samples, width)
    if rng.random() < 0.5:
        H = H + 10.0 ** rng.uniform(-2, 3, width) * rng.standard_normal(width)
    if rng.random() < 0.3:
        H = np.maximum(H, 0.0)
    constant = H.min(0) == H.max(0)
    H[0, constant] += 1.0
    return H


@register
class BNPTheorem4(LayerStatement):
    """Centring improves κ, and normalization is nearly optimal among diagonal scalings after it."""

    id = "bnp-theorem-4"
    title = "centring and scaling the inputs improves κ"
    source = "BNP, Theorem 4; PREC, Theorem 4"
    text = (
        "κ(ĤU) ≤ κ(Ĥ), and κ(Ĝ) ≤ √(n+1) min over diagonal D of κ(ĤUD). The first part is true for full column rank, "
        "where σ_max falls and σ_min rises, and fails for κ⁺ with N ≤ n samples, the usual mini-batch; the second is "
        "true for any rank if no feature is constant. Not claimed, and false: κ(Ĝ) ≤ κ(ĤU), and κ(Ĝ) ≤ κ(Ĥ)."
    )
    hypotheses = ("Ĥ = [e, H] has full column rank (first part)", "no feature is constant")
    claims = (
        Claim("centring", "κ(ĤU) ≤ κ(Ĥ), full column rank", True),
        Claim("scaling", "κ(Ĝ) ≤ √(n+1) min_D κ(ĤUD)", True),
        Claim("scaling alone", "κ(Ĝ) ≤ κ(ĤU) (not claimed)", False, published=False),
        Claim("both together", "κ(Ĝ) ≤ κ(Ĥ) (not claimed)", False, published=False),
        Claim("centring, N ≤ n", "κ⁺(ĤU) ≤ κ⁺(Ĥ) where the rank is smaller (not claimed)", False, published=False),
    )
    trials = 60

    def centre(self, H: np.ndarray) -> np.ndarray:
        """ĤU."""
        return centred(H)

    def normalize(self, H: np.ndarray) -> np.ndarray:
        """ĤUD."""
        return normalized(H)

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """More samples than features three times out of four."""
        width = random_size(rng, 60)
        samples = width + 1 + random_size(rng, 60) if rng.random() < 0.75 else max(2, int(rng.integers(2, width + 2)))
        H = features(rng, samples, width)
        return self.check(extended(H), self.centre(H), self.normalize(H))

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """On the inputs of a layer."""
        return self.check(seen.plain, seen.centred, seen.normalized)

    def check(self, before: np.ndarray, moved: np.ndarray, scaled: np.ndarray) -> Sequence[Outcome]:
        """All claims for Ĥ, ĤU and ĤUD, or their triangular factors."""
        plain, centred_only, both = kappa(before), kappa(moved), kappa(scaled)
        few = plain.rank < before.shape[1]
        nothing = Outcome("not-applicable", reason="Ĥ has no full column rank")
        ratio = decided(*(centred_only / plain))
        return [
            nothing if few else ratio,
            nearly_optimal(both, moved.T),
            decided(*(both / centred_only)),
            decided(*(both / plain)),
            ratio if few else Outcome("not-applicable", reason="Ĥ has full column rank"),
        ]

    def worst(self, size: int, rng: np.random.Generator) -> Extreme:
        """Inputs of mean zero, [H, −H], of ``size`` features."""

        def factor(half: np.ndarray) -> float:
            H = np.vstack([half, -half])
            return float(np.linalg.cond(normalized(H)) / np.linalg.cond(extended(H)))

        _, half = ascend(factor, (size + 1, size), rng, STEPS)
        H = np.vstack([half, -half])
        found = (kappa(normalized(H)) / kappa(extended(H)))[0]
        return Extreme("scaling alone", found, (size + 1) ** 0.5, H)

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """Inputs of small integers for each of what is not claimed."""
        yield from scaling_worsens(seed)
        yield from centring_worsens(seed)


def scaling_worsens(seed: int) -> Iterator[Counterexample]:
    """Of mean zero, so that Ĥ = ĤU, and of three features: of two, Ĝ is the best scaling."""
    for half in integer_matrices(seed, 3, 3):
        H = np.vstack([half, -half])
        if not kappa(normalized(H)).lower > CLEAR * kappa(extended(H)).upper:
            continue
        plain, variances = rational(H, 0), [Fraction(int(v), len(H)) for v in (H**2).sum(0)]
        # κ(Ĝ)² is that of the pencil (ĤᵀĤ, D⁻²), which is rational where D is not
        low = exact.kappa_squared(exact.gram(plain), metric=[Fraction(1), *variances])[0]
        high = exact.kappa_squared(exact.gram(plain))[1]
        if low > high:
            for name in ("scaling alone", "both together"):
                text = f"κ(Ĝ) ≥ {float(low) ** 0.5:.6f} > {float(high) ** 0.5:.6f} ≥ κ(Ĥ) = κ(ĤU)"
                yield Counterexample(name, H.tolist(), text, float(low / high) ** 0.5)
            return


def centring_worsens(seed: int) -> Iterator[Counterexample]:
    """With as many samples as features; κ⁺² is that of the Gram matrix of the rows."""
    for H in integer_matrices(seed, 3, 3):
        if not kappa(centred(H)).lower > CLEAR * kappa(extended(H)).upper:
            continue
        low, high = (
            exact.kappa_squared(exact.gram(list(zip(*rows, strict=True)))) for rows in (rational(H, 1), rational(H, 0))
        )
        if low[0] > high[1]:
            text = f"κ⁺(ĤU) ≥ {float(low[0]) ** 0.5:.6f} > {float(high[1]) ** 0.5:.6f} ≥ κ⁺(Ĥ)"
            yield Counterexample("centring, N ≤ n", H.tolist(), text, float(low[0] / high[1]) ** 0.5)
            return


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
    """Largest over smallest."""
    return float(values.max() / values.min())


@register
class BNPProposition11(LayerStatement):
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
        Claim("S > 0", "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ(S)", True),
        Claim("S ≥ 0, active rows", "κ(ĤᵀSĤ) ≤ κ(Ĥ₊)² κ(S₊), + the rows with S_jj > 0", True),
        Claim("S ≥ 0, all rows", "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ⁺(S), S singular", False, published=False),
        Claim("S indefinite", "κ(ĤᵀSĤ) ≤ κ(Ĥ)² κ(S)", False, published=False),
    )
    trials = 120
    by_unit = True
    inputs = False

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """One unit, on a mini-batch, where its S is known sample by sample."""
        block = seen.hessian
        if not isinstance(block, FactoredHessian) or block.root is None:
            return [Outcome("not-applicable", reason="S is not kept apart from Ĥ")] * 4
        nothing = Outcome("not-applicable", reason="S is indefinite")
        H, root = block.rows.cpu().numpy(), block.root.cpu().numpy()
        if block.sign is not None:
            return [nothing, nothing, nothing, self.bounded(seen.kappa, H, root[root > 0])]
        active = root > 0
        if not active.any():
            return [Outcome("not-applicable", reason="the unit is dead: S = 0")] * 4
        outcome, some = self.bounded(seen.kappa, H[active], root[active]), not active.all()
        definite = Outcome("not-applicable", reason="S is singular" if some else "S is not singular")
        whole = self.bounded(seen.kappa, H, root[active]) if some else definite
        return [definite if some else outcome, outcome, whole, Outcome("not-applicable", reason="S ≥ 0")]

    def bounded(self, found: ConditionNumber, H: np.ndarray, root: np.ndarray) -> Outcome:
        """κ(ĤᵀSĤ) over κ(Ĥ)², against κ(S) of S = ±diag(root²)."""
        if not found.resolved:
            return Outcome("unresolved", reason="a condition number is unresolved")
        inputs = kappa(H)
        return decided(found.lower / inputs.upper**2, found.upper / inputs.lower**2, spread(root) ** 2)

    def factor(self, B: np.ndarray, H: np.ndarray) -> np.ndarray:
        """BᵀĤ for S = BBᵀ."""
        return B.T @ H

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """Inputs of any shape, of low rank now and then; S diagonal or full."""
        N, n = 1 + random_size(rng, 60), random_size(rng, 40)
        H = extended(features(rng, N, n))
        if rng.random() < 0.2:
            H = np.repeat(H, 2, 0)
        diagonal = 10.0 ** rng.uniform(-2, 2, len(H))
        B = np.diag(diagonal)
        if rng.random() < 0.5:
            B = B + 0.3 * diagonal[:, None] * rng.standard_normal(B.shape) / len(B) ** 0.5
        active = rng.random(len(H)) < 0.5
        active[:2], active[-1] = True, False
        signs = np.where(rng.random(len(H)) < 0.5, -1.0, 1.0)
        singular = self.factor(np.diag(diagonal * active), H)
        return [
            self.product(self.factor(B, H), H, B),
            self.product(singular, H[active], np.diag(diagonal[active])),
            self.product(singular, H, np.diag(diagonal[active])),
            self.indefinite(H, signs),
        ]

    def product(self, found: np.ndarray, H: np.ndarray, B: np.ndarray) -> Outcome:
        """√κ(ĤᵀSĤ) = κ(BᵀĤ) over κ(Ĥ) κ(B)."""
        lower, upper = kappa(found) / kappa(H)
        root = kappa(B)
        # the product is rounded before it is measured
        off = len(B) * EPSILON * kappa(H).upper * root.upper
        return decided(lower * (1 - off), upper * (1 + off), root.upper)

    def indefinite(self, H: np.ndarray, signs: np.ndarray) -> Outcome:
        """S = ±1 on the diagonal: κ(S) = 1."""
        if np.abs(signs.sum()) == len(signs):
            return Outcome("not-applicable", reason="S is definite")
        M = H.T @ (signs[:, None] * H)
        found = condition_number((M + M.T) / 2, error=len(H) * EPSILON * float(np.linalg.norm(H) ** 2))
        if not found.resolved:
            return Outcome("unresolved", reason="a condition number is unresolved")
        inputs = kappa(H)
        return decided(found.lower / inputs.upper**2, found.upper / inputs.lower**2)

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """4×2 inputs of small integers, of which S keeps three samples, or turns one around."""
        wanted = {self.claims[2].name: 0, self.claims[3].name: -1}
        for H in integer_matrices(seed, 4, 2):
            H_hat = extended(H).astype(int)
            if np.linalg.matrix_rank(H_hat) < 3:
                continue
            for name, last in list(wanted.items()):
                rows, S = H_hat.tolist(), [Fraction(1)] * 3 + [Fraction(last)]
                M = np.array(H_hat.T @ np.diag([1, 1, 1, last]) @ H_hat, dtype=float)
                if np.linalg.cond(M) < CLEAR * np.linalg.cond(H_hat) ** 2 or np.linalg.matrix_rank(M) < 3:
                    continue
                low = exact.kappa_absolute(exact.gram(rows, S))[0]
                high = exact.kappa_squared(exact.gram(rows))[1]
                if low > high:
                    del wanted[name]
                    signs = f"diag(1, 1, 1, {last})"
                    text = f"κ(ĤᵀSĤ) ≥ {float(low):.6f} > {float(high):.6f} ≥ κ(Ĥ)², S = {signs}, κ(S) = 1"
                    yield Counterexample(name, rows, text, float(low / high))
            if not wanted:
                return


@register
class BNPGain(LayerStatement):
    """What normalization gains against the spread of the standard deviations."""

    id = "bnp-gain"
    title = "κ improves by about κ(D)²"
    source = "BNP, section 3.3 and Fig. 8"
    text = (
        "κ(ĤᵀSĤ)/κ(ĜᵀSĜ) is about κ(D)². What is proved for S > 0: κ(ĜᵀSĜ) ≤ (n+1) min over diagonal D of κ(ĤUD)² "
        "times κ(S), from Theorem 4 and Proposition 11; and scaling after centring gains no more than κ(D)², for any "
        "S ≥ 0 if S^½Ĥ has full column rank. That the gain is at least some fixed share of κ(D)² (here 1/40) is false: "
        "with N ≤ n it is smaller by orders of magnitude, and with many samples, too, where features depend on each "
        "other and their large scale hides it."
    )
    hypotheses = ("S > 0, no feature is constant (first claim)", "S^½Ĥ has full column rank (second claim)")
    claims = (
        Claim("κ afterwards", "κ(ĜᵀSĜ) ≤ (n+1) min_D κ(ĤUD)² κ(S)", True),
        Claim("gain of scaling", "κ(UᵀĤᵀSĤU)/κ(ĜᵀSĜ) ≤ κ(D)²", True),
        Claim("gain", "κ(ĤᵀSĤ)/κ(ĜᵀSĜ) ≥ κ(D)²/40", False),
    )
    trials = 60
    by_unit = True
    inputs = False

    def normalize(self, H: np.ndarray) -> np.ndarray:
        """Ĝ = ĤUD."""
        return normalized(H)

    def trial(self, rng: np.random.Generator) -> Sequence[Outcome]:
        """More samples than features three times out of four."""
        n = random_size(rng, 40)
        N = n + 1 + random_size(rng, 60) if rng.random() < 0.75 else int(rng.integers(2, n + 2))
        H = features(rng, N, n)
        root = 10.0 ** rng.uniform(-1, 1, N)
        before, after = kappa(root[:, None] * centred(H)), kappa(root[:, None] * self.normalize(H))
        optimum = optimal_diagonal_scaling(centred(H), side="column")
        allowed = (n + 1) ** 0.5 * spread(root)
        sigma = np.concatenate([np.ones(1), H.std(0)])
        if before.rank < n + 1:
            scaling = Outcome("not-applicable", reason="S^½Ĥ has no full column rank")
        else:
            scaling = decided(*(before / after), spread(sigma))
        return [
            decided(after.lower / optimum.upper, after.upper / optimum.lower, allowed),
            scaling,
            self.about(kappa(root[:, None] * extended(H)) / after, spread(sigma)),
        ]

    def about(self, root: tuple[float, float], kappa_D: float) -> Outcome:
        """κ(D)²/40 over the gain, from bounds of its root."""
        return decided(kappa_D**2 / root[1] ** 2, kappa_D**2 / root[0] ** 2, ABOUT)

    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """The gain of one unit; its curvature is not among what is seen."""
        nothing = Outcome("not-applicable", reason="S is not among what is seen of a layer")
        if not (seen.kappa.resolved and seen.kappa_preconditioned.resolved):
            return [nothing, nothing, Outcome("unresolved", reason="a condition number is unresolved")]
        lower, upper = (
            seen.kappa.lower / seen.kappa_preconditioned.upper,
            seen.kappa.upper / seen.kappa_preconditioned.lower,
        )
        return [nothing, nothing, self.about((lower**0.5, upper**0.5), seen.kappa_D)]

    def counterexamples(self, seed: int) -> Iterator[Counterexample]:
        """Two large features that differ by little, a small one, and S = I: Ĥ hides what Ĝ shows."""
        for A in integer_matrices(seed, 6, 3):
            H = np.column_stack([LARGE * A[:, 0], LARGE * A[:, 0] + A[:, 1], A[:, 2]])
            if (H.min(0) == H.max(0)).any() or np.linalg.matrix_rank(extended(H)) < 4:
                continue
            moved = [[Fraction(1), *(Fraction(int(h)) - m for h, m in zip(row, means(H), strict=True))] for row in H]
            squares = [Fraction(1), *(sum((row[j] ** 2 for row in moved), Fraction(0)) / len(H) for j in (1, 2, 3))]
            after = exact.kappa_squared(exact.gram(moved), metric=squares)[0]
            before = exact.kappa_squared(exact.gram(extended(H).astype(int).tolist()))[1]
            factor = max(squares) / min(squares) * after / (before * Fraction(ABOUT))
            if factor > CLEAR:
                D = float(max(squares) / min(squares))
                text = f"gain ≤ {float(before / after):.6f} < κ(D)²/40 = {D / ABOUT:.6f}, S = I"
                yield Counterexample(self.claims[2].name, H.tolist(), text, float(factor))
                return


def means(H: np.ndarray) -> list[Fraction]:
    """Of the columns of an integer matrix."""
    return [Fraction(int(column.sum()), len(H)) for column in H.T]

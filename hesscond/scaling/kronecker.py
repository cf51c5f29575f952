r"""Kronecker scalings L ⊗ R with the smallest κ⁺(A(L ⊗ R)), and a lower bound for all pairs (L, R).

log κ is convex along the geodesics of positive definite Kronecker products (Wiesel 2012; docs/concepts/bounds.md), so
that local optima are global; densities over eigenvectors that agree in both partial traces prove it: `lower_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # its optimizer is imported when it is called
from scipy.linalg import LinAlgError, eigh, qr, svd

from hesscond.errors import ConfigError
from hesscond.operators.threads import one_thread
from hesscond.scaling.optimal import EPS, nonzero
from hesscond.spectra.condition import ConditionNumber
from hesscond.spectra.forms import FactorForm

#: Exponents of the smooth objective, one after the other: it is log κ up to log(order)/p at each end.
POWERS = (32, 128, 512, 2048, 8192, 32768)

#: Steps of L-BFGS before the coordinates are centred anew, and number of centrings at one exponent.
STEPS, CENTRINGS = 60, 3

#: An exponent is finished once this share of log κ over the bound is due to the smooth objective itself.
LOSS = 0.5

#: Initial rounds in which both partial traces are made the identity.
ROUNDS = 3

#: Null directions are removed only if the smallest nonzero singular value is at least this many times the errors.
CLEAR = 1e3

#: From this order on eigenvalues come from the Gram matrix, where it holds the smallest to some digits.
LARGE, DIGITS = 512, 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class OptimalKronecker:
    """Pair L, R whose κ⁺(A(L ⊗ R)) is near the infimum over all invertible pairs, and bounds of that infimum.

    Attributes
    ----------
    left, right : (m, m), (n, n) arrays
        L and R, such that the scaled matrix has norm 1.
    kappa
        κ⁺ = σ_max / smallest nonzero σ of A(L ⊗ R); ``inf`` if its rank is unresolved.
    upper
        Upper bound of ``kappa``, and so of the infimum, with its rounding.
    lower
        Lower bound of κ⁺ for every invertible L and R; 1, which says nothing, if ``rank`` is less than the order
        without the common null vectors u ⊗ v of all rows.
    kappa_given
        κ⁺ of the matrix as it was given; ``inf`` if unresolved.
    rank
        Rank of the matrix; no scaling changes it.
    resolved
        Whether that rank was decided.
    evaluations
        Number of singular value decompositions, or eigendecompositions, of the search.
    solver
        Kind of the search.
    """

    left: np.ndarray
    right: np.ndarray
    kappa: float
    upper: float
    lower: float
    kappa_given: float
    rank: int
    resolved: bool
    evaluations: int
    solver: str

    @property
    def gap(self) -> float:
        """Ratio ``upper / lower`` ≥ 1: κ⁺ of the pair is at most this many times the infimum."""
        return self.upper / self.lower

    def __str__(self) -> str:
        before = f"{self.kappa_given:.6g}" if math.isfinite(self.kappa_given) else "unresolved"
        if not self.resolved:
            return f"κ(A(L ⊗ R)) ≥ {self.lower:.6g} for every L, R (rank unresolved, {self.rank} or more)"
        excess = self.gap - 1
        proved = f"optimal to {excess:.1e}" if excess < 0.1 else f"at most {self.gap:.3g} times the optimum"
        return f"κ(A(L ⊗ R)) = {self.kappa:.6g} ({proved}; before {before}; rank {self.rank}; {self.solver})"


class Enough(Exception):
    """Raised when an exponent cannot improve the search any further."""


class ScalingPair(NamedTuple):
    """Pair L, R that the search visited, and the exponent at that time."""

    L: np.ndarray
    R: np.ndarray
    power: int


class Spectrum(NamedTuple):
    """Nonzero singular values (r,) of a matrix, descending, and the right singular vectors as rows (r, m n)."""

    values: np.ndarray
    vectors: np.ndarray


def optimal_kronecker_scaling(
    A: object,
    shape: tuple[int, int],
    *,
    rtol: float = 1e-2,
    error: float | np.ndarray = 0.0,
    rank_bound: Callable[[], int] | None = None,
) -> OptimalKronecker:
    """Kronecker preconditioner L ⊗ R with the smallest condition number, and a bound of the infimum.

    For the Hessian H = FᵀF (m n, m n) of a layer with m units and n parameters each, κ((L ⊗ R)ᵀ H (L ⊗ R)) =
    κ⁺(F(L ⊗ R))². K-FAC and Shampoo choose such pairs, and this one is the best of them.

    If A has full rank without the null vectors u ⊗ v that all its rows share, the problem is convex along geodesics and
    solved globally: L-BFGS on Schatten norms whose exponent grows, each of which gives a lower bound (`lower_bound`).
    Otherwise it is a local search, and ``lower`` is 1.

    Parameters
    ----------
    A : (r, m n) array or tensor
        Column i n + j belongs to parameter j of unit i. Computed in float64 on the host.
    shape
        (m, n).
    rtol
        Gap of κ⁺ at which the search ends. The cost is some tens of decompositions of order m n.
    error
        Bound, in the 2-norm, of the error already in A, or an array (m n,) of such bounds for its columns, or
        (r, m n) of bounds for its entries: below it singular values are zero.
    rank_bound
        Function that finds an upper bound of the rank; called only where it is needed.

    Raises
    ------
    ConfigError
        The shape does not fit A; ``rtol`` not between 1e-9 and 1.
    MatrixError
        Not a finite, non-empty real matrix; zero.

    Examples
    --------
    >>> import numpy as np
    >>> A = np.random.default_rng(0).standard_normal((40, 12)) * np.logspace(0, 3, 12)
    >>> best = optimal_kronecker_scaling(A, (3, 4))
    >>> best.kappa_given > 500 and best.lower <= best.kappa <= best.upper < 1.01 * best.lower
    True
    """
    if not 1e-9 <= rtol < 1:
        raise ConfigError(f"rtol must lie between 1e-9 and 1, got {rtol!r}")
    given = nonzero(A)
    m, n = shape
    if m < 1 or n < 1 or m * n != given.shape[1]:
        raise ConfigError(f"shape {tuple(shape)} does not fit: the matrix has {given.shape[1]} columns, not {m} × {n}")
    with one_thread():
        power = -int(np.frexp(np.abs(given).max())[1])
        given, error = np.ldexp(given, power), np.ldexp(error, power)
        before = FactorForm(given, error=error, rank_bound=rank_bound).condition()
        search = PairSearch.of(given, (m, n), error)
        lower = search.run(before, rtol)
        left, right = search.pair()
        result = multiplied(given, left, right)
        norm = float(np.linalg.norm(result, 2))
        size = np.abs(left).max() / np.abs(right).max()
        left, right = left / math.sqrt(norm * size), right / math.sqrt(norm / size)
        bound = (lambda: before.rank) if before.resolved else None
        carried = multiplied(entries(error, given) + (m + n + 4) * EPS * np.abs(given), np.abs(left), np.abs(right))
        after = FactorForm(multiplied(given, left, right), error=carried, rank_bound=bound).condition()
    resolved = before.resolved and after.resolved
    return OptimalKronecker(
        left=left,
        right=right,
        kappa=math.sqrt(after.value) if resolved else math.inf,
        upper=math.sqrt(after.upper) if resolved else math.inf,
        lower=lower,
        kappa_given=math.sqrt(before.value) if before.resolved else math.inf,
        rank=before.rank,
        resolved=resolved,
        evaluations=search.evaluations,
        solver="geodesically convex" if search.convex else "local search",
    )


@dataclass
class PairSearch:
    """Search for the best pair L, R for a matrix A ≈ core (U ⊗ V)ᵀ.

    The orthonormal U (m, m'), V (n, n') remove the null vectors u ⊗ v that all rows of A share.
    """

    core: np.ndarray  # (r, m' n')
    U: np.ndarray
    V: np.ndarray
    L: np.ndarray  # pair of the current point
    R: np.ndarray
    convex: bool = False
    evaluations: int = 0
    least: ScalingPair | None = None  # point where κ was smallest
    kappa: float = math.inf  # smallest κ
    highest: ScalingPair | None = None  # point where `lower_bound` was largest
    bound: float = 1.0  # largest lower bound, not yet certified

    @classmethod
    def of(cls, given: np.ndarray, shape: tuple[int, int], error: float | np.ndarray) -> PairSearch:
        """Start of the search: L = I and R = I."""
        m, n = shape
        columns = np.linalg.norm(entries(error, given), axis=0).reshape(m, n)
        if len(given) > m * n:
            given = qr(given, mode="r", check_finite=False)[0][: m * n]
        U = row_basis(unfolded(given, m, n, 0), np.linalg.norm(columns, axis=1))
        V = row_basis(unfolded(given, m, n, 1), np.linalg.norm(columns, axis=0))
        return cls(multiplied(given, U, V), U, V, np.eye(U.shape[1]), np.eye(V.shape[1]))

    @property
    def order(self) -> int:
        return self.core.shape[1]

    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        """Factors L and R of the whole matrix, the identity on the null vectors that were removed."""
        return completed(self.U, self.L), completed(self.V, self.R)

    def run(self, condition: ConditionNumber, rtol: float) -> float:
        """Search until the gap is closed, or nothing more is gained; return the lower bound of κ⁺."""
        # both partial traces of the scaled Hessian become the identity
        m, n = len(self.L), len(self.R)
        for _ in range(ROUNDS):
            self.L = self.L @ whitening(unfolded(self.scaled(self.L, self.R), m, n, 0))
            self.R = self.R @ whitening(unfolded(self.scaled(self.L, self.R), m, n, 1))
        rank = condition.rank
        self.convex = condition.resolved and rank == self.order
        lower = 1.0
        for power in POWERS:
            kappa, bound = self.kappa, self.bound
            stopped = self.descend(power, rank, rtol)
            if self.kappa <= self.bound * (1 + rtol):
                lower = self.bound = max(lower, self.proved())
                if self.kappa <= lower * (1 + rtol):
                    break
            elif not stopped and self.kappa >= kappa * (1 - rtol / 10) and self.bound <= bound * (1 + rtol / 10):
                break
        if lower < self.bound:
            lower = max(lower, self.proved())
        if self.least is not None:
            self.L, self.R, _ = self.least
        return lower

    def scaled(self, L: np.ndarray, R: np.ndarray) -> np.ndarray:
        return multiplied(self.core, L, R)

    def descend(self, power: int, rank: int, rtol: float) -> bool:
        """Minimize the smooth objective of an exponent by L-BFGS on L(I + E), R(I + E'), with some centrings."""
        m, n = len(self.L), len(self.R)
        size = m * m + n * n

        def steps(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.eye(m) + x[: m * m].reshape(m, m), np.eye(n) + x[m * m :].reshape(n, n)

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            self.evaluations += 1
            E, E_right = steps(x)
            point = ScalingPair(self.L @ E, self.R @ E_right, power)
            try:
                spectrum = decomposed(self.scaled(point.L, point.R), rank, exact=False)
                with np.errstate(divide="raise"):
                    logs = np.log(spectrum.values)
                above, below, value = weighted(logs, power)
                left, right = partial_traces(spectrum.vectors, above - below, (m, n))
                slopes = np.linalg.solve(E.T, 2 * left), np.linalg.solve(E_right.T, 2 * right)
            except (LinAlgError, FloatingPointError):
                return math.inf, np.zeros(size)
            self.passed(point, spectrum, rtol)
            return value, np.concatenate([slope.ravel() for slope in slopes])

        options = {"maxiter": STEPS, "maxcor": 30, "gtol": 1e-9, "ftol": 1e-12}
        for _ in range(CENTRINGS):
            try:
                result = scipy.optimize.minimize(
                    objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options
                )
            except Enough:
                return True
            E, E_right = steps(result.x)
            self.L, self.R = self.L @ E, self.R @ E_right
            if result.nit < STEPS:
                break
        return False

    def passed(self, point: ScalingPair, spectrum: Spectrum, rtol: float) -> None:
        """Keep a point if it is the best, and raise `Enough` if its exponent cannot improve the search any further."""
        kappa = float(spectrum.values[0] / spectrum.values[-1])
        if kappa < self.kappa:
            self.least, self.kappa = point, kappa
        if not self.convex:
            return
        shape = len(self.L), len(self.R)
        bound = lower_bound(spectrum, shape, point.power)
        if bound > self.bound:
            self.highest, self.bound = point, bound
        logs = np.log(spectrum.values)
        above, below, _ = weighted(logs, point.power)
        # of log κ over the bound, the part that no better agreement of the partial traces takes away
        lost = math.log(kappa) - float((above - below) @ logs)
        # a margin for the rounding that certification subtracts from the bound
        closed = self.kappa <= self.bound * (1 + 0.999 * rtol)
        if closed or (lost >= LOSS * math.log(kappa / bound) and point.power < POWERS[-1]):
            self.L, self.R, _ = point
            raise Enough

    def proved(self) -> float:
        """Largest `lower_bound` that the search visited, reduced by a bound of its rounding.

        The computed decomposition is that of K + ΔK, where K = core (L ⊗ R) and ‖ΔK K⁻¹‖ ≤ η: with any further Z,
        κ(KZ) ≥ κ((K + ΔK)Z) (1 − η)/(1 + η).
        """
        if self.highest is None:
            return 1.0
        L, R, power = self.highest
        spectrum = decomposed(self.scaled(L, R), self.order)
        # errors of the QR and of the products go column by column
        columns = np.linalg.norm(self.core, axis=0).reshape(len(L), len(R))
        carried = np.linalg.norm(np.abs(L).T @ columns @ np.abs(R))
        eta = float(10 * self.order * EPS * (carried + spectrum.values[0]) / spectrum.values[-1])
        if not eta < 0.5:
            return 1.0
        bound = lower_bound(spectrum, (len(L), len(R)), power)
        return max(1.0, bound * (1 - eta) / (1 + eta))


def lower_bound(spectrum: Spectrum, shape: tuple[int, int], power: int) -> float:
    """Lower bound of κ⁺(K(L ⊗ R)) for all L and R, from the spectrum of K of full column rank.

    With G = KᵀK and Z the scaling, log κ(ZG) ≥ −Σ p log uᵀG⁻¹u − Σ q log vᵀGv for Σ p uuᵀ and Σ q vvᵀ of trace 1 that
    have the same partial traces (docs/concepts/bounds.md). Here u and v are eigenvectors, with weights ∝ λ^p and λ^−p,
    p = ``power``, whose partial traces agree where the smooth objective is stationary; a share of product states
    compensates a difference.
    """
    s, vectors = spectrum
    above, below, _ = weighted(np.log(s), power)
    value = 2 * float((above - below) @ np.log(s))
    sides = [np.linalg.eigh(apart) for apart in partial_traces(vectors, below - above, shape)]
    parts = [np.maximum(e, 0).sum() for e, _ in sides]
    apart = max(parts)
    if apart > 0:
        share = apart / (1 + apart)
        bases = [basis for _, basis in sides]
        images = multiplied(vectors, *bases)
        squares = images**2
        G, inverse = (s**2) @ squares, (s**-2.0) @ squares
        X, Y = (
            np.multiply.outer(*(mended(sign * e, apart, len(basis)) for e, basis in sides)).ravel() for sign in (1, -1)
        )
        value = (1 - share) * value - share * float(X @ np.log(inverse) + Y @ np.log(G))
    return math.exp(value / 2)


def mended(e: np.ndarray, apart: float, size: int) -> np.ndarray:
    """Eigenvalues of a density: the positive part of ``e`` over ``apart``, plus a constant that makes the sum 1."""
    positive = np.maximum(e, 0) / apart
    return positive + (1 - positive.sum()) / size


def weighted(logs: np.ndarray, power: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Weights ∝ λ^p and ∝ λ^−p for λ = exp(2 logs), descending, and the smooth objective ≥ log κ of these."""
    above, below = np.exp(2 * power * (logs - logs[0])), np.exp(2 * power * (logs[-1] - logs))
    value = 2 * (logs[0] - logs[-1]) + (math.log(above.sum()) + math.log(below.sum())) / power
    return above / above.sum(), below / below.sum(), float(value)


def multiplied(A: np.ndarray, L: np.ndarray, R: np.ndarray) -> np.ndarray:
    """Product A(L ⊗ R) (r, m' n')."""
    rows = A.reshape(len(A), len(L), len(R)) @ R
    return np.ascontiguousarray(np.moveaxis(np.tensordot(rows, L, (1, 0)), 2, 1)).reshape(len(A), -1)


def unfolded(A: np.ndarray, m: int, n: int, side: int) -> np.ndarray:
    """Rows of A as matrices (m, n), with their columns (``side`` 0) or rows below one another."""
    rows = A.reshape(-1, m, n)
    return rows.transpose(0, 2, 1).reshape(-1, m) if side == 0 else rows.reshape(-1, n)


def entries(error: float | np.ndarray, A: np.ndarray) -> np.ndarray:
    """Bounds of errors, broadcast to the entries of A."""
    return np.broadcast_to(np.asarray(error, dtype=float), A.shape)


def row_basis(rows: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Orthonormal basis (k, r) of the span of ``rows`` (·, k); the identity if that is everything, or not clear."""
    k = rows.shape[1]
    R = qr(rows, mode="r", check_finite=False)[0][:k]
    _, s, Vh = svd(R, check_finite=False)
    noise = float(np.linalg.norm(error + 10 * k * EPS * np.linalg.norm(R, axis=0)))
    rank = int((s > noise).sum())
    return np.eye(k) if rank == k or s[rank - 1] < CLEAR * noise else Vh[:rank].T


def whitening(rows: np.ndarray) -> np.ndarray:
    """Matrix W (k, k) with (rows W)ᵀ(rows W) = I."""
    _, s, Vh = svd(qr(rows, mode="r", check_finite=False)[0][: rows.shape[1]], check_finite=False)
    return Vh.T / np.maximum(s, EPS * s[0])


def completed(basis: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Invertible matrix that is ``inner`` in a basis (k, r), and a multiple of the identity on its complement."""
    k, r = basis.shape
    if r == k:
        return basis @ inner
    rest = svd(basis, full_matrices=True)[0][:, r:]
    return np.hstack([basis @ inner, rest * np.abs(inner).max()])


def decomposed(K: np.ndarray, rank: int, *, exact: bool = True) -> Spectrum:
    """Spectrum of the ``rank`` largest singular values of K, from its Gram matrix if it is large."""
    if not exact and min(K.shape) > LARGE:
        tall = len(K) >= K.shape[1]
        values, U = eigh(K.T @ K if tall else K @ K.T, driver="evd", check_finite=False)
        values, U = values[: -rank - 1 : -1], U[:, : -rank - 1 : -1]
        if values[-1] > DIGITS * values[0]:
            s = np.sqrt(values)
            return Spectrum(s, np.ascontiguousarray(U.T) if tall else (U.T @ K) / s[:, None])
    _, s, Vh = svd(K, full_matrices=False)
    return Spectrum(s[:rank], Vh[:rank])


def partial_traces(vectors: np.ndarray, weights: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Partial traces (m, m) and (n, n) of Σ_k w_k v_k v_kᵀ for rows v_k (r, m n)."""
    left, right = (weights[:, None] * vectors).reshape(-1, *shape), vectors.reshape(-1, *shape)
    return np.tensordot(left, right, ((0, 2), (0, 2))), np.tensordot(left, right, ((0, 1), (0, 1)))

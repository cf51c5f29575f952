"""The spectral density of a symmetric operator by stochastic Lanczos quadrature.

k steps of Lanczos from a random unit vector v are a Gauss quadrature of its spectral measure, whose nodes are the Ritz
values and whose weights are the SQUARED first components of their vectors (docs/concepts/bounds.md). The average over
several v is the estimate, and their spread its sampling error (Ghorbani, Krishnan and Xiao, ICML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal

from hesscond.errors import ConfigError, MatrixError, bytes_of
from hesscond.operators import Estimate, Subspace, SymmetricOperator, as_operator
from hesscond.operators.operator import ROUNDING
from hesscond.sheets import Sheet, Shown

#: Largest entry of a Radau matrix, in units of its size. It moves the prescribed node by no more than its inverse.
LARGEST_ENTRY = 1e15

#: Jacobi matrices that are decomposed at a time.
CHUNK = 256

#: Vectors besides each basis: the product, its copy in the layout of the basis, and the part removed from it.
WORKING = 3


@dataclass(frozen=True)
class Recurrence:
    """Coefficients of Lanczos recurrences from one vector."""

    alphas: np.ndarray  # (k,) float64 α_1 … α_k
    #: (k,) float64 β_1 … β_k; the last is 0 if the Krylov space is invariant, and μ the measure of J itself
    betas: np.ndarray

    def gauss(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes θ of k-point Gauss quadrature, ascending, weights, which add up to 1, and residuals."""
        nodes, vectors = eigh_tridiagonal(self.alphas, self.betas[:-1])
        weights = vectors[0] ** 2
        return nodes, weights / weights.sum(), self.betas[-1] * np.abs(vectors[-1])

    def below(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of μ's distribution function: lower ≤ μ((−∞, x)) and μ((−∞, x]) ≤ upper, for x (m,).

        The inequalities of Chebyshev, Markov and Stieltjes: of a quadrature rule with a node at x, positive weights
        and the exactness of Gauss–Radau, the weights left of x are no more than μ has there, and with that of x no
        less (Golub and Meurant 2010, section 6.2, and Szegő, *Orthogonal Polynomials*, section 3.41). They hold for
        every μ with these recurrence coefficients; so neither bound can be improved without another product.
        """
        outside = np.isinf(x)
        lower, upper = (np.where(x > 0, 1.0, 0.0) for _ in range(2))
        inner = np.flatnonzero(~outside)
        if self.betas[-1] == 0:
            nodes, weights, _ = self.gauss()
            total = np.concatenate([[0.0], np.cumsum(weights)])
            lower[inner] = total[np.searchsorted(nodes, x[inner], "left")]
            upper[inner] = total[np.searchsorted(nodes, x[inner], "right")]
            return lower, np.minimum(upper, 1.0)
        for part in np.array_split(inner, max(1, -(-len(inner) // CHUNK))):
            nodes, weights = self.radau(x[part])
            # x is a node, up to rounding
            nearest = np.abs(nodes - x[part][:, None]).argmin(1)[:, None]
            total = np.take_along_axis(np.cumsum(weights, 1), nearest, 1)
            lower[part] = (total - np.take_along_axis(weights, nearest, 1))[:, 0]
            upper[part] = np.minimum(total[:, 0], 1.0)
        return lower, upper

    def radau(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights (m, k + 1) of the Gauss–Radau rules with a node prescribed at x (m,).

        The rule is that of J bordered by β_k and by the entry x + β_k²/d, with d the last pivot of J − x (Golub, SIAM
        Review 15, 1973). As x nears a Gauss node d vanishes and the rule becomes that of J itself, with a node far
        away without weight.
        """
        k, size = len(self.alphas), float(np.abs(self.alphas).max() + 2 * self.betas.max())
        scaled, alphas, betas = x / size, self.alphas / size, self.betas / size
        pivots = alphas[0] - scaled
        with np.errstate(divide="ignore"):
            for alpha, beta in zip(alphas[1:], betas[:-1], strict=True):
                pivots = alpha - scaled - beta**2 / pivots
            entries = np.clip(betas[-1] ** 2 / pivots, -LARGEST_ENTRY, LARGEST_ENTRY)
        matrices = np.zeros((len(x), k + 1, k + 1))
        inner = np.arange(k)
        matrices[:, inner, inner] = alphas
        matrices[:, inner + 1, inner] = betas  # eigh reads the lower triangle
        matrices[:, k, k] = scaled + entries
        nodes, vectors = np.linalg.eigh(matrices)
        weights = vectors[:, 0, :] ** 2
        return nodes * size, weights / weights.sum(1, keepdims=True)


def unit_vectors(
    order: int, count: int, seed: int, null_space: Subspace | None, device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """Random vectors (n,) in float64 on a device, uniform on the unit sphere of the null space's complement.

    Then E vᵀf(A)v is the mean of f over the eigenvalues that are not known to be null. The host draws them, one after
    the other, so that neither the device nor the size of blocks changes them.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        vector = torch.randn(order, generator=generator, dtype=torch.float64, device="cpu").to(device)
        if null_space is not None:
            vector = null_space.remove(vector[:, None])[:, 0]
        yield vector / torch.linalg.vector_norm(vector)


def recurrences(
    operator: SymmetricOperator,
    starts: Sequence[torch.Tensor] | Iterator[torch.Tensor],
    count: int,
    steps: int,
    *,
    null_space: Subspace | None,
) -> list[Recurrence]:
    """Lanczos recurrences from the next ``count`` unit vectors of ``starts``, with one product a step for all.

    Every new vector is orthogonalized against its predecessors twice, by classical Gram-Schmidt, so that no eigenvalue
    comes twice (Giraud, Langou, Rozložník and van den Eshof, Numer. Math. 101, 2005). Recurrences whose next vector
    would be rounding only have found an invariant subspace and end there.
    """
    order, dtype, device = operator.order, operator.dtype, operator.device
    whole = order - (null_space.dimension if null_space is not None else 0)
    basis = torch.empty(count, steps, order, dtype=dtype, device=device)
    for row, start in zip(basis[:, 0], starts, strict=False):
        row.copy_(start)
    alphas = torch.zeros(count, steps, dtype=torch.float64, device=device)
    betas = torch.zeros_like(alphas)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    active = torch.ones(count, dtype=torch.bool, device=device)
    size = torch.zeros(count, dtype=torch.float64, device=device)
    # coefficients of rounding only would make Lanczos vectors of it
    threshold = max(operator.rounding, ROUNDING * torch.finfo(dtype).eps)
    exponent: int | None = None
    for k in range(steps):
        product = operator.multiply(basis[:, k].T)
        if exponent is None:
            # a power of two takes the scale out exactly: no square over- or underflows, in float32 either
            largest = float(product.abs().max())
            most = math.frexp(torch.finfo(dtype).max)[1] - 2
            exponent = min(max(math.frexp(largest)[1], -most), most) if largest > 0 else 0
        residual = product.T.contiguous().mul_(2.0**-exponent)
        del product
        if null_space is not None:
            residual = null_space.remove(residual.T).T.contiguous()
        known = basis[:, : k + 1]
        for _ in range(2):
            coefficients = torch.bmm(known, residual[:, :, None])
            alphas[:, k] += coefficients[:, k, 0]
            residual.unsqueeze(1).baddbmm_(coefficients.mT, known, alpha=-1)
        if null_space is not None:
            residual = null_space.remove(residual.T).T.contiguous()
        lengths += active
        norms = torch.linalg.vector_norm(residual, dim=1, dtype=torch.float64)
        size = torch.maximum(size, alphas[:, k].abs() + norms)
        active = active & (norms > threshold * size) & (k + 1 < whole)
        betas[:, k] = torch.where(active, norms, 0.0)
        if k + 1 == steps or not bool(active.any()):
            break
        # recurrences that ended continue as zero vectors
        basis[:, k + 1] = residual / torch.where(active, norms, math.inf)[:, None]
    return [
        Recurrence(np.ldexp(alpha[:length], exponent or 0), np.ldexp(beta[:length], exponent or 0))
        for alpha, beta, length in zip(alphas.cpu().numpy(), betas.cpu().numpy(), lengths.tolist(), strict=True)
    ]


#: Eigenvalues no larger than this share of the largest count as near zero.
NEAR_ZERO = 1e-6
#: Standard errors below this many percent are rounding.
EXACT = 1e-10

#: Up to this order all eigenvalues are computed, if that takes no more products than the quadrature.
DENSE_ORDER = 2000

#: Bytes that several probes at a time may take; a single one takes what it needs.
MEMORY = 2**30

#: Nodes are known to this multiple of the rounding of a product.
BLUR = 10.0

#: … but never exactly: of the zero matrix.
SMALLEST = float(np.finfo(float).tiny)

METHODS = ("auto", "lanczos", "dense")

#: Where recurrences do not resolve the spectrum a Gaussian is this share of the distance of the nodes wide, which
#: leaves 1 % of their discreteness.
WIDTH = 0.7

#: The least width, as a share of the range of the nodes.
LEAST = 1 / 100


def probes_at_once(
    order: int, *, probes: int, steps: int, method: str, dtype: torch.dtype, memory: float | None
) -> int:
    """Number of probes that are multiplied together; 0: all eigenvalues of the formed matrix are computed."""
    if method == "auto":
        # the columns of the identity are multiplied 64 at a time; the decomposition is on the host
        fits = memory is None or (order + 64) * order * 8 <= memory
        method = "dense" if order <= min(DENSE_ORDER, probes * steps) and fits else "lanczos"
    if method == "dense" or steps == 0:
        return 0
    bytes_of_one = order * dtype.itemsize
    vectors = steps + WORKING
    if memory is not None and vectors * bytes_of_one > memory:
        raise ConfigError(
            f"{vectors} vectors of length {order} take {vectors * bytes_of_one / 1e6:.0f} MB, more than the memory of "
            f"{memory / 1e6:.0f} MB: allow more, or at most {int(memory) // bytes_of_one - WORKING} steps"
        )
    return max(1, min(probes, int(MEMORY if memory is None else memory) // (vectors * bytes_of_one)))


def density(
    operator: object,
    *,
    probes: int = 10,
    steps: int = 80,
    seed: int = 0,
    method: str = "auto",
    memory: float | str | None = None,
    null_space: Subspace | None = None,
) -> Density:
    """Spectral density of a symmetric operator.

    A null space that is known is not estimated: the probes are drawn from its complement, and its share is
    added at zero. As many probes are multiplied together as ``memory`` allows, on the operator's device.

    Parameters
    ----------
    operator : (n, n)
        Anything `as_operator` takes.
    probes
        Random vectors.
    steps
        Number of Lanczos steps from each vector, and of nodes.
    seed
        Seed of the random vectors.
    method
        "lanczos"; "dense": form the matrix and compute all eigenvalues, which is exact; "auto": "dense" for n ≤ 2000
        if that takes no more products.
    memory
        Bytes for the vectors.
    null_space
        A subspace of the null space that is known; None: ``operator.null_space``.

    Raises
    ------
    ConfigError
        Arguments that make no sense, or one probe that does not fit into ``memory``.
    MatrixError
        Not a symmetric operator, or products that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> found = density(np.diag([4.0, -1.0, 0.0, 1.0]))
    >>> found.trace().value, found.negative.value
    (4.0, 0.25)
    """
    A = as_operator(operator)
    known = A.null_space if null_space is None else null_space
    if method not in METHODS:
        raise ConfigError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if probes < 1 or steps < 1:
        raise ConfigError(f"the density takes at least one probe and one step, not {probes} and {steps}")
    if known is not None and known.order != A.order:
        raise ConfigError(f"a subspace of R^{known.order} is no null space of an operator of order {A.order}")
    steps = min(steps, A.order - (0 if known is None else known.dimension))
    block = probes_at_once(A.order, probes=probes, steps=steps, method=method, dtype=A.dtype, memory=bytes_of(memory))
    if not block:
        return dense_density(A, known)
    runs: list[Recurrence] = []
    products = 0
    starts = unit_vectors(A.order, probes, seed, known, A.device)
    while len(runs) < probes:
        width = min(block, probes - len(runs))
        group = recurrences(A, starts, width, steps, null_space=known)
        # all take part in the products until the last one has ended
        products += width * max(len(run.alphas) for run in group)
        runs += group
    if not all(np.isfinite(run.alphas).all() and np.isfinite(run.betas).all() for run in runs):
        raise MatrixError("products of the operator are not finite: look at the loss and the parameters")
    extent = max(float(np.abs(run.gauss()[0]).max()) for run in runs)
    rounding = max(A.rounding, ROUNDING * torch.finfo(A.dtype).eps)
    return Density.of(
        runs,
        order=A.order,
        null=0 if known is None else known.dimension,
        psd=A.psd,
        blur=max(BLUR * rounding * extent, SMALLEST),
        products=products,
        seed=seed,
    )


def dense_density(A: SymmetricOperator, known: Subspace | None) -> Density:
    """Density of the formed matrix: all eigenvalues outside the known null space."""
    null = 0 if known is None else known.dimension
    values = np.zeros(0)
    if null < A.order:
        matrix = A.to_dense().to("cpu", torch.float64)
        if not bool(matrix.isfinite().all()):
            raise MatrixError("products of the operator are not finite: look at the loss and the parameters")
        matrix = (matrix + matrix.T) / 2
        size = float(torch.linalg.matrix_norm(matrix, ord=torch.inf))
        if known is not None and size > 0:
            # the null space is moved above all else, where it can be left out without a guess
            eye = torch.eye(A.order, dtype=A.dtype, device=A.device)
            matrix = matrix + 4 * size * known.project(eye).to("cpu", torch.float64)
            matrix = (matrix + matrix.T) / 2
        values = np.linalg.eigvalsh(matrix.numpy())[: A.order - null]
    largest = float(np.abs(values).max(initial=0.0))
    nodes = torch.from_numpy(values)[None]
    return Density(
        nodes,
        torch.full_like(nodes, 1 / A.order),
        torch.zeros_like(nodes),
        order=A.order,
        null=null,
        psd=A.psd,
        blur=max(BLUR * max(A.rounding, A.order**0.5 * np.finfo(float).eps) * largest, SMALLEST),
        products=A.order if len(values) else 0,
        seed=None,
        recurrences=(),
    )


@dataclass(frozen=True)
class Share:
    """Share of the eigenvalues in an interval; the number of eigenvalues is ``order`` n times it.

    ``lower`` and ``upper`` are rigorous bounds of the average of the probes' measures, ``value`` is their midpoint and
    ``error`` the standard error of that average, from the spread over the probes. Counting the nodes in the interval
    would be wrong by far more than their spread where a node stands for many eigenvalues on either side of an end, as
    around zero: all probes have it on the same side.
    """

    value: float
    error: float
    lower: float
    upper: float
    order: int

    def __str__(self) -> str:
        """Share in per cent with its standard error, to two digits of it; a range if the quadrature is less certain.

        Examples
        --------
        >>> print(Share(0.12345, 0.0123, 0.12, 0.13, 9), Share(0.5, 0.01, 0.33, 0.65, 9))
        12.3 ± 1.2 % 32–66 %
        """
        value, error = 100 * self.value, 100 * self.error
        if not self.resolved:
            spread = error if math.isfinite(error) else 0.0
            low, high = max(0.0, 100 * self.lower - spread), min(100.0, 100 * self.upper + spread)
            digits = min(max(0, 1 - math.floor(math.log10(high - low))), 9)
            return f"{low:.{digits}f}–{high:.{digits}f} %"
        if not EXACT < error < math.inf:
            return f"{value:.3g} %"
        digits = max(0, 1 - math.floor(math.log10(error)))
        return f"{value:.{digits}f} ± {error:.{digits}f} %"

    @property
    def resolved(self) -> bool:
        """Whether the quadrature is no less certain than the sampling: bounds within twice the standard error."""
        return self.upper - self.lower <= 2 * self.error or self.upper - self.lower <= 1e-12


@dataclass(frozen=True, repr=False)
class Density(Shown):
    """Distribution of the eigenvalues of a symmetric operator, as `density` found it.

    Attributes
    ----------
    nodes, weights : (p, k) float64
        Quadrature of each probe, ascending; the weights of a probe add up to 1 − null/n. Where recurrences ended early
        the last node is repeated without weight. From the dense method all eigenvalues, in one row.
    residuals : (p, k) float64
        Bounds of the distance of each node to an eigenvalue.
    order
        n.
    null
        Dimension of the null space that was known beforehand; its share null/n is exact.
    psd
        Whether the operator is known to be positive semidefinite.
    blur
        Bound of the rounding error of the nodes.
    products
        Products with one vector that were made.
    seed
        Seed of the probes; None: there were none, the eigenvalues were computed.
    recurrences
        Coefficients that the nodes come from, probe by probe; none from the dense method.
    """

    nodes: torch.Tensor
    weights: torch.Tensor
    residuals: torch.Tensor
    order: int
    null: int
    psd: bool
    blur: float
    products: int
    seed: int | None
    recurrences: tuple[Recurrence, ...]

    def __repr__(self) -> str:
        return f"<Density of {self.order:,} eigenvalues from {self.bottom:.3g} to {self.top:.3g}>"

    def sheet(self) -> Sheet:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        for row in summary(self):
            table.add_row(*row)
        below = []
        if self.seed is not None:
            below.append("±: standard error over the probes; eigenvalues reach at least as far as the extreme nodes")
            if not (self.negative.resolved and self.near_zero(NEAR_ZERO).resolved):
                below.append("ranges: what this number of steps leaves open; more steps narrow them")
        return Sheet([], table, below)

    @classmethod
    def of(cls, recurrences: Sequence[Recurrence], *, order: int, null: int, **facts: object) -> Density:
        """Density from Lanczos recurrences, one per probe."""
        longest = max(len(run.alphas) for run in recurrences)
        nodes, weights, residuals = np.zeros((3, len(recurrences), longest))
        for row, run in enumerate(recurrences):
            points, shares, distances = run.gauss()
            nodes[row, : len(points)], nodes[row, len(points) :] = points, points[-1]
            weights[row, : len(points)] = shares * ((order - null) / order)
            residuals[row, : len(points)] = distances
        return cls(
            torch.from_numpy(nodes),
            torch.from_numpy(weights),
            torch.from_numpy(residuals),
            order=order,
            null=null,
            recurrences=tuple(recurrences),
            **facts,  # type: ignore[arg-type]
        )

    @property
    def probes(self) -> int:
        """Number of random vectors; 0: the eigenvalues were computed."""
        return len(self.recurrences)

    @property
    def steps(self) -> int:
        """Number of Lanczos steps, and of nodes, of the longest recurrence."""
        return self.nodes.shape[1]

    @property
    def null_weight(self) -> float:
        """Share of the null space that was known beforehand."""
        return self.null / self.order

    @cached_property
    def bottom(self) -> float:
        """Smallest node, an upper bound of the smallest eigenvalue."""
        return float(self.nodes.min()) if self.nodes.numel() else 0.0

    @cached_property
    def top(self) -> float:
        """Largest node, a lower bound of the largest eigenvalue."""
        return float(self.nodes.max()) if self.nodes.numel() else 0.0

    def error_of(self, samples: torch.Tensor) -> torch.Tensor:
        """Standard error of the mean of ``samples`` (p, …) over the probes; infinite for a single probe."""
        if self.probes == 0:
            return torch.zeros_like(samples[0])
        if self.probes == 1:
            return torch.full_like(samples[0], math.inf)
        return samples.std(0) / math.sqrt(self.probes)

    def trace(self) -> Estimate[float]:
        """Trace tr A, n times the mean of the eigenvalues."""
        means = (self.weights * self.nodes).sum(1)
        error = self.order * float(self.error_of(means))
        return Estimate(self.order * float(means.mean()), error, self.probes, self.products)

    def below(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds (p, m) of each probe's measure: lower for (−∞, x), upper for (−∞, x], without the null space.

        They come from Gauss–Radau quadrature and hold whatever the spectrum is (Chebyshev, Markov and Stieltjes). ``x``
        has shape (m,). Nodes are known only up to ``blur``, so that the lower bound is taken this much further
        left, and the upper bound this much further right.
        """
        at = x.numpy()
        if self.probes:
            pairs = [(run.below(at - self.blur)[0], run.below(at + self.blur)[1]) for run in self.recurrences]
        else:
            nodes = self.nodes[0].numpy()
            sides = np.searchsorted(nodes, at - self.blur, "left"), np.searchsorted(nodes, at + self.blur, "right")
            pairs = [(sides[0] / max(1, len(nodes)), sides[1] / max(1, len(nodes)))]
        lower, upper = (torch.from_numpy(np.stack(side)) for side in zip(*pairs, strict=True))
        if self.psd:
            lower, upper = (torch.where(x >= 0, side, 0.0) for side in (lower, upper))
        return lower * (1 - self.null_weight), upper * (1 - self.null_weight)

    def share(self, low: float, high: float) -> Share:
        """Share of the eigenvalues in [low, high], up to twice ``blur`` beyond, with the known null space.

        Raises
        ------
        ConfigError
            NaN, or low > high.
        """
        if not low <= high:
            raise ConfigError(f"an interval goes from low to high, not from {low} to {high}")
        # an eigenvalue at an end is inside
        lower, upper = self.below(
            torch.tensor([low - 2 * self.blur, high + 2 * self.blur], dtype=torch.float64, device="cpu")
        )
        null = self.null_weight if low <= 0 <= high else 0.0
        return self._share((lower[:, 1] - upper[:, 0]).clamp_min(0), upper[:, 1] - lower[:, 0], null)

    @property
    def negative(self) -> Share:
        """Share of negative eigenvalues; those within twice ``blur`` of zero are taken as zero.

        None if the operator is known to be positive semidefinite. What lies so close to zero that the quadrature
        cannot tell its sign is between ``lower`` and ``upper``: more steps bring them together.
        """
        if self.psd:
            return Share(0.0, 0.0, 0.0, 0.0, self.order)
        lower, upper = self.below(torch.tensor([-2 * self.blur], dtype=torch.float64, device="cpu"))
        return self._share(lower[:, 0], upper[:, 0], 0.0)

    def near_zero(self, relative: float = 1e-6) -> Share:
        """Share of eigenvalues with |λ| no larger than ``relative`` times the largest |node|."""
        width = relative * max(abs(self.bottom), abs(self.top))
        return self.share(-width, width)

    def _share(self, lower: torch.Tensor, upper: torch.Tensor, null: float) -> Share:
        """Share from bounds (p,) of each probe, plus the share ``null`` of known null eigenvalues."""
        middle = (lower + upper) / 2
        ends = float(lower.mean()) + null, min(1.0, float(upper.mean()) + null)
        return Share(float(middle.mean()) + null, float(self.error_of(middle)), *ends, self.order)

    def curve(self, points: int = 512) -> Curve:
        """Density smoothed with Gaussians, without the known null space, at evenly spaced points.

        The standard deviation of a Gaussian is a hundredth of the range, and more where the recurrences do not resolve
        the spectrum: there each node takes the width of what it stands for (`widths`).

        Parameters
        ----------
        points
            Number of points.

        Raises
        ------
        ConfigError
            Fewer than two points.
        """
        if points < 2:
            raise ConfigError(f"a curve takes at least 2 points, not {points}")
        nodes = self.nodes
        sigma = widths(nodes, self.residuals)
        used = self.weights > 0  # nodes without weight only fill up their row
        if not bool(used.any()):
            x = torch.linspace(-1, 1, points, dtype=torch.float64, device="cpu")
            nothing = torch.zeros_like(x)
            return Curve(x, nothing, nothing, 1.0)
        low, high = float((nodes - 5 * sigma)[used].min()), float((nodes + 5 * sigma)[used].max())
        x = torch.linspace(low, high, points, dtype=torch.float64, device="cpu")
        # Σ wᵢ exp(−((x − xᵢ)/σᵢ)²/2) / (σᵢ·√(2π)) of each probe
        heights = self.weights / (sigma * math.sqrt(2 * math.pi))
        rows = zip(nodes, heights, sigma, strict=True)
        samples = torch.stack([torch.exp(-0.5 * ((x[:, None] - at) / s) ** 2) @ w for at, w, s in rows])
        return Curve(x, samples.mean(0), self.error_of(samples), float(sigma[used].min()))


@dataclass(frozen=True)
class Curve:
    """Density at ``x`` (m,), smoothed with Gaussians: the share of the eigenvalues per unit of x.

    With the known null space, which is left out, the integral is 1. ``error`` (m,) is the standard error over the
    probes; ``width`` is the smallest standard deviation of the Gaussians.
    """

    x: torch.Tensor
    density: torch.Tensor
    error: torch.Tensor
    width: float


def widths(nodes: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
    """Standard deviation for each node (p, k), in proportion to the uncertainty of its place."""
    extent = float(nodes.max() - nodes.min()) if nodes.numel() else 0.0
    least = LEAST * (extent or float(nodes.abs().max() if nodes.numel() else 0.0) or 1.0)
    if nodes.shape[1] < 2:
        return torch.full_like(nodes, least)
    # half the distance of both neighbours; that of the only one at the ends
    gaps = nodes.diff(dim=1)
    around = torch.cat([gaps[:, :1], (gaps[:, 1:] + gaps[:, :-1]) / 2, gaps[:, -1:]], 1)
    return torch.minimum(WIDTH * around, residuals).clamp_min(least)


def summary(density: Density) -> list[tuple[str, str, str]]:
    """Rows of name, value and remark for the numbers of a density."""
    exact = density.seed is None
    negative, near, trace = density.negative, density.near_zero(NEAR_ZERO), density.trace()
    error = f" ± {trace.error:.2g}" if EXACT / 100 * abs(trace.value) < trace.error < math.inf else ""
    return [
        ("parameters n", f"{density.order:,}", ""),
        ("known null directions", f"{density.null:,}", f"{100 * density.null_weight:.3g} %" if density.null else ""),
        ("eigenvalues below zero", str(negative), ""),
        (f"|λ| ≤ {NEAR_ZERO:g} |λ|max", str(near), "known null directions among them" if density.null else ""),
        ("largest eigenvalue" if exact else "largest node", f"{density.top:.6g}", ""),
        ("smallest eigenvalue" if exact else "smallest node", f"{density.bottom:.6g}", ""),
        ("trace", f"{trace.value:.6g}{error}", ""),
    ]

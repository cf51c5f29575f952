"""Smallest nonzero eigenvalues of a symmetric operator from its products."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from hesscond.errors import ConfigError, MatrixError, bytes_of
from hesscond.operators import ApproximateInverse, Subspace, SymmetricOperator, as_operator
from hesscond.operators.operator import ritz_range
from hesscond.spectra import davidson
from hesscond.spectra.condition import GAP
from hesscond.spectra.eigen import EigenResult, Interval, intervals
from hesscond.spectra.search_space import CountedProducts, Excluded, RitzSpace, SingularSpace

logger = logging.getLogger("hesscond")

#: Operators up to these orders are formed, since an iteration would need as many products: positive semidefinite ones
#: and others with an approximate inverse, and all without one.
DENSE_ORDER, DENSE_ORDER_INDEFINITE, DENSE_ORDER_ALONE = 300, 1000, 2000
#: Default number of vectors in the basis.
BASIS = 50
#: Lanczos steps for the norm.
NORM_STEPS = 5


def smallest_nonzero(
    operator: SymmetricOperator | Any,
    k: int = 1,
    *,
    inverse: ApproximateInverse | None = None,
    null_space: Subspace | None = None,
    tol: float = 1e-8,
    norm: float | None = None,
    memory: float | str | None = None,
    seed: int = 0,
    max_products: int | None = None,
    dense_order: int | None = None,
) -> EigenResult:
    """The k eigenvalues of smallest nonzero |λ| of a symmetric operator A (n, n).

    Small operators are formed. Otherwise generalized Davidson with locally optimal thick restarts (GD+k, Stathopoulos
    2007, SIAM J. Sci. Comput. 29): the space grows by M⁻¹r for the first pair that is not settled, and is restarted
    with the best approximations and the previous one of that pair. If A is known to be positive semidefinite, it begins
    with an eigenvector of M's smallest eigenvalue μ, which takes 12 solutions with M and no product, and grows by
    (M − μ/2)⁻¹r: M − μ/2 is nearer to A − θ. Where that stagnates, or where there is no M, it grows
    by the solution of the Jacobi–Davidson correction equation with MINRES. Approximations are Ritz vectors if A is
    known to be positive semidefinite, else from the smallest singular vectors of AV, since the eigenvalues wanted are
    interior ones.
    All thresholds are relative to the norm of A: c·A has c times the eigenvalues of A, whatever c.

    Parameters
    ----------
    operator
        A. Its ``psd``, ``null_space`` and ``rounding`` are used.
    k
        Number of eigenvalues.
    inverse
        M⁻¹ for some M ≈ A, or |A|; a multiple of it does as well. It is to be definite except where A is null: an
        eigenvector that M⁻¹ annihilates can hardly be found.
    null_space
        A subspace that A annihilates, which every vector is projected from; by default ``operator.null_space``.
    tol
        Requested relative error of the eigenvalues.
    norm
        ‖A‖₂ if it is known; by default from 5 Lanczos steps, whose products count.
    memory
        Bytes for the vectors: a basis of 50, or 2k + 30 if that is more, as many images and 3k + 17 others, plus one
        for each null direction that is found, and 12 if A is not known to be positive semidefinite. A smaller basis is
        restarted earlier. The number is logged before the first product.
    seed
        Seed of all random vectors.
    max_products
        Largest number of products with one vector; by default 10 n + 1,000, at most 100,000.
    dense_order
        Operators up to this order are formed; by default 300 if A is known to be positive semidefinite, else 1,000, and
        2,000 without ``inverse``: an iteration would need as many products.

    Returns
    -------
    EigenResult
        ``null`` counts the null directions found besides the known ones. Fewer than k eigenvalues: there are no more.

    Raises
    ------
    ConfigError
        An option that does not fit.
    MatrixError
        k is larger than the order; vectors of the wrong shape; ``memory`` too small; products that are not finite; an
        operator that is said to be positive semidefinite and is not.

    Notes
    -----
    A direction with |θ| ≤ ε/2, ε = ``operator.rounding``·‖A‖, and ‖r‖ ≤ 100ε is null: it is counted and left out. With
    |θ| up to 3ε nothing converges, and the message says so.

    No finite number of products proves that nothing is smaller. After the wanted pairs have settled, the space is
    searched again from fresh random vectors, in which a missed eigenvector has a component with probability one; but
    there is no rate. ``converged`` and the quadratic intervals rest on that; that each interval θ ± (‖r‖ + ε) contains
    an eigenvalue does not. If the search cannot be finished, nothing converges. When pairs count as settled, and what
    was measured: docs/concepts/bounds.md.

    Examples
    --------
    >>> from hesscond.operators import Diagonal, DiagonalInverse
    >>> d = torch.cat([torch.zeros(3), torch.arange(1.0, 998.0)]).double()
    >>> found = smallest_nonzero(Diagonal(d), inverse=DiagonalInverse(d + 0.1))
    >>> found.converged, round(float(found.eigenvalues), 9), found.null
    (True, 1.0, 3)
    """
    operator = as_operator(operator)
    known = operator.null_space if null_space is None else null_space
    memory = bytes_of(memory)
    if max_products is None:
        max_products = min(10 * operator.order + 1000, 100_000)
    check(operator, k, tol=tol, norm=norm, inverse=inverse, known=known, max_products=max_products)
    if dense_order is None:
        with_inverse = DENSE_ORDER if operator.psd else DENSE_ORDER_INDEFINITE
        dense_order = DENSE_ORDER_ALONE if inverse is None else with_inverse

    products = CountedProducts(operator)
    excluded = Excluded(known, operator.order, operator.device)
    if operator.order <= min(dense_order, max_products) and (memory is None or 48 * operator.order**2 <= memory):
        return smallest_dense(products, k, excluded, tol=tol)
    capacity, vectors = sizes(operator.order, k, memory, psd=operator.psd)
    if norm is None:
        norm = max(abs(value) for value in ritz_range(products, NORM_STEPS))
    if norm == 0:
        return nothing(products, excluded, vectors)
    products.exponent = math.frexp(norm)[1]
    products.norm = math.ldexp(norm, -products.exponent)
    kind = RitzSpace if operator.psd else SingularSpace
    fresh = torch.Generator(operator.device).manual_seed(seed)
    space = kind(capacity, operator.order, operator.device)
    search = davidson.Davidson(products, space, excluded, inverse, fresh, max_products, k=k, tol=tol)
    search.run()
    return conclusion(search, vectors)


# -- what is given ----------------------------------------------------------------------------------------------------


def check(
    operator: SymmetricOperator,
    k: int,
    *,
    tol: float,
    norm: float | None,
    inverse: ApproximateInverse | None,
    known: Subspace | None,
    max_products: int,
) -> None:
    """Raise an error for arguments that do not fit together."""
    order = operator.order
    if not isinstance(k, int) or not 1 <= k <= order:
        raise MatrixError(f"an operator of order {order} has no {k} eigenvalues: k is 1 to {order}")
    if not 0 < tol < 1:
        raise ConfigError(f"tol={tol} is not a relative error: give a number between 0 and 1, 1e-8 say")
    if norm is not None and not 0 < norm < math.inf:
        raise ConfigError(f"norm={norm} is not the norm of an operator: give a positive number, or None to estimate it")
    for name, part in (("inverse", inverse), ("null_space", known)):
        if part is not None and part.order != order:
            raise MatrixError(f"{name} has order {part.order}, but the operator has order {order}: they must agree")
    if max_products < (least := k + davidson.RANDOM):
        raise ConfigError(f"max_products={max_products} is too few for k={k}: at least {least} are needed")


def counts(k: int, *, psd: bool) -> tuple[int, int]:
    """Least number of vectors in a basis, and number outside of the basis and its images."""
    return 2 * k + davidson.RANDOM + 7, 3 * k + 17 + (0 if psd else 3 * davidson.PAIRS)


def least_bytes(order: int, *, psd: bool) -> int:
    """Bytes of the fewest vectors with which the smallest nonzero eigenvalue can be found."""
    least, others = counts(1, psd=psd)
    return 8 * order * (2 * least + others)


def sizes(order: int, k: int, memory: float | None, *, psd: bool) -> tuple[int, int]:
    """Vectors in the basis, and the most vectors of length n at a time, which is logged."""
    least, others = counts(k, psd=psd)
    capacity = max(BASIS, 2 * k + 30)
    size = 8 * order
    if memory is not None:
        capacity = min(capacity, int(memory // size - others) // 2)
        if capacity < least:
            needed = 2 * least + others
            raise MatrixError(
                f"{memory:.4g} bytes hold {int(memory // size)} vectors of length {order} but the least basis needs "
                f"{needed}: give memory={needed * size} or ask for fewer eigenvalues"
            )
    vectors = 2 * capacity + others
    logger.info(
        "Davidson: at most %d vectors of length %d, %.3g MB, and one for each null direction found",
        vectors,
        order,
        vectors * size / 1e6,
    )
    return capacity, vectors


def conclusion(search: davidson.Davidson, vectors: int) -> EigenResult:
    """Rayleigh–Ritz with the wanted vectors, true residuals, intervals and a verdict."""
    products, excluded = search.products, search.excluded
    count = min(search.k, len(search.pairs.values))
    if count == 0:
        return nothing(products, excluded, vectors, search.stopped)
    values, U, residuals = rayleigh_ritz(products, search.pairs.vectors[:count])
    noise, null, least = products.error, len(excluded.vectors), float(values.abs().min())
    drift = float(residuals.max()) > 2 * float(search.pairs.residuals[:count].max()) + 4 * noise
    reason = search.stopped
    if reason is None and search.dubious:
        reason = f"{search.dubious} eigenvalues of the size of round-off may be zero or not"
    elif reason is None and null and least < GAP * max(noise, 0.0 if products.psd else max(excluded.residuals)):
        reason = f"|λ| = {least / products.norm:.1e}‖A‖ cannot be distinguished from the {null} null directions found"
    elif reason is None and drift:
        reason = "the residuals of fresh products are larger: the products are noisier than they claim"
    converged = reason is None
    lower, upper = bounds(
        values,
        residuals,
        noise,
        null=math.hypot(*excluded.residuals),
        beyond=search.beyond if converged else 0.0,
        floor=search.floor if converged else math.inf,
        psd=products.psd,
    )
    place = values.abs().argsort(stable=True).argsort()
    settled = torch.tensor([*search.settled, *[False] * count][:count], device="cpu")[place] & (not drift)
    how = f"{', then '.join(search.used)}; {products.count} products"
    if converged:
        sizes = search.pairs.values.abs().tolist()
        errors = zip(search.estimates.errors.absolute[:count], sizes, strict=False)
        error = max(max(error, size - search.floor) / size for error, size in errors)
        message = (
            f"converged: {how}; relative error estimated at {error:.1e}, "
            f"and at most {noise / least:.1e} by the rounding of a product"
        )
        if count < search.k:
            message += f"; only {count} eigenvalues are nonzero"
    else:
        message = f"not converged: {reason} ({how}); {advice(search)}"
    ritz = values, U, residuals, lower, upper
    return result(
        products, ritz, settled, converged, null=null - search.dubious, vectors=vectors + null, message=message
    )


def rayleigh_ritz(products: CountedProducts, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ritz values, descending, orthonormal Ritz vectors U (n, c) in the span of ``rows`` (c, n), and residual norms."""
    U = torch.linalg.qr(rows.T).Q
    images = products.images(U.T.contiguous()).T
    H = (U.T @ images).double().cpu()
    values, Y = torch.linalg.eigh((H + H.T) / 2)
    rotation, values = Y.flip(1).to(U), values.flip(0)
    U, images = U @ rotation, images @ rotation
    return values, U, torch.linalg.vector_norm(images - U * values.to(U), dim=0).double().cpu()


def bounds(
    values: torch.Tensor,
    residuals: torch.Tensor,
    noise: float,
    *,
    null: float,
    beyond: float,
    floor: float = math.inf,
    psd: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Intervals that contain an eigenvalue each, down to |λ| = ``floor``."""
    sizes, order = values.abs().sort(descending=True, stable=True)
    norms = residuals[order]
    if null:
        sizes = torch.cat([sizes, sizes.new_zeros(1)])
        norms = torch.cat([norms, norms.new_tensor([null])])
    rest = Interval(beyond, math.inf) if beyond > float(sizes[0]) else None
    below, above = intervals(sizes, norms, noise, rest)
    inner, outer = torch.empty_like(values), torch.empty_like(values)
    inner[order], outer[order] = (sizes - below)[: len(values)], (above - sizes)[: len(values)]
    inner = torch.maximum(inner, values.abs() - floor)
    positive = values > 0
    lower = values - torch.where(positive, inner, outer)
    upper = values + torch.where(positive, outer, inner)
    return (lower.clamp_min(0.0) if psd else lower), upper


def advice(search: davidson.Davidson) -> str:
    """Advice after a search that did not converge."""
    if search.dubious or search.excluded.dimension:
        return "give the exact null space, or products in a wider precision"
    if search.inverse is None:
        return "give an approximate inverse, or more max_products"
    return "give a better approximate inverse, or more max_products"


def nothing(products: CountedProducts, excluded: Excluded, vectors: int, stopped: str | None = None) -> EigenResult:
    """Result if no eigenvalue is nonzero, or none was found."""
    none, settled = torch.zeros(0, dtype=torch.float64, device="cpu"), torch.zeros(0, dtype=torch.bool, device="cpu")
    vector = torch.zeros(products.order, 0, dtype=excluded.vectors.dtype, device=products.device)
    known = 0 if excluded.known is None else excluded.known.dimension
    null = products.order - known if products.norm == 0 else len(excluded.vectors)
    message = "no eigenvalue can be distinguished from zero" if stopped is None else f"not converged: {stopped}"
    ritz = none, vector, none, none, none
    return result(products, ritz, settled, stopped is None, null=null, vectors=vectors, message=message)


def result(
    products: CountedProducts,
    ritz: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    settled: torch.Tensor,
    converged: bool,
    *,
    null: int,
    vectors: int,
    message: str,
) -> EigenResult:
    """Result for the operator before it was divided by 2ᵉ, from values, vectors, residuals and both ends of bounds."""
    values, U, *others = ritz
    scale, count, norm = 2.0**products.exponent, products.count, math.ldexp(products.norm, products.exponent)
    residuals, lower, upper = (part * scale for part in others)
    return EigenResult(
        *(values * scale, U, residuals, lower, upper, settled, converged), count, norm, null, vectors, message
    )


def formed(products: CountedProducts) -> torch.Tensor:
    """Matrix (n, n), scaled to norm about 1, symmetric, float64 on the device."""
    A = products.to_dense().double()
    largest = float(A.abs().max())
    products.exponent = math.frexp(largest)[1] if largest else 0
    A.mul_(2.0 ** (-products.exponent // 2)).mul_(2.0 ** (-products.exponent - (-products.exponent // 2)))
    asymmetry = float(torch.linalg.matrix_norm(A - A.T))
    if asymmetry > 100 * products.rounding * len(A) * float(torch.linalg.matrix_norm(A)):
        raise MatrixError(
            f"the operator is not symmetric: ‖A − Aᵀ‖ is {asymmetry / float(torch.linalg.matrix_norm(A)):.1e} of ‖A‖"
        )
    return (A + A.T) / 2


def eigenpairs(A: torch.Tensor, known: Subspace | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (m,) and eigenvectors (n, m) on the complement of the known null space."""
    if known is None or not known.dimension:
        return tuple(torch.linalg.eigh(A))
    projector = known.project(torch.eye(len(A), dtype=A.dtype, device=A.device))
    reduced = A - projector @ A
    reduced = reduced - reduced @ projector
    # far above all others, so that nothing mixes with it
    far = 4 * float(torch.linalg.matrix_norm(A))
    values, vectors = torch.linalg.eigh((reduced + reduced.T) / 2 + far * (projector + projector.T) / 2)
    kept = len(A) - known.dimension
    return values[:kept], vectors[:, :kept]


def smallest_dense(products: CountedProducts, k: int, excluded: Excluded, *, tol: float) -> EigenResult:
    """Result as by iteration, from all eigenvalues of the formed matrix."""
    A = formed(products)
    values, vectors = eigenpairs(A, excluded.known)
    sizes = values.abs()
    products.norm = float(sizes.max()) if len(sizes) else 0.0
    if products.norm == 0:
        return nothing(products, excluded, len(A))
    noise = products.error
    if products.psd and float(values[0]) < -4 * noise * math.sqrt(len(A)):
        raise MatrixError(
            f"the operator is said to be positive semidefinite but has an eigenvalue of "
            f"{float(values[0]) / products.norm:.2g}‖A‖: set psd to False"
        )
    ranked = sizes.argsort(stable=True)
    null = int((sizes <= noise / 2).sum())
    dubious = int((sizes <= 3 * noise).sum()) - null
    wanted = ranked[null + dubious : null + dubious + k]
    if not len(wanted):
        return nothing(products, excluded, len(A), f"{dubious} eigenvalues are round-off or not" if dubious else None)
    theta, U, residuals = rayleigh_ritz(products, vectors[:, wanted].T)
    others = ranked[null + dubious + k :]
    beyond = float(sizes[others[0]]) - noise * math.sqrt(len(A)) if len(others) else math.inf
    lower, upper = bounds(
        theta, residuals, noise, null=noise * math.sqrt(null + dubious), beyond=beyond, psd=products.psd
    )
    settled = residuals <= torch.clamp(tol * theta.abs(), min=2 * noise)
    apart = not null or float(theta.abs().min()) >= GAP * noise
    converged = bool(settled.all()) and not dubious and apart
    if converged:
        message = f"converged: the matrix was formed; {products.count} products"
        if len(wanted) < k:
            message += f"; only {len(wanted)} eigenvalues are nonzero"
    elif dubious or not apart:
        message = (
            f"not converged: at least {null} eigenvalues are zero to round-off, others may be; "
            "give the exact null space, or products in a wider precision"
        )
    else:
        message = "not converged: the products are noisier than they claim; make the operator deterministic"
    ritz = theta, U, residuals, lower, upper
    return result(products, ritz, settled.cpu(), converged, null=null, vectors=3 * len(A), message=message)

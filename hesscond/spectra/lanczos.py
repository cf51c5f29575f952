"""Eigenvalues at the ends of a spectrum by thick-restart Lanczos, with true residuals and a search for missed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hesscond.errors import ConfigError
from hesscond.operators import ApproximateInverse, Subspace, SymmetricOperator, as_operator
from hesscond.operators.parallel import led
from hesscond.spectra.eigen import EigenResult, Interval, intervals
from hesscond.spectra.krylov import Krylov, Reorthogonalization
from hesscond.spectra.krylov_basis import Basis, plan
from hesscond.spectra.krylov_run import Callback, Run
from hesscond.spectra.krylov_selective import Selective
from hesscond.spectra.krylov_wanted import Wanted
from hesscond.spectra.smallest import smallest_nonzero

REORTHOGONALIZATIONS: dict[str, type[Reorthogonalization]] = {"full": Reorthogonalization, "selective": Selective}

#: What is not at an end of the spectrum.
SMALLEST = "smallest-nonzero"

#: Operators up to this order are formed once the iteration has taken as many products as that does.
FORMED = 2000

#: The probability with which a search may miss an eigenvalue, unless asked otherwise.
MISSED = 1e-6


def lanczos(
    operator: SymmetricOperator | Any,
    k: int = 1,
    which: str = "top",
    *,
    tol: float = 1e-8,
    block: int = 1,
    basis: int | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    start: torch.Tensor | EigenResult | None = None,
    seed: int = 0,
    max_products: int | None = None,
    reorthogonalization: str = "full",
    missed: float | None = None,
    inverse: ApproximateInverse | None = None,
    null_space: Subspace | None = None,
    callback: Callback | None = None,
) -> EigenResult:
    """Eigenvalues at the ends of the spectrum of a symmetric operator A (n, n) with their eigenvectors.

    Thick-restart block Lanczos. Vectors stay on the operator's device; only the projected problem, of the size of the
    basis, is solved on the host, in float64. All thresholds are relative to the largest |θ| seen: c·A has c times the
    eigenvalues of A, whatever c.

    Parameters
    ----------
    operator
        A, or anything `hesscond.operators.as_operator` takes: a matrix, an operator of scipy or curvlinops.
    k
        How many eigenvalues, of each end.
    which
        "top" or "bottom" (the algebraically largest or smallest), "both" (k of each), "magnitude" (largest |λ|).
        "smallest-nonzero" is not for Lanczos: it is done by `smallest_nonzero`, where ``tol`` is the relative error.
    tol
        Residual norms asked for, relative to the largest |θ| seen.
    block
        Vectors a step: 1 needs the fewest products, the multiplicity of clustered eigenvalues finds all copies at once.
    basis
        How many vectors of length n may be held, beside 5 more; by default 32, or 2·(wanted) + 7 if that is more.
    memory
        Bytes for all of them; a smaller basis is restarted earlier.
    dtype
        Precision of the vectors, by default that of the operator. With torch.float64 for a float32 operator the
        recurrences are exact and the products alone are rounded.
    start : (n, j) tensor or EigenResult
        Approximate eigenvectors, those of a previous training iteration, say, or of an interrupted run. If their
        Ritz vectors are still good enough that is all. Otherwise the process starts from their sums, as many as a
        block has vectors: the Krylov space of a sum of approximate eigenvectors improves all of them at a time.
    seed
        Of all random vectors.
    max_products
        Give up after so many products with one vector; by default 10 n + 1,000, at most 100,000. Up to n = 2,000 the
        default is to form the matrix after n products, with as many again, if its ends are too clustered by then.
    reorthogonalization
        "full", or "selective": fewer passes over the basis, checked for ghost copies, with "full" as the fallback.
    missed
        The probability with which the search for missed eigenvalues may overlook one; 1: do not search. By default
        1e-6, but no search for one eigenvalue without ``start``: that run is itself a search from a random vector.
    inverse, null_space
        For "smallest-nonzero" only: see there.
    callback
        Called with a `Progress` at each restart; if it returns True the run stops with what was found, which can be
        passed on as ``start``.

    Returns
    -------
    EigenResult

    Raises
    ------
    ConfigError
        An unknown option, or a basis too small for k.
    MatrixError
        k is larger than n; ``memory`` is too small; a product is not finite.

    Notes
    -----
    *Certain*, up to the rounding of the products (``operator.rounding``), is that every interval without a search
    contains an eigenvalue of A, as many in overlapping ones as there are, and that the i-th eigenvalue from the top is
    no smaller than the i-th value (from the bottom: no larger), as Ritz values are.

    That no eigenvalue further out was missed cannot be certain from products with finitely many vectors: a Krylov space
    from one vector contains one copy of a multiple eigenvalue. The found vectors are therefore locked and a new process
    is started on their complement from a random vector, until (1) the bounds of Kuczyński and Woźniakowski for random
    starts, which hold but for the probability ``missed``, leave nothing further out; or (2), where gaps are too small
    for that, its extreme Ritz value has a residual well below its distance to those found, or as small as asked for,
    after so many steps that by (1) nothing isolated is missed: then nothing further out is left with probability one,
    but without a bound of the probability for finitely many steps (`Wanted.separated` says what is taken for granted);
    or (3) a wanted eigenvalue turns up, and the iteration goes on with it. By (1) and (2) the rest of the spectrum is
    bounded. With these bounds the i-th interval contains the i-th eigenvalue, and it is the quadratic one where the
    rest is further in, or reaches as far as the rest where that is not told apart: see `intervals`.

    One eigenvalue without ``start`` is the outermost with probability one; but it may be another of a cluster that is
    narrower than about 100 times the tolerance. ``missed=1e-6`` asks for the search there too.

    Examples
    --------
    >>> from hesscond.operators import Diagonal
    >>> found = lanczos(Diagonal(torch.arange(1.0, 1001.0, dtype=torch.float64)), k=2, which="both")
    >>> found.converged, [round(value, 6) for value in found.eigenvalues.tolist()]
    (True, [1000.0, 999.0, 2.0, 1.0])
    """
    A = as_operator(operator)
    if which == SMALLEST:
        return at_the_bottom(
            A,
            k,
            {"block": block != 1, "reorthogonalization": reorthogonalization != "full", "missed": missed is not None},
            tol=tol,
            inverse=inverse,
            null_space=null_space,
            basis=basis,
            memory=memory,
            dtype=torch.float64 if dtype is None else dtype,
            start=start,
            seed=seed,
            max_products=max_products,
            callback=callback,
        )
    if inverse is not None or null_space is not None:
        raise ConfigError(f"inverse and null_space are for which='{SMALLEST}', not for '{which}'")
    if reorthogonalization not in REORTHOGONALIZATIONS:
        names = ", ".join(map(repr, REORTHOGONALIZATIONS))
        raise ConfigError(f"reorthogonalization='{reorthogonalization}' is not known: use one of {names}")
    if block < 1 or (block > 1 and reorthogonalization == "selective"):
        raise ConfigError(f"block={block} does not fit: 1 or more, and 1 with reorthogonalization='selective'")
    wanted, block = Wanted(which, k, A.order), min(block, A.order)
    dtype = A.dtype if dtype is None else dtype
    fits = memory is None or 8 * 3 * A.order**2 <= memory
    small = max_products is None and callback is None and A.order <= FORMED and fits
    if max_products is None:
        max_products = max(A.order, 2 * wanted.count + block) if small else min(10 * A.order + 1000, 100_000)
    if max_products < 2 * wanted.count + block:
        raise ConfigError(
            f"max_products={max_products} is too few for {wanted.count} eigenvalues: "
            f"at least {2 * wanted.count + block} are needed"
        )
    if missed is None:
        missed = 1.0 if wanted.count == 1 and start is None else MISSED

    def compute() -> EigenResult:
        layout = plan(A.order, wanted.count, block=block, basis=basis, memory=memory, dtype=dtype)
        fresh = torch.Generator(A.device).manual_seed(seed)
        storage = Basis(layout, A.order, wanted.count, dtype=dtype, device=A.device)
        process = Krylov(
            A,
            storage,
            block=block,
            dtype=dtype,
            fresh=fresh,
            reorthogonalization=REORTHOGONALIZATIONS[reorthogonalization](),
        )
        run = Run(process, wanted, layout, tol=tol, missed=missed, max_products=max_products, callback=callback)
        if start is None:
            process.seed(process.random())
        else:
            run.begin(start)
        found = run.finish()
        return found if found.converged or not small else formed_ends(A, found, which, k, tol, dtype)

    return led(A, compute)


def formed_ends(
    A: SymmetricOperator, tried: EigenResult, which: str, k: int, tol: float, dtype: torch.dtype
) -> EigenResult:
    """The same from all eigenvalues of the formed matrix, after an iteration that did not converge, if that does."""
    matrix = A.to_dense().to(torch.float64)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    places = torch.arange(A.order - 1, -1, -1, device=values.device)
    ends = {"top": places[:k], "bottom": places[-k:], "both": torch.cat([places[:k], places[-k:]])}
    chosen = ends[which] if which in ends else values.abs().argsort(descending=True)[:k].sort(descending=True).values
    U = vectors[:, chosen]
    images = (A @ U.to(A.dtype)).to(torch.float64)
    theta = (U * images).sum(0)
    residuals = torch.linalg.vector_norm(images - U * theta, dim=0).cpu()
    norm = float(values.abs().max())
    # rounding of the products, and of the matrix made of them
    rounding = A.rounding * norm * A.order**0.5
    others = torch.ones(A.order, dtype=torch.bool, device=values.device).index_fill_(0, chosen, False)
    rest = values[others]
    between = Interval(1.0, 0.0) if not len(rest) else Interval(float(rest[0]) - rounding, float(rest[-1]) + rounding)
    lower, upper = intervals(theta.cpu(), residuals, A.rounding * norm, between)
    settled = residuals <= tol * norm
    if not bool(settled.all()):
        # noise of the products, which the iteration has met too
        return tried
    return EigenResult(
        eigenvalues=theta.cpu(),
        eigenvectors=U.to(dtype),
        residuals=residuals,
        lower=lower,
        upper=upper,
        settled=settled,
        converged=True,
        products=tried.products + A.order + len(chosen),
        norm=norm,
        null=0,
        vectors=max(tried.vectors, 3 * A.order),
        message="converged: the matrix was formed",
    )


def at_the_bottom(operator: SymmetricOperator, k: int, unfit: Mapping[str, bool], **options: Any) -> EigenResult:
    """`smallest_nonzero`, unless an option was given that is for Lanczos alone."""
    for name, given in unfit.items():
        if given:
            raise ConfigError(f"{name} is for the ends of the spectrum, not for which='{SMALLEST}'")
    return smallest_nonzero(operator, k, **options)

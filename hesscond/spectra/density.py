"""The spectral density of a symmetric operator by stochastic Lanczos quadrature.

A random unit vector v has the spectral measure Σ (uᵢᵀv)² δ(λᵢ), whose mean is the spectral density Σ δ(λᵢ) / n. Lanczos
finds the quadrature of each (`hesscond.spectra.quadrature`); their average is the estimate and their spread its
sampling error (Golub and Meurant 2010; Ubaru, Chen and Saad, SIAM J. Matrix Anal. Appl. 38, 2017; Ghorbani, Krishnan
and Xiao, ICML 2019).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hesscond.errors import ConfigError, MatrixError
from hesscond.operators import Subspace, SymmetricOperator, as_operator
from hesscond.operators.operator import ROUNDING
from hesscond.operators.parallel import led
from hesscond.spectra.measure import Density
from hesscond.spectra.quadrature import Recurrence
from hesscond.spectra.recurrences import WORKING, recurrences, unit_vectors

logger = logging.getLogger("hesscond")

#: Up to this order all eigenvalues are computed, if that takes no more products than the quadrature.
DENSE_ORDER = 2000

#: Bytes that several probes at a time may take; a single one takes what it needs.
MEMORY = 2**30

#: Nodes are known to this multiple of the rounding of a product.
BLUR = 10.0

#: … but never exactly: of the zero matrix.
SMALLEST = float(np.finfo(float).tiny)

METHODS = ("auto", "lanczos", "dense")


@dataclass(frozen=True)
class DensityPlan:
    """What `density` is going to do.

    Attributes
    ----------
    method
        "lanczos", or "dense": all eigenvalues of the formed matrix.
    steps
        Of Lanczos.
    block
        Probes at a time.
    vectors
        The most vectors of length n that are held at a time.
    memory
        Their bytes.
    products
        Products with one vector, at most.
    """

    method: str
    steps: int
    block: int
    vectors: int
    memory: int
    products: int


def plan_density(
    operator: SymmetricOperator,
    *,
    probes: int = 10,
    steps: int = 80,
    method: str = "auto",
    dtype: torch.dtype | None = None,
    memory: float | None = None,
    null_space: Subspace | None = None,
) -> DensityPlan:
    """What `density` would do with these arguments, without a product.

    Raises
    ------
    ConfigError
        Arguments that make no sense, or one probe that does not fit into ``memory``.
    """
    if method not in METHODS:
        raise ConfigError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if probes < 1 or steps < 1:
        raise ConfigError(f"the density takes at least one probe and one step, not {probes} and {steps}")
    if memory is not None and not memory > 0:
        raise ConfigError(f"memory must be a positive number of bytes, not {memory}")
    order, null = operator.order, operator.null_space if null_space is None else null_space
    if null is not None and null.order != order:
        raise ConfigError(f"a subspace of R^{null.order} is no null space of an operator of order {order}")
    steps = min(steps, order - (null.dimension if null is not None else 0))
    dtype = operator.dtype if dtype is None else dtype
    bytes_of_one = order * dtype.itemsize
    if method == "auto":
        # the columns of the identity are multiplied 64 at a time; the decomposition is on the host
        fits = memory is None or (order + 64) * order * 8 <= memory
        method = "dense" if order <= min(DENSE_ORDER, probes * steps) and fits else "lanczos"
    if method == "dense" or steps == 0:
        return DensityPlan("dense", 0, 0, order, order * order * 8, order if steps else 0)
    one = steps + WORKING
    if memory is not None and one * bytes_of_one > memory:
        raise ConfigError(
            f"{one} vectors of length {order} take {one * bytes_of_one / 1e6:.0f} MB, more than the memory of "
            f"{memory / 1e6:.0f} MB: allow more, or at most {int(memory) // bytes_of_one - WORKING} steps"
        )
    block = max(1, min(probes, int(MEMORY if memory is None else memory) // (one * bytes_of_one)))
    return DensityPlan("lanczos", steps, block, block * one, block * one * bytes_of_one, probes * steps)


def density(
    operator: object,
    *,
    probes: int = 10,
    steps: int = 80,
    seed: int = 0,
    method: str = "auto",
    dtype: torch.dtype | None = None,
    memory: float | None = None,
    null_space: Subspace | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Density:
    """The spectral density of a symmetric operator.

    A null space that is known is not estimated: the probes are drawn from its complement, and its share is
    added at zero. At most ``block``·(``steps`` + 3) vectors are held at a time, on the operator's device; ``block``,
    the number of probes that are multiplied together, is as large as ``memory`` allows (`plan_density` says it
    beforehand).

    Parameters
    ----------
    operator : (n, n)
        Anything `as_operator` takes.
    probes
        Random vectors.
    steps
        Lanczos steps from each: so many nodes.
    seed
        Of the random vectors.
    method
        "lanczos"; "dense": form the matrix and compute all eigenvalues, which is exact; "auto": "dense" for n ≤ 2000
        if that takes no more products.
    dtype
        Precision of the recurrences; that of the operator if not given.
    memory
        Bytes for the vectors.
    null_space
        A subspace of the null space that is known; None: ``operator.null_space``.
    on_progress
        Called now and then with the number of products so far and the most there will be.

    Returns
    -------
    Density

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
    plan = plan_density(A, probes=probes, steps=steps, method=method, dtype=dtype, memory=memory, null_space=known)
    logger.info(
        "density: %s, at most %d vectors of length %d, %.3g MB", plan.method, plan.vectors, A.order, plan.memory / 1e6
    )
    if plan.method == "dense":
        return led(A, lambda: dense_density(A, known))
    precision = A.dtype if dtype is None else dtype
    return led(A, lambda: lanczos_density(A, known, plan, probes, seed, precision, on_progress))


def lanczos_density(
    A: SymmetricOperator,
    known: Subspace | None,
    plan: DensityPlan,
    probes: int,
    seed: int,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> Density:
    """The density by a plan."""
    found: list[Recurrence] = []
    done = 0
    vectors = unit_vectors(A.order, probes, seed, known, A.device)

    def step() -> None:
        nonlocal done
        done += width
        if on_progress is not None:
            on_progress(done, plan.products)

    while len(found) < probes:
        width = min(plan.block, probes - len(found))
        found += recurrences(A, vectors, width, plan.steps, dtype=dtype, null_space=known, on_step=step)
    if not all(np.isfinite(one.alphas).all() and np.isfinite(one.betas).all() for one in found):
        raise MatrixError("products of the operator are not finite: look at the loss and the parameters")
    size = max(float(np.abs(one.gauss()[0]).max()) for one in found)
    rounding = max(A.rounding, ROUNDING * torch.finfo(dtype).eps)
    return Density.of(
        found,
        order=A.order,
        null=0 if known is None else known.dimension,
        psd=A.psd,
        blur=max(BLUR * rounding * size, SMALLEST),
        products=done,
        vectors=plan.vectors,
        seed=seed,
    )


def dense_density(A: SymmetricOperator, known: Subspace | None) -> Density:
    """The density from all eigenvalues."""
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
    return Density.exact(
        values,
        order=A.order,
        null=null,
        psd=A.psd,
        blur=max(BLUR * max(A.rounding, A.order**0.5 * np.finfo(float).eps) * largest, SMALLEST),
        products=A.order if len(values) else 0,
        vectors=A.order,
    )

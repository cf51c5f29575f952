"""κ of many small Hessians H = FᵀF at once, from both ends of the spectra of their Gram matrices.

Indefinite ones, Ĥᵀ diag(w_i) Ĥ with a common Ĥ, have the nonzero eigenvalues of R diag(w_i) Rᵀ with Ĥᵀ = QR.

Two batched routes: the eigenvalues of the Gram matrix K = D C D, where C has a unit diagonal; and, where that does not
resolve the smallest, the largest eigenvalue of K⁻¹ from C = UᵀU, whose relative error does not depend on the grading of
D (docs/concepts/bounds.md). The rest is measured one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hesscond.errors import MatrixError
from hesscond.operators.operator import in_halves
from hesscond.operators.threads import side_by_side, threads_for
from hesscond.spectra.condition import EPS, ConditionNumber, error_factor
from hesscond.spectra.forms import FactorStack
from hesscond.spectra.solvers import base

#: Units of similar rank, and numbers in their stack, that a thread takes at a time, so that little is padded.
CHUNK, CHUNK_SIZE = 32, 2**19

#: Units and numbers at a time on any other device, where only the memory counts.
DEVICE_CHUNK, DEVICE_CHUNK_SIZE = 4096, 2**26

#: Powers of two that the norms within one unit may span: the squares and their inverses are still doubles.
SPAN = 450

#: Rows with squares of 2**±ROW_POWERS are taken as they are, and factors of 2**±FACTOR_POWERS; others are scaled.
ROW_POWERS, FACTOR_POWERS = 600, 30

#: Numbers in the factors that are formed at once where they are longer than wide.
STACK_SIZE = 2**24

#: The factor of C proves the rank where rounding makes up no larger share of its smallest eigenvalue.
PROOF = 0.01

#: Gram matrices D C D of several units, scaled by powers of two: C (b, k, k) or (1, k, k), of unit diagonal up to
#: rounding and where ρ = 0 pads it; and ρ (b, k), the diagonals of D, at most 1 and at least 2**-SPAN where not 0.
Stack = tuple[torch.Tensor, torch.Tensor]

#: Route of indefinite Hessians; all routes.
SIGNED = "batched eigenvalues"
SOLVERS = ("batched Gram", "batched Cholesky", SIGNED)


@base.register
class Batched(base.StackSolver):
    """κ of a `FactorStack`: each result is that of its form alone, up to rounding, which is measured where needed."""

    def conditions(self, forms: Sequence[base.Form], rtol: float) -> dict[int, ConditionNumber]:
        if not isinstance(forms, FactorStack) or len(forms) == 0:
            return {}
        if forms.roots is None:
            table = stack_ends(forms.rows.detach().double(), rtol)
        elif forms.signs is None:
            table = scaled_table(forms.rows, forms.roots, rtol)
        else:
            table = signed_table(forms.rows, forms.roots, forms.signs, forms.noises, rtol)
        return dict(enumerate(map(base.zero_if_rounding, concluded(table, forms, rtol))))


def scaled_table(rows: torch.Tensor, roots: torch.Tensor, rtol: float) -> np.ndarray:
    """Table of `ends_of` for H_i = Ĥᵀ diag(root_i²) Ĥ, the units i of a layer, from the shared product ĤĤᵀ."""
    rows, roots = rows.detach().double(), roots.detach().double()
    m, n = rows.shape
    if not bool(roots.isfinite().all()):
        raise MatrixError("the roots have NaN or infinite entries: no condition number is defined")
    active = (roots != 0).sum(0).cpu().numpy()
    short, tall = np.flatnonzero(active <= n), np.flatnonzero(active > n)
    table = np.empty((roots.shape[1], 9))
    if len(short):
        table[short] = shared_ends(rows, roots if len(tall) == 0 else roots[:, short.tolist()], rtol)
    # for these the Gram matrices of the columns are smaller, but every unit needs a separate one
    size = max(1, STACK_SIZE // (m * n))
    for at in (tall[start : start + size] for start in range(0, len(tall), size)):
        table[at] = stack_ends(rows * roots.T[at.tolist(), :, None], rtol)
    return table


def signed_table(
    rows: torch.Tensor, roots: torch.Tensor, signs: torch.Tensor, noises: torch.Tensor | None, rtol: float
) -> np.ndarray:
    """Table of `ends_of`, and the number of negative eigenvalues, for H_i = Ĥᵀ diag(sign_i·root_i²) Ĥ of full rank.

    NaN where that is not certain, or where bounds of the entries, or a factor of ±H, may be better than the norm's.
    """
    m, n = rows.shape
    k = min(m, n)
    table = np.full((roots.shape[1], 10), np.nan)
    table[:, 0], table[:, 1] = k, 0
    squares = rows.square().sum(1)
    if not bool(((squares > 2.0**-ROW_POWERS) & (squares < 2.0**ROW_POWERS)).all()):
        return table
    # each column of Ĥᵀ is known relative to its norm, before and after the QR
    norms, lengths = squares.sqrt(), torch.linalg.vector_norm(rows, dim=0)
    directions = rows.T / norms
    if n > m:
        Q, directions = torch.linalg.qr(directions)
        lengths = Q.abs().T @ lengths
    rho, peaks, spanned = products(roots, norms, torch.zeros_like(norms, dtype=torch.long), roots != 0)
    weights = rho.square()

    def ends(members: list[int]) -> torch.Tensor:
        values = torch.linalg.eigvalsh((directions * (signs.T * weights)[members, None]) @ directions.T)
        sizes = values.abs()
        return torch.stack([sizes.amax(1), sizes.amin(1), (values < 0).sum(1).double()])

    members, values = in_parts(ends, np.flatnonzero(spanned.cpu().numpy()), np.full(len(table), k), rows.device)
    if len(members) == 0:
        return table
    top, bottom, negative = values
    # rounding of the terms of each diagonal entry, and of all
    entries, terms = weights @ directions.square().T, weights.sum(1)
    if noises is not None:
        given = noises * power_of_two(-2 * peaks.clamp(-ROW_POWERS // 2, ROW_POWERS // 2))
        entries = entries + given[:, None] * (lengths / torch.linalg.vector_norm(lengths)).square()
        terms = terms + given
    finer = entries.amax(1) > base.GRADED * entries.amin(1)
    if noises is None:
        # ±H ≥ 0 is known as accurately as its factor
        finer |= (signs.T * weights).sum(1).abs() == terms
    finer = finer.cpu().numpy()[members]
    error = EPS * (error_factor(m, n) * terms.cpu().numpy()[members] + error_factor(k, k) * top)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(bottom > error, bottom - error, np.nan)
        narrow = (top + error) / low <= (1 + rtol) * (top - error) / (bottom + error)
    low = np.where(narrow | ~finer, low, np.nan)
    table[members, 1] = peaks.cpu().numpy()[members]
    table[members, 2:] = np.stack(
        [top, top - error, top + error, bottom, low, bottom + error, np.full_like(top, 2), negative], 1
    )
    return table


def shared_ends(rows: torch.Tensor, roots: torch.Tensor, rtol: float) -> np.ndarray:
    """Table of `ends_of` for units that share their rows: every C is a principal submatrix of one."""
    m, n = rows.shape
    exponents = torch.zeros(m, dtype=torch.long, device=rows.device)
    active = roots != 0
    gram = rows @ rows.T
    squares = gram.diagonal()
    # false for NaN too
    if not bool(((squares > 2.0**-ROW_POWERS) & (squares < 2.0**ROW_POWERS)).all()):
        largest = rows.abs().amax(1)
        if not bool(largest.isfinite().all()):
            raise MatrixError("the rows have NaN or infinite entries: no condition number is defined")
        exponents = torch.frexp(largest).exponent.long()
        rows = divided(rows, exponents[:, None])
        gram = rows @ rows.T
        active &= (largest != 0)[:, None]
    squares = gram.diagonal()
    norms = torch.where(squares == 0, 1.0, squares.sqrt())
    # one more row and column of zeros, for the padding
    C = gram.new_zeros(m + 1, m + 1)
    C[:m, :m] = gram / norms[:, None] / norms
    rho, peaks, spanned = products(roots, norms, exponents, active)
    rho = torch.cat([rho, rho.new_zeros(len(rho), 1)], 1)
    counts = active.sum(0)
    order = active.T.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    order = torch.where(torch.arange(m, device=rows.device) < counts[:, None], order, m)
    sizes, powers = torch.stack([torch.where(spanned, counts, 0), peaks]).tolist()

    def stack(members: list[int]) -> Stack:
        units = torch.tensor(members, device=rows.device)
        if min(sizes[i] for i in members) == m:
            return C[None, :m, :m].clone(), rho[units, :m]
        at = order[units, : max(sizes[i] for i in members)]
        flat = (at[:, :, None] * (m + 1) + at[:, None, :]).ravel()
        return C.ravel().index_select(0, flat).view(*at.shape, -1), rho[units[:, None], at]

    return ends_of(stack, sizes, powers, width=n, rtol=rtol, device=rows.device)


def stack_ends(factors: torch.Tensor, rtol: float) -> np.ndarray:
    """Table of `ends_of` for different factors (u, m, n), from the rows or columns, whichever are fewer."""
    wide = factors.shape[1] < factors.shape[2]
    largest = torch.linalg.vector_norm(factors, ord=math.inf, dim=2 if wide else 1)
    top = largest.amax(1)
    if not math.isfinite(float(top.amax())):
        raise MatrixError("a factor has NaN or infinite entries: its condition number is not defined")
    active = largest != 0
    exponents = torch.frexp(top).exponent.long()
    # the squares of smaller numbers underflow
    spanned = ((torch.frexp(largest).exponent >= exponents[:, None] - SPAN) | ~active).all(1)
    sizes = torch.where(spanned, active.sum(1), 0).tolist()
    scaled = bool((active.any(1) & (exponents.abs() > FACTOR_POWERS)).any())
    if not scaled:
        exponents = torch.zeros_like(exponents)

    def stack(members: list[int]) -> Stack:
        part = factors[members]
        if scaled:
            part = divided(part, exponents[members, None, None])
        C = part @ part.mT if wide else part.mT @ part
        norms = torch.where(active[members], C.diagonal(dim1=1, dim2=2).sqrt(), 1.0)
        rho = torch.where(active[members], norms, 0.0)
        return C / norms[:, :, None] / norms[:, None, :], rho

    powers = exponents.tolist()
    return ends_of(stack, sizes, powers, width=max(factors.shape[1:]), rtol=rtol, device=factors.device)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**e exactly, for integers −1022 ≤ e ≤ 1023 (`torch.ldexp` goes through float32)."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def divided(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Divide ``values`` by 2**exponents, in two steps since 2**1074 is no double."""
    half = torch.div(exponents, 2, rounding_mode="floor")
    return values * power_of_two(-half) * power_of_two(half - exponents)


def products(
    roots: torch.Tensor, norms: torch.Tensor, exponents: torch.Tensor, active: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write roots·norms·2**exponents (u, N) as ρ·2**peak, ρ ≤ 1; also a mask of units whose ρ span few powers of 2."""
    weights, of_roots = torch.frexp(roots.T.abs())
    mantissas, of_norms = torch.frexp(norms)
    total, on = of_roots + (of_norms + exponents), active.T
    peaks = torch.where(on, total, -(2**30)).amax(1)
    shifts = total - peaks[:, None]
    spanned = ((shifts >= -SPAN) | ~on).all(1)
    scaled = weights * mantissas * power_of_two(shifts.clamp(-SPAN, 0))
    return torch.where(on, scaled, 0.0), peaks, spanned


def ends_of(
    stack: Callable[[list[int]], Stack],
    sizes: list[int],
    powers: list[int],
    *,
    width: int,
    rtol: float,
    device: torch.device,
) -> np.ndarray:
    """Table (u, 9) of both ends of the nonzero spectra of D C D for all units, with rigorous bounds.

    Columns: rank, power, λ_max and its bounds, λ_min and its bounds, index in `SOLVERS`; NaN where nothing was found.
    ``sizes`` are the numbers of rows with ρ > 0 (0: leave out), ``width`` the length of the vectors.
    """
    rank, power = np.array(sizes), np.array(powers)
    table = np.full((9, len(sizes)), np.nan)
    table[0], table[1] = rank, power
    members, values = in_parts(lambda part: extremes(stack(part)), np.flatnonzero(rank), rank, device)
    top, bottom = values
    error = gram_factor(int(rank.max()), width) * EPS * top
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(bottom > error, bottom - error, np.nan)
        table[2:, members] = top, top - error, top + error, bottom, low, bottom + error, np.zeros_like(top)
        good = (top + error) / low <= (1 + rtol / 2) * (top - error) / (bottom + error)
    # κ above rtol / eps, or a singular matrix
    poor, values = in_parts(lambda part: inverse_ends(stack(part), width), members[~good], rank, device)
    if len(poor):
        table[5:8, poor], table[8, poor] = values, 1
    return table.T


def gram_factor(k: int, width: int) -> float:
    """Constant of the normwise bound of a (k, k) Gram matrix and of its eigenvalues."""
    return error_factor(k, width) + error_factor(k, k)


def extremes(stack: Stack) -> torch.Tensor:
    """Largest and smallest eigenvalue (2, b) of D C D without its zero rows, by LAPACK."""
    C, rho = stack
    values = torch.linalg.eigvalsh(C * rho[:, :, None] * rho[:, None, :])
    # padding has the smallest eigenvalues, or all are of the size of round-off
    bottom = values.gather(1, (rho == 0).sum(1, keepdim=True))
    return torch.stack([values[:, -1], bottom[:, 0]])


def inverse_ends(stack: Stack, width: int) -> torch.Tensor:
    r"""Smallest eigenvalue of D C D without its zero rows, and its bounds, (3, b); NaN where it is not proved > 0.

    Relative errors, with Frobenius norms: from forming and factoring C, c·eps·\|C\|\|C⁻¹\|; from inverting U,
    2c·eps·\|U\|\|U⁻¹\|; and from the eigenvalue of K⁻¹, c·eps.
    """
    C, rho = stack
    C.diagonal(dim1=1, dim2=2).fill_(1.0)
    k = C.shape[-1]
    inner = error_factor(k, k) * EPS
    forming = gram_factor(k, width) * EPS + inner
    U, info = torch.linalg.cholesky_ex(C, upper=True)
    inverse = torch.linalg.solve_triangular(U, torch.eye(k, dtype=C.dtype, device=C.device).expand_as(U), upper=True)
    trace = torch.linalg.vector_norm(inverse, dim=(1, 2)).square()
    graded = forming * torch.linalg.vector_norm(C, dim=(1, 2)) * trace
    proved = (info == 0) & (graded < PROOF)
    smallest = torch.where(rho == 0, math.inf, rho).amin(1)
    Y = inverse * torch.where(rho == 0, 0.0, smallest[:, None] / rho)[:, :, None]
    Y = torch.where(proved[:, None, None], Y, 1.0)
    bottom = smallest.square() / torch.linalg.eigvalsh(Y @ Y.mT)[:, -1]
    error = (graded + 2 * inner * (1 + (k * trace).sqrt())) * (1 + 2 * PROOF)
    ends = torch.stack([bottom, bottom * (1 - error), bottom * (1 + error)])
    return torch.where(proved, ends, math.nan)


def in_parts(
    task: Callable[[list[int]], torch.Tensor], units: np.ndarray, sizes: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Run ``task`` on all units in parts of similar size; return the units, and the columns of its results."""
    if len(units) == 0:
        return units, np.zeros((2, 0))
    threads, most, numbers = threads_for(device), CHUNK, CHUNK_SIZE
    if device.type != "cpu":
        most, numbers = DEVICE_CHUNK, DEVICE_CHUNK_SIZE
    # the largest first
    ranked = units[np.argsort(-sizes[units], kind="stable")]
    count = -(-len(ranked) // max(1, min(most, numbers // int(sizes[ranked[0]]) ** 2)))
    count = min(-(-count // threads) * threads, len(ranked))

    def halved(part: list[int]) -> torch.Tensor:
        return torch.cat(in_halves(lambda some: task(part[some]), len(part)), 1)

    parts = [part.tolist() for part in np.array_split(ranked, count)]
    return ranked, torch.cat(side_by_side(halved, parts, threads), 1).cpu().numpy()


def concluded(table: np.ndarray, forms: FactorStack, rtol: float) -> list[ConditionNumber]:
    """Results from the table of `ends_of`; units that it does not resolve are measured one after another."""
    errors, order = forms.errors, forms.rows.shape[-1]
    rank, power, top, top_low, top_high, bottom, low, high, solver = table.T[:9]
    negative = table[:, 9] if table.shape[1] > 9 else np.zeros_like(rank)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if errors is not None:
            # |δσ| ≤ e, in the units of the scaled matrices
            e = np.ldexp([float(np.linalg.norm(bound)) for bound in errors], -power.astype(int))
            top_low, low = (np.maximum(np.sqrt(bound) - e, 0.0) ** 2 for bound in (top_low, low))
            top_high, high = ((np.sqrt(bound) + e) ** 2 for bound in (top_high, high))
        scale = 2 * power.astype(int)
        values = top / bottom
        lower = np.maximum(1.0, top_low / high * (1 - 4 * EPS))
        upper = np.maximum(values, top_high / low * (1 + 4 * EPS))
        cutoff = np.maximum(bottom - low, high - bottom)
        columns = (
            *(values, np.minimum(lower, values), upper, np.ldexp(top, scale), np.ldexp(bottom, scale)),
            *(rank, np.ldexp(cutoff, scale), bottom / cutoff, solver, negative),
        )
        good = np.isfinite(upper) & ((upper - lower <= rtol * values) | (solver == SOLVERS.index(SIGNED)))

    def alone(i: int) -> ConditionNumber:
        return forms[i].measured(rtol)

    # one after another: most of it is Python, whose threads take turns
    left = np.flatnonzero(~good).tolist()
    others = dict(zip(left, side_by_side(forms.singly or alone, left, 1), strict=True))
    results = []
    for i, numbers in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if i in others:
            results.append(others[i])
            continue
        value, below, above, largest, smallest, size, cut, gap, route, minus = numbers
        name, nullity = SOLVERS[int(route)], order - int(size)
        kappa = ConditionNumber(
            value, below, above, largest, smallest, int(size), nullity, int(minus), cut, gap, True, name, "structural"
        )
        results.append(kappa)
    return results

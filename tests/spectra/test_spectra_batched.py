import math
from statistics import median

import mpmath
import numpy as np
import pytest
import torch

from hesscond.errors import MatrixError
from hesscond.operators.threads import openblas, side_by_side
from hesscond.spectra.forms import FactorStack
from hesscond.spectra.reductions import factor_condition
from hesscond.spectra.solvers.base import conditions

SMALL = 1e-6


def scaled_gram_conditions(rows, roots, **known):
    return conditions(FactorStack(rows, roots, **known), rtol=SMALL)


def stacked_conditions(factors):
    return conditions(FactorStack(factors), rtol=SMALL)


def exact_kappa(F, digits=70):
    """λ_max / λ_min of the smaller Gram matrix of the nonzero rows and columns, in ``digits`` digits; the λs too."""
    F = F[F.any(1)]
    with mpmath.workdps(digits):
        A = mpmath.matrix(F.tolist())
        G = A * A.T if A.rows <= A.cols else A.T * A
        values = sorted(mpmath.eigsy(G, eigvals_only=True))
        return values[-1] / values[0], values[-1], values[0]


def layer(rng, m, n, units, *, spread=0.0, active=0.7):
    """Ĥ with a column of ones and roots over 10**spread, some of them 0; each unit has an active sample."""
    rows = rng.standard_normal((m, n))
    rows[:, 0] = 1
    roots = 10.0 ** rng.uniform(-spread, 0, (m, units)) * (rng.random((m, units)) < active)
    roots[0] = 10.0 ** rng.uniform(-spread, 0, units)
    return torch.from_numpy(rows), torch.from_numpy(roots)


def check(results, factors, *, exact=True):
    """The truth is inside every interval; rank and decision are those of `factor_condition`. Returns the widths."""
    widths = []
    for kappa, F in zip(results, factors, strict=True):
        F = F.numpy()
        single = factor_condition(F, rtol=SMALL)
        assert (kappa.rank, kappa.nullity, kappa.negative) == (single.rank, single.nullity, 0)
        assert kappa.rank_decision == single.rank_decision == "structural"
        assert kappa.resolved
        assert kappa.width <= SMALL
        assert kappa.lower <= kappa.value <= kappa.upper
        if exact:
            # the product root·Ĥ is rounded once, which moves κ by eps
            truth, largest, smallest = exact_kappa(F)
            assert kappa.lower * (1 - 1e-15) <= truth <= kappa.upper * (1 + 1e-15)
            assert abs(kappa.lambda_max / largest - 1) < SMALL
            assert abs(kappa.lambda_min / smallest - 1) < SMALL
        widths.append(kappa.width)
    return widths


def shared_trials(layers, *, units):
    widths, solvers = [], []
    for trial in range(layers):
        rng = np.random.default_rng([7, trial])
        m = int(rng.integers(1, 6))
        n = int(rng.integers(m, m + 5))
        rows, roots = layer(rng, m, n, units, spread=(0, 2, 8, 30)[trial % 4])
        results = scaled_gram_conditions(rows, roots)
        widths += check(results, [rows * root[:, None] for root in roots.T])
        solvers += [kappa.solver for kappa in results]
    return np.array(widths), np.array(solvers)


@pytest.mark.slow
def test_the_truth_is_inside_for_shared_rows_however_graded():
    widths, solvers = shared_trials(40, units=50)
    assert len(widths) == 2000
    assert np.median(widths) < 1e-10
    assert np.isin(solvers, ["batched Gram", "batched Cholesky"]).mean() > 0.95
    assert (solvers == "batched Cholesky").sum() > 200


@pytest.mark.share(2)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 3), (3, 1)])
@pytest.mark.parametrize("spread", [0, 9])
def test_the_truth_is_inside_for_stacks(shape, spread):
    rng = np.random.default_rng([*shape, spread])
    factors = rng.standard_normal((40, *shape)) * 10.0 ** rng.uniform(
        -spread, 0, (40, *((shape[0], 1) if shape[0] <= shape[1] else (1, shape[1])))
    )
    factors = torch.from_numpy(factors)
    check(stacked_conditions(factors), factors)


def test_a_layer_of_ordinary_size():
    rng = np.random.default_rng(1)
    rows, roots = layer(rng, 60, 101, 30, spread=3, active=0.5)
    results = scaled_gram_conditions(rows, roots)
    check(results, [rows * root[:, None] for root in roots.T], exact=False)
    assert {kappa.solver for kappa in results} <= {"batched Gram", "batched Cholesky"}


def test_a_nearly_singular_one_is_known_relative_to_its_grading():
    rng = np.random.default_rng(2)
    rows, roots = layer(rng, 8, 12, 40, spread=40, active=1)
    results = scaled_gram_conditions(rows, roots)
    assert {kappa.solver for kappa in results} == {"batched Cholesky"}
    assert median(kappa.value for kappa in results) > 1e50
    assert max(check(results, [rows * root[:, None] for root in roots.T], exact=False)) < SMALL
    assert max(kappa.width for kappa in results) < 1e-9


@pytest.mark.parametrize("power", [-330, 330, -480, 480])
def test_kappa_does_not_know_the_scale(power):
    rng = np.random.default_rng(3)
    rows, roots = layer(rng, 6, 9, 8, spread=4)
    plain = scaled_gram_conditions(rows, roots)
    factors = torch.stack([rows * root[:, None] for root in roots.T])
    scaled = [
        *scaled_gram_conditions(rows * 2.0**power, roots),
        *scaled_gram_conditions(rows, roots * 2.0**power),
        *stacked_conditions(factors * 2.0**power),
    ]
    for kappa, same in zip([*plain, *plain, *plain], scaled, strict=True):
        assert same.solver.startswith("batched") or same.solver == kappa.solver
        assert abs(same.value / kappa.value - 1) < 1e-9
        assert same.lower <= kappa.upper
        assert kappa.lower <= same.upper
        assert same.rank == kappa.rank
    ratio = math.ldexp(scaled[0].lambda_max, -power) / plain[0].lambda_max
    assert abs(math.ldexp(ratio, -power) - 1) < 1e-12


def test_rows_and_roots_whose_product_only_is_a_usual_number():
    rng = np.random.default_rng(4)
    rows, roots = layer(rng, 6, 9, 8)
    powers = torch.tensor([-500.0, 0, 400, 0, -500, 500], dtype=torch.float64)[:, None]
    results = scaled_gram_conditions(rows * 2**powers, roots * 2**-powers)
    for kappa, plain in zip(results, scaled_gram_conditions(rows, roots), strict=True):
        assert abs(kappa.value / plain.value - 1) < 1e-9
        assert abs(kappa.lambda_min / plain.lambda_min - 1) < 1e-9


def test_a_tiny_row_is_not_dropped():
    rows = torch.eye(3, 4, dtype=torch.float64) + 0.1
    roots = torch.tensor([[1.0, 1.0], [1e-145, 1e-130], [0.5, 0.5]], dtype=torch.float64)
    tiny, small = scaled_gram_conditions(rows, roots)
    assert tiny == factor_condition(rows * roots[:, 0, None], rtol=SMALL)
    assert small.solver == "batched Cholesky"
    assert small.rank == 3
    truth = exact_kappa((rows * roots[:, 1, None]).numpy(), digits=300)[0]
    assert small.lower <= truth <= small.upper
    stacked = stacked_conditions(rows[None] * roots[None, :, 0, None])
    assert stacked == [tiny]


def test_duplicated_rows_and_more_samples_than_parameters():
    rng = np.random.default_rng(5)
    rows, roots = layer(rng, 9, 4, 12, active=0.5)
    rows[3] = rows[0]
    roots[3, :6] = 1
    results = scaled_gram_conditions(rows, roots)
    for kappa, root in zip(results, roots.T, strict=True):
        single = factor_condition(rows * root[:, None], rtol=SMALL)
        assert (kappa.rank, kappa.nullity) == (single.rank, single.nullity)
        assert kappa.rank_decision == single.rank_decision
        assert abs(kappa.value / single.value - 1) < SMALL
    counts = (roots != 0).sum(0)
    assert (counts > 4).any()
    assert (counts <= 4).any()


def test_dead_rows_columns_and_units():
    rng = np.random.default_rng(6)
    rows, roots = layer(rng, 5, 8, 6)
    rows[2], rows[:, 3], roots[:, 1] = 0, 0, 0
    roots[2] = 1
    results = scaled_gram_conditions(rows, roots)
    for kappa, root in zip(results, roots.T, strict=True):
        single = factor_condition(rows * root[:, None], rtol=SMALL)
        assert (kappa.rank, kappa.nullity, kappa.resolved) == (single.rank, single.nullity, single.resolved)
    assert results[1].solver == "zero matrix"
    zeros = torch.zeros(3, 2, 4, dtype=torch.float64)
    assert [kappa.solver for kappa in stacked_conditions(zeros)] == ["zero matrix"] * 3


def test_no_unit_one_unit_one_sample():
    rows = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert scaled_gram_conditions(rows, torch.zeros(1, 0, dtype=torch.float64)) == []
    assert stacked_conditions(torch.zeros(0, 2, 2, dtype=torch.float64)) == []
    (kappa,) = scaled_gram_conditions(rows, torch.tensor([[3.0]], dtype=torch.float64))
    assert (kappa.value, kappa.rank, kappa.nullity) == (1.0, 1, 1)
    assert abs(kappa.lambda_max - 45) < 1e-12


def test_rank_bounds_are_called_only_where_they_are_needed():
    rng = np.random.default_rng(8)
    rows, roots = layer(rng, 5, 7, 2, active=1)
    rows[4] = rows[0] + rows[1]
    roots[4, 0] = 0
    called = []

    def bound(i):
        return lambda: called.append(i) or 4

    results = scaled_gram_conditions(rows, roots, rank_bounds=[bound(0), bound(1)])
    assert [kappa.rank for kappa in results] == [4, 4]
    assert called == [1]
    assert results[1].rank_decision == "structural"


def test_an_error_in_the_factor_widens_the_interval():
    rng = np.random.default_rng(9)
    rows, roots = layer(rng, 4, 6, 3, active=1)
    plain = scaled_gram_conditions(rows, roots)
    errors = [0.0, 1e-10, np.full(6, 1e-4)]
    results = scaled_gram_conditions(rows, roots, errors=errors)
    assert results[0].width == pytest.approx(plain[0].width, rel=0.01)
    singles = 1 / math.sqrt(plain[1].lambda_min) + 1 / math.sqrt(plain[1].lambda_max)
    assert results[1].solver == "batched Gram"
    assert results[1].width == pytest.approx(4e-10 * singles, rel=0.1)
    assert results[2] == factor_condition(rows * roots[:, 2, None], rtol=SMALL, error=errors[2])


@pytest.mark.share(3)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
@pytest.mark.parametrize("spread", [0, 3])
def test_indefinite_units_with_shared_rows(shape, spread):
    rng = np.random.default_rng(100 * shape[0] + spread)
    batched = 0
    for _ in range(10):
        rows, roots = layer(rng, *shape, 4, spread=spread, active=1.0)
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], tuple(roots.shape)))
        for i, kappa in enumerate(conditions(FactorStack(rows, roots, signs), rtol=SMALL)):
            with mpmath.workdps(60):
                F = mpmath.matrix(rows.tolist())
                S = mpmath.diag(
                    [
                        int(s) * mpmath.mpf(r) ** 2
                        for s, r in zip(signs[:, i].tolist(), roots[:, i].tolist(), strict=True)
                    ]
                )
                values = sorted(mpmath.eigsy(F.T * S * F, eigvals_only=True), key=abs)[-min(shape) :]
                truth = abs(values[-1] / values[0])
            assert kappa.lower <= truth <= kappa.upper
            assert (kappa.rank, kappa.negative) == (min(shape), sum(value < 0 for value in values))
            batched += kappa.solver == "batched eigenvalues"
    assert batched >= 30


@pytest.mark.parametrize("sign", [1, -1])
def test_units_of_one_sign_among_indefinite_ones_are_known_as_accurately_as_their_factor(sign):
    rng = np.random.default_rng(6)
    rows, roots = layer(rng, 6, 9, 2, active=1.0)
    rows[1] = rows[0] + 1e-5 * torch.from_numpy(rng.standard_normal(9))
    signs = torch.full((6, 2), float(sign), dtype=torch.float64)
    signs[0, 1] = -sign
    kappa = conditions(FactorStack(rows, roots, signs), rtol=1e-8)[0]
    truth = exact_kappa((rows * roots[:, :1]).numpy())[0]
    assert truth > 1e9
    assert (kappa.negative, kappa.rank) == (0 if sign > 0 else 6, 6)
    assert kappa.width <= 1e-8
    assert kappa.lower * (1 - 1e-15) <= truth <= kappa.upper * (1 + 1e-15)


def test_indefinite_units_known_up_to_rounding_of_the_terms():
    """With the rounding of a perturbed S, the interval contains the κ of every S within it."""
    rng = np.random.default_rng(5)
    rows, roots = layer(rng, 8, 12, 3, active=1.0)
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], (8, 3)))
    sizes = torch.tensor([1e3, 1e5, 1e7]).double()
    found = conditions(FactorStack(rows, roots, signs, noises=sizes * rows.square().sum()), rtol=1e-8)
    widths = [kappa.width for kappa in found]
    assert widths == sorted(widths)
    assert widths[0] < 1e-7 < widths[2]
    for _ in range(20):
        moved = signs * roots**2 + np.finfo(float).eps * sizes * torch.from_numpy(rng.uniform(-1, 1, (8, 3)))
        for i, kappa in enumerate(found):
            values = np.abs(np.linalg.eigvalsh(rows.numpy().T * moved[:, i].numpy() @ rows.numpy()))
            truth = values.max() / np.sort(values)[-8]
            assert kappa.lower * (1 - 1e-12) <= truth <= kappa.upper * (1 + 1e-12)


def test_threads_and_their_number_stay_as_they_were():
    rng = np.random.default_rng(10)
    rows, roots = layer(rng, 12, 15, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(scaled_gram_conditions(rows, roots))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert abs(one.value / two.value - 1) < 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    ones = torch.ones(3, 4, dtype=torch.float64)
    spoiled = ones.clone()
    spoiled[1, 2] = bad
    with pytest.raises(MatrixError, match="infinite"):
        scaled_gram_conditions(spoiled, ones)
    with pytest.raises(MatrixError, match="infinite"):
        scaled_gram_conditions(ones, spoiled)
    with pytest.raises(MatrixError, match="infinite"):
        stacked_conditions(torch.stack([ones, spoiled]))


def test_libraries_that_start_threads_of_their_own_have_one_meanwhile():
    libraries = [(torch.get_num_threads, torch.set_num_threads), *openblas()]
    before = [get() for get, _ in libraries]
    try:
        for _, put in libraries:
            put(2)
        seen = side_by_side(lambda _: [get() for get, _ in libraries], range(4), 2)
        assert seen == [[1] * len(libraries)] * 4
        assert [get() for get, _ in libraries] == [2] * len(libraries)
    finally:
        for (_, put), count in zip(libraries, before, strict=True):
            put(count)

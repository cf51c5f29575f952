"""`conditions`: every form against the dense truth, and several at once against one by one."""

from dataclasses import replace
from importlib import import_module

import mpmath
import numpy as np
import pytest
import torch

from hesscond.operators import Dense
from hesscond.spectra.forms import DualForm, FactorForm, FactorStack, ProductForm, SummedForm
from hesscond.spectra.solvers.base import conditions


@pytest.fixture
def F():
    return np.random.default_rng(0).standard_normal((4, 7))


def truth(F, signs=None):
    values = np.linalg.eigvalsh((F * (np.ones(len(F)) if signs is None else signs)[:, None]).T @ F)
    sizes = np.sort(np.abs(values))[::-1][: len(F)]
    return sizes[0] / sizes[-1]


def test_every_form_of_one_matrix_has_its_condition_number(F):
    signs, H = np.array([1.0, -1.0, 1.0, 1.0]), torch.from_numpy(F.T @ F)
    R = torch.linalg.qr(torch.from_numpy(F.T.copy()), mode="r").R
    dual = DualForm(lambda: (R.T @ R, 1e-14), lambda: (R, np.full(4, 1e-14)), 7, lambda: 4)
    spread = H.diagonal().sqrt()
    forms = [
        FactorForm(F),
        FactorForm(F, signs),
        dual,
        FactorForm(F[:, ::-1]),
        SummedForm(H, spread, 4),
        ProductForm(Dense(H, psd=True)),
    ]
    found = conditions(forms, rtol=1e-6)
    expected = [truth(F), truth(F, signs), *[truth(F)] * 4]
    assert [kappa.value for kappa in found] == pytest.approx(expected, rel=1e-8)
    assert [kappa.rank for kappa in found] == [4] * 6
    assert [kappa.negative for kappa in found] == [0, 1, 0, 0, 0, 0]
    assert found == [conditions([form], rtol=1e-6)[0] for form in forms]


def test_the_factor_resolves_what_its_dual_cannot(F):
    F = np.ldexp(np.round(8 * F) + np.eye(4, 7), -7 * np.arange(7))
    with mpmath.workdps(60):
        rows = mpmath.matrix(F.tolist())
        values = sorted(mpmath.eigsy(rows * rows.T, eigvals_only=True))
        kappa = float(values[-1] / values[0])
    R = torch.linalg.qr(torch.from_numpy(F.T.copy()), mode="r").R
    # errors as a whole far above the smallest column, and each column known to the last digits
    dual = DualForm(lambda: (R.T @ R, 1e-2), lambda: (R, np.full(4, 1e-2)), 7, lambda: 4)
    assert not conditions([dual], rtol=1e-6)[0].resolved
    whole = replace(dual, factor=lambda: FactorForm(F, rank_bound=lambda: 4))
    found = conditions([whole], rtol=1e-6)[0]
    assert (found.resolved, found.rank, found.negative) == (True, 4, 0)
    assert found.lower <= kappa <= found.upper
    assert found.value == pytest.approx(kappa, rel=1e-6)


def test_small_eigenvalues_of_large_duals_are_not_searched_for(F, monkeypatch):
    F = F * np.logspace(0, -21, 4)[:, None]
    R = torch.linalg.qr(torch.from_numpy(F.T.copy()), mode="r").R
    dual = DualForm(lambda: (R.T @ R, 1e-14), lambda: (R, 1e-16 * R.norm(dim=0).numpy()), 7, lambda: 4)
    small = dual.condition(rtol=1e-6)
    assert (small.resolved, small.rank, small.solver) == (True, 4, "dual certified SVD")
    monkeypatch.setattr(import_module("hesscond.spectra.solvers.dual"), "JACOBI_ORDER", 3)
    large = dual.condition(rtol=1e-6)
    assert (large.resolved, large.solver) == (False, "dual SVD")
    assert large.lower <= small.value


@pytest.mark.parametrize("rtol", [1e-6, 1e-12])
def test_a_stack_is_a_sequence_of_its_factors(rtol):
    rows = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    roots = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.1
    shared = FactorStack(rows, roots)
    stacked = FactorStack(torch.stack([form.factor for form in shared]))
    alone = conditions(list(shared), rtol=rtol)
    assert len(shared) == len(stacked) == len(alone) == 3
    for found in (conditions(shared, rtol=rtol), conditions(stacked, rtol=rtol)):
        for kappa, one in zip(found, alone, strict=True):
            assert kappa.value == pytest.approx(one.value, rel=1e-9)
            assert kappa.lower <= one.upper
            assert one.lower <= kappa.upper


def test_a_rank_below_that_of_matrices_without_lost_entries_is_unresolved(F):
    F[0] = F[1]
    sure, doubted, fine = conditions([FactorForm(F), FactorForm(F, least_rank=lambda: 4), FactorForm(F[1:])])
    assert sure.resolved
    assert sure.rank == doubted.rank == fine.rank == 3
    assert not doubted.resolved
    assert doubted.lower == sure.lower
    assert conditions([FactorForm(F, least_rank=lambda: 3)])[0] == sure


@pytest.mark.parametrize("rows", [5, 7, 13, 59])
def test_a_result_does_not_depend_on_the_factors_beside_it(rows):
    draws = np.random.default_rng(rows).standard_normal((32, rows, 2 * rows))
    forms = [FactorForm(F) for F in draws * np.logspace(0, -2, rows)[:, None]]
    assert conditions(forms, rtol=1e-6) == [conditions([form], rtol=1e-6)[0] for form in forms]

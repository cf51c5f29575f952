"""The search over solvers: one that is registered from outside is tried where it is cheapest; inertia."""

import numpy as np
import pytest

from hesscond.spectra.condition import Values
from hesscond.spectra.forms import FactorForm
from hesscond.spectra.solvers import base
from hesscond.spectra.solvers.matrix_free import inertia


class Diagonal(base.Solver[base.SingularForm]):
    """Singular values of diagonal factors."""

    def fits(self, form, rtol):
        return np.count_nonzero(form.core) == len(form.core)

    def cost(self, form):
        return len(form.core)

    def values(self, form, rtol):
        found = np.sort(np.abs(form.core.diagonal()))[::-1]
        return Values(found, 1e-15 * found, 1e-15 * found, form.power, "diagonal")


def test_a_solver_from_outside_is_used_where_it_fits(monkeypatch):
    base.discover()
    monkeypatch.setattr(base, "SOLVERS", list(base.SOLVERS))
    D, F = np.diag([3.0, 1e-20, 2.0]), np.random.default_rng(0).standard_normal((3, 3))
    before = [FactorForm(factor).condition() for factor in (D, F)]
    base.register(Diagonal)
    after = [FactorForm(factor).condition() for factor in (D, F)]
    assert [found.solver for found in before] == ["certified SVD", "SVD"]
    assert [found.solver for found in after] == ["diagonal", "SVD"]
    assert after[0].value == pytest.approx(9e40, rel=1e-12)
    assert after[1] == before[1]


@pytest.mark.parametrize(("rtol", "solver"), [(1e-6, "Gram"), (1e-8, "SVD"), (1e-15, "certified SVD")])
def test_the_cheapest_that_resolves_comes_first(rtol, solver):
    F = np.random.default_rng(0).standard_normal((9, 4))
    assert FactorForm(F).condition(rtol=rtol).solver == solver


@pytest.mark.parametrize("n", [1, 2, 7, 130])
def test_the_inertia_is_that_of_a_known_spectrum(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        values = rng.choice([-1.0, 1.0], n) * 10 ** rng.uniform(-12, 0, n)
        values[rng.random(n) < 0.3] = 0
        Q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        H = (Q * values) @ Q.T
        shift = rng.choice([-1, 1]) * 2e-13
        assert inertia((H + H.T) / 2, shift) == ((values > -shift).sum(), (values < -shift).sum())

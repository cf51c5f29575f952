"""Van der Sluis, the weight conditioning claims about matrices, and BNP's Theorem 4: verdicts, and broken variants."""

from fractions import Fraction

import numpy as np
import pytest

from hesscond.theorems import Observation, statement, verify
from hesscond.theorems.base import decided
from hesscond.theorems.bnp_condition_numbers import BNPTheorem4, two_kinds, with_property_a
from tests.theorems.verdicts import check_known, example_of, observed_inputs, tallies


def check_counterexample(example, left, right):
    """The printed matrix, typed in, violates the claim by the factor that was certified."""
    A = np.array(example.matrix, dtype=float)
    assert np.linalg.cond(left(A)) / np.linalg.cond(right(A)) == pytest.approx(example.factor, rel=1e-6)
    assert example.factor > 1


def equilibrated(A):
    return A / np.linalg.norm(A, axis=1)[:, None]


def by_column(A):
    return A / np.linalg.norm(A, axis=0)


def diagonals(example):
    """The scalings that are printed."""
    parts = [part.split(")")[0].split(",") for part in example.text.split("diag(")[1:]]
    return [np.sqrt([float(Fraction(entry.strip().removeprefix("√"))) for entry in part]) for part in parts]


def test_equilibration_is_not_optimal():
    verdict = verify("wc-theorem-1", trials=20)
    assert (verdict.status, verdict.expected, verdict.ok) == ("violated", "violated", True)
    assert tallies(verdict)["two rows"].violated == 0
    assert tallies(verdict)["two rows"].holds > 15
    assert tallies(verdict)["three rows or more"].violated > 15
    assert tallies(verdict)["two columns"].holds > 15
    assert tallies(verdict)["three columns or more"].violated > 15
    assert tallies(verdict)["row-column"].violated > 15
    rows, columns, both = verdict.counterexamples
    (p,) = diagonals(rows)
    check_counterexample(rows, equilibrated, lambda A: p[:, None] * A)
    (q,) = diagonals(columns)
    check_counterexample(columns, by_column, lambda A: A * q)
    p, q = diagonals(both)
    check_counterexample(both, lambda A: by_column(equilibrated(A)), lambda A: p[:, None] * A * q)


def test_equilibration_does_not_improve_every_matrix():
    verdict = verify("wc-proposition-1", trials=200)
    assert verdict.ok
    assert tallies(verdict)["within √m"].violated == 0
    for name in ("improves", "columns", "row-column"):
        assert 2 <= tallies(verdict)[name].violated <= 60
    assert tallies(verdict)["row-column within √(mn)"].holds > 190
    examples = {example.claim: example for example in verdict.counterexamples}
    check_counterexample(examples["improves"], equilibrated, lambda A: A)
    check_counterexample(examples["columns"], by_column, lambda A: A)
    check_counterexample(examples["row-column"], lambda A: by_column(equilibrated(A)), lambda A: A)


@pytest.mark.slow
def test_bnp_theorem_4():
    verdict = verify("bnp-theorem-4", trials=40)
    assert verdict.ok
    found = tallies(verdict)
    assert found["centring"].holds > 15
    assert found["centring"].not_applicable > 2
    assert found["centring"].reasons == {"Ĥ has no full column rank": found["centring"].not_applicable}
    assert found["scaling"].holds > 30
    assert found["strict"].holds > 20
    examples = {example.claim: example for example in verdict.counterexamples}
    assert set(examples) == {"both together"}

    def plain(H):
        return np.hstack([np.ones((len(H), 1)), H])

    def normalized(H):
        return plain((H - H.mean(0)) / H.std(0))

    check_counterexample(examples["both together"], normalized, plain)


def test_the_theorem_of_prec_is_true_under_its_standing_assumption_and_false_without():
    verdict = verify("prec-theorem-4", trials=40)
    assert (verdict.status, verdict.expected, verdict.ok) == ("holds", "holds", True)
    found = tallies(verdict)
    assert found["N > n, full rank"].holds > 20
    assert found["smaller rank, as N ≤ n"].violated + found["smaller rank, as N ≤ n"].holds > 5
    (example,) = verdict.counterexamples
    X = np.array(example.matrix, dtype=float).T
    before, after = (np.vstack([np.ones(X.shape[1]), X - shift]) for shift in (0.0, X.mean(1)[:, None]))
    # both have full rank, so that it is no matter of how κ of a singular matrix is defined
    assert {np.linalg.matrix_rank(before), np.linalg.matrix_rank(after)} == {X.shape[1]}
    assert np.linalg.cond(after) / np.linalg.cond(before) == pytest.approx(example.factor, rel=1e-6)


def test_a_mean_along_the_top_eigenvector_lowers_kappa_by_what_is_claimed():
    """Two features ±a, ±1 and the mean (m, 0): λ_max of [[1, m], [m, a² + m²]] in closed form."""
    a, m = 3.0, 2.0
    H = np.array([[m + a, 1], [m + a, -1], [m - a, 1], [m - a, -1]])
    plain = np.hstack([np.ones((4, 1)), H])
    outcomes = BNPTheorem4().check(plain, plain - [0, m, 0], plain - [0, m, 0], H.mean(0))
    trace, determinant = 1 + a**2 + m**2, a**2
    root = (trace**2 / 4 - determinant) ** 0.5
    kappa = ((trace / 2 + root) / (trace / 2 - root)) ** 0.5
    assert outcomes[3].used == pytest.approx(a / kappa * (1 + m**2 / a**2) ** 0.5, rel=1e-9)
    assert outcomes[3].status == "holds"


def test_property_a_is_told():
    rng = np.random.default_rng(0)
    H = with_property_a(rng)
    for inputs in (H - H.mean(0), np.linalg.qr(H - H.mean(0), mode="r")):
        signs = two_kinds(inputs)
        correlations = np.corrcoef(H, rowvar=False)
        assert np.allclose(correlations[np.ix_(signs > 0, signs > 0)], np.eye((signs > 0).sum()), atol=1e-12)
        assert np.allclose(correlations[np.ix_(signs < 0, signs < 0)], np.eye((signs < 0).sum()), atol=1e-12)
    # three that depend on each other are of no two kinds; two always are
    any_inputs = rng.standard_normal((20, 3))
    assert two_kinds(any_inputs) is None
    assert two_kinds(any_inputs[:, :2]).tolist() == [1, -1]
    for columns, status in ((3, "not-applicable"), (2, "holds"), (1, "holds")):
        seen = Observation(*observed_inputs(any_inputs[:, :columns]), 20, np.ones((1, columns)), None, None)
        assert statement("bnp-property-a").observe(seen)[0].status == status


def test_scaled_inputs():
    verdict = check_known("prec-input-scaling", trials=40, least=0.1)
    example = example_of(verdict, "min-max improves κ")
    check_counterexample(
        example,
        lambda H: np.hstack([np.ones((6, 1)), (H - H.min(0)) / np.ptp(H, 0)]),
        lambda H: np.hstack([np.ones((6, 1)), H]),
    )


def test_a_tie_is_unresolved():
    """Features that are centred already: κ(ĤU) = κ(Ĥ) up to round-off."""
    half = np.random.default_rng(0).standard_normal((10, 4))
    H = np.vstack([half, -half])
    plain = np.hstack([np.ones((20, 1)), H])
    outcomes = BNPTheorem4().check(plain, plain, plain, np.zeros(4))
    assert outcomes[0].status == "unresolved"
    assert outcomes[3].reason == "μ is zero or orthogonal to the top eigenvector, to round-off"
    assert decided(1 - 1e-12, 1 + 1e-12).status == "unresolved"
    assert decided(float("nan"), 1.0).status == "unresolved"
    with pytest.raises(ValueError, match=r"lower bound 3 above the upper one, 0\.5"):
        decided(3.0, 0.5)


def test_trials_depend_on_seed_and_number_only():
    one, other = (verify("wc-proposition-1", trials=n, counterexamples=False) for n in (10, 15))
    assert [t.used for t in one.tallies] == [
        t.used[: len(s.used)] for t, s in zip(other.tallies, one.tallies, strict=True)
    ]
    assert verify("wc-proposition-1", trials=10, seed=1, counterexamples=False).worst != one.worst


def test_observed_in_a_layer():
    rng = np.random.default_rng(0)
    H = rng.standard_normal((50, 6)) + 10
    H[:, 2] = 3.0
    centred, mu, sigma = observed_inputs(H)
    assert centred.shape == (50, 6)
    seen = Observation(centred, mu, sigma, 50, rng.standard_normal((4, 6)), None, None)
    kept = np.delete(H, 2, 1)
    assert np.allclose(seen.plain, np.hstack([np.ones((50, 1)), kept]), atol=1e-12)
    assert np.allclose(seen.normalized[:, 1:].std(0), 1)
    outcomes = statement("bnp-theorem-4").observe(seen)
    assert [o.status for o in outcomes[:2]] == ["holds", "holds"]
    # of the second the first is a part
    assert statement("prec-theorem-4").observe(seen)[0] == outcomes[0]
    factor = np.linalg.qr(centred, mode="r")
    small = Observation(factor, mu, sigma, 50, seen.weight, None, None)
    for a, b in zip(outcomes, statement("bnp-theorem-4").observe(small), strict=True):
        assert a.status == b.status
        assert a.used == pytest.approx(b.used, rel=1e-9, nan_ok=True)
    assert statement("van-der-sluis").observe(small)[0].status == "not-applicable"

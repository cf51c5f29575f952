"""BNP: sizes, means and condition numbers."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hesscond.spectra import condition_number
from hesscond.theorems import Observation, exact, statement, verify
from hesscond.theorems.bnp_algorithms import bn_as_written, bn_shared, bnp_step, flops, random_layer
from tests.theorems.verdicts import check_known, example_of, tallies


def test_proposition_5():
    verdict = check_known("bnp-proposition-5", trials=150, least=0.2, seldom=("any law",))
    found = tallies(verdict)
    # neither the trivial bound √min(n, N), nor far from it
    assert 0.4 < found["bounded fourth moments"].worst < 0.9
    assert found["bounded fourth moments"].not_applicable > 20


def test_the_size_of_the_inputs_of_a_layer():
    rng = np.random.default_rng(0)
    H = rng.standard_normal((40, 60)) * np.abs(rng.standard_cauchy((40, 1))) ** 3
    factor = np.linalg.qr(np.hstack([np.ones((40, 1)), H - H.mean(0)]), mode="r")
    seen = Observation(factor, H.mean(0), H.std(0), 40, np.ones((1, 60)), None, None)
    unknown, found = statement("bnp-proposition-5").observe(seen)
    assert (unknown.status, found.status) == ("not-applicable", "violated")
    G_hat = np.hstack([np.ones((40, 1)), (H - H.mean(0)) / H.std(0)])
    assert found.used == pytest.approx(np.linalg.norm(G_hat, 2) / 60**0.5 / 3, rel=1e-9)
    narrow = Observation(factor[:, :6], H[:, :5].mean(0), H[:, :5].std(0), 40, np.ones((1, 5)), None, None)
    assert statement("bnp-proposition-5").observe(narrow)[1].reason == "min(n, N) ≤ C²: it holds for any matrix"


def test_the_law_of_the_counterexample():
    verdict = verify("bnp-proposition-5", trials=1)
    ((size, _),) = example_of(verdict, "any law").matrix
    rng, ratios = np.random.default_rng(0), []
    for _ in range(60):
        spikes = (rng.random((size, size)) < size**-2.0) * size * rng.choice([-1.0, 1.0], (size, size))
        ratios.append(np.linalg.norm(spikes, 2) / size**0.5)
    assert np.mean(ratios) > 3


@pytest.mark.parametrize(("n", "N", "m"), [(3, 4, 5), (7, 3, 2), (12, 10, 8)])
def test_operations_are_those_of_a_count_by_hand(n, N, m):
    arrays = random_layer(np.random.default_rng(0), n, N, m)
    # means and variances 4nN, averages 6n, σ̃² 3n; step 4: 3nm + n; step 5: 2nm + m
    assert flops(bnp_step, arrays) == 4 * n * N + 6 * n + 3 * n + (3 * n * m + n) + (2 * n * m + m)
    # statistics, averages, σ; forward 4; the derivatives of x̂, σ², μ, h, γ, β: 1 + 5 + 5 + 7 + 2 + 1
    assert flops(bn_as_written, arrays) == (4 + 4 + 21) * n * N + 12 * n
    assert flops(bn_shared, arrays) == (4 + 3 + 7) * n * N + 9 * n


def test_what_is_counted_is_right():
    """Against torch's batch normalization, and the transformed gradient of the method."""
    arrays = random_layer(np.random.default_rng(0), 4, 7, 3)
    inputs = {name: torch.tensor(arrays[name], requires_grad=True) for name in ("H", "gamma", "beta")}
    output = torch.nn.functional.batch_norm(
        inputs["H"], None, None, inputs["gamma"], inputs["beta"], training=True, eps=1e-3
    )
    truth = torch.autograd.grad(output, list(inputs.values()), torch.tensor(arrays["G"]))
    for way in (bn_as_written, bn_shared):
        found = way(arrays)
        assert np.allclose(found["output"], output.detach())
        for name, expected in zip(inputs, truth, strict=True):
            assert np.allclose(found[name], expected, rtol=1e-10)
    H, mu, variance = arrays["H"], arrays["mu"], arrays["variance"]
    mu, variance = 0.99 * mu + 0.01 * H.mean(0), 0.99 * variance + 0.01 * H.var(0)
    variance = variance + 1e-2 * variance.max() + 1e-4
    P = np.diag([1.0, *variance**-0.5])
    P[0, 1:] = -mu / variance**0.5
    expected = np.column_stack([arrays["G_b"], arrays["G_w"]]) @ P @ P.T
    new, bias = bnp_step(arrays)
    assert np.allclose(np.column_stack([bias, new]), expected, rtol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_equal_features_attain_the_root_of_their_number_exactly(n):
    """Of two samples: Ĝ has the rows (1, ±1, …, ±1), and a better scaling (1, ±1/√n, …, ±1/√n); κ⁺² of the rows."""
    columns = [(1, 1), *[(1, -1)] * n]
    for squares, square in (([1] * (n + 1), n), ([1, *[Fraction(1, n)] * n], 1)):
        low, high = exact.kappa(exact.gram(columns, [Fraction(size) for size in squares]))
        assert low <= square <= high < square + 1e-9


@pytest.mark.slow
def test_gain():
    verdict = check_known("bnp-gain", trials=60, seldom=("gain",))
    found = tallies(verdict)
    assert found["gain of scaling"].not_applicable > 2
    assert found["gain of scaling"].worst <= 1
    example = example_of(verdict, "gain")
    H = np.array(example.matrix, dtype=float)
    plain = np.hstack([np.ones((6, 1)), H])
    normalized = np.hstack([np.ones((6, 1)), (H - H.mean(0)) / H.std(0)])
    D = np.array([1.0, *H.std(0)])
    gain = (np.linalg.cond(plain) / np.linalg.cond(normalized)) ** 2
    assert (D.max() / D.min()) ** 2 / 40 / gain == pytest.approx(example.factor, rel=1e-6)


def test_gain_in_a_layer():
    H = np.random.default_rng(0).standard_normal((40, 3)) * [1.0, 100.0, 1.0]
    centred = np.hstack([np.ones((40, 1)), H - H.mean(0)])
    after = condition_number(factor=centred / [1.0, *H.std(0)])
    seen = Observation(centred, H.mean(0), H.std(0), 40, np.ones((1, 3)), condition_number(factor=centred), after)
    *unseen, gain = statement("bnp-gain").observe(seen)
    assert [outcome.status for outcome in unseen] == ["not-applicable"] * 5
    assert gain.status == "holds"
    assert gain.used == pytest.approx(seen.kappa_D**2 * float(after) / float(seen.kappa) / 40, rel=1e-6)
    unresolved = SimpleNamespace(kappa=seen.kappa, kappa_preconditioned=SimpleNamespace(resolved=False))
    assert statement("bnp-gain").observe(unresolved)[-1].status == "unresolved"

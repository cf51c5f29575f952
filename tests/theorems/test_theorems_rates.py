"""Rates of gradient descent: preconditioned, with null directions, projected; and how they are measured."""

import math

import numpy as np
import pytest
import torch
from torch.func import hessian

from hesscond.spectra import condition_number
from hesscond.theorems import statement, verify
from hesscond.theorems.base import one_trial
from hesscond.theorems.descent_rates import BNPTheorem1
from hesscond.theorems.networks import Network, flat_loss
from hesscond.theorems.rates import (
    Decay,
    Iteration,
    attained,
    bounded,
    decay_of_step,
    gradient,
    measured,
    newton,
    no_faster,
    predicted,
    second_order,
    taught,
)
from tests.theorems.verdicts import check_known, example_of, tallies


def vector(*entries):
    return torch.tensor(entries, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ measuring


def descent(*eigenvalues, cubic=0.0):
    """Gradient descent at its best step on Σ λ x²/2 + cubic Σ x³/3, moved away from the origin."""
    values, at = vector(*eigenvalues), torch.ones(len(eigenvalues), dtype=torch.float64)
    alpha = 2 / (max(eigenvalues) + min(eigenvalues))

    def step(x):
        return x - alpha * (values * (x - at) + cubic * (x - at) ** 2)

    return Iteration(step, at, torch.eye(len(at), dtype=torch.float64), 1e-2)


@pytest.mark.parametrize("kappa", [1.5, 7.0, 300.0, 5000.0])
@pytest.mark.parametrize("cubic", [0.0, 0.7])
def test_rates_that_are_known(kappa, cubic):
    iteration = descent(1.0, 0.4 * kappa + 0.6, kappa, cubic=cubic)
    bottom = vector(1.0, 0.0, 0.0)
    radius = iteration.radius(bottom)
    found = measured(iteration, bottom, radius)
    truth = -math.log((kappa - 1) / (kappa + 1))
    assert predicted(kappa) == pytest.approx(truth, rel=1e-9)
    assert found.lower <= truth * (1 + 1e-9)
    assert found.upper >= truth * (1 - 1e-9)
    assert found.rate == pytest.approx(math.exp(-truth), rel=1e-3)
    k = condition_number(np.diag([1.0, kappa]))
    assert attained(found, k).status == "holds"
    # both ends, which alternate
    assert attained(measured(iteration, vector(1.0, 0.0, 0.5), radius), k).status == "holds"
    assert bounded(measured(iteration, vector(0.0, 1.0, 0.0), radius), k).status in ("holds", "unresolved")


@pytest.mark.parametrize("rate", [0.99, 0.999, 0.9999])
@pytest.mark.parametrize("strength", [1e-3, 1e-1, 1.0])
def test_bounds_know_of_nonlinearity_in_every_other_step_only(rate, strength):
    """y changes its sign in every step, and y² − 2xy vanishes to first order, along a step, in every other one."""

    def step(v):
        x, y = v
        return torch.stack([rate * x, -rate * y + strength * (y * y - 2 * x * y)])

    iteration = Iteration(step, vector(0.0, 0.0), torch.eye(2, dtype=torch.float64), 1.0)
    found = measured(iteration, vector(1.0, 1.0), 1e-6)
    assert found.lower <= -math.log(rate) <= found.upper
    # and no wider than that: of two steps one is bent by 4 · strength · displacement
    assert found.upper - found.lower < 10 * strength * 1e-6


@pytest.mark.share(3)
@pytest.mark.parametrize("number", [2785, 4530, 6153])
def test_what_ten_thousand_trials_found(number):
    """Where the bend of one step alone, and its round-off, had decided against a true claim."""
    assert one_trial(statement("prec-theorem-1"), 11, number)[0].status == "unresolved"


def test_what_counts_as_equal():
    k = condition_number(np.diag([1.0, 20.0]))
    truth = predicted(20.0)

    def status(judge, factor, width=1e-5):
        return judge(Decay(factor * truth * (1 - width), factor * truth * (1 + width)), k).status

    assert [status(attained, factor) for factor in (1.0, 1.0005, 1.005, 1.03, 0.97, 0.995)] == [
        "holds", "holds", "unresolved", "violated", "violated", "unresolved",
    ]  # fmt: skip
    assert status(attained, 1.0, width=1e-2) == "unresolved"
    assert [status(bounded, factor) for factor in (0.97, 0.9995, 1.0, 2.0)] == ["violated", "holds", "holds", "holds"]
    assert status(bounded, 1.0, width=1e-2) == "unresolved"
    # what diverges has no rate that a bound allows
    assert bounded(Decay(-0.2, -0.1), k).status == "violated"
    assert attained(Decay(-0.2, -0.1), k).status == "violated"


def test_what_says_nothing():
    found = Decay(0.1, 0.1001)
    assert (
        attained(None, condition_number(np.diag([1.0, 20.0]))).reason == "round-off is reached before there is a rate"
    )
    assert attained(found, condition_number(np.diag([0.0, 20.0]))).status == "not-applicable"
    assert bounded(found, condition_number(np.diag([1.0, 1e-3]), error=1e-2)).status == "unresolved"
    # one step is enough
    assert measured(descent(1.0, 1.0), vector(1.0, 0.0), 1e-2) is None


def test_a_step_that_is_too_long_diverges():
    iteration = descent(1.0, 10.0)
    longer = Iteration(lambda x: x + 1.2 * (iteration.step(x) - x), iteration.fixed, iteration.root, 1e-2)
    found = measured(longer, vector(0.0, 1.0), 1e-4)
    assert found.upper < 0
    assert found.rate == pytest.approx(1.2 * 20 / 11 - 1, rel=1e-6)


# --------------------------------------------------------------------------------------------------------------- minima


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_minima_are_exact_to_round_off(activation):
    found = []
    for seed in range(3):
        network = taught(np.random.default_rng(seed), [2, 2, 1], 60, activation, 0.01)
        loss = flat_loss(network)
        minimum = newton(loss, second_order(loss), network.parameters)
        if minimum is not None:
            found.append(float(gradient(loss, minimum.point).norm()))
            assert float(loss(minimum.point)) < float(loss(network.parameters))
    assert len(found) >= 2
    assert max(found) < 1e-13


def test_no_minimum():
    def found(loss, *start):
        return newton(loss, second_order(loss), vector(*start))

    assert found(lambda x: x[0] ** 2 - x[1] ** 2, 0.0, 0.0) is None
    # kinks, and slopes without an end
    assert found(lambda x: x.abs().sum() + x.square().sum(), 0.3) is None
    assert found(lambda x: x[0] ** 2 + x[1], 1.0, 1.0) is None
    assert found(lambda x: (x[0] - 2) ** 2 + 0 * x[1], 1.0, 1.0).point.tolist() == [2.0, 1.0]


def line(weights, *, bias):
    """f(x) = v relu(w x + b) + c on some inputs, whose outputs are the targets: a minimum of loss zero."""
    inputs = torch.linspace(-1, 2, 12, dtype=torch.float64)[:, None]
    hidden = torch.tensor([[b, w] for b, w in zip(bias, weights, strict=True)], dtype=torch.float64)
    output = torch.linspace(1.0, 1.5, 1 + len(weights), dtype=torch.float64)[None]
    network = Network(inputs, torch.zeros(12, 1).double(), (hidden, output), "relu", "squared error")
    return Network(inputs, network.output().detach(), (hidden, output), "relu", "squared error")


# ----------------------------------------------------------------------------------------------------------- statements


@pytest.fixture(scope="module")
def verdicts():
    return {
        "prec-theorem-1": check_known("prec-theorem-1", trials=40),
        "bnp-theorem-1": check_known("bnp-theorem-1", trials=40),
        "cwo-rate": check_known("cwo-rate", trials=40, seldom=("one unit",)),
    }


@pytest.mark.slow
def test_rates_are_as_predicted(verdicts):
    assert all(verdict.status == "holds" for verdict in verdicts.values())
    for id, verdict in verdicts.items():
        found = tallies(verdict)
        # the rates agree to 3 digits, of −ln(rate), and a random start comes near the bound
        assert np.median(found["attained"].used) < 0.2, id
        assert 0.9 < np.median(found["bound"].used) <= 1, id
    assert tallies(verdicts["cwo-rate"])["one unit"].holds > 5
    assert tallies(verdicts["cwo-rate"])["Jacobian"].holds > 30


@pytest.mark.slow
def test_a_rate_by_another_hessian_is_far_off(verdicts):
    # more than 10 times as far off as counts as equal is a violation; these are far above
    assert tallies(verdicts["cwo-rate"])["ambient"].worst > 300


@pytest.mark.slow
def test_dead_units_are_the_reason(verdicts):
    found = tallies(verdicts["bnp-theorem-1"])
    reasons = found["bound"].reasons
    assert any("rescaling explains" in reason and "never active" in reason for reason in reasons)
    assert found["null space"].not_applicable < 20


def check(network):
    loss = flat_loss(network)
    rng = np.random.default_rng(0)
    return BNPTheorem1().check(rng, network, hessian(loss)(network.parameters))


def test_conditions_are_checked_first():
    assert [outcome.status for outcome in check(line([2.0], bias=[0.3]))] == ["holds"] * 7
    dead = check(line([2.0, -1.0], bias=[0.3, -4.0]))
    assert [outcome.status for outcome in dead] == ["holds", *["not-applicable"] * 6]
    # b, w and v of the dead unit
    assert dead[1].reason == "nullity 4, of which rescaling explains 2 (1 unit never active)"
    # a line that no rescaling explains: b, w, v and the output's c for v (w x + b) + c
    linear = check(line([2.0], bias=[5.0]))
    assert linear[1].reason == "nullity 2, of which rescaling explains 1"
    # an input of 2 is off the kink by 1e-9
    kink = check(line([-2.0], bias=[4.0 + 1e-9]))
    assert {(outcome.status, outcome.reason) for outcome in kink} == {
        ("not-applicable", "the minimum is too near a kink")
    }
    saddle = line([2.0], bias=[0.3])
    H = hessian(flat_loss(saddle))(saddle.parameters)
    assert BNPTheorem1().check(np.random.default_rng(0), saddle, -H)[1].status == "not-applicable"


# ------------------------------------------------------------------------------------------------------ broken variants


def test_rates_of_step_sizes():
    k = condition_number(np.diag([2.0, 5.0, 10.0]))
    for alpha in (0.01, 0.05, 0.1, 1 / 6, 0.19, 0.25):
        rate = max(abs(1 - alpha * value) for value in (2.0, 5.0, 10.0))
        found = decay_of_step(alpha, k)
        assert (found.lower, found.upper) == pytest.approx((-math.log(rate), -math.log(rate)), rel=1e-9)
    assert decay_of_step(1 / 6, k).lower == pytest.approx(predicted(5.0), rel=1e-9)
    # all is done in one step
    assert decay_of_step(0.5, condition_number(2 * np.eye(3))).upper == math.inf


def test_nothing_is_faster_than_the_best_step():
    k = condition_number(np.diag([1.0, 20.0]))
    statuses = [no_faster(Decay(share * predicted(20.0), share * predicted(20.0)), k).status for share in (0.5, 1, 1.1)]
    assert statuses == ["holds", "holds", "violated"]
    diverging = Decay(-0.2, -0.19)
    assert attained(diverging, k, Decay(-0.195, -0.195)).status == "unresolved"
    assert attained(Decay(-0.2, -0.2), k, Decay(-0.2, -0.2)).status == "holds"
    assert attained(diverging, k, Decay(-0.3, -0.3)).status == "violated"
    assert attained(diverging, k, Decay(0.2, 0.2)).status == "violated"


# ------------------------------------------------------------------------------------------------- quadratic functions


def test_descent_on_quadratic_functions():
    verdict = check_known("wc-quadratic", trials=30)
    example = example_of(verdict, "(13) as printed")
    *A, P, theta = (torch.tensor(row, dtype=torch.float64) for row in example.matrix)
    PA, theta = torch.diag(P) @ torch.stack(A), theta.requires_grad_()
    assert torch.linalg.eigvalsh(torch.stack(A))[0] > 0
    (slope,) = torch.autograd.grad(theta @ PA @ theta, theta)
    step = PA @ theta.detach()
    off = (slope - step).abs().max() / step.abs().max()
    assert float(off) == pytest.approx(example.factor - 1, rel=1e-12)


@pytest.mark.parametrize(("claim", "exponent"), [("(7) as printed", 1), ("(8) as printed", 2)])
def test_descent_on_a_quadratic_function_is_not_that_of_the_printed_equations(claim, exponent):
    example = example_of(verify("wc-quadratic", trials=1), claim)
    *A, theta = (np.array(row, dtype=float) for row in example.matrix)
    _, sigma, Ut = np.linalg.svd(A)
    assert 2 / sigma.max() > 0.5
    U = Ut.T
    right, printed = U.T @ (theta - 0.5 * np.array(A) @ theta), (1 - 0.5 * sigma) ** exponent * (U.T @ theta)
    assert np.abs(right - printed).max() / np.abs(printed).max() == pytest.approx(example.factor - 1)

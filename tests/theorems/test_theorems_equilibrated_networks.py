"""WC, Theorem 2: the Hessian of an equilibrated network in its three readings."""

import numpy as np
import pytest
import torch

from hesscond.spectra import condition_number
from hesscond.theorems import verify
from hesscond.theorems.weight_conditioning import compared, random_linear_networks
from tests.theorems.verdicts import check_known, example_of, kappa, tallies

READINGS = ("(a) through E(W)W", "(b) at the point EW", "(c) E frozen")
BOTH = ("(a) row-column", "(b) row-column", "(c) row-column")


@pytest.fixture(scope="module")
def verdict():
    return check_known("wc-theorem-2", trials=100, seldom=(*READINGS, *BOTH))


@pytest.mark.slow
def test_all_readings_are_false(verdict):
    found = tallies(verdict)
    for reading in (*READINGS, *BOTH):
        assert found[reading].violated > 5
        assert found[reading].holds > 0
        assert found[reading].reasons["a Hessian has not full rank"] > 5
        assert any(reason.startswith("violated: H ") for reason in found[reading].reasons)
    assert found["scale identity"].holds > 95
    assert found["nullity"].holds > 80


@pytest.mark.slow
def test_through_the_equilibration_no_hessian_is_definite(verdict):
    for reading in (READINGS[0], BOTH[0]):
        reasons = tallies(verdict)[reading].reasons
        assert not any(", definite once equilibrated" in reason for reason in reasons)


def loss_of(W, V, X, Y, *, through=()):
    def loss(theta):
        A, B = theta[:4].view(2, 2), theta[4:].view(2, 2)
        for dim in through:
            A, B = (M / M.norm(dim=dim, keepdim=True) for M in (A, B))
        return (X @ A @ B - Y).square().sum() / 2

    return torch.func.hessian(loss)(torch.cat([W.flatten(), V.flatten()])).numpy()


def unpacked(example):
    return torch.tensor(example.matrix, dtype=torch.float64).split([2, 2, 4, 4])


def test_the_counterexamples_by_automatic_differentiation():
    verdict = verify("wc-theorem-2", trials=1)
    assert {example.claim for example in verdict.counterexamples} == {*READINGS, *BOTH}
    for (through, at, _), dims in ((READINGS, (1,)), (BOTH, (1, 0))):
        for reading in (through, at):
            example = example_of(verdict, reading)
            W, V, X, Y = unpacked(example)
            before = loss_of(W, V, X, Y)
            if reading == through:
                after = loss_of(W, V, X, Y, through=dims)
            else:
                for dim in dims:
                    W, V = (M / M.norm(dim=dim, keepdim=True) for M in (W, V))
                after = loss_of(W, V, X, Y)
            ratio = kappa((after + after.T) / 2) / kappa((before + before.T) / 2)
            assert ratio == pytest.approx(example.factor, rel=1e-4)
    for reading in (READINGS[2], BOTH[2]):
        example = example_of(verdict, reading)
        W, X = np.split(np.array(example.matrix, dtype=float), [2])
        e = 1 / np.linalg.norm(W, axis=1)
        f = np.ones(2) if reading == READINGS[2] else 1 / np.linalg.norm(e[:, None] * W, axis=0)
        # all weights of both units: of unit j the inputs are scaled by f_j e
        frozen = np.kron(np.diag(f), X * e)
        assert kappa(frozen.T @ frozen) / kappa(X.T @ X) == pytest.approx(example.factor, rel=1e-6)


@pytest.mark.parametrize("number", range(3))
def test_rational_hessians_against_automatic_differentiation(number):
    network = [network for network, _ in zip(random_linear_networks(5), range(3), strict=False)][number]
    data = tuple(torch.tensor(part, dtype=torch.float64) for part in (network.W, network.V, network.X, network.Y))
    assert np.allclose(network.hessian().astype(float), loss_of(*data), rtol=1e-12)
    through = loss_of(*data, through=(1,))
    assert np.allclose(network.hessian_through().astype(float), through, rtol=1e-11, atol=1e-12 * abs(through).max())
    network = [network for network, _ in zip(random_linear_networks(5, columns=True), range(3), strict=False)][number]
    data = tuple(torch.tensor(part, dtype=torch.float64) for part in (network.W, network.V, network.X, network.Y))
    found, both = network.hessian_through(columns=True).astype(float), loss_of(*data, through=(1, 0))
    assert np.allclose(found, both, rtol=1e-11, atol=1e-12 * abs(both).max())


def test_what_does_not_apply():
    full, singular = condition_number(np.eye(3)), condition_number(np.diag([1.0, 1.0, 0.0]))
    assert compared(singular, full).status == "not-applicable"
    assert compared(full, singular).reason == "a Hessian has not full rank"
    unresolved = condition_number(np.diag([1.0, 1e-3]), error=1e-2)
    assert compared(unresolved, full).status == "unresolved"

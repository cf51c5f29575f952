"""WC, Theorem 2: the Hessian of an equilibrated network in its three readings."""

import numpy as np
import pytest
import torch

from hesscond.spectra import condition_number
from hesscond.theorems import verify
from hesscond.theorems.weight_conditioning import (
    compared,
    layer_hessians,
    random_layers,
    random_units,
    rational,
    rectified_hessians,
)
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


def layer_hessian(W, X, Y, dims=()):
    """½ ‖XW − Y‖², through the equilibration of all rows of W but the first, which are biases."""

    def loss(theta):
        biases, A = theta.view(3, 2).split([1, 2])
        for dim in dims:
            A = A / A.norm(dim=dim, keepdim=True)
        return (X @ torch.cat([biases, A]) - Y).square().sum() / 2

    return torch.func.hessian(loss)(W.flatten()).numpy()


def unit_hessian(W, V, x, y):
    """½ Σ (v relu(wx + b) + c − y)² for [b; w] and [c; v]."""

    def loss(theta):
        b, w, c, v = theta
        return (v * torch.relu(w * x + b) + c - y).square().sum() / 2

    return torch.func.hessian(loss)(torch.cat([W, V]).flatten()).numpy()


def tensors(*parts):
    return [torch.tensor(np.array(part, dtype=float)) for part in parts]


def test_the_counterexamples_by_automatic_differentiation():
    verdict = verify("wc-theorem-2", trials=1)
    assert {example.claim for example in verdict.counterexamples} == {*READINGS, *BOTH, "size of P_k"}
    for (through, at, _), dims in ((READINGS, (1,)), (BOTH, (1, 0))):
        example = example_of(verdict, through)
        W, X, Y = tensors(example.matrix[:3], example.matrix[3:9], example.matrix[9:])
        before, after = layer_hessian(W, X, Y), layer_hessian(W, X, Y, dims)
        assert np.linalg.eigvalsh(before).min() > 0 > np.linalg.eigvalsh(after).min()
        assert kappa((after + after.T) / 2) / kappa(before) == pytest.approx(example.factor, rel=1e-4)
        example = example_of(verdict, at)
        W, V, x, y = torch.tensor(example.matrix, dtype=torch.float64).split([2, 2, 6, 6])
        signs = [torch.cat([part[:1], part[1:].sign()]) for part in (W, V)]
        before, after = unit_hessian(W, V, x, y), unit_hessian(*signs, x, y)
        assert min(np.linalg.eigvalsh(H).min() for H in (before, after)) > 0
        assert kappa(after) / kappa(before) == pytest.approx(example.factor, rel=1e-4)
    for reading in (READINGS[2], BOTH[2]):
        example = example_of(verdict, reading)
        W, X = np.split(np.array(example.matrix, dtype=float), [2])
        e = 1 / np.linalg.norm(W, axis=1)
        f = np.ones(2) if reading == READINGS[2] else 1 / np.linalg.norm(e[:, None] * W, axis=0)
        # all weights of both units: of unit j the inputs are scaled by f_j e
        frozen = np.kron(np.diag(f), X * e)
        assert kappa(frozen.T @ frozen) / kappa(X.T @ X) == pytest.approx(example.factor, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_rational_hessians_against_automatic_differentiation(seed):
    parts = next(random_layers(seed))
    for dims in ((1,), (1, 0)):
        before, after = layer_hessians(*map(rational, parts), columns=len(dims) > 1)
        assert np.allclose(before.astype(float), layer_hessian(*tensors(*parts)), rtol=1e-12)
        through = layer_hessian(*tensors(*parts), dims)
        assert np.allclose(after.astype(float), through, rtol=1e-11, atol=1e-12 * abs(through).max())
    W, V, x, y = parts = next(random_units(seed))
    signs = [np.vstack([part[:1], np.sign(part[1:])]) for part in (W, V)]
    for found, at in zip(rectified_hessians(*map(rational, parts)), ((W, V), signs), strict=True):
        assert np.allclose(found.astype(float), unit_hessian(*tensors(*at, x, y)), rtol=1e-12)


def test_what_does_not_apply():
    full, singular = condition_number(np.eye(3)), condition_number(np.diag([1.0, 1.0, 0.0]))
    assert compared(singular, full).status == "not-applicable"
    assert compared(full, singular).reason == "a Hessian has not full rank"
    unresolved = condition_number(np.diag([1.0, 1e-3]), error=1e-2)
    assert compared(unresolved, full).status == "unresolved"

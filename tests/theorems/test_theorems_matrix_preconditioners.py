"""Shampoo, SOAP, K-FAC and Muon, against scipy, mpmath and automatic differentiation."""

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.optimize import minimize

from hesscond.theorems.matrix_preconditioners import (
    KfacLinear,
    MuonSpectralDescent,
    SoapAdafactor,
    covariance,
    kronecker_factors,
    random_gradients,
    rearranged,
)
from hesscond.theorems.networks import LINEAR, Network


@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_kronecker_product_is_what_an_optimizer_finds(seed):
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((3, 2, 3))
    H = covariance(G)
    sigma = np.linalg.svd(rearranged(H, 2, 3), compute_uv=False)

    def distance(z):
        return ((H - np.kron(z[:4].reshape(2, 2), z[4:].reshape(3, 3))) ** 2).sum()

    start = np.concatenate([factor.ravel() for factor in kronecker_factors(G)])
    found = minimize(distance, start / 2, method="BFGS", options={"gtol": 1e-10}).fun
    assert found == pytest.approx((H**2).sum() - sigma[0] ** 2, rel=1e-6)


def test_claim_1_of_soap_with_forty_digits():
    G = random_gradients(np.random.default_rng(2), samples=3)
    L, R = kronecker_factors(G)
    g = np.random.default_rng(3).standard_normal(G.shape[1:])
    shampoo, adafactor = SoapAdafactor().shampoo(g, L, R), SoapAdafactor().adafactor(G, g, L, R)
    with mpmath.workdps(40):

        def root(S):
            values, V = mpmath.eigsy(mpmath.matrix(S.tolist()))
            return V * mpmath.diag([1 / mpmath.sqrt(value) for value in values]) * V.T

        expected = root(L) * mpmath.matrix(g.tolist()) * root(R) * mpmath.sqrt(mpmath.fsum(np.diagonal(L).tolist()))
        expected = np.array(expected.tolist(), dtype=float)
    assert np.allclose(shampoo, expected, rtol=1e-9)
    assert np.allclose(adafactor, expected, rtol=1e-9)


def test_kfac_of_an_output_layer_is_its_hessian():
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 3), (8, 2), (3, 4), (2, 4))
    inputs, targets, first, last = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    network = Network(inputs, targets, (first, last), LINEAR, "squared error")
    hidden = torch.cat([torch.ones(8, 1), torch.cat([torch.ones(8, 1), inputs], 1) @ first.T], 1)

    def loss(flat):
        return ((hidden @ flat.view_as(last).T - targets) ** 2).sum(1).mean() / 2

    H = torch.autograd.functional.hessian(loss, last.flatten())
    assert torch.allclose(KfacLinear().product(torch.eye(2).double().expand(8, 2, 2), network.features(1)), H)
    assert KfacLinear().gauss_newton(network, 1).status == "holds"


@pytest.mark.parametrize(("seed", "shape"), [(0, (2, 2)), (1, (1, 3)), (2, (3, 1))])
def test_the_steepest_step_is_what_an_optimizer_finds(seed, shape):
    rng = np.random.default_rng(seed)
    G, sharpness = rng.standard_normal(shape), 0.7

    def value(flat):
        step = flat.reshape(shape)
        return np.vdot(G, step) + sharpness / 2 * np.linalg.norm(step, 2) ** 2

    options = {"maxiter": 40_000, "maxfev": 40_000, "xatol": 1e-10, "fatol": 1e-12}
    found = min(
        (minimize(value, rng.standard_normal(G.size), method="Nelder-Mead", options=options) for _ in range(3)),
        key=lambda one: one.fun,
    )
    # for full rank scipy's polar decomposition has the same factor
    orthogonal = scipy.linalg.polar(G)[0]
    assert found.fun == pytest.approx(-(np.linalg.norm(G, "nuc") ** 2) / (2 * sharpness), rel=1e-3)
    assert found.fun >= -(np.linalg.norm(G, "nuc") ** 2) / (2 * sharpness) * (1 + 1e-12)
    assert np.allclose(MuonSpectralDescent().direction(G), orthogonal)

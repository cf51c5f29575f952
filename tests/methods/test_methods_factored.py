"""Shampoo, SOAP, Muon, PSGD, K-FAC, E-KFAC, Sophia and AdaHessian against their formulas, written out in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.methods import parse
from tests.catalogue.parts import drawn
from tests.methods.contract import MethodContract


@pytest.mark.slow
class TestVariants(MethodContract):
    specs = (
        "shampoo:power=half,beta=0.9,epsilon=1e-2",
        "soap:update_every=2",
        "muon:momentum=0",
        "psgd:momentum=0",
        "kfac:update_every=1",
        "ekfac:update_every=3",
        "sophia:beta_1=0,update_every=1",
        "adahessian:epsilon=0.01,update_every=2",
    )


def inverse_root(A, p=0.5):
    values, Q = np.linalg.eigh(A)
    return (Q * values**-p) @ Q.T


def taught(spec, gradients):
    """A layer without bias whose method has seen these gradients: the direction of the last, and M of the layer."""
    m, n = gradients[0].shape
    model = nn.Linear(n, m, bias=False, dtype=torch.float64)
    method = parse(spec).create(model)
    for G in gradients:
        model.weight.grad = torch.from_numpy(G.copy())
        method.transform_gradients()
    P = UnitCoordinates(method.coordinates("model"), range(m), n).to_dense().numpy()
    return model.weight.grad.numpy(), P @ P.T, method


def random(count, m=4, n=6, seed=0):
    return list(np.random.default_rng(seed).standard_normal((count, m, n)))


@pytest.mark.parametrize("p", ["quarter", "half"])
def test_shampoo(p):
    Gs = random(12)
    found, M, _ = taught(f"shampoo:power={p},epsilon=0.01,update_every=5,beta={1 if p == 'quarter' else 0.9}", Gs)
    # the roots are those of step 10
    weights = np.ones(10) if p == "quarter" else 0.1 * 0.9 ** np.arange(9, -1, -1) / (1 - 0.9**10)
    L, R = (sum(w * (G @ G.T if k == 0 else G.T @ G) for w, G in zip(weights, Gs, strict=False)) for k in (0, 1))
    L, R = L + 0.01 * np.eye(4), R + 0.01 * np.eye(6)
    power = 0.25 if p == "quarter" else 0.5
    left, right = inverse_root(L, power), inverse_root(R, power)
    if p == "half":
        left = left * np.trace(L) ** 0.5
        assert np.allclose(np.linalg.inv(M @ M), np.kron(L, R) / np.trace(L))
    assert np.allclose(found, left @ Gs[-1] @ right, rtol=1e-10)
    assert np.allclose(M, np.kron(left, right), rtol=1e-9, atol=1e-10)


def test_soap_is_adam_in_the_eigenvectors():
    Gs = random(7, 5, 5)
    found, M, _ = taught("soap:beta=0.8,beta_2=0.9,epsilon=1e-6,update_every=3", Gs)
    L, R, v = 0.2 * Gs[0] @ Gs[0].T, 0.2 * Gs[0].T @ Gs[0], np.zeros((5, 5))
    Q = [np.linalg.eigh(S)[1][:, ::-1] for S in (L, R)]
    for t, G in enumerate(Gs, 1):
        if t > 1 and (t - 1) % 3 == 0:
            for k, S in enumerate((L, R)):
                order = np.argsort(-np.diag(Q[k].T @ S @ Q[k]))
                Q[k] = np.linalg.qr((S @ Q[k])[:, order])[0]
                v = np.take(v, order, k)
        turned = Q[0].T @ G @ Q[1]
        v = 0.9 * v + 0.1 * turned**2
        if t > 1:
            L, R = 0.8 * L + 0.2 * G @ G.T, 0.8 * R + 0.2 * G.T @ G
    d = 1 / (np.sqrt(v / (1 - 0.9**7)) + 1e-6)
    assert np.allclose(found, Q[0] @ (d * turned) @ Q[1].T, rtol=1e-8)
    K = np.kron(*Q)
    assert np.allclose(M, K @ np.diag(d.ravel()) @ K.T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(nesterov, shape):
    Gs = random(5, *shape)
    found, M, _ = taught(f"muon:momentum=0.7,nesterov={str(nesterov).lower()}", Gs)
    B = sum(0.3 * 0.7 ** (4 - t) * G for t, G in enumerate(Gs))
    U = 0.3 * Gs[-1] + 0.7 * B if nesterov else B
    X = U / np.linalg.norm(U)
    for _ in range(5):
        S = X @ X.T
        X = 3.4445 * X - 4.775 * S @ X + 2.0315 * S @ S @ X
    assert np.allclose(found, 0.2 * 6**0.5 * X, rtol=1e-9, atol=1e-12)
    assert np.allclose(M @ U.ravel(), found.ravel(), rtol=1e-9, atol=1e-12)
    # where all singular values of U are alike, the map is a multiple of the identity, on the shorter side
    assert np.linalg.eigvalsh(M).min() > 0


@pytest.mark.slow
def test_psgd_whitens():
    """After many gradients of covariance C_L ⊗ C_R, M is near its inverse square root: Q C Qᵀ near the identity."""
    rng = np.random.default_rng(2)
    roots = [np.diag([1.0, 3.0, 0.3]) @ np.linalg.qr(rng.standard_normal((3, 3)))[0], np.diag([2.0, 0.5])]
    Gs = [roots[0] @ rng.standard_normal((3, 2)) @ roots[1] for _ in range(4000)]
    _, M, method = taught("psgd:momentum=0,fitting_rate=0.02", Gs)
    M = M / float(method._states["weight"]["shortened"])
    C = np.kron(roots[0] @ roots[0].T, roots[1] @ roots[1].T)
    # E[ûᵀMû + vᵀM⁻¹v] is least where M C M = I
    values = np.linalg.eigvals(M @ C @ M).real
    assert values.max() / values.min() < 3
    assert np.linalg.cond(C) > 1000


def per_sample(model, x, y):
    """δ of every sample's own loss in the outputs of the layer, and [1, x]."""
    z = model(x).detach().requires_grad_()
    (delta,) = torch.autograd.grad(nn.functional.cross_entropy(z, y, reduction="sum"), z)
    return delta.numpy(), np.column_stack([np.ones(len(x)), x.numpy()])


def learned(spec, model, x, y):
    method = parse(spec).create(model)
    nn.functional.cross_entropy(model(x), y).backward()
    raw = torch.cat([model.bias.grad[:, None], model.weight.grad], 1).numpy()
    method.transform_gradients()
    moved = torch.cat([model.bias.grad[:, None], model.weight.grad], 1).numpy()
    P = UnitCoordinates(method.coordinates("model"), range(3), 6).to_dense().numpy()
    return raw, moved, P @ P.T


def test_kfac_is_the_damped_inverse_of_its_factors():
    model, (x, y) = nn.Linear(5, 3, dtype=torch.float64), drawn(40, 5, dtype=torch.float64)
    delta, H = per_sample(model, x, y)
    A, G = H.T @ H / 40, delta.T @ delta / 40
    pi = np.sqrt(np.trace(A) / 6 / (np.trace(G) / 3))
    truth = np.kron(np.linalg.inv(G + 0.1 / pi * np.eye(3)), np.linalg.inv(A + 0.1 * pi * np.eye(6)))
    raw, moved, M = learned("kfac:damping=0.01", model, x, y)
    assert np.allclose(M, truth, rtol=1e-9)
    assert np.allclose(moved.ravel(), truth @ raw.ravel(), rtol=1e-9)


def test_ekfac_has_the_best_diagonal_in_that_basis():
    model, (x, y) = nn.Linear(5, 3, dtype=torch.float64), drawn(40, 5, dtype=torch.float64)
    delta, H = per_sample(model, x, y)
    gradients = np.einsum("ni,nj->nij", delta, H).reshape(40, -1)
    F = gradients.T @ gradients / 40
    Q = np.kron(np.linalg.eigh(delta.T @ delta)[1], np.linalg.eigh(H.T @ H)[1])
    truth = Q @ np.diag(1 / (np.diag(Q.T @ F @ Q) + 0.01)) @ Q.T
    raw, moved, M = learned("ekfac:damping=0.01", model, x, y)
    assert np.allclose(M, truth, rtol=1e-8, atol=1e-10)
    assert np.allclose(moved.ravel(), truth @ raw.ravel(), rtol=1e-8)


def test_kfac_sums_the_inputs_of_a_convolution_over_positions():
    conv = nn.Conv2d(2, 3, 2, dtype=torch.float64)
    model = nn.Sequential(conv, nn.Flatten())
    x = torch.randn(7, 2, 3, 3, dtype=torch.float64)
    method = parse("ekfac:damping=0.01").create(model)
    z = model(x)
    weights = torch.randn(12, dtype=torch.float64)
    (z.square() @ weights).mean().backward()
    method.transform_gradients()
    state = method.states["0"]
    patches = nn.functional.unfold(x, 2).mT
    H = torch.cat([torch.ones(7, 4, 1, dtype=torch.float64), patches], 2)
    delta = (2 * z * weights).detach().view(7, 3, 4).mT
    assert torch.allclose(state.A / state.mass, torch.einsum("nti,ntj->ij", H, H) / 7)
    assert torch.allclose(state.G / state.mass, torch.einsum("nti,ntj->ij", delta, delta) / 28)
    gradients = torch.einsum("nti,ntj->nij", delta, H)
    turned = state.left.T @ gradients @ state.right
    assert torch.allclose(state.s, turned.square().mean(0))


def test_sophia_and_adahessian_estimate_the_diagonal():
    """Of a quadratic loss with a diagonal Hessian ĥ is exact."""
    d = torch.tensor([[0.5, 2.0, 40.0]], dtype=torch.float64)
    for spec in ("sophia:gamma=1,beta_1=0,beta_2=0,update_every=2", "adahessian:beta_1=0,epsilon=1e-12"):
        model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.3)
        method = parse(spec).create(model)
        loss = 0.5 * (d * model.weight.square()).sum()
        method.observe(loss)
        loss.backward()
        method.transform_gradients()
        expected = (0.3 * torch.ones_like(d)) if "ada" in spec else torch.full_like(d, 0.3)
        assert torch.allclose(model.weight.grad, expected), spec


def test_sophia_clips():
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    method = parse("sophia:gamma=1,beta_1=0,beta_2=0").create(model)
    nn.init.constant_(model.weight, 3.0)
    loss = (torch.tensor([[0.5, -0.5]], dtype=torch.float64) * model.weight.square()).sum()
    method.observe(loss)
    loss.backward()
    method.transform_gradients()
    assert model.weight.grad.tolist() == [pytest.approx([1.0, -1.0])]
    P = method.coordinates("model").of_unit(0).matrix(2)
    assert torch.allclose((P @ P.T).diagonal(), torch.tensor([1 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("spec", ["sophia", "adahessian", "gauss-newton"])
def test_a_loss_that_was_not_shown_is_missed(spec):
    model = nn.Linear(2, 1)
    method = parse(spec).create(model)
    model(torch.ones(3, 2)).square().sum().backward()
    with pytest.raises(ConfigError, match=r"call method\.observe\(loss\) before"):
        method.transform_gradients()


@pytest.mark.parametrize(
    ("spec", "layer", "word"),
    [
        ("shampoo", nn.ConvTranspose2d(1, 2, 2), "transposed"),
        ("kfac", nn.ConvTranspose2d(1, 2, 2), "transposed"),
        ("kfac", nn.Conv2d(2, 2, 2, groups=2), "grouped"),
        ("gauss-newton", nn.Conv2d(2, 2, 2, groups=2), "grouped"),
    ],
)
def test_layers_that_they_do_not_know(spec, layer, word):
    with pytest.raises(ConfigError, match=word):
        parse(spec).create(nn.Sequential(layer))

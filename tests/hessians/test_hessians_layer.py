"""The dual of a layer's Hessian against its factor written out."""

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import capture
from hesscond.errors import CaptureError
from hesscond.hessians import DensePreconditioner, Scaling
from hesscond.hessians.build import layer_hessian
from hesscond.hessians.layer import LayerHessian, accurate_gram
from hesscond.problem import MEMORY
from hesscond.spectra import condition_number
from hesscond.spectra.condition import EPS, Values, conclude
from hesscond.spectra.solvers.dual import least_refined
from tests.truth import layer_truth


@pytest.fixture(autouse=True)
def no_layer_is_small(monkeypatch):
    monkeypatch.setattr("hesscond.hessians.build.SMALL", 0)


def dense(activation, spread=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 16), activation, nn.Linear(16, 4)).double()
    generator = torch.Generator().manual_seed(1)
    scales = 10.0 ** (spread * (2 * torch.rand(30, generator=generator, dtype=torch.float64) - 1))
    x = torch.randn(20, 30, generator=generator, dtype=torch.float64) * scales
    return model, (x, torch.randint(0, 4, (20,), generator=generator)), "0"


def convolution(activation, groups=2, channels=4, size=6):
    torch.manual_seed(0)
    first = nn.Conv2d(channels, 12, 3, groups=groups)
    model = nn.Sequential(first, activation, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 4)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, channels, size, size, generator=generator, dtype=torch.float64)
    return model, (x, torch.randint(0, 4, (16,), generator=generator)), "0"


PROBLEMS = {
    "dense": lambda: dense(nn.ReLU()),
    "graded": lambda: dense(nn.ReLU(), 2.0),
    "indefinite": lambda: dense(nn.Tanh()),
    "convolution": lambda: convolution(nn.ReLU()),
    "few positions": lambda: convolution(nn.ReLU(), 1, 8, 4),
    "few positions, indefinite": lambda: convolution(nn.Tanh(), 1, 8, 4),
}


def layer_of(name):
    model, batch, layer = PROBLEMS[name]()
    return layer_hessian(capture(model, nn.CrossEntropyLoss(), batch, [layer], whole=True)[layer], MEMORY)


def scaling(hessian, scaled):
    """P, and its diagonal (m, n̂)."""
    n = hessian.order // hessian.units
    d = torch.ones(hessian.units, n, dtype=torch.float64)
    if scaled == "plain":
        return None, d
    if scaled == "alike":
        own = torch.logspace(0, 2, n, dtype=torch.float64)
        return DensePreconditioner(torch.diag(own)), d * own
    d = 10.0 ** torch.rand(d.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Scaling(d), d


@pytest.mark.share(2)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("scaled", ["plain", "alike", "by unit"])
def test_products_and_eigenvalues_are_those_of_the_matrix(name, scaled):
    hessian = layer_of(name)
    P, d = scaling(hessian, scaled)
    F = hessian.dense().factor() * d.flatten()
    H = F.T @ (F if hessian.sign is None else hessian.sign[:, None] * F)
    v = torch.randn(len(H), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.allclose(hessian.in_coordinates(P).product(v), H @ v, rtol=1e-12, atol=1e-12 * float(H.abs().max()))
    own = hessian.in_coordinates(P)
    found, kappa, truth = own.eigenvalues(), own.condition_number(), np.linalg.eigvalsh(H.numpy())
    assert len(found) == kappa.rank == len(H) - kappa.nullity
    assert kappa.negative == (truth < -1e-11 * np.abs(truth).max()).sum()
    truth = truth[np.argsort(-np.abs(truth))][: len(found)]
    assert np.sort(found.numpy()) == pytest.approx(np.sort(truth), abs=1e-11 * np.abs(truth).max())
    if P is None:
        assert torch.allclose(hessian.matrix(), H, rtol=1e-12, atol=1e-12 * float(H.abs().max()))
        values, vectors = hessian.eigenpairs()
        assert (H @ vectors - vectors * values).norm() <= 1e-12 * H.norm()
        assert torch.allclose(vectors.T @ vectors, torch.eye(len(values)).double(), atol=1e-11)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["dense", "graded", "convolution"])
@pytest.mark.parametrize("rtol", [1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("scaled", ["plain", "alike", "by unit"])
def test_kappa_of_the_dual_is_that_of_the_factor(name, rtol, scaled):
    hessian = layer_of(name)
    P, d = scaling(hessian, scaled)
    F = hessian.dense().factor() * d.flatten()
    truth = condition_number(factor=F)
    found = hessian.in_coordinates(P).condition_number(rtol=rtol)
    assert truth.resolved
    assert found.solver.startswith("dual")
    assert found.resolved
    assert (found.rank, found.nullity) == (truth.rank, truth.nullity)
    assert found.value == pytest.approx(truth.value, rel=max(1e-11, 1e-14 * truth.value**0.5))
    assert found.lower <= truth.value * (1 + 1e-12)
    assert found.upper >= truth.value * (1 - 1e-12)
    assert found.lambda_max == pytest.approx(truth.lambda_max, rel=1e-11)


def test_the_problems_are_really_solved_by_their_dual():
    assert all(isinstance(layer_of(name), LayerHessian) for name in PROBLEMS)
    assert layer_of("dense").condition_number(rtol=1e-6).solver == "dual Gram"
    assert layer_of("graded").condition_number(rtol=1e-12).solver.startswith("dual")


@pytest.mark.parametrize("decades", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("n", [30, 500])
def test_the_refined_dual_contains_the_truth_in_long_arithmetic(decades, n):
    rng = np.random.default_rng(int(10 * decades) + n)
    m = 16
    Q = np.linalg.qr(rng.standard_normal((m, m)))[0]
    basis = np.linalg.qr(rng.standard_normal((n, m)))[0]
    X = (Q * 10.0 ** np.linspace(0, -decades, m)) @ basis.T + 2.0 ** rng.integers(-2, 3, (m, 1)) * 1e-3
    K, share = accurate_gram(torch.from_numpy(X))
    with mpmath.workdps(60):
        exact = mpmath.matrix(X.tolist())
        G = exact * exact.T
        truth = sorted(mpmath.eigsy(G, eigvals_only=True), reverse=True)
        lengths = np.linalg.norm(X, axis=1)
        wrong = np.array([[float(abs(G[i, j] - K[i, j].item())) for j in range(m)] for i in range(m)])
    assert (wrong <= EPS * K.abs().numpy() + share * np.outer(lengths, lengths)).all()
    error = EPS * float(K.norm()) + share * float(lengths @ lengths)
    values = np.linalg.eigvalsh(K.numpy())[::-1]
    # as wide as those of much larger matrices, so that it is seen what the refinement does
    ends = Values(values, np.full(m, 540 * EPS * values[0] + error), np.zeros(m), 1, "dual Gram")
    plain, found = (conclude(own, order=n, limit=m, scale=0) for own in (ends, least_refined(K.numpy(), ends, error)))
    kappa = truth[0] / truth[-1]
    assert found.lower <= kappa <= found.upper
    assert found.width < plain.width / 20 or found.width < 3e-12
    assert abs(found.lambda_min / truth[-1] - 1) < 4 * EPS * kappa


@pytest.mark.parametrize("scaled", [False, True])
def test_a_refined_dual_says_what_the_singular_values_say(scaled):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 400, dtype=torch.float64, generator=generator)
    # pairs of nearly equal samples: κ is about 1e6
    x[6:] = x[:6] + 5e-3 * x[6:]
    model = nn.Sequential(nn.Linear(400, 5)).double()
    batch = x, torch.randint(5, (12,), generator=generator)
    own = Scaling(torch.linspace(1, 3, 401, dtype=torch.float64)) if scaled else None
    results = [
        hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["0"], "layer", own, rtol=rtol)["0"].conditions[0]
        for rtol in (1e-8, 1e-12)
    ]
    refined, finest = results
    assert refined.solver == "dual, refined"
    assert finest.solver.startswith("dual")
    assert "SVD" in finest.solver
    assert (refined.rank, refined.nullity) == (finest.rank, finest.nullity)
    assert refined.width <= 1e-8
    assert refined.lower <= finest.upper
    assert finest.lower <= refined.upper


def test_the_gram_matrix_and_its_triangular_factor():
    for name in ("dense", "convolution"):
        hessian = layer_of(name)
        F = hessian.dense().factor()
        K, error = hessian.gram()
        assert torch.linalg.matrix_norm(F @ F.T - K, 2) <= error
        R, errors = hessian.triangular()
        assert torch.allclose(R.T @ R, K, rtol=1e-12, atol=1e-15)
        assert (errors > 0).all()
        assert (errors < 1e-10 * np.linalg.norm(R, axis=0)).all()


def test_what_does_not_fit_is_said():
    model, batch, layer = PROBLEMS["dense"]()
    result = hesscond.probe(model, nn.CrossEntropyLoss(), batch, [layer], "layer", memory=1.5e5)
    assert result[layer].kappa.resolved
    with pytest.raises(CaptureError, match=r"of order 496, takes 1\.97 MB, more than memory=150 kB"):
        result[layer].hessian()
    with pytest.raises(CaptureError, match="take at most"):
        result[layer].eigenvectors()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("loss", ["l1", "hinge", "linear"])
def test_losses_without_curvature_have_a_hessian_of_zero(loss, level, streamed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    loss_fn = {
        "l1": nn.L1Loss(),
        "hinge": lambda o, t: (1 - o * t.sign()).clamp_min(0).mean(),
        "linear": lambda o, t: (o * t).mean(),
    }[loss]
    batch = torch.randn(20, 4).double(), torch.randn(20, 3).double()
    data = [batch, tuple(part[:7] for part in batch)] if streamed else batch
    result = hesscond.probe(model, loss_fn, data, level=level)
    for name, layer in result.items():
        for unit in layer.units if level == "unit" else [None]:
            assert len(layer.eigenvalues(unit)) == 0
            assert not layer.hessian(unit).any()
        for kappa in layer.conditions:
            assert (kappa.rank, kappa.nullity, kappa.resolved) == (0, layer.n_params, False), name
            assert kappa.solver == "zero matrix"


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()])
@pytest.mark.parametrize("seed", [1, 7, 12, 24])
def test_a_constant_feature_is_one_direction_for_each_unit(seed, loss):
    """A hidden unit without incoming weights: Hessian of a unit tensor that of the loss, so ranks are a product."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = 0.7
    x, y = torch.randn(20, 4).double(), torch.randn(20, 3).double()
    y = y if isinstance(loss, nn.MSELoss) else y.argmax(1)
    kappa = hesscond.probe(model, loss, (x, y), layers=["2"], level="layer")["2"].kappa
    values = torch.linalg.eigvalsh(layer_truth(model, loss, (x, y), "2"))
    rank = 12 if isinstance(loss, nn.MSELoss) else 8
    assert (kappa.rank, kappa.rank_decision) == (rank, "structural")
    assert kappa.value == pytest.approx(float(values[-1] / values[15 - rank]), rel=1e-8)
    assert values[14 - rank].abs() < 1e-15 * values[-1]


def test_an_interval_from_the_gram_matrix_is_enough_where_the_triangular_factor_takes_minutes(monkeypatch):
    model, (x, _), layer = PROBLEMS["few positions"]()
    batch = x * torch.logspace(0, 2, len(x), dtype=torch.float64).view(-1, 1, 1, 1), x.new_zeros(len(x), 4)
    hessian = layer_hessian(capture(model, nn.MSELoss(), batch, [layer], whole=True)[layer], MEMORY)
    assert hessian._in_pairs
    truth = torch.linalg.svdvals(hessian.dense().factor())
    finer = hessian.condition_number(rtol=1e-9)
    monkeypatch.setattr("hesscond.spectra.solvers.dual.MINUTES", 0)
    kappa = hessian.condition_number(rtol=1e-9)
    assert kappa.solver.startswith("dual Gram")
    assert finer.width < 1e-9 < kappa.width < 1e-3
    assert kappa.lower <= float(truth[0] / truth[-1]) ** 2 <= kappa.upper

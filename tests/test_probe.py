"""κ of whole networks to full precision, against 120 digits; and in the coordinates of a method."""

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.hessians import CentringScaling, DensePreconditioner
from tests.catalogue import case
from tests.catalogue.cases import Case
from tests.catalogue.dense import mlp
from tests.catalogue.parts import CE, labelled
from tests.truth import unit_truth

DIGITS = 120


def exact_hessian(model, x, layer):
    """(n, n) mpmath matrix: the whole layer's Hessian of the mean softmax cross-entropy, order [b_0, w_0, b_1, …].

    For ``Sequential(Linear or Conv2d, ReLU, Flatten, Linear)``, from the float64 weights and inputs, the forward pass
    and all in `DIGITS` digits: H = Σ_j J_jᵀ (diag(p_j) − p_j p_jᵀ) J_j / N, with J_j the derivative of the logits,
    which are piecewise linear in the layer's parameters.
    """
    first, last = model[0], model[-1]
    exact = [[[mpmath.mpf(v) for v in h] for h in sample] for sample in positions(first, x).tolist()]
    W, b = weights(first)
    V, c = weights(last)
    units, places = len(W), len(exact[0])
    n = units * (len(W[0]) + 1) if layer == "0" else len(V) * (len(V[0]) + 1)
    H = mpmath.zeros(n)
    for sample in exact:
        z = [mpmath.fdot(w, h) + bias for w, bias in zip(W, b, strict=True) for h in sample]
        hidden = [max(value, mpmath.mpf(0)) for value in z]
        e = [mpmath.exp(mpmath.fdot(v, hidden) + bias) for v, bias in zip(V, c, strict=True)]
        p = [value / mpmath.fsum(e) for value in e]
        J = mpmath.zeros(len(V), n)
        for k, v in enumerate(V):
            if layer == "0":
                for unit in range(units):
                    active = [q for q in range(places) if z[unit * places + q] > 0]
                    for column in range(len(W[0]) + 1):
                        J[k, unit * (len(W[0]) + 1) + column] = mpmath.fsum(
                            v[unit * places + q] * (sample[q][column - 1] if column else 1) for q in active
                        )
            else:
                for column, value in enumerate([mpmath.mpf(1), *hidden]):
                    J[k, k * (len(hidden) + 1) + column] = value
        C = mpmath.matrix(len(V), len(V))
        for k in range(len(V)):
            for m in range(len(V)):
                C[k, m] = (p[k] * mpmath.fsum(p[:k] + p[k + 1 :]) if k == m else -p[k] * p[m]) / len(exact)
        H += J.T * C * J
    return H


def positions(module, x):
    """(N, positions, n) what the layer's weight row is multiplied with, copies of the inputs."""
    if isinstance(module, nn.Linear):
        return x[:, None]
    return nn.functional.unfold(x, module.kernel_size).transpose(1, 2)


def weights(module):
    W = [[mpmath.mpf(v) for v in row] for row in module.weight.detach().flatten(1).tolist()]
    return W, [mpmath.mpf(v) for v in module.bias.tolist()]


def exact_spectrum(H):
    """Nonzero eigenvalues, descending: the others are zero to the digits carried."""
    values = sorted(mpmath.eigsy(H, eigvals_only=True), reverse=True)
    return [value for value in values if value > values[0] * mpmath.mpf(10) ** (-DIGITS * 2 // 3)]


def agrees(kappa, H):
    with mpmath.workdps(DIGITS):
        values = exact_spectrum(H)
        truth = values[0] / values[-1]
        if not kappa.resolved:
            # float64 factors tell 1e-15 from zero, so κ up to 1e30 at least
            assert truth > 1e30
            assert kappa.lower <= truth
            return float(truth)
        # the forward pass rounds activations to 1e-16 and logits of size 1e2 to 1e-14: that is not in the interval
        assert kappa.rank == len(values)
        assert kappa.negative == 0
        assert abs(float(kappa) / truth - 1) < 1e-9
        assert abs(kappa.lambda_max / values[0] - 1) < 1e-9
        assert kappa.width < 1e-6
        assert kappa.lower * (1 - 1e-9) <= truth <= kappa.upper * (1 + 1e-9)
        return float(truth)


def every_block_agrees(model, x, y, layer, units):
    """The largest κ met."""
    arguments = (model, nn.CrossEntropyLoss(), (x, y), [layer])
    with mpmath.workdps(DIGITS):
        H = exact_hessian(model, x, layer)
    found, whole = hesscond.probe(*arguments)[layer], hesscond.probe(*arguments, level="layer")[layer]
    size = found.n_params
    kappas = [agrees(found.kappa[i], H[i * size : (i + 1) * size, i * size : (i + 1) * size]) for i in units]
    return max([*kappas, agrees(whole.kappa, H)])


def random_model(first, hidden, generator):
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(hidden, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("samples", [5, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", [0, 4, 8])
def test_badly_scaled_hidden_units(samples, spread):
    """Hidden units' sizes spread over 10**spread, weights so large that softmax saturates to 1e-20."""
    generator = torch.Generator().manual_seed(spread)
    model = random_model(nn.Linear(4, 6), 6, generator)
    with torch.no_grad():
        # every hidden unit gets its own size, and stays active
        model[0].weight.abs_().mul_(10.0 ** -torch.linspace(0, spread, 6)[:, None])
        model[0].bias.abs_().mul_(10.0 ** -torch.linspace(0, spread, 6))
        model[3].weight.mul_(8.0)
    x = torch.rand(samples, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (samples,), generator=generator)
    largest = every_block_agrees(model, x, y, "3", range(3))
    assert largest > 10.0 ** (2 * spread)


@pytest.mark.parametrize("samples", [8, pytest.param(14, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", [0, 3, 5])
def test_badly_scaled_input_features(samples, spread):
    """Features log-uniform over 10**±spread, the first layer's weights undo it: κ up to 1e20."""
    generator = torch.Generator().manual_seed(7 + spread)
    model = random_model(nn.Linear(4, 3), 3, generator)
    scales = 10.0 ** torch.empty(4, dtype=torch.float64).uniform_(-spread, spread, generator=generator)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64) * scales
    with torch.no_grad():
        model[0].weight.div_(scales)
        model[0].bias.add_(1.0)
    y = torch.randint(0, 3, (samples,), generator=generator)
    largest = every_block_agrees(model, x, y, "0", range(3))
    assert largest > 10.0 ** (2 * spread)


@pytest.mark.parametrize("layer", ["0", "3"])
@pytest.mark.parametrize(("channels", "spread"), [(1, 0), (2, 4)])
def test_badly_scaled_channels_of_a_convolution(channels, spread, layer):
    generator = torch.Generator().manual_seed(31 + spread)
    model = random_model(nn.Conv2d(channels, 2, 2), 4 * 2, generator)
    scales = 10.0 ** torch.linspace(-spread / 2, spread, channels).double()[:, None, None]
    x = torch.randn(6, channels, 3, 3, generator=generator, dtype=torch.float64) * scales
    with torch.no_grad():
        model[0].weight.div_(scales)
        model[0].bias.add_(1.0)
    y = torch.randint(0, 3, (6,), generator=generator)
    every_block_agrees(model, x, y, layer, range(2))


def test_dead_features_are_left_out_not_divided_by():
    model, loss_fn, (x, y) = case("relu-ce").make()
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = -1
    h = torch.relu(model[0](x))
    live = int((h.max(0).values > h.min(0).values).sum())
    assert live < 6
    result = hesscond.probe(model, loss_fn, (x, y), layers=["2"], method="bnp")
    assert result["2"].hessian(unit=0).shape == (live + 1, live + 1)
    assert all(np.isfinite(float(k)) for k in result["2"].kappa)


def test_rank_lost_to_dead_features_stays_structural_in_any_coordinates():
    """In running coordinates a dead feature is a constant column, no longer zero: P cannot raise the rank."""
    model, loss_fn, _ = case("relu-ce").make()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias[:4] = torch.tensor([-1.0, -1.0, 0.5, -1.0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (30,), generator=generator)
    running = CentringScaling(torch.rand(6, generator=generator).double(), torch.full((6,), 0.3).double())
    for P in (None, running):
        kappa = hesscond.probe(model, loss_fn, (x, y), ["2"], method=P)["2"].kappa[0]
        assert kappa.rank == 3
        assert kappa.rank_decision == "structural"


def test_dead_and_dependent_features_of_an_indefinite_layer_are_resolved():
    """Zero columns, a constant column and a dependent one, S of both signs: no warning, the rank is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 8, generator=generator, dtype=torch.float64)
    x[:, 0], x[:, 1] = 0, 0.5
    x[:, 2] = x[:, 3] + 0.1 * x[:, 4]
    y = torch.randint(0, 3, (30,), generator=generator)
    running = CentringScaling(torch.full((8,), 0.3).double(), torch.full((8,), 0.2).double())
    for P in (None, running):
        for kappa in hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), ["0"], method=P)["0"].kappa:
            assert kappa.resolved
            assert kappa.rank == 6
            assert kappa.negative > 0


def test_the_interval_of_a_unit_holds_the_cancellation_in_its_coordinates():
    """P takes the difference of two features that agree to 1e-7, times 1e7: rows of ĤP are known to 1e-9 only."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 1e-7 * torch.randn(40, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    batch = x, torch.randint(3, (40,), generator=generator)
    P = torch.eye(4, dtype=torch.float64)
    P[1:, 2] = torch.tensor([-1e7, 1e7, 0])
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, layers=["0"], method=DensePreconditioner(P))["0"]
    # the factor in exact differences, which are those of features by Sterbenz
    F = torch.cat([torch.ones(40, 1), x[:, :1], 1e7 * (x[:, 1:2] - x[:, :1]), x[:, 2:]], 1)
    a = model[0](x).detach()
    for unit, kappa in enumerate(found.conditions):

        def loss(own, unit=unit):
            return nn.functional.cross_entropy(
                model[2](torch.relu(a.index_copy(1, torch.tensor([unit]), own))), batch[1]
            )

        S = torch.func.hessian(loss)(a[:, [unit]])[:, 0, :, 0].diagonal().detach()
        truth = float(torch.linalg.cond(S.clamp_min(0).sqrt()[:, None] * F) ** 2) if kappa.rank == 4 else kappa.value
        assert kappa.lower <= truth <= kappa.upper


def test_bnp_coordinates_of_a_batch_are_centred_and_scaled():
    model, loss_fn, batch = Case("", "", None, lambda: (mlp(nn.Tanh()), CE, labelled(5, n=30))).make()
    H = torch.tanh(model[0](batch[0])).detach()
    G = torch.cat([torch.ones(30, 1), (H - H.mean(0)) / H.std(0, unbiased=False)], 1).double()
    P = torch.linalg.lstsq(torch.cat([torch.ones(30, 1).double(), H], 1), G).solution
    result = hesscond.probe(model, loss_fn, batch, layers=["2"], method="bnp")
    truth = P.T @ unit_truth(model, loss_fn, batch, "2", 3) @ P
    assert torch.allclose(result["2"].hessian(unit=3), truth, rtol=1e-9, atol=1e-12)

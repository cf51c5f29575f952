"""Hessians of layers before smooth activations on features of any scale, against arithmetic of 120 digits and more."""

import random
from dataclasses import dataclass

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import nn
from torch.nn import functional

import hesscond
from tests.test_probe_mutants import network_truth
from tests.truth import layer_truth

#: Beyond it nothing of the smallest eigenvalue may be left in double precision.
BEYOND = mpf(10) ** 600


@dataclass
class Unscaled:
    """A network with one hidden layer, its data, and which of its hidden units are looked at."""

    model: nn.Sequential
    loss_fn: nn.Module
    data: tuple[torch.Tensor, torch.Tensor]
    unit: int

    @classmethod
    def random(cls, seed, *, decades=6.0, raw=False, hidden=8):
        """Features over twice as many decades; ``raw``: with weights that do not know of it, so that units saturate."""
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        n, N, h, c = draw.randint(1, 4), draw.randint(15, 30), draw.randint(2, hidden), draw.randint(2, 4)
        scales = torch.tensor([10 ** draw.uniform(-decades, decades) for _ in range(n)], dtype=torch.float64)
        x = torch.randn(N, n, generator=generator, dtype=torch.float64) * scales
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            activation = draw.choice([nn.SiLU, nn.GELU, nn.Tanh])
            model = nn.Sequential(nn.Linear(n, h), activation(), nn.Linear(h, c)).double()
        if not raw:
            with torch.no_grad():
                model[0].weight /= scales
        if draw.random() < 0.5:
            return cls(model, nn.MSELoss(), (x, torch.randn(N, c, generator=generator).double()), draw.randrange(h))
        return cls(model, nn.CrossEntropyLoss(), (x, torch.randint(0, c, (N,), generator=generator)), draw.randrange(h))

    def kappa(self, level="unit"):
        units = [self.unit] if level == "unit" else None
        result = hesscond.probe(self.model, self.loss_fn, self.data, ["0"], level, units=units)["0"]
        return result.conditions[0]

    def truth(self, level="unit"):
        """|λ| descending and the number of negative λ, with as many digits as that takes; None: more than 600."""
        for digits in (120, 700):
            with mpmath.workdps(digits):
                values = mpmath.eigsy(self.hessian([self.unit] if level == "unit" else None), eigvals_only=True)
                sizes = sorted((abs(v) for v in values), reverse=True)
                if sizes[-1] > sizes[0] * mpf(10) ** (60 - digits):
                    return sizes, sum(v < 0 for v in values)
        return None

    def hessian(self, units):
        """Σ_j S_j ⊗ ĥ_jĥ_jᵀ with S_j = diag(f''(a) g) + f'(a) f'(a)ᵀ ∘ (WᵀCW), by definition."""
        first, _, last = self.model
        W1, b1, W2, b2 = (
            mpmath.matrix(p.detach().numpy().reshape(len(p), -1).tolist())
            for p in (first.weight, first.bias, last.weight, last.bias)
        )
        x, y = self.data
        N, c, units = len(x), len(last.bias), range(len(first.bias)) if units is None else units
        size = x.shape[1] + 1
        H = mpmath.matrix(len(units) * size)
        for j in range(N):
            row = mpmath.matrix(x[j].tolist())
            f = [derivatives(self.model[1], a) for a in W1 * row + b1]
            slope, C = loss_derivatives(self.loss_fn, W2 * mpmath.matrix([v[0] for v in f]) + b2, y[j], N * c)
            g, inner = W2.T * (slope / N), W2.T * (C / N) * W2
            extended = [mpf(1), *row]
            for k, i in enumerate(units):
                for m, o in enumerate(units):
                    S = inner[i, o] * f[i][1] * f[o][1] + (f[i][2] * g[i] if i == o else 0)
                    for p in range(size):
                        for q in range(size):
                            H[k * size + p, m * size + q] += S * extended[p] * extended[q]
        return H


def derivatives(activation, a):
    """f, f' and f'' at a, none by a difference that cancels."""
    if isinstance(activation, nn.SiLU):
        s, rest = 1 / (1 + mpmath.exp(-a)), 1 / (1 + mpmath.exp(a))
        return a * s, s * (1 + a * rest), s * rest * (2 + a * (rest - s))
    if isinstance(activation, nn.GELU):
        density = mpmath.npdf(a)
        below = mpmath.erfc(-a / mpmath.sqrt(2)) / 2
        return a * below, below + a * density, density * (2 - a * a)
    slope = mpmath.sech(a) ** 2
    return mpmath.tanh(a), slope, -2 * mpmath.tanh(a) * slope


def loss_derivatives(loss_fn, o, target, entries):
    """Slope and Hessian in the outputs of one sample, times N."""
    c = len(o)
    if isinstance(loss_fn, nn.MSELoss):
        weight = mpf(2) / c
        return weight * (o - mpmath.matrix(target.tolist())), weight * mpmath.eye(c)
    top = max(o)
    p = [mpmath.exp(v - top) for v in o]
    total = sum(p)
    p = [v / total for v in p]
    slope = mpmath.matrix([-sum(p[m] for m in range(c) if m != k) if k == int(target) else p[k] for k in range(c)])
    C = mpmath.matrix(c)
    for k in range(c):
        for m in range(c):
            C[k, m] = p[k] * sum(p[i] for i in range(c) if i != k) if k == m else -p[k] * p[m]
    return slope, C


def outcome(case, level="unit"):
    """Whether κ of the case is resolved, once its interval and its counts are known to be right."""
    kappa, truth = case.kappa(level), case.truth(level)
    true = BEYOND if truth is None else truth[0][0] / truth[0][-1]
    with mpmath.workdps(30):
        assert kappa.lower <= true, (kappa, mpmath.nstr(true))
        if kappa.resolved:
            assert kappa.upper >= true, (kappa, mpmath.nstr(true))
            assert truth is not None
            assert (kappa.rank, kappa.negative) == (len(truth[0]), truth[1])
    return kappa.resolved


def test_the_smallest_eigenvalue_of_features_six_decades_apart():
    """1e-3 and 3e3 beside a bias: a bound relative to the norm alone takes the smallest eigenvalue for round-off."""
    torch.manual_seed(0)
    x = torch.randn(20, 2, dtype=torch.float64) * torch.tensor([1e-3, 3e3], dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 4), nn.SiLU(), nn.Linear(4, 2)).double()
    for unit in range(4):
        case = Unscaled(model, nn.MSELoss(), (x, torch.randn(20, 2, dtype=torch.float64)), unit)
        (sizes, _), kappa = case.truth(), case.kappa()
        assert sizes[0] / sizes[-1] > 1e11
        assert kappa.resolved
        assert kappa.rank == 3
        assert kappa.value == pytest.approx(float(sizes[0] / sizes[-1]), rel=1e-6)
        result = hesscond.probe(*[model, nn.MSELoss(), case.data], ["0"], units=[unit])["0"]
        values = result.eigenvalues(unit)
        assert values.abs().sort(descending=True).values.tolist() == pytest.approx(list(map(float, sizes)), rel=1e-6)
        vectors, H = result.eigenvectors(unit), result.hessian(unit)
        # each to the scale of its own row
        residual = (H @ vectors - vectors * values) / H.abs().sqrt().diagonal()[:, None]
        assert float((residual.abs() / values.abs().sqrt()).max()) < 1e-6


def test_random_layers():
    assert sum(outcome(Unscaled.random(seed, decades=3, hidden=3), "layer") for seed in range(12)) >= 10


def test_what_a_saturated_loss_subtracts_within_its_kernel_is_in_the_bound():
    assert not outcome(Unscaled.random(100, raw=True))


@pytest.mark.slow
@pytest.mark.share(10)
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_units(part):
    """Features over 12 decades; one unit in five has weights that do not know of their scales, and saturates."""
    resolved = [outcome(Unscaled.random(seed, raw=seed % 5 == 0)) for seed in range(100 * part, 100 * part + 100)]
    assert sum(resolved) > 85


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_layers(part):
    seeds = range(50 * part, 50 * part + 50)
    assert sum(outcome(Unscaled.random(seed, decades=4, hidden=4), "layer") for seed in seeds) > 40


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("gap", [30, 300, 650, 2000, 1e5])
def test_a_softmax_that_underflows_is_no_zero(gap, streamed, level):
    """Three samples, one with logits that far apart: its curvature e^-gap is all there is in one direction."""
    first = nn.Linear(2, 2).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[gap, 0.0], [0.0, 0.0]]))
        first.bias.zero_()
    x = torch.tensor([[1.0, 0.3], [0.0, 1.0], [0.0, -2.0]], dtype=torch.float64)
    batch = x, torch.tensor([0, 1, 0])
    data = [batch, batch] if streamed else batch
    model = nn.Sequential(first)
    kappa = hesscond.probe(model, nn.CrossEntropyLoss(), data, level=level)["0"].conditions[0]
    with mpmath.workdps(100):
        p = 1 / (1 + mpmath.exp(-mpf(gap)))
        q = mpmath.exp(-mpf(gap)) * p
        H = mpmath.matrix(3)
        for S, row in zip((p * q, mpf(1) / 4, mpf(1) / 4), x.tolist(), strict=True):
            extended = mpmath.matrix([1, *row])
            H += S * extended * extended.T
        # λ_min = det / (λ_max λ_2), the other two being those without the first sample
        values = mpmath.eigsy(H, eigvals_only=True)
        determinant = mpmath.det(H) if gap < 100 else p * q * mpf(9) / 16
        others = sorted(values)[1:]
        truth = others[1] ** 2 * others[0] / determinant
        assert kappa.lower <= truth * (1 + mpf(10) ** -6)
        assert kappa.upper >= truth * (1 - mpf(10) ** -6)
    # the factor of a stream holds the null space of the softmax too, beside which some rows are too small
    assert kappa.resolved == (gap < 1000) or (streamed and level == "layer")
    if kappa.resolved:
        assert kappa.rank == 3
    else:
        assert kappa.lower < 1e10


def test_features_that_underflow_with_their_curvature():
    """√S of 1e-195 times a feature of 1e-150 is not zero, and the only one in its column."""
    first = nn.Linear(2, 2).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[900.0, 0.0], [0.0, 0.0]]))
        first.bias.zero_()
    x = torch.tensor([[1.0, 1e-150], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    kappa = hesscond.probe(nn.Sequential(first), nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 0])))["0"].kappa[0]
    assert not kappa.resolved
    # without it the second feature is dead
    x[0, 1] = 0
    kappa = hesscond.probe(nn.Sequential(first), nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 0])))["0"].kappa[0]
    assert kappa.rank == 2


def test_dead_samples_of_a_saturated_network_are_left_open():
    """tanh of ±40 is ±1 in double precision, and its derivative 0: one sample is left, and no rank of 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    x = torch.tensor([[0.5], [60.0], [-80.0], [100.0]], dtype=torch.float64)
    for level in ("unit", "layer"):
        for data in ((x, torch.randn(4, 2).double()), [(x, torch.randn(4, 2).double())] * 2):
            kappa = hesscond.probe(model, nn.MSELoss(), data, ["0"], level)["0"].conditions[0]
            assert not kappa.resolved


class Own(nn.Linear):
    """A layer that is measured in its weight, by double backward."""

    def forward(self, x):
        return functional.linear(x, 1.0 * self.weight, self.bias)


def without_differences(z, y):
    """Cross-entropy whose derivatives by autograd keep their digits in saturation."""
    others = torch.ones_like(z, dtype=torch.bool).scatter_(1, y[:, None], False)
    return torch.log1p((z - z.gather(1, y[:, None]))[others].view(len(z), -1).exp().sum(1)).mean()


@pytest.mark.share(8)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize(("layer", "activation"), [(nn.Linear, nn.GELU), (nn.Linear, nn.Tanh), (Own, nn.ReLU)])
def test_where_all_samples_are_saturated_nothing_wrong_is_resolved(layer, activation, level):
    """p − p² is a difference by autograd, known to eps of p: behind it a tenth of the κ would have no digit."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(12) % 3
    noise, rest = torch.randn(2, 12, 3, generator=generator, dtype=torch.float64)
    x = torch.cat([torch.eye(3, dtype=torch.float64)[y] + 0.03 * noise, 0.3 * rest[:, :1]], 1)
    compared = 0
    for gap in (3, 20, 35, 60, 200):
        model = nn.Sequential(layer(4, 3), activation(), nn.Linear(3, 3)).double()
        with torch.no_grad():
            model[0].weight.copy_(torch.cat([torch.eye(3), torch.full((3, 1), 0.2)], 1))
            model[2].weight.copy_(gap * torch.eye(3))
            for own in (model[0], model[2]):
                own.bias.fill_(0.1)
        result = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level=level)
        for name, own in result.items():
            true = (
                network_truth(model, without_differences, (x, y))
                if level == "network"
                else layer_truth(model, without_differences, (x, y), name)
            )
            n = own.n_params
            for number, kappa in enumerate(own.conditions):
                sizes = torch.linalg.eigvalsh(true[number * n : (number + 1) * n, number * n : (number + 1) * n]).abs()
                nonzero = sizes[sizes > 1e-9 * sizes.max()]
                if not kappa.resolved or bool((sizes[sizes <= 1e-9 * sizes.max()] > 1e-14 * sizes.max()).any()):
                    continue
                compared += 1
                value = float(nonzero.max() / nonzero.min())
                assert kappa.rank == len(nonzero), (gap, name, number)
                assert kappa.lower <= value * (1 + 1e-6), (gap, name, number)
                assert kappa.upper >= value * (1 - 1e-6), (gap, name, number)
    assert compared


BINARY = {
    "BCEWithLogitsLoss": lambda z, y: functional.binary_cross_entropy_with_logits(z[:, 0], y),
    "BCELoss of a sigmoid": lambda z, y: functional.binary_cross_entropy(z[:, 0].sigmoid(), y),
    "SoftMarginLoss": lambda z, y: functional.soft_margin_loss(z[:, 0], 2 * y - 1),
    "softplus": lambda z, y: functional.softplus((1 - 2 * y) * z[:, 0]).mean(),
    "logsigmoid": lambda z, y: -functional.logsigmoid((2 * y - 1) * z[:, 0]).mean(),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("name", BINARY)
def test_binary_losses_where_samples_are_saturated(name, activation):
    """Their p − p² too; and what p rounded to 0 or 1 leaves out of H is no null direction of it."""
    resolved = 0
    for seed in range(2):
        for scale in (1, 30, 1000, 3000):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 1)).double()
            with torch.no_grad():
                model[2].weight.mul_(scale)
            x = torch.randn(20, 3).double()
            with torch.no_grad():
                y = (model(x)[:, 0] > 0).double()
            true = network_truth(model, lambda z, y: torch.log1p(((1 - 2 * y) * z[:, 0]).exp()).mean(), (x, y))
            sizes = torch.linalg.eigvalsh(true).abs().sort(descending=True).values
            kappa = hesscond.probe(model, BINARY[name], (x, y), level="network")["network"].kappa
            if not kappa.resolved:
                continue
            resolved += 1
            # a numerical rank is that of what double precision tells from zero; any other is that of H
            assert kappa.rank_decision == "numerical" or float(sizes[kappa.rank :].sum()) <= 1e-13 * sizes[0]
            value = float(sizes[0] / sizes[kappa.rank - 1])
            assert kappa.lower <= value * (1 + 1e-3), (scale, seed)
            assert kappa.upper >= value * (1 - 1e-3), (scale, seed)
    assert resolved >= 2


def test_a_network_that_is_saturated_beyond_double_precision_is_left_open():
    layer = nn.Linear(3, 3).double()
    with torch.no_grad():
        layer.weight.copy_(2000 * torch.eye(3))
        layer.bias.zero_()
    batch = torch.eye(3, dtype=torch.float64), torch.arange(3)
    kappa = hesscond.probe(nn.Sequential(layer), nn.CrossEntropyLoss(), batch, level="network")["network"].kappa
    assert not kappa.resolved

"""Hessians of layers before smooth activations on features of any scale, against arithmetic of 120 digits and more."""

import random
from dataclasses import dataclass

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import nn

import hesscond

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


def test_sixty_random_units():
    """None resolved and wrong; what is not resolved is so because its units are saturated."""
    assert sum(outcome(Unscaled.random(seed)) for seed in range(40)) >= 38
    for seed in range(20):
        outcome(Unscaled.random(seed, raw=True))


def test_random_layers():
    assert sum(outcome(Unscaled.random(seed, decades=3, hidden=3), "layer") for seed in range(12)) >= 10


@pytest.mark.slow
def test_a_thousand_random_units():
    """Features over 12 decades; one unit in five has weights that do not know of their scales, and saturates."""
    resolved = [outcome(Unscaled.random(seed, raw=seed % 5 == 0)) for seed in range(1000)]
    assert sum(resolved) > 900


@pytest.mark.slow
def test_two_hundred_random_layers():
    resolved = [outcome(Unscaled.random(seed, decades=4, hidden=4), "layer") for seed in range(200)]
    assert sum(resolved) > 180

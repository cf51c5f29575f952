"""Curvature that is a difference, and features that rounding makes equal: compared with mpmath."""

import math

import mpmath as mp
import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import separators
from hesscond.models import build
from hesscond.problem.precision import Perturbed
from tests.catalogue.parts import Applied, Net, by_token
from tests.truth import layer_truth, unit_truth

F = nn.functional


#: By name, in torch and in mpmath: a few of those in `tests/catalogue/differences.py`.
LOSSES = {
    "log cosh": (lambda z: z.cosh().log(), lambda z: mp.log(mp.cosh(z))),
    "log(1 + exp)": (lambda z: (1 + z.exp()).log(), lambda z: mp.log(1 + mp.exp(z))),
    "expm1 - z": (lambda z: z.expm1() - z, lambda z: mp.exp(z) - 1 - z),
    "z tanh": (lambda z: z * z.tanh(), lambda z: z * mp.tanh(z)),
    "silu": (F.silu, lambda z: z / (1 + mp.exp(-z))),
    "Cauchy": (lambda z: (1 + z**2).log(), lambda z: mp.log(1 + z**2)),
}


def second_derivative(f, z):
    h = mp.mpf(10) ** -40
    return (f(z + h) - 2 * f(z) + f(z - h)) / h**2


def sizes_of(rows, S):
    """Sizes of the eigenvalues of Σ s_j x_j x_jᵀ."""
    n = len(rows[0])
    H = mp.matrix(n, n)
    for x, s in zip(rows, S, strict=True):
        for i in range(n):
            for j in range(n):
                H[i, j] += s * x[i] * x[j]
    return [abs(value) for value in mp.eigsy(H, eigvals_only=True)]


def kappa_of(sizes):
    """κ and rank of a matrix with eigenvalues of these sizes."""
    nonzero = [size for size in sizes if size > max(sizes) * mp.eps * 1e40]
    return max(nonzero) / min(nonzero), len(nonzero)


def exactly(tensor):
    return [list(map(mp.mpf, row)) for row in tensor.tolist()]


def contains(found, truth):
    return found.lower * (1 - 1e-10) <= truth <= (mp.inf if not found.resolved else found.upper * (1 + 1e-10))


def residuals(residual):
    """A model, its inputs, and targets that far below its outputs or above them."""
    torch.manual_seed(1)
    model, x = nn.Linear(3, 1).double(), 0.5 * torch.randn(7, 3, dtype=torch.float64)
    return model, x, torch.randn(7, 1, dtype=torch.float64) + residual


def truth_of(exact, model, x, targets):
    rows = [[mp.mpf(1), *row] for row in exactly(x)]
    weights = [mp.mpf(model.bias.item()), *exactly(model.weight.detach())[0]]
    outputs = [sum(w * h for w, h in zip(weights, row, strict=True)) for row in rows]
    S = [second_derivative(exact, o - t) for o, (t,) in zip(outputs, exactly(targets), strict=True)]
    return kappa_of(sizes_of(rows, S))


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_curvature_of_a_loss_is_round_off_in_a_stream(name, level):
    f, exact = LOSSES[name]
    model, x, targets = residuals(-14.0)
    batches = [(x[:4], targets[:4]), (x[4:], targets[4:])]
    result = hesscond.probe(model, lambda o, t: f(o - t).mean(), batches, level=level, weight=[4.0, 3.0])
    found = next(iter(result.values())).kappa
    found = found[0] if level == "unit" else found
    with mp.workdps(250):
        kappa, rank = truth_of(exact, model, x, targets)
        assert contains(found, kappa)
    assert not found.resolved or found.rank == rank


ACTIVATIONS = {
    "tanh": (torch.tanh, mp.tanh),
    "sigmoid by hand": (lambda z: 1 / (1 + (-2 * z).exp()), lambda z: 1 / (1 + mp.exp(-2 * z))),
}


#: Of a residual r, in torch, and its second derivative: it falls by decades from sample to sample.
GRADED = {
    "Charbonnier": (lambda r: (1e-4 + r**2) ** 0.5, lambda r: mp.mpf(1e-4) / (mp.mpf(1e-4) + r**2) ** mp.mpf(1.5)),
    "Cauchy": (lambda r: (1 + r**2).log(), lambda r: 2 * (1 - r**2) / (1 + r**2) ** 2),
    "tanh": (lambda r: r.tanh() ** 2, lambda r: 2 * (1 - mp.tanh(r) ** 2) * (1 - 3 * mp.tanh(r) ** 2)),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize(
    ("name", "scale", "least"),
    [("Charbonnier", 1e3, 1.0), ("Charbonnier", 1e4, 0.25), ("Cauchy", 1e3, 1.0), ("tanh", 1e1, 0.75)],
)
def test_samples_of_large_curvature_hide_no_others(name, scale, least, level):
    loss, second = GRADED[name]
    resolved = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        model, x = nn.Linear(4, 2, bias=False, dtype=torch.float64), torch.randn(12, 4, generator=generator).double()
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 4, generator=generator))
        # features that only the samples far out have
        x[:6, 2:] = 0
        x *= torch.tensor([1e-3] * 6 + [scale] * 6)[:, None]
        found = hesscond.probe(model, lambda z, _: loss(z).sum(1).mean(), (x, x), level=level)["model"].conditions
        with mp.workdps(80):
            rows, weights = exactly(x), exactly(model.weight.detach())
            sizes = [sizes_of(rows, [second(mp.fdot(w, row)) / len(rows) for row in rows]) for w in weights]
        for kappa, exact in zip(found, sizes if level == "unit" else [[*sizes[0], *sizes[1]]], strict=True):
            assert not kappa.is_zero, seed
            if kappa.rank_decision == "numerical":
                # the others are within the bound of the rounding
                exact = sorted(exact)[-kappa.rank :]
            with mp.workdps(80):
                assert contains(kappa, kappa_of(exact)[0]), (seed, kappa, exact)
            resolved += kappa.rank_decision == "structural"
    assert resolved >= least * 8 * len(found)


def saturated(f, bias):
    """A hidden layer whose units are all far from zero."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 2), Applied(f), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([bias, -bias]))
    return model, torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)


@pytest.mark.share(4)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_features_that_rounding_made_equal_are_not_structural(name, dtype, level):
    f, exact = ACTIVATIONS[name]
    model, x, y = saturated(f, 21.0)
    model, x = model.to(dtype), x.to(dtype)
    found = hesscond.probe(model, nn.MSELoss(), (x, y), ["2"], level=level)["2"].kappa
    found = found[0] if level == "unit" else found
    with torch.no_grad():
        z = model.double()[0](x.double())
    with mp.workdps(900):
        rows = [[mp.mpf(1), *map(exact, row)] for row in exactly(z)]
        kappa, rank = kappa_of(sizes_of(rows, [mp.mpf(2)] * 6))
        assert kappa > 1e30
        assert rank == 3
        assert not found.resolved
        assert found.lower <= kappa


def test_a_network_with_them_is_unresolved():
    model, x, y = saturated(torch.tanh, 25.0)
    assert not hesscond.probe(model, nn.MSELoss(), (x, y), level="network")["network"].kappa.resolved


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", [nn.Hardtanh(), nn.ReLU(), nn.ReLU6()])
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_features_that_are_equal_without_rounding_are_structural(kind, level):
    model, x, y = saturated(kind, 25.0)
    found = hesscond.probe(model, nn.MSELoss(), (x, y), ["2"], level=level)["2"].kappa
    found = found[0] if level == "unit" else found
    rows = torch.cat([torch.ones(6, 1), kind(model[0](x)).detach()], 1)
    sizes = torch.linalg.svdvals(rows)
    rank = int((sizes > 1e-12 * sizes[0]).sum())
    assert (found.resolved, found.rank) == (True, rank)
    assert found.value == pytest.approx(float(sizes[0] / sizes[rank - 1]) ** 2, rel=1e-9)


def test_a_unit_in_front_of_saturated_ones_is_no_round_off():
    """S is w²f'² + r w f'', of which tanh keeps no digit."""
    model, x, y = saturated(torch.tanh, 17.0)
    found = hesscond.probe(model, nn.MSELoss(), (x, y), ["0"])["0"].kappa[0]
    with torch.no_grad():
        z, o = model[0](x), model(x)
    w, rows = mp.mpf(model[2].weight[0, 0].item()), [[mp.mpf(1), *row] for row in exactly(x)]
    with mp.workdps(150):
        S = []
        for (own, _), (out,), (t,) in zip(exactly(z), exactly(o), exactly(y), strict=True):
            slope = mp.sech(own) ** 2
            S.append(2 * (w * slope) ** 2 - 4 * (out - t) * w * mp.tanh(own) * slope)
        kappa, rank = kappa_of(sizes_of(rows, S))
        assert contains(found, kappa)
    assert not found.resolved or found.rank == rank


@pytest.mark.share(4)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ReLU])
def test_ordinary_networks_are_evaluated_once(activation, monkeypatch):
    torch.manual_seed(0)
    entered = []
    monkeypatch.setattr(Perturbed, "__enter__", lambda self: entered.append(self))
    model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 5), activation(), nn.Linear(5, 3)).double()
    batch = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch)
    assert not entered
    assert all(kappa.resolved for name in found for kappa in found[name].kappa)


def test_a_softmax_by_hand_has_its_rank():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 3).double(), torch.randn(14, 3, dtype=torch.float64), torch.randint(0, 3, (14,))

    def by_hand(o, y):
        return -(o.exp() / o.exp().sum(1, keepdim=True)).log()[torch.arange(len(y)), y].mean()

    found = hesscond.probe(model, by_hand, (x, y), level="layer")["model"].kappa
    truth = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level="layer")["model"].kappa
    assert (found.resolved, found.rank) == (True, 8)
    assert found.value == pytest.approx(truth.value, rel=1e-9)


def attending(m, x):
    """Causal attention on the inputs themselves, a layer normalization, GELU and a head."""
    scores = m.q(x) @ m.k(x).mT
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return m.head(F.gelu(m.norm(scores.softmax(-1) @ m.v(x)))).flatten(0, 1)


def exact_loss(model, x, y):
    """The loss as a function of the rows [b_i, w_i] of q, k and v, in mpmath."""
    scale, shift = exactly(model.norm.weight[None])[0], exactly(model.norm.bias[None])[0]
    head, bias = exactly(model.head.weight), exactly(model.head.bias[None])[0]

    def affine(rows, h):
        return [row[0] + mp.fdot(row[1:], h) for row in rows]

    def loss(rows):
        total, targets = mp.mpf(0), iter(y.tolist())
        for tokens in map(exactly, x):
            q, k, v = ([affine(rows[name], h) for h in tokens] for name in "qkv")
            for t in range(len(tokens)):
                p = [mp.exp(mp.fdot(q[t], k[s])) for s in range(t + 1)]
                z = [mp.fdot(p, [v[s][i] for s in range(t + 1)]) / mp.fsum(p) for i in range(2)]
                mean = mp.fsum(z) / 2
                root = mp.sqrt(mp.fsum((e - mean) ** 2 for e in z) / 2 + mp.mpf(model.norm.eps))
                z = [a * (e - mean) / root + b for a, e, b in zip(scale, z, shift, strict=True)]
                z = [e * mp.ncdf(e) for e in z]
                outputs = [b + mp.fdot(row, z) for row, b in zip(head, bias, strict=True)]
                total += mp.log(mp.fsum(map(mp.exp, outputs))) - outputs[next(targets)]
        return total / len(y)

    return loss


def exact_hessian(loss, rows, name, unit):
    """Hessian in rows[name][unit] by central differences."""
    n, h = len(rows[name][unit]), mp.mpf(10) ** -40

    def at(steps):
        moved = [row[:] for row in rows[name]]
        for k, step in steps:
            moved[unit][k] += step * h
        return loss({**rows, name: moved})

    pairs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    H = [[sum(s * t * at([(k, s), (j, t)]) for s, t in pairs) / (4 * h * h) for j in range(n)] for k in range(n)]
    return mp.matrix(H)


@pytest.mark.parametrize(("positions", "scale", "worthwhile"), [(3, 12.0, math.inf), (3, 1.0, 0.0), (6, 4.0, math.inf)])
def test_rounding_in_attention_is_within_its_bound(positions, scale, worthwhile, monkeypatch):
    monkeypatch.setattr(separators, "WORTHWHILE", worthwhile)
    torch.manual_seed(2)
    parts = {name: nn.Linear(4, 2) for name in "qkv"} | {"norm": nn.LayerNorm(2, eps=0.5), "head": nn.Linear(2, 3)}
    model, x = Net(attending, **parts).double(), torch.randn(3, positions, 4, dtype=torch.float64)
    model.q.weight.data.mul_(scale), model.k.weight.data.mul_(scale)
    y = torch.randint(3, (3 * positions,))
    result = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), ["q", "k", "v"], check=False)
    with mp.workdps(150):
        dense = {name: model.get_submodule(name) for name in "qkv"}
        rows = {name: exactly(torch.cat([layer.bias[:, None], layer.weight], 1)) for name, layer in dense.items()}
        loss = exact_loss(model, x, y)
        for name, unit in ((name, unit) for name in "qkv" for unit in (0, 1)):
            truth, kappa = exact_hessian(loss, rows, name, unit), result[name].kappa[unit]
            error = mp.matrix(exactly(result[name].block(unit).matrix())) - truth
            assert max(map(abs, mp.eigsy(error, eigvals_only=True))) <= kappa.cutoff
            sizes = sorted(map(abs, mp.eigsy(truth, eigvals_only=True)))
            rank = sum(size > 1e-30 * sizes[-1] for size in sizes)
            assert contains(kappa, sizes[-1] / sizes[-rank])
            assert not kappa.resolved or kappa.rank == rank
            assert kappa.resolved or name == "k"


def trained_transformer(width, context, windows):
    """A small GPT after 60 steps of Adam, with its data."""
    sizes = {"input_shape": (context,), "outputs": 50, "width": width, "depth": 2, "heads": 4}
    model = build("gpt", generator=torch.Generator().manual_seed(0), **sizes)
    torch.manual_seed(0)
    x, y = torch.randint(50, (2, windows, context))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        by_token(model(x), y).backward()
        optimizer.step()
    return model.double(), (x, y)


def test_keys_of_a_trained_transformer_have_their_rank():
    """A common shift of all keys is null by the softmax, and one direction of the features by the normalization."""
    model, batch = trained_transformer(64, 32, 4)
    layer, norm = "block2.attention.k", model.block2.norm1
    found = hesscond.probe(model, by_token, batch, [layer], units=range(4))[layer].kappa
    null = torch.eye(65, dtype=torch.float64)[:, :2]
    null[0, 1], null[1:, 1] = -(norm.bias / norm.weight).sum(), 1 / norm.weight.detach()
    complement = torch.linalg.qr(null, mode="complete").Q[:, 2:]
    for unit, kappa in enumerate(found):
        H = unit_truth(model, by_token, batch, layer, unit)
        assert (H @ null).norm() <= 1e-13 * H.norm() * null.norm()
        values = torch.linalg.eigvalsh(complement.T @ H @ complement).abs()
        assert (kappa.resolved, kappa.rank) == (True, 63)
        assert kappa.lower * (1 - 1e-6) <= values.max() / values.min() <= kappa.upper * (1 + 1e-6)


@pytest.mark.parametrize("layer", ["block1.attention.k", "block2.attention.v"])
def test_whole_layers_of_a_trained_transformer_have_their_rank(layer):
    model, batch = trained_transformer(16, 8, 48)
    found = hesscond.probe(model, by_token, batch, [layer], level="layer")[layer].kappa
    sizes = torch.linalg.eigvalsh(layer_truth(model, by_token, batch, layer)).abs().sort(descending=True).values
    # units × features without that of the normalization; a key has no bias, and of the values one shift is null
    assert (found.resolved, found.rank) == (True, int((sizes > 1e-13 * sizes[0]).sum()))
    assert found.lower * (1 - 1e-6) <= sizes[0] / sizes[found.rank - 1] <= found.upper * (1 + 1e-6)

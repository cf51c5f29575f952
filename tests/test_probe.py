import copy

import mpmath
import numpy as np
import pytest
import torch
from cases import CASES, Case, dense_truth, mlp
from torch import nn

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import CentringScaling, DensePreconditioner
from hesscond.methods import BNP


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_unit_of_every_layer_is_the_dense_hessian(case, seed, device):
    model, loss_fn, batch = case.make(seed, device)
    result = hesscond.probe(model, loss_fn, batch)
    assert len(result) == sum(isinstance(m, nn.Linear) for m in model.modules())
    for name, layer in result.items():
        for position, unit in enumerate(layer.units):
            truth = dense_truth(model, loss_fn, batch, name, unit)
            ours = layer.hessian(unit=unit)
            assert ours.dtype == torch.float64
            norm = truth.norm()
            assert (ours - truth).norm() <= 1e-10 * norm
            eigenvalues = torch.linalg.eigvalsh(truth).cpu()
            kappa = layer.kappa[position]
            nonzero = eigenvalues[eigenvalues.abs() > 1e-11 * norm.cpu()]
            assert kappa.rank + kappa.nullity == len(truth)
            if not kappa.resolved:
                assert float(kappa) == np.inf
                continue
            assert kappa.rank == len(nonzero)
            assert kappa.negative == int((nonzero < 0).sum())
            own = layer.eigenvalues(unit=unit)
            assert torch.allclose(own, nonzero.flip(0), rtol=1e-10, atol=1e-13 * float(norm))
            true_kappa = float(nonzero.abs().max() / nonzero.abs().min())
            # the dense truth itself is only good to eps·κ
            assert float(kappa) == pytest.approx(true_kappa, rel=1e-10 + 1e-14 * true_kappa)


def test_unresolved_is_rare_on_the_cases():
    resolved = [
        kappa.resolved
        for case in CASES
        for layer in hesscond.probe(*case.make()).values()
        for kappa in layer.kappa
        if kappa.rank
    ]
    assert np.mean(resolved) > 0.99


def test_curvature_routes_are_the_cheapest_exact_ones():
    routes = {c.name: [v.route for v in hesscond.probe(*c.make()).values()] for c in CASES}
    through = "loss factor through a piecewise linear tail"
    assert routes["relu-ce"] == [through, through, "loss curvature of the output"]
    assert routes["eval-batchnorm"][-1] == "loss curvature of the output"
    assert routes["tanh-ce"] == ["double backward", "double backward", "loss curvature of the output"]
    assert routes["layernorm"][0] == "double backward"
    assert set(routes["relu-nonconvex"]) == {"double backward"}


def exact_kappa(case, layer, unit, digits=120):
    """κ of the unit's ĤᵀSĤ for softmax cross-entropy behind one ReLU layer, forward pass and all in mpmath."""
    model, _, (x, _) = case
    with mpmath.workdps(digits):

        def dense(module, rows):
            W = module.weight.detach().double().tolist()
            b = module.bias.detach().double().tolist()
            return [[mpmath.fdot(w, row) + bi for w, bi in zip(W, b, strict=True)] for row in rows]

        rows = [[mpmath.mpf(v) for v in row] for row in x.double().tolist()]
        hidden = [[max(v, mpmath.mpf(0)) for v in row] for row in dense(model[0], rows)]
        logits = dense(model[2], hidden)
        factor = []
        for row, h in zip(logits, hidden, strict=True):
            exponentials = [mpmath.exp(v) for v in row]
            total = sum(exponentials)
            others = sum(e for i, e in enumerate(exponentials) if i != unit)
            s = mpmath.sqrt(exponentials[unit] * others / total**2 / len(rows))
            factor.append([s, *(s * v for v in h)])
        F = mpmath.matrix(factor)
        G = F * F.T if F.rows <= F.cols else F.T * F
        values = sorted(mpmath.eigsy(G, eigvals_only=True), reverse=True)
        # all hidden units are active: Ĥ is an affine image of 4 inputs, of rank 5
        return values[0] / values[min(5, len(rows)) - 1]


@pytest.mark.parametrize("samples", [5, 12])
@pytest.mark.parametrize("spread", [0, 4, 8])
def test_kappa_of_badly_scaled_networks_against_mpmath(samples, spread):
    """Input features spread over 10**spread, weights so large that softmax saturates to 1e-20."""
    generator = torch.Generator().manual_seed(spread)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        # every hidden unit gets its own size, and stays active
        model[0].weight.abs_().mul_(10.0 ** -torch.linspace(0, spread, 6)[:, None])
        model[0].bias.abs_().mul_(10.0 ** -torch.linspace(0, spread, 6))
        model[2].weight.mul_(8.0)
    x = torch.rand(samples, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (samples,), generator=generator)
    result = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), layers=["2"])
    for unit in range(3):
        truth = exact_kappa((model, None, (x, y)), "2", unit)
        kappa = result["2"].kappa[unit]
        # the forward pass rounds activations to 1e-16 and logits of size 1e2 to 1e-14: that is not in the interval
        assert kappa.resolved
        assert abs(float(kappa) / truth - 1) < 1e-9
        assert kappa.width < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 3.0, 1e30])
@pytest.mark.parametrize("name", ["relu-ce-lambda", "tanh-ce", "relu-mse"])
def test_kappa_does_not_depend_on_the_scale_of_the_loss(scale, name):
    model, loss_fn, batch = next(c for c in CASES if c.name == name).make()
    plain = hesscond.probe(model, loss_fn, batch).to_frame()
    scaled = hesscond.probe(model, lambda o, t: scale * loss_fn(o, t), batch).to_frame()
    assert scaled["resolved"].equals(plain["resolved"])
    assert scaled["rank"].equals(plain["rank"])
    assert scaled["negative"].equals(plain["negative"])
    np.testing.assert_allclose(scaled["kappa"], plain["kappa"], rtol=1e-8)
    np.testing.assert_allclose(scaled["lambda_max"], scale * plain["lambda_max"], rtol=1e-12)


def test_kappa_does_not_depend_on_the_order_of_the_samples():
    model, loss_fn, (x, y) = Case("", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "class", samples=20).make()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    plain = hesscond.probe(model, loss_fn, (x, y)).to_frame()
    shuffled = hesscond.probe(model, loss_fn, (x[order], y[order])).to_frame()
    assert shuffled["rank"].equals(plain["rank"])
    np.testing.assert_allclose(shuffled["kappa"], plain["kappa"], rtol=1e-8)


def test_unused_parameters_change_nothing():
    model, loss_fn, batch = CASES[0].make()
    plain = hesscond.probe(model, loss_fn, batch).to_frame()
    model.register_parameter("unused", nn.Parameter(torch.randn(3)))
    assert hesscond.probe(model, loss_fn, batch).to_frame().equals(plain)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(
        nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3)
    )
    x, y = torch.randn(9, 5), torch.randint(0, 3, (9,))
    model[1].train(False)
    model[5].eval()
    nn.functional.cross_entropy(model(x), y).backward()
    model[0].weight.requires_grad_(False)
    BNP(model)
    before = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    random_state = torch.get_rng_state()
    hesscond.probe(model, nn.CrossEntropyLoss(), (x, y))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    after = [p.grad for p in model.parameters()]
    assert all(b is a is None or torch.equal(a, b) for a, b in zip(after, gradients, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)


def test_preconditioned_hessian_is_the_congruence_of_the_dense_one():
    model, loss_fn, batch = CASES[0].make()
    generator = torch.Generator().manual_seed(0)
    P = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    result = hesscond.probe(model, loss_fn, batch, layers=["2"], method=DensePreconditioner(P))
    truth = P.T @ dense_truth(model, loss_fn, batch, "2", 1) @ P
    assert torch.allclose(result["2"].hessian(unit=1), truth, rtol=1e-12, atol=1e-14)


def test_bnp_coordinates_of_a_batch_are_centred_and_scaled():
    model, loss_fn, batch = Case("", lambda: mlp(nn.Tanh()), nn.CrossEntropyLoss(), "class", samples=30).make()
    H = torch.tanh(model[0](batch[0])).detach()
    G = torch.cat([torch.ones(30, 1), (H - H.mean(0)) / H.std(0, unbiased=False)], 1).double()
    P = torch.linalg.lstsq(torch.cat([torch.ones(30, 1).double(), H], 1), G).solution
    result = hesscond.probe(model, loss_fn, batch, layers=["2"], method="bnp")
    truth = P.T @ dense_truth(model, loss_fn, batch, "2", 3) @ P
    assert torch.allclose(result["2"].hessian(unit=3), truth, rtol=1e-9, atol=1e-12)


def test_dead_features_are_left_out_not_divided_by():
    model, loss_fn, (x, y) = CASES[0].make()
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
    model, loss_fn, _ = CASES[0].make()
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


def test_frame_has_the_promised_columns():
    frame = hesscond.probe(*CASES[0].make()).to_frame()
    assert list(frame.columns) == [
        "layer", "unit", "n_params", "rank", "nullity", "negative", "lambda_max", "lambda_min",
        "kappa", "kappa_lower", "kappa_upper", "resolved", "solver",
    ]  # fmt: skip
    assert len(frame) == 6 + 4 + 3
    assert (frame["kappa_lower"] <= frame["kappa"]).all()
    assert (frame["kappa"] <= frame["kappa_upper"]).all()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head, self.spare = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.layer(torch.relu(self.layer(x))))


def tied():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


def batch_normalized():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


X, Y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("model", "arguments", "error", "words"),
    [
        (mlp(nn.ReLU()), {"layers": ["nope"]}, ConfigError, "no dense layer 'nope'"),
        (mlp(nn.ReLU()), {"layers": ["4"], "units": [3]}, ConfigError, "unit 3 is out of range"),
        (mlp(nn.ReLU()), {"level": "layer"}, ConfigError, "not available yet"),
        (mlp(nn.ReLU()), {"level": "galaxy"}, ConfigError, "unknown level"),
        (mlp(nn.ReLU()), {"method": "nope"}, ConfigError, "unknown method"),
        (mlp(nn.ReLU()), {"method": 3}, ConfigError, "Preconditioner"),
        (nn.Sequential(nn.ReLU()), {}, ConfigError, "no torch.nn.Linear"),
        (mlp(nn.ReLU()), {"batch": (X[:0], Y[:0])}, ConfigError, "empty"),
        (mlp(nn.ReLU()), {"batch": X}, ConfigError, "pair"),
        (mlp(nn.ReLU()), {"batch": (X * float("nan"), Y)}, CaptureError, "NaN"),
        (mlp(nn.ReLU()), {"batch": (X[:, None], Y)}, CaptureError, "shape"),
        (mlp(nn.ReLU()), {"loss_fn": nn.CrossEntropyLoss(reduction="none")}, CaptureError, "scalar"),
        (mlp(nn.ReLU()), {"loss_fn": lambda o, t: torch.tensor(1.0)}, CaptureError, "differentiably"),
        (Shared(), {"layers": ["layer"]}, CaptureError, "more than once"),
        (Shared(), {"layers": ["spare"]}, CaptureError, "not reached"),
        (tied(), {}, CaptureError, "share"),
        (batch_normalized(), {"layers": ["0"]}, CaptureError, "influence each other"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(model, arguments, error, words):
    arguments = {"loss_fn": nn.CrossEntropyLoss(), "batch": (X, Y), **arguments}
    with pytest.raises(error, match=words) as caught:
        hesscond.probe(model, **arguments)
    assert "\n" not in str(caught.value)


def test_coupled_samples_are_found_behind_a_linear_tail():
    """Centring over the batch is linear, so only the derivative across samples can tell."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = self.a(x)
            return self.b(h - h.mean(0))

    with pytest.raises(CaptureError, match="influence each other"):
        hesscond.probe(Centred(), nn.CrossEntropyLoss(), (X, Y), layers=["a"])

"""Coordinates that somebody else writes, a class each: a linear map, a scaling by the Hessian, and a chart."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian

import hesscond
from hesscond.hessians import Chart, HessianScaling, Preconditioner, Scaling
from hesscond.operators import Congruence, Diagonal, Sum


class Sheared(Preconditioner):
    """θ_k = z_k + z_{k+1} / 2."""

    name = "sheared"

    def right_multiply(self, rows):
        return rows + torch.cat([rows[:, :1] * 0, rows[:, :-1] / 2], 1)


class UnitTrace(HessianScaling):
    """θ = z / √tr H."""

    name = "unit trace"

    def at(self, hessian):
        d = hessian.diagonal()
        return Scaling(torch.full_like(d[: len(d) // hessian.units], float(d.sum()) ** -0.5), self.name)


class Logarithmic(Chart):
    """z = log|θ|, in which the gradient has a part in the Hessian: PᵀHP + diag(g ∘ θ) with P = diag(θ)."""

    name = "logarithms"

    def operator(self, hessian, layer, unit):
        return self.of(hessian(layers=[layer], unit=unit))

    def network(self, hessian):
        H = hessian()
        return self.of(H), H.parts

    def of(self, H):
        return Sum([(1.0, Congruence(H, Diagonal(H.point))), (1.0, Diagonal(H.gradient * H.point))])


def moved(kind, loss, theta, t):
    """θ at a step t from the present point in these coordinates; rows are units."""
    if kind is Sheared:
        return theta + t + torch.cat([t[:, 1:], 0 * t[:, :1]], 1) / 2
    if kind is UnitTrace:
        n = theta.numel()
        return theta + t * hessian(loss)(theta).reshape(n, n).trace() ** -0.5
    return theta * t.exp()


def truth(kind, loss, theta):
    """Hessian of the loss in z, by torch.func alone; θ (units, n̂) is one tensor for each layer."""
    sizes, start = [own.numel() for own in theta], torch.zeros(sum(own.numel() for own in theta), dtype=torch.float64)

    def of_step(t):
        parts = [own.view_as(at) for own, at in zip(t.split(sizes), theta, strict=True)]
        if len(theta) == 1:
            return loss(moved(kind, loss, theta[0], parts[0]))
        return loss(*(moved(kind, None, at, own) for at, own in zip(theta, parts, strict=True)))

    return hessian(of_step)(start)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(30, 3, dtype=torch.float64), torch.randint(0, 3, (30,))
    rows = {name: torch.cat([model[int(name)].bias[:, None], model[int(name)].weight], 1).detach() for name in "02"}

    def loss(**theta):
        given = {f"{name}.bias": (rows | theta)[name][:, 0] for name in rows}
        given |= {f"{name}.weight": (rows | theta)[name][:, 1:] for name in rows}
        return nn.functional.cross_entropy(functional_call(model, given, (batch[0],)), batch[1])

    return model, batch, rows, loss


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Sheared, UnitTrace, Logarithmic])
def test_of_units_and_layers(problem, kind):
    model, batch, rows, loss = problem
    of_units = hesscond.probe(model, nn.CrossEntropyLoss(), batch, method=kind(), level="unit")
    of_layers = hesscond.probe(model, nn.CrossEntropyLoss(), batch, method=kind(), level="layer")
    for name, theta in rows.items():
        close(of_layers[name].hessian(), truth(kind, lambda own, at=name: loss(**{at: own}), [theta]))
        for i in range(len(theta)):

            def of_unit(own, at=name, theta=theta, i=i):
                return loss(**{at: torch.cat([theta[:i], own, theta[i + 1 :]])})

            close(of_units[name].hessian(unit=i), truth(kind, of_unit, [theta[i : i + 1]]))


@pytest.mark.parametrize("kind", [Sheared, Logarithmic])
def test_of_a_network(problem, kind):
    model, batch, rows, loss = problem
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, method=kind(), level="network")["network"].hessian()
    expected = truth(kind, lambda *own: loss(**dict(zip("02", own, strict=True))), list(rows.values()))
    # a chart lists parameters in the order of the model
    close(torch.linalg.eigvalsh(found), torch.linalg.eigvalsh(expected))


def test_a_scaling_by_the_hessian_of_a_network(problem):
    model, batch, *_ = problem
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, method=UnitTrace(), level="network")["network"]
    plain = hesscond.probe(model, nn.CrossEntropyLoss(), batch, level="network")["network"].hessian()
    close(found.hessian(), plain / plain.trace())

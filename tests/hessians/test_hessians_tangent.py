"""Hessians on spheres against geodesics, and Hessians in preconditioned coordinates."""

import numpy as np
import pytest
import torch
from pymanopt import manifolds
from torch import nn
from torch.func import functional_call, vmap

from hesscond.errors import ConfigError
from hesscond.hessians import CentringScaling
from hesscond.hessians.coordinates.charts import SphereTangentOperator
from hesscond.hessians.coordinates.linear import LayerCoordinates, coordinates_of
from hesscond.hessians.network_operator import GGNOperator, HessianOperator
from hesscond.operators import Congruence
from tests.truth import packed, unpacked


def dense(*, centred=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    if centred:
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight -= layer.weight.mean(1, keepdim=True)
    return model, (torch.randn(12, 5).double(), torch.randint(0, 3, (12,))), ["0", "2"]


def convolution(*, centred=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)).double()
    if centred:
        with torch.no_grad():
            model[0].weight -= model[0].weight.mean((1, 2, 3), keepdim=True)
    return model, (torch.randn(9, 2, 3, 3).double(), torch.randint(0, 3, (9,))), ["0"]


def transposed(*, centred=False):
    torch.manual_seed(2)
    model = nn.Sequential(nn.ConvTranspose1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    if centred:
        with torch.no_grad():
            # the weights that feed output channel j of a group
            model[0].weight.view(2, 2, 2, 2).sub_(model[0].weight.view(2, 2, 2, 2).mean((1, 3), keepdim=True))
    return model, (torch.randn(9, 4, 3).double(), torch.randint(0, 3, (9,))), ["0"]


def geodesic_truth(model, batch, names, Q):
    """QᵀHQ for tangent directions Q (n, d): d²/dt² of the loss along the geodesics in q_i and q_i + q_j."""
    modules = dict(model.named_modules())
    start = torch.cat([packed(modules[name]).detach().flatten() for name in names])

    def loss(theta):
        state, at = {}, 0
        for name in names:
            rows = packed(modules[name]).detach()
            part = theta[at : at + rows.numel()].view_as(rows)
            state |= {f"{name}.{key}": value for key, value in unpacked(modules[name], part).items()}
            at += rows.numel()
        return nn.functional.cross_entropy(functional_call(model, state, batch[0]), batch[1])

    def along(xi):
        def at(t):
            parts, begin = [], 0
            for name in names:
                rows = packed(modules[name]).detach()
                bias = int(modules[name].bias is not None)
                own = xi[begin : begin + rows.numel()].view_as(rows)
                begin += rows.numel()
                w, v = rows[:, bias:], own[:, bias:]
                radius, speed = w.norm(dim=1, keepdim=True), v.norm(dim=1, keepdim=True)
                angle = t * speed / radius
                # sin(angle) / speed, as 0/0 where a unit does not move
                moving = speed > 0
                step = torch.where(moving, torch.sin(angle) * radius / speed.where(moving, 1.0), 0.0)
                parts.append(
                    torch.cat([rows[:, :bias] + t * own[:, :bias], torch.cos(angle) * w + step * v], 1).flatten()
                )
            return loss(torch.cat(parts))

        return torch.func.grad(torch.func.grad(at))(torch.zeros((), dtype=torch.float64))

    assert torch.equal(start, HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=names).point)
    d = Q.shape[1]
    i, j = torch.triu_indices(d, d)
    directions = torch.where(i == j, Q[:, i], Q[:, i] + Q[:, j])
    second = vmap(along)(directions.T)
    matrix = torch.zeros(d, d, dtype=torch.float64)
    matrix[i, j] = second
    diagonal = matrix.diagonal().clone()
    mixed = (matrix - diagonal[:, None] - diagonal[None, :]).triu(1) / 2
    return mixed + mixed.T + diagonal.diag()


def tangent_basis(operator):
    """(n, d) an orthonormal basis of what the normals leave, from the projector."""
    projector = operator.null_space.remove(torch.eye(operator.order, dtype=torch.float64))
    values, vectors = torch.linalg.eigh((projector + projector.T) / 2)
    assert torch.allclose(values, values.round(), atol=1e-12)
    return vectors[:, values > 0.5]


@pytest.mark.parametrize("centred", [False, True], ids=["sphere", "centred"])
@pytest.mark.parametrize("problem", [dense, convolution, transposed])
def test_the_hessian_on_spheres_is_that_along_geodesics(problem, centred):
    model, batch, names = problem(centred=centred)
    H = HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=names)
    A = SphereTangentOperator(H, centred=centred)
    Q = tangent_basis(A)
    units = sum(geometry.units for geometry in H.layout.geometries.values())
    assert A.null_space.dimension == units * (1 + centred) == H.order - Q.shape[1]
    found = A.to_dense()
    assert (found - found.T).norm() <= 1e-13 * found.norm()
    truth = geodesic_truth(model, batch, names, Q)
    assert (Q.T @ found @ Q - truth).norm() <= 1e-10 * truth.norm()
    # zero on the normals
    assert (found - Q @ (Q.T @ found @ Q) @ Q.T).norm() <= 1e-12 * found.norm()
    # the curvature of the sphere matters: without it the matrix is another one
    assert (Q.T @ H.to_dense() @ Q - truth).norm() > 1e-3 * truth.norm()


def test_one_unit_and_a_stream():
    model, (x, y), _ = dense()
    loss_fn = nn.CrossEntropyLoss()
    whole = SphereTangentOperator(HessianOperator(model, loss_fn, (x, y), layers="0")).to_dense()
    parts = [(x[:7], y[:7]), (x[7:], y[7:])]
    for unit in range(4):
        own = SphereTangentOperator(HessianOperator(model, loss_fn, parts, layers="0", unit=unit))
        where = slice(6 * unit, 6 * unit + 6)
        assert (own.to_dense() - whole[where, where]).norm() <= 1e-12 * whole.norm()
        assert own.null_space.dimension == 1
        assert own.rounding < 1e-11


def test_sums_that_are_zero_but_for_rounding_do_not_change_the_hessian():
    model, batch, names = dense(centred=True)
    exact = SphereTangentOperator(HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=names), centred=True)
    with torch.no_grad():
        model[0].weight += 1e-6 * model[0].weight.norm(dim=1, keepdim=True)
    off = SphereTangentOperator(HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=names), centred=True)
    # the set {‖w‖² = c, 1ᵀw = s} through the weights as they are: its Lagrange multiplier of the norm
    w, g = (off.operator.layout.rows("0", v)[:, 1:] for v in (off.operator.point, off.operator.gradient))
    for i in range(4):
        normals = torch.stack([w[i], torch.ones(5).double()], 1)
        multiplier = torch.linalg.lstsq(normals, g[i, :, None], driver="gelsd").solution[0, 0]
        found = off.operator.layout.rows("0", off.curvature)[i, 1:, 0]
        assert (found - multiplier).abs().max() <= 1e-11 * exact.curvature.abs().max()


# ------------------------------------------------------------------------------------------------------------- pymanopt


def in_pymanopt(A, manifold, points, Q):
    """QᵀAQ as pymanopt has it on unit spheres: θ = S u with √c_i in S at the weights of unit i, 1 at biases.

    ``points`` splits a vector into what the manifold takes.
    """
    H, g, theta = (x.numpy() for x in (A.operator.to_dense(), A.operator.gradient, A.operator.point))
    layout = A.operator.layout
    S = torch.ones_like(A.operator.point)
    for name, geometry in layout.geometries.items():
        bias = int(geometry.bias)
        layout.rows(name, S)[:, bias:] = layout.rows(name, A.operator.point)[:, bias:].norm(dim=1, keepdim=True)
    S = S.numpy()
    columns = []
    for xi in Q.T.numpy():
        eta = xi / S
        found = manifold.euclidean_to_riemannian_hessian(
            points(theta / S), points(S * g), points(S * (H @ xi)), points(eta)
        )
        columns.append(np.concatenate([np.asarray(part).ravel(order="F") for part in found]) / S)
    return Q.T @ torch.from_numpy(np.stack(columns, 1))


def test_without_biases_it_is_that_on_the_oblique_manifold():
    model, batch, _ = dense()
    A = SphereTangentOperator(HessianOperator(model, nn.CrossEntropyLoss(), batch, layers=["2"]))
    Q = tangent_basis(A)
    oblique = manifolds.Product([manifolds.Oblique(4, 3)])
    truth = in_pymanopt(A, oblique, lambda v: [v.reshape(3, 4).T], Q)
    assert (Q.T @ A.to_dense() @ Q - truth).norm() <= 1e-11 * truth.norm()


def test_what_is_on_no_sphere_is_refused():
    model, batch, names = dense()
    loss_fn = nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match="not ordered by unit: make it with layers="):
        SphereTangentOperator(HessianOperator(model, loss_fn, batch))
    H = HessianOperator(model, loss_fn, batch, layers=names)
    with pytest.raises(ConfigError, match="no layer '1' to constrain: it has 0, 2"):
        SphereTangentOperator(H, layers=["1"])
    with pytest.raises(ConfigError, match=r"of layer .0. sum to .*, not to zero"):
        SphereTangentOperator(H, centred=True)
    with pytest.raises(ConfigError, match="nothing is constrained"):
        SphereTangentOperator(H, sphere=False)
    with torch.no_grad():
        model[0].weight[1] = 0
    with pytest.raises(ConfigError, match="a unit of layer '0' has zero weights"):
        SphereTangentOperator(HessianOperator(model, loss_fn, batch, layers=names))


# --------------------------------------------------------------------------------------------- preconditioned Hessians


def centring(*, dead):
    generator = torch.Generator().manual_seed(5)
    mu, sigma = torch.randn(5, generator=generator).double(), torch.rand(5, generator=generator).double() + 0.1
    sigma[1] *= not dead
    return CentringScaling(mu, sigma, q=2.0)


@pytest.mark.parametrize("kind", [HessianOperator, GGNOperator])
def test_coordinates_of_several_layers(kind):
    model, batch, names = dense()
    A = kind(model, nn.CrossEntropyLoss(), batch, layers=names)
    P = centring(dead=True)
    coordinates = coordinates_of(A, {"0": P})
    assert isinstance(coordinates, LayerCoordinates)
    assert coordinates.shape == (24 + 12, 20 + 12)
    full = torch.block_diag(torch.kron(torch.eye(4).double(), P.matrix(6)), torch.eye(12).double())
    assert torch.allclose(coordinates.to_dense(), full)
    assert torch.allclose(coordinates.T.to_dense(), full.T)
    truth = full.T @ A.to_dense() @ full
    found = Congruence(A, coordinates).to_dense()
    assert (found - truth).norm() <= 1e-12 * truth.norm()


def test_coordinates_have_the_precision_of_the_operator():
    model, batch, _ = dense()
    H = HessianOperator(model.float(), nn.CrossEntropyLoss(), batch, layers="0", dtype=torch.float32)
    A = Congruence(H, coordinates_of(H, {"0": centring(dead=False)}))
    v = torch.randn(A.order, generator=torch.Generator().manual_seed(0))
    assert (A @ v).dtype == torch.float32
    exact = HessianOperator(model, nn.CrossEntropyLoss(), batch, layers="0")
    B = Congruence(exact, coordinates_of(exact, {"0": centring(dead=False)}))
    assert ((A @ v).double() - B @ v.double()).norm() <= 1e-5 * (B @ v.double()).norm()

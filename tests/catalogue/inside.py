"""Derivatives, solvers and transforms inside the forward pass or the loss."""

import functools

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.func import functional_call, hessian, jacrev, vmap
from torch.nn import functional as F

from tests.catalogue.cases import add
from tests.catalogue.parts import CE, MSE, Net, around, classes

INSIDE = "Derivatives inside the forward pass or the loss"
inside_of = functools.partial(add, INSIDE)


def laplacian(m, x):
    """u and its Laplacian."""
    x = x.detach().requires_grad_()
    u = m.net(x)
    (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return u[:, 0], sum(second)


def pinn_loss(output, target):
    u, laplacian = output
    return (laplacian + target).square().mean() + u.square().mean()


def forces(m, x):
    """The forces −∂E/∂x of an energy."""
    x = x.detach().requires_grad_()
    energy = m.out(torch.tanh(m.first(x)))
    return -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def critic(m, x):
    """Scores, and the norm of their gradient in the inputs."""
    x = x.detach().requires_grad_()
    score = m.net(x)
    return score, torch.autograd.grad(score.sum(), x, create_graph=True)[0].norm(dim=1)


def wasserstein(output, target):
    score, norm = output
    return (score[:, 0] * target).mean() + 10 * (norm - 1).square().mean()


def inner_step(m, x):
    """One inner step of gradient descent on the first half, the answer for the second."""
    support, query = x.chunk(2)
    start = dict(m.net.named_parameters())
    loss = (functional_call(m.net, start, (support,)) - support.sum(1, keepdim=True)).square().mean()
    steps = torch.autograd.grad(loss, list(start.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(start.items(), steps, strict=True)}
    return functional_call(m.net, moved, (query,))


def maml():
    x = torch.randn(16, 3)
    model = Net(inner_step, net=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    return model, lambda output, target: F.mse_loss(output, target.chunk(2)[1]), (x, x.sum(1, keepdim=True).sin())


def newton(m, z, injected):
    function = torch.tanh(m.inner(z) + injected)
    slope = (1 - function.square())[:, :, None] * m.inner.weight
    identity = torch.eye(3, dtype=z.dtype, device=z.device)
    return z - torch.linalg.solve(identity - slope, z - function)


def deep_equilibrium(m, x):
    """z = tanh(Wz + Ux) by Newton's method without a graph; its last step has one, and carries both derivatives."""
    injected = m.outer(x)
    with torch.no_grad():
        z = torch.zeros_like(injected)
        for _ in range(8):
            z = newton(m, z, injected)
    for _ in range(2):
        z = newton(m, z, injected)
    return m.head(z)


def equilibrium():
    model = Net(deep_equilibrium, inner=nn.Linear(3, 3, bias=False), outer=nn.Linear(4, 3), head=nn.Linear(3, 3))
    with torch.no_grad():
        model.inner.weight.mul_(0.5)
    return model, CE, classes()


def runge_kutta(m, x):
    """Four steps through a vector field."""
    for _ in range(4):
        k1 = torch.tanh(m.field(x))
        k2 = torch.tanh(m.field(x + 0.125 * k1))
        k3 = torch.tanh(m.field(x + 0.125 * k2))
        k4 = torch.tanh(m.field(x + 0.25 * k3))
        x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 24
    return m.head(x)


def ensemble(m, x):
    """Two members at once: their parameters are stacked, and vmap runs over them."""
    states = [dict(member.named_parameters()) for member in (m.first, m.second)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return vmap(lambda one: functional_call(m.first, one, (x,)))(stacked).mean(0)


def by_hessian(m, x):
    """Laplacian of u, row by row: forward over reverse mode has tensors of zeros without memory."""
    return vmap(lambda row: hessian(lambda p: m.net(p[None])[0, 0])(row).diagonal().sum())(x)[:, None]


def complex_recurrence(m, x):
    """A linear recurrence in the complex plane (LRU, S4D)."""
    inputs = torch.view_as_complex(m.first(x).view(len(x), 4, 2, 2))
    turn = torch.exp(torch.complex(-m.decay.exp(), m.phase))
    state = torch.zeros(len(x), 2, dtype=inputs.dtype)
    for k in range(4):
        state = turn * state + inputs[:, k]
    return m.last(torch.view_as_real(state).flatten(1))


def scanned(m, x):
    """A recurrence over the rows by torch's own scan."""
    return m.head(scan(lambda c, h: (0.5 * c + h.sin(), 0.5 * c + h.sin()), x.new_zeros(3), m.first(x))[1])


def frozen_trunk(m, x):
    """A part without gradients."""
    with torch.no_grad():
        h = torch.tanh(m.trunk(x))
    return m.head(torch.tanh(m.inner(h)))


def siamese_net():
    """One trunk on two inputs."""
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return Net(lambda m, left, right: (m.trunk(left), m.trunk(right)), trunk=trunk)


def contrastive(output, target):
    distance = (output[0] - output[1]).square().sum(1)
    return torch.where(target == 1, distance, F.softplus(1 - distance)).mean()


def info_nce(output, target):
    left, right = (F.normalize(z, dim=1) for z in output)
    return F.cross_entropy(left @ right.T / 0.5, target)


def siamese_pairs():
    inputs = {"left": torch.randn(15, 3), "right": torch.randn(15, 3)}
    return siamese_net(), contrastive, (inputs, torch.randint(0, 2, (15,)))


def all_against_all():
    inputs = {"left": torch.randn(8, 3), "right": torch.randn(8, 3)}
    return siamese_net(), info_nce, (inputs, torch.arange(8))


inside_of("pinn", "PINN (Laplacian of the output in the loss)",
    lambda: (Net(laplacian, net=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))), pinn_loss,
             (torch.rand(20, 2), torch.rand(20))), "net.0")  # fmt: skip
inside_of("force_field", "force field (forces = −∂E/∂x)",
    lambda: (Net(forces, first=nn.Linear(3, 4), out=nn.Linear(4, 1, bias=False)), MSE,
             (torch.randn(20, 3), torch.randn(20, 3))), "out")  # fmt: skip
inside_of("gradient_penalty", "WGAN-GP gradient penalty",
    lambda: (Net(critic, net=nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))), wasserstein,
             (torch.randn(16, 3), torch.tensor([1.0, -1.0]).repeat(8))), "net.0")  # fmt: skip
inside_of("maml", "inner optimization step (MAML)", maml, "net.0")
inside_of("equilibrium", "implicit layer (deep equilibrium)", equilibrium, "inner")
inside_of("neural_ode", "neural ODE (Runge-Kutta steps)",
    lambda: (Net(runge_kutta, field=nn.Linear(3, 3), head=nn.Linear(3, 3)), CE, classes(d=3)), "field")  # fmt: skip
inside_of("ensemble", "ensemble by vmap over stacked parameters",
    lambda: (Net(ensemble, first=around(nn.Linear(4, 3)), second=around(nn.Linear(4, 3))), CE, classes()),
    "first.0")  # fmt: skip
inside_of("no_grad_part", "part under no_grad",
    lambda: (Net(frozen_trunk, trunk=nn.Linear(4, 4), inner=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE,
             classes()), "inner")  # fmt: skip
inside_of("vmap_inside", "vmap in the forward pass",
    lambda: (Net(lambda m, x: vmap(lambda row: m.head(torch.tanh(m.first(row))))(x), first=nn.Linear(4, 3),
                 head=nn.Linear(3, 3)), CE, classes()), "first")  # fmt: skip
inside_of("jacrev_inside", "jacrev in the forward pass",
    lambda: (Net(lambda m, x: vmap(jacrev(m.net))(x), net=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))),
             MSE, (torch.randn(15, 3), torch.randn(15, 2, 3))), "net.0")  # fmt: skip
inside_of("hessian_inside", "Laplacian by torch.func.hessian in the forward pass",
    lambda: (Net(by_hessian, net=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))), MSE,
             (torch.randn(16, 2), torch.randn(16, 1))), "net.0")  # fmt: skip
inside_of("complex_recurrence", "complex linear recurrence (LRU)",
    lambda: (Net(complex_recurrence, first=nn.Linear(4, 16), decay=nn.Parameter(torch.rand(2)),
                 phase=nn.Parameter(torch.rand(2)), last=nn.Linear(4, 3)), CE, classes()), "first")  # fmt: skip
inside_of("scan", "recurrence over the rows by torch's scan",
    lambda: (Net(scanned, first=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE, classes()), "first",
    streams=False)  # fmt: skip
inside_of("siamese", "Siamese network, contrastive loss", siamese_pairs, "trunk.0")
inside_of("all_against_all", "InfoNCE over the batch", all_against_all, "trunk.0")

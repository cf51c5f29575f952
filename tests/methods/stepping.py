"""What an optimizer's step does, for the tests of M = P Pᵀ that is read from its state."""

import copy

import torch
from torch import nn

from hesscond.methods.optimizers import AtWork
from tests.truth import double_backward


def network(dtype=torch.float64, norm=False):
    """A convolution and two dense layers, on 20 images (1, 6, 6); with ``norm`` a layer norm between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.LayerNorm(5)] if norm else []
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), *middle, nn.Tanh(), nn.Linear(5, 4)
        ).to(dtype)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 1, 6, 6, generator=generator).to(dtype), torch.randint(0, 4, (20,), generator=generator)


def matrices(parameters):
    return [p for p in parameters if p.ndim > 1]


def stepped(model, optimizer, steps=4, before=None):
    """Steps with random gradients: the last of these, and how far the last step went, by the names of parameters.

    ``before(number)`` is called before each step.
    """
    generator = torch.Generator().manual_seed(2)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for number in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        given = {name: p.grad.clone() for name, p in model.named_parameters()}
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        if before is not None:
            before(number)
        for one in several:
            one.step()
    return given, {name: (p.detach() - start[name]).double() for name, p in model.named_parameters()}


def largest_difference(model, optimizer, given, moved):
    """‖step − (−η M g)‖/‖step‖, of the parameter where it is largest."""
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    method = AtWork(model, several)
    explained = method.preconditioned({name: g.double() for name, g in given.items()})
    held = {id(p) for one in several for group in one.param_groups for p in group["params"]}
    return max(
        float((moved[name] + method.rate * explained[name]).norm() / moved[name].norm())
        for name, p in model.named_parameters()
        if id(p) in held
    )


def columns_of_M(model, optimizer, size=1e-3, freeze=None):
    """M (n, n) in all parameters, flattened: −1/η times the steps of the optimizer itself along unit gradients.

    ``freeze(optimizer)`` keeps it from learning of these gradients; model and optimizer are left as they were.
    """
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    rate = max(group["lr"] for group in optimizer.param_groups)

    def position():
        return torch.cat([p.detach().double().flatten() for p in parameters])

    def put(states, groups, place):
        for p, part in zip(parameters, place.split(sizes), strict=True):
            p.detach().copy_(part.view(p.shape))
            optimizer.state[p].clear()
            optimizer.state[p].update(copy.deepcopy(states[p]))
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)

    start = position()
    states = {p: copy.deepcopy(optimizer.state[p]) for p in parameters}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    columns = []
    for unit in size * torch.eye(sum(sizes), dtype=torch.float64):
        if freeze is not None:
            freeze(optimizer)
        for p, g in zip(parameters, unit.split(sizes), strict=True):
            p.grad = g.view(p.shape).to(p.dtype)
        optimizer.step()
        columns.append((start - position()) / (rate * size))
        put(states, groups, start)
    return torch.stack(columns, 1)


def dense_hessian(model, x, y, names=None):
    """∇²L in the named parameters, flattened one after another, by double backward."""
    chosen = [p for name, p in model.named_parameters() if names is None or name in names]
    return double_backward(nn.functional.cross_entropy(model(x), y), chosen)


def kappa(M, H, rank):
    """κ of the ``rank`` largest eigenvalues in size of M^½ H M^½."""
    values, Q = torch.linalg.eigh((M + M.T) / 2)
    root = (Q * values.clamp_min(0).sqrt()) @ Q.T
    found = torch.linalg.eigvalsh(root @ H @ root).abs().sort(descending=True).values
    return float(found[0] / found[rank - 1])

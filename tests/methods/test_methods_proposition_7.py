"""One step with batch normalization and no gradient through its statistics is one BNP step of the merged network."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hesscond.methods import BNP, parse

LR = 0.3
NO_GRADIENT = "batchnorm:position=post,affine=false,gradient_through_statistics=false,eps=0"
#: torch wants some ε
THROUGH = "batchnorm:position=post,affine=false,eps=1e-15"


def dense():
    """A tanh network (no unit is dead), and a batch with more samples than a layer has columns: q = 1."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(0, 4, (40,), generator=generator)


def inputs_of(model, layers, x):
    """(N, n) what enters each layer, in numpy."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.__setitem__(name, args[0].detach().numpy())
        )
        for name in layers
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def merged(W, b, mu, sigma):
    """Ŵ = W Σ⁻¹ and b̂ = b − W Σ⁻¹ μ of W Σ⁻¹ (h − μ) + b."""
    return W / sigma, b - (W / sigma) @ mu


def normalized_step(spec):
    """The merged layers after one step with batch normalization, and the plain network that is its start, merged."""
    model, x, y = dense()
    parse(spec).create(model)
    entering = inputs_of(model, ["2.before", "4.before"], x)
    moments = {name[0]: (h.mean(0), h.std(0)) for name, h in entering.items()}

    def layers():
        return {
            name: merged(*(p.detach().numpy() for p in model.get_submodule(f"{name}.layer").parameters()), *own)
            for name, own in moments.items()
        }

    plain, _, _ = dense()
    with torch.no_grad():
        for name, (W, b) in layers().items():
            plain[int(name)].weight.copy_(torch.from_numpy(W))
            plain[int(name)].bias.copy_(torch.from_numpy(b))
    assert torch.allclose(plain(x), model(x), rtol=1e-12, atol=1e-13)
    functional.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    # under the old statistics
    after = layers()
    after["0"] = tuple(p.detach().numpy() for p in model[0].parameters())
    return after, plain, moments


def bnp_step(plain, moments, x, y):
    """ŵ − α P Pᵀ ∇L for the rows [b, w], P = U D with U = [[1, −μᵀ], [0, I]] and D = diag(1, 1/σ), in numpy."""
    functional.cross_entropy(plain(x), y).backward()
    after = {"0": tuple((p - LR * p.grad).detach().numpy() for p in plain[0].parameters())}
    for name, (mu, sigma) in moments.items():
        layer, n = plain[int(name)], len(mu)
        U, D = np.eye(n + 1), np.diag(np.concatenate([[1], 1 / sigma]))
        U[0, 1:] = -mu
        P = U @ D
        rows = np.column_stack([layer.bias.detach().numpy(), layer.weight.detach().numpy()])
        gradient = np.column_stack([layer.bias.grad.numpy(), layer.weight.grad.numpy()])
        rows = rows - LR * gradient @ P @ P.T
        after[name] = (rows[:, 1:], rows[:, 0])
    return after


def difference(found, truth):
    """The largest of all layers, relative to the largest entry."""
    return max(np.abs(a - b).max() / np.abs(b).max() for k in truth for a, b in zip(found[k], truth[k], strict=True))


def test_a_step_without_gradient_through_the_statistics_is_a_bnp_step():
    after, plain, moments = normalized_step(NO_GRADIENT)
    _, x, y = dense()
    assert difference(after, bnp_step(plain, moments, x, y)) < 1e-13


def test_it_is_the_step_of_the_method_bnp_too():
    after, plain, _ = normalized_step(NO_GRADIENT)
    _, x, y = dense()
    method = BNP(plain, epsilon_1=0.0, epsilon_2=0.0, rho=0.0)
    functional.cross_entropy(plain(x), y).backward()
    method.transform_gradients()
    for name in ("2", "4"):
        layer = plain[int(name)]
        found = tuple((p - LR * p.grad).detach().numpy() for p in layer.parameters())
        assert difference({name: found}, {name: after[name]}) < 1e-12


def test_with_gradient_through_the_statistics_it_is_not():
    """Only the last layer has no normalization behind it."""
    after, plain, moments = normalized_step(THROUGH)
    _, x, y = dense()
    truth = bnp_step(plain, moments, x, y)
    assert difference({"4": after["4"]}, {"4": truth["4"]}) < 1e-11
    for name in ("0", "2"):
        assert difference({name: after[name]}, {name: truth[name]}) > 1e-3

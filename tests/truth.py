"""The dense Hessian of one unit or one layer of any model, by automatic differentiation in float64.

Two ways that share nothing but the parametrization: `forward_over_reverse` is `torch.func.hessian`,
`reverse_over_reverse` differentiates the gradient of one plain forward pass row by row. `unit_truth` and
`layer_truth` take the first and fall back on the second where an operation lacks a forward derivative, draws random
numbers, or the model branches on values.

Order of the parameters: unit by unit, ``[b_i, w_i.flatten()]``; the w_i of output channel i of a transposed
convolution is everything in the weight that feeds this channel.
"""

import contextlib
import copy
import functools

import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._pytree import tree_map_only

#: What `hesscond.probe` can measure.
ELIGIBLE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def eligible_layers(model):
    """The layers of a model that a probe can measure, by qualified name ("model" if it is the model itself)."""
    return {name or "model": module for name, module in model.named_modules() if isinstance(module, ELIGIBLE)}


def layer_truth(model, loss_fn, batch, layer, *, derivative=None):
    """(n, n) Hessian in all parameters of the layer; ``derivative``: one of the two ways, None: what works."""
    problem = Problem(model, loss_fn, batch, layer)
    return problem.hessian(lambda theta: theta.view_as(problem.theta), problem.theta.flatten(), derivative)


def unit_truth(model, loss_fn, batch, layer, unit, *, derivative=None):
    """(n̂, n̂) Hessian in the parameters of one output unit."""
    problem = Problem(model, loss_fn, batch, layer)
    theta = problem.theta
    return problem.hessian(
        lambda row: torch.cat([theta[:unit], row[None], theta[unit + 1 :]]), theta[unit].clone(), derivative
    )


def network_truth(model, loss_fn, batch):
    """(n, n) Hessian in all parameters, in their order and precision, from one forward pass in the present state."""
    parameters = dict(model.named_parameters())

    def at(theta):
        parts = theta.split([p.numel() for p in parameters.values()])
        given = {name: part.view_as(p) for part, (name, p) in zip(parts, parameters.items(), strict=True)}
        return loss_fn(functional_call(model, given, batch[0]), batch[1])

    return reverse_over_reverse(at, torch.cat([p.detach().flatten() for p in parameters.values()]))


def forward_over_reverse(function, start):
    return hessian(function)(start)


def reverse_over_reverse(function, start):
    point = start.clone().requires_grad_()
    value = function(point)
    nothing = torch.zeros(len(point), len(point), dtype=point.dtype, device=point.device)
    if not value.requires_grad:
        return nothing
    (gradient,) = torch.autograd.grad(value, point, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return nothing
    derivatives = [
        torch.autograd.grad(g, point, retain_graph=True, materialize_grads=True)[0] for g in gradient.unbind()
    ]
    return torch.stack(derivatives).detach()


def double_backward(loss, tensors):
    """(n, n) Hessian of a scalar in these tensors, flattened one after another, row by row."""
    tensors = list(tensors)
    return derivatives(torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True), tensors)


def derivatives(slopes, tensors):
    """(n, n) derivatives of the gradient in these tensors, row by row."""
    rows = [
        torch.autograd.grad(g, tensors, retain_graph=True, materialize_grads=True)
        if g.requires_grad
        else [torch.zeros_like(tensor) for tensor in tensors]
        for g in torch.cat([slope.flatten() for slope in slopes])
    ]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


class Problem:
    """The loss as a function of one layer's parameters, (units, n̂) as ``theta``, in float64, on copies."""

    def __init__(self, model, loss_fn, batch, layer):
        self.model = copy.deepcopy(model).double()
        for module in self.model.modules():
            if isinstance(module, _BatchNorm) and module.training:
                # in training mode they are written and never read
                module.running_mean = module.running_var = module.num_batches_tracked = None
                module.track_running_stats = False
        self.model.requires_grad_(False)
        self.loss_fn = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
        self.inputs, self.targets = tree_map_only(torch.Tensor, in_double, batch)
        self.prefix = "" if self.model is eligible_layers(self.model).get(layer) else f"{layer}."
        self.module = eligible_layers(self.model)[layer]
        self.theta = packed(self.module)

    def loss(self, theta):
        replaced = {self.prefix + name: value for name, value in unpacked(self.module, theta).items()}
        if isinstance(self.inputs, dict):
            args, kwargs = (), self.inputs
        else:
            args, kwargs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,), {}
        # copies: the model may work in place
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return self.loss_fn(functional_call(self.model, replaced, args, kwargs), self.targets)

    def hessian(self, place, start, derivative):
        def function(parameters):
            return self.loss(place(parameters))

        ways = [forward_over_reverse, reverse_over_reverse] if derivative is None else [derivative]
        with sdpa_kernel(SDPBackend.MATH):
            for way in ways[:-1]:
                with contextlib.suppress(RuntimeError, NotImplementedError), same_random_numbers(start.device):
                    return way(function, start)
            with same_random_numbers(start.device):
                return ways[-1](function, start)


def in_double(tensor):
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def same_random_numbers(device):
    """Draw from the present random state, and leave it as it is."""
    here = device.type == "cpu"
    return torch.random.fork_rng(devices=[] if here else [device], device_type="cuda" if here else device.type)


def packed(module):
    """(units, n̂) the layer's parameters, a row for every output unit: [bias, weights]."""
    weight, groups = module.weight, getattr(module, "groups", 1)
    if isinstance(module, _ConvTransposeNd):
        C_in, per_group, *kernel = weight.shape
        weight = weight.reshape(groups, C_in // groups, per_group, *kernel).transpose(1, 2)
        weight = weight.reshape(groups * per_group, -1)
    weight = weight.flatten(1)
    return weight.clone() if module.bias is None else torch.cat([module.bias[:, None], weight], 1)


def unpacked(module, theta):
    """The inverse of `packed`: {"weight": …, "bias": …}."""
    weight, groups = theta if module.bias is None else theta[:, 1:], getattr(module, "groups", 1)
    if isinstance(module, _ConvTransposeNd):
        C_in, per_group, *kernel = module.weight.shape
        weight = weight.reshape(groups, per_group, C_in // groups, *kernel).transpose(1, 2)
    parameters = {"weight": weight.reshape(module.weight.shape)}
    return parameters if module.bias is None else {**parameters, "bias": theta[:, 0]}


@functools.cache
def case_truth(case, seed=0, device="cpu"):
    """{layer: Hessian of the whole layer, on the host} of a case; {layer: number of parameters of a unit}."""
    model, loss_fn, batch = case.make(seed, device)
    layers = {name: module for name, module in eligible_layers(model).items() if name not in case.unreached}
    hessians = {name: layer_truth(model, loss_fn, batch, name).cpu() for name in layers}
    return hessians, {name: packed(module).shape[1] for name, module in layers.items()}


def block(hessian, size, unit):
    """The part of a layer's Hessian that belongs to one unit with ``size`` parameters."""
    part = slice(unit * size, (unit + 1) * size)
    return hessian[part, part]

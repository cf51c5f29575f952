"""The dense Hessian of a whole model by two calls of `torch.autograd.grad` on a float64 twin, and its parts.

It shares nothing with hesscond: no functional call, no hook, no capture. The model runs as its author wrote it, with
the parameter's own tensors as leaves.
"""

import functools
import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

#: What `skipped` advises: layers, and a level if it is another one.
ADVICE = re.compile(r"name it, layers=(\[(?:'[^']*'(?:, )?)+\])(?:, level='(\w+)')?")
LOW = (torch.float32, torch.bfloat16, torch.float16)


class InDouble(TorchFunctionMode):
    """Casts to a lower precision become casts to float64: what the author's formula says without them.

    Random numbers are drawn in the type ``draws``, that of the author's run.
    """

    def __init__(self, draws):
        super().__init__()
        self.draws = draws

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        if function in (torch.randn_like, torch.rand_like) and "dtype" not in kwargs and self.draws is not None:
            return function(*args, **kwargs, dtype=self.draws).double()
        args, kwargs = tree_map(
            lambda one: torch.float64 if isinstance(one, torch.dtype) and one in LOW else one,
            (args, kwargs),
            is_leaf=is_tensor,
        )
        return function(*args, **kwargs)


def is_tensor(value):
    """Whether tree_map should not look into it, nor compare it."""
    return isinstance(value, torch.Tensor)


class Truth:
    """The Hessian of the mean loss in all floating parameters of ``twin``.

    Attributes
    ----------
    matrix
        (P, P), the parameters one after another, each flattened as torch does.
    index
        By parameter name, aliases included: where its entries lie, in its own shape.
    layers
        Names of the dense and convolutional layers.
    trained
        Names of the parameters that require a gradient.
    reached
        Names of those of any kind that receive a gradient.
    """

    def __init__(self, twin, loss_fn, batch, by_hand=None, *, draws=None):
        self.twin = twin
        # the second derivatives of the loss, not of what a hook makes of its gradient
        for module in twin.modules():
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
        by_hand = by_hand or functools.partial(as_called, loss_fn, batch)
        own = [(name, p) for name, p in twin.named_parameters() if p.is_floating_point()]
        self.trained = {name for name, p in own if p.requires_grad}
        tensors = [p.requires_grad_() for _, p in own]
        torch.manual_seed(1)
        # the fused kernels have no second derivative
        with InDouble(draws), sdpa_kernel(SDPBackend.MATH):
            loss = by_hand(twin)
            gradients = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            rows = [row for g, p in zip(gradients, tensors, strict=True) for row in derivatives(g, p, tensors)]
        self.matrix = torch.stack(rows)
        positions = torch.arange(len(rows)).split([p.numel() for p in tensors])
        places = {id(p): where.view(p.shape) for p, where in zip(tensors, positions, strict=True)}
        names = list(twin.named_parameters(remove_duplicate=False))
        self.index = {name: places[id(p)] for name, p in names if id(p) in places}
        self.layers = {n for n, m in twin.named_modules() if isinstance(m, nn.Linear | _ConvNd)}
        reached = {id(p) for p, g in zip(tensors, gradients, strict=True) if g is not None and bool(g.any())}
        self.reached = {name for name, p in names if id(p) in reached}

    def flat(self, names):
        """Where the entries of these parameters lie, one after another."""
        return torch.cat([self.index[name].flatten() for name in names])

    def at(self, where):
        """The block of these entries."""
        return self.matrix[where][:, where]

    def units(self, layer, names):
        """(units, n) where the entries of each output unit lie: its bias, then what is its own of the other tensors."""
        module = self.twin.get_submodule(layer)
        transposed = isinstance(module, _ConvTransposeNd)
        found = []
        for name in sorted(names, key=lambda name: not name.endswith("bias")):
            where = self.index[name]
            if transposed and where.shape == module.weight.shape:
                inputs, outputs, *kernel = where.shape
                where = where.reshape(module.groups, inputs // module.groups, outputs, *kernel).transpose(1, 2)
                where = where.flatten(0, 1)
            found.append(where.reshape(len(where), -1))
        return torch.cat(found, 1)


def as_called(loss_fn, batch, twin):
    """Loss of a model on a pair (inputs, target), in float64."""
    inputs, target = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    return loss_fn(twin(*args, **kwargs), target)


def derivatives(gradient, parameter, tensors):
    """The rows of the Hessian that belong to a parameter."""
    if gradient is None or not gradient.requires_grad:
        width = sum(p.numel() for p in tensors)
        yield from torch.zeros(parameter.numel(), width, dtype=torch.float64)
        return
    for entry in gradient.flatten():
        row = torch.autograd.grad(entry, tensors, retain_graph=True, materialize_grads=True)
        yield torch.cat([part.flatten() for part in row])

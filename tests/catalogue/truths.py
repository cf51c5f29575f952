"""The truths of the catalogue: dense Hessians and spectra that share nothing with hesscond.

`Truth` is the Hessian of a whole model by two calls of `torch.autograd.grad` on a float64 twin: no functional call, no
hook, no capture. The model runs as its author wrote it, with the parameter's own tensors as leaves. `FormulaTruth` is
that of a formula in exact arithmetic.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from tests.truth import derivatives

#: What `skipped` advises: layers, and a level if it is another one.
ADVICE = re.compile(r"name it, layers=(\[(?:'[^']*'(?:, )?)+\])(?:, level='(\w+)')?")
LOW = (torch.float32, torch.bfloat16, torch.float16)
#: Rounding of the eigenvalues in float64.
ROUNDING = 1e-13
#: Eigenvalues above and below these, relative to the largest, are and are not zero.
NONZERO, ZERO = 1e-7, 1e-13
#: Decimal digits of the exact truth, its step of differences, and the |λ|/|λ|_max that is zero in it.
DIGITS, STEP, NOTHING = 240, 70, 90


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a true Hessian.

    Attributes
    ----------
    values
        In descending order of size, as floats or numbers of mpmath; a zero that is exact is 0.
    error
        Bound of their errors; 0 if they are exact.
    most
        Largest possible rank; None: as many as are not zero.
    rounding
        Rounding of the terms that the Hessian is the difference of: what is smaller may be called zero.
    matrix
        The Hessian, if it is known entry by entry.
    told
        Whether double precision tells which eigenvalues are zero, and the others to all digits that count.
    """

    values: Sequence[Any]
    error: float = 0.0
    most: int | None = None
    rounding: float = 0.0
    matrix: torch.Tensor | None = None
    told: bool = False

    @classmethod
    def of(cls, matrix):
        """The spectrum of a matrix of doubles, known up to rounding, in which rows of any scale may be nonzero."""
        values = torch.linalg.eigvalsh(matrix).tolist()
        values.sort(key=abs, reverse=True)
        scales = matrix.abs().amax(1).sqrt()
        scales = torch.where(scales == 0, 1, scales)
        equilibrated = torch.linalg.eigvalsh(matrix / scales / scales[:, None]).abs()
        return cls(values, ROUNDING * abs(values[0]), int((equilibrated > ROUNDING).sum()), matrix=matrix)

    @property
    def strict(self):
        """The same with one rank, whatever the scales of rows, if no eigenvalue is between `ZERO` and `NONZERO`."""
        top = abs(self.values[0])
        told = all(not ZERO * top < abs(value) <= NONZERO * top for value in self.values)
        return replace(self, most=None, told=True) if told else self

    @property
    def ranks(self):
        """The smallest and the largest rank that it allows."""
        sizes = [abs(value) for value in self.values]
        most = sum(size > self.error for size in sizes)
        return sum(size > 1e3 * self.error for size in sizes), max(most, self.most or 0)


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

    ``zero`` names parameters whose whole rows are exactly zero; ``scales`` gives, by parameter name, the diagonal of P,
    and holds only those that an optimizer holds.

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

    def __init__(self, twin, loss_fn, batch, by_hand=None, *, draws=None, zero=(), scales=None):
        self.twin, self.scales = twin, scales
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
            slopes = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
            self.matrix = derivatives(slopes, tensors)
        positions = torch.arange(len(self.matrix)).split([p.numel() for p in tensors])
        places = {id(p): where.view(p.shape) for p, where in zip(tensors, positions, strict=True)}
        names = list(twin.named_parameters(remove_duplicate=False))
        self.index = {name: places[id(p)] for name, p in names if id(p) in places}
        self.layers = {n for n, m in twin.named_modules() if isinstance(m, nn.Linear | _ConvNd)}
        reached = {id(p) for p, slope in zip(tensors, slopes, strict=True) if bool(slope.any())}
        self.reached = {name for name, p in names if id(p) in reached}
        for name in zero:
            where = self.index[name].flatten()
            self.matrix[where] = 0
            self.matrix[:, where] = 0
        if scales is not None:
            flat = torch.ones(len(self.matrix), dtype=torch.float64)
            for name, scale in scales.items():
                flat[self.index[name].flatten()] = scale.flatten().double()
            self.matrix = flat[:, None] * self.matrix * flat

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

    def spectrum(self, block, unit):
        """The true spectrum of a block of a result, or of one of its units; a sentence on what it is wrongly called."""
        if self.scales is not None and not set(block.parameters) <= set(self.scales):
            other = sorted(set(block.parameters) - set(self.scales))
            return f"{', '.join(other)} measured in coordinates of an optimizer that does not hold it"
        # a dense or convolutional layer with its own weight goes unit by unit
        plain = set(block.parameters) <= {f"{block.name}.weight", f"{block.name}.bias"} and block.name in self.layers
        if unit is None and not plain:
            return Spectrum.of(self.at(self.flat(block.parameters)))
        rows = self.units(block.name, block.parameters)
        return Spectrum.of(self.at(rows.flatten() if unit is None else rows[unit]))


def stream_truth(make_twin, **facts):
    """The truth of a stream: all of its batches at once."""

    def truth(model, loss_fn, batches, options):
        inputs, targets = zip(*batches, strict=True)
        return Truth(make_twin(model), loss_fn, (torch.cat(inputs), torch.cat(targets)), **facts)

    return truth


def as_called(loss_fn, batch, twin):
    """Loss of a model on a pair (inputs, target), in float64."""
    inputs, target = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    return loss_fn(twin(*args, **kwargs), target)


class FormulaTruth:
    """The Hessian of a formula in mpmath, by differences with 70 digits.

    ``formula(parameters, rows)`` is the loss, from arrays of mpmath's numbers: {name: parameter} and the inputs;
    ``terms`` is the size of the terms that the Hessian is the difference of, if it is one.
    """

    def __init__(self, model, formula, inputs, terms=0.0):
        import numpy as np
        from mpmath import mp

        self.mp, mp.dps = mp, DIGITS
        exact = np.vectorize(lambda value: mp.mpf(float(value)), otypes=[object])
        own = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
        sizes = [p.numel() for p in own.values()]
        places = torch.arange(sum(sizes)).split(sizes)
        self.index = {name: where.view(p.shape) for (name, p), where in zip(own.items(), places, strict=True)}
        start = np.concatenate([exact(p.flatten().numpy()) for p in own.values()])
        rows = exact(inputs.double().numpy())
        h = mp.mpf(10) ** -STEP

        def loss(*moves):
            point = start.copy()
            for number, move in moves:
                point[number] += move
            return formula({name: point[where.numpy()] for name, where in self.index.items()}, rows)

        n, middle = len(start), loss()
        self.matrix = mp.matrix(n, n)
        ends = [(loss((i, h)), loss((i, -h))) for i in range(n)]
        for i, (above, below) in enumerate(ends):
            self.matrix[i, i] = (above - 2 * middle + below) / h**2
            for j in range(i):
                both = loss((i, h), (j, h)) + loss((i, -h), (j, -h))
                mixed = (both - above - below - sum(ends[j]) + 2 * middle) / (2 * h**2)
                self.matrix[i, j] = self.matrix[j, i] = mixed
        self.scale, self.rounding = 1 + abs(middle), 64 * torch.finfo(torch.float64).eps * terms

    def spectrum(self, own, unit):
        """The true spectrum of a Hessian of a result."""
        places = [self.index[name] for name in own.parameters]
        rows = places if unit is None else [place.reshape(len(place), -1)[unit] for place in places]
        chosen = torch.cat([row.flatten() for row in rows]).tolist()
        block = self.mp.matrix([[self.matrix[i, j] for j in chosen] for i in chosen])
        values = sorted(self.mp.eigsy(block, eigvals_only=True), key=abs, reverse=True)
        smallest = self.mp.mpf(10) ** -NOTHING * max(abs(values[0]), self.scale * self.mp.mpf(10) ** -STEP)
        values = [value if abs(value) > smallest else self.mp.mpf(0) for value in values]
        return Spectrum(values, rounding=self.rounding)


def formula_truth(formula, *, difference=False, terms=0.0):
    """The truth by ``formula(mp, parameters, rows)``, a difference of terms of this size, or of the size of x²."""

    def truth(model, loss_fn, batch, options):
        from mpmath import mp

        size = float(1 + batch[0].square().sum(1).mean()) if difference else terms
        return FormulaTruth(model, functools.partial(formula, mp), batch[0], size)

    return truth

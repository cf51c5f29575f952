"""What a probe says of a random program, against finite differences of the program's own gradients.

The truth runs the program as its author would, ``loss.backward()`` on a fresh float64 model with parameters moved in
place, and shares nothing with the library.
"""

import linecache
import random
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

import hesscond
from hesscond.errors import HesscondError
from hesscond.hessians import Preconditioner
from tests.random_programs import FROZEN

LEVELS = ("unit", "layer", "network")
#: The random state in which the model is probed, and run for the truth.
RANDOM_STATE = 5
STEP = 2e-4
#: Relative distance of an answer from the truth, of differences of two orders from each other (more is a kink nearby),
#: and round-off relative to gradients.
AGREES, STEADY, ROUNDING = 1e-6, 1e-5, 1e-10


def built(program, *, double=False):
    """The names that a program defines; ``double``: in float64 throughout, its casts by hand included."""
    source, name = program.source, f"<program {program.seed}{' in float64' * double}>"
    if double:
        single = "DTYPE = torch.float32" in source
        source = source.replace(".float()", ".double()").replace("torch.float32", "torch.float64")
        if single:  # the numbers that the program itself draws
            source = source.replace("torch.randn_like(h)", "torch.randn_like(h, dtype=torch.float32).double()")
    # torch.jit.script reads the text there
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = types.ModuleType("program")
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def seeded():
    """Set the global random state."""
    # much faster than torch.manual_seed, which prepares for GPUs
    torch.default_generator.manual_seed(RANDOM_STATE)
    np.random.seed(RANDOM_STATE)  # noqa: NPY002
    random.seed(RANDOM_STATE)


def random_states():
    """The global random state."""
    return [torch.get_rng_state().tolist(), list(np.random.get_state()), random.getstate()]  # noqa: NPY002


def batches_of(data):
    return data if isinstance(data, list) else [data]


class Replayed:
    """A function whose results in the first run are given again in the later ones, call by call."""

    def __init__(self, function):
        self.function, self.results, self.calls, self.first = function, [], 0, True

    def __call__(self, *args):
        if self.first:
            self.results.append(self.function(*args))
        self.calls += 1
        return self.results[self.calls - 1]


class Truth:
    """Gradients of a program's loss, over all its batches, where its parameters are and nearby.

    Attributes
    ----------
    model
        The model.
    gradients
        By parameter.
    """

    def __init__(self, program):
        self.module, self.summed = built(program, double=True), program.summed
        self.constants = [Replayed(vars(self.module)[name]) for name in FROZEN if name in vars(self.module)]
        vars(self.module).update({constant.function.__name__: constant for constant in self.constants})
        self.model = self.module.make()[0]
        # a power iteration, too, is a constant for autograd
        power, self.vectors = _SpectralNorm._power_method, Replayed(None)

        def iterate(layer, weight, count):
            self.vectors.function = lambda: power(layer, weight, count) or (layer._u.clone(), layer._v.clone())
            layer._u.copy_(self.vectors()[0]), layer._v.copy_(self.vectors.results[self.vectors.calls - 1][1])

        self.iterate = torch.no_grad()(iterate)
        self.constants.append(self.vectors)
        self.gradients = self.run({})
        for constant in self.constants:
            constant.first = False
        self.size = float(joined(self.gradients.values()).norm())

    def run(self, moves):
        """{name: gradient} with ``moves`` added to the parameters."""
        for constant in self.constants:
            constant.calls = 0
        usual, _SpectralNorm._power_method = _SpectralNorm._power_method, self.iterate
        try:
            return self.total(moves)
        finally:
            _SpectralNorm._power_method = usual

    def total(self, moves):
        total, mass = {}, 0
        for number in range(len(batches_of(self.module.make()[2]))):
            model, loss_fn, data = self.module.make()
            # a parameter that is not trained has a Hessian all the same
            parameters = dict(model.requires_grad_().named_parameters())
            with torch.no_grad():
                for name, move in moves.items():
                    parameters[name].add_(move)
            inputs, target = batches_of(data)[number]
            seeded()
            loss_fn(model(inputs), target).backward()
            weight = 1 if self.summed else len(inputs)
            mass += weight
            for name, p in parameters.items():
                total[name] = total.get(name, 0) + weight * (torch.zeros_like(p) if p.grad is None else p.grad)
        return {name: value if self.summed else value / mass for name, value in total.items()}

    def product(self, direction, step=STEP):
        """{name: part of H v} for v = ``direction`` {name: part}, by differences of fourth and of second order."""
        at = {k: self.run({name: k * step * part for name, part in direction.items()}) for k in (-2, -1, 1, 2)}
        near, far = ({name: at[k][name] - at[-k][name] for name in self.gradients} for k in (1, 2))
        fourth = {name: (8 * near[name] - far[name]) / (12 * step) for name in near}
        return fourth, {name: value / (2 * step) for name, value in near.items()}


def joined(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


class Sheared(Preconditioner):
    """Some P of any order."""

    name = "sheared"

    def right_multiply(self, rows):
        n = rows.shape[1]
        return rows @ (torch.eye(n) + 0.5 / (1 + torch.arange(n)[:, None] + 2 * torch.arange(n))).to(rows)


def places(model, layer, unit):
    """[(name of a parameter, flat indices into it)]: which entries the rows of a Hessian belong to, in their order."""
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = {first[id(every[name])]: every[name] for name in layer.parameters}
    indices = {name: torch.arange(p.numel()).view(p.shape) for name, p in chosen.items()}
    if layer.level == "network" or (unit is None and layer.route.startswith("products")):
        return [(name, where.flatten()) for name, where in indices.items()]
    module = model.get_submodule(layer.name)
    units = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    if isinstance(module, nn.ConvTranspose1d):
        indices = {name: where.transpose(0, 1) if where.ndim > 1 else where for name, where in indices.items()}
    indices = dict(sorted(indices.items(), key=lambda pair: not pair[0].endswith("bias")))
    rows = [where for where in indices.values() if where.ndim and len(where) == units]
    return [
        (name, where[u].flatten())
        for u in ([unit] if unit is not None else range(units))
        for name, where in indices.items()
        if any(where is own for own in rows)
    ]


@dataclass
class Outcome:
    """What became of a program: by kind ("right", "refused", "wrong", "traceback", "kink") the sentences."""

    right: list = field(default_factory=list)
    refused: list = field(default_factory=list)
    wrong: list = field(default_factory=list)
    traceback: list = field(default_factory=list)
    kink: list = field(default_factory=list)


def judged(program, probe=hesscond.probe, **options):
    """Probe the program at its level, and at the others until one answers."""
    found, truth = Outcome(), Truth(program)
    for level in sorted(LEVELS, key=lambda level: level != program.level):
        model, loss_fn, data = built(program).make()
        method = Sheared() if program.scaled and level != "network" else None
        seeded()
        try:
            result = probe(model, loss_fn, data, level=level, method=method, **options)
            answers = [answer for name in result for answer in products(result[name], program.seed, truth, method)]
        except HesscondError as error:
            found.refused.append(f"{level}: {error}")
            continue
        except Exception:
            found.traceback.append(f"{level}: {traceback.format_exc()}")
            continue
        for what, own, differences in answers:
            fine, coarse = differences(STEP)
            floor = ROUNDING * truth.size
            if not (fine - coarse).norm() <= STEADY * fine.norm() + floor:
                found.kink.append(what)
                continue
            error = float((own - fine).norm())
            kind = found.right if error <= AGREES * float(fine.norm()) + floor else found.wrong
            if kind is found.wrong:
                # a weak kink, as of |z|³, shows in the step only
                finer, _ = differences(STEP / 8)
                kind = kind if (finer - fine).norm() <= 0.1 * AGREES * fine.norm() + 8 * floor else found.kink
            kind.append(f"{what}: |error| {error:.2e} of |H v| {float(fine.norm()):.2e}")
        if answers:
            break
    return found


def products(layer, seed, truth, method):
    """[(what, H v of the probe, H v by differences as a function of the step)] of a random unit or a layer."""
    generator = torch.Generator().manual_seed(seed)
    unit = layer.units[seed % len(layer.units)] if layer.level == "unit" else None
    rows = places(truth.model, layer, unit)
    v = torch.randn(sum(len(where) for _, where in rows), generator=generator, dtype=torch.float64)
    own = layer.operator @ v if layer.level == "network" else layer.hessian(unit) @ v
    units = 1 if method is None or unit is not None else len(rows) // len(layer.parameters)
    direction, start = {}, 0
    if method is not None:
        v = method.multiply(v.view(units, -1).T, len(v) // units).T.flatten()
    for name, where in rows:
        part = direction.setdefault(name, torch.zeros_like(truth.gradients[name]))
        part.view(-1)[where] = v[start : start + len(where)]
        start += len(where)

    def differences(step):
        both = [
            torch.cat([found[name].flatten()[where] for name, where in rows])
            for found in truth.product(direction, step)
        ]
        return both if method is None else [method.multiply_adjoint(w.view(units, -1).T).T.flatten() for w in both]

    return [(f"{layer.level} {layer.name} unit {unit} ({layer.route})", own, differences)]


def state_of(value, seen=None):
    """All that a model, or a nest of anything, holds, as plain values to compare: tensors, modes, generators, hooks."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        gradient = state_of(value.grad, seen) if value.is_leaf else None
        return id(value), value.dtype, value.requires_grad, value.detach().tolist(), gradient
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (list, tuple, set, Mapping, nn.Module)):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = f"number {len(seen)}"
    if isinstance(value, nn.Module):
        return type(value), state_of(vars(value), seen)
    if isinstance(value, Mapping):
        return [(key, state_of(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [state_of(item, seen) for item in value]
    return value

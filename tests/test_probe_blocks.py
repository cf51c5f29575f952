"""Every parameter has a block: embeddings, normalizations, packed attention, recurrent gates, bare parameters."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import Catalogue, Choice, Jacobi
from hesscond.hessians import OptimalDiagonal as Optimal
from hesscond.methods import parse
from tests.cases import CE, GPT, IDS, OTHERS, TARGETS, Conv1D, Piped, SelfAttention, case, other, split
from tests.truth import forward_over_reverse, reverse_over_reverse

ids = pytest.mark.parametrize("other_case", OTHERS, ids=lambda c: c.name)


@functools.cache
def whole_truth(name):
    """(n, n) Hessian in all parameters of a case, in the order of `named_parameters`, by forward over reverse."""
    model, loss_fn, (inputs, targets) = case(name).make()
    named = {key: p.detach() for key, p in model.named_parameters()}
    start = torch.cat([p.flatten() for p in named.values()])
    sizes = [p.numel() for p in named.values()]
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]

    def loss(theta):
        parts = {key: part.view(p.shape) for (key, p), part in zip(named.items(), theta.split(sizes), strict=True)}
        if not recurrent:
            return loss_fn(functional_call(model, parts, (inputs,)), targets)
        # they keep references to their weights, which functional_call does not replace
        twin = copy.deepcopy(model)
        for key, part in parts.items():
            owner, _, attribute = key.rpartition(".")
            module = twin.get_submodule(owner)
            del module._parameters[attribute]
            setattr(module, attribute, part)
        for module in twin.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, key) for key in module._flat_weights_names]
        return loss_fn(twin(inputs), targets)

    # the forward derivative of a lookup knows nothing of padding, whose row torch's gradient leaves out
    padded = any(getattr(module, "padding_idx", None) is not None for module in model.modules())
    with sdpa_kernel(SDPBackend.MATH):
        # nor have kernels of attention, cells and batch statistics forward derivatives
        with contextlib.suppress(RuntimeError, NotImplementedError, UserWarning):
            return (reverse_over_reverse if padded else forward_over_reverse)(loss, start)
        return reverse_over_reverse(loss, start)


def places(model):
    """By parameter, the numbers of its entries in the whole Hessian, in its shape."""
    found, start = {}, 0
    for key, p in model.named_parameters():
        found[key] = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
    return found


def is_transposed(model, key):
    return isinstance(model.get_submodule(key.rpartition(".")[0].partition(".parametrizations")[0]), Conv1D)


def rows_of(model, key, place, count):
    """The entries of a parameter by natural rows: (rows, width); None: its rows are not those of ``count`` units."""
    module = model.get_submodule(key.rpartition(".")[0].partition(".parametrizations")[0])
    if isinstance(module, nn.LayerNorm):
        place = place.flatten()
    elif is_transposed(model, key) and place.ndim == 2:
        place = place.T
    elif place.ndim > 2 and place.shape[0] == 1:
        place = place.squeeze(0)
        place = place.squeeze(0) if place.ndim > 2 and place.shape[0] == 1 else place
    place = place.reshape(1, 1) if not place.ndim else place.flatten(1) if place.ndim > 1 else place[:, None]
    return place if count in (None, len(place)) else None


def part_of(name, key, rows, E=4):
    """The rows of a parameter that the part of a name is: those of torch's packed attention."""
    letter = name.rpartition("[")[2][:1] if name.endswith("]") else ""
    if letter in ("q", "k", "v") and len(rows) == 3 * E:
        return rows["qkv".index(letter) * E :][:E], "qkv".index(letter) * E
    return rows, 0


def compare(found, expected):
    scale = max(float(expected.abs().max()), 1e-30)
    assert float((found - expected).abs().max()) <= 1e-10 * max(scale, 1e-3)


@ids
def test_every_unit_and_layer_of_every_block_is_that_of_the_dense_hessian(other_case):
    model, loss_fn, batch = other_case.make()
    truth, place = whole_truth(other_case.name), places(model)
    trained = {key for key, p in model.named_parameters() if p.requires_grad}

    layers = hesscond.probe(model, loss_fn, batch, "*", "layer")
    assert layers.skipped == {}
    seen = []
    for name, result in layers.items():
        assert result.check is not None
        assert result.check.passed
        parts = {key: part_of(name, key, rows_of(model, key, place[key], None))[0] for key in result.parameters}
        # a part keeps the order of its tensor, in which the rows of Conv1D are columns
        parts = {key: part.T if is_transposed(model, key) else part for key, part in parts.items()}
        index = torch.cat([(part if "[" in name else place[key]).flatten() for key, part in parts.items()])
        if isinstance(Catalogue(model).block(name).layer, nn.Module):
            # captured layers come unit by unit, [bias, weight]
            ordered = [place[key].flatten(1) if place[key].ndim > 1 else place[key][:, None] for key in
                       sorted(result.parameters, key=lambda key: not key.endswith("bias"))]  # fmt: skip
            index = torch.cat(ordered, 1).flatten()
        compare(result.hessian(), truth[index][:, index])
        seen.append(index)
        if result.kappa.resolved:
            values = torch.linalg.eigvalsh(truth[index][:, index]).abs()
            assert result.kappa.lambda_max == pytest.approx(float(values.max()), rel=1e-8)
    covered = torch.cat(seen)
    assert len(covered.unique()) == len(covered)
    assert set(covered.tolist()) >= {int(i) for key in trained for i in place[key].flatten()}

    units = hesscond.probe(model, loss_fn, batch, "*", "unit")
    seen = []
    for name, result in units.items():
        assert result.check.passed
        for unit in result.units:
            index = unit_entries(model, name, result, unit, place)
            compare(result.hessian(unit), truth[index][:, index])
            seen.append(index)
    covered = torch.cat(seen)
    assert len(covered.unique()) == len(covered)
    missing = {int(i) for key in trained for i in place[key].flatten()} - set(covered.tolist())
    # only rows of tables that are not looked up
    assert all(float(truth[i].abs().max()) == 0 for i in missing)


def unit_entries(model, name, result, unit, place):
    found = []
    for key in sorted(result.parameters, key=lambda key: "bias" not in key.rpartition(".")[2]):
        rows = rows_of(model, key, place[key], None)
        own, first = part_of(name, key, rows)
        # parts of a packed parameter count their units as it does
        number = unit - (first if len(own) < len(rows) else "qkv".find(name[-2]) * 4 if "_proj_weight" in key else 0)
        if len(own) in (count_of(model, name, result), len(result.units), 4 if "[" in name else -1):
            found.append(own[number])
    return torch.cat(found)


def count_of(model, name, result):
    return len(Catalogue(model).block(name).units)

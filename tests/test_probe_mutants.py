"""The capture broken on purpose: probing notices it, whatever is wrong, and would not without its check."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch

import hesscond
from hesscond.capture import DiagonalS, FactoredS, FormedH, capturing, curvature
from hesscond.capture.captured import LayerInputs, Request
from hesscond.capture.double_backward import SecondDerivatives
from hesscond.errors import CaptureError
from hesscond.hessians import HessianOperator, Preconditioner, streaming
from hesscond.hessians.linearization import GGNLinearization
from tests.catalogue import case
from tests.catalogue.cases import split
from tests.fuzzing import Sheared
from tests.truth import layer_truth, network_truth


def with_curvature(change):
    """Every curvature becomes ``change(request, curvature)``."""

    def patch(monkeypatch):
        usual = Request.finished
        monkeypatch.setattr(Request, "finished", lambda self, found, *rest: usual(self, change(self, found), *rest))

    return patch


def with_rows(change):
    """Every Ĥ becomes ``change(inputs, rows)``."""

    def patch(monkeypatch):
        usual = LayerInputs._rows
        monkeypatch.setattr(LayerInputs, "_rows", lambda self, *args: change(self, usual(self, *args)))

    return patch


def replacing(target, name, value):
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def roots(change):
    """``change`` of the root of S, or of the factor's rows, or of the matrices, whichever it is."""

    def changed(request, curvature):
        field = {DiagonalS: "root", FactoredS: "B", FormedH: "matrices"}[type(curvature)]
        return replace(curvature, **{field: change(request, getattr(curvature, field))})

    return with_curvature(changed)


def without_signs(request, curvature):
    return replace(curvature, sign=None) if isinstance(curvature, (DiagonalS, FactoredS)) else curvature


def without_negative_part(request, curvature):
    if not isinstance(curvature, DiagonalS) or curvature.sign is None:
        return curvature
    return replace(curvature, root=curvature.root * (curvature.sign > 0), sign=None)


def without_ones(inputs, rows):
    rows[..., 0] = 0
    return rows


def transposed_kernel(inputs, rows):
    h = rows[..., inputs.geometry.bias :].unflatten(-1, inputs.layer.weight.shape[1:])
    return torch.cat([rows[..., : inputs.geometry.bias], h.mT.flatten(-h.ndim + 3)], -1) if h.ndim > 4 else rows


def apart(request, B):
    """Rows of a factor, those of every unit for itself."""
    return (B[:, None] * torch.eye(B.shape[2])[:, None, :, None]).flatten(0, 1)


def without_first(inputs, rows):
    rows[0] = 0
    return rows


def with_factors(change):
    """Every factor becomes ``change(P, rows, units)``, where the block alone is built."""

    def each(cls, rows, systems, units, root=None):
        own = [change(P, part, units) for P, part in zip(systems, rows, strict=True)]
        return own if root is None else [part * by for part, by in zip(own, root, strict=True)]

    return replacing(Preconditioner, "multiplied_each", classmethod(each))


def first_call_only(*args):
    name, layer, calls, *rest = args
    return Request(name, layer, calls[:1], *rest)


def alike(streamed):
    """A stream's Hessians with every batch counting the same."""

    def changed(batches, memory, total, collect, **options):
        seen = []

        def counted():
            for captures, _ in batches:
                seen.append(captures)
                yield captures, 1.0

        return streamed(counted(), memory, lambda: float(len(seen)), collect, **options)

    return changed


def gauss_newton(self, evaluation, drawn):
    return GGNLinearization(evaluation, self.problem.snapshot.leaves, self.problem.loss_fn, self.problem.dtype)


@dataclass(frozen=True)
class Mutant:
    """A way to break the capture, and a case where that shows.

    Attributes
    ----------
    patch
        What breaks it.
    """

    patch: Callable
    case: str
    level: str = "unit"
    P: Preconditioner | None = None
    sizes: tuple[int, ...] = ()


only_layer_2 = roots(lambda request, root: root * (1.001 if request.name == "2" else 1))
MUTANTS = {
    "S of one layer scaled": Mutant(only_layer_2, "relu-ce"),
    "S of one layer scaled, whole layer": Mutant(only_layer_2, "tanh-ce", "layer"),
    "signs dropped": Mutant(with_curvature(without_signs), "tanh-ce"),
    "negative curvature dropped": Mutant(with_curvature(without_negative_part), "tanh-ce"),
    "signs dropped, whole layer": Mutant(with_curvature(without_signs), "gelu-mse", "layer"),
    "kernel transposed": Mutant(with_rows(transposed_kernel), "conv2d"),
    "kernel transposed, whole layer": Mutant(with_rows(transposed_kernel), "conv2d", "layer"),
    "no column of ones": Mutant(with_rows(without_ones), "relu-ce"),
    "batches weighted alike": Mutant(
        replacing(streaming, "stream", alike(streaming.stream)), "tanh-ce", sizes=(2, 5)
    ),
    "batches weighted alike, whole layer": Mutant(
        replacing(streaming, "stream", alike(streaming.stream)), "relu-ce", "layer", sizes=(2, 5)
    ),
    "own forward taken for the plain map": Mutant(replacing(capturing, "stock_class", type), "equalized"),
    "own forward taken for the plain map, whole layer": Mutant(
        replacing(capturing, "stock_class", type), "equalized", "layer"
    ),
    "tied layers taken for independent": Mutant(replacing(capturing, "tied_layers", lambda model: set()), "tied"),
    "second call ignored": Mutant(replacing(curvature, "Request", first_call_only), "siamese-tanh"),
    "activations of another sample": Mutant(with_rows(lambda inputs, rows: rows.roll(1, 0)), "relu-mse"),
    "S of another unit": Mutant(roots(lambda request, root: root.roll(1, -1)), "tanh-ce"),
    "P not applied": Mutant(with_factors(lambda P, rows, units: rows), "relu-ce", P=Sheared()),
    "P applied twice": Mutant(
        with_factors(lambda P, rows, units: P.multiplied(P.multiplied(rows, units), units)),
        "tanh-ce",
        "layer",
        P=Sheared(),
    ),
    "samples taken for independent": Mutant(
        replacing(SecondDerivatives, "is_apart", lambda self, request, blocks: True), "train-batchnorm-tanh-mse"
    ),
    "units taken for independent": Mutant(roots(apart), "relu-ce", "layer"),
    "Gauss-Newton": Mutant(replacing(HessianOperator, "_linearized", gauss_newton), "tanh-ce", "network"),
    "S in float32": Mutant(roots(lambda request, root: root.float().double()), "relu-ce"),
    "zeros": Mutant(roots(lambda request, root: 0 * root), "tanh-ce"),
    "a sample dropped": Mutant(with_rows(without_first), "sigmoid-ce"),
}  # fmt: skip


def farthest(mutant, result, model, loss_fn, batch):
    """The largest relative distance of a Hessian of the result from the dense truth."""
    distances = []
    for name, layer in result.items():
        truth = (
            network_truth(model, loss_fn, batch)
            if mutant.level == "network"
            else layer_truth(model, loss_fn, batch, name)
        )
        n = len(truth) if mutant.level != "unit" else layer.n_params
        for number, unit in enumerate(layer.units if mutant.level == "unit" else [None]):
            block = truth[number * n : (number + 1) * n, number * n : (number + 1) * n]
            if mutant.P is not None:
                units = 1 if mutant.level == "unit" else len(model.get_submodule(name).weight)
                P = torch.block_diag(*[mutant.P.matrix(n // units)] * units)
                block = P.T @ block @ P
            distances.append(float((layer.hessian(unit) - block).norm() / truth.norm()))
    return max(distances)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_capture_is_noticed(name, monkeypatch):
    mutant = MUTANTS[name]
    model, loss_fn, batch = case(mutant.case).make()

    def distance(**options):
        data = split(batch, mutant.sizes) if mutant.sizes else batch
        result = hesscond.probe(model, loss_fn, data, level=mutant.level, method=mutant.P, **options)
        return farthest(mutant, result, model, loss_fn, batch)

    assert distance(check=False) < 1e-10
    mutant.patch(monkeypatch)
    assert distance(check=False) > 1e-9
    with suppress(CaptureError):
        # what is not refused was measured in another way
        assert distance() < 1e-10

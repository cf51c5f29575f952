"""Formulas in place of functions of torch: values, gradients, and second derivatives against torch's own gradient."""

import math

import pytest
import torch
from torch.nn import functional as F

from hesscond.problem.formulas import FORMULAS

LABELS = torch.tensor([0, 3, 2, 3])
SEVERAL = torch.tensor([[2, -1, 0, 0], [1, 3, -1, 0], [-1, 0, 1, 2], [0, 1, 2, 3]])
BAGS = torch.tensor([[0, 1, 1], [2, 2, 3]])
FLAT, OFFSETS = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([0, 2, 2, 5])


def numbers(*shape):
    """Random numbers without ties and kinks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def ctc(x, targets, steps, lengths, **options):
    return F.ctc_loss(x.log_softmax(-1), targets, steps, lengths, **options)


CASES = {
    "hardsigmoid": (F.hardsigmoid, 3 * numbers(20)),
    **{
        f"cdist {p} {n}": (lambda x, p=p: torch.cdist(x, x[1:] ** 2 + 4, p), numbers(n, 3))
        for p in (1.0, 1.5, 2.0, 3.0, math.inf)
        for n in (4, 30)
    },
    "cdist of itself": (lambda x: torch.cdist(x, x), numbers(4, 3)),
    "cdist in batches": (lambda x: torch.cdist(x, x[:1] ** 2), numbers(2, 4, 3)),
    **{f"pdist {p}": (lambda x, p=p: F.pdist(x, p), numbers(5, 3)) for p in (1.0, 2.0, 2.5)},
    **{
        f"segments {reduce}": (
            lambda x, reduce=reduce: torch.segment_reduce(x, reduce, lengths=torch.tensor([1, 3, 2])),
            numbers(6, 2),
        )
        for reduce in ("sum", "mean", "max", "min", "prod")
    },
    "segments by offsets": (lambda x: torch.segment_reduce(x, "mean", offsets=torch.tensor([0, 2, 6])), numbers(6, 2)),
    **{
        f"bags {mode}": (lambda x, mode=mode: F.embedding_bag(BAGS, x, mode=mode), numbers(4, 3))
        for mode in ("sum", "mean", "max")
    },
    **{
        f"bags {mode} with offsets": (
            lambda x, mode=mode: F.embedding_bag(FLAT, x, OFFSETS, mode=mode, include_last_offset=True, padding_idx=1),
            numbers(4, 3),
        )
        for mode in ("sum", "mean", "max")
    },
    "bags with weights": (
        lambda x: F.embedding_bag(BAGS, x, mode="sum", per_sample_weights=x[2:, :3] ** 2),
        numbers(4, 3),
    ),
    **{
        f"multi margin {p} {reduction}": (
            lambda x, p=p, reduction=reduction: F.multi_margin_loss(
                x, LABELS, p=p, margin=0.7, weight=torch.tensor([1.0, 2, 3, 4]).double(), reduction=reduction
            ),
            numbers(4, 5)[:, :4],
        )
        for p in (1, 2)
        for reduction in ("mean", "sum", "none")
    },
    "multi margin of a sample": (lambda x: F.multi_margin_loss(x, LABELS[1], size_average=False), numbers(5)),
    "several labels": (lambda x: F.multilabel_margin_loss(x, SEVERAL, reduction="none"), numbers(4, 4)),
    "several labels, old": (lambda x: F.multilabel_margin_loss(x, SEVERAL, reduce=False), numbers(4, 4)),
    **{
        f"CTC {reduction}": (
            lambda x, reduction=reduction: ctc(
                x, torch.tensor([[1, 1, 2], [2, 3, 0], [0, 0, 0]]), (7, 5, 6), (3, 2, 0), reduction=reduction
            ),
            numbers(7, 3, 4),
        )
        for reduction in ("mean", "sum", "none")
    },
    "CTC, joined targets": (
        lambda x: ctc(x, torch.tensor([1, 2, 0, 1]), torch.tensor([5, 6]), torch.tensor([1, 3]), blank=3),
        numbers(6, 2, 4),
    ),
    "CTC, too short": (
        lambda x: ctc(x, torch.tensor([[1, 1, 1], [1, 2, 3]]), (4, 4), (3, 3), zero_infinity=True),
        numbers(4, 2, 4),
    ),
    "CTC of a sample": (lambda x: ctc(x, torch.tensor([1, 2]), (5,), (2,)), numbers(5, 4)),
}


class Formulas(torch.overrides.TorchFunctionMode):
    """Mode in which the formulas are called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return FORMULAS.get(func, func)(*args, **(kwargs or {}))


def gradient(function, x):
    """Weighted sum of the outputs and of their squares, and its gradient with a graph."""
    x = x.clone().requires_grad_()
    y = function(x)
    with torch.no_grad():
        weights = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    total = (weights * (y + y.square())).sum()
    return y, x, torch.autograd.grad(total, x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", CASES)
def test_formula(name):
    function, x = CASES[name]
    own, _, slope = gradient(function, x)
    with Formulas():
        y, at, g = gradient(function, x)
    assert torch.allclose(y, own, rtol=1e-12, atol=1e-14)
    # torch's gradient of the hard sigmoid has 1/6 in float32
    assert torch.allclose(g, slope, rtol=1e-7 if name == "hardsigmoid" else 1e-11, atol=1e-13)
    v, step = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 1e-5
    (product,) = torch.autograd.grad(g, at, v)
    plus, minus = (gradient(function, x + way * v)[2].detach() for way in (step, -step))
    central = (plus - minus) / (2 * step)
    assert float((product - central).norm()) <= 1e-7 * float(central.norm())
    assert float(central.norm()) > 0

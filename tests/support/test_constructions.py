"""The truths of the constructions are true, and the judge tells wrong, refused, unresolved and right apart."""

import pytest
import torch
from mpmath import mp

import hesscond
from tests.support.constructions import KINDS
from tests.support.judging import FormulaTruth, Spectrum, TwinTruth, verdict_of
from tests.support.kinds import double

WRONG_BACKWARD = [one for one in KINDS if one.trust == "A1"]
#: Their gradient itself is not that of the loss; its rounding steps.
OTHER_GRADIENTS = {"gradient_reversal", "gradient_tripled", "gradient_clipped", "straight_function", "tensor_hook"}
ZERO = [one for one in KINDS if one.trust == "A2" and not one.name.startswith(("curved", "norm_epsilon"))]


def measured(*values):
    return hesscond.condition_number(torch.diag(torch.tensor(values, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("kappa", "values", "error", "word"),
    [
        (measured(4.0, 2.0), [4.0, 2.0], 0.0, "right"),
        (measured(4.0, 2.0, 0.0), [4.0, 2.0, 0.0], 0.0, "right"),
        (measured(4.0, 2.0), [4.0, 1.9], 0.0, "wrong"),
        (measured(4.0, 2.0, 0.0), [4.0, 2.0, 1e-13], 0.0, "wrong"),
        (measured(4.0, 2.0, 1e-13), [4.0, 2.0, 0.0], 0.0, "wrong"),
        (measured(4.0, 2.0, 1e-13), [4.0, 2.0, 1e-14], 1e-12, "right"),
        (measured(4.0, -2.0), [4.0, 2.0], 0.0, "wrong"),
        (measured(4e-17, 2e-17), [0.0, 0.0], 0.0, "wrong"),
        (measured(0.0, 0.0), [0.0, 0.0], 0.0, "right"),
        (measured(0.0, 0.0), [4.0, 2.0], 0.0, "wrong"),
        (measured(4.0, 2.0).widened(3.0), [4.0, 2.0], 0.0, "unresolved"),
        (measured(4.0, 2.0).widened(3.0), [0.0, 0.0], 0.0, "unresolved"),
    ],
)
def test_the_verdict_on_a_condition_number(kappa, values, error, word):
    # what is below the error may be nonzero
    assert verdict_of(kappa, Spectrum(values, error, len(values) if error else None)).word == word


def test_a_formula_has_the_hessian_of_automatic_differentiation():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).double()
    x = torch.randn(5, 3).double()

    def formula(own, rows):
        z = rows @ own["0.weight"].T + own["0.bias"]
        return sum(mp.sin(one) * one for one in z.flat) / z.size

    truth = FormulaTruth(model, formula, x)
    own = hesscond.probe(model, lambda o, t: (o.sin() * o).mean(), (x, torch.zeros(5)), level="layer")["0"]
    twin = TwinTruth(double(model), lambda o, t: (o.sin() * o).mean(), (x, torch.zeros(5)))
    values = torch.tensor([float(value) for value in truth.spectrum(own, None).values], dtype=torch.float64)
    dense = torch.linalg.eigvalsh(twin.matrix)
    assert torch.allclose(values.sort().values, dense, rtol=1e-10, atol=1e-12)


def gradient(model, loss_fn, batches, moves):
    """The gradient of a float64 model with its parameters moved, as its author would take it."""
    parameters, total = [p for p in model.parameters() if p.requires_grad], 0
    with torch.no_grad():
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
    for x, y in batches:
        found = torch.autograd.grad(loss_fn(model(x), y), parameters)
        total = total + len(x) * torch.cat([g.flatten() for g in found])
    with torch.no_grad():
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
    return total / sum(len(x) for x, _ in batches)


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("one", WRONG_BACKWARD, ids=lambda one: one.name)
def test_the_truth_of_a_wrong_backward_is_the_difference_of_its_gradients(one):
    if one.name in OTHER_GRADIENTS:
        pytest.skip("the gradient itself is not that of the loss")
    torch.manual_seed(0)
    model, loss_fn, batch = one.make()
    truth = one.truth(model, loss_fn, batch)
    model = model.double()
    batches = [
        tuple(t.double() if t.is_floating_point() else t for t in pair)
        for pair in (batch if isinstance(batch, list) else [batch])
    ]
    v = [torch.randn(p.shape, dtype=torch.float64) for p in model.parameters() if p.requires_grad]
    ends = [gradient(model, loss_fn, batches, [step * move for move in v]) for step in (-1e-5, 1e-5)]
    differences = (ends[1] - ends[0]) / 2e-5
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    product = truth.at(truth.flat(names)) @ torch.cat([move.flatten() for move in v])
    assert (differences - product).norm() <= 1e-6 * product.norm()


@pytest.mark.slow
@pytest.mark.share(3)
@pytest.mark.parametrize("one", ZERO, ids=lambda one: one.name)
def test_the_loss_does_not_depend_on_what_is_called_zero_to_second_order(one):
    torch.manual_seed(0)
    model, loss_fn, batch = one.make()
    options = [one.options(model, loss_fn, batch)] if callable(one.options) else []
    truth = one.truth(model, loss_fn, batch, *options)
    batches = batch if isinstance(batch, list) else [batch]
    model = model.double()
    own = dict(model.named_parameters())
    others = [p for name, p in own.items() if name not in truth.zero]

    def loss(step):
        """The loss, and its gradient in the other parameters, with the zero ones moved."""
        torch.manual_seed(1)
        with torch.no_grad():
            for name in sorted(truth.zero):
                own[name].add_(step * torch.randn(own[name].shape, dtype=torch.float64))
        total = 0
        for x, y in batches:
            x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
            total = total + loss_fn(model(x), y)
        slopes = torch.autograd.grad(total, others, allow_unused=True, materialize_grads=True) if others else []
        torch.manual_seed(1)
        with torch.no_grad():
            for name in sorted(truth.zero):
                own[name].sub_(step * torch.randn(own[name].shape, dtype=torch.float64))
        return torch.cat([total.detach().view(1), *(slope.flatten() for slope in slopes)])

    assert truth.zero
    h = 1e-3
    below, middle, above = loss(-h), loss(0.0), loss(h)
    # of two terms of size 1, or as large as it is
    size = max(float(middle.abs().max()), 1.0 if one.name in ("opposed_samples", "two_formulas") else 0.0)
    assert abs(float((above + below - 2 * middle)[0])) <= 1e-13 * size + 1e-12 * abs(float(middle[0]))
    assert float((above - below)[1:].abs().max() if others else 0.0) <= 1e-11 * max(size, 1e-30)

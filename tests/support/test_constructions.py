"""The truths of the constructions are true: finite differences of the gradient, and losses that do not change."""

import pytest
import torch

from tests.support.constructions import KINDS

WRONG_BACKWARD = [one for one in KINDS if one.trust == "A1"]
#: Their gradient itself is not that of the loss; its rounding steps.
OTHER_GRADIENTS = {"gradient_reversal", "gradient_tripled", "gradient_clipped", "straight_function", "tensor_hook"}
ZERO = [one for one in KINDS if one.trust == "A2" and not one.name.startswith(("curved", "norm_epsilon"))]


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

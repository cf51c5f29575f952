import math

import mpmath
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hesscond.capture.curved import curved_nodes
from hesscond.capture.second_derivatives import saturates
from hesscond.problem.evaluation import WeightWatch
from hesscond.problem.graph import nodes

N, C, T = 4, 3, 2
generator = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


Y = torch.tensor([2, 0, 1, 2])
Y_SEQ = torch.tensor([[2, 0], [1, 1], [0, 2], [2, 2]])
Y_IMAGE = torch.randint(0, C, (N, 2, 2), generator=generator)
VALUES, OTHER = normal(N, C), normal(N, C)
Q = torch.softmax(normal(N, C), 1)
BINARY = (normal(N, C) > 0).double()
SAMPLE_WEIGHTS = torch.tensor([0.5, 2.0, 0.1, 1.0], dtype=torch.float64)
CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
POSITIVE = normal(N, C).abs() + 0.1
MASK = VALUES > 0
ROWS = torch.arange(N)
F = functional


def cross_entropy(**options):
    return lambda o: F.cross_entropy(o, Y, **options)


def penalized(o):
    log_p = F.log_softmax(o, 1)
    return F.nll_loss(log_p, Y) + 0.3 * F.mse_loss(o, VALUES) - 0.1 * o.mean()


def double_head(o):
    first, second = {"a": o[:, :2], "b": o[:, 2]}.values()
    return 2 * F.cross_entropy(first, Y % 2) + F.mse_loss(second, VALUES[:, 2])


def by_slices(o):
    parts = torch.stack([F.cross_entropy(o[i], Y[i]) for i in range(N)])
    return (parts * SAMPLE_WEIGHTS).sum()


def dot(o):
    flat = o.flatten()
    return 0.5 * (flat @ flat) + torch.dot(o[0], VALUES[0])


#: name: (loss, shape of its argument)
LOSSES = {
    "ce": (cross_entropy(), (N, C)),
    "ce-probabilities": (lambda o: F.cross_entropy(o, Q, label_smoothing=0.1, weight=CLASS_WEIGHTS), (N, C)),
    "ce-module": (lambda o: nn.CrossEntropyLoss()(3 * o + 1, Y), (N, C)),
    "ce-sample-weights": (lambda o: (F.cross_entropy(o, Y, reduction="none") * SAMPLE_WEIGHTS).mean(), (N, C)),
    "ce-negative-weights": (
        lambda o: (F.cross_entropy(o, Y, reduction="none") * (SAMPLE_WEIGHTS - 0.3)).sum() / 3,
        (N, C),
    ),
    "ce-by-slices": (by_slices, (N, C)),
    "ce-single": (lambda o: F.cross_entropy(o, torch.tensor(1)), (C,)),
    "ce-first-dim": (lambda o: F.cross_entropy(o.T, torch.tensor([0, 3, 1])), (N, C)),
    "sequence-view": (lambda o: F.cross_entropy(o.view(-1, C), Y_SEQ.view(-1)), (N, T, C)),
    "sequence-transpose": (lambda o: F.cross_entropy(o.transpose(1, 2), Y_SEQ, label_smoothing=0.1), (N, T, C)),
    "volume": (lambda o: F.cross_entropy(o[..., None], Y_IMAGE[..., None]), (N, C, 2, 2)),
    "nll-of-log-softmax": (lambda o: F.nll_loss(nn.LogSoftmax(-1)(o), Y), (N, C)),
    "log-of-softmax": (lambda o: F.nll_loss(torch.log(torch.softmax(o, 1)), Y), (N, C)),
    "log-softmax-indexed": (lambda o: -F.log_softmax(o, -1)[ROWS, Y].mean(), (N, C)),
    "log-softmax-gathered": (lambda o: -F.log_softmax(o, -1).gather(1, Y[:, None]).mean(), (N, C)),
    "policy-gradient": (lambda o: -(F.log_softmax(o, 1)[ROWS, Y] * VALUES[:, 0]).mean(), (N, C)),
    "kl": (lambda o: F.kl_div(F.log_softmax(o, 1), Q, reduction="batchmean"), (N, C)),
    "logsumexp": (lambda o: (torch.logsumexp(o, 1) - o[ROWS, Y]).mean(), (N, C)),
    "logsumexp-keepdim": (lambda o: (torch.logsumexp(o, -1, keepdim=True) - o)[ROWS, Y].mean(), (N, C)),
    "logsumexp-image": (lambda o: (-torch.logsumexp(o, 1) * SAMPLE_WEIGHTS[:, None, None]).sum(), (N, C, 2, 2)),
    "mse": (lambda o: F.mse_loss(o, VALUES), (N, C)),
    "mse-swapped": (lambda o: F.mse_loss(VALUES, o), (N, C)),
    "mse-weighted": (lambda o: (F.mse_loss(o, VALUES, reduction="none").sum(1) * SAMPLE_WEIGHTS).mean(), (N, C)),
    "mse-scalar": (lambda o: F.mse_loss(o.sum(), torch.tensor(1.0, dtype=torch.float64)), (N, C)),
    "mse-broadcast": (lambda o: torch.ops.aten.mse_loss(o, VALUES[:1]), (N, C)),
    "power-2": (lambda o: ((o - VALUES) ** 2).mean(), (N, C)),
    "square": (lambda o: (o - VALUES).square().sum(1).mean(), (N, C)),
    "power-3": (lambda o: (o**3).mean(), (N, C)),
    "power-4": (lambda o: ((VALUES - o) ** 4).mean(), (N, C)),
    "power-1": (lambda o: (o**1).mean() + (o**0).mean(), (N, C)),
    "power-1.5": (lambda o: ((o.abs() + 0.1) ** 1.5).mean(), (N, C)),
    "power-negative": (lambda o: (o**-3).mean(), (N, C)),
    "product-same": (lambda o: -(o * o).mean(), (N, C)),
    "product-difference": (lambda o: ((o - VALUES) * (o - VALUES)).mean(), (N, C)),
    "product-two-differences": (lambda o: ((1 - o) * (2 - o)).mean(), (N, C)),
    "dot": (dot, (N, C)),
    "bce-logits": (lambda o: F.binary_cross_entropy_with_logits(o, BINARY), (N, C)),
    "bce-logits-weighted": (
        lambda o: F.binary_cross_entropy_with_logits(
            o, Q, weight=SAMPLE_WEIGHTS[:, None], pos_weight=CLASS_WEIGHTS, reduction="sum"
        ),
        (N, C),
    ),
    "bce-logits-none": (lambda o: F.binary_cross_entropy_with_logits(o, Q, reduction="none").sum(1).mean(), (N, C)),
    "bce": (lambda o: F.binary_cross_entropy((0.2 * o + 0.5).clamp(0.01, 0.99), Q, weight=CLASS_WEIGHTS), (N, C)),
    "multilabel": (lambda o: F.multilabel_soft_margin_loss(o, BINARY), (N, C)),
    "soft-margin": (lambda o: F.soft_margin_loss(o, 2 * BINARY - 1), (N, C)),
    "softplus": (lambda o: F.softplus(9 * o, beta=2.0, threshold=5).mean(), (N, C)),
    "log-sigmoid": (lambda o: -F.logsigmoid(o * (2 * BINARY - 1)).mean(), (N, C)),
    "huber": (lambda o: F.huber_loss(o, VALUES, delta=0.7), (N, C)),
    "huber-kink": (lambda o: F.huber_loss(o, o.detach() + 0.5 * BINARY, delta=0.5), (N, C)),
    "smooth-l1": (lambda o: F.smooth_l1_loss(VALUES, o, beta=0.7, reduction="sum"), (N, C)),
    "smooth-l1-kink": (lambda o: F.smooth_l1_loss(o, o.detach() + 0.5 * BINARY, beta=0.5), (N, C)),
    "poisson-log": (lambda o: F.poisson_nll_loss(o, POSITIVE), (N, C)),
    "poisson": (lambda o: F.poisson_nll_loss(o.abs() + 0.1, POSITIVE, log_input=False), (N, C)),
    "gaussian": (lambda o: F.gaussian_nll_loss(o, VALUES, POSITIVE), (N, C)),
    "squared-hinge": (lambda o: F.relu(1 - o * (2 * BINARY - 1)).square().mean(), (N, C)),
    "masked": (lambda o: ((o - VALUES)[MASK] ** 2).mean() + torch.where(MASK, o, o.exp()).mean(), (N, C)),
    "clamped": (lambda o: F.cross_entropy(o, Y, reduction="none").clamp(min=0.8).mean(), (N, C)),
    "hardest": (lambda o: F.cross_entropy(o, Y, reduction="none").topk(2)[0].mean(), (N, C)),
    "worst": (lambda o: F.cross_entropy(o, Y, reduction="none").max(), (N, C)),
    "penalized": (penalized, (N, C)),
    "two-heads": (double_head, (N, C)),
    "l1": (lambda o: F.l1_loss(o, VALUES), (N, C)),
    "linear": (lambda o: (o * VALUES).sum() / 7, (N, C)),
    "relu-net": (lambda o: F.cross_entropy(F.linear(F.relu(o), VALUES.T @ OTHER), Y), (N, C)),
    "linear-net-poisson": (lambda o: F.poisson_nll_loss(F.linear(F.relu(o), VALUES.T @ OTHER), POSITIVE), (N, C)),
}


def argument(name):
    seed = torch.Generator().manual_seed(len(name))
    return torch.randn(*LOSSES[name][1], generator=seed, dtype=torch.float64).requires_grad_()


def true_hessian(loss_fn, o):
    H = torch.autograd.functional.hessian(loss_fn, o.detach())
    return H.reshape(o.numel(), o.numel())


def rebuilt(nodes, o, blocks):
    """Σ_k J_kᵀ S_k J_k with each row of each block of the factors taken back to ``o`` on its own."""
    H = torch.zeros(o.numel(), o.numel(), dtype=torch.float64)
    for node in nodes:
        passes, signs = node.passes(blocks), node.signs(blocks)
        assert signs is None or (signs.shape == (passes, blocks) and (signs.abs() == 1).all())
        cut = passes // 2
        B = torch.cat([node.factor(0, cut, blocks), node.factor(cut, passes, blocks)])
        assert B.shape == (passes, *node.shape)
        assert B.dtype == torch.float64
        for r, row in enumerate(B):
            for j, keep in enumerate(torch.ones(node.shape.numel()).reshape(blocks, -1)):
                chosen = torch.zeros(blocks, len(keep), dtype=torch.float64)
                chosen[j] = row.reshape(blocks, -1)[j]
                (v,) = torch.autograd.grad(
                    [node.edge], o, [chosen.reshape(node.shape).to(node.dtype)], retain_graph=True
                )
                H += (1 if signs is None else signs[r, j]) * torch.outer(v.flatten(), v.flatten())
    return H


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LOSSES)
def test_hessian_of_the_loss_from_its_factors(name):
    loss_fn, o = LOSSES[name][0], argument(name)
    truth = true_hessian(loss_fn, o)
    nodes = curved_nodes(loss_fn(o))
    assert nodes is not None
    # torch divides by p (1 - p) + 1e-12 or so in second derivatives of this one
    tolerance = 1e-10 if name == "bce" else 1e-12
    assert (rebuilt(nodes, o, 1) - truth).abs().max() <= tolerance * truth.abs().max()
    for node in nodes:
        if node.class_dim != 0 and node.shape and node.shape[0] % N == 0:
            dense = [node_hessian(node, blocks) for blocks in (1, N)]
            assert (dense[0] - dense[1]).abs().max() <= 1e-15 * dense[0].abs().max()


def node_hessian(node, blocks):
    """S as a matrix, from its factor."""
    passes, signs = node.passes(blocks), node.signs(blocks)
    B = node.factor(0, passes, blocks).reshape(passes, blocks, -1)
    s = torch.ones(passes, blocks, dtype=torch.float64) if signs is None else signs
    return torch.block_diag(*torch.einsum("rj,rje,rjf->jef", s, B, B))


@pytest.mark.parametrize("name", LOSSES)
def test_entries_are_the_diagonal(name):
    nodes = curved_nodes(LOSSES[name][0](argument(name)))
    for node in nodes:
        roots, signs = node.entry_roots(), node.entry_signs()
        assert roots.shape == node.shape
        assert roots.dtype == torch.float64
        d = roots.square() * (1 if signs is None else signs)
        S = node_hessian(node, 1)
        assert (d.flatten() - S.diag()).abs().max() <= 1e-14 * S.abs().max()


def test_differences_of_log_probabilities_have_no_curvature():
    o = argument("ce")
    contrast = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    (node,) = curved_nodes((F.log_softmax(o, 1) * contrast).sum())
    assert not node.entry_roots().any()


def test_one_node_reached_along_two_branches():
    o = argument("ce")
    log_p = F.log_softmax(o, 1)
    (node,) = curved_nodes(F.nll_loss(log_p, Y) + 3 * F.nll_loss(log_p, Y, reduction="sum"))
    assert torch.allclose(node.weight, torch.full((N,), 3.25, dtype=torch.float64))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o: o.relu().pow(2).sum() * o.sum(),
        lambda o: (o.relu().pow(2) * o.sum()).sum(),
        lambda o: torch.linalg.norm(o),
        lambda o: (o[:, 0] * o[:, 1]).sum(),
        lambda o: (o * o.detach().requires_grad_()).sum(),
        lambda o: ((o - VALUES) * (2 * o - VALUES)).sum(),
        lambda o: F.mse_loss(o, o.detach().requires_grad_()),
        lambda o: F.cross_entropy(o, Y) + o.var(),
        lambda o: torch.exp(F.cross_entropy(o, Y, reduction="none") * o[:, 0]).mean() * F.cross_entropy(o, Y),
        lambda o: 1 / F.cross_entropy(o, Y),
        lambda o: (torch.softmax(o, 1)[:, 0] * o.sum()).sum(),
        lambda o: torch.softmax(o, 1)[:, 0].sum(),
        lambda o: torch.logsumexp(o, (0, 1)),
        lambda o: torch.ops.aten.mse_loss(o[:1], VALUES),
    ],
)
def test_unknown_losses(loss_fn):
    assert curved_nodes(loss_fn(argument("ce"))) is None


def test_functions_hidden_by_writing_in_place_are_unknown():
    z = 1.0 * argument("ce")
    z[:, 0].exp_()
    assert curved_nodes(z.sum()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_graphs_give_rows_in_double(dtype):
    o = argument("ce").detach().to(dtype).requires_grad_()
    for loss in (F.cross_entropy(2 * o, Y), F.binary_cross_entropy_with_logits(2 * o, BINARY.to(dtype))):
        (node,) = curved_nodes(loss)
        assert node.dtype == dtype
        assert node.factor(0, 2, N).dtype == torch.float64
    (node,) = curved_nodes(F.cross_entropy(o, Y))
    assert (node.log_p.logsumexp(1)).abs().max() < 1e-14


def test_classes_that_are_masked_out():
    o = argument("ce")
    masked = o.masked_fill(torch.tensor([False, False, True]), -math.inf)
    (node,) = curved_nodes(F.cross_entropy(masked, Y % 2))
    (reduced,) = curved_nodes(F.cross_entropy(o[:, :2], Y % 2))
    B = node.factor(0, 2, N)
    assert torch.equal(B[0, :, :2], reduced.factor(0, 1, N)[0])
    assert not B[1].any()
    assert torch.allclose(node.entry_roots()[:, :2], reduced.entry_roots(), rtol=1e-15)
    assert not node.entry_roots()[:, 2].any()


def relative_error(value, truth):
    """Largest relative error of entries above the range of float64, the others being checked to be tiny."""
    worst = mpmath.mpf(0)
    for v, t in zip(value.flatten().tolist(), truth, strict=True):
        if t > 1e-300:
            worst = max(worst, abs(v - t) / t)
        else:
            assert v <= 1e-299
    return worst


@pytest.mark.parametrize("gap", [0.5, 50, 300, 800])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_saturated_softmax(gap, order):
    levels = [0.0, -gap, -gap - 1.25, 0.25 - 0.5 * gap]
    z = torch.tensor([[levels[i] for i in order]], dtype=torch.float64, requires_grad=True)
    (node,) = curved_nodes(0.3 * F.cross_entropy(z, torch.tensor([0])))
    with mpmath.workdps(900):
        weights = [mpmath.exp(mpmath.mpf(x)) for x in z[0].tolist()]
        p = [w / mpmath.fsum(weights) for w in weights]
        truth = [mpmath.sqrt(mpmath.mpf(0.3) * q * (1 - q)) for q in p]
        assert relative_error(node.entry_roots(), truth) < 1e-12
        B = node.factor(0, 3, 1)[:, 0]
        assert relative_error(torch.hypot(torch.hypot(B[0], B[1]), B[2]), truth) < 1e-12
        for i in range(4):
            for j in range(i):
                entry = mpmath.fsum(mpmath.mpf(x) * mpmath.mpf(y) for x, y in B[:, [i, j]].tolist())
                assert abs(entry + mpmath.mpf(0.3) * p[i] * p[j]) <= 1e-12 * truth[i] * truth[j]


@pytest.mark.parametrize("gap", [0.5, 50, 300, 800, -50, -300, -800])
def test_saturated_logistic(gap):
    z = torch.tensor([float(gap)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    losses = [F.binary_cross_entropy_with_logits(z, one), -F.logsigmoid(z).sum(), F.soft_margin_loss(z, one)]
    with mpmath.workdps(900):
        e = mpmath.exp(mpmath.mpf(gap))
        truth = [mpmath.sqrt(e) / (1 + e)]
        for loss in losses:
            (node,) = curved_nodes(loss)
            assert relative_error(node.entry_roots(), truth) < 1e-15
            assert node.signs(1) is None


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from(["mean", "sum", "none"]),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_cross_entropy_with_any_options(samples, classes, extra, reduction, smoothing, weighted, ignore, soft, seed):
    g = torch.Generator().manual_seed(seed)
    shape = (samples, classes, *(2,) * extra)
    o = (3 * torch.randn(*shape, generator=g, dtype=torch.float64)).requires_grad_()
    target = torch.softmax(torch.randn(*shape, generator=g, dtype=torch.float64), 1)
    if not soft:
        target = torch.randint(0, classes, (samples, *shape[2:]), generator=g)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    if weighted:
        options["weight"] = torch.rand(classes, generator=g, dtype=torch.float64) + 0.01
    if ignore and not soft:
        options["ignore_index"] = classes - 1
        target.view(-1)[0] = 0  # the mean over no sample at all is NaN

    def loss_fn(output):
        loss = F.cross_entropy(output, target, **options)
        ramp = torch.linspace(-1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape)
        return (loss * ramp).sum() if reduction == "none" else loss

    if classes == 1 and ignore and not soft:
        options["ignore_index"] = -100
    nodes = curved_nodes(loss_fn(o))
    truth = true_hessian(loss_fn, o)
    for blocks in {1, samples}:
        assert (rebuilt(nodes, o, blocks) - truth).abs().max() <= 1e-12 * truth.abs().max() + 1e-15


HIDDEN = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
MOST = torch.finfo(torch.float64).min


def shift(value):
    """A mask that is added."""
    return torch.zeros(3, 3, dtype=torch.float64).masked_fill(HIDDEN, value)


@pytest.mark.parametrize(
    ("hide", "gap", "expected"),
    [
        (lambda z: z.masked_fill(HIDDEN, -math.inf), 1.0, False),
        (lambda z: torch.where(HIDDEN, -math.inf, z), 1.0, False),
        (lambda z: torch.where(~HIDDEN, z, -math.inf), 1.0, False),
        (lambda z: z.masked_fill(HIDDEN[None], MOST), 1.0, False),
        (lambda z: z.masked_fill(HIDDEN, -1000.0), 1.0, False),
        # added to them, in all ways, and behind something else
        (lambda z: z + shift(-math.inf), 1.0, False),
        (lambda z: shift(MOST)[None] + z, 1.0, False),
        (lambda z: z + shift(-1e9), 1.0, False),
        (lambda z: torch.add(z, shift(-1e4)), 1.0, False),
        (lambda z: z - shift(1e9), 1.0, False),
        (lambda z: z.clone().add_(shift(-1e9)), 1.0, False),
        (lambda z: z + (0.1 * z + shift(-1e9)), 1.0, False),
        (lambda z: (z + shift(-math.inf)).view(6, 3), 1.0, False),
        # a probability of 1 - e^-40 is rounded to 1, one of e^-800 to 0
        (lambda z: z.masked_fill(HIDDEN, -math.inf), 40.0, True),
        (lambda z: z.masked_fill(HIDDEN, -math.inf), 800.0, True),
        (lambda z: z + shift(-math.inf), 800.0, True),
        (lambda z: z + shift(-1e9), 40.0, True),
        (lambda z: torch.where(HIDDEN, z - 800, z), 1.0, True),
        # what is small by itself, or by no constant, is no mask
        (lambda z: z + shift(-1000.0), 1.0, True),
        (lambda z: z - 1e5 * (z - z.detach() + 1) * HIDDEN, 1.0, True),
        (lambda z: z + shift(-1e9) * z.sum(), 1.0, True),
        (lambda z: z, 1e5, True),
        (lambda z: z, 800.0, True),
        (lambda z: z, 1.0, False),
    ],
)
def test_what_a_mask_hides_is_not_saturated(hide, gap, expected):
    z = torch.tensor([0.0, -1.0, 0.5], dtype=torch.float64).mul(gap).expand(2, 3, 3).clone().requires_grad_()
    with WeightWatch({}):
        p = hide(z).softmax(-1)
    assert bool(saturates([p.grad_fn])) == expected


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": ~HIDDEN}, {"attn_mask": shift(-math.inf)}, {"attn_mask": shift(-1e9)}],
)
def test_masks_of_attention(options, size):
    q, k, v = torch.randn(3, 2, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with WeightWatch({}), sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention((size * q).requires_grad_(), size * k, v, **options)
    graph = list(nodes([out.grad_fn]))
    assert "SafeSoftmaxBackward0" in {node.name() for node in graph}
    assert bool(saturates(graph)) == (size > 1)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", [HIDDEN, shift(-math.inf), shift(-1e9)])
def test_masks_of_a_module_of_attention(weights, mask):
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(4, 2, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    padding = torch.tensor([[False, True, False], [False, False, False]])
    for hidden in (None, padding if mask.dtype == torch.bool else padding.double() * -1e9):
        with WeightWatch({}), sdpa_kernel(SDPBackend.MATH):
            out, _ = module(x, x, x, attn_mask=mask, key_padding_mask=hidden, need_weights=weights)
        assert not saturates(nodes([out.grad_fn]))

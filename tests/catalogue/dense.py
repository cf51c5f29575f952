"""Dense networks, tried at all levels."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue import parts
from tests.catalogue.cases import grid
from tests.catalogue.parts import CE, MSE, Drawn, Net, labelled, paired, valued

dense = functools.partial(grid, "Dense networks")
mlp = functools.partial(parts.mlp, sizes=(5, 6, 4, 3))
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def residual(activation):
    """Two dense layers around a skip connection."""

    def forward(m, x):
        h = m.activation(m.first(x))
        return m.last(h + m.activation(m.inner(h)))

    return Net(forward, first=nn.Linear(5, 4), inner=nn.Linear(4, 4), last=nn.Linear(4, 3), activation=activation)


def two_inputs():
    """A shared trunk with two inputs, as keyword or positional arguments."""
    parts = {"left": nn.Linear(3, 4), "right": nn.Linear(2, 4), "head": nn.Linear(4, 3)}
    return Net(lambda m, a, b: m.head(torch.relu(m.left(a) + m.right(b))), **parts)


def gated():
    """The product of two layers: linear in each of them, bilinear in both."""
    parts = {"a": nn.Linear(5, 4), "b": nn.Linear(5, 4), "head": nn.Linear(4, 3)}
    return Net(lambda m, x: m.head(m.a(x) * m.b(x)), **parts)


def piecewise_linear():
    """Maxout, absolute values, clamps and sorting: kinks, but no curvature."""

    def forward(m, x):
        h = m.first(x).view(-1, 3, 2).amax(2)
        h = F.hardtanh(m.middle(h.abs()), -1.5, 1.5)
        return m.last(torch.cat([h[:, :2].sort(1).values, torch.maximum(h[:, 2:], 0.3 * h[:, :2])], 1))

    return Net(forward, first=nn.Linear(5, 6), middle=nn.Linear(3, 4), last=nn.Linear(4, 3))


def control_flow():
    """Python branches on the inputs' and on the activations' values, and a loop."""

    def forward(m, x):
        h = torch.tanh(m.first(x))
        for _ in range(2 if float(x.sum()) > 0 else 1):
            h = h + 0.5 * torch.sin(h)
        chosen = m.positive if float(h.detach().abs().max()) > 1e-3 else m.negative
        return m.head(torch.relu(chosen(h)))

    parts = {"first": nn.Linear(5, 4), "positive": nn.Linear(4, 4), "negative": nn.Linear(4, 4)}
    return Net(forward, **parts, head=nn.Linear(4, 3))


def heads(pack, activation=torch.relu):
    """A shared trunk with two heads, whose outputs come as a tuple or a dict."""

    def forward(m, x):
        h = activation(m.trunk(x))
        return pack(m.logits(h), m.value(h))

    return Net(forward, trunk=nn.Linear(5, 4), logits=nn.Linear(4, 3), value=nn.Linear(4, 2))


def mixed_inputs():
    """Integer tokens through an embedding, and real features."""

    def forward(m, tokens, x):
        return m.head(torch.relu(m.first(torch.cat([m.embedding(tokens).mean(1), x], 1))))

    return Net(forward, embedding=nn.Embedding(6, 3), first=nn.Linear(5, 4), head=nn.Linear(4, 3))


def spare():
    """Two layers that no input reaches, and frozen ones."""
    parts = {"body": mlp(nn.ReLU()), "spare": nn.Linear(5, 3), "deep": nn.Sequential(nn.Conv2d(1, 2, 3))}
    model = Net(lambda m, x: m.body(x), **parts)
    model.body[0].requires_grad_(False)
    model.body[2].bias.requires_grad_(False)
    return model


def mean_of_squares_with_tanh(output, target):
    """Not convex in the output."""
    return (torch.tanh(output) - target).square().mean()


def squares_by_hand(output, target):
    return ((output - target) ** 2).sum(1).mean()


def weighted_samples(output, target):
    label, weight = target
    return (F.cross_entropy(output, label, reduction="none") * weight).mean()


def two_tasks(output, target):
    """For the tuple (logits, value) and the targets (label, number)."""
    return F.cross_entropy(output[0], target[0]) + 0.5 * F.mse_loss(output[1], target[1])


def two_tasks_by_name(output, target):
    return F.cross_entropy(output["logits"], target["label"]) + 0.5 * F.mse_loss(output["value"], target["number"])


def first_task_only(output, target):
    return F.cross_entropy(output[0], target)


def gaussian(output, target):
    """Mean and log-variance from the two heads."""
    mean, log_variance = output[0][:, :2], output[1]
    return F.gaussian_nll_loss(mean, target, F.softplus(log_variance) + 0.1)


def with_target(target):
    """Features, and targets that ``target`` draws."""
    draw = Drawn()
    return draw.normal(7, 5), target(draw)


def probabilities():
    return with_target(lambda draw: draw.normal(7, 3).softmax(1))


def labels_and_weights():
    return with_target(lambda draw: (draw.integers(3, 7), draw.normal(7).abs()))


def zeros_and_ones():
    return with_target(lambda draw: (draw.normal(7, 3) > 0).float())


def counts():
    return with_target(lambda draw: draw.integers(4, 7, 3).float())


def label_and_number(named=False):
    x, pair = with_target(lambda draw: (draw.integers(3, 7), draw.normal(7, 2)))
    return x, dict(zip(("label", "number"), pair, strict=True)) if named else pair


def integers_and_reals():
    draw = Drawn()
    return {"tokens": draw.integers(6, 7, 2), "x": draw.normal(7, 2)}, draw.integers(3, 7)


dense("relu-inplace-ce", lambda: (mlp(nn.ReLU(inplace=True)), CE, labelled(5)), psd=True)
dense("leaky-ce-sum", lambda: (mlp(nn.LeakyReLU(0.1)), nn.CrossEntropyLoss(reduction="sum"), labelled(5)), psd=True)
dense("relu-ce-smoothed", lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(label_smoothing=0.2), labelled(5)), psd=True)
dense("relu-ce-weighted",
    lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), labelled(5)),
    psd=True)  # fmt: skip
dense("relu-ce-ignored", lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(ignore_index=1), labelled(5)), psd=True)
dense("relu-ce-weighted-ignored",
    lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2), labelled(5, n=13)),
    psd=True)  # fmt: skip
dense("relu-ce-sum-ignored",
    lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2, reduction="sum"),
             labelled(5)), psd=True)  # fmt: skip
dense("relu-ce-probabilities", lambda: (mlp(nn.ReLU()), CE, probabilities()), psd=True)
dense("relu-ce-probabilities-weighted",
    lambda: (mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), probabilities()),
    psd=True)  # fmt: skip
dense("relu-ce-functional", lambda: (mlp(nn.ReLU()), F.cross_entropy, labelled(5)), psd=True)
dense("relu-ce-lambda", lambda: (mlp(nn.ReLU()), lambda o, t: F.cross_entropy(o, t), labelled(5)), psd=True)
dense("relu-ce-per-sample-weights", lambda: (mlp(nn.ReLU()), weighted_samples, labels_and_weights()), psd=True)
dense("relu-nll", lambda: (nn.Sequential(*mlp(nn.ReLU()), nn.LogSoftmax(1)), nn.NLLLoss(), labelled(5)), psd=True)
dense("relu-mse", lambda: (mlp(nn.ReLU()), MSE, valued(5)), psd=True)
dense("relu-mse-by-hand", lambda: (mlp(nn.ReLU()), squares_by_hand, valued(5)), psd=True)
dense("relu-mse-sum", lambda: (mlp(nn.ReLU()), nn.MSELoss(reduction="sum"), valued(5)), psd=True)
dense("relu-bce", lambda: (mlp(nn.ReLU()), nn.BCEWithLogitsLoss(), zeros_and_ones()), psd=True)
dense("relu-bce-weighted",
    lambda: (mlp(nn.ReLU()), nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS.flip(0)),
             zeros_and_ones()), psd=True)  # fmt: skip
dense("relu-huber", lambda: (mlp(nn.ReLU()), nn.HuberLoss(), valued(5)), psd=True)
dense("relu-smoothl1", lambda: (mlp(nn.ReLU()), nn.SmoothL1Loss(beta=0.5), valued(5)), psd=True)
dense("relu-poisson", lambda: (mlp(nn.ReLU()), nn.PoissonNLLLoss(), counts()), psd=True)
dense("relu-nonconvex", lambda: (mlp(nn.ReLU()), mean_of_squares_with_tanh, valued(5)))
dense("tanh-ce", lambda: (mlp(nn.Tanh()), CE, labelled(5)))
dense("gelu-mse", lambda: (mlp(nn.GELU()), nn.MSELoss(reduction="sum"), valued(5)))
dense("sigmoid-ce", lambda: (mlp(nn.Sigmoid()), CE, labelled(5)))
dense("no-bias", lambda: (mlp(nn.ReLU(), bias=False), CE, labelled(5)), psd=True)
dense("one-layer", lambda: (nn.Linear(5, 3), CE, labelled(5)), psd=True)
dense("one-sample", lambda: (mlp(nn.ReLU()), CE, labelled(5, n=1)), psd=True)
dense("two-samples-tanh", lambda: (mlp(nn.Tanh()), CE, labelled(5, n=2)))
dense("many-samples", lambda: (mlp(nn.ReLU()), CE, labelled(5, n=60)), psd=True)
dense("many-samples-tanh", lambda: (mlp(nn.Tanh()), MSE, valued(5, n=60)))
dense("float32", lambda: (mlp(nn.ReLU()), CE, labelled(5)), dtype=torch.float32, psd=True)
dense("float32-tanh", lambda: (mlp(nn.Tanh()), CE, labelled(5)), dtype=torch.float32)
dense("float32-ce-weighted",
    lambda: (mlp(nn.Tanh()), nn.CrossEntropyLoss(weight=WEIGHTS), labelled(5)), dtype=torch.float32)  # fmt: skip
dense("residual-relu", lambda: (residual(nn.ReLU()), CE, labelled(5)), psd=True)
dense("residual-tanh", lambda: (residual(nn.Tanh()), MSE, valued(5)))
dense("maxout-abs-sort", lambda: (piecewise_linear(), CE, labelled(5)), psd=True)
dense("gated", lambda: (gated(), CE, labelled(5)), psd=True)
dense("control-flow", lambda: (control_flow(), CE, labelled(5)), unreached=("negative",), streams=False)
dense("two-inputs", lambda: (two_inputs(), CE, paired(3, 2, by_name=True)), psd=True)
dense("positional-inputs", lambda: (two_inputs(), CE, paired(3, 2)), psd=True)
dense("integer-and-real-inputs", lambda: (mixed_inputs(), CE, integers_and_reals()), psd=True)
dense("tuple-output", lambda: (heads(lambda a, b: (a, b)), two_tasks, label_and_number()), psd=True)
dense("dict-output",
    lambda: (heads(lambda a, b: {"logits": a, "value": b}, torch.tanh), two_tasks_by_name,
             label_and_number(named=True)))  # fmt: skip
dense("gaussian-heads", lambda: (heads(lambda a, b: (a, b)), gaussian, valued(5, to=(2,))))
dense("auxiliary-output", lambda: (heads(lambda a, b: (a, b)), first_task_only, labelled(5)), psd=True, flat=("value",))
dense("eval-dropout", lambda: (nn.Sequential(mlp(nn.ReLU()), nn.Dropout(0.5)).eval(), CE, labelled(5)), psd=True)
dense("train-dropout",
    lambda: (nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)),
             CE, labelled(5)), psd=True, streams=False)  # fmt: skip
dense("unreached-and-frozen", lambda: (spare(), CE, labelled(5)), psd=True, unreached=("spare", "deep.0"))

"""Cases (model, loss, batch) that every level and method is tried on; `truth.py` has the dense truth for them.

A case is a way to build a model, a loss, makers of inputs and targets, and facts that tests may rely on. Everything
is small, so that the dense Hessian of a whole layer takes milliseconds.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

#: What `hesscond.probe` can measure.
ELIGIBLE = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def eligible_layers(model):
    """The layers of a model that a probe can measure, by qualified name ("model" if it is the model itself)."""
    return {name or "model": module for name, module in model.named_modules() if isinstance(module, ELIGIBLE)}


@dataclass(frozen=True)
class Draw:
    """Random inputs and targets, from one explicit generator."""

    generator: torch.Generator
    dtype: torch.dtype
    device: Any

    def normal(self, *shape):
        double = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return double.to(self.dtype).to(self.device)

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)


def features(*shape):
    """Inputs of this shape per sample."""
    return lambda draw, n: draw.normal(n, *shape)


def keywords(**shapes):
    """A dict of inputs, which the model takes as keyword arguments."""
    return lambda draw, n: {name: draw.normal(n, *shape) for name, shape in shapes.items()}


def positional(*shapes):
    """A tuple of inputs, which the model takes as positional arguments."""
    return lambda draw, n: tuple(draw.normal(n, *shape) for shape in shapes)


def values(*shape):
    """Real targets."""
    return lambda draw, n: draw.normal(n, *shape)


def labels(*shape, classes=3):
    """Class labels, one a sample or one a position."""
    return lambda draw, n: draw.integers(classes, n, *shape)


TARGETS = {
    "class": labels(),
    "value": values(3),
    "probability": lambda draw, n: torch.softmax(draw.normal(n, 3), 1),
    "binary": lambda draw, n: (draw.normal(n, 3) > 0).to(draw.dtype),
    "count": lambda draw, n: draw.integers(4, n, 3).to(draw.dtype),
}


@dataclass(frozen=True)
class Case:
    """One model with a loss and data.

    Attributes
    ----------
    target
        A key of `TARGETS`, or a function of (draw, samples).
    psd
        Every Hessian block is positive semidefinite in theory (a piecewise linear rest of the network, convex loss).
    coupled
        The samples of a batch influence each other.
    splits
        The loss of the whole is the (weighted) mean or the sum of the losses of its parts, in any split.
    reduction
        "mean", "sum", or "weights": a mean weighted by the class weights of the targets that are not ignored.
    unreached
        Eligible layers that the batch does not reach.
    flat
        Eligible layers whose Hessian is zero.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    target: str | Callable[[Draw, int], Any] = "class"
    samples: int = 7
    dtype: torch.dtype = torch.float64
    inputs: Callable[[Draw, int], Any] = features(5)  # noqa: RUF009
    psd: bool = False
    coupled: bool = False
    splits: bool = True
    reduction: str = "mean"
    unreached: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()

    def make(self, seed=0, device="cpu"):
        """(model, loss, (inputs, targets)); two calls with the same seed give the same."""
        draw = Draw(torch.Generator().manual_seed(seed), self.dtype, device)
        torch.manual_seed(seed)
        model = self.build().to(self.dtype).to(device)
        loss = copy.deepcopy(self.loss).to(device) if isinstance(self.loss, nn.Module) else self.loss
        target = TARGETS[self.target] if isinstance(self.target, str) else self.target
        x = self.inputs(draw, self.samples)
        return model, loss, (x, target(draw, self.samples))

    @property
    def streams(self):
        """Whether a stream of parts must give the Hessian of the whole."""
        return self.splits and not self.coupled


def rows(batch, index):
    """The samples ``index`` (a slice or a tensor) of a batch of any structure."""
    return tree_map_only(torch.Tensor, lambda t: t[index], batch)


def split(batch, sizes):
    """A list of batches of these sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [rows(batch, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


class Net(nn.Module):
    """Parts by name, and a forward pass as a function of them and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


# ----------------------------------------------------------------------------------------------------- dense models


def mlp(activation, *, bias=True):
    return nn.Sequential(
        nn.Linear(5, 6, bias=bias), activation, nn.Linear(6, 4, bias=bias), activation, nn.Linear(4, 3)
    )


def small(activation, *between):
    """Linear 5 → 4, then ``between``, the activation, and Linear 4 → 3."""
    return nn.Sequential(nn.Linear(5, 4), *between, activation, nn.Linear(4, 3))


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


def siamese(activation):
    """One trunk on two inputs."""

    def forward(m, a, b):
        return m.head(torch.cat([m.activation(m.trunk(a)), m.activation(m.trunk(b))], 1))

    return Net(forward, trunk=nn.Linear(4, 4), head=nn.Linear(8, 3), activation=activation)


def repeated(activation, times=2):
    """The same layer several times, one after another."""

    def forward(m, x):
        h = m.activation(m.first(x))
        for _ in range(times):
            h = m.activation(m.layer(h))
        return m.head(h)

    return Net(forward, first=nn.Linear(5, 4), layer=nn.Linear(4, 4), head=nn.Linear(4, 3), activation=activation)


def recurrent_by_hand(activation):
    """A tiny recurrence over (N, T, d): the same Linear at every step."""

    def forward(m, x):
        h = x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            h = m.activation(m.cell(torch.cat([x[:, step], h], 1)))
        return m.head(h)

    return Net(forward, cell=nn.Linear(3 + 4, 4), head=nn.Linear(4, 3), activation=activation)


def shared_shapes():
    """One layer on tokens (N, T, d) and on their mean (N, d)."""

    def forward(m, x):
        tokens, pooled = torch.relu(m.layer(x)), torch.relu(m.layer(x.mean(1)))
        return m.head(torch.cat([tokens.mean(1), pooled], 1))

    return Net(forward, layer=nn.Linear(4, 4), head=nn.Linear(8, 3))


def centred(activation=None):
    """Batch statistics by hand: centring couples the samples linearly."""
    activation = activation or nn.Identity()

    def forward(m, x):
        h = m.a(x)
        return m.b(m.activation(h - h.mean(0)))

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), activation=activation)


def spare():
    """Two layers that no input reaches, and frozen ones."""
    parts = {"body": mlp(nn.ReLU()), "spare": nn.Linear(5, 3), "deep": nn.Sequential(nn.Conv2d(1, 2, 3))}
    model = Net(lambda m, x: m.body(x), **parts)
    model.body[0].requires_grad_(False)
    model.body[2].bias.requires_grad_(False)
    return model


def hooked():
    """A user's forward hook, which is part of the function that is measured."""
    model = mlp(nn.ReLU())
    model[2].register_forward_hook(double_output)
    return model


def double_output(module, args, output):
    return 2 * output


# -------------------------------------------------------------------------------------------------------- sequences


def over_tokens(pool, activation):
    """Linear layers on (N, T, 4) or any leading shape; ``pool`` turns their output into the model's."""
    parts = {"first": nn.Linear(4, 4), "head": nn.Linear(4, 3), "activation": activation}
    return Net(lambda m, x: m.head(pool(m.activation(m.first(x)))), **parts)


def attention(attend, d=4, heads=2):
    """A self-attention block with two heads on (N, T, 4)."""

    def forward(m, x):
        n, t, _ = x.shape
        q, k, v = m.qkv(x).view(n, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        mixed = attend(q, k, v).transpose(1, 2).reshape(n, t, d)
        return m.head(m.norm(x + m.out(mixed)).mean(1))

    return Net(forward, qkv=nn.Linear(d, 3 * d), out=nn.Linear(d, d), head=nn.Linear(d, 3), norm=nn.LayerNorm(d))


def attention_by_hand(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def mean_over_tokens(h):
    return h.mean(1)


def class_per_token(*, classes_second):
    """One classification per token, logits (N, T, c) or (N, c, T)."""

    def forward(m, x):
        logits = m.head(torch.relu(m.first(x)))
        return logits.transpose(1, 2) if classes_second else logits

    return Net(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 3))


# ----------------------------------------------------------------------------------------------------- convolutions


def cnn(layer, positions, *, activation=None, after=()):
    """A convolution, ``after``, the activation, and a dense head on the flattened ``positions`` numbers."""
    return nn.Sequential(layer, *after, activation or nn.ReLU(), nn.Flatten(), nn.Linear(positions, 3))


def few_positions(m, h):
    """Three positions of a map, the first among them."""
    return h.flatten(2)[..., [0, 37, 80]]


def conv_pyramid():
    """One convolution at two resolutions."""

    def forward(m, x):
        fine, coarse = m.conv(x), m.conv(F.avg_pool2d(x, 2))
        return m.head(torch.cat([torch.relu(h).mean((2, 3)) for h in (fine, coarse)], 1))

    return Net(forward, conv=nn.Conv2d(1, 2, 3, padding=1), head=nn.Linear(4, 3))


def conv_twice(activation):
    """A residual block that applies the same convolution twice."""

    def forward(m, x):
        h = x + m.activation(m.conv(x))
        return m.head((h + m.activation(m.conv(h))).mean(2))

    return Net(forward, conv=nn.Conv1d(2, 2, 3, padding=1), head=nn.Linear(2, 3), activation=activation)


def upsampled():
    """A transposed convolution told its output size when it is called."""
    parts = {"up": nn.ConvTranspose1d(2, 2, 3, stride=2), "out": nn.Conv1d(2, 1, 1)}
    return Net(lambda m, x: m.out(torch.relu(m.up(x, output_size=[8]))), **parts)


def unet():
    """Down, up, and a skip connection by concatenation."""

    def forward(m, x):
        return m.out(torch.cat([x, F.interpolate(m.up(F.silu(m.down(x))), scale_factor=1.0)], 1))

    return Net(forward, down=nn.Conv2d(1, 2, 3, stride=2, padding=1), up=nn.ConvTranspose2d(2, 1, 2, stride=2),
               out=nn.Conv2d(2, 1, 1))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- losses


def mean_of_squares_with_tanh(output, target):
    """Not convex in the output."""
    return (torch.tanh(output) - target).square().mean()


def squares_by_hand(output, target):
    return ((output - target) ** 2).sum(1).mean()


def weighted_samples(output, target):
    label, weight = target
    return (F.cross_entropy(output, label, reduction="none") * weight).mean()


def per_token(output, target):
    return F.cross_entropy(output.reshape(-1, 3), target.reshape(-1))


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


def neighbours(output, target):
    """Each sample with the one before it."""
    return F.cross_entropy(output + 0.5 * output.roll(1, 0), target)


def pairs(output, target):
    """Contrastive: sample j with sample j + N/2."""
    half = len(output) // 2
    distance = (output[:half] - output[half:]).square().sum(1)
    same = target[:half] == target[half:]
    return torch.where(same, distance, F.softplus(1 - distance)).mean()


def info_nce(output, target):
    """Every sample of the first half against all of the second."""
    a, b = F.normalize(output, dim=1).chunk(2)
    return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a), device=a.device))


def labels_and_weights(draw, n):
    return draw.integers(3, n), draw.normal(n).abs()


def label_and_number(draw, n):
    return draw.integers(3, n), draw.normal(n, 2)


def named_label_and_number(draw, n):
    return {"label": draw.integers(3, n), "number": draw.normal(n, 2)}


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

CE = nn.CrossEntropyLoss()
#: Batch normalization with running statistics that differ from the batch's.
BN1, BN2 = nn.BatchNorm1d, nn.BatchNorm2d

# ------------------------------------------------------------------------------------------------------------ cases

DENSE = [
    Case("relu-ce", lambda: mlp(nn.ReLU()), CE, psd=True),
    Case("relu-inplace-ce", lambda: mlp(nn.ReLU(inplace=True)), CE, psd=True),
    Case("leaky-ce-sum", lambda: mlp(nn.LeakyReLU(0.1)), nn.CrossEntropyLoss(reduction="sum"), psd=True,
         reduction="sum"),
    Case("relu-ce-smoothed", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(label_smoothing=0.2), psd=True),
    Case("relu-ce-weighted", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
         psd=True, reduction="weights"),
    Case("relu-ce-ignored", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(ignore_index=1), psd=True,
         reduction="weights"),
    Case("relu-ce-weighted-ignored", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2),
         psd=True, samples=13, reduction="weights"),
    Case("relu-ce-sum-ignored", lambda: mlp(nn.ReLU()),
         nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2, reduction="sum"), psd=True, reduction="sum"),
    Case("relu-ce-probabilities", lambda: mlp(nn.ReLU()), CE, "probability", psd=True),
    Case("relu-ce-probabilities-weighted", lambda: mlp(nn.ReLU()),
         nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "probability", psd=True),
    Case("relu-ce-functional", lambda: mlp(nn.ReLU()), F.cross_entropy, psd=True),
    Case("relu-ce-lambda", lambda: mlp(nn.ReLU()), lambda o, t: F.cross_entropy(o, t), psd=True),
    Case("relu-ce-per-sample-weights", lambda: mlp(nn.ReLU()), weighted_samples, labels_and_weights, psd=True),
    Case("relu-nll", lambda: nn.Sequential(*mlp(nn.ReLU()), nn.LogSoftmax(1)), nn.NLLLoss(), psd=True),
    Case("relu-mse", lambda: mlp(nn.ReLU()), nn.MSELoss(), "value", psd=True),
    Case("relu-mse-by-hand", lambda: mlp(nn.ReLU()), squares_by_hand, "value", psd=True),
    Case("relu-mse-sum", lambda: mlp(nn.ReLU()), nn.MSELoss(reduction="sum"), "value", psd=True, reduction="sum"),
    Case("relu-bce", lambda: mlp(nn.ReLU()), nn.BCEWithLogitsLoss(), "binary", psd=True),
    Case("relu-bce-weighted", lambda: mlp(nn.ReLU()),
         nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS.flip(0)), "binary", psd=True),
    Case("relu-huber", lambda: mlp(nn.ReLU()), nn.HuberLoss(), "value", psd=True),
    Case("relu-smoothl1", lambda: mlp(nn.ReLU()), nn.SmoothL1Loss(beta=0.5), "value", psd=True),
    Case("relu-poisson", lambda: mlp(nn.ReLU()), nn.PoissonNLLLoss(), "count", psd=True),
    Case("relu-nonconvex", lambda: mlp(nn.ReLU()), mean_of_squares_with_tanh, "value"),
    Case("tanh-ce", lambda: mlp(nn.Tanh()), CE),
    Case("gelu-mse", lambda: mlp(nn.GELU()), nn.MSELoss(reduction="sum"), "value", reduction="sum"),
    Case("sigmoid-ce", lambda: mlp(nn.Sigmoid()), CE),
    Case("no-bias", lambda: mlp(nn.ReLU(), bias=False), CE, psd=True),
    Case("one-layer", lambda: nn.Linear(5, 3), CE, psd=True),
    Case("one-sample", lambda: mlp(nn.ReLU()), CE, samples=1, psd=True),
    Case("two-samples-tanh", lambda: mlp(nn.Tanh()), CE, samples=2),
    Case("many-samples", lambda: mlp(nn.ReLU()), CE, samples=60, psd=True),
    Case("many-samples-tanh", lambda: mlp(nn.Tanh()), nn.MSELoss(), "value", samples=60),
    Case("float32", lambda: mlp(nn.ReLU()), CE, dtype=torch.float32, psd=True),
    Case("float32-tanh", lambda: mlp(nn.Tanh()), CE, dtype=torch.float32),
    Case("float32-ce-weighted", lambda: mlp(nn.Tanh()), nn.CrossEntropyLoss(weight=WEIGHTS.float()),
         dtype=torch.float32, reduction="weights"),
    Case("bfloat16", lambda: mlp(nn.ReLU()), CE, dtype=torch.bfloat16, psd=True),
    Case("residual-relu", lambda: residual(nn.ReLU()), CE, psd=True),
    Case("residual-tanh", lambda: residual(nn.Tanh()), nn.MSELoss(), "value"),
    Case("maxout-abs-sort", piecewise_linear, CE, psd=True),
    Case("gated", gated, CE, psd=True),
    Case("control-flow", control_flow, CE, splits=False, unreached=("negative",)),
    Case("two-inputs", two_inputs, CE, inputs=keywords(a=(3,), b=(2,)), psd=True),
    Case("positional-inputs", two_inputs, CE, inputs=positional((3,), (2,)), psd=True),
    Case("integer-and-real-inputs", mixed_inputs, CE,
         inputs=lambda draw, n: {"tokens": draw.integers(6, n, 2), "x": draw.normal(n, 2)}, psd=True),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4), nn.Tanh(), nn.Flatten(),
                                            nn.Linear(8, 3)), CE, inputs=lambda draw, n: draw.integers(6, n, 2)),
    Case("tuple-output", lambda: heads(lambda a, b: (a, b)), two_tasks, label_and_number, psd=True),
    Case("dict-output", lambda: heads(lambda a, b: {"logits": a, "value": b}, torch.tanh), two_tasks_by_name,
         named_label_and_number),
    Case("gaussian-heads", lambda: heads(lambda a, b: (a, b)), gaussian, values(2)),
    Case("auxiliary-output", lambda: heads(lambda a, b: (a, b)), first_task_only, psd=True, flat=("value",)),
    Case("eval-dropout", lambda: nn.Sequential(mlp(nn.ReLU()), nn.Dropout(0.5)).eval(), CE, psd=True),
    Case("train-dropout", lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5),
                                                nn.Linear(6, 3)), CE, psd=True, splits=False),
    Case("train-dropout-tanh", lambda: small(nn.Tanh(), nn.Dropout(0.4)), CE, splits=False),
    Case("eval-batchnorm", lambda: small(nn.ReLU(), used(BN1(4))).eval(), CE, psd=True),
    Case("layernorm", lambda: small(nn.ReLU(), nn.LayerNorm(4)), CE),
    Case("unreached-and-frozen", spare, CE, psd=True, unreached=("spare", "deep.0")),
    Case("forward-hook", hooked, CE, psd=True),
]  # fmt: skip

SHARED = [
    Case("siamese-relu", lambda: siamese(nn.ReLU()), CE, inputs=keywords(a=(4,), b=(4,)), psd=True),
    Case("siamese-tanh", lambda: siamese(nn.Tanh()), nn.MSELoss(), "value", inputs=positional((4,), (4,))),
    Case("repeated-relu", lambda: repeated(nn.ReLU()), CE),
    Case("repeated-linear", lambda: repeated(nn.Identity(), 3), nn.MSELoss(), "value"),
    Case("repeated-tanh", lambda: repeated(nn.Tanh(), 3), CE),
    Case("recurrent-tanh", lambda: recurrent_by_hand(nn.Tanh()), CE, inputs=features(3, 3)),
    Case("recurrent-relu", lambda: recurrent_by_hand(nn.ReLU()), nn.MSELoss(), "value", inputs=features(4, 3)),
    Case("shared-shapes", shared_shapes, CE, inputs=features(3, 4), psd=True),
    Case("conv-pyramid", conv_pyramid, CE, inputs=features(1, 4, 4), psd=True),
    Case("conv-twice", lambda: conv_twice(nn.Tanh()), CE, inputs=features(2, 5)),
]

COUPLED = [
    Case("train-batchnorm", lambda: small(nn.ReLU(), used(BN1(4))), CE, coupled=True),
    Case("train-batchnorm-tanh-mse", lambda: small(nn.Tanh(), used(BN1(4))), nn.MSELoss(), "value", samples=12,
         coupled=True),
    Case("train-batchnorm-first", lambda: nn.Sequential(used(BN1(5)), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
         CE, splits=False),
    Case("train-batchnorm-conv", lambda: cnn(nn.Conv2d(1, 2, 2), 8, after=(used(BN2(2)),)), CE, samples=5,
         inputs=features(1, 3, 3), coupled=True),
    Case("batch-centring", centred, CE, coupled=True, psd=True),
    Case("batch-centring-tanh", lambda: centred(nn.Tanh()), CE, coupled=True),
    Case("neighbours-in-the-loss", lambda: mlp(nn.ReLU()), neighbours, coupled=True, psd=True),
    Case("contrastive-pairs", lambda: mlp(nn.ReLU()), pairs, samples=8, coupled=True),
    Case("info-nce", lambda: mlp(nn.Tanh()), info_nce, samples=8, coupled=True),
]  # fmt: skip

SEQUENCES = [
    Case("tokens-mean", lambda: over_tokens(mean_over_tokens, nn.ReLU()), CE, inputs=features(3, 4), psd=True),
    Case("tokens-mean-tanh", lambda: over_tokens(mean_over_tokens, nn.Tanh()), CE, inputs=features(3, 4)),
    Case("tokens-leading-shape", lambda: over_tokens(lambda h: h.mean((1, 2)), nn.GELU()), nn.MSELoss(), "value",
         samples=5, inputs=features(2, 2, 4)),
    Case("per-token-lambda", lambda: class_per_token(classes_second=False), per_token, labels(3), inputs=features(3, 4),
         psd=True),
    Case("per-token-classes-second", lambda: class_per_token(classes_second=True), CE, labels(3), inputs=features(3, 4),
         psd=True),
    Case("sequence-first", lambda: over_tokens(lambda h: h.sum(0), nn.Tanh()), CE, samples=5,
         inputs=lambda draw, n: draw.normal(3, n, 4), splits=False),
    Case("sequence-first-relu", lambda: over_tokens(lambda h: h.amax(0), nn.ReLU()), nn.MSELoss(), "value", samples=5,
         inputs=lambda draw, n: draw.normal(3, n, 4), splits=False, psd=True),
    Case("attention-sdpa", lambda: attention(F.scaled_dot_product_attention), CE, samples=4, inputs=features(3, 4)),
    Case("attention-causal", lambda: attention(causal_attention), CE, samples=4, inputs=features(3, 4)),
    Case("attention-by-hand", lambda: attention(attention_by_hand), CE, samples=4, inputs=features(3, 4)),
]  # fmt: skip

MAP = features(2, 4, 4)
CONVOLUTIONS = [
    Case("conv1d", lambda: cnn(nn.Conv1d(2, 3, 3), 12), CE, inputs=features(2, 6), psd=True),
    Case("conv1d-stride-dilation", lambda: cnn(nn.Conv1d(2, 2, 2, stride=2, dilation=3, padding=1), 6), CE,
         inputs=features(2, 7), psd=True),
    Case("conv1d-same-even-tanh", lambda: cnn(nn.Conv1d(2, 2, 4, padding="same"), 10, activation=nn.Tanh()), CE,
         inputs=features(2, 5)),
    Case("conv1d-circular-same", lambda: cnn(nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular"), 8), CE,
         inputs=features(2, 4), psd=True),
    Case("conv1d-per-position", lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 3, 1)), CE,
         labels(4), inputs=features(2, 6), psd=True),
    Case("conv2d", lambda: cnn(nn.Conv2d(2, 3, 3), 12), CE, inputs=MAP, psd=True),
    Case("conv2d-one-sample", lambda: cnn(nn.Conv2d(2, 3, 3), 12), CE, inputs=MAP, samples=1, psd=True),
    Case("conv2d-tanh-mse", lambda: cnn(nn.Conv2d(2, 2, 3), 8, activation=nn.Tanh()), nn.MSELoss(), "value",
         inputs=MAP),
    Case("conv2d-gelu", lambda: cnn(nn.Conv2d(2, 2, (2, 3)), 12, activation=nn.GELU()), CE, inputs=MAP),
    Case("conv2d-stride-padding", lambda: cnn(nn.Conv2d(2, 2, 3, stride=(2, 1), padding=(1, 0)), 8), CE, inputs=MAP,
         psd=True),
    Case("conv2d-same", lambda: cnn(nn.Conv2d(2, 2, (2, 3), padding="same"), 32), CE, inputs=MAP, psd=True),
    Case("conv2d-same-dilated", lambda: cnn(nn.Conv2d(2, 1, 2, padding="same", dilation=2), 16), CE, inputs=MAP,
         psd=True),
    Case("conv2d-reflect", lambda: cnn(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 32), CE, inputs=MAP,
         psd=True),
    Case("conv2d-replicate", lambda: cnn(nn.Conv2d(2, 2, 3, padding=(2, 1), padding_mode="replicate"), 48), CE,
         inputs=MAP, psd=True),
    Case("conv2d-circular-stride", lambda: cnn(nn.Conv2d(2, 2, 3, padding=1, stride=2, padding_mode="circular"), 8,
                                               activation=nn.Softplus()), CE, inputs=MAP),
    Case("conv2d-dilation", lambda: cnn(nn.Conv2d(2, 2, 2, dilation=(1, 2)), 12), CE, inputs=MAP, psd=True),
    Case("conv2d-groups", lambda: cnn(nn.Conv2d(4, 6, 2, groups=2), 24), CE, inputs=features(4, 3, 3), psd=True),
    Case("conv2d-depthwise", lambda: cnn(nn.Conv2d(3, 6, 2, groups=3, bias=False), 24, activation=nn.Tanh()), CE,
         inputs=features(3, 3, 3)),
    Case("conv2d-no-bias", lambda: cnn(nn.Conv2d(2, 3, 3, bias=False), 12), CE, inputs=MAP, psd=True),
    Case("conv2d-pointwise", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                                                   nn.Flatten(), nn.Linear(3, 3)), CE, inputs=MAP, psd=True),
    Case("conv2d-eval-batchnorm", lambda: cnn(nn.Conv2d(2, 2, 3), 8, after=(used(BN2(2)),)).eval(), CE, inputs=MAP,
         psd=True),
    Case("conv2d-groupnorm", lambda: cnn(nn.Conv2d(2, 4, 3), 16, after=(nn.GroupNorm(2, 4),)), CE, inputs=MAP),
    Case("conv2d-maxpool", lambda: cnn(nn.Conv2d(2, 2, 3, padding=1), 8, after=(nn.MaxPool2d(2),)), CE, inputs=MAP,
         psd=True),
    Case("conv2d-avgpool", lambda: cnn(nn.Conv2d(2, 2, 3, padding=1), 8, after=(nn.AvgPool2d(2),),
                                       activation=nn.Tanh()), CE, inputs=MAP),
    Case("conv2d-adaptive-max", lambda: cnn(nn.Conv2d(2, 2, 2), 8, after=(nn.AdaptiveMaxPool2d(2),)), CE, inputs=MAP,
         psd=True),
    Case("conv2d-few-positions", lambda: cnn(nn.Conv2d(1, 2, 3), 6, after=(Net(few_positions),)), CE,
         inputs=features(1, 14, 14), psd=True),
    Case("conv2d-two-layers", lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU(inplace=True), nn.Dropout2d(0.3),
                                                    *cnn(nn.Conv2d(2, 3, 2), 12)).eval(), CE, inputs=MAP, psd=True),
    Case("conv2d-two-layers-tanh", lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), *cnn(nn.Conv2d(2, 3, 2), 12)),
         CE, inputs=MAP),
    Case("conv2d-train-dropout2d", lambda: cnn(nn.Conv2d(2, 3, 3), 12, after=(nn.Dropout2d(0.5),)), CE, inputs=MAP,
         psd=True, splits=False),
    Case("conv2d-channels-last", lambda: cnn(nn.Conv2d(2, 2, 3), 8), CE,
         inputs=lambda draw, n: draw.normal(n, 2, 4, 4).contiguous(memory_format=torch.channels_last), psd=True),
    Case("conv2d-float32", lambda: cnn(nn.Conv2d(2, 3, 3), 12, activation=nn.Tanh()), CE, inputs=MAP,
         dtype=torch.float32),
    Case("conv3d", lambda: cnn(nn.Conv3d(1, 2, 2, padding=(0, 1, 0)), 12), CE, inputs=features(1, 3, 2, 2), samples=5,
         psd=True),
    Case("conv3d-circular-stride", lambda: cnn(nn.Conv3d(1, 2, 2, padding=1, padding_mode="circular", stride=2), 16,
                                               activation=nn.Tanh()), CE, inputs=features(1, 2, 2, 2), samples=5),
    Case("transposed1d", lambda: cnn(nn.ConvTranspose1d(2, 3, 3, stride=2), 21), CE, inputs=features(2, 3), psd=True),
    Case("transposed1d-dilation-tanh", lambda: cnn(nn.ConvTranspose1d(2, 2, 2, padding=1, dilation=2), 6,
                                                   activation=nn.Tanh()), CE, inputs=features(2, 3)),
    Case("transposed1d-output-size", upsampled, nn.MSELoss(), values(1, 8), inputs=features(2, 3), psd=True),
    Case("transposed2d-output-padding",
         lambda: cnn(nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=(1, 0)), 24), CE,
         inputs=features(1, 2, 2), psd=True),
    Case("transposed2d-groups", lambda: cnn(nn.ConvTranspose2d(4, 6, 2, groups=2), 54), CE, inputs=features(4, 2, 2),
         psd=True),
    Case("transposed2d-depthwise-no-bias",
         lambda: cnn(nn.ConvTranspose2d(2, 4, 2, groups=2, stride=2, bias=False), 64, activation=nn.Tanh()), CE,
         inputs=features(2, 2, 2)),
    Case("transposed3d", lambda: cnn(nn.ConvTranspose3d(1, 2, 2), 36), CE, inputs=features(1, 2, 1, 2), psd=True),
    Case("transposed3d-groups", lambda: cnn(nn.ConvTranspose3d(2, 2, (1, 2, 2), groups=2, stride=2), 32), CE,
         inputs=features(2, 1, 2, 2), samples=4, psd=True),
    Case("unet-skip", unet, nn.MSELoss(), values(1, 4, 4), samples=4, inputs=features(1, 4, 4)),
]  # fmt: skip


def used(norm):
    """A batch normalization that has seen data: running statistics, scales and shifts are not the initial ones."""
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            tensor.add_(0.3 * torch.randn(tensor.shape))
        norm.running_var.mul_(0.5 + torch.rand(norm.running_var.shape))
    return norm


# ------------------------------------------------------------------------------- parameters of modules of other kinds


def tokens(*shape, vocabulary=6):
    """Token ids, the first token of every vocabulary among them."""
    return lambda draw, n: draw.integers(vocabulary, n, *shape)


def stirred(model):
    """The model with all parameters away from where they start: scales of one, shifts of zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


class Piped(nn.Module):
    """Embedded tokens or features, a module in the middle, a nonlinearity, the mean over positions, a dense head."""

    def __init__(self, middle, width=4, *, first=None, pick=None, head=None):
        super().__init__()
        self.first, self.middle = first or nn.Embedding(6, 4), middle
        self.head = head or nn.Linear(width, 3)
        self.pick = pick or (lambda h: h)

    def forward(self, x):
        h = torch.tanh(self.pick(self.middle(self.first(x))))
        return self.head(h.mean(1) if h.ndim == 3 else h)


def self_attention(width=4, *, kdim=None, vdim=None, **options):
    """torch's attention on itself; ``kdim``: with keys and values of other widths."""

    def forward(m, x):
        k = x if m.keys is None else torch.tanh(m.keys(x))
        v = x if m.values is None else torch.tanh(m.values(x))
        return x + m.attention(x, k, v, need_weights=False)[0]

    keys = None if kdim is None else nn.Linear(width, kdim)
    values = None if vdim is None else nn.Linear(width, vdim)
    own = nn.MultiheadAttention(width, 2, kdim=kdim, vdim=vdim, batch_first=True, **options)
    return Net(forward, keys=keys, values=values, attention=own)


def stepped(cell):
    """A cell of torch over a sequence."""

    def forward(m, x):
        state = None
        for step in range(x.shape[1]):
            state = m.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state

    return Net(forward, cell=cell)


def bare(*shapes):
    """Parameters of the model itself, with any number of dimensions."""

    def forward(m, x):
        h = x[:, :4]
        for p in m.parameters(recurse=False):
            h = torch.tanh(h + h * p.sum() + p.flatten()[:4].square().sum() if p.ndim != 2 else h @ p + h)
        return m.head(h)

    own = {f"p{number}": nn.Parameter(torch.randn(shape)) for number, shape in enumerate(shapes)}
    return Net(forward, **own, head=nn.Linear(4, 3))


class LowRank(nn.Linear):
    """A frozen dense layer with the factors of an update beside it (LoRA)."""

    def __init__(self, *sizes, rank=2):
        super().__init__(*sizes)
        self.lora_A = nn.Parameter(torch.randn(rank, self.in_features))
        self.lora_B = nn.Parameter(torch.randn(self.out_features, rank))
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class AddLowRank(nn.Module):
    """W + BA, as a parametrization."""

    def __init__(self, out, inner, rank=2):
        super().__init__()
        self.A, self.B = nn.Parameter(torch.randn(rank, inner)), nn.Parameter(torch.randn(out, rank))

    def forward(self, weight):
        return weight + self.B @ self.A


def low_rank_by_parametrization():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", AddLowRank(4, 4))
    layer.parametrizations.weight.original.requires_grad_(False)
    return Piped(layer)


class RootMeanSquare(nn.Module):
    """The normalization of LLaMA, written by hand."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Conv1D(nn.Module):
    """A dense layer with its weight transposed, as that of GPT-2 in Hugging Face's transformers."""

    def __init__(self, units, inputs):
        super().__init__()
        self.nf, self.nx = units, inputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, units)), nn.Parameter(torch.zeros(units))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


#: It is known by the names of its module and class.
Conv1D.__module__ = "transformers.pytorch_utils"


class GPT2Attention(nn.Module):
    """Causal self-attention with query, key and value in one layer."""

    def __init__(self, d, heads, dense):
        super().__init__()
        self.c_attn, self.c_proj, self.num_heads = dense(3 * d, d), dense(d, d), heads

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.c_attn(x).split(x.shape[2], 2)
        )
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a multilayer perceptron, each after a normalization and around a skip connection."""

    def __init__(self, attn, mlp, norm):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(), attn, norm(), mlp

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder: token and position embeddings, blocks, a head with the weight of the token embedding or its own."""

    def __init__(self, *, tied=True, dense=None, vocabulary=6, d=4):
        super().__init__()
        dense = dense or (lambda out, inner: nn.Linear(inner, out))
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(8, d)
        self.h = nn.ModuleList(
            [
                TransformerBlock(
                    GPT2Attention(d, 2, dense),
                    nn.Sequential(dense(6, d), nn.GELU(), dense(d, 6)),
                    lambda: nn.LayerNorm(d),
                )
            ]
        )
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


class RotaryAttention(nn.Module):
    """Attention with rotated queries and keys, and fewer heads of keys and values than of queries."""

    def __init__(self, d=4):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d // 2, bias=False)
        self.v_proj, self.o_proj = nn.Linear(d, d // 2, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        n, t, d = x.shape
        angle = torch.arange(t, dtype=x.dtype, device=x.device)[:, None]
        q, k, v = (proj(x).view(n, t, -1, d // 2).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
                for a, b in (part.chunk(2, -1) for part in (q, k)))  # fmt: skip
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))


class SwiGLU(nn.Module):
    """A gated multilayer perceptron."""

    def __init__(self, d=4, inner=5):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Llama(nn.Module):
    """A decoder with root-mean-square normalization, rotated attention and gated perceptrons."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([TransformerBlock(RotaryAttention(), SwiGLU(), lambda: RootMeanSquare(4))])
        self.norm, self.lm_head = RootMeanSquare(4), nn.Linear(4, 6, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x)).transpose(1, 2)


class BERT(nn.Module):
    """An encoder: three embeddings, torch's own encoder layer, a pooled class token, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(6, 4, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(5, 4), nn.Embedding(2, 4)
        self.LayerNorm = nn.LayerNorm(4)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True), 1,
            enable_nested_tensor=False,
        )  # fmt: skip
        self.pooler, self.classifier = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        x = self.word_embeddings(ids) + self.token_type_embeddings.weight[0]
        x = self.LayerNorm(x + self.position_embeddings(torch.arange(ids.shape[1], device=ids.device)))
        return self.classifier(torch.tanh(self.pooler(self.encoder(x)[:, 0]))) + self.bias


class ViT(nn.Module):
    """Patches by a convolution, a class token, a positional table, one block."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 4))
        self.blocks = nn.ModuleList(
            [
                TransformerBlock(
                    GPT2Attention(4, 2, lambda out, inner: nn.Linear(inner, out)),
                    nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)),
                    lambda: nn.LayerNorm(4),
                )
            ]
        )
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def listed():
    """Parameters in a list and in a dictionary."""
    parts = {"scales": nn.ParameterList([torch.randn(4), torch.randn(4, 4)]), "shifts": nn.ParameterDict()}
    parts["shifts"]["first"] = torch.randn(4)
    return Net(lambda m, x: torch.tanh(x * m.scales[0] + m.shifts["first"]) @ m.scales[1], **parts)


def bias_alone():
    """A bias beside a layer without one."""
    parts = {"dense": nn.Linear(4, 4, bias=False), "bias": nn.Parameter(torch.zeros(4))}
    return Net(lambda m, x: m.dense(x) + m.bias, **parts)


def first_of(output):
    return output[0]


def on_features(middle, width=4, **options):
    return Piped(middle, width, first=nn.Linear(5, 4), **options)


def recurrent(kind, width=3, **options):
    return Piped(kind(4, 3, batch_first=True, **options), width, pick=first_of)


def other(name, build, loss=CE, target="class", **options):
    """A case whose parameters are all away from where they start."""
    return Case(name, lambda: stirred(build()), loss, target, **{"samples": 6, **options})


IDS = tokens(3)
#: Each is measured by `hesscond.probe(..., layers="*")`: see test_probe_blocks.py.
OTHERS = [
    other("embedding-padded", lambda: Piped(nn.Linear(4, 4), first=nn.Embedding(9, 4, padding_idx=0)), inputs=IDS),
    other("embedding-tied", lambda: GPT(tied=True), target=labels(3, classes=6), inputs=IDS),
    other("layernorm-shift-and-scale", lambda: Piped(nn.LayerNorm(4)), inputs=IDS),
    other("layernorm-no-shift", lambda: Piped(nn.LayerNorm(4, bias=False)), inputs=IDS),
    other("layernorm-of-two-dimensions", lambda: Piped(nn.LayerNorm((3, 4))), inputs=IDS),
    other("rmsnorm", lambda: Piped(nn.RMSNorm(4)), inputs=IDS),
    other("rmsnorm-by-hand", lambda: Piped(RootMeanSquare(4)), inputs=IDS),
    other("groupnorm", lambda: on_features(nn.GroupNorm(2, 4))),
    other("batchnorm-eval", lambda: on_features(used(BN1(4))).eval()),
    other("batchnorm-train", lambda: on_features(used(BN1(4))), coupled=True),
    other("instancenorm", lambda: Piped(nn.InstanceNorm1d(3, affine=True)), inputs=IDS),
    other("attention-packed", lambda: Piped(self_attention()), inputs=IDS, samples=4),
    other("attention-no-bias", lambda: Piped(self_attention(bias=False)), inputs=IDS, samples=4),
    other("attention-kdim", lambda: Piped(self_attention(kdim=3, vdim=5)), inputs=IDS, samples=4),
    other("attention-bias-kv", lambda: Piped(self_attention(add_bias_kv=True)), inputs=IDS, samples=4),
    other("conv1d-transposed", lambda: Piped(Conv1D(5, 4), 5), inputs=IDS),
    other("gpt2-conv1d", lambda: GPT(tied=False, dense=Conv1D), target=labels(3, classes=6), inputs=IDS, samples=4),
    other("lstm", lambda: recurrent(nn.LSTM), inputs=IDS),
    other("lstm-two-layers", lambda: recurrent(nn.LSTM, num_layers=2), inputs=IDS, samples=4),
    other("lstm-bidirectional", lambda: recurrent(nn.LSTM, 6, bidirectional=True), inputs=IDS, samples=4),
    other("lstm-projected", lambda: recurrent(nn.LSTM, 2, proj_size=2), inputs=IDS),
    other("lstm-no-bias", lambda: recurrent(nn.LSTM, bias=False), inputs=IDS),
    other("gru", lambda: recurrent(nn.GRU), inputs=IDS),
    other("gru-bidirectional-two-layers", lambda: recurrent(nn.GRU, 6, num_layers=2, bidirectional=True), inputs=IDS,
          samples=3),
    other("rnn", lambda: recurrent(nn.RNN), inputs=IDS),
    other("lstm-cell", lambda: Piped(stepped(nn.LSTMCell(4, 3)), 3), inputs=IDS),
    other("gru-cell", lambda: Piped(stepped(nn.GRUCell(4, 3)), 3), inputs=IDS),
    other("rnn-cell", lambda: Piped(stepped(nn.RNNCell(4, 3)), 3), inputs=IDS),
    other("lora-module", lambda: on_features(LowRank(4, 4))),
    other("lora-parametrization", low_rank_by_parametrization, inputs=IDS),
    other("bare-0d-1d-2d-3d", lambda: bare((), (3,), (4, 4), (2, 2, 3))),
    other("bare-with-a-leading-one", lambda: bare((1, 1, 4), (1, 3, 2))),
    other("bilinear", lambda: nn.Sequential(nn.Linear(5, 4), Net(lambda m, x: m.inner(x, x),
                                                                 inner=nn.Bilinear(4, 4, 3)))),
    other("prelu", lambda: on_features(nn.PReLU(4))),
    other("parameter-list", lambda: on_features(listed())),
    other("bias-alone", lambda: on_features(bias_alone())),
    other("gpt2", lambda: GPT(tied=False), target=labels(3, classes=6), inputs=IDS, samples=4),
    other("llama", Llama, target=labels(3, classes=6), inputs=IDS, samples=4),
    other("bert", lambda: BERT().eval(), inputs=IDS, samples=4),
    other("vit", ViT, inputs=features(1, 4, 4), samples=4),
]  # fmt: skip

CASES = [*DENSE, *SHARED, *COUPLED, *SEQUENCES, *CONVOLUTIONS]


def case(name):
    """The case called ``name``."""
    return next(c for c in [*CASES, *OTHERS] if c.name == name)

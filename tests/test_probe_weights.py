"""What a batch of a stream counts: the Hessian of batches of unequal length is that of all in one evaluation."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hesscond
from hesscond import GGNOperator, HessianOperator
from hesscond.errors import ConfigError
from hesscond.problem.weighting import Rule, Weights
from tests.test_probe_stream import Named
from tests.truth import double_backward

WORDS = 6
LAYERS = ("hidden", "out")
PARAMETERS = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
CLASSES = torch.tensor([0.3, 2.0, 1.0, 0.1, 5.0, 1.0], dtype=torch.float64)


class Output(OrderedDict):
    """What a Hugging Face model returns: a dataclass whose fields, but for those that are None, are items of a dict."""

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        kind, _, *rest = super().__reduce__()
        return kind, tuple(getattr(self, field.name) for field in fields(self)), *rest


@dataclass
class LanguageOutput(Output):
    loss: Any = None
    logits: Any = None
    cache: Any = None


class Encoding(UserDict):
    """What a Hugging Face tokenizer returns: no subclass of dict."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Language(nn.Module):
    """A causal language model: every position sees the mean of those before it."""

    def __init__(self, shift=1):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(WORDS, 3), nn.Linear(3, 4)
        self.drop, self.out = nn.Dropout(0.4), nn.Linear(4, WORDS)
        self.shift = shift

    def forward(self, input_ids, attention_mask=None, labels=None, **options):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[..., None].to(self.out.weight.dtype)
        seen = (self.embedding(input_ids) * mask).cumsum(1) / mask.cumsum(1)
        logits = self.out(self.drop(torch.tanh(self.hidden(seen))))
        if labels is None:
            return logits
        ahead, expected = logits[:, : logits.shape[1] - self.shift], labels[:, self.shift :]
        return LanguageOutput(loss=F.cross_entropy(ahead.flatten(0, 1), expected.flatten()), logits=logits)


def model(**options):
    torch.manual_seed(1)
    return Language(**options).double().eval()


def sequences(pad=None, sizes=((3, 4), (5, 9), (2, 6)), seed=0):
    """Batches of sequences; padded ones end with ``pad`` as targets."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n, length in sizes:
        x, y = (torch.randint(0, WORDS, (n, length), generator=generator) for _ in range(2))
        if pad is not None:
            for row, lost in zip(y, torch.randint(1, length - 1, (n,), generator=generator).tolist(), strict=True):
                row[-lost:] = pad
        found.append((x, y))
    return found


def hessian(network, total, count, batches):
    """By double backward, of Σ total / Σ count over all batches in one evaluation."""
    tensors = [dict(network.named_parameters())[name] for name in PARAMETERS]
    loss = sum(total(batch) for batch in batches) / sum(count(batch) for batch in batches)
    return double_backward(loss, tensors)


def is_close(found, truth):
    assert (found - truth).norm() <= 1e-12 * truth.norm()


def by_entry(output, target, **options):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def by_sequence(output, target):
    losses = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses.sum(1) / (target != -100).sum(1)).mean()


def of_sequences(output, target):
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none").sum(1).mean()


def ahead(output, target, **options):
    return by_entry(output[:, :-1], target[:, 1:], **options)


def masked(output, target):
    labels, mask = target
    return (F.cross_entropy(output.transpose(1, 2), labels, reduction="none") * mask).sum() / mask.sum()


def with_masks(batches):
    return [(x, (y.clamp(min=0), (y >= 0).double())) for x, y in batches]


class Hidden:
    """A loss that shows nothing of what it is made of."""

    def __init__(self, **options):
        self._options = {"options": options}

    def __call__(self, output, target):
        return by_entry(output, target, **self._options["options"])


class Wrapped(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(**options)

    def forward(self, output, target):
        return self.criterion(output.flatten(0, 1), target.flatten())


WEIGHTED = nn.CrossEntropyLoss(weight=CLASSES)


def counted(ignored):
    return lambda batch: int((batch[1] != ignored).sum())


# name: loss, batches, the sum of the losses of a batch (an unreduced one by hand), what it is divided by
LOSSES = {
    "lambda": (lambda o, t: by_entry(o, t), sequences(), partial(by_entry, reduction="sum"), counted(-100)),
    "padded": (lambda o, t: by_entry(o, t), sequences(-100), partial(by_entry, reduction="sum"), counted(-100)),
    "transposed": (
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t), sequences(-100), partial(by_entry, reduction="sum"),
        counted(-100),
    ),
    "sum": (lambda o, t: by_entry(o, t, reduction="sum"), sequences(-100), partial(by_entry, reduction="sum"),
            lambda batch: 1 / 3),
    "another-pad": (lambda o, t: by_entry(o, t, ignore_index=0), sequences(0),
                    partial(by_entry, reduction="sum", ignore_index=0), counted(0)),
    "hidden-pad": (Hidden(ignore_index=0), sequences(0), partial(by_entry, reduction="sum", ignore_index=0),
                   counted(0)),
    "hidden-pad-late": (
        Hidden(ignore_index=0), [(x, y.clamp(min=1)) for x, y in sequences(sizes=((3, 4),))] + sequences(0),
        partial(by_entry, reduction="sum", ignore_index=0), counted(0),
    ),
    "module": (Wrapped(ignore_index=2), sequences(2), partial(by_entry, reduction="sum", ignore_index=2), counted(2)),
    "smoothed": (Wrapped(label_smoothing=0.1), sequences(-100),
                 partial(by_entry, reduction="sum", label_smoothing=0.1), counted(-100)),
    "class-weights": (
        lambda o, t: WEIGHTED(o.flatten(0, 1), t.flatten()), sequences(-100),
        partial(by_entry, reduction="sum", weight=CLASSES), lambda batch: CLASSES[batch[1][batch[1] >= 0]].sum(),
    ),
    "shifted": (ahead, sequences(-100), partial(ahead, reduction="sum"),
                lambda batch: int((batch[1][:, 1:] != -100).sum())),
    "mask": (masked, with_masks(sequences(-100)), lambda o, t: masked(o, t) * t[1].sum(),
             lambda batch: batch[1][1].sum()),
    "mask-of-ones": (masked, with_masks(sequences()), lambda o, t: masked(o, t) * t[1].sum(),
                     lambda batch: batch[1][1].sum()),
    "squares": (nn.MSELoss(), [(x, F.one_hot(y, WORDS).double()) for x, y in sequences()],
                lambda o, t: (o - t).square().sum(), lambda batch: batch[1].numel()),
    "nothing-counts-in-the-first": (
        lambda o, t: by_entry(o, t), [(x, torch.full_like(y, -100)) for x, y in sequences()[:1]] + sequences(-100),
        partial(by_entry, reduction="sum"), counted(-100),
    ),
}  # fmt: skip


@pytest.mark.share(3)
@pytest.mark.parametrize("name", LOSSES)
def test_batches_of_unequal_length_are_the_whole(name):
    loss_fn, batches, total, count = LOSSES[name]
    network = model()
    # what all batches count, so that a sum is divided by one
    truth = hessian(network, lambda batch: total(network(batch[0]), batch[1]), count, batches)
    if name == "sum":
        truth = truth * sum(count(batch) for batch in batches)
    is_close(HessianOperator(network, loss_fn, batches, parameters=PARAMETERS).to_dense(), truth)


def by_layer(truth, layer):
    """The block of a layer, unit by unit as [b, w]."""
    start = {"hidden": 0, "out": 16}[layer]
    units, width = {"hidden": (4, 3), "out": (WORDS, 4)}[layer]
    rows = [
        [start + units * width + unit, *range(start + unit * width, start + (unit + 1) * width)]
        for unit in range(units)
    ]
    index = torch.tensor(rows).flatten()
    return truth[index][:, index], width + 1


def test_the_gauss_newton_matrix_and_a_layer_without_forming_it():
    network, batches = model(), sequences(-100)
    loss_fn, _, total, count = LOSSES["lambda"]
    truth = hessian(network, lambda batch: total(network(batch[0]), batch[1]), count, batches)
    # the Gauss-Newton matrix of the last layer is its Hessian
    gauss_newton = GGNOperator(network, loss_fn, batches, parameters=PARAMETERS[2:]).to_dense()
    is_close(gauss_newton, truth[16:, 16:])
    is_close(hesscond.HessianOperator(network, loss_fn, batches, layers="out").to_dense(), by_layer(truth, "out")[0])


def test_a_network_whose_outputs_are_all_the_same_is_decided_too():
    network, batches = model(), sequences()
    with torch.no_grad():
        network.out.weight.zero_()
        network.out.bias.zero_()
    loss_fn, _, total, count = LOSSES["lambda"]
    truth = hessian(network, lambda batch: total(network(batch[0]), batch[1]), count, batches)
    is_close(HessianOperator(network, loss_fn, batches, parameters=PARAMETERS).to_dense(), truth)


def gathered(output, target):
    return -output.log_softmax(-1).gather(-1, target[..., None]).mean()


def with_zeros(output, target):
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean()


def with_hidden_weights(output, target):
    return by_entry(output, target, weight=torch.arange(1.0, 1 + WORDS, dtype=output.dtype))


UNDECIDED = [
    (gathered, sequences()), (with_zeros, sequences(-100)), (with_hidden_weights, sequences()),
    (by_sequence, sequences(-100)), (of_sequences, sequences()),
]  # fmt: skip


@pytest.mark.parametrize("level", ["unit", "network"])
@pytest.mark.parametrize(("loss_fn", "batches"), UNDECIDED)
def test_what_the_loss_does_not_show_is_refused(loss_fn, batches, level):
    with pytest.raises(ConfigError, match=r"weight=.*reduction=") as caught:
        hesscond.probe(model(), loss_fn, batches, list(LAYERS), level)
    assert "\n" not in str(caught.value)


def test_batches_of_equal_length_need_no_decision():
    network, batches = model(), sequences(sizes=((3, 5), (4, 5)))
    truth = hessian(network, lambda batch: gathered(network(batch[0]), batch[1]) * len(batch[1]),
                    lambda batch: len(batch[1]), batches)  # fmt: skip
    is_close(HessianOperator(network, gathered, batches, parameters=PARAMETERS).to_dense(), truth)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("weight", [lambda x, y: y.numel(), [12, 45.0, torch.tensor(12)], torch.tensor([24, 90, 24])])
def test_weights_given(weight, level):
    network, batches = model(), sequences()
    truth = hessian(network, lambda batch: gathered(network(batch[0]), batch[1]) * batch[1].numel(),
                    lambda batch: batch[1].numel(), batches)  # fmt: skip
    result = hesscond.probe(network, gathered, batches, ["out"], level, weight=weight)
    block, width = by_layer(truth, "out")
    if level == "layer":
        is_close(result["out"].hessian(), block)
    elif level == "unit":
        is_close(result["out"].hessian(unit=1), block[width : 2 * width, width : 2 * width])
    else:
        found, expected = result["network"].eigenvalues(), torch.linalg.eigvalsh(block)
        assert float(found.max()) == pytest.approx(float(expected.max()), rel=1e-10)


def test_what_is_given_overrides_what_is_found():
    """Sequences count alike for a loss that is known to average over targets."""
    network, batches = model(), sequences()
    loss_fn = LOSSES["lambda"][0]
    truth = hessian(network, lambda batch: len(batch[1]) * loss_fn(network(batch[0]), batch[1]),
                    lambda batch: len(batch[1]), batches)  # fmt: skip
    for given in ({"reduction": "mean"}, {"weight": [3, 5, 2]}):
        is_close(HessianOperator(network, loss_fn, batches, parameters=PARAMETERS, **given).to_dense(), truth)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weight": 3}, "weight must be a function"),
        ({"weight": "ab"}, "weight must be a function"),
        ({"weight": [1, 2]}, "2 numbers, but there are more batches"),
        ({"weight": [1, 2, 3, 4]}, "4 numbers for 3 batches"),
        ({"weight": [1, -2, 3]}, "batch 1 must be a number of at least 0, not -2"),
        ({"weight": [1, float("nan"), 3]}, "batch 1 must be a number"),
        ({"weight": lambda x, y: None}, "batch 0 must be a number .* not a NoneType"),
        ({"weight": lambda x, y: y}, "batch 0 must be a number .* not a Tensor"),
        ({"weight": [0, 0, 0]}, "no target in the stream counts"),
        ({"weight": [1, 1, 1], "reduction": "mean"}, "give one of them"),
    ],
)
@pytest.mark.parametrize("level", ["unit", "network"])
def test_bad_weights(given, words, level):
    with pytest.raises(ConfigError, match=words):
        hesscond.probe(model(), gathered, sequences(), list(LAYERS), level, **given)


# ------------------------------------------------------------------------------------- mappings, and losses inside


def encoded(pad, kind=dict, alike=True):
    """Batches as mappings; for a causal model the labels are the inputs, but where they are padded."""
    return [
        kind(
            input_ids=(ids := y.clamp(min=0)),
            attention_mask=(y != -100).long(),
            labels=ids if alike and pad is None else y,
        )
        for _, y in sequences(pad)
    ]


def inner(output, target):
    return output.loss


def labels_counted(network):
    return lambda batch: int((batch["labels"][:, network.shift :] != -100).sum())


@pytest.mark.share(4)
@pytest.mark.parametrize("shift", [1, 0])
@pytest.mark.parametrize("pad", [None, -100])
@pytest.mark.parametrize("kind", [dict, Encoding])
def test_a_loss_that_the_model_computes(kind, pad, shift):
    network, batches = model(shift=shift), encoded(pad, kind)
    count = labels_counted(network)
    truth = hessian(network, lambda batch: count(batch) * network(**batch).loss, count, batches)
    for data in (batches, [(batch, None) for batch in batches], [(batch, batch["labels"]) for batch in batches]):
        is_close(HessianOperator(network, inner, data, parameters=PARAMETERS).to_dense(), truth)
    layer = hesscond.probe(network, inner, batches, ["out"], "layer")["out"]
    is_close(layer.hessian(), by_layer(truth, "out")[0])
    unit = hesscond.probe(network, inner, batches, ["hidden"], "unit")["hidden"]
    is_close(unit.hessian(unit=2), by_layer(truth, "hidden")[0][8:12, 8:12])


def test_dropout_does_not_hide_what_the_model_averages():
    """In training mode samples of parts would draw other numbers than in the whole."""
    network, batches = model().train(), encoded(-100)
    rules, count = {}, labels_counted(network)
    for mode in (True, False):
        H = HessianOperator(network.train(mode), inner, batches, parameters=PARAMETERS)
        rules[mode] = {rule: sum(own) for rule, own in H.problem._weights.masses.items()}
    assert rules[True] == rules[False] == {Rule("entries", shifted=True, ignored=-100): sum(map(count, batches))}
    assert network.training is False


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_a_loader_of_mappings_is_one_batch_of_them(level):
    network, (_, batch, _) = model(), encoded(-100)
    loader = DataLoader(Named(batch, len(batch["labels"])), batch_size=2)
    one = hesscond.probe(network, inner, batch, level=level)
    parts = hesscond.probe(network, inner, loader, level=level)
    truth = hessian(network, lambda batch: network(**batch).loss, lambda batch: 1, [batch])
    for name in LAYERS:
        block, width = by_layer(truth, name)
        for result in (one, parts):
            if level == "layer":
                is_close(result[name].hessian(), block)
            else:
                is_close(result[name].hessian(unit=1), block[width : 2 * width, width : 2 * width])


@dataclass(frozen=True)
class Record:
    logits: torch.Tensor


class Classifier(nn.Module):
    """Takes no labels, and returns a dataclass that is no dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return Record(self.layer(x))


@pytest.mark.parametrize("key", ["labels", "label"])
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_labels_that_the_model_does_not_take(key, level):
    torch.manual_seed(0)
    network = Classifier().double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    loss_fn = lambda output, target: F.cross_entropy(output.logits, target)  # noqa: E731
    truth = hesscond.probe(network, loss_fn, (x, y), level=level)
    for data in ({"x": x, key: y}, [{"x": x[:5], key: y[:5]}, {"x": x[5:], key: y[5:]}]):
        result = hesscond.probe(network, loss_fn, data, level=level)
        for name in truth:
            for unit in range(3) if level == "unit" else [None]:
                one, other = (found[name].eigenvalues(*[] if unit is None else [unit]) for found in (truth, result))
                assert (one - other).abs().max() <= 1e-12 * one.abs().max()


def test_an_empty_stream_has_no_total():
    weights = Weights(model(), nn.CrossEntropyLoss(), None, "sum")
    with pytest.raises(ConfigError, match="empty stream"):
        _ = weights.total

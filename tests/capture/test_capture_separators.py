"""Curvature formed once behind many layers: what is derived from it is the truth, and takes fewer derivatives."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.capture import backward, separators
from tests.capture.test_capture_double_backward import assert_true, by_sample
from tests.catalogue.parts import Net, by_token

TOKENS, WIDTH, CLASSES, SAMPLES = 4, 4, 3, 2


def attention(causal):
    """Two heads; over another sequence if one is given."""

    def forward(m, x, other=None):
        other = x if other is None else other
        heads = [h.unflatten(2, (2, -1)).transpose(1, 2) for h in (m.q(x), *m.kv(other).chunk(2, 2))]
        y = F.scaled_dot_product_attention(*heads, is_causal=causal)
        return m.o(y.transpose(1, 2).flatten(2))

    parts = {"q": nn.Linear(WIDTH, WIDTH), "kv": nn.Linear(WIDTH, 2 * WIDTH), "o": nn.Linear(WIDTH, WIDTH)}
    return Net(forward, **parts)


def gated():
    parts = {"gate": nn.Linear(WIDTH, 5), "up": nn.Linear(WIDTH, 5), "down": nn.Linear(5, WIDTH)}
    return Net(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **parts)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))


class PreNorm(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), or both at once."""

    def __init__(self, feed_forward, causal=True, parallel=False):
        super().__init__()
        self.norm1, self.norm2, self.parallel = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), parallel
        self.attention, self.mlp = attention(causal), feed_forward()

    def forward(self, x):
        if self.parallel:
            return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(PreNorm):
    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


def tokenwise():
    return Net(lambda m, x: x + m.mlp(m.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=gated())


def with_head(forward, **parts):
    return Net(forward, **parts, head=nn.Linear(WIDTH, CLASSES))


def cross_attention():
    """A source, its reverse without the last token, and what the one sees of the other."""

    def forward(m, x):
        memory, y = m.source(x), m.target(x.flip(1)[:, 1:])
        y = y + m.cross(y, memory)
        return m.head(torch.cat([y, y[:, :1]], 1))

    return with_head(forward, source=PreNorm(mlp, False), target=PreNorm(mlp), cross=attention(False))


def mixed():
    """A convolution along the tokens, then attention, and a layer that is called twice."""

    def forward(m, x):
        x = x + torch.tanh(m.conv(x.mT)).mT
        return m.head(m.twice(m.block(m.twice(x))))

    return with_head(forward, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1), block=PreNorm(mlp), twice=tokenwise())


def in_place():
    """Residuals are added in place, and the stream is put together from slices."""

    def forward(m, x):
        x = m.first(x)
        y = m.attention(x).add_(x)
        stream = torch.zeros_like(y)
        stream[:, ::2] = m.second(y)[:, ::2]
        stream[:, 1::2] = 2 * y[:, 1::2]
        return m.head(stream)

    return with_head(forward, first=tokenwise(), attention=attention(True), second=tokenwise())


def samples_coupled():
    def forward(m, x):
        return m.head(m.second(m.norm(m.block(x).mT).mT))

    return with_head(forward, block=PreNorm(mlp), norm=nn.BatchNorm1d(WIDTH), second=PreNorm(mlp))


def stacked(*blocks):
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


MODELS = {
    "gpt": lambda: stacked(PreNorm(mlp), PreNorm(mlp)),
    "post-norm encoder": lambda: stacked(PostNorm(mlp, False), PostNorm(mlp, False)),
    "gated": lambda: stacked(PreNorm(gated), PreNorm(gated)),
    "parallel": lambda: stacked(PreNorm(mlp, parallel=True), PreNorm(gated, parallel=True)),
    "tokens apart": lambda: stacked(tokenwise(), tokenwise(), tokenwise()),
    "cross-attention": cross_attention,
    "convolution and attention": mixed,
    "in place": in_place,
    "samples coupled": samples_coupled,
}


def problem(make, samples=SAMPLES):
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model, (torch.randn(samples, TOKENS, WIDTH).double(), torch.randint(0, CLASSES, (samples, TOKENS)))


@pytest.fixture
def used(monkeypatch):
    """Separators wherever there are any, however small the gain; how many were formed, and used for which layers."""
    monkeypatch.setattr(separators, "WORTHWHILE", 0.0)
    monkeypatch.setattr(separators, "GAIN", 0.0)
    found = {"layers": [], "from loss": 0, "from separator": 0}

    def counting(name, key):
        original = getattr(separators.Separators, name)

        def call(self, *args):
            result = original(self, *args)
            if result is not None:
                found[key] += 1
            return result

        monkeypatch.setattr(separators.Separators, name, call)

    counting("from_loss", "from loss")
    counting("from_separator", "from separator")
    original = separators.Separators.curvature

    def curvature(self, segment, request, blocks):
        result = original(self, segment, request, blocks)
        if result is not None:
            found["layers"].append(request.name)
        return result

    monkeypatch.setattr(separators.Separators, "curvature", curvature)
    return found


@pytest.mark.share(18)
@pytest.mark.parametrize(
    ("loss", "level"),
    [
        (by_token, "unit"),
        (by_sample, "layer"),
        pytest.param(by_token, "layer", marks=pytest.mark.slow),
        pytest.param(by_sample, "unit", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_any_model_is_the_truth(name, loss, level, used):
    model, batch = problem(MODELS[name])
    result = hesscond.probe(model, loss, batch, level=level)
    assert used["layers"] if name != "samples coupled" else used["from loss"]
    assert_true(result, model, loss, batch)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_one_sample(level, used):
    model, batch = problem(MODELS["gpt"], 1)
    result = hesscond.probe(model, by_token, batch, level=level)
    assert used["from separator"]
    assert_true(result, model, by_token, batch)


def test_a_stream_of_ragged_batches(used):
    model, (x, y) = problem(MODELS["gpt"], 3)
    layers = ["0.attention.kv", "0.mlp.0", "1.attention.o"]
    result = hesscond.probe(model, by_token, [(x[:1], y[:1]), (x[1:], y[1:])], layers)
    assert used["from separator"]
    assert_true(result, model, by_token, (x, y))


def test_a_transformer_takes_a_fraction_of_the_directions(monkeypatch):
    def wide():
        return nn.Sequential(nn.Linear(WIDTH, 300), nn.GELU(), nn.Linear(300, WIDTH))

    model, batch = problem(lambda: stacked(PreNorm(wide), PreNorm(mlp)))
    counted = [0]
    original = backward.Derivatives.__call__

    def counting(self, seeds):
        counted[0] += len(seeds[0])
        return original(self, seeds)

    monkeypatch.setattr(backward.Derivatives, "__call__", counting)
    layers = ["0.attention.o", "0.mlp.0", "0.mlp.2"]
    found = []
    for worthwhile in (math.inf, 0.0):
        monkeypatch.setattr(separators, "WORTHWHILE", worthwhile)
        counted[0] = 0
        hesscond.probe(model, by_token, batch, layers)
        found.append(counted[0])
    without, with_cuts = found
    # one direction for each unit and position
    assert without >= TOKENS * (4 + 300 + 4)
    # one for each entry of the stream of a sample, one for each unit, and what tests the blocks and compares products
    assert with_cuts <= TOKENS * WIDTH + (4 + 300 + 4) + 250


def test_what_a_direct_product_does_not_confirm_is_not_taken(used, monkeypatch):
    model, batch = problem(MODELS["gpt"])
    original = separators.Separator.times
    monkeypatch.setattr(separators.Separator, "times", lambda self, images: 1.001 * original(self, images))
    result = hesscond.probe(model, by_token, batch, ["0.attention.kv", "0.mlp.0", "1.attention.o"])
    assert used["layers"]
    assert_true(result, model, by_token, batch)


def test_some_units_in_any_order(used):
    model, batch = problem(MODELS["gpt"])
    both = hesscond.capture.capture(model, by_token, batch, ["0.attention.kv"], units={"0.attention.kv": [6, 1]})
    assert used["layers"] == ["0.attention.kv"]
    every = hesscond.capture.capture(model, by_token, batch, ["0.attention.kv"])["0.attention.kv"]
    for column, unit in enumerate((6, 1)):
        one, other = both["0.attention.kv"].curvature, every.curvature
        S = [
            torch.einsum("rjp,rj,rjq->jpq", f.B[:, :, c], f.sign[:, :, c], f.B[:, :, c])
            for f, c in ((one, column), (other, unit))
        ]
        assert (S[0] - S[1]).norm() <= 1e-12 * S[1].norm()

"""Tokens and attention, at all levels."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import grid
from tests.catalogue.parts import CE, MSE, Drawn, Net, labelled, valued

sequence = functools.partial(grid, "Tokens and attention")


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


def mean_over_tokens(h):
    return h.mean(1)


def class_per_token(*, classes_second):
    """One classification per token, logits (N, T, c) or (N, c, T)."""

    def forward(m, x):
        logits = m.head(torch.relu(m.first(x)))
        return logits.transpose(1, 2) if classes_second else logits

    return Net(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 3))


def per_token(output, target):
    return F.cross_entropy(output.reshape(-1, 3), target.reshape(-1))


def sequence_first(real=False):
    draw = Drawn()
    return draw.normal(3, 5, 4), draw.normal(5, 3) if real else draw.integers(3, 5)


sequence("tokens-mean", lambda: (over_tokens(mean_over_tokens, nn.ReLU()), CE, labelled(3, 4)), psd=True)
sequence("tokens-mean-tanh", lambda: (over_tokens(mean_over_tokens, nn.Tanh()), CE, labelled(3, 4)))
sequence("tokens-leading-shape", lambda: (over_tokens(lambda h: h.mean((1, 2)), nn.GELU()), MSE, valued(2, 2, 4, n=5)))
sequence("per-token-lambda",
    lambda: (class_per_token(classes_second=False), per_token,
             labelled(3, 4, to=(3,))), psd=True)  # fmt: skip
sequence("per-token-classes-second",
    lambda: (class_per_token(classes_second=True), CE,
             labelled(3, 4, to=(3,))), psd=True)  # fmt: skip
sequence("sequence-first",
    lambda: (over_tokens(lambda h: h.sum(0), nn.Tanh()), CE,
             sequence_first()), streams=False)  # fmt: skip
sequence("sequence-first-relu",
    lambda: (over_tokens(lambda h: h.amax(0), nn.ReLU()), MSE, sequence_first(real=True)),
    psd=True, streams=False)  # fmt: skip
sequence("attention-sdpa", lambda: (attention(F.scaled_dot_product_attention), CE, labelled(3, 4, n=4)))
sequence("attention-causal",
    lambda: (attention(functools.partial(F.scaled_dot_product_attention, is_causal=True)), CE,
             labelled(3, 4, n=4)))  # fmt: skip
sequence("attention-by-hand", lambda: (attention(attention_by_hand), CE, labelled(3, 4, n=4)))

"""Transformers: of images, and of the next token."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.models import layers
from hesscond.models.registry import register

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def token_normalization(name: str, width: int) -> nn.Module:
    """The normalization of tokens (N, T, width)."""
    kind, options = layers.normalization_of(name, (*NORMS, "none"))
    return NORMS[kind](width, **({"eps": 1e-6} | options)) if kind in NORMS else nn.Identity()


class Attention(nn.Module):
    """Multi-head self-attention with dense layers ``q``, ``k``, ``v``, ``out``; if causal, of the tokens up to each.

    Written out, since not every fused kernel of torch has second derivatives.
    """

    def __init__(self, make: layers.Layers, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"the width of tokens must be a multiple of the number of heads, got {width} and {heads}")
        self.heads, self.causal = heads, causal
        self.q = make.dense(width, width)
        self.k = make.dense(width, width)
        self.v = make.dense(width, width)
        self.out = make.dense(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) of (N, T, width)."""
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.causal:
            tokens = torch.arange(x.shape[1], device=x.device)
            scores = scores.masked_fill(tokens > tokens[:, None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(N, heads, T, width / heads) of (N, T, width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and a network of two dense layers, each after a normalization and with a residual connection."""

    def __init__(
        self,
        make: layers.Layers,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
        activation: str,
        norm: str,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = token_normalization(norm, width)
        self.attention = Attention(make, width, heads, causal=causal)
        self.norm2 = token_normalization(norm, width)
        self.fc1 = make.dense(width, hidden)
        self.activation = layers.make_activation(activation)
        self.fc2 = make.dense(hidden, width)
        self.dropout = layers.make_dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) of (N, T, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = self.dropout(self.activation(self.fc1(self.norm2(x))))
        return x + self.dropout(self.fc2(hidden))


class VisionTransformer(nn.Module):
    """``patches``, a class token, positions, ``block1``, …, ``norm``, and ``fc`` on the class token.

    Dosovitskiy et al., An Image Is Worth 16×16 Words (ICLR 2021, section 3.1, table 1); the small one is that of
    Touvron et al. (DeiT, ICML 2021). All weights, the class token and the positions begin with N(0, 0.02²)
    truncated, as in DeiT.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        patch: int = 16,  # height and width of a patch; divides those of the image
        width: int = 384,  # features of a token
        depth: int = 12,  # number of blocks
        heads: int = 6,  # attention heads; divides width
        hidden: int = 1536,  # width of the hidden dense layer of a block
        dropout: float = 0.0,  # probability after positions, attention and dense layers
        activation: str = "gelu",
        norm: str = "layer",  # "layer", "rms", both with ":eps=…" (10⁻⁶ if not given), or "none"
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        channels, rows, columns = layers.image_shape(input_shape, patch)
        if rows % patch or columns % patch:
            raise ConfigError(f"patches of {patch} x {patch} pixels do not tile images of {rows} x {columns}")
        make = layers.Layers(layers.truncated_normal, generator)
        self.patches = make.conv(channels, width, patch, stride=patch, padding=0, bias=True)
        tokens = (rows // patch) * (columns // patch) + 1
        drawn = partial(nn.init.trunc_normal_, std=0.02, generator=generator)
        self.class_token = nn.Parameter(drawn(torch.empty(1, 1, width)))
        self.positions = nn.Parameter(drawn(torch.empty(1, tokens, width)))
        self.dropout = layers.make_dropout(dropout)
        self.blocks = [f"block{i}" for i in range(1, depth + 1)]
        for name in self.blocks:
            self.add_module(name, Block(make, width, heads, hidden, dropout, activation, norm))
        self.norm = token_normalization(norm, width)
        self.fc = make.dense(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (N, outputs) of images (N, channels, height, width)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = self.get_submodule(block)(x)
        return self.fc(self.norm(x)[:, 0])


class GPT(nn.Module):
    """``embedding``, ``positions``, ``block1``, …, ``norm``, and ``fc``: of every token the scores of the next.

    Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3, as small as nanoGPT has it:
    layer normalization before attention, dense layers and output. Weights and embeddings begin with N(0, 0.02²), what
    writes into the sum of the residuals with 1/√(2·depth) of that; the output layer has no bias.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        width: int = 128,  # features of a token
        depth: int = 4,  # number of blocks
        heads: int = 4,  # attention heads; divides width
        ratio: int = 4,  # width of the hidden dense layer of a block over that of a token
        dropout: float = 0.0,  # probability after positions, attention and dense layers
        activation: str = "gelu",
        norm: str = "layer:eps=1e-5",  # "layer", "rms", both with ":eps=…" (10⁻⁶ if not given), or "none"
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigError(
                f"this network needs sequences of tokens (context,), not inputs of shape {tuple(input_shape)}"
            )
        make = layers.Layers(layers.normal, generator)
        drawn = partial(nn.init.normal_, std=0.02, generator=generator)
        self.embedding = nn.Embedding.from_pretrained(drawn(torch.empty(outputs, width)), freeze=False)
        self.positions = nn.Embedding.from_pretrained(drawn(torch.empty(input_shape[0], width)), freeze=False)
        self.dropout = layers.make_dropout(dropout)
        self.blocks = [f"block{i}" for i in range(1, depth + 1)]
        for name in self.blocks:
            block = Block(make, width, heads, ratio * width, dropout, activation, norm, causal=True)
            for last in (block.attention.out, block.fc2):
                last.weight.data.mul_((2 * depth) ** -0.5)
            self.add_module(name, block)
        self.norm = token_normalization(norm, width)
        self.fc = make.dense(width, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (N, T, outputs) of the tokens that follow each of the tokens (N, T)."""
        x = self.dropout(self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = self.get_submodule(block)(x)
        return self.fc(self.norm(x))


register("vit-s16", "ViT-S/16", "image", VisionTransformer)
register("vit-b16", "ViT-B/16", "image", VisionTransformer, width=768, heads=12, hidden=3072)
register("gpt", "decoder-only transformer, as small as nanoGPT", "tokens", GPT)

"""Parameters of modules of other kinds: embeddings, normalizations, packed attention, recurrent gates, bare ones."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add
from tests.catalogue.parts import CE, Net, labelled, next_words, words


def stirred(build):
    """What builds the same with all parameters away from where they start: scales of one, shifts of zero."""

    def make():
        model, loss_fn, batch = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        return model, loss_fn, batch

    return make


def block(name, build, **facts):
    """Add the row of a model all of whose parameters are measured."""
    add("Parameters of other modules", name, None, stirred(build), blocks=True, **facts)


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


def step(cell):
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


def transformer_block(attn, mlp, norm=lambda: nn.LayerNorm(4)):
    """Attention and a multilayer perceptron, each after a normalization and around a skip connection."""

    def forward(m, x):
        x = x + m.attn(m.ln_1(x))
        return x + m.mlp(m.ln_2(x))

    return Net(forward, ln_1=norm(), attn=attn, ln_2=norm(), mlp=mlp)


def dense_of(out, inner):
    return nn.Linear(inner, out)


def gpt(*, tied=True, dense=dense_of):
    """A decoder: token and position embeddings, a block, a head with the weight of the token embedding or its own."""

    def forward(m, ids):
        x = m.h(m.wte(ids) + m.wpe.weight[: ids.shape[1]])
        return m.lm_head(m.ln_f(x)).transpose(1, 2)

    block = transformer_block(GPT2Attention(4, 2, dense), nn.Sequential(dense(6, 4), nn.GELU(), dense(4, 6)))
    model = Net(forward, wte=nn.Embedding(6, 4), wpe=nn.Embedding(8, 4), h=nn.Sequential(block), ln_f=nn.LayerNorm(4),
                lm_head=nn.Linear(4, 6, bias=False))  # fmt: skip
    if tied:
        model.lm_head.weight = model.wte.weight
    return model


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


def swiglu():
    """A gated multilayer perceptron."""
    parts = {f"{name}_proj": nn.Linear(4, 5, bias=False) for name in ("gate", "up")}
    return Net(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x)), **parts,
               down_proj=nn.Linear(5, 4, bias=False))  # fmt: skip


def llama():
    """A decoder with root-mean-square normalization, rotated attention and gated perceptrons."""
    block = transformer_block(RotaryAttention(), swiglu(), lambda: RootMeanSquare(4))
    return Net(lambda m, ids: m.lm_head(m.norm(m.layers(m.embed_tokens(ids)))).transpose(1, 2),
               embed_tokens=nn.Embedding(6, 4), layers=nn.Sequential(block), norm=RootMeanSquare(4),
               lm_head=nn.Linear(4, 6, bias=False))  # fmt: skip


def bert():
    """An encoder: three embeddings, torch's own encoder layer, a pooled class token, and a bias of its own."""

    def forward(m, ids):
        x = m.word_embeddings(ids) + m.token_type_embeddings.weight[0]
        x = m.LayerNorm(x + m.position_embeddings(torch.arange(ids.shape[1], device=ids.device)))
        return m.classifier(torch.tanh(m.pooler(m.encoder(x)[:, 0]))) + m.bias

    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
    return Net(forward, word_embeddings=nn.Embedding(6, 4, padding_idx=0), position_embeddings=nn.Embedding(5, 4),
               token_type_embeddings=nn.Embedding(2, 4), LayerNorm=nn.LayerNorm(4),
               encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), pooler=nn.Linear(4, 4),
               classifier=nn.Linear(4, 3, bias=False), bias=nn.Parameter(torch.zeros(3)))  # fmt: skip


def vit():
    """Patches by a convolution, a class token, a positional table, one block."""

    def forward(m, x):
        x = m.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.cls_token.expand(len(x), -1, -1), x], 1) + m.pos_embed
        return m.head(m.norm(m.blocks(x))[:, 0])

    perceptron = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    return Net(forward, patches=nn.Conv2d(1, 4, 2, stride=2), cls_token=nn.Parameter(torch.zeros(1, 1, 4)),
               pos_embed=nn.Parameter(torch.randn(1, 5, 4)), norm=nn.LayerNorm(4), head=nn.Linear(4, 3),
               blocks=nn.Sequential(transformer_block(GPT2Attention(4, 2, dense_of), perceptron)))  # fmt: skip


def listed():
    """Parameters in a list and in a dictionary."""
    parts = {"scales": nn.ParameterList([torch.randn(4), torch.randn(4, 4)]), "shifts": nn.ParameterDict()}
    parts["shifts"]["first"] = torch.randn(4)
    return Net(lambda m, x: torch.tanh(x * m.scales[0] + m.shifts["first"]) @ m.scales[1], **parts)


def bias_alone():
    """A bias beside a layer without one."""
    parts = {"dense": nn.Linear(4, 4, bias=False), "bias": nn.Parameter(torch.zeros(4))}
    return Net(lambda m, x: m.dense(x) + m.bias, **parts)


def on_features(middle, width=4, **options):
    return Piped(middle, width, first=nn.Linear(5, 4), **options)


def recurrent(kind, width=3, **options):
    return Piped(kind(4, 3, batch_first=True, **options), width, pick=lambda output: output[0])


block("embedding-padded", lambda: (Piped(nn.Linear(4, 4), first=nn.Embedding(9, 4, padding_idx=0)), CE, words(6)))
block("layernorm-shift-and-scale", lambda: (Piped(nn.LayerNorm(4)), CE, words(6)))
block("layernorm-no-shift", lambda: (Piped(nn.LayerNorm(4, bias=False)), CE, words(6)))
block("layernorm-of-two-dimensions", lambda: (Piped(nn.LayerNorm((3, 4))), CE, words(6)))
block("rmsnorm", lambda: (Piped(nn.RMSNorm(4)), CE, words(6)))
block("rmsnorm-by-hand", lambda: (Piped(RootMeanSquare(4)), CE, words(6)))
block("groupnorm", lambda: (on_features(nn.GroupNorm(2, 4)), CE, labelled(5, n=6)))
block("instancenorm", lambda: (Piped(nn.InstanceNorm1d(3, affine=True)), CE, words(6)))
block("attention-no-bias", lambda: (Piped(self_attention(bias=False)), CE, words(4)))
block("attention-kdim", lambda: (Piped(self_attention(kdim=3, vdim=5)), CE, words(4)))
block("attention-bias-kv", lambda: (Piped(self_attention(add_bias_kv=True)), CE, words(4)))
block("conv1d-transposed", lambda: (Piped(Conv1D(5, 4), 5), CE, words(6)))
block("gpt2-conv1d", lambda: (gpt(tied=False, dense=Conv1D), CE, next_words(4)))
block("lstm-two-layers", lambda: (recurrent(nn.LSTM, num_layers=2), CE, words(4)))
block("lstm-bidirectional", lambda: (recurrent(nn.LSTM, 6, bidirectional=True), CE, words(4)))
block("lstm-projected", lambda: (recurrent(nn.LSTM, 2, proj_size=2), CE, words(6)))
block("lstm-no-bias", lambda: (recurrent(nn.LSTM, bias=False), CE, words(6)))
block("gru-bidirectional-two-layers", lambda: (recurrent(nn.GRU, 6, num_layers=2, bidirectional=True), CE, words(3)))
block("gru-cell", lambda: (Piped(step(nn.GRUCell(4, 3)), 3), CE, words(6)))
block("rnn-cell", lambda: (Piped(step(nn.RNNCell(4, 3)), 3), CE, words(6)))
block("lora-parametrization", lambda: (low_rank_by_parametrization(), CE, words(6)))
block("bare-0d-1d-2d-3d", lambda: (bare((), (3,), (4, 4), (2, 2, 3)), CE, labelled(5, n=6)))
block("bare-with-a-leading-one", lambda: (bare((1, 1, 4), (1, 3, 2)), CE, labelled(5, n=6)))
block("parameter-list", lambda: (on_features(listed()), CE, labelled(5, n=6)))
block("bias-alone", lambda: (on_features(bias_alone()), CE, labelled(5, n=6)))
block("gpt2-by-hand", lambda: (gpt(tied=False), CE, next_words(4)))
block("llama-by-hand", lambda: (llama(), CE, next_words(4)))
block("bert-by-hand", lambda: (bert().eval(), CE, words(4)))
block("vit-by-hand", lambda: (vit(), CE, labelled(1, 4, 4, n=4)))

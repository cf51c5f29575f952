"""Kinds of models that the support table tries, from torch alone: what people write, tiny, with a loss and a batch.

A kind is a function that returns ``(model, loss_fn, batch)`` from the random state that it finds, in the dtype that a
user would have (float32). `KINDS` lists them in the order of the page; those that need another library are in
``support/libraries.py``.
"""

import copy
import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from hesscond.methods import WeightNormalization
from tests.cases import Net

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def double(model):
    """The model in float64, as the truth sees it: a copy."""
    return copy.deepcopy(model).double()


@dataclass(frozen=True)
class Kind:
    """One kind of model.

    Attributes
    ----------
    group, title
        Where and under which name it stands on the page.
    make
        Makes (model, loss_fn, batch).
    layer
        The layer whose κ the page shows.
    twin
        The float64 model whose double backward is the truth, from the model; it computes the same function. Not simply
        a copy where `torch.autograd.grad` cannot run through the wrapper (reentrant checkpoints, compiled graphs).
    library
        What has to be importable, beside torch.
    processes
        How many processes of torch.distributed measure it together.
    """

    group: str
    title: str
    make: Callable[[], tuple[nn.Module, Callable[..., torch.Tensor], tuple[Any, Any]]]
    layer: str
    twin: Callable[[nn.Module], nn.Module] = double
    library: str | None = None
    processes: int = 1

    @property
    def name(self):
        """The name of its function."""
        return self.make.__name__

    @property
    def missing(self):
        """Why it cannot be tried here, or None."""
        if self.library is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(self.library)
        except Exception as error:  # a library that is installed and broken raises anything
            return f"{self.library} cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
        return None


KINDS: list[Kind] = []


def kind(group, title, layer, *, kinds=KINDS, **facts):
    """Register a function as a kind."""

    def register(make):
        kinds.append(Kind(group, title, make, layer, **facts))
        return make

    return register


def add(group, name, title, layer, make, **facts):
    """Register a function as a kind, by a name."""
    make = functools.partial(make)
    make.__name__ = name
    KINDS.append(Kind(group, title, make, layer, **facts))


def classes(n=20, d=4, c=3):
    """Features and labels."""
    return torch.randn(n, d), torch.randint(0, c, (n,))


def values(n=20, d=4, c=3):
    """Features and real targets."""
    return torch.randn(n, d), torch.randn(n, c)


def images(n=12, channels=2, side=4, c=3):
    """Images and labels."""
    return torch.randn(n, channels, side, side), torch.randint(0, c, (n,))


def tokens(n=8, length=4, d=4, c=3):
    """Sequences of vectors and a label for each."""
    return torch.randn(n, length, d), torch.randint(0, c, (n,))


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def mlp(activation=None, *, last=3):
    """Three dense layers."""
    activation = activation or nn.ReLU()
    return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3), activation, nn.Linear(3, last))


def around(layer, width=3, activation=None):
    """A layer from 4 to ``width`` and a dense head."""
    return nn.Sequential(layer, activation or nn.Tanh(), nn.Linear(width, 3))


def changed(change, twin=double):
    """Twin of a model, changed in place by ``change(twin)``."""

    def make(model):
        made = twin(model)
        change(made)
        return made

    return make


# ---------------------------------------------------------------------------------------------------------- ordinary

ORDINARY = "Ordinary networks"
ordinary = functools.partial(add, ORDINARY)


def batch_norm():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


def batch_norm_eval():
    model, loss, batch = batch_norm()
    model(batch[0] + 0.3)
    return model.eval(), loss, batch


def unet(m, x):
    """Down, up, skip connection by concatenation."""
    return m.out(torch.cat([x, m.up(F.silu(m.down(x)))], 1))


def detector(m, x):
    """Classes and boxes from one trunk, as a dict."""
    h = F.silu(m.trunk(x))
    return {"logits": m.classes(h), "boxes": m.boxes(h)}


def detection_loss(output, target):
    return F.cross_entropy(output["logits"], target["label"]) + F.smooth_l1_loss(output["boxes"], target["box"])


def detection():
    target = {"label": torch.randint(0, 3, (6, 2, 2)), "box": torch.randn(6, 4, 2, 2)}
    model = Net(detector, trunk=nn.Conv2d(2, 3, 2), classes=nn.Conv2d(3, 3, 1), boxes=nn.Conv2d(3, 4, 1))
    return model, detection_loss, (torch.randn(6, 2, 3, 3), target)


def mixture_of_experts(m, x):
    """A softmax router sends every sample to its two best experts."""
    gates, chosen = m.router(x).softmax(1).topk(2, 1)
    out = x.new_zeros(len(x), 3)
    for number, expert in enumerate(m.experts):
        rows, slot = torch.where(chosen == number)
        if len(rows):
            out = out.index_add(0, rows, gates[rows, slot, None] * torch.tanh(expert(x[rows])))
    return out


def complex_net(m, x):
    """A complex layer; the head sees its modulus."""
    return m.head(m.complex(torch.complex(x, x.roll(1, 1)).to(m.complex.weight.dtype)).abs())


def complex_twin(model):
    twin = copy.deepcopy(model)
    twin.head.double()
    twin.complex.to(torch.complex128)
    return twin


def resnet(m, x):
    """A residual block with batch normalization, its activations in place."""
    h = m.relu(m.norm(m.stem(x)))
    h = m.relu(m.conv(h).add_(h))
    return m.head(h.mean((2, 3)))


def graph_net(m, x, edges):
    """Graph convolutions: messages from neighbours are added up."""
    for layer in (m.first, m.head):
        messages = layer(x)
        x = torch.tanh(messages.index_add(0, edges[1], messages[edges[0]]))
    return x


def graph():
    inputs = {"x": torch.randn(15, 3), "edges": torch.randint(0, 15, (2, 30))}
    return Net(graph_net, first=nn.Linear(3, 4), head=nn.Linear(4, 3)), CE, (inputs, torch.randint(0, 3, (15,)))


def variational(m, x):
    """An autoencoder with its noise."""
    mean, log_variance = m.encoder(x).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    return m.decoder(torch.tanh(z)), mean, log_variance


def elbo(output, target):
    seen, mean, log_variance = output
    return F.mse_loss(seen, target) + 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).mean()


def vae():
    x = torch.randn(20, 3)
    return Net(variational, encoder=nn.Linear(3, 4), decoder=nn.Linear(2, 3)), elbo, (x, x)


def couplings(m, x):
    """A normalizing flow of affine couplings, with its log-determinant."""
    a, b = x.chunk(2, 1)
    scale, shift = m.first(a).chunk(2, 1)
    b = b * torch.tanh(scale).exp() + shift
    scale2, shift2 = m.second(b).chunk(2, 1)
    a = a * torch.tanh(scale2).exp() + shift2
    return torch.cat([a, b], 1), (torch.tanh(scale) + torch.tanh(scale2)).sum(1)


def likelihood(output, target):
    return (0.5 * output[0].square().sum(1) - output[1]).mean()


ordinary("plain_mlp", "MLP, ReLU, cross-entropy", "2", lambda: (mlp(), CE, classes()))
ordinary("smooth_mlp", "MLP, SiLU, squared error", "2", lambda: (mlp(nn.SiLU()), MSE, values()))
ordinary("cnn", "convolutional network", "0",
    lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), CE, images(20)))  # fmt: skip
ordinary("transposed", "transposed convolution", "0",
    lambda: (nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Tanh(), nn.Conv2d(2, 1, 2, stride=2)), MSE,
             (torch.randn(8, 2, 2, 2), torch.randn(8, 1, 2, 2))))  # fmt: skip
ordinary("grouped_dilated", "grouped and dilated convolution", "0",
    lambda: (nn.Sequential(nn.Conv2d(4, 4, 2, groups=2, dilation=2), nn.GELU(), nn.Flatten(), nn.Linear(16, 3)), CE,
             images(15, 4)))  # fmt: skip
ordinary("batchnorm_train", "batch normalization, training mode", "0", batch_norm)
ordinary("batchnorm_eval", "batch normalization, evaluation mode", "0", batch_norm_eval)
ordinary("batchnorm_parameters", "batch normalization itself", "1", batch_norm)
ordinary("layernorm", "layer normalization itself", "1",
    lambda: (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()))  # fmt: skip
ordinary("embedding", "embedding", "0",
    lambda: (nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), CE,
             (torch.randint(0, 6, (20, 2)), torch.randint(0, 3, (20,)))))  # fmt: skip
ordinary("unet", "U-Net (skip by concatenation)", "down",
    lambda: (Net(unet, down=nn.Conv2d(1, 2, 3, stride=2, padding=1), up=nn.ConvTranspose2d(2, 1, 2, stride=2),
                 out=nn.Conv2d(2, 1, 1)), MSE, (torch.randn(8, 1, 4, 4), torch.randn(8, 1, 4, 4))))  # fmt: skip
ordinary("detection", "detection head (dict of outputs, two losses)", "trunk", detection)
ordinary("dropout_train", "dropout, training mode", "0",
    lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)), CE, classes()))  # fmt: skip
ordinary("mixture_of_experts", "mixture of experts with routing", "experts.0",
    lambda: (Net(mixture_of_experts, router=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(3))),
             CE, classes(30)))  # fmt: skip
ordinary("complex_layer", "complex layer", "complex",
    lambda: (Net(complex_net, complex=nn.Linear(3, 2, dtype=torch.complex64), head=nn.Linear(2, 3)), CE, classes(d=3)),
    twin=complex_twin)  # fmt: skip
ordinary("resnet", "residual network, activations in place", "conv",
    lambda: (Net(resnet, stem=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2), conv=nn.Conv2d(2, 2, 3, padding=1),
                 relu=nn.ReLU(inplace=True), head=nn.Linear(2, 3)), CE, images(10, 1)))  # fmt: skip
ordinary("bilinear", "nn.Bilinear", "bilinear",
    lambda: (Net(lambda m, x: m.head(torch.tanh(m.bilinear(x[:, :2], x[:, 2:]))), bilinear=nn.Bilinear(2, 2, 3),
                 head=nn.Linear(3, 3)), CE, classes()))  # fmt: skip
ordinary("prelu", "PReLU", "1", lambda: (around(nn.Linear(4, 3), activation=nn.PReLU(3)), CE, classes()))
ordinary("graph", "graph network (all nodes are one sample)", "first", graph)
ordinary("vae", "variational autoencoder (noise in the forward pass)", "encoder", vae)
ordinary("flow", "normalizing flow (log-determinant in the loss)", "first",
    lambda: (Net(couplings, first=nn.Linear(2, 4), second=nn.Linear(2, 4)), likelihood,
             (torch.randn(20, 4), torch.zeros(20))))  # fmt: skip


# ---------------------------------------------------------------------------------------------- sequences, attention

SEQUENCES = "Recurrence and attention"
sequence = functools.partial(add, SEQUENCES)


def recurrent(layer):
    """A recurrent layer of torch and a head on its last state."""
    return Net(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=layer(3, 3, batch_first=True), head=nn.Linear(3, 3))


def cells(m, x):
    """A loop over an LSTM cell."""
    state = None
    for step in x.unbind(1):
        state = m.cell(step, state)
    return m.head(state[0])


def encoder():
    block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return Net(lambda m, x: m.head(m.block(x).mean(1)), block=block, head=nn.Linear(4, 3))


def tied():
    """A language model whose output layer is its embedding."""
    model = Net(lambda m, x: m.out(torch.tanh(m.middle(m.embedding(x)))).transpose(1, 2), embedding=nn.Embedding(6, 3),
                middle=nn.Linear(3, 3), out=nn.Linear(3, 6, bias=False))  # fmt: skip
    model.out.weight = model.embedding.weight
    return model, CE, (torch.randint(0, 6, (12, 3)), torch.randint(0, 6, (12, 3)))


sequence("rnn", "nn.RNN", "rnn", lambda: (recurrent(nn.RNN), CE, tokens(d=3)))
sequence("lstm", "nn.LSTM", "rnn", lambda: (recurrent(nn.LSTM), CE, tokens(d=3)))
sequence("gru", "nn.GRU", "rnn", lambda: (recurrent(nn.GRU), CE, tokens(d=3)))
sequence("lstm_cell", "nn.LSTMCell in a loop", "cell",
    lambda: (Net(cells, cell=nn.LSTMCell(3, 3), head=nn.Linear(3, 3)), CE, tokens(d=3)))  # fmt: skip
sequence("multihead_attention", "nn.MultiheadAttention", "attention",
    lambda: (Net(lambda m, x: m.head(m.attention(x, x, x)[0].mean(1)),
                 attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3)), CE,
             tokens()))  # fmt: skip
sequence("encoder_train", "nn.TransformerEncoderLayer, training mode", "block.linear1",
    lambda: (encoder(), CE, tokens()))  # fmt: skip
sequence("encoder_eval", "nn.TransformerEncoderLayer, evaluation mode (fast path)", "block.linear1",
    lambda: (encoder().eval(), CE, tokens()))  # fmt: skip
sequence("tied", "embedding tied to the output layer", "out", tied)


# --------------------------------------------------------------------------------------------------------- own layers

OWN = "Layers with a forward of their own"


class EqualizedLinear(nn.Linear):
    """StyleGAN: the weight is scaled when it is used, and so is the bias."""

    def __init__(self, fan_in, fan_out, multiplier=1.0):
        super().__init__(fan_in, fan_out)
        self.gain, self.multiplier = fan_in**-0.5, multiplier

    def forward(self, x):
        return F.linear(x, self.weight * self.gain, self.bias * self.multiplier)


class StandardizedConv(nn.Conv2d):
    """Weight standardization."""

    def forward(self, x):
        mean, std = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (std + 1e-5), self.bias)


class MaskedLinear(nn.Linear):
    """MADE: a fixed mask on the weight."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        self.register_buffer("mask", torch.tril(torch.ones(fan_out, fan_in), 1))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Weighing(nn.Linear):
    """A layer that applies a function of its weight."""

    def __init__(self, function):
        super().__init__(4, 3)
        self.function = function

    def forward(self, x):
        return F.linear(x, self.function(self.weight), self.bias)


class CosineLinear(nn.Linear):
    """Cosine similarities."""

    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1), self.bias)


class ActivatedLinear(nn.Linear):
    """The activation is inside the layer."""

    def forward(self, x):
        return F.silu(super().forward(x))


def patched_forward(layer, x):
    return F.linear(x, layer.weight.square(), layer.bias)


def patch(model):
    """A copy's forward would still be that of the original layer."""
    model[0].forward = functools.partial(patched_forward, model[0])


def patched():
    model = around(nn.Linear(4, 3))
    patch(model)
    return model, CE, classes()


class LoRALinear(nn.Linear):
    """A frozen weight and a trained product of low rank."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        self.A, self.B = nn.Parameter(torch.randn(2, fan_in)), nn.Parameter(torch.randn(fan_out, 2))
        self.weight.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + x @ self.A.T @ self.B.T


def straight_through(weight):
    """Quantization-aware training: rounded weights, gradients straight through."""
    return weight + ((weight * 8).round() / 8 - weight).detach()


def fake_quantized(weight):
    """Torch's own fake quantization, its observer switched off."""
    return torch.fake_quantize_per_tensor_affine(weight, 0.05, 0, -128, 127)


class Cube(torch.autograd.Function):
    """x³ with a backward that can be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class OnceOnly(Cube):
    """The same with a backward that says it cannot."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))


def keep_view(model):
    """Keep a view of a weight: moved to float64, the two part."""
    model.kept = [model.first.weight.T]
    return model


def with_kept_view():
    model = Net(lambda m, x: m.head(torch.tanh(m.first(x)) + x @ m.kept[0]), first=nn.Linear(4, 4),
                head=nn.Linear(4, 3))  # fmt: skip
    return keep_view(model)


def kept_view_twin(model):
    twin = with_kept_view().double()
    twin.load_state_dict(model.state_dict())
    return keep_view(twin)


def kept_view_double():
    model = keep_view(with_kept_view().double())
    x, y = classes()
    return model, CE, (x.double(), y)


@torch.jit.script
def scripted_penalty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.t()) + weight.pow(2).sum()


def shared(m, x):
    """One layer three times."""
    h = m.first(x)
    for _ in range(3):
        h = torch.tanh(m.again(h))
    return m.head(h)


def loose(m, x):
    """Parameters of the model itself, applied by einsum, beside a layer."""
    return m.head(torch.tanh(torch.einsum("oi,ni->no", m.weight, x) + m.offset))


def hyper_network(m, x):
    """One network writes the weights of a layer."""
    weight = m.layer.weight + m.writer(x.mean(0)[:2]).view(3, 2)
    return m.head(torch.tanh(functional_call(m.layer, {"weight": weight}, (x[:, 2:],))))


class Counting(nn.Module):
    """Every call counts, and moves a running mean that it uses."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.calls = nn.Linear(4, 3), nn.Linear(3, 3), 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        h = self.first(x)
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return self.head(torch.tanh(h - self.mean))


def penalized_loss(output, target):
    return F.cross_entropy(output[0], target) + 0.01 * output[1]


def own(name, title, layer, make=None, *, first=None, activation=None, **facts):
    """Register a kind; by default a first layer, an activation and a head."""
    add(OWN, name, title, layer, make or (lambda: (around(first(), activation=activation), CE, classes())), **facts)


own("equalized", "equalized learning rate (StyleGAN)", "0", first=lambda: EqualizedLinear(4, 3))
own("equalized_bias", "equalized learning rate, bias × 0.1", "0", first=lambda: EqualizedLinear(4, 3, 0.1))
own("standardized_conv", "weight-standardized convolution", "0",
    lambda: (nn.Sequential(StandardizedConv(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), CE,
             images()))  # fmt: skip
own("masked", "masked linear (MADE)", "0", first=lambda: MaskedLinear(4, 3))
own("cosine", "cosine linear", "0", first=lambda: CosineLinear(4, 3))
own("tanh_of_weight", "tanh(W)", "0", first=lambda: Weighing(torch.tanh))
own("activation_inside", "activation inside the layer", "0",
    lambda: (nn.Sequential(ActivatedLinear(4, 3), nn.Linear(3, 3)), CE, classes()))  # fmt: skip
own("patched", "layer.forward = …", "0", patched, twin=changed(patch))
own("lora_by_hand", "LoRA by hand", "0", first=lambda: LoRALinear(4, 3))
own("straight_through", "quantization with a straight-through estimator", "0", first=lambda: Weighing(straight_through))
own("fake_quantized", "torch's fake quantization", "0", first=lambda: Weighing(fake_quantized))
own("custom_function", "custom autograd.Function", "0", first=lambda: nn.Linear(4, 3), activation=Applied(Cube.apply))
own("custom_function_once", "custom autograd.Function without a second derivative", "0",
    first=lambda: nn.Linear(4, 3), activation=Applied(OnceOnly.apply),
    twin=changed(lambda twin: setattr(twin[1], "function", Cube.apply)))  # fmt: skip
own("hard_sigmoid", "hard sigmoid", "0", first=lambda: nn.Linear(4, 3), activation=nn.Hardsigmoid(),
    twin=changed(lambda twin: setattr(twin, "1", Applied(lambda x: F.hardtanh(x / 6 + 0.5, 0, 1)))))  # fmt: skip
own("embedding_bag", "EmbeddingBag", "bag",
    lambda: (Net(lambda m, x: m.head(torch.tanh(m.bag(x))), bag=nn.EmbeddingBag(6, 3), head=nn.Linear(3, 3)), CE,
             (torch.randint(0, 6, (20, 2)), torch.randint(0, 3, (20,)))),
    twin=changed(lambda twin: setattr(twin.bag, "forward", lambda x: twin.bag.weight[x].mean(1))))  # fmt: skip
own("few_distances", "torch.cdist of a few points", "a",
    lambda: (Net(lambda m, x: m.head(m.far(m.a(x), m.b.weight)), a=nn.Linear(4, 3), b=nn.Linear(3, 5, bias=False),
                 head=nn.Linear(5, 3), far=torch.cdist), CE, classes(10)),
    twin=changed(lambda twin: setattr(twin, "far", lambda x, y: (x[:, None] - y).norm(dim=2))))  # fmt: skip
own("kept_view", "view of a weight kept since __init__", "first", lambda: (with_kept_view(), CE, classes()),
    twin=kept_view_twin)  # fmt: skip
own("kept_view_double", "view of a weight kept since __init__, float64 model", "first", kept_view_double,
    twin=kept_view_twin)  # fmt: skip
own("scripted_use", "scripted function that uses a weight", "first",
    lambda: (Net(lambda m, x: m.head(torch.tanh(m.first(x)) + scripted_penalty(x, m.first.weight)),
                 first=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE, classes()))  # fmt: skip
own("shared", "layer used three times", "again",
    lambda: (Net(shared, first=nn.Linear(4, 3), again=nn.Linear(3, 3), head=nn.Linear(3, 3)), CE,
             classes()))  # fmt: skip
own("loose", "parameters of the model itself (no layer)", "head",
    lambda: (Net(loose, weight=nn.Parameter(torch.randn(3, 4)), offset=nn.Parameter(torch.randn(3)),
                 head=nn.Linear(3, 3)), CE, classes()))  # fmt: skip
own("hypernetwork", "hypernetwork that writes a layer's weight", "layer",
    lambda: (Net(hyper_network, writer=nn.Linear(2, 6), layer=nn.Linear(2, 3), head=nn.Linear(3, 3)), CE,
             classes()))  # fmt: skip
own("counting", "forward pass that changes the module's state", "first", lambda: (Counting(), CE, classes()))
own("penalized", "penalty on a weight in the loss", "net.0",
    lambda: (Net(lambda m, x: (m.net(x), m.net[0].weight.pow(4).sum()), net=around(nn.Linear(4, 3))), penalized_loss,
             classes()))  # fmt: skip


# --------------------------------------------------------------------------------------------------- parametrizations

PARAMETRIZED = "Parametrizations"
parametrized = functools.partial(add, PARAMETRIZED)


def quotient(g, v):
    return g * v / v.norm(dim=1, keepdim=True)


def weight_norm_twin(model):
    """The second derivatives of torch's kernel are not symmetric."""
    twin = double(model)
    twin[0].parametrizations.weight[0].forward = quotient
    return twin


def own_weight_norm():
    model = around(nn.Linear(4, 3))
    WeightNormalization(model, layers=("0",))
    return model, CE, classes()


def reloaded(model, twin):
    """A twin with the state of the model, which holds tensors that are no leaves, and so not copied."""
    twin.load_state_dict(model.state_dict())
    return twin.double()


def old_spectral_twin(model):
    return reloaded(model, around(nn.utils.spectral_norm(nn.Linear(4, 3)))).eval()


def pruned_twin(model):
    twin = around(nn.Linear(4, 3))
    prune.custom_from_mask(twin[0], "weight", model[0].weight_mask)
    return reloaded(model, twin)


def old_spectral_norm():
    model = around(nn.utils.spectral_norm(nn.Linear(4, 3)))
    model(torch.randn(5, 4))
    return model.eval(), CE, classes()


def pruned():
    model = around(nn.Linear(4, 3))
    prune.l1_unstructured(model[0], "weight", amount=4)
    return model, CE, classes()


def prune_removed():
    model, loss, batch = pruned()
    prune.remove(model[0], "weight")
    return model, loss, batch


def positive():
    model = around(nn.Linear(4, 3))
    parametrize.register_parametrization(model[0], "weight", Applied(torch.exp))
    return model, CE, classes()


parametrized("torch_weight_norm", "torch's parametrizations.weight_norm, by its formula", "0",
    lambda: (around(parametrizations.weight_norm(nn.Linear(4, 3))), CE, classes()), twin=weight_norm_twin)  # fmt: skip
parametrized("own_weight_norm", "hesscond's weight normalization", "0", own_weight_norm)
parametrized("spectral_norm_train", "spectral norm, training mode", "0",
    lambda: (around(parametrizations.spectral_norm(nn.Linear(4, 3))), CE, classes()))  # fmt: skip
parametrized("spectral_norm_eval", "spectral norm, evaluation mode", "0",
    lambda: (around(parametrizations.spectral_norm(nn.Linear(4, 3))).eval(), CE, classes()))  # fmt: skip
parametrized("old_spectral_norm", "torch.nn.utils.spectral_norm (the old one, by hooks), evaluation mode", "0",
    old_spectral_norm, twin=old_spectral_twin)  # fmt: skip
parametrized("pruned", "torch.nn.utils.prune", "0", pruned, twin=pruned_twin)
parametrized("prune_removed", "torch.nn.utils.prune, made permanent", "0", prune_removed)
parametrized("orthogonal", "orthogonal weights", "0",
    lambda: (around(parametrizations.orthogonal(nn.Linear(4, 3))), CE, classes()))  # fmt: skip
parametrized("positive", "own parametrization (positive weights)", "0", positive)


# ------------------------------------------------------------------------------------------------- gradients inside

INSIDE = "Derivatives inside the forward pass or the loss"
inside_of = functools.partial(add, INSIDE)


def laplacian(m, x):
    """u and its Laplacian."""
    x = x.detach().requires_grad_()
    u = m.net(x)
    (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return u[:, 0], sum(second)


def pinn_loss(output, target):
    u, laplacian = output
    return (laplacian + target).square().mean() + u.square().mean()


def forces(m, x):
    """The forces −∂E/∂x of an energy."""
    x = x.detach().requires_grad_()
    energy = m.out(torch.tanh(m.first(x)))
    return -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def critic(m, x):
    """Scores, and the norm of their gradient in the inputs."""
    x = x.detach().requires_grad_()
    score = m.net(x)
    return score, torch.autograd.grad(score.sum(), x, create_graph=True)[0].norm(dim=1)


def wasserstein(output, target):
    score, norm = output
    return (score[:, 0] * target).mean() + 10 * (norm - 1).square().mean()


def inner_step(m, x):
    """One inner step of gradient descent on the first half, the answer for the second."""
    support, query = x.chunk(2)
    start = dict(m.net.named_parameters())
    loss = (functional_call(m.net, start, (support,)) - support.sum(1, keepdim=True)).square().mean()
    steps = torch.autograd.grad(loss, list(start.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(start.items(), steps, strict=True)}
    return functional_call(m.net, moved, (query,))


def query_loss(output, target):
    return F.mse_loss(output, target.chunk(2)[1])


def maml():
    x = torch.randn(16, 3)
    model = Net(inner_step, net=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    return model, query_loss, (x, x.sum(1, keepdim=True).sin())


def newton(m, z, injected):
    function = torch.tanh(m.inner(z) + injected)
    slope = (1 - function.square())[:, :, None] * m.inner.weight
    identity = torch.eye(3, dtype=z.dtype, device=z.device)
    return z - torch.linalg.solve(identity - slope, z - function)


def deep_equilibrium(m, x):
    """z = tanh(Wz + Ux) by Newton's method without a graph; its last step has one, and carries both derivatives."""
    injected = m.outer(x)
    with torch.no_grad():
        z = torch.zeros_like(injected)
        for _ in range(8):
            z = newton(m, z, injected)
    for _ in range(2):
        z = newton(m, z, injected)
    return m.head(z)


def equilibrium():
    model = Net(deep_equilibrium, inner=nn.Linear(3, 3, bias=False), outer=nn.Linear(4, 3), head=nn.Linear(3, 3))
    with torch.no_grad():
        model.inner.weight.mul_(0.5)
    return model, CE, classes()


def runge_kutta(m, x):
    """Four steps through a vector field."""
    for _ in range(4):
        k1 = torch.tanh(m.field(x))
        k2 = torch.tanh(m.field(x + 0.125 * k1))
        k3 = torch.tanh(m.field(x + 0.125 * k2))
        k4 = torch.tanh(m.field(x + 0.25 * k3))
        x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 24
    return m.head(x)


def ensemble(m, x):
    """Two members at once: their parameters are stacked, and vmap runs over them."""
    states = [dict(member.named_parameters()) for member in (m.first, m.second)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return vmap(lambda one: functional_call(m.first, one, (x,)))(stacked).mean(0)


def frozen_trunk(m, x):
    """A part without gradients."""
    with torch.no_grad():
        h = torch.tanh(m.trunk(x))
    return m.head(torch.tanh(m.inner(h)))


def siamese_net():
    """One trunk on two inputs."""
    trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return Net(lambda m, left, right: (m.trunk(left), m.trunk(right)), trunk=trunk)


def contrastive(output, target):
    distance = (output[0] - output[1]).square().sum(1)
    return torch.where(target == 1, distance, F.softplus(1 - distance)).mean()


def info_nce(output, target):
    left, right = (F.normalize(z, dim=1) for z in output)
    return F.cross_entropy(left @ right.T / 0.5, target)


def siamese_pairs():
    inputs = {"left": torch.randn(15, 3), "right": torch.randn(15, 3)}
    return siamese_net(), contrastive, (inputs, torch.randint(0, 2, (15,)))


def all_against_all():
    inputs = {"left": torch.randn(8, 3), "right": torch.randn(8, 3)}
    return siamese_net(), info_nce, (inputs, torch.arange(8))


inside_of("pinn", "PINN (Laplacian of the output in the loss)", "net.0",
    lambda: (Net(laplacian, net=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))), pinn_loss,
             (torch.rand(20, 2), torch.rand(20))))  # fmt: skip
inside_of("force_field", "force field (forces = −∂E/∂x)", "out",
    lambda: (Net(forces, first=nn.Linear(3, 4), out=nn.Linear(4, 1, bias=False)), MSE,
             (torch.randn(20, 3), torch.randn(20, 3))))  # fmt: skip
inside_of("gradient_penalty", "WGAN-GP gradient penalty", "net.0",
    lambda: (Net(critic, net=nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))), wasserstein,
             (torch.randn(16, 3), torch.tensor([1.0, -1.0]).repeat(8))))  # fmt: skip
inside_of("maml", "inner optimization step (MAML)", "net.0", maml)
inside_of("equilibrium", "implicit layer (deep equilibrium)", "inner", equilibrium)
inside_of("neural_ode", "neural ODE (Runge-Kutta steps)", "field",
    lambda: (Net(runge_kutta, field=nn.Linear(3, 3), head=nn.Linear(3, 3)), CE, classes(d=3)))  # fmt: skip
inside_of("ensemble", "ensemble by vmap over stacked parameters", "first.0",
    lambda: (Net(ensemble, first=around(nn.Linear(4, 3)), second=around(nn.Linear(4, 3))), CE, classes()))  # fmt: skip
inside_of("no_grad_part", "part under no_grad", "inner",
    lambda: (Net(frozen_trunk, trunk=nn.Linear(4, 4), inner=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE,
             classes()))  # fmt: skip
inside_of("vmap_inside", "vmap in the forward pass", "first",
    lambda: (Net(lambda m, x: vmap(lambda row: m.head(torch.tanh(m.first(row))))(x), first=nn.Linear(4, 3),
                 head=nn.Linear(3, 3)), CE, classes()))  # fmt: skip
inside_of("jacrev_inside", "jacrev in the forward pass", "net.0",
    lambda: (Net(lambda m, x: vmap(jacrev(m.net))(x), net=nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))),
             MSE, (torch.randn(15, 3), torch.randn(15, 2, 3))))  # fmt: skip
inside_of("siamese", "Siamese network, contrastive loss", "trunk.0", siamese_pairs)
inside_of("all_against_all", "InfoNCE over the batch", "trunk.0", all_against_all)


# ------------------------------------------------------------------------------------------------------------- hooks

HOOKS = "Hooks"


def twice(module, args, output):
    return 2 * output


def shifted(module, args):
    return (args[0] + 0.5,)


def only_look(module, grad_input, grad_output):
    return None


def halve(module, grad_input, grad_output):
    return (grad_input[0] * 0.5,)


def hooked(layer, register, hook, activation=None):
    """An MLP with a hook at a layer."""

    def make():
        model = mlp(activation)
        getattr(model[layer], register)(hook)
        return model, CE, classes()

    return make


add(HOOKS, "forward_hook", "forward hook", "0", hooked(0, "register_forward_hook", twice))
add(HOOKS, "forward_pre_hook", "forward pre-hook", "0", hooked(0, "register_forward_pre_hook", shifted))
add(HOOKS, "backward_hook", "full backward hook that looks", "2", hooked(2, "register_full_backward_hook", only_look))
add(HOOKS, "changing_backward_hook", "full backward hook that changes the gradient", "0",
    hooked(2, "register_full_backward_hook", halve, nn.Tanh()))  # fmt: skip


# ---------------------------------------------------------------------------------------------- wrappers, precision

WRAPPED = "Wrappers and precision"
wrapped = functools.partial(add, WRAPPED)


def recomputing(m, x):
    """A block whose activations are computed again in the backward pass."""
    h = torch.tanh(m.first(x))
    h = m.block(h) if m.reentrant is None else checkpoint(m.block, h, use_reentrant=m.reentrant)
    return m.head(torch.tanh(h))


def checkpointed(reentrant):
    def make():
        model = Net(recomputing, first=nn.Linear(4, 4), block=around(nn.Linear(4, 3)), head=nn.Linear(3, 3),
                    reentrant=reentrant)  # fmt: skip
        return model, CE, classes()

    return make


def inside(attribute):
    """Twin of a wrapper: the model in it, in float64."""
    return lambda wrapper: double(getattr(wrapper, attribute))


def eager_twin(model):
    return reloaded(model, mlp(nn.Tanh()))


def casting(m, x):
    """A norm that computes in float32 whatever comes in, as many language models have it."""
    h = m.first(x)
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.head(F.silu(wide.to(h.dtype)))


def mixed_precision(m, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=m.enabled):
        return m.net(x)


def gathered(model):
    """The whole model from the shards of FSDP2."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    twin = mlp(nn.Tanh())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    twin.load_state_dict(get_model_state_dict(model, options=options))
    return twin.double()


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = mlp(nn.Tanh())
    fully_shard(model)
    return model, CE, classes()


without_checkpoint = changed(lambda twin: setattr(twin, "reentrant", None))
wrapped("checkpoint_reentrant", "activation checkpointing, reentrant", "block.0", checkpointed(True),
    twin=without_checkpoint)  # fmt: skip
wrapped("checkpoint_modern", "activation checkpointing, not reentrant", "block.0", checkpointed(False),
    twin=without_checkpoint)  # fmt: skip
wrapped("compiled", "torch.compile", "2", lambda: (torch.compile(mlp(), backend="eager"), CE, classes()),
    twin=inside("_orig_mod"))  # fmt: skip
wrapped("data_parallel", "DataParallel", "2", lambda: (nn.DataParallel(mlp()), CE, classes()), twin=inside("module"))
wrapped("scripted", "torch.jit.script", "2", lambda: (torch.jit.script(mlp(nn.Tanh())), CE, classes()), twin=eager_twin)
wrapped("bfloat16", "bfloat16 model", "2",
    lambda: (mlp(nn.Tanh()).bfloat16(), CE, (torch.randn(20, 4).bfloat16(), torch.randint(0, 3, (20,)))))  # fmt: skip
wrapped("casting", "casts to float32 inside", "first",
    lambda: (Net(casting, first=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE, classes()))  # fmt: skip
wrapped("autocast", "autocast to bfloat16 inside", "net.2",
    lambda: (Net(mixed_precision, net=mlp(nn.Tanh()), enabled=True), CE, classes()),
    twin=changed(lambda twin: setattr(twin, "enabled", False)))  # fmt: skip
wrapped("distributed", "DistributedDataParallel, two processes", "2",
    lambda: (nn.parallel.DistributedDataParallel(mlp(nn.Tanh())), CE, classes()), twin=inside("module"),
    processes=2)  # fmt: skip
wrapped("fully_sharded", "FSDP2 (fully_shard), two processes", "2", fully_sharded, twin=gathered, processes=2)

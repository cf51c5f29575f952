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


def mlp(activation=None, *, last=3):
    """Three dense layers."""
    activation = activation or nn.ReLU()
    return nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3), activation, nn.Linear(3, last))


def around(layer, width=3, activation=None):
    """A layer from 4 to ``width`` and a dense head."""
    return nn.Sequential(layer, activation or nn.Tanh(), nn.Linear(width, 3))


# ---------------------------------------------------------------------------------------------------------- ordinary

ORDINARY = "Ordinary networks"


@kind(ORDINARY, "MLP, ReLU, cross-entropy", "2")
def plain_mlp():
    return mlp(), CE, classes()


@kind(ORDINARY, "MLP, SiLU, squared error", "2")
def smooth_mlp():
    return mlp(nn.SiLU()), MSE, values()


@kind(ORDINARY, "convolutional network", "0")
def cnn():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    return model, CE, images(20)


@kind(ORDINARY, "transposed convolution", "0")
def transposed():
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Tanh(), nn.Conv2d(2, 1, 2, stride=2))
    return model, MSE, (torch.randn(8, 2, 2, 2), torch.randn(8, 1, 2, 2))


@kind(ORDINARY, "grouped and dilated convolution", "0")
def grouped_dilated():
    model = nn.Sequential(nn.Conv2d(4, 4, 2, groups=2, dilation=2), nn.GELU(), nn.Flatten(), nn.Linear(16, 3))
    return model, CE, images(15, 4)


@kind(ORDINARY, "batch normalization, training mode", "0")
def batchnorm_train():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


@kind(ORDINARY, "batch normalization, evaluation mode", "0")
def batchnorm_eval():
    model, loss, batch = batchnorm_train()
    model(batch[0] + 0.3)
    return model.eval(), loss, batch


@kind(ORDINARY, "batch normalization itself", "1")
def batchnorm_parameters():
    return batchnorm_train()


@kind(ORDINARY, "layer normalization itself", "1")
def layernorm():
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


@kind(ORDINARY, "embedding", "0")
def embedding():
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, CE, (torch.randint(0, 6, (20, 2)), torch.randint(0, 3, (20,)))


class UNet(nn.Module):
    """Down, up, skip connection by concatenation."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ConvTranspose2d(2, 1, 2, stride=2)
        self.out = nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(F.silu(self.down(x)))], 1))


@kind(ORDINARY, "U-Net (skip by concatenation)", "down")
def unet():
    return UNet(), MSE, (torch.randn(8, 1, 4, 4), torch.randn(8, 1, 4, 4))


class Detector(nn.Module):
    """A detection head: classes and boxes from one trunk, as a dict."""

    def __init__(self):
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        h = F.silu(self.trunk(x))
        return {"logits": self.classes(h), "boxes": self.boxes(h)}


def detection_loss(output, target):
    return F.cross_entropy(output["logits"], target["label"]) + F.smooth_l1_loss(output["boxes"], target["box"])


@kind(ORDINARY, "detection head (dict of outputs, two losses)", "trunk")
def detection():
    target = {"label": torch.randint(0, 3, (6, 2, 2)), "box": torch.randn(6, 4, 2, 2)}
    return Detector(), detection_loss, (torch.randn(6, 2, 3, 3), target)


@kind(ORDINARY, "dropout, training mode", "0")
def dropout_train():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)), CE, classes()


class MixtureOfExperts(nn.Module):
    """A softmax router sends every sample to its two best experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        gates, chosen = self.router(x).softmax(1).topk(2, 1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, gates[rows, slot, None] * torch.tanh(expert(x[rows])))
        return out


@kind(ORDINARY, "mixture of experts with routing", "experts.0")
def mixture_of_experts():
    return MixtureOfExperts(), CE, classes(30)


class ComplexNet(nn.Module):
    """A complex layer; the head sees its modulus."""

    def __init__(self):
        super().__init__()
        self.complex, self.head = nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.complex(torch.complex(x, x.roll(1, 1)).to(self.complex.weight.dtype)).abs())


def complex_twin(model):
    twin = copy.deepcopy(model)
    twin.head.double()
    twin.complex.to(torch.complex128)
    return twin


@kind(ORDINARY, "complex layer", "complex", twin=complex_twin)
def complex_layer():
    return ComplexNet(), CE, classes(d=3)


class ResNet(nn.Module):
    """A residual block with batch normalization, its activations in place."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(2, 3)

    def forward(self, x):
        h = self.relu(self.norm(self.stem(x)))
        h = self.relu(self.conv(h).add_(h))
        return self.head(h.mean((2, 3)))


@kind(ORDINARY, "residual network, activations in place", "conv")
def resnet():
    return ResNet(), CE, images(10, 1)


@kind(ORDINARY, "nn.Bilinear", "bilinear")
def bilinear():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bilinear, self.head = nn.Bilinear(2, 2, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.bilinear(x[:, :2], x[:, 2:])))

    return Model(), CE, classes()


@kind(ORDINARY, "PReLU", "1")
def prelu():
    return around(nn.Linear(4, 3), activation=nn.PReLU(3)), CE, classes()


class Graph(nn.Module):
    """Graph convolutions: messages from neighbours are added up."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x, edges):
        for layer in (self.first, self.head):
            messages = layer(x)
            x = torch.tanh(messages.index_add(0, edges[1], messages[edges[0]]))
        return x


@kind(ORDINARY, "graph network (all nodes are one sample)", "first")
def graph():
    inputs = {"x": torch.randn(15, 3), "edges": torch.randint(0, 15, (2, 30))}
    return Graph(), CE, (inputs, torch.randint(0, 3, (15,)))


class VAE(nn.Module):
    """A variational autoencoder, with its noise."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(2, 3)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(torch.tanh(z)), mean, log_variance


def elbo(output, target):
    seen, mean, log_variance = output
    return F.mse_loss(seen, target) + 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).mean()


@kind(ORDINARY, "variational autoencoder (noise in the forward pass)", "encoder")
def vae():
    x = torch.randn(20, 3)
    return VAE(), elbo, (x, x)


class Flow(nn.Module):
    """A normalizing flow of affine couplings, with its log-determinant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(2, 4)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        scale, shift = self.first(a).chunk(2, 1)
        b = b * torch.tanh(scale).exp() + shift
        scale2, shift2 = self.second(b).chunk(2, 1)
        a = a * torch.tanh(scale2).exp() + shift2
        return torch.cat([a, b], 1), (torch.tanh(scale) + torch.tanh(scale2)).sum(1)


def likelihood(output, target):
    return (0.5 * output[0].square().sum(1) - output[1]).mean()


@kind(ORDINARY, "normalizing flow (log-determinant in the loss)", "first")
def flow():
    return Flow(), likelihood, (torch.randn(20, 4), torch.zeros(20))


# ---------------------------------------------------------------------------------------------- sequences, attention

SEQUENCES = "Recurrence and attention"


class Recurrent(nn.Module):
    """A recurrent layer of torch and a head on its last state."""

    def __init__(self, layer):
        super().__init__()
        self.rnn, self.head = layer(3, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@kind(SEQUENCES, "nn.RNN", "rnn")
def rnn():
    return Recurrent(nn.RNN), CE, tokens(d=3)


@kind(SEQUENCES, "nn.LSTM", "rnn")
def lstm():
    return Recurrent(nn.LSTM), CE, tokens(d=3)


@kind(SEQUENCES, "nn.GRU", "rnn")
def gru():
    return Recurrent(nn.GRU), CE, tokens(d=3)


class Cells(nn.Module):
    """A loop over an LSTM cell."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


@kind(SEQUENCES, "nn.LSTMCell in a loop", "cell")
def lstm_cell():
    return Cells(), CE, tokens(d=3)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention and a head."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


@kind(SEQUENCES, "nn.MultiheadAttention", "attention")
def multihead_attention():
    return SelfAttention(), CE, tokens()


class Encoder(nn.Module):
    """nn.TransformerEncoderLayer and a head."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


@kind(SEQUENCES, "nn.TransformerEncoderLayer, training mode", "block.linear1")
def encoder_train():
    return Encoder(), CE, tokens()


@kind(SEQUENCES, "nn.TransformerEncoderLayer, evaluation mode (fast path)", "block.linear1")
def encoder_eval():
    return Encoder().eval(), CE, tokens()


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.out = nn.Embedding(6, 3), nn.Linear(3, 3), nn.Linear(3, 6, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embedding(x)))).transpose(1, 2)


@kind(SEQUENCES, "embedding tied to the output layer", "out")
def tied():
    return Tied(), CE, (torch.randint(0, 6, (12, 3)), torch.randint(0, 6, (12, 3)))


# --------------------------------------------------------------------------------------------------------- own layers

OWN = "Layers with a forward of their own"


class EqualizedLinear(nn.Linear):
    """StyleGAN: the weight is scaled when it is used, and so is the bias."""

    def __init__(self, fan_in, fan_out, multiplier=1.0):
        super().__init__(fan_in, fan_out)
        self.gain, self.multiplier = fan_in**-0.5, multiplier

    def forward(self, x):
        return F.linear(x, self.weight * self.gain, self.bias * self.multiplier)


@kind(OWN, "equalized learning rate (StyleGAN)", "0")
def equalized():
    return around(EqualizedLinear(4, 3)), CE, classes()


@kind(OWN, "equalized learning rate, bias × 0.1", "0")
def equalized_bias():
    return around(EqualizedLinear(4, 3, 0.1)), CE, classes()


class StandardizedConv(nn.Conv2d):
    """Weight standardization."""

    def forward(self, x):
        mean, std = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (std + 1e-5), self.bias)


@kind(OWN, "weight-standardized convolution", "0")
def standardized_conv():
    model = nn.Sequential(StandardizedConv(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    return model, CE, images()


class MaskedLinear(nn.Linear):
    """MADE: a fixed mask on the weight."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        self.register_buffer("mask", torch.tril(torch.ones(fan_out, fan_in), 1))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


@kind(OWN, "masked linear (MADE)", "0")
def masked():
    return around(MaskedLinear(4, 3)), CE, classes()


class CosineLinear(nn.Linear):
    """Cosine similarities."""

    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1), self.bias)


@kind(OWN, "cosine linear", "0")
def cosine():
    return around(CosineLinear(4, 3)), CE, classes()


class TanhLinear(nn.Linear):
    """tanh(W)."""

    def forward(self, x):
        return F.linear(x, torch.tanh(self.weight), self.bias)


@kind(OWN, "tanh(W)", "0")
def tanh_of_weight():
    return around(TanhLinear(4, 3)), CE, classes()


class ActivatedLinear(nn.Linear):
    """The activation is inside the layer."""

    def forward(self, x):
        return F.silu(super().forward(x))


@kind(OWN, "activation inside the layer", "0")
def activation_inside():
    return nn.Sequential(ActivatedLinear(4, 3), nn.Linear(3, 3)), CE, classes()


def patched_forward(layer, x):
    return F.linear(x, layer.weight.square(), layer.bias)


def patched_twin(model):
    """A copy's forward would still be that of the original layer."""
    twin = double(model)
    twin[0].forward = functools.partial(patched_forward, twin[0])
    return twin


@kind(OWN, "layer.forward = …", "0", twin=patched_twin)
def patched():
    model = around(nn.Linear(4, 3))
    model[0].forward = functools.partial(patched_forward, model[0])
    return model, CE, classes()


class LoRALinear(nn.Linear):
    """A frozen weight and a trained product of low rank."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out)
        self.A, self.B = nn.Parameter(torch.randn(2, fan_in)), nn.Parameter(torch.randn(fan_out, 2))
        self.weight.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + x @ self.A.T @ self.B.T


@kind(OWN, "LoRA by hand", "0")
def lora_by_hand():
    return around(LoRALinear(4, 3)), CE, classes()


class StraightThrough(nn.Linear):
    """Quantization-aware training: rounded weights, gradients straight through."""

    def forward(self, x):
        rounded = (self.weight * 8).round() / 8
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


@kind(OWN, "quantization with a straight-through estimator", "0")
def straight_through():
    return around(StraightThrough(4, 3)), CE, classes()


class FakeQuantized(nn.Linear):
    """Quantization-aware training with torch's own fake quantization, its observer switched off."""

    def forward(self, x):
        return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, 0.05, 0, -128, 127), self.bias)


@kind(OWN, "torch's fake quantization", "0")
def fake_quantized():
    return around(FakeQuantized(4, 3)), CE, classes()


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

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@kind(OWN, "custom autograd.Function", "0")
def custom_function():
    return around(nn.Linear(4, 3), activation=Applied(Cube.apply)), CE, classes()


def cubic_twin(model):
    """The same function with a second derivative."""
    twin = double(model)
    twin[1].function = Cube.apply
    return twin


@kind(OWN, "custom autograd.Function without a second derivative", "0", twin=cubic_twin)
def custom_function_once():
    return around(nn.Linear(4, 3), activation=Applied(OnceOnly.apply)), CE, classes()


class KeptView(nn.Module):
    """A view of a weight kept since the module was made: moved to float64, the two part."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.kept = [self.first.weight.T]

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + x @ self.kept[0])


def kept_view_twin(model):
    twin = KeptView().double()
    twin.load_state_dict(model.state_dict())
    twin.kept = [twin.first.weight.T]
    return twin


@kind(OWN, "view of a weight kept since __init__", "first", twin=kept_view_twin)
def kept_view():
    return KeptView(), CE, classes()


@kind(OWN, "view of a weight kept since __init__, float64 model", "first", twin=kept_view_twin)
def kept_view_double():
    model = KeptView().double()
    model.kept = [model.first.weight.T]
    x, y = classes()
    return model, CE, (x.double(), y)


@torch.jit.script
def scripted_penalty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.t()) + weight.pow(2).sum()


class ScriptedUse(nn.Module):
    """A scripted function takes the weight of a layer a second time."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)) + scripted_penalty(x, self.first.weight))


@kind(OWN, "scripted function that uses a weight", "first")
def scripted_use():
    return ScriptedUse(), CE, classes()


class Shared(nn.Module):
    """One layer three times."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.first(x)
        for _ in range(3):
            h = torch.tanh(self.again(h))
        return self.head(h)


@kind(OWN, "layer used three times", "again")
def shared():
    return Shared(), CE, classes()


class Loose(nn.Module):
    """Parameters of the model itself, applied by einsum, beside a layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.einsum("oi,ni->no", self.weight, x) + self.offset))


@kind(OWN, "parameters of the model itself (no layer)", "head")
def loose():
    return Loose(), CE, classes()


class HyperNetwork(nn.Module):
    """One network writes the weights of a layer."""

    def __init__(self):
        super().__init__()
        self.writer, self.layer, self.head = nn.Linear(2, 6), nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        weight = self.layer.weight + self.writer(x.mean(0)[:2]).view(3, 2)
        return self.head(torch.tanh(functional_call(self.layer, {"weight": weight}, (x[:, 2:],))))


@kind(OWN, "hypernetwork that writes a layer's weight", "layer")
def hypernetwork():
    return HyperNetwork(), CE, classes()


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


@kind(OWN, "forward pass that changes the module's state", "first")
def counting():
    return Counting(), CE, classes()


class Penalized(nn.Module):
    """Weight decay in the loss, by hand: the output carries the norm of a weight."""

    def __init__(self):
        super().__init__()
        self.net = around(nn.Linear(4, 3))

    def forward(self, x):
        return self.net(x), self.net[0].weight.pow(4).sum()


def penalized_loss(output, target):
    return F.cross_entropy(output[0], target) + 0.01 * output[1]


@kind(OWN, "penalty on a weight in the loss", "net.0")
def penalized():
    return Penalized(), penalized_loss, classes()


# --------------------------------------------------------------------------------------------------- parametrizations

PARAMETRIZED = "Parametrizations"


def quotient(g, v):
    return g * v / v.norm(dim=1, keepdim=True)


def weight_norm_twin(model):
    """The second derivatives of torch's kernel are not symmetric."""
    twin = double(model)
    twin[0].parametrizations.weight[0].forward = quotient
    return twin


@kind(PARAMETRIZED, "torch's parametrizations.weight_norm, by its formula", "0", twin=weight_norm_twin)
def torch_weight_norm():
    return around(parametrizations.weight_norm(nn.Linear(4, 3))), CE, classes()


@kind(PARAMETRIZED, "hesscond's weight normalization", "0")
def own_weight_norm():
    model = around(nn.Linear(4, 3))
    WeightNormalization(model, layers=("0",))
    return model, CE, classes()


@kind(PARAMETRIZED, "spectral norm, training mode", "0")
def spectral_norm_train():
    return around(parametrizations.spectral_norm(nn.Linear(4, 3))), CE, classes()


@kind(PARAMETRIZED, "spectral norm, evaluation mode", "0")
def spectral_norm_eval():
    return around(parametrizations.spectral_norm(nn.Linear(4, 3))).eval(), CE, classes()


def old_spectral_twin(model):
    """The normalized weight is no leaf, and so not copied."""
    twin = around(nn.utils.spectral_norm(nn.Linear(4, 3)))
    twin.load_state_dict(model.state_dict())
    return twin.double().eval()


def pruned_twin(model):
    """The pruned weight is no leaf, and so not copied."""
    twin = around(nn.Linear(4, 3))
    prune.custom_from_mask(twin[0], "weight", model[0].weight_mask)
    twin.load_state_dict(model.state_dict())
    return twin.double()


@kind(
    PARAMETRIZED, "torch.nn.utils.spectral_norm (the old one, by hooks), evaluation mode", "0", twin=old_spectral_twin
)
def old_spectral_norm():
    model = around(nn.utils.spectral_norm(nn.Linear(4, 3)))
    model(torch.randn(5, 4))
    return model.eval(), CE, classes()


@kind(PARAMETRIZED, "torch.nn.utils.prune", "0", twin=pruned_twin)
def pruned():
    model = around(nn.Linear(4, 3))
    prune.l1_unstructured(model[0], "weight", amount=4)
    return model, CE, classes()


@kind(PARAMETRIZED, "torch.nn.utils.prune, made permanent", "0")
def prune_removed():
    model, loss, batch = pruned()
    prune.remove(model[0], "weight")
    return model, loss, batch


@kind(PARAMETRIZED, "orthogonal weights", "0")
def orthogonal():
    return around(parametrizations.orthogonal(nn.Linear(4, 3))), CE, classes()


class Exponential(nn.Module):
    """Positive weights."""

    def forward(self, w):
        return w.exp()


@kind(PARAMETRIZED, "own parametrization (positive weights)", "0")
def positive():
    model = around(nn.Linear(4, 3))
    parametrize.register_parametrization(model[0], "weight", Exponential())
    return model, CE, classes()


# ------------------------------------------------------------------------------------------------- gradients inside

INSIDE = "Derivatives inside the forward pass or the loss"


class PINN(nn.Module):
    """u and its Laplacian."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.net(x)
        (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        laplacian = sum(
            torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])
        )
        return u[:, 0], laplacian


def pinn_loss(output, target):
    u, laplacian = output
    return (laplacian + target).square().mean() + u.square().mean()


@kind(INSIDE, "PINN (Laplacian of the output in the loss)", "net.0")
def pinn():
    return PINN(), pinn_loss, (torch.rand(20, 2), torch.rand(20))


class ForceField(nn.Module):
    """An energy and the forces −∂E/∂x."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.out(torch.tanh(self.first(x)))
        return -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@kind(INSIDE, "force field (forces = −∂E/∂x)", "out")
def force_field():
    return ForceField(), MSE, (torch.randn(20, 3), torch.randn(20, 3))


class Critic(nn.Module):
    """Scores, and the norm of their gradient in the inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        score = self.net(x)
        return score, torch.autograd.grad(score.sum(), x, create_graph=True)[0].norm(dim=1)


def wasserstein(output, target):
    score, norm = output
    return (score[:, 0] * target).mean() + 10 * (norm - 1).square().mean()


@kind(INSIDE, "WGAN-GP gradient penalty", "net.0")
def gradient_penalty():
    return Critic(), wasserstein, (torch.randn(16, 3), torch.tensor([1.0, -1.0]).repeat(8))


class MAML(nn.Module):
    """One inner step of gradient descent on the first half, the answer for the second."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        support, query = x.chunk(2)
        own = dict(self.net.named_parameters())
        loss = (functional_call(self.net, own, (support,)) - support.sum(1, keepdim=True)).square().mean()
        steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(own.items(), steps, strict=True)}
        return functional_call(self.net, moved, (query,))


def query_loss(output, target):
    return F.mse_loss(output, target.chunk(2)[1])


@kind(INSIDE, "inner optimization step (MAML)", "net.0")
def maml():
    x = torch.randn(16, 3)
    return MAML(), query_loss, (x, x.sum(1, keepdim=True).sin())


class Equilibrium(nn.Module):
    """z = tanh(Wz + Ux) by Newton's method without a graph; its last step has one, and carries both derivatives."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(3, 3, bias=False), nn.Linear(4, 3), nn.Linear(3, 3)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def newton(self, z, injected):
        function = torch.tanh(self.inner(z) + injected)
        slope = (1 - function.square())[:, :, None] * self.inner.weight
        identity = torch.eye(3, dtype=z.dtype, device=z.device)
        return z - torch.linalg.solve(identity - slope, z - function)

    def forward(self, x):
        injected = self.outer(x)
        with torch.no_grad():
            z = torch.zeros_like(injected)
            for _ in range(8):
                z = self.newton(z, injected)
        for _ in range(2):
            z = self.newton(z, injected)
        return self.head(z)


@kind(INSIDE, "implicit layer (deep equilibrium)", "inner")
def equilibrium():
    return Equilibrium(), CE, classes()


class NeuralODE(nn.Module):
    """Four Runge-Kutta steps of a vector field."""

    def __init__(self):
        super().__init__()
        self.field, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        def f(z):
            return torch.tanh(self.field(z))

        for _ in range(4):
            k1 = f(x)
            k2 = f(x + 0.125 * k1)
            k3 = f(x + 0.125 * k2)
            k4 = f(x + 0.25 * k3)
            x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 24
        return self.head(x)


@kind(INSIDE, "neural ODE (Runge-Kutta steps)", "field")
def neural_ode():
    return NeuralODE(), CE, classes(d=3)


class Ensemble(nn.Module):
    """Two members at once: their parameters are stacked, and vmap runs over them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = around(nn.Linear(4, 3)), around(nn.Linear(4, 3))

    def forward(self, x):
        states = [dict(member.named_parameters()) for member in (self.first, self.second)]
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        return vmap(lambda own: functional_call(self.first, own, (x,)))(stacked).mean(0)


@kind(INSIDE, "ensemble by vmap over stacked parameters", "first.0")
def ensemble():
    return Ensemble(), CE, classes()


class FrozenTrunk(nn.Module):
    """A part without gradients."""

    def __init__(self):
        super().__init__()
        self.trunk, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.inner(h)))


@kind(INSIDE, "part under no_grad", "inner")
def no_grad_part():
    return FrozenTrunk(), CE, classes()


class Mapped(nn.Module):
    """vmap over the samples."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return vmap(lambda row: self.head(torch.tanh(self.first(row))))(x)


@kind(INSIDE, "vmap in the forward pass", "first")
def vmap_inside():
    return Mapped(), CE, classes()


class Jacobian(nn.Module):
    """The Jacobian of a network as its output."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x):
        return vmap(jacrev(self.net))(x)


@kind(INSIDE, "jacrev in the forward pass", "net.0")
def jacrev_inside():
    return Jacobian(), MSE, (torch.randn(15, 3), torch.randn(15, 2, 3))


class Siamese(nn.Module):
    """One trunk on two inputs."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, left, right):
        return self.trunk(left), self.trunk(right)


def contrastive(output, target):
    distance = (output[0] - output[1]).square().sum(1)
    return torch.where(target == 1, distance, F.softplus(1 - distance)).mean()


@kind(INSIDE, "Siamese network, contrastive loss", "trunk.0")
def siamese():
    inputs = {"left": torch.randn(15, 3), "right": torch.randn(15, 3)}
    return Siamese(), contrastive, (inputs, torch.randint(0, 2, (15,)))


def info_nce(output, target):
    left, right = (F.normalize(z, dim=1) for z in output)
    return F.cross_entropy(left @ right.T / 0.5, target)


@kind(INSIDE, "InfoNCE over the batch", "trunk.0")
def all_against_all():
    inputs = {"left": torch.randn(8, 3), "right": torch.randn(8, 3)}
    return Siamese(), info_nce, (inputs, torch.arange(8))


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


@kind(HOOKS, "forward hook", "0")
def forward_hook():
    model = mlp()
    model[0].register_forward_hook(twice)
    return model, CE, classes()


@kind(HOOKS, "forward pre-hook", "0")
def forward_pre_hook():
    model = mlp()
    model[0].register_forward_pre_hook(shifted)
    return model, CE, classes()


@kind(HOOKS, "full backward hook that looks", "2")
def backward_hook():
    model = mlp()
    model[2].register_full_backward_hook(only_look)
    return model, CE, classes()


@kind(HOOKS, "full backward hook that changes the gradient", "0")
def changing_backward_hook():
    model = mlp(nn.Tanh())
    model[2].register_full_backward_hook(halve)
    return model, CE, classes()


# ---------------------------------------------------------------------------------------------- wrappers, precision

WRAPPED = "Wrappers and precision"


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), around(nn.Linear(4, 3)), nn.Linear(3, 3)
        self.reentrant: bool | None = reentrant

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.head(torch.tanh(h))


def without_checkpoint(model):
    twin = double(model)
    twin.reentrant = None
    return twin


@kind(WRAPPED, "activation checkpointing, reentrant", "block.0", twin=without_checkpoint)
def checkpoint_reentrant():
    return Checkpointed(reentrant=True), CE, classes()


@kind(WRAPPED, "activation checkpointing, not reentrant", "block.0", twin=without_checkpoint)
def checkpoint_modern():
    return Checkpointed(reentrant=False), CE, classes()


def inside(attribute):
    """Twin of a wrapper: the model in it, in float64."""
    return lambda wrapper: double(getattr(wrapper, attribute))


@kind(WRAPPED, "torch.compile", "2", twin=inside("_orig_mod"))
def compiled():
    return torch.compile(mlp(), backend="eager"), CE, classes()


@kind(WRAPPED, "DataParallel", "2", twin=inside("module"))
def data_parallel():
    return nn.DataParallel(mlp()), CE, classes()


def eager_twin(model):
    twin = mlp(nn.Tanh())
    twin.load_state_dict(model.state_dict())
    return twin.double()


@kind(WRAPPED, "torch.jit.script", "2", twin=eager_twin)
def scripted():
    return torch.jit.script(mlp(nn.Tanh())), CE, classes()


@kind(WRAPPED, "bfloat16 model", "2")
def bfloat16():
    return mlp(nn.Tanh()).bfloat16(), CE, (torch.randn(20, 4).bfloat16(), torch.randint(0, 3, (20,)))


class Casting(nn.Module):
    """A norm that computes in float32 whatever comes in, as many language models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.first(x)
        wide = h.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(F.silu(wide.to(h.dtype)))


@kind(WRAPPED, "casts to float32 inside", "first")
def casting():
    return Casting(), CE, classes()


class Autocast(nn.Module):
    """Mixed precision."""

    def __init__(self):
        super().__init__()
        self.net = mlp(nn.Tanh())
        self.enabled = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.net(x)


def without_autocast(model):
    twin = double(model)
    twin.enabled = False
    return twin


@kind(WRAPPED, "autocast to bfloat16 inside", "net.2", twin=without_autocast)
def autocast():
    return Autocast(), CE, classes()


@kind(WRAPPED, "DistributedDataParallel, two processes", "2", twin=inside("module"), processes=2)
def distributed():
    model = nn.parallel.DistributedDataParallel(mlp(nn.Tanh()))
    return model, CE, classes()


def gathered(model):
    """The whole model from the shards of FSDP2."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    twin = mlp(nn.Tanh())
    twin.load_state_dict(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    )
    return twin.double()


@kind(WRAPPED, "FSDP2 (fully_shard), two processes", "2", twin=gathered, processes=2)
def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = mlp(nn.Tanh())
    fully_shard(model)
    return model, CE, classes()

"""Networks as people write them."""

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue import parts
from tests.catalogue.blocks import on_features, stirred
from tests.catalogue.cases import add
from tests.catalogue.convolutions import cnn, unet
from tests.catalogue.dense import mlp
from tests.catalogue.parts import CE, MSE, Net, classes, images, labelled, small, used, valued, values, words

ORDINARY = "Ordinary networks"
ordinary = functools.partial(add, ORDINARY)


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


ordinary("relu-ce", "MLP, ReLU, cross-entropy", lambda: (mlp(nn.ReLU()), CE, labelled(5)), "2", grid=True, psd=True)
ordinary("smooth_mlp", "MLP, SiLU, squared error", lambda: (parts.mlp(nn.SiLU()), MSE, values()), "2")
ordinary("conv2d", "convolutional network", lambda: (cnn(nn.Conv2d(2, 3, 3), 12), CE, labelled(2, 4, 4)), grid=True,
    psd=True)  # fmt: skip
ordinary("transposed1d", "transposed convolution",
    lambda: (cnn(nn.ConvTranspose1d(2, 3, 3, stride=2), 21), CE, labelled(2, 3)), grid=True, psd=True)  # fmt: skip
ordinary("grouped_dilated", "grouped and dilated convolution",
    lambda: (nn.Sequential(nn.Conv2d(4, 4, 2, groups=2, dilation=2), nn.GELU(), nn.Flatten(), nn.Linear(16, 3)), CE,
             images(15, 4)))  # fmt: skip
ordinary("train-batchnorm", "batch normalization, training mode",
    lambda: (small(nn.ReLU(), used(nn.BatchNorm1d(4))), CE, labelled(5)), grid=True, streams=False)  # fmt: skip
ordinary("eval-batchnorm", "batch normalization, evaluation mode",
    lambda: (small(nn.ReLU(), used(nn.BatchNorm1d(4))).eval(), CE, labelled(5)), grid=True, blocks=True,
    psd=True)  # fmt: skip
ordinary("batchnorm-train", "batch normalization itself",
    stirred(lambda: (on_features(used(nn.BatchNorm1d(4))), CE, labelled(5, n=6))), "middle", blocks=True,
    streams=False)  # fmt: skip
ordinary("layernorm", "layer normalization itself", lambda: (small(nn.ReLU(), nn.LayerNorm(4)), CE, labelled(5)), "1",
    grid=True)  # fmt: skip
ordinary("embedding", "embedding",
    lambda: (nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)), CE,
             words(7, 2)), grid=True)  # fmt: skip
ordinary("unet-skip", "U-Net (skip by concatenation)",
    lambda: (unet(), MSE, valued(1, 4, 4, to=(1, 4, 4), n=4)), "down", grid=True)  # fmt: skip
ordinary("detection", "detection head (dict of outputs, two losses)", detection, "trunk")
ordinary("train-dropout-tanh", "dropout, training mode",
    lambda: (small(nn.Tanh(), nn.Dropout(0.4)), CE, labelled(5)), grid=True, streams=False)  # fmt: skip
ordinary("mixture_of_experts", "mixture of experts with routing",
    lambda: (Net(mixture_of_experts, router=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 3) for _ in range(3))),
             CE, classes(30)), "experts.0")  # fmt: skip
ordinary("complex_layer", "complex layer",
    lambda: (Net(complex_net, complex=nn.Linear(3, 2, dtype=torch.complex64), head=nn.Linear(2, 3)), CE, classes(d=3)),
    "complex", twin=complex_twin)  # fmt: skip
ordinary("resnet", "residual network, activations in place",
    lambda: (Net(resnet, stem=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2), conv=nn.Conv2d(2, 2, 3, padding=1),
                 relu=nn.ReLU(inplace=True), head=nn.Linear(2, 3)), CE, images(10, 1)), "conv")  # fmt: skip
ordinary("bilinear", "nn.Bilinear",
    stirred(lambda: (nn.Sequential(nn.Linear(5, 4), Net(lambda m, x: m.inner(x, x), inner=nn.Bilinear(4, 4, 3))), CE,
                     labelled(5, n=6))), "1.inner", blocks=True)  # fmt: skip
ordinary("prelu", "PReLU", stirred(lambda: (on_features(nn.PReLU(4)), CE, labelled(5, n=6))), "middle", blocks=True)
ordinary("graph", "graph network (all nodes are one sample)", graph, "first")
ordinary("vae", "variational autoencoder (noise in the forward pass)", vae, "encoder")
ordinary("flow", "normalizing flow (log-determinant in the loss)",
    lambda: (Net(couplings, first=nn.Linear(2, 4), second=nn.Linear(2, 4)), likelihood,
             (torch.randn(20, 4), torch.zeros(20))), "first")  # fmt: skip

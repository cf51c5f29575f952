"""Layers with a forward pass of their own, and parametrizations."""

import functools

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from hesscond.methods import WeightNormalization
from tests.catalogue.blocks import LowRank, on_features, stirred
from tests.catalogue.cases import add, double
from tests.catalogue.coupled import repeated
from tests.catalogue.parts import CE, Applied, Cube, Net, OnceOnly, around, changed, classes, images, labelled, reloaded

OWN = "Layers with a forward of their own"
own = functools.partial(add, OWN)


def halved(weight):
    """The scale of an equalized learning rate, 1/√4 for four inputs."""
    return 0.5 * weight


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
    """A layer that applies functions of its weight and its bias."""

    def __init__(self, weigh, shift=lambda bias: bias):
        super().__init__(4, 3)
        self.weigh, self.shift = weigh, shift

    def forward(self, x):
        return F.linear(x, self.weigh(self.weight), self.shift(self.bias))


class InPlace(Cube):
    """x³ with a backward that writes into a tensor of its own, which torch does not differentiate."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.mul(3 * x.detach() ** 2, gradient, out=torch.empty_like(x))


class CosineLinear(nn.Linear):
    """Cosine similarities."""

    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1), self.bias)


class ActivatedLinear(nn.Linear):
    """The activation is inside the layer."""

    def forward(self, x):
        return F.silu(super().forward(x))


def patch(model):
    """A copy's forward would still be that of the original layer."""
    model[0].forward = functools.partial(lambda layer, x: F.linear(x, layer.weight.square(), layer.bias), model[0])


def patched():
    model = around(nn.Linear(4, 3))
    patch(model)
    return model, CE, classes()


def straight_through(weight):
    """Quantization-aware training: rounded weights, gradients straight through."""
    return weight + ((weight * 8).round() / 8 - weight).detach()


def fake_quantized(weight):
    """Torch's own fake quantization, its observer switched off."""
    return torch.fake_quantize_per_tensor_affine(weight, 0.05, 0, -128, 127)


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


def headed(first, activation=None):
    """What makes a first layer, an activation and a head."""
    return lambda: (around(first(), activation=activation), CE, classes())


own("equalized", "equalized learning rate (StyleGAN)", headed(lambda: Weighing(halved)))
own("equalized_bias", "equalized learning rate, bias × 0.1", headed(lambda: Weighing(halved, lambda b: 0.1 * b)))
own("standardized_conv", "weight-standardized convolution",
    lambda: (nn.Sequential(StandardizedConv(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), CE,
             images()))  # fmt: skip
own("masked", "masked linear (MADE)", headed(lambda: MaskedLinear(4, 3)))
own("cosine", "cosine linear", headed(lambda: CosineLinear(4, 3)))
own("tanh_of_weight", "tanh(W)", headed(lambda: Weighing(torch.tanh)))
own("activation_inside", "activation inside the layer",
    lambda: (nn.Sequential(ActivatedLinear(4, 3), nn.Linear(3, 3)), CE, classes()))  # fmt: skip
own("patched", "layer.forward = …", patched, twin=changed(patch))
own("lora-module", "LoRA by hand",
    stirred(lambda: (on_features(LowRank(4, 4)), CE, labelled(5, n=6))), "middle", blocks=True)  # fmt: skip
own("straight_through", "quantization with a straight-through estimator", headed(lambda: Weighing(straight_through)))
own("fake_quantized", "torch's fake quantization", headed(lambda: Weighing(fake_quantized)))
own("custom_function", "custom autograd.Function", headed(lambda: nn.Linear(4, 3), Applied(Cube.apply)))
own("custom_function_once", "custom autograd.Function without a second derivative",
    headed(lambda: nn.Linear(4, 3), Applied(OnceOnly.apply)),
    twin=changed(lambda twin: setattr(twin[1], "function", Cube.apply)))  # fmt: skip
own("custom_function_out", "custom autograd.Function whose backward writes with out=",
    headed(lambda: nn.Linear(4, 3), Applied(InPlace.apply)),
    twin=changed(lambda twin: setattr(twin[1], "function", Cube.apply)))  # fmt: skip
own("hard_sigmoid", "hard sigmoid", headed(lambda: nn.Linear(4, 3), nn.Hardsigmoid()),
    twin=changed(lambda twin: setattr(twin, "1", Applied(lambda x: F.hardtanh(x / 6 + 0.5, 0, 1)))))  # fmt: skip
# torch masks its derivatives by the largest double, which overflows where numbers are perturbed
own("cumulative", "torch.logcumsumexp", headed(lambda: nn.Linear(4, 3), Applied(lambda h: torch.logcumsumexp(h, 1))))
own("embedding_bag", "EmbeddingBag",
    lambda: (Net(lambda m, x: m.head(torch.tanh(m.bag(x))), bag=nn.EmbeddingBag(6, 3), head=nn.Linear(3, 3)), CE,
             (torch.randint(0, 6, (20, 2)), torch.randint(0, 3, (20,)))), "bag",
    twin=changed(lambda twin: setattr(twin.bag, "forward", lambda x: twin.bag.weight[x].mean(1))))  # fmt: skip
own("few_distances", "torch.cdist of a few points",
    lambda: (Net(lambda m, x: m.head(m.far(m.a(x), m.b.weight)), a=nn.Linear(4, 3), b=nn.Linear(3, 5, bias=False),
                 head=nn.Linear(5, 3), far=torch.cdist), CE, classes(10)), "a",
    twin=changed(lambda twin: setattr(twin, "far", lambda x, y: (x[:, None] - y).norm(dim=2))))  # fmt: skip
own("kept_view", "view of a weight kept since __init__", lambda: (with_kept_view(), CE, classes()), "first",
    twin=kept_view_twin)  # fmt: skip
own("kept_view_double", "view of a weight kept since __init__, float64 model", kept_view_double, "first",
    twin=kept_view_twin)  # fmt: skip
own("scripted_use", "scripted function that uses a weight",
    lambda: (Net(lambda m, x: m.head(torch.tanh(m.first(x)) + scripted_penalty(x, m.first.weight)),
                 first=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE, classes()), "first")  # fmt: skip
own("repeated-tanh", "layer used three times", lambda: (repeated(nn.Tanh(), 3), CE, labelled(5)), "layer", grid=True)
own("loose", "parameters of the model itself (no layer)",
    lambda: (Net(loose, weight=nn.Parameter(torch.randn(3, 4)), offset=nn.Parameter(torch.randn(3)),
                 head=nn.Linear(3, 3)), CE, classes()), "head")  # fmt: skip
own("hypernetwork", "hypernetwork that writes a layer's weight",
    lambda: (Net(hyper_network, writer=nn.Linear(2, 6), layer=nn.Linear(2, 3), head=nn.Linear(3, 3)), CE,
             classes()), "layer")  # fmt: skip
own("counting", "forward pass that changes the module's state", lambda: (Counting(), CE, classes()), "first")
own("penalized", "penalty on a weight in the loss",
    lambda: (Net(lambda m, x: (m.net(x), m.net[0].weight.pow(4).sum()), net=around(nn.Linear(4, 3))), penalized_loss,
             classes()), "net.0")  # fmt: skip


PARAMETRIZED = "Parametrizations"
parametrized = functools.partial(add, PARAMETRIZED)


def weight_norm_twin(model):
    """The second derivatives of torch's kernel are not symmetric."""
    twin = double(model)
    twin[0].parametrizations.weight[0].forward = lambda g, v: g * v / v.norm(dim=1, keepdim=True)
    return twin


def own_weight_norm():
    model = around(nn.Linear(4, 3))
    WeightNormalization(model, layers=("0",))
    return model, CE, classes()


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


parametrized("torch_weight_norm", "torch's parametrizations.weight_norm, by its formula",
    lambda: (around(parametrizations.weight_norm(nn.Linear(4, 3))), CE, classes()), twin=weight_norm_twin)  # fmt: skip
parametrized("own_weight_norm", "hesscond's weight normalization", own_weight_norm)
parametrized("spectral_norm_train", "spectral norm, training mode",
    lambda: (around(parametrizations.spectral_norm(nn.Linear(4, 3))), CE, classes()))  # fmt: skip
parametrized("spectral_norm_eval", "spectral norm, evaluation mode",
    lambda: (around(parametrizations.spectral_norm(nn.Linear(4, 3))).eval(), CE, classes()))  # fmt: skip
parametrized("old_spectral_norm", "torch.nn.utils.spectral_norm (the old one, by hooks), evaluation mode",
    old_spectral_norm, twin=old_spectral_twin)  # fmt: skip
parametrized("pruned", "torch.nn.utils.prune", pruned, twin=pruned_twin)
parametrized("prune_removed", "torch.nn.utils.prune, made permanent", prune_removed)
parametrized("orthogonal", "orthogonal weights",
    lambda: (around(parametrizations.orthogonal(nn.Linear(4, 3))), CE, classes()))  # fmt: skip
parametrized("positive", "own parametrization (positive weights)", positive)

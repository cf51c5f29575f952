"""Small random networks, differentiated automatically, on which statements are tried; and networks in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional
from torch.nn.functional import conv2d, pad, unfold
from torch.nn.utils import parametrize

from hesscond.hessians import HessianOperator
from hesscond.problem import evaluation
from hesscond.spectra import ConditionNumber, condition_number

#: Round-off of a Hessian that was differentiated automatically, relative to its largest eigenvalue.
ROUND_OFF = 200 * float(np.finfo(float).eps)


#: Activations by name; at the kinks of the piecewise linear ones there is no Hessian.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky relu": functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
}
PIECEWISE_LINEAR = ("relu", "leaky relu")


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−Σ y log softmax(z) of one sample; y (c,) are probabilities."""
    return -(target * torch.log_softmax(output, -1)).sum(-1)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """½ ‖z − y‖² of one sample."""
    return (output - target).square().sum(-1) / 2


def logistic(output: Tensor, target: Tensor) -> Tensor:
    """Σ log(1 + exp z) − y z of one sample: binary cross-entropy of each output."""
    return (functional.softplus(output) - target * output).sum(-1)


#: Losses of one sample, all convex in the output.
CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax cross-entropy": cross_entropy,
    "logistic": logistic,
    "squared error": squared_error,
}
#: The target, by output, at which the gradient of the loss vanishes.
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax cross-entropy": partial(torch.softmax, dim=-1),
    "logistic": torch.sigmoid,
    "squared error": torch.clone,
}


def with_row(rows: Tensor, number: int, row: Tensor) -> Tensor:
    """Rows with another one in the place of one of them."""
    return torch.cat([rows[:number], row[None], rows[number + 1 :]])


def extended(h: Tensor) -> Tensor:
    """[1, h] along the last dimension."""
    return torch.cat([torch.ones_like(h[..., :1]), h], -1)


@dataclass(frozen=True)
class Network:
    """Dense layers with one activation between them, and a batch."""

    inputs: Tensor  # (N, n_0)
    targets: Tensor  # (N, c)
    weights: tuple[Tensor, ...]  # [b, W] of each layer, (m, n + 1)
    activation: str  # names
    criterion: str

    def from_preactivation(self, layer: int, a: Tensor) -> Tensor:
        """The network's output, from the pre-activations (…, m) of a layer."""
        for weight in self.weights[layer + 1 :]:
            a = extended(ACTIVATIONS[self.activation](a)) @ weight.T
        return a

    def features(self, layer: int) -> Tensor:
        """Ĥ = [e, H] (N, n + 1), what a layer sees."""
        h = extended(self.inputs)
        for weight in self.weights[:layer]:
            h = extended(ACTIVATIONS[self.activation](h @ weight.T))
        return h

    def output(self) -> Tensor:
        """The network's output (N, c) for all samples."""
        return self.from_preactivation(0, self.features(0) @ self.weights[0].T)

    def loss(self, weights: Sequence[Tensor]) -> Tensor:
        """Mean loss with other weights."""
        output = replace(self, weights=tuple(weights)).output()
        return CRITERIA[self.criterion](output, self.targets).mean()

    @property
    def parameters(self) -> Tensor:
        """All weights in one vector."""
        return torch.cat([weight.flatten() for weight in self.weights])

    def split(self, theta: Tensor) -> list[Tensor]:
        """A vector of all weights, layer by layer."""
        parts = theta.split([weight.numel() for weight in self.weights])
        return [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]

    def changed(self, layer: int, unit: int, w_hat: Tensor) -> list[Tensor]:
        """All weights, with other parameters [b, w] of one unit."""
        return [with_row(weight, unit, w_hat) if at == layer else weight for at, weight in enumerate(self.weights)]

    def unit_loss(self, layer: int, unit: int) -> Callable[[Tensor], Tensor]:
        """The mean loss in the parameters [b, w] of one unit."""
        return lambda w_hat: self.loss(self.changed(layer, unit, w_hat))

    def unit_hessian(self, layer: int, unit: int) -> Tensor:
        """∇²_ŵ L (n + 1, n + 1) by automatic differentiation of the whole network."""
        return hessian(self.unit_loss(layer, unit))(self.weights[layer][unit])

    def curvature(self, layer: int, unit: int) -> Tensor:
        """Diagonal of S (N,): the second derivative of each sample's share of the mean loss in its a_i."""

        def loss(a_i: Tensor, a: Tensor, target: Tensor) -> Tensor:
            return CRITERIA[self.criterion](self.from_preactivation(layer, with_row(a, unit, a_i)), target)

        a = self.features(layer) @ self.weights[layer].T
        return vmap(grad(grad(loss)))(a[:, unit], a, self.targets) / len(a)


def random_network(
    rng: np.random.Generator,
    sizes: Sequence[int],
    samples: int,
    *,
    activation: str | None = None,
    criterion: str | None = None,
) -> Network:
    """A network of given layer sizes with random features of many scales, and pre-activations of order one.

    ``sizes`` are n_0, …, c. Activation and criterion are drawn, too, unless their names are given.
    """
    activation = str(rng.choice(list(ACTIVATIONS))) if activation is None else activation
    criterion = str(rng.choice(list(CRITERIA))) if criterion is None else criterion
    scale = 10.0 ** rng.uniform(-1, 1, sizes[0])
    inputs = torch.from_numpy(scale * (rng.standard_normal((samples, sizes[0])) + rng.uniform(-2, 2, sizes[0])))
    h, weights = inputs, []
    for fan_in, fan_out in pairwise(sizes):
        size = h.square().mean(0).sqrt()
        W = torch.from_numpy(rng.standard_normal((fan_out, fan_in))) / (torch.where(size > 0, size, 1.0) * fan_in**0.5)
        weights.append(torch.cat([torch.from_numpy(0.3 * rng.standard_normal((fan_out, 1))), W], 1))
        h = ACTIVATIONS[activation](extended(h) @ weights[-1].T)
    if criterion == "squared error":
        targets = torch.from_numpy(rng.standard_normal((samples, sizes[-1])))
    else:
        targets = functional.one_hot(torch.from_numpy(rng.integers(sizes[-1], size=samples)), sizes[-1]).double()
    return Network(inputs, targets, tuple(weights), activation, criterion)


def flat_loss(network: Network) -> Callable[[Tensor], Tensor]:
    """The loss of all weights in one vector."""
    return lambda theta: network.loss(network.split(theta))


def hessian_kappa(H: Tensor, error: float | None = None) -> ConditionNumber:
    """κ of a Hessian, with what automatic differentiation rounds counted as an error of it."""
    symmetric = ((H + H.T) / 2).numpy()
    return condition_number(symmetric, error=ROUND_OFF * float(np.linalg.norm(symmetric)) if error is None else error)


@dataclass(frozen=True)
class ConvolutionLayer:
    """A convolution of stride 1, an activation, and a dense layer on all of its outputs."""

    # (N, c, r + k − 1, s + k − 1); inputs with a border of (k − 1)/2 pixels, once it is added (`bordered`)
    inputs: Tensor
    targets: Tensor  # (N, classes)
    weight: Tensor  # (m, 1 + c k²); [b, w] of each output channel, w flattened as in torch
    dense: Tensor  # (classes, 1 + m r s); [b, W] of the dense layer
    kernel: int  # k
    activation: str  # names
    criterion: str

    def preactivations(self, weight: Tensor) -> Tensor:
        """The preactivations (N, m, r s) of all output positions."""
        w = weight[:, 1:].reshape(len(weight), self.inputs.shape[1], self.kernel, self.kernel)
        return conv2d(self.inputs, w, weight[:, 0]).flatten(2)

    def sample_loss(self, a: Tensor, target: Tensor) -> Tensor:
        """The loss of samples (…, m, r s)."""
        h = ACTIVATIONS[self.activation](a).flatten(-2)
        return CRITERIA[self.criterion](extended(h) @ self.dense.T, target)

    def loss(self, weight: Tensor) -> Tensor:
        """Mean loss with other weights."""
        return self.sample_loss(self.preactivations(weight), self.targets).mean()

    def patches(self) -> Tensor:
        """Ĥ = [e, patches] (N, r s, 1 + c k²)."""
        return extended(unfold(self.inputs, self.kernel).mT)

    def unit_hessian(self, channel: int) -> Tensor:
        """∇²_ŵ L of one output channel, by automatic differentiation of the whole."""
        return hessian(lambda w_hat: self.loss(with_row(self.weight, channel, w_hat)))(self.weight[channel])

    def curvature(self, channel: int) -> Tensor:
        """Blocks of S (N, r s, r s): second derivatives of each sample's share of the mean loss."""

        def loss(a_i: Tensor, a: Tensor, target: Tensor) -> Tensor:
            return self.sample_loss(with_row(a, channel, a_i), target)

        a = self.preactivations(self.weight)
        return vmap(hessian(loss))(a[:, channel], a, self.targets) / len(a)


def bordered(images: Tensor, kernel: int, value: Tensor | float = 0.0) -> Tensor:
    """Images (N, c, r, s) with a border of (k − 1)/2 pixels of a value, or of one value (c,) for each channel."""
    value = torch.as_tensor(value, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
    return pad(images - value, [(kernel - 1) // 2] * 4) + value


def random_convolution(rng: np.random.Generator) -> ConvolutionLayer:
    """A convolution on a few small images without a border, with pre-activations of order one once they have one.

    Their channels have different means and scales.
    """
    N, c = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    r, s = (int(size) for size in rng.integers(2, 5, 2))
    means, scales = rng.uniform(-3, 3, (c, 1, 1)), 10.0 ** rng.uniform(-1, 1, (c, 1, 1))
    inputs = torch.from_numpy(scales * (rng.standard_normal((N, c, r, s)) + means))
    kernel = int(rng.choice([1, 3, 5]))
    m, classes = int(rng.integers(1, 4)), int(rng.integers(2, 5))
    size = inputs.square().mean((0, 2, 3)).sqrt().repeat_interleave(kernel**2)
    w = torch.from_numpy(rng.standard_normal((m, c * kernel**2))) / (size * (c * kernel) ** 0.5)
    bias = torch.from_numpy(0.3 * rng.standard_normal((m, 1)))
    dense = torch.from_numpy(rng.standard_normal((classes, 1 + m * r * s))) / (m * r * s) ** 0.5
    activation, criterion = str(rng.choice(list(ACTIVATIONS))), str(rng.choice(list(CRITERIA)))
    targets = torch.from_numpy(rng.dirichlet(np.ones(classes), N))
    return ConvolutionLayer(inputs, targets, torch.cat([bias, w], 1), dense, kernel, activation, criterion)


class Reweighted(nn.Module):
    """A network in which one layer multiplies with a function of ``weight``, a parameter of this module."""

    def __init__(self, network: nn.Module, layer: str, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.place, self.change = network, f"{layer}.weight", change
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        output: Tensor = functional_call(self.network, {self.place: self.change(self.weight)}, inputs, named)
        return output


@dataclass(frozen=True)
class LayerNetwork:
    """A layer in a network in training, with the data of the loss.

    Attributes
    ----------
    model, loss_fn
        The network, which is left as it is, and its mean loss.
    data
        A batch (inputs, targets), or several.
    layer
        Name of the layer.
    dtype
        Precision of the products; None: that of the network.
    """

    model: nn.Module
    loss_fn: evaluation.LossFunction
    data: evaluation.Batch | Iterable[evaluation.Batch]
    layer: str
    dtype: torch.dtype | None = torch.float64

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self.model.get_submodule(self.layer)

    @property
    def weight(self) -> Tensor | None:
        """Weight of the layer; None: it is computed from other parameters."""
        if parametrize.is_parametrized(self.module, "weight"):
            return None
        return self.module.get_parameter("weight").detach()

    def of_unit(self, unit: int) -> HessianOperator:
        """The Hessian in the parameters of a unit, by double backward."""
        return HessianOperator(self.model, self.loss_fn, self.data, layers=[self.layer], unit=unit, dtype=self.dtype)

    def reweighted(self, weight: Tensor, change: Callable[[Tensor], Tensor] = torch.clone) -> HessianOperator:
        """The Hessian in W, and b if there is one, of the network whose layer multiplies with ``change(W)``."""
        model = Reweighted(self.model, self.layer, weight, change)
        bias = [f"network.{self.layer}.bias"] if getattr(self.module, "bias", None) is not None else []
        return HessianOperator(model, self.loss_fn, self.data, parameters=["weight", *bias], dtype=torch.float64)

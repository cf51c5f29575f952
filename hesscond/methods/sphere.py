"""Constrained weights (CWO): each unit's weights on a sphere, with zero mean, or both."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hesscond import capture, hessians
from hesscond.capture.layers import from_unit_weights, unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians.coordinates.base import HessianMaker
from hesscond.methods import base
from hesscond.methods.reparametrization import refuse_units
from hesscond.methods.wrapping import layers_of, put, wrap
from hesscond.operators import SymmetricOperator

Constraint = Literal["none", "centred", "sphere", "both"]
#: ‖w‖² of n weights of variance 2/n, as He's initialization has them.
C = 2.0
#: σ of the noise if it is not given: the best of Table 4, and that of the point clouds.
SCALES = {"linear": 1.0, "constant": 0.4}
#: Initial weights whose spread is below this times their norm are all equal.
EQUAL = 1e-5


def projected(weights: torch.Tensor, constraint: Constraint, c: float = C) -> torch.Tensor:
    """The points of the constraint set next to the rows of ``weights`` (m, n).

    w ↦ w − mean(w) 1, then w ↦ √c w / ‖w‖, or one of the two (Algorithm 1; eq. (11) with w − α∇L for w).
    """
    if constraint in ("centred", "both"):
        weights = weights - weights.mean(1, keepdim=True)
    if constraint in ("sphere", "both"):
        weights = weights * (math.sqrt(c) / weights.norm(dim=1, keepdim=True))
    return weights


class Affine(nn.Module):
    """γ a + β for each channel: what batch normalization ends with (eq. (6)); γ and β begin as those of ``norm``."""

    def __init__(self, channels: int, axis: int, norm: nn.Module | None) -> None:
        super().__init__()
        start = [torch.ones(channels, device="cpu"), torch.zeros(channels, device="cpu")]
        if isinstance(norm, _BatchNorm) and norm.affine:
            start = [norm.weight.detach().clone(), norm.bias.detach().clone()]
        self.weight, self.bias = map(nn.Parameter, start)
        self.axis = axis

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Compute γ a + β for activations a with m channels along the axis."""
        shape = [1] * a.ndim
        shape[self.axis] = -1
        return torch.addcmul(self.bias.view(shape), a, self.weight.view(shape))


class Noise(nn.Module):
    """(1 + n) a in training mode, n Gaussian: one number for each channel of each sample (eq. (7)).

    n depends on the seed, the number of the step and its own shape, and on nothing that came before: a probe between
    two steps sees the noise of the training pass, and takes none away from it; several forward passes before one step
    have the same noise. The global random states are not used. The number of the step is a buffer, and so in the
    model's ``state_dict``.
    """

    step: torch.Tensor

    def __init__(self, deviation: float, seed: tuple[int, ...], axis: int) -> None:
        super().__init__()
        self.deviation, self.seed, self.axis = deviation, seed, axis
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))

    def drawn(self, a: torch.Tensor) -> torch.Tensor:
        """Noise n for activations ``a``, in a shape that broadcasts to theirs."""
        kept = {0, self.axis % a.ndim}
        shape = [size if i in kept else 1 for i, size in enumerate(a.shape)]
        # in one precision and on no device, so that a probe in another one has the same
        numbers = np.random.default_rng([*self.seed, int(self.step)]).standard_normal(shape, dtype=np.float32)
        return self.deviation * torch.from_numpy(numbers).to(a)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Return (1 + n) a for activations a (N, …) in training mode, a itself in evaluation mode."""
        return torch.addcmul(a, a, self.drawn(a)) if self.training else a


class SphereChart(hessians.Chart):
    """The tangent space of {‖w_i‖² = c_i}, {1ᵀw_i = 0} or both, for the units of some layers of a model.

    The Hessian is the Riemannian one, `SphereTangentOperator`, in as many coordinates as there are parameters: the
    normals are null directions, and count as nullity. All other parameters of the model, biases too, are free.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[capture.Layer],
        *,
        sphere: bool = True,
        centred: bool = False,
        curved: bool = True,
    ) -> None:
        self.model, self.layers = model, tuple(layers)
        self._tangent = partial(hessians.SphereTangentOperator, sphere=sphere, centred=centred, curved=curved)
        what = {(True, False): "sphere", (False, True): "centred weights", (True, True): "centred sphere"}
        self.name = f"tangent space, {what[sphere, centred]}{'' if curved else ', without its curvature'}"

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """The Riemannian Hessian of a unit or a layer; the plain one if the layer is not constrained."""
        module = capture.chosen_layers(self.model, [layer])[layer]
        H = hessian(layers=[layer], unit=unit)
        if module not in self.layers:
            return H
        return self._tangent(H)

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """The Riemannian Hessian on the product of all units' tangent spaces and the space of the free parameters."""
        H = hessian()
        rows = torch.arange(H.order, device=H.device)
        owners = {id(layer.weight): layer for layer in self.layers}
        positions = {}
        for name, parameter in self.model.named_parameters():
            if name in H.parts and id(parameter) in owners:
                where = rows[H.parts[name]].view(1, *parameter.shape)
                positions[name] = unit_weights(owners[id(parameter)], where)[0]
        return self._tangent(H, positions=positions), H.parts


@base.register
class Sphere(base.Method):
    """Weights of each unit on {‖w‖² = c, 1ᵀw = 0}: after every step they are centred and scaled back onto the set.

    The initial weights are brought onto the set, too. Any torch optimizer may take the steps, with its momentum and
    its schedule. With the momentum of SGD, w comes out as if every gradient were centred before the step, as Algorithm
    1 writes it: centring is linear, and 1ᵀw = 0. The Hessian that decides the local rate is the Riemannian one on the
    product of the tangent spaces (`SphereChart`): with step size α the iteration's Jacobian at a stationary point is I
    − α (1 − αλ_i)⁻¹ Hess, λ_i = ⟨w_i, ∇_i L⟩ / c for each unit i.

    Each batch normalization of the model is replaced, in its place, by y = γ x + β for each channel, from its own γ and
    β, which begin at 1 and 0 (eq. (6)); in training by y = (1 + n) γ x + β with noise n in place of that of the batch
    statistics (eq. (7)).
    In a model that has none, it comes after each layer that is chosen. β takes the place of the layer's own bias: a
    layer that y = γ x + β follows, or that is registered right before a batch normalization of its units, loses it (it
    has no bias then, rather than one that is held at 0: units are measured without it, as they are trained).

    A weight decay acts on the weights of all layers, and neither on γ and β nor on biases. Its gradient λw is part of
    g in Algorithm 1: on a sphere it changes nothing but the step size, from α to α / (1 − αλ), and about
    α / (1 − αλ / (1 − μ)) with momentum μ (by 1 % for the paper's WRN-28-10: α = 0.2, λ = 0.005, μ = 0.9). It does
    shrink weights that are free or only centred, as those of the output layer.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    >>> method = Sphere(model, noise="linear")
    >>> bool(torch.allclose(model[0].weight.square().sum(1), torch.full((3,), 2.0)))
    True
    >>> model[0].bias, model[1]
    (None, Sequential(
      (noise): Noise()
      (affine): Affine()
    ))
    """

    name = "sphere"
    constrains = True
    summary = "weights of each unit on a sphere and centred, by projected gradient steps (CWO)"
    source = "Ikami, Irie, Shibata, WACV 2021, Algorithm 1"
    rate: ClassVar[float] = 0.3

    constraint: Constraint = base.option(
        "both",
        '``"sphere"``: ‖w‖² = c, ``"centred"``: 1ᵀw = 0, ``"both"``, or ``"none"``: normalizations are replaced, and '
        "that is all.",
    )
    c: float = base.option(
        C,
        "The squared norm of a unit's weights. 2 keeps the second moment from layer to layer behind ReLU (times "
        "1 − 1/π if weights are centred), but nothing keeps the sum of residual branches small: begin with a small γ "
        "at the end of each, as ``branch_gamma`` of hesscond's networks or ``zero_init_residual`` of torchvision's do.",
        above=0,
    )
    affine: bool = base.option(True, "Whether there are γ and β; without them layers keep their own bias.")
    noise: Literal["none", "constant", "linear"] = base.option(
        "none",
        "The deviation σ_l of n at the l-th of L such places, in the order in which they are registered (in all "
        'networks of hesscond that of execution): ``"none"``, ``"constant"``: σ, or ``"linear"``: (l/L) σ (residual '
        "networks). It is drawn for each channel of each sample; eq. (7) has the index of the channel only.",
    )
    noise_scale: float | None = base.option(
        None,
        "σ; None: 1 for linear noise, 0.4 for a constant one (the best of Table 4, and that of the point clouds).",
        least=0,
    )
    seed: int | None = base.option(
        None, "Seed of the noise; None: torch's global seed, which in a study is that of the run.", least=0
    )
    layers: tuple[str, ...] | None = base.option(None, "Names of the layers whose weights are constrained; None: all.")
    output: bool = base.option(
        False,
        "Whether the last layer of the model counts among them. Eq. (2) has all layers. But nothing follows the last "
        "one that could scale its outputs: c = 2 would bound the logits, which no batch normalization does.",
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        constraint = self.constraint
        chosen = layers_of(model, self.layers, output=self.output)
        self.constrained = tuple(chosen.values()) if constraint != "none" else ()
        for name, layer in chosen.items() if self.constrained else ():
            refuse_initial(name, layer, constraint)
        self.noises: list[Noise] = []
        self._replace_norms(chosen)
        if self.constrained:
            facts = {"sphere": constraint != "centred", "centred": constraint != "sphere"}
            self.chart = SphereChart(model, self.constrained, **facts)
            #: Without the curvature term, which is that of a gradient with a normal part.
            self.flat_chart = SphereChart(model, self.constrained, **facts, curved=False)
        self._project()

    def _replace_norms(self, chosen: Mapping[str, capture.Layer]) -> None:
        """Put noise and scaling in the place of each batch normalization, or behind each of the chosen layers."""
        affine, noise = self.affine, self.noise
        scale = SCALES.get(noise, 0.0) if self.noise_scale is None else self.noise_scale
        seed = torch.initial_seed() if self.seed is None else self.seed

        def behind(number: int, of: int, channels: int, axis: int, norm: nn.Module | None = None) -> nn.Sequential:
            """Modules at the l-th of L places: noise and scaling, as the options say."""
            parts = OrderedDict[str, nn.Module]()
            if noise != "none":
                deviation = scale * number / of if noise == "linear" else scale
                self.noises.append(Noise(deviation, (seed, number), axis))
                parts["noise"] = self.noises[-1]
            if affine:
                parts["affine"] = Affine(channels, axis, norm)
            return nn.Sequential(parts)

        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        biased = list(chosen.values())
        if norms:
            # registered right before a batch normalization of as many channels as they have units
            leaves = [module for module in self.model.modules() if next(module.children(), None) is None]
            pairs = [(a, norm) for a, norm in pairwise(leaves) if capture.is_layer(a) and isinstance(norm, _BatchNorm)]
            biased = [layer for layer, norm in pairs if capture.Geometry.of(layer).units == norm.num_features]
        for number, norm in enumerate(norms, 1):
            like = next(chain(norm.parameters(), norm.buffers(), self.model.parameters()))
            put(self.model, norm, behind(number, len(norms), norm.num_features, 1, norm).to(like.device, like.dtype))
        if not norms and (affine or noise != "none"):
            for number, (name, layer) in enumerate(chosen.items(), 1):
                geometry = capture.Geometry.of(layer)
                wrap(self.model, name, behind(number, len(chosen), geometry.units, -1 - geometry.dims), after=True)
        for layer in biased if affine else ():
            if layer._parameters.get("bias") is not None:
                layer.register_parameter("bias", None)

    @torch.no_grad()
    def _project(self) -> None:
        for layer in self.constrained:
            rows = unit_weights(layer, layer.weight[None])[0]
            layer.weight.copy_(from_unit_weights(layer, projected(rows, self.constraint, self.c)[None])[0])

    def without_decay(self) -> set[int]:
        """γ, β, and the biases of layers."""
        kept = [p for module in self.model.modules() if isinstance(module, Affine) for p in module.parameters()]
        kept += [b for layer in layers_of(self.model).values() if (b := layer._parameters.get("bias")) is not None]
        return {id(parameter) for parameter in kept}

    def after_step(self) -> None:
        """Bring the weights back onto the set; the noise is another one from here on."""
        self._project()
        for noise in self.noises:
            noise.step += 1

    def coordinates(self, layer: str) -> hessians.Coordinates | None:
        """The tangent space of a constrained layer; None for the others."""
        return self.chart if capture.chosen_layers(self.model, [layer])[layer] in self.constrained else None

    def readings(self, layer: str) -> Mapping[str, hessians.Coordinates | None]:
        """Ambient Hessian of a constrained layer, and on spheres its projection without the curvature term."""
        if self.coordinates(layer) is None:
            return {}
        return {"ambient": None} if self.constraint == "centred" else {"ambient": None, "projected": self.flat_chart}


def refuse_initial(name: str, layer: capture.Layer, constraint: Constraint) -> None:
    """Raise a ConfigError where the initial weights of a layer have no point of the set next to them."""
    if "weight" not in layer._parameters:
        raise ConfigError(f"the weight of layer {name!r} is computed from other parameters: it cannot be constrained")
    if constraint == "centred":
        return
    rows = unit_weights(layer, layer.weight.detach()[None])[0]
    left = rows if constraint == "sphere" else rows - rows.mean(1, keepdim=True)
    nothing = left.norm(dim=1) <= EQUAL * rows.norm(dim=1)
    why = "zero" if constraint == "sphere" else "all equal, and zero once they are centred"
    refuse_units("sphere", name, nothing, f"weights that are {why}, and cannot be scaled to the sphere")

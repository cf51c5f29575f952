"""Constrained weights (CWO): each unit's weights on a sphere, with zero mean, or both.

Source: Ikami, Irie and Shibata, *Constrained Weight Optimization for Learning without Activation Normalization*,
WACV 2021, Algorithm 1.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn

from hesscond.capture.layers import Geometry, Layer, chosen_layers, from_unit_weights, unit_weights
from hesscond.errors import ConfigError
from hesscond.hessians import Chart, Coordinates, HessianMaker, SphereTangentOperator
from hesscond.methods.base import Method
from hesscond.methods.registry import register
from hesscond.methods.wrapping import dimensions, layers_of, wrap
from hesscond.operators import SymmetricOperator

Constraint = Literal["sphere", "centred", "both"]
#: ‖w‖² of n weights of variance 2/n, as He's initialization has them.
C = 2.0
#: Initial weights whose spread is below this times their norm are all equal.
EQUAL = 1e-5


def projected(weights: torch.Tensor, constraint: Constraint, c: float = C) -> torch.Tensor:
    """The points of the constraint set next to the rows of ``weights`` (m, n).

    w ↦ w − mean(w) 1, then w ↦ √c w / ‖w‖, or one of the two (Algorithm 1; eq. (11) with w − α∇L for w).
    """
    if constraint != "sphere":
        weights = weights - weights.mean(1, keepdim=True)
    if constraint != "centred":
        weights = weights * (math.sqrt(c) / weights.norm(dim=1, keepdim=True))
    return weights


class Affine(nn.Module):
    """γ a + β for each channel, from γ = 1 and β = 0: what batch normalization ends with.

    Parameters
    ----------
    channels
        m.
    dimensions
        Number of spatial dimensions behind the channels.
    """

    def __init__(self, channels: int, dimensions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.shape = (channels, *[1] * dimensions)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Of pre-activations (…, m, positions)."""
        return torch.addcmul(self.bias.view(self.shape), a, self.weight.view(self.shape))


class Noise(nn.Module):
    """Adds Gaussian noise, independent from entry to entry, in training mode only.

    What it adds depends on the number of the step and on the shape of the batch, and on nothing that came before:
    a probe between two steps sees the noise of the training pass, and takes none away from it; several forward passes
    before one step have the same noise if their shapes are equal. The global random state is not used. The number of
    the step is a buffer, and so in the model's ``state_dict``.

    Parameters
    ----------
    deviation
        Standard deviation of the noise.
    seed
        Numbers that tell this noise from all others.
    """

    step: torch.Tensor

    def __init__(self, deviation: float, seed: tuple[int, ...]) -> None:
        super().__init__()
        self.deviation, self.seed = deviation, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Of pre-activations of any shape."""
        if not self.training:
            return a
        # a CPU generator takes 32 bits of a seed: they have to be spread
        (spread,) = np.random.SeedSequence([*self.seed, int(self.step)]).generate_state(1)
        generator = torch.Generator(a.device).manual_seed(int(spread))
        # in one precision, so that a probe in another one has the same
        noise = torch.randn(a.shape, generator=generator, device=a.device, dtype=torch.float32)
        return a + self.deviation * noise.to(a.dtype)


class SphereChart(Chart):
    """The tangent space of {‖w_i‖² = c_i}, {1ᵀw_i = 0} or both, for the units of some layers of a model.

    The Hessian is the Riemannian one, `SphereTangentOperator`, in as many coordinates as there are parameters: the
    normals are null directions, and count as nullity. All other parameters of the model, biases too, are free.

    Parameters
    ----------
    model
        The model.
    layers
        Its constrained layers.
    sphere
        Whether the norms of their units' weights are constrained.
    centred
        Whether the sums of these are.
    curved
        Whether the curvature of the spheres counts, see `SphereTangentOperator`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        *,
        sphere: bool = True,
        centred: bool = False,
        curved: bool = True,
    ) -> None:
        self.model, self.layers = model, tuple(layers)
        self._tangent = partial(SphereTangentOperator, sphere=sphere, centred=centred, curved=curved)
        what = {(True, False): "sphere", (False, True): "centred weights", (True, True): "centred sphere"}
        self.name = f"tangent space, {what[sphere, centred]}{'' if curved else ', without its curvature'}"

    def operator(self, hessian: HessianMaker, layer: str, unit: int | None) -> SymmetricOperator:
        """The Riemannian Hessian of a unit or a layer; the plain one if the layer is not constrained.

        Raises
        ------
        ConfigError
            No such layer or unit; weights off the constraints.
        """
        module = chosen_layers(self.model, [layer])[layer]
        H = hessian(layers=[layer], unit=unit)
        if module not in self.layers:
            return H
        return self._tangent(H)

    def network(self, hessian: HessianMaker) -> tuple[SymmetricOperator, Mapping[str, slice]]:
        """The Riemannian Hessian on the product of all units' tangent spaces and the space of the free parameters.

        Raises
        ------
        ConfigError
            Weights off the constraints.
        """
        H = hessian()
        rows = torch.arange(H.order, device=H.device)
        owners = {id(layer.weight): layer for layer in self.layers}
        positions = {}
        for name, parameter in self.model.named_parameters():
            if name in H.parts and id(parameter) in owners:
                where = rows[H.parts[name]].view(1, *parameter.shape)
                positions[name] = unit_weights(owners[id(parameter)], where)[0]
        return self._tangent(H, positions=positions), H.parts


@register
class Sphere(Method):
    """Weights of each unit on {‖w‖² = c, 1ᵀw = 0}: after every step they are centred and scaled back onto the set.

    The initial weights are brought onto the set, too. Any torch optimizer may take the steps, with its momentum and
    its schedule: the momentum is that of the gradients as they are, as in Algorithm 1. The Hessian that decides the
    local rate is the Riemannian one on the product of the tangent spaces (`SphereChart`): with step size α the
    iteration's Jacobian at a stationary point is I − α (1 − αλ_i)⁻¹ Hess, λ_i = ⟨w_i, ∇_i L⟩ / c for each unit i.

    Parameters
    ----------
    model
        Holds at least one dense or convolutional layer.
    constraint
        ``"sphere"``: ‖w‖² = c, ``"centred"``: 1ᵀw = 0, ``"both"``.
    c
        The squared norm of a unit's weights.
    affine
        Whether each constrained layer is followed by γ a + β, channel by channel, from γ = 1 and β = 0.
    noise
        Gaussian noise on the pre-activations of constrained layers in training mode: ``"none"``, of the standard
        deviation ``noise_scale`` in all (``"constant"``), or of l/L times it in the l-th of L (``"linear"``).
    noise_scale
        See ``noise``.
    seed
        Of the noise.
    weight_decay
        λ of the term λθ added to the gradients of all parameters that are on no sphere: there it would only
        change the step size, to α / (1 − αλ).
    layers
        Names of the layers; None: all.
    output
        Whether the last layer of the model counts among them.

    Raises
    ------
    ConfigError
        An option out of range; no such layer; a weight that is computed from other parameters; a unit whose initial
        weights are zero, or all equal if they are to be centred.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> method = Sphere(model)
    >>> weight = model.get_submodule(method.layer("0")).weight
    >>> bool(torch.allclose(weight.square().sum(1), torch.full((3,), 2.0)))
    True
    """

    name = "sphere"
    constrains = True
    summary = "weights of each unit on a sphere and centred, by projected gradient steps (CWO)"
    source = "Ikami, Irie, Shibata, WACV 2021, Algorithm 1"

    def __init__(
        self,
        model: nn.Module,
        *,
        constraint: Constraint = "both",
        c: float = C,
        affine: bool = True,
        noise: Literal["none", "constant", "linear"] = "none",
        noise_scale: float = 0.1,
        seed: int = 0,
        weight_decay: float = 0.0,
        layers: tuple[str, ...] | None = None,
        output: bool = False,
    ) -> None:
        super().__init__(model)
        if not 0 < c < math.inf:
            raise ConfigError(f"option 'c' of method 'sphere' is a squared norm: use a positive number, not {c}")
        for option, value in {"noise_scale": noise_scale, "seed": seed, "weight_decay": weight_decay}.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"option {option!r} of method 'sphere' must not be negative or infinite: not {value}")
        self.constraint, self.c, self.weight_decay = constraint, c, weight_decay
        chosen = layers_of(model, layers, output=output)
        for name, layer in chosen.items():
            refuse_initial(name, layer, constraint)
        self.constrained = tuple(chosen.values())
        self.noises: list[Noise] = []
        for number, (name, layer) in enumerate(chosen.items(), 1):
            behind = OrderedDict[str, nn.Module]()
            if noise != "none":
                share = number / len(chosen) if noise == "linear" else 1.0
                self.noises.append(Noise(share * noise_scale, (seed, number)))
                behind["noise"] = self.noises[-1]
            if affine:
                behind["affine"] = Affine(Geometry.of(layer).units, dimensions(layer))
            if behind:
                wrap(model, name, after=nn.Sequential(behind))
        facts = {"sphere": constraint != "centred", "centred": constraint != "sphere"}
        self.chart = SphereChart(model, self.constrained, **facts)
        #: Without the curvature term, which is that of a gradient with a normal part.
        self.flat_chart = SphereChart(model, self.constrained, **facts, curved=False)
        self._project()

    @torch.no_grad()
    def _project(self) -> None:
        for layer in self.constrained:
            rows = unit_weights(layer, layer.weight[None])[0]
            layer.weight.copy_(from_unit_weights(layer, projected(rows, self.constraint, self.c)[None])[0])

    def without_decay(self) -> set[int]:
        """The weights on spheres."""
        return set() if self.constraint == "centred" else {id(layer.weight) for layer in self.constrained}

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Add the weight decay."""
        if self.weight_decay == 0:
            return
        fixed = self.without_decay()
        for parameter in self.model.parameters():
            if parameter.grad is not None and id(parameter) not in fixed:
                parameter.grad.add_(parameter, alpha=self.weight_decay)

    def after_step(self) -> None:
        """Bring the weights back onto the set; the noise is another one from here on."""
        self._project()
        for noise in self.noises:
            noise.step += 1

    def coordinates(self, layer: str) -> Coordinates | None:
        """The tangent space of a constrained layer; None for the others.

        Raises
        ------
        ConfigError
            No such layer.
        """
        known = layers_of(self.model)
        if layer not in known:
            raise ConfigError(f"no dense or convolutional layer {layer!r} in the model: it has {', '.join(known)}")
        return self.chart if known[layer] in self.constrained else None

    def readings(self, layer: str) -> Mapping[str, Coordinates | None]:
        """Of a constrained layer: the ambient Hessian, and on spheres its projection without the curvature term."""
        if self.coordinates(layer) is None:
            return {}
        return {"ambient": None} if self.constraint == "centred" else {"ambient": None, "projected": self.flat_chart}


def refuse_initial(name: str, layer: Layer, constraint: Constraint) -> None:
    """Raise a ConfigError where the initial weights of a layer have no point of the set next to them."""
    if "weight" not in layer._parameters:
        raise ConfigError(f"the weight of layer {name!r} is computed from other parameters: it cannot be constrained")
    if constraint == "centred":
        return
    rows = unit_weights(layer, layer.weight.detach()[None])[0]
    left = rows if constraint == "sphere" else rows - rows.mean(1, keepdim=True)
    nothing = left.norm(dim=1) <= EQUAL * rows.norm(dim=1)
    if bool(nothing.any()):
        unit = int(nothing.nonzero()[0])
        why = "zero" if constraint == "sphere" else "all equal, and zero once they are centred"
        raise ConfigError(
            f"the weights of unit {unit} of layer {name!r} are {why}: they cannot be scaled to the sphere; initialize "
            "them at random, or name other layers with layers="
        )

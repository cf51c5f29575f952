"""Interface of a method: the network that it builds, its step and its coordinates; its options; the names."""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hesscond import capture
from hesscond.errors import ConfigError
from hesscond.hessians import Coordinates, Preconditioner, Reparametrized
from hesscond.hessians.coordinates.linear import UnitCoordinates
from hesscond.hessians.coordinates.parameter_maps import ParameterMaps
from hesscond.hessians.parameters import UnitLayout
from hesscond.lazy import Registry, subclass_of
from hesscond.methods.wrapping import place_of

#: Names of the optimizers of torch that may take a method's steps.
OptimizerName = Literal["sgd", "adam", "adamw"]


class Method:
    """A normalization or preconditioning scheme at work on one model.

    It says three things: how the network is built (``__init__`` changes the model in place), how the step is taken
    (`optimizer`, `penalty`, `transform_gradients`, `after_step`) and in which coordinates the Hessian decides its
    convergence (`coordinates`). A new one is a subclass with the `register` decorator in any file under
    ``hesscond/methods``, or in a module of another package that is an entry point of the group ``hesscond.methods``.
    Its options are declared in its body by `option`, or are keyword arguments of ``__init__`` with a type and a
    default: ``--method NAME:option=value``.

    Parameters
    ----------
    model
        The model that will be trained. Hooks may be put on it; `detach` takes them off.
    **options
        Values of declared options, which become attributes.

    Raises
    ------
    ConfigError
        For every method: an option out of its range; a layer that does not exist, or that the method is not defined
        for; an optimizer of another kind than it knows; a probe before the first step if its steps define P.
    """

    #: Name on the command line.
    name: ClassVar[str]
    #: One line for ``hesscond methods``.
    summary: ClassVar[str]
    #: Paper and equation.
    source: ClassVar[str]
    #: Learning rate if none is given. At it, the study ``fc-digits`` reaches at least 80 % whatever the seed.
    rate: ClassVar[float] = 0.1
    #: Whether the step goes along P Pᵀ∇L for a P that is not the identity; two such methods cannot be combined.
    preconditions: ClassVar[bool] = False
    #: Whether that is done by the optimizer's step, and not by `transform_gradients`: adaptive methods.
    preconditions_in_step: ClassVar[bool] = False
    #: Whether weights are computed from other parameters, in which nothing can be preconditioned or computed again.
    reparametrizes: ClassVar[bool] = False
    #: Whether the weights are brought back to a set after each step, which must not be computed from other parameters.
    constrains: ClassVar[bool] = False

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        documented(cls)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        #: The combination of methods that this one is a part of, or itself.
        self.whole: Method = self
        #: Hooks that `detach` removes.
        self.hooks: list[RemovableHandle] = []
        for name, declaration in declared(type(self)).items():
            setattr(self, name, declaration.checked(self.name, options.pop(name, declaration.default)))
        if options:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {next(iter(options))!r}")

    # -- the network --------------------------------------------------------------------------------------------------

    def layer(self, name: str) -> str:
        """Current name of the layer that was called ``name`` before anything was put around it."""
        return place_of(self.model, name)

    def fit(self, inputs: torch.Tensor) -> None:
        """Take over what the method needs of all training inputs (N, …), before the first step."""

    @property
    def reads_all_inputs(self) -> bool:
        """Whether `fit` reads the training inputs, which must then be in memory."""
        return type(self).fit is not Method.fit

    def check_batch(self, samples: int) -> None:
        """Refuse mini-batches that the method is not defined for, by a `ConfigError`."""

    # -- the step -----------------------------------------------------------------------------------------------------

    def optimizer(
        self,
        lr: float,
        *,
        kind: OptimizerName = "sgd",
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> torch.optim.Optimizer:
        """Optimizer that takes the steps: torch's SGD, Adam or AdamW, unless the method is itself an optimizer."""
        parameters = self.parameter_groups(weight_decay)
        optimizer: torch.optim.Optimizer
        if kind == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov)
        else:
            refuse_momentum(f"optimizer {kind!r}", momentum, nesterov)
            optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](parameters, lr=lr)
        self.follow(optimizer)
        return optimizer

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer; parameters without weight decay form a group of their own."""
        kept = self.whole.without_decay() if weight_decay else set()
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if id(p) not in kept], "weight_decay": weight_decay},
            {"params": [p for p in parameters if id(p) in kept], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def without_decay(self) -> set[int]:
        """The ids of the parameters that a weight decay is not to reach."""
        return set()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the optimizer that takes the steps; `optimizer` and `attach` call this, also twice for one."""

    def observe(self, loss: torch.Tensor) -> None:
        """Read from the loss what its gradient does not contain; call before the backward pass."""

    def penalty(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Term that is added to the loss before the backward pass; None: nothing is added."""
        return None

    def transform_gradients(self) -> None:
        """Replace the gradients in ``.grad`` by the method's direction; call between backward and step."""

    def after_step(self) -> None:
        """Bring the parameters back to where the method wants them; call after the optimizer's step."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Call both hooks around every ``optimizer.step()``, of any torch optimizer unless the method is itself one."""
        self.follow(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self.transform_gradients())
        optimizer.register_step_post_hook(lambda *_: self.after_step())

    # -- the coordinates ----------------------------------------------------------------------------------------------

    def preconditioner(self, layer: str) -> Preconditioner | None:
        """P of the layer's units as the last step used it; None: plain coordinates (P = I)."""
        return None

    def coordinates(self, layer: str) -> Coordinates | None:
        """The coordinates in which the Hessian of the layer decides the method's convergence; None: the plain ones."""
        return self.preconditioner(layer)

    def probed(self, layer: str) -> Coordinates | None:
        """Coordinates of a probe of the layer: `coordinates`, with the Hessian of the penalty if the method adds one.

        Raises
        ------
        ConfigError
            No such layer; coordinates that no step has defined yet; a penalty whose Hessian the method does not give.
        """
        if type(self).penalty is not Method.penalty:
            raise ConfigError(f"method {self.name!r} adds a penalty to the loss whose Hessian it does not give")
        return self.checked_coordinates(layer)

    def checked_coordinates(self, layer: str) -> Coordinates | None:
        """`coordinates`; a ConfigError if a method of the user's returned something else."""
        given = self.coordinates(layer)
        if given is None or isinstance(given, Coordinates):
            return given
        raise ConfigError(
            f"method {self.name!r}: its coordinates of layer {layer!r} must be Coordinates, not {given!r}"
        )

    def of_parameters(self, block: str, names: Sequence[str]) -> ParameterMaps | None:
        """P of the named parameters of a block outside of dense and convolutional layers; None: they stay as they are.

        A `ConfigError` if the method does something to them, or to the loss, of which no P is known.
        """
        if self.preconditions or type(self).penalty is not Method.penalty:
            raise ConfigError(
                f"layer {block!r} cannot be probed: the coordinates of {self.name} are those of a plain weight, and "
                "its own is no weight matrix; name others with layers="
            )
        return None

    def unmoved(self, names: Sequence[str]) -> dict[str, str]:
        """Why the method's steps do not move some of these parameters, as the rest of a sentence about each."""
        return {}

    def check_network(self) -> None:
        """Refuse a probe of all parameters together that would lack the Hessian of those outside of layers."""

    def preconditioned(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """M g = P Pᵀ g with the P of `coordinates`, for any g given by the names of its parameters.

        What belongs to no layer, or to one in plain coordinates, stays as it is.
        """
        products = dict(gradients)
        for name, module in capture.eligible_layers(self.model).items():
            coords = self.coordinates(name)
            if coords is None or isinstance(coords, Reparametrized):
                continue
            if not isinstance(coords, Preconditioner):
                raise ConfigError(f"{self.name}: layer {name!r} is measured in {coords.name}, which have no M = P Pᵀ")
            layout = UnitLayout(self.model, {name: module}, None)
            # a parameter that is not differentiated does not move
            named = zip(layout.names, layout.tensors, strict=True)
            g = layout.vector_of([gradients.get(at, torch.zeros_like(p)) for at, p in named])
            units, n_params = layout.units[name], layout.geometries[name].n_params
            P = UnitCoordinates(coords, units, n_params, dtype=g.dtype, device=g.device)
            parts = layout.tensors_of(P.multiply(P.multiply_adjoint(g[:, None]))[:, 0])
            products |= {at: part for at, part in zip(layout.names, parts, strict=True) if at in gradients}
        return products

    def readings(self, layer: str) -> Mapping[str, Coordinates | None]:
        """Further coordinates in which the method's Hessian has been read, by name; logged with those of the method."""
        return {}

    #: Whether the method has coordinates that the data alone define, for a model that it does not train.
    needs_statistics: ClassVar[bool] = False

    #: Whether the data define them as those of a first step on all of them.
    of_first_step: ClassVar[bool] = False

    @classmethod
    def data_statistics(cls, layer: str, inputs: capture.LayerInputs, **options: Any) -> Any:
        """Statistics of a layer's inputs that define its coordinates, with ``merged(other)``; None: plain ones."""
        raise ConfigError(f"method {cls.name!r} has no coordinates that the data define: give the method at work")

    @classmethod
    def data_preconditioner(cls, statistics: Any, geometry: capture.Geometry, **options: Any) -> Preconditioner | None:
        """P from the `data_statistics` of a layer alone, if the method ``needs_statistics``; else None."""
        return None

    def diagnostics(self, layer: str) -> dict[str, float]:
        """Further columns of the study's probe table that only this method knows (see ``runs/store.py``)."""
        return {}

    def snapshot(self, layer: str) -> Any:
        """Copy of all that `from_snapshots` needs later; None: coordinates and diagnostics are made at each step.

        Only for a method without `readings`.
        """
        return None

    def from_snapshots(self, layer: str, snapshots: Sequence[Any]) -> list[tuple[Coordinates | None, dict[str, float]]]:
        """`coordinates` and `diagnostics` of a layer at the times of several snapshots, computed together."""
        raise NotImplementedError

    # -- its life -----------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the hooks off the model; what the network was built with stays."""
        while self.hooks:
            self.hooks.pop().remove()

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs in addition to the states of the model and of the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; a `ConfigError` if that was of another method or model."""
        if state:
            raise ConfigError(f"method {self.name!r} has no state, but was given {', '.join(state)}")


def refuse_momentum(what: str, momentum: float, nesterov: bool) -> None:
    """Raise a ConfigError for options that only SGD has."""
    if momentum:
        raise ConfigError(f"{what} has no momentum of its own: set momentum to 0, not {momentum}")
    if nesterov:
        raise ConfigError(f"{what} has no Nesterov step: set nesterov to false")


def no_step(method: str) -> ConfigError:
    """Error for probing a method whose coordinates are defined by its steps before it has taken one."""
    return ConfigError(
        f"the coordinates of {method} are those of its steps, and it has taken none: make it as method = "
        f"hesscond.methods.parse({method!r}).create(model), call method.attach(optimizer) with the optimizer that "
        "trains the model, and then probe(…, method=method); or run hesscond study"
    )


def not_shown(method: str) -> ConfigError:
    """Error for a method that needs the loss itself but has seen only its gradients."""
    return ConfigError(f"method {method!r} was not shown the loss: call method.observe(loss) before loss.backward()")


#: All methods by name; packages that bring some name modules that register them as entry points of the group.
_REGISTRY: Registry[type[Method]] = Registry("method", "hesscond.methods", subclass_of(Method))

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known by its name (a class decorator).

    A `ConfigError` if the name is taken, or has a character that ``--method`` means something else by.
    """
    if not method.name or set(method.name) & set("+:,=/ "):
        raise ConfigError(f"{method.name!r} cannot name a method: use letters, digits and hyphens")
    _REGISTRY.add(method.name, method)
    return method


def classes() -> dict[str, type[Method]]:
    """Registered methods by the names of their classes."""
    return {method.__name__: method for method in _REGISTRY.values()}


def method_class(name: str) -> type[Method]:
    """The method registered as ``name``; a `ConfigError` if there is none."""
    return _REGISTRY.find(name)


def registered() -> Iterator[type[Method]]:
    """All methods, by name."""
    return iter(_REGISTRY.installed())


#: Ends of the range of an option, in words.
ENDS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}


@dataclass(frozen=True)
class Option:
    """Declaration of an option by `option`; ``owner`` and ``name`` say where it was found."""

    default: Any
    about: str
    ends: Mapping[str, float]
    owner: type = object
    name: str = ""

    @property
    def kind(self) -> Any:
        """Type of its values, as annotated."""
        annotation = self.owner.__annotations__[self.name]
        return eval(annotation, vars(sys.modules[self.owner.__module__])) if isinstance(annotation, str) else annotation

    def checked(self, method: str, value: Any) -> Any:
        """The value, or a ConfigError if it is out of the range, or none of the words that are allowed."""
        if get_origin(self.kind) is Literal and value not in get_args(self.kind):
            words = ", ".join(map(str, get_args(self.kind)))
            raise ConfigError(f"method {method!r}: {self.name} must be one of {words}, not {value!r}")
        if value is None or not self.ends:
            return value
        infinite = math.isinf(value) and value not in self.ends.values()
        if infinite or not all(ENDS[word](value, end) for word, end in self.ends.items()):
            words = " and ".join(f"{word} {end:g}" for word, end in self.ends.items() if not math.isinf(end))
            words += " and finite" if infinite else ""
            raise ConfigError(f"method {method!r}: {self.name} must be {words}, not {value}")
        return value


def option(
    default: Any,
    about: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare an option in the body of a method: ``epsilon: float = option(1e-8, "ε.", above=0)``.

    Parameters
    ----------
    default
        Value if none is given.
    about
        Meaning, for the method's page; empty: that and the range of the option of this name in the base class.
    above, least, below, most
        Ends of the range; a number with a range must be finite, unless an end is infinite.
    """
    ends = zip(ENDS, (above, least, below, most), strict=True)
    return Option(default, about, {word: end for word, end in ends if end is not None})


def declared(method: type) -> dict[str, Option]:
    """Options that a method declares, by name: its own first, then those of its base classes."""
    options: dict[str, Option] = {}
    for owner in method.__mro__:
        for name, attribute in vars(owner).items():
            if isinstance(attribute, Option) and name not in options:
                options[name] = replace(attribute, name=name, owner=owner)
            elif isinstance(attribute, Option) and not options[name].about:
                options[name] = replace(options[name], about=attribute.about, ends=attribute.ends)
    return options


def documented(method: type) -> None:
    """Give a class that declares options its signature, and their meanings in its docstring."""
    options = declared(method)
    if not options or not method.__doc__:
        return
    text = inspect.cleandoc(method.__doc__)
    body = "".join(f"\n{name}\n{textwrap.indent(textwrap.fill(o.about, 110), ' ' * 4)}" for name, o in options.items())
    head, *tail = re.split(r"\n\n(?=(?:Notes|Examples)\n---)", text, maxsplit=1)
    method.__doc__ = "\n\n".join([head, f"Parameters\n----------{body}", *tail])
    keyword = inspect.Parameter.KEYWORD_ONLY
    known = [inspect.Parameter(n, keyword, default=o.default, annotation=o.kind) for n, o in options.items()]
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.Signature([model, *known])  # type: ignore[attr-defined]

"""The one record of the catalogue, and the one way to add a row to it."""

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.catalogue.truths import Truth

LEVELS = ("unit", "layer", "network")


def double(model):
    """The model in float64, as the truth sees it: a copy."""
    return copy.deepcopy(model).double()


@dataclass(frozen=True, eq=False)
class Case:
    """One model with a loss and a batch, the truth of its Hessians, and the facts that tests choose it by.

    Attributes
    ----------
    group, name
        The heading that it stands under, and what it is called: no two cases have the same name.
    title
        What the page of `docs/support.md` calls it; None: it is not on the page.
    build
        Makes (model, loss_fn, batch) from the random state that it finds, in the type that a user has; a fourth value
        is the loss in float64 of a twin of the model, where a plain call of it on the batch is none.
    layer
        The layer whose κ the page shows.
    twin
        The float64 model whose double backward is the truth, from the model; it computes the same function. Not simply
        a copy where `torch.autograd.grad` is wrong, or cannot run through a wrapper.
    truth
        Makes another truth than that, from (model, loss_fn, batch, options).
    close
        Allowed relative difference of a Hessian to the truth; None: its κ is compared and not its entries.
    levels
        Those tried.
    options
        More arguments of `hesscond.probe`; a function of (model, loss_fn, batch) makes them.
    control
        Whether a refusal is a false alarm.
    signed
        Whether the number of negative eigenvalues counts.
    judge
        Finds the verdicts in another way than by `hesscond.probe`.
    library
        What has to be importable, beside torch.
    processes
        How many processes of torch.distributed measure it together.
    grid
        Whether its dense and convolutional layers go through every level and method.
    blocks
        Whether every parameter is measured, whatever its module is.
    dtype
        The type in which `make` gives it.
    psd
        Every Hessian block is positive semidefinite in theory (a piecewise linear rest of the network, convex loss).
    streams
        Whether a stream of parts has the Hessian of the whole: the samples do not influence each other, and the loss of
        the whole is the (weighted) mean or the sum of the losses of its parts.
    unreached
        Dense and convolutional layers that the batch does not reach.
    flat
        Those whose Hessian is zero.
    borderline
        Whether last digits, which differ from processor to processor, decide if a κ is resolved.
    """

    group: str
    name: str
    title: str | None
    build: Callable[[], Sequence[Any]]
    layer: str = "0"
    twin: Callable[[nn.Module], nn.Module] = double
    truth: Callable[..., Any] | None = None
    close: float | None = 1e-8
    levels: tuple[str, ...] = LEVELS
    options: dict | Callable[..., dict] = field(default_factory=dict)
    control: bool = False
    signed: bool = True
    judge: Callable[[], list] | None = None
    library: str | None = None
    processes: int = 1
    grid: bool = False
    blocks: bool = False
    dtype: torch.dtype = torch.float64
    psd: bool = False
    streams: bool = True
    unreached: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    borderline: bool = False

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

    def make(self, seed=0, device="cpu"):
        """(model, loss_fn, batch) in its `dtype` on a device; two calls with the same seed give the same."""
        torch.manual_seed(seed)
        model, loss_fn, batch = self.build()
        loss_fn = copy.deepcopy(loss_fn).to(device, self.dtype) if isinstance(loss_fn, nn.Module) else loss_fn
        inputs, target = tree_map_only(torch.Tensor, lambda t: moved(t, self.dtype).to(device), batch)
        return model.to(device, self.dtype), loss_fn, (inputs, target)

    def arguments(self, *problem):
        """The arguments of `hesscond.probe` beside (model, loss_fn, batch)."""
        return dict(self.options(*problem) if callable(self.options) else self.options)

    def true(self, model, loss_fn, batch, *by_hand, options):
        """The truth of (model, loss_fn, batch), as they were built."""
        if self.truth is not None:
            return self.truth(model, loss_fn, batch, options)
        single = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
        return Truth(self.twin(model), loss_fn, batch, *by_hand, draws=torch.float32 if single else None)


def moved(tensor, dtype):
    """A tensor in a type, if it has real numbers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


#: All cases, by name.
CATALOGUE: dict[str, Case] = {}


def add(group, name, title, build, layer="0", **facts):
    """Add a row to the catalogue."""
    assert name not in CATALOGUE, name
    CATALOGUE[name] = Case(group, name, title, build, layer, **facts)


def grid(group, name, build, **facts):
    """Add a row that is not on the page, and whose layers go through every level and method."""
    add(group, name, None, build, grid=True, **facts)


def rows(batch, index):
    """The samples ``index`` (a slice or a tensor) of a batch of any structure."""
    return tree_map_only(torch.Tensor, lambda t: t[index], batch)


def split(batch, sizes):
    """A list of batches of these sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [rows(batch, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def samples(batch):
    """How many there are in a batch, by its targets."""
    return len(tree_leaves(batch[1])[0])

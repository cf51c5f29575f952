"""Batches as loaders yield them, against plain double backward through the loss computed by hand; what is refused."""

import copy
import types
from collections import UserDict
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from tests.catalogue import PAGE
from tests.catalogue.batches import BATCHES, CE, Pair, Slots, Two, scaled
from tests.catalogue.truths import Truth
from tests.truth import double_backward

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")


def holdings(value, seen):
    """Everything that some data hold, each with the version of its values."""
    if id(value) in seen:
        return
    seen[id(value)] = value, getattr(value, "_version", None)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    slots = [getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)]
    for item in (*items, *slots, *getattr(value, "__dict__", {}).values()):
        holdings(item, seen)


@pytest.mark.share(3)
@pytest.mark.parametrize("case", [c for c in PAGE if c.group == BATCHES and c.library is None], ids=lambda c: c.name)
def test_hessians_are_those_of_plain_double_backward_and_the_data_stay_as_they_are(case):
    """At the level of layers; the support table has the others."""
    torch.manual_seed(0)
    model, loss, data, truth = case.build()
    twin = case.twin(model)
    before, after = {}, {}
    holdings(data, before)
    result = hesscond.probe(model, loss, data, level="layer")
    holdings(data, after)
    assert before.keys() == after.keys()
    assert [version for _, version in before.values()] == [version for _, version in after.values()]
    own, value = dict(twin.named_parameters()), truth(twin)
    assert "o" in result
    for block in result.values():
        exact = double_backward(value, [own[name] for name in block.parameters])
        values = torch.linalg.eigvalsh(exact)
        assert (torch.linalg.eigvalsh(block.hessian()) - values).abs().max() <= 1e-12 * values.abs().max()


class Locked(Slots):
    """Object that nobody copies."""

    __slots__ = ()

    def __deepcopy__(self, memo):
        raise TypeError("not to be copied")


X, Y = torch.randn(4, 3), torch.zeros(4).long()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.nested.nested_tensor([X[:2], X], layout=torch.jagged), Y), "nested tensor.*PackedSequence"),
        (([torch.randn(0, 3), torch.randn(0, 3)], torch.zeros(0).long()), "the batch is empty"),
        (Locked(X, X), "cannot be copied .*: give its tensors"),
        ((types.SimpleNamespace(x=3), torch.zeros(3)), "must be tensors, or contain some, not a SimpleNamespace"),
        ((Pair(X, X[:, :1]), None), "has no target .*does not take None .*: give a pair"),
    ],
)
def test_batches_that_cannot_be_measured_are_refused_in_a_sentence(data, words):
    with pytest.raises(ConfigError, match=words) as caught:
        hesscond.probe(Two(scaled), CE, data)
    assert "\n" not in str(caught.value)


class Adjoint(torch.autograd.Function):
    """Function that runs a module again in its backward pass, as adjoint methods do."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx, slope):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = ctx.module(x)
        own = torch.autograd.grad(value, [x, *parameters], slope, allow_unused=True)
        return None, *own


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_that_a_backward_pass_runs_again_is_measured(dtype, level):
    model = Two(lambda self, x: self.o(torch.tanh(Adjoint.apply(self.l, x, *self.l.parameters())))).to(dtype)
    plain = copy.deepcopy(model).double()
    plain.forward = lambda x: plain.o(torch.tanh(plain.l(x)))
    own = hesscond.probe(model, CE, (X.to(dtype), Y), level=level)["network" if level == "network" else "l"]
    truth = Truth(plain, CE, (X, Y))
    if level == "network":
        pairs = [(own.operator.to_dense(), truth.flat(own.parameters))]
    else:
        rows = truth.units("l", own.parameters)
        pairs = zip(map(own.hessian, own.blocks), rows if level == "unit" else [rows.flatten()], strict=True)
    for found, where in pairs:
        assert float((found - truth.at(where)).norm()) < 1e-8 * float(truth.at(where).norm())
    assert all(p.grad is None and p.dtype == dtype for p in model.parameters())


def test_errors_of_the_model_say_where_they_come_from():
    inner = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(5, 2)))
    with pytest.raises(RuntimeError, match="shapes") as caught:
        hesscond.probe(inner, CE, (X, Y))
    assert caught.value.__notes__ == ["(in module '1.1')"]


class Fields(MutableMapping):
    """Mapping of its own, as a tensor dict is."""

    def __init__(self, **items):
        self.items_ = items

    def __copy__(self):
        return Fields(**self.items_)

    __getitem__ = lambda self, name: self.items_[name]  # noqa: E731
    __setitem__ = lambda self, name, value: self.items_.__setitem__(name, value)  # noqa: E731
    __delitem__ = lambda self, name: self.items_.__delitem__(name)  # noqa: E731
    __iter__ = lambda self: iter(self.items_)  # noqa: E731
    __len__ = lambda self: len(self.items_)  # noqa: E731


@pytest.mark.parametrize(("make", "seen"), [(Fields, Fields), (dict, dict), (UserDict, dict)])
def test_a_mapping_of_its_own_is_one_argument_and_other_mappings_give_keywords(make, seen):
    def forward(self, data=None, **items):
        kinds.add(type(data or items))
        return self.out(self.l((data or items)["x"]))

    kinds = set()
    hesscond.probe(Two(forward), CE, (make(x=X), Y), level="layer")
    assert kinds == {seen}

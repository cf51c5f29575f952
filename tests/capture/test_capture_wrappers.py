"""Compilers, replicas and checkpoints change nothing: the Hessians are those of the model inside."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hesscond
from tests.catalogue.parts import Net

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 5, generator=GENERATOR), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()


def part(run):
    """Layers in the middle of a network, through a function that may checkpoint them."""

    def forward(m, x):
        return run(lambda h: m.second(torch.tanh(m.first(h))).sigmoid(), x)

    return Net(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 4))


def call(function, x):
    return function(x)


def in_sequence(function, x):
    return checkpoint_sequential([function, nn.Softplus()], 2, x, use_reentrant=False)


def plain_sequence(function, x):
    return nn.functional.softplus(function(x))


def network(run=call, wrap=lambda part: part):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), wrap(part(run)), nn.Linear(4, 3))


def hessians(model, level):
    """All of them, by layer."""
    if level == "network":
        return {"network": hesscond.HessianOperator(model, LOSS, (X, Y)).to_dense()}
    result = hesscond.probe(model, LOSS, (X, Y), level=level)
    return {
        name: torch.stack([found.hessian(unit=i) for i in found.units]) if level == "unit" else found.hessian()
        for name, found in result.items()
    }


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, H in found.items():
        torch.testing.assert_close(H, expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_a_checkpointed_sequence(level):
    before = dict(vars(torch.utils.checkpoint))
    assert_same(hessians(network(in_sequence), level), hessians(network(plain_sequence), level))
    # checkpoints are switched off only while hesscond runs the model
    assert vars(torch.utils.checkpoint) == before


def test_a_forward_context_of_a_checkpoint_stays():
    """Here one that halves what the checkpointed part returns."""

    class Halved(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            value = func(*args, **(kwargs or {}))
            return value / 2 if func is torch.Tensor.sigmoid else value

    def run(function, x):
        return checkpoint(function, x, use_reentrant=False, context_fn=lambda: (Halved(), Halved()))

    def plain(function, x):
        return function(x) / 2

    assert_same(hessians(network(run), "layer"), hessians(network(plain), "layer"))


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m))])
def test_wrapped_models_are_unwrapped_with_the_names_of_the_model_inside(wrap, level):
    assert_same(hessians(wrap(network()), level), hessians(network(), level))


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_a_model_compiled_in_place(level):
    model = network()
    model.compile()
    assert_same(hessians(model, level), hessians(network(), level))


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrapped_parts(wrap, level):
    found, expected = hessians(network(wrap=wrap), level), hessians(network(), level)
    assert_same(dict(zip(expected, found.values(), strict=True)), expected)
    model = network(wrap=wrap)
    before = set(vars(model[2]))
    hesscond.probe(model, LOSS, (X, Y))
    assert set(vars(model[2])) == before


def test_a_compiled_function_in_the_forward_pass_runs_as_it_was_written():
    run = torch.compile(lambda function, x: function(x), backend="eager")
    assert_same(hessians(network(run), "layer"), hessians(network(), "layer"))


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_gradients_of_a_lookup_that_is_no_module_are_those_of_the_loss(option):
    tokens, found = (torch.arange(12) ** 2 % 6, Y), []
    for options in ({option: True}, {}):
        torch.manual_seed(1)
        parts = {"table": nn.Parameter(torch.randn(6, 4)), "out": nn.Linear(4, 3), "options": options}
        model = Net(lambda m, x: m.out(nn.functional.embedding(x, m.table, **m.options)), **parts)
        found.append(
            {
                "network": hesscond.probe(model, LOSS, tokens, level="network")["network"].operator.to_dense(),
                "table": hesscond.probe(model, LOSS, tokens, ["table"], "layer")["table"].hessian(),
            }
        )
    assert_same(*found)

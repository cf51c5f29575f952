"""The engine on a device that is not the CPU: the same answers bit for bit, few copies and reads, or one sentence."""

import gc

import pytest
import torch
from torch import nn

import hesscond
import hesscond.operators
from hesscond.errors import ConfigError
from hesscond.problem.devices import default_memory, has_float64
from tests.pretend_device import PretendTensor, pretend_device

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def device():
    with pretend_device() as state:
        yield state


def moved(value, where="pretend"):
    if isinstance(value, (torch.Tensor, nn.Module)):
        return value.to(where)
    return type(value)(moved(part, where) for part in value)


def network(width=8, depth=1, activation=nn.Tanh, inputs=6):
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(inputs, width), activation())]
    hidden = [nn.Linear(width, width) if i and isinstance(m, nn.Linear) else m for i, m in enumerate(hidden)]
    return nn.Sequential(*hidden, nn.Linear(width, 5))


def batch(samples=32, inputs=6):
    torch.manual_seed(1)
    return torch.randn(samples, inputs), torch.randint(0, 5, (samples,))


def numbers(result):
    """All that is known of κ of each block, to the last bit."""
    return {
        name: [(k.lower, k.upper, k.lambda_max, k.lambda_min, k.rank, k.negative, k.solver) for k in own.conditions]
        for name, own in result.items()
    } | dict(result.skipped)


# --------------------------------------------------------------------------------------------------- the device itself


def test_the_device_refuses_to_mix_and_counts(device):
    x = torch.randn(4, 3)
    p = x.to("pretend")
    assert (p.device, type(p)) == (torch.device("pretend:0"), PretendTensor)
    for wrong in (lambda: p + x, lambda: p @ x.T, lambda: p + x.to("pretend:1"), p.numpy):
        with pytest.raises((RuntimeError, TypeError), match=r"one device|to numpy"):
            wrong()
    device.counts.clear()
    assert torch.equal(p.t()[[0, 2]].cpu(), x.t()[[0, 2]])
    assert device.counts == {"to device": 1, "to host": 1}
    assert bool((p[p > 0] > 0).all())
    assert p.tolist() == x.tolist()
    assert device.counts["read"] == 3


def test_derivatives_and_memory_of_the_device(device):
    f = lambda w: torch.tanh(w @ w.T).sum()  # noqa: E731
    w = torch.randn(3, 2)
    H = torch.func.hessian(f)(w.to("pretend"))
    assert torch.equal(H.cpu(), torch.func.hessian(f)(w))
    del H
    gc.collect()
    assert not device.used[0]
    device.limit = 1000
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1001, device="pretend", dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------------- answers


CASES = ["relu-ce", "tanh-mse", "conv-bn"]


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_probes_have_the_same_bits(level, device):
    here = hesscond.probe(network(), nn.CrossEntropyLoss(), batch(), level=level)
    there = hesscond.probe(moved(network()), nn.CrossEntropyLoss(), moved(batch()), level=level)
    assert numbers(there) == numbers(here)


@pytest.mark.parametrize("method", ["bnp", "sphere", "kfac"])
def test_methods_have_the_same_bits(method, device):
    here = hesscond.probe(network(), nn.CrossEntropyLoss(), batch(), method=method)
    there = hesscond.probe(moved(network()), nn.CrossEntropyLoss(), moved(batch()), method=method)
    assert numbers(there) == numbers(here)


def test_iterations_have_the_same_bits(device):
    here = hesscond.HessianOperator(network(), nn.CrossEntropyLoss(), batch())
    there = hesscond.HessianOperator(moved(network()), nn.CrossEntropyLoss(), moved(batch()))
    for which in ("top", "smallest-nonzero"):
        own, other = (hesscond.lanczos(H, 2, which=which).eigenvalues.cpu() for H in (here, there))
        assert torch.equal(own, other)


# ------------------------------------------------------------------------------------------------- what a device lacks


def test_without_float64_there_is_one_sentence():
    with pretend_device(float64=False):
        has_float64.cache_clear()
        with pytest.raises(ConfigError, match=r"'pretend:0' has no float64.*CPU"):
            hesscond.probe(moved(network()), nn.CrossEntropyLoss(), moved(batch()))
    has_float64.cache_clear()


def test_memory_is_half_of_what_the_device_reports(device):
    tensor = torch.zeros(100, device="pretend", dtype=torch.float64)
    device.limit = device.used[0] + 10_000
    assert default_memory([tensor]) == 5000
    assert default_memory([torch.zeros(1)]) == 4 * 10**9


def test_a_product_is_halved_where_memory_ends(device):
    """One product of 64 columns does not fit, and parts of them do."""

    class Doubled(hesscond.operators.SymmetricOperator):
        sizes = ()

        def multiply(self, V):
            self.sizes = (*self.sizes, V.shape[1])
            return (V.repeat(1, 8) * 2)[:, : V.shape[1]].clone()

    A = Doubled(50, torch.float64, "pretend")
    V = torch.randn(50, 64, dtype=torch.float64)
    there = V.to("pretend")
    device.limit = device.used[0] + 50 * 8 * 64 * 10
    assert torch.equal((A @ there).cpu(), 2 * V)
    assert A.sizes[0] == 64
    assert max(A.sizes[1:]) == 32

"""Casts to float32 are lifted, and where a model computes in fewer digits the result says so."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.capture import capture
from hesscond.problem.evaluation import WeightWatch, evaluate, tensors_by_module
from hesscond.problem.precision import Operations
from hesscond.problem.snapshot import Snapshot
from tests.catalogue.parts import Net, by_token as loss
from tests.truth import network_truth

TOKENS = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS, TOKENS.roll(-1, 1)


class RMSNorm(nn.Module):
    """As transformers writes it for LLaMA and Qwen2; ``low``: the type it casts to."""

    def __init__(self, width, low):
        super().__init__()
        self.weight, self.low = nn.Parameter(torch.ones(width)), low

    def forward(self, x):
        before = x.dtype
        x = x.to(self.low)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(before)


class Rotary(nn.Module):
    """Angles from integer positions, by two further ways to write a cast."""

    def __init__(self, width, low):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, width, 2) / width), persistent=False)
        self.low = low

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)[:, None]
        positions = positions.float() if self.low is torch.float32 else positions.type(self.low)
        angles = positions @ self.inv_freq[None, :].type(self.low)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Block(nn.Module):
    """Scores of rotated tokens, a mask and a softmax, as in LLaMA, and a gate."""

    def __init__(self, width, low):
        super().__init__()
        self.norm, self.rotary, self.gate = RMSNorm(width, low), Rotary(width, low), nn.Linear(width, width)
        self.low = low

    def forward(self, x):
        h, (cos, sin) = self.norm(x), self.rotary(x)
        scores = (h * cos) @ (h * sin).transpose(1, 2)
        scores = scores + torch.full((x.shape[1],) * 2, -50.0, dtype=self.low).triu(1).to(x)
        weights = F.softmax(scores, dim=-1, dtype=self.low).to(x.dtype)
        return x + F.silu(self.gate(weights @ h))


def llama(low=torch.float32):
    torch.manual_seed(0)
    width = 4
    return nn.Sequential(nn.Embedding(7, width), Block(width, low), RMSNorm(width, low), nn.Linear(width, 7))


def distance(H, expected):
    return float((H - expected).norm() / expected.norm())


@contextmanager
def casts_kept():
    """Context in which models cast to float32 as they say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightWatch, "in_float64", lambda self, func, args, kwargs: func(*args, **kwargs))
        yield


def test_a_llama_is_measured_all_in_float64():
    model, expected = llama(), network_truth(llama(torch.float64).double(), loss, BATCH)
    assert distance(hesscond.HessianOperator(model, loss, BATCH).to_dense(), expected) < 1e-13
    # which the casts would prevent
    with casts_kept():
        assert distance(hesscond.HessianOperator(model, loss, BATCH).to_dense(), expected) > 1e-8
    # and it decides what is resolved
    whole = hesscond.probe(model, loss, BATCH, level="network")["network"].kappa
    values = torch.linalg.eigvalsh(expected).abs().sort().values
    assert whole.resolved
    assert float(whole) == pytest.approx(float(values[-1] / values[-whole.rank]), rel=1e-4)
    assert values[-whole.rank - 1] < 1e-6 * values[-whole.rank]


@pytest.mark.parametrize("whole", [False, True])
def test_captures_are_lifted_too(whole):
    found = capture(llama(), loss, BATCH, ["1.gate"], whole=whole)["1.gate"]
    expected = capture(llama(torch.float64), loss, BATCH, ["1.gate"], whole=whole)["1.gate"]
    with casts_kept():
        kept = capture(llama(), loss, BATCH, ["1.gate"], whole=whole)["1.gate"]
    assert distance(found.H_hat, expected.H_hat) < 1e-14
    assert distance(kept.H_hat, expected.H_hat) > 1e-9


def operations(model, loss_fn, batch, dtype=torch.float64):
    found = Operations(dtype)
    Snapshot(model, list(model.parameters()), dtype).evaluate(loss_fn, batch, counted=found)
    return found


def counted(*arguments):
    return operations(*arguments).precision()


def test_the_precision_is_said():
    model = llama()
    lifted = counted(model, loss, BATCH)
    with casts_kept():
        found = operations(model, loss, BATCH)
    kept = found.precision()
    # 2 norms, 2 casts of the rotary part, mask, softmax
    assert str(lifted) == "float64 (6 casts to float32 lifted)"
    assert lifted.narrowest is None
    assert kept.narrowest is torch.float32
    assert kept.lifted == 0
    assert kept.where[0] == "RMSNorm"
    assert set(kept.where) == {"RMSNorm", "Rotary", "Block"}
    # cast, square, mean, + eps, rsqrt, product: 6 in each of 2 norms
    assert found.places[torch.float32, "RMSNorm"] == 12
    assert str(kept).startswith("mixed: ")
    assert str(kept).endswith(" float32 operations (RMSNorm, Rotary, Block)")
    assert str(counted(llama(torch.float64), loss, BATCH)) == "float64"


def test_the_precision_of_a_model_as_it_is():
    assert str(counted(llama(), loss, BATCH, None)) == "float32"
    assert counted(llama().double(), loss, BATCH, None).narrowest is torch.float32
    half = llama().to(torch.bfloat16)
    assert counted(half, loss, BATCH, None).narrowest is torch.bfloat16
    linear = nn.Sequential(nn.Linear(4, 3)).to(torch.bfloat16)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert str(counted(linear, lambda output, target: output.square().mean(), (x, x), None)) == "bfloat16"


def test_rounding_to_half_precision_is_the_models_own():
    class Rounded(nn.Linear):
        def forward(self, x):
            return F.linear(x.to(torch.bfloat16).to(x.dtype), self.weight, self.bias)

    torch.manual_seed(0)
    model, x = nn.Sequential(Rounded(4, 3)), torch.randn(6, 4, dtype=torch.float64)
    y = torch.arange(6) % 3
    truth = network_truth(copy.deepcopy(model).double(), F.cross_entropy, (x, y))
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), truth) < 1e-14
    found = counted(model, F.cross_entropy, (x, y))
    assert str(found) == "mixed: 1 bfloat16 operation (Rounded)"
    assert found.narrowest is torch.bfloat16


CASTS = {
    "float": lambda x: x.float(),
    "to a type": lambda x: x.to(torch.float32),
    "to a type by name": lambda x: x.to(dtype=torch.float32),
    "to a device and a type": lambda x: x.to("cpu", torch.float32),
    "to another": lambda x: x.to(torch.zeros(1, dtype=torch.float16).float().detach()),
    "type": lambda x: x.type(torch.float32),
    "old type": lambda x: x.type(torch.FloatTensor),
    "old type by name": lambda x: x.type("torch.FloatTensor"),
    "to another, copied": lambda x: x.to(CONSTANT, copy=True),
    "type as": lambda x: x.type_as(CONSTANT),
    "of a sum": lambda x: x.cumsum(0, dtype=torch.float32),
    "of a softmax": lambda x: torch.log_softmax(x, 1, torch.float32),
    "of a constant": lambda x: x * torch.tensor(1 / 3, dtype=torch.float32),
}
CONSTANT = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("cast", CASTS)
def test_every_way_to_write_a_cast(cast):
    def forward(m, x):
        return m.outer(torch.tanh(m.cast(m.inner(x))).to(m.outer.weight.dtype))

    torch.manual_seed(1)
    model = Net(forward, inner=nn.Linear(4, 4), outer=nn.Linear(4, 3), cast=CASTS[cast])
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    wide = {"of a sum": lambda x: x.cumsum(0), "of a softmax": lambda x: x.log_softmax(1)}
    wide["of a constant"] = lambda x: x / 3
    reference = copy.deepcopy(model).double()
    reference.cast = wide.get(cast, lambda x: x)
    expected = network_truth(reference, F.cross_entropy, (x.double(), y))
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), expected) < 1e-13
    with casts_kept():
        found = hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense()
    assert distance(found, expected) > 1e-9
    assert str(counted(model, F.cross_entropy, (x, y))).startswith("float64 (")


def test_random_numbers_are_those_that_the_model_would_draw():
    class Noisy(nn.Linear):
        def forward(self, x):
            noise = torch.rand(x.shape, dtype=torch.float32) + torch.randn_like(x, dtype=torch.float32)
            return F.linear(x * (1 + noise), self.weight, self.bias)

    model, x, y = nn.Sequential(Noisy(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(model[0].state_dict())
    torch.manual_seed(5)
    noise = torch.rand(6, 4).double() + torch.randn(6, 4).double()
    expected = network_truth(plain, F.cross_entropy, (x.double() * (1 + noise), y))
    torch.manual_seed(5)
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), expected) < 1e-14


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_cast_copies_is_written_to(own):
    """In a model in float32 it copies nothing, so that what is cast is written to as well."""

    class Doubled(nn.Linear):
        def forward(self, x):
            h = F.linear(x, self.weight, self.bias)
            y = h.to(torch.float32)
            y.mul_(2)
            return h + y

    torch.manual_seed(6)
    model, x, y = nn.Sequential(Doubled(4, 3)).to(own), torch.randn(6, 4), torch.arange(6) % 3
    factor = 4 if own is torch.float32 else 3
    with torch.no_grad():
        plain = F.linear(x.to(own), model[0].weight, model[0].bias)
        torch.testing.assert_close(model(x.to(own)).double(), factor * plain.double(), rtol=0.02, atol=0.02)

    def scaled(output, target):
        return F.cross_entropy(factor * output, target)

    linear = nn.Linear(4, 3).double()
    linear.load_state_dict(model[0].state_dict())
    expected = network_truth(linear, scaled, (x.double(), y))
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), expected) < 1e-14


def test_bits_are_not_taken_for_numbers():
    class Bits(nn.Linear):
        def forward(self, x):
            ones = torch.full((x.shape[1],), 0x3F800000, dtype=torch.int32).view(torch.float32)
            return F.linear(x * ones, self.weight, self.bias)

    model, x, y = nn.Sequential(Bits(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    expected = network_truth(copy.deepcopy(model).double(), F.cross_entropy, (x.double(), y))
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), expected) < 1e-14


def test_float32_tensors_that_the_model_keeps_meet_float64():
    """Products and stacks of two types fail in torch; what is written to stays of its type."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mixing = nn.Linear(4, 3), CONSTANT.clone()

        def forward(self, x):
            x = F.linear(x @ self.mixing, self.mixing) + torch.addmm(x, x, self.mixing)
            x = x.clone().index_add_(0, torch.tensor([0]), self.mixing[:1])
            return self.layer(torch.tanh(x))

    torch.manual_seed(2)
    model, x, y = Kept(), torch.randn(6, 4), torch.arange(6) % 3
    reference = copy.deepcopy(model).double()
    reference.mixing = reference.mixing.double()
    expected = network_truth(reference, F.cross_entropy, (x.double(), y))
    assert distance(hesscond.HessianOperator(model, F.cross_entropy, (x, y)).to_dense(), expected) < 1e-14
    assert model.mixing.dtype is torch.float32


def test_an_error_that_has_nothing_to_do_with_types_is_the_users():
    model = nn.Sequential(nn.Linear(4, 3))
    state = {key: tensor.detach().double() for key, tensor in tensors_by_module(model).items()}
    for bad in (torch.zeros(6, 5), torch.zeros(6, 5, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="shapes"):
            evaluate(model, F.cross_entropy, (bad, bad), state, dtype=torch.float64, watch=WeightWatch({}), copies={})


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_rounded_weights_do_not_hide_the_rounding_of_what_follows(level):
    """Straight-through weights absorb a perturbation of an eps, and not the rounding of the operations behind them."""

    class Quantized(nn.Linear):
        def forward(self, x):
            rounded = torch.round(self.weight * 8) / 8
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    torch.manual_seed(0)
    model, x, y = nn.Sequential(Quantized(3, 4), nn.ReLU(), Quantized(4, 2)), torch.randn(6, 3), torch.randn(6, 2)
    coarse = hesscond.probe(model, F.mse_loss, (x, y), ["0"], level=level, dtype=None)["0"]
    exact = hesscond.probe(model, F.mse_loss, (x, y), ["0"], level=level)["0"]
    for kappa, true in zip(coarse.conditions, exact.conditions, strict=True):
        assert kappa.rank <= true.rank
        assert kappa.lower <= true.upper
        assert not kappa.resolved or kappa.upper >= true.lower

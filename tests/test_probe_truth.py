"""Every case, at every level, against the dense Hessian of automatic differentiation."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from tests.agreement import every_block_agrees, probed
from tests.catalogue import CASES, case
from tests.catalogue.cases import split
from tests.catalogue.parts import Net
from tests.truth import (
    block,
    case_truth,
    eligible_layers,
    layer_truth,
    packed,
    reverse_over_reverse,
    unit_truth,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

EVERY = [pytest.param(c, id=c.name) for c in CASES]


# ------------------------------------------------------------------------------------------------ the truth itself


@pytest.mark.parametrize(
    "name",
    [
        "relu-ce", "float32-ce-weighted", "one-layer", "gated", "dict-output", "repeated-tanh", "train-batchnorm-conv",
        "info-nce", "attention-sdpa", "conv2d-depthwise", "transposed1d-dilation-tanh", "transposed3d-groups",
    ],
)  # fmt: skip
def test_two_ways_to_the_truth_agree(name):
    example = case(name)
    model, loss_fn, batch = example.make()
    random_state = torch.get_rng_state()
    for name, whole in case_truth(example)[0].items():
        norm = whole.norm()
        other = layer_truth(model, loss_fn, batch, name, derivative=reverse_over_reverse)
        assert (whole - other).norm() <= 1e-13 * norm
        assert (whole - whole.T).norm() <= 1e-13 * norm
        size = packed(eligible_layers(model)[name]).shape[1]
        unit = len(whole) // size - 1
        assert (block(whole, size, unit) - unit_truth(model, loss_fn, batch, name, unit)).norm() <= 1e-13 * norm
        assert (norm == 0) == (name in example.flat)
    assert torch.equal(torch.get_rng_state(), random_state)


# ---------------------------------------------------------------------------------------------------------- engine


@pytest.mark.share(12)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.share(8)])])
@pytest.mark.parametrize("example", EVERY)
def test_every_block_is_the_dense_hessian(example, seed, level, device):
    every_block_agrees(example, seed, level, device)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_unresolved_is_rare_on_the_cases(level):
    resolved = {
        (c.name, row.layer, row.unit): row.resolved
        for c in CASES
        for row in probed(c, 0, level, "cpu").to_frame().itertuples()
        if row.rank
    }
    unresolved = [key for key, value in resolved.items() if not value]
    assert np.mean(list(resolved.values())) > 0.98, unresolved


# --------------------------------------------------------------------------------------------- masks of attention


def masked(fill, fused, size):
    """Causal attention whose mask is added to the scores, by hand or by torch's own function, and data."""

    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, 2)
        q = size * q
        mask = torch.full((3, 3), fill, dtype=x.dtype).triu(1)
        if fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = (q @ k.mT / 2 + mask).softmax(-1) @ v
        return m.out(y).transpose(1, 2)

    torch.manual_seed(0)
    model = Net(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 3)).double()
    return model, (torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(0, 3, (2, 3)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_behind_an_added_mask_the_rank_is_known(fused, fill):
    model, batch = masked(fill, fused, 1.0)
    found = hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["qkv"], "layer")["qkv"].kappa
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        truth = layer_truth(model, nn.CrossEntropyLoss(), batch, "qkv", derivative=reverse_over_reverse)
    values = torch.linalg.eigvalsh(truth)
    sizes = values.abs().sort(descending=True).values
    rank = int((sizes > 1e-12 * sizes[0]).sum())
    assert (found.resolved, found.rank) == (True, rank)
    assert 0 < rank < 60
    assert found.lower <= float(sizes[0] / sizes[rank - 1]) * (1 + 1e-9)
    assert float(sizes[0] / sizes[rank - 1]) * (1 - 1e-9) <= found.upper
    assert found.negative == int((values < -1e-12 * sizes[0]).sum())


@pytest.mark.parametrize("fused", [False, True])
def test_scores_that_saturate_behind_a_mask_leave_it_open(fused):
    model, batch = masked(-math.inf, fused, 3000.0)
    assert not hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["qkv"], "layer")["qkv"].kappa.resolved


@pytest.mark.parametrize("parts", [[30], [11, 19]])
@pytest.mark.parametrize("seed", [1, 10, 13])
def test_layers_behind_units_that_few_samples_reach_have_their_rank(seed, parts):
    """Null vectors that touch small entries alone: their computed values may exceed the round-off of these."""
    torch.manual_seed(seed)
    hidden = [module for _ in range(2) for module in (nn.Linear(6, 6), nn.ReLU())]
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), *hidden, nn.Linear(6, 3))
    batch = torch.randn(30, 6), torch.randint(3, (30,))
    result = hesscond.probe(model, nn.CrossEntropyLoss(), split(batch, parts), ["2"], "layer")["2"]
    model, exact = model.double(), (batch[0].double(), batch[1])
    values = torch.linalg.eigvalsh(layer_truth(model, nn.CrossEntropyLoss(), exact, "2"))
    rank = int((values > 1e-13 * values[-1]).sum())
    assert rank < 42
    assert values[-rank - 1] < 1e-15 * values[-1]
    assert (result.kappa.resolved, result.kappa.rank, result.kappa.rank_decision) == (True, rank, "numerical")
    assert result.kappa.value == pytest.approx(float(values[-1] / values[-rank]), rel=1e-6)

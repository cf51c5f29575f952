"""How block diagonal a Hessian is: exact numbers against a dense double backward, estimates within their errors.

The truth is `torch.autograd.functional.hessian`: of torch.nn.functional.layer_norm `torch.func.hessian` gives wrong
derivatives in its weight and its inputs together (torch 2.13; finite differences agree with the former to 1e-9).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscond
from hesscond.errors import ConfigError
from hesscond.operators import Dense
from hesscond.probing import structure
from hesscond.probing.structure import BlockStructure, measured
from tests.cases import OTHERS, Case
from tests.test_probe_blocks import places, whole_truth

Parts = list[tuple[str, slice | int | tuple[slice, int]]]


class Tokens(nn.Module):
    """A bare parameter, a norm, a layer that is called twice, one without bias, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.3 * torch.randn(3, 4))
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(4, 3, bias=False))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x + self.positions)
        h = self.frozen(self.mix(torch.tanh(self.mix(h))))
        return self.head(h).mean(1)


def tokens():
    torch.manual_seed(0)
    return Tokens().double(), nn.CrossEntropyLoss(), (torch.randn(6, 3, 4).double(), torch.randint(0, 3, (6,)))


def pictures():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return model.double(), nn.CrossEntropyLoss(), (torch.randn(5, 2, 3, 3).double(), torch.randint(0, 3, (5,)))


class Attending(nn.Module):
    """Token rows that do not all occur, a norm, packed attention, and a transposed convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up = nn.ConvTranspose1d(4, 4, 2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embedding(x))
        h = h + self.attn(h, h, h, need_weights=False)[0]
        return self.up(torch.tanh(h).transpose(1, 2)).mean(2)


def sentences():
    torch.manual_seed(2)
    model = Attending().double()
    nn.init.normal_(model.attn.in_proj_bias)
    return model, nn.CrossEntropyLoss(), (torch.tensor([[0, 1, 4], [1, 1, 3], [3, 0, 0]]), torch.tensor([0, 3, 1]))


def packed(first: int, last: int) -> list[Parts]:
    return [[("attn.in_proj_bias", i), ("attn.in_proj_weight", i)] for i in range(first, last)]


#: Of each model, by layer, the rows: parameters, and which leading index of each.
ROWS: dict[str, dict[str, list[Parts]]] = {
    "tokens": {
        "positions": [[("positions", i)] for i in range(3)],
        "norm": [[("norm.bias", i), ("norm.weight", i)] for i in range(4)],
        "mix": [[("mix.bias", i), ("mix.weight", i)] for i in range(4)],
        "head.1": [[("head.1.weight", i)] for i in range(3)],
    },
    "pictures": {
        "0": [[("0.bias", i), ("0.weight", i)] for i in range(4)],
        "3": [[("3.bias", i), ("3.weight", i)] for i in range(3)],
    },
    "sentences": {
        "embedding": [[("embedding.weight", i)] for i in range(6)],
        "norm": [[("norm.bias", i), ("norm.weight", i)] for i in range(4)],
        "attn[q]": packed(0, 4),
        "attn[k]": packed(4, 8),
        "attn[v]": packed(8, 12),
        "attn.out_proj": [[("attn.out_proj.bias", i), ("attn.out_proj.weight", i)] for i in range(4)],
        "up": [[("up.bias", i), ("up.weight", (slice(i // 2 * 2, i // 2 * 2 + 2), i % 2))] for i in range(4)],
    },
}
CASES = {"tokens": tokens, "pictures": pictures, "sentences": sentences}
#: The units of a layer where they are not numbered from 0, or not all there.
UNITS = {"embedding": [0, 1, 3, 4], "attn[k]": range(4, 8), "attn[v]": range(8, 12)}


def truth(name: str) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """The dense Hessian, and by layer the indices of its rows."""
    model, loss_fn, (inputs, targets) = CASES[name]()
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    sizes = [shape.numel() for shape in shapes.values()]
    start = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = zip(shapes.items(), flat.split(sizes), strict=True)
        return loss_fn(functional_call(model, {name: v.view(shape) for (name, shape), v in parts}, inputs), targets)

    numbers = dict(zip(shapes, torch.arange(sum(sizes)).split(sizes), strict=True))
    places = {name: own.view(shapes[name]) for name, own in numbers.items()}
    rows = {
        layer: [torch.cat([places[p][i].flatten() for p, i in row]) for row in own] for layer, own in ROWS[name].items()
    }
    with sdpa_kernel(SDPBackend.MATH):
        return hessian(loss, start), rows


def blocks_of(rows: dict[str, list[torch.Tensor]], by: str) -> list[torch.Tensor]:
    return [b for own in rows.values() for b in ([torch.cat(own)] if by == "layer" else own)]


def share(H: torch.Tensor, blocks: list[torch.Tensor]) -> float:
    inside = torch.cat(blocks)
    return float(sum(H[b][:, b].square().sum() for b in blocks) / H[inside][:, inside].square().sum())


@pytest.mark.share(2)
@pytest.mark.parametrize("by", ["layer", "row"])
@pytest.mark.parametrize("name", CASES)
def test_norms_traces_and_shares_are_those_of_the_dense_hessian(name: str, by: str) -> None:
    H, rows = truth(name)
    if by == "row" and name == "sentences":
        absent = torch.cat([rows["embedding"].pop(token) for token in (5, 2)])
        assert not H[absent].any()
    blocks = blocks_of(rows, by)
    found = hesscond.block_structure(*CASES[name](), by=by)
    norms = torch.stack([torch.stack([H[a][:, b].norm() for b in blocks]) for a in blocks])
    assert torch.allclose(found.norms.value, norms, rtol=1e-10, atol=1e-10 * float(norms.max()))
    assert torch.allclose(found.trace.value, torch.stack([H[a, a].sum() for a in blocks]), rtol=1e-10, atol=1e-12)
    assert found.n_params == tuple(map(len, blocks))
    assert found.share.value == pytest.approx(share(H, blocks), rel=1e-10)
    assert not found.norms.error.any()
    assert found.share.error == 0
    assert found.norms.products == sum(map(len, blocks))
    assert found.check is not None
    several = [f"{layer}[{i}]" for layer, own in rows.items() for i in UNITS.get(layer, range(len(own)))]
    assert found.names == tuple(rows if by == "layer" else several)


def test_a_part_of_the_model_is_a_principal_submatrix() -> None:
    H, rows = truth("tokens")
    found = hesscond.block_structure(*tokens(), ["mix", "head.*"], "row")
    blocks = rows["mix"] + rows["head.1"]
    assert found.layers == ("mix",) * 4 + ("head.1",) * 3
    assert found.share.value == pytest.approx(share(H, blocks), rel=1e-10)
    frame = found.to_frame()
    for number, own in enumerate(blocks):
        others = torch.cat([b for b in blocks if b is not own])
        assert frame["norm_others"][number] == pytest.approx(float(H[own][:, others].norm()), rel=1e-10)
        assert frame["norm"][number] == pytest.approx(float(H[own][:, own].norm()), rel=1e-10)
        assert frame["trace"][number] == pytest.approx(float(H[own, own].sum()), rel=1e-9)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("layers", "by", "expected"),
    [
        (["attn[k.1]", "norm.weight"], "layer", [[*packed(6, 8)], [[("norm.weight", slice(None))]]]),
        ("*[q]", "row", [[row] for row in packed(0, 4)]),
        ("embedding[1:4]", "row", [[[("embedding.weight", 1)]], [[("embedding.weight", 3)]]]),
        (
            "attn.in_proj_*",
            "layer",
            [[[("attn.in_proj_weight", slice(None))]], [[("attn.in_proj_bias", slice(None))]]],
        ),
    ],
)
def test_parts_and_parameters_are_named_as_for_a_probe(layers: list[str] | str, by: str, expected: list) -> None:
    H, _ = truth("sentences")
    model = sentences()[0]
    numbers, start = {}, 0
    for name, p in model.named_parameters():
        numbers[name] = torch.arange(start, start := start + p.numel()).view(p.shape)
    blocks = [torch.cat([numbers[p][i].flatten() for row in block for p, i in row]) for block in expected]
    found = hesscond.block_structure(*sentences(), layers, by)
    norms = torch.stack([torch.stack([H[a][:, b].norm() for b in blocks]) for a in blocks])
    assert torch.allclose(found.norms.value, norms, rtol=1e-10, atol=1e-12)


#: Seconds each, and of kinds that others have too; as probes they are in the tests of blocks.
LARGE = (
    "gru-bidirectional-two-layers", "lstm-bidirectional", "lstm-two-layers", "gpt2-conv1d", "bert", "vit",
)  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "other",
    [pytest.param(own, id=own.name, marks=[pytest.mark.slow] * (own.name in LARGE)) for own in OTHERS],
)
def test_rows_of_blocks_of_every_kind_are_the_whole_hessian(other: Case) -> None:
    model, loss_fn, batch = other.make()
    found = hesscond.block_structure(model, loss_fn, batch, by="row")
    place = places(model)
    numbers = torch.cat([place[name].flatten() for name, p in model.named_parameters() if p.requires_grad])
    H = whole_truth(other.name)[numbers][:, numbers]
    assert float(found.norms.value.square().sum().sqrt()) == pytest.approx(float(H.norm()), rel=1e-10)
    assert float(found.trace.value.sum()) == pytest.approx(
        float(H.trace()), abs=1e-10 * float(H.diagonal().abs().sum())
    )
    # rows of tables that nothing looks up
    zero = int((H == 0).all(0).sum())
    assert len(H) - zero <= sum(found.n_params) <= len(H)


def test_what_requires_no_gradient_is_left_out() -> None:
    model, loss_fn, batch = tokens()
    model.mix.weight.requires_grad_(False)
    found = hesscond.block_structure(model, loss_fn, batch)
    assert dict(zip(found.names, found.n_params, strict=True)) == {"positions": 12, "norm": 8, "mix": 4, "head.1": 12}


@pytest.mark.share(2)
@pytest.mark.parametrize("by", ["layer", "row"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_estimates_are_within_four_standard_errors(by: str, seed: int) -> None:
    exact = hesscond.block_structure(*tokens(), by=by)
    found = hesscond.block_structure(*tokens(), by=by, probes=4, seed=seed, check=False)
    assert found.norms.products == sum(min(4, size) for size in found.n_params) < exact.norms.products
    # of four probes the spread is only known roughly: Student's t with 3 degrees of freedom has wide tails
    found = hesscond.block_structure(*tokens(), by=by, probes=11, seed=seed, check=False)
    off = (found.norms.value**2 - exact.norms.value**2).abs()
    allowed = 4 * 2 * found.norms.value * found.norms.error
    assert bool((off <= allowed + 1e-12).all())
    assert bool(((found.trace.value - exact.trace.value).abs() <= 4 * found.trace.error + 1e-12).all())
    assert abs(found.share.value - exact.share.value) <= 4 * found.share.error + 1e-12
    assert found.check is None


def prescribed(sizes: list[int], coupling: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(sum(sizes), sum(sizes), generator=generator, dtype=torch.float64)
    blocks = list(torch.randperm(len(A), generator=generator).split(sizes))
    mask = torch.full_like(A, coupling)
    for block in blocks:
        mask[block[:, None], block] = 1.0
    return (A + A.T) * mask, blocks


def of_matrix(A: torch.Tensor, blocks: list[torch.Tensor], *probes: int, seed: int = 0) -> BlockStructure:
    """The structure of a matrix, the first half of whose blocks are one layer and the others another."""
    half = (len(blocks) + 1) // 2
    layers = {"a": blocks[:half], "b": blocks[half:]}
    rows = {layer: {f"{layer}{i}": block for i, block in enumerate(own)} for layer, own in layers.items()}
    return measured(Dense(A), rows, probes[0] if probes else None, seed, None)


def test_errors_are_as_large_as_they_say_and_nothing_is_biased() -> None:
    A, blocks = prescribed([30, 25, 3, 20], 0.3)
    exact = of_matrix(A, blocks)
    names = {
        "trace": lambda one: (one.trace.value, one.trace.error),
        "squares": lambda one: (one.norms.value**2, 2 * one.norms.value * one.norms.error),
        "share": lambda one: (one.share.value, one.share.error),
    }
    runs = [of_matrix(A, blocks, 15, seed=seed) for seed in range(300)]
    for name, of in names.items():
        off = torch.stack([torch.as_tensor(of(run)[0]) - torch.as_tensor(of(exact)[0]) for run in runs])
        error = torch.stack([torch.as_tensor(of(run)[1]) for run in runs])
        estimated = error[0] > 0
        inside = (off.abs() <= error)[:, estimated].double().mean()
        # 15 probes: Student's t with 14 degrees of freedom has 0.666 within one error
        assert 0.62 <= float(inside) <= 0.74, name
        bias = off.mean(0)[estimated] / (off.std(0)[estimated] / math.sqrt(len(runs)))
        assert float(bias.square().mean()) <= 4.0, name
        assert float(off[:, ~estimated].abs().max() if bool((~estimated).any()) else 0) <= 1e-10
    # the block of 3 rows is exact, and with it all norms that it has a part in
    assert not runs[0].norms.error[2].any()
    assert not runs[0].norms.error[:, 2].any()
    assert runs[0].norms.products == 15 + 15 + 3 + 15


def test_the_sum_of_the_norms_is_what_the_shares_are_of() -> None:
    A, blocks = prescribed([30, 25, 3, 20], 0.3)
    found = of_matrix(A, blocks, 7)
    squares = found.norms.value**2
    assert torch.equal(squares, squares.T)
    assert found.share.value == pytest.approx(float(squares.trace() / squares.sum()), rel=1e-12)


def test_scale_and_order_of_the_blocks_change_nothing() -> None:
    A, blocks = prescribed([10, 5], 0.5)
    one = of_matrix(A, blocks)
    for factor in (2.0**-100, -(2.0**100)):
        other = of_matrix(A * factor, blocks)
        assert other.share.value == pytest.approx(one.share.value, rel=1e-12)
        assert torch.allclose(other.norms.value, one.norms.value * abs(factor), rtol=1e-12)
    turned = of_matrix(A, blocks[::-1])
    assert torch.allclose(turned.norms.value.flip(0, 1), one.norms.value, rtol=1e-12)
    assert math.isnan(of_matrix(torch.zeros(15, 15), blocks).share.value)
    diagonal = of_matrix(prescribed([10, 5], 0.0)[0], blocks, 4)
    assert diagonal.share.value == 1.0
    assert diagonal.share.error == 0.0


def test_large_models_are_estimated_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "EXACT", 20)
    monkeypatch.setattr(structure, "PROBES", 5)
    found = hesscond.block_structure(*tokens(), check=False)
    assert found.norms.probes == 5
    assert found.norms.products == 20
    assert not hesscond.block_structure(*tokens(), probes=1000, check=False).norms.error.any()


def test_the_model_is_left_as_it_was() -> None:
    model, loss_fn, batch = tokens()
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    hesscond.block_structure(model, loss_fn, batch, probes=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"by": "unit"}, "unknown partition 'unit': use 'layer' or 'row'"),
        ({"layers": "mixx"}, "no layer 'mixx' to probe in the model: it has mix, head.1, frozen"),
        ({"layers": ["mix", "block*"]}, "no layer or parameter of the model matches 'block\\*'"),
        ({"layers": []}, "no layer was named"),
        ({"layers": "mix[q]"}, "'mix' has no part \\[q\\]"),
        ({"layers": ["mix", "mix.weight"]}, "'mix.weight' is in 'mix' and in 'mix.weight'"),
        ({"layers": "frozen"}, "parameter 'frozen.bias' requires no gradient"),
        ({"probes": 1}, "at least 2 probes"),
    ],
)
def test_what_cannot_be_is_one_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        hesscond.block_structure(*tokens(), **options)
    assert "\n" not in str(raised.value)

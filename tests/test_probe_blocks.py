"""Every parameter has a block: embeddings, normalizations, packed attention, recurrent gates, bare parameters."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hesscond
from hesscond.capture import separators
from hesscond.errors import CaptureError, ConfigError
from hesscond.hessians import Jacobi, OptimalDiagonal as Optimal, role
from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.roles import Role
from hesscond.methods import parse
from tests.catalogue import BLOCKS, CATALOGUE, case
from tests.catalogue.blocks import AddLowRank, Conv1D, Piped
from tests.catalogue.cases import split
from tests.catalogue.parts import CE, Net
from tests.catalogue.truths import Truth
from tests.catalogue.units import GROUP as STORED, Transposed

ids = pytest.mark.parametrize("other_case", BLOCKS, ids=lambda c: c.name)


@functools.cache
def whole_truth(name):
    """The Hessian in all parameters of a case."""
    return Truth(*case(name).make())


def is_transposed(model, key):
    if key in ("p2", "middle.scales.1"):  # h @ p
        return True
    return isinstance(model.get_submodule(key.rpartition(".")[0].partition(".parametrizations")[0]), Conv1D)


def rows_of(model, key, place, count):
    """The entries of a parameter by natural rows: (rows, width); None: its rows are not those of ``count`` units."""
    module = model.get_submodule(key.rpartition(".")[0].partition(".parametrizations")[0])
    if isinstance(module, nn.LayerNorm):
        place = place.flatten()
    elif is_transposed(model, key) and place.ndim == 2:
        place = place.T
    elif place.ndim > 2 and place.shape[0] == 1:
        place = place.squeeze(0)
        place = place.squeeze(0) if place.ndim > 2 and place.shape[0] == 1 else place
    place = place.reshape(1, 1) if not place.ndim else place.flatten(1) if place.ndim > 1 else place[:, None]
    return place if count in (None, len(place)) else None


def part_of(name, key, rows, E=4):
    """The rows of a parameter that the part of a name is: those of torch's packed attention."""
    letter = name.rpartition("[")[2][:1] if name.endswith("]") else ""
    if letter in ("q", "k", "v") and len(rows) == 3 * E:
        return rows["qkv".index(letter) * E :][:E], "qkv".index(letter) * E
    return rows, 0


def compare(found, expected):
    scale = max(float(expected.abs().max()), 1e-30)
    assert float((found - expected).abs().max()) <= 1e-10 * max(scale, 1e-3)


@pytest.mark.share(10)
@ids
def test_every_unit_and_layer_of_every_block_is_that_of_the_dense_hessian(other_case):
    model, loss_fn, batch = other_case.make()
    truth = whole_truth(other_case.name)
    place = truth.index
    trained = {key for key, p in model.named_parameters() if p.requires_grad}

    layers = hesscond.probe(model, loss_fn, batch, "*", "layer")
    assert layers.skipped == {}
    seen = []
    for name, result in layers.items():
        assert result.check is not None
        assert result.check.passed
        parts = {key: part_of(name, key, rows_of(model, key, place[key], None))[0] for key in result.parameters}
        # a part keeps the order of its tensor, in which the rows of Conv1D are columns
        parts = {key: part.T if is_transposed(model, key) else part for key, part in parts.items()}
        index = torch.cat([(part if "[" in name else place[key]).flatten() for key, part in parts.items()])
        if isinstance(Catalogue(model).block(name).layer, nn.Module):
            # captured layers come unit by unit, [bias, weight]
            ordered = [place[key].flatten(1) if place[key].ndim > 1 else place[key][:, None] for key in
                       sorted(result.parameters, key=lambda key: not key.endswith("bias"))]  # fmt: skip
            index = torch.cat(ordered, 1).flatten()
        compare(result.hessian(), truth.at(index))
        seen.append(index)
        if result.kappa.resolved:
            values = torch.linalg.eigvalsh(truth.at(index)).abs()
            assert result.kappa.lambda_max == pytest.approx(float(values.max()), rel=1e-8)
    covered = torch.cat(seen)
    assert len(covered.unique()) == len(covered)
    assert set(covered.tolist()) >= {int(i) for key in trained for i in place[key].flatten()}

    units = hesscond.probe(model, loss_fn, batch, "*", "unit")
    seen = []
    for name, result in units.items():
        assert result.check.passed
        for unit in result.units:
            index = unit_entries(model, name, result, unit, place)
            compare(result.hessian(unit), truth.at(index))
            seen.append(index)
    covered = torch.cat(seen)
    assert len(covered.unique()) == len(covered)
    missing = {int(i) for key in trained for i in place[key].flatten()} - set(covered.tolist())
    # only rows of tables that are not looked up
    assert all(float(truth.matrix[i].abs().max()) == 0 for i in missing)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("name", "streamed"),
    [
        ("embedding-padded", True),
        ("attention-packed", True),
        ("lstm", False),
        ("batchnorm-train", False),
        *(
            pytest.param(name, streamed, marks=pytest.mark.slow)
            for name, streamed in [
                ("gpt2-by-hand", True),
                ("gpt2-conv1d", False),
                ("embedding-tied", False),
                ("bert-by-hand", False),
                ("vit-by-hand", False),
            ]
        ),
    ],
)
def test_every_unit_behind_a_cut_is_that_of_the_dense_hessian(name, streamed, monkeypatch):
    monkeypatch.setattr(separators, "WORTHWHILE", 0.0)
    monkeypatch.setattr(separators, "GAIN", 0.0)
    model, loss_fn, batch = made(name)
    truth = whole_truth(name)
    place = truth.index
    data = split(batch, [2, len(batch[1]) - 2]) if streamed else batch
    found = hesscond.probe(model, loss_fn, data, "*", "unit")
    assert any("behind" in result.route for result in found.values())
    for block, result in found.items():
        assert result.check.passed
        for unit, kappa in zip(result.units, result.kappa, strict=True):
            index = unit_entries(model, block, result, unit, place)
            own = truth.at(index)
            compare(result.hessian(unit), own)
            values = torch.linalg.eigvalsh(own).abs()
            nonzero = values[values > 1e-10 * values.max()]
            if kappa.resolved and "behind" in result.route and len(nonzero) == kappa.rank:
                expected = float(nonzero.max() / nonzero.min())
                assert kappa.lower * (1 - 1e-6) <= expected <= kappa.upper * (1 + 1e-6)


def test_what_a_product_does_not_confirm_is_measured_by_products(monkeypatch):
    monkeypatch.setattr(separators, "WORTHWHILE", 0.0)
    monkeypatch.setattr(separators, "GAIN", 0.0)
    between, times = separators.Separator.between, separators.Separator.times
    monkeypatch.setattr(separators.Separator, "between", lambda self, *own: 1.001 * between(self, *own))
    monkeypatch.setattr(separators.Separator, "times", lambda self, images: 1.001 * times(self, images))
    model, loss_fn, batch = made("embedding-padded")
    truth = whole_truth("embedding-padded")
    place = truth.index
    result = hesscond.probe(model, loss_fn, batch, ["first"])["first"]
    assert "behind" not in result.route
    for unit in result.units:
        index = unit_entries(model, "first", result, unit, place)
        compare(result.hessian(unit), truth.at(index))


@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"padding_idx": 1}])
def test_what_changes_the_gradient_of_a_lookup_does_not_change_its_hessian(options, level):
    torch.manual_seed(0)
    model = Piped(nn.Linear(4, 4), first=nn.Embedding(6, 4, **options)).double()
    plain = Piped(nn.Linear(4, 4), first=nn.Embedding(6, 4, padding_idx=options.get("padding_idx"))).double()
    plain.load_state_dict(model.state_dict())
    batch = torch.tensor([[2, 3, 2], [1, 2, 5]]), torch.tensor([0, 2])
    found, expected = (hesscond.probe(own, CE, batch, ["first"], level)["first"] for own in (model, plain))
    assert found.check.passed
    for unit in found.units or [None]:
        torch.testing.assert_close(found.hessian(unit), expected.hessian(unit), atol=1e-14, rtol=1e-12)
    truth = Truth(plain, CE, batch)
    own = found.hessian(2) if level == "unit" else found.hessian()[8:12, 8:12]
    compare(own, truth.at(truth.index["first.weight"][2]))


def test_rows_of_bounded_norm_are_differentiated_where_they_are_looked_up():
    torch.manual_seed(0)
    model = Piped(nn.Linear(4, 4), first=nn.Embedding(6, 4, max_norm=0.5)).double()
    before, x, y = model.first.weight.detach().clone(), torch.tensor([[2, 3, 2], [1, 2, 5]]), torch.tensor([0, 2])
    found = hesscond.probe(model, CE, (x, y), ["first"], units=[2])["first"]
    assert torch.equal(model.first.weight, before)
    model.first.weight.data = before * (0.5 / (before.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1)
    model.first.max_norm = None
    truth = Truth(model, CE, (x, y))
    compare(found.hessian(2), truth.at(truth.index["first.weight"][2]))


def unit_entries(model, name, result, unit, place):
    found = []
    for key in sorted(result.parameters, key=lambda key: "bias" not in key.rpartition(".")[2]):
        rows = rows_of(model, key, place[key], None)
        own, first = part_of(name, key, rows)
        # parts of a packed parameter count their units as it does
        number = unit - (first if len(own) < len(rows) else "qkv".find(name[-2]) * 4 if "_proj_weight" in key else 0)
        if len(own) in (len(Catalogue(model).block(name).units), len(result.units), 4 if "[" in name else -1):
            found.append(own[number])
    return torch.cat(found)


def made(name="gpt2-conv1d"):
    return case(name).make()


GPT2, GPT2_LOSS, GPT2_BATCH = made()


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.mlp.*", ["h.0.mlp.0", "h.0.mlp.2"]),
        ("*.ln_?", ["h.0.ln_1", "h.0.ln_2"]),
        ("*.c_attn", ["h.0.attn.c_attn[q]", "h.0.attn.c_attn[k]", "h.0.attn.c_attn[v]"]),
        ("*c_attn[q]", ["h.0.attn.c_attn[q]"]),
        ("*.weight[k.1]", ["h.0.attn.c_attn.weight[k.1]"]),
        ("h.*.bias", ["h.0.ln_1.bias", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.bias", "h.0.ln_2.bias",
                      "h.0.mlp.0.bias", "h.0.mlp.2.bias"]),
        ("h.?", ["h.0"]),
        ("[lw]*e", ["wte", "wpe"]),
    ],
)  # fmt: skip
def test_globs_take_modules_parameters_and_parts(pattern, names):
    assert list(Catalogue(GPT2).matching(pattern)) == names


def test_globs_leave_out_what_is_frozen_unless_there_is_nothing_else():
    model, loss_fn, batch = made("lora-module")
    assert list(Catalogue(model).matching("*")) == ["first", "middle.lora_A", "middle.lora_B", "head"]
    model.requires_grad_(False)
    assert list(hesscond.probe(model, loss_fn, batch, "*", "layer")) == ["first", "middle", "head"]


def test_a_tied_weight_is_one_block_under_its_first_name():
    model, loss_fn, batch = made("embedding-tied")
    result = hesscond.probe(model, loss_fn, batch, "*", "layer")
    assert "lm_head" not in result
    assert result["wte"].parameters == ("wte.weight",)
    assert hesscond.probe(model, loss_fn, batch, ["lm_head.weight"], "layer")["lm_head.weight"].n_params == 24


def test_units_of_an_embedding_are_the_tokens_that_occur():
    model, loss_fn, (x, y) = made("embedding-padded")
    result = hesscond.probe(model, loss_fn, (x, y), ["first"])["first"]
    assert list(result.units) == sorted(set(x.flatten().tolist()) - {0})
    whole = hesscond.probe(model, loss_fn, (x, y), ["first"], "layer")["first"]
    assert whole.n_params == whole.kappa.rank + whole.kappa.nullity == model.first.weight.numel()
    values, vectors = whole.eigenvalues(), whole.eigenvectors()
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.T, whole.hessian(), atol=1e-10, rtol=0)


def test_a_large_vocabulary_takes_products_for_the_tokens_that_occur_only():
    torch.manual_seed(0)
    model = Piped(nn.Linear(4, 4), first=nn.Embedding(50_000, 4)).double()
    x, y = torch.tensor([[7, 49_999, 7], [11, 7, 11]]), torch.tensor([0, 2])
    result = hesscond.probe(model, CE, (x, y), ["first"], "layer")["first"]
    assert result.kappa.rank + result.kappa.nullity == 200_000
    assert result.kappa.nullity >= 200_000 - 12
    assert list(hesscond.probe(model, CE, (x, y), ["first"])["first"].units) == [7, 11, 49_999]
    with pytest.raises(CaptureError, match="200,000 parameters takes 320 GB"):
        result.hessian()


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["embedding-padded", "eval-batchnorm", "lstm", "attention-packed"])
def test_a_stream_has_the_hessian_of_the_whole(name):
    model, loss_fn, batch = made(name)
    whole = hesscond.probe(model, loss_fn, batch, "*", "layer")
    streamed = hesscond.probe(model, loss_fn, iter(split(batch, [2, 1, len(batch[1]) - 3])), "*", "layer")
    for key, result in whole.items():
        assert streamed[key].check.passed
        torch.testing.assert_close(streamed[key].hessian(), result.hessian(), atol=1e-12, rtol=1e-9)


def test_groups_have_one_hessian_each_at_any_level():
    truth = whole_truth("gpt2-conv1d")
    place = truth.index
    groups = {"norms": ["*.ln_?"], "mixed": ["h.0.attn.c_attn.weight[v]", "wpe"]}
    norms = [f"h.0.{norm}.{key}" for norm in ("ln_1", "ln_2") for key in ("bias", "weight")]
    index = torch.cat([place[key] for key in norms])
    for level in ("unit", "layer"):
        result = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, level=level, blocks=groups)
        assert list(result) == ["norms", "mixed"]
        compare(result["norms"].hessian(), truth.at(index))
        assert result.to_frame()["unit"].isna().all()
    mixed = torch.cat([place["h.0.attn.c_attn.weight"][:, 8:].flatten(), place["wpe.weight"].flatten()])
    compare(result["mixed"].hessian(), truth.at(mixed))
    both = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["ln_f"], blocks=groups)
    assert list(both) == ["ln_f", "norms", "mixed"]


def test_the_network_is_the_union_of_the_blocks():
    truth = whole_truth("gpt2-conv1d")
    place = truth.index
    result = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["ln_f", "h.0.mlp.2"], "network", blocks={"own": ["wte"]})
    keys = ["ln_f.bias", "ln_f.weight", "h.0.mlp.2.bias", "h.0.mlp.2.weight", "wte.weight"]
    index = torch.cat([place[key].flatten() for key in keys])
    compare(result["network"].hessian(), truth.at(index))
    assert list(result["network"].parts) == ["ln_f", "h.0.mlp.2", "own"]
    part = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["h.0.attn.c_attn[q]", "ln_f"], "network")["network"]
    rows = torch.cat([place["h.0.attn.c_attn.bias"][:4], place["h.0.attn.c_attn.weight"][:, :4].flatten(),
                      place["ln_f.bias"], place["ln_f.weight"]])  # fmt: skip
    compare(part.hessian(), truth.at(rows))
    everything = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, "*", "network")["network"]
    assert everything.n_params == sum(p.numel() for p in GPT2.parameters())


def test_heads_gates_and_ranges_are_rows():
    model, loss_fn, batch = made("lstm")
    truth = whole_truth("lstm")
    place = truth.index
    result = hesscond.probe(model, loss_fn, batch, ["middle[f]", "middle.weight_hh_l0[g]", "first[1:3]"], "layer")
    gate = [place[f"middle.{key}_l0"][3:6].flatten() for key in ("bias_ih", "bias_hh", "weight_ih", "weight_hh")]
    for name, index in [
        ("middle[f]", torch.cat(gate)),
        ("middle.weight_hh_l0[g]", place["middle.weight_hh_l0"][6:9].flatten()),
        ("first[1:3]", place["first.weight"][1:3].flatten()),
    ]:
        compare(result[name].hessian(), truth.at(index))
    model, loss_fn, batch = made("attention-packed")
    head = hesscond.probe(model, loss_fn, batch, ["middle.attention[k.1]"])["middle.attention[k.1]"]
    assert head.units == (6, 7)


@pytest.mark.share(2)
@pytest.mark.parametrize("level", ["unit", "layer"])
def test_jacobis_scaling_is_that_of_the_block(level):
    model, loss_fn, batch = made("lstm")
    plain = hesscond.probe(model, loss_fn, batch, ["middle"], level)["middle"]
    own = hesscond.probe(model, loss_fn, batch, ["middle"], level, Jacobi())["middle"]
    unit = 2 if level == "unit" else None
    H = plain.hessian(unit)
    d = H.diagonal().abs().rsqrt()
    torch.testing.assert_close(own.hessian(unit), d[:, None] * H * d)
    assert torch.linalg.eigvalsh(own.hessian(unit))[-1] == pytest.approx(float(own.eigenvalues(unit)[0]))


def test_adams_preconditioner_is_that_of_any_parameter():
    model, loss_fn, (x, y) = made("gpt2-conv1d")
    method = parse("adam").create(model)
    optimizer = method.optimizer(1e-3)
    loss_fn(model(x), y).backward()
    optimizer.step()
    result = hesscond.probe(model, loss_fn, (x, y), ["ln_f", "h.0.mlp.2"], "layer", method)
    plain = hesscond.probe(model, loss_fn, (x, y), ["ln_f", "h.0.mlp.2"], "layer")
    for name in ("ln_f", "h.0.mlp.2"):
        module = model.get_submodule(name)
        M = [1 / ((optimizer.state[p]["exp_avg_sq"] / 0.001).sqrt() + 1e-8) for p in (module.bias, module.weight)]
        d = torch.cat([m.flatten() for m in M]).sqrt()
        torch.testing.assert_close(result[name].hessian(), d[:, None] * plain[name].hessian() * d)


def test_coordinates_of_a_weight_are_refused_or_left_out():
    words = "coordinates of .*plain weight, and its own is no weight matrix"
    with pytest.raises(ConfigError, match=words):
        hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["ln_f"], method="bnp")
    result = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["ln_*", "lm_head"], "layer", "bnp")
    assert list(result) == ["lm_head"]
    assert "plain weight" in result.skipped["ln_f"]
    with pytest.raises(ConfigError, match="come as a factor"):
        _ = hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, ["ln_f"], "layer", Optimal())["ln_f"].kappa


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": "*.mpl.*"}, r"matches '\*.mpl.\*': the nearest names are .*mlp"),
        ({"layers": ["h.0.lm_1"]}, "no layer 'h.0.lm_1' to probe in the model"),
        ({"layers": ["ln_f.wieght"]}, "no layer 'ln_f.wieght' to probe"),
        ({"layers": ["ln_f[q]"]}, r"'ln_f' has no part \[q\]: it has ranges of rows, as \[0:4\]"),
        ({"layers": ["h.0.attn.c_attn[i]"]}, r"has no part \[i\]: it has \[q\], \[q.0\], \[q.1\], \[k\]"),
        ({"layers": ["h.0.attn.c_attn[q.2]"]}, r"no part \[q.2\]"),
        ({"layers": ["ln_f[2:9]"]}, "rows 0 to 4, not 2:9"),
        ({"layers": ["ln_f[3:3]"]}, "rows 0 to 4, not 3:3"),
        ({"layers": "*[q.7]"}, r"matches '\*\[q.7\]'"),
        ({"layers": []}, "no layer was named"),
        ({"layers": [3]}, "layers must be names, .* 3 is none"),
        ({"layers": 3}, "layers must be names, .* not int"),
        ({"dtype": torch.int32}, "dtype must be torch.float64, torch.float32 or None, not torch.int32"),
        ({"blocks": {}}, "no layer was named"),
        ({"blocks": ["ln_f"]}, r"blocks must be lists of names by name, .* not \['ln_f'\]"),
        ({"blocks": {"mine": []}}, "block 'mine' has no parameters"),
        ({"blocks": {"mine": ["nope.weight"]}}, "no layer 'nope.weight'"),
        ({"blocks": {"a": ["ln_f"], "b": ["ln_f.bias"]}}, "'ln_f.bias' is in block 'a' and in block 'b'"),
        ({"blocks": {"a": ["ln_f", "ln_f.bias"]}}, "block 'a' has 'ln_f.bias' twice, in 'ln_f' and in 'ln_f.bias'"),
        ({"blocks": {"a": ["h.0.attn.c_attn[q]", "h.0.attn.c_attn.weight[1:2]"]}}, "'h.0.attn.c_attn.weight' twice"),
        ({"layers": ["wte"], "blocks": {"wte": ["wpe"]}}, "block 'wte' is also the name of a layer"),
    ],
)  # fmt: skip
def test_names_that_are_none_are_refused_in_one_sentence(arguments, words, level):
    with pytest.raises(ConfigError, match=words) as caught:
        hesscond.probe(GPT2, GPT2_LOSS, GPT2_BATCH, level=level, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": ["frozen"]}, "parameter 'frozen' requires no gradient"),
        ({"blocks": {"mine": ["frozen", "inner"]}}, "block 'mine': parameter 'frozen' requires no gradient"),
        ({"layers": ["spare"]}, "does not depend .*spare"),
        ({"layers": ["inner", "spare.bias"], "blocks": {"m": ["inner.bias"]}}, "does not depend on parameter 'spare"),
        ({"blocks": {"mine": ["inner.weight", "spare.bias"]}}, "block 'mine' .*not depend on parameter 'spare.bias'"),
    ],
)
def test_parameters_without_a_gradient_are_refused_in_one_sentence(arguments, words):
    torch.manual_seed(0)
    batch = torch.randn(6, 5), torch.randint(0, 3, (6,))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model = Net(lambda m, x: m.inner(x) * m.frozen, inner=nn.Linear(5, 3), spare=nn.LayerNorm(3), frozen=frozen)
    with pytest.raises((ConfigError, CaptureError), match=words):
        hesscond.probe(model, CE, batch, level="layer", **arguments)
    result = hesscond.probe(model, CE, batch, "*", "layer")
    assert list(result) == ["inner"]
    assert "does not depend" in result.skipped["spare"]


@pytest.mark.parametrize(
    ("layers", "units", "words"),
    [
        (["first"], [8], "unit 8 of layer 'first' does not occur in the data"),
        (["first"], [9], "unit 9 is out of range: layer 'first' has units 0 to 8"),
        (["middle"], [4], "unit 4 is out of range"),
        (["first.weight"], [], "no unit was named"),
    ],
)
def test_units_that_are_none_are_refused_in_one_sentence(layers, units, words):
    model, loss_fn, batch = made("embedding-padded")
    with pytest.raises(ConfigError, match=words):
        hesscond.probe(model, loss_fn, batch, layers, units=units)


def test_several_layers_of_a_recurrence_have_units_of_their_own():
    model, loss_fn, batch = made("lstm-two-layers")
    with pytest.raises(ConfigError, match=r"units in each of middle\[l0\], middle\[l1\]: name these"):
        hesscond.probe(model, loss_fn, batch, ["middle"])
    assert hesscond.probe(model, loss_fn, batch, ["middle[l1.o]"])["middle[l1.o]"].units == (9, 10, 11)


def test_what_takes_too_many_products_is_left_out_or_refused(monkeypatch):
    model, loss_fn, batch = made("embedding-padded")
    monkeypatch.setattr("hesscond.probing.products.PRODUCTS", 10)
    with pytest.raises(ConfigError, match=r"'first' has 5 units, whose Hessians take 20 products \(up to 10"):
        hesscond.probe(model, loss_fn, batch, ["first"])
    assert hesscond.probe(model, loss_fn, batch, ["first"], units=[1, 2])["first"].units == (1, 2)
    result = hesscond.probe(model, loss_fn, batch, "*")
    assert "20 products" in result.skipped["first"]
    assert list(result) == ["middle", "head"]


@pytest.mark.parametrize(
    ("name", "block", "expected"),
    [
        ("gpt2-conv1d", "h.0.mlp.2.bias", Role("bias", 0)),
        ("gpt2-conv1d", "h.0.attn.c_attn.weight[k.1]", Role("key", 0)),
        ("bert-by-hand", "encoder.layers.0.self_attn", Role("query, key, value", 0)),
        ("vit-by-hand", "patches", Role("embedding", None)),
        ("lstm", "middle", Role("recurrent", None)),
        ("lstm", "middle.bias_hh_l0", Role("recurrent", None)),
        ("lstm", "head", Role("head", None)),
        ("embedding-padded", "middle", Role("dense", None)),
        ("embedding-padded", "first", Role("embedding", None)),
        ("bare-0d-1d-2d-3d", "p2", Role("other", None)),
    ],
)
def test_a_module_says_the_role_where_the_name_does_not(name, block, expected):
    model = case(name).make()[0]
    assert role(model, block) == expected
    with pytest.raises(ConfigError, match="no layer 'nowhere'"):
        role(model, "nowhere")


# units by what a weight does


def of_heads(x, W, b):
    return (torch.einsum("ni,hio->nho", x, W) + b).flatten(1)


def by_gates(x, W, U, b):
    h = x.new_zeros(len(x), 4)
    for _ in range(3):
        h = torch.tanh(x @ W + h @ U + b)
    return h


def by_edges(x, W, b):
    to, source = torch.arange(8) % 5, (3 * torch.arange(8)) % 7
    return torch.zeros_like(x[:, :1] @ W[:1]).index_add(0, to, (x @ W)[source]) + b


def by_relations(x, W, b):
    return torch.cat([x @ W[k] + b[k] for k in range(3)], 1)


SQUARE = {"W": (4, 4), "b": (4,)}
CONV = {"W": (4, 4, 2), "b": (4,)}
SPIKES = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
#: Shapes; what is computed; by parameter of a unit, the dimensions that number units.
COLUMNS = {"b": (0,), "W": (1,)}
ROWS = {"b": (0,), "W": (0,)}
USES = {
    "x W": (SQUARE, lambda x, W, b: x @ W + b, COLUMNS),
    "of tokens": (SQUARE, lambda x, W, b: (torch.stack([x, x.sin()], 1) @ W + b).flatten(1), COLUMNS),
    "heads": ({"W": (2, 4, 3), "b": (2, 3)}, of_heads, {"b": (0, 1), "W": (0, 2)}),
    "heads, flat bias": (
        {"W": (4, 2, 2), "b": (4,)},
        lambda x, W, b: torch.einsum("ni,iho->nho", x, W).flatten(1) + b,
        {"b": (0,), "W": (1, 2)},
    ),
    "relations": ({"W": (3, 4, 4), "b": (3, 4)}, by_relations, {"b": (0, 1), "W": (0, 2)}),
    "graph": (SQUARE, lambda x, W, b: x @ x.T @ (x @ W) + b, COLUMNS),
    "messages": (SQUARE, by_edges, COLUMNS),
    "recurrence": ({"W": (4, 4), "U": (4, 4), "b": (4,)}, by_gates, COLUMNS | {"U": (1,)}),
    "convolution": (CONV, lambda x, W, b: F.conv1d(x[:, :, None] * SPIKES, W, b).flatten(1), ROWS),
    "convolution, permuted": (
        CONV,
        lambda x, W, b: F.conv1d(x[:, :, None] * SPIKES, W.transpose(0, 1), b).flatten(1),
        COLUMNS,
    ),
    "transposed convolution": (
        CONV,
        lambda x, W, b: F.conv_transpose1d(x[:, :, None] * SPIKES, W, b).flatten(1),
        COLUMNS,
    ),
    "positive": (SQUARE, lambda x, W, b: x @ F.softplus(W) + b, COLUMNS),
    "masked": (SQUARE, lambda x, W, b: x @ (W * torch.eye(4).roll(1, 0).add(0.5)) + b, COLUMNS),
    "of unit length": (
        {"g": (1, 4), "W": (4, 4), "b": (4,)},
        lambda x, g, W, b: x @ (g * W / W.norm(dim=0, keepdim=True)) + b,
        {"b": (0,), "g": (1,), "W": (1,)},
    ),
    "two products": (
        {"W": (4, 4), "V": (4, 4, 2), "b": (4,)},
        lambda x, W, V, b: x @ W + torch.einsum("nik,oik->no", x[:, :, None] * SPIKES[:, :2], V) + b,
        COLUMNS | {"V": (0,)},
    ),
    "bias of what follows": (SQUARE, lambda x, W, b: torch.tanh(x @ W) + b, {"W": (1,)}),
    "bias of all": ({"W": (4, 4), "b": ()}, lambda x, W, b: x @ W + b, {"W": (1,)}),
    "two layers": (
        {"W": (4, 4), "b": (4,), "V": (4, 4), "c": (4,)},
        lambda x, W, b, V, c: torch.tanh(x @ W + b) @ V + c,
        COLUMNS,
    ),
    "one output": ({"W": (4,), "b": ()}, lambda x, W, b: (x @ W + b)[:, None], {"b": (), "W": ()}),
    "slices": (
        SQUARE,
        lambda x, W, b: torch.cat([x @ W[:, :1] + b[:1], torch.tanh(x @ W[:, 1:] + b[1:])], 1),
        COLUMNS,
    ),
}  # fmt: skip


def in_the_middle(shapes, function):
    """What a function makes of parameters of these shapes and of its input, between a dense layer and a smooth loss.

    The middle alone has a number of outputs.
    """
    torch.manual_seed(1)
    first, own = nn.Linear(5, 4), {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    middle = Net(lambda m, x: function(x, **dict(m.named_parameters())), **own)
    model = nn.Sequential(first, middle).double()
    return model, lambda output, target: (torch.tanh(output) - target[:, None]).square().mean()


@pytest.mark.share(2)
@pytest.mark.parametrize("use", USES)
def test_a_unit_is_an_output_of_what_a_weight_does(use):
    shapes, function, expected = USES[use]
    model, loss_fn = in_the_middle(shapes, function)
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.linspace(-1, 1, 7, dtype=torch.float64)
    result = hesscond.probe(model, loss_fn, (x, y), ["1"])["1"]
    assert set(result.parameters) == {f"1.{key}" for key in expected}
    assert result.check.passed
    truth = Truth(model, loss_fn, (x, y))
    rows = []
    for key in result.parameters:
        where, axes = truth.index[key], expected[key[2:]]
        rest = [d for d in range(where.ndim) if d not in axes]
        units = int(torch.tensor([where.shape[d] for d in axes]).prod())
        rows.append(where.permute((*axes, *rest)).reshape(units, -1))
    assert [len(own) for own in rows] == len(rows) * [len(result.units)]
    for unit in result.units:
        where = torch.cat([own[unit] for own in rows])
        compare(result.hessian(unit), truth.at(where))
        assert result.n_params == len(where)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [c.name for c in CATALOGUE.values() if c.group == STORED and c.control])
def test_a_unit_is_an_output_in_whatever_order_its_weight_is_stored(name):
    model, loss_fn, batch = case(name).make()
    truth = case(name).true(model, loss_fn, batch, options={})
    result = hesscond.probe(model, loss_fn, batch, ["0"])["0"]
    for unit in result.units:
        compare(result.hessian(unit), truth.spectrum(result, unit).matrix)


UNCLEAR = {
    "number outputs in one use": (SQUARE, lambda x, W, b: torch.tanh(x @ W + b) @ W.T),
    "goes through LinalgMatrixExp": (SQUARE, lambda x, W, b: x @ torch.matrix_exp(W) + b),
    "are both summed over": ({"W": (4, 4), "Q": (4, 4)}, lambda x, W, Q: torch.softmax(x @ (Q @ W).T, 1) @ Q),
    "goes through Convolution": (
        {"W": (4, 3, 2), "b": (6,)},
        lambda x, W, b: F.conv_transpose1d(x[:, :, None] * SPIKES, W, b, groups=2).flatten(1),
    ),
}


@pytest.mark.parametrize("words", UNCLEAR)
def test_rows_that_are_no_outputs_are_no_units(words):
    """Both levels: a unit is refused, the layer is measured."""
    model, loss_fn = in_the_middle(*UNCLEAR[words])
    batch = torch.randn(7, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    with pytest.raises(
        ConfigError, match=rf"'1.W' is not divided into units.* {words}.*; use level='layer'"
    ) as refusal:
        hesscond.probe(model, loss_fn, batch, ["1.W"])
    assert "\n" not in str(refusal.value)
    assert words in hesscond.probe(model, loss_fn, batch, "*").skipped.get("1.W", "") + str(refusal.value)
    assert hesscond.probe(model, loss_fn, batch, ["1"], "layer")["1"].kappa.rank > 0


def test_what_a_glob_finds_of_two_layers_in_one_module_has_the_units_of_each():
    model, loss_fn = in_the_middle(*USES["two layers"][:2])
    batch = torch.randn(7, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    found = hesscond.probe(model, loss_fn, batch, "1*")
    assert {name: result.parameters for name, result in found.items()} == {"1": ("1.b", "1.W"), "1.V": ("1.c", "1.V")}
    named = hesscond.probe(model, loss_fn, batch, ["1", "1.V"])
    assert named["1"].hessian(2).shape == (5, 5)
    assert named["1.V"].parameters == ("1.V",)
    compare(named["1.V"].hessian(1), found["1.V"].hessian(1)[1:, 1:])
    alone = hesscond.probe(model, loss_fn, batch, ["1"])
    assert set(alone.skipped) == {"1.V", "1.c"}
    assert "'1.V' belongs to other outputs than the units of layer '1'" in alone.skipped["1.V"]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_are_those_of_streams_and_scaled_losses_in_single_precision_too(scale):
    model, loss_fn = in_the_middle(*USES["x W"][:2])
    batch = torch.randn(8, 5, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    plain = hesscond.probe(model, loss_fn, batch, ["1"])["1"]
    data = (batch[0].float(), batch[1].float())
    model.float()
    found = hesscond.probe(model, lambda o, t: scale * loss_fn(o, t), split(data, [3, 5]), ["1"], reduction="mean")["1"]
    assert found.parameters == ("1.b", "1.W")
    for kappa, own in zip(found.kappa, plain.kappa, strict=True):
        assert kappa.rank == own.rank
        assert kappa.value == pytest.approx(own.value, rel=1e-3)


def test_a_table_that_is_multiplied_as_it_is_has_no_rows_for_units():
    """Looked up, its rows are units; as x E, its columns are outputs."""

    def forward(m, ids):
        return m.head((torch.softmax(m.table(ids).tanh(), 1) @ m.table.weight).tanh())

    torch.manual_seed(0)
    soft = Net(forward, table=nn.Embedding(4, 4), head=nn.Linear(4, 3)).double()
    batch = torch.arange(8) % 4, torch.arange(8) % 3
    with pytest.raises(ConfigError, match=r"'table' is not divided into units.* number outputs in one use"):
        hesscond.probe(soft, CE, batch, ["table"])


@pytest.mark.parametrize("part", ["1[0:2]", "1.W[1:3]"])
def test_a_range_of_rows_is_none_of_units_where_columns_are_outputs(part):
    model, loss_fn = in_the_middle(*USES["x W"][:2])
    batch = torch.randn(8, 5, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="is a parameter whose rows are no outputs; use level='layer'"):
        hesscond.probe(model, loss_fn, batch, [part])
    assert hesscond.probe(model, loss_fn, batch, [part], "layer")[part].kappa.rank > 0


def test_a_factor_of_the_rank_of_its_layer_is_no_part_of_a_unit():
    """W + BA with as many rows in A as outputs: they are none."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", AddLowRank(4, 4, 4))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    found = hesscond.probe(model, CE, batch, ["0"])["0"]
    prefix = "0.parametrizations.weight"
    assert set(found.parameters) == {"0.bias", f"{prefix}.original", f"{prefix}.0.B"}
    assert found.n_params == 9


@pytest.mark.parametrize("streamed", [False, True])
def test_a_layer_with_a_forward_pass_of_its_own_has_the_units_that_this_makes(streamed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Transposed(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    twin = copy.deepcopy(model)
    twin[2] = nn.Linear(4, 4).double()
    with torch.no_grad():
        twin[2].weight.copy_(model[2].weight.T)
        twin[2].bias.copy_(model[2].bias)
    batch = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3
    data = split(batch, [4, 5]) if streamed else batch
    found, expected = (hesscond.probe(own, CE, data) for own in (model, twin))
    assert list(found) == list(expected) == ["0", "2", "4"]
    for name, result in found.items():
        for unit in result.units:
            compare(result.hessian(unit), expected[name].hessian(unit))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["pruned", "weightnorm", "weightstandardization"])
def test_a_convolution_with_one_output_is_one_unit(how, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 1, 2, bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(5, 3)).double()
    batch = torch.randn(9, 2, 6, dtype=torch.float64), torch.arange(9) % 3
    if how == "pruned":
        prune.random_unstructured(model[0], "weight", amount=1)
        found, rebuilt = hesscond.probe(model, CE, batch)["0"], model
    else:
        found = hesscond.probe(model, CE, batch, ["0"], method=how)["0"]
        rebuilt = parse(how).create(copy.deepcopy(model)).model
    inside = [key for key, _ in rebuilt.named_parameters() if key.startswith("0.")]
    assert (list(found.units), sorted(found.parameters)) == ([0], sorted(inside))
    truth = Truth(rebuilt, CE, batch)
    compare(found.hessian(0), truth.at(torch.cat([truth.index[key].flatten() for key in found.parameters])))


def test_a_parameter_of_a_named_layer_that_is_in_none_of_its_units_is_named():
    """With one input, einsum multiplies entry by entry, and what numbers outputs does not show."""
    torch.manual_seed(0)
    parts = {"weight": nn.Parameter(torch.randn(1, 2, 1)), "bias": nn.Parameter(torch.randn(1, 2))}
    inner = Net(lambda m, x: (torch.einsum("bn,hdn->bhd", x, m.weight) + m.bias).flatten(1), **parts)
    model, batch = (
        nn.Sequential(nn.Linear(5, 1), nn.Tanh(), inner, nn.Linear(2, 3)),
        (torch.randn(9, 5), torch.arange(9) % 3),
    )
    result = hesscond.probe(model, CE, batch, ["2"])
    assert "2.bias" in result["2"].parameters or "belongs to no unit of layer '2'" in result.skipped["2.bias"]


def test_a_layer_whose_weight_is_used_by_others_has_no_rows_for_units():
    """It is not called, and its weight multiplied with as it is."""
    torch.manual_seed(0)
    borrowed = Net(lambda m, x: x @ m.lent.weight + m.lent.bias, lent=nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(5, 4), borrowed, nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3
    assert "its rows are no outputs: use level='layer'" in hesscond.probe(model, CE, batch).skipped["1.lent"]
    with pytest.raises(CaptureError, match="its rows are no outputs: use level='layer'"):
        hesscond.probe(model, CE, batch, ["1.lent"])
    assert hesscond.probe(model, CE, batch, ["1.lent"], "layer")["1.lent"].kappa.rank > 0


def test_a_parameter_without_part_in_the_loss_is_skipped_unless_it_is_named():
    torch.manual_seed(0)
    parts = {"weight": nn.Parameter(torch.randn(2, 3, 3)), "used": nn.Parameter(torch.randn(4, 3))}
    inner, batch = Net(lambda m, x: x @ m.used, **parts), (torch.randn(9, 4), torch.randint(3, (9,)))
    model = nn.ModuleDict({"a": inner})
    model.forward = model["a"].forward
    for layers in (None, "*"):
        result = hesscond.probe(model, nn.CrossEntropyLoss(), batch, layers)
        assert list(result) == ["a"]
        assert "does not depend on parameter 'a.weight'" in result.skipped["a.weight"]
    with pytest.raises(CaptureError, match=r"does not depend .* parameters: a\.weight"):
        hesscond.probe(model, nn.CrossEntropyLoss(), batch, ["a.weight"])

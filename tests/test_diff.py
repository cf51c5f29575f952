"""Results side by side, `hesscond diff`, regressions, and names of entries, against double backward and numpy."""

import copy
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.testing import ConditionNumberError, UnresolvedError, assert_no_regression
from tests.catalogue.truths import Truth
from tests.truth import unit_truth

CE = nn.CrossEntropyLoss()


def case(scale=1.0, features=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs = torch.randn(60, features, dtype=torch.float64)
    inputs[:, 1] *= scale
    return model, CE, (inputs, torch.randint(0, 3, (60,)))


def test_ratios_are_those_of_numpy():
    (model, _, data), (_, _, other) = case(), case(30.0)
    found = hesscond.diff(*(hesscond.probe(model, CE, one) for one in (data, other)), names=["plain", "scaled"])
    frame = found.to_frame()
    assert frame["ratio_scaled_lower"].is_monotonic_decreasing
    for row in frame.to_dict("records"):
        plain, scaled = (
            float(torch.linalg.cond(unit_truth(model, CE, own, row["layer"], row["unit"]))) for own in (data, other)
        )
        assert row["kappa_plain"] == pytest.approx(plain, rel=1e-7)
        assert row["ratio_scaled"] == pytest.approx(scaled / plain, rel=1e-7)
        assert row["ratio_scaled_lower"] <= row["ratio_scaled"] <= row["ratio_scaled_upper"]
    first = str(found).splitlines()[2].split()
    assert first[:2] == [frame["layer"][0], str(frame["unit"][0])]
    assert "a bound" not in str(found)


def test_bounds_of_an_unresolved_ratio():
    frame = hesscond.probe(*case()).to_frame()
    open_ones = frame.assign(resolved=False, kappa=np.inf, kappa_upper=np.inf)
    up, down = hesscond.diff(frame, open_ones), hesscond.diff(open_ones, frame)
    assert up.to_frame()["ratio_B"].isna().all()
    assert (up.to_frame()["ratio_B_lower"] < 1 + 1e-12).all()
    assert " ≥ 0.99" in str(up)
    assert str(up).endswith("≥, ≤: a bound, as a κ is unresolved")
    assert " ≤ 1.0" in str(down)
    assert hesscond.diff(open_ones, open_ones).to_frame()["ratio_B_lower"].eq(0).all()


def test_three_side_by_side_with_layers_that_not_all_have():
    results = [hesscond.probe(*case(), layers=names, level="layer") for names in (["0"], ["0", "2"], None)]
    frame = hesscond.diff(*results).to_frame()
    assert list(frame["layer"]) == ["0", "2"]
    assert list(frame["ratio_C"].isna()) == [False, True]
    assert list(frame["rank_A"].isna()) == [False, True]


def read(frame):
    """What pandas makes of a file, without being told what is text."""
    return pd.read_csv(io.StringIO(frame.to_csv(index=False)))


def test_a_file_of_numbered_layers_is_the_result_that_it_was_written_from():
    before, after = hesscond.probe(*case()), hesscond.probe(*case(30.0))
    found = hesscond.diff(read(before.to_frame()), after).to_frame()
    pd.testing.assert_frame_equal(found, hesscond.diff(before, after).to_frame(), rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda r: [r], "two results or more"),
        (lambda r: [r, pd.DataFrame({"layer": ["0"]})], "no column unit"),
        (lambda r: [r, pd.concat([r.to_frame(), r.to_frame()])], "several rows of the same Hessian"),
        (
            lambda r: [r, hesscond.probe(*case(), level="layer")],
            r"units of 0, 2\) and B \(0, 2\) have no Hessian in",
        ),
        (lambda r: [r, read(r.to_frame().replace({"layer": {"0": "0.1"}}))], "numbers for layers: read it by pandas"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(given, words):
    with pytest.raises(ConfigError, match=words):
        hesscond.diff(*given(hesscond.probe(*case())))


def test_a_regression_is_one_beyond_at_most():
    before, after = hesscond.probe(*case()), hesscond.probe(*case(30.0))
    largest = hesscond.diff(before, after).to_frame()["ratio_B"].max()
    assert assert_no_regression(before, after, at_most=largest * (1 + 1e-6)).outcome == "passed"
    assert assert_no_regression(after.to_frame(), before, at_most=1.0, share=0.5).outcome == "passed"
    with pytest.raises(ConditionNumberError, match="κ after / κ before ≤ 10, and the bounds decide against it"):
        assert_no_regression(before, after, at_most=10)
    unknown = after.to_frame().assign(resolved=False, kappa_lower=1.0, kappa_upper=np.inf)
    with pytest.raises(UnresolvedError, match="do not decide"):
        assert_no_regression(before, unknown, at_most=10)
    with pytest.raises(ConfigError, match="at_most"):
        assert_no_regression(before, after, at_most=0)


# entries


def convolutions():
    return nn.Sequential(
        nn.Conv2d(4, 6, (2, 3), groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


@pytest.mark.parametrize(
    ("layers", "level"), [(["0", "2"], "unit"), (["0", "2"], "layer"), (["4.weight[0:2]"], "layer"), (["0"], "network")]
)
def test_each_entry_is_that_of_the_parameter_that_it_is_said_to_be(layers, level):
    torch.manual_seed(0)
    model, data = convolutions().double(), (torch.randn(12, 4, 4, 4).double(), torch.randint(0, 3, (12,)))
    result, truth = hesscond.probe(model, CE, data, layers, level), Truth(copy.deepcopy(model), CE, data)
    for own in result.values():
        for unit in own.blocks[-1:]:
            entries = own.entries(unit)
            pairs = zip(entries["parameter"], entries["index"], strict=True)
            wanted = truth.at(torch.stack([truth.index[name][place] for name, place in pairs]))
            assert torch.allclose(own.hessian(unit), wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))


def test_names_say_which_input_an_entry_multiplies():
    """A weight's derivative in float64 is zero where its channel is zero, and there only."""
    torch.manual_seed(0)
    for channel in (1, 3):
        model, inputs = convolutions().double(), torch.randn(12, 4, 4, 4).double()
        inputs[:, channel] = 0
        first = hesscond.probe(model, CE, (inputs, torch.randint(0, 3, (12,))), ["0"], "layer")["0"]
        names = first.entries()["name"]
        zero = first.hessian().abs().sum(1) == 0
        assert zero.tolist() == names.str.startswith(f"channel {channel},").tolist()
        assert names[1] == "channel 0, offset (0, 0)"
    single = hesscond.probe(*case(), ["0"])["0"].entries(3)
    assert list(single["name"]) == ["bias", *(f"feature {k}" for k in range(5))]
    assert set(single["unit"]) == {3}


# the command


@pytest.fixture
def two(workplace):
    (workplace / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    torch.manual_seed(0)\n"
        "    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))\n"
        "    return net, nn.CrossEntropyLoss(), (torch.randn(60, 5), torch.randint(0, 3, (60,)))\n"
        "\ndef scaled():\n    net, loss, (x, y) = make()\n    return net, loss, (30 * x, y)\n"
    )
    return workplace


def test_two_functions_two_checkpoints_two_files_agree_with_python(two, call_cli):
    from hesscond.commands.target import load_target

    a = load_target("mine.py:make")
    torch.save(a.model.state_dict(), "a.pt")
    before = hesscond.probe(a.model, a.loss_fn, a.data).to_frame()
    for parameter in a.model.parameters():
        parameter.data *= 3
    torch.save({"epoch": 1, "model": {f"module.{k}": v for k, v in a.model.state_dict().items()}}, "b.pt")
    wanted = hesscond.diff(before, hesscond.probe(a.model, a.loss_fn, a.data)).to_frame()
    found = json.loads(call_cli("diff", "a.pt", "b.pt", "--model", "mine.py:make", "--json").out)
    assert [row["ratio_B"] for row in found] == pytest.approx(list(wanted["ratio_B"]), rel=1e-9)
    rows = call_cli("diff", "mine.py:make", "mine.py:scaled", "--csv").out
    for name, of in (("a.json", "make"), ("b.csv", "scaled")):
        assert call_cli("probe", f"mine.py:{of}", "-o", name).code == 0
    assert call_cli("diff", "a.json", "b.csv", "--csv").out == rows
    printed = call_cli("diff", "a.json", "b.csv")
    assert re.search(r"A: a.json\nB: b.csv\n\nlayer +unit +κ A +κ B +B/A +rank A +rank B", printed.out)
    assert printed.code == 0


def test_two_runs_are_compared_by_their_last_probe(stored, call_cli):
    found = json.loads(call_cli("diff", "done", "done", "--json").out)
    probe = stored.table("probe")
    last = probe[(probe["data"] == "train") & (probe["iteration"] == probe["iteration"].max())]
    assert {(row["layer"], row["unit"]): row["kappa_A"] for row in found} == {
        (row["layer"], row["unit"]): row["kappa_own"] for row in last.to_dict("records")
    }
    assert all(row["ratio_B"] == 1 for row in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.pt", "a.pt"], "give --model FILE.py:FUNCTION for a checkpoint"),
        (["mine.py", "nope.pt", "--model", "mine.py:make"], "mine.py is no checkpoint"),
        (["nope.pt", "nope.pt", "--model", "mine.py:make"], "nope.pt cannot be read"),
        (["other.pt", "other.pt", "--model", "mine.py:make"], "do not fit the model"),
        (["nan.pt", "nan.pt", "--model", "mine.py:make"], "the weights of nan.pt have NaN or infinite entries"),
        (["empty.csv", "empty.csv"], "empty.csv is no table of a probe"),
        (["few.csv", "few.csv"], "no column unit"),
        ([".", "."], "no run in"),
    ],
)
def test_bad_pairs_are_refused(two, refused, arguments, words):
    torch.save(nn.Linear(2, 2).state_dict(), "other.pt")
    nan = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).state_dict()
    torch.save(nan | {"2.weight": nan["2.weight"] / 0}, "nan.pt")
    (two / "empty.csv").touch()
    (two / "few.csv").write_text("layer\n0\n")
    refused(["diff", *arguments], words)

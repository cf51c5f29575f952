"""Baselines: written, read, compared by bounds, and refused where they are of something else."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hesscond.errors import ConfigError
from hesscond.spectra import ConditionNumber
from hesscond.testing import BaselineError, ConditionNumberError, UnresolvedError, assert_no_regression
from hesscond.testing.baselines import Stored, compared, read_baseline, write_baseline
from tests.testing.testing_cases import least_squares, with_a_dead_unit


def condition(lower, upper, rank=3):
    value = (lower + upper) / 2
    return ConditionNumber(
        value, lower, upper, value, 1.0, rank, 0, 0, 1e-16, 1e9, math.isfinite(upper), "test", "structural"
    )


BOUNDS = st.tuples(st.floats(1, 1e12), st.sampled_from([0.0, 1e-9, 0.5, math.inf]))


@settings(deadline=None, max_examples=25)
@given(BOUNDS, BOUNDS, st.sampled_from([0.0, 0.05, 1.0]))
def test_it_is_decided_only_if_all_values_within_the_bounds_agree(now, was, rel):
    (low, width), (old, old_width) = now, was
    high, old_high = low * (1 + width), old * (1 + old_width)
    found = compared(("a", 0), condition(low, high), Stored(old, old, old_high, 3, 0, 0, "test"), rel)
    answers = {
        kappa <= (1 + rel) * before for kappa in (low, min(high, 1e300)) for before in (old, min(old_high, 1e300))
    }
    if found.holds is not None:
        # rounding may turn a tie
        assert found.holds in answers
        near = any(math.isclose(k, (1 + rel) * b, rel_tol=1e-12) for k in (low, high) for b in (old, old_high))
        assert len(answers) == 1 or near


def test_a_baseline_catches_what_became_worse_and_no_more(tmp_path):
    path = tmp_path / "folder" / "kappa.json"
    *case, truth = least_squares([1.0, 30.0])
    with pytest.raises(BaselineError, match="create it with pytest --hesscond-update-baselines, or with create=True"):
        assert_no_regression(*case, baseline=path)
    assert assert_no_regression(*case, baseline=path, create=True).outcome == "written"
    before = path.read_text(encoding="utf-8")
    assert assert_no_regression(*case, baseline=path, create=True).outcome == "passed"
    *worse, larger = least_squares([1.0, 31.0])
    assert larger > truth
    with pytest.raises(ConditionNumberError, match="κ/κ₀") as caught:
        assert_no_regression(*worse, baseline=path, rel=(larger / truth - 1) * 0.99)
    assert f"{larger:.5g}" in str(caught.value)
    assert f"{truth:.5g}" in str(caught.value)
    assert assert_no_regression(*worse, baseline=path, rel=(larger / truth - 1) * 1.01).outcome == "passed"
    # no room at all for its own bounds
    with pytest.raises(UnresolvedError):
        assert_no_regression(*case, baseline=path, rel=0)
    assert path.read_text(encoding="utf-8") == before
    assert [one.name for one in path.parent.iterdir()] == ["kappa.json"]


def test_what_is_stored_comes_back(tmp_path):
    path = tmp_path / "kappa.json"
    kappas = {("a", 0): condition(1 / 3 + 1, 2 / 3 + 1), ("b", None): condition(5.0, math.inf, 2)}
    write_baseline(path, "unit", "bnp", kappas)
    found = read_baseline(path)
    assert (found.level, found.method) == ("unit", "bnp")
    assert set(found.versions) == {"hesscond", "torch", "python"}
    for place, kappa in kappas.items():
        stored = found.kappas[place]
        for name in ("value", "lower", "upper", "rank", "nullity", "negative", "solver", "resolved"):
            assert getattr(stored, name) == getattr(kappa, name)
    json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_zero_hessian_is_kept_apart(tmp_path):
    case = with_a_dead_unit()
    assert_no_regression(*case, baseline=tmp_path / "kappa.json", create=True)
    with pytest.raises(UnresolvedError, match="zero Hessian"):
        assert_no_regression(*case, baseline=tmp_path / "kappa.json")


def test_a_baseline_of_something_else_is_refused(tmp_path):
    path = tmp_path / "kappa.json"
    *case, _ = least_squares([1.0, 30.0])
    assert_no_regression(*case, baseline=path, create=True)
    with pytest.raises(BaselineError, match="of method 'plain', and this is 'bnp'"):
        assert_no_regression(*case, baseline=path, method="bnp")
    with pytest.raises(BaselineError, match="of level 'unit', and this is 'layer'"):
        assert_no_regression(*case, baseline=path, level="layer")
    with pytest.raises(BaselineError, match="has no layer model, unit 1"):
        assert_no_regression(*least_squares([1.0, 30.0], targets=2)[:3], baseline=path)
    with pytest.raises(BaselineError, match="has 3 parameters at layer model, unit 0, and now it has 4"):
        assert_no_regression(*least_squares([1.0, 30.0, 1.0])[:3], baseline=path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "nonsense", "[" * 10**5, '{"format": 2}', '{"format": 1, "level": "unit", "method": "plain"}',
        '{"format": 1, "level": "unit", "method": "plain", "versions": {}, "blocks": [{"layer": "", "unit": 0}]}',
        '{"format": 1, "level": "unit", "method": "plain", "versions": {}, "blocks": [{"layer": "", "unit": 0, '
        '"kappa": 1, "lower": 5, "upper": 2, "rank": 1, "nullity": 0, "negative": 0, "solver": ""}]}',
    ],
)  # fmt: skip
def test_a_damaged_baseline_is_one_sentence(tmp_path, text):
    path = tmp_path / "kappa.json"
    path.write_text(text, encoding="utf-8")
    *case, _ = least_squares([1.0])
    with pytest.raises(ConfigError, match=r"the baseline .* (is damaged|is of format)") as caught:
        assert_no_regression(*case, baseline=path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    *case, _ = least_squares([1.0])
    with pytest.raises(ConfigError, match="cannot be written"):
        assert_no_regression(*case, baseline=tmp_path / "file" / "kappa.json", create=True)
    assert torch.is_grad_enabled()

"""The support table: every kind of model at every level gives the right number, or one sentence.

`make support` runs this where the other libraries are; elsewhere what they make is skipped with the reason.
"""

import time

import pytest
import torch

import hesscond
from tests import documented
from tests.catalogue import PAGE as CASES, case
from tests.catalogue.judging import LEVELS, measured
from tests.support.page import PAGE, page, row, rows_of

#: What once had a wrong number runs a third at a time; what people write runs always.
EVERY = [pytest.param(c, marks=[] if c.close else [pytest.mark.share(3)], id=c.name) for c in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("example", EVERY)
def test_a_kind_of_model_is_measured_rightly_or_refused_in_a_sentence_as_the_page_says(example):
    if example.missing:
        pytest.skip(example.missing)
    cells = measured(example)
    assert list(cells) == list(LEVELS)
    for level, cell in cells.items():
        assert not cell.faults, f"{level}: {cell.faults}"
        assert cell.text.strip(), level
        assert cell.compared or "κ" not in cell.text, f"{level}: a number that nothing was compared with"
    written, now = rows_of(PAGE.read_text(encoding="utf-8"))[example.title], row(example)
    for pair in zip(*(line.strip(" |").split(" | ") for line in (written, now)), strict=True):
        if not (example.borderline and "not resolved" in pair):
            assert documented.same(*map(str.split, pair), documented.RTOL), f"make support-page: {now}"


def test_the_page_has_a_row_for_every_kind_and_no_other():
    text = PAGE.read_text(encoding="utf-8")
    rows = rows_of(text)
    assert list(rows) == [c.title for c in CASES]
    assert page(list(rows.values())) == text, "make support-page"
    assert len({c.title for c in CASES}) == len(CASES) >= 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "peft_lora"])
def test_every_parameter_has_a_block(name):
    if case(name).missing:
        pytest.skip(case(name).missing)
    torch.manual_seed(0)
    model, loss_fn, batch = case(name).build()
    trained = {key: p.numel() for key, p in model.named_parameters() if p.requires_grad}
    for level in ("layer", "unit"):
        start = time.perf_counter()
        result = hesscond.probe(model, loss_fn, batch, "*", level)
        kappas = len(result.to_frame())
        print(f"{name}, {sum(trained.values()):,} parameters, {level}: {kappas} in {time.perf_counter() - start:.1f} s")
        assert result.skipped == {}
        assert {key for layer in result.values() for key in layer.parameters} >= set(trained)
        assert all(layer.check.passed for layer in result.values())
        if level == "layer":
            # frozen parameters beside trained ones are in no block
            assert sum(layer.n_params for layer in result.values()) == sum(trained.values())

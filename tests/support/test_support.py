"""The support table: every kind of model at every level gives the right number, or one sentence.

`make support` runs this where the other libraries are; elsewhere what they make is skipped with the reason.
"""

import time

import pytest
import torch

import hesscond
from tests import documented
from tests.support.judging import Construction
from tests.support.measuring import KINDS, LEVELS, measured
from tests.support.page import PAGE, page, row, rows_of

#: Constructions run a third at a time; other people's models all.
SHARE = [pytest.mark.share(3)]


def name_of(kind):
    return kind.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SHARE * isinstance(kind, Construction)) for kind in KINDS], ids=name_of
)
def test_a_kind_of_model_is_measured_rightly_or_refused_in_a_sentence_as_the_page_says(kind):
    if kind.missing:
        pytest.skip(kind.missing)
    cells = measured(kind)
    assert list(cells) == list(LEVELS)
    for level, cell in cells.items():
        assert not cell.faults, f"{level}: {cell.faults}"
        assert cell.text.strip(), level
        assert cell.compared or "κ" not in cell.text, f"{level}: a number that nothing was compared with"
    written, now = rows_of(PAGE.read_text(encoding="utf-8"))[kind.title], row(kind)
    assert documented.same(written.split(), now.split(), documented.RTOL), f"make support-page: {now}"


def test_the_page_has_a_row_for_every_kind_and_no_other():
    text = PAGE.read_text(encoding="utf-8")
    rows = rows_of(text)
    assert list(rows) == [kind.title for kind in KINDS]
    assert page(list(rows.values())) == text, "make support-page"
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "peft_lora"])
def test_every_parameter_has_a_block(name):
    kind = next(kind for kind in KINDS if kind.name == name)
    if kind.missing:
        pytest.skip(kind.missing)
    torch.manual_seed(0)
    model, loss_fn, batch = kind.make()
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

"""Wrong uses of a watch: each is one sentence that says what to do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import HesscondError

X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def start(model=None, loss=F.cross_entropy, batch=(X, Y), **options):
    return hesscond.watch(made() if model is None else model, loss, batch, **options)


def of(kind, model, **options):
    return kind(model.parameters(), **{"lr": 0.1, **options})


def with_optimizer(kind, **options):
    model = made()
    return start(model, optimizer=of(kind, model, **options))


SGD = torch.optim.SGD

AT_THE_START = {
    "no module": (lambda: start(model=lambda x: x), "must be a torch.nn.Module"),
    "a string for a loss": (lambda: start(loss="mse"), "the loss must be a function"),
    "no loss": (lambda: start(loss=None), "the model returns none for this batch"),
    "a loss of one argument": (lambda: start(loss=lambda output: output.sum()), "do not run on the probe batch"),
    "too many features": (lambda: start(batch=(torch.randn(12, 6), Y)), "do not run on the probe batch"),
    "targets of another number": (lambda: start(batch=(X, Y[:5])), "do not run on the probe batch"),
    "inputs alone": (lambda: start(batch=X), "must be a pair"),
    "an empty stream": (lambda: start(batch=[]), "empty stream"),
    "no batch": (lambda: start(batch=None), "must be a pair"),
    "an unknown layer": (lambda: start(layers=["fc9"]), "fc9"),
    "a glob of nothing": (lambda: start(layers="*.mlp.*"), "mlp"),
    "an unknown level": (lambda: start(level="block"), "unknown level 'block'"),
    "units without layers": (lambda: start(level="unit", units=[0]), "name the layers"),
    "units of a layer": (lambda: start(layers="0", units=[0]), "use level='unit'"),
    "a unit that is not there": (lambda: start(layers="0", level="unit", units=[9]), "9"),
    "tensorboard nowhere": (lambda: start(log="tensorboard:"), "needs a folder"),
    "an optimizer of another model": (lambda: start(optimizer=of(SGD, made())), "another model"),
    "an optimizer that ascends": (lambda: with_optimizer(SGD, maximize=True), "maximizes"),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", AT_THE_START)
def test_what_can_never_work_is_refused_at_the_start(name):
    use, words = AT_THE_START[name]
    with pytest.raises(HesscondError) as refused:
        use()
    sentence = str(refused.value)
    assert words in sentence
    assert sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence


NAN = float("nan")

OPTIONS = {
    "seed": (["x", 1.5, -1, 2**70], "seed must be a whole number"),
    "rtol": (["1e-3", None, NAN, 0], "rtol must lie between 0 and 1"),
    "memory": (["much", 0, NAN, [1]], "memory must be a positive number of bytes"),
    "strict": (["yes", None, 2], "strict must be True or False"),
    "name": ([None, " ", "a\nb"], "name must be a name"),
    "layers": ([3, [None]], "layers must be names"),
    "level": ([None, "units", 2], "unknown level"),
    "group": (["world", 3, True], "group must be a process group"),
    "every": ([0, -1, "epoch", torch.tensor(5)], "every must be"),
    "budget": ([0, 1, NAN, "5%"], "between 0 and 1"),
    "log": ([3, "", [print, 3]], "log must be a function"),
    "optimizer": (["adam", True, torch.optim.Adam], "must be one of torch.optim.Optimizer"),
}


@pytest.mark.share(3)
@pytest.mark.parametrize(("option", "place"), [(key, k) for key, (all, _) in OPTIONS.items() for k in range(len(all))])
def test_an_option_of_another_kind_is_named(option, place):
    value = OPTIONS[option][0][place]
    with pytest.raises(HesscondError) as refused:
        start(**{option: value})
    assert OPTIONS[option][1] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("log", ["wandb:offline", "mlflow:x", "csv:rows.csv"])
def test_a_destination_that_is_unknown_is_no_folder(log):
    with pytest.raises(HesscondError, match="takes nothing behind a colon"):
        start(log=log)
    with pytest.raises(HesscondError, match="did you mean tensorboard"):
        start(log="tensorbord:x")


def closed(use):
    own = start()
    own.close()
    own.close()
    use(own)


LATER = {
    "a step after the end": (lambda: closed(lambda own: own.step()), "the watch is closed"),
    "a state of something else": (lambda: start().load_state_dict({"step": 3}), "not the state of a watch"),
    "a state of negative steps": (lambda: start().load_state_dict(start().state_dict() | {"steps": -5}), "-5 steps"),
    "a state after the end": (lambda: closed(lambda own: own.load_state_dict({})), "the watch is closed"),
    "a word for a loss": (lambda: start().step("loss"), "watch.step takes the loss"),
    "losses": (lambda: start().step(torch.ones(3)), "a tensor of shape (3,)"),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LATER)
def test_what_makes_no_sense_later_is_refused(name):
    use, words = LATER[name]
    with pytest.raises(HesscondError) as refused:
        use()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def removed(model):
    del model[2]


def wider(model):
    model[0] = nn.Linear(7, 4)


def not_finite(model):
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))


@pytest.mark.parametrize("change", [removed, wider, not_finite])
def test_a_model_that_is_changed_under_the_watch_is_a_row_that_says_so(change):
    model = made()
    own = start(model, layers=["0", "2"], every=1)
    change(model)
    row = own.step()
    assert row["hesscond/error"]
    assert "\n" not in row["hesscond/error"]


def test_before_the_optimizers_first_step_there_are_plain_coordinates_only(caplog):
    model = made()
    own = start(model, optimizer=torch.optim.Adam(model.parameters()), every=1)
    row = own.step()
    assert "hesscond/0/kappa" in row
    assert "hesscond/0/kappa_own" not in row
    assert "probe after the first one" in caplog.text


def test_a_schedule_that_fails_is_a_row_that_says_so():
    row = start(every=lambda step: 1 / 0).step()
    assert "ZeroDivisionError" in row["hesscond/error"]
    with pytest.raises(ZeroDivisionError):
        start(every=lambda step: 1 / 0, strict=True).step()

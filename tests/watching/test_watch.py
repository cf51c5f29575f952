"""What a watch measures, when, what it says, and what it does with errors and wrong uses."""

import copy
import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError, ConfigError
from hesscond.methods.optimizers import AtWork
from hesscond.watching import measuring
from hesscond.watching.destinations import Destination
from tests.truth import network_truth

BATCH = (torch.randn(20, 5, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def train(model, optimizer, own, steps, **options):
    rows = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
        loss.backward()
        optimizer.step()
        rows.append(own.step(**dict.fromkeys(options, loss)))
    return rows


def watched(optimizer="sgd", **options):
    model = model_of()
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=0.5), "adam": lambda p: torch.optim.Adam(p, lr=0.01)}
    chosen = kinds[optimizer](model.parameters())
    return model, chosen, hesscond.watch(model, F.cross_entropy, BATCH, chosen, **{"every": 2, **options})


def network_hessian(model):
    """Of all parameters, a shared one once, by torch alone."""
    return network_truth(copy.deepcopy(model).double(), F.cross_entropy, (BATCH[0].double(), BATCH[1]))


#: The rows of each layer's parameters.
PLACES = {"0": slice(0, 24), "2": slice(24, None)}


def kappa_of(H):
    size = np.abs(np.linalg.eigvalsh(H))
    return size.max() / size[size > 1e-11 * size.max()].min()


# what is measured


def test_numbers_are_those_of_the_hessian_by_torch():
    model, optimizer, own = watched("adam")
    row = train(model, optimizer, own, 2)[-1]
    for layer in ("0", "2"):
        H = network_hessian(model)[PLACES[layer], PLACES[layer]]
        values = np.linalg.eigvalsh(H.numpy())
        kappa = kappa_of(H.numpy())
        assert row[f"hesscond/{layer}/kappa"] == pytest.approx(kappa, rel=1e-6)
        assert row[f"hesscond/{layer}/kappa_lower"] <= kappa * (1 + 1e-9)
        assert row[f"hesscond/{layer}/kappa_upper"] >= kappa * (1 - 1e-9)
        assert row[f"hesscond/{layer}/lambda_max"] == pytest.approx(np.abs(values).max(), rel=1e-8)
        assert row[f"hesscond/{layer}/rank"] == (np.abs(values) > 1e-11 * np.abs(values).max()).sum()
        assert row[f"hesscond/{layer}/negative"] == (values < -1e-11 * np.abs(values).max()).sum()
    # Adam's M, by hand: a diagonal of the corrected second moments
    sharp = []
    for layer in ("0", "2"):
        H = network_hessian(model)[PLACES[layer], PLACES[layer]]
        diagonal = []
        for p in (model[int(layer)].weight, model[int(layer)].bias):
            state = optimizer.state[p]
            step = float(state["step"])
            second = (state["exp_avg_sq"].double() / (1 - 0.999**step)).sqrt() + 1e-8
            diagonal.append(1 / second.reshape(-1))
        root = torch.cat(diagonal).sqrt()
        moved = (root[:, None] * H * root).numpy()
        assert row[f"hesscond/{layer}/kappa_own"] == pytest.approx(kappa_of(moved), rel=1e-5)
        sharp.append(0.01 * np.linalg.eigvalsh(moved).max())
    assert row["hesscond/sharpness_times_rate"] == pytest.approx(max(sharp), rel=1e-5)


def test_a_network_has_one_block_and_its_sharpness_is_that_of_the_step():
    model, optimizer, own = watched(level="network")
    row = train(model, optimizer, own, 2)[-1]
    assert row["hesscond/network/lambda_max"] * 0.5 == pytest.approx(row["hesscond/sharpness_times_rate"], rel=1e-4)
    assert row["hesscond/network/kappa_own"] == pytest.approx(row["hesscond/network/kappa"], rel=1e-4)


@pytest.mark.parametrize("level", ["unit", "layer", "network"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_probe_has_both_coordinates_where_they_differ_by_a_number(level, momentum, monkeypatch):
    def rows(short):
        with monkeypatch.context() as patch:
            if not short:
                patch.setattr(AtWork, "multiple_of_identity", lambda self: None)
            counted = []
            patch.setattr(measuring, "probe", lambda *a, **k: counted.append(k["method"]) or hesscond.probe(*a, **k))
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
            own = hesscond.watch(model, F.cross_entropy, BATCH, optimizer, every=2, level=level, strict=True)
            train(model, optimizer, own, 2)
            return own.to_frame(), counted

    (quick, plain), (explicit, moved) = rows(True), rows(False)
    assert not any(plain)
    assert any(moved)
    assert list(quick["layer"]) == list(explicit["layer"])
    for column in ("kappa", "kappa_own", "lambda_max", "sharpness_times_rate"):
        assert np.allclose(quick[column], explicit[column], rtol=1e-5), column
    for column in ("rank", "rank_own", "resolved_own"):
        assert list(quick[column]) == list(explicit[column])


def test_one_network_with_tied_weights():
    """hesscond.probe measures it in plain coordinates; there is no P of one parameter that two layers have."""
    for kind, says in ((torch.optim.SGD, False), (torch.optim.Adam, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
        model[2].weight = model[0].weight
        optimizer = kind(model.parameters(), lr=0.01)
        own = hesscond.watch(model, F.cross_entropy, BATCH, optimizer, every=2, level="network", strict=True)
        row = train(model, optimizer, own, 2)[-1]
        values = torch.linalg.eigvalsh(network_hessian(model))
        assert row["hesscond/network/lambda_max"] == pytest.approx(float(values.abs().max()), rel=1e-5)
        assert ("hesscond/sharpness_times_rate" in row) is not says
        if not says:
            assert row["hesscond/sharpness_times_rate"] == pytest.approx(0.01 * float(values.max()), rel=1e-5)


@pytest.mark.parametrize("level", ["layer", "network"])
def test_the_sharpness_has_the_rate_of_each_parameter_group(level):
    model = model_of()
    rates = {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.02, "2.bias": 0.1}
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([{"params": [named[name]], "lr": rate} for name, rate in rates.items()], lr=1.0)
    own = hesscond.watch(model, F.cross_entropy, BATCH, optimizer, every=2, level=level, strict=True)
    row = train(model, optimizer, own, 2)[-1]
    H = network_hessian(model)
    root = torch.cat([torch.full((named[name].numel(),), rate).double() for name, rate in rates.items()]).sqrt()
    moved = root[:, None] * H * root
    parts = [moved] if level == "network" else [moved[where, where] for where in PLACES.values()]
    sharpest = max(float(torch.linalg.eigvalsh(part).max()) for part in parts)
    assert row["hesscond/sharpness_times_rate"] == pytest.approx(sharpest, rel=1e-5)
    assert sharpest < 0.99 * 0.5 * float(torch.linalg.eigvalsh(H).max())


@pytest.mark.parametrize("level", ["layer", "network"])
def test_an_optimizer_of_some_parameters_has_numbers_of_these(level, caplog):
    """The plain ones are of everything; one optimizer has a layer, the other none of its bias."""
    for held in (["2.weight", "2.bias"], ["0.weight", "2.weight", "2.bias"]):
        model = model_of()
        named = dict(model.named_parameters())
        optimizer = torch.optim.SGD([{"params": [named[name]], "lr": 0.5 / len(name)} for name in held])
        own = hesscond.watch(model, F.cross_entropy, BATCH, optimizer, every=1, level=level, strict=True)
        row = train(model, optimizer, own, 1)[-1]
        H = network_hessian(model).numpy()
        rate = np.concatenate([np.full(p.numel(), (n in held) * 0.5 / len(n)) for n, p in named.items()])
        places = {"network": slice(None)} if level == "network" else PLACES
        for block, where in places.items():
            assert row[f"hesscond/{block}/kappa"] == pytest.approx(kappa_of(H[where, where]), rel=1e-6)
            root = np.sqrt(rate[where][rate[where] > 0])
            keep = np.arange(len(H))[where][rate[where] > 0]
            if not len(keep):
                assert f"hesscond/{block}/kappa_own" not in row
                assert f"{block} is not measured in the optimizer's coordinates" in caplog.text
                continue
            moved = root[:, None] * H[np.ix_(keep, keep)] * root
            assert row[f"hesscond/{block}/kappa_own"] == pytest.approx(kappa_of(moved), rel=1e-6)
        assert set(own.to_frame()["coordinates"]) <= {"plain", "SGD", "SGD, of what it moves"}


def test_the_batch_stays_as_it_was():
    inputs, targets = (part.clone() for part in BATCH)
    own = hesscond.watch(model_of(), F.cross_entropy, (inputs, targets), every=1)
    first = own.step()
    inputs.zero_()
    second = own.step()
    assert first["hesscond/0/kappa"] == second["hesscond/0/kappa"]


def test_dropout_draws_the_same_at_each_probe():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    own = hesscond.watch(model, F.cross_entropy, BATCH, every=1)
    first = own.step()
    torch.rand(7)
    second = own.step()
    assert first["hesscond/0/lambda_max"] == second["hesscond/0/lambda_max"]


# when


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9, 12]), (lambda step: step == 7, [7])])
def test_a_schedule_says_when(every, steps):
    model, optimizer, own = watched(every=every, layers="2")
    rows = train(model, optimizer, own, 12)
    assert [k for k, row in enumerate(rows, 1) if row is not None] == steps


@pytest.mark.parametrize(
    ("options", "budget"),
    [({}, 0.05), ({"budget": 0.2}, 0.2), ({"every": 3}, None), ({"every": 3, "budget": 0.1}, 0.1)],
)
def test_a_budget_holds_unless_steps_are_named(options, budget):
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
    with hesscond.watch(model, loss, batch, **options) as own:
        assert own.budget == budget


@pytest.fixture
def taking(monkeypatch):
    """A clock, and a function that makes a watch whose measurements take so many seconds of it for each block."""
    clock = {"now": 0.0}
    monkeypatch.setattr("hesscond.watching.loop.time.perf_counter", lambda: clock["now"])

    def made(seconds, **options):
        own = watched(**options)[2]
        inside = own._measuring.rows

        def slow():
            clock["now"] += seconds * len(own._measuring.blocks)
            return inside()

        monkeypatch.setattr(own._measuring, "rows", slow)
        return own

    return clock, made


def test_a_budget_makes_probes_rarer_and_says_so(taking, caplog):
    clock, made = taking
    own = made(0.5, every=1, budget=0.1, layers="2")
    found = []
    with caplog.at_level(logging.WARNING, "hesscond"):
        for step in range(1, 14):
            clock["now"] += 1.0
            found += [step] if own.step() else []
    # 0.5 s are a tenth of 5 s, of which 4.5 s are training: five steps
    assert found == [1, 6, 11]
    assert own.seconds / clock["now"] <= 0.1 * 1.2
    said = [record.message for record in caplog.records]
    assert len(said) == 1 or said[0] != said[1]
    assert "about every 5 steps" in said[0]


@pytest.mark.parametrize(
    ("seconds", "said"), [(20.0, ["as long as 20 steps: with every=50 that is 29% of the time"]), (5.0, [])]
)
def test_what_every_costs_is_said_at_the_first_probe(seconds, said, taking, caplog):
    clock, made = taking
    own = made(seconds, every=50, layers="2")
    with caplog.at_level(logging.WARNING, "hesscond"):
        for _ in range(100):
            clock["now"] += 1.0
            own.step()
    assert [words for words in said if words in caplog.text] == said
    assert len(caplog.records) == len(said)


# where it goes


def test_a_run_folder_is_read_like_a_study(tmp_path, call_cli):
    folder = tmp_path / "run"
    with hesscond.watch(*(parts := watched())[:1], F.cross_entropy, BATCH, parts[1], every=2, log=folder) as own:
        rows = train(parts[0], parts[1], own, 6, loss=True)
    frame = hesscond.study.open_run(folder).table("probe")
    assert list(frame.query("layer == '0'")["kappa"]) == [row["hesscond/0/kappa"] for row in rows if row]
    assert hesscond.study.open_run(folder).status == "finished"
    assert len(hesscond.study.open_run(folder).table("training")) == 6
    for command in (
        ("check", folder, "--expect", "all(rank >= 1)"),
        ("figure", "conditioning", folder, "-o", tmp_path / "kappa.png"),
        ("table", "summary", folder),
        ("runs", tmp_path),
        ("export", folder, "--table", "probe"),
    ):
        done = call_cli(*command)
        assert done.code == 0, (command, done.err)


def test_a_training_that_goes_on_writes_what_an_unbroken_one_does(tmp_path):
    def run(folder, breaks):
        model, optimizer, own = watched(log=folder, every=2)
        for part in breaks:
            train(model, optimizer, own, part, loss=True)
            state = json.loads(json.dumps(own.state_dict()))
            own.close()
            own = hesscond.watch(model, F.cross_entropy, BATCH, optimizer, every=2, log=folder)
            if part is not breaks[-1]:
                with pytest.raises(ConfigError, match="load_state_dict"):
                    own.step()
                own.steps = 0
            own.load_state_dict(state)
        own.close()
        return hesscond.study.open_run(folder).table("probe")

    whole, broken = run(tmp_path / "one", [8]), run(tmp_path / "two", [3, 5])
    assert whole.equals(broken)


def test_tensorboard_files_hold_the_row(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard (extra 'watch')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer, own = watched(log=[f"tensorboard:{tmp_path}"])
    with own:
        rows = [row for row in train(model, optimizer, own, 4) if row]
    events = EventAccumulator(str(tmp_path)).Reload()
    found = events.Scalars("hesscond/0/kappa")
    assert [event.step for event in found] == [2, 4]
    assert [event.value for event in found] == [np.float32(row["hesscond/0/kappa"]) for row in rows]


def test_weights_and_biases_has_the_row(monkeypatch):
    """With a stand-in for wandb, which would start a process of its own."""
    calls = []
    run = SimpleNamespace(
        define_metric=lambda name, **options: calls.append(name),
        log=lambda row, commit: calls.append((row, commit)),
        finish=lambda exit_code: calls.append(exit_code),
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=lambda project: run))
    model, optimizer, own = watched(log="wandb")
    with own:
        rows = [row for row in train(model, optimizer, own, 4) if row]
    assert calls == ["hesscond/step", "hesscond/*", *((row, True) for row in rows), 0]


@pytest.mark.filterwarnings("ignore")  # those of its own packages
def test_mlflow_has_the_row(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow (extra 'watch')")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    model, optimizer, own = watched(log="mlflow")
    number = own._destinations[0]._id
    with own:
        rows = [row for row in train(model, optimizer, own, 4) if row]
    history = mlflow.MlflowClient().get_metric_history(number, "hesscond/0/kappa")
    assert [(one.step, one.value) for one in history] == [
        (row["hesscond/step"], row["hesscond/0/kappa"]) for row in rows
    ]
    assert mlflow.active_run() is None


def test_a_function_and_the_frame_have_the_row():
    found = []
    model, optimizer, own = watched(log=[found.append, found.append])
    rows = [row for row in train(model, optimizer, own, 4) if row]
    assert found == [row for row in rows for _ in range(2)]
    frame = own.to_frame()
    assert list(frame.query("layer == '2'")["kappa"]) == [row["hesscond/2/kappa"] for row in rows]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_a_sentence(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if package == "tensorboard" else package, None)
    where = f"tensorboard:{tmp_path}" if package == "tensorboard" else package
    with pytest.raises(ConfigError, match=rf"pip install {package} \(extra 'watch'\)"):
        watched(log=where)


# errors


class Failing(nn.Module):
    """Fails with what it is told to, from then on."""

    def __init__(self):
        super().__init__()
        self.inner, self.failure = model_of(), None

    def forward(self, x):
        if self.failure is not None:
            raise self.failure
        return self.inner(x)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ValueError("no such thing"), "no such thing"),
        (torch.OutOfMemoryError("tried to allocate 1 EB"), "out of memory, the probe is skipped"),
        (MemoryError(), "out of memory, the probe is skipped"),
        (CaptureError("not exactly"), "not exactly"),
    ],
)
def test_an_error_is_one_warning_and_a_row_that_says_so(failure, words, caplog):
    model = Failing()
    own = hesscond.watch(model, F.cross_entropy, BATCH, every=1, log=(found := []).append)
    assert "hesscond/error" not in own.step()
    model.failure = failure
    random_state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "hesscond"):
        rows = [own.step(), own.step()]
    assert all(words in row["hesscond/error"] for row in rows)
    assert found[1:] == rows
    assert len(caplog.records) == 1
    assert torch.equal(random_state, torch.get_rng_state())
    assert own.to_frame()["error"].notna().sum() == 2
    model.failure = None
    assert "hesscond/0/kappa" in {key.replace("inner.", "") for key in own.step()}


def test_an_interrupt_ends_the_training_and_leaves_the_model_as_it_was(tmp_path):
    model = Failing()
    before = torch.get_rng_state()
    own = hesscond.watch(model, F.cross_entropy, BATCH, every=1, log=tmp_path / "r")
    model.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), own:
        own.step()
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert hesscond.study.open_run(tmp_path / "r").status == "interrupted"


def test_a_logger_that_fails_does_not_stop_the_training(caplog):
    def broken(row):
        raise OSError("disk full")

    own = hesscond.watch(model_of(), F.cross_entropy, BATCH, every=1, log=broken)
    with caplog.at_level(logging.WARNING, "hesscond"):
        assert "disk full" in own.step()["hesscond/error"]


def test_a_budget_that_allows_for_too_little_leaves_layers_out_by_its_seed(taking, caplog):
    clock, made = taking

    def run(seed):
        own = made(3.0, every=1, budget=0.1, seed=seed)
        for _ in range(70):
            clock["now"] += 1.0
            own.step()
        return own

    with caplog.at_level(logging.WARNING, "hesscond"):
        one, again = run(1), run(1)
    assert one.left_out == again.left_out
    assert len(one.left_out) == 1
    assert one.left_out[0] not in set(one.to_frame().query("step > 1")["layer"])
    assert f"left out, chosen by seed 1: {one.left_out[0]}" in caplog.text


def test_a_destination_from_elsewhere_is_opened_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Destination, "named", dict(Destination.named))

    class ToLines(Destination):
        name, takes_place = "lines", True

        def __init__(self, place):
            self.file = open(place, "w")  # noqa: SIM115

        def write(self, step, metrics, rows):
            self.file.write(f"{step} {metrics['hesscond/0/kappa']!r}\n")

        def close(self, status, message):
            self.file.close()

    model, optimizer, own = watched(log=f"lines:{tmp_path / 'kappa.txt'}")
    with own:
        rows = [row for row in train(model, optimizer, own, 4) if row]
    lines = [f"{row['hesscond/step']} {row['hesscond/0/kappa']!r}" for row in rows]
    assert (tmp_path / "kappa.txt").read_text().splitlines() == lines

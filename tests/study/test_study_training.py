"""Training and probing of a study against plain torch and numpy."""

import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score
from torch import nn

import hesscond
from hesscond.errors import CaptureError, DivergedError, MatrixError, RunError
from hesscond.hessians import Scaling
from hesscond.methods import BNP
from hesscond.runs import Checkpoints, RunLog
from hesscond.study import (
    RunPlan,
    StudyConfig,
    load_study,
    open_run,
    probing as probing_module,
    run,
    runner as runner_module,
)
from hesscond.study.runner import Training, build_model
from tests.runs.run_logs import broken_off, same_logs
from tests.truth import unit_truth

PER_EPOCH = 1437 // 60


def plan_for(folder, method="vanilla", *, seed=0, iterations=30, training=None, probe=None, hidden=None):
    study = load_study("fc-digits")
    sections = {
        "model": dict(study.model) | ({"hidden": hidden} if hidden else {}),
        "training": dict(study.training) | {"iterations": iterations, "epochs": None} | (training or {}),
        "probe": dict(study.probe) | (probe or {}),
    }
    study = StudyConfig.model_validate(dict(study) | sections)
    return RunPlan(study, method, seed, study.learning_rate(method, 60), folder, torch.device("cpu"))


def trained(plan, data):
    log = RunLog(plan.folder, plan.config(data))
    training = Training(plan, data, log, None)
    with Checkpoints(plan.folder) as checkpoints:
        training.run(checkpoints)
    log.close("finished")
    return training


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches(data, seed, iterations):
    generator = torch.Generator().manual_seed(seed + 1)
    for iteration in range(iterations):
        if iteration % PER_EPOCH == 0:
            permutation = torch.randperm(len(data.train_targets), generator=generator)
        chosen = permutation[iteration % PER_EPOCH * 60 :][:60]
        yield data.train_inputs[chosen].flatten(1), data.train_targets[chosen]


def plain_model(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    for layer in (model[0], model[2], model[4]):
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_vanilla_training_is_a_plain_torch_loop_bit_for_bit(tmp_path, digits, momentum):
    plan = plan_for(tmp_path / "run", seed=5, training={"momentum": momentum})
    training = trained(plan, digits)

    model, losses = plain_model(5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for inputs, targets in batches(digits, 5, 30):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    table = open_run(plan.folder).table("training")
    assert torch.equal(weights(training.model), weights(model))
    assert table["loss"].tolist() == losses
    assert table["iteration"].tolist() == list(range(30))
    assert table["epoch"].tolist() == [k // PER_EPOCH for k in range(30)]


def test_bnp_training_is_a_torch_loop_with_the_method_attached(tmp_path, digits):
    training = trained(plan_for(tmp_path / "run", "bnp"), digits)
    model = plain_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    BNP(model).attach(optimizer)
    for inputs, targets in batches(digits, 0, 30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert torch.equal(weights(training.model), weights(model))


@pytest.mark.share(2)
@pytest.mark.parametrize("method", ["vanilla", "bnp"])
def test_probing_never_changes_training(tmp_path, digits, method):
    probes = {
        "none": {"every": 0, "train_every_epochs": 0},
        "every": {"every": 1, "train_every_epochs": 1},
        "third": {"every": 3, "train_every_epochs": 0},
        "inner-float64": {"layers": ["fc3", "fc1"], "units": [0, 9], "precision": "float64"},
    }
    ended = {}
    for name, probe in probes.items():
        plan = plan_for(tmp_path / name, method, iterations=26, probe=probe)
        ended[name] = weights(trained(plan, digits).model)
        same_logs(tmp_path / name, tmp_path / "none", ("training", "evaluation"))
        assert torch.equal(ended[name], ended["none"])
    assert len(open_run(tmp_path / "none").table("probe")) == 0
    third = open_run(tmp_path / "third").table("probe")
    assert third["iteration"].tolist() == list(range(0, 26, 3))
    same = open_run(tmp_path / "every").table("probe")
    same = same[(same["data"] == "batch") & (same["iteration"] % 3 == 0)].reset_index(drop=True)
    pd.testing.assert_frame_equal(third, same, check_exact=True)


def test_same_seed_same_log_other_seed_another(tmp_path, digits):
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        run(plan_for(tmp_path / name, "bnp", seed=seed, iterations=8), digits)
    same_logs(tmp_path / "one", tmp_path / "again")
    one, other = (open_run(tmp_path / name) for name in ("one", "other"))
    assert (one.table("training")["loss"] != other.table("training")["loss"]).all()
    assert (one.table("probe")["kappa"] != other.table("probe")["kappa"]).all()


def test_methods_start_from_the_same_weights_and_batch(tmp_path, digits):
    plans = [plan_for(tmp_path / method, method, iterations=2) for method in ("vanilla", "bnp")]
    first, second = (weights(build_model(plan, digits)) for plan in plans)
    assert torch.equal(first, second)
    assert torch.equal(first, weights(plain_model(0)))
    assert not torch.equal(first, weights(build_model(plan_for(tmp_path / "x", seed=1), digits)))
    for plan in plans:
        run(plan, digits)
    vanilla, bnp = (open_run(plan.folder) for plan in plans)
    assert vanilla.table("training")["loss"][0] == bnp.table("training")["loss"][0]
    assert vanilla.table("training")["loss"][1] != bnp.table("training")["loss"][1]
    columns = ["data", "kappa", "kappa_preconditioned", "kappa_D", "dead"]
    for data in ("batch", "train"):
        tables = (stored.table("probe") for stored in (vanilla, bnp))
        rows = [table[(table["iteration"] == 0) & (table["data"] == data)][columns] for table in tables]
        assert len(rows[0]) == 1
        pd.testing.assert_frame_equal(*rows, check_exact=True)


# --- the logged numbers ----------------------------------------------------------------------------------------------


def at_iteration(tmp_path, data, method, iteration, precision):
    """The model after so many steps, the batch that step + 1 uses, and that layer's inputs in all batches so far."""
    plan = plan_for(tmp_path / f"stopped-{iteration}", method, iterations=max(iteration, 1), probe={"every": 0})
    inputs_seen = []
    if iteration == 0:
        model = build_model(plan, data)
    else:
        log = RunLog(plan.folder, plan.config(data))
        training = Training(plan, data, log, None)
        model = training.model

        def see(module, args, output):
            if torch.is_grad_enabled() and len(args[0]) == 60:
                inputs_seen.append(args[0].detach().double().numpy())

        handle = model.fc3.register_forward_hook(see)
        with Checkpoints(plan.folder) as checkpoints:
            training.run(checkpoints)
        handle.remove()
        log.close("finished")
    batch = list(batches(data, 0, iteration + 1))[-1]
    with torch.no_grad():
        inputs_seen.append(hidden(model, batch[0]).double().numpy())
        h = inputs_seen[-1]
        if precision == "float64":
            h = hidden(model.double(), batch[0].double()).numpy()
    return SimpleNamespace(model=model.double(), batch=batch, h=h, inputs_seen=inputs_seen)


def hidden(model, inputs):
    return torch.relu(model.fc2(torch.relu(model.fc1(inputs))))


def dense_kappa(H):
    values = np.linalg.eigvalsh(H)
    nonzero = values[values > 1e-12 * values[-1]]
    return nonzero[-1] / nonzero[0], len(nonzero)


def bnp_matrix(mu, sigma):
    U = np.eye(len(mu) + 1)
    U[0, 1:] = -mu
    P = U / np.concatenate([[1.0], np.where(sigma > 0, sigma, np.inf)])
    return P[:, np.concatenate([[True], sigma > 0])]


def kappa_of_D(sigma):
    sigma = sigma[sigma > 0]
    return max(1.0, sigma.max()) / min(1.0, sigma.min())


def with_epsilons(variance):
    return variance + 1e-2 * variance.max() + 1e-4


@pytest.mark.share(2)
@pytest.mark.parametrize(("precision", "rtol"), [("as-trained", 1e-3), ("float64", 1e-8)])
@pytest.mark.parametrize("method", ["vanilla", "bnp"])
def test_batch_rows_equal_the_hessian_of_torch_func(tmp_path, digits, method, precision, rtol):
    plan = plan_for(tmp_path / "run", method, iterations=28, probe={"precision": precision})
    run(plan, digits)
    rows = open_run(plan.folder).table("probe").query("data == 'batch'").set_index("iteration")
    assert rows.index.tolist() == list(range(28))
    for iteration in (0, 4, 25):
        row = rows.loc[iteration]
        found = at_iteration(tmp_path, digits, method, iteration, precision)
        H = unit_truth(found.model, nn.CrossEntropyLoss(), found.batch, "fc3", 3).numpy()
        kappa, rank = dense_kappa(H)
        assert row["kappa"] == pytest.approx(kappa, rel=rtol)
        assert row["kappa_lower"] <= row["kappa"] <= row["kappa_upper"]
        assert (row["rank"], row["rank"] + row["nullity"], row["n_params"], row["samples"]) == (rank, 101, 101, 60)
        assert row["lambda_max"] == pytest.approx(np.linalg.eigvalsh(H)[-1], rel=1e-5)
        assert (row["layer"], row["unit"], row["negative"], row["resolved"]) == ("fc3", 3, 0, True)

        h = found.h
        sigma = np.where(np.ptp(h, axis=0) == 0, 0, h.std(0))
        P = bnp_matrix(h.mean(0), sigma)
        in_bnp, _ = dense_kappa(P.T @ H @ P)
        assert row["kappa_preconditioned"] == pytest.approx(in_bnp, rel=rtol)
        assert row["kappa_preconditioned_lower"] <= row["kappa_preconditioned"] <= row["kappa_preconditioned_upper"]
        assert row["kappa_preconditioned_upper"] / row["kappa_preconditioned_lower"] < 1 + 1e-5
        assert row["dead"] == (sigma == 0).sum() > 0
        assert row["kappa_D"] == pytest.approx(
            kappa_of_D(sigma), rel=max(rtol, 1e-6) if precision == "float64" else 1e-3
        )
        assert row["kappa_D_eps"] == pytest.approx(kappa_of_D(with_epsilons(sigma**2) ** 0.5), rel=1e-5)
        if method == "vanilla":
            assert (row["kappa_own"], row["rank_own"]) == (row["kappa"], row["rank"])
            assert row["coordinates"] == "plain"
            assert np.isnan(row["kappa_D_running"])
            assert np.isnan(row["kappa_D_running_eps"])
            continue
        assert row["coordinates"] == "BNP, running statistics"
        mu, variance = np.zeros(100), np.ones(100)
        for seen in found.inputs_seen:
            mu, variance = 0.99 * mu + 0.01 * seen.mean(0), 0.99 * variance + 0.01 * seen.var(0)
        used = with_epsilons(variance)
        own, _ = dense_kappa(bnp_matrix(mu, used**0.5).T @ H @ bnp_matrix(mu, used**0.5))
        assert row["kappa_own"] == pytest.approx(own, rel=max(rtol, 1e-4))
        assert row["kappa_own_lower"] <= row["kappa_own"] <= row["kappa_own_upper"]
        assert (row["rank_own"], row["resolved_own"]) == (rank, True)
        assert row["kappa_D_running"] == pytest.approx(kappa_of_D(variance**0.5), rel=1e-5)
        assert row["kappa_D_running_eps"] == pytest.approx(kappa_of_D(used**0.5), rel=1e-5)
        assert abs(row["kappa_own"] / row["kappa_preconditioned"] - 1) > 0.01


def test_a_probe_is_of_the_function_of_its_training_pass_whose_buffers_the_pass_itself_moves(tmp_path, digits):
    method = "batchrenorm:start=0,r_end=0,d_end=0,momentum=0.5"
    plan = plan_for(tmp_path / "run", method, iterations=3, probe={"layers": ["fc1", "fc3"], "units": [3]})
    training = Training(plan, digits, RunLog(plan.folder, plan.config(digits)), None)
    places = {name: place for place, name in training.prober.layers.names.items()}
    for iteration in range(3):
        before = deepcopy(training.model).double()
        rows = slice(60 * iteration, 60 * iteration + 60)
        inputs, targets = training.inputs[rows], training.targets[rows]
        _, probes = training.step(iteration, inputs, targets)
        loss = nn.functional.cross_entropy(before(inputs.double()), targets)
        for row in training.prober.rows(probes)[0]:
            layer = before.get_submodule(places[row.measured["layer"]])
            slopes = torch.autograd.grad(loss, [layer.weight, layer.bias], create_graph=True)
            products = [
                torch.autograd.grad(slope, [layer.weight, layer.bias], retain_graph=True)
                for slope in (*slopes[0][3], slopes[1][3])
            ]
            H = torch.stack([torch.cat([weight[3], bias[3:4]]) for weight, bias in products])
            assert row.measured["lambda_max"] == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-4)
    training.log.close("finished")


@pytest.mark.parametrize(("precision", "rtol"), [("as-trained", 1e-2), ("float64", 1e-6)])
def test_train_rows_equal_an_unstreamed_computation(tmp_path, digits, monkeypatch, precision, rtol):
    monkeypatch.setattr(probing_module, "CHUNK", 500)  # 500, 500, 437
    plan = plan_for(tmp_path / "run", "bnp", iterations=25, probe={"precision": precision, "every": 0})
    plans = {0: build_model(plan, digits), 25: trained(plan, digits).model}
    rows = open_run(plan.folder).table("probe").set_index("iteration")
    assert rows.index.tolist() == [0, 25]
    dtype = torch.float64 if precision == "float64" else torch.float32
    for iteration, model in plans.items():
        model = model.to(dtype)
        row = rows.loc[iteration]
        with torch.no_grad():
            h = hidden(model, digits.train_inputs.flatten(1).to(dtype))
            p = torch.softmax(model.fc3(h).double(), 1)[:, 3]
        h, root = h.double().numpy(), (p * (1 - p) / 1437).sqrt().numpy()
        F = root[:, None] * np.column_stack([np.ones(1437), h])
        kappa = hesscond.condition_number(factor=F)
        assert row["data"] == "train"
        assert (row["samples"], row["n_params"]) == (1437, 101)
        assert row["kappa"] == pytest.approx(kappa.value, rel=rtol)
        assert row["lambda_max"] == pytest.approx(kappa.lambda_max, rel=1e-5)
        assert row["lambda_min"] == pytest.approx(kappa.lambda_min, rel=rtol)
        assert (row["rank"], row["nullity"], row["resolved"]) == (kappa.rank, kappa.nullity, kappa.resolved)
        sigma = np.where(np.ptp(h, axis=0) == 0, 0, h.std(0))
        in_bnp = hesscond.condition_number(factor=F @ bnp_matrix(h.mean(0), sigma))
        assert row["kappa_preconditioned"] == pytest.approx(in_bnp.value, rel=rtol)
        assert row["kappa_D"] == pytest.approx(kappa_of_D(sigma), rel=rtol)
        assert row["kappa_D_eps"] == pytest.approx(kappa_of_D(with_epsilons(sigma**2) ** 0.5), rel=1e-5)
        assert row["dead"] == (sigma == 0).sum()


def test_evaluations_equal_a_plain_pass_over_the_test_set(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=30, probe={"every": 0, "train_every_epochs": 0})
    model = trained(plan, digits).model
    first, last = open_run(plan.folder).table("evaluation").iloc[[0, -1]].to_dict("records")
    for row, iteration, own in ((first, 0, build_model(plan, digits)), (last, 30, model)):
        with torch.no_grad():
            output = own(digits.test_inputs)
        assert row["iteration"] == iteration
        assert row["test_accuracy"] == (output.argmax(1) == digits.test_targets).double().mean().item()
        loss = nn.functional.cross_entropy(output, digits.test_targets).item()
        assert row["test_loss"] == pytest.approx(loss, rel=1e-5)
        # scikit-learn's scores
        truth, ranked = digits.test_targets.numpy(), output.numpy()
        assert row["test_top5"] == pytest.approx(top_k_accuracy_score(truth, ranked, k=5, labels=range(10)))
        assert row["test_class_accuracy"] == pytest.approx(balanced_accuracy_score(truth, ranked.argmax(1)))
        assert math.isnan(row["test_psnr"])
    assert last["test_accuracy"] > first["test_accuracy"]


def test_binary_cross_entropy_is_of_every_class_against_the_others(tmp_path, digits):
    """Evaluated and measured as −log σ(±o), a mean over samples and classes, by torch.func of units of the output."""
    training = {"loss": "binary_cross_entropy"}
    plan = plan_for(tmp_path / "run", iterations=1, training=training, probe={"precision": "float64"}, hidden=[12, 12])
    run(plan, digits)
    model = build_model(plan, digits).double()
    x, labels = digits.train_inputs.flatten(1).double(), digits.train_targets
    h = torch.relu(model.fc2(torch.relu(model.fc1(x))))
    h = torch.cat([torch.ones(len(h), 1, dtype=h.dtype), h], 1).detach()
    sign = torch.where(labels == 3, -1.0, 1.0)

    def loss(w):
        return torch.log1p(torch.exp(sign * (h @ w))).mean() / 10

    H = torch.func.hessian(loss)(torch.cat([model.fc3.bias[3:4], model.fc3.weight[3]]).detach()).detach().numpy()
    row = open_run(plan.folder).table("probe").query("data == 'train' and iteration == 0").iloc[0]
    kappa, rank = dense_kappa(H)
    assert (row["rank"], row["samples"]) == (rank, len(x))
    assert row["kappa"] == pytest.approx(kappa, rel=1e-5)
    assert row["lambda_max"] == pytest.approx(np.linalg.eigvalsh(H)[-1], rel=1e-5)
    first = open_run(plan.folder).table("evaluation").iloc[0]
    odds = model(digits.test_inputs.double()).detach().numpy()
    signs = np.where(np.arange(10) == digits.test_targets.numpy()[:, None], -1, 1)
    assert first["test_loss"] == pytest.approx(np.log1p(np.exp(signs * odds)).mean(), rel=1e-5)


def test_when_evaluations_and_train_probes_happen(tmp_path, digits):
    iterations = 5 * PER_EPOCH + 4
    plan = plan_for(
        tmp_path / "run", iterations=iterations, hidden=[8, 8], probe={"every": 50, "train_every_epochs": 2}
    )
    run(plan, digits)
    stored = open_run(plan.folder)
    evaluation, probe = stored.table("evaluation"), stored.table("probe")
    assert evaluation["iteration"].tolist() == [*range(0, iterations, PER_EPOCH), iterations]
    assert evaluation["epoch"].tolist() == [0, 1, 2, 3, 4, 5, 5]
    train = probe[probe["data"] == "train"]
    assert train["iteration"].tolist() == [0, 2 * PER_EPOCH, 4 * PER_EPOCH, iterations]
    assert train["epoch"].tolist() == [0, 2, 4, 5]
    assert probe[probe["data"] == "batch"]["iteration"].tolist() == [0, 50, 100]
    assert set(probe["data"]) == {"batch", "train"}
    assert stored.status == "finished"


def test_a_batch_of_one_sample(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=3, training={"batch_size": 1}, probe={"train_every_epochs": 0})
    run(plan, digits)
    probe = open_run(plan.folder).table("probe")
    assert probe["rank"].tolist() == [1, 1, 1]
    assert probe["kappa"].tolist() == [1.0, 1.0, 1.0]
    assert probe["kappa_D"].tolist() == [1.0, 1.0, 1.0]
    assert probe["dead"].tolist() == [100, 100, 100]


# --- probes whose rows are made together ----------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "expected"), [([100, 100], 1), ([1000, 1000], 2)])
def test_short_iterations_take_one_thread(tmp_path, digits, hidden, expected):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        plan = plan_for(tmp_path / "run", iterations=2, hidden=hidden, probe={"every": 0, "train_every_epochs": 0})
        run(plan, digits, lambda progress: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [expected] * 2
    assert open_run(plan.folder).facts["threads"] == str(expected)


@pytest.mark.share(4)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", ["vanilla", "bnp"])
def test_rows_made_together_are_those_made_alone_digit_for_digit(tmp_path, digits, method, threads):
    # some features are dead on some batches, the last of which is ragged
    probe = {"layers": ["fc3"], "units": [0, 3, 4], "precision": "as-trained", "every": 1}
    hidden, last = ([30, 1000], 13) if threads > 1 else ([30, 21], 33)
    plan = plan_for(tmp_path / "run", method, probe=probe, hidden=hidden)
    training = Training(plan, digits, RunLog(plan.folder, plan.config(digits)), None)
    before, probes = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for iteration in range(1, last + 1):
            size = 60 if iteration < last else 17
            drawn = torch.randint(1437, (size,), generator=torch.Generator().manual_seed(iteration))
            _, taken = training.step(iteration, training.inputs[drawn], training.targets[drawn])
            probes += [one for one in taken if one.waits]
        together = training.prober.rows(probes)
        alone = [training.prober.rows([probe])[0] for probe in probes]
    finally:
        torch.set_num_threads(before)
        training.log.close("finished")
    assert repr(together) == repr(alone)
    measured = [row.measured for rows in together for row in rows]
    # but the first, and the first of the second epoch
    assert len(measured) == 3 * (last - 1 - (last > PER_EPOCH))
    assert len({row["dead"] for row in measured}) > 1


def test_what_waits_is_logged_when_a_run_is_broken_off(tmp_path, digits):
    plan = plan_for(tmp_path / "run")
    broken_off(plan, digits, 17)
    stored = open_run(plan.folder)
    assert stored.status == "interrupted"
    assert stored.table("probe").query("data == 'batch'")["iteration"].tolist() == list(range(17))
    assert stored.table("training")["iteration"].tolist() == list(range(17))


def test_of_probes_made_together_those_before_a_bad_one_are_logged(tmp_path, digits, monkeypatch):
    marked, rows, batch = [], probing_module.Prober.rows, probing_module.Prober.batch

    def mark(self, *args, **kwargs):
        marked.append(batch(self, *args, **kwargs))
        return marked[-1]

    def refuse(self, probes):
        if any(probe is marked[5] for probe in probes if len(marked) > 5):
            raise MatrixError("the factor is not finite")
        return rows(self, probes)

    monkeypatch.setattr(probing_module.Prober, "batch", mark)
    monkeypatch.setattr(probing_module.Prober, "rows", refuse)
    plan = plan_for(tmp_path / "run")
    with pytest.raises(DivergedError, match=r"at iteration 5 \(the factor is not finite\)"):
        run(plan, digits)
    stored = open_run(plan.folder)
    assert stored.status == "diverged"
    assert stored.table("probe").query("data == 'batch'")["iteration"].tolist() == list(range(5))


def test_coordinates_that_later_steps_change_in_place_are_those_of_their_step(tmp_path, digits, monkeypatch):
    shared = torch.ones(11, dtype=torch.float64)

    def coordinates(self, layer):
        shared[0] *= 1.1
        return Scaling(shared)

    monkeypatch.setattr("hesscond.methods.base.Method.coordinates", coordinates)
    tables = []
    for waiting in (32, 1):
        shared.fill_(1)
        monkeypatch.setattr(runner_module, "WAITING", waiting)
        plan = plan_for(tmp_path / str(waiting), hidden=[12, 10])
        run(plan, digits)
        tables.append(open_run(plan.folder).table("probe"))
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert tables[0]["kappa_own"].nunique() > 20


# --- ends that are not happy, and doing it again ---------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_divergence_names_the_iteration_and_keeps_the_log(tmp_path, digits, iterations):
    plan = plan_for(tmp_path / "run", iterations=iterations)
    plan = RunPlan(plan.study, "vanilla", 0, 1e25, plan.folder, plan.device)
    with pytest.raises(DivergedError, match=r"loss is (nan|inf) at iteration \d+") as error:
        run(plan, digits)
    stored = open_run(plan.folder)
    assert stored.status == "diverged"
    assert stored.facts["message"] == str(error.value)
    training, batch = stored.table("training"), stored.table("probe").query("data == 'batch'")
    assert len(training) >= 1
    assert np.isfinite(training["loss"]).all()
    assert f"at iteration {len(training)}:" in str(error.value)
    assert batch["iteration"].tolist() == training["iteration"].tolist()


def test_numbers_out_of_range_before_the_loss_is_are_a_divergence(tmp_path, digits):
    plan = plan_for(tmp_path / "run", "bnp", iterations=12, hidden=[8, 8])
    plan = RunPlan(plan.study, "bnp", 0, 1e12, plan.folder, plan.device)
    with pytest.raises(DivergedError, match=r"at iteration \d+"):
        run(plan, digits)
    assert open_run(plan.folder).status == "diverged"


def test_an_unexpected_error_closes_the_log_as_failed(tmp_path, digits):
    plan = plan_for(tmp_path / "run", iterations=10)
    broken_off(plan, digits, 3, how=ZeroDivisionError)
    stored = open_run(plan.folder)
    assert stored.status == "failed"
    assert "ZeroDivisionError" in stored.facts["message"]
    assert stored.iterations == 3


def test_config_toml_repeats_the_run(tmp_path, digits):
    probe = {"layers": ["fc3", "fc2"], "units": [1, 2], "every": 2, "precision": "float64", "rtol": 1e-4}
    plan = plan_for(tmp_path / "first", "bnp", seed=7, iterations=6, training={"momentum": 0.5}, probe=probe)
    plan = RunPlan(plan.study, "bnp", 7, 1 / 3, plan.folder, plan.device)
    run(plan, digits)
    study = load_study(tmp_path / "first" / "config.toml")
    told = study.run
    assert told.learning_rate == 1 / 3
    assert told.data_source == "scikit-learn"
    assert told.versions["torch"] == torch.__version__
    assert told.versions["hesscond"] == hesscond.__version__
    device = torch.device(told.device)
    run(RunPlan(study, told.method, told.seed, told.learning_rate, tmp_path / "second", device), digits)
    same_logs(tmp_path / "first", tmp_path / "second")
    assert open_run(tmp_path / "first").config == open_run(tmp_path / "second").config


@pytest.mark.parametrize(
    "probe", [{"layers": ["fc1"]}, {"layers": ["fc1"], "levels": ["layer"], "units": "all"}], ids=["captured", "whole"]
)
def test_behind_batch_statistics_the_training_set_is_not_measured_in_parts(tmp_path, digits, monkeypatch, probe):
    """Each part would be normalized by itself: refused for a layer in front of them, measured behind them."""
    spec = {"every": 0, "train_samples": 40, "train_every_epochs": 1}
    monkeypatch.setattr(probing_module, "CHUNK", 20)
    refused = plan_for(tmp_path / "refused", "batchnorm", iterations=1, probe=spec | probe)
    with pytest.raises(RunError, match=r"behind layer 'fc1' .* take at most 20 of them, train_samples = 20, or set"):
        run(refused, digits)
    assert open_run(refused.folder).status == "failed"
    assert open_run(refused.folder).table("probe").empty
    output = spec | {"layers": ["fc3"], "units": [0]}
    run(plan_for(tmp_path / "behind", "batchnorm", iterations=1, probe=output, hidden=[12, 10]), digits)
    monkeypatch.setattr(probing_module, "CHUNK", 40)
    run(plan_for(tmp_path / "at once", "batchnorm", iterations=1, probe=spec | probe, hidden=[12, 10]), digits)
    for name, layer in (("behind", "fc3"), ("at once", "fc1")):
        rows = open_run(tmp_path / name).table("probe")
        assert set(rows["layer"]) == {layer}
        assert set(rows["samples"]) == {40}


def test_hessians_of_many_decades_are_checked_in_float32(tmp_path, digits):
    """After Adam's first step of 0.3 features differ by 40 decades; the direction of the check overflowed."""
    plan = plan_for(tmp_path / "run", "adam", seed=1, iterations=60, probe={"every": 20})
    run(replace(plan, learning_rate=0.3), digits)
    stored = open_run(plan.folder)
    assert stored.status == "finished"
    assert stored.table("training")["loss"].max() > 10 * stored.table("training")["loss"][0]
    assert stored.table("probe").query("data == 'batch'")["iteration"].tolist() == [0, 20, 40]


@pytest.mark.parametrize(("rate", "error"), [(0.01, RunError), (1e4, DivergedError)])
def test_a_probe_that_fails_is_a_divergence_if_the_loss_has_blown_up(tmp_path, digits, monkeypatch, rate, error):
    batch, made = probing_module.Prober.batch, []

    def fail(self, *args, **kwargs):
        made.append(len(made))
        if len(made) > 2:
            raise CaptureError("it does not agree with the model")
        return batch(self, *args, **kwargs)

    monkeypatch.setattr(probing_module.Prober, "batch", fail)
    plan = replace(plan_for(tmp_path / "run"), learning_rate=rate)
    with pytest.raises(error) as raised:
        run(plan, digits)
    stored = open_run(plan.folder)
    rows = stored.table("probe").query("data == 'batch'")
    if error is RunError:
        assert "it does not agree" in str(raised.value)
        assert stored.status == "failed"
        return
    losses = stored.table("training")["loss"]
    assert f"training has diverged at learning rate {rate:g}" in str(raised.value)
    assert losses.max() > 10 * losses[0]
    # the probe is there, without κ
    assert rows["kappa"].isna().tolist() == [False, False, True]
    assert stored.status == "diverged"

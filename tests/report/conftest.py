import numpy as np
import pytest

from hesscond.methods import registered
from hesscond.runs import RunLog, open_run


def write_run(
    folder,
    method="bnp",
    seed=0,
    *,
    iterations=300,
    epochs=3,
    study="fc-test",
    batch_size=60,
    learning_rate=0.1,
    every=1,
    unresolved=0.0,
    probed=True,
    evaluated=True,
    status="finished",
):
    """A made-up run with the look of a true one: a fraction ``unresolved`` of both κ is not resolved."""
    rng = np.random.default_rng([seed, len(method)])
    fast = method != "vanilla"
    config = {
        "name": study,
        "description": "made up",
        "data": {"name": "cifar10"},
        "model": {"hidden": [100, 100], "activation": "relu"},
        "training": {"batch_size": batch_size, "iterations": iterations},
        "probe": {"layers": ["fc3", "fc1"], "units": [3, 5], "every": every},
        "run": {"method": method, "seed": seed, "learning_rate": learning_rate},
    }
    log = RunLog(folder, config)
    per_epoch = iterations // epochs

    def rows(iteration, data):
        t = iteration / iterations
        result = []
        for layer, unit in (("fc3", 3), ("fc3", 5), ("fc1", 3), ("fc1", 5)):
            if data == "batch":
                kappa = 10 ** (5.2 + 1.0 * t + 0.6 * fast * t + 0.28 * rng.standard_normal())
                kappa_d = 10 ** (1.9 + (1.9 if fast else 1.1) * t + 0.15 * rng.standard_normal())
                reached = kappa / 10 ** (1.0 + 0.6 * t + 0.12 * rng.standard_normal())
            else:
                kappa = 10 ** (5.3 + (4.5 if fast else 3.0) * t)
                kappa_d = 10 ** (1.2 + (2.1 if fast else 1.4) * t)
                reached = 10 ** (2.2 + 1.6 * t + 0.1 * rng.standard_normal())
            lost, lost_too = rng.random(2) < (unresolved, unresolved / 2)
            row = {
                "iteration": iteration,
                "epoch": iteration // per_epoch,
                "data": data,
                "layer": layer,
                "unit": unit,
                "kappa": np.inf if lost else kappa,
                "kappa_lower": 0.5 * kappa,
                "kappa_upper": np.inf if lost else 1.001 * kappa,
                "resolved": int(not lost),
                "kappa_preconditioned": np.inf if lost_too else 1.1 * reached,
                "kappa_preconditioned_lower": 0.55 * reached,
                "kappa_preconditioned_upper": np.inf if lost_too else 1.101 * reached,
                "resolved_preconditioned": int(not lost_too),
                "kappa_D": kappa_d,
                "kappa_D_running_eps": 10 ** (1.5 + 0.6 * t) if fast and data == "batch" else None,
                "dead": int(rng.integers(0, 6)),
            }
            own = {"kappa_own": reached, "kappa_own_lower": 0.5 * reached, "kappa_own_upper": 1.001 * reached}
            if lost_too:
                own |= {"kappa_own": np.inf, "kappa_own_upper": np.inf}
            own |= {"resolved_own": int(not lost_too), "coordinates": method}
            if method == "vanilla":
                own = {f"kappa_own{end}": row[f"kappa{end}"] for end in ("", "_lower", "_upper")}
                own |= {"resolved_own": row["resolved"], "coordinates": "plain"}
            result.append(row | own)
        return result

    probes, evaluations = [], []
    for iteration in range(iterations + 1):
        t = iteration / iterations
        epoch = iteration // per_epoch
        if iteration % per_epoch == 0:
            if evaluated:
                accuracy = 0.1 + (0.38 if fast else 0.3) * (1 - np.exp(-4 * t)) + 0.01 * rng.standard_normal()
                entry = {"iteration": iteration, "epoch": epoch, "test_loss": 2.3, "test_accuracy": accuracy}
                evaluations.append(entry)
            if probed:
                probes += rows(iteration, "train")
        if iteration < iterations:
            loss = 1.5 + 0.8 * np.exp(-(6 if fast else 3) * t) + 0.12 * rng.standard_normal()
            log.training(iteration, epoch, float(loss))
            if probed and iteration % every == 0:
                probes += rows(iteration, "batch")
    log.commit(probe=probes, evaluation=evaluations)
    log.close(status)
    return open_run(folder)


@pytest.fixture
def make_run(tmp_path):
    """``write_run`` into a fresh folder each time."""
    count = iter(range(1000))
    return lambda *args, **options: write_run(tmp_path / f"run{next(count)}", *args, **options)


@pytest.fixture(scope="session")
def four_runs(tmp_path_factory):
    """Two methods, two seeds each, some κ unresolved; to be read only."""
    folder = tmp_path_factory.mktemp("four")
    return [
        write_run(folder / f"{method}{seed}", method, seed, iterations=60, unresolved=0.1)
        for method in ("vanilla", "bnp")
        for seed in (0, 1)
    ]


@pytest.fixture(scope="session")
def twelve_runs(tmp_path_factory):
    """Twelve methods, one run each; to be read only."""
    folder = tmp_path_factory.mktemp("twelve")
    names = [*[method.name for method in registered()][:11], "bnp+groupnorm"]
    return [write_run(folder / name, name, iterations=12) for name in names]

"""What a study's iteration costs: hand-written torch loop, the runner without probing, the runner with probing.

The three are interleaved in one process, so that a noisy machine disturbs all of them alike; medians and their ratios
are printed. Run: ``make bench`` with HESSCOND_DATA_DIR naming a folder with CIFAR-10 (or pass --study fc-digits).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from hesscond.data import load
from hesscond.study import RunPlan, load_study, resolve_device
from hesscond.study.log import RunLog
from hesscond.study.runner import Training, build_model


def training(plan: RunPlan, data, folder: Path) -> Training:
    """The runner's training, its log in ``folder``."""
    return Training(plan, data, RunLog(folder, plan.config(data)), None)


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", default="fc-cifar10")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    study = load_study(arguments.study)
    never = study.model_copy(update={"probe": study.probe.model_copy(update={"every": 0})})
    data = load(study.data.name).to(device)
    cores = torch.get_num_threads()
    print(
        f"{study.name}, batch {study.training.batch_size}, {device}, {cores} threads, torch {torch.__version__}, ",
        end="",
    )
    print(f"Python {platform.python_version()}; medians of {arguments.iterations} interleaved iterations, ms")
    print(f"{'method':10}{'hand loop':>11}{'runner':>9}{'+ probe':>9}{'runner/hand':>13}{'probe/runner':>14}")
    for method in ("vanilla", "bnp"):
        with tempfile.TemporaryDirectory() as temporary:
            rate = study.learning_rate(method, study.training.batch_size)
            folders = [Path(temporary) / name for name in ("plain", "probed")]
            plans = [RunPlan(s, method, 0, rate, f, device) for s, f in zip((never, study), folders, strict=True)]
            plain, probed = (training(p, data, p.folder) for p in plans)
            hand = build_model(plans[0], data)
            optimizer = torch.optim.SGD(hand.parameters(), lr=rate)
            loss_fn = nn.CrossEntropyLoss()
            times: dict[str, list[float]] = {"hand": [], "plain": [], "probed": []}
            order = torch.Generator().manual_seed(0)
            batch_size = study.training.batch_size
            for iteration in range(arguments.iterations):
                batch = torch.randint(len(data.train_targets), (batch_size,), generator=order).to(device)
                start = time.perf_counter()
                x, y = plain.inputs[batch], plain.targets[batch]
                optimizer.zero_grad()
                loss = loss_fn(hand(x), y)
                loss.backward()
                optimizer.step()
                loss.item()
                times["hand"].append(time.perf_counter() - start)
                for name, run in (("plain", plain), ("probed", probed)):
                    start = time.perf_counter()
                    value, rows = run.step(iteration, run.inputs[batch], run.targets[batch])
                    run.log.training(iteration, 0, value)
                    if rows:
                        run.log_probe(iteration, 0, rows)
                    times[name].append(time.perf_counter() - start)
            plain.log.close("finished")
            probed.log.close("finished")
        hand_ms, plain_ms, probed_ms = (1e3 * statistics.median(times[k]) for k in ("hand", "plain", "probed"))
        ratios = f"{plain_ms / hand_ms:13.2f}{probed_ms / plain_ms:14.2f}"
        print(f"{method:10}{hand_ms:11.2f}{plain_ms:9.2f}{probed_ms:9.2f}{ratios}")


if __name__ == "__main__":
    main()

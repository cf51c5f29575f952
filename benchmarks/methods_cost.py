"""What one training iteration costs with each method, against vanilla: forward, backward, transform, step.

Each iteration of one method is followed by that of the next, in one process and on the same batch, so that a noisy
machine disturbs all of them alike; what is printed is the median time of vanilla and, for the others, the median ratio
of their time to vanilla's over as many iterations as a refresh of any of them takes. With one thread, ``--clock cpu``
counts the processor time of this process, which other processes on the machine change less than the time on the wall.
Run: ``python benchmarks/methods_cost.py --threads 1 --method bnp --method batchnorm``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from hesscond.methods import parse
from hesscond.models import MLP

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
#: Iterations of which the time is added up: decompositions are due every 10 or 100.
PERIOD = 100


def fully_connected(features: int) -> nn.Module:
    """features-100-100-10."""
    return MLP(features, [100, 100], 10, generator=torch.Generator().manual_seed(0))


def convolutional() -> nn.Module:
    """Two convolutions of 16 and 32 channels on 3 × 32 × 32 images, and a dense layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "fc-784": (lambda: fully_connected(784), (784,)),
    "fc-3072": (lambda: fully_connected(3072), (3072,)),
    "cnn": (convolutional, (3, 32, 32)),
}


def stepper(
    method: str, make: Callable[[], nn.Module], device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One training iteration with a method, on a model of its own."""
    model = make().to(device)
    own = parse(method).create(model)
    optimizer, loss_fn = own.optimizer(1e-4), nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        own.observe(loss)
        penalty = own.penalty(loss)
        (loss if penalty is None else loss + penalty).backward()
        own.transform_gradients()
        optimizer.step()
        own.after_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def ratios(
    methods: list[str], network: str, batch: int, iterations: int, clock: Callable[[], float], device: torch.device
) -> tuple[float, dict[str, float]]:
    """Vanilla's milliseconds, and each method's ratio to it."""
    make, size = NETWORKS[network]
    steps = {method: stepper(method, make, device) for method in ["vanilla", *methods]}
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {method: [] for method in steps}
    for iteration in range(iterations + 10):
        x = torch.randn(batch, *size, generator=generator).to(device)
        y = torch.randint(0, 10, (batch,), generator=generator).to(device)
        for method, step in steps.items():
            start = clock()
            step(x, y)
            if iteration >= 10:
                times[method].append(clock() - start)
    plain = times.pop("vanilla")
    starts = range(0, iterations, PERIOD)
    medians = {
        method: statistics.median(sum(own[k : k + PERIOD]) / sum(plain[k : k + PERIOD]) for k in starts)
        for method, own in times.items()
    }
    return 1e3 * statistics.median(plain), medians


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", help="repeat for several; default: bnp, batchnorm and whitening")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="repeat for several; default: all")
    parser.add_argument("--batch", action="append", type=int, help="repeat for several; default: 60 and 256")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    methods = given.method or ["bnp", "batchnorm", "whitening"]
    print(
        f"{device}, {given.threads} threads, {given.clock} time, torch {torch.__version__}, Python "
        f"{platform.python_version()}; medians of {given.iterations} interleaved iterations: vanilla in ms, the others "
        "as ratios to it"
    )
    print(f"{'network':10}{'batch':>6}{'vanilla':>10}" + "".join(f"{m:>{max(12, len(m) + 2)}}" for m in methods))
    for network in given.network or NETWORKS:
        for batch in given.batch or (60, 256):
            plain, found = ratios(methods, network, batch, given.iterations, CLOCKS[given.clock], device)
            row = "".join(f"{found[m]:{max(12, len(m) + 2)}.2f}" for m in methods)
            print(f"{network:10}{batch:6}{plain:10.3f}{row}", flush=True)


if __name__ == "__main__":
    main()

"""What each process of test_operators_parallel.py runs; the first one prints what was found, as JSON."""

import json
import sys

import torch
from torch import distributed

from hesscond.operators import Dense, Shifted
from hesscond.operators.parallel import DataParallel, Team, led

ORDER = 30


def symmetric(generator):
    A = torch.randn(ORDER, ORDER, generator=generator, dtype=torch.float64)
    return (A + A.T) / 2


class Broken(Dense):
    def multiply(self, vectors):
        raise RuntimeError("the disk is full")


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    distributed.init_process_group("gloo")
    team = Team(distributed.group.WORLD)
    rank, size = team.rank, team.size
    generator = torch.Generator().manual_seed(0)
    matrices = [symmetric(generator) for _ in range(size)]
    masses = [float(r) for r in range(3, 3 + size)]
    truth = sum(m * A for m, A in zip(masses, matrices, strict=True)) / sum(masses)
    A = DataParallel(Dense(matrices[rank], psd=rank == 0), masses[rank] / sum(masses), team)
    total = DataParallel(Dense(matrices[rank]), 1.0, team)
    lazy = DataParallel(Dense(matrices[rank]), float(rank == 0), team)
    v = torch.randn(ORDER, 2, generator=generator, dtype=torch.float64)
    found = {
        "together": (A @ v - truth @ v).abs().max().item(),
        "led": (led(A, A.to_dense) - truth).abs().max().item(),
        "sum": (led(total, total.to_dense) - sum(matrices)).abs().max().item(),
        "without data": (led(lazy, lazy.to_dense) - matrices[0]).abs().max().item(),
        "psd": A.psd,
        "error of the leader": message(lambda: led(A, lambda: 1 / 0)),
    }
    shifted = Shifted(A, 2.0)
    found["shifted"] = (led(shifted, shifted.to_dense) - truth + 2 * torch.eye(ORDER)).abs().max().item()
    difference = A - total
    found["of two operators"] = (led(difference, difference.to_dense) - truth + sum(matrices)).abs().max().item()
    # only some of the processes would take this branch if each drew its own numbers
    drawn = led(A, lambda: torch.rand(1, generator=torch.Generator().manual_seed(rank)).item())
    found["drawn"] = team.gathered(drawn)
    broken = DataParallel((Broken if rank == size - 1 else Dense)(matrices[rank]), 1.0, team)
    found["broken share"] = team.gathered(message(lambda: led(broken, broken.to_dense)))
    found["orders"] = message(lambda: DataParallel(Dense(torch.eye(2 + rank)), 1.0, team))
    found["no data"] = message(lambda: DataParallel(Dense(torch.eye(2)), 0.0, team))
    found["errors"] = team.gathered(found["error of the leader"])
    found["still in step"] = (led(A, A.to_dense) - truth).abs().max().item()
    distributed.destroy_process_group()
    found["destroyed"] = message(lambda: team.gathered(rank))
    if rank == 0:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

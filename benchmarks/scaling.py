"""Optimal Kronecker scalings of layers of k units with k inputs: ``python benchmarks/scaling.py [16 32 …]``.

κ is asked for to 10 %: of the Gauss–Newton matrix of a trained network on digits, damped and as it is, and of a random
matrix.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn

from hesscond import GGNOperator, optimal_kronecker_scaling
from hesscond.data import load


def layer_factor(k: int, damping: float) -> np.ndarray:
    """F with FᵀF the Gauss–Newton matrix of the layer in the middle of 64-k-k-10, plus γI of so many mean eigenvalues.

    300 steps of 60 digits; tanh, so that no unit is dead.
    """
    torch.manual_seed(0)
    data, generator = load("digits"), torch.Generator().manual_seed(0)
    x, y = data.train_inputs.double().flatten(1), data.train_targets
    middle = nn.Linear(k, k, bias=False)
    model = nn.Sequential(nn.Linear(64, k), nn.Tanh(), middle, nn.Tanh(), nn.Linear(k, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(300):
        part = torch.randint(0, len(y), (60,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    G = GGNOperator(model, nn.CrossEntropyLoss(), (x, y), layers=["2"]).to_dense()
    values, vectors = torch.linalg.eigh(G + damping * G.trace() / len(G) * torch.eye(len(G)).to(G))
    return (vectors * values.clamp(min=0).sqrt()).T.numpy()


def kronecker_table(sizes: list[int]) -> None:
    """Print the pairs of layers of these sizes."""
    print("| layer | κ(H) | κ((L ⊗ R)ᵀH(L ⊗ R)) | certified gap − 1 | decompositions | processor seconds |")
    print("|---|---|---|---|---|---|")
    for k in sizes:
        rng = np.random.default_rng(0)
        scales = np.logspace(0, 1, k)[:, None] * np.logspace(0, 2, k)
        for name, make in {
            "trained, damped": lambda k=k: layer_factor(k, 1e-3),
            "trained": lambda k=k: layer_factor(k, 0.0),
            "random": lambda rng=rng, scales=scales: (
                rng.standard_normal((2 * scales.size, scales.size)) * scales.ravel()
            ),
        }.items():
            A = make()
            begin = time.process_time()
            best = optimal_kronecker_scaling(A, (k, k), rtol=1.1**0.5 - 1)
            seconds = time.process_time() - begin
            print(
                f"| {k} × {k}, {name} | {best.kappa_given**2:.4g} | {best.kappa**2:.4g} | {best.gap**2 - 1:.1%} | "
                f"{best.evaluations} | {seconds:.1f} |",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="*", default=[16, 32])
    kronecker_table(parser.parse_args().sizes)


if __name__ == "__main__":
    main()

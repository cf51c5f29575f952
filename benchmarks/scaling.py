"""Optimal diagonal scalings: time and certified gap, beside equilibration, L-BFGS and a general SDP solver.

Run: ``python benchmarks/scaling.py [--order 100] [--sdp-order 30] [--seed 0] [--kronecker 16 32]``. κ of each is in the
table; the SDP solver (Clarabel, one side only) runs on smaller matrices, where it takes a second. A second table has
the optimal Kronecker pairs of layers of k units with k inputs, κ asked for to 10 %: of the Gauss–Newton matrix of a
trained network on digits, damped and as it is, and of a random matrix. ``--order 0`` leaves the first one out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import minimize
from torch import nn

from hesscond import optimal_diagonal_scaling, optimal_kronecker_scaling
from hesscond.data import load

KINDS = ("Gaussian", "graded", "integer", "nearly dependent")


def matrix(rng: np.random.Generator, kind: str, m: int, n: int) -> np.ndarray:
    """A matrix of that kind."""
    A = rng.standard_normal((m, n))
    if kind == "graded":
        return A * 10.0 ** rng.uniform(-3, 3, (m, 1)) * 10.0 ** rng.uniform(-1.5, 1.5, n)
    if kind == "integer":
        return np.round(3 * A)
    if kind == "nearly dependent":
        return rng.standard_normal((m, 1)) + 1e-3 * A
    return A


def equilibrated(A: np.ndarray) -> float:
    """κ with rows of norm 1."""
    return float(np.linalg.cond(A / np.linalg.norm(A, axis=1)[:, None]))


def lbfgs(A: np.ndarray) -> float:
    """κ that L-BFGS reaches on Schatten norms with exponents 8, 64, 512."""
    norms = np.linalg.norm(A, axis=1)
    t = -np.log(norms)

    def objective(t: np.ndarray, p: float) -> tuple[float, np.ndarray]:
        U, s, _ = np.linalg.svd(np.exp(t)[:, None] * A, full_matrices=False)
        logs = np.log(s)
        a, b = np.exp(p * (logs - logs[0])), np.exp(p * (logs[-1] - logs))
        value = logs[0] - logs[-1] + (np.log(a.sum()) + np.log(b.sum())) / p
        return float(value), U**2 @ (a / a.sum() - b / b.sum())

    for p in (8, 64, 512):
        t = minimize(objective, t, args=(p,), jac=True, method="L-BFGS-B", options={"maxiter": 200}).x
    return float(np.linalg.cond(np.exp(t)[:, None] * A))


def clarabel_sdp(A: np.ndarray) -> float:
    """κ by Clarabel: maximal λ with λI ≼ AᵀWA ≼ I, for full column rank (wide: of the triangular factor)."""
    import clarabel

    A = A / np.linalg.norm(A, axis=1)[:, None]
    if A.shape[0] < A.shape[1]:
        A = np.linalg.qr(A.T)[1].T
    m, r = A.shape
    j, i = np.tril_indices(r)
    weight = np.where(i == j, 1.0, np.sqrt(2))
    products, identity = (A[:, i] * A[:, j] * weight).T, np.where(i == j, 1.0, 0.0)
    constraints = np.block(
        [
            [-np.eye(m), np.zeros((m, 1))],
            [-products, identity[:, None]],
            [products, np.zeros((len(i), 1))],
        ]
    )
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix((m + 1, m + 1)),
        np.r_[np.zeros(m), -1.0],
        sparse.csc_matrix(constraints),
        np.r_[np.zeros(m + len(i)), identity],
        [clarabel.NonnegativeConeT(m), clarabel.PSDTriangleConeT(r), clarabel.PSDTriangleConeT(r)],
        settings,
    )
    w = np.array(solver.solve().x[:m]).clip(min=1e-300)
    return float(np.linalg.cond(np.sqrt(w)[:, None] * A))


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
    h = model[:2](x).detach()
    a = middle(h).detach().requires_grad_()
    z = model[3:](a)
    p = z.detach().softmax(1)
    # ∂²ℓ/∂z² = Σ_c b_c b_cᵀ with b_c = √p_c (e_c − p)
    B = p.sqrt()[:, :, None] * (torch.eye(10).to(p) - p[:, None])
    deltas = [torch.autograd.grad(z, a, b, retain_graph=True)[0] for b in B.unbind(1)]
    R = torch.linalg.qr(torch.cat([torch.einsum("ni,nj->nij", d, h).flatten(1) for d in deltas]), mode="r").R
    R = R / len(x) ** 0.5
    gamma = damping * R.square().sum() / len(R)
    return torch.linalg.qr(torch.cat([R, gamma.sqrt() * torch.eye(len(R)).to(R)]), mode="r").R.numpy()


def kronecker_table(sizes: list[int]) -> None:
    """Print the pairs of layers of these sizes."""
    print("\n| layer | κ(H) | κ((L ⊗ R)ᵀH(L ⊗ R)) | certified gap − 1 | decompositions | processor seconds |")
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


def timed(run: Callable[[], float]) -> str:
    """What it found and the seconds it took."""
    begin = time.perf_counter()
    value = run()
    return f"{value:.6g} in {time.perf_counter() - begin:.2f} s"


def diagonal_table(order: int, sdp_order: int, seed: int) -> None:
    """Print the diagonal scalings of each kind of matrix."""
    print("| matrix | side | κ | certified gap − 1 | seconds | equilibrated | L-BFGS | Clarabel |")
    print("|---|---|---|---|---|---|---|---|")
    for n in dict.fromkeys((sdp_order, order)):
        for kind in KINDS:
            for m, k in ((n, n), (n, 3 * n), (3 * n, n)):
                A = matrix(np.random.default_rng(seed), kind, m, k)
                for side in ("row", "both"):
                    begin = time.perf_counter()
                    best = optimal_diagonal_scaling(A, side=side)
                    seconds = time.perf_counter() - begin
                    peers = ["", "", ""]
                    if side == "row":
                        peers = [f"{equilibrated(A):.6g}", timed(lambda A=A: lbfgs(A)), ""]
                        if n == sdp_order:
                            peers[2] = timed(lambda A=A: clarabel_sdp(A))
                    row = [
                        f"{kind} {m}×{k}",
                        side,
                        f"{best.kappa:.6g}",
                        f"{best.gap - 1:.1e}",
                        f"{seconds:.2f}",
                        *peers,
                    ]
                    print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", type=int, default=100)
    parser.add_argument("--sdp-order", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kronecker", type=int, nargs="*", default=[16, 32])
    arguments = parser.parse_args()
    if arguments.order:
        diagonal_table(arguments.order, arguments.sdp_order, arguments.seed)
    kronecker_table(arguments.kronecker)


if __name__ == "__main__":
    main()

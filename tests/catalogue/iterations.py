"""Iterations."""

import functools

import numpy as np
import torch
from torch import nn

import hesscond
from hesscond.operators import as_operator
from hesscond.spectra.forms import ProductForm, SolverLimits
from tests.catalogue.cases import add
from tests.catalogue.judging import Verdict, verdict_of
from tests.catalogue.parts import MSE, values
from tests.catalogue.truths import Spectrum

row = functools.partial(add, "Iterations", layer="network", levels=("network",), close=None)


def diagonal(values):
    """An operator of scipy with these eigenvalues, in the basis of a fixed rotation by reflections."""
    from scipy.sparse.linalg import LinearOperator

    n = len(values)
    mirrors = np.random.default_rng(0).standard_normal((2, n))
    mirrors /= np.linalg.norm(mirrors, axis=1, keepdims=True)

    def multiply(V):
        V = V.reshape(n, -1)
        for w in mirrors:
            V = V - 2 * np.outer(w, w @ V)
        V = values[:, None] * V
        for w in mirrors[::-1]:
            V = V - 2 * np.outer(w, w @ V)
        return V

    return LinearOperator((n, n), matvec=lambda v: multiply(v).ravel(), matmat=multiply, dtype=float)


def top_by_seed(spectrum, which="top"):
    """A judge: λ_max of `hesscond.lanczos` for each seed, which also draws the spectrum."""

    def judge():
        found = []
        for seed in range(72):
            values = spectrum(np.random.default_rng(seed))
            true = max(abs(values)) if which == "magnitude" else max(values)
            result = hesscond.lanczos(diagonal(values), 1, which, tol=1e-4, seed=seed)
            low, high = sorted([float(result.lower[0]), float(result.upper[0])])
            low, high = (-high, -low) if high < 0 else (low, high)
            inside = low - 1e-12 * abs(true) <= true <= high + 1e-12 * abs(true)
            word = "right" if inside else "wrong"
            found.append((f"seed {seed}", Verdict(word, f"λ_max in [{low:.6f}, {high:.6f}], truly {true:.6f}")))
        return found

    return judge


def uniform(rng):
    return 1 + rng.random(600)


for key, title, spectrum, *which in [
    ("uniform", "600 eigenvalues between 1 and 2", uniform),
    ("uniform_300", "300 eigenvalues between 1 and 2", lambda rng: 1 + rng.random(300)),
    ("two_at_the_top", "400 below 1, two at 2 and 2.0005", lambda rng: np.append(rng.random(400), [2, 2.0005])),
    ("cluster", "a cluster of ten within 1e-3 at the top",
        lambda rng: np.append(rng.random(500), 2 + 1e-3 * rng.random(10))),
    ("both_signs", "400 between −2 and 2", lambda rng: 4 * rng.random(400) - 2, "magnitude"),
    ("opposite", "2 and −2.0003 at the ends", lambda rng: np.append(rng.random(400), [2, -2.0003]), "magnitude"),
    ("semicircle", "a semicircle of 500", lambda rng: 2 + np.cos(3.14159 * rng.random(500))),
]:  # fmt: skip
    row(f"top_{key}", f"λ_max: {title}, 72 seeds", None, judge=top_by_seed(spectrum, *which))


def iterated(spectrum):
    """A judge: κ by iterations, of matrices that are not formed."""

    def judge():
        found = []
        for seed in range(3):
            values = spectrum(np.random.default_rng(seed))
            limits = SolverLimits(dense_order=50, quick_order=50, seed=seed)
            kappa = ProductForm(as_operator(diagonal(values)), limits=limits).measured(1e-8)
            true = Spectrum(sorted(values.tolist(), key=abs, reverse=True))
            verdict = verdict_of(kappa, true)
            nonzero = sum(value != 0 for value in true.values)
            if kappa.rank > nonzero:
                verdict = Verdict("wrong", f"{kappa}: {kappa.rank} called nonzero, where {nonzero} are")
            found.append((f"seed {seed}", verdict))
        return found

    return judge


def padded(nonzero, zeros):
    return lambda rng: np.append(nonzero(rng), np.zeros(zeros))


for key, title, spectrum in [
    ("uniform", "600 between 1 and 2", uniform),
    ("thirty", "30 nonzero of 1200", padded(lambda rng: 1 + rng.random(30), 1170)),
    ("half", "half of 400 zero", padded(lambda rng: 1 + rng.random(200), 200)),
    ("geometric", "300 over six decades", lambda rng: 10 ** (6 * rng.random(300))),
    ("signs", "300 of both signs, none below 0.1", lambda rng: (0.1 + rng.random(300)) * rng.choice([-1, 1], 300)),
    ("small_one", "one of 1e-6 beside 400 of 1 to 2", lambda rng: np.append(1 + rng.random(400), 1e-6)),
]:
    row(f"iterated_{key}", f"κ by iterations: {title}", None, judge=iterated(spectrum))


class FewSamples:
    """The eigenvalues of 2XᵀX/N of a linear model with squared error, from XXᵀ."""

    def __init__(self, batch):
        self.rows = batch[0].double()

    def spectrum(self, own, unit):
        found = torch.linalg.eigvalsh(2 / len(self.rows) * self.rows @ self.rows.T).flip(0).tolist()
        return Spectrum(found + [0.0] * (own.n_params - len(found)))


row("few_samples", "1,200 weights and 30 samples",
    lambda: (nn.Sequential(nn.Linear(1200, 1, bias=False)), MSE, values(30, 1200, 1)),
    truth=lambda m, f, b, o: FewSamples(b))  # fmt: skip

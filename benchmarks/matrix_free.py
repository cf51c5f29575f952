"""The matrix-free engine next to other tools: products, and λ_max of a network.

Rows are interleaved in one process, so that a noisy machine disturbs them alike; "gradients" are forward and backward
passes over the same data. Errors are true ones, against a truth that none of our code computed. ``python
benchmarks/matrix_free.py [--only product|top]``, with HESSCOND_DATA_DIR naming a folder with CIFAR-10.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import (
    FULL,
    QUICK,
    Size,
    convolutional_network,
    network,
    perceptron,
    training_set,
    transformer,
)
from measuring import TimeUp, environment, interleaved, milliseconds, seconds_of, table, time_limit
from peers import double_by_default
from products import described, direction, in_gradients, jvp_of_gradient, product_rows, row
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import eigsh
from torch import nn

from hesscond.hessians import HessianOperator
from hesscond.spectra.lanczos import lanczos

CPU = torch.device("cpu")


def why_not(error: str) -> str:
    """What a table says of a row without a time."""
    reason = error.strip().splitlines()[-1]
    return "not installed" if reason.startswith(("ModuleNotFoundError", "ImportError")) else f"FAILED: {reason}"[:50]


# products


def products(size: Size, effort: dict[str, Any]) -> dict[str, Any]:
    """Products in gradients, float32 and float64, of three networks."""
    found: dict[str, Any] = {}
    for name, make in {"MLP": perceptron, "CNN": convolutional_network, "transformer": transformer}.items():
        outcomes = {}
        for dtype in (torch.float32, torch.float64):
            problem = make(size, dtype, CPU)
            vector, H = direction(problem), HessianOperator(problem.model, problem.loss_fn, problem.batch, dtype=dtype)
            expected = jvp_of_gradient(problem, vector)()
            off = float((H @ vector - expected).norm() / expected.norm())
            if off > 1e3 * torch.finfo(dtype).eps:
                raise RuntimeError(f"{name}: our product and torch.func's differ by {off:.0e} of the norm")
            outcomes[dtype] = interleaved(product_rows(problem), CPU, **effort)
        print(f"\nProducts, in gradients: {name}, {described(problem)}\n")
        lines = []
        for single, double in zip(*outcomes.values(), strict=True):
            cells = [single.what]
            for outcome, rows in zip((single, double), outcomes.values(), strict=True):
                unit = next(o for o in rows if o.key == ("gradient-stream" if "stream" in outcome.key else "gradient"))
                ratio = None if outcome.error else in_gradients(outcome, unit)
                cells.append(why_not(outcome.error or "") if ratio is None else f"{ratio:.2f}")
            lines.append(cells)
        print(table(("product", "float32", "float64"), lines, left=(0,)), flush=True)
        found[name] = {str(dtype): [o.as_dict() for o in rows] for dtype, rows in outcomes.items()}
    return found


# the largest eigenvalue of a network, to a true relative error

ACCURACY, SEEDS = 1e-6, (0, 1, 2)
#: Tolerances of the Lanczos methods and of the power iteration, and numbers of steps of the one without a tolerance.
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
POWER_TOLERANCES = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
STEPS = (4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50)
Solve = Callable[[int], float]


@dataclass(frozen=True)
class Network:
    """A float64 model with a loss and the batches of its data."""

    model: nn.Module
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    loss_fn: nn.Module

    @property
    def data(self) -> Any:
        """The only batch, or all of them."""
        return self.batches[0] if len(self.batches) == 1 else self.batches


def true_top(network: Network) -> float:
    """The largest eigenvalue by scipy on a product of a few lines, alike from two random starts."""
    parameters = list(network.model.parameters())
    total, order = sum(len(x) for x, _ in network.batches), sum(p.numel() for p in parameters)

    def product(vector: np.ndarray) -> np.ndarray:
        parts = torch.from_numpy(vector.ravel()).split([p.numel() for p in parameters])
        result = torch.zeros(order, dtype=torch.float64)
        for inputs, targets in network.batches:
            loss = network.loss_fn(network.model(inputs), targets) * (len(inputs) / total)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            along = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
            result += torch.cat([h.reshape(-1) for h in torch.autograd.grad(along, parameters)])
        return result.numpy()

    operator, tops = ScipyOperator((order, order), matvec=product, dtype=np.float64), []
    for seed in (0, 1):
        start = np.random.default_rng(seed).standard_normal(order)
        options = {"which": "LA", "tol": 1e-14, "ncv": min(40, order - 1), "return_eigenvectors": False}
        tops.append(float(eigsh(operator, 1, v0=start, **options)[0]))
    if abs(tops[0] - tops[1]) > 1e-12 * tops[0]:
        raise RuntimeError(f"the truth is not known: {tops} from two random starts")
    return tops[0]


def tools(network: Network) -> dict[str, list[tuple[str, Solve]]]:
    """Ways to call each tool, from the cheapest on; the fastest one that is exact enough at all seeds is timed."""

    def ours(tol: float) -> Solve:
        def call(seed: int) -> float:
            operator = HessianOperator(network.model, network.loss_fn, network.data)
            return float(lanczos(operator, 1, "top", tol=tol, seed=seed).eigenvalues[0])

        return call

    def operator_of_curvlinops() -> ScipyOperator:
        from curvlinops import HessianLinearOperator

        given = network.model, network.loss_fn, list(network.model.parameters()), network.batches
        # the check takes several products
        return HessianLinearOperator(*given, check_deterministic=False).to_scipy()

    def arpack(make: Callable[[], ScipyOperator], ncv: int, tol: float) -> Solve:
        def call(seed: int) -> float:
            A = make()
            start = np.random.default_rng(seed).standard_normal(A.shape[0])
            return float(eigsh(A, 1, which="LA", ncv=ncv, tol=tol, v0=start, return_eigenvectors=False)[0])

        return call

    def pyhessian(tol: float) -> Solve:
        def call(seed: int) -> float:
            from pyhessian import hessian

            torch.manual_seed(seed)
            # it leaves gradients with their graph behind
            model, single = copy.deepcopy(network.model), len(network.batches) == 1
            data = {"data": network.batches[0]} if single else {"dataloader": network.batches}
            with double_by_default():
                values, _ = hessian(model, network.loss_fn, cuda=False, **data).eigenvalues(maxIter=10_000, tol=tol)
            model.zero_grad()
            # its vectors have norm 1/(1 + 1e-6), and its eigenvalue is off by the square of that
            return float(values[0]) * (1 + 1e-6) ** 2

        return call

    def eigenthings(steps: int) -> Solve:
        def call(seed: int) -> float:
            import hessian_eigenthings as he

            operator = he.HessianOperator(network.model, network.batches, he.supervised_loss(network.loss_fn))
            return float(he.lanczos(operator, 1, "LA", min(steps, operator.size), seed=seed).eigenvalues[0])

        return call

    def eigsh_of(make: Callable[[], ScipyOperator]) -> list[tuple[str, Solve]]:
        return [(f"ncv {ncv}, tol {tol:.0e}", arpack(make, ncv, tol)) for ncv in (6, 10, 20) for tol in TOLERANCES]

    return {
        "hesscond": [(f"tol {tol:.0e}", ours(tol)) for tol in TOLERANCES],
        "hesscond, default": [("tol 1e-08", ours(1e-8))],
        "hesscond's operator, eigsh": eigsh_of(
            lambda: HessianOperator(network.model, network.loss_fn, network.data).to_scipy()
        ),
        "curvlinops, eigsh": eigsh_of(operator_of_curvlinops),
        "PyHessian × (1 + 1e-6)²": [(f"tol {tol:.0e}", pyhessian(tol)) for tol in POWER_TOLERANCES],
        "hessian-eigenthings": [(f"{steps} steps", eigenthings(steps)) for steps in STEPS],
    }


def exact_enough(ways: Sequence[tuple[str, Solve]], truth: float, seeds: Sequence[int], limit: float) -> dict[str, Any]:
    """The fastest way that is exact enough at all seeds, or why there is none."""
    best: dict[str, Any] = {"error": f"no way is within {ACCURACY:.0e}", "reached": False}
    for label, call in ways:
        if best["reached"] and label.partition(",")[0] == best["setting"].partition(",")[0]:
            # a tighter tolerance of what suffices
            continue
        try:
            with time_limit(limit):
                found = [seconds_of(lambda c=call, s=seed: c(s), CPU) for seed in seeds]
        except TimeUp:
            continue
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "reached": False}
        worst = max(abs(value - truth) / truth for _, value in found)
        took = min(seconds for seconds, _ in found)
        if worst <= ACCURACY and not (best["reached"] and best["took"] <= took):
            best = {"setting": label, "call": call, "worst_error": worst, "took": took, "reached": True}
    return best


def tops(size: Size, effort: dict[str, Any]) -> dict[str, Any]:
    """λ_max of fc-cifar10's network by every tool, on one mini-batch and on several."""
    found: dict[str, Any] = {}
    several, seeds = (2, SEEDS[:1]) if size is QUICK else (10, SEEDS)
    for count in (1, several):
        samples = training_set(size, CPU)
        pairs = zip(samples.inputs.split(size.batch), samples.targets.split(size.batch), strict=True)
        batches = [(inputs.double(), targets) for (inputs, targets), _ in zip(pairs, range(count), strict=False)]
        asked_of = Network(network(size, torch.float64, "he"), batches, nn.CrossEntropyLoss())
        truth, name = true_top(asked_of), f"{count} × {size.batch} samples, {samples.source}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = tools(asked_of).items()
            best = {tool: exact_enough(ways, truth, seeds, effort["limit"]) for tool, ways in asked}
            rows = [row(tool, tool, lambda c=b["call"]: c(SEEDS[0])) for tool, b in best.items() if b["reached"]]
            timed = {outcome.key: outcome for outcome in interleaved(rows, CPU, **effort)}
        unit, lines = timed["hesscond"].median if "hesscond" in timed else None, []
        for tool, b in best.items():
            median = timed[tool].median if tool in timed else None
            if median is None:
                lines.append([tool, "–", "–", "–", why_not(b.get("error") or "not run")])
                continue
            times = f"{median / unit:.2f}" if unit else "–"
            lines.append([tool, milliseconds(median), times, b["setting"], f"{b['worst_error']:.0e}"])
        print(f"\nλ_max of the network to {ACCURACY:.0e}: {name}; the truth is {truth:.12g}\n")
        head = ("tool", "ms", "× hesscond", "fastest setting that suffices", "true error")
        print(table(head, lines, left=(0, 3, 4)), flush=True)
        found[name] = [{"tool": tool, **{k: v for k, v in b.items() if k != "call"}} for tool, b in best.items()]
    return found


SECTIONS: dict[str, Callable[[Size, dict[str, Any]], Any]] = {"product": products, "top": tops}


def main() -> int:
    """Measure and print; 1 if an answer of ours is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, seconds in all: whether everything runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4, help="for the repetitions of a row (default 4)")
    parser.add_argument("--limit", type=float, default=60, help="for one row or one question to a tool (default 60)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = environment(CPU)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rounds, seconds = (3, 0.2) if arguments.quick else (60, arguments.seconds)
    effort = {"seconds": seconds, "rounds": rounds, "limit": arguments.limit}
    size = QUICK if arguments.quick else FULL
    measured = {name: SECTIONS[name](size, effort) for name in arguments.only or SECTIONS}
    if arguments.json:
        text = json.dumps({"environment": about, **measured}, indent=1, ensure_ascii=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    reached = [r["reached"] for rows in measured.get("top", {}).values() for r in rows if "hesscond" in r["tool"]]
    return int(not all(reached))


if __name__ == "__main__":
    sys.exit(main())

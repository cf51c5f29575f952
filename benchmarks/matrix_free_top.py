"""The largest eigenvalue of a whole network's Hessian by several tools, each at the fastest setting that suffices.

What a tool says of its own accuracy counts for nothing: the error is taken against the truth, at its worst over
several random starts, and each tool is given the setting that is the fastest of those that reach the accuracy. Every
time is that of a whole call, from a model and its data to a number.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matrix_free_products import row, why_not
from measuring import Outcome, TimeUp, interleaved, milliseconds, seconds_of, table, time_limit
from networks import he_network
from peers import double_by_default
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import eigsh
from torch import nn
from workloads import Size, training_set

from hesscond.hessians.network_operator import HessianOperator
from hesscond.spectra.lanczos import lanczos

#: Relative error of the eigenvalue that is asked for.
ACCURACY = 1e-6
#: Random starts at which a setting must reach it.
SEEDS = (0, 1, 2)
CPU = torch.device("cpu")
#: Tolerances of the Lanczos methods and of the power iteration, and numbers of steps of the one without a tolerance.
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
POWER_TOLERANCES = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
STEPS = (4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50)


@dataclass(frozen=True)
class Network:
    """A model with a loss and the batches of its data; ``truth`` is its largest eigenvalue."""

    model: nn.Module
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    loss_fn: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    @property
    def data(self) -> Any:
        """The only batch, or all of them."""
        return self.batches[0] if len(self.batches) == 1 else self.batches


@dataclass(frozen=True)
class Setting:
    """One way to call a tool: ``call(seed)`` returns the eigenvalue."""

    label: str
    call: Callable[[int], float]


@dataclass
class Contender:
    """A tool with the settings it is tried at, and what came of it.

    Attributes
    ----------
    tool
        Its name.
    ladders
        Settings, each sequence from the cheapest on: none is tried behind one that suffices.
    chosen, worst
        The fastest setting that suffices, or the most accurate one if none does; its worst error.
    error
        Why there is none.
    """

    tool: str
    ladders: Sequence[Sequence[Setting]]
    chosen: Setting | None = None
    worst: float = float("inf")
    error: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is the tool that is measured here."""
        return self.tool.startswith("hesscond")

    @property
    def reached(self) -> bool:
        """Whether the accuracy was reached."""
        return self.worst <= ACCURACY

    def try_all(self, truth: float, seeds: Sequence[int], limit: float) -> None:
        """Choose a setting."""
        best = (True, float("inf"))
        for ladder in self.ladders:
            for setting in ladder:
                try:
                    with time_limit(limit):
                        found = [seconds_of(lambda s=setting, i=seed: s.call(i), CPU) for seed in seeds]
                except TimeUp:
                    break
                except Exception as error:
                    self.error = f"{type(error).__name__}: {error}"
                    return
                worst = max(abs(value - truth) / abs(truth) for _, value in found)
                suffices = worst <= ACCURACY
                rank = (False, min(time for time, _ in found)) if suffices else (True, worst)
                if self.chosen is None or rank < best:
                    best, self.chosen, self.worst = rank, setting, worst
                if suffices:
                    break


def networks(size: Size, batches: int, dtype: torch.dtype) -> tuple[Network, str]:
    """fc-cifar10's network with He's weights on the first batches of its data, and where these come from."""
    samples = training_set(size, CPU)
    pairs = zip(samples.inputs.split(size.batch), samples.targets.split(size.batch), strict=True)
    data = [(inputs.to(dtype), targets) for (inputs, targets), _ in zip(pairs, range(batches), strict=False)]
    return Network(he_network(size, dtype), data), samples.source


def true_top(network: Network) -> tuple[float, float]:
    """The largest eigenvalue and a bound of its relative error: scipy on a product of a few lines, in float64.

    Two random starts must agree; the bound is ‖r‖²/gap for the true residual r, and rounding.
    """
    double = Network(copy.deepcopy(network.model).double(), [(x.double(), y) for x, y in network.batches])
    parameters = list(double.model.parameters())
    total, order = sum(len(x) for x, _ in double.batches), sum(p.numel() for p in parameters)

    def product(vector: np.ndarray) -> np.ndarray:
        parts = torch.from_numpy(vector.ravel()).split([p.numel() for p in parameters])
        result = torch.zeros(order, dtype=torch.float64)
        for inputs, targets in double.batches:
            loss = double.loss_fn(double.model(inputs), targets) * (len(inputs) / total)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            along = sum((g * part.view_as(g)).sum() for g, part in zip(gradients, parts, strict=True))
            result += torch.cat([h.reshape(-1) for h in torch.autograd.grad(along, parameters)])
        return result.numpy()

    operator, ends = ScipyOperator((order, order), matvec=product, dtype=np.float64), []
    for seed in (0, 1):
        start = np.random.default_rng(seed).standard_normal(order)
        values, vectors = eigsh(operator, k=2, which="LA", tol=1e-14, ncv=min(40, order - 1), v0=start)
        residual = np.linalg.norm(product(vectors[:, 1]) - values[1] * vectors[:, 1])
        ends.append((values[1], residual**2 / (values[1] - values[0]) / values[1]))
    (first, bound), (second, _) = ends
    if abs(first - second) > 1e-12 * first:
        raise RuntimeError(f"the truth is not known: {first!r} and {second!r} from two random starts")
    return float(first), float(bound) + 1e-15


def contenders(network: Network) -> list[Contender]:
    """All tools."""
    model, loss_fn = network.model, network.loss_fn
    own = next(model.parameters()).dtype

    def lanczos_of_ours(dtype: torch.dtype) -> list[Setting]:
        return [Setting(f"tol {tol:.0e}", ours(network, tol, dtype)) for tol in TOLERANCES]

    def operator_of_ours() -> ScipyOperator:
        return HessianOperator(model, loss_fn, network.data).to_scipy()

    def operator_of_curvlinops() -> ScipyOperator:
        from curvlinops import HessianLinearOperator

        parameters = list(model.parameters())
        # the check takes several products
        return HessianLinearOperator(model, loss_fn, parameters, network.batches, check_deterministic=False).to_scipy()

    def eigsh_of(operator: Callable[[], ScipyOperator]) -> list[list[Setting]]:
        return [
            [Setting(f"ncv {ncv}, tol {tol:.0e}", arpack(operator, ncv, tol)) for tol in TOLERANCES]
            for ncv in (6, 10, 20)
        ]

    def powers(factor: float) -> list[Setting]:
        return [Setting(f"tol {tol:.0e}", pyhessian(network, tol, factor)) for tol in POWER_TOLERANCES]

    in_own = [Contender("hesscond, products in float32", [lanczos_of_ours(own)])] if own != torch.float64 else []
    return [
        Contender("hesscond", [lanczos_of_ours(torch.float64)]),
        *in_own,
        Contender("hesscond, default", [[Setting("tol 1e-08", ours(network, 1e-8, torch.float64))]]),
        Contender("hesscond's operator, eigsh", eigsh_of(operator_of_ours)),
        Contender("curvlinops, eigsh", eigsh_of(operator_of_curvlinops)),
        Contender("PyHessian", [powers(1.0)]),
        # its vectors have norm 1/(1 + 1e-6), and its eigenvalue is off by the square of that
        Contender("PyHessian × (1 + 1e-6)²", [powers((1 + 1e-6) ** 2)]),
        Contender("hessian-eigenthings", [[Setting(f"{steps} steps", eigenthings(network, steps)) for steps in STEPS]]),
    ]


def ours(network: Network, tol: float, dtype: torch.dtype) -> Callable[[int], float]:
    """Our operator and our Lanczos; products in ``dtype``."""

    def call(seed: int) -> float:
        operator = HessianOperator(network.model, network.loss_fn, network.data, dtype=dtype)
        return float(lanczos(operator, 1, "top", tol=tol, seed=seed).eigenvalues[0])

    return call


def arpack(operator: Callable[[], ScipyOperator], ncv: int, tol: float) -> Callable[[int], float]:
    """Scipy's eigsh on an operator made for it."""

    def call(seed: int) -> float:
        A = operator()
        start = np.random.default_rng(seed).standard_normal(A.shape[0]).astype(A.dtype)
        return float(eigsh(A, k=1, which="LA", ncv=ncv, tol=tol, v0=start, return_eigenvectors=False)[0])

    return call


def pyhessian(network: Network, tol: float, factor: float) -> Callable[[int], float]:
    """PyHessian's power iteration, on a copy of the model: it leaves gradients with their graph behind."""

    def call(seed: int) -> float:
        from pyhessian import hessian

        torch.manual_seed(seed)
        model = copy.deepcopy(network.model)
        single = len(network.batches) == 1
        data = {"data": network.batches[0]} if single else {"dataloader": network.batches}
        double = next(model.parameters()).dtype == torch.float64
        try:
            with double_by_default() if double else warnings.catch_warnings():
                values, _ = hessian(model, network.loss_fn, cuda=False, **data).eigenvalues(maxIter=10_000, tol=tol)
        finally:
            model.zero_grad()
        return float(values[0]) * factor

    return call


def eigenthings(network: Network, steps: int) -> Callable[[int], float]:
    """hessian-eigenthings' Lanczos with a number of steps: it has no other way to stop."""

    def call(seed: int) -> float:
        import hessian_eigenthings as he

        operator = he.HessianOperator(network.model, network.batches, he.supervised_loss(network.loss_fn))
        steps_that_fit = min(steps, operator.size)
        return float(he.lanczos(operator, k=1, which="LA", max_iter=steps_that_fit, seed=seed).eigenvalues[0])

    return call


@dataclass
class Top:
    """The comparison on one network."""

    contenders: list[Contender]
    outcomes: list[Outcome]
    truth: float
    bound: float

    @property
    def ours_failed(self) -> bool:
        """Whether something of ours broke or was not exact enough."""
        broken = {outcome.key for outcome in self.outcomes if outcome.error is not None}
        return any(c.is_ours and (not c.reached or c.tool in broken) for c in self.contenders)

    def table(self) -> str:
        """Times next to ours, settings and worst errors."""
        ours_of = next((o.median for o in self.outcomes if o.key == "hesscond"), None)
        timed = {outcome.key: outcome for outcome in self.outcomes}
        lines = []
        for contender in self.contenders:
            outcome = timed.get(contender.tool)
            if outcome is None or outcome.error is not None or outcome.median is None:
                failed = outcome or Outcome(
                    contender.tool, contender.tool, error=contender.error or "no answer in time"
                )
                lines.append([contender.tool, "–", "–", "–", why_not(failed)])
                continue
            ratio = f"{outcome.median / ours_of:.2f}" if ours_of else "–"
            says = f"{contender.worst:.0e}" + ("" if contender.reached else ", at best")
            label = contender.chosen.label if contender.chosen else ""
            lines.append([contender.tool, milliseconds(outcome.median), ratio, label, says])
        return table(("tool", "ms", "× hesscond", "fastest setting that suffices", "true error"), lines, left=(0, 3, 4))

    def as_dict(self) -> list[dict[str, Any]]:
        """All of it, for JSON."""
        timed = {outcome.key: outcome.as_dict() for outcome in self.outcomes}
        return [
            {
                "tool": c.tool,
                "setting": c.chosen.label if c.chosen else None,
                "worst_error": c.worst if c.chosen else None,
                "reached": c.reached,
                **timed.get(c.tool, {"error": c.error}),
            }
            for c in self.contenders
        ]


def compare_tops(network: Network, *, seeds: Sequence[int], seconds: float, rounds: int, limit: float) -> Top:
    """Find every tool's setting, then time them by turns."""
    truth, bound = true_top(network)
    found = contenders(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for contender in found:
            contender.try_all(truth, seeds, limit)
        rows = [row(c.tool, c.tool, lambda s=c.chosen: s.call(SEEDS[0])) for c in found if c.chosen is not None]
        return Top(found, interleaved(rows, CPU, seconds=seconds, rounds=rounds, limit=limit), truth, bound)

"""The judge: every level of a case, its Hessians and condition numbers compared with the truth, or its refusal."""

import ast
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import hesscond
from hesscond.capture import eligible_layers
from hesscond.errors import HesscondError
from tests.catalogue.cases import LEVELS
from tests.catalogue.truths import ADVICE, Truth

#: Allowed relative difference of an interval from κ.
TOLERANCE = 1e-6
#: |λ|/|λ|_max that a numerical rank may take for zero.
NUMERICAL = 1e-12


@dataclass(frozen=True)
class Verdict:
    """What one Hessian's κ is worth: "right", "wrong" or "unresolved", and a sentence."""

    word: str
    sentence: str

    @property
    def text(self):
        """What the page says of it."""
        return "not resolved" if self.word == "unresolved" else self.sentence


def verdict_of(kappa, true, *, signed=True):
    """The verdict on a `ConditionNumber` by the true spectrum; ``signed``: the number of negative ones counts."""
    fewest, most = true.ranks
    zero_said = kappa.rank == 0 and (kappa.rank_decision == "zero" or kappa.solver == "zero matrix")
    if most == 0:
        if kappa.resolved and kappa.rank:
            return Verdict("wrong", f"{kappa}; the Hessian is zero")
        return Verdict("right", "the Hessian is zero") if zero_said else Verdict("unresolved", f"{kappa}; it is zero")
    sizes = [abs(value) for value in true.values]

    def ratio(rank):
        return float(sizes[0] / sizes[rank - 1])

    truth = f"truly κ = {ratio(most):.6g}, rank {most} of {len(sizes)}"
    if not kappa.resolved:
        known = sizes[most - 1] > 1e3 * true.error
        if known and not kappa.lower <= ratio(most) * (1 + TOLERANCE):
            return Verdict("wrong", f"κ ≥ {kappa.lower:.6g}; {truth}")
        if zero_said and sizes[0] > true.rounding:
            return Verdict("wrong", f"called zero; {truth}, |λ| up to {float(sizes[0]):.1e}")
        return Verdict("unresolved", f"not resolved; {truth}")
    said = f"κ = {kappa.value:.6g} in [{kappa.lower:.6g}, {kappa.upper:.6g}], {kappa.rank_decision} rank {kappa.rank}"
    rank = kappa.rank
    if not 0 < rank <= most:
        return Verdict("wrong", f"{said}; {truth}")
    if rank < fewest and (kappa.rank_decision != "numerical" or sizes[rank] > NUMERICAL * sizes[0]):
        return Verdict("wrong", f"{said}; {truth}")
    value, slack = ratio(rank), TOLERANCE + (0 if true.told else 2 * float(true.error / sizes[rank - 1]))
    if not kappa.lower * (1 - slack) <= value <= kappa.upper * (1 + slack):
        return Verdict("wrong", f"{said}; {truth}")
    negative = sum(v < 0 for v in true.values[:rank])
    if signed and kappa.negative_counted and fewest == most and kappa.negative != negative:
        return Verdict("wrong", f"{said}, {kappa.negative} negative; truly {negative}")
    return Verdict("right", f"κ = {kappa.value:.4g} (rank {rank} of {len(sizes)})")


@dataclass
class Cell:
    """One level of one case.

    Attributes
    ----------
    text
        What the page says.
    compared
        Hessians compared with the truth, of all layers.
    faults
        What is wrong; nothing, if all is well.
    """

    text: str = ""
    compared: int = 0
    faults: list[str] = field(default_factory=list)


@functools.cache
def measured(case):
    """{level: cell} of a case whose library is there."""
    if case.judge is not None:
        found = case.judge()
        cell = Cell(found[0][1].text, len(found), [f"{where}: {v.sentence}" for where, v in found if v.word == "wrong"])
        return {level: cell if level in case.levels else Cell("not tried") for level in LEVELS}
    return processes(case) if case.processes > 1 and not dist.is_initialized() else here(case)


def here(case):
    """Measured by this process, which has its share of the data if there are others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, loss_fn, batch, *by_hand = case.build()
        options = case.arguments(model, loss_fn, batch)
        truth = case.true(model, loss_fn, batch, *by_hand, options=options)
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            batch = tree_map_only(torch.Tensor, lambda t: t[rank::size], batch)

        def probe(**changed):
            torch.manual_seed(1)
            return hesscond.probe(model, loss_fn, batch, **{**options, **changed})

        return {
            level: judged(case, level, model, truth, probe) if level in case.levels else Cell("not tried")
            for level in LEVELS
        }


def judged(case, level, model, truth, probe):
    """One level of a case; ``probe`` calls `hesscond.probe` on it, with arguments beside those of the case."""
    found, before = Cell(), state(model)
    try:
        answered(found, case, level, model, truth, probe)
    except HesscondError as error:
        found.text = str(error)
        found.faults += ["the refusal has several lines"] * ("\n" in found.text)
        found.faults += [f"a false alarm: {error}"] * case.control
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        found.text = f"{type(error).__name__}: {error}".splitlines()[0]
        found.faults.append(f"{found.text} ({Path(where.filename).name}:{where.lineno})")
    found.faults += [f"the model's {what} changed" for what, was in before.items() if not same(was, state(model)[what])]
    return found


def answered(found, case, level, model, truth, probe):
    """What one level of a case gives, unless it is refused: written into its cell."""
    torch.manual_seed(1)
    drawn = generators()
    result = probe(level=level)
    if generators() != drawn:
        found.faults.append("the random generators have moved on")
    verdicts = compare(found, case, result, truth)
    if level != "network" and not case.options and isinstance(truth, Truth):
        found.faults += [f"{one} is neither measured nor skipped" for one in forgotten(result, truth)]
        found.faults += refused_advice(result, probe, level)
    refused = {name: why for name, why in result.skipped.items() if name in eligible_layers(model)}
    if case.control:
        found.faults += [f"{name}: a false alarm: {why}" for name, why in refused.items()]
    name = "network" if level == "network" else case.layer
    # modules of other kinds have to be named
    if level == "layer" and name not in result and (case.close or name not in refused):
        result = probe(level=level, layers=[name])
        verdicts = compare(found, case, result, truth)
    if name in result:
        found.text = number(result, name) if case.close else verdicts[name].text
    elif name in result.skipped:
        found.text = result.skipped[name]
    else:
        found.faults.append(f"{name} is neither measured nor skipped")


def compare(found, case, result, truth):
    """Judge every Hessian of a result; {layer: verdict on its first}."""
    first = {}
    for name, block in result.items():
        units = block.units if block.level == "unit" else [None]
        for unit, kappa in zip(units, block.conditions, strict=True):
            true = truth.spectrum(block, unit)
            if isinstance(true, str):
                verdict = Verdict("wrong", true)
            else:
                true = true.strict if case.close else true
                fault = difference(block, unit, true.matrix, case.close)
                verdict = Verdict("wrong", fault) if fault else verdict_of(kappa, true, signed=case.signed)
            found.compared += 1
            if verdict.word == "wrong":
                found.faults.append(f"{name}{'' if unit is None else f', unit {unit}'}: {verdict.sentence}")
            first.setdefault(name, verdict)
    return first


def difference(block, unit, true, close):
    """How far a Hessian is from the true one, if it is not close; None is close to all."""
    if true is None or close is None:
        return None
    ours = block.operator.to_dense() if block.level == "network" else block.hessian(unit)
    if ours.shape != true.shape:
        return f"of shape {tuple(ours.shape)} instead of {tuple(true.shape)}"
    scale, off = float(true.abs().max()), float((ours - true).abs().max())
    return f"differs from the truth by {off:.1e}, of entries up to {scale:.1e}" if off > close * scale + 1e-14 else None


def refused_advice(result, probe, level):
    """What `skipped` advises and is then refused."""
    refused = []
    for layers, other in {advice for why in result.skipped.values() for advice in ADVICE.findall(why)}:
        try:
            probe(layers=ast.literal_eval(layers), level=other or level)
        except HesscondError as error:
            refused.append(f"layers={layers} is advised and refused: {error}")
    return refused


def number(result, name):
    """κ of the layer, or of its first unit, and what it was checked to."""
    own = result[name]
    kappa = own.conditions[0]
    value = f"κ = {kappa.value:.4g}" if kappa.resolved else f"κ ≥ {kappa.lower:.2g}, not resolved"
    negative = f", {kappa.negative} negative" if kappa.negative else ""
    precision = "" if result.precision == "float64" else f"; {result.precision}"
    return f"{value} (rank {kappa.rank} of {own.n_params}{negative}); {checked(own.check)}{precision}"


def checked(check):
    """A bound on the difference to the model's own product, coarse: rounding differs from machine to machine."""
    return f"checked to {1e-8 if check.difference <= 1e-8 else check.difference:.0e}"


def forgotten(result, truth):
    """Parameters with a gradient that are in no Hessian and are not named as skipped."""
    # a tied one under any of its names
    told = {int(where.flatten()[0]) for name, where in truth.index.items() if is_told(name, result)}
    wanted = truth.trained & truth.reached
    return [name for name in sorted(wanted) if int(truth.index[name].flatten()[0]) not in told]


def is_told(parameter, result):
    """Whether a parameter is measured, or it or the module that it belongs to is skipped."""
    measured = set(itertools.chain.from_iterable(own.parameters for own in result.values()))
    parts = parameter.split(".")
    owners = {".".join(parts[: i + 1]) for i in range(len(parts))} | {"model"}
    return parameter in measured or bool(owners & set(result.skipped))


def state(model):
    """What a probe must leave alone."""
    return {
        "parameters and buffers": {name: full(t).detach().clone() for name, t in model.state_dict().items()},
        "gradients": [p.grad is None for p in model.parameters()],
        "attributes": [
            (key, value)
            for module in model.modules()
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        ],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    }


def full(tensor):
    """This process's part of a tensor, without gaps."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).to_dense()


def same(was, now):
    """Whether two states are equal bit by bit."""
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(torch.equal(was[key], now[key]) for key in was)
    return was == now


def generators():
    """States of the random generators, comparable."""
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002


def processes(case):
    """Measured by several processes of torch.distributed; what the first one found."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}", __file__, case.name]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        failure = Cell("the processes ended with an error", faults=[done.stderr[-2000:]])
        return dict.fromkeys(LEVELS, failure)
    return {level: Cell(**own) for level, own in json.loads(done.stdout.splitlines()[-1]).items()}


def one_of_several(name):
    """What each of several processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from tests.catalogue import case

    cells = measured(case(name))
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {level: asdict(own) for level, own in cells.items()})
    for other in told[1:]:
        for level, own in other.items():
            told[0][level]["faults"] += [f"another process: {fault}" for fault in own["faults"]]
            if own["text"] != told[0][level]["text"]:
                told[0][level]["faults"].append(f"another process says: {own['text']}")
    if dist.get_rank() == 0:
        print(json.dumps(told[0]), flush=True)
    dist.barrier()
    # gloo's threads may abort a process that takes down its groups after the others have gone
    os._exit(0)


if __name__ == "__main__":
    one_of_several(sys.argv[1])

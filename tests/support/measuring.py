"""Every kind of model at every level: the number and how far it is from the truth, or the sentence of the refusal."""

import ast
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import hesscond
from hesscond.errors import HesscondError
from tests.support import batches, constructions, kinds, libraries
from tests.support.judging import Construction, text_of
from tests.support.truth import ADVICE, Truth

KINDS = [*kinds.KINDS, *batches.KINDS, *libraries.KINDS, *constructions.KINDS]
LEVELS = ("unit", "layer", "network")
#: Allowed relative difference of a Hessian to the truth.
CLOSE = 1e-8
#: Eigenvalues of the truth above and below these, relative to the largest, are and are not zero.
NONZERO, ZERO = 1e-7, 1e-13


@dataclass
class Cell:
    """One level of one kind.

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
def measured(kind):
    """{level: cell} of a kind whose library is there."""
    if isinstance(kind, Construction):
        return {level: judged(kind, level) for level in LEVELS}
    return processes(kind) if kind.processes > 1 and not dist.is_initialized() else here(kind)


def judged(one, level):
    """One level of a construction."""
    if level not in one.levels:
        return Cell("not tried")
    found = one.verdicts(level)
    wrong = [f"{where}: {verdict.sentence}" for where, verdict in found if verdict.word == "wrong"]
    if one.control:
        wrong += [
            f"{where}: a false alarm: {verdict.sentence}" for where, verdict in found if verdict.word == "refused"
        ]
    return Cell(text_of(found, one.layer), sum(verdict.word != "refused" for _, verdict in found), wrong)


def here(kind):
    """Measured by this process, which has its share of the data if there are others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, loss_fn, batch, *by_hand = kind.make()
        single = all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())
        truth = Truth(kind.twin(model), loss_fn, batch, *by_hand, draws=torch.float32 if single else None)
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            batch = tree_map_only(torch.Tensor, lambda t: t[rank::size], batch)
        return {level: cell(kind, level, model, loss_fn, batch, truth) for level in LEVELS}


def cell(kind, level, model, loss_fn, batch, truth):
    """One level of a kind."""
    found = Cell()
    name = "network" if level == "network" else kind.layer
    before = state(model)
    with watched(found):
        torch.manual_seed(1)
        drawn = generators()
        result = hesscond.probe(model, loss_fn, batch, level=level)
        if generators() != drawn:
            found.faults.append("the random generators have moved on")
        compare(found, result, truth, level)
        if level != "network":
            found.faults += [f"{one} is neither measured nor skipped" for one in forgotten(result, truth)]
            found.faults += refused_advice(result, model, loss_fn, batch, level)
        if name not in result and level == "layer":
            torch.manual_seed(1)
            result = hesscond.probe(model, loss_fn, batch, layers=[name], level=level)
            compare(found, result, truth, level)
        if name in result:
            found.text = number(result, name)
        elif name in result.skipped:
            found.text = result.skipped[name]
        else:
            found.faults.append(f"{name} is neither measured nor skipped")
    found.faults += [f"the model's {what} changed" for what, was in before.items() if not same(was, state(model)[what])]
    return found


def refused_advice(result, model, loss_fn, batch, level):
    """What `skipped` advises and is then refused."""
    refused = []
    for layers, other in {advice for why in result.skipped.values() for advice in ADVICE.findall(why)}:
        try:
            torch.manual_seed(1)
            hesscond.probe(model, loss_fn, batch, ast.literal_eval(layers), other or level)
        except HesscondError as error:
            refused.append(f"layers={layers} is advised and refused: {error}")
    return refused


class watched:
    """A refusal is the text of the cell; another exception is a fault, and so is a refusal of several lines."""

    def __init__(self, found):
        self.found = found

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, HesscondError):
            self.found.text = str(error)
            if "\n" in str(error):
                self.found.faults.append("the refusal has several lines")
            return True
        if isinstance(error, Exception):
            where = traceback
            while where.tb_next:
                where = where.tb_next
            code = where.tb_frame.f_code
            self.found.text = f"{kind.__name__}: {error}".splitlines()[0]
            self.found.faults.append(f"{self.found.text} ({Path(code.co_filename).name}:{where.tb_lineno})")
            return True
        return False


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


def compare(found, result, truth, level):
    """Every Hessian of the result with the truth, and every κ with the truth's eigenvalues."""
    for name, own in result.items():
        if level == "unit":
            rows = truth.units(name, own.parameters)
            pairs = [(f"{name}, unit {u}", own.hessian(u), truth.at(rows[u])) for u in own.units]
        elif level == "layer":
            # of a dense or convolutional layer with its own weight: unit by unit
            plain = set(own.parameters) <= {f"{name}.weight", f"{name}.bias"} and name in truth.layers
            where = truth.units(name, own.parameters).flatten() if plain else truth.flat(own.parameters)
            pairs = [(name, own.hessian(), truth.at(where))]
        else:
            pairs = [(name, own.operator.to_dense(), truth.at(truth.flat(own.parameters)))]
        for (where, ours, true), kappa in zip(pairs, own.conditions, strict=True):
            found.compared += 1
            found.faults += [f"{where}: {fault}" for fault in differences(ours, true, kappa)]


def differences(ours, true, kappa):
    """What is wrong with a Hessian and with its κ."""
    if ours.shape != true.shape:
        return [f"of shape {tuple(ours.shape)} instead of {tuple(true.shape)}"]
    scale = float(true.abs().max())
    difference = float((ours - true).abs().max())
    if difference > CLOSE * scale + 1e-14:
        return [f"differs from the truth by {difference:.1e}, of entries up to {scale:.1e}"]
    sizes = torch.linalg.eigvalsh(true).abs()
    nonzero = sizes[sizes > NONZERO * sizes.max()]
    if scale == 0 or len(nonzero) + int((sizes < ZERO * sizes.max()).sum()) < len(sizes):
        return []  # eigenvalues in double precision do not tell
    value, faults = float(sizes.max() / nonzero.min()), []
    if not kappa.lower <= value * (1 + 1e-6) or not value * (1 - 1e-6) <= kappa.upper:
        faults.append(f"κ between {kappa.lower:.6g} and {kappa.upper:.6g}, truly {value:.6g}")
    if kappa.resolved and kappa.rank != len(nonzero):
        faults.append(f"rank {kappa.rank}, truly {len(nonzero)}")
    return faults


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


def processes(kind):
    """Measured by several processes of torch.distributed; what the first one found."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kind.processes}", __file__, kind.name]
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
    cells = measured(next(kind for kind in KINDS if kind.name == name))
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

"""Search for wrong condition numbers: random programs and random constructions against dense double backward.

    PYTHONPATH=CHECKOUT python benchmarks/random_search.py --programs 500 --constructions 1000 --seed 0

A program is written by ``tests/random_programs.py``: layers, activations, normalizations, losses, ragged streams, at a
random level, in plain, in some linear or in Adam's coordinates, its loss scaled by 1e±30 at times. Its κ, rank, λ_max,
λ_min are compared with the eigenvalues of the dense Hessian by two calls of `torch.autograd.grad`. A construction is
one of ``tests/support/constructions.py`` at a random level with other random numbers, judged as there.
"""

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

import hesscond
from hesscond.errors import HesscondError

# hesscond may be that of another checkout, and is imported by now
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzzing import Sheared, batches_of, built, places, seeded
from tests.random_programs import write
from tests.support.constructions import DIFFERENCES, KINDS, elementwise_of
from tests.support.judging import Spectrum, Verdict, verdict_of, worst

LEVELS, PACKAGE = ("unit", "layer", "network"), str(Path(hesscond.__file__).parent)
#: Words of a refusal by the check against differences of the gradient, and by the one against double backward.
ALARMS = {
    "second check": ("central difference", "not those of its gradient"),
    "first check": ("does not agree with the model",),
}
#: Relative distance of λ_max and λ_min, and rounding of a block relative to the whole network's |λ|_max.
CLOSE, ROUNDING = 1e-6, 1e-14


def plain_weight_norm(v, g, dim=0):
    """The quotient; the second derivatives of torch's kernel are wrong."""
    return g * v / torch.norm_except_dim(v, 2, dim)


class Dense:
    """The Hessian of a program in all its parameters, as `torch.autograd.grad` has it."""

    def __init__(self, program, factor):
        module = built(Program(program), double=True)
        kernel, torch._weight_norm = torch._weight_norm, plain_weight_norm
        try:
            total, mass = 0, 0
            for number in range(len(batches_of(module.make()[2]))):
                model, loss_fn, data = module.make()
                tensors = [p.requires_grad_() for p in model.parameters()]
                inputs, target = batches_of(data)[number]
                seeded()
                loss = factor * loss_fn(model(inputs), target)
                weight = 1 if program.summed else len(inputs)
                total, mass = total + weight * dense(loss, tensors), mass + weight
        finally:
            torch._weight_norm = kernel
        self.model, matrix = model, total if program.summed else total / mass
        self.error = 4 * float((matrix - matrix.T).abs().max())
        self.matrix = (matrix + matrix.T) / 2
        self.error += ROUNDING * float(torch.linalg.eigvalsh(self.matrix).abs().max())
        starts = torch.arange(len(matrix)).split([p.numel() for p in tensors])
        self.index = {name: where for (name, _), where in zip(model.named_parameters(), starts, strict=True)}

    def spectrum(self, own, unit, P):
        """The eigenvalues of a block of a result, or None if it is round-off of the network's Hessian."""
        where = torch.cat([self.index[name][flat] for name, flat in places(self.model, own, unit)])
        block = self.matrix[where][:, where]
        if P is not None:
            P = P(own, where, unit)
            block = P.T @ block @ P
        true = Spectrum.of((block + block.T) / 2)
        error = self.error * (1 if P is None else float(P.abs().sum(0).max()) ** 2)
        return Spectrum(true.values, true.error + error, true.most)


def dense(loss, tensors):
    """The (P, P) Hessian of a loss."""
    width = sum(p.numel() for p in tensors)
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
    rows = []
    for entry in torch.cat([g.flatten() for g in gradients]):
        if not entry.requires_grad:
            rows.append(torch.zeros(width, dtype=torch.float64))
            continue
        parts = torch.autograd.grad(entry, tensors, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows).detach()


class Program:
    """A program whose checkpoints let `torch.autograd.grad` through."""

    def __init__(self, program):
        self.seed = program.seed
        self.source = program.source.replace("use_reentrant=True", "use_reentrant=False")


def sheared(method):
    """P of some linear coordinates, unit by unit."""

    def P(own, where, unit):
        n = len(where) if unit is not None else own_order(own, where)
        one = method.multiply(torch.eye(n, dtype=torch.float64), n)
        return torch.block_diag(*[one] * (len(where) // n))

    return P


def own_order(own, where):
    """The number of parameters of a unit in a layer's block."""
    units = own.block(None).units
    return len(where) // units


def adam(model, loss_fn, data):
    """Adam after two steps, and √M by parameter name."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs, target = batches_of(data)[0]
    for _ in range(2):
        optimizer.zero_grad()
        seeded()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
    model.zero_grad()
    scales = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
            if p in optimizer.state:
                state = optimizer.state[p]
                root = (state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
                scales[name] = root.rsqrt().flatten()
    return optimizer, scales


def probed(seed):
    """What became of a program: [(level or block, `Verdict`)]."""
    rng = random.Random(seed)
    program = write(seed)
    level, factor = rng.choice(LEVELS), rng.choice([1.0] * 8 + [1e-30, 1e30])
    # a first step changes running statistics, counters and generators, which the truth does not see
    still = not any(
        word in program.source for word in ("BatchNorm", "running", "calls", "source", "spectral", "random")
    )
    kind = rng.choice(["plain"] * 3 + ["sheared"] + ["adam"] * still)
    model, loss_fn, data = built(program).make()
    truth, P, method = Dense(program, factor), None, None
    if kind == "sheared" and level != "network":
        method = Sheared()
        P = sheared(method)
    elif kind == "adam":
        method, scales = adam(model, loss_fn, data)

        def P(own, where, unit):
            names = places(truth.model, own, unit)
            return torch.diag(torch.cat([scales[name][flat] for name, flat in names]))

    seeded()
    result = hesscond.probe(model, lambda o, t: factor * loss_fn(o, t), data, level=level, method=method)
    found = []
    for name, own in result.items():
        for unit, kappa in zip(own.units if level == "unit" else [None], own.conditions, strict=True):
            where = f"{level} {kind} {name}" + ("" if unit is None else f"[{unit}]")
            found.append((where, judged(kappa, truth.spectrum(own, unit, P), mixed=result.precision != "float64")))
    return found


def judged(kappa, true, mixed):
    """The verdict on κ, rank, λ_max and λ_min."""
    size = float(abs(true.values[0]))
    if size <= true.error:
        at_roundoff = kappa.resolved and kappa.rank
        return Verdict(
            "roundoff" if at_roundoff else "right", f"{kappa}, where H is {size:.1e}, round-off {true.error:.1e}"
        )
    if mixed:
        true = Spectrum(true.values, true.error + 1e-7 * size, true.most)
    verdict = verdict_of(kappa, true, signed=not mixed)
    if verdict.word != "right" or not kappa.rank:
        return verdict
    for own, value in ((kappa.lambda_max, size), (kappa.lambda_min, float(abs(true.values[kappa.rank - 1])))):
        if abs(own - value) > CLOSE * value + 2 * true.error:
            return Verdict("wrong", f"{kappa}: |λ| = {own:.8g}, truly {value:.8g}")
    return verdict


def random_construction(seed):
    """(title, verdicts, construction) of a seed."""
    rng = random.Random(seed)
    factor = rng.choice([1.0] * 4 + [1e-30, 1e30])
    one = rng.choice([kind for kind in KINDS if kind.judge is None or rng.random() < 0.3])
    if one.name.startswith("loss_") and rng.random() < 0.7:
        key = one.name.removeprefix("loss_")
        low, high = DIFFERENCES[key][3][:2]
        # another part of the range, and a little beyond its ends
        a, b = sorted(low + (high - low) * rng.uniform(-0.1, 1.1) for _ in range(2))
        one = elementwise_of(key, (a, b + 0.01 * (high - low), rng.randint(3, 12)))
    level = rng.choice(one.levels)
    return f"{one.trust} {one.name} at level {level}, loss × {factor:g}", one.verdicts(level, seed, factor), one


def count(totals, seed, found, title, shown, control=True):
    """Count a program or construction by its worst verdict, and show it if it is wrong."""
    words = [verdict.word for _, verdict in found]
    first = next((word for word in ("wrong", "traceback", "roundoff") if word in words), None)
    word = first or (worst(found) if found else "nothing probed")
    if word == "refused":
        sentence = next(verdict.sentence for _, verdict in found if verdict.word == "refused")
        alarm = next((name for name, texts in ALARMS.items() if any(text in sentence for text in texts)), None)
        word = "refused" if alarm is None else f"refused by the {alarm}" + (" (false alarm)" if control else "")
    totals[word] += 1
    if word in ("wrong", "roundoff", "traceback") or "false alarm" in word:
        shown.append(seed)
        print(f"{word}: seed {seed} {title}")
        for where, verdict in [pair for pair in found if pair[1].word not in ("right", "unresolved")][:2]:
            print(f"    {where}: {verdict.sentence[:300]}", flush=True)


def search(what, number, start):
    """Judge this many programs or constructions, and print what they were."""
    totals, shown, began = Counter(), [], time.perf_counter()
    for seed in range(start, start + number):
        title, control = "", True
        try:
            if what == "programs":
                found = probed(seed)
            else:
                title, found, one = random_construction(seed)
                control = one.control
        except HesscondError as error:
            found = [("", Verdict("refused", str(error)))]
        except Exception:
            where = traceback.format_exc().strip().splitlines()
            if not any(f"{PACKAGE}/" in line for line in where):
                # some programs do not fit together
                totals["program does not run"] += 1
                continue
            found = [("", Verdict("traceback", f"{where[-1]} at {where[-3].strip()}"))]
        count(totals, seed, found, title, shown, control)
    took = time.perf_counter() - began
    print(f"\n{number} {what} from seed {start} in {took:.0f} s: ", end="")
    print(", ".join(f"{n} {word}" for word, n in totals.most_common()), f"\nseeds to look at: {shown}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--constructions", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"judged: {PACKAGE}\n")
    if chosen.programs:
        search("programs", chosen.programs, chosen.seed)
    if chosen.constructions:
        search("constructions", chosen.constructions, chosen.seed)

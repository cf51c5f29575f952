"""Random programs, each probed and judged by finite differences of its own gradients: no wrong number, no traceback."""

import functools
from collections import Counter

import pytest
import torch

import hesscond
from hesscond.errors import HesscondError
from hesscond.problem.evaluation import runs
from tests.fuzzing import LEVELS, built, judged, random_states, seeded, state_of
from tests.random_programs import write


def check(seeds):
    """Judge the programs of these seeds; at least 80 % must have an answer, of ten two fewer."""
    answered = Counter()
    for seed in seeds:
        program = write(seed)
        found = judged(program)
        for kind in ("wrong", "traceback"):
            sentences = "\n".join(getattr(found, kind))
            assert not sentences, f"{kind}, program {seed} at level {program.level}:\n{sentences}\n\n{program.source}"
        answered[bool(found.right or found.kink)] += 1
    assert answered[True] >= 0.8 * answered.total() - 2, answered


@pytest.mark.share(20)
@pytest.mark.parametrize("part", range(40))
def test_five_random_programs_are_measured_rightly_or_refused(part):
    check(range(5 * part, 5 * part + 5))


@pytest.mark.share(20)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_programs_are_measured_rightly_or_refused(part):
    check(range(1000 + 100 * part, 1100 + 100 * part))


def leaves_alone(seed):
    """Whether a program's model and all random generators are as before at every level, and two probes agree."""
    program = write(seed)
    model, loss_fn, data = built(program).make()
    # some programs do not fit together, and do not run by themselves
    if not runs(model, loss_fn, data[0] if isinstance(data, list) else data):
        return
    seeded()
    before = state_of([model, random_states()])
    # TorchScript fuses a function after its first calls, which changes last digits
    scripted = "torch.jit.script" in program.source
    equal = functools.partial(torch.allclose, rtol=1e-9, atol=1e-12) if scripted else torch.equal
    for level in LEVELS:
        try:
            one, other = (hesscond.probe(model, loss_fn, data, level=level) for _ in range(2))
            same = all(
                equal(one[name].hessian(unit), other[name].hessian(unit))
                for name in one
                for unit in (one[name].units if level == "unit" else [None])
            )
        except HesscondError:
            same = True
        where = f"program {seed} at level {level}:\n\n{program.source}"
        assert same, f"two probes differ, {where}"
        assert state_of([model, random_states()]) == before, f"something is not as it was, {where}"


@pytest.mark.share(8)
@pytest.mark.parametrize("seed", range(300, 324))
def test_a_probe_leaves_everything_as_it_was(seed):
    leaves_alone(seed)


@pytest.mark.share(10)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_probes_leave_everything_as_it_was(part):
    for seed in range(4000 + 50 * part, 4050 + 50 * part):
        leaves_alone(seed)

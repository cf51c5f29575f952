"""What is true of all statements: many trials, and counterexamples from any seed."""

import pytest

from hesscond.errors import ConfigError
from hesscond.theorems import statement, statements, verify
from tests.theorems.verdicts import check_known

#: Trials of a slow test, where a trial is dear or cheap; 1,500 of the others.
TRIALS = {
    **dict.fromkeys(("prec-theorem-1", "bnp-theorem-1", "cwo-rate", "wc-quadratic"), 700),
    **dict.fromkeys(("bnp-theorem-3", "bnp-proposition-9", "bnp-merging", "muon-row-blocks"), 3000),
    **dict.fromkeys(("prec-l2-z", "prec-l2-p", "prec-gradient-regularization", "bnp-proposition-11"), 5000),
    **dict.fromkeys(("bnp-proposition-2", "bnp-proposition-5", "bnp-proposition-7", "bnp-proposition-10"), 10_000),
    **dict.fromkeys(("bnp-algorithm-2", "bnp-algorithm-3", "prec-averages", "cwo-projection"), 10_000),
}
IDS = [one.id for one in statements()]
#: What `check_known` is asked of statements that have no test with more to say.
KNOWN = {
    "van-der-sluis": {"trials": 15},
    "bnp-algorithm-2": {"trials": 60},
    "bnp-algorithm-3": {"trials": 60},
    "bnp-merging": {"trials": 40},
    "bnp-normalization-layers": {"trials": 20},
    "bnp-property-a": {"trials": 40},
    "bnp-proposition-7": {"trials": 60, "least": 0.4},
    "bnp-proposition-10": {"trials": 100},
    "prec-averages": {"trials": 60},
    "bnp-proposition-6": {"trials": 40, "seldom": ("comparison, sums shared",)},
    "softmax-row-blocks": {"trials": 40},
    "muon-row-blocks": {"trials": 100, "least": 0.4},
    **{f"cwo-{name}": {"trials": 20} for name in ("variance", "mean", "standardized-gradient", "projection")},
}
#: The same of those whose trials are dear.
SLOW = {
    "bnp-proposition-2": {"trials": 100, "least": 0.1},
    "bnp-theorem-3": {"trials": 100},
    "bnp-proposition-9": {"trials": 100},
    "bnp-proposition-11": {"trials": 150},
    **{f"prec-{name}": {"trials": 100} for name in ("l2-z", "l2-p", "gradient-regularization")},
}


@pytest.mark.share(3)
@pytest.mark.parametrize("id", [*KNOWN, *(pytest.param(id, marks=pytest.mark.slow) for id in SLOW)])
def test_what_is_known(id):
    check_known(id, **(KNOWN | SLOW)[id])


@pytest.mark.share(8)
@pytest.mark.slow
@pytest.mark.parametrize("id", IDS)
def test_many_trials(id):
    assert verify(id, trials=TRIALS.get(id, 1500), seed=7, counterexamples=False).ok


@pytest.mark.share(8)
@pytest.mark.parametrize("id", [one.id for one in statements() if any(not claim.true for claim in one.claims)])
def test_counterexamples_from_any_seed(id):
    false = {claim.name for claim in statement(id).claims if not claim.true}
    for seed in range(2):
        found = list(statement(id).counterexamples(seed))
        assert {example.claim for example in found} == false
        assert all(example.factor > 1 for example in found)


@pytest.mark.parametrize("trials", [0, 1.5, "3"])
def test_a_number_of_trials_is_a_whole_one(trials):
    with pytest.raises(ConfigError, match="trials must be a whole number from 1 on, not "):
        verify("van-der-sluis", trials=trials)

"""Every registered method is tested here by being registered; and the registry itself."""

import re

import pytest
import torch

from hesscond.data import load
from hesscond.errors import ConfigError
from hesscond.methods import Method, method_class, parse, register, registered
from hesscond.study import RunPlan, load_study, open_run, run
from hesscond.study.grid import Overrides
from hesscond.study.runner import check_plan
from tests.methods.contract import MethodContract, network


class TestRegistered(MethodContract):
    specs = tuple(m.name for m in registered())


@pytest.mark.share(6)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [m.name for m in registered()])
def test_its_default_rate_trains(name, seed, tmp_path):
    study = Overrides(probe_every=0).apply(load_study("fc-digits"))
    plan = RunPlan(study, name, seed, parse(name).rate, tmp_path / "run", torch.device("cpu"))
    try:
        check_plan(plan, load("digits"))
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    run(plan, load("digits"))
    stored = open_run(plan.folder)
    assert stored.status == "finished"
    assert stored.table("evaluation")["test_accuracy"].iloc[-1] > 0.8


def test_a_name_is_registered_once():
    class Again(method_class("vanilla")):
        name = "bnp"

    with pytest.raises(ConfigError, match="registered already"):
        register(Again)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nothing", "unknown method 'nothing': choose from"),
        ("bnp:rho", "not of the form"),
        ("bnp:rho=", "not of the form"),
        ("bnp:tau=1", "no option 'tau': it has epsilon_1, epsilon_2, rho"),
        ("bnp:rho=much", "'rho' of method 'bnp' must be a valid number, not 'much'"),
        ("bnp+bnp", "twice"),
        ("bnp+adam", "bnp and adam both precondition the gradient"),
        ("sphere+weightnorm", "sphere constrains the weights, which weightnorm computes"),
        ("vanilla:x=1", "no option 'x': it has none"),
        ("", "unknown method ''"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse(text)


OUT_OF_RANGE = [
    *("adam:epsilon=0", "adam:beta_1=1", "adamw:weight_decay=-1", "rmsprop:alpha=nan", "rmsprop:epsilon=inf"),
    *("bnp:rho=1", "bnp:epsilon_1=-1", "bnp:refresh=0", "bnp:epsilon_2=nan", "batchnorm:momentum=0"),
    *("sphere:seed=-1", "whitening:rho=1", "whitening:epsilon=0", "whitening:update_every=0", "sphere:c=0"),
    *("sphere:noise_scale=-1", "l2:strength=-1", "gradient-regularization:strength=nan"),
    *("weightstandardization:epsilon=-1", "sphere:c=nan", "shampoo:epsilon=0", "soap:beta=1", "muon:steps=0"),
    *("psgd:fitting_rate=1", "kfac:damping=0", "sophia:gamma=0", "adahessian:power=2"),
    *("gauss-newton:damping=0", "gauss-newton:widest=0", "batchrenorm:r_max=inf", "four-things-batchnorm:ghost=0"),
    *("four-things-batchnorm:example_weight=2", "batchrenorm:start=-1"),
]


@pytest.mark.parametrize("spec", OUT_OF_RANGE)
def test_options_out_of_range_are_refused(spec):
    name, option, value = re.fullmatch(r"(.*):(.*)=(.*)", spec).groups()
    with pytest.raises(ConfigError, match=rf"method '{name}': {option} must be (above|at least) .*, not {value}"):
        parse(spec).create(network("mlp"))


def test_the_rate_of_several_methods_is_the_smallest():
    parts = ("batchnorm", "weightstandardization")
    assert parse("+".join(parts)).rate == method_class(parts[1]).rate < method_class(parts[0]).rate


def test_options_reach_the_method():
    method = parse("bnp:rho=0.5").create(network("mlp"))
    assert method.rho == 0.5
    assert parse("bnp:rho=0.5").folder == "bnp-rho-0.5"


def test_a_method_that_promises_data_coordinates_and_has_none_says_so():
    """One sentence for whoever writes a method, no traceback."""

    class Promising(Method):
        name, summary, source, needs_statistics = "promising", "-", "-", True

    with pytest.raises(ConfigError, match="'promising' has no coordinates that the data define"):
        Promising.data_statistics("fc1", None)

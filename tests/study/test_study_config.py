"""Study files: the built-in ones, and what is wrong with others."""

from functools import partial

import pytest

from hesscond.errors import ConfigError
from hesscond.study import load_study, resolve_device
from hesscond.study.structure import probed_blocks
from tests.cli_targets import STUDY, changed_study


@pytest.fixture
def written(tmp_path):
    return partial(changed_study, tmp_path / "tiny.toml")


#: Tables 2 and 3 of the BNP paper.
TABLE_2 = {
    ("bnp-figure-3/mnist", 60): {"vanilla": 0.1, "BN": 0.5, "BNP": 0.5, "LN": 0.1},
    ("bnp-figure-3/cifar10", 60): {"vanilla": 0.01, "BN": 0.5, "BNP": 0.1, "LN": 0.5},
    ("bnp-figure-4/fc-batch-6", 6): {"vanilla": 0.005, "BN": 0.05, "BNP": 0.05, "BRN": 0.05, "LN": 0.05},
    ("bnp-figure-4/fc-batch-1", 1): {"vanilla": 0.0005, "BNP": 0.1, "LN": 0.01},
}
TABLE_3 = {
    ("bnp-figure-5/batch-128", 128): {"vanilla": 0.1, "BN": 0.1, "BNP": 0.1, "4 Things": 0.005},
    ("bnp-figure-5/batch-2", 2): {"vanilla": 0.001, "BN": 0.001, "BNP": 0.01, "4 Things": 0.0001, "BRN": 0.01},
    ("bnp-figure-4/cnn5-batch-1", 1): {"vanilla": 0.001, "BNP": 0.1, "4 Things": 0.001},
    ("bnp-figure-6/cifar10", 128): {"BN": 0.1, "BNP": 0.1, "BNP+GN": 0.1, "GN": 0.1},
    ("bnp-figure-6/cifar100", 128): {"BN": 0.1, "BNP": 0.01, "BNP+GN": 0.1, "GN": 0.1},
    ("bnp-figure-7", 256): {"BN": 0.1, "BNP+GN": 0.1, "GN": 0.1},
}


@pytest.mark.parametrize(("name", "batch"), [*TABLE_2, *TABLE_3])
def test_learning_rates_are_those_of_the_bnp_paper(name, batch):
    study, rates = load_study(name), (TABLE_2 | TABLE_3)[name, batch]
    assert study.training.batch_size == batch
    assert {entry.name for entry in study.methods} == set(rates)
    assert {method: study.learning_rate(method, batch) for method in rates} == rates
    fully_connected = (name, batch) in TABLE_2
    assert study.model.name == ("mlp" if fully_connected else study.model.name)
    if fully_connected:
        assert (study.model.hidden, study.model.activation) == ([100] * 3, "relu")
        assert (study.training.momentum, study.training.loss, study.training.epochs) == (0, "cross_entropy", 20)


def test_figure_8_probes_the_first_output_unit():
    study = load_study("bnp-figure-8")
    assert (study.model.hidden, study.training.batch_size) == ([100, 100], 60)
    assert (study.probe.layers, study.probe.units, study.probe.every) == (["fc3"], [0], 1)


@pytest.mark.parametrize(("alias", "name"), [("fc-cifar10", "bnp-figure-8"), ("fc3-mnist", "bnp-figure-3/mnist")])
def test_an_alias_is_the_study_under_the_name_that_was_typed(alias, name):
    study, other = load_study(alias), load_study(name)
    assert (study.name, study.full_name) == (alias, alias)
    assert study == other.model_copy(update={"name": alias, "panel": ""})


def test_a_study_file_is_read(written):
    study = load_study(written())
    assert (study.name, study.model.name, study.training.iterations) == ("tiny", "mlp", 3)
    assert list(probed_blocks(study)) == ["fc2"]
    assert study.learning_rate("bnp", 60) == 0.5
    assert load_study(str(written("vanilla = 0.1", "vanilla = 1"))).learning_rate("vanilla", 60) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "tiny"', "", ["'name'", "missing"]),
        ("batch_size = 60\niterations", "iterations", ["'training.batch_size'", "missing"]),
        ('name = "tiny"', 'name = "tiny"\ncolour = 1', ["unknown key 'colour': allowed: name, description", "panels"]),
        ('name = "tiny"', 'name = "tiny"\n[[panel]]\nname = "a"', ["unknown key 'panel': did you mean 'panels'?"]),
        (
            "units = [3]",
            "units = [3]\nevry = 2",
            ["unknown key 'evry' in [probe]: did you mean 'every'? allowed: layers"],
        ),
        ('name = "tiny"', 'name = "../up"', ["name", "../up"]),
        ('name = "digits"', 'name = "cifar11"', ["data.name", "cifar11", "cifar10"]),
        ('[data]\nname = "digits"', "data = 3", ["data"]),
        ("hidden = [8]", "hidden = 8", ["model.hidden", "list", "8"]),
        ("hidden = [8]", "hidden = [8]\nactivation = 'step'", ["model.activation", "step", "relu"]),
        ("batch_size = 60\ni", "batch_size = -60\ni", ["training.batch_size", "greater than 0", "-60"]),
        ("batch_size = 60\ni", "batch_size = 60.0\ni", ["training.batch_size", "must be a valid integer", "60.0"]),
        ("iterations = 3", "iterations = 3\nepochs = 1", ["training", "either epochs or iterations"]),
        ("iterations = 3", "iterations = 3\nmomentum = 1.0", ["training.momentum", "less than 1"]),
        ("iterations = 3", "iterations = 3\nloss = 'hinge'", ["training.loss", "cross_entropy"]),
        ("vanilla = 0.1", "vanila = 0.1", ["learning_rates.0.rate", "vanila", "vanilla"]),
        ("vanilla = 0.1", "vanilla = -0.1", ["rate.vanilla in [[learning_rates]] number 1", "greater than 0", "-0.1"]),
        ('["fc2"]', '["fc9"]', ["probe.layers.0", "fc9", "fc1, fc2"]),
        ('["fc2"]', '["fc2", "fc2"]', ["probe.layers", "once"]),
        ("units = [3]", "units = [10]", ["probe.units.0", "unit 10 is out of range", "0 to 9"]),
        ("units = [3]", "units = 'al'", ["probe.units: must be 'all', or a list of numbers (got 'al')"]),
        ("units = [3]", "units = [-1]", ["entry 1 of probe.units", "greater than or equal to 0", "-1"]),
        ("units = [3]", "units = [3]\nprecision = 'half'", ["probe.precision", "float64", "half"]),
        ('name = "tiny"', "name = [", ["not valid TOML"]),
        ("hidden = [8]", "name = 'nerf'", ["model.name", "needs coordinates", "(1, 8, 8)", "cnn5"]),
        ("hidden = [8]", "name = 'alexnet'", ["model.name", "'alexnet'", "choose from", "resnet110"]),
        ("hidden = [8]", "name = 'cnn5'\nwidth = [3]", ["'width' in [model]", "mean 'widths'?", "pooled"]),
        (
            'name = "digits"',
            'name = "digits"\naugmentation = ["crop", "turn"]',
            ["entry 2 of data.augmentation", "'flip'"],
        ),
        (
            'name = "digits"',
            'name = "shapes"\naugmentation = ["crop"]',
            ["entry 1 of data.augmentation", "points", "jitter"],
        ),
        (
            'name = "digits"',
            'name = "digits"\naugmentation = ["jitter"]',
            ["entry 1 of data.augmentation", "images", "crop"],
        ),
        (
            'name = "digits"',
            'name = "image-folder"\nresize = 224\naugmentation = ["crop"]',
            ["data.resize", "a crop of size = 224 leaves out nothing of it"],
        ),
        ('name = "digits"', 'name = "shapes"\npoint = 3', ["did you mean 'points'?", "noise"]),
        ('name = "digits"', 'name = "digits"\npoints = 3', ["unknown key 'points' in [data]"]),
        ('name = "digits"', 'name = "image-regression"', ["training.loss", "values to predict", "'mse'"]),
        ("iterations = 3", "iterations = 3\nnesterov = true", ["training.nesterov", "momentum"]),
        ("iterations = 3", "iterations = 3\n[schedule]\nkind = 'steps'", ["schedule", "needs milestones"]),
    ],
)
def test_what_is_wrong_is_named(written, old, new, words):
    path = written(old, new)
    with pytest.raises(ConfigError) as error:
        load_study(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", bytes(64), "name = 'é'".encode("latin-1")])
def test_files_that_are_no_study(tmp_path, content):
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.toml"):
        load_study(path)


@pytest.mark.parametrize("name", ["auto", "cpu", "cpu:0"])
def test_devices_that_exist(name):
    assert resolve_device(name).type in ("cpu", "cuda")


@pytest.mark.parametrize(
    "name", ["cpu:3", "cuda:99", "cuda:-1", "cuda:99999999999999", "tpu", "mps", "meta", "", "cpu:"]
)
def test_devices_that_do_not(name):
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)


# --- scales, and parts that do not fit each other --------------------------------------------------------------------

SMALL = """
[small]
data = { train_samples = 50 }
model = { hidden = [4, 5] }

[small.training]
iterations = 2
"""


def scaled(tmp_path, old="", new="", head=""):
    return changed_study(tmp_path / "tiny.toml", old, new, text=head + STUDY + SMALL)


def test_the_small_version_has_the_changes_and_all_else(tmp_path):
    path = scaled(tmp_path, 'layers = ["fc2"]', 'layers = ["fc1"]')
    paper, small = (load_study(path, scale) for scale in ("paper", "small"))
    assert load_study(path) == paper
    assert (paper.scale, small.scale) == ("paper", "small")
    assert (paper.data.train_samples, paper.model.hidden, paper.training.iterations) == (None, [8], 3)
    assert (small.data.train_samples, small.model.hidden, small.training.iterations) == (50, [4, 5], 2)
    assert (small.training.batch_size, small.data.name, small.probe) == (60, "digits", paper.probe)
    by_itself = scaled(tmp_path, "layers", "layers", 'scale = "small"\n')
    assert load_study(by_itself).model.hidden == [4, 5]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("train_samples = 50", "train_sample = 50", ["'train_sample' in [data]", "mean 'train_samples'?"]),
        ("hidden = [4, 5]", "hidden = 'wide'", ["model.hidden", "'wide'"]),
        ("iterations = 2", "epochs = 1", ["either epochs or iterations"]),
        ("[4, 5]", "[4, 5], norm = 'bach'", ["model.norm", "bach", "batch"]),
        ("hidden = [8]", "hidden = [8, 8]", ["probe.layers.0", "'fc3'"]),
    ],
)
def test_a_small_version_that_does_not_fit_is_an_error_at_any_scale(tmp_path, old, new, words):
    path = scaled(tmp_path, old, new)
    if old == "hidden = [8]":
        # only the paper's network has the layer
        path.write_text(path.read_text().replace('["fc2"]', '["fc3"]').replace("[4, 5]", "[4]"))
    for scale in (None, "paper", "small"):
        with pytest.raises(ConfigError) as error:
            load_study(path, scale)
        for word in [str(path), *words]:
            assert word in str(error.value)


def test_scales_that_are_not_there(tmp_path, written):
    with pytest.raises(ConfigError, match=r"has no table \[small\]"):
        load_study(written(), "small")
    with pytest.raises(ConfigError, match="--scale is one of paper, small, not 'tiny'"):
        load_study(written(), "tiny")


def test_statements_speak_of_dense_layers(tmp_path):
    text = STUDY.replace("hidden = [8]", "name = 'cnn5'\npadding = 'same'").replace('["fc2"]', '["fc2", "conv1"]')
    (tmp_path / "tiny.toml").write_text(text + "\n[[statements]]\nid = 'bnp-theorem-4'\n")
    with pytest.raises(ConfigError, match=r".* bnp-theorem-4 speaks of Linear layers, .* 'conv1' is a Conv2d"):
        load_study(tmp_path / "tiny.toml")

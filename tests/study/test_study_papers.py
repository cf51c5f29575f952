"""The studies that come with hesscond: each is whole, at both scales, and its small version trains."""

from dataclasses import replace

import pytest
import torch

from hesscond.data import Dataset, names
from hesscond.methods import parse, registered
from hesscond.study import RunPlan, check_plan, load_data, load_study, open_run, run
from hesscond.study.files import SCALES
from hesscond.study.grid import Overrides
from hesscond.study.listing import contents


def small_data():
    """{name: data set of the small version}, as the files say: to read all of them in full takes seconds."""
    found = {}
    for content in contents():
        for panel in content.get("panels", [{}]):
            name = f"{content['name']}/{panel['name']}" if panel else content["name"]
            for table in (content, panel, content.get("small", {}), panel.get("small", {})):
                found[name] = table.get("data", {}).get("name", found.get(name))
    return found


DATA = small_data()
STUDIES = list(DATA)
#: Those whose data need no download.
AT_HAND = [name for name in STUDIES if DATA[name] in ("digits", "shapes", "image-regression", "text")]
#: Trained by the slow tests: seconds each, in networks that the tests of text and of models train too.
LARGE = ("chargpt", "vit-digits")


def methods_of(study):
    """The methods that the study names, else those with a rate at its batch size."""
    if study.methods:
        return [entry.name for entry in study.methods]
    return [m for entry in study.learning_rates if entry.batch_size == study.training.batch_size for m in entry.rate]


def noise(study, samples=20):
    """Random images in place of the study's data."""
    form, generator = study.data.form, torch.Generator().manual_seed(0)
    inputs = torch.rand(2 * samples, *form.input_shape, generator=generator)
    targets = torch.arange(2 * samples) % form.classes
    cut = slice(samples), slice(samples, None)
    data = Dataset(study.data.name, inputs[cut[0]], targets[cut[0]], inputs[cut[1]], targets[cut[1]], form.classes, "")
    return replace(data, preparation=study.data.preparation)


def trained(study, data, method, folder):
    """Two iterations; returns the run."""
    rate, variant = study.learning_rate(method, study.training.batch_size), study.variant(method)
    run(RunPlan(variant.study, variant.method, 0, rate, folder, torch.device("cpu"), variant.label), data)
    return open_run(folder)


def check_run(stored):
    assert stored.status == "finished"
    assert stored.iterations == 2
    probe = stored.table("probe")
    assert {"batch", "train"} >= set(probe["data"])
    assert len(probe)
    assert (probe["kappa_lower"] >= 1).all()


def shortened(study, samples=16):
    """Two iterations, a training set of at most so many samples for the probe."""
    study = Overrides(iterations=2, batch_size=min(samples, study.training.batch_size)).apply(study)
    probe = study.probe.model_copy(update={"train_samples": study.probe.train_samples and samples})
    rates = [e.model_copy(update={"batch_size": study.training.batch_size}) for e in study.learning_rates]
    return study.model_copy(update={"probe": probe, "learning_rates": rates})


@pytest.mark.share(4)
@pytest.mark.parametrize("name", STUDIES)
def test_both_scales_are_whole(name):
    for scale in SCALES:
        study = load_study(name, scale)
        assert (study.full_name, study.scale, study.small) == (name, scale, {})
        assert scale != "small" or study.data.name == DATA[name]
        assert len(methods_of(study)) >= 2
        assert (study.data.name in names(), study.run, bool(study.description)) == (True, None, True)
        own = {entry.name: entry.method for entry in study.methods}
        rated = [own.get(method, method) for entry in study.learning_rates for method in entry.rate]
        used = {one for method in (*rated, *own.values()) for one in parse(method).plain.split("+")}
        assert used <= {method.name for method in registered()}
        assert all(study.known_rate(method, study.training.batch_size) is not None for method in own)
        for entry in study.learning_rates:
            for method in entry.rate:
                if entry.grid:
                    grid = study.learning_rate_grid(method, entry.batch_size)
                    assert min(grid) <= entry.rate[method] <= max(grid)


def slow_but_one(names):
    """Of the panels of one file, all but the first are slow tests: they differ in the data or the network alone."""
    files = [name.partition("/")[0] for name in names]
    marks = [pytest.mark.slow if file in files[:place] else () for place, file in enumerate(files)]
    marks = [pytest.mark.slow if name in LARGE else mark for name, mark in zip(names, marks, strict=True)]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


@pytest.mark.share(8)
@pytest.mark.parametrize("name", slow_but_one([name for name in STUDIES if name not in AT_HAND]))
def test_the_small_version_fits_together(tmp_path, name):
    """Every method fits the network; one of them trains, on noise in place of the data."""
    study = shortened(load_study(name, "small"))
    data = noise(study)
    methods = methods_of(study)
    for method in methods:
        variant = study.variant(method)
        check_plan(RunPlan(variant.study, variant.method, 0, 0.01, tmp_path / "none", torch.device("cpu")), data)
    check_run(trained(study, data, methods[1], tmp_path / "run"))


@pytest.mark.share(4)
@pytest.mark.parametrize("name", slow_but_one(AT_HAND))
def test_the_small_version_trains(tmp_path, name):
    study = Overrides(iterations=2).apply(load_study(name, "small"))
    data = load_data(study.data)
    check_run(trained(study, data, methods_of(study)[1], tmp_path / "run"))

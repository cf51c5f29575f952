"""Results as objects: a line, the table of the command line, HTML with the same numbers, pickles with the same κ."""

import copy
import html
import io
import pickle
import re

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import hesscond
from tests.catalogue.parts import drawn

CE = nn.CrossEntropyLoss()


def data(samples=12):
    return drawn(samples, 5)


def net(act=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), act or nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GELU(), nn.ConvTranspose2d(4, 3, 2), nn.Flatten())
    return nn.Sequential(*model, nn.Linear(75, 3)), CE, (torch.randn(6, 2, 4, 4), torch.randint(0, 3, (6,)))


class Local(nn.Linear):
    """A class of a module that other processes do not have."""


def hooked():
    model = net()
    model[0] = Local(5, 4)
    model[3].register_forward_hook(lambda module, args, output: output)
    return model


def stepped():
    model, (x, target) = net(), data()
    optimizer = torch.optim.Adam(model.parameters())
    CE(model(x), target).backward()
    optimizer.step()
    return hesscond.probe(model, CE, (x, target), method=optimizer)


CASES = {
    "unit": lambda: hesscond.probe(net(), CE, data()),
    "layer": lambda: hesscond.probe(net(), CE, data(), level="layer"),
    "dual": lambda: hesscond.probe(nn.Linear(60, 20), CE, drawn(6, 60, classes=20), level="layer"),
    "network": lambda: hesscond.probe(net(), CE, data(), level="network"),
    "network of a method": lambda: hesscond.probe(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), CE, data(), level="network", method="bnp"
    ),
    "products": lambda: hesscond.probe(net(), CE, data(), level="network", products=12),
    "everything by products": lambda: hesscond.probe(net(), CE, data(), layers="*"),
    "a group": lambda: hesscond.probe(net(), CE, data(), blocks={"mine": ["0.bias", "2.weight"]}),
    "rows of a table": lambda: hesscond.probe(
        nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)), CE, (torch.arange(12).view(6, 2) % 7,
        torch.arange(6) % 3), layers=["0"], level="layer",
    ),
    "a stream": lambda: hesscond.probe(net(), CE, [data(), data(7)], level="layer"),
    "a stream by unit": lambda: hesscond.probe(net(nn.ReLU()), CE, [data(), data(7)]),
    "convolutions": lambda: hesscond.probe(*convolutions()),
    "convolutions by layer": lambda: hesscond.probe(*convolutions(), level="layer"),
    "hooks and classes": lambda: hesscond.probe(hooked(), CE, data()),
    "a parametrization": lambda: hesscond.probe(nn.Sequential(spectral_norm(nn.Linear(5, 3))), CE, data()),
    "float32": lambda: hesscond.probe(net(), CE, data(), dtype=None),
    "an optimizer": stepped,
    "a zero Hessian": lambda: hesscond.probe(nn.Linear(5, 3), lambda output, target: output.sum(), data()),
}  # fmt: skip


def through_joblib(thing, folder):
    joblib.dump(thing, folder / "saved.joblib")
    return joblib.load(folder / "saved.joblib")


def through_torch(thing, folder):
    torch.save(thing, folder / "saved.pt")
    return torch.load(folder / "saved.pt", weights_only=False)


WAYS = {
    "pickle": lambda thing, folder: pickle.loads(pickle.dumps(thing)),
    "torch": through_torch,
    "deepcopy": lambda thing, folder: copy.deepcopy(thing),
    "joblib": through_joblib,
}


def bits(conditions):
    """κ as what is equal to the last bit only; NaN is equal to itself."""
    return [repr([getattr(kappa, name) for name in kappa.__dataclass_fields__]) for kappa in conditions]


def assert_the_same(found, result):
    assert list(found) == list(result)
    pd.testing.assert_frame_equal(found.to_frame(), result.to_frame(), check_exact=True)
    for name, own in result.items():
        assert bits(found[name].conditions) == bits(own.conditions)
        assert (found[name].check, found[name].parameters) == (own.check, own.parameters)
    assert (found.skipped, found.precision, found.coordinates) == (result.skipped, result.precision, result.coordinates)
    assert str(found) == str(result)


@pytest.mark.share(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_result_is_the_same_after_a_round_trip(name, way, tmp_path):
    result = CASES[name]()
    found = WAYS[way](result, tmp_path)
    assert_the_same(found, result)
    for own in result.values():
        alone = WAYS[way](own, tmp_path)
        assert bits(alone.conditions) == bits(own.conditions)


@pytest.mark.parametrize("name", ["unit", "layer", "dual", "a stream", "convolutions", "hooks and classes"])
def test_captured_hessians_are_pickled_whole(name):
    result = CASES[name]()
    found = pickle.loads(pickle.dumps(result))
    for layer, own in result.items():
        unit = own.units[-1] if own.level == "unit" else None
        assert torch.equal(found[layer].hessian(unit), own.hessian(unit))
        assert torch.equal(found[layer].eigenvalues(unit), own.eigenvalues(unit))
        assert bits(found[layer].plain.conditions) == bits(own.plain.conditions)


def test_what_needs_the_model_is_refused_after_a_pickle_in_one_sentence():
    result = CASES["network"]()
    values, shares = result["network"].eigenvalues(), result["network"].by_layer()
    found = pickle.loads(pickle.dumps(result))["network"]
    assert torch.equal(found.eigenvalues(), values)
    pd.testing.assert_frame_equal(found.by_layer(), shares)
    for ask in (found.hessian, found.eigenvectors, lambda: found.operator @ torch.ones(found.n_params).double()):
        with pytest.raises(hesscond.ConfigError, match="saved without the model and the data"):
            ask()
    with pytest.raises(hesscond.ConfigError, match="saved without the model"):
        pickle.loads(pickle.dumps(CASES["network"]()))["network"].eigenvalues()
    # a copy within the process has its model
    assert torch.equal(copy.deepcopy(result)["network"].hessian(), result["network"].hessian())


def test_a_pickle_takes_no_more_than_it_needs():
    """No view takes the storage of all units along with it, and no model its weights."""
    model = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 3))
    result = hesscond.probe(model, CE, drawn(20, 40), layers=["0"], dtype=torch.float64)
    assert len(pickle.dumps(result)) < 8 * (20 * 41 + 20 * 200) + 1000 * 200


def test_a_result_computes_its_kappa_when_it_is_shown_and_only_then():
    result = CASES["unit"]()
    for own in (result, result["0"]):
        assert "\n" not in repr(own)
        assert len(repr(own)) < 100
    assert "conditions" not in vars(result["0"])
    assert str(result["0"].units[0]) in str(result)
    assert "conditions" in vars(result["0"])


def cells(text):
    return [word for word in re.split(r"\s+", text) if word]


SHOWN = {name: CASES[name] for name in ("unit", "layer", "network", "products", "a zero Hessian")} | {
    "a layer": lambda: CASES["unit"]()["0"],
    "a verdict": lambda: hesscond.verify("wc-theorem-1", trials=5),
    "a density": lambda: hesscond.density(np.diag(np.linspace(-1, 5, 40)), method="lanczos", steps=8),
    "an exact density": lambda: hesscond.density(np.diag([1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", SHOWN)
def test_html_is_a_plain_table_with_the_words_of_the_text(name):
    shown = SHOWN[name]()
    page = shown._repr_html_()
    assert page.count("<table") == page.count("</table>") == 1
    assert not re.search(r"<script|style=\"[^\"]*color|bgcolor|<font", page)
    without = re.sub("<[^>]*>", " ", page)
    # rules are drawn of characters in text
    text = re.sub("[─]+", " ", str(shown))
    assert sorted(cells(html.unescape(without))) == sorted(cells(text))


def test_names_are_escaped():
    torch.manual_seed(0)
    model = nn.ModuleDict({"<b>&": nn.Linear(5, 3)})
    model.forward = lambda x: model["<b>&"](x)
    page = hesscond.probe(model, CE, data())._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


@pytest.mark.share(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["a verdict", "a density", "an exact density"])
def test_verdicts_and_densities_make_the_round_trip(name, way, tmp_path):
    shown = SHOWN[name]()
    assert "\n" not in repr(shown)
    assert len(repr(shown)) < 100
    assert str(WAYS[way](shown, tmp_path)) == str(shown)


def test_an_error_of_ours_is_importable_from_the_top():
    errors = {
        name: own
        for name, own in vars(hesscond.errors).items()
        if isinstance(own, type) and issubclass(own, Exception) and own.__module__ == "hesscond.errors"
    }
    assert len(errors) >= 10
    for name, own in errors.items():
        assert name in hesscond.__all__
        assert getattr(hesscond, name) is own


def test_a_pickle_is_read_by_another_process(tmp_path):
    """Nothing of it lives in this process only."""
    with joblib.parallel_config("loky"):
        (value,) = joblib.Parallel(n_jobs=1)([joblib.delayed(float)(CASES["layer"]()["0"].kappa)])
    assert value == float(CASES["layer"]()["0"].kappa)
    buffer = io.BytesIO()
    pickle.dump(CASES["hooks and classes"](), buffer)
    assert b"test_probe_objects" not in buffer.getvalue()

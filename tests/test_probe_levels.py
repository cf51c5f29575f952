"""What a probe returns at each level: blocks, tables, choices of layers and units."""

import pandas as pd
import pytest

import hesscond
from hesscond.errors import ConfigError
from tests.catalogue import case
from tests.truth import eligible_layers, layer_truth, unit_truth

COLUMNS = [
    "layer", "unit", "n_params", "rank", "nullity", "negative", "lambda_max", "lambda_min",
    "kappa", "kappa_lower", "kappa_upper", "resolved", "solver", "reason", "advice",
]  # fmt: skip


@pytest.mark.parametrize("level", ["unit", "layer"])
def test_table(level):
    result = hesscond.probe(*case("relu-ce").make(), level=level)
    frame = result.to_frame()
    assert list(frame.columns) == COLUMNS
    if level == "unit":
        assert frame["layer"].tolist() == ["0"] * 6 + ["2"] * 4 + ["4"] * 3
        assert frame["unit"].tolist() == [*range(6), *range(4), *range(3)]
        assert frame["n_params"].tolist() == [6] * 6 + [7] * 4 + [5] * 3
    else:
        assert frame["layer"].tolist() == ["0", "2", "4"]
        assert frame["unit"].isna().all()
        assert frame["unit"].iloc[0] is pd.NA
        assert frame["n_params"].tolist() == [36, 28, 15]
    assert (frame["rank"] + frame["nullity"] == frame["n_params"]).all()
    assert (frame["kappa_lower"] <= frame["kappa"]).all()
    assert (frame["kappa"] <= frame["kappa_upper"]).all()
    assert frame["kappa"].tolist() == [float(k) for layer in result.values() for k in layer.conditions]


@pytest.mark.parametrize(("name", "layer", "units"), [
    ("relu-ce", "2", [3, 1]), ("conv2d-groups", "0", [5, 0]), ("transposed2d-groups", "0", [4]),
    ("train-batchnorm", "0", [2, 3]), ("recurrent-tanh", "cell", [1]), ("attention-sdpa", "qkv", [11, 0, 5]),
])  # fmt: skip
def test_chosen_units(name, layer, units):
    model, loss_fn, batch = case(name).make()
    result = hesscond.probe(model, loss_fn, batch, layers=[layer], units=units)
    assert list(result) == [layer]
    found = result[layer]
    assert list(found.units) == units
    assert len(found.kappa) == len(units)
    assert result.to_frame()["unit"].tolist() == units
    for unit in units:
        truth = unit_truth(model, loss_fn, batch, layer, unit)
        assert (found.hessian(unit=unit) - truth).norm() <= 1e-10 * truth.norm()
    with pytest.raises(ConfigError, match="not probed"):
        found.hessian(unit=2 if 2 not in units else 1)


def test_chosen_layers_in_the_order_asked_for():
    model, loss_fn, batch = case("conv2d-two-layers").make()
    names = list(eligible_layers(model))
    result = hesscond.probe(model, loss_fn, batch, layers=names[::-1], level="layer")
    assert list(result) == names[::-1]
    with pytest.raises(KeyError, match="was not probed"):
        result["nope"]


def test_cheapest_exact_routes():
    def routes(name):
        return [layer.route for layer in hesscond.probe(*case(name).make()).values()]

    first, second, last = routes("relu-ce")
    assert "piecewise linear" in first
    assert "piecewise linear" in second
    assert "output" in last
    for name in ("tanh-ce", "layernorm", "relu-nonconvex", "attention-sdpa", "conv2d-tanh-mse"):
        assert "piecewise linear" not in routes(name)[0]
    assert routes("tanh-ce")[-1] == last


def test_structured_inputs_may_be_lists_of_two():
    model, loss_fn, (x, y) = case("relu-ce").make()
    plain = hesscond.probe(model, loss_fn, (x, y)).to_frame()
    pd.testing.assert_frame_equal(hesscond.probe(model, loss_fn, [x, y]).to_frame(), plain)
    model, loss_fn, (inputs, y) = case("two-inputs").make()
    as_list = hesscond.probe(model, loss_fn, [inputs, y], level="layer")
    for layer, found in as_list.items():
        truth = layer_truth(model, loss_fn, (inputs, y), layer)
        assert (found.hessian() - truth).norm() <= 1e-10 * truth.norm()

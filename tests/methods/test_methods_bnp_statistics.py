"""BNP with the statistics of the batch, or of all training data."""

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import CaptureError, ConfigError
from hesscond.methods import BNP, parse
from hesscond.probing.entry import probe


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(27, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def data(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 2, 4, 4, generator=generator, dtype=torch.float64) + 0.3
    return x, torch.randint(0, 3, (samples,), generator=generator)


def step(model, method, optimizer, x, y):
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    method.transform_gradients()
    optimizer.step()


def test_batch_statistics_are_those_without_a_memory():
    ways = []
    for spec in ("bnp:statistics=batch", "bnp:rho=0"):
        torch.manual_seed(1)
        model = model_of()
        method = parse(spec).create(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            step(model, method, optimizer, *data(6, seed))
        ways.append(model)
        x, _ = data(6, 2)
        assert torch.allclose(method.states["0"].mu, x.mean((0, 2, 3)), rtol=1e-12)
        assert torch.allclose(method.states["0"].variance, x.var((0, 2, 3), correction=0), rtol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ways), strict=True))


def features(model, x):
    """Inputs of the layers without dropout, in numpy: by channel or feature."""
    with torch.no_grad():
        first = torch.tanh(model[0](x))
        second = torch.tanh(model[4](first.flatten(1)))
    return {"0": x.movedim(1, -1).reshape(-1, 2).numpy(), "4": first.flatten(1).numpy(), "6": second.numpy()}


def test_data_statistics_are_those_of_all_training_inputs_again_and_again():
    model = model_of()
    x, y = data(50)
    before = torch.random.get_rng_state()
    method = BNP(model, statistics="data", refresh=3)
    method.fit(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    truth = features(model, x)
    for number in range(8):
        if number in (3, 6):
            truth = features(model, x)
        step(model, method, optimizer, x[5 * number : 5 * number + 5], y[5 * number : 5 * number + 5])
        for name, rows in truth.items():
            np.testing.assert_allclose(method.states[name].mu, rows.mean(0), rtol=1e-11, atol=1e-13)
            np.testing.assert_allclose(method.states[name].variance, rows.var(0), rtol=1e-11, atol=1e-13)
    # q is that of the mini-batch
    assert method.states["4"].q_squared == pytest.approx(27 / 5)
    assert method.coordinates("4").name == "BNP, statistics of the training data"


def test_a_restored_run_refreshes_at_the_same_steps():
    x, y = data(20)
    ends = []
    for broken in (False, True):
        model = model_of().eval()
        method = BNP(model, statistics="data", refresh=2)
        method.fit(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for number in range(5):
            if broken and number == 3:
                state = method.state_dict()
                method.detach()
                method = BNP(model, statistics="data", refresh=2)
                method.fit(x)
                method.load_state_dict(state)
            step(model, method, optimizer, x[number : number + 4], y[number : number + 4])
        ends.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ends), strict=True))


def test_data_statistics_need_the_data():
    model = model_of()
    method = BNP(model, statistics="data")
    with pytest.raises(ConfigError, match=r"call fit\(inputs\)"):
        step(model, method, torch.optim.SGD(model.parameters(), lr=0.1), *data(4))


def test_without_epsilon_a_dead_feature_is_left_out_of_the_step():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    method = BNP(model, epsilon_1=0, epsilon_2=0, rho=0)
    x = torch.randn(6, 3, dtype=torch.float64)
    x[:, 1] = 0
    model.zero_grad()
    model(x).square().sum().backward()
    method.transform_gradients()
    assert not model[0].weight.grad[:, 1].any()
    assert torch.isfinite(model[0].weight.grad).all()
    assert method.coordinates("0").matrix(4).shape == (4, 3)


def test_a_batch_of_one_has_no_statistics_of_its_own():
    with pytest.raises(ConfigError, match="batch of 1 sample"):
        BNP(model_of(), statistics="batch").check_batch(1)
    BNP(model_of(), statistics="batch").check_batch(2)
    BNP(model_of()).check_batch(1)


def test_a_layer_without_bias_has_no_coordinates_in_constant_features():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    batch, words = (torch.randn(1, 4), torch.tensor([1])), "no BNP coordinates where all its inputs are constant"
    result = probe(model, nn.CrossEntropyLoss(), batch, method="bnp")
    assert list(result) == ["0"]
    assert words in result.skipped["2"]
    for arguments in ({"layers": ["2"]}, {"level": "network"}):
        with pytest.raises(CaptureError, match=words):
            probe(model, nn.CrossEntropyLoss(), batch, method="bnp", **arguments)

"""The engine on a device that is not the CPU: the same answers bit for bit, few copies and reads, or one sentence."""

import pytest
import torch
from torch import nn

import hesscond
import hesscond.operators
from hesscond.data import load
from hesscond.errors import CaptureError, ConfigError, MatrixError
from hesscond.methods.base import registered
from hesscond.problem.devices import default_memory, has_float64
from hesscond.runs import open_run
from hesscond.study import RunPlan, StudyConfig, load_study, run
from tests.catalogue.parts import Net
from tests.pretend_device import PretendTensor, pretend_device

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def device():
    with pretend_device() as state:
        yield state


def moved(value, where="pretend"):
    if isinstance(value, (torch.Tensor, nn.Module)):
        return value.to(where)
    return type(value)(moved(part, where) for part in value)


def network(width=8, depth=1, activation=nn.Tanh, inputs=6):
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(inputs, width), activation())]
    hidden = [nn.Linear(width, width) if i and isinstance(m, nn.Linear) else m for i, m in enumerate(hidden)]
    return nn.Sequential(*hidden, nn.Linear(width, 5))


def batch(samples=32, inputs=6):
    torch.manual_seed(1)
    return torch.randn(samples, inputs), torch.randint(0, 5, (samples,))


def numbers(result):
    """All that is known of κ of each block, to the last bit."""
    return {
        name: [(k.lower, k.upper, k.lambda_max, k.lambda_min, k.rank, k.negative, k.solver) for k in own.conditions]
        for name, own in result.items()
    } | dict(result.skipped)


# --------------------------------------------------------------------------------------------------- the device itself


def test_the_device_refuses_to_mix_and_counts(device):
    x = torch.randn(4, 3)
    p = x.to("pretend")
    assert (p.device, type(p)) == (torch.device("pretend:0"), PretendTensor)
    for wrong in (lambda: p + x, lambda: p @ x.T, lambda: p + x.to("pretend:1"), p.numpy):
        with pytest.raises((RuntimeError, TypeError), match=r"one device|to numpy"):
            wrong()
    device.counts.clear()
    assert torch.equal(p.t()[[0, 2]].cpu(), x.t()[[0, 2]])
    assert device.counts == {"to device": 1, "to host": 1}
    assert bool((p[p > 0] > 0).all())
    assert p.tolist() == x.tolist()
    assert device.counts["read"] == 3


# ---------------------------------------------------------------------------------------------------------- answers


LEVELS = ("unit", "layer", "network")


def pictures():
    """Convolutions, one of them grouped, with their batch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GELU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 5)), (torch.randn(12, 2, 6, 6), torch.randint(0, 5, (12,)))


def spline_layer(inputs, outputs):
    """A KAN's layer, whose parameters are blocks of no known layer."""
    parts = {"spline": nn.Parameter(torch.randn(outputs, inputs, 3) / 2), "grid": nn.Buffer(torch.linspace(-1, 1, 3))}
    return Net(lambda m, x: torch.einsum("nik,oik->no", (-((x[..., None] - m.grid) ** 2)).exp(), m.spline), **parts)


def splines():
    torch.manual_seed(0)
    return nn.Sequential(spline_layer(6, 4), spline_layer(4, 5)), batch()


@pytest.mark.share(2)
@pytest.mark.parametrize("made", [lambda: (network(), batch()), pictures, splines], ids=["dense", "images", "blocks"])
@pytest.mark.parametrize("level", LEVELS)
def test_probes_have_the_same_bits(made, level, device):
    (model, own), (other, data) = made(), made()
    here = hesscond.probe(model, nn.CrossEntropyLoss(), own, level=level)
    assert numbers(hesscond.probe(moved(other), nn.CrossEntropyLoss(), moved(data), level=level)) == numbers(here)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "method",
    [
        *("bnp", "sphere", "kfac", "ekfac", "equilibration", "whitening", "gauss-newton", "batchnorm", "batchrenorm"),
        *("weightnorm", "centred-weightnorm", "weightstandardization", "four-things-batchnorm", "l2", "standardize"),
    ],
)
def test_methods_have_the_same_bits(method, device):
    here = hesscond.probe(network(), nn.CrossEntropyLoss(), batch(), method=method)
    there = hesscond.probe(moved(network()), nn.CrossEntropyLoss(), moved(batch()), method=method)
    assert numbers(there) == numbers(here)


@pytest.mark.parametrize("drawn", [nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.3), nn.RReLU()], ids=repr)
def test_numbers_that_the_device_draws_are_the_same_in_every_pass(drawn, device):
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), drawn, nn.Flatten(), nn.Linear(6, 3)
    model = moved(nn.Sequential(*layers).double())
    data = moved((torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))))
    first, again = (hesscond.probe(model, nn.CrossEntropyLoss(), data, level="layer") for _ in range(2))
    assert first["0"].check.difference < 1e-12
    assert torch.equal(first["0"].hessian().cpu(), again["0"].hessian().cpu())


def test_a_default_device_of_the_user_changes_nothing(device):
    here = {level: hesscond.probe(network(), nn.CrossEntropyLoss(), batch(), level=level) for level in LEVELS}
    there = moved(network()), moved(batch())
    torch.set_default_device("pretend")
    try:
        for level in LEVELS:
            found = hesscond.probe(there[0], nn.CrossEntropyLoss(), there[1], level=level)
            assert numbers(found) == numbers(here[level])
            assert all(
                block.hessian(unit).device.type == "pretend" for block in found.values() for unit in block.blocks
            )
        H = hesscond.HessianOperator(there[0], nn.CrossEntropyLoss(), there[1])
        assert hesscond.density(H).trace().value == pytest.approx(float(H.to_dense().trace()), rel=1e-9)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", [hesscond.HessianOperator, hesscond.GGNOperator])
def test_iterations_have_the_same_bits(kind, device):
    here = kind(network(), nn.CrossEntropyLoss(), batch())
    there = kind(moved(network()), nn.CrossEntropyLoss(), moved(batch()))
    for iteration in (hesscond.lanczos, hesscond.smallest_nonzero):
        own, other = (iteration(H, 2).eigenvalues.cpu() for H in (here, there))
        assert torch.equal(own, other)


def watched(where):
    model, (x, y) = moved(network(), where), moved(batch(), where)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with hesscond.watch(model, nn.CrossEntropyLoss(), (x, y), optimizer, every=2) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.step(float(loss))
    return watch.to_frame()


def test_a_watch_has_the_same_bits(device):
    here, there = (watched(where) for where in ("cpu", "pretend"))
    assert list(here) == list(there)
    numbers = [name for name in here.select_dtypes("number") if "second" not in name]
    assert here[numbers].equals(there[numbers])


@pytest.mark.share(6)
@pytest.mark.parametrize("method", [m.name for m in registered() if m.name != "groupnorm"])
def test_a_study_has_the_same_bits(method, device, tmp_path):
    """All methods but instance normalization, for convolutions only, and group normalization.

    torch's batched backward pass of group normalization ends the process on this device, not on a GPU.
    """
    study, data, rows = load_study("fc-digits"), load("digits"), []
    changed = {
        "training": dict(study.training) | {"epochs": None, "iterations": 4},
        "probe": dict(study.probe) | {"every": 2},
    }
    study = StudyConfig.model_validate(dict(study) | changed)
    for where in ("cpu", "pretend"):
        plan = RunPlan(study, method, 0, 0.01, tmp_path / where, torch.device(where))
        run(plan, data.to(where))
        rows.append(open_run(plan.folder).table("training").filter(regex="^(?!.*second)"))
    assert rows[0].equals(rows[1])


def test_a_study_whose_memory_ends_goes_on_where_it_was(device, tmp_path):
    study, data = load_study("fc-digits"), load("digits").to("pretend")
    changed = {"training": dict(study.training) | {"epochs": 2}, "probe": dict(study.probe) | {"every": 20}}
    study = StudyConfig.model_validate(dict(study) | changed)
    plans = [RunPlan(study, "bnp", 0, 0.1, tmp_path / name, torch.device("pretend")) for name in ("whole", "broken")]
    run(plans[0], data)

    def fill(progress):
        # after the first epoch
        device.limit = device.used[0] if progress.iteration > 30 else None

    with pytest.raises(torch.OutOfMemoryError):
        run(plans[1], data, fill)
    device.limit = None
    run(plans[1], data, resume=True)
    whole, broken = (open_run(plan.folder).table("training").filter(regex="^(?!.*second)") for plan in plans)
    assert whole.equals(broken)


# ------------------------------------------------------------------------------------------------------------- waiting


def waits(state, level, **shape):
    """Copies and reads of a probe whose κ are all computed."""
    samples = shape.pop("samples", 32)
    model, data = moved(network(**shape)), moved(batch(samples))
    state.counts.clear()
    for block in hesscond.probe(model, nn.CrossEntropyLoss(), data, level=level).values():
        assert all(kappa.upper for kappa in block.conditions)
    return state.counts.total()


@pytest.mark.share(2)
@pytest.mark.parametrize(("level", "first", "layer"), [("unit", 130, 65), ("layer", 170, 75), ("network", 215, 50)])
def test_a_probe_waits_for_its_layers_and_not_for_units_or_samples(level, first, layer, device):
    two = waits(device, level)
    assert two <= first
    assert waits(device, level, width=24) <= two + 5
    assert waits(device, level, samples=96) <= two
    assert waits(device, level, depth=4) <= two + 3 * layer


def test_a_watch_and_an_iteration_wait_a_stated_number_of_times(device):
    model, data = moved(network()), moved(batch())
    with hesscond.watch(model, nn.CrossEntropyLoss(), data, every=2) as watch:
        device.counts.clear()
        watch.step()
        assert not device.counts
        watch.step()
    assert device.counts.total() <= 170
    H = hesscond.HessianOperator(model, nn.CrossEntropyLoss(), data)
    device.counts.clear()
    found = hesscond.lanczos(H, 1, which="top")
    assert device.counts.total() <= 6 * found.products


def test_layers_on_two_devices(device):
    def forward(m, x):
        return m.b(torch.tanh(m.a(x)).to("pretend:1"))

    x, y = batch()
    split = Net(forward, a=network()[0].to("pretend:0"), b=network()[2].to("pretend:1"))
    given = x.to("pretend:0"), y.to("pretend:1")
    for level in ("unit", "layer"):
        here = hesscond.probe(network(), nn.CrossEntropyLoss(), batch(), level=level)
        there = hesscond.probe(split, nn.CrossEntropyLoss(), given, level=level)
        for own, other in zip(here.values(), there.values(), strict=True):
            assert [k.rank for k in other.conditions] == [k.rank for k in own.conditions]
            assert [k.value for k in other.conditions] == pytest.approx([k.value for k in own.conditions], rel=1e-10)
    with pytest.raises((CaptureError, ConfigError, MatrixError), match="on several devices"):
        hesscond.probe(split, nn.CrossEntropyLoss(), given, level="network")


# ------------------------------------------------------------------------------------------------- what a device lacks


def test_without_float64_there_is_one_sentence():
    with pretend_device(float64=False):
        has_float64.cache_clear()
        with pytest.raises(ConfigError, match=r"'pretend:0' has no float64.*CPU"):
            hesscond.probe(moved(network()), nn.CrossEntropyLoss(), moved(batch()))
    has_float64.cache_clear()


def test_memory_is_half_of_what_the_device_reports(device):
    tensor = torch.zeros(100, device="pretend", dtype=torch.float64)
    device.limit = device.used[0] + 10_000
    assert default_memory([tensor]) == 5000
    assert default_memory([torch.zeros(1)]) == 4 * 10**9


def test_a_product_is_halved_where_memory_ends(device):
    """One product of 64 columns does not fit, and parts of them do."""

    class Doubled(hesscond.operators.SymmetricOperator):
        sizes = ()

        def multiply(self, V):
            self.sizes = (*self.sizes, V.shape[1])
            return (V.repeat(1, 8) * 2)[:, : V.shape[1]].clone()

    A = Doubled(50, torch.float64, "pretend")
    V = torch.randn(50, 64, dtype=torch.float64)
    there = V.to("pretend")
    device.limit = device.used[0] + 50 * 8 * 64 * 10
    assert torch.equal((A @ there).cpu(), 2 * V)
    assert A.sizes[0] == 64
    assert max(A.sizes[1:]) == 32

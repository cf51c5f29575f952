"""M = P Pᵀ that is read from the states of pytorch-optimizer, against their own steps."""

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.methods import parse
from hesscond.methods.optimizers import AtWork, known_optimizers
from hesscond.probing.entry import probe
from tests.methods.stepping import (
    columns_of_M,
    data,
    dense_hessian,
    kappa,
    largest_difference,
    matrices,
    network,
    stepped,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WITHOUT = {"betas": (0.0, 0.9)}
SOAP = {"betas": (0.0, 0.95), "weight_decay": 0.0, "precondition_frequency": 7}
PSGD = {"momentum": 0.0, "precondition_dtype": torch.float64}
#: Class, options; the precision is that of the library's own arithmetic.
EXACT = {
    "Shampoo": ("Shampoo", {}),
    "SOAP": ("SOAP", SOAP),
    "SOAP, vectors too": ("SOAP", SOAP | {"precondition_1d": True, "max_precondition_dim": 20}),
    "SOAP, normalized": ("SOAP", SOAP | {"normalize_gradient": True, "correct_bias": False}),
    "Kron": ("Kron", PSGD),
    "Kron, diagonal": ("Kron", PSGD | {"memory_save_mode": "one_diag"}),
    "SophiaH": ("SophiaH", WITHOUT | {"p": 1.0}),
    "SophiaH, clipped": ("SophiaH", WITHOUT),
    "AdaHessian": ("AdaHessian", WITHOUT | {"hessian_power": 0.5}),
}


def pytorch_optimizer():
    return pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed (the extra optimizers)")


def curvature(optimizer, kind):
    """Diagonals of Hessians for those that take them."""
    if kind not in ("SophiaH", "AdaHessian"):
        return optimizer
    generator, plain = torch.Generator().manual_seed(3), optimizer.step
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step():
        plain(hessian=[torch.rand(p.shape, generator=generator).to(p) for p in parameters])

    optimizer.step = step
    return optimizer


@pytest.mark.parametrize("name", EXACT)
def test_a_step_of_pytorch_optimizer_is_M_times_the_gradient(name):
    kind, options = EXACT[name]
    model = network()
    optimizer = getattr(pytorch_optimizer(), kind)(model.parameters(), lr=0.01, **options)
    found = stepped(model, curvature(optimizer, kind), 5)
    assert largest_difference(model, optimizer, *found) < 1e-8


def test_muon_of_pytorch_optimizer():
    """Which rounds to bfloat16, as torch's."""
    model = network()
    groups = [
        {"params": matrices(model.parameters()), "use_muon": True},
        {"params": [p for p in model.parameters() if p.ndim == 1], "use_muon": False, "betas": (0.0, 0.9)},
    ]
    optimizer = pytorch_optimizer().Muon(groups, lr=0.01, momentum=0.0, weight_decay=0.0, adamw_wd=0.0)
    given, moved = stepped(model, optimizer)
    assert largest_difference(model, optimizer, given, moved) < 0.05
    explained = AtWork(model, [optimizer]).preconditioned(given)
    for name, g in given.items():
        if g.ndim == 1:
            rate = AtWork(model, [optimizer]).rate
            assert torch.allclose(moved[name], -rate * explained[name], rtol=1e-10)


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()


FROZEN = {
    "Shampoo": ({}, {}, {"preconditioning_compute_steps": 10**9}),
    "SOAP": (SOAP | {"correct_bias": False}, {"betas": (0.0, 1.0)}, {}),
    "Kron": (PSGD, {"pre_conditioner_update_probability": 0.0}, {}),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_kappa_is_that_of_the_columns_of_its_own_steps(kind):
    """M from steps of the library along unit gradients, with what it learned standing still; H by double backward."""
    options, groups, attributes = FROZEN[kind]
    model = small()
    optimizer = getattr(pytorch_optimizer(), kind)(model.parameters(), lr=0.01, **options)
    stepped(model, optimizer, 5)

    def freeze(other):
        for group in other.param_groups:
            group |= groups
        for name, value in attributes.items():
            setattr(other, name, value)

    M = columns_of_M(model, optimizer, freeze=freeze)
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3
    found = probe(model, nn.CrossEntropyLoss(), (x, y), level="network", method=optimizer)["network"].kappa
    assert found.resolved
    H = dense_hessian(model, x, y)
    ratio = found.value / kappa(M, H, found.rank)
    # the shortening of PSGD's direction is of the last step, and one number for each parameter
    assert ratio == pytest.approx(1, rel=1e-6) or kind == "Kron"
    layers = probe(model, nn.CrossEntropyLoss(), (x, y), ["2"], level="layer", method=optimizer)
    own = layers["2"].kappa
    if kind != "Kron":
        assert own.value == pytest.approx(kappa(M[16:, 16:], H[16:, 16:], own.rank), rel=1e-6)


SAME = {
    "shampoo:epsilon=1e-4,update_every=1": ("Shampoo", {"matrix_eps": 1e-4}, 1.0),
    "sophia:update_every=1,gamma=0.1,beta_2=0.9": ("SophiaH", {"p": 0.1, "betas": (0.96, 0.9)}, 10.0),
    "adahessian:epsilon=1e-6": ("AdaHessian", {"eps": 1e-6}, 1.0),
    "soap:update_every=2": ("SOAP", {"weight_decay": 0.0, "betas": (0.0, 0.95), "precondition_frequency": 2}, 1.0),
}


@pytest.mark.parametrize("spec", SAME)
def test_our_methods_take_the_steps_of_pytorch_optimizer(spec):
    """Sophia there clips at p what is clipped at 1 here; of SOAP the first gradient there only begins the averages."""
    kind, options, rate = SAME[spec]
    mine, theirs = small(), small()
    theirs.load_state_dict(mine.state_dict())
    method = parse(spec).create(mine)
    own = torch.optim.SGD(mine.parameters(), lr=0.01)
    other = getattr(pytorch_optimizer(), kind)(theirs.parameters(), lr=rate * 0.01, **options)
    generator = torch.Generator().manual_seed(4)
    for step in range(7):
        gradients = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in mine.parameters()]
        curvature = [torch.rand(p.shape, generator=generator, dtype=torch.float64) for p in mine.parameters()]
        for model in (mine, theirs):
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g.clone()
        if kind in ("SophiaH", "AdaHessian"):
            method._estimates = {name: h for (name, _), h in zip(mine.named_parameters(), curvature, strict=True)}
            other.step(hessian=[h.clone() for h in curvature])
        else:
            other.step()
        before = [p.detach().clone() for p in mine.parameters()]
        method.transform_gradients()
        own.step()
        if kind == "SOAP" and step == 0:
            for p, start in zip(mine.parameters(), before, strict=True):
                p.detach().copy_(start)
            for state in method._states.values():
                state["step"].zero_()
                state["v"].zero_()
            continue
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            # SOAP there turns its basis in float32
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 if kind == "SOAP" else 1e-9), step


def test_an_optimizer_without_a_reader_is_refused():
    model = network()
    optimizer = pytorch_optimizer().Lion(model.parameters())
    with pytest.raises(ConfigError, match=r"Lion are not known"):
        probe(model, nn.CrossEntropyLoss(), data(), level="layer", method=optimizer)


def accelerated(model, optimizer):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'accelerate'")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def of_lightning(model, optimizer):
    module = pytest.importorskip(
        "lightning.pytorch.core.optimizer", reason="needs lightning: pip install lightning (extra 'lightning')"
    )
    return module.LightningOptimizer(optimizer)


def of_fabric(model, optimizer):
    fabric = pytest.importorskip(
        "lightning.fabric", reason="needs lightning: pip install lightning (extra 'lightning')"
    )
    return fabric.Fabric(accelerator="cpu").setup(model, optimizer)[1]


@pytest.mark.parametrize("wrapped", [accelerated, of_lightning, of_fabric])
def test_the_wrappers_of_trainers_are_looked_into(wrapped):
    model = small()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    stepped(model, optimizer, 5)
    outer, batch = wrapped(model, optimizer), (torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3)
    assert outer is not optimizer
    bare, found = (
        probe(model, nn.CrossEntropyLoss(), batch, ["2"], level="layer", method=one) for one in (optimizer, outer)
    )
    assert found.coordinates == f"coordinates: RMSprop in {type(outer).__name__}, M^1/2"
    assert found["2"].kappa == bare["2"].kappa
    with hesscond.watch(model, nn.CrossEntropyLoss(), batch, outer, every=1) as watching:
        row = watching.step()
    assert row["hesscond/2/kappa_own"] > 0


@pytest.mark.parametrize("kind", ["Lookahead", "OrthoGrad", "SAM"])
def test_what_changes_the_steps_of_another_has_the_M_of_the_other(kind):
    """And says which it is: the steps are not those of Adam."""
    model = network()
    wrapper = getattr(pytorch_optimizer(), kind)
    if kind == "SAM":
        optimizer = wrapper(model.parameters(), torch.optim.Adam)
        stepped(model, optimizer.base_optimizer)
    else:
        adam = torch.optim.Adam(model.parameters())
        stepped(model, adam)
        optimizer = wrapper(adam)
    inside = optimizer.base_optimizer if kind == "SAM" else adam
    found, own = (probe(model, nn.CrossEntropyLoss(), data(), level="layer", method=one) for one in (optimizer, inside))
    assert found.coordinates == f"coordinates: Adam in {kind}, M^1/2"
    assert found["3"].kappa == own["3"].kappa


def schedule_free():
    return pytest.importorskip("schedulefree", reason="schedulefree is not installed: pip install schedulefree")


def test_schedule_free_steps_z_by_M_times_the_gradient():
    model = network()
    optimizer = schedule_free().AdamWScheduleFree(model.parameters(), lr=0.01, betas=(0.9, 0.95), warmup_steps=10)
    optimizer.train()
    stepped(model, optimizer, 3)
    before = {name: optimizer.state[p]["z"].clone() for name, p in model.named_parameters()}
    given, _ = stepped(model, optimizer, 1)
    explained = AtWork(model, [optimizer]).preconditioned(given)
    for name, p in model.named_parameters():
        moved = optimizer.state[p]["z"] - before[name]
        assert torch.allclose(moved, -0.01 * explained[name], rtol=1e-10)


def test_the_wrapper_of_schedule_free_has_the_M_of_its_base():
    model = network()
    optimizer = schedule_free().ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer.train()
    stepped(model, optimizer)
    found = probe(model, nn.CrossEntropyLoss(), data(), ["0"], level="layer", method=optimizer)
    assert found.coordinates == "coordinates: SGD in ScheduleFreeWrapper, M^1/2"


@pytest.mark.parametrize("kind", ["SOAP", "Shampoo"])
def test_before_the_first_step(kind):
    """Of SOAP the first step only begins the averages."""
    model = network()
    optimizer = getattr(pytorch_optimizer(), kind)(model.parameters())
    if kind == "SOAP":
        stepped(model, optimizer, 1)
    with pytest.raises(ConfigError, match="taken no step"):
        probe(model, nn.CrossEntropyLoss(), data(), level="layer", method=optimizer)


def test_all_that_are_known_are_tested():
    libraries = {name for name in known_optimizers() if not name.startswith("torch.")}
    tested = {f"pytorch_optimizer.{kind}" for kind, _ in EXACT.values()} | {"pytorch_optimizer.Muon"}
    tested.add("schedulefree.AdamWScheduleFree")
    assert libraries == tested

"""A user's own method and statement: a class each in a file, or in another package that an entry point names."""

import sys

import pytest
import torch
from torch import nn

import hesscond
from hesscond.errors import ConfigError
from hesscond.lazy import load_installed
from hesscond.methods import base, method_class, parse, registered
from hesscond.theorems import base as theorems, verify

#: A whole method and a whole statement, as a user would write them.
EXAMPLE = '''
import torch

from hesscond.capture import dense_layers
from hesscond.hessians import Scaling
from hesscond.methods import Method, register
from hesscond.theorems import Claim, Outcome, Statement
from hesscond.theorems import register as register_statement


@register
class BiasBooster(Method):
    """Steps further in the biases: P = diag(√boost, 1, …, 1)."""

    name = "bias-booster"
    summary = "larger steps in the biases"
    source = "a test"
    preconditions = True

    def __init__(self, model, *, boost: float = 4.0):
        super().__init__(model)
        self.boost = boost

    def transform_gradients(self):
        for layer in dense_layers(self.model).values():
            layer.bias.grad.mul_(self.boost)

    def preconditioner(self, layer):
        d = torch.ones(dense_layers(self.model)[layer].in_features + 1)
        d[0] = self.boost**0.5
        return Scaling(d, "bias booster")


@register_statement
class TraceIsSum(Statement):
    """The trace of a symmetric matrix is the sum of its eigenvalues."""

    id, title, source, text = "trace-is-sum", "the trace is a sum", "a test", "tr A = Σ λ."
    hypotheses = ("A is symmetric",)
    claims = (Claim("sum", "tr A = Σ λ", True),)

    def trial(self, rng):
        A = torch.from_numpy(rng.standard_normal((4, 4)))
        off = float(torch.linalg.eigvalsh(A + A.T).sum() - 2 * A.trace())
        return [Outcome("holds" if abs(off) < 1e-12 else "violated")]
'''


@pytest.fixture
def forgotten():
    """Takes what a test registers out of the registries again."""
    registries = base._REGISTRY, theorems._REGISTRY
    before = [dict(own) for own in registries]
    yield
    for own, kept in zip(registries, before, strict=True):
        own.clear()
        own.update(kept)


@pytest.mark.usefixtures("forgotten")
def test_one_class_is_all_it_takes():
    """Registered, it has options, a name for --method, coordinates in a probe, and composes with others."""
    exec(compile(EXAMPLE, "example.py", "exec"), {})
    assert method_class("bias-booster").summary == "larger steps in the biases"
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    method = parse("bias-booster:boost=9+l2").create(model)
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = x, torch.arange(20) % 3
    plain = hesscond.probe(model, nn.CrossEntropyLoss(), data, ["2"])["2"].hessian(1)
    own = hesscond.probe(model, nn.CrossEntropyLoss(), data, ["2"], method=method)["2"].hessian(1)
    d = torch.tensor([3.0, 1, 1, 1, 1], dtype=torch.float64)
    # L2 in p: PᵀHP + 2λPᵀP
    assert torch.allclose(own, d[:, None] * plain * d + 2e-4 * torch.diag(d.square()), rtol=1e-12, atol=1e-15)


@pytest.fixture
def installed(tmp_path, monkeypatch, forgotten):
    """Installs a package: a module and its metadata."""

    def install(entry_points, code=EXAMPLE, group="methods"):
        (tmp_path / "their_package.py").write_text(code)
        info = tmp_path / "their_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hesscond.{group}]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "their_package", None)
        del sys.modules["their_package"]
        load_installed.cache_clear()

    yield install
    load_installed.cache_clear()


@pytest.mark.parametrize(
    ("entry_point", "code", "reason"),
    [
        ("no_such_module", EXAMPLE, "No module named 'no_such_module'"),
        ("their_package", "1 / 0", "division by zero"),
        ("their_package", EXAMPLE.replace('"bias-booster"', '"bnp"'), "'bnp' is registered already"),
        ("their_package:Missing", EXAMPLE, "no attribute 'Missing'"),
    ],
)
def test_whatever_breaks_in_it_is_said(installed, entry_point, code, reason):
    installed(f"boost = {entry_point}", code)
    with pytest.raises(ConfigError, match=f"methods of {entry_point} cannot be imported: .*{reason}"):
        next(registered())


def test_a_statement_of_an_installed_package_is_verified(installed):
    installed("trace = their_package", group="statements")
    assert verify("trace-is-sum", trials=3).status == "holds"

"""Why κ is unresolved: each construction is made for one cause, and the reason and the advice are those of it."""

import math
import re
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

import hesscond
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.formed import FormedHessian
from hesscond.operators import Diagonal
from hesscond.spectra.forms import FactorForm, ProductForm, SolverLimits
from tests.catalogue import CATALOGUE
from tests.catalogue.wrong_backward import GROUP as WRONG

CE = nn.CrossEntropyLoss()


def drawn(samples=40, features=6, classes=3, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def kappas(result):
    return [kappa for layer in result.values() for kappa in layer.conditions]


#: Constructions by what they were made for: what the reason of an unresolved κ must say, at least once.
MADE_FOR = {
    # features of other samples that tanh, erf, … have rounded to 1
    **dict.fromkeys(
        [
            *("features_tanh_one", "features_tanh_two", "features_sigmoid_one", "features_erf_one"),
            *("features_cosine_one", "features_exponential_one", "features_softplus_zero", "features_repeated"),
        ],
        ("rounds different features to equal values", "standardize the inputs"),
    ),
    # a loss that is flat at its ends
    "loss_tanh_far": ("activations are saturated (Tanh at 8 of 10 values", "standardize the inputs"),
    "loss_sigmoid_far": ("activations are saturated (Sigmoid at 5 of 10 values", "standardize the inputs"),
    "loss_silu_far": ("activations are saturated (Silu at 2 of 10 values", "standardize the inputs"),
    "single_class": ("activations are saturated (LogSoftmax at 12 of 12 values", "standardize the inputs"),
    # log(cosh z) = z − log 2 + …, z² cos² + sin²: differences
    **dict.fromkeys(
        [
            *("loss_log_cosh_far", "loss_mish_far", "loss_charbonnier", "loss_one_minus_sigmoid", "hidden_log_cosh"),
            *("loss_log_cosh_three", "loss_log_exp_three", "sine_and_cosine", "logarithm_of_exponential"),
            *("group_norm_shift", "shift_before_layer_norm", "cosine_scale"),
        ],
        ("differences of larger terms, of which little more than rounding is left", "softplus, logsumexp or log1p"),
    ),
    # logits 1e5 apart
    "shift_float64_wide": ("underflow", "no number is so small"),
    # entries of size 1e-30 beside entries of size 1
    "tiny_features": ("rows or columns of a small scale", "standardize the inputs"),
    # a sample with weight +1 and the same with −1
    "opposed_samples": ("below the rounding of the sums", "measure fewer parameters together"),
    # logits that cancel among a thousand
    "thousand_classes": ("no larger than the rounding of the terms", "without differences of large terms"),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MADE_FOR)
def test_the_reason_is_what_the_construction_was_made_for(name):
    one, (reason, advice) = CATALOGUE[name], MADE_FOR[name]
    found = []
    for level in one.levels:
        model, loss_fn, batch = one.build()
        options = one.arguments(model, loss_fn, batch)
        found += kappas(hesscond.probe(model, loss_fn, batch, level=level, **options))
    assert any(not kappa.resolved and not kappa.is_zero for kappa in found)
    assert any(reason in kappa.reason and advice in kappa.advice for kappa in found), [k.reason for k in found]


#: What once had a wrong number, other than by a wrong backward pass.
HARD = [c.name for c in CATALOGUE.values() if c.close is None and c.judge is None and c.group != WRONG]


@pytest.mark.share(20)
@pytest.mark.parametrize("name", HARD)
def test_what_is_unresolved_has_a_reason_and_what_is_resolved_has_none(name):
    one = CATALOGUE[name]
    for level in one.levels:
        model, loss_fn, batch = one.build()
        options = one.arguments(model, loss_fn, batch)
        try:
            result = hesscond.probe(model, loss_fn, batch, level=level, **options)
            found = kappas(result)
        except hesscond.HesscondError:
            continue
        for kappa in found:
            assert bool(kappa.reason) is not kappa.resolved, kappa
            assert bool(kappa.advice) is not (kappa.resolved or kappa.is_zero), kappa
            for sentence in (kappa.reason, kappa.advice):
                assert "\n" not in sentence
                assert sentence == sentence.strip().rstrip(".")
        frame = result.to_frame()
        assert frame["reason"].tolist() == [kappa.reason for kappa in found]
        assert frame["advice"].tolist() == [kappa.advice for kappa in found]


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_saturated_activations_are_counted(scale):
    """By hand: tanh is saturated where 1 − tanh² has no digit left, |z| > 18."""
    torch.manual_seed(0)
    model, (x, target) = (
        nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
        drawn(20, 20, scale=scale),
    )
    lost = model[0](x).abs() > 18
    found = kappas(hesscond.probe(model, CE, (x, target), layers=["0"]))
    words = f"Tanh at {int(lost.sum())} of {lost.numel()} values, {int(lost.any(0).sum())} of {lost.shape[1]} units"
    assert bool(lost.any()) is (scale > 1)
    for kappa in found:
        assert (words in kappa.reason) is (scale > 1 and not kappa.resolved)
    assert any(not kappa.resolved for kappa in found) is (scale > 1)


def test_standardized_inputs_resolve_what_the_advice_says_they_do():
    torch.manual_seed(0)
    model, (x, target) = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)).double(), drawn(20, 20, scale=50.0)
    before = kappas(hesscond.probe(model, CE, (x, target), layers=["0"]))
    assert any("standardize the inputs" in kappa.advice for kappa in before)
    after = kappas(hesscond.probe(model, CE, ((x - x.mean(0)) / x.std(0), target), layers=["0"]))
    assert all(kappa.resolved for kappa in after)


def test_a_precision_below_float64():
    torch.manual_seed(0)
    model, (x, target) = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), drawn()
    x = x * torch.logspace(0, -6, 6)
    low = hesscond.probe(model, CE, (x.float(), target), layers=["0"], dtype=None)
    kappa = low["0"].kappa[0]
    assert not kappa.resolved
    assert "fewer digits than float64 (float32)" in kappa.reason
    assert "dtype=torch.float64" in kappa.advice
    assert hesscond.probe(model, CE, (x.float(), target), layers=["0"])["0"].kappa[0].resolved


def test_a_number_of_products():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), drawn()
    order = sum(p.numel() for p in model.parameters())
    kappa = hesscond.probe(model.double(), CE, batch, level="network", products=20)["network"].kappa
    assert f"20 products bound κ of {order} parameters from below only" in kappa.reason
    assert f"products={order}" in kappa.advice
    again = hesscond.probe(model, CE, batch, level="network", products=order)["network"].kappa
    assert "products" not in again.reason


def test_an_iteration_that_ended():
    values = torch.linspace(1e-9, 1, 3000, dtype=torch.float64)
    few = SolverLimits(products=40, dense_order=10, quick_order=10)
    kappa = ProductForm(Diagonal(values), limits=few).measured(1e-8)
    assert not kappa.resolved
    assert re.search(r"iteration for the smallest nonzero eigenvalue of 3,000 parameters .*40 products", kappa.reason)
    assert "raise rtol" in kappa.advice
    # a memory that holds no matrix is what can be raised
    small = SolverLimits(products=40, memory=8 * 3 * 3000 * 30)
    kappa = ProductForm(Diagonal(values), limits=small).measured(1e-8)
    (size,) = re.search(r"raise memory to ([\d.]+) GB", kappa.advice).groups()
    assert float(size) * 1e9 >= 8 * 3 * 3000**2


@pytest.mark.parametrize(
    ("smallest", "reason"),
    [
        (1e-16, "no gap separates small eigenvalues from those of the size of rounding"),
        (3e-15, "small eigenvalues lie above rounding and below the bound of their error"),
    ],
)
def test_a_tie_at_the_cutoff(smallest, reason):
    """σ of 3e-14 with others of the size of rounding, or of neither that nor more than its bound."""
    generator = np.random.default_rng(0)
    U, V = (np.linalg.qr(generator.standard_normal((8, 8)))[0] for _ in range(2))
    kappa = FactorForm(U @ np.diag([1, 0.5, 0.2, 0.1, 0.05, 3e-14, smallest, smallest]) @ V, error=1e-15).condition()
    assert (kappa.resolved, kappa.rank, kappa.reason) == (False, 6, reason)


def test_the_rounding_of_a_hessian_that_was_summed_up():
    """The factor resolves κ = 1e24; a sum that is known to 1e-15 or so leaves eigenvalues of that size open."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    F = torch.tensor([1.0, 1e-3, 1e-12], dtype=torch.float64)[:, None] * Q
    assert FactoredHessian(F, None, None).condition_number().value == pytest.approx(1e24, rel=1e-6)
    eye = torch.eye(3, dtype=torch.float64)
    kappa, clear = (FormedHessian(F.T @ F + e * eye, F.norm(dim=0), 3).condition_number() for e in (3e-15, 1e-14))
    assert "rounding of the sums that form the Hessian" in kappa.reason
    assert (kappa.resolved, clear.resolved) == (False, True)


def test_a_matrix_too_large_for_its_exact_rank(monkeypatch):
    monkeypatch.setattr(import_module("hesscond.spectra.rank"), "EXACT_WORK", 0)
    generator = np.random.default_rng(0)
    U, V = (np.linalg.qr(generator.standard_normal((30, 30)))[0] for _ in range(2))
    F = (U * np.r_[np.linspace(1, 2, 29), 1e-20]) @ V.T
    kappa = hesscond.condition_number(factor=F)
    assert not kappa.resolved
    assert "exact rank" in kappa.reason
    assert "error=" in kappa.advice
    assert hesscond.condition_number(factor=F, error=1e-12).resolved


def test_unresolved_is_infinite_and_has_the_reason_in_its_text():
    result = hesscond.probe(*CATALOGUE["loss_tanh_far"].build())
    (kappa,) = (kappa for kappa in kappas(result) if not kappa.resolved)
    assert math.isinf(float(kappa))
    assert kappa.reason in str(kappa)
    assert kappa.reason not in repr(kappa)

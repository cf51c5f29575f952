"""Whether probes agree with the dense Hessian of automatic differentiation; without pytest, for machines with a GPU."""

import functools
import math

import torch

import hesscond
from tests.catalogue import CASES
from tests.truth import block, case_truth, eligible_layers

__all__ = ["CASES", "every_block_agrees", "probed"]


@functools.cache
def probed(example, seed, level, device):
    model, loss_fn, batch = example.make(seed, device)
    return hesscond.probe(model, loss_fn, batch, level=level)


def every_block_agrees(example, seed, level, device):
    """A case at one level on a device is what dense automatic differentiation says."""
    truth, size = case_truth(example, seed, str(device))
    result = probed(example, seed, level, str(device))
    assert list(result) == list(truth)
    assert set(result.skipped) & set(eligible_layers(example.make()[0])) == set(example.unreached)
    for name, layer in result.items():
        whole = truth[name]
        assert isinstance(layer.route, str)
        assert layer.route
        if level == "layer":
            assert layer.n_params == len(whole)
            agrees(layer.kappa, whole, layer, {}, example, device)
            continue
        assert layer.n_params == size[name]
        assert tuple(layer.units) == tuple(range(len(whole) // size[name]))
        assert len(layer.kappa) == len(layer.units)
        for unit, kappa in zip(layer.units, layer.kappa, strict=True):
            agrees(kappa, block(whole, size[name], unit), layer, {"unit": unit}, example, device)


def agrees(kappa, truth, layer, which, example, device):
    """One block: the Hessian, its rank and inertia, its eigenpairs and κ are those of the dense truth."""
    ours = layer.hessian(**which)
    assert ours.dtype == torch.float64
    assert ours.device.type == torch.device(device).type
    assert ours.shape == truth.shape
    ours, norm = ours.cpu(), float(truth.norm())
    assert (ours - truth).norm() <= 1e-10 * norm
    assert kappa.rank + kappa.nullity == len(truth)
    if example.psd:
        assert kappa.negative == 0
    eigenvalues = torch.linalg.eigvalsh(truth)
    sizes = eigenvalues.abs()
    nonzero = eigenvalues[sizes > 1e-11 * norm]
    if not kappa.resolved:
        assert float(kappa) == math.inf
        if kappa.rank:
            assert kappa.lower <= float(sizes.max() / sizes[sizes > 1e-11 * norm].min()) * (1 + 1e-9)
        return
    if not ((sizes > 1e-14 * norm) & (sizes <= 1e-11 * norm)).any():
        # the dense truth can tell what is zero
        assert kappa.rank == len(nonzero)
        assert kappa.negative == int((nonzero < 0).sum())
    assert kappa.rank >= len(nonzero)

    own, vectors = layer.eigenvalues(**which).cpu(), layer.eigenvectors(**which).cpu()
    assert own.shape == (kappa.rank,)
    assert vectors.shape == (len(truth), kappa.rank)
    assert (own[:-1] >= own[1:]).all()
    matched = own[own.abs() > 1e-11 * norm]
    assert torch.allclose(matched, nonzero.flip(0), rtol=1e-10, atol=1e-13 * norm)
    assert int((own < 0).sum()) == kappa.negative
    assert (vectors.T @ vectors - torch.eye(kappa.rank, dtype=torch.float64)).norm() <= 1e-10
    assert (ours @ vectors - vectors * own).norm() <= 1e-10 * norm

    # the eigenvalues of the dense truth are themselves only good to eps·norm
    if kappa.rank == len(nonzero):
        true_kappa = float(nonzero.abs().max() / nonzero.abs().min())
        slack = 1e-10 + 1e-14 * len(truth) * true_kappa
        assert abs(float(kappa) - true_kappa) <= slack * true_kappa
        assert kappa.lower * (1 - slack) <= true_kappa <= kappa.upper * (1 + slack)
        assert abs(kappa.lambda_max - float(nonzero.abs().max())) <= 1e-10 * kappa.lambda_max

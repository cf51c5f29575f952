"""as_operator: what it takes (curvlinops and scipy too), and what it refuses."""

from __future__ import annotations

import curvlinops
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from curvlinops.examples import TensorLinearOperator
from scipy.sparse.linalg import LinearOperator as ScipyOperator, aslinearoperator
from torch import nn

from hesscond.errors import MatrixError
from hesscond.operators import Dense, Diagonal, Gram, Matrix, as_operator, trace

S = np.array([[2.0, 1.0, 0.0], [1.0, -3.0, 0.5], [0.0, 0.5, 7.0]])


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.tensor(S), torch.float64),
        (torch.tensor(S).float(), torch.float32),
        (S, torch.float64),
        (S.astype(np.float32), torch.float32),
        (np.asfortranarray(S), torch.float64),
        (S.astype(">f8"), torch.float64),
        (S.astype(np.longdouble), torch.float64),
        (scipy.sparse.csr_matrix(S), torch.float64),
        (scipy.sparse.coo_array(S.astype(np.float32)), torch.float32),
        (scipy.sparse.dia_array(S), torch.float64),
        (aslinearoperator(S), torch.float64),
        (aslinearoperator(scipy.sparse.csr_array(S)), torch.float64),
        (ScipyOperator((3, 3), matvec=lambda v: S @ v), torch.float64),
        (2 * aslinearoperator(S / 2), torch.float64),
        (TensorLinearOperator(torch.tensor(S)), torch.float64),
        (TensorLinearOperator(torch.tensor(S).float()), torch.float32),
        (2 * TensorLinearOperator(torch.tensor(S / 2)), torch.float64),
    ],
)
def test_every_form_is_the_same_matrix(given, dtype):
    A = as_operator(given)
    assert A.dtype == dtype
    assert torch.equal(A.to_dense(), torch.tensor(S, dtype=dtype))
    assert as_operator(A) is A


def test_integers_become_float64_and_nothing_is_shared_that_may_not_be():
    assert torch.equal(as_operator(np.array([[2, 1], [1, 2]])).to_dense(), torch.tensor([[2.0, 1], [1, 2]]).double())
    assert as_operator(torch.eye(2, dtype=torch.int32)).dtype == torch.float64
    frozen = S.copy()
    frozen.setflags(write=False)
    assert torch.equal(as_operator(frozen).to_dense(), torch.tensor(S))
    leaf = torch.tensor(S, requires_grad=True)
    assert not (as_operator(leaf) @ torch.ones(3).double()).requires_grad


class Nothing:
    shape = (3, 3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.ones(3, 2), r"\(3, 2\)"),
        (torch.ones(3), "2 dimensions"),
        (torch.eye(2, dtype=torch.complex64), "complex"),
        (S * 1j, "real numbers"),
        (np.array([["a"]]), "real numbers"),
        (np.array([[np.nan]]), "NaN"),
        (S + np.eye(3, k=1) * 1e-12, "not symmetric"),
        (scipy.sparse.csr_array(S + np.eye(3, k=1) * 1e-12), "not symmetric"),
        (scipy.sparse.csr_array(np.ones((2, 3))), r"\(2, 3\)"),
        (scipy.sparse.csr_array(S * 1j), "real numbers"),
        (scipy.sparse.csr_array(np.array([[np.inf]])), "infinite"),
        (aslinearoperator(S + np.eye(3, k=1) * 1e-9), "not symmetric"),
        (aslinearoperator(np.ones((2, 3))), r"\(2, 3\)"),
        (aslinearoperator(S * np.nan), "NaN"),
        (TensorLinearOperator(torch.tensor(S) + torch.diag(torch.full((2,), 1e-9).double(), 1)), "not symmetric"),
        (TensorLinearOperator(torch.ones(2, 3)), r"\(2, 3\)"),
        (Matrix(torch.eye(2)), r"Gram\(F\)"),
        ([[1.0]], "list"),
        (Nothing(), "Nothing"),
        (pd.DataFrame(S), "DataFrame"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_symmetric_matrix_is_refused(given, sentence):
    with pytest.raises(MatrixError, match=sentence):
        as_operator(given)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_symmetry_check_knows_no_scale(scale, dtype):
    rng = np.random.default_rng(0)
    n = 200
    A = rng.standard_normal((n, n))
    A = (A + A.T) * scale
    # symmetric up to rounding only, as a product through a network is
    as_operator(aslinearoperator((A * (1 + 4 * np.finfo(dtype).eps * rng.standard_normal((n, n)))).astype(dtype)))
    single = A.copy()
    single[3, 7] *= -1  # one entry
    with pytest.raises(MatrixError, match="not symmetric"):
        as_operator(aslinearoperator(single.astype(dtype)))


def test_products_that_differ_each_time_are_no_matrix():
    rng = np.random.default_rng(0)
    noisy = ScipyOperator((5, 5), matvec=lambda v: v * (1 + 0.1 * rng.random()), dtype=float)
    with pytest.raises(MatrixError, match="eval mode"):
        as_operator(noisy)


def network(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(17, 4, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 3, (17,), generator=generator)
    return model, nn.CrossEntropyLoss(), [(x[:10], y[:10]), (x[10:], y[10:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["HessianLinearOperator", "GGNLinearOperator"])
def test_curvlinops_of_a_network(kind, dtype):
    model, loss, data = network(dtype)
    theirs = getattr(curvlinops, kind)(model, loss, list(model.parameters()), data)
    A = as_operator(theirs)
    assert (A.order, A.dtype) == (43, dtype)
    v = torch.randn(43, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    product = A @ v
    assert not product.requires_grad
    assert torch.equal(product, (theirs @ v).detach())
    dense = A.to_dense().double()
    assert float((dense - dense.T).norm() / dense.norm()) < 1e3 * torch.finfo(dtype).eps
    exact = trace(A, 43)
    assert exact.value == pytest.approx(float(dense.trace()), rel=1e-5 if dtype == torch.float32 else 1e-12)


def test_curvlinops_in_train_mode_with_dropout_is_refused():
    model, loss, data = network()
    model.append(nn.Dropout(0.5))
    theirs = curvlinops.HessianLinearOperator(model, loss, list(model.parameters()), data, check_deterministic=False)
    with pytest.raises(MatrixError, match="eval mode"):
        as_operator(theirs)


def test_ours_and_theirs_add_up():
    A = as_operator(TensorLinearOperator(torch.tensor(S)))
    total = A + Diagonal(torch.ones(3).double()) + Gram(Matrix(torch.eye(3).double())) - Dense(torch.tensor(S))
    assert torch.equal(total.to_dense(), 2 * torch.eye(3, dtype=torch.float64))

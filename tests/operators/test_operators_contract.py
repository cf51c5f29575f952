"""Every operator of hesscond.operators keeps the contract."""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator

from hesscond.operators import (
    Congruence,
    Dense,
    Diagonal,
    Gram,
    LinearOperator,
    Matrix,
    Shifted,
    Span,
    adapters,
    as_operator,
    operator,
)
from tests.operators.operator_contract import OperatorCase, OperatorContract, all_listed, fractions

N = 12


def entries(*shape, seed=0):
    """Random entries that float32 holds exactly, over six decades."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape, generator=generator, dtype=torch.float64) * 6
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10**-scale).float().double()


def symmetric(n=N, seed=0):
    A = entries(n, n, seed=seed)
    return torch.triu(A) + torch.triu(A, 1).T


def without(A, coordinates):
    """A with those rows and columns zero."""
    kept = 1 - coordinates.sum(1)
    return kept[:, None] * A * kept


A, B = symmetric(), symmetric(seed=1)
F = entries(7, N, seed=3)
P = entries(N, 9, seed=4)
d = entries(N, seed=5)
#: Two matrices that nearly cancel, and one that is nearly a multiple of the identity.
NEAR = (symmetric() + 2**-16 * symmetric(seed=1)).float().double()
FLAT = torch.eye(N, dtype=torch.float64) + 2.0**-20 * torch.diag(torch.arange(N, dtype=torch.float64))
#: A matrix whose large part is almost orthogonal to the columns of another.
GRADED = torch.diag(torch.cat([torch.full((4,), 1024.0, dtype=torch.float64), d[4:]]))
WEAK = torch.cat([P[:4].roll(1, 1) * 2**-12, P[4:]])
COORDINATES = torch.eye(N, dtype=torch.float64)[:, [1, 4, 5]]
#: A matrix that annihilates the coordinates exactly.
EXACTLY_NULL = without(A, COORDINATES)


class Known(Dense):
    """A dense matrix that knows its null space."""

    def __init__(self, A, space):
        super().__init__(A)
        self.space = space

    @property
    def null_space(self):
        return self.space


class Foreign:
    """An operator as of another torch library."""

    def __init__(self, A):
        self.A, self.shape, self.dtype, self.device = A, tuple(A.shape), A.dtype, A.device

    def __matmul__(self, vectors):
        return self.A @ vectors


def case(make, exact):
    return OperatorCase(lambda dtype, device: make(lambda A: A.to(device, dtype)), lambda dtype: exact())


CASES = {
    "matrix": case(lambda to: Matrix(to(F)), lambda: fractions(F)),
    "adjoint": case(lambda to: Matrix(to(F)).T, lambda: fractions(F.T)),
    "dense": case(lambda to: Dense(to(A)), lambda: fractions(A)),
    "order-1": case(lambda to: Dense(to(A[:1, :1])), lambda: fractions(A[:1, :1])),
    "diagonal": case(lambda to: Diagonal(to(d)), lambda: fractions(torch.diag(d))),
    "gram": case(lambda to: Gram(Matrix(to(F))), lambda: fractions(F).T @ fractions(F)),
    "sum": case(
        lambda to: 0.5 * Dense(to(A)) - 3 * Dense(to(B)) + Diagonal(to(d)),
        lambda: fractions(A) / 2 - 3 * fractions(B) + fractions(torch.diag(d)),
    ),
    "sum-psd": case(
        lambda to: Gram(Matrix(to(F))) + 2 * Diagonal(to(d.abs())),
        lambda: fractions(F).T @ fractions(F) + 2 * fractions(torch.diag(d.abs())),
    ),
    "sum-cancelling": case(lambda to: Dense(to(NEAR)) - Dense(to(A)), lambda: fractions(NEAR) - fractions(A)),
    "negative": case(lambda to: -Dense(to(A)) / 4, lambda: -fractions(A) / 4),
    "shifted": case(
        lambda to: Dense(to(A)).shifted(0.25), lambda: fractions(A) - fractions(0.25 * torch.eye(N, dtype=torch.double))
    ),
    "shifted-cancelling": case(
        lambda to: Dense(to(FLAT)).shifted(2.0).shifted(-1.0),
        lambda: fractions(FLAT) - fractions(torch.eye(N, dtype=torch.double)),
    ),
    "shifted-psd": case(
        lambda to: Shifted(Gram(Matrix(to(F))), -1.0),
        lambda: fractions(F).T @ fractions(F) + fractions(torch.eye(N, dtype=torch.double)),
    ),
    "congruence": case(
        lambda to: Congruence(Dense(to(A)), Matrix(to(P))), lambda: fractions(P).T @ fractions(A) @ fractions(P)
    ),
    "congruence-cancelling": case(
        lambda to: Congruence(Diagonal(to(GRADED.diagonal())), Matrix(to(WEAK))),
        lambda: fractions(WEAK).T @ fractions(GRADED) @ fractions(WEAK),
    ),
    "known": OperatorCase(
        lambda dtype, device: 2 * Known(EXACTLY_NULL.to(device, dtype), Span(COORDINATES.to(device, dtype))),
        lambda dtype: 2 * fractions(EXACTLY_NULL),
    ),
    "scipy-sparse": OperatorCase(
        lambda dtype, device: as_operator(scipy.sparse.csr_array(A.to(dtype).numpy())),
        lambda dtype: fractions(A),
        follows=False,
    ),
    "scipy-operator": OperatorCase(
        lambda dtype, device: as_operator(
            ScipyOperator((N, N), matvec=lambda v: A.to(dtype).numpy() @ v, dtype=A.to(dtype).numpy().dtype)
        ),
        lambda dtype: fractions(A),
        follows=False,
    ),
    "scipy-identity": OperatorCase(
        lambda dtype, device: as_operator(scipy.sparse.linalg.aslinearoperator(scipy.sparse.eye_array(N))),
        lambda dtype: fractions(np.eye(N)),
        dtypes=(torch.float64,),
        follows=False,
    ),
    "foreign": OperatorCase(
        lambda dtype, device: as_operator(Foreign(A.to(device, dtype))), lambda dtype: fractions(A)
    ),
}


class TestOperators(OperatorContract):
    CASES = CASES


def test_every_class_is_listed():
    made = set()

    def look(value):
        if isinstance(value, LinearOperator):
            made.add(type(value))
            look([*vars(value).values()])
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)

    for one in CASES.values():
        look(one.make(torch.float64, torch.device("cpu")))
    for module in (adapters, operator):
        assert all_listed(module, made) == set()

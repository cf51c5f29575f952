"""Operator arithmetic, what is known of its results, and what is refused."""

import numpy as np
import pytest
import torch

from hesscond.errors import MatrixError
from hesscond.operators import Congruence, Dense, Diagonal, Gram, Matrix, Shifted, Span, Sum
from tests.operators.test_operators_contract import Known

ONE = torch.tensor([[2.0, 1.0], [1.0, -3.0]], dtype=torch.float64)
TWO = torch.tensor([[0.5, 4.0], [4.0, 1.0]], dtype=torch.float64)


@pytest.fixture
def A():
    return Dense(ONE)


@pytest.fixture
def B():
    return Dense(TWO)


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        (lambda A, B: A + B, ONE + TWO),
        (lambda A, B: A - B, ONE - TWO),
        (lambda A, B: 2 * A, 2 * ONE),
        (lambda A, B: A * 2, 2 * ONE),
        (lambda A, B: np.float64(2) * A, 2 * ONE),
        (lambda A, B: A * np.int64(2), 2 * ONE),
        (lambda A, B: torch.tensor(2.0) * A, 2 * ONE),
        (lambda A, B: A * torch.tensor([2.0]), 2 * ONE),
        (lambda A, B: -A, -ONE),
        (lambda A, B: A / 4, ONE / 4),
        (lambda A, B: A / np.float32(4), ONE / 4),
        (lambda A, B: A.shifted(1.5), ONE - 1.5 * torch.eye(2)),
        (lambda A, B: A + 1.5, ONE + 1.5 * torch.eye(2)),
        (lambda A, B: np.float64(1.5) + A - 0.5, ONE + torch.eye(2)),
        (lambda A, B: A + 1.5 * torch.eye(2), ONE + 1.5 * torch.eye(2)),
        (lambda A, B: 3 * (A - B / 2) - 0.5 * (A + A), 2 * ONE - 1.5 * TWO),
    ],
)
def test_arithmetic(A, B, combine, expected):
    result = combine(A, B)
    assert torch.equal(result.to_dense(), expected)
    assert torch.equal(A.to_dense(), ONE)
    assert torch.equal(B.to_dense(), TWO)


def test_sums_are_flat(A, B):
    total = 3 * (A - 0.5 * (B + 2 * A)) + B
    assert [type(term) for _, term in total.terms] == [Dense] * 4
    assert [factor for factor, _ in total.terms] == [3.0, -1.5, -3.0, 1.0]
    shifted = A.shifted(1.0).shifted(2.0)
    assert shifted.A is A
    assert shifted.shift == 3.0


@pytest.mark.parametrize(
    "combine",
    [
        lambda A: A + "1",
        lambda A: A - ONE[0],
        lambda A: A * A,
        lambda A: A * np.ones(2),
        lambda A: np.ones(2) * A,
        lambda A: A * "2",
        lambda A: 1 / A,
        lambda A: A / A,
        lambda A: A * 2j,
    ],
)
def test_what_is_no_arithmetic_is_a_type_error(A, combine):
    with pytest.raises(TypeError):
        combine(A)


@pytest.mark.parametrize(
    ("combine", "sentence"),
    [
        (lambda A: A / 0, "divided by zero"),
        (lambda A: A * float("nan"), "finite"),
        (lambda A: A.shifted(float("inf")), "finite"),
        (lambda A: A + Dense(torch.eye(3).double()), r"\(2, 2\) and \(3, 3\)"),
        (lambda A: A + Dense(ONE.float()), "float64.*float32"),
        (lambda A: Sum([]), "at least one"),
        (lambda A: Congruence(A, Matrix(torch.ones(3, 2).double())), r"\(3, 2\)"),
        (lambda A: Congruence(A, Matrix(torch.ones(2, 3))), "float64.*float32"),
        (lambda A: Dense(torch.ones(2, 3)), "square"),
        (lambda A: Dense(torch.ones(2)), "2 dimensions"),
        (lambda A: Diagonal(ONE), "1 dimension"),
        (lambda A: Dense(torch.tensor([[1.0, 2.0], [2.0 + 1e-6, 1.0]])), "not symmetric"),
        (lambda A: Dense(torch.tensor([[float("nan")]])), "NaN"),
        (lambda A: Dense(torch.eye(2, dtype=torch.int64)), "int64"),
        (lambda A: Dense(torch.ones(0, 0)), "at least one row"),
        (lambda A: Matrix(torch.eye(2, dtype=torch.complex64)), "complex64"),
    ],
)
def test_what_does_not_fit_is_refused(A, combine, sentence):
    with pytest.raises(MatrixError, match=sentence):
        combine(A)


def test_definiteness_is_only_claimed_where_it_is_known():
    P = Gram(Matrix(ONE))
    D = Diagonal(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert all(A.psd for A in (P, D, P + D, 2 * P, P / 3, P.shifted(-1.0)))
    assert Congruence(P, Matrix(TWO)).psd
    for A in (-P, P - D, P.shifted(1e-30), Dense(ONE), Diagonal(torch.tensor([-1e-30, 1.0]).double()), P + Dense(TWO)):
        assert not A.psd


def test_null_spaces_that_are_known_stay_known():
    eye = torch.eye(3, dtype=torch.float64)
    A, other = (Known(eye - eye[:, :1] * eye[0], Span(eye[:, :1])) for _ in range(2))
    space = A.space
    assert (2 * A).null_space is space
    assert (A - 3 * A).null_space is space
    assert (A + other).null_space is None  # it would have to be worked out
    assert (0 * A).null_space is None
    assert A.shifted(1.0).null_space is None


def cancelling(order):
    """Operators in which nearly everything cancels, with their exact matrices."""
    generator = torch.Generator().manual_seed(order)
    small = torch.randn(order, order, generator=generator, dtype=torch.float64)
    small = ((small + small.T) * 2**-20).float().double()
    large = torch.randn(order, order, generator=generator, dtype=torch.float64)
    large = (large + large.T).float().double()
    both = (large + small).float().double()
    eye = torch.eye(order, dtype=torch.float64)
    return [
        ("sum", Dense(both.float()) - Dense(large.float()), both - large),
        ("shifted", Shifted(Dense((eye + small).float()), 1.0), (eye + small).float().double() - eye),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_rounding_grows_with_cancellation_and_is_not_wildly_pessimistic(kind):
    order = 60
    name, A, exact = cancelling(order)[kind]
    naive = 32 * torch.finfo(A.dtype).eps
    v = torch.randn(order, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(A.dtype)
    errors = (A @ v).double() - exact @ v.double()
    relative = float((errors.norm(dim=0) / (torch.linalg.matrix_norm(exact, 2) * v.double().norm(dim=0))).max())
    assert relative <= A.rounding, name
    assert relative > naive / 10, "nothing cancelled: the test shows nothing"
    assert A.rounding <= 1e4 * relative
    # a fixed multiple of round-off, as for an operator by itself, would not have been honest here
    assert A.rounding > 50 * naive


def test_rounding_costs_no_products_where_nothing_can_cancel():
    class Counted(Gram):
        products = 0

        def multiply(self, vectors):
            Counted.products += vectors.shape[1]
            return super().multiply(vectors)

    A = Counted(Matrix(ONE))
    for operator in (A, 2 * A, A + A, A.shifted(-3.0)):
        assert operator.rounding > 0
    assert Counted.products == 0


def test_a_difference_of_equals_knows_no_digit():
    A = Dense(ONE)
    assert (A - A).rounding == 1.0

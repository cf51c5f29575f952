"""What every operator must do. A test class inherits `OperatorContract` and lists its operators in ``CASES``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch

from hesscond.errors import MatrixError
from hesscond.operators import LinearOperator, SymmetricOperator, trace

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class OperatorCase:
    """An operator to be tested.

    Attributes
    ----------
    make
        Makes it, in a precision, on a device.
    exact
        Its matrix from another source, for what ``make`` makes in that precision: `Fraction` entries (exact arithmetic,
        see `fractions`) or float64 ones (then only float32 products are compared with it to their rounding, float64
        ones to 1e-10 of the norm); None: there is no other source.
    dtypes
        The precisions to test.
    follows
        Whether it is made on the device that is asked for.
    """

    make: Callable[[torch.dtype, torch.device], LinearOperator]
    exact: Callable[[torch.dtype], np.ndarray] | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    follows: bool = True


def fractions(matrix):
    """The entries as exact fractions, for ``+``, ``*`` and ``@``."""
    return np.vectorize(Fraction, otypes=[object])(np.asarray(matrix, dtype=float))


def all_listed(module, listed):
    """The concrete operator classes a module defines that no case makes (or takes as an operand): should be none."""
    defined = {
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, LinearOperator) and cls.__module__ == module.__name__ and not inspect.isabstract(cls)
    }
    return defined - listed


def random(shape, like, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def probes(A):
    """Vectors (n, k) that find errors: random ones, single entries, graded ones, and dominated by one entry."""
    n = A.shape[1]
    graded = torch.logspace(0, -12, n, dtype=torch.float64).to(A.device, A.dtype)
    single = torch.zeros(n, dtype=A.dtype, device=A.device)
    single[n // 2] = 1.0
    return torch.stack([*random((6, n), A), graded, graded.flip(0), single, 1e-6 * random((n,), A, 1) + single], 1)


class OperatorContract:
    """Inherit, name ``Test…``, and set ``CASES``."""

    CASES: ClassVar[dict[str, OperatorCase]] = {}

    def pytest_generate_tests(self, metafunc):
        cases = metafunc.cls.CASES
        if "case" in metafunc.fixturenames:
            given = [(case, dtype) for case in cases.values() for dtype in case.dtypes]
            names = [f"{name}-{str(dtype)[6:]}" for name, case in cases.items() for dtype in case.dtypes]
            metafunc.parametrize(("case", "dtype"), given, ids=names)

    @pytest.fixture(params=["cpu", *["cuda"] * torch.cuda.is_available()])
    def device(self, request):
        return torch.device(request.param)

    @pytest.fixture
    def A(self, case, dtype, device):
        return case.make(dtype, device)

    def size(self, A):
        """‖A‖₂."""
        return float(torch.linalg.matrix_norm(A.to_dense().double(), 2))

    def close(self, A, one, other, vectors):
        """Whether two ways to a product agree up to the rounding the operator admits."""
        allowed = 2 * A.rounding * self.size(A) * vectors.double().norm(dim=0)
        return bool(((one.double() - other.double()).norm(dim=0) <= allowed).all())

    def test_it_says_what_it_is(self, A, case, dtype, device):
        assert len(A.shape) == 2
        assert all(type(size) is int and size > 0 for size in A.shape)
        assert A.dtype == dtype
        # what SciPy multiplies with is on the host
        assert A.device == torch.empty(0, device=device if case.follows else "cpu").device
        assert 0 < A.rounding < math.inf

    def test_a_product_is_new_of_its_dtype_and_leaves_the_vectors(self, A, case, dtype):
        for vectors in (random((A.shape[1], 3), A), random((A.shape[1],), A), random((A.shape[1], 1), A)):
            before = vectors.clone()
            first = A @ vectors
            assert first.shape == (A.shape[0], *vectors.shape[1:])
            assert first.dtype == A.dtype
            assert first.device == A.device
            assert not first.requires_grad
            assert torch.equal(vectors, before)
            kept = first.clone()
            first.fill_(float("nan"))
            assert torch.equal(vectors, before)
            # a second product is not affected by what was done to the first, and the same bit by bit
            assert torch.equal(A @ vectors, kept)

    def test_any_precision_is_taken(self, A, case, dtype):
        vectors = random((A.shape[1], 2), A)
        other = torch.float64 if A.dtype == torch.float32 else torch.float32
        assert torch.equal(A @ vectors.to(other), A @ vectors.to(other).to(A.dtype))
        assert (A @ torch.ones(A.shape[1], dtype=torch.int64, device=A.device)).dtype == A.dtype

    def test_strided_vectors_are_taken(self, A, case, dtype):
        wide = random((A.shape[1], 6), A)
        tall = random((4, A.shape[1]), A)
        assert self.close(A, A @ wide[:, ::2], A @ wide[:, ::2].contiguous(), wide[:, ::2])
        assert self.close(A, A @ tall.T, A @ tall.T.contiguous(), tall.T)

    def test_a_block_is_its_vectors(self, A, case, dtype):
        vectors = random((A.shape[1], 5), A)
        single = torch.stack([A @ column for column in vectors.T], 1)
        assert self.close(A, A @ vectors, single, vectors)
        assert (A @ vectors[:, :0]).shape == (A.shape[0], 0)

    def test_it_is_linear(self, A, case, dtype):
        u, v = random((A.shape[1], 3), A, 1), random((A.shape[1], 3), A, 2)
        # quarters and halves are exact
        combined = 0.25 * (A @ u) - 2 * (A @ v)
        sizes = 0.25 * u.double().norm(dim=0) + 2 * v.double().norm(dim=0)
        errors = (A @ (0.25 * u - 2 * v)).double() - combined.double()
        assert bool((errors.norm(dim=0) <= 3 * A.rounding * self.size(A) * sizes).all())
        assert not bool((A @ torch.zeros_like(u)).any())

    def test_its_adjoint_is_the_transpose(self, A, case, dtype):
        u, v = random((A.shape[0], 4), A, 1).double(), random((A.shape[1], 4), A, 2).double()
        defect = u.T @ (A @ v).double() - (A.T @ u).double().T @ v
        allowed = 2 * A.rounding * self.size(A) * u.norm(dim=0)[:, None] * v.norm(dim=0)
        assert bool((defect.abs() <= allowed).all())
        assert A.T.shape == A.shape[::-1]
        if isinstance(A, SymmetricOperator):
            assert A.T is A

    def test_to_dense_is_the_matrix(self, A, case, dtype):
        dense = A.to_dense()
        assert dense.shape == A.shape
        assert dense.dtype == A.dtype
        vectors = probes(A)
        product = (dense.double() @ vectors.double()).to(A.dtype)
        assert self.close(A, A @ vectors, product, vectors)
        dense.fill_(0.0)
        assert bool(A.to_dense().any())

    def test_its_rounding_is_honest(self, A, case, dtype):
        if case.exact is None:
            pytest.skip("nothing to compare with")
        exact = case.exact(A.dtype)
        assert exact.shape == A.shape
        size = float(np.linalg.norm(exact.astype(float), 2))
        vectors = probes(A)
        product = (A @ vectors).double().cpu()
        allowed = A.rounding
        if exact.dtype == object:
            truth = exact @ fractions(vectors.double().cpu())
            errors = (fractions(product) - truth).astype(float)
        else:
            errors = product.numpy() - exact @ vectors.double().cpu().numpy()
            allowed = max(allowed, 1e-10)
        assert (np.linalg.norm(errors, axis=0) <= allowed * size * np.linalg.norm(vectors.cpu().double(), axis=0)).all()

    def test_scipy_sees_the_same(self, A, case, dtype):
        there = A.to_scipy()
        vectors = random((A.shape[1], 3), A)
        array = vectors.cpu().numpy()
        array.setflags(write=False)
        assert there.shape == A.shape
        assert there.dtype == array.dtype
        for given in (array, array[:, :1], array[:, 0]):
            product = torch.from_numpy((there @ given).reshape(A.shape[0], -1)).to(A.device)
            here = vectors[:, : product.shape[1]]
            assert self.close(A, product, A @ here, here)
        assert (there @ array[:, 0]).shape == (A.shape[0],)
        back = random((A.shape[0], 2), A)
        assert self.close(A, torch.from_numpy(there.H @ back.cpu().numpy()).to(A.device), A.T @ back, back)

    def test_what_does_not_fit_is_refused(self, A, case, dtype):
        n = A.shape[1]
        for wrong in (torch.ones(n + 1), torch.ones(n + 1, n), torch.ones(n, 1, 1), torch.tensor(1.0)):
            with pytest.raises(MatrixError, match=f"{n}"):
                A @ wrong.to(A.device, A.dtype)
        with pytest.raises(MatrixError, match="to_scipy"):
            A @ np.ones(n)
        with pytest.raises(MatrixError, match="real vectors"):
            A @ torch.ones(n, dtype=torch.complex64, device=A.device)

    # --- symmetric operators -----------------------------------------------------------------------------------------

    @pytest.fixture
    def S(self, A):
        if not isinstance(A, SymmetricOperator):
            pytest.skip("not symmetric")
        return A

    def test_it_is_symmetric(self, S, case, dtype):
        dense = S.to_dense().double()
        assert S.order == len(dense) == dense.shape[1]
        assert float((dense - dense.T).norm()) <= 2 * S.rounding * self.size(S) * math.sqrt(S.order)

    def test_it_is_positive_semidefinite_if_it_says_so(self, S, case, dtype):
        dense = S.to_dense().double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        if S.psd:
            assert float(values[0]) >= -2 * S.rounding * self.size(S) * math.sqrt(S.order)

    def test_what_it_says_is_null_is_annihilated(self, S, case, dtype):
        space = S.null_space
        if space is None:
            pytest.skip("it knows no null space")
        assert space.order == S.order
        assert 0 < space.dimension <= S.order
        vectors = random((S.order, 8), S)
        inside = space.project(vectors)
        assert inside.dtype == S.dtype
        assert float((S @ inside).double().norm()) <= 4 * S.rounding * self.size(S) * float(vectors.double().norm())
        basis = space.project(torch.eye(S.order, dtype=S.dtype, device=S.device)).double()
        eps = torch.finfo(S.dtype).eps
        # an orthogonal projector of the dimension it says
        assert float((basis - basis.T).norm()) <= 100 * eps * S.order
        assert float((basis @ basis - basis).norm()) <= 100 * eps * S.order
        assert float(basis.trace()) == pytest.approx(space.dimension, abs=1e-3)
        assert torch.allclose(space.remove(vectors), vectors - inside, atol=100 * eps)

    def test_its_norm_is_a_lower_bound_within_a_factor_of_two(self, S, case, dtype):
        low, high = S.extremes
        dense = S.to_dense().double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        slack = 4 * S.rounding * self.size(S)
        assert float(values[0]) - slack <= low <= high <= float(values[-1]) + slack
        assert S.norm_bound <= self.size(S) + slack
        assert S.norm_bound >= self.size(S) / 2

    def test_its_trace_is_exact_with_enough_probes(self, S, case, dtype):
        dense = S.to_dense().double()
        total = trace(S, S.order + 5)
        assert (total.error, total.products) == (0.0, S.order)
        assert total.value == pytest.approx(float(dense.trace()), rel=1e-12, abs=S.order * S.rounding * self.size(S))

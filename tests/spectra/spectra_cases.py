"""Symmetric operators whose spectra are known because they were chosen."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hesscond.operators import Dense, SymmetricOperator


def generator(seed, device="cpu"):
    return torch.Generator(device=device).manual_seed(seed)


def orthogonal(n, seed):
    """A random orthogonal matrix (n, n), float64."""
    Q, R = torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=torch.float64))
    return Q * R.diagonal().sign()


def prescribed(eigenvalues, seed=0, dtype=torch.float64, device="cpu"):
    """Q diag(λ) Qᵀ, exactly symmetric, and Q, whose column i belongs to ``eigenvalues[i]`` (up to rounding).

    Float64 rounding of the product moves the eigenvalues by about n·eps·max|λ|; `dtype` rounds the entries once more.
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    Q = orthogonal(len(values), seed)
    A = (Q * values) @ Q.T
    return ((A + A.T) / 2).to(device=device, dtype=dtype), Q.to(device=device, dtype=dtype)


def truth(A):
    """All eigenvalues of a dense symmetric tensor, descending, float64 on the host."""
    scale = A.abs().max().double().cpu().clamp_min(1e-300)
    return torch.linalg.eigvalsh(A.double().cpu() / scale).flip(0) * scale


class Counting(SymmetricOperator):
    """An operator that counts its products with a vector, the calls for several, and how many were most at a time."""

    def __init__(self, A):
        super().__init__(A.order, A.dtype, A.device)
        self.A, self.psd, self.products, self.calls, self.widest = A, A.psd, 0, 0, 0

    def multiply(self, vectors):
        self.products += vectors.shape[1]
        self.calls += 1
        self.widest = max(self.widest, vectors.shape[1])
        return self.A.multiply(vectors)

    @property
    def rounding(self):
        return self.A.rounding

    @property
    def null_space(self):
        return self.A.null_space


def counted(eigenvalues, seed=0, dtype=torch.float64, device="cpu"):
    """A counting operator of a prescribed spectrum."""
    return Counting(Dense(prescribed(eigenvalues, seed, dtype, device)[0]))


def random_spectrum(n, rng):
    """Eigenvalues (n,) of a kind drawn at random: spread, graded, clustered, multiple, ± pairs, singular, tiny or huge.

    ``rng`` is a numpy Generator.
    """
    kind = rng.integers(7)
    if kind == 0:
        values = rng.standard_normal(n)
    elif kind == 1:  # graded
        values = 10.0 ** rng.uniform(-12, 0, n)
    elif kind == 2:  # clusters
        values = rng.choice(rng.standard_normal(3), n) + 10.0 ** rng.uniform(-12, -3) * rng.standard_normal(n)
    elif kind == 3:  # multiplicity
        values = rng.choice(rng.integers(-4, 5, 4).astype(float), n)
    elif kind == 4:  # ± pairs
        half = rng.standard_normal((n + 1) // 2)
        values = [*half, *-half][:n]
    elif kind == 5:  # singular, positive semidefinite
        values = rng.exponential(size=n) * (rng.random(n) < 0.6)
    else:  # one large outlier
        values = rng.standard_normal(n)
        values[0] = 10.0 ** rng.uniform(1, 8)
    scale = 10.0 ** rng.choice([-30, -10, 0, 0, 0, 10, 30])
    return torch.as_tensor(values, dtype=torch.float64).sort(descending=True).values * scale


class LiveVectors(TorchDispatchMode):
    """The most bytes, in storages of at least one vector's, that tensors hold at a time."""

    def __init__(self, size):
        super().__init__()
        self.size, self.peak, self.alive = size, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.alive.append(weakref.ref(tensor))
        self.alive = [reference for reference in self.alive if reference() is not None]
        tensors = [tensor for reference in self.alive if (tensor := reference()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.peak = max(self.peak, sum(size for size in storages.values() if size >= self.size))
        return result

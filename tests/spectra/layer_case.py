"""A layer of a network as the bottom of a spectrum knows it: Σ_j C_j ⊗ ĥ_j ĥ_jᵀ / N and its Kronecker approximation."""

import time

import torch

from hesscond.operators import ApproximateInverse, SymmetricOperator


class LayerHessian(SymmetricOperator):
    """Σ_j B_j B_jᵀ ⊗ ĥ_j ĥ_jᵀ / N, that counts its products and the processor time they take."""

    psd = True

    def __init__(self, H_hat, B):
        self.H_hat, self.B = H_hat, B  # (N, d), (N, units, classes)
        self.units = B.shape[1]
        super().__init__(self.units * H_hat.shape[1], H_hat.dtype, H_hat.device)
        self.products, self.seconds = 0, 0.0

    def multiply(self, vectors):
        started = time.process_time()
        self.products += vectors.shape[1]
        columns = []
        for v in vectors.T:
            Z = self.H_hat @ v.reshape(self.units, -1).T
            Z = torch.bmm(torch.bmm(Z[:, None, :], self.B), self.B.transpose(1, 2))[:, 0]
            columns.append((Z.T @ self.H_hat / len(Z)).reshape(-1))
        result = torch.stack(columns, 1)
        self.seconds += time.process_time() - started
        return result

    def kronecker(self):
        """(mean C) ⊗ (mean ĥĥᵀ)."""
        samples = len(self.B)
        return Kronecker(torch.einsum("nuc,nvc->uv", self.B, self.B) / samples, self.H_hat.T @ self.H_hat / samples)


class Kronecker(ApproximateInverse):
    """(C ⊗ S)⁻¹ by two eigendecompositions; zero where the quotient is below 1e-13 of the largest."""

    def __init__(self, C, S):
        self.order = len(C) * len(S)
        (a, self.U), (b, self.Q) = torch.linalg.eigh(C), torch.linalg.eigh(S)
        self.D = a[:, None] * b
        self.floor = 1e-13 * float(self.D.max())

    def solve(self, vectors, shift=0.0):
        X = vectors.T.reshape(-1, len(self.U), len(self.Q))
        D = self.D - shift
        quotients = torch.where(D.abs() > self.floor, 1 / D, 0.0)
        Y = self.U @ ((self.U.T @ X @ self.Q) * quotients) @ self.Q.T
        return Y.reshape(len(Y), -1).T


def layer_hessian(inputs=100, units=50, classes=10, samples=8000, *, grade=0.0, dead=0, seed=0, device="cpu"):
    """A ReLU layer inputs → units below a linear layer and softmax cross-entropy, on correlated inputs.

    The scales of the inputs fall by 10^grade; the first ``dead`` inputs are zero for all samples.
    """
    fresh = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=fresh, dtype=torch.float64)

    mixing = normal(inputs, inputs) / inputs**0.5
    scales = torch.logspace(0, -grade, inputs, dtype=torch.float64)[torch.randperm(inputs, generator=fresh)]
    h = torch.relu(normal(samples, inputs) @ mixing + 0.3) * scales
    h[:, :dead] = 0
    H_hat = torch.cat([torch.ones(samples, 1, dtype=torch.float64), h], 1)
    a = H_hat @ normal(units, inputs + 1).T / inputs**0.5
    # a bias for each unit: all are active for a good part of the samples
    a = a - a.mean(0) + 0.5 * a.std(0) * normal(units)
    W = normal(classes, units) * (2 / units) ** 0.5
    p = torch.softmax(torch.relu(a) @ W.T, 1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    B = (a > 0)[:, :, None] * torch.einsum("cu,ncd->nud", W, root)
    return LayerHessian(H_hat.to(device), B.to(device))

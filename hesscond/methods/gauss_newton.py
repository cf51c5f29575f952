"""The exact Gauss–Newton matrix of every layer on the mini-batch of the step, known by its rows and never formed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hesscond.capture import Layer
from hesscond.capture.statistics import triangular
from hesscond.errors import ConfigError
from hesscond.hessians import DensePreconditioner, Preconditioner
from hesscond.methods import base, inputs
from hesscond.methods.optimizers import reading

#: Bytes of rows, or of products with them, that are formed at a time.
CHUNK = 2**26
#: Units of round-off in the curvature of a saturated softmax.
SATURATED = 64


# -- the rows of F, with FᵀF the Gauss–Newton matrix -------------------------------------------------------------------


class Formed:
    """F as a matrix (r, m n̂), each row a matrix (m, n̂) of [b, W]; ``shape`` is (r, m, n̂)."""

    def __init__(self, F: torch.Tensor, units: int) -> None:
        self.F, self.shape = F, (len(F), units, F.shape[1] // units)

    def images(self, X: torch.Tensor) -> torch.Tensor:
        """F x (v, r) for each of the rows of X (v, m n̂)."""
        return X @ self.F.T

    def combined(self, C: torch.Tensor) -> torch.Tensor:
        """Fᵀc (v, m n̂) for each of the rows of C (v, r)."""
        return C @ self.F

    def of_unit(self, unit: int) -> torch.Tensor:
        """The columns (r, n̂) of F of one unit's parameters."""
        n = self.shape[2]
        return self.F[:, unit * n : (unit + 1) * n]

    def gram(self) -> torch.Tensor:
        """F Fᵀ (r, r)."""
        return self.F @ self.F.T


class Products:
    """F by its rows Σ_t δ_kjt ⊗ ĥ_jt over the positions t of sample j, δ (K, N, T, m) and ĥ (N, T, n̂)."""

    def __init__(self, deltas: torch.Tensor, H: torch.Tensor) -> None:
        self.deltas, self.H = deltas, H
        self.shape = (deltas.shape[0] * deltas.shape[1], deltas.shape[3], H.shape[2])

    def images(self, X: torch.Tensor) -> torch.Tensor:
        step = max(1, CHUNK // (8 * self.deltas[0].numel()))
        images = []
        for part in X.unflatten(1, self.shape[1:]).split(step):
            products = torch.einsum("jti,vmi->jtmv", self.H, part)
            images.append(torch.einsum("kjtm,jtmv->vkj", self.deltas, products).flatten(1))
        return torch.cat(images)

    def combined(self, C: torch.Tensor) -> torch.Tensor:
        K, N = self.deltas.shape[:2]
        step = max(1, CHUNK // (8 * self.deltas[0].numel()))
        combinations = []
        for part in C.view(-1, K, N).split(step):
            summed = torch.einsum("vkj,kjtm->vmjt", part, self.deltas)
            combinations.append((summed.flatten(2) @ self.H.flatten(0, 1)).flatten(1))
        return torch.cat(combinations)

    def of_unit(self, unit: int) -> torch.Tensor:
        return torch.einsum("kjt,jti->kji", self.deltas[..., unit], self.H).flatten(0, 1)

    def gram(self) -> torch.Tensor:
        if self.H.shape[1] == 1:
            # (δ ⊗ ĥ)ᵀ(δ' ⊗ ĥ') = δᵀδ' · ĥᵀĥ'
            K, (delta, h) = len(self.deltas), (self.deltas.flatten(0, 2), self.H[:, 0])
            return (delta @ delta.T) * (h @ h.T).repeat(K, K)
        # formed again and again: all of them may not fit into memory
        return torch.cat([torch.cat([a.flatten(1) @ b.flatten(1).T for b in self.parts()], 1) for a in self.parts()])

    def parts(self) -> Iterator[torch.Tensor]:
        """The rows formed, (·, m, n̂), as many at a time as memory allows."""
        K, N = self.deltas.shape[:2]
        step = max(1, CHUNK // (8 * self.shape[1] * self.shape[2]))
        for k in range(K):
            for start in range(0, N, step):
                samples = slice(start, start + step)
                yield torch.einsum("jtm,jti->jmi", self.deltas[k, samples], self.H[samples])


Rows = Formed | Products


def joined(parts: list[Products]) -> Rows:
    """The rows of several losses together; triangular if there are more than parameters."""
    r, (_, units, width) = sum(part.shape[0] for part in parts), parts[0].shape
    if len(parts) == 1 and r <= units * width:
        return parts[0]
    F = parts[0].H.new_zeros(0, units * width)
    for part in parts:
        for rows in part.parts():
            F = torch.cat([F, rows.flatten(1)])
            F = triangular(F[None])[0] if len(F) > 2 * units * width else F
    return Formed(triangular(F[None])[0], units)


# -- the curvature of the loss in the outputs --------------------------------------------------------------------------


def reaches(gradients: torch.Tensor) -> bool:
    """Whether there are gradients that are neither zero nor those of a run that diverges."""
    return bool(((gradients != 0) & gradients.isfinite()).any())


def root(S: torch.Tensor, method: str) -> torch.Tensor:
    """b_1 … b_r (r, B, C) with Σ b bᵀ = S for each block of S (B, C, C), r ≥ 1; zeros if S is not finite."""
    eps = torch.finfo(S.dtype).eps
    S = S.to(torch.float64)
    S = S.where(torch.isfinite(S).all(), 0.0)
    values, Q = torch.linalg.eigh((S + S.mT) / 2)
    if bool((values < -max(eps**0.5 * float(values.abs().amax()), SATURATED * eps)).any()):
        raise ConfigError(f"{method}: the loss is not convex in the outputs, and its curvature in them indefinite")
    # what is below is the rounding of zero
    kept = max(int((values > 16 * S.shape[1] * eps * values[:, -1:]).sum(1).max()), 1)
    return (Q * values.clamp_min(0).sqrt()[:, None])[..., S.shape[1] - kept :].permute(2, 0, 1)


# -- M and the method --------------------------------------------------------------------------------------------------


class GaussNewtonRoot(Preconditioner):
    """P = (G + γI)^−½ of a layer, G = FᵀF, by K = FFᵀ; of a unit the root of its own block of M = P².

    M = γ^−1 (I − Fᵀ(K + γI)^−1 F) and P = γ^−½ (I − FᵀWF), where W = f(K), f(λ) = 1/(λ + γ + √(γ(λ + γ))).
    """

    same_for_units = False
    unstructured = True
    cancels = True

    def __init__(self, rows: Rows, damping: float, name: str) -> None:
        self.rows, self.damping, self.name = rows, damping, name
        self._K = rows.gram()
        L, info = torch.linalg.cholesky_ex(
            self._K + damping * torch.eye(len(self._K), dtype=self._K.dtype, device=self._K.device)
        )
        if int(info):
            raise ConfigError(
                f"damping {damping:g} is below the rounding of the Gauss–Newton matrix: choose a larger one"
            )
        self._inverse = torch.cholesky_inverse(L)

    @cached_property
    def _W(self) -> torch.Tensor:
        values, U = torch.linalg.eigh(self._K)
        shifted = values.clamp_min(0) + self.damping
        return (U / (shifted + (self.damping * shifted).sqrt())) @ U.T

    def applied(self, G: torch.Tensor) -> torch.Tensor:
        """M g for G (m, n̂), in its precision."""
        g = G.reshape(1, -1).to(torch.float64)
        product = (g - self.rows.combined(self.rows.images(g) @ self._inverse)) / self.damping
        return product.view_as(G).to(G.dtype)

    def unit_block(self, unit: int) -> torch.Tensor:
        """M_ii (n̂, n̂), the block of one unit."""
        F = self.rows.of_unit(unit)
        return (torch.eye(F.shape[1], dtype=F.dtype, device=F.device) - F.T @ self._inverse @ F) / self.damping

    def right_multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows - self.rows.combined(self.rows.images(rows) @ self._W)) / self.damping**0.5

    def expanded(self, rows: torch.Tensor, units: int, order: int) -> torch.Tensor:
        """``rows`` (v, m n̂) times Pᵀ = P."""
        return self.right_multiply(rows)

    def of_unit(self, unit: int) -> DensePreconditioner:
        """P_i with P_i P_iᵀ = M_ii: what moves the unit if it moves alone."""
        return DensePreconditioner(reading.power(self.unit_block(unit), 0.5), self.name)

    def carried(self, rows: torch.Tensor, units: int) -> torch.Tensor:
        """A bound of ``rows`` (v, m n̂) times |P|: |(FᵀWF)_ab| ≤ d_a d_b with d² the diagonal of FᵀWF."""
        parts = map(self.rows.of_unit, range(self.rows.shape[1]))
        d = torch.cat([(part * (self._W @ part)).sum(0) for part in parts]).clamp_min(0).sqrt().to(rows)
        return (rows + (rows @ d)[:, None] * d) / self.damping**0.5

    def scaled_norm(self, scales: torch.Tensor, units: int) -> float:
        """‖diag(d) P‖² = Σ d_a² M_aa."""
        blocks = torch.cat([self.unit_block(unit).diagonal() for unit in range(self.rows.shape[1])])
        return float(scales.square() @ blocks.to(scales))


class GaussNewtonState(inputs.WholeState):
    """A layer, the loss that each of its calls belongs to, and M of the last step (None before the first one)."""

    P: GaussNewtonRoot | None = None

    def __init__(self, module: Layer) -> None:
        super().__init__(module)
        self.of_call: list[int] = []

    def products(self) -> list[Products]:
        """The rows of each loss that was shown since the last step."""
        products = []
        for loss in dict.fromkeys(self.of_call):
            calls = [k for k, number in enumerate(self.of_call) if number == loss]
            deltas = [torch.stack([self.by_position(g) for g in self.gradients[k]]) for k in calls]
            H = [self.extended(self.inputs[k], deltas[0].shape[1]) for k in calls]
            products.append(Products(torch.cat(deltas, 2), torch.cat(H, 1)))
        return products

    def moved(self, gradient: torch.Tensor) -> torch.Tensor:
        """M times the gradient of [b, W]; as it is where it is not finite."""
        return gradient if self.P is None else self.P.applied(gradient)


@base.register
class GaussNewton(inputs.LayerMethod[GaussNewtonState]):
    """Gauss–Newton, layer by layer: M = (G + γI)^−1 for [b, W] of every layer, G = Σ_j J_jᵀ S_j J_j of the mini-batch.

    J_j is the Jacobian of the outputs of sample j in the layer's parameters, S_j the second derivative of the loss in
    these outputs. G is exact, with no factorization and no average over steps, and is not formed: with
    S_j = Σ_k b_k b_kᵀ it is FᵀF for the rows J_jᵀ b_k = δ ⊗ ĥ (over several positions: Σ_t δ_t ⊗ ĥ_t), and

        M = γ^−1 (I − Fᵀ(FFᵀ + γI)^−1 F).

    A step takes one backward pass for every output with curvature, and a decomposition of FFᵀ, whose order is the
    smaller of samples times outputs and of the layer's parameters. A custom training loop calls
    ``method.observe(loss)`` before the backward pass. At the unit level the block of M of a unit's own parameters
    counts. In the coordinates of the data, ``probe(method="gauss-newton")``, M is that of a step on them.

    The model may be any with dense or ungrouped convolutional layers whose output is a tensor, samples first, and in
    which samples do not influence one another; parameters outside of these layers step along their gradients.

    Source: Schraudolph, Neural Computation 14 (2002), for G; Abreu et al., ICLR 2026, for its use layer by layer.
    """

    name = "gauss-newton"
    summary = "the inverse of every layer's exact Gauss–Newton matrix on the mini-batch"
    source = "Schraudolph, Neural Computation 14 (2002); Abreu et al., ICLR 2026"
    rate = 0.03
    of_first_step = True
    state_class = GaussNewtonState
    kept = ()

    damping: float = base.option(1e-2, "γ.", above=0)
    widest: int = base.option(
        4096,
        "The largest order of FFᵀ; above it a mini-batch is refused, since each step takes time of the order's cube.",
        least=1,
    )

    _output: Any = None
    _losses = 0

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.hooks.append(model.register_forward_hook(self._keep))

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        # a probe calls the model with other tensors in place of its parameters: not this training
        parameter = next(module.parameters(), None)
        if isinstance(parameter, nn.Parameter) and torch.is_grad_enabled():
            self._output = output

    def curvature(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output z, and ∂²loss/∂z² as a block (C, C) for each of its B samples, in its precision."""
        z, self._output = self._output, None
        if not isinstance(z, torch.Tensor):
            what = "no training pass of the model was seen" if z is None else f"its output is a {type(z).__name__}"
            raise ConfigError(f"{self.name} needs the model's output as a tensor, and {what}")
        first = torch.autograd.grad(loss, z, create_graph=True, allow_unused=True)[0] if z.requires_grad else None
        if first is None:
            raise ConfigError(f"{self.name}: the loss does not depend on the output of the model's latest pass")
        g = first.reshape(-1, 1) if z.ndim < 2 else first.flatten(1)
        if not g.requires_grad:
            return z, z.new_zeros(*g.shape, g.shape[1])

        def product(v: torch.Tensor) -> torch.Tensor:
            (Sv,) = torch.autograd.grad(g, z, v, retain_graph=True, materialize_grads=True)
            return Sv.reshape(g.shape)

        columns = torch.eye(g.shape[1], dtype=g.dtype, device=g.device)
        S = torch.stack([product(column.expand_as(g)) for column in columns], 2)
        # half of the parts alone: nothing may reach the others
        some = torch.zeros_like(g)
        some[
            torch.randperm(len(g), generator=torch.Generator().manual_seed(0), device="cpu")[: len(g) // 2].to(g.device)
        ] = 1.0
        if reaches(product(some)[some[:, 0] == 0]):
            raise ConfigError(f"{self.name} is not defined for a loss in which the samples are coupled")
        return z, S

    def back(self, z: torch.Tensor, V: torch.Tensor) -> None:
        """Carry V (r, B, C), gradients of r numbers in the output z, back through the network to the layers."""
        chosen = [state for state in self.states.values() if state.module.weight.requires_grad]
        weights = [state.module.weight for state in chosen]
        for number, v in enumerate(V, 1):
            for state in chosen:
                state.wanted = number
            torch.autograd.grad(z, weights, v.reshape(z.shape).to(z), retain_graph=True, allow_unused=True)
        for state in chosen:
            state.wanted = 0

    def observe(self, loss: torch.Tensor) -> None:
        """Carry the roots b_k of the curvature S_j back to the layers."""
        z, S = self.curvature(loss)
        B = root(S, self.name)
        # of the first sample alone: nothing may come back to the others
        alone = torch.zeros_like(B[:1])
        alone[:, 0] = 1.0
        self.back(z, torch.cat([B, alone]))
        self._losses += 1
        for name, state in self.states.items():
            new = state.gradients[len(state.of_call) :]
            # nothing came back to a call that belongs to another loss
            state.of_call += [self._losses if gradients else 0 for gradients in new]
            for last in [gradients.pop() for gradients in new if gradients]:
                if len(last) != len(B[0]) or reaches(last[1:]):
                    raise ConfigError(
                        f"{self.name}: the samples of a mini-batch do not pass layer {name!r} one by one (batch "
                        "normalization in training mode couples them), and its rows cannot be told apart"
                    )

    def update(self, states: list[GaussNewtonState]) -> None:
        for state in states:
            gradient = state.module.weight.grad
            assert gradient is not None
            if not all(state.gradients):
                raise base.not_shown(self.name)
            if bool(torch.isfinite(gradient).all()):
                parts = state.products()
                r, order = sum(part.shape[0] for part in parts), state.geometry.units * state.geometry.n_params
                if min(r, order) > self.widest:
                    raise ConfigError(
                        f"{self.name}: samples times outputs are {r}, more than widest={self.widest}, and each step "
                        "takes time of order n³: take smaller mini-batches, or set the option widest"
                    )
                state.P = GaussNewtonRoot(joined(parts), self.damping, f"{self.name}, M^1/2")
            state.of_call.clear()

    @property
    def known(self) -> bool:
        """Whether there was a step since the method was created; loading a state does not count as one."""
        return any(state.P is not None for state in self.states.values())

    def of_state(self, state: GaussNewtonState) -> Preconditioner | None:
        return state.P

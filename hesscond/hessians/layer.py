"""Hessian of a whole layer by its dual, whose order is the number of rank-one terms of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch

from hesscond.capture import FactoredS, LayerCapture
from hesscond.capture.captured import MERGED
from hesscond.errors import refuse_large
from hesscond.hessians import factored
from hesscond.hessians.coordinates import base
from hesscond.operators import Estimate
from hesscond.operators.threads import side_by_side, threads_for
from hesscond.spectra import ConditionNumber, forms
from hesscond.spectra.condition import EPS, error_factor
from hesscond.spectra.solvers.base import RankBound
from hesscond.spectra.solvers.batched import power_of_two

#: Entries of an F that is decomposed where its dual does not resolve κ: a few seconds.
FACTORED = 2**21
#: Order up to which F + √λ I is decomposed instead of its dual.
SMALL = 1000
#: Columns of F that are brought to triangular form at a time.
PANEL = 8192


@dataclass(frozen=True)
class LayerHessian(base.KeptHessian):
    """Σ_r s_r f_r f_rᵀ with f_r = Σ_p b_rp ⊗ ĥ_p in R^(m n̂): F (R J, m n̂) with fewer rows than columns.

    Its nonzero eigenvalues are those of FFᵀ, with one position a sample (BBᵀ)∘(ĤĤᵀ), so that F is never formed.
    """

    captured: LayerCapture  # a layer captured whole, by a `FactoredS`
    memory: int

    @cached_property
    def _factor(self) -> FactoredS:
        assert isinstance(self.captured.curvature, FactoredS)
        return self.captured.curvature

    @property
    def order(self) -> int:
        geometry = self.captured.inputs.geometry
        return geometry.units * geometry.n_params

    @property
    def units(self) -> int:
        return self.captured.inputs.geometry.units

    @property
    def count(self) -> int:
        """R J, the number of rows of F."""
        return self._factor.B.shape[0] * self._factor.B.shape[1]

    @property
    def sign(self) -> torch.Tensor | None:
        """(R J,) signs of the rows; None: all +1."""
        signs = self._factor.sign
        return None if signs is None else signs.flatten()

    @property
    def _signs(self) -> torch.Tensor | None:
        """Signs of the rows; all +1, not None, where the round-off of S has both signs."""
        if self.sign is None and self._factor.norms is not None:
            return self._factor.B.new_ones(self.count)
        return self.sign

    @cached_property
    def _spread(self) -> torch.Tensor | None:
        """Spread (m n̂,), see `LayerCapture.spread`."""
        spreads = [self.captured.spread([unit]) for unit in range(self.units)]
        present = [spread[0] for spread in spreads if spread is not None]
        return torch.cat(present) if present else None

    def matrix(self) -> torch.Tensor:
        what = f"the dense Hessian of layer {self.captured.name!r}, of order {self.order}, takes"
        refuse_large(what, 8 * self.order**2, self.memory, "ask for its eigenvalues or κ, or a unit's Hessian")
        return self.dense().matrix()

    def dense(self) -> factored.FactoredHessian:
        """F itself (R J, m n̂); a TooLargeError if it does not fit into the memory."""
        what = f"the factor of layer {self.captured.name!r}, {self.count} × {self.order}, takes"
        fitting = max(1, self.memory // (8 * self.order))
        few = f"take at most {fitting} rank-one terms, with fewer samples or classes"
        refuse_large(what, 8 * self.count * self.order, self.memory, few)
        rows = torch.cat([panel.permute(1, 0, 2).flatten(1) for panel in self._unit_panels(None)], 1)
        by_unit = self.captured.row_rounding(range(self.units))
        errors = [bounds.entries() for bounds in by_unit if bounds is not None]
        error = torch.cat(errors, 1) if errors else None
        limit, lost = self.rank_bound(), self.captured.loses_entries
        arguments = (rows, None, self.sign, error, self.units, limit, self._spread, lost, self.features)
        return factored.FactoredHessian(*arguments, P=self.P)

    def product(self, vectors: torch.Tensor) -> torch.Tensor:
        """Product (k, c), without F where there is one position a sample."""
        if not self.has_dual:
            return self.dense().product(vectors)
        B = self._factor.B
        signs = None if self.sign is None else self.sign.view(B.shape[:2])[..., None]
        by_unit = vectors.unflatten(0, (self.units, -1))
        if self._one_position:
            b = B[..., 0]
            images = sum(
                torch.einsum("rju,juc->rjc", b[:, :, units], torch.einsum("jk,ukc->juc", rows, by_unit[units]))
                for rows, units in self._rows()
            )
            images = images if signs is None else images * signs
            products = [
                torch.einsum("juc,jk->ukc", torch.einsum("rju,rjc->juc", b[:, :, units], images), rows)
                for rows, units in self._rows()
            ]
            return torch.cat(products).flatten(0, 1)
        if self._in_pairs:
            features = self.captured.inputs.slice(0, B.shape[1])[:, :, 0]
            room = max(1, self.memory // 8 // (8 * B[0].numel()))
            products = []
            for part in by_unit.split(room, 2):
                images = torch.einsum("rjup,jpuc->rjc", B, torch.einsum("jpk,ukc->jpuc", features, part))
                weights = torch.einsum("rjup,rjc->jpuc", B, images if signs is None else images * signs)
                products.append(torch.einsum("jpuc,jpk->ukc", weights, features).flatten(0, 1))
            return torch.cat(products, 1)
        images, start = vectors.new_zeros(self.count, vectors.shape[1]), 0
        for panel in self._unit_panels(self.P):
            images += (panel @ by_unit[start : start + len(panel)]).sum(0)
            start += len(panel)
        if signs is not None:
            images = images * signs.flatten()[:, None]
        return torch.cat([(panel.mT @ images).flatten(0, 1) for panel in self._unit_panels(self.P)])

    def diagonal(self) -> torch.Tensor:
        if not self.has_dual:
            return self.dense().diagonal()
        B = self._factor.B
        signs = B.new_ones(self.count) if self.sign is None else self.sign
        if self._one_position and self.P is None:
            squares = B[..., 0].square() * signs.view(*B.shape[:2], 1)
            return (squares.sum(0).T @ self.captured.H_hat.square()).flatten()
        return torch.cat([(panel.square() * signs[:, None]).sum(1).flatten() for panel in self._unit_panels(self.P)])

    def frobenius_norm(self, probes: int | None, seed: int) -> Estimate[float]:
        if not self.has_dual:
            return self.dense().frobenius_norm(probes, seed)
        return Estimate(factored.signed_norm(self.gram()[0], self.sign), 0.0, 0, 0)

    def damped_condition(self, damping: float, *, rtol: float) -> ConditionNumber:
        """κ from the whole factor, or from R of the dual, RᵀR = FFᵀ: FᵀF has the spectrum of RRᵀ, and zeros."""
        point = torch.zeros(1, self.order, dtype=torch.float64, device="cpu")
        columns = self.order if self.P is None else self.P.multiplied(point, self.units).shape[1]
        if not self.has_dual or columns <= max(SMALL, self.count):
            return self.dense().damped_condition(damping, rtol=rtol)
        R, errors = self.triangular()
        error = R.new_full((len(R),), float(np.linalg.norm(errors)))
        dual = factored.FactoredHessian(R.T, None, self.sign, error)
        noise = error_factor(len(R), 1) * EPS * factored.noise_of(self._spread, self.P, self.units)
        kappa = dual.damped_condition(damping, rtol=rtol)
        return base.with_eigenvalue(kappa.widened(noise) if noise else kappa, damping, columns - len(R))

    def scales(self) -> torch.Tensor:
        """Norms (k,) of the columns of F, no smaller than their errors allow."""
        if self._one_position:
            norms = (self._factor.B[..., 0].square().sum(0).T @ self.captured.H_hat.square()).sqrt().flatten()
        else:
            norms = torch.cat([torch.linalg.vector_norm(panel, dim=1).flatten() for panel in self._unit_panels(None)])
        if self._spread is not None:
            norms = torch.maximum(norms, base.LOST_IN_SQUARE * self._spread)
        bounds = self.captured.row_rounding(range(self.units))
        errors = [(b.sizes.square().sum(0) @ b.lengths.square()).sqrt() for b in bounds if b is not None]
        return torch.maximum(norms, base.LOST_IN_FACTOR * torch.cat(errors)) if errors else norms

    def condition_number(self, *, rtol: float = 1e-8) -> ConditionNumber:
        if not self.has_dual:
            return self.dense().condition_number(rtol=rtol)
        return factored.within_features(self.form(), self.form().condition(rtol=rtol), self.features, rtol)

    def form(self) -> forms.DualForm:
        """Form of the dual."""
        return forms.DualForm(
            self.gram,
            self.triangular,
            self.order,
            self.rank_bound,
            signs=self._signs,
            noise=factored.noise_of(self._spread, self.P, self.units),
            least_rank=self.rank_bound if self.captured.loses_entries else None,
            lost=self.captured.loses_entries,
            factor=(lambda: self.dense().form()) if self.count * self.order <= FACTORED else None,
            work=0.0 if self._one_position else 4.0 * self.count**2 * self.order,
        )

    def eigenvalues(self) -> torch.Tensor:
        if not self.has_dual:
            return self.dense().eigenvalues()
        R, _ = self.triangular()
        condition = self.condition_number()
        form = forms.FactorForm(R) if self._signs is None else forms.FactorForm(R.T, self._signs)
        values = form.eigenvalues(condition)
        return torch.from_numpy(np.ascontiguousarray(values)).to(R.device)

    def eigenpairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dense().eigenpairs()

    @property
    def has_dual(self) -> bool:
        """Whether P neither mixes units nor differs by unit so that rows of FP are less accurate than those of F."""
        P = self.P
        return P is None or P.same_for_units or not (P.unstructured or P.cancels)

    def gram(self) -> tuple[torch.Tensor, float]:
        """Gram matrix FFᵀ (R J, R J), and a bound of its rounding in the 2-norm."""
        # an inner product of rows is off by at most c·eps times their lengths, whose matrix has the norm tr FFᵀ
        B, P = self._factor.B, self.P
        carried = float(self._rounding().norm())
        if self._one_position and (P is None or (P.same_for_units and not P.cancels)):
            ((rows, _),) = self._rows()
            passes, flat = B.shape[0], B.flatten(0, 1)[:, :, 0]
            (outer, of_outer), (inner, of_inner) = accurate_gram(flat), accurate_gram(rows)
            K = outer * inner.repeat(passes, passes)
            trace = float(K.diagonal().sum())
            rounding = 2 * EPS * float(K.norm()) + (of_outer + of_inner) * trace
            return K, rounding + carried * (2 * trace**0.5 + carried)
        if self._in_pairs:
            K, rounding = self._paired_gram()
            return K, rounding + carried * (2 * float(K.diagonal().sum()) ** 0.5 + carried)
        K = B.new_zeros(self.count, self.count)
        if self._one_position:
            passes, flat = B.shape[0], B.flatten(0, 1)[:, :, 0]
            for rows, units in self._rows():
                b = flat[:, units]
                K += (b @ b.T) * (rows @ rows.T).repeat(passes, passes)
            growth = B.shape[2] ** 0.5 + self.captured.H_hat.shape[1] ** 0.5
        else:
            for panel in self._unit_panels(self.P):
                flat = panel.permute(1, 0, 2).flatten(1)
                K.addmm_(flat, flat.T)
            growth = self.order**0.5
        trace = float(K.diagonal().sum())
        return K, max(16.0, growth) * EPS * trace + carried * (2 * trace**0.5 + carried)

    @property
    def _in_pairs(self) -> bool:
        """Whether the products of all pairs of positions are fewer than the entries of a unit's rows."""
        inputs, positions = self.captured.inputs, self._factor.B.shape[3]
        held = 8 * inputs.blocks * positions * max(inputs.geometry.n_params, inputs.blocks * positions)
        plain = self.P is None and inputs.geometry.groups == 1 and not self._one_position
        return plain and positions**2 < inputs.geometry.n_params and 8 * held <= self.memory

    def _paired_gram(self) -> tuple[torch.Tensor, float]:
        """Gram matrix with the entries Σ_pq (b_rp·b_sq)(ĥ_p·ĥ_q), without F, and a bound of its rounding."""
        B = self._factor.B
        passes, blocks, units, positions = B.shape
        features = self.captured.inputs.slice(0, blocks)[:, :, 0].flatten(0, 1)
        inner, outer = features @ features.T, B.permute(0, 1, 3, 2).flatten(1, 2)
        K = B.new_empty(passes, blocks, passes, blocks)
        step = max(1, self.memory // 8 // (8 * positions * outer[..., 0].numel()))
        for r in range(passes):
            for first in range(0, blocks, step):
                rows = slice(first * positions, (first + step) * positions)
                # of two terms, the later one follows by symmetry
                pairs = torch.einsum("au,sbu->asb", outer[r, rows], outer[r:]) * inner[rows, None]
                entries = pairs.unflatten(0, (-1, positions)).unflatten(3, (blocks, positions)).sum((1, 4))
                K[r, first : first + step, r:] = entries
                K[r:, :, r, first : first + step] = entries.permute(1, 2, 0)
        lengths = (outer.norm(dim=2) * features.norm(dim=1)).unflatten(1, (blocks, positions)).sum(2)
        growth = max(16.0, units**0.5 + features.shape[1] ** 0.5 + positions)
        return K.view(self.count, self.count), growth * EPS * float(lengths.square().sum())

    def triangular(self) -> tuple[torch.Tensor, np.ndarray]:
        """Triangular R (R J, R J) with RᵀR = FFᵀ, by QR of panels of Fᵀ, and bounds of the error in each column."""
        threads = threads_for(self._factor.B.device)
        square_norms = self._factor.B.new_zeros(self.count)
        rows, parts = 0, []
        for panels in batched(self._panels(), threads):
            square_norms += sum(panel.square().sum(0) for panel in panels)
            rows += sum(map(len, panels))
            parts += side_by_side(upper, panels, threads)
            parts = [upper(torch.cat(parts))]
        error = error_factor(rows, self.count) * EPS * square_norms.sqrt()
        if self._one_position:
            error += error_factor(*self.captured.H_hat.shape) * EPS * square_norms.sqrt()
        return parts[0], (error + self._rounding()).cpu().numpy()

    def _rounding(self) -> torch.Tensor:
        """Bounds (R J,), in the 2-norm, of the rounding in the rows of FP; only sums over positions have any."""
        total = self._factor.B.new_zeros(self.count)
        for unit, bounds in enumerate(self.captured.row_rounding(range(self.captured.inputs.geometry.units))):
            if bounds is None:
                break
            if self.P is None:
                total += bounds.squared_rows()
            else:
                total += self.P.of_unit(unit).carried(bounds.entries(), 1).square().sum(1)
        return total.sqrt()

    @property
    def _one_position(self) -> bool:
        return self._factor.B.shape[3] == 1 and self.captured.inputs.geometry.groups == 1

    def _rows(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Products ĤP_i (J, k) with the units that share P_i."""
        if self.P is None:
            yield self.captured.H_hat, slice(None)
            return
        systems = self.P.by_unit(range(self.units))
        for unit, P in enumerate(systems):
            yield P.right_multiply(self.captured.H_hat), slice(None) if len(systems) == 1 else slice(unit, unit + 1)

    def _panels(self) -> Iterator[torch.Tensor]:
        """Panels (·, R J) of Fᵀ; with one position a sample, in a basis of Ĥ's row space of at most N columns."""
        if not self._one_position:
            for panel in self._unit_panels(self.P):
                yield panel.permute(0, 2, 1).flatten(0, 1)
            return
        B, parts, length = self._factor.B, [], 0
        # a thread's share, at least as many rows as columns
        share = -(-self.units * min(self.captured.H_hat.shape) // threads_for(B.device))
        wanted = max(self.count, min(share, PANEL))
        for rows, units in self._rows():
            if rows.shape[1] > len(rows):
                rows = torch.linalg.qr(rows.T, mode="r").R.T
            by_unit = B[:, :, units, 0].permute(2, 0, 1)
            for b in by_unit.split(max(1, wanted // rows.shape[1])):
                parts.append((b[:, None] * rows.T[None, :, None, :]).reshape(-1, self.count))
                length += len(parts[-1])
                if length >= wanted:
                    yield torch.cat(parts)
                    parts, length = [], 0
        if parts:
            yield torch.cat(parts)

    def _unit_panels(self, P: base.Preconditioner | None) -> Iterator[torch.Tensor]:
        """Factors F_iP (u, R J, k) of some units at a time."""
        geometry = self.captured.inputs.geometry
        unit_bytes = 8 * self.count * geometry.n_params
        per_group = geometry.units // geometry.groups
        step = max(1, min(per_group, self.memory // 8 // unit_bytes))
        for first in range(0, geometry.units, per_group):
            for start in range(first, first + per_group, step):
                chosen = range(start, min(start + step, first + per_group))
                rows = self.captured.unit_rows(chosen, self.memory // 8)
                if P is not None:
                    systems = P.by_unit(chosen)
                    pairs = zip(systems * len(rows) if len(systems) == 1 else systems, rows, strict=True)
                    rows = torch.stack([system.right_multiply(each) for system, each in pairs])
                yield rows

    @property
    def features(self) -> RankBound | None:
        """Function that returns the largest rank that Ĥ leaves."""
        known = factored.feature_rank(self.captured, range(self.units), self.memory)
        return known and (lambda: known() * (self.units - sums_to_zero(self.captured)) // self.units)

    def rank_bound(self) -> int:
        """Upper bound of the rank: Σ_j of the terms, or of the active units and positions, of sample j."""
        # each unit adds at most the number of varying features, plus one for all constant ones
        B = self._factor.B
        features = self.captured.inputs.geometry.n_params
        if self._one_position and not self.captured.loses_entries:
            rows = self.captured.H_hat
            varying = rows.amin(0) != rows.amax(0)
            features = int(varying.sum()) + int((rows[0, ~varying] != 0).any())
        known = (self.units - sums_to_zero(self.captured)) * features
        if self.captured.vanishing:
            return min(self.count, known)
        terms = (B != 0).any(3).any(2).sum(0)
        active = (B != 0).any(0)
        if not self._one_position:
            # each active unit contributes at most the rank of its rows, which no more than positions
            return min(known, int(torch.minimum(terms, active.flatten(1).sum(1)).sum()))
        # samples without features add nothing
        nonzero = (self.captured.H_hat != 0).any(1)
        return min(known, int((torch.minimum(terms, active.flatten(1).sum(1)) * nonzero).sum()))


def accurate_gram(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    r"""G = XXᵀ of rows X (m, n) with \|δG_ij\| ≤ eps·\|G_ij\| + s·‖x_i‖‖x_j‖, and s.

    X = X₁ + X₂ with so few digits in X₁ that X₁X₁ᵀ is exact, however it is summed; products with X₂ are smaller by
    2^−b, and so is their rounding.

    Source: Ozaki, Ogita, Oishi and Rump, Numer. Algorithms 59 (2012), 95-118.
    """
    n = rows.shape[1]
    digits = (53 - math.ceil(math.log2(max(n, 2)))) // 2
    tops = torch.frexp(rows.abs().amax(1, keepdim=True)).exponent
    unit = 1.5 * power_of_two((tops + 52 - digits).clamp(-1022, 1023))
    high: torch.Tensor = (rows + unit) - unit
    low = rows - high
    cross = high @ low.T
    # no number of X₂ is more than 2^−b of the largest in its row
    share = 2 * (n + 4) * EPS * n**0.5 * 2.0**-digits
    return high @ high.T + ((cross + cross.T) + low @ low.T), share


def sums_to_zero(captured: LayerCapture) -> bool:
    """Whether a common shift of all units is null for S, as for the logits of a softmax."""
    curvature = captured.curvature
    if not isinstance(curvature, FactoredS) or captured.inputs.geometry.groups != 1:
        return False
    B = curvature.B
    return bool((B.sum(2).abs() <= MERGED * EPS * B.abs().sum(2)).all())


def upper(rows: torch.Tensor) -> torch.Tensor:
    """Triangular factor of ``rows``; ``rows`` if there are no more rows than columns."""
    return torch.linalg.qr(rows, mode="r").R if len(rows) > rows.shape[1] else rows


def batched(items: Iterator[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Lists of ``size`` items."""
    while chosen := list(islice(items, size)):
        yield chosen

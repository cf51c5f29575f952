"""What a statement about a layer is checked on in a study: the actual inputs, weights and condition numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hesscond.spectra import ConditionNumber
from hesscond.theorems.base import Outcome, Statement


@dataclass(frozen=True)
class Observation:
    """A layer at one moment of a training run, on a mini-batch or on the whole training set.

    Attributes
    ----------
    centred : (k, n + 1)
        ĤU = [e, H − eμᵀ], or a triangular factor of it: constant features left out.
    mu, sigma : (n,)
        Means and standard deviations of these features.
    samples
        N.
    weight : (m, all features)
        Of the layer; as torch has it, one row a unit.
    kappa, kappa_preconditioned
        κ of the unit's Hessian in plain coordinates, and in those of BNP from the same data.
    """

    centred: np.ndarray
    mu: np.ndarray
    sigma: np.ndarray
    samples: int
    weight: np.ndarray
    kappa: ConditionNumber
    kappa_preconditioned: ConditionNumber

    @property
    def plain(self) -> np.ndarray:
        """Ĥ = [e, H], or the same triangular factor times U⁻¹."""
        found = self.centred.copy()
        found[:, 1:] += self.centred[:, :1] * self.mu
        return found

    @property
    def normalized(self) -> np.ndarray:
        """Ĝ = ĤUD."""
        found = self.centred.copy()
        found[:, 1:] /= self.sigma
        return found

    @property
    def kappa_D(self) -> float:
        """κ of D = diag(1, 1/σ)."""
        ends = [1.0, *self.sigma]
        return max(ends) / min(ends)


def observed_inputs(H: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ĤU, μ and σ of inputs H (N, n), constant features left out."""
    H = H[:, H.min(0) != H.max(0)]
    mu, sigma = H.mean(0), H.std(0)
    return np.hstack([np.ones((len(H), 1)), H - mu]), mu, sigma


class LayerStatement(Statement):
    """A statement that can be checked on a layer of a network in training."""

    @abstractmethod
    def observe(self, seen: Observation) -> Sequence[Outcome]:
        """Check all claims on what was seen."""

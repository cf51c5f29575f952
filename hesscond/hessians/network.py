"""Hessian and Gauss-Newton matrix of whole networks, of some of their layers or of one unit, by their products."""

from __future__ import annotations

from hesscond.capture.evaluation import Evaluation
from hesscond.hessians.linearization import GGNLinearization, HessianLinearization, Linearization
from hesscond.hessians.stream_operator import NetworkOperator


class HessianOperator(NetworkOperator):
    """The Hessian of the loss of a data set in parameters of a network; arguments and attributes of its base.

    A product costs about one and a half gradients.

    Source: Pearlmutter, Neural Computation 6 (1994), eq. (1): H v = ∇(vᵀ∇L).

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> batch = torch.randn(20, 5), torch.randint(0, 3, (20,))
    >>> H = HessianOperator(model, nn.CrossEntropyLoss(), batch)
    >>> H.shape, H.parts["2.weight"]
    ((39, 39), slice(24, 36, None))
    >>> v = torch.randn(39, dtype=torch.float64)
    >>> bool(torch.allclose(H @ v, H.to_dense() @ v))
    True
    """

    def _linearized(self, evaluation: Evaluation) -> Linearization:
        return HessianLinearization(evaluation, self._snapshot.leaves)


class GGNOperator(NetworkOperator):
    """The generalized Gauss-Newton matrix Jᵀ H_L J of a data set; arguments and attributes of its base.

    J is the Jacobian of the model's outputs in the parameters and H_L the Hessian of the loss in these outputs. It is
    the Hessian of the loss of the linearized model, and positive semidefinite if the loss is convex.

    Source: Schraudolph, Neural Computation 14 (2002), sec. 3.
    """

    def _linearized(self, evaluation: Evaluation) -> Linearization:
        return GGNLinearization(evaluation, self._snapshot.leaves, self.loss_fn, self.requested_dtype)

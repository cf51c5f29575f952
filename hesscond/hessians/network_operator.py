"""Hessian and Gauss-Newton matrix of a network, of its layers or of a unit, by their products over a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from functools import cached_property
from typing import Self

import torch
from torch import nn

from hesscond import causes
from hesscond.capture import backward, forward, nonfinite, second_derivatives
from hesscond.capture.uses import Uses
from hesscond.errors import CaptureError, ConfigError, NotFiniteError, bytes_of
from hesscond.hessians.linearization import GGNLinearization, HessianLinearization, Linearization
from hesscond.hessians.parameters import Layout, Placement, UnitLayout, layout_of, placements
from hesscond.operators import operator
from hesscond.problem import devices, graph, precision, weighting, wrappers
from hesscond.problem.evaluation import Batch, LossFunction, is_finite
from hesscond.problem.problem import Drawn, Problem, WatchedEvaluation

#: Function that receives the number of vectors of every product with a Hessian.
OBSERVER: ContextVar[Callable[[int], None]] = ContextVar("observer", default=lambda count: None)


@contextmanager
def observed(receive: Callable[[int], None]) -> Iterator[None]:
    """Context in which ``receive`` is given the number of vectors of every product with a Hessian."""
    token = OBSERVER.set(receive)
    try:
        yield
    finally:
        OBSERVER.reset(token)


class NetworkOperator(operator.SymmetricOperator):
    """Operator A = Σ_k m_k A_k / Σ_k m_k over the batches of a data set; a subclass linearizes one A_k.

    The m_k make Σ m_k L_k / Σ m_k the loss of the whole data set (see `hesscond.problem.weighting.Weights`). The
    operator is that of the model, its mode and the random state (dropout) at construction; the model is left untouched.
    Graphs of the first derivatives are kept, as many as fit in the memory; the others are built anew in each product.
    Two products with the same vector are equal bit by bit; `to_dense` takes many at once, equal but for rounding.

    Parameters
    ----------
    model
        Any module.
    loss_fn
        ``loss_fn(output, target)``, a scalar.
    data
        ``(inputs, targets)``, or a stream of such pairs (a ``DataLoader``), as for `hesscond.probe`.
    layers
        Names of dense or convolutional layers to differentiate in, or one name: unit by unit, each as [b_i, w_i].
    unit
        One unit of the one layer named.
    parameters
        Names of parameters to differentiate in; None, without layers: all that require a gradient.
    dtype
        Precision of all computations, whatever the model has or casts to float32; None: the precision of the model.
    memory
        Bytes (or ``"2 GB"``) that copies of the parameters, graphs and batches may take; None: as in `probe`. One graph
        is needed in any case, and as much again as the parameters for every vector of a product.
    reduction
        For a stream, whether the loss is a ``"mean"`` over the samples of a batch or their ``"sum"``; None: inferred.
    weight
        For a stream, the weight of a batch: a function of its inputs and target, or one number for each batch.
    watch
        Whether calls of layers are recorded, for null directions and approximate inverses.

    Attributes
    ----------
    loss
        Loss of the whole data set.
    gradient
        (n,) gradient of the loss.
    point
        (n,) parameters.
    psd
        Whether the graphs prove that the matrix is positive semidefinite.
    retained
        Number of batches whose graphs are kept, and of all batches.
    """

    saturated: causes.Cause  # that derivatives in the model or the loss may have underflowed to zero
    reached: set[str]  # names of the parameters that the loss depends on
    #: layers with all weights among the parameters, and no number of units or inputs too large for square matrices
    placements: list[Placement]

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batch | Iterable[Batch],
        *,
        layers: Iterable[str] | str | None = None,
        unit: int | None = None,
        parameters: Iterable[str] | str | None = None,
        dtype: torch.dtype | None = torch.float64,
        memory: float | str | None = None,
        reduction: str | None = None,
        weight: weighting.BatchWeight | None = None,
        watch: bool = True,
    ) -> None:
        model = wrappers.measurable(model)
        self.layout = layout_of(model, layers=layers, unit=unit, parameters=parameters)
        memory = bytes_of(memory) or devices.default_memory(self.layout.tensors)
        self._squares = memory / 2 if watch else 0
        self.placements = self._placed(self.layout, model)
        watched = {placement.name: placement.layer for placement in self.placements}
        if watch and isinstance(self.layout, UnitLayout):
            watched |= self.layout.layers
        self.problem = Problem(
            model,
            loss_fn,
            data,
            self.layout.tensors,
            watched=watched,
            dtype=dtype,
            memory=memory,
            reduction=reduction,
            weight=weight,
        )
        leaves = self.problem.snapshot.leaves
        if len({leaf.device for leaf in leaves}) > 1:
            raise ConfigError("the parameters are on several devices: an operator needs all of them on one")
        for name, leaf in zip(self.layout.names, leaves, strict=True):
            if leaf.dtype not in (torch.float32, torch.float64):
                kind = "complex" if leaf.is_complex() else f"in {precision.named(leaf.dtype)}"
                raise CaptureError(
                    f"the parameter {name!r} is {kind}, in which there is no Hessian to speak of: "
                    + ("name the others (layers=, parameters=)" if leaf.is_complex() else "use dtype=torch.float64")
                )
        point = self.layout.vector_of([leaf.detach() for leaf in leaves])
        super().__init__(self.layout.order, point.dtype, point.device)
        self.point = point
        self._among: list[int] | None = None
        self._read()

    def restricted(self, layout: Layout) -> Self:
        """Return the rows and columns in a layout of some of the parameters or parts of them, with the same graphs."""
        place = {id(parameter): i for i, parameter in enumerate(self.layout.tensors)}
        restriction = copy(self)
        for measured in ("rounding", "extremes", "_formed"):
            vars(restriction).pop(measured, None)
        restriction.layout, restriction.placements = layout, self._placed(layout, self.problem.model)
        indices = [place[id(parameter)] for parameter in layout.tensors]
        restriction._among = indices if self._among is None else [self._among[i] for i in indices]
        operator.SymmetricOperator.__init__(restriction, layout.order, self.dtype, self.device)
        for name in ("point", "gradient"):
            tensors = self.layout.tensors_of(getattr(self, name))
            setattr(restriction, name, layout.vector_of([tensors[i] for i in indices]))
        return restriction

    def _placed(self, layout: Layout, model: nn.Module) -> list[Placement]:
        """Layers of a layout, without those too large for null directions and inverses."""
        return [layer for layer in placements(layout, model) if layer.squares <= self._squares] if self._squares else []

    @abstractmethod
    def _linearized(self, evaluation: WatchedEvaluation, drawn: Drawn) -> Linearization:
        """Matrix of one batch."""

    # the parameters

    @property
    def names(self) -> list[str]:
        """Qualified names of the parameters."""
        return self.layout.names

    @property
    def parts(self) -> Mapping[str, slice]:
        """Rows that belong to each parameter, or to each layer, by name."""
        return self.layout.parts

    @property
    def unit_layout(self) -> UnitLayout:
        """Layout of an operator of layers; a ConfigError for other operators."""
        if not isinstance(self.layout, UnitLayout):
            raise ConfigError("the parameters of this operator are not ordered by unit: make it with layers=")
        return self.layout

    def unflatten(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors in the shapes of the parameters, by name, from a vector (n,)."""
        return dict(zip(self.names, self.layout.tensors_of(vector), strict=True))

    def flatten(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Inverse of `unflatten`: (n,)."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: tuple(shape) for name, shape in zip(self.names, self.layout.shapes, strict=True)}
        if shapes != wanted:
            raise ConfigError(f"a vector of this operator is made of {wanted}, not {shapes}")
        return self.layout.vector_of([tensors[name] for name in self.names])

    # the data

    def _read(self) -> None:
        """Linearize every batch once: loss and gradient, and the graphs that fit."""
        problem = self.problem
        self._retained: dict[int, Linearization] = {}
        self._taken = largest = 0
        loss, gradient = 0.0, torch.zeros_like(self.point)
        psd, depends, self.saturated = True, False, causes.NOTHING
        reached: set[int] = set()
        for drawn, evaluation in problem.read():
            weight = problem.weights[drawn.number]
            try:
                linearization = self._linearized(evaluation, drawn)
                graph.refuse_dead_ends(linearization.ends())
                if not depends and linearization.depends:
                    self._try(linearization)
            except NotFiniteError as error:
                raise self._explained(error, [drawn]) from None
            depends |= linearization.depends
            reached |= forward.variables_of(evaluation.loss)
            psd &= linearization.psd
            if not self.saturated:
                self.saturated = second_derivatives.saturates(graph.nodes([evaluation.loss.grad_fn]))
            if not self.saturated and evaluation.flattened is not None:
                self.saturated = causes.REPEATED
            loss += weight * linearization.loss
            gradient.add_(self.layout.vector_of(linearization.gradient), alpha=weight)
            size = 0 if problem.single else linearization.bytes()
            largest = max(largest, size)
            # room for one that is built anew
            if self._taken + size + largest <= problem.room or not self._retained:
                self._taken += size
                self._retained[drawn.number] = linearization
            del linearization, evaluation
        if not depends:
            raise CaptureError(
                f"the loss does not depend differentiably on any of the parameters: {', '.join(self.names)}"
            )
        leaves = self.problem.snapshot.leaves
        self.reached = {name for name, leaf in zip(self.names, leaves, strict=True) if id(leaf) in reached}
        self._needed = {number for number, m in enumerate(self.weights) if m != 0}
        self.psd = psd
        self.loss = loss / self.total_mass
        self.gradient = gradient.div_(self.total_mass)

    def _try(self, linearization: Linearization) -> None:
        """Raise a CaptureError for an operation without a second derivative, or with an infinite one."""
        checked(self._product(linearization, torch.ones_like(self.point)))

    @property
    def weights(self) -> Sequence[float]:
        """Weight of each batch."""
        return self.problem.weights

    @property
    def total_mass(self) -> float:
        """Divisor of the weighted sum over the batches."""
        return self.problem.total_mass

    @property
    def held(self) -> int:
        """Bytes of copies, batches and graphs; a batch that was given alone does not count."""
        return self.problem.held + self._taken

    @property
    def route(self) -> str:
        """How its products are computed, in words."""
        return "products, {} of {} graphs kept".format(*self.retained)

    @property
    def retained(self) -> tuple[int, int]:
        """Number of batches whose graphs are kept, and of all batches."""
        return len(self._retained), len(self.weights)

    # products

    def multiply(self, vectors: torch.Tensor) -> torch.Tensor:
        products = self._mean(vectors.T.contiguous()).T
        OBSERVER.get()(vectors.shape[1])
        return products

    def _mean(self, rows: torch.Tensor) -> torch.Tensor:
        """Σ_k m_k A_k v / Σ_k m_k for each v of ``rows`` (k, n), over the batches in their order."""
        total = None
        for number, linearization in self.linearizations():
            products = self._products(linearization, rows)
            weight = self.weights[number]
            if total is None:
                total = products if weight == 1 else products.mul_(weight)
            else:
                total.add_(products, alpha=weight)
            del linearization
        assert total is not None
        if self.total_mass != 1:
            total /= self.total_mass
        try:
            return checked(total)
        except NotFiniteError as error:
            raise self._explained(error, (drawn for drawn, _ in self.problem.counted())) from None

    def _products(self, linearization: Linearization, rows: torch.Tensor) -> torch.Tensor:
        """Product with each of ``rows`` (k, n), as many in one pass as fit into the memory."""
        if len(rows) == 1:
            return self._product(linearization, rows[0])[None]
        budget = backward.Budget(self.problem.memory, 1, linearization.largest, self.device)
        parts = []
        for some in rows.split(budget.cached(len(rows), 2 * self.order, budget.largest)):
            seeds = [torch.stack(tensors) for tensors in zip(*map(self.layout.tensors_of, some), strict=True)]
            products = linearization.products(seeds, self._among)
            parts += [self.layout.vector_of(tensors) for tensors in zip(*products, strict=True)]
        return torch.stack(parts)

    def linearizations(self) -> Iterator[tuple[int, Linearization]]:
        """Linearizations of the batches that count, by number: kept, or built anew."""
        if self._needed <= set(self._retained):
            yield from self._retained.items()
            return
        for drawn, _ in self.problem.counted():
            known = self._retained.get(drawn.number)
            yield drawn.number, self._linearized(self.problem.evaluate(drawn), drawn) if known is None else known

    @cached_property
    def uses(self) -> Uses:
        """Uses of the parameters in the loss of the first batch that counts."""
        linearization = next(matrix for _, matrix in self.linearizations())
        snapshot = self.problem.snapshot
        leaves = dict(zip(self.names, snapshot.leaves, strict=True))
        return Uses(linearization.evaluation.loss, leaves, snapshot.parameters)

    def leaves_of(self, every: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leaves of the problem that are parameters of the operator."""
        return list(every) if self._among is None else [every[i] for i in self._among]

    def _product(self, linearization: Linearization, vector: torch.Tensor) -> torch.Tensor:
        return self.layout.vector_of(linearization.product(self.layout.tensors_of(vector), self._among))

    def _explained(self, error: NotFiniteError, batches: Iterable[Drawn]) -> NotFiniteError:
        """Error with the operation that gives NaN or infinity, where one is found."""
        snapshot, leaves = self.problem.snapshot, self.leaves_of(self.problem.snapshot.leaves)
        # whatever fails in the search, the error that is there is raised
        with suppress(Exception):
            for drawn in batches:
                for reason in (
                    nonfinite.NonFinite(self.problem.loss_fn, drawn.batch, snapshot.model)
                    .reasons(snapshot, {"": leaves})
                    .values()
                ):
                    return NotFiniteError(f"{error}: {reason}")
        return error

    @cached_property
    def rounding(self) -> float:
        """Rounding ε such that a product is within ε ‖A‖ ‖v‖ of the exact one, with the kinks of the forward pass.

        Without rounding uᵀAv = vᵀAu for a random u and v = Au, and Av = A(1.7v)/1.7. Rounding of the forward pass does
        not show: float32 differs from float64 by about as much, with batch normalization in depth 10 to 45 times.
        """
        eps = torch.finfo(self.dtype).eps
        u = torch.randn(self.order, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        u = u.to(self.device, self.dtype)
        u /= u.norm()
        Au = self @ u
        size = Au.norm()
        if size == 0:
            return operator.ROUNDING * eps
        v = Au / size
        Av = (self @ v).to(torch.float64)
        again = (self @ (1.7 * v)).to(torch.float64) / 1.7
        asymmetry = torch.dot(u.to(torch.float64), Av) - torch.dot(v.to(torch.float64), Au.to(torch.float64))
        norm = max(float(size), float(Av.norm()))
        return max(
            operator.ROUNDING * eps, operator.MARGIN * max(abs(float(asymmetry)), float((again - Av).norm())) / norm
        )


def checked(products: torch.Tensor) -> torch.Tensor:
    """Products; a NotFiniteError if they are not finite."""
    if not is_finite(products):
        raise NotFiniteError("a product with second derivatives of the loss has NaN or infinite entries")
    return products


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

    def _linearized(self, evaluation: WatchedEvaluation, drawn: Drawn) -> Linearization:
        return HessianLinearization(evaluation, self.problem.snapshot.leaves)


class GGNOperator(NetworkOperator):
    """Generalized Gauss-Newton matrix Jᵀ H_L J of a data set; arguments and attributes of its base.

    J is the Jacobian of the model's outputs in the parameters and H_L the Hessian of the loss in these outputs. It is
    the Hessian of the loss of the linearized model, and positive semidefinite if the loss is convex.

    Source: Schraudolph, Neural Computation 14 (2002), sec. 3.
    """

    def _linearized(self, evaluation: WatchedEvaluation, drawn: Drawn) -> Linearization:
        problem = self.problem
        return GGNLinearization(evaluation, problem.snapshot.leaves, problem.loss_fn, problem.dtype)

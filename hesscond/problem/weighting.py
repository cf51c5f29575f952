"""Weight of a batch in the loss of a whole data set."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.problem import containers, snapshot
from hesscond.problem.evaluation import (
    LABELS,
    Batch,
    Evaluation,
    LossFunction,
    checked_batch,
    in_precision,
    tensors_by_module,
)
from hesscond.problem.untouched import untouched
from hesscond.problem.wrappers import plainly

#: Weight of a batch, as a function of its inputs and target, or a sequence with one number for each batch.
BatchWeight = Callable[[Any, Any], Any] | Sequence[float]

#: Losses of torch whose mean is over the targets, weighted by class, and losses whose mean is over all entries.
BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
BY_ENTRY = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.SoftMarginLoss, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
    functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.poisson_nll_loss,
    functional.soft_margin_loss,
)  # fmt: skip
#: Value of ignored targets, by torch's convention.
IGNORED = -100
#: Largest number of samples on which a model that computes its loss itself is tried.
ROWS = 8
#: Largest number of output entries on which a loss is tried: all of them except with large vocabularies.
ENTRIES = 2**24
#: Largest number of samples by which halves are chosen.
MOST = 256
#: Numbers of targets kept per sample in two versions of a batch: their means tell entries from samples.
MANY, FEW = 5, 2

HOW = (
    "say what a batch counts with weight=, a function of its inputs and target or one number a batch "
    "(weight=lambda inputs, target: (target != -100).sum()), or with reduction='mean' (by samples) or 'sum'"
)


@dataclass(frozen=True)
class Part:
    """Part of a batch: the outputs, or the inputs of a model that computes its loss, and the target."""

    source: Any
    target: Any
    samples: int

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor], samples: int | None = None) -> Part:
        """Apply ``function`` to every tensor; a tensor in both source and target stays a single one."""
        made: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = function(tensor)
            return made[id(tensor)]

        size = self.samples if samples is None else samples
        return Part(containers.mapped(self.source, once), containers.mapped(self.target, once), size)

    def by_sample(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has equally many leading entries for each sample."""
        return tensor.ndim > 0 and len(tensor) > 0 and len(tensor) % self.samples == 0

    def rows(self, index: torch.Tensor) -> Part:
        """Return the part with the samples of these indices."""

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            if not self.by_sample(tensor):
                return tensor
            return tensor.unflatten(0, (self.samples, -1))[index.to(tensor.device)].flatten(0, 1)

        return self.mapped(taken, len(index))

    def with_target(self, old: torch.Tensor, new: torch.Tensor) -> Part:
        """Return the part with one tensor replaced, in the inputs too."""
        return self.mapped(lambda tensor: new if tensor is old else tensor)

    def and_(self, other: Part) -> Part:
        """Return a part with the samples of both, which have the same structure."""
        others = dict(zip(map(id, self.tensors()), other.tensors(), strict=True))

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, others[id(tensor)]]) if self.by_sample(tensor) else tensor

        return self.mapped(joined, self.samples + other.samples)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the source and of the target."""
        yield from containers.tensors_of(self.source)
        yield from containers.tensors_of(self.target)

    def noisy(self) -> Part:
        """Return the part with noise on its outputs, so that losses differ: in a new network they may all be equal."""
        generator = torch.Generator().manual_seed(0)

        def shaken(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").to(tensor)
            return tensor.detach() + (0.1 + tensor.detach().abs().mean()) * noise

        return replace(self, source=containers.mapped(self.source, shaken))


#: Some samples, and the parts that they are split into.
Split = tuple[Part, Sequence[Part]]


@dataclass(frozen=True)
class Rule:
    """Rule for the weight of a part: its number of samples, or of entries of a tensor of its target.

    ``kind`` is ``"samples"``, ``"entries"``, ``"total"`` (the sum of a mask), ``"torch"`` (the divisor of a
    loss of torch), ``"given"`` by the caller, or ``"sum"``: the loss is no mean.
    """

    kind: str
    tensor: int = 0  # index in the target
    shifted: bool = False  # whether the first position of each sequence is left out, as in a causal model
    ignored: int | None = None  # value of entries that do not count
    classes: int | None = None  # index of the class weights, among those that the loss uses, by which entries count

    def __str__(self) -> str:
        if self.kind != "entries":
            return {"total": "the sum of a mask", "torch": "targets", "sum": "one each"}.get(self.kind, self.kind)
        what = "entries of the target" if self.ignored is None else f"targets other than {self.ignored}"
        what += " after the first position" if self.shifted else ""
        return what if self.classes is None else f"class weights of {what}"

    @property
    def plain(self) -> Rule:
        """Rule that is equivalent where the ignored value does not occur."""
        return replace(self, ignored=None)


SUM, SAMPLES, TORCH, GIVEN = Rule("sum"), Rule("samples"), Rule("torch"), Rule("given")


class Weights:
    """Weights m_k such that the loss of a data set is Σ m_k L_k / Σ m_k over its batches' losses L_k, or Σ L_k.

    For a loss of torch, m_k is its divisor. For any other, the `Rule` is inferred that gives its value on a batch from
    its values on parts of the batch: halves, and versions with many and with few targets kept. ``masses`` has the
    weight of each batch by each rule that may still hold.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dtype: torch.dtype | None,
        reduction: str | None = None,
        weight: BatchWeight | None = None,
    ) -> None:
        check_weighting(reduction, weight)
        self.model, self.loss_fn, self.dtype, self.reduction, self.weight = model, loss_fn, dtype, reduction, weight
        self.masses: dict[Rule, list[float]] = {}
        self.count = 0
        self._unit: float | None = None
        self._first = 0
        self._values: set[int] = set()
        self._target: Any = None
        self._has_target = True

    def add(self, batch: Batch, evaluation: Evaluation) -> float:
        """Add the next batch and return its weight, in proportion to the others (see `total`); 0: nothing counts."""
        inputs, target = checked_batch(batch)
        whole = Part(evaluation.output, evaluation.target, evaluation.samples)
        if self.weight is not None:
            masses = {GIVEN: self._given(inputs, target)}
        elif self.reduction == "sum":
            masses = {SUM: 1.0}
        elif self.reduction == "mean":
            known = divisor(self.loss_fn, whole)
            masses = {TORCH: float(whole.samples) if known is None else known}
        else:
            # a loss may run the model
            with untouched(self.model, self.loss_fn), plainly(self.model):
                masses = self._by_trial(Part(inputs, target, evaluation.samples), whole, evaluation)
        self.masses = {rule: [*self.masses.get(rule, self.masses.get(rule.plain, [])), m] for rule, m in masses.items()}
        self.count += 1
        rule, m = next(iter(masses.items()))
        if self._unit is None:
            if not m:
                return 0.0
            self._unit, self._first = m, self.count - 1
        return self._scaled(rule, m)

    @property
    def total(self) -> float:
        """Divisor of the weighted sum over the batches: the sum of the weights, or the unit of plain sums."""
        if not self.count:
            raise ConfigError("the data are an empty stream: they need at least one batch")
        if self.weight is not None and not callable(self.weight) and len(self.weight) != self.count:
            raise ConfigError(f"weight has {len(self.weight)} numbers for {self.count} batches: give one for each")
        if self._unit is None:
            raise ConfigError("no target in the stream counts in the loss: there is no Hessian")
        totals = [self._unit if rule == SUM else self._scaled(rule, sum(terms)) for rule, terms in self.masses.items()]
        if not all(close(total, totals[0]) for total in totals):
            raise ConfigError(f"the loss of the stream may be the mean or the sum of those of its batches: {HOW}")
        return totals[0]

    def _scaled(self, rule: Rule, mass: float) -> float:
        assert self._unit is not None
        first = self.masses[rule][self._first]
        return mass if first == self._unit else self._unit * (mass / first)

    def _given(self, inputs: Any, target: Any) -> float:
        assert self.weight is not None
        if callable(self.weight):
            value = self.weight(inputs, target)
        elif self.count < len(self.weight):
            value = self.weight[self.count]
        else:
            raise ConfigError(f"weight has {len(self.weight)} numbers, but there are more batches: give one for each")
        try:
            mass = float(value)
        except (TypeError, ValueError, RuntimeError):
            mass = math.nan
        if not 0 <= mass < math.inf:
            shown = f"{value!r}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
            raise ConfigError(f"the weight of batch {self.count} must be a number of at least 0, not {shown}")
        return mass

    # inference of the rule

    def _by_trial(self, given: Part, outputs: Part, evaluation: Evaluation) -> dict[Rule, float]:
        """Weight of the batch by each rule that may still hold."""
        # a loss that the model computed is not one of the outputs
        inner = any(t.ndim == 0 and t.requires_grad for t in containers.tensors_of(evaluation.output))
        whole = own_labels(given) if inner else outputs
        # without a target the loss is one of the outputs, or of labels among the inputs
        self._target, self._has_target = given.target, next(containers.tensors_of(given.target), None) is not None
        if not self._has_target:
            whole = replace(whole, target=whole.source)
        rules = [rule for rule in self._rules(whole, inner) if not math.isnan(self._mass(rule, whole))]
        nothing = [rule for rule in rules if self._mass(rule, whole) == 0]
        if nothing and (len(nothing) == len(set(rules) - {SUM}) or not math.isfinite(evaluation.loss.detach())):
            return dict.fromkeys(rules if TORCH in nothing else nothing, 0.0)
        rules = self._confirmed(rules, whole, inner)
        if not rules:
            raise ConfigError(
                f"the loss of a batch of {whole.samples} is neither the mean nor the sum of those of its parts, so "
                f"that the loss of a stream is not known: give one batch, or {HOW}"
            )
        if (pair := self._disagreement(rules, whole)) is not None:
            raise ConfigError(
                f"batch {self.count} of the stream counts differently by {pair[0]} and by {pair[1]}, and the loss does "
                f"not show which is meant: {HOW}"
            )
        return {rule: self._mass(rule, whole) for rule in rules}

    def _confirmed(self, rules: list[Rule], whole: Part, inner: bool) -> list[Rule]:
        """Rules that the loss follows on parts of the batch, until those left agree on its weight."""
        loss = self._inner_loss if inner else self._outer_loss
        size = sum(t.numel() for t in containers.tensors_of(whole.source)) // whole.samples
        some = whole.rows(
            torch.arange(min(whole.samples, ROWS if inner else max(2, ENTRIES // max(size, 1))), device="cpu")
        )
        if not inner or len(rules) > 1:
            for split in (*halves(some, torch.arange(some.samples, device="cpu")), doubled(some)):
                rules = self._left(rules, split, loss, needed=True)
        for tried in (some,) if inner else (some, some.noisy()):
            if self._disagreement(rules, whole) is None and (not self.count or rules == [SUM] or SUM not in rules):
                break
            for split in (*self._uneven_halves(rules, tried), *self._thinned(tried)):
                rules = self._left(rules, split, loss)
        return rules

    def _rules(self, whole: Part, inner: bool) -> list[Rule]:
        """Rules that may hold: all plausible ones for the first batch, the remaining ones for later batches."""
        if not inner and divisor(self.loss_fn, whole) is not None:
            return list(self.masses) or [TORCH, SUM]
        rules = plausible(whole, self._ignored(whole, inner), len(self._declared[1]))
        if self.count:
            # ignoring a value that did not occur before made no difference
            new = [rule for rule in rules if rule.plain in self.masses and rule.ignored not in self._values]
            rules = list(dict.fromkeys([*self.masses, *new]))
        for tensor in filter(is_label, containers.tensors_of(whole.target)):
            self._values.update(tensor.unique().tolist())
        return rules

    def _ignored(self, whole: Part, inner: bool) -> list[int]:
        """Values of targets that may be ignored: by convention, by a constant of the loss, or by its gradient."""
        values = {IGNORED, *self._declared[0]}
        targets = list(containers.tensors_of(whole.target))
        for tensor in filter(is_label, targets):
            values.update(tensor[tensor < 0].unique().tolist())
        if not inner and self._has_target and len(targets) == 1 and is_label(targets[0]):
            values |= unseen(self._loss, whole, targets[0])
        return sorted(values)

    @cached_property
    def _declared(self) -> tuple[list[int], list[torch.Tensor]]:
        return constituents(self.loss_fn)

    def _mass(self, rule: Rule, part: Part) -> float:
        """Weight of a part by a rule; ``nan``: the rule cannot hold."""
        if rule in (SUM, SAMPLES):
            return 1.0 if rule == SUM else float(part.samples)
        if rule == TORCH:
            known = divisor(self.loss_fn, part)
            return math.nan if known is None else known
        tensors = list(containers.tensors_of(part.target))
        if rule.tensor >= len(tensors) or tensors[rule.tensor].ndim < 1 + rule.shifted:
            return math.nan
        tensor = tensors[rule.tensor][:, 1:] if rule.shifted else tensors[rule.tensor]
        if rule.kind == "total":
            return float(tensor.sum())
        kept = tensor if rule.ignored is None else tensor[tensor != rule.ignored]
        if rule.classes is None:
            return float(kept.numel())
        weights = self._declared[1][rule.classes].to(kept.device, torch.float64)
        known_classes = bool(((kept >= 0) & (kept < len(weights))).all())
        return float(weights[kept].sum()) if known_classes else math.nan

    def _left(
        self, rules: list[Rule], split: Split, loss: Callable[[Part], float], *, needed: bool = False
    ) -> list[Rule]:
        """Rules by which the loss of all samples of a split follows from the losses of its parts."""
        whole, parts = split
        try:
            expected, losses = loss(whole), [loss(part) for part in parts]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return [] if needed else rules
        if not math.isfinite(expected):
            return rules

        def follows(rule: Rule) -> bool:
            if rule == SUM:
                return same(sum(losses), expected)
            masses = [self._mass(rule, part) for part in parts]
            # a part in which no target counts has no mean
            terms = [m * x for m, x in zip(masses, losses, strict=True) if m]
            return sum(masses) > 0 and same(sum(terms) / sum(masses), expected)

        return [rule for rule in rules if follows(rule)]

    def _uneven_halves(self, rules: Sequence[Rule], whole: Part) -> Iterator[Split]:
        """Yield halves whose weights by two rules differ in proportion, if those of the samples do."""
        pair = self._disagreement(rules, whole)
        if pair is not None and whole.samples > 1:
            alone = [whole.rows(torch.tensor([n], device="cpu")) for n in range(min(whole.samples, MOST))]
            masses, other = ([self._mass(rule, part) for part in alone] for rule in pair)
            ratio = torch.tensor(masses, dtype=torch.float64, device="cpu") / torch.tensor(
                other, dtype=torch.float64, device="cpu"
            )
            order = ratio.nan_to_num(0).argsort(stable=True)
            yield from halves(whole, order)

    def _thinned(self, whole: Part) -> Iterator[Split]:
        """Yield the batch twice, once with many and once with few targets kept in each sample."""
        for tensor in containers.tensors_of(whole.target):
            if tensor.ndim < 2 or tensor.shape[1] < 2 or not (is_label(tensor) or is_mask(tensor)):
                continue
            for nothing in [0] if is_mask(tensor) else [IGNORED, *self._declared[0]]:
                flat = (tensor != nothing).flatten(1)
                place = flat.cumsum(1)
                last = place[:, -1:]
                few, many = place <= (last // 3).clamp(1, FEW), place > last - MANY
                parts = [
                    whole.with_target(tensor, tensor.where((flat & keep).view_as(tensor), nothing)).mapped(on_host)
                    for keep in (many, few)
                ]
                yield parts[0].and_(parts[1]), parts

    def _disagreement(self, rules: Sequence[Rule], whole: Part) -> tuple[Rule, Rule] | None:
        """Two rules by which the batch has different weights relative to the earlier batches; None: all agree."""

        def share(rule: Rule) -> float:
            mass = self._mass(rule, whole)
            if self._unit is None:
                return float(mass > 0)
            return mass / self.masses.get(rule, self.masses.get(rule.plain, []))[self._first]

        shares = {rule: share(rule) for rule in rules if rule != SUM}
        return next((pair for pair in combinations(shares, 2) if not close(*map(shares.__getitem__, pair))), None)

    def _loss(self, source: Any, target: Any) -> torch.Tensor:
        return in_precision(self.loss_fn, self.dtype)(source, target)

    @torch.no_grad()
    def _outer_loss(self, part: Part) -> float:
        return float(self._loss(*self._arguments(part)))

    def _arguments(self, part: Part) -> tuple[Any, Any]:
        """Arguments of the loss for a part."""
        return part.source, part.target if self._has_target else self._target

    def _inner_loss(self, part: Part) -> float:
        return float(self._still.evaluate(self.loss_fn, self._arguments(part.mapped(on_host))).loss.detach())

    @cached_property
    def _still(self) -> snapshot.Snapshot:
        """Snapshot of the model on the CPU, in evaluation mode, in which samples do not influence each other."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_by_module(self.model).values())
        with snapshot.in_modes(self.model, [False for _ in self.model.modules()]):
            return snapshot.Snapshot(self.model if on_cpu else deepcopy(self.model).cpu(), [], self.dtype)


def check_weighting(reduction: str | None, weight: object) -> None:
    """Raise a ConfigError unless at most one of the two is given, in a form that `Weights` accepts."""
    if reduction not in (None, "mean", "sum"):
        raise ConfigError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    numbers = hasattr(weight, "__len__") and hasattr(weight, "__getitem__") and not isinstance(weight, (str, Mapping))
    if not (weight is None or callable(weight) or numbers):
        raise ConfigError(
            "weight must be a function of the inputs and the target of a batch, or one number for each batch, not "
            f"{weight!r}"
        )
    if weight is not None and reduction is not None:
        raise ConfigError("reduction and weight both say what a batch counts: give one of them")


def refuse_nothing(loss_fn: LossFunction, evaluation: Evaluation) -> None:
    """Raise a ConfigError if no target of a batch counts in its loss."""
    labels = [tensor for tensor in containers.tensors_of(evaluation.target) if is_label(tensor)]
    ignored = bool(labels) and all(bool((tensor < 0).all()) for tensor in labels)
    known = divisor(loss_fn, Part(evaluation.output, evaluation.target, evaluation.samples))
    loss = float(evaluation.loss.detach())
    if known == 0 or (known is None and ignored and (loss == 0 or not math.isfinite(loss))):
        raise ConfigError("no target of the batch counts in the loss: there is no Hessian")


def plausible(whole: Part, ignored: Sequence[int], classes: int) -> list[Rule]:
    """Rules that can be tried on a batch."""
    rules = [SAMPLES]
    tensors = list(containers.tensors_of(whole.target))
    for number, tensor in enumerate(tensors):
        if not whole.by_sample(tensor):
            continue
        choices = [Rule("entries", number)]
        if len(tensors) > 1 and is_mask(tensor):
            choices.append(Rule("total", number))
        if is_label(tensor):
            choices += [Rule("entries", number, ignored=value) for value in ignored]
            choices += [replace(rule, classes=j) for j in range(classes) for rule in choices if rule.kind == "entries"]
        if tensor.ndim > 1 and not (tensor.is_floating_point() and len(choices) == 1):
            choices += [replace(rule, shifted=True) for rule in choices]
        rules += choices
    return [*rules, SUM]


def divisor(loss_fn: LossFunction, part: Part) -> float | None:
    """Divisor of a loss of torch: entries, or the class weights of the targets not ignored; None: another loss."""
    loss: Any = loss_fn
    options: Mapping[str, Any] = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        loss, options = loss_fn.func, loss_fn.keywords
    output, target = part.source, part.target
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if made_by(loss, BY_ENTRY):
        return float(torch.broadcast_shapes(output.shape, target.shape).numel())
    if not made_by(loss, BY_CLASS):
        return None
    if target.is_floating_point():
        # probabilities of the classes
        return float(target.numel() // (target.shape[1] if target.ndim > 1 else 1))
    chosen = target[target != options.get("ignore_index", getattr(loss, "ignore_index", IGNORED))]
    weight = options.get("weight", getattr(loss, "weight", None))
    return float(chosen.numel() if weight is None else weight.to(torch.float64)[chosen].sum())


def made_by(loss: Any, kinds: Sequence[Any]) -> bool:
    """Whether a loss is one of the given functions, or an instance of exactly one of the given classes."""
    return any(loss is kind or type(loss) is kind for kind in kinds)


def unseen(loss: LossFunction, whole: Part, target: torch.Tensor) -> set[int]:
    """Values of a target at which the gradient in the outputs is zero at every occurrence."""
    source = containers.mapped(whole.source, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)
    leaves = [t for t in containers.tensors_of(source) if t.requires_grad]
    try:
        gradients = torch.autograd.grad(loss(source, target), leaves, allow_unused=True)
    except RuntimeError:
        return set()
    ignored: set[int] = set()
    for gradient in gradients:
        for axis in (-1, 1):
            if gradient is None or gradient.ndim < 2 or gradient.numel() != target.numel() * gradient.shape[axis]:
                continue
            zero = (gradient.nan_to_num() == 0).all(axis).flatten()
            values = target.flatten()
            ignored |= set(values[zero].unique().tolist()) - set(values[~zero].unique().tolist())
    return ignored


def constituents(loss_fn: LossFunction) -> tuple[list[int], list[torch.Tensor]]:
    """Integers and vectors that a loss refers to: possibly values that it ignores, and class weights."""
    values: list[Any] = []
    if isinstance(loss_fn, partial):
        values += [loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()]
    elif isinstance(loss_fn, nn.Module):
        values += [loss_fn, *vars(loss_fn).values(), *loss_fn.buffers(), *loss_fn.modules()]
    else:
        function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
        if not inspect.isfunction(function):
            # an object that can be called
            values += getattr(loss_fn, "__dict__", {}).values()
        else:
            variables = inspect.getclosurevars(function)
            values += [*variables.nonlocals.values(), *variables.globals.values(), *function.__code__.co_consts]
            values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in list(values):
        if isinstance(value, (nn.CrossEntropyLoss, nn.NLLLoss)):
            values += [value.ignore_index, value.weight]
        elif isinstance(value, partial):
            values += value.keywords.values()
    numbers = {value for value in values if isinstance(value, int) and not isinstance(value, bool)}
    vectors = [v for v in values if isinstance(v, torch.Tensor) and v.ndim == 1 and v.is_floating_point()]
    return sorted(numbers), list({id(vector): vector.detach() for vector in vectors}.values())


def own_labels(given: Part) -> Part:
    """Return the part with separate labels, which in a causal model may be the same tensor as another input."""
    target = given.target
    if not isinstance(given.source, Mapping) or not isinstance(target, torch.Tensor):
        return given
    labels = target.clone()
    source = {name: labels if name in LABELS and value is target else value for name, value in given.source.items()}
    return replace(given, source=source, target=labels)


def halves(whole: Part, order: torch.Tensor) -> Iterator[Split]:
    """Yield the samples in an order, split in the middle."""
    if len(order) > 1:
        middle = len(order) // 2
        yield whole.rows(order), [whole.rows(order[:middle]), whole.rows(order[middle:])]


def doubled(whole: Part) -> Split:
    """Split of every sample taken twice."""
    return whole.and_(whole), [whole, whole]


def is_label(tensor: torch.Tensor) -> bool:
    """Whether the entries are integers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether the entries are zeros and ones."""
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, where an invalid target raises an error and does not end the process."""
    return tensor.detach().cpu()


def same(first: float, second: float) -> bool:
    """Whether two losses are equal up to rounding in float32."""
    return math.isclose(first, second, rel_tol=1e-5)


def close(first: float, second: float) -> bool:
    """Whether two shares are equal up to rounding."""
    return math.isclose(first, second, rel_tol=1e-12)

"""Constructions that a condition number was once printed for as resolved although it was wrong, and the judge of them.

A construction is a model, a loss, a batch and an independent truth; `verdict_of` compares κ, rank and interval with the
eigenvalues of the truth.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hesscond
from hesscond.capture import eligible_layers
from hesscond.errors import HesscondError
from tests.support.truth import Truth

LEVELS = ("unit", "layer", "network")
#: Allowed relative difference of an interval from κ, and rounding of the truth's eigenvalues in float64.
TOLERANCE, ROUNDING = 1e-6, 1e-13
#: |λ|/|λ|_max that a numerical rank may take for zero.
NUMERICAL = 1e-12
#: Decimal digits of the exact truth, its step of differences, and the |λ|/|λ|_max that is zero in it.
DIGITS, STEP, NOTHING = 240, 70, 90
WORST_FIRST = ("traceback", "wrong", "refused", "unresolved", "right")


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a true Hessian.

    Attributes
    ----------
    values
        In descending order of size, as floats or numbers of mpmath; a zero that is exact is 0.
    error
        Bound of their errors; 0 if they are exact.
    most
        Largest possible rank; None: as many as are not zero.
    rounding
        Rounding of the terms that the Hessian is the difference of: what is smaller may be called zero.
    """

    values: Sequence[Any]
    error: float = 0.0
    most: int | None = None
    rounding: float = 0.0

    @classmethod
    def of(cls, matrix):
        """The spectrum of a matrix of doubles, known up to rounding, in which rows of any scale may be nonzero."""
        values = torch.linalg.eigvalsh(matrix).tolist()
        values.sort(key=abs, reverse=True)
        scales = matrix.abs().amax(1).sqrt()
        scales = torch.where(scales == 0, 1, scales)
        equilibrated = torch.linalg.eigvalsh(matrix / scales / scales[:, None]).abs()
        return cls(values, ROUNDING * abs(values[0]), int((equilibrated > ROUNDING).sum()))

    @property
    def ranks(self):
        """The smallest and the largest rank that it allows."""
        sizes = [abs(value) for value in self.values]
        most = sum(size > self.error for size in sizes)
        return sum(size > 1e3 * self.error for size in sizes), max(most, self.most or 0)


@dataclass(frozen=True)
class Verdict:
    """What one Hessian's κ is worth: a word of `WORST_FIRST` and a sentence."""

    word: str
    sentence: str


def verdict_of(kappa, true, *, signed=True):
    """The verdict on a `ConditionNumber` by the true spectrum; ``signed``: the number of negative ones counts."""
    fewest, most = true.ranks
    zero_said = kappa.rank == 0 and (kappa.rank_decision == "zero" or kappa.solver == "zero matrix")
    if most == 0:
        if kappa.resolved and kappa.rank:
            return Verdict("wrong", f"{kappa}; the Hessian is zero")
        return Verdict("right", "the Hessian is zero") if zero_said else Verdict("unresolved", f"{kappa}; it is zero")
    sizes = [abs(value) for value in true.values]

    def ratio(rank):
        return float(sizes[0] / sizes[rank - 1])

    truth = f"truly κ = {ratio(most):.6g}, rank {most} of {len(sizes)}"
    if not kappa.resolved:
        known = sizes[most - 1] > 1e3 * true.error
        if known and not kappa.lower <= ratio(most) * (1 + TOLERANCE):
            return Verdict("wrong", f"κ ≥ {kappa.lower:.6g}; {truth}")
        if zero_said and sizes[0] > true.rounding:
            return Verdict("wrong", f"called zero; {truth}, |λ| up to {float(sizes[0]):.1e}")
        return Verdict("unresolved", f"not resolved; {truth}")
    said = f"κ = {kappa.value:.6g} in [{kappa.lower:.6g}, {kappa.upper:.6g}], {kappa.rank_decision} rank {kappa.rank}"
    rank = kappa.rank
    if not 0 < rank <= most:
        return Verdict("wrong", f"{said}; {truth}")
    if rank < fewest and (kappa.rank_decision != "numerical" or sizes[rank] > NUMERICAL * sizes[0]):
        return Verdict("wrong", f"{said}; {truth}")
    value, slack = ratio(rank), TOLERANCE + 2 * float(true.error / sizes[rank - 1])
    if not kappa.lower * (1 - slack) <= value <= kappa.upper * (1 + slack):
        return Verdict("wrong", f"{said}; {truth}")
    negative = sum(v < 0 for v in true.values[:rank])
    if signed and kappa.negative_counted and fewest == most and kappa.negative != negative:
        return Verdict("wrong", f"{said}, {kappa.negative} negative; truly {negative}")
    return Verdict("right", f"κ = {kappa.value:.4g} (rank {rank} of {len(sizes)})")


# ------------------------------------------------------------------------------------------------------------- truths


class TwinTruth(Truth):
    """Double backward on a model of plain operations that computes the same function.

    ``zero`` names parameters whose whole rows of the Hessian are exactly zero; ``scales`` gives, by parameter name, the
    diagonal of P, and holds only those that an optimizer holds.
    """

    def __init__(self, twin, loss_fn, batch, *, zero=(), scales=None):
        # noise is that of the float32 model's own run
        super().__init__(twin, loss_fn, batch, draws=torch.float32)
        self.zero, self.scales = set(zero), scales
        for name in self.zero:
            where = self.index[name].flatten()
            self.matrix[where] = 0
            self.matrix[:, where] = 0
        if scales is not None:
            flat = torch.ones(len(self.matrix), dtype=torch.float64)
            for name, scale in scales.items():
                flat[self.index[name].flatten()] = scale.flatten().double()
            self.matrix = flat[:, None] * self.matrix * flat

    def entries(self, own, unit):
        """Indices of the rows of a Hessian of a result."""
        if own.level == "unit":
            return self.units(own.name, own.parameters)[unit]
        return self.flat(own.parameters)

    def spectrum(self, own, unit):
        """The true spectrum of a Hessian of a result, or a sentence on what it is wrongly called."""
        if self.scales is not None and not set(own.parameters) <= set(self.scales):
            other = sorted(set(own.parameters) - set(self.scales))
            return f"{', '.join(other)} measured in coordinates of an optimizer that does not hold it"
        return Spectrum.of(self.at(self.entries(own, unit)))


class FormulaTruth:
    """The Hessian of a formula in mpmath, by differences with 70 digits.

    ``formula(parameters, rows)`` is the loss, from arrays of mpmath's numbers: {name: parameter} and the inputs;
    ``terms`` is the size of the terms that the Hessian is the difference of, if it is one.
    """

    def __init__(self, model, formula, inputs, terms=0.0):
        import numpy as np
        from mpmath import mp

        self.mp, mp.dps = mp, DIGITS
        exact = np.vectorize(lambda value: mp.mpf(float(value)), otypes=[object])
        own = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
        sizes = [p.numel() for p in own.values()]
        places = torch.arange(sum(sizes)).split(sizes)
        self.index = {name: where.view(p.shape) for (name, p), where in zip(own.items(), places, strict=True)}
        start = np.concatenate([exact(p.flatten().numpy()) for p in own.values()])
        rows = exact(inputs.double().numpy())
        h = mp.mpf(10) ** -STEP

        def loss(*moves):
            point = start.copy()
            for number, move in moves:
                point[number] += move
            return formula({name: point[where.numpy()] for name, where in self.index.items()}, rows)

        n, middle = len(start), loss()
        self.matrix = mp.matrix(n, n)
        ends = [(loss((i, h)), loss((i, -h))) for i in range(n)]
        for i, (above, below) in enumerate(ends):
            self.matrix[i, i] = (above - 2 * middle + below) / h**2
            for j in range(i):
                both = loss((i, h), (j, h)) + loss((i, -h), (j, -h))
                mixed = (both - above - below - sum(ends[j]) + 2 * middle) / (2 * h**2)
                self.matrix[i, j] = self.matrix[j, i] = mixed
        self.scale, self.rounding = 1 + abs(middle), 64 * torch.finfo(torch.float64).eps * terms

    def spectrum(self, own, unit):
        """The true spectrum of a Hessian of a result."""
        if own.level == "unit":
            where = torch.cat(
                [
                    self.index[name].flatten(1)[unit]
                    if self.index[name].ndim > 1
                    else self.index[name][unit : unit + 1]
                    for name in own.parameters
                ]
            )
        else:
            where = torch.cat([self.index[name].flatten() for name in own.parameters])
        chosen = where.tolist()
        block = self.mp.matrix([[self.matrix[i, j] for j in chosen] for i in chosen])
        values = sorted(self.mp.eigsy(block, eigvals_only=True), key=abs, reverse=True)
        smallest = self.mp.mpf(10) ** -NOTHING * max(abs(values[0]), self.scale * self.mp.mpf(10) ** -STEP)
        values = [value if abs(value) > smallest else self.mp.mpf(0) for value in values]
        return Spectrum(values, rounding=self.rounding)


# ------------------------------------------------------------------------------------------------------ constructions


@dataclass(frozen=True, eq=False)
class Construction:
    """One construction.

    Attributes
    ----------
    trust
        The kind of fault that it is of.
    title
        What it is.
    make
        Makes (model, loss_fn, batch); its name is the construction's.
    layer
        The layer that the page shows.
    truth
        Makes the truth from (model, loss_fn, batch).
    levels
        Those tried.
    options
        More arguments of `hesscond.probe`; a function of (model, loss_fn, batch) makes them.
    control
        Whether a refusal is a false alarm.
    signed
        Whether the number of negative eigenvalues counts.
    judge
        Another way to its verdicts, from (construction, level); None: by `hesscond.probe`.
    """

    trust: str
    title: str
    make: Callable[..., Any]
    layer: str
    truth: Callable[..., Any]
    levels: tuple[str, ...] = LEVELS
    options: dict | Callable[..., dict] = field(default_factory=dict)
    control: bool = False
    signed: bool = True
    judge: Callable[..., list[Verdict]] | None = None
    library: str | None = None
    processes: int = 1
    #: no construction needs what may not be there
    missing = None

    @property
    def name(self):
        """The name of its function."""
        return self.make.__name__

    @property
    def group(self):
        """Where it stands on the page."""
        from tests.support.constructions import GROUPS

        return GROUPS[self.trust]

    def verdicts(self, level, seed=0, factor=1.0):
        """[(where, verdict)] of all Hessians at a level, with random numbers of a seed and the loss times a factor."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.judge is not None:
                return self.judge(self, level, 100 * seed)
            torch.manual_seed(seed)
            model, plain, batch = self.make()
            loss_fn = plain if factor == 1 else lambda output, target: factor * plain(output, target)
            options = self.options(model, loss_fn, batch) if callable(self.options) else self.options
            truth = (
                self.truth(model, loss_fn, batch, options)
                if callable(self.options)
                else self.truth(model, loss_fn, batch)
            )
            torch.manual_seed(1)
            try:
                result = hesscond.probe(model, loss_fn, batch, level=level, **options)
                found = [
                    (name if unit is None else f"{name}[{unit}]", self.verdict(truth, own, unit, kappa))
                    for name, own in result.items()
                    for unit, kappa in zip(own.units if level == "unit" else [None], own.conditions, strict=True)
                ]
            except HesscondError as error:
                return [("", Verdict("refused", str(error)))]
            # modules of other kinds have to be named
            skipped = {name: why for name, why in result.skipped.items() if name in eligible_layers(model)}
            return found + [(name, Verdict("refused", why)) for name, why in skipped.items()]

    def verdict(self, truth, own, unit, kappa):
        """The verdict on one Hessian of a result."""
        true = truth.spectrum(own, unit)
        return Verdict("wrong", true) if isinstance(true, str) else verdict_of(kappa, true, signed=self.signed)


def text_of(found, layer):
    """What the page says of a level: the first verdict of the layer that it shows."""
    own = [verdict for where, verdict in found if where.split("[")[0] in (layer, "network")] or [found[0][1]]
    return "not resolved" if own[0].word == "unresolved" else own[0].sentence

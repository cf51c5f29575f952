"""Entry point of the package: capture → Hessian in a method's coordinates → spectrum → κ."""

from __future__ import annotations

import hashlib
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import function

from hesscond.capture import ProbeProgress, ProgressRecord
from hesscond.errors import CaptureError, ConfigError, HesscondError, NotFiniteError, bytes_of, one_line, out_of_memory
from hesscond.hessians import catalogue, network_operator
from hesscond.probing.applied import ProbeMethod, applied
from hesscond.probing.captured import reached
from hesscond.probing.layers import layer_results
from hesscond.probing.network import network_result
from hesscond.probing.question import Question, checked_level
from hesscond.probing.results import ProbeResult
from hesscond.problem import evaluation, references, wrappers
from hesscond.problem.containers import is_batch, moved, tensors_of
from hesscond.problem.devices import default_memory
from hesscond.problem.weighting import BatchWeight
from hesscond.sheets import duration

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that a probe may take without a word.
SILENT = 5.0
#: Seconds that second derivatives may take in a probe that names neither layers nor units.
PATIENCE = 90.0
#: Reason for a parameter that no module of the model has.
OUTSIDE = "a parameter of the loss, or in no module of the model, which the others leave out: name it, layers=[{0!r}]"


def probe(
    model: nn.Module,
    loss_fn: evaluation.LossFunction | None,
    data: evaluation.Batch | Iterable[evaluation.Batch],
    layers: Iterable[str] | str | None = None,
    level: str = "unit",
    method: ProbeMethod = None,
    *,
    blocks: Mapping[str, Iterable[str] | str] | None = None,
    units: Sequence[int] | str | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-8,
    memory: float | str | None = None,
    reduction: str | None = None,
    weight: BatchWeight | None = None,
    group: ProcessGroup | None = None,
    check: bool = True,
    products: int | None = None,
    progress: Callable[[ProbeProgress], None] | None = None,
) -> ProbeResult:
    """Exact Hessians Ĥᵀ S Ĥ of layers or of their output units, and their condition numbers.

    The model is left as it was: mode, gradients, buffers, hooks and random state.

    Parameters
    ----------
    model
        Any module; its `torch.nn.Linear`, convolution and transposed convolution layers are probed, and other modules
        if they are named. The Hessian is that in the layer's parameters, whatever the model does with them: a layer
        that is called several times has one, to which all calls contribute; one whose weight is computed from other
        parameters has that in these (``result["fc2"].parameters`` names them).
    loss_fn
        ``loss_fn(output, target)``, a scalar: the mean loss of the batch, usually. None: the model's own, its output
        or the ``loss`` of that.
    data
        ``(inputs, targets)``; inputs a tensor, a tuple of positional or a mapping of keyword arguments, or any other
        object with tensors, which is one argument. Or one mapping or object with both: its ``labels`` (or ``label``,
        ``y``, ``target``, ``targets``; None: there is none) are the target, and it is the inputs. Or a stream of such
        batches (a ``DataLoader``, a list): then the Hessians are those of the loss over all of them together.
    layers
        Names, or one name: of modules of any kind (``"h.0.ln_1"``), of parameters (``"h.0.ln_1.weight"``), of parts of
        either, and globs of all these (``"*.mlp.*"``). ``"*"`` is every parameter that requires a gradient, each in one
        block; what cannot be measured of what a glob finds is in ``skipped`` of the result. Parts: query, key and value
        ``"attn[q]"``, their heads ``"attn[q.0]"``, the gates i, f, g, o or r, z, n of recurrent cells ``"lstm[f]"``,
        layers and directions ``"lstm[l1_reverse]"``, ranges of rows ``"fc[0:64]"``. None: all dense and convolutional
        layers that the data reach (``skipped`` names the others, and parameters of other modules), or all parameters,
        as by ``"*"``, if there are none (``scope`` of the result says so). What is no dense or convolutional layer is
        measured by products with the Hessian, its units being the outputs of its weight (columns
        where y = x W) with the biases that are added to them, or rows: the tokens that occur of an embedding, shift and
        scale of a feature of a normalization, the rows of packed or recurrent weights with their biases.
    level
        ``"unit"``: one Hessian for every output unit's [b, w]; ``"layer"``: one for all parameters of the layer;
        ``"network"``: one for all parameters that require a gradient, or for those of ``layers`` together, under the
        name ``"network"``. It is known by its products (``result["network"].operator``); κ is exact up to some
        thousand parameters and beyond that from iterations at both ends of the spectrum, or unresolved.
    method
        What to measure. None: the model in plain coordinates. A name, as ``--method`` takes it: of methods that build
        the network otherwise (``"batchnorm"``, ``"sphere"``) a copy of the model with the method applied to it, in the
        method's coordinates; of those whose P the inputs of the layers define (``"bnp"``) that of the data; of those
        whose P one batch defines (``"kfac"``, ``"ekfac"``, ``"gauss-newton"``) that of a first
        step on it; methods whose coordinates many steps define (``"adam"``) are refused. A method at work on the model,
        ``BNP(model)``: the coordinates of its last step. An optimizer that has taken a step, of torch,
        pytorch-optimizer, or several that train the model together: P with M = P Pᵀ of its step −η M g,
        read from its state (see `hesscond.methods.optimizers`), of the parameters that they move: the others are in
        ``skipped``. Of any other, M as a function of a parameter. Or a `Preconditioner`, or a chart such as
        `hesscond.hessians.Jacobi`. The result says in words which it was (``result.coordinates``).
    blocks
        Named groups of parameters, each a list of names as for ``layers``: one Hessian each, at level "unit" too.
        Without ``layers`` only these are measured.
    units
        Units of each layer. None: all; if no layers are named either and all would take longer than two minutes, a
        sample, as ``scope`` of the result says. ``"all"``: all in any case.
    dtype
        Precision of the forward pass, whatever that of the model is; None: the precision of the model. In float64, what
        the model casts to float32 stays in float64; operations that round to fewer digits all the same are reported
        (``result.precision``), and widen κ's intervals. Spectra are always computed in float64.
    rtol
        Relative width of κ's interval that is good enough; 1e-6 is faster.
    memory
        Bytes that captures, Hessians and the work on them may take beyond a pass of the model itself: a number, or a
        size such as ``"2 GB"`` or ``"500 MB"``; None: half of what the model's accelerator reports as free, 4 GB on the
        host.
    reduction
        For a stream, whether the loss is a ``"mean"`` over the samples of a batch (for a loss of torch: over its
        divisor) or their ``"sum"``; None: it is inferred from parts of the batches, or an error.
    weight
        For a stream, weight w_k of a batch in the loss Σ w_k L_k / Σ w_k of the whole, if it cannot be inferred: a
        function of its inputs and target, or one number for each batch.
    group
        Processes of `torch.distributed` that all call this, each with its share of the data, which every one measures
        all of; None: those of a ``DistributedDataParallel`` model, if it is one.
    check
        Whether each Hessian is compared with the double-backward product of the model itself, in a random direction for
        every layer, and that product with central differences of the model's gradient: ``result["fc2"].check`` has both
        differences. A layer that does not agree with the product is measured by double backward in the parameters, or
        refused. If second derivatives are not those of the gradient, as with an `autograd.Function` whose backward
        keeps an intermediate, the layer is measured by differences of gradients, or is in ``skipped``, or refused if it
        was named. If the product is round-off, κ
        is unresolved, or H is zero (``kappa.is_zero``). The check takes up to three gradients per layer, and three for
        all layers together.
    products
        At level ``"network"``: number of products with the Hessian, of about one and a half gradients each, that λ_max
        and κ may take, for models of millions of parameters. κ is then bounded from below (`hesscond.spectra.bounded`)
        unless this number of products forms the matrix; ``result["network"].top`` is λ_max. With ``dtype=None`` the
        products are those of a float32 model, whose rounding widens the bounds. At level ``"layer"`` 24 products bound
        a layer that is known by products and too large to be formed.
    progress
        Function that receives the progress of the layers' second derivatives, first when all are planned: an object
        with ``layer``, ``share``, ``elapsed`` and ``left`` (s), ``seconds`` for each layer, and ``stop()``, after which
        the layers that are complete are the result and ``skipped`` names the others. Layers that are measured by
        products, or by one backward pass for all layers, are not reported. None: in a terminal or a notebook, a line
        on standard error where they, or the products that κ takes, last more than five seconds.

    Raises
    ------
    ConfigError
        Unknown layer, parameter, part, unit, level or method; a glob that matches nothing; a parameter that requires no
        gradient; groups that overlap; an empty batch, or one on another device than the model.
    CaptureError
        A layer that cannot be captured exactly, or whose Hessian does not agree with the model's own derivatives; NaN
        in its activations; too little memory.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> batch = torch.randn(20, 5), torch.randint(0, 3, (20,))
    >>> result = probe(model, nn.CrossEntropyLoss(), batch)
    >>> kappa = result["2"].kappa[0]
    >>> kappa.resolved, kappa.rank, kappa.nullity
    (True, 5, 0)
    >>> result["2"].hessian(unit=0).shape
    torch.Size([5, 5])
    >>> whole = probe(model, nn.CrossEntropyLoss(), batch, level="layer")
    >>> whole["0"].kappa.rank, whole["0"].n_params
    (24, 24)
    >>> biases = probe(model, nn.CrossEntropyLoss(), batch, level="layer", blocks={"biases": ["0.bias", "2.bias"]})
    >>> biases["biases"].kappa.nullity
    1
    """
    loss_fn = wrappers.checked_loss(model, loss_fn)
    together = wrappers.group_of(model, group)
    model = wrappers.measurable(model)
    if together is not None:
        data, weight = gathered(together, model, data, weight)
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        layers = list(layers)
    outside = references.parameters_outside(model, loss_fn)
    if outside:
        groups = [layers or (), *(blocks.values() if isinstance(blocks, Mapping) else ())]
        named = any(name in outside for group in groups for name in ([group] if isinstance(group, str) else group))
        if named or not any(p.requires_grad for p in model.parameters()):
            model, outside = references.holding(model, outside), {}
    size = bytes_of(memory)
    quick = units is layers is blocks is None and level == "unit" and is_batch(data)
    question = Question(
        model=model,
        loss_fn=loss_fn,
        data=data,
        choice=catalogue.Choice.of(model, layers, blocks, checked_level(level)),
        level=level,
        method=method,
        units=checked_units(units, layers, level, model),
        dtype=dtype,
        rtol=rtol,
        memory=default_memory(model.parameters()) if size is None else int(size),
        reduction=reduction,
        weight=weight,
        check=check,
        products=products,
        progress=recorded(progress, PATIENCE if quick else math.inf),
    )
    # leaving inference mode also turns on the threads of backward passes
    plain = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with plain, derivatives_explained(model):
        work = applied(question)
        result = work.renamed(network_result(work.question) if level == "network" else layer_results(work.question))
        if progress is None and is_attended():
            for layer in result.values():
                layer.watch = products_line
        if outside and layers is None and blocks is None and not isinstance(data, Iterator):
            whole = replace(question, model=references.holding(model, outside))
            result.skipped |= {name: OUTSIDE.format(name) for name in outside if name in reached(whole)[0]}
        return result


def gathered(
    group: ProcessGroup, model: nn.Module, data: Any, weight: BatchWeight | None
) -> tuple[list[Any], BatchWeight | None]:
    """Batches of all processes, and their weights; a ConfigError if the processes have different parameters."""
    local_batches = list([data] if is_batch(data) else data)
    device = next((tensor.device for tensor in tensors_of(local_batches)), None)
    fingerprint = hashlib.sha256()
    for parameter in model.parameters():
        fingerprint.update(parameter.detach().to("cpu", torch.float64).numpy().tobytes())
    given = None if weight is None or callable(weight) else list(weight)
    # from one accelerator to another, tensors go by way of the host
    share = moved(local_batches, torch.device("cpu")), given, fingerprint.digest()
    received: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(received, share, group=group)
    shares, weights, fingerprints = zip(*received, strict=True)
    if len(set(fingerprints)) > 1:
        raise ConfigError(
            "the processes have different parameters: make the model with the same random seed in each, or load it"
        )
    all_batches = moved([batch for part in shares for batch in part], device)
    return all_batches, weight if given is None else [number for part in weights for number in part]


@contextmanager
def derivatives_explained(model: nn.Module) -> Iterator[None]:
    """Context that raises a CaptureError where the model or torch's derivatives are to blame, or where memory ends."""
    try:
        with warnings.catch_warnings():
            # a second call of a hook does no harm
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    except NotFiniteError:
        if bad := without_numbers(model):
            raise NotFiniteError(f"the model has NaN or infinite entries in {', '.join(bad[:4])}") from None
        raise
    except HesscondError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise CaptureError(
                f"memory ended ({first_sentence(error)}): give a smaller memory=, name fewer layers= or units=, or "
                "take a smaller batch"
            ) from error
        frames = traceback.extract_tb(error.__traceback__)
        torch_folder, package = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
        called = {frames[i + 1].name for i, frame in enumerate(frames[:-1]) if frame.filename == function.__file__}
        if called & {"backward", "vjp"}:
            raise CaptureError(
                f"the backward of an autograd.Function of the model or the loss raises {one_line(error)} "
                f"({Path(frames[-1].filename).name}:{frames[-1].lineno})"
            ) from error
        derivative = "torch/autograd/" in frames[-1].filename or "needed for gradient computation" in str(error)
        ours = all(frame.filename.startswith((torch_folder, package)) for frame in frames)
        if not (isinstance(error, RuntimeError) and derivative and ours):
            raise
        raise CaptureError(
            f"torch cannot differentiate the model or the loss: {first_sentence(error)}; "
            "a backward pass of yours under torch.autograd.set_detect_anomaly(True) names the operation"
        ) from error


def first_sentence(error: BaseException) -> str:
    """First sentence of an exception's message."""
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")


def without_numbers(model: nn.Module) -> list[str]:
    """Names of parameters and buffers with NaN, and of parameters with infinite entries."""
    bad = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    # an infinite buffer may be a mask
    return bad + [name for name, buffer in model.named_buffers() if bool(buffer.isnan().any())]


def recorded(progress: Any, limit: float) -> ProgressRecord:
    """Record for a function that receives progress, or for a line if somebody sees it."""
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be a function of a hesscond.capture.ProbeProgress, not {progress!r}")
    line = ProgressLine() if progress is None and is_attended() else progress
    return ProgressRecord(line, limit=limit, least=SILENT if progress is None else 0.0)


def checked_units(units: Any, layers: object, level: str, model: nn.Module) -> tuple[int, ...] | None:
    """Units as integers, also if they are numbers of numpy or torch, None for all; an error where they mean nothing."""
    if units is None or (isinstance(units, str) and units == "all"):
        return None
    if layers is None or level != "unit":
        example = [*list(catalogue.Catalogue(model).natural)[-1:], "fc"][0]
        raise ConfigError(
            f"units were given without layers: name the layers they belong to, as in layers=[{example!r}]"
            if layers is None
            else f"units were given at level {level!r}, which takes all of them: use level='unit'"
        )
    try:
        return tuple(map(index, units))
    except TypeError:
        raise ConfigError(f"units must be whole numbers, as units=[0, 3], not {units!r}") from None


def is_attended() -> bool:
    """Whether somebody sees the standard error stream: it is a terminal, or a notebook runs this."""
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


class ProgressLine:
    """Progress of the second derivatives in one line, which is wiped in the end; nothing if they take seconds."""

    def __init__(self) -> None:
        self._width, self._said = 0, ""

    def __call__(self, progress: ProbeProgress) -> None:
        if not self._width and progress.elapsed + progress.left < SILENT:
            return
        if progress.reason != self._said:
            self._said = progress.reason
            self.show("")
            sys.stderr.write(f"{duration(progress.left)} of second derivatives, {progress.reason}\n")
        layer = progress.layer and f" of {progress.layer}"
        done = progress.share == 1
        self.show("" if done else f"second derivatives{layer}: {progress.share:.0%}, {duration(progress.left)} left")

    def show(self, text: str) -> None:
        """Write the line in place of what it was."""
        end = "" if text else "\r"
        sys.stderr.write(f"\r{text.ljust(self._width)}{end}")
        sys.stderr.flush()
        self._width = len(text)


@contextmanager
def products_line(what: str) -> Iterator[None]:
    """Context in which a line counts products with a Hessian, once they take seconds."""
    line, began, count = ProgressLine(), time.perf_counter(), 0

    def counted(increment: int) -> None:
        nonlocal count
        count += increment
        elapsed = time.perf_counter() - began
        if elapsed > SILENT:
            line.show(f"{what}: {count:,} products with the Hessian in {duration(elapsed)}")

    try:
        with network_operator.observed(counted):
            yield
    finally:
        if count and time.perf_counter() - began > SILENT:
            line.show("")

"""Evaluation of a model and its loss on copies, without side effects."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from hesscond.errors import CaptureError, ConfigError, HesscondError, one_line, out_of_memory
from hesscond.problem import precision
from hesscond.problem.containers import attributes, kind, mapped, tensors_of
from hesscond.problem.formulas import FORMULAS
from hesscond.problem.graph import is_transformed
from hesscond.problem.references import Reentry, References
from hesscond.problem.untouched import untouched
from hesscond.problem.wrappers import plainly

#: A pair (inputs, target), or one value that holds both: a mapping, a record, an object with tensors.
Batch = Any
#: Prefixes of functions that give equal values for different entries without rounding, or combine or move entries.
FLAT = (
    *("get", "relu", "leaky_relu", "rrelu", "prelu", "threshold", "hard", "softshrink", "clamp", "clip", "abs", "sign"),
    *("sgn", "max", "min", "fmax", "fmin", "mul", "rmul", "dropout", "alpha_dropout", "feature_", "where", "masked_"),
    *("round", "floor", "ceil", "trunc", "fix", "pow", "rpow", "square", "linear", "matmul", "rmatmul", "mm", "bmm"),
    *("conv", "einsum", "cum", "sort", "roll", "flip", "index", "scatter", "gather", "zeros", "nan_to_num", "to"),
    *("normalize", "scaled_dot", "remainder", "fmod", "mod", "floordiv", "heaviside", "detach", "clone", "contiguous"),
    *("float", "double", "type", "requires_grad", "ones", "gumbel", "full", "new_", "rand", "bernoulli", "poisson"),
    *("transpose", "permute", "swap", "move", "adjoint", "rot90", "tri", "cholesky", "linalg", "inverse"),
)
#: Functions of |x|.
EVEN = frozenset({"cos", "cosh", "sinc"})
#: Functions that round to their argument where it is small.
IDENTITY_AT_ZERO = frozenset(
    {"sin", "tan", "asin", "arcsin", "atan", "arctan", "sinh", "tanh", "asinh", "arcsinh", "atanh", "arctanh"}
    | {"expm1", "log1p", "softsign"}
)
#: Refusal of inputs without tensors.
NO_TENSORS = (
    "the inputs of the batch must be tensors, or contain some, not {}: torch.as_tensor makes them of arrays and numbers"
)
#: Names of the target in a batch that is one value.
LABELS = ("labels", "label", "y", "target", "targets")
#: Annotation of an argument that is a list or a tuple itself.
LISTS = re.compile(r"^'?(typing\.|collections\.abc\.|<class ')?(list|tuple|sequence|iterable)\b", re.IGNORECASE)
#: Types that may be mixed if a model keeps tensors besides its parameters and buffers.
NUMBERS = {*precision.WIDER, *precision.WIDER.values()}
LossFunction = Callable[[Any, Any], torch.Tensor]
#: Lookups, with the positions of the arguments that make the gradient differ from the derivative (divided by the counts
#: of the rows), or not differentiable again (sparse).
LOOKUPS: dict[Callable[..., Any], tuple[int, ...]] = {
    functional.embedding: (5, 6),
    torch.embedding: (3, 4),
    torch.embedding_bag: (3, 5),
}


@dataclass(frozen=True)
class Evaluation:
    """Value of a loss with its graph."""

    loss: torch.Tensor
    output: Any
    target: Any
    samples: int  # N, see `samples_of`; the leading dimension of the target if there is no row for each of those
    # index of the first function in which rounding made different numbers equal, as tanh of large ones; None: none
    flattened: int | None


def evaluate(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Any, Any],
    state: Mapping[str, torch.Tensor],
    *,
    copies: Mapping[int, torch.Tensor],
    dtype: torch.dtype | None,
    watch: WeightWatch,
    counted: precision.Operations | None = None,
) -> Evaluation:
    """Run the model and the loss with its tensors replaced by those of ``state``, without side effects."""
    inputs, target = batch
    args, kwargs = call_of(model, converted(inputs, dtype, copy=True))
    target = converted(target, dtype, copy=True)
    usual = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(untouched(model, loss_fn))
        stack.enter_context(plainly(model))
        stack.enter_context(explained(model, loss_fn, batch, dtype))
        references = References(model, loss_fn)
        stack.enter_context(references.replaced(references.outside(dtype) | dict(copies)))
        # tensors made without a dtype get the precision of the parameters
        stack.callback(torch.set_default_dtype, usual)
        torch.set_default_dtype(usual if dtype is None else dtype)
        stack.enter_context(torch.enable_grad())
        # the other backends have no second derivatives
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if counted is not None:
            stack.enter_context(counted)
        watch.lifts = dtype == torch.float64
        watch.clones = any(p.is_floating_point() and p.dtype is not torch.float32 for p in model.parameters())
        watch.draws = usual if watch.lifts and not watch.clones else None
        watch.usual = usual
        stack.enter_context(watch)
        both = ModelAndLoss(model, loss_fn, dtype)
        replaced = {f"model.{name}": tensor for name, tensor in state.items()}
        output, loss = torch.func.functional_call(both, replaced, (args, kwargs, target), tie_weights=False)
    if isinstance(loss, torch.Tensor):
        Reentry(model, loss_fn, {id(t): state[key] for key, t in tensors_by_module(model).items()}).watch(loss)
    if counted is not None:
        counted.lifted += watch.lifted
    samples = samples_of(model, inputs)
    sizes = [len(tensor) for tensor in tensors_of((target, output)) if tensor.ndim]
    if sizes and all(size % samples for size in sizes):
        # nodes in, graphs out
        samples = sizes[0]
    return Evaluation(loss, output, target, samples, watch.flattened())


class ModelAndLoss(nn.Module):
    """Model and loss as one module, so that replaced parameters of the model are replaced in the loss too."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        # within a tuple, the loss is no submodule: its tensors are not replaced
        self._loss = (loss_fn, dtype)

    def forward(self, args: Any, kwargs: dict[str, Any], target: Any) -> tuple[Any, Any]:
        """Output and loss."""
        output = self.model(*args, **kwargs)
        try:
            return output, in_precision(*self._loss, self.model)(output, target)
        except Exception as error:
            if target is not None:
                raise
            raise ConfigError(
                f"the batch has no target (its {', '.join(LABELS)}, or the second of a pair), and the loss does not "
                f"take None ({type(error).__name__}): give a pair (inputs, targets), or a loss of the output alone"
            ) from error


@contextmanager
def explained(model: nn.Module, loss_fn: LossFunction, batch: Batch, dtype: torch.dtype | None) -> Iterator[None]:
    """Context that says where the model or the loss fails, and whether only on copies of parameters or in ``dtype``."""
    try:
        yield
    except HesscondError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        if not runs(model, loss_fn, batch):
            if unusual := bound(model, batch[0])[2]:
                raise ConfigError(f"{unusual}, and as one argument they raise {one_line(error)}") from error
            error.add_note(f"({place_of(error, model)})")
            raise
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise CaptureError(
            "the model and its loss run as they are, but not on copies of the parameters"
            + ("" if dtype is None else f" in {precision.named(dtype)}")
            + f" ({type(error).__name__}: {first}; {place_of(error, model)})"
            + ("" if dtype is None else "; dtype=None leaves the precision as it is")
        ) from error


def place_of(error: BaseException, model: nn.Module) -> str:
    """Innermost module of a model, or the loss, that raised an exception, in words."""
    names = {id(module): name for name, module in model.named_modules()}
    place = "in the loss"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (path := names.get(id(frame.f_locals.get("self")))) is not None:
            place = f"in module {path!r}" if path else "in the model's own forward"
    return place


def runs(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> bool:
    """Whether the unchanged model and its loss accept the batch."""
    inputs, target = converted(batch[0], None, copy=True), converted(batch[1], None, copy=True)
    args, kwargs = call_of(model, inputs)
    with untouched(model, loss_fn), plainly(model), suppress(Exception):
        loss_fn(model(*args, **kwargs), target)
        return True
    return False


def call_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model, as `bound` finds them."""
    return bound(model, inputs)[:2]


def bound(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Positional and keyword arguments of a model, and why they are not the usual ones, which its forward rejects.

    Usually a tuple or list is unpacked, a mapping gives keywords, without labels that the model does not take, and
    anything else is one argument. Otherwise all is one argument, or attributes are by the names of the arguments.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # not written in Python: nothing to look at
        signature = inspect.signature(lambda *args, **kwargs: None)
    if inputs is None and any(p.default is p.empty for p in signature.parameters.values()):
        raise ConfigError(NO_TENSORS.format("None"))
    reason = ""
    for args, kwargs in ways_to_call(signature.parameters, inputs):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            reason = reason or f"the model's forward{signature} does not take the inputs of the batch ({error})"
        else:
            return args, kwargs, reason
    raise ConfigError(f"{reason}: give a tuple of its positional or a mapping of its keyword arguments")


def ways_to_call(
    parameters: Mapping[str, inspect.Parameter], inputs: Any
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield positional and keyword arguments that a model with these parameters may want, the likeliest first."""
    whole: tuple[tuple[Any, ...], dict[str, Any]] = (inputs,), {}
    first = next(iter(parameters.values()), None)
    if isinstance(inputs, Mapping):
        open_ = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        taken = {name: item for name, item in inputs.items() if open_ or name in parameters or name not in LABELS}
        ways = [((), taken), *([whole] if first is not None and first.name not in inputs else [])]
        # a tensor dict is an object of its own
        yield from ways if isinstance(inputs, (dict, UserDict)) else ways[::-1]
    elif isinstance(inputs, (tuple, list)):
        alone = not {*getattr(inputs, "_fields", ())} <= parameters.keys()
        if first is not None and LISTS.search(str(first.annotation)):
            alone = alone or not any(isinstance(item, (tuple, list)) for item in inputs)
        yield from ([whole] if alone else []) + [(tuple(inputs), {}), whole]
    else:
        yield whole
        if not isinstance(inputs, torch.Tensor):
            fields = {name: getattr(inputs, name, None) for name in parameters}
            yield (), {name: value for name, value in fields.items() if value is not None}


def scalar(loss: object) -> torch.Tensor:
    """Loss as a tensor without dimensions; raise a CaptureError if it is no scalar."""
    if isinstance(loss, torch.Tensor) and loss.is_complex():
        raise CaptureError("the loss is complex, and a Hessian is one of a real number: take its real part or modulus")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        tensor = isinstance(loss, torch.Tensor)
        advice = f"of shape {tuple(loss.shape)}: use" if tensor else f"{kind(loss)}: return it, with"  # type: ignore[attr-defined]
        raise CaptureError(f"the loss must be a scalar tensor, not {advice} reduction 'mean' or 'sum'")
    return loss.reshape(())


class WeightWatch(TorchFunctionMode):
    """Mode that notes uses of a layer's weight or bias outside the layer's forward pass, and lifts casts on request."""

    #: Attributes that return the values in another form; other attributes only describe the tensor.
    VALUES = frozenset({"T", "mT", "H", "mH", "data", "real"})
    HARMLESS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "__hash__"})

    def __init__(self, weights: Mapping[int, str], flattening: bool = False) -> None:
        super().__init__()
        self.weights, self.flattening = weights, flattening
        self.inside: list[str] = []
        self.used_outside: set[int] = set()
        #: outputs and inputs of derivatives taken with their graph
        self.derivatives: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        #: whether casts to float32 become casts to float64, whether these copy (as casts do unless the model is in
        #: float32), and their number
        self.lifts, self.clones, self.lifted = False, False, 0
        #: type of the model's tensors, if they have one throughout, and of those made without one: in these the model
        #: draws its random numbers, others would be other numbers
        self.draws: torch.dtype | None = None
        self.usual = torch.get_default_dtype()
        #: for each elementwise function called, a Boolean tensor: whether rounding made different numbers equal
        self.flat: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.note_uses(func, args, kwargs)
        if func is torch.autograd.grad and (kwargs.get("create_graph") or True in args[4:5]):
            named = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
            outputs, inputs = (list(tensors_of(named[key])) for key in ("outputs", "inputs"))
            # tensors inside torch.func do not exist outside
            if not any(map(is_transformed, outputs)):
                self.derivatives.append((outputs, inputs))
        if func in LOOKUPS:
            args = tuple(False if i in LOOKUPS[func] else value for i, value in enumerate(args))
            kwargs = {key: value for key, value in kwargs.items() if key not in ("scale_grad_by_freq", "sparse")}
        if func in FORMULAS:
            result = FORMULAS[func](*args, **kwargs)
        else:
            with precision.Masks.around(func, args):
                result = self.in_float64(func, args, kwargs) if self.lifts else func(*args, **kwargs)
        if self.flattening and (flat := flattens(func, args, result)) is not None:
            self.flat.append(flat)
        return result

    def note_uses(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the watched tensors among the arguments of a function that is called outside of their layers."""
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                name = self.weights.get(id(item))
                if name is not None and name not in self.inside and not self.reads_metadata(func):
                    self.used_outside.add(id(item))

    def flattened(self) -> int | None:
        """Index of the first function that made different numbers equal; None: there is none."""
        if not self.flat:
            return None
        flags = torch.stack([flat.to(self.flat[0].device) for flat in self.flat]).tolist()
        return flags.index(True) if True in flags else None

    def in_float64(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function without casts to float32, widening float32 tensors that the model keeps where types clash."""
        if (drawn := precision.drawn_in(self.draws, func, args, kwargs)) is not None:
            return drawn
        # moments in tensors have a type of their own
        plain = func in precision.DRAWS and not kwargs.keys() & {"out", "dtype"}
        if plain and not (func is torch.normal and any(isinstance(x, torch.Tensor) for x in (*args, *kwargs.values()))):
            dtype = self.draws if func in precision.DRAWS_LIKE else self.usual
            kwargs = {**kwargs, "dtype": dtype} if dtype in precision.WIDER else kwargs
        wide = precision.lifted(func, args, kwargs)
        if wide is not None:
            self.lifted += 1
            func, args, kwargs = wide
            result = func(*args, **kwargs)
            # the copy that the cast would have made may be written to
            return result.clone() if self.clones and args and result is args[0] else result
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if len({tensor.dtype for tensor in tensors_of((tuple(args), kwargs))} & NUMBERS) < 2:
                raise
            # the argument that an operation writes to stays
            kept = 1 if writes(func) else 0
            wider = (*args[:kept], *mapped(tuple(args[kept:]), widened))
            with suppress(RuntimeError):
                return func(*wider, **mapped(kwargs, widened))
            raise

    def reads_metadata(self, func: Any) -> bool:
        """Whether ``func`` reads only the shape, type or device of a tensor."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return getattr(func.__self__, "__name__", "") not in self.VALUES
        return name in self.HARMLESS or name.startswith("is_")


def flattens(func: Any, args: Any, result: Any) -> torch.Tensor | None:
    """Whether an elementwise function gives its largest or smallest value, or zero, for different entries.

    It is also true for one value of all samples of a feature that varies, or a feature that is returned unchanged
    because it is small. None: the function is not elementwise, or may do so without rounding.
    """
    x: Any = args[0] if args else None
    name = getattr(func, "__name__", "").strip("_")
    # sums of whole numbers may be equal
    whole = name in {"add", "radd", "sub", "rsub"} and any(isinstance(y, torch.Tensor) and y.ndim for y in args[1:])
    if name.startswith(FLAT) or name == "t" or whole or not are_entries(x, result):
        return None
    x, y = x.detach().abs() if name in EVEN else x.detach(), result.detach()
    flags = []
    # scores that a mask shifts vanish on purpose, and the probability of a single score is 1
    hidden = (
        (x <= precision.SHIFTED) | ((x > precision.SHIFTED).sum(-1, keepdim=True) == 1)
        if name.endswith("softmax")
        else None
    )
    if x.ndim > 1:
        inside = (y[0] > precision.SHIFTED) & (y[0] < precision.MASKED)
        constant = (y == y[:1]).all(0) & differ(x, x[:1]).any(0) & inside
        flags.append((constant if hidden is None else constant & ~hidden.all(0)).any())
        if name in IDENTITY_AT_ZERO:
            flags.append(((x == y).all(0) & (x != 0).any(0)).any())
    x, y = x.flatten(), y.flatten()
    # nothing here waits for the device
    for edge in (y.amin(), y.amax(), 0.0):
        equal = (y == edge) & (y > precision.SHIFTED) & (y < precision.MASKED)
        if hidden is not None:
            equal &= ~hidden.flatten()
        flags.append((equal & differ(x, x.index_select(0, equal.to(torch.uint8).argmax(0, keepdim=True)))).any())
    return torch.stack(flags).any()


def differ(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether entries differ by more than rounding: repeated rows go through operations in different orders."""
    return ~torch.isclose(x, other, rtol=16 * torch.finfo(x.dtype).eps, atol=0.0)


def are_entries(x: Any, result: Any) -> bool:
    """Whether a result may be a function of each entry of x, in a tensor of its own."""
    if not (isinstance(x, torch.Tensor) and isinstance(result, torch.Tensor) and x.shape == result.shape):
        return False
    floating = x.is_floating_point() and result.is_floating_point()
    return floating and result.numel() > 1 and x is not result and not is_transformed(result)


def tensors_by_module(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, once per module (torch 2.13 leaves copies behind in a module with two names)."""
    return {
        f"{name}.{attribute}" if name else attribute: tensor
        for name, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for attribute, tensor in tensors.items()
        if tensor is not None
    }


def writes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor with float32 cast to float64, complex64 to complex128, and other types unchanged."""
    return tensor.to(precision.WIDER.get(tensor.dtype, tensor.dtype))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite: a finite sum implies it, otherwise all entries are checked."""
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())


def checked_batch(batch: Batch) -> tuple[Any, Any]:
    """Pair (inputs, target) of a batch, or a ConfigError if it has no samples or tensors.

    A mapping, a dataclass, a named tuple of more or fewer than two, or an object with tensors is the inputs itself, and
    its item `LABELS` the target, or None.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, target = batch
    elif isinstance(batch, Mapping) or hasattr(batch, "_fields") or attributes(batch):
        inputs, target = batch, labels_of(batch)
    else:
        raise ConfigError(
            f"the batch must be a pair (inputs, targets), or a mapping or an object with both, not {kind(batch)}"
        )
    if target is None and isinstance(inputs, Mapping):
        target = labels_of(inputs)
    tensors = list(tensors_of(inputs))
    # a model without inputs is a density of the targets
    if not tensors and inputs is not None:
        raise ConfigError(NO_TENSORS.format(kind(inputs)))
    if any(tensor.is_nested for tensor in tensors):
        raise ConfigError(
            "the inputs of the batch have a nested tensor, of whose operations torch lacks second derivatives: give a "
            "PackedSequence, a list of tensors, or a padded tensor with a mask"
        )
    sizes = [len(tensor) for tensor in tensors if tensor.ndim]
    if sizes and not any(sizes if isinstance(inputs, list) else sizes[:1]):
        raise ConfigError("the batch is empty: it needs at least one sample")
    return inputs, target


def labels_of(value: Any) -> Any:
    """Target among the items, fields or attributes of a batch; None: there is none."""
    for name in LABELS:
        target = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if target is not None:
            return target
    return None


def samples_of(model: nn.Module, inputs: Any) -> int:
    """Number N of samples in the inputs of a model: the items of a list, else the leading dimension of a tensor."""
    return counted_in(model, inputs)[0]


def counted_in(model: nn.Module, inputs: Any) -> tuple[int, str]:
    """Number of samples in the inputs of a model, and what they are if not the rows of a tensor."""
    args, kwargs = call_of(model, inputs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and any(True for _ in tensors_of(value)):
            return len(value), "items of a list"
        size, samples = next((len(t) for t in tensors_of(value) if t.ndim), 0), "rows of the first tensor"
        if isinstance(value, PackedSequence):
            size, samples = int(value.batch_sizes[0]), "sequences"
        if size:
            return size, f"{samples} of {kind(value)}" if hasattr(value, "_fields") or attributes(value) else ""
    return 1, "no input has a dimension"


def converted(value: Any, dtype: torch.dtype | None, *, copy: bool = False) -> Any:
    """Cast floating tensors to ``dtype`` (None: no cast), also in nested containers; leave the rest unchanged."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # a tensor made in inference mode cannot be differentiated through
        copied = copy or tensor.is_inference()
        if dtype is not None and tensor.is_floating_point():
            return tensor.to(dtype, copy=copied)
        return tensor.clone() if copied else tensor

    return mapped(value, cast)


def in_precision(loss_fn: LossFunction, dtype: torch.dtype | None, model: nn.Module | None = None) -> LossFunction:
    """Loss function; of a module, the tensors (class weights) that ``model`` lacks are cast to ``dtype``."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    others = set() if model is None else set(map(id, tensors_by_module(model).values()))
    state = {
        name: converted(tensor.detach(), dtype)
        for name, tensor in tensors_by_module(loss_fn).items()
        if id(tensor) not in others
    }
    return lambda output, target: torch.func.functional_call(loss_fn, state, (output, target), tie_weights=False)

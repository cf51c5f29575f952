"""Operations of a model, observed: lifted casts, lost digits, and scores of a softmax that the model hides."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hesscond.errors import counted
from hesscond.problem.containers import tensors_of
from hesscond.problem.references import ran_again

#: Least number of random factors of `Perturbed`, largest number that is used at a time, and a prime that their places
#: differ by.
LEAST, MOST, STRIDE = 2**16, 2**20, 7_368_787
#: Operations that move, choose or make numbers without rounding, apart from views.
EXACT = {
    getattr(torch.ops.aten, name)
    for name in (
        *("alias", "detach", "clone", "cat", "stack", "index", "index_select", "index_put", "index_put_", "gather"),
        *("where", "flip", "roll", "repeat", "constant_pad_nd", "triu", "tril", "sort", "topk", "max", "min", "amax"),
        *("amin", "neg", "abs", "relu", "clamp", "sign", "empty", "empty_like", "new_empty", "empty_strided"),
        *("new_empty_strided", "zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "uniform_", "normal_", "bernoulli"),
        "bernoulli_",
    )
}
#: Operations that would find equal numbers unequal if these were perturbed.
COMPARISONS = {getattr(torch.ops.aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "sgn")}
#: Position of the copied argument of a copy: a copy into a type with at least as many digits does not round.
COPIES = {torch.ops.aten._to_copy: 0, torch.ops.aten.copy_: 1}
#: Functions that take a dtype to reinterpret bits as numbers of that type.
BITS = frozenset({torch.Tensor.view, torch.frombuffer})
#: Functions that draw random numbers of the type that is asked for: else of the default type, or that of a tensor.
DRAWS = frozenset({torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal})
DRAWS_LIKE = frozenset({torch.rand_like, torch.randn_like})
#: Methods that draw into a tensor, of its type, and functions that set entries or channels to zero at random.
DRAWS_INTO = frozenset(getattr(torch.Tensor, f"{name}_") for name in ("bernoulli", "uniform", "normal", "exponential"))
DROPOUTS = frozenset(
    {torch.dropout, functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d}
)
#: Types that lifted casts convert to.
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
TO_OTHER = frozenset({torch.Tensor.to, torch.Tensor.type_as})
Found = TypeVar("Found")
NAMES_OF_FLOAT32 = ("torch.FloatTensor", torch.FloatTensor)


@dataclass(frozen=True)
class Precision:
    """Precision of a forward pass and its loss. As text: ``float64``, or ``mixed: 326 float32 operations (…)``."""

    dtype: torch.dtype  # that was asked for, or the type with the most digits that occurred
    # numbers of operations that rounded to fewer digits, the narrowest type first
    narrower: tuple[tuple[torch.dtype, int], ...] = ()
    where: tuple[str, ...] = ()  # classes of the modules of these operations, the most frequent first
    lifted: int = 0  # number of casts to float32 that were lifted

    @property
    def narrowest(self) -> torch.dtype | None:
        """Type with the fewest digits that a number was rounded to; None: no type has fewer digits than asked for."""
        return self.narrower[0][0] if self.narrower else None

    def __str__(self) -> str:
        lifted = f"{counted(self.lifted, 'cast')} to float32 lifted" if self.lifted else ""
        if not self.narrower:
            return f"{named(self.dtype)} ({lifted})" if lifted else named(self.dtype)
        counts = ", ".join(f"{count} {named(dtype)}" for dtype, count in self.narrower)
        shown = ", ".join((*self.where[:3], *(["…"] if len(self.where) > 3 else [])))
        single = sum(count for _, count in self.narrower) == 1
        return f"mixed: {counts} operation{'' if single else 's'} ({shown})" + (f", {lifted}" if lifted else "")


class Observer(TorchDispatchMode):
    """Dispatch mode that does not import torch's compiler, which takes a second and which `plainly` runs without."""

    # those of torch.cond, scan and while_loop
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @staticmethod
    def call(func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation."""
        return func(*map(materialized, args), **(kwargs or {}))


def materialized(value: Any) -> Any:
    """Value with memory for tensors of zeros that have none, of forward over reverse mode: modes crash on these."""
    if isinstance(value, torch.Tensor):
        whole = not value._is_zerotensor()
        return value if whole else torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return list(map(materialized, value)) if isinstance(value, list) else value


class Perturbed(Observer):
    """Dispatch mode that perturbs every number that an operation reads at random by about a unit of round-off."""

    def __init__(self, seed: int, careful: bool) -> None:
        super().__init__()
        self.seed, self.careful = seed, careful
        self.factors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not rounds(func) or ran_again():
            return self.call(func, args, kwargs)
        result = func(*map(self.perturbed, args), **(kwargs or {}))
        if func.overloadpacket in SUBTRACTING:
            # 1 − p and the like, formed within, are off by a unit of what they are subtracted from
            size = args[0] if func.overloadpacket in AROUND_ONE else args[0] * args[1]
            result = result + (self.perturbed(size) - size)
        return result

    def perturbed(self, x: Any) -> Any:
        """Tensor with perturbed last digits."""
        x = materialized(x)
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.is_meta or x.layout != torch.strided:
            return x
        if x.numel() <= MOST:
            noisy = x * self.drawn(x, x.numel()).view(x.shape)
        else:
            noisy = x.clone(memory_format=torch.contiguous_format)
            for part in noisy.view(-1).split(MOST):
                part.mul_(self.drawn(x, len(part)))
        # the largest double, which stands for infinity in torch and in masks, may overflow
        return torch.where(noisy.isinf(), x, noisy) if self.careful else noisy

    def drawn(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Random factors with the dtype and device of a tensor."""
        self.seed += 1
        factors = self.factors.get((like.device, like.dtype))
        if factors is None or factors.numel() < 2 * count:
            generator = torch.Generator(like.device).manual_seed(self.seed)
            share = torch.rand(max(LEAST, 3 * count), generator=generator, device=like.device, dtype=like.dtype)
            factors = share.mul_(4).sub_(2).mul_(torch.finfo(like.dtype).eps).add_(1)
            self.factors[like.device, like.dtype] = factors
        # a part for each number of the mode: drawing new ones would take longer than the operations themselves
        start = self.seed * STRIDE % (factors.numel() - count + 1)
        return factors[start : start + count]


#: Derivatives whose kernels subtract within: g (1 − t²), g − p Σ g; and g s (1 − s), p (g − Σ p g), of a factor s or p.
AROUND_ONE = {torch.ops.aten.tanh_backward, torch.ops.aten._log_softmax_backward_data}
SUBTRACTING = AROUND_ONE | {torch.ops.aten.sigmoid_backward, torch.ops.aten._softmax_backward_data}


@cache
def rounds(operation: Any) -> bool:
    """Whether an operation may round: it does not only copy numbers, and would not find equal numbers unequal."""
    if not isinstance(operation, OpOverload):
        return False
    return not (operation.is_view or operation._schema.is_mutable or operation.overloadpacket in EXACT | COMPARISONS)


def perturbed(seed: int, derivatives: Callable[[], Found]) -> Found:
    """Derivatives from numbers that are perturbed as by `Perturbed`, once more where the largest double overflows."""
    for careful in (False, True):
        with Perturbed(seed, careful):
            result = derivatives()
        if all(bool(tensor.isfinite().all()) for tensor in tensors_of(result)):
            break
    return result


class Operations(Observer):
    """Dispatch mode that counts the operations that round, by the type of their result and by module."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.lifted = dtype, 0
        self.seen: Counter[torch.dtype] = Counter()
        self.places: Counter[tuple[torch.dtype, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = self.call(func, args, kwargs)
        if isinstance(func, OpOverload) and not func.is_view and func.overloadpacket not in EXACT:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                    self.count(tensor.dtype.to_real(), func, args)
                    break
        return output

    def count(self, dtype: torch.dtype, func: Any, args: Any) -> None:
        """Count one operation, unless it only converts its input to a type with at least as many digits."""
        source = COPIES.get(func.overloadpacket)
        if source is not None and (before := args[source].dtype).is_floating_point and digits(before) <= digits(dtype):
            return
        self.seen[dtype] += 1
        if self.dtype is None or digits(dtype) < digits(self.dtype):
            self.places[dtype, innermost_module()] += 1

    def precision(self) -> Precision:
        """Precision of the operations so far."""
        asked = self.dtype or max(self.seen, key=digits, default=torch.get_default_dtype())
        narrower = sorted((dtype for dtype in self.seen if digits(dtype) < digits(asked)), key=digits)
        where: Counter[str] = Counter()
        for (dtype, place), count in self.places.items():
            where[place] += count if dtype in narrower else 0
        return Precision(
            asked,
            tuple((dtype, self.seen[dtype]) for dtype in narrower),
            tuple(place for place, count in where.most_common() if count),
            self.lifted,
        )


def digits(dtype: torch.dtype) -> float:
    """Number that is larger for types with more digits."""
    return -torch.finfo(dtype).eps


def named(dtype: torch.dtype) -> str:
    """Name of a type without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")


def innermost_module() -> str:
    """Class name of the module whose code is running, or "the loss" outside of modules."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
    return "the loss"


def drawn_in(dtype: torch.dtype | None, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Result in float64 of a call that draws random numbers in the type ``dtype`` of the model; None: it does not.

    Another type would draw other numbers, and a device another mask of a dropout.
    """
    if dtype not in WIDER or not args or not isinstance(x := args[0], torch.Tensor) or x.dtype is not WIDER[dtype]:
        return None
    if func in DRAWS_INTO:
        # probabilities in float64 would be compared with other numbers
        rest = (y.to(dtype) if isinstance(y, torch.Tensor) else y for y in args[1:])
        return x.copy_(func(torch.empty_like(x, dtype=dtype), *rest, **kwargs))
    if func is torch.bernoulli:
        draws: torch.Tensor = func(x.to(dtype), *args[1:], **kwargs)
        return draws.to(x)
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
    if func not in DROPOUTS or not given.get("training", given.get("train", True)):
        return None
    p = given.get("p", 0.5)
    # the type of the mask is no precision of the model
    with _disable_current_modes():
        kept = func(torch.ones_like(x, dtype=dtype), p, True) != 0
    scale = kept.to(x) * (1 / (1 - p) if p < 1 else 0.0)
    return x.mul_(scale) if given.get("inplace") else x * scale


def lifted(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]] | None:
    """Return a call with float64 in place of float32 (complex types likewise); None: the call asks for no such type."""
    if func is torch.Tensor.float:
        return torch.Tensor.to, (args[0], torch.float64), kwargs
    if func is torch.Tensor.type and len(args) > 1 and args[1] in NAMES_OF_FLOAT32:
        return func, (args[0], torch.float64), kwargs
    if func in TO_OTHER:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(other, torch.Tensor) and other.dtype in WIDER:
            rest = {name: value for name, value in kwargs.items() if name != "other"}
            return torch.Tensor.to, (args[0], other.device, WIDER[other.dtype], *args[2:]), rest
    types = {value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)}
    if func in BITS or not types & WIDER.keys():
        return None
    if func in DRAWS:
        # in float64, different random numbers would be drawn
        return lambda *args, **kwargs: func(*args, **kwargs).to(torch.float64), args, kwargs

    def wide(value: Any) -> Any:
        return WIDER.get(value, value) if isinstance(value, torch.dtype) else value

    return func, tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}


#: Logits whose magnitude exceeds this number stand for −∞.
MASKED = 1e30
#: Constants up to this one hide the scores that they are added to; name under which nodes keep the hidden scores.
SHIFTED, HIDDEN = -1e4, "hidden"


class Masks(Observer):
    """Dispatch mode that records in the nodes of sums and softmaxes which scores are hidden."""

    SUMS = frozenset({torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.baddbmm, torch.ops.aten.add_})
    SOFTMAXES = frozenset({torch.ops.aten._softmax, torch.ops.aten._safe_softmax})
    #: Functions that the model calls; sums matter only with a constant.
    ADDING = frozenset({torch.add, torch.sub, *(getattr(torch.Tensor, n) for n in ("add", "add_", "sub"))})
    ATTENDING = frozenset(
        {
            *(torch.softmax, torch.Tensor.softmax, functional.softmax),
            *(functional.scaled_dot_product_attention, functional.multi_head_attention_forward),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.masked: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def around(cls, func: Any, args: Any) -> AbstractContextManager[Any]:
        """Context in which to call a function."""
        adding = func in cls.ADDING and any(isinstance(x, torch.Tensor) and not x.requires_grad for x in args)
        return cls() if adding or func in cls.ATTENDING else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, packet = self.call(func, args, kwargs), getattr(func, "overloadpacket", None)
        if packet in self.SOFTMAXES:
            self.masked.append((result, args[0] < -MASKED))
        elif packet in self.SUMS and not kwargs:
            for number, x in enumerate(args):
                # a tensor that is added to in place is no longer constant
                constant = isinstance(x, torch.Tensor) and not x.requires_grad and not x.is_complex()
                if constant and x is not result:
                    shift = -x if number and packet is torch.ops.aten.sub else x
                    self.masked.append((result, shift <= SHIFTED))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for result, mask in self.masked:
            node: Any = result.grad_fn
            if node is not None and bool(mask.any()):
                node.metadata[HIDDEN] = mask

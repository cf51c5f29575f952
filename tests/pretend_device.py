"""An accelerator made of the CPU: tensors that hold one of the CPU's and say that they are on ``pretend:0``.

What a GPU would refuse is refused (operands on two devices, ``numpy()``), what it would wait for is counted (copies
between host and device, numbers read), and it can be given few bytes or no float64. The kernels are the CPU's, so are
the last bits of the answers.

A wrapper with `__torch_dispatch__` and not a plain PrivateUse1 tensor (`torch._C._acc.create_empty_tensor`): that one
is contiguous and on device 0 whatever it stands for. The wrapper has strides, composes with autograd's second
derivatives and with torch.func, which work on operations above it, and with linalg. The fallback on PrivateUse1 makes
what has no operand: factories.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
HOST = torch.device("cpu")
aten = torch.ops.aten
#: What a GPU waits for: the shape of the result, or a number of Python, depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "_linalg_check_errors", "bincount")
#: Operations that take an operand of the host as well.
COPIES = (aten._to_copy.default, aten.copy_.default, aten._copy_from.default, aten._copy_from_and_resize.default)
KERNELS = (aten.copy_.default, aten._to_copy.default, aten.clone.default, aten.as_strided.default)
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


@dataclass
class State:
    """What was counted, and what the device has."""

    counts: Counter = field(default_factory=Counter)
    used: Counter = field(default_factory=Counter)
    blocks: dict = field(default_factory=dict)
    limit: int | None = None
    float64: bool = True
    active: bool = False
    generators: dict = field(default_factory=lambda: {i: torch.Generator().manual_seed(0) for i in range(2)})

    def count(self, what):
        self.counts[what] += 1

    def allocate(self, held, index):
        """Note a tensor's memory; torch.OutOfMemoryError if it is too much."""
        storage = held.untyped_storage()
        key = storage.data_ptr()
        if key in self.blocks:
            self.blocks[key][1] += 1
            return key
        size = storage.nbytes()
        if self.limit is not None and self.used[index] + size > self.limit:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes.")
        self.used[index] += size
        self.blocks[key] = [size, 1, index]
        return key

    def release(self, key):
        block = self.blocks[key]
        block[1] -= 1
        if not block[1]:
            del self.blocks[key]
            self.used[block[2]] -= block[0]


STATE = State()


class PretendModule:
    """torch.pretend, as torch.cuda."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def is_initialized(self):
        return True

    def is_available(self):
        return STATE.active

    def current_device(self):
        return 0

    def device_count(self):
        return 2 if STATE.active else 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        for generator in STATE.generators.values():
            generator.manual_seed(seed)

    def manual_seed(self, seed):
        STATE.generators[0].manual_seed(seed)

    def get_rng_state(self, device=NAME):
        return STATE.generators[torch.device(device).index or 0].get_state()

    def set_rng_state(self, state, device=NAME):
        STATE.generators[torch.device(device).index or 0].set_state(state)

    def mem_get_info(self, device=NAME):
        total = STATE.limit or 1 << 40
        return total - STATE.used[torch.device(device).index or 0], total

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        STATE.counts["emptied"] += 1


class PretendTensor(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, held, index):
        if held.dtype in (torch.float64, torch.complex128) and not STATE.float64:
            raise TypeError(f"Cannot convert a tensor to {held.dtype} on {NAME}: the device has no float64")
        key = STATE.allocate(held, index)
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        device = torch.device(NAME, index)
        own = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device, **layout)
        own.held = held
        weakref.finalize(own, STATE.release, key).atexit = False
        return own

    def __repr__(self):
        return f"{self.held!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def untyped_storage(self):
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        STATE.count("read")
        return self.held.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
        return self.cpu().numpy()

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def __reduce_ex__(self, protocol):
        cpu = self.detach().cpu()
        arguments = (cpu, self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, new):
        torch.Tensor.data.__set__(self, new)
        self.held = new.held


def mapped(function, value):
    """The arguments or results of an operation with its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(function, part) for part in value])
    return value


@cache
def facts(func):
    """Name of an operation, whether it takes a generator, and whether a GPU would have to be waited for."""
    name = func.__name__.split(".")[0]
    return name, any("Generator" in str(a.type) for a in func._schema.arguments), name.startswith(WAITS)


def run(func, args, kwargs):
    """One operation: the CPU's on what the operands hold."""
    operands = []
    plain = lambda x: operands.append(x) or (x.held if isinstance(x, PretendTensor) else x)  # noqa: E731
    held = [mapped(plain, value) for value in args]
    options = {key: mapped(plain, value) for key, value in kwargs.items()}
    name, random, waits = facts(func)
    ours = [x for x in operands if isinstance(x, PretendTensor)]
    target = place(func, name, kwargs, operands, ours)
    if name == "_efficientzerotensor":
        func = aten.zeros.default
    if waits or (name in INDEXED and any(x.dtype in (torch.bool, torch.uint8) for x in operands[1:])):
        STATE.count("read")
    if options.get("device") is not None:
        options["device"] = HOST
    if random and options.get("generator") is None:
        options["generator"] = STATE.generators[target.index or 0]
    result = func(*held, **options)
    for x in ours:
        if x.shape != x.held.shape or x.stride() != x.held.stride():
            # resized, as ``out=``, or transposed in place
            with torch._C._DisableTorchDispatch():
                torch.Tensor.data.__set__(x, PretendTensor(x.held, x.device.index))
    if target == HOST:
        return result
    wrapped, index = {id(x.held): x for x in ours}, target.index or 0
    return mapped(lambda x: wrapped[id(x)] if id(x) in wrapped else PretendTensor(x, index), result)


def place(func, name, kwargs, operands, ours):
    """The device of the result; what would mix devices is refused, and copies are counted."""
    devices = {x.device for x in ours}
    asked = kwargs.get("device")
    if func in COPIES:
        target = torch.device(asked) if asked is not None else operands[0].device
        source = operands[-1].device
        if source != target:
            STATE.count("to host" if target == HOST else "to device" if source == HOST else "between devices")
        return target
    of_host = [x for x in operands if not isinstance(x, PretendTensor) and x.ndim]
    numbers = name in INDEXED and not any(x.is_floating_point() for x in of_host)
    if ours and of_host and numbers and operands[0] is ours[0]:
        STATE.count("to device")
    elif ours and of_host:
        raise RuntimeError(f"{name}: expected all tensors on one device, but found {ours[0].device} and cpu")
    if len(devices) > 1:
        raise RuntimeError(f"{name}: expected all tensors on one device, but found {sorted(map(str, devices))}")
    if asked is not None:
        return torch.device(asked)
    return devices.pop() if devices else HOST


class GeneratorType(type(torch._C.Generator)):
    def __instancecheck__(cls, instance):
        return type.__instancecheck__(torch._C.Generator, instance)


class PretendGenerator(torch._C.Generator, metaclass=GeneratorType):
    """A generator of the CPU that says it is the device's: Python cannot register one."""

    def __new__(cls, device=HOST):
        own = super().__new__(cls, HOST)
        own.place = torch.empty(0, device=device).device
        return own

    @property
    def device(self):
        return self.place


def install():
    """Register the device, once a process."""
    if hasattr(torch, NAME):
        return
    _setup_privateuseone_for_python_backend(NAME, PretendModule())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    # operands that are wrapped reach only a kernel of the operation's own where Python's dispatch is off: torch.tensor
    kernels = torch.library.Library("aten", "IMPL")
    for op in KERNELS:
        kernels.impl(op, lambda *args, _op=op, **kwargs: run(_op, args, kwargs), "PrivateUse1")
    # torch takes the vectors too of what it calls a subclass, by another routine with other last bits
    kernels.impl("linalg_eigvalsh", values_alone(aten.linalg_eigvalsh, aten._linalg_eigh, 0), "AutogradPrivateUse1")
    kernels.impl("linalg_svdvals", values_alone(aten.linalg_svdvals, aten._linalg_svd, 1), "AutogradPrivateUse1")
    STATE.libraries = fallback, kernels


def values_alone(both, decomposition, part):
    """Kernel of eigenvalues or singular values that leaves out the vectors unless derivatives need them."""

    def kernel(A, *args, **kwargs):
        if torch.is_grad_enabled() and A.requires_grad:
            return both.default.decompose(A, *args, **kwargs)
        return decomposition(A, *args, **({"compute_v": False} if part == 0 else {"compute_uv": False}))[part]

    return kernel


@contextmanager
def pretend_device(*, limit=None, float64=True, threads=False):
    """The device, with ``limit`` bytes and with or without float64.

    ``threads``: backward passes run on a thread of the device, as on a GPU. Torch has one for ``pretend:0`` alone, and
    aborts the process where a loop over a batch, for want of a batching rule, fails on it.
    """
    install()
    own, torch.Generator = torch.Generator, PretendGenerator
    STATE.counts.clear()
    STATE.limit, STATE.float64, STATE.active = limit, float64, True
    try:
        with torch.autograd.set_multithreading_enabled(threads):
            yield STATE
    finally:
        torch.Generator = own
        STATE.limit, STATE.float64, STATE.active = None, True, False

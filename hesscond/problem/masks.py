"""Scores of a softmax that a model hides, recorded while the model runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from hesscond.problem.precision import Observer

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
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def around(cls, func: Any, args: Any) -> AbstractContextManager[Any]:
        """Context in which to call a function."""
        adding = func in cls.ADDING and any(isinstance(x, torch.Tensor) and not x.requires_grad for x in args)
        return cls() if adding or func in cls.ATTENDING else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, packet = func(*args, **(kwargs or {})), func.overloadpacket
        if packet in self.SOFTMAXES:
            self.found.append((result, args[0] < -MASKED))
        elif packet in self.SUMS and not kwargs:
            for number, x in enumerate(args):
                # a tensor that is added to in place is no longer constant
                if isinstance(x, torch.Tensor) and not x.requires_grad and x is not result:
                    shift = -x if number and packet is torch.ops.aten.sub else x
                    self.found.append((result, shift <= SHIFTED))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for result, mask in self.found:
            node: Any = result.grad_fn
            if node is not None and bool(mask.any()):
                node.metadata[HIDDEN] = mask

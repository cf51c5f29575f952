"""Search for the operation of a model whose derivatives are NaN or infinite, its module, and the samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hesscond.capture.backward import scattered_signs
from hesscond.problem import evaluation, graph
from hesscond.problem.snapshot import Snapshot
from hesscond.problem.weighting import Part

#: Largest number of evaluations spent on finding samples, and largest number of samples listed.
EVALUATIONS, LISTED = 64, 5
#: Nodes of operations that take a root.
ROOTS = r"Norm|Sqrt|Rsqrt|Pow|Std|Hypot|Dist"
#: Folders of torch and of this package, whose lines are not the model's.
HOMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def reasons(
    model: nn.Module,
    loss_fn: evaluation.LossFunction,
    batches: Iterable[evaluation.Batch],
    parts: Mapping[str, Sequence[nn.Parameter]],
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Reasons, by name, why second derivatives in parameters of a model are not finite (`NonFinite.reasons`)."""
    by_id = {id(p): p for parameters in parts.values() for p in parameters}
    snapshot = Snapshot(model, list(by_id.values()), dtype)
    place = dict(zip(by_id, snapshot.leaves, strict=True))
    leaves = {name: [place[id(p)] for p in parameters] for name, parameters in parts.items()}
    messages: dict[str, str] = {}
    for batch in batches:
        messages = NonFinite(loss_fn, batch, snapshot.model).reasons(snapshot, leaves) | messages
    return messages


class NonFinite:
    """Search, in the loss of one batch, for operations that make its derivatives NaN or infinite."""

    def __init__(self, loss_fn: evaluation.LossFunction, batch: evaluation.Batch, model: nn.Module) -> None:
        self.loss_fn = loss_fn
        inputs, target = evaluation.checked_batch(batch)
        self.whole = Part(inputs, target, evaluation.samples_of(model, inputs))
        self._spans: list[tuple[int, int, str]] = []

    def reasons(self, snapshot: Snapshot, parts: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, str]:
        """Reasons, by name, why second derivatives in leaves of a snapshot are not finite, or not in torch."""
        with self._traced(snapshot.model):
            loss = snapshot.evaluate(self.loss_fn, (self.whole.source, self.whole.target)).loss
        messages: dict[str, str] = {}
        known: list[tuple[Any, str]] = []
        for name, leaves in parts.items():
            try:
                if has_finite_product(loss, leaves):
                    continue
            except RuntimeError as error:
                messages[name] = str(error).splitlines()[0].rstrip(".")
                continue
            within = graph.dependent([loss.grad_fn], {get_gradient_edge(leaf).node for leaf in leaves})
            reason = next((text for node, text in known if node in within), "")
            if not reason and (guilty := culprit(loss, leaves)) is not None:
                reason = self._reason(*guilty, snapshot, leaves)
                known.append((guilty[0], reason))
            messages[name] = reason or "they are NaN or infinite"
        return messages

    def _reason(self, node: Any, order: str, snapshot: Snapshot, leaves: Sequence[torch.Tensor]) -> str:
        """Clause for a node whose derivative of this order is not finite."""
        samples = self._culprits(snapshot, leaves)
        way = "add a small eps under the root" if re.search(ROOTS, node.name()) else "put a torch.where in front of it"
        return (
            f"the {order} derivative of {operation(node)}{self._place(node)} is not finite"
            + (samples and f" at {samples}")
            + f"; {way}"
            + (", not only behind it" if "where" in way else "")
            + (samples and f", or leave {samples} out")
        )

    @contextmanager
    def _traced(self, model: nn.Module) -> Iterator[None]:
        """Context in which nodes keep the line of code that made them, and modules the nodes that they made."""
        number = torch.autograd._get_sequence_nr
        self._spans, open_ = [], []

        def entered(*_: Any) -> None:
            open_.append(number())

        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(entered).remove)

                def left(*_: Any, name: str = name) -> None:
                    self._spans.append((open_.pop(), number(), name))

                stack.callback(module.register_forward_hook(left).remove)
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            yield

    def _place(self, node: Any) -> str:
        """Module and line of code that a node was made in."""
        number = node._sequence_nr()
        names = [(stop - start, name) for start, stop, name in self._spans if start <= number < stop]
        parts = [f"module {min(names)[1]!r}"] if names and min(names)[1] else [] if names else ["the loss"]
        for line in reversed(node.metadata.get("traceback_", [])):
            match = re.match(r'\s*File "(.+)", line (\d+)', line)
            if match and not match[1].startswith(HOMES):
                parts.append(f"{Path(match[1]).name}, line {match[2]}")
                break
        return f" ({', '.join(parts)})" if parts else ""

    def _culprits(self, snapshot: Snapshot, leaves: Sequence[torch.Tensor]) -> str:
        """Samples without which the derivatives are finite, in words; empty if there are none."""
        left = EVALUATIONS

        def fails(index: list[int]) -> bool:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("too many evaluations")
            part = self.whole.rows(torch.tensor(index, device="cpu"))
            loss = snapshot.evaluate(self.loss_fn, (part.source, part.target)).loss
            return not has_finite_product(loss, leaves)

        def guilty(index: list[int]) -> list[int]:
            """Samples that fail individually, from samples that fail together."""
            if len(index) == 1:
                return index
            half = len(index) // 2
            return [i for part in (index[:half], index[half:]) if fails(part) for i in guilty(part)]

        with suppress(Exception):
            samples = list(range(self.whole.samples))
            failures = guilty(samples)
            rest = [i for i in samples if i not in failures]
            if failures and rest and not fails(rest):
                shown = ", ".join(map(str, failures[:LISTED])) + (" …" if len(failures) > LISTED else "")
                return f"sample{'s' if len(failures) > 1 else ''} {shown}"
        return ""


def has_finite_product(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the gradient in some leaves and a product with the Hessian are finite."""
    first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    curved = [g for g in first if g is not None and g.requires_grad]
    signs = [scattered_signs(g) for g in curved]
    second = torch.autograd.grad(curved, leaves, signs, allow_unused=True, retain_graph=True) if curved else ()
    return are_finite((*first, *second))


def are_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether no entry of any of the tensors is NaN or infinite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def culprit(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> tuple[Any, str] | None:
    """First node, from the leaves to a loss, that makes finite derivatives non-finite, and "first" or "second"."""
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    within = graph.dependent([loss.grad_fn], ends)
    ordered = sorted(
        (n for n in graph.nodes([loss.grad_fn]) if n in within - ends), key=lambda node: node._sequence_nr()
    )
    edges = [GradientEdge(node, k) for node in ordered for k in range(len(node._input_metadata))]
    slopes = iter(torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True))
    for node in ordered:
        outputs = [(GradientEdge(node, k), next(slopes)) for k in range(len(node._input_metadata))]
        inputs = [GradientEdge(*edge) for edge in dict.fromkeys(node.next_functions) if edge[0] in within]
        # otherwise the gradient is non-finite before it reaches this node
        if are_finite(slope for _, slope in outputs) and (order := nonfinite_order(outputs, inputs)):
            return node, order
    return None


def nonfinite_order(outputs: Sequence[tuple[GradientEdge, torch.Tensor | None]], inputs: Sequence[GradientEdge]) -> str:
    """Order, "first" or "second", of the derivative of a node that is not finite; empty if both are finite."""
    pairs = [(edge, slope.detach().requires_grad_()) for edge, slope in outputs if slope is not None]
    if not pairs or not inputs:
        return ""
    edges, seeds = zip(*pairs, strict=True)
    first = torch.autograd.grad(edges, inputs, seeds, create_graph=True, allow_unused=True)
    if not are_finite(first):
        return "first"
    curved = [g for g in first if g is not None and g.requires_grad]
    signs = [scattered_signs(g) for g in curved]
    second = torch.autograd.grad(curved, [*inputs, *seeds], signs, allow_unused=True, retain_graph=True)
    return "" if are_finite(second) else "second"


def operation(node: Any) -> str:
    """Name of the function of torch that made a node of the graph."""
    stem = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
    if (room := re.match("(linalg|special)_", name)) or hasattr(torch, name):
        return f"torch.{name.replace('_', '.', 1) if room else name}"
    return f"torch.nn.functional.{name}" if hasattr(nn.functional, name) else stem

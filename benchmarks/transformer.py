"""Unit Hessians of every dense layer of a small GPT: derivatives taken, seconds, and peak memory, layer by layer.

Run: ``python benchmarks/transformer.py [--threads N] [--quick] [--direct] [--all] [LAYER …]``. Layers that are named
are probed one by one, each in its own forward pass; otherwise all of them in one, with ``--all`` beside every other
block: embeddings, row by row, and normalizations. ``--direct`` differentiates through everything
behind a layer, without what is formed once for several. Seconds are of the wall and of the processor: on a machine that
does other things too, the second ones say more.

``--peers`` asks other tools about blocks of a smaller GPT instead, the truth being a dense Hessian by double backward.
A tool that is not installed says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from measuring import resident, table
from peers import Comparison, Truth
from torch import nn
from torch.nn import functional
from workloads import Problem

import hesscond
from hesscond.capture import backward, cuts
from hesscond.capture.double_backward import SecondDerivatives
from hesscond.hessians import HessianOperator
from hesscond.models import build
from hesscond.results import LayerResult


class Block(nn.Module):
    """Causal self-attention and an MLP of four times the width, each normalized before and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.proj(functional.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """Token and position embeddings, two blocks, a normalization and the output layer."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.b0, self.b1 = Block(width, heads), Block(width, heads)
        self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        return self.head(self.lnf(self.b1(self.b0(x))))


def next_character(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@contextmanager
def reported() -> Iterator[None]:
    """Print what every layer takes that is differentiated twice, and all other blocks together."""
    taken = 0
    along, capture = backward.Derivatives.__call__, SecondDerivatives.capture
    by_units = HessianOperator.by_units

    def counting(self: backward.Derivatives, seeds: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        nonlocal taken
        taken += len(seeds[0])
        return along(self, seeds)

    def timed(original: Callable[..., object], name_of: Callable[..., str]) -> Callable[..., object]:
        def call(self: object, given: object, *further: object) -> object:
            before, wall, processor = taken, time.perf_counter(), time.process_time()
            found = original(self, given, *further)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            line = f"{name_of(given):10} {taken - before:7,} derivatives  {wall:7.2f} s  {processor:7.2f} s"
            print(line, flush=True)
            return found

        return call

    backward.Derivatives.__call__ = counting
    SecondDerivatives.capture = timed(capture, lambda request: request.name)
    HessianOperator.by_units = timed(by_units, lambda _: "others")
    try:
        yield
    finally:
        backward.Derivatives.__call__, SecondDerivatives.capture = along, capture
        HessianOperator.by_units = by_units


#: Blocks that other tools are asked about, each a module of the network that `small` makes.
BLOCKS = {
    "gpt.block1.attention.q": "queries of attention",
    "gpt.block1.fc1": "first matrix of the MLP",
    "gpt.block1.norm1": "layer normalization",
    "gpt.embedding": "embedding of tokens",
}


class Scores(nn.Module):
    """A GPT whose scores are (N, V, T), as torch's own cross-entropy takes them, which some tools want to see."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, V, T) of the tokens (N, T)."""
        return self.gpt(tokens).transpose(1, 2)


def small() -> Problem:
    """A character GPT of 2 blocks, 16 wide, on 4 × 8 tokens, in float64, with weights large enough to attend."""
    generator = torch.Generator().manual_seed(0)
    gpt = build("gpt", input_shape=(8,), outputs=30, width=16, depth=2, heads=2, generator=generator).double()
    for parameter in gpt.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8
    inputs, targets = torch.randint(0, 30, (2, 4, 8), generator=generator)
    return Problem(Scores(gpt), nn.CrossEntropyLoss(), (inputs, targets))


def dense_truth(problem: Problem, layer: str) -> Truth:
    """The nonzero eigenvalues by double backward, one row at a time; zero is what is below 1e-12 of the largest."""
    parameters = list(problem.model.get_submodule(layer).parameters())
    loss = problem.loss_fn(problem.model(problem.batch[0]), problem.batch[1])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in gradient]
    H = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    values = torch.linalg.eigvalsh((H + H.T) / 2).numpy()
    values = values[np.argsort(-np.abs(values), kind="stable")]
    return Truth(values[np.abs(values) > 1e-12 * abs(values[0])], len(values))


def ask_peers(seconds: float, blocks: dict[str, str]) -> None:
    """One table of what every tool says of every block."""
    problem = small()
    comparison = Comparison(problem, seconds)

    def gradient() -> None:
        torch.autograd.grad(problem.loss_fn(problem.model(problem.batch[0]), problem.batch[1]), parameters)

    parameters = list(problem.model.parameters())
    gradient()
    hesscond.probe(problem.model, problem.loss_fn, problem.batch, ["gpt.block1.norm1"], "layer")
    begin = time.process_time()
    for _ in range(20):
        gradient()
    one = (time.process_time() - begin) / 20
    for layer, label in blocks.items():
        truth = dense_truth(problem, layer)
        comparison.ends(layer, label, truth)
        comparison.traces(layer, label, truth)
        comparison.diagonal(layer, label)
    rows = [
        [a.block, a.tool, "–" if a.passes is None else str(a.passes), gradients(a.processor, one), a.says]
        for a in comparison.answers
    ]
    print(f"a gradient: {1e3 * one:.2f} ms of the processor\n")
    print(table(("block", "tool", "passes", "gradients", "says"), rows, left=(0, 1, 4)))
    for label, truth in comparison.truths.items():
        print(f"{label}: {truth}")


def gradients(seconds: float | None, one: float) -> str:
    """Processor time in gradients."""
    return "–" if seconds is None else f"{seconds / one:,.0f}"


def main() -> None:
    """Probe, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="8 instead of 64 wide, 2 × 4 tokens; of peers, one block")
    parser.add_argument("--direct", action="store_true", help="without what is formed once for several layers")
    parser.add_argument("--peers", action="store_true", help="other tools, on blocks of a smaller network")
    parser.add_argument("--seconds", type=float, default=60, help="for one question to a tool (default 60)")
    parser.add_argument("--all", action="store_true", help="every block, not the dense layers alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peers:
        ask_peers(arguments.seconds, dict(list(BLOCKS.items())[2:3]) if arguments.quick else BLOCKS)
        return
    if arguments.direct:
        cuts.WORTHWHILE = float("inf")
    vocabulary, width, samples, tokens = (12, 8, 2, 4) if arguments.quick else (80, 64, 8, 32)
    torch.manual_seed(0)
    model = GPT(vocabulary, tokens, width, 2 if arguments.quick else 4)
    batch = torch.randint(0, vocabulary, (samples, tokens)), torch.randint(0, vocabulary, (samples, tokens))
    before, wall, processor = resident("VmRSS"), time.perf_counter(), time.process_time()
    dense = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found: dict[str, LayerResult] = {}
    with reported():
        for names in [[name] for name in arguments.layers] or ["*" if arguments.all else dense]:
            found.update(hesscond.probe(model, next_character, batch, names))
    captured = time.perf_counter() - wall
    kappas = [kappa for layer in found.values() for kappa in layer.kappa]
    resolved, worst = sum(kappa.resolved for kappa in kappas), max(layer.check.difference for layer in found.values())
    print(
        f"{len(kappas)} units, {resolved} resolved, {worst:.1e} from the model's own products; "
        f"{captured:.1f} s and {time.perf_counter() - wall - captured:.1f} s for κ, "
        f"{time.process_time() - processor:.1f} s of the processor; {(resident('VmHWM') - before) / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()

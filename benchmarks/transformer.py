"""Unit Hessians of every dense layer of a small GPT: derivatives taken, seconds, and peak memory, layer by layer.

Run: ``python benchmarks/transformer.py [--threads N] [--quick] [--direct] [--all] [LAYER …]``. Layers that are named
are probed one by one, each in its own forward pass; otherwise all of them in one, with ``--all`` beside every other
block: embeddings, row by row, and normalizations. ``--direct`` differentiates through everything
behind a layer, without what is formed once for several. Seconds are of the wall and of the processor: on a machine that
does other things too, the second ones say more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from measuring import resident
from torch import nn
from torch.nn import functional

import hesscond
from hesscond.capture import backward, cuts
from hesscond.capture.double_backward import SecondDerivatives
from hesscond.hessians import HessianOperator
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
        def call(self: object, given: object) -> object:
            before, wall, processor = taken, time.perf_counter(), time.process_time()
            found = original(self, given)
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


def main() -> None:
    """Probe, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a network of 8 instead of 64 wide, over 2 × 4 tokens")
    parser.add_argument("--direct", action="store_true", help="without what is formed once for several layers")
    parser.add_argument("--all", action="store_true", help="every block, not the dense layers alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
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

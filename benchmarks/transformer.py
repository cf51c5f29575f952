"""Blocks of small GPTs: what all units of all of them take, and what other tools say of some.

``python benchmarks/transformer.py [--quick]`` probes every unit. ``--peers`` asks other tools about blocks of a smaller
GPT, the truth being a dense Hessian by double backward; a tool that is not installed says so.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from cases import Problem
from measuring import table
from peers import Comparison, Truth
from torch import nn
from torch.nn import functional

import hesscond
from hesscond.models import build


def next_character(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


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
        comparison.ends(layer, label, dense_truth(problem, layer))
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


def time_units(*, quick: bool) -> None:
    """All units of all blocks of a GPT: embeddings row by row, normalizations, dense layers."""
    vocabulary, width, samples, tokens = (12, 8, 2, 4) if quick else (80, 64, 8, 32)
    generator = torch.Generator().manual_seed(0)
    options = {"width": width, "depth": 2, "heads": 2 if quick else 4}
    model = build("gpt", input_shape=(tokens,), outputs=vocabulary, generator=generator, **options)
    inputs, targets = torch.randint(0, vocabulary, (2, samples, tokens), generator=generator)
    wall, processor = time.perf_counter(), time.process_time()
    found = hesscond.probe(model, next_character, (inputs, targets), "*")
    kappas = [kappa for layer in found.values() for kappa in layer.kappa]
    worst = max(layer.check.difference for layer in found.values())
    print(
        f"{len(kappas)} units, {sum(kappa.resolved for kappa in kappas)} resolved, {worst:.1e} from the model's own "
        f"products; {time.perf_counter() - wall:.1f} s, {time.process_time() - processor:.1f} s of the processor"
    )


def main() -> None:
    """Ask other tools, or probe all units, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="8 instead of 64 wide, 2 × 4 tokens; of peers, one block")
    parser.add_argument("--peers", action="store_true", help="other tools, on blocks of a smaller network")
    parser.add_argument("--seconds", type=float, default=60, help="for one question to a tool (default 60)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peers:
        ask_peers(arguments.seconds, dict(list(BLOCKS.items())[2:3]) if arguments.quick else BLOCKS)
    else:
        time_units(quick=arguments.quick)


if __name__ == "__main__":
    main()

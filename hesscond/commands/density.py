"""``hesscond density FILE.py:FUNCTION``: how the eigenvalues of a network's Hessian are distributed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.text import Text

from hesscond.commands import options
from hesscond.commands.printing import stdout
from hesscond.commands.processes import of_user, own_device, own_share, processes
from hesscond.commands.target import Target, load_target, one_sentence
from hesscond.errors import ConfigError
from hesscond.hessians import GGNOperator, HessianOperator, NullDirections, network_null_directions
from hesscond.hessians.null_space import combined
from hesscond.operators import SymmetricOperator
from hesscond.operators.parallel import Team
from hesscond.probing.processes import agreed, shared
from hesscond.report.density import density_figure
from hesscond.report.page import METADATA, save_figure
from hesscond.spectra.density import NEAR_ZERO, Density
from hesscond.spectra.density import density as spectral_density
from hesscond.study import resolve_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MATRICES: dict[str, type[HessianOperator] | type[GGNOperator]] = {"Hessian": HessianOperator, "GGN": GGNOperator}


def density(
    target: options.TargetSpec,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", "-l", help="Names of layers, separated by commas or repeated. Default: all."),
    ] = None,
    ggn: Annotated[bool, typer.Option("--ggn", help="Take the Gauss-Newton matrix instead of the Hessian.")] = False,
    probes: Annotated[int, typer.Option(help="Random vectors to start from.")] = 10,
    steps: Annotated[int, typer.Option(help="Lanczos steps from each.")] = 80,
    seed: Annotated[int, typer.Option(help="Seed of the vectors, and of the generators before FUNCTION.")] = 0,
    dtype: Annotated[str, typer.Option(help="Precision of all computations: float64 | as-is.")] = "float64",
    device: options.Device = "auto",
    memory: Annotated[
        str | None, typer.Option(help="Limit of the memory, as 2GB: half for graphs and batches, half for vectors.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the density to a .pdf, .png or .svg file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object with all numbers, nodes and weights.")
    ] = False,
    show_traceback: options.Traceback = False,
) -> None:
    """Compute the spectral density of the Hessian of any torch model, by stochastic Lanczos quadrature.

    Example: hesscond density mymodel.py:make --probes 20 --figure density.pdf
    """
    request = Request(
        layers=options.names_of(layers),
        matrix="GGN" if ggn else "Hessian",
        probes=probes,
        steps=steps,
        seed=options.check_seed(seed),
        dtype=options.forward_precision(dtype),
        memory=None if memory is None else options.parse_size(memory),
    )
    options.check_file("--figure", figure, METADATA)
    place = own_device(resolve_device(device))
    with processes(place) as group:
        with of_user(target, show_traceback) as say:
            loaded = load_target(target, seed=seed).to(place)
            with one_sentence(target):
                found, null = run_density(loaded, request, target, say, group)
        if group is not None and group.rank() > 0:
            return
        if as_json:
            sys.stdout.write(json.dumps(as_object(found, request), indent=1) + "\n")
        else:
            print_summary(found, null, request, loaded, target)
        if figure is not None:
            save_figure(density_figure(found, target), figure)
            if not as_json:
                stdout.print(f"figure: {figure}", soft_wrap=True)


@dataclass(frozen=True)
class Request:
    """Options of the density to compute."""

    layers: list[str] | None
    matrix: str
    probes: int
    steps: int
    seed: int
    dtype: torch.dtype | None
    memory: int | None

    def __post_init__(self) -> None:
        for name in ("probes", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")


def run_density(
    target: Target, request: Request, spec: str, say: Callable[[str], None], group: ProcessGroup | None
) -> tuple[Density, list[NullDirections]]:
    """The density of the target's matrix, and the null directions that were known beforehand."""
    data, weight = own_share(target, group)
    half: dict[str, Any] = {} if request.memory is None else {"memory": request.memory / 2}
    common: dict[str, Any] = {"dtype": request.dtype, **half}

    def local() -> HessianOperator | GGNOperator:
        return MATRICES[request.matrix](
            target.model, target.loss_fn, data, layers=request.layers, weight=weight, **common
        )

    say(f"linearizing {spec}")
    null: list[NullDirections] = []
    operator: SymmetricOperator
    if group is None or group.size() == 1:
        operator = own = local()
        say(f"null directions of {spec}")
        null = network_null_directions(own)
    else:
        # what is null for the share of one process need not be so for that of another
        team = Team(group)
        operator = shared(agreed(team, local), team)  # type: ignore[arg-type]
    found = spectral_density(
        operator,
        probes=request.probes,
        steps=request.steps,
        seed=request.seed,
        null_space=combined(null),
        on_progress=lambda done, total: say(f"density of {spec}: {done} of {total} products"),
        **half,
    )
    return found, null


def as_object(density: Density, request: Request) -> dict[str, Any]:
    """All numbers for JSON; infinite ones (the error of a single probe) are null, as JSON has none."""
    numbers: dict[str, Any] = {
        "matrix": request.matrix,
        "layers": request.layers,
        "n_params": density.order,
        "null": density.null,
        "probes": density.probes,
        "steps": density.steps,
        "products": density.products,
        "vectors": density.vectors,
        "seed": density.seed,
        "lambda_max": density.top,
        "lambda_min": density.bottom,
    }
    for name, share in (("negative", density.negative), ("near_zero", density.near_zero(NEAR_ZERO))):
        ends = {f"{name}_lower": share.lower, f"{name}_upper": share.upper}
        numbers |= {name: share.value, f"{name}_error": share.error, **ends}
    trace = density.trace()
    numbers |= {"trace": trace.value, "trace_error": trace.error}
    numbers = {name: None if value == math.inf else value for name, value in numbers.items()}
    return numbers | {"nodes": density.nodes.tolist(), "weights": density.weights.tolist()}


def print_summary(density: Density, null: list[NullDirections], request: Request, target: Target, spec: str) -> None:
    """Print what was measured, the table, and the null directions that were known beforehand."""
    precision = "float64" if request.dtype is torch.float64 else "the model's own precision"
    mode = "train" if target.model.training else "eval"
    where = "all parameters" if request.layers is None else ", ".join(request.layers)
    how = "all eigenvalues computed"
    if density.seed is not None:
        how = f"{density.probes} probes × {density.steps} Lanczos steps"
    stdout.print(f"{spec} · {target.samples} samples · {request.matrix} in {where}", soft_wrap=True)
    stdout.print(f"{how}, {density.products} products · {precision} · model in {mode} mode", soft_wrap=True)
    stdout.print()
    sheet = density.sheet()
    stdout.print(sheet.table)
    stdout.print()
    for line in sheet.below:
        stdout.print(Text(line.replace("more steps", "more --steps")))
    for directions in null:
        stdout.print(Text(str(directions)))

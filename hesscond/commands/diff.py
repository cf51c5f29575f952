"""``hesscond diff A B``: condition numbers of the same Hessians in two models, checkpoints, runs or saved results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from hesscond.commands import options, printing, probe as probing, target as targets
from hesscond.errors import ConfigError, one_line
from hesscond.methods import parse
from hesscond.probing import diff as differences
from hesscond.problem.devices import resolve_device
from hesscond.sheets import in_coordinates

if TYPE_CHECKING:
    import pandas as pd

#: Keys below which training scripts keep the weights in a checkpoint, and prefixes of wrappers in their names.
WEIGHTS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")


def compare_two(
    a: Annotated[str, typer.Argument(help="Run folder, .csv or .json of probe, FILE.py:FUNCTION.")],
    b: Annotated[str, typer.Argument(help="Another one, which is divided by A.")],
    model: Annotated[
        str | None,
        typer.Option(help="FILE.py:FUNCTION for A and B that are checkpoints: files of torch.save with its weights."),
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option("--layers", "-l", help="Layers that are probed, as for hesscond probe.")
    ] = None,
    level: Annotated[str, typer.Option(help="unit: each output unit; layer: each layer; network.")] = "unit",
    method: Annotated[str | None, typer.Option("--method", "-m", help="Coordinates (hesscond methods).")] = None,
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random generators before FUNCTION is called.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as a list of objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .csv or .json file for all rows.")] = None,
    show_traceback: options.Traceback = False,
) -> None:
    """Compare the condition numbers of two checkpoints, runs or saved results, those that grew most first.

    Of runs it is the last probe: of the training set if both have one, in each method's own coordinates.

    Example: hesscond diff before.pt after.pt --model mymodel.py:make

    Example: hesscond diff runs/fc-digits-1/vanilla-seed0 runs/fc-digits-1/bnp-seed0
    """
    arguments = {
        "layers": options.names_of(layers),
        "level": options.choice("--level", level, probing.LEVELS),
        "method": None if method is None else parse(method).text,
    }
    options.check_seed(seed)
    if model is None and not any(".py:" in name for name in (a, b)) and (layers or method or level != "unit"):
        raise ConfigError("--layers, --level and --method are for checkpoints and FILE.py:FUNCTION, which are probed")
    write = probing.writer(as_json, as_csv, output)
    place = resolve_device(device)

    def measure(spec: str, weights: Path | None) -> pd.DataFrame:
        with targets.of_user(spec, show_traceback) as say:
            target = targets.load_target(spec, seed=seed)
            if weights is not None:
                load_weights(target, weights)
            return probing.run_probe(target.to(place), arguments, spec, probing.Watched(say))[1]

    def frame_of(name: str) -> tuple[pd.DataFrame, str]:
        if model is not None:
            return measure(model, Path(name)), ""
        if ".py:" in name:
            return measure(name, None), ""
        return last_probe(Path(name), runs) if Path(name).is_dir() else (saved(Path(name)), "")

    runs = [Path(name) for name in (a, b) if Path(name).is_dir()]
    (frame, about_a), (other, about_b) = frame_of(a), frame_of(b)
    comparison = differences.diff(frame, other)
    write(comparison.to_frame())
    if not (as_json or as_csv):
        for letter, name, about in (("A", a, about_a), ("B", b, about_b)):
            printing.stdout.print(f"{letter}: {name}{about}", soft_wrap=True)
        printing.stdout.print()
        printing.print_table(comparison.sheet().table)


def load_weights(target: targets.Target, path: Path) -> None:
    """Load the weights of a checkpoint into the model of a target."""
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise ConfigError(
            f"{path} is no checkpoint that torch.load(weights_only=True) reads: give one with model.state_dict()"
        ) from error
    below = next(
        (kept[key] for key in WEIGHTS if isinstance(kept, Mapping) and isinstance(kept.get(key), Mapping)), kept
    )
    if not isinstance(below, Mapping) or not any(isinstance(value, torch.Tensor) for value in below.values()):
        raise ConfigError(f"{path} holds no weights by name, neither at its top nor under {', '.join(WEIGHTS)}")
    wanted = target.model.state_dict()
    state = dict(below)
    for prefix in PREFIXES:
        if not state.keys() & wanted.keys():
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    try:
        target.model.load_state_dict(state)
    except RuntimeError as error:
        *_, why = (line.strip() for line in str(error).splitlines())
        raise ConfigError(f"the weights of {path} do not fit the model: {why}") from error
    if bad := [name for name, p in target.model.named_parameters() if not bool(p.isfinite().all())]:
        raise ConfigError(f"the weights of {path} have NaN or infinite entries: {', '.join(bad[:4])}")


def saved(path: Path) -> pd.DataFrame:
    """Rows that ``hesscond probe -o`` or ``to_frame().to_csv`` wrote."""
    import pandas as pd

    if path.suffix.lower() not in (".csv", ".json"):
        raise ConfigError(
            f"{path} is no run folder, .csv, .json or FILE.py:FUNCTION: give --model FILE.py:FUNCTION for a checkpoint"
        )
    try:
        is_csv = path.suffix.lower() == ".csv"
        frame = pd.read_csv(path, dtype={"layer": str}) if is_csv else pd.DataFrame(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no table of a probe: {one_line(error)}") from None
    # JSON has no infinity
    for bound in {"kappa", "kappa_upper"} & set(frame):
        frame[bound] = frame[bound].astype(float).fillna(float("inf"))
    return frame


def last_probe(folder: Path, runs: list[Path]) -> tuple[pd.DataFrame, str]:
    """Rows of the last probe of a run, and what they are; of the training set if all the ``runs`` have one."""
    probes = {path: options.collect([path])[0].table("probe") for path in runs}
    if len(options.collect([folder])) > 1:
        raise ConfigError(f"{folder} holds several runs: name one of them")
    data = "train" if all((probe["data"] == "train").any() for probe in probes.values()) else "batch"
    what = "training set" if data == "train" else "mini-batch"
    rows = probes[folder][probes[folder]["data"] == data]
    if rows.empty:
        raise ConfigError(f"{folder} has no probe of the {what}")
    last = rows[rows["iteration"] == rows["iteration"].max()].drop_duplicates(["layer", "unit"], keep="last")
    plain = {in_coordinates(name, "own"): name for name in differences.COMPARED}
    if last["kappa_own"].notna().any():
        kept = [name for name in plain if name in last]
        last = last.drop(columns=[plain[name] for name in kept]).rename(columns={name: plain[name] for name in kept})
    return last.astype({"layer": str}), f", iteration {last['iteration'].iloc[0]}, {what}, own coordinates"

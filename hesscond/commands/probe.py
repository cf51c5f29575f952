"""``hesscond probe FILE.py:FUNCTION``: condition numbers of any torch model's layers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.text import Text

import hesscond
from hesscond.capture import STOPPED, ProbeProgress
from hesscond.commands import options, printing, target as targets
from hesscond.commands.runs import write_table
from hesscond.errors import CaptureError, ConfigError, HesscondError, bytes_of
from hesscond.hessians.catalogue import Catalogue
from hesscond.hessians.network_operator import observed
from hesscond.hessians.roles import NETWORK
from hesscond.lazy import own_code
from hesscond.methods import parse
from hesscond.probing.results import NetworkResult
from hesscond.problem.devices import resolve_device
from hesscond.problem.wrappers import measurable
from hesscond.report import page
from hesscond.sheets import duration

if TYPE_CHECKING:
    import pandas as pd

#: Seconds from which on an estimate is announced beforehand.
LONG = 10.0

LEVELS = {
    "unit": "every output unit by itself",
    "layer": "all parameters of a layer together",
    "network": "all parameters together, and of each layer",
}


def probe(
    target: options.TargetSpec,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            "-l",
            help="Names of layers, parameters or parts, or globs as '*.mlp.*' ('*': every parameter), separated by "
            "commas or repeated; all dense and convolutional layers if not given.",
        ),
    ] = None,
    level: Annotated[
        str, typer.Option(help="unit: each output unit; layer: each layer; network: all parameters.")
    ] = "unit",
    units: Annotated[
        str | None,
        typer.Option(help="Output units of the layers, as 0,1,5-9; all: also where a sample is the default, for time."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Measure in the coordinates of a method (hesscond methods).",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the forward pass: float64 | as-is.")] = "float64",
    rtol: Annotated[float, typer.Option(help="Stop once the interval for κ is this narrow, relative to κ.")] = 1e-8,
    products: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --level network: λ_max and a lower bound of κ from N products with the Hessian (about two "
            "gradients each), for models of millions of parameters; their layers by themselves are left out.",
        ),
    ] = None,
    device: options.Device = "auto",
    memory: Annotated[str | None, typer.Option(help="Limit of the memory, as 2GB.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random generators before FUNCTION is called.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows, one per Hessian, as a list of objects.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows, one per Hessian, as CSV.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the rows: .csv, .json, or as the options say.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw κ per layer to a .pdf, .png or .svg file.")] = None,
    show_traceback: options.Traceback = False,
) -> None:
    """Measure condition numbers of the Hessians of any torch model's layers.

    Example: hesscond probe mymodel.py:make --layers fc1,fc2 --figure kappa.pdf
    """
    arguments: dict[str, Any] = {
        "layers": options.names_of(layers),
        "level": options.choice("--level", level, LEVELS),
        "units": units if units in (None, "all") else tuple(dict.fromkeys(options.integers("--units", str(units)))),
        "method": None if method is None else parse(method).text,
        "dtype": torch.float64 if options.choice("--dtype", dtype, ("float64", "as-is")) == "float64" else None,
        "rtol": rtol,
        "products": products,
    }
    if memory is not None:
        arguments["memory"] = bytes_of(memory)
    options.check_seed(seed)
    write = writer(as_json, as_csv, output)
    options.check_file("--figure", figure, page.METADATA)
    place = resolve_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "one process measures: start hesscond probe without torchrun; in Python, probe(…, group=) takes the "
            "data that several processes have"
        )
    with targets.of_user(target, show_traceback) as say:
        loaded = targets.load_target(target, seed=seed).to(place)
        watched = Watched(say)
        with watched.interrupts():
            result, frame = run_probe(loaded, arguments, target, watched)
    write(frame)
    if not (as_json or as_csv):
        print_summary(result, frame, arguments, loaded, target)
    if figure is not None:
        from hesscond.report.probed import probe_figure

        page.save_figure(probe_figure(frame, target), figure)
        if not (as_json or as_csv):
            printing.stdout.print(f"figure: {figure}", soft_wrap=True)
    if watched.stopped:
        printing.stderr.print("interrupted: the rows are those that were complete")
        raise typer.Exit(printing.INTERRUPTED)


class Watched:
    """Progress display of a probe, which lets Ctrl-C end it with what is complete."""

    def __init__(self, say: printing.Say) -> None:
        self.say = say
        self.stopped = False
        self._latest: ProbeProgress | None = None

    def tell(self, progress: ProbeProgress) -> None:
        """Show the progress of `hesscond.probe`, and stop it if Ctrl-C was pressed."""
        first, self._latest = self._latest is None, progress
        if first and progress.left > LONG:
            longest, seconds = max(progress.seconds.items(), key=lambda pair: pair[1])
            others = "" if len(progress.seconds) == 1 else f" ({duration(seconds)} of it for {longest})"
            others += progress.reason and f", {progress.reason}"
            text = f"Estimated time of second derivatives: {duration(progress.left)}{others}. "
            advice = "--layers and --units measure a subset; Ctrl-C keeps finished layers."
            printing.print_line(text + advice, printing.stderr)
        if self.stopped:
            progress.stop()
        self.say(f"second derivatives of {progress.layer}", progress.share, progress.left)

    def kappas(self, result: hesscond.ProbeResult) -> hesscond.ProbeResult:
        """Compute κ of all layers, which the result keeps; after Ctrl-C return those that are complete."""
        self._latest = None
        for number, (name, layer) in enumerate(result.items(), 1):
            label, share = f"κ of {name}", None
            if len(result) > 1:
                label, share = f"{label} ({number} of {len(result)})", (number - 1) / len(result)
            self.say(label, share)
            seconds = layer.seconds() if isinstance(layer, NetworkResult) else None
            if seconds is not None and seconds > LONG:
                printing.print_line(
                    f"about {duration(seconds)} for κ of {layer.n_params:,} parameters: as many products, and the "
                    "eigenvalues of their matrix; --products 60 gives λ_max and a bound of κ",
                    printing.stderr,
                )
            try:
                with observed(self._counter(label, share)):
                    _ = layer.kappa
            except KeyboardInterrupt:
                self.stopped = True
                if number == 1:
                    raise
                return result.first(number - 1, STOPPED)
        return result

    def _counter(self, label: str, share: float | None) -> Callable[[int], None]:
        """Return a function that shows how many products with the Hessian were made."""
        count = 0

        def counted(products: int) -> None:
            nonlocal count
            count += products
            self.say(f"{label}: {count:,} products with the Hessian", share)

        return counted

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Let Ctrl-C end second derivatives soon; at other times, or pressed twice, at once."""

        def asked(number: int, frame: FrameType | None) -> None:
            if self._latest is None or self.stopped:
                raise KeyboardInterrupt
            self.stopped = True
            printing.stderr.print("stopping after the derivatives at work; Ctrl-C again: at once")

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, asked)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def run_probe(
    target: targets.Target, arguments: dict[str, Any], spec: str, watched: Watched
) -> tuple[hesscond.ProbeResult, pd.DataFrame]:
    """Probe, ``arguments`` being those of `hesscond.probe`, and turn what the user's code raises into one sentence."""
    import pandas as pd

    try:
        watched.say(f"probing {spec}")
        result = watched.kappas(probed(target, arguments, watched))
        if not result:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in result.skipped.items())
            raise ConfigError(f"no layer of {spec} could be probed: {reasons or 'it has none'}")
        frame = result.to_frame()
        if arguments["level"] == NETWORK:
            whole = result[NETWORK]
            assert isinstance(whole, NetworkResult)
            if arguments.get("products") is not None:
                # signed, as κ's λ_max is not
                top = whole.top
                return result, frame.assign(top_lower=float(top.lower[0]), top_upper=float(top.upper[0]))
            # the layers by themselves above the network, with their shares of its extreme eigenvectors
            shares = whole.by_layer().drop(columns="n_params")
            try:
                layers = probed(target, arguments | {"level": "layer"}, watched)
            except CaptureError as error:
                result.skipped["the layers by themselves"] = str(error)
            else:
                layers = watched.kappas(layers)
                frame = pd.concat([layers.to_frame(), frame], ignore_index=True)
                result.skipped.update(layers.skipped)
            frame = frame.merge(shares, on="layer", how="left")
    except HesscondError:
        raise
    except (Exception, SystemExit) as error:
        # the user's code, or a fault of ours
        raise ConfigError(targets.explained(error, spec)) from error
    return result, frame


def probed(target: targets.Target, arguments: dict[str, Any], watched: Watched) -> hesscond.ProbeResult:
    """Probe of a target, with its progress watched."""
    with own_code(arguments["method"] or ""):
        return hesscond.probe(
            target.model, target.loss_fn, target.data, **arguments, weight=target.weight, progress=watched.tell
        )


def print_summary(
    result: hesscond.ProbeResult, frame: pd.DataFrame, arguments: dict[str, Any], target: targets.Target, spec: str
) -> None:
    """Print what was probed, the table, and the notes below it."""
    few, level = arguments["products"], arguments["level"]
    what = LEVELS[level] if few is None else f"all parameters together, {few} products"
    printing.print_line(f"{spec} · {target.samples} · level {level}: {what}")
    catalogue = Catalogue(measurable(target.model))
    names = [str(name) for name in frame["layer"].unique() if name != NETWORK]
    sheet = result.sheet(frame, {name: catalogue.kind(name) for name in names})
    measured, *checked = sheet.above
    printing.print_line(f"{measured} · model in {'train' if target.model.training else 'eval'} mode")
    for line in checked:
        printing.stdout.print(Text(line))
    printing.stdout.print()
    printing.stdout.print(sheet.table)
    printing.stdout.print()
    for line in sheet.below:
        printing.stdout.print(Text(printing.as_options(line)))


def writer(as_json: bool, as_csv: bool, output: Path | None) -> Callable[[pd.DataFrame], None]:
    """A function that writes the rows where the options say, checked beforehand; it does nothing without them."""
    if as_json and as_csv:
        raise ConfigError("give either --json or --csv, not both")
    if output is None and not (as_json or as_csv):
        return lambda frame: None
    options.check_file("--output", output, (".csv", ".json") if not (as_json or as_csv) else None)
    json_wanted = as_json or (not as_csv and output is not None and output.suffix.lower() == ".json")
    return lambda frame: write_table(frame, "json" if json_wanted else "csv", sys.stdout if output is None else output)

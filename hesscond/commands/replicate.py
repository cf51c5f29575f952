"""``hesscond replicate``: all runs of a figure or table of a paper, and published and own results side by side."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands import options, performing, printing
from hesscond.data import locate
from hesscond.errors import ConfigError
from hesscond.report.replication import write_replication
from hesscond.runs import store
from hesscond.study import replication
from hesscond.study.files import StudyFile
from hesscond.study.grid import Overrides
from hesscond.study.listing import contents
from hesscond.study.sweep import prepare


def replicate(
    name: Annotated[str | None, typer.Argument(help="What --list lists: NAME or NAME/PANEL.")] = None,
    scale: options.Scale = None,
    seeds: Annotated[int, typer.Option(help="Number of runs of every method, with the seeds 0, 1, …")] = 5,
    iterations: Annotated[
        int | None, typer.Option(help="Optimizer steps of every run, in place of the paper's.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set, in place of the paper's.")] = None,
    jobs: options.Jobs = None,
    threads: options.Threads = None,
    device: options.Devices = "auto",
    data_dir: options.DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/NAME, or runs/NAME-small.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List figures and tables, other comparisons, and what runs take.")
    ] = False,
    as_json: printing.AsJson = False,
) -> None:
    """Run all of a figure or table of a paper, or of another comparison, and show paper and result side by side.

    Example: hesscond replicate bnp-figure-3 --scale small --seeds 2

    The same command resumes an interrupted replication, and repeats no finished run.
    """
    if list_:
        list_replications(data_dir, as_json)
        return
    if name is None:
        raise ConfigError("name a figure, a table or another comparison (hesscond replicate --list)")
    paper = replication.replication(name, scale)
    probing = None if paper.cost.probe else 0
    overrides = Overrides(iterations, epochs, None, None, probing)
    small = paper.panels[0].study.scale == "small"
    where = out or Path("runs") / (paper.name.replace("/", "-") + ("-small" if small else ""))
    place = performing.Place.of(jobs, device, threads)
    plans = replication.plan_replication(paper, seeds, where, place.devices[0], overrides)
    data = performing.data_of(plans, data_dir)
    prepared = prepare(plans, data, where)
    own_threads = threads if threads is not None else place.threads(where)
    outcomes = performing.perform(plans, prepared, data, place, own_threads)
    runs: dict[str, list[store.StoredRun]] = defaultdict(list)
    for plan in plans:
        if (plan.folder / "run.sqlite").exists():
            runs[plan.study.panel].append(store.open_run(plan.folder))
    table, written, drawn = write_replication(paper, runs, where)
    printing.print_table(table)
    printing.stdout.print(f"runs:   {where}", soft_wrap=True)
    printing.stdout.print(f"table:  {written}.md (and .csv)", soft_wrap=True)
    for path in drawn:
        printing.stdout.print(f"figure: {path}.png (and .pdf)", soft_wrap=True)
    performing.complain_of(outcomes)


def list_replications(data_dir: Path | None, as_json: bool) -> None:
    """List the figures, tables and other comparisons with what they need."""
    rows = []
    for name in (content["name"] for content in contents() if "replicate" in content):
        file = StudyFile.named(name)
        studies = [file.content_of(panel)[0] for panel in file.panels or [""]]
        data = sorted({study["data"]["name"] for study in studies})
        missing = [name for name in data if locate(name, data_dir) is None]
        cost = file.layout.replicate
        rows.append(
            {
                "name": name,
                "shows": file.content["description"],
                "runs": sum(len(study["methods"]) for study in studies),
                "data": ", ".join(name + (" (not here)" if name in missing else "") for name in data),
                "core hours": f"{cost.core_hours:.2g} {cost.how}" if cost.core_hours else "",
            }
        )
    printing.listing(rows, as_json)
    if not as_json:
        printing.stderr.print(
            "runs: of one seed; core hours: of all with five seeds, on one core of a machine with two, measured or "
            "extrapolated from the first 100 iterations of each method"
        )

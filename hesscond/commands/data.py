"""``hesscond data``: the data sets of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hesscond.commands.printing import sign_of_life, stdout
from hesscond.data import fetch

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Get data sets.

    Example: hesscond data fetch mnist
    """


@app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets. Default: the cache.")] = None,
) -> None:
    """Download a data set and check it.

    Example: hesscond data fetch cifar10
    """
    with sign_of_life(f"fetching {name}"):
        folder = fetch(name, data_dir)
    stdout.print(str(folder), soft_wrap=True)

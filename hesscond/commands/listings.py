"""``hesscond studies``, ``methods`` and ``data``: the built-in studies and the methods, and data sets to fetch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from hesscond.commands import options, printing
from hesscond.errors import ConfigError
from hesscond.study import listing

if TYPE_CHECKING:
    from hesscond.methods import Method


def studies(
    name: Annotated[str | None, typer.Argument(help="Show the panels and methods of this study.")] = None,
    as_json: printing.AsJson = False,
) -> None:
    """List the built-in studies, or the panels of one.

    Example: hesscond studies bnp-figure-3
    """
    rows = listing.described() if name is None else listing.panels_of(name)
    if not rows:
        raise ConfigError(f"unknown study {name!r}: hesscond studies lists them")
    printing.listing(rows, as_json)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method in full.")] = None,
    as_json: printing.AsJson = False,
) -> None:
    """List the methods, or show one; --method NAME:option=value sets an option, --method NAME+NAME joins two.

    Example: hesscond methods bnp
    """
    from hesscond.methods import method_class, registered
    from hesscond.methods.spec import shown_options

    if name is None:
        printing.listing([method_row(m) for m in registered()], as_json, ["name", "rate", "summary"])
        return
    chosen = method_class(name)
    if as_json:
        printing.listing([method_row(chosen) | {"text": inspect.getdoc(chosen)}], as_json)
        return
    printing.print_line(f"{chosen.name}: {chosen.summary}", style="bold")
    printing.print_source(chosen.source)
    printing.print_prose(shown_options(chosen) or "none", "options: ", " " * 9)
    printing.stdout.print(f"rate:    {chosen.rate:g}\n", soft_wrap=True)
    printing.print_docstring(inspect.getdoc(chosen) or "")


def method_row(method: type[Method]) -> dict[str, str | float]:
    """Row of a method in a listing."""
    from hesscond.methods.spec import shown_options

    row = {name: getattr(method, name) for name in ("name", "rate", "summary", "source")}
    return row | {"options": shown_options(method)}


data_app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@data_app.callback()
def data() -> None:
    """Get data sets.

    Example: hesscond data fetch mnist
    """


@data_app.command("fetch", cls=options.Once)
def fetch_data(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100")],
    data_dir: options.DataDir = None,
) -> None:
    """Download a data set and check it.

    Example: hesscond data fetch cifar10
    """
    from hesscond.data import fetch

    with printing.sign_of_life(f"fetching {name}"):
        folder = fetch(name, data_dir)
    printing.stdout.print(str(folder), soft_wrap=True)

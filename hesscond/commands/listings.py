"""``hesscond studies`` and ``hesscond methods``: what there is."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from hesscond.commands import completion
from hesscond.commands.printing import AsJson, listing, stdout
from hesscond.methods import Method, method_class, registered
from hesscond.methods.spec import shown_options
from hesscond.study import built_in


def studies(as_json: AsJson = False) -> None:
    """List the built-in studies.

    Example: hesscond studies --json
    """
    listing([{"name": s.name, "data": s.data.name, "description": s.description} for s in built_in()], as_json)


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show all about this one.", autocompletion=completion.methods)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or show one; --method NAME:option=value sets an option, --method NAME+NAME joins two.

    Example: hesscond methods bnp
    """
    if name is None:
        listing([method_row(m) for m in registered()], as_json)
        return
    chosen = method_class(name)
    if as_json:
        listing([method_row(chosen) | {"text": inspect.getdoc(chosen)}], as_json)
        return
    stdout.print(f"{chosen.name}: {chosen.summary}", soft_wrap=True)
    stdout.print(f"source:  {chosen.source}", soft_wrap=True)
    stdout.print(f"options: {shown_options(chosen) or 'none'}\n", soft_wrap=True)
    stdout.print(inspect.getdoc(chosen) or "", soft_wrap=True)


def method_row(method: type[Method]) -> dict[str, str]:
    """A method in a listing."""
    return {
        "name": method.name,
        "options": shown_options(method),
        "summary": method.summary,
        "source": method.source,
    }

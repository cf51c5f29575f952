"""The parts of the reference that are written from the program while the site is built, so that they cannot go stale.

A page says where with a line ``<!-- generated: NAME -->`` (``NAME ARGUMENT``); `conf.py` puts in its place what the
function of that name in `GENERATED` returns: Markdown.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import typer.main
from generate import prose
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import hesscond
from hesscond import data
from hesscond.cli import app
from hesscond.expectations import parser
from hesscond.models import MODELS
from hesscond.report import FIGURES, TABLES as TABLE_KINDS
from hesscond.runs.store import KEYS as ROW_KEYS, SCHEMA_VERSION, TABLES
from hesscond.study.config import StudyConfig
from hesscond.study.grid import SweepConfig

#: Base classes from elsewhere, whose members are not listed.
BASES = "Module, BaseModel, Exception, ABC, tuple"
#: How Python's types are called in a TOML file.
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "table"}
#: How the constraints of pydantic read.
BOUNDS = {
    "gt": "> {}",
    "ge": "≥ {}",
    "lt": "< {}",
    "le": "≤ {}",
    "min_length": "at least {} of them",
    "pattern": "`{}`",
}
KEYS = "| key | value | if absent |\n|---|---|---|"
#: Limits of the number formats, which go without saying.
LARGE = 2**62


# -- the command line -------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its help, arguments and options, as ``--help`` has them."""
    parts = []
    for name, command in leaves(typer.main.get_command(app), "hesscond"):
        context = command.make_context(name, [], resilient_parsing=True)
        records = [(p, p.get_help_record(context)) for p in command.params]
        rows = [f"| `{text[0]}` | {plain(text[1])} |" for p, text in records if text and p.name != "help"]
        table = "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
        parts.append(f"## {name}\n\n{help_text(command.help or '')}\n{table}\n")
    return "\n".join(parts)


def leaves(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands under a group with what is typed to reach them."""
    for own, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{name} {own}")
        else:
            yield f"{name} {own}", command


def help_text(text: str) -> str:
    """Paragraphs of a help; examples become blocks of code."""
    parts = []
    for paragraph in inspect.cleandoc(text).replace("\b\n", "").split("\n\n"):
        example = re.match(r"Examples?:\s*(.*)", paragraph, re.DOTALL)
        code = example[1] if example else paragraph
        if example or code.startswith("hesscond ") or re.match(r"  ", code):
            lines = "\n".join(line.strip() for line in code.splitlines())
            parts.append(f"```sh\n{lines}\n```\n" if lines else "")
        else:
            parts.append(plain(paragraph) + "\n")
    return "\n".join(parts)


def plain(text: str) -> str:
    """A text for people as Markdown: characters that mean something there are escaped."""
    return re.sub(r"([|<*\[\]])", r"\\\1", " ".join(text.split()))


# -- the study file ---------------------------------------------------------------------------------------------------


def study_file() -> str:
    """Every table and key of a study file, from the models that check it."""
    parts = ["\n".join(section("", StudyConfig, "## Top level"))]
    parts.append("## Networks\n\nValues of `model.name`, and the options that each takes in `[model]`.\n")
    parts.append("| name | inputs | | options |\n|---|---|---|---|")
    parts += [f"| `{n}` | {m.kind} | {plain(m.summary)} | {settings(m.options)} |" for n, m in sorted(MODELS.items())]
    parts.append("\n## Data sets\n\nValues of `data.name`, and the options that each takes in `[data]`.\n")
    parts.append("| name | samples | options |\n|---|---|---|")
    parts += [
        f"| `{n}` | {'coordinates' if n == 'csv' else data.form(n).kind} | {settings(data.options(n))} |"
        for n in sorted(data.names())
    ]
    return "\n".join(parts) + "\n"


def sweep_file() -> str:
    """Every key of a sweep's file."""
    keys = {name: field for name, field in SweepConfig.model_fields.items() if name != "study"}
    rows = "\n".join(key_row(name, field) for name, field in keys.items())
    return f"{prose(inspect.getdoc(SweepConfig) or '')}\n{KEYS}\n{rows}\n"


def settings(options: Mapping[str, Any]) -> str:
    """Options with their defaults."""
    return ", ".join(f"`{name} = {toml(value)}`" for name, value in options.items()) or "–"


def section(path: str, model: type[BaseModel], title: str) -> Iterator[str]:
    """A table of the file, and after it those inside it."""
    yield f"{title}\n"
    yield prose(re.sub(r"^``\[+\w+\]+``(?:: )?", "", inspect.getdoc(model) or ""))
    keys, inside = [], []
    for name, field in model.model_fields.items():
        own = [a for a in alternatives(field.annotation) if is_section(element(a))]
        if own:
            inside.extend((f"{path}{field.alias or name}", one) for one in own)
        else:
            keys.append(key_row(field.alias or name, field))
    if keys:
        yield KEYS
        yield "\n".join(keys) + "\n"
    for name, kind in inside:
        brackets = f"[[{name}]]" if get_origin(kind) is list else f"[{name}]"
        yield from section(f"{name}.", element(kind), f"## `{brackets}`")


def key_row(name: str, field: FieldInfo) -> str:
    """Name, type with its constraints, and default of a key."""
    if field.is_required():
        default = "needed"
    elif field.default is not PydanticUndefined:
        default = "–" if field.default in (None, "", [], {}) else f"`{toml(field.default)}`"
    else:
        default = f"`{toml(field.get_default(call_default_factory=True))}`"
    limits = ", ".join(constraints(field.metadata))
    kind = limited(type_words(field.annotation), limits)
    return f"| `{name}` | {kind} | {default} |"


def type_words(kind: Any) -> str:
    """What a value may be, in words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        limits = ", ".join(constraints(inside[1:]))
        return limited(type_words(inside[0]), limits)
    if origin is Literal:
        return "one of " + ", ".join(f"`{toml(word)}`" for word in inside)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(type_words(k) for k in inside if k is not type(None)))
    if origin in (list, tuple):
        return (
            f"list of {type_words(inside[0])}s" if inside and inside[0] in WORDS else f"list of {type_words(inside[0])}"
        )
    if origin is dict:
        return f"table, name = {type_words(inside[1])}" if inside[1:] != (Any,) else "table"
    return WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def limited(kind: str, limits: str) -> str:
    """A type with its limits."""
    return kind + (" " if limits[:1] in "<>≤≥" else ", ") + limits if limits else kind


def constraints(metadata: Any) -> Iterator[str]:
    """The limits in pydantic's metadata, in words."""
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from constraints(one.metadata)
        for attribute, words in BOUNDS.items():
            limit = getattr(one, attribute, None)
            if limit is not None and not (isinstance(limit, (int, float)) and abs(limit) > LARGE):
                yield words.format(str(limit).replace("|", "\\|"))


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(kind) is typing.Annotated:
        return alternatives(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def element(kind: Any) -> Any:
    """What a list is a list of, or the type itself."""
    return get_args(kind)[0] if get_origin(kind) is list else kind


def is_section(kind: Any) -> bool:
    """Whether it is a table of the file."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def toml(value: Any) -> str:
    """A value as one writes it in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


# -- the run folder ---------------------------------------------------------------------------------------------------


#: Meanings of columns that all tables have, and of those of one.
EVERYWHERE = {
    "iteration": "optimizer steps taken",
    "epoch": "passes over the training set completed",
    "data": "samples of the Hessian: batch or train",
    "layer": "name of the layer",
    "unit": "output unit of the layer, from 0",
    "kappa": "κ; inf if unresolved",
    "kappa_lower": "κ is at least this",
    "kappa_upper": "κ is at most this; inf if unresolved",
    "rank": "eigenvalues certainly nonzero",
    "nullity": "the others",
    "negative": "negative ones among those distinguished from zero",
    "resolved": "1 if the smallest nonzero eigenvalue was distinguished from zero, else 0",
    "solver": "how the eigenvalues were computed",
}
COLUMNS = {
    "training": {
        "loss": "mean loss of the mini-batch, before the step",
        "lr": "learning rate of the step, schedule included",
    },
    "evaluation": {
        "test_loss": "mean loss over the test set",
        "test_accuracy": "share of the test set that is classified correctly, 0 to 1",
        "test_top5": "share whose class is among the five largest outputs, 0 to 1; empty with fewer than ten classes",
        "test_class_accuracy": "mean over the classes of the share of each that is classified correctly",
        "test_psnr": "−10 log₁₀ of the mean squared error, in dB, where all values are in [0, 1]; else empty",
        "test_bits_per_character": "of a text: test_loss over ln 2; else empty",
    },
    "probe": {
        "iteration": "optimizer steps taken when it was measured",
        "layer": "as the study names it; network: all parameters together",
        "unit": "of the layer; empty: the Hessian is that of the whole block",
        "data": "samples of the Hessian: batch (the mini-batch about to be trained on) or train (the training set)",
        "kappa": "κ(H) in the plain parameters [b, w]; inf if unresolved",
        "kappa_preconditioned": "κ(PᵀHP) with P = U D from the raw statistics of the same samples, whatever the method",
        "kappa_own": "κ in the method's own coordinates: P of its step, a tangent space, … (vanilla: equal to kappa)",
        "kappa_D": "κ(D), D = diag(1, 1/σ) from the raw statistics of the same samples, dead features left out",
        "kappa_D_eps": "the same with Algorithm 2's ε₁, ε₂",
        "kappa_D_running": "κ(D) of the method's raw running statistics (empty where it has none)",
        "kappa_D_running_eps": "the same with ε₁, ε₂: the D that the step used",
        "dead": "input features constant over the samples (σ = 0)",
        "coordinates": "the coordinates of kappa_own; where they are not defined, the reason",
        "lambda_max_own": "largest |λ| of the Hessian in the method's own coordinates",
        "kappa_diagonal_lower": "a bound that no κ(DHD) with a diagonal D is below (see optima in [probe])",
        "kappa_diagonal_upper": "the smallest κ(DHD) that was found",
        "kappa_kronecker_lower": "a bound that no κ((L⊗R)ᵀH(L⊗R)) is below",
        "kappa_kronecker_upper": "the smallest one that was found",
        "trace": "of H in the plain parameters",
        "rank": "rank of H; with nullity it adds up to n_params",
        "samples": "samples that the Hessian is a mean over",
        "n_params": "parameters of the unit, bias included",
        "kappa_lower": "κ(H) is at least this",
        "kappa_upper": "κ(H) is at most this; inf if unresolved",
        "kappa_preconditioned_lower": "κ(PᵀHP) is at least this",
        "kappa_preconditioned_upper": "κ(PᵀHP) is at most this; inf if unresolved",
        "kappa_own_lower": "kappa_own is at least this",
        "kappa_own_upper": "kappa_own is at most this; inf if unresolved",
        "negative": "negative eigenvalues of H",
        "resolved": "1 if κ(H) is resolved, else 0",
        "lambda_max": "largest |λ| of H",
        "lambda_min": "smallest |λ| of H that was distinguished from zero",
        "rank_preconditioned": "rank of PᵀHP",
        "resolved_preconditioned": "1 if κ(PᵀHP) is resolved, else 0",
        "rank_own": "rank of the Hessian in the method's own coordinates",
        "resolved_own": "1 if kappa_own is resolved, else 0",
        "solver": "how the eigenvalues were computed: of H; in the method's own coordinates",
    },
    "statements": {
        "statement": "its id",
        "claim": "which of its claims",
        "known": "1 if the claim is known to be true, else 0",
        "status": "holds, violated, not-applicable or unresolved",
        "used": "how much of what is claimed was used: violated above 1",
        "reason": "the hypothesis that fails, or what is not resolved",
    },
    "readings": {"coordinates": "in which coordinates of the method, beside its own"},
}


def tables() -> str:
    """The tables of a run's log, column by column."""
    kinds = {"INTEGER": "integer", "REAL": "number", "TEXT": "text"}
    parts = [f"This is version {SCHEMA_VERSION} of the log; other versions are refused.\n"]
    for table, columns in TABLES.items():
        key = ", ".join(f"`{name}`" for name in ROW_KEYS.get(table, ("iteration",)))
        parts.append(f"## `{table}`\n\nOne row for each {key}.\n\n| column | | meaning |\n|---|---|---|")
        for name, kind in columns.items():
            parts.append(f"| `{name}` | {kinds[kind.split()[0]]} | {plain(meaning(table, name))} |")
        parts.append("")
    return "\n".join(parts)


def meaning(table: str, column: str) -> str:
    """What a column of the log holds; KeyError for one that nobody explained."""
    return (EVERYWHERE | COLUMNS[table])[column]


# -- expectations -----------------------------------------------------------------------------------------------------


def expressions() -> str:
    """Grammar, columns and functions of an expectation."""
    grammar = (inspect.getdoc(parser) or "").partition("::\n")[2]
    parts = [
        f"## Grammar\n\n```text\n{inspect.cleandoc(grammar)}\n```\n",
        "## Columns\n\n| table | columns |\n|---|---|",
    ]
    for table in parser.READ:
        names = ", ".join(f"`{name}`" for name, own in parser.COLUMNS.items() if own == table)
        parts.append(f"| `{table}` | {names} |")
    parts.append("\n## Functions\n\n| | |\n|---|---|")
    for names, meaning in (
        (parser.AGGREGATES, "one value for all rows; `last` and `first`: for each layer, unit and kind of data"),
        (parser.OF_TRUTHS, "take a comparison, the others a number"),
    ):
        parts.append(f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |")
    return "\n".join(parts) + "\n"


# -- Python -----------------------------------------------------------------------------------------------------------


def room(name: str) -> str:
    """The public names of a room from their docstrings, functions first."""
    module = importlib.import_module(name)
    return f"{prose(inspect.getdoc(module) or '')}\n" + "\n".join(
        documented(name, one) for one in sorted(public(module), key=lambda one: inspect.isclass(getattr(module, one)))
    )


def public(module: types.ModuleType) -> list[str]:
    """What a room offers beyond what `hesscond` itself does."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
    return [name for name in names if module is hesscond or name not in hesscond.__all__]


def documented(room: str, name: str) -> str:
    """A directive for one name; submodules and constants are left to the prose."""
    value = getattr(importlib.import_module(room), name)
    if inspect.isclass(value):
        return f"```{{eval-rst}}\n.. autoclass:: {room}.{name}\n   :members:\n   :inherited-members: {BASES}\n```\n"
    if callable(value):
        return f"```{{eval-rst}}\n.. autofunction:: {room}.{name}\n```\n"
    return ""


# -- figures ----------------------------------------------------------------------------------------------------------


def figures() -> str:
    """What can be drawn from runs."""
    return kinds(FIGURES)


def table_kinds() -> str:
    """What can be tabulated from runs."""
    return kinds(TABLE_KINDS)


def kinds(there: Mapping[str, Any]) -> str:
    """Names, what each shows and what it needs."""
    rows = [f"| `{name}` | {plain(kind.summary)} | {plain(kind.needs)} |" for name, kind in there.items()]
    return "\n".join(["| | what it shows | of |", "|---|---|---|", *rows])


GENERATED: dict[str, Callable[..., str]] = {
    "commands": commands,
    "study-file": study_file,
    "sweep-file": sweep_file,
    "tables": tables,
    "expressions": expressions,
    "figures": figures,
    "table-kinds": table_kinds,
    "room": room,
}
MARKER = re.compile(r"<!-- generated: ([a-z-]+) ?([\w.]*) -->")


def filled_in(page: str) -> str:
    """A page with its marks replaced by what they stand for."""
    return MARKER.sub(lambda mark: GENERATED[mark[1]](*mark[2].split()), page)

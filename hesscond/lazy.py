"""Names that are imported when they are first used, modules that register what they define, optional packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from hesscond.errors import GONE, ConfigError

#: Optional modules, with the names that pip knows them by and the extra of hesscond that has them.
OPTIONAL = {
    "matplotlib": ("matplotlib tueplots", "figures"),
    "tueplots": ("tueplots", "figures"),
    "sklearn": ("scikit-learn", "studies"),
    "pooch": ("pooch", "studies"),
    "jinja2": ("jinja2", "reports"),
    "pyarrow": ("pyarrow", "parquet"),
    "PIL": ("pillow", "images"),
    "tensorboard": ("tensorboard", "watch"),
    "wandb": ("wandb", "watch"),
    "mlflow": ("mlflow", "watch"),
    "lightning": ("lightning", "lightning"),
    "transformers": ("transformers accelerate", "transformers"),
    "distributed": ("distributed", "dask"),
}


@contextmanager
def optional(purpose: str) -> Iterator[None]:
    """Context of imports that ``purpose`` needs; a ConfigError says what to install if a package is missing."""
    try:
        yield
    except ImportError as error:
        module = next((part for part in (error.name or "").split(".") if part in OPTIONAL), None)
        if module is None:
            raise
        packages, extra = OPTIONAL[module]
        raise ConfigError(f"{purpose} needs {module}: pip install {packages} (extra {extra!r})") from None


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that has its imports below ``if TYPE_CHECKING``.

    A name in those imports is imported from there; any other name is a module of the package. ``package`` is its
    ``__name__``.
    """

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(one.module) for one in imports for alias in one.names}

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in homes():
            with optional(f"{package}.{name}"):
                found = getattr(import_module(homes()[name]), name)
            setattr(sys.modules[package], name, found)
            return found
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            gone = f": it is gone, {GONE[name]}" if name in GONE else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{gone}") from None

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return get, names


def imported(package: str) -> list[ModuleType]:
    """Modules of a package, imported in the order of their names; ``package`` is its ``__name__``."""
    found = iter_modules(sys.modules[package].__path__, f"{package}.")
    return [import_module(module.name) for module in found if not module.ispkg]


@cache
def load_installed(group: str) -> None:
    """Import the modules that other packages name as entry points of a group, such as ``hesscond.methods``."""
    from importlib.metadata import entry_points

    for point in entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            what = group.rpartition(".")[2]
            raise ConfigError(f"the {what} of {point.value} cannot be imported: {error}") from error

"""Names that are imported when they are first used, modules that register what they define, optional packages."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Generic, TypeVar

from hesscond.errors import ConfigError, DivergedError, HesscondError, did_you_mean, one_line, out_of_memory

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


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package: imports ``NAME as NAME`` are made when used."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in homes:
            with optional(f"{package}.{name}"):
                attribute = getattr(import_module(homes[name]), name)
            setattr(sys.modules[package], name, attribute)
            return attribute
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names, sorted(homes)


def imported(package: str) -> list[ModuleType]:
    """Modules of a package, imported in the order of their names; ``package`` is its ``__name__``."""
    modules = iter_modules(sys.modules[package].__path__, f"{package}.")
    return [import_module(module.name) for module in modules if not module.ispkg]


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


#: A piece in a file of the user's.
IN_FILE = re.compile(r"(.+\.py):([^\W\d]\w*)")
#: Path of its file, and what follows: its name, and options of a method.
PATH = re.compile(r"(.{1,200}\.py)(:\S+)")
Piece = TypeVar("Piece")


def located(text: str, *folders: Path) -> str:
    """Text with the absolute path of each ``FILE.py:NAME`` whose file is in one of the folders or the current one."""

    def absolute(part: str) -> str:
        if (given := PATH.fullmatch(part)) is None:
            return part
        places = [(folder / given[1]).expanduser().resolve() for folder in (*folders, Path())]
        file = next((place for place in places if place.is_file()), None)
        # a sign between methods cannot be in a path
        return part if file is None or "+" in str(file) else f"{file}{given[2]}"

    return "+".join(map(absolute, text.split("+")))


def without_folders(text: str) -> str:
    """Text without the folders of ``FILE.py:NAME``."""
    return re.sub(r"[^+]*/(?=[^/+]+\.py:)", "", text)


#: The package.
OURS = Path(__file__).parent
#: Folders of code that is not the user's, even if the user's folder contains them.
FOREIGN = tuple(
    Path(folder).resolve() for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(OURS))
)
#: hesscond watches the operations of a model: these frames are passed on the way to the operation that failed.
PASSED = ("__torch_function__", "in_float64")


def defaults(parameters: Collection[inspect.Parameter]) -> dict[str, Any]:
    """Defaults of the options of a function; a whole number is a float where the annotation is."""
    is_float = {p.name: p.annotation in (float, "float") and isinstance(p.default, int) for p in parameters}
    return {p.name: float(p.default) if is_float[p.name] else p.default for p in parameters}


@contextmanager
def own_code(*pieces: str, on: str = "") -> Iterator[None]:
    """Context that calls pieces of the user's: an exception out of them is a `ConfigError` with its place in the file.

    ``pieces``: their names; nothing is changed where no ``FILE.py:NAME`` is among them. ``on``: what they are called
    with, for an exception without a place in the file, as from torch in a `torch.nn.Sequential` of theirs.
    """
    try:
        yield
    except (HesscondError, DivergedError):
        raise
    except (Exception, SystemExit) as error:
        own = {match[0]: Path(match[1]) for piece in pieces for match in map(PATH.fullmatch, piece.split("+")) if match}
        # the first two frames are this one and that of the block
        frames = traceback.extract_tb(error.__traceback__)[2:]
        mine = [any(is_users(frame.filename, file.parent) for file in own.values()) for frame in frames]
        below = frames[len(mine) - mine[::-1].index(True) :] if any(mine) else frames
        # what they call of hesscond by themselves is given by them; what torch calls is not
        called = next((k for k, frame in enumerate(below) if not is_ours(frame)), len(below)) if any(mine) else 0
        if not own or out_of_memory(error) or any(map(is_ours, below[called:])):
            raise
        places = (user_failure(error, file) for file in own.values())
        names = " or ".join(map(without_folders, own))
        raise ConfigError(next(filter(None, places), f"{names} raised {one_line(error)}{on}")) from error


def is_ours(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is in the code of hesscond, and at work by itself."""
    return Path(frame.filename).is_relative_to(OURS) and frame.name not in PASSED


def user_failure(error: BaseException, path: Path) -> str | None:
    """Sentence on the place of an exception in the code of ``path`` or of modules in its folder; None: elsewhere."""
    folder = path.expanduser().resolve().parent
    # zero bytes have no place
    if isinstance(error, SyntaxError) and is_users(file := error.filename or str(path), folder):
        return f"{shown(file, path)}:{error.lineno or 1} is not valid Python: {error.msg}"
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
    frames = [(code, line) for code, line in frames if is_users(code.co_filename, folder)]
    if not frames:
        return None
    code, line = frames[-1]
    # what is noted on an exception says where it was by itself
    known = code.co_name == "<module>" or hasattr(error, "__notes__")
    where = "" if known else f" (in {code.co_qualname.replace('<locals>.', '')})"
    return f"{shown(code.co_filename, path)}:{line} raised {one_line(error)}{where}"


def is_users(file: str, folder: Path) -> bool:
    """Whether a file of code is in the folder and is not part of Python, of an installed package or of hesscond."""
    path, folder = Path(file).resolve(), folder.expanduser().resolve()
    installed = "site-packages" in path.parts or any(path.is_relative_to(foreign) for foreign in FOREIGN)
    return path.is_relative_to(folder) and not installed and not file.startswith("<")


def shown(file: str, path: Path) -> str:
    """Name of a file in or below the folder of ``path``, written relative to the same folder as ``path``."""
    return str(path.parent / Path(file).resolve().relative_to(path.expanduser().resolve().parent))


@cache
def module_in(file: Path) -> ModuleType:
    """Module of a file of the user's, which is run once; it may import the files next to it."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    module = sys.modules[f"hesscond_file_{file.stem}"] = ModuleType(f"hesscond_file_{file.stem}")
    module.__file__ = str(file)
    sys.path.insert(0, str(file.parent))
    try:
        # not by the import system, which would leave a folder of bytecode next to the file
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{file} cannot be imported: {one_line(error)}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


class Registry(dict[str, Piece], Generic[Piece]):
    """Pieces of one kind by name: registered, of installed packages, and ``FILE.py:NAME``, checked by ``made``."""

    def __init__(self, kind: str, group: str, factory: Callable[[str, Any], Piece]) -> None:
        super().__init__()
        self.kind, self.group, self._made = kind, group, factory
        self._from_files: dict[str, Piece] = {}

    def __missing__(self, name: str) -> Piece:
        match = IN_FILE.fullmatch(name)
        if match is None:
            load_installed(self.group)
            if dict.__contains__(self, name):
                return self[name]
            raise KeyError(name)
        if name not in self._from_files:
            module = module_in(Path(match[1]).expanduser().resolve())
            if not hasattr(module, match[2]):
                module_name = module.__name__
                names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
                raise ConfigError(f"{match[1]} has no {match[2]!r}: {did_you_mean(match[2], names)}")
            self._from_files[name] = self._made(name, getattr(module, match[2]))
        return self._from_files[name]

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[name] is not None
        except KeyError:
            return False

    def add(self, name: str, piece: Piece) -> None:
        """Register a piece; a ConfigError if the name is taken."""
        if dict.__contains__(self, name):
            raise ConfigError(f"a {self.kind} named {name!r} is registered already")
        self[name] = piece

    def find(self, name: str) -> Piece:
        """Return the piece called ``name``; a ConfigError if there is none."""
        try:
            return self[name]
        except KeyError:
            raise ConfigError(f"unknown {self.kind} {name!r}: {did_you_mean(name, sorted(self))}") from None

    def installed(self) -> list[Piece]:
        """Return all pieces that are registered, those of installed packages among them, by name."""
        load_installed(self.group)
        return [self[name] for name in sorted(self)]


def subclass_of(base: type[Any]) -> Callable[[str, Any], Any]:
    """Function that takes an object if it is a subclass of ``base``, for a `Registry` of classes."""

    def checked(name: str, candidate: Any) -> Any:
        if isinstance(candidate, type) and issubclass(candidate, base):
            declared = (key for key in base.__annotations__ if not hasattr(candidate, key))
            if lacking := [*declared, *sorted(getattr(candidate, "__abstractmethods__", ()))]:
                raise ConfigError(f"{name} lacks {', '.join(lacking)}")
            return candidate
        raise ConfigError(f"{name} is no subclass of {base.__module__.rpartition('.')[0]}.{base.__name__}")

    return checked

"""The house: each room imports only from the rooms before it, and the engine needs no study dependencies."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import hesscond

PACKAGE = Path(hesscond.__file__).parent
ORDER = [
    *("errors", "lazy", "causes", "sheets", "runs", "operators", "problem", "capture", "spectra", "scaling"),
    *("hessians", "methods", "probing", "theorems", "models", "data", "study", "expectations", "testing", "report"),
    *("watching", "integrations", "commands", "cli"),
]
#: spectra is numbers only, models and data know nothing of Hessians
FORBIDDEN = {
    "runs": set(ORDER) - {"errors", "lazy", "sheets", "runs"},
    "operators": set(ORDER) - {"errors", "lazy", "operators"},
    "problem": {"runs", "operators", "sheets"},
    "spectra": {"problem", "capture"},
    "scaling": {"problem", "capture"},
    "models": set(ORDER) - {"errors", "lazy", "models"},
    "data": set(ORDER) - {"errors", "lazy", "data"},
}


@functools.cache
def statements(path):
    """The imports of a module, those within functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(path):
    for node in statements(path):
        if isinstance(node, ast.ImportFrom) and node.module == "hesscond":
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hesscond."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_room_imports_only_from_those_before_it(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room not in ORDER:
        return
    allowed = set(ORDER[: ORDER.index(room) + 1]) - FORBIDDEN.get(room, set())
    assert set(imports(path)) <= allowed


def test_the_root_holds_doors_only():
    assert len(list(PACKAGE.glob("*.py"))) <= 7


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_at_most_forty_names_of_the_package(path):
    own = [n for n in statements(path) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("hesscond")]
    assert path == PACKAGE / "__init__.py" or sum(len(node.names) for node in own) <= 40


#: Functions that make tensors on the default device unless a device is given.
FACTORIES = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"),
        *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    }
)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_tensors_are_made_on_a_stated_device(path):
    """Else `torch.set_default_device` moves them; parameters of our own networks are to follow it."""
    if path.parent.name == "models":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            assert not of_torch or any(word.arg == "device" for word in node.keywords), ast.unparse(node)


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_one_that_imports_it():
    """Imports within functions and for type checkers count too."""
    paths = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        found = set()
        for node in statements(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {full if (full := f"{node.module}.{one.name}") in paths else node.module for one in node.names}
            elif isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
        graph[name] = found & paths.keys() - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_spectra_knows_nothing_of_networks():
    for path in (PACKAGE / "spectra").glob("*.py"):
        assert "torch.nn" not in path.read_text(encoding="utf-8")


def test_the_engine_imports_without_the_dependencies_of_the_studies():
    code = (
        "import sys\n"
        "for name in ('pandas', 'pydantic', 'typer', 'rich', 'matplotlib', 'pooch', 'sklearn', 'tomli_w'):\n"
        "    sys.modules[name] = None\n"
        "import hesscond, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 2))\n"
        "r = hesscond.probe(model, torch.nn.CrossEntropyLoss(), (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])))\n"
        "print(float(r['0'].kappa[0]) > 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr

"""What is imported, and what is not: the commands that only read files answer before torch would have been imported."""

import pkgutil
import subprocess
import sys

import pytest

import hesscond
from hesscond import cli

#: Packages that only some parts of hesscond use; and torch's compiler, which takes a second to import.
SOMETIMES = (
    "pandas",
    "matplotlib",
    "rich",
    "typer",
    "pydantic",
    "sklearn",
    "jinja2",
    "sqlite3",
    "PIL",
    "pooch",
    "requests",
    "torch._dynamo",
    "scipy.optimize",
    "hesscond.study",
    "hesscond.theorems",
)


def imported(code, *arguments):
    """The modules that are there after the code was run in a new interpreter."""
    code += "\nimport sys\nprint('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with statements checked."""
    folder = tmp_path_factory.mktemp("started") / "run"
    options = ["--method", "bnp", "--iterations", "2", "--probe-every", "1", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hesscond", "study", "fc-digits", *options])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
    return folder


LINES = [
    "--help",
    "--version",
    "studies",
    "runs RUN",
    "table summary RUN",
    "table seeds RUN --format csv",
    "figure --help",
    "figure conditioning RUN -o FILE.png",
    "export RUN",
    "export RUN --table training --format json",
    "check RUN --expect loss>0",
]
#: Runs the lines that it is given one after another, and says which of them imported torch.
READER = """
import sys
from hesscond.cli import main

for line in sys.argv[1:]:
    sys.argv = ["hesscond", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
    assert "torch" not in sys.modules, line
"""


def test_commands_that_read_files_do_not_import_torch(run, tmp_path):
    lines = [line.replace("RUN", str(run)).replace("FILE", str(tmp_path / "file")) for line in LINES]
    assert "torch" not in imported(READER, *lines)


PROBED = """
import hesscond, hesscond.data, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
batch = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
for level in ("unit", "layer", "network"):
    for result in hesscond.probe(model, torch.nn.CrossEntropyLoss(), batch, level=level).values():
        result.conditions
"""


def test_the_package_imports_the_rest_when_it_is_used():
    assert not imported(PROBED).intersection(SOMETIMES)


def test_every_public_name_is_there():
    for name in hesscond.__all__:
        assert name in dir(hesscond)
        assert callable(getattr(hesscond, name))
    assert hesscond.testing.__name__ == "hesscond.testing"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hesscond.nothing  # noqa: B018


def test_no_module_has_the_name_of_a_public_name():
    """It would take its place as soon as it is imported."""
    assert not {module.name for module in pkgutil.iter_modules(hesscond.__path__)}.intersection(hesscond.__all__)

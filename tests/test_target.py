"""Loading FILE.py:FUNCTION: what it returns, what it leaves behind, and every way it can be wrong."""

import random
import re
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.commands.target import Stream, Target, load_target
from hesscond.errors import ConfigError

GOOD = """
import torch
from torch import nn
def make():
    return nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the working directory."""
    monkeypatch.chdir(tmp_path)

    def into(text, name="net.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
        return path

    return into


def returning(text):
    return (
        f"import torch\nfrom torch import nn\nx, y = torch.zeros(4, 3), torch.zeros(4)\ndef make():\n    return {text}"
    )


def test_model_loss_and_data(write):
    path = write(GOOD)
    for spec in ("net.py:make", f"{path}:make"):
        target = load_target(spec)
        assert isinstance(target, Target)
        assert isinstance(target.model, nn.Linear)
        assert isinstance(target.loss_fn, nn.CrossEntropyLoss)
        inputs, targets = target.data
        assert (inputs.shape, targets.shape, target.samples) == ((5, 3), (5,), "5 samples")


def test_nothing_is_left_behind(write):
    write("value = 1", "beside.py")
    write("value = 2", "package/__init__.py")
    write(GOOD + "import beside\nfrom .beside import value\nfrom package import value as other\n")
    search, modules = list(sys.path), set(sys.modules)
    load_target("net.py:make")
    assert sys.path == search
    assert set(sys.modules) == modules
    write(GOOD + "raise ValueError")
    with pytest.raises(ConfigError):
        load_target("net.py:make")
    assert sys.path == search
    assert set(sys.modules) == modules


@pytest.mark.parametrize("statement", ["import beside", "from . import beside", "from .beside import value"])
def test_siblings_of_each_folder(write, statement):
    for folder, value in (("a", 3), ("b", 4)):
        write(f"value = {value}", f"{folder}/beside.py")
        text = GOOD.replace("nn.Linear(3, 2)", "nn.Linear(3, value)")
        write(f"{statement}\n{'' if 'value' in statement else 'value = beside.value'}\n{text}", f"{folder}/net.py")
        assert load_target(f"{folder}/net.py:make").model.out_features == value


def test_a_file_changed_at_once_is_read_again(write):
    for width in (2, 3, 4):
        write(GOOD.replace("nn.Linear(3, 2)", f"nn.Linear(3, {width})"))
        assert load_target("net.py:make").model.out_features == width


def test_a_file_named_as_a_module_and_a_dataclass_in_it(write):
    write(f"from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A: x: int\n{GOOD}")
    (write(GOOD).parent / "net.py").rename(write(GOOD).parent / "random.py")
    assert load_target("random.py:make").samples == "5 samples"
    assert sys.modules["random"] is random


def test_seed(write):
    write(
        "import random, numpy, torch\nfrom torch import nn\ndrawn = random.random(), numpy.random.rand()\n"
        "def make():\n    return nn.Linear(3, 2), lambda *a: drawn, (torch.randn(2, 3), 0)\n"
    )
    one, two, other = (load_target("net.py:make", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.model.weight, two.model.weight)
    assert one.loss_fn() == two.loss_fn() != other.loss_fn()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = random.getstate()
    load_target("net.py:make")
    assert random.getstate() != before
    random.setstate(before)
    assert load_target("net.py:make").loss_fn()[0] == random.Random(1).random()


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        ("(x, y)", [4]),
        ("((x, x), (y, y))", [4]),
        ("({'a': x, 'b': x}, y)", [4]),
        ("[(x, y), (x, y)]", [4, 4]),
        ("[[x, y], [x[:1], y[:1]]]", [4, 1]),
        ("{'x': x, 'labels': y}", [4]),
        ("collections.UserDict(x=x, label=y)", [4]),
        ("((x[:n], y[:n]) for n in (3, 2, 1))", [3, 2, 1]),
        ("torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)", [3, 1]),
    ],
)
def test_kinds_of_data(write, data, samples):
    write("import collections\n" + returning(f"nn.Linear(3, 2), nn.MSELoss(), {data}"))
    target = load_target("net.py:make").to(torch.device("cpu"))
    if len(samples) == 1 and not isinstance(target.data, Stream):
        assert isinstance(target.data, tuple)
    else:
        for _ in range(2):
            assert [len(targets) for _, targets in target.data] == samples
    assert target.samples == f"{sum(samples)} samples"


def test_what_is_two_things_at_once_is_moved_once(write):
    """Labels that are among the inputs stay those of the target."""
    write(returning("nn.Linear(3, 2), nn.MSELoss(), [({'x': [x], 'labels': y}, y)], lambda inputs, target: 2"))
    target = load_target("net.py:make").to(torch.device("cpu", 0))
    ((inputs, labels),) = target.data
    assert inputs["labels"] is labels
    assert target.weight(inputs, labels) == 2


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nn.Linear(3, 2, device='meta'), nn.MSELoss(), (x, y)", "the model or the loss is on the meta device"),
        ("nn.Linear(3, 2), nn.NLLLoss(y.to('meta')), (x, y)", "the model or the loss is on the meta device"),
        ("nn.Linear(3, 2), nn.MSELoss(), ([x.to('meta')], y)", "the data are on the meta device"),
        (
            "nn.Linear(3, 2), nn.MSELoss(), [(x, y), (x, y), x]",
            "batch 2 of the data: the batch must be a pair .*, not a Tensor",
        ),
    ],
)
def test_values_that_are_nowhere(write, returned, words):
    write(returning(returned))
    with pytest.raises(ConfigError, match=words):
        list(load_target("net.py:make").to(torch.device("cpu")).data)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "must return (model, loss_fn, data) or (model, loss_fn, data, weight), but it returned None"),
        ("nn.Linear(3, 2)", "but it returned a Linear"),
        ("nn.Linear(3, 2), nn.MSELoss()", "but it returned a tuple of 2"),
        ("nn.MSELoss, nn.Linear(3, 2), (x, y)", "the model must be a torch.nn.Module, not the class MSELoss"),
        ("'net', nn.MSELoss(), (x, y)", "the model must be a torch.nn.Module, not a str"),
        ("nn.Linear(3, 2), nn.MSELoss, (x, y)", "the loss must be a callable (output, target), not the class MSELoss"),
        ("nn.Linear(3, 2), 'mse', (x, y)", "the loss must be a callable (output, target), not a str"),
        ("nn.Linear(3, 2), nn.MSELoss(), x", "must be a pair (inputs, targets) of tensors or a stream of such pairs"),
        ("nn.Linear(3, 2), nn.MSELoss(), x.numpy()", "a stream of such pairs, not a ndarray"),
        ("nn.Linear(3, 2), nn.MSELoss(), {'x': 1}", "must be tensors, or contain some, not a dict: torch.as_tensor"),
        ("nn.Linear(3, 2), nn.MSELoss(), ((x, y), (x, y))", "write [(a, b), (c, d)] for two batches"),
        ("nn.Linear(3, 2), nn.MSELoss(), [(x, y)], 3", "weight must be a function"),
        ("nn.Linear(3, 2), nn.MSELoss(), [(x, y)], None, 3", "but it returned a tuple of 5"),
        ("nn.Linear(3, 2), nn.MSELoss(), torch.utils.data.TensorDataset(x, y)", "wrap them in a DataLoader"),
    ],
)
def test_wrong_return_values(write, returned, words):
    write(returning(returned))
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_target("net.py:make")
    assert str(caught.value).startswith("net.py:make")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("net.py", "'net.py' is not of the form FILE.py:FUNCTION"),
        ("net.py:make()", "not of the form"),
        ("nte.py:make", "there is no file nte.py: did you mean net.py?"),
        ("nowhere/net.py:make", "there is no file nowhere/net.py"),
        (".:make", ". cannot be read: Is a directory"),
        (300 * "a" + ":make", "File name too long"),
        ("net.py:mkae", "net.py has no function 'mkae': did you mean make?"),
        ("net.py:zzz", "net.py has no function 'zzz': there is make"),
        ("net.py:torch", "'torch' in net.py is not a function but a module"),
    ],
)
def test_no_such_thing(write, spec, words):
    write(GOOD)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_target(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def make(:", "net.py:1 is not valid Python: invalid syntax"),
        ("\nimport nowhere_at_all", "net.py:2 raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def make():\n    raise ValueError('two\\nlines')", "net.py:2 raised ValueError: two lines"),
        ("import json\ndef make():\n    return json.loads('x')", "net.py:3 raised json.decoder.JSONDecodeError"),
        ("from torch import nn\nmake = nn.Linear(2, 1)", "net.py is not a function but a Linear"),
        ("raise SystemExit(3)", "net.py:1 raised SystemExit: 3"),
        ("import beside\ndef make():\n    return beside.fail()", "beside.py:2 raised ZeroDivisionError"),
        ("import broken", "broken.py:1 is not valid Python"),
        ("def make(size):\n    pass", "net.py:make must be callable without arguments, but it is make(size)"),
        ("import torch\ndef make():\n    return torch.zeros(2, 3) @ torch.zeros(2)", "net.py:3 raised RuntimeError: "),
    ],
)
def test_faults_of_the_file(write, text, words):
    folder = "deep/er/"
    write("def fail():\n    return 1 / 0", f"{folder}beside.py")
    write("def fail(:", f"{folder}broken.py")
    write(text, f"{folder}net.py")
    with pytest.raises(ConfigError, match=re.escape(folder + words)) as caught:
        load_target(f"{folder}net.py:make")
    assert "\n" not in str(caught.value)


def test_ctrl_c_is_not_a_fault(write):
    write("def make():\n    raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_target("net.py:make")

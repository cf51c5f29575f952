"""Data, networks, methods, statements and figures of a file of the user's, and CSV tables, from the command line."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import hesscond
from hesscond.data import load
from hesscond.errors import HesscondError
from hesscond.models import build
from hesscond.study import open_run

MINE = '''
import numpy as np
import torch
from torch import nn
from hesscond import Method
from hesscond.report import FigureKind
from hesscond.theorems import Claim, Outcome, Statement

def blobs(spread: float = 1.0, samples: int = 60, shift: float = -1.0):
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 3
    x = rng.standard_normal((samples, 4)) * spread + 3 * y[:, None]
    return x[:40], y[:40], x[40:], y[40:]

def bad(spread):
    pass

def short():
    return np.zeros((3, 2)), np.zeros(3)

def net(input_shape, outputs, width: int = 6, boom: int = 0, shift: float = -1, sizes: tuple = (0.5,)):
    """One hidden layer."""
    return nn.Sequential(nn.Linear(*input_shape, width), nn.Tanh(), nn.Linear(width, outputs))

class Halved(Method):
    """Half of the gradient."""
    name, summary, source = "halved", "half of the gradient", "-"

class Sum(Statement):
    """The trace is a sum."""
    id, title, source, text = "sum", "the trace is a sum", "a test", "tr A = Σ λ."
    hypotheses = ()
    claims = (Claim("sum", "tr A = Σ λ", True),)
    def trial(self, rng):
        A = rng.standard_normal((4, 4))
        return [Outcome("holds" if abs(np.linalg.eigvalsh(A + A.T).sum() - 2 * A.trace()) < 1e-12 else "violated")]

def draw(runs, *, page):
    from matplotlib.figure import Figure
    figure = Figure()
    figure.subplots().plot([run.last_loss for run in runs])
    return figure

LOSSES = FigureKind("losses", 1, "last losses", "runs", draw)
'''
STUDY = """
name = "own"
description = "mine"
[data]
name = "mine.py:blobs"
spread = 2.0
[model]
name = "mine.py:net"
width = 5
[training]
batch_size = 20
iterations = 4
[probe]
layers = ["2"]
units = "all"
"""


@pytest.fixture
def mine(workplace):
    (workplace / "mine.py").write_text(MINE)
    (workplace / "own.toml").write_text(STUDY)
    return workplace


def test_a_study_of_own_data_network_and_method_is_drawn_by_an_own_figure(mine, call_cli):
    done = call_cli("study", "own.toml", "-m", "mine.py:Halved", "--out", "out")
    assert done.code == 0, done.err
    run = open_run(mine / "out")
    assert run.method == "mine.py:Halved"
    assert len(run.table("probe")) > 0
    assert call_cli("figure", "mine.py:LOSSES", "out", "-o", "own.png").code == 0
    assert (mine / "own.png").stat().st_size > 1000
    verified = call_cli("verify", "mine.py:Sum", "--trials", 5, "--json")
    assert json.loads(verified.out)[0]["claims"][0]["holds"] == 5


def test_a_run_is_resumed_from_any_folder(mine, call_cli, monkeypatch):
    (mine / "t.csv").write_text("a,t\n" + "".join(f"{k},{k % 2}\n" for k in range(30)))
    (mine / "csv.toml").write_text(STUDY.replace('"mine.py:blobs"\nspread = 2.0', '"csv"\nfile = "t.csv"'))
    own = ["study", "own.toml", "-m", "mine.py:Halved", "--out", "out"]
    for arguments in (own, ["study", "csv.toml", "-m", "bnp", "--out", "rows"]):
        done = call_cli(*arguments)
        assert done.code == 0, done.err
    (mine / "elsewhere").mkdir()
    monkeypatch.chdir(mine / "elsewhere")
    # another file of this name must not be taken
    (mine / "elsewhere" / "mine.py").write_text("1 / 0")
    for folder in ("out", "rows"):
        done = call_cli("study", f"../{folder}/config.toml", "--resume", "--iterations", 6)
        assert done.code == 0, done.err
        assert open_run(mine / folder).iterations == 6
    again = ["study", "../own.toml", "-m", "../mine.py:Halved", "--iterations", 6, "--resume", "--out", "../out"]
    done = call_cli(*again)
    assert done.code == 0, done.err
    assert open_run(mine / "out").method == "mine.py:Halved"


def test_own_data_and_networks_are_what_the_functions_return(mine):
    data = load("mine.py:blobs", spread=2.0)
    x = np.random.default_rng(0).standard_normal((60, 4)) * 2 + 3 * (np.arange(60) % 3)[:, None]
    assert np.array_equal(torch.cat([data.train_inputs, data.test_inputs]).numpy(), x.astype(np.float32))
    assert data.form.classes == 3
    nets = [
        build("mine.py:net", input_shape=(4,), outputs=3, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)
    ]
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    assert not torch.equal(nets[0][0].weight, nets[2][0].weight)
    state = torch.get_rng_state()
    build("mine.py:net", input_shape=(4,), outputs=3)
    assert nets[0][2].weight.shape == (3, 6)
    load("mine.py:blobs", shift=-2.0)
    build("mine.py:net", input_shape=(4,), outputs=3, boom=0, shift=-1.5, sizes=[-0.5, 0])
    for option, value, words in (("boom", 0.5, "an integer"), ("shift", np.nan, "finite"), ("init_scale", -1.0, "not")):
        with pytest.raises(HesscondError, match=words):
            build("mine.py:net", input_shape=(4,), outputs=3, **{option: value})
    build("mine.py:net", input_shape=(4,), outputs=3, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("values", [False, True])
def test_a_table_is_split_into_all_its_rows(workplace, values):
    frame = pd.DataFrame({"a": range(20), "size": np.arange(20) / 2, "kind": ["no", "yes"] * 10, "count": range(1, 21)})
    frame.to_csv("t.csv", index=False)
    chosen = {"target": "count", "values": True, "columns": "a,size"} if values else {"target": "kind"}
    data = load("csv", file="t.csv", test=0.25, **chosen)
    inputs = torch.cat([data.train_inputs, data.test_inputs])
    assert (len(data.train_inputs), len(data.test_inputs)) == (15, 5)
    assert sorted(inputs[:, 0].tolist()) == list(range(20))
    rows = inputs[:, 0].long().numpy()
    targets = torch.cat([data.train_targets, data.test_targets]).flatten().numpy()
    assert np.array_equal(targets, (rows + 1 if values else rows % 2))
    assert inputs.shape[1] == (2 if values else 3)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mine.py:blob", {}, "mine.py has no 'blob': did you mean blobs?"),
        ("mine.py:bad", {}, "give 'spread' a default"),
        ("mine.py:short", {}, r"must return \(train_inputs, train_targets, test_inputs, test_targets\)"),
        ("broken.py:f", {}, "broken.py cannot be imported: ZeroDivisionError"),
        ("mine.py:blobs", {"spred": 1.0}, "no option 'spred': did you mean spread"),
        ("mine.py:blobs", {"shift": np.inf}, "shift must be a finite number, not inf"),
        ("csv", {"file": "no.csv"}, "there is no file no.csv"),
        ("csv", {"file": "t.csv", "target": "b"}, "no column 'b': it has a, w, t"),
        ("csv", {"file": "t.csv"}, "column 'w' of t.csv is not numeric"),
        ("csv", {"file": "holes.csv"}, "'a' of holes.csv has 1 empty cells"),
        ("csv", {"file": "t.csv", "columns": "a", "test": 0.01}, "leaves no training or no test samples"),
    ],
)
def test_bad_data_are_one_sentence(mine, name, options, words):
    (mine / "broken.py").write_text("1 / 0")
    (mine / "t.csv").write_text("a,w,t\n1,x,0\n2,y,1\n3,z,0\n")
    (mine / "holes.csv").write_text("a,t\n1,0\n,1\n")
    with pytest.raises(HesscondError, match=words):
        load(name, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("study own.toml -m mine.py:net", "mine.py:net is no subclass of hesscond.methods.Method"),
        ("verify mine.py:Halved", "no subclass of hesscond.theorems.Statement"),
        ("figure mine.py:net done -o f.png", "mine.py:net is no hesscond.report.FigureKind"),
        ("study own.toml -m nope.py:Halved", "there is no file"),
    ],
)
def test_what_is_of_another_kind_is_refused(mine, refused, arguments, words):
    refused(arguments.split(), words)


OWN = '"half of the gradient", "-"\n    def '
NET, METHOD = (f"study own.toml --lr 0.1 -m {method}" for method in ("vanilla", "mine.py:Halved"))
LAYER = "Sum(__import__('hesscond').theorems.LayerStatement):\n    def "
VERIFY, DRAW, OUTCOMES = "verify mine.py:Sum", "figure mine.py:LOSSES done -o f.png", "return [Outcome("


@pytest.mark.parametrize(
    ("arguments", "old", "new", "words"),
    [
        (NET, "nn.Linear(*input_shape", "nn.Linear(9", "mine.py:net raised RuntimeError: mat1 and mat2 shapes"),
        (NET, "width, outputs))", "width, outputs)).half()", "mat2 must have the same dtype, but got Float and Half"),
        (NET, "nn.Tanh()", "type('Mine', (nn.Tanh,), {'forward': lambda self, x: x.mine})()", "mine.py:23 raised Attr"),
        (NET, "nn.Linear(width, outputs)", "nn.Linear(width, 9)", "mine.py:net must return outputs (20, 3), but"),
        (NET, "return x[:40]", "return x[:40].astype(str)", "mine.py:blobs must be an array of numbers, a row"),
        (NET, "width, outputs))", "width, outputs), nn.Threshold(9, np.nan))", "loss is nan before the first step"),
        (METHOD, OWN[:27], f"{OWN}after_step(self): exit(0)", "mine.py:28 raised SystemExit: 0 (in Halved.after_step)"),
        (METHOD, OWN[:27], f"{OWN}optimizer(self, *_, **__): return 3", "must be a torch.optim.Optimizer, not 3"),
        (METHOD, OWN[:27], f"{OWN}penalty(self, _): return 'a'", "mine.py:Halved raised TypeError: unsupported oper"),
        (METHOD, OWN[:27], f"{OWN}preconditioner(self, _): return 3", "layer '2' must be Coordinates, not 3"),
        ("probe net.py:make --method mine.py:Halved", OWN[:27], f"{OWN}coordinates(self, _): return 3", "not 3"),
        (VERIFY, "A = rng", "A = 1 / 0 * rng", "mine.py:35 raised ZeroDivisionError"),
        (VERIFY, OUTCOMES, "return Outcome('holds'); [Outcome(", "trial of statement 'sum' must return a list"),
        (VERIFY, "def trial", "def trail", "mine.py:Sum lacks trial"),
        (f"{NET} --statement mine.py:Sum", "Sum(Statement):", f"{LAYER}observe(self, _): return 3", "observe of stat"),
        (DRAW, "    return figure", "    return", "must return a figure of matplotlib, not None"),
        (DRAW, ", *, page", "", "mine.py:LOSSES raised TypeError: draw() got an unexpected"),
    ],
)
def test_a_fault_of_an_own_piece_is_one_sentence(mine, stored, call_cli, arguments, old, new, words):
    assert MINE.count(old) == 1
    (mine / "mine.py").write_text(MINE.replace(old, new))
    done = call_cli(*arguments.replace("mine.py", str(mine / "mine.py")).split())
    assert done.code == (1 if "first step" in words else 2)
    assert words in done.err.splitlines()[-1]


def test_a_fault_of_ours_is_not_that_of_an_own_piece(mine, call_cli, monkeypatch):
    exec(compile("def broken(*_): raise TypeError('ours')", hesscond.__file__, "exec"), place := {})
    monkeypatch.setattr("hesscond.study.probing.kappa_columns", place["broken"])
    with pytest.raises(TypeError, match="ours"):
        call_cli(*NET.split())

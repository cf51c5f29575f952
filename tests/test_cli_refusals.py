"""What the commands refuse: one sentence, exit code 2, nothing printed and nothing left behind."""

import shlex

import pytest
import torch

from tests.cli_targets import NET, changed_study

TINY = "study tiny.toml --method bnp --out out"


def line_of(words):
    """The number of the line of `net.py` that has these words."""
    return next(number for number, line in enumerate(NET.splitlines(), 1) if words in line)


#: Arguments, and words of the sentence.
BAD = {
    "frobnicate": ["frobnicate"],
    # study
    "study": ["name", "study --help has examples"],
    "study nope -m bnp": ["unknown study 'nope'", "fc-digits"],
    "study nope.toml -m bnp": ["no study file nope.toml"],
    f"study {300 * 'a'}.toml -m bnp": ["too long"],
    "study tiny.toml": ["--method", "bnp", "vanilla"],
    f"{TINY} --frob 1": ["--frob"],
    f"{TINY} -m adamant": ["unknown method 'adamant'", "did you mean adam?"],
    f"{TINY} -m bnp": ["twice"],
    f"{TINY} --seed 0,0": ["twice"],
    f"{TINY} --seed -1": ["--seed", "-1"],
    f"{TINY} --seed {2**63}": ["--seed", str(2**63)],
    f"{TINY} --iterations 0": ["training.iterations: must be greater than 0"],
    f"{TINY} --iterations x": ["--iterations takes a whole number, not 'x'"],
    f"{TINY} --lr abc": ["--lr takes a number, not 'abc'"],
    f"{TINY} --iterations {21 * '9'}": ["iterations", 21 * "9"],
    f"{TINY} --epochs 1 --iterations 1": ["--epochs", "--iterations"],
    f"{TINY} --batch-size 1438 --lr 1": ["1438", "1437"],
    f"{TINY} --lr 1e39": ["--lr", "1e+39"],
    f"{TINY} --probe-every -1": ["probe.every", "-1"],
    f"{TINY} --device cuda:99": ["cuda:99", "does not exist"],
    f"{TINY} --statement van-der": ["unknown statement"],
    "study tiny.toml -m bnp --out tiny.toml": ["tiny.toml is a file"],
    "study tiny.toml -m bnp --out tiny.toml/below": ["tiny.toml/below", "Not a directory"],
    "study tiny.toml -m bnp --out /proc/hesscond-test": ["/proc/hesscond-test", "cannot be written"],
    "study tiny.toml -m bnp --out ..": ["not empty"],
    "study tiny.toml -m bnp --out .": ["is a folder of runs (done)"],
    "study tiny.toml -m bnp --out done": ["done holds a run: add --resume"],
    "study tiny.toml -m bnp --seed 0,1 --out done": ["done is itself a run, and cannot hold others: give another"],
    "study tiny.toml -m bnp --seed 0,1 --out done --resume": ["done is itself a run", "give another --out"],
    "study tiny.toml -m bnp --out done/in": ["done is itself a run"],
    "study fc-mnist -m bnp --data-dir tiny.toml": ["tiny.toml"],
    "study fc-mnist -m bnp --data-dir .": ["hesscond data fetch mnist", "no network"],
    "study fc-cifar10 -m bnp": ["hesscond data fetch cifar10", "no network"],
    "data fetch imagenet": ["imagenet", "cifar10"],
    "data fetch mnist --data-dir a --data-dir b": ["'--data-dir': it is given twice"],
    # sweep
    "sweep tiny.toml": ["name at least one method"],
    "sweep tiny.toml -m vanilla -m vanilla": ["methods: each may be given only once"],
    "sweep tiny.toml -m vanilla --seed 5:5": ["--seed 5:5"],
    "sweep tiny.toml -m vanilla --seed 0 --seed 1": ["'--seed': it is given twice: give it once"],
    "sweep tiny.toml -m vanilla --lr fast": ["--lr takes numbers"],
    "sweep tiny.toml -m vanilla --batch-size 5000 --lr 0.1": ["exceeds the 1437 training samples"],
    "sweep tiny.toml -m vanilla --jobs 0": ["--jobs must be at least 1"],
    "sweep tiny.toml -m vanilla --threads 0": ["--threads must be at least 1"],
    "sweep tiny.toml -m bnp --out done/in": ["done is itself a run"],
    "sweep runs/nothing": ["there is no folder runs/nothing, and no study of that name: see hesscond studies"],
    "sweep fc-digitz": ["there is no folder fc-digitz", "did you mean fc-digits?"],
    "sweep .": ["is not the folder of a sweep"],
    "sweep . -m vanilla": ["leave the other options out"],
    "sweep tiny.toml -m bnp:rho=2": ["rho must be at least 0 and below 1"],
    "replicate": ["hesscond replicate --list"],
    "replicate nope": ["unknown study 'nope'", "hesscond replicate --list"],
    # probe
    "probe": ["target"],
    "probe net.py:fail": [f"net.py:{line_of('raise ValueError')} raised ValueError: the [/data] are missing"],
    "probe net.py:bad_forward": [f"net.py:{line_of('+ missing')} raised NameError", "missing"],
    "probe net.py:bad_shape": ["net.py:bad_shape raised RuntimeError", "20x3", "in module '0'"],
    "probe net.py:in_place": ["torch cannot differentiate", "inplace operation", "set_detect_anomaly"],
    "probe net.py:twice": [f"net.py:{line_of('.square() +')} raised TypeError", "in the loss"],
    "probe net.py:keywords": ["forward(input) does not take the inputs", "'input'", "as one argument they raise"],
    "probe net.py:nested": ["nested tensor", "PackedSequence"],
    "probe net.py:bad_loss": [f"net.py:{line_of('no loss today')} raised RuntimeError: no loss today"],
    "probe net.py:bad_targets": ["IndexError: Target", "out of bounds"],
    "probe net.py:functional_loss": ["batch_size"],
    "probe net.py:no_layer": ["layer"],
    "probe net.py:make -l fc9": ["fc9"],
    "probe net.py:make --level unti": ["--level", "unit, layer", "'unti'"],
    "probe net.py:make --units 0": ["units were given without layers", "--layers"],
    "probe net.py:make -l 0 --units 0 --level layer": ["units were given at level 'layer'", "--level unit"],
    "probe net.py:make -l 0 --units 99": ["99"],
    "probe net.py:make -l 0 --units 0-99999999": ["--units", "more than 100,000"],
    "probe net.py:make -m adamant": ["adamant", "did you mean adam?"],
    "probe net.py:make --dtype float16": ["--dtype", "as-is"],
    "probe net.py:make --rtol nan": ["rtol must lie between 0 and 1, not nan"],
    "probe net.py:make --products 40": ["products are those with a whole network"],
    "probe net.py:make --products 3 --level network": ["--products 3 is too few", "10 or more"],
    "probe net.py:make --products 40 --level network --memory 1KB": [
        *("40 products with the Hessian of 74 parameters", "more than --memory", "--dtype as-is")
    ],
    "probe net.py:make --memory lots": ["memory must be", "2 GB", "lots"],
    "probe net.py:make --json --csv": ["--json", "--csv"],
    "probe net.py:make -o rows.txt": ["rows.txt", ".csv"],
    "probe net.py:make --figure a.docx": ["a.docx", ".pdf"],
    # verify
    "verify": ["give either statements", "or --all"],
    "verify wc-theorem-1 --all": ["give either statements", "or --all"],
    "methods SGD": ["gradient descent without a method is vanilla"],
    "table runs/a": ["unknown table 'runs/a': choose from summary"],
    "table a.py: runs/a": ["unknown table 'a.py:': choose from summary"],
    "figure runs/a": ["unknown figure 'runs/a': choose from equal-loss"],
    "verify nothing": ["unknown statement 'nothing': choose from"],
    "verify wc-theorem-1 --trials 0": ["--trials must be at least 1"],
    "verify wc-theorem-1 --seed -1": ["--seed must be"],
    "verify wc-theorem-1 --junit no/such/folder.xml": ["--junit", "--json"],
    # stored runs
    "runs nowhere": ["nowhere"],
    "table": ["kind"],
    "table summary": ["runs"],
    "table poem .": ["poem", "summary"],
    "export nowhere": ["nowhere"],
    "export done --table weights": ["'weights'", "training, evaluation, probe"],
    "export done --format parquet": ["-o"],
    "export done -o . --format csv": ["directory"],
    "export done -o a.xyz": ["--output a.xyz: its name must end in .csv, .json, .parquet"],
    "export done -o nowhere/a.csv": ["no folder nowhere"],
    "export done -o a.csv --format json": ["--format json and --output a.csv contradict each other"],
    "diff done done --layers fc2": ["--layers", "are for checkpoints"],
    "figure pie done -o a.pdf": ["'pie'", "conditioning"],
    "figure conditioning done -o nowhere/a.pdf": ["nowhere", "no folder"],
    "figure conditioning done": ["--output"],
    "figure rate done -o a.pdf": ["rate takes one statement: prec-theorem-1, bnp-theorem-1"],
    "figure rate --layer fc2 -o a.pdf": ["figure rate has no --layer"],
    "figure conditioning done -o a.pdf --layer fc1": ["fc1", "fc2"],
    "figure conditioning done -o a.pdf --unit -1": ["-1", "3"],
    "report done -o report.pdf": ["report.pdf", ".html"],
    "report done -o nowhere/report.html": ["no folder nowhere"],
    "report done --layer fc9": ["'fc9'", "not probed"],
    "report nothing": ["no folder nothing"],
    "report done/config.toml": ["done/config.toml is a file", "or done for all"],
    "check done": ["say what is expected"],
    "check done --expect 'kapa < 3'": ["at character 1, 'kapa' is not a column of the log: did you mean kappa?"],
    "check done --expect 'vanilla.kappa < 3'": ["none of the runs is of method 'vanilla': they are of bnp"],
    "check done --expect 'kappa[layer = fc1] < 3'": ["did you mean fc2?"],
    "check done --expect 'kappa < 200' --unresolved skip": ["fail, pass"],
}


@pytest.mark.parametrize("command", {line.split()[0]: None for line in BAD})
def test_bad_use(refused, stored, command):
    for line in BAD:
        if line.split()[0] == command:
            refused(shlex.split(line), *BAD[line])


@pytest.mark.parametrize("command", ["table summary .", "figure conditioning . -o a.pdf", "check . --expect kappa<1"])
def test_a_folder_without_runs(refused, workplace, command):
    refused(command.split(), "no run")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "tiny"', "name = [", ["not valid TOML"]),
        ('name = "tiny"', 'name = "tiny"\nnmae = 1', ["tiny.toml", "unknown key 'nmae'"]),
        ("hidden = [8]", "hidden = [999999999999]", ["999999999999", "cannot be built"]),
        ("vanilla = 0.1", "sgd = 0.1", ["unknown method 'sgd'"]),
        ("vanilla = 0.1", '"van\\nilla" = -0.1', ["greater than 0"]),
    ],
)
def test_bad_study_files(refused, workplace, old, new, words):
    changed_study(workplace / "tiny.toml", old, new)
    refused(TINY.split(), *words)


def test_study_files_that_are_something_else(refused, workplace):
    (workplace / "dir.toml").mkdir()
    (workplace / "binary.toml").write_bytes(bytes(range(256)))
    for name, word in (("dir.toml", "directory"), ("binary.toml", "not valid TOML")):
        refused(("study", name, "-m", "bnp"), name, word)
    refused(("probe", "binary.toml:make"), "binary.toml:1 is not valid Python")


def test_one_of_several_folders_is_taken(refused, workplace, stored):
    stored.folder.rename(workplace / "bnp-seed1")
    (workplace / "tiny.toml").replace(workplace.parent / "tiny.toml")
    several = ("study", "../tiny.toml", "-m", "bnp", "--seed", "0,1", "--out", ".")
    refused(several, "bnp-seed1 holds a run: add --resume")


def test_data_that_are_not_the_published_ones(refused, workplace):
    batches = workplace / "data" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    cifar = ("study", "fc-cifar10", "-m", "bnp", "--out", "out", "--data-dir", "data")
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        refused(cifar, "lacks", name, "hesscond data fetch cifar10")
        (batches / name).write_bytes(b"not CIFAR")
    refused(cifar, "data_batch_1", "md5", "hesscond data fetch cifar10")


@pytest.mark.parametrize("command", ["runs .", "table summary done"])
@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("run.sqlite", lambda content: content[:5000], ["run.sqlite"]),
        ("run.sqlite", lambda content: b"", ["run.sqlite"]),
        ("run.sqlite", lambda content: bytes(reversed(content)), ["run.sqlite"]),
        ("config.toml", lambda content: content[:30], ["config.toml", "damaged"]),
        ("config.toml", lambda content: content.replace(b"[run]", b"[ruin]"), ["config.toml", "'method'"]),
        ("config.toml", lambda content: b"\xff" + content, ["config.toml", "damaged"]),
    ],
)
def test_damaged_runs(refused, stored, command, file, damage, words):
    path = stored.folder / file
    path.write_bytes(damage(path.read_bytes()))
    refused(command.split(), *words)


def test_memory_that_ends_is_one_sentence(call_cli, workplace, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("hesscond.study.runner.Training.step", full)
    done = call_cli("study", "tiny.toml", "-m", "vanilla")
    assert done.code == 2
    assert "memory ended (torch.OutOfMemoryError: CUDA out of memory" in done.err
    assert "Traceback" not in done.err

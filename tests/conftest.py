import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from hesscond.data import load
from hesscond.errors import HesscondError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cifar10():
    """Real CIFAR-10, or a skip that says what is missing."""
    folder = os.environ.get("HESSCOND_DATA_DIR")
    if not folder:
        pytest.skip("HESSCOND_DATA_DIR is not set: it must name a folder with cifar-10-batches-py")
    try:
        return load("cifar10", folder, download=False)
    except HesscondError as error:
        pytest.skip(f"no CIFAR-10: {error}")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device(request.param)


@pytest.fixture
def call_cli(monkeypatch, capsys):
    """Call hesscond with arguments: code, out, err."""
    from hesscond import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hesscond", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit.value.code, out=out, err=err)

    return call

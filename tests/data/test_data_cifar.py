import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hesscond.data import load
from hesscond.data.sources import SOURCES
from hesscond.errors import CorruptDataError, DataNotFoundError


def assert_is(data, small):
    """Assert that `data` is the small stand-in, batch by batch in the order of the catalogue."""
    for batches, inputs, targets in (
        (small.train, data.train_inputs, data.train_targets),
        (small.test, data.test_inputs, data.test_targets),
    ):
        pixels = np.concatenate([small.pixels[batch] for batch in batches]).reshape(-1, 3, 32, 32)
        assert torch.equal(inputs, torch.from_numpy(pixels).float() / 255)
        assert targets.tolist() == [label for batch in batches for label in small.labels[batch]]
        assert targets.dtype == torch.int64


def test_a_folder_of_batches(small_cifar, tmp_path):
    folder = small_cifar.write_folder(tmp_path / "data")
    data = load(small_cifar.source.name, tmp_path / "data")
    assert_is(data, small_cifar)
    assert data.source == str(folder)
    assert data.classes == small_cifar.source.classes


def test_the_archive_is_read_in_place(small_cifar, tmp_path):
    archive = small_cifar.write_archive(tmp_path / "data")
    data = load(small_cifar.source.name, str(tmp_path / "data"))
    assert_is(data, small_cifar)
    assert data.source == str(archive)
    assert os.listdir(tmp_path / "data") == [archive.name]


def test_an_incomplete_folder_does_not_hide_the_archive(small_cifar, tmp_path):
    folder = small_cifar.write_folder(tmp_path)
    (folder / small_cifar.train[0]).unlink()
    archive = small_cifar.write_archive(tmp_path)
    assert load(small_cifar.source.name, tmp_path).source == str(archive)


def test_an_incomplete_folder_alone_is_named_in_the_error(small_cifar, tmp_path):
    batch = small_cifar.train[0]
    (small_cifar.write_folder(tmp_path) / batch).unlink()
    with pytest.raises(DataNotFoundError, match=rf"\({small_cifar.source.folder} lacks {batch}\)"):
        load(small_cifar.source.name, tmp_path, download=False)


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def test_a_wrong_batch_is_never_unpickled(small_cifar, tmp_path):
    name, batch = small_cifar.source.name, small_cifar.test[0]
    path = small_cifar.write_folder(tmp_path) / batch
    trace = tmp_path / "executed"
    path.write_bytes(pickle.dumps(Malicious(trace)))
    with pytest.raises(CorruptDataError) as caught:
        load(name, tmp_path)
    assert not trace.exists()
    sentence = str(caught.value)
    assert str(path) in sentence
    assert small_cifar.source.md5[batch] in sentence
    assert f"delete it and run `hesscond data fetch {name}`" in sentence
    assert "\n" not in sentence
    pickle.loads(path.read_bytes())  # the trap works: loading it would have been seen
    assert trace.exists()


def test_a_wrong_archive_is_never_opened(small_cifar, tmp_path, monkeypatch):
    archive = small_cifar.write_archive(tmp_path)
    archive.write_bytes(small_cifar.archive[:-1])
    monkeypatch.setattr(tarfile, "open", lambda *args, **kwargs: pytest.fail("the archive was opened"))
    with pytest.raises(CorruptDataError, match=small_cifar.source.archive.md5):
        load(small_cifar.source.name, tmp_path)


@pytest.mark.parametrize("write", ["write_folder", "write_archive"])
def test_an_unreadable_file_is_one_sentence(small_cifar, tmp_path, monkeypatch, write):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    getattr(small_cifar, write)(tmp_path)
    monkeypatch.setattr(Path, "open", deny)  # not chmod: root may read everything
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(DataNotFoundError, match=r"cannot be read \(Permission denied\): check its permissions"):
        load(small_cifar.source.name, tmp_path)


def test_the_catalogue_has_the_published_archives():
    assert SOURCES["cifar10"].archive.url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert list(SOURCES["cifar10"].md5) == [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    assert SOURCES["cifar100"].decode.keywords == {"label_key": b"fine_labels"}

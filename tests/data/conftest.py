"""Small stand-ins with their own checksums; and no test here reaches the network or the user's cache."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pooch
import pytest
import requests

from hesscond.data import published
from hesscond.data.sources import SOURCES

# Taken before the wall below removes it.
REAL_DATA = os.environ.get("HESSCOND_DATA_DIR")


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def requested_urls():
    """The addresses that the code under test tried to download from."""
    return []


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path, requested_urls):
    """An empty cache folder; no environment variable; a network that is down."""

    def no_network(self, url, output_file, pooch, check_only=False):
        requested_urls.append(url)
        raise requests.ConnectionError("a long story\nabout sockets")

    folder = tmp_path / "cache"
    monkeypatch.setattr(pooch, "os_cache", lambda project: folder)
    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", no_network)
    monkeypatch.delenv("HESSCOND_DATA_DIR", raising=False)
    return folder


@pytest.fixture
def real_data():
    """Return the folder with a real data set, or skip."""

    def folder_with(name):
        if REAL_DATA is None or SOURCES[name].find(Path(REAL_DATA)) is None:
            pytest.skip(f"set HESSCOND_DATA_DIR to a folder that holds the real {name}")
        return Path(REAL_DATA)

    return folder_with


class SmallCifar:
    """A data set in CIFAR-10's format with 3 images a batch, and the places it can be written to."""

    def __init__(self, name):
        source = SOURCES[name]
        rng = np.random.default_rng(0)
        self.pixels, self.labels, self.content = {}, {}, {}
        self.train, self.test = [*source.md5][:-1], [*source.md5][-1:]
        for batch in source.md5:
            self.pixels[batch] = rng.integers(0, 256, size=(3, 3072), dtype=np.uint8)
            self.labels[batch] = rng.integers(0, source.classes, size=3).tolist()
            # Protocol 0-2 and byte keys, like the originals, which Python 2 wrote.
            self.content[batch] = pickle.dumps(
                {b"data": self.pixels[batch], source.decode.keywords["label_key"]: self.labels[batch]}, protocol=2
            )
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            # Not in order, with a file that nobody asked for, as in the real archive.
            for file, content in [("readme.html", b"<html>"), *reversed(self.content.items())]:
                member = tarfile.TarInfo(f"{source.folder}/{file}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        self.archive = buffer.getvalue()
        self.source = replace(
            source,
            md5={batch: md5(self.content[batch]) for batch in source.md5},
            archive_md5=md5(self.archive),
        )

    def write_folder(self, directory):
        folder = directory / self.source.folder
        folder.mkdir(parents=True)
        for batch, content in self.content.items():
            (folder / batch).write_bytes(content)
        return folder

    def write_archive(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / self.source.archive.path
        path.write_bytes(self.archive)
        return path


@pytest.fixture(params=["cifar10", "cifar100"])
def small_cifar(request, monkeypatch):
    small = SmallCifar(request.param)
    monkeypatch.setitem(SOURCES, request.param, small.source)
    return small


class SmallIdx:
    """A data set in MNIST's format with 5 training and 2 test images."""

    def __init__(self, name, seed):
        rng = np.random.default_rng(seed)
        self.arrays = {
            file: rng.integers(0, 10 if len(shape) == 1 else 256, size=shape, dtype=np.uint8)
            for file, shape in published.IDX_SHAPES.items()
        }
        self.gz = {
            file: gzip.compress(struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.tobytes(), mtime=0)
            for file, a in self.arrays.items()
        }
        self.source = replace(SOURCES[name], md5={file: md5(content) for file, content in self.gz.items()})

    def write_gz(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self.gz.items():
            (folder / file).write_bytes(content)
        return folder


@pytest.fixture
def small_idx(monkeypatch):
    """Small stand-ins for MNIST and Fashion-MNIST, by name."""
    for file, (count, *rest) in list(published.IDX_SHAPES.items()):
        monkeypatch.setitem(published.IDX_SHAPES, file, (5 if count == 60_000 else 2, *rest))
    small = {"mnist": SmallIdx("mnist", 1), "fashion-mnist": SmallIdx("fashion-mnist", 2)}
    for name, own in small.items():
        monkeypatch.setitem(SOURCES, name, own.source)
    return small

"""Where data sets are looked for, what is downloaded, and what is said when there is nothing to load."""

from __future__ import annotations

import traceback
from pathlib import Path

import pooch
import pytest
import requests
import torch
import urllib3

from hesscond.data import Dataset, fetch, form, load, options
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError


@pytest.mark.parametrize("name", ["digits", "image-regression", "shapes", "text"])
def test_what_the_samples_are_is_known_without_loading(name):
    assert load(name).form == form(name)


def test_options_are_checked():
    assert options("mnist") == options("digits") == {}
    assert load("shapes", points=9, train=4, test=5).form == form("shapes", points=9)
    for arguments, sentence in (
        ({"name": "digits", "train": 3}, "has no option 'train'"),
        ({"name": "shapes", "every": 3}, "no option 'every': choose from train, test, points, noise, seed"),
        ({"name": "shapes", "train": 0}, "train must be an integer from 1, not 0"),
        ({"name": "shapes", "seed": -1}, "seed must be an integer from 0, not -1"),
        ({"name": "shapes", "noise": "much"}, "noise must be a number that is not negative, not 'much'"),
        ({"name": "image-regression", "photograph": 3}, "photograph must be a word, not 3"),
        ({"name": "nothing"}, "there is no data set 'nothing'"),
    ):
        for function in (load, form):
            with pytest.raises(ConfigError, match=sentence):
                function(**arguments)


@pytest.mark.parametrize("function", [load, fetch])
def test_an_unknown_name_lists_the_known_ones(function):
    with pytest.raises(ConfigError, match=r"'cifar': did you mean cifar10\?"):
        function("cifar")
    with pytest.raises(ConfigError, match=r"'qq': choose one of cifar10, cifar100, (csv, )?digits, fashion-mnist, "):
        function("qq")


def test_the_search_order(small_cifar, tmp_path, monkeypatch, cache):
    name = small_cifar.source.name
    explicit, environment = tmp_path / "explicit", tmp_path / "environment"
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(environment))
    small_cifar.write_archive(cache)
    assert Path(load(name).source).parent == cache  # the variable's folder does not even exist
    small_cifar.write_archive(environment)
    assert Path(load(name).source).parent == environment
    small_cifar.write_archive(explicit)
    assert Path(load(name, explicit).source).parent == explicit
    assert Path(load(name).source).parent == environment


def test_a_corrupt_copy_is_not_passed_over(small_cifar, tmp_path, monkeypatch, cache):
    small_cifar.write_archive(cache)
    small_cifar.write_archive(tmp_path / "environment").write_bytes(b"half a download")
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(tmp_path / "environment"))
    with pytest.raises(CorruptDataError):
        load(small_cifar.source.name)


def test_an_explicit_folder_without_the_data_is_not_replaced_by_another(small_cifar, tmp_path, cache):
    small_cifar.write_archive(cache)
    (tmp_path / "explicit").mkdir()
    for download in (False, True):
        with pytest.raises(DataNotFoundError) as caught:
            load(small_cifar.source.name, tmp_path / "explicit", download=download)
        assert str(tmp_path / "explicit") in str(caught.value)
        assert str(cache) not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, r"absent does not exist: make it, or give the folder that holds mnist"),
        (lambda path: path.write_text("a file"), r"absent is a file: give the folder that holds mnist"),
    ],
)
def test_an_explicit_folder_must_exist(tmp_path, requested_urls, make, words):
    make(tmp_path / "absent")
    with pytest.raises(DataNotFoundError, match=words):
        load("mnist", tmp_path / "absent")
    assert requested_urls == []


def test_what_can_be_fetched_is_offered_and_nothing_else():
    with pytest.raises(ConfigError, match=r"choose one of cifar10, cifar100, digits, fashion-mnist, mnist\."):
        fetch("imagenet")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist", "mnist"])
def test_no_data_and_no_network_is_one_sentence(name, tmp_path, monkeypatch, cache, capfd, requested_urls):
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(tmp_path / "gone"))
    with pytest.raises(DataNotFoundError) as caught:
        load(name)
    sentence = str(caught.value)
    assert f"{name} is not in {tmp_path / 'gone'} (no such folder) or {cache}" in sentence
    assert f"`hesscond data fetch {name}`" in sentence
    assert "ConnectionError" in sentence
    assert "fc-digits" in sentence
    assert "\n" not in sentence
    assert "sockets" not in sentence
    # What Python would show: this one error, without the chain of requests' and urllib3's.
    assert "During handling" not in "".join(traceback.format_exception(caught.value))
    assert len(requested_urls) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        requests.Timeout("slow"),
        requests.exceptions.InvalidURL("bad proxy"),
        urllib3.exceptions.ProtocolError("broken"),
        PermissionError(13, "Permission denied"),
        TimeoutError(),
    ],
)
def test_every_way_a_download_fails_is_the_same_error(error, monkeypatch):
    def fail(self, url, output_file, pooch, check_only=False):
        raise error

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", fail)
    with pytest.raises(DataNotFoundError, match=type(error).__name__):
        load("mnist")


def test_a_refused_download_gives_its_status(monkeypatch):
    response = requests.Response()
    response.status_code = 503

    def refuse(self, url, output_file, pooch, check_only=False):
        raise requests.HTTPError("503 Server Error", response=response)

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)
    with pytest.raises(DataNotFoundError, match="HTTPError: HTTP status 503"):
        fetch("cifar10")


def test_a_folder_that_cannot_be_made_is_the_same_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataNotFoundError, match="data fetch mnist"):
        fetch("mnist", tmp_path / "file")


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_without_download_nothing_is_requested(name, requested_urls):
    with pytest.raises(DataNotFoundError, match="downloading was not allowed"):
        load(name, download=False)
    assert requested_urls == []


@pytest.fixture
def served(monkeypatch):
    """A network that delivers the contents put into this dictionary, by address."""
    contents: dict[str, bytes] = {}

    def serve(self, url, output_file, pooch, check_only=False):
        assert self.kwargs["timeout"] == 20
        if url not in contents:
            raise requests.ConnectionError(url)
        Path(output_file).write_bytes(contents[url])

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", serve)
    return contents


def test_a_download_goes_into_the_cache_once(small_cifar, served, cache, capfd):
    name, archive = small_cifar.source.name, small_cifar.source.archive
    served[archive.url] = small_cifar.archive
    level = pooch.get_logger().level
    assert load(name).source == str(cache / archive.path)
    assert pooch.get_logger().level == level
    served.clear()
    assert load(name).source == str(cache / archive.path)
    assert capfd.readouterr() == ("", "")


def test_a_download_goes_into_the_given_folder(small_cifar, served, cache, tmp_path):
    name, archive = small_cifar.source.name, small_cifar.source.archive
    served[archive.url] = small_cifar.archive
    (tmp_path / "mine").mkdir()
    assert load(name, tmp_path / "mine").source == str(tmp_path / "mine" / archive.path)
    assert not cache.exists()


def test_fetch_makes_the_folder_and_returns_what_load_accepts(small_idx, served, tmp_path):
    for name, small in small_idx.items():
        served.update({f"{small.source.url}{file}": content for file, content in small.gz.items()})
        folder = fetch(name, tmp_path / "new")
        served.clear()
        assert folder == tmp_path / "new"
        assert load(name, folder).source == str(folder / small.source.folder)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"MNIST", "FashionMNIST"}


def test_fetch_writes_where_load_looks_first_and_load_into_the_cache(small_cifar, served, cache, tmp_path, monkeypatch):
    name, archive = small_cifar.source.name, small_cifar.source.archive
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(tmp_path / "shared"))
    served[archive.url] = small_cifar.archive
    # it may not be for writing
    assert load(name).source == str(cache / archive.path)
    (cache / archive.path).unlink()
    assert fetch(name) == tmp_path / "shared"
    assert load(name, download=False).source == str(tmp_path / "shared" / archive.path)


def test_an_interrupted_download_is_resumed(small_idx, served, cache):
    small = small_idx["mnist"]
    urls = {f"{small.source.url}{file}": content for file, content in small.gz.items()}
    first, *rest = urls
    served[first] = urls[first]
    with pytest.raises(DataNotFoundError, match="MNIST/raw lacks train-labels"):
        fetch("mnist")
    served.clear()
    served.update({url: urls[url] for url in rest})
    assert fetch("mnist") == cache


def test_a_wrong_delivery_is_not_kept(small_cifar, served, cache):
    archive = small_cifar.source.archive
    served[archive.url] = b"<html>please log in</html>"
    with pytest.raises(DataNotFoundError, match=f"has not the published md5 {archive.md5}"):
        load(small_cifar.source.name)
    assert list(cache.iterdir()) == []


def test_to_moves_all_four_tensors():
    data = load("digits")
    moved = data.to("meta")
    assert isinstance(moved, Dataset)
    assert {
        tensor.device.type
        for tensor in (moved.train_inputs, moved.train_targets, moved.test_inputs, moved.test_targets)
    } == {"meta"}
    assert (moved.name, moved.classes, moved.source) == (data.name, data.classes, data.source)
    assert data.to(torch.device("cpu")).train_inputs is data.train_inputs

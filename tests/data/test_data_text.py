"""Texts: their windows against plain Python, the sha256 that pins them, and what is no text."""

import hashlib
import sys

import pytest
import torch

from hesscond.data import fetch, form, load, locate, part, standardized, text as texts
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError

#: 200 characters of 11 kinds, two bytes long and four bytes long ones among them.
TEXT = ("é quick 𝄞\n" * 20)[:200]
KINDS = len(set(TEXT))


@pytest.fixture
def written(tmp_path):
    def write(content=TEXT, name="mine.txt"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return {"file": str(tmp_path / name)}

    return write


def spelled(tokens, text):
    """Rows of numbers as strings."""
    characters = sorted(set(text))
    return ["".join(characters[k] for k in row) for row in tokens.tolist()]


def test_windows_follow_each_other_and_are_split_without_overlap(written):
    data = load("text", **written(), context=7)
    cut = 180
    for inputs, targets, own in (
        (data.train_inputs, data.train_targets, TEXT[:cut]),
        (data.test_inputs, data.test_targets, TEXT[cut:]),
    ):
        assert spelled(inputs, TEXT) == [own[k : k + 7] for k in range(0, len(own) - 7, 7)]
        assert spelled(targets, TEXT) == [own[k + 1 : k + 8] for k in range(0, len(own) - 7, 7)]
    assert (data.train_inputs.dtype, data.train_targets.dtype) == (torch.int64, torch.int64)
    assert data.form == form("text", **written(), context=7)
    assert (data.form.kind, data.form.outputs, data.classes) == ("tokens", KINDS, KINDS)
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()
    assert data.pinned == {"sha256": sha256}
    assert f"mine.txt (sha256 {sha256}, compared with none)" in data.source


def test_the_text_that_comes_with_python(requested_urls):
    from pydoc_data.topics import topics

    data = load("text", download=False)
    text = "\n".join(topics[name] for name in sorted(topics))
    assert data.form == form("text")
    assert data.train_inputs.shape == ((9 * len(text) // 10 - 1) // 64, 64)
    assert "".join(spelled(data.train_inputs[:40], text)) == text[: 40 * 64]
    assert data.pinned == {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    again = load("text", **data.pinned)
    assert torch.equal(data.test_targets, again.test_targets)
    assert str(locate("text")).endswith("topics.py")
    assert requested_urls == []


def test_a_text_is_pinned_by_version(monkeypatch):
    monkeypatch.setattr(texts.platform, "python_version", lambda: "3.99.1")
    assert load("text").source.endswith("compared with none)")
    monkeypatch.setitem(texts.TOPICS_SHA256, "3.99.1", "0" * 64)
    with pytest.raises(
        CorruptDataError, match=r"topics of Python 3\.99\.1 is not the text that is meant: its sha256 is"
    ):
        load("text")
    pinned = load("text", sha256=hashlib.sha256(texts.topics().encode()).hexdigest())
    assert "compared with none" not in pinned.source


def test_names_are_looked_for_in_the_data_directory(written, tmp_path, monkeypatch):
    written()
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(tmp_path))
    assert load("text", file="mine.txt", context=5).source.startswith(str(tmp_path / "mine.txt"))
    with pytest.raises(DataNotFoundError, match=r"there is no file other.txt, nor one of this name below"):
        load("text", file="other.txt")


def test_a_part_is_spread_over_the_text(written):
    data = load("text", **written(), context=7, train_samples=5, test_samples=1)
    assert spelled(data.train_inputs, TEXT) == [TEXT[7 * k : 7 * k + 7] for k in (0, 5, 10, 15, 20)]
    assert len(data.test_inputs) == 1
    with pytest.raises(ConfigError, match="exceeds the 5 train samples"):
        part(data, train=6)


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (TEXT, {"context": 20}, "has 200 characters, too few for context = 20: the last tenth, .* needs 21 at least"),
        ("", {}, "has 0 different characters: there is nothing to predict"),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaa", {"context": 1}, "has 1 different characters: there is nothing to predict"),
        (TEXT, {"vocabulary": 96}, "no option 'vocabulary'"),
        (TEXT, {"sha256": "abc"}, "is not the text that is meant: its sha256 is .*, not abc"),
        (b"\xff\xfe\x00", {}, "is no text in UTF-8: invalid start byte at byte 0"),
        (TEXT, {"context": 0}, "context must be an integer from 1, not 0"),
        (TEXT, {"folder": "x"}, "there is no option 'folder': choose from file, context, sha256"),
        (TEXT, {"file": "/nowhere.txt"}, "there is no file /nowhere.txt, nor"),
        (TEXT, {"file": "/"}, "there is no file /, nor"),
        (TEXT, {"test_samples": 9}, "test_samples = 9 exceeds the 2 test samples of text"),
    ],
)
def test_what_does_not_fit_is_one_sentence(written, content, options, sentence):
    with pytest.raises((ConfigError, CorruptDataError, DataNotFoundError), match=sentence) as caught:
        load("text", **{"context": 7} | written(content) | options)
    assert "\n" not in str(caught.value)


def test_a_text_is_not_for_download_and_has_no_mean():
    with pytest.raises(ConfigError, match="'text' is generated, or a file of yours: there is nothing to fetch"):
        fetch("text")
    with pytest.raises(ConfigError, match="the inputs of text are tokens, which cannot be standardized"):
        standardized(load("text"))


def test_a_python_without_its_texts(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    for function in (load, form):
        with pytest.raises(
            DataNotFoundError, match=r"no module pydoc_data.topics: install all of the standard library"
        ):
            function("text")

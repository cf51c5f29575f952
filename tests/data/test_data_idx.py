import numpy as np
import pytest
import torch

from hesscond.data import load, published
from hesscond.data.published import parse_idx
from hesscond.errors import CorruptDataError, DataNotFoundError


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_torchvisions_layout(small_idx, tmp_path, name):
    small = small_idx[name]
    folder = small.write_gz(tmp_path / small.source.folder)
    data = load(name, tmp_path)
    for images, labels, inputs, targets in (
        (published.TRAIN_IMAGES, published.TRAIN_LABELS, data.train_inputs, data.train_targets),
        (published.TEST_IMAGES, published.TEST_LABELS, data.test_inputs, data.test_targets),
    ):
        assert torch.equal(inputs, torch.tensor(small.arrays[images]).float().unsqueeze(1) / 255)
        assert targets.tolist() == small.arrays[labels].tolist()
        assert targets.dtype == torch.int64
    assert data.source == str(folder)


def test_loose_files_are_not_taken(small_idx, tmp_path):
    small_idx["mnist"].write_gz(tmp_path)
    with pytest.raises(DataNotFoundError):
        load("mnist", tmp_path, download=False)


@pytest.mark.parametrize("file", list(published.IDX_SHAPES))
def test_truncated_files(small_idx, tmp_path, file):
    small = small_idx["mnist"]
    path = small.write_gz(tmp_path / small.source.folder) / f"{file}.gz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=rf"{path} .* instead of {small.source.md5[file]}\): delete it"):
        load("mnist", tmp_path)


def test_another_data_set_in_mnists_folder_is_corrupt(small_idx, tmp_path):
    small_idx["fashion-mnist"].write_gz(tmp_path / small_idx["mnist"].source.folder)
    with pytest.raises(CorruptDataError):
        load("mnist", tmp_path)


def test_parse_idx_reads_in_c_order():
    content = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])
    assert np.array_equal(parse_idx(content, (2, 3), file="f"), [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes([0, 0, 8]),
        bytes([1, 0, 8, 1, 0, 0, 0, 2, 5, 6]),  # magic number
        bytes([0, 0, 9, 1, 0, 0, 0, 2, 5, 6]),  # signed bytes
        bytes([0, 0, 8, 2, 0, 0, 0, 2, 5, 6]),  # two dimensions
        bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 6, 7]),  # another count
        bytes([0, 0, 8, 1, 2, 0, 0, 0, 5, 6]),  # the other byte order
        bytes([0, 0, 8, 1, 0, 0, 0, 2, 5]),  # too short
        bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6, 7]),  # too long
    ],
)
def test_parse_idx_takes_nothing_but_the_expected_shape(content):
    with pytest.raises(CorruptDataError, match=r"f is not an idx file of unsigned bytes of shape \(2,\)"):
        parse_idx(content, (2,), file="f")

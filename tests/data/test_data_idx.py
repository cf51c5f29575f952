import pytest
import torch

from hesscond.data import load, published
from hesscond.errors import CorruptDataError, DataNotFoundError


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_torchvisions_layout(small_idx, tmp_path, name):
    small = small_idx[name]
    folder = small.write_gz(tmp_path / small.source.folder)
    data = load(name, tmp_path)
    files = [*published.IDX_SHAPES]
    for (images, labels), inputs, targets in (
        (files[:2], data.train_inputs, data.train_targets),
        (files[2:], data.test_inputs, data.test_targets),
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
    path = small.write_gz(tmp_path / small.source.folder) / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=rf"{path} .* instead of {small.source.md5[file]}\): delete it"):
        load("mnist", tmp_path)

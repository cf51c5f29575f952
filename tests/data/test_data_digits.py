import numpy as np
import torch
from sklearn.datasets import load_digits

from hesscond.data import fetch, load, locate


def rows(images):
    return sorted(map(tuple, np.asarray(images, dtype=np.float64).reshape(-1, 64).tolist()))


def test_shapes_and_range():
    data = load("digits")
    assert (data.name, data.classes, data.source) == ("digits", 10, "scikit-learn")
    assert data.train_inputs.shape == (1_437, 1, 8, 8)
    assert data.test_inputs.shape == (360, 1, 8, 8)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == torch.int64
    assert (data.train_inputs.min().item(), data.train_inputs.max().item()) == (0.0, 1.0)


def test_the_split_is_a_partition_of_sklearns_arrays():
    data, bunch = load("digits"), load_digits()
    images = torch.cat([data.train_inputs, data.test_inputs]) * 16
    assert rows(images) == rows(bunch.images)
    labels = dict(zip(map(bytes, bunch.images.astype(np.uint8).reshape(-1, 64)), bunch.target, strict=True))
    for inputs, targets in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        keys = map(bytes, (inputs * 16).to(torch.uint8).flatten(1).numpy())
        assert [labels[key] for key in keys] == targets.tolist()


def test_the_split_is_stratified_and_pinned():
    data = load("digits")
    assert torch.bincount(data.test_targets).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    # Recorded once: a scikit-learn that split differently would change every result of fc-digits.
    assert data.test_targets[:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    assert (data.test_inputs[:6] * 16).sum((1, 2, 3)).tolist() == [278, 312, 334, 277, 273, 268]
    assert torch.equal(load("digits").test_inputs, data.test_inputs)


def test_nothing_is_downloaded_or_looked_up(tmp_path, requested_urls):
    assert load("digits", tmp_path / "absent", download=False).source == "scikit-learn"
    assert (fetch("digits") / "digits.csv.gz").is_file()
    assert locate("digits") == fetch("digits")
    assert requested_urls == []

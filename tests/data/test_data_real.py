"""The real CIFAR-10 and MNIST, against published facts and against a second way of reading them."""

import gzip
import pickle

import numpy as np
import torch

from hesscond.data import fetch, load
from hesscond.data.sources import SOURCES


def test_cifar10_has_the_published_shapes_and_class_counts(real_data):
    folder = real_data("cifar10")
    data = load("cifar10", folder)
    assert data.name == "cifar10"
    assert data.classes == 10
    assert data.source == str(SOURCES["cifar10"].find(folder))
    assert data.train_inputs.shape == (50_000, 3, 32, 32)
    assert data.test_inputs.shape == (10_000, 3, 32, 32)
    for inputs, targets, per_class in (
        (data.train_inputs, data.train_targets, 5_000),
        (data.test_inputs, data.test_targets, 1_000),
    ):
        assert inputs.dtype == torch.float32
        assert inputs.is_contiguous()
        assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)
        assert targets.dtype == torch.int64
        assert torch.bincount(targets).tolist() == [per_class] * 10
    # Training starts with a frog whose first pixel is (59, 62, 63); the test set with a cat and two ships.
    assert data.train_targets[0] == 6
    assert torch.equal(data.train_inputs[0, :, 0, 0], torch.tensor([59.0, 62.0, 63.0]) / 255)
    assert data.test_targets[:5].tolist() == [3, 8, 8, 0, 6]
    # each image is that of a reading pixel by pixel
    place = SOURCES["cifar10"].find(folder)
    if place.is_file():
        contents = SOURCES["cifar10"].verified_files(place)
    else:
        contents = {path.name: path.read_bytes() for path in place.iterdir()}
    for batch, start, inputs, targets in (
        ("data_batch_1", 0, data.train_inputs, data.train_targets),
        ("data_batch_3", 20_000, data.train_inputs, data.train_targets),
        ("data_batch_5", 40_000, data.train_inputs, data.train_targets),
        ("test_batch", 0, data.test_inputs, data.test_targets),
    ):
        original = pickle.loads(contents[batch], encoding="latin1")
        for row in (0, 7, 9_999):
            red, green, blue = np.split(original["data"][row], 3)  # the documented order: all red, green, blue
            image = np.stack([colour.reshape(32, 32) for colour in (red, green, blue)])
            assert torch.equal(inputs[start + row], torch.from_numpy(image).float() / 255)
            assert targets[start + row] == original["labels"][row]


def test_mnist_has_the_published_shapes_and_class_counts(real_data):
    folder = real_data("mnist")
    data = load("mnist", folder)
    assert (data.name, data.classes) == ("mnist", 10)
    assert data.train_inputs.shape == (60_000, 1, 28, 28)
    assert data.test_inputs.shape == (10_000, 1, 28, 28)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == torch.int64
    for inputs in (data.train_inputs, data.test_inputs):
        assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)
    train = [5_923, 6_742, 5_958, 6_131, 5_842, 5_421, 5_918, 6_265, 5_851, 5_949]
    test = [980, 1_135, 1_032, 1_010, 982, 892, 958, 1_028, 974, 1_009]
    assert torch.bincount(data.train_targets).tolist() == train
    assert torch.bincount(data.test_targets).tolist() == test
    assert data.train_targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    # each image is at its offset in bytes
    contents = SOURCES["mnist"].verified_files(SOURCES["mnist"].find(folder))
    for file, inputs in zip([*contents][::2], (data.train_inputs, data.test_inputs), strict=True):
        for row in (0, 1, 9_999):
            pixels = list(gzip.decompress(contents[file])[16 + 784 * row : 16 + 784 * (row + 1)])
            assert torch.equal(inputs[row].flatten(), torch.tensor(pixels, dtype=torch.float32) / 255)


def test_fetch_is_content_with_a_copy_on_disk(real_data, monkeypatch, requested_urls):
    folder = real_data("mnist")
    assert fetch("mnist", folder) == folder
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(folder))
    assert fetch("mnist") == folder
    assert requested_urls == []

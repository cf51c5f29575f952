"""Pictures in folders: pixels as numpy cuts them from what was written, and what is said where something is wrong."""

import os
import pickle
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from hesscond.data import Pictures, SampleStream, fetch, form, load, locate, options, part, standardized
from hesscond.data.dataset import images_from_bytes
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError
from tests import image_folders

SMALL = {"size": 10, "resize": 12, "classes": 3}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pictures"


@pytest.fixture
def written(folder):
    return image_folders.write(folder)


def loaded(folder, **arguments):
    return load("image-folder", folder=str(folder), **{**SMALL, **arguments})


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


# -- what is read -----------------------------------------------------------------------------------------------------


def test_the_pixels_and_classes_are_those_of_the_files(folder, written):
    (folder / "train" / "cat" / "notes.txt").write_text("no picture")
    (folder / "train" / "README").write_text("no class")
    data, expected = loaded(folder), image_folders.in_memory(written)
    assert isinstance(data.train_inputs, Pictures)
    for name in ("train_inputs", "test_inputs"):
        assert same(getattr(data, name)[:], getattr(expected, name))
    for name in ("train_targets", "test_targets"):
        assert same(getattr(data, name), getattr(expected, name))
    assert data.form == form("image-folder", **SMALL) == expected.form
    assert (data.name, data.classes) == ("image-folder", 3)


def test_suffixes_in_any_case_and_folders_in_folders(folder, written):
    place = folder / "train" / "cat"
    (place / "deep" / "er").mkdir(parents=True)
    for old, new in (("000.png", "deep/er/0.JPEG"), ("001.png", "deep/1.Png"), ("002.png", "z.webp")):
        (place / old).rename(place / new)
    pixels, targets = written["train"]
    # capitals come before small letters, and a folder's own files before those in its folders
    order = [*range(12), 15, 16, 17, 14, 13, 12]
    data = loaded(folder)
    assert same(data.train_inputs[:], images_from_bytes([pixels[order]], (3, 10, 10)))
    assert data.train_targets.tolist() == targets.tolist()


def test_a_class_that_val_lacks_does_not_change_the_numbers(folder, written):
    shutil.rmtree(folder / "val" / "ant")
    assert loaded(folder).test_targets.tolist() == [0] * 4 + [2] * 4


@pytest.mark.parametrize(("height", "width"), [(40, 61), (61, 40), (33, 33), (5, 9)])
def test_other_sizes_are_resized_with_antialiasing(folder, height, width):
    """Against torch, where Pillow rounds to 8 bits after each direction."""
    image_folders.write(folder, train=1, val=1)
    pixels = image_folders.noise(np.random.default_rng(1), height, width)
    Image.fromarray(pixels).save(folder / "train" / "ant" / "000.png")
    sides = [12 if side == min(height, width) else int(12 * side / min(height, width)) for side in (height, width)]
    resized = functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].double(), sides, mode="bilinear", antialias=True
    )[0].permute(1, 2, 0)
    found = loaded(folder).train_inputs[torch.tensor([1])][0] * 255
    wanted = image_folders.centre(resized.numpy(), 10)
    # Dog, ant, cat
    np.testing.assert_allclose(found, wanted, atol=1.01)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_kinds_of_pixels_become_rgb(folder, mode):
    written = image_folders.write(folder, train=1, val=1)
    image = Image.fromarray(image_folders.noise(np.random.default_rng(1), 12, 12)).convert(mode)
    path = folder / "train" / "Dog" / ("000.tif" if mode == "CMYK" else "000.png")
    (folder / "train" / "Dog" / "000.png").unlink()
    image.save(path)
    found = (loaded(folder).train_inputs[:1][0] * 255).round().byte().numpy()
    np.testing.assert_array_equal(found, image_folders.centre(np.asarray(image.convert("RGB")), 10))
    assert not np.array_equal(found, written["train"][0][0])


# -- as a tensor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_it_is_indexed_as_a_tensor(folder, written, flat, prepared):
    own, tensors = loaded(folder), image_folders.in_memory(written)
    if prepared:
        own, tensors = standardized(part(own, train=14)), standardized(part(tensors, train=14))
    images, tensor = own.train_inputs, tensors.train_inputs
    if flat:
        images, tensor = images.flatten(1), tensor.flatten(1)
    assert (images.shape, images.ndim, images.dtype, len(images)) == (
        tensor.shape,
        tensor.ndim,
        tensor.dtype,
        14 + 4 * (not prepared),
    )
    assert images.device == tensor.device
    rows = torch.tensor([3, 0, 0, 13, -1])
    for index in (slice(None), slice(2, 9), slice(1, 12, 5), slice(5, 5), slice(-3, None), rows, rows[:0]):
        assert same(images[index], tensor[index])
    assert same(images.index_select(0, rows.abs()), tensor.index_select(0, rows.abs()))
    assert images.to("meta")[rows].device.type == "meta"
    with pytest.raises(IndexError):
        images[torch.tensor([18])]


def test_every_value_is_the_quotient(folder, tmp_path):
    """Of all 256, also where several are divided at once."""
    image_folders.write(folder, train=1, val=1)
    pixels = np.resize(np.arange(256, dtype=np.uint8), (16, 16))
    for name in ("Dog", "ant", "cat"):
        Image.fromarray(np.stack([pixels] * 3, 2)).save(folder / "train" / name / "000.png")
    found = loaded(folder, size=16, resize=16).train_inputs[:]
    assert same(found, (torch.from_numpy(pixels) / np.float32(255)).expand(3, 3, 16, 16).contiguous())


def test_standardized_by_the_moments_of_the_training_set(folder, written):
    own, tensors = standardized(loaded(folder)), standardized(image_folders.in_memory(written))
    for name in ("train_inputs", "test_inputs"):
        assert same(getattr(own, name)[:], getattr(tensors, name))
    pixels = written["train"][0].astype(np.float64) / 255
    mean, variance = loaded(folder).train_inputs.moments()
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), rtol=1e-7)
    np.testing.assert_allclose(variance, pixels.var((0, 2, 3)), rtol=1e-6)


def test_they_are_pickled_as_paths(folder, written):
    images = standardized(loaded(folder)).train_inputs
    before = images[:]
    pickled = pickle.dumps(images)
    assert len(pickled) < 20_000
    assert same(pickle.loads(pickled)[:], before)


def test_a_stream_is_read_anew_every_time(folder, written):
    data = loaded(folder)
    stream = SampleStream(data.train_inputs, data.train_targets, [slice(0, 7), slice(7, 18)])
    for _ in range(2):
        inputs, targets = zip(*stream, strict=True)
        assert same(torch.cat(inputs), data.train_inputs[:])
        assert same(torch.cat(targets), data.train_targets)


# -- what is decoded ---------------------------------------------------------------------------------------------------


def test_only_what_is_taken_is_decoded(folder, written):
    (folder / "train" / "cat" / "005.png").write_bytes(b"damaged, but not taken")
    told = []
    own = loaded(folder, train_samples=8, test_samples=5)
    wanted = part(image_folders.in_memory(written), train=8, test=5)
    for name in ("train_inputs", "test_inputs"):
        assert same(getattr(own, name)[:], getattr(wanted, name))
    for name in ("train_targets", "test_targets"):
        assert same(getattr(own, name), getattr(wanted, name))
    standardized(own, lambda done, total: told.append((done, total)))
    assert told == [(8, 8)]
    with pytest.raises(ConfigError, match="train_samples = 19 exceeds the 18 train samples of image-folder"):
        loaded(folder, train_samples=19)


def test_other_pictures_are_another_source(folder, written):
    source = loaded(folder).source
    assert loaded(folder).source == source
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(folder / "train" / "Dog" / "000.png")
    assert len({source, loaded(folder).source, loaded(folder, size=8).source, loaded(folder, resize=13).source}) == 4


def test_the_fingerprint_knows_names_sizes_and_times(folder, written):
    pictures = Pictures(folder / "train", ["Dog/000.png", "ant/000.png"], 12, 10)
    path = folder / "train" / "Dog" / "000.png"
    found = {pictures.fingerprint()}
    os.utime(path, ns=(1, 1))
    found.add(pictures.fingerprint())
    path.write_bytes(path.read_bytes() + b" ")
    os.utime(path, ns=(1, 1))
    found |= {pictures.fingerprint(), replace(pictures, files=pictures.files[::-1]).fingerprint()}
    assert len(found) == 4


# -- what is wrong ----------------------------------------------------------------------------------------------------


def no_such_folder(folder):
    shutil.rmtree(folder)


def no_val(folder):
    shutil.rmtree(folder / "val")


def loose_val(folder):
    for place in list((folder / "val").iterdir()):
        for path in place.iterdir():
            path.rename(folder / "val" / f"{place.name}{path.name}")
        place.rmdir()


def too_few(folder):
    for split in ("train", "val"):
        shutil.rmtree(folder / split / "ant")


def unknown_in_val(folder):
    (folder / "val" / "ant").rename(folder / "val" / "bee")


def empty(folder):
    for path in (folder / "train" / "ant").iterdir():
        path.rename(path.with_suffix(".txt"))


def no_picture(folder):
    (folder / "train" / "cat" / "003.png").write_text("hello")


def cut_off(folder):
    path = folder / "train" / "cat" / "003.png"
    path.write_bytes(path.read_bytes()[:-200])


def deep(folder):
    Image.fromarray(np.full((12, 12), 40_000, np.uint16)).save(folder / "train" / "cat" / "003.png")


def dangling(folder):
    path = folder / "train" / "cat" / "003.png"
    path.unlink()
    path.symlink_to("nowhere.png")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (no_such_folder, DataNotFoundError, r"there is no folder (\S+): put .* of \1, or name"),
        (no_val, DataNotFoundError, "has no folder val: it must hold train/CLASS"),
        (loose_val, CorruptDataError, "val has no folders of classes: its pictures must lie in val/CLASS"),
        (too_few, ConfigError, r"train has 2 folders of classes, not 3: complete it, or set classes = 2 in \[data\]"),
        (unknown_in_val, CorruptDataError, "val has a class 'bee' that .*train lacks"),
        (empty, CorruptDataError, r"train/ant has no files \.jpg"),
        (no_picture, CorruptDataError, "train/cat/003.png is no picture: replace or delete it"),
        (cut_off, CorruptDataError, "train/cat/003.png cannot be decoded .*: replace or delete it"),
        (deep, CorruptDataError, "train/cat/003.png cannot be decoded .*more than 8 bits a channel"),
        (dangling, DataNotFoundError, "train/cat/003.png cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_one_sentence(folder, written, damage, error, words):
    damage(folder)
    with pytest.raises(error, match=words) as caught:
        loaded(folder).train_inputs[:]
    assert "\n" not in str(caught.value)


def test_options():
    assert options("image-folder") == {"folder": "imagenet", "size": 224, "resize": 256, "classes": 1000}
    assert form("image-folder").input_shape == (3, 224, 224)
    for arguments, words in (
        ({"size": 0}, "size must be an integer from 1, not 0"),
        ({"classes": "many"}, "classes must be an integer from 1, not 'many'"),
        ({"folder": 3}, "folder must be a word, not 3"),
        ({"size": 300}, "size = 300 exceeds resize = 256"),
        ({"crop": 3}, "no option 'crop': choose from folder, size, resize, classes"),
    ):
        for function in (form, load):
            with pytest.raises(ConfigError, match=words):
                function("image-folder", **arguments)


def test_where_a_folder_is_looked_for(tmp_path, cache, monkeypatch):
    environment, explicit = tmp_path / "environment", tmp_path / "explicit"
    monkeypatch.setenv("HESSCOND_DATA_DIR", str(environment))
    with pytest.raises(DataNotFoundError) as caught:
        load("image-folder")
    for words in (str(environment / "imagenet"), str(cache / "imagenet"), "train/CLASS", "folder = … in [data]"):
        assert words in str(caught.value)
    with pytest.raises(DataNotFoundError, match="explicit does not exist: make it, or give the folder that holds"):
        load("image-folder", explicit)
    for place, seed in ((cache, 0), (environment, 1), (explicit, 2)):
        assert locate("image-folder", explicit) is None
        image_folders.write(place / "imagenet", seed=seed)
        found = place if place != explicit else environment
        assert load("image-folder", **SMALL).source.startswith(f"{found / 'imagenet'} (pictures ")
    assert load("image-folder", explicit, **SMALL).source.startswith(f"{explicit / 'imagenet'} (pictures ")
    assert locate("image-folder") == environment / "imagenet"


def test_there_is_nothing_to_fetch(requested_urls):
    with pytest.raises(ConfigError, match="image-folder is not for download: put your pictures into train/CLASS"):
        fetch("image-folder")
    assert requested_urls == []


def test_pillow_is_asked_for(folder, written, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"image-folder needs PIL: pip install pillow \(extra 'images'\)"):
        loaded(folder)

"""Studies on pictures in folders: the same runs, bit for bit, as on the same pixels in memory."""

from dataclasses import replace

import numpy as np
import pooch
import pytest
import tomli_w
import torch
from PIL import Image
from torch.nn import functional

from hesscond.data import Form, Pictures, load, standardized
from hesscond.data.preparation import boxes
from hesscond.errors import ConfigError
from hesscond.study import RunPlan, check_plan, load_data, load_study, open_run, probing, run
from hesscond.study.datasets import Augmentation
from hesscond.study.sweep import dataset
from tests import image_folders
from tests.runs.run_logs import same_runs

CPU = torch.device("cpu")
RESNET = {"name": "resnet20", "blocks": [1, 1], "widths": [3, 4]}
CNN = {"name": "cnn5", "widths": [2, 3], "padding": "same", "pooled": [1, 2], "hidden": [5]}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path, cache):
    """The folder, and what is in it."""
    return tmp_path / "pictures", image_folders.write(tmp_path / "pictures", train=8, val=4, size=8)


def study_file(tmp_path, folder, data=None, model=None, **sections):
    content = {
        "name": "tiny",
        "description": "for the tests",
        "data": {"name": "image-folder", "folder": str(folder), "size": 8, "resize": 12, "classes": 3} | (data or {}),
        "model": model or RESNET,
        "training": {"batch_size": 5, "iterations": 9, "momentum": 0.9},
        "learning_rates": [{"batch_size": 5, "rate": {"vanilla": 0.05, "batchnorm": 0.05}}],
        "probe": {"units": [0, 2], "every": 3, "train_every_epochs": 2},
    }
    for section, values in sections.items():
        content[section] |= values
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def in_memory(study, written):
    """The data of a study as tensors."""
    data = image_folders.in_memory(written)
    if study.data.standardize:
        data = standardized(data)
    return replace(data, preparation=study.data.preparation)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("method", "sections", "chunk"),
    [
        ("vanilla", {}, 4096),
        ("bnp", {"data": {"standardize": True}}, 4096),
        ("batchnorm", {"data": {"standardize": True, "augmentation": ["flip", "cutout"]}}, 4096),
        ("vanilla", {"probe": {"train_samples": 10, "precision": "float64"}}, 4096),
        # charts, whose Hessians are operators over the training set, also in parts of it
        ("sphere", {"model": CNN, "probe": {"layers": ["fc1"], "train_samples": 12}}, 4096),
        ("sphere", {"model": CNN, "probe": {"layers": ["fc2"], "precision": "float64"}}, 7),
        ("vanilla", {"model": {"name": "mlp", "hidden": [6]}, "data": {"standardize": True}}, 4096),
    ],
)
def test_the_same_run_as_in_memory(tmp_path, pictures, monkeypatch, method, sections, chunk):
    monkeypatch.setattr(probing, "CHUNK", chunk)
    folder, written = pictures
    study = load_study(study_file(tmp_path, folder, **sections))
    plans = [RunPlan(study, method, 0, 0.05, tmp_path / name, CPU) for name in ("disk", "memory")]
    data = load_data(study.data)
    assert isinstance(data.train_inputs, Pictures)
    run(plans[0], data)
    run(plans[1], in_memory(study, written))
    same_runs(plans[0].folder, plans[1].folder)
    assert set(open_run(plans[0].folder).table("probe")["data"]) == {"batch", "train"}


def test_workers_get_the_path_and_not_the_pixels(tmp_path, pictures):
    folder, written = pictures
    study = load_study(study_file(tmp_path, folder, data={"standardize": True}))
    file = tmp_path / "data.pt"
    torch.save(load_data(study.data), file)
    data = dataset(file, CPU)
    assert torch.equal(data.train_inputs[:], in_memory(study, written).train_inputs)


@pytest.mark.parametrize("method", ["standardize", "minmax", "bnp:statistics=data", "groupnorm:groups=1+standardize"])
def test_methods_that_read_everything_are_refused(tmp_path, pictures, method):
    folder, written = pictures
    study = load_study(study_file(tmp_path, folder))
    plan = RunPlan(study, method, 0, 0.05, tmp_path / "run", CPU)
    check_plan(plan, in_memory(study, written))
    with pytest.raises(ConfigError, match="reads all training inputs at once, but those of image-folder stay on disk"):
        run(plan, load_data(study.data))
    assert not plan.folder.exists()


@pytest.mark.parametrize("flat", [False, True])
def test_a_crop_is_cut_from_the_picture_and_not_from_its_centre(tmp_path, cache, flat):
    """Against the files' pixels: a random window of the resized centre; a random part of the whole picture."""
    rng = np.random.default_rng(0)
    image_folders.write(tmp_path / "pictures", train=1, val=1)
    sides = [(12, 30), (26, 12), (40, 31)]
    written = [image_folders.noise(rng, *shape) for shape in sides]
    for name, pixels in zip(("Dog", "ant", "cat"), written, strict=True):
        Image.fromarray(pixels).save(tmp_path / "pictures" / "train" / name / "000.png")
    options = {"folder": str(tmp_path / "pictures"), "size": 8, "resize": 12, "classes": 3}
    images = load("image-folder", **options).train_inputs
    batch = torch.tensor([0, 1, 1, 0] * 10)
    shape = (-1, 3, 8, 8)

    whole = Augmentation(["crop", "flip"], Form((3, 8, 8), 3, 3), 5)
    changed = whole(images.flatten(1) if flat else images, batch)
    assert changed.shape == ((40, 192) if flat else (40, 3, 8, 8))
    centres = [torch.from_numpy(image_folders.centre(pixels, 12) / np.float32(255)) for pixels in written]
    places = set()
    for image, row in zip(changed.view(shape), batch.tolist(), strict=True):
        places |= {
            (i, j)
            for i in range(5)
            for j in range(5)
            for own in (image, image.flip(2))
            if torch.equal(centres[row][:, i : i + 8, j : j + 8], own)
        }
    assert {i for i, _ in places} == {j for _, j in places} == set(range(5))

    batch = torch.tensor([2, 0, 1] * 10)
    parts = Augmentation(["resized-crop"], Form((3, 8, 8), 3, 3), 5)
    state = parts.generator.get_state()
    changed = parts(images.flatten(1) if flat else images, batch).view(shape)
    drawn = boxes(*torch.tensor([sides[row] for row in batch]).T, torch.Generator().set_state(state))
    for image, row, (top, left, high, wide) in zip(changed, batch, torch.stack(drawn).T.tolist(), strict=True):
        own = torch.from_numpy(written[row][top : top + high, left : left + wide]).permute(2, 0, 1)[None].double()
        wanted = functional.interpolate(own, (8, 8), mode="bilinear", antialias=True)[0]
        np.testing.assert_allclose(255 * image, wanted, atol=1.01)
    assert any(left + wide > 20 or top + high > 20 for top, left, high, wide in torch.stack(drawn).T.tolist())


def test_augmentation_of_earlier_studies_is_drawn_as_before():
    """The generator of the run's augmentation does not depend on which augmentations there are."""
    (spread,) = np.random.SeedSequence([5, 2]).generate_state(1)
    state = torch.Generator().manual_seed(int(spread)).get_state()
    assert torch.equal(Augmentation(["crop", "flip"], Form((1, 8, 8), 10, 10), 5).generator.get_state(), state)

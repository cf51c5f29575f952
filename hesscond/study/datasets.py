"""The data of a study: loaded, cut to the part that is used, standardized; and mini-batches augmented."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hesscond.data import Pictures, dataset, load, preparation
from hesscond.errors import ConfigError
from hesscond.study.sections import DataConfig

#: Tells the augmentation's generator from others that begin with the same seed.
STREAM = 2


def load_data(
    config: DataConfig, data_dir: Path | str | None = None, on_decoded: Callable[[int, int], None] | None = None
) -> dataset.Dataset:
    """The data set of a study as its runs take it.

    Parameters
    ----------
    config
        Section ``data`` of the study.
    data_dir
        Data folder, as for `hesscond.data.load`.
    on_decoded
        Progress callback, as for `hesscond.data.standardized`.

    Raises
    ------
    ConfigError
        An option that does not fit, or fewer samples than wanted.
    DataNotFoundError
        It is neither on disk nor downloadable.
    CorruptDataError
        A file is not the published one, or a picture that is standardized is damaged.
    """
    data = load(
        config.name,
        data_dir,
        train_samples=config.train_samples,
        test_samples=config.test_samples,
        **config.options,
    )
    if config.standardize:
        data = preparation.standardized(data, on_decoded)
    return replace(data, preparation=config.preparation)


def check_data(config: DataConfig, data: dataset.Dataset) -> None:
    """Refuse data that are not what `load_data` makes of the study."""
    if (data.name, data.preparation) != (config.name, config.preparation):
        content, wanted = (
            f"{name} ({', '.join(how) or 'as it is'})"
            for name, how in ((data.name, data.preparation), (config.name, config.preparation))
        )
        raise ConfigError(f"the study is on {wanted}, but the data are {content}: load them with load_data(study.data)")


class Augmentation:
    """Random changes of the images or points of a mini-batch, by names in `hesscond.data.AUGMENTATIONS`."""

    def __init__(self, names: Collection[str], form: dataset.Form, seed: int) -> None:
        self.changes = [change for name, change in preparation.AUGMENTATIONS[form.kind].items() if name in names]
        self.shape = form.input_shape
        # apart from the stream of the order of samples, which begins from seed + 1
        (spread,) = np.random.SeedSequence([seed, STREAM]).generate_state(1)
        self.generator = torch.Generator().manual_seed(int(spread))

    def __call__(self, samples: dataset.Samples, batch: torch.Tensor) -> torch.Tensor:
        """Return changed samples with indices (n,), in the shape (n, …) of the samples."""
        changes = self.changes
        if isinstance(samples, Pictures) and changes and (crop := preparation.OF_PICTURES.get(changes[0])):
            changed, changes = crop(samples, batch, self.generator), changes[1:]
        else:
            changed = samples[batch]
        changed = changed.view(-1, *self.shape)
        for change in changes:
            changed = change(changed, self.generator)
        return changed.view(-1, *samples.shape[1:])

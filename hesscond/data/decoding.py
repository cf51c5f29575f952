"""Pictures decoded once, into files of 8-bit pixels in the cache that all runs then map into their memory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hesscond.data.mapped import MappedImages
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Called with the number of pictures decoded, and of all.
OnDecoded = Callable[[int, int], None]
#: Pictures in one task of a thread.
TASK = 16
#: Pillow's modes of at most 8 bits a channel: others would be cut off when they become RGB.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
#: Of what is done to a picture; another one makes other fingerprints.
VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pictures:
    """Files and what becomes of each: RGB, the shorter side ``resize`` (bilinear), the centre of ``size`` × ``size``.

    Attributes
    ----------
    folder
        Where they are.
    files
        Their paths below it, with ``/``.
    resize, size
        In pixels; ``size`` is not larger.
    """

    folder: Path
    files: Sequence[str]
    resize: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, 3, size, size)."""
        return (len(self.files), 3, self.size, self.size)

    def fingerprint(self) -> str:
        """A name for what is decoded, from names, sizes and times of change of the files, and both lengths.

        Raises
        ------
        DataNotFoundError
            A file cannot be read.
        """
        found = hashlib.sha256(f"{VERSION} {self.resize} {self.size}\n".encode())
        for name in self.files:
            try:
                there = os.stat(self.folder / name)
            except OSError as error:
                raise DataNotFoundError(f"{self.folder / name} cannot be read: {error.strerror}.") from None
            found.update(f"{name}\0{there.st_size}\0{there.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return found.hexdigest()[:32]

    def pixels(self, number: int) -> Image:
        """One of them, RGB of ``size`` × ``size``, with torchvision's arithmetic.

        Raises
        ------
        CorruptDataError
            It is no picture, damaged, or of more than 8 bits a channel.
        """
        from PIL import Image, UnidentifiedImageError

        path = self.folder / self.files[number]
        try:
            with Image.open(path) as opened:
                if opened.mode not in MODES:
                    raise ValueError(f"its mode {opened.mode} has more than 8 bits a channel")
                image = opened.convert("RGB")
        except UnidentifiedImageError:
            raise CorruptDataError(f"{path} is no picture: replace or delete it.") from None
        except Exception as error:  # whatever decoders make of damaged bytes
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CorruptDataError(f"{path} cannot be decoded ({reason}): replace or delete it.") from None
        short, long = sorted(image.size)
        sides = [self.resize if side == short else int(self.resize * long / short) for side in image.size]
        image = image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR)
        left, top = (round((side - self.size) / 2) for side in sides)
        return image.crop((left, top, left + self.size, top + self.size))


def decoded(wanted: Sequence[Pictures], on_decoded: OnDecoded | None = None) -> list[MappedImages]:
    """The pixels of pictures, decoded now unless they are in the cache.

    Parameters
    ----------
    wanted
        Any.
    on_decoded
        Called from time to time while there is something to decode.

    Raises
    ------
    ConfigError
        The disk has no room for them, or Pillow is not installed.
    DataNotFoundError
        A picture cannot be read, or the cache not be written.
    CorruptDataError
        A picture is damaged.
    """
    import pooch

    cache = Path(pooch.os_cache("hesscond")) / "images"
    places = [cache / f"{one.fingerprint()}.uint8" for one in wanted]
    if not all(is_whole(place) for place in places):
        decode_missing(dict(zip(places, wanted, strict=True)), cache, on_decoded)
    return [read(place, one) for place, one in zip(places, wanted, strict=True)]


def decode_missing(places: dict[Path, Pictures], cache: Path, on_decoded: OnDecoded | None) -> None:
    """Decode what is not in the cache yet; other processes that want to decode wait."""
    from filelock import FileLock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            missing = {place: one for place, one in places.items() if not is_whole(place)}
            # of a process that was killed: nobody else decodes now
            for left in cache.glob("*.partial"):
                left.unlink()
            check_room(list(missing.values()), cache)
            done, total = 0, sum(len(one.files) for one in missing.values())
            for place, one in missing.items():
                _log.info("decoding %d pictures of %s into %s", len(one.files), one.folder, place)

                def tell(number: int, before: int = done) -> None:
                    if on_decoded is not None:
                        on_decoded(before + number, total)

                decode(one, place, tell)
                done += len(one.files)
    except OSError as error:
        raise DataNotFoundError(
            f"the decoded pictures cannot be written to {cache} ({error.strerror or error}): make room, or let it be "
            "written to."
        ) from None


def check_room(missing: Sequence[Pictures], cache: Path) -> None:
    """Refuse what the disk cannot hold, before hours of work.

    Raises
    ------
    ConfigError
        There is less room.
    """
    need, free = sum(math.prod(one.shape) for one in missing), shutil.disk_usage(cache).free
    if need > free:
        number = sum(len(one.files) for one in missing)
        raise ConfigError(
            f"{number} decoded pictures need {need / 1e9:.3g} GB in {cache}, where {free / 1e9:.3g} GB are free: make "
            "room, or take fewer by train_samples and test_samples."
        )


def decode(pictures: Pictures, place: Path, tell: Callable[[int], None]) -> None:
    """Write the pixels, uint8 (N, 3, size, size), and beside them how often each value occurs: whole or not at all."""
    import joblib

    try:
        import PIL
        from PIL import Image
    except ImportError:
        raise ConfigError("image-folder needs Pillow: pip install 'hesscond[images]'") from None
    # once: not by all threads at the same time
    Image.init()
    partial, number = place.with_suffix(".partial"), len(pictures.files)
    tasks = [range(start, min(start + TASK, number)) for start in range(0, number, TASK)]
    counts, done = np.zeros((3, 256), np.int64), 0
    try:
        with partial.open("wb") as file:
            file.truncate(math.prod(pictures.shape))
        with warnings.catch_warnings():
            # about metadata that nobody reads
            warnings.filterwarnings("ignore", module=r"PIL\.")
            # Pillow lets other threads run while it works
            threads = joblib.Parallel(joblib.cpu_count(), backend="threading", return_as="generator_unordered")
            for ready, own in threads(joblib.delayed(decode_some)(pictures, task, partial) for task in tasks):
                counts += own
                done += ready
                tell(done)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(place)
        beside = {"shape": pictures.shape, "counts": counts.tolist(), "pillow": PIL.__version__}
        partial.write_text(json.dumps(beside), encoding="utf-8")
        partial.replace(place.with_suffix(".json"))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def decode_some(pictures: Pictures, numbers: range, partial: Path) -> tuple[int, np.ndarray]:
    """Write some pictures to their place in the file; returns how many, and counts of their values (3, 256)."""
    _, *image = pictures.shape
    block, counts = np.empty((len(numbers), *image), np.uint8), np.zeros((3, 256), np.int64)
    for own, number in zip(block, numbers, strict=True):
        found = pictures.pixels(number)
        own[:] = np.asarray(found).transpose(2, 0, 1)
        counts += np.reshape(found.histogram(), (3, 256))
    # not by a number of an open file, which may mean another one after an error elsewhere
    with partial.open("r+b") as file:
        file.seek(numbers.start * math.prod(image))
        file.write(block.data)
    return len(numbers), counts


def is_whole(place: Path) -> bool:
    """Whether pixels were written to the end: what is beside them comes last."""
    return place.exists() and place.with_suffix(".json").exists()


def read(place: Path, pictures: Pictures) -> MappedImages:
    """The pixels in the cache.

    Raises
    ------
    CorruptDataError
        What is beside them is damaged.
    """
    beside = place.with_suffix(".json")
    try:
        content: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        counts = np.array(content["counts"], np.int64).reshape(3, 256)
        fits = tuple(content["shape"]) == pictures.shape and counts.sum() == math.prod(pictures.shape)
    except (OSError, ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise CorruptDataError(f"{beside} is damaged: delete it, and load the data set once more.")
    return MappedImages(place, pictures.shape, counts=counts)

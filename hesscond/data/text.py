"""Texts as characters: that of the language reference, which comes with Python, and those of the user's files."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hesscond.data import dataset, sources
from hesscond.errors import ConfigError, CorruptDataError, DataNotFoundError

#: sha256 of the topics by version of Python, whose every release edits them.
TOPICS_SHA256 = {"3.11.7": "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4"}
TOPICS = "pydoc_data.topics"
#: Tenths of a text, from its beginning, that are for training.
TRAIN = 9


def topics() -> str:
    """Texts of ``help("…")``, the language reference by topic, in alphabetical order."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        raise DataNotFoundError(
            f"this Python has no module {TOPICS}: install all of the standard library, or name a text of your own by "
            "file = … in [data]."
        ) from None
    return "\n".join(texts[name] for name in sorted(texts))


class Text(sources.Source):
    """Text in consecutive windows of ``context`` characters; the target of each character is the next one.

    It is that of a ``file`` in UTF-8, a path or one below ``$HESSCOND_DATA_DIR``; by default that of a module of Python
    (`topics`). ``sha256`` is that of the expected text. Characters are numbered by their code points in ascending
    order. The first nine tenths of the text are for training, the rest for testing; an incomplete window at the end of
    each is dropped.
    """

    name = "text"
    options: Mapping[str, Any] = {"file": "", "context": 64, "sha256": ""}
    on_disk = False

    def locate(self, directories: Sequence[Path]) -> Path | None:
        """Module that has the text used if no file is named."""
        spec = importlib.util.find_spec(TOPICS.partition(".")[0]) and importlib.util.find_spec(TOPICS)
        return Path(spec.origin) if spec and spec.origin else None

    def form(self, options: Mapping[str, Any]) -> dataset.Form:
        kinds = len(set(read(options["file"])[0]))
        return dataset.Form((options["context"],), kinds, kinds, tokens=True)

    def load(self, options: Mapping[str, Any], directories: Sequence[Path], **how: Any) -> dataset.Dataset:
        text, place, pinned = read(options["file"])
        context, wanted = options["context"], options["sha256"] or pinned
        sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
        if wanted not in ("", sha256):
            raise CorruptDataError(f"{place} is not the text that is meant: its sha256 is {sha256}, not {wanted}.")
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        characters, numbers = np.unique(points, return_inverse=True)
        if len(characters) < 2:
            raise ConfigError(f"{place} has {len(characters)} different characters: there is nothing to predict.")
        cut = TRAIN * len(numbers) // 10
        if len(numbers) - cut <= context:
            raise ConfigError(
                f"{place} has {len(numbers)} characters, too few for context = {context}: the last tenth, which is for "
                f"testing, needs {context + 1} at least."
            )
        tokens = torch.from_numpy(numbers.astype(np.int64))
        train, test = windows(tokens[:cut], context), windows(tokens[cut:], context)
        compared = "" if wanted else ", compared with none"
        source = f"{place} (sha256 {sha256}{compared})"
        return dataset.Dataset(self.name, *train, *test, len(characters), source, pinned={"sha256": sha256})


def windows(tokens: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive windows of tokens (L,) and the successors of their tokens, both (N, context)."""
    count = (len(tokens) - 1) // context
    inputs, targets = (tokens[shift : shift + count * context].view(count, context) for shift in (0, 1))
    return inputs, targets


def read(file: str) -> tuple[str, str, str]:
    """Text, its place, and the sha256 that it is known to have ("": unknown)."""
    if not file:
        version = platform.python_version()
        return topics(), f"{TOPICS} of Python {version}", TOPICS_SHA256.get(version, "")
    place = sources.file_of_yours(file)
    try:
        return place.read_bytes().decode("utf-8"), str(place), ""
    except OSError as error:
        raise DataNotFoundError(f"{place} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{place} is no text in UTF-8: {error.reason} at byte {error.start}.") from None


sources.register(Text())

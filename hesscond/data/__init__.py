"""The data sets of the studies, every file checked against its published md5 before it is used.

`catalogue.py` says which files make up which data set; `cifar.py`, `idx.py` and `digits.py` read the three
formats; `loading.py` looks for a copy on disk. A data set that is not there is downloaded or asked for, never
replaced by another. `generated.py` lists those that are computed; `image_folder.py` finds pictures that the user has,
which `decoding.py` decodes once and `mapped.py` reads from disk; `preparation.py` and `augmentation.py` have what
studies do to samples.
"""

from hesscond.data.augmentation import AUGMENTATIONS
from hesscond.data.dataset import Dataset
from hesscond.data.form import Form
from hesscond.data.loading import fetch, form, load, locate, names, options
from hesscond.data.mapped import MappedImages, Samples, Stream, selected
from hesscond.data.preparation import part, standardized

__all__ = [
    "AUGMENTATIONS",
    "Dataset",
    "Form",
    "MappedImages",
    "Samples",
    "Stream",
    "fetch",
    "form",
    "load",
    "locate",
    "names",
    "options",
    "part",
    "selected",
    "standardized",
]

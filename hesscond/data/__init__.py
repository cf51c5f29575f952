"""The data sets of the studies, every file checked against its published md5 before it is used.

`published.py` knows the files of each, `files.py` downloads and checks them, `loading.py` looks for a copy on disk. A
data set that is not on disk is downloaded or asked for, never replaced by another. `generated.py` lists the data sets
that need no files; those that the user has on disk are pictures (which `pictures.py` decodes when they are indexed),
meshes, views of a scene, and texts, each a `FolderSource`. `preparation.py` changes samples as studies ask for it.
"""

from hesscond.data.dataset import Dataset, Form, Samples, SampleStream, selected
from hesscond.data.loading import fetch, form, load, locate, names, options
from hesscond.data.pictures import Pictures
from hesscond.data.preparation import AUGMENTATIONS, part, standardized

__all__ = [
    "AUGMENTATIONS",
    "Dataset",
    "Form",
    "Pictures",
    "SampleStream",
    "Samples",
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

"""The data sets of the studies, every file checked against its published md5 before it is used.

`published.py` knows the files of each, `files.py` downloads and checks them, `loading.py` looks for a copy on disk. A
data set that is not on disk is downloaded or asked for, never replaced by another. `generated.py` lists the data sets
that need no files, `folders.py` the ones that the user has on disk: pictures (which `pictures.py` decodes when they are
indexed), meshes, views of a scene, texts. `preparation.py` has what studies do to samples.
"""

from hesscond.data.dataset import Dataset, Form, Samples, Stream, selected
from hesscond.data.loading import fetch, form, load, locate, names, options
from hesscond.data.pictures import Pictures
from hesscond.data.preparation import AUGMENTATIONS, part, standardized

__all__ = [
    "AUGMENTATIONS",
    "Dataset",
    "Form",
    "Pictures",
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

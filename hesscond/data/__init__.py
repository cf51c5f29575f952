"""The data sets of the studies, every file checked against its published md5 before it is used.

A module that defines a data set registers it, with the class in `sources.py` that it belongs to: published files, which
`files.py` downloads and checks; made without files; or in a folder that the user has on disk. A data set that is not on
disk is downloaded or asked for, never replaced by another. `preparation.py` changes samples as studies ask for it.
"""

from hesscond.data.dataset import Dataset, Form, Samples, SampleStream, selected
from hesscond.data.loading import fetch, form, load, locate, names, options
from hesscond.data.pictures import Pictures
from hesscond.data.preparation import AUGMENTATIONS, part, standardized
from hesscond.lazy import imported

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

imported(__name__)

"""The data sets of the studies, every file checked against its published md5 before it is used.

`catalogue.py` says which files make up which data set; `cifar.py`, `idx.py` and `digits.py` read the three
formats; `loading.py` looks for a copy on disk. A data set that is not there is downloaded or asked for, never
replaced by another.
"""

from hesscond.data.dataset import Dataset
from hesscond.data.loading import fetch, load, names

__all__ = ["Dataset", "fetch", "load", "names"]

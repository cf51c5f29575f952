"""Upper bounds on the rank that follow from the zero pattern and repeated rows and columns alone."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import structural_rank


def rank_bound(matrix: np.ndarray) -> int:
    """Largest rank that a matrix with these zeros and these repeated rows and columns can have.

    Parameters
    ----------
    matrix : (m, n) array

    Returns
    -------
    int
        The size of a maximum matching of the nonzero pattern (Dulmage–Mendelsohn; the "term rank"), taken
        after exact duplicates of rows and of columns were merged. It overcounts whenever the dependence is
        not visible in the pattern; it never undercounts.
    """
    distinct = np.unique(np.unique(matrix, axis=0), axis=1)
    return int(structural_rank(csr_array(distinct != 0)))

"""The catalogue of models that probes are tried on: one row each, in a file for its kind.

A row is added in one place, by one call of `add`; `cases.py` says what it holds. `CATALOGUE` has them all, by name.
"""

# in the order of the page
from tests.catalogue import (  # noqa: F401, isort: skip
    dense, convolutions, coupled, sequences, blocks, ordinary, recurrence, own_forward, inside, wrapped, batches,
    libraries, wrong_backward, kinks, zero, differences, features, optimizers, iterations, units,
)  # fmt: skip
from tests.catalogue.cases import CATALOGUE

#: Those whose dense and convolutional layers go through every level and method.
CASES = [case for case in CATALOGUE.values() if case.grid]
#: Those all of whose parameters are measured.
BLOCKS = [case for case in CATALOGUE.values() if case.blocks]
GROUPS = list(dict.fromkeys(case.group for case in CATALOGUE.values()))
#: The cases of docs/support.md, in its order.
PAGE = sorted((case for case in CATALOGUE.values() if case.title), key=lambda case: GROUPS.index(case.group))


def case(name):
    """The case called ``name``."""
    return CATALOGUE[name]

"""Problem: a model, its loss and its data, frozen at one moment and evaluated again without side effects.

`problem` keeps the data and their random states, `snapshot` copies the model, `evaluation` runs the loss, `weighting`
finds the weight of a batch in the loss of all data, `graph` reads the autograd graph of an evaluated loss.
"""

from hesscond.problem.devices import MEMORY as MEMORY
from hesscond.problem.evaluation import Batch as Batch, LossFunction as LossFunction
from hesscond.problem.problem import Call as Call

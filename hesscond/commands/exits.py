"""Exit codes beside 0."""

DIVERGED = 1
#: An expectation, a statement that should hold, or a check of this machine.
UNMET = 1
BAD_USE = 2
INTERRUPTED = 130

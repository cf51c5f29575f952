"""Exit codes other than 0."""

DIVERGED = 1
#: An expectation is not met, a true statement is violated, or a check of this machine failed.
UNMET = 1
BAD_USE = 2
INTERRUPTED = 130

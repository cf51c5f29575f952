"""Exit codes beside 0."""

DIVERGED = 1
BAD_USE = 2
INTERRUPTED = 130

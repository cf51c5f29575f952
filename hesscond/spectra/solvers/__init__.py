"""Solvers for κ of a symmetric matrix, by what it is given as: entries, a factor, a signed factor, or products."""

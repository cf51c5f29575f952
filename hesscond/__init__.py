"""Exact per-layer Hessian condition numbers."""
__version__ = "0.1.0"

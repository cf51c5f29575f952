"""The errors a user can cause or must know about, each with one sentence that says what, where and how to mend it."""

from __future__ import annotations


class HesscondError(Exception):
    """Bad use or bad input. The command line prints the sentence and exits with code 2."""


class ConfigError(HesscondError):
    """A study, method, layer, unit or option that does not exist or does not fit."""


class DataNotFoundError(HesscondError):
    """A data set that is neither on disk nor obtainable."""


class CorruptDataError(HesscondError):
    """A data file whose checksum or layout is not the published one."""


class CaptureError(HesscondError):
    """A layer whose activations or curvature cannot be captured exactly."""


class NotFiniteError(CaptureError):
    """Activations or curvature that are NaN or infinite."""


class MatrixError(HesscondError):
    """A matrix whose condition number is not defined: not two-dimensional, empty, NaN or infinite."""


class RunError(HesscondError):
    """A run folder that is missing, damaged or already in use."""


class DivergedError(Exception):
    """The loss became NaN or infinite. The log is kept; the command line exits with code 1."""

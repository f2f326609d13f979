"""Errors that `fips` raises on purpose. Everything else that escapes is a bug."""


class FipsError(Exception):
    """A run that failed for a reason the user can act on.

    The message says what failed, on which named thing with which value, what was expected and
    what to do next. The command line prints it as one line and exits with `exit_code`.
    """

    exit_code = 1


class ConfigError(FipsError):
    """An option or argument has a value that cannot work (wrong usage)."""

    exit_code = 2


class SourceError(FipsError):
    """The source checkpoint is missing, damaged, or of a kind that is not supported."""


class ArchitectureError(FipsError):
    """The model's structure has nothing to compress, or something that must be refused by name."""


class CalibrationError(FipsError):
    """The text or images of a calibration or an evaluation cannot be used."""


class BrokenImageError(CalibrationError):
    """One image cannot be decoded; a few of them are skipped, many end the run."""


class NumericalError(FipsError):
    """A weight, an activation or a factor is not finite."""


class FormatError(FipsError):
    """A compressed checkpoint is damaged, foreign, or written by a newer version."""


class OutputError(FipsError):
    """The output folder cannot be written."""


class HubError(FipsError):
    """The Hub cannot be reached, refuses, or holds something other than what was sent."""

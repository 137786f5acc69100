"""The error of the trace layer."""

from tiermem.errors import TiermemError


class TraceError(TiermemError, OSError):
    """A trace can't be created, or a file can't be read as one; the message names the file and says why."""

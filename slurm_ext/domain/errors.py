"""Every error that this product raises on purpose.

One root, a handful of subclasses. A message names the value, the place and the fix; the classes
exist so that a caller can tell "this source is missing, skip the cycle" from "this input is bad,
tell the user". They carry data, not behaviour.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class SlurmExtError(Exception):
    """Root of all errors raised by slurm-ext."""


class DirectiveError(SlurmExtError):
    """A ``--ft-*`` option, its environment twin or a stored directive is unusable."""

    def __init__(self, option: str, value: str, reason: str, fix: str, place: str = "") -> None:
        self.option = option
        self.value = value
        self.reason = reason
        self.fix = fix
        self.place = place
        where = f"{place}: " if place else ""
        super().__init__(f"{where}{option}={value!r}: {reason}; {fix}")


class ConfigError(SlurmExtError):
    """A configuration file, key or value is unusable."""

    def __init__(self, place: str, reason: str, fix: str) -> None:
        self.place = place
        self.reason = reason
        self.fix = fix
        super().__init__(f"{place}: {reason}; {fix}")


class DataError(SlurmExtError):
    """A table, trace, journal or spool file holds something that cannot be used."""

    def __init__(self, place: str, reason: str, fix: str) -> None:
        self.place = place
        self.reason = reason
        self.fix = fix
        super().__init__(f"{place}: {reason}; {fix}")


class SourceMissingError(SlurmExtError):
    """A source could not be read completely. Missing is never the same as empty."""

    def __init__(self, source: str, reason: str) -> None:
        self.source = source
        self.reason = reason
        super().__init__(f"{source} could not be read: {reason}")


# What a shell says of a command that is not there or cannot be executed.
NO_SUCH_COMMAND = 127


class SlurmCommandError(SourceMissingError):
    """A Slurm command failed, hung or answered something unusable."""

    def __init__(self, argv: Sequence[str], rc: int | None, stderr: str) -> None:
        self.argv = tuple(argv)
        self.rc = rc
        self.stderr = stderr
        how = "timed out" if rc is None else f"exit code {rc}"
        words = f"{' '.join(argv)}: {how}: {stderr.strip()}"
        if rc == NO_SUCH_COMMAND and stderr.strip():
            words = stderr.strip()  # its arguments, often hundreds of characters, explain nothing
        super().__init__(argv[0] if argv else "?", words)


class SolverError(SlurmExtError):
    """An allocation problem is malformed, or a solver gave an unusable answer."""


class ProtocolError(SlurmExtError):
    """Two parts of the product disagree about a document's form or version."""

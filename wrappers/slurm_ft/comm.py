"""What ranks need of each other outside training: a handful of small exchanges.

Agreement, checkpoint commit and pause are written against this protocol, so that the same code
runs on torch (its own gloo group), on MPI (its own communicator) and in one process. Every
exchange has a limit in seconds; one that is exceeded raises ExchangeLostError, after which the
communicator is not used again.
"""

from __future__ import annotations

from typing import Any, Protocol

from slurm_ext.domain.errors import SlurmExtError


class ExchangeLostError(SlurmExtError):
    """An exchange between ranks did not end within its limit, or a peer is gone."""


class PendingMax(Protocol):
    """A maximum that is being agreed on while the caller goes on."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self, limit_s: float | None = None) -> int:
        """The maximum over all ranks. Raises ExchangeLostError past the limit."""
        ...


class Maxima(Protocol):
    """Where agreement comes from: the ranks' numbers in, the largest out."""

    def start_max(self, value: int) -> PendingMax:
        """Begin a maximum over all ranks; several may be under way, ended in order."""
        ...

    def close(self) -> None:
        """Free what was made for it; never waits for a peer."""
        ...


class Comm(Maxima, Protocol):
    """All ranks of the job, in an order that all of them agree on.

    Every rank makes the same calls in the same order. Objects cross as JSON-able values: nothing
    is pickled. ``limit_s`` of ``None`` is the communicator's own default.
    """

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def barrier(self, limit_s: float | None = None) -> None:
        """Return when every rank has called it."""
        ...

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any] | None:
        """On rank 0 the values of all ranks in order, elsewhere ``None``."""
        ...

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        """Rank 0's value, on every rank."""
        ...

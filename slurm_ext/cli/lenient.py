"""Slurm as an ordinary user sees it: what may be missing is noted instead of ending the command.

The daemon needs limits, comments and topology and skips a cycle without them. A user who only asks
what would happen may be refused some of these by the site; the answer then says what it lacks.
Queue, nodes and slurm.conf stay indispensable. Writes are refused: nothing here may change Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits, Topology
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.facts import Identity, RpcStats, SlurmConfig

T = TypeVar("T")


class LenientBackend:
    """Another backend, read only. ``notes`` collects what could not be read, in words."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        """See ``Backend``."""
        return self._inner.name

    def snapshot(self) -> Snapshot:
        """See ``Backend``."""
        return self._inner.snapshot()

    def jobs(self, job_ids: Collection[str] | None = None) -> tuple[Job, ...]:
        """See ``Backend``."""
        return self._inner.jobs(job_ids)

    def admin_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._or(
            lambda: self._inner.admin_comments(job_ids), {}, "what other jobs asked for"
        )

    def user_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._or(lambda: self._inner.user_comments(job_ids), {}, "the comments of jobs")

    def apply(self, actions: Sequence[Action]) -> list[ActionResult]:
        """Refused."""
        raise AssertionError("a forecast never writes to Slurm")

    def slurm_config(self) -> SlurmConfig:
        """See ``Backend``."""
        return self._inner.slurm_config()

    def limits(self) -> Mapping[str, Limits]:
        """See ``Backend``."""
        return self._or(self._inner.limits, {}, "the limits of QOS and accounts")

    def topology(self) -> Topology:
        """See ``Backend``."""
        return self._or(self._inner.topology, Topology(), "the switches of the network")

    def rpc_stats(self) -> RpcStats:
        """See ``Backend``."""
        return self._inner.rpc_stats()

    def identity(self) -> Identity:
        """See ``Backend``."""
        return self._inner.identity()

    def operators(self) -> frozenset[str]:
        """See ``Backend``."""
        return self._inner.operators()

    def _or(self, read: Callable[[], T], instead: T, what: str) -> T:
        try:
            return read()
        except SourceMissingError as exc:
            self.notes.append(f"{what} could not be read and do not count here: {exc.reason}")
            return instead

"""The protocol that every way of reaching Slurm implements.

One cheap bulk call per kind and cycle; nothing is asked per job. Every method either gives a
complete answer or raises SourceMissingError (its subclass SlurmCommandError where a command was
run): a failed or truncated answer is never an empty queue. Methods block; the daemon runs them in
a thread. A backend keeps caches of parsed rows, so one backend belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits, Topology
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.facts import Identity, RpcStats, SlurmConfig


@runtime_checkable
class Backend(Protocol):
    """Reads the cluster and writes to pending jobs."""

    @property
    def name(self) -> str:
        """``cli``, ``rest``, ``pyslurm`` or ``fake``: for logs and ``slurm-ext check``."""

    def snapshot(self) -> Snapshot:
        """Jobs, nodes, partitions and reservations now.

        Only jobs that wait or hold resources are in it. ``limits`` and ``topology`` are left
        empty: they change rarely, so the caller reads them with ``limits()`` and ``topology()``,
        keeps them, and puts them in with ``dataclasses.replace``.
        """

    def jobs(self, job_ids: Collection[str] | None = None) -> tuple[Job, ...]:
        """The rows of the queue alone (to read back after writing), all or the named ones.

        A named job that has no row any more is left out; that is an answer, not an error.
        """

    def admin_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """AdminComment of the named jobs; a job without one maps to "", a gone job is absent.

        Ids are ``Job.job_id``. The text was written by anybody: it is handed on unread.
        """

    def user_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """The users' own comments (``--comment=``), like ``admin_comments``."""

    def apply(self, actions: Sequence[Action]) -> list[ActionResult]:
        """Write the actions in their order, one result each, in the same order.

        A refusal by Slurm is a result with ``ok=False`` and Slurm's message, not an exception.
        ``ok`` is not success: several fields of one action are not atomic, so the caller reads
        back. Raises where it is unknown which actions were carried out.
        """

    def slurm_config(self) -> SlurmConfig:
        """Version and configuration."""

    def limits(self) -> Mapping[str, Limits]:
        """Limits by ``qos:NAME``, ``assoc:ACCOUNT`` and ``assoc:ACCOUNT:USER``.

        Empty where the site keeps no accounting.
        """

    def topology(self) -> Topology:
        """The switch tree; empty where the site has none."""

    def rpc_stats(self) -> RpcStats:
        """Load of slurmctld."""

    def identity(self) -> Identity:
        """Who we are to Slurm."""

    def operators(self) -> frozenset[str]:
        """Names of the users whose AdminLevel lets them control everybody's jobs.

        Root is not among them. Empty where the site keeps no accounting.
        """

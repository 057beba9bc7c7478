"""What Slurm says about itself: configuration, RPC statistics, and who we are to it.

Plain frozen values with the few questions that callers ask of them. Nothing here runs a command;
the parsers fill these classes and the checks read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_CRED_EXPIRE_S = 120.0
_WITHOUT_REQUEUE_DELAY = (24, 11)
_NONE = frozenset({"", "(null)", "none", "n/a"})


def split_words(text: str) -> frozenset[str]:
    """The comma-separated words of a setting, lower case; Slurm's words for "none" give ()."""
    words = (word.strip().lower() for word in text.split(","))
    return frozenset(word for word in words if word not in _NONE)


def split_parameters(text: str) -> dict[str, str]:
    """``a,b=1`` as ``{"a": "", "b": "1"}``; the last of equal names wins, as in Slurm."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() not in _NONE:
            found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """``scontrol show config`` with its keys in lower case and its values as written.

    ``values`` keeps everything, so that a check may ask for what has no name here.
    """

    version: str
    values: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> str:
        """The value of a key (any case), empty where Slurm has no such key or no value."""
        value = self.values.get(key.lower(), "")
        return "" if value.lower() in _NONE else value

    @property
    def release(self) -> tuple[int, int]:
        """Year and month of the release, ``(24, 11)``; ``(0, 0)`` where it cannot be read."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self.get("ClusterName")

    @property
    def priority_type(self) -> str:
        """``multifactor`` or ``basic``, without the ``priority/`` prefix."""
        return self.get("PriorityType").removeprefix("priority/")

    @property
    def multifactor(self) -> bool:
        """Whether priorities are computed, so that SiteFactor has a meaning."""
        return self.priority_type == "multifactor"

    @property
    def scheduler_type(self) -> str:
        """``backfill`` or ``builtin``, without the ``sched/`` prefix."""
        return self.get("SchedulerType").removeprefix("sched/")

    @property
    def scheduler_parameters(self) -> dict[str, str]:
        """SchedulerParameters by name."""
        return split_parameters(self.get("SchedulerParameters"))

    @property
    def preempt_type(self) -> str:
        """The preemption plugin without its prefix, empty when there is none."""
        kind = self.get("PreemptType").removeprefix("preempt/")
        return "" if kind.lower() in _NONE else kind

    @property
    def preempt_mode(self) -> frozenset[str]:
        """Words of PreemptMode in lower case, e.g. ``{"gang", "suspend"}``."""
        return split_words(self.get("PreemptMode"))

    @property
    def preempt_parameters(self) -> dict[str, str]:
        """PreemptParameters by name."""
        return split_parameters(self.get("PreemptParameters"))

    @property
    def priority_flags(self) -> frozenset[str]:
        """Words of PriorityFlags in lower case."""
        return split_words(self.get("PriorityFlags"))

    @property
    def accounting_enforce(self) -> frozenset[str]:
        """Words of AccountingStorageEnforce in lower case."""
        return split_words(self.get("AccountingStorageEnforce"))

    @property
    def enforces_limits(self) -> bool:
        """Whether Slurm enforces limits; then a changed StartTime zeroes the accrued age."""
        return bool(self.accounting_enforce & {"limits", "safe", "all"})

    @property
    def accrues_always(self) -> bool:
        """Whether age accrues whatever happens to StartTime."""
        return "accrue_always" in self.priority_flags

    @property
    def site_factor_plugin(self) -> str:
        """The site's own site_factor plugin without its prefix; empty when there is none."""
        plugin = self.get("PrioritySiteFactorPlugin").removeprefix("site_factor/")
        return "" if plugin.lower() in _NONE else plugin

    @property
    def job_submit_plugins(self) -> frozenset[str]:
        """Submit plugins in lower case, e.g. ``{"lua"}``."""
        return split_words(self.get("JobSubmitPlugins"))

    @property
    def cred_expire_s(self) -> float:
        """Lifetime of a step's credential (AuthInfo=cred_expire), in seconds (Slurm: 120)."""
        text = split_parameters(self.get("AuthInfo")).get("cred_expire", "")
        return float(text) if text.isdigit() else DEFAULT_CRED_EXPIRE_S

    @property
    def requeue_hold_s(self) -> float:
        """How long Slurm keeps a requeued job back, in seconds.

        It is the lifetime of a credential and one second (24.11.5 and 26.05.5), or as many seconds
        as SchedulerParameters=requeue_delay says and one (26.05.5; what is no number counts as 0).
        24.11 does not know that parameter.
        """
        text = self.scheduler_parameters.get("requeue_delay")
        if text is None or self.release <= _WITHOUT_REQUEUE_DELAY:
            return self.cred_expire_s + 1.0
        match = re.match(r"\d+", text)
        return float(match[0] if match else 0) + 1.0

    @property
    def kill_wait_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL at a job's end (KillWait; Slurm: 30)."""
        match = re.match(r"\d+", self.get("KillWait"))
        return int(match[0]) if match else 30

    @property
    def requeues_jobs(self) -> bool:
        """Whether batch jobs may be requeued unless they say otherwise (JobRequeue; Slurm: 1)."""
        return self.get("JobRequeue") != "0"

    @property
    def min_job_age_s(self) -> int:
        """How long a finished job stays in slurmctld's memory, in seconds (Slurm: 300)."""
        match = re.match(r"\d+", self.get("MinJobAge"))
        return int(match[0]) if match else 300


@dataclass(frozen=True, slots=True)
class RpcCount:
    """Calls of one kind that slurmctld served, and the time they took in microseconds."""

    count: int
    total_us: int


@dataclass(frozen=True, slots=True)
class RpcStats:
    """What ``sdiag`` counts since its last reset.

    ``by_type`` and ``by_user`` map names to counts; ``server_threads`` and ``agent_queue`` show
    whether slurmctld is busy now. Times are microseconds.
    """

    server_threads: int = 0
    agent_queue: int = 0
    jobs_pending: int | None = None
    jobs_running: int | None = None
    cycle_last_us: int | None = None
    backfill_last_us: int | None = None
    by_type: Mapping[str, RpcCount] = field(default_factory=dict)
    by_user: Mapping[str, RpcCount] = field(default_factory=dict)

    @property
    def total_us(self) -> int:
        """Microseconds of all RPCs together."""
        return sum(count.total_us for count in self.by_type.values())


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is to Slurm. ``admin_level`` is ``None`` where accounting cannot tell."""

    user: str
    uid: int
    admin_level: str | None = None

    @property
    def operator(self) -> bool:
        """Whether Slurm lets this user change other people's jobs."""
        if self.uid == 0:
            return True
        return (self.admin_level or "").lower() in {"operator", "administrator", "admin"}

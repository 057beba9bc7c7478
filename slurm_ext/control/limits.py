"""Limits of partition, QOS and association, which we enforce because Slurm stops doing so.

Once an Operator has changed nodes, CPUs, memory or time limit of a job, Slurm takes it as exempt
from limits on them for good; limits on GPUs it still checks, so that a job which was grown over one
that we do not know would wait for nothing. So a count is offered, and a changed job let go, only
where the limits hold by our own reckoning. A job that nobody changed is Slurm's to check: its
submitted count is never refused here.

The reckoning follows Slurm's. Limits are looked for in the partition's QOS, the job's QOS (the
other way round with OverPartQOS), then the associations from the user's upward; for each resource
the first QOS that names a limit is the one that counts, before the associations. Limits per job are
those of the job's own association alone, to which Slurm has handed its parents' down; limits of a
group bind in every association above, over all that runs below it.

Usage counts running jobs, and jobs that we changed and let go: they may start at any moment. What
Slurm's own counters say is not consulted, since they are known to be wrong after a restart with
several QOS; only the minutes that a budget has used up cannot be had otherwise. Limits on other
resources (billing, licences, single nodes) are not known here: a start that fails on one is taken
back, see `unstarted`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from slurm_ext.control.lease import begin_s
from slurm_ext.control.shapes import Counts, leaves_nodes_open, memory_of
from slurm_ext.control.submitted import Frame
from slurm_ext.domain.job import Job, Shape
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Limits, Partition
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.domain.spans import span


@dataclass(frozen=True, slots=True)
class Size:
    """What a job takes.

    ``limit_s`` is ``None`` where its time limit is not decided yet. ``most_nodes`` is ``None``
    where Slurm may give it more nodes than ``nodes``.
    """

    gpus: int
    nodes: int
    cpus: int
    memory_mib: int
    limit_s: float | None = None
    most_nodes: int | None = None


@dataclass(slots=True)
class _Sum:
    """What is in use. Minutes are those that the running jobs may still take."""

    gpus: int = 0
    nodes: int = 0
    cpus: int = 0
    memory_mib: int = 0
    gpu_minutes: float = 0.0
    cpu_minutes: float = 0.0

    def add(self, size: Size, sign: int) -> None:
        self.gpus += sign * size.gpus
        self.nodes += sign * size.nodes
        self.cpus += sign * size.cpus
        self.memory_mib += sign * size.memory_mib
        minutes = sign * (size.limit_s or 0.0) / 60.0
        self.gpu_minutes += minutes * size.gpus
        self.cpu_minutes += minutes * size.cpus


# Names of a resource in `Limits`, and in words, in the order of `_wanted`.
_RESOURCES = (
    ("gpus", "GPUs"),
    ("nodes", "nodes"),
    ("cpus", "CPUs"),
    ("memory_mib", "MiB of memory"),
)
_MINUTES = (("gpu", "GPU minutes"), ("cpu", "CPU minutes"))


@dataclass(frozen=True, slots=True)
class _Check:
    """One limit that binds a kind of job.

    ``which`` is the place in `_wanted` of what it bounds; ``used`` holds what is in use, by the
    name ``attribute``; without it ``spent`` is. ``least`` turns the comparison round; ``exact`` is
    that of `Limits`.
    """

    holder: str
    most: float
    which: int
    words: str
    used: _Sum | None = None
    attribute: str = ""
    spent: float = 0.0
    per_job: bool = False
    least: bool = False
    exact: bool = True

    @property
    def of_one_job(self) -> bool:
        """Whether it certainly binds the job, whatever else runs."""
        return self.exact and (self.per_job or self.least)

    @property
    def reason(self) -> str:
        """Slurm's name of a limit of one job."""
        if self.least:
            return "QOSMinGRES"
        owner = _owner(self.holder)
        memory = "Memory" if owner == "QOS" else "Mem"
        return (
            f"{owner}MaxGRESPerJob",
            f"{owner}MaxNodePerJobLimit",
            f"{owner}MaxCpuPerJobLimit",
            f"{owner}Max{memory}PerJob",
            f"{owner}MaxGRESMinutesPerJob",
            f"{owner}MaxCpuMinutesPerJobLimit",
        )[self.which]

    def why_over(self, wanted: float) -> str:
        """Why so much would be too much; empty where it is not."""
        if self.least:
            if wanted < self.most:
                return f"{self.holder} asks for at least {self.most} {self.words}"
            return ""
        used = self.spent if self.used is None else getattr(self.used, self.attribute)
        if used + wanted <= self.most:
            return ""
        if self.per_job:
            return f"{self.holder} allows {self.most} {self.words}, it would take {wanted:.0f}"
        return (
            f"{self.holder} allows {self.most} {self.words}: {used:.0f} in use,"
            f" it would take {wanted:.0f}"
        )


def _owner(holder: str) -> str:
    """How Slurm's reasons name the kind of holder."""
    return "QOS" if holder.startswith("qos ") else "Assoc"


def _wanted(size: Size) -> tuple[float, ...]:
    """What the job would take of each thing that may be bounded."""
    minutes = (size.limit_s or 0.0) / 60.0
    return (
        size.gpus,
        size.nodes,
        size.cpus,
        size.memory_mib,
        size.gpus * minutes,
        size.cpus * minutes,
    )


def present_size(job: Job, now: float | None = None) -> Size:
    """What the job takes as Slurm shows it; of a running one (``now``) the time that is left."""
    limit_s = job.time_limit_s
    if now is not None and job.running and job.end_s is not None:
        limit_s = max(0.0, job.end_s - now)
    return Size(job.gpus, job.nodes, job.cpus, job.memory_mib or 0, limit_s)


def size_of(job: Job, frame: Frame, shape: Shape, limit_s: float | None = None) -> Size:
    """What the job would take in that shape.

    CPUs and memory follow tasks or nodes where the owner said so, otherwise GPUs. What the owner
    did not say is the site's default, for which memory follows CPUs or GPUs, whichever grows more.
    """
    gpus, nodes, ntasks = shape.gpus, shape.nodes, shape.ntasks
    by_size = gpus / max(1, job.gpus)
    if frame.cpus_per_task > 1:
        cpus = ntasks * frame.cpus_per_task
    elif job.cpus <= job.ntasks:
        cpus = ntasks
    else:
        cpus = max(ntasks, _up(job.cpus * by_size))
    per_node = memory_of(frame, shape)
    if per_node is not None:
        memory_mib = per_node * nodes
    else:
        memory_mib = _up((job.memory_mib or 0) * max(by_size, cpus / max(1, job.cpus)))
    # The submitted size goes back with the node range that was submitted.
    most = None if gpus == frame.gpus and leaves_nodes_open(frame) else nodes
    return Size(gpus, nodes, cpus, memory_mib, limit_s, most)


def _up(value: float) -> int:
    return int(-(-value // 1))


_Kind = tuple[str, str, str, str]


def _kind(job: Job) -> _Kind:
    """What decides which limits bind a job: jobs come in thousands, these in dozens."""
    return (job.partition, job.qos, job.account, job.user)


class Usage:
    """What is in use per limit holder of one snapshot, and whether a job fits beside it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._limits = snapshot.limits
        self._partitions = {p.name: p for p in snapshot.partitions}
        self._chains: dict[_Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._checks: dict[_Kind, tuple[_Check, ...]] = {}
        self._longest: dict[_Kind, float | None] = {}
        self._sums: dict[tuple[str, str], _Sum] = {}

    def add(self, job: Job, size: Size, sign: int = 1) -> None:
        """Count a job as running with this size; with ``sign`` of -1 no more."""
        qos, associations = self._chain(job)
        for key in (*qos, *associations):
            for part in ("", f"user {job.user}", f"account {job.account}"):
                self._sum(key, part).add(size, sign)

    def why_over(self, job: Job, size: Size) -> str:
        """The limit that the job would break with this size, in words; empty when none."""
        bounds = self.bounds(job)
        most, least = bounds.max_nodes, bounds.min_nodes
        if most is not None and size.nodes > most:
            return f"partition {job.partition} allows {most} nodes per job"
        if least is not None and size.most_nodes is not None and size.most_nodes < least:
            return f"partition {job.partition} asks for at least {least} nodes per job"
        wanted = _wanted(size)
        for check in self._checks_of(job):
            if reason := check.why_over(wanted[check.which]):
                return reason
        return ""

    def never(self, job: Job, size: Size) -> tuple[str, str] | None:
        """The limit of one job that QOS or association sets and the size breaks, whatever runs:
        Slurm's reason, and words. A ``limit_s`` of ``None`` breaks none, nor does a limit that may
        be meant for others."""
        for limits in self._walls(job):
            most_s = limits.max_wall_s if limits.exact else None
            if most_s is not None and size.limit_s is not None and size.limit_s > most_s:
                reason = f"{_owner(limits.name)}MaxWallDurationPerJobLimit"
                return reason, (
                    f"its time limit of {span(size.limit_s)} is above the {span(most_s)} of"
                    f" {limits.name} ({reason}): ask for less --time"
                )
        wanted = _wanted(size)
        for check in self._checks_of(job):
            if check.of_one_job and (why := check.why_over(wanted[check.which])):
                return check.reason, f"{why} ({check.reason})"
        return None

    def bounds(self, job: Job) -> Partition:
        """The job's partition with the limits that bind it; none where the snapshot lacks it."""
        partition = self._partitions.get(job.partition)
        if partition is None:
            return Partition(job.partition)
        qos = self._limits.get(f"qos:{job.qos}")
        if qos is None or not qos.waives:
            return partition
        return replace(partition, **dict.fromkeys(qos.waives))  # type: ignore[arg-type]

    def longest_s(self, job: Job) -> float | None:
        """The longest time limit that partition, QOS and association allow; ``None`` = any."""
        kind = _kind(job)
        if kind not in self._longest:
            self._longest[kind] = self._longest_of(job)
        return self._longest[kind]

    # -- inside ----------------------------------------------------------------------------------

    def _longest_of(self, job: Job) -> float | None:
        found = [self.bounds(job).max_time_s]
        found += [limits.max_wall_s for limits in self._walls(job)]
        return min((limit_s for limit_s in found if limit_s is not None), default=None)

    def _walls(self, job: Job) -> list[Limits]:
        """The holder, if any, whose limit on time binds the job."""
        qos, associations = self._chain(job)
        known = [limits for _, limits in self._known(qos)]
        known += [limits for _, limits in self._known(associations)][:1]
        return [limits for limits in known if limits.max_wall_s is not None][:1]

    def _checks_of(self, job: Job) -> tuple[_Check, ...]:
        kind = _kind(job)
        checks = self._checks.get(kind)
        if checks is None:
            checks = self._checks[kind] = tuple(self._binding(job))
        return checks

    def _sum(self, key: str, part: str) -> _Sum:
        """What is in use of one holder, or of one of its users or accounts."""
        return self._sums.setdefault((key, part), _Sum())

    def _chain(self, job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Keys of the QOS and of the associations that bind the job, in Slurm's order."""
        kind = _kind(job)
        found = self._chains.get(kind)
        if found is None:
            found = self._chains[kind] = (self._qos(job), self._associations(job))
        return found

    def _qos(self, job: Job) -> tuple[str, ...]:
        partition = self._partitions.get(job.partition)
        of_partition = f"qos:{partition.qos}" if partition is not None and partition.qos else ""
        of_job = f"qos:{job.qos}" if job.qos else ""
        order = [of_partition, of_job]
        known = self._limits.get(of_job)
        if known is not None and known.over_partition:
            order.reverse()
        return tuple(dict.fromkeys(key for key in order if key))

    def _associations(self, job: Job) -> tuple[str, ...]:
        if not job.account:
            return ()
        keys = [f"assoc:{job.account}:{job.user}", f"assoc:{job.account}"]
        while (known := self._limits.get(keys[-1])) is not None and known.parent:
            if known.parent in keys:
                break  # a circle cannot be; it must not hang us either
            keys.append(known.parent)
        return tuple(keys)

    def _known(self, keys: Iterable[str]) -> Iterator[tuple[str, Limits]]:
        for key in keys:
            found = self._limits.get(key)
            if found is not None:
                yield key, found

    def _binding(self, job: Job) -> Iterator[_Check]:
        """The limits that bind jobs of this kind, in the order in which Slurm looks for them.

        The first QOS that names a limit is the one that counts for it.
        """
        qos, associations = self._chain(job)
        named: set[str] = set()
        for key, limits in self._known(qos):
            yield from self._of_holder(job, key, limits, named, own=True)
            named |= {name for name in _LIMITS if getattr(limits, name) is not None}
        own = True
        for key, limits in self._known(associations):
            yield from self._of_holder(job, key, limits, named, own=own)
            own = False

    def _of_holder(
        self, job: Job, key: str, limits: Limits, named: Collection[str], *, own: bool
    ) -> Iterator[_Check]:
        """The limits of one holder, other than those ``named`` before.

        ``own`` tells that its limits per job are the job's.
        """

        def most(name: str) -> float | None:
            value: float | None = None if name in named else getattr(limits, name)
            return value

        holder = limits.name
        group = self._sum(key, "")
        user = self._sum(key, f"user {job.user}")
        account = self._sum(key, f"account {job.account}")
        for which, (name, words) in enumerate(_RESOURCES):
            per_job = most(f"max_{name}_per_job") if own else None
            if per_job is not None:
                yield _Check(
                    holder, per_job, which, f"{words} per job", per_job=True, exact=limits.exact
                )
            for limit, used, what in (
                (f"grp_{name}", group, f"{words} at once"),
                (f"max_{name}_per_user", user, f"{words} per user at once"),
                (f"max_{name}_per_account", account, f"{words} per account at once"),
            ):
                if (bound := most(limit)) is not None:
                    yield _Check(holder, bound, which, what, used, name)
        for which, (name, words) in enumerate(_MINUTES, len(_RESOURCES)):
            per_job = most(f"max_{name}_minutes_per_job") if own else None
            if per_job is not None:
                yield _Check(
                    holder, per_job, which, f"{words} per job", per_job=True, exact=limits.exact
                )
            if (bound := most(f"grp_{name}_run_minutes")) is not None:
                what = f"{words} of running jobs"
                yield _Check(holder, bound, which, what, group, f"{name}_minutes")
            if (bound := most(f"grp_{name}_minutes")) is not None:
                spent = getattr(limits, f"used_{name}_minutes")
                yield _Check(holder, bound, which, f"{words} in all", spent=spent)
        if own and limits.min_gpus_per_job is not None:
            least = limits.min_gpus_per_job
            yield _Check(holder, least, 0, "GPUs per job", least=True)


_LIMITS = tuple(name for name in Limits.__dataclass_fields__ if name.startswith(("max_", "grp_")))


def usage_of(snapshot: Snapshot, let_go: Collection[str] = ()) -> Usage:
    """What runs now, and the pending jobs ``let_go`` (by id) in their present shape."""
    usage = Usage(snapshot)
    for job in snapshot.jobs:
        if job.running or (job.pending and job.job_id in let_go):
            usage.add(job, present_size(job, snapshot.taken_s))
    return usage


def let_go_of(snapshot: Snapshot, ledger: Mapping[str, LedgerEntry]) -> frozenset[str]:
    """Pending jobs that carry a size of ours and no lease any more: they may start any moment."""
    now = snapshot.taken_s
    return frozenset(
        job.job_id
        for job in snapshot.pending()
        if (entry := ledger.get(job.job_id)) is not None
        and entry.written is not None
        and not job.held
        and ((begin := begin_s(job)) is None or begin <= now)
    )


def allowed_counts(
    job: Job,
    counts: Iterable[int],
    usage: Usage,
    size_at: Callable[[int], Size],
    *,
    submitted: int | None = None,
    touched: bool = False,
) -> Counts:
    """Which GPU counts the limits admit for the job now, and for each other one why not.

    ``submitted`` is the count that Slurm itself checks as long as the job was not ``touched``.
    """
    ok: list[int] = []
    refused: dict[int, str] = {}
    for count in sorted(set(counts)):
        reason = ""
        if touched or count != submitted:
            reason = usage.why_over(job, size_at(count))
        if reason:
            refused[count] = reason
        else:
            ok.append(count)
    return Counts(tuple(ok), refused)

"""What ``slurm-ext check`` asks about preemption and requeueing: will jobs come back, and in time?

The questions are pure functions of what Slurm says about itself, of partitions and QOS, and of how
long running jobs need for a save. Who may preempt whom is the site's policy and not judged here;
what a preempted job that saves checkpoints needs is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_ext.cli.checkline import Line, advice, ok
from slurm_ext.domain.document import PlanDocument
from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.domain.node import Partition
from slurm_ext.domain.walltime import parse_slurm_limit
from slurm_ext.slurm.facts import SlurmConfig
from slurm_ext.slurm.process import CommandRunner

# A grace that leaves less than this per second of the longest save is too short: the save may
# begin a step late, and the file system may be busier than when it was measured.
SAVES_IN_GRACE = 2.0
# Below this a step that starts on a busy node may find its credential expired.
LEAST_CRED_EXPIRE_S = 10.0
# Slurm's default; and what a job that is preempted every hour does not reach in a year.
DEFAULT_MAX_BATCH_REQUEUE = 5
# From the end of one rank to that of the last: it may be saving, or wait for a controller or for
# signs of life of rank 0's ft-run.
LEAST_WAIT_S = 120
ENOUGH_BATCH_REQUEUES = 10_000
QOS_COLUMNS = ("Name", "PreemptMode", "GraceTime")


@dataclass(frozen=True, slots=True)
class Victim:
    """A partition or QOS whose jobs may be preempted. ``modes`` are words in lower case."""

    name: str
    modes: frozenset[str]
    grace_s: float


def requeue_questions(
    slurm: SlurmConfig, victims: Iterable[Victim], save_s: float | None, *, lifts: bool
) -> Iterator[Line]:
    """Whether preempted jobs come back and have the time to save. Pure.

    ``save_s`` is the longest measured save of the jobs that run now, ``None`` where none tells.
    ``lifts`` tells whether the daemon acts anywhere, and so lifts Slurm's delay after a requeue.
    """
    if slurm.requeues_jobs:
        yield ok("JobRequeue", "batch jobs may be requeued")
    else:
        yield advice(
            "JobRequeue",
            "0: a job comes back only with its own --requeue",
            "set JobRequeue=1, or have it in every script",
        )
    yield from _preemption(slurm, victims, save_s)
    yield _kill_wait(slurm, save_s)
    yield from _lost_rank(slurm)
    yield _delay(slurm, lifts=lifts)


def _preemption(
    slurm: SlurmConfig, victims: Iterable[Victim], save_s: float | None
) -> Iterator[Line]:
    if not slurm.preempt_type:
        yield ok("PreemptMode", "nothing is preempted")
        return
    victims = tuple(victims)
    if any("requeue" in victim.modes for victim in victims):
        yield _own_requeues(slurm)
    for victim in victims:
        if not victim.modes or "off" in victim.modes:
            continue
        name = f"PreemptMode {victim.name}"
        if "cancel" in victim.modes:
            yield advice(
                name,
                "cancel: a preempted job does not come back, not even one under ft-run",
                "set PreemptMode=REQUEUE there",
            )
        elif "suspend" in victim.modes:
            yield advice(
                name,
                "suspend: a suspended job keeps its GPUs",
                "set PreemptMode=REQUEUE there",
            )
        else:
            yield ok(name, ", ".join(sorted(victim.modes)))
        if "suspend" not in victim.modes:
            yield _grace(victim, save_s, slurm.kill_wait_s)


def _own_requeues(slurm: SlurmConfig) -> Line:
    """Slurm counts the end of a job within a preemption's grace as a launch that failed."""
    text = slurm.get("MaxBatchRequeue")
    most = int(text) if text.isdigit() else DEFAULT_MAX_BATCH_REQUEUE
    if most < ENOUGH_BATCH_REQUEUES:
        return advice(
            "MaxBatchRequeue",
            f"{most}: after so many preemptions that a job left in good order Slurm holds it",
            f"set MaxBatchRequeue={ENOUGH_BATCH_REQUEUES}"
            if text
            else "this release has no MaxBatchRequeue: scontrol release lets such a job go on",
        )
    return ok("MaxBatchRequeue", str(most))


def _grace(victim: Victim, save_s: float | None, kill_wait_s: int) -> Line:
    name = f"GraceTime {victim.name}"
    found = f"{victim.grace_s:.0f} s"
    need_s = None if save_s is None else SAVES_IN_GRACE * save_s
    if need_s is not None and victim.grace_s < need_s:
        return advice(
            name,
            f"{found}, and the longest save of a running job took {save_s:.1f} s",
            f"set GraceTime={need_s:.0f} or more there, or its last checkpoint is all that is left",
        )
    if victim.grace_s <= 0:
        return advice(
            name,
            f"{found}: a preempted job has KillWait ({kill_wait_s} s) to save, and no more",
            "set GraceTime there to twice the time of a save, 60 to begin with",
        )
    return ok(name, found)


def _kill_wait(slurm: SlurmConfig, save_s: float | None) -> Line:
    """At the time limit SIGTERM comes, and SIGKILL after KillWait."""
    found = f"{slurm.kill_wait_s} s between SIGTERM and SIGKILL"
    if save_s is not None and slurm.kill_wait_s < SAVES_IN_GRACE * save_s:
        return advice(
            "KillWait",
            f"{found}, and the longest save of a running job took {save_s:.1f} s",
            f"set KillWait={SAVES_IN_GRACE * save_s:.0f}, or have --signal=USR2@SECONDS in scripts",
        )
    return ok("KillWait", found)


def _lost_rank(slurm: SlurmConfig) -> Iterator[Line]:
    """What Slurm leaves the other ranks when one is lost: they have to agree who requeues."""
    if slurm.get("KillOnBadExit") == "1":
        yield advice(
            "KillOnBadExit",
            "1: Slurm kills a whole step, each ft-run with it, five seconds after a rank was lost",
            "set KillOnBadExit=0, or have `ft-run --after=$code` behind srun in scripts",
        )
    else:
        yield ok("KillOnBadExit", "a step outlives a rank that was lost")
    wait_s = int(re.sub(r"\D.*", "", slurm.get("WaitTime")) or 0)
    if 0 < wait_s < LEAST_WAIT_S:
        yield advice(
            "WaitTime",
            f"{wait_s} s: srun kills the other ranks so long after the first one has ended",
            f"set WaitTime=0 or {LEAST_WAIT_S} and more: saving and requeueing may take that long",
        )
    else:
        yield ok("WaitTime", f"{wait_s} s" if wait_s else "srun waits for all ranks")


def _delay(slurm: SlurmConfig, *, lifts: bool) -> Line:
    hold_s = slurm.requeue_hold_s
    found = f"Slurm keeps a requeued job back for {hold_s:.0f} s"
    if slurm.cred_expire_s < LEAST_CRED_EXPIRE_S:
        return advice(
            "requeue delay",
            f"{found}; credentials of steps expire after {slurm.cred_expire_s:.0f} s",
            "set AuthInfo=cred_expire=120 again: steps that start slowly fail, and the daemon lifts"
            " the delay",
        )
    if not lifts:
        return advice(
            "requeue delay",
            f"{found}, and the daemon only observes",
            "switch on act: [order] for a partition, and it lifts the delay there",
        )
    return ok("requeue delay", f"{found}; the daemon lifts that where it acts")


# -- reading -------------------------------------------------------------------------------------


def victims_of(
    slurm: SlurmConfig, partitions: Iterable[Partition], runner: CommandRunner
) -> list[Victim]:
    """The partitions or QOS by which Slurm preempts. Raises SourceMissingError."""
    if slurm.preempt_type == "qos":
        return qos_victims(
            runner.run(
                ["sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS_COLUMNS)}"]
            ).stdout,
            slurm.preempt_mode,
        )
    if not slurm.preempt_type:
        return []
    return [
        Victim(f"of {p.name}", _modes(p.preempt_mode, slurm.preempt_mode), p.grace_s)
        for p in partitions
    ]


def qos_victims(text: str, whole: frozenset[str]) -> list[Victim]:
    """From ``sacctmgr``'s answer; ``cluster`` stands for the mode of the ``whole`` cluster."""
    found = []
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) != len(QOS_COLUMNS):
            raise SourceMissingError(
                "sacctmgr", f"the row {line[:80]!r} has {len(columns)} columns"
            )
        name, mode, grace = columns
        try:
            grace_s = parse_slurm_limit(grace) if grace else 0.0
        except ValueError as exc:
            raise SourceMissingError("sacctmgr", f"GraceTime of QOS {name}: {exc}") from exc
        found.append(Victim(f"of QOS {name}", _modes(mode, whole), grace_s or 0.0))
    return found


def _modes(text: str, whole: frozenset[str]) -> frozenset[str]:
    words = frozenset(word.strip().lower() for word in text.split(",") if word.strip())
    own = words - {"cluster", "gang", "within"}
    return own or whole - {"gang", "within"}


def longest_save_s(documents: Iterable[PlanDocument]) -> float | None:
    """The longest save that a job which runs now has measured."""
    found = [
        d.truth.save_s
        for d in documents
        if d.truth is not None and d.truth.save_s is not None and d.state == JobState.RUNNING.value
    ]
    return max(found, default=None)

"""Jobs that the daemon has no document of, but whose own ``ft-run`` left a record in the spool.

A job that ends within one cycle is seen by no cycle, a daemon that is down sees none, and a job
without an ``--ft-*`` option is not planned at all. What is shown of such a job is what its user's
directory says; whose job it was nobody has checked, unless it is in the queue still and Slurm is
asked (`with_slurm`). Hence the choice a reader would question: only the directories of the users
that were asked for are read, one's own by default, and only root reads everybody's.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_ext.cli.past import Past, gpus_of
from slurm_ext.control.spool import Inbox, Spool
from slurm_ext.control.truth import truth_from
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.document import ENDED, Mode, PlanDocument
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.domain.pausing import last_pause
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.progress import Progress
from slurm_ext.slurm.parse_jobs import epoch, text_or_empty
from slurm_ext.slurm.process import CommandRunner
from slurm_ext.slurm.rows import RowFormat, new_mark

# The policy of a document that no daemon wrote.
NO_POLICY = "none"
# The partition of a job that only its own record tells of.
UNKNOWN = "unknown"
NOT_OURS = "it has no --ft-* option, so slurm-ext leaves it to Slurm"
NOT_YET = "the daemon has not planned it yet: it looks once in a cycle"
NOT_KEPT = "nothing of it is kept but by Slurm's accounting"
UNSEEN = (
    "the daemon keeps no plan of it (it has no --ft-* option, or came and went within a cycle);"
    " this is what its own ft-run recorded"
)
OF_ANOTHER = (
    "the daemon plans it, and keeps one document for all tasks of an array, which is about {} now;"
    " this is what Slurm and its own ft-run tell"
)
UNPLANNED = (
    "it has no --ft-* option, so it is not planned; this is what Slurm and its own ft-run tell"
)
# The last column may hold anything.
_COLUMNS = (
    "JobArrayID",
    "UserID",
    "State",
    "Partition",
    "QOS",
    "Reason",
    "EligibleTime",
    "tres-alloc",
)
_TEXT = "admin_comment"
# An answer makes the words better; without it there are words all the same.
_ANSWER_S = 5.0
_TASK = re.compile(r"^\d+_\d+$", re.ASCII)


class _Named:
    """Job ids that one of some names stands for: an array's number stands for all its tasks."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, job_id: object) -> bool:
        name = str(job_id)
        return name in self._names or name.partition("_")[0] in self._names


class _Undocumented:
    """Every job id but those of jobs that have a document."""

    def __init__(self, known: Collection[int]) -> None:
        self._known = known

    def __contains__(self, job_id: object) -> bool:
        return int(str(job_id).partition("_")[0]) not in self._known


def named(
    spool: Path, names: Collection[str], known: Collection[PlanDocument], users: Collection[str]
) -> list[PlanDocument]:
    """What is recorded about these jobs and tasks beyond the documents that are ``known``.

    A single task of an array is told from its own record, for the array's document tells of none;
    who owns the array is known, so that only its owner's record counts.
    """
    by_base = {document.base_id: document for document in known}
    missing: set[str] = set()
    tasks: dict[int, set[str]] = {}
    for name in names:
        document = by_base.get(int(re.split(r"[_+]", name)[0]))
        if document is None:
            missing.add(name)
        elif _TASK.match(name) and document.job_id != name and document.uid is not None:
            tasks.setdefault(document.uid, set()).add(name)
    found = list(_records(spool, _uids(spool, users), missing))
    for uid, wanted in tasks.items():
        for told in _records(spool, [uid], wanted):
            found.append(_beside(told, by_base[told.base_id]))
    return found


def about(
    spool: Path,
    names: Collection[str],
    known: Collection[PlanDocument],
    users: Collection[str],
    runner: CommandRunner,
) -> list[PlanDocument]:
    """`named`, and by the queue the tasks that neither their array's document nor a record tells
    of; Slurm is asked once for each of the two."""
    recorded = with_slurm(named(spool, names, known, users), runner)
    have = {document.job_id for document in recorded}
    by_base = {document.base_id: document for document in known}
    arrays = {
        name: array
        for name in sorted(names)
        if (array := by_base.get(int(re.split(r"[_+]", name)[0]))) is not None
        and not array.tells_of(name)
        and name not in have
    }
    rows = _rows(list(arrays), runner) if arrays else {}
    tasks = [_beside(_queued(n, rows[n]), arrays[n]) for n in arrays if n in rows]
    return [*recorded, *tasks]


def _beside(told: PlanDocument, array: PlanDocument) -> PlanDocument:
    """A task's own record, where the document of its array is about other tasks."""
    if array.tells_of(told.job_id):
        return told
    decision = replace(told.decision, reason=OF_ANOTHER.format(array.job_id))
    return replace(told, decision=decision)


def recent(
    spool: Path, known: Collection[int], users: Collection[str], since_s: float
) -> list[PlanDocument]:
    """Jobs without a document of which anything is recorded since then."""
    reader = Spool(spool)
    found: list[PlanDocument] = []
    for uid in _uids(spool, users):
        inbox = reader.read_about(uid, _Undocumented(known), since_s)
        found += (d for d in _documents(uid, inbox) if _last_s(d) >= since_s)
    return found


def with_slurm(documents: Sequence[PlanDocument], runner: CommandRunner) -> list[PlanDocument]:
    """These documents with what Slurm, asked once, says of those whose job may be in the queue.

    Where it does not answer, or shows another user's job under that number, they stay as they are.
    """
    names = [d.job_id for d in documents if d.policy == NO_POLICY and d.state != ENDED]
    told = _rows(names, runner) if names else {}
    return [_told(d, told[d.job_id]) if d.job_id in told else d for d in documents]


def from_queue(job: str, runner: CommandRunner) -> PlanDocument | None:
    """A job of which nothing is recorded, as the queue has it; ``None`` where it has no such."""
    rows = _rows([job], runner)
    return _queued(job, rows[job]) if job in rows else None


def _queued(job: str, row: Sequence[str]) -> PlanDocument:
    uid, state, partition, qos, reason, eligible, tres, comment = row
    why = NOT_YET if "ft:" in comment else NOT_OURS
    begin_s = epoch(eligible) if state == JobState.PENDING.value else None
    return replace(
        _blank(job, _user(uid), int(uid) if uid.isdecimal() else None, state, gpus_of(tres), why),
        partition=partition,
        qos=text_or_empty(qos),
        slurm_reason=text_or_empty(reason),
        decision=Decision(job, Verdict.LEAVE, 0, why, expected_start_s=begin_s),
    )


def from_past(row: Past) -> PlanDocument:
    """A job that has left the queue and of which nothing is recorded."""
    return replace(
        _blank(row.job_id, row.user, None, ENDED, row.gpus, NOT_KEPT),
        partition=row.partition,
        qos=row.qos,
    )


def _blank(job: str, user: str, uid: int | None, state: str, gpus: int, why: str) -> PlanDocument:
    return PlanDocument(
        job_id=job,
        base_id=int(job.partition("_")[0]),
        user=user,
        uid=uid,
        partition=UNKNOWN,
        state=state,
        made_s=0.0,
        mode=Mode.OBSERVE,
        policy=NO_POLICY,
        decision=Decision(job, Verdict.LEAVE, 0, why),
        permit=Permit(order=False),
        requested_gpus=gpus,
        present_gpus=gpus,
    )


def _user(uid: str) -> str:
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return uid


def _rows(names: Sequence[str], runner: CommandRunner) -> Mapping[str, Sequence[str]]:
    form = RowFormat((*_COLUMNS, _TEXT), new_mark())
    argv = ["squeue", "-h", "-a", "-r", "-t", "all", "-j", ",".join(names), "-O", form.argument]
    try:
        answer = runner.run(argv, timeout_s=_ANSWER_S, check=False)
        rows = [form.fields(row, "squeue") for row in form.split(answer.stdout, "squeue")]
    except (SlurmCommandError, SourceMissingError):
        return {}
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def _told(document: PlanDocument, row: Sequence[str]) -> PlanDocument:
    uid, state, partition, qos, reason, eligible, _, comment = row
    if uid != str(document.uid):
        return document
    decision = document.decision
    if "ft:" not in comment:
        decision = replace(decision, reason=UNPLANNED)
    if state == JobState.PENDING.value:
        decision = replace(decision, expected_start_s=epoch(eligible))
        put_off = last_pause(document.attempts)
        if put_off is not None:
            decision = replace(
                decision,
                waits_for=f"the end of its pause ({put_off.paused.words}); slurm-ext resume"
                f" {document.job_id} lets it start",
            )
    return replace(
        document,
        state=state,
        partition=partition,
        qos=text_or_empty(qos),
        slurm_reason=text_or_empty(reason),
        decision=decision,
    )


def _records(spool: Path, uids: Collection[int], names: Collection[str]) -> Iterator[PlanDocument]:
    if not names:
        return
    reader = Spool(spool)
    for uid in uids:
        yield from _documents(uid, reader.read_about(uid, _Named(names)))


def _documents(uid: int, inbox: Inbox) -> Iterable[PlanDocument]:
    for (_, job_id), record in inbox.attempts.items():
        if record.attempts:
            yield _document(uid, record, inbox.progress.get((uid, job_id)))


def _uids(spool: Path, users: Collection[str]) -> list[int]:
    """Whose directories are read; a user that the system does not know has none."""
    if users:
        found = []
        for user in sorted(users):
            try:
                found.append(pwd.getpwnam(user).pw_uid)
            except KeyError:
                continue  # the caller warns about names that nobody has
        return found
    if os.getuid() != 0:
        return [os.getuid()]
    try:
        return sorted(int(name) for name in os.listdir(spool) if name.isdecimal())
    except OSError:
        return [0]  # a spool that cannot be listed is told by whoever reads its documents


def _last_s(document: PlanDocument) -> float:
    last = document.attempts[-1]
    return last.ended_s if last.ended_s is not None else last.started_s


def _document(uid: int, record: Attempts, report: Progress | None) -> PlanDocument:
    """The record in the form in which everything else is shown; the daemon never writes this."""
    last = record.attempts[-1]
    over = last.ended_s is not None and not last.requeued
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return PlanDocument(
        job_id=record.job_id,
        base_id=int(record.job_id.partition("_")[0]),
        user=user,
        uid=uid,
        partition=UNKNOWN,
        state=ENDED if over else JobState.UNKNOWN.value,
        made_s=last.ended_s if last.ended_s is not None else last.started_s,
        mode=Mode.OBSERVE,
        policy=NO_POLICY,
        decision=Decision(record.job_id, Verdict.LEAVE, 0, UNSEEN),
        permit=Permit(order=False),
        requested_gpus=last.gpus,
        present_gpus=last.gpus,
        waiting_since_s=record.attempts[0].started_s,
        attempt=last.number,
        starts=last.number + 1,
        attempts=record.attempts,
        truth=None if report is None else truth_from(report),
    )

"""Jobs that the daemon has no document of, but whose own ``ft-run`` left a record in the spool.

A job that ends within one cycle is seen by no cycle, and a daemon that is down sees none. What is
shown of such a job is what its user's directory says; whose job it was nobody has checked. Hence
the choice a reader would question: only the directories of the users that were asked for are read,
one's own by default, and only root reads everybody's.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from slurm_ext.control.spool import Spool
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.document import ENDED, Mode, PlanDocument
from slurm_ext.domain.job import JobState
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import Permit

UNSEEN = "no cycle of the daemon saw it; this is what its own ft-run recorded"
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
        found += _records(spool, [uid], wanted)
    return [_document(uid, record) for uid, record in found]


def recent(
    spool: Path, known: Collection[int], users: Collection[str], since_s: float
) -> list[PlanDocument]:
    """Jobs without a document of which anything is recorded since then."""
    reader = Spool(spool)
    found: list[PlanDocument] = []
    for uid in _uids(spool, users):
        for record in reader.read_about(uid, _Undocumented(known), since_s).attempts.values():
            if record.attempts and _last_s(record) >= since_s:
                found.append(_document(uid, record))
    return found


def _records(
    spool: Path, uids: Collection[int], names: Collection[str]
) -> Iterator[tuple[int, Attempts]]:
    if not names:
        return
    reader = Spool(spool)
    for uid in uids:
        for record in reader.read_about(uid, _Named(names)).attempts.values():
            if record.attempts:
                yield uid, record


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


def _last_s(record: Attempts) -> float:
    last = record.attempts[-1]
    return last.ended_s if last.ended_s is not None else last.started_s


def _document(uid: int, record: Attempts) -> PlanDocument:
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
        partition="unknown",
        state=ENDED if over else JobState.UNKNOWN.value,
        made_s=_last_s(record),
        mode=Mode.OBSERVE,
        policy="none",
        decision=Decision(record.job_id, Verdict.LEAVE, 0, UNSEEN),
        permit=Permit(order=False),
        requested_gpus=last.gpus,
        present_gpus=last.gpus,
        waiting_since_s=record.attempts[0].started_s,
        attempt=last.number,
        starts=last.number + 1,
        attempts=record.attempts,
    )

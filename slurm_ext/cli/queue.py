"""``slurm-ext queue``: one line per job with its plan and the reason, printed as squeue does."""

from __future__ import annotations

import argparse
import json
import pwd
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.cli import attempts, unseen
from slurm_ext.cli.explain import (
    NO_LIMIT,
    base_id_of,
    cluster_or_none,
    hold_words,
    never_known,
    shown,
    silence,
)
from slurm_ext.cli.tabular import Column, letters_help, parse_format, render
from slurm_ext.control.config import load_config
from slurm_ext.control.ledger import KEEP_S
from slurm_ext.control.spool import Spool
from slurm_ext.domain.document import ENDED, PlanDocument
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.progress import Hold
from slurm_ext.domain.spans import moment, span
from slurm_ext.slurm.process import CommandRunner

DEFAULT_FORMAT = "%.10i %9P %8u %2t %.5g %.5G %.5k %7v %.13e %.19S %R"
LONG_FORMAT = "%.10i %9P %8u %2t %.5g %.13e %.9T %.17n %.19F %.6A %12L %.18c %R"


@dataclass(frozen=True, slots=True)
class _Row:
    document: PlanDocument
    now: float


def _planned(row: _Row) -> str:
    decision = row.document.decision
    if decision.configuration is None or decision.verdict is Verdict.LEAVE:
        return "-"
    likely = "~" if decision.verdict is Verdict.WAIT else ""
    return f"{likely}{decision.configuration.gpus}"


def _place(row: _Row) -> str:
    waits = row.document.state == JobState.PENDING.value
    return str(row.document.place or "-") if waits else "-"


def _remaining(row: _Row) -> str:
    left = row.document.decision.remaining_s
    truth = row.document.truth
    runs = row.document.state == JobState.RUNNING.value
    if runs and truth is not None and truth.ends_s is not None and not truth.ends_s.unlimited:
        return span(max(0.0, truth.ends_s.value - row.now))
    if left is None:
        return "N/A"
    return NO_LIMIT if left.unlimited else span(left.value)


def _start(row: _Row) -> str:
    at = row.document.decision.expected_start_s
    return "N/A" if at is None or never_known(at, row.now) else moment(at, row.now)


def _lease(row: _Row) -> str:
    until = row.document.lease_until_s
    return "-" if until is None or until <= row.now else span(until - row.now)


def _source(row: _Row) -> str:
    left = row.document.decision.remaining_s
    return "-" if left is None else left.source.value


def _reason(row: _Row) -> str:
    document, decision = row.document, row.document.decision
    if document.state == ENDED:
        return f"has ended: {_cause(row)}" if _cause(row) != "-" else "has left the queue"
    if (hold := _hold(row)) is not None:
        return hold_words(hold, row.now)
    # What runs waits for nothing, whatever was planned before.
    waits = document.state == JobState.PENDING.value and decision.waits_for
    return f"waits for {decision.waits_for}" if waits else decision.reason


def _hold(row: _Row) -> Hold | None:
    """The pause that the job is in, as far as it has told."""
    truth = row.document.truth
    runs = row.document.state == JobState.RUNNING.value
    return truth.hold if truth is not None and runs else None


def _speed(row: _Row) -> str:
    truth = row.document.truth
    return "-" if truth is None else f"{truth.samples_per_s:.4g}"


def _paused(row: _Row) -> str:
    hold = _hold(row)
    return "-" if hold is None else moment(hold.until_s, row.now)


def _step(row: _Row) -> str:
    truth = row.document.truth
    if truth is None:
        return "-"
    return f"{truth.step}/{truth.total_steps}" if truth.total_steps else str(truth.step)


def _end(row: _Row) -> str:
    truth = row.document.truth
    if truth is None or truth.ends_s is None:
        return "N/A"
    return NO_LIMIT if truth.ends_s.unlimited else moment(truth.ends_s.value, row.now)


def _end_source(row: _Row) -> str:
    truth = row.document.truth
    return "-" if truth is None or truth.ends_s is None else truth.ends_s.source.value


def _cause(row: _Row) -> str:
    ended = [a for a in row.document.attempts if a.ended_s is not None]
    if not ended:
        return "-"
    return ended[-1].cause.value if ended[-1].cause is not None else "unknown"


def _checkpoint(row: _Row) -> str:
    truth = row.document.truth
    if truth is not None and truth.save_error:
        kept = "none" if truth.checkpoint_step is None else truth.checkpoint_step
        return f"save fails ({kept})"  # step of the one that is left
    if truth is None or truth.checkpoint_step is None:
        return "-"
    if truth.checkpoint_s is None:
        return str(truth.checkpoint_step)
    return f"{truth.checkpoint_step} {span(max(0.0, row.now - truth.checkpoint_s))} ago"


# As squeue abbreviates them; a job that has left the queue is only shown when asked for by id.
_STATES = {"PENDING": "PD", "RUNNING": "R", "COMPLETING": "CG", "SUSPENDED": "S", ENDED: "ED"}

LETTERS: dict[str, Column[_Row]] = {
    "i": Column("JOBID", lambda r: r.document.job_id, "job id"),
    "P": Column("PARTITION", lambda r: r.document.partition or "(several)", "partition"),
    "q": Column("QOS", lambda r: r.document.qos, "QOS"),
    "u": Column("USER", lambda r: r.document.user, "user"),
    "a": Column("ACCOUNT", lambda r: r.document.account, "account"),
    "t": Column("ST", lambda r: _STATES.get(r.document.state, r.document.state[:2]), "state"),
    "g": Column("GPUS", lambda r: str(r.document.present_gpus), "GPUs in Slurm's books now"),
    "s": Column("ASKED", lambda r: str(r.document.requested_gpus), "GPUs as submitted"),
    "G": Column("PLAN", _planned, "GPUs planned (~ = likely, not decided)"),
    "k": Column("PLACE", _place, "place among our jobs that wait"),
    "v": Column("VERDICT", lambda r: r.document.decision.verdict.value, "what the plan wants"),
    "N": Column("NODELIST", lambda r: fold(r.document.decision.nodes) or "-", "planned nodes"),
    "e": Column("WORK", _remaining, "estimated remaining run time"),
    "E": Column("SOURCE", _source, "where that estimate comes from"),
    "S": Column("START", _start, "expected start"),
    "l": Column("LEASE", _lease, "time until the lease ends"),
    "p": Column("PRIORITY", lambda r: str(r.document.priority), "Slurm's priority"),
    "R": Column("REASON", _reason, "reason, or what the job waits for"),
    "r": Column("SLURMREASON", lambda r: r.document.slurm_reason, "Slurm's own reason"),
    "T": Column("SAMPLES/S", _speed, "speed that the job reports"),
    "H": Column("PAUSED", _paused, "until when it is paused at the latest"),
    "n": Column("STEP", _step, "step that it reports, of all where it says"),
    "F": Column("END", _end, "predicted end of a running job"),
    "f": Column("ENDSOURCE", _end_source, "where that prediction comes from"),
    "A": Column("STARTS", lambda r: str(r.document.starts), "how often it was started"),
    "L": Column("LASTEND", _cause, "why its last attempt ended"),
    "c": Column(
        "CHECKPOINT", _checkpoint, "step and age of its last checkpoint, or that saving fails"
    ),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "queue",
        help="plan and reason of every job, printed as squeue does",
        description="List the waiting jobs that slurm-ext plans, in planned order, then those that"
        " run. Jobs that have ended are shown for a while when -j names them, and with --attempts.",
        epilog=f"Format fields:\n{letters_help(LETTERS)}\nDefault: {DEFAULT_FORMAT}\n"
        f"With --long: {LONG_FORMAT}\n\n"
        f"Format fields with --attempts:\n{letters_help(attempts.LETTERS)}\n"
        f"Default: {attempts.DEFAULT_FORMAT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # -h is --noheader, as in squeue
    )
    parser.add_argument("--help", action="help", help="show this help and exit")
    parser.add_argument("-u", "--user", metavar="USER[,..]", help="only jobs of these users")
    parser.add_argument("-j", "--jobs", metavar="ID[,..]", help="only these jobs")
    parser.add_argument("-p", "--partition", metavar="NAME[,..]", help="only these partitions")
    parser.add_argument(
        "-o",
        "--format",
        metavar="FORMAT",
        help="fields of a line, see below",
    )
    parser.add_argument(
        "-l",
        "--long",
        action="store_true",
        help="what jobs report beside what was planned: speed, step, end, last checkpoint",
    )
    parser.add_argument(
        "--attempts", action="store_true", help="one line per start of each job, with its end"
    )
    parser.add_argument("-h", "--noheader", action="store_true", help="no heading line")
    parser.add_argument("--json", action="store_true", help="plan documents as a JSON list")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    usual = LONG_FORMAT if args.long else DEFAULT_FORMAT
    usual = attempts.DEFAULT_FORMAT if args.attempts else usual
    wanted = usual if args.format is None else args.format
    if args.attempts:
        of_starts = parse_format(wanted, attempts.LETTERS)
    else:
        pieces = parse_format(wanted, LETTERS)
    spool = load_config(args.config).spool
    try:
        documents = Spool(spool).read_plans()
    except SourceMissingError as exc:
        raise DataError(
            str(spool),
            f"cannot be read ({exc.reason})",
            "is the daemon set up? see slurm-ext check",
        ) from exc
    users = _words(args.user)
    for user in sorted(users - {document.user for document in documents.values()}):
        if not _known(user):
            print(f"slurm-ext: warning: -u {user}: there is no such user", file=sys.stderr)
    partitions = _words(args.partition)
    names = _words(args.jobs)
    ids = {base_id_of(word) for word in names}
    now = time.time()
    known = list(documents.values())
    if ids:
        found = unseen.about(spool, names, known, users, CommandRunner())
        known = [
            d for d in known if any(d.tells_of(w) for w in names if d.base_id == base_id_of(w))
        ]
        known += found
    elif args.attempts:
        known += unseen.recent(spool, documents.keys(), users, now - KEEP_S)
    chosen = [
        document
        for document in known
        if (not users or document.user in users)
        and (not partitions or document.partition in partitions)
        and (document.base_id in ids if ids else args.attempts or document.state != ENDED)
    ]
    if args.attempts:
        chosen.sort(key=lambda d: (d.base_id, _task(d.job_id)))
    else:
        chosen.sort(key=_order)
    whole = cluster_or_none(spool)
    if whole is not None and (warning := silence(whole, now)):
        print(f"slurm-ext: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps([shown(document) for document in chosen]))
        return 0
    header = not args.noheader
    if args.attempts:
        lines = render(attempts.starts(chosen, now), of_starts, attempts.LETTERS, header)
    else:
        lines = render((_Row(document, now) for document in chosen), pieces, LETTERS, header)
    for line in lines:
        print(line)
    return 0


def _order(document: PlanDocument) -> tuple[str, str, bool, int, int]:
    """What waits before what runs, each in planned order."""
    return (
        document.partition,
        document.qos,
        document.state != JobState.PENDING.value,
        document.decision.rank,
        document.base_id,
    )


def _task(job_id: str) -> int:
    task = job_id.partition("_")[2]
    return int(task) if task.isdecimal() else -1


def _known(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _words(text: str | None) -> set[str]:
    return {word for word in (text or "").split(",") if word}

"""``slurm-ext explain JOBID``: why a job got that GPU count, that place, those nodes.

Everything told here was written by the daemon with its decision; nothing is computed again, so
that the words cannot differ from what was decided. ``--script`` asks the opposite question, what
would happen, and lives in `slurm_ext.cli.foresee`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slurm_ext.cli import past, unseen
from slurm_ext.cli.past import Past
from slurm_ext.control.config import load_config
from slurm_ext.control.permits import NO_GPUS
from slurm_ext.control.spool import read_cluster, read_plan
from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.document import ENDED, ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.errors import DataError, ProtocolError, SourceMissingError
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import JobState
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.progress import Hold
from slurm_ext.domain.request import PLANS
from slurm_ext.domain.spans import about, counted, moment
from slurm_ext.estimate.remaining import NO_LIMIT_S
from slurm_ext.policy.roomless import term_name
from slurm_ext.slurm.process import CommandRunner

_JOB_ID = re.compile(r"^(\d+)(?:_(?:\d+|\[.*\])|\+\d+)?$")
# In place of a number that only planning needs.
NO_LIMIT = "no time limit"
# A document older than this many leases says what was, not what is.
STALE_LEASES = 1.0

# Printed as a percentage with one digit.
_LEAST_GAP = 0.0005

_SURE = {
    Source.PROGRESS: "extrapolated from what the job itself reports",
    Source.MEASURED: "measured for this very configuration",
    Source.INTERPOLATED: "interpolated between measured configurations",
    Source.HISTORY: "taken from earlier jobs of the same kind",
    Source.DECLARED: "declared, not measured: taken from the time limit",
}


_CARRIED_OUT = {
    Mode.OBSERVE: "the daemon only observes here: nothing of this is carried out",
    Mode.ACTING: "the daemon carries this out",
    Mode.RELEASED: "an administrator took everything back: nothing of this is carried out",
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="why a job got that GPU count, that place and those nodes",
        description="Tell in plain words what is planned for a job and why, or, with --script,"
        " what would happen to a script if it were submitted now. A script that would be refused,"
        " or queued and never started, ends with 1.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("job", nargs="?", metavar="JOBID", help="a job, array or array task")
    what.add_argument(
        "--script",
        metavar="FILE",
        type=Path,
        help="a batch script not submitted yet; slurmctld uses up one job id for the answer",
    )
    parser.add_argument("--json", action="store_true", help="print the plan document itself")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one job; 1 where nothing is known about it."""
    if args.script is not None:
        from slurm_ext.cli.foresee import foresee

        return foresee(args.script, args.config, as_json=args.json)
    spool = load_config(args.config).spool
    runner = CommandRunner()
    document, ended = _with_end(_known(spool, args.job, runner), runner)
    if args.json:
        print(json.dumps(shown(document)))
        return 0
    for line in tell(document, cluster_or_none(spool), time.time(), ended):
        print(line)
    return 0


def shown(document: PlanDocument) -> object:
    """The document for programs: null for each number that only stands in for one."""
    return _without_stand_ins(json.loads(document.to_json()), document.made_s)


def _without_stand_ins(value: object, now: float) -> object:
    if isinstance(value, list):
        return [_without_stand_ins(item, now) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _without_stand_ins(item, now) for key, item in value.items()}
    if found.get("unlimited") is True:
        found |= dict.fromkeys(("value", "low", "high"))
    start_s = found.get("expected_start_s")
    if isinstance(start_s, float) and never_known(start_s, now):
        found["expected_start_s"] = None
    return found


class _NoDocumentError(DataError):
    """The spool is there, and holds nothing about a job."""


def _known(spool: Path, job: str, runner: CommandRunner) -> PlanDocument:
    """The job's document, or else what its own ``ft-run`` recorded, or else what Slurm says."""
    try:
        document = document_of(spool, job)
        if document.tells_of(job):
            return document
        found = unseen.about(spool, {job}, (document,), (), runner)
        if found:
            return found[0]
        raise _NoDocumentError(
            f"job {job}",
            f"what the daemon knows of its array is about {document.job_id}",
            f"squeue -j {job} tells whether Slurm knows it",
        )
    except _NoDocumentError as exc:
        recorded = unseen.named(spool, {job, str(base_id_of(job))}, (), ())
        exact = [document for document in recorded if document.job_id == job] or recorded
        if len(exact) > 1:
            raise DataError(
                exc.place,
                "is an array, and the daemon knows nothing of it",
                f"name one of its tasks, as in {exact[0].job_id}",
            ) from exc
        if exact:
            return unseen.with_slurm(exact, runner)[0]
        queued = unseen.from_queue(job, runner)
        if queued is not None:
            return queued
        rows = past.ask(job, runner)
        if rows is None:
            raise
        if not rows:
            raise DataError(
                exc.place,
                "there is no such job: neither the queue nor Slurm's accounting has it",
                "squeue --me lists yours",
            ) from exc
        if len(rows) > 1:
            raise DataError(
                exc.place,
                "is an array of which nothing is kept but by Slurm's accounting",
                f"name one of its tasks, as in {rows[0].job_id}, or see sacct -j {job}",
            ) from exc
        return unseen.from_past(rows[0])


def _with_end(document: PlanDocument, runner: CommandRunner) -> tuple[PlanDocument, Past | None]:
    """How a job that has left the queue ended, and where it ran, by Slurm's accounting."""
    if document.state != ENDED:
        return document, None
    rows = past.ask(document.job_id, runner)
    if not rows or len(rows) > 1 or rows[0].user != document.user:
        return document, None
    if document.policy == unseen.NO_POLICY:
        document = replace(document, partition=rows[0].partition, qos=rows[0].qos)
    return document, rows[0]


def base_id_of(text: str) -> int:
    """The number under which the daemon keeps a job: of an array, the array's."""
    match = _JOB_ID.match(text)
    if match is None:
        raise DataError(f"job id {text!r}", "is not one", "write it like 1234 or 1234_5")
    return int(match.group(1))


def document_of(spool: Path, job: str) -> PlanDocument:
    """The plan document of a job, or a DataError that says what may be the matter."""
    base_id = base_id_of(job)
    try:
        return read_plan(spool, base_id)
    except ProtocolError:
        raise
    except SourceMissingError as exc:
        try:
            os.listdir(spool / PLANS)
        except (FileNotFoundError, NotADirectoryError):
            reason, fix = (
                f"there is no spool at {spool}",
                "is the daemon set up, and the spool mounted here? see slurm-ext check",
            )
        except OSError as no:
            reason, fix = (
                f"{spool / PLANS} cannot be read: {no.strerror}",
                "ask the administrator for its rights",
            )
        else:
            raise _NoDocumentError(
                f"job {job}",
                "the daemon knows nothing of it",
                "it may have ended long ago or within a cycle, be younger than one, or carry no"
                f" --ft-* option; squeue -j {base_id} tells whether Slurm knows it",
            ) from exc
        raise DataError(f"job {job}", reason, fix) from exc


def cluster_or_none(spool: Path) -> ClusterDocument | None:
    """What the daemon does as a whole; None where it says nothing (then the age tells)."""
    try:
        return read_cluster(spool)
    except (SourceMissingError, ProtocolError) as exc:
        print(f"slurm-ext: warning: {exc}", file=sys.stderr)
        return None


def silence(whole: ClusterDocument, now: float) -> str:
    """A warning where the daemon has been silent for too long, else nothing."""
    if not is_stale(whole, now):
        return ""
    return (
        f"the daemon has been silent for {about(now - whole.made_s)}: this is what it planned last"
    )


def tell(
    document: PlanDocument,
    whole: ClusterDocument | None,
    now: float,
    ended: Past | None = None,
) -> Iterator[str]:
    """The explanation, line by line. Pure. ``ended`` is what the accounting has of its end."""
    decision = document.decision
    head = f"Job {document.job_id} of {document.user}"
    if document.partition != unseen.UNKNOWN:
        head += f", partition {document.partition or '(several)'}"
    if document.qos:
        head += f", QOS {document.qos}"
    if document.state == ENDED:
        last = "" if decision.verdict is Verdict.LEAVE else "; this is what was planned last"
        yield f"{head}: {_end(document, now) if ended is None else ended.words(now)}{last}"
    else:
        yield f"{head}: {document.state.lower() or 'unknown'}" + (
            f" (Slurm says: {document.slurm_reason})" if document.slurm_reason else ""
        )
    yield from _gpus(document)
    if document.state == JobState.PENDING.value:
        yield from place_line(document)
        yield from _waits(document, now)
    if decision.verdict is not Verdict.LEAVE:
        yield from estimate_lines(decision)
    yield from truth_lines(document, now)
    yield from considered_lines(document)
    yield from terms_lines(document)
    yield from _state(document, whole, now)


def _end(document: PlanDocument, now: float) -> str:
    """That it has ended, without the accounting: its own ft-run may have told when."""
    told = document.attempts[-1].ended_s if document.attempts else None
    at = "" if told is None else f"; its ft-run ended at {moment(told, now)}"
    return f"has left the queue{at}; sacct -j {document.job_id} may tell more"


def starts_now(decision: Decision) -> bool:
    """Whether the plan lets the job start now, with or without a word about its shape."""
    if decision.verdict is Verdict.ORDER:
        return not decision.waits_for
    return decision.verdict is Verdict.START


def _gpus(document: PlanDocument) -> Iterator[str]:
    decision = document.decision
    asked, present = document.requested_gpus, document.present_gpus
    planned = decision.configuration.gpus if decision.configuration else present
    submitted = f"{asked} submitted"
    if document.policy == unseen.NO_POLICY and document.state != ENDED:
        of = f"in attempt {document.attempt}" if document.attempts else "by Slurm's books"
        yield f"  GPUs    {present} {of}; {decision.reason}"
        return
    if not asked and not present and document.policy != unseen.NO_POLICY:
        yield f"  GPUs    none: {NO_GPUS}"
        return
    if document.state not in (JobState.PENDING.value, ENDED):
        yield f"  GPUs    {present} granted ({submitted}): {decision.reason}"
    elif decision.verdict is Verdict.LEAVE:
        size = "at the end" if document.state == ENDED else "as submitted"
        yield f"  GPUs    {present} {size}; not planned: {decision.reason}"
        return
    elif decision.verdict is Verdict.START:
        where = f" on {fold(decision.nodes)}" if decision.nodes else ""
        yield f"  GPUs    {planned} planned{where} ({submitted}): {decision.reason}"
    elif decision.verdict is Verdict.WAIT:
        yield f"  GPUs    not decided yet ({submitted}, {planned} likely): {decision.reason}"
    else:
        differs = "" if present == asked else f" ({submitted})"
        yield f"  GPUs    {present}{differs}: {decision.reason}"
    counts = sorted({c.gpus for c in document.candidates})
    if len(counts) > 1:
        yield f"          counts it may get: {', '.join(map(str, counts))}"
    if document.state == JobState.PENDING.value:
        for reason in document.permit.reasons:
            yield f"          {reason}"


def place_line(document: PlanDocument) -> Iterator[str]:
    """Its place among the planned jobs."""
    if document.place is None:
        return
    jobs = counted(document.places, "planned job")
    text = f"  Place   {document.place} of {jobs} in this partition and QOS"
    if document.foreign_ahead:
        have = "has" if document.foreign_ahead == 1 else "have"
        text += f"; {counted(document.foreign_ahead, 'other job')} {have} a higher priority"
    yield text


def _waits(document: PlanDocument, now: float) -> Iterator[str]:
    decision = document.decision
    if decision.waits_for:
        yield f"  Waits   for {decision.waits_for}"
    begin = decision.expected_start_s
    if begin is not None and document.policy == unseen.NO_POLICY:
        if begin > now:
            yield earliest_line(begin, now)
    elif begin is not None and not starts_now(decision):
        yield start_line(begin, now)


def never_known(at_s: float, now: float) -> bool:
    """Whether an expected start hangs on the end of a job that has no time limit."""
    return at_s - now > NO_LIMIT_S / 2


def start_line(at_s: float, now: float) -> str:
    """When it is expected to start."""
    left = at_s - now
    if never_known(at_s, now):
        return "  Start   not known: a job that runs before it has no time limit"
    when = f"in about {about(left)}" if left > 0 else "any moment"
    return (
        f"  Start   {when} ({moment(at_s, now)}), if nothing else arrives and running jobs end as"
        " estimated"
    )


def earliest_line(at_s: float, now: float) -> str:
    """When Slurm lets a job start that nobody plans."""
    return f"  Start   not before {moment(at_s, now)}, in {about(at_s - now)}"


def _range(estimate: Estimate) -> str:
    if estimate.unlimited:
        return NO_LIMIT
    low, value, high = about(estimate.low), about(estimate.value), about(estimate.high)
    return value if low == value == high else f"{value} ({low} to {high})"


def estimate_lines(decision: Decision) -> Iterator[str]:
    """How long it would run, and how sure that is."""
    left = decision.remaining_s
    if left is None:
        return
    if left.unlimited:
        yield f"  Work    not known: {left.note}"
        return
    yield f"  Work    {_range(left)}; {_SURE[left.source]}" + (
        f": {left.note}" if left.note else ""
    )


def truth_lines(document: PlanDocument, now: float) -> Iterator[str]:
    """What the job itself told: steps, speed, checkpoint, end, and its attempts so far."""
    truth = document.truth
    if truth is not None:
        of = f" of {truth.total_steps}" if truth.total_steps else ""
        ago = f", {about(now - truth.at_s)} ago" if now > truth.at_s else ""
        text = f"  Reports step {truth.step}{of}, {truth.samples_per_s:.4g} samples/s{ago}"
        if truth.checkpoint_step is not None:
            text += f"; checkpoint of step {truth.checkpoint_step}"
            if truth.checkpoint_s is not None:
                text += f", {about(now - truth.checkpoint_s)} old"
        yield text
        if truth.save_error:
            yield f"          its last save failed: {truth.save_error}"
        if truth.hold is not None and document.state == JobState.RUNNING.value:
            yield f"  Paused  {hold_words(truth.hold, now).removeprefix('paused ')}"
        if truth.ends_s is not None and document.state != ENDED:
            at = truth.ends_s
            if at.unlimited:
                yield f"  End     not known: {NO_LIMIT}"
            else:
                yield f"  End     {moment(at.value, now)}; {_SURE[at.source]}"
    ended = [a for a in document.attempts if a.ended_s is not None]
    if ended:
        see = f"slurm-ext queue --attempts -j {document.base_id}"
        yield f"  Starts  {document.starts}; {see} lists them"
        last = ended[-1]
        cause = last.cause.value if last.cause is not None else "unknown"
        if last.reason.startswith(cause):
            cause = last.reason
        elif last.reason:
            cause += f": {last.reason}"
        yield f"          the last one to end: {cause}"
    if document.attempts:
        yield from _other_steps(document.attempts[-1])


def _other_steps(attempt: Attempt) -> Iterator[str]:
    """Steps of the last attempt that ended badly, where the attempt tells of another one."""
    for step in attempt.steps:
        if step.cause is not None and step.cause is not Cause.COMPLETED:
            why = (
                step.reason
                if step.reason.startswith(step.cause)
                else f"{step.cause.value}: {step.reason}"
            )
            yield f"          its step {step.step} ended: {why.removesuffix(': ')}"


def hold_words(hold: Hold, now: float) -> str:
    """That a job is paused, in one line; a resume may always come earlier."""
    by = hold.by or "somebody"
    gives = f" (release={hold.rung})" if hold.rung else ""
    until = f"until {moment(hold.until_s, now)}" if hold.until_s > now else "and should go on now"
    return f"paused by {by} since {moment(hold.since_s, now)}, {until}{gives}"


def considered_lines(document: PlanDocument) -> Iterator[str]:
    """Each GPU count, with its estimate or why it is out of the question."""
    if not document.candidates and not document.refused:
        return
    if not document.refused and not any(candidate.gpus for candidate in document.candidates):
        return  # nothing was weighed, and `_gpus` says why
    yield "  Considered"
    told = {candidate.gpus: _candidate(candidate) for candidate in document.candidates}
    lacking = {term.name: term.words for term in document.decision.terms}
    for gpus in list(told):
        if why := lacking.get(term_name(gpus)):
            told[gpus] += f"; no room now: {why}"
    told |= {int(n): f"no: {why}" for n, why in document.refused.items() if n.isdigit()}
    for gpus in sorted(told):
        noun = "GPU " if gpus == 1 else "GPUs"
        yield f"    {gpus:>4} {noun}  {told[gpus]}"
    for note in document.notes:
        yield f"    note: {note}"


def _candidate(candidate: Candidate) -> str:
    setup = candidate.configuration
    if candidate.remaining_s.unlimited:
        return NO_LIMIT
    text = _range(candidate.remaining_s)
    if candidate.throughput is not None:
        text += f", {candidate.throughput.value:.4g} samples/s"
    if setup.local_batch:
        text += f", batch {setup.local_batch} per GPU"
        if setup.accumulation > 1:
            text += f" x {setup.accumulation} accumulation steps"
    return f"{text}, {candidate.remaining_s.source.value}"


def terms_lines(document: PlanDocument) -> Iterator[str]:
    """What tipped the scales, the heaviest first."""
    # What has no room stands beside its count.
    beside = {term_name(candidate.gpus) for candidate in document.candidates}
    decision = document.decision
    terms = [term for term in decision.terms if term.name not in beside]
    if terms:
        yield "  Decided by"
        for term in sorted(terms, key=lambda t: -abs(t.value)):
            yield f"    {term.name:<14} {term.value:>10.3g}  {term.words}"


def solve_line(document: PlanDocument) -> Iterator[str]:
    """How well the GPUs of its pool were given out."""
    solve = document.solve
    if solve is None:
        return
    free = counted(solve.gpus_free, "free GPU")
    if not solve.jobs:
        yield f"          {free}, and no job that could start there"
        return
    shared = f"{free} among {counted(solve.jobs, 'job')}"
    if solve.optimal:
        yield f"          {shared}: proven best"
        return
    note = f" ({solve.note})" if solve.note else ""
    gap = f"within {solve.gap:.1%} of" if solve.gap >= _LEAST_GAP else "as good as"
    yield f"          {shared}: {gap} the best possible{note}"


def is_stale(whole: ClusterDocument, now: float) -> bool:
    """Whether the daemon has been silent for so long that its leases have run out."""
    return now - whole.made_s > STALE_LEASES * whole.lease_s


def _state(document: PlanDocument, whole: ClusterDocument | None, now: float) -> Iterator[str]:
    if document.state != ENDED and document.policy != unseen.NO_POLICY:
        stale = whole is not None and is_stale(whole, now)
        word = "; the daemon is silent" if stale else f"; {_CARRIED_OUT[document.mode]}"
        if not stale and (
            document.state != JobState.PENDING.value or document.decision.verdict is Verdict.LEAVE
        ):
            word = ""  # there is nothing to carry out
        since = moment(document.made_s, now)
        yield f"  Plan    by policy {document.policy}, unchanged since {since}{word}"
        yield from solve_line(document)
    until = document.lease_until_s
    if until is not None and until > now and document.state == JobState.PENDING.value:
        yield f"  Lease   its start is ours until {moment(until, now)}; then Slurm starts it anyway"
    if whole is not None and (warning := silence(whole, now)):
        yield f"  Beware  {warning}"

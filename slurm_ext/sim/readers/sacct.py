"""Slurm's own accounting as a workload: last month's jobs, to be replayed or judged.

Rows of one job id are its starts (``--duplicates``), components of a heterogeneous job are one job,
steps are passed over. A job waits from the time that it was *eligible*: a dependency, an own
``--begin`` or an array's ``%`` limit is the user's wish, not a queue. For a job with an ``--ft-*``
directive that does not hold (the daemon moves its earliest start), there waiting is counted from
the submission or the recorded ``--begin``.

Times are read as written, in the site's own clock, so that an hour of the day stays one; in a
period in which clocks were changed, export with ``TZ=UTC``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from slurm_ext.domain.directive import Directive, extract_from_admin_comment, parse_comment
from slurm_ext.domain.errors import DataError, DirectiveError, ProtocolError
from slurm_ext.domain.nodelist import expand
from slurm_ext.domain.tres import parse_tres
from slurm_ext.domain.walltime import MINUTE_S, parse_slurm_limit
from slurm_ext.estimate.csvtext import RowError
from slurm_ext.sim.readers.harvest import MAX_GPUS, Harvest, Row
from slurm_ext.sim.readers.sacctfile import COMMAND, rows
from slurm_ext.sim.readers.sacctjob import (
    ACTIVE,
    WAITING,
    Record,
    SacctJob,
    SacctLog,
    Span,
    join_components,
    one_job,
    without_runaways,
)
from slurm_ext.sim.readers.tracejob import Trace, TraceJob

_MAX_EPOCH_S = 2**36
_MAX_LIST = 2**16  # characters of a node list or TRES text
_NO_TIME = frozenset({"", "Unknown", "None", "N/A", "NONE"})
_ARRAY_REST = re.compile(r"_\[([^\]%]*)", re.ASCII)


def read_sacct(
    lines: Iterable[str],
    file: str,
    *,
    strict: bool = False,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    model_pattern: re.Pattern[str] | None = None,
) -> SacctLog:
    """Every job of the file, also those that wait, run, or use no GPU.

    ``model_pattern`` finds the model of jobs without a directive in their comment, name or submit
    line: its group ``model``, else its first group, else the whole match. Raises DataError where
    needed columns are missing, and for the first bad row with ``strict``.
    """
    harvest = Harvest(file, strict)
    records: dict[str, list[Record]] = {}
    unread = 0
    for row in rows(lines, file, columns=columns, delimiter=delimiter):
        try:
            if isinstance(row, RowError):
                raise row
            job_id = row.values["jobid"].strip()
            if "." in job_id:
                continue  # a step
            record, understood = _record(row, job_id, model_pattern)
        except RowError as exc:
            harvest.refuse(exc)
            continue
        unread += not understood
        records.setdefault(job_id, []).append(Record(record, row))
    jobs = join_components(one_job(starts, harvest) for starts in records.values())
    horizon_s = max((t for job in jobs for t in job.times), default=0.0)
    jobs, runaways = without_runaways(jobs, horizon_s)
    notes = list(harvest.notes())
    if unread:
        notes.append(f"{unread} with a directive that could not be read: model unknown")
    if runaways:
        notes.append(
            f"{runaways} left out: running long past their limit (sacctmgr show runawayjobs)"
        )
    jobs.sort(key=lambda job: job.submit_s)
    return SacctLog(file, tuple(jobs), horizon_s, tuple(harvest.skipped), tuple(notes))


def ended_jobs(log: SacctLog) -> tuple[list[SacctJob], tuple[str, ...]]:
    """The jobs that ran to an end on GPUs, and notes about all others.

    Raises DataError, which says what was found instead, where there is none.
    """
    kept: list[SacctJob] = []
    left: Counter[str] = Counter()
    for job in log.jobs:
        if job.gpus == 0:
            left["no GPU"] += job.copies
        elif job.waiting:
            left["still waiting"] += job.copies
        elif job.running:
            left["still running"] += 1
        elif not job.spans:
            left["ended before they started"] += job.copies
        elif job.ran_s == 0:
            left["ran for 0 s"] += 1
        else:
            kept.append(job)
    notes = (*log.notes, *(f"{n} left out: {why}" for why, n in left.most_common()))
    if not kept:
        # What a few damaged rows have is beside the point where sound ones were left out.
        bad = log.skipped[:1] if len(log.skipped) > left.total() else ()
        found = "; ".join((*notes, *bad)) or "no job at all"
        fix = f"write it with {COMMAND}"
        if left["no GPU"]:
            fix = (
                "Slurm accounts GPUs only with AccountingStorageTRES=gres/gpu in slurm.conf, and"
                f" they are told only where the columns are asked for: {fix}"
            )
        raise DataError(log.file, f"no GPU job that ran to its end ({found})", fix)
    return kept, notes


def to_trace(log: SacctLog, limit: int | None = None) -> Trace:
    """The jobs that ran to an end on GPUs, submitted relative to the first of them.

    Raises DataError where there is none.
    """
    kept, notes = ended_jobs(log)
    origin_s = kept[0].submit_s
    jobs = tuple(
        TraceJob(
            job_id=job.job_id,
            submit_s=job.submit_s - origin_s,
            duration_s=job.ran_s,
            gpus=job.gpus,
            model=job.model,
            batch=_batch(job.directive),
            samples=_samples(job.directive),
            user=job.user,
            vc=job.account,
            state=job.state,
            limit_s=job.limit_s,
            partition=job.partition,
            gpu_type=job.gpu_type,
        )
        for job in kept[:limit]
    )
    return Trace(jobs, log.skipped, "sacct", notes, origin_s)


# -- one row -------------------------------------------------------------------------------------


def _record(row: Row, job_id: str, pattern: re.Pattern[str] | None) -> tuple[SacctJob, bool]:
    """One row as a job of at most one start; False where its directive could not be read."""
    words = row.text("state", needed=True).split()
    state = words[0].rstrip("+")
    if not state.replace("_", "").isalpha() or not state.isupper():
        raise row.refuse("state", "not a state of Slurm", "do not edit sacct's output")
    submit_s = _time(row, "submit")
    if submit_s is None:
        raise row.refuse("submit", "no time", "every job has a submit time; mend the row")
    start_s, end_s = _time(row, "start"), _time(row, "end")
    eligible_s = _time(row, "eligible")
    if state in ACTIVE and start_s is None:
        raise row.refuse("start", f"no time, but the job is {state}", "mend the row")
    if state not in ACTIVE | WAITING and end_s is None:
        raise row.refuse("end", f"no time, but the job is {state}", "mend the row")
    if start_s is not None and start_s < submit_s:
        raise row.refuse("start", "before Submit", "export again with TZ=UTC")
    if start_s is not None and end_s is not None and end_s < start_s:
        raise row.refuse("end", "before Start", "export again with TZ=UTC")
    gpus, gpu_type = _gpus(row)
    nodes = _nodes(row)
    directive, understood = _directive(row, submit_s)
    spans: tuple[Span, ...] = ()
    # Slurm writes an expected start for some pending jobs.
    if start_s is not None and (state not in WAITING or end_s is not None):
        spans = (Span(start_s, end_s, nodes),)
    return (
        SacctJob(
            job_id=job_id,
            state=state,
            submit_s=submit_s,
            ready_s=_ready(submit_s, eligible_s, start_s, directive),
            gpus=gpus,
            spans=spans,
            ended_s=end_s,
            gpu_type=gpu_type,
            node_count=len(nodes) or row.whole("nnodes", 10**6, "the number of nodes") or 0,
            user=row.text("user"),
            account=row.text("account"),
            partition=row.text("partition"),
            name=_plain(row.values.get("jobname", "")),
            limit_s=_limit(row),
            directive=directive,
            model=_model(row, directive, pattern),
            copies=_copies(job_id) if not spans else 1,
        ),
        understood,
    )


def _time(row: Row, column: str) -> float | None:
    text = row.text(column)
    if text in _NO_TIME:
        return None
    try:
        if text.isascii() and text.isdigit():  # SLURM_TIME_FORMAT=%s
            seconds = float(text) if len(text) <= 12 else -1.0
        else:
            when = datetime.fromisoformat(text)
            seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as exc:
        raise row.refuse(column, "not a time", "write 2025-01-31T12:00:00") from exc
    if not 0 <= seconds <= _MAX_EPOCH_S:
        raise row.refuse(column, "not a time of this era", "write 2025-01-31T12:00:00")
    return seconds or None


def _gpus(row: Row) -> tuple[int, str]:
    for column in ("alloctres", "reqtres"):
        text = row.text(column, high=_MAX_LIST)
        if not text:
            continue
        try:
            tres = parse_tres(text)
        except (ValueError, OverflowError) as exc:
            raise row.refuse(column, str(exc), "write it like cpu=4,gres/gpu=2,node=1") from exc
        gpus = tres.gpus or 0
        if not 0 <= gpus <= MAX_GPUS:
            raise row.refuse(column, f"{gpus} GPUs", f"a job has 0 to {MAX_GPUS}")
        return gpus, tres.gpu_type
    return 0, ""


def _nodes(row: Row) -> tuple[str, ...]:
    try:
        return expand(row.text("nodelist", high=_MAX_LIST))
    except DataError as exc:
        raise row.refuse("nodelist", exc.reason, exc.fix) from exc


def _limit(row: Row) -> float | None:
    raw = row.text("timelimitraw")
    if raw.isascii() and raw.isdigit() and len(raw) <= 9:
        return float(int(raw) * MINUTE_S) or None
    text = raw or row.text("timelimit")
    if text == "Partition_Limit":
        return None
    try:
        return parse_slurm_limit(text) or None
    except ValueError as exc:
        column = "timelimitraw" if raw else "timelimit"
        raise row.refuse(column, str(exc), "write it as sacct does: D-HH:MM:SS") from exc


def _directive(row: Row, submit_s: float) -> tuple[Directive | None, bool]:
    try:
        found = extract_from_admin_comment(row.values.get("admincomment", ""))
        if found is None:
            found = parse_comment(row.values.get("comment", ""), now_s=submit_s)
    except (ProtocolError, DirectiveError):
        # The job ran all the same: what it was is known but for its model.
        return None, False
    return found, True


def _ready(
    submit_s: float, eligible_s: float | None, start_s: float | None, directive: Directive | None
) -> float:
    if directive is not None:
        ready_s = max(submit_s, directive.begin_s or 0.0)
    else:
        ready_s = max(submit_s, eligible_s or 0.0)
    return ready_s if start_s is None else min(ready_s, start_s)


def _model(row: Row, directive: Directive | None, pattern: re.Pattern[str] | None) -> str:
    if directive is not None and directive.model:
        return directive.model
    if pattern is not None:
        for column in ("comment", "jobname", "submitline"):
            match = pattern.search(row.values.get(column, ""))
            if match is not None:
                named = match.groupdict().get("model")
                return _plain(named or (match[1] if match.re.groups else match[0]) or "")
    return ""


def _copies(job_id: str) -> int:
    """Jobs behind ``38_[1-3,7]``; 1 for every other id."""
    match = _ARRAY_REST.search(job_id)
    count = 0
    for part in match[1].split(",") if match else ():
        low, _, rest = part.partition("-")
        high, _, step = rest.partition(":")
        if low.isdigit() and (high or low).isdigit() and (step or "1").isdigit():
            count += max(0, int(high or low) - int(low)) // max(1, int(step or 1)) + 1
    return max(1, count)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text.strip())[:255]


def _batch(directive: Directive | None) -> int:
    return (directive.batch_min or 0) if directive is not None else 0


def _samples(directive: Directive | None) -> float:
    return (directive.total_samples(None) or 0.0) if directive is not None else 0.0

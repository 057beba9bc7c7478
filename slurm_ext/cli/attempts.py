"""``slurm-ext queue --attempts``: one line per start of a job, the oldest first.

What is shown is what the job's own ``ft-run`` recorded, and of the attempt that runs what it has
reported so far; a job without ``ft-run`` has no lines here. A script with several steps under
``ft-run`` has a line for each, numbered as Slurm does: 0.1 is step 1 of attempt 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slurm_ext.cli.tabular import Column
from slurm_ext.domain.attempt import Attempt, as_attempt
from slurm_ext.domain.document import PlanDocument, Truth
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.spans import moment, span

DEFAULT_FORMAT = "%.10i %.5n %.19S %.11e %.5g %12N %.9b %.9l %.9c %.4x %12C %R"


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt of one job, or one step of it. ``before`` is the attempt before it.

    ``number`` is how it is called; ``over`` says that nobody will write its end any more.
    """

    job_id: str
    attempt: Attempt
    before: Attempt | None
    now: float
    number: str
    over: bool = False


def starts(documents: Iterable[PlanDocument], now: float) -> Iterator[Start]:
    """Every attempt of these jobs, in the order of the jobs."""
    for document in documents:
        before: Attempt | None = None
        for attempt in document.attempts:
            for part in parts(with_report(attempt, document.truth)):
                name = f"{part.number}.{part.step}" if attempt.steps else str(part.number)
                over = attempt.ended_s is not None
                yield Start(document.job_id, part, before, now, name, over)
            before = attempt


def parts(attempt: Attempt) -> list[Attempt]:
    """The steps of an attempt, each as if it were one by itself, in order of their numbers."""
    if not attempt.steps:
        return [attempt]
    plain = replace(attempt, steps=())
    others = [as_attempt(step, attempt.number) for step in attempt.steps]
    return sorted((plain, *others), key=lambda part: part.step)


def with_report(attempt: Attempt, report: Truth | None) -> Attempt:
    """An attempt that runs, with the steps that it has reported so far: the record of attempts is
    written when one begins and when it ends."""
    if attempt.ended_s is not None or report is None or report.attempt != attempt.number:
        return attempt
    begun = attempt.restored_step if report.restored_step is None else report.restored_step
    return replace(
        attempt, restored_step=begun, last_step=report.step, saved_step=report.checkpoint_step
    )


def _elapsed(row: Start) -> str:
    ended = row.attempt.ended_s if row.attempt.ended_s is not None else row.now
    if row.over and row.attempt.ended_s is None:
        return "-"
    return span(max(0.0, ended - row.attempt.started_s))


def _cause(row: Start) -> str:
    if row.attempt.ended_s is None:
        return "unknown" if row.over else "-"
    return row.attempt.cause.value if row.attempt.cause is not None else "unknown"


def _recovery(row: Start) -> str:
    """From the end of the attempt before to this one's first step."""
    if row.before is None or row.before.ended_s is None or row.attempt.first_step_s is None:
        return "-"
    return span(max(0.0, row.attempt.first_step_s - row.before.ended_s))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ended(row: Start) -> str:
    at = row.attempt.ended_s
    return "-" if at is None else moment(at, row.now)


LETTERS: dict[str, Column[Start]] = {
    "i": Column("JOBID", lambda r: r.job_id, "job id"),
    "n": Column(
        "NR",
        lambda r: r.number,
        "number of the attempt, from 0, and of its step where it has several",
    ),
    "S": Column("START", lambda r: moment(r.attempt.started_s, r.now), "start"),
    "E": Column("END", _ended, "end"),
    "e": Column("ELAPSED", _elapsed, "run time"),
    "g": Column("GPUS", lambda r: str(r.attempt.gpus), "GPUs granted"),
    "N": Column("NODELIST", lambda r: fold(r.attempt.nodes) or "-", "nodes"),
    "b": Column("FROM", lambda r: _number(r.attempt.restored_step), "step that it began from"),
    "l": Column("LAST", lambda r: _number(r.attempt.last_step), "last step that ended"),
    "c": Column("SAVED", lambda r: _number(r.attempt.saved_step), "last checkpoint's step"),
    "w": Column("RECOVERY", _recovery, "from the end before to the first step"),
    "x": Column("EXIT", lambda r: _number(r.attempt.exit_code), "exit code"),
    "q": Column("REQUEUED", lambda r: "yes" if r.attempt.requeued else "no", "sent back or not"),
    "C": Column("CAUSE", _cause, "why it ended"),
    "R": Column("REASON", lambda r: r.attempt.reason or "-", "why it was requeued, or why not"),
}

"""Tells a forecast: what would happen to a script that is not submitted, in words or as JSON.

Pure: everything was read and decided before. The words are those of ``slurm-ext explain`` wherever
the two say the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_ext.cli.explain import (
    considered_lines,
    estimate_lines,
    place_line,
    shown,
    solve_line,
    start_line,
    starts_now,
    terms_lines,
)
from slurm_ext.cli.trial import Trial
from slurm_ext.domain.codec import plain
from slurm_ext.domain.directive import RequestedShape
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.job import Job, ShapeKind
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.spans import about, counted

# The submit grace of job_submit.lua shows in Slurm's expected start; it is no wait.
_AT_ONCE_S = 10.0
_FORMS = {
    ShapeKind.RANK_PER_GPU: "one rank per GPU",
    ShapeKind.LAUNCHER_PER_NODE: "one launcher per node",
    ShapeKind.SINGLE_NODE: "all ranks on one node",
    ShapeKind.TASKS_PER_NODE: "a fixed number of ranks per node",
    ShapeKind.FIXED: "",
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """Everything that is known about a script that is not submitted.

    ``left`` says why it would not be planned at all, ``barred`` why Slurm would not start it as
    submitted, whatever becomes free. ``document`` is the plan document that it would get, ``None``
    where it would be refused or is not planned. ``where_known`` is false where Slurm could not be
    asked, so that the document holds estimates only. ``acts`` tells whether the daemon would carry
    the plan out.
    """

    script: str
    now: float
    trial: Trial
    submitted: RequestedShape | None = None
    kind: ShapeKind = ShapeKind.FIXED
    left: str = ""
    barred: str = ""
    job: Job | None = None
    document: PlanDocument | None = None
    where_known: bool = True
    acts: bool = False
    others: int = 0
    whole: ClusterDocument | None = None
    cycle_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether a submission would fail."""
        return self.trial.accepted is False

    @property
    def never(self) -> str:
        """Why it would be queued and not be started, whatever becomes free; empty where it may.

        One that the daemon would give another size is started in that.
        """
        document = self.document
        planned = document is not None and document.decision.verdict is not Verdict.LEAVE
        return "" if self.refused or (planned and self.acts) else self.barred


def tell(found: Forecast) -> Iterator[str]:
    """The forecast, line by line. Pure."""
    yield _headline(found)
    if found.refused:
        for words in found.trial.words[1:]:
            yield f"  {words}"
        return
    if found.trial.accepted is None:
        for words in found.trial.words[1:]:
            yield f"          {words}"
    yield from _asked(found)
    document = found.document
    if found.never:
        why = found.left or "planned, it would keep GPUs idle"
        yield f"  Plan    slurm-ext would leave it to Slurm: {why}"
    elif document is None:
        yield f"  Plan    slurm-ext would leave it to Slurm: {found.left}"
        yield from _slurm_line(found)
    else:
        if found.where_known:
            yield from _now(found, document)
            yield from _slurm_line(found)
        if document.decision.verdict is not Verdict.LEAVE:
            yield from estimate_lines(document.decision)
        yield from considered_lines(document)
        if found.where_known and document.decision.verdict is not Verdict.LEAVE:
            yield from terms_lines(document)
            yield from _basis(found, document)
    for note in found.notes:
        yield f"  Note    {note}"


def _headline(found: Forecast) -> str:
    name, trial = found.script, found.trial
    if trial.accepted is False:
        return f"{name}: would be refused: {trial.words[0]}"
    if trial.accepted is None:
        why = trial.words[0] if trial.words else "sbatch could not be asked"
        text = f"{name}: its options are right; whether Slurm would take it is not known: {why}"
        return f"{text}; it would never start: {found.never}" if found.never else text
    if found.never:
        return f"{name}: would be accepted, and never started: {found.never}"
    return f"{name}: would be accepted"


def _asked(found: Forecast) -> Iterator[str]:
    shape, job = found.submitted, found.job
    if shape is None:
        return
    gpus = counted(shape.gpus, "GPU") if shape.gpus else "no GPUs"
    text = f"  Asks    {gpus} on {counted(shape.nodes, 'node')}"
    if _FORMS[found.kind]:
        text += f", {_FORMS[found.kind]}"
    if job is not None and found.where_known:
        text += f", in partition {job.partition or ' or '.join(job.partitions) or '(unknown)'}"
        if job.account:
            text += f", account {job.account}"
        if job.qos:
            text += f", QOS {job.qos}"
    yield text
    for words in found.trial.words if found.trial.accepted else ():
        yield f"          {words}"


def _now(found: Forecast, document: PlanDocument) -> Iterator[str]:
    decision = document.decision
    gpus = decision.configuration.gpus if decision.configuration else document.requested_gpus
    where = f" on {fold(decision.nodes)}" if decision.nodes else ""
    if decision.verdict is Verdict.LEAVE:
        yield f"  Plan    slurm-ext would leave it to Slurm: {decision.reason}"
        return
    asked = document.requested_gpus
    submitted = "as submitted" if gpus == asked else f"{asked} submitted"
    if starts_now(decision):
        soon = f"within {about(max(1.0, 2 * found.cycle_s))}" if found.acts else "at once"
        yield f"  Start   {soon}, with {counted(gpus, 'GPU')}{where} ({submitted})"
        yield f"          {decision.reason}"
    else:
        if decision.expected_start_s is None:
            yield "  Start   it would wait; for how long cannot be told"
        else:
            yield start_line(decision.expected_start_s, found.now)
        yield f"  Waits   for {decision.waits_for or 'its turn'}"
        yield f"  GPUs    {gpus} likely ({submitted}): {decision.reason}"
    counts = sorted({c.gpus for c in document.candidates})
    if len(counts) > 1:
        yield f"          counts it may get: {', '.join(map(str, counts))}"
    for reason in document.permit.reasons:
        yield f"          {reason}"
    yield from place_line(document)
    if found.others:
        jobs = counted(found.others, "other waiting job")
        are = "is" if found.others == 1 else "are"
        yield (
            f"          {jobs} {are} not planned by slurm-ext: Slurm's priorities decide about the"
            " order"
        )


def _slurm_line(found: Forecast) -> Iterator[str]:
    trial = found.trial
    if found.barred:
        yield f"  Alone   Slurm by itself would never start it as submitted: {found.barred}"
        return
    if trial.start_s is None:
        return
    left = trial.start_s - found.now
    when = f"in {about(left)}" if left > _AT_ONCE_S else "at once"
    yield (
        f"  Alone   Slurm by itself expects to start it {when} on {trial.nodes} as submitted; for"
        " jobs ahead of it in the partition it adds their time limits, spread over all CPUs, even"
        " for those that it never starts"
    )


def _basis(found: Forecast, document: PlanDocument) -> Iterator[str]:
    job, whole = found.job, found.whole
    partition = job.partition if job is not None else ""
    if found.acts:
        word = f"the daemon acts in partition {partition} and would carry this out"
    elif whole is None:
        word = "no daemon is at work: it would run as submitted, in Slurm's own order"
    elif document.mode is Mode.RELEASED:
        word = "an administrator took everything back: it would run as submitted"
    else:
        word = f"the daemon only observes partition {partition}: it would run as submitted"
    yield f"  Plan    by policy {document.policy}, worked out now; {word}"
    yield from solve_line(document)


def as_document(found: Forecast) -> dict[str, object]:
    """The forecast for programs."""
    document = found.document
    return {
        "script": found.script,
        "accepted": found.trial.accepted,
        "messages": list(found.trial.words),
        "never_starts": found.never or None,
        "submitted": plain(found.submitted),
        "shape": found.kind.value,
        "slurm_start_s": found.trial.start_s,
        "slurm_nodes": found.trial.nodes,
        "acts": found.acts,
        "starts_known": found.where_known,
        "plan": None if document is None else shown(document),
        "notes": list(found.notes),
    }

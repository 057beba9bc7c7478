"""``slurm-ext explain --script FILE``: what would happen to a script if it were submitted now.

Everything is read as the user who asks, nothing is written, and no job comes to be. Whatever cannot
be read is said, and the answer goes on with the rest: without the daemon's documents the plans of
others are worked out anew, without the throughput table time limits stand in for estimates, and
without Slurm there are still the estimates for each GPU count.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from slurm_ext.cli.backend import open_backend
from slurm_ext.cli.explain import (
    considered_lines,
    estimate_lines,
    is_stale,
    place_line,
    solve_line,
    start_line,
    starts_now,
    terms_lines,
)
from slurm_ext.cli.lenient import LenientBackend
from slurm_ext.cli.trial import Trial, submitter, try_out
from slurm_ext.control.config import Config, load_config
from slurm_ext.control.observe import Observation, Observer
from slurm_ext.control.permits import SlurmFacts, facts_from
from slurm_ext.control.spool import Inbox, Spool, SpoolThread, read_cluster
from slurm_ext.control.whatif import Submitter, empty_cluster, foretell, job_of
from slurm_ext.domain.codec import plain
from slurm_ext.domain.directive import Directive, RequestedShape
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.errors import (
    DataError,
    DirectiveError,
    ProtocolError,
    SourceMissingError,
)
from slurm_ext.domain.forms import form_of
from slurm_ext.domain.job import Job, ShapeKind
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.options import OPTIONS
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.script import BatchScript, parse_script
from slurm_ext.domain.spans import about, counted
from slurm_ext.estimate.remaining import EstimateSources
from slurm_ext.estimate.table import Content, read_table
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.facts import SlurmConfig
from slurm_ext.slurm.process import CommandRunner

T = TypeVar("T")
# The submit grace of job_submit.lua shows in Slurm's expected start; it is no wait.
_AT_ONCE_S = 10.0
_NO_HABITS = "times are not corrected by how your earlier jobs went: only the daemon knows that"
# GPUs of a node where neither Slurm nor the table tells.
_USUAL_GPUS = 4
_OURS = re.compile(r"^#SBATCH\b.*(?:--ft-|\bft:)", re.MULTILINE)
_HETEROGENEOUS = re.compile(r"^#SBATCH\s+(?:hetjob|packjob)\b", re.MULTILINE)
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

    ``ours`` tells whether it carries a directive. ``document`` is the plan document that it would
    get, ``None`` where it would be refused or is not ours. ``where_known`` is false where Slurm
    could not be asked, so that the document holds estimates only. ``acts`` tells
    whether the daemon would carry the plan out.
    """

    script: str
    now: float
    trial: Trial
    submitted: RequestedShape | None = None
    kind: ShapeKind = ShapeKind.FIXED
    ours: bool = False
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


def foresee(path: Path, config_path: Path | None, *, as_json: bool = False) -> int:
    """Tell about a script that is not submitted yet; 1 where it would be refused."""
    # Observing logs what it cannot read; here the same is told as a note.
    logging.getLogger("slurm_ext").addHandler(logging.NullHandler())
    config = load_config(config_path)
    found = forecast(
        path, config, open_backend(config), CommandRunner(config.command_timeout_s), time.time()
    )
    if as_json:
        print(json.dumps(as_document(found)))
    else:
        for line in tell(found):
            print(line)
    return 1 if found.refused else 0


def forecast(
    path: Path, config: Config, backend: Backend, runner: CommandRunner, now: float
) -> Forecast:
    """Read everything that there is to read, and plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a batch script") from exc
    try:
        script = parse_script(text, now_s=now, place=path.name)
        kind, shape = form_of(script)
    except (DirectiveError, DataError) as exc:
        return Forecast(str(path), now, Trial(False, (str(exc),)))
    directive = replace(script.directive, shape=kind, req=shape)
    base = Forecast(
        str(path),
        now,
        Trial(None),
        shape,
        kind,
        ours=_OURS.search(text) is not None,
        cycle_s=config.cycle_s,
        notes=tuple(_notes_about(script, os.environ)),
    )
    lenient = LenientBackend(backend)
    spool = SpoolThread(Spool(config.spool), config.command_timeout_s)
    try:
        seen = Observer(lenient, config, spool).observe(now, {})
    except SourceMissingError as exc:
        return _without_slurm(base, script, shape, directive, config, str(exc))
    trial = try_out(runner, path)
    base = replace(base, trial=trial, notes=(*base.notes, *lenient.notes, *seen.missing))
    if trial.accepted is False:
        return base
    who, unknown = submitter(runner, _user(os.getuid()), os.getuid(), seen.slurm.cluster)
    job = job_of(script, shape, who, seen.snapshot, now)
    if trial.partition and not script.partitions:
        job = replace(job, partitions=(trial.partition,))
    if _HETEROGENEOUS.search(text):
        job = replace(job, het_job_id=0)
    base = replace(base, job=job, notes=(*base.notes, *([unknown] if unknown else ())))
    if not base.ours:
        return base
    return _planned(base, job, directive, seen, spool, config)


def _planned(
    base: Forecast,
    job: Job,
    directive: Directive,
    seen: Observation,
    spool: SpoolThread,
    config: Config,
) -> Forecast:
    notes = [*base.notes, _NO_HABITS]
    documents = _read(spool, Spool.read_plans, notes, "the plans of waiting jobs") or {}
    whole = _read(spool, lambda s: read_cluster(s.root), notes, "what the daemon does")
    if whole is not None and is_stale(whole, base.now):
        notes.append(
            f"the daemon has been silent for {about(base.now - whole.made_s)}; while it is away,"
            " jobs start as submitted, in Slurm's own order"
        )
        whole = None
    told = foretell(seen, facts_from(seen.slurm), job, directive, documents, whole, config)
    return replace(
        base,
        document=replace(told.document, notes=()),
        acts=told.acts,
        others=told.others,
        whole=whole,
        notes=tuple(dict.fromkeys(notes)),
    )


def _read(spool: SpoolThread, work: Callable[[Spool], T], notes: list[str], what: str) -> T | None:
    try:
        return spool.call(work)
    except (SourceMissingError, ProtocolError) as exc:
        notes.append(f"{what} could not be read and are worked out anew: {exc}")
        return None


def _without_slurm(
    base: Forecast,
    script: BatchScript,
    shape: RequestedShape,
    directive: Directive,
    config: Config,
    why: str,
) -> Forecast:
    """Estimates alone, on empty nodes such as the table knows."""
    base = replace(base, trial=Trial(None, (why,)), where_known=False)
    if not base.ours:
        return base
    notes, missing = list(base.notes), ""
    try:
        content = read_table(config.table)
    except (DataError, SourceMissingError) as exc:
        content, missing = Content((), ()), str(exc)
    per_node = max(
        (
            max(m.key.placement)
            for m in content.measurements
            if m.key.model == directive.model and m.key.placement
        ),
        default=max(_USUAL_GPUS, shape.gpus_per_node),
    )
    notes.append(f"nodes of {per_node} GPUs are assumed")
    if missing:
        notes.append(missing)
    index = content.index()
    types = index.gpu_types(directive.model or "")
    gpu_type = types[0] if len(types) == 1 else ""
    snapshot = empty_cluster(script, shape, per_node, gpu_type, config.max_gpus_per_job, base.now)
    job = job_of(script, shape, Submitter("", os.getuid()), snapshot, base.now)
    sources = EstimateSources(
        index=index,
        gpu_memory_gb={name.lower(): gb for name, gb in config.gpu_memory_gb.items()},
        efficiency_floor=config.efficiency_floor,
        missing=missing,
    )
    slurm = SlurmConfig("", {"prioritytype": "priority/multifactor"})
    seen = Observation(base.now, snapshot, slurm, {}, {}, Inbox(), sources)
    told = foretell(seen, SlurmFacts(), job, directive, {}, None, config)
    return replace(base, document=told.document, job=job, notes=tuple(notes))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _notes_about(script: BatchScript, environ: Mapping[str, str]) -> Iterator[str]:
    options = script.options
    if "begin" in options:
        yield f"--begin={options['begin']} is left out: this is about a job that may start now"
    if "array" in options:
        yield "this is about the array's waiting tasks as a whole; each gets the same GPU count"
    if "time" not in options:
        yield (
            "no --time: the partition's longest time limit is taken, where Slurm would take its"
            " default"
        )
    twins = [option.twin for option in OPTIONS if option.twin in environ]
    if twins:
        yield (
            f"{', '.join(twins)} in your environment fills in what the script leaves out; that is"
            " not counted here"
        )


# -- telling -------------------------------------------------------------------------------------


def tell(found: Forecast) -> Iterator[str]:
    """The forecast, line by line. Pure."""
    yield _headline(found)
    if found.refused:
        for words in found.trial.words[1:]:
            yield f"  {words}"
        return
    yield from _asked(found)
    document = found.document
    if document is None:
        yield "  Plan    it has no --ft-* option: slurm-ext would leave it to Slurm"
        yield from _slurm_line(found)
    else:
        if found.where_known:
            yield from _now(found, document)
            yield from _slurm_line(found)
        if document.decision.verdict is not Verdict.LEAVE:
            yield from estimate_lines(document.decision)
        yield from considered_lines(document)
        if found.where_known:
            yield from terms_lines(document.decision)
            yield from _basis(found, document)
    for note in found.notes:
        yield f"  Note    {note}"


def _headline(found: Forecast) -> str:
    name, trial = found.script, found.trial
    if trial.accepted is False:
        return f"{name}: would be refused: {trial.words[0]}"
    if trial.accepted is None:
        why = trial.words[0] if trial.words else "sbatch could not be asked"
        return f"{name}: its options are right; whether Slurm would take it is not known: {why}"
    return f"{name}: would be accepted"


def _asked(found: Forecast) -> Iterator[str]:
    shape, job = found.submitted, found.job
    if shape is None:
        return
    text = f"  Asks    {counted(shape.gpus, 'GPU')} on {counted(shape.nodes, 'node')}"
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
    if trial.start_s is None:
        return
    left = trial.start_s - found.now
    when = f"in {about(left)}" if left > _AT_ONCE_S else "at once"
    yield (
        f"  Alone   Slurm by itself would start it {when} on {trial.nodes} as submitted, other"
        " waiting jobs not counted"
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
        "submitted": plain(found.submitted),
        "shape": found.kind.value,
        "slurm_start_s": found.trial.start_s,
        "slurm_nodes": found.trial.nodes,
        "acts": found.acts,
        "starts_known": found.where_known,
        "plan": None if document is None else json.loads(document.to_json()),
        "notes": list(found.notes),
    }

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
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from slurm_ext.cli.backend import open_backend
from slurm_ext.cli.explain import is_stale
from slurm_ext.cli.foretold import Forecast, as_document, tell
from slurm_ext.cli.lenient import LenientBackend
from slurm_ext.cli.trial import Trial, submitter, try_out
from slurm_ext.control.barred import foresee_bar
from slurm_ext.control.config import Config, load_config
from slurm_ext.control.observe import Observation, Observer
from slurm_ext.control.permits import SlurmFacts, facts_from
from slurm_ext.control.spool import Inbox, Spool, SpoolThread, read_cluster
from slurm_ext.control.whatif import Submitter, empty_cluster, foretell, job_of
from slurm_ext.domain.directive import Directive, RequestedShape
from slurm_ext.domain.errors import (
    DataError,
    DirectiveError,
    ProtocolError,
    SlurmCommandError,
    SourceMissingError,
)
from slurm_ext.domain.forms import form_of
from slurm_ext.domain.job import Job
from slurm_ext.domain.options import OPTIONS
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.request import table_path
from slurm_ext.domain.script import BatchScript, parse_script
from slurm_ext.domain.spans import about
from slurm_ext.estimate.remaining import EstimateSources
from slurm_ext.estimate.table import Content, read_table
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.facts import SlurmConfig
from slurm_ext.slurm.process import CommandRunner

T = TypeVar("T")
_NO_HABITS = "times are not corrected by how your earlier jobs went: only the daemon knows that"
# GPUs of a node where neither Slurm nor the table tells.
_USUAL_GPUS = 4
_OURS = re.compile(r"^#SBATCH\b.*(?:--ft-|\bft:)", re.MULTILINE)
_HETEROGENEOUS = re.compile(r"^#SBATCH\s+(?:hetjob|packjob)\b", re.MULTILINE)


def foresee(path: Path, config_path: Path | None, *, as_json: bool = False) -> int:
    """Tell about a script that is not submitted yet; 1 where it would be refused or never start."""
    # Observing logs what it cannot read; here the same is told as a note.
    logging.getLogger("slurm_ext").addHandler(logging.NullHandler())
    config = _with_readable_table(load_config(config_path))
    found = forecast(
        path, config, open_backend(config), CommandRunner(config.command_timeout_s), time.time()
    )
    if as_json:
        print(json.dumps(as_document(found)))
    else:
        for line in tell(found):
            print(line)
    return 1 if found.refused or found.never else 0


def _with_readable_table(config: Config) -> Config:
    """The daemon's table, or the copy in the spool where that is out of reach from here."""
    copy = Path(table_path(config.spool))
    if os.access(config.table, os.R_OK) or not os.access(copy, os.R_OK):
        return config
    return config.model_copy(update={"table": copy})


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
        left="" if _OURS.search(_header(text)) else "it has no --ft-* option",
        cycle_s=config.cycle_s,
        notes=tuple(_notes_about(script, os.environ)),
    )
    lenient = LenientBackend(backend)
    spool = SpoolThread(Spool(config.spool), config.command_timeout_s)
    try:
        seen = Observer(lenient, config, spool).observe(now, {})
    except SourceMissingError as exc:
        return _without_slurm(base, script, shape, directive, config, exc)
    trial = try_out(runner, path)
    base = replace(base, trial=trial, notes=(*base.notes, *lenient.notes, *seen.missing))
    if trial.accepted is False:
        return base
    who, unknown = submitter(runner, _user(os.getuid()), os.getuid(), seen.slurm.cluster)
    job = job_of(script, shape, who, seen.snapshot, now)
    if trial.partition and not script.partitions:
        job = replace(job, partitions=(trial.partition,))
    if _HETEROGENEOUS.search(_header(text)):
        job = replace(job, het_job_id=0)
    more = [unknown] if unknown else []
    bar = foresee_bar(
        job,
        seen.snapshot,
        enforced=seen.slurm.enforces_limits,
        qos_known=f"qos:{job.qos}" in seen.snapshot.limits
        or not seen.slurm.get("AccountingStorageType").endswith("slurmdbd"),
        timed="time" in script.options,
    )
    if bar is not None and bar.unless:
        more.append(f"unless {bar.unless}, Slurm takes it and never starts it: {bar.why}")
    elif bar is not None:
        # What Slurm will say, so that what decides here is what will decide then.
        job = replace(job, reason=bar.reason)
        base = replace(base, barred=bar.why)
    base = replace(base, job=job, notes=(*base.notes, *more))
    if "lua" not in seen.slurm.job_submit_plugins:
        # What the Lua module would have recorded is missing: such jobs are ordered at most.
        directive = script.directive
        if not config.read_comments and not base.left:
            unseen = "job_submit.lua is not set up, so that its --ft-* options would not be seen"
            base = replace(base, left=unseen)
    if base.left:
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
    document = replace(told.document, notes=())
    if base.barred and document.decision.verdict is Verdict.LEAVE:
        # The daemon's words name a job that can be changed; this one is not submitted yet.
        document = replace(
            document,
            decision=replace(document.decision, reason=base.barred),
            permit=replace(document.permit, reasons=(base.barred,)),
        )
    return replace(
        base,
        document=document,
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
    why: SourceMissingError,
) -> Forecast:
    """Estimates alone, on empty nodes such as the table knows."""
    failed = isinstance(why, SlurmCommandError)
    words = "Slurm was not reachable" if failed else "Slurm did not answer completely"
    base = replace(base, trial=Trial(None, (words, str(why))), where_known=False)
    if base.left:
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


def _header(text: str) -> str:
    """The lines in which sbatch looks for options."""
    lines = text.splitlines()
    end = next((n for n, line in enumerate(lines) if line.strip() and line[0] != "#"), len(lines))
    return "\n".join(lines[:end])


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

"""Slurm through its own commands: the adapter that works on every release.

A snapshot is three processes that run at the same time: ``squeue`` (all jobs in narrow columns),
``sprio`` (parts of the priorities) and one ``scontrol`` that is asked for nodes, partitions and
reservations on its standard input. Nothing is asked per job. What a call needs beyond its answer
is kept here: parsed rows by their text, the last known site factor of each job (a leased job may
have none in sprio), and which jobs the last whole answer had (see ``completeness``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits, Node, Partition, Reservation, Topology
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm import parse_jobs, parse_limits, scontrol
from slurm_ext.slurm.arrays import Records, exact_id
from slurm_ext.slurm.completeness import Completeness
from slurm_ext.slurm.facts import Identity, RpcStats, SlurmConfig
from slurm_ext.slurm.json_documents import DATA_PARSERS, jobs_from_json
from slurm_ext.slurm.parse_config import parse_config, parse_sdiag
from slurm_ext.slurm.parse_nodes import (
    parse_node,
    parse_partition,
    parse_reservation,
    parse_topology,
)
from slurm_ext.slurm.parse_priorities import FORMAT, Ranking, parse_priorities
from slurm_ext.slurm.process import CommandRunner
from slurm_ext.slurm.rows import RowFormat, new_mark

_SQUEUE = ("squeue", "-h", "-a", "-t", "all")
_SPRIO = ("sprio", "-h", "-o", FORMAT)
# "version" is answered without slurmctld and comes last: an answer without it was cut off.
_SHOW = "show node\nshow partition\nshow reservation\nversion\n"
_VERSION = re.compile(r"slurm\S* \d+\.\d+", re.ASCII)
_PROMPT = "scontrol: "
_NO_PRIORITIES = "not running a supported priority plugin"
_UNKNOWN_JOB = "invalid job id"
# Above this many ids one unfiltered answer is cheaper than the list of ids on the command line.
_MAX_IDS = 500
_UNRANKED = Ranking(site_factor=0, priority=0, priority_set=False)


class CliBackend:
    """See ``Backend``. ``clock`` gives epoch seconds on slurmctld's clock."""

    name = "cli"

    def __init__(
        self,
        runner: CommandRunner | None = None,
        *,
        clock: Callable[[], float] = time.time,
        min_job_age_s: float = 300.0,
    ) -> None:
        self.runner = runner or CommandRunner()
        self._clock = clock
        self.parser = parse_jobs.JobParser()
        self._completeness = Completeness(min_job_age_s)
        self._known: dict[int, Ranking] = {}
        self._written: dict[str, int] = {}
        self._data_parser: str | None = None
        self._job_columns: tuple[str, ...] = ()
        self._observed: dict[int, tuple[Job | None, tuple[bool, int, bool], Job]] = {}
        self._ranking_rows: dict[str, tuple[int, Ranking]] = {}
        self._pool = ThreadPoolExecutor(max_workers=3, thread_name_prefix="slurm")

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Reading ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """See ``Backend``."""
        now_s = self._clock()
        show = self._pool.submit(self._show)
        jobs = self._read_queue(now_s)
        nodes, partitions, reservations = show.result()
        return Snapshot(now_s, tuple(jobs), tuple(nodes), tuple(partitions), tuple(reservations))

    def jobs(self, job_ids: Collection[str] | None = None) -> tuple[Job, ...]:
        """See ``Backend``."""
        now_s = self._clock()
        if job_ids is None:
            return tuple(self._read_queue(now_s))
        wanted = set(job_ids)
        if not wanted:
            return ()
        ranking = self._pool.submit(self._priorities)
        form = RowFormat(self._columns(), new_mark())
        rows = self._rows(form, wanted)
        found = [job for job in self.parser.parse(rows, form) if job.job_id in wanted]
        return tuple(self._observe(found, ranking.result() or {}, now_s))

    def admin_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._texts("admin_comment", job_ids)

    def user_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._texts("Comment", job_ids)

    def details(self, job_ids: Collection[str]) -> tuple[Job, ...]:
        """The named jobs as JSON tells them: an independent reading, too dear for every cycle.

        A gone job is left out. The first data_parser that this Slurm knows is kept for later calls.
        """
        bases = _bases(job_ids)
        if not bases:
            return ()
        parsers = DATA_PARSERS if self._data_parser is None else (self._data_parser,)
        for parser in parsers:
            argv = ["squeue", f"--json={parser}" if parser else "--json", "-j", ",".join(bases)]
            try:
                answer = self.runner.run(argv)
            except SlurmCommandError as exc:
                if len(bases) == 1 and _UNKNOWN_JOB in exc.stderr.lower():
                    return ()
                # An unknown parser is an exit code; silence and signals are not.
                if exc.rc is None or exc.rc < 0 or parser == parsers[-1]:
                    raise
                continue
            self._data_parser = parser
            return tuple(j for j in jobs_from_json(answer.stdout) if j.job_id in set(job_ids))
        return ()

    def slurm_config(self) -> SlurmConfig:
        """See ``Backend``. Also notes MinJobAge, which the check of completeness uses."""
        config = parse_config(self.runner.run(["scontrol", "show", "config"]).stdout)
        self._completeness.min_job_age_s = config.min_job_age_s
        return config

    def limits(self) -> Mapping[str, Limits]:
        """See ``Backend``."""
        config = self.slurm_config()
        if not config.get("AccountingStorageType").endswith("slurmdbd"):
            return {}
        qos = self.runner.run(_sacctmgr("qos", parse_limits.QOS_COLUMNS)).stdout
        assoc = self.runner.run(
            [*_sacctmgr("assoc", parse_limits.ASSOC_COLUMNS), f"cluster={config.cluster}"]
        ).stdout
        found = {**parse_limits.parse_qos(qos), **parse_limits.parse_associations(assoc)}
        if not parse_limits.has_budget(found):
            return found
        return parse_limits.with_usage(found, self.runner.run(parse_limits.USAGE_COMMAND).stdout)

    def topology(self) -> Topology:
        """See ``Backend``. With a flat topology Slurm answers nothing, or that there is none."""
        argv = ["scontrol", "-o", "show", "topology"]
        return parse_topology(self.runner.run(argv, check=False).stdout.splitlines())

    def rpc_stats(self) -> RpcStats:
        """See ``Backend``."""
        return parse_sdiag(self.runner.run(["sdiag"]).stdout)

    def identity(self) -> Identity:
        """See ``Backend``."""
        user = self.runner.run(["id", "-un"]).stdout.strip()
        uid = int(self.runner.run(["id", "-u"]).stdout)
        argv = ["sacctmgr", "-nP", "show", "user", user, "format=User,AdminLevel"]
        answer = self.runner.run(argv, check=False)
        level = next(
            (
                line.partition("|")[2]
                for line in answer.stdout.splitlines()
                if line.startswith(f"{user}|")
            ),
            None,
        )
        return Identity(user, uid, level)

    def operators(self) -> frozenset[str]:
        """See ``Backend``."""
        if not self.slurm_config().get("AccountingStorageType").endswith("slurmdbd"):
            return frozenset()
        rows = self.runner.run(_sacctmgr("user", ("User", "AdminLevel"))).stdout.splitlines()
        return frozenset(
            name
            for name, _, level in (row.partition("|") for row in rows)
            if Identity(name, -1, level.partition("|")[0]).operator
        )

    # Writing ---------------------------------------------------------------------------------

    def apply(self, actions: Sequence[Action]) -> list[ActionResult]:
        """See ``Backend``."""
        results = scontrol.apply_updates(self.runner, actions)
        for result in results:
            for keyword, value in result.action.fields:
                if result.ok and keyword.lower() == "sitefactor":
                    self._written[result.action.job_id] = int(value)
        return results

    # Inside ----------------------------------------------------------------------------------

    def _read_queue(self, now_s: float) -> list[Job]:
        """All jobs, checked for completeness."""
        ranking = self._pool.submit(self._priorities)
        form = RowFormat(self._columns(), new_mark())
        rows = self._rows(form, None)
        jobs = self.parser.parse(rows, form)
        ranked = ranking.result()
        # The raw id is the first column: cutting it off is cheaper than parsing finished jobs.
        seen = {int(row.partition("\x1f")[0]) for row in rows}
        self._completeness.check_rows(seen, ranked or (), now_s)
        observed = self._observe(jobs, ranked or {}, now_s)
        if ranked is not None:
            eligible = (
                (job.raw_id or 0, job.eligible_s or 0.0) for job in observed if job.eligible
            )
            self._completeness.check_ranks(eligible, ranked, now_s)
        self.parser.forget(rows)
        active = {job.raw_id for job in observed if job.raw_id is not None}
        self._completeness.remember(active, now_s)
        self._known = {raw: rank for raw, rank in self._known.items() if raw in active}
        ids = {job.job_id for job in observed}
        self._written = {name: value for name, value in self._written.items() if name in ids}
        return observed

    def _observe(self, jobs: list[Job], ranked: Mapping[int, Ranking], now_s: float) -> list[Job]:
        """Put in what the rows lack. A job that sprio does not rank keeps its last known factor."""
        self._known.update(ranked)
        before, self._observed = self._observed, {}
        observed = []
        for job in jobs:
            raw = job.raw_id or 0
            rank = self._known.get(raw, _UNRANKED)
            factor = rank.site_factor
            if raw not in ranked and job.job_id in self._written:
                factor = self._written[job.job_id]
            eligible = parse_jobs.eligible_at(job, now_s)
            facts = (eligible, factor, rank.priority_set)
            row, told, result = before.get(raw, (None, facts, job))
            # Copying a job costs more than all else that is done for an unchanged one.
            if row is not job or told != facts:
                result = parse_jobs.observed(job, *facts)
            self._observed[raw] = (job, facts, result)
            observed.append(result)
        return observed

    def _columns(self) -> tuple[str, ...]:
        """The columns to ask for, by what squeue says of itself, once and without slurmctld.

        One that cannot say it is an old one, which has the old columns.
        """
        if not self._job_columns:
            known = self.runner.run(["squeue", "--helpFormat"], check=False).stdout
            self._job_columns = parse_jobs.columns(known)
        return self._job_columns

    def _rows(self, form: RowFormat, wanted: Collection[str] | None) -> list[str]:
        """Rows of squeue, one per record: of all jobs, or of the named ones and perhaps of more.

        Only where an array's tasks are at equal distances, a second call asks for the last one
        (see ``arrays``). A single id that is gone makes squeue fail; of several, it leaves those
        out. So the answer about one unknown job is "no row".
        """
        found = Records(
            self._squeue(form, _bases(wanted or ()), "-r"), form.columns.index("JobArrayID")
        )
        doubtful = found.doubtful()
        if doubtful:
            own = RowFormat(("JobArrayID",), new_mark())
            together = [own.fields(row, "squeue")[0] for row in self._squeue(own, list(doubtful))]
            try:
                found.complete(doubtful, together)
            except ValueError as exc:
                raise SourceMissingError("squeue", f"{exc}, cut off?") from exc
        return found.rows()

    def _squeue(self, form: RowFormat, bases: Sequence[str], *options: str) -> list[str]:
        argv = [*_SQUEUE, *options, "-O", form.argument]
        if 0 < len(bases) <= _MAX_IDS:
            argv += ["-j", ",".join(bases)]
        try:
            answer = self.runner.run(argv)
        except SlurmCommandError as exc:
            if len(bases) == 1 and _UNKNOWN_JOB in exc.stderr.lower():
                return []
            raise
        return form.split(answer.stdout, "squeue")

    def _priorities(self) -> dict[int, Ranking] | None:
        """Rankings by raw id; ``None`` where the site computes no priorities (priority/basic)."""
        try:
            return parse_priorities(self.runner.run(_SPRIO).stdout, self._ranking_rows)
        except SlurmCommandError as exc:
            if _NO_PRIORITIES in exc.stderr.lower():
                return None
            raise

    def _texts(self, column: str, job_ids: Collection[str]) -> dict[str, str]:
        wanted = set(job_ids)
        if not wanted:
            return {}
        form = RowFormat(("JobID", "JobArrayID", column), new_mark())
        found: dict[str, str] = {}
        for row in self._rows(form, wanted):
            _, squeue_id, text = form.fields(row, "squeue")
            job_id = exact_id(squeue_id)[0]
            if job_id in wanted:
                found[job_id] = "" if text == "(null)" else text
        return found

    def _show(self) -> tuple[list[Node], list[Partition], list[Reservation]]:
        # -d for GresUsed: the only count of held GPUs where gres/gpu is no tracked resource.
        argv = ["scontrol", "-a", "-d", "-o"]
        answer = self.runner.run(argv, stdin=_SHOW)
        lines = [_without_prompt(line) for line in answer.stdout.splitlines()]
        told = [line for line in lines if line]
        if not told or not _VERSION.match(told[-1]):
            raise SourceMissingError("scontrol", "cut off: its last line is not the version")
        nodes = [parse_node(line) for line in told if line.startswith("NodeName=")]
        partitions = [parse_partition(line) for line in told if line.startswith("PartitionName=")]
        reservations = [
            parse_reservation(line) for line in told if line.startswith("ReservationName=")
        ]
        if not reservations and not any("No reservations" in line for line in told):
            raise SourceMissingError("scontrol", f"no word about reservations: {answer.stderr}")
        if not nodes or not partitions:
            raise SourceMissingError("scontrol", f"no nodes or partitions: {answer.stderr}")
        return nodes, partitions, reservations


def _without_prompt(line: str) -> str:
    """The line without scontrol's prompt; an echoed command becomes nothing."""
    prompted = line.startswith(_PROMPT) or line == _PROMPT.strip()
    while line.startswith(_PROMPT):
        line = line.removeprefix(_PROMPT)
    line = line.strip()
    if prompted and (line.startswith("show ") or line in {"version", _PROMPT.strip()}):
        return ""
    return line


def _bases(job_ids: Collection[str]) -> list[str]:
    """The numbers that ``squeue -j`` takes for these ids."""
    return sorted({re.split(r"[_+]", job_id)[0] for job_id in job_ids}, key=int)


def _sacctmgr(entity: str, columns: Sequence[str]) -> list[str]:
    return ["sacctmgr", "-nP", "show", entity, f"format={','.join(columns)}"]

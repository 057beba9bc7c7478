"""The half of ``control_loop`` that runs on the controller, as the daemon's user.

    python3 control_loop_inside.py CONFIG QUIET_CYCLES SETTLE_CYCLES

Drives the daemon's own Engine, cycle by cycle, in this process, so that each stage is timed and
each write counted where it happens. Between the cycles it asks the same Slurm the same question the
expensive way (``squeue --json`` and ``json.loads``). The last line on stdout is the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurm_ext.control.config import load_config
from slurm_ext.control.cycle import Engine
from slurm_ext.domain.action import Action, ActionKind, ActionResult
from slurm_ext.domain.job import Job
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import CommandRunner, slurm_environment

LOOKS = 7


class CountingBackend(CliBackend):
    """The product's backend with a clock and a counter around what it is asked."""

    def __init__(self, runner: CommandRunner, lease_s: float) -> None:
        super().__init__(runner)
        self.lease_s = lease_s
        self.spent: dict[str, float] = {}
        self.written: list[Action] = []
        self.early: list[str] = []
        self.last: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        with self._timed("snapshot"):
            self.last = super().snapshot()
        return self.last

    def jobs(self, job_ids: Any = None) -> tuple[Job, ...]:
        with self._timed("read_back"):
            return super().jobs(job_ids)

    def admin_comments(self, job_ids: Any) -> Any:
        with self._timed("admin_comments"):
            return super().admin_comments(job_ids)

    def apply(self, actions: Sequence[Action]) -> list[ActionResult]:
        begin = {job.job_id: job.eligible_s for job in self.last.jobs} if self.last else {}
        for action in actions:
            left = (begin.get(action.job_id) or 0.0) - time.time()
            if action.kind is ActionKind.LEASE and left > 0.75 * self.lease_s:
                self.early.append(action.job_id)
        self.written += actions
        with self._timed("apply"):
            return super().apply(actions)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        taken, self.spent = self.spent, {}
        return taken


class TimedEngine(Engine):
    """The daemon's engine with the time of each stage of the last cycle."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.stages: dict[str, float] = {}
        super().__init__(*args, **options)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with super()._stage(name):
                yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - begin


def expensive_look() -> tuple[float, float, int]:
    """Seconds of ``squeue --json``, seconds of json.loads, bytes."""
    begin = time.perf_counter()
    answer = subprocess.run(
        ["squeue", "--json"], capture_output=True, check=True, env=slurm_environment(os.environ)
    ).stdout
    middle = time.perf_counter()
    json.loads(answer.decode(errors="replace"))
    return middle - begin, time.perf_counter() - middle, len(answer)


def plain_updates(backend: CliBackend, ids: Sequence[str]) -> dict[str, float]:
    """Writing the factor that the jobs already have, in one process and in one per update."""
    factors = {job.job_id: job.site_factor for job in backend.jobs()}
    actions = [
        Action(ActionKind.FACTOR, i, (("SiteFactor", str(factors[i])),), "bench") for i in ids
    ]
    begin = time.perf_counter()
    results = CliBackend.apply(backend, actions)
    middle = time.perf_counter()
    for action in actions:
        words = [f"JobId={action.job_id}", f"SiteFactor={action.fields[0][1]}"]
        subprocess.run(["scontrol", "update", *words], check=True, capture_output=True)
    return {
        "updates": len(actions),
        "refused": sum(not r.ok for r in results),
        "one_process_s": middle - begin,
        "process_each_s": time.perf_counter() - middle,
    }


def slurmctld_rss_mib() -> float | None:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if text.startswith("Name:\tslurmctld\n"):
            return int(text.partition("VmRSS:")[2].split()[0]) / 1024
    return None


def rpc(backend: CliBackend, user: str) -> tuple[int, int]:
    """Calls and microseconds that slurmctld has spent on this user."""
    count = backend.rpc_stats().by_user.get(user)
    return (count.count, count.total_us) if count else (0, 0)


def run_cycle(engine: TimedEngine, backend: CountingBackend) -> dict[str, Any]:
    engine.stages = {}
    backend.take()
    backend.written, backend.early = [], []
    user = os.environ.get("BENCH_USER", "slurm-ext")
    calls, spent_us = rpc(backend, user)
    begin = time.perf_counter()
    report = engine.cycle()
    whole = time.perf_counter() - begin
    calls_after, spent_after_us = rpc(backend, user)
    if report.skipped:
        raise SystemExit(f"a cycle was skipped: {report.skipped}")
    spent = backend.take()
    kinds: dict[str, int] = {}
    for action in backend.written:
        kinds[action.kind.value] = kinds.get(action.kind.value, 0) + 1
    now = time.time()
    snapshot = backend.last
    assert snapshot is not None
    return {
        "cycle_s": whole,
        "snapshot_s": spent.get("snapshot", 0.0),
        "admin_comments_s": spent.get("admin_comments", 0.0),
        "plan_s": engine.stages.get("decide", 0.0),
        "act_s": engine.stages.get("act", 0.0),
        "apply_s": spent.get("apply", 0.0),
        "read_back_s": spent.get("read_back", 0.0),
        "tell_s": engine.stages.get("tell", 0.0) + engine.stages.get("announce", 0.0),
        "writes": kinds,
        "early_renewals": len(backend.early),
        "failed": report.failed,
        "pending": sum(1 for _ in snapshot.pending()),
        "leased": sum(1 for j in snapshot.pending() if (j.eligible_s or 0.0) > now),
        # One of the calls is the second sdiag's own predecessor.
        "rpcs": calls_after - calls - 1,
        "rpc_s": (spent_after_us - spent_us) / 1e6,
        "changed": report.changed,
    }


def main(config_path: str, quiet: int, settle: int) -> None:
    config = load_config(Path(config_path))
    backend = CountingBackend(CommandRunner(config.command_timeout_s), config.lease_s)
    engine = TimedEngine(config, backend)
    settling = []
    while len(settling) < settle:
        settling.append(run_cycle(engine, backend))
        print(f"settling: {settling[-1]['writes']}", file=sys.stderr, flush=True)
        kinds = set(settling[-1]["writes"])
        leased, pending = settling[-1]["leased"], settling[-1]["pending"]
        if len(settling) > 1 and kinds <= {"lease"} and not settling[-1]["changed"]:
            renewals = settling[-1]["writes"].get("lease", 0)
            if renewals <= 0.05 * max(1, leased) or not pending:
                break
    else:
        raise SystemExit(f"the queue did not settle within {settle} cycles: {settling[-3:]}")
    cycles = []
    due = time.monotonic()
    for _ in range(quiet):
        cycles.append(run_cycle(engine, backend))
        due += config.cycle_s
        time.sleep(max(0.0, due - time.monotonic()))
    # In turns, so that both ways of asking meet the same load of the machine.
    looks = []
    for _ in range(LOOKS):
        begin = time.perf_counter()
        CliBackend.snapshot(backend)
        cheap = time.perf_counter() - begin
        looks.append((cheap, *expensive_look()))
    assert backend.last is not None
    some = [job.job_id for job in backend.last.pending()][:500]
    updates = plain_updates(backend, some)
    result = {
        "settling": settling,
        "quiet": cycles,
        "looks": [
            {"snapshot_s": cheap, "squeue_s": squeue, "loads_s": loads, "bytes": size}
            for cheap, squeue, loads, size in looks
        ],
        "updates": updates,
        "daemon_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slurmctld_rss_mib": slurmctld_rss_mib(),
        "rows_parsed": backend.parser.parsed,
        "rows_read": backend.parser.rows,
    }
    engine.close()
    backend.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

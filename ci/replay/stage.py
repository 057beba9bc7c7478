"""One variant on one cluster: start it, give it the jobs, watch, and bring the records home."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import DockerException

from ci.cluster import Cluster, ClusterError, ClusterSpec
from ci.cluster.files import FileSpec, pack
from ci.replay import daemon
from ci.replay.ideal import GPUS_PER_NODE
from ci.replay.jobs import ROOT, USER, ReplayJob, script, truth_file
from ci.replay.options import Variant
from ci.replay.records import (
    SACCT_FIELDS,
    Record,
    ReplayFailedError,
    account,
    parse_sacct,
    parse_stamps,
)

SUBMITTER = Path(__file__).with_name("submitter.py")
# More slurmd per container than usual: sleeping jobs need no care, and containers cost memory.
_NODES_PER_CONTAINER = 8
# One slurm.conf for all variants, tuned for compressed time (what takes Slurm a few seconds by
# default would be minutes of the workload) and for plain Slurm's best: with reservations for every
# waiting job, as by default, its average JCT on FM-1.5-vit-large is 17 % longer (1.43 h against
# 1.22 h with one reservation for each partition, that is EASY; ideal 1.17 h).
_SCHEDULER_PARAMETERS = ",".join(
    (
        "batch_sched_delay=0",
        "sched_interval=2",
        "sched_min_interval=50000",
        "default_queue_depth=10000",
        "bf_interval=1",
        "bf_max_job_test=10000",
        "bf_window=2880",
        "bf_resolution=1",
        "bf_job_part_count_reserve=1",
        "bf_continue",
        "disable_job_shrink",
    )
)
# Slurm writes accounting a moment after a job has ended.
_ACCOUNTING_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a variant is; ``phase`` is what it does now."""

    phase: str
    total: int = 0
    submitted: int = 0
    running: int = 0
    done: int = 0
    begun_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What a variant brought home. ``lag_s`` is the latest submission against its plan."""

    variant: Variant
    records: tuple[Record, ...]
    lag_s: float
    cluster: str


def spec(variant: Variant, nodes: int, scale: float) -> ClusterSpec:
    """The cluster of a variant: the same but for plugin and Lua, which plain Slurm lacks."""
    ours = variant is not Variant.PLAIN
    return ClusterSpec(
        nodes=nodes,
        gpus_per_node=GPUS_PER_NODE,
        nodes_per_container=_NODES_PER_CONTAINER,
        name_prefix=f"slurm-ext-demo-{variant.replace('_', '-')}",
        plugin=ours,
        lua=ours,
        slurm_conf={"SchedulerParameters": _SCHEDULER_PARAMETERS},
        etc_slurm={"lua/config.lua": daemon.lua_config(scale)} if ours else {},
    )


class Stage:
    """Runs in a thread of its own; `progress` may be read at any time."""

    def __init__(
        self,
        variant: Variant,
        jobs: Sequence[ReplayJob],
        nodes: int,
        scale: float,
        limit_s: float,
        keep: bool,
    ) -> None:
        self.variant = variant
        self.error: BaseException | None = None
        self.finished: Finished | None = None
        self._jobs = jobs
        self._nodes = nodes
        self._scale = scale
        self._limit_s = limit_s
        self._keep = keep
        self._phase = "waits"
        self._cluster: Cluster | None = None
        self._thread = threading.Thread(target=self._guarded, name=str(variant), daemon=True)

    # --- used by the main thread --------------------------------------------------------------

    def start_cluster(self, say: Callable[[str], None]) -> None:
        """Start the cluster; done by the main thread, so that an interrupt removes it."""
        self._phase = "starts"
        self._cluster = Cluster.start(
            spec(self.variant, self._nodes, self._scale), keep=self._keep, progress=say
        )

    def begin(self) -> None:
        """Set up and replay, in the background."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the replay still runs."""
        return self._thread.is_alive()

    def progress(self) -> Progress:
        """How far it is; a status that cannot be read just now is not an error."""
        if self._cluster is None or self._phase != "replays":
            return Progress(self._phase)
        try:
            state = json.loads(self._cluster.get(f"{ROOT}/status.json"))
        except (OSError, ValueError, ClusterError, DockerException):
            return Progress(self._phase)
        return Progress(self._phase, **state)

    def stop(self) -> None:
        """Remove the cluster; harmless when repeated."""
        if self._cluster is not None:
            self._cluster.stop()

    @property
    def cluster_name(self) -> str:
        """Name for `ci/slurm enter`."""
        return self._cluster.name if self._cluster else ""

    # --- the background -------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._run()
            self._phase = "done"
        # Whatever happens in the thread is raised again by the main thread.
        except BaseException as exc:
            self.error = exc
            self._phase = "failed"

    def _run(self) -> None:
        cluster = self._cluster
        if cluster is None:
            raise ReplayFailedError("the cluster was not started")
        self._phase = "is set up"
        _put_jobs(cluster, self._jobs, self.variant)
        ours = self.variant is not Variant.PLAIN
        if ours:
            daemon.start(cluster, self.variant, self._scale)
        self._phase = "replays"
        result = _replay(cluster, self._limit_s)
        self._phase = "is read"
        if ours:
            daemon.require_alive(cluster)
        if result["problems"]:
            raise ReplayFailedError(_explain(cluster, result["problems"], self._jobs))
        records = _collect(cluster, self._jobs, result, self._scale)
        self.finished = Finished(self.variant, records, float(result["lag_s"]), cluster.name)


def _put_jobs(cluster: Cluster, jobs: Sequence[ReplayJob], variant: Variant) -> None:
    uid, gid = cluster.ids(USER)
    folders = [ROOT, *(f"{ROOT}/{name}" for name in ("jobs", "truth", "stamps", "out"))]
    cluster.exec(["install", "-d", "-o", USER, "-g", str(gid), *folders])
    rows = []
    files = [FileSpec(f"{ROOT}/submitter.py", SUBMITTER.read_bytes(), 0o644, uid, gid)]
    for job in jobs:
        path = f"{ROOT}/jobs/{job.name}.sh"
        rows.append({"name": job.name, "arrives_s": job.arrives_s, "script": path})
        files.append(FileSpec(path, script(job, variant).encode(), 0o644, uid, gid))
        truth = FileSpec(f"{ROOT}/truth/{job.name}", truth_file(job).encode(), 0o600, uid, gid)
        files.append(truth)
    files.append(FileSpec(f"{ROOT}/jobs.json", json.dumps(rows).encode(), 0o644, uid, gid))
    cluster.unpack(pack(files))


def _replay(cluster: Cluster, limit_s: float) -> dict[str, Any]:
    argv = ["python3", f"{ROOT}/submitter.py", f"{ROOT}/jobs.json", f"{ROOT}/status.json"]
    done = cluster.exec(
        [*argv, f"{limit_s:.0f}"], user=USER, check=False, timeout=limit_s + 120, cwd=ROOT
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as exc:
        raise ReplayFailedError(
            f"the submitter ended with {done.rc} and no result\n{done.stderr}"
        ) from exc
    return result


def _collect(
    cluster: Cluster, jobs: Sequence[ReplayJob], result: dict[str, Any], scale: float
) -> tuple[Record, ...]:
    stamps = _stamps(cluster)
    argv = ["sacct", "--allusers", "-X", "-n", "-P", f"--format={','.join(SACCT_FIELDS)}"]
    expected = {job.name for job in jobs}
    text = ""

    def settled() -> bool:
        nonlocal text
        done = cluster.exec(
            [*argv, "--starttime=now-1days"], env={"SLURM_TIME_FORMAT": "%s"}, timeout=60
        )
        text = done.stdout
        over = {name for name, w in parse_sacct(text).items() if w.end_s == w.end_s}
        return expected <= over

    cluster.wait(settled, _ACCOUNTING_LIMIT_S, "accounting of every job", poll_s=1.0)
    submissions = {row["name"]: float(row["submit_s"]) for row in result["jobs"]}
    return account(jobs, submissions, stamps, parse_sacct(text), scale, GPUS_PER_NODE)


def _stamps(cluster: Cluster) -> dict[str, str]:
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(cluster.pack_up(f"{ROOT}/stamps"))) as archive:
        for member in archive.getmembers():
            handle = archive.extractfile(member)
            if handle is not None:
                texts[Path(member.name).name] = handle.read().decode()
    return texts


def _explain(cluster: Cluster, problems: dict[str, str], jobs: Sequence[ReplayJob]) -> str:
    """Each job that failed, with its own name, its stamps and the end of its output."""
    names = {job.name: job.workload.job_id for job in jobs}
    stamps = _stamps(cluster)
    lines = [f"{len(problems)} of {len(jobs)} jobs failed on {cluster.name}:"]
    for name, why in list(problems.items())[:10]:
        lines.append(f"  {name} ({names.get(name, '?')}): {why}")
        attempts = (
            [] if "unfit" in stamps.get(name, "") else parse_stamps(stamps.get(name, ""), name)
        )
        for attempt in attempts:
            lines.append(f"    ran on {attempt.gpus} GPUs of {', '.join(attempt.seats)}")
        out = cluster.exec(["tail", "-n", "5", f"{ROOT}/out/{name}"], check=False).stdout
        lines += [f"    {line}" for line in out.splitlines()]
    queue = cluster.exec(["squeue", "--all", "-o", "%i %j %T %r %C %b %l %S"], check=False)
    return "\n".join(lines) + "\n" + queue.stdout

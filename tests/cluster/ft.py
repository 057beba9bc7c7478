"""Jobs under ft-run on a real cluster: submitting them, disturbing them, reading what they did.

Everything is read from what a user would have: the job's output, the program's own log, and the
attempts that ft-run keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.cluster import Cluster, ClusterSpec, ClusterTimeoutError
from ci.cluster.spec import CLUSTER_NAME
from slurm_ext.domain.attempt import Attempt, parse_attempts

FOLDER = "/opt/ft"
HOME = "/home/alice"
GRACE_S = 30
# Users' jobs wait this long after a requeue on this cluster; Slurm's default is 121 s.
CRED_EXPIRE_S = 5

# Two containers of two nodes each: one can die while the other goes on. Whoever is in `preempt`
# gets SIGTERM, and the signal that it asked for, and then has time to save.
SPEC = ClusterSpec(
    nodes=4,
    nodes_per_container=2,
    ranks=True,
    name_prefix="slurm-ext-ft",
    slurm_conf={
        "AuthInfo": f"cred_expire={CRED_EXPIRE_S}",
        "SlurmdTimeout": "8",
        "PartitionName": [
            f"preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} State=UP",
            "abrupt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP",
            "main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF State=UP",
            "high Nodes=ALL PriorityTier=3 PreemptMode=OFF State=UP",
        ],
    },
)

_SCRIPT = """#!/bin/bash
#SBATCH --open-mode=append
export USE_LIBUV=0 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
# Two cores, and more ranks: a waiting rank of MPI gives way.
export OMPI_MCA_mpi_yield_when_idle=1
mark() {{ echo "mark $1 ${{SLURM_RESTART_COUNT:-0}} $(date +%s.%N) $SLURM_JOB_NODELIST"; }}
mark begin
{before}
srun {srun} ft-run {options} -- {python} {program}
code=$?
mark "end-$code"
{after}
exit $code
"""
_PROGRAMS = ("ft_train.py", "ft_loop.py", "ft_deaf.py")


def install(cluster: Cluster) -> None:
    """Put the product and the tests' programs into a cluster."""
    cluster.install_product()
    for host in cluster.containers():
        cluster.exec(["mkdir", "-p", FOLDER], container=host)
        for name in _PROGRAMS:
            text = (Path(__file__).parent / name).read_text()
            cluster.put(f"{FOLDER}/{name}", text, container=host)


@dataclass(frozen=True, slots=True)
class Job:
    """One submitted job of alice's."""

    cluster: Cluster
    id: int
    log_path: str

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    def facts(self) -> dict[str, str]:
        """Slurm's record."""
        return self.cluster.job(self.id)

    def _read(self, path: str) -> str:
        """A file's text; empty before somebody has made it."""
        try:
            return self.cluster.get(path).decode()
        except FileNotFoundError:
            return ""

    def output(self) -> str:
        """What it has printed in all attempts."""
        return self._read(f"{HOME}/slurm-{self.id}.out")

    def marks(self, what: str) -> list[tuple[int, float, str]]:
        """Marks of the batch script: attempt, time, nodes."""
        rows = [line.split() for line in self.output().splitlines() if line.startswith("mark ")]
        return [(int(row[2]), float(row[3]), row[4]) for row in rows if row[1] == what]

    def log(self) -> list[dict[str, Any]]:
        """The program's steps, in the order in which they ended."""
        # A last line without its end is being written.
        whole = self._read(self.log_path).rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def last_step(self, attempt: int) -> int:
        """The last step that ended in an attempt, 0 where there is none."""
        return max((row["step"] for row in self.log() if row["attempt"] == attempt), default=0)

    def attempts(self) -> tuple[Attempt, ...]:
        """What ft-run kept about the attempts."""
        name = f"attempts-{self.id}.json"
        path = f"{HOME}/.slurm-ext/state/{CLUSTER_NAME}-{self.id}/{name}"
        text = self._read(path)
        return parse_attempts(text, path).attempts if text else ()

    def wait(self, predicate: Callable[[], object], limit_s: float, what: str) -> None:
        """As Cluster.wait; a failure shows what the job printed."""
        try:
            self.cluster.wait(predicate, limit_s, f"{what} of job {self.id}")
        except ClusterTimeoutError as exc:
            raise AssertionError(f"{exc}\n{self.facts()}\n{self.output()}") from exc

    def wait_step(self, step: int, *, attempt: int = 0, limit_s: float = 60) -> None:
        """Wait until the program has done a step in an attempt."""
        reached = f"step {step} in attempt {attempt}"
        self.wait(lambda: self.last_step(attempt) >= step, limit_s, reached)

    def wait_restarts(self, number: int, limit_s: float = 60) -> None:
        """Wait until Slurm has requeued the job so often."""
        self.wait(lambda: self.restarts >= number, limit_s, f"requeue {number}")

    def wait_end(self, limit_s: float = 90) -> str:
        """Wait until the job has ended for good, and return its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait(lambda: self.state in ends, limit_s, "end")
        return self.state

    def assert_completed(self, limit_s: float = 90) -> None:
        """The job ends, and well."""
        state = self.wait_end(limit_s)
        assert state == "COMPLETED", f"job {self.id} {state}\n{self.facts()}\n{self.output()}"


@dataclass(slots=True)
class Desk:
    """Where a test submits its jobs, and whoever still runs at its end is cancelled."""

    cluster: Cluster
    made: list[int] = field(default_factory=list)

    def submit(
        self,
        name: str,
        program: str,
        *options: str,
        srun: str = "",
        ft_run: str = "",
        before: str = "",
        after: str = "",
        python: str = "python3",
    ) -> Job:
        """Submit a program of this folder with its arguments; ``options`` are sbatch's."""
        log = f"{HOME}/{name}.jsonl"
        self.cluster.exec(["rm", "-f", log])
        path = f"{FOLDER}/{program} --log {log}"
        script = _SCRIPT.format(
            before=before, srun=srun, options=ft_run, python=python, program=path, after=after
        )
        number = self.cluster.sbatch(script, f"--job-name={name}", "--time=10", *options)
        self.made.append(number)
        return Job(self.cluster, number, log)

    def preempt(self, *options: str) -> int:
        """Start a job of the higher partition, which takes its nodes from `preempt`."""
        script = "#!/bin/bash\nsleep 600\n"
        options = ("-p", "high", "--exclusive", "--time=15", *options)
        self.made.append(self.cluster.sbatch(script, *options, user="bob"))
        return self.made[-1]

    def cancel(self, *jobs: int) -> None:
        """Cancel these jobs, or all; harmless for those that have ended."""
        numbers = [str(job) for job in jobs or self.made]
        if numbers:
            self.cluster.exec(["scancel", *numbers], check=False)


def losses(log: list[dict[str, Any]], attempt: int | None = None) -> dict[int, str]:
    """Loss of each step as a hexadecimal float; of one attempt, or the last one's of each step."""
    return {row["step"]: row["loss"] for row in log if attempt in (None, row["attempt"])}

"""Who this rank is: job, attempt, rank, size, nodes and GPUs, from the environment alone.

Nothing is asked of Slurm here: thousands of ranks start at once. What the user has set wins, then
an MPI launcher, then the Slurm step, then one rank alone. The trap: a batch script's own
environment holds SLURM_NTASKS and SLURM_PROCID=0 too, so only SLURM_STEP_NUM_TASKS tells that
there is a step of ranks.
"""

from __future__ import annotations

import os

from slurm_ext.domain.nodelist import first_name
from slurm_ft import variables
from slurm_ft.launch.errors import UsageError
from slurm_ft.launch.launchers import Judgement, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Rank, size and rank on the node, as launchers of MPI name them.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
# Programs that start the ranks of a whole job from one place.
_STARTERS = frozenset({"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun"})


class Identity:
    """One rank. ``job_id`` is empty outside Slurm, ``123_4`` for a task of an array.

    ``in_step`` says that srun started this rank. ``judged`` says whether the command is a launcher.
    ``starter`` says that it is srun or mpirun, which number ranks of their own, by variables that
    RANK would hide. ``gpus`` is what the step was granted in all (0 = none or not known).
    """

    __slots__ = (
        "attempt",
        "base_id",
        "cluster",
        "gpus",
        "in_step",
        "job_id",
        "judged",
        "local_rank",
        "nodelist",
        "nodes",
        "rank",
        "size",
        "slurm_id",
        "starter",
        "step_id",
        "submit_dir",
    )

    def __init__(self, environment: Mapping[str, str], command: Sequence[str], launcher: str):
        env = environment
        self.slurm_id = number(env, "SLURM_JOB_ID", 0)
        self.job_id = job_name(env)
        self.base_id = int(self.job_id.partition("_")[0] or 0)
        self.attempt = number(env, "SLURM_RESTART_COUNT", 0)
        self.cluster = env.get("SLURM_CLUSTER_NAME", "") or "cluster"
        self.submit_dir = env.get("SLURM_SUBMIT_DIR", "")
        self.step_id = number(env, "SLURM_STEP_ID", 0)

        tasks = number(env, "SLURM_STEP_NUM_TASKS", 0) if self.slurm_id else 0
        self.in_step = tasks > 0
        self.rank, self.size, self.local_rank = _place(env, tasks)
        self.nodes = number(env, "SLURM_STEP_NUM_NODES", 1) if self.in_step else 1
        self.nodelist = env.get("SLURM_STEP_NODELIST", "") if self.in_step else ""
        on_node = number(env, "SLURM_GPUS_ON_NODE", 0)
        self.gpus = _granted(env, tasks, self.nodes, on_node) if self.slurm_id else 0
        self.starter = bool(command) and os.path.basename(command[0]) in _STARTERS
        self.judged = Judgement(launcher == "yes")
        if launcher == "auto":
            self.judged = judge(
                command,
                tasks=tasks,
                nodes=self.nodes,
                on_node=on_node,
                asked=number(env, "SLURM_NTASKS_PER_NODE", 0),
                per_task=_gpus_per_task(env),
            )

    @property
    def launcher(self) -> bool:
        """Whether the command starts the ranks of its node by itself."""
        return self.judged.launcher

    @property
    def leads(self) -> bool:
        """Whether this rank's ft-run keeps the ledger and decides about the requeue."""
        return self.rank == 0

    @property
    def said(self) -> str:
        """What FT_SLURM_JOB says below this ft-run; empty outside Slurm."""
        words = [str(self.slurm_id)]
        if "_" in self.job_id:
            words.append(self.job_id)
        return " ".join(words) if self.slurm_id else ""

    def alone(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """What to tell of a job of many tasks that runs this one rank alone, if it does.

        A script without ``srun`` would train on one of its nodes and end well.
        """
        if not self.job_id or self.in_step or self.size > 1 or "RANK" in environment:
            return ""
        if command and os.path.basename(command[0]) in _STARTERS:
            return ""
        tasks = number(environment, "SLURM_NTASKS", 1)
        nodes = number(environment, "SLURM_JOB_NUM_NODES", 1)
        if nodes == 1 and (tasks == 1 or self.launcher):
            return ""
        has = f"{tasks} tasks" if tasks > 1 else f"{nodes} nodes"
        return (
            f"this job has {has}, and ft-run was not started by srun: one rank on one node trains"
            f" alone; write srun ft-run ... (for one rank on purpose: srun --ntasks=1 ft-run ...)"
        )

    def head(self) -> str:
        """Node of rank 0: the first of the step."""
        return first_name(self.nodelist) if self.nodelist else "127.0.0.1"


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of Slurm or of an MPI; what is none counts as absent."""
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else default


def job_name(environment: Mapping[str, str]) -> str:
    """The job's own id, ``123_4`` for a task of an array, empty outside Slurm.

    Not the raw id of a task: ``scontrol requeue`` with the raw id of an array's last task, which
    is the array's own, would requeue the whole array.
    """
    raw = number(environment, "SLURM_JOB_ID", 0)
    said = _said_of(environment)
    if said is not None:
        return said or str(raw)
    array = number(environment, "SLURM_ARRAY_JOB_ID", 0)
    task = environment.get("SLURM_ARRAY_TASK_ID", "")
    if raw and array and task.isascii() and task.isdigit():
        name = f"{array}_{int(task)}"
        # What is known of another job says that its variables have been inherited.
        if name not in environment.get(variables.SLURM_JOB, "").split():
            return name
    return str(raw) if raw else ""


def same_job(environment: Mapping[str, str]) -> bool:
    """Whether the ft-run further up, if there is one, runs in this very job."""
    return environment.get(variables.JOB, "") == job_name(environment)


def doubtful_count(environment: Mapping[str, str]) -> bool:
    """Whether SLURM_RESTART_COUNT may be that of the job from inside which this one was submitted.

    Slurm sets it for a job that has come back and leaves it alone otherwise (seen on 24.11). The
    SPANK plugin removes it at submission and says which job this is; without the plugin all that
    is known is that the ft-run further up belongs to another job and counted the same.
    """
    count = number(environment, "SLURM_RESTART_COUNT", 0)
    return (
        count > 0
        and _said_of(environment) is None
        and bool(environment.get(variables.JOB, ""))
        and not same_job(environment)
        and number(environment, variables.ATTEMPT, 0) == count
    )


def _said_of(env: Mapping[str, str]) -> str | None:
    """Array task of this job, empty for none, ``None`` where FT_SLURM_JOB is not about it."""
    words = env.get(variables.SLURM_JOB, "").split()
    if not words or words[0] != env.get("SLURM_JOB_ID", ""):
        return None
    base, _, task = words[1].partition("_") if len(words) == 2 else ("", "", "")
    known = all(word.isascii() and word.isdigit() for word in (base, task))
    return words[1] if known else ""


def _place(env: Mapping[str, str], tasks: int) -> tuple[int, int, int]:
    """Rank, size and rank on the node."""
    for rank, size, local in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), *_MPI):
        count = number(env, size, 0)
        if count and rank in env:
            at = number(env, rank, -1)
            if not 0 <= at < count:
                # Taken for rank 0, it would decide about the requeue beside the real one.
                raise UsageError(
                    f"{rank}={env[rank]} is no rank of {size}={count}; write 0 to {count - 1}, or"
                    " unset both"
                )
            return at, count, number(env, local, 0 if local in env else at)
    if tasks:
        return number(env, "SLURM_PROCID", 0), tasks, number(env, "SLURM_LOCALID", 0)
    return 0, 1, 0


def _granted(env: Mapping[str, str], tasks: int, nodes: int, on_node: int) -> int:
    """GPUs of the step in all. SLURM_GPUS and its like hold what was submitted: the last resort."""
    per_task = _gpus_per_task(env)
    if per_task and tasks:
        return per_task * tasks
    asked = number(env, "SLURM_GPUS", 0)
    if asked and on_node and nodes > 1 and on_node * nodes != asked and asked >= nodes:
        # --gpus may be spread unevenly; this node alone does not tell.
        return asked
    return on_node * nodes


def _gpus_per_task(env: Mapping[str, str]) -> int:
    """GPUs that were asked for by task; 0 where they were not."""
    asked = number(env, "SLURM_GPUS_PER_TASK", 0)
    return asked or _per_task(env.get("SLURM_TRES_PER_TASK", ""))


def _per_task(text: str) -> int:
    """GPUs in ``gres/gpu:v100=1,cpu=4``; older releases write ``gres:gpu:1``."""
    total = 0
    for part in text.split(","):
        name, _, count = part.replace(":", "/").rpartition("=" if "=" in part else "/")
        if name.startswith("gres/gpu") and count.isdigit():
            total += int(count)
    return total

"""What every job of the replay is in real seconds, and the sbatch script that says so. Pure.

A workload second is ``1 / scale`` real seconds. Everything that has a length is scaled by it: when
a job arrives, how long it runs on each GPU count, the table that the daemon knows. What Slurm
cannot do in less than a minute stays: a time limit is whole minutes of real time, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ci.replay.options import Variant
from slurm_ext.sim.engine import SimJob
from slurm_ext.sim.workload import WorkloadJob

# Where the submitting user keeps the replay; /home is shared by all containers of a cluster.
USER = "alice"
ROOT = f"/home/{USER}/replay"
_MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One job in real time. ``name`` is its name in Slurm; ``arrives_s`` counts from the start.

    ``sleep_s`` is the true run time on each GPU count: the body of the job reads it, the daemon
    has no access to it.
    """

    name: str
    workload: WorkloadJob
    arrives_s: float
    nodes: int
    limit_min: int
    sleep_s: Mapping[int, float]
    error_free_s: float


def compress(
    workload: Sequence[WorkloadJob],
    simulated: Sequence[SimJob],
    scale: float,
    gpus_per_node: int,
) -> tuple[ReplayJob, ...]:
    """Jobs of the replay from the workload and its true times (`slurm_ext.sim.jobs`)."""
    first_s = workload[0].submit_s
    width = len(str(len(workload) - 1))
    return tuple(
        ReplayJob(
            name=f"ft-{index:0{width}d}",
            workload=job,
            arrives_s=(job.submit_s - first_s) / scale,
            nodes=math.ceil(job.gpus / gpus_per_node),
            limit_min=limit_minutes(truth.limit_s / scale),
            sleep_s={gpus: run_s / scale for gpus, run_s in truth.true_run_s.items()},
            error_free_s=truth.error_free_s,
        )
        for index, (job, truth) in enumerate(zip(workload, simulated, strict=True))
    )


def limit_minutes(seconds: float) -> int:
    """The shortest --time that Slurm accepts for so many seconds."""
    return max(1, math.ceil(seconds / _MINUTE_S - 1e-9))


def directives(job: ReplayJob, variant: Variant) -> list[str]:
    """The `--ft-*` options that the user writes; none where the plugin is not installed."""
    if variant is Variant.PLAIN:
        return []
    lines = [
        f"--ft-model={job.workload.model}",
        f"--ft-samples={round(job.workload.total_samples)}",
        "--ft-epochs=1",
        f"--ft-batch={job.workload.batch_size}",
    ]
    if variant is Variant.FULL:
        lines.append("--ft-gpus=auto")
    return lines


def script(job: ReplayJob, variant: Variant) -> str:
    """The whole batch script."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks={job.workload.gpus}",
        "--gpus-per-task=1",
        f"--time={job.limit_min}",
        f"--output={ROOT}/out/{job.name}",
        "--open-mode=append",
        *directives(job, variant),
    ]
    header = "".join(f"#SBATCH {option}\n" for option in options)
    return f"#!/bin/bash\n{header}{BODY}"


def truth_file(job: ReplayJob) -> str:
    """GPU count and seconds, one line each: what the body looks its granted count up in."""
    return "".join(f"{gpus} {seconds:.4f}\n" for gpus, seconds in sorted(job.sleep_s.items()))


# Builtins only, but for `sleep`: at scale 60 every tenth of a second here is six seconds of the
# workload. A step would cost more than that and prove nothing about a job that only sleeps; that
# steps fit a changed allocation is a test of its own. The count is taken from what Slurm granted
# (tasks per node), and everything else in the environment has to agree with it, as a training
# script would need.
BODY = f"""
set -u
now=$EPOCHREALTIME
stamp={ROOT}/stamps/$SLURM_JOB_NAME
note() {{ printf '%s\\n' "$*" >>"$stamp"; }}
unfit() {{ note unfit "$EPOCHREALTIME" "$*"; exit 3; }}

gpus=0 first=
IFS=, read -ra groups <<<"$SLURM_TASKS_PER_NODE"
for group in "${{groups[@]}}"; do
    tasks=${{group%%(*}} times=1
    [[ $group == *"(x"* ]] && times=${{group#*x}} times=${{times%)}}
    first=${{first:-$tasks}}
    gpus=$((gpus + tasks * times))
done
IFS=, read -ra devices <<<"${{CUDA_VISIBLE_DEVICES:-}}"
[[ $SLURM_NTASKS == "$gpus" ]] || unfit "SLURM_NTASKS=$SLURM_NTASKS, granted $gpus"
[[ ${{SLURM_GPUS_ON_NODE:-0}} == "$first" ]] ||
    unfit "SLURM_GPUS_ON_NODE=${{SLURM_GPUS_ON_NODE:-}}, $first tasks here"
[[ ${{#devices[@]}} == "$first" ]] ||
    unfit "CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-}}, $first tasks here"
seconds=
while read -r count value; do
    [[ $count == "$gpus" ]] && seconds=$value
done <{ROOT}/truth/"$SLURM_JOB_NAME"
[[ $seconds ]] || unfit "no run time is known for $gpus GPUs"

note start "$now" "$SLURM_JOB_ID" "${{SLURM_RESTART_COUNT:-0}}" "$gpus" \\
    "$SLURM_JOB_NODELIST" "$SLURM_TASKS_PER_NODE"
sleep "$seconds"
note end "$EPOCHREALTIME" "$SLURM_JOB_ID" "${{SLURM_RESTART_COUNT:-0}}"
"""

"""ft-run in surroundings that lie: inherited variables, a state directory that is full, one
checkpoint directory for two steps, a checkpoint directory that is gone.
"""

from __future__ import annotations

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft

LOOP = "ft_loop.py --steps 600 --step-s 0.05 --hurry"
# Below the whole of what a test waits for, so that nothing is left behind by one that fails.
_INNER = """#!/bin/bash
#SBATCH --open-mode=append --requeue
srun ft-run -v -- python3 {folder}/{loop} --log {home}/inner-$SLURM_JOB_ID.jsonl
"""


def test_sig_array_a_job_submitted_inside_a_task_requeues_itself(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """sig-array: sbatch hands SLURM_ARRAY_* and SLURM_RESTART_COUNT of the task to the new job."""
    ranks.put(f"{ft.HOME}/inner.sh", _INNER.format(folder=ft.FOLDER, loop=LOOP, home=ft.HOME))
    outer = """#!/bin/bash
#SBATCH --open-mode=append --requeue --array=3
if [ -z "$SLURM_RESTART_COUNT" ]; then
    scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    sleep 60
fi
exec srun ft-run --checkpoint-dir=$HOME/outer --state-dir=$HOME/outer-state -- \\
    sbatch --parsable --output=$HOME/slurm-%j.out $HOME/inner.sh
"""
    task = ranks.sbatch(outer, f"--output={ft.HOME}/outer.out", user="alice")

    def submitted() -> int:
        """Id of the inner job, 0 before it is there."""
        names = ranks.exec(["squeue", "-h", "-n", "inner.sh", "-o", "%i"]).stdout.split()
        return int(names[0]) if names else 0

    ranks.wait(submitted, 60, "the inner job")
    inner = ft.Job(ranks, submitted(), f"{ft.HOME}/inner-{submitted()}.jsonl")
    try:
        inner.wait_step(3)
        ranks.exec(["scancel", "-s", "USR2", str(inner.id)], user="alice")
        assert inner.wait_end() == "COMPLETED"
        first, second = inner.attempts()
        assert (first.number, first.cause, first.requeued) == (0, Cause.OPERATOR, True)
        assert (second.number, second.cause) == (1, Cause.COMPLETED)
        assert second.restored_step == first.saved_step
        assert inner.restarts == 1
        assert ranks.job(task)["Restarts"] == "1"
        assert f"FT_JOB_ID={inner.id}" in inner.output()
    finally:
        ranks.exec(["scancel", str(inner.id), str(task)], user="alice", check=False)


def test_two_steps_with_one_checkpoint_directory_are_told_apart(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Each deleted what the other saved, and both came back with the model of one of them."""
    second = f"srun -n1 --exact ft-run -- python3 {ft.FOLDER}/{LOOP} --log {ft.HOME}/second.jsonl &"
    job = desk.submit("two", LOOP, "-n2", "-N1", srun="-n1 --exact", before=second)
    job.wait_end()
    said = job.output()
    assert said.count(f"slurm_ft: {ft.HOME}/ft-checkpoints/{job.id}: step ") == 1, said
    assert "give each step a directory of its own" in said
    # Each step keeps its own end: the refused one is not lost behind the other.
    (attempt,) = job.attempts()
    refused = [step for step in attempt.steps if step.cause is Cause.USER_ERROR]
    assert [step.exit_code for step in refused] == [1], attempt
    # Where the last line of the script is the refused one, Slurm ends the other with the script.
    assert attempt.step != refused[0].step
    assert attempt.cause in (Cause.COMPLETED, Cause.CANCELLED)
    assert "give each step a directory of its own" in refused[0].reason


def test_two_jobs_with_one_checkpoint_directory_are_told_apart(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """One came back with the other's model. The second is refused while the first is at work."""
    shared = f"--checkpoint-dir={ft.HOME}/shared --checkpoint-interval=1"
    first = desk.submit("first", LOOP, "-n1", ft_run=shared)
    first.wait_step(3)
    second = desk.submit("second", LOOP, "-n1", ft_run=shared)
    assert second.wait_end() == "FAILED"
    assert f"{ft.HOME}/shared: job {first.id} is at work" in second.output()
    assert second.log() == []
    first.assert_completed()
    third = desk.submit("third", LOOP, "-n1", ft_run=shared)
    third.assert_completed()
    # It goes on behind the first one, as a job that continues another one's work does.
    assert all(row["step"] > 100 for row in third.log())


@pytest.mark.parametrize("kind", ["full", "cleared", "gone"])
def test_a_job_comes_back_without_what_it_kept_elsewhere(
    ranks: Cluster, desk: ft.Desk, kind: str
) -> None:
    """full: the state directory takes nothing more; cleared: it is gone; gone: the checkpoints are
    deleted meanwhile."""
    small = f"{ft.HOME}/small"
    if kind == "full":
        ranks.exec(["mkdir", "-p", small], container="c1")
        size = "size=64k,mode=700,uid=$(id -u alice)"
        ranks.exec(["bash", "-c", f"mount -t tmpfs -o {size} tmpfs {small}"], container="c1")
    try:
        state = {"full": f"{small}/state", "cleared": f"{ft.HOME}/cleared-state"}.get(kind)
        options = f"--state-dir={state}" if state else ""
        job = desk.submit(kind, LOOP, "--nodelist=n1", ft_run=options)
        job.wait_step(3)
        if kind == "full":
            fill = f"dd if=/dev/zero of={small}/fill bs=4k count=64"
            ranks.exec(["bash", "-c", fill], container="c1", check=False)
        if kind == "cleared":
            ranks.exec(["rm", "-r", f"{ft.HOME}/cleared-state"])
        ranks.exec(["scancel", "-s", "USR2", str(job.id)], user="alice")
        job.wait_restarts(1)
        if kind == "gone":
            ranks.exec(["rm", "-r", f"{ft.HOME}/ft-checkpoints/{job.id}"], user="alice")
        assert job.wait_end() == "COMPLETED"
        starts = {row["attempt"]: row["step"] for row in reversed(job.log())}
        if kind != "gone":
            assert starts[1] > 1
        else:
            assert starts[1] == 1
            assert "holds no checkpoint, though attempt 0 saved step" in job.output()
    finally:
        if kind == "full":
            ranks.exec(["umount", "-l", small], container="c1", check=False)

"""A chain of tasks on two nodes with real torch, beside the same tasks as jobs and as steps.

A gap is what lies between two tasks beyond their steps: from the end of the old one's last step to
the end of the new one's first, less the length of a step. It holds everything that happens there,
whoever does it: the old task's end, Slurm, Python, torch, groups, parameters.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft

STEP_S = 0.2
COMMON = {
    "dim": 16,
    "depth": 4,
    "heads": 2,
    "image": 8,
    "samples": 60,
    "global_batch": 12,
    "eval_samples": 24,
    "warmup_steps": 1,
}
FASTER = 5.0
_LAYOUT = f"--stages 2 --micro-batches 2 --emulate-step-s {STEP_S} --threads 1"
_HEAD = """#!/bin/bash
#SBATCH --open-mode=append --nodes=2 --ntasks=2 --time=10
export USE_LIBUV=0 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
"""


def trainer(name: str, arguments: str, ft_run: str = "") -> str:
    """A line of a script: the reference trainer, its steps noted in a file of this name."""
    return (
        f"srun ft-run {ft_run} -- python3 -m slurm_ft.train {_LAYOUT} {arguments}"
        f" --timings {ft.HOME}/{name}.jsonl\n"
    )


def task(name: str, seed: int, steps: int) -> dict[str, Any]:
    return {"name": name, "seed": seed, "steps": steps, "output": f"{ft.HOME}/out/{name}"}


def as_options(given: dict[str, Any]) -> str:
    both = {**COMMON, **given}
    return " ".join(f"--{key.replace('_', '-')}={value}" for key, value in both.items())


def submit(desk: ft.Desk, name: str, body: str, *options: str) -> ft.Job:
    desk.cluster.exec(["rm", "-f", f"{ft.HOME}/{name}.jsonl"])
    number = desk.cluster.sbatch(_HEAD + body, *options)
    desk.made.append(number)
    return ft.Job(desk.cluster, number, f"{ft.HOME}/{name}.jsonl")


def chain(desk: ft.Desk, name: str, tasks: list[dict[str, Any]], *options: str) -> ft.Job:
    path = f"{ft.HOME}/{name}.yaml"
    text = json.dumps({"common": COMMON, "tasks": tasks})  # JSON is YAML
    desk.cluster.put(path, text, owner="alice")
    body = trainer(name, "", f"--chain={path} --checkpoint-interval=1")
    return submit(desk, name, body, *options)


def steps_of(job: ft.Job) -> list[dict[str, Any]]:
    return [row for row in job.log() if "step" in row]


def wait_task(job: ft.Job, name: str, step: int, limit_s: float = 90) -> None:
    def reached() -> bool:
        return any(row.get("task") == name and row["step"] >= step for row in steps_of(job))

    job.wait(reached, limit_s, f"step {step} of {name}")


def wait_near_end(job: ft.Job, name: str, attempt: int) -> None:
    """Near the end of a task or, where that was done already, beyond it."""

    def reached() -> bool:
        mine = [row for row in steps_of(job) if row["attempt"] == attempt]
        return any(row["task"] != name or row["step"] >= 5 for row in mine)

    job.wait(reached, 120, f"the end of {name} in attempt {attempt}")


def gap_s(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> float:
    step_s = statistics.median(row["wall_s"] for row in before[1:])
    return float(after[0]["at_s"] - before[-1]["at_s"] - step_s)


def tasks_done(job: ft.Job) -> dict[str, bool]:
    said = job.cluster.exec(["slurm-ext", "chain", "ls", str(job.id), "--json"], user="alice")
    return {row["name"]: row["done"] for row in json.loads(said.stdout)}


@pytest.mark.timeout(300)
def test_tasks_follow_each_other_faster_than_jobs_and_steps(ranks: Cluster, desk: ft.Desk) -> None:
    """The chain survives its preemption in the second task, and takes a task while it runs."""
    two = [task("birds", 1, 6), task("cars", 2, 24)]
    job = chain(desk, "chain", two, "--partition=preempt")
    wait_task(job, "birds", 1)
    late = f"{ft.HOME}/late.yaml"
    ranks.put(late, json.dumps({**COMMON, **task("late", 3, 3)}), owner="alice")
    added = ranks.exec(["slurm-ext", "chain", "add", str(job.id), late], user="alice").stdout
    assert "late is task 3 of 3" in added
    wait_task(job, "cars", 4)
    place = job.facts()["BatchHost"]
    thief = desk.preempt(f"--nodelist={place}")
    job.wait_restarts(1)
    desk.cancel(thief)
    ranks.exec(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=False)
    job.assert_completed(120)

    rows = steps_of(job)
    made = [(row["task"], row["step"]) for row in rows]
    wanted = {(t["name"], s) for t in [*two, task("late", 3, 3)] for s in range(1, t["steps"] + 1)}
    assert set(made) == wanted
    # It was told to leave and had time to save: at most its last step is made again.
    assert len(made) <= len(wanted) + 1, made
    assert "birds" not in {row["task"] for row in rows if row["attempt"] == 1}
    assert tasks_done(job) == {"birds": True, "cars": True, "late": True}
    first, second = job.attempts()
    assert (first.cause, second.cause) == (Cause.PREEMPTED, Cause.COMPLETED)
    report = ranks.exec(["slurm-ext", "report", "switch", str(job.id)], user="alice").stdout
    assert "switch-0000 birds -> cars: overlapped, 2 stages" in report
    birds = [row for row in rows if row["task"] == "birds"]
    cars = [row for row in rows if row["task"] == "cars"]
    chained = gap_s(birds, cars)

    # The same two as jobs, the second one waiting in the queue for the first.
    singles = []
    for given in (task("birds", 1, 6), task("cars", 2, 3)):
        body = trainer(f"single-{given['name']}", as_options(given))
        options = ("--job-name=single", "--dependency=singleton")
        singles.append(submit(desk, f"single-{given['name']}", body, *options))
    # As two steps of one job, which waits for those two.
    ranks.exec(["rm", "-f", f"{ft.HOME}/second-step.jsonl"])
    both = submit(
        desk,
        "first-step",
        trainer("first-step", as_options(task("birds", 1, 6)), f"--checkpoint-dir={ft.HOME}/s1")
        + trainer("second-step", as_options(task("cars", 2, 3)), f"--checkpoint-dir={ft.HOME}/s2"),
        "--job-name=single",
        "--dependency=singleton",
    )
    for single in (*singles, both):
        single.assert_completed(120)
    between_jobs = gap_s(steps_of(singles[0]), steps_of(singles[1]))
    second_step = ft.Job(ranks, both.id, f"{ft.HOME}/second-step.jsonl")
    between_steps = gap_s(steps_of(both), steps_of(second_step))
    print(
        f"gap of a chain {chained:.2f} s, of two steps {between_steps:.2f} s, of two jobs"
        f" {between_jobs:.2f} s: {between_jobs / max(chained, 1e-3):.1f} times"
    )
    assert chained * FASTER <= between_jobs
    assert chained < between_steps


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_chain_is_paused_among_its_switches_and_preempted_while_it_is(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Tasks of three steps, so that most moments are near a switch; each step is made once."""
    given = [task(f"t{index}", index, 3) for index in range(24)]
    job = chain(desk, "held", given, "--partition=preempt")
    wait_task(job, "t0", 1)

    def pause() -> None:
        argv = ["slurm-ext", "pause", str(job.id), "--for=8m", "--timeout=20s"]
        assert "all ranks are paused" in ranks.exec(argv, user="alice").stdout
        before = steps_of(job)
        ranks.exec(["sleep", "1"])
        assert steps_of(job) == before

    for _ in range(2):
        pause()
        ranks.exec(["slurm-ext", "resume", str(job.id)], user="alice")
    pause()
    thief = desk.preempt(f"--nodelist={job.facts()['BatchHost']}")
    job.wait_restarts(1)
    desk.cancel(thief)
    ranks.exec(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=False)
    job.assert_completed(120)
    made = [(row["task"], row["step"]) for row in steps_of(job)]
    assert made == [(t["name"], s) for t in given for s in range(1, t["steps"] + 1)]
    assert all(tasks_done(job).values())
    assert [attempt.cause for attempt in job.attempts()] == [Cause.PREEMPTED, Cause.COMPLETED]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_ten_times_around_switches(ranks: Cluster, desk: ft.Desk) -> None:
    """A rank dies near a switch, again and again: no task is lost, none is trained twice."""
    seed = random.SystemRandom().randrange(1, 10**6)
    print(f"seed={seed}")
    rng = random.Random(seed)
    given = [task(f"t{index}", index, 6) for index in range(12)]
    path = f"{ft.HOME}/killed.yaml"
    ranks.put(path, json.dumps({"common": COMMON, "tasks": given}), owner="alice")
    body = trainer(
        "killed",
        "",
        f"--chain={path} --checkpoint-interval=1"
        " --max-requeues=lost-peer=30,no-progress=30,unknown=30",
    )
    job = submit(desk, "killed", body, "--nodelist=n1,n2")  # both in container c1
    finished: set[str] = set()
    for number in range(10):
        target = next(t["name"] for t in given if t["name"] not in finished)
        # Of this attempt: a program that dies before its session is an error of its own.
        wait_near_end(job, target, number)
        ranks.exec(["sleep", f"{rng.random():.3f}"])
        before = {name for name, done in tasks_done(job).items() if done}
        which = rng.choice(("--oldest", "--newest"))
        program = "^python3 -m slurm_ft.train"
        ranks.exec(["pkill", "-KILL", "-f", which, program], container="c1", check=False)
        job.wait_restarts(number + 1, 120)
        job.wait(lambda: job.state == "PENDING", 60, "end of COMPLETING")
        # Sooner, a node takes the new launch for one of the attempt that it has just ended.
        ranks.exec(["sleep", str(ft.CRED_EXPIRE_S + 1)])
        ranks.exec(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=False)
        rows = steps_of(job)
        again = {row["task"] for row in rows if row["attempt"] > number} & before
        assert not again, f"{again} trained again"
        finished = {name for name, done in tasks_done(job).items() if done}
        assert before <= finished
    job.assert_completed(240)
    assert all(tasks_done(job).values())

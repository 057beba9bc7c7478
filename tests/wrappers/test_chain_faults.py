"""What goes wrong in a chain of tasks, and what comes at a bad moment: nothing is lost, no hang."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurm_ext.domain.errors import ConfigError
from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.comm import Comm
from slurm_ft.session.agreement import Kind
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch import fitness, handover, relay
from slurm_ft.switch.chain import ChainState, read_chain, running_chain
from slurm_ft.switch.incoming import make_ready
from slurm_ft.switch.links import EmulatedLink
from slurm_ft.switch.pace import OwnPace, Unlimited
from slurm_ft.switch.spread import layout_for
from slurm_ft.switch.standing import End, read_standing
from slurm_ft.train.layout import Layout, Wish
from slurm_ft.train.models import build_model
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.state import TaskState
from slurm_ft.train.task import Task
from tests.wrappers.ranks import Outcome, run_ranks
from tests.wrappers.test_chain import (
    COMMON,
    PIPELINE,
    alone,
    environment,
    losses,
    run,
    saved,
    trainer_rank,
    wait_for_step,
    weights,
    write_chain,
)

SAME = f"{COMMON}, warmup_steps: 1"
TWO = f"""
common: {{{SAME}}}
tasks:
  - {{name: first, seed: 1, steps: 3, output: OUT/first}}
  - {{name: second, seed: 2, steps: STEPS, output: OUT/second}}
"""


def two(steps: int) -> str:
    return TWO.replace("STEPS", str(steps))


def codes(outcomes: list[Outcome]) -> list[int]:
    return [outcome.code for outcome in outcomes]


def done(folder: Path) -> dict[str, int]:
    records = ChainState(folder / "state", folder / "ckpt").done()
    return {name: record.step for name, record in records.items()}


# --- ranks whose links or saves are slow ----------------------------------------------------------


def slow_link_rank(rank: int, argv: list[str], out: float | None, inwards: float | None) -> None:
    """The trainer over a link of these bytes per second, without spare device memory."""

    def link() -> EmulatedLink:
        return EmulatedLink(
            OwnPace(out) if out else Unlimited(), OwnPace(inwards) if inwards else Unlimited(), 4096
        )

    handover.EmulatedLink = link  # type: ignore[assignment,misc]
    handover.device_free = lambda device, ranks: 0
    trainer_rank(rank, argv)


def run_slow(
    folder: Path, chain: Path, *argv: str, out: float | None, inwards: float | None, **more: Any
) -> list[Outcome]:
    log = str(folder / "loss.jsonl")
    return run_ranks(
        2,
        slow_link_rank,
        ["--loss-log", log, "--threads", "1", "--chain", str(chain), *PIPELINE, *argv],
        out,
        inwards,
        distributed=False,
        env=environment(folder, more.pop("attempt", 0)),
        limit_s=60.0,
        **more,
    )


def test_tasks_of_one_step_wait_for_all_of_their_own_layers(tmp_path: Path) -> None:
    """Each is its own first and last step, and its last layers come late."""
    text = f"common: {{{SAME}}}\ntasks:\n" + "".join(
        f"  - {{name: t{i}, seed: {i}, steps: {1 if i else 2}, output: OUT/t{i}}}\n"
        for i in range(4)
    )
    path = write_chain(tmp_path, text)
    outcomes = run_slow(tmp_path, path, out=None, inwards=60e3)
    assert codes(outcomes) == [0, 0], outcomes
    mine = losses(tmp_path)
    for task in read_chain(path)[1:]:
        folder = tmp_path / "alone" / task.name
        folder.mkdir(parents=True)
        alone(folder, task, 2, *PIPELINE)
        assert mine[task.name] == losses(folder)[""], task.name
        assert weights(tmp_path, task.name) == weights(folder, task.name), task.name


def test_told_to_leave_in_the_middle_of_a_switch(tmp_path: Path) -> None:
    """The old task is still on its way out when the new one's first step ends."""
    path = write_chain(tmp_path, two(30))

    def preempt(pids: list[int]) -> None:
        wait_for_step(tmp_path, "first", 3)
        os.kill(pids[0], signal.SIGUSR2)

    outcomes = run_slow(
        tmp_path, path, "--emulate-step-s=0.1", out=100e3, inwards=None, meanwhile=preempt
    )
    assert codes(outcomes) == [85, 85], outcomes
    assert done(tmp_path) == {"first": 3}, "the old task was not made durable before leaving"
    first = len((tmp_path / "loss.jsonl").read_text().splitlines())
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    steps = [(row["task"], row["step"]) for row in rows]
    assert len(steps) == len(set(steps)) == 33, "a step was made twice"
    assert {task for task, _ in steps[first:]} == {"second"}
    assert done(tmp_path) == {"first": 3, "second": 30}


class _Pauses:
    """Asks for a pause at the new task's first step, and notes what was still moving then."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def install(self) -> None:
        pauses = self
        all_tasks = relay.Relay._all_tasks

        def wrapped(self: relay.Relay) -> None:
            go_on, switches = self._go_on, list[Any]()

            def going(trainer: Any, step: int, position: Mapping[str, Any]) -> None:
                go_on(trainer, step, position)
                if trainer.task.name == "second":
                    switches.append(self._handover._switch)
                    self._ft.want(Kind.PAUSE, 1)

            def pause(epoch: int) -> None:
                (switch,) = switches
                moving = any(thread.is_alive() for thread in switch._threads)
                pauses.seen.append((moving, self._beside.idle(0.0)))
                # What a pause gives back is the task that trains now.
                assert self._present.trainer is not None
                assert self._present.trainer.task.name == "second"

            self._go_on = going  # type: ignore[method-assign]
            self._agreed._pause = pause
            self._ft.on_agreed[Kind.PAUSE] = self._agreed.pause
            all_tasks(self)

        relay.Relay._all_tasks = wrapped  # type: ignore[method-assign]


def pausing_rank(rank: int, argv: list[str]) -> Any:
    pauses = _Pauses()
    pauses.install()
    slow_link_rank(rank, argv, 100e3, 100e3)
    return pauses.seen


def test_a_pause_during_a_switch_waits_until_nothing_moves(tmp_path: Path) -> None:
    path = write_chain(tmp_path, two(6))
    outcomes = run_ranks(
        2,
        pausing_rank,
        ["--threads", "1", "--chain", str(path), *PIPELINE],
        distributed=False,
        env=environment(tmp_path),
        limit_s=60.0,
    )
    for outcome in outcomes:
        assert outcome.code == 0, outcome
        assert outcome.value == [[False, True]]


# --- failures beside training ---------------------------------------------------------------------


def test_a_result_that_cannot_be_written_takes_no_other_task_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file comes into the way of the first one's directory while it trains: the second one is
    trained to its end, the error names the first at the end of the chain, and the next start writes
    its result without a step."""
    path = write_chain(tmp_path, two(6).replace("steps: 3", "steps: 20"))

    def in_the_way(_: list[int]) -> None:
        wait_for_step(tmp_path, "first", 2)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "first").write_text("in the way")

    slow = ("--chain", str(path), "--emulate-step-s=0.1", *PIPELINE)
    assert codes(run(tmp_path, 2, *slow, meanwhile=in_the_way)) == [1, 1]
    said = capfd.readouterr().err
    told = "not everything was written: the result of first is not written"
    assert said.count(told) == 1, said
    assert said.count("its last checkpoint is complete") == 1, said
    assert done(tmp_path) == {"second": 6}
    assert weights(tmp_path, "second")
    now = read_standing(tmp_path / "state" / "chain.d")
    assert now is not None
    assert (now.end, list(now.failed)) == (End.OVER, ["first"])
    (tmp_path / "out" / "first").unlink()
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    steps = [(row["task"], row["step"]) for row in rows]
    assert len(steps) == len(set(steps)) == 26, "a step was made twice"
    assert done(tmp_path) == {"first": 20, "second": 6}
    assert weights(tmp_path, "first")


def blind_rank(rank: int, argv: list[str]) -> None:
    """Rank 1, which writes the second stage, finds no way to the second task's directory."""
    if rank == 1:
        real = fitness.fault
        fitness.fault = lambda output: "no such mount" if "second" in output else real(output)
    trainer_rank(rank, argv)


def test_outputs_are_tried_by_the_ranks_that_write_before_anything_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_chain(tmp_path, two(3) + "  - {name: third, steps: 2, output: /proc/none}\n")
    outcomes = run_ranks(
        2,
        blind_rank,
        ["--chain", str(path), "--threads=1", *PIPELINE],
        distributed=False,
        env=environment(tmp_path),
        limit_s=60.0,
    )
    assert codes(outcomes) == [2, 2], outcomes
    assert done(tmp_path) == {"first": 3}
    said = capfd.readouterr().err
    assert "second: rank 1: no such mount" in said
    assert "third: rank 0: output='/proc/none': nothing can be written into /proc" in said
    assert not (tmp_path / "ckpt" / "second").exists(), "it was trained in vain"


def test_the_output_of_a_single_task_is_tried_before_its_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = run(tmp_path, 2, "--steps=2", "--global-batch=12", "--output=/proc/none")
    assert codes(outcomes) == [1, 1]
    assert "the result of task could not be written: rank 0: output=" in capfd.readouterr().err
    assert not (tmp_path / "loss.jsonl").exists()


# --- tasks that are taken out -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_task_that_was_made_ready_and_taken_out_is_not_trained(tmp_path: Path, size: int) -> None:
    """The one behind it comes in its place, and equals what it is alone."""
    text = two(4) + "  - {name: third, seed: 3, steps: 3, output: OUT/third}\n"
    path = write_chain(tmp_path, text.replace("steps: 3, output: OUT/first", "steps: 20"))
    argv = PIPELINE if size == 2 else []

    def take_out(_: list[int]) -> None:
        # By now the second one is being made ready.
        wait_for_step(tmp_path, "first", 8)
        chain = running_chain(tmp_path / "state")
        with pytest.raises(ConfigError, match="it has begun"):
            chain.remove("first")
        assert chain.remove("second").name == "second"

    slow = ("--chain", str(path), "--emulate-step-s=0.1", *argv)
    assert codes(run(tmp_path, size, *slow, meanwhile=take_out)) == [0] * size
    assert done(tmp_path) == {"first": 20, "third": 3}
    folder = tmp_path / "alone"
    folder.mkdir()
    alone(folder, read_chain(path)[2], size, *argv)
    assert losses(tmp_path)["third"] == losses(folder)[""]
    assert weights(tmp_path, "third") == weights(folder, "third")


def full_disk_rank(rank: int, argv: list[str]) -> None:
    """The first task's last checkpoint finds the disk full, on one rank."""
    write = CheckpointStore._write

    def failing(self: CheckpointStore, ticket: Any, *args: Any) -> Any:
        if rank == 1 and "first" in str(self.root):
            raise OSError(28, "No space left on device")
        return write(self, ticket, *args)

    CheckpointStore._write = failing  # type: ignore[method-assign]
    trainer_rank(rank, argv)


def test_a_full_disk_in_the_old_tasks_save_fails_all_ranks_at_one_step(tmp_path: Path) -> None:
    path = write_chain(tmp_path, two(40))
    outcomes = run_ranks(
        2,
        full_disk_rank,
        ["--chain", str(path), "--emulate-step-s=0.05", "--threads=1", *PIPELINE],
        distributed=False,
        env=environment(tmp_path),
        limit_s=60.0,
    )
    assert codes(outcomes) == [1, 1], outcomes
    assert done(tmp_path) == {}
    assert list((tmp_path / "ckpt" / "second").glob("step-*")), "the running task was not saved"
    # Trained again from its start, since it had no complete checkpoint; then nothing twice.
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [0, 0]
    assert done(tmp_path) == {"first": 3, "second": 40}
    task = read_chain(path)[1]
    assert saved(tmp_path / "ckpt" / "second", task)


# --- the chain's file -----------------------------------------------------------------------------


def test_what_cannot_be_trained_here_is_left_out_and_said_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One block for two stages, a batch that two ranks cannot share, an unreadable append."""
    path = write_chain(
        tmp_path,
        f"""
common: {{{SAME}}}
tasks:
  - {{name: shallow, steps: 2, depth: 1}}
  - {{name: good, steps: 2}}
  - {{name: odd, steps: 2, global_batch: 7}}
  - {{name: smaller, steps: 2, global_batch: 6}}
""",
    )
    added = tmp_path / "state" / "chain.d"
    added.mkdir(parents=True)
    (added / "000001-broken.yaml").write_text("{name: broken, layers: 3}")
    outcomes = run(tmp_path, 2, "--chain", str(path), *PIPELINE)
    assert codes(outcomes) == [2, 2], outcomes
    assert done(tmp_path) == {"good": 2, "smaller": 2}
    said = capfd.readouterr().err
    # Whatever torch has to say on its way out may stand behind it.
    ends = [line for line in said.splitlines() if "not everything was trained" in line]
    assert len(ends) == 1, said
    for word in ("shallow: ", "odd: ", "000001-broken.yaml"):
        assert word in ends[-1], said


def test_steps_lowered_below_what_was_trained_end_the_task_where_it_stands(tmp_path: Path) -> None:
    path = write_chain(tmp_path, two(40))

    def preempt(pids: list[int]) -> None:
        wait_for_step(tmp_path, "second", 5)
        os.kill(pids[0], signal.SIGUSR2)

    slow = ("--chain", str(path), "--emulate-step-s=0.05", *PIPELINE)
    assert codes(run(tmp_path, 2, *slow, meanwhile=preempt)) == [85, 85]
    reached = max(losses(tmp_path)["second"])
    path.write_text(
        path.read_text().replace("steps: 40", "steps: 2")
        + f"  - {{name: third, seed: 3, steps: 2, output: {tmp_path}/out/third}}\n"
    )
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [0, 0]
    assert done(tmp_path) == {"first": 3, "second": reached, "third": 2}
    result = json.loads((tmp_path / "out" / "second" / "result.json").read_text())
    assert result["step"] == reached


def test_no_checkpoints_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = write_chain(tmp_path, two(2))
    assert codes(run(tmp_path, 1, "--chain", str(path), "--checkpoint=none")) == [2]
    assert not (tmp_path / "ckpt").exists()


def saving_rank(rank: int, argv: list[str]) -> list[bool]:
    """Wants a checkpoint in time for each task's last step; whether it was under way then."""
    seen: list[bool] = []
    all_tasks = relay.Relay._all_tasks

    def wrapped(self: relay.Relay) -> None:
        take = self._ft.step

        def step(number: int, **more: Any) -> None:
            assert self._present.trainer is not None
            left = self._present.trainer.task.steps - number
            if left == 1:
                self._ft.want(Kind.SAVE)
            take(number, **more)
            if not left:
                seen.append(self._ft._saving.under_way)

        self._ft.step = step  # type: ignore[assignment]
        all_tasks(self)

    relay.Relay._all_tasks = wrapped  # type: ignore[method-assign]
    trainer_rank(rank, argv)
    return seen


def test_a_save_under_way_at_the_last_step_is_the_last_one(tmp_path: Path) -> None:
    """What is under way at a task's end is finished, and not made again."""
    path = write_chain(tmp_path, two(5))
    argv = ["--chain", str(path), "--emulate-step-s=0.05", "--threads=1", *PIPELINE]
    env = environment(tmp_path)
    outcomes = run_ranks(2, saving_rank, argv, distributed=False, env=env, limit_s=60.0)
    assert [outcome.value for outcome in outcomes] == [[True, True]] * 2, outcomes
    for task in read_chain(path):
        assert saved(tmp_path / "ckpt" / task.name, task)
        names = [p.name for p in sorted((tmp_path / "ckpt" / task.name).glob("step-*"))]
        assert names == [f"step-{task.steps:012d}"]


# --- parts ----------------------------------------------------------------------------------------


def test_a_task_of_another_global_batch_keeps_the_plans_local_batch_as_its_largest() -> None:
    plan = {"FT_GLOBAL_BATCH": "64", "FT_LOCAL_BATCH": "8", "FT_ACCUMULATION": "4"}
    same = layout_for(Task(global_batch=64), Wish(), plan, 2)
    assert (same.local_batch, same.accumulation) == (8, 4)
    other = layout_for(Task(global_batch=24), Wish(), plan, 2)
    assert (other.local_batch, other.accumulation) == (6, 2)
    with pytest.raises(ConfigError, match="blocks cannot be cut"):
        layout_for(Task(depth=1), Wish(stages=2), {}, 2)


def test_a_task_that_had_begun_comes_with_its_step_its_moments_and_its_random_states(
    tmp_path: Path,
) -> None:
    task = Task(name="begun", dim=16, depth=2, heads=2, image=8, global_batch=12, steps=9)
    layout, ranks = Layout(local_batch=12), Ranks(0, 1, torch.device("cpu"), group=False)
    side: Comm = SoloComm()
    store = CheckpointStore(tmp_path, side)

    def ready() -> Any:
        return make_ready(
            task, layout=layout, ranks=ranks, store=store, directory=tmp_path, frozen=set()
        )

    fresh = ready()
    assert (fresh.step, fresh.random) == (0, {})
    state = TaskState(task, build_model(task))
    moments: Tensor = next(iter(state.optimizer.state.values()))["exp_avg"]  # type: ignore[union-attr]
    moments.fill_(3.0)
    torch.manual_seed(99)
    torch.rand(5)
    store.save(
        4, {"task": state}, Meta(position={"samples": 4 * 12}), random=random_states.capture()
    )
    wanted = torch.rand(3)
    incoming = ready()
    assert (incoming.step, incoming.position["samples"]) == (4, 48)
    assert incoming.content.keys() > fresh.content.keys()
    torch.manual_seed(1)
    incoming.seed()
    assert torch.equal(torch.rand(3), wanted)
    fresh.seed()
    torch.manual_seed(task.seed)
    first = torch.rand(3)
    fresh.seed()
    assert torch.equal(torch.rand(3), first)


def test_a_checkpoint_of_another_global_batch_is_refused_in_a_switch_too(tmp_path: Path) -> None:
    task = Task(name="begun", dim=16, depth=2, heads=2, image=8, global_batch=12, steps=9)
    store = CheckpointStore(tmp_path, SoloComm())
    store.save(4, {"task": TaskState(task, build_model(task))}, Meta(position={"samples": 5}))
    with pytest.raises(ConfigError, match="has 5 samples after 4 steps"):
        make_ready(
            task,
            layout=Layout(local_batch=12),
            ranks=Ranks(0, 1, torch.device("cpu"), group=False),
            store=store,
            directory=tmp_path,
            frozen=set(),
        )


def test_jobs_that_are_over_are_not_kept() -> None:
    """Each holds a task's memory: over a long chain they would add up."""
    import gc
    import weakref

    from slurm_ft.switch.beside import Beside

    class Big:
        pass

    beside = Beside("test")
    big = Big()
    seen = weakref.ref(big)
    job = beside.do(lambda held=big: None, "a job")  # type: ignore[misc]
    job.result(5.0)
    del big, job
    until = time.monotonic() + 5
    beside.do(lambda: None, "another").result(5.0)
    while seen() is not None and time.monotonic() < until:
        gc.collect()
    assert seen() is None
    beside.close()

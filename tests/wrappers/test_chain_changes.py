"""Chains whose tasks change under them: between attempts, beside training, while they arrive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_ft.switch import handover, relay
from slurm_ft.switch.chain import read_chain
from slurm_ft.train import engine
from slurm_ft.train.trainer import Step, Trainer
from tests.wrappers.ranks import run_ranks
from tests.wrappers.test_chain import (
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
from tests.wrappers.test_chain_faults import SAME, codes, done, run_slow

# Three tasks of one form; the wish of a test stands in COMMON's place.
THREE = """
common: {FORM}
tasks:
  - {name: first, seed: 1, steps: 3, output: OUT/first}
  - {name: second, seed: 2, steps: 3, backbone_seed: 7, output: OUT/second}
  - {name: third, seed: 3, steps: 2, output: OUT/third}
"""


def preempt_in_second(folder: Path, path: Path) -> None:
    """Run the chain until its second task has made some steps; it saves and leaves."""

    def preempt(pids: list[int]) -> None:
        wait_for_step(folder, "second", 5)
        os.kill(pids[0], signal.SIGUSR2)

    slow = ("--chain", str(path), "--emulate-step-s=0.05", *PIPELINE)
    assert codes(run(folder, 2, *slow, meanwhile=preempt)) == [85, 85]


def same_as_alone(folder: Path, path: Path, size: int, *argv: str) -> None:
    """Every task of the chain has the losses, weights and saved state of a job of its own."""
    mine = losses(folder)
    for task in read_chain(path):
        there = folder / "alone" / task.name
        there.mkdir(parents=True)
        alone(there, task, size, *argv)
        assert mine[task.name] == losses(there)[""], task.name
        assert weights(folder, task.name), task.name
        assert weights(folder, task.name) == weights(there, task.name), task.name
        here, other = saved(folder / "ckpt" / task.name, task), saved(there / "ckpt", task)
        assert [key for key in here if not torch.equal(here[key], other[key])] == []


@pytest.mark.parametrize(
    ("size", "argv", "model"),
    [
        (2, ["--stages=2", "--micro-batches=2", "--accumulation=2", "--precision=bf16"], "vit"),
        pytest.param(
            2, ["--accumulation=3", "--grad-checkpointing"], "vit", marks=pytest.mark.full
        ),
        pytest.param(2, PIPELINE, "decoder", marks=pytest.mark.full),
        pytest.param(4, ["--stages=4", "--micro-batches=4"], "vit", marks=pytest.mark.full),
        pytest.param(4, ["--stages=2", "--micro-batches=3"], "vit", marks=pytest.mark.full),
    ],
)
def test_other_forms_of_training_are_as_equal(
    tmp_path: Path, size: int, argv: list[str], model: str
) -> None:
    """Accumulation, bf16, recomputation, text, four stages, replicas of stages."""
    form = f"{SAME}, model: {model}, length: 8"
    path = write_chain(tmp_path, THREE.replace("FORM", form))
    assert codes(run(tmp_path, size, "--chain", str(path), *argv)) == [0] * size
    same_as_alone(tmp_path, path, size, *argv, f"--model={model}", "--length=8")


# --- what is frozen -------------------------------------------------------------------------------


def touching_rank(rank: int, argv: list[str], name: str, step: int) -> list[float]:
    """Something changes a frozen weight of a task in this step; what it is then."""
    seen: list[float] = []
    make = Trainer.step

    def touch(self: Trainer, number: int, delay_s: float = 0.0) -> Step:
        made = make(self, number, delay_s)
        if self.task.name == name and number == step:
            weight = next(p for p in self.model.parameters() if not p.requires_grad)
            # The way that no version counter sees.
            weight.data.view(-1)[0] += 1.0
            seen.append(float(weight.view(-1)[0]))
        return made

    Trainer.step = touch  # type: ignore[method-assign]
    trainer_rank(rank, argv)
    return seen


@pytest.mark.parametrize(
    ("name", "step"),
    [("first", 3), ("second", 2)],
    ids=["behind the plan of the switch", "in a task that came by a switch"],
)
def test_a_frozen_weight_that_was_changed_all_the_same_is_not_passed_on(
    tmp_path: Path, name: str, step: int
) -> None:
    """Content decides what stays, not that nobody meant to train it: the tasks behind get the
    backbone they asked for, and the changed one's checkpoint holds what it really had."""
    text = THREE.replace("FORM", f"{SAME}, frozen: backbone").replace(", backbone_seed: 7", "")
    path = write_chain(tmp_path, text)
    # Steps long enough for the next task to be ready before the last one.
    argv = ["--chain", str(path), "--threads=1", "--emulate-step-s=0.2"]
    argv += ["--loss-log", str(tmp_path / "loss.jsonl")]
    env = environment(tmp_path)
    (outcome,) = run_ranks(
        1, touching_rank, argv, name, step, distributed=False, env=env, limit_s=60.0
    )
    assert outcome.code == 0, outcome
    (changed,) = outcome.value
    for task in read_chain(path):
        if task.name == name:
            state = saved(tmp_path / "ckpt" / name, task)
            key = next(key for key in state if key.startswith("model.layers.embed"))
            assert float(state[key].view(-1)[0]) == changed
            continue
        there = tmp_path / "alone" / task.name
        there.mkdir(parents=True)
        alone(there, task, 1)
        assert weights(tmp_path, task.name) == weights(there, task.name), task.name
        assert losses(tmp_path)[task.name] == losses(there)[""], task.name


# --- tasks that come late -------------------------------------------------------------------------


def test_a_task_that_comes_with_all_its_steps_made_is_whole_before_it_goes(tmp_path: Path) -> None:
    """Killed between its last checkpoint and its record, it has no step left whose forward would
    wait for its layers; and with few samples to evaluate a replica makes no forward at all."""
    path = write_chain(tmp_path, THREE.replace("FORM", SAME))
    assert codes(run(tmp_path, 2, "--chain", str(path))) == [0, 0]
    for name in ("first", "second", "third"):
        (tmp_path / "ckpt" / "chain" / f"done-{name}.json").unlink()
    for name in ("first", "third"):
        shutil.rmtree(tmp_path / "ckpt" / name)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "loss.jsonl").rename(tmp_path / "before.jsonl")
    outcomes = run_slow(tmp_path, path, "--stages=1", "--micro-batches=1", out=None, inwards=200e3)
    assert codes(outcomes) == [0, 0], outcomes
    again = losses(tmp_path)
    assert set(again) == {"first", "third"}, "the second task had all of its steps"
    task = read_chain(path)[2]
    folder = tmp_path / "alone"
    folder.mkdir()
    alone(folder, task, 2)
    assert again["third"] == losses(folder)[""]
    assert weights(tmp_path, "third") == weights(folder, "third")
    assert weights(tmp_path, "second")


def little_memory_rank(rank: int, argv: list[str]) -> list[int]:
    """Host memory takes nothing of what leaves; bytes kept of what came, after each task."""
    kept: list[int] = []
    handover.host_free = lambda ranks: 0
    handover.device_free = lambda device, ranks: 0
    all_tasks = relay.Relay._all_tasks

    def wrapped(self: relay.Relay) -> None:
        all_tasks(self)
        self._beside.finish(30.0)
        came_as = self._handover._came_as
        assert came_as is not None
        kept.append(sum(len(content) for content in came_as.content.values()))

    relay.Relay._all_tasks = wrapped  # type: ignore[method-assign]
    trainer_rank(rank, argv)
    return kept


def test_with_little_host_memory_tasks_are_equal_and_nothing_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_chain(tmp_path, THREE.replace("FORM", SAME))
    log = str(tmp_path / "loss.jsonl")
    argv = ["--chain", str(path), "--threads=1", "--loss-log", log, *PIPELINE]
    env = environment(tmp_path)
    outcomes = run_ranks(2, little_memory_rank, argv, distributed=False, env=env, limit_s=60.0)
    assert codes(outcomes) == [0, 0], outcomes
    assert "first is saved before second comes" in capfd.readouterr().out
    assert [outcome.value for outcome in outcomes] == [[0], [0]]
    same_as_alone(tmp_path, path, 2, *PIPELINE)


def one_short_rank(rank: int, argv: list[str]) -> None:
    """Host memory takes nothing of what leaves rank 1."""
    if rank == 1:
        handover.host_free = lambda ranks: 0
    trainer_rank(rank, argv)


def test_the_naive_switch_is_refused_on_all_ranks_where_one_has_no_host_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that have room do not wait for it until a time-out."""
    path = write_chain(tmp_path, THREE.replace("FORM", SAME))
    argv = ["--chain", str(path), "--threads=1", *PIPELINE]
    env = environment(tmp_path)
    began = time.monotonic()
    outcomes = run_ranks(
        2, one_short_rank, [*argv, "--switch=naive"], distributed=False, env=env, limit_s=60.0
    )
    assert codes(outcomes) == [1, 1], outcomes
    assert time.monotonic() - began < int(env["FT_COLLECTIVE_TIMEOUT_S"]), "they waited"
    said = capfd.readouterr().err
    assert said.count("rank 1 has no room for the ") == 2, "not said on both ranks"
    assert "rank 0 has no room" not in said
    assert done(tmp_path) == {}
    # With the switch that the message names the same ranks train it all.
    outcomes = run_ranks(2, one_short_rank, argv, distributed=False, env=env, limit_s=60.0)
    assert codes(outcomes) == [0, 0], outcomes
    assert done(tmp_path) == {"first": 3, "second": 3, "third": 2}


# --- the chain's file between attempts ------------------------------------------------------------


def test_a_task_that_became_another_between_attempts_is_left_out_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Going on from the old one's checkpoint would train a mixture of both. The others are
    trained; with the old seed back, the task goes on where it stood."""
    text = THREE.replace("FORM", SAME).replace("seed: 2, steps: 3", "seed: 2, steps: 40")
    path = write_chain(tmp_path, text)
    preempt_in_second(tmp_path, path)
    reached = max(losses(tmp_path)["second"])
    text = path.read_text()
    path.write_text(text.replace("seed: 2,", "seed: 22,"))
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [2, 2]
    said = capfd.readouterr().err
    assert "second: seed=22: the checkpoint of step" in said
    assert done(tmp_path) == {"first": 3, "third": 2}
    assert max(losses(tmp_path)["second"]) == reached
    path.write_text(text)
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=2)) == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    steps = [(row["task"], row["step"]) for row in rows]
    assert len(steps) == len(set(steps)) == 3 + 40 + 2, "a step was made twice"


def test_a_task_whose_checkpoints_were_damaged_does_not_begin_anew_by_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weeks may lie there that somebody can restore. Removed, the task begins anew."""
    text = THREE.replace("FORM", SAME).replace("seed: 2, steps: 3", "seed: 2, steps: 30")
    path = write_chain(tmp_path, text)
    preempt_in_second(tmp_path, path)
    newest = max((tmp_path / "ckpt" / "second").glob("step-*"))
    data = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data.write_bytes(content)
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=1)) == [1, 1]
    assert f"{newest.name} damaged" in capfd.readouterr().err
    assert done(tmp_path) == {"first": 3}
    shutil.rmtree(newest.parent)
    assert codes(run(tmp_path, 2, "--chain", str(path), *PIPELINE, attempt=2)) == [0, 0]
    assert done(tmp_path) == {"first": 3, "second": 30, "third": 2}
    same_as_alone(tmp_path, path, 2, *PIPELINE)


# --- process groups -------------------------------------------------------------------------------


def counting_rank(rank: int, argv: list[str]) -> int:
    """How many groups are made over a chain."""
    made = 0
    new_group = dist.new_group

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal made
        made += 1
        return new_group(*args, **more)

    dist.new_group = counted
    trainer_rank(rank, argv)
    return made


def test_cold_starts_use_the_groups_that_are_there(tmp_path: Path) -> None:
    """Two each would stay behind at every cold start of a long chain."""
    made = []
    for count in (1, 4):
        folder = tmp_path / str(count)
        text = f"common: {{{SAME}}}\ntasks:\n" + "".join(
            f"  - {{name: t{i}, seed: {i}, steps: 1, classes: {i + 2}}}\n" for i in range(count)
        )
        path = write_chain(folder, text)
        outcomes = run_ranks(
            2,
            counting_rank,
            ["--chain", str(path), "--threads=1", *PIPELINE],
            distributed=False,
            env=environment(folder),
            limit_s=60.0,
        )
        assert codes(outcomes) == [0, 0], outcomes
        assert len(done(folder)) == count
        made.append([outcome.value for outcome in outcomes])
    assert made[0] == made[1]


def dying_rank(rank: int, argv: list[str]) -> None:
    """Rank 1 is gone when the engine's groups are made, as if its model had not fitted."""
    groups = engine._groups

    def dies(*args: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return groups(*args)

    engine._groups = dies
    trainer_rank(rank, argv)


def test_a_rank_that_died_before_groups_are_made_is_not_waited_for(tmp_path: Path) -> None:
    path = write_chain(tmp_path, THREE.replace("FORM", SAME))
    env = environment(tmp_path) | {"FT_COLLECTIVE_TIMEOUT_S": "120"}
    argv = ["--chain", str(path), "--threads=1", *PIPELINE]
    began = time.monotonic()
    outcomes = run_ranks(2, dying_rank, argv, distributed=False, env=env, limit_s=60.0)
    assert codes(outcomes)[1] == -signal.SIGKILL
    assert codes(outcomes)[0] not in (0, -signal.SIGKILL), "it was still waiting at the limit"
    assert time.monotonic() - began < 50

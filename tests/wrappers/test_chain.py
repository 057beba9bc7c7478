"""A chain of tasks on warm ranks equals the same tasks trained one by one, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torch import Tensor

from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.chain import ChainState, read_chain, running_chain
from slurm_ft.switch.timeline import Kind, parse_timeline
from slurm_ft.train.__main__ import main
from slurm_ft.train.models import build_model
from slurm_ft.train.state import TaskState
from slurm_ft.train.task import Task
from tests.wrappers.ranks import Outcome, run_ranks

COMMON = "dim: 16, depth: 4, heads: 2, image: 8, samples: 60, global_batch: 12, eval_samples: 20"
CHAIN = f"""
common: {{{COMMON}, warmup_steps: 1}}
tasks:
  - {{name: first, seed: 1, steps: 4, output: OUT/first}}
  - {{name: second, seed: 2, steps: 5, backbone_seed: 7, output: OUT/second, learning_rate: 0.01}}
  - {{name: third, seed: 3, steps: 4, classes: 5, output: OUT/third}}
  - {{name: fourth, seed: 4, steps: 3, classes: 5, output: OUT/fourth}}
"""
# Two backbones in turn, then one that stays.
BACKBONES = f"""
common: {{{COMMON}, warmup_steps: 1, frozen: backbone}}
tasks:
  - {{name: first, seed: 1, steps: 3}}
  - {{name: second, seed: 2, steps: 3, backbone_seed: 7}}
  - {{name: third, seed: 3, steps: 3}}
  - {{name: fourth, seed: 4, steps: 3}}
  - {{name: fifth, seed: 5, steps: 2, classes: 5}}
"""
FROZEN = CHAIN.replace("warmup_steps: 1", "warmup_steps: 1, frozen: backbone")
PIPELINE = ["--stages", "2", "--micro-batches", "3"]


def trainer_rank(rank: int, argv: list[str]) -> None:
    """The program with its exit code."""
    if code := main(argv):
        raise SystemExit(code)


def environment(folder: Path, attempt: int = 0) -> dict[str, str]:
    return {
        "FT_CHECKPOINT_DIR": str(folder / "ckpt"),
        "FT_STATE_DIR": str(folder / "state"),
        "FT_ATTEMPT": str(attempt),
        "FT_JOB_ID": "7",
        # A rank that is killed while groups are made is missed by this limit only.
        "FT_COLLECTIVE_TIMEOUT_S": "20",
    }


def write_chain(folder: Path, text: str = CHAIN) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tasks.yaml"
    path.write_text(text.replace("OUT", str(folder / "out")))
    return path


def run(
    folder: Path, size: int, *argv: str, attempt: int = 0, limit_s: float = 60.0, **more: Any
) -> list[Outcome]:
    log = str(folder / "loss.jsonl")
    return run_ranks(
        size,
        trainer_rank,
        ["--loss-log", log, "--threads", "1", *argv],
        distributed=False,
        env=environment(folder, attempt),
        limit_s=limit_s,
        **more,
    )


def losses(folder: Path) -> dict[str, dict[int, str]]:
    """The last loss of each step of each task, exactly."""
    found: dict[str, dict[int, str]] = {}
    for line in (folder / "loss.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row.get("task", ""), {})[row["step"]] = row["hex"]
    return found


def weights(folder: Path, task: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "out" / task).glob("*.safetensors"))}


def saved(root: Path, task: Task) -> dict[str, Tensor]:
    """Everything of a task's newest checkpoint, as one rank with the whole model loads it."""
    state = TaskState(task, build_model(task))
    loaded = CheckpointStore(root, SoloComm()).load({"task": state})
    assert loaded is not None
    assert loaded.step == task.steps
    found = {}
    for layer in state.layers().values():
        found.update(layer)
    return found


def alone(folder: Path, task: Task, size: int, *argv: str) -> None:
    """Train one task by itself, as a job of its own would."""
    values = {
        "dim": task.dim,
        "depth": task.depth,
        "heads": task.heads,
        "image": task.image,
        "samples": task.samples,
        "global_batch": task.global_batch,
        "eval_samples": task.eval_samples,
        "warmup_steps": task.warmup_steps,
        "classes": task.classes,
        "seed": task.seed,
        "backbone_seed": task.backbone_seed,
        "frozen": task.frozen,
        "steps": task.steps,
        "learning_rate": task.learning_rate,
        "output": folder / "out" / task.name,
    }
    options = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    outcomes = run(folder, size, *options, *argv)
    assert [outcome.code for outcome in outcomes] == [0] * size, outcomes


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each task by itself, once per layout."""
    made: dict[tuple[int, str, tuple[str, ...]], dict[str, Path]] = {}

    def get(size: int, text: str, argv: list[str]) -> dict[str, Path]:
        key = (size, text, tuple(argv))
        if key not in made:
            base = tmp_path_factory.mktemp("alone")
            made[key] = {}
            for task in read_chain(write_chain(base, text)):
                folder = base / task.name
                folder.mkdir()
                alone(folder, task, size, *argv)
                made[key][task.name] = folder
        return made[key]

    return get


LAYOUTS = {
    "pipeline": (2, CHAIN, PIPELINE),
    "frozen": (2, FROZEN, PIPELINE),
    "replicas": (2, CHAIN, []),
    "one": (1, CHAIN, []),
}


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("pipeline", "overlapped"),
        ("pipeline", "naive"),
        ("pipeline", "cold"),
        ("frozen", "overlapped"),
        ("replicas", "overlapped"),
        ("one", "overlapped"),
        *(
            pytest.param(layout, how, marks=pytest.mark.full)
            for layout in ("frozen", "replicas", "one")
            for how in ("naive", "cold")
        ),
    ],
)
def test_a_chain_trains_what_its_tasks_train_alone(
    tmp_path: Path, references: Any, layout: str, how: str
) -> None:
    size, text, argv = LAYOUTS[layout]
    wanted = references(size, text, argv)
    path = write_chain(tmp_path, text)
    outcomes = run(tmp_path, size, "--chain", str(path), "--switch", how, *argv)
    assert [outcome.code for outcome in outcomes] == [0] * size, outcomes
    mine = losses(tmp_path)
    for task in read_chain(path):
        assert mine[task.name] == losses(wanted[task.name])[""], task.name
        assert weights(tmp_path, task.name) == weights(wanted[task.name], task.name)
        assert weights(tmp_path, task.name)
        here = saved(tmp_path / "ckpt" / task.name, task)
        there = saved(wanted[task.name] / "ckpt", task)
        assert here.keys() == there.keys()
        different = [key for key in here if not torch.equal(here[key], there[key])]
        assert not different, (task.name, different[:5])
    done = ChainState(tmp_path / "state", tmp_path / "ckpt").done()
    assert [done[name].step for name in ("first", "second", "third", "fourth")] == [4, 5, 4, 3]


@pytest.mark.timeout(120)
def test_the_first_example_of_the_documentation_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As it stands there, with the variables of a plan without a pipeline; only shorter."""
    page = (Path(__file__).parents[2] / "docs" / "switch.md").read_text()
    (text,) = re.findall(r"(?m)(?:^    (?:common:|tasks:|  - ).*\n)+", page)
    (command,) = re.findall(r"ft-run .*--chain tasks.yaml -- python -m slurm_ft.train(.*)", page)
    text = re.sub(r"steps: \d+", "steps: 2", text).replace("output: out", f"output: {tmp_path}/out")
    path = tmp_path / "tasks.yaml"
    path.write_text(textwrap.dedent(text))
    tasks = read_chain(path)
    assert len(tasks) > 1
    plan = {"FT_GPUS": "4", "FT_STAGES": "1", "FT_MICRO_BATCHES": "1"}
    outcomes = run_ranks(
        4,
        trainer_rank,
        ["--threads=1", "--chain", str(path), *command.split()],
        distributed=False,
        env=environment(tmp_path) | plan,
        limit_s=100.0,
    )
    assert [outcome.code for outcome in outcomes] == [0] * 4, outcomes
    done = ChainState(tmp_path / "state", tmp_path / "ckpt").done()
    assert {name: record.step for name, record in done.items()} == {t.name: 2 for t in tasks}
    assert "4 stages" in capfd.readouterr().out


def test_the_time_line_tells_what_moved(tmp_path: Path) -> None:
    path = write_chain(tmp_path, BACKBONES)
    outcomes = run(tmp_path, 2, "--chain", str(path), *PIPELINE)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    files = sorted((tmp_path / "ckpt" / "chain").glob("switch-*.json"))
    lines = [parse_timeline(file.read_text(), str(file)) for file in files]
    assert [line.how for line in lines] == ["overlapped"] * 3 + ["cold"]
    begun, other, same, cold = lines
    # A backbone of which the host has a copy does not go out; the same one does not move at all.
    assert begun.moved(Kind.OUT) > 3 * other.moved(Kind.OUT) > 0
    assert other.moved(Kind.IN) == begun.moved(Kind.IN) > 3 * same.moved(Kind.IN) > 0
    assert other.moved(Kind.OUT) == same.moved(Kind.OUT)
    assert cold.moved(Kind.IN) == cold.moved(Kind.OUT) == 0
    for line in lines:
        assert line.last_step_s <= min(line.durable_s, line.first_step_s)
        assert {span.stage for span in line.spans} == {0, 1}


def test_a_chain_goes_on_where_it_was_stopped_and_takes_what_was_appended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_chain(tmp_path)
    slow = ["--chain", str(path), "--emulate-step-s", "0.1", *PIPELINE]

    def preempt(pids: list[int]) -> None:
        wait_for_step(tmp_path, "second", 2)
        os.kill(pids[1], signal.SIGUSR2)

    first = run(tmp_path, 2, *slow, meanwhile=preempt)
    assert [outcome.code for outcome in first] == [85, 85], first
    added = tmp_path / "fifth.yaml"
    added.write_text(f"{{{COMMON}, name: fifth, seed: 5, classes: 5, steps: 2, warmup_steps: 1}}")
    running_chain(tmp_path / "state").append(added)
    before = len((tmp_path / "loss.jsonl").read_text().splitlines())
    second = run(tmp_path, 2, *slow, attempt=1)
    assert [outcome.code for outcome in second] == [0, 0], second
    assert re.search(r"(?m)^second goes on after step \d+$", capfd.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    later = [(row["task"], row["step"]) for row in rows[before:]]
    assert "first" not in {task for task, _ in later}, "a task that was done is trained again"
    assert len(later) == len(set(later))
    steps = [(row["task"], row["step"]) for row in rows]
    assert len(steps) == len(set(steps)), "a step was made twice although it was saved"
    assert steps[-2:] == [("fifth", 1), ("fifth", 2)]


def wait_for_step(folder: Path, task: str, step: int, limit_s: float = 40.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if (folder / "loss.jsonl").exists():
            for line in (folder / "loss.jsonl").read_text().splitlines():
                row = json.loads(line)
                if (row["task"], row["step"]) == (task, step):
                    return
        time.sleep(0.02)
    raise AssertionError(f"{task} never came to step {step}")


def wait_near_end(folder: Path, chain: ChainState, task: Task, attempt: int) -> bool:
    """Wait until this attempt is near the end of a task or beyond; False where it is done."""
    end = time.monotonic() + 40.0
    log = folder / "loss.jsonl"
    while time.monotonic() < end:
        for line in log.read_text().splitlines() if log.exists() else ():
            row = json.loads(line)
            near = row["task"] != task.name or row["step"] >= task.steps - 1
            if row["attempt"] == attempt and near:
                return True
        if task.name in chain.done():
            return False
        time.sleep(0.02)
    raise AssertionError(f"{task.name} never came near its end in attempt {attempt}")


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_no_task_is_lost_or_trained_twice(
    tmp_path: Path, references: Any, seed: int
) -> None:
    kill_and_go_on(tmp_path, references, seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3, 100))
def test_killed_at_any_moment_long(tmp_path: Path, references: Any, seed: int) -> None:
    kill_and_go_on(tmp_path, references, seed)


def kill_and_go_on(folder: Path, references: Any, seed: int) -> None:
    """Kill one rank or all near a switch, start again until the chain is done, and compare."""
    chance = random.Random(seed)
    path = write_chain(folder)
    chain = ChainState(folder / "state", folder / "ckpt")
    done_before: set[str] = set()
    for attempt in range(12):
        done_before = set(chain.done())
        target = next((t for t in read_chain(path) if t.name not in done_before), None)
        if target is None:
            break  # killed on its way out, with everything done

        def strike(pids: list[int], target: Task = target, attempt: int = attempt) -> None:
            # Steps of this attempt: a rank that dies before the ranks have met is not of interest.
            if wait_near_end(folder, chain, target, attempt):
                time.sleep(chance.uniform(0.0, 0.5))
                for pid in pids if chance.random() < 0.5 else [chance.choice(pids)]:
                    os.kill(pid, signal.SIGKILL)

        lines = len((folder / "loss.jsonl").read_text().splitlines()) if attempt else 0
        outcomes = run(
            folder,
            2,
            "--chain",
            str(path),
            "--emulate-step-s",
            "0.05",
            *PIPELINE,
            attempt=attempt,
            limit_s=45.0,
            meanwhile=strike if attempt < 3 else None,
        )
        rows = (folder / "loss.jsonl").read_text().splitlines()[lines:]
        again = {json.loads(row)["task"] for row in rows} & done_before
        assert not again, f"attempt {attempt} trained {again} again"
        if all(outcome.code == 0 for outcome in outcomes):
            break
    assert set(chain.done()) == {"first", "second", "third", "fourth"}
    wanted = references(2, CHAIN, PIPELINE)
    mine = losses(folder)
    for task in read_chain(path):
        assert mine[task.name] == losses(wanted[task.name])[""], task.name
        assert weights(folder, task.name) == weights(wanted[task.name], task.name)

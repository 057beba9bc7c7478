"""The reference trainer on real ranks: one result whatever the layout, and after any stop.

Tolerances: the same layout is bit-equal. Another one sums in another order: losses of a few steps
agree to 1e-5 of their value, and to 1e-3 after tens of steps, in which the difference grows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

# Imported before the ranks are forked: each of them would spend seconds on it.
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.optim

from slurm_ext.domain.errors import ConfigError
from slurm_ft import exits
from slurm_ft.train.__main__ import main
from slurm_ft.train.engine import loses_no_sends
from slurm_ft.train.layout import Layout, Wish, resolve_layout
from slurm_ft.train.models import build_model
from slurm_ft.train.ranks import Ranks, check_precision, joined, prepare_device
from slurm_ft.train.state import StateMismatchError
from slurm_ft.train.task import Task, make_task
from slurm_ft.train.trainer import Trainer
from tests.wrappers.ranks import run_ranks, values

SMALL = {"dim": 16, "depth": 4, "heads": 2, "image": 8, "samples": 60, "global_batch": 12}
FEW = {**SMALL, "steps": 4, "warmup_steps": 1, "eval_samples": 20}


def losses(rank: int, task_values: dict[str, Any], wish_values: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; the exact losses of all steps and the metrics at the end."""
    task = make_task(task_values, "test")
    with joined(os.environ, "cpu") as ranks:
        wish = Wish(**wish_values)
        layout = resolve_layout({}, wish, world=ranks.world, global_batch=task.global_batch)
        prepare_device(layout, ranks.device)
        trainer = Trainer(task, layout, ranks)
        found = [trainer.mean_loss(trainer.step(i)) for i in range(1, task.steps + 1)]
        return {"losses": [loss.hex() for loss in found], "metrics": trainer.evaluate()}


def run_losses(
    size: int, task_values: dict[str, Any] | None = None, **wish: Any
) -> tuple[list[float], dict[str, float]]:
    """The losses that all ranks agree on."""
    said = values(
        run_ranks(size, losses, task_values or FEW, wish, distributed=False, limit_s=50.0)
    )
    assert all(one == said[0] for one in said)
    return [float.fromhex(text) for text in said[0]["losses"]], said[0]["metrics"]


@pytest.mark.parametrize("model", ["vit", "decoder"])
def test_every_layout_trains_the_same(model):
    task = {**FEW, "model": model}
    alone, alone_metrics = run_losses(1, task)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (3, {"accumulation": 2}),
        (2, {"stages": 2, "micro_batches": 3, "accumulation": 2}),
        (2, {"stages": 2, "schedule": "gpipe"}),
        (4, {"stages": 2}),
    ]
    for size, wish in layouts:
        other, metrics = run_losses(size, task, **wish)
        assert other == pytest.approx(alone, rel=1e-5), (size, wish)
        assert metrics == pytest.approx(alone_metrics, rel=1e-3), (size, wish)


def test_frozen_layers_and_stages_train_the_same_in_a_pipeline():
    for frozen in ("backbone", "2", "3"):  # no stage, a part of the first, the whole first stage
        task = {**FEW, "frozen": frozen}
        alone, _ = run_losses(1, task)
        assert run_losses(2, task, stages=2)[0] == pytest.approx(alone, rel=1e-5), frozen


def test_recomputing_activations_changes_nothing_and_bf16_little():
    plain, _ = run_losses(1)
    assert run_losses(1, grad_checkpointing=True)[0] == plain
    rough, _ = run_losses(1, precision="bf16")
    assert rough != plain
    assert rough == pytest.approx(plain, rel=0.02)
    assert run_losses(2, stages=2, precision="bf16")[0] == pytest.approx(plain, rel=0.02)


def moved(rank: int, task_values: dict[str, Any]) -> dict[str, bool]:
    """Which layers a few steps have changed."""
    task = make_task(task_values, "test")
    trainer = Trainer(task, Layout(1, task.global_batch), Ranks(0, 1, torch.device("cpu"), False))
    before = {name: digest(tensors) for name, tensors in trainer.state.layers().items()}
    for number in (1, 2):
        trainer.step(number)
    return {n: digest(t) != before[n] for n, t in trainer.state.layers().items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of the bytes of some tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(("frozen", "still"), [("none", 0), ("2", 2), ("backbone", 5)])
def test_exactly_the_frozen_layers_keep_their_bits(frozen, still):
    changed = values(run_ranks(1, moved, {**FEW, "frozen": frozen}, distributed=False))[0]
    assert list(changed) == ["embed", "layer0", "layer1", "layer2", "layer3", "output"]
    assert list(changed.values()) == [False] * still + [True] * (6 - still)


def weights(rank: int, task_values: dict[str, Any]) -> dict[str, str]:
    """Digests of the weights that a model begins with, without norms and biases."""
    model = build_model(make_task(task_values, "test"))
    return {n: digest({n: p.detach()}) for n, p in model.named_parameters() if p.dim() > 1}


def test_tasks_of_one_backbone_seed_begin_with_the_same_backbone_and_their_own_heads():
    first, second, third = (
        values(run_ranks(1, weights, {**FEW, "seed": seed, "backbone_seed": backbone}))[0]
        for seed, backbone in ((1, 7), (2, 7), (2, 8))
    )
    heads = [name for name in first if "output" in name]
    assert len(heads) == 1
    assert [name for name in first if first[name] != second[name]] == heads
    assert [name for name in first if second[name] == third[name]] == heads


def compute_seconds(rank: int, stages: int) -> list[float]:
    """What each rank reports as its own computing when rank 0 is slow."""
    task = make_task({**FEW, "steps": 3}, "test")
    with joined(os.environ, "cpu") as ranks:
        layout = resolve_layout(
            {}, Wish(stages=stages), world=ranks.world, global_batch=task.global_batch
        )
        trainer = Trainer(task, layout, ranks)
        return [trainer.step(i, 0.3 if rank == 0 else 0.0).compute_s for i in (1, 2, 3)]


def test_waiting_for_a_slow_rank_is_not_counted_as_computing():
    """Field case straggler-hidden: after the collective all ranks look alike."""
    slow, fast = values(run_ranks(2, compute_seconds, 1, distributed=False))
    assert min(slow) >= 0.3
    assert sorted(fast)[1] < 0.15  # the median: this machine may be busy


def addresses(trainer: Trainer) -> list[int]:
    """Where the tensors of a task lie."""
    layers = trainer.state.layers().values()
    return [tensor.data_ptr() for tensors in layers for tensor in tensors.values()]


def adopted(rank: int, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Losses of a task after another in the same tensors, and of it alone."""
    task = make_task(second, "test")
    with joined(os.environ, "cpu") as ranks:
        layout = resolve_layout(
            {}, Wish(stages=2), world=ranks.world, global_batch=task.global_batch
        )
        trainer = Trainer(make_task(first, "test"), layout, ranks)
        trainer.step(1)
        places = addresses(trainer)
        trainer.adopt(task)
        after = [trainer.mean_loss(trainer.step(i)).hex() for i in (1, 2, 3)]
        now = addresses(trainer)
        fresh = Trainer(task, layout, ranks)
        alone = [fresh.mean_loss(fresh.step(i)).hex() for i in (1, 2, 3)]
        refused = trainer.differs(make_task({**second, "dim": 32}, "test"))
        return {"after": after, "alone": alone, "same": places == now, "refused": refused}


def test_a_task_that_follows_another_in_its_tensors_trains_as_if_it_were_alone():
    second = {**FEW, "seed": 5, "backbone_seed": 6, "learning_rate": 0.01, "weight_decay": 0.1}
    for said in values(run_ranks(2, adopted, FEW, second, distributed=False)):
        assert said["after"] == said["alone"]
        assert said["same"]
        assert said["refused"] == "dim is 32 and not 16"


def refused(rank: int) -> str:
    """What is said of a task with another number of classes."""
    trainer = Trainer(Task(**SMALL), Layout(1, 12), Ranks(0, 1, torch.device("cpu"), False))
    with pytest.raises(StateMismatchError) as caught:
        trainer.adopt(Task(**SMALL, classes=3))
    return str(caught.value)


def test_a_task_of_another_form_is_refused():
    assert "classes is 3 and not 8" in values(run_ranks(1, refused, distributed=False))[0]


@pytest.mark.parametrize(
    ("precision", "refused"), [("fp32", False), ("bf16", False), ("tf32", True)]
)
def test_a_cpu_refuses_the_precision_that_it_does_not_have(precision, refused):
    layout = Layout(precision=precision)
    with pytest.raises(ConfigError, match="a CPU has no tf32") if refused else nullcontext():
        check_precision(layout, torch.device("cpu"))


@pytest.mark.parametrize("fixed", [True, False])
def test_1f1b_is_left_where_torch_would_lose_its_sends(fixed, monkeypatch):
    schedules = torch.distributed.pipelining.schedules
    if fixed:
        monkeypatch.setattr(schedules, "_wait_batch_p2p", object(), raising=False)
    else:
        monkeypatch.delattr(schedules, "_wait_batch_p2p", raising=False)
    assert loses_no_sends(torch.device("cpu")) is fixed
    assert loses_no_sends(torch.device("cuda"))


# --- as a program, under a session ---------------------------------------------------------------


def program(rank: int, argv: Sequence[str]) -> int:
    """The whole program on this rank; its exit code."""
    code = main([*argv, "--threads=1"], os.environ)
    if code:
        raise SystemExit(code)
    return code


def read_losses(path: Path) -> dict[int, str]:
    """Exact losses by step: the last line of a step counts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["hex"] for line in lines}


def run_program(
    size: int,
    tmp_path: Path,
    name: str,
    *argv: str,
    meanwhile: Callable[[list[int]], None] | None = None,
    **env: str,
) -> list[int]:
    """Exit codes of the ranks. ``name`` is of checkpoints and loss log."""
    found = run_ranks(
        size,
        program,
        [
            *(f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()),
            f"--loss-log={tmp_path / name}.log",
            *argv,
        ],
        distributed=False,
        limit_s=55.0,
        env={"FT_CHECKPOINT_DIR": str(tmp_path / f"{name}-checkpoints"), **env},
        meanwhile=meanwhile,
    )
    for outcome in found:
        assert not outcome.error, outcome.error
    return [outcome.code for outcome in found]


def signalled_after(log: Path, step: int, rank: int) -> Callable[[list[int]], None]:
    """Sends USR2 to one rank once the log has a step."""

    def send(pids: list[int]) -> None:
        end = time.monotonic() + 40.0
        while not log.exists() or f'"step": {step},' not in log.read_text():
            assert time.monotonic() < end, "the program makes no steps"
            time.sleep(0.02)
        os.kill(pids[rank], signal.SIGUSR2)

    return send


LONG = ("--steps=16", "--emulate-step-s=0.05", "--log-every=100")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of three ranks that nobody stopped."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert run_program(3, directory, "run", *LONG) == [0, 0, 0]
    found = read_losses(directory / "run.log")
    assert sorted(found) == list(range(1, 17))
    return found


def test_a_signal_to_one_rank_stops_all_and_the_same_ranks_go_on_bit_for_bit(tmp_path, undisturbed):
    """Field case sig-one-rank, with three ranks: sums of three depend on DDP's buckets."""
    log = tmp_path / "run.log"
    stopped = run_program(3, tmp_path, "run", *LONG, meanwhile=signalled_after(log, 4, rank=1))
    assert stopped == [exits.REQUEUE] * 3
    first = read_losses(log)
    assert 4 <= len(first) < 16
    assert run_program(3, tmp_path, "run", *LONG, FT_ATTEMPT="1") == [0, 0, 0]
    assert read_losses(log) == undisturbed
    # The second attempt went on where the first had stopped: no step was lost or made again.
    attempts = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in attempts if line["attempt"] == 1] == list(
        range(len(first) + 1, 17)
    )


@pytest.mark.parametrize(
    ("before", "after", "wish"), [(4, 2, ("--stages=2",)), (1, 3, ()), (3, 1, ())]
)
def test_a_stopped_run_goes_on_with_other_ranks_within_tolerance(
    tmp_path, undisturbed, before, after, wish
):
    log = tmp_path / "run.log"
    send = signalled_after(log, 4, rank=before - 1)
    assert set(run_program(before, tmp_path, "run", *LONG, *wish, meanwhile=send)) == {
        exits.REQUEUE
    }
    assert set(run_program(after, tmp_path, "run", *LONG)) == {0}
    found = read_losses(log)
    assert sorted(found) == sorted(undisturbed)
    for step, text in found.items():
        assert float.fromhex(text) == pytest.approx(float.fromhex(undisturbed[step]), rel=1e-3)


def test_another_global_batch_than_the_checkpoint_s_is_refused(tmp_path, capfd):
    assert run_program(1, tmp_path, "run", "--steps=2") == [0]
    assert run_program(1, tmp_path, "run", "--steps=4", "--global-batch=6") == [2]
    assert "24 samples after 2 steps" in capfd.readouterr().err


def test_a_result_is_vouched_for_and_says_whether_the_target_is_kept(tmp_path, capfd):
    out = tmp_path / "out"
    argv = ("--steps=40", f"--output={out}", "--quality=top1>=0.3", "--stages=2", "--depth=2")
    assert run_program(2, tmp_path, "run", *argv) == [0, 0]
    manifest = json.loads((out / "result.json").read_text())
    assert manifest["quality_kept"] is True
    assert manifest["metrics"]["top1"] >= 0.3
    assert (manifest["step"], manifest["samples"]) == (40, 480)
    assert "top1>=0.3 kept" in capfd.readouterr().out
    assert sorted(manifest["files"]) == sorted(path.name for path in out.glob("model-*"))
    for name, expected in manifest["files"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == expected
    losses_by_step = read_losses(tmp_path / "run.log")
    assert float.fromhex(losses_by_step[40]) < 0.8 * float.fromhex(losses_by_step[1])


def read_back(rank: int, directory: str) -> list[str]:
    """Write one part of each dtype and read it with the real library: what differs."""
    from safetensors.torch import load_file

    from slurm_ft.train.results import part_name, write_part

    written = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3).t(),  # not contiguous
        "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    write_part(Path(directory), 0, 1, written)
    found = load_file(f"{directory}/{part_name(0, 1)}")
    differ = [name for name in written if not torch.equal(found[name], written[name])]
    return differ + sorted(found.keys() ^ written.keys())


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    pytest.importorskip("safetensors.torch")
    assert values(run_ranks(1, read_back, str(tmp_path), distributed=False)) == [[]]


def test_a_run_that_has_diverged_keeps_no_target(tmp_path, capfd):
    """Its scores are no numbers, and the class that argmax takes of them is sometimes right."""
    out = tmp_path / "out"
    argv = ("--steps=4", "--learning-rate=1e30", f"--output={out}", "--quality=top1>=0.01")
    assert run_program(1, tmp_path, "run", *argv) == [0]
    assert "top1>=0.01 MISSED" in capfd.readouterr().out

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    manifest = json.loads((out / "result.json").read_text(), parse_constant=refused)
    assert manifest["quality_kept"] is False
    assert manifest["metrics"] == {"top1": 0.0, "loss": None}


def test_a_missed_target_is_said(tmp_path, capfd):
    assert run_program(1, tmp_path, "run", "--steps=1", "--quality=loss<=0.0001") == [0]
    assert "loss<=0.0001 MISSED" in capfd.readouterr().out


def test_a_task_of_a_step_without_ranks_is_refused(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ConfigError, match=r"srun ft-run .*--launcher=no"),
        joined({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}),
    ):
        pass

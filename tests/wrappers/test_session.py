"""Sessions on real ranks: agreement, signals, stuck and dead peers, errors, plans, resumption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slurm_ft
from slurm_ext.domain.progress import parse_progress
from slurm_ft import exits, status, variables
from slurm_ft.checkpoint.layout import examine
from slurm_ft.session import guard, wishes
from slurm_ft.session.agreement import Kind
from tests.wrappers.mpi_launcher import MpiLauncher
from tests.wrappers.ranks import RANK_ERROR, Outcome, free_port, run_ranks, values

ROOT = Path(__file__).resolve().parents[2]

STEP_S = 0.03
Hook = Callable[[int, int], None]


def nothing(rank: int, step: int) -> None:
    """A program that nobody disturbs."""


def prepare(rank: int, place: Path, **more: str) -> None:
    """What ft-run would have set for this rank."""
    os.environ.update(
        {
            variables.JOB: "7",
            variables.STATUS: str(place / f"status-{rank}.json"),
            variables.CHECKPOINT_DIR: str(place / "ck"),
            variables.COLLECTIVE_TIMEOUT_S: "20",
            **({variables.PROGRESS: str(place / "progress-7.json")} if rank == 0 else {}),
            **more,
        }
    )


def train(
    rank: int, upto: int, hook: Hook = nothing, *, checkpoint: str = "sync", compute_s: float = 0.0
) -> dict[str, Any]:
    """A data-parallel loop whose loss depends on model, optimizer, position and random states."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: dict[int, str] = {}
    with slurm_ft.session(
        state={"model": model, "optimizer": optimizer}, total_steps=upto, checkpoint=checkpoint
    ) as ft:
        step = ft.restore()
        restored = step
        index = ft.position.get("index", 0)
        while step < upto:
            hook(rank, step)
            time.sleep(STEP_S + compute_s)
            noise = torch.rand(4, 8)
            loss = ((model(noise) - index) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            step, index = step + 1, index + 1
            losses[step] = loss.item().hex()
            ft.step(
                step,
                samples=4 * ft.size,
                position={"index": index},
                compute_s=STEP_S + compute_s,
            )
        return {"restored": restored, "losses": losses, "saved": ft.last_saved_step}


def told(place: Path, rank: int) -> status.Status:
    found = status.read(place / f"status-{rank}.json")
    assert found is not None
    return found


def complete_steps(place: Path) -> list[int]:
    return [item.step for item in examine(place / "ck").complete]


def signalled_at(at: int, number: int, *ranks: int) -> Hook:
    def hook(rank: int, step: int) -> None:
        if step == at and rank in ranks:
            os.kill(os.getpid(), number)

    return hook


def losses_of(outcome: Outcome) -> dict[str, str]:
    losses: dict[str, str] = outcome.value["losses"]
    return losses


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGUSR2, (1,)), (signal.SIGTERM, (2,)), (signal.SIGTERM, (0, 1, 2))],
    ids=["usr2-one-rank", "term-one-rank", "term-all"],
)
def test_one_ranks_signal_is_enough_and_nothing_is_lost(
    tmp_path: Path, number: int, ranks: tuple[int, ...]
) -> None:
    """sig-one-rank and sig-term-only: all ranks save the same step, and go on from it bit-equal."""

    def undisturbed(rank: int) -> Any:
        prepare(rank, tmp_path / "whole")
        return train(rank, 16)

    def first(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 16, signalled_at(7, number, *ranks))

    def second(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.ATTEMPT: "1"})
        return train(rank, 16)

    (tmp_path / "whole").mkdir()
    whole = run_ranks(3, undisturbed)
    values(whole)
    left = run_ranks(3, first)
    assert [outcome.code for outcome in left] == [exits.REQUEUE] * 3, left
    assert complete_steps(tmp_path) == [9]
    for rank in range(3):
        end = told(tmp_path, rank)
        assert (end.leaving, end.saved_step, end.step) == (status.SIGNALLED, 9, 9)
        assert (end.heard is not None) == (rank in ranks)
    again = run_ranks(3, second)
    values(again)
    for before, after in zip(whole, again, strict=True):
        assert after.value["restored"] == 9
        expected = {step: loss for step, loss in losses_of(before).items() if int(step) > 9}
        assert losses_of(after) == expected


def test_half_the_ranks_go_on_where_all_of_them_left(tmp_path: Path) -> None:
    def first(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 40, signalled_at(5, signal.SIGUSR2, 3))

    def second(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.ATTEMPT: "1"})
        return train(rank, 12)

    assert [outcome.code for outcome in run_ranks(4, first)] == [exits.REQUEUE] * 4
    replies = values(run_ranks(2, second))
    assert [reply["restored"] for reply in replies] == [7, 7]
    assert sorted(replies[0]["losses"], key=int) == ["8", "9", "10", "11", "12"]
    report = parse_progress((tmp_path / "progress-7.json").read_text(), "x")
    # Samples are counted over both attempts: 7 steps of 16 and 5 of 8.
    assert (report.step, report.samples, report.attempt) == (12, 152, 1)


def test_saves_beside_training_are_complete_and_counted(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.CHECKPOINT_INTERVAL: "0.3"})
        return train(rank, 50, checkpoint="async")

    replies = values(run_ranks(3, run))
    end = told(tmp_path, 0)
    # What was under way at the last step is finished with the session, on all ranks alike.
    seen = {reply["saved"] for reply in replies}
    assert len(seen) == 1
    assert seen.pop() <= end.saved_step == complete_steps(tmp_path)[0]
    assert {told(tmp_path, rank).saved_step for rank in range(3)} == {end.saved_step}
    assert len(complete_steps(tmp_path)) == 2  # ckpt-pile: only so many stay
    assert end.done
    assert end.save_s is not None
    assert 0 < end.stall_s < 5
    report = parse_progress((tmp_path / "progress-7.json").read_text(), "x")
    assert report.last_checkpoint_step == complete_steps(tmp_path)[0]


def test_a_signal_during_a_save_beside_training_finishes_it_and_saves_anew(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.CHECKPOINT_INTERVAL: "0.2"})
        begun: list[int] = []
        from slurm_ft.session.saving import Saving

        begin = Saving.begin

        def noticed(self: Saving, step: int, meta: Any) -> None:
            begin(self, step, meta)
            # The signal arrives while the writer's thread works.
            if not begun and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            begun.append(step)

        Saving.begin = noticed  # type: ignore[method-assign]
        return train(rank, 500, checkpoint="async")

    assert [outcome.code for outcome in run_ranks(2, run)] == [exits.REQUEUE] * 2
    first, *_ = complete_steps(tmp_path)
    assert first == told(tmp_path, 0).step
    assert len(complete_steps(tmp_path)) == 2


def test_a_rank_in_a_collective_leaves_before_the_grace_is_over(tmp_path: Path) -> None:
    """sig-in-collective: rank 1 never comes, rank 0 sits in all_reduce and cannot run a handler."""
    ended: dict[int, float] = {}

    def hook(rank: int, step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            if rank == 1:
                time.sleep(60)

    def run(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.GRACE_S: "3"})
        return train(rank, 40, hook)

    began = time.monotonic()
    outcomes = run_ranks(2, run, limit_s=30)
    ended[0] = time.monotonic() - began
    assert [outcome.code for outcome in outcomes] == [exits.ABANDONED] * 2
    for rank in range(2):
        end = told(tmp_path, rank)
        assert end.leaving == status.GRACE_OVER
        assert "SIGTERM came 2." in end.note
        assert "after step 5" in end.note
    assert ended[0] < 15


def test_a_stuck_rank_is_given_up_only_once_leaving_was_asked_for(tmp_path: Path) -> None:
    """A step three times as long as the limit is nobody's business until a signal comes."""

    def hook(rank: int, step: int) -> None:
        if step == 3:
            time.sleep(3.0)
        if step == 6:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(60)

    def run(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.COLLECTIVE_TIMEOUT_S: "1"})
        return train(rank, 40, hook)

    outcomes = run_ranks(1, run, limit_s=30)
    assert [outcome.code for outcome in outcomes] == [exits.ABANDONED]
    end = told(tmp_path, 0)
    assert (end.leaving, end.step) == (status.STUCK, 6)
    assert "limit 1.0 s" in end.note


@pytest.mark.parametrize("in_step", [True, False], ids=["in-training", "at-safe-point"])
def test_a_killed_peer_ends_the_others_for_requeue(tmp_path: Path, in_step: bool) -> None:
    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        if in_step:

            def hook(rank: int, step: int) -> None:
                if step == 5 and rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            return train(rank, 40, hook)
        with slurm_ft.session() as ft:
            for step in range(1, 40):
                time.sleep(STEP_S)
                if step == 5 and rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                ft.step(step)
        return None

    outcomes = run_ranks(3, run)
    assert [outcome.code for outcome in outcomes] == [
        exits.ABANDONED,
        exits.ABANDONED,
        -signal.SIGKILL,
    ]
    for rank in (0, 1):
        assert told(tmp_path, rank).leaving == status.LOST_PEER
    assert told(tmp_path, 2).leaving is None


def test_an_error_of_the_program_is_told_apart_from_a_lost_peer(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if step == 5 and rank == 1:
            raise ZeroDivisionError("the program's own")

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 40, hook)

    outcomes = run_ranks(2, run)
    assert [outcome.code for outcome in outcomes] == [exits.ABANDONED, RANK_ERROR]
    failed = told(tmp_path, 1).failed
    assert failed is not None
    assert "the program's own" in failed
    assert told(tmp_path, 1).leaving is None
    assert told(tmp_path, 0).leaving == status.LOST_PEER


def test_a_second_signal_leaves_without_a_save(tmp_path: Path) -> None:
    """The first is heard in a long step; the second comes before the ranks are together."""

    def hook(rank: int, step: int) -> None:
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

    def run(rank: int) -> Any:
        guard.ONE_WAKE_S = 0.3
        prepare(rank, tmp_path)
        return train(rank, 40, hook)

    outcomes = run_ranks(2, run)
    assert [outcome.code for outcome in outcomes] == [exits.REQUEUE] * 2
    assert complete_steps(tmp_path) == []
    for rank in range(2):
        assert "SIGUSR2: not saved, because the signal came again" in told(tmp_path, rank).note


def test_the_same_signal_twice_at_once_is_one(tmp_path: Path) -> None:
    def hook(rank: int, step: int) -> None:
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 40, hook)

    assert [outcome.code for outcome in run_ranks(2, run)] == [exits.REQUEUE] * 2
    assert complete_steps(tmp_path) == [7]


def test_ranks_with_different_plans_do_not_begin(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        prepare(rank, tmp_path, **{variables.PLAN_DIGEST: "new" if rank == 1 else "old"})
        return train(rank, 5)

    outcomes = run_ranks(3, run)
    assert [outcome.code for outcome in outcomes] == [exits.ABANDONED] * 3
    for rank in range(3):
        end = told(tmp_path, rank)
        assert end.leaving == status.PLAN_DIFFERS
        assert "'new' on rank 1" in end.note
        assert end.step is None


def test_a_model_in_the_place_of_a_mapping_is_refused_on_every_rank(tmp_path: Path) -> None:
    """It was found out by the first save, which may be the one of the preemption."""

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        model = torch.nn.Linear(2, 1)
        with slurm_ft.session(state=model if rank == 1 else {"model": model}):  # type: ignore[arg-type]
            pytest.fail("the session was opened")

    outcomes = run_ranks(3, run)
    assert [outcome.code for outcome in outcomes] == [exits.REFUSED] * 3
    for rank in range(3):
        assert told(tmp_path, rank).failed == (
            "rank 1: state= is a Linear and no mapping of names to what is saved: write"
            ' state={"model": model}'
        )


def test_a_directory_that_takes_no_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "ck").write_text("a file")

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 5)

    outcomes = run_ranks(2, run)
    assert [outcome.code for outcome in outcomes] == [exits.REFUSED] * 2
    for rank in range(2):
        assert (told(tmp_path, rank).failed or "").startswith(f"{tmp_path / 'ck'}: ")


def test_everything_that_torch_has_is_a_state(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        state = {
            "model": torch.nn.parallel.DistributedDataParallel(model),
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "weight": model.weight,
            "random": {"torch": torch.get_rng_state(), "kind": torch.float32},
        }
        with slurm_ft.session(state=state) as ft:
            ft.step(1)
            return ft.save().step

    assert values(run_ranks(2, run)) == [1, 1]


def test_a_rank_that_trains_alone_among_many_is_refused(tmp_path: Path) -> None:
    """Opened before init_process_group, each rank would take itself for the only one."""

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        return train(rank, 5)

    outcomes = run_ranks(2, run, distributed=False)
    assert [outcome.code for outcome in outcomes] == [exits.REFUSED] * 2
    assert all("WORLD_SIZE=2" in (told(tmp_path, rank).failed or "") for rank in range(2))


def test_the_straggler_shows_before_the_collective(tmp_path: Path) -> None:
    """straggler-hidden: whole steps are equal on all ranks, their own seconds are not."""

    def run(rank: int) -> Any:
        wishes.GATHER_FIRST_S = 0.5
        prepare(rank, tmp_path, **{variables.PROGRESS_INTERVAL_S: "0.2"})
        return train(rank, 14, compute_s=0.2 if rank == 1 else 0.0)

    values(run_ranks(3, run))
    report = parse_progress((tmp_path / "progress-7.json").read_text(), "x")
    quick, slow, other = report.rank_compute_s
    assert slow > 4 * max(quick, other)
    # Twelve samples a step of about 0.23 s, whatever else this machine does.
    assert 10 < report.samples_per_s <= 12 / 0.23


def test_a_hook_runs_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    """What a coordinated pause builds on: any rank asks, all are at the same step."""

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        seen: list[tuple[int, int]] = []
        with slurm_ft.session() as ft:

            def pause(epoch: int) -> None:
                ft.comm.barrier()
                seen.append((epoch, steps[-1]))

            ft.on_agreed[Kind.PAUSE] = pause
            steps: list[int] = []
            for step in range(1, 20):
                time.sleep(STEP_S)
                if (rank, step) in ((2, 5), (0, 11)):
                    ft.want(Kind.PAUSE, step)
                steps.append(step)
                ft.step(step)
        return seen

    replies = values(run_ranks(3, run))
    assert replies == [[[5, 6], [11, 12]]] * 3


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Data whose loading takes about as long as a step."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(STEP_S / 4)
        return torch.zeros(2)


@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_a_signal_to_the_whole_group_does_not_kill_the_data_loader(
    tmp_path: Path, name: str
) -> None:
    """sig-term-only: Slurm signals every process of the step, and a dead loader fails the trainer.

    The loader's own way of ending its workers still works: the session leaves in time.
    """

    def run(rank: int) -> Any:
        prepare(rank, tmp_path)
        os.setpgid(0, 0)
        model = torch.nn.Linear(2, 1)
        loader = torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)
        with slurm_ft.session(state={"model": model}, checkpoint="sync") as ft:
            step = ft.restore()
            for batch in loader:
                model(batch).sum().backward()
                step += 1
                if step == 6:
                    # By another process than the workers' parent, as slurmstepd is.
                    kill = ["kill", "-s", name, "--", f"-{os.getpgid(0)}"]
                    subprocess.run(kill, check=True, preexec_fn=lambda: os.setpgid(0, 0))
                time.sleep(STEP_S)
                ft.step(step)
        return None

    (outcome,) = run_ranks(1, run)
    assert outcome.code == exits.REQUEUE, outcome.error
    end = told(tmp_path, 0)
    assert (end.leaving, end.heard) == (status.SIGNALLED, f"SIG{name}")
    assert complete_steps(tmp_path) == [end.step]
    assert end.failed is None


FAILING_PROGRAM = """
import time
import torch.distributed as dist
import slurm_ft

dist.init_process_group("gloo")
with slurm_ft.session() as ft:
    for step in range(1, 10_000):
        time.sleep(0.03)
        if step == 5 and ft.rank == 0:
            time.sleep(60)
        if step == 6:
            # Its part of step 5's maximum is under way.
            raise ZeroDivisionError("the program's own")
        ft.step(step)
"""


def test_a_rank_that_fails_ends_at_once_though_its_peer_is_busy(tmp_path: Path) -> None:
    """Its part of a maximum is under way, and nobody comes to end it.

    The interpreter's end must not wait for that, or the peers would wait for it in turn.
    """
    port = str(free_port())
    programs = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "wrappers")]),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            variables.STATUS: str(tmp_path / f"status-{rank}.json"),
        }
        command = [sys.executable, "-c", FAILING_PROGRAM]
        programs.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    busy, failing = programs
    try:
        _, error = failing.communicate(timeout=45)
        assert failing.returncode == 1
        assert b"the program's own" in error
        assert busy.poll() is None
        ended_s = time.time() - told(tmp_path, 1).at_s
        assert ended_s < 10
    finally:
        for program in programs:
            program.kill()
            program.communicate()


MPI_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from mpi4py import MPI

rank = MPI.COMM_WORLD.Get_rank()
place = Path(sys.argv[1])
os.environ.update(
    FT_STATUS_FILE=str(place / f"status-{rank}.json"), FT_CHECKPOINT_DIR=str(place / "ck"),
)
import slurm_ft

def save(directory, step):
    (directory / f"part-{rank}.json").write_text(json.dumps(step))

def restore(directory, step):
    assert json.loads((directory / f"part-{rank}.json").read_text()) == step

with slurm_ft.session(save=save, restore=restore) as ft:
    step = ft.restore()
    print(f"rank {ft.rank} of {ft.size} from {step}", flush=True)
    while step < 20:
        time.sleep(0.03)
        step += 1
        if step == int(sys.argv[2]) and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        ft.step(step)
assert "torch" not in sys.modules
"""


def test_mpi_ranks_save_their_own_files_and_go_on(mpi: MpiLauncher, tmp_path: Path) -> None:
    """The same session, without torch: user's functions, agreement over MPI."""
    left = mpi.run(3, MPI_PROGRAM, str(tmp_path), "7")
    assert left.returncode == exits.REQUEUE, left.stderr
    for rank in range(3):
        end = told(tmp_path, rank)
        assert (end.leaving, end.saved_step) == (status.SIGNALLED, 8), end
    again = mpi.run(3, MPI_PROGRAM, str(tmp_path), "0")
    assert again.returncode == 0, again.stderr
    assert sorted(again.stdout.split("\n"))[1:] == [f"rank {r} of 3 from 8" for r in range(3)]
    assert all(told(tmp_path, rank).done for rank in range(3))

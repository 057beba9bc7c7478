"""A small training job that can be paused, and the store beside it, for the tests of the pause."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import slurm_ft
from slurm_ft import variables
from slurm_ft.pause.address import Address, address_path, read_address, step_of
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.table import StoreLostError
from slurm_ft.session.agreement import Kind

WIDTH = 64
# For a small state: how soon a dead peer is given up on the way back.
MOVE_S = 5.0
Hook = Callable[[int, int], None]


def nothing(rank: int, step: int) -> None:
    """A job that nobody disturbs."""


@contextmanager
def served(
    state_dir: Path,
    collective_s: float,
    attempt: int = 0,
    more: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The helper process of ft-run, until the block ends; ``more`` is for its environment."""
    environ = {**os.environ, **(more or {})}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slurm_ft.pause.serve",
            f"--state-dir={state_dir}",
            f"--attempt={attempt}",
            "--job-id=7",
            f"--parent={os.getpid()}",
            "--host=127.0.0.1",
            f"--collective-timeout={collective_s}",
            f"--move-limit={MOVE_S:g}",
        ],
        env={**environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    path = address_path(state_dir, "7", attempt, step_of(environ))
    try:
        until(path.exists, 20.0, "the store to listen")
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        if process.poll() is None:
            process.kill()
            process.wait()


def address(state_dir: Path, attempt: int = 0) -> Address:
    """Where the store is."""
    found = read_address(address_path(state_dir, "7", attempt))
    assert found is not None
    return found


def until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(0.01)


def outcome(store: NetStore, request_id: str) -> dict[str, Any]:
    """What the controller knows about a pause."""
    with suppress(StoreLostError):
        for row in store.status():
            if row["id"] == request_id:
                return row
    return {}


def wait_outcome(
    store: NetStore, request_id: str, done: Callable[[Mapping[str, Any]], bool], limit_s: float
) -> dict[str, Any]:
    """The outcome, as soon as it is ``done``."""
    until(lambda: done(outcome(store, request_id)), limit_s, f"the outcome of {request_id}")
    return outcome(store, request_id)


def ended(row: Mapping[str, Any]) -> bool:
    """Whether the pause is over."""
    return row.get("end") is not None


def paused(row: Mapping[str, Any]) -> bool:
    """Whether all ranks are paused, or it came to nothing."""
    return row.get("stage") == "held" or ended(row)


def train(
    rank: int,
    place: Path,
    steps: int,
    collective_s: float,
    hook: Hook = nothing,
    step_s: float = 0.02,
    more: Mapping[str, str] | None = None,
    late: tuple[int, float] | None = None,
) -> dict[str, Any]:
    """Data-parallel training; the parameters at the end, as a digest, and how long it took."""
    os.environ.update(
        {
            variables.JOB: "7",
            variables.STATUS: str(place / f"status-{rank}.json"),
            variables.STATE_DIR: str(place),
            variables.CHECKPOINT_DIR: str(place / "ck"),
            variables.COLLECTIVE_TIMEOUT_S: f"{collective_s:g}",
            variables.PAUSE_MOVE_S: f"{MOVE_S:g}",
            **(more or {}),
        }
    )
    shorten_timeout(collective_s)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    longest_s = 0.0
    with slurm_ft.session(
        state={"model": model, "optimizer": optimizer}, total_steps=steps, checkpoint="sync"
    ) as ft:
        if late is not None and rank == late[0]:
            _be_late_once(ft, late[1])
        step = ft.restore()
        restored = step
        while step < steps:
            began_s = time.monotonic()
            generator = torch.Generator().manual_seed(1000 * step + ft.rank)
            data = torch.randn(8, WIDTH, generator=generator)
            loss = model(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optimizer.step()
            time.sleep(step_s)
            step += 1
            hook(rank, step)
            ft.step(step, samples=8 * ft.size)
            longest_s = max(longest_s, time.monotonic() - began_s)
            (place / f"step-{rank}").write_text(str(step))
    return {"digest": digest(model), "steps": step, "restored": restored, "longest_s": longest_s}


def _be_late_once(ft: slurm_ft.session.session.Session, late_s: float) -> None:
    """Between the agreement on the first pause and this rank's acknowledgement."""
    enter = ft.on_agreed[Kind.PAUSE]

    def late(epoch: int) -> None:
        if epoch == 1:
            time.sleep(late_s)
        enter(epoch)

    ft.on_agreed[Kind.PAUSE] = late


def shorten_timeout(collective_s: float) -> None:
    """The time-out of collectives in the group that the ranks were given."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=collective_s), dist.group.WORLD)


def digest(model: torch.nn.Module) -> str:
    """Every bit of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def at_step(place: Path, rank: int) -> int:
    """The last step that a rank of `train` has finished."""
    try:
        return int((place / f"step-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0

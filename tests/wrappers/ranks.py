"""Runs a function as several real ranks over torch's gloo, each in a forked process.

Forked from a parent that has imported torch but run no operation, so that a rank costs
milliseconds instead of an import. Nothing outlives `run_ranks`: every rank is killed at the limit.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Loaded here, once, because every rank would load them otherwise: the first optimizer imports the
# former, the first save the latter.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint

RANK_ERROR = 99


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: what the function returned, or how the process ended."""

    rank: int
    code: int  # exit code, or minus the signal
    value: Any = None
    error: str = ""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = 30.0,
    env: Mapping[str, str] | None = None,
    distributed: bool = True,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Outcome]:
    """Call ``function(rank, *args)`` in ``size`` processes; its result must be JSON-able.

    ``meanwhile`` runs in the parent with the process ids once all of them exist. A rank that is
    alive at the limit is killed, and seen by its code -SIGKILL.
    """
    port = free_port()
    pids: list[int] = []
    readers: dict[int, int] = {}
    for rank in range(size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _be_rank(rank, size, port, function, args, writer, dict(env or {}), distributed)
        os.close(writer)
        pids.append(pid)
        readers[reader] = rank
    said = dict.fromkeys(range(size), b"")
    codes: dict[int, int] = {}
    try:
        if meanwhile is not None:
            meanwhile(pids)
        end = time.monotonic() + limit_s
        while readers and time.monotonic() < end:
            ready, _, _ = select.select(list(readers), [], [], max(0.0, end - time.monotonic()))
            for reader in ready:
                data = os.read(reader, 65536)
                if data:
                    said[readers[reader]] += data
                else:
                    os.close(reader)
                    del readers[reader]
        # A rank that closed its pipe is at its end; one that has not is stuck.
        stuck = set(readers.values())
        for rank, pid in enumerate(pids):
            if rank not in stuck:
                codes[rank] = _reap(pid, max(1.0, end - time.monotonic()))
    finally:
        for reader in readers:
            os.close(reader)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    outcomes = []
    for rank in range(size):
        reply = json.loads(said[rank]) if said[rank] else {}
        outcomes.append(Outcome(rank, codes[rank], reply.get("value"), reply.get("error", "")))
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; a rank that failed is an assertion error with its traceback."""
    for outcome in outcomes:
        assert outcome.code == 0, f"rank {outcome.rank} ended with {outcome.code}\n{outcome.error}"
    return [outcome.value for outcome in outcomes]


def _reap(pid: int, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_rank(
    rank: int,
    size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    writer: int,
    env: dict[str, str],
    distributed: bool,
) -> None:
    """Never returns: the forked child must not run what the test runner has planned."""
    code = RANK_ERROR
    reply: dict[str, Any] = {}
    try:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        os.environ.update(env)
        torch.set_num_threads(1)
        if distributed:
            dist.init_process_group("gloo", rank=rank, world_size=size)
        reply["value"] = function(rank, *args)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        reply["error"] = traceback.format_exc()
    finally:
        os.write(writer, json.dumps(reply).encode())
        os._exit(code)

"""Pauses and misfortunes on real ranks over gloo: does the job survive with the same bits, or end?

Each run is a seed. It draws the number of ranks, one or two pauses, and at most one misfortune: a
late rank, a rank killed while training or while paused, all ranks stopped while paused and woken
one after the other, a dead store, a signal to leave. The parameters of a job that survives must be
those of the same job without a pause, bit by bit; a job that does not must have ended on every
rank with a code for requeue, within the limit, and only if the misfortune explains it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_ft import exits, variables
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.table import StoreLostError
from tests.wrappers.pause_ranks import (
    address,
    at_step,
    ended,
    paused,
    served,
    train,
    until,
    wait_outcome,
)
from tests.wrappers.ranks import Outcome, run_ranks

COLLECTIVE_S = 4.0
STEPS = 40
# Beyond it a run hangs: a dead peer's time-out, restoring, and a slow machine are all inside.
LIMIT_S = 60.0
KINDS = (
    "nothing",
    "nothing",
    "late",
    "late",
    "kill while paused",
    "kill",
    "stop while paused",
    "store dies",
    "leave",
)
# Misfortunes after which a job need not go on.
FATAL = frozenset({"kill while paused", "kill", "store dies", "leave"})
_GONE = frozenset({exits.REQUEUE, exits.ABANDONED, exits.UNDECIDED, -signal.SIGKILL})


@dataclass
class Run:
    """What became of one run."""

    seed: int
    ranks: int
    kind: str
    pauses: list[dict[str, Any]] = field(default_factory=list)
    survived: bool = False
    seconds: float = 0.0
    wrong: str = ""


def unpaused(size: int) -> str:
    """The parameters of the job with this many ranks when nothing happens."""
    with tempfile.TemporaryDirectory() as place:
        outcomes = run_ranks(size, train, Path(place), STEPS, COLLECTIVE_S, limit_s=LIMIT_S)
    digests = {outcome.value["digest"] for outcome in outcomes if outcome.value}
    assert len(digests) == 1, outcomes
    return str(digests.pop())


def run_one(seed: int, sizes: tuple[int, ...], wanted: dict[int, str]) -> Run:
    """One run from its seed."""
    rnd = random.Random(seed)
    size = rnd.choice(sizes)
    if size not in wanted:
        wanted[size] = unpaused(size)
    run = Run(seed, size, rnd.choice(KINDS))
    began_s = time.monotonic()
    with _place() as place, served(place, COLLECTIVE_S) as server:
        late = (rnd.randrange(size), rnd.choice((0.5, 2.4))) if run.kind == "late" else None
        troubled: list[BaseException] = []

        def beside(pids: list[int]) -> None:
            store = NetStore(address(place))
            try:
                _disturb(run, rnd, store, pids, place, server)
            except (AssertionError, StoreLostError, ProcessLookupError) as exc:
                troubled.append(exc)
            finally:
                store.close()

        outcomes = run_ranks(
            size,
            train,
            place,
            STEPS,
            COLLECTIVE_S,
            _nothing,
            0.02,
            {variables.PAUSE_SPILL: str(place)},
            late,
            limit_s=LIMIT_S,
            meanwhile=beside,
        )
    run.seconds = round(time.monotonic() - began_s, 1)
    _judge(run, outcomes, wanted[size], troubled)
    return run


def _nothing(rank: int, step: int) -> None:
    """The job itself does nothing unusual."""


@contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pause-chaos-") as name:
        yield Path(name)


def _disturb(
    run: Run, rnd: random.Random, store: NetStore, pids: list[int], place: Path, server: Any
) -> None:
    until(lambda: at_step(place, 0) >= 2, 30.0, "step 2")
    time.sleep(rnd.uniform(0.0, 0.2))
    for number in range(rnd.choice((1, 1, 2))):
        name = f"p{number}"
        rung = rnd.choice(("nothing", "memory", "memory"))
        hold_s = rnd.choice((0.2, 1.0, 6.0))
        asked = store.pause(rung, wait_s=10.0, hold_s=hold_s, by="chaos", request_id=name)
        if run.kind == "kill" and number == 0:
            time.sleep(rnd.uniform(0.0, 0.1))
            _kill(run, rnd, store, pids)
            return
        row = wait_outcome(store, name, paused, 20.0) if asked.get("end") is None else asked
        if row.get("stage") == "held":
            if run.kind == "kill while paused":
                _kill(run, rnd, store, pids)
                return
            if run.kind == "store dies":
                server.kill()
                return
            if run.kind == "leave":
                os.kill(rnd.choice(pids), signal.SIGUSR2)
                return
            if run.kind == "stop while paused":
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(rnd.uniform(0.5, 6.0))
                for pid in rnd.sample(pids, len(pids)):
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(rnd.uniform(0.0, 0.4))
            elif rnd.random() < 0.5:
                with suppress(StoreLostError):
                    store.resume("chaos")
        run.pauses.append(wait_outcome(store, name, ended, 30.0))


def _kill(run: Run, rnd: random.Random, store: NetStore, pids: list[int]) -> None:
    victim = rnd.randrange(len(pids))
    os.kill(pids[victim], signal.SIGKILL)
    if rnd.random() < 0.7:
        # What the ft-run of that rank does; a node that vanished does not.
        with suppress(StoreLostError):
            store.write(1, "gone", 1 << victim)  # type: ignore[arg-type]


def _judge(run: Run, outcomes: list[Outcome], want: str, troubled: list[BaseException]) -> None:
    codes = [outcome.code for outcome in outcomes]
    if set(codes) == {0}:
        run.survived = True
        digests = {outcome.value["digest"] for outcome in outcomes}
        if digests != {want}:
            run.wrong = "the parameters differ from those of the unpaused job"
        return
    if run.kind not in FATAL:
        run.wrong = f"died though only this happened: {run.kind}; codes {codes}; {troubled}"
    elif not set(codes) <= _GONE:
        errors = "; ".join(o.error.splitlines()[-1] for o in outcomes if o.error)
        run.wrong = f"a rank ended otherwise than for requeue: codes {codes}; {errors}"
    elif run.seconds >= LIMIT_S:
        run.wrong = f"took {run.seconds} s"


def chaos(first: int, count: int, sizes: tuple[int, ...] = (2, 3, 4)) -> dict[str, Any]:
    """Many runs; the figures."""
    logging.disable(logging.WARNING)
    began_s = time.monotonic()
    wanted: dict[int, str] = {}
    runs: list[Run] = []
    for seed in range(first, first + count):
        run = run_one(seed, sizes, wanted)
        runs.append(run)
        word = run.wrong or ("survived" if run.survived else "left for the queue")
        ends = ", ".join(str(row.get("end")) for row in run.pauses)
        print(
            f"seed {seed}: {run.ranks} ranks, {run.kind}: {word} [{ends}] {run.seconds} s",
            flush=True,
        )
    paused_s = sorted(
        row["paused_s"] for run in runs for row in run.pauses if row.get("paused_s") is not None
    )
    return {
        "runs": count,
        "seconds": round(time.monotonic() - began_s, 1),
        "survived": sum(run.survived for run in runs),
        "wrong": [(run.seed, run.wrong) for run in runs if run.wrong],
        "commit_median_s": paused_s[len(paused_s) // 2] if paused_s else None,
        "commits": len(paused_s),
    }


if __name__ == "__main__":
    print(json.dumps(chaos(0, 3)))

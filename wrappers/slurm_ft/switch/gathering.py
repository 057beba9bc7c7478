"""Gathers what the stages of a chain did in a switch, and writes it as one time line. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_ft.checkpoint.hashing import replace_durably
from slurm_ft.comm import Comm
from slurm_ft.switch.chain import ChainState
from slurm_ft.switch.timeline import MAX_SPANS, Kind, Recorder, Span, Timeline, joined

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Marks:
    """Moments of one switch on one rank, on the monotonic clock."""

    last_step_s: float = 0.0
    durable_s: float = 0.0
    first_step_s: float = 0.0


def gathering(
    comm: Comm,
    chain: ChainState,
    recorder: Recorder,
    marks: Marks,
    *,
    how: str,
    model: str,
    limit_s: float,
    old: str = "",
    new: str = "",
) -> Callable[[], None]:
    """What the thread beside does once the new task's first step is over. Collective."""
    # Monotonic clocks of two nodes have nothing in common; their clocks of day nearly agree.
    offset = time.time() - time.monotonic()

    def gather() -> None:
        deadline = time.monotonic() + limit_s
        while not marks.first_step_s and time.monotonic() < deadline:
            time.sleep(0.02)
        spans = recorder.spans(-offset)
        rows = comm.gather(
            {
                "last": marks.last_step_s + offset,
                "durable": marks.durable_s + offset,
                "first": marks.first_step_s + offset,
                "spans": [
                    [s.stage, s.kind.value, s.start_s, s.end_s, s.nbytes, s.label]
                    for s in joined(spans, MAX_SPANS // comm.size - len(Kind))
                ],
            }
        )
        if rows is None:
            return
        origin = max(row["last"] for row in rows)
        spans = tuple(
            replace(Span(a, Kind(k), b, c, n, t), start_s=b - origin, end_s=c - origin)
            for row in rows
            for a, k, b, c, n, t in row["spans"]
        )
        line = Timeline(
            how,
            1 + max((span.stage for span in spans), default=0),
            spans,
            last_step_s=0.0,
            durable_s=max(row["durable"] for row in rows) - origin,
            first_step_s=max(row["first"] for row in rows) - origin,
            model=model,
            gpus=comm.size,
            old=old,
            new=new,
        )
        try:
            path = chain.next_timeline()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(path, line.to_json().encode() + b"\n")
        except OSError as exc:  # a report is no reason to end training
            _log.warning("the time line of a switch is not written: %s", exc)

    return gather

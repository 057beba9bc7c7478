"""Progress that a running job reports through the spool, one small file per job.

The daemon reads what an ordinary user wrote: every number is bounded here, nothing is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_ext.domain.errors import ProtocolError

PROGRESS_VERSION = 1
MAX_STEPS = 10**12
MAX_SAMPLES = 10**15
MAX_RATE = 10**9
MAX_BYTES = 16384
MAX_RANKS = 4096
MAX_WORDS = 500
MAX_WORD = 100


@dataclass(frozen=True, slots=True)
class Hold:
    """That all ranks are paused: since when, until when at the latest, by whom, with what rung.

    ``rung`` is one of `slurm_ext.domain.pausing.Rung`. Times are seconds since the epoch.
    """

    since_s: float
    until_s: float
    by: str = ""
    rung: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """One report.

    ``samples_per_s`` is over the last window, ``rank_compute_s`` the seconds that each rank
    computed per step *before* the collective (afterwards all ranks look alike). ``total_steps``
    and ``total_samples`` are what the program intends in all, over all attempts. ``save_s`` is the
    measured time of the last save, ``stall_s`` the time that training stood still for saves in
    this attempt. ``restored_step`` is the step that this attempt began from. ``save_error`` is why
    the last save failed, empty where it succeeded. ``hold`` is the pause under way, and
    ``paused_s`` how long earlier pauses of this attempt have held it.
    """

    job_id: str
    attempt: int
    at_s: float
    step: int
    samples: int
    samples_per_s: float
    gpus: int
    last_checkpoint_step: int | None = None
    last_checkpoint_s: float | None = None
    rank_compute_s: tuple[float, ...] = ()
    total_steps: int | None = None
    total_samples: int | None = None
    first_step_s: float | None = None
    restored_step: int | None = None
    save_s: float | None = None
    stall_s: float | None = None
    save_error: str = ""
    hold: Hold | None = None
    paused_s: float = 0.0
    version: int = PROGRESS_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)


def parse_progress(text: str, place: str) -> Progress:
    """Read a report that an untrusted writer made.

    Raises ProtocolError naming ``place`` when anything is missing, mistyped or out of bounds.
    """
    if len(text.encode()) > MAX_BYTES:
        raise ProtocolError(f"{place}: longer than {MAX_BYTES} bytes; not read")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{place}: not JSON ({exc}); not read") from exc
    if not isinstance(raw, dict):
        raise ProtocolError(f"{place}: not a JSON object; not read")
    version = raw.get("version")
    if version != PROGRESS_VERSION:
        raise ProtocolError(f"{place}: version {version!r}, this side knows {PROGRESS_VERSION}")

    def number(key: str, low: float, high: float, source: Mapping[str, Any] = raw) -> float:
        value = source.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProtocolError(f"{place}: {key}={value!r} is not a number")
        if not math.isfinite(value) or not low <= value <= high:
            raise ProtocolError(f"{place}: {key}={value!r} is outside {low:g}..{high:g}")
        return value

    def optional(key: str, low: float, high: float) -> float | None:
        return None if raw.get(key) is None else number(key, low, high)

    job_id = raw.get("job_id")
    if not isinstance(job_id, str) or not 0 < len(job_id) <= 64:
        raise ProtocolError(f"{place}: job_id={job_id!r} is not a job id")
    ranks = raw.get("rank_compute_s", [])
    if not isinstance(ranks, list) or len(ranks) > MAX_RANKS:
        raise ProtocolError(f"{place}: rank_compute_s is not a list of at most {MAX_RANKS}")
    for value in ranks:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProtocolError(f"{place}: rank_compute_s holds {value!r}")
        if not math.isfinite(value) or not 0 <= value <= 10**6:
            raise ProtocolError(f"{place}: rank_compute_s holds {value!r}, outside 0..1e6")

    def whole(key: str, high: int) -> int | None:
        value = optional(key, 0, high)
        return None if value is None else int(value)

    save_error = raw.get("save_error", "")
    if not isinstance(save_error, str) or len(save_error) > MAX_WORDS:
        raise ProtocolError(f"{place}: save_error is no text of at most {MAX_WORDS} characters")

    held = raw.get("hold")
    if held is not None and not isinstance(held, dict):
        raise ProtocolError(f"{place}: hold is no object")

    def word(key: str, source: Mapping[str, Any]) -> str:
        value = source.get(key, "")
        if not isinstance(value, str) or len(value) > MAX_WORD:
            raise ProtocolError(f"{place}: {key} is no text of at most {MAX_WORD} characters")
        return _printable(value)

    return Progress(
        job_id=job_id,
        attempt=int(number("attempt", 0, 10**6)),
        at_s=number("at_s", 0, 10**11),
        step=int(number("step", 0, MAX_STEPS)),
        samples=int(number("samples", 0, MAX_SAMPLES)),
        samples_per_s=number("samples_per_s", 0, MAX_RATE),
        gpus=int(number("gpus", 0, 10**6)),
        last_checkpoint_step=whole("last_checkpoint_step", MAX_STEPS),
        last_checkpoint_s=optional("last_checkpoint_s", 0, 10**11),
        rank_compute_s=tuple(float(value) for value in ranks),
        total_steps=whole("total_steps", MAX_STEPS),
        total_samples=whole("total_samples", MAX_SAMPLES),
        first_step_s=optional("first_step_s", 0, 10**11),
        restored_step=whole("restored_step", MAX_STEPS),
        save_s=optional("save_s", 0, 10**7),
        stall_s=optional("stall_s", 0, 10**9),
        # Words end up on a terminal.
        save_error=_printable(save_error),
        hold=None
        if held is None
        else Hold(
            since_s=number("since_s", 0, 10**11, held),
            until_s=number("until_s", 0, 10**11, held),
            by=word("by", held),
            rung=word("rung", held),
        ),
        paused_s=0.0 if raw.get("paused_s") is None else number("paused_s", 0, 10**9),
    )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)

"""Where a running chain stands, told by its rank 0 for `slurm-ext chain`. No torch.

What is told is for people and for the checks of `chain add`; nothing that is trained depends on
it, so what cannot be written is a warning. Whoever was killed has told nothing of it: a reader
asks the job's attempts and Slurm too before it believes that a task runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ConfigError, ProtocolError
from slurm_ft import variables
from slurm_ft.checkpoint.hashing import replace_durably
from slurm_ft.switch.spread import layout_for
from slurm_ft.train.layout import Wish
from slurm_ft.train.task import Task

STANDING_VERSION = 1
MAX_STANDING_BYTES = 8 << 20
_NAME = "standing.json"
# What the layout of a task follows from, beside the wish.
_PLAN = (
    variables.GPUS,
    variables.LOCAL_BATCH,
    variables.ACCUMULATION,
    variables.GLOBAL_BATCH,
    variables.STAGES,
    variables.MICRO_BATCHES,
    variables.PRECISION,
    variables.GRAD_CHECKPOINTING,
)

_log = logging.getLogger(__name__)


class End(StrEnum):
    """How a chain's attempt ended.

    RUNS     it has not
    OVER     every task was trained, or left out
    LEFT     saved and left, to come back
    FAILED   an error
    """

    RUNS = "runs"
    OVER = "over"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ChainStanding:
    """One attempt of a chain. ``task`` is the one being trained since ``since_s`` (epoch).

    ``left_out`` and ``failed`` tell why, by task: these ranks cannot train it; it was trained and
    its result could not be written. ``ranks``, ``wish`` and ``plan`` are what a task's layout
    follows from.
    """

    attempt: int
    ranks: int
    wish: Wish
    plan: Mapping[str, str]
    task: str = ""
    since_s: float = 0.0
    end: End = End.RUNS
    why: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    version: int = STANDING_VERSION

    def unfit(self, task: Task) -> str:
        """Why the chain's ranks cannot train a task; "" = they can."""
        try:
            layout_for(task, self.wish, self.plan, self.ranks)
        except ConfigError as exc:
            return str(exc)
        return ""


def read_standing(folder: Path) -> ChainStanding | None:
    """What was told last; ``None`` where nothing was. Raises ProtocolError for what is broken."""
    path = folder / _NAME
    try:
        with path.open("rb") as file:
            text = file.read(MAX_STANDING_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ProtocolError(f"{path}: {exc.strerror}") from exc
    if len(text) > MAX_STANDING_BYTES:
        raise ProtocolError(f"{path}: longer than {MAX_STANDING_BYTES} bytes; not read")
    found = loads(ChainStanding, text.decode(errors="replace"), str(path))
    if found.version != STANDING_VERSION:
        raise ProtocolError(
            f"{path}: version {found.version}, this side knows {STANDING_VERSION}:"
            " install the same release of slurm-ext on both sides"
        )
    return found


class Teller:
    """Keeps a chain's standing on disk. Only rank 0 writes; the others' calls do nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        writes: bool,
        attempt: int,
        ranks: int,
        wish: Wish,
        environ: Mapping[str, str],
    ) -> None:
        plan = {name: environ[name] for name in _PLAN if environ.get(name)}
        self._folder, self._writes = folder, writes
        self._now = ChainStanding(attempt, ranks, wish, plan)
        # Results are written beside training.
        self._lock = threading.Lock()
        self._tell(self._now)

    def begins(self, task: str) -> None:
        """This task is trained now."""
        with self._lock:
            self._tell(replace(self._now, task=task, since_s=time.time()))

    def outcomes(self, left_out: Mapping[str, str], failed: Mapping[str, str]) -> None:
        """These were left out, or trained in vain, so far."""
        with self._lock:
            if (self._now.left_out, self._now.failed) != (left_out, failed):
                self._tell(replace(self._now, left_out=dict(left_out), failed=dict(failed)))

    def ends(self, end: End, why: str = "") -> None:
        """The chain's attempt is over."""
        with self._lock:
            self._tell(replace(self._now, end=end, why=why))

    def _tell(self, now: ChainStanding) -> None:
        self._now = now
        if not self._writes:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(self._folder / _NAME, dumps(self._now).encode() + b"\n")
        except OSError as exc:
            _log.warning("where the chain stands is not told: %s", exc)

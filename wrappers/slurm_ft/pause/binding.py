"""Makes a session pausable: its agreement carries the epoch, its leaving carries out the end.

A session calls `attach` once, when there is a state directory in which a store may announce itself.
Everything else is in participant.py; this module only translates between the two: epochs that were
heard become wishes, an agreed epoch becomes a pause at that very safe point, and a pause that must
not be left by a step ends the rank with the code that tells ft-run what is known.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import ConfigError
from slurm_ext.domain.pausing import PAUSE_NOTE
from slurm_ext.domain.progress import MAX_WORD, Hold
from slurm_ft import exits, status, variables
from slurm_ft.pause.address import find_address, step_of
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.ladder import Figures, Ladder, Part
from slurm_ft.pause.limits import DEFAULT_MOVE_S, Limits, check_limits, fitting_limits
from slurm_ft.pause.participant import Actions, Participant, outcome_text
from slurm_ft.pause.protocol import End, Exit, Request, Rung
from slurm_ft.session.agreement import Kind
from slurm_ft.session.settings import Settings

_log = logging.getLogger(__name__)

# From leaving to the end of the process: a program may still close its logs and upload them.
_EXIT_S = 120.0
# End of a pause to exit code and the word of the status file.
_LEAVE = {
    End.SAVED: (exits.REQUEUE, status.ASKED),
    End.ABANDONED: (exits.ABANDONED, status.LOST_PEER),
    End.UNDECIDED: (exits.UNDECIDED, status.UNDECIDED),
}


class Pausable(Protocol):
    """The part of a session that a pause needs."""

    on_agreed: dict[Kind, Callable[[int], None]]

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def stopping(self) -> bool: ...

    @property
    def settings(self) -> Settings: ...

    def want(self, kind: Kind, payload: int = 0) -> None: ...

    def held(self, hold: Hold | None) -> None: ...

    def leave(self, code: int, word: str, note: str) -> Any: ...

    def save(self, step: int | None = None) -> Any: ...


class SessionActions:
    """What a pause does to a session: nothing, its state's memory, or a save."""

    def __init__(self, session: Pausable, ladder: Ladder) -> None:
        self._session = session
        self._ladder = ladder

    def release(self, rung: Rung, limit_s: float) -> None:
        """Give back what the rung names."""
        if rung is Rung.MEMORY:
            self._ladder.release(limit_s)
        elif rung is Rung.JOB:
            # All ranks committed, so all of them are here: a collective save is safe.
            self._session.save()

    def restore(self, limit_s: float) -> None:
        """Take it back; after the other rungs nothing is away."""
        self._ladder.restore(limit_s)


def attach(
    session: Pausable,
    state: Mapping[str, Any] | None,
    *,
    longest_step_s: Callable[[], float] = lambda: 0.0,
    limits: Limits | None = None,
    actions: Actions | None = None,
) -> Participant | None:
    """Let this session be paused; ``None`` (and a warning) where its time-outs leave no room."""
    settings = session.settings
    if settings.state_dir is None:
        return None
    timeout_s = settings.collective_timeout_s
    try:
        chosen = limits or fitting_limits(timeout_s, longest_step_s(), move_s(os.environ))
        check_limits(chosen, timeout_s, longest_step_s())
    except ConfigError as exc:
        if session.rank == 0:
            _log.warning("this job cannot be paused: %s", exc)
        return None
    state_dir, step = settings.state_dir, step_of(os.environ)

    def connect() -> NetStore | None:
        address = find_address(state_dir, settings.job_id, settings.attempt, step)
        return None if address is None else NetStore(address)

    def urgent() -> str:
        if session.stopping:
            return f"rank {session.rank} was asked to leave"
        try:
            check_limits(chosen, timeout_s, longest_step_s())
        except ConfigError as exc:
            return str(exc)
        return ""

    ladder = Ladder(_parts(state))
    participant = Participant(
        session.rank,
        session.size,
        chosen,
        connect,
        actions or SessionActions(session, ladder),
        heard=lambda epoch: session.want(Kind.PAUSE, epoch),
        held=lambda request: session.held(_hold(request)),
        urgent=urgent,
    )

    def pause(epoch: int) -> None:
        end = participant.pause(epoch)
        if session.rank == 0 or isinstance(end, Exit):
            _log.warning("rank %d: %s%s", session.rank, outcome_text(end), _moved(ladder.figures))
            ladder.figures = Figures()
        if isinstance(end, Exit):
            code, word = _LEAVE[end.end]
            participant.tell_gone()
            participant.stop()
            if settings.under_ft_run:
                _end_at_last(code)
            session.leave(code, word, f"{PAUSE_NOTE}{end.reason}")

    if session.rank == 0:
        _warn_of_nccl(timeout_s)
    _outlive_suspend()
    session.on_agreed[Kind.PAUSE] = pause
    participant.start()
    return participant


def _hold(request: Request | None) -> Hold | None:
    """As the session tells it others, from now on."""
    if request is None:
        return None
    now_s = time.time()
    return Hold(now_s, now_s + request.hold_s, request.by[:MAX_WORD], request.rung.value)


def _end_at_last(code: int) -> None:
    """A program's own threads may keep a process alive that nobody waits for any more, and with it
    the job and its GPUs: nobody has sent a signal whose grace would end it."""

    def end() -> None:
        sys.stderr.write(f"slurm_ft: left {_EXIT_S:g} s ago and still here; ending with {code}\n")
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(_EXIT_S, end)
    timer.daemon = True
    timer.start()


def _warn_of_nccl(collective_timeout_s: float) -> None:
    """Settings that let a pause end a process, where NCCL is what the ranks use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    dist = torch.distributed
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return
    from slurm_ft.pause.nccl import Wish, judge

    for finding in judge(os.environ, Wish(collective_timeout_s)):
        _log.warning("pause: %s: %s", finding.name, finding.text)


def _outlive_suspend() -> None:
    """Keep training in the two seconds between SIGTSTP and SIGSTOP of Slurm's suspend.

    By default the first already stops a process, in the middle of whatever collective it is in;
    the helper uses the time to bring all ranks to a safe point. A program's own handler stays.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, lambda number, frame: None)


def move_s(environment: Mapping[str, str]) -> float:
    """How long giving back may take, as the user bounds it."""
    text = environment.get(variables.PAUSE_MOVE_S, "")
    try:
        found = parse_duration(text) if text else DEFAULT_MOVE_S
    except ValueError:
        found = 0.0
    if not found:
        raise ConfigError(
            variables.PAUSE_MOVE_S,
            f"{text!r} is no time above 0",
            f"unset it or write {FORMS}",
        )
    return found


def _moved(figures: Figures) -> str:
    """How much memory was given back, and how fast it went and came."""
    if not figures.released_bytes:
        return ""
    mib = figures.released_bytes / 2**20
    return (
        f"; {mib:.0f} MiB released in {figures.release_s:.2f} s"
        f" ({mib / max(figures.release_s, 1e-6):.0f} MiB/s), taken back in"
        f" {figures.restore_s:.2f} s ({mib / max(figures.restore_s, 1e-6):.0f} MiB/s)"
    )


def _parts(state: Mapping[str, Any] | None) -> list[Part]:
    """What can be released in this process; torch is used only where the program has it."""
    if "torch" not in sys.modules:
        return []
    from slurm_ft.pause.cuda import CudaCheckpoint
    from slurm_ft.pause.memory import DeviceMemory
    from slurm_ft.pause.nccl import NcclBuffers

    spill = os.environ.get(variables.PAUSE_SPILL, "")
    parts: list[Part] = []
    if state:
        parts.append(DeviceMemory(state, Path(spill) if spill else None))
    parts.append(NcclBuffers())
    # Last: once the device state is locked, nothing else can be done with it.
    parts.append(CudaCheckpoint(os.environ))
    return parts

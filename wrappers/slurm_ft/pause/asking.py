"""The outside end of a request: where it is left, how the job is woken, how its answer is read.

Used by the command line and by the daemon. Nothing here decides anything about the pause; what is
asked for and how the answer is told is the caller's.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.pausing import STATUS, PauseAnswer, PauseAsk
from slurm_ext.domain.request import PLANS
from slurm_ft.pause.protocol import Rung
from slurm_ft.pause.requests import (
    answer_path,
    ask_path,
    read_answer,
    vouch,
    write_private,
)

# Below the user's home, as ft-run has it by default.
STATE = Path(".slurm-ext", "state")
_POLL_S = 0.1
# Whether there is still somebody to answer: asked of Slurm, so seldom.
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes, and where its answer appears.

    ``vouched`` adds a credential; others than the job's user then read the request.
    """

    asks: Path
    answers: tuple[Path, ...]
    vouched: bool = False


def own_place(job_id: str, state_dir: Path | None, home: Path) -> Place | None:
    """The state directory of one's own job; ``None`` where there is none."""
    if state_dir is not None:
        return Place(state_dir, (state_dir,))
    found = sorted((home / STATE).glob(f"*-{job_id}"))
    if len(found) > 1:
        raise DataError(
            f"job {job_id}",
            f"has state directories of several clusters ({', '.join(str(p) for p in found)})",
            "name one with --state-dir",
        )
    return Place(found[0], (found[0],)) if found else None


def daemons_place(spool: Path, owner: int, uid: int) -> Place | None:
    """The daemon's part of the spool, for root and the daemon's user; ``None`` for others."""
    plans = spool / PLANS
    try:
        mine = uid in (0, plans.lstat().st_uid)
    except OSError:
        return None
    return Place(plans, (spool / str(owner),), vouched=True) if mine else None


def operators_place(spool: Path, owner: int, uid: int) -> Place:
    """An operator's own part of the spool, from which the daemon passes requests on.

    Refusals are the daemon's, everything else is answered by the job. Raises DataError.
    """
    directory = spool / str(uid)
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        found = directory.lstat()
    except OSError as exc:
        raise DataError(
            str(directory),
            f"cannot be made: {exc.strerror}",
            "is the spool mounted here and world-writable?",
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        raise DataError(str(directory), "is not yours", "ask the administrator to remove it")
    return Place(directory, (spool / str(owner), spool / PLANS), vouched=True)


def new_ask(
    job_id: str,
    verb: str,
    *,
    rung: Rung = Rung.MEMORY,
    wait_s: float = 60.0,
    hold_s: float = 600.0,
) -> PauseAsk:
    """A request by this user, now."""
    return PauseAsk(
        id=secrets.token_hex(8),
        verb=verb,
        job_id=job_id,
        at_s=time.time(),
        rung=rung,
        wait_s=wait_s,
        hold_s=hold_s,
        by=_who(),
    )


def send(place: Place, ask: PauseAsk, wake: Callable[[], None]) -> None:
    """Leave the request and wake the job. Raises DataError where it cannot be left."""
    if place.vouched:
        ask = replace(ask, credential=vouch(ask.words()))
    try:
        # The job's user reads what the daemon's user has written.
        write_private(ask_path(place.asks, ask), ask, 0o644 if place.vouched else 0o600)
    except OSError as exc:
        raise DataError(
            str(place.asks),
            f"no request can be left there: {exc.strerror}",
            "mend the directory; until then a pause ends by itself at its time",
        ) from exc
    wake()


def wait(
    place: Place,
    ask: PauseAsk,
    enough: Callable[[PauseAnswer], bool],
    *,
    first_s: float,
    limit_s: float,
    over: Callable[[], bool] = lambda: False,
) -> PauseAnswer | None:
    """The answer as soon as it is ``enough``, or the last one at the limit.

    ``None`` where nobody has answered at all within ``first_s``. ``over`` tells whether the job has
    ended meanwhile: its helper may be killed with it before it has written its last word.
    """
    began_s = looked_s = time.monotonic()
    ended = False
    answer = None
    paths = [answer_path(directory, ask.id) for directory in place.answers]
    try:
        while True:
            answer = next((found for path in paths if (found := read_answer(path))), None)
            now_s = time.monotonic()
            passed_s = now_s - began_s
            if answer is not None and (enough(answer) or ended or passed_s > limit_s):
                return answer
            if answer is None and passed_s > first_s:
                return None
            if answer is not None and now_s - looked_s > _LOOK_S:
                # Once more round, since the last word may have come while Slurm was asked.
                ended = over()
                looked_s = time.monotonic()
                continue
            time.sleep(_POLL_S)
    finally:
        # Also an answered one: nobody else can remove it, and a later attempt must not obey it.
        withdraw(place, ask)
        if answer is not None and (answer.end or ask.verb == STATUS or answer.stage == "none"):
            # Nothing is added to it any more. Somebody else's answers are theirs to remove.
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def withdraw(place: Place, ask: PauseAsk) -> None:
    """Take back a request, so that no later attempt obeys it."""
    ask_path(place.asks, ask).unlink(missing_ok=True)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

"""How often a job may come back, per cause. Pure.

A counter for each cause, so that a week of preemptions does not use up what is meant for failing
nodes. The counters last over the life of the job; raising a limit in the script takes effect at
the next end.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ext.domain.attempt import Cause
from slurm_ft.launch.errors import UsageError

# ``None`` is unlimited. Preemption and the daemon are nobody's fault and end by themselves; a time
# limit a hundred times is months of training; a job that kills twenty nodes is not unlucky.
DEFAULT_LIMITS: Mapping[Cause, int | None] = {
    Cause.PREEMPTED: None,
    Cause.TIME_LIMIT: 100,
    Cause.NODE_FAIL: 20,
    Cause.DAEMON: None,
    Cause.OPERATOR: 100,
    Cause.LOST_PEER: 5,
    Cause.USER_ERROR: 0,
    # Attempts in a row that saved nothing new.
    Cause.NO_PROGRESS: 3,
    Cause.UNKNOWN: 5,
}
_WORDS = {
    "preempted": Cause.PREEMPTED,
    "time-limit": Cause.TIME_LIMIT,
    "node-fail": Cause.NODE_FAIL,
    "daemon": Cause.DAEMON,
    "operator": Cause.OPERATOR,
    "lost-peer": Cause.LOST_PEER,
    "user-error": Cause.USER_ERROR,
    "no-progress": Cause.NO_PROGRESS,
    "unknown": Cause.UNKNOWN,
}
NAMES = {cause: word for word, cause in _WORDS.items()}
_MOST = 100_000


def parse_limits(text: str, place: str = "--max-requeues") -> dict[Cause, int | None]:
    """``CAUSE=N,..`` over the defaults. Raises UsageError with the fix."""
    limits = dict(DEFAULT_LIMITS)
    for part in text.split(",") if text else ():
        word, equals, number = part.strip().partition("=")
        cause = _WORDS.get(word.strip().lower().replace("_", "-"))
        if cause is None:
            raise UsageError(
                f"{place}={text}: {word!r} is no cause; write one of {', '.join(_WORDS)}"
            )
        number = number.strip().lower()
        if equals and number == "unlimited":
            limits[cause] = None
        elif number.isascii() and number.isdigit() and int(number) <= _MOST:
            limits[cause] = int(number)
        else:
            raise UsageError(
                f"{place}={text}: {part!r} has no count; write {word}=10 or {word}=unlimited"
            )
    return limits

"""Slurm's time grammar: ``M``, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``, ``D-HH:MM:SS``.

The one trap a reader must know: a bare number is *minutes*, while ``squeue`` prints ``MM:SS`` for
short times and ``D-HH:MM:SS`` for long ones. Reading and writing are inverse: what
:func:`format_walltime` writes, :func:`parse_walltime` reads back to the same second.

Stricter than Slurm in one point: a field below a larger one must be in its range (``1:75:00`` is
refused), because such a value is nearly always a slip of the hand.
"""

from __future__ import annotations

import re

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400

# Nine digits of minutes are 1900 years; the bound keeps every later product exact in C and Lua.
_MAX_DIGITS = 9
_PLAIN = re.compile(r"[0-9]+(:[0-9]+){0,2}", re.ASCII)
_DAYS = re.compile(r"[0-9]+-[0-9]+(:[0-9]+){0,2}", re.ASCII)


def parse_walltime(text: str) -> int:
    """Seconds that ``text`` stands for. Raises ``ValueError`` with the reason."""
    if _DAYS.fullmatch(text):
        days, clock = text.split("-")
    elif _PLAIN.fullmatch(text):
        days, clock = "", text
    else:
        raise ValueError("not a time")
    fields = clock.split(":")
    if any(len(field) > _MAX_DIGITS for field in (days, *fields)):
        raise ValueError("the time is too long")
    numbers = [int(field) for field in fields]
    if days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        if hours > 23:
            raise ValueError("the hours after days go from 0 to 23")
        leading = False
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
        leading = False
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
        leading = True
    if (minutes > 59 and not leading) or seconds > 59:
        raise ValueError("minutes and seconds below a larger unit go from 0 to 59")
    return int(days or 0) * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds


def format_walltime(seconds: float) -> str:
    """``HH:MM:SS``, or ``D-HH:MM:SS`` from one day on; fractions are rounded up."""
    whole = int(-(-seconds // 1))
    if whole < 0:
        raise ValueError(f"a duration cannot be negative: {seconds}")
    days, rest = divmod(whole, DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    minutes, secs = divmod(rest, MINUTE_S)
    clock = f"{hours:02d}:{minutes:02d}:{secs:02d}"
    return f"{days}-{clock}" if days else clock


def parse_slurm_limit(text: str) -> float | None:
    """A time as ``squeue`` and ``scontrol`` print it; ``None`` where there is no limit.

    ``INVALID`` and ``N/A`` also give ``None``. Raises ``ValueError`` for anything else.
    """
    word = text.strip()
    if word.upper() in {"UNLIMITED", "INFINITE", "NOT_SET", "INVALID", "N/A", ""}:
        return None
    return float(parse_walltime(word))

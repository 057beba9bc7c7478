"""Times as options of the product take them: ``90``, ``90s``, ``1.5h``, ``2:00:00``. Pure.

One grammar for every option of ``ft-run`` and ``slurm-ext`` that takes a time. A plain number is
seconds, unlike in Slurm's ``--time``, where it is minutes: what is asked here mostly takes seconds,
and variables and configuration count in them as well. Only ``--ft-*`` options of sbatch, which
stand beside ``--time``, keep to Slurm's grammar alone (`slurm_ext.domain.walltime`).

Read at the start of every rank: nothing is imported before a colon asks for it.
"""

from __future__ import annotations

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# For messages: what to write instead.
FORMS = "seconds, or a time as in 90s, 10m, 2h, 1d, 1:30:00 or 1-12:00:00"
# Of a plain number, also in the form that a program prints a large one in.
_DIGITS = frozenset("0123456789.eE+")
# 30 years: beyond it a slip.
_MOST_S = 1e9


def parse_duration(text: str) -> float:
    """Seconds that ``text`` stands for, 0 or more. Raises ValueError with the reason."""
    word = text.strip()
    if ":" in word or "-" in word[1:]:
        from slurm_ext.domain.walltime import parse_walltime

        found = float(parse_walltime(word))
    else:
        unit_s = UNITS_S.get(word[-1:].lower())
        number = word if unit_s is None else word[:-1]
        if not set(number) <= _DIGITS:
            raise ValueError("not a time")
        try:
            found = float(number) * (1.0 if unit_s is None else unit_s)
        except ValueError:
            raise ValueError("not a time") from None
    if found > _MOST_S:
        raise ValueError("the time is too long")
    return found


def seconds_text(seconds: float) -> str:
    """The same as a plain number of seconds, for a variable: ``300``, ``1.5``."""
    return str(int(seconds)) if seconds == int(seconds) else repr(seconds)

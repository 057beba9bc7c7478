"""Value grammars of the ``--ft-*`` options: text in, canonical text out, or a reason.

No I/O and no clock here: ``now_s`` comes from the caller, and the local time zone is the process's
own (through :func:`time.mktime`, the same libc call that the C plugin and Lua make, so that the
three agree in every zone). Canonical text parses to itself; everything downstream (typed fields,
JSON, environment) reads only canonical text. ``spank/grammar.c`` and ``site/lua/ft_grammar.lua``
are the two other writings of the same grammar.

Regular expressions are matched with ``fullmatch`` and the ASCII flag: ``$`` would let a trailing
newline pass, ``\\d`` would let foreign digits pass.
"""

from __future__ import annotations

import calendar
import re
import time

from slurm_ext.domain.options import MAX_GPU_RANGES, Grammar, Option
from slurm_ext.domain.walltime import DAY_S, HOUR_S, MINUTE_S, format_walltime, parse_walltime

MAX_REVISION = 64
MAX_METRIC = 48
# No value is longer; a longer text is refused before anything looks at it.
MAX_VALUE_BYTES = 512

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+:-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9._/+:@%,=#][A-Za-z0-9._/+:@%,=#~-]*", re.ASCII)
_COUNT = re.compile(r"[1-9][0-9]*", re.ASCII)
_DECIMAL = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]{1,4}))?", re.ASCII)
_QUALITY = re.compile(
    r"([A-Za-z][A-Za-z0-9_./@-]*)(>=|<=)(-?)(0|[1-9][0-9]*)(?:\.([0-9]{1,6}))?", re.ASCII
)
_WHEN = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:T([0-9]{2}):([0-9]{2})(?::([0-9]{2}))?(Z|[+-][0-9]{2}:[0-9]{2})?)?",
    re.ASCII,
)
_IN_UNITS = re.compile(r"([1-9][0-9]{0,5})(minute|hour|day|week)s?", re.ASCII)
_UNIT_S = {"minute": MINUTE_S, "hour": HOUR_S, "day": DAY_S, "week": 7 * DAY_S}
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
_FIRST_S, _END_S = 946_684_800, 7_258_118_400  # 2000-01-01 and 2200-01-01 in UTC


def canonical(option: Option, text: str, now_s: float) -> str:
    """Canonical text of ``text`` under the option's grammar; ``ValueError`` gives the reason."""
    if not text:
        raise ValueError("the value is empty")
    if len(text) > MAX_VALUE_BYTES:
        raise ValueError("the value is too long")
    return _PARSERS[option.grammar](option, text, now_s)


def parse_count(text: str, low: int, high: int) -> int:
    """A whole number without sign, separators or leading zeros."""
    if not _COUNT.fullmatch(text):
        raise ValueError("not a whole number above 0")
    if len(text) > len(str(high)) or not low <= int(text) <= high:
        raise ValueError(f"out of range ({low} to {high})")
    return int(text)


def parse_gpu_ranges(text: str, high: int) -> tuple[tuple[int, int], ...]:
    """Counts and ranges, sorted, joined where they touch: ``4-8,1,2`` gives ``(1, 2), (4, 8)``."""
    ranges: list[tuple[int, int]] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        low = parse_count(first, 1, high)
        top = parse_count(last, 1, high) if dash else low
        if top < low:
            raise ValueError("a range runs backwards")
        ranges.append((low, top))
    joined: list[tuple[int, int]] = []
    for low, top in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], top))
        else:
            joined.append((low, top))
    if len(joined) > MAX_GPU_RANGES:
        raise ValueError(f"more than {MAX_GPU_RANGES} separate ranges")
    return tuple(joined)


def parse_deadline(text: str, now_s: float) -> int:
    """Seconds since the epoch; local time where no zone is given."""
    if text.startswith("now+"):
        when = int(now_s) + _relative(text[4:])
    elif match := _WHEN.fullmatch(text):
        when = _absolute(match)
    else:
        raise ValueError("not a date and time")
    if not _FIRST_S <= when < _END_S:  # a zone can move the last day out of the range
        raise ValueError(f"the year is not from {_FIRST_YEAR} to {_LAST_YEAR}")
    if when <= now_s:
        raise ValueError("this time has passed")
    return when


def utc_text(epoch_s: int) -> str:
    """ISO 8601 in UTC, the canonical text of a deadline."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s))


def _relative(text: str) -> int:
    if match := _IN_UNITS.fullmatch(text):
        seconds = int(match[1]) * _UNIT_S[match[2]]
    elif ":" in text or "-" in text:
        seconds = parse_walltime(text)
    else:
        raise ValueError("a number without a unit is ambiguous")
    if seconds > 10 * 365 * DAY_S:
        raise ValueError("more than ten years ahead")
    return seconds


def _absolute(match: re.Match[str]) -> int:
    year, month, day = int(match[1]), int(match[2]), int(match[3])
    hour, minute, second = (int(match[i] or 0) for i in (4, 5, 6))
    if not _FIRST_YEAR <= year <= _LAST_YEAR:
        raise ValueError(f"the year is not from {_FIRST_YEAR} to {_LAST_YEAR}")
    if not 1 <= month <= 12 or not 1 <= day <= calendar.monthrange(year, month)[1]:
        raise ValueError("there is no such day")
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError("there is no such time of day")
    zone = match[7]
    if not zone:
        return int(time.mktime((year, month, day, hour, minute, second, -1, -1, -1)))
    utc = calendar.timegm((year, month, day, hour, minute, second, 0, 0, 0))
    if zone == "Z":
        return utc
    off_hours, off_minutes = int(zone[1:3]), int(zone[4:6])
    if off_hours > 14 or off_minutes > 59:
        raise ValueError("there is no such time zone")
    offset = off_hours * HOUR_S + off_minutes * MINUTE_S
    return utc - offset if zone[0] == "+" else utc + offset


def _model(option: Option, text: str, _now_s: float) -> str:
    name, at, revision = text.partition("@")
    if not _MODEL.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        raise ValueError("not a model name")
    if len(name) > option.high or len(revision) > MAX_REVISION:
        raise ValueError("the name or the revision is too long")
    return text


def _path(option: Option, text: str, _now_s: float) -> str:
    if len(text) > option.high:
        raise ValueError("the path is too long")
    if not _PATH.fullmatch(text):
        raise ValueError("a character that is not allowed in the path")
    return text


def _count(option: Option, text: str, _now_s: float) -> str:
    return str(parse_count(text, option.low, option.high))


def _decimal(option: Option, text: str, _now_s: float) -> str:
    match = _DECIMAL.fullmatch(text)
    if not match:
        raise ValueError("not a decimal number")
    whole, fraction = match[1], (match[2] or "").rstrip("0")
    if len(whole) > len(str(option.high)) or int(whole) + bool(fraction) > option.high:
        raise ValueError(f"above {option.high}")
    if whole == "0" and not fraction:
        raise ValueError("not above 0")
    return f"{whole}.{fraction}" if fraction else whole


def _batch(option: Option, text: str, _now_s: float) -> str:
    first, dash, last = text.partition("-")
    low = parse_count(first, 1, option.high)
    top = parse_count(last, 1, option.high) if dash else low
    if top < low:
        raise ValueError("the range runs backwards")
    return f"{low}-{top}" if top > low else str(low)


def _gpus(option: Option, text: str, _now_s: float) -> str:
    if text in {"requested", "auto"}:
        return text
    return ",".join(
        f"{low}-{top}" if top > low else str(low)
        for low, top in parse_gpu_ranges(text, option.high)
    )


def _shape(option: Option, text: str, _now_s: float) -> str:
    sides = text.split("x")
    if len(sides) > 4:
        raise ValueError("more than four numbers")
    return "x".join(str(parse_count(side, 1, option.high)) for side in sides)


def _layers(option: Option, text: str, now_s: float) -> str:
    return text if text in option.choices else _count(option, text, now_s)


def _choice(option: Option, text: str, _now_s: float) -> str:
    if text not in option.choices:
        raise ValueError("not one of the choices")
    return text


def _deadline(_option: Option, text: str, now_s: float) -> str:
    return utc_text(parse_deadline(text, now_s))


def _quality(option: Option, text: str, _now_s: float) -> str:
    match = _QUALITY.fullmatch(text)
    if not match:
        raise ValueError("not a metric with a bound")
    metric, comparison, sign, whole, fraction = match.groups()
    fraction = (fraction or "").rstrip("0")
    if len(metric) > MAX_METRIC:
        raise ValueError("the name of the metric is too long")
    if len(whole) > len(str(option.high)) or int(whole) + bool(fraction) > option.high:
        raise ValueError("the bound is too large")
    if whole == "0" and not fraction:
        sign = ""
    return f"{metric}{comparison}{sign}{whole}" + (f".{fraction}" if fraction else "")


def _time(option: Option, text: str, _now_s: float) -> str:
    seconds = parse_walltime(text)
    if not option.low <= seconds <= option.high:
        raise ValueError("out of range")
    return format_walltime(seconds)


_PARSERS = {
    Grammar.MODEL: _model,
    Grammar.PATH: _path,
    Grammar.COUNT: _count,
    Grammar.DECIMAL: _decimal,
    Grammar.BATCH: _batch,
    Grammar.GPUS: _gpus,
    Grammar.SHAPE: _shape,
    Grammar.LAYERS: _layers,
    Grammar.CHOICE: _choice,
    Grammar.SWITCH: _choice,
    Grammar.DEADLINE: _deadline,
    Grammar.QUALITY: _quality,
    Grammar.TIME: _time,
}

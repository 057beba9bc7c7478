"""Durations, moments and counts as people read them. Pure: "now" and the zone are arguments."""

from __future__ import annotations

from datetime import datetime, tzinfo

# Below this, seconds are worth telling beside minutes.
_EXACT_S = 600


def span(seconds: float) -> str:
    """Slurm's ``[D-]HH:MM:SS``, rounded to whole seconds; negative ones keep their sign."""
    whole = round(abs(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    text = f"{hours:02d}:{minutes:02d}:{left:02d}"
    if days:
        text = f"{days}-{text}"
    return f"-{text}" if seconds < 0 and whole else text


def about(seconds: float) -> str:
    """A duration in words with two units at most: ``1 h 20 min``, ``45 s``."""
    whole = round(abs(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < _EXACT_S:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def moment(at_s: float, now_s: float, zone: tzinfo | None = None) -> str:
    """A local time, with the date where it is not today's; ``zone`` None is the machine's."""
    at = datetime.fromtimestamp(at_s, zone)
    today = datetime.fromtimestamp(now_s, zone)
    if at.date() == today.date():
        return at.strftime("%H:%M:%S")
    return at.strftime("%Y-%m-%dT%H:%M:%S")


def counted(number: int, thing: str) -> str:
    """``1 GPU``, ``2 GPUs``: a count with its noun, for nouns with a plural in s."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"

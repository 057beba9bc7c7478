"""``sprio`` rows to the parts of a priority that matter here.

A job that is not in the answer is not ranked now (held; without ACCRUE_ALWAYS also leased or
dependent): that is not the same as a site factor of 0. A job in several partitions has a row for
each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_ext.domain.errors import SourceMissingError

SOURCE = "sprio"
# Job, priority, site factor, nice, then the weighted parts: age, association, fairshare, job size,
# partition, QOS; last the TRES part, which is a list (gres/gpu=12) or nothing.
FORMAT = "%i %Y %S %N %A %B %F %J %P %Q %T"
_NUMBERS = 10
_NONZERO = re.compile(r"=\s*-?[\d.]*[1-9]")


@dataclass(frozen=True, slots=True)
class Ranking:
    """One ranked job.

    ``priority_set`` tells that somebody wrote the priority itself: then Slurm shows none of the
    parts (they are empty or 0) beside a priority above 1, the least that a computed one can have.
    """

    site_factor: int
    priority: int
    priority_set: bool


def parse_priorities(text: str, known: dict[str, tuple[int, Ranking]]) -> dict[int, Ranking]:
    """Rankings by raw job id. Raises SourceMissingError where the answer was cut off.

    ``known`` holds rows of the last answer, parsed, and is brought up to date: most rows are equal
    from one cycle to the next, and reading thousands of numbers costs more than looking them up.
    """
    if text and not text.endswith("\n"):
        raise SourceMissingError(SOURCE, f"cut off in its last row {text[-60:]!r}")
    lines = text.splitlines()
    rows = [known.get(line) or _parse(line) for line in lines]
    known.clear()
    known.update(zip(lines, rows, strict=True))
    return dict(rows)


def _parse(line: str) -> tuple[int, Ranking]:
    fields = line.split()
    try:
        job_id, priority, site, *parts = map(int, fields[:_NUMBERS])
    except ValueError as exc:
        raise SourceMissingError(SOURCE, f"the row {line[:80]!r} cannot be read") from exc
    if len(fields) < _NUMBERS:
        raise SourceMissingError(
            SOURCE, f"the row {line[:80]!r} has {len(fields)} of {_NUMBERS} numbers"
        )
    tres = any(_NONZERO.search(field) for field in fields[_NUMBERS:])
    frozen = priority > 1 and site == 0 and not any(parts) and not tres
    return job_id, Ranking(site, priority, frozen)

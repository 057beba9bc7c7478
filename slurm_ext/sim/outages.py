"""Node outages of a replay: when a node is away, and the file that says so.

The file is CSV with the columns ``node,down_s,up_s``: seconds of the trace's own time, ``up_s``
empty where the node never comes back. Intervals of one node may overlap: it is up when none holds.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import DataError

COLUMNS = ("node", "down_s", "up_s")


@dataclass(frozen=True, slots=True)
class Outage:
    """A node is away from ``down_s`` until ``up_s`` (infinity: for good)."""

    node: str
    down_s: float
    up_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.down_s) and self.down_s < self.up_s):
            raise ValueError(f"outage of {self.node} from {self.down_s} to {self.up_s}")


def read_outages(path: Path, nodes: Collection[str]) -> tuple[Outage, ...]:
    """Outages from a file. Raises DataError for a bad row or a node that the machine lacks."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            return parse_outages(handle, str(path), nodes)
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a readable CSV file") from exc


def parse_outages(lines: Iterable[str], place: str, nodes: Collection[str]) -> tuple[Outage, ...]:
    """Outages from lines of CSV; ``place`` names the source in errors."""
    reader = csv.DictReader(lines)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(place, f"no column {', '.join(missing)}", f"name {', '.join(COLUMNS)}")
    found: list[Outage] = []
    for row in reader:
        where = f"{place}, line {reader.line_num}"
        if None in row:
            raise DataError(where, "more cells than columns", "leave out what is too much")
        name = (row["node"] or "").strip()
        if name not in nodes:
            raise DataError(where, f"unknown node {name!r}", f"name one of {_some(nodes)}")
        try:
            down = float(row["down_s"])
            up = float(row["up_s"]) if (row["up_s"] or "").strip() else math.inf
            found.append(Outage(name, down, up))
        except (TypeError, ValueError) as exc:
            raise DataError(
                where,
                f"from {row['down_s']!r} to {row['up_s']!r}: not an interval of seconds",
                "write two numbers, the first one smaller",
            ) from exc
    return tuple(found)


def _some(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]}"

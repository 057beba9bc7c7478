"""``slurm-ext simulate compare``: two runs of the simulator side by side.

Each policy that both runs have is compared; where each run has just one policy, those two are.
First of all it is said in what the settings differ: numbers of different workloads or machines say
nothing about policies.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.summary import LESS, MORE, NOTICEABLE

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `--json` wrote: numbers per policy, JCT per policy and job, and the setting (empty in a
    document of an older release)."""

    path: Path
    numbers: Mapping[str, Mapping[str, float]]
    jct_s: Mapping[str, Mapping[str, float]]
    setting: Mapping[str, Any]


def compare(first: Path, second: Path) -> int:
    """Print both runs, metric by metric; 1 where they have nothing in common."""
    for line in side_by_side(read_run(first), read_run(second)):
        print(line)
    return 0


def read_run(path: Path) -> Recorded:
    """A run that `--json` wrote. Raises DataError where it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        numbers = {
            str(name): {str(k): float(v) for k, v in values.items() if _is_number(v)}
            for name, values in document["policies"].items()
        }
        jct_s = {
            str(name): {str(row["job_id"]): float(row["end_s"] - row["submit_s"]) for row in rows}
            for name, rows in document["jobs"].items()
        }
        setting = dict(document.get("setting", {}))
    except OSError as exc:
        raise DataError(
            str(path), f"cannot be read: {exc.strerror}", "name a readable file"
        ) from exc
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise DataError(
            str(path), f"not a run of the simulator ({exc!r})", "write it with simulate --json"
        ) from exc
    return Recorded(path, numbers, jct_s, setting)


def side_by_side(first: Recorded, second: Recorded) -> Iterator[str]:
    """Lines of the comparison. Raises DataError where no policy is common."""
    pairs = [(name, name) for name in first.numbers if name in second.numbers]
    if not pairs and len(first.numbers) == len(second.numbers) == 1:
        pairs = [(next(iter(first.numbers)), next(iter(second.numbers)))]
    if not pairs:
        raise DataError(
            f"{first.path} and {second.path}",
            f"no common policy ({', '.join(first.numbers)}; {', '.join(second.numbers)})",
            "replay one policy in both",
        )
    yield f"A = {first.path}"
    yield f"B = {second.path}"
    yield from _settings(first.setting, second.setting)
    yield f"{'POLICY':16} {'METRIC':24} {'A':>12} {'B':>12} {'B/A':>8}  BETTER"
    for mine, theirs in pairs:
        label = mine if mine == theirs else f"{mine}|{theirs}"
        a, b = first.numbers[mine], second.numbers[theirs]
        for metric in a:
            if metric in b:
                yield _line(label, metric, a[metric], b[metric])
        yield from _jobs(label, first.jct_s.get(mine, {}), second.jct_s.get(theirs, {}))


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    if not a or not b:
        yield "settings unknown: written by an older release; write it again to compare them"
        return
    kept = a.get("intervals_s", {}).keys() & b.get("intervals_s", {}).keys()
    a, b = ({**each, "intervals_s": _only(each, kept)} for each in (a, b))
    odd = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
    if not odd:
        yield "settings: the same workload, machine and terms"
    for key in odd:
        said = (_said(each[key]) if key in each else "not told" for each in (a, b))
        yield "settings differ in {}: A {}, B {}".format(key, *said)


def _only(setting: Mapping[str, Any], policies: Collection[str]) -> dict[str, float]:
    """Intervals of the policies that both runs have."""
    return {name: s for name, s in setting.get("intervals_s", {}).items() if name in policies}


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(_said(each) for each in value) or "none"
    return "none" if value in (None, "") else str(value)


def _jobs(label: str, a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[str]:
    common = [key for key in a if key in b]
    if not common:
        yield f"{label:16} no common job"
        return
    faster = sum(b[key] < a[key] and b[key] <= (1 - NOTICEABLE) * a[key] for key in common)
    slower = sum(b[key] > a[key] and b[key] >= (1 + NOTICEABLE) * a[key] for key in common)
    only = len(a) - len(common), len(b) - len(common)
    yield (
        f"{label:16} of {len(common)} common jobs B finishes {faster} at least 10 % sooner and "
        f"{slower} at least 10 % later"
        + (f"; {only[0]} only in A, {only[1]} only in B" if any(only) else "")
    )


def _line(label: str, metric: str, a: float, b: float) -> str:
    in_hours = metric.endswith("_s") or metric.startswith("gpu_s_")
    name = f"{metric[:-2]}_h" if metric.endswith("_s") else metric.replace("gpu_s_", "gpu_h_")
    scale = _HOUR_S if in_hours else 1.0
    ratio = f"{b / a:8.3f}" if a else f"{'-':>8}"
    line = f"{label:16} {name:24} {a / scale:12.4f} {b / scale:12.4f} {ratio}"
    # Sums that were added up in another order differ in the last bit: what is printed counts.
    same = f"{a / scale:.4f}" == f"{b / scale:.4f}" and (a == b or ratio.strip() == "1.000")
    return f"{line}  {_better(metric, a, b, same)}".rstrip()


def _better(metric: str, a: float, b: float, same: bool) -> str:
    """Which run has the better number; empty where that cannot be said of the metric."""
    if metric not in LESS | MORE:
        return ""
    if same:
        return "="
    return "B" if (b < a) == (metric in LESS) else "A"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

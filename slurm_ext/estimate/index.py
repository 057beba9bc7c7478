"""The throughput table in memory, arranged for lookups: built once, then only read. No I/O here.

A lookup asks for a model, a GPU type, settings and a placement and gets the curves measured there.
Where several recorded settings fit, the one that agrees in most columns wins. A blank column (of
the request: "the user did not say"; of the row: "nobody recorded it") fits everything and is told
in the note. Only the environment may differ outright: a table must not be worthless on the day of
a driver update, so such rows come last and with wider bounds.

The memo at the end is the only thing that changes after construction. It holds answers that depend
on nothing but the index and their key, so that it can be dropped at any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from slurm_ext.estimate.interpolate import SIGMAS, UNKNOWN_SPREAD, Curve, Point
from slurm_ext.estimate.measurement import Cost, CostKind, Measurement, Settings

MEMO_SIZE = 50_000  # answers; dropped all at once when full
MEASURED_FLOOR = 0.02  # no bound is closer than this: runs on one machine differ as much
OTHER_ENVIRONMENT_SPREAD = 0.1

_FIELDS = tuple(f.name for f in fields(Settings))
# With data rows kept per placement; by node count where the source gives no placement.
Place = tuple[int, ...] | int


@dataclass(frozen=True, slots=True)
class Match:
    """The curves (by accumulation) that answer for one placement, and what was assumed."""

    curves: Mapping[int, Curve]
    settings: Settings
    note: str
    spread: float = 0.0


class ThroughputIndex:
    """All measurements and costs of one table."""

    def __init__(
        self, measurements: Iterable[Measurement] = (), costs: Iterable[Cost] = ()
    ) -> None:
        grouped: dict[
            tuple[str, str], dict[Settings, dict[tuple[int, Place], dict[int, list[Measurement]]]]
        ] = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list))))
        self.rows = 0
        for m in measurements:
            self.rows += 1
            key = m.key
            place: Place = key.placement or key.nodes
            kind = (key.model, key.gpu_type.lower())
            grouped[kind][key.settings][key.gpus, place][key.accumulation].append(m)
        self._curves: dict[tuple[str, str], dict[Settings, dict[tuple[int, Place], Match]]] = {}
        for kind, by_settings in grouped.items():
            self._curves[kind] = {}
            for settings, by_place in by_settings.items():
                usual = _usual_batches(by_place.values())
                self._curves[kind][settings] = {
                    place: Match(
                        {k: _curve(ms, usual) for k, ms in sorted(by_accumulation.items())},
                        settings,
                        "",
                    )
                    for place, by_accumulation in by_place.items()
                }
        self._types: dict[str, tuple[str, ...]] = {}
        for model, gpu_type in sorted(self._curves):
            self._types[model] = (*self._types.get(model, ()), gpu_type)
        self._costs: dict[tuple[CostKind, str, str], dict[int, float]] = defaultdict(dict)
        for cost in costs:
            self._costs[cost.kind, cost.model, cost.gpu_type.lower()][cost.gpus] = cost.seconds
        self._memo: dict[Hashable, Any] = {}

    def knows(self, model: str) -> bool:
        """Whether any row is about this model."""
        return model in self._types

    def gpu_type(self, model: str, gpu_type: str) -> str:
        """The table's GPU type to use, lower case, or ``""`` where there is none.

        A blank ``gpu_type`` (gres.conf without types) stands for the only one of the model.
        """
        types = self._types.get(model, ())
        if not gpu_type:
            return types[0] if len(types) == 1 else ""
        return gpu_type.lower() if gpu_type.lower() in types else ""

    def gpu_types(self, model: str) -> tuple[str, ...]:
        """GPU types on which the model was measured, lower case."""
        return self._types.get(model, ())

    def matches(
        self, model: str, gpu_type: str, wanted: Settings, placement: tuple[int, ...]
    ) -> Iterator[Match]:
        """Curves for exactly this placement, best agreement of the settings first.

        Rows that record only the number of nodes ("scalability" rows) answer where no row has the
        placement.
        """
        by_settings = self._curves.get((model, self.gpu_type(model, gpu_type)), {})
        ranked = []
        for settings in by_settings:
            rank, note = _agreement(wanted, settings)
            if rank is not None:
                ranked.append((rank, repr(settings), note, settings))
        ranked.sort(key=lambda r: r[:2])
        gpus = sum(placement)
        for place, told in ((placement, ""), (len(placement), "measured by node count only")):
            for rank, _, note, settings in ranked:
                found = by_settings[settings].get((gpus, place))
                if found is not None:
                    notes = "; ".join(n for n in (told, note) if n)
                    spread = OTHER_ENVIRONMENT_SPREAD if rank[0] else 0.0
                    yield Match(found.curves, settings, notes, spread)

    def counts(self, model: str, gpu_type: str) -> tuple[int, ...]:
        """GPU counts measured for a model, ascending."""
        by_settings = self._curves.get((model, self.gpu_type(model, gpu_type)), {})
        return tuple(sorted({gpus for places in by_settings.values() for gpus, _ in places}))

    def cost_s(self, kind: CostKind, model: str, gpu_type: str, gpus: int) -> float | None:
        """Seconds of one kind; the most specific recorded value, ``None`` where there is none.

        Among GPU counts the exact one wins, then "any", then the nearest.
        """
        kept = gpu_type.lower()
        for where in ((model, kept), (model, ""), ("", kept), ("", "")):
            by_gpus = self._costs.get((kind, *where))
            if by_gpus:
                for count in (gpus, 0):
                    if count in by_gpus:
                        return by_gpus[count]
                return by_gpus[min(by_gpus, key=lambda count: (abs(count - gpus), count))]
        return None

    def startup_s(self, model: str, gpu_type: str, gpus: int) -> float:
        """What one start costs before and beside its steps: cold start and checkpoint."""
        return sum(
            self.cost_s(kind, model, gpu_type, gpus) or 0.0
            for kind in (CostKind.COLD_START, CostKind.CHECKPOINT)
        )

    def recall(self, key: Hashable) -> Any:
        """An answer remembered under ``key``, else ``None``."""
        return self._memo.get(key)

    def remember(self, key: Hashable, answer: Any) -> None:
        """Keep an answer that depends on nothing but this index and ``key``."""
        if len(self._memo) >= MEMO_SIZE:
            self._memo.clear()
        self._memo[key] = answer


def _usual_batches(
    places: Iterable[Mapping[int, list[Measurement]]],
) -> dict[tuple[int, str], frozenset[int]]:
    """Local batches that one source measured on most placements, by accumulation and source.

    "Most" (more than half, and more than one) keeps a single run at an odd batch from making a
    hole of it everywhere else.
    """
    seen: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    curves: Counter[tuple[int, str]] = Counter()
    for by_accumulation in places:
        for accumulation, measurements in by_accumulation.items():
            batches: dict[str, set[int]] = defaultdict(set)
            for m in measurements:
                batches[m.source].add(m.key.local_batch)
            for source, values in batches.items():
                curves[accumulation, source] += 1
                seen[accumulation, source].update(values)
    return {
        group: frozenset(b for b, n in counter.items() if n > 1 and 2 * n > curves[group])
        for group, counter in seen.items()
    }


def _curve(
    measurements: list[Measurement], usual: Mapping[tuple[int, str], frozenset[int]]
) -> Curve:
    points, walls, present = [], set(), set()
    for m in measurements:
        present.add(m.key.local_batch)
        if m.out_of_memory or not m.count:
            walls.add(m.key.local_batch)
        else:
            spread = _spread(m)
            points.append(
                Point(
                    m.key.local_batch,
                    m.throughput,
                    m.throughput / (1 + spread),
                    m.throughput * (1 + spread),
                    m.sync_time_s,
                    m.memory_gb,
                )
            )
        walls |= usual.get((m.key.accumulation, m.source), frozenset())
    walls = {w for w in walls if w not in present} | {
        m.key.local_batch for m in measurements if m.out_of_memory or not m.count
    }
    points.sort(key=lambda p: p.local_batch)
    return Curve(measurements[0].key.gpus, tuple(points), tuple(sorted(walls)))


def _spread(m: Measurement) -> float:
    """Relative half width of the bounds of one measurement."""
    if m.variance is None or not m.key.settings.environment:
        # Not known to be measured on this kind of machine, or only once.
        floor = UNKNOWN_SPREAD
    else:
        floor = MEASURED_FLOOR
    measured = SIGMAS * (m.variance or 0.0) ** 0.5 / m.throughput if m.throughput > 0 else 0.0
    return max(floor, measured)


def _agreement(wanted: Settings, recorded: Settings) -> tuple[tuple[int, int, int] | None, str]:
    """Rank (less is better) and note, or no rank where the two contradict each other."""
    if wanted == recorded:
        return (0, 0, 0), ""
    stale = assumed = blank = 0
    told: list[str] = []
    for name in _FIELDS:
        want, have = getattr(wanted, name), getattr(recorded, name)
        if want == have:
            continue
        word = name.replace("_", " ")
        if have in ("", None) or (have == 0 and name in ("stages", "micro_batches")):
            blank += 1
            told.append(f"{word} not recorded")
        elif want in ("", None) or (want == 0 and name in ("stages", "micro_batches")):
            assumed += 1
            told.append(f"{word} {_shown(have)} assumed")
        elif name == "environment":
            stale = 1
            told.append("measured in another environment")
        else:
            return None, ""
    return (stale, assumed, blank), _joined(told)


def _joined(told: list[str]) -> str:
    """``a, b not recorded`` instead of the same words for every column."""
    suffix = " not recorded"
    missing = [t.removesuffix(suffix) for t in told if t.endswith(suffix)]
    others = [t for t in told if not t.endswith(suffix)]
    if missing:
        others.append(", ".join(missing) + suffix)
    return "; ".join(others)


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
